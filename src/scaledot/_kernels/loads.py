"""Rebuild a user's function out of its form, with arrays that are loaded at run time."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import builtins
import inspect
import types as python
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numba
import numpy as np
from llvmlite import ir as llvm
from numba.core import ir, types
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import FunctionPass, register_pass
from numba.core.untyped_passes import InlineClosureLikes
from numba.np.arrayobj import make_array, populate_array
from numba.np.numpy_support import from_dtype

from scaledot._kernels.closures import Bound, Form, Leaf, Live, Members, Routine, Sequence
from scaledot._kernels.jit import intrinsic

OWNER = "_scaledot_owner"


class Load:
    """Stands in a closure for an array: calling ``function`` in compiled code gives its view."""

    def __init__(self, function: Any) -> None:
        self.function = function


class Parts:
    """Stands for a tuple that holds loads."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values


class Known:
    """Stands for an object or module by those of its attributes that are read."""

    def __init__(self, attributes: dict[str, Any]) -> None:
        self.attributes = attributes


@register_pass(mutates_CFG=False, analysis_only=False)
class PutLoads(FunctionPass):
    """Replace what stands for arrays, tuples and attributes by code that gives them."""

    _name = "scaledot_put_loads"

    def __init__(self) -> None:
        super().__init__()

    def run_pass(self, state: Any) -> bool:
        """Rewrite all assignments of a function."""
        self._ir = state.func_ir
        self._known: dict[str, Known] = {}
        self._owner = getattr(state.func_id.func, OWNER, None)
        for label in sorted(self._ir.blocks):
            block = self._ir.blocks[label]
            body: list[Any] = []
            for statement in block.body:
                if isinstance(statement, ir.Assign):
                    body += self._replaced(statement, block.scope)
                else:
                    body.append(statement)
            block.body = body
        return True

    def _replaced(self, statement: Any, scope: Any) -> list[Any]:
        value, target = statement.value, statement.target
        if isinstance(value, ir.Arg) and value.index == 0 and self._owner is not None:
            self._known[target.name] = self._owner
        elif isinstance(value, ir.Var) and value.name in self._known:
            self._known[target.name] = self._known[value.name]
        elif isinstance(value, (ir.FreeVar, ir.Global)):
            if isinstance(value.value, (Load, Parts, Known)):
                return self._given(value.value, target, scope, statement.loc)
        elif isinstance(value, ir.Expr) and value.op == "getattr":
            known = self._known.get(value.value.name)
            if known is not None and value.attr in known.attributes:
                found = known.attributes[value.attr]
                return self._given(found, target, scope, statement.loc)
        return [statement]

    def _given(self, value: Any, target: Any, scope: Any, loc: Any) -> list[Any]:
        """Statements that give a value to a variable."""
        before: list[Any] = []
        expression: Any
        if isinstance(value, Load):
            called = scope.redefine("load", loc)
            before = self._given(value.function, called, scope, loc)
            expression = ir.Expr.call(called, (), (), loc)
        elif isinstance(value, Parts):
            items = [scope.redefine("part", loc) for _ in value.values]
            for item, part in zip(items, value.values, strict=True):
                before += self._given(part, item, scope, loc)
            expression = ir.Expr.build_tuple(items, loc)
        elif isinstance(value, Known):
            self._known[target.name] = value
            expression = ir.Const(0, loc)  # nothing but attributes is read of it
        else:
            expression = ir.Global("value", value, loc)
        self._ir._definitions[target.name] = [expression]
        return [*before, ir.Assign(expression, target, loc)]


class Pipeline(CompilerBase):
    """Numba's own passes, and the one above."""

    def define_pipelines(self) -> list[Any]:
        """List the passes: once closures are part of their callers, all names are in sight."""
        manager = DefaultPassBuilder.define_nopython_pipeline(self.state)
        manager.add_pass_after(PutLoads, InlineClosureLikes)
        manager.finalize()
        return [manager]


def compiled(function: Any) -> Any:
    """Compile a piece of a user's function; an index out of bounds is an error."""
    options: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return numba.njit(
        nogil=True, boundscheck=True, error_model="numpy", pipeline_class=Pipeline, **options
    )(function)


@compiled
def _where(condition, x, y):  # type: ignore[no-untyped-def]
    return x if condition else y


@compiled
def _clip(x, a_min=None, a_max=None, min=None, max=None):  # type: ignore[no-untyped-def]
    if a_min is not None:
        x = np.maximum(x, a_min)
    if min is not None:
        x = np.maximum(x, min)
    if a_max is not None:
        x = np.minimum(x, a_max)
    if max is not None:
        x = np.minimum(x, max)
    return x


@compiled
def _astype(x, dtype):  # type: ignore[no-untyped-def]
    return dtype(x)


# Numba has these for arrays only.
OWN: dict[Any, Any] = {np.where: _where, np.clip: _clip}
if hasattr(np, "astype"):  # since NumPy 2.1
    OWN[np.astype] = _astype


def callee(form: Form, block: int, count: int) -> Any:
    """Compilable function of ``count`` arguments, which reads arrays through the block there."""
    if isinstance(form, Routine) and form.defaults:
        given = form.names[:count]
        rest = tuple(part for part in form.defaults if part[0] not in given)
        form = Bound(replace(form, defaults=()), (), rest)
    value = _Builder(block).value(form)
    exact = isinstance(form, Routine) and not form.code.co_flags & inspect.CO_VARARGS
    if exact or isinstance(form, Bound):
        return value
    names = ", ".join(f"x{i}" for i in range(count))
    return _written(f"lambda {names}: _function({names})", {"_function": value})


