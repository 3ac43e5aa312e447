"""attention, attention_state, attention_weights against the oracle, case by case."""

import functools
import math

import numpy as np
import pytest

import cases
import naive
import scaledot as sd
import textbook
from compare import EPS, assert_close
from conftest import IMPLEMENTATIONS

SIZE = cases.Size(len_q=5, len_kv=9, d_k=4, d_v=3, num_heads=4, num_kv_heads=2, lead=(2,))
COMBINATIONS = cases.pairwise()
NAMES = [case.name for case in cases.CASES]


@functools.cache
def case_truth(name, dtype):
    """Oracle's and yardstick's results of a named case."""
    return truth_of(cases.case(name).arguments(dtype))


@functools.cache
def combination_truth(index):
    return truth_of(combination_arguments(index))


def combination_arguments(index, to_array=None):
    combination = COMBINATIONS[index]
    rng = np.random.default_rng(index)
    arrays = {name: x.astype(np.float32) for name, x in SIZE.arrays(rng).items()}
    if to_array is not None:
        arrays = {name: to_array(x) for name, x in arrays.items()}
    return arrays | cases.options_of(combination, SIZE, rng, to_array)


def truth_of(arguments):
    out, lse, weights = naive.attention(**arguments)
    dropout = arguments.get("dropout", 0.0)
    shaping = {n: x for n, x in arguments.items() if n not in ("dropout", "seed")}
    plain, _, _ = naive.attention(**shaping) if dropout else (out, lse, weights)
    yardstick_out, yardstick_lse = textbook_of(shaping, weights)
    if 0 < dropout < 1:
        # The textbook has no dropout: its error grows with the kept weights.
        wide = (yardstick_out.astype(np.float64) - plain) / (1 - dropout)
        yardstick_out = out + wide
    return out, lse, weights, yardstick_out, yardstick_lse


def textbook_of(arguments, weights):
    query, key, value = (arguments[n] for n in ("query", "key", "value"))
    names = ("scale", "softcap", "bias", "alibi_slopes", "score_mod", "sinks")
    options = {n: arguments[n] for n in names if n in arguments}
    lead = weights.shape[:-3]
    kv_offset = np.broadcast_to(arguments.get("kv_offset", 0), lead)
    kv_len = np.broadcast_to(
        key.shape[-2] if arguments.get("kv_len") is None else arguments["kv_len"], lead
    )
    q_offset = arguments.get("q_offset")
    q_offset = kv_offset + kv_len - query.shape[-2] if q_offset is None else q_offset
    q_pos = np.broadcast_to(q_offset, lead)[..., None, None, None] + np.arange(query.shape[-2])[
        :, None
    ]
    kv_pos = kv_offset[..., None, None, None] + np.arange(key.shape[-2])
    with np.errstate(all="ignore"):
        seen = ~(weights == 0)
    return textbook.attention(query, key, value, seen, q_pos=q_pos, kv_pos=kv_pos, **options)


def skip_what_cannot_be(xp, arguments, impl, index):
    """Leave out what a library cannot do.

    JAX compiles for every shape: each of its cases runs by one implementation.
    """
    if xp.name == "strict" and arguments.get("score_mod") is cases.distance_mod:
        pytest.skip("array-api-strict does not multiply integers by floats, as this mod does")
    if xp.name == "jax" and IMPLEMENTATIONS[index % 2] != impl:
        pytest.skip("JAX compiles for every shape: each case runs by one implementation")


def check(arguments, truth, dtype, impl, *, only_out=False):
    out, lse, weights, yardstick_out, yardstick_lse = truth
    len_kv = weights.shape[-1]
    got = sd.attention(**arguments, impl=impl)
    assert type(got) is type(arguments["query"])
    assert got.dtype == arguments["query"].dtype
    assert_close(got, out, yardstick_out, eps=EPS[dtype], len_kv=len_kv)
    if only_out:
        return

    state_dtype = "float64" if dtype == "float64" else "float32"
    shaping = {n: x for n, x in arguments.items() if n not in ("value", "dropout", "seed")}
    got_weights = sd.attention_weights(**shaping, impl=impl)
    assert str(got_weights.dtype).endswith(state_dtype)
    score_error = score_floor(lse, state_dtype)
    assert_close(got_weights, weights, weights * (1 + score_error), eps=EPS[state_dtype],
                 len_kv=len_kv)
    if "sinks" in arguments:
        return
    options = dict(arguments)
    if options.get("q_offset") is None:
        kv_len = options.get("kv_len")
        kv_len = options["key"].shape[-2] if kv_len is None else kv_len
        options["q_offset"] = options.get("kv_offset", 0) + kv_len - options["query"].shape[-2]
    state = sd.attention_state(**options, impl=impl)
    assert str(state.out.dtype).endswith(state_dtype)
    assert str(state.lse.dtype).endswith(state_dtype)
    if dtype in ("float32", "float64"):
        assert_close(state.lse, lse, yardstick_lse, eps=EPS[dtype], len_kv=len_kv)
    else:
        assert_close(state.lse, lse, lse * (1 + score_error), eps=EPS["float32"], len_kv=len_kv)


