"""Numbers in memory that threads share, and how a thread waits for one to change.

All are int64, at an address that is a multiple of 8.
"""

from __future__ import annotations

import platform
import sys
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from scaledot._kernels.jit import intrinsic, separate

_MACHINE = platform.machine()
_SYSCALL = {"x86_64": 202, "aarch64": 98}.get(_MACHINE) if sys.platform == "linux" else None
HAS_FUTEX = _SYSCALL is not None
"""Whether `sleep` and `wake` do anything: on Linux, on these processors."""
_WAIT, _WAKE = 128, 129  # private: among the threads of one process

SPINS = 4096
"""Pauses before a thread that waits for another's share lets others have its processor."""
NAP = 20_000
"""Nanoseconds of its sleep."""

_X86, _ARM = ("x86_64", "AMD64"), ("aarch64", "arm64")
_I32, _I64 = ir.IntType(32), ir.IntType(64)


def _place(b: Any, address: Any) -> Any:
    return b.inttoptr(address, _I64.as_pointer())


def _declared(b: Any, name: str, kind: Any) -> Any:
    return b.module.globals.get(name) or ir.Function(b.module, kind, name)


@intrinsic
def load(context: Any, address: Any) -> Any:
    """The number at an address, and all that was written before it."""

    def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.load_atomic(_place(b, args[0]), "acquire", 8)

    return types.int64(types.int64), emit


@intrinsic
def store(context: Any, address: Any, x: Any) -> Any:
    """Write a number, after all that was written before."""

    def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
        b.store_atomic(args[1], _place(b, args[0]), "release", 8)
        return cx.get_dummy_value()

    return types.void(types.int64, types.int64), emit


def _exchange(operation: str) -> Any:
    @intrinsic
    def exchange(context: Any, address: Any, x: Any) -> Any:
        def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
            return b.atomic_rmw(operation, _place(b, args[0]), args[1], "seq_cst")

        return types.int64(types.int64, types.int64), emit

    return exchange


add, swap = _exchange("add"), _exchange("xchg")


@intrinsic
def swap_if(context: Any, address: Any, expected: Any, x: Any) -> Any:
    """Write a number where another is expected; whether it was there."""

    def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
        pair = b.cmpxchg(_place(b, args[0]), args[1], args[2], "seq_cst", "seq_cst")
        return b.extract_value(pair, 1)

    return types.boolean(types.int64, types.int64, types.int64), emit


def _float_mode(b: Any) -> Any:
    """Where the thread's mode of floating point is kept; set is the one that processes begin in.

    None on processors whose mode is not known here.
    """
    if _MACHINE in _X86:
        kept = cgutils.alloca_once_value(b, _I32(0))  # type: ignore[no-untyped-call]
        _of_mode(b, "st", kept)
        _of_mode(b, "ld", cgutils.alloca_once_value(b, _I32(0x1F80)))  # type: ignore[no-untyped-call]
        return kept
    if _MACHINE in _ARM:
        read = _declared(b, "llvm.aarch64.get.fpcr", ir.FunctionType(_I64, []))
        kept = b.call(read, [])
        _set_fpcr(b, _I64(0))
        return kept
    return None


def _restore_float_mode(b: Any, kept: Any) -> None:
    """Set the mode that `_float_mode` found."""
    if _MACHINE in _X86:
        _of_mode(b, "ld", kept)
    elif _MACHINE in _ARM:
        _set_fpcr(b, kept)


def _of_mode(b: Any, way: str, place: Any) -> None:
    """Load or store x86-64's mode, ``way`` "ld" or "st", from or to 32 bits at a place."""
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer()])
    function = _declared(b, f"llvm.x86.sse.{way}mxcsr", kind)
    b.call(function, [b.bitcast(place, ir.IntType(8).as_pointer())])


def _set_fpcr(b: Any, mode: Any) -> None:
    """Set AArch64's mode; 0 is the one that processes begin in."""
    kind = ir.FunctionType(ir.VoidType(), [_I64])
    b.call(_declared(b, "llvm.aarch64.set.fpcr", kind), [mode])


@intrinsic
def invoke(context: Any, function: Any, call: Any, worker: Any, budget: Any) -> Any:
    """Call the function at an address: nearest rounding and subnormal numbers, whatever holds here.

    A library that was compiled for speed may have turned them off for the thread that loaded it,
    as PyTorch's compiled code does; every thread of a call has to give the same bits.
    """

    def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
        kind = ir.FunctionType(_I64, [_I64] * 3)
        kept = _float_mode(b)
        status = b.call(b.inttoptr(args[0], kind.as_pointer()), args[1:])
        _restore_float_mode(b, kept)
        return status

    return types.int64(*[types.int64] * 4), emit


@intrinsic
def pause(context: Any) -> Any:
    """Tell the processor that this thread spins."""

    def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
        if _MACHINE in _X86:
            b.call(_declared(b, "llvm.x86.sse2.pause", ir.FunctionType(ir.VoidType(), [])), [])
        elif _MACHINE in _ARM:
            hint = ir.FunctionType(ir.VoidType(), [_I32])
            b.call(_declared(b, "llvm.aarch64.hint", hint), [_I32(1)])
        return cx.get_dummy_value()

    return types.void(), emit


def _futex(b: Any, *arguments: Any) -> None:
    if _SYSCALL is not None:
        # By its name, not through ctypes: an address would be true in this process alone.
        syscall = _declared(b, "syscall", ir.FunctionType(_I64, [_I64], var_arg=True))
        b.call(syscall, [_I64(_SYSCALL), *arguments])


@intrinsic
def sleep(context: Any, address: Any, x: Any, nanoseconds: Any) -> Any:
    """Sleep while the lower half of a number is ``x``; 0 nanoseconds: for any time.

    It may return early: look again at the number.
    """

    def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
        address, x, total = args
        limit = cgutils.alloca_once(b, ir.ArrayType(_I64, 2))  # type: ignore[no-untyped-call]
        for i, part in enumerate((b.udiv(total, _I64(10**9)), b.urem(total, _I64(10**9)))):
            b.store(part, b.gep(limit, [_I32(0), _I32(i)]))
        is_limited = b.icmp_unsigned("!=", total, _I64(0))
        pointer = b.select(is_limited, b.ptrtoint(limit, _I64), _I64(0))
        _futex(b, address, _I64(_WAIT), x, pointer)
        return cx.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


@intrinsic
def wake(context: Any, address: Any) -> Any:
    """Wake a thread that sleeps until the number at an address changes."""

    def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
        _futex(b, args[0], _I64(_WAKE), _I64(1))
        return cx.get_dummy_value()

    return types.void(types.int64), emit


@separate
def wait_for(progress, share):  # type: ignore[no-untyped-def]
    """Return when all shares before this one have been added."""
    spins = 0
    while True:
        done = load(progress)
        if done == share:
            return
        spins += 1
        if spins < SPINS:
            pause()
        else:
            sleep(progress, done, NAP)
