"""Same bits whatever does not belong to the problem; numbers and lengths at the edges."""

import functools
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import threadpoolctl

import cases
import scaledot as sd
from compare import EPS, assert_close
from test_attention import truth_of

# Several tiles in every direction: two blocks of queries, three of keys, grouped heads.
SIZE = cases.Size(len_q=300, len_kv=1100, d_k=16, d_v=5, num_heads=4, num_kv_heads=2, lead=(3,))

# Options beside which the bits must not change.
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window, ALiBi": {"window": (200, 100), "alibi_slopes": cases.slopes(4) / 16},
    "lengths, softcap": {"kv_len": np.array([1100, 700, 0]), "softcap": 3.0, "causal": True},
    "mask, bias, sinks": {
        "mask": np.random.default_rng(1).random((3, 1, 300, 1100)) < 0.7,
        "bias": np.random.default_rng(2).standard_normal((4, 300, 1100)).astype(np.float32),
        "sinks": np.array([0.5, -1, 2, 0], dtype=np.float32),
    },
    "dropout": {"dropout": 0.3, "seed": 12, "causal": True},
    "mods": {"score_mod": cases.distance_mod, "mask_mod": cases.dilated, "scale": 0.01},
    "segments": {"segment_ids": (np.arange(300) // 130, np.arange(1100) // 400)},
}
each_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


@pytest.fixture(autouse=True, scope="module")
def blas_on_one_thread():
    """Its threads, waiting for one another on a busy machine, take most of the time."""
    with threadpoolctl.threadpool_limits(1, user_api="blas"):
        yield


@pytest.fixture(autouse=True)
def restored_threads():
    """Let no number of threads stay set."""
    yield
    sd.set_num_threads(None)


def arrays(dtype="float32", size=SIZE, number=0):
    rng = np.random.default_rng(number)
    return {n: x.astype(cases.dtype_named(dtype)) for n, x in size.arrays(rng).items()}


def bits(arguments, impl):
    """Bytes of out, and of lse where there are no sinks."""
    out = sd.attention(**arguments, impl=impl).tobytes()
    if "sinks" in arguments:
        return out, b""
    state = sd.attention_state(**{"q_offset": 800} | arguments, impl=impl)
    return out, state.lse.tobytes()


def subset(arguments, entries):
    """The same call for some entries of the one leading axis."""
    of_batch = ("query", "key", "value", "kv_len", "q_offset", "kv_offset", "seed")
    full_rank = ("mask", "bias", "block_mask")
    part = dict(arguments)
    for name, x in arguments.items():
        if name in of_batch and np.ndim(x) and len(x) > 1:
            part[name] = x[entries]
        if name in full_rank and x.ndim == 4 and len(x) > 1:
            part[name] = x[entries]
    return part


# The same bits


@each_option
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_any_number_of_threads_gives_the_same_bits(options, dtype, impl):
    """And any run: each number runs twice; only kernels have threads of their own."""
    arguments = arrays(dtype) | options
    found = []
    for num_threads in (1, 2, 4, 1, 4, 2) if impl == "kernels" else (1, 4):
        sd.set_num_threads(num_threads)
        found.append(bits(arguments, impl))
    assert len(set(found)) == 1


def test_threads_of_blas_do_not_matter_either(rng):
    arguments = arrays()
    with threadpoolctl.threadpool_limits(1, user_api="blas"):
        alone = bits(arguments, "blockwise")
    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        assert bits(arguments, "blockwise") == alone


@each_option
def test_an_entry_alone_is_that_entry_in_a_batch(options, impl):
    """In batches of one, two and three, whatever the other entries hold."""
    arguments = arrays() | options
    if "dropout" in options:  # an int gives each entry of a batch a seed of its own
        arguments["seed"] = np.array([12, 5, 2**40])
    if "score_mod" in options:  # distance_mod and dilated tell entries apart
        arguments |= {
            "score_mod": lambda score, batch, head, q, k: cases.distance_mod(score, 0, head, q, k),
            "mask_mod": lambda batch, head, q, k: cases.dilated(0, head, q, k),
        }
    whole = sd.attention(**arguments, impl=impl)
    other = arrays(number=1)
    for entry in range(3):
        alone = sd.attention(**subset(arguments, [entry]), impl=impl)
        assert alone[0].tobytes() == whole[entry].tobytes()
        mixed = dict(arguments)
        for name in ("query", "key", "value"):
            mixed[name] = other[name] * 9
            mixed[name][entry] = arguments[name][entry]
        assert sd.attention(**mixed, impl=impl)[entry].tobytes() == whole[entry].tobytes()
    pair = sd.attention(**subset(arguments, [2, 0]), impl=impl)
    assert pair.tobytes() == whole[[2, 0]].tobytes()


@pytest.mark.parametrize("len_q", [1, 300], ids=["decode", "prefill"])
def test_other_entries_may_have_other_lengths(len_q, impl):
    """Though those of one decide which tiles all of them run."""
    arguments = arrays(size=replace(SIZE, len_q=len_q)) | {"causal": True, "window": (150, None)}
    lengths = np.array([[800, 800, 800], [800, 1100, 3], [800, 0, 1099], [800, 513, 512]])
    found = {sd.attention(**arguments, kv_len=kv_len, impl=impl)[0].tobytes() for kv_len in lengths}
    assert len(found) == 1


def test_a_small_batch_is_cut_like_a_large_one(impl):
    """Short sequences, where several entries and heads share one tile."""
    size = cases.Size(len_q=3, len_kv=40, d_k=7, num_heads=6, num_kv_heads=2, lead=(70, 2))
    arguments = arrays(size=size) | {"causal": True}
    whole = sd.attention(**arguments, impl=impl)
    for i, j in ((0, 0), (13, 1), (69, 1)):
        alone = {n: x[i, j] if n != "causal" else x for n, x in arguments.items()}
        assert sd.attention(**alone, impl=impl).tobytes() == whole[i, j].tobytes()


NEUTRAL = {
    "mask of True": {"mask": np.ones((300, 1100), dtype=bool)},
    "scalar mask": {"mask": np.array(True)},
    "kv_len": {"kv_len": 1100},
    "kv_len of each": {"kv_len": np.array([1100, 1100, 1100])},
    "wide window": {"window": (5000, 5000)},
    "open window": {"window": (None, None)},
    "one segment": {"segment_ids": (np.full(300, 3), np.full(1100, 3))},
    "dropout of 0": {"dropout": 0.0, "seed": 5},
    "block_mask of True": {"block_mask": np.ones((4, 3, 9), dtype=bool)},
    "mask_mod of True": {"mask_mod": lambda batch, head, q_pos, kv_pos: q_pos + kv_pos >= 0},
    "offsets": {"q_offset": 800 + 7, "kv_offset": 7},
    "default scale": {"scale": 0.25},
}  # fmt: skip


@functools.cache
def plain_bits(impl, causal):
    return bits(arrays() | {"causal": causal}, impl)


@pytest.mark.parametrize("neutral", NEUTRAL.values(), ids=NEUTRAL)
@pytest.mark.parametrize("causal", [False, True])
def test_options_that_change_nothing_change_no_bit(neutral, causal, impl):
    arguments = arrays() | {"causal": causal}
    assert bits(arguments | neutral, impl) == plain_bits(impl, causal)


def test_a_numpy_integer_is_an_int(impl):
    """Where an array means something else: a 0-d array is one seed for all entries."""
    arguments = arrays(size=cases.Size()) | {"dropout": 0.5}
    of_int = sd.attention(**arguments, seed=5, impl=impl)
    assert sd.attention(**arguments, seed=np.int64(5), impl=impl).tobytes() == of_int.tobytes()
    of_array = sd.attention(**arguments, seed=np.array(5), impl=impl)
    assert of_array.tobytes() != of_int.tobytes()


# Layouts


def transposed(x):
    return np.ascontiguousarray(x.swapaxes(-2, -3)).swapaxes(-2, -3)


def fortran(x):
    return np.asfortranarray(x)


def sliced(x):
    wide = np.full((*x.shape[:-1], x.shape[-1] + 5), np.nan, dtype=x.dtype)
    wide[..., 2:-3] = x
    return wide[..., 2:-3]


def reversed_in_memory(x):
    return np.ascontiguousarray(x[::-1, :, ::-1, ::-1])[::-1, :, ::-1, ::-1]


def step_two(x):
    wide = np.full((*x.shape[:-2], 2 * x.shape[-2], 2 * x.shape[-1]), np.nan, dtype=x.dtype)
    wide[..., ::2, 1::2] = x
    return wide[..., ::2, 1::2]


def unaligned(x):
    buffer = np.empty(x.nbytes + 1, dtype=np.uint8)
    shifted = buffer[1:].view(x.dtype).reshape(x.shape)
    shifted[...] = x
    return shifted


def read_only(x):
    x = x.copy()
    x.flags.writeable = False
    return x


@pytest.mark.parametrize(
    "layout",
    [transposed, fortran, sliced, reversed_in_memory, step_two, unaligned, read_only],
    ids=lambda layout: layout.__name__,
)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_any_layout_gives_the_same_bits(layout, dtype, impl):
    """Of query, key and value, of mask and bias."""
    arguments = arrays(dtype, cases.Size(40, 600, d_k=16, num_heads=4, num_kv_heads=2))
    rng = np.random.default_rng(3)
    options = {"mask": rng.random((2, 4, 40, 600)) < 0.7, "bias": cases.normal(rng, 2, 4, 40, 600)}
    for plain in (arguments, arguments | options):
        laid_out = {name: layout(x) for name, x in plain.items()}
        for name, x in plain.items():
            assert laid_out[name].strides != x.strides or layout in (unaligned, read_only)
            assert np.array_equal(laid_out[name], x)
        assert bits(laid_out, impl) == bits(plain, impl)


def test_expanded_arrays_give_the_same_bits(impl):
    one = arrays(size=cases.Size(40, 600, d_k=16, num_heads=1, lead=(1,)))
    mask = np.random.default_rng(4).random((1, 1, 1, 600)) < 0.7
    shapes = {n: (3, 4, *x.shape[2:]) for n, x in one.items()} | {"mask": (3, 4, 40, 600)}
    expanded = {n: np.broadcast_to(x, shapes[n]) for n, x in (one | {"mask": mask}).items()}
    copies = {n: x.copy() for n, x in expanded.items()}
    assert bits(expanded, impl) == bits(copies, impl)
    values = np.broadcast_to(one["value"][:, :, :1, :1], (3, 4, 600, 2))
    assert bits(copies | {"value": values}, impl) == bits(copies | {"value": values.copy()}, impl)


@pytest.mark.parametrize("length", [3, 17, 64, 300, 600])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_self_attention_of_one_array_is_that_of_copies(length, dtype, impl):
    """Query and key may be one array in memory: a product of it with itself is no other product."""
    x = arrays(dtype, cases.Size(length, length, d_k=64))["query"]
    same = sd.attention(x, x, x, impl=impl)
    assert same.tobytes() == sd.attention(x, x.copy(), x.copy(), impl=impl).tobytes()


@each_option
def test_inputs_are_not_written(options, impl):
    arguments = {
        n: tuple(map(read_only, x)) if isinstance(x, tuple) and not isinstance(x[0], int)
        else read_only(x) if isinstance(x, np.ndarray) else x
        for n, x in (arrays() | options).items()
    }  # fmt: skip
    writeable = {n: x.copy() if isinstance(x, np.ndarray) else x for n, x in arguments.items()}
    before = {n: x.tobytes() for n, x in writeable.items() if isinstance(x, np.ndarray)}
    out = sd.attention(**writeable, impl=impl)
    assert {n: writeable[n].tobytes() for n in before} == before
    assert sd.attention(**arguments, impl=impl).tobytes() == out.tobytes()
    assert out.flags.writeable
    assert not any(np.shares_memory(out, writeable[n]) for n in before)


# Numbers at the edges


def check(arguments, impl):
    """Compare out and lse with the oracle by the rule."""
    out, lse, _, yardstick_out, yardstick_lse = truth_of(arguments)
    dtype, len_kv = arguments["query"].dtype.name, arguments["key"].shape[-2]
    state = sd.attention_state(**arguments, impl=impl)
    assert_close(state.out, out, yardstick_out, eps=EPS[dtype], len_kv=len_kv)
    assert_close(state.lse, lse, yardstick_lse, eps=EPS[dtype], len_kv=len_kv)
    return state


@pytest.mark.parametrize("start", [2**31 - 3, 2**31, 2**32 - 2, 2**40, -(2**31) - 4, -(2**40)])
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"window": (3, 1)},
        {"alibi_slopes": cases.slopes(2)},
        {"causal": True, "window": (4, None), "dropout": 0.4, "seed": -3},
        {"kv_len": np.array([5, 9])},
        {"mask_mod": lambda batch, head, q_pos, kv_pos: (q_pos - kv_pos) % 3 != 1},
    ],
    ids=lambda options: "-".join(options),
)
def test_positions_beyond_32_bits(start, options, impl):
    arguments = arrays(size=cases.Size(6, 9)) | options
    for offsets in (
        (start + 2, start),
        (np.array([start, start + 3]), np.array([start + 1, start])),
    ):
        check(arguments | dict(zip(("q_offset", "kv_offset"), offsets, strict=True)), impl)


