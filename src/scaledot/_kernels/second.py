"""Second derivatives: what reaches query, key and value from the results of a backward pass.

The inner product of (dO, dlse) with the tangent of (out, lse) is differentiated once more. Tasks
are those of the backward kernel, with five products for each tile instead of two, and five sums
instead of three.
"""

from __future__ import annotations

from typing import NamedTuple

from scaledot._kernels.backward import add_dq, add_outer, store_range
from scaledot._kernels.call import ask, read
from scaledot._kernels.forward import accumulate, score_tile
from scaledot._kernels.gradient import (
    load_block,
    load_range,
    panel_depth,
    room_bytes,
    room_of,
    tile_range,
    wide_of,
)
from scaledot._kernels.jit import inlined, kernel, separate
from scaledot._kernels.kinds import BLOCK_KV, SUBS, Double, Single, lanes, numbers, size
from scaledot._kernels.layout import LINE, MR, NR, up
from scaledot._kernels.pack import fetch_add, fill_rows, load_int64
from scaledot._kernels.softmax import weigh_second
from scaledot._kernels.tangent import (
    fill_tangent_panels,
    fill_tangents,
    move_products,
    own_code,
)
from scaledot._kernels.tile import EMPTY, end_key, first_key, multiply


class More(NamedTuple):
    """Addresses of what a worker needs beside `gradient.Room`, behind it in its scratch memory."""

    keys: int  # (range, k_wide): tangents of keys
    values: int  # (range, v_wide): tangents of values
    panels: int  # (SUBS, k_wide, span): tangents of queries, turned over
    queries: int  # (SUBS · span, k_wide): tangents of queries
    moved: int  # a tile: tangents of the scaled products
    products: int  # the same: dO Vᵀ, later second derivatives by the scores
    others: int  # the same: dO dVᵀ, later first derivatives by the scores
    rows: int  # (SUBS, 5, span): lse, shift, delta, tangent of lse, mean


