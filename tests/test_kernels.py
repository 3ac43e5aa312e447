"""What can go wrong with compiled kernels alone: memory, signals, tensors that are not numbers."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import naive
import scaledot as sd
import textbook
from compare import EPS


def arrays(rng, len_q=20, len_kv=30, d_k=8, d_v=5, num_heads=2):
    shapes = (len_q, d_k), (len_kv, d_k), (len_kv, d_v)
    return [rng.standard_normal((num_heads, *shape)).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize("d_k", [64, 127, 128, 129, 256, 401, 512])
@pytest.mark.parametrize("len_kv", [6, 40])
def test_long_sums_over_few_keys_keep_the_rule(d_k, len_kv):
    """In the median of some draws: the largest of so few errors varies by more than the rule.

    One sum over 512 products, without a cut, would round five times as much as BLAS's does.
    """
    errors = []
    for seed in range(9):
        query, key, value = (3 * x for x in arrays(np.random.default_rng(seed), 20, len_kv, d_k))
        out, _, weights = naive.attention(query, key, value)
        yardstick, _ = textbook.attention(query, key, value, weights > 0)
        got = sd.attention(query, key, value, impl="kernels")
        floor = EPS["float32"] * np.sqrt(len_kv) * np.abs(out).max()
        errors.append([np.abs(got - out).max(), 2 * np.abs(yardstick - out).max() + floor])
    error, allowed = np.median(errors, axis=0)
    assert error <= allowed


def test_a_key_whose_weight_rounds_to_0_adds_nothing(impl):
    """Also where its value is huge, and another tile holds it."""
    query, key, value = np.ones((1, 1), "f"), np.zeros((600, 1), "f"), np.zeros((600, 1), "f")
    key[-1], value[0], value[-1] = 1000, 3e38, 1
    assert sd.attention(query, key, value, impl=impl) == 1
    value[0] = np.inf  # its weight is above 0 all the same
    assert sd.attention(query, key, value, impl=impl) == np.inf


def test_a_block_mask_over_no_keys(rng, impl):
    query, key, value = arrays(rng, len_kv=0)
    out = sd.attention(query, key, value, block_mask=np.ones((1, 0), bool), impl=impl)
    assert (out == 0).all()


@pytest.mark.parametrize("signs", [(1, -1), (-1, 1)])
def test_no_limit_is_no_window_however_far_the_positions(rng, impl, signs):
    query, key, value = arrays(rng)
    q_offset, kv_offset = (sign * 2**60 for sign in signs)
    moved = sd.attention(query, key, value, q_offset=q_offset, kv_offset=kv_offset, impl=impl)
    assert moved.tobytes() == sd.attention(query, key, value, impl=impl).tobytes()


class TestTensors:
    """Tensors whose numbers are not simply those at their addresses run by blockwise."""

    torch = pytest.importorskip("torch")

    @pytest.fixture
    def qkv(self, rng):
        return [self.torch.from_numpy(x) for x in arrays(rng)]

    def test_lazy_negation(self, qkv):
        query, key, value = qkv
        lazy = self.torch.complex(query, -query).conj().imag
        assert lazy.is_neg()
        assert self.torch.equal(lazy, query)
        got = sd.attention(lazy, key, value)
        self.torch.testing.assert_close(got, sd.attention(query, key, value))

    @pytest.mark.parametrize("option", ["kv_len", "q_offset", "seed"])
    def test_vmap_over_an_option(self, qkv, option):
        values = self.torch.tensor([2, 5])
        others = {"kv_len": {"q_offset": 0}, "seed": {"dropout": 0.5}}.get(option, {"causal": True})

        def call(x):
            return sd.attention(*qkv, **others, **{option: x})

        each = self.torch.stack([call(x) for x in values])
        self.torch.testing.assert_close(self.torch.vmap(call)(values), each)

    # PyTorch's own decompositions, which forward mode loads, are written with it.
    @pytest.mark.filterwarnings("ignore:`torch.jit.script. is deprecated:DeprecationWarning")
    def test_forward_mode(self, qkv):
        query, key, value = qkv
        forward_ad = self.torch.autograd.forward_ad
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(query, query)
            tangent = forward_ad.unpack_dual(sd.attention(dual, key, value)).tangent
        _, expected = self.torch.func.jvp(
            lambda x: sd.attention(x, key, value), (query,), (query,)
        )
        self.torch.testing.assert_close(tangent, expected)

    def test_a_trace_is_no_constant(self, qkv):
        from torch.fx.experimental.proxy_tensor import make_fx

        query, key, value = qkv
        traced = make_fx(lambda x: sd.attention(x, key, value))(query)
        expected = sd.attention(2 * query, key, value)
        self.torch.testing.assert_close(traced(2 * query), expected)


@pytest.mark.parametrize("len_q", [3, 20])
def test_products_are_scaled_not_factors(rng, len_q):
    """Queries times this scale are beyond float32, the scores are not."""
    query, key, value = arrays(rng, len_q)
    query, key = query * np.float32(1e20), key * np.float32(1e-20)
    got = sd.attention(query, key, value, scale=1e19, impl="kernels")
    assert np.isfinite(got).all()
    big = sd.attention_weights(query, key, scale=1e19, impl="kernels")
    assert np.isfinite(big).all()


@pytest.mark.parametrize(
    "shown", [[[1]], [[1], [0], [1], [1]], [[1, 0, 1, 1]], [1, 0, 1, 1]], ids=str
)
def test_a_block_mask_broadcasts_over_blocks(rng, shown):
    query, key, value = arrays(rng, 400, 400, 16)
    given = {"block_mask": np.array(shown, dtype=bool)}
    blocks = np.broadcast_to(given["block_mask"], (2, 4, 4))
    whole = {"block_mask": np.ascontiguousarray(blocks)}
    for name, operands in (("attention", (query, key, value)), ("attention_weights", (query, key))):
        function = getattr(sd, name)
        rows = {"rows": [0, 200, 399]} if name == "attention_weights" else {}
        got, expected = (function(*operands, **x, **rows, impl="kernels") for x in (given, whole))
        assert got.tobytes() == expected.tobytes()


def test_weights_of_excluded_keys_are_0_beside_nan(rng, impl):
    query, key, _ = arrays(rng, 20, 30)
    query[0, 3] = np.nan
    weights = sd.attention_weights(query, key, kv_len=25, impl=impl)
    assert np.isnan(weights[0, 3, :25]).all()
    assert (weights[..., 25:] == 0).all()


INTERRUPTED = """
import signal, sys, threading, numpy as np, scaledot as sd
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
sd.set_num_threads(2)
small = np.ones((1, 64, 8), "f")
expected = sd.attention(small, small, small, impl="kernels")
query, key = np.zeros((1, 40_000, 64), "f"), np.zeros((1, 200_000, 64), "f")
print("go", flush=True)
try:
    sd.attention(query, key, key, impl="kernels")
