"""Operands as the micro-kernels read them: contiguous, padded with zeros, in the kind's numbers.

Sources are given by address and strides in bytes, so that any view can be read in place.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types

from scaledot._kernels import simd
from scaledot._kernels.jit import inlined, intrinsic, separate
from scaledot._kernels.kinds import (
    bytes_at,
    doubles_at,
    floats_at,
    halves_at,
    has_pairs,
    is_pairs,
    lanes,
    longs_at,
    numbers,
    read_half,
    size,
    vectors,
    words_at,
)
from scaledot._kernels.simd import I8, I64

FLOAT32, FLOAT16, BFLOAT16, FLOAT64 = 0, 1, 2, 3
DTYPES = {"float32": FLOAT32, "float16": FLOAT16, "bfloat16": BFLOAT16, "float64": FLOAT64}
HIGHEST = float(np.finfo(np.float32).max)


@intrinsic
def fetch_add(context: Any, counter: Any, amount: Any) -> Any:
    """Add to the number at an address; return what it was. The shared task counter."""

    def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
        place = b.inttoptr(args[0], ir.IntType(64).as_pointer())
        return b.atomic_rmw("add", place, args[1], "monotonic")

    return types.int64(types.int64, types.int64), emit


def _loader(kind: ir.Type, result: Any, widen: Any) -> Any:
    @intrinsic
    def load(context: Any, address: Any) -> Any:
        def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
            x = b.load(b.inttoptr(args[0], kind.as_pointer()))
            x.align = 1
            return widen(b, x)

        return result(types.int64), emit

    return load


def _from_bfloat16(b: Any, x: Any) -> Any:
    wide = b.shl(b.zext(x, ir.IntType(32)), ir.IntType(32)(16))
    return b.bitcast(wide, ir.FloatType())


def _from_float16(b: Any, x: Any) -> Any:
    """By integers: processors without the instruction would call a function that is not there."""
    i32, f32 = ir.IntType(32), ir.FloatType()
    wide = b.zext(x, i32)
    sign = b.shl(b.and_(wide, i32(0x8000)), i32(16))
    magnitude = b.shl(b.and_(wide, i32(0x7FFF)), i32(13))
    # The exponent's bias differs by 112; the product is exact, for subnormal numbers too.
    normal = b.bitcast(b.fmul(b.bitcast(magnitude, f32), f32(2.0**112)), i32)
    special = b.icmp_unsigned(">=", magnitude, i32(0x7C00 << 13))
    bits = b.select(special, b.or_(magnitude, i32(0x7F800000)), normal)
    return b.bitcast(b.or_(bits, sign), f32)


load_float32 = _loader(ir.FloatType(), types.float32, lambda b, x: x)
load_float64 = _loader(ir.DoubleType(), types.float64, lambda b, x: x)
load_float16 = _loader(ir.IntType(16), types.float32, _from_float16)
load_bfloat16 = _loader(ir.IntType(16), types.float32, _from_bfloat16)
load_half = _loader(ir.IntType(16), types.uint16, lambda b, x: x)
load_int64 = _loader(ir.IntType(64), types.int64, lambda b, x: x)
load_uint32 = _loader(ir.IntType(32), types.uint32, lambda b, x: x)
load_byte = _loader(ir.IntType(8), types.uint8, lambda b, x: x)


@intrinsic
def widen_halves(context: Any, kind: Any, source: Any, count: Any, target: Any) -> Any:
    """Numbers of float16 without gaps to float32; returns how many: whole vectors only."""
    v = vectors(kind)

    def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
        if v.double:
            return I64(0)
        p, goal = simd.pointer(b, args[1], simd.I16), simd.pointer(b, args[3], v.scalar)
        whole = b.and_(args[2], I64(-v.lanes))

        def body(i: Any, carried: list[Any]) -> list[Any]:
            v.store(b, goal, i, read_half(b, v, v.load(b, p, i, simd.I16)))
            return []

        with b.if_then(b.icmp_signed(">", whole, I64(0))):
            simd.loop(b, whole, v.lanes, [], body)
        return whole

    return types.intp(kind, *(types.intp,) * 3), emit


@separate
def row_to_numbers(kind, source, stride, count, code, target):  # type: ignore[no-untyped-def]
    """Write a row of any dtype to ``target`` in the kind's numbers.

    Rows without gaps take loops over arrays, which LLVM turns into vector code.
    """
    row = numbers(kind, target, count)
    if code == FLOAT32 and stride == 4:
        given = floats_at(source, count)
        for i in range(count):
            row[i] = given[i]
    elif code == FLOAT32:
        for i in range(count):
            row[i] = load_float32(source + i * stride)
    elif code == BFLOAT16 and stride == 2:
        for i in range(count):
            row[i] = load_bfloat16(source + 2 * i)
    elif code == BFLOAT16:
        for i in range(count):
            row[i] = load_bfloat16(source + i * stride)
    elif code == FLOAT16 and stride == 2:
        for i in range(widen_halves(kind, source, count, target), count):
            row[i] = load_float16(source + 2 * i)
    elif code == FLOAT16:
        for i in range(count):
            row[i] = load_float16(source + i * stride)
    elif size(kind) == 8:
        for i in range(count):
            row[i] = load_float64(source + i * stride)
    else:
        for i in range(count):
            x = load_float64(source + i * stride)
            # A finite number stays finite: only a true -inf excludes.
            if abs(x) != np.inf:
                x = min(max(x, -HIGHEST), HIGHEST)
            row[i] = np.float32(x)


@inlined
def _to_bfloat16(x):  # type: ignore[no-untyped-def]
    """Bits of a float32 rounded to nearest, ties to even, from its own bits."""
    rounded = np.uint32(x + np.uint32(0x7FFF) + ((x >> np.uint32(16)) & np.uint32(1)))
    nan = np.uint32(x & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.uint16((np.uint32(x | np.uint32(0x400000)) if nan else rounded) >> np.uint32(16))


@inlined
def _to_float16(x, value):  # type: ignore[no-untyped-def]
    """Bits of a float32 rounded to nearest, ties to even, from its bits and its value."""
    sign = np.uint32(x >> np.uint32(16)) & np.uint32(0x8000)
    magnitude = np.uint32(x & np.uint32(0x7FFFFFFF))
    if magnitude > np.uint32(0x7F800000):
        return np.uint16(sign | np.uint32(0x7E00))
    if magnitude >= np.uint32(0x477FF000):  # 65520 and beyond round to infinity
        return np.uint16(sign | np.uint32(0x7C00))
    if magnitude < np.uint32(0x38800000):  # below 2**-14: units of 2**-24, ties by rint
        return np.uint16(sign | np.uint32(np.rint(abs(value) * np.float32(2.0**24))))
    odd = np.uint32(magnitude >> np.uint32(13)) & np.uint32(1)
    shifted = np.uint32(magnitude - np.uint32(112 << 23) + np.uint32(0xFFF) + odd)
    return np.uint16(sign | np.uint32(shifted >> np.uint32(13)))


@separate
def numbers_to_row(kind, source, count, code, target):  # type: ignore[no-untyped-def]
    """Write ``count`` of the kind's numbers to a row of any dtype, rounded to nearest."""
    given = numbers(kind, source, count)
    if code == FLOAT64:
        wide = doubles_at(target, count)
        for i in range(count):
            wide[i] = given[i]
    elif code == FLOAT32:
        row = floats_at(target, count)
        for i in range(count):
            row[i] = given[i]
    elif size(kind) == 4:
        bits, halves = words_at(source, count), halves_at(target, count)
        if code == BFLOAT16:
            for i in range(count):
                halves[i] = _to_bfloat16(bits[i])
        else:
            for i in range(count):
                halves[i] = _to_float16(bits[i], given[i])


