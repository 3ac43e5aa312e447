"""Tokens as strings."""

from __future__ import annotations

from typing import Any

from scaledot import _arrays
from scaledot._errors import type_error, value_error


def as_tokens(name: str, given: Any) -> tuple[str, ...] | None:
    """Tokens as a tuple of str: numbers are written out, bytes decoded."""
    if given is None:
        return None
    must = f"{name} must be a sequence of one string for each token"
    if isinstance(given, (str, bytes)):
        raise type_error(must, type(given).__name__, "Split the text into tokens first.")
    if _arrays.library(given) is not None:
        if given.ndim != 1:
            raise value_error(must, f"shape {tuple(given.shape)}", "Pass those of one sequence.")
        given = _values(name, given)
    try:
        items = list(given)
    except TypeError:
        raise type_error(
            must, type(given).__name__, "Pass a list, even of a single token."
        ) from None
    return tuple(_word(name, item) for item in items)


def _word(name: str, item: Any) -> str:
    """One token, of any type."""
    if _arrays.library(item) is not None and item.ndim == 0:
        item = _values(name, item).item()
    # A piece of a character, as of byte pairs, is no error.
    return item.decode("utf-8", "replace") if isinstance(item, bytes) else str(item)


def _values(name: str, x: Any) -> Any:
    """Return an array in NumPy, or raise where a compiler is tracing it."""
    known = _arrays.host(x)
    if known is None:
        raise type_error(
            f"{name} must hold values", "an array that a compiler is tracing", "Pass strings."
        )
    return known
