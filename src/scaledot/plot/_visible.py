"""Masks and tiles, drawn from the options of a call by the library's own rule."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from scaledot import _arrays, _checks, _masks
from scaledot._errors import value_error
from scaledot._explain import explain
from scaledot._reference import seen_of
from scaledot._spec import Options, Problem, complete, resolve
from scaledot._stats import bin_edges
from scaledot.plot._axes import (
    BAR,
    BLUE,
    GREY,
    LONG_FIGURE,
    MOST_LABELS,
    NOTHING,
    ORANGE,
    TITLE,
    Axes,
    Floats,
    axes,
    colour_bar,
    count_side,
    label_matrix,
    name_axes,
)
from scaledot.plot._matrices import draw_borders, mask
from scaledot.plot._text import glyphs, text_width

_MOST_CELLS = 128
_MOST_BORDERS = 24
EMPTY, PARTIAL, FULL = range(3)
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Band:
    """What each query sees by positions, lengths and segments: keys ``low`` to below ``high``.

    Both are (len_q,). Segment ids are None, or those of queries (len_q,) and keys (len_kv,).
    """

    low: Integers
    high: Integers
    len_kv: int
    q_segment: Integers | None
    kv_segment: Integers | None


def visible(
    len_q: int,
    len_kv: int | None = None,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    segment_ids: Any = None,
    kv_len: int | None = None,
    q_offset: int | None = None,
    kv_offset: int = 0,
    row_labels: Sequence[str] | None = None,
    column_labels: Sequence[str] | None = None,
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Draw which query sees which key under the options of a call, at any length.

    Parameters
    ----------
    len_q, len_kv : int
        Numbers of queries and keys; ``len_kv`` is ``len_q`` where it is not given.
    causal, window, segment_ids, kv_len, q_offset, kv_offset : optional
        As in `scaledot.attention`, for one sequence.
    row_labels, column_labels : sequence of str, optional
        As in `weights`.
    title : str
        Above the picture.
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure without it.

    Returns
    -------
    matplotlib.axes.Axes
        As `mask` for up to 64 queries and keys. Beyond, up to 128 × 128 cells, each with the share
        of its pairs that are visible, counted exactly, and a colour bar.

    Raises
    ------
    ImportError
        Matplotlib is not installed.
    TypeError, ValueError
        As in `scaledot.attention`, for lengths below 1, and for labels that do not fit.

    See Also
    --------
    mask : The same from a matrix of 0 and 1.

    Notes
    -----
    Short masks come from the predicate of the reference implementation. The pairs of long ones
    are counted by ranges of keys, in memory linear in the lengths.

    References
    ----------
    Windows: arXiv 2004.05150.

    Examples
    --------
    >>> from scaledot import plot
    >>> ax = plot.visible(3, causal=True, window=(1, 0))
    >>> "".join(text.get_text() for text in ax.texts)
    '100110011'
    >>> ax = plot.visible(100_000, causal=True)
    >>> ax.images[0].get_array().shape
    (128, 128)
    """
    problem = _problem(len_q, len_kv, causal, window, segment_ids, kv_len, q_offset, kv_offset)
    shape = problem.spec.len_q, problem.spec.len_kv
    if max(shape) <= MOST_LABELS:
        seen = seen_of(complete(problem))
        whole = np.broadcast_to(True if seen is None else np.asarray(seen), (1, *shape))[0]
        return mask(whole, row_labels, column_labels, title=title, ax=ax)
    ax = axes(*LONG_FIGURE) if ax is None else ax
    from matplotlib.colors import LinearSegmentedColormap

    image = ax.imshow(
        shares(_band(problem), *(min(n, _MOST_CELLS) for n in shape)), vmin=0.0, vmax=1.0,
        cmap=LinearSegmentedColormap.from_list("visible", [GREY, BLUE]), aspect="auto",
        extent=(-0.5, shape[1] - 0.5, shape[0] - 0.5, -0.5),
    )
    label_matrix(ax, shape, row_labels, column_labels)
    name_axes(ax, "key", "query", title, BAR)
    colour_bar(ax, image, "share of visible pairs")
    return ax


