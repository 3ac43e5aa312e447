"""Summaries, comparisons and rollout against loops over dense weights."""

import itertools
import math

import numpy as np
import pytest

import naive
from compare import EPS, assert_close
from scaledot import introspect
from scaledot.introspect import _rows

LAYERS, H, N, D = 3, 4, 40, 6


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Blocks of 16 rows, so that there are several."""
    monkeypatch.setattr(_rows, "BLOCK_WEIGHTS", 1)


def operands(rng, heads=(H, H), lengths=(N, N), dtype="float64"):
    """Query and key of all layers."""
    return [(1.5 * rng.standard_normal((LAYERS, h, n, D))).astype(dtype)
            for h, n in zip(heads, lengths, strict=True)]  # fmt: skip


def dense(query, key, **options):
    """Weights (num_layers, num_heads, len_q, len_kv) and what is visible, in float64."""
    found = [naive.whole(q.astype(float), k.astype(float), k.astype(float), **options)[2:]
             for q, k in zip(query, key, strict=True)]  # fmt: skip
    return [np.stack(x) for x in zip(*found, strict=True)]


def options_of(kind):
    """Options of a trace, by name."""
    rng = np.random.default_rng(3)
    blind = np.ones((H, N, 1), bool)
    blind[1, 4:9] = blind[2] = False
    return {
        "full": {},
        "causal": {"causal": True, "softcap": 3.0},
        "sinks": {"sinks": rng.standard_normal(H) + 2, "window": (9, 3)},
        "blind": {"mask": blind, "causal": True},
        "heads": {"alibi_slopes": rng.random(H), "bias": rng.standard_normal((H, N, N))},
        "mod": {"score_mod": lambda score, batch, head, q_pos, kv_pos: score + 0.5 * head},
    }[kind]


def test_summary(rng):
    query, key = operands(rng)
    options = options_of("blind")
    got = introspect.summary(introspect.trace(query, key, **options))
    weights, visible = dense(query, key, **options)
    for layer in range(LAYERS):
        for head in range(H):
            w, v = weights[layer, head], visible[layer, head]
            rows = [i for i in range(N) if v[i].any()]
            if not rows:
                assert head == 2
                continue
            largest = [w[i].max() for i in rows]
            want = {
                "entropy": [-sum(x * math.log(x) for x in w[i] if x) for i in rows],
                "max_weight": largest,
                "saturation": [x * (1 - x) for x in largest],
                "mean_distance": [sum(w[i, j] * abs(i - j) for j in range(N)) for i in rows],
                "visible": [v[i].sum() for i in rows],
                "sink_mass": w[:, 0],
            }
            for name, values in want.items():
                one = getattr(got, name)[layer, head]
                assert_close(one, np.mean(values), eps=EPS["float64"], len_kv=N)
    assert np.isnan(got.entropy[:, 2]).all()
    assert not np.isnan(got.entropy[:, [0, 1, 3]]).any()


def rows_apart(p, q):
    """Total variation and Jensen-Shannon divergence of two rows, what they lack a last entry."""
    p, q = ([*row, max(0.0, 1 - sum(row))] for row in (p, q))
    variation = sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2
    divergence = 0.0
    for a, b in zip(p, q, strict=True):
        divergence += sum(x * math.log(2 * x / (a + b)) / 2 for x in (a, b) if x > 0)
    return variation, divergence


@pytest.mark.parametrize("rows", [None, [0, -1, 5, 17]])
@pytest.mark.parametrize("kind", ["full", "causal", "sinks", "blind", "heads"])
def test_compare(kind, rows, rng):
    options = options_of(kind)
    query, key = operands(rng)
    other = query + 0.5 * rng.standard_normal(query.shape)
    traces = [introspect.trace(x, key, **options) for x in (query, other)]
    got = introspect.compare(*traces, rows=rows)
    a, b = (dense(x, key, **options)[0] for x in (query, other))
    seen = dense(query, key, **options)[1].any(-1)
    chosen = range(N) if rows is None else [i % N for i in rows]
    for layer, head in np.ndindex(LAYERS, H):
        p, q, use = a[layer, head], b[layer, head], seen[layer, head]
        apart = np.array([rows_apart(p[i], q[i]) for i in chosen if use[i]])
        if not use.any():
            assert all(np.isnan(getattr(got, name)[layer, head]) for name in FIELDS)
            continue
        tops = [p[i].argmax() == q[i].argmax() for i in range(N) if use[i]]
        entropy = [sum(x * math.log(x) for x in p[i] if x) - sum(x * math.log(x) for x in q[i] if x)
                   for i in range(N) if use[i]]  # fmt: skip
        want = {
            "total_variation": apart[:, 0].mean(), "total_variation_max": apart[:, 0].max(),
            "divergence": apart[:, 1].mean(), "divergence_max": apart[:, 1].max(),
            "top_key_agreement": np.mean(tops), "entropy_difference": np.mean(entropy),
            "max_weight_difference": np.mean((q.max(-1) - p.max(-1))[use]),
            "received_variation": rows_apart(p[use].mean(0), q[use].mean(0))[0],
        }
        for name, value in want.items():
            # All are sums of numbers of the size of 1, or of an entropy of log N.
            one = getattr(got, name)[layer, head]
            assert_close(math.log(N) + one, math.log(N) + value, eps=EPS["float64"], len_kv=N)
        if rows is None:
            floor = EPS["float64"] * N
            assert got.received_variation[layer, head] <= want["total_variation"] + floor


FIELDS = tuple(introspect.Comparison.__dataclass_fields__)


def test_a_trace_does_not_differ_from_itself(rng):
    trace = introspect.trace(*operands(rng, dtype="float32"), causal=True)
    got = introspect.compare(trace, trace)
    for name in FIELDS:
        value = 1.0 if name == "top_key_agreement" else 0.0
        np.testing.assert_array_equal(getattr(got, name), np.full((LAYERS, H), value))


def test_rows_without_a_common_key_are_as_far_apart_as_can_be():
    query = 400 * np.eye(20)[None, None]  # weights of 1 and of 0
    key, other = np.eye(20)[None, None], np.roll(np.eye(20), 1, axis=0)[None, None]
    got = introspect.compare(introspect.trace(query, key), introspect.trace(query, other))
    assert_close(got.total_variation, [[1.0]], eps=EPS["float64"], len_kv=20, factor=0)
    assert_close(got.divergence_max, [[math.log(2)]], eps=EPS["float64"], len_kv=20, factor=0)
    assert got.top_key_agreement == [[0.0]]
    assert_close(1 + got.received_variation, [[1.0]], eps=EPS["float64"], len_kv=20)
    blind = introspect.trace(query, key, mask=np.zeros((20, 20), bool))
    assert introspect.compare(introspect.trace(query, key), blind).total_variation == [[1.0]]


def test_largest(rng):
    query, key = operands(rng)
    other = query.copy()
    other[1, 2] *= 3
    other[2, 0] *= 1.2
    traces = [introspect.trace(x, key) for x in (query, other)]
    got = introspect.compare(*traces)
    places = got.largest(3)
    assert [place[:2] for place in places[:2]] == [(1, 2), (2, 0)]
    assert places[0].total_variation == got.total_variation[1, 2]
    assert places[2].total_variation == 0
    assert len(got.largest(100)) == LAYERS * H
    bare = [introspect.Trace(tuple(introspect.Layer(x.name, x.stats) for x in trace.layers))
            for trace in traces]  # fmt: skip
    known = introspect.compare(*bare)
    for name in FIELDS:
        same = not name.startswith(("total", "div"))
        want = getattr(got, name) if same else np.full((LAYERS, H), np.nan)
        np.testing.assert_array_equal(getattr(known, name), want)
    assert [place[:2] for place in known.largest(2)] == [(1, 2), (2, 0)]
    assert known.largest(1)[0].total_variation == known.received_variation[1, 2]
    with pytest.raises(ValueError, match=r"^n must be at least 1"):
        known.largest(0)


def test_traces_that_do_not_fit(rng):
    query, key = operands(rng)
    trace = introspect.trace(query, key)
    with pytest.raises(ValueError, match=r"^two traces must have the same number of layers"):
        introspect.compare(trace, introspect.trace(query[1:], key[1:]))
    with pytest.raises(ValueError, match=r"^layers to compare must have the same"):
        introspect.compare(trace, introspect.trace(query[:, 1:], key[:, 1:]))
    with pytest.raises(ValueError, match=r"^rows must lie between -40 and 39"):
        introspect.compare(trace, trace, rows=[40])


def fused(weights, heads):
    """One matrix (len_q, len_kv) of a layer's weights, by loops."""
    out = np.zeros(weights.shape[1:])
    for i, j in np.ndindex(out.shape):
        values = [float(w[i, j]) for w in weights]
        out[i, j] = {"mean": lambda x: sum(x) / len(x), "max": max, "min": min}[heads](values)
    if heads != "mean":
        for row in out:
            if row.sum():
                row /= row.sum()
    return out


