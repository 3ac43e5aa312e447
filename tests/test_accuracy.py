"""How exact the kernels are, beside PyTorch's, beyond 32 bits and on arrays of JAX."""

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import threadpoolctl
from numpy.lib.stride_tricks import as_strided

import cases
import naive
import scaledot as sd
import test_attention
import textbook
from compare import EPS, assert_close
from conftest import Library

pytestmark = pytest.mark.heavy  # twenty seeds of everything

torch = pytest.importorskip("torch")

SEEDS = 20
OPTIONS = ("plain", "causal", "bias")
# Causal ones count from the first key, as PyTorch does: one query would see one key.
PROBLEMS = [((100, 300), option) for option in OPTIONS]
PROBLEMS += [((1, 3000), option) for option in ("plain", "bias")]
each_problem = pytest.mark.parametrize(
    ("lengths", "option"), PROBLEMS, ids=[f"{n}x{m}, {option}" for (n, m), option in PROBLEMS]
)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Threads that wait for one another on a busy machine take most of the time."""
    ours, theirs = sd.get_num_threads(), torch.get_num_threads()
    sd.set_num_threads(1)
    torch.set_num_threads(1)
    with threadpoolctl.threadpool_limits(1, user_api="blas"):
        yield
    sd.set_num_threads(ours)
    torch.set_num_threads(theirs)


def draw(seed, len_q, len_kv, d, limit, *, bias):
    """Query, key, value and bias or None, the largest |score| without the bias at ``limit``."""
    rng = np.random.default_rng(seed)
    query, key, value = (rng.standard_normal((1, 2, n, d)) for n in (len_q, len_kv, len_kv))
    query *= limit / np.abs(query @ key.swapaxes(-1, -2) / math.sqrt(d)).max()
    return query, key, value, rng.standard_normal((1, 2, len_q, len_kv)) if bias else None


def seen_of(len_q, len_kv, option):
    seen = np.ones((1, 2, len_q, len_kv), dtype=bool)
    return np.tril(seen) if option == "causal" else seen


def dense(query, key, value, bias, seen):
    """The definition in the arrays' own dtype, which is wider than what is judged by it."""
    scores = query @ key.swapaxes(-1, -2) / np.sqrt(query.dtype.type(query.shape[-1]))
    scores = np.where(seen, scores if bias is None else scores + bias, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights @ value / weights.sum(axis=-1, keepdims=True)


def ours(query, key, value, bias, option):
    options = {"causal": True, "q_offset": 0} if option == "causal" else {}
    return sd.attention(query, key, value, bias=bias, impl="kernels", **options)


@pytest.mark.parametrize("option", OPTIONS)
def test_the_truth_of_this_file_is_the_oracle_s(option):
    query, key, value, bias = draw(0, 9, 21, 16, 3, bias=option == "bias")
    truth, _, weights = naive.attention(
        query, key, value, bias=bias, causal=option == "causal", q_offset=0
    )
    seen = seen_of(9, 21, option)
    assert np.array_equal(seen, weights > 0)
    assert_close(dense(query, key, value, bias, seen), truth, eps=EPS["float64"], len_kv=21)


@each_problem
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("limit", [3, 40])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_beside_pytorch(dtype, limit, d, lengths, option):
    """The median over many draws of the largest error is at most 1.25 times PyTorch's."""
    seen, errors = seen_of(*lengths, option), []
    for seed in range(SEEDS):
        drawn = draw(seed, *lengths, d, limit, bias=option == "bias")
        tensors = [
            None if x is None else torch.from_numpy(x).to(getattr(torch, dtype)) for x in drawn
        ]
        truth = dense(*(None if x is None else x.double().numpy() for x in tensors), seen)
        query, key, value, bias = tensors
        peer = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=bias, is_causal=option == "causal"
        )
        both = ours(query, key, value, bias, option), peer
        errors.append([np.abs(x.double().numpy() - truth).max() for x in both])
    error, of_peer = np.median(errors, axis=0)
    assert error <= 1.25 * of_peer, f"{error:.3g}, {error / of_peer:.2f} times PyTorch's"


