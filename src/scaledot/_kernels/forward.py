"""Forward kernel: one block of queries of one head at a time, over tiles of keys.

The algorithm is FlashAttention's (arXiv 2307.08691, algorithm 1) on vector registers; README.md
maps its symbols. Scores are in natural units. The kernels pass addresses and numbers only: arrays
would be counted by reference at every call of an inner function.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from scaledot._kernels.jit import inlined, kernel, spliced
from scaledot._kernels.matmul import (
    accumulate_tiles,
    score_end,
    score_more,
    score_start,
    score_tile,
)
from scaledot._kernels.pack import (
    fetch_add,
    floats,
    load_byte,
    load_float32,
    load_int64,
    load_uint32,
    pack_keys,
    pack_values,
    row_to_float32,
    store_int64,
)
from scaledot._kernels.softmax import (
    exp2_scalar,
    lane_max,
    row_maximum,
    row_scale,
    row_weights,
    tanh_scaled,
)
from scaledot._kernels.target import HOST

MR, NR, LANES, PANEL = HOST.mr, HOST.nr, HOST.lanes, HOST.panel
BLOCK_Q, BLOCK_KV = HOST.block_q, HOST.block_kv
WIDE = NR * LANES
DEPTH = 64  # products that are summed in one go: longer sums round worse than BLAS does
LOG2E = np.float32(math.log2(math.e))
INF = np.float32(math.inf)
LOWEST = np.float32(np.finfo(np.float32).min)
accumulate_1, accumulate_2 = accumulate_tiles[0], accumulate_tiles[1]
accumulate_3, accumulate_all = accumulate_tiles[-2], accumulate_tiles[-1]


class Call(NamedTuple):
    """Everything about one call that the kernel reads: numbers, strides in bytes, and addresses.

    A *pair* is one head of one entry of the flattened leading axes. An address of 0 stands for an
    option that is not in use. Arrays at addresses are contiguous.
    """

    num_heads: int
    group_size: int
    len_q: int
    len_kv: int
    d_k: int
    d_v: int
    width: int  # d_v, rounded up to full vectors
    padded: int  # len_kv, rounded up to full panels
    dtype: int
    scale: float
    softcap: float  # 0: none
    left: int
    right: int
    q_start: int  # int64 per entry: position of the first query
    kv_start: int  # and of the first key
    kv_count: int  # and number of valid keys
    q_base: int  # int64 per pair: address of the first query
    q_row: int
    q_column: int
    k_base: int  # int64 per entry and key head
    k_row: int
    k_column: int
    v_base: int
    v_row: int
    v_column: int
    mask_base: int  # int64 per pair
    mask_row: int
    mask_column: int
    bias_base: int
    bias_row: int
    bias_column: int
    bias_dtype: int
    segment_q: int  # int64 (entries, len_q)
    segment_kv: int  # int64 (entries, len_kv)
    slopes: int  # float32 per head
    head_keys: int  # uint32 (pairs, 2): keys of the dropout hash
    threshold: int  # 0: no dropout
    kept_scale: float
    blocks: int  # bool (pairs, blocks of queries, blocks of keys)
    keys: int  # packed float32, one key pair after the other
    values: int
    odd: int  # bool (packed pairs, padded): the value holds nan or inf
    num_odd: int  # int64 per packed pair
    first_key_pair: int  # the one that the packed arrays start with
    out: int  # float32 (pairs, len_q, d_v)
    lse: int  # float32 (pairs, len_q)


class Scratch(NamedTuple):
    """Addresses of one thread's float32 arrays."""

    q: int  # (BLOCK_Q, d_k)
    scores: int  # (BLOCK_Q, BLOCK_KV), later the weights
    acc: int  # (BLOCK_Q, width)
    row_max: int
    row_sum: int
    top: int  # (BLOCK_Q, LANES): maxima from the products
    row: int  # one row of a bias or of values


@inlined
def clip(x, low, high):  # type: ignore[no-untyped-def]
    """Bound x by low and high."""
    return min(max(x, low), high)


@inlined
def mix(x):  # type: ignore[no-untyped-def]
    """`_masks._mix` on one unsigned number."""
    x = np.uint32(x ^ (x >> np.uint32(16)))
    x = np.uint32(x * np.uint32(0x7FEB352D))
    x = np.uint32(x ^ (x >> np.uint32(15)))
    x = np.uint32(x * np.uint32(0x846CA68B))
    return np.uint32(x ^ (x >> np.uint32(16)))


