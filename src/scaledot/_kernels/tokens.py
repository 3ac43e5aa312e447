"""Where the keys and values of tokens lie: in rows one after the other, or in pages of memory."""

from __future__ import annotations

import numpy as np

from scaledot._kernels.jit import inlined, separate
from scaledot._kernels.kinds import (
    BLOCK_KV,
    bytes_at,
    floats_at,
    halves_at,
    highest_bits,
    item,
    longs_at,
    numbers,
    size,
    words_at,
)
from scaledot._kernels.pack import FLOAT32, FLOAT64, load_float32, load_int64, row_to_numbers


@inlined
def token_place(call, entry, token, page_step, row_step):  # type: ignore[no-untyped-def]
    """Bytes from the first token of an entry, or from the first page, to another token."""
    if call.page_table == 0:
        return token * row_step
    place = call.page_table + 8 * (entry * call.pages_of_entry + token // call.page_size)
    return load_int64(place) * page_step + token % call.page_size * row_step


@separate
def run_of_tokens(call, entry, token, count, page_step, row_step):  # type: ignore[no-untyped-def]
    """Place of a token, bytes to the next, and how many of ``count`` tokens lie so.

    An even number of them where there are more: some kernels take keys in pairs.
    """
    place, some = token_place(call, entry, token, page_step, row_step), count
    if call.page_table:
        left = call.page_size - token % call.page_size
        if left < count and left > 1:
            some = left // 2 * 2
        elif left < count:
            row_step = token_place(call, entry, token + 1, page_step, row_step) - place
            some = 2
    return place, row_step, some


@separate
def find_tokens(call, entry, base, page_step, row_step, tile, count, nothing, rows):  # type: ignore[no-untyped-def]
    """Addresses of ``count`` tokens from ``tile`` on; those of ``nothing`` for more."""
    goal, j, some = longs_at(rows, BLOCK_KV), 0, count
    page = slot = np.int64(0)
    if call.page_table:
        page, slot = np.int64(tile // call.page_size), np.int64(tile % call.page_size)
        table = call.page_table + 8 * entry * call.pages_of_entry
    while j < count:
        place = base + (tile + j) * row_step
        if call.page_table:
            some = min(call.page_size - slot, count - j)
            place = base + load_int64(table + 8 * page) * page_step + slot * row_step
            page, slot = page + 1, np.int64(0)
        for i in range(some):
            goal[j + i] = place + i * row_step
        j += some
    goal[max(count, 0) :] = nothing


@inlined
def read_in_place(kind):  # type: ignore[no-untyped-def]
    """Code of the dtype of arrays that are read in place, of 4 or 8 bytes."""
    return FLOAT64 if size(kind) == 8 else FLOAT32


@separate
def copy_rows(kind, rows, stride, end, d, step, target):  # type: ignore[no-untyped-def]
    """Rows (end, d) as they lie to ``target`` (end, step), padded with zeros."""
    for j in range(end):
        source, place = load_int64(rows + 8 * j), target + item(kind) * j * step
        if item(kind) == 1:
            line = bytes_at(place, step)
            for i in range(d):
                line[i] = bytes_at(source + i * stride, 1)[0]
            line[d:] = 0
        elif item(kind) == 2:
            row = halves_at(place, step)
            if stride == 2:
                given = halves_at(source, d)
                for i in range(d):
                    row[i] = given[i]
            else:
                for i in range(d):
                    row[i] = halves_at(source + i * stride, 1)[0]
            row[d:] = 0
        else:
            row_to_numbers(kind, source, stride, d, read_in_place(kind), place)
            numbers(kind, place, step)[d:] = 0


@inlined
def point_at(start, step, end, rows):  # type: ignore[no-untyped-def]
    """Addresses of ``end`` rows that lie one after the other."""
    goal = longs_at(rows, end)
    for j in range(end):
        goal[j] = start + j * step


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
def gather_scales(kind, source, step, count, scales):  # type: ignore[no-untyped-def]
    """Factors of the ``count`` tokens of a tile of eight-bit codes; 1 for more."""
    line = numbers(kind, scales, BLOCK_KV)
    if step == 4:
        given = floats_at(source, count)
        for j in range(count):
            line[j] = given[j]
    else:
        for j in range(count):
            line[j] = load_float32(source + j * step)
    line[count:] = 1
