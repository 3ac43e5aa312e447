"""Pictures of attention on Matplotlib axes: weights, masks, bars and curves.

Needs the ``plot`` extra, which is imported by the first call, not with this module. Each function
draws on ``ax``, or on a figure of its own where there is none, and returns the axes. Figures are
made without ``pyplot``: nothing is registered globally, no window opens, no display is needed.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from scaledot import _arrays
from scaledot._errors import missing_extra, type_error, value_error

Axes: TypeAlias = Any
"""A ``matplotlib.axes.Axes``; the type is not named, so that Matplotlib stays optional."""

ENDINGS = (".png", ".svg")
"""File formats that `save` writes."""

# Colours of Okabe and Ito, which all common kinds of colour blindness tell apart.
BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#E8E8E8"
SERIES = (BLUE, RED, GREEN, ORANGE)

_MOST_LABELS = 64
_MOST_DIGITS = 16


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
    _matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=150, layout="constrained").add_subplot()


def weights(
    weights: Any,
    row_labels: Sequence[str] | None = None,
    column_labels: Sequence[str] | None = None,
    *,
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Draw attention weights as a heat map, rows = queries, columns = keys.

    Parameters
    ----------
    weights : array, shape (len_q, len_kv)
        One head; darker is larger. The scale starts at 0.
    row_labels : sequence of str, optional
        One for each query, such as its token.
    column_labels : sequence of str, optional
        One for each key; without them ``row_labels`` serve a square matrix.
    title : str
        Above the picture.
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure without it.

    Returns
    -------
    matplotlib.axes.Axes
        Has the heat map, its labels and a colour bar.

    Raises
    ------
    ImportError
        Matplotlib is not installed.
    ValueError
        The weights are not a matrix, or labels and matrix differ in length.

    Examples
    --------
    >>> import numpy as np
    >>> from scaledot import plot
    >>> drawing = plot.weights(np.eye(3), ["the", "animal", "slept"])  # doctest: +SKIP
    >>> plot.save(drawing, "weights.png")  # doctest: +SKIP
    """
    matrix = _matrix("weights", weights)
    rows, columns = matrix.shape
    ax = _axes_for_matrix(rows, columns) if ax is None else ax
    largest = float(matrix.max(initial=0.0))
    image = ax.imshow(matrix, cmap="Blues", vmin=0.0, vmax=largest or 1.0, aspect="auto")
    _label_matrix(ax, matrix.shape, row_labels, column_labels)
    _name_axes(ax, "key, looked at", "query, looks", title)
    ax.figure.colorbar(image, ax=ax, label="weight")
    return ax