def more_sizes(
    lane: int, number: int, d_k: int, d_v: int, rows: int, keys: int
) -> tuple[int, ...]:
    """Bytes of each array of `More`, for blocks of ``rows`` queries at most."""
    span, subs, step = NR * lane, min(SUBS, max(1, -(-rows // (NR * lane)))), max(lane, MR)
    k_wide, v_wide = -(-max(1, d_k) // step) * step, -(-max(1, d_v) // step) * step
    tile, block = number * (BLOCK_KV + lane) * span, number * subs * span
    return (
        number * keys * k_wide, number * keys * v_wide, block * k_wide, block * k_wide, tile,
        tile, tile, 5 * block,
    )  # fmt: skip


def second_bytes(lane: int, number: int, d_k: int, d_v: int, rows: int, keys: int) -> int:
    """Bytes of a worker's scratch memory, a multiple of a cache line."""
    shape = (lane, number, d_k, d_v, rows, keys)
    return room_bytes(*shape) + sum(-(-n // LINE) * LINE for n in more_sizes(*shape))


_sizes = inlined(more_sizes)


@inlined
def more_of(kind, call, room):  # type: ignore[no-untyped-def]
    """Addresses behind the room of a worker."""
    span = NR * lanes(kind)
    s = _sizes(lanes(kind), size(kind), call.d_k, call.d_v, call.len_q, call.key_range)
    keys = up(room.row_keys + 8 * span)
    values = keys + up(s[0])
    panels = values + up(s[1])
    queries = panels + up(s[2])
    moved = queries + up(s[3])
    products = moved + up(s[4])
    others = products + up(s[5])
    return More(keys, values, panels, queries, moved, products, others, others + up(s[6]))


@separate
def second_tile(  # type: ignore[no-untyped-def]
    kind, call, room, more, pair, sub, row, count, tile, low, high, seen, start
):  # fmt: skip
    """Second and first derivatives by the products of one tile, and weighted tangents.

    They come in ``more.products``, ``more.others`` and ``room.scores``.
    """
    span, lane, nr = NR * lanes(kind), lanes(kind), -(-count // lanes(kind))
    k_wide, v_wide, below = wide_of(kind, call.d_k), wide_of(kind, call.d_v), tile - start
    panel = size(kind) * sub * panel_depth(kind, call.d_k) * span
    keys = room.keys + size(kind) * below * k_wide
    last = score_tile(
        kind, call, room, pair, sub, row, count, tile, low, high, seen, keys, k_wide, call.scale
    )
    first = low // MR * MR
    begin, numbers_in = size(kind) * first * span, (last - first) * span
    move_products(
        kind, call, nr, keys, more.keys + size(kind) * below * k_wide, room.panels + panel,
        more.panels + panel, first, last, more.moved, room.top,
    )  # fmt: skip
    # Where the scores' tangents are more than those of products they have a tile of their own.
    moved = more.moved
    if call.move:
        multiply(
            kind, max(1, call.d_k), call.scale, nr, keys, k_wide, room.panels + panel, first, last,
            room.raw, room.top,
        )  # fmt: skip
        moved = room.products
        numbers(kind, moved + begin, numbers_in)[:] = numbers(kind, more.moved + begin, numbers_in)
        ask(
            call.move, call.address, pair, row, count, tile + first, last - first,
            room.raw + begin, room.rows,
        )  # fmt: skip
    grads = room.grad_panels + size(kind) * sub * panel_depth(kind, call.d_v) * span
    depth, values = max(1, call.d_v), size(kind) * below * v_wide
    multiply(
        kind, depth, 1.0, nr, room.values + values, v_wide, grads, first, last, more.products,
        room.top,
    )  # fmt: skip
    if call.tangent_value:
        multiply(
            kind, depth, 1.0, nr, more.values + values, v_wide, grads, first, last, more.others,
            room.top,
        )  # fmt: skip
    else:
        numbers(kind, more.others + begin, numbers_in)[:] = 0
    drop_all(kind, call, room, pair, row, tile + first, last - first, begin, more.products,
             more.others)  # fmt: skip
    for c in range(nr):
        column = begin + size(kind) * c * lane
        weigh_second(
            kind, room.scores + column, span, last - first,
            more.rows + size(kind) * (sub * 5 * span + c * lane), span, moved + column,
            more.products + column, more.others + column,
        )  # fmt: skip
    drop_all(kind, call, room, pair, row, tile + first, last - first, begin, room.scores,
             room.scores)  # fmt: skip
    if call.bend:
        ask(
            call.bend, call.address, more.products + begin, more.others + begin,
            more.moved + begin, room.raw + begin, numbers_in, 0, 0,
        )  # fmt: skip
    return first, last


@inlined
def drop_all(kind, call, room, pair, row, key, keys, begin, one, other):  # type: ignore[no-untyped-def]
    """Apply dropout to one tile or two."""
    if call.threshold:
        ask(call.drop, call.address, pair, row, key, keys, room.row_keys, one + begin, 0)
        if other != one:
            ask(call.drop, call.address, pair, row, key, keys, room.row_keys, other + begin, 0)


@separate
def load_rows(kind, call, room, more, pair, row, count):  # type: ignore[no-untyped-def]
    """Tangents of a block of queries, and what is known of its rows."""
    span, k_wide = NR * lanes(kind), wide_of(kind, call.d_k)
    fill_tangent_panels(kind, call, pair, row, count, room.rows, more.panels)
    if call.tangent_query:
        source = call.tangent_query + load_int64(call.tangent_q_places + 8 * pair)
        fill_rows(
            kind, source + size(kind) * row * call.d_k, size(kind) * call.d_k, size(kind),
            own_code(kind), count, call.d_k, count, k_wide, more.queries,
        )  # fmt: skip
    place = size(kind) * (pair * call.len_q + row)
    given = (
        room.lse, room.shift, room.delta, call.row_tangent + place, call.row_mean + place,
    )  # fmt: skip
    for sub in range(-(-count // span)):
        some = min(span, count - sub * span)
        for k in range(5):
            target = numbers(kind, more.rows + size(kind) * (sub * 5 + k) * span, span)
            target[some:] = 0
            target[:some] = numbers(kind, given[k] + size(kind) * sub * span, some)


@separate
def second_sums(kind, call, room, more, sub, count, tile, first, last, start, clean):  # type: ignore[no-untyped-def]
    """Add what one tile gives to the three results."""
    span, nr = NR * lanes(kind), -(-count // lanes(kind))
    k_wide, v_wide = wide_of(kind, call.d_k), wide_of(kind, call.d_v)
    below, rows = size(kind) * (tile - start), size(kind) * sub * span
    if call.dv:
        add_outer(
            kind, room.scores, room.grads + rows * v_wide, v_wide, first, last, count,
            room.dv + below * v_wide, room.ones,
        )  # fmt: skip
    if call.dk:
        total = room.dk + below * k_wide
        add_outer(
            kind, more.products, room.queries + rows * k_wide, k_wide, first, last, count, total,
            room.ones,
        )  # fmt: skip
        if call.tangent_query:
            add_outer(
                kind, more.others, more.queries + rows * k_wide, k_wide, first, last, count,
                total, room.ones,
            )  # fmt: skip
    if call.dq:
        total = room.dq + rows * k_wide
        accumulate(
            kind, call.d_k, nr, more.products, clean + below * k_wide, k_wide, first, last, total,
            room.ones,
        )  # fmt: skip
        if call.tangent_key:
            accumulate(
                kind, call.d_k, nr, more.others, more.keys + below * k_wide, k_wide, first, last,
                total, room.ones,
            )  # fmt: skip


@separate
def second_block(kind, call, room, more, pair, block, start, end, clean):  # type: ignore[no-untyped-def]
    """All that one block of queries gives to a range of keys, and the range to it."""
    span = NR * lanes(kind)
    entry, row = pair // call.num_heads, block * SUBS * span
    count = min(SUBS * span, load_int64(call.q_count + 8 * entry) - row)
    if count <= 0:
        return 0
    low, high = first_key(call, entry, row), end_key(call, entry, row + count - 1)
    if high <= start or low >= end or low >= high:
        return 0
    load_block(kind, call, room, pair, row, count)
    load_rows(kind, call, room, more, pair, row, count)
    subs = -(-count // span)
    numbers(kind, room.dq, subs * wide_of(kind, call.d_k) * span)[:] = 0
    for tile in range(max(start, low // BLOCK_KV * BLOCK_KV), min(end, high), BLOCK_KV):
        for sub in range(subs):
            here, some = row + sub * span, min(span, count - sub * span)
            first, last, seen = tile_range(kind, call, room, pair, here, some, tile)
            if first < last and seen != EMPTY:
                first, last = second_tile(
                    kind, call, room, more, pair, sub, here, some, tile, first, last, seen, start
                )
                second_sums(kind, call, room, more, sub, some, tile, first, last, start, clean)
    if call.dq:
        share = start // call.key_range - low // call.key_range
        add_dq(kind, call, room, pair, block, count, share)
    return count * (min(end, high) - max(start, low))


@inlined
def second(kind, address, worker, budget):  # type: ignore[no-untyped-def]
    """Take ranges of keys from the shared counter until none is left."""
    call = read(address)
    room = room_of(kind, call, worker)
    more = more_of(kind, call, room)
    kv_heads, span = call.num_heads // call.group_size, NR * lanes(kind)
    ranges, blocks = -(-call.len_kv // call.key_range), -(-call.len_q // (SUBS * span))
    key_pairs = call.num_entries * kv_heads
    k_wide, v_wide = wide_of(kind, call.d_k), wide_of(kind, call.d_v)
    numbers(kind, room.ones, span)[:] = 1
    while budget > 0:
        task = fetch_add(call.counter, 1)
        if task >= key_pairs * ranges:
            return 0
        # Range after range, so that neighbours in time add to the dQ of different heads.
        key_pair, start = task % key_pairs, task // key_pairs * call.key_range
        count, scores = min(call.key_range, call.len_kv - start), 0
        clean = load_range(kind, call, room, key_pair, start, count)
        rows = -(-count // MR) * MR
        fill_tangents(
            kind, call, call.tangent_key, call.tangent_k_places, key_pair, call.d_k, start, count,
            rows, more.keys,
        )  # fmt: skip
        fill_tangents(
            kind, call, call.tangent_value, call.tangent_v_places, key_pair, call.d_v, start,
            count, rows, more.values,
        )  # fmt: skip
        numbers(kind, room.dk, rows * k_wide)[:] = 0
        numbers(kind, room.dv, rows * v_wide)[:] = 0
        head = key_pair // kv_heads * call.num_heads + key_pair % kv_heads * call.group_size
        for pair in range(head, head + call.group_size):
            for block in range(blocks - 1, -1, -1):
                scores += second_block(
                    kind, call, room, more, pair, block, start, start + count, clean
                )
        store_range(kind, call, room, key_pair, start, count)
        budget -= (scores + 1) * 6 * (call.d_k + call.d_v + 1)
    return 1


@kernel
def second_single(call, worker, budget):  # type: ignore[no-untyped-def]
    """Second derivatives in float32."""
    return second(Single(0), call, worker, budget)


@kernel
def second_double(call, worker, budget):  # type: ignore[no-untyped-def]
    """Second derivatives in float64."""
    return second(Double(0), call, worker, budget)
