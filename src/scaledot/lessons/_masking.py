"""Masks: which query sees which key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from scaledot import plot
from scaledot._attention import attention_weights
from scaledot._masks import in_window
from scaledot.lessons._page import Table


@dataclass(frozen=True, eq=False)
class Masking:
    """Result of `masking`; matrices are (len, len), rows = queries."""

    title: ClassVar[str] = "Masking: no look at the future, none at padding"
    text: ClassVar[str] = (
        "Causal attention lets a token see itself and what came before. Hidden scores count as "
        "minus infinity before softmax, so hidden weights are exactly 0 and each row still sums to "
        "1 over what is left. Padding is hidden in the same way, by kv_len, the number of real "
        "keys."
    )
    visible: npt.NDArray[np.bool_]
    weights: npt.NDArray[np.float64]
    row_sums: tuple[float, ...]
    largest_future: float
    kv_len: int
    padded_weights: npt.NDArray[np.float64]
    largest_padded: float

    def tables(self) -> tuple[Table, ...]:
        """Return the causal picture beside the weights, and the checks."""
        rows = []
        for seen, row, total in zip(self.visible, self.weights, self.row_sums, strict=True):
            picture = " ".join(f"{int(one)}" for one in seen)
            rows.append((picture, "  ".join(f"{weight:.3f}" for weight in row), f"{total:.6f}"))
        padded = tuple(
            ("  ".join(f"{weight:.3f}" for weight in row), f"{row.sum():.6f}")
            for row in self.padded_weights[-1:]
        )
        return (
            Table(
                ("may see", "causal weights, rows = queries", "row sum"), tuple(rows),
                f"largest weight on a later key: {self.largest_future:g}",
            ),
            Table(
                (f"weights of the last query, kv_len={self.kv_len}", "row sum"), padded,
                f"largest weight on padding: {self.largest_padded:g}",
            ),
        )

    def plot(self, ax: plot.Axes | None = None) -> plot.Axes:
        """Draw the causal picture."""
        return plot.mask(
            self.visible, [f"{i}" for i in range(len(self.visible))], title="Causal mask", ax=ax
        )


def masking() -> Masking:
    """Show the causal mask, what it does to the weights, and padding.

    Returns
    -------
    Masking
        ``visible`` is the picture of ones and zeros, ``weights`` those of a small causal example,
        ``largest_future`` the largest weight on any later key: exactly 0.

    References
    ----------
    arXiv 1706.03762, section 3.2.3.

    Examples
    --------
    >>> from scaledot import lessons
    >>> lesson = lessons.masking()
    >>> lesson.visible[1].astype(int), lesson.largest_future
    (array([1, 1, 0, 0, 0]), 0.0)
    """
    length, d_k, kv_len = 5, 8, 3
    rng = np.random.default_rng(0)
    query, key = rng.standard_normal((2, length, d_k))
    position = np.arange(length)
    visible = in_window(position[:, None], position, left=length, right=0)
    causal = attention_weights(query, key, causal=True)
    padded = attention_weights(query, key, kv_len=kv_len)
    return Masking(
        visible=visible,
        weights=causal,
        row_sums=tuple(causal.sum(axis=-1).tolist()),
        largest_future=float(causal[~visible].max()),
        kv_len=kv_len,
        padded_weights=padded,
        largest_padded=float(padded[:, kv_len:].max()),
    )