except KeyboardInterrupt:
    again = sd.attention(small, small, small, impl="kernels")
    sys.exit(0 if (again == expected).all() else 3)
sys.exit(4)
"""


@pytest.mark.parametrize("count", [1, 2, 3])
def test_ctrl_c_however_often(count):
    """Workers end before the memory goes, and the process goes on working."""
    source = str(Path(sd.__file__).parents[1])
    with subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-c", INTERRUPTED], text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": source},
    ) as process:  # fmt: skip
        assert process.stdout.readline() == "go\n"
        pause = threading.Event()
        for number in range(count):
            pause.wait(0.01 if number else 0.5)
            process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    # A later signal may arrive when the first has been dealt with: that is Ctrl-C, not a crash.
    assert process.returncode in ((0,) if count == 1 else (0, 1, -signal.SIGINT)), errors
    assert "Segmentation" not in errors


COLD = """
import os, signal, sys, threading, time, warnings, numpy as np, scaledot as sd
signal.alarm(100)  # what hangs ends by a signal
x = np.ones((1, 64, 8), "f")


def call():
    return sd.attention(x, x, x, impl="kernels")

"""
COLD_STARTS = {
    "fork": """
thread = threading.Thread(target=call)
thread.start()
time.sleep(1.5)
child = os.fork()
good = (call() == 1).all()
if child == 0:
    os._exit(0 if good else 3)
thread.join()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) or (0 if good else 4))
""",
    "Ctrl-C": """
signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Timer(float(sys.argv[1]), signal.raise_signal, [signal.SIGINT]).start()
try:
    call()
    time.sleep(30)
except KeyboardInterrupt:
    sys.exit(0 if (call() == 1).all() else 3)
""",
    "warning": """
warnings.simplefilter("error")
os.environ["SCALEDOT_CACHE_DIR"] = "/dev/null/nowhere"
for _ in range(3):  # one warning for the process, in whichever kernel is first
    try:
        assert (call() == 1).all()
    except RuntimeWarning:
        continue
    break
else:
    sys.exit(3)
""",
}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="signals and forks of POSIX")
@pytest.mark.heavy  # each compiles kernels anew
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("name", "delay"), [("fork", 0), ("Ctrl-C", 0.3), ("Ctrl-C", 1.5), ("warning", 0)]
)
def test_the_first_call_disturbed(tmp_path, name, delay):
    """While kernels are compiled, with none on disk."""
    source = str(Path(sd.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "SCALEDOT_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", COLD + COLD_STARTS[name], str(delay)], env=environment,
        stderr=subprocess.PIPE, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
