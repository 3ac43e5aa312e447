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
    CodePairs,
    Codes,
    Double,
    Half,
    Pairs,
    Single,
    halves_at,
    has_pairs,
    item,
    lanes,
    number,
    numbers,
    size,
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
from scaledot._kernels.products import add_values, score_rows
from scaledot._kernels.room import (
    Share,
    entry_of,
    length_of_part,
    padded,
    pair_of,
    parts_of,
    take_room,
)
from scaledot._kernels.rows import row_max, row_pairs, row_scale, row_weights
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
from scaledot._kernels.tokens import (
    clear_odd,
    copy_rows,
    find_tokens,
    gather_scales,
    point_at,
)

INF = math.inf
NR = HOST.nr
CACHE = 2**20  # bytes of keys and values that are likely to be in a cache already
FEW = 8  # queries of a head up to which this kernel is the faster


def few(lane: int) -> int:
    """Most queries that decode: options are turned over in squares of lanes."""
    return min(FEW, lane)


@separate
def load_queries(kind, call, room, share):  # type: ignore[no-untyped-def]
    """Queries of all rows of a task, padded with zeros."""
    depth = padded(kind, call.d_k)
    for r in range(share.members * call.group_size * call.len_q):
        pair = pair_of(call, share, r)
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
def hide_row(kind, call, entry, row, tile, end, scores):  # type: ignore[no-untyped-def]
    """-inf outside of what positions and length leave of a row of ``end`` scores."""
    line = numbers(kind, scores, end)
    low = clip(first_key(call, entry, row) - tile, 0, end)
    high = clip(end_key(call, entry, row) - tile, 0, end)
    if low > 0 or high < end:
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
    total[r] = total[r] * factor[r] + row_weights(
        kind, scores, end, shift, room.value_scales, room.pairs + 2 * r * BLOCK_KV
    )


@separate
def note_odd(kind, call, room, rows, found, low, high):  # type: ignore[no-untyped-def]
    """Bring the nan and infinite values of keys low..high to the rows that see them."""
    width, value = padded(kind, call.d_v), numbers(kind, room.rest, call.d_v)
    for j in range(low, high):
        if load_byte(room.odd + j):
            source = load_int64(found + 8 * j)
            row_to_numbers(kind, source, call.v_column, call.d_v, call.dtype, room.rest)
            for r in range(rows):
                if numbers(kind, room.scores + size(kind) * r * BLOCK_KV, BLOCK_KV)[j] != -INF:
                    acc = numbers(kind, room.odd_acc + size(kind) * r * width, call.d_v)
                    for c in range(call.d_v):
                        if not np.isfinite(value[c]):
                            acc[c] += value[c]


@separate
def find_tile(kind, call, room, share, tile, count, place):  # type: ignore[no-untyped-def]
    """Find the keys and values of ``count`` tokens from a tile on, as list ``place`` of two."""
    entry, key_heads = entry_of(call, share, 0), call.num_heads // call.group_size
    at, goal = 8 * (entry * key_heads + share.key_head), 8 * BLOCK_KV * place
    key = call.key + load_int64(call.k_places + at)
    find_tokens(
        call, entry, key, call.k_page, call.k_row, tile, count, room.nothing, room.key_rows + goal
    )
    value = call.value + load_int64(call.v_places + at)
    find_tokens(
        call, entry, value, call.v_page, call.v_row, tile, count, room.nothing,
        room.value_rows + goal,
    )  # fmt: skip


@separate
def load_scales(kind, call, room, share, tile, count):  # type: ignore[no-untyped-def]
    """Factors of the codes of ``count`` tokens."""
    entry, key_heads = entry_of(call, share, 0), call.num_heads // call.group_size
    at = 8 * (entry * key_heads + share.key_head)
    source, step = call.k_scales + load_int64(call.k_scale_places + at), call.k_scale_row
    gather_scales(kind, source + tile * step, step, count, room.key_scales)
    source, step = call.v_scales + load_int64(call.v_scale_places + at), call.v_scale_row
    gather_scales(kind, source + tile * step, step, count, room.value_scales)


