"""Which keys are looked at, and how far away they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from scaledot import _arrays, _checks
from scaledot._errors import type_error, value_error
from scaledot._stats import Stats, bin_edges
from scaledot.plot._axes import (
    BLUE,
    GREY,
    MOST_LABELS,
    NOTHING,
    ORANGE,
    TITLE,
    Axes,
    Floats,
    axes,
    check_count,
    check_labels,
    label_side,
    largest_of,
    name_axes,
    numbers,
    room,
)
from scaledot.plot._heads import of_sequence
from scaledot.plot._text import glyphs, text_width, token

_MOST_BINS = 256
_MOST_MARKS = 20
_MARK, _HEIGHT = 0.2, 0.93
"""Inches from one mark to the next, and where they stand, in heights of the axes."""
_STEPS = "largest of a bin", "mean of a bin"
_LIGHT = "#8FC1E3"
_SINGLE = 32
"""Distances up to this one have a bar each where none is larger; else bars double in width."""


def received(
    received: Any,
    labels: Sequence[str] | None = None,
    *,
    top: int = 5,
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Draw how much attention each key receives, and name the keys that receive most.

    Parameters
    ----------
    received : Stats, or array of shape (len_kv,) or (num_heads, len_kv)
        Sums of the weights on each key over queries, such as ``weights.sum(axis=-2)`` or
        ``stats.received``; means over heads are drawn.
    labels : sequence of str, optional
        One for each key, such as its token.
    top : int
        How many keys are marked and named, 0 to 20, largest first; of equal ones the first. Where
        there are fewer keys, all are.
    title : str
        Above the picture.
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure without it.

    Returns
    -------
    matplotlib.axes.Axes
        Has a bar for each key, or, for more than 64 keys, means and maxima over up to 256 bins of
        neighbouring keys on a logarithmic scale: one key often has more than thousands of others.
        Marks above are numbered as in the legend, and a line leads from each to its key.

    Raises
    ------
    ImportError
        Matplotlib is not installed.
    TypeError
        Something else than Stats or real numbers, ``top`` that is no integer, or labels that are
        no sequence.
    ValueError
        Another number of axes, ``top`` below 0 or above 20, labels that do not fit, or Stats of
        more than one sequence.

    Notes
    -----
    The sum over all keys is the number of queries that see something, less what sinks take. In a
    causal model first keys receive more for the sole reason that more queries see them.

    References
    ----------
    arXiv 2309.17453 shows the sinks that such pictures reveal.

    Examples
    --------
    >>> import numpy as np
    >>> from scaledot import plot
    >>> ax = plot.received(np.array([3.0, 0.5, 0.5]), ["[CLS]", "a", "cat"], top=2)
    >>> [text.get_text() for text in ax.figure.legends[0].get_texts()]
    ['1. [CLS] (0): 3', '2. a (1): 0.5']
    """
    _check_source("received", received)
    if isinstance(received, Stats):
        heads = of_sequence(received.received)
    else:
        heads = np.atleast_2d(numbers(
            "received", received, "(len_kv,) or (num_heads, len_kv)",
            "Sum the weights over the queries: weights.sum(axis=-2).", 1, 2,
        ))  # fmt: skip
    amount = heads.mean(axis=0)
    length = len(amount)
    check_labels("labels", labels, length)
    first = np.argsort(-amount, kind="stable")[: check_count("top", top, _MOST_MARKS)]
    words = [str(i) if labels is None else f"{token(labels[i])} ({i:,})" for i in first]
    names = [f"{i + 1}. {word}: {_amount(amount[key])}"
             for i, (key, word) in enumerate(zip(first, words, strict=True))]  # fmt: skip
    own, beside = ax is None, NOTHING
    if ax is None:
        beside = 0.6 + max((text_width(name, 8) for name in (*names, *_STEPS)), default=0.0)
        needed = min(text_width(glyphs(title), TITLE), 4.5) + 0.8 + beside
        ax = axes(min(12.0, max(4.0, 0.8 + 0.3 * length + beside, needed)),
                  max(3.6, 1.0 + 0.17 * len(first)))
    floor = 0.0
    if length <= MOST_LABELS:
        ax.bar(np.arange(length), amount, 0.8, color=BLUE)
        ax.set_xlim(-0.6, length - 0.4)
        ax.set_ylim(0.0, largest_of(amount) / (_HEIGHT - 0.1))
    else:
        floor = _draw_bins(ax, amount)
    label_side(ax, "x", length, labels if length <= MOST_LABELS else None, beside=beside)
    ax.spines[["top", "right"]].set_visible(False)
    name_axes(ax, "key", "attention received", title, beside)
    _mark(ax, first, np.maximum(amount[first], floor), names, room(ax, beside)[0])
    _name_top(ax, own)
    return ax