def sources(form: Form) -> Iterator[python.CodeType]:
    """Code of a function and of all that it calls."""
    if isinstance(form, Routine):
        yield form.code
        for _, _, part in form.reads:
            yield from sources(part)
    elif isinstance(form, Bound):
        yield from sources(form.function)
    elif isinstance(form, Members):
        for _, part in form.parts:
            yield from sources(part)
    elif isinstance(form, Leaf) and hasattr(form.value, "py_func"):
        yield form.value.py_func.__code__


class _Builder:
    """Values that stand in closures, for one block."""

    def __init__(self, block: int) -> None:
        self.block = block

    def value(self, form: Form) -> Any:
        if isinstance(form, Leaf):
            try:
                return OWN.get(form.value, form.value)
            except TypeError:  # not hashable
                return form.value
        if isinstance(form, Live):
            return Load(_loader(self.block + form.offset, form))
        if isinstance(form, Sequence):
            return Parts([self.value(part) for part in form.parts])
        if isinstance(form, Members):
            return Known({name: self.value(part) for name, part in form.parts})
        if isinstance(form, Bound):
            return self._bound(form)
        return self._routine(form)

    def _routine(self, form: Routine) -> Any:
        values = {(kind, name): self.value(part) for kind, name, part in form.reads}
        names = {name: x for (kind, name), x in values.items() if kind == "global"}
        cells = tuple(
            python.CellType(values["free", name]) if ("free", name) in values
            else python.CellType() for name in form.code.co_freevars
        )  # fmt: skip
        # Numba knows no arguments by name only; in the code they lie behind the others.
        count = form.code.co_argcount + form.code.co_kwonlyargcount
        code = form.code.replace(co_argcount=count, co_kwonlyargcount=0)
        outer = {"__builtins__": builtins, **names}
        function = python.FunctionType(code, outer, code.co_name, None, cells)
        if form.is_method:
            setattr(function, OWNER, values.get(("self", code.co_varnames[0]), Known({})))
        defaults = {name: self.value(part) for name, part in form.defaults}
        live = any(isinstance(x, (Load, Parts)) for x in defaults.values())
        if defaults and not live:
            arguments = code.co_varnames[:count]
            first = min(arguments.index(name) for name in defaults)
            function.__defaults__ = tuple(defaults.get(name) for name in arguments[first:])
        target = compiled(function)
        if form.is_method or live:
            return _fixed(target, form.is_method, form.required, defaults if live else {})
        return target

    def _bound(self, form: Bound) -> Any:
        inner, fixed = form.function, {}
        if isinstance(inner, Routine):
            # Defaults are passed by the caller, as other values may be.
            fixed = dict(inner.defaults)
            inner = replace(inner, defaults=())
            names = inner.names
        else:
            function = inner.value.py_func
            names = function.__code__.co_varnames[: function.__code__.co_argcount]
            names = names[: len(names) - len(function.__defaults__ or ())]
        fixed |= dict(zip(names, form.first, strict=False))
        fixed |= dict(form.named)
        free = tuple(name for name in names if name not in fixed)
        values = {name: self.value(part) for name, part in fixed.items()}
        return _fixed(self.value(inner), False, free, values)


def _fixed(function: Any, is_method: bool, free: tuple[str, ...], fixed: dict[str, Any]) -> Any:
    """Function of some arguments, with values for others and 0 for the owner of a method."""
    given = ["0"] * is_method + [f"{name}={name}" for name in free]
    given += [f"{name}=_{name}" for name in fixed]
    names = {f"_{name}": value for name, value in fixed.items()}
    text = f"lambda {', '.join(free)}: _function({', '.join(given)})"
    return _written(text, {"_function": function, **names})


def _written(text: str, names: dict[str, Any]) -> Any:
    return compiled(eval(text, {"__builtins__": builtins, **names}))


def _loader(address: int, form: Live) -> Any:
    """Make the function that reads the block at an address and gives the array, or number."""
    dtype = from_dtype(np.dtype(form.dtype))
    order: Any = form.order
    array = types.Array(dtype, form.ndim, order, readonly=True)

    @intrinsic
    def load(context: Any) -> Any:
        def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
            i64 = llvm.IntType(64)

            def constant(place: Any) -> Any:
                # Nothing writes here during a call: the load may leave the loop.
                loaded = b.load(place)
                loaded.set_metadata("invariant.load", b.module.add_metadata([]))
                return loaded

            def word(i: int) -> Any:
                return constant(b.inttoptr(i64(address + 8 * i), i64.as_pointer()))

            data = b.inttoptr(word(0), cx.get_data_type(dtype).as_pointer())
            if form.ndim == 0:
                return cx.data_model_manager[dtype].from_data(b, constant(data))
            view = make_array(array)(cx, b)
            axes = range(form.ndim)
            populate_array(
                view, data=data, shape=[word(1 + i) for i in axes],
                strides=[word(1 + form.ndim + i) for i in axes],
                itemsize=cx.get_constant(types.intp, np.dtype(form.dtype).itemsize), meminfo=None,
            )  # fmt: skip
            return view._getvalue()

        return (array if form.ndim else dtype)(), emit

    return load
