"""Forward mode: how out and lse change when the arguments move along tangents.

``Σ P∘D (dV + dS V)`` and ``Σ P dS`` over the keys, with ``P = exp(S - lse)`` and
``dS = scale (dQ Kᵀ + Q dKᵀ)`` turned into the tangents of scores. One task is a block of queries
of one head, as in the forward kernel; `out` of the record is the first sum, `row_tangent` the
second.
"""

from __future__ import annotations

from typing import NamedTuple

from scaledot._kernels.call import ask, read
from scaledot._kernels.forward import accumulate, score_tile
from scaledot._kernels.gradient import load_lse, panel_depth, tile_range, wide_of
from scaledot._kernels.jit import inlined, kernel, separate
from scaledot._kernels.kinds import BLOCK_KV, SUBS, Double, Single, lanes, numbers, size
from scaledot._kernels.layout import LINE, MR, NR, up
from scaledot._kernels.pack import (
    FLOAT32,
    FLOAT64,
    fetch_add,
    fill_panel,
    fill_rows,
    fill_values,
    load_int64,
    transpose,
)
from scaledot._kernels.softmax import weigh_moved
from scaledot._kernels.tile import EMPTY, end_key, first_key, multiply, multiply_more
from scaledot._state import LARGE_LSE


class Room(NamedTuple):
    """Addresses of one worker's arrays, in the kind's numbers where nothing else is said."""

    keys: int  # (BLOCK_KV, k_wide)
    values: int  # (BLOCK_KV, v_wide), nan and infinities as 0
    tangent_keys: int  # as keys
    tangent_values: int  # as values
    panels: int  # (SUBS, k_wide, span): queries, turned over
    tangent_panels: int  # the same of their tangents
    acc: int  # (SUBS, v_wide, span)
    lse: int  # (SUBS · span,)
    shift: int  # (SUBS · span,)
    mean: int  # (SUBS · span,)
    work: int  # (BLOCK_KV + lanes, span): scores before score_mod
    raw: int  # the same: scores before every option
    moved: int  # the same: tangents of scores
    scores: int  # the same, later the weights
    top: int  # (span,)
    ones: int  # (span,)
    rows: int  # (lanes, widest row)
    odd: int  # bytes (BLOCK_KV,)
    seen: int  # bytes (BLOCK_KV + lanes, span)
    row_keys: int  # uint32 (2, span)


