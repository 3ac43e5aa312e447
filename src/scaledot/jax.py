"""JAX's own signature of attention, computed by scaledot.

`scaledot.attention` itself takes JAX arrays, under every transformation, without this module.
"""

from __future__ import annotations

from typing import Any, Literal, overload

from scaledot._attention import attention, attention_state
from scaledot._errors import missing_extra, value_error
from scaledot._typing import Array

try:
    import jax
    import jax.numpy as jnp
except ImportError as error:
    raise missing_extra("jax", "jax") from error

__all__ = ["dot_product_attention"]

LAYOUT = "Axes are (batch, len, num_heads, d), or (len, num_heads, d)."


@overload
def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: Any = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    return_residual: Literal[False] = ...,
) -> Array: ...


@overload
def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: Any = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    return_residual: Literal[True],
) -> tuple[Array, Array]: ...


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: Any = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    return_residual: bool = False,
) -> Any:
    r"""`jax.nn.dot_product_attention` in linear memory, ``softmax(scale·Q Kᵀ + bias) V``.

    Parameters
    ----------
    query : array, shape (batch, len_q, num_heads, d) or (len_q, num_heads, d)
        Anything that `jax.numpy.asarray` takes.
    key, value : array, shape (batch, len_kv, num_kv_heads, d) or (len_kv, num_kv_heads, d)
        ``num_heads`` is a multiple of ``num_kv_heads``; the last axis of value may differ.
    bias : floating-point array, optional
        Added to the scores; broadcasts to (batch, num_heads, len_q, len_kv).
    mask : boolean array, optional
        True = takes part; broadcasts like ``bias``.
    scale : float or array of one number, optional
        None is ``1/√d``.
    is_causal : bool
        Query i sees keys 0 to i, counted from the start whatever the lengths (top-left).
    query_seq_lengths, key_value_seq_lengths : integer array, shape (batch,), optional
        Valid queries and keys, counted from the start. Rows of other queries are 0.
    local_window_size : int or (int, int), optional
        Query i sees keys ``i - left`` to ``i + right``; one int is both.
    implementation : {None, "xla", "cudnn"}
        None is scaledot; a name hands the call to `jax.nn.dot_product_attention`.
    return_residual : bool
        Return the log-sum-exp of the scores too.

    Returns
    -------
    out : array, shape of query, with the last axis of value
        In the dtype of query.
    residual : array, shape (batch, len_q, num_heads) or (len_q, num_heads)
        With ``return_residual`` only: in the dtype of key, a constant for differentiation.

    Raises
    ------
    TypeError
        Dtypes that differ, a mask that is not boolean.
    ValueError
        Shapes that do not fit.

    Notes
    -----
    A query that sees no key has ``out = 0`` and ``residual = -inf``. In JAX its row is the mean of
    all values where masks exclude them, nan where a bias of -inf does. Memory and precision are
    those of `scaledot.attention`.

    References
    ----------
    arXiv 1706.03762, 2205.14135.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from scaledot.jax import dot_product_attention
    >>> x = jax.random.normal(jax.random.key(0), (2, 6, 4, 8))  # (batch, len, num_heads, d)
    >>> out = dot_product_attention(x, x, x, is_causal=True)
    >>> bool(jnp.allclose(out, jax.nn.dot_product_attention(x, x, x, is_causal=True), atol=1e-5))
    True
    """
    if implementation is not None:
        of_jax: Any = jax.nn.dot_product_attention
        return of_jax(
            query, key, value, bias, mask, scale=scale, is_causal=is_causal,
            query_seq_lengths=query_seq_lengths, key_value_seq_lengths=key_value_seq_lengths,
            local_window_size=local_window_size, implementation=implementation,
            return_residual=return_residual,
        )  # fmt: skip
    shape = jnp.asarray(query).shape
    q, k, v = (_heads_first(*item) for item in (("query", query), ("key", key), ("value", value)))
    if scale is not None and isinstance(scale, jax.Array):
        q, scale = (q * scale).astype(q.dtype), 1.0
    window = local_window_size
    options: dict[str, Any] = {
        "bias": None if bias is None else jnp.asarray(bias),
        "mask": None if mask is None else jnp.asarray(mask),
        "scale": scale,
        "causal": is_causal,
        "window": (window, window) if isinstance(window, int) else window,
        "q_offset": 0,
    }
    batch, len_q, len_kv = q.shape[0], q.shape[-2], k.shape[-2]
    if key_value_seq_lengths is not None:
        lengths = _lengths("key_value_seq_lengths", key_value_seq_lengths, batch)
        options["kv_len"] = jnp.clip(lengths, 0, len_kv)
    if query_seq_lengths is not None:
        lengths = _lengths("query_seq_lengths", query_seq_lengths, batch)
        excluded = jnp.arange(len_q) >= lengths[:, None]
        options["segment_ids"] = (-excluded.astype(jnp.int32), jnp.zeros(len_kv, jnp.int32))
    if not return_residual:
        return _heads_last(attention(q, k, v, **options), shape)
    state = attention_state(q, k, v, **options)
    residual = jax.lax.stop_gradient(state.lse.swapaxes(-1, -2).astype(k.dtype))
    return _heads_last(state.out.astype(q.dtype), shape), residual.reshape(shape[:-1])


def _heads_first(name: str, given: Any) -> Array:
    """Turn (batch, len, heads, d) or (len, heads, d) into (batch, heads, len, d)."""
    x = jnp.asarray(given)
    if x.ndim not in (3, 4):
        raise value_error(f"{name} must have three or four axes", f"{name} {x.shape}", LAYOUT)
    return (x[None] if x.ndim == 3 else x).swapaxes(-2, -3)


def _heads_last(out: Array, shape: tuple[int, ...]) -> Array:
    """Turn (batch, heads, len, d) into the layout of a query of that shape."""
    return out.swapaxes(-2, -3).reshape((*shape[:-1], out.shape[-1]))


def _lengths(name: str, given: Any, batch: int) -> Array:
    """One length for each entry of the batch."""
    x = jnp.asarray(given)
    if x.shape != (batch,):
        raise value_error(
            f"{name} must have the shape (batch,) = ({batch},)", x.shape,
            "One number of valid positions for each sequence.",
        )  # fmt: skip
    return x
