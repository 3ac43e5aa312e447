"""Layers and traces: what they hold, for every array library, and what is refused."""

import pickle
import sys

import numpy as np
import pytest

import naive
import scaledot as sd
from compare import EPS, as_float64, assert_close
from scaledot import introspect

H, N, M, D = 4, 6, 9, 5
TOKENS = ["the", "cat", "saw", "the", "cat", "run"]


def arrays(rng, heads=(H, 2), lengths=(N, M), dtype="float64"):
    """Query and key of one sequence."""
    shapes = zip(heads, lengths, strict=True)
    return [rng.standard_normal((h, n, D)).astype(dtype) for h, n in shapes]


def truth_of(query, key, **options):
    """Weights by the oracle, (num_heads, len_q, len_kv)."""
    return naive.attention(query, key, key, **options)[2]


def option_sets(rng):
    """Options of one sequence, each in the shapes that differ by head and that do not."""
    return {
        "none": {},
        "causal": {"causal": True, "scale": 0.7, "softcap": 2.0},
        "window": {"window": (3, 1), "q_offset": 1, "kv_offset": 2},
        "lengths": {"kv_len": 7, "causal": True},
        "segments": {"segment_ids": (np.arange(N) // 3, np.arange(M) // 5)},
        "mask": {"mask": rng.random((H, N, M)) < 0.7, "bias": rng.standard_normal((N, M))},
        "one mask": {"mask": rng.random((1, 1, M)) < 0.7, "bias": rng.standard_normal((H, 1, M))},
        "heads": {"alibi_slopes": rng.random(H), "sinks": rng.standard_normal(H)},
        "blocks": {"block_mask": np.array([1, 0, 1, 1], bool)[:, None, None]},
        "mods": {"score_mod": lambda score, batch, head, q_pos, kv_pos: score * (1 + head),
                 "mask_mod": lambda batch, head, q_pos, kv_pos: (q_pos + kv_pos + head) % 3 > 0},
    }  # fmt: skip


OPTIONS = tuple(option_sets(np.random.default_rng(0)))


@pytest.mark.parametrize("heads", [None, [2], [-1, 0, 1], []])
@pytest.mark.parametrize("kind", OPTIONS)
def test_weights_of_rows_and_heads(kind, heads, rng):
    query, key = arrays(rng)
    options = option_sets(rng)[kind]
    layer = introspect.look(query, key, **options)
    truth = truth_of(query, key, **options)[:, [1, -1]]
    truth = truth if heads is None else truth[np.array(heads, int)]
    got = layer.weights(rows=[1, -1], heads=heads)
    assert got.shape == truth.shape
    if truth.size:
        assert_close(got, truth, eps=EPS["float64"], len_kv=M)


@pytest.mark.parametrize("kind", OPTIONS)
def test_leading_axes_of_one_change_nothing(kind, rng):
    query, key = arrays(rng)
    options = option_sets(rng)[kind]
    deep = {name: x[None, None] if isinstance(x, np.ndarray) and x.ndim == 3 else x
            for name, x in options.items()}  # fmt: skip
    if kind == "segments":
        deep["segment_ids"] = tuple(x[None, None] for x in options["segment_ids"])
    for name in ("kv_len", "q_offset", "kv_offset"):
        if name in deep:
            deep[name] = np.full((1, 1), deep[name])
    got = introspect.look(query[None, None], key[None, None], **deep)
    want = introspect.look(query, key, **options)
    assert got.query.shape == (H, N, D)
    assert set(got.options) == set(options)
    for a, b in zip(got.stats, want.stats, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(got.weights(heads=[3]), want.weights(heads=[3]))


def test_arrays_of_any_library(xp, rng):
    query, key = arrays(rng, dtype="float32")
    mask = rng.random((H, N, M)) < 0.8
    got = introspect.look(xp.array(query), xp.array(key), mask=xp.array(mask), impl="blockwise")
    want = introspect.look(query, key, mask=mask, impl="blockwise")
    kept = [x for x in (*got.stats, got.query, got.key, got.options["mask"]) if x is not None]
    assert {type(x) for x in kept} == {np.ndarray}
    np.testing.assert_array_equal(got.query, query)
    np.testing.assert_array_equal(got.weights(), want.weights())
    truth = truth_of(query.astype(float), key.astype(float), mask=mask)
    # Scores of a few units carry a rounding each.
    loose = truth * (1 + 4 * EPS["float32"])
    assert_close(got.weights(), truth, loose, eps=EPS["float32"], len_kv=M)
    entropy, about = (
        -np.where(x > 0, x * np.log(np.where(x > 0, x, 1)), 0).sum(-1) for x in (truth, loose)
    )
    assert_close(got.stats.entropy, entropy, about, eps=EPS["float32"], len_kv=M)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_tensors_that_need_gradients(dtype, rng):
    torch = pytest.importorskip("torch")
    query, key = (torch.tensor(x, requires_grad=True).to(getattr(torch, dtype))
                  for x in arrays(rng))  # fmt: skip
    layer = introspect.look(query, key, sinks=torch.zeros(H, requires_grad=True))
    assert layer.query.dtype == ("float32" if dtype == "bfloat16" else dtype)
    np.testing.assert_array_equal(as_float64(layer.query), as_float64(query))
    truth = truth_of(as_float64(query), as_float64(key), sinks=np.zeros(H))
    assert_close(layer.weights(), truth, eps=EPS[dtype], len_kv=M)


def test_what_a_trace_holds(rng):
    query, key = (rng.standard_normal((3, H, N, D)) for _ in range(2))
    trace = introspect.trace(
        query, key, tokens=TOKENS, title="cats", causal=True, map_shape=(2, 3), last=2, top_k=3
    )
    assert [layer.name for layer in trace.layers] == ["layer 0", "layer 1", "layer 2"]
    assert (trace.tokens, trace.key_tokens, trace.title) == (tuple(TOKENS), None, "cats")
    for i, layer in enumerate(trace.layers):
        assert (layer.num_heads, layer.len_q, layer.len_kv) == (H, N, N)
        assert dict(layer.options) == {"causal": True}
        want = sd.attention_stats(
            query[i], key[i], causal=True, map_shape=(2, 3), last=2, top_k=3
        )
        for a, b in zip(layer.stats, want, strict=True):
            np.testing.assert_array_equal(a, b)
    lists = introspect.trace([query[0][None], query[1]], [*key[:2]], names=["a", 7])
    assert [layer.name for layer in lists.layers] == ["a", "7"]
    np.testing.assert_array_equal(lists.layers[1].weights(), sd.attention_weights(query[1], key[1]))
    again = pickle.loads(pickle.dumps(trace))
    np.testing.assert_array_equal(again.layers[2].weights(), trace.layers[2].weights())


def test_one_head_without_an_axis(rng):
    query, key = rng.standard_normal((N, D)), rng.standard_normal((M, D))
    layer = introspect.look(query, key, mask=rng.random((N, M)) < 0.9)
    assert (layer.num_heads, layer.len_q, layer.len_kv) == (1, N, M)
    assert layer.stats.received.shape == (1, M)
    truth = truth_of(query, key, mask=layer.options["mask"])[None]
    assert_close(layer.weights(heads=[0]), truth, eps=EPS["float64"], len_kv=M)


def test_tokens(rng):
    stats = introspect.look(*arrays(rng)).stats
    layer = introspect.Layer("bare", stats)
    keys = [str(i) for i in range(M)]
    trace = introspect.Trace([layer], TOKENS, np.arange(M))
    assert trace.layers == (layer,)
    assert trace.key_tokens == tuple(keys)
    assert introspect.Trace((layer,), None, keys).tokens is None


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_tokens_that_are_no_strings(library):
    other = pytest.importorskip(library)
    numbers = tuple("543210")
    ids = other.asarray([5, 4, 3, 2, 1, 0])
    for given in (ids, list(ids), ids.tolist(), range(5, -1, -1)):
        assert introspect.trace([X], [X], tokens=given).tokens == numbers
    pieces = [b"a", "\u00e9".encode(), b"\xff", np.bytes_(b"d"), np.str_("e"), "f"]
    found = introspect.trace([X], [X], tokens=pieces).tokens
    assert found == ("a", "\u00e9", "\ufffd", "d", "e", "f")
    assert {type(token) for token in found} == {str}


def test_a_trace_in_a_line():
    many = introspect.trace([X] * 30, [X] * 30, title="cats", **words)
    assert repr(many) == (
        "Trace('cats', 30 layers, 6 tokens, "
        "first Layer('layer 0', num_heads=4, len_q=6, len_kv=6))"
    )
    assert "no tokens" in repr(introspect.trace([X], [X]))


X = np.zeros((H, N, D))
LAYER = introspect.look(X, X)
BARE = introspect.Layer("bare", LAYER.stats)

look, trace, words = introspect.look, introspect.trace, {"tokens": TOKENS}
ONE_EACH = "query, key and names must have one entry for each layer"
ERRORS = {
    "batch": (ValueError, "query must be of one sequence", lambda: look(np.stack([X, X]), X)),
    "axes": (ValueError, "query must have at least two axes", lambda: look(X[0, 0], X)),
    "not an array": (TypeError, "key must be one of arrays", lambda: look(X, None)),
    "option": (ValueError, "mask must broadcast", lambda: look(X, X, mask=X[:2] > 0)),
    "no layers": (ValueError, "query must have an axis of layers", lambda: trace(X, X)),
    "not layers": (TypeError, "key must be an array or a sequence", lambda: trace([X], 3)),
    "counts": (ValueError, ONE_EACH, lambda: trace([X], [X, X])),
    "names": (ValueError, ONE_EACH, lambda: trace([X], [X], names="ab")),
    "empty": (ValueError, "a trace must have at least one layer", lambda: trace([], [])),
    "kinds": (TypeError, "layers must be", lambda: introspect.Trace((X,))),
    "names of nothing": (TypeError, "names must be a seq", lambda: trace([X], [X], names=3)),
    "no tokens": (TypeError, "tokens must be a sequence", lambda: trace([X], [X], tokens=20)),
    "tokens of many": (
        ValueError, "tokens must be a sequence", lambda: trace([X], [X], tokens=np.zeros((1, 6))),
    ),
    "text": (TypeError, "tokens must be a sequence", lambda: trace([X], [X], tokens="abcdef")),
    "tokens": (
        ValueError, "tokens must have one string for each of the len_q = 6",
        lambda: trace([X], [X], tokens=["a"]),
    ),
    "key_tokens": (
        ValueError, "key_tokens must have one string for each of the len_kv = 6",
        lambda: trace([X], [X], **words, key_tokens=["a"]),
    ),
    "tokens of keys": (
        ValueError, "tokens (key_tokens are not given) must have one string for each of the len_kv",
        lambda: trace([X], [X[:, 1:]], **words),
    ),
    "heads": (ValueError, "heads must lie between -4 and 3", lambda: LAYER.weights(heads=[4])),
    "head": (TypeError, "heads must be a 1-D sequence", lambda: LAYER.weights(heads=1)),
    "rows": (ValueError, "rows must lie between -6 and 5", lambda: LAYER.weights(rows=[-7])),
    "bare": (ValueError, "weights need the layer's query and key", lambda: BARE.weights()),
}  # fmt: skip


@pytest.mark.parametrize(("error", "message", "call"), ERRORS.values(), ids=ERRORS)
def test_errors(error, message, call):
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value).startswith(message)


def made(query=X, key=X, options=None, **changed):
    """A layer with some of its statistics changed."""
    stats = LAYER.stats._replace(**changed)
    return introspect.Layer("x", stats, query, key, {} if options is None else options)


ONE = sd.attention_stats(X[0], X[0])
LAYERS = {
    "not stats": (TypeError, "stats must be", lambda: introspect.Layer("x", tuple(LAYER.stats))),
    "lists": (TypeError, "lse of a layer's stats must be", lambda: made(lse=[[0.0]])),
    "nothing": (TypeError, "top_keys of a layer's stats must be", lambda: made(top_keys=None)),
    "one head": (ValueError, "stats of a layer must be of", lambda: introspect.Layer("x", ONE)),
    "a batch": (
        ValueError, "stats of a layer must be of one sequence",
        lambda: introspect.Layer("x", sd.attention_stats(X[None], X[None])),
    ),
    **{
        name: (ValueError, f"{name} of a layer's stats must have the shape",
               lambda name=name, x=x: made(**{name: x[..., :-1]}))
        for name, x in LAYER.stats._asdict().items()
        if x is not None and not name.startswith(("top", "lse", "received"))
    },
    "top_keys": (ValueError, "top_weights of", lambda: made(top_keys=np.zeros((H, 6, 7), int))),
    "block_map": (ValueError, "block_map of", lambda: made(block_map=np.zeros((3, 2, 2)))),
    "query": (TypeError, "query of a layer must be a NumPy", lambda: made(query=X.tolist())),
    "2-D query": (ValueError, "query of a layer must be (heads, len_q", lambda: made(query=X[0])),
    "fewer queries": (
        ValueError, "query of a layer must be (heads, len_q, d_k) with len_q = 6",
        lambda: made(query=X[:, 1:]),
    ),
    "more keys": (
        ValueError, "key of a layer must be (heads, len_kv, d_k) with len_kv = 6",
        lambda: made(key=np.zeros((H, 7, D))),
    ),
    "heads": (ValueError, "query of a layer must have the 4 heads", lambda: made(query=X[1:])),
    "groups": (ValueError, "num_heads of a layer's query", lambda: made(key=X[1:])),
    "widths": (ValueError, "query and key of a layer must have", lambda: made(key=X[..., 1:])),
    "options": (TypeError, "options must be a mapping", lambda: made(options=["causal"])),
}  # fmt: skip


@pytest.mark.parametrize(("error", "message", "call"), LAYERS.values(), ids=LAYERS)
def test_layers_that_do_not_fit(error, message, call):
    made()
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value).startswith(message)


def test_statistics_of_tensors_are_refused():
    torch = pytest.importorskip("torch")
    stats = sd.attention_stats(torch.zeros(X.shape), torch.zeros(X.shape))
    with pytest.raises(TypeError, match=r"^lse of a layer's stats must be a NumPy array, got t"):
        introspect.Layer("x", stats)


@pytest.mark.parametrize("function", [
    introspect.findings, introspect.head_scores, introspect.unknown, introspect.summary,
    introspect.rollout, introspect.to_bertviz, lambda x: introspect.compare(x, x),
])  # fmt: skip
@pytest.mark.parametrize("given", [introspect.look(X, X), [1], None])
def test_what_is_no_trace_is_refused(function, given):
    with pytest.raises(TypeError, match=r"must be a scaledot.introspect.Trace, got "):
        function(given)


def test_thresholds_are_refused_that_are_none():
    with pytest.raises(TypeError, match=r"^thresholds must be scaledot.introspect.Thresholds, got"):
        introspect.findings(introspect.trace([X], [X]), thresholds={"sink": 0.8})


@pytest.mark.heavy  # JAX compiles
def test_traced_values_are_refused():
    jax = pytest.importorskip("jax")
    with pytest.raises(TypeError, match=r"^query must hold values"):
        jax.jit(lambda x: introspect.look(x, x).stats.lse)(X)


def test_to_bertviz(rng):
    torch = pytest.importorskip("torch")
    query, key = (rng.standard_normal((2, H, N, D)) for _ in range(2))
    trace = introspect.trace(query, key, tokens=TOKENS, causal=True)
    attention, tokens = introspect.to_bertviz(trace)
    assert (type(attention), tokens) == (list, TOKENS)
    for i, layer in enumerate(attention):
        assert isinstance(layer, torch.FloatTensor)
        assert tuple(layer.shape) == (1, H, N, N)
        truth = truth_of(query[i], key[i], causal=True)
        assert_close(layer[0], truth, eps=EPS["float32"], len_kv=N)
        assert_close(layer.sum(-1), np.ones((1, H, N)), eps=EPS["float32"], len_kv=N)
    places = introspect.to_bertviz(introspect.trace(query, key))[1]
    assert places == ["0", "1", "2", "3", "4", "5"]


def test_what_bertviz_cannot_show(rng, monkeypatch):
    pytest.importorskip("torch")
    trace = introspect.trace([X, X[:2]], [X, X[:2]])
    with pytest.raises(ValueError, match=r"^bertviz needs self-attention with the same shape"):
        introspect.to_bertviz(trace)
    with pytest.raises(ValueError, match=r"^bertviz needs self-attention with the same shape"):
        introspect.to_bertviz(introspect.trace([X], [X[:, 1:]]))
    with pytest.raises(ValueError, match=r"^bertviz needs the same tokens"):
        introspect.to_bertviz(introspect.trace([X], [X], tokens=TOKENS, key_tokens=TOKENS[::-1]))
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r"pip install 'scaledot\[torch\]'"):
        introspect.to_bertviz(introspect.trace([X], [X]))
