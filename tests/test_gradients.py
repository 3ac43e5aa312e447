"""attention_vjp against the oracle of gradients, case by case.

Beyond the sizes of the oracle's loops, the truth is the textbook's gradient in a wider dtype; it
is checked against the oracle wherever both fit.
"""

import functools
import math
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
import pytest

import cases
import naive
import naive_gradients
import scaledot as sd
import test_tiles
from compare import EPS, assert_close, close
from naive_gradients import Gradients, summed_to

DTYPES = ("float32", "float64", "float16", "bfloat16")
SIZE = cases.Size(len_q=5, len_kv=9, d_k=4, d_v=3, num_heads=4, num_kv_heads=2, lead=(2,))
COMBINATIONS = cases.pairwise()
NAMES = [case.name for case in cases.CASES]
SLOW = {"long", "window_long", "block_mask", "block_mask_mods_causal"}  # for the oracle's loops
OTHER_LIBRARIES = pytest.mark.parametrize(
    "xp", ["numpy-readonly", "torch", "strict"], indirect=True
)


# The textbook's gradients, all scores in memory, every array in the working dtype.


class Known(NamedTuple):
    """What the textbook keeps of its forward pass, arrays (..., num_heads, len_q, len_kv)."""

    query: Any
    key: Any  # repeated for each head of a group, and so is value
    value: Any
    weights: Any
    sinks: Any  # their weights, (..., num_heads, len_q, 1)
    kept: Any
    by_bias: Any  # derivatives of scores by what is added to them, and by the products
    by_dot: Any
    distance: Any
    out: Any
    lse: Any


def product(a, b, dtype):
    """A matrix product, rounded to the dtype."""
    wide = np.float32 if dtype.name == "bfloat16" else dtype
    return (a.astype(wide) @ b.astype(wide)).astype(dtype)


def total(x, axis, dtype):
    """A sum, rounded to the dtype once."""
    wide = np.float32 if dtype.name in ("bfloat16", "float16") else dtype
    return x.sum(axis=axis, keepdims=True, dtype=wide).astype(dtype)


def positions(arguments, lead):
    """Positions of queries (..., 1, len_q, 1) and of keys (..., 1, 1, len_kv)."""
    len_q, len_kv = arguments["query"].shape[-2], arguments["key"].shape[-2]
    kv_offset = np.broadcast_to(arguments.get("kv_offset", 0), lead)
    kv_len, q_offset = arguments.get("kv_len"), arguments.get("q_offset")
    default = kv_offset + (len_kv if kv_len is None else kv_len) - len_q
    q_offset = np.broadcast_to(default if q_offset is None else q_offset, lead)
    return (q_offset[..., None, None, None] + np.arange(len_q)[:, None],
            kv_offset[..., None, None, None] + np.arange(len_kv))  # fmt: skip


@np.errstate(all="ignore")
def forward(arguments, seen, kept, dtype):
    """Attention of the visible pairs `seen`, with factors `kept` of the weights."""
    query, key, value = (arguments[n].astype(dtype) for n in ("query", "key", "value"))
    query, key, value = (x[None] if x.ndim == 2 else x for x in (query, key, value))
    group_size = query.shape[-3] // max(key.shape[-3], 1)
    key, value = (x.repeat(group_size, axis=-3) for x in (key, value))
    scale, softcap = arguments.get("scale"), arguments.get("softcap")
    if scale is None:
        scale = 1 / math.sqrt(query.shape[-1]) if query.shape[-1] else 0.0
    lead, num_heads = seen.shape[:-3], seen.shape[-3]
    q_pos, kv_pos = positions(arguments, lead)
    distance = np.abs(q_pos - kv_pos).astype(dtype)

    scores = product(query, key.swapaxes(-1, -2), dtype) * dtype.type(scale)
    by_dot = np.full(seen.shape, dtype.type(scale))
    if softcap is not None:
        angle = np.tanh(scores / dtype.type(softcap))
        scores, by_dot = dtype.type(softcap) * angle, by_dot * (1 - angle * angle)
    if "bias" in arguments:
        scores = scores + np.where(seen, arguments["bias"], 0).astype(dtype)
    if "alibi_slopes" in arguments:
        scores = scores - arguments["alibi_slopes"].astype(dtype)[:, None, None] * distance
    by_bias = np.ones(seen.shape, dtype)
    if "score_mod" in arguments:
        batch = np.arange(math.prod(lead)).reshape(*lead, 1, 1, 1)
        where = batch, np.arange(num_heads)[:, None, None], q_pos, kv_pos
        function, derivative = arguments["score_mod"]
        by_bias = derivative(scores, *where).astype(dtype) * by_bias
        scores = function(scores, *where).astype(dtype)
    scores = np.where(seen, scores, -np.inf).astype(dtype)

    sinks = arguments.get("sinks", np.full(num_heads, -np.inf)).astype(dtype)[:, None, None]
    top = np.maximum(scores.max(axis=-1, keepdims=True, initial=-np.inf), sinks).astype(dtype)
    top = np.where(np.isneginf(top), dtype.type(0), top)
    weights, of_sinks = np.exp(scores - top), np.exp(sinks - top)
    row_sum = total(weights, -1, dtype) + of_sinks
    lse, row_sum = top + np.log(row_sum), np.where(row_sum == 0, dtype.type(1), row_sum)
    weights, of_sinks = weights / row_sum, of_sinks / row_sum
    kept = kept.astype(dtype)
    out = product(weights * kept, value, dtype)
    return Known(query, key, value, weights, of_sinks, kept, by_bias, by_bias * by_dot, distance,
                 out, lse[..., 0])  # fmt: skip