@each_problem
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("limit", [3, 40])
def test_float64_keeps_the_rule(limit, d, lengths, option):
    """Beside the textbook's error; the truth has longer numbers where this machine has them."""
    seen = seen_of(*lengths, option)
    query, key, value, bias = draw(1, *lengths, d, limit, bias=option == "bias")
    wide = (None if x is None else x.astype(np.longdouble) for x in (query, key, value, bias))
    truth = dense(*wide, seen)
    yardstick, _ = textbook.attention(query, key, value, seen, bias=bias)
    got = ours(query, key, value, bias, option)
    assert_close(got, truth, yardstick, eps=EPS["float64"], len_kv=lengths[1])


def spread(file, places):
    """Put arrays into views of one sparse file: ``(array, strides, start)``, counted in elements.

    Only what is written takes room; the file appears as large as the strides reach.
    """
    dtype = places[0][0].dtype
    size = 1 + max(
        start + sum(max(0, (n - 1) * s) for n, s in zip(x.shape, strides, strict=True))
        for x, strides, start in places
    )
    try:
        memory = np.memmap(file, dtype=dtype, mode="w+", shape=size).view(np.ndarray)
    except OSError as error:
        pytest.skip(f"no sparse file of {size * dtype.itemsize} bytes here: {error}")
    file.unlink()  # the memory stays
    views = []
    for x, strides, start in places:
        view = as_strided(memory[start:], x.shape, [s * dtype.itemsize for s in strides])
        view[...] = x
        views.append(view)
    return views


