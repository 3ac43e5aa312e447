"""What the weights of each head look like, in memory independent of the number of queries."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import scaledot
from scaledot import _stream
from scaledot.cli._files import NDArrayAny
from scaledot.cli._job import EVERY, Job, Part, blocks
from scaledot.cli._progress import Progress

MEMORY = 32 * 2**20
"""Bytes for the weights at hand and the temporary arrays made from them."""

COPIES = 4
"""Arrays of the weights' size that are alive at once."""

NOTABLE = 0.01


@dataclass(frozen=True)
class HeadStats:
    """Figures over all queries and leading axes, each of shape (num_heads,).

    Attributes
    ----------
    mean_largest, max_largest : array
        Mean and maximum of the largest weight of a query.
    mean_entropy : array
        Mean entropy of a query's weights, in nats.
    mean_notable : array
        Mean number of keys with a weight above `NOTABLE`.
    """

    mean_largest: NDArrayAny
    max_largest: NDArrayAny
    mean_entropy: NDArrayAny
    mean_notable: NDArrayAny


class _Sums:
    """What is gathered over rows of weights, shape (num_heads,) each."""

    def __init__(self, num_heads: int) -> None:
        self.largest, self.maximum, self.entropy, self.notable = np.zeros((4, num_heads))

    def add(self, heads: slice, weights: NDArrayAny) -> None:
        """Count weights of some heads, shape (heads, rows, keys)."""
        self.add_keys(heads, weights)
        self.add_largest(heads, weights.max(axis=-1, initial=0))

    def add_keys(self, heads: slice, weights: NDArrayAny) -> None:
        """Count what sums over the keys of a row, of which these may be a part."""
        self.notable[heads] += np.count_nonzero(weights > NOTABLE, axis=(-2, -1))
        # A weight is 0 or a normal number, and 0 · log(tiny) is the 0 that is wanted.
        logs = np.maximum(weights, np.finfo(weights.dtype).tiny)
        np.log(logs, out=logs)
        self.entropy[heads] -= np.vecdot(weights, logs).sum(axis=-1, dtype=np.float64)

    def add_largest(self, heads: slice, largest: NDArrayAny) -> None:
        """Count the largest weights of rows, shape (heads, rows)."""
        self.largest[heads] += largest.sum(axis=-1, dtype=np.float64)
        self.maximum[heads] = np.maximum(self.maximum[heads], largest.max(axis=-1, initial=0))


def head_stats(job: Job) -> HeadStats:
    """Go through all weights, a few rows of one group of heads at a time."""
    *lead, num_heads, _, _ = (1,) * (3 - len(job.out_shape)) + job.out_shape
    sums, pairs = _Sums(num_heads), sum(part.pairs for part in job.parts)
    total = job.len_q * pairs
    with Progress("statistics", total, "queries") as progress:
        done = 0.0
        for part in job.parts:
            for rows in (_streamed if job.streamed else _held)(job, part, sums):
                done += rows * part.pairs
                progress.update(int(done), int(done / max(1, pairs)))
    count = max(1, job.len_q * int(np.prod(lead)))
    return HeadStats(sums.largest / count, sums.maximum, sums.entropy / count, sums.notable / count)


