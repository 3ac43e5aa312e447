"""Operands as the micro-kernels read them: float32, contiguous, padded with zeros.

Sources are given by address and strides in bytes, so that any view can be read in place.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray  # type: ignore[attr-defined]
from numba.core import types

from scaledot._kernels.jit import inlined, intrinsic
from scaledot._kernels.target import HOST

PANEL, LANES = HOST.panel, HOST.lanes
FLOAT32, FLOAT16, BFLOAT16, FLOAT64 = 0, 1, 2, 3
DTYPES = {"float32": FLOAT32, "float16": FLOAT16, "bfloat16": BFLOAT16, "float64": FLOAT64}
HIGHEST = np.float32(np.finfo(np.float32).max)


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
    size = b.shl(b.and_(wide, i32(0x7FFF)), i32(13))
    # The exponent's bias differs by 112; the product is exact, for subnormal numbers too.
    number = b.bitcast(b.fmul(b.bitcast(size, f32), f32(2.0**112)), i32)
    special = b.icmp_unsigned(">=", size, i32(0x7C00 << 13))
    bits = b.select(special, b.or_(size, i32(0x7F800000)), number)
    return b.bitcast(b.or_(bits, sign), f32)


load_float32 = _loader(ir.FloatType(), types.float32, lambda b, x: x)
load_float64 = _loader(ir.DoubleType(), types.float64, lambda b, x: x)
load_float16 = _loader(ir.IntType(16), types.float32, _from_float16)
load_bfloat16 = _loader(ir.IntType(16), types.float32, _from_bfloat16)
load_int64 = _loader(ir.IntType(64), types.int64, lambda b, x: x)
load_uint32 = _loader(ir.IntType(32), types.uint32, lambda b, x: x)
load_byte = _loader(ir.IntType(8), types.uint8, lambda b, x: x)


@intrinsic
def store_int64(context: Any, address: Any, x: Any) -> Any:
    """Write a number to an address."""

    def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
        b.store(args[1], b.inttoptr(args[0], ir.IntType(64).as_pointer()))
        return cx.get_dummy_value()

    return types.void(types.int64, types.int64), emit


def _viewer(dtype: Any) -> Any:
    @intrinsic
    def pointer(context: Any, address: Any) -> Any:
        def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
            return b.inttoptr(args[0], cx.get_value_type(sig.return_type))

        return types.CPointer(dtype)(types.intp), emit  # type: ignore[no-untyped-call]

    return pointer


float_pointer = _viewer(types.float32)
byte_pointer = _viewer(types.uint8)
half_pointer = _viewer(types.uint16)
bits_pointer = _viewer(types.uint32)


@inlined
def floats(address, count):  # type: ignore[no-untyped-def]
    """``count`` float32 numbers at an address, as an array that owns nothing."""
    return carray(float_pointer(address), count)


@inlined
def row_to_float32(source, stride, count, code, target):  # type: ignore[no-untyped-def]
    """Write a row of any dtype to ``target`` as float32.

    Rows without gaps take loops over arrays, which LLVM turns into vector code.
    """
    row = floats(target, count)
    if code == FLOAT32 and stride == 4:
        given = floats(source, count)
        for i in range(count):
            row[i] = given[i]
    elif code == FLOAT32:
        for i in range(count):
            row[i] = load_float32(source + i * stride)
    elif code == BFLOAT16 and stride == 2:
        halves, bits = carray(half_pointer(source), count), carray(bits_pointer(target), count)
        for i in range(count):
            bits[i] = np.uint32(halves[i]) << np.uint32(16)
    elif code == BFLOAT16:
        for i in range(count):
            row[i] = load_bfloat16(source + i * stride)
    elif code == FLOAT16 and stride == 2:
        for i in range(count):
            row[i] = load_float16(source + 2 * i)
    elif code == FLOAT16:
        for i in range(count):
            row[i] = load_float16(source + i * stride)
    else:
        for i in range(count):
            x = load_float64(source + i * stride)
            # A finite number stays finite: only a true -inf excludes.
            if abs(x) != np.inf:
                x = min(max(x, -HIGHEST), HIGHEST)
            row[i] = np.float32(x)


@inlined
def is_finite(address, count):  # type: ignore[no-untyped-def]
    """Whether ``count`` float32 numbers hold neither nan nor infinity: by their exponents."""
    bits = carray(bits_pointer(address), count)
    odd = np.uint32(0)
    for i in range(count):
        odd |= np.uint32((bits[i] & np.uint32(0x7F800000)) == np.uint32(0x7F800000))
    return odd == 0


@inlined
def pack_keys(source, row_stride, stride, code, count, d, rows, target):  # type: ignore[no-untyped-def]
    """Keys (count, d) to panels [count / PANEL][d][PANEL]; the last panel is filled with 0.

    ``rows`` is room for LANES rows of keys: a panel is turned over in squares.
    """
    depth = max(1, d)
    for first in range(0, count, PANEL):
        panel = floats(target + 4 * first * depth, PANEL * depth)
        valid = min(PANEL, count - first)
        if valid < PANEL or d == 0:
            panel[:] = 0
        for j in range(0, valid, LANES):
            some = min(LANES, valid - j)
            square = floats(rows, LANES * depth)
            for k in range(some):
                place = source + (first + j + k) * row_stride
                row_to_float32(place, stride, d, code, rows + 4 * k * depth)
            if some == LANES:
                for i in range(d):
                    for k in range(LANES):
                        panel[i * PANEL + j + k] = square[k * depth + i]
            else:
                for i in range(d):
                    for k in range(some):
                        panel[i * PANEL + j + k] = square[k * depth + i]


@inlined
def pack_values(source, row_stride, stride, code, count, padded, d, width, target, odd):  # type: ignore[no-untyped-def]
    """Values (count, d) to rows of ``width``; what pads rows and columns is 0.

    Nan and infinities are stored as 0 and their keys marked in ``odd``: the weight 0 of a key
    that is not seen would make nan of them. Returns how many keys are marked.
    """
    marks = carray(byte_pointer(odd), padded)
    marked = 0
    for j in range(padded):
        row = floats(target + 4 * j * width, width)
        marks[j] = 0
        valid = d if j < count else 0
        if valid:
            row_to_float32(source + j * row_stride, stride, d, code, target + 4 * j * width)
        if not is_finite(target + 4 * j * width, valid):
            marks[j] = 1
            marked += 1
            for i in range(valid):
                if not np.isfinite(row[i]):
                    row[i] = np.float32(0)
        for i in range(valid, width):
            row[i] = np.float32(0)
    return marked
