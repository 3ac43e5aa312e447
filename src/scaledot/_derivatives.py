"""Derivatives by their formulas in array operations, one tile of scores at a time.

With weights ``P = exp(S - lse)`` kept by dropout as ``P∘D``, and ``delta = rowsum(dO∘O) - dlse``:
``dS = P∘(D∘(dO Vᵀ) - delta)``, ``dV = (P∘D)ᵀ dO``, ``dQ = scale·dS K``, ``dK = scale·dSᵀ Q``
(arXiv 2205.14135, appendix B; P is computed anew from lse). The tangent of a row is a mean under
the same weights, and the second derivative differentiates the product of the two.

Arrays carry no graph here; no len_q × len_kv array is held unless all is one tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from scaledot import _arrays, _blockwise
from scaledot._reference import (
    distances,
    exponentials,
    grouped_matmul,
    kept_of,
    mod_slopes,
    modified,
    not_finite,
    only_finite,
    plain_scores,
    raw_scores,
    seen_of,
)
from scaledot._spec import Problem, accumulation
from scaledot._typing import Array

Region = tuple[slice, ...]


class Grads(NamedTuple):
    """Gradients, each with the shape and dtype of its argument; None where there is none.

    Attributes
    ----------
    query, key, value : array
        As the arguments.
    bias, sinks, alibi_slopes : array or None
        As the arguments; None where they are not in use.
    """

    query: Array | None = None
    key: Array | None = None
    value: Array | None = None
    bias: Array | None = None
    sinks: Array | None = None
    alibi_slopes: Array | None = None


class Second(NamedTuple):
    """What reaches the inputs of a backward pass from its results."""

    grads: Grads
    grad_out: Array | None
    grad_lse: Array


class Rows(NamedTuple):
    """What is known of each query, (lead, num_heads, len_q, width) or width 1."""

    lse: Array  # 0 where a row is empty
    grad_out: Array = None
    delta: Array = None  # rowsum(dO∘O) - dlse
    tangent: Array = None  # tangent of lse
    mean: Array = None  # of what the second derivative weighs
    mass: Array | None = None  # sum of exp(S - lse), where lse is too large to make it 1


class Tile(NamedTuple):
    """One tile of scores and what is needed to go back through it."""

    problem: Problem
    seen: Array | None
    weights: Array  # P
    factor: Array | None  # D: 0 or 1 / (1 - dropout); None without dropout
    angle: Array | None  # tanh(score / softcap)
    slope: Array | None  # of score_mod


def backward(problem: Problem, rows: Rows, wanted: Any, *, in_blocks: bool) -> Grads:
    """Gradients of query, key, value, bias and slopes, in the shapes of the problem's arrays."""
    xp = _arrays.namespace(problem.query)
    sums = _Sums(xp, problem, wanted)
    with _arrays.quiet(xp):
        for place, part in _parts(problem, in_blocks):
            row = _rows(rows, place)
            tile = _tile(xp, part, row)
            weights = _kept(tile, tile.weights)
            if sums.wants("value"):
                sums.add(place, value=_outer(xp, part, weights, row.grad_out))
            products = _kept(tile, grouped_matmul(xp, row.grad_out, _turned(xp, part.value)))
            grads = tile.weights * (products - row.delta)
            grads = _hidden(xp, tile, grads if tile.slope is None else grads * tile.slope)
            sums.add_terms(place, part, grads)
            grads = grads * _steepness(tile)
            if sums.wants("query"):
                sums.add(place, query=_times(xp, grads, part.key))
            if sums.wants("key"):
                sums.add(place, key=_outer(xp, part, grads, part.query))
    return sums.grads()


