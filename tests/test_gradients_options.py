"""Forward mode, packed sequences, laws, poison, determinism and errors of the gradients."""

import itertools
import pickle

import numpy as np
import pytest
import threadpoolctl

import cases
import naive
import scaledot as sd
import test_poison
import test_tiles
from compare import EPS, as_float64, assert_close
from naive_gradients import summed_to
from test_gradients import (
    COMBINATIONS,
    DTYPES,
    SIZE,
    alone,
    check,
    combination,
    expected_of,
    floor_of,
    forward,
    kept_of,
    paired,
    product,
)

STEP = EPS["float64"] ** 0.2  # of five-point differences: truncation and rounding are alike
OPERANDS = ("query", "key", "value")
DOUBLE = {"eps": 8 * EPS["float64"]}  # for two ways to the same, each with roundings of its own


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


def doubles(size=SIZE, number=0):
    """Query, key and value of float64, and a gradient of out."""
    rng = np.random.default_rng(number)
    arguments = size.arrays(rng)
    shape = (*np.broadcast_shapes(*(x.shape[:-3] for x in arguments.values())), size.num_heads)
    return arguments, rng.standard_normal((*shape, size.len_q, arguments["value"].shape[-1]))


def gradients(arguments, grad_out, grad_lse=None, impl="auto"):
    return sd.attention_vjp(**arguments, impl=impl)[1](grad_out, grad_lse)


def same_bits(a, b):
    """Whether two tuples of gradients hold the same, to the bit."""
    return all(x is y is None or (x.shape == y.shape and x.tobytes() == y.tobytes())
               for x, y in zip(a, b, strict=True))  # fmt: skip


# Forward mode


def moves_of(arguments):
    """Tangents of query, key and value, in their dtypes."""
    rng = np.random.default_rng(7)
    return [(rng.standard_normal(arguments[n].shape) / 4).astype(arguments[n].dtype)
            for n in OPERANDS]  # fmt: skip


def differences(arguments, moves):
    """The tangent of out by five values of the oracle."""
    def out_of(steps):
        moved = {n: arguments[n].astype(np.float64) + steps * STEP * t.astype(np.float64)
                 for n, t in zip(OPERANDS, moves, strict=True)}  # fmt: skip
        return naive.attention(**alone(arguments) | moved)[0]

    return (out_of(-2) - 8 * out_of(-1) + 8 * out_of(1) - out_of(2)) / (12 * STEP)


