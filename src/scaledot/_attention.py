"""The public call: validates, chooses an implementation, finishes."""

from __future__ import annotations

from typing import Any, cast

from scaledot import _arrays, _choice, _reference
from scaledot._errors import value_error
from scaledot._rules import derivative_rules, tracing_rules
from scaledot._spec import Options, resolve
from scaledot._state import State, merged
from scaledot._typing import Array, ArrayT, Impl, MaskMod, Offsets, ScoreMod


def attention(
    query: ArrayT,
    key: ArrayT,
    value: ArrayT,
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
    kv_offset: Offsets = 0,
    impl: Impl = "auto",
) -> ArrayT:
    r"""Scaled dot-product attention, ``softmax(Q Kᵀ / √d_k) V``, exact and in linear memory.

    Each query is compared with every key it may see; the scores, scaled by ``1/√d_k``, become
    weights by softmax; the result is the mean of the values under these weights.

    Parameters
    ----------
    query : array, shape (..., num_heads, len_q, d_k)
        NumPy, PyTorch or JAX, float32, float64, float16 or bfloat16; any strides. A 2-D array
        ``(len, d)`` is one head.
    key : array, shape (..., num_kv_heads, len_kv, d_k)
        Leading axes broadcast. ``num_heads`` is a multiple of ``num_kv_heads``: query head h
        reads key head ``h // (num_heads // num_kv_heads)`` (grouped and multi-query attention).
    value : array, shape (..., num_kv_heads, len_kv, d_v)
        Same library and dtype as query and key; ``d_v`` may differ from ``d_k``.
    causal : bool
        A query sees keys at its own position and before. With the default ``q_offset`` the last
        query is at the last key (see Notes).
    window : (int or None, int or None), optional
        Reach to the left and to the right: key position p' is seen from p when
        ``p - left <= p' <= p + right``. None is no limit.
    mask : boolean array, optional
        True = may be seen. Broadcasts to ``(..., num_heads, len_q, len_kv)``.
    bias : floating-point array, optional
        Added to the scores; broadcasts like ``mask``. Only -inf excludes.
    segment_ids : integer array (..., len), or a pair (query's, key's), optional
        Equal ids see each other, negative ids see nothing.
    kv_len : int or integer array, optional
        Valid keys, counted from the start; an array has the leading axes' shape.
    scale : float, optional
        None is ``1/√d_k``; every number is taken literally, 0 and negatives included.
    softcap : float, optional
        ``softcap·tanh(score / softcap)``, after scaling and before bias and masks.
    alibi_slopes : array, shape (num_heads,), optional
        Adds ``-slope·|q_pos - kv_pos|``.
    sinks : array, shape (num_heads,), optional
        One more term ``exp(sink)`` in the denominator of each row, with no value.
    score_mod : callable, optional
        ``score_mod(score, batch, head, q_pos, kv_pos) -> score``, after bias and ALiBi. Arguments
        are arrays that broadcast; ``batch`` numbers the flattened leading axes. A pair ``(f, df)``
        brings its derivative by the score along, for gradients.
    mask_mod : callable, optional
        ``mask_mod(batch, head, q_pos, kv_pos) -> bool``, True = may be seen.
    block_mask : boolean array, optional
        Blocks of 128 queries and 128 keys; broadcasts to
        ``(..., num_heads, ceil(len_q / 128), ceil(len_kv / 128))``. False excludes a block.
    dropout : float
        Probability of dropping a weight; kept weights are divided by ``1 - dropout``.
    seed : int or integer array, optional
        Needed with dropout. The mask depends on (seed, head, positions) alone. An int gives each
        entry of the leading axes a seed of its own; an array of their shape sets them.
    q_offset, kv_offset : int or integer array
        Position of the first query and of the first key. ``q_offset=None`` is
        ``kv_offset + kv_len - len_q`` (``len_kv`` where no ``kv_len`` is given).
    impl : {"auto", "kernels", "blockwise", "dense"}
        See `explain` for what ``auto`` takes and why.

    Returns
    -------
    array, shape (..., num_heads, len_q, d_v)
        In the library and dtype of query. A row that sees no key is 0.

    Raises
    ------
    TypeError
        Not a plain array of a known library, dtypes that differ or are not floating-point, a
        mask that is not boolean.
    ValueError
        Shapes that do not fit, lengths out of range, dropout without seed, an unknown ``impl``.

    Notes
    -----
    Causal, rows are queries (**not** PyTorch's alignment, which is ``q_offset=0``)::

        len_q=2, len_kv=5   1 1 1 1 0      len_q=5, len_kv=2   0 0
                            1 1 1 1 1                          0 0
                                                               0 0
                                                               1 0
                                                               1 1

    Scores and sums are held in float32 (float64 for float64) and rounded once at the end.
    All exclusions are intersected; what is excluded cannot matter, whatever it holds, nan
    included. A nan that is visible reaches exactly the rows that see it. Extra memory does not
    grow with ``len_q × len_kv``, except for ``impl="dense"``. PyTorch and JAX arrays carry
    gradients.

    References
    ----------
    Attention: arXiv 1706.03762. Online softmax: arXiv 1805.02867. Tiling: arXiv 2205.14135.
    Grouped queries: arXiv 2305.13245. ALiBi: arXiv 2108.12409.

    Examples
    --------
    >>> import numpy as np, scaledot as sd
    >>> query = np.array([[2.0, 3.0, 4.0, 1.0]])
    >>> key = np.array([[1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 1.0]])
    >>> value = np.array([[1.0], [0.0]])
    >>> sd.attention(query, key, value).round(5)
    array([[0.73106]])
    """
    name, arrays = None, (query, key, value, mask, bias)
    if (
        segment_ids is None and alibi_slopes is None and sinks is None
        and score_mod is None and mask_mod is None and block_mask is None
    ):  # fmt: skip
        name = _choice.name_of(
            arrays, window, "out", causal, kv_len, scale, softcap, dropout, q_offset, kv_offset,
            impl,
        )  # fmt: skip
        known = _choice.again(name, arrays)
        if known is not None:
            return cast(ArrayT, known.out[0, ...] if _is_matrix(*arrays[:3]) else known.out)
    options = Options(
        causal, window, mask, bias, segment_ids, kv_len, scale, softcap, alibi_slopes, sinks,
        score_mod, mask_mod, block_mask, dropout, seed, q_offset, kv_offset, impl,
    )  # fmt: skip
    rules = derivative_rules(query, key, value, options)
    if rules is not None:
        found = rules.attention(query, key, value, options, slices=False, wide=False)
        return cast(ArrayT, found.out)
    problem = resolve(query, key, value, options)
    state = _choice.run(problem, rounded=problem.sinks is None, name=name)
    xp = _arrays.namespace(query)
    with _arrays.quiet(xp):
        if problem.sinks is not None:
            state = merged(xp, state, _reference.keyless(xp, problem))
        out = xp.astype(state.out, cast(Any, query).dtype, copy=False)
    return cast(ArrayT, out[0, ...] if problem.spec.matrix else out)


