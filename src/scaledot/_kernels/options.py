"""Options as native functions of their own, called through addresses in the record of a call.

A call that needs none of them does not wait for their compilation, and those that need them share
one copy, whichever kernel they run by. All come for float32 and float64 scores.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from scaledot._kernels.call import read
from scaledot._kernels.jit import inlined, kernel
from scaledot._kernels.kinds import (
    BLOCK_KV,
    Double,
    Single,
    doubles_at,
    lanes,
    number,
    numbers,
    size,
    words_at,
)
from scaledot._kernels.layout import up
from scaledot._kernels.pack import fetch_add, load_int64, load_uint32
from scaledot._kernels.softmax import soft_cap_bend, soft_cap_slope
from scaledot._kernels.target import HOST
from scaledot._kernels.tile import add_mod, add_terms, adjust
from scaledot._kernels.visible import classify, classify_mod

NR = HOST.nr


def functions(known: dict[str, Any], *, double: bool) -> dict[str, int]:
    """Addresses of the functions that a call needs, by what its record holds."""

    def uses(*names: str) -> bool:
        return any(known.get(name) for name in names)

    wanted = {
        "adjust": uses("softcap", "bias_places", "slopes", "score_mod"),
        "classify": uses("mask_places", "blocks", "segment_q", "classes"),
        "drop": uses("threshold"),
        "chain": known.get("key_range") and uses("softcap", "score_slope", "slope_sums"),
        "move": uses("moves") and uses("softcap", "score_slope", "tangent_call"),
        "bend": uses("moves") and uses("softcap"),
    }
    return {name: (DOUBLES if double else SINGLES)[name].address for name in wanted if wanted[name]}


@inlined
def mix(x):  # type: ignore[no-untyped-def]
    """`_masks._mix` on one unsigned number."""
    x = np.uint32(x ^ (x >> np.uint32(16)))
    x = np.uint32(x * np.uint32(0x7FEB352D))
    x = np.uint32(x ^ (x >> np.uint32(15)))
    x = np.uint32(x * np.uint32(0x846CA68B))
    return np.uint32(x ^ (x >> np.uint32(16)))


@inlined
def keeps(kv_pos, row_a, row_b, threshold):  # type: ignore[no-untyped-def]
    """`_masks.dropout_keeps` on one unsigned number."""
    x = np.uint32(np.uint32(kv_pos ^ row_a) * np.uint32(0x7FEB352D))
    x = np.uint32(x ^ (x >> np.uint32(15)))
    x = np.uint32(np.uint32(x + row_b) * np.uint32(0x846CA68B))
    x = np.uint32(x ^ (x >> np.uint32(16)))
    return np.uint32(x >> np.uint32(8)) >= threshold


@inlined
def low_word(x):  # type: ignore[no-untyped-def]
    """Low 32 bits of a position."""
    return np.uint32(x & 0xFFFFFFFF)


@inlined
def drop(kind, address, pair, row, key, keys, row_keys, weights):  # type: ignore[no-untyped-def]
    """Apply dropout to weights: a tile of keys × queries, or one row where there are no row_keys.

    ``row_keys`` is room for the two keys of each query of a tile.
    """
    call = read(address)
    entry = pair // call.num_heads
    first = load_uint32(call.head_keys + 8 * pair)
    second = load_uint32(call.head_keys + 8 * pair + 4)
    q_pos = load_int64(call.q_start + 8 * entry) + row
    kv_pos = load_int64(call.kv_start + 8 * entry) + key
    threshold, scale = np.uint32(call.threshold), number(kind, call.kept_scale)
    if row_keys == 0:
        a = mix(np.uint32(first ^ low_word(q_pos)))
        b = mix(np.uint32(np.uint32(a + np.uint32(0x9E3779B9)) ^ second))
        line, start = numbers(kind, weights, keys), low_word(kv_pos)
        for j in range(keys):
            kept = keeps(np.uint32(start + np.uint32(j)), a, b, threshold)
            line[j] = line[j] * scale if kept else line[j] * 0
        return
    span = NR * lanes(kind)
    row_a, row_b = words_at(row_keys, span), words_at(row_keys + 4 * span, span)
    for i in range(span):
        row_a[i] = mix(np.uint32(first ^ low_word(q_pos + i)))
        row_b[i] = mix(np.uint32(np.uint32(row_a[i] + np.uint32(0x9E3779B9)) ^ second))
    for j in range(keys):
        line, mine = numbers(kind, weights + size(kind) * j * span, span), low_word(kv_pos + j)
        for i in range(span):
            kept = keeps(mine, row_a[i], row_b[i], threshold)
            line[i] = line[i] * scale if kept else line[i] * 0


@inlined
def chain(kind, address, pair, row, count, key, keys, raw, rows):  # type: ignore[no-untyped-def]
    """From gradients of scores to those of the scaled products ``raw`` (they lie one tile behind).

    On the way those of slopes are summed. Where the terms of scores are what is asked for,
    ``bias_sums``, the gradients stay those by the terms. The tile before ``raw`` is room.
    """
    call = read(address)
    span, tile = NR * lanes(kind), tile_bytes(kind)
    given, count_all = raw + tile, keys * span
    grads = numbers(kind, given, count_all)
    if call.score_slope:
        work, scores = numbers(kind, raw - tile, count_all), numbers(kind, raw, count_all)
        work[:] = scores
        add_terms(kind, call, pair, row, count, key, keys, raw - tile, rows)
        add_mod(kind, call, call.score_slope, pair, row, count, key, keys, raw - tile)
        for i in range(count_all):
            # Where nothing is seen, the derivative may be nan.
            grads[i] = grads[i] * work[i] if grads[i] != 0 else grads[i]
    if call.slope_sums:
        add_slope(kind, call, pair, row, count, key, keys, given)
    if call.softcap > 0 and call.bias_sums == 0:
        soft_cap_slope(kind, given, raw, count_all, number(kind, call.softcap))


@inlined
def move(kind, address, pair, row, count, key, keys, raw, rows):  # type: ignore[no-untyped-def]
    """From tangents of the scaled products to those of the scores; both lie as in `chain`."""
    call = read(address)
    span, tile = NR * lanes(kind), tile_bytes(kind)
    moved, count_all = raw + tile, keys * span
    if call.softcap > 0:
        soft_cap_slope(kind, moved, raw, count_all, number(kind, call.softcap))
    if call.tangent_call:
        add_terms(kind, read(call.tangent_call), pair, row, count, key, keys, moved, rows)
    if call.score_slope:
        work, scores = numbers(kind, raw - tile, count_all), numbers(kind, raw, count_all)
        given = numbers(kind, moved, count_all)
        work[:] = scores
        add_terms(kind, call, pair, row, count, key, keys, raw - tile, rows)
        add_mod(kind, call, call.score_slope, pair, row, count, key, keys, raw - tile)
        for i in range(count_all):
            given[i] *= work[i]


@inlined
def bend(kind, address, grads, first, moved, raw, count):  # type: ignore[no-untyped-def]
    """`soft_cap_bend` with the cap of a call."""
    soft_cap_bend(kind, grads, first, moved, raw, count, number(kind, read(address).softcap))


@inlined
def tile_bytes(kind):  # type: ignore[no-untyped-def]
    """Bytes from one tile of `gradient.Room` to the next."""
    return up(size(kind) * (BLOCK_KV + lanes(kind)) * NR * lanes(kind))


@inlined
def add_slope(kind, call, pair, row, count, key, keys, grads):  # type: ignore[no-untyped-def]
    """Add ``-Σ dS·|q_pos - kv_pos|`` of a tile to the sum of its head and range of keys."""
    span, entry = NR * lanes(kind), pair // call.num_heads
    distance = load_int64(call.q_start + 8 * entry) + row
    distance -= load_int64(call.kv_start + 8 * entry) + key
    total = 0.0
    for j in range(keys):
        line = numbers(kind, grads + size(kind) * j * span, span)
        for i in range(count):
            total += line[i] * float(abs(distance + i - j))
    ranges = -(-call.len_kv // call.key_range)
    place = call.slope_sums + 8 * (pair * ranges + key // call.key_range)
    doubles_at(place, 1)[0] -= total


@inlined
def class_tiles(kind, address, worker, budget):  # type: ignore[no-untyped-def]
    """Class the tiles of a mask_mod, numbers from the shared counter."""
    call = read(address)
    memory = call.scratch + worker * call.scratch_bytes
    while budget > 0:
        task = fetch_add(call.counter, 1)
        if task >= call.num_classes:
            return 0
        classify_mod(kind, call, memory, memory + 8 * NR * lanes(kind), task)
        budget -= BLOCK_KV * NR * lanes(kind) * 8
    return 1


@kernel
def class_single(call, worker, budget):  # type: ignore[no-untyped-def]
    """Classes of tiles as float32 has them."""
    return class_tiles(Single(0), call, worker, budget)


@kernel
def class_double(call, worker, budget):  # type: ignore[no-untyped-def]
    """Classes of tiles as float64 has them."""
    return class_tiles(Double(0), call, worker, budget)


@kernel
def adjust_single(address, pair, row, count, key, keys, scores, rows):  # type: ignore[no-untyped-def]
    """`tile.adjust` on float32."""
    adjust(Single(0), read(address), pair, row, count, key, keys, scores, rows)
    return 0


@kernel
def adjust_double(address, pair, row, count, key, keys, scores, rows):  # type: ignore[no-untyped-def]
    """`tile.adjust` on float64."""
    adjust(Double(0), read(address), pair, row, count, key, keys, scores, rows)
    return 0


@kernel
def classify_single(address, pair, row, count, key, keys, target, line):  # type: ignore[no-untyped-def]
    """`visible.classify` for tiles of float32."""
    return classify(Single(0), read(address), pair, row, count, key, keys, target, line)


@kernel
def classify_double(address, pair, row, count, key, keys, target, line):  # type: ignore[no-untyped-def]
    """`visible.classify` for tiles of float64."""
    return classify(Double(0), read(address), pair, row, count, key, keys, target, line)


@kernel
def drop_single(address, pair, row, key, keys, row_keys, weights, unused):  # type: ignore[no-untyped-def]
    """Dropout on float32."""
    drop(Single(0), address, pair, row, key, keys, row_keys, weights)
    return 0


@kernel
def drop_double(address, pair, row, key, keys, row_keys, weights, unused):  # type: ignore[no-untyped-def]
    """Dropout on float64."""
    drop(Double(0), address, pair, row, key, keys, row_keys, weights)
    return 0


@kernel
def chain_single(address, pair, row, count, key, keys, raw, rows):  # type: ignore[no-untyped-def]
    """`chain` on float32."""
    chain(Single(0), address, pair, row, count, key, keys, raw, rows)
    return 0


@kernel
def chain_double(address, pair, row, count, key, keys, raw, rows):  # type: ignore[no-untyped-def]
    """`chain` on float64."""
    chain(Double(0), address, pair, row, count, key, keys, raw, rows)
    return 0


@kernel
def move_single(address, pair, row, count, key, keys, raw, rows):  # type: ignore[no-untyped-def]
    """`move` on float32."""
    move(Single(0), address, pair, row, count, key, keys, raw, rows)
    return 0


@kernel
def move_double(address, pair, row, count, key, keys, raw, rows):  # type: ignore[no-untyped-def]
    """`move` on float64."""
    move(Double(0), address, pair, row, count, key, keys, raw, rows)
    return 0


@kernel
def bend_single(address, grads, first, moved, raw, count, unused, spare):  # type: ignore[no-untyped-def]
    """`bend` on float32."""
    bend(Single(0), address, grads, first, moved, raw, count)
    return 0


@kernel
def bend_double(address, grads, first, moved, raw, count, unused, spare):  # type: ignore[no-untyped-def]
    """`bend` on float64."""
    bend(Double(0), address, grads, first, moved, raw, count)
    return 0


SINGLES = {"adjust": adjust_single, "classify": classify_single, "drop": drop_single,
           "chain": chain_single, "move": move_single, "bend": bend_single}
DOUBLES = {"adjust": adjust_double, "classify": classify_double, "drop": drop_double,
           "chain": chain_double, "move": move_double, "bend": bend_double}
