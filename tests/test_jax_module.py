"""`scaledot.jax`: JAX's signature and conventions, against `jax.nn` and a textbook in float64."""

import importlib
import inspect
import math
import sys

import numpy as np
import pytest

from compare import EPS, assert_close

jax = pytest.importorskip("jax")
jnp = jax.numpy

from scaledot.jax import dot_product_attention  # noqa: E402  (imports JAX)

BATCH, LEN_Q, LEN_KV, NUM_HEADS, NUM_KV_HEADS, D = 2, 5, 7, 4, 2, 8


def arrays(seed=0, dtype="float32"):
    rng = np.random.default_rng(seed)
    shapes = ((BATCH, LEN_Q, NUM_HEADS, D), *((BATCH, LEN_KV, NUM_KV_HEADS, D),) * 2)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def bias_of(*shape):
    return jnp.asarray(np.random.default_rng(1).standard_normal(shape), jnp.float32)


def mask_of(*shape):
    drawn = np.random.default_rng(2).random(shape) < 0.6
    drawn[..., 0] = True  # JAX gives rows that see nothing a mean of all values
    return jnp.asarray(drawn)


# Every row that is not cut off sees a key.
CASES = {
    "plain": {},
    "causal": {"is_causal": True},
    "window, both sides": {"local_window_size": 2},
    "window, a pair": {"local_window_size": (3, 0)},
    "window, causal": {"local_window_size": (1, 4), "is_causal": True},
    "scale": {"scale": 0.7},
    "scale of no float": {"scale": jnp.asarray(-0.3)},
    "mask": {"mask": mask_of(BATCH, NUM_HEADS, LEN_Q, LEN_KV)},
    "mask of keys": {"mask": mask_of(BATCH, 1, 1, LEN_KV)},
    "bias": {"bias": bias_of(BATCH, NUM_HEADS, LEN_Q, LEN_KV)},
    "bias of three axes": {"bias": bias_of(NUM_HEADS, LEN_Q, LEN_KV)},
    "bias of keys": {"bias": bias_of(1, 1, 1, LEN_KV)},
    "key lengths": {"key_value_seq_lengths": jnp.asarray([3, 7], jnp.int32)},
    "query lengths": {"query_seq_lengths": jnp.asarray([5, 2], jnp.int32)},
    "lengths too large": {"key_value_seq_lengths": jnp.asarray([4, 99], jnp.int32)},
    "all": {
        "bias": bias_of(1, NUM_HEADS, LEN_Q, LEN_KV), "mask": mask_of(BATCH, 1, LEN_Q, LEN_KV),
        "scale": 0.4, "is_causal": True, "local_window_size": (6, 1),
        "query_seq_lengths": jnp.asarray([4, 5], jnp.int32),
        "key_value_seq_lengths": jnp.asarray([6, 5], jnp.int32),
    },
}  # fmt: skip


def textbook(
    query, key, value, bias=None, mask=None, *, scale=None, is_causal=False,
    query_seq_lengths=None, key_value_seq_lengths=None, local_window_size=None,
):  # fmt: skip
    """Output, with all scores in memory, in the dtype of the arguments, softmax included."""
    group_size = NUM_HEADS // NUM_KV_HEADS
    key, value = (jnp.repeat(x, group_size, axis=2) for x in (key, value))
    scores = jnp.einsum("btnd,bsnd->bnts", query, key)
    scores = scores * (1 / math.sqrt(D) if scale is None else scale)
    scores = scores if bias is None else scores + bias
    i, j = jnp.arange(LEN_Q)[:, None], jnp.arange(LEN_KV)
    seen = jnp.ones(scores.shape, bool) if mask is None else jnp.broadcast_to(mask, scores.shape)
    seen = seen & (j <= i) if is_causal else seen
    if local_window_size is not None:
        window = local_window_size
        left, right = window if isinstance(window, tuple) else (window, window)
        seen = seen & (i - left <= j) & (j <= i + right)
    if key_value_seq_lengths is not None:
        seen = seen & (j < key_value_seq_lengths[:, None, None, None])
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    if query_seq_lengths is not None:
        weights = weights * (i < query_seq_lengths[:, None, None, None])
    return jnp.einsum("bnts,bsnd->btnd", weights, value)


def value_and_gradients(function, given, options, compiled=False):
    """Of a loss, by query, key, value and bias; uncompiled, calls share what JAX has compiled."""
    weights = jnp.asarray(np.random.default_rng(4).standard_normal(given[0].shape), jnp.float32)
    leaves = [*given, options["bias"]] if "bias" in options else [*given]
    rest = {n: x for n, x in options.items() if n != "bias"}

    def both(leaves):
        def loss(leaves):
            out = function(*leaves, **rest)
            return (jnp.sin(out) * weights).sum(), out

        return jax.grad(loss, has_aux=True)(leaves)

    gradients, out = (jax.jit(both) if compiled else both)(leaves)
    return out, gradients


