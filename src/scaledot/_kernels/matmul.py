"""The micro-kernel: ``C[mr, nr vectors] += A[mr, depth] · B[depth, nr vectors]``.

Straight-line IR with all sums in registers, carried around the loop over depth. Each tile is
summed from zero and then added once, which halves the error of one long sum.
"""

from __future__ import annotations

from typing import Any

from numba.core import types

from scaledot._kernels import simd
from scaledot._kernels.jit import intrinsic
from scaledot._kernels.kinds import is_pairs, vectors
from scaledot._kernels.simd import I32, I64, Vectors, add_pairs
from scaledot._kernels.target import HOST

STRIDES = (types.intp,) * 9


def _sums(
    b: Any, v: Vectors, mr: int, nr: int, pairs: bool,
    a: Any, lda: Any, step: Any, bb: Any, ldb: Any, depth: Any,
) -> list[Any]:  # fmt: skip
    """Emit the loop over depth; return the mr·nr vectors of sums.

    With ``pairs`` an element is a pair of bfloat16 and a product is the sum of two.
    """
    element = I32 if pairs else v.scalar
    a, bb = (simd.pointer(b, x, element) for x in (a, bb))
    rows = [b.gep(a, [b.mul(lda, I64(r))]) for r in range(mr)]

    def add(x: Any, y: Any, total: Any) -> Any:
        return add_pairs(b, v, x, y, total) if pairs else v.fma(b, x, y, total)

    def body(i: Any, sums: list[Any]) -> list[Any]:
        line, place = b.gep(bb, [b.mul(i, ldb)]), b.mul(i, step)
        columns = [v.load(b, line, I64(v.lanes * c), element) for c in range(nr)]
        new = []
        for r in range(mr):
            x = v.splat(b, b.load(b.gep(rows[r], [place])))
            new += [add(x, columns[c], sums[r * nr + c]) for c in range(nr)]
        return new

    return simd.loop(b, depth, 1, [v.const(0.0)] * (mr * nr), body)


def make_scores(nr: int, *, add: bool, last: bool) -> Any:
    """Build ``scores(kind, a, lda, step, b, ldb, depth, c, ldc, top, scale)``: C (+)= A·B.

    A[r, i] is ``a[r * lda + i * step]``. With ``last``, C is multiplied by ``scale`` and
    ``top[nr vectors]`` is raised to the columns' maxima, both while C is still in registers.
    Factors that were scaled before would be rounded once more, or overflow.
    """

    @intrinsic
    def scores(context: Any, kind: Any, a: Any, lda: Any, step: Any, b: Any, ldb: Any, depth: Any,
               c: Any, ldc: Any, top: Any, scale: Any) -> Any:  # fmt: skip
        v, pairs = vectors(kind), is_pairs(kind)

        def emit(cx: Any, bd: Any, sig: Any, args: Any) -> Any:
            args = args[1:]
            sums = _sums(bd, v, HOST.mr, nr, pairs, *args[:6])
            pc, pt = (simd.pointer(bd, args[i], v.scalar) for i in (6, 8))
            tops = [v.load(bd, pt, I64(v.lanes * n)) for n in range(nr)] if last else []
            factor = v.splat(bd, args[9]) if last else None
            for r in range(HOST.mr):
                row = bd.gep(pc, [bd.mul(args[7], I64(r))])
                for n in range(nr):
                    s, place = sums[r * nr + n], I64(v.lanes * n)
                    if add:
                        s = bd.fadd(v.load(bd, row, place), s)
                    if factor is not None:
                        s = bd.fmul(s, factor)
                    v.store(bd, row, place, s)
                    if last:
                        tops[n] = v.maximum(bd, s, tops[n])
            for n, x in enumerate(tops):
                v.store(bd, pt, I64(v.lanes * n), x)
            return cx.get_dummy_value()

        return types.void(kind, *STRIDES, v.number), emit

    return scores


def make_accumulate(nr: int) -> Any:
    """Build ``accumulate(kind, a, lda, step, b, ldb, depth, c, ldc, factor)``.

    C = C · factor + A·B, where ``factor[nr vectors]`` holds one number for each column: a running
    softmax is rescaled (FlashAttention's ``diag(exp(m_old - m_new)) O + P V``) by the same
    multiply-adds that add to it.
    """

    @intrinsic
    def accumulate(context: Any, kind: Any, a: Any, lda: Any, step: Any, b: Any, ldb: Any,
                   depth: Any, c: Any, ldc: Any, factor: Any) -> Any:  # fmt: skip
        v = vectors(kind)

        def emit(cx: Any, bd: Any, sig: Any, args: Any) -> Any:
            args = args[1:]
            sums = _sums(bd, v, HOST.mr, nr, is_pairs(kind), *args[:6])
            pc, pf = (simd.pointer(bd, args[i], v.scalar) for i in (6, 8))
            factors = [v.load(bd, pf, I64(v.lanes * n)) for n in range(nr)]
            for r in range(HOST.mr):
                row = bd.gep(pc, [bd.mul(args[7], I64(r))])
                for n in range(nr):
                    place = I64(v.lanes * n)
                    old = v.load(bd, row, place)
                    v.store(bd, row, place, v.fma(bd, old, factors[n], sums[r * nr + n]))
            return cx.get_dummy_value()

        return types.void(kind, *STRIDES), emit

    return accumulate
