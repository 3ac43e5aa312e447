"""Memory of a key-value cache: which token lies in which slot."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from scaledot import _arrays
from scaledot._chunks import Chunk
from scaledot._errors import missing_extra
from scaledot._typing import Array

LARGEST = 127
"""Code of the largest number of a token stored as int8."""
SMALLEST_SCALE = 2.0**-126
"""The smallest normal number of float32: a scale below it would be rounded, or become 0."""
PIECE = 1024
"""Tokens of int8 memory that are turned into numbers at a time."""


class Stretch(NamedTuple):
    """Slots of all entries, of which the first few hold tokens that follow each other."""

    slots: range
    offset: Any  # int64, () or (batch,): position of the first
    length: Any  # likewise: how many hold tokens

    def pieces(self) -> list[Stretch]:
        """Shorter stretches, of `PIECE` slots."""
        pieces = []
        for i in range(0, len(self.slots), PIECE):
            piece = self.slots[i : i + PIECE]
            pieces.append(Stretch(piece, self.offset + i, np.clip(self.length - i, 0, len(piece))))
        return pieces


@dataclass
class Memory:
    """Slots of a batch: those of the sinks, then a ring.

    Token p lies in slot p if it is a sink, else in slot
    ``num_sinks + (p - num_sinks) % len_ring``; without a window the ring never goes round.

    Attributes
    ----------
    arrays : dict of array
        ``key`` and ``value``, shape (batch, num_kv_heads, capacity, d), for int8 also ``key_scale``
        and ``value_scale`` with d = 1.
    num_sinks : int
        Slots before the ring.
    lengths : int64 array, shape (batch,)
        Tokens so far.
    oldest : int64 array, shape (batch,)
        Position of the oldest token in the ring: those between the sinks and it are lost.
    """

    arrays: dict[str, Array]
    num_sinks: int
    lengths: np.ndarray[Any, np.dtype[np.int64]]
    oldest: np.ndarray[Any, np.dtype[np.int64]]

    @classmethod
    def new(
        cls, shape: tuple[int, int, int], widths: tuple[int, int], dtype: str, num_sinks: int,
        like: Array | None,
    ) -> Memory:  # fmt: skip
        """Memory without tokens, shape (batch, num_kv_heads, capacity) and widths (d_k, d_v)."""
        parts = {"key": (widths[0], dtype), "value": (widths[1], dtype)}
        if dtype == "int8":
            parts |= {"key_scale": (1, "float32"), "value_scale": (1, "float32")}
        arrays = {part: zeros((*shape, width), name, like) for part, (width, name) in parts.items()}
        lengths = np.zeros(shape[0], dtype=np.int64)
        return cls(arrays, num_sinks, lengths, np.full_like(lengths, num_sinks))

    @property
    def capacity(self) -> int:
        """Slots of each entry."""
        return int(self.arrays["key"].shape[2])

    @property
    def used(self) -> int:
        """Slots of the longest entry that may hold a token."""
        return min(self.capacity, int(self.lengths.max()))

    @property
    def dtype(self) -> str:
        """Name of the dtype that is stored."""
        return _arrays.dtype_name(self.arrays["key"])

    @property
    def is_int8(self) -> bool:
        """Whether numbers are stored as codes with scales."""
        return "key_scale" in self.arrays

    def _slots(self, position: Any, capacity: int) -> Any:
        ring = (position - self.num_sinks) % (capacity - self.num_sinks)
        return np.where(position < self.num_sinks, position, self.num_sinks + ring)

    def write(self, given: dict[str, Array], counts: Any) -> None:
        """Add the first ``counts`` (batch,) of the tokens (batch, num_kv_heads, new, d)."""
        tokens = {part: _arrays.constant(x) for part, x in given.items()}
        if self.is_int8:
            for part in given:
                tokens[part], tokens[f"{part}_scale"] = quantised(tokens[part])
        lengths, total = self.lengths, self.lengths + counts
        is_uniform = bool(np.all(counts == counts[0]) and np.all(lengths == lengths[0]))
        if _arrays.library(self.arrays["key"]) == "jax":
            is_uniform = False  # which compiles anew for every slice, but not for other indices
        number = counts[:1] if is_uniform else counts
        entry = np.repeat(np.arange(len(number)), number)
        token = np.arange(len(entry)) - np.repeat(np.cumsum(number) - number, number)
        position = lengths[entry] + token
        # Of more tokens than the ring holds, only the last are written: no slot twice.
        oldest = np.maximum(self.oldest, total - (self.capacity - self.num_sinks))
        kept = (position < self.num_sinks) | (position >= oldest[entry])
        entry, token, slot = entry[kept], token[kept], self._slots(position[kept], self.capacity)
        # Everything is at hand before the first slot is written: running out of memory while
        # tokens are gathered changes nothing.
        every, new = slice(None), []
        for part, x in tokens.items():
            if is_uniform:
                new += [
                    (part, (every, every, slice(to, to + count)), x[:, :, start : start + count])
                    for start, to, count in runs(token, slot)
                ]
            else:
                new.append((part, (entry, every, slot), x[entry, :, token]))
        for part, index, values in new:
            self.arrays[part] = put(self.arrays[part], index, values)
        self.lengths, self.oldest = total, oldest

    def load(self, saved: dict[str, Array]) -> None:
        """Fill the first slots with arrays alike, or raise ValueError."""
        for part, x in self.arrays.items():
            shape = (*x.shape[:2], self.used, x.shape[3])
            if tuple(saved[part].shape) != shape:
                raise ValueError(f"{part} {tuple(saved[part].shape)} instead of {shape}")
            if _arrays.dtype_name(saved[part]) != _arrays.dtype_name(x):
                raise ValueError(f"{part} of {_arrays.dtype_name(saved[part])}")
            index = slice(None), slice(None), slice(0, self.used)
            self.arrays[part] = put(x, index, saved[part])

    def resized(self, batch: int, capacity: int) -> dict[str, Array]:
        """New arrays without tokens."""
        return {
            part: zeros((batch, x.shape[1], capacity, x.shape[3]), _arrays.dtype_name(x), x)
            for part, x in self.arrays.items()
        }

    def grow(self, capacity: int) -> None:
        """Move to larger arrays, where the ring is longer and tokens lie in other slots."""
        grown = self.resized(len(self.lengths), capacity)
        for entry, length in enumerate(self.lengths.tolist()):
            sinks = np.arange(min(length, self.num_sinks))
            held = np.concatenate([sinks, np.arange(self.oldest[entry], length)])
            here, there = self._slots(held, self.capacity), self._slots(held, capacity)
            for source, target, count in runs(here, there):
                index = entry, slice(None), slice(target, target + count)
                for part, x in self.arrays.items():
                    grown[part] = put(grown[part], index, x[entry, :, source : source + count])
        self.arrays = grown

    def reorder(self, source: Any) -> None:
        """Entry i becomes a copy of entry ``source[i]``."""
        target, arrays, used = np.arange(len(source)), self.arrays, slice(0, self.used)
        if len(source) == len(self.lengths):
            target = np.flatnonzero(source != target)
        else:
            arrays = self.resized(len(source), self.capacity)
        # All entries are read before one is written: an exchange has no order.
        moved = {part: x[source[target], :, used] for part, x in self.arrays.items()}
        self.arrays = {
            part: put(x, (target, slice(None), used), moved[part]) for part, x in arrays.items()
        }
        self.lengths, self.oldest = self.lengths[source], self.oldest[source]

    def sinks(self) -> list[Stretch]:
        """The sinks, at least one stretch."""
        length = np.minimum(self.lengths, self.num_sinks)
        return self._in_use([Stretch(range(self.num_sinks), np.asarray(0), length)], 0)

    def ring(self, first: Any) -> list[Stretch]:
        """All other tokens, at least one stretch, for queries that see none before ``first``.

        In each entry the ring is two stretches: the present round, and what the round before
        left behind it. Where a round begins is an offset of each entry, so that both are the
        whole ring, seen in two ways. Slots of the present round appear in the earlier one as
        positions that are lost: the caller's window excludes them.
        """
        slots = range(self.num_sinks, self.capacity)
        count = np.maximum(self.lengths - self.num_sinks, 0)
        rounds = count // len(slots)
        offset = self.num_sinks + rounds * len(slots)
        before = np.where(rounds > 0, len(slots), 0)
        present = np.maximum(self.lengths - offset, 0)
        both = [Stretch(slots, offset - len(slots), before), Stretch(slots, offset, present)]
        return self._in_use(both, first)

    def _in_use(self, stretches: list[Stretch], first: Any) -> list[Stretch]:
        """Those of which some entry needs a token from ``first`` on."""
        found = [
            x for x in stretches if np.any((x.length > 0) & (x.offset + x.length > first))
        ]
        return found or [Stretch(range(0), np.asarray(0), np.asarray(0))]

    def chunks(
        self, stretches: list[Stretch], dtype: Any, mask: Array | None, first: Any
    ) -> Iterator[Chunk]:
        """Views of stretches of slots; of int8 memory numbers in ``dtype``, piece by piece.

        Pieces that no entry needs are left out.
        """
        if self.is_int8:
            stretches = self._in_use([p for x in stretches for p in x.pieces()], first)
        for slots, kv_offset, kv_len in stretches:
            key, value = (self.read(part, slots, dtype) for part in ("key", "value"))
            yield Chunk(key, value, kv_offset, kv_len, mask)

    def codes(self, slots: range) -> list[Array]:
        """Codes and scales in these slots of int8 memory, keys first; views."""
        here = slice(slots.start, slots.stop)
        parts = ("key", "key_scale", "value", "value_scale")
        return [self.arrays[part][:, :, here] for part in parts]

    def read(self, part: str, slots: range, dtype: Any) -> Array:
        """Keys or values in these slots: a view, or numbers in ``dtype`` that int8 stands for."""
        here = slice(slots.start, slots.stop)
        stored = self.arrays[part][:, :, here]
        if not self.is_int8:
            return stored
        return restored(stored, self.arrays[f"{part}_scale"][:, :, here], dtype)


def zeros(shape: tuple[int, ...], name: str, like: Array) -> Array:
    """New memory of the library and on the device of ``like``; of NumPy where that is None."""
    if like is None or isinstance(like, np.ndarray):
        if name == "bfloat16":
            try:
                importlib.import_module("ml_dtypes")  # makes the dtype known to NumPy
            except ModuleNotFoundError:
                raise missing_extra("ml_dtypes", "bf16") from None
        return np.zeros(shape, dtype=name)
    xp = _arrays.namespace(like)
    with _lasting(like):
        return xp.zeros(shape, dtype=getattr(xp, name), **_arrays.device_of(like))


def _lasting(like: Array) -> contextlib.AbstractContextManager[Any]:
    """Where new tensors can be written to later, outside of PyTorch's ``inference_mode``, too."""
    if _arrays.library(like) != "torch":
        return contextlib.nullcontext()
    manager: contextlib.AbstractContextManager[Any] = sys.modules["torch"].inference_mode(False)
    return manager


