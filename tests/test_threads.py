"""Threads, processes and errors: other work is left alone, and the next call is as good as any."""

import functools
import multiprocessing
import os
import subprocess
import sys
import textwrap
import threading
import warnings

import pytest
import threadpoolctl

import cases
import scaledot as sd
from scaledot import _threads
from test_determinism import OPTIONS, arrays, bits, subset

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")


@pytest.fixture(autouse=True)
def restored_threads():
    """Let no number of threads stay set."""
    yield
    sd.set_num_threads(None)


def blas_threads():
    """Number of threads of each BLAS library that is loaded."""
    pools = threadpoolctl.threadpool_info()
    return {pool["filepath"]: pool["num_threads"] for pool in pools if pool["user_api"] == "blas"}


class UnusualError(Exception):
    """An exception that nothing else raises."""


def raising(error):
    def score_mod(score, batch, head, q_pos, kv_pos):
        raise error

    return score_mod


@functools.cache
def one_entry(impl):
    """Arguments of several tiles, and the bits of their result."""
    arguments = subset(arrays(), [0])
    return arguments, bits(arguments, impl)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("error", [UnusualError("why"), KeyboardInterrupt(), SystemExit(3)],
                         ids=lambda error: type(error).__name__)  # fmt: skip
def test_errors_of_mods_reach_the_caller(error, num_threads, impl):
    """As they are, from any thread, and the next call is as good as any."""
    sd.set_num_threads(num_threads)
    (arguments, before), limits = one_entry(impl), blas_threads()
    for _ in range(2):
        with pytest.raises(type(error)) as caught:
            sd.attention(**arguments, score_mod=raising(error), impl=impl)
        assert caught.value is error
        assert blas_threads() == limits
    assert bits(arguments, impl) == before
    assert blas_threads() == limits


def test_an_error_in_one_tile_of_many(impl):
    """The other tiles run in other threads, before and after it."""
    sd.set_num_threads(3)

    def score_mod(score, batch, head, q_pos, kv_pos):
        if (q_pos == 900).any() and (batch == 1).any():
            raise UnusualError
        return score + (0 * kv_pos).astype(score.dtype)

    arguments = arrays()
    with pytest.raises(UnusualError):
        sd.attention(**arguments, score_mod=score_mod, impl=impl)
    without = arguments | {"query": arguments["query"][:, :, :100]}
    got = sd.attention(**without, score_mod=score_mod, q_offset=800, impl=impl)
    assert got.tobytes() == sd.attention(**without, impl=impl).tobytes()


def test_calls_from_several_threads_at_once(impl):
    """Each thread has its own problem and gets its own answer."""
    sd.set_num_threads(2)
    options = [x for name, x in OPTIONS.items() if name != "mods" or impl != "kernels"]
    problems = [
        subset(arrays(number=number) | x, [number % 3]) for number, x in enumerate(options)
    ]
    truth = [bits(arguments, impl) for arguments in problems]
    barrier, found = threading.Barrier(4), [None] * len(problems)

    def work(first):
        barrier.wait(30)
        for number in range(first, len(problems), 4):
            found[number] = bits(problems[number], impl)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == truth


@pytest.mark.parametrize("impl", ["dense", "blockwise"])
def test_a_call_inside_a_mod(impl):
    """A mod may itself use attention, in every thread that runs it."""
    sd.set_num_threads(2)
    arguments, inner = arrays(), arrays(size=cases.Size(), number=1)
    expected, limits = bits(arguments, impl), blas_threads()

    def score_mod(score, *where):
        return score + 0 * sd.attention(**inner, impl=impl).sum()

    got = sd.attention(**arguments, score_mod=score_mod, impl=impl)
    assert got.tobytes() == expected[0]
    assert blas_threads() == limits


PRELUDE = """
import multiprocessing, os, signal, sys, threading, time, warnings
import numpy as np, threadpoolctl
import scaledot as sd

# Python 3.12 and later warn about any fork beside threads.
warnings.filterwarnings("ignore", r".*multi-threaded.*fork", DeprecationWarning)
signal.alarm(40)  # what hangs ends by a signal
impl = sys.argv[1]
sd.set_num_threads(2)
x = np.random.default_rng(0).standard_normal((2, 4, 600, 8)).astype(np.float32)


def run(**options):
    return sd.attention(x, x[:, :2], x[:, 2:], causal=True, impl=impl, **options).tobytes()


def blas():
    pools = threadpoolctl.threadpool_info()
    return {p["filepath"]: p["num_threads"] for p in pools if p["user_api"] == "blas"}


def in_thread(function):
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def child(work):
    number = os.fork()
    if number == 0:
        signal.alarm(20)
        os._exit(0 if work() else 1)
    return number


def status(number):
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])
"""