def tiles(
    len_q: int,
    len_kv: int | None = None,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    segment_ids: Any = None,
    kv_len: int | None = None,
    q_offset: int | None = None,
    kv_offset: int = 0,
    block_q: int | None = None,
    block_kv: int | None = None,
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Draw which tiles of scores are skipped, computed with a mask, or computed without one.

    Parameters
    ----------
    len_q, len_kv : int
        Numbers of queries and keys; ``len_kv`` is ``len_q`` where it is not given.
    causal, window, segment_ids, kv_len, q_offset, kv_offset : optional
        As in `scaledot.attention`, for one sequence.
    block_q, block_kv : int, optional
        Queries and keys of a tile; without them those that `scaledot.explain` gives for one head
        of width 64 in float32 on this machine.
    title : str
        Above the picture.
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure without it.

    Returns
    -------
    matplotlib.axes.Axes
        Has the tiles, and a legend with the number of each class.

    Raises
    ------
    ImportError
        Matplotlib is not installed.
    TypeError, ValueError
        As in `scaledot.attention`, and for lengths or blocks below 1.

    Notes
    -----
    Tiles are classed as the kernels do it, without looking at pairs: by the positions of their
    first and last query, and by the ranges of the segment ids on both sides. So a tile may count
    as partial in which no pair is visible.

    References
    ----------
    Tiles that are skipped: arXiv 2205.14135, section 3.3.

    Examples
    --------
    >>> from scaledot import plot
    >>> ax = plot.tiles(100_000, causal=True, block_q=1000, block_kv=1000)
    >>> [text.get_text() for text in ax.figure.legends[0].get_texts()]
    ['empty 4,950', 'partial 100', 'full 4,950']
    """
    problem = _problem(len_q, len_kv, causal, window, segment_ids, kv_len, q_offset, kv_offset)
    shape = problem.spec.len_q, problem.spec.len_kv
    if block_q is None or block_kv is None:
        planned = _planned_blocks(problem, causal, window, kv_len, q_offset, kv_offset)
        block_q, block_kv = block_q or planned[0], block_kv or planned[1]
    block_q, block_kv = _length("block_q", block_q), _length("block_kv", block_kv)
    classes = tile_classes(_band(problem), block_q, block_kv)
    own, (rows, columns) = ax is None, classes.shape
    title = title or f"Tiles of {block_q:,} × {block_kv:,}"
    if ax is None:
        needed = min(text_width(glyphs(title), TITLE), 6.0) + 1.0
        ax = axes(min(7.0, max(4.6, 2.0 + 0.3 * columns, needed)),
                  min(6.0, max(3.0, 1.8 + 0.28 * rows)))
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    colours = {"empty": GREY, "partial": ORANGE, "full": BLUE}
    ax.imshow(
        classes, cmap=ListedColormap(list(colours.values())), vmin=0, vmax=2, aspect="auto",
        interpolation_stage="rgba", extent=(0, columns * block_kv, rows * block_q, 0),
    )
    if max(rows, columns) <= _MOST_BORDERS:
        draw_borders(ax, np.arange(1, rows) * block_q, np.arange(1, columns) * block_kv)
    # The last tiles may be shorter than a block.
    ax.set(xlim=(0, shape[1]), ylim=(shape[0], 0))
    count_side(ax, "x", shape[1], NOTHING)
    count_side(ax, "y", shape[0], NOTHING)
    name_axes(ax, "key", "query", title)
    counts = np.bincount(classes.ravel(), minlength=3)
    handles = [
        Patch(facecolor=colour, edgecolor="#808080", label=f"{name} {count:,}")
        for (name, colour), count in zip(colours.items(), counts, strict=True)
    ]
    if own:
        ax.figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    else:
        ax.legend(handles=handles, loc="upper right", fontsize=8)
    return ax


def shares(band: Band, rows: int, columns: int) -> Floats:
    """Share of the pairs of each cell, (rows, columns), that are visible, exactly."""
    q_edges, kv_edges = (
        np.asarray(bin_edges(n, count)) for n, count in ((len(band.low), rows),
                                                         (band.len_kv, columns))
    )  # fmt: skip
    result = np.empty((rows, columns))
    codes, ids = _codes(band)
    for i, (first, stop) in enumerate(itertools.pairwise(q_edges)):
        part = slice(first, stop)
        # Keys below each edge that a query sees: (queries of the bin, columns + 1).
        below = np.clip(kv_edges, band.low[part, None], band.high[part, None])
        if codes is not None:
            below = np.searchsorted(codes, ids[part, None] * (band.len_kv + 1) + below)
        result[i] = np.diff(below, axis=-1).sum(axis=0)
    return result / np.diff(q_edges)[:, None] / np.diff(kv_edges)


def tile_classes(band: Band, block_q: int, block_kv: int) -> npt.NDArray[np.int64]:
    """Class of each tile, (blocks of queries, blocks of keys)."""
    len_q = len(band.low)
    rows, columns = -(-len_q // block_q), -(-band.len_kv // block_kv)
    classes = np.full((rows, columns), EMPTY, dtype=np.int64)
    starts = np.arange(columns) * block_kv
    stops = np.minimum(starts + block_kv, band.len_kv)
    for i in range(rows):
        first, last = i * block_q, min((i + 1) * block_q, len_q) - 1
        low, high = band.low[first], band.high[last]
        if low >= high:
            continue
        # Neither end of the band moves back from query to query: its corners tell all.
        is_full = (band.low[last] <= starts) & (stops <= band.high[first])
        classes[i] = np.where((stops > low) & (starts < high), PARTIAL, EMPTY)
        classes[i, is_full] = FULL
        if band.q_segment is not None and band.kv_segment is not None:
            met = np.flatnonzero(classes[i])
            cuts = np.maximum(starts[met], low)
            by_ids = _segment_classes(
                band.q_segment[first : last + 1], band.kv_segment[:high], cuts
            )
            classes[i, met] = np.minimum(classes[i, met], by_ids)
    return classes


def _segment_classes(q: Integers, kv: Integers, cuts: Integers) -> npt.NDArray[np.int64]:
    """Class of one block of queries with each piece of the keys' ids, which begin at ``cuts``."""
    highest = np.iinfo(np.int64).max
    q_low, q_high = np.where(q < 0, highest, q).min(), q.max()
    low = np.minimum.reduceat(np.where(kv < 0, highest, kv), cuts)
    high = np.maximum.reduceat(kv, cuts)
    hidden = (q.min() < 0) | (np.minimum.reduceat(kv, cuts) < 0)
    is_empty = (q_high < 0) | (high < 0) | (q_high < low) | (high < q_low)
    is_full = (q_low == q_high) & (low == high) & (q_low == low) & ~hidden
    return np.where(is_empty, EMPTY, np.where(is_full, FULL, PARTIAL))


def _codes(band: Band) -> tuple[Integers | None, Integers]:
    """Sorted codes (id, key) of keys, and the id of each query among those of keys.

    Codes are ``id * (len_kv + 1) + key``; ids are counted from 0, and an id without keys comes
    after all of them.
    """
    if band.q_segment is None or band.kv_segment is None:
        return None, band.low
    names, numbered = np.unique(band.kv_segment, return_inverse=True)
    codes = np.sort(numbered * (band.len_kv + 1) + np.arange(band.len_kv))
    place = np.minimum(np.searchsorted(names, band.q_segment), len(names) - 1)
    has_keys = (names[place] == band.q_segment) & (band.q_segment >= 0)
    return codes, np.where(has_keys, place, len(names))


def _problem(
    len_q: int, len_kv: int | None, causal: bool, window: Any, segment_ids: Any,
    kv_len: int | None, q_offset: int | None, kv_offset: int,
) -> Problem:
    """A call with these options and without numbers, checked and resolved as every call is."""
    len_q = _length("len_q", len_q)
    len_kv = len_q if len_kv is None else _length("len_kv", len_kv)
    if segment_ids is not None:
        is_pair = isinstance(segment_ids, tuple)
        sides = segment_ids if is_pair else (segment_ids,)
        sides = tuple(_arrays.host(x) if _arrays.library(x) else np.asarray(x) for x in sides)
        segment_ids = sides if is_pair else sides[0]
    options = Options(
        causal=causal, window=window, segment_ids=segment_ids, kv_len=kv_len, q_offset=q_offset,
        kv_offset=kv_offset,
    )
    key = np.empty((len_kv, 0))
    return resolve(np.empty((len_q, 0)), key, key, options)


def _length(name: str, value: object) -> int:
    """Return a whole number of at least 1."""
    number = _checks.integer(name, value)
    if number < 1:
        raise value_error(f"{name} must be at least 1", number, "Nothing else can be drawn.")
    return number


def _band(problem: Problem) -> Band:
    """What each query sees, from a problem of one sequence."""
    spec, terms = problem.spec, problem.terms
    count = spec.len_kv if terms.kv_count is None else int(terms.kv_count.item())
    place = int(terms.q_start.item()) + np.arange(spec.len_q)
    start = int(terms.kv_start.item())
    low, high = _masks.visible_range(place, place, spec.left, spec.right, start, count)
    segments = [
        None if side is None else np.broadcast_to(np.ravel(side).astype(np.int64), (length,))
        for side, length in ((terms.q_segment, spec.len_q), (terms.kv_segment, spec.len_kv))
    ]
    return Band(low, high, spec.len_kv, *segments)


def _planned_blocks(
    problem: Problem, causal: bool, window: Any, kv_len: int | None, q_offset: int | None,
    kv_offset: int,
) -> tuple[int, int]:
    """Queries and keys of a tile of one head of width 64 in float32."""
    number = np.zeros((1, 1), dtype=np.float32)
    query, key = (
        np.broadcast_to(number, (n, 64)) for n in (problem.spec.len_q, problem.spec.len_kv)
    )
    plan = explain(
        query, key, key, causal=causal, window=window, kv_len=kv_len, q_offset=q_offset,
        kv_offset=kv_offset,
    )
    return plan.block_q, plan.block_kv