def attention_state(
    query: Array,
    key: Array,
    value: Array,
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
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    block_mask: Array | None = None,
    dropout: float = 0.0,
    seed: int | Array | None = None,
    q_offset: Offsets | None = None,
    kv_offset: Offsets = 0,
    impl: Impl = "auto",
) -> State:
    """Attention over a part of the keys, ready for `merge`: output and log-sum-exp.

    ``out = softmax(scores) V`` and ``lse = log(sum(exp(scores)))`` over the keys given here.

    Parameters
    ----------
    query, key, value : array
        As in `attention`; key and value may be a slice of a longer sequence.
    causal, window, mask, bias, segment_ids, kv_len, scale, softcap, alibi_slopes : optional
        As in `attention`. There are no sinks: merge with ``State(0, sink)`` once, at the end.
    score_mod, mask_mod, block_mask, dropout, seed, impl : optional
        As in `attention`.
    q_offset, kv_offset : int or integer array
        As in `attention`, but ``q_offset`` must be given when causal, window, ALiBi, a mod or
        dropout is on: the keys may be a slice, so nothing can be guessed from their number.

    Returns
    -------
    State
        ``out`` of shape (..., num_heads, len_q, d_v) and ``lse`` of shape (..., num_heads, len_q)
        in the accumulation dtype: float32, or float64 for float64.

    Raises
    ------
    TypeError, ValueError
        As in `attention`, and without ``q_offset`` where positions matter.

    Notes
    -----
    ``lse`` is that without dropout. Rows without a visible key have ``out = 0``, ``lse = -inf``.

    References
    ----------
    arXiv 2205.14135, 2307.08691.

    Examples
    --------
    >>> import numpy as np, scaledot as sd
    >>> x = np.zeros((4, 2))
    >>> float(sd.attention_state(x, x, x).lse[0].round(6))  # log(4)
    1.386294
    """
    name, arrays = None, (query, key, value, mask, bias)
    if (
        segment_ids is None and alibi_slopes is None
        and score_mod is None and mask_mod is None and block_mask is None
    ):  # fmt: skip
        name = _choice.name_of(
            arrays, window, "state", causal, kv_len, scale, softcap, dropout, q_offset, kv_offset,
            impl,
        )  # fmt: skip
    state: State | None = _choice.again(name, arrays)
    if state is None:
        options = Options(
            causal, window, mask, bias, segment_ids, kv_len, scale, softcap, alibi_slopes, None,
            score_mod, mask_mod, block_mask, dropout, seed, q_offset, kv_offset, impl,
        )  # fmt: skip
        rules = derivative_rules(query, key, value, options)
        if rules is not None:
            return cast(State, rules.attention(query, key, value, options, slices=True, wide=True))
        problem = resolve(query, key, value, options, slices=True)
        state = _choice.run(problem, name=name)
    if _is_matrix(query, key, value):
        return State(state.out[0, ...], state.lse[0, ...])
    return state