@np.errstate(all="ignore")
def backward(arguments, known, grad_out, grad_lse, dtype):
    """The `Gradients` of the arguments, given those of out and lse (or None)."""
    shares, of_weights, common = returned(known, grad_out, grad_lse, dtype)
    of_scores, of_sinks = known.weights * (of_weights + common), known.sinks * common
    return contracted(arguments, known, shares, of_scores, of_sinks, grad_out, dtype)


def returned(known, grad_out, grad_lse, dtype):
    """Weights under dropout, their gradients, and what all scores of a row have in common."""
    g = grad_out.astype(dtype).reshape(known.out.shape)
    of_weights = product(g, known.value.swapaxes(-1, -2), dtype) * known.kept
    common = -total(known.weights * of_weights, -1, dtype)
    if grad_lse is not None:
        common = common + grad_lse.astype(dtype).reshape(known.lse.shape)[..., None]
    return known.weights * known.kept, of_weights, common


def contracted(arguments, known, shares, of_scores, of_sinks, grad_out, dtype):
    """Sums of what reaches the scores, the sinks and the values, over all but each argument."""
    g = grad_out.astype(dtype).reshape(known.out.shape)
    by_dot, by_bias = of_scores * known.by_dot, of_scores * known.by_bias
    full = Gradients(
        product(by_dot, known.key, dtype),
        product(by_dot.swapaxes(-1, -2), known.query, dtype),
        product(shares.swapaxes(-1, -2), g, dtype),
        by_bias,
        total(of_sinks, -2, dtype)[..., 0, 0],
        -total(total(by_bias * known.distance, -1, dtype), -2, dtype)[..., 0, 0],
    )
    found, num_heads = {}, known.weights.shape[-3]
    for name, x in full._asdict().items():
        if arguments.get(name) is None:
            continue
        x = x.astype(np.float32 if dtype.itemsize == 2 else dtype)
        if name in ("key", "value") and arguments[name].ndim > 2:
            num_kv_heads = max(arguments[name].shape[-3], 1)
            groups = num_kv_heads, num_heads // num_kv_heads
            x = x.reshape(*x.shape[:-3], *groups, *x.shape[-2:]).sum(axis=-3)
        found[name] = summed_to(x, arguments[name].shape).astype(dtype)
    return Gradients(**found)


@np.errstate(all="ignore")
def sizes(arguments, known, grad_out, grad_lse):
    """How large the terms of each gradient are before they cancel: the root of their squares."""
    double = np.dtype("d")
    shares, of_weights, common = returned(known, grad_out, grad_lse, double)
    terms = known.weights * (np.abs(of_weights) + np.abs(common))
    squared = known._replace(**{
        name: getattr(known, name).astype(double) ** 2
        for name in ("query", "key", "by_dot", "by_bias", "distance")
    })
    found = contracted(arguments, squared, shares**2, terms**2, (known.sinks * common) ** 2,
                       grad_out.astype(double) ** 2, double)  # fmt: skip
    return Gradients(*(None if x is None else np.sqrt(np.abs(x)) for x in found))


