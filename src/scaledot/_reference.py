"""The definition in array operations, ``dense``, and its pieces.

It runs on any array library and device, differentiates by the host library, and holds all
len_q × len_kv scores at once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from scaledot import _arrays, _checks, _masks, _scores
from scaledot._errors import type_error
from scaledot._spec import BLOCK_MASK, Problem, accumulation
from scaledot._state import LARGE_LSE, State, merged
from scaledot._typing import Array

# What the array libraries say when an array is used as one truth value or one number.
BRANCHES = (
    "truth value", "Boolean value of", "is only allowed on arrays", "only 0-dimensional",
    "scalar index", "converted to an index", "to a Python scalar", "converted to Scalar",
    "only length-1 arrays", "can be converted to Python scalars", "traced array",
)  # fmt: skip


def dense(problem: Problem) -> State:
    """Softmax attention with all scores in memory, ``softmax(scale·Q Kᵀ) V``.

    Returns
    -------
    State
        out (lead, num_heads, len_q, d_v) and lse (lead, num_heads, len_q).
    """
    xp = _arrays.namespace(problem.query)
    with _arrays.quiet(xp):
        return partial_state(xp, problem)


def dense_weights(problem: Problem) -> Array:
    """Weights ``exp(score - lse)``, shape (lead, num_heads, len_q, len_kv), sinks included."""
    xp, spec = _arrays.namespace(problem.query), problem.spec
    shape, dtype = spec.scores_shape, accumulation(problem.query, spec)
    if spec.len_kv == 0:
        return xp.zeros(shape, dtype=dtype, **_arrays.device_of(problem.query))
    with _arrays.quiet(xp):
        return dense_rows(xp, problem).weights


class Weighed(NamedTuple):
    """Rows of weights and what was met on the way to them.

    Attributes
    ----------
    lse : array, shape (lead, num_heads, len_q)
        With sinks.
    weights : array, shape (lead, num_heads, len_q, len_kv)
        Of whole rows.
    visible : integer array, shape (lead, num_heads, len_q)
        Number of keys whose score is not -inf.
    """

    lse: Array
    weights: Array
    visible: Array


def dense_rows(xp: Any, problem: Problem) -> Weighed:
    """All rows of weights, in one piece."""
    lse = lse_with_sinks(xp, problem, partial_state(xp, problem))
    rows = over_rows(xp, lse)
    weights, visible = tile_weights(xp, problem, rows)
    return Weighed(lse, of_mass_one(xp, problem, weights, rows), visible)


def of_mass_one(xp: Any, problem: Problem, weights: Array, lse: Array) -> Array:
    """Weights of whole rows, scaled where lse is so large that ``exp(score - lse)`` is too."""
    large = is_large(xp, lse)
    if not _arrays.may_hold(xp.any(large)):
        return weights
    mass = xp.sum(weights, axis=-1, keepdims=True)
    if problem.sinks is not None:
        mass = mass + xp.exp(problem.sinks - lse)
    return xp.where(large & (mass > 0), weights / mass, weights)


def is_large(xp: Any, lse: Array) -> Array:
    """Where lse is finite, and so large that its rounding would show in ``exp(score - lse)``.

    At the far end, a row all of whose biases are the lowest number has ``lse + log(n) == lse``.
    """
    return (xp.abs(lse) > LARGE_LSE) & xp.isfinite(lse)


def tile_weights(xp: Any, problem: Problem, lse: Array) -> tuple[Array, Array]:
    """Weights of a part, and how many of its keys each query sees.

    Given the log-sum-exp over all keys, (lead, num_heads, len_q, 1).
    """
    seen, shape = seen_of(problem), problem.spec.scores_shape
    scores = _masked_scores(xp, problem, seen)
    weights = spread(xp, exponentials(xp, scores - lse, seen), shape)
    there = xp.astype(scores != -math.inf, _arrays.index_dtype(scores))
    return weights, spread(xp, xp.sum(there, axis=-1), shape[:-1])


def row_lse(xp: Any, problem: Problem, state: State) -> Array:
    """Log-sum-exp with sinks, 0 for rows that see nothing, (lead, num_heads, len_q, 1)."""
    return over_rows(xp, lse_with_sinks(xp, problem, state))


def lse_with_sinks(xp: Any, problem: Problem, state: State) -> Array:
    """Log-sum-exp with sinks, (lead, num_heads, len_q)."""
    if problem.sinks is not None:
        state = merged(xp, state, keyless(xp, problem))
    return state.lse


def over_rows(xp: Any, lse: Array) -> Array:
    """What scores are relative to, with an axis of keys: lse, 0 for rows that see nothing."""
    return xp.where(lse == -math.inf, xp.zeros_like(lse), lse)[..., None]


def keyless(xp: Any, problem: Problem) -> State:
    """Sinks as a state without keys, which broadcasts against any state of the problem."""
    sinks = problem.sinks
    assert sinks is not None
    return State(xp.zeros_like(sinks), sinks[..., 0])


def partial_state(xp: Any, problem: Problem) -> State:
    """Attention over all keys of the problem in one piece."""
    if problem.spec.len_kv == 0:
        problem = _with_hidden_key(xp, problem)
    spec = problem.spec
    seen = seen_of(problem)
    scores = _masked_scores(xp, problem, seen)  # (lead, num_heads, len_q, len_kv)
    row_max = xp.max(scores, axis=-1, keepdims=True)
    row_max = _arrays.constant(xp.where(row_max == -math.inf, xp.zeros_like(row_max), row_max))
    p = exponentials(xp, scores - row_max, seen)
    row_sum = xp.sum(p, axis=-1, keepdims=True)
    if spec.dropout:
        p = xp.where(kept_of(xp, problem), p, xp.zeros_like(p[..., :1]))
        p = p * (1 / (1 - spec.dropout) if spec.dropout < 1 else 0.0)
    acc = _weighted_values(xp, problem, p, scores)  # (lead, num_heads, len_q, d_v)
    empty = row_sum == 0
    row_sum = xp.where(empty, xp.ones_like(row_sum), row_sum)
    lse = xp.where(empty, xp.full_like(row_sum, -math.inf), row_max + xp.log(row_sum))[..., 0]
    shape = spec.scores_shape[:-1]
    # 0 × v may be -0, and an empty row is 0 whatever the values are.
    out = xp.where(empty, xp.zeros_like(row_sum), acc / row_sum)
    return State(spread(xp, out, (*shape, spec.d_v)), spread(xp, lse, shape))


def spread(xp: Any, x: Array, shape: tuple[int, ...]) -> Array:
    """Repeat x along axes of length 1 until it has this shape; never a read-only view."""
    if tuple(x.shape) == shape:
        return x
    x = xp.broadcast_to(x, shape)
    return x.copy() if isinstance(x, np.ndarray) else x


def _with_hidden_key(xp: Any, problem: Problem) -> Problem:
    """Add one key that nothing sees to none: the same result, connected to the gradient."""

    def padded(x: Array) -> Array:
        shape = (*x.shape[:-2], 1, x.shape[-1])
        return xp.concat([x, xp.zeros(shape, dtype=x.dtype, **_arrays.device_of(x))], axis=-2)

    hidden = _arrays.like(problem.query, np.zeros((1,) * problem.spec.rank, dtype=bool))
    terms = replace(
        problem.terms, mask=hidden, bias=None, kv_segment=None, q_segment=None, kv_end=None
    )
    return replace(
        problem, key=padded(problem.key), value=padded(problem.value), terms=terms,
        columns=range(1), block_mask=None, score_mod=None, mask_mod=None,
        spec=replace(problem.spec, len_kv=1),
    )


def _positions(problem: Problem) -> tuple[Array, Array]:
    """Positions of queries (lead, 1, len_q, 1) and of keys (lead, 1, 1, len_kv)."""
    terms, query = problem.terms, problem.query
    shape = (1,) * (problem.spec.rank - 2)
    rows = np.asarray(problem.rows, dtype=np.int64).reshape(*shape, -1, 1)
    columns = np.asarray(problem.columns, dtype=np.int64).reshape(*shape, 1, -1)
    return (
        terms.q_offset + _arrays.like(query, rows, terms.q_offset.dtype),
        terms.kv_offset + _arrays.like(query, columns, terms.kv_offset.dtype),
    )


def seen_of(problem: Problem) -> Array | None:
    """Boolean array, broadcastable to the scores: may be seen; None where everything is."""
    spec, terms = problem.spec, problem.terms
    conditions: list[Array] = []
    if spec.left is not None or spec.right is not None:
        q_pos, kv_pos = _positions(problem)
        limit = int(_arrays.namespace(q_pos).iinfo(q_pos.dtype).max)
        left, right = (limit if x is None else min(x, limit) for x in (spec.left, spec.right))
        conditions.append(_masks.in_window(q_pos, kv_pos, left, right))
    if terms.kv_end is not None:
        conditions.append(_masks.in_length(_positions(problem)[1], terms.kv_end))
    if terms.kv_segment is not None:
        conditions.append(_masks.in_segment(terms.q_segment, terms.kv_segment))
    if terms.mask is not None:
        conditions.append(terms.mask)
    if terms.bias is not None:
        conditions.append(terms.bias != -math.inf)
    if problem.block_mask is not None:
        conditions.append(_block_seen(problem))
    if problem.mask_mod is not None:
        conditions.append(_call_mod(problem, "mask_mod", problem.mask_mod))
    return functools.reduce(lambda a, b: a & b, conditions) if conditions else None


def _block_seen(problem: Problem) -> Array:
    """Block mask spread over queries and keys, (lead, num_heads, len_q, len_kv)."""
    xp = _arrays.namespace(problem.block_mask)
    spread: Array = problem.block_mask
    for axis, indices in ((-2, problem.rows), (-1, problem.columns)):
        if spread.shape[axis] != 1:
            blocks = _arrays.like(spread, np.asarray(indices, dtype=np.int64) // BLOCK_MASK)
            spread = xp.take(spread, blocks, axis=axis)
    return spread


def _call_mod(problem: Problem, name: str, function: Callable[..., Any], *first: Array) -> Array:
    """Call a user's function on arrays that broadcast to the scores; check what it returns."""
    terms, spec = problem.terms, problem.spec
    try:
        result = function(*first, terms.batch, terms.head, *_positions(problem))
    except (TypeError, ValueError, RuntimeError) as error:
        if any(words in str(error) for words in BRANCHES):
            raise type_error(
                f"{name} must be written with arithmetic, comparisons, & and |",
                f"a branch or a conversion of an array ({str(error).splitlines()[0]})",
                f"impl='dense' and 'blockwise' call {name} on whole arrays: write "
                "(a < b) & (c < d) for 'and', and where(condition, x, y) for 'if'.",
            ) from error
        raise
    is_score = name.startswith("score_mod")
    right_kind = _arrays.is_float if is_score else _arrays.is_bool
    if _arrays.library(result) != spec.library or not right_kind(result):
        kind = "floating-point" if is_score else "boolean"
        raise type_error(
            f"{name} must return a {kind} array of the library of its arguments",
            _arrays.describe(result), "Combine its arguments.",
        )
    _checks.broadcastable(
        f"the result of {name}", result, spec.scores_shape, "(..., num_heads, len_q, len_kv)"
    )
    return result


