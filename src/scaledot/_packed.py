"""Packed sequences by the kernels: as few launches as give each sequence what it gets alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from scaledot._bridges import cpu
from scaledot._kernels import decode, room
from scaledot._kernels.kinds import BLOCK_KV, block_q
from scaledot._kernels.simd import DOUBLE, SINGLE
from scaledot._launch import Memory, launch, memory
from scaledot._spec import Problem
from scaledot._state import State
from scaledot._typing import Array


class Sequences(NamedTuple):
    """First token and number of tokens on both sides, int64 (count,) each."""

    q_start: Any
    q_count: Any
    kv_start: Any
    kv_count: Any


def sequences(starts_q: list[int], starts_kv: list[int]) -> Sequences:
    """Where sequences lie, given their starts and the number of tokens on both sides."""
    q, kv = np.asarray(starts_q), np.asarray(starts_kv)
    return Sequences(q[:-1], np.diff(q), kv[:-1], np.diff(kv))


def run(
    problem: Problem, starts_q: list[int], starts_kv: list[int], seeds: Any, *,
    with_lse: bool = False,
) -> State:  # fmt: skip
    """Attention of every sequence, packed: out (tokens, num_heads, d_v), lse (tokens, num_heads).

    Parameters
    ----------
    problem : Problem
        Options of a sequence; query, key and value (1, heads, tokens, width) of all of them.
    starts_q, starts_kv : list of int
        Where the sequences start, and the number of tokens.
    seeds : pair of int32 arrays (count, 1, 1, 1) of NumPy, or None
        Low and high half of each sequence's seed, for dropout.
    with_lse : bool
        Whether ``lse`` is wanted where there are no sinks.

    Returns
    -------
    State
        With sinks, which are still to be merged, in the accumulation dtype; without, ``out`` comes
        in that of query and ``lse``, if it is not wanted, is None.
    """
    here = cpu.on_host(problem)
    spec, sums = here.spec, cpu.numbers_of(problem.spec)
    numbers = None if here.sinks is None else sums
    out, lse = cpu.results(
        (starts_q[-1], spec.num_heads, spec.d_v), numbers, sums if with_lse else numbers, here.query
    )
    every = sequences(starts_q, starts_kv)
    lane = (DOUBLE if spec.dtype == "float64" else SINGLE).lanes
    for index in _groups(every, starts_kv[-1], lane):
        terms = here.terms
        if seeds is not None:
            terms = replace(terms, seed_low=seeds[0][index], seed_high=seeds[1][index])
        group = Sequences(*(x[index] for x in every))
        _attend(replace(here, terms=terms), group, numbers, out, lse)
    return State(*(None if x is None else cpu.back(x, problem) for x in (out, lse)))


def _groups(every: Sequences, tokens: int, lane: int) -> Iterator[list[int]]:
    """Numbers of the sequences that one launch can do.

    The decode kernel takes one number of queries and cuts keys into parts of one length; the
    forward kernel takes any. Both have tasks, or room, for the longest: in a group it is at most
    about twice the shortest. Kernels read keys in whole tiles, as far as the longest sequence has
    any: those near the end of the memory stay among their like.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    lengths = zip(*(x.tolist() for x in every), strict=True)
    for number, (_, q_count, kv_start, kv_count) in enumerate(lengths):
        if not q_count:
            continue
        end = kv_start + -(-kv_count // BLOCK_KV) * BLOCK_KV
        edge = kv_count if end > tokens else -1
        if q_count <= decode.few(lane):
            part = room.part_length(kv_count)
            kind = (edge, q_count, part, (-(-kv_count // part)).bit_length())
        else:
            kind = (edge, 0, (-(-q_count // block_q(lane, kv_count))).bit_length(), 0)
        groups.setdefault(kind, []).append(number)
    yield from groups.values()


def _attend(problem: Problem, group: Sequences, numbers: Any, out: Any, lse: Any) -> None:
    """Write the rows of a group of sequences."""
    spec, terms = problem.spec, problem.terms
    count, len_q = len(group.q_count), int(group.q_count.max())
    spec = replace(spec, lead=(count,), len_q=len_q, len_kv=int(group.kv_count.max()))

    def entries(x: Any) -> Any:
        return x.reshape(-1, 1, 1, 1)

    terms = replace(
        terms, q_start=entries(group.kv_count - group.q_count),
        kv_start=np.zeros((1, 1, 1, 1), dtype=np.int64), kv_count=entries(group.kv_count),
    )  # fmt: skip
    query, key, value = problem.query, problem.key, problem.value
    _, strides, dtype = memory(out)
    rows = Memory((count, spec.num_heads, len_q, spec.d_v), (0, strides[1], strides[0], strides[2]),
                  dtype)  # fmt: skip
    call = cpu.prepared(
        replace(problem, spec=spec, terms=terms, rows=range(len_q), columns=range(spec.len_kv)),
        cpu.plan(spec), rows, numbers, q_count=group.q_count,
        q_places=_places(memory(query), group.q_start), out_places=_places(rows, group.q_start),
        k_places=_places(memory(key), group.kv_start),
        v_places=_places(memory(value), group.kv_start),
    )  # fmt: skip
    if lse is None:
        launch(call, query, key, value, out=out)
        return
    padded = np.empty((count, spec.num_heads, len_q), dtype=lse.dtype)
    launch(call, query, key, value, out=out, lse=padded)
    place = np.arange(len_q)
    held = place < group.q_count[:, None]  # (count, len_q)
    lse[(group.q_start[:, None] + place)[held]] = padded.transpose(0, 2, 1)[held]


def _places(x: Memory, starts: Array) -> Any:
    """Bytes from the first element to the first row of each sequence and head."""
    heads = np.arange(x.shape[1]) * x.strides[1]
    return (starts[:, None] * x.strides[2] + heads).reshape(-1)
