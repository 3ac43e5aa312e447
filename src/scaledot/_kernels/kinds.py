"""In which numbers a kernel computes: a type that every inner function is compiled for.

Functions are written once. Their first argument is one of the types below, and what depends on it
is decided while compiling.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import types
from numba.np.arrayobj import populate_array

from scaledot._kernels import simd
from scaledot._kernels.jit import inlined, intrinsic
from scaledot._kernels.simd import I64, Vectors
from scaledot._kernels.target import HOST


class Single(NamedTuple):
    """Everything in float32, whatever the dtype of the arrays."""

    unused: int


class Pairs(NamedTuple):
    """Products of bfloat16, two by two, added to float32."""

    unused: int


class Double(NamedTuple):
    """Everything in float64."""

    unused: int


class Brain(NamedTuple):
    """Arrays of bfloat16, read in place; everything in float32."""

    unused: int


class Half(NamedTuple):
    """Arrays of float16, read in place; everything in float32."""

    unused: int


class Codes(NamedTuple):
    """Arrays of eight-bit codes with a float32 scale for each token; everything in float32."""

    unused: int


class CodePairs(NamedTuple):
    """Such arrays; products of bfloat16, which holds every code, two by two."""

    unused: int


def vectors(kind: Any) -> Vectors:
    """What emits vector code for a kind, from its Numba type."""
    return simd.DOUBLE if kind.instance_class is Double else simd.SINGLE


def is_pairs(kind: Any) -> bool:
    """Whether products are of pairs of bfloat16, from the kind's Numba type."""
    return kind.instance_class in (Pairs, CodePairs)


def is_codes(kind: Any) -> bool:
    """Whether arrays hold eight-bit codes."""
    return kind.instance_class in (Codes, CodePairs)


def is_code_pairs(kind: Any) -> bool:
    """Whether pairs of bfloat16 come from eight-bit codes."""
    return kind.instance_class is CodePairs


def widen(kind: Any) -> tuple[Any, Any]:
    """Type of the numbers in arrays that are read in place, and how a vector of them is read."""
    if kind.instance_class is Brain:
        return simd.I16, _read_brain
    if kind.instance_class is Half:
        return simd.I16, read_half
    if kind.instance_class is Codes:
        return simd.I8, lambda b, v, x: b.sitofp(b.sext(x, v.integers), v.vector)
    if is_code_pairs(kind):
        return simd.I16, None  # by two vectors at once, see `codes`
    raw = simd.I32 if is_pairs(kind) else vectors(kind).scalar
    return raw, lambda b, v, x: x


def _read_brain(b: Any, v: Vectors, x: Any) -> Any:
    wide = b.zext(x, v.integers)
    return b.bitcast(b.shl(wide, v.iconst(16)), v.vector)


def read_half(b: Any, v: Vectors, x: Any) -> Any:
    """By the processor's instruction, or by integers (see `pack`) where it may have none."""
    if HOST.f16:
        return b.fpext(b.bitcast(x, ir.VectorType(ir.HalfType(), v.lanes)), v.vector)
    wide = b.zext(x, v.integers)
    sign = b.shl(b.and_(wide, v.iconst(0x8000)), v.iconst(16))
    magnitude = b.shl(b.and_(wide, v.iconst(0x7FFF)), v.iconst(13))
    normal = b.bitcast(b.fmul(b.bitcast(magnitude, v.vector), v.const(2.0**112)), v.integers)
    special = b.icmp_unsigned(">=", magnitude, v.iconst(0x7C00 << 13))
    bits = b.select(special, b.or_(magnitude, v.iconst(0x7F800000)), normal)
    return b.bitcast(b.or_(bits, sign), v.vector)


def _constant(value: Any) -> Any:
    @intrinsic
    def constant(context: Any, kind: Any) -> Any:
        def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
            return I64(int(value(kind)))

        return types.intp(kind), emit

    return constant


def _item(kind: Any) -> int:
    if is_codes(kind):
        return 1
    halves = kind.instance_class in (Pairs, Brain, Half)
    return 2 if halves else vectors(kind).size


lanes = _constant(lambda kind: vectors(kind).lanes)
size = _constant(lambda kind: vectors(kind).size)
has_pairs = _constant(is_pairs)
"""1 for `Pairs` and `CodePairs`, else 0."""
item = _constant(_item)
"""Bytes of a number in the arrays."""
highest_bits = _constant(
    lambda kind: 0x7C00 if kind.instance_class is Half
    else {1: 0, 2: 0x7F80, 4: 0x7F800000, 8: 0x7FF << 52}[_item(kind)]
)
"""Bits of the exponent, all set in infinities and nan."""


@intrinsic
def number(context: Any, kind: Any, x: Any) -> Any:
    """A float64 as a number of the kind."""

    def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
        return args[1] if vectors(kind).double else b.fptrunc(args[1], simd.F32)

    return vectors(kind).number(kind, types.float64), emit


def _view(cx: Any, b: Any, sig: Any, address: Any, count: Any) -> Any:
    """Array on memory that it does not own; much less to compile than `numba.carray`."""
    kind = sig.return_type
    bytes_each = kind.dtype.bitwidth // 8
    array = cx.make_array(kind)(cx, b)
    pointer = b.inttoptr(address, cx.get_data_type(kind.dtype).as_pointer())
    populate_array(  # type: ignore[no-untyped-call]
        array, data=pointer, shape=[count], strides=[I64(bytes_each)], itemsize=I64(bytes_each),
        meminfo=None,
    )  # fmt: skip
    return array._getvalue()


@intrinsic
def numbers(context: Any, kind: Any, address: Any, count: Any) -> Any:
    """``count`` numbers of the kind at an address, as an array that owns nothing."""

    def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
        return _view(cx, b, sig, args[1], args[2])

    result = types.Array(vectors(kind).number, 1, "C")
    return result(kind, types.intp, types.intp), emit


def _viewer(dtype: Any) -> Any:
    @intrinsic
    def view(context: Any, address: Any, count: Any) -> Any:
        def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
            return _view(cx, b, sig, args[0], args[1])

        return types.Array(dtype, 1, "C")(types.intp, types.intp), emit

    return view


# Arrays of other types at an address: of bytes, of 16 and 32 bits without sign, of 64 with.
bytes_at, halves_at = _viewer(types.uint8), _viewer(types.uint16)
words_at, longs_at = _viewer(types.uint32), _viewer(types.int64)
floats_at, doubles_at = _viewer(types.float32), _viewer(types.float64)


SUBS = 4
"""Blocks of queries that share a tile of keys and values once it is converted."""
BLOCK_KV = 128
"""Keys of a tile; a multiple of every micro-kernel, and one block of a block mask."""
LONG = 2**18
"""Keys beyond which a task is one block of queries: Ctrl-C is seen between tasks."""


def subs_of(len_kv: int) -> int:
    """Blocks of queries in a task."""
    return SUBS if len_kv <= LONG else 1


subs = inlined(subs_of)


def block_q(lane: int, len_kv: int) -> int:
    """Queries of a task."""
    return subs_of(len_kv) * HOST.nr * lane
