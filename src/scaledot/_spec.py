"""Options: the one place where defaults and ``None`` are resolved and arguments are checked."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from scaledot import _arrays, _checks
from scaledot._errors import type_error, value_error
from scaledot._typing import Array, MaskMod, ScoreFunction

BLOCK_MASK = 128
"""Queries and keys in one block of ``block_mask``."""


class Options(NamedTuple):
    """Options as the public functions take them."""

    causal: Any = False
    window: Any = None
    mask: Any = None
    bias: Any = None
    segment_ids: Any = None
    kv_len: Any = None
    scale: Any = None
    softcap: Any = None
    alibi_slopes: Any = None
    sinks: Any = None
    score_mod: Any = None
    mask_mod: Any = None
    block_mask: Any = None
    dropout: Any = 0.0
    seed: Any = None
    q_offset: Any = None
    kv_offset: Any = 0
    impl: Any = "auto"

    def uses_positions(self) -> list[str]:
        """Names of the options in use whose meaning depends on positions."""
        names = ("causal", "window", "alibi_slopes", "score_mod", "mask_mod", "dropout")
        used = [name for name in names if getattr(self, name) is not None]
        return [n for n in used if n not in ("causal", "dropout") or bool(getattr(self, n))]


@dataclass(frozen=True)
class Spec:
    """Scalars of one call, resolved and hashable."""

    library: str
    dtype: str
    lead: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    len_q: int
    len_kv: int
    d_k: int
    d_v: int
    matrix: bool
    scale: float
    softcap: float | None
    left: int | None
    right: int | None
    dropout: float
    impl: str

    @property
    def group_size(self) -> int:
        """Query heads that share one key head."""
        return self.num_heads // self.num_kv_heads if self.num_kv_heads else 1

    @property
    def rank(self) -> int:
        """Number of axes in the normal form (lead, num_heads, len, width)."""
        return len(self.lead) + 3

    @property
    def scores_shape(self) -> tuple[int, ...]:
        """Shape (lead, num_heads, len_q, len_kv)."""
        return (*self.lead, self.num_heads, self.len_q, self.len_kv)


@dataclass(frozen=True)
class Terms:
    """Arrays that shape the scores, each broadcastable to (lead, num_heads, len_q, len_kv).

    All have the full number of axes, so that one cut of an axis serves them all; what is not in
    use is None. ``q_start``, ``kv_start`` and ``kv_count`` are the values of offsets and lengths
    where they are known (None while a compiler is tracing), for skipping work. The last five are
    there after `complete`: kernels do without them.
    """

    mask: Array | None
    bias: Array | None
    q_segment: Array | None
    kv_segment: Array | None
    slopes: Array | None
    seed_low: Array | None
    seed_high: Array | None
    q_start: Any
    kv_start: Any
    kv_count: Any
    q_offset: Array = None
    kv_offset: Array = None
    kv_end: Array | None = None
    batch: Array = None
    head: Array = None


class Places(NamedTuple):
    """Offsets and lengths as given, arrays (lead or 1..., 1, 1, 1), and the number of queries."""

    q_offset: Array | None
    kv_offset: Array
    kv_len: Array | None
    len_q: int


@dataclass(frozen=True)
class Problem:
    """One call in normal form: arrays of rank ``spec.rank``, with their options.

    ``rows`` (a range or a NumPy array) and ``columns`` are the indices of the queries and keys
    that this part of the call is about. ``score_slope`` is the derivative of ``score_mod``.
    """

    query: Array
    key: Array
    value: Array
    spec: Spec
    terms: Terms
    rows: Any
    columns: range
    block_mask: Array | None
    sinks: Array | None
    score_mod: ScoreFunction | None
    mask_mod: MaskMod | None
    places: Places
    score_slope: ScoreFunction | None = None

    def cut(self, axis: int, start: int, stop: int) -> Problem:
        """Return the part of one axis of the scores: -1 keys, -2 queries, -3 heads, further lead.

        Views only; axes along which an array is broadcast stay as they are.
        """
        rank = self.spec.rank
        terms = replace(
            self.terms,
            **{f.name: _cut(getattr(self.terms, f.name), rank, axis, start, stop)
               for f in fields(Terms)},
        )
        query, key, value = self.query, self.key, self.value
        rows, columns = self.rows, self.columns
        if axis == -1:
            key, value = (_cut(x, rank, -2, start, stop) for x in (key, value))
            columns = columns[start:stop]
        elif axis == -2:
            query = _cut(query, rank, -2, start, stop)
            rows = rows[start:stop]
        else:
            group = self.spec.group_size if axis == -3 else 1
            query = _cut(query, rank, axis, start, stop)
            key, value = (_cut(x, rank, axis, start // group, -(-stop // group))
                          for x in (key, value))
        blocks = self.block_mask
        if axis <= -3:
            blocks = _cut(blocks, rank, axis, start, stop)
        return replace(
            self, query=query, key=key, value=value, terms=terms, rows=rows, columns=columns,
            block_mask=blocks, sinks=_cut(self.sinks, rank, axis, start, stop),
            spec=_cut_spec(self.spec, axis, stop - start),
        )


def _cut(x: Array | None, rank: int, axis: int, start: int, stop: int) -> Array | None:
    if x is None or x.shape[axis] == 1:
        return x
    index = [slice(None)] * rank
    index[axis] = slice(start, stop)
    return x[tuple(index)]


def _cut_spec(spec: Spec, axis: int, length: int) -> Spec:
    if axis == -1:
        return replace(spec, len_kv=length)
    if axis == -2:
        return replace(spec, len_q=length)
    if axis == -3:
        return replace(
            spec, num_heads=length, num_kv_heads=max(1, length // max(1, spec.group_size))
        )
    lead = list(spec.lead)
    lead[axis + 3] = length
    return replace(spec, lead=tuple(lead))


def resolve(
    query: Array,
    key: Array,
    value: Array,
    options: Options,
    *,
    rows: Any = None,
    slices: bool = False,
) -> Problem:
    """Check every argument and bring the call into normal form; no array data is computed on.

    Parameters
    ----------
    query, key, value : array
        As in `scaledot.attention`.
    options : Options
        As given by the caller.
    rows : 1-D integer array, optional
        Keep only these queries.
    slices : bool
        Whether key may be a part of a longer sequence, so that positions need a ``q_offset``.
    """
    _checks.operands(query=query, key=key, value=value)
    spec = _resolve_spec(query, key, value, options)
    if slices and options.q_offset is None and (used := options.uses_positions()):
        raise value_error(
            f"q_offset must be given with {', '.join(used)}", "q_offset=None",
            "key may be a slice, so the position of the first query cannot be guessed: pass "
            "q_offset=len_kv_total - len_q for the usual alignment.",
        )
    mask, bias = _mask_and_bias(query, options, spec)
    q_segment, kv_segment = _segments(query, options.segment_ids, spec)
    seed_low, seed_high = seed_halves(query, options.seed, spec) if spec.dropout else (None, None)
    places, known = _offsets(query, options, spec)
    terms = Terms(
        mask=mask, bias=bias, q_segment=q_segment, kv_segment=kv_segment,
        slopes=_per_head(query, "alibi_slopes", options.alibi_slopes, spec),
        seed_low=seed_low, seed_high=seed_high, **known,
    )
    seen = "(batch, head, q_pos, kv_pos) -> bool"
    score_mod, score_slope = _score_mod(options.score_mod)
    problem = Problem(
        query=_expand(query, spec.rank), key=_expand(key, spec.rank),
        value=_expand(value, spec.rank), spec=spec, terms=terms,
        rows=range(spec.len_q), columns=range(spec.len_kv),
        block_mask=_block_mask(query, options.block_mask, spec),
        sinks=_per_head(query, "sinks", options.sinks, spec),
        score_mod=score_mod, score_slope=score_slope,
        mask_mod=_checks.function("mask_mod", options.mask_mod, seen), places=places,
    )
    return problem if rows is None else _take_rows(problem, rows)


def _score_mod(given: Any) -> tuple[Any, Any]:
    """A score_mod and its derivative by the score, of which the second or both may be None."""
    signature = "(score, batch, head, q_pos, kv_pos) -> score"
    if not isinstance(given, tuple):
        return _checks.function("score_mod", given, signature), None
    if len(given) != 2 or not all(map(callable, given)):
        raise type_error(
            f"score_mod must be a function {signature} or a pair (f, df)", repr(given),
            "df has the arguments of f and returns its derivative by the score.",
        )
    return given


def complete(problem: Problem) -> Problem:
    """Make the arrays of positions, batch and heads, of a problem that has not been cut."""
    query, spec = problem.query, problem.spec
    dtype, places = _arrays.index_dtype(query), problem.places
    kv_offset, kv_len = _arrays.like(query, places.kv_offset, dtype), None
    if places.kv_len is not None:
        kv_len = _arrays.like(query, places.kv_len, dtype)
    if places.q_offset is not None:
        q_offset = _arrays.like(query, places.q_offset, dtype)
    else:
        q_offset = kv_offset + (spec.len_kv if kv_len is None else kv_len) - places.len_q
    terms = replace(
        problem.terms, q_offset=q_offset, kv_offset=kv_offset,
        kv_end=None if kv_len is None else kv_offset + kv_len,
        batch=_arrays.like(query, np.arange(math.prod(spec.lead)).reshape(*spec.lead, 1, 1, 1)),
        head=_arrays.like(query, _expand(np.arange(spec.num_heads)[:, None, None], spec.rank)),
    )
    return replace(problem, terms=terms)


def _resolve_spec(query: Array, key: Array, value: Array, options: Options) -> Spec:
    lead = _checks.operand_shapes(query, key, value)
    left, right = _checks.window(options.window, _checks.flag("causal", options.causal))
    d_k = query.shape[-1]
    if options.scale is not None:
        scale = _checks.real("scale", options.scale)
    else:
        scale = 1 / math.sqrt(d_k) if d_k else 0.0  # without features every score is 0
    return Spec(
        library=str(_arrays.library(query)), dtype=_arrays.dtype_name(query), lead=lead,
        num_heads=query.shape[-3] if query.ndim > 2 else 1,
        num_kv_heads=key.shape[-3] if key.ndim > 2 else 1,
        len_q=query.shape[-2], len_kv=key.shape[-2], d_k=d_k, d_v=value.shape[-1],
        matrix=query.ndim == key.ndim == value.ndim == 2,
        scale=scale, softcap=_checks.softcap(options.softcap), left=left, right=right,
        dropout=_checks.dropout(options.dropout, options.seed),
        impl=_checks.implementation(options.impl),
    )


def _expand(x: Array, rank: int) -> Array:
    """Insert axes of length 1 at the left until x has ``rank`` axes; a view."""
    return x[(None,) * (rank - x.ndim) + (...,)] if x.ndim < rank else x


def accumulation(query: Array, spec: Spec) -> Any:
    """Dtype in which scores, weights and sums are held."""
    return _arrays.accumulation_dtype(_arrays.namespace(query), spec.dtype)


def _mask_and_bias(query: Array, options: Options, spec: Spec) -> tuple[Any, Any]:
    """Mask and bias in normal form, as they lie in memory."""
    shape = spec.scores_shape[1:] if spec.matrix else spec.scores_shape
    axes = "(len_q, len_kv)" if spec.matrix else "(..., num_heads, len_q, len_kv)"
    found: list[Array | None] = []
    for name in ("mask", "bias"):
        given = getattr(options, name)
        if given is None:
            found.append(None)
            continue
        x = _checks.option_array(name, given, query)
        if name == "mask" and not _arrays.is_bool(x):
            raise type_error(
                "mask must be boolean (True = may be seen)", _arrays.describe(x),
                "Pass numbers to be added to the scores as bias=; turn a 0/1 mask into mask != 0.",
            )
        if name == "bias" and not _arrays.is_float(x):
            raise type_error(
                "bias must have a floating-point dtype", _arrays.describe(x),
                "Pass a boolean mask as mask=.",
            )
        _checks.broadcastable(name, x, shape, axes)
        found.append(_expand(_arrays.like(query, x), spec.rank))
    return found[0], found[1]


def _per_head(query: Array, name: str, given: Any, spec: Spec) -> Any:
    """Slopes or sinks (num_heads,) as (1..., num_heads, 1, 1) in the accumulation dtype."""
    if given is None:
        return None
    x = _checks.option_array(name, given, query)
    if not _arrays.is_float(x):
        raise type_error(
            f"{name} must have a floating-point dtype", _arrays.describe(x), "Use astype."
        )
    if tuple(x.shape) != (spec.num_heads,):
        raise value_error(
            f"{name} must have the shape (num_heads,) = ({spec.num_heads},)", tuple(x.shape),
            "One number for each query head.",
        )
    xp, dtype = _arrays.namespace(x), accumulation(query, spec)
    if _arrays.dtype_name(x) == "float64" and spec.dtype != "float64":
        # A finite number stays finite, like a bias: only a true -inf takes nothing.
        bounds = np.finfo(np.float32)
        x = xp.where(xp.isinf(x), x, xp.clip(x, float(bounds.min), float(bounds.max)))
    return _expand(_arrays.like(query, x, dtype)[:, None, None], spec.rank)


def _integers(query: Array, name: str, given: Any, spec: Spec) -> tuple[Any, Any]:
    """Offsets or lengths as an array (lead or 1..., 1, 1, 1), and their values where known."""
    if _arrays.library(given) is None:
        number = _checks.integer(name, given)
        _checks.reach(query, name, number)
        x = np.full((1,) * spec.rank, number)
        return x, x
    x = _checks.option_array(name, given, query)
    if not _arrays.is_integer(x):
        raise type_error(
            f"{name} must be an int or an integer array", _arrays.describe(x), "Use astype(int)."
        )
    _checks.broadcastable(name, x, spec.lead, "the leading axes, before num_heads,")
    x = _expand(x[..., None, None, None], spec.rank)
    values = _arrays.host(x)
    if values is not None:
        for extreme in (values.min(initial=0), values.max(initial=0)):
            _checks.reach(query, name, extreme)
        values = values.astype(np.int64)
    return x, values


def _offsets(query: Array, options: Options, spec: Spec) -> tuple[Places, dict[str, Any]]:
    """Offsets and lengths, and what of the positions they give is known already."""
    kv_offset, kv_start = _integers(query, "kv_offset", options.kv_offset, spec)
    kv_len, known_count = None, None
    if options.kv_len is not None:
        kv_len, known_count = _integers(query, "kv_len", options.kv_len, spec)
        bad = known_count is not None and ((known_count < 0) | (known_count > spec.len_kv))
        if np.any(bad):
            raise value_error(
                f"kv_len must lie between 0 and len_kv = {spec.len_kv}",
                f"{known_count.min()} to {known_count.max()}",
                "It counts the valid keys from the start.",
            )
    q_offset = None
    if options.q_offset is None:
        known = spec.len_kv if options.kv_len is None else known_count
        q_start = None if kv_start is None or known is None else kv_start + known - spec.len_q
    else:
        q_offset, q_start = _integers(query, "q_offset", options.q_offset, spec)
    return Places(q_offset, kv_offset, kv_len, spec.len_q), {
        "q_start": q_start, "kv_start": kv_start, "kv_count": known_count,
    }  # fmt: skip


def _segments(query: Array, given: Any, spec: Spec) -> tuple[Any, Any]:
    """Segment ids of queries (lead..., 1, len_q, 1) and of keys (lead..., 1, 1, len_kv)."""
    if given is None:
        return None, None
    if isinstance(given, (tuple, list)) and len(given) != 2:
        raise type_error(
            "segment_ids must be one integer array or a pair (query's, key's)",
            f"{len(given)} items", "One array serves both sides.",
        )
    pair = given if isinstance(given, (tuple, list)) else (given, given)
    sides = []
    for side, x, length in (("query", pair[0], spec.len_q), ("key", pair[1], spec.len_kv)):
        name = f"segment_ids of {side}"
        x = _checks.option_array(name, x, query)
        if not _arrays.is_integer(x):
            raise type_error(f"{name} must be integers", _arrays.describe(x), "Use astype(int).")
        _checks.broadcastable(name, x, (*spec.lead, length), "(..., len)")
        if x.ndim == 0:
            x = x[None]
        placed = _arrays.like(query, x)
        placed = placed[..., None, :, None] if side == "query" else placed[..., None, None, :]
        sides.append(_expand(placed, spec.rank))
    return sides[0], sides[1]


def _block_mask(query: Array, given: Any, spec: Spec) -> Any:
    """Block mask in normal form, (lead..., num_heads, blocks of queries, blocks of keys)."""
    if given is None:
        return None
    x = _checks.option_array("block_mask", given, query)
    if not _arrays.is_bool(x):
        raise type_error(
            "block_mask must be boolean (True = may be seen)", _arrays.describe(x), "Use != 0."
        )
    blocks = tuple(-(-n // BLOCK_MASK) for n in (spec.len_q, spec.len_kv))
    shape = (*spec.lead, spec.num_heads, *blocks)
    _checks.broadcastable(
        "block_mask", x, shape[1:] if spec.matrix else shape,
        f"(..., num_heads, blocks of {BLOCK_MASK} queries, blocks of {BLOCK_MASK} keys)",
    )
    return _expand(_arrays.like(query, x), spec.rank)


def batch_seeds(seed: int, count: int) -> Any:
    """64-bit seeds of the entries of the flattened leading axes, shape (count,) of uint64.

    A step of splitmix64 on ``seed + (entry + 1) * constant``, modulo 2**64.
    """
    u64 = np.uint64
    z = u64(seed % 2**64) + np.arange(1, count + 1, dtype=u64) * u64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> u64(30))) * u64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> u64(27))) * u64(0x94D049BB133111EB)
    return z ^ (z >> u64(31))


def seed_halves(query: Array, seed: Any, spec: Spec) -> tuple[Any, Any]:
    """Low and high 32 bits of each entry's seed, (lead or 1..., 1, 1, 1) of int32."""
    xp = _arrays.namespace(query)
    if _arrays.library(seed) is None:
        values = batch_seeds(_checks.integer("seed", seed), math.prod(spec.lead))
        seed = values.reshape(spec.lead)
    x = _checks.option_array("seed", seed, query)
    if not _arrays.is_integer(x):
        raise type_error("seed must be an int or integers", _arrays.describe(x), "Use astype(int).")
    _checks.broadcastable("seed", x, spec.lead, "the leading axes, before num_heads,")
    if _arrays.library(x) == "numpy":
        wide = np.asarray(x).astype(np.uint64)
        halves = (wide, wide >> np.uint64(32))
        low, high = (half.astype(np.uint32).view(np.int32) for half in halves)
    else:
        low = xp.astype(x, xp.int32)
        high = xp.astype(x >> (32 if "64" in _arrays.dtype_name(x) else 31), xp.int32)
    low, high = (_expand(part[..., None, None, None], spec.rank) for part in (low, high))
    return _arrays.like(query, low, xp.int32), _arrays.like(query, high, xp.int32)


def _take_rows(problem: Problem, rows: Any) -> Problem:
    """Keep the queries numbered ``rows``."""
    terms = problem.terms
    xp = _arrays.namespace(problem.query)
    index = _arrays.like(problem.query, rows)

    def take(x: Array | None) -> Array | None:
        return x if x is None or x.shape[-2] == 1 else xp.take(x, index, axis=-2)

    terms = replace(
        terms, mask=take(terms.mask), bias=take(terms.bias), q_segment=take(terms.q_segment)
    )
    return replace(
        problem, query=xp.take(problem.query, index, axis=-2), terms=terms, rows=rows,
        spec=replace(problem.spec, len_q=len(rows)),
    )
