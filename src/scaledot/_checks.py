"""Checks of single arguments: each returns the argument in its resolved form or raises."""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any

import numpy as np

from scaledot import _arrays
from scaledot._errors import type_error, value_error
from scaledot._typing import Array

AXES = "Axes are (..., num_heads, len, d): is one of them transposed?"
FARTHEST = 2**60
"""Bound on positions and reaches, so that sums of them and lengths fit into 64 bits."""
IMPLEMENTATIONS = ("auto", "kernels", "blockwise", "dense")


def shapes(**arrays: Array) -> str:
    """``query (2, 8, 5, 64), key (2, 8, 7, 64)`` for messages."""
    return ", ".join(f"{name} {tuple(x.shape)}" for name, x in arrays.items())


def alike(**arrays: Array) -> None:
    """Raise unless all are plain arrays of one library, device and floating-point dtype."""
    for name, x in arrays.items():
        _arrays.check_array(name, x)
    _arrays.check_same_place(**arrays)
    names = [_arrays.dtype_name(x) for x in arrays.values()]
    if len(set(names)) > 1 or names[0] not in _arrays.FLOATS:
        *front, last = arrays
        raise type_error(
            f"{', '.join(front)} and {last} must share one dtype of {', '.join(_arrays.FLOATS)}",
            ", ".join(names),
            "Convert them with astype (PyTorch: .to), for example all to float32.",
        )


def operands(**arrays: Array) -> None:
    """Query, key and value: `alike`, with an axis of positions and one of features."""
    alike(**arrays)
    for name, x in arrays.items():
        if x.ndim < 2:
            raise value_error(
                f"{name} must have at least two axes", f"{name} {tuple(x.shape)}",
                "Axes are (..., num_heads, len, d), or (len, d) for one head.",
            )


def operand_shapes(query: Array, key: Array, value: Array) -> tuple[int, ...]:
    """Check that the shapes fit; return the broadcast leading axes."""

    def given() -> str:
        return shapes(query=query, key=key, value=value)

    heads = [x.shape[-3] if x.ndim > 2 else 1 for x in (query, key, value)]
    if key.shape[-1] != query.shape[-1]:
        raise value_error(
            "query and key must have the same d_k",
            f"{query.shape[-1]} and {key.shape[-1]} ({given()})", AXES,
        )
    if key.shape[-2] != value.shape[-2]:
        raise value_error(
            "key and value must have the same length",
            f"{key.shape[-2]} and {value.shape[-2]} ({given()})", AXES,
        )
    if heads[1] != heads[2]:
        raise value_error(
            "key and value must have the same num_kv_heads",
            f"{heads[1]} and {heads[2]} ({given()})", AXES,
        )
    if heads[0] % heads[1] if heads[1] else heads[0]:
        raise value_error(
            "num_heads of query must be a multiple of num_kv_heads of key",
            f"{heads[0]} and {heads[1]} ({given()})", AXES,
        )
    leads = [tuple(x.shape[:-3]) for x in (query, key, value)]
    if leads[0] == leads[1] == leads[2]:
        return leads[0]
    try:
        return np.broadcast_shapes(*leads)
    except ValueError:
        raise value_error(
            "leading axes of query, key and value must broadcast", given(),
            "Axes before num_heads are equal or 1; insert axes of length 1 where they differ.",
        ) from None


def real(name: str, value: object) -> float:
    """Return a finite number: a Python or NumPy scalar, or an array of one element."""
    if _arrays.library(value) is not None and getattr(value, "ndim", None) == 0:
        known = _arrays.host(value)
        if known is not None and known.dtype.kind in "iuf":
            value = known.item()
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise type_error(f"{name} must be a real number", repr(value), "Pass a float or None.")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise value_error(f"{name} must be finite", number, "Pass a finite number or None.")
    return number


def integer(name: str, value: object) -> int:
    """Return a whole number: int or a NumPy integer, not bool."""
    if not isinstance(value, (bool, np.bool_)):
        try:
            return operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            pass
    raise type_error(f"{name} must be an integer", repr(value), "Pass an int.")