# What is expected of one call.


class Expected(NamedTuple):
    """Cotangents, the truth, and the yardstick's results."""

    grad_out: Any
    grad_lse: Any
    out: Any
    lse: Any
    gradients: Gradients
    near: tuple[Any, Any, Gradients]  # out, lse, gradients
    sizes: Gradients


def slope_of_distance(score, batch, head, q_pos, kv_pos):
    """Derivative of `cases.distance_mod`."""
    return score * 0 + 0.75


def slope_of_table(score, batch, head, q_pos, kv_pos):
    """Derivative of what adds to a score."""
    return score * 0 + 1


def paired(arguments):
    """The same arguments with the derivative beside a score_mod of the cases."""
    mod = arguments.get("score_mod")
    if mod is None:
        return arguments
    slope = slope_of_distance if mod is cases.distance_mod else slope_of_table
    return arguments | {"score_mod": (mod, slope)}


def alone(arguments):
    """The same arguments as `naive.attention` takes them."""
    pair = arguments.get("score_mod")
    return arguments if pair is None else arguments | {"score_mod": pair[0]}


def kept_of(arguments, shape):
    """Factors of the weights under dropout, (..., num_heads, len_q, len_kv)."""
    dropout = arguments.get("dropout", 0.0)
    if not dropout:
        return np.ones((1, 1, 1))
    lead, factors = shape[:-3], np.zeros(shape)
    q_pos, kv_pos = (np.broadcast_to(x, (*lead, 1, *shape[-2:]))[..., 0, :, :]
                     for x in positions(arguments, lead))  # fmt: skip
    for batch, entry in enumerate(np.ndindex(lead)):
        seed = naive.seed_of(arguments["seed"], batch, entry, lead)
        for head, i, j in np.ndindex(shape[-3:]):
            factors[(*entry, head, i, j)] = naive.kept(
                dropout, seed, head, int(q_pos[(*entry, i, j)]), int(kv_pos[(*entry, i, j)])
            )
    return factors


def cotangents(out_shape, dtype, with_lse):
    rng = np.random.default_rng(list(out_shape))
    grad_out = rng.standard_normal(out_shape).astype(cases.dtype_named(dtype))
    accumulation = "float64" if dtype == "float64" else "float32"
    grad_lse = rng.standard_normal(out_shape[:-1]).astype(accumulation)
    return grad_out, grad_lse if with_lse else None


def accumulation(dtype):
    """Dtype in which the library holds lse and sums."""
    return "float64" if dtype == "float64" else "float32"


def near_of(arguments, seen, kept, grads, dtype):
    """The yardstick's out, lse (in the dtype in which the library holds it) and gradients."""
    dtypes = cases.dtype_named(dtype), np.dtype(accumulation(dtype))
    known, wide = (forward(arguments, seen, kept, d) for d in dtypes)
    return known.out, wide.lse, backward(arguments, known, *grads, dtypes[0])


def expected_of(arguments, dtype, with_lse=True):
    """Everything by the oracle."""
    out, lse, weights = naive.attention(**alone(arguments))
    grads = cotangents(out.shape, dtype, with_lse)
    truth = naive_gradients.attention(**arguments, grad_out=grads[0], grad_lse=grads[1])
    weights = weights.reshape((1,) * (3 - weights.ndim) + weights.shape)
    kept = kept_of(arguments, weights.shape)
    near_out, near_lse, near = near_of(arguments, weights != 0, kept, grads, dtype)
    near = near_out.reshape(out.shape), near_lse.reshape(lse.shape), near
    known = forward(arguments, weights != 0, kept, np.dtype("d"))
    return Expected(*grads, out, lse, truth, near, sizes(arguments, known, *grads))


@functools.cache
def expected_of_case(name, dtype):
    return expected_of(paired(cases.case(name).arguments(dtype)), dtype,
                       with_lse=NAMES.index(name) % 4 != DTYPES.index(dtype))  # fmt: skip


@functools.cache
def expected_of_combination(index, dtype):
    return expected_of(paired(combination(index, dtype)), dtype)


