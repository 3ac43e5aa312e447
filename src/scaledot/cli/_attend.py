"""Attention of a job, block by block of its queries and, where keys are many, chunk by chunk."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import scaledot
from scaledot import _stream
from scaledot._chunks import Chunk
from scaledot._state import State
from scaledot.cli import _report
from scaledot.cli._files import NDArrayAny
from scaledot.cli._job import BLOCK_BYTES, Job, Part, blocks
from scaledot.cli._output import Output
from scaledot.cli._progress import Progress

BLOCK_SECONDS = 0.25
MOST_BLOCKS = 64


@dataclass
class Timing:
    """Seconds in all and in the attention calls alone, and the memory seen between blocks."""

    started: float = field(default_factory=time.perf_counter)
    attention: float = 0.0
    anonymous: int = 0

    @property
    def total(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.started

    @contextlib.contextmanager
    def of_attention(self) -> Iterator[None]:
        """Count the time inside as that of attention."""
        before = time.perf_counter()
        yield
        self.attention += time.perf_counter() - before
        self.anonymous = max(self.anonymous, _report.anonymous_memory() or 0)


class Done:
    """Work that is done, told to the progress bar; what an earlier run did counts as work alone."""

    def __init__(self, progress: Progress, job: Job) -> None:
        self._progress, self._job = progress, job
        self._work = 0.0
        self._queries = 0.0

    def skip(self, part: Part, rows: slice) -> None:
        """Count queries that an earlier run has finished."""
        self._work += part.pairs * self._job.work(rows)
        self._progress.update(int(self._work), 0)

    def add(self, part: Part, rows: slice, share: float = 1.0) -> None:
        """Count a share of the work on queries of a part."""
        work, all_pairs = self._job.work(rows), sum(p.pairs for p in self._job.parts)
        self._work += share * part.pairs * work
        self._queries += share * (rows.stop - rows.start) * part.pairs / max(1, all_pairs)
        self._progress.update(int(self._work), int(self._queries))


def attend(job: Job, out: Output, timing: Timing) -> None:
    """Compute the rows of the result that an earlier run has not finished."""
    every = slice(0, job.len_q)
    total = job.work(every) * sum(part.pairs for part in job.parts)
    with Progress("attention", total, "queries") as progress:
        done = Done(progress, job)
        for number, part in enumerate(job.parts):
            first = 0
            if number <= out.finished[0]:
                first = job.len_q if number < out.finished[0] else out.finished[1]
                done.skip(part, slice(0, first))
            rows = slice(first, job.len_q)
            if first == job.len_q:
                continue
            finished = (_streamed if job.streamed else _held)(job, part, rows, out, timing, done)
            for stop in finished:
                out.record(number, stop)


def _held(
    job: Job, part: Part, rows: slice, out: Output, timing: Timing, done: Done
) -> Iterator[int]:
    """Go through blocks of queries with all keys at hand; yield the number of finished rows."""
    key, value = job.operand("key", part), job.operand("value", part)
    place = out.array[part.index(job.out_shape)]
    for block in _timed_blocks(job, part, rows):
        query = job.operand("query", part, block)
        options = job.options(part, block)
        with timing.of_attention():
            result = scaledot.attention(query, key, value, **options)
        place[..., block, :] = result
        del query, options, result
        done.add(part, block)
        yield block.stop
    _stream.give_back(key, value)


def _timed_blocks(job: Job, part: Part, rows: slice) -> Iterator[slice]:
    """Cut queries into blocks that take about `BLOCK_SECONDS` each, from the last one's time.

    A block is a multiple of the plan's tile, and none is shorter (unless there are fewer
    queries): so a block's tiles are those of one call, and its bits too.
    """
    unit, heads = job.tile, part.pairs * part.group
    fewest = max(1, math.ceil(scaledot.get_num_threads() / max(1, heads)))
    most = max(fewest, min(MOST_BLOCKS, BLOCK_BYTES // max(1, unit * _row_bytes(job, part))))
    count, start = fewest, rows.start
    while start < rows.stop:
        stop = min(start + count * unit, rows.stop)
        if rows.stop - stop < unit:
            stop = rows.stop
        before = time.perf_counter()
        yield slice(start, stop)
        seconds = max(time.perf_counter() - before, 1e-9)
        # Growth is limited, for the first block may be no measure of the others.
        count = max(fewest, int(min(BLOCK_SECONDS / seconds * count, 4 * count, most)))
        start = stop


def _row_bytes(job: Job, part: Part) -> int:
    """Bytes that are made for one query of all heads: itself, its result, its mask and bias."""
    widths = job.inputs.query.shape[-1] + job.out_shape[-1]
    made = part.pairs * part.group * widths * job.dtype.itemsize
    for source in (job.inputs.mask, job.inputs.bias):
        if source is not None and source.rows > 1 and not job.is_view(source):
            made += math.prod(source.shape[:-2]) * source.shape[-1] * source.dtype.itemsize
    return made


def _streamed(
    job: Job, part: Part, rows: slice, out: Output, timing: Timing, done: Done
) -> Iterator[int]:
    """Go through the keys once for each pass of queries; yield the number of finished rows."""
    place = out.array[part.index(job.out_shape)]
    for served in blocks(rows, job.lengths[0]):
        state = _pass(job, part, served, place.shape[:-2], timing, done)
        with np.errstate(over="ignore"):  # to infinity, as in one call
            place[..., served, :] = state.out
        yield served.stop


def _pass(
    job: Job, part: Part, rows: slice, front: tuple[int, ...], timing: Timing, done: Done
) -> State:
    """Return the state of some queries over all keys, of which each chunk is read once."""
    accumulated = np.dtype(np.float64 if job.dtype == np.float64 else np.float32)
    shape = (*front, rows.stop - rows.start)
    state = State(
        np.zeros((*shape, job.out_shape[-1]), accumulated), np.full(shape, -np.inf, accumulated)
    )
    query, left = job.operand("query", part, rows), 1.0
    with contextlib.closing(job.chunks(part, rows)) as chunks:
        for chunk in chunks:
            columns = slice(chunk.kv_offset, chunk.kv_offset + chunk.key.shape[-2])
            for block in blocks(rows, job.lengths[1]):
                low, high = job.reach(block)
                if columns.stop <= low or columns.start >= high:
                    continue
                inner = slice(block.start - rows.start, block.stop - rows.start)
                with timing.of_attention():
                    _add(state, inner, query, chunk, job.options(part, block, columns))
                share = job.work(block, columns) / job.work(rows)
                left -= share
                done.add(part, rows, share)
            del chunk  # while the next one is waited for
    done.add(part, rows, max(0.0, left))
    return state


def _add(
    state: State, rows: slice, query: NDArrayAny, chunk: Chunk, options: dict[str, Any]
) -> None:
    """Merge what some queries see in a chunk into their state, in place."""
    seen = scaledot.attention_state(query[..., rows, :], chunk.key, chunk.value, **options)
    before = State(state.out[..., rows, :], state.lse[..., rows])
    state.out[..., rows, :], state.lse[..., rows] = scaledot.merge(before, seen)