def room_sizes(lane: int, number: int, d_k: int, d_v: int, rows: int) -> tuple[int, ...]:
    """Bytes of each array of `Room`, for blocks of ``rows`` queries at most."""
    span, subs, step = NR * lane, min(SUBS, max(1, -(-rows // (NR * lane)))), max(lane, MR)
    k_wide, v_wide = -(-max(1, d_k) // step) * step, -(-max(1, d_v) // step) * step
    tile, wide = number * (BLOCK_KV + lane) * span, max(k_wide, v_wide, BLOCK_KV)
    keys, values = number * BLOCK_KV * k_wide, number * BLOCK_KV * v_wide
    panel = number * subs * k_wide * span
    return (
        keys, values, keys, values, panel, panel, number * subs * v_wide * span,
        number * subs * span, number * subs * span, number * subs * span, tile, tile, tile, tile,
        number * span, number * span, number * lane * wide, BLOCK_KV,
        (BLOCK_KV + lane) * span, 8 * span,
    )  # fmt: skip


def room_bytes(lane: int, number: int, d_k: int, d_v: int, rows: int) -> int:
    """Bytes of a worker's scratch memory, a multiple of a cache line."""
    return sum(-(-n // LINE) * LINE for n in room_sizes(lane, number, d_k, d_v, rows)) + LINE


_sizes = inlined(room_sizes)


@inlined
def room_of(kind, call, worker):  # type: ignore[no-untyped-def]
    """Addresses in the scratch memory of one worker."""
    s = _sizes(lanes(kind), size(kind), call.d_k, call.d_v, call.len_q)
    keys = up(call.scratch + worker * call.scratch_bytes)
    values = keys + up(s[0])
    tangent_keys = values + up(s[1])
    tangent_values = tangent_keys + up(s[2])
    panels = tangent_values + up(s[3])
    tangent_panels = panels + up(s[4])
    acc = tangent_panels + up(s[5])
    lse = acc + up(s[6])
    shift = lse + up(s[7])
    mean = shift + up(s[8])
    work = mean + up(s[9])
    raw = work + up(s[10])
    moved = raw + up(s[11])
    scores = moved + up(s[12])
    top = scores + up(s[13])
    ones = top + up(s[14])
    rows = ones + up(s[15])
    odd = rows + up(s[16])
    seen = odd + up(s[17])
    return Room(
        keys, values, tangent_keys, tangent_values, panels, tangent_panels, acc, lse, shift, mean,
        work, raw, moved, scores, top, ones, rows, odd, seen, seen + up(s[18]),
    )  # fmt: skip


@inlined
def own_code(kind):  # type: ignore[no-untyped-def]
    """Code of the dtype of the kind's numbers."""
    return FLOAT64 if size(kind) == 8 else FLOAT32


@separate
def fill_tangents(kind, call, source, places, index, d, start, count, rows, target):  # type: ignore[no-untyped-def]
    """Rows of tangents, padded with zeros; nothing where there are none."""
    if source:
        wide = wide_of(kind, d)
        given = source + load_int64(places + 8 * index) + size(kind) * start * d
        fill_rows(
            kind, given, size(kind) * d, size(kind), own_code(kind), count, d, rows, wide, target
        )


@separate
def fill_tangent_panels(kind, call, pair, row, count, rows, target):  # type: ignore[no-untyped-def]
    """Tangents of a block of queries, turned over."""
    span, lane = NR * lanes(kind), lanes(kind)
    if call.tangent_query:
        source = call.tangent_query + load_int64(call.tangent_q_places + 8 * pair)
        step = size(kind) * call.d_k
        for sub in range(-(-count // span)):
            some = min(span, count - sub * span)
            fill_panel(
                kind, source + (row + sub * span) * step, step, size(kind), own_code(kind), some,
                call.d_k, -(-some // lane) * lane, span, rows,
                target + size(kind) * sub * panel_depth(kind, call.d_k) * span,
            )  # fmt: skip


@separate
def move_products(  # type: ignore[no-untyped-def]
    kind, call, nr, keys, tangent_keys, panel, tangent_panel, first, last, moved, top
):  # fmt: skip
    """moved[first:last] = scale (K dQᵀ + dK Qᵀ)."""
    span, step, depth = NR * lanes(kind), wide_of(kind, call.d_k), max(1, call.d_k)
    if call.tangent_query:
        factor = 1.0 if call.tangent_key else call.scale
        multiply(kind, depth, factor, nr, keys, step, tangent_panel, first, last, moved, top)
    else:
        numbers(kind, moved + size(kind) * first * span, (last - first) * span)[:] = 0
    if call.tangent_key:
        multiply_more(
            kind, depth, call.scale, nr, tangent_keys, step, panel, first, last, moved
        )


@separate
def tangent_tile(kind, call, room, pair, sub, row, count, tile, low, high, seen):  # type: ignore[no-untyped-def]
    """Add one tile to both sums of one block of queries."""
    span, lane, nr = NR * lanes(kind), lanes(kind), -(-count // lanes(kind))
    k_wide, v_wide = wide_of(kind, call.d_k), wide_of(kind, call.d_v)
    panel = size(kind) * sub * panel_depth(kind, call.d_k) * span
    last = score_tile(
        kind, call, room, pair, sub, row, count, tile, low, high, seen, room.keys, k_wide,
        call.scale,
    )  # fmt: skip
    first = low // MR * MR
    begin = size(kind) * first * span
    move_products(
        kind, call, nr, room.keys, room.tangent_keys, room.panels + panel,
        room.tangent_panels + panel, first, last, room.moved, room.top,
    )  # fmt: skip
    if call.weighs:
        numbers(kind, room.moved + begin, (last - first) * span)[:] = 1
    elif call.move:
        multiply(
            kind, max(1, call.d_k), call.scale, nr, room.keys, k_wide, room.panels + panel, first,
            last, room.raw, room.top,
        )  # fmt: skip
        ask(
            call.move, call.address, pair, row, count, tile + first, last - first,
            room.raw + begin, room.rows,
        )  # fmt: skip
    for c in range(nr):
        column, place = begin + size(kind) * c * lane, size(kind) * (sub * span + c * lane)
        weigh_moved(
            kind, room.scores + column, span, last - first, room.lse + place,
            room.shift + place, room.moved + column, room.mean + place,
        )  # fmt: skip
    if call.weighs:
        return
    if call.threshold:
        for given in (room.scores, room.moved):
            ask(
                call.drop, call.address, pair, row, tile + first, last - first, room.row_keys,
                given + begin, 0,
            )  # fmt: skip
    acc = room.acc + size(kind) * sub * v_wide * span
    accumulate(
        kind, call.d_v, nr, room.moved, room.values, v_wide, first, last, acc, room.ones
    )
    if call.tangent_value:
        accumulate(
            kind, call.d_v, nr, room.scores, room.tangent_values, v_wide, first, last, acc,
            room.ones,
        )  # fmt: skip


@separate
def load_tile(kind, call, room, key_pair, tile):  # type: ignore[no-untyped-def]
    """Keys, values and their tangents of one tile."""
    count, rows = min(BLOCK_KV, call.len_kv - tile), BLOCK_KV
    key = call.key + load_int64(call.k_places + 8 * key_pair) + tile * call.k_row
    value = call.value + load_int64(call.v_places + 8 * key_pair) + tile * call.v_row
    fill_rows(
        kind, key, call.k_row, call.k_column, call.dtype, count, call.d_k, rows,
        wide_of(kind, call.d_k), room.keys,
    )  # fmt: skip
    fill_values(
        kind, value, call.v_row, call.v_column, call.dtype, count, rows, call.d_v,
        wide_of(kind, call.d_v), room.values, room.odd, room.rows,
    )  # fmt: skip
    fill_tangents(
        kind, call, call.tangent_key, call.tangent_k_places, key_pair, call.d_k, tile, count, rows,
        room.tangent_keys,
    )  # fmt: skip
    fill_tangents(
        kind, call, call.tangent_value, call.tangent_v_places, key_pair, call.d_v, tile, count,
        rows, room.tangent_values,
    )  # fmt: skip


@separate
def start_block(kind, call, room, pair, row, count):  # type: ignore[no-untyped-def]
    """Load a block of queries and clear its sums."""
    span, lane = NR * lanes(kind), lanes(kind)
    subs = -(-count // span)
    for sub in range(subs):
        some = min(span, count - sub * span)
        source = call.query + load_int64(call.q_places + 8 * pair) + (row + sub * span) * call.q_row
        fill_panel(
            kind, source, call.q_row, call.q_column, call.dtype, some, call.d_k,
            -(-some // lane) * lane, span, room.rows,
            room.panels + size(kind) * sub * panel_depth(kind, call.d_k) * span,
        )  # fmt: skip
    fill_tangent_panels(kind, call, pair, row, count, room.rows, room.tangent_panels)
    numbers(kind, room.acc, subs * wide_of(kind, call.d_v) * span)[:] = 0
    numbers(kind, room.mean, subs * span)[:] = 0
    load_lse(kind, call, pair, row, count, room.lse, room.shift)


@separate
def store_block(kind, call, room, pair, row, count):  # type: ignore[no-untyped-def]
    """Write both sums of a block."""
    span, lane, v_wide = NR * lanes(kind), lanes(kind), wide_of(kind, call.d_v)
    mean = numbers(kind, call.row_tangent + size(kind) * (pair * call.len_q + row), count)
    mean[:] = numbers(kind, room.mean, count)
    for first in range(0, count, lane):
        sub, inside = first // span, first % span
        source = room.acc + size(kind) * (sub * v_wide * span + inside)
        for c in range(0, v_wide, lane):
            transpose(
                kind, source + size(kind) * c * span, span, room.rows + size(kind) * c, v_wide
            )
        for i in range(min(lane, count - first)):
            place = (pair * call.len_q + row + first + i) * call.d_v
            numbers(kind, call.out + size(kind) * place, call.d_v)[:] = numbers(
                kind, room.rows + size(kind) * i * v_wide, call.d_v
            )


@inlined
def has_large(kind, lse, count):  # type: ignore[no-untyped-def]
    """Whether weights of a block would be off by more than a few roundings of their own."""
    given, largest = numbers(kind, lse, count), 0.0
    for i in range(count):
        largest = max(largest, abs(given[i]))
    return largest > LARGE_LSE


@inlined
def move_rows(kind, address, worker, budget):  # type: ignore[no-untyped-def]
    """Take blocks of queries from the shared counter until none is left."""
    call = read(address)
    room = room_of(kind, call, worker)
    span = NR * lanes(kind)
    step, kv_heads = SUBS * span, call.num_heads // call.group_size
    blocks = -(-call.len_q // step)
    numbers(kind, room.ones, span)[:] = 1
    while budget > 0:
        task = fetch_add(call.counter, 1)
        if task >= call.num_entries * call.num_heads * blocks:
            return 0
        pair, row = task // blocks, (blocks - 1 - task % blocks) * step
        entry = pair // call.num_heads
        key_pair = entry * kv_heads + pair % call.num_heads // call.group_size
        count = min(step, load_int64(call.q_count + 8 * entry) - row)
        if count <= 0:
            continue
        start_block(kind, call, room, pair, row, count)
        if call.weighs and not has_large(kind, room.lse, count):
            numbers(kind, room.mean, count)[:] = 1
            store_block(kind, call, room, pair, row, count)
            continue
        low, high = first_key(call, entry, row), end_key(call, entry, row + count - 1)
        for tile in range(low // BLOCK_KV * BLOCK_KV, high, BLOCK_KV):
            load_tile(kind, call, room, key_pair, tile)
            for sub in range(-(-count // span)):
                here, some = row + sub * span, min(span, count - sub * span)
                first, last, seen = tile_range(kind, call, room, pair, here, some, tile)
                if first < last and seen != EMPTY:
                    tangent_tile(
                        kind, call, room, pair, sub, here, some, tile, first, last, seen
                    )
        store_block(kind, call, room, pair, row, count)
        budget -= count * max(1, high - low) * 3 * (call.d_k + call.d_v + 1)
    return 1


@kernel
def move_rows_single(call, worker, budget):  # type: ignore[no-untyped-def]
    """Forward mode in float32."""
    return move_rows(Single(0), call, worker, budget)


@kernel
def move_rows_double(call, worker, budget):  # type: ignore[no-untyped-def]
    """Forward mode in float64."""
    return move_rows(Double(0), call, worker, budget)
