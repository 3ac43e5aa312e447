"""Forward kernel: one block of queries of one head at a time, over tiles of keys.

The algorithm is FlashAttention's (arXiv 2307.08691, algorithm 1) on vector registers; README.md
maps its symbols. Scores are in natural units. The kernels pass addresses and numbers only: arrays
would be counted by reference at every call of an inner function.
"""

from __future__ import annotations

import math

import numpy as np

from scaledot._kernels.call import ask, read
from scaledot._kernels.jit import inlined, kernel, separate
from scaledot._kernels.kinds import (
    BLOCK_KV,
    Double,
    Pairs,
    Single,
    has_pairs,
    lanes,
    numbers,
    size,
    subs,
)
from scaledot._kernels.layout import depth_of, place, width_of
from scaledot._kernels.matmul import make_accumulate
from scaledot._kernels.overlap import STEPS, have_begun, is_plain, weigh_scores, weigh_tile
from scaledot._kernels.pack import (
    FLOAT32,
    FLOAT64,
    all_finite,
    fetch_add,
    fill_panel,
    fill_rows,
    fill_values,
    load_byte,
    load_int64,
    numbers_to_row,
    row_to_numbers,
    transpose_scaled,
)
from scaledot._kernels.softmax import column_max, pair_weights, raise_max, weigh, weigh_pairs
from scaledot._kernels.target import HOST
from scaledot._kernels.tile import (
    EMPTY,
    NO_LIMIT,
    PARTIAL,
    adjusts,
    class_of_tile,
    clip,
    end_key,
    first_key,
    hide_outside,
    hide_unseen,
    multiply,
)
from scaledot._kernels.tokens import run_of_tokens, token_place

MR, NR = HOST.mr, HOST.nr
INF = math.inf
_accumulate = [make_accumulate(n) for n in range(1, NR + 1)]
accumulate_1, accumulate_2, accumulate_3 = _accumulate[0], _accumulate[-2], _accumulate[-1]