def moved_by_textbook(arguments, seen, moves, dtype):
    """The tangent of out, every array in the dtype, and how large its terms are."""
    known = forward(arguments, seen, kept_of(arguments, seen.shape), dtype)
    dq, dk, dv = (x.astype(dtype) for x in moves)
    dq, dk, dv = (x[None] if x.ndim == 2 else x for x in (dq, dk, dv))
    dk, dv = (x.repeat(seen.shape[-3] // max(x.shape[-3], 1), axis=-3) for x in (dk, dv))
    scores = product(dq, known.key.swapaxes(-1, -2), dtype)
    scores = scores + product(known.query, dk.swapaxes(-1, -2), dtype)
    moved = known.weights * (scores * known.by_dot)
    mean = moved.sum(axis=-1, keepdims=True)
    terms = known.kept * (np.abs(moved) + known.weights * np.abs(mean))
    moved = (moved - known.weights * mean) * known.kept
    tangent = (product(moved, known.value, dtype)
               + product(known.weights * known.kept, dv, dtype))  # fmt: skip
    return tangent, np.sqrt(product(terms**2, known.value**2, dtype).max(initial=0)), known.lse


def check_tangent(arguments, dtype, impl, truth, seen):
    """Hold out and its tangent to the rule, as `assert_gradient` does."""
    moves, operands = moves_of(arguments), tuple(arguments[n] for n in OPERANDS)
    options = {n: x for n, x in arguments.items() if n not in OPERANDS}
    out, tangent = sd.attention_jvp(operands, tuple(moves), **options, impl=impl)
    assert out.dtype == tangent.dtype == operands[0].dtype
    plain = sd.attention_vjp(**arguments, impl=impl)[0]
    assert out.tobytes() == plain.tobytes()
    near, _, _ = moved_by_textbook(arguments, seen, moves, operands[0].dtype)
    _, size, lse = moved_by_textbook(arguments, seen, moves, np.dtype("d"))
    eps, len_kv = max(EPS[dtype], STEP**4), operands[1].shape[-2]
    floor = floor_of(eps, dtype, len_kv, lse) * size
    error = np.abs(near.astype(np.float64).reshape(truth.shape) - truth).max(initial=0)
    assert_close(tangent, truth, truth + error + floor / 3, eps=eps, len_kv=len_kv, factor=3.0)


@pytest.mark.parametrize("index", range(len(COMBINATIONS)))
def test_tangents_of_pairs_of_options(index, impl):
    for dtype in DTYPES if index % 4 == 0 else DTYPES[:2]:
        arguments = paired(combination(index, dtype))
        truth = differences(arguments, moves_of(arguments))
        seen = naive.attention(**alone(arguments))[2] != 0
        check_tangent(arguments, dtype, impl, truth, seen)


@pytest.mark.parametrize("name", [
    "two_axes", "five_axes", "lead_broadcast", "mqa", "no_keys", "no_queries", "no_batch",
    "mask_empty_row", "decode", "width_1",
])  # fmt: skip
def test_tangents_of_shapes(name, impl):
    arguments = cases.case(name).arguments()
    seen = naive.attention(**arguments)[2] != 0
    seen = seen.reshape((1,) * (3 - seen.ndim) + seen.shape)
    truth = differences(arguments, moves_of(arguments))
    check_tangent(arguments, "float32", impl, truth, seen)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tangents_over_several_tiles(dtype, impl):
    arguments = test_tiles.arrays(dtype, 201, 700, num_heads=2, num_kv_heads=1) | {
        "causal": True, "window": (300, None), "softcap": 3.0, "sinks": np.array([1.0, -1], "f")
    }  # fmt: skip
    seen = test_tiles.visible(arguments)
    truth, _, _ = moved_by_textbook(arguments, seen, moves_of(arguments), np.dtype("d"))
    check_tangent(arguments, dtype, impl, truth, seen)


@pytest.mark.parametrize("index", range(1, len(COMBINATIONS), 3))
def test_tangents_and_gradients_are_transposes(index, impl):
    arguments = paired(combination(index, "float64"))
    operands = tuple(arguments[n] for n in OPERANDS)
    options = {n: x for n, x in arguments.items() if n not in OPERANDS}
    moves = moves_of(arguments)
    out, tangent = sd.attention_jvp(operands, moves, **options, impl=impl)
    grad_out = np.random.default_rng(index).standard_normal(out.shape)
    back = gradients(arguments, grad_out, impl=impl)
    terms = [t * g for t, g in zip(moves, back[:3], strict=True)]
    size = np.sqrt(sum((x * x).sum() for x in terms))
    error = (grad_out * tangent).sum() - sum(x.sum() for x in terms)
    assert abs(error) <= DOUBLE["eps"] * size * np.sqrt(SIZE.len_kv)


def test_a_tangent_that_is_not_given_is_0(impl):
    arguments, _ = doubles()
    operands, moves = tuple(arguments.values()), moves_of(arguments)
    for given in itertools.product([True, False], repeat=3):
        some = [t if keep else None for t, keep in zip(moves, given, strict=True)]
        full = [t if keep else 0 * t for t, keep in zip(moves, given, strict=True)]
        _, got = sd.attention_jvp(operands, tuple(some), causal=True, impl=impl)
        _, truth = sd.attention_jvp(operands, tuple(full), causal=True, impl=impl)
        assert_close(got, truth, **DOUBLE, len_kv=9)
        assert got.any() == any(given)


# Laws


def test_lengths_are_slicing(impl):
    arguments, grad_out = doubles()
    whole = gradients(arguments | {"kv_len": 6, "causal": True}, grad_out, impl=impl)
    short = arguments | {n: arguments[n][..., :6, :] for n in ("key", "value")}
    for name, got, truth in zip(OPERANDS, whole, gradients(short | {"causal": True}, grad_out,
                                                           impl=impl), strict=False):  # fmt: skip
        assert_close(got if name == "query" else got[..., :6, :], truth, **DOUBLE, len_kv=6)
        assert name == "query" or not got[..., 6:, :].any()


def test_groups_are_repeated_heads_summed(impl):
    arguments, grad_out = doubles()
    repeated = arguments | {n: arguments[n].repeat(2, axis=-3) for n in ("key", "value")}
    grouped = gradients(arguments | {"causal": True}, grad_out, impl=impl)
    apart = gradients(repeated | {"causal": True}, grad_out, impl=impl)
    assert_close(grouped.query, apart.query, **DOUBLE, len_kv=9)
    for name in ("key", "value"):
        of_each = getattr(apart, name)
        summed = of_each[:, ::2] + of_each[:, 1::2]
        assert_close(getattr(grouped, name), summed, **DOUBLE, len_kv=9)


TILED = cases.Size(len_q=60, len_kv=140, d_k=4, num_heads=4, num_kv_heads=2, lead=(2,))


@pytest.mark.parametrize("shape", [
    (140,), (60, 1), (60, 140), (4, 60, 140), (4, 1, 140), (4, 60, 1), (2, 1, 60, 140),
    (2, 1, 1, 140), (1, 4, 1, 1), (1, 1, 1, 1), (1,), (),
], ids=str)  # fmt: skip
def test_a_broadcast_bias_gets_the_sum(shape, impl):
    """Of what the full one would get; the terms cancel where it is constant over the keys."""
    arguments, grad_out = doubles(TILED)
    rng = np.random.default_rng(1)
    bias, grad_lse = rng.standard_normal(shape), rng.standard_normal(grad_out.shape[:-1])
    full = np.broadcast_to(bias, (2, 4, 60, 140))
    narrow = gradients(arguments | {"bias": bias}, grad_out, grad_lse, impl=impl)
    wide = gradients(arguments | {"bias": full}, grad_out, grad_lse, impl=impl)
    truth = summed_to(wide.bias, shape)
    size = np.sqrt(summed_to(wide.bias**2, shape).max())
    assert narrow.bias.shape == shape
    assert np.abs(narrow.bias - truth).max() <= DOUBLE["eps"] * np.sqrt(140) * size
    for got, expected in zip(narrow[:3], wide[:3], strict=True):
        assert_close(got, expected, **DOUBLE, len_kv=140)


def test_the_gradient_of_lse_by_scores_is_the_weights(impl):
    """And that of out by scores sums to 0 in every row."""
    arguments, grad_out = doubles(TILED)
    arguments |= {"bias": np.zeros((2, 4, 60, 140)), "window": (90, 3), "q_offset": 70}
    weights = sd.attention_weights(**{n: x for n, x in arguments.items() if n != "value"})
    ones = np.ones(grad_out.shape[:-1])
    found = gradients(arguments, 0 * grad_out, ones, impl=impl)
    assert_close(found.bias, weights, **DOUBLE, len_kv=140)
    assert not found.value.any()
    of_out = gradients(arguments, grad_out, impl=impl).bias
    assert_close(of_out.sum(axis=-1) + ones, ones, **DOUBLE, len_kv=140)


def test_gradients_are_linear(impl):
    """In those of out and lse together; the pullback may be called again, with the same bits."""
    arguments, grad_out = doubles()
    arguments |= {"sinks": np.array([0.5, -1, 2, 0]), "softcap": 2.0}
    _, pullback = sd.attention_vjp(**arguments, impl=impl)
    grad_lse = np.random.default_rng(2).standard_normal(grad_out.shape[:-1])
    of_out, of_lse = pullback(grad_out), pullback(0 * grad_out, grad_lse)
    for both, a, b in zip(pullback(3 * grad_out, -2 * grad_lse), of_out, of_lse, strict=True):
        if both is not None:
            assert_close(both, 3 * a - 2 * b, **DOUBLE, len_kv=9)
    assert same_bits(pullback(grad_out), of_out)
    assert same_bits(pullback(grad_out, 0 * grad_lse), of_out)


def test_permuted_keys_have_permuted_gradients(impl):
    arguments, grad_out = doubles(TILED)
    bias = np.random.default_rng(3).standard_normal((4, 60, 140))
    order = np.random.default_rng(4).permutation(140)
    moved = {n: arguments[n][..., order, :] for n in ("key", "value")}
    plain = gradients(arguments | {"bias": bias}, grad_out, impl=impl)
    found = gradients(arguments | moved | {"bias": bias[..., order]}, grad_out, impl=impl)
    assert_close(found.query, plain.query, **DOUBLE, len_kv=140)
    assert_close(found.bias, plain.bias[..., order], **DOUBLE, len_kv=140)
    for name in ("key", "value"):
        assert_close(getattr(found, name), getattr(plain, name)[..., order, :], **DOUBLE,
                     len_kv=140)  # fmt: skip


def bent(score, batch, head, q_pos, kv_pos):
    return score + 0.2 * score * score * (head + 1) - 0.1 * (q_pos - kv_pos) * score


def slope_of_bent(score, batch, head, q_pos, kv_pos):
    return 1 + 0.4 * score * (head + 1) - 0.1 * (q_pos - kv_pos)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_score_mod_that_is_not_linear(dtype, impl):
    """Its derivative is taken at the score that it is given, bias and ALiBi included."""
    arguments = combination(0, dtype) | {
        "score_mod": (bent, slope_of_bent), "bias": cases.normal(np.random.default_rng(5), 5, 9),
        "alibi_slopes": cases.slopes(4), "softcap": 2.0, "causal": True,
    }  # fmt: skip
    check(arguments, expected_of(arguments, dtype), dtype, impl)
    truth = differences(arguments, moves_of(arguments))
    seen = naive.attention(**alone(arguments))[2] != 0
    check_tangent(arguments, dtype, impl, truth, seen)


@pytest.mark.parametrize("turned", [
    lambda x: np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2),
    lambda x: np.ascontiguousarray(x[..., ::-1, :])[..., ::-1, :],
    lambda x: x.repeat(2, axis=-1)[..., ::2],
], ids=["transposed", "reversed", "every second"])  # fmt: skip
def test_any_strides(turned, impl):
    arguments, grad_out = doubles(TILED)
    views = {n: turned(x) for n, x in arguments.items()}
    found = gradients(views | {"causal": True}, turned(grad_out), impl=impl)
    truth = gradients(arguments | {"causal": True}, grad_out, impl=impl)
    for got, expected in zip(found[:3], truth[:3], strict=True):
        assert_close(got, expected, **DOUBLE, len_kv=140)


def test_gradients_can_be_pickled():
    arguments, grad_out = doubles()
    found = gradients(arguments, grad_out)
    again = pickle.loads(pickle.dumps(found))
    assert type(again) is type(found)
    assert same_bits(again, found)


# What is empty, excluded or not a number

EMPTY = {
    "no row": {"mask": np.zeros((), dtype=bool)},
    "some rows": {"mask": np.array([1, 0, 1, 0, 0], dtype=bool)[:, None]},
    "no key": {"kv_len": np.array([0, 9])},
    "far window": {"window": (2, 2), "q_offset": 500},
    "bias": {"bias": np.full((5, 9), -np.inf)},
    "causal": {"causal": True, "q_offset": np.array([-3, -10])},
}


@pytest.mark.parametrize("options", EMPTY.values(), ids=EMPTY)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_that_see_nothing(options, dtype, impl):
    """Have gradients of 0 and add nothing to those of keys and values, to the bit."""
    arguments = combination(0, dtype) | {"q_offset": 4} | options
    expected = expected_of(arguments, dtype)
    empty = np.isneginf(expected.lse)
    assert empty.any()
    clean = gradients(arguments, expected.grad_out, expected.grad_lse, impl)
    grad_out = np.where(empty[..., None], 1e30, expected.grad_out).astype(expected.grad_out.dtype)
    for odd in (-1e30, np.nan):  # nan is what a function of an lse of -inf may send back
        grad_lse = np.where(empty, odd, expected.grad_lse).astype("f")
        found = gradients(arguments, grad_out, grad_lse, impl)
        assert same_bits(found, clean)
    assert (as_float64(found.query)[empty] == 0).all()
    assert all(np.isfinite(as_float64(g)).all() for g in found if g is not None)
    if empty.all():
        assert not any(as_float64(g).any() for g in found if g is not None)
    tangent = sd.attention_jvp(
        tuple(arguments[n] for n in OPERANDS), moves_of(arguments), impl=impl,
        **{n: x for n, x in arguments.items() if n not in OPERANDS},
    )[1]  # fmt: skip
    assert (as_float64(tangent)[empty] == 0).all()
    assert np.isfinite(as_float64(tangent)).all()


def test_a_sink_is_the_lse_of_rows_that_see_nothing(impl):
    arguments, grad_out = doubles()
    arguments |= {"mask": np.zeros((), bool), "sinks": np.array([0.5, -1, 2, 0])}
    grad_lse = np.random.default_rng(6).standard_normal(grad_out.shape[:-1])
    found = gradients(arguments, grad_out, grad_lse, impl)
    assert_close(found.sinks, grad_lse.sum(axis=(0, 2)), **DOUBLE, len_kv=9)
    assert not any(g.any() for g in found[:3])


@pytest.mark.parametrize("name", test_poison.HIDING)
def test_hidden_keys_cannot_matter(name, impl):
    arguments, hidden = test_poison.problem(name, "numpy", impl)
    arguments = paired(arguments)
    rng = np.random.default_rng(8)
    shape = (*arguments["query"].shape[:-1], arguments["value"].shape[-1])
    grads = cases.normal(rng, *shape), cases.normal(rng, *shape[:-1])
    clean = gradients(arguments, *grads, impl)
    for poison in (None, np.nan):
        dirty = test_poison.poisoned(arguments, hidden, poison)
        found = gradients(dirty, *grads, impl)
        assert same_bits(found, clean)
    for gradient in (found.key, found.value):
        assert (gradient.swapaxes(1, 2)[hidden] == 0).all()
        assert gradient.any()
    if found.bias.ndim > 1:
        assert (found.bias[hidden[:, None, None]] == 0).all()
    operands = tuple(dirty[n] for n in OPERANDS)
    options = {n: x for n, x in dirty.items() if n not in OPERANDS}
    moves = [np.where(np.isnan(x), x, cases.normal(rng, *x.shape)) for x in operands]
    assert np.isfinite(sd.attention_jvp(operands, moves, **options, impl=impl)[1]).all()


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("name", OPERANDS)
def test_nan_reaches_who_sees_it(name, dtype, impl):
    """The rows that see it and the keys that these see; the oracle says which."""
    arguments = combination(0, dtype) | {
        "segment_ids": (np.array([0, 0, 0, 1, 1]), np.array([0, 0, 0, 0, 1, 1, 1, 1, 2]))
    }  # fmt: skip
    arguments[name][1, 1, 4 if name != "query" else 3, 2] = np.nan
    expected = expected_of(arguments, dtype)
    assert np.isnan(expected.gradients.query).any()
    assert not np.isnan(expected.gradients.query[:, :, :3]).any()
    check(arguments, expected, dtype, impl)


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_nan_of_a_gradient_of_out_reaches_what_it_must(dtype, odd, impl):
    """Its row's gradient, the keys that this sees, one column of their values, and no more."""
    arguments = combination(0, dtype) | {
        "segment_ids": (np.array([0, 0, 0, 1, 1]), np.array([0, 0, 0, 0, 1, 1, 1, 1, 2]))
    }  # fmt: skip
    grad_out = expected_of(arguments, dtype).grad_out
    clean = gradients(arguments, grad_out, impl=impl)
    grad_out[1, 1, 3, 2] = odd
    found = gradients(arguments, grad_out, impl=impl)
    assert not np.isfinite(as_float64(found.query[1, 1, 3])).any()
    assert not np.isfinite(as_float64(found.key[1, 0, 4:8])).any()
    assert not np.isfinite(as_float64(found.value[1, 0, 4:8, 2])).any()
    seen = (1, 0, slice(4, 8))
    places = ((1, 1, 3), seen, (*seen, 2))
    for got, truth, place in zip(found[:3], clean[:3], places, strict=True):
        got[place] = truth[place]
        assert got.tobytes() == truth.tobytes()


def test_rows_that_see_nothing_beside_a_sink_of_minus_infinity(impl):
    """That sink takes nothing, and has no gradient, whatever is asked of an lse of -inf."""
    arguments, grad_out = doubles()
    arguments |= {"mask": np.array([1, 0, 1, 1, 0], bool)[:, None],
                  "sinks": np.array([-np.inf, 0.5, -np.inf, 1])}  # fmt: skip
    _, pullback = sd.attention_vjp(**arguments, impl=impl)
    grad_lse = np.where(np.isneginf(pullback.lse), np.nan, 1.0)
    assert np.isnan(grad_lse).any()
    found = pullback(grad_out, grad_lse)
    assert not found.sinks[[0, 2]].any()
    assert same_bits(found, pullback(grad_out, np.nan_to_num(grad_lse)))


HIDES = np.random.default_rng(8).random((47, 200)) < 0.5
HIDES[:, [3, 4, 77, 199]] = True
AWAY = {
    "mask": {"mask": ~HIDES},
    "mask mod": {"mask_mod": lambda batch, head, q_pos, kv_pos: ~HIDES[q_pos - 153, kv_pos]},
    "bias": {"bias": np.where(HIDES, -np.inf, 0.5).astype("f")},
    "causal": {"causal": True, "q_offset": 0},  # the next query would see the next key
    "window": {"window": (20, 5), "q_offset": 0},
}


@pytest.mark.parametrize("options", AWAY.values(), ids=AWAY)
def test_hidden_keys_cannot_matter_beside_an_odd_number_of_queries(options, impl):
    """Products of bfloat16 are of pairs: a query without a partner meets no nan there."""
    arguments = test_tiles.arrays("bfloat16", 47, 200, num_heads=2, num_kv_heads=1) | options
    hidden = HIDES.all(axis=0) if "q_offset" not in options else np.arange(200) > (
        46 + options.get("window", (0, 0))[1]
    )
    rng, dtype = np.random.default_rng(8), arguments["query"].dtype
    grads = cases.normal(rng, 2, 47, 8).astype(dtype), cases.normal(rng, 2, 47)
    clean = gradients(arguments, *grads, impl)
    for odd in (np.nan, np.inf):
        dirty = dict(arguments)
        for name in ("key", "value"):
            dirty[name] = arguments[name].copy()
            dirty[name][:, hidden] = odd
        assert same_bits(gradients(dirty, *grads, impl), clean)