def rolled(weights, residual, heads):
    """The product of all layers' matrices, by loops."""
    product = np.eye(weights[0].shape[-1])
    for layer in weights:
        one = fused(layer, heads)
        step = (1 - residual) * one
        if residual:
            step = step + residual * np.eye(len(one))
        product = np.array([
            [math.fsum(step[i, k] * product[k, j] for k in range(step.shape[1]))
             for j in range(product.shape[1])] for i in range(len(step))
        ])  # fmt: skip
    return product


@pytest.mark.parametrize(("kind", "heads"), [
    *itertools.product(["causal", "sinks", "blind", "heads"], ["mean", "max", "min"]),
    ("mod", "mean"),
])  # fmt: skip
def test_rollout(kind, heads, rng):
    options = options_of(kind)
    query, key = operands(rng)
    trace = introspect.trace(query, key, **options)
    truth = rolled(dense(query, key, **options)[0], 0.5, heads)
    got = introspect.rollout(trace, heads=heads)
    assert got.dtype == np.float64
    assert_close(got, truth, eps=EPS["float64"], len_kv=N)
    got = introspect.rollout(trace, rows=[3, -1], heads=heads)
    assert_close(got, truth[[3, -1]], eps=EPS["float64"], len_kv=N)


@pytest.mark.parametrize("residual", [0, 0.3, 1])
def test_rollout_of_grouped_heads_and_a_residual(residual, rng):
    query, key = operands(rng, heads=(H, 2), dtype="float32")
    trace = introspect.trace(query, key, causal=True)
    truth = rolled(dense(query, key, causal=True)[0], residual, "mean")
    got = introspect.rollout(trace, residual=residual)
    assert got.dtype == np.float32
    assert_close(got, truth, eps=LAYERS * EPS["float32"], len_kv=N)


