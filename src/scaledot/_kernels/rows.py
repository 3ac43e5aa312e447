"""Inner loops with lanes along a row: few queries that read keys and values as they lie in memory.

Here the lanes of a vector are features (products) or keys (softmax). Loads widen the numbers of
the arrays to those that are computed with.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types

from scaledot._kernels import simd
from scaledot._kernels.codes import as_pairs, load_codes
from scaledot._kernels.jit import intrinsic
from scaledot._kernels.kinds import is_code_pairs, is_codes, is_pairs, vectors, widen
from scaledot._kernels.simd import I8, I16, I32, I64, LOG2E, Vectors, add_pairs, rounded
from scaledot._kernels.target import HOST

INT = types.intp
LINE = 64  # bytes that memory gives at a time
MORE = 4 if HOST.name == "avx512" else 2  # queries that share values in cache, sums in registers


def _folded(b: Any, v: Vectors, sums: list[Any]) -> Any:
    """Vector whose lane k is the sum of the lanes of vector k.

    Two vectors at a time become one; first within the parts of 16 bytes that most instructions
    keep to, then across them.
    """
    n, part, taken, block = len(sums), 16 // v.size, 1, len(sums)
    while len(sums) > 1:
        if taken < part:
            far = part // 2
            starts = [k for s in range(0, n, part) for k in range(s, s + far, taken)]
            order = [x + k + i for k in starts for x in (0, n) for i in range(taken)]
            taken *= 2
        else:
            far = block // 2
            order = [x + k for x in (0, n) for s in range(0, n, block) for k in range(s, s + far)]
            block = far
        both = [ir.Constant(ir.VectorType(I32, n), [k + d for k in order]) for d in (0, far)]
        sums = [
            b.fadd(*(b.shuffle_vector(x, y, order) for order in both))
            for x, y in zip(sums[::2], sums[1::2], strict=True)
        ]
    return sums[0]


def _fetch(b: Any, line: Any, place: Any) -> None:
    """Ask for the memory at an element of a row.

    It comes to the second-level cache. Which tokens follow is known to us only: to the processor,
    pages and heads look like jumps.
    """
    byte = ir.IntType(8)
    kind = ir.FunctionType(ir.VoidType(), [byte.as_pointer(), I32, I32, I32])
    name = "llvm.prefetch.p0i8"
    fetch = b.module.globals.get(name) or ir.Function(b.module, kind, name)
    to_read, second_level, data = I32(0), I32(2), I32(1)
    element = b.bitcast(b.gep(line, [place]), byte.as_pointer())
    b.call(fetch, [element, to_read, second_level, data])


def _fetch_rows(b: Any, lines: list[Any], place: Any, size: int) -> None:
    """Ask for the memory at an element of rows, where a line of memory begins with it."""
    starts = b.icmp_unsigned("==", b.and_(place, I64(LINE // size - 1)), I64(0))
    with b.if_then(starts, likely=True):
        for line in lines:
            _fetch(b, line, place)


def size_of(raw: Any) -> int:
    """Bytes of a number in an array."""
    return {simd.F32: 4, simd.F64: 8}.get(raw) or raw.width // 8


def _lines(b: Any, rows: Any, numbers: list[Any], raw: Any, start: Any) -> list[Any]:
    """Pointers ``start`` bytes into some rows, from the list of addresses at ``rows``."""
    p = simd.pointer(b, rows, I64)
    return [simd.pointer(b, b.add(b.load(b.gep(p, [j])), start), raw) for j in numbers]


def make_dots(most: int, *, first: bool) -> Any:
    """Build ``dots(kind, q, q_step, k, ahead, depth, scores, step, scale, factors)``.

    Scores of ``most`` queries, or of half the lanes, and lanes / queries keys, whose addresses are
    at ``k``: the products of rows of ``depth`` elements, a multiple of the lanes. Each sum is over
    lanes of partial sums, the same for every number of queries, and is scaled at the end; for
    codes, also by the ``factors`` of the keys.

    The ``first`` queries that meet keys read each row to its end, as memory is fetched best, and
    ask for the keys to come, whose addresses are at ``ahead``; others find keys in the cache.
    Numbers of fewer bytes take time to widen: there keys are read side by side, too.
    """

    @intrinsic
    def dots(context: Any, kind: Any, q: Any, q_step: Any, k: Any, ahead: Any, depth: Any,
             scores: Any, step: Any, scale: Any, factors: Any) -> Any:  # fmt: skip
        v, pairs = vectors(kind), is_pairs(kind)
        queries = min(most, max(1, v.lanes // 2))
        keys = v.lanes // queries

        def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
            element = I32 if pairs else v.scalar
            p = simd.pointer(b, args[1], element)
            raw, _ = widen(kind)
            rows = [b.gep(p, [b.mul(args[2], I64(r))]) for r in range(queries)]
            numbers = [I64(j) for j in range(keys)]
            lines, coming = (_lines(b, args[i], numbers, raw, I64(0)) for i in (3, 4))
            bytes_each = size_of(raw)
            is_long = v.lanes * bytes_each >= LINE

            def sums_of(some: range) -> list[Any]:
                def body(i: Any, sums: list[Any]) -> list[Any]:
                    here = slice(some.start, some.stop)
                    if first:
                        _fetch_rows(b, coming[here], i, bytes_each)
                    ys = _key_vectors(b, kind, lines[here], i)
                    xs, new = [v.load(b, x, i, element) for x in rows], list[Any]()
                    for y in ys:
                        new += [
                            _added(b, kind, x, y, sums[len(new) + r]) for r, x in enumerate(xs)
                        ]
                    return new

                zeros = [v.const(0.0)] * (len(some) * queries)
                return simd.loop(b, args[5], v.lanes, zeros, body)

            together = 1 if first and is_long else keys
            found = [x for j in range(0, keys, together) for x in sums_of(range(j, j + together))]
            sums = [found[j * queries + r] for r in range(queries) for j in range(keys)]
            total = _folded(b, v, sums)
            total = b.fmul(total, v.splat(b, args[8]))
            if is_codes(kind):
                total = b.fmul(total, _repeated(b, v, args[9], keys))
            goal = simd.pointer(b, args[6], v.scalar)
            for r in range(queries):
                order = ir.Constant(ir.VectorType(I32, keys), [r * keys + j for j in range(keys)])
                part = b.shuffle_vector(total, total, order)
                v.store(b, goal, b.mul(args[7], I64(r)), part)
            return cx.get_dummy_value()

        return types.void(kind, *(INT,) * 7, v.number, INT), emit

    return dots


def _key_vectors(b: Any, kind: Any, lines: list[Any], i: Any) -> list[Any]:
    """Vectors of several keys from element i on."""
    v, (raw, read) = vectors(kind), widen(kind)
    if is_code_pairs(kind):
        return _coded_rows(b, v, lines, i)
    return [read(b, v, v.load(b, line, i, raw)) for line in lines]


def _added(b: Any, kind: Any, x: Any, y: Any, total: Any) -> Any:
    """Total and the products of two vectors, of numbers or of pairs."""
    v = vectors(kind)
    return add_pairs(b, v, x, y, total) if is_pairs(kind) else v.fma(b, x, y, total)


def _repeated(b: Any, v: Vectors, address: Any, count: int) -> Any:
    """Vector that repeats the ``count`` numbers at an address."""
    p = simd.pointer(b, address, v.scalar)
    few = b.load(b.bitcast(p, ir.VectorType(v.scalar, count).as_pointer()))
    few.align = 1
    order = ir.Constant(ir.VectorType(I32, v.lanes), [j % count for j in range(v.lanes)])
    return b.shuffle_vector(few, few, order)


def make_mix(queries: int, columns: int) -> Any:
    """Build ``mix(kind, weights, step, values, ahead, start, depth, acc, acc_step, factor)``.

    acc[queries, columns vectors] = acc · factor[query] + weights · values, over ``depth`` keys,
    whose addresses are at ``values``; columns lie ``start`` bytes behind them. Keys to come,
    whose addresses are at ``ahead``, are asked for;
    for `Pairs` two keys are taken at once and columns is even.
    """

    @intrinsic
    def mix(context: Any, kind: Any, weights: Any, step: Any, values: Any, ahead: Any, start: Any,
            depth: Any, acc: Any, acc_step: Any, factor: Any) -> Any:  # fmt: skip
        v, pairs = vectors(kind), is_pairs(kind)

        def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
            raw, read = widen(kind)
            if pairs:
                raw = I8 if is_code_pairs(kind) else I16
            bytes_each = size_of(raw)
            element = I32 if pairs else v.scalar
            p, goal = simd.pointer(b, args[1], element), simd.pointer(b, args[7], v.scalar)
            factors = simd.pointer(b, args[9], v.scalar)
            rows = [b.gep(p, [b.mul(args[2], I64(r))]) for r in range(queries)]

            def body(i: Any, sums: list[Any]) -> list[Any]:
                keys = [b.add(b.mul(i, I64(2)), I64(k)) for k in range(2)] if pairs else [i]
                lines, coming = (_lines(b, args[k], keys, raw, args[5]) for k in (3, 4))
                for x in coming:
                    for c in range(0, columns * v.lanes * bytes_each, LINE):
                        _fetch(b, x, I64(c // bytes_each))
                if is_code_pairs(kind):
                    ys = _coded_columns(b, v, lines, columns)
                elif pairs:
                    ys = _paired_rows(b, v, lines, columns)
                else:
                    ys = [read(b, v, v.load(b, lines[0], I64(v.lanes * c), raw))
                          for c in range(columns)]  # fmt: skip
                new = []
                for r, row in enumerate(rows):
                    x = v.splat(b, b.load(b.gep(row, [i])))
                    for c, y in enumerate(ys):
                        total = sums[r * columns + c]
                        new.append(_added(b, kind, x, y, total))
                return new

            nothing = [v.const(0.0)] * (queries * columns)
            sums = simd.loop(b, args[6], 1, nothing, body)
            for r in range(queries):
                row = b.gep(goal, [b.mul(args[8], I64(r))])
                a = v.splat(b, b.load(b.gep(factors, [I64(r)])))
                for c in range(columns):
                    place = I64(v.lanes * c)
                    total = v.fma(b, v.load(b, row, place), a, sums[r * columns + c])
                    v.store(b, row, place, total)
            return cx.get_dummy_value()

        return types.void(kind, *(INT,) * 9), emit

    return mix


def _coded_rows(b: Any, v: Vectors, lines: list[Any], i: Any) -> list[Any]:
    """Pairs of an even number of rows of codes, each from pair i on."""
    n, found = 2 * v.lanes, []
    place = b.mul(i, I64(2))  # in bytes
    for j in range(0, len(lines), 2):
        both = [b.bitcast(line, I8.as_pointer()) for line in lines[j : j + 2]]
        x, y = (load_codes(b, line, place, n) for line in both)
        found += as_pairs(b, v, x, y, list(range(2 * n)))
    return found


def _coded_columns(b: Any, v: Vectors, lines: list[Any], columns: int) -> list[Any]:
    """Vectors of pairs of the values of two keys, from their codes."""
    n, found = 2 * v.lanes, []
    order = [k for c in range(n) for k in (c, n + c)]
    for c in range(0, columns * v.lanes, n):
        x, y = (load_codes(b, line, I64(c), n) for line in lines)
        found += as_pairs(b, v, x, y, order)
    return found


def _paired_rows(b: Any, v: Vectors, lines: list[Any], columns: int) -> list[Any]:
    """Vectors of pairs of the values of two keys."""
    n, found = v.lanes, []
    wide = ir.VectorType(I16, 2 * n)
    for c in range(0, columns, 2):
        both = []
        for line in lines:
            place = b.gep(line, [I64(n * c)])
            x = b.load(b.bitcast(place, wide.as_pointer()))
            x.align = 1
            both.append(x)
        for half in range(2):
            order = [half * n + k // 2 + 2 * n * (k % 2) for k in range(2 * n)]
            mixed = b.shuffle_vector(*both, ir.Constant(ir.VectorType(I32, 2 * n), order))
            found.append(b.bitcast(mixed, ir.VectorType(I32, n)))
    return found


dots_1, dots_4 = make_dots(1, first=True), make_dots(4, first=True)
more_dots_1, more_dots_4 = make_dots(1, first=False), make_dots(4, first=False)
mix_1_8, mix_1_4, mix_1_2 = (make_mix(1, n) for n in (8, 4, 2))
mix_2_8, mix_2_4, mix_2_2 = (make_mix(2, n) for n in (8, 4, 2))
mix_more_4, mix_more_2 = (make_mix(MORE, n) for n in (4, 2))


@intrinsic
def row_max(context: Any, kind: Any, scores: Any, count: Any) -> Any:
    """Largest of ``count`` scores (a multiple of the lanes), nan passed over."""
    v = vectors(kind)

    def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
        p = simd.pointer(b, args[1], v.scalar)

        def body(i: Any, tops: list[Any]) -> list[Any]:
            return [v.maximum(b, v.load(b, p, i), tops[0])]

        tops = simd.loop(b, args[2], v.lanes, [v.const(float("-inf"))], body)
        return v.max_lanes(b, tops[0])

    return v.number(kind, INT, INT), emit


@intrinsic
def row_weigh(context: Any, kind: Any, scores: Any, count: Any, top: Any) -> Any:
    """Turn ``count`` scores into weights ``exp(score - top)`` in place; return their sum.

    Those that are excluded become -0, which no weight is, also where ``top`` is nan.
    """
    v = vectors(kind)

    def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
        p, m = simd.pointer(b, args[1], v.scalar), v.splat(b, args[3])

        def body(i: Any, sums: list[Any]) -> list[Any]:
            score = v.load(b, p, i)
            w = v.exp2(b, b.fmul(b.fsub(score, m), v.const(LOG2E)))
            hidden = b.fcmp_ordered("==", score, v.const(float("-inf")))
            w = b.select(hidden, v.const(-0.0), w)
            v.store(b, p, i, w)
            return [b.fadd(sums[0], w)]

        sums = simd.loop(b, args[2], v.lanes, [v.const(0.0)], body)
        return v.sum_lanes(b, sums[0])

    return v.number(kind, INT, INT, v.number), emit


@intrinsic
def row_weights(context: Any, kind: Any, scores: Any, count: Any, top: Any, factors: Any,
                pairs: Any) -> Any:  # fmt: skip
    """`row_weigh`, then what weighs values: times the keys' ``factors``, rounded to ``pairs``.

    Factors are those of codes; they are not applied to what is excluded, where they may be nan.
    """
    v = vectors(kind)

    def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
        p, m = simd.pointer(b, args[1], v.scalar), v.splat(b, args[3])
        factors, goal = simd.pointer(b, args[4], v.scalar), simd.pointer(b, args[5], I16)

        def body(i: Any, sums: list[Any]) -> list[Any]:
            both = []
            for k in range(2):
                place = b.add(i, I64(k * v.lanes))
                score = v.load(b, p, place)
                w = v.exp2(b, b.fmul(b.fsub(score, m), v.const(LOG2E)))
                hidden = b.fcmp_ordered("==", score, v.const(float("-inf")))
                w = b.select(hidden, v.const(-0.0), w)
                sums = [b.fadd(sums[0], w)]
                if is_codes(kind):
                    w = b.select(hidden, w, b.fmul(w, v.load(b, factors, place)))
                v.store(b, p, place, w)
                both.append(w)
            if is_pairs(kind):
                v.store(b, goal, i, rounded(b, v, *both))
            return sums

        sums = simd.loop(b, args[2], 2 * v.lanes, [v.const(0.0)], body)
        return v.sum_lanes(b, sums[0])

    return v.number(kind, INT, INT, v.number, INT, INT), emit


@intrinsic
def row_pairs(context: Any, kind: Any, weights: Any, count: Any, pairs: Any) -> Any:
    """Round ``count`` weights (a multiple of twice the lanes) to bfloat16; else do nothing."""
    v = vectors(kind)

    def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
        p, goal = simd.pointer(b, args[1], v.scalar), simd.pointer(b, args[3], I16)

        def body(i: Any, carried: list[Any]) -> list[Any]:
            x, y = v.load(b, p, i), v.load(b, p, b.add(i, I64(v.lanes)))
            v.store(b, goal, i, rounded(b, v, x, y))
            return []

        if is_pairs(kind):
            simd.loop(b, args[2], 2 * v.lanes, [], body)
        return cx.get_dummy_value()

    return types.void(kind, INT, INT, INT), emit


@intrinsic
def row_normalize(context: Any, kind: Any, row: Any, count: Any, factor: Any) -> Any:
    """Multiply ``count`` weights (a multiple of the lanes) in place.

    Subnormal ones become 0, and so do those that are excluded, whatever the factor is.
    """
    v = vectors(kind)

    def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
        p, s = simd.pointer(b, args[1], v.scalar), v.splat(b, args[3])
        smallest = v.const(float(np.finfo(v.dtype).smallest_normal))
        sign = -(1 << (8 * v.size - 1))  # bits of -0

        def body(i: Any, carried: list[Any]) -> list[Any]:
            w = v.load(b, p, i)
            hidden = b.icmp_unsigned("==", b.bitcast(w, v.integers), v.iconst(sign))
            x = b.fmul(w, s)
            x = b.select(b.fcmp_ordered("<", x, smallest), v.const(0.0), x)
            v.store(b, p, i, b.select(hidden, v.const(0.0), x))
            return []

        simd.loop(b, args[2], v.lanes, [], body)
        return cx.get_dummy_value()

    return types.void(kind, INT, INT, v.number), emit


@intrinsic
def row_scale(context: Any, kind: Any, row: Any, count: Any, factor: Any) -> Any:
    """Multiply ``count`` numbers (a multiple of the lanes) in place."""
    v = vectors(kind)

    def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
        p, s = simd.pointer(b, args[1], v.scalar), v.splat(b, args[3])

        def body(i: Any, carried: list[Any]) -> list[Any]:
            v.store(b, p, i, b.fmul(v.load(b, p, i), s))
            return []

        simd.loop(b, args[2], v.lanes, [], body)
        return cx.get_dummy_value()

    return types.void(kind, INT, INT, v.number), emit


@intrinsic
def column_product(context: Any, kind: Any, x: Any, y: Any, step: Any, depth: Any, total: Any,
                   add: Any) -> Any:  # fmt: skip
    """Inner products of columns of two panels, ``depth`` numbers in one sum; a vector of them.

    They are put into ``total``, or added to it: summed in the order of the micro-kernel, so that
    equal products come out equal to the bit.
    """
    v = vectors(kind)

    def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
        p, q, goal = (simd.pointer(b, args[i], v.scalar) for i in (1, 2, 5))

        def body(i: Any, sums: list[Any]) -> list[Any]:
            place = b.mul(i, args[3])
            return [v.fma(b, v.load(b, p, place), v.load(b, q, place), sums[0])]

        found = simd.loop(b, args[4], 1, [v.const(0.0)], body)[0]
        more = b.fadd(v.load(b, goal, I64(0)), found)
        is_more = b.icmp_signed("!=", args[6], I64(0))
        v.store(b, goal, I64(0), b.select(is_more, more, found))
        return cx.get_dummy_value()

    return types.void(kind, *(types.intp,) * 6), emit
