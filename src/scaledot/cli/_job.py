"""One call on files, and how it is cut so that its parts fit into memory."""

from __future__ import annotations

import itertools
import math
import platform
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any

import numpy as np

import scaledot
from scaledot import _stream
from scaledot._chunks import Chunk
from scaledot._errors import value_error
from scaledot.cli._files import OPERANDS, Inputs, NDArrayAny, Source
from scaledot.cli._partial import Call, Place

BUDGET = 2**28
"""Bytes of one part's keys and values, and of what else one tile of its queries needs at once."""
CHUNK_BYTES = 2**25
"""Of one chunk of keys and values, and of their columns of mask and bias for one tile."""
STATE_BYTES = 2**27
"""Of queries and their states that one pass over the keys serves."""
BLOCK_BYTES = 2**25
"""Of the arrays that are made for a block of queries."""
EVERY = slice(None)


@dataclass(frozen=True)
class Part:
    """Some entries of the leading axes and some key heads, with the query heads that read them.

    Attributes
    ----------
    lead : tuple of slice
        One for each leading axis of the result.
    heads : slice
        Of the key heads.
    group : int
        Query heads of each key head.
    pairs : int
        Entries times key heads in it.
    """

    lead: tuple[slice, ...]
    heads: slice
    group: int
    pairs: int

    def index(self, shape: tuple[int, ...], *, of_keys: bool = False) -> tuple[slice, ...]:
        """Slices for all axes but the last two of an array of this shape that broadcasts."""
        heads = self.heads
        if not of_keys and heads != EVERY:
            heads = slice(heads.start * self.group, heads.stop * self.group)
        front = shape[:-2]
        wanted = (*(EVERY for _ in front), *self.lead, heads)
        wanted = wanted[len(wanted) - len(front) :]
        return tuple(EVERY if n == 1 else s for n, s in zip(front, wanted, strict=True))


