"""The rest of the family: heads with their projections, other scores, an associative memory.

All of it is a few products around `attention`: masks, tiles, dtypes and empty rows are its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, cast

import numpy as np

from scaledot import _arrays, _family_checks
from scaledot._attention import attention, attention_state
from scaledot._spec import Options, resolve
from scaledot._state import State
from scaledot._typing import Array, ArrayT, Impl, MaskMod, Offsets, ScoreMod

HIDDEN_STEP = 8
"""Hidden units of additive scores whose values for one tile are in memory at once."""

EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Distance from 1 to the next number; not every ``finfo`` knows every dtype."""


def multi_head_attention(
    x: ArrayT,
    context: ArrayT,
    w_q: ArrayT,
    w_k: ArrayT,
    w_v: ArrayT,
    w_o: ArrayT,
    num_heads: int,
    num_kv_heads: int | None = None,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    mask: Array | None = None,
    bias: Array | None = None,
    segment_ids: Array | tuple[Array, Array] | None = None,
    kv_len: Offsets | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    block_mask: Array | None = None,
    dropout: float = 0.0,
    seed: int | Array | None = None,
    q_offset: Offsets | None = None,
    impl: Impl = "auto",
) -> ArrayT:
    """Multi-head attention, ``concat(head_0, head_1, ...) W_o``.

    ``head_h = attention(x W_q[h], context W_k[h], context W_v[h])``: self-attention when context
    is x, so that query, key and value are three projections of one source; else cross-attention.

    Parameters
    ----------
    x : array, shape (..., len_q, d_model)
        Source of the queries: NumPy, PyTorch or JAX, float32, float64, float16 or bfloat16.
    context : array, shape (..., len_kv, d_context)
        Source of keys and values; leading axes broadcast.
    w_q, w_k, w_v : array
        Projections to queries (d_model, num_heads * d_k), to keys (d_context, num_kv_heads * d_k)
        and to values (d_context, num_kv_heads * d_v). The columns of a head lie next to each
        other: head h has ``w_q[:, h * d_k : (h + 1) * d_k]``.
    w_o : array, shape (num_heads * d_v, d_out)
        Projection of the joined heads.
    num_heads, num_kv_heads : int
        Heads of queries, and of keys and values: None is as many, a divisor of ``num_heads`` is
        grouped-query attention, 1 is multi-query attention.
    causal, window, mask, bias, segment_ids, kv_len, scale, softcap, alibi_slopes : optional
        As in `attention`, for scores of the shape (..., num_heads, len_q, len_kv).
    sinks, score_mod, mask_mod, block_mask, dropout, seed, q_offset, impl : optional
        As in `attention`.

    Returns
    -------
    array, shape (..., len_q, d_out)
        In the library and dtype of x.

    Raises
    ------
    TypeError, ValueError
        As in `attention`; widths that do not fit the numbers of heads.

    Notes
    -----
    There are no biases. Queries, keys, values and heads are rounded to the dtype of x, as in a
    model of that dtype. A query that sees no key gives a row of 0. What a masked row of context
    holds cannot matter.

    References
    ----------
    arXiv 1706.03762, section 3.2.2; multi-query: 1911.02150; grouped-query: 2305.13245.

    Examples
    --------
    >>> import numpy as np, scaledot as sd
    >>> rng = np.random.default_rng(0)
    >>> x, w_q, w_k, w_v, w_o = rng.standard_normal((5, 16, 16))
    >>> sd.multi_head_attention(x, x, w_q, w_k, w_v, w_o, num_heads=4, causal=True).shape
    (16, 16)
    """
    arrays = {"x": x, "context": context, "w_q": w_q, "w_k": w_k, "w_v": w_v, "w_o": w_o}
    num_heads, num_kv_heads = _family_checks.heads(arrays, num_heads, num_kv_heads)
    # Heads without width have no memory: with them every option is checked before any product.
    keys = _without_width(context, num_kv_heads)
    resolve(
        _without_width(x, num_heads), keys, keys,
        Options(
            causal, window, mask, bias, segment_ids, kv_len, scale, softcap, alibi_slopes, sinks,
            score_mod, mask_mod, block_mask, dropout, seed, q_offset, 0, impl,
        ),
    )
    heads = attention(
        _heads(x, w_q, num_heads), _heads(context, w_k, num_kv_heads),
        _heads(context, w_v, num_kv_heads), causal=causal, window=window, mask=mask, bias=bias,
        segment_ids=segment_ids, kv_len=kv_len, scale=scale, softcap=softcap,
        alibi_slopes=alibi_slopes, sinks=sinks, score_mod=score_mod, mask_mod=mask_mod,
        block_mask=block_mask, dropout=dropout, seed=seed, q_offset=q_offset, impl=impl,
    )
    xp = _arrays.namespace(heads)
    joined = xp.moveaxis(heads, -3, -2)  # (..., len_q, num_heads, d_v)
    joined = xp.reshape(joined, (*joined.shape[:-2], w_o.shape[0]))  # type: ignore[attr-defined]
    return cast(ArrayT, _project(joined, w_o))


