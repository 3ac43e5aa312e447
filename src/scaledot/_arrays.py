"""What differs between array libraries and the array API standard does not cover."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import numpy as np

from scaledot._errors import type_error, value_error
from scaledot._typing import Array

FLOATS = ("float32", "float64", "float16", "bfloat16")
_NAMES: dict[Any, str] = {}
_SIZES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
KNOWN = "arrays of NumPy, PyTorch, JAX or array-api-strict"


def library(x: object) -> str | None:
    """Name of the array library that x belongs to; None for anything else.

    Libraries are found through ``sys.modules``: an array of a library that was never imported
    cannot exist.
    """
    if isinstance(x, np.ndarray):
        return "numpy"
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return "torch"
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(x, jax.Array):
        return "jax"
    strict = sys.modules.get("array_api_strict")
    if strict is not None and type(x).__module__.startswith("array_api_strict"):
        return "array_api_strict"
    return None


def namespace(x: Array) -> Any:
    """Array API namespace of x."""
    # What array_namespace finds for these two, without its search.
    if isinstance(x, np.ndarray):
        if x.dtype.names is None:  # JAX has a gradient that is a structured array of NumPy
            import array_api_compat.numpy

            return array_api_compat.numpy
    elif library(x) == "torch":
        import array_api_compat.torch

        return array_api_compat.torch
    import array_api_compat

    return array_api_compat.array_namespace(x)


def dtype_name(x: Array) -> str:
    """Name of the dtype, the same for every library: ``torch.bfloat16`` is ``bfloat16``."""
    dtype = x.dtype
    if isinstance(dtype, np.dtype):
        if dtype not in _NAMES:  # NumPy computes the name anew each time
            _NAMES[dtype] = str(dtype.name)
        return _NAMES[dtype]
    return str(dtype).rsplit(".", 1)[-1]


def itemsize(name: str) -> int:
    """Bytes of one number of a dtype that keys and values may have, or be stored as."""
    return _SIZES[name]


def is_float(x: Array) -> bool:
    """Whether the dtype of x is a floating-point one, of any width."""
    return dtype_name(x).startswith(("float", "bfloat"))


def is_integer(x: Array) -> bool:
    """Whether the dtype of x is a signed or unsigned integer."""
    return dtype_name(x).startswith(("int", "uint"))


def is_bool(x: Array) -> bool:
    """Whether the dtype of x is boolean."""
    return dtype_name(x) == "bool"


def describe(x: object) -> str:
    """Library, dtype and shape of an array, or the type of anything else, for messages."""
    kind = library(x)
    if kind is None:
        return f"{type(x).__module__}.{type(x).__qualname__}"
    return f"{kind} {dtype_name(x)} {tuple(x.shape)}"  # type: ignore[attr-defined]


def check_array(name: str, x: object) -> None:
    """Raise TypeError unless x is a dense array of a known library that holds data."""
    hint = "Convert it first, for example with numpy.asarray."
    kind = library(x)
    if kind is None:
        raise type_error(f"{name} must be one of {KNOWN}", describe(x), hint)
    if kind == "numpy" and isinstance(x, (np.ma.MaskedArray, np.matrix)):
        raise type_error(
            f"{name} must be a plain array",
            type(x).__name__,
            "Pass x.data and hide entries with mask=, or numpy.asarray(x).",
        )
    if kind == "torch":
        _check_tensor(name, x)


def _check_tensor(name: str, tensor: Any) -> None:
    what, hint = "", "Call .to_dense() or .dequantize(), or pack sequences for varlen_attention."
    if tensor.is_nested:
        what = "a nested tensor"
    elif tensor.is_quantized:
        what = "a quantized tensor"
    elif tensor.layout is not sys.modules["torch"].strided:
        what = f"layout {tensor.layout}"
    elif is_distributed(tensor):
        what = "a DTensor"
        hint = (
            "Pass this process's part, .to_local(), or call "
            "scaledot.torch.scaled_dot_product_attention, which leaves DTensors to PyTorch."
        )
    if what:
        raise type_error(f"{name} must be a dense tensor of plain numbers", what, hint)
    if tensor.is_meta:
        raise type_error(f"{name} must hold data", "a meta tensor", "Move it to a device.")


def is_distributed(tensor: object) -> bool:
    """Whether this is a DTensor of PyTorch, of which each process holds a part."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def check_same_place(**arrays: Array) -> None:
    """Raise unless all arrays belong to one library and, for PyTorch, lie on one device."""
    first, *others = arrays
    kind = library(arrays[first])
    for name in others:
        other = library(arrays[name])
        if kind != other:
            raise type_error(
                f"{first} and {name} must belong to one library",
                f"{kind} and {other}",
                "Convert one of them.",
            )
        if kind == "torch" and arrays[first].device != arrays[name].device:
            raise value_error(
                f"{first} and {name} must be on one device",
                f"{arrays[first].device} and {arrays[name].device}",
                f"Move {name} with .to({str(arrays[first].device)!r}).",
            )


