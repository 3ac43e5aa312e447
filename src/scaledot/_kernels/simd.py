"""Vector instructions as LLVM IR, for the inner loops that Numba cannot express.

Everything works on addresses (int64), because the kernels place their scratch arrays themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from llvmlite.ir.types import _BaseFloatType
from numba.core import cgutils, types

from scaledot._kernels.target import HOST

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F32, F64 = ir.FloatType(), ir.DoubleType()
LOG2E = math.log2(math.e)
NEAREST = 4  # rounding of this instruction: the processor's current mode


class _BFloat(_BaseFloatType):  # type: ignore[misc]
    """The bfloat16 of LLVM, which llvmlite does not name."""

    null, intrinsic_name = "0.0", "bf16"

    def __str__(self) -> str:
        return "bfloat"


_BFloat._create_instance()
BF16 = _BFloat()

# 2**f on [-1/2, 1/2], highest power first. float32: largest relative error 2e-8, by a fit;
# float64: Taylor's series, the first term left out is below 5e-18.
EXP2_SINGLE = (
    1.535336188319500e-4,
    1.339887440266574e-3,
    9.618437357674640e-3,
    5.550332471162809e-2,
    2.402264791363012e-1,
    6.931472028550421e-1,
    1.0,
)
# float32, for weights that are rounded to bfloat16: largest relative error 1e-7, by a fit.
EXP2_SHORT = (
    1.3263870496302843e-3,
    9.67172160744667e-3,
    5.550723150372505e-2,
    2.4022240936756134e-1,
    6.931470036506653e-1,
    1.0,
)
EXP2_DOUBLE = tuple(math.log(2) ** k / math.factorial(k) for k in range(13, -1, -1))


def call(b: Any, name: str, result: Any, *arguments: Any, fastmath: tuple[str, ...] = ()) -> Any:
    """Call an LLVM intrinsic."""
    signature = ir.FunctionType(result, [a.type for a in arguments])
    function = cgutils.get_or_insert_function(b.module, signature, name)  # type: ignore[no-untyped-call]
    return b.call(function, arguments, fastmath=fastmath)


def pointer(b: Any, address: Any, kind: Any) -> Any:
    """Pointer from an address."""
    return b.inttoptr(address, kind.as_pointer())


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


def transposed(b: Any, rows: list[Any]) -> list[Any]:
    """Transpose n vectors of n elements, n a power of two: log2(n) rounds of shuffles."""
    n, width = len(rows), 1
    while width < n:
        new = list(rows)
        for i in range(n):
            if i & width:
                continue
            x, y = rows[i], rows[i + width]
            low = [k if not k & width else n + k - width for k in range(n)]
            high = [k + width if not k & width else n + k for k in range(n)]
            indices = ir.VectorType(I32, n)
            new[i] = b.shuffle_vector(x, y, ir.Constant(indices, low))
            new[i + width] = b.shuffle_vector(x, y, ir.Constant(indices, high))
        rows, width = new, 2 * width
    return rows


class Vectors:
    """Emits code for vectors of one floating-point type.

    Attributes
    ----------
    lanes : int
        Numbers in a vector.
    size : int
        Bytes of a number.
    number : numba type
        Of one number.
    """

    def __init__(self, bits: int) -> None:
        self.double = bits == 64
        self.size = bits // 8
        self.lanes = HOST.lanes * 32 // bits
        self.scalar = F64 if self.double else F32
        self.integer = I64 if self.double else I32
        self.vector = ir.VectorType(self.scalar, self.lanes)
        self.integers = ir.VectorType(self.integer, self.lanes)
        self.number = types.float64 if self.double else types.float32
        self.dtype: type = np.float64 if self.double else np.float32
        self.suffix = f"v{self.lanes}f{bits}"
        self.lowest_exponent = -1022.0 if self.double else -126.0

    def const(self, x: float) -> ir.Constant:
        """Vector of one number."""
        return ir.Constant(self.vector, [float(self.dtype(x))] * self.lanes)

    def iconst(self, x: int) -> ir.Constant:
        """Vector of one integer of the same width."""
        return ir.Constant(self.integers, [x] * self.lanes)

    def splat(self, b: Any, x: Any) -> Any:
        """Vector that repeats the number x, of any type."""
        undefined = ir.Constant(ir.VectorType(x.type, self.lanes), ir.Undefined)
        v = b.insert_element(undefined, x, I32(0))
        zeros = ir.Constant(ir.VectorType(I32, self.lanes), [0] * self.lanes)
        return b.shuffle_vector(v, undefined, zeros)

    def fma(self, b: Any, x: Any, y: Any, z: Any) -> Any:
        """``x * y + z`` with one rounding; with two where the processor has no such instruction."""
        name = "llvm.fma" if HOST.fma else "llvm.fmuladd"
        return call(b, f"{name}.{self.suffix}", self.vector, x, y, z)

    def maximum(self, b: Any, x: Any, y: Any) -> Any:
        """The larger; y where one is nan. One instruction, where llvm.maxnum takes three."""
        return b.select(b.fcmp_ordered(">", x, y), x, y)

    def sum_lanes(self, b: Any, v: Any) -> Any:
        """Sum of the lanes of a vector, pairwise."""
        name = f"llvm.vector.reduce.fadd.{self.suffix}"
        return call(b, name, self.scalar, self.scalar(0.0), v, fastmath=("reassoc",))

    def max_lanes(self, b: Any, v: Any) -> Any:
        """Largest lane of a vector without nan."""
        return call(b, f"llvm.vector.reduce.fmax.{self.suffix}", self.scalar, v)

    def load(self, b: Any, p: Any, offset: Any, kind: Any = None) -> Any:
        """Vector at element ``offset`` of p; any alignment. ``kind``: of its lanes."""
        vector = self.vector if kind is None else ir.VectorType(kind, self.lanes)
        v = b.load(b.bitcast(b.gep(p, [offset]), vector.as_pointer()))
        v.align = 1
        return v

    def store(self, b: Any, p: Any, offset: Any, v: Any) -> None:
        """Write a vector to element ``offset`` of p; any alignment."""
        b.store(v, b.bitcast(b.gep(p, [offset]), v.type.as_pointer())).align = 1

    def lane_numbers(self, kind: Any) -> ir.Constant:
        """Vector 0, 1, 2, ... of an integer type."""
        return ir.Constant(ir.VectorType(kind, self.lanes), list(range(self.lanes)))

    def exp2(self, b: Any, x: Any) -> Any:
        """``2**x`` for x ≤ 0: 0 below the normal numbers; nan stays nan."""
        return self._exp2_avx512(b, x) if HOST.name == "avx512" else self._exp2_integers(b, x)

    def exp2_short(self, b: Any, x: Any) -> Any:
        """``2**x`` of float32 by `EXP2_SHORT`, on AVX-512; 0 below the normal numbers."""
        bits = ir.IntType(self.lanes)
        whole = call(
            b, "llvm.x86.avx512.mask.rndscale.ps.512", self.vector,
            x, I32(0), self.const(0.0), bits(-1), I32(NEAREST),
        )  # fmt: skip
        normal = b.fcmp_unordered(">=", x, self.const(self.lowest_exponent))
        return call(
            b, "llvm.x86.avx512.mask.scalef.ps.512", self.vector,
            self._polynomial(b, b.fsub(x, whole), EXP2_SHORT), whole, self.const(0.0),
            b.bitcast(normal, bits), I32(NEAREST),
        )  # fmt: skip

    def _polynomial(self, b: Any, f: Any, given: tuple[float, ...] = ()) -> Any:
        coefficients = given or (EXP2_DOUBLE if self.double else EXP2_SINGLE)
        p = self.const(coefficients[0])
        for coefficient in coefficients[1:]:
            p = self.fma(b, p, f, self.const(coefficient))
        return p

    def _exp2_avx512(self, b: Any, x: Any) -> Any:
        """One instruction takes the fraction, one multiplies by a power of two."""
        kind = "pd" if self.double else "ps"
        bits = ir.IntType(self.lanes)
        f = call(
            b, f"llvm.x86.avx512.mask.reduce.{kind}.512", self.vector,
            x, I32(0), self.const(0.0), bits(-1), I32(NEAREST),
        )  # fmt: skip
        normal = b.fcmp_unordered(">=", x, self.const(self.lowest_exponent))
        return call(
            b, f"llvm.x86.avx512.mask.scalef.{kind}.512", self.vector,
            self._polynomial(b, f), b.fsub(x, f), self.const(0.0), b.bitcast(normal, bits),
            I32(NEAREST),
        )  # fmt: skip

    def _exp2_integers(self, b: Any, x: Any) -> Any:
        """Rounds by a large number whose low bits then hold the exponent."""
        mantissa = 52 if self.double else 23
        rounder = self.const(1.5 * 2**mantissa)
        low = b.fcmp_ordered("<", x, self.const(self.lowest_exponent))
        bounded = b.select(low, self.const(self.lowest_exponent), x)
        shifted = b.fadd(bounded, rounder)
        f = b.fsub(bounded, b.fsub(shifted, rounder))
        power = b.shl(b.bitcast(shifted, self.integers), self.iconst(mantissa))
        bits = b.bitcast(self._polynomial(b, f), self.integers)
        result = b.bitcast(b.add(bits, power), self.vector)
        result = b.select(b.fcmp_unordered("uno", x, x), x, result)
        return b.select(low, self.const(0.0), result)


def add_pairs(b: Any, v: Vectors, x: Any, y: Any, total: Any) -> Any:
    """Add the products of pairs of bfloat16, two to a lane, to a vector of float32."""
    halves = ir.VectorType(BF16, 2 * v.lanes)
    name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * v.lanes}"
    return call(b, name, v.vector, total, b.bitcast(x, halves), b.bitcast(y, halves))


def rounded(b: Any, v: Vectors, x: Any, y: Any) -> Any:
    """Two vectors of float32 as one of bfloat16, in 16-bit integers: x, then y."""
    halves = ir.VectorType(BF16, 2 * v.lanes)
    both = call(b, f"llvm.x86.avx512bf16.cvtne2ps2bf16.{32 * v.lanes}", halves, y, x)
    return b.bitcast(both, ir.VectorType(I16, 2 * v.lanes))


def paired(b: Any, v: Vectors, both: Any) -> Any:
    """What `rounded` returned, a number of x in the low half of each 32 bits, one of y above."""
    n = v.lanes
    order = ir.Constant(ir.VectorType(I32, 2 * n), [i // 2 + n * (i % 2) for i in range(2 * n)])
    return b.bitcast(b.shuffle_vector(both, both, order), ir.VectorType(I32, n))


SINGLE, DOUBLE = Vectors(32), Vectors(64)