# Elements from one head, row, column to the next: each in turn passes 2**31.
FAR = 2**31 + 2**20
STEPS = {
    "heads": (FAR, 40, 1), "rows": (2**12, 2**24 + 8, 1), "columns": (2**14, 64, FAR // 2),
    "rows, backwards": (2**12, -(2**24 + 8), 1), "columns, backwards": (2**14, 64, -FAR // 2),
}  # fmt: skip


@pytest.mark.parametrize("len_q", [1, 20], ids=["decode", "forward"])
@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_elements_beyond_2_to_the_31(rng, tmp_path, steps, len_q):
    """Query, key, value and bias with gigabytes between their numbers."""
    shapes = (2, len_q, 3), (2, 150, 3), (2, 150, 3)
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    bias = rng.standard_normal((2, len_q, 150)).astype(np.float32)
    truth, _, weights = naive.attention(*arrays, bias=bias)
    yardstick, _ = textbook.attention(*arrays, weights > 0, bias=bias)

    places = []
    for i, x in enumerate(arrays):
        behind = sum(max(0, (1 - n) * s) for n, s in zip(x.shape, steps, strict=True))
        places.append((x, steps, 2**16 * i + behind))
    reach = [abs((n - 1) * s) for n, s in zip(arrays[1].shape, steps, strict=True)]
    assert max(reach) > 2**31
    views = spread(tmp_path / "sparse", places)
    (far_bias,) = spread(tmp_path / "bias", [(bias, (FAR, 2**27, 1), 0)])
    got = sd.attention(*views, bias=far_bias, impl="kernels")
    assert_close(got, truth, yardstick, eps=EPS["float32"], len_kv=150)


@pytest.mark.parametrize("len_q", [1, 20], ids=["decode", "forward"])
def test_the_last_of_more_than_2_to_the_31_keys(rng, tmp_path, len_q):
    """A window shows some of them, around the border; no others are ever read."""
    len_kv, left = 2**31 + 90, 170
    first = len_kv - left - len_q
    query = rng.standard_normal((len_q, 1)).astype(np.float16)
    end = [rng.standard_normal((len_kv - first, 1)).astype(np.float16) for _ in range(2)]
    places = [(x, (1, 1), first + i * len_kv) for i, x in enumerate(end)]
    # Back from the last element as far as the first would lie, then turned round.
    key, value = (
        as_strided(x[::-1], (len_kv, 1), (-2, 2))[::-1]
        for x in spread(tmp_path / "sparse", places)
    )
    options = {"causal": True, "window": (left, 0)}
    truth, _, weights = naive.attention(query, *end, **options)
    yardstick, _ = textbook.attention(query, *end, weights > 0)
    got = sd.attention(query, key, value, **options, impl="kernels")
    assert_close(got, truth, yardstick, eps=EPS["float16"], len_kv=left + 1)


@pytest.mark.parametrize("start", [2**31 - 20, 2**32 - 20, 2**40, -(2**31) - 20])
@pytest.mark.parametrize("len_q", [1, 20], ids=["decode", "forward"])
def test_positions_beyond_2_to_the_31(rng, start, len_q):
    size = cases.Size(len_q, 40, num_heads=2, lead=())
    arguments = {n: x.astype(np.float32) for n, x in size.arrays(rng).items()}
    shaping = {"causal": True, "window": (25, None), "alibi_slopes": cases.slopes(2),
               "q_offset": start + 39 - len_q, "kv_offset": start}  # fmt: skip
    dropout = {"dropout": 0.4, "seed": 3}
    for options in (shaping, shaping | dropout):
        out, _, weights = naive.attention(**arguments, **options)
        got = sd.attention(**arguments, **options, impl="kernels")
        q_pos, kv_pos = np.arange(len_q)[:, None] + 39 - len_q, np.arange(40)
        yardstick, _ = textbook.attention(
            **arguments, seen=weights > 0, alibi_slopes=cases.slopes(2), q_pos=q_pos, kv_pos=kv_pos
        )
        if "dropout" in options:  # the textbook has none: the errors of the kept weights grow
            plain, _, _ = naive.attention(**arguments, **shaping)
            yardstick = out + (yardstick - plain) / (1 - options["dropout"])
        assert_close(got, out, yardstick, eps=EPS["float32"], len_kv=40)


OF_JAX = [(name, "float32") for name in test_attention.NAMES]
OF_JAX += [(n, d) for n in ("gqa", "decode") for d in ("float64", "float16", "bfloat16")]


@pytest.mark.parametrize(("name", "dtype"), OF_JAX)
def test_arrays_of_jax(name, dtype):
    """As they are, not traced, with every option: no other file takes them to the kernels."""
    to_array = Library("jax").array
    arguments = cases.case(name).arguments(dtype, to_array=to_array)
    truth = test_attention.case_truth(name, dtype)
    test_attention.check(arguments, truth, dtype, "kernels")


BESIDE_PYTORCH = """
import sys
import numpy as np
import naive, textbook
from compare import EPS, assert_close

def ours():
    import scaledot as sd
    sd.set_num_threads(2)
    got = sd.attention(*arrays, causal=True, q_offset=0, impl="kernels")
    few = sd.attention(arrays[0][:, -2:], *arrays[1:], impl="kernels")
    assert_close(got, truth, yardstick, eps=EPS["float32"], len_kv=300)
    assert_close(few, truth_of_few, yardstick_of_few, eps=EPS["float32"], len_kv=300)
    return got.tobytes(), few.tobytes()

def theirs():
    import torch
    if not seen["theirs"]:
        torch.set_num_threads(2)
    assert torch.get_num_threads() == 2
    tensors = [torch.from_numpy(x) for x in arrays]
    product = tensors[1] @ tensors[2].mT
    got = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=True)
    square = arrays[1].astype(np.float64) @ arrays[2].astype(np.float64).swapaxes(1, 2)
    with_numpy = arrays[1] @ arrays[2].swapaxes(1, 2)
    assert_close(product, square, with_numpy, eps=EPS["float32"], len_kv=64)
    assert_close(got, truth, yardstick, eps=EPS["float32"], len_kv=300)
    return got.numpy().tobytes(), product.numpy().tobytes()

rng = np.random.default_rng(0)
arrays = [rng.standard_normal((4, n, 64)).astype("f") for n in (300, 300, 300)]
truth, _, weights = naive.attention(*arrays, causal=True, q_offset=0)
few = [arrays[0][:, -2:], *arrays[1:]]
truth_of_few, _, weights_of_few = naive.attention(*few)
yardstick, _ = textbook.attention(*arrays, weights > 0)
yardstick_of_few, _ = textbook.attention(*few, weights_of_few > 0)
seen = {"ours": [], "theirs": []}
for who in [*sys.argv[1:], *sys.argv[1:], "theirs", "theirs", "ours", "ours", "theirs"]:
    seen[who].append({"ours": ours, "theirs": theirs}[who]())
assert len(set(seen["ours"])) == 1, "other bits"
"""


@pytest.mark.parametrize("order", [("ours", "theirs"), ("theirs", "ours")], ids=" then ".join)
def test_a_process_that_uses_pytorch_too(order):
    """Before, between and after; whichever is imported first, on two threads each."""
    paths = (str(Path(sd.__file__).parents[1]), str(Path(__file__).parent))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", BESIDE_PYTORCH, *order], text=True,
        capture_output=True, timeout=120, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
