"""Weights of a whole tile of keys for a block of queries, computed while its scores are.

At d_k = 64 an exponential takes a third of the time of the products that make its score, and half
of its instructions are additions, conversions and moves, for which processors have units that
products leave idle. They do not start early by themselves: a loop over products is longer than what
a processor looks ahead. So the weights of MR keys are computed between the products of the
next ones, by a program in assembly: compilers move such instructions together again, and then lack
registers. README.md has what it gains.

For `Pairs` alone, and for calls whose scores are the scaled products (`is_plain`).
"""

from __future__ import annotations

import functools
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba.core import types

from scaledot._kernels import simd
from scaledot._kernels.jit import inlined, intrinsic, separate
from scaledot._kernels.kinds import (
    BLOCK_KV,
    has_pairs,
    is_pairs,
    lanes,
    number,
    numbers,
    size,
    vectors,
)
from scaledot._kernels.layout import depth_of
from scaledot._kernels.simd import EXP2_SHORT, I32, I64, LOG2E, add_pairs, paired, rounded
from scaledot._kernels.target import HOST
from scaledot._kernels.tile import DEPTH, adjusts, more_3, start_3

llvm.initialize_native_asmparser()

MR, NR = HOST.mr, HOST.nr
STEPS = MR * NR
"""Products beside which the weights of MR keys are computed: one vector of them beside each."""
LIMIT = 1024.0
"""What the weights of a tile may sum to before the maximum of a row is raised.

The maximum is that of the first tile in which a query sees a key: any number near it would do. The
largest weight is not 1 then, which bfloat16 holds, but rounded: results are divided by the sum of
the rounded weights, in which that cancels; lse is told by the sum of the exact ones.
"""
INT = types.intp
LINE = 64  # bytes of a vector
MASS = 2 * LINE * NR
"""Bytes from the sums of weights of a tile to those of rounded weights."""
ONES = 0x3F803F80
"""A pair of bfloat16."""


@inlined
def is_plain(kind, call):  # type: ignore[no-untyped-def]
    """Whether scores are the scaled products, and their weights are used as they are."""
    moderate = call.scale > 2.0**-60 and call.scale < 2.0**60
    return has_pairs(kind) != 0 and moderate and call.threshold == 0 and not adjusts(call)


def _weights(b: Any, v: Any, s: Any, row_max: Any, twos: Any) -> Any:
    """Emit ``2**((s - row_max) · twos)``."""
    return v.exp2_short(b, b.fmul(b.fsub(s, row_max), twos))


@intrinsic
def start_rows(context: Any, kind: Any, top: Any, row_max: Any) -> Any:
    """``row_max = top`` where nothing has been seen."""
    v = vectors(kind)

    def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
        p_top, p_max = (simd.pointer(b, x, v.scalar) for x in args[1:])
        first, nothing = I64(0), v.const(float("-inf"))
        old = v.load(b, p_max, first)
        new = b.select(b.fcmp_ordered("==", old, nothing), v.load(b, p_top, first), old)
        v.store(b, p_max, first, new)
        return cx.get_dummy_value()

    return types.void(kind, INT, INT), emit


@intrinsic
def raise_rows(context: Any, kind: Any, top: Any, row_max: Any, row_sum: Any, row_mass: Any,
               factor: Any, total: Any, twos: Any) -> Any:  # fmt: skip
    """Raise the maxima of rows whose ``total`` is beyond `LIMIT`; rescale what was summed."""
    v = vectors(kind)

    def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
        p_top, p_max, p_sum, p_mass, p_factor, p_total = (
            simd.pointer(b, x, v.scalar) for x in args[1:7]
        )
        first = I64(0)
        old, total = v.load(b, p_max, first), v.load(b, p_total, first)
        here = v.maximum(b, v.load(b, p_top, first), old)
        new = b.select(b.fcmp_unordered(">", total, v.const(LIMIT)), here, old)
        a = v.exp2(b, b.fmul(b.fsub(old, new), v.splat(b, args[7])))
        # Where nothing has been seen, -inf - -inf would be nan.
        a = b.select(b.fcmp_ordered("==", old, new), v.const(1.0), a)
        v.store(b, p_max, first, new)
        for p in (p_sum, p_mass):
            v.store(b, p, first, b.fmul(v.load(b, p, first), a))
        v.store(b, p_factor, first, a)
        return cx.get_dummy_value()

    return types.void(kind, *(INT,) * 6, v.number), emit


