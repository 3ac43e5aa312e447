"""The associative memory against iteration of the oracle."""

import numpy as np
import pytest

import naive
import scaledot as sd
import textbook
from compare import EPS, as_float64, assert_close
from scaledot import _family
from scaledot._family import retrieve
from test_family import HALVES, cast

D = 32


def memory(rng, dtype="float64", *, leads=((), ()), len_q=4, len_kv=6):
    """Patterns of ±1 and queries in which an eighth of the signs is wrong."""
    patterns = np.sign(rng.standard_normal((*leads[1], len_kv, D)))
    lead = np.broadcast_shapes(*leads)
    query = np.broadcast_to(patterns, (*lead, len_kv, D))[..., :len_q, :].copy()
    for axis in range(len(lead) - len(leads[0])):
        query = query.take(0, axis=axis)
    query[..., ::8] *= -1
    return cast({"query": query, "patterns": patterns}, dtype)


def iterated(step, query, steps):
    """Apply `step` again and again."""
    for _ in range(steps):
        query = step(query)
    return query


def truth_of(query, patterns, beta, steps):
    query, patterns = (as_float64(x)[..., None, :, :] for x in (query, patterns))
    return iterated(
        lambda x: naive.attention(x, patterns, patterns, scale=beta)[0], query, steps
    )[..., 0, :, :]


def yardstick_of(query, patterns, beta, steps):
    query, patterns = (x[..., None, :, :] for x in (query, patterns))
    seen = np.array(True)
    return iterated(
        lambda x: textbook.attention(x, patterns, patterns, seen, scale=beta)[0], query, steps
    )[..., 0, :, :]


def check(found, arrays, beta, dtype="float64", steps=32):
    truth, yardstick = (f(**arrays, beta=beta, steps=steps) for f in (truth_of, yardstick_of))
    assert_close(found, truth, yardstick, eps=EPS[dtype], len_kv=6)


@pytest.mark.parametrize("dtype", ["float32", "float64", *HALVES])
@pytest.mark.parametrize("beta", [0.01, 1.0])  # far from where a fixed point splits in two
def test_iteration_of_the_oracle(beta, dtype, xp, rng):
    arrays = memory(rng, dtype)
    given = {name: xp.array(x) for name, x in arrays.items()}
    got = retrieve(**given, beta=beta)
    assert type(got) is type(given["query"])
    assert got.dtype == given["query"].dtype
    check(got, arrays, beta, dtype)


def test_damaged_patterns_are_recalled(xp, rng):
    arrays = memory(rng, len_q=6)
    given = {name: xp.array(x) for name, x in arrays.items()}
    found = retrieve(**given, beta=1.0)
    np.testing.assert_array_equal(np.sign(as_float64(found)), arrays["patterns"])
    # What is wrong is the weight of the other patterns, whose entries differ by at most 2.
    found, patterns = as_float64(found), arrays["patterns"]
    scores = found @ patterns.T
    others = np.exp(scores - np.diag(scores)[:, None]).sum(axis=-1, keepdims=True) - 1
    assert (np.abs(found - patterns) <= 2 * others + 4 * EPS["float64"]).all()
    assert others.max() < 0.01


@pytest.mark.parametrize("beta", [None, 0.3])
def test_one_step(beta, xp, rng):
    arrays = memory(rng, "float32")
    found = retrieve(**{name: xp.array(x) for name, x in arrays.items()}, beta=beta, steps=1)
    check(found, arrays, 1 / np.sqrt(D) if beta is None else beta, "float32", steps=1)


def test_a_small_beta_finds_the_mean(rng):
    arrays = memory(rng)
    found = retrieve(**arrays, beta=0.0)
    mean = np.broadcast_to(arrays["patterns"].mean(axis=0), found.shape)
    assert_close(found, mean, eps=EPS["float64"], len_kv=6)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_result_stays_where_it_is(dtype, rng):
    arrays = memory(rng, dtype)
    found = retrieve(**arrays, beta=1.0)
    patterns = arrays["patterns"][None]
    again = sd.attention(found[None], patterns, patterns, scale=1.0)[0]
    assert np.abs(again - found).max() <= 4 * EPS[dtype]  # the tolerance; patterns are ±1
    assert np.abs(arrays["query"] - found).max() > 1


@pytest.mark.parametrize("leads", [((2, 1), (3,)), ((), (2,)), ((2,), ())], ids=str)
def test_leading_axes_broadcast(leads, rng):
    arrays = memory(rng, leads=leads)
    found = retrieve(**arrays, beta=1.0)
    assert found.shape == (*np.broadcast_shapes(*leads), 4, D)
    check(found, arrays, 1.0)


@pytest.fixture
def calls(monkeypatch):
    """Counts the repetitions."""
    seen = []

    def counted(*arguments, **options):
        seen.append(1)
        return sd.attention(*arguments, **options)

    monkeypatch.setattr(_family, "attention", counted)
    return seen