def _masked_scores(xp: Any, problem: Problem, seen: Array | None) -> Array:
    """Scores after every option, -inf where excluded, (lead, num_heads, len_q, len_kv)."""
    spec = problem.spec
    scores = modified(xp, problem, plain_scores(xp, problem, raw_scores(xp, problem, seen), seen))
    if seen is not None:
        excluded = xp.full((1,) * spec.rank, -math.inf, dtype=scores.dtype,
                           **_arrays.device_of(scores))  # fmt: skip
        scores = xp.where(seen, scores, excluded)
    lead = scores.shape[:-2] if scores.ndim == spec.rank else ()
    return xp.broadcast_to(scores, (*lead, spec.len_q, spec.len_kv))


def raw_scores(xp: Any, problem: Problem, seen: Array | None) -> Array:
    """Products of queries and keys, 0 where excluded, so that nan there gets into no gradient."""
    scores = _products(xp, problem, accumulation(problem.query, problem.spec))
    return scores if seen is None else xp.where(seen, scores, xp.zeros_like(scores[..., :1]))


def plain_scores(xp: Any, problem: Problem, scores: Array, seen: Array | None) -> Array:
    """Scores before ``score_mod``, from the products: scale, softcap, bias and ALiBi."""
    spec, terms = problem.spec, problem.terms
    distance = None if terms.slopes is None else distances(xp, problem)
    if terms.bias is None:
        return _scores.logit(
            scores, spec.scale, spec.softcap, None, terms.slopes, distance, xp.tanh
        )
    before = _scores.logit(scores, spec.scale, spec.softcap, None, None, None, xp.tanh)
    bias = _finite_bias(xp, terms.bias, seen, scores.dtype)
    scores = _scores.logit(before, 1.0, None, bias, terms.slopes, distance, xp.tanh)
    # Only -inf excludes: a sum of finite terms stops at the lowest number instead.
    fell = (scores == -math.inf) & (before != -math.inf)
    return xp.where(fell, xp.full_like(scores[..., :1], xp.finfo(scores.dtype).min), scores)


