"""What a user's function reads besides its arguments, and how compiled code reads the same.

Numba makes constants of everything that a function finds in its closure and its globals. For
numbers that is right. Arrays may be changed in place between two calls, and would be compiled in
byte by byte, so each becomes a ``Live``: a load from a block of addresses that is written anew
at each call. A pass over Numba's intermediate representation puts the loads in.
"""

from __future__ import annotations

import functools
import sys
import types as python
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import numpy as np
from numba.core.dispatcher import Dispatcher

from scaledot import _arrays
from scaledot._errors import type_error
from scaledot._kernels.bytecode import called, reads

Form: TypeAlias = Any
"""Any of the six classes below: hashable, and a recipe."""

TRANSLATED = ("torch", "jax", "array_api_compat", "array_api_strict")
PLAIN = (int, bool, str, type(None), bytes, complex)
MISSING = object()
INSTEAD = "Use impl='blockwise', which calls it on arrays."


@dataclass(unsafe_hash=True, slots=True)
class Leaf:
    """A constant; ``token`` tells it from others where ``==`` does not: 1 and 1.0, 0.0 and -0.0."""

    token: Hashable
    value: Any = field(compare=False)


@dataclass(unsafe_hash=True, slots=True)
class Live:
    """An array, whose address, shape and strides lie at ``offset`` bytes into the block."""

    offset: int
    dtype: str
    ndim: int
    order: str


@dataclass(unsafe_hash=True, slots=True)
class Members:
    """A module or object, of which only these attributes are read."""

    parts: tuple[tuple[str, Form], ...]


@dataclass(unsafe_hash=True, slots=True)
class Sequence:
    """A tuple that holds arrays."""

    parts: tuple[Form, ...]


@dataclass(unsafe_hash=True, slots=True)
class Routine:
    """A Python function: its code, and what it reads: (free or global or self, name, form)."""

    code: python.CodeType
    reads: tuple[tuple[str, str, Form], ...]
    defaults: tuple[tuple[str, Form], ...]
    is_method: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arguments, without the owner of a method."""
        count = self.code.co_argcount + self.code.co_kwonlyargcount
        return self.code.co_varnames[self.is_method : count]

    @property
    def required(self) -> tuple[str, ...]:
        """Those that have no default."""
        known = dict(self.defaults)
        return tuple(name for name in self.names if name not in known)


@dataclass(unsafe_hash=True, slots=True)
class Bound:
    """A ``functools.partial``: what is called, its first arguments, its named ones."""

    function: Form
    first: tuple[Form, ...]
    named: tuple[tuple[str, Form], ...]


class Same:
    """Equal to itself: a key for objects that cannot be hashed."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class Survey:
    """One reading of all that a function depends on, at the time of a call.

    With ``live_numbers``, ints and floats of closures and globals are read at run time too.

    Attributes
    ----------
    form : Form
        Equal for functions that compile to the same code.
    words : list of int
        Contents of the block: address, shape and strides in bytes of each array.
    arrays : list of numpy.ndarray
        What lies at the addresses, to be kept as long as they are used.
    """

    def __init__(
        self, name: str, function: Callable[..., Any], live_numbers: bool = False
    ) -> None:
        self.name, self.live_numbers = name, live_numbers
        self.words: list[int] = []
        self.arrays: list[np.ndarray[Any, Any]] = []
        self._inside: list[object] = []
        self.form = self._callable(function, ((),))

    def _value(self, x: Any, chains: tuple[tuple[str, ...], ...] = ((),)) -> Form:
        """Form of a value, of which these chains of attributes are read."""
        kind = type(x)
        if self.live_numbers and (kind is float or (kind is int and abs(x) < 2**63)):
            return self._array(np.array(x, dtype=np.float64 if kind is float else np.int64))
        if kind in PLAIN:
            return Leaf((kind, x), x)
        if kind is float:
            return Leaf((kind, x.hex()), x)
        if isinstance(x, np.generic):
            wide = _readable(x)
            return Leaf((wide.dtype.str, wide.tobytes()), wide)
        if _arrays.library(x) is not None:
            return self._array(x)
        if kind is tuple:
            parts = tuple(self._value(part) for part in x)
            if all(type(part) is Leaf for part in parts):
                return Leaf(parts, tuple(part.value for part in parts))
            return Sequence(parts)
        return self._callable(x, chains)

    def _callable(self, x: Any, chains: tuple[tuple[str, ...], ...]) -> Form:
        translated = _translated(x)
        if translated is not None:
            return Leaf(translated, translated)
        if isinstance(x, Dispatcher):
            return Leaf(Same(x), x)
        if isinstance(x, python.FunctionType):
            return self._routine(x)
        if isinstance(x, python.MethodType) and isinstance(x.__func__, python.FunctionType):
            return self._routine(x.__func__, x.__self__)
        if isinstance(x, functools.partial):
            return Bound(
                self._callable(x.func, ((),)),
                tuple(map(self._value, x.args)),
                tuple((name, self._value(value)) for name, value in x.keywords.items()),
            )
        if chains != ((),) and () not in chains:
            return self._members(x, chains)
        method = called(x)
        return Leaf(Same(x), x) if method is None else self._routine(method, x)

    def _routine(self, function: python.FunctionType, owner: Any = MISSING) -> Form:
        if function in self._inside:  # recursion is left to the compiler
            return Leaf(Same(function), function)
        code, found = function.__code__, []
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        is_method = owner is not MISSING
        self._inside.append(function)
        for kind, name, chains in reads(code, is_method):
            if kind == "free":
                value = _contents(cells[name])
            elif kind == "global":
                value = function.__globals__.get(name, MISSING)
            else:
                value = owner
            if value is not MISSING:
                found.append((kind, name, self._value(value, chains)))
        self._inside.pop()
        given = function.__defaults__ or ()
        behind = code.co_varnames[code.co_argcount - len(given) : code.co_argcount]
        defaults = dict(zip(behind, given, strict=True)) | (function.__kwdefaults__ or {})
        forms = tuple((name, self._value(x)) for name, x in defaults.items())
        return Routine(code, tuple(found), forms, is_method)

    def _members(self, x: Any, chains: tuple[tuple[str, ...], ...]) -> Form:
        """Attributes of an object, or of the NumPy that stands for another array library."""
        inner: dict[str, list[tuple[str, ...]]] = {}
        for first, *rest in chains:
            inner.setdefault(first, []).append(tuple(rest))
        parts = []
        for name, rests in inner.items():
            value = _attribute(x, name)
            if value is MISSING:
                where = getattr(x, "__name__", type(x).__name__)
                raise type_error(
                    f"{self.name} must read attributes that exist, and in NumPy too where an array "
                    "library is asked for them",
                    f"{where}.{name}", INSTEAD,
                )
            # What is below an array or a number is left to the compiler: table.shape[0].
            parts.append((name, self._value(value, tuple(rests))))
        return Members(tuple(parts))

    def _array(self, x: Any) -> Form:
        host = _host(x)
        if isinstance(host, str):
            raise type_error(
                f"arrays that {self.name} reads must lie in the CPU's memory, hold plain numbers "
                "and need no gradient",
                host, INSTEAD,
            )
        array = _readable(host)
        dtype = array.dtype.str
        offset = 8 * len(self.words)
        self.words += [array.__array_interface__["data"][0], *array.shape, *array.strides]
        self.arrays.append(array)
        order = "C" if array.flags.c_contiguous else "A"
        return Live(offset, dtype, array.ndim, order)


