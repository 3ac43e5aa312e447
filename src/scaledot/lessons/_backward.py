"""What reaches queries and keys on the way back, with and without the scale."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from scaledot import plot
from scaledot._attention import attention_weights
from scaledot.lessons._page import Table

Floats: TypeAlias = npt.NDArray[np.float64]

_NUM_SEEDS, _LEN_KV, _D_V = 256, 16, 16


@dataclass(frozen=True)
class Backward:
    """Result of `backward`; each tuple has one entry for each width.

    ``query_*`` and ``key_*`` are medians over seeds of the norm of the gradient that reaches one
    query and its keys; ``mean_ratio`` is that of the means of the query's.
    """

    title: ClassVar[str] = "Backward: without the scale the gradient stops arriving"
    text: ClassVar[str] = (
        "On the way back the weights' gradient passes softmax's Jacobian before it reaches Q and "
        "K. With the scale its typical size hardly depends on the width. Without it scores spread "
        "as √d_k, softmax saturates, and for the typical query almost nothing arrives. The "
        "mean does not show it: the few queries whose two best keys nearly tie get a gradient "
        "that is larger by √d_k. Rare and violent is no better for training than absent."
    )
    num_seeds: int
    d_k: tuple[int, ...]
    query_scaled: tuple[float, ...]
    query_unscaled: tuple[float, ...]
    key_scaled: tuple[float, ...]
    key_unscaled: tuple[float, ...]
    mean_ratio: tuple[float, ...]

    @property
    def query_ratio(self) -> tuple[float, ...]:
        """Unscaled by scaled, medians of the query's gradient."""
        return tuple(
            a / b for a, b in zip(self.query_unscaled, self.query_scaled, strict=True)
        )

    @property
    def key_ratio(self) -> tuple[float, ...]:
        """Unscaled by scaled, medians of the keys' gradient."""
        return tuple(a / b for a, b in zip(self.key_unscaled, self.key_scaled, strict=True))

    def tables(self) -> tuple[Table, ...]:
        """Return the medians for each width and their ratios."""
        columns = zip(
            self.query_scaled, self.query_unscaled, self.query_ratio,
            self.key_scaled, self.key_unscaled, self.key_ratio, self.mean_ratio, strict=True,
        )
        rows = tuple(
            (f"{d_k}", *(f"{number:#.2g}" for number in row))
            for d_k, row in zip(self.d_k, columns, strict=True)
        )
        return (
            Table(
                ("d_k", "dQ scaled", "unscaled", "ratio",
                 "dK scaled", "unscaled", "ratio", "means"),
                rows,
                f"median norms over {self.num_seeds} seeds, one query, {_LEN_KV} keys; "
                "means: ratio of dQ's means",
            ),
        )

    def plot(self, ax: plot.Axes | None = None) -> plot.Axes:
        """Draw the medians over the width."""
        return plot.curves(
            self.d_k,
            {
                "dQ, scaled": self.query_scaled,
                "dQ, unscaled": self.query_unscaled,
                "dK, scaled": self.key_scaled,
                "dK, unscaled": self.key_unscaled,
            },
            x_label="$d_k$",
            y_label="median norm of the gradient",
            title="Gradient that reaches Q and K",
            ax=ax,
        )


def backward() -> Backward:
    """Measure the gradient at Q and K, with and without the scale.

    Returns
    -------
    Backward
        Medians over 256 seeds for d_k = 4, 8, … 1024, with standard normal queries, keys, values
        and gradient of the result.

    Notes
    -----
    With weights p, ``J = diag(p) - p pᵀ`` and scale c: ``dS = J (V dO)``, ``dQ = c dS K`` and
    ``dK = c dSᵀ Q``, in float64.

    References
    ----------
    arXiv 1706.03762, section 3.2.1.
    """
    widths = tuple(2**i for i in range(2, 11))
    columns: list[tuple[float, ...]] = []
    for d_k in widths:
        scaled_q, scaled_k = _gradient_norms(d_k, 1 / math.sqrt(d_k))
        plain_q, plain_k = _gradient_norms(d_k, 1.0)
        medians = (float(np.median(x)) for x in (scaled_q, plain_q, scaled_k, plain_k))
        columns.append((*medians, float(plain_q.mean() / scaled_q.mean())))
    query_scaled, query_unscaled, key_scaled, key_unscaled, mean_ratio = zip(*columns, strict=True)
    return Backward(
        _NUM_SEEDS, widths, query_scaled, query_unscaled, key_scaled, key_unscaled, mean_ratio
    )


def _gradient_norms(d_k: int, scale: float) -> tuple[Floats, Floats]:
    """Norms of dQ and dK for each seed, (num_seeds,); the same numbers for every scale."""
    rng = np.random.default_rng(d_k)
    query = rng.standard_normal((_NUM_SEEDS, 1, 1, d_k))
    key = rng.standard_normal((_NUM_SEEDS, 1, _LEN_KV, d_k))
    value = rng.standard_normal((_NUM_SEEDS, 1, _LEN_KV, _D_V))
    grad_out = rng.standard_normal((_NUM_SEEDS, 1, 1, _D_V))
    grad_query, grad_key = _gradients(query, key, value, grad_out, scale)
    return (
        np.linalg.norm(grad_query.reshape(_NUM_SEEDS, -1), axis=-1),
        np.linalg.norm(grad_key.reshape(_NUM_SEEDS, -1), axis=-1),
    )


def _gradients(
    query: Floats, key: Floats, value: Floats, grad_out: Floats, scale: float
) -> tuple[Floats, Floats]:
    """Gradients of sum(out * grad_out) by query (..., len_q, d_k) and key (..., len_kv, d_k)."""
    p = attention_weights(query, key, scale=scale)  # (..., len_q, len_kv)
    grad_weights = grad_out @ value.swapaxes(-1, -2)  # (..., len_q, len_kv)
    # J x = p * (x - p·x), without the matrix.
    grad_scores = p * (grad_weights - (p * grad_weights).sum(axis=-1, keepdims=True))
    return scale * grad_scores @ key, scale * grad_scores.swapaxes(-1, -2) @ query