def _held(job: Job, part: Part, sums: _Sums) -> Iterator[float]:
    """Count the weights of a part with all its keys at hand; yield numbers of rows done."""
    key = job.operand("key", part)
    row_bytes = max(1, part.group * job.len_kv) * max(4, job.dtype.itemsize)
    first = 0 if part.heads == EVERY else part.heads.start * part.group
    for rows in blocks(slice(0, job.len_q), max(1, MEMORY // (COPIES * row_bytes))):
        for heads, weights in _weights(job, part, key, rows):
            sums.add(slice(first + heads.start, first + heads.stop), weights)
        yield rows.stop - rows.start
    _stream.give_back(key)


def _streamed(job: Job, part: Part, sums: _Sums) -> Iterator[float]:
    """Count the weights of one key head in two passes over its keys: lse, then weights."""
    first = 0 if part.heads == EVERY else part.heads.start * part.group
    heads = slice(first, first + part.group)
    row_bytes = part.group * job.lengths[2] * max(4, job.dtype.itemsize)
    step = max(1, MEMORY // (COPIES * row_bytes))
    chunks = max(1, -(-job.len_kv // job.lengths[2]))
    for rows in blocks(slice(0, job.len_q), job.lengths[0]):
        left = float(rows.stop - rows.start)
        query = job.operand("query", part, rows)
        lse = np.full((part.group, rows.stop - rows.start), -np.inf)
        for _, inner, state in _states(job, part, rows, query, job.lengths[1]):
            lse[:, inner] = np.logaddexp(lse[:, inner], state)
        largest = np.zeros_like(lse)
        for options, inner, state in _states(job, part, rows, query, step):
            weights = scaledot.attention_weights(query[..., inner, :], **options)
            weights = weights.reshape(part.group, *weights.shape[-2:])
            empty = np.isneginf(state)  # rows that see nothing in this chunk
            share = np.exp(np.where(empty, -np.inf, state - np.where(empty, 0, lse[:, inner])))
            weights = weights * share[..., None].astype(weights.dtype)
            sums.add_keys(heads, weights)
            largest[:, inner] = np.maximum(largest[:, inner], weights.max(axis=-1, initial=0))
            part_done = (inner.stop - inner.start) / chunks
            left -= part_done
            yield part_done
        sums.add_largest(heads, largest)
        yield max(0.0, left)


def _states(
    job: Job, part: Part, rows: slice, query: NDArrayAny, step: int
) -> Iterator[tuple[dict[str, Any], slice, NDArrayAny]]:
    """Go through chunks and blocks of rows: options, rows within the query, lse (group, rows)."""
    with contextlib.closing(job.chunks(part, rows, values=False)) as chunks:
        for chunk in chunks:
            columns = slice(chunk.kv_offset, chunk.kv_offset + chunk.key.shape[-2])
            for block in blocks(rows, step):
                low, high = job.reach(block)
                if columns.stop <= low or columns.start >= high:
                    continue
                inner = slice(block.start - rows.start, block.stop - rows.start)
                options = {"key": chunk.key, **job.options(part, block, columns)}
                state = scaledot.attention_state(
                    query[..., inner, :], value=chunk.key[..., :0], **options
                )
                yield options, inner, state.lse.reshape(part.group, -1)
            del chunk


def _normal(array: NDArrayAny, lead: tuple[int, ...]) -> NDArrayAny:
    """View with all leading axes and an axis of heads."""
    array = array[(None,) * max(0, 3 - array.ndim)]
    return np.broadcast_to(array, (*lead, *array.shape[-3:]))


def _weights(
    job: Job, part: Part, key: NDArrayAny, rows: slice
) -> Iterator[tuple[slice, NDArrayAny]]:
    """Weights of some queries, one group of heads after the other: heads, (group, rows, len_kv)."""
    query = job.operand("query", part, rows)
    lead = tuple(
        len(range(*s.indices(n))) for s, n in zip(part.lead, job.out_shape[:-3], strict=True)
    )
    query, key = _normal(query, lead), _normal(key, lead)
    options: dict[str, Any] = job.options(part, rows)
    scores = (*lead, query.shape[-3], query.shape[-2], job.len_kv)
    terms = {
        name: np.broadcast_to(options.pop(name), scores)
        for name in ("mask", "bias") if name in options
    }
    for entry in np.ndindex(*lead):
        for kv_head in range(key.shape[-3]):
            heads = slice(kv_head * part.group, (kv_head + 1) * part.group)
            chosen: dict[str, Any] = {name: term[entry][heads] for name, term in terms.items()}
            yield heads, scaledot.attention_weights(
                query[entry][heads], key[entry][kv_head : kv_head + 1], **chosen, **options
            )