def test_rollout_of_many_rows_and_of_lengths_that_follow_one_another(rng):
    lengths = [(70, 5), (90, 70), (80, 90)]
    query, key = zip(*[[rng.standard_normal((2, n, D)) for n in pair] for pair in lengths],
                     strict=True)  # fmt: skip
    got = introspect.rollout(introspect.trace(query, key), residual=0)
    truth = rolled([dense(q[None], k[None])[0][0] for q, k in zip(query, key, strict=True)],
                   0, "mean")  # fmt: skip
    assert got.shape == (80, 5)  # more rows than are followed at once
    assert_close(got, truth, eps=LAYERS * EPS["float64"], len_kv=90)


def test_rollout_needs_layers_that_fit(rng):
    query, key = operands(rng)
    trace = introspect.trace(query, key)
    calls = {
        "residual must lie between 0 and 1": lambda: introspect.rollout(trace, residual=1.5),
        "heads must be 'mean', 'max' or 'min'": lambda: introspect.rollout(trace, heads="sum"),
        "rows must lie between -40 and 39": lambda: introspect.rollout(trace, rows=[40]),
        "rollout with a residual needs": lambda: introspect.rollout(
            introspect.trace(query, key[:, :, 1:])),
        "rollout needs layers whose keys": lambda: introspect.rollout(
            introspect.trace([query[0], query[1, :, 1:]], [key[0], key[1, :, 1:]])),
        "weights need the layer's query": lambda: introspect.rollout(
            introspect.Trace((introspect.Layer("bare", trace.layers[0].stats),))),
    }  # fmt: skip
    for message, call in calls.items():
        with pytest.raises(ValueError, match=f"^{message}"):
            call()