def tangent(
    problem: Problem, rows: Rows, tangents: Grads, *, in_blocks: bool
) -> tuple[Array, Array]:
    """Sums over keys of what the tangents move, without sinks.

    Returns
    -------
    tuple of arrays, (lead, num_heads, len_q, d_v) and (lead, num_heads, len_q, 1)
        ``Σ P∘D (dV + dS V)`` and ``Σ P dS``.
    """
    xp, spec = _arrays.namespace(problem.query), problem.spec
    shape, device = spec.scores_shape[:-1], _arrays.device_of(problem.query)
    dtype = accumulation(problem.query, spec)
    total = xp.zeros((*shape, spec.d_v), dtype=dtype, **device)
    mean = xp.zeros((*shape, 1), dtype=dtype, **device)
    with _arrays.quiet(xp):
        for place, part in _parts(problem, in_blocks):
            tile = _tile(xp, part, _rows(rows, place))
            given = _tangents_of(tangents, problem, place)
            moved = tile.weights * _moved(xp, tile, given)
            region = (*place[:-1], ...)
            mean[region] = mean[region] + xp.sum(moved, axis=-1, keepdims=True)
            found = _times(xp, _kept(tile, moved), part.value)
            if given.value is not None:
                found = found + _times(xp, _kept(tile, tile.weights), given.value)
            total[region] = total[region] + found
    return total, mean


def masses(problem: Problem, rows: Rows, *, in_blocks: bool) -> Array:
    """Sums of ``exp(S - lse)`` over the keys, (lead, num_heads, len_q, 1)."""
    xp = _arrays.namespace(problem.query)
    total = xp.zeros_like(rows.lse)
    with _arrays.quiet(xp):
        for place, part in _parts(problem, in_blocks):
            region = (*place[:-1], ...)
            weights = _tile(xp, part, _rows(rows, place)).weights
            total[region] = total[region] + xp.sum(weights, axis=-1, keepdims=True)
    return total


def second(
    problem: Problem, rows: Rows, tangents: Grads, wanted: Any, *, in_blocks: bool
) -> Grads:
    """Gradients of the inner product of ``(grad_out, grad_lse)`` and the tangents of the result."""
    xp, scale, cap = _arrays.namespace(problem.query), problem.spec.scale, problem.spec.softcap
    sums = _Sums(xp, problem, wanted)
    with _arrays.quiet(xp):
        for place, part in _parts(problem, in_blocks):
            row = _rows(rows, place)
            tile = _tile(xp, part, row)
            given = _tangents_of(tangents, problem, place)
            moved = _moved(xp, tile, given)
            products = _kept(tile, grouped_matmul(xp, row.grad_out, _turned(xp, part.value)))
            first = _hidden(xp, tile, tile.weights * (products - row.delta))
            weighed = moved * (products - row.delta) - row.tangent * products - row.mean
            if given.value is not None:
                others = grouped_matmul(xp, row.grad_out, _turned(xp, given.value))
                weighed = weighed + _kept(tile, others)
            grads = _hidden(xp, tile, tile.weights * weighed)
            sums.add_terms(place, part, grads)
            grads = grads * _steepness(tile)
            if tile.angle is not None:
                bend = -2 * tile.angle * (1 - tile.angle**2) / cap
                grads = grads + scale * first * bend * _moved_products(xp, tile, given)
            first = first * _steepness(tile)
            if sums.wants("value"):
                shares = _kept(tile, tile.weights * (moved - row.tangent))
                sums.add(place, value=_outer(xp, part, _hidden(xp, tile, shares), row.grad_out))
            if sums.wants("query"):
                sums.add(place, query=_times(xp, grads, part.key))
                if given.key is not None:
                    sums.add(place, query=_times(xp, first, given.key))
            if sums.wants("key"):
                sums.add(place, key=_outer(xp, part, grads, part.query))
                if given.query is not None:
                    sums.add(place, key=_outer(xp, part, first, given.query))
    return sums.grads()


