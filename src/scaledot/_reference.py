"""The definition in array operations: ``dense``, and ``blockwise``, which merges slices of it.

Both run on any array library and device and differentiate by the host library. ``dense`` holds
all len_q × len_kv scores at once. ``blockwise`` holds one tile of them per thread.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from scaledot import _arrays, _masks, _scores, _threads
from scaledot._errors import type_error
from scaledot._spec import Problem, Spec, accumulation
from scaledot._state import State, empty_state, merged
from scaledot._typing import Array

# Tiles are cut by fixed lengths so that no result depends on batch, heads or threads. One tile
# of float32 scores is 512 KiB: it and its few copies stay in the second-level cache.
BLOCK_Q = 256
BLOCK_KV = 512
TILE_SCORES = BLOCK_Q * BLOCK_KV


def dense(problem: Problem) -> State:
    """Softmax attention with all scores in memory, ``softmax(scale·Q Kᵀ) V``.

    Returns
    -------
    State
        out (lead, num_heads, len_q, d_v) and lse (lead, num_heads, len_q).
    """
    xp = _arrays.namespace(problem.query)
    with _arrays.quiet(xp):
        return _partial(xp, problem)


def blockwise(problem: Problem) -> State:
    """Same result as `dense` with the scores of one tile at a time in memory."""
    xp = _arrays.namespace(problem.query)
    spec = problem.spec
    axes = _grid(spec)
    if spec.library != "numpy":
        with _arrays.quiet(xp):
            parts = [_fold(xp, part) for _, part in _parts(problem, axes)]
            counts = [max(1, -(-spec.scores_shape[axis] // step)) for axis, step in axes]
            out = _join(xp, [part.out for part in parts], axes, counts)
            lse = _join(xp, [part.lse[..., None] for part in parts], axes, counts)[..., 0]
            return State(out, lse)
    shape = spec.scores_shape[:-1]
    state = empty_state(xp, shape, spec.d_v, accumulation(problem.query, spec), problem.query)

    def run(item: tuple[tuple[slice, ...], Problem]) -> None:
        region, part = item
        with _arrays.quiet(xp):
            state.out[region], state.lse[region] = _fold(xp, part)

    _threads.for_each(run, list(_parts(problem, axes)))
    return state


def weights(problem: Problem, *, in_blocks: bool) -> Array:
    """Weights ``exp(score - lse)``, shape (lead, num_heads, len_q, len_kv), sinks included."""
    xp = _arrays.namespace(problem.query)
    if problem.spec.len_kv == 0:
        dtype = accumulation(problem.query, problem.spec)
        shape = problem.spec.scores_shape
        return xp.zeros(shape, dtype=dtype, **_arrays.device_of(problem.query))
    lse = (blockwise if in_blocks else dense)(problem).lse
    with _arrays.quiet(xp):
        if problem.sinks is not None:
            lse = merged(xp, State(lse[..., None], lse), keyless(xp, problem)).lse
        empty = lse == -math.inf
        lse = xp.where(empty, xp.zeros_like(lse), lse)[..., None]
        step = BLOCK_KV if in_blocks else max(1, problem.spec.len_kv)
        blocks = []
        for _, part in _cuts(problem, -1, step):
            seen = _seen(part)
            blocks.append(_exp(xp, _masked_scores(xp, part, seen) - lse, seen))
        full = problem.spec.scores_shape[:-1]
        blocks = [xp.broadcast_to(b, (*full, b.shape[-1])) for b in blocks]
        return xp.concat(blocks, axis=-1)


def keyless(xp: Any, problem: Problem) -> State:
    """Sinks as a state without keys, which broadcasts against any state of the problem."""
    sinks = problem.sinks
    assert sinks is not None
    return State(xp.zeros_like(sinks), sinks[..., 0])


def _partial(xp: Any, problem: Problem) -> State:
    """Attention over all keys of the problem in one piece."""
    if problem.spec.len_kv == 0:
        problem = _with_hidden_key(xp, problem)
    spec = problem.spec
    seen = _seen(problem)
    scores = _masked_scores(xp, problem, seen)  # (lead, num_heads, len_q, len_kv)
    row_max = xp.max(scores, axis=-1, keepdims=True)
    row_max = _arrays.constant(xp.where(row_max == -math.inf, xp.zeros_like(row_max), row_max))
    p = _exp(xp, scores - row_max, seen)
    row_sum = xp.sum(p, axis=-1, keepdims=True)
    if spec.dropout:
        p = xp.where(_kept(xp, problem), p, xp.zeros_like(p[..., :1]))
        p = p * (1 / (1 - spec.dropout) if spec.dropout < 1 else 0.0)
    acc = _weighted_values(xp, problem, p, scores)  # (lead, num_heads, len_q, d_v)
    empty = row_sum == 0
    row_sum = xp.where(empty, xp.ones_like(row_sum), row_sum)
    lse = xp.where(empty, xp.full_like(row_sum, -math.inf), row_max + xp.log(row_sum))[..., 0]
    shape = spec.scores_shape[:-1]
    return State(
        xp.broadcast_to(acc / row_sum, (*shape, spec.d_v)), xp.broadcast_to(lse, shape)
    )


def _with_hidden_key(xp: Any, problem: Problem) -> Problem:
    """Replace zero keys by one that nothing sees: the same result, connected to the gradient."""

    def pad(x: Array, width: int) -> Array:
        return xp.zeros((*x.shape[:-2], 1, width), dtype=x.dtype, **_arrays.device_of(x))

    hidden = _arrays.like(problem.query, np.zeros((1,) * problem.spec.rank, dtype=bool))
    terms = replace(
        problem.terms, mask=hidden, bias=None, kv_segment=None, q_segment=None,
        kv_pos=_arrays.like(problem.query, np.zeros((1,) * problem.spec.rank, dtype=np.int64)),
        kv_block=None,
    )
    return replace(
        problem, key=pad(problem.key, problem.spec.d_k), value=pad(problem.value, problem.spec.d_v),
        terms=terms, block_mask=None, mask_mod=None, spec=replace(problem.spec, len_kv=1),
    )


def _seen(problem: Problem) -> Array | None:
    """Boolean array, broadcastable to the scores: may be seen; None where everything is."""
    spec, terms = problem.spec, problem.terms
    conditions: list[Array] = []
    if spec.left is not None or spec.right is not None:
        limit = _arrays.namespace(terms.q_pos).iinfo(terms.q_pos.dtype).max
        left = limit if spec.left is None else spec.left
        right = limit if spec.right is None else spec.right
        conditions.append(_masks.in_window(terms.q_pos, terms.kv_pos, left, right))
    if terms.kv_end is not None:
        conditions.append(_masks.in_length(terms.kv_pos, terms.kv_end))
    if terms.kv_segment is not None:
        conditions.append(_masks.in_segment(terms.q_segment, terms.kv_segment))
    if terms.mask is not None:
        conditions.append(terms.mask)
    if terms.bias is not None:
        conditions.append(terms.bias != -math.inf)
    if problem.block_mask is not None:
        conditions.append(_block_seen(problem))
    if problem.mask_mod is not None:
        seen = _call_mod(problem.mask_mod, "mask_mod", problem)
        if _arrays.library(seen) is None or not _arrays.is_bool(seen):
            raise type_error(
                "mask_mod must return a boolean array of the library of its arguments",
                _arrays.describe(seen), "Combine comparisons with & and |.",
            )
        conditions.append(seen)
    return functools.reduce(lambda a, b: a & b, conditions) if conditions else None


def _block_seen(problem: Problem) -> Array:
    """Block mask spread over queries and keys, (lead, num_heads, len_q, len_kv)."""
    xp = _arrays.namespace(problem.block_mask)
    spread: Array = problem.block_mask
    for axis, block in ((-2, problem.terms.q_block), (-1, problem.terms.kv_block)):
        if spread.shape[axis] != 1:
            spread = xp.take(spread, xp.reshape(block, (-1,)), axis=axis)
    return spread


def _call_mod(function: Callable[..., Any], name: str, problem: Problem, *first: Array) -> Array:
    """Call a user's function on arrays that broadcast to the scores."""
    terms = problem.terms
    try:
        return function(*first, terms.batch, terms.head, terms.q_pos, terms.kv_pos)
    except (TypeError, ValueError, RuntimeError) as error:
        if "truth value" in str(error) or "Boolean value of" in str(error):
            raise type_error(
                f"{name} must be written with arithmetic, comparisons, & and |",
                f"a branch on an array ({error})",
                f"impl='dense' and 'blockwise' call {name} on whole arrays: write "
                "(a < b) & (c < d) for 'and', and where(condition, x, y) for 'if'.",
            ) from error
        raise


