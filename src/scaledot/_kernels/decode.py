"""Decode kernel: few queries for each head, one pass over keys and values where they lie.

One task is a part of the keys, of fixed length, for all heads that share them: memory is read once
and nothing is packed. Whoever finishes the last part of a head merges them, in order.
"""

from __future__ import annotations

import math

import numpy as np

from scaledot._kernels.atomics import add as add_shared
from scaledot._kernels.call import ask, read
from scaledot._kernels.jit import inlined, kernel, separate
from scaledot._kernels.kinds import (
    BLOCK_KV,
    Brain,
    Double,
    Half,
    Pairs,
    Single,
    bytes_at,
    halves_at,
    has_pairs,
    highest_bits,
    item,
    lanes,
    longs_at,
    number,
    numbers,
    size,
    words_at,
)
from scaledot._kernels.pack import (
    fetch_add,
    halves_to_row,
    load_byte,
    load_int64,
    numbers_to_row,
    row_to_numbers,
    transpose,
)
from scaledot._kernels.room import length_of_part, num_parts, padded, take_room
from scaledot._kernels.rows import (
    COLUMNS,
    dots_1,
    dots_4,
    mix_1,
    mix_1_rest,
    mix_2,
    mix_2_rest,
    row_max,
    row_pairs,
    row_scale,
    row_weigh,
)
from scaledot._kernels.target import HOST
from scaledot._kernels.tile import (
    EMPTY,
    PARTIAL,
    adjusts,
    class_of_tile,
    clip,
    end_key,
    first_key,
    hide_unseen,
    hides,
)

INF = math.inf
NR = HOST.nr
FEW = 8  # queries of a head up to which this kernel is the faster


def few(lane: int) -> int:
    """Most queries that decode: options are turned over in squares of lanes."""
    return min(FEW, lane)


@separate
def load_queries(kind, call, room, key_pair):  # type: ignore[no-untyped-def]
    """Queries of all heads that share a key head, rows padded with zeros."""
    heads, group = call.num_heads, call.group_size
    entry, key_head = key_pair // (heads // group), key_pair % (heads // group)
    depth = padded(kind, call.d_k)
    for r in range(group * call.len_q):
        pair = entry * heads + key_head * group + r // call.len_q
        source = call.query + load_int64(call.q_places + 8 * pair) + r % call.len_q * call.q_row
        if has_pairs(kind):
            target = room.q + 2 * r * depth
            halves_to_row(source, call.q_column, call.d_k, target)
            halves_at(target, depth)[call.d_k :] = 0
        else:
            target = room.q + size(kind) * r * depth
            row_to_numbers(kind, source, call.q_column, call.d_k, call.dtype, target)
            numbers(kind, target, depth)[call.d_k :] = 0


@separate
def copy_rows(kind, source, row_stride, stride, count, d, step, target):  # type: ignore[no-untyped-def]
    """Rows (count, d) as they lie to ``target`` (BLOCK_KV, step), padded with zeros."""
    for j in range(BLOCK_KV):
        place, valid = target + item(kind) * j * step, d if j < count else 0
        if item(kind) == 2:
            row = halves_at(place, step)
            if stride == 2:
                given = halves_at(source + j * row_stride, valid)
                for i in range(valid):
                    row[i] = given[i]
            else:
                for i in range(valid):
                    row[i] = halves_at(source + j * row_stride + i * stride, 1)[0]
            row[valid:] = 0
        else:
            row_to_numbers(
                kind, source + j * row_stride, stride, valid, call_dtype(kind), place
            )
            numbers(kind, place, step)[valid:] = 0


@inlined
def call_dtype(kind):  # type: ignore[no-untyped-def]
    """Code of the dtype of arrays that are read in place, of 4 or 8 bytes."""
    return 3 if size(kind) == 8 else 0


