"""Why scores are divided by √d_k: large scores leave softmax without a slope."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from scaledot import plot
from scaledot._attention import attention_weights
from scaledot.lessons._page import Table


@dataclass(frozen=True)
class Case:
    """Two scores, their softmax, and the largest entry of its Jacobian."""

    name: str
    scores: tuple[float, float]
    weights: tuple[float, float]
    gradient: float


@dataclass(frozen=True)
class Saturation:
    """Result of `saturation`."""

    title: ClassVar[str] = "Saturation: large scores leave softmax without a slope"
    text: ClassVar[str] = (
        "Softmax turns scores into weights p; how far a weight moves when a score does is its "
        "Jacobian, diag(p) − p pᵀ, whose largest entry is at most 1/4. Dividing the scores 6 and 4 "
        "by √d_k = 2 nearly doubles it. With 10 and 1 one key has everything, the slope is "
        "almost 0, and training cannot change that row's mind."
    )
    cases: tuple[Case, ...]

    def tables(self) -> tuple[Table, ...]:
        """Return scores, weights and largest gradient of each case."""
        rows = tuple(
            (
                case.name,
                "  ".join(f"{score:g}" for score in case.scores),
                "  ".join(f"{weight:.5f}" for weight in case.weights),
                f"{case.gradient:.6f}",
            )
            for case in self.cases
        )
        return (Table(("case", "scores", "weights", "largest gradient"), rows),)

    def plot(self, ax: plot.Axes | None = None) -> plot.Axes:
        """Draw two bars for each case, the weights of its two keys."""
        groups = [
            f"{case.name}: {case.scores[0]:g} and {case.scores[1]:g}\n"
            f"largest gradient {case.gradient:.6f}"
            for case in self.cases
        ]
        first, second = zip(*(case.weights for case in self.cases), strict=True)
        return plot.bars(
            groups,
            {"first key": first, "second key": second},
            y_label="weight",
            title="Softmax of two scores",
            ax=ax,
        )


def saturation() -> Saturation:
    """Show how the scale 1/√d_k keeps softmax away from its flat ends.

    Returns
    -------
    Saturation
        ``cases``: q = [2, 3, 4, 1] with two keys, unscaled and scaled, and the scores [10, 1].

    Notes
    -----
    The largest entry of ``diag(p) - p pᵀ`` for the largest weight p is ``p (1 - p)``.

    References
    ----------
    arXiv 1706.03762, section 3.2.1.

    Examples
    --------
    >>> from scaledot import lessons
    >>> [round(case.weights[0], 5) for case in lessons.saturation().cases]
    [0.8808, 0.73106, 0.99988]
    """
    query = np.array([[2.0, 3.0, 4.0, 1.0]])
    keys = np.array([[1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 1.0]])
    return Saturation(
        cases=(
            _case("unscaled", query, keys, 1.0),
            _case("divided by 2", query, keys, 1 / np.sqrt(4)),
            _case("far apart", np.array([[10.0, 1.0]]), np.eye(2), 1.0),
        )
    )


def _case(name: str, query: np.ndarray, keys: np.ndarray, scale: float) -> Case:
    """Softmax of the two scores of one query (1, d_k) and keys (2, d_k), by the library."""
    p = attention_weights(query, keys, scale=float(scale))[0]  # (2,)
    jacobian = np.diag(p) - np.outer(p, p)
    first, second = (query @ keys.T)[0] * scale
    return Case(name, (float(first), float(second)), (float(p[0]), float(p[1])),
                float(jacobian.max()))
