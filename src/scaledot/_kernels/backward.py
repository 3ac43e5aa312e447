"""Backward kernel: a range of keys of one key head at a time, over all queries that see them.

The algorithm is FlashAttention's (arXiv 2307.08691, algorithm 2). A task owns its rows of dK and
dV. To dQ many tasks add, each to a block of queries when those before it have: the sum has one
order, whatever the number of threads. Tasks are handed out in that order, and one that waits waits
for tasks that are being worked on. All go through the blocks from the last one down, where causal
ranges meet, and so they wait for one block at the start and hardly again.

Packed sequences are calls of their own: ``members`` of the record are the records of
``num_groups`` of them, and ``member_starts`` their first tasks and the number of all. So each gets
what it gets alone. In their records ``num_groups`` says that dQ, dK and dV have the axes (tokens,
heads, width), as the sequences do.
"""

from __future__ import annotations

import numpy as np

from scaledot._kernels import atomics
from scaledot._kernels.bias import add_lines, add_square
from scaledot._kernels.call import CALL, read
from scaledot._kernels.forward import accumulate, accumulate_1, accumulate_2, accumulate_3
from scaledot._kernels.gradient import (
    gradient_tile,
    load_block,
    load_range,
    panel_depth,
    room_at,
    tile_range,
    wide_of,
)
from scaledot._kernels.jit import inlined, kernel, separate
from scaledot._kernels.kinds import (
    BLOCK_KV,
    SUBS,
    Double,
    Pairs,
    Single,
    has_pairs,
    lanes,
    number,
    numbers,
    size,
)
from scaledot._kernels.layout import LINE, MR, NR, up
from scaledot._kernels.pack import (
    FLOAT32,
    fetch_add,
    fill_panel,
    load_byte,
    load_int64,
    numbers_to_row,
    row_to_numbers,
    transpose,
)
from scaledot._kernels.rows import column_product
from scaledot._kernels.tile import DEPTH, EMPTY, end_key, first_key

RECORD = CALL.itemsize