def put(memory: Array, index: Any, values: Array) -> Array:
    """Write values into memory and return it: a new array where those of a library are constant."""
    if _arrays.library(memory) == "jax":
        return memory.at[index].set(values)
    memory = writable(memory)
    memory[index] = values
    return memory


def writable(memory: Array) -> Array:
    """Return memory, or a copy of what was unpickled or copied in PyTorch's ``inference_mode``."""
    if _arrays.library(memory) != "torch" or not memory.is_inference():
        return memory
    with _lasting(memory):
        return memory.clone()


def runs(first: Any, second: Any) -> Iterator[tuple[int, int, int]]:
    """Cut two index arrays of one length where either jumps: pairs of starts, and a length."""
    jumps = np.flatnonzero((np.diff(first) != 1) | (np.diff(second) != 1)) + 1
    ends = [0, *jumps.tolist(), len(first)]
    for start, stop in itertools.pairwise(ends):
        if stop > start:
            yield int(first[start]), int(second[start]), stop - start


def quantised(x: Array) -> tuple[Array, Array]:
    """Codes of int8 (..., d) and float32 scales (..., 1) with ``|x - codes·scale| ≤ scale / 2``.

    A token with a number that is not finite, in float32, has a scale that is not finite either.
    """
    xp = _arrays.namespace(x)
    with _arrays.quiet(xp):
        wide = xp.astype(x, _arrays.accumulation_dtype(xp, _arrays.dtype_name(x)), copy=False)
        scale = xp.max(xp.abs(wide), axis=-1, keepdims=True) / LARGEST
        scale = xp.astype(xp.clip(scale, SMALLEST_SCALE, None), xp.float32, copy=False)
        codes = xp.clip(xp.round(wide / scale), -LARGEST, LARGEST)
        # No integer stands for nan; 0 times such a scale is nan again.
        codes = xp.where(xp.isfinite(scale), codes, xp.zeros_like(codes))
        return xp.astype(codes, xp.int8), scale


def restored(codes: Array, scale: Array, dtype: Any) -> Array:
    """Numbers for `quantised` codes; nan where the scale is not finite."""
    xp = _arrays.namespace(codes)
    with _arrays.quiet(xp):
        return xp.astype(codes, dtype) * xp.astype(scale, dtype, copy=False)


