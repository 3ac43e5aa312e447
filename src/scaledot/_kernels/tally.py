"""What a tile of scores tells of its queries and keys, one column of vectors at a time.

Below, ``column`` is the address of a vector of queries at the first of ``count`` keys, and
``stride`` the numbers from one key to the next, as in `softmax`.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types

from scaledot._kernels import simd
from scaledot._kernels.jit import intrinsic
from scaledot._kernels.kinds import vectors
from scaledot._kernels.simd import I32, I64, LOG2E
from scaledot._kernels.softmax import UNROLL

INT = types.intp

# What is known and gathered of each query of a block: lines of ``span`` numbers.
SHIFT, INVERSE, LOG_SUM, THRESHOLD, ENTROPY, REACH, VISIBLE, LATE, MASS = range(9)
LINES = 9


@intrinsic
def tally(context: Any, kind: Any, column: Any, stride: Any, count: Any, lines: Any, step: Any,
          distance: Any, hits: Any) -> Any:  # fmt: skip
    """Turn scores into weights, in place, and gather what they tell about their queries.

    ``lines`` is the address of the vector in the first line, ``step`` the numbers from line to
    line, ``distance`` how far the first query is beyond the first key. Returns whether any weight
    is above its query's threshold; ``hits`` tells which.
    """
    v = vectors(kind)

    def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
        p, line = (simd.pointer(b, args[i], v.scalar) for i in (1, 4))
        counts, goal = simd.pointer(b, args[4], v.integer), simd.pointer(b, args[7], I32)
        at = [b.mul(args[5], I64(i)) for i in range(LINES)]
        known = [v.load(b, line, at[i]) for i in (SHIFT, INVERSE, LOG_SUM, THRESHOLD)]
        numbered = ir.Constant(v.vector, [float(i) for i in range(v.lanes)])
        start = b.fadd(v.splat(b, b.sitofp(args[6], v.scalar)), numbered)
        bits = ir.IntType(v.lanes)

        def body(i: Any, sums: list[Any]) -> list[Any]:
            entropy, reach, visible, far, found = sums
            for u in range(UNROLL):
                j = b.add(i, I64(u))
                at_key = b.mul(j, args[2])
                hidden, weight, surprise = _weighed(b, v, v.load(b, p, at_key), *known[:3])
                v.store(b, p, at_key, weight)
                entropy = b.fadd(entropy, surprise)
                reach = v.fma(b, weight, simd.call(b, f"llvm.fabs.{v.suffix}", v.vector, far),
                              reach)  # fmt: skip
                visible = b.add(visible, b.zext(b.not_(hidden), v.integers))
                above = b.bitcast(b.fcmp_ordered(">", weight, known[3]), bits)
                above = above if v.lanes >= 32 else b.zext(above, I32)
                b.store(above, b.gep(goal, [j]))
                found = b.or_(found, above)
                far = b.fsub(far, v.const(1.0))
            return [entropy, reach, visible, far, found]

        # Each tile is summed from zero: one sum over all keys would round worse than the yardstick.
        zero = v.const(0.0)
        sums = [zero, zero, v.iconst(0), start, I32(0)]
        entropy, reach, visible, _, found = simd.loop(b, args[3], UNROLL, sums, body)
        for which, more in ((ENTROPY, entropy), (REACH, reach)):
            v.store(b, line, at[which], b.fadd(v.load(b, line, at[which]), more))
        before = v.load(b, counts, at[VISIBLE], v.integer)
        v.store(b, counts, at[VISIBLE], b.add(before, visible))
        return b.icmp_unsigned("!=", found, I32(0))

    return types.boolean(kind, *(INT,) * 7), emit


def _weighed(b: Any, v: Any, s: Any, shift: Any, inverse: Any, log_sum: Any) -> tuple[Any, ...]:
    """Of a vector of scores: which are hidden, the weights, and ``-w log w``."""
    hidden = b.fcmp_ordered("==", s, v.const(float("-inf")))
    x = b.fsub(s, shift)
    weight = b.fmul(v.exp2(b, b.fmul(x, v.const(LOG2E))), inverse)
    nothing = b.fcmp_ordered("<", weight, v.const(2.0**v.lowest_exponent))
    # Of lanes without a query, scores are anything, nan too.
    nothing = b.or_(nothing, b.fcmp_ordered("==", inverse, v.const(0.0)))
    nothing = b.or_(nothing, hidden)
    weight = b.select(nothing, v.const(0.0), weight)
    surprise = b.fmul(weight, b.fsub(log_sum, x))
    return hidden, weight, b.select(nothing, v.const(0.0), surprise)


@intrinsic
def insert(context: Any, kind: Any, column: Any, stride: Any, count: Any, hits: Any, key: Any,
           best: Any, which: Any, most: Any) -> Any:  # fmt: skip
    """Put the weights of the keys that have a hit into the lists of their queries.

    ``best`` and ``which`` are columns of ``most`` weights and keys with the same stride. What is as
    large as a listed weight comes behind it: of equal weights those of the first keys are kept.
    """
    v = vectors(kind)

    def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
        p, lists = (simd.pointer(b, args[i], v.scalar) for i in (1, 6))
        flags, keys = simd.pointer(b, args[4], I32), simd.pointer(b, args[7], v.integer)

        def put(j: Any) -> None:
            number = b.add(args[5], j)
            number = number if v.double else b.trunc(number, I32)

            def body(i: Any, carried: list[Any]) -> list[Any]:
                weight, number, behind = carried
                place = b.mul(i, args[2])
                listed = v.load(b, lists, place)
                its_key = v.load(b, keys, place, v.integer)
                # Below the place where it goes in, everything moves one down.
                behind = b.or_(behind, b.fcmp_ordered(">", weight, listed))
                v.store(b, lists, place, b.select(behind, weight, listed))
                v.store(b, keys, place, b.select(behind, number, its_key))
                return [b.select(behind, listed, weight), b.select(behind, its_key, number), behind]

            nowhere = ir.Constant(ir.VectorType(simd.I1, v.lanes), [0] * v.lanes)
            weight = v.load(b, p, b.mul(j, args[2]))
            simd.loop(b, args[8], 1, [weight, v.splat(b, number), nowhere], body)

        def key_by_key(j: Any, carried: list[Any]) -> list[Any]:
            hit = b.icmp_unsigned("!=", b.load(b.gep(flags, [j])), I32(0))
            with b.if_then(hit, likely=False):
                put(j)
            return []

        simd.loop(b, args[3], 1, [], key_by_key)
        return cx.get_dummy_value()

    return types.void(kind, *(INT,) * 8), emit


@intrinsic
def sum_queries(context: Any, kind: Any, weights: Any, stride: Any, count: Any, width: Any,
                sums: Any) -> Any:  # fmt: skip
    """Add to each of ``count`` sums the weights of a key over ``width`` queries, full vectors."""
    v = vectors(kind)

    def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
        p, goal = (simd.pointer(b, args[i], v.scalar) for i in (1, 5))

        def body(j: Any, carried: list[Any]) -> list[Any]:
            row = b.gep(p, [b.mul(j, args[2])])

            def inner(i: Any, acc: list[Any]) -> list[Any]:
                return [b.fadd(acc[0], v.load(b, row, i))]

            total = simd.loop(b, args[4], v.lanes, [v.const(0.0)], inner)[0]
            place = b.gep(goal, [j])
            b.store(b.fadd(b.load(place), v.sum_lanes(b, total)), place)
            return []

        simd.loop(b, args[3], 1, [], body)
        return cx.get_dummy_value()

    return types.void(kind, *(INT,) * 5), emit


@intrinsic
def sum_keys(context: Any, kind: Any, weights: Any, stride: Any, count: Any, width: Any,
             sums: Any) -> Any:  # fmt: skip
    """Write for ``width`` queries, full vectors, their weights summed over ``count`` keys."""
    v = vectors(kind)

    def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
        p, goal = (simd.pointer(b, args[i], v.scalar) for i in (1, 5))

        def body(i: Any, carried: list[Any]) -> list[Any]:
            column = b.gep(p, [i])

            def inner(j: Any, acc: list[Any]) -> list[Any]:
                return [b.fadd(acc[0], v.load(b, column, b.mul(j, args[2])))]

            v.store(b, goal, i, simd.loop(b, args[3], 1, [v.const(0.0)], inner)[0])
            return []

        simd.loop(b, args[4], v.lanes, [], body)
        return cx.get_dummy_value()

    return types.void(kind, *(INT,) * 5), emit
