"""Eight-bit codes as pairs of bfloat16, which holds every one of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir

from scaledot._kernels import simd
from scaledot._kernels.simd import I8, I32, Vectors
from scaledot._kernels.target import HOST

LANE = 16  # bytes of a part of a register that instructions work within
TABLE = np.arange(128, dtype=np.float32).view(np.uint32) >> 16  # bits of 0, 1, ... in bfloat16


def as_pairs(b: Any, v: Vectors, x: Any, y: Any, order: list[int]) -> list[Any]:
    """Two vectors of pairs, from two of ``2 · lanes`` codes.

    ``order`` numbers the codes of x, then y, as they are to lie one after the other.
    """
    if HOST.bytes:
        return _looked_up(b, v, x, y, order)
    name, found = f"llvm.x86.avx512bf16.cvtne2ps2bf16.{32 * v.lanes}", []
    for start in range(0, 4 * v.lanes, 2 * v.lanes):
        low, high = (
            b.sitofp(b.sext(_shuffled(b, x, y, order[i : i + v.lanes]), v.integers), v.vector)
            for i in (start, start + v.lanes)
        )
        pairs = simd.call(b, name, ir.VectorType(simd.BF16, 2 * v.lanes), high, low)
        found.append(b.bitcast(pairs, v.integers))
    return found


def _looked_up(b: Any, v: Vectors, x: Any, y: Any, order: list[int]) -> list[Any]:
    """Both bytes of each number come from tables, by its magnitude; conversions would take longer.

    The codes are put in such an order that bytes and bytes meet within the parts of a register.
    """
    half, every = LANE // 2, 4 * v.lanes
    starts = range(0, every // 2, half)
    places = [
        p for s in starts for p in (*order[s : s + half], *order[every // 2 + s :][:half])
    ]
    codes = _shuffled(b, x, y, places)
    kind = codes.type
    size = simd.call(b, f"llvm.abs.v{every}i8", kind, codes, simd.I1(0))
    low, high = (_lookup(b, kind, TABLE >> shift & 0xFF, size) for shift in (0, 8))
    high = b.or_(high, b.and_(codes, ir.Constant(kind, [0x80] * every)))
    found = []
    for first in (0, half):
        joined = [
            n for lane in range(first, every, LANE) for k in range(lane, lane + half)
            for n in (k, every + k)
        ]  # fmt: skip
        found.append(b.bitcast(_shuffled(b, low, high, joined), v.integers))
    return found


def _lookup(b: Any, kind: Any, table: Any, index: Any) -> Any:
    """Entries of a table of 128 bytes."""
    first, second = (ir.Constant(kind, [int(x) for x in part]) for part in np.split(table, 2))
    name = "llvm.x86.avx512.vpermi2var.qi.512"
    return simd.call(b, name, kind, first, index, second)


def _shuffled(b: Any, x: Any, y: Any, order: list[int]) -> Any:
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(order)), order))


def load_codes(b: Any, line: Any, place: Any, count: int) -> Any:
    """Vector of ``count`` codes at a byte of a row."""
    p = b.bitcast(b.gep(line, [place]), ir.VectorType(I8, count).as_pointer())
    x = b.load(p)
    x.align = 1
    return x
