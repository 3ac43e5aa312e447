"""Operands as the micro-kernels read them: contiguous, padded with zeros, in the kind's numbers.

Sources are given by address and strides in bytes, so that any view can be read in place.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray  # type: ignore[attr-defined]
from numba.core import types

from scaledot._kernels import simd
from scaledot._kernels.jit import inlined, intrinsic, separate
from scaledot._kernels.kinds import has_pairs, lanes, number, numbers, size, vectors
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


def _viewer(dtype: Any) -> Any:
    @intrinsic
    def pointer(context: Any, address: Any) -> Any:
        def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
            return b.inttoptr(args[0], cx.get_value_type(sig.return_type))

        return types.CPointer(dtype)(types.intp), emit  # type: ignore[no-untyped-call]

    return pointer


byte_pointer = _viewer(types.uint8)
half_pointer = _viewer(types.uint16)
word_pointer = _viewer(types.uint32)
long_pointer = _viewer(types.int64)
float_pointer = _viewer(types.float32)
double_pointer = _viewer(types.float64)


@separate
def row_to_numbers(kind, source, stride, count, code, target):  # type: ignore[no-untyped-def]
    """Write a row of any dtype to ``target`` in the kind's numbers.

    Rows without gaps take loops over arrays, which LLVM turns into vector code.
    """
    row = numbers(kind, target, count)
    if code == FLOAT32 and stride == 4:
        given = carray(float_pointer(source), count)
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
        for i in range(count):
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
        wide = carray(double_pointer(target), count)
        for i in range(count):
            wide[i] = given[i]
    elif code == FLOAT32:
        row = carray(float_pointer(target), count)
        for i in range(count):
            row[i] = given[i]
    elif size(kind) == 4:
        bits, halves = carray(word_pointer(source), count), carray(half_pointer(target), count)
        if code == BFLOAT16:
            for i in range(count):
                halves[i] = _to_bfloat16(bits[i])
        else:
            for i in range(count):
                halves[i] = _to_float16(bits[i], given[i])


@inlined
def halves_to_row(source, stride, count, target):  # type: ignore[no-untyped-def]
    """Copy ``count`` numbers of 16 bits to ``target``; one more is set to 0 if they are odd."""
    row = carray(half_pointer(target), count + count % 2)
    if stride == 2:
        given = carray(half_pointer(source), count)
        for i in range(count):
            row[i] = given[i]
    else:
        for i in range(count):
            row[i] = load_half(source + i * stride)
    if count % 2:
        row[count] = np.uint16(0)


@separate
def fill_rows(kind, source, row_stride, stride, code, count, d, rows, step, target):  # type: ignore[no-untyped-def]
    """Rows (count, d) to ``target`` (rows, step), padded with zeros; for `Pairs` two numbers
    make one of the ``step``.
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


@separate
def fill_values(kind, source, row_stride, stride, code, count, rows, d, step, target, odd, rest):  # type: ignore[no-untyped-def]
    """Values (count, d) to ``target`` (rows, step), padded with zeros; return how many are odd.

    Nan and infinities are stored as 0 and their keys marked in ``odd``: the weight 0 of a key
    that is not seen would make nan of them. For `Pairs` two keys lie side by side in a row;
    ``rest`` is room for the two.
    """
    marks, marked = carray(byte_pointer(odd), rows), 0
    if has_pairs(kind):
        for j in range(0, rows, 2):
            for k in range(2):
                valid = d if j + k < count else 0
                row = carray(half_pointer(rest + 2 * k * step), step)
                halves_to_row(source + (j + k) * row_stride, stride, valid, rest + 2 * k * step)
                row[valid:] = 0
                marks[j + k] = _clear_halves(row, valid)
                marked += marks[j + k]
            low, high = (carray(half_pointer(rest), step),
                         carray(half_pointer(rest + 2 * step), step))  # fmt: skip
            both = carray(word_pointer(target + 4 * (j // 2) * step), step)
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
        words = carray(word_pointer(address), count)
        for i in range(count):
            found |= np.uint32((words[i] & np.uint32(0x7F800000)) == np.uint32(0x7F800000))
    else:
        longs, top = carray(long_pointer(address), count), np.int64(0x7FF << 52)
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
def fill_panel(  # type: ignore[no-untyped-def]
    kind, source, row_stride, stride, code, count, d, scale, columns, step, rows, target
):
    """Queries (count, d), times scale, to a panel ``target`` (depth, step) of columns.

    ``rows`` is room for lanes rows of queries, each of full vectors. `Pairs` are not scaled:
    what is multiplied is bfloat16 as given, and the sum is scaled.
    """
    depth = (d + 1) // 2 if has_pairs(kind) else d
    wide = -(-max(1, depth) // lanes(kind)) * lanes(kind)
    factor = number(kind, scale)
    for first in range(0, columns, lanes(kind)):
        some = min(lanes(kind), max(0, count - first))
        fill_rows(
            kind, source + first * row_stride, row_stride, stride, code, some, d, lanes(kind),
            wide, rows,
        )  # fmt: skip
        if not has_pairs(kind):
            given = numbers(kind, rows, lanes(kind) * wide)
            for i in range(lanes(kind) * wide):
                given[i] *= factor
        for i in range(0, wide, lanes(kind)):
            transpose(
                kind, rows + size(kind) * i, wide, target + size(kind) * (i * step + first), step
            )


