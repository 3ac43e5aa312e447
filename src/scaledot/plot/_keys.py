"""Which keys are looked at, and how far away they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from scaledot import _checks
from scaledot._errors import value_error
from scaledot.plot._axes import (
    BLUE,
    GREY,
    MOST_LABELS,
    ORANGE,
    Axes,
    Floats,
    axes,
    bin_edges,
    check_labels,
    label_side,
    name_axes,
    numbers,
)
from scaledot.plot._heads import of_sequence
from scaledot.plot._text import token

_MOST_BINS = 256
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
        How many keys are marked and named, largest first; of equal ones the first.
    title : str
        Above the picture.
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure without it.

    Returns
    -------
    matplotlib.axes.Axes
        Has a bar for each key, or, for more than 64 keys, means and maxima over up to 256 bins of
        neighbouring keys on a logarithmic scale: one key often has more than thousands of others.

    Raises
    ------
    ImportError
        Matplotlib is not installed.
    ValueError
        Another number of axes, labels that do not fit, or Stats of more than one sequence.

    References
    ----------
    arXiv 2309.17453 shows the sinks that such pictures reveal.
    """
    if hasattr(received, "received"):
        heads = of_sequence(received.received)
    else:
        heads = np.atleast_2d(numbers(
            "received", received, "(len_kv,) or (num_heads, len_kv)",
            "Sum the weights over the queries: weights.sum(axis=-2).", 1, 2,
        ))  # fmt: skip
    amount = heads.mean(axis=0)
    length = len(amount)
    check_labels("labels", labels, length)
    first = np.argsort(-amount, kind="stable")[: max(0, _checks.integer("top", top))]
    own = ax is None
    if ax is None:
        ax = axes(min(10.0, max(4.0, 2.5 + 0.3 * length)), 3.6)
    floor = 0.0
    if length <= MOST_LABELS:
        ax.bar(np.arange(length), amount, 0.8, color=BLUE)
        ax.set_xlim(-0.6, length - 0.4)
        ax.margins(y=0.12)
    else:
        floor = _draw_bins(ax, amount)
    words = [str(i) if labels is None else f"{token(labels[i])} ({i:,})" for i in first]
    for rank, (key, word) in enumerate(zip(first, words, strict=True)):
        ax.plot(
            key, max(amount[key], floor), "o", markersize=7, markerfacecolor=ORANGE,
            markeredgecolor="black", clip_on=False, zorder=3,
            label=f"{rank + 1}. {word}: {_amount(amount[key])}",
        )
    label_side(ax, "x", length, labels if length <= MOST_LABELS else None)
    ax.spines[["top", "right"]].set_visible(False)
    name_axes(ax, "key", "attention received", title)
    _name_top(ax, own)
    return ax


def _amount(x: float) -> str:
    """Three digits, or the whole part of what has more."""
    return f"{x:,.0f}" if x >= 1000 else f"{x:.3g}"


def _draw_bins(ax: Axes, amount: Floats) -> float:
    """Means and maxima over bins of keys, as steps on a logarithmic scale; return its start."""
    edges = bin_edges(len(amount), min(len(amount), _MOST_BINS))
    largest = np.maximum.reduceat(amount, edges[:-1])
    mean = np.add.reduceat(amount, edges[:-1]) / np.diff(edges)
    positive = mean[mean > 0]
    floor = float(positive.min()) / 2 if positive.size else 0.5
    names = ("largest of a bin", "mean of a bin")
    for values, colour, name in zip((largest, mean), (_LIGHT, BLUE), names, strict=True):
        ax.stairs(np.maximum(values, floor), edges - 0.5, baseline=floor, fill=True, color=colour,
                  label=name)
    ax.set_yscale("log")
    ax.set_ylim(floor, max(float(largest.max()), 2 * floor) * 1.5)
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
        Positions of the first query and of the first key, as in `scaledot.attention`: without
        ``q_offset`` the last query is at the last key.
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
        An offset is not an integer.
    ValueError
        Another number of axes, negative weights, or Stats of more than one sequence.
    """
    if hasattr(source, "mean_distance"):
        share = _of_means(of_sequence(source.mean_distance), of_sequence(source.visible) > 0)
        x_label, y_label = "mean |query − key| of a query", "share of queries"
    else:
        share = _of_weights(source, q_offset, kv_offset)
        x_label, y_label = "|query − key|", "share of attention"
    low = _ranges(len(share) - 1)
    heights = np.add.reduceat(share, low)
    if ax is None:
        ax = axes(min(9.0, max(4.0, 1.8 + 0.3 * len(low))), 3.6)
    ax.bar(np.arange(len(low)), heights, 0.85, color=BLUE)
    high = [*(low[1:] - 1), len(share) - 1]
    names = [f"{a:,}" if a == b else f"{a:,}–{b:,}" for a, b in zip(low, high, strict=True)]
    label_side(ax, "x", len(low), names)
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