def _check_source(name: str, given: Any) -> None:
    """Raise unless these are Stats or numbers; tables of heads have no keys and no distances."""
    is_array = _arrays.library(given) is not None or hasattr(given, "__array__")
    if not is_array and not isinstance(given, (Stats, list, tuple)):
        raise type_error(
            f"{name} must be an array or Stats", type(given).__name__,
            "Pass what attention_stats returns; draw a number for each head with head_map.",
        )


def _mark(
    ax: Axes, keys: npt.NDArray[np.int64], tops: Floats, names: Sequence[str], across: float
) -> None:
    """Number keys, largest first, in a row above them on axes so many inches wide."""
    low, high = ax.get_xlim()
    gap = min(_MARK / across, 1 / max(1, len(keys)))
    places = _spread((keys - low) / (high - low), gap)
    for i, (key, top, place, name) in enumerate(zip(keys, tops, places, names, strict=True)):
        ax.annotate("", xy=(key, top), xytext=(place, _HEIGHT), textcoords="axes fraction",
                    arrowprops={"arrowstyle": "-", "linewidth": 0.7, "shrinkA": 5, "shrinkB": 0})
        ax.plot(key, top, "o", markersize=3.5, color="black", clip_on=False, zorder=3)
        ax.plot(place, _HEIGHT, "o", transform=ax.transAxes, markersize=11, color=ORANGE,
                markeredgecolor="black", clip_on=False, zorder=4, label=name)
        ax.text(place, _HEIGHT, str(i + 1), transform=ax.transAxes, ha="center",
                va="center_baseline", fontsize=7, zorder=5)


def _spread(wanted: Floats, gap: float) -> Floats:
    """Places in (0, 1) near those that are wanted, in their order and at least a gap apart."""
    order = np.argsort(wanted, kind="stable")
    steps = gap * np.arange(len(wanted))
    ends = np.clip(wanted[order] - steps, gap / 2, 1 - gap / 2 - steps.max(initial=0.0))
    places = np.empty_like(wanted)
    places[order] = np.maximum.accumulate(ends) + steps
    return places


def _amount(x: float) -> str:
    """Three digits, or the whole part of what has more."""
    return f"{x:,.0f}" if x >= 1000 else f"{x:.3g}"


def _draw_bins(ax: Axes, amount: Floats) -> float:
    """Means and maxima over bins of keys, as steps on a logarithmic scale; return its start."""
    edges = np.asarray(bin_edges(len(amount), min(len(amount), _MOST_BINS)))
    largest = np.maximum.reduceat(amount, edges[:-1])
    mean = np.add.reduceat(amount, edges[:-1]) / np.diff(edges)
    positive = mean[mean > 0]
    floor = float(positive.min()) / 2 if positive.size else 0.5
    for values, colour, name in zip((largest, mean), (_LIGHT, BLUE), _STEPS, strict=True):
        ax.stairs(np.maximum(values, floor), edges - 0.5, baseline=floor, fill=True, color=colour,
                  label=name)
    ax.set_yscale("log")
    highest = max(float(largest.max(initial=0.0, where=np.isfinite(largest))), 2 * floor)
    ax.set_ylim(floor, floor * (highest / floor) ** (1 / (_HEIGHT - 0.1)))
    ax.set_xlim(-0.5, len(amount) - 0.5)
    return floor


def _name_top(ax: Axes, own: bool) -> None:
    """A legend beside the axes on a figure of our own; tokens in it are no formulas."""
    handles, names = ax.get_legend_handles_labels()
    if not handles:
        return
    if own:
        drawn = ax.figure.legend(handles, names, loc="outside right upper", frameon=False,
                                 fontsize=8)
    else:
        drawn = ax.legend(handles, names, loc="upper right", fontsize=8)
    for text in drawn.get_texts():
        text.set_parse_math(False)