def distances(xp: Any, problem: Problem) -> Array:
    """How far queries and keys are apart, in the accumulation dtype."""
    q_pos, kv_pos = _positions(problem)
    return xp.astype(xp.abs(q_pos - kv_pos), accumulation(problem.query, problem.spec))


def modified(xp: Any, problem: Problem, scores: Array) -> Array:
    """Scores after ``score_mod``."""
    if problem.score_mod is None:
        return scores
    return xp.astype(
        _call_mod(problem, "score_mod", problem.score_mod, scores), scores.dtype, copy=False
    )


def mod_slopes(xp: Any, problem: Problem, scores: Array) -> Array:
    """Derivative of ``score_mod`` at the scores before it."""
    assert problem.score_slope is not None
    function = problem.score_slope

    def slope(*arguments: Array) -> Array:
        found = function(*arguments)
        if isinstance(found, (int, float)):  # the derivative of a linear function
            return xp.full_like(scores[..., :1, :1], found)
        return found

    slopes = _call_mod(problem, "score_mod's derivative", slope, scores)
    return xp.astype(slopes, scores.dtype, copy=False)


def _finite_bias(xp: Any, bias: Array, seen: Array | None, dtype: Any) -> Array:
    """Bias in the accumulation dtype, 0 where excluded, and with no new infinity."""
    limits = xp.finfo(dtype)
    if seen is not None:
        bias = xp.where(seen, bias, xp.zeros_like(bias[..., :1]))
    if _arrays.dtype_name(bias) == "float64" and dtype != xp.float64:
        bounded = xp.clip(bias, limits.min, limits.max)
        bias = xp.where(xp.isinf(bias), bias, bounded)
    return xp.astype(bias, dtype, copy=False)