def mask(
    visible: Any,
    row_labels: Sequence[str] | None = None,
    column_labels: Sequence[str] | None = None,
    *,
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Draw which query sees which key: 1 on blue is seen, 0 on grey is hidden.

    Parameters
    ----------
    visible : array of bool or of 0 and 1, shape (len_q, len_kv)
        True or 1 = may be seen. Digits are written in matrices of up to 16 × 16.
    row_labels, column_labels : sequence of str, optional
        As in `weights`.
    title : str
        Above the picture.
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure without it.

    Returns
    -------
    matplotlib.axes.Axes
        Has the picture and its labels.

    Raises
    ------
    ImportError
        Matplotlib is not installed.
    ValueError
        Not a matrix of 0 and 1, or labels that do not fit.
    """
    matrix = _matrix("visible", visible)
    if not np.isin(matrix, (0.0, 1.0)).all():
        raise value_error(
            "visible must hold only 0 and 1 (1 = may be seen)",
            f"numbers from {matrix.min():g} to {matrix.max():g}",
            "Draw weights with scaledot.plot.weights.",
        )
    rows, columns = matrix.shape
    ax = _axes_for_matrix(rows, columns) if ax is None else ax
    from matplotlib.colors import ListedColormap

    ax.imshow(matrix, cmap=ListedColormap([GREY, BLUE]), vmin=0, vmax=1, aspect="auto")
    if max(rows, columns) <= _MOST_DIGITS:
        for (i, j), seen in np.ndenumerate(matrix):
            ax.text(j, i, f"{seen:.0f}", ha="center", va="center", color="w" if seen else "k")
        # Lines between the cells: minor ticks lie on the cells' borders.
        ax.set_xticks(np.arange(columns + 1) - 0.5, minor=True)
        ax.set_yticks(np.arange(rows + 1) - 0.5, minor=True)
        ax.grid(which="minor", color="white", linewidth=2)
        ax.tick_params(which="minor", length=0)
    _label_matrix(ax, matrix.shape, row_labels, column_labels)
    _name_axes(ax, "key", "query", title)
    return ax


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
        drawn = ax.bar(centres + offset, values, 0.94 * width, label=name, color=SERIES[i])
        ax.bar_label(drawn, fmt=f"%.{digits}f", padding=2, fontsize=9)
    ax.set_xticks(centres, groups, parse_math=False)
    ax.margins(y=0.12)
    ax.spines[["top", "right"]].set_visible(False)
    _name_axes(ax, "", y_label, title)
    _legend(ax, own, len(series))
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
        ax.plot(x, values, color=colour, linestyle="--", linewidth=1, label=name)
    # Hollow marks of different shapes: curves that lie on each other all stay visible. Beside
    # the dashed lines of theory there are marks alone.
    line = "" if expected else "-"
    for colour, shape, (name, values) in zip(SERIES, "os^D", measured.items(), strict=False):
        ax.plot(
            x, values, color=colour, linestyle=line, marker=shape, markersize=8,
            markerfacecolor="none", markeredgewidth=1.5, label=name,
        )
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xticks(x, [f"{value:g}" for value in x])
    ax.set_xticks([], minor=True)
    ax.grid(visible=True, which="major", color=GREY)
    ax.spines[["top", "right"]].set_visible(False)
    _name_axes(ax, x_label, y_label, title)
    _legend(ax, own, 2)
    return ax


def check_target(path: str | os.PathLike[str], *, overwrite: bool = True) -> Path:
    """Raise unless `save` can write there, before any work is done for the picture.

    Parameters
    ----------
    path : str or path
        Ends in ``.png`` or ``.svg``; its folder exists.
    overwrite : bool
        Whether a file that exists may be replaced.

    Returns
    -------
    pathlib.Path
        The file; a link is followed.

    Raises
    ------
    ValueError
        The ending is another one.
    OSError
        The folder does not exist, the file exists and must stay, or the path is a folder.
    """
    target = Path(path)
    if target.suffix.lower() not in ENDINGS:
        raise value_error(
            f"the picture's file name must end in {' or '.join(ENDINGS)}",
            repr(str(target)),
            "The ending chooses the format.",
        )
    if target.is_dir():
        raise IsADirectoryError(
            f"The picture must be a file, got the folder {target}. Name a file in it."
        )
    if not target.parent.is_dir():
        raise FileNotFoundError(
            f"The picture's folder must exist, got {target.parent}. Create it first."
        )
    if target.exists() and not overwrite:
        raise FileExistsError(
            f"The picture must not exist yet, got {target}, which does. Choose another name, or "
            "replace it with overwrite=True (--force on the command line)."
        )
    return target.resolve()


def save(
    drawing: Any, path: str | os.PathLike[str], *, overwrite: bool = True
) -> Path:
    """Write a drawing as PNG or SVG, whole or not at all.

    The file is written beside its place under another name and then renamed.

    Parameters
    ----------
    drawing : matplotlib.axes.Axes or matplotlib.figure.Figure
        What the functions of this module return, or any other.
    path : str or path
        Ends in ``.png`` or ``.svg``.
    overwrite : bool
        Whether a file that exists is replaced.

    Returns
    -------
    pathlib.Path
        The file written.

    Raises
    ------
    ImportError
        Matplotlib is not installed.
    TypeError
        Not a drawing.
    ValueError, OSError
        As in `check_target`.
    """
    matplotlib = _matplotlib()
    target = check_target(path, overwrite=overwrite)
    figure = getattr(drawing, "figure", drawing)
    if not hasattr(figure, "savefig"):
        raise type_error(
            "drawing must be Matplotlib axes or a figure", type(drawing).__name__,
            "Pass what scaledot.plot.weights and its like return.",
        )
    kind = target.suffix.lower()[1:]
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    # Without a date and with a fixed salt the same drawing gives the same SVG.
    metadata = {"Date": None} if kind == "svg" else {}
    try:
        with matplotlib.rc_context({"svg.hashsalt": "scaledot"}):
            figure.savefig(temporary, format=kind, metadata=metadata)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return target


def _matplotlib() -> Any:
    """Import Matplotlib, or say how to install it."""
    try:
        import matplotlib
    except ImportError:
        raise missing_extra("matplotlib", "plot") from None
    return matplotlib


def _matrix(name: str, x: Any) -> npt.NDArray[np.float64]:
    """Return x as a float64 matrix on the host."""
    known = _arrays.host(x) if _arrays.library(x) else np.asarray(x)
    if known is None or known.ndim != 2 or not known.size:
        given = "traced values" if known is None else f"the shape {known.shape}"
        raise value_error(
            f"{name} must be a matrix (len_q, len_kv)", given,
            "Choose one head, for example weights[0, 3].",
        )
    return known.astype(np.float64)


def _axes_for_matrix(rows: int, columns: int) -> Axes:
    """Axes on a figure that leaves each cell room for its label, within limits."""
    return axes(min(12.0, 2.2 + 0.3 * columns), min(11.0, 1.8 + 0.28 * rows))


def _label_matrix(
    ax: Axes,
    shape: tuple[int, int],
    row_labels: Sequence[str] | None,
    column_labels: Sequence[str] | None,
) -> None:
    """Put one label at each row and column; every n-th of them where they would overlap."""
    rows, columns = shape
    if column_labels is None and rows == columns:
        column_labels = row_labels
    sides = (("row_labels", "y", rows, row_labels), ("column_labels", "x", columns, column_labels))
    for name, side, length, labels in sides:
        if labels is None:
            continue
        if len(labels) != length:
            raise value_error(
                f"{name} must have one label for each of {length}", len(labels), "Add or drop some."
            )
        step = math.ceil(length / _MOST_LABELS)
        places, texts = range(0, length, step), [str(label) for label in labels[::step]]
        rotation = 90 if side == "x" and max(map(len, texts)) > 2 else 0
        # A dollar sign in a token is no formula.
        set_ticks = ax.set_xticks if side == "x" else ax.set_yticks
        set_ticks(places, texts, rotation=rotation, fontsize=9, parse_math=False)


def _name_axes(ax: Axes, x_label: str, y_label: str, title: str) -> None:
    ax.set_xlabel(x_label)
    ax.set_ylabel(y_label)
    if title:
        ax.set_title(title, fontsize=11, parse_math=False)


def _legend(ax: Axes, own: bool, columns: int) -> None:
    """Put the legend below the axes on a figure of our own, inside the axes on another's."""
    if own:
        ax.figure.legend(loc="outside lower center", ncols=columns, frameon=False)
    else:
        ax.legend(fontsize=8)


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