def in_a_fresh_process(impl, body):
    """Run code in a Python of its own, in which only NumPy and this package are loaded."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OPENBLAS_NUM_THREADS": "2",
    }
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PRELUDE + textwrap.dedent(body), impl],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stderr}"


# The kernels use no BLAS, and `dense` leaves it all its threads.
compiled_or_not = pytest.mark.parametrize("impl", ["blockwise", "kernels"])


@pytest.mark.parametrize("impl", ["dense", "blockwise", "kernels"])
def test_a_call_leaves_blas_as_it_was(impl):
    """In any thread, and whatever the thread of the first call was."""
    in_a_fresh_process(impl, """
        limits = blas()
        run()
        assert {name: blas()[name] for name in limits} == limits
        for _ in range(2):
            in_thread(run).join(30)
            assert {name: blas()[name] for name in limits} == limits
        with threadpoolctl.threadpool_limits(1):
            run()
            assert {blas()[name] for name in limits} == {1}
        assert {name: blas()[name] for name in limits} == limits
    """)  # fmt: skip


@needs_fork
@compiled_or_not
def test_a_fork_after_a_call(impl):
    """And before the first one."""
    in_a_fresh_process(impl, """
        first = child(lambda: bool(run()))
        assert status(first) == 0
        before = run()
        assert status(child(lambda: run() == before and run() == before)) == 0
        grandchild = child(lambda: status(child(lambda: run() == before)) == 0)
        assert status(grandchild) == 0
        assert run() == before
    """)  # fmt: skip


@needs_fork
@compiled_or_not
def test_processes_of_multiprocessing_by_fork(impl):
    in_a_fresh_process(impl, """
        before = run()
        with multiprocessing.get_context("fork").Pool(2) as pool:
            results = [pool.apply_async(run) for _ in range(4)]
            assert [result.get(30) for result in results] == [before] * 4
        assert run() == before
    """)  # fmt: skip


@needs_fork
def test_a_fork_inside_a_call_of_another_thread():
    """The child has no part in that call: BLAS has its threads back, and calls work."""
    in_a_fresh_process("blockwise", """
        limits = blas()
        before, inside, go_on, answer = run(), threading.Event(), threading.Event(), []

        def score_mod(score, *where):
            inside.set()
            assert go_on.wait(30)
            return score

        thread = in_thread(lambda: answer.append(run(score_mod=score_mod)))
        assert inside.wait(30)
        code = status(child(
            lambda: blas() == limits and run() == before and run() == before and blas() == limits
        ))
        go_on.set()
        thread.join(30)
        assert code == 0, code
        assert answer == [before]
        assert run() == before and blas() == limits
    """)  # fmt: skip


@needs_fork
def test_forks_while_calls_run():
    """At any moment of other threads' calls: of ours, for BLAS promises nothing there."""
    in_a_fresh_process("kernels", """
        before, stop, wrong = run(), threading.Event(), []

        def work():
            while not stop.is_set():
                if run() != before:
                    wrong.append(1)

        threads = [in_thread(work) for _ in range(2)]
        for _ in range(15):
            assert status(child(lambda: run() == before)) == 0
            time.sleep(0.003)
        stop.set()
        for thread in threads:
            thread.join(30)
        assert not wrong and run() == before
    """)  # fmt: skip


@needs_fork
@compiled_or_not
def test_a_fork_in_this_process(impl):
    """Beside whatever else the tests have loaded."""
    arguments = arrays(size=cases.Size())
    before = bits(arguments, impl)
    process = multiprocessing.get_context("fork").Process(
        target=lambda: sys.exit(bits(arguments, impl) != before)
    )
    with warnings.catch_warnings():
        # Python 3.12 and JAX warn about any fork beside threads.
        warnings.filterwarnings("ignore", r".*multi-threaded.*fork", DeprecationWarning)
        warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
        process.start()
    process.join(60)
    assert process.exitcode == 0
    assert bits(arguments, impl) == before


def test_what_was_set_is_taken_back(monkeypatch):
    monkeypatch.delenv(_threads.VARIABLE, raising=False)
    sd.set_num_threads(None)
    usual = sd.get_num_threads()
    assert not _threads.is_set()
    sd.set_num_threads(usual + 1)
    assert _threads.is_set()
    assert sd.get_num_threads() == usual + 1
    sd.set_num_threads(None)
    assert not _threads.is_set()
    assert sd.get_num_threads() == usual
