"""The micro-kernel: ``C[mr, nr vectors] += A[mr, depth] · B[depth, nr vectors]``.

Straight-line IR with all sums in registers, carried around the loop over depth.
"""

from __future__ import annotations

from typing import Any

from numba.core import types

from scaledot._kernels import simd
from scaledot._kernels.jit import intrinsic
from scaledot._kernels.simd import I64, LANES
from scaledot._kernels.target import HOST

ADDRESSES = (types.intp,) * 8


def _sums(b: Any, mr: int, nr: int, a: Any, lda: Any, bb: Any, ldb: Any, depth: Any) -> list[Any]:
    """Emit the loop over depth; return the mr·nr vectors of sums."""
    rows = [b.gep(a, [b.mul(lda, I64(r))]) for r in range(mr)]

    def body(i: Any, sums: list[Any]) -> list[Any]:
        line = b.gep(bb, [b.mul(i, ldb)])
        columns = [simd.load(b, line, I64(LANES * c)) for c in range(nr)]
        new = []
        for r in range(mr):
            x = simd.splat(b, b.load(b.gep(rows[r], [i])))
            new += [simd.fma(b, x, columns[c], sums[r * nr + c]) for c in range(nr)]
        return new

    return simd.loop(b, depth, 1, [simd.const(0.0)] * (mr * nr), body)


def make_scores(mr: int, nr: int, *, add: bool, maxima: bool) -> Any:
    """Build ``scores(a, lda, b, ldb, depth, c, ldc, top)``: C = A·B, or with ``add`` C += A·B.

    With ``maxima``, ``top[mr, lanes]`` is raised to those of the columns while C is still in
    registers.
    """

    @intrinsic
    def scores(context: Any, a: Any, lda: Any, b: Any, ldb: Any, depth: Any, c: Any, ldc: Any,
               top: Any) -> Any:  # fmt: skip
        def emit(cx: Any, bd: Any, sig: Any, args: Any) -> Any:
            pa, pb, pc, pt = (simd.pointer(bd, args[i]) for i in (0, 2, 5, 7))
            sums = _sums(bd, mr, nr, pa, args[1], pb, args[3], args[4])
            for r in range(mr):
                row = bd.gep(pc, [bd.mul(args[6], I64(r))])
                x = simd.load(bd, pt, I64(LANES * r)) if maxima else None
                for v in range(nr):
                    s = sums[r * nr + v]
                    if add:
                        s = bd.fadd(simd.load(bd, row, I64(LANES * v)), s)
                    simd.store(bd, row, I64(LANES * v), s)
                    x = simd.maximum(bd, x, s) if maxima else None
                if maxima:
                    simd.store(bd, pt, I64(LANES * r), x)
            return cx.get_dummy_value()

        return types.void(*ADDRESSES), emit

    return scores


score_tile = make_scores(HOST.mr, HOST.nr, add=False, maxima=True)
score_start = make_scores(HOST.mr, HOST.nr, add=False, maxima=False)
score_more = make_scores(HOST.mr, HOST.nr, add=True, maxima=False)
score_end = make_scores(HOST.mr, HOST.nr, add=True, maxima=True)
# O += P V: each tile is summed from zero and added once, which halves the error.
accumulate_tiles = tuple(
    make_scores(HOST.mr, n, add=True, maxima=False) for n in range(1, HOST.nr + 1)
)
