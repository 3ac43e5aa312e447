"""Keys and values that need not fit into memory: cut into chunks, and read ahead."""

from __future__ import annotations

import collections
import contextlib
import importlib
import math
import mmap
import os
import threading
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import numpy as np

from scaledot import _arrays, _checks
from scaledot._chunks import Chunk
from scaledot._errors import type_error, value_error
from scaledot._typing import Array, Offsets

CHUNK_BYTES = 2**25
"""Keys and values of one chunk, where no length is asked for."""
TILE = 512
"""Tokens: a chunk that holds more is a multiple of it, so that tiles of scores are whole."""
_PIECE = 2**17
"""Bytes asked for at once: Linux reads no more for one request than its usual read-ahead."""
_PATIENCE = 1.0
"""Seconds to wait for the thread of a closed iterator, which may be in a long read."""
_STORED = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Names of dtypes in safetensors files."""


def read_chunks(
    key: Array,
    value: Array,
    *,
    chunk_len: int | None = None,
    kv_offset: Offsets = 0,
    read_ahead: int = 1,
) -> Generator[Chunk, None, None]:
    """Cut keys and values, in memory or in files, into chunks for `attend_chunks`.

    ``attend_chunks(query, read_chunks(key, value))`` holds one chunk at a time, whatever the
    length: the files may be larger than memory.

    Parameters
    ----------
    key : array or slice of a file, shape (..., num_kv_heads, len_kv, d_k)
        An array as for `attention`, ``np.memmap`` and views of one included, or what
        ``safetensors.safe_open(path, framework).get_slice(name)`` returns.
    value : array or slice of a file, shape (..., num_kv_heads, len_kv, d_v)
        Of the same kind as key, and of the same length.
    chunk_len : int, optional
        Tokens of a chunk; the last one may be shorter. None makes chunks of 32 MiB, keys and
        values together, whatever the machine: so results are the same to the bit everywhere.
    kv_offset : int or integer array
        Position of the first key.
    read_ahead : int
        Chunks to read before they are needed, while others are computed with: the ``depth`` of
        `read_ahead`, or 0 to read each when it is asked for.

    Returns
    -------
    generator of Chunk
        In the order of positions; one chunk of length 0 where there are no keys.

    Raises
    ------
    TypeError
        Neither an array of a known library nor a slice of a file; numbers that are not integers.
    ValueError
        Lengths of key and value that differ, fewer than two axes, ``chunk_len`` below 1, an
        offset too far out. From the generator, in a process forked after its thread began: as in
        `read_ahead`.

    Notes
    -----
    Chunks of arrays are views. Of memory-mapped arrays, pages of chunks to come are asked for
    (``MADV_WILLNEED``), and those of a chunk that is done with are given back when the next is
    asked for (``MADV_DONTNEED``), whole pages only. They are read again if the array is used
    again: no data is lost. Maps that are copied on write (mode ``"c"``) keep their pages, and so
    does everything where the system has no such call. Slices of safetensors files are copied out
    of them, by a thread of its own when ``read_ahead`` is not 0; close the generator, or leave it
    to be collected, and the thread ends.

    References
    ----------
    arXiv 1805.02867 for the fold over chunks.

    Examples
    --------
    >>> import numpy as np, scaledot as sd
    >>> query, key, value = np.random.default_rng(0).standard_normal((3, 2, 50, 8))
    >>> [chunk.key.shape for chunk in sd.read_chunks(key, value, chunk_len=20)]
    [(2, 20, 8), (2, 20, 8), (2, 10, 8)]
    >>> chunks = sd.read_chunks(key, value, chunk_len=20)
    >>> state = sd.attend_chunks(query, chunks, causal=True, q_offset=0)
    >>> np.allclose(state.out, sd.attention(query, key, value, causal=True))
    True
    """
    shapes = [_shape(name, x) for name, x in (("key", key), ("value", value))]
    length = shapes[0][-2]
    if shapes[1][-2] != length:
        raise value_error(
            "key and value must have the same length",
            f"{length} and {shapes[1][-2]} (key {shapes[0]}, value {shapes[1]})",
            "Axes are (..., num_heads, len, d): is one of them transposed?",
        )
    if chunk_len is None:
        token = sum(
            _itemsize(name, x) * math.prod(shape) // max(1, length)
            for name, x, shape in zip(("key", "value"), (key, value), shapes, strict=True)
        )
        chunk_len = tokens_of(CHUNK_BYTES, token)
    else:
        chunk_len = _count("chunk_len", chunk_len, 1, "None makes chunks of 32 MiB.")
    depth = _count("read_ahead", read_ahead, 0, "0 reads nothing ahead.")
    kv_offset = _offset(kv_offset)
    starts = range(0, max(1, length), chunk_len)
    cuts = ((start, min(start + chunk_len, length)) for start in starts)
    return walk(key, value, cuts, kv_offset, depth)


def read_ahead(chunks: Iterable[Chunk], *, depth: int = 1) -> Generator[Chunk, None, None]:
    """Advance an iterator of chunks in a thread of its own, while others are computed with.

    Parameters
    ----------
    chunks : iterable of Chunk
        Say, a generator that reads, receives or converts them. It runs in one thread only.
    depth : int
        Chunks that may wait at most, the one being made included. `read_chunks` calls the same
        number ``read_ahead``.

    Returns
    -------
    generator of Chunk
        The same chunks in the same order. Close it, or leave it to be collected, and the thread
        ends after the step that it is in; what ``chunks.close()`` does is done then, also where no
        chunk was asked for.

    Raises
    ------
    TypeError
        Not an iterable, or a depth that is not an integer.
    ValueError
        A depth below 1. From the generator, when it is asked for a chunk in a process forked after
        the first one: the thread is not there. Before the first chunk, forks are free to use it.

    Notes
    -----
    Memory is that of ``depth + 1`` chunks, the one in use included. An error in ``chunks`` is
    raised in its place, after the chunks before it. The thread starts with the first chunk that
    is asked for, and does not keep Python from ending.

    References
    ----------
    arXiv 1805.02867 for the fold over chunks.

    Examples
    --------
    >>> import numpy as np, scaledot as sd
    >>> query, key, value = np.random.default_rng(0).standard_normal((3, 2, 50, 8))
    >>> def received():
    ...     for start in range(0, 50, 10):
    ...         part = np.s_[:, start : start + 10]
    ...         yield sd.Chunk(key[part], value[part], kv_offset=start)
    >>> state = sd.attend_chunks(query, sd.read_ahead(received()))
    >>> np.allclose(state.out, sd.attention(query, key, value))
    True
    """
    if not isinstance(chunks, Iterable):
        raise type_error(
            "chunks must be an iterable of Chunk objects", type(chunks).__name__, "Pass a list."
        )
    return _ahead(chunks, _count("depth", depth, 1, "Leave the call out to read nothing ahead."))


def tokens_of(budget: int, token: int) -> int:
    """Tokens of that many bytes that fit a budget, in whole tiles where there is more than one."""
    fits = max(1, budget // max(1, token))
    return fits if fits < TILE else fits // TILE * TILE


def walk(
    key: Array, value: Array, cuts: Iterable[tuple[int, int]], kv_offset: Offsets, depth: int
) -> Generator[Chunk, None, None]:
    """Chunks from start to stop of each cut; arguments are known to be right."""
    # Plain views: calls on chunks that are alike are prepared once.
    key, value = (np.asarray(x) if isinstance(x, np.memmap) else x for x in (key, value))
    if depth and (_is_slice(key) or _is_slice(value)):
        return _ahead(_walk(key, value, cuts, kv_offset, 0), depth)
    return _walk(key, value, cuts, kv_offset, depth)


def _walk(
    key: Array, value: Array, cuts: Iterable[tuple[int, int]], kv_offset: Offsets, depth: int
) -> Generator[Chunk, None, None]:
    coming: collections.deque[tuple[int, int]] = collections.deque()
    rest = iter(cuts)
    arrays = [x for x in (key, value) if _memmap(x) is not None]
    while True:
        while len(coming) <= depth and (cut := next(rest, None)) is not None:
            coming.append(cut)
            if depth:
                ask(*(_cut(x, *cut) for x in arrays))
        if not coming:
            return
        start, stop = coming.popleft()
        try:
            yield Chunk(_cut(key, start, stop), _cut(value, start, stop), kv_offset + start)
        finally:
            give_back(*(_cut(x, start, stop) for x in arrays))


def _is_slice(x: Any) -> bool:
    """Whether x is what safetensors makes of an array in a file: it has a shape and an index."""
    return hasattr(x, "get_shape") and hasattr(x, "get_dtype")


def _shape(name: str, x: Any) -> tuple[int, ...]:
    """Shape of an array or slice; raise for anything else."""
    if _is_slice(x):
        shape = tuple(x.get_shape())
        if x.get_dtype() == "BF16":  # only with ml_dtypes does NumPy know it
            with contextlib.suppress(ImportError):
                importlib.import_module("ml_dtypes")
    elif _arrays.library(x) is None:
        raise type_error(
            f"{name} must be one of {_arrays.KNOWN}, or a slice of a safetensors file",
            _arrays.describe(x),
            "Convert it, or open the file with safe_open and pass get_slice(name).",
        )
    else:
        _arrays.check_array(name, x)
        shape = tuple(x.shape)
    if len(shape) < 2:
        raise value_error(
            f"{name} must have at least two axes", f"{name} {shape}",
            "Axes are (..., num_heads, len, d), or (len, d) for one head.",
        )
    return shape


def _itemsize(name: str, x: Any) -> int:
    dtype = _STORED.get(x.get_dtype(), x.get_dtype()) if _is_slice(x) else _arrays.dtype_name(x)
    if dtype not in _arrays.FLOATS:
        raise type_error(
            f"{name} must hold numbers of {', '.join(_arrays.FLOATS)}", dtype,
            "Convert each chunk in a generator of your own, and pass chunk_len.",
        )
    return _arrays.itemsize(dtype)


def _count(name: str, number: Any, least: int, hint: str) -> int:
    if isinstance(number, bool) or not isinstance(number, (int, np.integer)):
        raise type_error(f"{name} must be an integer", _arrays.describe(number), hint)
    if number < least:
        raise value_error(f"{name} must be at least {least}", number, hint)
    return int(number)


def _offset(given: Any) -> Any:
    """A position, or an array of some to which lengths can be added in its dtype."""
    if _arrays.library(given) is None:
        number = _checks.integer("kv_offset", given)
        _checks.reach(np.empty(0), "kv_offset", number)
        return number
    _arrays.check_array("kv_offset", given)
    if not _arrays.is_integer(given):
        raise type_error(
            "kv_offset must be an int or an integer array", _arrays.describe(given),
            "Use astype(int).",
        )
    values = _arrays.host(given)
    if values is not None:
        for extreme in (values.min(initial=0), values.max(initial=0)):
            _checks.reach(given, "kv_offset", extreme)
    return _arrays.namespace(given).astype(given, _arrays.index_dtype(given), copy=False)


def _cut(x: Any, start: int, stop: int) -> Any:
    """Tokens of an array, or of a slice of a file, as an array."""
    if not _is_slice(x):
        return x[..., start:stop, :]
    rank = len(x.get_shape())
    if 0 in x.get_shape():  # safetensors looks no further into arrays without entries
        return x[:][..., start:stop, :]
    return x[(*(slice(None),) * (rank - 2), slice(start, stop), slice(None))]


def ask(*arrays: Any) -> None:
    """Tell the system that the pages of memory-mapped arrays will be read soon."""
    for pages, low, high in _spans(arrays, "MADV_WILLNEED"):
        first = low // mmap.PAGESIZE * mmap.PAGESIZE
        for start in range(first, high, _PIECE):
            if not _advise(pages, mmap.MADV_WILLNEED, start, min(start + _PIECE, high)):
                return


def give_back(*arrays: Any) -> None:
    """Tell the system that memory-mapped arrays are done with: pages that are wholly theirs."""
    for pages, low, high in _spans(arrays, "MADV_DONTNEED"):
        start = -(-low // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = high // mmap.PAGESIZE * mmap.PAGESIZE
        if start < stop and not _advise(pages, mmap.MADV_DONTNEED, start, stop):
            return


def _advise(pages: mmap.mmap, advice: int, start: int, stop: int) -> bool:
    """Give advice on bytes of a map; whether the system took it. It is never needed."""
    try:
        pages.madvise(advice, start, stop - start)
    except (OSError, ValueError):  # ValueError: the map has been closed
        return False
    return True


def _spans(arrays: tuple[Any, ...], advice: str) -> Iterator[tuple[mmap.mmap, int, int]]:
    """Bytes from low to high of a map in which arrays lie, for those maps that may be advised on.

    Private changes to a map that is copied on write would be lost with its pages.
    """
    if not hasattr(mmap.mmap, "madvise") or not hasattr(mmap, advice):
        return
    for x in arrays:
        owner = _memmap(x)
        if owner is None or x.size == 0 or owner.mode == "c":
            continue
        pages: mmap.mmap = owner._mmap  # type: ignore[attr-defined]
        try:
            base = np.frombuffer(pages, np.uint8).ctypes.data
        except ValueError:  # closed
            continue
        for low, high in _byte_runs(x):
            yield pages, low - base, high - base


def _memmap(x: Any) -> np.memmap[Any, Any] | None:
    """The mapped array that x is or is a view of."""
    while isinstance(x, np.ndarray):
        if isinstance(x, np.memmap) and isinstance(getattr(x, "_mmap", None), mmap.mmap):
            return x
        x = x.base
    return None


def _byte_runs(x: np.ndarray[Any, Any]) -> Iterator[tuple[int, int]]:
    """Addresses from low to high of the bytes of x, shape (..., len, d), one run for each head.

    Runs that touch, as those of a transposed view do, are one.
    """
    reach = [(n - 1) * step for n, step in zip(x.shape[-2:], x.strides[-2:], strict=True)]
    offsets = np.zeros(1, np.int64)
    for n, step in zip(x.shape[:-2], x.strides[:-2], strict=True):
        if step:  # 0: the same bytes again
            offsets = (offsets[:, None] + np.arange(n) * step).ravel()
    offsets.sort()
    low = x.ctypes.data + sum(min(0, r) for r in reach) + offsets
    high = low + sum(map(abs, reach)) + x.itemsize
    breaks = np.flatnonzero(low[1:] > high[:-1]) + 1
    yield from zip(
        low[np.r_[0, breaks]].tolist(), high[np.r_[breaks - 1, len(high) - 1]].tolist(),
        strict=True,
    )


class _Line:
    """Chunks that wait, between the thread that makes them and the one that takes them."""

    def __init__(self, depth: int) -> None:
        self.waiting: collections.deque[tuple[bool, Any]] = collections.deque()
        self.room = depth
        self.closed = False
        self.changed = threading.Condition()

    def fill(self, chunks: Iterable[Chunk]) -> None:
        """Make chunks while there is room for them; runs in the thread."""
        try:
            source = iter(chunks)
            try:
                while self._wait_for_room() and self._put(source):
                    pass
            finally:
                close = getattr(source, "close", None)
                if close is not None:
                    close()
        except BaseException as error:  # every error belongs to the one who takes
            with self.changed:
                self.waiting.append((False, error))
                self.changed.notify_all()

    def _wait_for_room(self) -> bool:
        with self.changed:
            while not self.room and not self.closed:
                self.changed.wait()
            self.room -= 1
            return not self.closed

    def _put(self, source: Iterator[Chunk]) -> bool:
        try:
            item: tuple[bool, Any] = (True, next(source))
        except StopIteration:
            item = (False, None)
        with self.changed:
            self.waiting.append(item)
            self.changed.notify_all()
        return item[0]

    def take(self) -> tuple[bool, Any]:
        """Whether there is a chunk, and the chunk; otherwise an error, or None at the end."""
        with self.changed:
            while not self.waiting:
                self.changed.wait()
            item = self.waiting.popleft()
            self.room += 1
            self.changed.notify_all()
            return item

    def close(self) -> None:
        """Let the thread end, and drop what waits."""
        with self.changed:
            self.closed = True
            self.waiting.clear()
            self.changed.notify_all()


def _ahead(chunks: Iterable[Chunk], depth: int) -> Generator[Chunk, None, None]:
    made = _made_ahead(chunks, depth)
    next(made)  # begins it, not the thread: its end is then that of chunks
    return made


def _made_ahead(chunks: Iterable[Chunk], depth: int) -> Generator[Any, None, None]:
    """Nothing, then the chunks."""
    try:
        yield
    except BaseException:  # closed, or collected, before the first chunk was asked for
        _close(chunks)
        raise
    line, process = _Line(depth), os.getpid()
    # A daemon: a source that hangs in a read must not keep Python from ending.
    thread = threading.Thread(target=line.fill, args=(chunks,), name="scaledot-read", daemon=True)
    del chunks
    thread.start()
    try:
        while True:
            _check_process(process)
            there, item = line.take()
            if not there:
                if item is None:
                    return
                try:
                    raise item
                finally:
                    del item  # or it would hold itself, and what its frames hold
            # The generator keeps no chunk while the next is made.
            holder = [item]
            del item
            yield holder.pop()
    finally:
        # After a fork there is no thread to end, and what it had locked stays locked.
        if process == os.getpid():
            line.close()
            if thread is not threading.current_thread():  # the collector runs in any thread
                thread.join(_PATIENCE)


def _close(chunks: Iterable[Chunk]) -> None:
    """Close an iterator that was never advanced; other iterables would have made one."""
    close = getattr(chunks, "close", None)
    if close is not None and isinstance(chunks, Iterator):
        close()


def _check_process(process: int) -> None:
    """Raise in another process than that."""
    if os.getpid() != process:
        raise value_error(
            "chunks must be asked for in the process whose thread reads them ahead",
            f"process {os.getpid()}, forked from {process} after the first chunk",
            "Make the iterator, or ask for its first chunk, after the fork.",
        )
