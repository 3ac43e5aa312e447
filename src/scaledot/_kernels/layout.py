"""Where a worker's arrays lie in its scratch memory."""

from __future__ import annotations

from typing import NamedTuple

from scaledot._kernels.jit import inlined
from scaledot._kernels.kinds import BLOCK_KV, SUBS, has_pairs, lanes, size
from scaledot._kernels.target import HOST

MR, NR = HOST.mr, HOST.nr
LINE = 64  # bytes: each array starts on a cache line of its own


class Scratch(NamedTuple):
    """Addresses of one worker's arrays, in the kind's numbers where nothing else is said.

    `span` queries, HOST.nr vectors, are done at a time; SUBS such blocks share a tile.
    """

    panels: int  # (SUBS, depth, span): queries
    acc: int  # (SUBS, width, span): the papers' O, transposed
    row_max: int  # (SUBS, span): m
    row_sum: int  # (SUBS, span): ℓ
    odd_acc: int  # (SUBS, span, width): nan and infinite values that were seen
    keys: int  # (BLOCK_KV, depth); for Pairs two numbers in one
    values: int  # (BLOCK_KV, width); for Pairs two keys in a row
    odd: int  # bytes (BLOCK_KV,): the value holds nan or inf
    scores: int  # (BLOCK_KV + lanes, span), later the weights; squares may reach beyond
    pairs: int  # (BLOCK_KV / 2, span) of 32 bits: the weights, for Pairs
    top: int  # (span,): maxima of the tile
    factor: int  # (span,): exp(m_old - m_new)
    rows: int  # (lanes, widest row), and two rows of values for Pairs
    seen: int  # bytes (BLOCK_KV + lanes, span)
    row_keys: int  # uint32 (2, span): of the dropout hash
    row_mass: int  # (SUBS, span): sums of the weights as they are multiplied, where those differ


def scratch_sizes(
    lane: int, number: int, d_k: int, d_v: int, rows: int
) -> tuple[int, ...]:
    """Bytes of each array of `Scratch`, for tasks of ``rows`` queries at most."""
    span, subs = NR * lane, min(SUBS, -(-rows // (NR * lane)))
    step = max(lane, MR)
    depth, width = -(-max(1, d_k) // lane) * lane, -(-max(1, d_v) // step) * step
    wide = max(depth, width, BLOCK_KV)
    return (
        number * subs * depth * span, number * subs * width * span, number * subs * span,
        number * subs * span, number * subs * span * width, number * BLOCK_KV * depth,
        number * BLOCK_KV * width, BLOCK_KV, number * (BLOCK_KV + lane) * span,
        4 * BLOCK_KV // 2 * span,
        number * span, number * span, number * lane * wide,
        (BLOCK_KV + lane) * span, 8 * span, number * subs * span,
    )  # fmt: skip


def scratch_bytes(lane: int, number: int, d_k: int, d_v: int, rows: int) -> int:
    """Bytes of a worker's scratch memory, a multiple of a cache line."""
    return sum(-(-n // LINE) * LINE for n in scratch_sizes(lane, number, d_k, d_v, rows)) + LINE


_sizes = inlined(scratch_sizes)


@inlined
def up(n):  # type: ignore[no-untyped-def]
    return (n + LINE - 1) // LINE * LINE


@inlined
def place(kind, call, worker):  # type: ignore[no-untyped-def]
    """Addresses in the scratch memory of one worker."""
    sizes = _sizes(lanes(kind), size(kind), call.d_k, call.d_v, call.len_q)
    panels = up(call.scratch + worker * call.scratch_bytes)
    acc = panels + up(sizes[0])
    row_max = acc + up(sizes[1])
    row_sum = row_max + up(sizes[2])
    odd_acc = row_sum + up(sizes[3])
    keys = odd_acc + up(sizes[4])
    values = keys + up(sizes[5])
    odd = values + up(sizes[6])
    scores = odd + up(sizes[7])
    pairs = scores + up(sizes[8])
    top = pairs + up(sizes[9])
    factor = top + up(sizes[10])
    rows = factor + up(sizes[11])
    seen = rows + up(sizes[12])
    row_keys = seen + up(sizes[13])
    return Scratch(
        panels, acc, row_max, row_sum, odd_acc, keys, values, odd, scores, pairs, top, factor,
        rows, seen, row_keys, row_keys + up(sizes[14]),
    )  # fmt: skip


@inlined
def depth_of(kind, call):  # type: ignore[no-untyped-def]
    """Numbers, or pairs of them, in a row of queries or keys as they are multiplied."""
    return max(1, (call.d_k + 1) // 2 if has_pairs(kind) else call.d_k)


@inlined
def width_of(kind, call):  # type: ignore[no-untyped-def]
    """d_v, rounded up to full vectors and rows of the micro-kernel."""
    step = max(lanes(kind), MR)
    return -(-max(1, call.d_v) // step) * step


CLASS_BYTES = 64 * 1024
"""Scratch memory of a worker that classes the tiles of a mask_mod: bytes of a tile and of a key."""
