"""Attention over a spread sequence by exchanging tokens for heads and back."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from scaledot import _arrays, _ring_plan
from scaledot._attention import attention
from scaledot._errors import value_error
from scaledot._ring_plan import Layout, Run, Shards
from scaledot._ring_transport import Shape
from scaledot._spec import Options, Spec
from scaledot._typing import Array, ArrayT, Impl


def ulysses_attention(
    query: ArrayT,
    key: ArrayT,
    value: ArrayT,
    *,
    group: Any = None,
    layout: Layout = "contiguous",
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    bias: Array | None = None,
    segment_ids: Array | tuple[Array, Array] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    dropout: float = 0.0,
    seed: int | Array | None = None,
    impl: Impl = "auto",
) -> ArrayT:
    r"""Attention of one sequence that is spread over several processes, each taking some heads.

    ``softmax(Q Kᵀ / √d_k) V``: every rank gets all tokens of its share of the heads, computes, and
    sends the rows of the result back. Called by every rank of the group, as is the backward pass.

    Parameters
    ----------
    query, key, value : array
        As in `ring_attention`. Key heads are dealt out in order: there must be as many as ranks.
    group, layout : optional
        As in `ring_attention`.
    causal, window, bias, segment_ids, scale, softcap, alibi_slopes, sinks : optional
        As in `ring_attention`.
    dropout, seed, impl : optional
        As in `ring_attention`.

    Returns
    -------
    array, shape (..., num_heads, len_q, d_v)
        This rank's rows, in the dtype of query.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As in `ring_attention`, and for fewer key heads than ranks.

    Notes
    -----
    Moves less than a ring does, and holds all tokens of some heads: 1/world_size of the whole
    query, key, value and result. A bias is exchanged too. Gradients of slopes and sinks are those
    of this rank's heads, 0 elsewhere: sum them over ranks.

    References
    ----------
    arXiv 2309.14509.

    Examples
    --------
    >>> import numpy as np, scaledot as sd
    >>> x = np.random.default_rng(0).standard_normal((2, 12, 4))
    >>> shards = np.split(x, 2, axis=-2)
    >>> def work(group):
    ...     shard = shards[group.rank]
    ...     return sd.ulysses_attention(shard, shard, shard, group=group, causal=True)
    >>> out = np.concatenate(sd.InProcessRing(2).run(work), axis=-2)
    >>> np.allclose(out, sd.attention(x, x, x, causal=True))
    True
    """
    options = Options(
        causal=causal, window=window, bias=bias, segment_ids=segment_ids, scale=scale,
        softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks, dropout=dropout, seed=seed,
        impl=impl,
    )  # fmt: skip
    shards = _ring_plan.begin("ulysses_attention", group, query, key, value, options, layout)
    spec, world_size = shards.problem.spec, shards.world_size
    if spec.num_kv_heads < world_size:
        raise value_error(
            f"num_kv_heads must be at least the number of ranks, {world_size}", spec.num_kv_heads,
            "ring_attention splits no heads.",
        )
    if world_size == 1 and layout == "contiguous":
        return attention(query, key, value, **_options(shards, options), seed=seed)
    given = [_with_heads(x) for x in (query, key, value)]
    if bias is not None:
        rows = _with_heads(_arrays.like(cast(Any, query), bias))
        given.append(_arrays.namespace(query).broadcast_to(
            rows, (*rows.shape[:-2], spec.len_q, rows.shape[-1])
        ))  # fmt: skip
    exchange = _Exchange.of(shards, given)
    whole = exchange.tokens(given)
    out = _attention(shards, whole, options)
    back = exchange.replaced(out)
    rows = back.rows([out])[0]
    return cast(ArrayT, rows[0, ...] if spec.matrix else rows)


def _with_heads(x: Any) -> Any:
    return x[(None,) * (3 - x.ndim) + (...,)] if x.ndim < 3 else x


def _options(shards: Shards, options: Options) -> dict[str, Any]:
    """Options of `attention` that are the same for all heads, but for the seed."""
    names = ("causal", "window", "scale", "softcap", "dropout", "impl")
    return {name: getattr(options, name) for name in names} | {
        name: getattr(options, name)
        for name in ("bias", "segment_ids", "alibi_slopes", "sinks")
        if shards.world_size == 1
    }


def _attention(shards: Shards, whole: Sequence[Array], options: Options) -> Array:
    """Attention of this rank's heads over all tokens, (..., own heads, all queries, d_v)."""
    query, key, value, *bias = whole
    spec = shards.problem.spec
    start, stop = _heads(spec.num_heads, spec, shards.world_size)[shards.rank]
    segments = _all_segments(shards)
    parts = []
    for low, high in _ring_plan.seeded(start, stop, spec):
        own = slice(low - start, high - start)
        kv = slice(own.start // spec.group_size, -(-own.stop // spec.group_size))
        parts.append(attention(
            query[..., own, :, :], key[..., kv, :, :], value[..., kv, :, :],
            **_options(shards, options) | {
                "bias": _some(bias[0], own) if bias else None, "segment_ids": segments,
                "alibi_slopes": _part(options.alibi_slopes, low, high),
                "sinks": _part(options.sinks, low, high),
            },
            seed=_ring_plan.seeds_from(query, options.seed, low, spec) if spec.dropout else None,
        ))  # fmt: skip
    return parts[0] if len(parts) == 1 else _arrays.namespace(query).concat(parts, axis=-3)


def _part(x: Any, low: int, high: int) -> Any:
    return None if x is None else x[low:high]


def _some(bias: Array, heads: slice) -> Array:
    return bias if bias.shape[-3] == 1 else bias[..., heads, :, :]


def _heads(count: int, spec: Spec, world_size: int) -> list[tuple[int, int]]:
    """First and last of the ``count`` heads of each rank; groups stay together."""
    size = count // spec.num_kv_heads if spec.num_kv_heads else 1
    share, more = divmod(spec.num_kv_heads, world_size)
    sizes = [size * (share + (rank < more)) for rank in range(world_size)]
    ends = list(itertools.accumulate(sizes))
    return [(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _all_segments(shards: Shards) -> tuple[Array, Array] | None:
    """Ids of all queries and of all keys, in the order of the sequence."""
    if shards.segments is None:
        return None
    xp, spec = _arrays.namespace(shards.segments), shards.problem.spec
    rows = cast(Array, shards.problem.terms.q_segment)[..., 0, :, 0]
    rows = xp.astype(xp.broadcast_to(rows, (*rows.shape[:-1], spec.len_q)), xp.int64)
    own = [rows, shards.segments]
    runs = (shards.q_runs, shards.kv_runs)
    lengths = (shards.q_lengths, shards.kv_lengths)

    def shapes(rank: int) -> list[Shape]:
        return [(*x.shape[:-1], n[rank]) for x, n in zip(own, lengths, strict=True)]

    found = _exchanged(shards, lambda rank: own, shapes)
    q, kv = (_in_order(xp, list(x), r, -1) for x, r in zip(zip(*found, strict=True), runs,
                                                           strict=True))  # fmt: skip
    return q, kv


def _exchanged(
    shards: Shards, sent: Callable[[int], list[Array]], shapes: Callable[[int], list[Shape]]
) -> list[list[Array]]:
    """What each rank has for this one, in rank order, given what this one has for each."""
    rank, world_size = shards.rank, shards.world_size
    waits = [
        shards.transport.rotate(
            sent((rank + hop) % world_size), shapes((rank - hop) % world_size), hop
        )
        for hop in range(1, world_size)
    ]
    found = {rank: sent(rank)}
    for hop, wait in enumerate(waits, start=1):
        found[(rank - hop) % world_size] = wait()
    return [found[other] for other in range(world_size)]


def _in_order(xp: Any, parts: list[Array], runs: Sequence[Sequence[Run]], axis: int) -> Array:
    """Join the shards of all ranks in the order of the whole sequence."""
    tail = (slice(None),) * (-1 - axis)
    pieces = sorted(
        (run.position, rank, run) for rank, own in enumerate(runs) for run in own
    )  # fmt: skip
    joined = [parts[rank][(..., run.inside, *tail)] for _, rank, run in pieces]
    return xp.concat(joined, axis=axis) if joined else parts[0]


class _Sizes(NamedTuple):
    """How one array is spread: by rows before the exchange, by heads after it."""

    heads: list[tuple[int, int]] | None  # None: every rank has the same heads
    lengths: tuple[int, ...]
    runs: list[list[Run]]
    shape: Shape  # of this rank's rows


class _Exchange:
    """Arrays (..., heads, len, width), exchanged between own rows and own heads."""

    def __init__(self, shards: Shards, sizes: list[_Sizes]) -> None:
        self._shards, self._sizes = shards, sizes

    @classmethod
    def of(cls, shards: Shards, arrays: Sequence[Array]) -> _Exchange:
        """Of query, key, value and maybe bias."""
        spec, q, kv = shards.problem.spec, shards.q_lengths, shards.kv_lengths
        sizes = []
        for place, x in enumerate(arrays):
            heads = None
            if place < 3 or x.shape[-3] != 1:
                heads = _heads(x.shape[-3], spec, shards.world_size)
            of_keys = place in (1, 2)
            sizes.append(_Sizes(
                heads, kv if of_keys else q, shards.kv_runs if of_keys else shards.q_runs,
                tuple(x.shape),
            ))  # fmt: skip
        return cls(shards, sizes)

    def replaced(self, out: Array) -> _Exchange:
        """That of a result (..., own heads, all queries, d_v)."""
        query, spec = self._sizes[0], self._shards.problem.spec
        shape = (*out.shape[:-3], spec.num_heads, spec.len_q, spec.d_v)
        return _Exchange(self._shards, [query._replace(shape=shape)])

    def tokens(self, arrays: Sequence[Array]) -> Sequence[Array]:
        """All tokens of this rank's heads, given all heads of its rows."""
        return self._either(self._to_tokens, self._to_rows, arrays)

    def rows(self, arrays: Sequence[Array]) -> Sequence[Array]:
        """All heads of this rank's rows, given all tokens of its heads."""
        return self._either(self._to_rows, self._to_tokens, arrays)

    def _either(self, forth: Any, back: Any, arrays: Sequence[Array]) -> Sequence[Array]:
        """Go forth; each way is the derivative of the other."""
        if _ring_plan.is_tracked(*arrays):
            from scaledot import _ring_rules  # loads PyTorch

            def backward(_: Any, __: Any, grads: Any, ___: Any) -> Any:
                return back(*grads)

            return _ring_rules.differentiable(forth, backward, *arrays)
        return cast(Sequence[Array], forth(*arrays))

    def _to_tokens(self, *arrays: Array) -> tuple[Array, ...]:
        rank = self._shards.rank

        def sent(other: int) -> list[Array]:
            return [_of_heads(x, s, other) for x, s in zip(arrays, self._sizes, strict=True)]

        def shapes(other: int) -> list[Shape]:
            return [self._piece(s, rank, other) for s in self._sizes]

        found = _exchanged(self._shards, sent, shapes)
        xp = _arrays.namespace(arrays[0])
        return tuple(
            _in_order(xp, [parts[i] for parts in found], s.runs, -2)
            for i, s in enumerate(self._sizes)
        )

    def _to_rows(self, *arrays: Array) -> tuple[Array, ...]:
        xp, rank = _arrays.namespace(arrays[0]), self._shards.rank

        def rows(x: Array, runs: Sequence[Run]) -> Array:
            parts = [
                x[..., run.position : run.position + run.stop - run.start, :] for run in runs
            ] or [x[..., :0, :]]
            return parts[0] if len(parts) == 1 else xp.concat(parts, axis=-2)

        def sent(other: int) -> list[Array]:
            return [rows(x, s.runs[other]) for x, s in zip(arrays, self._sizes, strict=True)]

        def shapes(other: int) -> list[Shape]:
            return [self._piece(s, other, rank) for s in self._sizes]

        found = _exchanged(self._shards, sent, shapes)
        results = []
        for i, s in enumerate(self._sizes):
            parts = [of_rank[i] for of_rank in found]
            # Heads that went to every rank have gradients from every rank.
            results.append(
                functools.reduce(lambda a, b: a + b, parts) if s.heads is None
                else xp.concat(parts, axis=-3)
            )  # fmt: skip
        return tuple(results)

    @staticmethod
    def _piece(sizes: _Sizes, heads_of: int, rows_of: int) -> Shape:
        """Shape of one rank's heads in another's rows."""
        heads = sizes.shape[-3]
        if sizes.heads is not None:
            start, stop = sizes.heads[heads_of]
            heads = stop - start
        return (*sizes.shape[:-3], heads, sizes.lengths[rows_of], sizes.shape[-1])


def _of_heads(x: Array, sizes: _Sizes, rank: int) -> Array:
    return x if sizes.heads is None else x[..., slice(*sizes.heads[rank]), :, :]