def _products(xp: Any, problem: Problem, dtype: Any) -> Array:
    """Inner products of queries and keys, (lead, num_heads, len_q, len_kv)."""
    q = _arrays.packed(xp, problem.query, dtype)
    k = _arrays.packed(xp, problem.key, dtype)
    if isinstance(q, np.ndarray) and np.may_share_memory(q, k):
        k = k.copy()  # NumPy computes x @ xᵀ of one array in another way, with other bits
    products = grouped_matmul(xp, q, xp.matrix_transpose(k))
    if problem.spec.library in ("torch", "jax") and not_finite(xp, q, k):
        # A product's gradient is (its gradient) × (the other factor), and 0 × nan is nan: rows
        # that hold nan or inf enter as constants, so that they reach no gradient of others.
        finite_q, finite_k = only_finite(xp, q), only_finite(xp, k)
        clean = grouped_matmul(xp, finite_q, xp.matrix_transpose(finite_k))
        products = _arrays.constant(products)
        products = xp.where(xp.isfinite(products), clean, products)
    return products


def _weighted_values(xp: Any, problem: Problem, p: Array, scores: Array) -> Array:
    """Values weighted by p and summed, (lead, num_heads, len_q, d_v).

    The weight 0 of an excluded key times nan is 0; a nan that is seen reaches its rows only.
    """
    v = _arrays.packed(xp, problem.value, p.dtype)
    if not not_finite(xp, v):
        return grouped_matmul(xp, p, v)
    acc = grouped_matmul(xp, p, only_finite(xp, v))
    seen = xp.astype(scores != -math.inf, p.dtype)

    def reached(what: Array) -> Array:
        return grouped_matmul(xp, seen, xp.astype(what, p.dtype)) > 0

    up, down = reached(v == math.inf), reached(v == -math.inf)
    acc = xp.where(up, xp.full_like(acc, math.inf), acc)
    acc = xp.where(down, xp.full_like(acc, -math.inf), acc)
    lost = reached(xp.isnan(v)) | (up & down)
    return xp.where(lost, xp.full_like(acc, math.nan), acc)