def additive_attention(
    query: ArrayT,
    key: ArrayT,
    value: ArrayT,
    w_q: ArrayT,
    w_k: ArrayT,
    v: ArrayT,
    *,
    mask: Array | None = None,
) -> ArrayT:
    """Additive (Bahdanau) attention: softmax of ``vᵀ tanh(W_q q + W_k k)``, in linear memory.

    Parameters
    ----------
    query : array, shape (..., len_q, d_query)
        NumPy, PyTorch or JAX, float32, float64, float16 or bfloat16. There is no axis of heads:
        all axes before the last two are free and broadcast.
    key : array, shape (..., len_kv, d_key)
        Keys; their width may differ from that of the queries.
    value : array, shape (..., len_kv, d_v)
        Values.
    w_q, w_k, v : array
        Weights of the query (d_hidden, d_query), of the key (d_hidden, d_key) and of the hidden
        units (d_hidden,).
    mask : boolean array, optional
        True = may be seen. Broadcasts to (..., len_q, len_kv).

    Returns
    -------
    array, shape (..., len_q, d_v)
        In the library and dtype of query.

    Raises
    ------
    TypeError, ValueError
        Arrays of several libraries or dtypes, shapes that do not fit, a mask that is not boolean.

    Notes
    -----
    Scores are computed in float32 (float64 for float64), a tile and a few hidden units at a time:
    memory does not grow with ``len_q × len_kv``, but an automatic gradient remembers every hidden
    unit of every pair. A query that sees no key gives a row of 0; what is masked cannot matter.
    `additive_attention_state` returns ``lse`` too.

    References
    ----------
    arXiv 1409.0473, appendix A.1.2.

    Examples
    --------
    >>> import numpy as np, scaledot as sd
    >>> query, key, value = np.array([[0.0]]), np.array([[-9.0], [9.0]]), np.array([[1.0], [3.0]])
    >>> one = np.ones((1, 1))
    >>> sd.additive_attention(query, key, value, one, one, np.log([2.0])).round(3)  # weights 1 : 4
    array([[2.6]])
    """
    return _rounded(additive_attention_state(query, key, value, w_q, w_k, v, mask=mask), query)


def additive_attention_state(
    query: Array, key: Array, value: Array, w_q: Array, w_k: Array, v: Array, *,
    mask: Array | None = None,
) -> State:
    """`additive_attention` over a part of the keys, ready for `merge`: output and log-sum-exp.

    ``out = softmax(scores) V`` and ``lse = log(sum(exp(scores)))``, scores as there.

    Parameters
    ----------
    query, key, value, w_q, w_k, v, mask
        As in `additive_attention`; key and value may be a slice of a longer sequence.

    Returns
    -------
    State
        ``out`` of shape (..., len_q, d_v) and ``lse`` of shape (..., len_q) in the accumulation
        dtype: float32, or float64 for float64.

    Raises
    ------
    TypeError, ValueError
        As in `additive_attention`.

    Notes
    -----
    Rows without a visible key have ``out = 0``, ``lse = -inf``.

    References
    ----------
    arXiv 1409.0473.

    Examples
    --------
    >>> import numpy as np, scaledot as sd
    >>> query, key, value = np.random.default_rng(0).standard_normal((3, 4, 4))
    >>> weights = np.eye(4), np.eye(4), np.ones(4)
    >>> first = sd.additive_attention_state(query, key[:3], value[:3], *weights)
    >>> last = sd.additive_attention_state(query, key[3:], value[3:], *weights)
    >>> whole = sd.additive_attention(query, key, value, *weights)
    >>> np.allclose(sd.merge(first, last).out, whole)
    True
    """
    mask = _family_checks.additive(query, key, value, w_q, w_k, v, mask)
    return _tanh_state(query, key, value, w_q, w_k, v, mask)


