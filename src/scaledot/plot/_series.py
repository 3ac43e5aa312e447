"""Bars and curves, and what the lessons draw with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from scaledot._errors import value_error
from scaledot.plot._axes import (
    GREY,
    SERIES,
    Axes,
    axes,
    check_labels,
    legend,
    name_axes,
    numbers,
)
from scaledot.plot._text import glyphs, token


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
        One bar in every group for each entry; up to four.
    digits : int
        Decimals of the values.
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
    ValueError
        More than four series, or one that has not a value for each group.
    """
    _check_series("series", series, len(groups))
    own = ax is None
    ax = axes(max(4.0, 1.0 + 2.2 * len(groups)), 4.2) if ax is None else ax
    width = 0.8 / max(1, len(series))
    centres = np.arange(len(groups), dtype=float)
    for i, (name, values) in enumerate(series.items()):
        offset = (i - (len(series) - 1) / 2) * width
        drawn = ax.bar(centres + offset, values, 0.94 * width, label=glyphs(name), color=SERIES[i])
        ax.bar_label(drawn, fmt=f"%.{digits}f", padding=2, fontsize=9)
    ax.set_xticks(centres, [glyphs(group) for group in groups], parse_math=False)
    ax.margins(y=0.12)
    ax.spines[["top", "right"]].set_visible(False)
    name_axes(ax, "", y_label, title)
    legend(ax, own, len(series))
    return ax


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
        Positive; each value is a tick.
    measured : mapping of str to sequence of float
        Positive values, drawn as marks on a line; up to four.
    expected : mapping of str to sequence of float, optional
        What theory says, drawn dashed in the colour of the curve at the same place of
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
    ValueError
        More than four curves, or one that has not a value for each x.
    """
    expected = expected or {}
    _check_series("measured", measured, len(x))
    _check_series("expected", expected, len(x))
    own = ax is None
    ax = axes(5.6, 4.4) if ax is None else ax
    for colour, (name, values) in zip(SERIES, expected.items(), strict=False):
        ax.plot(x, values, color=colour, linestyle="--", linewidth=1, label=glyphs(name))
    # Hollow marks of different shapes: curves that lie on each other all stay visible. Beside
    # the dashed lines of theory there are marks alone.
    line = "" if expected else "-"
    for colour, shape, (name, values) in zip(SERIES, "os^D", measured.items(), strict=False):
        ax.plot(
            x, values, color=colour, linestyle=line, marker=shape, markersize=8,
            markerfacecolor="none", markeredgewidth=1.5, label=glyphs(name),
        )
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xticks(x, [f"{value:g}" for value in x])
    ax.set_xticks([], minor=True)
    ax.grid(visible=True, which="major", color=GREY)
    ax.spines[["top", "right"]].set_visible(False)
    name_axes(ax, x_label, y_label, title)
    legend(ax, own, 2)
    return ax


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
        Decimals of the weights.
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
    ValueError
        No scores or more than four, one that is not finite, no scales, or labels that do not fit.

    Notes
    -----
    The largest entry of ``diag(p) - p pᵀ`` is that of the weight p nearest to 1/2, ``p (1 - p)``.

    References
    ----------
    arXiv 1706.03762, section 3.2.1.
    """
    row = numbers("scores", scores, "a row of scores (len_kv,)", "Pass a list of numbers.", 1)
    given = {f"scale {scale:.4g}": scale for scale in scales} if not isinstance(
        scales, Mapping) else dict(scales)
    factors = numbers(
        "scales", list(given.values()), "one number or more", "Pass a list of numbers.", 1
    )
    if not np.isfinite(row).all() or not np.isfinite(factors).all():
        raise value_error("scores and scales must be finite", [*row, *factors], "Leave others out.")
    check_labels("labels", labels, len(row))
    names = [f"key {i}" for i in range(len(row))] if labels is None else map(token, labels)
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
    ValueError
        Not one value for each width.

    References
    ----------
    arXiv 1706.03762, footnote 4.
    """
    _check_series("the variances", {"unscaled": unscaled}, len(d_k))
    if scaled is None:
        scaled = [value / width for value, width in zip(unscaled, d_k, strict=True)]
    return curves(
        d_k,
        {"q·k": unscaled, r"q·k / $\sqrt{d_k}$": scaled},
        {"theory: $d_k$": d_k, "theory: 1": [1.0] * len(d_k)},
        x_label="$d_k$",
        y_label="variance",
        title=title,
        ax=ax,
    )


def _check_series(name: str, series: Mapping[str, Sequence[float]], length: int) -> None:
    if len(series) > len(SERIES):
        raise value_error(
            f"{name} must hold at most {len(SERIES)} entries", len(series), "Draw two pictures."
        )
    for label, values in series.items():
        if len(values) != length:
            raise value_error(
                f"each entry of {name} must have {length} values",
                f"{len(values)} for {label!r}", "Give one value for each place.",
            )