@separate
def copy_values(kind, call, room, rows, found, low, high, careful):  # type: ignore[no-untyped-def]
    """Copy the values of a tile; if ``careful``, without nan and infinities, which are noted."""
    width = padded(kind, call.d_v)
    copy_rows(kind, found, call.v_column, high, call.d_v, width, room.values)
    if careful and clear_odd(kind, room.values, width, high, call.d_v, room.odd):
        note_odd(kind, call, room, rows, found, low, high)
    point_at(room.values, item(kind) * width, high, found)


@separate
def decode_tile(kind, call, room, share, tile, low, high, here, cold, careful):  # type: ignore[no-untyped-def]
    """Keys low..high of a tile, in list ``here`` of two, for all rows of a task."""
    of_head, lane, depth = call.len_q, lanes(kind), padded(kind, call.d_k)
    of_member = call.group_size * of_head
    rows, list_bytes = share.members * of_member, 8 * BLOCK_KV
    keys, next_keys = room.key_rows + here * list_bytes, room.key_rows + (1 - here) * list_bytes
    values = room.value_rows + here * list_bytes
    next_values = room.value_rows + (1 - here) * list_bytes
    end = min(BLOCK_KV, -(-high // (2 * lane)) * 2 * lane)
    if call.k_column != item(kind) or call.d_k != depth:
        copy_rows(kind, keys, call.k_column, high, call.d_k, depth, room.keys)
        point_at(room.keys, item(kind) * depth, high, keys)
    if item(kind) == 1:
        load_scales(kind, call, room, share, tile, high)
    score_rows(kind, call, room, rows, keys, next_keys, end, cold)
    if adjusts(call) or hides(call):
        for r in range(0, rows, of_head):
            apply_options(kind, call, room, pair_of(call, share, r), r, tile, low, high)
    for r in range(rows):
        scores = room.scores + size(kind) * r * BLOCK_KV
        entry = entry_of(call, share, r // of_member)
        hide_row(kind, call, entry, r % of_head, tile, end, scores)
    if careful or call.v_column != item(kind) or call.d_v != padded(kind, call.d_v):
        copy_values(kind, call, room, rows, values, low, high, careful)
    for r in range(rows):
        weights = room.scores + size(kind) * r * BLOCK_KV
        weigh_row(kind, room, r, end)
        if call.threshold:
            pair = pair_of(call, share, r)
            ask(call.drop, call.address, pair, r % of_head, tile, end, 0, weights, 0)
            row_pairs(kind, weights, end, room.pairs + 2 * r * BLOCK_KV)
    add_values(kind, call, room, rows, values, next_values, end, cold)


@inlined
def bounds(call, share, start, stop):  # type: ignore[no-untyped-def]
    """First and end of the keys of start..stop that any row of a task sees."""
    low, high = stop, start
    for member in range(share.members):
        entry = entry_of(call, share, member)
        low = min(low, first_key(call, entry, 0))
        high = max(high, end_key(call, entry, call.len_q - 1))
    return max(start, low), min(stop, high)


@inlined
def decode_keys(kind, call, room, share, start, stop, coming, begin, end, careful):  # type: ignore[no-untyped-def]
    """Keys start..stop for all rows of a task, from nothing.

    ``coming`` is a task that is to follow: its first keys, of begin..end, are asked for.
    """
    rows, width = share.members * call.group_size * call.len_q, padded(kind, call.d_v)
    numbers(kind, room.row_max, rows)[:] = -INF
    numbers(kind, room.row_sum, rows)[:] = 0
    numbers(kind, room.acc, rows * width)[:] = 0
    if careful:
        numbers(kind, room.odd_acc, rows * width)[:] = 0
    low, high = bounds(call, share, start, stop)
    key_heads = call.num_heads // call.group_size
    held = call.num_entries * key_heads * call.len_kv * (call.d_k + call.d_v) * item(kind)
    cold, here, first = held > CACHE, 0, low // BLOCK_KV * BLOCK_KV
    if first < high:
        find_tile(kind, call, room, share, first, min(BLOCK_KV, high - first), 0)
    for tile in range(first, high, BLOCK_KV):
        following = tile + BLOCK_KV
        if following < high:
            find_tile(
                kind, call, room, share, following, min(BLOCK_KV, high - following), 1 - here
            )
        elif cold:
            other, last = bounds(call, coming, begin, end)
            other = other // BLOCK_KV * BLOCK_KV
            find_tile(kind, call, room, coming, other, clip(last - other, 0, BLOCK_KV), 1 - here)
        decode_tile(
            kind, call, room, share, tile, max(low - tile, 0), min(high - tile, BLOCK_KV), here,
            cold, careful,
        )  # fmt: skip
        here = 1 - here


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
def finish_part(kind, call, room, share, careful):  # type: ignore[no-untyped-def]
    """Divide by the sums; write the rows, or the part's share of them."""
    width = padded(kind, call.d_v)
    for r in range(share.members * call.group_size * call.len_q):
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
        pair, row = pair_of(call, share, r), r % call.len_q
        if call.parts == 1:
            write_row(kind, call, pair, row, acc, lse)
        else:
            place = (pair * call.parts + share.part) * call.len_q + row
            numbers(kind, call.part_lse + size(kind) * place, 1)[0] = lse
            given = numbers(kind, acc, call.d_v)
            target = numbers(kind, call.part_out + size(kind) * place * call.d_v, call.d_v)
            target[:] = given


@separate
def merge_parts(kind, call, room, entry, key_head):  # type: ignore[no-untyped-def]
    """Merge the parts of all rows of a group, in order (the algebra of `_state.merge`)."""
    parts, group = parts_of(call, entry), call.group_size
    total = numbers(kind, room.acc, call.d_v)
    first_pair = entry * call.num_heads + key_head * group
    for r in range(group * call.len_q):
        pair, row = first_pair + r // call.len_q, r % call.len_q
        place, step = pair * call.parts * call.len_q + row, call.len_q
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
def share_of(call, task):  # type: ignore[no-untyped-def]
    """Task number ``task``, and the first and the end of its keys."""
    key_heads = call.num_heads // call.group_size
    if call.shares:
        place = call.shares + 40 * (task // key_heads)
        first, end = load_int64(place + 24), load_int64(place + 32)
        share = Share(first, end - first, task % key_heads, load_int64(place + 16))
        return share, load_int64(place), load_int64(place + 8)
    key_pair, part = task // call.parts, task % call.parts
    share = Share(key_pair // key_heads, 1, key_pair % key_heads, part)
    length = length_of_part(call.len_kv)
    return share, part * length, min(call.len_kv, (part + 1) * length)


@inlined
def decode(kind, address, worker, budget):  # type: ignore[no-untyped-def]
    """Take parts of key heads from the shared counter until none is left."""
    call = read(address)
    room = take_room(kind, call, worker)
    key_heads = call.num_heads // call.group_size
    tasks = call.num_entries * call.parts
    if call.shares:
        tasks = call.num_shares
    width = padded(kind, call.d_v)
    numbers(kind, room.nothing, max(width, padded(kind, call.d_k)))[:] = 0
    while budget > 0:
        task = fetch_add(call.counter, 1)
        if task >= tasks * key_heads:
            return 0
        share, start, stop = share_of(call, task)
        coming, begin, end = share_of(call, min(task + call.workers, tasks * key_heads - 1))
        rows = share.members * call.group_size * call.len_q
        load_queries(kind, call, room, share)
        decode_keys(kind, call, room, share, start, stop, coming, begin, end, False)
        careful = item(kind) != 1 and not is_finite(kind, room.acc, rows * width)
        if careful:  # values that are nan or infinite: those that are not seen must not matter
            decode_keys(kind, call, room, share, start, stop, coming, begin, end, True)
        finish_part(kind, call, room, share, careful)
        for member in range(share.members if call.parts > 1 else 0):
            entry = entry_of(call, share, member)
            done = add_shared(call.finished + 8 * (entry * key_heads + share.key_head), 1)
            if done == parts_of(call, entry) - 1:
                merge_parts(kind, call, room, entry, share.key_head)
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
def decode_codes(call, worker, budget):  # type: ignore[no-untyped-def]
    """Few queries, arrays of eight-bit codes."""
    return decode(Codes(0), call, worker, budget)


@kernel
def decode_code_pairs(call, worker, budget):  # type: ignore[no-untyped-def]
    """Few queries of bfloat16, arrays of eight-bit codes."""
    return decode(CodePairs(0), call, worker, budget)


@kernel
def decode_double(call, worker, budget):  # type: ignore[no-untyped-def]
    """Few queries, arrays of float64."""
    return decode(Double(0), call, worker, budget)
