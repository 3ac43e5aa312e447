"""Gradients on several threads, in forks, interrupted, and in little memory."""

import threading
from pathlib import Path

import numpy as np
import pytest

import cases
import scaledot as sd
import test_determinism
from scaledot import _passes
from scaledot._derivatives import Grads
from scaledot._kernels import gradient
from scaledot._spec import Options
from test_gradients import slope_of_distance
from test_gradients_options import gradients, same_bits
from test_threads import in_a_fresh_process, needs_fork

pytestmark = pytest.mark.heavy


@pytest.fixture(autouse=True)
def restored_threads():
    """Let no number of threads stay set."""
    yield
    sd.set_num_threads(None)


# One head of one sequence: its ranges of keys are what threads share.
HEAD = cases.Size(len_q=300, len_kv=2100, d_k=16, d_v=16, lead=(1,), num_heads=1, num_kv_heads=1)
DRAWN = np.random.default_rng(11)
# The first range is the longest work by far: on several threads it is done last.
HEAVY_FIRST = np.zeros((3, 17), bool)
HEAVY_FIRST[:, :9] = HEAVY_FIRST[:, -1] = True
RANGES = {
    "plain": {},
    "causal": {"causal": True},
    "heavy first": {"block_mask": HEAVY_FIRST},
    "causal, top-left": {"causal": True, "q_offset": 0},
    "window over the middle": {"window": (900, 100), "q_offset": 1000},
    "bias of keys": {"bias": cases.normal(DRAWN, 2100), "causal": True},
    "bias of queries": {"bias": cases.normal(DRAWN, 300, 1)},
    "one bias": {"bias": cases.normal(DRAWN, 1, 1), "window": (1500, 0)},
    "full bias": {"bias": cases.normal(DRAWN, 300, 2100)},
    "ALiBi, softcap": {"alibi_slopes": np.array([0.01], "f"), "softcap": 2.0},
    "dropout": {"dropout": 0.3, "seed": 5, "causal": True},
    "mod": {"score_mod": (cases.distance_mod, slope_of_distance), "scale": 0.01},
}
DTYPES = ("float32", "bfloat16", "float64")


def problem(options, dtype, size=HEAD):
    """Arguments, a gradient of out and one of lse."""
    arguments = test_determinism.arrays(dtype, size)
    rng = np.random.default_rng(12)
    shape = (*size.lead, size.num_heads, size.len_q)
    wide = np.float64 if dtype == "float64" else np.float32
    grad_out = cases.normal(rng, *shape, size.d_v).astype(arguments["query"].dtype)
    return arguments | options, (grad_out, cases.normal(rng, *shape).astype(wide))


def of_each_number_of_threads(compute):
    """Results, as many as there are numbers, 7 of them more than there are ranges."""
    for num_threads in (1, 2, 3, 7):
        sd.set_num_threads(num_threads)
        yield compute()


def in_turn(names):
    """Parameters: each name with another dtype, the first with all of them."""
    some = [(name, DTYPES[i % 3]) for i, name in enumerate(names)]
    return pytest.mark.parametrize(
        ("name", "dtype"), [*some, *((names[0], d) for d in DTYPES if (names[0], d) not in some)]
    )


@in_turn(["heavy first", *(name for name in RANGES if name != "heavy first")])
def test_ranges_of_one_head_give_the_same_bits(name, dtype):
    arguments, grads = problem(RANGES[name], dtype)
    assert 2 * gradient.range_of(8 if dtype == "float64" else 4, 16, 16) < HEAD.len_kv
    first, *others = of_each_number_of_threads(lambda: gradients(arguments, *grads, "kernels"))
    assert all(np.any(x) for x in first[:3])
    for found in others:
        assert same_bits(found, first)


@in_turn(["causal", "window over the middle", "ALiBi, softcap", "dropout"])
def test_tangents_and_second_derivatives_give_the_same_bits(name, dtype):
    arguments, grads = problem(RANGES[name], dtype)
    query, key, value = operands = [arguments.pop(n) for n in ("query", "key", "value")]
    options = Options(**arguments)
    out, lse = _passes.forward(query, key, value, options)
    rng = np.random.default_rng(13)
    moves = Grads(*(cases.normal(rng, *x.shape).astype(x.dtype) for x in operands))

    def compute():
        moved = _passes.tangent(query, key, value, options, out, lse, moves)
        second = _passes.second(query, key, value, options, out, lse, *grads, moves)
        return (*moved, *second.grads, second.grad_out, second.grad_lse)

    first, *others = of_each_number_of_threads(compute)
    assert all(np.any(x) for x in first if x is not None)
    for found in others:
        assert same_bits(found, first)


def test_calls_from_several_threads_at_once():
    """Each thread has its own problem and gets its own answer, whoever works for it."""
    sd.set_num_threads(3)
    names = ("causal", "bias of keys", "dropout", "window over the middle")
    problems = [problem(RANGES[name], DTYPES[i % 2]) for i, name in enumerate(names)]
    truth = [gradients(arguments, *grads) for arguments, grads in problems]
    barrier, found = threading.Barrier(4), {}

    def work(first):
        barrier.wait(30)
        for turn in range(4):
            number = (first + turn) % 4
            arguments, grads = problems[number]
            found[first, number] = gradients(arguments, *grads)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 16
    for (_, number), got in found.items():
        assert same_bits(got, truth[number])


