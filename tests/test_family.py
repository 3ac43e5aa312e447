"""Additive and multiplicative attention against the oracle."""

import functools
import math
import tracemalloc

import numpy as np
import pytest

import naive
import scaledot as sd
import textbook
from compare import EPS, as_float64, assert_close
from conftest import Library
from scaledot import _arrays, _blockwise, _family
from scaledot._family import (
    additive_attention,
    additive_attention_state,
    multiplicative_attention,
)

FORMS = ("additive", "dot", "general", "concat")
HALVES = ("float16", "bfloat16")
LEN_Q, LEN_KV = 12, 9
D_QUERY, D_KEY, D_V, D_HIDDEN = 4, 3, 2, 5


def cast(arrays, dtype):
    """Round every array of a dict to a dtype, by name."""
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    return {name: x.astype(dtype) for name, x in arrays.items()}


def pair_arrays(form, rng, dtype="float32", *, len_q=LEN_Q, len_kv=LEN_KV, leads=((2,),) * 3):
    """Query, key, value and the weights that a form takes."""
    d_query = D_KEY if form == "dot" else D_QUERY
    shapes = {
        "query": (*leads[0], len_q, d_query),
        "key": (*leads[1], len_kv, D_KEY),
        "value": (*leads[2], len_kv, D_V),
        "w_q": (D_HIDDEN, D_QUERY),
        "w_k": (D_HIDDEN, D_KEY),
        "w": (D_QUERY, D_KEY) if form == "general" else (D_HIDDEN, D_QUERY + D_KEY),
        "v": (D_HIDDEN,),
    }
    weights = {"additive": ("w_q", "w_k", "v"), "dot": (), "general": ("w",), "concat": ("w", "v")}
    names = ("query", "key", "value", *weights[form])
    return cast({name: rng.standard_normal(shapes[name]) for name in names}, dtype)


def random_mask(rng, *shape):
    """Visible pairs; the first query sees nothing."""
    mask = rng.random(shape) < 0.7
    mask[..., 0, :] = False
    return mask


def attend(form, arrays, mask=None):
    """Output of the library."""
    if form == "additive":
        return additive_attention(**arrays, mask=mask)
    return multiplicative_attention(**arrays, form=form, mask=mask)


def state_of(form, arrays, mask=None):
    """Output and lse, by the ways that the docstrings name."""
    arrays = dict(arrays)
    if form == "concat":
        w, width = arrays.pop("w"), arrays["query"].shape[-1]
        arrays |= {"w_q": w[:, :width], "w_k": w[:, width:]}
    if form in ("additive", "concat"):
        return additive_attention_state(**arrays, mask=mask)
    return _family._multiplicative_state(
        arrays["query"], arrays["key"], arrays["value"], arrays.get("w"), None, form, mask
    )


def truth_of(form, arrays, mask=None):
    """Output and lse of the oracle."""
    if form == "additive":
        return naive.additive(**arrays, mask=mask)
    return naive.multiplicative(**arrays, form=form, mask=mask)


def product(a, b):
    """Matrix product in the working dtype."""
    wide = textbook.wide(a.dtype)
    return (a.astype(wide) @ b.astype(wide)).astype(a.dtype)


@np.errstate(all="ignore")
def yardstick_of(form, arrays, mask=None):
    """Output and lse as textbooks compute them, every array in the working dtype."""
    query, key, value = (arrays[name] for name in ("query", "key", "value"))
    if form == "dot":
        scores = product(query, key.swapaxes(-1, -2))
    elif form == "general":
        scores = product(product(query, arrays["w"]), key.swapaxes(-1, -2))
    else:
        w_q, w_k = arrays.get("w_q"), arrays.get("w_k")
        if form == "concat":
            w_q, w_k = np.split(arrays["w"], [query.shape[-1]], axis=-1)
        hidden = product(query, w_q.T)[..., :, None, :] + product(key, w_k.T)[..., None, :, :]
        scores = product(np.tanh(hidden), arrays["v"])
    seen = np.broadcast_to(True if mask is None else mask, scores.shape)
    flat = (x[..., None, :, :0] for x in (query, key))
    out, lse = textbook.attention(
        *flat, value[..., None, :, :], seen[..., None, :, :], bias=scores[..., None, :, :]
    )
    return out[..., 0, :, :], lse[..., 0, :]