def multiplicative_attention(
    query: ArrayT,
    key: ArrayT,
    value: ArrayT,
    w: ArrayT | None = None,
    v: ArrayT | None = None,
    *,
    form: Literal["dot", "general", "concat"] = "dot",
    mask: Array | None = None,
) -> ArrayT:
    """Multiplicative (Luong) attention: softmax of unscaled scores, in linear memory.

    ``qᵀ k`` (dot), ``qᵀ W k`` (general) or ``vᵀ tanh(W [q; k])`` (concat).

    Parameters
    ----------
    query : array, shape (..., len_q, d_query)
        NumPy, PyTorch or JAX, float32, float64, float16 or bfloat16. There is no axis of heads:
        all axes before the last two are free and broadcast.
    key : array, shape (..., len_kv, d_key)
        Keys; with ``form="dot"`` as wide as the queries.
    value : array, shape (..., len_kv, d_v)
        Values.
    w : array, optional
        General: shape (d_query, d_key). Concat: shape (d_hidden, d_query + d_key).
    v : array, shape (d_hidden,), optional
        Concat only.
    form : {"dot", "general", "concat"}
        How a query and a key become a score.
    mask : boolean array, optional
        True = may be seen. Broadcasts to (..., len_q, len_kv).

    Returns
    -------
    array, shape (..., len_q, d_v)
        In the library and dtype of query.

    Raises
    ------
    TypeError, ValueError
        As in `additive_attention`; an unknown form, weights that are missing or too many.

    Notes
    -----
    Dot is `attention` with ``scale=1``; general is that of ``query @ w``, rounded to the dtype of
    query; concat is `additive_attention` with the two parts of w. Hence ``lse`` comes from
    `attention_state`, or from `additive_attention_state` with ``w[:, :d_query]`` and
    ``w[:, d_query:]``. A query that sees no key gives a row of 0; what is masked cannot matter.

    References
    ----------
    arXiv 1508.04025, section 3.1.

    Examples
    --------
    >>> import numpy as np, scaledot as sd
    >>> query, key, value = np.array([[1.0]]), np.log([[1.0], [4.0]]), np.array([[1.0], [3.0]])
    >>> sd.multiplicative_attention(query, key, value).round(3)  # weights 1 : 4
    array([[2.6]])
    >>> sd.multiplicative_attention(query, key, value, -np.eye(1), form="general").round(3)
    array([[1.4]])
    """
    return _rounded(_multiplicative_state(query, key, value, w, v, form, mask), query)