class _Sums:
    """Gradients that tiles add to, each in the shape of its argument in normal form."""

    def __init__(self, xp: Any, problem: Problem, wanted: Any) -> None:
        arguments = Grads(
            problem.query, problem.key, problem.value, problem.terms.bias, None,
            problem.terms.slopes,
        )  # fmt: skip
        self.xp, self.group = xp, problem.spec.group_size
        dtype = accumulation(problem.query, problem.spec)
        self.sums = {
            name: xp.zeros(tuple(x.shape), dtype=dtype, **_arrays.device_of(problem.query))
            for name, x in arguments._asdict().items()
            if x is not None and name in wanted
        }

    def wants(self, name: str) -> bool:
        """Whether the gradient of an argument is asked for."""
        return name in self.sums

    def add(self, place: Region, **found: Array) -> None:
        """Add what is found for the scores at ``place``, summed where the argument is broadcast."""
        for name, x in found.items():
            into = self.sums[name]
            index = _index(into, name, place, self.group)
            into[index] = into[index] + reduced(self.xp, x, tuple(into[index].shape))

    def add_terms(self, place: Region, part: Problem, grads: Array) -> None:
        """Add gradients of scores to those of the terms that were added to these."""
        if self.wants("bias"):
            self.add(place, bias=grads)
        if self.wants("alibi_slopes"):
            self.add(place, alibi_slopes=-grads * distances(self.xp, part))

    def grads(self) -> Grads:
        """All sums."""
        return Grads(**self.sums)


def reduced(xp: Any, x: Array, shape: tuple[int, ...]) -> Array:
    """Sum x over the axes along which something of this shape was broadcast."""
    rank = max(x.ndim, len(shape))
    x = x[(None,) * (rank - x.ndim) + (...,)]
    padded = (1,) * (rank - len(shape)) + shape
    axes = tuple(i for i, n in enumerate(padded) if n == 1 and x.shape[i] != 1)
    x = xp.sum(x, axis=axes, keepdims=True) if axes else x
    return xp.reshape(x, shape) if rank != len(shape) else x