@pytest.mark.parametrize("name", CASES)
def test_it_is_what_jax_computes(name):
    """Values and gradients, no further from the textbook's in float64 than JAX's are."""
    given, options = arrays(), CASES[name]
    compiled = name in ("plain", "causal", "all")
    out, gradients = value_and_gradients(dot_product_attention, given, options, compiled)
    out_of_jax, gradients_of_jax = value_and_gradients(
        jax.nn.dot_product_attention, given, options
    )
    wide = {n: jnp.asarray(x, jnp.float64) if n == "bias" else x for n, x in options.items()}
    given = [x.astype(jnp.float64) for x in given]
    truth = value_and_gradients(textbook, given, wide)
    assert (out.shape, out.dtype) == (out_of_jax.shape, out_of_jax.dtype)
    assert_close(out, truth[0], out_of_jax, eps=EPS["float32"], len_kv=LEN_KV)
    for got, exact, of_jax in zip(gradients, truth[1], gradients_of_jax, strict=True):
        assert (got.shape, got.dtype) == (of_jax.shape, of_jax.dtype)
        assert_close(got, exact, of_jax, eps=EPS["float32"], len_kv=LEN_KV, factor=3.0)


def test_without_a_batch():
    """Axes (len, heads, d), lengths and bias as JAX takes them there."""
    given = [x[0] for x in arrays()]
    options = {
        "bias": bias_of(NUM_HEADS, LEN_Q, LEN_KV), "is_causal": True,
        "key_value_seq_lengths": jnp.asarray([6]), "query_seq_lengths": jnp.asarray([4]),
    }  # fmt: skip
    options = {n: x.astype(jnp.int32) if n.endswith("lengths") else x for n, x in options.items()}
    out = dot_product_attention(*given, **options)
    of_jax = jax.nn.dot_product_attention(*given, **options)
    wide = [x[None].astype(jnp.float64) for x in given]
    assert out.shape == (LEN_Q, NUM_HEADS, D)
    truth = textbook(*wide, **options)[0]
    assert_close(out, truth, of_jax, eps=EPS["float32"], len_kv=LEN_KV)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_dtypes(dtype):
    given = arrays(3, dtype)
    out = dot_product_attention(*given, is_causal=True)
    of_jax = jax.nn.dot_product_attention(*given, is_causal=True)
    truth = textbook(*(x.astype(jnp.float64) for x in given), is_causal=True)
    assert out.dtype == of_jax.dtype
    assert_close(out, truth, of_jax, eps=EPS[dtype], len_kv=LEN_KV)


def test_residual_is_the_log_sum_exp_and_a_constant():
    given = arrays()
    out, residual = dot_product_attention(*given, is_causal=True, return_residual=True)
    of_jax = jax.nn.dot_product_attention(*given, is_causal=True, return_residual=True)
    assert residual.shape == of_jax[1].shape == (BATCH, LEN_Q, NUM_HEADS)
    assert residual.dtype == of_jax[1].dtype
    assert_close(residual, of_jax[1], eps=2 * EPS["float32"], len_kv=LEN_KV)
    assert_close(out, dot_product_attention(*given, is_causal=True), eps=0, len_kv=0)

    def of_query(query):
        return dot_product_attention(query, *given[1:], return_residual=True)[1].sum()

    assert not jax.grad(of_query)(given[0]).any()


def test_an_empty_row_is_0():
    """JAX's is the mean of all values."""
    given = arrays()
    mask = mask_of(1, 1, LEN_Q, LEN_KV).at[..., 2, :].set(False)
    out, residual = dot_product_attention(*given, mask=mask, return_residual=True)
    assert not out[:, 2].any()
    assert np.isneginf(residual[:, 2]).all()
    assert np.isfinite(residual[:, 3]).all()


def test_values_may_be_wider_and_lists_are_arrays():
    query, key, value = arrays()
    wide = jnp.concatenate([value, 2 * value], axis=-1)
    out = dot_product_attention(query, key, wide)
    assert out.shape == (BATCH, LEN_Q, NUM_HEADS, 2 * D)
    assert_close(out[..., D:], 2 * out[..., :D], eps=EPS["float32"], len_kv=LEN_KV)
    listed = dot_product_attention(*(np.asarray(x).tolist() for x in (query, key, value)))
    truth = textbook(*(x.astype(jnp.float64) for x in (query, key, value)))
    assert_close(listed, truth, eps=8 * EPS["float64"], len_kv=LEN_KV)


def test_an_implementation_of_jax_by_name():
    given, options = arrays(), {"is_causal": True, "implementation": "xla"}
    np.testing.assert_array_equal(
        dot_product_attention(*given, **options), jax.nn.dot_product_attention(*given, **options)
    )
    with pytest.raises(ValueError, match="Unsupported implementation"):
        dot_product_attention(*given, implementation="fast")


def test_the_signature_is_that_of_jax():
    def parameters(function):
        found = inspect.signature(function).parameters.values()
        return [(p.name, p.kind, p.default) for p in found]

    assert parameters(dot_product_attention) == parameters(jax.nn.dot_product_attention)


def test_errors():
    query, key, value = arrays()
    with pytest.raises(ValueError, match=r"key must have three or four axes, got key \(7, 8\)"):
        dot_product_attention(query, key[0, :, 0], value)
    with pytest.raises(ValueError, match=r"query_seq_lengths must have the shape \(batch,\)"):
        dot_product_attention(query, key, value, query_seq_lengths=jnp.zeros(3, jnp.int32))
    with pytest.raises(TypeError, match="mask must be boolean"):
        dot_product_attention(query, key, value, mask=bias_of(1, 1, LEN_Q, LEN_KV))
    with pytest.raises(TypeError, match="must share one dtype"):
        dot_product_attention(query, key.astype(jnp.bfloat16), value)


def test_without_jax_the_error_names_the_command(monkeypatch):
    monkeypatch.delitem(sys.modules, "scaledot.jax")
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(ImportError, match=r"pip install 'scaledot\[jax\]'"):
        importlib.import_module("scaledot.jax")