def test_queries_far_beyond_the_keys(impl):
    """A window excludes all of them, ALiBi leaves the nearest, causal shows all."""
    arguments = arrays(size=cases.Size(6, 9)) | {"q_offset": 2**40, "kv_offset": -(2**40)}
    assert (check(arguments | {"window": (2**40, 0)}, impl).lse == -np.inf).all()
    check(arguments | {"causal": True, "window": (2**42, None)}, impl)
    check(arguments | {"alibi_slopes": np.array([2.0**-38, 0])}, impl)
    swapped = arguments | {"q_offset": -(2**40), "kv_offset": 2**40}
    assert (check(swapped | {"causal": True}, impl).lse == -np.inf).all()


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_subnormal_numbers(dtype, impl):
    """Subnormal values, keys and weights change results by no more than any rounding."""
    tiny = float(np.finfo(dtype).smallest_normal)
    arguments = arrays(dtype, cases.Size(6, 20, d_k=4))
    for name in ("query", "key", "value"):
        scaled = arrays(dtype, cases.Size(6, 20, d_k=4))
        scaled[name] = (scaled[name].astype(np.float64) * tiny / 7).astype(dtype)
        out, _, _, yardstick, _ = truth_of(scaled)
        got = sd.attention(**scaled, impl=impl)
        if name == "value":  # as a share of the smallest normal number
            got, out, yardstick = (x.astype(np.float64) / tiny for x in (got, out, yardstick))
            out, got, yardstick = out + 1, got + 1, yardstick + 1
        assert_close(got, out, yardstick, eps=EPS[dtype], len_kv=20)
    # Weights exp(-87) to exp(-104) are subnormal in float32, exp(-708) to exp(-745) in float64.
    low = -np.log(tiny) if dtype != "float16" else 87.4
    bias = np.zeros(20)
    bias[::2] = -np.linspace(low - 1, low + 12, 10)
    out, _, _, yardstick, _ = truth_of(arguments | {"bias": bias})
    got = sd.attention(**arguments, bias=bias, impl=impl)
    assert_close(got, out, yardstick, eps=EPS[dtype], len_kv=20)
    weights = sd.attention_weights(arguments["query"], arguments["key"], bias=bias)
    smallest = np.finfo(weights.dtype).smallest_normal
    assert ((weights == 0) | (weights >= smallest)).all()


