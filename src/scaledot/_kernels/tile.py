"""Scores of one tile, keys × queries, with every option; -inf where a key may not be seen."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types

from scaledot._kernels import simd
from scaledot._kernels.call import ask
from scaledot._kernels.jit import inlined, intrinsic, separate
from scaledot._kernels.kinds import (
    BLOCK_KV,
    has_pairs,
    lanes,
    longs_at,
    number,
    numbers,
    size,
    vectors,
)
from scaledot._kernels.matmul import make_scores
from scaledot._kernels.pack import (
    FLOAT32,
    FLOAT64,
    load_float64,
    load_int64,
    row_to_numbers,
)
from scaledot._kernels.simd import I8, I32, I64
from scaledot._kernels.softmax import soft_cap
from scaledot._kernels.target import HOST

MR, NR = HOST.mr, HOST.nr
DEPTH = 64  # products that are summed in one go: longer sums round worse than BLAS does
EMPTY, FULL, PARTIAL = 0, 1, 2
FAILED = -1  # status: a user's function raised
BLOCK_MASK = 128
NO_LIMIT = 2**20  # beyond every number inside a tile

_whole = [make_scores(n, add=False, last=True) for n in range(1, NR + 1)]
_start = [make_scores(n, add=False, last=False) for n in range(1, NR + 1)]
_more = [make_scores(n, add=True, last=False) for n in range(1, NR + 1)]
_end = [make_scores(n, add=True, last=True) for n in range(1, NR + 1)]
whole_1, whole_2, whole_3 = _whole[0], _whole[-2], _whole[-1]
start_1, start_2, start_3 = _start[0], _start[-2], _start[-1]
more_1, more_2, more_3 = _more[0], _more[-2], _more[-1]
end_1, end_2, end_3 = _end[0], _end[-2], _end[-1]


@separate
def product(kind, nr, a, lda, b, ldb, depth, c, top, scale):  # type: ignore[no-untyped-def]
    """C[MR, nr vectors] = A·B in one sum, then scale and maxima."""
    if nr == 1:
        whole_1(kind, a, lda, 1, b, ldb, depth, c, ldb, top, scale)
    elif nr == NR:
        whole_3(kind, a, lda, 1, b, ldb, depth, c, ldb, top, scale)
    else:
        whole_2(kind, a, lda, 1, b, ldb, depth, c, ldb, top, scale)


@separate
def long_product(kind, nr, a, lda, b, ldb, depth, c, top, scale, cut):  # type: ignore[no-untyped-def]
    """Like `product`; parts of ``cut`` products are summed from zero, and the parts added."""
    i = cut
    if nr == 1:
        start_1(kind, a, lda, 1, b, ldb, cut, c, ldb, 0, scale)
    elif nr == NR:
        start_3(kind, a, lda, 1, b, ldb, cut, c, ldb, 0, scale)
    else:
        start_2(kind, a, lda, 1, b, ldb, cut, c, ldb, 0, scale)
    while i + cut < depth:
        x, y = a + size(kind) * i, b + size(kind) * i * ldb
        if nr == 1:
            more_1(kind, x, lda, 1, y, ldb, cut, c, ldb, 0, scale)
        elif nr == NR:
            more_3(kind, x, lda, 1, y, ldb, cut, c, ldb, 0, scale)
        else:
            more_2(kind, x, lda, 1, y, ldb, cut, c, ldb, 0, scale)
        i += cut
    x, y = a + size(kind) * i, b + size(kind) * i * ldb
    if nr == 1:
        end_1(kind, x, lda, 1, y, ldb, depth - i, c, ldb, top, scale)
    elif nr == NR:
        end_3(kind, x, lda, 1, y, ldb, depth - i, c, ldb, top, scale)
    else:
        end_2(kind, x, lda, 1, y, ldb, depth - i, c, ldb, top, scale)


@separate
def multiply(kind, depth, factor, nr, keys, k_step, panel, first, last, scores, top):  # type: ignore[no-untyped-def]
    """scores[first:last] = keys · panel, ``last - first`` a multiple of MR (S = Q Kᵀ, line 8)."""
    span = NR * lanes(kind)
    cut = DEPTH // 2 if has_pairs(kind) else DEPTH
    scale = number(kind, factor)
    numbers(kind, top, span)[:] = -np.inf
    for j in range(first, last, MR):
        a, c = keys + size(kind) * j * k_step, scores + size(kind) * j * span
        if depth <= cut:
            product(kind, nr, a, k_step, panel, span, depth, c, top, scale)
        else:
            long_product(kind, nr, a, k_step, panel, span, depth, c, top, scale, cut)


@separate
def multiply_more(kind, depth, factor, nr, keys, k_step, panel, first, last, scores):  # type: ignore[no-untyped-def]
    """scores[first:last] = factor · (scores[first:last] + keys · panel)."""
    span, scale = NR * lanes(kind), number(kind, factor)
    for j in range(first, last, MR):
        c = scores + size(kind) * j * span
        for i in range(0, depth, DEPTH):
            some = min(DEPTH, depth - i)
            a, b = keys + size(kind) * (j * k_step + i), panel + size(kind) * i * span
            if nr == 1:
                more_1(kind, a, k_step, 1, b, span, some, c, span, 0, scale)
            elif nr == NR:
                more_3(kind, a, k_step, 1, b, span, some, c, span, 0, scale)
            else:
                more_2(kind, a, k_step, 1, b, span, some, c, span, 0, scale)
    line = numbers(kind, scores + size(kind) * first * span, (last - first) * span)
    for i in range((last - first) * span):
        line[i] *= scale


@inlined
def clip(x, low, high):  # type: ignore[no-untyped-def]
    """Bound x by low and high."""
    return min(max(x, low), high)


@inlined
def first_key(call, entry, row):  # type: ignore[no-untyped-def]
    """Index of the first key that positions and length leave to a query; never decreases."""
    p = load_int64(call.q_start + 8 * entry) - load_int64(call.kv_start + 8 * entry) + row
    return min(max(0, p - call.left), load_int64(call.kv_count + 8 * entry))


@inlined
def end_key(call, entry, row):  # type: ignore[no-untyped-def]
    """One beyond the last key that positions and length leave to a query; never decreases."""
    p = load_int64(call.q_start + 8 * entry) - load_int64(call.kv_start + 8 * entry) + row
    return max(0, min(load_int64(call.kv_count + 8 * entry), p + call.right + 1))


@intrinsic
def hide_outside(context: Any, kind: Any, column: Any, stride: Any, first: Any, last: Any,
                 low: Any, high: Any, end: Any) -> Any:  # fmt: skip
    """-inf on keys first..last (of the tile) outside of [low + lane, min(high + lane, end))."""
    v = vectors(kind)

    def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
        p, numbered = simd.pointer(b, args[1], v.scalar), v.lane_numbers(I32)
        low, high, end = (v.splat(b, b.trunc(args[i], I32)) for i in (5, 6, 7))
        low, high = b.add(low, numbered), b.add(high, numbered)
        high = b.select(b.icmp_signed("<", high, end), high, end)

        def body(i: Any, carried: list[Any]) -> list[Any]:
            j = b.add(i, args[3])
            key, place = v.splat(b, b.trunc(j, I32)), b.mul(j, args[2])
            seen = b.and_(b.icmp_signed(">=", key, low), b.icmp_signed("<", key, high))
            v.store(b, p, place, b.select(seen, v.load(b, p, place), v.const(float("-inf"))))
            return []

        simd.loop(b, b.sub(args[4], args[3]), 1, [], body)
        return cx.get_dummy_value()

    return types.void(kind, *(types.intp,) * 7), emit


@intrinsic
def hide_unseen(context: Any, kind: Any, column: Any, stride: Any, count: Any, seen: Any) -> Any:
    """-inf on the scores whose byte is 0."""
    v = vectors(kind)

    def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
        p, flags = simd.pointer(b, args[1], v.scalar), simd.pointer(b, args[4], I8)
        zeros = ir.Constant(ir.VectorType(I8, v.lanes), [0] * v.lanes)

        def body(i: Any, carried: list[Any]) -> list[Any]:
            place = b.mul(i, args[2])
            hidden = b.icmp_unsigned("==", v.load(b, flags, place, I8), zeros)
            v.store(b, p, place, b.select(hidden, v.const(float("-inf")), v.load(b, p, place)))
            return []

        simd.loop(b, args[3], 1, [], body)
        return cx.get_dummy_value()

    return types.void(kind, *(types.intp,) * 4), emit


@intrinsic
def transpose_add(context: Any, kind: Any, source: Any, source_step: Any, scores: Any,
                  step: Any) -> Any:  # fmt: skip
    """Add the transpose of a square of terms to a square of scores.

    A term of -inf excludes whatever the score is; a sum that overflows does not.
    """
    v = vectors(kind)

    def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
        p, goal = (simd.pointer(b, args[i], v.scalar) for i in (1, 3))
        low = v.const(float("-inf"))
        rows = [v.load(b, p, b.mul(args[2], I64(r))) for r in range(v.lanes)]
        for r, term in enumerate(simd.transposed(b, rows)):
            place = b.mul(args[4], I64(r))
            score = v.load(b, goal, place)
            total = b.fadd(score, term)
            fell = b.and_(b.fcmp_ordered("==", total, low), b.fcmp_unordered("!=", score, low))
            total = b.select(fell, v.const(float(np.finfo(v.dtype).min)), total)
            v.store(b, goal, place, b.select(b.fcmp_ordered("==", term, low), low, total))
        return cx.get_dummy_value()

    return types.void(kind, *(types.intp,) * 4), emit


@separate
def add_bias(kind, call, pair, row, count, key, keys, rows, scores):  # type: ignore[no-untyped-def]
    """Add the bias of ``count`` queries and ``keys`` keys, read in place and turned over."""
    span, lane = NR * lanes(kind), lanes(kind)
    base = call.bias + load_int64(call.bias_places + 8 * pair) + key * call.bias_column
    same = call.bias_dtype == (FLOAT64 if size(kind) == 8 else FLOAT32)
    same = same and call.bias_column == size(kind) and call.bias_row % size(kind) == 0
    for first in range(0, count, lane):
        whole = keys // lane * lane if same and count - first >= lane else 0
        source = base + (row + first) * call.bias_row
        for j in range(0, whole, lane):
            transpose_add(
                kind, source + size(kind) * j, call.bias_row // size(kind),
                scores + size(kind) * (j * span + first), span,
            )  # fmt: skip
        if whole == keys:
            continue
        some = 1 if call.bias_row == 0 else min(lane, count - first)
        for r in range(some):
            target = rows + size(kind) * r * BLOCK_KV
            row_to_numbers(
                kind, source + r * call.bias_row + whole * call.bias_column, call.bias_column,
                keys - whole, call.bias_dtype, target,
            )  # fmt: skip
            numbers(kind, target, BLOCK_KV)[keys - whole :] = 0
        step = 0 if call.bias_row == 0 else BLOCK_KV
        for j in range(whole, keys, lane):
            square = scores + size(kind) * (j * span + first)
            transpose_add(kind, rows + size(kind) * (j - whole), step, square, span)


@separate
def add_alibi(kind, call, pair, distance, count, keys, scores):  # type: ignore[no-untyped-def]
    """Subtract slope · |q_pos - kv_pos|; ``distance`` is that of the first query and key."""
    span = NR * lanes(kind)
    slope = number(kind, load_float64(call.slopes + 8 * (pair % call.num_heads)))
    lowest = number(kind, -1.7976931348623157e308 if size(kind) == 8 else -3.4028234663852886e38)
    for j in range(keys):
        line = numbers(kind, scores + size(kind) * j * span, span)
        for i in range(span):
            s = line[i]
            total = s - slope * abs(number(kind, float(distance + i - j)))
            line[i] = lowest if total == -np.inf and s != -np.inf else total


@separate
def add_mod(kind, call, function, pair, row, count, key, keys, scores):  # type: ignore[no-untyped-def]
    """Apply a user's function to the scores, one key and all queries at a time.

    What a bias of -inf has excluded stays so, whatever the function makes of it.
    """
    span, entry, head = NR * lanes(kind), pair // call.num_heads, pair % call.num_heads
    q_pos = load_int64(call.q_start + 8 * entry) + row
    kv_pos = load_int64(call.kv_start + 8 * entry) + key
    status = np.int64(0)
    for j in range(keys):
        place = scores + size(kind) * j * span
        line, excluded = numbers(kind, place, count), np.int64(0)
        if call.bias:
            for i in range(count):
                excluded += line[i] == -np.inf
        if excluded == 0:
            status |= invoke(function, place, entry, head, q_pos, kv_pos + j, count)
        elif excluded < count:
            for i in range(count):
                if line[i] != -np.inf:
                    one = place + size(kind) * i
                    status |= invoke(function, one, entry, head, q_pos + i, kv_pos + j, 1)
    if status != 0:
        longs_at(call.status, 1)[0] = FAILED


@intrinsic
def invoke(context: Any, function: Any, target: Any, batch: Any, head: Any, q_pos: Any,
           kv_pos: Any, count: Any) -> Any:  # fmt: skip
    """Call the native function of a user's mod at an address."""

    def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
        kind = ir.FunctionType(I64, [I64] * 6)
        return b.call(b.inttoptr(args[0], kind.as_pointer()), args[1:])

    return types.int64(*(types.int64,) * 7), emit


