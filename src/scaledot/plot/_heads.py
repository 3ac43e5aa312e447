"""One number for each head of each layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from scaledot._errors import value_error
from scaledot.plot._axes import (
    Axes,
    Floats,
    axes,
    check_labels,
    inches,
    label_side,
    name_axes,
    numbers,
    readable_on,
)

_CELL = 0.34
"""Inches that a number of four characters needs."""


def head_map(
    values: Any,
    *,
    label: str = "",
    digits: int = 2,
    smallest: float | None = 0.0,
    largest: float | None = None,
    layer_labels: Sequence[str] | None = None,
    head_labels: Sequence[str] | None = None,
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Draw one number for each head: rows = layers, columns = heads.

    Parameters
    ----------
    values : array, shape (num_layers, num_heads)
        Any number of a head; brighter is larger. Where there is none, nan: such cells are white.
    label : str
        What the numbers are, at the colour bar.
    digits : int
        Decimals of the numbers, which are written in the cells where these are large enough.
    smallest, largest : float, optional
        Ends of the scale of colours; None is the smallest or the largest of the values.
    layer_labels, head_labels : sequence of str, optional
        Instead of numbers.
    title : str
        Above the picture.
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure without it.

    Returns
    -------
    matplotlib.axes.Axes
        Has the map, its labels and a colour bar.

    Raises
    ------
    ImportError
        Matplotlib is not installed.
    ValueError
        Not a matrix, or labels that do not fit.
    """
    hint = "Take a mean over the other axes first."
    matrix = numbers("values", values, "a matrix (num_layers, num_heads)", hint, 2)
    num_layers, num_heads = matrix.shape
    check_labels("layer_labels", layer_labels, num_layers)
    check_labels("head_labels", head_labels, num_heads)
    if ax is None:
        ax = axes(min(13.0, max(3.2, 2.0 + 0.45 * num_heads)),
                  min(12.0, max(2.0, 1.3 + 0.32 * num_layers)))
    finite = matrix[np.isfinite(matrix)]
    finite = finite if finite.size else np.zeros(1)
    low = float(finite.min()) if smallest is None else smallest
    high = float(finite.max()) if largest is None else largest
    high = high if high > low else low + 1.0
    image = ax.imshow(matrix, cmap="cividis", vmin=low, vmax=high, aspect="auto")
    width, height = inches(ax)
    if width / num_heads >= _CELL * max(1.0, (digits + 2) / 4) and height / num_layers >= 0.17:
        for (i, j), value in np.ndenumerate(matrix):
            if math.isfinite(value):
                colour = readable_on(image.cmap(image.norm(value)))
                ax.text(j, i, f"{value:.{digits}f}", ha="center", va="center", fontsize=8,
                        color=colour)
    label_side(ax, "y", num_layers, layer_labels, "layer_labels")
    label_side(ax, "x", num_heads, head_labels, "head_labels")
    name_axes(ax, "head", "layer", title)
    ax.figure.colorbar(image, ax=ax, label=label)
    return ax


def entropy(
    values: Any, *, digits: int = 2, title: str = "Entropy of the weights", ax: Axes | None = None
) -> Axes:
    """Draw the entropy of the weights by layer and head: 0 is one key, log n is n keys alike.

    Parameters
    ----------
    values : Stats, sequence of Stats, or array
        What `scaledot.attention_stats` returns for one sequence, of one layer or of each; or
        entropies in nats, (num_layers, num_heads) or (num_layers, num_heads, len_q). Means over
        the queries that see something are drawn; of arrays, over all.
    digits, title, ax : optional
        As in `head_map`.

    Returns
    -------
    matplotlib.axes.Axes
        As `head_map`.

    Raises
    ------
    ImportError
        Matplotlib is not installed.
    ValueError
        Arrays of another shape, more than one sequence, or layers with different numbers of heads.

    See Also
    --------
    saturation : How far softmax is from its flat ends.
    """
    matrix = _by_head("entropy", values)
    return head_map(matrix, label="entropy (nats), mean over queries", digits=digits, title=title,
                    ax=ax)


def saturation(
    values: Any, *, digits: int = 3, title: str = "Largest slope of softmax", ax: Axes | None = None
) -> Axes:
    """Draw p·(1 − p) of the largest weight p by layer and head: near 0 softmax is saturated.

    It is the largest entry of the Jacobian of softmax. The scale ends at 1/4, its bound.

    Parameters
    ----------
    values : Stats, sequence of Stats, or array
        As in `entropy`: ``stats.saturation`` is drawn.
    digits, title, ax : optional
        As in `head_map`.

    Returns
    -------
    matplotlib.axes.Axes
        As `head_map`.

    Raises
    ------
    ImportError, ValueError
        As in `entropy`.

    References
    ----------
    arXiv 1706.03762, section 3.2.1, on the small gradients of large scores.
    """
    matrix = _by_head("saturation", values)
    return head_map(matrix, label="p·(1 − p), mean over queries", digits=digits, largest=0.25,
                    title=title, ax=ax)


def _by_head(name: str, given: Any) -> Floats:
    """Means over queries, (num_layers, num_heads), of a field of Stats or of arrays."""
    if hasattr(given, name):
        given = [given]
    if not isinstance(given, (list, tuple)) or not all(hasattr(one, name) for one in given):
        x = numbers(
            "values", given, "(num_layers, num_heads) or (num_layers, num_heads, len_q)",
            "Or pass what scaledot.attention_stats returns.", 2, 3,
        )
        return x if x.ndim == 2 else x.mean(axis=-1)
    layers = [_means(getattr(one, name), one.visible) for one in given]
    counts = [len(layer) for layer in layers]
    if len(set(counts)) != 1:
        raise value_error(
            "all layers must have the same number of heads", counts, "Draw two pictures."
        )
    return np.stack(layers)


def _means(values: Any, visible: Any) -> Floats:
    """Means (num_heads,) of values (..., num_heads, len_q) over queries that see something."""
    x, seen = of_sequence(values), of_sequence(visible) > 0
    sums: Floats = np.where(seen, x, 0.0).sum(axis=-1)
    means: Floats = sums / np.maximum(1, seen.sum(axis=-1))
    return means


def of_sequence(x: Any) -> Floats:
    """A field of Stats as (num_heads, len): leading axes are of length 1, one head may be none."""
    rows = numbers(
        "Stats", x, "of at least one head", "Pass what attention_stats returns.", *range(1, 9)
    )
    if math.prod(rows.shape[:-2]) != 1:
        raise value_error(
            "Stats must be those of one sequence", f"the shape {rows.shape}",
            "Choose one entry of the leading axes.",
        )
    return rows.reshape(-1, rows.shape[-1])
