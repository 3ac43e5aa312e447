"""Softmax of one row of a tile: maxima, exponentials and rescaling, one vector at a time.

A running softmax holds for each row `row_max` (the papers' m), `row_sum` (ℓ) and `acc` (O), the
sum of values weighted by ``exp(score - row_max)``.
"""

from __future__ import annotations

import math
from typing import Any

from numba.core import types

from scaledot._kernels import simd
from scaledot._kernels.jit import intrinsic
from scaledot._kernels.simd import I32, I64, LANES
from scaledot._kernels.target import HOST

LOG2E = math.log2(math.e)
UNROLL = HOST.nr  # rows of a tile are multiples of a panel, nr vectors


@intrinsic
def lane_max(context: Any, top: Any) -> Any:
    """Largest of the lanes at an address."""

    def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
        return simd.max_lanes(b, simd.load(b, simd.pointer(b, args[0]), I64(0)))

    return types.float32(types.intp), emit


@intrinsic
def row_maximum(context: Any, scores: Any, count: Any) -> Any:
    """Largest of ``count`` scores (a multiple of a panel), nan passed over."""

    def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
        p = simd.pointer(b, args[0])

        def body(i: Any, tops: list[Any]) -> list[Any]:
            new = []
            for u in range(UNROLL):
                x = simd.load(b, p, b.add(i, I64(LANES * u)))
                new.append(simd.maximum(b, x, tops[u]))
            return new

        start = [simd.const(float("-inf"))] * UNROLL
        tops = simd.loop(b, args[1], LANES * UNROLL, start, body)
        while len(tops) > 1:
            tops = [simd.maximum(b, *tops[i : i + 2]) for i in range(0, len(tops), 2)]
        return simd.max_lanes(b, tops[0])

    return types.float32(types.intp, types.intp), emit


@intrinsic
def row_weights(context: Any, scores: Any, count: Any, row_max: Any) -> Any:
    """Turn scores into weights ``exp(score - row_max)`` in place; return their sum."""

    def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
        p, m = simd.pointer(b, args[0]), simd.splat(b, args[2])

        def body(i: Any, sums: list[Any]) -> list[Any]:
            new = []
            for u in range(UNROLL):
                place = b.add(i, I64(LANES * u))
                below = b.fsub(simd.load(b, p, place), m)
                w = simd.exp2(b, b.fmul(below, simd.const(LOG2E)))
                simd.store(b, p, place, w)
                new.append(b.fadd(sums[u], w))
            return new

        sums = simd.loop(b, args[1], LANES * UNROLL, [simd.const(0.0)] * UNROLL, body)
        while len(sums) > 1:
            sums = [b.fadd(*sums[i : i + 2]) for i in range(0, len(sums), 2)]
        return simd.sum_lanes(b, sums[0])

    return types.float32(types.intp, types.intp, types.float32), emit


@intrinsic
def row_scale(context: Any, row: Any, count: Any, factor: Any) -> Any:
    """Multiply ``count`` numbers (a multiple of the lanes) in place."""

    def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
        p, s = simd.pointer(b, args[0]), simd.splat(b, args[2])

        def body(i: Any, carried: list[Any]) -> list[Any]:
            simd.store(b, p, i, b.fmul(simd.load(b, p, i), s))
            return []

        simd.loop(b, args[1], LANES, [], body)
        return cx.get_dummy_value()

    return types.void(types.intp, types.intp, types.float32), emit


@intrinsic
def exp2_scalar(context: Any, x: Any) -> Any:
    """``2**x`` of one number x ≤ 0, by the vector code."""

    def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.extract_element(simd.exp2(b, simd.splat(b, args[0])), I32(0))

    return types.float32(types.float32), emit


# tanh on |x| ≤ 1/4: x + x³·(c₃ + c₅x² + c₇x⁴ + c₉x⁶), the Taylor series; next term below 1e-8 x.
TANH = (62 / 2835, -17 / 315, 2 / 15, -1 / 3)


def _tanh(b: Any, x: Any) -> Any:
    """Hyperbolic tangent: a polynomial near 0, else (1 - e) / (1 + e) with e = exp(-2|x|)."""
    square = b.fmul(x, x)
    p = simd.const(TANH[0])
    for coefficient in TANH[1:]:
        p = simd.fma(b, p, square, simd.const(coefficient))
    near = simd.fma(b, b.fmul(p, square), x, x)
    size = simd.call(b, f"llvm.fabs.v{LANES}f32", simd.VF, x)
    e = simd.exp2(b, b.fmul(size, simd.const(-2 * LOG2E)))
    far = b.fdiv(b.fsub(simd.const(1.0), e), b.fadd(simd.const(1.0), e))
    far = simd.call(b, f"llvm.copysign.v{LANES}f32", simd.VF, far, x)
    return b.select(b.fcmp_ordered("<", size, simd.const(0.25)), near, far)


@intrinsic
def tanh_scaled(context: Any, row: Any, count: Any, cap: Any) -> Any:
    """``cap · tanh(score / cap)`` on ``count`` scores (a multiple of the lanes) in place."""

    def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
        p, c = simd.pointer(b, args[0]), simd.splat(b, args[2])

        def body(i: Any, carried: list[Any]) -> list[Any]:
            x = b.fdiv(simd.load(b, p, i), c)
            simd.store(b, p, i, b.fmul(_tanh(b, x), c))
            return []

        simd.loop(b, args[1], LANES, [], body)
        return cx.get_dummy_value()

    return types.void(types.intp, types.intp, types.float32), emit