@intrinsic
def weigh_products(context: Any, kind: Any, column: Any, stride: Any, count: Any, row_max: Any,
                   total: Any, mass: Any, pairs: Any, twos: Any) -> Any:  # fmt: skip
    """Write the weights of ``count`` keys to the column ``pairs``, and add them up.

    ``total`` gets their sum, ``mass`` that of what they are rounded to. ``count`` is even. The bits
    are those of `products_and_weights`.
    """
    v = vectors(kind)

    def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
        if not is_pairs(kind):
            return cx.get_dummy_value()
        p, p_max, p_total, p_mass = (simd.pointer(b, args[i], v.scalar) for i in (1, 4, 5, 6))
        goal, twos = simd.pointer(b, args[7], I32), v.splat(b, args[8])
        m = v.load(b, p_max, I64(0))
        m = b.select(b.fcmp_ordered("==", m, v.const(float("-inf"))), v.const(0.0), m)

        def body(i: Any, sums: list[Any]) -> list[Any]:
            places = [b.mul(b.add(i, I64(u)), args[2]) for u in range(2)]
            both = [_weights(b, v, v.load(b, p, place), m, twos) for place in places]
            pairs = paired(b, v, rounded(b, v, *both))
            v.store(b, goal, b.mul(b.lshr(i, I64(1)), args[2]), pairs)
            return [b.fadd(sums[0], b.fadd(*both)), add_pairs(b, v, pairs, v.iconst(ONES), sums[1])]

        before = [v.load(b, x, I64(0)) for x in (p_total, p_mass)]
        for x, new in zip((p_total, p_mass), simd.loop(b, args[3], 2, before, body), strict=True):
            v.store(b, x, I64(0), new)
        return cx.get_dummy_value()

    return types.void(kind, *(INT,) * 7, v.number), emit


def _any(b: Any, flags: list[Any]) -> Any:
    """Whether any lane of several vectors of flags is set."""
    bits = ir.IntType(flags[0].type.count)
    found = functools.reduce(b.or_, [b.bitcast(x, bits) for x in flags])
    return b.icmp_unsigned("!=", found, bits(0))


@intrinsic
def have_begun(context: Any, kind: Any, row_max: Any) -> Any:
    """Whether all rows of a block have seen a key."""
    v = vectors(kind)

    def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
        p, nothing = simd.pointer(b, args[1], v.scalar), v.const(float("-inf"))
        rows = [v.load(b, p, I64(v.lanes * n)) for n in range(NR)]
        return b.not_(_any(b, [b.fcmp_ordered("==", x, nothing) for x in rows]))

    return types.boolean(kind, INT), emit


def _take(count: int) -> Any:
    @intrinsic
    def take(context: Any, kind: Any, total: Any, mass: Any, row_sum: Any, row_mass: Any,
             factor: Any) -> Any:  # fmt: skip
        v = vectors(kind)

        def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
            p_total, p_mass, p_sum, of_mass, p_factor = (
                simd.pointer(b, x, v.scalar) for x in args[1:]
            )
            places = [I64(v.lanes * n) for n in range(count)]
            sums = [v.load(b, p_total, place) for place in places]
            # Unordered: nan may be what is infinite here.
            fit = b.not_(_any(b, [b.fcmp_unordered(">", x, v.const(LIMIT)) for x in sums]))
            with b.if_then(fit):
                for place, x in zip(places, sums, strict=True):
                    v.store(b, p_sum, place, b.fadd(v.load(b, p_sum, place), x))
                    more = v.load(b, p_mass, place)
                    v.store(b, of_mass, place, b.fadd(v.load(b, of_mass, place), more))
                    v.store(b, p_factor, place, v.const(1.0))
            return fit

        return types.boolean(kind, *(INT,) * 5), emit

    return take