def _masked_scores(xp: Any, problem: Problem, seen: Array | None) -> Array:
    """Scores after every option, -inf where excluded, (lead, num_heads, len_q, len_kv)."""
    spec, terms = problem.spec, problem.terms
    dtype = accumulation(problem.query, spec)
    scores = _products(xp, problem, dtype)
    if seen is not None:  # first, so that what is excluded can put nan into no gradient
        scores = xp.where(seen, scores, xp.zeros_like(scores[..., :1]))
    distance = None
    if terms.slopes is not None:
        distance = xp.astype(xp.abs(terms.q_pos - terms.kv_pos), dtype)
    if terms.bias is None:
        scores = _scores.logit(
            scores, spec.scale, spec.softcap, None, terms.slopes, distance, xp.tanh
        )
    else:
        before = _scores.logit(scores, spec.scale, spec.softcap, None, None, None, xp.tanh)
        bias = _finite_bias(xp, terms.bias, dtype)
        scores = _scores.logit(before, 1.0, None, bias, terms.slopes, distance, xp.tanh)
        # Only -inf excludes: a sum of finite terms stops at the lowest number instead.
        fell = (scores == -math.inf) & (before != -math.inf)
        lowest = xp.full_like(scores[..., :1], xp.finfo(dtype).min)
        scores = xp.where(fell, lowest, scores)
    if problem.score_mod is not None:
        scores = _call_mod(problem.score_mod, "score_mod", problem, scores)
        if _arrays.library(scores) != spec.library or not _arrays.is_float(scores):
            raise type_error(
                "score_mod must return scores: a floating-point array of its argument's library",
                _arrays.describe(scores), "Return the changed score.",
            )
        scores = xp.astype(scores, dtype, copy=False)
    if seen is not None:
        scores = xp.where(seen, scores, xp.full_like(scores[..., :1], -math.inf))
    return xp.broadcast_to(scores, (*scores.shape[:-2], spec.len_q, spec.len_kv))