def delta_bytes(lane: int, number: int, d_v: int) -> int:
    """Bytes of a worker that computes deltas: two panels, sums, and rows to be turned over."""
    span, depth = NR * lane, -(-max(1, d_v) // lane) * lane
    return number * (2 * depth * span + span + lane * depth) + 2 * LINE


@separate
def add_outer(kind, weights, rows, d_wide, first, last, count, total, ones):  # type: ignore[no-untyped-def]
    """total[first:last] += weights · rows over ``count`` queries (dV += Pᵀ dO, dK += dSᵀ Q)."""
    span, lane, half = NR * lanes(kind), lanes(kind), 1 + has_pairs(kind)
    lda, depth = span // half, -(-count // half)
    left, done = d_wide // lane, np.int64(0)
    while left > 0:
        # Never a last step of one vector where two of two will do.
        n = NR if left >= NR and left != NR + 1 else (NR - 1 if left >= NR - 1 else 1)
        for j in range(first, last, MR):
            a = weights + size(kind) * j * lda
            b = rows + size(kind) * done * lane
            c = total + size(kind) * (j * d_wide + done * lane)
            if n == NR:
                accumulate_3(kind, a, lda, 1, b, d_wide, depth, c, d_wide, ones)
            elif n == 1:
                accumulate_1(kind, a, lda, 1, b, d_wide, depth, c, d_wide, ones)
            else:
                accumulate_2(kind, a, lda, 1, b, d_wide, depth, c, d_wide, ones)
        done += n
        left -= n


@separate
def add_odd_grads(kind, call, room, pair, sub, row, first, last, count, total):  # type: ignore[no-untyped-def]
    """Bring nan and infinities of dO to the values that their rows see."""
    span, wide = NR * lanes(kind), wide_of(kind, call.d_v)
    given = numbers(kind, room.rows, call.d_v)
    source = call.grad_out + load_int64(call.grad_places + 8 * pair)
    for i in range(count):
        if not load_byte(room.odd + sub * span + i):
            continue
        row_to_numbers(
            kind, source + (row + i) * call.grad_row, call.grad_column, call.d_v, call.grad_dtype,
            room.rows,
        )  # fmt: skip
        for j in range(first, last):
            weight = numbers(kind, room.scores + size(kind) * j * span, span)[i]
            if weight != 0:
                line = numbers(kind, total + size(kind) * j * wide, call.d_v)
                for c in range(call.d_v):
                    if not np.isfinite(given[c]):
                        line[c] += weight * given[c]


@separate
def add_bias_grads(kind, call, room, pair, row, count, tile, first, last):  # type: ignore[no-untyped-def]
    """Add the gradients of a tile to those of the bias of this head, which nobody else adds to."""
    ranges = -(-call.len_kv // call.key_range)
    place = pair
    if call.bias_columns == 1:
        place = pair * ranges + tile // call.key_range
    total = call.bias_sums + size(kind) * place * call.bias_rows * call.bias_columns
    if call.bias_rows > 1 and call.bias_columns > 1:
        add_square(kind, call, room, total, row, count, tile, first, last)
    else:
        add_lines(kind, call, room, total, row, count, tile, first, last)


@separate
def pull_tile(kind, call, room, pair, sub, row, count, tile, low, high, seen, start, clean, odd):  # type: ignore[no-untyped-def]
    """Add what one tile gives to dQ, dK and dV (algorithm 2, lines 12 to 16)."""
    span, nr = NR * lanes(kind), -(-count // lanes(kind))
    k_wide, v_wide = wide_of(kind, call.d_k), wide_of(kind, call.d_v)
    first, last = gradient_tile(
        kind, call, room, pair, sub, row, count, tile, low, high, seen, start, odd
    )
    below, half = size(kind) * (tile - start), 1 + has_pairs(kind)
    weights = room.weights_16 if has_pairs(kind) else room.scores
    products = room.grads_16 if has_pairs(kind) else room.products
    if call.bias_sums:
        add_bias_grads(kind, call, room, pair, row, count, tile, first, last)
    if call.dv:
        total = room.dv + below * v_wide
        rows = room.grads + size(kind) * (sub * span // half) * v_wide
        add_outer(kind, weights, rows, v_wide, first, last, count, total, room.ones)
        if odd:
            add_odd_grads(kind, call, room, pair, sub, row, first, last, count, total)
    if call.dk:
        rows = room.queries + size(kind) * (sub * span // half) * k_wide
        total = room.dk + below * k_wide
        add_outer(kind, products, rows, k_wide, first, last, count, total, room.ones)
    if call.dq:
        products = room.grad_pairs if has_pairs(kind) else room.products
        accumulate(
            kind, call.d_k, nr, products, clean + below // half * k_wide, k_wide, first, last,
            room.dq + size(kind) * sub * k_wide * span, room.ones,
        )  # fmt: skip


@separate
def add_dq(kind, call, room, pair, block, count, share):  # type: ignore[no-untyped-def]
    """Add a block's share to dQ, turned over and scaled, when ``share`` others have been added."""
    progress = call.progress + 8 * (pair * -(-call.len_q // (SUBS * NR * lanes(kind))) + block)
    first_row = block * SUBS * NR * lanes(kind)
    atomics.wait_for(progress, share)
    span, lane, k_wide = NR * lanes(kind), lanes(kind), wide_of(kind, call.d_k)
    scale = number(kind, call.scale)
    for first in range(0, count, lane):
        sub, inside = first // span, first % span
        source = room.dq + size(kind) * (sub * k_wide * span + inside)
        for c in range(0, k_wide, lane):
            transpose(
                kind, source + size(kind) * c * span, span, room.rows + size(kind) * c, k_wide
            )
        for i in range(min(lane, count - first)):
            given = numbers(kind, room.rows + size(kind) * i * k_wide, call.d_k)
            row = first_row + first + i
            place = pair * call.len_q + row
            if call.num_groups:
                place = row * call.num_heads + pair
            total = numbers(kind, call.dq + size(kind) * place * call.d_k, call.d_k)
            for c in range(call.d_k):
                total[c] += scale * given[c]
    atomics.store(progress, share + 1)


@separate
def pull_block(kind, call, room, pair, block, start, end, clean):  # type: ignore[no-untyped-def]
    """All that one block of queries gives to a range of keys, and the range to its dQ."""
    span = NR * lanes(kind)
    entry, row = pair // call.num_heads, block * SUBS * span
    count = min(SUBS * span, load_int64(call.q_count + 8 * entry) - row)
    if count <= 0:
        return 0
    low, high = first_key(call, entry, row), end_key(call, entry, row + count - 1)
    if high <= start or low >= end or low >= high:
        return 0
    odd = load_block(kind, call, room, pair, row, count)
    subs, k_wide = -(-count // span), wide_of(kind, call.d_k)
    numbers(kind, room.dq, subs * k_wide * span)[:] = 0
    for tile in range(max(start, low // BLOCK_KV * BLOCK_KV), min(end, high), BLOCK_KV):
        for sub in range(subs):
            some = min(span, count - sub * span)
            first, last, seen = tile_range(kind, call, room, pair, row + sub * span, some, tile)
            if first < last and seen != EMPTY:
                pull_tile(
                    kind, call, room, pair, sub, row + sub * span, some, tile, first, last, seen,
                    start, clean, odd,
                )  # fmt: skip
    if call.dq:
        share = start // call.key_range - low // call.key_range
        add_dq(kind, call, room, pair, block, count, share)
    return count * (min(end, high) - max(start, low))


@inlined
def item_of(kind, call):  # type: ignore[no-untyped-def]
    """Bytes of a number of the dtype of results."""
    return 8 if size(kind) == 8 else (4 if call.out_dtype == FLOAT32 else 2)


@separate
def store_range(kind, call, room, key_pair, start, count):  # type: ignore[no-untyped-def]
    """Write the rows of dK and dV of a range."""
    item, place, step = item_of(kind, call), key_pair * call.len_kv + start, np.int64(1)
    if call.num_groups:
        step = call.num_heads // call.group_size
        place = start * step + key_pair
    place, step = item * place, item * step
    if call.dk:
        store_rows(
            kind, room.dk, wide_of(kind, call.d_k), call.d_k, call.scale, call.out_dtype,
            call.dk + place * call.d_k, step * call.d_k, count,
        )  # fmt: skip
    if call.dv:
        store_rows(
            kind, room.dv, wide_of(kind, call.d_v), call.d_v, 1.0, call.out_dtype,
            call.dv + place * call.d_v, step * call.d_v, count,
        )  # fmt: skip


@separate
def store_rows(kind, source, wide, d, scale, code, target, step, count):  # type: ignore[no-untyped-def]
    """Write rows, scaled, in the dtype of the result."""
    factor = number(kind, scale)
    for j in range(count):
        row = source + size(kind) * j * wide
        line = numbers(kind, row, d)
        for c in range(d):
            line[c] *= factor
        numbers_to_row(kind, row, d, code, target + j * step)


@inlined
def pull_range(kind, address, task, memory):  # type: ignore[no-untyped-def]
    """Do one task of a call: a range of keys. Return its scores."""
    call = read(address)
    room = room_at(kind, call, memory)
    kv_heads = call.num_heads // call.group_size
    key_pairs = call.num_entries * kv_heads
    blocks = -(-call.len_q // (SUBS * NR * lanes(kind)))
    k_wide, v_wide = wide_of(kind, call.d_k), wide_of(kind, call.d_v)
    numbers(kind, room.ones, NR * lanes(kind))[:] = 1
    # Range after range, so that neighbours in time add to the dQ of different heads.
    key_pair, start = task % key_pairs, task // key_pairs * call.key_range
    count, scores = min(call.key_range, call.len_kv - start), np.int64(0)
    clean = load_range(kind, call, room, key_pair, start, count)
    rows = -(-count // MR) * MR
    numbers(kind, room.dk, rows * k_wide)[:] = 0
    numbers(kind, room.dv, rows * v_wide)[:] = 0
    head = key_pair % kv_heads * call.group_size
    for g in range(call.group_size):
        pair = key_pair // kv_heads * call.num_heads + head + g
        for block in range(blocks - 1, -1, -1):
            scores += pull_block(kind, call, room, pair, block, start, start + count, clean)
    store_range(kind, call, room, key_pair, start, count)
    return scores


@separate
def member_of(call, task):  # type: ignore[no-untyped-def]
    """Number of the sequence that a task belongs to: the last one that starts at it or before."""
    low, high = np.int64(0), call.num_groups
    while high - low > 1:
        middle = (low + high) // 2
        if load_int64(call.member_starts + 8 * middle) <= task:
            low = middle
        else:
            high = middle
    return low


@inlined
def find_task(call, address, tasks, task):  # type: ignore[no-untyped-def]
    """Record that a task belongs to, and its number there; no record where none is left.

    ``tasks`` are those of a call that is no call of packed sequences.
    """
    if call.num_groups == 0:
        return (address if task < tasks else np.int64(0)), task
    if task >= load_int64(call.member_starts + 8 * call.num_groups):
        return np.int64(0), task
    member = member_of(call, task)
    first = load_int64(call.member_starts + 8 * member)
    return call.members + RECORD * member, task - first


@inlined
def pull(kind, address, worker, budget):  # type: ignore[no-untyped-def]
    """Take ranges of keys from the shared counter until none is left."""
    call = read(address)
    memory, tasks = up(call.scratch + worker * call.scratch_bytes), np.int64(0)
    if call.num_groups == 0:
        ranges = -(-call.len_kv // call.key_range)
        tasks = call.num_entries * (call.num_heads // call.group_size) * ranges
    while budget > 0:
        here, task = find_task(call, address, tasks, fetch_add(call.counter, 1))
        if here == 0:
            return 0
        scores = pull_range(kind, here, task, memory)
        budget -= (scores + 1) * 5 * (call.d_k + call.d_v + 1) // 2
    return 1


@separate
def block_deltas(kind, call, pair, row, count, memory):  # type: ignore[no-untyped-def]
    """Delta of up to `span` rows.

    Where a row sees one key, delta and the product of dO and that key's value are equal to the
    bit, and so its dS is 0.
    """
    span, lane = NR * lanes(kind), lanes(kind)
    panel = size(kind) * panel_depth(kind, call.d_v) * span
    total, rows, other = memory + 2 * panel, memory + 2 * panel + size(kind) * span, memory + panel
    item, columns = item_of(kind, call), -(-count // lane) * lane
    grad = call.grad_out + load_int64(call.grad_places + 8 * pair) + row * call.grad_row
    out = call.out + load_int64(call.out_places + 8 * pair) + row * call.out_row
    fill_panel(
        kind, grad, call.grad_row, call.grad_column, call.grad_dtype, count, call.d_v, columns,
        span, rows, memory,
    )  # fmt: skip
    fill_panel(
        kind, out, call.out_row, item, call.out_dtype, count, call.d_v, columns, span, rows, other
    )
    for c in range(0, columns, lane):
        place = size(kind) * c
        for i in range(0, max(1, call.d_v), DEPTH):
            below = size(kind) * i * span + place
            column_product(
                kind, memory + below, other + below, span, min(DEPTH, max(1, call.d_v) - i),
                total + place, i,
            )  # fmt: skip
    delta = numbers(kind, call.delta + size(kind) * (pair * call.len_q + row), count)
    given = numbers(kind, total, count)
    for i in range(count):
        delta[i] = given[i] - delta[i]


@inlined
def rows_of_task(kind, address, task, memory):  # type: ignore[no-untyped-def]
    """Deltas of one block of queries of a call."""
    call, span = read(address), NR * lanes(kind)
    blocks = -(-call.len_q // (SUBS * span))
    pair, first = task // blocks, task % blocks * SUBS * span
    held = load_int64(call.q_count + 8 * (pair // call.num_heads))
    for row in range(first, min(first + SUBS * span, held), span):
        block_deltas(kind, call, pair, row, min(span, held - row, first + SUBS * span - row),
                     memory)  # fmt: skip


@inlined
def row_deltas(kind, address, worker, budget):  # type: ignore[no-untyped-def]
    """Delta = rowsum(dO∘O) - dlse of every row (algorithm 2, line 4), from the shared counter.

    ``delta`` holds the gradient of lse, which is taken off.
    """
    call = read(address)
    memory = up(call.scratch + worker * call.scratch_bytes)
    rows = SUBS * NR * lanes(kind)
    tasks = call.num_entries * call.num_heads * -(-call.len_q // rows)
    while budget > 0:
        here, task = find_task(call, address, tasks, fetch_add(call.counter, 1))
        if here == 0:
            return 0
        rows_of_task(kind, here, task, memory)
        budget -= rows * call.d_v
    return 1


@kernel
def pull_single(call, worker, budget):  # type: ignore[no-untyped-def]
    """Backward pass in float32."""
    return pull(Single(0), call, worker, budget)


@kernel
def pull_pairs(call, worker, budget):  # type: ignore[no-untyped-def]
    """Backward pass with products of bfloat16."""
    return pull(Pairs(0), call, worker, budget)


@kernel
def pull_double(call, worker, budget):  # type: ignore[no-untyped-def]
    """Backward pass in float64."""
    return pull(Double(0), call, worker, budget)


@kernel
def deltas_single(call, worker, budget):  # type: ignore[no-untyped-def]
    """`row_deltas` in float32."""
    return row_deltas(Single(0), call, worker, budget)


@kernel
def deltas_double(call, worker, budget):  # type: ignore[no-untyped-def]
    """`row_deltas` in float64."""
    return row_deltas(Double(0), call, worker, budget)
