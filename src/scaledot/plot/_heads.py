"""One number for each head of each layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from scaledot import _arrays
from scaledot._errors import type_error, value_error
from scaledot._stats import Stats
from scaledot.plot._axes import (
    BAR,
    MOST_DIGITS,
    TITLE,
    Axes,
    Floats,
    axes,
    check_count,
    check_labels,
    colour_bar,
    inches,
    label_side,
    name_axes,
    numbers,
    readable_on,
)
from scaledot.plot._text import glyphs, text_width

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
        Decimals of the numbers, 0 to 16, which are written in cells that are large enough.
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
    TypeError
        Values that are no real numbers, ``digits`` that is no integer, labels that are no sequence.
    ValueError
        Not a matrix, ``digits`` below 0 or above 16, or labels that do not fit.

    Notes
    -----
    Numbers are black or white, whichever has the higher contrast to its cell. Cells are too small
    for them in large maps, which then show colours alone.

    Examples
    --------
    >>> import numpy as np
    >>> from scaledot import plot
    >>> ax = plot.head_map([[0.25, 0.5], [0.75, np.nan]], label="share")
    >>> [text.get_text() for text in ax.texts]
    ['0.25', '0.50', '0.75']
    """
    hint = "Take a mean over the other axes first."
    matrix = numbers("values", values, "a matrix (num_layers, num_heads)", hint, 2)
    digits = check_count("digits", digits, MOST_DIGITS)
    num_layers, num_heads = matrix.shape
    check_labels("layer_labels", layer_labels, num_layers)
    check_labels("head_labels", head_labels, num_heads)
    if ax is None:
        needed = min(text_width(glyphs(title), TITLE), 4.5) + 0.8 + BAR
        ax = axes(min(13.0, max(3.2, 2.0 + 0.45 * num_heads, needed)),
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
    name_axes(ax, "head", "layer", title, BAR)
    colour_bar(ax, image, label)
    return ax


def entropy(
    values: Any, *, digits: int = 2, title: str = "Entropy of the weights", ax: Axes | None = None
) -> Axes:
    """Draw the entropy of the weights by layer and head: 0 is one key, log n is n keys alike.

    Parameters
    ----------
    values : Stats, sequence of Stats, Summary, or array
        What `scaledot.attention_stats` returns for one sequence, of one layer or of each; what
        `scaledot.introspect.summary` returns; or entropies in nats, (num_layers, num_heads) or
        (num_layers, num_heads, len_q). Means over the queries that see something are drawn; of
        arrays, over all. A head of which no query sees anything is white.
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
    TypeError
        Something else than Stats, a Summary or numbers, or ``digits`` that is no integer.
    ValueError
        Arrays of another shape, more than one sequence, layers with different numbers of heads, or
        ``digits`` below 0 or above 16.

    See Also
    --------
    saturation : How far softmax is from its flat ends.

    Notes
    -----
    Entropies of different lengths compare by their share of log n: a head that spreads over 10
    keys has 2.3 nats, over 100,000 it has 11.5.

    References
    ----------
    Entropy of heads: arXiv 1906.04341.

    Examples
    --------
    >>> import numpy as np
    >>> import scaledot as sd
    >>> from scaledot import plot
    >>> x = np.zeros((2, 4, 8))  # two heads that look at four keys alike
    >>> ax = plot.entropy(sd.attention_stats(x, x))
    >>> [text.get_text() for text in ax.texts], round(np.log(4), 2)
    (['1.39', '1.39'], np.float64(1.39))
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
    values : Stats, sequence of Stats, Summary, or array
        As in `entropy`: their ``saturation`` is drawn.
    digits, title, ax : optional
        As in `head_map`.

    Returns
    -------
    matplotlib.axes.Axes
        As `head_map`.

    Raises
    ------
    ImportError, TypeError, ValueError
        As in `entropy`.

    Notes
    -----
    The Jacobian of softmax is ``diag(p) - p pᵀ``. For a query that sees one key alone it is 0
    whatever the scores are; such queries count in the mean.

    References
    ----------
    arXiv 1706.03762, section 3.2.1, on the small gradients of large scores.

    Examples
    --------
    >>> from scaledot import plot
    >>> ax = plot.saturation([[0.25, 0.001]])  # one layer: a head that can learn, one that hardly
    >>> ax.images[0].get_clim()
    (0.0, 0.25)
    """
    matrix = _by_head("saturation", values)
    return head_map(matrix, label="p·(1 − p), mean over queries", digits=digits, largest=0.25,
                    title=title, ax=ax)


def _by_head(name: str, given: Any) -> Floats:
    """Means over queries, (num_layers, num_heads), of a field of Stats, or of a table or arrays."""
    layers = [given] if isinstance(given, Stats) else given
    if not isinstance(layers, (list, tuple)) or not any(isinstance(x, Stats) for x in layers):
        return _of_arrays(name, given)
    if not all(isinstance(x, Stats) for x in layers):
        raise type_error(
            "layers must all be Stats", ", ".join(type(x).__name__ for x in layers),
            "Pass what attention_stats returns for each.",
        )
    means = [_means(getattr(one, name), one.visible) for one in layers]
    counts = [len(layer) for layer in means]
    if len(set(counts)) != 1:
        raise value_error(
            "all layers must have the same number of heads", counts, "Draw two pictures."
        )
    return np.stack(means)


def _of_arrays(name: str, given: Any) -> Floats:
    """Numbers (num_layers, num_heads) of an array or of a table by this name."""
    hint = "Or pass what scaledot.attention_stats returns."
    is_array = _arrays.library(given) is not None or hasattr(given, "__array__")
    if is_array or isinstance(given, (list, tuple)):
        shapes = "(num_layers, num_heads) or (num_layers, num_heads, len_q)"
        x = numbers("values", given, shapes, hint, 2, 3)
        return x if x.ndim == 2 else x.mean(axis=-1)
    field = getattr(given, name, None)
    if field is None or callable(field):
        raise type_error(f"values must be Stats, or numbers with {name} for each head",
                         type(given).__name__, hint)  # fmt: skip
    return numbers(f"values.{name}", field, "(num_layers, num_heads)", hint, 2)


def _means(values: Any, visible: Any) -> Floats:
    """Means (num_heads,) of values (..., num_heads, len_q) over queries that see something."""
    x, seen = of_sequence(values), of_sequence(visible) > 0
    sums, count = np.where(seen, x, 0.0).sum(axis=-1), seen.sum(axis=-1)
    means: Floats = np.divide(sums, count, out=np.full(count.shape, np.nan), where=count > 0)
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
