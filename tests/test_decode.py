"""Few queries by compiled kernels: parts of the keys, memory read where it lies; and same bits."""

from itertools import cycle, product

import numpy as np
import pytest

import cases
import scaledot as sd
from compare import EPS, as_float64, assert_close
from test_tiles import DTYPES, HALVES, WIDTHS, arrays, check

PART = 1024  # keys of a part, up to 64 parts


@pytest.fixture(autouse=True)
def restored_threads():
    """Let no number of threads stay set."""
    yield
    sd.set_num_threads(None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_edges_of_tiles_parts_and_vectors(dtype):
    widths, queries = cycle(WIDTHS), cycle((1, 2, 3, 4, 5, 7, 8))
    for len_kv in (2, 15, 16, 17, 31, 33, 127, 128, 129, 255, 1023, 1024, 1025, 2047, 2049):
        for options in ({}, {"causal": True}):
            size = {"d_k": next(widths), "d_v": next(widths), "num_heads": 3, "num_kv_heads": 1}
            check(arrays(dtype, next(queries), len_kv, **size) | options)
        next(widths)


FAR = np.zeros(70_000, bool)
FAR[[2047, 2048, 40_959, 40_960, 69_999]] = True


@pytest.mark.parametrize("options", [
    {}, {"kv_len": np.array([70_000, 65_537])}, {"kv_len": np.array([0, 2048])}, {"mask": FAR},
    {"window": (3000, None), "q_offset": np.array([5000, 68_999])}, {"bias": np.arange(7e4) / 200},
], ids="-".join)  # fmt: skip
def test_parts_of_very_many_keys(options):
    """More than there may be parts of the usual length; some without a visible key."""
    check(arrays("float32", 2, 70_000, d_k=3, d_v=2, num_heads=2, lead=(2,)) | options)


KEYS = np.array([0, 31, 127, 128, 1023, 1024, 2047, 2099])


@pytest.mark.parametrize("d_v", [1, 8, 37, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_who_sees_one_key_gets_its_value_to_the_bit(dtype, d_v):
    """Whether an option shows it, or its score is so far above the others."""
    arguments = arrays(dtype, 8, 2100, d_v=d_v, num_heads=3, num_kv_heads=1)
    only = KEYS[:, None] == np.arange(2100)
    lookup = {"bias": np.where(only, np.float32(2000), -np.float32(2000))}
    for options in (
        {"mask": only}, {"segment_ids": (KEYS, np.arange(2100))}, lookup,
        {"bias": np.where(only, np.float32(0), -np.inf)},
    ):  # fmt: skip
        got = sd.attention(**arguments, **options, impl="kernels")
        assert np.array_equal(got, np.stack([arguments["value"][0, KEYS]] * 3))
    for start in KEYS[:-1] - 4:
        window = {"window": (0, 0), "q_offset": start, "scale": 3.0}
        got = sd.attention(**arguments, **window, impl="kernels")
        seen = np.arange(start, start + 8)
        wanted = np.where((seen >= 0)[:, None], arguments["value"][0, np.maximum(seen, 0)], 0)
        assert np.array_equal(got, np.stack([wanted.astype(got.dtype)] * 3))


DRAWN = np.random.default_rng(3)
KEEPS = DRAWN.random((2, 6, 5, 2100)) < 0.6
ADDED = DRAWN.standard_normal((2, 6, 5, 2100)).astype("f")
OPTIONS = {
    "causal": {"causal": True, "q_offset": np.array([1022, 4])},
    "window": {"window": (70, 5), "q_offset": np.array([1030, 2097])},
    "window that shows nothing": {"window": (5, 5), "q_offset": np.array([-20, 2200])},
    "kv_len": {"kv_len": np.array([1027, 0]), "causal": True},
    "kv_len at an edge": {"kv_len": np.array([1024, 2048])},
    "mask": {"mask": KEEPS},
    "mask of a part": {"mask": (np.arange(2100) >= 1024) & (np.arange(2100) < 1153)},
    "mask, transposed": {"mask": np.ascontiguousarray(KEEPS.swapaxes(2, 3)).swapaxes(2, 3)},
    "mask, reversed": {"mask": KEEPS[..., ::-1, ::-1], "window": (900, None)},
    "bias": {"bias": ADDED},
    "bias of keys": {"bias": ADDED[:, :1, :1], "causal": True, "q_offset": 1020},
    "bias of queries": {"bias": ADDED[0, :, :, :1], "kv_len": np.array([2000, 33])},
    "bias that rises": {"bias": (np.arange(2100) * 0.9).astype("f")},
    "bias that falls": {"bias": ADDED - (np.arange(2100) * 0.3).astype("f")},
    "bias that excludes": {"bias": np.where(KEEPS, ADDED, -np.inf), "mask": KEEPS[0, 0, 0]},
    "alibi": {"alibi_slopes": cases.slopes(6), "q_offset": 900, "kv_offset": np.array([3, -8])},
    "softcap": {"softcap": 1.5, "scale": 1.0},
    "segments": {"segment_ids": (np.arange(5) // 2, np.arange(2100) // 1000)},
    "negative segments": {"segment_ids": (np.array([0, -1, 0, 0, 1]), np.arange(2100) % 3 - 1)},
    "block_mask": {"block_mask": DRAWN.random((2, 6, 1, 17)) < 0.5},
    "mod of distance": {"mask_mod": lambda b, h, i, j: (i - j) % 3 != 0},
    "mod of heads": {"mask_mod": lambda b, h, i, j: (j < 1024) | (h % 2 == 1)},
    "mod of entries": {"mask_mod": lambda b, h, i, j: j // 128 % 2 == b, "mask": KEEPS},
    "score_mod": {"score_mod": cases.distance_mod, "scale": 0.1, "window": (60, 60),
                  "q_offset": 1000},
    "sinks": {"sinks": np.linspace(-2, 3, 6).astype("f"), "mask": KEEPS},
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_over_several_parts(options):
    for dtype in ("float32", "bfloat16") if "mask_mod" not in options else ("float64",):
        check(arrays(dtype, 5, 2100, num_heads=6, num_kv_heads=2, lead=(2,)) | options)


@pytest.mark.parametrize("len_q", [3, 9])
def test_dropout_over_several_parts(len_q):
    options = {"dropout": 0.3, "seed": 4, "causal": True, "q_offset": 1500, "kv_offset": -7}
    arguments = arrays("float32", len_q, 2100, num_heads=6, num_kv_heads=2, lead=(2,))
    wide = {name: x.astype(np.float64) for name, x in arguments.items()}
    truth = sd.attention(**wide, **options, impl="dense")
    yardstick = sd.attention(**arguments, **options, impl="dense")
    got = sd.attention(**arguments, **options, impl="kernels")
    assert_close(got, truth, yardstick, eps=EPS["float32"], len_kv=2100)


@pytest.mark.parametrize("d_v", [5, 32])
@pytest.mark.parametrize("dtype", DTYPES)
def test_odd_values_reach_who_sees_them(dtype, d_v):
    """Copied or in place, in one part of three, with and without a clean tile before."""
    arguments = arrays(dtype, 3, 2100, d_v=d_v, num_heads=4, num_kv_heads=2)
    mask = np.ones((4, 3, 2100), bool)
    mask[:, :2, [1030, 1300]], mask[3, :, 40], mask[:, 0, 2099] = False, False, False
    clean = sd.attention(**arguments, mask=mask, impl="kernels")
    value = arguments["value"]
    value[0, 1030, 0], value[0, 1300, 1], value[1, 40, 0] = np.nan, np.inf, -np.inf
    value[1, 2099, -1], value[0, 1300, -1], value[1, 1200, 2] = np.inf, -np.inf, 0
    got = check(arguments | {"mask": mask})
    same = np.isfinite(as_float64(got))
    assert same[:2, :2].all()
    assert not same[:, 2].all(-1).any()
    assert np.array_equal(got[:2, :2], clean[:2, :2])


def test_a_sum_of_values_that_overflows():
    """A sum that overflows is no reason for nan; a nan in another part stays in its column."""
    arguments = arrays("float32", 1, 1100)
    arguments["value"][:] = np.finfo("f").max
    got = sd.attention(**arguments, impl="kernels")
    assert ((got > 3e38) | np.isposinf(got)).all()
    arguments["value"][0, 1050, 0] = np.nan
    got = sd.attention(**arguments, impl="kernels")
    assert np.isnan(got[..., 0]).all()
    assert not np.isnan(got[..., 1:]).any()


@pytest.mark.parametrize("amplitude", [1e-6, 2e-5, 1.0, 2e4])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("len_q", [4, 20])
def test_results_are_rounded_once_to_nearest(dtype, amplitude, len_q):
    """Also to the subnormal numbers of float16, and beyond its largest."""
    arguments = arrays(dtype, len_q, 9, d_v=64) | {"q_offset": 0}
    wide = amplitude * np.random.default_rng(5).standard_normal((1, 9, 64))
    with np.errstate(over="ignore"):
        arguments["value"] = wide.astype(arguments["value"].dtype)
        arguments |= {"dropout": 0.9, "seed": 3}  # which makes numbers larger
        got = sd.attention(**arguments, impl="kernels")
        unrounded = sd.attention_state(**arguments, impl="kernels").out
        assert got.tobytes() == unrounded.astype(got.dtype).tobytes()
    assert len(np.unique(as_float64(got))) > 20


LAYOUTS = {
    "transposed": lambda x: np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2),
    "reversed": lambda x: np.ascontiguousarray(x[..., ::-1, ::-1])[..., ::-1, ::-1],
    "rows apart": lambda x: np.repeat(x, 3, axis=-2)[..., 1::3, :],
    "step": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
}


@pytest.mark.parametrize("layout", [*LAYOUTS, "broadcast"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d_k", [7, 32])
def test_any_layout_gives_the_same_bits(layout, dtype, d_k):
    arguments = arrays(dtype, 3, 200, d_k=d_k, d_v=d_k, num_heads=4, num_kv_heads=2)
    if layout == "broadcast":
        laid_out = {n: np.broadcast_to(x[:1, :1, :1], x.shape) for n, x in arguments.items()}
        laid_out["query"] = np.broadcast_to(arguments["query"][..., :1], arguments["query"].shape)
    else:
        laid_out = {n: LAYOUTS[layout](x) for n, x in arguments.items()}
    copies = {n: np.ascontiguousarray(x).copy() for n, x in laid_out.items()}
    assert all(x.strides != copies[n].strides for n, x in laid_out.items())
    assert sd.attention(**laid_out, impl="kernels").tobytes() == sd.attention(
        **copies, impl="kernels").tobytes()  # fmt: skip


# What must change no bit, beyond what `test_determinism` asks


def runs(arguments, impl="kernels"):
    """Bytes of all that the kernels compute of these arguments."""
    query, key, value, *_ = arguments.values()
    options = {n: x for n, x in arguments.items() if n not in ("query", "key", "value")}
    state = sd.attention_state(query, key, value, **{"q_offset": 3} | options, impl=impl)
    shaping = {n: x for n, x in options.items() if n not in ("dropout", "seed")}
    weights = sd.attention_weights(query, key, **shaping, impl=impl)
    out = sd.attention(query, key, value, **options, impl=impl)
    return [out.tobytes(), state.out.tobytes(), state.lse.tobytes(), weights.tobytes()]


NEUTRAL = {
    "mask": {"mask": np.ones((1, 1), bool)}, "kv_len": {"kv_len": 1100},
    "offset": {"kv_offset": 0},
    "window": {"window": (4000, 2000)}, "dropout": {"dropout": 0.0, "seed": 3},
    "segment": {"segment_ids": (np.zeros(1, int), np.zeros(1100, int))},
}  # fmt: skip


@pytest.mark.parametrize("len_q", [1, 7, 9, 60])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_changes_no_bit(dtype, len_q):
    """Threads; options that leave everything; other heads and entries of the call."""
    size = {"num_heads": 6, "num_kv_heads": 2, "lead": (3,), "d_k": 20, "d_v": 9}
    arguments = arrays(dtype, len_q, 1100, **size)
    sd.set_num_threads(1)
    whole = runs(arguments)
    for num_threads, options in zip((2, 4, 3, 2, 1, 4), NEUTRAL.values(), strict=True):
        sd.set_num_threads(num_threads)
        assert runs(arguments | options) == whole, options
    out = sd.attention(**arguments, impl="kernels")
    query, key, value = arguments.values()
    for entry, head in product((0, 2), (0, 4, 5)):
        mine = slice(head // 3, head // 3 + 1)
        given = query[entry, head : head + 1], key[entry, mine], value[entry, mine]
        alone = sd.attention(*given, impl="kernels")
        assert alone.tobytes() == out[entry, head].tobytes()


@pytest.mark.parametrize("group_size", [1, 3, 4, 5, 9])
def test_groups_of_heads(group_size):
    """Each head reads the keys of its group, in forward and in decoding."""
    for len_q, len_kv in ((1, 300), (3, 40), (8, 1030), (9, 130)):
        check(arrays("float32", len_q, len_kv, num_heads=2 * group_size, num_kv_heads=2, lead=(2,)))
