"""Bars and curves, and what the lessons draw with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from scaledot._errors import type_error, value_error
from scaledot.plot._axes import (
    GREY,
    MOST_DIGITS,
    NOTHING,
    SERIES,
    TITLE,
    Axes,
    Floats,
    axes,
    check_count,
    check_labels,
    legend,
    name_axes,
    numbers,
    room,
)
from scaledot.plot._text import glyphs, text_width, token

# What tells series apart where colours do not: in grey, and to readers who see few of them.
_HATCHES = ("", "///", "...", "xxx")
_MARKS = "os^D"
_DASHES = ("--", ":", "-.", (0, (8, 2)))
_VALUE, _LABEL = 9, 10
"""Points of the letters of a value on a bar, and of the names below."""


def bars(
    groups: Sequence[str],
    series: Mapping[str, Sequence[float]],
    *,
    digits: int = 5,
    y_label: str = "",
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Draw groups of bars, each with its value written on it.

    Parameters
    ----------
    groups : sequence of str
        Written under the groups.
    series : mapping of str to sequence of float
        One bar in every group for each entry; up to four, with colours and hatches of their own.
    digits : int
        Decimals of the values, 0 to 16.
    y_label, title : str
        At the axis and above the picture.
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure without it.

    Returns
    -------
    matplotlib.axes.Axes
        Has the bars, their values and a legend.

    Raises
    ------
    ImportError
        Matplotlib is not installed.
    TypeError
        Values that are no real numbers, groups that are no sequence, series that are no mapping,
        or ``digits`` that is no integer.
    ValueError
        No series or more than four, one that has not a value for each group, or ``digits`` below
        0 or above 16.

    Notes
    -----
    A figure of its own is as wide as the values and the names need; axes that are given should be,
    too.

    Examples
    --------
    >>> from scaledot import plot
    >>> ax = plot.bars(["before", "after"], {"cat": [0.25, 0.5], "dog": [0.75, 0.5]}, digits=2)
    >>> [text.get_text() for text in ax.texts]
    ['0.25', '0.50', '0.75', '0.50']
    """
    check_labels("groups", groups, len(groups) if hasattr(groups, "__len__") else 0)
    rows = _check_series("series", series, len(groups), least=1)
    digits = check_count("digits", digits, MOST_DIGITS)
    names = [glyphs(group) for group in groups]
    own = ax is None
    ax = axes(_width_of_bars(names, rows, digits, title), 4.2) if ax is None else ax
    width = 0.8 / len(rows)
    centres = np.arange(len(groups), dtype=float)
    for i, (name, values) in enumerate(rows.items()):
        offset = (i - (len(rows) - 1) / 2) * width
        drawn = ax.bar(centres + offset, values, 0.94 * width, label=glyphs(name), color=SERIES[i],
                       edgecolor="white", linewidth=0, hatch=_HATCHES[i])
        ax.bar_label(drawn, fmt=f"%.{digits}f", padding=2, fontsize=_VALUE)
    ax.set_xticks(centres, names, fontsize=_LABEL, parse_math=False)
    ax.margins(y=0.12)
    ax.spines[["top", "right"]].set_visible(False)
    name_axes(ax, "", y_label, title, NOTHING)
    legend(ax, own, len(rows))
    return ax


def _width_of_bars(
    names: Sequence[str], rows: Mapping[str, Floats], digits: int, title: str
) -> float:
    """Inches of a figure on which neither the values on bars nor the names of groups touch."""
    numbers_on_bars = (f"{x:.{digits}f}" for values in rows.values() for x in values)
    bar = max(text_width(number, _VALUE) for number in numbers_on_bars) + 0.06
    group = max(bar * len(rows) / 0.8, *(text_width(name, _LABEL) + 0.15 for name in names))
    legend_width = sum(text_width(glyphs(name), _LABEL) + 0.7 for name in rows)
    needed = max(min(text_width(glyphs(title), TITLE), 6.0) + 1.0, legend_width)
    return max(4.0, needed, 1.0 + 1.05 * max(2.2, group) * len(names))


