"""What the ranks of a ring must know of one another before they start, and who computes what."""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import numpy as np

from scaledot import _arrays, _choice, _masks
from scaledot._errors import type_error, value_error
from scaledot._masks import visible_range
from scaledot._ring_transport import Shape, Transport, transport_of
from scaledot._rules import without_graph
from scaledot._spec import Options, Problem, Spec, batch_seeds, resolve, seed_halves
from scaledot._typing import Array

Layout: TypeAlias = Literal["contiguous", "zigzag"]
LAYOUTS = ("contiguous", "zigzag")

MOST_PIECES = 8
PIECE_BYTES = 2**20  # of keys and values, at least

# What a rank tells the others before the first key travels. All but the last three must agree.
_GIVEN = {f"is {x} given": x for x in ("bias", "segment_ids", "alibi_slopes", "sinks")}
_SAME = (
    "function", "world_size", "layout", "library", "dtype", "byte order of (query, key, value)",
    "num_heads", "num_kv_heads", "d_k", "d_v", "leading axes of query", "leading axes of key",
    "leading axes of value", *_GIVEN,
    "requires_grad of (query, key, value, bias, alibi_slopes, sinks)", "causal and window", "scale",
    "softcap", "dropout", "seed", "impl", "alibi_slopes", "sinks",
    "axes of segment_ids before the last", "dtype and axes of bias, rows left out",
)  # fmt: skip
_OWN = ("len_q", "len_kv", "keys of bias")
_FIELDS = ("fine", *_SAME, *_OWN)


class Run(NamedTuple):
    """Tokens that lie next to one another both in a shard and in the whole sequence."""

    start: int  # in the shard
    stop: int
    position: int  # of the first, in the whole sequence

    @property
    def inside(self) -> slice:
        """Where they are in the shard."""
        return slice(self.start, self.stop)


class Block(NamedTuple):
    """Queries and keys that are compared in one go."""

    rows: slice  # of the rank's queries
    columns: slice  # of the key shard
    q_offset: int
    kv_offset: int


class Part(NamedTuple):
    """Heads of query that are computed with in one go."""

    number: int
    heads: slice | None  # None is all of them
    inside: slice | None  # those of key and value, counted in the piece
    seed: Any  # with which head 0 of the part drops what it does as one of all


class Piece(NamedTuple):
    """Heads of key and value that travel together, and those of query that read them."""

    number: int
    heads: slice | None
    parts: list[Part]


def of_heads(x: Any, heads: slice | None) -> Any:
    """Some heads of an array (..., heads, len, width), or of one (len, width)."""
    return x if heads is None or x.ndim < 3 else x[..., heads, :, :]