def retrieve(
    query: ArrayT,
    patterns: ArrayT,
    *,
    beta: float | None = None,
    steps: int = 32,
    tolerance: float = 4.0,
) -> ArrayT:
    """Associative memory (modern Hopfield network): the stored pattern that a query recalls.

    Attention to the patterns, ``ξ ← softmax(β ξ Xᵀ) X``, repeated until ξ stays where it is.

    Parameters
    ----------
    query : array, shape (..., len_q, d)
        States to start from, such as damaged patterns: NumPy, PyTorch or JAX, float32, float64,
        float16 or bfloat16. There is no axis of heads: leading axes broadcast.
    patterns : array, shape (..., len_kv, d)
        Stored patterns X.
    beta : float, optional
        A large one recalls single patterns, a small one means of similar ones; None is ``1/√d``.
    steps : int
        At most so many repetitions. What has not settled by then is returned as it is.
    tolerance : float
        A state has settled when no entry changes by more than this many rounding errors of the
        largest entry of the patterns, in the dtype of query.

    Returns
    -------
    array, shape (..., len_q, d)
        In the library and dtype of query.

    Raises
    ------
    TypeError, ValueError
        Arrays of two libraries or dtypes, shapes that do not fit, steps below 1, a negative
        tolerance.

    Notes
    -----
    Each state settles for itself: none depends on those beside it. Computed in float32 or wider
    and rounded once. Under ``jax.jit`` nothing can be compared, and all steps are done. Without
    patterns the result is 0. Values Y that belong to the patterns X are looked up by
    ``attention(retrieve(query, X), X, Y, scale=beta)``.

    References
    ----------
    arXiv 2008.02217.

    Examples
    --------
    >>> import numpy as np, scaledot as sd
    >>> patterns = np.sign(np.random.default_rng(0).standard_normal((5, 64)))
    >>> damaged = patterns[2:3].copy()
    >>> damaged[:, :20] = 1.0
    >>> np.array_equal(sd.retrieve(damaged, patterns, beta=1.0).round(9), patterns[2:3])
    True
    """
    lead = _family_checks.recall(query, patterns, beta, steps, tolerance)
    xp, name = _arrays.namespace(query), _arrays.dtype_name(query)
    with _arrays.quiet(xp):
        x, stored = (
            xp.astype(a, _arrays.accumulation_dtype(xp, name), copy=False)[..., None, :, :]
            for a in (query, patterns)
        )
        shape = (*lead, 1, *x.shape[-2:])  # the axis of length 1 is that of heads
        x = xp.broadcast_to(x, shape)
        moving = xp.ones((*shape[:-1], 1), dtype=xp.bool, **_arrays.device_of(x))
        limit = float(tolerance) * EPS[name]
        if math.prod(stored.shape):
            magnitude = xp.abs(_arrays.constant(stored))
            limit = limit * xp.max(magnitude, axis=(-2, -1), keepdims=True)
        for _ in range(steps):
            found = attention(x, stored, stored, scale=beta)
            change = xp.abs(_arrays.constant(found - x))
            x = xp.where(moving, found, x)  # what has settled waits for the others
            moving = moving & xp.any(change > limit, axis=-1, keepdims=True)
            if not _arrays.may_hold(xp.any(moving)):
                break
        return cast(ArrayT, xp.astype(x[..., 0, :, :], cast(Any, query).dtype, copy=False))


def _multiplicative_state(
    query: Array, key: Array, value: Array, w: Any, v: Any, form: str, mask: Array | None
) -> State:
    """`multiplicative_attention` with its ``lse`` (..., len_q), in the accumulation dtype."""
    mask = _family_checks.multiplicative(query, key, value, w, v, form, mask)
    if form == "concat":
        width = query.shape[-1]
        return _tanh_state(query, key, value, w[:, :width], w[:, width:], v, mask)
    if form == "general":
        query = _project(query, w)
    query, key, value = (x[..., None, :, :] for x in (query, key, value))
    return _without_head(attention_state(query, key, value, mask=mask, scale=1.0))


def _tanh_state(
    query: Array, key: Array, value: Array, w_q: Array, w_k: Array, v: Array, mask: Array | None
) -> State:
    """State of attention whose scores are ``vᵀ tanh(W_q q + W_k k)``.

    Attention to keys without width has scores of 0: a ``score_mod`` puts those of each tile in
    their place, and all else (tiles, masks, merging) is that of any attention.
    """
    xp = _arrays.namespace(query)
    dtype = _arrays.accumulation_dtype(xp, _arrays.dtype_name(query))
    lead = np.broadcast_shapes(*(tuple(x.shape[:-2]) for x in (query, key, value)))
    of_query = _columns(_project(query, xp.matrix_transpose(w_q), dtype), lead)
    of_key = _columns(_project(key, xp.matrix_transpose(w_k), dtype), lead)
    v = xp.astype(v, dtype, copy=False)

    def score_mod(zero: Array, batch: Array, _: Array, q_pos: Array, kv_pos: Array) -> Array:
        return _tanh_scores(xp, zero, of_query(batch, q_pos), of_key(batch, kv_pos), v)

    return _without_head(attention_state(
        query[..., None, :, :0], key[..., None, :, :0], value[..., None, :, :], mask=mask,
        score_mod=score_mod if key.shape[-2] else None, q_offset=0, impl="blockwise",
    ))


