"""The oracle of gradients against central differences of the oracle, and facts of softmax."""

import math

import numpy as np
import pytest

import cases
import naive
import naive_gradients

TINY = cases.Size(len_q=3, len_kv=4, d_k=2, d_v=3, num_heads=2, num_kv_heads=1, lead=(2,))
COMBINATIONS = cases.pairwise()
EPS = 2.0**-52
STEP = EPS**0.2  # of five-point differences: truncation STEP**4, rounding EPS / STEP, are alike


def bent(score, batch, head, q_pos, kv_pos):
    """A score_mod that is linear in nothing."""
    return score + 0.2 * score * score * (head + 1) - 0.1 * (q_pos - kv_pos) * score


def slope_of_bent(score, batch, head, q_pos, kv_pos):
    return 1 + 0.4 * score * (head + 1) - 0.1 * (q_pos - kv_pos)


def wide(arguments):
    """The same with every float array in float64."""
    return {n: x.astype(np.float64) if getattr(x, "dtype", None) == np.float32 else x
            for n, x in arguments.items()}  # fmt: skip


def cotangents(rng, out, lse):
    return rng.standard_normal(out.shape), rng.standard_normal(lse.shape)


def loss(arguments, grad_out, grad_lse):
    """What the gradients are of, and the sum of magnitudes that its rounding grows with."""
    function = arguments["score_mod"][0] if "score_mod" in arguments else None
    out, lse, _ = naive.attention(**arguments | {"score_mod": function})
    terms = [*(out * grad_out).ravel(), *(np.where(np.isfinite(lse), lse, 0) * grad_lse).ravel()]
    return math.fsum(terms), np.abs(terms).sum()


def differences(arguments, name, grad_out, grad_lse):
    """Gradient by one argument from values of the loss alone."""
    x = arguments[name]
    found = np.zeros(x.shape)
    for index in np.ndindex(x.shape):
        if not np.isfinite(x[index]):
            continue
        values = []
        for steps in (-2, -1, 1, 2):
            moved = x.copy()
            moved[index] += steps * STEP
            values.append(loss(arguments | {name: moved}, grad_out, grad_lse)[0])
        found[index] = (values[0] - 8 * values[1] + 8 * values[2] - values[3]) / (12 * STEP)
    return found


def check(arguments, rng):
    """Compare every gradient with differences."""
    arguments = wide(arguments)
    pair = arguments.get("score_mod", (None,))
    out, lse, _ = naive.attention(**arguments | {"score_mod": pair[0]})
    grads = cotangents(rng, out, lse)
    found = naive_gradients.attention(**arguments, grad_out=grads[0], grad_lse=grads[1])
    size = loss(arguments, *grads)[1]
    for name, got in found._asdict().items():
        if arguments.get(name) is None:
            assert got is None
            continue
        expected = differences(arguments, name, *grads)
        assert got.shape == arguments[name].shape
        error = np.abs(got - expected).max(initial=0)
        assert error <= STEP**4 * (size + np.abs(expected).max(initial=0)), name
    return found


@pytest.mark.parametrize(
    "index", range(len(COMBINATIONS)), ids=lambda i: f"{i}:{cases.label(COMBINATIONS[i])}"
)
def test_every_option_beside_every_other(index, rng):
    arguments = TINY.arrays(rng) | cases.options_of(COMBINATIONS[index], TINY, rng)
    if "score_mod" in arguments:
        arguments["score_mod"] = (bent, slope_of_bent)
    check(arguments, rng)


@pytest.mark.parametrize("shape", [(4,), (3, 4), (3, 1), (2, 1, 4), (2, 1, 1, 4), (1,) * 4, ()])
def test_bias_of_any_shape(shape, rng):
    check(TINY.arrays(rng) | {"bias": rng.standard_normal(shape), "softcap": 0.9}, rng)


SHAPES = {
    "two axes": cases.Size(3, 4, d_k=2, num_heads=None, lead=()),
    "leading axes": cases.Size(2, 3, d_k=2, lead=(2, 1), key_lead=(1, 3), value_lead=(3,)),
    "groups": cases.Size(2, 3, d_k=2, num_heads=6, num_kv_heads=2, lead=()),
    "no keys": cases.Size(2, 0, d_k=2),
    "no queries": cases.Size(0, 2, d_k=2),
}


@pytest.mark.parametrize("size", SHAPES.values(), ids=SHAPES)
def test_shapes(size, rng):
    check(size.arrays(rng) | {"scale": -0.8}, rng)