@inlined
def drop(call, pair, row, address, first, count):  # type: ignore[no-untyped-def]
    """Apply dropout to the weights of keys first, first + 1, ... of a row."""
    entry = pair // call.num_heads
    q_pos = np.uint32((load_int64(call.q_start + 8 * entry) + row) & 0xFFFFFFFF)
    row_a = mix(np.uint32(load_uint32(call.head_keys + 8 * pair) ^ q_pos))
    second = load_uint32(call.head_keys + 8 * pair + 4)
    row_b = mix(np.uint32(np.uint32(row_a + np.uint32(0x9E3779B9)) ^ second))
    start = np.uint32((load_int64(call.kv_start + 8 * entry) + first) & 0xFFFFFFFF)
    weights = floats(address, count)
    threshold, scale = np.uint32(call.threshold), np.float32(call.kept_scale)
    for j in range(count):
        x = np.uint32(np.uint32(start + np.uint32(j)) ^ row_a)
        x = np.uint32(x * np.uint32(0x7FEB352D))
        x = np.uint32(x ^ (x >> np.uint32(15)))
        x = np.uint32(np.uint32(x + row_b) * np.uint32(0x846CA68B))
        x = np.uint32(x ^ (x >> np.uint32(16)))
        kept = np.uint32(x >> np.uint32(8)) >= threshold
        weights[j] *= scale if kept else np.float32(0)


@inlined
def hide(address, first, last, end):  # type: ignore[no-untyped-def]
    """-inf outside of [first, last) in the first ``end`` scores of a row."""
    scores = floats(address, end)
    for j in range(first):
        scores[j] = -INF
    for j in range(last, end):
        scores[j] = -INF


@inlined
def accumulate(weights, values, width, depth, acc):  # type: ignore[no-untyped-def]
    """acc[MR, width] += weights[MR, depth] · values[depth, width], by columns of registers."""
    for c in range(0, width, WIDE):
        v, a, left = values + 4 * c, acc + 4 * c, (width - c) // LANES
        if left >= NR:
            accumulate_all(weights, BLOCK_KV, v, width, depth, a, width, 0)
        elif left == 1:
            accumulate_1(weights, BLOCK_KV, v, width, depth, a, width, 0)
        elif left == 2:
            accumulate_2(weights, BLOCK_KV, v, width, depth, a, width, 0)
        else:
            accumulate_3(weights, BLOCK_KV, v, width, depth, a, width, 0)


@inlined
def products(q, keys, depth, scores, top):  # type: ignore[no-untyped-def]
    """scores[MR, PANEL] = q[MR, depth] · keys[depth, PANEL]; top is raised to their maxima.

    Long sums are cut: a part is summed from zero, and the parts are added.
    """
    if depth <= DEPTH:
        score_tile(q, depth, keys, PANEL, depth, scores, BLOCK_KV, top)
        return
    score_start(q, depth, keys, PANEL, DEPTH, scores, BLOCK_KV, 0)
    i = DEPTH
    while i + DEPTH < depth:
        score_more(q + 4 * i, depth, keys + 4 * i * PANEL, PANEL, DEPTH, scores, BLOCK_KV, 0)
        i += DEPTH
    score_end(q + 4 * i, depth, keys + 4 * i * PANEL, PANEL, depth - i, scores, BLOCK_KV, top)


@inlined
def key_range(call, entry, row):  # type: ignore[no-untyped-def]
    """Half-open range of keys that positions and length leave to one query.

    Both ends never decrease from one row to the next.
    """
    p = load_int64(call.q_start + 8 * entry) - load_int64(call.kv_start + 8 * entry) + row
    count = load_int64(call.kv_count + 8 * entry)
    low = min(max(0, p - call.left), count)
    return low, max(low, min(count, p + call.right + 1))


