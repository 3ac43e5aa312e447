"""What the bytecode of a user's function says: which names it reads, which arguments it uses."""

from __future__ import annotations

import dis
import functools
import types as python
from collections.abc import Iterator
from typing import Any

from numba.core.dispatcher import Dispatcher


@functools.lru_cache(maxsize=512)
def reads(
    code: python.CodeType, is_method: bool = False
) -> tuple[tuple[str, str, tuple[tuple[str, ...], ...]], ...]:
    """Names that a function reads from outside: (kind, name, chains of attributes read of it)."""
    found: dict[tuple[str, str], dict[tuple[str, ...], None]] = {}
    for kind, name, chain in _loads(code, code.co_varnames[0] if is_method else ""):
        if kind != "free" or name in code.co_freevars:
            found.setdefault((kind, name), {})[chain] = None
    return tuple((kind, name, tuple(chains)) for (kind, name), chains in found.items())


def _loads(code: python.CodeType, owner: str) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Loads of outer names, with the attributes that are loaded of each at once."""
    current: tuple[str, str] | None = None
    chain: list[str] = []
    for step in dis.get_instructions(code):
        if step.opname in ("EXTENDED_ARG", "PUSH_NULL", "NOP"):
            continue
        if current and step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            chain.append(step.argval)
            continue
        if current:
            yield (*current, tuple(chain))
        current, chain = None, []
        last = step.argval[-1] if isinstance(step.argval, tuple) and step.argval else step.argval
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            current = ("global", last)
        elif step.opname == "LOAD_DEREF" and last in code.co_freevars:
            current = ("free", last)
        elif owner and step.opname.startswith("LOAD_FAST") and last == owner:
            current = ("self", last)
    for inner in code.co_consts:
        if isinstance(inner, python.CodeType):
            yield from _loads(inner, "")


def origin(function: Any) -> object:
    """Code that functions made by one definition share; the type of what has none."""
    if isinstance(function, functools.partial):
        return origin(function.func)
    if isinstance(function, python.MethodType):
        return origin(function.__func__)
    if not isinstance(function, python.FunctionType):
        function = called(function)
    return type(function) if function is None else function.__code__


def uses(function: Any, position: int) -> bool:
    """Whether a function may depend on its positional argument: it does unless never loaded."""
    if isinstance(function, Dispatcher):
        function = function.py_func
    if isinstance(function, functools.partial):
        return uses(function.func, position + len(function.args))
    if isinstance(function, python.MethodType):
        return uses(function.__func__, position + 1)
    if isinstance(function, python.FunctionType):
        return _loaded(function.__code__, position)
    method = called(function)
    return method is None or uses(method, position + 1)


@functools.lru_cache(maxsize=512)
def _loaded(code: python.CodeType, position: int) -> bool:
    if position >= code.co_argcount:
        return True
    name = code.co_varnames[position]
    return any(
        step.opname != "MAKE_CELL"
        and (step.argval == name or (isinstance(step.argval, tuple) and name in step.argval))
        for step in dis.get_instructions(code)
    )


def called(x: object) -> python.FunctionType | None:
    """Method that runs when an object is called, where it is written in Python."""
    for kind in type(x).__mro__:
        method = vars(kind).get("__call__")
        if method is not None:
            return method if isinstance(method, python.FunctionType) else None
    return None
