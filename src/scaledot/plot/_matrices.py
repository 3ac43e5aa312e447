"""Weights and masks of one head, and small pictures of many heads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from scaledot import _checks
from scaledot._errors import type_error, value_error
from scaledot.plot._axes import (
    BAR,
    BLUE,
    GREY,
    LONG_FIGURE,
    NOTHING,
    TITLE,
    Axes,
    Floats,
    axes,
    axes_for_matrix,
    block_map,
    check_labels,
    colour_bar,
    label_matrix,
    largest_of,
    matrix_of,
    name_axes,
    numbers,
)
from scaledot.plot._text import glyphs, text_width

_MOST_DIGITS = 16
_MOST_CELLS = 64
"""Rows and columns of one head in a picture of many."""
_GAP = 0.12
"""Between two heads, in sides of one."""


def weights(
    weights: Any,
    row_labels: Sequence[str] | None = None,
    column_labels: Sequence[str] | None = None,
    *,
    lengths: tuple[int, int] | None = None,
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Draw attention weights as a heat map, rows = queries, columns = keys.

    Parameters
    ----------
    weights : array, shape (len_q, len_kv)
        One head; darker is larger, nan is white. The scale starts at 0. With ``lengths``, the
        block map of a long input, (rows, columns), such as ``stats.block_map[head]``.
    row_labels : sequence of str, optional
        One for each query, such as its token.
    column_labels : sequence of str, optional
        One for each key; without them ``row_labels`` serve a square matrix.
    lengths : (int, int), optional
        The true (len_q, len_kv) of a block map: axes and labels count queries and keys then.
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
    TypeError
        Weights that are no real numbers, labels that are no sequence, or lengths that are no pair
        of integers.
    ValueError
        The weights are not a matrix, labels and lengths differ, or there are fewer queries or
        keys than the block map has rows or columns.

    Notes
    -----
    Labels are thinned out until they fit. Tokens of more than 20 characters are cut, and
    characters that no font of ``matplotlib.rcParams["font.family"]`` has are written as code
    points.

    References
    ----------
    arXiv 1409.0473, figure 3, draws who looks at whom in this way.

    Examples
    --------
    >>> import numpy as np
    >>> from scaledot import plot
    >>> ax = plot.weights(np.eye(3), ["the", "animal", "slept"], title="Each looks at itself")
    >>> [label.get_text() for label in ax.get_xticklabels()]
    ['the', 'animal', 'slept']
    """
    matrix = matrix_of("weights", weights)
    shape = matrix.shape if lengths is None else _true_lengths(matrix, lengths)
    if ax is None:
        ax = axes(*LONG_FIGURE) if lengths else axes_for_matrix(
            shape, row_labels, column_labels, title)
    image = ax.imshow(
        matrix, cmap="Blues", vmin=0.0, vmax=largest_of(matrix), aspect="auto",
        extent=(-0.5, shape[1] - 0.5, shape[0] - 0.5, -0.5),
    )
    label_matrix(ax, shape, row_labels, column_labels)
    name_axes(ax, "key, looked at", "query, looks", title, BAR)
    colour_bar(ax, image, "weight" if shape == matrix.shape else "weight on a bin of keys")
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
    TypeError
        Something else than real numbers, or labels that are no sequence.
    ValueError
        Not a matrix of 0 and 1, or labels that do not fit.

    See Also
    --------
    visible : The same from the options of a call, at any length.

    Notes
    -----
    Each row is what one query sees. Labels are thinned out as those of `weights`.

    Examples
    --------
    >>> import numpy as np
    >>> from scaledot import plot
    >>> ax = plot.mask(np.tri(2, 3, 1), title="The last two of three tokens")
    >>> "".join(text.get_text() for text in ax.texts)
    '110111'
    """
    matrix = matrix_of("visible", visible)
    if not np.isin(matrix, (0.0, 1.0)).all():
        raise value_error(
            "visible must hold only 0 and 1 (1 = may be seen)",
            f"numbers from {matrix.min():g} to {matrix.max():g}",
            "Draw weights with scaledot.plot.weights.",
        )
    rows, columns = matrix.shape
    if ax is None:
        ax = axes_for_matrix((rows, columns), row_labels, column_labels, title, NOTHING)
    from matplotlib.colors import ListedColormap

    ax.imshow(
        matrix, cmap=ListedColormap([GREY, BLUE]), vmin=0, vmax=1, aspect="auto",
        interpolation_stage="rgba",
    )
    if max(rows, columns) <= _MOST_DIGITS:
        for (i, j), seen in np.ndenumerate(matrix):
            ax.text(j, i, f"{seen:.0f}", ha="center", va="center", color="w" if seen else "k")
        draw_borders(ax, np.arange(rows + 1) - 0.5, np.arange(columns + 1) - 0.5)
    label_matrix(ax, (rows, columns), row_labels, column_labels, NOTHING)
    name_axes(ax, "key", "query", title, NOTHING)
    return ax


def draw_borders(ax: Axes, rows: Any, columns: Any) -> None:
    """White lines between cells, whose borders are given: minor ticks lie on them."""
    ax.set_xticks(columns, minor=True)
    ax.set_yticks(rows, minor=True)
    ax.grid(which="minor", color="white", linewidth=2)
    ax.tick_params(which="minor", length=0)


def head_grid(
    weights: Any,
    *,
    titles: Sequence[str] | None = None,
    lengths: tuple[int, int] | None = None,
    shared: bool = True,
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Draw the weights of many heads as small squares: those of a layer, or layers × heads.

    Parameters
    ----------
    weights : array, shape (num_heads, len_q, len_kv) or (num_layers, num_heads, len_q, len_kv)
        Weights, or block maps of long inputs such as ``stats.block_map``. More than 64 queries or
        keys are drawn as a block map: means over queries of sums over keys.
    titles : sequence of str, optional
        One for each head, instead of its number.
    lengths : (int, int), optional
        The true (len_q, len_kv) of block maps, for the caption.
    shared : bool
        Whether all heads have one scale of colours; otherwise the largest weight of each head is
        darkest.
    title : str
        Above the picture.
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure without it.

    Returns
    -------
    matplotlib.axes.Axes
        One axes with all heads: ``ax.images`` are they, row after row, and with ``shared`` a
        colour bar stands beside them.

    Raises
    ------
    ImportError
        Matplotlib is not installed.
    TypeError
        Weights that are no real numbers, titles that are no sequence, or lengths that are no pair
        of integers.
    ValueError
        Another number of axes, titles that do not fit, or lengths below those of the map.

    Notes
    -----
    Queries run down and keys run right in each square, whatever their numbers: squares are not
    to scale. nan is white.

    References
    ----------
    Grids of this kind: arXiv 1906.05714.

    Examples
    --------
    >>> import numpy as np
    >>> from scaledot import plot
    >>> ax = plot.head_grid(np.ones((3, 4, 4)) / 4, titles=["a", "b", "c"])
    >>> len(ax.images), [text.get_text() for text in ax.texts]
    (3, ['a', 'b', 'c'])
    """
    matrices = numbers(
        "weights", weights, "an array (num_heads, len_q, len_kv), or of such layers",
        "Draw one head with scaledot.plot.weights.", 3, 4,
    )
    shape = matrices.shape[-2:]
    shape = shape if lengths is None else _true_lengths(matrices, lengths)
    num_heads = matrices.shape[-3]
    check_labels("titles", titles, num_heads)
    names = [f"head {i}" for i in range(num_heads)] if titles is None else list(titles)
    is_layer = matrices.ndim == 3
    columns = min(num_heads, max(1, math.ceil(math.sqrt(num_heads)))) if is_layer else num_heads
    rows = -(-num_heads // columns) if is_layer else len(matrices)
    cells = [min(n, _MOST_CELLS) for n in matrices.shape[-2:]]
    small = block_map(matrices, *cells).reshape(-1, *cells)
    beside = BAR if shared else NOTHING
    if ax is None:
        side = 1.5 if is_layer else 0.75
        needed = min(text_width(glyphs(title), TITLE), 4.5) + 0.7 + beside
        ax = axes(max(4.2, 1.6 + side * columns, needed), max(2.6, 1.4 + 1.1 * side * rows))
        ax.figure.set_layout_engine("compressed")  # knows that squares stay square
    image = _draw_squares(ax, small, columns, shared)
    ax.set(xlim=(-_GAP, columns * (1 + _GAP)), aspect="equal")
    ax.set_ylim(rows * (1 + _GAP), -0.28 if is_layer else -_GAP)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    if is_layer:
        ax.set(xticks=[], yticks=[])
        for i, name in enumerate(names):
            x, y = i % columns * (1 + _GAP) + 0.5, i // columns * (1 + _GAP) - 0.02
            ax.text(x, y, glyphs(name), ha="center", va="bottom", fontsize=8, parse_math=False)
    else:
        _name_squares(ax, rows, names if titles is not None else [str(i) for i in range(columns)])
    caption = f"in each square {shape[1]:,} keys from left to right, {shape[0]:,} queries down"
    # Squares stay square: the axes may be narrower than their room.
    name_axes(ax, caption if is_layer else f"head ({caption})", "" if is_layer else "layer", title,
              beside + 0.8)
    if shared:
        colour_bar(ax, image, "weight", shrink=0.8)
    return ax


def _draw_squares(ax: Axes, matrices: Floats, columns: int, shared: bool) -> Any:
    """Draw matrices (count, rows, columns) as unit squares in reading order; return the last."""
    image, largest = None, largest_of(matrices)
    for i, matrix in enumerate(matrices):
        x, y = i % columns * (1 + _GAP), i // columns * (1 + _GAP)
        image = ax.imshow(
            matrix, cmap="Blues", vmin=0.0, vmax=largest if shared else largest_of(matrix),
            extent=(x, x + 1, y + 1, y),
        )
        ax.plot(
            [x, x + 1, x + 1, x, x], [y, y, y + 1, y + 1, y], color="#808080", linewidth=0.5,
            solid_joinstyle="miter",
        )
    return image


def _name_squares(ax: Axes, rows: int, names: Sequence[str]) -> None:
    """Numbers of layers at the left, names of heads below."""
    rotation = 90 if max(map(len, names)) > 4 else 0
    places = [i * (1 + _GAP) + 0.5 for i in range(max(rows, len(names)))]
    ax.set_xticks(places[: len(names)], [glyphs(name) for name in names], rotation=rotation,
                  fontsize=8, parse_math=False)
    ax.set_yticks(places[:rows], [str(i) for i in range(rows)], fontsize=8)


def _true_lengths(maps: Floats, lengths: tuple[int, int]) -> tuple[int, int]:
    """Return lengths, or raise unless maps (..., rows, columns) can be block maps of them."""
    rows, columns = maps.shape[-2:]
    if not isinstance(lengths, (tuple, list)) or len(lengths) != 2:
        raise type_error("lengths must be a pair (len_q, len_kv)", lengths, "Pass both.")
    len_q, len_kv = (_checks.integer("an entry of lengths", n) for n in lengths)
    if len_q < rows or len_kv < columns:
        raise value_error(
            f"lengths must be (len_q, len_kv), at least ({rows}, {columns}), the shape of the map",
            lengths, "Leave lengths away for weights that are no block map.",
        )
    return len_q, len_kv