def combination(index, dtype="float32", to_array=None):
    rng = np.random.default_rng(index)
    arrays = {n: x.astype(cases.dtype_named(dtype)) for n, x in SIZE.arrays(rng).items()}
    if to_array is not None:
        arrays = {name: to_array(x) for name, x in arrays.items()}
    return arrays | cases.options_of(COMBINATIONS[index], SIZE, rng, to_array)


def check(arguments, expected, dtype, impl, to_array=np.asarray):
    """Hold out, lse and every gradient to the rule; return the gradients."""
    len_kv = arguments["key"].shape[-2]
    out, pullback = sd.attention_vjp(**arguments, impl=impl)
    assert type(out) is type(arguments["query"])
    assert out.dtype == arguments["query"].dtype
    assert_close(out, expected.out, expected.near[0], eps=EPS[dtype], len_kv=len_kv)
    assert str(pullback.lse.dtype).endswith(accumulation(dtype))
    assert_close(pullback.lse, expected.lse, expected.near[1], eps=EPS[accumulation(dtype)],
                 len_kv=len_kv)  # fmt: skip
    given = [to_array(x) for x in (expected.grad_out, expected.grad_lse) if x is not None]
    gradients = pullback(*given)
    assert gradients._fields == Gradients._fields
    for name, got in gradients._asdict().items():
        argument = arguments.get(name)
        if argument is None:
            assert got is None, name
            continue
        assert type(got) is type(argument), name
        assert got.dtype == argument.dtype, name
        assert_gradient(name, got, expected, dtype, len_kv)
    return gradients


def floor_of(eps, dtype, len_kv, lse):
    """Relative rounding of what is summed over keys with weights that are computed from lse.

    An lse beyond 1 / eps holds nothing of the weights: they must come from elsewhere.
    """
    of_lse = EPS[accumulation(dtype)]
    size = np.abs(lse[np.abs(lse) < 1 / of_lse]).max(initial=0)
    return eps * math.sqrt(max(len_kv, 1)) + of_lse * size


def assert_gradient(name, got, expected, dtype, len_kv):
    """The rule, with three times the yardstick's error, and the rounding of what cancels.

    A gradient can be 0 where its terms are not: the floor is that of the terms, too.
    """
    truth, near, size = (getattr(x, name) for x in
                         (expected.gradients, expected.near[2], expected.sizes))  # fmt: skip
    eps = max(EPS[dtype], EPS[str(got.dtype).rpartition(".")[2]])
    size = np.max(size[np.isfinite(size)], initial=0)
    error = np.abs(near.astype(np.float64) - truth)
    near = truth + np.max(error[np.isfinite(error)], initial=0)
    near = near + floor_of(eps, dtype, len_kv, expected.lse) * size / 3
    wrong = close(got, truth, near, eps=eps, len_kv=len_kv, factor=3.0)
    assert not wrong, f"{name}: {wrong}"


# Named cases and pairs of options


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_named_case(name, dtype, impl):
    if name in SLOW and dtype != "float32":
        pytest.skip("the oracle's loops over this many pairs take seconds for every dtype")
    check(paired(cases.case(name).arguments(dtype)), expected_of_case(name, dtype), dtype, impl)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "index", range(len(COMBINATIONS)), ids=lambda i: f"{i}:{cases.label(COMBINATIONS[i])}"
)
def test_pairs_of_options(index, dtype, impl):
    arguments = paired(combination(index, dtype))
    check(arguments, expected_of_combination(index, dtype), dtype, impl)


@OTHER_LIBRARIES
@pytest.mark.parametrize("index", range(0, len(COMBINATIONS), 2))
def test_pairs_of_options_in_other_libraries(index, xp, impl):
    """Tensors of PyTorch that require no gradient are arrays like any other."""
    arguments = combination(index, to_array=xp.array)
    if xp.name == "strict" and arguments.get("score_mod") is cases.distance_mod:
        pytest.skip("array-api-strict does not multiply integers by floats, as this mod does")
    expected = expected_of_combination(index, "float32")
    check(paired(arguments), expected, "float32", impl, xp.array)


@OTHER_LIBRARIES
@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
@pytest.mark.parametrize("name", ["two_axes", "gqa", "causal", "lead_broadcast"])
def test_dtypes_of_other_libraries(name, dtype, xp, impl):
    arguments = cases.case(name).arguments(dtype, to_array=xp.array)
    check(arguments, expected_of_case(name, dtype), dtype, impl, xp.array)