@separate
def clear_odd(kind, values, step, count, d, odd):  # type: ignore[no-untyped-def]
    """Set nan and infinities of copied values to 0 and mark their keys; return their number."""
    marks, found = bytes_at(odd, BLOCK_KV), 0
    top = highest_bits(kind)
    for j in range(count):
        marks[j] = 0
        place = values + item(kind) * j * step
        for i in range(d):
            if item(kind) == 2:
                bits = np.int64(halves_at(place, step)[i])
            elif item(kind) == 4:
                bits = np.int64(words_at(place, step)[i])
            else:
                bits = longs_at(place, step)[i]
            if (bits & top) == top:
                marks[j] = 1
                if item(kind) == 2:
                    halves_at(place, step)[i] = 0
                else:
                    numbers(kind, place, step)[i] = 0
        found += marks[j]
    return found


@separate
def score_rows(kind, call, room, rows, keys, k_row, count):  # type: ignore[no-untyped-def]
    """Scores of all rows for ``count`` keys, rounded up to full vectors."""
    depth, queries = padded(kind, call.d_k), max(1, min(4, lanes(kind) // 2))
    halved = 1 + has_pairs(kind)  # elements are pairs of two numbers
    bytes_of_row = size(kind) * depth // halved
    scale, r = number(kind, call.scale), 0
    for j in range(0, count, lanes(kind)):
        r = 0
        while r + queries <= rows:
            for part in range(0, lanes(kind), lanes(kind) // queries):
                dots_4(
                    kind, room.q + r * bytes_of_row, depth // halved, keys + (j + part) * k_row,
                    k_row, depth // halved,
                    room.scores + size(kind) * (r * BLOCK_KV + j + part), BLOCK_KV, scale,
                )  # fmt: skip
            r += queries
        while r < rows:
            dots_1(
                kind, room.q + r * bytes_of_row, depth // halved, keys + j * k_row, k_row,
                depth // halved, room.scores + size(kind) * (r * BLOCK_KV + j), BLOCK_KV, scale,
            )  # fmt: skip
            r += 1


@separate
def hide_row(kind, call, entry, row, tile, end, scores):  # type: ignore[no-untyped-def]
    """-inf outside of what positions and length leave of a row of ``end`` scores."""
    line = numbers(kind, scores, end)
    low = clip(first_key(call, entry, row) - tile, 0, end)
    high = clip(end_key(call, entry, row) - tile, 0, end)
    line[:low] = -INF
    line[max(low, high) :] = -INF


@separate
def apply_options(kind, call, room, pair, rows, tile, low, high):  # type: ignore[no-untyped-def]
    """Options on the rows of one head: turned over, as `tile` has them, and back."""
    span, lane = NR * lanes(kind), lanes(kind)
    first, last = low // lane * lane, -(-high // lane) * lane
    scores = room.scores + size(kind) * rows * BLOCK_KV
    seen = class_of_tile(
        call, pair, 0, call.len_q, tile + low, high - low, room.seen, room.line
    )
    if seen == EMPTY:
        for r in range(call.len_q):
            numbers(kind, scores + size(kind) * r * BLOCK_KV, BLOCK_KV)[:] = -INF
        return
    if seen != PARTIAL and not adjusts(call):
        return
    for j in range(first, last, lane):  # rows beyond the last hold what is there: any numbers
        square = room.tile + size(kind) * j * span
        transpose(kind, scores + size(kind) * j, BLOCK_KV, square, span)
    if adjusts(call):
        ask(
            call.adjust, call.address, pair, 0, call.len_q, tile + first, high - first,
            room.tile + size(kind) * first * span, room.rest,
        )  # fmt: skip
    if seen == PARTIAL:
        hide_unseen(kind, room.tile + size(kind) * low * span, span, high - low, room.seen)
    for r in range(call.len_q):
        line = numbers(kind, scores + size(kind) * r * BLOCK_KV, BLOCK_KV)
        column = numbers(kind, room.tile + size(kind) * r, BLOCK_KV * span)
        for j in range(first, high):
            line[j] = column[j * span]


@separate
def weigh_row(kind, room, r, end):  # type: ignore[no-untyped-def]
    """Scores of a row to weights: the running maximum, its factor, and the sum."""
    scores = room.scores + size(kind) * r * BLOCK_KV
    top, total = numbers(kind, room.row_max, r + 1), numbers(kind, room.row_sum, r + 1)
    factor = numbers(kind, room.factor, r + 1)
    old = top[r]
    new = max(old, row_max(kind, scores, end))
    factor[r] = 1
    if new > old:
        below = (old - new) * number(kind, 1.0)
        factor[r] = math.exp(below) if below > -700 + 600 * (size(kind) == 4) else 0
        top[r] = new
    shift = top[r] if top[r] != -INF else number(kind, 0.0)
    total[r] = total[r] * factor[r] + row_weigh(kind, scores, end, shift)
    row_pairs(kind, scores, -(-end // (2 * lanes(kind))) * 2 * lanes(kind),
              room.pairs + 2 * r * BLOCK_KV)  # fmt: skip


@separate
def add_values(kind, call, room, rows, values, v_row, depth):  # type: ignore[no-untyped-def]
    """Acc = acc · factor + weights · values over ``depth`` keys (even, for `Pairs`)."""
    width, wide, halved = padded(kind, call.d_v), COLUMNS * lanes(kind), 1 + has_pairs(kind)
    weights = room.pairs if has_pairs(kind) else room.scores
    step, r = BLOCK_KV // halved, 0  # elements from row to row
    while r < rows:
        some = 2 if r + 2 <= rows else 1
        w, factor = weights + size(kind) * r * step, room.factor + size(kind) * r
        c = 0
        while c < width:
            acc, v = room.acc + size(kind) * (r * width + c), values + item(kind) * c
            whole = c + wide <= width
            if some == 1 and whole:
                mix_1(kind, w, step, v, v_row, depth // halved, acc, width, factor)
            elif some == 1:
                mix_1_rest(kind, w, step, v, v_row, depth // halved, acc, width, factor)
            elif whole:
                mix_2(kind, w, step, v, v_row, depth // halved, acc, width, factor)
            else:
                mix_2_rest(kind, w, step, v, v_row, depth // halved, acc, width, factor)
            c += wide if whole else 2 * lanes(kind)
        r += some


@separate
def note_odd(kind, call, room, key_pair, rows, tile, low, high):  # type: ignore[no-untyped-def]
    """Bring the nan and infinite values of keys low..high to the rows that see them."""
    width, value = padded(kind, call.d_v), numbers(kind, room.rest, call.d_v)
    for j in range(low, high):
        if load_byte(room.odd + j):
            source = call.value + load_int64(call.v_places + 8 * key_pair)
            source += (tile + j) * call.v_row
            row_to_numbers(kind, source, call.v_column, call.d_v, call.dtype, room.rest)
            for r in range(rows):
                if numbers(kind, room.scores + size(kind) * r * BLOCK_KV, BLOCK_KV)[j] != -INF:
                    acc = numbers(kind, room.odd_acc + size(kind) * r * width, call.d_v)
                    for c in range(call.d_v):
                        if not np.isfinite(value[c]):
                            acc[c] += value[c]


@separate
def decode_tile(kind, call, room, key_pair, tile, low, high, careful):  # type: ignore[no-untyped-def]
    """Keys low..high of a tile for all rows of a group."""
    group, rows, lane = call.group_size, call.group_size * call.len_q, lanes(kind)
    entry = key_pair // (call.num_heads // group)
    first_pair = entry * call.num_heads + key_pair % (call.num_heads // group) * group
    k_source = call.key + load_int64(call.k_places + 8 * key_pair) + tile * call.k_row
    v_source = call.value + load_int64(call.v_places + 8 * key_pair) + tile * call.v_row
    count, end = min(BLOCK_KV, call.len_kv - tile), min(BLOCK_KV, -(-high // (2 * lane)) * 2 * lane)
    keys, k_row = k_source, call.k_row
    if call.k_column != item(kind) or call.d_k != padded(kind, call.d_k) or count < end:
        depth = padded(kind, call.d_k)
        copy_rows(kind, k_source, call.k_row, call.k_column, count, call.d_k, depth, room.keys)
        keys, k_row = room.keys, item(kind) * depth
    score_rows(kind, call, room, rows, keys, k_row, end)
    if adjusts(call) or hides(call):
        for h in range(group):
            apply_options(
                kind, call, room, first_pair + h, h * call.len_q, tile, low, high
            )
    for r in range(rows):
        scores = room.scores + size(kind) * r * BLOCK_KV
        hide_row(kind, call, entry, r % call.len_q, tile, end, scores)
    values, v_row, width = v_source, call.v_row, padded(kind, call.d_v)
    if careful or call.v_column != item(kind) or call.d_v != width or count < end:
        copy_rows(kind, v_source, call.v_row, call.v_column, count, call.d_v, width, room.values)
        values, v_row = room.values, item(kind) * width
        if careful and clear_odd(kind, values, width, count, call.d_v, room.odd):
            note_odd(kind, call, room, key_pair, rows, tile, low, high)
    for r in range(rows):
        weigh_row(kind, room, r, end)
        if call.threshold:
            weights = room.scores + size(kind) * r * BLOCK_KV
            pair = first_pair + r // call.len_q
            ask(call.drop, call.address, pair, r % call.len_q, tile, end, 0, weights, 0)
            row_pairs(kind, weights, end, room.pairs + 2 * r * BLOCK_KV)
    add_values(kind, call, room, rows, values, v_row, end)


@inlined
def decode_keys(kind, call, room, key_pair, start, stop, careful):  # type: ignore[no-untyped-def]
    """Keys start..stop for all rows of a group, from nothing."""
    rows, width = call.group_size * call.len_q, padded(kind, call.d_v)
    entry = key_pair // (call.num_heads // call.group_size)
    numbers(kind, room.row_max, rows)[:] = -INF
    numbers(kind, room.row_sum, rows)[:] = 0
    numbers(kind, room.acc, rows * width)[:] = 0
    if careful:
        numbers(kind, room.odd_acc, rows * width)[:] = 0
    low = max(start, first_key(call, entry, 0))
    high = min(stop, end_key(call, entry, call.len_q - 1))
    for tile in range(low // BLOCK_KV * BLOCK_KV, high, BLOCK_KV):
        decode_tile(
            kind, call, room, key_pair, tile, max(low - tile, 0), min(high - tile, BLOCK_KV),
            careful,
        )  # fmt: skip


@separate
def is_finite(kind, address, count):  # type: ignore[no-untyped-def]
    """Whether numbers hold neither nan nor infinity."""
    found, row = 0, numbers(kind, address, count)
    for i in range(count):
        found |= not np.isfinite(row[i])
    return found == 0


@inlined
def write_row(kind, call, pair, row, values, lse):  # type: ignore[no-untyped-def]
    """Write one row of the result."""
    out = call.out + load_int64(call.out_places + 8 * pair) + row * call.out_row
    numbers_to_row(kind, values, call.d_v, call.out_dtype, out)
    if call.lse:
        numbers(kind, call.lse + size(kind) * (pair * call.len_q + row), 1)[0] = lse


@separate
def finish_part(kind, call, room, key_pair, part, careful):  # type: ignore[no-untyped-def]
    """Divide by the sums; write the rows, or the part's share of them."""
    width, parts = padded(kind, call.d_v), num_parts(call)
    group, key_heads = call.group_size, call.num_heads // call.group_size
    first_pair = key_pair // key_heads * call.num_heads + key_pair % key_heads * group
    for r in range(group * call.len_q):
        total = numbers(kind, room.row_sum, r + 1)[r]
        top = numbers(kind, room.row_max, r + 1)[r]
        acc = room.acc + size(kind) * r * width
        lse = number(kind, -INF)
        if total != 0:
            lse = top + number(kind, math.log(float(total)))
            row_scale(kind, acc, width, 1 / total)
        if careful:
            line, odd = numbers(kind, acc, width), room.odd_acc + size(kind) * r * width
            line += numbers(kind, odd, width)
        pair, row = first_pair + r // call.len_q, r % call.len_q
        if parts == 1:
            write_row(kind, call, pair, row, acc, lse)
        else:
            place = (pair * parts + part) * call.len_q + row
            numbers(kind, call.part_lse + size(kind) * place, 1)[0] = lse
            given = numbers(kind, acc, call.d_v)
            target = numbers(kind, call.part_out + size(kind) * place * call.d_v, call.d_v)
            target[:] = given


@separate
def merge_parts(kind, call, room, key_pair):  # type: ignore[no-untyped-def]
    """Merge the parts of all rows of a group, in order (the algebra of `_state.merge`)."""
    parts, group = num_parts(call), call.group_size
    key_heads, total = call.num_heads // group, numbers(kind, room.acc, call.d_v)
    first_pair = key_pair // key_heads * call.num_heads + key_pair % key_heads * group
    for r in range(group * call.len_q):
        pair, row = first_pair + r // call.len_q, r % call.len_q
        place, step = pair * parts * call.len_q + row, call.len_q
        top = number(kind, -INF)
        for p in range(parts):
            top = max(top, numbers(kind, call.part_lse + size(kind) * (place + p * step), 1)[0])
        total[:] = 0
        weight_sum = number(kind, 0.0)
        for p in range(parts):
            lse = numbers(kind, call.part_lse + size(kind) * (place + p * step), 1)[0]
            if lse != -INF:
                weight = number(kind, math.exp(float(lse - top)))
                weight_sum += weight
                source = call.part_out + size(kind) * (place + p * step) * call.d_v
                total += weight * numbers(kind, source, call.d_v)
        lse = number(kind, -INF)
        if weight_sum != 0:
            total *= 1 / weight_sum
            lse = top + number(kind, math.log(float(weight_sum)))
        write_row(kind, call, pair, row, room.acc, lse)


@inlined
def decode(kind, address, worker, budget):  # type: ignore[no-untyped-def]
    """Take parts of key heads from the shared counter until none is left."""
    call = read(address)
    room = take_room(kind, call, worker)
    parts, length = num_parts(call), length_of_part(call.len_kv)
    num_key_pairs = call.num_entries * (call.num_heads // call.group_size)
    rows, width = call.group_size * call.len_q, padded(kind, call.d_v)
    while budget > 0:
        task = fetch_add(call.counter, 1)
        if task >= num_key_pairs * parts:
            return 0
        key_pair, part = task // parts, task % parts
        start, stop = part * length, min(call.len_kv, (part + 1) * length)
        load_queries(kind, call, room, key_pair)
        decode_keys(kind, call, room, key_pair, start, stop, False)
        careful = not is_finite(kind, room.acc, rows * width)
        if careful:  # values that are nan or infinite: those that are not seen must not matter
            decode_keys(kind, call, room, key_pair, start, stop, True)
        finish_part(kind, call, room, key_pair, part, careful)
        if parts > 1 and add_shared(call.finished + 8 * key_pair, 1) == parts - 1:
            merge_parts(kind, call, room, key_pair)
        budget -= rows * max(1, stop - start) * (call.d_k + call.d_v + 1)
    return 1


@kernel
def decode_single(call, worker, budget):  # type: ignore[no-untyped-def]
    """Few queries, arrays of float32."""
    return decode(Single(0), call, worker, budget)


@kernel
def decode_brain(call, worker, budget):  # type: ignore[no-untyped-def]
    """Few queries, arrays of bfloat16, products in float32."""
    return decode(Brain(0), call, worker, budget)


@kernel
def decode_pairs(call, worker, budget):  # type: ignore[no-untyped-def]
    """Few queries, products of bfloat16."""
    return decode(Pairs(0), call, worker, budget)


@kernel
def decode_half(call, worker, budget):  # type: ignore[no-untyped-def]
    """Few queries, arrays of float16."""
    return decode(Half(0), call, worker, budget)


@kernel
def decode_double(call, worker, budget):  # type: ignore[no-untyped-def]
    """Few queries, arrays of float64."""
    return decode(Double(0), call, worker, budget)