take_column, take_block = _take(1), _take(NR)
"""Add the sums of a tile to those of the rows unless one is beyond `LIMIT`; return whether."""


@intrinsic
def add_total(context: Any, kind: Any, total: Any, row_sum: Any) -> Any:
    """Add a sum of a tile to that of the rows, whatever it is."""
    v = vectors(kind)

    def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
        p_total, p_sum = (simd.pointer(b, x, v.scalar) for x in args[1:])
        new = b.fadd(v.load(b, p_sum, I64(0)), v.load(b, p_total, I64(0)))
        v.store(b, p_sum, I64(0), new)
        return cx.get_dummy_value()

    return types.void(kind, INT, INT), emit


# The program. Registers 0 to 23 hold sums, 24 to 26 a line of B and 27 a number of A; 28 and 29
# belong to the weight that is being computed, 30 and 31 hold those of two keys. Names in braces are
# registers of addresses and counts: the rows {a0}, {a3} and {a6} of A, {lda} bytes apart, {b}, the
# products {s} of MR keys before, their weights {pairs}, the maxima {max} of the rows, the sums
# {total} of weights, behind them what differences are multiplied by and sums of rounded weights,
# the constants {t}.


def _step(beside: list[str]) -> list[str]:
    """Add a product to each sum; instructions ``beside`` are put between, in order."""
    rows = (
        "({a0})", "({a0},{lda})", "({a0},{lda},2)", "({a3})", "({a0},{lda},4)", "({a3},{lda},2)",
        "({a6})", "({a6},{lda})",
    )  # fmt: skip
    lines, rest = [f"vmovups {LINE * n}({{b}}), %zmm{24 + n}" for n in range(NR)], list(beside)
    for r, row in enumerate(rows):
        lines.append(f"vbroadcastss {row}, %zmm27")
        for n in range(NR):
            lines += [f"vdpbf16ps %zmm{24 + n}, %zmm27, %zmm{r * NR + n}", *rest[:1]]
            rest = rest[1:]
    steps = [f"addq $$4, {{{name}}}" for name in ("a0", "a3", "a6")]
    return [*lines, *rest, f"addq $${LINE * NR}, {{b}}", *steps]


def _weight(n: int, key: int) -> list[str]:
    """Weights of the first or second of two keys, column n; after the second, both are written."""
    at, p = LINE * n, 30 + key
    lines = [
        f"vmovups {at + LINE * NR * key}({{s}}), %zmm28",
        f"vsubps {at}({{max}}), %zmm28, %zmm28",
        f"vmulps {LINE * NR}({{total}}){{{{1to16}}}}, %zmm28, %zmm28",
        f"vbroadcastss ({{t}}), %zmm{p}",
        "vrndscaleps $$0, %zmm28, %zmm29",
        "vsubps %zmm29, %zmm28, %zmm28",
    ]
    for i in range(1, len(EXP2_SHORT)):
        lines.append(f"vfmadd213ps {4 * i}({{t}}){{{{1to16}}}}, %zmm28, %zmm{p}")
    lines.append(f"vscalefps %zmm29, %zmm{p}, %zmm{p}")
    if key == 1:
        lines += [
            f"vmovups {LINE}({{t}}), %zmm28",
            "vaddps %zmm30, %zmm31, %zmm29",
            "vcvtne2ps2bf16 %zmm30, %zmm31, %zmm30",
            f"vaddps {at}({{total}}), %zmm29, %zmm29",
            "vpermw %zmm30, %zmm28, %zmm30",
            f"vmovups %zmm29, {at}({{total}})",
            f"vmovups {at + MASS}({{total}}), %zmm28",
            f"vdpbf16ps {4 * len(EXP2_SHORT)}({{t}}){{{{1to16}}}}, %zmm30, %zmm28",
            f"vmovups %zmm30, {at}({{pairs}})",
            f"vmovups %zmm28, {at + MASS}({{total}})",
        ]
    return lines


