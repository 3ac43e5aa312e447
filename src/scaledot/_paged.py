"""Attention over keys and values that lie in pages of memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import numpy as np

from scaledot import _arrays, _checks, _choice, _reference
from scaledot._chunks import Chunk, attend_chunks
from scaledot._errors import type_error, value_error
from scaledot._rules import derivative_rules
from scaledot._spec import Options, Problem, resolve
from scaledot._state import State, empty_state, merged
from scaledot._typing import Array, ArrayT, Impl, Offsets

SLICE = 1024
"""Tokens in one part of the fold: no more, and the rest of two pages, are gathered at a time."""


def paged_attention(
    query: ArrayT,
    key_pages: ArrayT,
    value_pages: ArrayT,
    page_table: Array,
    kv_len: Array,
    *,
    causal: bool = True,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    q_offset: Offsets | None = None,
    impl: Impl = "auto",
) -> ArrayT:
    """Attention of several sequences over keys and values that lie in pages.

    Token t of sequence b is ``key_pages[page_table[b, t // page_size], t % page_size]``; over
    these keys it is ``softmax(Q Kᵀ / √d_k) V``.

    Parameters
    ----------
    query : array, shape (batch, num_heads, len_q, d_k)
        The last ``len_q`` tokens of every sequence, unless ``q_offset`` says otherwise.
    key_pages : array, shape (num_pages, page_size, num_kv_heads, d_k)
        Any ``page_size`` ≥ 1; ``num_heads`` is a multiple of ``num_kv_heads``.
    value_pages : array, shape (num_pages, page_size, num_kv_heads, d_v)
        As the keys, page for page.
    page_table : integer array, shape (batch, max_pages)
        Numbers of the pages of each sequence, in its order; sequences may share pages. Entries
        past ``ceil(kv_len / page_size)`` are never read: -1, or anything.
    kv_len : integer array or sequence, shape (batch,)
        Tokens of each sequence.
    causal : bool
        As in `attention`, but on unless switched off: pages hold what came before.
    window, scale, softcap, alibi_slopes, sinks, impl : optional
        As in `attention`; positions count inside each sequence.
    q_offset : integer array or sequence, shape (batch,), optional
        Position of each sequence's first query. None is ``kv_len - len_q``: the last query is at
        the last token.

    Returns
    -------
    array, shape (batch, num_heads, len_q, d_v)
        In the library and dtype of query. A row that sees no key is 0.

    Raises
    ------
    TypeError
        Not plain arrays of one library and dtype; a table or lengths that are not integers.
    ValueError
        Shapes that do not fit, lengths beyond the table, a page that does not exist.

    Notes
    -----
    Everything is checked before a page is read. What lies behind ``kv_len`` and in other pages
    cannot matter. The bits of a result depend on its own sequence alone, not on where the pages
    lie, how large they are or who shares them.

    Kernels find the pages themselves and gather nothing. With few queries, keys that sequences
    share are read once for all of them, in parts of 1024 tokens (of long sequences: more). Other
    implementations, and gradients of queries, fold over parts of 1024 tokens and gather each.

    References
    ----------
    arXiv 2309.06180.

    Examples
    --------
    >>> import numpy as np, scaledot as sd
    >>> rng = np.random.default_rng(0)
    >>> key_pages, value_pages = rng.standard_normal((2, 4, 2, 1, 8))  # 4 pages of 2 tokens
    >>> query = rng.standard_normal((2, 1, 1, 8))
    >>> sd.paged_attention(query, key_pages, value_pages, [[3, 0], [1, -1]], [3, 2]).shape
    (2, 1, 1, 8)
    """
    state = paged_state(
        query, key_pages, value_pages, page_table, kv_len,
        Options(causal=causal, window=window, scale=scale, softcap=softcap,
                alibi_slopes=alibi_slopes, sinks=sinks, q_offset=q_offset, impl=impl),
        rounded=True,
    )  # fmt: skip
    xp = _arrays.namespace(query)
    with _arrays.quiet(xp):
        return cast(ArrayT, xp.astype(state.out, cast(Any, query).dtype, copy=False))


def paged_state(
    query: Array, key_pages: Array, value_pages: Array, page_table: Any, kv_len: Any,
    options: Options, *, rounded: bool = False,
) -> State:
    """`paged_attention` with its lse, sinks included, in the accumulation dtype.

    With ``rounded``, ``out`` may come in the dtype of query, and then without lse.
    """
    table, lengths, starts = _checked(query, key_pages, value_pages, page_table, kv_len, options)
    # A key without tokens lets the checks of `attention` see all that these calls have in common.
    xp = _arrays.namespace(query)
    keys, values = (xp.permute_dims(x[:0, 0, ...], (1, 0, 2)) for x in (key_pages, value_pages))
    known = options._replace(q_offset=0)
    problem = resolve(query, keys, values, known)
    if derivative_rules(query, keys, values, known) is None and _is_for_kernels(problem):
        from scaledot import _page_kernels  # loads Numba

        pages = _page_kernels.Pages(key_pages, value_pages, table, lengths, starts)
        narrow = rounded and problem.sinks is None
        state = _page_kernels.run(problem, pages, rounded=narrow)
    else:
        state = _folded(query, key_pages, value_pages, table, lengths, starts, options)
    if problem.sinks is None:
        return state
    with _arrays.quiet(xp):
        return merged(xp, state, _reference.keyless(xp, problem))


def _is_for_kernels(problem: Problem) -> bool:
    """Whether the kernels are to find the pages themselves."""
    return _choice.choose(problem)[0] == "kernels" and bool(problem.spec.lead[0])


def _folded(
    query: Array, key_pages: Array, value_pages: Array, table: Any, lengths: Any, starts: Any,
    options: Options,
) -> State:
    """Attention of every sequence without sinks: a fold over parts that are gathered.

    ``table`` (batch, max_pages), ``lengths`` and ``starts`` (batch,), the position of the first
    query, are of NumPy and have been checked.
    """
    xp = _arrays.namespace(query)
    batch, num_heads, len_q, _ = query.shape
    if not batch:
        dtype = _arrays.accumulation_dtype(xp, _arrays.dtype_name(query))
        return empty_state(xp, (0, num_heads, len_q), value_pages.shape[-1], dtype, query)
    states = [
        attend_chunks(
            query[entry, ...],
            _slices(key_pages, value_pages, table[entry], parts),
            causal=options.causal, window=options.window, scale=options.scale,
            softcap=options.softcap, alibi_slopes=options.alibi_slopes,
            q_offset=int(starts[entry]), impl=options.impl,
        )
        for entry in range(batch)
        for parts in [_visible_parts(int(lengths[entry]), int(starts[entry]), len_q, options)]
    ]
    return State(*(xp.stack(x, axis=0) for x in zip(*states, strict=True)))


def _visible_parts(length: int, start: int, len_q: int, options: Options) -> list[tuple[int, int]]:
    """Begin and end of the parts of a sequence of which queries from ``start`` on see anything.

    Multiples of one length, so that the result follows from the sequence's own lengths.
    """
    left, right = _checks.window(options.window, options.causal)
    first = 0 if left is None else max(0, start - left)
    end = length if right is None else min(length, start + len_q + right)
    begins = range(first // SLICE * SLICE, end if len_q else 0, SLICE)
    return [(begin, min(begin + SLICE, end)) for begin in begins] or [(0, 0)]


def _slices(
    key_pages: Array, value_pages: Array, numbers: Any, parts: list[tuple[int, int]]
) -> Iterator[Chunk]:
    """Parts of a sequence in the pages ``numbers``, each made when it is asked for."""
    for begin, end in parts:
        key, value = (_tokens(x, numbers, begin, end) for x in (key_pages, value_pages))
        yield Chunk(key, value, begin)


def _tokens(pages: Array, numbers: Any, begin: int, end: int) -> Array:
    """Tokens of a sequence, (num_kv_heads, end - begin, d): a view of neighbouring pages."""
    xp, page_size = _arrays.namespace(pages), pages.shape[1]
    first = begin // page_size
    used = numbers[first : -(-end // page_size)]
    if _is_one_piece(pages, used):
        here = pages[int(used[0]) : int(used[-1]) + 1, ...]
    elif _arrays.library(pages) in ("numpy", "torch"):
        here = pages[_arrays.like(pages, used)]  # take copies a pool that is not contiguous, whole
    else:
        here = xp.take(pages, _arrays.like(pages, used), axis=0)
    tokens = xp.reshape(here, (len(used) * page_size, *pages.shape[2:]))
    tokens = tokens[begin - first * page_size : end - first * page_size, ...]
    return xp.permute_dims(tokens, (1, 0, 2))


def _is_one_piece(pages: Array, used: Any) -> bool:
    """Whether these pages follow one another, so that a slice of the pool holds them."""
    # JAX would copy the slice, and compile for every place where one begins.
    return bool(len(used) and np.all(np.diff(used) == 1)) and _arrays.library(pages) != "jax"


def _checked(
    query: Array, key_pages: Array, value_pages: Array, page_table: Any, kv_len: Any,
    options: Options,
) -> tuple[Any, Any, Any]:
    """Check all but the options; return the table, the lengths and where queries start."""
    _check_shapes(query, key_pages, value_pages)
    (num_pages, page_size), batch = key_pages.shape[:2], query.shape[0]
    table = _table(page_table, batch)
    lengths = for_each("kv_len", kv_len, batch)
    capacity = table.shape[1] * page_size
    if np.any((lengths < 0) | (lengths > capacity)):
        raise value_error(
            f"kv_len must lie between 0 and max_pages × page_size = {capacity}",
            f"{lengths.min()} to {lengths.max()}", "It counts the tokens of each sequence.",
        )
    in_use = np.arange(table.shape[1]) < -(-lengths // page_size)[:, None]
    wrong = np.argwhere(in_use & ((table < 0) | (table >= num_pages)))
    if len(wrong):
        entry, place = (int(x) for x in wrong[0])
        raise value_error(
            f"page_table must hold page numbers ≥ 0 and below num_pages = {num_pages}",
            f"page {table[entry, place]} at entry {place} of sequence {entry}, "
            f"whose {lengths[entry]} tokens are in {in_use[entry].sum()} pages",
            "Only entries past ceil(kv_len / page_size) may be anything.",
        )
    starts = lengths - query.shape[2]
    if options.q_offset is not None:
        starts = for_each("q_offset", options.q_offset, batch)
        for extreme in (starts.min(initial=0), starts.max(initial=0)):
            _checks.reach(query, "q_offset", extreme)
    return table.astype(np.int64), lengths, starts


def _check_shapes(query: Array, key_pages: Array, value_pages: Array) -> None:
    arrays = {"query": query, "key_pages": key_pages, "value_pages": value_pages}
    _checks.alike(**arrays)
    given = _checks.shapes(**arrays)
    hint = "Axes of pages are (num_pages, page_size, num_kv_heads, d), heads after tokens."
    for name, x in arrays.items():
        axes = "batch, num_heads, len_q" if x is query else "num_pages, page_size, num_kv_heads"
        if x.ndim != 4:
            raise value_error(f"{name} must have the axes ({axes}, d)", tuple(x.shape), hint)
    num_heads, num_kv_heads = query.shape[1], key_pages.shape[2]
    if key_pages.shape[:3] != value_pages.shape[:3]:
        raise value_error("key_pages and value_pages must have the same first axes", given, hint)
    if key_pages.shape[1] < 1:
        raise value_error("page_size of key_pages must be at least 1", given, hint)
    if query.shape[-1] != key_pages.shape[-1]:
        raise value_error("query and key_pages must have the same d_k", given, hint)
    if num_heads % num_kv_heads if num_kv_heads else num_heads:
        raise value_error(
            "num_heads of query must be a multiple of num_kv_heads of key_pages",
            f"{num_heads} and {num_kv_heads} ({given})", hint,
        )


def _table(given: Any, batch: int) -> Any:
    """The page table as a NumPy array (batch, max_pages) of integers of any kind."""
    hint = "It has one row of page numbers for each sequence, padded at the right with anything."
    if _arrays.library(given) is not None:
        _arrays.check_array("page_table", given)
        known = _arrays.host(given)
        what = _arrays.describe(given) if known is not None else "values that are being traced"
    else:
        try:
            known = np.asarray(given)
            what = f"{known.dtype} {known.shape}"
        except (ValueError, TypeError, OverflowError):  # ragged, or not numbers
            known, what = None, type(given).__name__
    if known is not None and not known.size:
        known = known.astype(np.int64)
    if known is None or known.ndim != 2 or known.dtype.kind not in "iu":
        raise type_error("page_table must be a 2-D array of integers", what, hint)
    if len(known) != batch:
        raise value_error(
            f"page_table must have one row for each of the {batch} sequences", known.shape, hint
        )
    return known


def for_each(name: str, given: Any, count: int) -> Any:
    """One integer for each sequence, (count,) of NumPy."""
    known = _checks.integers(name, given, "It has one integer for each sequence.")
    if known.shape != (count,):
        raise value_error(
            f"{name} must have one entry for each of the {count} sequences", known.shape,
            "Repeat the number where it is the same for all.",
        )
    return known
