"""Keys and values in pages of memory that sequences share."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np

from scaledot import _arrays, _cache_checks, _cache_memory, _checks
from scaledot._errors import type_error, value_error
from scaledot._paged import for_each, paged_attention
from scaledot._typing import Array, ArrayT, Impl

SPREAD = 4096
"""Bytes, at most, that lie between pages, see `_pool`."""


@dataclass
class _Sequence:
    """Pages of a sequence, in order, and the number of its tokens."""

    pages: list[int]
    length: int


class _Growth(NamedTuple):
    """What one sequence needs to grow.

    New pages, and the shared page that it must leave: its tokens go to the first new one.
    """

    takes: list[int]
    leaves: int | None


class PagedKVCache:
    """Keys and values of many sequences in one pool of pages, with shared beginnings.

    Sequences take pages as their tokens come and give them back when they are freed. A fork
    shares all pages of its parent; a page that is shared is copied before one of them writes to it.

    Parameters
    ----------
    num_pages, page_size : int
        Pages in the pool, and tokens in a page, both at least 1.
    num_kv_heads, d_k, d_v : int
        Heads and widths of keys and values, at least 1.
    dtype : dtype or str
        float32, float64, float16 or bfloat16; a dtype of PyTorch makes tensors.
    like : array, optional
        The pool belongs to its library, NumPy or PyTorch, and lies on its device.

    Attributes
    ----------
    key_pages : array, shape (num_pages, page_size, num_kv_heads, d_k)
        The pool, as `paged_attention` takes it: a view.
    value_pages : array, shape (num_pages, page_size, num_kv_heads, d_v)
        The pool of values.

    Raises
    ------
    TypeError, ValueError
        Numbers below 1, another dtype, a library whose arrays cannot be written to.

    Notes
    -----
    All memory is taken at once and no call takes more but for what `paged_attention` says. Tokens
    are stored as constants: gradients reach queries, not the cache. Can be pickled.

    References
    ----------
    arXiv 2309.06180.

    Examples
    --------
    >>> import numpy as np, scaledot as sd
    >>> cache = sd.PagedKVCache(8, 4, num_kv_heads=1, d_k=2, d_v=2, dtype="float32")
    >>> prompt = cache.new()
    >>> x = np.ones((1, 1, 6, 2), np.float32)  # (len(ids), num_kv_heads, new, d)
    >>> cache.append([prompt], x, x)
    >>> answer = cache.fork(prompt)
    >>> cache.append([answer], x[:, :, :1], x[:, :, :1])
    >>> cache.lengths([prompt, answer]).tolist(), cache.num_free  # one full page is shared
    ([6, 7], 5)
    >>> cache.attention(x[:, :, :1], [answer]).shape
    (1, 1, 1, 2)
    """

    def __init__(
        self, num_pages: int, page_size: int, num_kv_heads: int, d_k: int, d_v: int, dtype: Any,
        *, like: Array | None = None,
    ) -> None:  # fmt: skip
        names = ("num_pages", "page_size", "num_kv_heads", "d_k", "d_v")
        sizes = [
            _checks.integer(name, size)
            for name, size in zip(
                names, (num_pages, page_size, num_kv_heads, d_k, d_v), strict=True
            )
        ]
        for name, size in zip(names, sizes, strict=True):
            if size < 1:
                raise value_error(f"{name} must be at least 1", size, "Pass a positive int.")
        num_pages, page_size, num_kv_heads, d_k, d_v = sizes
        self._key = _pool(num_pages, page_size, num_kv_heads, d_k, dtype, like)
        self._value = _pool(num_pages, page_size, num_kv_heads, d_v, dtype, like)
        self._page_size, self._num_kv_heads = page_size, num_kv_heads
        self._sequences: dict[int, _Sequence] = {}
        self._next_id = 0
        self._references = [0] * num_pages
        self._free = list(reversed(range(num_pages)))  # the last one is taken first

    @property
    def key_pages(self) -> Array:
        """The pool of keys, (num_pages, page_size, num_kv_heads, d_k), for `paged_attention`."""
        return self._pages(self._key)

    @property
    def value_pages(self) -> Array:
        """The pool of values, (num_pages, page_size, num_kv_heads, d_v)."""
        return self._pages(self._value)

    def _pages(self, pool: Array) -> Array:
        """View of a pool with axes as `paged_attention` has them."""
        size, heads = self._page_size, self._num_kv_heads
        pages = pool[:, : heads * size].reshape(len(pool), heads, size, pool.shape[-1])
        return _arrays.namespace(pool).permute_dims(pages, (0, 2, 1, 3))

    @property
    def num_free(self) -> int:
        """Pages that no sequence uses."""
        return len(self._free)

    def new(self) -> int:
        """Begin an empty sequence, which has no page yet.

        Returns
        -------
        int
            Its id. Ids are never given twice.
        """
        return self._add(_Sequence([], 0))

    def fork(self, id: int) -> int:
        """Begin a sequence with the tokens of another, sharing its pages.

        Takes no page: the last one, if partly filled, is copied by who first appends to it.

        Parameters
        ----------
        id : int
            Of the sequence to continue from.

        Returns
        -------
        int
            The new sequence's id.

        Raises
        ------
        TypeError, ValueError
            Not the id of a sequence in the cache.
        """
        parent = self._sequence("id", id)
        for page in parent.pages:
            self._references[page] += 1
        return self._add(_Sequence(list(parent.pages), parent.length))

    def free(self, id: int) -> None:
        """Forget a sequence; pages that no other uses can be taken again.

        Parameters
        ----------
        id : int
            Of the sequence to forget.

        Raises
        ------
        TypeError, ValueError
            Not the id of a sequence in the cache, one that was freed before included.
        """
        pages = self._sequence("id", id).pages
        del self._sequences[_checks.integer("id", id)]
        for page in reversed(pages):  # so that they are taken again in their order
            self._references[page] -= 1
            if not self._references[page]:
                self._free.append(page)

    def lengths(self, ids: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Number of tokens of each sequence.

        Parameters
        ----------
        ids : 1-D integer array or sequence
            Of sequences in the cache.

        Returns
        -------
        int64 array of NumPy, shape (len(ids),)
            A copy, as `paged_attention` takes it.
        """
        return np.array([x.length for x in self._all("ids", ids)], dtype=np.int64)

    def page_table(self, ids: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Numbers of the pages of each sequence.

        Parameters
        ----------
        ids : 1-D integer array or sequence
            Of sequences in the cache.

        Returns
        -------
        int64 array of NumPy, shape (len(ids), most pages of one)
            A copy, as `paged_attention` takes it; rows are padded with -1.
        """
        lists = [x.pages for x in self._all("ids", ids)]
        table = np.full((len(lists), max(map(len, lists), default=0)), -1, dtype=np.int64)
        for row, pages in zip(table, lists, strict=True):
            row[: len(pages)] = pages
        return table

    def append(self, ids: Any, key: Array, value: Array, *, lengths: Any = None) -> None:
        """Add tokens to one or several different sequences; all or nothing.

        Parameters
        ----------
        ids : 1-D integer array or sequence
            Of different sequences.
        key : array, shape (len(ids), num_kv_heads, new, d_k)
            In the library and dtype of the cache.
        value : array, shape (len(ids), num_kv_heads, new, d_v)
            The values of these tokens.
        lengths : 1-D integer array or sequence, optional
            How many of the ``new`` tokens each sequence gets, counted from the first.

        Raises
        ------
        TypeError, ValueError
            Ids that are unknown or not different, arrays that do not fit, too few free pages, those
            for copies of shared ones included. Then nothing has changed.
        """
        sequences = self._all("ids", ids)
        counts = self._checked_counts(sequences, key, value, lengths)
        growths = self._plan(sequences, counts)
        self._key, self._value = map(_cache_memory.writable, (self._key, self._value))
        # Bookkeeping comes last: whatever stops the writing leaves the cache as it was.
        self._write(sequences, counts, growths, key, value)
        for sequence, count, (takes, leaves) in zip(sequences, counts, growths, strict=True):
            if leaves is not None:
                self._references[leaves] -= 1
                sequence.pages.pop()
            for page in takes:
                self._references[page] = 1
            del self._free[len(self._free) - len(takes) :]
            sequence.pages += takes
            sequence.length += count

    def attention(
        self,
        query: ArrayT,
        ids: Any,
        *,
        causal: bool = True,
        window: tuple[int | None, int | None] | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        alibi_slopes: Array | None = None,
        sinks: Array | None = None,
        lengths: Any = None,
        impl: Impl = "auto",
    ) -> ArrayT:
        """Attention of the last tokens of each sequence over all of its tokens.

        Parameters
        ----------
        query : array, shape (len(ids), num_heads, len_q, d_k)
            The last ``len_q`` tokens of each sequence, which have been appended before.
        ids : 1-D integer array or sequence
            One sequence for each entry of query.
        causal, window, scale, softcap, alibi_slopes, sinks, impl : optional
            As in `paged_attention`.
        lengths : 1-D integer array or sequence, optional
            How many of the ``len_q`` queries each sequence has, counted from the first, as in
            `append`; rows past them are padding and mean nothing.

        Returns
        -------
        array, shape (len(ids), num_heads, len_q, d_v)
            As from `paged_attention`.

        Raises
        ------
        TypeError, ValueError
            Unknown ids, a query that does not fit, and as in `paged_attention`.
        """
        _arrays.check_array("query", query)
        kv_len, shape = self.lengths(ids), tuple(cast(Any, query).shape)
        if len(shape) != 4 or shape[0] != len(kv_len):
            raise value_error(
                f"query must have the axes (len(ids) = {len(kv_len)}, num_heads, len_q, d_k)",
                shape, "It has one entry for each id.",
            )
        q_offset = None
        if lengths is not None:
            q_offset = kv_len - _up_to(shape[2], "len_q", lengths, len(kv_len))
        out = paged_attention(
            query, self.key_pages, self.value_pages, self.page_table(ids), kv_len, causal=causal,
            window=window, scale=scale, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
            q_offset=q_offset, impl=impl,
        )  # fmt: skip
        return cast(ArrayT, out)

    def _add(self, sequence: _Sequence) -> int:
        number = self._next_id
        self._sequences[number] = sequence
        self._next_id += 1
        return number

    def _sequence(self, name: str, given: Any) -> _Sequence:
        number = _checks.integer(name, given)
        if number not in self._sequences:
            was = "was freed" if 0 <= number < self._next_id else "never was in it"
            raise value_error(
                f"{name} must be that of a sequence in the cache", f"{number}, which {was}",
                "new() and fork() return ids; free() ends them.",
            )
        return self._sequences[number]

    def _all(self, name: str, ids: Any) -> list[_Sequence]:
        numbers = _checks.integers(name, ids, "Pass a list, also of one id.")
        return [self._sequence(name, number) for number in numbers]

    def _checked_counts(
        self, sequences: list[_Sequence], key: Array, value: Array, lengths: Any
    ) -> list[int]:
        """Check what is to be appended; return the number of tokens for each sequence."""
        if len(set(map(id, sequences))) < len(sequences):
            raise value_error(
                "ids must be different", "one of them twice", "Append its tokens at once."
            )
        _checks.alike(key_pages=self.key_pages, key=key, value=value)
        new = key.shape[2] if key.ndim == 4 else -1
        for name, x, pages in (("key", key, self.key_pages), ("value", value, self.value_pages)):
            heads, d = pages.shape[2:]
            if tuple(x.shape) != (len(sequences), heads, new, d):
                tokens = "new" if x is key else new
                raise value_error(
                    f"{name} must have the shape (len(ids), num_kv_heads, new, d) = "
                    f"({len(sequences)}, {heads}, {tokens}, {d})", tuple(x.shape),
                    "It has one entry for each id; heads come before tokens.",
                )  # fmt: skip
        if lengths is None:
            return [new] * len(sequences)
        return [int(x) for x in _up_to(new, "new", lengths, len(sequences))]

    def _plan(self, sequences: list[_Sequence], counts: list[int]) -> list[_Growth]:
        """What each sequence takes and leaves; raise where there are too few free pages."""
        page_size = self.key_pages.shape[1]
        spare = itertools.chain(reversed(self._free), itertools.repeat(-1))
        left: Counter[int] = Counter()  # of two that share a page, only the first needs a copy
        growths = []
        for sequence, count in zip(sequences, counts, strict=True):
            wanted, leaves = -(-(sequence.length + count) // page_size), None
            if count and sequence.length % page_size:
                last = sequence.pages[-1]
                if self._references[last] - left[last] > 1:
                    leaves = last
                    left[last] += 1
            more = wanted - len(sequence.pages) + (leaves is not None)
            growths.append(_Growth(list(itertools.islice(spare, more)), leaves))
        needed = sum(len(x.takes) for x in growths)
        if needed > self.num_free:
            raise value_error(
                "append must find a free page for all that it needs",
                f"{needed} needed, {left.total()} of them for copies of shared pages, and "
                f"{self.num_free} free of {len(self._references)}",
                "Nothing has changed: free a sequence and try again.",
            )
        return growths

    def _write(
        self, sequences: list[_Sequence], counts: list[int], growths: list[_Growth],
        key: Array, value: Array,
    ) -> None:
        """Copy pages that are left and put the tokens behind those that are there."""
        page_size = self.key_pages.shape[1]
        found: list[tuple[Any, Any, Any, Any]] = []  # of every token: whose, which, page, slot
        for entry, (sequence, count, growth) in enumerate(
            zip(sequences, counts, growths, strict=True)
        ):
            tail, filled = growth.takes, sequence.length % page_size
            if growth.leaves is not None:
                for pages in (self.key_pages, self.value_pages):
                    pages[tail[0], :filled] = pages[growth.leaves, :filled]
            elif filled:
                tail = [sequence.pages[-1], *tail]
            places = np.arange(filled, filled + count)
            page = np.array(tail, dtype=np.int64)[places // page_size]
            found.append((np.full(count, entry), np.arange(count), page, places % page_size))
        if not found:
            return
        index = [_arrays.like(key, np.concatenate(x)) for x in zip(*found, strict=True)]
        xp, (entries, tokens, page, slot) = _arrays.namespace(key), index
        for x, pages in ((key, self.key_pages), (value, self.value_pages)):
            rows = xp.permute_dims(_arrays.constant(x), (0, 2, 1, 3))
            pages[page, slot] = rows[entries, tokens]  # (all new tokens, num_kv_heads, d)


def _up_to(most: int, name: str, given: Any, count: int) -> Any:
    """Lengths of each sequence's part of ``most`` tokens, (count,) of NumPy."""
    known = for_each("lengths", given, count)
    if np.any((known < 0) | (known > most)):
        raise value_error(
            f"lengths must lie between 0 and {name} = {most}", f"{known.min()} to {known.max()}",
            "They count from the first token.",
        )
    return known


def _pool(
    num_pages: int, page_size: int, heads: int, d: int, dtype: Any, like: Array | None
) -> Array:
    """Memory for pages, (num_pages, rows, d): the tokens of a page lie together for each head.

    That is how a head reads them. Pages at distances of large powers of two would drive each other
    out of the processor's caches: a few rows that hold nothing prevent it.
    """
    name, rows, spare = _name(dtype), heads * page_size, 0
    if heads % 2 == 0:
        spare = min(page_size, max(1, SPREAD // (d * _arrays.itemsize(name))))
    shape = (num_pages, rows + spare, d)
    _cache_checks.addressable("num_pages", num_pages, (rows + spare) * d * _arrays.itemsize(name))
    return _zeros(shape, dtype, like)


def _name(dtype: Any) -> str:
    name = str(getattr(dtype, "__name__", dtype)).removeprefix("torch.")
    if name not in _arrays.FLOATS:
        raise type_error(
            f"dtype must be one of {', '.join(_arrays.FLOATS)}", repr(dtype), "Pass its name."
        )
    return name


def _zeros(shape: tuple[int, ...], dtype: Any, like: Array | None) -> Array:
    """Memory for pages in the library that ``like``, or else the dtype, belongs to."""
    if like is not None:
        _arrays.check_array("like", like)
    elif type(dtype).__module__ == "torch":
        import torch

        like = torch.empty(0)
    else:
        like = np.empty(0)
    kind = _arrays.library(like)
    if kind not in ("numpy", "torch"):
        raise type_error(
            "like must be an array of NumPy or PyTorch, which can be written to", kind,
            "Hold pages of other libraries yourself and call paged_attention.",
        )
    return _cache_memory.zeros(shape, _name(dtype), like)
