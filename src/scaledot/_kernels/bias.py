"""Gradient of a bias, in its own shape: summed tile by tile, never spread over all scores.

A task owns a range of keys of one group: the heads and entries of the batch that share one bias,
met in order. Where the bias has one column, ranges have sums of their own, which are added later.
"""

from __future__ import annotations

import numpy as np

from scaledot._kernels.call import read
from scaledot._kernels.gradient import (
    gradient_tile,
    load_block,
    load_range,
    room_of,
    tile_range,
)
from scaledot._kernels.jit import inlined, kernel, separate
from scaledot._kernels.kinds import BLOCK_KV, SUBS, Double, Single, lanes, numbers, size
from scaledot._kernels.layout import NR
from scaledot._kernels.pack import fetch_add, load_int64, transpose
from scaledot._kernels.tile import EMPTY, end_key, first_key


@separate
def add_square(kind, call, room, total, row, count, tile, first, last):  # type: ignore[no-untyped-def]
    """Add the gradients of a tile to ``total``, (queries, keys), turned over."""
    span, lane = NR * lanes(kind), lanes(kind)
    keys = min(last, call.len_kv - tile)
    for i in range(0, count, lane):
        for j in range(first, keys, lane):
            transpose(
                kind, room.products + size(kind) * (j * span + i), span, room.rows, lane
            )
            some = min(lane, keys - j)
            for k in range(min(lane, count - i)):
                share = numbers(kind, room.rows + size(kind) * k * lane, some)
                place = (row + i + k) * call.bias_columns + tile + j
                line = numbers(kind, total + size(kind) * place, some)
                for c in range(some):
                    line[c] += share[c]


@separate
def add_lines(kind, call, room, total, row, count, tile, first, last):  # type: ignore[no-untyped-def]
    """Add the gradients of a tile to ``total`` where the bias has one row, one column, or both."""
    span, keys = NR * lanes(kind), min(last, call.len_kv - tile)
    for j in range(first, keys):
        line = numbers(kind, room.products + size(kind) * j * span, count)
        if call.bias_rows == 1:
            place = tile + j if call.bias_columns > 1 else 0
            into, share = numbers(kind, total + size(kind) * place, 1), line[0] * 0
            for i in range(count):
                share += line[i]
            into[0] += share
        else:
            lines = numbers(kind, total + size(kind) * row, count)
            for i in range(count):
                lines[i] += line[i]


@separate
def bias_block(kind, call, room, pair, block, start, end, total):  # type: ignore[no-untyped-def]
    """All that one block of queries and a range of keys give to the gradient of a bias."""
    span = NR * lanes(kind)
    entry, row = pair // call.num_heads, block * SUBS * span
    count = min(SUBS * span, load_int64(call.q_count + 8 * entry) - row)
    if count <= 0:
        return 0
    low, high = first_key(call, entry, row), end_key(call, entry, row + count - 1)
    if high <= start or low >= end or low >= high:
        return 0
    load_block(kind, call, room, pair, row, count)
    for tile in range(max(start, low // BLOCK_KV * BLOCK_KV), min(end, high), BLOCK_KV):
        for sub in range(-(-count // span)):
            some, here = min(span, count - sub * span), row + sub * span
            first, last, seen = tile_range(kind, call, room, pair, here, some, tile)
            if first < last and seen != EMPTY:
                first, last = gradient_tile(
                    kind, call, room, pair, sub, here, some, tile, first, last, seen, start,
                    0,
                )  # fmt: skip
                if call.bias_rows > 1 and call.bias_columns > 1:
                    add_square(kind, call, room, total, here, some, tile, first, last)
                else:
                    add_lines(kind, call, room, total, here, some, tile, first, last)
    return count * (min(end, high) - max(start, low))


@inlined
def sum_bias(kind, address, worker, budget):  # type: ignore[no-untyped-def]
    """Take ranges of keys of one group from the shared counter until none is left."""
    call = read(address)
    room = room_of(kind, call, worker)
    kv_heads = call.num_heads // call.group_size
    ranges = -(-call.len_kv // call.key_range)
    blocks = -(-call.len_q // (SUBS * NR * lanes(kind)))
    apart = ranges if call.bias_columns == 1 else 1
    numbers(kind, room.ones, NR * lanes(kind))[:] = 1
    while budget > 0:
        task = fetch_add(call.counter, 1)
        if task >= call.num_groups * ranges:
            return 0
        group, part = task // ranges, task % ranges
        start = part * call.key_range
        count, scores = min(call.key_range, call.len_kv - start), np.int64(0)
        place = group * apart + (part if apart > 1 else 0)
        total = call.bias_sums + size(kind) * place * call.bias_rows * call.bias_columns
        for member in range(
            load_int64(call.member_starts + 8 * group),
            load_int64(call.member_starts + 8 * (group + 1)),
        ):
            pair = load_int64(call.members + 8 * member)
            key_pair = pair // call.num_heads * kv_heads
            key_pair += pair % call.num_heads // call.group_size
            load_range(kind, call, room, key_pair, start, count)
            for block in range(blocks):
                scores += bias_block(kind, call, room, pair, block, start, start + count, total)
        budget -= (scores + 1) * (call.d_k + call.d_v + 1)
    return 1


@kernel
def bias_single(call, worker, budget):  # type: ignore[no-untyped-def]
    """Gradient of a bias in float32."""
    return sum_bias(Single(0), call, worker, budget)


@kernel
def bias_double(call, worker, budget):  # type: ignore[no-untyped-def]
    """Gradient of a bias in float64."""
    return sum_bias(Double(0), call, worker, budget)
