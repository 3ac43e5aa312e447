"""Where a worker's arrays lie while few queries are attended to, and how keys are cut in parts."""

from __future__ import annotations

from typing import NamedTuple

from scaledot._kernels.jit import inlined
from scaledot._kernels.kinds import BLOCK_KV, lanes, size
from scaledot._kernels.layout import LINE, up
from scaledot._kernels.pack import load_int64
from scaledot._kernels.target import HOST

NR = HOST.nr
PART = 1024  # keys of a part
MOST_PARTS = 64


def part_length(len_kv: int) -> int:
    """Keys of a part: a multiple of PART, so that there are MOST_PARTS at most."""
    return PART * max(1, -(-len_kv // (PART * MOST_PARTS)))


length_of_part = inlined(part_length)


def num_parts(len_kv: int) -> int:
    """Parts of the keys; one where there are no keys."""
    return max(1, -(-len_kv // part_length(len_kv)))


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
    key_rows: int  # int64 (2 · BLOCK_KV,): addresses of the keys of a tile, and of the next
    value_rows: int
    key_scales: int  # (BLOCK_KV,) of eight-bit codes
    value_scales: int
    nothing: int  # (wider row,): zeros


def room_sizes(lane: int, number: int, d_k: int, d_v: int, rows: int) -> tuple[int, ...]:
    """Bytes of each array of `Room`."""
    step, span = 2 * lane, NR * lane
    depth, width = -(-max(1, d_k) // step) * step, -(-max(1, d_v) // step) * step
    return (
        number * rows * depth, number * rows * BLOCK_KV, 2 * rows * BLOCK_KV,
        number * rows * width, number * rows, number * rows, number * rows,
        number * rows * width, number * BLOCK_KV * depth, number * BLOCK_KV * width, BLOCK_KV,
        number * (BLOCK_KV + lane) * span, number * lane * max(depth, width, BLOCK_KV),
        (BLOCK_KV + lane) * span, 8 * span, 16 * BLOCK_KV, 16 * BLOCK_KV, number * BLOCK_KV,
        number * BLOCK_KV, number * max(depth, width),
    )  # fmt: skip


def room_bytes(lane: int, number: int, d_k: int, d_v: int, rows: int) -> int:
    """Bytes of a worker's scratch memory."""
    return sum(-(-n // LINE) * LINE for n in room_sizes(lane, number, d_k, d_v, rows)) + LINE


_room_sizes = inlined(room_sizes)


@inlined
def take_room(kind, call, worker):  # type: ignore[no-untyped-def]
    """Addresses in the scratch memory of one worker."""
    sizes = _room_sizes(lanes(kind), size(kind), call.d_k, call.d_v, call.most_rows)
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
    line = seen + up(sizes[13])
    key_rows = line + up(sizes[14])
    value_rows = key_rows + up(sizes[15])
    key_scales = value_rows + up(sizes[16])
    value_scales = key_scales + up(sizes[17])
    nothing = value_scales + up(sizes[18])
    return Room(
        q, scores, pairs, acc, top, total, factor, odd_acc, keys, values, odd, tile, rest, seen,
        line, key_rows, value_rows, key_scales, value_scales, nothing,
    )  # fmt: skip


@inlined
def padded(kind, d):  # type: ignore[no-untyped-def]
    """A width rounded up to two vectors."""
    return -(-max(1, d) // (2 * lanes(kind))) * 2 * lanes(kind)


class Share(NamedTuple):
    """A task: keys of one head, for the queries of the entries that see them."""

    first: int  # the entry; where there are shares, the place of the first one in `members`
    members: int
    key_head: int
    part: int


@inlined
def entry_of(call, share, member):  # type: ignore[no-untyped-def]
    """Entry of a member of a task."""
    if call.shares:
        return load_int64(call.members + 8 * (share.first + member))
    return share.first


@inlined
def pair_of(call, share, r):  # type: ignore[no-untyped-def]
    """Pair (entry and head) of row r of a task; the query is ``r % len_q``."""
    of_member = call.group_size * call.len_q
    entry = entry_of(call, share, r // of_member)
    return entry * call.num_heads + share.key_head * call.group_size + r % of_member // call.len_q


@inlined
def parts_of(call, entry):  # type: ignore[no-untyped-def]
    """Parts of the keys of an entry."""
    return load_int64(call.entry_parts + 8 * entry) if call.shares else call.parts
