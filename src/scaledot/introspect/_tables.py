"""Numbers by layer and head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from scaledot import Stats

Numbers = npt.NDArray[np.float64]


def table(rows: Sequence[npt.NDArray[Any]]) -> Numbers:
    """One row for each layer, (num_layers, num_heads); nan where a layer has fewer heads."""
    full = np.full((len(rows), max(map(len, rows))), np.nan)
    for i, row in enumerate(rows):
        full[i, : len(row)] = row
    return full


def mean_over(values: npt.NDArray[Any], use: npt.NDArray[np.bool_]) -> Numbers:
    """Mean along the last axis over the places in use, (...,); nan where there are none."""
    count = use.sum(axis=-1)
    total = np.where(use, values, 0.0).sum(axis=-1, dtype=np.float64)
    mean: Numbers = np.divide(total, count, out=np.full(count.shape, np.nan), where=count > 0)
    return mean


def without_number(stats: Stats) -> npt.NDArray[np.bool_]:
    """Whether a query sees keys and has no numbers for weights, (num_heads, len_q)."""
    flags: npt.NDArray[np.bool_] = np.isnan(stats.lse) | np.isnan(stats.max_weight)
    flags &= stats.visible > 0
    return flags
