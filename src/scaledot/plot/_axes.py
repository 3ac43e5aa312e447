"""Axes, colours and labels that the pictures share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from scaledot import _arrays, _checks
from scaledot._errors import type_error, value_error
from scaledot._stats import bin_edges, pooled
from scaledot.plot._extra import matplotlib_package
from scaledot.plot._text import MOST_CHARACTERS, glyphs, text_width, token, wrapped

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
BAR, NOTHING = 1.05, 0.15
"""Inches at the right of axes that have a colour bar, and of those that have not."""
TITLE = 11
"""Points of the letters of a title."""
MOST_DIGITS = 16
"""Decimals: a float64 has no more."""


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
    ValueError
        A side is not above 0.

    Notes
    -----
    The figure has 150 dots per inch and Matplotlib's constrained layout, and ``pyplot`` does not
    know it: it goes when nothing refers to it any more.

    Examples
    --------
    >>> from scaledot import plot
    >>> ax = plot.axes(6, 3)
    >>> ax.figure.get_size_inches().tolist()
    [6.0, 3.0]
    """
    matplotlib_package()
    if not (width > 0 and height > 0):
        raise value_error(
            "width and height must be above 0", f"{width} and {height}", "They are in inches."
        )
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=150, layout="constrained").add_subplot()


def numbers(name: str, x: Any, shapes: str, what_to_do: str, *ranks: int) -> Floats:
    """Return x as float64 on the host; its rank is one of ``ranks`` and it is not empty."""
    try:
        known = _arrays.host(x) if _arrays.library(x) else np.asarray(x)
    except ValueError:  # rows of different lengths
        raise value_error(f"{name} must be {shapes}", "rows that differ in length",
                          what_to_do) from None  # fmt: skip
    if known is not None and known.dtype.kind in "OSUMmc":
        given = type(x).__name__ if known.dtype == object else f"the dtype {known.dtype}"
        raise type_error(f"{name} must hold real numbers", given, f"It is {shapes}.")
    if known is None or known.ndim not in ranks or not known.size:
        given = "traced values" if known is None else f"the shape {known.shape}"
        raise value_error(f"{name} must be {shapes}", given, what_to_do)
    return known.astype(np.float64)


def largest_of(x: Floats) -> float:
    """The end of a scale from 0: the largest finite number, or 1 where none is above 0."""
    largest = float(x.max(initial=0.0, where=np.isfinite(x)))
    return largest or 1.0


def check_count(name: str, value: Any, most: int) -> int:
    """Return an integer from 0 to ``most``, or raise."""
    number = _checks.integer(name, value)
    if not 0 <= number <= most:
        raise value_error(f"{name} must be 0 to {most}", number, "Choose a number between.")
    return number


def matrix_of(name: str, x: Any) -> Floats:
    """Return x as a float64 matrix on the host."""
    hint = "Choose one head, for example weights[0, 3]."
    return numbers(name, x, "a matrix (len_q, len_kv)", hint, 2)


def axes_for_matrix(
    shape: tuple[int, int],
    row_labels: Sequence[str] | None = None,
    column_labels: Sequence[str] | None = None,
    title: str = "",
    beside: float = BAR,
) -> Axes:
    """Axes on a figure that leaves each cell, and its label, room within limits; so with a title.

    ``beside`` is what stands at the right of the axes, in inches.
    """
    rows, columns = shape
    if column_labels is None and rows == columns:
        column_labels = row_labels
    # Eight characters always have room.
    left, below = (
        0.07 * max(0, min(MOST_CHARACTERS, max((len(str(x)) for x in labels), default=0)) - 8)
        for labels in (row_labels or (), column_labels or ())
    )
    needed = min(text_width(glyphs(title), TITLE), 4.5) + (1.15 if row_labels else 0.75) + left
    return axes(min(12.0, max(2.2 + 0.3 * columns + left, needed + beside)),
                min(11.0, 1.8 + 0.28 * rows + below))


def inches(ax: Axes) -> tuple[float, float]:
    """Width and height of axes, before the figure's layout moves them a little."""
    box = ax.get_window_extent()
    return box.width / ax.figure.dpi, box.height / ax.figure.dpi