@dataclass(frozen=True)
class Job:
    """One call on files: where the arrays are, in which dtype it runs, and its options."""

    inputs: Inputs
    dtype: np.dtype[Any]
    scalars: dict[str, Any]

    @property
    def len_q(self) -> int:
        """Number of queries."""
        return self.inputs.query.rows

    @property
    def len_kv(self) -> int:
        """Number of keys."""
        return self.inputs.key.rows

    def is_view(self, source: Source) -> bool:
        """Whether parts of an array are views of a file, in this machine's order of bytes."""
        return source.mapped and source.dtype.isnative

    def operand(self, name: str, part: Part, rows: slice = EVERY) -> NDArrayAny:
        """Query, key or value of a part, or rows of it, in the job's dtype."""
        source: Source = getattr(self.inputs, name)
        index = part.index(source.shape, of_keys=name != "query")
        return converted(name, source.read((*index, rows, EVERY)), self.dtype)

    def stored(self, name: str, part: Part) -> Any:
        """Key or value of a part as `scaledot._stream.walk` reads it, chunk by chunk."""
        source: Source = getattr(self.inputs, name)
        if self.is_view(source) and source.dtype == self.dtype:
            return self.operand(name, part)
        return Converted(self, name, part)

    def chunks(
        self, part: Part, rows: slice, *, values: bool = True
    ) -> Generator[Chunk, None, None]:
        """Chunks of the keys that some queries of a part can see, and of their values if wanted."""
        low, high = self.reach(rows)
        length = self.lengths[2]
        starts = range(low // length * length, high, length)  # the same grid for all queries
        cuts = ((max(low, start), min(start + length, high)) for start in starts)
        value = self.stored("value", part) if values else np.empty((self.len_kv, 0), self.dtype)
        return _stream.walk(self.stored("key", part), value, cuts, 0, 1)

    def options(self, part: Part, rows: slice, columns: slice = EVERY) -> dict[str, Any]:
        """Options of `scaledot.attention` for some queries and keys, as they stand in one call."""
        options = {**self.scalars, "q_offset": self.len_kv - self.len_q + rows.start}
        if columns != EVERY:
            options["kv_offset"] = columns.start
        for name in ("mask", "bias"):
            source: Source | None = getattr(self.inputs, name)
            if source is not None:
                ends = (EVERY if source.rows == 1 else rows, columns)
                index = (*part.index(source.shape), *ends)
                index = tuple(
                    EVERY if n == 1 else s for n, s in zip(
                        source.shape, index[len(index) - len(source.shape) :], strict=True
                    )
                )
                array = source.read(index)
                options[name] = array.astype(array.dtype.newbyteorder("="), copy=False)
        return options

    @cached_property
    def plan(self) -> scaledot.Plan:
        """Check the whole call and say how it will run; no data is read."""

        def stand_in(source: Source, dtype: np.dtype[Any]) -> NDArrayAny:
            return np.broadcast_to(np.zeros((), dtype), source.shape)

        arrays: dict[str, Any] = {
            name: stand_in(
                source, self.dtype if name in OPERANDS else source.dtype.newbyteorder("=")
            )
            for name, source in self.inputs.given.items()
        }
        return scaledot.explain(**arrays, **self.scalars)

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of the result, for a job that `plan` has found right."""
        shapes = [getattr(self.inputs, name).shape for name in OPERANDS]
        if all(len(shape) == 2 for shape in shapes):
            return (self.len_q, shapes[2][-1])
        heads = shapes[0][-3] if len(shapes[0]) > 2 else 1
        lead = np.broadcast_shapes(*(shape[:-3] for shape in shapes))
        return (*lead, heads, self.len_q, shapes[2][-1])

    @property
    def tile(self) -> int:
        """Queries of one tile; blocks of whole tiles have the bits of one call."""
        return max(1, self.plan.block_q)

    @cached_property
    def parts(self) -> list[Part]:
        """The whole call where it fits `BUDGET`, else pieces of it that do, if there are any.

        There is none where the result has no row.
        """
        if 0 in self.out_shape[:-1]:
            return []
        shapes = [getattr(self.inputs, name).shape for name in OPERANDS]
        lead = self.out_shape[:-3]
        num_heads = self.out_shape[-3] if len(self.out_shape) > 2 else 1
        kv_heads = shapes[1][-3] if len(shapes[1]) > 2 else 1
        group = num_heads // kv_heads
        axes, count, bytes_left = (*lead, kv_heads), 0, self.entry_bytes(group)
        bytes_left *= math.prod(axes)
        every = Part((EVERY,) * len(lead), EVERY, group, math.prod(axes))
        if bytes_left <= BUDGET or self.scalars["impl"] == "dense":
            return [every]
        while count < len(axes) and bytes_left > BUDGET:
            bytes_left //= axes[count]
            count += 1
        step = max(1, BUDGET // max(1, bytes_left))
        found = []
        for start in itertools.product(
            *(range(n) for n in axes[: count - 1]), range(0, axes[count - 1], step)
        ):
            cut = [slice(i, i + 1) for i in start[:-1]]
            cut += [slice(start[-1], min(start[-1] + step, axes[count - 1]))]
            pairs = (cut[-1].stop - cut[-1].start) * math.prod(axes[count:])
            cut += [EVERY] * (len(axes) - count)
            found.append(Part(tuple(cut[:-1]), cut[-1], group, pairs))
        return found

    def entry_bytes(self, group: int) -> int:
        """Bytes of one key head's keys and values, and of a tile of the queries that read it."""
        terms = (self.inputs.mask, self.inputs.bias)
        pair = sum(
            group * source.dtype.itemsize for source in terms
            if source is not None and source.rows > 1 and not self.is_view(source)
        )
        rows = min(self.tile, self.len_q)
        d_k, d_v = self.inputs.key.shape[-1], self.inputs.value.shape[-1]
        return (
            self.len_kv * (self._token_bytes + rows * pair)
            + rows * group * (d_k + d_v) * self.dtype.itemsize
        )

    @property
    def _token_bytes(self) -> int:
        """Bytes of the key and value of one token and head, as stored or converted."""
        return sum(
            source.shape[-1] * max(source.dtype.itemsize, self.dtype.itemsize)
            for source in (self.inputs.key, self.inputs.value)
        )

    @property
    def streamed(self) -> bool:
        """Whether parts are too large to be held: their keys are read in chunks."""
        if self.scalars["impl"] == "dense":
            return False
        return len(self.parts) > 0 and self.entry_bytes(self.parts[0].group) > BUDGET

    @cached_property
    def lengths(self) -> tuple[int, int, int]:
        """Queries of a pass and of a block, and keys of a chunk, for parts that are streamed."""
        group, tile = self.parts[0].group, self.tile
        accumulated = max(4, self.dtype.itemsize)
        d_k, d_v = self.inputs.key.shape[-1], self.inputs.value.shape[-1]
        terms = (self.inputs.mask, self.inputs.bias)
        pair = sum(
            group * source.dtype.itemsize for source in terms
            if source is not None and source.rows > 1
        )
        chunk = _stream.tokens_of(CHUNK_BYTES, self._token_bytes + tile * pair)
        state = group * ((d_v + 1) * accumulated + d_k * self.dtype.itemsize)
        # Merging holds some six arrays as large as a block's result.
        made = group * 6 * (d_v + 1) * accumulated + pair * chunk
        block = max(1, BLOCK_BYTES // made // tile) * tile
        return max(1, STATE_BYTES // max(1, state) // block) * block, block, chunk

    def may_stop(self, place: Place) -> bool:
        """Whether a run of this job records a place: the end of a pass or of blocks of a part."""
        part, rows = place
        if not (0 <= part < len(self.parts) and 0 < rows <= self.len_q):
            return False
        unit, shortest = (self.lengths[0], 1) if self.streamed else (self.tile, self.tile)
        return rows == self.len_q or (rows % unit == 0 and self.len_q - rows >= shortest)

    def reach(self, rows: slice) -> tuple[int, int]:
        """First key that causal and window let one of these queries see, and the one after."""
        left, right = self._window
        first = self.len_kv - self.len_q + rows.start
        last = self.len_kv - self.len_q + rows.stop - 1
        low = 0 if left is None else min(max(0, first - left), self.len_kv)
        high = self.len_kv if right is None else min(max(0, last + right + 1), self.len_kv)
        return low, max(low, high)

    @property
    def _window(self) -> tuple[int | None, int | None]:
        left, right = self.scalars["window"] or (None, None)
        if self.scalars["causal"]:
            right = 0 if right is None else min(right, 0)
        return left, right

    def work(self, rows: slice, columns: slice | None = None) -> int:
        """Pairs of these queries and keys that causal and window leave, and one for each query."""
        left, right = self._window
        low, high = (0, self.len_kv) if columns is None else (columns.start, columns.stop)
        first, count = self.len_kv - self.len_q + rows.start, rows.stop - rows.start
        seen = count * high if right is None else _clipped_sum(first + right + 1, count, low, high)
        seen -= count * low if left is None else _clipped_sum(first - left, count, low, high)
        return max(0, seen) + (count if columns is None else 0)

    def call(self) -> Call:
        """What decides about the bits of the result, as texts by name."""
        described = {"version": scaledot.__version__, "dtype": self.dtype.name}
        described |= {name: str(value) for name, value in self.scalars.items()}
        plan = self.plan
        described["tiles"] = f"{plan.block_q} × {plan.block_kv} by {plan.implementation}"
        described["processor"] = platform.machine()
        if plan.implementation == "kernels":  # which explain has loaded
            described["processor"] += f" {import_module('scaledot._kernels.target').HOST}"
        if self.streamed:
            described["lengths"] = str(self.lengths)
        described["parts"] = str(len(self.parts))
        for name, source in self.inputs.given.items():
            file = source.file.stat()
            described[name] = (
                f"{source.file.resolve()} {source.name} {source.shape} {source.dtype} "
                f"({file.st_size} bytes, changed {file.st_mtime_ns})"
            )
        return described


class Converted:
    """Key or value of a part of a job, like a slice of a file: read and converted when indexed."""

    def __init__(self, job: Job, name: str, part: Part) -> None:
        self._job, self._name, self._part = job, name, part
        self._source: Source = getattr(job.inputs, name)

    def get_shape(self) -> list[int]:
        """Shape of the whole array; of its axes but the last two only the number is right."""
        return list(self._source.shape)

    def get_dtype(self) -> str:
        """Name of the dtype that comes out."""
        return self._job.dtype.name

    def __getitem__(self, index: slice | tuple[slice, ...]) -> NDArrayAny:
        rows = index[-2] if isinstance(index, tuple) else EVERY  # a slice alone is [:]
        part = self._part.index(self._source.shape, of_keys=True)
        raw = self._source.read((*part, rows, EVERY))
        made = converted(self._name, raw, self._job.dtype)
        if made is not raw:
            _stream.give_back(raw)
        return made


def converted(name: str, array: NDArrayAny, dtype: np.dtype[Any]) -> NDArrayAny:
    """Return an array of a file in the dtype of the work, if its numbers fit."""
    with np.errstate(over="raise"):
        try:
            return array.astype(dtype, copy=False)
        except FloatingPointError:
            largest = float(np.nanmax(np.abs(array[np.isfinite(array)])))
            raise value_error(
                f"{name} must fit into {dtype.name}", f"an entry of size {largest:.6g}",
                "Choose a --dtype with a wider range.",
            ) from None


def blocks(rows: slice, length: int) -> Iterator[slice]:
    """Cut rows into blocks of a fixed length, of which the last may be shorter."""
    for start in range(rows.start, rows.stop, length):
        yield slice(start, min(start + length, rows.stop))


def _clipped_sum(first: int, count: int, low: int, high: int) -> int:
    """Sum of ``min(max(x, low), high)`` over the ``count`` integers x from ``first`` on."""
    below = min(max(low - first, 0), count)
    inside = min(max(high - first, 0), count)
    ramp = (first + below + first + inside - 1) * (inside - below) // 2
    return below * low + ramp + (count - inside) * high
