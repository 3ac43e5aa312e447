"""Which keys of a tile the queries of a block may see, apart from positions and lengths."""

from __future__ import annotations

import numpy as np

from scaledot._kernels.jit import inlined, separate
from scaledot._kernels.kinds import BLOCK_KV, bytes_at, lanes, longs_at
from scaledot._kernels.pack import (
    load_byte,
    load_int64,
    transpose_bytes,
)
from scaledot._kernels.target import HOST
from scaledot._kernels.tile import (
    BLOCK_MASK,
    EMPTY,
    FAILED,
    FULL,
    PARTIAL,
    invoke,
)

NR = HOST.nr
HIGHEST = np.iinfo(np.int64).max


@inlined
def of_counts(seen, total):  # type: ignore[no-untyped-def]
    """Class of a tile of which ``seen`` of ``total`` parts may be seen."""
    return EMPTY if seen == 0 else (FULL if seen == total else PARTIAL)


@inlined
def block_address(call, pair, i, j):  # type: ignore[no-untyped-def]
    """Address of one entry of the block mask."""
    columns = -(-call.len_kv // BLOCK_MASK)
    return call.blocks + (pair * call.block_rows + i) * columns + j


@inlined
def class_of_blocks(call, pair, row, count, key):  # type: ignore[no-untyped-def]
    """Class by the block mask; a tile of keys is one block of it."""
    row += call.first_row
    first, last = row // BLOCK_MASK, (row + count - 1) // BLOCK_MASK
    seen = 0
    for i in range(first, last + 1):
        seen += load_byte(block_address(call, pair, i, key // BLOCK_MASK)) != 0
    return of_counts(seen, last + 1 - first)


@inlined
def class_of_mod(call, pair, row, key, span):  # type: ignore[no-untyped-def]
    """Class by mask_mod, from the table made before."""
    tiles = -(-call.len_kv // BLOCK_KV)
    entry, head = pair // call.num_heads, pair % call.num_heads
    place = entry * call.class_entry + head * call.class_head + row // span * tiles
    return np.int64(load_byte(call.classes + place + key // BLOCK_KV))


@separate
def class_of_segments(call, entry, row, count, key, keys):  # type: ignore[no-untyped-def]
    """Class by segments: by the ranges of ids on both sides."""
    q = longs_at(call.segment_q + 8 * (entry * call.len_q + row), count)
    k = longs_at(call.segment_kv + 8 * (entry * call.len_kv + key), keys)
    q_low, q_high, k_low, k_high = HIGHEST, np.int64(-1), HIGHEST, np.int64(-1)
    hidden = False
    for i in range(count):
        q_high = max(q_high, q[i])
        q_low = min(q_low, q[i]) if q[i] >= 0 else q_low
        hidden |= q[i] < 0
    for j in range(keys):
        k_high = max(k_high, k[j])
        k_low = min(k_low, k[j]) if k[j] >= 0 else k_low
        hidden |= k[j] < 0
    if q_high < 0 or k_high < 0 or q_high < k_low or k_high < q_low:
        return EMPTY
    return FULL if q_low == q_high == k_low == k_high and not hidden else PARTIAL


@separate
def fill_from_mask(kind, call, pair, row, count, key, keys, target):  # type: ignore[no-untyped-def]
    """Bytes of the mask, keys × queries, from rows of queries; return their class."""
    span, lane = NR * lanes(kind), lanes(kind)
    base = call.mask + load_int64(call.mask_places + 8 * pair) + key * call.mask_column
    base += row * call.mask_row
    seen = bytes_at(target, (BLOCK_KV + lane) * span)
    if call.mask_row == 0:  # the same for all queries: often all of a tile
        shown = 0
        for j in range(keys):
            shown += load_byte(base + j * call.mask_column) != 0
        if shown == 0 or shown == keys:
            return of_counts(shown, keys)
        for j in range(keys):
            bytes_at(target + j * span, span)[:] = load_byte(base + j * call.mask_column)
        return PARTIAL
    for first in range(0, count, lane):
        square = call.mask_column == 1 and count - first >= lane
        j = 0
        while square and j + lane <= keys:
            source = base + first * call.mask_row + j
            transpose_bytes(kind, source, call.mask_row, target + j * span + first, span)
            j += lane
        for rest in range(j, keys):
            place, source = rest * span + first, base + rest * call.mask_column
            for i in range(min(lane, count - first)):
                seen[place + i] = load_byte(source + (first + i) * call.mask_row)
    return class_of_bytes(span, count, keys, target)


@separate
def class_of_bytes(span, count, keys, target):  # type: ignore[no-untyped-def]
    """Class of a tile from its bytes."""
    some, every = np.uint8(0), np.uint8(1)
    for j in range(keys):
        line = bytes_at(target + j * span, count)
        for i in range(count):
            flag = np.uint8(line[i] != 0)
            some |= flag
            every &= flag
    return EMPTY if some == 0 else (FULL if every else PARTIAL)


@separate
def join_mod(call, pair, row, count, key, keys, span, target, line):  # type: ignore[no-untyped-def]
    """Clear the bytes whose keys mask_mod hides; ``line`` is room for those of one key."""
    entry, head = pair // call.num_heads, pair % call.num_heads
    q_pos = load_int64(call.q_start + 8 * entry) + row
    kv_pos = load_int64(call.kv_start + 8 * entry) + key
    kept = bytes_at(line, count)
    for j in range(keys):
        if invoke(call.mask_mod, line, entry, head, q_pos, kv_pos + j, count) != 0:
            longs_at(call.status, 1)[0] = FAILED
        seen = bytes_at(target + j * span, count)
        for i in range(count):
            seen[i] &= kept[i]


@separate
def join_segments(call, entry, row, count, key, keys, span, target):  # type: ignore[no-untyped-def]
    """Clear the bytes of pairs whose ids differ or are negative."""
    q = longs_at(call.segment_q + 8 * (entry * call.len_q + row), count)
    k = longs_at(call.segment_kv + 8 * (entry * call.len_kv + key), keys)
    for j in range(keys):
        seen, mine = bytes_at(target + j * span, count), k[j]
        for i in range(count):
            seen[i] &= np.uint8((q[i] == mine) & (mine >= 0))


@separate
def join_blocks(call, pair, row, count, key, keys, span, target):  # type: ignore[no-untyped-def]
    """Clear the bytes of queries whose block is hidden."""
    for i in range(count):
        block = (call.first_row + row + i) // BLOCK_MASK
        if load_byte(block_address(call, pair, block, key // BLOCK_MASK)) == 0:
            for j in range(keys):
                bytes_at(target + i + j * span, 1)[0] = 0


@separate
def classify(kind, call, pair, row, count, key, keys, target, line):  # type: ignore[no-untyped-def]
    """Class of a tile by mask, block mask, segments and mask_mod together.

    Where it is partial, the bytes at ``target`` (keys, span) tell which keys may be seen.
    ``line`` is room for ``span`` bytes.
    """
    span, entry = NR * lanes(kind), pair // call.num_heads
    by_blocks = by_segments = by_mod = by_mask = FULL
    if call.blocks:
        by_blocks = class_of_blocks(call, pair, row, count, key)
    if call.classes:
        by_mod = class_of_mod(call, pair, row, key, span)
    if call.segment_q:
        by_segments = class_of_segments(call, entry, row, count, key, keys)
    if by_blocks == EMPTY or by_mod == EMPTY or by_segments == EMPTY:
        return EMPTY
    if call.mask:
        by_mask = fill_from_mask(kind, call, pair, row, count, key, keys, target)
        if by_mask == EMPTY:
            return EMPTY
    if by_blocks == FULL and by_segments == FULL and by_mod == FULL and by_mask == FULL:
        return FULL
    if by_mask == FULL:  # a mask that shows all may not have written its bytes
        bytes_at(target, keys * span)[:] = 1
    if by_mod == PARTIAL:
        join_mod(call, pair, row, count, key, keys, span, target, line)
    if by_segments == PARTIAL:
        join_segments(call, entry, row, count, key, keys, span, target)
    if by_blocks == PARTIAL:
        join_blocks(call, pair, row, count, key, keys, span, target)
    return PARTIAL


@inlined
def classify_mod(kind, call, scratch_line, scratch_bytes, task):  # type: ignore[no-untyped-def]
    """Class of one tile by mask_mod alone, for the table: number ``task`` of it."""
    span, tiles = NR * lanes(kind), -(-call.len_kv // BLOCK_KV)
    blocks = -(-call.len_q // span)
    tile, block, shared = task % tiles, task // tiles % blocks, task // (tiles * blocks)
    heads = call.num_heads if call.class_head else 1
    entry, head = shared // heads, shared % heads
    row, key = block * span, tile * BLOCK_KV
    count, keys = min(span, call.len_q - row), min(BLOCK_KV, call.len_kv - key)
    bytes_at(scratch_bytes, keys * span)[:] = 1
    pair = entry * call.num_heads + head
    join_mod(call, pair, row, count, key, keys, span, scratch_bytes, scratch_line)
    found = class_of_bytes(span, count, keys, scratch_bytes)
    bytes_at(call.classes + task, 1)[0] = np.uint8(found)
