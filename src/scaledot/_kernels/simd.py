"""Vector instructions as LLVM IR, for the micro-kernels that Numba cannot express.

Everything works on addresses (int64), because the kernels place their scratch arrays themselves.
Vectors have ``HOST.lanes`` lanes of float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from scaledot._kernels.target import HOST

LANES = HOST.lanes
F32, I32, I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
VF, VI = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)
LOWEST_EXPONENT = -126.0


def const(x: float) -> ir.Constant:
    """Vector of one float32 number."""
    return ir.Constant(VF, [float(np.float32(x))] * LANES)


def iconst(x: int) -> ir.Constant:
    """Vector of one int32 number."""
    return ir.Constant(VI, [x] * LANES)


def splat(b: Any, x: Any) -> Any:
    """Vector that repeats the float32 x."""
    undefined = ir.Constant(VF, ir.Undefined)
    v = b.insert_element(undefined, x, I32(0))
    return b.shuffle_vector(v, undefined, ir.Constant(VI, [0] * LANES))


def call(b: Any, name: str, result: Any, *arguments: Any, fastmath: tuple[str, ...] = ()) -> Any:
    """Call an LLVM intrinsic."""
    signature = ir.FunctionType(result, [a.type for a in arguments])
    function = cgutils.get_or_insert_function(b.module, signature, name)  # type: ignore[no-untyped-call]
    return b.call(function, arguments, fastmath=fastmath)


def fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    """``x * y + z`` with one rounding."""
    return call(b, f"llvm.fma.v{LANES}f32", VF, x, y, z)


def maximum(b: Any, x: Any, y: Any) -> Any:
    """The larger; y where one is nan. One instruction, where llvm.maxnum takes three."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def sum_lanes(b: Any, v: Any) -> Any:
    """Sum of the lanes of a vector, pairwise."""
    return call(
        b, f"llvm.vector.reduce.fadd.v{LANES}f32", F32, F32(0.0), v, fastmath=("reassoc",)
    )


def max_lanes(b: Any, v: Any) -> Any:
    """Largest lane of a vector without nan."""
    return call(b, f"llvm.vector.reduce.fmax.v{LANES}f32", F32, v)


def pointer(b: Any, address: Any, kind: Any = F32) -> Any:
    """Pointer from an address."""
    return b.inttoptr(address, kind.as_pointer())


def load(b: Any, p: Any, offset: Any) -> Any:
    """Vector at element ``offset`` of p; any alignment."""
    v = b.load(b.bitcast(b.gep(p, [offset]), VF.as_pointer()))
    v.align = 4
    return v


def store(b: Any, p: Any, offset: Any, v: Any) -> None:
    """Write a vector to element ``offset`` of p; any alignment."""
    b.store(v, b.bitcast(b.gep(p, [offset]), VF.as_pointer())).align = 4


def loop(
    b: Any, count: Any, step: int, carried: list[Any], body: Callable[[Any, list[Any]], list[Any]]
) -> list[Any]:
    """Emit a loop over 0, step, ... < count (count ≥ 1) with values carried in registers."""
    before, block, after = b.block, b.append_basic_block("loop"), b.append_basic_block("after")
    b.branch(block)
    b.position_at_end(block)
    i = b.phi(I64)
    i.add_incoming(I64(0), before)
    phis = []
    for x in carried:
        phi = b.phi(x.type)
        phi.add_incoming(x, before)
        phis.append(phi)
    new = body(i, phis)
    following = b.add(i, I64(step))
    i.add_incoming(following, b.block)
    for phi, x in zip(phis, new, strict=True):
        phi.add_incoming(x, b.block)
    b.cbranch(b.icmp_signed("<", following, count), block, after)
    b.position_at_end(after)
    return new


# 2**f on [-1/2, 1/2], coefficients of f**6 down to f**0; largest relative error 2e-8.
EXP2 = (
    1.535336188319500e-4,
    1.339887440266574e-3,
    9.618437357674640e-3,
    5.550332471162809e-2,
    2.402264791363012e-1,
    6.931472028550421e-1,
    1.0,
)


def exp2(b: Any, x: Any) -> Any:
    """``2**x`` for x ≤ 0: 0 below -126, so never subnormal; nan stays nan."""
    low = b.fcmp_ordered("<", x, const(LOWEST_EXPONENT))
    bounded = b.select(low, const(LOWEST_EXPONENT), x)
    # Adding 1.5·2**23 leaves the rounded integer in the low bits.
    shifted = b.fadd(bounded, const(12582912.0))
    f = b.fsub(bounded, b.fsub(shifted, const(12582912.0)))
    p = const(EXP2[0])
    for coefficient in EXP2[1:]:
        p = fma(b, p, f, const(coefficient))
    power = b.shl(b.bitcast(shifted, VI), iconst(23))
    result = b.bitcast(b.add(b.bitcast(p, VI), power), VF)
    result = b.select(b.fcmp_unordered("uno", x, x), x, result)
    return b.select(low, const(0.0), result)
