"""Weights of chosen queries: scores of all keys written out, then one softmax along each row."""

from __future__ import annotations

import math

from scaledot._kernels.call import read
from scaledot._kernels.forward import load_keys, score_tile, start_queries
from scaledot._kernels.jit import inlined, kernel, separate
from scaledot._kernels.kinds import BLOCK_KV, Double, Pairs, Single, lanes, number, numbers, size
from scaledot._kernels.layout import place
from scaledot._kernels.pack import fetch_add, load_float64, load_int64, transpose
from scaledot._kernels.rows import row_max, row_normalize, row_weigh
from scaledot._kernels.target import HOST
from scaledot._kernels.tile import EMPTY, class_of_tile, clip, end_key, first_key

MR, NR = HOST.mr, HOST.nr
INF = math.inf


@separate
def scores_of_tile(kind, call, scratch, pair, key_pair, row, count, tile):  # type: ignore[no-untyped-def]
    """Scores of the keys of a tile for a block of queries, turned over into rows of the result."""
    span, lane, entry = NR * lanes(kind), lanes(kind), pair // call.num_heads
    low = clip(first_key(call, entry, row) - tile, 0, BLOCK_KV)
    high = clip(end_key(call, entry, row + count - 1) - tile, 0, BLOCK_KV)
    keys, seen = min(BLOCK_KV, call.len_kv - tile), EMPTY
    if low < high:
        seen = class_of_tile(
            call, pair, row, count, tile + low, high - low, scratch.seen, scratch.row_keys
        )
    out = call.out + load_int64(call.out_places + 8 * pair) + row * call.out_row
    if seen == EMPTY:
        for i in range(count):
            numbers(kind, out + i * call.out_row + size(kind) * tile, keys)[:] = -INF
        return
    rows, k_step = load_keys(kind, call, key_pair, tile, scratch.keys)
    numbers(kind, scratch.scores, low // MR * MR * span)[:] = -INF
    last = score_tile(
        kind, call, scratch, pair, 0, row, count, tile, low, high, seen, rows, k_step, call.scale
    )
    numbers(kind, scratch.scores + size(kind) * last * span, max(0, keys - last) * span)[:] = -INF
    for first in range(0, count, lane):
        for j in range(0, keys, lane):
            square = scratch.scores + size(kind) * (j * span + first)
            transpose(kind, square, span, scratch.rows + size(kind) * j, BLOCK_KV)
        for i in range(min(lane, count - first)):
            line = numbers(kind, scratch.rows + size(kind) * i * BLOCK_KV, keys)
            place = out + (first + i) * call.out_row + size(kind) * tile
            numbers(kind, place, keys)[:] = line


@separate
def finish_weights(kind, call, scratch, pair, row, count):  # type: ignore[no-untyped-def]
    """Softmax along rows of scores, a sink among them where there is one."""
    out = call.out + load_int64(call.out_places + 8 * pair) + row * call.out_row
    sink = number(kind, -INF)
    if call.sinks:
        sink = number(kind, load_float64(call.sinks + 8 * (pair % call.num_heads)))
    whole, rest = call.len_kv // lanes(kind) * lanes(kind), call.len_kv % lanes(kind)
    end = numbers(kind, scratch.rows, lanes(kind))  # the last keys, as a full vector
    for i in range(count):
        line = out + i * call.out_row
        tail = numbers(kind, line + size(kind) * whole, rest)
        end[:] = -INF
        end[:rest] = tail
        top = max(sink, row_max(kind, scratch.rows, lanes(kind)))
        if whole:
            top = max(top, row_max(kind, line, whole))
        shift = top if top != -INF else number(kind, 0.0)
        total = row_weigh(kind, scratch.rows, lanes(kind), shift)
        if sink != -INF:
            total += number(kind, math.exp(float(sink - shift)))
        if whole:
            total += row_weigh(kind, line, whole, shift)
        if total != 0:
            row_normalize(kind, scratch.rows, lanes(kind), 1 / total)
            if whole:
                row_normalize(kind, line, whole, 1 / total)
        tail[:] = end[:rest]


@inlined
def weigh_rows(kind, address, worker, budget):  # type: ignore[no-untyped-def]
    """Take blocks of queries from the shared counter until none is left."""
    call = read(address)
    scratch = place(kind, call, worker)
    span = NR * lanes(kind)
    blocks = -(-call.len_q // span)
    while budget > 0:
        task = fetch_add(call.counter, 1)
        if task >= call.num_entries * call.num_heads * blocks:
            return 0
        pair, row = task // blocks, task % blocks * span
        entry, head = pair // call.num_heads, pair % call.num_heads
        key_pair = entry * (call.num_heads // call.group_size) + head // call.group_size
        count = min(span, call.len_q - row)
        start_queries(kind, call, scratch, pair, row, count)
        for tile in range(0, call.len_kv, BLOCK_KV):
            scores_of_tile(kind, call, scratch, pair, key_pair, row, count, tile)
        finish_weights(kind, call, scratch, pair, row, count)
        budget -= count * call.len_kv * (call.d_k + 1)
    return 1


@kernel
def weigh_single(call, worker, budget):  # type: ignore[no-untyped-def]
    """Weights in float32."""
    return weigh_rows(Single(0), call, worker, budget)


@kernel
def weigh_pairs(call, worker, budget):  # type: ignore[no-untyped-def]
    """Weights in float32 from products of bfloat16."""
    return weigh_rows(Pairs(0), call, worker, budget)


@kernel
def weigh_double(call, worker, budget):  # type: ignore[no-untyped-def]
    """Weights in float64."""
    return weigh_rows(Double(0), call, worker, budget)
