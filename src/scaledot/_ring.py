"""Attention over a sequence whose keys lie on several processes and travel around a ring."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from scaledot import _arrays, _passes, _reference, _ring_plan
from scaledot._derivatives import Grads
from scaledot._ring_plan import Block, Layout, Part, Piece, Shards, kv_shapes, of_heads
from scaledot._ring_transport import Shape
from scaledot._spec import Options, accumulation
from scaledot._state import State, empty_state, merged
from scaledot._typing import Array, ArrayT, Impl

_TRAVEL = ("key", "value")
_NAMES = ("query", "key", "value", "bias", "alibi_slopes")


def ring_attention(
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
    r"""Attention of one sequence that is spread over several processes.

    ``softmax(Q Kᵀ / √d_k) V`` for this rank's rows of ``Q`` and the keys and values of all ranks,
    which are passed from rank to rank while each computes with those it has. Called by every
    rank of the group, as is the backward pass.

    Parameters
    ----------
    query : array, shape (..., num_heads, len_q, d_k)
        This rank's queries. PyTorch, or NumPy where nothing is differentiated. Lengths may differ
        between ranks, and between queries and keys.
    key : array, shape (..., num_kv_heads, len_kv, d_k)
        This rank's keys.
    value : array, shape (..., num_kv_heads, len_kv, d_v)
        This rank's values.
    group : ProcessGroup, or an object with rank, world_size and rotate, optional
        None is the default group of `torch.distributed`. A member of an `InProcessRing` serves
        tests and notebooks.
    layout : {"contiguous", "zigzag"}
        Which tokens a rank has. Contiguous: the sequence is cut into world_size pieces, in rank
        order. Zigzag: into 2·world_size, and rank r has pieces r and 2·world_size - 1 - r joined;
        the first is as long as the second or longer by one. Balances causal attention.
    causal, window, scale, softcap : optional
        As in `attention`; positions are those in the whole sequence.
    bias : floating-point array, optional
        This rank's rows of it: broadcasts to (..., num_heads, len_q, keys of all ranks), whose
        columns have the order of the whole sequence.
    segment_ids : integer array (..., len), or a pair (query's, key's), optional
        As in `attention`, for this rank's tokens.
    alibi_slopes, sinks : array, shape (num_heads,), optional
        As in `attention`, the same on every rank.
    dropout, seed : optional
        As in `attention`: the weights that are dropped are those of the call on one process.
    impl : {"auto", "kernels", "blockwise", "dense"}
        As in `attention`.

    Returns
    -------
    array, shape (..., num_heads, len_q, d_v)
        This rank's rows, in the dtype of query.

    Raises
    ------
    TypeError, ValueError
        As in `attention`, on the rank whose arguments are wrong; a ValueError on all others, and
        on every rank where shapes, dtypes or options differ.
    RuntimeError
        From `torch.distributed`, when another rank has failed or is later than the group's timeout.

    Notes
    -----
    Partial results are held in float32 (float64 for float64). A rank holds its own keys and values
    and those of one other rank, which arrive while it computes, some heads after the others; going
    back, gradients of keys and values in float32 travel with them. With key heads enough to part,
    and 8 MiB of keys and values or more, that is less than 4 times its query, key and value.
    Gradients of a bias, of slopes and of sinks are those of this rank's rows: sum those of what is
    the same on every rank. Second derivatives, torch.func and forward mode are errors.

    References
    ----------
    Ring attention: arXiv 2310.01889. Striping against imbalance: arXiv 2311.09431.

    Examples
    --------
    >>> import numpy as np, scaledot as sd
    >>> x = np.random.default_rng(0).standard_normal((2, 12, 4))
    >>> shards = np.split(x, 3, axis=-2)
    >>> def work(group):
    ...     shard = shards[group.rank]
    ...     return sd.ring_attention(shard, shard, shard, group=group, causal=True)
    >>> out = np.concatenate(sd.InProcessRing(3).run(work), axis=-2)
    >>> np.allclose(out, sd.attention(x, x, x, causal=True))
    True
    """
    options = Options(
        causal=causal, window=window, bias=bias, segment_ids=segment_ids, scale=scale,
        softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks, dropout=dropout, seed=seed,
        impl=impl,
    )  # fmt: skip
    shards = _ring_plan.begin("ring_attention", group, query, key, value, options, layout)
    given: tuple[Any, ...] = (query, key, value, options.bias, options.alibi_slopes)
    xp, shares = _arrays.namespace(query), None
    if shards.is_differentiated:
        from scaledot import _ring_rules  # loads PyTorch

        given = tuple(x if _arrays.library(x) == "torch" else None for x in given)
        shares = _Shares(xp)
        state = State(*_ring_rules.differentiable(
            functools.partial(_forward, shards, shares),
            functools.partial(_backward, shards, shares), *given,
        ))  # fmt: skip
    else:
        state = _forward(shards, None, *given)
    problem = shards.problem
    with _arrays.quiet(xp):
        if problem.sinks is not None:
            sink = _reference.keyless(xp, problem)
            if problem.spec.matrix:
                sink = State(sink.out[0, ...], sink.lse[0, ...])
            state = merged(xp, state, sink)
        return cast(ArrayT, xp.astype(state.out, cast(Any, query).dtype, copy=False))


class _Given(NamedTuple):
    """Arrays of a call on one rank, without graph."""

    query: Array
    key: Array
    value: Array
    bias: Array | None
    alibi_slopes: Array | None
    q_segments: Array | None

    def block(
        self, shards: Shards, part: Part, block: Block, arrays: Sequence[Array]
    ) -> tuple[Array, Array, Array, Options]:
        """Query, key, value and options of one block, given what has travelled here."""
        rows, columns = block.rows, block.columns
        segments = None
        if self.q_segments is not None:
            segments = _cut(self.q_segments, -1, rows), arrays[2][..., columns]
        bias, slopes = self.bias, self.alibi_slopes
        if bias is not None:
            bias = bias[_bias_index(bias, part, block)]
        if slopes is not None and part.heads is not None:
            slopes = slopes[part.heads]
        options = shards.options._replace(
            bias=bias, segment_ids=segments, alibi_slopes=slopes, sinks=None, seed=part.seed,
            q_offset=block.q_offset, kv_offset=block.kv_offset,
        )  # fmt: skip
        key, value = (of_heads(x, part.inside)[..., columns, :] for x in arrays[:2])
        return of_heads(self.query, part.heads)[..., rows, :], key, value, options


def _given(shards: Shards, arrays: Sequence[Array | None]) -> _Given:
    query, key, value, bias, slopes = arrays
    # What is not a tensor is not differentiated, and is as the caller gave it.
    bias = shards.options.bias if bias is None else bias
    slopes = shards.options.alibi_slopes if slopes is None else slopes
    ids = shards.problem.terms.q_segment  # (lead..., 1, len_q, 1)
    return _Given(query, key, value, bias, slopes, None if ids is None else ids[..., 0, :, 0])


def _cut(x: Array, axis: int, part: slice) -> Array:
    """A part of an axis, or all of one along which x is broadcast."""
    if x.shape[axis] == 1:
        return x
    return x[(..., part) + (slice(None),) * (-1 - axis)]


def _bias_index(bias: Array, part: Part, block: Block) -> tuple[Any, ...]:
    """Where the share of a bias for one block lies; an axis that is broadcast stays as it is."""
    size = block.columns.stop - block.columns.start
    columns = slice(block.kv_offset, block.kv_offset + size)
    index = [slice(None)] * bias.ndim
    for axis, inside in ((-1, columns), (-2, block.rows), (-3, part.heads)):
        if inside is not None and bias.ndim >= -axis and bias.shape[axis] != 1:
            index[axis] = inside
    return tuple(index)


def _each_piece(
    shards: Shards, given: _Given, visit: Callable[[int, Piece, Sequence[Array]], None]
) -> None:
    """Call ``visit(source, piece, (key, value, ids))`` for all heads of every rank's shard.

    The own shard comes first. A piece of the next one is on its way while the same piece of this
    one is computed with, and takes its place afterwards: one piece is held twice, not a shard.
    """
    held: list[list[Array]] = [
        [of_heads(x, piece.heads) for x in (given.key, given.value)] for piece in shards.pieces
    ]
    ids = [] if shards.segments is None else [shards.segments]  # they go with the first piece
    for step in range(shards.world_size):
        source = (shards.rank - step) % shards.world_size
        following, is_last = (source - 1) % shards.world_size, step == shards.world_size - 1
        next_ids: list[Array] = []
        for piece in shards.pieces:
            sent, wait = held[piece.number] + (ids if piece.number == 0 else []), None
            if not is_last:
                wait = shards.transport.rotate(sent, kv_shapes(shards, sent, following))
            visit(source, piece, held[piece.number] + ids)
            del sent
            held[piece.number] = []  # memory of what has been used and sent on is free from here
            if wait is not None:
                arrived = wait()
                held[piece.number] = arrived[:2]
                next_ids += arrived[2:]
                del arrived
        ids = next_ids


def _forward(shards: Shards, shares: _Shares | None, *arrays: Array) -> State:
    """Attention of this rank's queries over all keys, without sinks.

    ``out`` is rounded to the dtype of query unless a sink is to be merged with it.
    """
    given, xp = _given(shards, arrays), _arrays.namespace(arrays[0])
    spec = shards.problem.spec
    front = () if spec.matrix else spec.scores_shape[:-2]
    total = empty_state(
        xp, (*front, spec.len_q), spec.d_v, accumulation(given.query, spec), given.query
    )
    begun: set[tuple[int, int]] = set()

    def visit(source: int, piece: Piece, travelled: Sequence[Array]) -> None:
        for part, block in itertools.product(piece.parts, shards.blocks(source)):
            query, key, value, options = given.block(shards, part, block, travelled)
            state = _passes.forward(query, key, value, options, slices=True, wide=True)
            if shares is not None:
                shares.add(source, part, block, state.lse)
            place = (part.number, block.rows.start)
            out = of_heads(total.out, part.heads)[..., block.rows, :]
            lse = _of_rows(total.lse, part, block)
            with _arrays.quiet(xp):
                if place in begun:
                    state = merged(xp, State(out, lse), state)
                out[...], lse[...] = state
            begun.add(place)

    _each_piece(shards, given, visit)
    if shards.problem.sinks is None:
        dtype = cast(Any, given.query).dtype
        with _arrays.quiet(xp):
            return State(xp.astype(total.out, dtype, copy=False), total.lse)
    return total


def _backward(
    shards: Shards, shares: _Shares, tensors: Sequence[Any], state: Sequence[Any],
    grads: Sequence[Any], needed: Sequence[bool],
) -> list[Any]:  # fmt: skip
    """Gradients of query, key, value, bias and slopes; those of keys go around with them."""
    given, whole = _given(shards, tensors), (state[0], *grads)
    xp, query = _arrays.namespace(given.query), given.query
    wanted = {name for name, is_needed in zip(_NAMES, needed, strict=True) if is_needed}
    dtype, args = accumulation(query, shards.problem.spec), dict(zip(_NAMES, tensors, strict=True))
    totals = _Totals(xp, query, dtype)
    home = _Homeward(shards, [name for name in _TRAVEL if name in wanted])

    def visit(source: int, piece: Piece, travelled: Sequence[Array]) -> None:
        own = _Totals(xp, query, dtype)
        shapes = {name: tuple(x.shape) for name, x in zip(_TRAVEL, travelled, strict=False)}
        for part, block in itertools.product(piece.parts, shards.blocks(source)):
            found = _block_gradients(
                shards, given, part, block, travelled, shares, whole, source, wanted
            )
            for name in wanted:
                sums, shape = (
                    (own, shapes[name]) if name in home.names else (totals, tuple(args[name].shape))
                )
                sums.add(name, shape, getattr(found, name), part, block)
            del found  # before others arrive
        home.send(source, piece, [own.take(name, shapes[name]) for name in home.names])

    with _arrays.quiet(xp):
        _each_piece(shards, given, visit)
    arrived = home.arrived(args)
    return [
        None if name not in wanted
        else arrived[name] if name in arrived
        else totals.take(name, tuple(x.shape)).to(x.dtype)
        for name, x in args.items()
    ]  # fmt: skip


class _Homeward:
    """Gradients of keys and values, which follow these around the ring and grow on every rank."""

    def __init__(self, shards: Shards, names: list[str]) -> None:
        self.names = names
        self._shards = shards
        self._flying: tuple[int, Callable[[], list[Array]]] | None = None
        self._parked: dict[int, list[Array]] = {}

    def send(self, source: int, piece: Piece, own: list[Array]) -> None:
        """Add what has arrived for a piece of ``source``'s shard to the own part, pass both on."""
        if not self.names:
            return
        self._land()
        _add(own, self._parked.pop(piece.number, []))
        length = self._shards.kv_lengths[(source - 1) % self._shards.world_size]
        following = [(*x.shape[:-2], length, x.shape[-1]) for x in own]
        self._flying = piece.number, self._shards.transport.rotate(own, following)

    def arrived(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Gradients of the own keys and values, in the dtypes of these."""
        if not self.names:
            return {}
        self._land()
        pieces = self._shards.pieces
        if len(pieces) == 1:
            found = dict(zip(self.names, self._parked.pop(0), strict=True))
            return {name: x.to(arguments[name].dtype) for name, x in found.items()}
        joined = {name: arguments[name].new_empty(arguments[name].shape) for name in self.names}
        for piece in pieces:
            for name, x in zip(self.names, self._parked.pop(piece.number), strict=True):
                of_heads(joined[name], piece.heads)[...] = x
        return joined

    def _land(self) -> None:
        """Take in what was started last, which frees what was sent."""
        if self._flying is not None:
            number, wait = self._flying
            self._flying = None
            self._parked[number] = wait()


def _add(sums: Sequence[Array], received: Sequence[Array]) -> None:
    """Add in place; what was received, if anything, is let go on return."""
    for total, x in zip(sums, received, strict=False):
        total += x


class _Totals:
    """Sums of gradients over blocks, in the accumulation dtype."""

    def __init__(self, xp: Any, query: Array, dtype: Any) -> None:
        self._xp, self._query, self._dtype = xp, query, dtype
        self._sums: dict[str, Array] = {}

    def add(self, name: str, shape: Shape, grad: Array, part: Part, block: Block) -> None:
        """Add what one block gives to an argument of that shape."""
        if name not in self._sums:
            if tuple(grad.shape) == shape:
                self._sums[name] = self._xp.astype(grad, self._dtype, copy=False)
                return
            self._sums[name] = self._zeros(shape)
        self._sums[name][_index(name, self._sums[name], part, block)] += grad

    def take(self, name: str, shape: Shape) -> Array:
        """Return a sum; zeros where no block gave anything."""
        return self._sums.pop(name) if name in self._sums else self._zeros(shape)

    def _zeros(self, shape: Shape) -> Array:
        return self._xp.zeros(shape, dtype=self._dtype, **_arrays.device_of(self._query))


def _index(name: str, total: Array, part: Part, block: Block) -> tuple[Any, ...]:
    """Where the gradient of one block belongs in that of an argument; keys are of one piece."""
    if name == "bias":
        return _bias_index(total, part, block)
    if name == "alibi_slopes":
        return (...,) if part.heads is None else (part.heads,)
    heads, rows = (part.heads, block.rows) if name == "query" else (part.inside, block.columns)
    if heads is None or total.ndim < 3:
        return (..., rows, slice(None))
    return (..., heads, rows, slice(None))


def _of_rows(x: Array, part: Part, block: Block) -> Array:
    """Numbers (..., num_heads, len_q) of the rows of a block."""
    return (x if part.heads is None else x[..., part.heads, :])[..., block.rows]


def _block_gradients(
    shards: Shards, given: _Given, part: Part, block: Block, travelled: Sequence[Array],
    shares: _Shares, whole: Sequence[Array], source: int, wanted: set[str],
) -> Grads:  # fmt: skip
    """What one block adds to the gradients, given out over all keys, and what reaches the state.

    In the whole state the block has weight ``share``, and ``exp(score - lse)`` of the whole is
    ``share·exp(score - lse)`` of the block; so everything that comes in is multiplied by it.
    """
    query, key, value, options = given.block(shards, part, block, travelled)
    lse, share = shares.of(source, part, block)
    out, grad_out = (of_heads(x, part.heads)[..., block.rows, :] for x in whole[:2])
    grad_out = share[..., None] * grad_out
    if _arrays.dtype_name(query) == "bfloat16":  # products of bfloat16 need both factors in it
        out, grad_out = out.to(query.dtype), grad_out.to(query.dtype)
    return _passes.backward(
        query, key, value, options, out, lse, grad_out, share * _of_rows(whole[2], part, block),
        wanted=wanted, slices=True,
    )  # fmt: skip


class _Shares:
    """The log-sum-exp of each block of this rank, and the weight it gives the block in the whole.

    Weights that are taken from the sum over blocks add up to 1 whatever the size of lse, which
    ``exp(lse - lse of all)`` does to ``eps·|lse|`` alone.
    """

    def __init__(self, xp: Any) -> None:
        self._xp = xp
        # By part and first row; then by source and first column.
        self._lse: dict[tuple[int, int], dict[tuple[int, int], Array]] = {}
        self._sums: dict[tuple[int, int], tuple[Array, Array]] = {}

    def add(self, source: int, part: Part, block: Block, lse: Array) -> None:
        """Remember a block, while going forward."""
        found = self._lse.setdefault((part.number, block.rows.start), {})
        found[source, block.columns.start] = lse

    def of(self, source: int, part: Part, block: Block) -> tuple[Array, Array]:
        """Log-sum-exp and weight of a block, (..., num_heads, rows)."""
        place = part.number, block.rows.start
        lse = self._lse[place][source, block.columns.start]
        if place not in self._sums:
            self._sums[place] = self._sum(list(self._lse[place].values()))
        top, total = self._sums[place]
        return lse, self._xp.exp(lse - top) / total

    def _sum(self, found: list[Array]) -> tuple[Array, Array]:
        """Largest lse, or 0, and the sum of exponentials relative to it, or 1."""
        xp = self._xp
        top = functools.reduce(xp.maximum, found)
        top = xp.where(top == -math.inf, xp.zeros_like(top), top)
        total = functools.reduce(lambda a, b: a + b, (xp.exp(x - top) for x in found))
        return top, xp.where(total == 0, xp.ones_like(total), total)