@functools.lru_cache(maxsize=64)
def _wanted(dtype: np.dtype[Any], is_float: bool) -> np.dtype[Any] | None:
    """Dtype that compiled code reads in place of another; None where it reads that."""
    if is_float and dtype.newbyteorder("=") not in (np.float32, np.float64):
        return np.dtype(np.float64 if dtype.itemsize > 8 else np.float32)
    return None if dtype.isnative else dtype.newbyteorder("=")


def _readable(x: Any) -> Any:
    """Array as compiled code can read it, itself where it can be.

    Others are copied, float16 and bfloat16 to float32: at each call, so that the copy is current.
    """
    wanted = _wanted(x.dtype, _arrays.is_float(x))
    if wanted is not None:
        return x.astype(wanted)
    return x if isinstance(x, np.generic) or x.flags.aligned else x.copy()


def _host(x: Any) -> np.ndarray[Any, Any] | str:
    """Array as NumPy sees it, or why compiled code cannot read it in its stead."""
    library = _arrays.library(x)
    if library == "torch":
        torch = sys.modules["torch"]
        if type(x) not in (torch.Tensor, torch.nn.Parameter):
            return f"a tensor of the subclass {type(x).__name__}"
        if torch.is_grad_enabled() and x.requires_grad:
            return "a tensor that requires a gradient"
        if x.device.type != "cpu" or x.layout is not torch.strided:
            return f"a tensor on {x.device}, layout {x.layout}"
        try:
            x = x.float() if x.dtype is torch.bfloat16 else x.resolve_neg()
            return cast(np.ndarray[Any, Any], x.detach().numpy())
        except (RuntimeError, TypeError):  # vmap, or a dtype that NumPy has not
            return f"a tensor that NumPy cannot read, of {x.dtype}"
    if library == "numpy":
        if type(x) is not np.ndarray:
            return f"an array of the subclass {type(x).__name__}"
        known = x.dtype.kind in "biufc" or _arrays.is_float(x)
        return x if known else f"an array of {x.dtype}"
    host = _arrays.host(x)
    return "an array that is being traced or transformed" if host is None else host


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return MISSING


def _root(x: Any) -> str:
    """Name of the package that a function or module belongs to."""
    if isinstance(x, python.ModuleType):
        return x.__name__.partition(".")[0]
    owner = getattr(x, "__module__", None)
    if owner is None:  # functions of PyTorch's are methods of an object
        owner = getattr(getattr(x, "__self__", None), "__module__", None)
    return str(owner).partition(".")[0]


def _translated(x: Any) -> Any:
    """NumPy's function of the same name, for functions of array libraries; else None."""
    root = "" if isinstance(x, python.ModuleType) or not callable(x) else _root(x)
    if root not in TRANSLATED:
        return None
    name = getattr(x, "__name__", "")
    home = sys.modules.get({"jax": "jax.numpy"}.get(root, root))
    # torch.nn.functional.pad has the name of a function of NumPy's, and another meaning.
    if root in ("torch", "jax") and getattr(home, name, None) is not x:
        return None
    return _renamed(name)


def _renamed(name: str) -> Any:
    return getattr(np, {"clamp": "clip"}.get(name, name), None)


def _attribute(x: Any, name: str) -> Any:
    """Attribute of an object; of NumPy where x is another library with NumPy's names."""
    if isinstance(x, python.ModuleType) and _root(x) in TRANSLATED:
        inside = getattr(x, name, None)
        if isinstance(inside, python.ModuleType):
            return inside
        found = _renamed(name)
        return MISSING if found is None else found
    return getattr(x, name, MISSING)
