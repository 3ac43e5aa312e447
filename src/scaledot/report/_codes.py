"""Weights as small integers in base64: logarithms in 16 bits, shares of block maps in 8."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import numpy.typing as npt

from scaledot._stats import bin_edges, pooled

Floats = npt.NDArray[np.float64]

EXCLUDED = 2**16 - 1
"""The code of a key that a query does not see."""

NOT_A_NUMBER = EXCLUDED - 1

_LARGEST = NOT_A_NUMBER - 1


def log_codes(weights: Floats) -> tuple[str, list[float]]:
    """Return codes of weights (num_heads, len_q, len_kv), and a step for each head.

    A weight is ``exp(-code * step)``.
    """
    with np.errstate(divide="ignore"):
        distance = -np.log(weights)
    finite = np.isfinite(distance)
    largest = np.max(distance, axis=(-2, -1), where=finite, initial=0.0)
    step = np.where(largest > 0, largest, 1.0) / _LARGEST
    scaled = np.where(finite, distance, 0.0) / step[:, None, None]
    codes = np.where(finite, np.clip(np.rint(scaled), 0, _LARGEST), EXCLUDED)
    codes = np.where(np.isnan(weights), NOT_A_NUMBER, codes)
    return text(codes.astype("<u2")), step.tolist()


def share_codes(block_map: Floats) -> tuple[str, list[float]]:
    """Return codes of block maps (num_heads, rows, columns), and a step for each head.

    A share is ``code**2 * step``: as exact for small shares as for large ones, to the eye.
    """
    known = np.nan_to_num(block_map, nan=0.0)
    largest = known.max(axis=(-2, -1), initial=0.0)
    step = np.where(largest > 0, largest, 1.0) / 255**2
    codes = np.rint(np.sqrt(known.clip(0) / step[:, None, None]))
    return text(codes.clip(0, 255).astype(np.uint8)), step.tolist()


def text(codes: npt.NDArray[Any]) -> str:
    """Return the bytes of an array in C order, as base64."""
    return base64.b64encode(codes.tobytes()).decode("ascii")


def text_length(count: int) -> int:
    """Characters of base64 for so many bytes."""
    return 4 * -(-count // 3)


def pool(block_map: Floats, length: int, factors: tuple[int, int]) -> Floats:
    """Return maps (num_heads, rows, columns) of ``length`` queries with bins joined.

    A row is a mean over queries, so rows are weighted by how many they hold; columns add up.
    """
    rows, columns = block_map.shape[-2:]
    counts = np.diff(bin_edges(length, rows)).astype(np.float64)
    return pooled(block_map, counts, range(0, rows, factors[0]), range(0, columns, factors[1]))