def _index(x: Array, name: str, place: Region, group: int) -> Region:
    """Where the scores at ``place`` (lead, heads, queries, keys) lie in an argument."""
    *lead, heads, queries, keys = place
    if name in ("key", "value"):
        heads = slice(heads.start // max(1, group), -(-heads.stop // max(1, group)))
    rows = {"query": (queries, slice(None)), "key": (keys, slice(None)),
            "value": (keys, slice(None))}.get(name, (queries, keys))  # fmt: skip
    whole = (*lead, heads, *rows)
    return tuple(
        slice(None) if n == 1 else s for n, s in zip(x.shape, whole, strict=True)
    )


def _parts(problem: Problem, in_blocks: bool) -> Iterator[tuple[Region, Problem]]:
    """Tiles with their places among the scores (lead, heads, queries, keys)."""
    spec = problem.spec
    if not math.prod(spec.scores_shape):
        return
    if not in_blocks:
        yield tuple(slice(0, n) for n in spec.scores_shape), problem
        return
    for region, part in _blockwise.parts(problem, _blockwise.grid(spec)):
        for start, stop in _blockwise.key_slices(part):
            yield (*region, slice(start, stop)), part.cut(-1, start, stop)


def _rows(rows: Rows, place: Region) -> Rows:
    return Rows(*(None if x is None else x[(*place[:-1], ...)] for x in rows))


def _tangents_of(tangents: Grads, problem: Problem, place: Region) -> Grads:
    """The tangents that a tile needs."""
    group = problem.spec.group_size
    found = {
        name: x if x is None or name == "sinks" else x[_index(x, name, place, group)]
        for name, x in tangents._asdict().items()
    }
    return Grads(**found)


def _tile(xp: Any, problem: Problem, rows: Rows) -> Tile:
    """Weights of a tile, and the derivatives of its scores."""
    seen, spec = seen_of(problem), problem.spec
    products = raw_scores(xp, problem, seen)
    scores = plain_scores(xp, problem, products, seen)
    angle = None if spec.softcap is None else xp.tanh(products * spec.scale / spec.softcap)
    slope = None if problem.score_mod is None else mod_slopes(xp, problem, scores)
    weights = exponentials(xp, modified(xp, problem, scores) - rows.lse, seen)
    weights = weights if rows.mass is None else weights / rows.mass
    factor = None
    if spec.dropout:
        kept = xp.astype(kept_of(xp, problem), weights.dtype)
        factor = kept * (1 / (1 - spec.dropout) if spec.dropout < 1 else 0.0)
    return Tile(problem, seen, weights, factor, angle, slope)


def _kept(tile: Tile, x: Array) -> Array:
    """What dropout leaves of x."""
    return x if tile.factor is None else x * tile.factor


def _hidden(xp: Any, tile: Tile, x: Array) -> Array:
    """0 where a key may not be seen, whatever x is there."""
    return x if tile.seen is None else xp.where(tile.seen, x, xp.zeros_like(x[..., :1]))


def _steepness(tile: Tile) -> Any:
    """Derivative of the score after the cap by the product of query and key."""
    scale = tile.problem.spec.scale
    return scale if tile.angle is None else scale * (1 - tile.angle**2)


def _moved_products(xp: Any, tile: Tile, given: Grads) -> Array:
    """Tangents of the scaled products, ``scale (dQ Kᵀ + Q dKᵀ)``, 0 where nothing is seen."""
    query, key = tile.problem.query, tile.problem.key
    moved = xp.zeros_like(tile.weights[..., :1])
    if given.query is not None:
        moved = moved + grouped_matmul(xp, given.query, _turned(xp, key))
    if given.key is not None:
        moved = moved + grouped_matmul(xp, _packed(xp, query), _turned(xp, given.key))
    return _hidden(xp, tile, moved * tile.problem.spec.scale)


def _moved(xp: Any, tile: Tile, given: Grads) -> Array:
    """Tangents of the scores, 0 where nothing is seen."""
    moved = _moved_products(xp, tile, given)
    if tile.angle is not None:
        moved = moved * (1 - tile.angle**2)
    if given.bias is not None:
        moved = moved + given.bias
    if given.alibi_slopes is not None:
        moved = moved - given.alibi_slopes * distances(xp, tile.problem)
    return _hidden(xp, tile, moved if tile.slope is None else moved * tile.slope)


def _packed(xp: Any, x: Array) -> Array:
    """Contiguous, in the accumulation dtype."""
    return _arrays.packed(xp, x, _arrays.accumulation_dtype(xp, _arrays.dtype_name(x)))


def _turned(xp: Any, x: Array) -> Array:
    return xp.matrix_transpose(_packed(xp, x))


def _times(xp: Any, weights: Array, columns: Array) -> Array:
    """Sum of rows of keys or values, weighted: (..., num_heads, len_q, width)."""
    return _combined(xp, lambda a, b: grouped_matmul(xp, a, b), weights, columns)


def _outer(xp: Any, problem: Problem, weights: Array, rows: Array) -> Array:
    """Sum of rows of queries, weighted, over a group's heads: (..., num_kv_heads, len_kv, d)."""
    return _combined(xp, lambda a, b: _outer_product(xp, problem, a, b), weights, rows)


def _combined(
    xp: Any, product: Callable[[Array, Array], Array], weights: Array, rows: Array
) -> Array:
    """A product in which a weight of 0 counts as nothing, also for nan and infinities."""
    rows = _arrays.packed(xp, rows, weights.dtype)
    if not not_finite(xp, rows):
        return product(weights, rows)
    total = product(weights, only_finite(xp, rows))
    used, odd = xp.astype(weights != 0, weights.dtype), ~xp.isfinite(rows)
    reached = product(used, xp.astype(odd, weights.dtype)) > 0
    return xp.where(reached, xp.full_like(total, math.nan), total)


def _outer_product(xp: Any, problem: Problem, weights: Array, rows: Array) -> Array:
    spec = problem.spec
    kv, m = spec.num_kv_heads, spec.group_size * spec.len_q
    weights = xp.reshape(weights, (*weights.shape[:-3], kv, m, weights.shape[-1]))
    rows = xp.reshape(rows, (*rows.shape[:-3], kv, m, rows.shape[-1]))
    return xp.matmul(xp.matrix_transpose(weights), rows)
