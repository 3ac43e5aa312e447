"""Gradients of the scores of one tile, for the kernels that sum them up.

A task holds `keys_of` keys of one head, copied, and meets all blocks of queries that see them.
For each tile ``P = exp(S - lse)`` is computed anew and ``dS = P∘(D∘(V dOᵀ) - delta)``, keys ×
queries as in the forward kernel (arXiv 2307.08691, algorithm 2, lines 11 to 14).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from scaledot._kernels.call import ask
from scaledot._kernels.forward import score_tile
from scaledot._kernels.jit import inlined, separate
from scaledot._kernels.kinds import BLOCK_KV, SUBS, halves_at, has_pairs, lanes, numbers, size
from scaledot._kernels.layout import LINE, MR, NR, up
from scaledot._kernels.pack import (
    all_finite,
    fill_panel,
    fill_rows,
    fill_values,
    load_int64,
)
from scaledot._kernels.softmax import round_back, weigh_back, weigh_back_pairs
from scaledot._kernels.tile import class_of_tile, clip, end_key, first_key, multiply

CACHE = 2**19  # bytes for keys, values and their gradients: half a second-level cache
MOST_KEYS = 1024


def range_of(number: int, d_k: int, d_v: int) -> int:
    """Keys of a task, by their widths: a multiple of a tile."""
    fitting = CACHE // (2 * number * max(1, d_k + d_v)) // BLOCK_KV * BLOCK_KV
    return min(max(BLOCK_KV, fitting), MOST_KEYS)


class Room(NamedTuple):
    """Addresses of one worker's arrays, in the kind's numbers where nothing else is said."""

    keys: int  # (range, k_wide); for Pairs two numbers in one
    clean_keys: int  # the same with nan and infinities as 0; for Pairs two keys in a row
    values: int  # (range, v_wide); for Pairs two numbers in one
    dk: int  # (range, k_wide)
    dv: int  # (range, v_wide)
    panels: int  # (SUBS, k_wide, span): queries, turned over
    grad_panels: int  # (SUBS, v_wide, span): dO, turned over
    queries: int  # (SUBS · span, k_wide); for Pairs two queries in a row
    grads: int  # (SUBS · span, v_wide): dO, the same
    dq: int  # (SUBS, k_wide, span): turned over
    lse: int  # (SUBS · span,)
    shift: int  # (SUBS · span,)
    delta: int  # (SUBS · span,)
    work: int  # (BLOCK_KV + lanes, span): scores before score_mod
    raw: int  # the same: scores before every option
    products: int  # the same: dO Vᵀ, later the gradients of scores
    scores: int  # the same, later the weights
    weights_16: int  # bfloat16 (BLOCK_KV + lanes, span): the weights, for Pairs
    grads_16: int  # the same: the gradients of scores
    grad_pairs: int  # (BLOCK_KV / 2, span) of 32 bits: those of two keys, for Pairs
    top: int  # (span,)
    ones: int  # (span,)
    rows: int  # (lanes, widest row)
    odd: int  # bytes (SUBS · span,): dO holds nan or inf
    odd_keys: int  # bytes (range,)
    seen: int  # bytes (BLOCK_KV + lanes, span)
    row_keys: int  # uint32 (2, span)


def room_sizes(
    lane: int, number: int, d_k: int, d_v: int, rows: int, keys: int
) -> tuple[int, ...]:
    """Bytes of each array of `Room`, for blocks of ``rows`` queries at most."""
    span, subs, step = NR * lane, min(SUBS, max(1, -(-rows // (NR * lane)))), max(lane, MR)
    k_wide, v_wide = -(-max(1, d_k) // step) * step, -(-max(1, d_v) // step) * step
    tile = number * (BLOCK_KV + lane) * span
    wide = max(k_wide, v_wide, BLOCK_KV)
    return (
        number * keys * k_wide, number * keys * k_wide, number * keys * v_wide,
        number * keys * k_wide, number * keys * v_wide, number * subs * k_wide * span,
        number * subs * v_wide * span, number * subs * span * k_wide,
        number * subs * span * v_wide, number * subs * k_wide * span, number * subs * span,
        number * subs * span, number * subs * span, tile, tile, tile, tile,
        tile // 2, tile // 2, tile // 2, number * span, number * span, number * lane * wide,
        subs * span, keys, (BLOCK_KV + lane) * span, 8 * span,
    )  # fmt: skip


def room_bytes(lane: int, number: int, d_k: int, d_v: int, rows: int, keys: int) -> int:
    """Bytes of a worker's scratch memory, a multiple of a cache line."""
    sizes = room_sizes(lane, number, d_k, d_v, rows, keys)
    return sum(-(-n // LINE) * LINE for n in sizes) + LINE


_sizes = inlined(room_sizes)


@inlined
def room_of(kind, call, worker):  # type: ignore[no-untyped-def]
    """Addresses in the scratch memory of one worker."""
    return room_at(kind, call, up(call.scratch + worker * call.scratch_bytes))


@inlined
def room_at(kind, call, keys):  # type: ignore[no-untyped-def]
    """Addresses of arrays that lie one after the other, the keys first."""
    s = _sizes(lanes(kind), size(kind), call.d_k, call.d_v, call.len_q, call.key_range)
    clean_keys = keys + up(s[0])
    values = clean_keys + up(s[1])
    dk = values + up(s[2])
    dv = dk + up(s[3])
    panels = dv + up(s[4])
    grad_panels = panels + up(s[5])
    queries = grad_panels + up(s[6])
    grads = queries + up(s[7])
    dq = grads + up(s[8])
    lse = dq + up(s[9])
    shift = lse + up(s[10])
    delta = shift + up(s[11])
    work = delta + up(s[12])
    raw = work + up(s[13])
    products = raw + up(s[14])
    scores = products + up(s[15])
    weights_16 = scores + up(s[16])
    grads_16 = weights_16 + up(s[17])
    grad_pairs = grads_16 + up(s[18])
    top = grad_pairs + up(s[19])
    ones = top + up(s[20])
    rows = ones + up(s[21])
    odd = rows + up(s[22])
    odd_keys = odd + up(s[23])
    seen = odd_keys + up(s[24])
    return Room(
        keys, clean_keys, values, dk, dv, panels, grad_panels, queries, grads, dq, lse, shift,
        delta, work, raw, products, scores, weights_16, grads_16, grad_pairs, top, ones, rows,
        odd, odd_keys, seen, seen + up(s[25]),
    )  # fmt: skip


@inlined
def wide_of(kind, d):  # type: ignore[no-untyped-def]
    """A width, rounded up to full vectors and rows of the micro-kernel."""
    step = max(lanes(kind), MR)
    return -(-max(1, d) // step) * step


@inlined
def step_of(kind, d):  # type: ignore[no-untyped-def]
    """Numbers, or pairs of them, in a row of keys or values as they are multiplied."""
    return max(1, (d + 1) // 2) if has_pairs(kind) else wide_of(kind, d)


@separate
def load_range(kind, call, room, key_pair, start, count):  # type: ignore[no-untyped-def]
    """Copy ``count`` keys and values from ``start`` on; return where keys without nan are."""
    k_wide, k_step = wide_of(kind, call.d_k), step_of(kind, call.d_k)
    rows = -(-count // MR) * MR
    key = call.key + load_int64(call.k_places + 8 * key_pair) + start * call.k_row
    value = call.value + load_int64(call.v_places + 8 * key_pair) + start * call.v_row
    fill_rows(
        kind, key, call.k_row, call.k_column, call.dtype, count, call.d_k, rows, k_step, room.keys
    )
    fill_rows(
        kind, value, call.v_row, call.v_column, call.dtype, count, call.d_v, rows,
        step_of(kind, call.d_v), room.values,
    )  # fmt: skip
    if not has_pairs(kind) and all_finite(kind, room.keys, size(kind) * k_wide, rows, k_wide):
        return room.keys
    fill_values(
        kind, key, call.k_row, call.k_column, call.dtype, count, rows, call.d_k, k_wide,
        room.clean_keys, room.odd_keys, room.rows,
    )  # fmt: skip
    return room.clean_keys


@inlined
def panel_depth(kind, d):  # type: ignore[no-untyped-def]
    """Rows of a panel: numbers or pairs, in full squares."""
    depth = (d + 1) // 2 if has_pairs(kind) else d
    return -(-max(1, depth) // lanes(kind)) * lanes(kind)


@separate
def load_block(kind, call, room, pair, first_row, count):  # type: ignore[no-untyped-def]
    """Load a block of queries with what is known of them; return how many dO are odd."""
    span, lane = NR * lanes(kind), lanes(kind)
    k_wide, v_wide = wide_of(kind, call.d_k), wide_of(kind, call.d_v)
    rows = count + count % 2 if has_pairs(kind) else count
    query = call.query + load_int64(call.q_places + 8 * pair) + first_row * call.q_row
    grad = call.grad_out + load_int64(call.grad_places + 8 * pair) + first_row * call.grad_row
    fill_values(
        kind, query, call.q_row, call.q_column, call.dtype, count, rows, call.d_k, k_wide,
        room.queries, room.odd, room.rows,
    )  # fmt: skip
    odd = fill_values(
        kind, grad, call.grad_row, call.grad_column, call.grad_dtype, count, rows, call.d_v,
        v_wide, room.grads, room.odd, room.rows,
    )  # fmt: skip
    for sub in range(-(-count // span)):
        some = min(span, count - sub * span)
        columns = -(-some // lane) * lane
        fill_panel(
            kind, query + sub * span * call.q_row, call.q_row, call.q_column, call.dtype, some,
            call.d_k, columns, span, room.rows,
            room.panels + size(kind) * sub * panel_depth(kind, call.d_k) * span,
        )  # fmt: skip
        fill_panel(
            kind, grad + sub * span * call.grad_row, call.grad_row, call.grad_column,
            call.grad_dtype, some, call.d_v, columns, span, room.rows,
            room.grad_panels + size(kind) * sub * panel_depth(kind, call.d_v) * span,
        )  # fmt: skip
    load_lse(kind, call, pair, first_row, count, room.lse, room.shift)
    blocks = -(-count // span) * span
    place = size(kind) * (pair * call.len_q + first_row)
    delta, deltas = numbers(kind, room.delta, blocks), numbers(kind, call.delta + place, count)
    given = numbers(kind, call.lse + place, count)
    delta[count:] = 0
    for i in range(count):
        delta[i] = deltas[i] if given[i] != -np.inf else 0
    return odd


@separate
def load_lse(kind, call, pair, row, count, target, shift):  # type: ignore[no-untyped-def]
    """Lse and shift of a block of queries.

    Lse is 0 where a row is empty, and nan for an infinite score, whose weights are unknown.
    """
    span = NR * lanes(kind)
    rows, place = -(-count // span) * span, size(kind) * (pair * call.len_q + row)
    lse, given = numbers(kind, target, rows), numbers(kind, call.lse + place, count)
    shifts = numbers(kind, shift, rows)
    lse[count:] = 0
    shifts[:] = 0
    if call.row_shift:
        shifts[:count] = numbers(kind, call.row_shift + place, count)
    for i in range(count):
        x = given[i]
        lse[i] = np.nan if x == np.inf else (0.0 if x == -np.inf else x)


@separate
def gradient_tile(  # type: ignore[no-untyped-def]
    kind, call, room, pair, sub, row, count, tile, low, high, seen, start, odd
):  # fmt: skip
    """Weights and gradients of scores of one tile; return the first key and one past the last.

    ``start`` is the first key of the range, of which the tile is a part. Of the gradients, those
    by the terms that were added to scores are summed, and then turned into those by products.
    For Pairs both come rounded; the weights also as they were, if some dO is ``odd``.
    """
    span, lane, nr = NR * lanes(kind), lanes(kind), -(-count // lanes(kind))
    k_step, v_step = step_of(kind, call.d_k), step_of(kind, call.d_v)
    keys = room.keys + size(kind) * (tile - start) * k_step
    last = score_tile(
        kind, call, room, pair, sub, row, count, tile, low, high, seen, keys, k_step, call.scale
    )
    first = low // MR * MR
    begin, values = size(kind) * first * span, room.values + size(kind) * (tile - start) * v_step
    multiply(
        kind, depth_in(kind, call.d_v), 1.0, nr, values, v_step,
        room.grad_panels + size(kind) * sub * panel_depth(kind, call.d_v) * span, first, last,
        room.products, room.top,
    )  # fmt: skip
    if call.threshold:
        ask(
            call.drop, call.address, pair, row, tile + first, last - first, room.row_keys,
            room.products + begin, 0,
        )  # fmt: skip
    if has_pairs(kind) and not (call.threshold or call.chain or odd):
        finish_pairs(kind, room, True, sub, count, first, last)
        return first, last
    for c in range(nr):
        column, place = size(kind) * c * lane, size(kind) * (sub * span + c * lane)
        weigh_back(
            kind, room.scores + begin + column, span, last - first, room.lse + place,
            room.shift + place, room.delta + place, room.products + begin + column,
        )  # fmt: skip
    if call.threshold:
        ask(
            call.drop, call.address, pair, row, tile + first, last - first, room.row_keys,
            room.scores + begin, 0,
        )  # fmt: skip
    if call.chain:
        multiply(
            kind, depth_in(kind, call.d_k), call.scale, nr, keys, k_step,
            room.panels + size(kind) * sub * panel_depth(kind, call.d_k) * span, first, last,
            room.raw, room.top,
        )  # fmt: skip
        ask(
            call.chain, call.address, pair, row, count, tile + first, last - first,
            room.raw + begin, room.rows,
        )  # fmt: skip
    if has_pairs(kind):
        finish_pairs(kind, room, False, sub, count, first, last)
    return first, last


@inlined
def depth_in(kind, d):  # type: ignore[no-untyped-def]
    """Products in a sum over a width: of numbers, or of pairs of them."""
    return max(1, (d + 1) // 2 if has_pairs(kind) else d)


@inlined
def finish_pairs(kind, room, weigh, sub, count, first, last):  # type: ignore[no-untyped-def]
    """Round the weights and gradients of a tile to bfloat16; with ``weigh``, make them first."""
    span, lane = NR * lanes(kind), lanes(kind)
    for c in range(-(-count // lane)):
        place, column = size(kind) * (sub * span + c * lane), first * span + c * lane
        scores, products = room.scores + 4 * column, room.products + 4 * column
        weights, grads = room.weights_16 + 2 * column, room.grads_16 + 2 * column
        pairs = room.grad_pairs + 4 * (first // 2 * span + c * lane)
        if weigh:
            weigh_back_pairs(
                kind, scores, span, last - first, room.lse + place, room.shift + place,
                room.delta + place, products, weights, grads, pairs,
            )  # fmt: skip
        else:
            round_back(
                kind, scores, span, last - first, room.lse + place, room.shift + place,
                room.delta + place, products, weights, grads, pairs,
            )  # fmt: skip
    if count % 2:  # the other half of the last pair counts as nothing, whatever it holds
        for j in range(first, last):
            halves_at(room.weights_16 + 2 * j * span, span)[count] = np.uint16(0)
            halves_at(room.grads_16 + 2 * j * span, span)[count] = np.uint16(0)


@inlined
def tile_range(kind, call, room, pair, row, count, tile):  # type: ignore[no-untyped-def]
    """Keys low..high of a tile that a block of queries may see, and the tile's class."""
    entry = pair // call.num_heads
    low = clip(first_key(call, entry, row) - tile, 0, BLOCK_KV)
    high = clip(end_key(call, entry, row + count - 1) - tile, 0, BLOCK_KV)
    if low >= high:
        return low, high, 0
    return low, high, class_of_tile(
        call, pair, row, count, tile + low, high - low, room.seen, room.row_keys
    )
