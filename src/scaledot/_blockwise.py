"""The definition in linear memory: `dense` on slices of queries and keys, merged.

One tile of scores is held at a time. Runs on any array library and device and
differentiates by the host library.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from scaledot import _arrays, _masks
from scaledot._reference import (
    Weighed,
    lse_with_sinks,
    of_mass_one,
    over_rows,
    partial_state,
    row_lse,
    tile_weights,
)
from scaledot._spec import Problem, Spec, accumulation
from scaledot._state import State, empty_state, merged
from scaledot._typing import Array

# Tiles are cut by fixed lengths so that no result depends on batch, heads or threads. One tile
# of float32 scores is 512 KiB: it and its few copies stay in the second-level cache.
BLOCK_Q = 256
BLOCK_KV = 512
TILE_SCORES = BLOCK_Q * BLOCK_KV


def blockwise(problem: Problem) -> State:
    """Same result as `dense` with the scores of one tile at a time in memory."""
    xp = _arrays.namespace(problem.query)
    spec = problem.spec
    axes = grid(spec)
    if spec.library != "numpy":
        with _arrays.quiet(xp):
            states = [_fold(xp, part) for _, part in parts(problem, axes)]
            counts = _counts(spec, axes)
            out = _join(xp, [state.out for state in states], axes, counts)
            lse = _join(xp, [state.lse[..., None] for state in states], axes, counts)[..., 0]
            return State(out, lse)
    shape = spec.scores_shape[:-1]
    state = empty_state(xp, shape, spec.d_v, accumulation(problem.query, spec), problem.query)

    with _arrays.quiet(xp):
        for region, part in parts(problem, axes):
            state.out[region], state.lse[region] = _fold(xp, part)
    return state


def blockwise_weights(problem: Problem) -> Array:
    """`dense_weights` with little more than the result in memory (NumPy; others hold it twice)."""
    xp, spec = _arrays.namespace(problem.query), problem.spec
    shape, dtype = spec.scores_shape, accumulation(problem.query, spec)
    if spec.len_kv == 0:
        return xp.zeros(shape, dtype=dtype, **_arrays.device_of(problem.query))
    axes = grid(spec)
    if spec.library != "numpy":
        with _arrays.quiet(xp):
            pieces = [whole_rows(xp, part).weights for _, part in parts(problem, axes)]
            return _join(xp, pieces, axes, _counts(spec, axes))
    result = np.zeros(shape, dtype=dtype)

    with _arrays.quiet(xp):
        for region, part in parts(problem, axes):
            lse = row_lse(xp, part, _fold(xp, part))
            for start, stop in key_slices(part):
                tile, _ = tile_weights(xp, part.cut(-1, start, stop), lse)
                result[(*region, slice(start, stop))] = tile
            result[region] = of_mass_one(xp, part, result[region], lse)
    return result


def whole_rows(xp: Any, problem: Problem) -> Weighed:
    """Rows of weights of a part that holds all keys, one block of keys after the other."""
    spec, slices = problem.spec, key_slices(problem) or [(0, 0)]
    lse = lse_with_sinks(xp, problem, _fold(xp, problem))
    rows = over_rows(xp, lse)
    blocks = [tile_weights(xp, problem.cut(-1, *part), rows) for part in slices]
    pieces = [block for block, _ in blocks]
    kind = {"dtype": pieces[0].dtype, **_arrays.device_of(problem.query)}
    low, high = slices[0][0], slices[-1][1]
    pieces.insert(0, xp.zeros((*spec.scores_shape[:-1], low), **kind))
    pieces.append(xp.zeros((*spec.scores_shape[:-1], spec.len_kv - high), **kind))
    weights = xp.concat([x for x in pieces if x.shape[-1]] or pieces, axis=-1)
    visible = functools.reduce(lambda a, b: a + b, [count for _, count in blocks])
    return Weighed(lse, of_mass_one(xp, problem, weights, rows), visible)


def _fold(xp: Any, problem: Problem) -> State:
    """Merge the states of slices of keys, in order."""
    spec = problem.spec
    slices = key_slices(problem)
    if not slices and spec.library == "numpy":
        return empty_state(
            xp, spec.scores_shape[:-1], spec.d_v, accumulation(problem.query, spec), problem.query
        )
    # Without a visible key one excluded key still ties the result to its inputs' gradients.
    slices = slices or [(0, min(1, spec.len_kv))]
    states = (partial_state(xp, problem.cut(-1, *part)) for part in slices)
    return functools.reduce(lambda a, b: merged(xp, a, b), states)


def key_slices(problem: Problem) -> list[tuple[int, int]]:
    """Slices of at most `BLOCK_KV` keys, on a grid that starts at key 0, that may be seen."""
    low, high = _key_range(problem)
    starts = range(low // BLOCK_KV * BLOCK_KV, high, BLOCK_KV)
    return [(start, min(start + BLOCK_KV, problem.spec.len_kv)) for start in starts]


def _key_range(problem: Problem) -> tuple[int, int]:
    """Range of keys outside of which no query of the problem sees anything, where known."""
    spec, terms = problem.spec, problem.terms
    if terms.q_start is None or terms.kv_start is None or not spec.len_q:
        return 0, spec.len_kv
    counts = np.asarray(spec.len_kv) if terms.kv_count is None else terms.kv_count
    if terms.kv_count is None and terms.kv_end is not None:
        return 0, spec.len_kv
    rows = problem.rows
    ends = (rows[0], rows[-1]) if isinstance(rows, range) else (rows.min(), rows.max())
    first, last = map(int, ends)
    flat = map(np.ravel, np.broadcast_arrays(terms.q_start, terms.kv_start, counts))
    ranges = [
        _masks.visible_range(start + first, start + last, spec.left, spec.right, kv_start, count)
        for start, kv_start, count in {tuple(map(int, e)) for e in zip(*flat, strict=True)}
    ]
    ranges = [r for r in ranges if r[0] < r[1]]
    if not ranges:
        return 0, 0
    return min(r[0] for r in ranges), max(r[1] for r in ranges)


def grid(spec: Spec) -> list[tuple[int, int]]:
    """Axes of the result and the length of one part along each: lead, heads, queries."""
    return grid_of(spec, BLOCK_Q, BLOCK_KV, TILE_SCORES)


def grid_of(spec: Spec, block_q: int, block_kv: int, scores: int) -> list[tuple[int, int]]:
    """`grid` with tiles of ``block_q`` × ``block_kv``; parts have more where these are smaller.

    That is, as many as make up ``scores``.
    """
    rows = max(1, min(block_q, spec.len_q))
    budget = max(1, scores // (rows * max(1, min(block_kv, spec.len_kv))))
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


def _counts(spec: Spec, axes: list[tuple[int, int]]) -> list[int]:
    """Number of parts along each axis of the grid."""
    return [max(1, -(-spec.scores_shape[axis] // step)) for axis, step in axes]


def _cuts(problem: Problem, axis: int, step: int) -> Iterator[tuple[slice, Problem]]:
    """Parts of at most ``step`` along one axis of the scores; one part where step reaches all."""
    length = problem.spec.scores_shape[axis]
    if length <= step:
        yield slice(0, length), problem
        return
    for start in range(0, length, step):
        stop = min(start + step, length)
        yield slice(start, stop), problem.cut(axis, start, stop)


def parts(
    problem: Problem, axes: list[tuple[int, int]]
) -> Iterator[tuple[tuple[slice, ...], Problem]]:
    """Regions of the result, in row-major order, with the part of the problem they need."""
    if not axes:
        yield (), problem
        return
    (axis, step), rest = axes[0], axes[1:]
    for region, part in _cuts(problem, axis, step):
        for regions, piece in parts(part, rest):
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
    axes = grid(spec)
    rows, block_kv = axes[-1][1], min(BLOCK_KV, spec.len_kv)
    run = scores = 0
    for _, part in parts(problem, axes):
        blocks = key_slices(part) if part.spec.len_q else []
        keys = blocks[-1][1] - blocks[0][0] if blocks else 0
        part_heads = math.prod(part.spec.lead) * part.spec.num_heads
        run += len(blocks) * part_heads
        scores += part_heads * part.spec.len_q * keys
    total = heads * -(-spec.len_q // rows) * -(-spec.len_kv // BLOCK_KV)
    largest = replace(
        spec, lead=tuple(step for _, step in axes[:-2]), num_heads=axes[-2][1], len_q=rows,
        num_kv_heads=max(1, axes[-2][1] // max(1, spec.group_size)), len_kv=block_kv,
    )
    memory = _tile_bytes(problem, largest) + _call_bytes(problem)
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
    # The state and its parts; query, key and value only where they are converted or put in order.
    operands = heads * tile.num_heads * tile.len_q * 3 * tile.d_v
    if _is_copied(problem.query):
        operands += heads * tile.num_heads * tile.len_q * tile.d_k
    if _is_copied(problem.key):
        operands += heads * tile.num_kv_heads * tile.len_kv * tile.d_k
    if _is_copied(problem.value):
        operands += heads * tile.num_kv_heads * tile.len_kv * tile.d_v
    return int((copies * scores + operands) * itemsize)


def _is_copied(x: Array) -> bool:
    """Whether a tile of x is copied before it is multiplied."""
    wide = _arrays.dtype_name(x) in ("float32", "float64")
    in_order = isinstance(x, np.ndarray) and x.strides[-1] == x.itemsize
    return not (wide and in_order and x.strides[-2] == x.itemsize * x.shape[-1])


def _call_bytes(problem: Problem) -> int:
    """Bytes that grow with the lengths: positions, sums, and the result before it is rounded."""
    spec = problem.spec
    itemsize = 8 if spec.dtype == "float64" else 4
    rows = math.prod(spec.scores_shape[:-1])
    wide_results = (2 if problem.sinks is not None else 0) + (
        1 if spec.dtype in ("float16", "bfloat16") or spec.library != "numpy" else 0
    )
    return 8 * 4 * (spec.len_q + spec.len_kv) + rows * itemsize * (1 + wide_results * spec.d_v)