@inlined
def add_terms(call, scratch, pair, row, scores, low, high):  # type: ignore[no-untyped-def]
    """Bias and ALiBi. Only -inf excludes: a sum of finite terms stops at the lowest number."""
    entry, count = pair // call.num_heads, high - low
    bias = floats(scratch.row, count)
    if call.bias_base:
        source = load_int64(call.bias_base + 8 * pair) + row * call.bias_row
        source += low * call.bias_column
        row_to_float32(source, call.bias_column, count, call.bias_dtype, scratch.row)
    else:
        bias[:] = 0
    slope, distance = np.float32(0), np.int64(0)
    if call.slopes:
        slope = load_float32(call.slopes + 4 * (pair % call.num_heads))
        distance = load_int64(call.q_start + 8 * entry) + row
        distance -= load_int64(call.kv_start + 8 * entry) + low
    for j in range(count):
        s = scores[j] + bias[j]
        if call.slopes:
            s -= slope * np.float32(abs(distance - j))
        fell = s == -INF and scores[j] != -INF and bias[j] != -INF
        scores[j] = -INF if bias[j] == -INF else (LOWEST if fell else s)


@inlined
def adjust_row(call, scratch, pair, row, address, low, high):  # type: ignore[no-untyped-def]
    """Bias, ALiBi, mask, segments and block mask on the scores of keys low..high of a row."""
    entry, count = pair // call.num_heads, high - low
    scores = floats(address, count)
    if call.bias_base or call.slopes:
        add_terms(call, scratch, pair, row, scores, low, high)
    if call.mask_base:
        source = load_int64(call.mask_base + 8 * pair) + row * call.mask_row
        source += low * call.mask_column
        for j in range(count):
            seen = load_byte(source + j * call.mask_column)
            scores[j] = scores[j] if seen else -INF
    if call.segment_q:
        mine = load_int64(call.segment_q + 8 * (entry * call.len_q + row))
        source = call.segment_kv + 8 * (entry * call.len_kv + low)
        for j in range(count):
            seen = (load_int64(source + 8 * j) == mine) & (mine >= 0)
            scores[j] = scores[j] if seen else -INF
    if call.blocks:
        for j in range(count):
            seen = load_byte(block_address(call, pair, row // 128, (low + j) // 128))
            scores[j] = scores[j] if seen else -INF


@inlined
def block_address(call, pair, i, j):  # type: ignore[no-untyped-def]
    """Address of one entry of the block mask."""
    rows, columns = -(-call.len_q // 128), -(-call.len_kv // 128)
    return call.blocks + (pair * rows + i) * columns + j


@inlined
def tile_is_hidden(call, pair, first_row, last_row, low, high):  # type: ignore[no-untyped-def]
    """Whether the mask or the block mask leaves nothing of a tile."""
    if call.blocks:
        seen = np.uint8(0)
        for i in range(first_row // 128, (last_row - 1) // 128 + 1):
            for j in range(low // 128, (high - 1) // 128 + 1):
                seen |= load_byte(block_address(call, pair, i, j))
        if not seen:
            return True
    if call.mask_base:
        rows = last_row - first_row if call.mask_row else 1
        columns = high - low if call.mask_column else 1
        base = load_int64(call.mask_base + 8 * pair) + low * call.mask_column
        for i in range(rows):
            source = base + (first_row + i) * call.mask_row
            seen = np.uint8(0)
            for j in range(columns):
                seen |= load_byte(source + j * call.mask_column)
            if seen:
                return False
        return True
    return False


@inlined
def rescale_row(call, scratch, r, x):  # type: ignore[no-untyped-def]
    """Raise the running maximum of row r to x (algorithm 1, lines 9 and 10)."""
    row_max, row_sum = floats(scratch.row_max, BLOCK_Q), floats(scratch.row_sum, BLOCK_Q)
    before = row_max[r]
    if x > before:
        row_max[r] = x
        below = (before - x) * LOG2E
        if below < np.float32(-126):
            # Everything before rounds to 0, but an infinite value that was seen stays.
            row_sum[r] *= np.float32(0)
            acc = floats(scratch.acc + 4 * r * call.width, call.width)
            for c in range(call.width):
                if np.isfinite(acc[c]):
                    acc[c] = np.float32(0)
        else:
            a = exp2_scalar(below)
            row_sum[r] *= a
            row_scale(scratch.acc + 4 * r * call.width, call.width, a)


@inlined
def add_odd_values(call, scratch, key_pair, r, address, low, high):  # type: ignore[no-untyped-def]
    """Bring the nan and infinite values among keys low..high to row r, where it sees them."""
    marks = call.odd + (key_pair - call.first_key_pair) * call.padded
    scores = floats(address, high - low)
    acc, value = floats(scratch.acc + 4 * r * call.width, call.d_v), floats(scratch.row, call.d_v)
    for j in range(low, high):
        if load_byte(marks + j) and scores[j - low] != -INF:
            source = load_int64(call.v_base + 8 * key_pair) + j * call.v_row
            row_to_float32(source, call.v_column, call.d_v, call.dtype, scratch.row)
            for c in range(call.d_v):
                if not np.isfinite(value[c]):
                    acc[c] += value[c]


@spliced
def softmax_row(call, scratch, pair, key_pair, r, row, tile, begin, end, adjust):  # type: ignore[no-untyped-def]
    """Scores of row r at keys begin..end (whole panels) to weights."""
    address = scratch.scores + 4 * (r * BLOCK_KV + begin - tile)
    low, high = key_range(call, pair // call.num_heads, row)
    low, high = clip(low, begin, end), clip(high, begin, end)
    if call.softcap > 0:
        tanh_scaled(address, end - begin, np.float32(call.softcap))
    if adjust and high > low:
        adjust_row(call, scratch, pair, row, address + 4 * (low - begin), low, high)
    if adjust or low > begin or high < end:
        hide(address, low - begin, high - begin, end - begin)
        x = row_maximum(address, end - begin)
    else:
        x = lane_max(scratch.top + 4 * LANES * r)
    rescale_row(call, scratch, r, x)
    if load_int64(call.num_odd + 8 * (key_pair - call.first_key_pair)):
        add_odd_values(call, scratch, key_pair, r, address + 4 * (low - begin), low, high)
    m = load_float32(scratch.row_max + 4 * r)
    m = np.float32(0) if m == -INF else m
    floats(scratch.row_sum, BLOCK_Q)[r] += row_weights(address, end - begin, m)
    if call.threshold:
        drop(call, pair, row, address, begin, end - begin)


@spliced
def attend_tile(call, scratch, pair, key_pair, first_row, rows, low, high, tile, adjust):  # type: ignore[no-untyped-def]
    """One tile: keys low..high (within BLOCK_KV of key ``tile``) for a block of queries."""
    entry, packed = pair // call.num_heads, key_pair - call.first_key_pair
    depth = max(1, call.d_k)
    keys = call.keys + 4 * packed * call.padded * depth
    values = call.values + 4 * packed * call.padded * call.width
    floats(scratch.top, BLOCK_Q * LANES)[:] = -INF
    begin, end = low // PANEL * PANEL, -(-high // PANEL) * PANEL
    for panel in range(begin, end, PANEL):  # line 8: S = Q Kᵀ
        for r in range(0, rows, MR):
            last = min(r + MR, rows) - 1
            left = key_range(call, entry, first_row + r)[0]
            right = key_range(call, entry, first_row + last)[1]
            if left < panel + PANEL and right > panel:
                products(
                    scratch.q + 4 * r * depth, keys + 4 * panel * depth, depth,
                    scratch.scores + 4 * (r * BLOCK_KV + panel - tile), scratch.top + 4 * r * LANES,
                )
    for r in range(0, rows, MR):
        last = min(r + MR, rows) - 1
        left = key_range(call, entry, first_row + r)[0] // PANEL * PANEL
        right = -(-key_range(call, entry, first_row + last)[1] // PANEL) * PANEL
        left, right = max(left, begin), min(right, end)
        if left >= right:
            continue
        # Rows that pad the last group hold products of zeros: finite, and never written out.
        for i in range(r, last + 1):
            softmax_row(
                call, scratch, pair, key_pair, i, first_row + i, tile, left, right, adjust
            )
        accumulate(  # line 10: O += P V
            scratch.scores + 4 * (r * BLOCK_KV + left - tile), values + 4 * left * call.width,
            call.width, right - left, scratch.acc + 4 * r * call.width,
        )


@inlined
def finish_row(call, scratch, pair, r, row):  # type: ignore[no-untyped-def]
    """Write O / ℓ and m + log ℓ (algorithm 1, lines 12 and 13)."""
    total, top = load_float32(scratch.row_sum + 4 * r), load_float32(scratch.row_max + 4 * r)
    place = pair * call.len_q + row
    out = floats(call.out + 4 * place * call.d_v, call.d_v)
    acc = floats(scratch.acc + 4 * r * call.width, call.d_v)
    lse = floats(call.lse + 4 * place, 1)
    if total == 0:
        out[:] = 0
        lse[0] = -INF
        return
    inverse = np.float32(1) / total
    for c in range(call.d_v):
        out[c] = acc[c] * inverse
    lse[0] = top + np.float32(math.log(total))


@spliced
def attend_block(call, scratch, pair, first_row):  # type: ignore[no-untyped-def]
    """All keys for one block of queries of one head, then its output and log-sum-exp."""
    entry, head = pair // call.num_heads, pair % call.num_heads
    key_pair = entry * (call.num_heads // call.group_size) + head // call.group_size
    rows, depth = min(BLOCK_Q, call.len_q - first_row), max(1, call.d_k)
    q = floats(scratch.q, BLOCK_Q * depth)
    if rows < BLOCK_Q or call.d_k == 0:
        q[:] = 0
    for r in range(rows):
        source = load_int64(call.q_base + 8 * pair) + (first_row + r) * call.q_row
        row_to_float32(source, call.q_column, call.d_k, call.dtype, scratch.q + 4 * r * depth)
    scale = np.float32(call.scale)
    for i in range(rows * depth):
        q[i] *= scale
    floats(scratch.row_max, BLOCK_Q)[:] = -INF
    floats(scratch.row_sum, BLOCK_Q)[:] = 0
    floats(scratch.acc, BLOCK_Q * call.width)[:] = 0
    adjust = (
        call.bias_base | call.slopes | call.mask_base | call.segment_q | call.blocks
    ) != 0 or call.softcap > 0
    low = key_range(call, entry, first_row)[0]
    high = key_range(call, entry, first_row + rows - 1)[1]
    for tile in range(low // BLOCK_KV * BLOCK_KV, high, BLOCK_KV):
        start, stop = max(tile, low), min(tile + BLOCK_KV, high)
        if not tile_is_hidden(call, pair, first_row, first_row + rows, start, stop):
            attend_tile(call, scratch, pair, key_pair, first_row, rows, start, stop, tile, adjust)
    for r in range(rows):
        finish_row(call, scratch, pair, r, first_row + r)


@kernel
def attend(call, first_pair, num_pairs, counter):  # type: ignore[no-untyped-def]
    """Take blocks of queries from the shared counter until none is left; causal: longest first."""
    sizes = (
        BLOCK_Q * max(1, call.d_k), BLOCK_Q * BLOCK_KV, BLOCK_Q * call.width, BLOCK_Q, BLOCK_Q,
        BLOCK_Q * LANES, max(BLOCK_KV, call.d_v),
    )  # fmt: skip
    memory = np.empty(sum(sizes) + 16 * len(sizes), np.float32)
    # Each array on a cache line of its own.
    q = -(-memory.ctypes.data // 64) * 64
    scores = q + -(-sizes[0] // 16) * 64
    acc = scores + -(-sizes[1] // 16) * 64
    row_max = acc + -(-sizes[2] // 16) * 64
    row_sum = row_max + -(-sizes[3] // 16) * 64
    top = row_sum + -(-sizes[4] // 16) * 64
    scratch = Scratch(q, scores, acc, row_max, row_sum, top, top + -(-sizes[5] // 16) * 64)
    num_blocks = -(-call.len_q // BLOCK_Q)
    while True:
        task = fetch_add(counter, 1)
        if task >= num_pairs * num_blocks:
            break
        block = num_blocks - 1 - task // num_pairs
        attend_block(call, scratch, first_pair + task % num_pairs, block * BLOCK_Q)
    return memory[0]  # keeps the scratch arrays alive until here


@kernel
def pack(call, num_key_pairs, counter):  # type: ignore[no-untyped-def]
    """Pack keys and values of key heads from the shared counter until none is left."""
    row = np.empty(LANES * max(1, call.d_k), np.float32)
    while True:
        task = fetch_add(counter, 1)
        if task >= num_key_pairs:
            return row[0]
        pair, place = call.first_key_pair + task, 4 * task * call.padded
        pack_keys(
            load_int64(call.k_base + 8 * pair), call.k_row, call.k_column, call.dtype,
            call.len_kv, call.d_k, row.ctypes.data, call.keys + place * max(1, call.d_k),
        )
        marked = pack_values(
            load_int64(call.v_base + 8 * pair), call.v_row, call.v_column, call.dtype,
            call.len_kv, call.padded, call.d_v, call.width, call.values + place * call.width,
            call.odd + task * call.padded,
        )
        store_int64(call.num_odd + 8 * task, marked)