def accumulation_dtype(xp: Any, name: str) -> Any:
    """Dtype of sums for inputs of the dtype called ``name``: float64 for float64, else float32."""
    return xp.float64 if name == "float64" else xp.float32


def index_dtype(x: Array) -> Any:
    """Dtype of integers by default in the library of x."""
    return namespace(x).arange(0, 1).dtype


def packed(xp: Any, x: Array, dtype: Any) -> Array:
    """Return x in dtype and in C order: products then take one path whatever the strides."""
    if isinstance(x, np.ndarray):
        return np.ascontiguousarray(x, dtype=dtype)
    x = xp.astype(x, dtype, copy=False)
    if library(x) != "torch":
        return x
    if 1 in x.shape[-2:]:  # such an axis may have any stride and still count as in order
        return x.clone(memory_format=sys.modules["torch"].contiguous_format)
    return x.contiguous()


def like(query: Array, x: Array, dtype: Any = None) -> Array:
    """Bring x, of query's library or of NumPy, to query's library, device and, if given, dtype."""
    xp = namespace(query)
    if library(x) == library(query):
        return x if dtype is None else xp.astype(x, dtype, copy=False)
    if is_float(x) and dtype_name(x) not in ("float16", "float32", "float64"):
        # No other library knows longdouble and the dtypes of ml_dtypes.
        x = x.astype(np.float64 if x.dtype.itemsize > 4 else np.float32)
    # A copy: PyTorch warns about read-only memory and refuses negative strides.
    x = np.array(x, dtype=x.dtype.newbyteorder("="), order="C", copy=True)
    return xp.asarray(x, dtype=dtype, **device_of(query))


def device_of(x: Array) -> dict[str, Any]:
    """Keyword that makes a new array on the device of x; JAX moves new arrays by itself."""
    return {} if library(x) == "jax" else {"device": x.device}


def constant(x: Array) -> Array:
    """Return x as a constant for automatic differentiation."""
    kind = library(x)
    if kind == "torch":
        return x.detach()
    if kind == "jax":
        return sys.modules["jax"].lax.stop_gradient(x)
    return x


def host(x: Array) -> np.ndarray[Any, Any] | None:
    """Values of x as a NumPy array; None where a compiler is tracing and there are none yet."""
    if library(x) == "jax" and isinstance(x, sys.modules["jax"].core.Tracer):
        return None
    if library(x) == "torch":
        try:
            x = x.detach().cpu()
            return np.asarray(x.float() if dtype_name(x) == "bfloat16" else x)
        except RuntimeError:  # vmap and fake tensors hold no values
            return None
    return np.asarray(x)


def truth(flag: Array) -> bool | None:
    """Value of a boolean scalar; None where a compiler is tracing and there is none yet."""
    if library(flag) == "torch" and sys.modules["torch"].compiler.is_compiling():
        return None  # PyTorch's compiler would look for the value, and make a guard of it
    values = host(flag)
    return None if values is None else bool(values)


def may_hold(flag: Array) -> bool:
    """Whether a boolean scalar is true, or cannot be read because a compiler is tracing."""
    return truth(flag) is not False


def quiet(xp: Any) -> contextlib.AbstractContextManager[Any]:
    """Silence NumPy's floating-point warnings: infinities and nan are defined here.

    PyTorch's autocast, which would round the products inside to 16 bits, is off meanwhile.
    """
    name = xp.__name__
    if name.startswith(("array_api_compat.numpy", "array_api_strict", "numpy")):
        return np.errstate(all="ignore")
    if name.startswith("array_api_compat.torch"):
        torch = sys.modules["torch"]
        on = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        if on:
            stack = contextlib.ExitStack()
            for kind in on:
                stack.enter_context(torch.autocast(kind, enabled=False))
            return stack
    return contextlib.nullcontext()
