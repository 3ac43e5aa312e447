"""Attention by the kernels over keys and values in pages, which they find themselves.

Decoding takes a part of the keys, of fixed length, as one task. Where sequences have the same pages
there, one task serves their queries together: a shared beginning is read once, and the bits are
those that each sequence has alone.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from scaledot import _arrays
from scaledot._bridges import cpu
from scaledot._kernels import decode, room
from scaledot._kernels.kinds import subs_of
from scaledot._kernels.simd import DOUBLE, SINGLE
from scaledot._launch import launch, memory
from scaledot._spec import Problem, Spec
from scaledot._state import State
from scaledot._typing import Array

ROWS = 64
"""Queries, over heads that share keys and sequences that share pages, in one task."""


class Pages(NamedTuple):
    """Where the tokens of a batch lie."""

    key: Array  # (num_pages, page_size, num_kv_heads, d_k)
    value: Array
    table: Any  # int64 (batch, max_pages)
    lengths: Any  # int64 (batch,): tokens
    starts: Any  # int64 (batch,): position of the first query

    def some(self, entries: Any) -> Pages:
        """Some of the sequences."""
        return self._replace(
            table=self.table[entries], lengths=self.lengths[entries], starts=self.starts[entries]
        )


def run(problem: Problem, pages: Pages, *, rounded: bool) -> State:
    """Attention of every sequence without sinks: out (batch, num_heads, len_q, d_v) and lse.

    Parameters
    ----------
    problem : Problem
        The call without any token.
    pages : Pages
        The tokens; every number in the table that is in use has been checked.
    rounded : bool
        Whether ``out`` comes in the dtype of query and ``lse`` is not wanted.
    """
    query = problem.query
    if problem.spec.library == "jax":
        query, key, value = (np.asarray(x) for x in (query, pages.key, pages.value))
        pages = pages._replace(key=key, value=value)
    groups = _groups(pages.lengths, problem.spec)
    found = [_attend(problem, query[x], pages.some(x), rounded=rounded) for x in groups]
    state = found[0]
    if len(found) > 1:
        xp, order = _arrays.namespace(query), np.argsort(np.concatenate(groups))
        state = State(*(
            None if x[0] is None else xp.concat(x, axis=0)[order]
            for x in zip(*found, strict=True)
        ))  # fmt: skip
    return State(*(None if x is None else cpu.back(x, problem) for x in state))


def _groups(lengths: Any, spec: Spec) -> list[Any]:
    """Entries that one launch can do: tasks of the forward kernel follow from the longest."""
    few = decode.few((DOUBLE if spec.dtype == "float64" else SINGLE).lanes)
    kinds = np.array([spec.len_q > few and subs_of(int(length)) for length in lengths])
    if np.all(kinds == kinds[0]):
        return [slice(None)]
    return [np.flatnonzero(kinds == kind) for kind in np.unique(kinds)]


def _attend(given: Problem, query: Array, pages: Pages, *, rounded: bool) -> State:
    """Attention of all entries in one launch."""
    problem = _problem(given, query, pages)
    spec, chosen = problem.spec, cpu.plan(problem.spec)
    (batch, heads), numbers = (spec.lead[0], spec.num_kv_heads), cpu.numbers_of(spec)
    out, lse = cpu.results(
        (*spec.scores_shape[:-1], spec.d_v), None if rounded else numbers,
        None if rounded else numbers, query,
    )  # fmt: skip
    key, value = memory(pages.key), memory(pages.value)
    own: dict[str, Any] = {
        "page_table": np.ascontiguousarray(pages.table), "page_size": key.shape[1],
        "pages_of_entry": pages.table.shape[1],
        "k_page": key.strides[0], "k_row": key.strides[1], "k_column": key.strides[3],
        "v_page": value.strides[0], "v_row": value.strides[1], "v_column": value.strides[3],
        "k_places": np.tile(np.arange(heads) * key.strides[2], batch),
        "v_places": np.tile(np.arange(heads) * value.strides[2], batch),
    }  # fmt: skip
    if chosen.parts:
        rows = spec.group_size * spec.len_q
        shares = _shares(pages, max(1, ROWS // max(1, rows)))
        most = rows * int((shares.shares[:, 4] - shares.shares[:, 3]).max())
        own |= shares._asdict() | {"num_shares": len(shares.shares), "most_rows": most}
        vectors = chosen.vectors
        chosen = chosen._replace(
            parts=int(shares.entry_parts.max()), tasks=len(shares.shares) * heads,
            scratch=room.room_bytes(vectors.lanes, vectors.size, spec.d_k, spec.d_v, most),
        )
    call = cpu.prepared(problem, chosen, memory(out), numbers, **own)
    if call.tasks:
        launch(call, query, pages.key, pages.value, out=out, lse=lse)
    return State(out, lse)


def _problem(problem: Problem, query: Array, pages: Pages) -> Problem:
    """The call with the tokens of these entries."""
    here = cpu.on_host(problem)

    def entries(x: Any) -> Any:
        return x.reshape(-1, 1, 1, 1)

    lengths = pages.lengths
    spec = replace(here.spec, lead=(len(lengths),), len_kv=int(lengths.max()))
    terms = replace(
        here.terms, q_start=entries(pages.starts), kv_count=entries(lengths),
        kv_start=np.zeros((1, 1, 1, 1), dtype=np.int64),
    )  # fmt: skip
    return replace(here, query=query, spec=spec, terms=terms, columns=range(spec.len_kv))


class Shares(NamedTuple):
    """Tasks of a launch, as the decode kernel reads them; all int64."""

    shares: Any  # (num_shares, 5): keys start..stop, their part, for members first..end
    members: Any  # entries, one share after the other
    entry_parts: Any  # (batch,): parts of each entry


def _shares(pages: Pages, most: int) -> Shares:
    """Parts of the keys of all entries, each with the entries that share it: ``most`` at a time.

    Sequences that share anything share their first page.
    """
    page_size, lengths = pages.key.shape[1], pages.lengths.tolist()
    first = pages.table[:, 0].tolist() if pages.table.size else list(range(len(lengths)))
    count = Counter(first)
    groups: dict[tuple[Any, ...], list[int]] = {}
    for entry, length in enumerate(lengths):
        size = room.part_length(length)
        for part in range(room.num_parts(length)):
            start, stop = part * size, min((part + 1) * size, length)
            name: Any = entry
            if count[first[entry]] > 1:
                name = pages.table[entry, start // page_size : -(-stop // page_size)].tobytes()
            groups.setdefault((start, stop, part, name), []).append(entry)
    shares, members = [], list[int]()
    for (start, stop, part, _), entries in groups.items():
        for i in range(0, len(entries), most):
            some = entries[i : i + most]
            shares.append((start, stop, part, len(members), len(members) + len(some)))
            members += some
    parts = [room.num_parts(length) for length in lengths]
    return Shares(*(np.array(x, dtype=np.int64) for x in (shares, members, parts)))