def _columns(x: Array, lead: tuple[int, ...]) -> Callable[[Array, Array], Array]:
    """Return a function from batch numbers and positions to rows of x, hidden axis first."""
    xp = _arrays.namespace(x)
    *own, length, width = x.shape
    table = xp.reshape(xp.moveaxis(x, -1, 0), (width, math.prod(own) * length))
    entries = np.broadcast_to(np.arange(math.prod(own)).reshape(own), lead).reshape(-1)
    starts = _arrays.like(x, entries * length)

    def find(batch: Array, position: Array) -> Array:
        start = xp.reshape(xp.take(starts, xp.reshape(batch, (-1,)), axis=0), batch.shape)
        index = start + position
        return xp.reshape(xp.take(table, xp.reshape(index, (-1,)), axis=1), (width, *index.shape))

    return find


def _tanh_scores(xp: Any, scores: Array, q: Array, k: Array, v: Array) -> Array:
    """Add ``v·tanh(q + k)`` of every hidden unit to scores (..., len_q, len_kv).

    q (d_hidden, ..., len_q, 1), k (d_hidden, ..., 1, len_kv), v (d_hidden,).
    """
    # The derivative of tanh(nan) is nan even where its factor is 0: nan enters by a constant.
    lost = xp.any(xp.isnan(q), axis=0) | xp.any(xp.isnan(k), axis=0)
    q, k = (xp.where(xp.isnan(x), xp.zeros_like(x), x) for x in (q, k))
    v = xp.reshape(v, (-1, *(1,) * (q.ndim - 1)))
    for first in range(0, q.shape[0], HIDDEN_STEP):
        some = (slice(first, min(first + HIDDEN_STEP, q.shape[0])), ...)
        scores = scores + xp.sum(v[some] * xp.tanh(q[some] + k[some]), axis=0)
    return xp.where(lost, xp.full_like(scores, math.nan), scores)


def _project(x: Array, w: Array, dtype: Any = None) -> Array:
    """Product of x (..., len, d) and w (d, m) in dtype (None: that of x), sums in float32 or wider.

    Rows that hold nan or inf are constants for automatic differentiation: what a row holds that
    nobody sees reaches no gradient of w.
    """
    xp = _arrays.namespace(x)
    dtype = wide = x.dtype if dtype is None else dtype
    if _arrays.library(x) == "numpy":  # which has no fast product of 16-bit floats of its own
        wide = _arrays.accumulation_dtype(xp, _arrays.dtype_name(x))
    with _arrays.quiet(xp):
        x, w = _arrays.packed(xp, x, wide), xp.astype(w, wide, copy=False)
        product = xp.matmul(x, w)
        finite = xp.isfinite(_arrays.constant(x))
        if _arrays.library(x) in ("torch", "jax") and _arrays.may_hold(~xp.all(finite)):
            clean = xp.matmul(xp.where(finite, x, xp.zeros_like(x)), w)
            product = _arrays.constant(product)
            product = xp.where(xp.isfinite(product), clean, product)
        return xp.astype(product, dtype, copy=False)


def _heads(x: Array, w: Array, num_heads: int) -> Array:
    """Project x (..., len, d_model) and split the result: (..., num_heads, len, d), a view."""
    xp = _arrays.namespace(x)
    projected = _project(x, w)  # (..., len, num_heads * d)
    width = projected.shape[-1] // num_heads
    split = xp.reshape(projected, (*projected.shape[:-1], num_heads, width))
    return xp.moveaxis(split, -2, -3)


def _without_width(x: Array, num_heads: int) -> Array:
    """Heads (..., num_heads, len, 0) of a source (..., len, d_model): their shapes, no data."""
    shape = (*x.shape[:-2], num_heads, x.shape[-2], 0)
    return _arrays.namespace(x).broadcast_to(x[..., None, :, :0], shape)


def _without_head(state: State) -> State:
    return State(state.out[..., 0, :, :], state.lse[..., 0, :])


def _rounded(state: State, query: ArrayT) -> ArrayT:
    """Output of a state in the dtype of query."""
    xp = _arrays.namespace(query)
    with _arrays.quiet(xp):
        return cast(ArrayT, xp.astype(state.out, cast(Any, query).dtype, copy=False))
