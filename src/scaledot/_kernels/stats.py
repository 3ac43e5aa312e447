"""What the weights of each query and on each key are like, without keeping the weights.

A task is some blocks of queries of one pair. Each block goes over its keys twice: first for the
maximum and the sum of its softmax, as the forward pass does, then for what the weights tell. Sums
over queries are made in the worker's own memory and added to those of the pair in the order of the
tasks, whichever worker has done them, so that their bits do not depend on the number of threads.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from scaledot._kernels import atomics
from scaledot._kernels.call import read
from scaledot._kernels.forward import load_keys, score_tile, start_queries
from scaledot._kernels.jit import inlined, kernel, separate
from scaledot._kernels.kinds import (
    BLOCK_KV,
    Double,
    Pairs,
    Single,
    doubles_at,
    lanes,
    longs_at,
    number,
    numbers,
    size,
    subs,
    words_at,
)
from scaledot._kernels.layout import LINE, place, scratch_bytes, up
from scaledot._kernels.pack import fetch_add, load_float64, load_int64
from scaledot._kernels.softmax import raise_max, weigh
from scaledot._kernels.tally import (
    ENTROPY,
    INVERSE,
    LATE,
    LINES,
    LOG_SUM,
    MASS,
    REACH,
    SHIFT,
    THRESHOLD,
    VISIBLE,
    insert,
    sum_keys,
    sum_queries,
    tally,
)
from scaledot._kernels.target import HOST
from scaledot._kernels.tile import EMPTY, class_of_tile, clip, end_key, first_key

MR, NR = HOST.mr, HOST.nr
INF = math.inf


class Room(NamedTuple):
    """Addresses of a worker's arrays besides those of `Scratch`, in the kind's numbers."""

    lines: int  # (LINES, span); those of VISIBLE are integers of the same width
    hits: int  # uint32 (NR, BLOCK_KV): a bit for each lane whose weight may be one of the largest
    best: int  # (top_k, span): the largest weights of each query, the largest first
    which: int  # (top_k, span) integers of the same width: their keys
    received: int  # (len_kv,)
    received_last: int  # (len_kv,), where it is asked for
    cells: int  # float64 (map_most, map_columns): of rows of the map that the task has a part in


def room_sizes(
    lane: int, number: int, len_kv: int, top_k: int, last: int, most: int, columns: int
) -> tuple[int, ...]:
    """Bytes of each array of `Room`; ``most`` rows of the map have a part in one task."""
    span = NR * lane
    return (
        LINES * span * number, 4 * NR * BLOCK_KV, top_k * span * number, top_k * span * number,
        number * len_kv, number * len_kv if last else 0, 8 * most * columns,
    )  # fmt: skip


def room_bytes(
    lane: int, number: int, d_k: int, len_q: int, len_kv: int, top_k: int, last: int, most: int,
    columns: int,
) -> int:  # fmt: skip
    """Bytes of a worker's memory, that of `Scratch` included; a multiple of a cache line."""
    more = room_sizes(lane, number, len_kv, top_k, last, most, columns)
    return scratch_bytes(lane, number, d_k, 0, len_q) + sum(-(-n // LINE) * LINE for n in more)


_sizes = inlined(room_sizes)


@inlined
def room_of(kind, call, scratch):  # type: ignore[no-untyped-def]
    """Addresses in the memory of one worker, behind those of `Scratch`."""
    sizes = _sizes(
        lanes(kind), size(kind), call.len_kv, call.top_k, call.last, call.map_most,
        call.map_columns,
    )  # fmt: skip
    lines = up(scratch.row_keys + 8 * NR * lanes(kind))
    hits = lines + up(sizes[0])
    best = hits + up(sizes[1])
    which = best + up(sizes[2])
    received = which + up(sizes[3])
    received_last = received + up(sizes[4])
    return Room(
        lines, hits, best, which, received, received_last, received_last + up(sizes[5])
    )


@inlined
def tile_part(kind, call, scratch, pair, row, count, tile):  # type: ignore[no-untyped-def]
    """Keys low..high of a tile that a block of queries may see, and the class of that part."""
    entry = pair // call.num_heads
    low = clip(first_key(call, entry, row) - tile, 0, BLOCK_KV)
    high = clip(end_key(call, entry, row + count - 1) - tile, 0, BLOCK_KV)
    if low >= high:
        return low, high, EMPTY
    seen = class_of_tile(
        call, pair, row, count, tile + low, high - low, scratch.seen, scratch.row_keys
    )
    return low, high, seen


@separate
def sum_tile(kind, call, scratch, pair, key_pair, row, count, tile):  # type: ignore[no-untyped-def]
    """Bring a tile into the maxima and sums of a block's softmax."""
    low, high, seen = tile_part(kind, call, scratch, pair, row, count, tile)
    if seen == EMPTY:
        return
    span, nr = NR * lanes(kind), -(-count // lanes(kind))
    keys, k_step = load_keys(kind, call, key_pair, tile, scratch.keys)
    last = score_tile(
        kind, call, scratch, pair, 0, row, count, tile, low, high, seen, keys, k_step, call.scale
    )
    first = low // MR * MR
    for c in range(nr):
        column = size(kind) * c * lanes(kind)
        row_max, row_sum = scratch.row_max + column, scratch.row_sum + column
        raise_max(kind, scratch.top + column, row_max, row_sum, scratch.factor + column)
        start = scratch.scores + size(kind) * first * span + column
        weigh(kind, start, span, last - first, row_max, row_sum)


@separate
def end_sums(kind, call, scratch, room, pair, row, count):  # type: ignore[no-untyped-def]
    """Bring the sink in, write lse, and make what the second pass needs of each query."""
    span = NR * lanes(kind)
    top, total = numbers(kind, scratch.row_max, span), numbers(kind, scratch.row_sum, span)
    lines = numbers(kind, room.lines, LINES * span)
    lines[:] = 0
    numbers(kind, room.best, call.top_k * span)[:] = 0
    lse = numbers(kind, call.lse + size(kind) * (pair * call.len_q + row), count)
    sink = number(kind, -INF)
    if call.sinks:
        sink = number(kind, load_float64(call.sinks + 8 * (pair % call.num_heads)))
    late = call.len_q - call.last - row
    for i in range(count):
        m, sum_of_row = top[i], total[i]
        if sink != -INF:
            higher = max(m, sink)
            if m != -INF:
                sum_of_row *= math.exp(m - higher)
            m, sum_of_row = higher, sum_of_row + math.exp(sink - higher)
        log_sum = number(kind, 0.0)
        lse[i] = -INF
        if sum_of_row != 0:
            log_sum = math.log(sum_of_row)
            lse[i] = m + log_sum
            lines[INVERSE * span + i] = 1 / sum_of_row
        lines[SHIFT * span + i] = m if m != -INF else 0
        lines[LOG_SUM * span + i] = log_sum
        if i >= late:
            lines[LATE * span + i] = 1


@separate
def add_cells(kind, call, room, row, count, first_bin, key, keys, weights):  # type: ignore[no-untyped-def]
    """Add the weights of a tile to the cells of the map."""
    span, width = NR * lanes(kind), -(-count // lanes(kind)) * lanes(kind)
    mass_at = room.lines + size(kind) * MASS * span
    mass = numbers(kind, mass_at, span)
    j = 0
    while j < keys:
        column = (key + j) * call.map_columns // call.len_kv
        # The first key of the next column is the first whose product reaches it.
        end = min(keys, -(-(column + 1) * call.len_kv // call.map_columns) - key)
        sum_keys(kind, weights + size(kind) * j * span, span, end - j, width, mass_at)
        for i in range(count):
            line = (row + i) * call.map_rows // call.len_q - first_bin
            cell = doubles_at(room.cells + 8 * (line * call.map_columns + column), 1)
            cell[0] += mass[i]
        j = end


@separate
def count_tile(kind, call, scratch, room, pair, key_pair, row, count, first_bin, tile):  # type: ignore[no-untyped-def]
    """Gather what the weights of a block of queries on a tile tell."""
    low, high, seen = tile_part(kind, call, scratch, pair, row, count, tile)
    if seen == EMPTY:
        return
    span, lane, entry = NR * lanes(kind), lanes(kind), pair // call.num_heads
    keys, k_step = load_keys(kind, call, key_pair, tile, scratch.keys)
    last = score_tile(
        kind, call, scratch, pair, 0, row, count, tile, low, high, seen, keys, k_step, call.scale
    )
    first = low // MR * MR
    weights, key = scratch.scores + size(kind) * first * span, tile + first
    some = min(last, call.len_kv - tile) - first  # rows of the micro-kernel may reach beyond
    distance = load_int64(call.q_start + 8 * entry) + row
    distance -= load_int64(call.kv_start + 8 * entry) + key
    blocks = -(-count // lane)
    for c in range(blocks):
        column = size(kind) * c * lane
        if tally(
            kind, weights + column, span, last - first, room.lines + column, span,
            distance + c * lane, room.hits + 4 * c * BLOCK_KV,
        ):  # fmt: skip
            best, which = room.best + column, room.which + column
            insert(
                kind, weights + column, span, some, room.hits + 4 * c * BLOCK_KV, key, best, which,
                call.top_k,
            )  # fmt: skip
            threshold = numbers(kind, room.lines + size(kind) * THRESHOLD * span + column, lane)
            threshold[:] = numbers(kind, best + size(kind) * (call.top_k - 1) * span, lane)
    width = blocks * lane
    sum_queries(kind, weights, span, some, width, room.received + size(kind) * key)
    if call.map_columns:
        add_cells(kind, call, room, row, count, first_bin, key, some, weights)
    if call.last and row + count > call.len_q - call.last:
        late = numbers(kind, room.lines + size(kind) * LATE * span, span)
        for j in range(some):
            line = numbers(kind, weights + size(kind) * j * span, span)
            for i in range(width):
                line[i] = line[i] if late[i] != 0 else 0
        sum_queries(kind, weights, span, some, width, room.received_last + size(kind) * key)


@separate
def end_rows(kind, call, scratch, room, pair, row, count):  # type: ignore[no-untyped-def]
    """Write what has been gathered of each query."""
    span, start = NR * lanes(kind), pair * call.len_q + row
    lines = numbers(kind, room.lines, LINES * span)
    entropy = numbers(kind, call.entropy + size(kind) * start, count)
    reach = numbers(kind, call.mean_distance + size(kind) * start, count)
    visible = longs_at(call.visible + 8 * start, count)
    for i in range(count):
        entropy[i] = lines[ENTROPY * span + i]
        reach[i] = lines[REACH * span + i]
        at = room.lines + size(kind) * (VISIBLE * span + i)
        visible[i] = longs_at(at, 1)[0] if size(kind) == 8 else words_at(at, 1)[0]
    k = call.top_k
    best = numbers(kind, room.best, k * span)
    for i in range(count):
        top = numbers(kind, call.top_weights + size(kind) * (start + i) * k, k)
        keys = longs_at(call.top_keys + 8 * (start + i) * k, k)
        for rank in range(k):
            weight = best[rank * span + i]
            top[rank] = weight
            if weight > 0:
                place = room.which + size(kind) * (rank * span + i)
                keys[rank] = longs_at(place, 1)[0] if size(kind) == 8 else words_at(place, 1)[0]
        inverse = lines[INVERSE * span + i]
        if inverse != inverse:  # no weight of a query that sees nan is a number
            top[: min(k, visible[i])] = math.nan


@separate
def add(kind, own, count, goal):  # type: ignore[no-untyped-def]
    """Add ``count`` numbers to others of float64."""
    total, more = doubles_at(goal, count), numbers(kind, own, count)
    for j in range(count):
        total[j] += more[j]


@separate
def add_sums(kind, call, room, pair, chunk, first_bin, end_bin):  # type: ignore[no-untyped-def]
    """Add a task's sums over queries to those of its pair, when all before it have been added."""
    progress = call.progress + 8 * pair
    atomics.wait_for(progress, chunk)
    place = 8 * pair * call.len_kv
    add(kind, room.received, call.len_kv, call.received + place)
    if call.last:
        add(kind, room.received_last, call.len_kv, call.received_last + place)
    if call.map_columns:
        start = (pair * call.map_rows + first_bin) * call.map_columns
        count = (end_bin - first_bin) * call.map_columns
        total, more = doubles_at(call.cells + 8 * start, count), doubles_at(room.cells, count)
        for j in range(count):
            total[j] += more[j]
    atomics.store(progress, chunk + 1)


@inlined
def count_block(kind, call, scratch, room, pair, key_pair, row, count, first_bin):  # type: ignore[no-untyped-def]
    """Both passes of one block of queries."""
    span, entry = NR * lanes(kind), pair // call.num_heads
    start_queries(kind, call, scratch, pair, row, count)
    numbers(kind, scratch.row_max, span)[:] = -INF
    numbers(kind, scratch.row_sum, span)[:] = 0
    low, high = first_key(call, entry, row), end_key(call, entry, row + count - 1)
    for tile in range(low // BLOCK_KV * BLOCK_KV, high, BLOCK_KV):
        sum_tile(kind, call, scratch, pair, key_pair, row, count, tile)
    end_sums(kind, call, scratch, room, pair, row, count)
    for tile in range(low // BLOCK_KV * BLOCK_KV, high, BLOCK_KV):
        count_tile(kind, call, scratch, room, pair, key_pair, row, count, first_bin, tile)
    end_rows(kind, call, scratch, room, pair, row, count)
    return count * max(1, high - low)


@inlined
def count_weights(kind, address, worker, budget):  # type: ignore[no-untyped-def]
    """Take tasks from the shared counter until none is left."""
    call = read(address)
    scratch = place(kind, call, worker)
    room = room_of(kind, call, scratch)
    span = NR * lanes(kind)
    step = subs(call.len_kv) * span
    chunks = -(-call.len_q // step)
    while budget > 0:
        task = fetch_add(call.counter, 1)
        if task >= call.num_entries * call.num_heads * chunks:
            return 0
        pair, chunk = task // chunks, task % chunks
        entry, head = pair // call.num_heads, pair % call.num_heads
        key_pair = entry * (call.num_heads // call.group_size) + head // call.group_size
        start, stop = chunk * step, min((chunk + 1) * step, call.len_q)
        first_bin = start * call.map_rows // call.len_q
        end_bin = (stop - 1) * call.map_rows // call.len_q + 1
        numbers(kind, room.received, call.len_kv)[:] = 0
        if call.last:
            numbers(kind, room.received_last, call.len_kv)[:] = 0
        if call.map_columns:
            doubles_at(room.cells, (end_bin - first_bin) * call.map_columns)[:] = 0
        for row in range(start, stop, span):
            count = min(span, stop - row)
            scores = count_block(
                kind, call, scratch, room, pair, key_pair, row, count, first_bin
            )
            budget -= 2 * scores * (call.d_k + 1)
        add_sums(kind, call, room, pair, chunk, first_bin, end_bin)
    return 1


@kernel
def count_single(call, worker, budget):  # type: ignore[no-untyped-def]
    """Statistics in float32."""
    return count_weights(Single(0), call, worker, budget)


@kernel
def count_pairs(call, worker, budget):  # type: ignore[no-untyped-def]
    """Statistics in float32, from products of bfloat16."""
    return count_weights(Pairs(0), call, worker, budget)


@kernel
def count_double(call, worker, budget):  # type: ignore[no-untyped-def]
    """Statistics in float64."""
    return count_weights(Double(0), call, worker, budget)