def curves(
    x: Sequence[float],
    measured: Mapping[str, Sequence[float]],
    expected: Mapping[str, Sequence[float]] | None = None,
    *,
    x_label: str = "",
    y_label: str = "",
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Draw curves over lengths or widths, both axes logarithmic.

    Parameters
    ----------
    x : sequence of float
        Positive; each value is a tick where its label has room.
    measured : mapping of str to sequence of float
        Positive values, drawn as marks on a line; up to four. nan leaves a gap.
    expected : mapping of str to sequence of float, optional
        What theory says, drawn as broken lines in the colour of the curve at the same place of
        ``measured``, which then has marks alone.
    x_label, y_label, title : str
        At the axes and above the picture.
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure without it.

    Returns
    -------
    matplotlib.axes.Axes
        Has the curves and a legend.

    Raises
    ------
    ImportError
        Matplotlib is not installed.
    TypeError
        Something else than real numbers, or curves that are no mapping.
    ValueError
        No measured curve or more than four, one that has not a value for each x, or a value that
        is not above 0: it has no place on a logarithmic axis.

    Notes
    -----
    Powers are straight lines: a slope of 2 is a cost that is quadratic in the length. Marks are
    hollow and of different shapes, so that curves that lie on each other all stay visible.

    Examples
    --------
    >>> from scaledot import plot
    >>> ax = plot.curves([256, 512], {"measured": [1.1, 3.9]}, {"quadratic": [1.0, 4.0]})
    >>> [line.get_label() for line in ax.lines]
    ['quadratic', 'measured']
    """
    places = _positive("x", numbers("x", x, "a row of numbers", "Pass a list of numbers.", 1))
    seen = _check_series("measured", measured, len(places), least=1)
    theory = _check_series("expected", expected or {}, len(places))
    for name, values in (*seen.items(), *theory.items()):
        _positive(f"values of {name!r}", values)
    own = ax is None
    if ax is None:
        ax = axes(max(5.6, min(text_width(glyphs(title), TITLE), 8.0) + 1.0), 4.4)
    for colour, dashes, (name, values) in zip(SERIES, _DASHES, theory.items(), strict=False):
        ax.plot(places, values, color=colour, linestyle=dashes, linewidth=1, label=glyphs(name))
    # Beside the broken lines of theory there are marks alone.
    line = "" if theory else "-"
    for colour, shape, (name, values) in zip(SERIES, _MARKS, seen.items(), strict=False):
        ax.plot(
            places, values, color=colour, linestyle=line, marker=shape, markersize=8,
            markerfacecolor="none", markeredgewidth=1.5, label=glyphs(name),
        )
    ax.set_xscale("log")
    ax.set_yscale("log")
    across = room(ax, NOTHING)[0]
    shown = _with_room(places, across)
    ax.set_xticks(shown, [f"{value:g}" for value in shown], fontsize=_LABEL)
    ax.set_xticks([], minor=True)
    ax.grid(visible=True, which="major", color=GREY)
    ax.spines[["top", "right"]].set_visible(False)
    name_axes(ax, x_label, y_label, title, NOTHING)
    legend(ax, own, 2)
    return ax


def _with_room(places: Floats, across: float) -> list[float]:
    """Those of the places of a logarithmic axis, so many inches wide, whose labels do not touch."""
    known = np.unique(places)
    # Matplotlib leaves a twentieth at both ends.
    inch = (np.log(known) - np.log(known[0])) * 0.9 * across / (np.log(known[-1] / known[0]) or 1)
    shown, end = [], -np.inf
    for value, centre in zip(known.tolist(), inch, strict=True):
        half = text_width(f"{value:g}", _LABEL) / 2 + 0.04
        if centre - half >= end:
            shown.append(value)
            end = centre + half
    return shown


def softmax_bars(
    scores: Sequence[float],
    scales: Mapping[str, float] | Sequence[float] = (1.0,),
    *,
    labels: Sequence[str] | None = None,
    digits: int = 5,
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Draw softmax of a few scores at several scales, with its largest gradient at each.

    Parameters
    ----------
    scores : sequence of float
        One for each key; up to four.
    scales : mapping of str to float, or sequence of float
        What the scores are multiplied by, such as 1 and 1/√d_k, with names.
    labels : sequence of str, optional
        One for each key.
    digits : int
        Decimals of the weights, 0 to 16.
    title : str
        Above the picture.
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure without it.

    Returns
    -------
    matplotlib.axes.Axes
        As `bars`: a group for each scale, named with the largest entry of the softmax's Jacobian.

    Raises
    ------
    ImportError
        Matplotlib is not installed.
    TypeError
        Scores or scales that are no real numbers, labels that are no sequence, or ``digits`` that
        is no integer.
    ValueError
        No scores or more than four, one that is not finite, no scales, labels that do not fit, or
        ``digits`` below 0 or above 16.

    Notes
    -----
    The largest entry of ``diag(p) - p pᵀ`` is that of the weight p nearest to 1/2, ``p (1 - p)``.

    References
    ----------
    arXiv 1706.03762, section 3.2.1.

    Examples
    --------
    >>> from scaledot import plot
    >>> ax = plot.softmax_bars([10, 0], {"unscaled": 1.0, "divided by 10": 0.1}, digits=2)
    >>> [text.get_text() for text in ax.texts]
    ['1.00', '0.73', '0.00', '0.27']
    """
    if not isinstance(scales, Mapping) and not hasattr(scales, "__iter__"):
        raise type_error("scales must be a mapping or a sequence of float", type(scales).__name__,
                         "Pass a list, such as [1.0, 0.125].")  # fmt: skip
    row = numbers("scores", scores, "a row of scores (len_kv,)", "Pass a list of numbers.", 1)
    factors = numbers(
        "scales", list(scales.values()) if isinstance(scales, Mapping) else scales,
        "one number or more", "Pass a list of numbers.", 1,
    )
    given = list(scales) if isinstance(scales, Mapping) else [f"scale {x:.4g}" for x in factors]
    if not np.isfinite(row).all() or not np.isfinite(factors).all():
        raise value_error("scores and scales must be finite", [*row, *factors], "Leave others out.")
    check_labels("labels", labels, len(row))
    if len(row) > len(SERIES):
        raise value_error(f"scores must hold at most {len(SERIES)} entries", len(row),
                          "Draw the weights of more keys with scaledot.plot.weights.")  # fmt: skip
    names = [f"key {i}" for i in range(len(row))] if labels is None else _told_apart(labels)
    scaled = factors[:, None] * row
    p = np.exp(scaled - scaled.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)  # (scales, keys)
    slopes = (p * (1 - p)).max(axis=-1)
    groups = [
        f"{name}\nlargest gradient {slope:.6f}"
        for name, slope in zip(given, slopes, strict=True)
    ]
    series = dict(zip(names, p.T.tolist(), strict=True))
    return bars(groups, series, digits=digits, y_label="weight", title=title, ax=ax)


def _told_apart(labels: Sequence[str]) -> list[str]:
    """Labels of tokens, with their places where two are the same."""
    names = [token(label) for label in labels]
    return [f"{name} ({i})" if names.count(name) > 1 else name for i, name in enumerate(names)]


def variance(
    d_k: Sequence[int],
    unscaled: Sequence[float],
    scaled: Sequence[float] | None = None,
    *,
    title: str = "Variance of an inner product",
    ax: Axes | None = None,
) -> Axes:
    """Draw the variance of q·k over the width, with and without 1/√d_k, beside theory.

    Parameters
    ----------
    d_k : sequence of int
        Widths of the heads.
    unscaled : sequence of float
        Measured variance of q·k at each width; theory for standard normal numbers is d_k.
    scaled : sequence of float, optional
        That of q·k / √d_k, 1 in theory; without it ``unscaled / d_k``.
    title : str
        Above the picture.
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure without it.

    Returns
    -------
    matplotlib.axes.Axes
        As `curves`.

    Raises
    ------
    ImportError
        Matplotlib is not installed.
    TypeError
        Something else than real numbers.
    ValueError
        Not one value for each width, or a value that is not above 0.

    Notes
    -----
    The entries of q and k are independent with mean 0 and variance 1 in theory: then each product
    of two has variance 1, and so their sum has d_k.

    References
    ----------
    arXiv 1706.03762, footnote 4.

    Examples
    --------
    >>> from scaledot import plot
    >>> ax = plot.variance([4, 64], [4.4, 60.8])
    >>> [round(float(y), 3) for y in ax.lines[-1].get_ydata()]  # of q·k / √d_k
    [1.1, 0.95]
    """
    widths = _positive("d_k", numbers("d_k", d_k, "a row of widths", "Pass a list.", 1))
    given = {"unscaled": unscaled} | ({} if scaled is None else {"scaled": scaled})
    rows = _check_series("the variances", given, len(widths))
    after = rows.get("scaled", rows["unscaled"] / widths)
    return curves(
        widths.tolist(),
        {"q·k": rows["unscaled"].tolist(), r"q·k / $\sqrt{d_k}$": after.tolist()},
        {"theory: $d_k$": widths.tolist(), "theory: 1": [1.0] * len(widths)},
        x_label="$d_k$",
        y_label="variance",
        title=title,
        ax=ax,
    )


def _check_series(
    name: str, series: Mapping[str, Any], length: int, least: int = 0
) -> dict[str, Floats]:
    """Return the entries as rows of ``length`` numbers, or raise; ``least`` is how many must be."""
    if not isinstance(series, Mapping):
        raise type_error(f"{name} must be a mapping of names to numbers", type(series).__name__,
                         'Name each row: {"measured": [1.0, 2.0]}.')  # fmt: skip
    if len(series) > len(SERIES):
        raise value_error(
            f"{name} must hold at most {len(SERIES)} entries", len(series), "Draw two pictures."
        )
    if len(series) < least:
        raise value_error(f"{name} must hold an entry", "none", "There is nothing to draw.")
    rows = {}
    for label, values in series.items():
        rows[label] = numbers(f"{name}[{label!r}]", values, "a row of numbers", "Pass a list.", 1)
        if len(rows[label]) != length:
            raise value_error(
                f"each entry of {name} must have {length} values",
                f"{len(rows[label])} for {label!r}", "Give one value for each place.",
            )
    return rows


def _positive(name: str, values: Floats) -> Floats:
    """Return values, or raise where one is 0 or below; nan may stand for one that is missing."""
    if (values <= 0).any():
        raise value_error(f"{name} must be above 0", f"{values[values <= 0][0]:g}",
                          "Logarithms of others do not exist.")  # fmt: skip
    return values