def _finite_bias(xp: Any, bias: Array, dtype: Any) -> Array:
    """Bias in the accumulation dtype with -inf (excluded elsewhere) as 0 and no new infinity."""
    limits = xp.finfo(dtype)
    bias = xp.where(bias == -math.inf, xp.zeros_like(bias[..., :1]), bias)
    if _arrays.dtype_name(bias) == "float64" and dtype != xp.float64:
        bounded = xp.clip(bias, limits.min, limits.max)
        bias = xp.where(xp.isinf(bias), bias, bounded)
    return xp.astype(bias, dtype, copy=False)


def _products(xp: Any, problem: Problem, dtype: Any) -> Array:
    """Inner products of queries and keys, (lead, num_heads, len_q, len_kv)."""
    q = _arrays.packed(xp, problem.query, dtype)
    k = _arrays.packed(xp, problem.key, dtype)
    products = _grouped_matmul(xp, q, xp.matrix_transpose(k))
    if problem.spec.library in ("torch", "jax") and _not_finite(xp, q, k):
        # A product's gradient is (its gradient) × (the other factor), and 0 × nan is nan: rows
        # that hold nan or inf enter as constants, so that they reach no gradient of others.
        finite_q, finite_k = _only_finite(xp, q), _only_finite(xp, k)
        clean = _grouped_matmul(xp, finite_q, xp.matrix_transpose(finite_k))
        products = _arrays.constant(products)
        products = xp.where(xp.isfinite(products), clean, products)
    return products


def _weighted_values(xp: Any, problem: Problem, p: Array, scores: Array) -> Array:
    """Values weighted by p and summed, (lead, num_heads, len_q, d_v).

    The weight 0 of an excluded key times nan is 0; a nan that is seen reaches its rows only.
    """
    v = _arrays.packed(xp, problem.value, p.dtype)
    if not _not_finite(xp, v):
        return _grouped_matmul(xp, p, v)
    acc = _grouped_matmul(xp, p, _only_finite(xp, v))
    seen = xp.astype(scores != -math.inf, p.dtype)

    def reached(what: Array) -> Array:
        return _grouped_matmul(xp, seen, xp.astype(what, p.dtype)) > 0

    up, down = reached(v == math.inf), reached(v == -math.inf)
    acc = xp.where(up, xp.full_like(acc, math.inf), acc)
    acc = xp.where(down, xp.full_like(acc, -math.inf), acc)
    lost = reached(xp.isnan(v)) | (up & down)
    return xp.where(lost, xp.full_like(acc, math.nan), acc)


def _not_finite(xp: Any, *arrays: Array) -> bool:
    """Whether an array may hold nan or inf; a sum finds both without a temporary array."""
    return any(_arrays.may_hold(~xp.isfinite(xp.sum(_arrays.constant(x)))) for x in arrays)


def _only_finite(xp: Any, x: Array) -> Array:
    return xp.where(xp.isfinite(x), x, xp.zeros_like(x))