def test_two_keys_by_hand():
    """Weights 1/2 and 1/2 of the values 3 and 7: each score moves out by 1/4 of 4."""
    query, key, value = np.ones((1, 1)), np.ones((2, 1)), np.array([[3.0], [7.0]])
    found = naive_gradients.attention(
        query, key, value, np.ones((1, 1)), np.full(1, 10.0), scale=2.0, bias=np.zeros(2)
    )
    assert found.bias.tolist() == [-1 + 5, 1 + 5]
    assert found.key.tolist() == [[2 * 4.0], [2 * 6.0]]
    assert found.query.tolist() == [[20.0]]
    assert found.value.tolist() == [[0.5], [0.5]]


def test_a_sink_by_hand():
    """Its weight is that of the one key: out is half the value, 6, and moves by -1/4 of 12."""
    x = np.zeros((1, 1, 1))
    found = naive_gradients.attention(
        x, x, x + 12, x + 1, np.full((1, 1), 8.0), sinks=np.zeros(1), alibi_slopes=np.zeros(1),
        q_offset=-5,
    )  # fmt: skip
    assert found.sinks.tolist() == [-3 + 4]
    assert found.alibi_slopes.tolist() == [-5 * (3 + 4)]


def test_rows_that_see_nothing():
    """Have gradients of 0, but for a sink, which is their lse."""
    rng = np.random.default_rng(0)
    arguments = TINY.arrays(rng) | {"mask": np.array([True, False, True])[:, None]}
    grad_out, grad_lse = rng.standard_normal((2, 2, 3, 3)), np.zeros((2, 2, 3))
    clean = naive_gradients.attention(**arguments, grad_out=grad_out)
    grad_out[:, :, 1], grad_lse[:, :, 1] = 1e30, 7.0
    for got, expected in zip(naive_gradients.attention(
        **arguments, grad_out=grad_out, grad_lse=grad_lse), clean, strict=True,
    ):  # fmt: skip
        assert np.array_equal(got, expected) if got is not None else expected is None
    assert not clean.query[:, :, 1].any()
    grad_out[:], grad_lse[:, :, [0, 2]] = 0, 0
    found = naive_gradients.attention(**arguments, grad_out=grad_out, grad_lse=grad_lse,
                                      sinks=np.array([1.0, -2.0]))  # fmt: skip
    assert found.sinks.tolist() == [14, 14]


def test_masked_nan_does_not_leak():
    rng = np.random.default_rng(1)
    arguments = TINY.arrays(rng) | {"kv_len": 3, "bias": rng.standard_normal(4)}
    grad_out = rng.standard_normal((2, 2, 3, 3))
    clean = naive_gradients.attention(**arguments, grad_out=grad_out)
    arguments["key"][..., 3, :] = arguments["value"][..., 3, :] = arguments["bias"][3] = np.nan
    for got, expected in zip(naive_gradients.attention(**arguments, grad_out=grad_out), clean,
                             strict=True):  # fmt: skip
        assert (got is None and expected is None) or np.array_equal(got, expected)


def test_packed_sequences():
    """One loss of all sequences, by differences; one has no keys, one no queries."""
    rng = np.random.default_rng(2)
    starts = [0, 2, 3, 3, 5], [0, 3, 3, 4, 6]
    arrays = {n: rng.standard_normal(s) for n, s in
              {"query": (5, 2, 2), "key": (6, 1, 2), "value": (6, 1, 3), "sinks": (2,),
               "alibi_slopes": (2,)}.items()}  # fmt: skip
    options = {"causal": True, "dropout": 0.3, "seed": 4, "softcap": 2.0,
               "mask_mod": lambda b, h, i, j: (b != 3) | (j > 0)}  # fmt: skip
    grad_out = rng.standard_normal((5, 2, 3))

    def out_of(moved):
        packed = naive.varlen(*(moved[n] for n in ("query", "key", "value")), *starts, **options,
                              sinks=moved["sinks"], alibi_slopes=moved["alibi_slopes"],
                              score_mod=bent)  # fmt: skip
        return packed[0] * grad_out

    found = naive_gradients.varlen(
        arrays["query"], arrays["key"], arrays["value"], *starts, grad_out, **options,
        sinks=arrays["sinks"], alibi_slopes=arrays["alibi_slopes"], score_mod=(bent, slope_of_bent),
    )  # fmt: skip
    for name, x in arrays.items():
        direction = rng.standard_normal(x.shape)
        direction *= STEP / np.linalg.norm(direction)
        step = {n: direction if n == name else 0 * y for n, y in arrays.items()}
        values = [math.fsum(out_of({n: y + k * step[n] for n, y in arrays.items()}).ravel())
                  for k in (-2, -1, 1, 2)]  # fmt: skip
        expected = (values[0] - 8 * values[1] + 8 * values[2] - values[3]) / (12 * STEP)
        got = (getattr(found, name) * step[name]).sum() / STEP
        size = np.abs(out_of(arrays)).sum() + np.abs(getattr(found, name)).sum()
        assert abs(got - expected) <= STEP**4 * size