def not_finite(xp: Any, *arrays: Array) -> bool:
    """Whether an array may hold nan or inf; a sum finds both without a temporary array."""
    return any(_arrays.may_hold(~xp.isfinite(xp.sum(_arrays.constant(x)))) for x in arrays)


def only_finite(xp: Any, x: Array) -> Array:
    return xp.where(xp.isfinite(x), x, xp.zeros_like(x))


def grouped_matmul(xp: Any, rows: Array, columns: Array) -> Array:
    """(..., num_heads, m, k) @ (..., num_kv_heads, k, n): heads of a group share their columns."""
    num_heads, m, k = rows.shape[-3:]
    num_kv_heads, n = columns.shape[-3], columns.shape[-1]
    if num_heads == num_kv_heads:
        return xp.matmul(rows, columns)
    # The rows of a group become one longer matrix: nothing is repeated.
    rows = xp.reshape(rows, (*rows.shape[:-3], num_kv_heads, num_heads // num_kv_heads * m, k))
    product = xp.matmul(rows, columns)
    return xp.reshape(product, (*product.shape[:-3], num_heads, m, n))


def exponentials(xp: Any, x: Array, seen: Array | None) -> Array:
    """Weights exp(x), 0 where excluded or below the smallest normal number of the dtype."""
    p = xp.exp(x)
    drop = p < xp.finfo(p.dtype).smallest_normal
    if seen is not None:
        drop = drop | ~seen  # also in rows that nan has reached
    return xp.where(drop, xp.zeros_like(p[..., : min(1, p.shape[-1])]), p)


def kept_of(xp: Any, problem: Problem) -> Array:
    """Boolean array: weights that dropout keeps, (lead, num_heads, len_q, len_kv)."""
    terms = problem.terms
    head, q_pos, kv_pos = (
        xp.astype(x, xp.int32) for x in (terms.head, *_positions(problem))
    )
    row_a, row_b = _masks.dropout_row_keys(terms.seed_low, terms.seed_high, head, q_pos)
    threshold = _masks.dropout_threshold(problem.spec.dropout)
    return _masks.dropout_keeps(row_a, row_b, kv_pos, threshold)


