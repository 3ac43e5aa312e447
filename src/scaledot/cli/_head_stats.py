"""What the weights of each head look like, in memory independent of the number of queries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import scaledot
from scaledot.cli._files import NDArrayAny
from scaledot.cli._progress import Progress

if TYPE_CHECKING:
    from scaledot.cli._run import Job

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


def head_stats(job: Job) -> HeadStats:
    """Go through all weights, a few rows of one group of heads at a time."""
    *lead, num_heads, len_q, _ = (1,) * (3 - len(job.out_shape)) + job.out_shape
    key = _normal(job.operand("key"), tuple(lead))
    group = num_heads // max(1, key.shape[-3])
    row_bytes = max(1, group * job.len_kv) * max(4, job.dtype.itemsize)
    step = max(1, MEMORY // (COPIES * row_bytes))
    largest, entropy, notable = (np.zeros(num_heads) for _ in range(3))
    maximum = np.zeros(num_heads)
    with Progress("statistics", len_q, "queries") as progress:
        for start in range(0, len_q, step):
            rows = slice(start, min(start + step, len_q))
            for heads, weights in _weights(job, key, rows, tuple(lead), group):
                top = weights.max(axis=-1, initial=0)
                largest[heads] += top.sum(axis=-1, dtype=np.float64)
                maximum[heads] = np.maximum(maximum[heads], top.max(axis=-1, initial=0))
                notable[heads] += np.count_nonzero(weights > NOTABLE, axis=(-2, -1))
                # A weight is 0 or a normal number, and 0 · log(tiny) is the 0 that is wanted.
                logs = np.maximum(weights, np.finfo(weights.dtype).tiny)
                np.log(logs, out=logs)
                entropy[heads] -= np.vecdot(weights, logs).sum(axis=-1, dtype=np.float64)
            progress.update(rows.stop, rows.stop)
    count = max(1, len_q * int(np.prod(lead)))
    return HeadStats(largest / count, maximum, entropy / count, notable / count)


def _normal(array: NDArrayAny, lead: tuple[int, ...]) -> NDArrayAny:
    """View with all leading axes and an axis of heads."""
    array = array[(None,) * max(0, 3 - array.ndim)]
    return np.broadcast_to(array, (*lead, *array.shape[-3:]))


def _weights(
    job: Job, key: NDArrayAny, rows: slice, lead: tuple[int, ...], group: int
) -> Iterator[tuple[slice, NDArrayAny]]:
    """Weights of some queries, one group of heads after the other: heads, (group, rows, len_kv)."""
    query = _normal(job.operand("query", rows), lead)
    options: dict[str, Any] = job.options(rows)
    scores = (*lead, query.shape[-3], query.shape[-2], job.len_kv)
    terms = {
        name: np.broadcast_to(options.pop(name), scores)
        for name in ("mask", "bias") if name in options
    }
    for entry in np.ndindex(*lead):
        for kv_head in range(key.shape[-3]):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            part: dict[str, Any] = {name: term[entry][heads] for name, term in terms.items()}
            yield heads, scaledot.attention_weights(
                query[entry][heads], key[entry][kv_head : kv_head + 1], **part, **options
            )
