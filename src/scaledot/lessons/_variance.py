"""Where √d_k comes from: the variance of an inner product grows with its width."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from scaledot import plot
from scaledot.lessons._page import Table

_BLOCK = 4000


@dataclass(frozen=True)
class Variance:
    """Result of `variance`."""

    title: ClassVar[str] = "Variance: why the divisor is the square root of d_k"
    text: ClassVar[str] = (
        "An inner product of two vectors of independent standard normal numbers is a sum of d_k "
        "terms, each of variance 1, so its variance is d_k. Divided by √d_k it is 1 at every "
        "width, and scores enter softmax in the same range in a narrow head and in a wide one."
    )
    num_pairs: int
    d_k: tuple[int, ...]
    unscaled: tuple[float, ...]
    scaled: tuple[float, ...]

    def tables(self) -> tuple[Table, ...]:
        """Return both variances for each width."""
        rows = tuple(
            (f"{d_k}", f"{before:.2f}", f"{after:.3f}")
            for d_k, before, after in zip(self.d_k, self.unscaled, self.scaled, strict=True)
        )
        columns = ("d_k", "variance of q·k", "variance of q·k / √d_k")
        return (Table(columns, rows, f"over {self.num_pairs:,} random pairs"),)

    def plot(self, ax: plot.Axes | None = None) -> plot.Axes:
        """Draw both variances over the width, with the lines d_k and 1."""
        return plot.curves(
            self.d_k,
            {"q·k": self.unscaled, r"q·k / $\sqrt{d_k}$": self.scaled},
            {"theory: $d_k$": self.d_k, "theory: 1": [1.0] * len(self.d_k)},
            x_label="$d_k$",
            y_label="variance",
            title="Variance of an inner product",
            ax=ax,
        )


def variance() -> Variance:
    """Measure the variance of q·k and q·k/√d_k over random pairs.

    Returns
    -------
    Variance
        ``unscaled`` and ``scaled`` for the widths ``d_k`` = 4, 64 and 512, over 100,000 pairs.

    Notes
    -----
    One generator, seeded with 42, makes all numbers, for each width all of q before all of k.
    They are made in blocks of rows, a few megabytes at a time instead of 800; a second generator,
    sent ahead to where k begins, keeps the order. Takes some seconds.

    References
    ----------
    arXiv 1706.03762, footnote 4.
    """
    num_pairs, widths = 100_000, (4, 64, 512)
    rng = np.random.default_rng(42)
    unscaled, scaled = [], []
    for d_k in widths:
        products, rng = _products(rng, num_pairs, d_k)
        unscaled.append(float(products.var()))
        scaled.append(float((products / np.sqrt(d_k)).var()))
    return Variance(num_pairs, widths, tuple(unscaled), tuple(scaled))


def _products(
    rng: np.random.Generator, num_pairs: int, d_k: int
) -> tuple[npt.NDArray[np.float64], np.random.Generator]:
    """Inner products of pairs, (num_pairs,), and the generator as it stands after k."""
    counts = [min(_BLOCK, num_pairs - start) for start in range(0, num_pairs, _BLOCK)]
    block = np.empty((min(_BLOCK, num_pairs), d_k))
    ahead = copy.deepcopy(rng)
    for count in counts:
        ahead.standard_normal(out=block[:count])
    products = []
    for count in counts:
        q, k = rng.standard_normal((count, d_k)), ahead.standard_normal((count, d_k))
        products.append(np.einsum("ij,ij->i", q, k))
    return np.concatenate(products), ahead