def room(ax: Axes, beside: float) -> tuple[float, float]:
    """Width and height that axes will have, in inches, once their labels and a title have theirs.

    Labels count that are there already, and ``beside`` for what stands at the right. Before it is
    laid out, an only subplot has 0.775 of the figure's width and 0.77 of its height.
    """
    across, down = inches(ax)
    left, below = (
        [(text_width(one.get_text(), one.get_size(), one.get_parse_math()), one)
         for one in ticks if one.get_text()]
        for ticks in (ax.get_yticklabels(), ax.get_xticklabels())
    )  # fmt: skip
    lines = (LINE * (1 + one.get_text().count("\n")) for _, one in below)
    turned = (wide for wide, one in below if one.get_rotation())
    names = LINE * (1.5 + ax.get_xlabel().count("\n"))
    return (
        max(0.6, across / 0.775 - max((wide for wide, _ in left), default=0.0) - 0.45 - beside),
        max(0.6, down / 0.77 - max([0.0, *lines, *turned]) - names - 0.45),
    )


def label_matrix(
    ax: Axes,
    shape: tuple[int, int],
    row_labels: Sequence[str] | None,
    column_labels: Sequence[str] | None,
    beside: float = BAR,
) -> None:
    """Put one label at each row and column; every n-th of them where they would overlap."""
    rows, columns = shape
    if column_labels is None and rows == columns:
        column_labels = row_labels
    label_side(ax, "y", rows, row_labels, "row_labels", beside)
    label_side(ax, "x", columns, column_labels, "column_labels", beside)


def check_labels(name: str, labels: Sequence[str] | None, length: int) -> None:
    """Raise unless there is one label for each of ``length`` places, or none at all."""
    if labels is None:
        return
    if isinstance(labels, str) or not hasattr(labels, "__len__"):
        raise type_error(
            f"{name} must be a sequence of str", type(labels).__name__, "Pass a list of tokens."
        )
    if len(labels) != length:
        raise value_error(
            f"{name} must have one label for each of {length}", len(labels), "Add or drop some."
        )


def label_side(
    ax: Axes,
    side: str,
    length: int,
    labels: Sequence[str] | None,
    name: str = "labels",
    beside: float = BAR,
) -> None:
    """Label the whole numbers below ``length`` of the x or the y axis; numbers without labels."""
    check_labels(name, labels, length)
    if labels is None:
        count_side(ax, side, length, beside)
        return
    step = math.ceil(length / max(2, min(MOST_LABELS, int(_along(ax, side, beside) / LINE))))
    places, texts = range(0, length, step), [token(label) for label in labels[::step]]
    rotation = 90 if side == "x" and max(map(len, texts)) > 2 else 0
    # A dollar sign in a token is no formula.
    set_ticks = ax.set_xticks if side == "x" else ax.set_yticks
    set_ticks(places, texts, rotation=rotation, fontsize=9, parse_math=False)


def count_side(ax: Axes, side: str, length: int, beside: float = BAR) -> None:
    """Ticks at whole numbers below ``length``, as many as there is room for, at most 16."""
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    axis = ax.xaxis if side == "x" else ax.yaxis
    need = 0.1 * (2 + len(f"{length:,}")) if side == "x" else 0.18
    most = 16 if length <= 16 else 8
    bins = max(2, min(most, int(_along(ax, side, beside) / need)))
    axis.set_major_locator(MaxNLocator(bins, integer=True, min_n_ticks=1))
    axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def _along(ax: Axes, side: str, beside: float) -> float:
    """Inches that a side will have; below the y axis stand labels that are not there yet."""
    return room(ax, beside)[0] if side == "x" else max(0.6, inches(ax)[1] / 0.77 - 1.6)


def name_axes(ax: Axes, x_label: str, y_label: str, title: str, beside: float = NOTHING) -> None:
    """Write what is on the axes, and a title where there is one; broken into lines that fit."""
    size, across = ax.xaxis.label.get_size(), room(ax, beside)[0]
    ax.set_xlabel(wrapped(glyphs(x_label), size, across + 0.3) if " " in x_label else x_label)
    ax.set_ylabel(glyphs(y_label))
    if title:
        ax.set_title(wrapped(glyphs(title), TITLE, across), fontsize=TITLE, parse_math=False)


def colour_bar(ax: Axes, image: Any, label: str, shrink: float = 1.0) -> None:
    """A colour bar beside the axes, whose label is broken into lines that fit."""
    bar = ax.figure.colorbar(image, ax=ax, shrink=shrink)
    bar.set_label(wrapped(glyphs(label), bar.ax.yaxis.label.get_size(), room(ax, BAR)[1] + 0.3))


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


def block_map(weights: Floats, rows: int, columns: int) -> Floats:
    """Weights (..., len_q, len_kv) as means over bins of queries of sums over bins of keys."""
    len_q, len_kv = weights.shape[-2:]
    starts = bin_edges(len_q, rows)[:-1], bin_edges(len_kv, columns)[:-1]
    return pooled(weights, np.ones(len_q), *starts)
