"""Rows and heads: which, and how many at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from scaledot import _checks
from scaledot._errors import value_error

BLOCK_WEIGHTS = 2**19
"""Weights of one block of rows and heads; a block of a single row and head may have more."""

_ROWS = 16
"""Rows of a block, at least, where it can have fewer heads instead: each call reads all keys."""


def blocks(
    count: int, num_heads: int, len_kv: int, *, together: bool = False
) -> Iterator[tuple[slice, slice]]:
    """Rows and heads of each block of weights, (len(heads), len(rows), len_kv).

    All heads of some rows come one after the other. ``together`` makes them one block.
    """
    heads = num_heads
    if not together:
        heads = min(num_heads, max(1, BLOCK_WEIGHTS // (_ROWS * max(1, len_kv))))
    step = max(1, BLOCK_WEIGHTS // max(1, heads * len_kv))
    for row in range(0, count, step):
        for head in range(0, num_heads, max(1, heads)):
            yield (
                slice(row, min(row + step, count)), slice(head, min(head + heads, num_heads))
            )  # fmt: skip


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
