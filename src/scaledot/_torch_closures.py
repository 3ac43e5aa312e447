"""Tensors that users' functions read besides their arguments."""

from __future__ import annotations

import contextlib
import functools
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor

MOST_OBJECTS = 10_000
"""Objects that are looked through."""
_PLAIN = (str, bytes, int, float, complex, np.ndarray, np.generic, type, ModuleType)


def enclosed(functions: Any) -> list[Tensor] | None:
    """Tensors that functions may read: in closures, defaults, globals, objects, containers.

    None where there is too much to look through.
    """
    found: list[Tensor] = []
    seen: dict[int, Any] = {}  # holds what it has seen, so that no number is given twice
    stack = [functions]
    while stack:
        x = stack.pop()
        if x is None or isinstance(x, _PLAIN) or id(x) in seen:
            continue
        seen[id(x)] = x
        if len(seen) > MOST_OBJECTS:
            return None
        if isinstance(x, Tensor):
            found.append(x)
        elif isinstance(x, (tuple, list, set, frozenset)):
            stack += x
        elif isinstance(x, dict):
            stack += x.values()
        else:
            stack += _parts_of(x)
    return found


def _parts_of(x: Any) -> list[Any]:
    """Objects that a function or an object refers to."""
    code = getattr(x, "__code__", None)
    parts = [getattr(x, name, None) for name in ("__self__", "__func__", "__wrapped__", "__dict__")]
    if isinstance(x, functools.partial):
        parts += [x.func, x.args, x.keywords]
    if not isinstance(code, CodeType):
        call = next((vars(c)["__call__"] for c in type(x).__mro__ if "__call__" in vars(c)), None)
        return [*parts, call if isinstance(call, FunctionType) else None]
    for cell in x.__closure__ or ():
        with contextlib.suppress(ValueError):  # not filled yet
            parts.append(cell.cell_contents)
    codes = [code]
    for inner in codes:  # functions made inside
        codes += [c for c in inner.co_consts if isinstance(c, CodeType)]
        parts += [x.__globals__.get(name) for name in inner.co_names]
    return [*parts, x.__defaults__, x.__kwdefaults__]