def check(form, arrays, mask, dtype, xp):
    """Compare output, lse, types and dtypes with the oracle's."""
    truth, yardstick = truth_of(form, arrays, mask), yardstick_of(form, arrays, mask)
    len_kv = arrays["key"].shape[-2]
    given = {name: xp.array(x) for name, x in arrays.items()}
    mask = None if mask is None else xp.array(mask)
    out = attend(form, given, mask)
    assert type(out) is type(given["query"])
    assert out.dtype == given["query"].dtype
    assert_close(out, truth[0], yardstick[0], eps=EPS[dtype], len_kv=len_kv)
    state = state_of(form, given, mask)
    assert str(state.lse.dtype).endswith("float64" if dtype == "float64" else "float32")
    assert state.out.dtype == state.lse.dtype
    assert_close(state.out, truth[0], yardstick[0], eps=EPS[dtype], len_kv=len_kv)
    assert_close(state.lse, truth[1], yardstick[1], eps=EPS[dtype], len_kv=len_kv)


@pytest.mark.parametrize("form", FORMS)
def test_scores_of_every_form(form, xp, rng):
    check(form, pair_arrays(form, rng), random_mask(rng, 2, LEN_Q, LEN_KV), "float32", xp)


@pytest.mark.parametrize("dtype", ["float64", *HALVES])
@pytest.mark.parametrize("form", FORMS)
def test_dtypes(form, dtype, xp, rng):
    check(form, pair_arrays(form, rng, dtype), random_mask(rng, 2, LEN_Q, LEN_KV), dtype, xp)


