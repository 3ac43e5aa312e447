"""Both products of a tile of tokens with few queries.

The first queries that meet a tile read it from memory, where it is ``cold``, and ask for the next
one; the others find it in the cache.
"""

from __future__ import annotations

from scaledot._kernels.jit import separate
from scaledot._kernels.kinds import BLOCK_KV, has_pairs, item, lanes, number, size
from scaledot._kernels.room import padded
from scaledot._kernels.rows import (
    MORE,
    dots_1,
    dots_4,
    mix_1_2,
    mix_1_4,
    mix_1_8,
    mix_2_2,
    mix_2_4,
    mix_2_8,
    mix_more_2,
    mix_more_4,
    more_dots_1,
    more_dots_4,
)


@separate
def score_rows(kind, call, room, rows, keys, coming, count, cold):  # type: ignore[no-untyped-def]
    """Scores of all rows for ``count`` keys, full vectors of them."""
    depth, queries = padded(kind, call.d_k), max(1, min(4, lanes(kind) // 2))
    step = depth // (1 + has_pairs(kind))  # elements of a row: those of pairs are two numbers
    scale, r = number(kind, call.scale), 0
    for j in range(0, count, lanes(kind)):
        r = 0
        while r + queries <= rows:
            q = room.q + size(kind) * r * step
            for part in range(0, lanes(kind), lanes(kind) // queries):
                k, ahead = keys + 8 * (j + part), coming + 8 * (j + part)
                goal = room.scores + size(kind) * (r * BLOCK_KV + j + part)
                factors = room.key_scales + size(kind) * (j + part)
                if cold and r == 0:
                    dots_4(kind, q, step, k, ahead, step, goal, BLOCK_KV, scale, factors)
                else:
                    more_dots_4(kind, q, step, k, ahead, step, goal, BLOCK_KV, scale, factors)
            r += queries
        while r < rows:
            q, k, ahead = room.q + size(kind) * r * step, keys + 8 * j, coming + 8 * j
            goal = room.scores + size(kind) * (r * BLOCK_KV + j)
            factors = room.key_scales + size(kind) * j
            if cold and r == 0:
                dots_1(kind, q, step, k, ahead, step, goal, BLOCK_KV, scale, factors)
            else:
                more_dots_1(kind, q, step, k, ahead, step, goal, BLOCK_KV, scale, factors)
            r += 1


@separate
def mix(kind, queries, columns, w, step, v, ahead, start, depth, acc, width, factor):  # type: ignore[no-untyped-def]
    """Values of some columns for some queries."""
    if queries == 1 and columns == 8:
        mix_1_8(kind, w, step, v, ahead, start, depth, acc, width, factor)
    elif queries == 1 and columns == 4:
        mix_1_4(kind, w, step, v, ahead, start, depth, acc, width, factor)
    elif queries == 1:
        mix_1_2(kind, w, step, v, ahead, start, depth, acc, width, factor)
    elif queries == 2 and columns == 8:
        mix_2_8(kind, w, step, v, ahead, start, depth, acc, width, factor)
    elif queries == 2 and columns == 4:
        mix_2_4(kind, w, step, v, ahead, start, depth, acc, width, factor)
    elif queries == 2:
        mix_2_2(kind, w, step, v, ahead, start, depth, acc, width, factor)
    elif columns == 4:
        mix_more_4(kind, w, step, v, ahead, start, depth, acc, width, factor)
    else:
        mix_more_2(kind, w, step, v, ahead, start, depth, acc, width, factor)


@separate
def add_values(kind, call, room, rows, v, coming, depth, cold):  # type: ignore[no-untyped-def]
    """Acc = acc · factor + weights · values over ``depth`` keys (even, for `Pairs`)."""
    width, lane, halved = padded(kind, call.d_v), lanes(kind), 1 + has_pairs(kind)
    weights = room.pairs if has_pairs(kind) else room.scores
    step, depth, r = BLOCK_KV // halved, depth // halved, 0  # in elements
    while r < rows:
        first = cold and r < 4
        queries, columns, ahead = min(2, rows - r), 8, coming if first else v
        if r + MORE <= rows and (not first or item(kind) == 1):
            queries, columns = MORE, 4
        w, factor = weights + size(kind) * r * step, room.factor + size(kind) * r
        c = 0
        while c < width:
            while c + columns * lane > width:
                columns //= 2
            acc, start = room.acc + size(kind) * (r * width + c), item(kind) * c
            mix(kind, queries, columns, w, step, v, ahead, start, depth, acc, width, factor)
            c += columns * lane
        r += queries