def integers(name: str, given: Any, hint: str) -> Any:
    """Return a 1-D sequence or array of integers, known before the call, as int64 of NumPy."""
    if _arrays.library(given) is not None:
        _arrays.check_array(name, given)
        known = _arrays.host(given)
        what = _arrays.describe(given) if known is not None else "values that are being traced"
    else:
        try:
            known = np.asarray(given)
            what = f"{known.dtype} {known.shape}"
        except (ValueError, TypeError, OverflowError):  # ragged, or not numbers
            known, what = None, type(given).__name__
    if known is not None and known.shape == (0,):
        known = known.astype(np.int64)
    if known is None or known.ndim != 1 or known.dtype.kind not in "iu":
        raise type_error(f"{name} must be a 1-D sequence of integers", what, hint)
    if known.size and int(known.max()) > FARTHEST:
        raise value_error(f"{name} must be indices", known.max(), hint)
    return known.astype(np.int64)


def reach(query: Array, name: str, number: Any) -> None:
    """Raise unless positions as far as that can be counted in query's library."""
    if abs(int(number)) < 2**29:  # far from the end of integers of 32 bits
        return
    largest = int(_arrays.namespace(query).iinfo(_arrays.index_dtype(query)).max)
    farthest = min(FARTHEST, largest // 4)
    if abs(int(number)) > farthest:
        raise value_error(
            f"{name} must lie between -{farthest} and {farthest}", number,
            "Positions are counted in the integers of the array library.",
        )


def flag(name: str, value: object) -> bool:
    """Return True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise type_error(f"{name} must be True or False", repr(value), f"Write {name}=True.")
    return bool(value)


def window(value: object, causal: bool) -> tuple[int | None, int | None]:
    """Left and right reach of a query; None is no limit. Causal closes the right side."""
    left: int | None = None
    right: int | None = None
    if value is not None:
        hint = "Write window=(left, right) with integers ≥ 0; None is no limit."
        if not isinstance(value, (tuple, list)) or len(value) != 2:
            raise type_error("window must be a pair (left, right)", repr(value), hint)
        sides = [None if side is None else integer("window", side) for side in value]
        if any(side is not None and side < 0 for side in sides):
            raise value_error("both sides of window must be at least 0", repr(value), hint)
        # Nothing is further away than that, and differences of positions cannot overflow.
        left, right = (None if side is None else min(side, FARTHEST) for side in sides)
    return left, 0 if causal else right


def softcap(value: object) -> float | None:
    """Return a positive cap, or None."""
    if value is None:
        return None
    number = real("softcap", value)
    if number <= 0:
        raise value_error("softcap must be positive", number, "Use None for no cap.")
    return number


def dropout(value: object, seed: object) -> float:
    """Return the probability of dropping a weight; needs a seed unless it is 0."""
    number = real("dropout", value)
    if not 0 <= number <= 1:
        raise value_error("dropout must lie between 0 and 1", number, "It is a probability.")
    if number and seed is None:
        raise value_error(
            "dropout needs a seed", f"dropout={number} and seed=None",
            "Pass seed=<int>: a new one in each step of training.",
        )
    return number


def implementation(value: object) -> str:
    """Return the name of an implementation."""
    if not isinstance(value, str) or value not in IMPLEMENTATIONS:
        raise value_error(
            f"impl must be one of {', '.join(map(repr, IMPLEMENTATIONS))}", repr(value),
            "'auto' chooses the fastest that can do the job.",
        )
    return str(value)


def function(name: str, value: object, signature: str) -> Any:
    """Return a callable, or None."""
    if value is not None and not callable(value):
        raise type_error(
            f"{name} must be a function {signature}", type(value).__name__, "Pass a function."
        )
    return value


def option_array(name: str, x: object, query: Array) -> Array:
    """Return an array given as an option, in query's library and on its device."""
    if isinstance(x, np.generic):
        x = np.asarray(x)
    _arrays.check_array(name, x)
    if _arrays.library(x) not in (_arrays.library(query), "numpy"):
        raise type_error(
            f"{name} must belong to the library of query, or to NumPy",
            f"{_arrays.library(x)} beside {_arrays.library(query)}", "Convert it.",
        )
    if _arrays.library(x) == _arrays.library(query):
        _arrays.check_same_place(query=query, **{name: x})
    return x


def broadcastable(name: str, x: Array, shape: tuple[int, ...], axes: str) -> None:
    """Raise unless x broadcasts to shape without enlarging it."""
    given = tuple(x.shape)
    fits = len(given) <= len(shape) and all(
        m in (1, n) for m, n in zip(reversed(given), reversed(shape), strict=False)
    )
    if not fits:
        raise value_error(
            f"{name} must broadcast to {axes} = {shape}", given,
            "Shapes are aligned at the right: insert axes of length 1 where it is constant.",
        )
