"""Where a worker's arrays lie while few queries are attended to, and how keys are cut in parts."""

from __future__ import annotations

from typing import NamedTuple

from scaledot._kernels.jit import inlined
from scaledot._kernels.kinds import BLOCK_KV, lanes, size
from scaledot._kernels.layout import LINE, up
from scaledot._kernels.target import HOST

NR = HOST.nr
PART = 1024  # keys of a part
MOST_PARTS = 64


def part_length(len_kv: int) -> int:
    """Keys of a part: a multiple of PART, so that there are MOST_PARTS at most."""
    return PART * max(1, -(-len_kv // (PART * MOST_PARTS)))


length_of_part = inlined(part_length)


class Room(NamedTuple):
    """Addresses of one worker's arrays; rows are those of all heads of a group."""

    q: int  # (rows, depth)
    scores: int  # (rows, BLOCK_KV), later the weights
    pairs: int  # (rows, BLOCK_KV) of bfloat16
    acc: int  # (rows, width)
    row_max: int
    row_sum: int
    factor: int
    odd_acc: int  # (rows, width)
    keys: int  # (BLOCK_KV, depth) as in memory, padded with zeros
    values: int  # (BLOCK_KV, width)
    odd: int  # bytes (BLOCK_KV,)
    tile: int  # (BLOCK_KV + lanes, span)
    rest: int  # (lanes, widest row)
    seen: int  # bytes (BLOCK_KV + lanes, span)
    line: int  # bytes (8 · span,)


def room_sizes(lane: int, number: int, d_k: int, d_v: int, rows: int) -> tuple[int, ...]:
    """Bytes of each array of `Room`."""
    step, span = 2 * lane, NR * lane
    depth, width = -(-max(1, d_k) // step) * step, -(-max(1, d_v) // step) * step
    return (
        number * rows * depth, number * rows * BLOCK_KV, 2 * rows * BLOCK_KV,
        number * rows * width, number * rows, number * rows, number * rows,
        number * rows * width, number * BLOCK_KV * depth, number * BLOCK_KV * width, BLOCK_KV,
        number * (BLOCK_KV + lane) * span, number * lane * max(depth, width, BLOCK_KV),
        (BLOCK_KV + lane) * span, 8 * span,
    )  # fmt: skip


def room_bytes(lane: int, number: int, d_k: int, d_v: int, rows: int) -> int:
    """Bytes of a worker's scratch memory."""
    return sum(-(-n // LINE) * LINE for n in room_sizes(lane, number, d_k, d_v, rows)) + LINE


_room_sizes = inlined(room_sizes)


@inlined
def take_room(kind, call, worker):  # type: ignore[no-untyped-def]
    """Addresses in the scratch memory of one worker."""
    rows = call.group_size * call.len_q
    sizes = _room_sizes(lanes(kind), size(kind), call.d_k, call.d_v, rows)
    q = up(call.scratch + worker * call.scratch_bytes)
    scores = q + up(sizes[0])
    pairs = scores + up(sizes[1])
    acc = pairs + up(sizes[2])
    top = acc + up(sizes[3])
    total = top + up(sizes[4])
    factor = total + up(sizes[5])
    odd_acc = factor + up(sizes[6])
    keys = odd_acc + up(sizes[7])
    values = keys + up(sizes[8])
    odd = values + up(sizes[9])
    tile = odd + up(sizes[10])
    rest = tile + up(sizes[11])
    seen = rest + up(sizes[12])
    return Room(
        q, scores, pairs, acc, top, total, factor, odd_acc, keys, values, odd, tile, rest, seen,
        seen + up(sizes[13]),
    )  # fmt: skip


@inlined
def padded(kind, d):  # type: ignore[no-untyped-def]
    """A width rounded up to two vectors."""
    return -(-max(1, d) // (2 * lanes(kind))) * 2 * lanes(kind)


@inlined
def num_parts(call):  # type: ignore[no-untyped-def]
    """Parts of the keys; one where there are no keys."""
    return max(1, -(-call.len_kv // length_of_part(call.len_kv)))
