"""Checks of what a key-value cache is given."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from scaledot import _arrays, _checks
from scaledot._cache_memory import Memory
from scaledot._errors import type_error, value_error
from scaledot._typing import Array

DTYPES = (*_arrays.FLOATS, "int8")


def size(name: str, value: object, least: int = 1) -> int:
    """Return a whole number that is large enough."""
    number = _checks.integer(name, value)
    if number < least:
        raise value_error(f"{name} must be at least {least}", number, "It counts.")
    return number


def addressable(name: str, count: int, each: int) -> None:
    """Raise unless ``count`` times ``each`` bytes have addresses."""
    most = sys.maxsize // each
    if count > most:
        raise value_error(
            f"keys and values must have at most {sys.maxsize} bytes each",
            f"{name}={count} of {each} bytes",
            f"Addresses reach as far as {name}={most}, memory less far."
            if most else "Make the other sizes smaller.",
        )


def room(sizes: tuple[int, int, int, int], dtype: str, capacity: int) -> None:
    """Raise unless so many tokens of sizes (batch, num_kv_heads, d_k, d_v) can be addressed."""
    batch, num_kv_heads, *widths = sizes
    token = max(widths) * _arrays.itemsize(dtype)
    if dtype == "int8":  # has a scale, too
        token = max(token, _arrays.itemsize("float32"))
    addressable("capacity", capacity, batch * num_kv_heads * token)


def dtype_name(dtype: Any) -> str:
    """Name of a dtype given as a name or as a dtype of any library; it can be stored."""
    name = dtype
    if not isinstance(dtype, str) and dtype is not None:  # NumPy takes None for float64
        try:
            name = np.dtype(dtype).name
        except TypeError:  # a dtype of PyTorch
            name = str(dtype).rsplit(".", 1)[-1]
    if name not in DTYPES:
        raise type_error(
            f"dtype must be one of {', '.join(DTYPES)}", repr(dtype), "Pass a name or a dtype."
        )
    return str(name)


def slots(capacity: object, window: object, num_sinks: object) -> tuple[int, int | None, int]:
    """Check how many tokens there is memory for and which of them stay."""
    found, sinks = size("capacity", capacity), size("num_sinks", num_sinks, 0)
    if window is None:
        if sinks:
            raise value_error(
                "num_sinks must be 0 without a window", sinks,
                "Without a window nothing is evicted: pass window= as well.",
            )
        return found, None, sinks
    reach = size("window", window)
    if found < sinks + reach:
        raise value_error(
            f"capacity must be at least num_sinks + window = {sinks + reach}", found,
            "What is visible must fit into the memory.",
        )
    return found, reach, sinks


def place(like: Array | None) -> None:
    """Raise unless memory can be of the library of ``like``."""
    if like is None:
        return
    _arrays.check_array("like", like)
    if _arrays.library(like) not in ("numpy", "torch", "jax"):
        raise type_error(
            "like must be an array of NumPy, PyTorch or JAX", _arrays.describe(like),
            "Arrays of other libraries cannot be written slot by slot.",
        )


def tokens(memory: Memory, name: str, x: Array, heads: str, length: str) -> None:
    """Check an array (batch, heads, length, d_k or d_v) given to the cache."""
    _arrays.check_array(name, x)
    _arrays.check_same_place(cache=memory.arrays["key"], **{name: x})
    is_jax = _arrays.library(x) == "jax"
    if is_jax and name != "query" and isinstance(x, sys.modules["jax"].core.Tracer):
        raise type_error(
            f"{name} must hold numbers that a cache can keep", "values that are being traced",
            "Append outside of jit, grad and vmap.",
        )
    stored, given = memory.dtype, _arrays.dtype_name(x)
    if given not in (_arrays.FLOATS if stored == "int8" else (stored,)):
        allowed = "a floating-point dtype" if stored == "int8" else f"the cache's, {stored}"
        raise type_error(
            f"the dtype of {name} must be {allowed}", given,
            "Convert it, or make the cache with that dtype.",
        )
    part = "value" if name == "value" else "key"
    shape: list[Any] = [*memory.arrays[part].shape]
    shape[2] = length
    if heads != "num_kv_heads":
        shape[1] = heads
    fits = x.ndim == 4 and all(
        isinstance(n, str) or n == m for n, m in zip(shape, x.shape, strict=True)
    )
    if not fits:
        raise value_error(
            f"{name} must have the shape (batch, {heads}, {length}, d_{part[0]}) = "
            f"({', '.join(map(str, shape))})", tuple(x.shape),
            "Its sizes are those that the cache was made with.",
        )


def counts(memory: Memory, lengths: Any, most: int) -> Any:
    """Valid tokens of each entry, (batch,) of int64: all where no lengths are given."""
    if lengths is None:
        return np.full_like(memory.lengths, most)
    found = per_entry(memory, lengths, "It counts valid tokens from the start.")
    if np.any((found < 0) | (found > most)):
        raise value_error(
            f"lengths must lie between 0 and the number of tokens given, {most}",
            found.tolist(), "It counts valid tokens from the start.",
        )
    return found


def per_entry(memory: Memory, lengths: Any, hint: str) -> Any:
    """Integers, one for each entry, (batch,) of int64."""
    numbers, batch = _checks.integers("lengths", lengths, hint), len(memory.lengths)
    if len(numbers) != batch:
        raise value_error(
            f"lengths must have one number for each of the {batch} entries", len(numbers), hint
        )
    return numbers


def kept(memory: Memory, q_offset: Any, counts: Any, left: int) -> None:
    """Raise if a query of a cache with a window may see a token that has been evicted."""
    oldest = memory.oldest
    lost = (np.maximum(q_offset - left, memory.num_sinks) < oldest) & (counts > 0)
    if np.any(lost):
        entry, most = int(np.argmax(lost)), memory.capacity - memory.num_sinks - left
        hint = (
            f"This capacity serves chunks of at most {most} tokens: append and attend to "
            "smaller ones, or call grow before that."
        )
        if counts[entry] <= most:  # what is lost went before grow or truncate
            served = max(0, memory.lengths[entry] - oldest[entry] - left)
            hint = (
                f"Of the tokens so far, the last {served} see only what is still there: attend to "
                "these, or to tokens that are yet to be appended."
            )
        raise value_error(
            "queries must see only tokens that are still in memory",
            f"{counts[entry]} queries of entry {entry}, the first of which sees back to "
            f"position {q_offset[entry] - left}, where {oldest[entry]} is the oldest",
            hint,
        )


def shorter(memory: Memory, lengths: Any, window: int | None) -> tuple[Any, Any]:
    """Check lengths to which entries are cut; return them, and where each ring then begins."""
    present, sinks = memory.lengths, memory.num_sinks
    given = [lengths] * len(present) if isinstance(lengths, (int, np.integer)) else lengths
    wanted = per_entry(memory, given, "Pass one length, or one for each entry.")
    wrong = (wanted < 0) | (wanted > present)
    if np.any(wrong):
        entry = int(np.argmax(wrong))
        raise value_error(
            "lengths must lie between 0 and the present ones",
            f"{wanted[entry]} for entry {entry}, which has {present[entry]} tokens",
            "Only append makes entries longer.",
        )
    # Without tokens after the sinks there is nothing in the ring that could be missing.
    oldest = np.where(wanted <= sinks, sinks, memory.oldest)
    if window is not None:
        lost = np.maximum(wanted - window + 1, sinks) < oldest
        if np.any(lost):
            entry = int(np.argmax(lost))
            raise value_error(
                "lengths must leave every token that the next one sees",
                f"{wanted[entry]} for entry {entry}, of which nothing is left from position "
                f"{sinks} to {oldest[entry] - 1}",
                "A larger capacity keeps more. Or truncate to 0 and start anew.",
            )
    return wanted, oldest
