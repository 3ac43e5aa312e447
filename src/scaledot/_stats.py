"""What the rows and columns of an attention matrix tell, from a few rows of it at a time.

`dense_stats` and `blockwise_stats` are the definition in array operations, on any array library
and device; the second holds one block of rows at once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from scaledot import _arrays, _stats_view
from scaledot._blockwise import BLOCK_Q, grid_of, parts, whole_rows
from scaledot._reference import Weighed, dense_rows, distances, is_large
from scaledot._spec import Problem, Spec, accumulation
from scaledot._typing import Array

BLOCK_SCORES = 2**21
"""Scores in one block of rows of `blockwise_stats`; a single row may have more."""

Part = tuple[int, int]
"""Start and stop."""

Floats: TypeAlias = npt.NDArray[np.float64]


class Stats(NamedTuple):
    """What the attention of each query and to each key is like.

    Attributes
    ----------
    lse : array, shape (..., num_heads, len_q)
        Natural logarithm of the sum of the exponentials of the scores, sinks among them.
    entropy : array, shape (..., num_heads, len_q)
        ``-Σ w log w`` over the keys, in nats: 0 for one key alone, ``log(visible)`` at most.
    max_weight : array, shape (..., num_heads, len_q)
        Largest weight on a key.
    top_keys : integer array, shape (..., num_heads, len_q, top_k)
        Keys of the largest weights, in their order; -1 where no key has a weight.
    top_weights : array, shape (..., num_heads, len_q, top_k)
        Their weights.
    mean_distance : array, shape (..., num_heads, len_q)
        ``Σ w |q_pos - kv_pos|``, in tokens.
    saturation : array, shape (..., num_heads, len_q)
        ``max_weight · (1 - max_weight)``, the largest entry of the softmax's Jacobian
        ``diag(w) - w wᵀ``: near 0 no gradient reaches the scores of a query that sees several keys.
    visible : integer array, shape (..., num_heads, len_q)
        Number of keys that may be seen and whose score is above -inf.
    received : array, shape (..., num_heads, len_kv)
        Weight on each key, summed over the queries.
    received_last : array, shape (..., num_heads, len_kv), or None
        The same over the last ``last`` queries; None where ``last`` is not given.
    sink_mass : array, shape (..., num_heads)
        Mean over the queries of the weight on key 0 and on ``sinks``.
    block_map : array, shape (..., num_heads, *map_shape), or None
        Entry [a, b] is the mean over the queries of bin a of their weight on the keys of bin b.
        Query i is in bin ``i·rows // len_q``, key j in bin ``j·columns // len_kv``. None where
        ``map_shape`` is not given.

    Notes
    -----
    A query that sees no key has zeros, ``lse = -inf`` and ``top_keys = -1``.
    """

    lse: Array
    entropy: Array
    max_weight: Array
    top_keys: Array
    top_weights: Array
    mean_distance: Array
    saturation: Array
    visible: Array
    received: Array
    received_last: Array | None
    sink_mass: Array
    block_map: Array | None

    def _repr_html_(self) -> str:
        """Table for notebooks, one row for each of the first heads."""
        return _stats_view.html(self)


class Wanted(NamedTuple):
    """What is asked for beside the options of the scores, checked."""

    top_k: int
    last: int | None
    map_shape: tuple[int, int] | None


def bin_edges(length: int, count: int) -> list[int]:
    """Where bins of a length start and stop: place i is in bin ``i * count // length``."""
    return [-(-length * i // count) for i in range(count + 1)]


def bins(length: int, count: int) -> list[Part]:
    """Start and stop of each of ``count`` bins of a length."""
    return list(itertools.pairwise(bin_edges(length, count)))


def pooled(maps: Floats, counts: Floats, rows: Sequence[int], columns: Sequence[int]) -> Floats:
    """Join rows and columns of NumPy arrays (..., rows, columns) from the given starts on.

    Rows become means, in which each weighs as much as it counts; columns add up.
    """
    sums = np.add.reduceat(maps * counts[:, None], rows, axis=-2)
    means = sums / np.add.reduceat(counts, rows)[:, None]
    joined: Floats = np.add.reduceat(means, columns, axis=-1)
    return joined


def finished(
    xp: Any, spec: Spec, sinks: Array | None, lse: Array, rows: dict[str, Array], received: Array,
    received_last: Array | None, block_map: Array | None,
) -> Stats:  # fmt: skip
    """Statistics from the sums over all queries; ``rows`` are those of each query, by name."""
    top = rows["max_weight"]
    mass = xp.sum(received[..., : min(1, spec.len_kv)], axis=-1) / max(1, spec.len_q)
    if sinks is not None:
        mass = mass + _on_sinks(xp, sinks[..., 0], lse, received) / max(1, spec.len_q)
    return Stats(
        lse=lse, saturation=top * (1 - top), received=received, received_last=received_last,
        sink_mass=mass, block_map=block_map, **rows,
    )  # fmt: skip


def _on_sinks(xp: Any, sinks: Array, lse: Array, received: Array) -> Array:
    """Weight on the sinks (..., num_heads, 1), summed over the queries, (lead, num_heads)."""
    sinks = xp.broadcast_to(sinks, lse.shape)
    share = xp.exp(sinks - lse)
    # A sink of -inf takes nothing, and a row without anything has no weights.
    nothing = (sinks == -math.inf) | (lse == -math.inf)
    share = xp.sum(xp.where(nothing, xp.zeros_like(share), share), axis=-1)
    # Where lse is so large that its rounding shows, the sink has what the keys leave.
    rows = xp.sum(xp.astype(lse != -math.inf, share.dtype), axis=-1)
    rest = rows - xp.sum(received, axis=-1)
    rest = xp.where(rest < 0, xp.zeros_like(rest), rest)
    is_rounded = xp.any(is_large(xp, lse), axis=-1) & xp.any(sinks != -math.inf, axis=-1)
    return xp.where(is_rounded, rest, share)


def dense_stats(problem: Problem, wanted: Wanted) -> Stats:
    """Statistics of all weights at once."""
    spec = problem.spec
    lengths = enumerate(spec.scores_shape[:-1])
    steps = [(place - spec.rank, max(1, length)) for place, length in lengths]
    return _over_parts(problem, wanted, steps, dense_rows)


def blockwise_stats(problem: Problem, wanted: Wanted) -> Stats:
    """Statistics with the weights of one block of rows at a time in memory."""
    spec = problem.spec
    rows = min(BLOCK_Q, max(1, BLOCK_SCORES // max(1, spec.len_kv)))
    steps = grid_of(spec, rows, max(1, spec.len_kv), BLOCK_SCORES)
    return _over_parts(problem, wanted, steps, whole_rows)


Weigh = Callable[[Any, Problem], Weighed]
"""Makes the rows of weights of a part with all keys."""


def _over_parts(
    problem: Problem, wanted: Wanted, steps: list[tuple[int, int]], weigh: Weigh
) -> Stats:
    """Statistics of parts of the leading axes and heads, put together."""
    xp = _arrays.namespace(problem.query)
    *axes, (_, block) = steps
    with _arrays.quiet(xp):
        found = [_of_part(xp, part, wanted, block, weigh) for _, part in parts(problem, axes)]
    counts = [max(1, -(-problem.spec.scores_shape[axis] // step)) for axis, step in axes]
    fields = zip(*found, strict=True)
    rank = problem.spec.rank
    return Stats(*(_joined(xp, list(x), [a + rank for a, _ in axes], counts) for x in fields))


def _joined(xp: Any, pieces: list[Any], axes: list[int], counts: list[int]) -> Any:
    """Put pieces in row-major order together along axes counted from the first."""
    if pieces[0] is None or not axes:
        return pieces[0]
    size = math.prod(counts[1:])
    inner = [
        _joined(xp, pieces[i * size : (i + 1) * size], axes[1:], counts[1:])
        for i in range(counts[0])
    ]
    return inner[0] if len(inner) == 1 else xp.concat(inner, axis=axes[0])


def _of_part(xp: Any, problem: Problem, wanted: Wanted, block: int, weigh: Weigh) -> Stats:
    """Statistics of some heads, one block of rows after the other."""
    spec = problem.spec
    sums = _Sums(xp, problem, wanted)
    pieces = []
    for start in range(0, spec.len_q, block):
        stop = min(start + block, spec.len_q)
        part = problem if (start, stop) == (0, spec.len_q) else problem.cut(-2, start, stop)
        found = weigh(xp, part)
        pieces.append(_rows(xp, part, wanted.top_k, found))
        sums.add(start, stop, found.weights)
    names = pieces[0] if pieces else _rows(xp, problem, wanted.top_k, weigh(xp, problem))
    rows = {
        name: xp.concat([p[name] for p in pieces], axis=spec.rank - 2) if pieces else names[name]
        for name in names
    }
    return finished(
        xp, spec, problem.sinks, rows.pop("lse"), rows, sums.received, sums.received_last,
        sums.block_map(),
    )  # fmt: skip


def _rows(xp: Any, problem: Problem, top_k: int, found: Weighed) -> dict[str, Array]:
    """Statistics of each query, (lead, num_heads, rows), the largest weights with another axis."""
    spec, weights = problem.spec, found.weights
    tiny = xp.finfo(weights.dtype).smallest_normal
    logs = xp.log(xp.where(weights < tiny, xp.full_like(weights, tiny), weights))  # nan stays nan
    kept = min(top_k, spec.len_kv)
    order = xp.argsort(weights, axis=-1, descending=True, stable=True)[..., :kept]
    top = xp.sort(weights, axis=-1, descending=True)[..., :kept]
    keys = xp.where(top > 0, order, xp.full_like(order, -1))
    shape = spec.scores_shape[:-1]
    if kept < top_k:
        more = (*shape, top_k - kept)
        device = _arrays.device_of(weights)
        top = xp.concat([top, xp.zeros(more, dtype=top.dtype, **device)], axis=-1)
        keys = xp.concat([keys, xp.full(more, -1, dtype=keys.dtype, **device)], axis=-1)
    largest = xp.zeros(shape, dtype=weights.dtype, **_arrays.device_of(weights))
    return {
        "lse": found.lse,
        "entropy": 0.0 + xp.sum(weights * -logs, axis=-1),  # 0 for a single key, not -0
        "max_weight": xp.max(weights, axis=-1) if spec.len_kv else largest,
        "top_keys": keys, "top_weights": top,
        "mean_distance": xp.sum(weights * distances(xp, problem), axis=-1),
        "visible": found.visible,
    }  # fmt: skip


class _Sums:
    """Sums over rows, for the keys and for the cells of the map."""

    def __init__(self, xp: Any, problem: Problem, wanted: Wanted) -> None:
        spec: Spec = problem.spec
        self.xp, self.spec, self.wanted = xp, spec, wanted
        self.heads = spec.scores_shape[:-2]
        self.zeros: dict[str, Any] = {"dtype": accumulation(problem.query, spec),
                                      **_arrays.device_of(problem.query)}  # fmt: skip
        self.received = xp.zeros((*self.heads, spec.len_kv), **self.zeros)
        self.received_last = None if wanted.last is None else self.received
        self.cells: dict[int, Any] = {}  # by row bin, of those that have been met
        if wanted.map_shape is not None:
            self.rows, self.columns = (
                bins(n, count) for n, count in zip((spec.len_q, spec.len_kv), wanted.map_shape,
                                                   strict=True)
            )  # fmt: skip

    def add(self, start: int, stop: int, weights: Array) -> None:
        """Count the weights of queries from start to stop, (lead, num_heads, rows, len_kv)."""
        xp = self.xp
        self.received = self.received + xp.sum(weights, axis=-2)
        if self.wanted.last is not None:
            first = min(max(start, self.spec.len_q - self.wanted.last), stop) - start
            self.received_last = self.received_last + xp.sum(weights[..., first:, :], axis=-2)
        if self.wanted.map_shape is None:
            return
        mass = weights  # of each query on each bin of keys
        if len(self.columns) < self.spec.len_kv:
            mass = xp.stack([xp.sum(weights[..., a:b], axis=-1) for a, b in self.columns], axis=-1)
        for i, (a, b) in enumerate(self.rows):
            if a < stop and b > start:
                inner = mass[..., max(a, start) - start : min(b, stop) - start, :]
                cell = xp.sum(inner, axis=-2) / (b - a)
                self.cells[i] = self.cells[i] + cell if i in self.cells else cell

    def block_map(self) -> Array | None:
        """Mean weight in each cell, (lead, num_heads, rows, columns) of the map."""
        if self.wanted.map_shape is None:
            return None
        if not self.cells:
            return self.xp.zeros((*self.heads, *self.wanted.map_shape), **self.zeros)
        return self.xp.stack([self.cells[i] for i in range(len(self.rows))], axis=-2)

