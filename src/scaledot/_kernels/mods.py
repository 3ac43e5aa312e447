"""Users' ``score_mod`` and ``mask_mod``, compiled to functions that kernels call by address.

::

    status = score(scores, batch, head, q_pos, kv_pos, count)
        scores[i] = score_mod(scores[i], batch, head, q_pos + i, kv_pos)    for i in range(count)
    status = mask(seen, batch, head, q_pos, kv_pos, count)
        seen[i] = mask_mod(batch, head, q_pos + i, kv_pos)

All arguments are int64, the first an address of float32, float64 or uint8 numbers; the status is 1
when the user's function raised, else 0.
"""

from __future__ import annotations

import os
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numba
import numpy as np
from numba import carray  # type: ignore[attr-defined]
from numba.core import types
from numba.core.errors import NumbaError

from scaledot._errors import type_error, value_error
from scaledot._kernels.bytecode import origin, uses
from scaledot._kernels.closures import INSTEAD, Survey
from scaledot._kernels.jit import intrinsic
from scaledot._kernels.loads import callee, sources

KEPT = 64
"""Compiled functions that are kept, the least recently used of them is dropped."""

VARIANTS = 4
"""Sets of numbers that one definition is compiled for; with more, numbers are read at run time.

A mod that closes over the length of a growing cache would be compiled at each step.
"""
NEVER = -(2**60)

ENTRY = types.int64(*[types.int64] * 6)


@dataclass(frozen=True)
class Mod:
    """A compiled function; its address may be called as long as ``keep`` is alive.

    ``uses_batch`` and ``uses_head`` are false only for a function that never reads the argument.
    """

    address: int
    uses_batch: bool
    uses_head: bool
    keep: object


def compile_score_mod(
    function: Callable[..., Any], precision: Literal["float32", "float64"]
) -> Mod:
    """Compile ``score_mod(score, batch, head, q_pos, kv_pos)`` for scores of a precision.

    Cheap when a function with the same code and the same numbers in its closure was compiled
    before. Arrays that it reads are read where they are: changes in place are seen.
    """
    return _compiled("score_mod", function, precision)


def compile_mask_mod(function: Callable[..., Any]) -> Mod:
    """Compile ``mask_mod(batch, head, q_pos, kv_pos)``; see ``compile_score_mod``."""
    return _compiled("mask_mod", function, "uint8")


class _WrongResultError(Exception):
    """The user's function returns another type than it must."""


class _Lease:
    """Use of an instance by one or more Mods with the same arrays, until the last is dropped."""

    def __init__(self, instance: _Instance, arrays: list[Any]) -> None:
        self.instance, self.arrays = instance, arrays


class _Instance:
    """Code that reads its arrays through one block of addresses."""

    def __init__(self, name: str, form: Any, precision: str, words: list[int]) -> None:
        self.block = np.array(words, dtype=np.int64)
        self.words = words
        self.lease: Callable[[], _Lease | None] = lambda: None
        signature = _signature(name, precision)
        target = callee(form, self.block.ctypes.data, len(signature))
        target.compile(signature)
        result = target.overloads[signature].signature.return_type
        if not isinstance(result, types.Float if name == "score_mod" else types.Boolean):
            raise _WrongResultError(str(result))
        entry = _score_entry if name == "score_mod" else _mask_entry
        self.code = numba.cfunc(ENTRY, error_model="numpy")(entry(target, _viewer(precision)))
        self.address: int = self.code.address  # type: ignore[assignment]

    def bind(self, words: list[int], arrays: list[Any]) -> _Lease:
        """Point the code to arrays; nobody may be running it."""
        self.block[:] = words
        self.words = words
        lease = _Lease(self, arrays)
        self.lease = weakref.ref(lease)
        return lease


class _Program:
    """All instances of one form: one, unless calls with other arrays run at the same time."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        first = 1 if name == "score_mod" else 0
        self.uses_batch, self.uses_head = uses(function, first), uses(function, first + 1)
        self.lock = threading.Lock()
        self.instances: list[_Instance] = []
        self.failure: tuple[str, str] | None = None

    def lease(self, name: str, survey: Survey, precision: str) -> _Lease | None:
        """An instance that reads the survey's arrays; None where there is no compiling it."""
        with self.lock:
            if self.failure:
                return None
            free = None
            for instance in self.instances:
                lease = instance.lease()
                if lease is None:
                    free = instance
                elif instance.words == survey.words:
                    return lease
            if free is None:
                free = self._compiled(name, survey, precision)
            return None if free is None else free.bind(survey.words, survey.arrays)

    def _compiled(self, name: str, survey: Survey, precision: str) -> _Instance | None:
        try:
            instance = _Instance(name, survey.form, precision, survey.words)
        except _WrongResultError as error:
            self.failure = ("result", str(error))
            return None
        except Exception as error:  # of any kind: Numba fails in many ways, none of them ours
            self.failure = ("code", _reason(error, survey.form))
            return None
        self.instances.append(instance)
        return instance