def score_floor(lse, dtype):
    """Relative error of exp(score) where scores carry one rounding each."""
    finite = np.abs(lse[np.isfinite(lse)])
    return EPS[dtype] * (1 + (finite.max() if finite.size else 0.0))


@pytest.mark.parametrize("index", range(len(NAMES)), ids=NAMES)
def test_named_case(index, xp, impl):
    name = NAMES[index]
    arguments = cases.case(name).arguments(to_array=xp.array)
    skip_what_cannot_be(xp, arguments, impl, index)
    only_out = xp.name == "jax" and index % 4 > 1
    check(arguments, case_truth(name, "float32"), "float32", impl, only_out=only_out)


def test_bias_beyond_the_range_of_float32(impl):
    """A finite number excludes nothing, however low; only where all are so low do they count."""
    arguments = {name: x.astype(np.float32) for name, x in
                 cases.Size(2, 7).arrays(np.random.default_rng(4)).items()}  # fmt: skip
    bias = np.zeros((2, 7))
    bias[0, 3], bias[1] = 1e300, np.finfo(np.float64).min
    out, _, weights = naive.attention(**arguments, bias=np.clip(bias, -1e38, 1e38))
    got = sd.attention(**arguments, bias=bias, impl=impl)
    assert_close(got, out, textbook_of(arguments, weights)[0], eps=EPS["float32"], len_kv=7)


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_named_case_in_other_dtypes(name, dtype, impl):
    arguments = cases.case(name).arguments(dtype)
    check(arguments, case_truth(name, dtype), dtype, impl)


@pytest.mark.parametrize("name", ["plain", "gqa"])
@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_dtypes_of_other_libraries(name, dtype, xp, impl):
    arguments = cases.case(name).arguments(dtype, to_array=xp.array)
    skip_what_cannot_be(xp, arguments, impl, IMPLEMENTATIONS.index(impl))
    check(arguments, case_truth(name, dtype), dtype, impl)


@pytest.mark.parametrize(
    "index", range(len(COMBINATIONS)), ids=lambda i: f"{i}:{cases.label(COMBINATIONS[i])}"
)
def test_pairs_of_options(index, xp, impl):
    arguments = combination_arguments(index, xp.array)
    skip_what_cannot_be(xp, arguments, impl, index)
    only_out = xp.name == "jax" and index % 4 > 1
    check(arguments, combination_truth(index), "float32", impl, only_out=only_out)


def test_weights_of_rows(xp, impl):
    """Rows are those of the whole matrix, for every option that has an axis of queries."""
    for index in range(0, len(COMBINATIONS), 12 if xp.name == "jax" else 4):
        arguments = combination_arguments(index, xp.array)
        if xp.name == "strict" and arguments.get("score_mod") is cases.distance_mod:
            continue
        weights = combination_truth(index)[2]
        shaping = {n: x for n, x in arguments.items() if n not in ("value", "dropout", "seed")}
        for rows in ([4, 0, -2], [], np.arange(5)):
            got = sd.attention_weights(**shaping, rows=rows, impl=impl)
            truth = weights[..., np.asarray(rows, dtype=int), :]
            floor = score_floor(combination_truth(index)[1], "float32")
            assert_close(got, truth, truth * (1 + floor), eps=EPS["float32"], len_kv=9)


def test_textbook_form():
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((2, 3, n, 4)) for n in (4, 6, 6))
    mask = rng.random((4, 6)) < 0.7
    mask[2] = False
    out, lse, weights = naive.attention(query, key, value, mask=mask)
    for given in (mask, mask.astype(np.int64), mask.astype(np.float32)):
        got = sd.scaled_dot_product_attention(query, key, value, given)
        assert_close(got[0], out, eps=EPS["float64"], len_kv=6)
        assert_close(got[1], weights, eps=EPS["float64"], len_kv=6)
    assert (got[1][..., 2, :] == 0).all()
    assert_close(got[1].sum(-1), np.where(np.isneginf(lse), 0.0, 1.0), eps=EPS["float64"], len_kv=6)