def _program() -> list[str]:
    span = LINE * NR
    lines = [f"vpxord %zmm{i}, %zmm{i}, %zmm{i}" for i in range(MR * NR)]
    lines += [f"movq $${MR // 2}, {{n}}", "1:"]
    for n in range(NR):
        for key in range(2):
            lines += _step(_weight(n, key))
        if n < 2:  # two keys of the next MR in each round
            lines += ["prefetcht0 ({next})", f"prefetcht0 {LINE}({{next}})", "addq {lda}, {next}"]
    lines += [f"addq $${2 * span}, {{s}}", f"addq $${span}, {{pairs}}", "decq {n}", "jnz 1b"]
    lines += ["2:", *_step([]), "decq {rest}", "jnz 2b", f"subq $${MR * span}, {{s}}"]
    for i in range(MR * NR):
        lines.append(f"vmovups %zmm{i}, {LINE * i}({{s}})")
    return lines


def _constants() -> Any:
    """Words: the polynomial, ones; then the order in which halves of two vectors are paired."""
    words, n = np.zeros(2 * LINE // 4, dtype=np.uint32), LINE // 4
    words[: len(EXP2_SHORT)] = np.array(EXP2_SHORT, dtype=np.float32).view(np.uint32)
    words[len(EXP2_SHORT)] = ONES
    words[n:] = np.arange(2 * n, dtype=np.uint16).reshape(2, n).T.ravel().view(np.uint32)
    return words


def _table(b: Any) -> Any:
    """Address of the constants, in the module."""
    words = [I32(int(x)) for x in _constants()]
    kind = ir.ArrayType(I32, len(words))
    name = b.module.get_unique_name("overlap")
    table = ir.GlobalVariable(b.module, kind, name)
    table.linkage, table.global_constant, table.align = "internal", True, LINE
    table.initializer = ir.Constant(kind, words)
    return b.ptrtoint(table, I64)


@intrinsic
def products_and_weights(context: Any, kind: Any, a: Any, lda: Any, b: Any, depth: Any, scores: Any,
                         row_max: Any, total: Any, pairs: Any) -> Any:  # fmt: skip
    """``scores = A · B`` of MR keys, and the weights of those whose products were there.

    Row r of A is ``a[r * lda]``, ``depth`` (more than STEPS) pairs long; a line of B has NR
    vectors. Weights ``2**((score - row_max) · twos)`` go to ``pairs``, their sums are added to
    ``total``, behind which ``twos`` lies, and those of rounded weights (`sums_of_tile`).
    """

    def emit(cx: Any, bd: Any, sig: Any, args: Any) -> Any:
        if not is_pairs(kind):
            return cx.get_dummy_value()
        _, a, lda, b, depth, scores, row_max, total, pairs = args
        lda = bd.mul(lda, I64(4))
        at = {k: bd.add(a, bd.mul(lda, I64(k))) for k in (3, 6, MR)}
        changed = {
            "a0": a, "a3": at[3], "a6": at[6], "next": at[MR], "b": b, "s": scores, "pairs": pairs,
            "rest": bd.sub(depth, I64(STEPS)), "n": I64(0),
        }  # fmt: skip
        kept = {"lda": lda, "max": row_max, "total": total, "t": _table(bd)}
        count = len(changed)
        names = {name: f"${i}" for i, name in enumerate(changed)}
        names |= {name: f"${2 * count + i}" for i, name in enumerate(kept)}
        text = "\n".join(_program()).format(**names)
        registers = ["=&r"] * count + [str(i) for i in range(count)] + ["r"] * len(kept)
        clobbered = [f"~{{zmm{i}}}" for i in range(32)] + ["~{memory}", "~{flags}"]
        operands = [*changed.values(), *kept.values()]
        form = ir.FunctionType(ir.LiteralStructType([I64] * count), [I64] * len(operands))
        bd.asm(form, text, ",".join(registers + clobbered), operands, True)
        return cx.get_dummy_value()

    return types.void(kind, *(INT,) * 8), emit


@inlined
def sums_of_tile(kind, scratch):  # type: ignore[no-untyped-def]
    """Room for sums of weights, for a number behind them, and for sums of rounded weights."""
    return scratch.rows, scratch.rows + MASS


@separate
def weigh_scores(kind, call, scratch, sub, nr, first, last):  # type: ignore[no-untyped-def]
    """Weights of keys first..last whose products, with -inf where nothing is seen, are there."""
    span, twos = NR * lanes(kind), number(kind, call.scale * LOG2E)
    start, goal = size(kind) * first * span, size(kind) * first // 2 * span
    totals, masses = sums_of_tile(kind, scratch)
    for c in range(nr):
        column = size(kind) * c * lanes(kind)
        place = size(kind) * sub * span + column
        row_max, row_sum, row_mass = (scratch.row_max + place, scratch.row_sum + place,
                                      scratch.row_mass + place)  # fmt: skip
        top, factor, total, mass = (scratch.top + column, scratch.factor + column,
                                    totals + column, masses + column)  # fmt: skip
        scores, pairs = scratch.scores + start + column, scratch.pairs + goal + column
        start_rows(kind, top, row_max)
        for attempt in range(2):
            numbers(kind, total, lanes(kind))[:] = 0
            numbers(kind, mass, lanes(kind))[:] = 0
            weigh_products(kind, scores, span, last - first, row_max, total, mass, pairs, twos)
            if attempt == 1:
                add_total(kind, total, row_sum)
                add_total(kind, mass, row_mass)
            elif take_column(kind, total, mass, row_sum, row_mass, factor):
                break
            else:
                raise_rows(kind, top, row_max, row_sum, row_mass, factor, total, twos)


@separate
def weigh_tile(kind, call, scratch, sub, keys, k_step):  # type: ignore[no-untyped-def]
    """Weights of all keys of a tile, for rows that have begun; whether their maxima will do.

    Where they will not, nothing but scratch has been written.
    """
    span, depth = NR * lanes(kind), depth_of(kind, call)
    wide = -(-depth // lanes(kind)) * lanes(kind)
    panel = scratch.panels + size(kind) * sub * wide * span
    place, cut = size(kind) * sub * span, min(depth, DEPTH // 2)
    row_max, none = scratch.row_max + place, number(kind, 1.0)
    twos = number(kind, call.scale * LOG2E)
    totals, masses = sums_of_tile(kind, scratch)
    numbers(kind, totals, span)[:] = 0
    numbers(kind, masses, span)[:] = 0
    numbers(kind, totals + size(kind) * span, 1)[0] = twos
    for j in range(0, BLOCK_KV, MR):
        a = keys + size(kind) * j * k_step
        if j == 0:
            start_3(kind, a, k_step, 1, panel, span, cut, scratch.scores, span, 0, none)
        else:
            products_and_weights(
                kind, a, k_step, panel, cut, scratch.scores, row_max, totals,
                scratch.pairs + size(kind) * (j - MR) // 2 * span,
            )  # fmt: skip
        for i in range(cut, depth, cut):
            more_3(
                kind, a + size(kind) * i, k_step, 1, panel + size(kind) * i * span, span,
                min(cut, depth - i), scratch.scores, span, 0, none,
            )  # fmt: skip
    goal = scratch.pairs + size(kind) * (BLOCK_KV - MR) // 2 * span
    for c in range(NR):
        column = size(kind) * c * lanes(kind)
        weigh_products(
            kind, scratch.scores + column, span, MR, row_max + column, totals + column,
            masses + column, goal + column, twos,
        )  # fmt: skip
    return take_block(
        kind, totals, masses, scratch.row_sum + place, scratch.row_mass + place, scratch.factor
    )