@pytest.mark.parametrize("mask_shape", [(), (9,), (12, 1), (3, 1, 9), (2, 1, 12, 9)], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_leading_axes_and_masks_broadcast(form, mask_shape, rng):
    arrays = pair_arrays(form, rng, leads=((2, 1), (3,), (2, 3)))
    mask = np.asarray(rng.random(mask_shape) < 0.7)
    check(form, arrays, mask, "float32", Library("numpy"))


@pytest.mark.parametrize("form", ["general", "concat"])
def test_leading_axes_broadcast_in_every_library(form, xp, rng):
    arrays = pair_arrays(form, rng, leads=((2, 1), (3,), (2, 3)))
    check(form, arrays, rng.random((3, 1, 9)) < 0.7, "float32", xp)


@pytest.mark.parametrize("xp", ["numpy", "strict", "torch"], indirect=True)
@pytest.mark.parametrize("form", FORMS)
def test_many_tiles(form, xp, rng, monkeypatch):
    monkeypatch.setattr(_blockwise, "BLOCK_Q", 4)
    monkeypatch.setattr(_blockwise, "BLOCK_KV", 6)
    monkeypatch.setattr(_blockwise, "TILE_SCORES", 48)
    monkeypatch.setattr(_family, "HIDDEN_STEP", 3)
    sizes = []
    whole = _family._tanh_scores

    def counted(*arguments):
        scores = whole(*arguments)
        sizes.append(math.prod(scores.shape))
        return scores

    monkeypatch.setattr(_family, "_tanh_scores", counted)
    arrays = pair_arrays(form, rng, len_q=7, len_kv=11, leads=((3, 1), (1, 2), (3, 2)))
    check(form, arrays, random_mask(rng, 3, 1, 7, 11), "float32", xp)
    if form in ("additive", "concat"):
        assert max(sizes) <= 48
        assert sum(sizes) >= 2 * 6 * 7 * 11  # output and state, all pairs


@pytest.mark.parametrize("sizes", [(0, LEN_KV, 5), (LEN_Q, 0, 5), (LEN_Q, LEN_KV, 0)], ids=str)
def test_axes_of_length_zero(sizes, xp, rng):
    len_q, len_kv, d_hidden = sizes
    arrays = pair_arrays("additive", rng, len_q=len_q, len_kv=len_kv)
    arrays |= {name: arrays[name][:d_hidden] for name in ("w_q", "w_k", "v")}
    check("additive", arrays, None, "float32", xp)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("form", FORMS)
def test_masked_keys_cannot_matter(form, bad, xp, rng):
    arrays = pair_arrays(form, rng)
    mask = random_mask(rng, 2, LEN_Q, LEN_KV)
    mask[..., 5] = False
    clean = attend(form, {name: xp.array(x) for name, x in arrays.items()}, xp.array(mask))
    for name in ("key", "value"):
        arrays[name] = arrays[name].copy()
        arrays[name][..., 5, :] = bad
    spoilt = attend(form, {name: xp.array(x) for name, x in arrays.items()}, xp.array(mask))
    np.testing.assert_array_equal(as_float64(spoilt), as_float64(clean))


@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("form", FORMS)
def test_visible_nan_reaches_the_rows_that_see_it(form, name, xp, rng):
    arrays = pair_arrays(form, rng)
    arrays[name][1, 2] = np.nan
    mask = random_mask(rng, LEN_Q, LEN_KV)
    check(form, arrays, mask, "float32", xp)
    rows = np.isnan(truth_of(form, arrays, mask)[0]).any(axis=-1)
    assert rows.any()
    assert not rows.all()


def test_visible_infinity_saturates_hidden_units(xp, rng):
    arrays = pair_arrays("additive", rng)
    arrays["key"][1, 2, 0] = np.inf
    check("additive", arrays, None, "float32", xp)
    assert np.isfinite(truth_of("additive", arrays)[0]).all()


def test_forms_are_attention(rng):
    arrays = pair_arrays("general", rng)
    query, key, value, w = arrays.values()
    np.testing.assert_array_equal(
        multiplicative_attention(query, key, value, w, form="general"),
        sd.attention(*(x[:, None] for x in (query @ w, key, value)), scale=1.0)[:, 0],
    )
    np.testing.assert_array_equal(
        multiplicative_attention(key, key, value),
        sd.attention(*(x[:, None] for x in (key, key, value)), scale=1.0)[:, 0],
    )


@pytest.mark.parametrize("form", FORMS)
def test_states_of_slices_merge(form, rng):
    arrays = pair_arrays(form, rng)
    mask = random_mask(rng, LEN_Q, LEN_KV)
    parts = [
        state_of(
            form, arrays | {n: arrays[n][..., part, :] for n in ("key", "value")}, mask[:, part]
        )
        for part in (slice(0, 4), slice(4, 5), slice(5, LEN_KV))
    ]
    merged = functools.reduce(sd.merge, parts)
    for got, truth, yardstick in zip(
        merged, truth_of(form, arrays, mask), yardstick_of(form, arrays, mask), strict=True
    ):
        assert_close(got, truth, yardstick, eps=EPS["float32"], len_kv=LEN_KV)


@pytest.mark.parametrize("form", FORMS)
def test_entries_of_a_batch_do_not_depend_on_it(form, rng):
    arrays = pair_arrays(form, rng, leads=((70,),) * 3, len_q=33, len_kv=700)
    whole = attend(form, arrays)
    alone = attend(form, arrays | {n: arrays[n][69] for n in ("query", "key", "value")})
    np.testing.assert_array_equal(whole[69], alone)


def extra_memory(length, d_hidden):
    """Peak of the memory that additive attention takes beyond its arguments."""
    rng = np.random.default_rng(0)
    source, w = rng.standard_normal((length, 8)), rng.standard_normal((d_hidden, 8))
    source, w = source.astype(np.float32), w.astype(np.float32)
    tracemalloc.start()
    try:
        additive_attention(source, source, source, w, w, w[:, 0])
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_is_not_that_of_all_pairs():
    peak = extra_memory(2048, 32)
    assert peak < 2048 * 2048 * 32 * 4 / 8
    assert peak < 2 * extra_memory(1024, 32)  # four times as many pairs
    assert peak < 2 * extra_memory(2048, 16)


# Gradients


def torch_arrays(arrays):
    torch = pytest.importorskip("torch")
    return {name: torch.tensor(x, requires_grad=True) for name, x in arrays.items()}


@pytest.mark.parametrize("form", FORMS)
def test_gradient(form, rng, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(_blockwise, "BLOCK_KV", 4)
    arrays = torch_arrays(pair_arrays(form, rng, "float64"))
    mask = torch.tensor(random_mask(rng, 2, LEN_Q, LEN_KV))

    def call(*values):
        out, lse = state_of(form, dict(zip(arrays, values, strict=True)), mask)
        return out, torch.where(torch.isinf(lse), 0.0, lse)

    assert torch.autograd.gradcheck(call, tuple(arrays.values()), fast_mode=True)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_do_not_see_masked_keys(form, rng):
    torch = pytest.importorskip("torch")
    arrays = pair_arrays(form, rng, "float64")
    mask = random_mask(rng, 2, LEN_Q, LEN_KV)
    mask[..., 5] = False
    gradients = []
    for bad in (0.0, np.nan, np.inf):
        for name in ("key", "value"):
            arrays[name][..., 5, :] = bad
        leaves = torch_arrays(arrays)
        attend(form, leaves, torch.tensor(mask)).sum().backward()
        gradients.append({name: x.grad.numpy() for name, x in leaves.items()})
    for spoilt in gradients[1:]:
        for name, clean in gradients[0].items():
            assert np.isfinite(clean).all()
            assert_close(spoilt[name], clean, eps=EPS["float64"], len_kv=LEN_KV)


@pytest.mark.parametrize("form", FORMS)
def test_compiled_gradient(form, rng):
    jax = pytest.importorskip("jax")
    arrays = pair_arrays(form, rng, "float32")
    mask = random_mask(rng, 2, LEN_Q, LEN_KV)
    # The gradient of float64 was compared with differences above.
    truth, yardstick = (torch_arrays(cast(arrays, dtype)) for dtype in ("float64", "float32"))
    for leaves in (truth, yardstick):
        attend(form, leaves, mask).sum().backward()
    loss = jax.jit(jax.grad(lambda given: attend(form, given, mask).sum()))
    for name, gradient in loss({name: jax.numpy.asarray(x) for name, x in arrays.items()}).items():
        assert_close(gradient, truth[name].grad, yardstick[name].grad, eps=EPS["float32"],
                     len_kv=LEN_KV, factor=3)


# Errors

MATRIX = np.zeros((3, 3), np.float32)
VECTOR = np.zeros(3, np.float32)
ADDITIVE = dict.fromkeys(("query", "key", "value", "w_q", "w_k"), MATRIX) | {"v": VECTOR}
DOT = dict.fromkeys(("query", "key", "value"), MATRIX)

ADDITIVE_ERRORS = [
    ({"w_q": [[1.0]]}, TypeError, r"w_q must be one of arrays of .*, got builtins.list\. Convert"),
    ({"v": VECTOR.astype(int)}, TypeError,
     r"query, key, value, w_q, w_k and v must share one dtype of .*, got float32, .*, int64\. Con"),
    ({"v": VECTOR.astype(float)}, TypeError, r"must share one dtype of .*float64\. Convert"),
    ({"query": VECTOR}, ValueError, r"query must have at least two axes, got query \(3,\)\. The"),
    ({"key": np.zeros((2, 3, 3), np.float32), "value": np.zeros((4, 3, 3), np.float32)}, ValueError,
     r"leading axes of query, key, value must broadcast, got query .* value \(4, 3, 3\)\. Axes"),
    ({"value": np.zeros((4, 3), np.float32)}, ValueError,
     r"key and value must have the same length, got 3 and 4 \(key .*\)\. Axes are"),
    ({"v": MATRIX}, ValueError, r"v must have the shape \(d_hidden,\), got \(3, 3\)\. One"),
    ({"w_q": MATRIX[:, :2]}, ValueError,
     r"w_q must have the shape \(d_hidden, d_query\) = \(3, 3\), got \(3, 2\)\. Widths"),
    ({"w_k": MATRIX[:2]}, ValueError,
     r"w_k must have the shape \(d_hidden, d_key\) = \(3, 3\), got \(2, 3\)\. Widths"),
    ({"mask": MATRIX}, TypeError,
     r"mask must be boolean \(True = may be seen\), got numpy float32 \(3, 3\)\. Turn"),
    ({"mask": [[True]]}, TypeError, r"mask must be one of arrays of .* got builtins.list\. Conv"),
    ({"mask": np.ones((2, 3, 3), bool)}, ValueError,
     r"mask must broadcast to \(\.\.\., len_q, len_kv\) = \(3, 3\), got \(2, 3, 3\)\. Shapes"),
]
MULTIPLICATIVE_ERRORS = [
    ({"form": "cosine"}, ValueError,
     r"form must be one of 'dot', 'general', 'concat', got 'cosine'\. 'dot' is"),
    ({"w": MATRIX}, ValueError, r"form='dot' takes no weights, got w\. 'dot' takes"),
    ({"form": "general"}, ValueError, r"form='general' takes w, got none\. 'dot' takes"),
    ({"form": "general", "w": MATRIX, "v": VECTOR}, ValueError, r"takes w, got w and v\."),
    ({"form": "concat", "w": MATRIX}, ValueError, r"form='concat' takes w and v, got w\."),
    ({"key": MATRIX[:, :2]}, ValueError, r"query and key must have the same width for form='dot', "
     r"got 3 and 2 \(query .*\)\. Use form='general'"),
    ({"form": "general", "w": MATRIX[:2]}, ValueError,
     r"w must have the shape \(d_query, d_key\) = \(3, 3\), got \(2, 3\)\. Widths"),
    ({"form": "concat", "w": MATRIX, "v": VECTOR}, ValueError,
     r"w must have the shape \(d_hidden, d_query \+ d_key\) = \(3, 6\), got \(3, 3\)\. Widths"),
]


@pytest.mark.parametrize("call", [additive_attention, additive_attention_state])
@pytest.mark.parametrize(("given", "error", "message"), ADDITIVE_ERRORS)
def test_additive_error(call, given, error, message):
    with pytest.raises(error, match=message):
        call(**ADDITIVE | given)


@pytest.mark.parametrize(("given", "error", "message"), MULTIPLICATIVE_ERRORS)
def test_multiplicative_error(given, error, message):
    with pytest.raises(error, match=message):
        multiplicative_attention(**DOT | given)


def test_libraries_do_not_mix():
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"query and w_k must belong to one library, got numpy and "
                                        r"torch\. Convert"):
        additive_attention(**ADDITIVE | {"w_k": torch.zeros(3, 3)})


def test_devices_do_not_mix(monkeypatch):
    torch = pytest.importorskip("torch")
    tensors = {name: torch.zeros(x.shape) for name, x in ADDITIVE.items()}
    monkeypatch.setattr(_arrays, "check_array", lambda *_: None)  # the only other device is meta
    with pytest.raises(ValueError, match=r"query and v must be on one device, got cpu and meta\. "
                                         r"Move v with \.to\('cpu'\)"):
        additive_attention(**tensors | {"v": torch.zeros(3, device="meta")})