@separate
def score_tile(kind, call, scratch, pair, sub, row, count, tile, low, high, seen, keys, k_step, by):  # type: ignore[no-untyped-def]
    """Scores of keys low..high of a tile for one block of queries, and their maxima.

    Scores are products times ``by``. ``low`` and the end of what is computed are multiples of
    MR; returns that end.
    """
    span, entry, nr = NR * lanes(kind), pair // call.num_heads, -(-count // lanes(kind))
    depth = depth_of(kind, call)
    wide = -(-depth // lanes(kind)) * lanes(kind)
    panel = scratch.panels + size(kind) * sub * wide * span
    first, last = low // MR * MR, -(-high // MR) * MR
    multiply(
        kind, depth, by, nr, keys, k_step, panel, first, last, scratch.scores, scratch.top
    )
    start = scratch.scores + size(kind) * first * span
    changed = False
    if adjusts(call):
        ask(
            call.adjust, call.address, pair, row, count, tile + first, high - first, start,
            scratch.rows,
        )  # fmt: skip
        changed = True
    if seen == PARTIAL:
        changed = True
        for c in range(nr):
            column = size(kind) * c * lanes(kind)
            hide_unseen(
                kind, scratch.scores + size(kind) * low * span + column, span, high - low,
                scratch.seen + c * lanes(kind),
            )  # fmt: skip
    top = end_key(call, entry, row)
    inside = first_key(call, entry, row + count - 1) - tile <= first and top - tile >= last
    if not inside:
        changed = True
        hide_positions(kind, call, entry, row, nr, tile, first, last, scratch.scores)
    if changed:
        for c in range(nr):
            column = size(kind) * c * lanes(kind)
            column_max(kind, start + column, span, last - first, scratch.top + column)
    return last


@separate
def hide_positions(kind, call, entry, row, nr, tile, first, last, scores):  # type: ignore[no-untyped-def]
    """-inf where a key of first..last lies outside of what positions and length leave."""
    p = load_int64(call.q_start + 8 * entry) - load_int64(call.kv_start + 8 * entry) + row
    low = clip(p - call.left - tile, -NO_LIMIT, NO_LIMIT)
    high = clip(p + call.right + 1 - tile, -NO_LIMIT, NO_LIMIT)
    end = clip(load_int64(call.kv_count + 8 * entry) - tile, 0, BLOCK_KV)
    for c in range(nr):
        lane = c * lanes(kind)
        hide_outside(
            kind, scores + size(kind) * lane, NR * lanes(kind), first, last, low + lane,
            high + lane, end,
        )  # fmt: skip


@separate
def add_odd(kind, call, scratch, key_pair, sub, count, tile, low, high):  # type: ignore[no-untyped-def]
    """Bring the nan and infinite values of keys low..high to the queries that see them."""
    span, width = NR * lanes(kind), width_of(kind, call)
    value = numbers(kind, scratch.rows, call.d_v)
    for j in range(low, high):
        if load_byte(scratch.odd + j):
            source = call.value + load_int64(call.v_places + 8 * key_pair)
            entry = key_pair // (call.num_heads // call.group_size)
            source += token_place(call, entry, tile + j, call.v_page, call.v_row)
            row_to_numbers(kind, source, call.v_column, call.d_v, call.dtype, scratch.rows)
            scores = numbers(kind, scratch.scores + size(kind) * j * span, span)
            for i in range(count):
                if scores[i] != -INF:
                    place = size(kind) * (sub * span + i) * width
                    acc = numbers(kind, scratch.odd_acc + place, call.d_v)
                    for c in range(call.d_v):
                        if not np.isfinite(value[c]):
                            acc[c] += value[c]


@separate
def accumulate(kind, d, nr, weights, values, v_step, first, last, acc, factor):  # type: ignore[no-untyped-def]
    """Acc = acc · factor + values · weights over keys first..last (line 10: O += P V)."""
    span, half = NR * lanes(kind), 1 + has_pairs(kind)
    first, depth = first // half, (last - first) // half
    b, a = weights + size(kind) * first * span, values + size(kind) * first * v_step
    for i in range(0, max(1, d), MR):
        x, c = a + size(kind) * i, acc + size(kind) * i * span
        if nr == 1:
            accumulate_1(kind, x, 1, v_step, b, span, depth, c, span, factor)
        elif nr == NR:
            accumulate_3(kind, x, 1, v_step, b, span, depth, c, span, factor)
        else:
            accumulate_2(kind, x, 1, v_step, b, span, depth, c, span, factor)


@separate
def attend_sub(  # type: ignore[no-untyped-def]
    kind, call, scratch, pair, key_pair, sub, row, count, tile, low, high, seen, odd, keys, k_step,
    values, v_step,
):  # fmt: skip
    """Keys low..high of a tile for one block of ``count`` queries from ``row`` on."""
    span, nr = NR * lanes(kind), -(-count // lanes(kind))
    last = score_tile(
        kind, call, scratch, pair, sub, row, count, tile, low, high, seen, keys, k_step, call.scale
    )
    first = low // MR * MR
    if odd:
        add_odd(kind, call, scratch, key_pair, sub, count, tile, low, high)
    start = scratch.scores + size(kind) * first * span
    for c in range(nr):
        column, place = size(kind) * c * lanes(kind), size(kind) * (sub * span + c * lanes(kind))
        row_max, row_sum = scratch.row_max + place, scratch.row_sum + place
        raise_max(kind, scratch.top + column, row_max, row_sum, scratch.factor + column)
        pairs = scratch.pairs + size(kind) * first // 2 * span + column
        if has_pairs(kind) and not call.threshold:
            weigh_pairs(kind, start + column, span, last - first, row_max, row_sum, pairs)
        else:
            weigh(kind, start + column, span, last - first, row_max, row_sum)
    if call.threshold:
        ask(
            call.drop, call.address, pair, row, tile + first, last - first, scratch.row_keys,
            start, 0,
        )  # fmt: skip
        for c in range(nr):
            column = size(kind) * c * lanes(kind)
            pair_weights(
                kind, start + column, span, last - first,
                scratch.pairs + size(kind) * first // 2 * span + column,
            )  # fmt: skip
    weights = scratch.pairs if has_pairs(kind) else scratch.scores
    accumulate(
        kind, call.d_v, nr, weights, values, v_step, first, last,
        scratch.acc + size(kind) * sub * width_of(kind, call) * span, scratch.factor,
    )  # fmt: skip


@separate
def attend_plain(  # type: ignore[no-untyped-def]
    kind, call, scratch, pair, key_pair, sub, row, count, tile, low, high, seen, odd, keys, k_step,
    values, v_step,
):  # fmt: skip
    """`attend_sub` for calls that are plain (`overlap`)."""
    span, nr = NR * lanes(kind), -(-count // lanes(kind))
    row_max = scratch.row_max + size(kind) * sub * span
    whole = nr == NR and not odd and depth_of(kind, call) > STEPS and seen != PARTIAL
    # Rows that have begun have the first key that they may see behind them.
    whole = whole and end_key(call, pair // call.num_heads, row) >= tile + BLOCK_KV
    first, last = low // MR * MR, high
    if not (
        whole and have_begun(kind, row_max)
        and weigh_tile(kind, call, scratch, sub, keys, k_step)
    ):  # fmt: skip
        last = score_tile(
            kind, call, scratch, pair, sub, row, count, tile, low, high, seen, keys, k_step, 1.0
        )
        if odd:
            add_odd(kind, call, scratch, key_pair, sub, count, tile, low, high)
        weigh_scores(kind, call, scratch, sub, nr, first, last)
    accumulate(
        kind, call.d_v, nr, scratch.pairs, values, v_step, first, last,
        scratch.acc + size(kind) * sub * width_of(kind, call) * span, scratch.factor,
    )  # fmt: skip


@inlined
def in_place(kind, call, row_stride, stride, count):  # type: ignore[no-untyped-def]
    """Whether rows can be multiplied where they lie: what the kind takes, without gaps."""
    same = call.dtype == (FLOAT64 if size(kind) == 8 else FLOAT32)
    return same and stride == size(kind) and row_stride % size(kind) == 0 and count % MR == 0


@inlined
def pairs_in_place(kind, call, count):  # type: ignore[no-untyped-def]
    """Whether keys of bfloat16 can be multiplied as the pairs that they are in memory."""
    return (
        has_pairs(kind) and call.k_column == 2 and call.k_row % 4 == 0 and call.d_k % 2 == 0
        and call.d_k > 0 and count % MR == 0
    )  # fmt: skip


@inlined
def valid_keys(call, entry, tile):  # type: ignore[no-untyped-def]
    """Keys of a tile that an entry has."""
    return min(BLOCK_KV, load_int64(call.kv_count + 8 * entry) - tile)


@separate
def load_keys(kind, call, key_pair, tile, target):  # type: ignore[no-untyped-def]
    """Address of a tile's keys and numbers from row to row: in place, or converted."""
    entry = key_pair // (call.num_heads // call.group_size)
    base, count = call.key + load_int64(call.k_places + 8 * key_pair), valid_keys(call, entry, tile)
    place, step, some = run_of_tokens(call, entry, tile, count, call.k_page, call.k_row)
    direct = in_place(kind, call, step, call.k_column, count) or pairs_in_place(kind, call, count)
    if direct and some == count and call.d_k > 0:  # sums take one product at least, here of zeros
        return base + place, step // size(kind)
    j, depth = 0, depth_of(kind, call)
    while j < count:
        place, step, some = run_of_tokens(
            call, entry, tile + j, count - j, call.k_page, call.k_row
        )
        rows = some if j + some < count else -(-count // MR) * MR - j
        fill_rows(
            kind, base + place, step, call.k_column, call.dtype, some, call.d_k, rows, depth,
            target + size(kind) * j * depth,
        )  # fmt: skip
        j += some
    return target, depth


@separate
def load_values(kind, call, scratch, key_pair, tile):  # type: ignore[no-untyped-def]
    """Address of a tile's values, numbers from row to row, and how many rows are odd."""
    entry, width = key_pair // (call.num_heads // call.group_size), width_of(kind, call)
    base = call.value + load_int64(call.v_places + 8 * key_pair)
    count = valid_keys(call, entry, tile)
    place, step, some = run_of_tokens(call, entry, tile, count, call.v_page, call.v_row)
    plain = in_place(kind, call, step, call.v_column, count) and call.d_v == width
    if plain and some == count and all_finite(kind, base + place, step, count, width):
        return base + place, step // size(kind), 0
    j, odd = 0, 0
    while j < count:
        place, step, some = run_of_tokens(
            call, entry, tile + j, count - j, call.v_page, call.v_row
        )
        rows = some if j + some < count else -(-count // MR) * MR - j
        first = j // 2 if has_pairs(kind) else j
        odd += fill_values(
            kind, base + place, step, call.v_column, call.dtype, some, rows, call.d_v, width,
            scratch.values + size(kind) * first * width, scratch.odd + j, scratch.rows,
        )  # fmt: skip
        j += some
    return scratch.values, width, odd


@inlined
def attend_tile(kind, call, scratch, pair, key_pair, first_row, rows, tile, met):  # type: ignore[no-untyped-def]
    """One tile for all blocks of queries of a task; return whether odd values have been met."""
    span, entry, loaded, odd = NR * lanes(kind), pair // call.num_heads, False, 0
    keys = values = k_step = v_step = np.int64(0)
    for sub in range(-(-rows // span)):
        row = first_row + sub * span
        count = min(span, rows - sub * span)
        low = clip(first_key(call, entry, row) - tile, 0, BLOCK_KV)
        high = clip(end_key(call, entry, row + count - 1) - tile, 0, BLOCK_KV)
        if low >= high:
            continue
        seen = class_of_tile(
            call, pair, row, count, tile + low, high - low, scratch.seen, scratch.row_keys
        )
        if seen == EMPTY:
            continue
        if not loaded:
            keys, k_step = load_keys(kind, call, key_pair, tile, scratch.keys)
            values, v_step, odd = load_values(kind, call, scratch, key_pair, tile)
            loaded = True
            if odd and met == 0:
                numbers(kind, scratch.odd_acc, rows * width_of(kind, call))[:] = 0
        if is_plain(kind, call):
            attend_plain(
                kind, call, scratch, pair, key_pair, sub, row, count, tile, low, high, seen, odd,
                keys, k_step, values, v_step,
            )  # fmt: skip
        else:
            attend_sub(
                kind, call, scratch, pair, key_pair, sub, row, count, tile, low, high, seen, odd,
                keys, k_step, values, v_step,
            )  # fmt: skip
    return met + odd


@separate
def finish(kind, call, scratch, pair, sub, row, count, odd):  # type: ignore[no-untyped-def]
    """Write O / ℓ and m + log ℓ (algorithm 1, lines 12 and 13) of one block of queries."""
    span, width, lane = NR * lanes(kind), width_of(kind, call), lanes(kind)
    address = scratch.row_sum + size(kind) * sub * span
    total = numbers(kind, address, span)
    top = numbers(kind, scratch.row_max + size(kind) * sub * span, span)
    acc = scratch.acc + size(kind) * sub * width * span
    unit, mass = 1.0, total  # of the maxima; what results are divided by
    if is_plain(kind, call):
        unit, mass = call.scale, numbers(kind, scratch.row_mass + size(kind) * sub * span, span)
    for i in range(count):
        place = call.lse + size(kind) * (pair * call.len_q + row + i)
        if call.lse:
            lse = top[i] * unit + math.log(total[i]) if total[i] != 0 else -INF
            numbers(kind, place, 1)[0] = lse
        total[i] = 1 / mass[i] if mass[i] != 0 else 0
    out = call.out + load_int64(call.out_places + 8 * pair) + row * call.out_row
    plain = call.out_dtype == (FLOAT64 if size(kind) == 8 else FLOAT32) and not odd
    plain = plain and call.d_v == width and call.out_row % size(kind) == 0
    for first in range(0, count, lane):
        factors, direct = address + size(kind) * first, plain and count - first >= lane
        target = out + first * call.out_row if direct else scratch.rows
        step = call.out_row // size(kind) if direct else width
        for c in range(0, width, lane):
            square = acc + size(kind) * (c * span + first)
            transpose_scaled(kind, square, span, factors, target + size(kind) * c, step)
        for i in range(0 if direct else min(lane, count - first)):
            line = numbers(kind, scratch.rows + size(kind) * i * width, width)
            if odd:
                place = size(kind) * (sub * span + first + i) * width
                line += numbers(kind, scratch.odd_acc + place, width)
            numbers_to_row(
                kind, scratch.rows + size(kind) * i * width, call.d_v, call.out_dtype,
                out + (first + i) * call.out_row,
            )  # fmt: skip


@separate
def start_queries(kind, call, scratch, pair, first_row, rows):  # type: ignore[no-untyped-def]
    """Load queries, turned over."""
    span = NR * lanes(kind)
    wide = -(-depth_of(kind, call) // lanes(kind)) * lanes(kind)
    for sub in range(-(-rows // span)):
        count = min(span, rows - sub * span)
        source = call.query + load_int64(call.q_places + 8 * pair)
        source += (first_row + sub * span) * call.q_row
        fill_panel(
            kind, source, call.q_row, call.q_column, call.dtype, count, call.d_k,
            -(-count // lanes(kind)) * lanes(kind), span, scratch.rows,
            scratch.panels + size(kind) * sub * wide * span,
        )  # fmt: skip


@separate
def start_block(kind, call, scratch, pair, first_row, rows):  # type: ignore[no-untyped-def]
    """Load the queries of a task and clear what is summed."""
    span, width = NR * lanes(kind), width_of(kind, call)
    blocks = -(-rows // span)
    start_queries(kind, call, scratch, pair, first_row, rows)
    numbers(kind, scratch.row_max, blocks * span)[:] = -INF
    numbers(kind, scratch.row_sum, blocks * span)[:] = 0
    if is_plain(kind, call):
        numbers(kind, scratch.row_mass, blocks * span)[:] = 0
    numbers(kind, scratch.acc, blocks * width * span)[:] = 0


@inlined
def attend_block(kind, call, scratch, pair, first_row):  # type: ignore[no-untyped-def]
    """All keys for one task; return how many scores were computed."""
    entry, head = pair // call.num_heads, pair % call.num_heads
    key_pair = entry * (call.num_heads // call.group_size) + head // call.group_size
    span = NR * lanes(kind)
    rows = min(subs(call.len_kv) * span, load_int64(call.q_count + 8 * entry) - first_row)
    if rows <= 0:
        return 1
    start_block(kind, call, scratch, pair, first_row, rows)
    low, high = first_key(call, entry, first_row), end_key(call, entry, first_row + rows - 1)
    met = np.int64(0)
    for tile in range(low // BLOCK_KV * BLOCK_KV, high, BLOCK_KV):
        met = attend_tile(kind, call, scratch, pair, key_pair, first_row, rows, tile, met)
    for sub in range(-(-rows // span)):
        count = min(span, rows - sub * span)
        finish(kind, call, scratch, pair, sub, first_row + sub * span, count, met)
    return rows * max(1, high - low)


@inlined
def attend(kind, address, worker, budget):  # type: ignore[no-untyped-def]
    """Take blocks of queries from the shared counter until none is left."""
    call = read(address)
    scratch = place(kind, call, worker)
    step = subs(call.len_kv) * NR * lanes(kind)
    blocks = -(-call.len_q // step)
    num_pairs = call.num_entries * call.num_heads
    while budget > 0:
        task = fetch_add(call.counter, 1)
        if task >= num_pairs * blocks:
            return 0
        # Head after head, so that its keys and values stay near; the longest block first.
        row = (blocks - 1 - task % blocks) * step
        scores = attend_block(kind, call, scratch, task // blocks, row)
        budget -= scores * (call.d_k + call.d_v + 1)
    return 1


@kernel
def attend_single(call, worker, budget):  # type: ignore[no-untyped-def]
    """Forward pass in float32."""
    return attend(Single(0), call, worker, budget)


@kernel
def attend_pairs(call, worker, budget):  # type: ignore[no-untyped-def]
    """Forward pass with products of bfloat16."""
    return attend(Pairs(0), call, worker, budget)


@kernel
def attend_double(call, worker, budget):  # type: ignore[no-untyped-def]
    """Forward pass in float64."""
    return attend(Double(0), call, worker, budget)
