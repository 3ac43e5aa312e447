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
    """Blocks of 16 rows of two heads, so that there are several."""
    monkeypatch.setattr(_rows, "BLOCK_WEIGHTS", 16 * 2 * N)


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


@pytest.mark.parametrize("rows", [None, [0, 1]])
def test_heads_without_numbers_come_first(rows, rng):
    query, key = operands(rng)
    other = 1.1 * query
    other[2, 1, 5] = np.nan
    blind = np.ones((H, 1, 1), bool)
    blind[3] = False
    traces = [introspect.trace(x, key, mask=blind) for x in (query, other)]
    for pair in (traces, traces[::-1]):
        places = introspect.compare(*pair, rows=rows).largest(100)
        assert places[0][:2] == (2, 1)
        assert np.isnan(places[0].total_variation) == (rows is None)
        assert len(places) == LAYERS * (H - 1)
        assert not np.isnan([place.total_variation for place in places[1:]]).any()


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


def poisoned(where, query, key):
    """Options of the lowest layer, of three, that has nan, and its queries that see it."""
    bias = np.zeros((H, N, N))
    segments = np.where(np.arange(N) < 30, 0, -1)
    if where == "query":
        query[0, 1, 17] = np.nan
    elif where == "key":
        key[0, 1, 17] = np.nan
    else:
        bias[2, 17, 16] = np.nan
    options = {"bias": {"bias": bias}, "segments": {"bias": bias, "segment_ids": segments}}
    return options.get(where, {}), range(17, 20 if where == "key" else 18)


@pytest.mark.parametrize("heads", ["mean", "max", "min"])
@pytest.mark.parametrize("where", ["query", "key", "bias", "segments"])
def test_nan_reaches_the_rows_of_a_rollout_that_see_it(where, heads, rng):
    query, key = operands(rng, heads=(H, 2))
    band = {"window": (2, 0)}
    clean = [introspect.look(q, k, **band) for q, k in zip(query, key, strict=True)]
    query, key = query.copy(), key.copy()  # layers keep what they are given
    options, lost = poisoned(where, query, key)
    if where == "segments":
        clean[0] = introspect.look(query[0], key[0], segment_ids=options["segment_ids"], **band)
    below = introspect.look(query[0], key[0], **options, **band)
    got = introspect.rollout(introspect.Trace((below, *clean[1:])), heads=heads)
    want = introspect.rollout(introspect.Trace(tuple(clean)), heads=heads)
    reach = [i for i in range(N) if lost[0] <= i <= lost[-1] + 4]  # two layers, two tokens each
    want[reach] = np.nan
    assert_close(got, want, eps=EPS["float64"], len_kv=N)
    assert np.isfinite(introspect.rollout(introspect.Trace((below,)), residual=1)).all()


@pytest.mark.parametrize("width", [1, 40, 2**15, 2**22])
@pytest.mark.parametrize("num_heads", [0, 1, 12])
@pytest.mark.parametrize("together", [False, True])
def test_blocks(width, num_heads, together, monkeypatch):
    monkeypatch.undo()  # as they are
    seen = np.zeros((37, num_heads), int)
    for rows, heads in _rows.blocks(37, num_heads, width, together=together):
        seen[rows, heads] += 1
        count = seen[rows, heads].size
        assert count * width <= _rows.BLOCK_WEIGHTS or count == (num_heads if together else 1)
        assert not together or seen[rows, heads].shape[1] == num_heads
    assert (seen == 1).all()


@pytest.mark.parametrize("library", ["torch", pytest.param("jax", marks=pytest.mark.heavy)])
def test_functions_of_other_libraries(library, rng):
    """They are called with arrays of the library that they are written for."""
    kind = pytest.importorskip(library)
    other = kind.numpy if library == "jax" else kind
    query, key = operands(rng, dtype="float32")

    def score_mod(score, batch, head, q_pos, kv_pos):
        return other.where(q_pos - kv_pos > 3, score - head, score)

    def mask_mod(batch, head, q_pos, kv_pos):
        return other.logical_or(kv_pos <= q_pos, kv_pos == 2)

    trace = introspect.trace(
        other.asarray(query), other.asarray(key), score_mod=score_mod, mask_mod=mask_mod,
        impl="blockwise",
    )  # fmt: skip
    weights = dense(
        query, key, mask=np.tri(N, dtype=bool) | (np.arange(N) == 2),
        score_mod=lambda score, batch, head, q_pos, kv_pos: score - head * (q_pos - kv_pos > 3),
    )[0]  # fmt: skip
    got = trace.layers[0].weights(rows=[5, 30], heads=[3, 1])
    want = weights[0][np.ix_([3, 1], [5, 30])]
    # Scores of a few units carry a rounding each.
    assert_close(got, want, want * (1 + 8 * EPS["float32"]), eps=EPS["float32"], len_kv=N)
    assert introspect.compare(trace, trace).total_variation.max() == 0
    for heads in ("mean", "max"):
        got, want = introspect.rollout(trace, heads=heads), rolled(weights, 0.5, heads)
        assert_close(got, want, want * (1 + 8 * EPS["float32"]), eps=EPS["float32"], len_kv=N)


def test_functions_of_numbers_stay_with_tensors(rng):
    """Kernels compile them; they cannot be called with arrays."""
    torch = pytest.importorskip("torch")
    query, key = operands(rng, dtype="float32")

    def score_mod(score, batch, head, q_pos, kv_pos):
        return score - head if q_pos > kv_pos else score

    trace = introspect.trace(torch.asarray(query), torch.asarray(key), score_mod=score_mod)
    weights = dense(query, key, score_mod=score_mod)[0]
    got = trace.layers[0].weights(rows=[5, 30])
    want = weights[0][:, [5, 30]]
    assert_close(got, want, want * (1 + 8 * EPS["float32"]), eps=EPS["float32"], len_kv=N)


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
        "rollout needs layers with heads": lambda: introspect.rollout(
            introspect.trace(query[:, :0], key[:, :0])),
        "weights need the layer's query": lambda: introspect.rollout(
            introspect.Trace((introspect.Layer("bare", trace.layers[0].stats),))),
    }  # fmt: skip
    for message, call in calls.items():
        with pytest.raises(ValueError, match=f"^{message}"):
            call()
