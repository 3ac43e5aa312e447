"""Forward and weights by compiled kernels, at the edges of what they do at a time.

Truth is the textbook computation in float64: the oracle's loops would take minutes at these
lengths. It is checked against the oracle wherever both fit.
"""

import math
from itertools import cycle

import numpy as np
import pytest

import cases
import scaledot as sd
import textbook
from compare import EPS, as_float64, assert_close

DTYPES = ["float32", "float64", "float16", "bfloat16"]
HALVES = ("float16", "bfloat16")
WIDTHS = (1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 65)
OF_TEXTBOOK = ("scale", "softcap", "bias", "alibi_slopes", "score_mod", "sinks")


def arrays(dtype="float32", len_q=49, len_kv=257, seed=0, **size):
    size = cases.Size(len_q, len_kv, **{"d_k": 16, "d_v": 8, "num_heads": 1, "lead": ()} | size)
    drawn = size.arrays(np.random.default_rng([seed, len_q, len_kv]))
    return {name: x.astype(cases.dtype_named(dtype)) for name, x in drawn.items()}


def positions(arguments):
    """Leading axes, and positions of queries (lead, 1, len_q, 1) and keys (lead, 1, 1, len_kv)."""
    query, key = arguments["query"], arguments["key"]
    lead, len_q, len_kv = query.shape[:-3], query.shape[-2], key.shape[-2]
    kv_len = np.broadcast_to(arguments.get("kv_len", len_kv), lead)
    kv_offset = np.broadcast_to(arguments.get("kv_offset", 0), lead)
    q_offset = np.broadcast_to(arguments.get("q_offset", kv_offset + kv_len - len_q), lead)
    q_pos = q_offset[..., None, None, None] + np.arange(len_q)[:, None]
    kv_start = kv_offset[..., None, None, None]
    return q_pos, kv_start + np.arange(len_kv), kv_start + kv_len[..., None, None, None]


def visible(arguments):
    """Boolean array (lead, num_heads, len_q, len_kv), from every option that excludes."""
    query, key = arguments["query"], arguments["key"]
    lead, (num_heads, len_q, _) = query.shape[:-3], query.shape[-3:]
    q_pos, kv_pos, kv_end = positions(arguments)
    left, right = arguments.get("window", (None, None))
    right = min(right or 0, 0) if arguments.get("causal") else right
    seen = (kv_pos < kv_end) & np.ones((*lead, num_heads, len_q, key.shape[-2]), bool)
    seen &= arguments.get("mask", True)
    if "bias" in arguments:
        seen &= arguments["bias"] != -np.inf
    if left is not None:
        seen &= kv_pos >= q_pos - left
    if right is not None:
        seen &= kv_pos <= q_pos + right
    if "segment_ids" in arguments:
        q_ids, kv_ids = (ids[..., None, :, None] for ids in arguments["segment_ids"])
        seen &= (q_ids == kv_ids.swapaxes(-1, -2)) & (q_ids >= 0)
    if "block_mask" in arguments:
        wide = arguments["block_mask"].repeat(128, axis=-2).repeat(128, axis=-1)
        seen &= wide[..., :len_q, : key.shape[-2]]
    if "mask_mod" in arguments:
        batch = np.arange(math.prod(lead)).reshape(*lead, 1, 1, 1)
        seen &= arguments["mask_mod"](batch, np.arange(num_heads)[:, None, None], q_pos, kv_pos)
    return seen