def test_merge_is_commutative_to_the_bit_and_takes_empty_states(xp):
    rng = np.random.default_rng(1)
    out = rng.standard_normal((2, 5, 3)).astype(np.float32)
    lse = rng.standard_normal((2, 5)).astype(np.float32) * 30
    out[1, 0] = np.nan  # an empty state's out is never read
    lse[0, :2], lse[1, 0] = -np.inf, -np.inf
    a, b = (sd.State(xp.array(out[i]), xp.array(lse[i])) for i in (0, 1))
    ab, ba = sd.merge(a, b), sd.merge(b, a)
    for left, right in zip(ab, ba, strict=True):
        assert np.asarray(left).tobytes() == np.asarray(right).tobytes()
    out[1, 0] = 0
    truth_out, truth_lse = naive.merge([(out[0], lse[0]), (out[1], lse[1])])
    assert_close(ab.out, truth_out, eps=EPS["float32"], len_kv=2)
    assert_close(ab.lse, truth_lse, eps=EPS["float32"], len_kv=2)
    assert np.isneginf(np.asarray(ab.lse)[0])
    assert (np.asarray(ab.out)[0] == 0).all()


def test_merge_keeps_nan():
    state = sd.State(np.ones((1, 2)), np.array([math.nan]))
    merged = sd.merge(state, sd.State(np.zeros((1, 2)), np.array([-math.inf])))
    assert np.isnan(merged.lse).all()
    assert np.isnan(merged.out).all()


def test_chunks_in_any_order_are_the_whole(xp):
    rng = np.random.default_rng(2)
    query, key, value = (rng.standard_normal((2, 4, 11, 3)) for _ in range(3))
    mask, bias = rng.random((11, 11)) < 0.7, rng.standard_normal((11, 11))
    out, lse, _ = naive.attention(query, key, value, causal=True, window=(6, None), mask=mask,
                                  bias=bias, dropout=0.3, seed=5)
    bounds = [(4, 11), (0, 1), (1, 1), (1, 4)]
    chunks = (
        sd.Chunk(
            *(xp.array(x[..., a:b, :]) for x in (key, value)), a,
            mask=xp.array(mask[:, a:b]), bias=xp.array(bias[:, a:b]),
        )
        for a, b in bounds
    )
    state = sd.attend_chunks(xp.array(query), chunks, causal=True, window=(6, None), dropout=0.3,
                             seed=5, q_offset=0)
    assert_close(state.out, out, eps=EPS["float64"], len_kv=11)
    assert_close(state.lse, lse, eps=EPS["float64"], len_kv=11)


def test_varlen(xp):
    rng = np.random.default_rng(3)
    starts_q, starts_kv = [0, 2, 2, 7, 8], [0, 3, 5, 9, 9]
    query, key, value = (rng.standard_normal(s) for s in ((8, 4, 3), (9, 2, 3), (9, 2, 5)))
    sinks = rng.standard_normal(4)
    query, key, value, sinks = (x.astype(np.float32) for x in (query, key, value, sinks))
    mods = [] if xp.name == "strict" else [{"score_mod": cases.distance_mod, "scale": 0.3}]
    options_in_turn = (
        *mods, {}, {"causal": True}, {"window": (1, 0), "softcap": 2.0},
        {"causal": True, "sinks": sinks},
        {"dropout": 0.4, "seed": 9}, {"dropout": 0.4, "seed": np.array([3, 1, 4, 1])},
        {"mask_mod": cases.dilated},
    )
    for options in options_in_turn[:: 3 if xp.name == "jax" else 1]:
        truth = naive.varlen(query, key, value, starts_q, starts_kv, **options)
        got = sd.varlen_attention(*map(xp.array, (query, key, value)), starts_q,
                                  np.asarray(starts_kv), **xp.arguments(options))
        out = truth[0] if isinstance(truth, tuple) else truth
        assert_close(got, out, eps=4 * EPS["float32"], len_kv=4)


def test_varlen_of_nothing():
    x = np.zeros((0, 2, 3), dtype=np.float32)
    for starts in ([0], [0, 0, 0]):
        assert sd.varlen_attention(x, x, x, starts, starts).shape == (0, 2, 3)


def test_weights_of_a_row_of_lowest_biases_are_equal(impl):
    """lse does not tell how many there are: lse + log(5) == lse."""
    query, key = np.ones((1, 2, 3, 4), "f"), np.ones((1, 2, 5, 4), "f")
    bias = np.full((3, 5), np.finfo(np.float32).min)
    weights = sd.attention_weights(query, key, bias=bias, impl=impl)
    assert_close(weights, np.full(weights.shape, 0.2), eps=EPS["float32"], len_kv=5)
