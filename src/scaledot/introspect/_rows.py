"""Rows and heads: which, and how many rows at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from scaledot import _checks
from scaledot._errors import value_error

BLOCK_WEIGHTS = 2**21
"""Weights of one block of rows, all heads; a block has 16 rows at least."""


def blocks(count: int, width: int) -> Iterator[slice]:
    """So many rows in blocks; ``width`` is the number of weights of a row in all heads."""
    step = max(16, BLOCK_WEIGHTS // max(1, width))
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def indices(name: str, given: Any, length: int) -> npt.NDArray[np.int64]:
    """Numbers of rows or heads as non-negative integers, (len(given),); all for None."""
    if given is None:
        return np.arange(length)
    hint = f"Pass indices, for example {name}=[0, -1]."
    known = _checks.integers(name, given, hint)
    if np.any((known < -length) | (known >= length)):
        raise value_error(
            f"{name} must lie between -{length} and {length - 1}",
            f"{known.min()} to {known.max()}", hint,
        )
    index: npt.NDArray[np.int64] = np.where(known < 0, known + length, known)
    return index