_programs: OrderedDict[Any, _Program] = OrderedDict()
_variants: OrderedDict[Any, int] = OrderedDict()  # programs compiled of one definition
_lock = threading.Lock()


def _after_fork() -> None:
    """Let go, in a child, of what threads held that it has not."""
    global _lock
    _lock = threading.Lock()
    for program in _programs.values():
        program.lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _compiled(name: str, function: Callable[..., Any], precision: str) -> Mod:
    source = (name, precision, origin(function))
    live = _variants.get(source, 0) >= VARIANTS
    program, lease = _leased(name, function, precision, live)
    if lease is None and live:  # some number must be a constant
        _variants[source] = NEVER
        program, lease = _leased(name, function, precision, False)
    if lease is not None:
        return Mod(lease.instance.address, program.uses_batch, program.uses_head, lease)
    assert program.failure is not None
    kind, given = program.failure
    if kind == "result":
        wanted = "a floating-point number" if name == "score_mod" else "a boolean"
        raise type_error(f"{name} must return {wanted}", given, "Combine its arguments.")
    raise value_error(f"{name} must be a function that Numba can compile", given, INSTEAD)


def _leased(
    name: str, function: Callable[..., Any], precision: str, live: bool
) -> tuple[_Program, _Lease | None]:
    survey = Survey(name, function, live)
    key = (name, precision, survey.form)
    with _lock:
        program = _programs.get(key)
        if program is None:
            program = _programs[key] = _Program(name, function)
            source = (name, precision, origin(function))
            _variants[source] = _variants.pop(source, 0) + 1
            for kept, most in ((_programs, KEPT), (_variants, 8 * KEPT)):
                if len(kept) > most:
                    kept.popitem(last=False)
        else:
            _programs.move_to_end(key)
    return program, program.lease(name, survey, precision)


def _signature(name: str, precision: str) -> tuple[Any, ...]:
    score = (getattr(types, precision),) if name == "score_mod" else ()
    return (*score, *[types.int64] * 4)


def _viewer(precision: str) -> Any:
    """Make the intrinsic that takes an address for a pointer to numbers."""
    pointer_type = types.CPointer(getattr(types, precision))  # type: ignore[no-untyped-call]

    @intrinsic
    def pointer(context: Any, address: Any) -> Any:
        def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
            return b.inttoptr(args[0], cx.get_value_type(sig.return_type))

        return pointer_type(types.int64), emit

    return pointer


# The status of each call is a constant for functions that cannot raise, so that nothing of the
# try block is left in their loops and LLVM makes vector code of them.


def _score_entry(mod: Any, pointer: Any) -> Callable[..., int]:
    def entry(scores: Any, batch: Any, head: Any, q_pos: Any, kv_pos: Any, count: Any) -> int:
        row = carray(pointer(scores), count)
        try:
            for i in range(count):
                row[i] = mod(row[i], batch, head, q_pos + i, kv_pos)
        except Exception:
            return 1
        return 0

    return entry


def _mask_entry(mod: Any, pointer: Any) -> Callable[..., int]:
    def entry(seen: Any, batch: Any, head: Any, q_pos: Any, kv_pos: Any, count: Any) -> int:
        row = carray(pointer(seen), count)
        try:
            for i in range(count):
                row[i] = mod(batch, head, q_pos + i, kv_pos)
        except Exception:
            return 1
        return 0

    return entry


LINE = re.compile(r'File "([^"]+)", line (\d+)')
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
AROUND = ("Failed in", "During:", "File ", "- Resolution failure", "<")  # lines that say no reason


def _reason(error: Exception, form: Any) -> str:
    """Place in the user's source, and the first that the compiler says about it."""
    message = COLOURS.sub("", str(error))
    codes = list(sources(form))
    files = {code.co_filename for code in codes}
    # The innermost function comes first. Numba shortens paths: ../folder/file.py.
    found = (
        (full, line) for file, line in LINE.findall(message)
        for full in files if full.endswith(file.lstrip("./"))
    )  # fmt: skip
    file, line = next(found, (codes[0].co_filename, codes[0].co_firstlineno) if codes else ("", 0))
    lines = [x for x in map(str.strip, message.splitlines()) if x and not x.startswith(AROUND)]
    said = lines[0] if lines else f"it raised {type(error).__name__}"
    if said.endswith("found for signature:") and len(lines) > 1:
        said += lines[1].replace(">>>", "")
    if not isinstance(error, NumbaError):
        said = f"{type(error).__name__}: {said}"
    said = said.rstrip(".:")
    return f"{file}, line {line}: {said}" if file else said