@inlined
def halves_to_row(source, stride, count, target):  # type: ignore[no-untyped-def]
    """Copy ``count`` numbers of 16 bits to ``target``; one more is set to 0 if they are odd."""
    row = halves_at(target, count + count % 2)
    if stride == 2:
        given = halves_at(source, count)
        for i in range(count):
            row[i] = given[i]
    else:
        for i in range(count):
            row[i] = load_half(source + i * stride)
    if count % 2:
        row[count] = np.uint16(0)


@separate
def fill_rows(kind, source, row_stride, stride, code, count, d, rows, step, target):  # type: ignore[no-untyped-def]
    """Rows (count, d) to ``target`` (rows, step), padded with zeros.

    For `Pairs` two numbers make one of the ``step``.
    """
    for j in range(rows):
        row = target + size(kind) * j * step
        valid = d if j < count else 0
        if has_pairs(kind):
            halves_to_row(source + j * row_stride, stride, valid, row)
            numbers(kind, row, step)[(valid + 1) // 2 :] = 0
        else:
            row_to_numbers(kind, source + j * row_stride, stride, valid, code, row)
            numbers(kind, row, step)[valid:] = 0


@intrinsic
def all_finite(context: Any, kind: Any, source: Any, row_stride: Any, count: Any, d: Any) -> Any:
    """Whether rows (count, d) of the kind's numbers hold no nan and no infinity.

    ``d`` is a multiple of the lanes. The largest magnitude, as bits, tells.
    """
    v = vectors(kind)
    infinity = 0x7FF << 52 if v.double else 0x7F800000

    def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
        sign = v.iconst((1 << (8 * v.size - 1)) - 1)

        def row(j: Any, tops: list[Any]) -> list[Any]:
            p = simd.pointer(b, b.add(args[1], b.mul(j, args[2])), v.integer)

            def body(i: Any, inner: list[Any]) -> list[Any]:
                x = b.and_(v.load(b, p, i, v.integer), sign)
                return [b.select(b.icmp_unsigned(">", x, inner[0]), x, inner[0])]

            return simd.loop(b, args[4], v.lanes, tops, body)

        top = simd.loop(b, args[3], 1, [v.iconst(0)], row)[0]
        odd = b.icmp_unsigned(">=", top, v.iconst(infinity))
        return b.icmp_unsigned("==", b.bitcast(odd, ir.IntType(v.lanes)), ir.IntType(v.lanes)(0))

    return types.boolean(kind, *(types.intp,) * 4), emit


@intrinsic
def interleave(context: Any, kind: Any, first: Any, second: Any, count: Any, target: Any) -> Any:
    """Two rows of bfloat16 side by side; whether both are finite. ``count``: whole vectors."""
    v, paired = vectors(kind), is_pairs(kind)

    def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
        if not paired:
            return simd.I1(0)
        rows = [simd.pointer(b, args[i], simd.I16) for i in (1, 2)]
        goal, halves = simd.pointer(b, args[4], simd.I32), ir.VectorType(simd.I16, 2 * v.lanes)

        def splat(x: int) -> ir.Constant:
            return ir.Constant(halves, [x] * (2 * v.lanes))

        def body(i: Any, tops: list[Any]) -> list[Any]:
            low, high = (b.zext(v.load(b, row, i, simd.I16), v.integers) for row in rows)
            both = b.or_(low, b.shl(high, v.iconst(16)))
            v.store(b, goal, i, both)
            x = b.and_(b.bitcast(both, halves), splat(0x7FFF))
            return [b.select(b.icmp_unsigned(">", x, tops[0]), x, tops[0])]

        top = simd.loop(b, args[3], v.lanes, [splat(0)], body)[0]
        odd = b.bitcast(b.icmp_unsigned(">=", top, splat(0x7F80)), ir.IntType(2 * v.lanes))
        return b.icmp_unsigned("==", odd, ir.IntType(2 * v.lanes)(0))

    return types.boolean(kind, *(types.intp,) * 4), emit


@separate
def fill_values(kind, source, row_stride, stride, code, count, rows, d, step, target, odd, rest):  # type: ignore[no-untyped-def]
    """Values (count, d) to ``target`` (rows, step), padded with zeros; return how many are odd.

    Nan and infinities are stored as 0 and their keys marked in ``odd``: the weight 0 of a key
    that is not seen would make nan of them. For `Pairs` two keys lie side by side in a row;
    ``rest`` is room for the two.
    """
    marks, marked = bytes_at(odd, rows), 0
    if has_pairs(kind):
        for j in range(0, rows, 2):
            place = source + j * row_stride
            if stride == 2 and j + 1 < count and d == step:
                goal = target + 4 * (j // 2) * step
                if interleave(kind, place, place + row_stride, d, goal):
                    marks[j] = marks[j + 1] = 0
                    continue
            for k in range(2):
                valid = d if j + k < count else 0
                row = halves_at(rest + 2 * k * step, step)
                halves_to_row(source + (j + k) * row_stride, stride, valid, rest + 2 * k * step)
                row[valid:] = 0
                marks[j + k] = _clear_halves(row, valid)
                marked += marks[j + k]
            low, high = (halves_at(rest, step),
                         halves_at(rest + 2 * step, step))  # fmt: skip
            both = words_at(target + 4 * (j // 2) * step, step)
            for i in range(step):
                both[i] = np.uint32(low[i]) | (np.uint32(high[i]) << np.uint32(16))
        return marked
    for j in range(rows):
        place, valid = target + size(kind) * j * step, d if j < count else 0
        row_to_numbers(kind, source + j * row_stride, stride, valid, code, place)
        row = numbers(kind, place, step)
        row[valid:] = 0
        marks[j] = _clear(kind, place, valid)
        marked += marks[j]
    return marked


@inlined
def has_odd(kind, address, count):  # type: ignore[no-untyped-def]
    """Whether there are nan or infinities among numbers: by their exponents."""
    found = np.uint32(0)
    if size(kind) == 4:
        words = words_at(address, count)
        for i in range(count):
            found |= np.uint32((words[i] & np.uint32(0x7F800000)) == np.uint32(0x7F800000))
    else:
        longs, top = longs_at(address, count), np.int64(0x7FF << 52)
        for i in range(count):
            found |= np.uint32((longs[i] & top) == top)
    return found != 0


@inlined
def _clear(kind, address, count):  # type: ignore[no-untyped-def]
    """Set nan and infinities to 0; return whether there were any."""
    if not has_odd(kind, address, count):
        return 0
    row = numbers(kind, address, count)
    for i in range(count):
        if not np.isfinite(row[i]):
            row[i] = 0
    return 1


@inlined
def _clear_halves(row, count):  # type: ignore[no-untyped-def]
    """Set nan and infinities of bfloat16 to 0; return whether there were any."""
    odd = np.uint16(0)
    for i in range(count):
        odd |= np.uint16((row[i] & np.uint16(0x7F80)) == np.uint16(0x7F80))
    if odd:
        for i in range(count):
            if (row[i] & np.uint16(0x7F80)) == np.uint16(0x7F80):
                row[i] = np.uint16(0)
    return np.int64(odd)


@intrinsic
def transpose(context: Any, kind: Any, source: Any, source_step: Any, target: Any,
              target_step: Any) -> Any:  # fmt: skip
    """Transpose a square of lanes × lanes numbers; steps from row to row in numbers."""
    v = vectors(kind)

    def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
        p, goal = (simd.pointer(b, args[i], v.scalar) for i in (1, 3))
        rows = [v.load(b, p, b.mul(args[2], I64(r))) for r in range(v.lanes)]
        for r, row in enumerate(simd.transposed(b, rows)):
            v.store(b, goal, b.mul(args[4], I64(r)), row)
        return cx.get_dummy_value()

    return types.void(kind, *(types.intp,) * 4), emit


@intrinsic
def transpose_scaled(context: Any, kind: Any, source: Any, source_step: Any, factors: Any,
                     target: Any, target_step: Any) -> Any:  # fmt: skip
    """Multiply each row of a square by a vector of ``factors``, and transpose it."""
    v = vectors(kind)

    def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
        p, by, goal = (simd.pointer(b, args[i], v.scalar) for i in (1, 3, 4))
        factor = v.load(b, by, I64(0))
        rows = [b.fmul(v.load(b, p, b.mul(args[2], I64(r))), factor) for r in range(v.lanes)]
        for r, row in enumerate(simd.transposed(b, rows)):
            v.store(b, goal, b.mul(args[5], I64(r)), row)
        return cx.get_dummy_value()

    return types.void(kind, *(types.intp,) * 5), emit


@intrinsic
def transpose_bytes(context: Any, kind: Any, source: Any, source_step: Any, target: Any,
                    target_step: Any) -> Any:  # fmt: skip
    """Transpose a square of lanes × lanes bytes."""
    v = vectors(kind)

    def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
        p, goal = (simd.pointer(b, args[i], I8) for i in (1, 3))
        rows = [v.load(b, p, b.mul(args[2], I64(r)), I8) for r in range(v.lanes)]
        for r, row in enumerate(simd.transposed(b, rows)):
            v.store(b, goal, b.mul(args[4], I64(r)), row)
        return cx.get_dummy_value()

    return types.void(kind, *(types.intp,) * 4), emit


@separate
def fill_panel(kind, source, row_stride, stride, code, count, d, columns, step, rows, target):  # type: ignore[no-untyped-def]
    """Queries (count, d) to a panel ``target`` (depth, step) of columns.

    ``rows`` is room for lanes rows of queries, each of full vectors.
    """
    depth = (d + 1) // 2 if has_pairs(kind) else d
    wide = -(-max(1, depth) // lanes(kind)) * lanes(kind)
    same = code == (FLOAT64 if size(kind) == 8 else FLOAT32) and not has_pairs(kind)
    same = same and stride == size(kind) and row_stride % size(kind) == 0 and wide == d
    for first in range(0, columns, lanes(kind)):
        some = min(lanes(kind), max(0, count - first))
        given, given_step = source + first * row_stride, row_stride // size(kind)
        if not same or some < lanes(kind):
            fill_rows(
                kind, given, row_stride, stride, code, some, d, lanes(kind), wide, rows
            )
            given, given_step = rows, wide
        for i in range(0, wide, lanes(kind)):
            place = target + size(kind) * (i * step + first)
            transpose(kind, given + size(kind) * i, given_step, place, step)