def by_textbook(arguments, seen, dtype):
    """Results in a dtype: out with what nan and infinity in values make of it, and lse."""
    q_pos, kv_pos, _ = positions(arguments)
    query, key, value = (arguments[n].astype(dtype) for n in ("query", "key", "value"))
    options = {n: arguments[n] for n in OF_TEXTBOOK if n in arguments}
    if "bias" in options:
        options["bias"] = np.where(np.isnan(options["bias"]), 0, options["bias"])
    clean = np.where(np.isfinite(value), value, 0).astype(dtype)
    out, lse = textbook.attention(query, key, clean, seen, q_pos=q_pos, kv_pos=kv_pos, **options)
    if np.isfinite(value).all():
        return out, lse
    value = value.repeat(query.shape[-3] // key.shape[-3], axis=-3)
    for odd, found in ((np.inf, value == np.inf), (-np.inf, value == -np.inf),
                       (np.nan, np.isnan(value))):  # fmt: skip
        reached = seen.astype("f") @ found.astype("f") > 0
        with np.errstate(invalid="ignore"):
            out = np.where(reached, out + out.dtype.type(odd), out)
    return out, lse


def wider(dtype):
    """Dtype of the truth: one in which its own rounding does not show."""
    return np.dtype(np.longdouble if dtype == "float64" else np.float64)


def check(arguments, seen=None, impl="kernels"):
    """Hold out and lse to the rule; return out."""
    dtype, len_kv = arguments["query"].dtype.name, arguments["key"].shape[-2]
    seen = visible(arguments) if seen is None else seen
    out, lse = by_textbook(arguments, seen, wider(dtype))
    got = sd.attention(**arguments, impl=impl)
    yardstick, yardstick_lse = by_textbook(arguments, seen, arguments["query"].dtype)
    assert_close(got, out, yardstick, eps=EPS[dtype], len_kv=len_kv)
    if "sinks" not in arguments:
        start = positions(arguments)[0][..., 0, 0, 0]
        options = {"q_offset": start if start.ndim else int(start)} | arguments
        state = sd.attention_state(**options, impl=impl)
        if dtype in HALVES:  # whose scores and sums are float32
            dtype = "float32"
            yardstick, yardstick_lse = by_textbook(arguments, seen, np.dtype(dtype))
        assert_close(state.lse, lse, yardstick_lse, eps=EPS[dtype], len_kv=len_kv)
        if got.dtype.name != "bfloat16":  # of which the kernels round the weights too
            assert_close(state.out, out, yardstick, eps=EPS[dtype], len_kv=len_kv)
    return got


@pytest.mark.parametrize("len_kv", [2, 127, 128, 129, 257])
@pytest.mark.parametrize("dtype", DTYPES)
def test_edges_of_tiles_and_vectors(dtype, len_kv):
    widths, num_heads = cycle(WIDTHS), 1 if len_kv > 9 else 8  # the rule wants many numbers
    lengths = (9, 15, 16, 17, 47, 48, 49, 191, 192, 193)
    for len_q in lengths:
        d_k, d_v = next(widths), next(widths)
        check(arrays(dtype, len_q, len_kv, d_k=d_k, d_v=d_v, num_heads=num_heads))
        next(widths)
        check(arrays(dtype, len_q, len_kv, d_k=d_v, d_v=d_k, num_heads=num_heads)
              | {"causal": True})  # fmt: skip


ONE_KEY = np.random.default_rng(1).permutation(300)[:201]
HIDDEN = ONE_KEY[:, None] != np.arange(300)
SHOWS_ONE = {
    "mask": {"mask": ~HIDDEN},
    "bias": {"bias": np.where(HIDDEN, -np.inf, np.float32(0))},
    "segments": {"segment_ids": (ONE_KEY, np.arange(300))},
    "window": {"window": (0, 0), "q_offset": 3},
    "mask_mod": {"mask_mod": lambda b, h, i, j: i == j, "q_offset": 3},
}


@pytest.mark.parametrize("d_v", [1, 8, 37, 64])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", SHOWS_ONE)
def test_who_sees_one_key_gets_its_value_to_the_bit(how, dtype, d_v):
    arguments = arrays(dtype, 201, 300, d_v=d_v, num_heads=3, num_kv_heads=1)
    keys = np.arange(3, 204) if "q_offset" in SHOWS_ONE[how] else ONE_KEY
    got = sd.attention(**arguments, **SHOWS_ONE[how], impl="kernels")
    assert np.array_equal(got, np.stack([arguments["value"][0, keys]] * 3))


DRAWN = np.random.default_rng(2)
KEEPS = DRAWN.random((2, 6, 201, 300)) < 0.6
ADDED = DRAWN.standard_normal((2, 6, 201, 300)).astype("f")
BANDS = (np.arange(201) // 60, np.arange(300) // 90)  # tiles of one segment, of none, of some
SOME_NEGATIVE = (np.where(np.arange(201) == 5, -3, 0), np.where(np.arange(300) == 77, -3, 0))
SOME_ROWS = (np.arange(201) % 50 != 3)[:, None]
OPTIONS = {
    "causal": {"causal": True},
    "causal from inside a tile": {"causal": True, "q_offset": np.array([17, -60])},
    # The first query of a block sees the last of 8 keys only, the last query the first of 8.
    "window": {"window": (70, 4), "q_offset": 101},
    "window inside a tile": {"window": (9, None), "q_offset": 135, "kv_offset": 2},
    "kv_len": {"kv_len": np.array([131, 0])},
    "kv_len, q_offset": {"kv_len": np.array([300, 7]), "q_offset": 90, "causal": True},
    "mask": {"mask": KEEPS},
    "mask of some rows": {"mask": KEEPS | SOME_ROWS},
    "mask of keys": {"mask": KEEPS[0, 0, 0]},
    "mask of queries": {"mask": KEEPS[0, 0, :, :1]},
    "mask, transposed": {"mask": np.ascontiguousarray(KEEPS.swapaxes(2, 3)).swapaxes(2, 3)},
    "mask, reversed": {"mask": KEEPS[..., ::-1, ::-1]},
    "mask, window": {"mask": KEEPS, "window": (40, 3)},
    "bias": {"bias": ADDED},
    "bias of keys": {"bias": ADDED[:, :, :1]},
    "bias of queries": {"bias": ADDED[0, :1, :, :1]},
    "bias that rises": {"bias": (np.arange(300) * 0.9).astype("f")},
    "bias that falls": {"bias": ADDED - (np.arange(300) * 0.7).astype("f")},
    "bias, reversed": {"bias": ADDED[..., ::-1, ::-1].astype(np.float64), "causal": True},
    "bias that excludes": {"bias": np.where(KEEPS & SOME_ROWS, ADDED, -np.inf).astype("f")},
    "bias of half precision": {"bias": ADDED.astype(np.float16), "window": (33, 40)},
    "alibi": {"alibi_slopes": cases.slopes(6), "q_offset": np.array([150, 7]), "kv_offset": 3},
    "softcap, bias": {"softcap": 1.5, "bias": ADDED[:, :, :1]},
    "scale": {"scale": -0.6, "window": (100, 20)},
    "segments": {"segment_ids": BANDS},
    "negative segments": {"segment_ids": SOME_NEGATIVE},
    "segments of each": {"segment_ids": (DRAWN.integers(0, 2, (2, 201)), BANDS[1] % 2)},
    "segments, mask": {"segment_ids": BANDS, "mask": KEEPS},
    "block_mask": {"block_mask": DRAWN.random((2, 6, 2, 3)) < 0.5},
    "block_mask, mask": {"block_mask": DRAWN.random((2, 6, 2, 3)) < 0.7, "mask": KEEPS},
    "mod of distance": {"mask_mod": lambda b, h, i, j: (i - j) % 3 != 0},
    "mod of entries": {"mask_mod": lambda b, h, i, j: (j // 128 + b) % 2 == 0},
    "mod of heads": {"mask_mod": lambda b, h, i, j: (j < 128) | (h % 2 == 1)},
    "mod beside offsets": {"mask_mod": lambda b, h, i, j: j > 128, "kv_offset": np.array([0, 90])},
    "mod beside lengths": {"mask_mod": lambda b, h, i, j: i > 130, "kv_len": np.array([300, 210])},
    "mods, mask": {"mask_mod": lambda b, h, i, j: j % 5 != h % 5, "mask": KEEPS, "causal": True,
                   "score_mod": cases.distance_mod, "scale": 0.1},
    "score_mod": {"score_mod": cases.distance_mod, "window": (50, 9), "q_offset": 20},
    "sinks": {"sinks": np.linspace(-2, 3, 6).astype("f"), "mask": KEEPS},
}  # fmt: skip


def in_turn(*dtypes):
    """Parametrize by options, one dtype for each."""
    params = [pytest.param(options, dtype, id=name)
              for (name, options), dtype in zip(OPTIONS.items(), cycle(dtypes), strict=False)]
    return pytest.mark.parametrize(("options", "dtype"), params)


@in_turn("float32", "float64", "bfloat16")
def test_options_over_several_tiles(options, dtype):
    arguments = arrays(dtype, 201, 300, num_heads=6, num_kv_heads=2, lead=(2,))
    check(arguments | options)


@in_turn("bfloat16", "float32", "float64", "float32")
def test_weights_over_several_tiles(options, dtype):
    arguments = arrays(dtype, 201, 300, num_heads=6, num_kv_heads=2, lead=(2,)) | options
    check_weights(arguments)


def check_weights(arguments, **rows):
    """Hold what weights make of values to the rule: of each key another."""
    query, key, value = (arguments[n] for n in ("query", "key", "value"))
    seen = visible(arguments)
    dtype = np.dtype("float64" if query.dtype == np.float64 else "float32")
    truth, yardstick = (by_textbook(arguments, seen, d)[0] for d in (wider(dtype.name), dtype))
    given = {n: x for n, x in arguments.items() if n != "value"}
    got = sd.attention_weights(**given, **rows, impl="kernels")
    assert got.dtype == dtype
    chosen = rows.get("rows", slice(None))
    assert ((got > 0) <= seen[..., chosen, :]).all()
    value = as_float64(value).repeat(query.shape[-3] // key.shape[-3], axis=-3)
    assert_close(as_float64(got) @ value, truth[..., chosen, :], yardstick[..., chosen, :],
                 eps=EPS[dtype.name], len_kv=key.shape[-2])  # fmt: skip


@pytest.mark.parametrize("len_kv", [1, 15, 16, 17, 127, 128, 129, 257])
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_at_edges(dtype, len_kv):
    for len_q, d_k in zip((1, 16, 17, 48, 49, 97), cycle((1, 9, 32, 33, 65)), strict=False):
        check_weights(arrays(dtype, len_q, len_kv, d_k=d_k, num_heads=2, num_kv_heads=1))
        check_weights(arrays(dtype, len_q, len_kv, d_k=d_k) | {"causal": True})


@pytest.mark.parametrize("options", [
    {"causal": True}, {"mask": KEEPS[0, 0]}, {"alibi_slopes": cases.slopes(1)},
    {"block_mask": np.array([[1, 0, 1], [0, 1, 1]], bool)}, {"score_mod": cases.distance_mod},
    {"mask_mod": lambda b, h, i, j: (i + j) % 4 != 0}, {"sinks": np.array([1.5], "f")},
    {"segment_ids": BANDS}, {"bias": ADDED[0, 0]},
], ids="-".join)  # fmt: skip
def test_weights_of_rows_apart(options):
    rows = np.array([200, 3, 4, 5, 130, 129, 60, 3])
    check_weights(arrays("float32", 201, 300, lead=(2,)) | options, rows=rows)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_no_weight_is_subnormal(dtype):
    """Neither before nor after the division by their sum, wherever in the row they are."""
    bounds = np.finfo(dtype)
    low = math.log(bounds.smallest_normal)
    bias = np.linspace(low - 4, low + 9, 301)
    bias[150] = 0
    arguments = {"query": np.zeros((9, 1), dtype), "key": np.zeros((301, 1), dtype)}
    for top in (0, 5):  # log of the sum
        bias[[0, 300]] = [top, -math.inf]
        got = sd.attention_weights(**arguments, bias=bias, impl="kernels")
        assert ((got == 0) | (got >= bounds.smallest_normal)).all()
        far = bias - np.log(np.exp(bias).sum())
        assert (got[:, far > low + 1] > 0).all()
        assert (got[:, far < low - 1] == 0).all()


@pytest.mark.parametrize("d_v", [5, 16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden_by", ["mask", "window", "kv_len", "segment_ids", "mask_mod"])
def test_odd_values_reach_who_sees_them(hidden_by, dtype, d_v):
    """In several tiles, of which one has been clean before, for two blocks of queries."""
    options = {
        "mask": {"mask": KEEPS[0, :3]}, "window": {"window": (20, 0), "q_offset": 60},
        "kv_len": {"kv_len": 199, "q_offset": 0}, "segment_ids": {"segment_ids": BANDS},
        "mask_mod": {"mask_mod": lambda b, h, i, j: (i + j + h) % 2 == 0},
    }[hidden_by]  # fmt: skip
    arguments = arrays(dtype, 201, 300, d_v=d_v, num_heads=3, num_kv_heads=1) | options
    clean = sd.attention(**arguments, impl="kernels")
    value = arguments["value"]
    value[0, 130, 0], value[0, 139, 3], value[0, 198, 0] = np.nan, np.inf, np.inf
    value[0, 198, -1], value[0, 260, -1], value[0, 199, 2] = -np.inf, np.inf, np.nan
    got = check(arguments)
    same = np.isfinite(as_float64(got))
    assert 0 < same.sum() < same.size
    assert np.array_equal(got[same], clean[same])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_odd_keys_and_bias_that_nobody_sees(dtype):
    arguments = arrays(dtype, 60, 300, num_heads=2) | {"mask": KEEPS[0, :2, :60] & (
        np.arange(300) % 7 != 2)}  # fmt: skip
    bias = np.where(arguments["mask"], ADDED[0, :2, :60], np.nan)
    clean = check(arguments | {"bias": np.where(arguments["mask"], bias, 0)})
    arguments["key"][:, 2::7] = np.nan
    arguments["key"][:, 9::70] = np.inf
    got = sd.attention(**arguments, bias=bias, impl="kernels")
    assert got.tobytes() == clean.tobytes()