@separate
def add_terms(kind, call, pair, row, count, key, keys, scores, rows):  # type: ignore[no-untyped-def]
    """Softcap, bias and ALiBi on the scores of ``keys`` keys from ``key`` on."""
    span, entry = NR * lanes(kind), pair // call.num_heads
    if call.softcap > 0:
        soft_cap(kind, scores, keys * span, number(kind, call.softcap))
    if call.bias:
        add_bias(kind, call, pair, row, count, key, keys, rows, scores)
    if call.slopes:
        distance = load_int64(call.q_start + 8 * entry) + row
        distance -= load_int64(call.kv_start + 8 * entry) + key
        add_alibi(kind, call, pair, distance, count, keys, scores)


@separate
def adjust(kind, call, pair, row, count, key, keys, scores, rows):  # type: ignore[no-untyped-def]
    """`add_terms`, then score_mod."""
    add_terms(kind, call, pair, row, count, key, keys, scores, rows)
    if call.score_mod:
        add_mod(kind, call, call.score_mod, pair, row, count, key, keys, scores)


@inlined
def adjusts(call):  # type: ignore[no-untyped-def]
    """Whether any score is changed after the product."""
    return call.softcap > 0 or (call.bias | call.slopes | call.score_mod) != 0


@inlined
def hides(call):  # type: ignore[no-untyped-def]
    """Whether keys are hidden by more than positions and lengths."""
    return (call.mask | call.blocks | call.segment_q | call.classes) != 0


@inlined
def class_of_tile(call, pair, row, count, key, keys, seen, line):  # type: ignore[no-untyped-def]
    """Class of a tile; ``seen`` is filled where it is partial."""
    if not hides(call):
        return FULL
    return ask(call.classify, call.address, pair, row, count, key, keys, seen, line)
