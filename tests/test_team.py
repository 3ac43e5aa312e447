"""Calls on tensors run on the threads of PyTorch's OpenMP, and their results lie as its own do."""

import ctypes
import importlib
import os
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

import scaledot as sd
from scaledot import _threads
from scaledot._kernels import atomics, jit, team, threads

torch = pytest.importorskip("torch")
needs_team = pytest.mark.skipif(team._parallel() is None, reason="PyTorch is built without it")
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")

COUNTER, NUM_TASKS, DONE, WORKERS = range(0, 32, 8)


def count_tasks(call, worker, budget):
    """Take tasks until none is left, one at a visit; note which workers have come."""
    task = atomics.add(call, 1)
    if task >= atomics.load(call + NUM_TASKS):
        return 0
    atomics.add(call + DONE, 1)
    if task == 0:  # not before every thread of two has taken part
        for _ in range(10**8):
            if atomics.load(call + WORKERS + 8):
                break
            atomics.pause()
    atomics.store(call + WORKERS + 8 * worker, 1)
    return 1


def never():
    raise AssertionError("nothing is to be stopped")


def fail(call, worker, budget):
    return -5 if worker == 0 else 0


@pytest.fixture(scope="module")
def kernels():
    return {f.__name__: jit.kernel(f) for f in (count_tasks, fail)}


@pytest.fixture
def two_threads():
    before = torch.get_num_threads(), _threads._num_threads
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before[0])
    _threads._num_threads = before[1]