# Beyond one tile of the kernels


def check_tiles(arguments, dtype, impl="kernels"):
    """Compare with the textbook in a wider dtype."""
    arguments = paired(arguments)
    seen = test_tiles.visible(arguments)
    kept = kept_of(arguments, seen.shape)
    wider = test_tiles.wider(dtype)
    grads = cotangents((*seen.shape[:-1], arguments["value"].shape[-1]), dtype, True)
    known = forward(arguments, seen, kept, wider)
    truth = backward(arguments, known, *grads, wider)
    near = near_of(arguments, seen, kept, grads, dtype)
    expected = Expected(*grads, known.out, known.lse, truth, near, sizes(arguments, known, *grads))
    return check(arguments, expected, dtype, impl)


LENGTHS = (1, 47, 48, 49, 130, 200, 515)
WIDTHS = (1, 7, 16, 17, 33, 64)


@pytest.mark.parametrize("len_kv", [1, 127, 129, 515, 1030])
@pytest.mark.parametrize("dtype", DTYPES)
def test_edges_of_tiles(dtype, len_kv):
    """Square and causal, every length of queries with another pair of widths."""
    widths = cycle(WIDTHS)
    lengths = LENGTHS[:: 1 if dtype in ("float32", "bfloat16") else 3]
    for len_q in lengths:
        size = {"d_k": next(widths), "d_v": next(widths), "num_heads": 2, "num_kv_heads": 1}
        next(widths)
        arguments = test_tiles.arrays(dtype, len_q, len_kv, **size)
        check_tiles(arguments | ({"causal": True} if len_q % 2 else {}), dtype)


@test_tiles.in_turn("float32", "bfloat16", "float32", "float64")
def test_options_over_several_tiles(options, dtype):
    arguments = test_tiles.arrays(dtype, 201, 300, num_heads=6, num_kv_heads=2, lead=(2,))
    check_tiles(arguments | options, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", [
    {"causal": True, "alibi_slopes": np.array([0.01, 0.3], "f")},
    {"window": (900, 100), "q_offset": 1900},
    {"bias": test_tiles.ADDED[0, 0, :60, :1], "softcap": 2.0},
    {"bias": np.resize(test_tiles.ADDED, 2100), "kv_len": 2099},
], ids="-".join)  # fmt: skip
def test_options_over_several_ranges(options, dtype):
    """Of keys, which the kernels take one at a time; bias and slopes are summed over all."""
    size = {"d_k": 8, "d_v": 24, "num_heads": 2, "num_kv_heads": 1}
    check_tiles(test_tiles.arrays(dtype, 60, 2100, **size) | options, dtype)


@pytest.mark.parametrize("options", [
    {"causal": True, "sinks": np.array([1.0, -1.0], "f")},
    {"window": (200, 3), "alibi_slopes": cases.slopes(2) / 64, "softcap": 2.0},
    {"bias": test_tiles.ADDED[0, :2, :1], "kv_len": 280},
], ids="-".join)  # fmt: skip
def test_blockwise_over_several_tiles(options):
    arguments = test_tiles.arrays("float32", 201, 300, num_heads=2) | options
    check_tiles(arguments, "float32", "blockwise")


def test_dropout_over_several_tiles(impl):
    arguments = test_tiles.arrays("float32", 130, 200, num_heads=2, num_kv_heads=1)
    check_tiles(arguments | {"dropout": 0.4, "seed": 3, "causal": True, "q_offset": 50}, "float32",
                impl)  # fmt: skip


@pytest.mark.parametrize("index", range(0, len(COMBINATIONS), 3))
def test_the_textbook_agrees_with_the_oracle(index):
    """As closely as its rounding allows; only then may it stand for the truth."""
    expected = expected_of_combination(index, "float64")
    near = expected.near[2]
    for name, got in near._asdict().items():
        if got is not None:
            assert_gradient(name, got, expected._replace(near=(None, None, expected.gradients)),
                            "float64", 9)  # fmt: skip
    for got, truth in zip(expected.near, (expected.out, expected.lse), strict=False):
        assert_close(got, truth, eps=8 * EPS["float64"], len_kv=9)
