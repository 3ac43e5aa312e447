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

PANEL = HOST.panel
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


load_float32 = _loader(ir.FloatType(), types.float32, lambda b, x: x)
load_float64 = _loader(ir.DoubleType(), types.float64, lambda b, x: x)
load_float16 = _loader(ir.HalfType(), types.float32, lambda b, x: b.fpext(x, ir.FloatType()))
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


@inlined
def floats(address, count):  # type: ignore[no-untyped-def]
    """``count`` float32 numbers at an address, as an array that owns nothing."""
    return carray(float_pointer(address), count)


@inlined
def row_to_float32(source, stride, count, code, target):  # type: ignore[no-untyped-def]
    """Write a row of any dtype to ``target`` as float32."""
    row = floats(target, count)
    if code == FLOAT32:
        for i in range(count):
            row[i] = load_float32(source + i * stride)
    elif code == FLOAT16:
        for i in range(count):
            row[i] = load_float16(source + i * stride)
    elif code == BFLOAT16:
        for i in range(count):
            row[i] = load_bfloat16(source + i * stride)
    else:
        for i in range(count):
            x = load_float64(source + i * stride)
            # A finite number stays finite: only a true -inf excludes.
            if abs(x) != np.inf:
                x = min(max(x, -HIGHEST), HIGHEST)
            row[i] = np.float32(x)


@inlined
def pack_keys(source, row_stride, stride, code, count, d, row, target):  # type: ignore[no-untyped-def]
    """Keys (count, d) to panels [count / PANEL][d][PANEL]; the last panel is filled with 0."""
    depth = max(1, d)
    one = floats(row, depth)
    for first in range(0, count, PANEL):
        panel = floats(target + 4 * first * depth, PANEL * depth)
        valid = min(PANEL, count - first)
        if valid < PANEL or d == 0:
            panel[:] = 0
        for j in range(valid):
            row_to_float32(source + (first + j) * row_stride, stride, d, code, row)
            for i in range(d):
                panel[i * PANEL + j] = one[i]


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
        total = np.float32(0)
        for i in range(valid):
            total += row[i] - row[i]  # 0, or nan where not finite
        if total != 0:
            marks[j] = 1
            marked += 1
            for i in range(valid):
                if not np.isfinite(row[i]):
                    row[i] = np.float32(0)
        for i in range(valid, width):
            row[i] = np.float32(0)
    return marked