def test_an_error_of_the_derivative_reaches_the_caller():
    """And the next call is right."""
    arguments, grads = problem({}, "float32")
    before = gradients(arguments, *grads)

    def broken(score, batch, head, q_pos, kv_pos):
        if kv_pos == 1500:
            raise ZeroDivisionError
        return score

    def plain(score, batch, head, q_pos, kv_pos):
        return score

    for num_threads in (1, 3):
        sd.set_num_threads(num_threads)
        # By array operations, which are to show the error, this one is a branch.
        with pytest.raises(TypeError, match=r"score_mod.*a branch or a conversion"):
            gradients(arguments | {"score_mod": (plain, broken)}, *grads)
        assert same_bits(gradients(arguments, *grads), before)


BACK = """
from scaledot import _passes
from scaledot._derivatives import Grads
from scaledot._kernels import threads
from scaledot._spec import Options
sd.set_num_threads(3)
y = x[:1, :1].repeat(5, axis=-2)


def back(**options):
    found = sd.attention_vjp(y, y, y, causal=True, impl="kernels", **options)[1](y)
    return [g.tobytes() for g in found[:3]]
"""


def fresh(body):
    """Run in a process of its own; the keys are several ranges."""
    lines = "\n".join(line.removeprefix("        ") for line in body.splitlines())
    in_a_fresh_process("kernels", BACK + lines)


@needs_fork
def test_a_fork_after_gradients():
    """The child has threads of its own, and so has its child."""
    fresh("""
        before = back()
        assert status(child(lambda: back() == before and len(threads._pool.threads) == 2)) == 0
        assert status(child(lambda: status(child(lambda: back() == before)) == 0)) == 0
        assert back() == before
    """)


@needs_fork
def test_forks_while_gradients_are_taken():
    fresh("""
        before, stop, wrong = back(), threading.Event(), []

        def work():
            while not stop.is_set():
                if back() != before:
                    wrong.append(1)

        callers = [in_thread(work) for _ in range(2)]
        for _ in range(6):
            assert status(child(lambda: back() == before)) == 0
            time.sleep(0.003)
        stop.set()
        for caller in callers:
            caller.join(30)
        assert not wrong and back() == before
    """)


@pytest.mark.parametrize(
    ("work", "num_threads"),
    [("backward", 1), ("backward", 3), ("bias", 3), ("tangent", 3), ("second", 3)],
)
def test_an_interrupt_ends_a_long_call(work, num_threads):
    """One that would outlast the alarm of the process by far; the next call is right."""
    fresh(f"""
        sd.set_num_threads({num_threads})
        before = back(bias=np.zeros(3000, "f"))
        n = 2**17
        row = np.linspace(-1, 1, 32, dtype="f")
        query = np.broadcast_to(row, (8, n, 32))
        value = np.broadcast_to(row[:1], (8, n, 1))
        lse = np.full((8, n), np.log(n), "f")
        options = Options(impl="kernels", bias=np.zeros((8, 1, n), "f"))
        moves = Grads(query, query, value)

        def run_long(work):
            given = query, query, value, options, np.zeros((8, n, 1), "f"), lse
            if work == "tangent":
                _passes.tangent(*given, moves)
            elif work == "second":
                _passes.second(*given, value, None, moves, wanted=("query", "key"))
            else:
                wanted = ("bias",) if work == "bias" else ("query", "key", "value")
                _passes.backward(*given, value, None, wanted=wanted)

        def interrupt():
            while not inside():
                time.sleep(0.001)
            time.sleep(0.3)
            signal.raise_signal(signal.SIGINT)

        def inside():
            frames = sys._current_frames()[threading.main_thread().ident]
            while frames is not None:
                if frames.f_code is threads.run.__code__:
                    return True
                frames = frames.f_back
            return False

        in_thread(interrupt)
        try:
            run_long({work!r})
        except KeyboardInterrupt:
            pass
        else:
            raise AssertionError("the call should have been interrupted")
        assert not threads._pool.held
        assert back(bias=np.zeros(3000, "f")) == before
    """)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no peak of memory here")
def test_gradients_need_little_memory():
    """Scores would take 512 MiB; beside arguments and results 64 suffice."""
    fresh("""
        def kib(field):
            with open("/proc/self/status") as lines:
                return next(int(x.split()[1]) for x in lines if x.startswith(field + ":"))

        def gradients(n, bias):
            _, pullback = sd.attention_vjp(*operands[:, :, :, :n], bias=bias)
            return pullback(operands[0, :, :, :n])

        rng = np.random.default_rng(0)
        operands = rng.standard_normal((3, 1, 2, 8192, 64), dtype=np.float32)
        for bias in (np.ones(8192, "f"), np.ones((8192, 1), "f")):
            gradients(600, bias[:600])
            with open("/proc/self/clear_refs", "w") as peak:
                peak.write("5")  # the peak is that of now
            before = kib("VmRSS")
            found = gradients(8192, bias)
            results = [operands[0], *(x for x in found if x is not None)]  # the first as out
            size = sum(x.nbytes for x in results) / 2**10
            assert kib("VmHWM") - before - size < 64 * 2**10
    """)