def _grouped_matmul(xp: Any, rows: Array, columns: Array) -> Array:
    """(..., num_heads, m, k) @ (..., num_kv_heads, k, n): heads of a group share their columns."""
    num_heads, m, k = rows.shape[-3:]
    num_kv_heads, n = columns.shape[-3], columns.shape[-1]
    if num_heads == num_kv_heads:
        return xp.matmul(rows, columns)
    # The rows of a group become one longer matrix: nothing is repeated.
    rows = xp.reshape(rows, (*rows.shape[:-3], num_kv_heads, num_heads // num_kv_heads * m, k))
    product = xp.matmul(rows, columns)
    return xp.reshape(product, (*product.shape[:-3], num_heads, m, n))


def _exp(xp: Any, x: Array, seen: Array | None) -> Array:
    """Weights exp(x), 0 where excluded or below the smallest normal number of the dtype."""
    p = xp.exp(x)
    drop = p < xp.finfo(p.dtype).smallest_normal
    if seen is not None:
        drop = drop | ~seen  # also in rows that nan has reached
    return xp.where(drop, xp.zeros_like(p[..., :1]), p)


def _kept(xp: Any, problem: Problem) -> Array:
    """Boolean array: weights that dropout keeps, (lead, num_heads, len_q, len_kv)."""
    terms = problem.terms
    head, q_pos, kv_pos = (xp.astype(x, xp.int32) for x in (terms.head, terms.q_pos, terms.kv_pos))
    row_a, row_b = _masks.dropout_row_keys(terms.seed_low, terms.seed_high, head, q_pos)
    threshold = _masks.dropout_threshold(problem.spec.dropout)
    return _masks.dropout_keeps(row_a, row_b, kv_pos, threshold)


def _fold(xp: Any, problem: Problem) -> State:
    """Merge the states of slices of keys, in order."""
    spec = problem.spec
    low, high = _key_range(problem)
    starts = range(low // BLOCK_KV * BLOCK_KV, high, BLOCK_KV)
    if not starts and spec.library == "numpy":
        return empty_state(
            xp, spec.scores_shape[:-1], spec.d_v, accumulation(problem.query, spec), problem.query
        )
    # Without a visible key one excluded key still ties the result to its inputs' gradients.
    slices = [(i, min(i + BLOCK_KV, spec.len_kv)) for i in starts] or [(0, min(1, spec.len_kv))]
    parts = (_partial(xp, problem.cut(-1, *part)) for part in slices)
    return functools.reduce(lambda a, b: merged(xp, a, b), parts)


def _key_range(problem: Problem) -> tuple[int, int]:
    """Range of keys outside of which no query of the problem sees anything, where known."""
    spec, terms = problem.spec, problem.terms
    if terms.q_start is None or terms.kv_start is None or not spec.len_q:
        return 0, spec.len_kv
    counts = np.asarray(spec.len_kv) if terms.kv_count is None else terms.kv_count
    if terms.kv_count is None and terms.kv_end is not None:
        return 0, spec.len_kv
    first, last = terms.q_index.min(), terms.q_index.max()
    flat = map(np.ravel, np.broadcast_arrays(terms.q_start, terms.kv_start, counts))
    ranges = [
        _masks.visible_range(start + first, start + last, spec.left, spec.right, kv_start, count)
        for start, kv_start, count in {tuple(map(int, e)) for e in zip(*flat, strict=True)}
    ]
    ranges = [r for r in ranges if r[0] < r[1]]
    if not ranges:
        return 0, 0
    return min(r[0] for r in ranges), max(r[1] for r in ranges)


def _grid(spec: Spec) -> list[tuple[int, int]]:
    """Axes of the result and the length of one part along each: lead, heads, queries."""
    rows = max(1, min(BLOCK_Q, spec.len_q))
    budget = max(1, TILE_SCORES // (rows * max(1, min(BLOCK_KV, spec.len_kv))))
    group = max(1, spec.group_size)
    fitting = [
        h for h in range(1, min(budget, spec.num_heads) + 1) if h % group == 0 or group % h == 0
    ]
    steps = [(-3, max(fitting, default=1)), (-2, rows)]
    budget = max(1, budget // steps[0][1]) if steps[0][1] >= spec.num_heads else 1
    for axis in range(-4, -4 - len(spec.lead), -1):
        length = spec.lead[axis + 3]
        step = max(1, min(budget, length))
        budget = max(1, budget // step) if step >= length else 1
        steps.insert(0, (axis, step))
    return steps


def _cuts(problem: Problem, axis: int, step: int) -> Iterator[tuple[slice, Problem]]:
    """Parts of at most ``step`` along one axis of the scores; one part where step reaches all."""
    length = problem.spec.scores_shape[axis]
    if length <= step:
        yield slice(0, length), problem
        return
    for start in range(0, length, step):
        stop = min(start + step, length)
        yield slice(start, stop), problem.cut(axis, start, stop)


def _parts(
    problem: Problem, axes: list[tuple[int, int]]
) -> Iterator[tuple[tuple[slice, ...], Problem]]:
    """Regions of the result, in row-major order, with the part of the problem they need."""
    if not axes:
        yield (), problem
        return
    (axis, step), rest = axes[0], axes[1:]
    for region, part in _cuts(problem, axis, step):
        for regions, piece in _parts(part, rest):
            yield (region, *regions), piece


def _join(xp: Any, pieces: list[Array], axes: list[tuple[int, int]], counts: list[int]) -> Array:
    """Put the pieces of a result, in row-major order, back together along the cut axes."""
    if not axes:
        return pieces[0]
    size = math.prod(counts[1:])
    joined = [
        _join(xp, pieces[i * size : (i + 1) * size], axes[1:], counts[1:])
        for i in range(counts[0])
    ]
    return joined[0] if len(joined) == 1 else xp.concat(joined, axis=axes[0][0])


@dataclass(frozen=True)
class Tiles:
    """Tiles of one head each, the scores in those that run, and the bytes that they need."""

    block_q: int
    block_kv: int
    run: int
    skipped: int
    scores: int
    memory: int


def tiles(problem: Problem, *, in_blocks: bool) -> Tiles:
    """Count the work and the memory of `blockwise` or `dense` without doing it."""
    spec = problem.spec
    heads = math.prod(spec.lead) * spec.num_heads
    if not in_blocks:
        scores = heads * spec.len_q * spec.len_kv
        memory = _tile_bytes(problem, spec) + _call_bytes(problem)
        return Tiles(spec.len_q, spec.len_kv, min(scores, heads), 0, scores, memory)
    axes = _grid(spec)
    rows, block_kv = axes[-1][1], min(BLOCK_KV, spec.len_kv)
    run = scores = 0
    for _, part in _parts(problem, axes):
        low, high = _key_range(part)
        blocks = range(low // BLOCK_KV * BLOCK_KV, high, BLOCK_KV)
        keys = min(blocks[-1] + BLOCK_KV, spec.len_kv) - blocks[0] if blocks else 0
        part_heads = math.prod(part.spec.lead) * part.spec.num_heads
        run += len(blocks) * part_heads
        scores += part_heads * part.spec.len_q * keys
    total = heads * -(-spec.len_q // rows) * -(-spec.len_kv // BLOCK_KV)
    largest = replace(
        spec, lead=tuple(step for _, step in axes[:-2]), num_heads=axes[-2][1], len_q=rows,
        num_kv_heads=max(1, axes[-2][1] // max(1, spec.group_size)), len_kv=block_kv,
    )
    parts = math.prod(-(-spec.scores_shape[axis] // step) for axis, step in axes)
    at_once = min(_threads.get_num_threads(), parts) if spec.library == "numpy" else 1
    memory = at_once * _tile_bytes(problem, largest) + _call_bytes(problem)
    return Tiles(rows, block_kv, run, total - run, scores, memory)


def _tile_bytes(problem: Problem, tile: Spec) -> int:
    """Bytes held at once while a tile is computed; the counts of arrays are measured ones."""
    itemsize = 8 if tile.dtype == "float64" else 4
    heads = math.prod(tile.lead)
    scores = heads * tile.num_heads * tile.len_q * tile.len_kv
    # scores, shifted scores, their exponentials, the cleaned ones and which of them to drop
    copies = 4.25
    if tile.dropout:
        copies += 0.75
    if problem.terms.bias is not None:
        copies += 0.75
    operands = heads * (
        tile.num_heads * tile.len_q * (tile.d_k + 3 * tile.d_v)
        + tile.num_kv_heads * tile.len_kv * (tile.d_k + tile.d_v)
    )
    return int((copies * scores + operands) * itemsize)


def _call_bytes(problem: Problem) -> int:
    """Bytes that grow with the lengths: positions, sums, and the result before it is rounded."""
    spec = problem.spec
    itemsize = 8 if spec.dtype == "float64" else 4
    rows = math.prod(spec.scores_shape[:-1])
    wide_results = (1 if problem.sinks is not None else 0) + (
        1 if spec.dtype in ("float16", "bfloat16") or spec.library != "numpy" else 0
    )
    return 8 * 4 * (spec.len_q + spec.len_kv) + rows * itemsize * (1 + wide_results * spec.d_v)