def _is_matrix(query: Any, key: Any, value: Any) -> bool:
    """Whether all have the axes (len, d) alone."""
    return bool(query.ndim == key.ndim == value.ndim == 2)


def attention_weights(
    query: ArrayT,
    key: ArrayT,
    *,
    rows: Any = None,
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
    q_offset: Offsets | None = None,
    kv_offset: Offsets = 0,
    impl: Impl = "auto",
) -> ArrayT:
    """Attention weights of chosen queries, ``softmax(Q Kᵀ / √d_k)``.

    Computed as ``exp(score - lse)`` in two passes over the keys.

    Parameters
    ----------
    query, key : array
        As in `attention`.
    rows : 1-D integer array or sequence, optional
        Indices of the wanted queries, one set for all heads; negative ones count from the end.
        None is all of them, which is quadratic in the length by nature.
    causal, window, mask, bias, segment_ids, kv_len, scale, softcap, alibi_slopes : optional
        As in `attention`, for all queries.
    sinks, score_mod, mask_mod, block_mask, q_offset, kv_offset, impl : optional
        As in `attention`. Sinks take their share, so that rows sum to less than 1.

    Returns
    -------
    array, shape (..., num_heads, len(rows), len_kv)
        In the accumulation dtype: float32, or float64 for float64. Rows that see no key are 0.

    Raises
    ------
    TypeError, ValueError
        As in `attention`, and for rows out of range.

    Notes
    -----
    Memory is that of the result and of one block of scores, never len_q × len_kv.

    References
    ----------
    arXiv 1706.03762.

    Examples
    --------
    >>> import numpy as np, scaledot as sd
    >>> x = np.zeros((4, 2))
    >>> sd.attention_weights(x, x, rows=[1], causal=True)
    array([[0.5, 0.5, 0. , 0. ]])
    """
    options = Options(
        causal, window, mask, bias, segment_ids, kv_len, scale, softcap, alibi_slopes, sinks,
        score_mod, mask_mod, block_mask, 0.0, None, q_offset, kv_offset, impl,
    )  # fmt: skip
    rules = tracing_rules(query, options)
    if rules is not None:
        return cast(ArrayT, rules.weights(query, key, options, rows))
    return cast(ArrayT, _choice.weights_of(query, key, options, rows))


def scaled_dot_product_attention(
    Q: ArrayT, K: ArrayT, V: ArrayT, mask: Array | None = None  # noqa: N803
) -> tuple[ArrayT, ArrayT]:
    """Textbook form: return ``softmax(Q Kᵀ / √d_k) V`` and the weights.

    Parameters
    ----------
    Q : array, shape (..., len_q, d_k)
        Queries; further axes as in `attention`.
    K : array, shape (..., len_kv, d_k)
        Keys.
    V : array, shape (..., len_kv, d_v)
        Values.
    mask : array of 0 and 1, of any dtype, optional
        1 = may be seen; broadcasts to (..., len_q, len_kv).

    Returns
    -------
    output : array, shape (..., len_q, d_v)
        In the dtype of Q.
    weights : array, shape (..., len_q, len_kv)
        All of them, in the accumulation dtype: quadratic in the length. `attention` returns the
        output alone in linear memory, `attention_weights` the weights of chosen rows.

    Raises
    ------
    TypeError, ValueError
        As in `attention`, and for a mask that holds anything but 0 and 1.

    Notes
    -----
    Where every key of a row is masked, output and weights are 0, not nan.

    References
    ----------
    arXiv 1706.03762, section 3.2.1.

    Examples
    --------
    >>> import numpy as np, scaledot as sd
    >>> Q = K = V = np.eye(2)
    >>> output, weights = sd.scaled_dot_product_attention(Q, K, V, mask=np.tril(np.ones((2, 2))))
    >>> weights.round(4)
    array([[1.    , 0.    ],
           [0.3302, 0.6698]])
    """
    if mask is not None:
        mask = _as_boolean(mask)
    output = attention(Q, K, V, mask=mask)
    return output, attention_weights(Q, K, mask=mask)


def _as_boolean(mask: Array) -> Array:
    """Turn a 0/1 mask of any dtype into a boolean one; refuse additive masks."""
    _arrays.check_array("mask", mask)
    if _arrays.is_bool(mask):
        return mask
    xp = _arrays.namespace(mask)
    other = (mask != 0) & (mask != 1)
    if _arrays.truth(xp.any(other)):
        raise value_error(
            "mask must hold only 0 and 1 (1 = may be seen)", _arrays.describe(mask),
            "Numbers to be added to the scores go to attention(..., bias=).",
        )
    return mask != 0