def runs_of(lengths: Sequence[int], layout: str) -> list[list[Run]]:
    """Runs of each rank's shard, given the lengths of all shards.

    Zigzag: a shard is pieces r and 2W-1-r of 2W, the first of which has the odd token.
    """
    world_size = len(lengths)
    if layout == "contiguous":
        pieces = [[length] for length in lengths]
        order = [(rank, 0) for rank in range(world_size)]
    else:
        pieces = [[length - length // 2, length // 2] for length in lengths]
        order = [(rank, 0) for rank in range(world_size)]
        order += [(rank, 1) for rank in reversed(range(world_size))]
    sizes = [pieces[rank][half] for rank, half in order]
    positions = dict(zip(order, itertools.accumulate([0, *sizes]), strict=False))
    found = []
    for rank, halves in enumerate(pieces):
        runs: list[Run] = []
        for half, length in enumerate(halves):
            start, position = sum(halves[:half]), positions[rank, half]
            if runs and runs[-1].position + runs[-1].stop - runs[-1].start == position:
                runs[-1] = runs[-1]._replace(stop=start + length)
            elif length:
                runs.append(Run(start, start + length, position))
        found.append(runs)
    return found


@dataclass(frozen=True)
class Shards:
    """One call as all ranks have agreed on it.

    ``problem`` is this rank's own share, without bias; ``segments`` are the ids of its keys,
    ``(..., len_kv)`` of int64.
    """

    transport: Transport
    problem: Problem
    options: Options
    segments: Array | None
    q_lengths: tuple[int, ...]
    kv_lengths: tuple[int, ...]
    q_runs: list[list[Run]]
    kv_runs: list[list[Run]]

    @property
    def rank(self) -> int:
        """Number of the rank whose call it is."""
        return self.transport.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.transport.world_size

    @property
    def is_differentiated(self) -> bool:
        """Whether a graph is recorded, here and so on every rank."""
        options, problem = self.options, self.problem
        arrays = (problem.query, problem.key, problem.value, options.bias, options.alibi_slopes)
        return is_tracked(*arrays)

    @functools.cached_property
    def pieces(self) -> list[Piece]:
        """Heads in the order in which they travel; the same on every rank.

        A rank holds a piece twice while it travels, and the intermediate results of a part. Small
        ones cost more messages than they save memory, and leave little to the threads of a rank.
        """
        spec, numbers = self.problem.spec, itertools.count()
        token = _arrays.itemsize(spec.dtype) * math.prod(spec.lead) * (spec.d_k + spec.d_v)
        sent, read = (
            min(MOST_PIECES, token * max(lengths) * heads // PIECE_BYTES)
            for lengths, heads in (
                (self.kv_lengths, spec.num_kv_heads), (self.q_lengths, spec.num_heads)
            )
        )  # fmt: skip
        count = max(1, min(sent, spec.num_kv_heads))
        parts = max(1, read // count)
        if self.world_size == 1 or max(count, min(parts, spec.group_size)) == 1:
            return [Piece(0, None, [Part(0, None, None, self.options.seed)])]
        return [
            Piece(number, heads, [self._part(next(numbers), heads, part)
                                  for part in self._ranges(heads, parts)])
            for number, heads in enumerate(_cuts(0, spec.num_kv_heads, count))
        ]  # fmt: skip

    def _ranges(self, kv_heads: slice, count: int) -> Iterator[tuple[int, int]]:
        """Heads of query of each part of a piece; only a group is cut, unless a seed demands it."""
        spec = self.problem.spec
        start, stop = kv_heads.start * spec.group_size, kv_heads.stop * spec.group_size
        count = min(count, spec.group_size) if kv_heads.stop - kv_heads.start == 1 else 1
        for heads in _cuts(start, stop, count):
            yield from seeded(heads.start, heads.stop, spec)

    def _part(self, number: int, kv_heads: slice, heads: tuple[int, int]) -> Part:
        spec, seed, (start, stop) = self.problem.spec, self.options.seed, heads
        first, end = start // spec.group_size, -(-stop // spec.group_size)
        if spec.dropout:
            seed = seeds_from(self.problem.query, seed, start, spec)
        inside = slice(first - kv_heads.start, end - kv_heads.start)
        return Part(number, slice(start, stop), inside, seed)

    @property
    def places_matter(self) -> bool:
        """Whether a shard cannot be seen as one block."""
        return bool(self.options.uses_positions()) or self.options.bias is not None

    def rows(self) -> list[slice]:
        """Parts of this rank's queries that have states of their own."""
        if self.places_matter:
            return [run.inside for run in self.q_runs[self.rank]]
        return [slice(0, self.q_lengths[self.rank])] if self.q_lengths[self.rank] else []

    def blocks(self, source: int) -> Iterator[Block]:
        """What this rank computes with the keys of rank ``source``; hidden blocks are left out."""
        if not self.places_matter:
            length = self.kv_lengths[source]
            yield from (Block(rows, slice(0, length), 0, 0) for rows in self.rows() if length)
            return
        spec = self.problem.spec
        shift = sum(self.kv_lengths) - sum(self.q_lengths)  # the last query is at the last key
        for q, kv in itertools.product(self.q_runs[self.rank], self.kv_runs[source]):
            first = q.position + shift
            last, count = first + q.stop - q.start - 1, kv.stop - kv.start
            low, high = visible_range(first, last, spec.left, spec.right, kv.position, count)
            if low < high:
                yield Block(q.inside, kv.inside, first, kv.position)


def begin(
    name: str, group: Any, query: Array, key: Array, value: Array, options: Options, layout: str
) -> Shards:
    """Check a call, alone and against those of the other ranks; an error is one on every rank."""
    transport = transport_of(group)
    error, fields = None, dict.fromkeys(_FIELDS, 0)
    try:
        problem, segments = _alone(name, query, key, value, options, layout)
        fields |= _described(name, problem, query, key, value, options, layout, segments)
        fields |= {"fine": 1, "world_size": transport.world_size}
    except Exception as e:  # raised again below, once the others know of it
        error = e
    table = _gathered(transport, [_number(x) for x in fields.values()])
    if error is not None:
        raise error
    _agree(transport, fields, table)
    q_lengths, kv_lengths, bias_keys = (
        tuple(int(row[_FIELDS.index(name)]) for row in table) for name in _OWN
    )
    total = sum(kv_lengths)
    if bad := [n for n in bias_keys if n not in (0, 1, total)]:
        raise value_error(
            f"bias must have a column for each of the {total} keys of all ranks, or one",
            f"{bad[0]} on rank {bias_keys.index(bad[0])}",
            "Each rank passes its own rows, (..., num_heads, own len_q, all keys).",
        )
    return Shards(
        transport, problem, options, segments, q_lengths, kv_lengths,
        runs_of(q_lengths, layout), runs_of(kv_lengths, layout),
    )  # fmt: skip


def _alone(
    name: str, query: Array, key: Array, value: Array, options: Options, layout: str
) -> tuple[Problem, Array | None]:
    """Check what one rank can check; return its problem without bias and the ids of its keys."""
    if layout not in LAYOUTS:
        raise value_error(
            f"layout must be one of {', '.join(map(repr, LAYOUTS))}", repr(layout),
            "'zigzag' balances causal attention.",
        )
    kinds = {_arrays.library(x) for x in (query, key, value)}
    if kinds & {"jax", "array_api_strict"}:
        raise type_error(
            f"{name} takes tensors of PyTorch, or arrays of NumPy without gradients",
            ", ".join(_arrays.describe(x) for x in (query, key, value)), "Convert them.",
        )
    _check_plain(name, query, key, value, options)
    problem = resolve(query, key, value, options._replace(bias=None, q_offset=0))
    if options.bias is not None:
        _check_rows(options.bias, problem.spec)
    if options.bias is not None or problem.spec.impl == "kernels":
        # The number of all keys is not known yet, so one column of a bias stands for all.
        checked = without_graph(options._replace(bias=_column(options.bias), q_offset=0))
        q, k, v = without_graph((query, key, value))
        _choice.choose(resolve(q, k, v, checked))
    segments, ids = None, problem.terms.kv_segment
    if ids is not None:
        xp = _arrays.namespace(query)
        ids = xp.astype(ids[..., 0, 0, :], xp.int64)
        segments = xp.broadcast_to(ids, (*ids.shape[:-1], problem.spec.len_kv))
    return problem, segments


def _check_plain(name: str, query: Array, key: Array, value: Array, options: Options) -> None:
    """Raise if PyTorch transforms a tensor, of which the other ranks would know nothing."""
    given = {"query": query, "key": key, "value": value} | options._asdict()
    for argument, x in given.items():
        if any(map(_is_transformed, x if isinstance(x, (tuple, list)) else (x,))):
            raise type_error(
                f"{name} must be given plain tensors",
                f"{argument} inside of a transform (vmap, grad, jvp) or with a tangent",
                "Other ranks cannot see it: loop instead of vmap, and differentiate with backward "
                "or torch.autograd.grad.",
            )


def _is_transformed(x: Any) -> bool:
    torch: Any = sys.modules.get("torch")
    if _arrays.library(x) != "torch" or torch.compiler.is_compiling():
        return False
    forward = torch.autograd.forward_ad
    return bool(
        torch._C._functorch.is_functorch_wrapped_tensor(x)
        or (forward._current_level >= 0 and forward.unpack_dual(x).tangent is not None)
    )


def _check_rows(bias: Any, spec: Spec) -> None:
    """Raise unless all axes of a bias but its columns, those of all ranks, fit this rank."""
    if _arrays.library(bias) is None:
        return
    fitting = (spec.len_q,) if spec.matrix else (*spec.lead, spec.num_heads, spec.len_q)
    given = tuple(bias.shape[:-1])
    if len(given) > len(fitting) or any(
        m not in (1, n) for m, n in zip(reversed(given), reversed(fitting), strict=False)
    ):
        axes = "" if spec.matrix else "..., num_heads, "
        raise value_error(
            f"bias must broadcast to ({axes}own len_q, keys of all ranks) = "
            f"({', '.join(map(str, fitting))}, keys of all ranks)",
            tuple(bias.shape), "Each rank passes its own rows, and all columns of them.",
        )


def _column(bias: Any) -> Any:
    return bias[..., :1] if _arrays.library(bias) is not None and bias.ndim else bias


def _described(
    name: str, problem: Problem, query: Array, key: Array, value: Array, options: Options,
    layout: str, segments: Array | None,
) -> dict[str, Any]:  # fmt: skip
    """What this rank tells the others."""
    spec, bias = problem.spec, options.bias
    given = (query, key, value, bias, options.alibi_slopes, options.sinks)
    return {
        "function": name, "layout": str(layout), "library": spec.library, "dtype": spec.dtype,
        "byte order of (query, key, value)": tuple(map(_byte_order, (query, key, value))),
        "num_heads": spec.num_heads, "num_kv_heads": spec.num_kv_heads, "d_k": spec.d_k,
        "d_v": spec.d_v, "leading axes of query": tuple(query.shape[:-3]),
        "leading axes of key": tuple(key.shape[:-3]),
        "leading axes of value": tuple(value.shape[:-3]),
        **{told: getattr(options, option) is not None for told, option in _GIVEN.items()},
        "requires_grad of (query, key, value, bias, alibi_slopes, sinks)":
            tuple(is_tracked(x) for x in given),
        "causal and window": (spec.left, spec.right), "scale": spec.scale,
        "softcap": spec.softcap, "dropout": spec.dropout,
        "seed": _seed(options.seed) if spec.dropout else None, "impl": spec.impl,
        "alibi_slopes": _values(options.alibi_slopes), "sinks": _values(options.sinks),
        "axes of segment_ids before the last":
            None if segments is None else tuple(segments.shape[:-1]),
        "dtype and axes of bias, rows left out": None if bias is None else
            (_arrays.dtype_name(bias), _byte_order(bias), tuple(bias.shape[:-2]),
             "one column" if bias.shape[-1:] == (1,) else "all columns"),
        "len_q": spec.len_q, "len_kv": spec.len_kv,
        "keys of bias": 0 if bias is None else bias.shape[-1] if bias.ndim else 1,
    }  # fmt: skip


def is_tracked(*arrays: Any) -> bool:
    """Whether PyTorch records a graph for one of them."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.is_grad_enabled() and any(
        x.requires_grad for x in arrays if _arrays.library(x) == "torch"
    )  # fmt: skip


def _values(x: Any) -> Any:
    """An option's values, comparable by their representation."""
    return x if x is None or _arrays.library(x) is None else np.asarray(_arrays.host(x)).tolist()


def _seed(x: Any) -> Any:
    """An int, whatever its type, or the seeds of the entries of a batch."""
    return int(x) if _arrays.library(x) is None else np.atleast_1d(_values(x)).tolist()


def _byte_order(x: Array) -> str:
    """Order of the bytes that travel: arrays of NumPy are sent as they lie in memory."""
    first = x.dtype.str[0] if isinstance(x, np.ndarray) else "="
    return {"<": "little", ">": "big"}.get(first, sys.byteorder)


def _number(x: Any) -> int:
    """A whole number below 2**31 as it is; a hash above that of anything else."""
    if isinstance(x, int) and 0 <= x < 2**31:
        return int(x)
    digest = hashlib.blake2b(repr(x).encode(), digest_size=7).digest()
    return 2**56 + int.from_bytes(digest, "little")


def _gathered(transport: Transport, numbers: list[int]) -> list[list[int]]:
    """Numbers of all ranks, in rank order."""
    own, world_size = np.array(numbers, dtype=np.int64), transport.world_size
    waits = [transport.rotate([own], [own.shape], hop) for hop in range(1, world_size)]
    table = {transport.rank: own}
    for hop, wait in enumerate(waits, start=1):
        table[(transport.rank - hop) % world_size] = wait()[0]
    return [[int(x) for x in table[rank]] for rank in range(world_size)]


def _agree(transport: Transport, fields: dict[str, Any], table: list[list[int]]) -> None:
    """Raise the same error on every rank unless all ranks are fine and in agreement."""
    failed = [str(rank) for rank, row in enumerate(table) if not row[0]]
    if failed:
        raise value_error(
            "the arguments must be valid on every rank", f"an error on rank {', '.join(failed)}",
            "Its own message says what is wrong there.",
        )
    for place, name in enumerate(_FIELDS):
        numbers = [row[place] for row in table]
        other = next((rank for rank, n in enumerate(numbers) if n != numbers[0]), None)
        if name in _OWN or other is None:
            continue
        if name in _GIVEN:
            raise value_error(
                f"{_GIVEN[name]} must be given on every rank or on none",
                f"none on rank {', '.join(str(r) for r, n in enumerate(numbers) if not n)}",
                "Each rank passes what belongs to its own tokens, or to all heads.",
            )
        if max(numbers) < 2**31:
            given = ", ".join(f"{n} on rank {rank}" for rank, n in enumerate(numbers))
        else:
            given = f"another on rank {other} than on rank 0"
        raise value_error(
            f"{name} must be the same on every rank", given,
            f"Rank {transport.rank} has {fields[name]!r}.",
        )


def kv_shapes(shards: Shards, arrays: Sequence[Array], source: int) -> list[Shape]:
    """Shapes of key, value and ids of rank ``source``, like those of ``arrays`` of another rank."""
    length = shards.kv_lengths[source]
    return [
        (*x.shape[:-2], length, x.shape[-1]) if place < 2 else (*x.shape[:-1], length)
        for place, x in enumerate(arrays)
    ]


def seeded(start: int, stop: int, spec: Spec) -> list[tuple[int, int]]:
    """Ranges of heads that one call can do: all, or with dropout those that one seed serves.

    Dropout takes the exclusive or of a hash and the number of the head. Counted from 0 instead of
    ``start``, the numbers differ by one exclusive or if ``start`` is a multiple of a power of 2
    that is not below their count.
    """
    if not spec.dropout or start % (1 << max(0, stop - start - 1).bit_length()) == 0:
        return [(start, stop)]
    return [(head, head + 1) for head in range(start, stop)]


def seeds_from(query: Array, seed: Any, start: int, spec: Spec) -> Array:
    """Seeds of the batch entries with which head 0 drops what head ``start`` does with ``seed``."""
    if _arrays.library(seed) is None:
        seed = batch_seeds(int(seed), math.prod(spec.lead)).reshape(spec.lead)
    low, high = (np.asarray(_arrays.host(x)) for x in seed_halves(query, seed, spec))
    head = np.full((1,) * spec.rank, start, dtype=np.int32)
    first, _ = _masks.dropout_head_keys(low, high, head)
    # With a lower half of 0 the key of head 0 is the upper half mixed twice.
    upper = _unmixed(_unmixed(first.view(np.uint32).astype(np.uint64)))
    return cast(Array, (upper << np.uint64(32)).view(np.int64)[..., 0, 0, 0])


def _unmixed(x: Any) -> Any:
    """Inverse of the bijection of `_masks`, on 32-bit integers held in 64."""
    low, bits = np.uint64(2**32 - 1), [np.uint64(n) for n in (16, 15, 30)]
    first, second = (
        np.uint64(pow(constant % 2**32, -1, 2**32)) for constant in (_masks._FIRST, _masks._SECOND)
    )
    x = x ^ (x >> bits[0])
    x = (x * second) & low
    x = x ^ (x >> bits[1]) ^ (x >> bits[2])
    x = (x * first) & low
    return x ^ (x >> bits[0])


def _cuts(start: int, stop: int, count: int) -> list[slice]:
    """A range in a number of pieces that are about as long."""
    ends = [start + (stop - start) * i // count for i in range(count + 1)]
    return [slice(low, high) for low, high in itertools.pairwise(ends)]