def test_sinks_beyond_the_accumulation_dtype(impl):
    """The lowest number of float64 takes no share of float32 scores, and nothing warns."""
    arguments = arrays(size=cases.Size())
    sinks = np.array([np.finfo(np.float64).min, 0.0])
    out = sd.attention(**arguments, sinks=sinks, impl=impl)
    plain = sd.attention(**arguments, impl=impl)
    assert out[:, 0].tobytes() == plain[:, 0].tobytes()
    assert out[:, 1].tobytes() != plain[:, 1].tobytes()


@each_option
@pytest.mark.parametrize("impl", ["blockwise", "kernels"])
def test_blocks_against_dense(options, impl):
    """Beyond one block implementations agree as two orders of summation do."""
    if "mask" in options or "score_mod" in options:
        options = options | {"softcap": 4.0}
    arguments = arrays() | options
    wide = {n: arguments[n].astype(np.float64) for n in ("query", "key", "value")}
    truth = sd.attention(**arguments | wide, impl="dense")
    dense = sd.attention(**arguments, impl="dense")
    got = sd.attention(**arguments, impl=impl)
    assert_close(got, truth, dense, eps=EPS["float32"], len_kv=1100)


# Memory


def peak(function):
    """Bytes held at most during a call, besides the result."""
    function()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    result = function()
    most = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    return most - result.nbytes


