"""Axes, colours and labels that the pictures share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from scaledot import _arrays
from scaledot._errors import value_error
from scaledot.plot._extra import matplotlib_package
from scaledot.plot._text import MOST_CHARACTERS, glyphs, token

Axes: TypeAlias = Any
"""A ``matplotlib.axes.Axes``; the type is not named, so that Matplotlib stays optional."""

Floats: TypeAlias = npt.NDArray[np.float64]

# Colours of Okabe and Ito, which all common kinds of colour blindness tell apart.
BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#E8E8E8"
SERIES = (BLUE, RED, GREEN, ORANGE)

MOST_LABELS = 64
LONG_FIGURE = 6.4, 5.4
"""Width and height of pictures of long inputs, in inches."""
LINE = 0.127
"""Inches from one line of a label to the next, at least: labels are 9 points high."""


def axes(width: float = 5.0, height: float = 4.0) -> Axes:
    """Return empty axes on a new figure.

    Parameters
    ----------
    width, height : float
        Size of the figure in inches.

    Returns
    -------
    matplotlib.axes.Axes
        Its figure is ``axes().figure``.

    Raises
    ------
    ImportError
        Matplotlib is not installed; the message names the command that installs it.
    """
    matplotlib_package()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=150, layout="constrained").add_subplot()


def numbers(name: str, x: Any, shapes: str, what_to_do: str, *ranks: int) -> Floats:
    """Return x as float64 on the host; its rank is one of ``ranks`` and it is not empty."""
    known = _arrays.host(x) if _arrays.library(x) else np.asarray(x)
    if known is None or known.ndim not in ranks or not known.size:
        given = "traced values" if known is None else f"the shape {known.shape}"
        raise value_error(f"{name} must be {shapes}", given, what_to_do)
    return known.astype(np.float64)


def matrix_of(name: str, x: Any) -> Floats:
    """Return x as a float64 matrix on the host."""
    hint = "Choose one head, for example weights[0, 3]."
    return numbers(name, x, "a matrix (len_q, len_kv)", hint, 2)


def axes_for_matrix(
    shape: tuple[int, int],
    row_labels: Sequence[str] | None = None,
    column_labels: Sequence[str] | None = None,
) -> Axes:
    """Axes on a figure that leaves each cell, and its label, room within limits."""
    rows, columns = shape
    if column_labels is None and rows == columns:
        column_labels = row_labels
    # Eight characters always have room.
    left, below = (
        0.07 * max(0, min(MOST_CHARACTERS, max((len(str(x)) for x in labels), default=0)) - 8)
        for labels in (row_labels or (), column_labels or ())
    )
    return axes(min(12.0, 2.2 + 0.3 * columns + left), min(11.0, 1.8 + 0.28 * rows + below))


def inches(ax: Axes) -> tuple[float, float]:
    """Width and height of axes, before the figure's layout moves them a little."""
    box = ax.get_window_extent()
    return box.width / ax.figure.dpi, box.height / ax.figure.dpi


def _room(ax: Axes, side: str) -> float:
    """Inches that a side will have once labels, titles and a colour bar have taken theirs.

    Before it is laid out, an only subplot has 0.775 of the figure's width and 0.77 of its height.
    """
    width, height = inches(ax)
    return width / 0.775 - 2.3 if side == "x" else height / 0.77 - 1.6


def label_matrix(
    ax: Axes,
    shape: tuple[int, int],
    row_labels: Sequence[str] | None,
    column_labels: Sequence[str] | None,
) -> None:
    """Put one label at each row and column; every n-th of them where they would overlap."""
    rows, columns = shape
    if column_labels is None and rows == columns:
        column_labels = row_labels
    label_side(ax, "y", rows, row_labels, "row_labels")
    label_side(ax, "x", columns, column_labels, "column_labels")


def check_labels(name: str, labels: Sequence[str] | None, length: int) -> None:
    """Raise unless there is one label for each of ``length`` places, or none at all."""
    if labels is not None and len(labels) != length:
        raise value_error(
            f"{name} must have one label for each of {length}", len(labels), "Add or drop some."
        )


def label_side(
    ax: Axes, side: str, length: int, labels: Sequence[str] | None, name: str = "labels"
) -> None:
    """Label the whole numbers below ``length`` of the x or the y axis; numbers without labels."""
    check_labels(name, labels, length)
    if labels is None:
        count_side(ax, side, length)
        return
    step = math.ceil(length / max(2, min(MOST_LABELS, int(_room(ax, side) / LINE))))
    places, texts = range(0, length, step), [token(label) for label in labels[::step]]
    rotation = 90 if side == "x" and max(map(len, texts)) > 2 else 0
    # A dollar sign in a token is no formula.
    set_ticks = ax.set_xticks if side == "x" else ax.set_yticks
    set_ticks(places, texts, rotation=rotation, fontsize=9, parse_math=False)


def count_side(ax: Axes, side: str, length: int) -> None:
    """Ticks at whole numbers below ``length``, as many as there is room for, at most 16."""
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    axis = ax.xaxis if side == "x" else ax.yaxis
    need = 0.1 * (2 + len(f"{length:,}")) if side == "x" else 0.18
    most = 16 if length <= 16 else 8
    bins = max(2, min(most, int(_room(ax, side) / need)))
    axis.set_major_locator(MaxNLocator(bins, integer=True, min_n_ticks=1))
    axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def name_axes(ax: Axes, x_label: str, y_label: str, title: str) -> None:
    """Write what is on the axes, and a title where there is one."""
    ax.set_xlabel(glyphs(x_label))
    ax.set_ylabel(glyphs(y_label))
    if title:
        ax.set_title(glyphs(title), fontsize=11, parse_math=False)


def legend(ax: Axes, own: bool, columns: int) -> None:
    """Put the legend below the axes on a figure of our own, inside the axes on another's."""
    if own:
        ax.figure.legend(loc="outside lower center", ncols=columns, frameon=False)
    else:
        ax.legend(fontsize=8)


def contrast(first: Sequence[float], second: Sequence[float]) -> float:
    """Contrast of two colours (red, green, blue from 0 to 1), 1 to 21, as WCAG 2 defines it."""
    luminances = []
    for colour in (first, second):
        c = np.asarray(colour[:3])
        linear = np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)
        luminances.append(float(linear @ [0.2126, 0.7152, 0.0722]))
    low, high = sorted(luminances)
    return (high + 0.05) / (low + 0.05)


def readable_on(colour: Sequence[float]) -> str:
    """Black or white, whichever stands out more from a colour."""
    black, white = contrast(colour, (0, 0, 0)), contrast(colour, (1, 1, 1))
    return "black" if black >= white else "white"


def bin_edges(length: int, bins: int) -> npt.NDArray[np.int64]:
    """Where bins begin and end, (bins + 1,): place i is in bin ``i * bins // length``."""
    return -(-np.arange(bins + 1, dtype=np.int64) * length // bins)


def block_map(weights: Floats, rows: int, columns: int) -> Floats:
    """Weights (..., len_q, len_kv) as means over bins of queries of sums over bins of keys."""
    edges = [bin_edges(n, m) for n, m in zip(weights.shape[-2:], (rows, columns), strict=True)]
    sums = np.add.reduceat(weights, edges[1][:-1], axis=-1)
    counts: Floats = np.diff(edges[0])[:, None].astype(np.float64)
    return np.add.reduceat(sums, edges[0][:-1], axis=-2) / counts
