"""Online softmax of a tile of scores, one column of vectors at a time.

A tile holds ``scores[key][query]``: the lanes of a vector are queries, so that maxima and sums
over keys need no step across lanes. A running softmax holds for each query `row_max` (the papers'
m), `row_sum` (ℓ) and `acc` (O), the sum of values weighted by ``exp(score - row_max)``.

Below, ``column`` is the address of a vector of queries at the first of ``count`` keys (a multiple
of UNROLL), and ``stride`` the numbers from one key to the next.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types

from scaledot._kernels import simd
from scaledot._kernels.jit import intrinsic
from scaledot._kernels.kinds import is_pairs, vectors
from scaledot._kernels.simd import I32, I64, LOG2E, Vectors, paired, rounded

UNROLL = 4
INT = types.intp
# tanh on |x| ≤ 1/4: x + x³·(c₃ + c₅x² + ...), the Taylor series, highest power first; the first
# term left out is below 1e-8 x for float32 and below 1e-17 x for float64.
TANH_SINGLE = (62 / 2835, -17 / 315, 2 / 15, -1 / 3)
TANH_DOUBLE = (
    18888466084 / 194896477400625, -443861162 / 1856156927625, 6404582 / 10854718875,
    -929569 / 638512875, 21844 / 6081075, -1382 / 155925, *TANH_SINGLE,
)  # fmt: skip


def _folded(b: Any, xs: list[Any], join: Any) -> Any:
    while len(xs) > 1:
        xs = [join(b, *xs[i : i + 2]) for i in range(0, len(xs), 2)]
    return xs[0]


@intrinsic
def column_max(context: Any, kind: Any, column: Any, stride: Any, count: Any, top: Any) -> Any:
    """``top`` = the maxima of a column, nan passed over."""
    v = vectors(kind)

    def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
        p, goal = (simd.pointer(b, args[i], v.scalar) for i in (1, 4))

        def body(i: Any, tops: list[Any]) -> list[Any]:
            places = [b.mul(b.add(i, I64(u)), args[2]) for u in range(UNROLL)]
            loaded = [v.load(b, p, place) for place in places]
            return [v.maximum(b, s, top) for s, top in zip(loaded, tops, strict=True)]

        tops = simd.loop(b, args[3], UNROLL, [v.const(float("-inf"))] * UNROLL, body)
        v.store(b, goal, I64(0), _folded(b, tops, v.maximum))
        return cx.get_dummy_value()

    return types.void(kind, INT, INT, INT, INT), emit


@intrinsic
def raise_max(context: Any, kind: Any, top: Any, row_max: Any, row_sum: Any, factor: Any) -> Any:
    """Raise ``row_max`` to ``top``; ``factor = exp(old - new)`` rescales ``row_sum``."""
    v = vectors(kind)

    def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
        p_top, p_max, p_sum, p_factor = (simd.pointer(b, x, v.scalar) for x in args[1:])
        first = I64(0)
        old = v.load(b, p_max, first)
        new = v.maximum(b, v.load(b, p_top, first), old)
        a = v.exp2(b, b.fmul(b.fsub(old, new), v.const(LOG2E)))
        # Where nothing has been seen, -inf - -inf would be nan.
        a = b.select(b.fcmp_ordered("==", old, new), v.const(1.0), a)
        v.store(b, p_max, first, new)
        v.store(b, p_sum, first, b.fmul(v.load(b, p_sum, first), a))
        v.store(b, p_factor, first, a)
        return cx.get_dummy_value()

    return types.void(kind, INT, INT, INT, INT), emit


def _weigh(b: Any, v: Vectors, args: Any, goal: Any) -> None:
    """Emit the loop of `weigh`; weights go to ``goal`` in pairs, or where scores were."""
    p, p_max, p_sum = (simd.pointer(b, args[i], v.scalar) for i in (1, 4, 5))
    m = v.load(b, p_max, I64(0))
    m = b.select(b.fcmp_ordered("==", m, v.const(float("-inf"))), v.const(0.0), m)

    def body(i: Any, sums: list[Any]) -> list[Any]:
        new, found = [], []
        for u in range(UNROLL):
            place = b.mul(b.add(i, I64(u)), args[2])
            # Not one multiply-add: the rounding of m·log2(e) would show in lse.
            x = b.fmul(b.fsub(v.load(b, p, place), m), v.const(LOG2E))
            found.append(v.exp2(b, x))
            new.append(b.fadd(sums[u], found[u]))
            if goal is None:
                v.store(b, p, place, found[u])
        for u in range(0, UNROLL if goal else 0, 2):
            place = b.mul(b.lshr(b.add(i, I64(u)), I64(1)), args[2])
            v.store(b, goal, place, paired(b, v, rounded(b, v, *found[u : u + 2])))
        return new

    sums = simd.loop(b, args[3], UNROLL, [v.const(0.0)] * UNROLL, body)
    total = _folded(b, sums, lambda bd, x, y: bd.fadd(x, y))
    v.store(b, p_sum, I64(0), b.fadd(v.load(b, p_sum, I64(0)), total))


@intrinsic
def weigh(context: Any, kind: Any, column: Any, stride: Any, count: Any, row_max: Any,
          row_sum: Any) -> Any:  # fmt: skip
    """Turn scores into weights ``exp(score - row_max)`` in place; add them to ``row_sum``."""

    def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
        _weigh(b, vectors(kind), args, None)
        return cx.get_dummy_value()

    return types.void(kind, INT, INT, INT, INT, INT), emit


@intrinsic
def weigh_pairs(context: Any, kind: Any, column: Any, stride: Any, count: Any, row_max: Any,
                row_sum: Any, pairs: Any) -> Any:  # fmt: skip
    """Like `weigh`; the weights of two keys go side by side, rounded, to the column ``pairs``."""

    def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
        if is_pairs(kind):
            _weigh(b, vectors(kind), args, simd.pointer(b, args[6], I32))
        return cx.get_dummy_value()

    return types.void(kind, INT, INT, INT, INT, INT, INT), emit


@intrinsic
def pair_weights(context: Any, kind: Any, column: Any, stride: Any, count: Any, pairs: Any) -> Any:
    """Write weights as pairs of bfloat16, those of two keys side by side; else do nothing."""
    v = vectors(kind)

    def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
        p, goal = simd.pointer(b, args[1], v.scalar), simd.pointer(b, args[4], I32)

        def body(i: Any, carried: list[Any]) -> list[Any]:
            x, y = (v.load(b, p, b.mul(b.add(i, I64(u)), args[2])) for u in range(2))
            v.store(b, goal, b.mul(b.lshr(i, I64(1)), args[2]), paired(b, v, rounded(b, v, x, y)))
            return []

        if is_pairs(kind):
            simd.loop(b, args[3], 2, [], body)
        return cx.get_dummy_value()

    return types.void(kind, INT, INT, INT, INT), emit


def _tanh(b: Any, v: Vectors, x: Any) -> Any:
    """Hyperbolic tangent: a polynomial near 0, else (1 - e) / (1 + e) with e = exp(-2|x|)."""
    square = b.fmul(x, x)
    coefficients = TANH_DOUBLE if v.double else TANH_SINGLE
    p = v.const(coefficients[0])
    for coefficient in coefficients[1:]:
        p = v.fma(b, p, square, v.const(coefficient))
    near = v.fma(b, b.fmul(p, square), x, x)
    size = simd.call(b, f"llvm.fabs.{v.suffix}", v.vector, x)
    e = v.exp2(b, b.fmul(size, v.const(-2 * LOG2E)))
    far = b.fdiv(b.fsub(v.const(1.0), e), b.fadd(v.const(1.0), e))
    far = simd.call(b, f"llvm.copysign.{v.suffix}", v.vector, far, x)
    return b.select(b.fcmp_ordered("<", size, v.const(0.25)), near, far)


@intrinsic
def soft_cap(context: Any, kind: Any, scores: Any, count: Any, cap: Any) -> Any:
    """``cap · tanh(score / cap)`` on ``count`` scores (a multiple of the lanes) in place."""
    v = vectors(kind)

    def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
        p, c = simd.pointer(b, args[1], v.scalar), v.splat(b, args[3])

        def body(i: Any, carried: list[Any]) -> list[Any]:
            x = b.fdiv(v.load(b, p, i), c)
            v.store(b, p, i, b.fmul(_tanh(b, v, x), c))
            return []

        simd.loop(b, args[2], v.lanes, [], body)
        return cx.get_dummy_value()

    return types.void(kind, INT, INT, v.number), emit


def _weight_and_grad(b: Any, v: Vectors, s: Any, product: Any, row: Any, delta: Any) -> Any:
    """``P = exp(S - lse)`` and ``dS = P∘(product - delta)``; 0 where a key may not be seen.

    ``row`` is a pair of lse and of the power of two by which the weights are too small.
    """
    hidden = b.fcmp_ordered("==", s, v.const(float("-inf")))
    weight = v.exp2(b, v.fma(b, b.fsub(s, row[0]), v.const(LOG2E), row[1]))
    weight = b.select(hidden, v.const(0.0), weight)
    grad = b.fmul(weight, b.fsub(product, delta))
    return weight, b.select(hidden, v.const(0.0), grad)


@intrinsic
def weigh_back(context: Any, kind: Any, scores: Any, stride: Any, count: Any, lse: Any, shift: Any,
               delta: Any, products: Any) -> Any:  # fmt: skip
    """Turn scores into weights and products into gradients of scores, in place.

    ``scores`` and ``products`` are columns: ``P = exp(S - lse) 2**shift`` and
    ``dS = P∘(dO Vᵀ - delta)``, both 0 where a key may not be seen, whatever the rest holds.
    """
    v = vectors(kind)

    def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
        p, q = simd.pointer(b, args[1], v.scalar), simd.pointer(b, args[7], v.scalar)
        *row, d = (v.load(b, simd.pointer(b, args[i], v.scalar), I64(0)) for i in (4, 5, 6))

        def body(i: Any, carried: list[Any]) -> list[Any]:
            for u in range(UNROLL):
                place = b.mul(b.add(i, I64(u)), args[2])
                s, product = v.load(b, p, place), v.load(b, q, place)
                weight, grad = _weight_and_grad(b, v, s, product, row, d)
                v.store(b, p, place, weight)
                v.store(b, q, place, grad)
            return []

        simd.loop(b, args[3], UNROLL, [], body)
        return cx.get_dummy_value()

    return types.void(kind, *(INT,) * 7), emit


def _store_halves(b: Any, v: Vectors, rows: Any, places: list[Any], both: Any) -> None:
    """Both vectors of `rounded`, each to its place among 16-bit numbers."""
    for k, place in enumerate(places):
        order = ir.Constant(ir.VectorType(I32, v.lanes), [v.lanes * k + i for i in range(v.lanes)])
        v.store(b, rows, place, b.shuffle_vector(both, both, order))


def _rounded_back(weigh: bool) -> Any:
    @intrinsic
    def rounded_back(context: Any, kind: Any, scores: Any, stride: Any, count: Any, lse: Any,
                     shift: Any, delta: Any, products: Any, weights: Any, grads: Any,
                     pairs: Any) -> Any:  # fmt: skip
        v = vectors(kind)

        def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
            if not is_pairs(kind):
                return cx.get_dummy_value()
            p, q = simd.pointer(b, args[1], v.scalar), simd.pointer(b, args[7], v.scalar)
            *row, d = (v.load(b, simd.pointer(b, args[i], v.scalar), I64(0)) for i in (4, 5, 6))
            w16, g16 = (simd.pointer(b, args[i], simd.I16) for i in (8, 9))
            goal = simd.pointer(b, args[10], I32)

            def body(i: Any, carried: list[Any]) -> list[Any]:
                for u in range(0, UNROLL, 2):
                    places = [b.mul(b.add(i, I64(u + k)), args[2]) for k in range(2)]
                    found = [(v.load(b, p, at), v.load(b, q, at)) for at in places]
                    if weigh:
                        found = [_weight_and_grad(b, v, s, x, row, d) for s, x in found]
                    weights, grads = (rounded(b, v, *x) for x in zip(*found, strict=True))
                    _store_halves(b, v, w16, places, weights)
                    _store_halves(b, v, g16, places, grads)
                    line = b.mul(b.lshr(b.add(i, I64(u)), I64(1)), args[2])
                    v.store(b, goal, line, paired(b, v, grads))
                return []

            simd.loop(b, args[3], UNROLL, [], body)
            return cx.get_dummy_value()

        return types.void(kind, *(INT,) * 10), emit

    return rounded_back


# `weigh_back` for `Pairs`: weights and gradients go, rounded, to columns of 16-bit numbers, and
# the gradients of two keys side by side to the column ``pairs``. The second only rounds.
weigh_back_pairs, round_back = _rounded_back(True), _rounded_back(False)


@intrinsic
def soft_cap_slope(context: Any, kind: Any, grads: Any, scores: Any, count: Any,
                   cap: Any) -> Any:  # fmt: skip
    """Multiply gradients by the slope of the cap at the scores before it, ``1 - tanh²``.

    A gradient of 0 stays: where nothing is seen, the score may be nan.
    """
    v = vectors(kind)

    def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
        goal, p = (simd.pointer(b, args[i], v.scalar) for i in (1, 2))
        c = v.splat(b, args[4])

        def body(i: Any, carried: list[Any]) -> list[Any]:
            t = _tanh(b, v, b.fdiv(v.load(b, p, i), c))
            slope, grad = b.fsub(v.const(1.0), b.fmul(t, t)), v.load(b, goal, i)
            none = b.fcmp_ordered("==", grad, v.const(0.0))
            v.store(b, goal, i, b.select(none, grad, b.fmul(grad, slope)))
            return []

        simd.loop(b, args[3], v.lanes, [], body)
        return cx.get_dummy_value()

    return types.void(kind, INT, INT, INT, v.number), emit


@intrinsic
def soft_cap_bend(context: Any, kind: Any, grads: Any, first: Any, moved: Any, scores: Any,
                  count: Any, cap: Any) -> Any:  # fmt: skip
    """Second derivative of the cap, ``t = tanh(score / cap)``, on ``count`` numbers in place.

    ``grads = grads (1 - t²) - first · moved · 2 t (1 - t²) / cap`` and ``first = first (1 - t²)``;
    where both are 0 they stay, whatever the score is.
    """
    v = vectors(kind)

    def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
        g, f, m, p = (simd.pointer(b, args[i], v.scalar) for i in (1, 2, 3, 4))
        c, one, zero = v.splat(b, args[6]), v.const(1.0), v.const(0.0)

        def body(i: Any, carried: list[Any]) -> list[Any]:
            t = _tanh(b, v, b.fdiv(v.load(b, p, i), c))
            slope = b.fsub(one, b.fmul(t, t))
            bend = b.fdiv(b.fmul(b.fmul(v.const(-2.0), t), slope), c)
            old, first = v.load(b, g, i), v.load(b, f, i)
            more = b.fmul(b.fmul(first, bend), v.load(b, m, i))
            new = b.fadd(b.fmul(old, slope), more)
            none = b.and_(b.fcmp_ordered("==", old, zero), b.fcmp_ordered("==", first, zero))
            v.store(b, g, i, b.select(none, zero, new))
            v.store(b, f, i, b.select(none, zero, b.fmul(first, slope)))
            return []

        simd.loop(b, args[5], v.lanes, [], body)
        return cx.get_dummy_value()

    return types.void(kind, INT, INT, INT, INT, INT, v.number), emit


@intrinsic
def weigh_moved(context: Any, kind: Any, scores: Any, stride: Any, count: Any, lse: Any,
                shift: Any, moved: Any, mean: Any) -> Any:  # fmt: skip
    """Turn scores into weights and their tangents into weighted ones, columns in place.

    ``mean`` has the sums of the latter added; both are 0 where a key may not be seen.
    """
    v = vectors(kind)

    def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
        p, q = simd.pointer(b, args[1], v.scalar), simd.pointer(b, args[6], v.scalar)
        goal = simd.pointer(b, args[7], v.scalar)
        row = [v.load(b, simd.pointer(b, args[i], v.scalar), I64(0)) for i in (4, 5)]
        zero = v.const(0.0)

        def body(i: Any, sums: list[Any]) -> list[Any]:
            new = []
            for u in range(UNROLL):
                place = b.mul(b.add(i, I64(u)), args[2])
                weight, share = _weight_and_grad(
                    b, v, v.load(b, p, place), v.load(b, q, place), row, zero
                )
                v.store(b, p, place, weight)
                v.store(b, q, place, share)
                new.append(b.fadd(sums[u], share))
            return new

        sums = simd.loop(b, args[3], UNROLL, [zero] * UNROLL, body)
        total = _folded(b, sums, lambda bd, x, y: bd.fadd(x, y))
        v.store(b, goal, I64(0), b.fadd(v.load(b, goal, I64(0)), total))
        return cx.get_dummy_value()

    return types.void(kind, *(INT,) * 7), emit


@intrinsic
def weigh_second(context: Any, kind: Any, scores: Any, stride: Any, count: Any, rows: Any,
                 row_step: Any, moved: Any, products: Any, others: Any) -> Any:  # fmt: skip
    """Second derivatives by the scores of a tile, columns in place.

    ``rows`` holds lse, shift, delta, mu and mean, ``row_step`` numbers apart. With weights ``P``,
    tangents ``x`` of scores, products ``p`` of dO and V and ``o`` of dO and the values' tangents:
    ``products = P (x (p - delta) - mu p - mean + o)``, ``others = P (p - delta)``,
    ``scores = P (x - mu)``; all 0 where a key may not be seen.
    """
    v = vectors(kind)

    def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
        s, m, p, o = (simd.pointer(b, args[i], v.scalar) for i in (1, 6, 7, 8))
        known = simd.pointer(b, args[4], v.scalar)
        loaded = [v.load(b, known, b.mul(args[5], I64(k))) for k in range(5)]
        row, (delta, mu, mean) = loaded[:2], loaded[2:]
        zero = v.const(0.0)

        def body(i: Any, carried: list[Any]) -> list[Any]:
            for u in range(2):
                place = b.mul(b.add(i, I64(u)), args[2])
                score, product = v.load(b, s, place), v.load(b, p, place)
                weight, first = _weight_and_grad(b, v, score, product, row, delta)
                hidden = b.fcmp_ordered("==", score, v.const(float("-inf")))
                x = v.load(b, m, place)
                weighed = b.fmul(x, b.fsub(product, delta))
                weighed = b.fsub(b.fsub(weighed, b.fmul(mu, product)), mean)
                weighed = b.fmul(weight, b.fadd(weighed, v.load(b, o, place)))
                share = b.fmul(weight, b.fsub(x, mu))
                v.store(b, p, place, b.select(hidden, zero, weighed))
                v.store(b, o, place, first)
                v.store(b, s, place, b.select(hidden, zero, share))
            return []

        simd.loop(b, args[3], 2, [], body)
        return cx.get_dummy_value()

    return types.void(kind, *(INT,) * 8), emit