@pytest.mark.parametrize("impl", ["blockwise", "kernels"])
def test_virtual_keys(impl):
    """A million keys, all the same: values come back, and memory grows as the length does."""
    d, found = 64, []
    for len_kv in (2**18, 2**20):
        key = np.broadcast_to(np.float32(0.5), (len_kv, d))
        value = np.broadcast_to(np.arange(d, dtype=np.float32), (len_kv, d))
        query = np.ones((1, d), dtype=np.float32)
        found.append(peak(lambda q=query, k=key, v=value: sd.attention(q, k, v, impl=impl)))
    assert_close(sd.attention(query, key, value, impl=impl), value[:1], eps=EPS["float32"],
                 len_kv=len_kv)  # fmt: skip
    assert found[1] < 5 * found[0]
    copies = 2 * 4 * d * len_kv
    assert found[1] < (copies / 8 if impl == "blockwise" else 1.25 * copies)


@pytest.mark.parametrize("impl", ["blockwise", "kernels"])
def test_a_window_over_long_virtual_arrays(impl):
    """Thirty thousand queries and keys of which each query sees a few."""
    length = 30_000
    x = np.broadcast_to(np.float32(0.5), (length, 4))
    value = np.broadcast_to(np.arange(length, dtype=np.float32)[:, None], (length, 2))

    def run():
        return sd.attention(x, x, value, window=(2, 0), impl=impl)

    positions = np.arange(length, dtype=np.float64)
    truth = (positions + np.maximum(positions - 1, 0) + np.maximum(positions - 2, 0)) / 3
    truth[:2] = 0, 0.5
    truth = np.stack([truth] * 2, axis=1)
    # Relative, for each number: an absolute error would be lost beside the last rows.
    assert_close(run() / (truth + 1), truth / (truth + 1), eps=EPS["float32"], len_kv=3)
    assert peak(run) < length * 1000 < length * length