def test_it_stops_when_nothing_moves(calls, rng):
    patterns = memory(rng)["patterns"]
    retrieve(patterns, patterns, beta=4.0)
    assert len(calls) == 1


@pytest.mark.parametrize("steps", [1, 3])
def test_it_stops_after_the_last_step(steps, calls, rng):
    arrays = memory(rng)
    found = retrieve(**arrays, beta=0.1, steps=steps, tolerance=0)
    assert len(calls) == steps
    check(found, arrays, 0.1, steps=steps)


def test_a_large_tolerance_stops_early(calls, rng):
    retrieve(**memory(rng), beta=0.1, tolerance=3 / EPS["float64"])  # no entry moves by 3
    assert len(calls) == 1


def test_each_state_settles_for_itself(rng):
    """Near the middle of two patterns it first moves slowly; so long as others move, too."""
    half = rng.standard_normal(D)
    patterns = np.stack([half, -half])
    query = np.array([[[1e-6]], [[1e-3]]]) * half  # the axis of a batch, one state in each entry
    slow, fast = (np.abs(x - query).max(axis=-1).ravel() for x in (
        retrieve(query, patterns, steps=steps, tolerance=0) for steps in (1, 2)))
    limit = (slow[0] + fast[0]) / 2  # between the changes of the first entry's first two steps
    assert slow[0] < limit < slow[1]
    tolerance = limit / (EPS["float64"] * np.abs(half).max())
    together = retrieve(query, patterns, tolerance=tolerance)
    for entry in (0, 1):
        alone = retrieve(query[entry], patterns, tolerance=tolerance)
        np.testing.assert_array_equal(together[entry], alone)
    np.testing.assert_array_equal(together[0], retrieve(query[0], patterns, steps=1))
    assert np.abs(together[1] - query[1]).max() > 10 * limit


def test_nan_reaches_its_own_rows(rng):
    arrays = memory(rng, leads=((2,), (2,)))
    arrays["patterns"][1, 3, 5] = np.nan
    found = retrieve(**arrays, beta=0.5)
    clean = retrieve(arrays["query"][0], arrays["patterns"][0], beta=0.5)
    np.testing.assert_array_equal(found[0], clean)
    assert np.isnan(found[1]).any(axis=-1).all()


@pytest.mark.parametrize(("len_q", "len_kv"), [(0, 6), (4, 0)])
def test_axes_of_length_zero(len_q, len_kv, xp):
    query, patterns = np.ones((len_q, D)), np.ones((len_kv, D))
    found = retrieve(xp.array(query), xp.array(patterns))
    np.testing.assert_array_equal(as_float64(found), np.zeros((len_q, D)))


def test_gradient(rng):
    torch = pytest.importorskip("torch")
    arrays = memory(rng, len_q=2)
    leaves = [torch.tensor(x, requires_grad=True) for x in arrays.values()]
    assert torch.autograd.gradcheck(
        lambda *given: retrieve(*given, beta=0.05, steps=3), leaves, fast_mode=True
    )


def test_compiled(rng):
    jax = pytest.importorskip("jax")
    arrays = memory(rng)
    found = jax.jit(lambda *given: retrieve(*given, beta=1.0, steps=8))(*arrays.values())
    check(found, arrays, 1.0, steps=8)


ERRORS = [
    ({"patterns": [1.0]}, TypeError, r"patterns must be one of arrays of .*, got builtins.list"),
    ({"patterns": np.zeros((6, D), np.float32)}, TypeError,
     r"query and patterns must share one dtype of .*, got float64, float32\. Convert"),
    ({"query": np.zeros(D)}, ValueError, r"query must have at least two axes, got query \(32,\)\."),
    ({"query": np.zeros((2, 4, D)), "patterns": np.zeros((3, 6, D))}, ValueError,
     r"leading axes of query, patterns must broadcast, got query .*, patterns .*\. Axes"),
    ({"query": np.zeros((4, 5))}, ValueError,
     r"query and patterns must have the same width, got 5 and 32\. A query is a pattern"),
    ({"beta": "warm"}, TypeError, r"beta must be a real number, got 'warm'\. Pass"),
    ({"beta": np.inf}, ValueError, r"beta must be finite, got inf\. Pass"),
    ({"steps": 0}, ValueError, r"steps must be at least 1, got 0\. It bounds"),
    ({"steps": 2.0}, TypeError, r"steps must be an integer, got 2\.0\. Pass an int"),
    ({"tolerance": -1.0}, ValueError, r"tolerance must be at least 0, got -1\.0\. It counts"),
    ({"tolerance": None}, TypeError, r"tolerance must be a real number, got None\. Pass"),
]


@pytest.mark.parametrize(("given", "error", "message"), ERRORS)
def test_error(given, error, message, rng):
    with pytest.raises(error, match=message):
        retrieve(**memory(rng) | given)