@needs_team
def test_every_task_is_done_once(kernels, two_threads):
    board = np.zeros(8, dtype=np.int64)
    board[NUM_TASKS // 8] = 1000
    assert team.run(kernels["count_tasks"].address, board.ctypes.data, 2, 2, never, 8) == 0
    assert board[DONE // 8] == 1000
    assert list(board[WORKERS // 8 :]) == [1, 1, 0, 0, 0]


@needs_team
def test_threads_without_work_leave(kernels, two_threads):
    board = np.zeros(8, dtype=np.int64)
    board[NUM_TASKS // 8] = 10
    board[WORKERS // 8 + 1] = 1  # nobody waits
    assert team.run(kernels["count_tasks"].address, board.ctypes.data, 1, 2, never, 8) == 0
    assert board[DONE // 8] == 10
    assert list(board[WORKERS // 8 :]) == [1, 1, 0, 0, 0]


@needs_team
def test_signals_are_seen_between_slices(kernels, two_threads, monkeypatch):
    """What a handler raises ends the call, when all threads have left; a fork leaves the team."""
    board = np.zeros(8, dtype=np.int64)
    board[NUM_TASKS // 8], board[WORKERS // 8 + 1] = 10**6, 1
    parallel, stopped, rounds = team._parallel(), [], []

    def start(*arguments):
        parallel(*arguments)
        rounds.append(int(board[DONE // 8]))
        if len(rounds) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(team, "_parallel", lambda: start)
    arguments = kernels["count_tasks"].address, board.ctypes.data, 2, 2
    with pytest.raises(KeyboardInterrupt):
        team.run(*arguments, lambda: stopped.append(True), 8)
    assert stopped == [True]
    assert rounds == [2, 4, 6]
    monkeypatch.setattr(team, "_is_child", True)
    assert team.run(*arguments, never, 8) == threads.MORE
    assert len(rounds) == 3


@needs_team
def test_an_error_reaches_the_caller(kernels, two_threads):
    board = np.zeros(8, dtype=np.int64)
    assert team.run(kernels["fail"].address, board.ctypes.data, 2, 2, never, 8) == -5


def test_the_number_of_threads(two_threads, monkeypatch):
    tensor, array = torch.zeros(1), np.zeros(1)
    monkeypatch.delenv(_threads.VARIABLE, raising=False)
    _threads._num_threads = None
    torch.set_num_threads(3)
    assert team.num_threads(tensor) == 3
    assert team.num_threads(array) == sd.get_num_threads() == _threads._default()
    monkeypatch.setenv(_threads.VARIABLE, "5")
    assert team.num_threads(tensor) == team.num_threads(array) == 5
    sd.set_num_threads(7)
    assert team.num_threads(tensor) == team.num_threads(array) == 7


def test_who_works(two_threads, monkeypatch):
    """Tensors go to the team where it has the size that PyTorch's operators want."""
    used = []

    def noted(name):
        module = importlib.import_module(f"scaledot._kernels.{name}")
        run = module.run

        def run_and_note(*arguments):
            used.append(name)
            return run(*arguments)

        monkeypatch.setattr(module, "run", run_and_note)

    noted("team")
    noted("threads")
    monkeypatch.setattr(team, "LEAST_WORK", 0)
    rng = np.random.default_rng(0)
    arrays = rng.normal(size=(3, 4, 100, 16)).astype(np.float32)
    expected = sd.attention(*arrays)
    assert used == ["threads"]
    tensors = torch.from_numpy(arrays).requires_grad_()
    has_team = team._parallel() is not None
    for of_torch, ours, name in ((2, 2, "team"), (2, None, "team"), (2, 3, "threads"),
                                 (1, 2, "threads")):  # fmt: skip
        used.clear()
        torch.set_num_threads(of_torch)
        _threads._num_threads = ours
        out = sd.attention(*tensors)
        out.sum().backward()
        assert np.array_equal(out.detach().numpy(), expected)
        assert set(used) == {name if has_team else "threads"}
    torch.set_num_threads(2)
    _threads._num_threads = 2
    work = 4 * 100 * 100 * 32
    for least, most, name in ((work, work + 1, "team"), (0, work, "threads"),
                              (work + 1, 2 * work, "threads")):  # fmt: skip
        monkeypatch.setattr(team, "LEAST_WORK", least)
        monkeypatch.setattr(team, "MOST_WORK", most)
        used.clear()
        sd.attention(*tensors.detach())
        assert used == [name if has_team else "threads"]


@needs_team
def test_narrow_heads_have_shorter_slices(two_threads, monkeypatch):
    budgets, parallel = [], team._parallel()

    def start(function, request, *rest):
        budgets.append((ctypes.c_int64 * 7).from_address(request)[team.BUDGET // 8])
        parallel(function, request, *rest)

    monkeypatch.setattr(team, "_parallel", lambda: start)
    monkeypatch.setattr(team, "LEAST_WORK", 0)
    for d in (1, 128):
        x = torch.ones(4, 300, d, requires_grad=True)
        sd.attention(x, x, x).sum().backward()
        scores = {budget // (2 * d + 1) for budget in budgets}
        # Widths of 2 and 256 beside 64: not a hundred times as many scores, but five.
        assert max(scores) <= team.SLICE // team.PER_SCORE
        budgets.clear()


def test_a_half_imported_pytorch_is_not_asked(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", type(sys)("torch"))
    assert team.num_threads(np.zeros(1)) == sd.get_num_threads()


def test_without_the_entry_point(two_threads, monkeypatch):
    monkeypatch.setattr(team, "_parallel", lambda: None)
    monkeypatch.setattr(team, "LEAST_WORK", 0)
    x = torch.ones(3, 4, 100, 16)
    assert not team.crew(x, 100)[1]
    assert torch.equal(sd.attention(*x), x[0])


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
@pytest.mark.parametrize("len_q", [1, 9, 70])
def test_results_lie_as_queries_do(lead, len_q):
    """By tokens where queries do, so that models join heads without a copy; else in order."""
    rng = np.random.default_rng(0)
    query = rng.normal(size=(*lead, len_q, 4, 8)).astype(np.float32).swapaxes(-3, -2)
    key, value = rng.normal(size=(2, *lead, 2, 20, 8)).astype(np.float32)
    for given in (query, np.ascontiguousarray(query)):
        out = sd.attention(*map(torch.from_numpy, (given, key, value)))
        assert out.shape == query.shape
        by_token = given is query and len_q > 1
        assert (out.transpose(-3, -2) if by_token else out).is_contiguous()
        expected = sd.attention(given, key, value)
        assert expected.flags.c_contiguous
        assert np.array_equal(out.numpy(), expected)
    out.view(*lead, -1)


def run_script(text):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)], capture_output=True, text=True, timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@needs_team
def test_no_threads_are_added():
    found = run_script("""
        import os, threading
        import numpy as np
        import torch
        import scaledot as sd

        torch.set_num_threads(2)
        x = torch.ones(3, 4, 1000, 16)
        torch.ones(500, 500) @ torch.ones(500, 500)
        def count():
            tasks = "/proc/self/task"
            return len(os.listdir(tasks)) if os.path.isdir(tasks) else threading.active_count()

        before = count()
        sd.attention(*x)
        print(count() - before)
        print(sum(t.name.startswith("scaledot-") for t in threading.enumerate()))
        sd.set_num_threads(3)
        sd.attention(*x.numpy())
        print(sum(t.name.startswith("scaledot-") for t in threading.enumerate()))
    """)
    assert found == ["0", "0", "2"]


@needs_team
@needs_fork
def test_a_child_of_a_fork_has_the_pool():
    found = run_script("""
        import os
        import torch
        import scaledot as sd
        from scaledot._kernels import team

        torch.set_num_threads(2)
        x = torch.arange(3 * 4 * 1000 * 16).reshape(3, 4, 1000, 16).sin()
        expected = sd.attention(*x).numpy().tobytes()
        assert team.crew(x, team.LEAST_WORK) == (2, 2)
        child = os.fork()
        if child == 0:
            alone = not team.crew(x, team.LEAST_WORK)[1]
            os._exit(0 if alone and sd.attention(*x).numpy().tobytes() == expected else 1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        assert sd.attention(*x).numpy().tobytes() == expected
    """)
    assert found == ["0"]


@needs_team
def test_several_threads_call(two_threads, monkeypatch):
    monkeypatch.setattr(team, "LEAST_WORK", 0)
    x = torch.arange(3 * 4 * 100 * 16).reshape(3, 4, 100, 16).sin()
    expected, wrong = sd.attention(*x), []

    def call():
        wrong.extend(not torch.equal(sd.attention(*x), expected) for _ in range(30))

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == [False] * 120


def test_the_request_is_as_long_as_its_fields():
    assert ctypes.sizeof(ctypes.c_int64) * 7 == team.BUDGET + 8
    assert threads.MORE == 1