def distances(
    source: Any,
    *,
    q_offset: int | None = None,
    kv_offset: int = 0,
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Draw how far attention reaches: the share of it at each distance between query and key.

    Parameters
    ----------
    source : array, shape (len_q, len_kv) or (num_heads, len_q, len_kv), or Stats
        Weights; or, for long inputs, what `scaledot.attention_stats` returns for one sequence:
        then the share of queries and heads whose *mean* distance is that.
    q_offset, kv_offset : int, optional
        Positions of the first query and of the first key of weights, as in `scaledot.attention`:
        without ``q_offset`` the last query is at the last key. Stats know them already.
    title : str
        Above the picture.
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure without it.

    Returns
    -------
    matplotlib.axes.Axes
        Has a bar for each distance, or, where one is above 32, for ranges that double in length.

    Raises
    ------
    ImportError
        Matplotlib is not installed.
    TypeError
        Something else than Stats or real numbers, or an offset that is not an integer.
    ValueError
        Another number of axes, negative weights, Stats of more than one sequence, or an offset
        beside Stats.

    Notes
    -----
    Shares of ranges add up to 1. Where ranges double, equal bars mean that attention falls as
    1 / distance.

    References
    ----------
    Distances that heads reach: arXiv 1906.04341.

    Examples
    --------
    >>> import numpy as np
    >>> from scaledot import plot
    >>> ax = plot.distances([[1.0, 0.0], [0.5, 0.5]])
    >>> [float(bar.get_height()) for bar in ax.patches]
    [0.75, 0.25]
    """
    _check_source("source", source)
    if isinstance(source, Stats):
        if q_offset is not None or kv_offset != 0:
            raise value_error(
                "offsets must come with weights", f"Stats with {q_offset} and {kv_offset}",
                "Pass them to attention_stats, which measures the distances.",
            )
        share = _of_means(of_sequence(source.mean_distance), of_sequence(source.visible) > 0)
        x_label, y_label = "mean |query − key| of a query", "share of queries"
    else:
        share = _of_weights(source, q_offset, kv_offset)
        x_label, y_label = "|query − key|", "share of attention"
    low = _ranges(len(share) - 1)
    heights = np.add.reduceat(share, low)
    if ax is None:
        needed = min(text_width(glyphs(title), TITLE), 6.0) + 0.9
        ax = axes(min(9.0, max(4.0, 1.8 + 0.3 * len(low), needed)), 3.6)
    ax.bar(np.arange(len(low)), heights, 0.85, color=BLUE)
    high = [*(low[1:] - 1), len(share) - 1]
    names = [f"{a:,}" if a == b else f"{a:,}–{b:,}" for a, b in zip(low, high, strict=True)]
    label_side(ax, "x", len(low), names, beside=NOTHING)
    ax.grid(visible=True, axis="y", color=GREY)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    name_axes(ax, x_label, y_label, title)
    return ax


def _of_weights(given: Any, q_offset: int | None, kv_offset: int) -> Floats:
    """Share of all weight at each distance, (largest distance + 1,)."""
    hint = "Choose one layer, for example weights[0]."
    x = numbers("source", given, "weights (len_q, len_kv), or of several heads", hint, 2, 3)
    if x.min() < 0:
        raise value_error("weights must not be negative", f"{x.min():g}", "Apply softmax first.")
    total: Floats = x if x.ndim == 2 else x.sum(axis=0)
    len_q, len_kv = total.shape
    start = _checks.integer("kv_offset", kv_offset)
    first = start + len_kv - len_q if q_offset is None else _checks.integer("q_offset", q_offset)
    distance = np.abs((first + np.arange(len_q))[:, None] - (start + np.arange(len_kv)))
    share = np.bincount(distance.ravel(), total.ravel())
    return share / (share.sum() or 1.0)


def _of_means(mean: Floats, seen: npt.NDArray[np.bool_]) -> Floats:
    """Share of queries by the whole part of their mean distance, (largest + 1,)."""
    counts = np.bincount(mean[seen].astype(np.int64), minlength=1)
    return counts / (counts.sum() or 1)


def _ranges(largest: int) -> npt.NDArray[np.int64]:
    """First distance of each bar: 0, 1, 2, 3, ..., or 0, 1, 2, 4, 8, ... where they reach far."""
    if largest <= _SINGLE:
        return np.arange(largest + 1)
    return np.array([0, *(2**i for i in range(largest.bit_length()))])
