"""Statistics as a small table of HTML, for notebooks.

Nothing in it names a colour but ``currentColor``, so that it can be read on light and dark pages.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from html import escape
from typing import Any

import numpy as np
import numpy.typing as npt

from scaledot import _arrays

MOST_HEADS = 16
MOST_BARS = 64
MOST_CELLS = 16
"""Rows, and columns, of a map as it is drawn."""

LEVELS = 8
"""Shades of a map."""

_BAR_HEIGHT = 20
_NOTHING = "–"
_FIELDS = (
    "entropy", "max_weight", "saturation", "mean_distance", "visible", "received", "sink_mass",
)  # fmt: skip

Numbers = npt.NDArray[Any]


def html(stats: Any) -> str:
    """Table of `scaledot.Stats` with one row for each of the first heads.

    Its text is the plain one where there are no values to show, as while a compiler is tracing.
    """
    arrays = [getattr(stats, name) for name in ("lse", *_FIELDS)]
    if any(_arrays.library(x) is None for x in arrays):
        return _plain(stats)
    lead, len_q = tuple(stats.lse.shape[:-1]), stats.lse.shape[-1]
    total = math.prod(lead)
    count = min(total, MOST_HEADS)
    found = {name: _first(getattr(stats, name), lead, count) for name in _FIELDS}
    if any(x is None for x in found.values()):
        return _plain(stats)
    maps = None if stats.block_map is None else _first(stats.block_map, lead, count)
    len_kv = found["received"].shape[-1]
    with np.errstate(all="ignore"):
        columns = list(_columns(found, maps))
    places = itertools.islice(np.ndindex(lead), count)
    heads = ("head", [", ".join(map(str, place)) or "0" for place in places])
    titles, cells = zip(heads, *columns, strict=True)
    rows = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in zip(*cells, strict=True))
    if total > count:
        rows += f'<tr><td colspan="{len(titles)}">… and {total - count:,} more</td></tr>'
    return (
        f"<div><p>scaledot.Stats: heads {total:,}, queries {len_q:,}, keys {len_kv:,}; means over "
        "the queries that see a key</p>"
        f"<table><thead><tr>{''.join(f'<th>{escape(title)}</th>' for title in titles)}</tr></thead>"
        f"<tbody>{rows}</tbody></table></div>"
    )


def _plain(stats: Any) -> str:
    return f"<pre>{escape(repr(stats))}</pre>"


def _first(x: Any, lead: tuple[int, ...], count: int) -> Any:
    """Values of the first heads, (count, ...) from (*lead, ...); None where there are none yet."""
    if lead:  # only what is shown leaves its device
        x = x[: -(-count // max(1, math.prod(lead[1:]))), ...]
    values = _arrays.host(x)
    if values is None:
        return None
    rest = values.shape[len(lead) :]
    return values.reshape(math.prod(values.shape[: len(lead)]), *rest)[:count]


def _cell(content: str) -> str:
    """Cell of a table: text, or a picture, which this module alone makes."""
    return f"<td>{content if content.startswith('<svg ') else escape(content)}</td>"


def _columns(found: dict[str, Numbers], maps: Numbers | None) -> Iterator[tuple[str, list[str]]]:
    """Title and cells of each column, from arrays (count, len_q) and (count, len_kv)."""
    visible = found["visible"]
    seen = visible > 0
    entropy = _means(found["entropy"], seen)
    most = _means(np.log(np.maximum(visible, 1), dtype=np.float32), seen)
    yield "entropy (nats), of log(visible)", list(map(_entropy, entropy, most))
    for name, title in (
        ("max_weight", "largest weight"), ("saturation", "saturation"),
        ("mean_distance", "distance (tokens)"),
    ):  # fmt: skip
        yield title, list(map(_number, _means(found[name], seen)))
    sinks = found["sink_mass"].tolist()
    yield "weight on sinks", [_number(x if visible.shape[-1] else None) for x in sinks]
    last = found["received"].shape[-1] - 1
    yield f"received by keys 0 … {last:,}" if last > 0 else "received by key", [
        _bars(x) for x in found["received"]
    ]
    if maps is not None:
        yield "block map", [_map(x) for x in maps]


def _means(values: Numbers, seen: npt.NDArray[np.bool_]) -> list[float | None]:
    """Mean of each head's queries that see a key; None where none does."""
    if seen.all() and seen.size:
        return list(values.mean(axis=-1, dtype=np.float64).tolist())
    return [
        float(row[use].mean(dtype=np.float64)) if use.any() else None
        for row, use in zip(values, seen, strict=True)
    ]


def _entropy(x: float | None, most: float | None) -> str:
    """Entropy with its share of what there can be, where there can be any."""
    share = f" ({x / most:.0%})" if x is not None and most and math.isfinite(x) else ""
    return _number(x) + share


def _number(x: float | None) -> str:
    if x is None:
        return _NOTHING
    return f"{x:,.0f}" if abs(x) >= 100 else f"{x:#.3g}"


def _pooled(x: Numbers, most: int, axis: int) -> tuple[Numbers, Numbers]:
    """Sums over at most so many bins of an axis, and the lengths of the bins."""
    length = x.shape[axis]
    count = min(length, most)
    edges = -(-np.arange(count + 1) * length // max(1, count))
    return np.add.reduceat(x, edges[:-1], axis=axis, dtype=np.float64), np.diff(edges)


def _scaled(x: Numbers) -> tuple[Numbers, float]:
    """Numbers as shares of the largest, and that; what is not finite counts as 0."""
    finite = np.where(np.isfinite(x), x, 0.0)
    peak = float(finite.max())
    return finite / (peak or 1.0), peak


def _bars(received: Numbers) -> str:
    """Weight that keys receive, (len_kv,), as bars that reach up to the largest."""
    if not received.size:
        return _NOTHING
    sums, lengths = _pooled(received, MOST_BARS, 0)
    shares, peak = _scaled(sums / lengths)
    path = "".join(
        f"M{i + 0.5} {_BAR_HEIGHT}V{_BAR_HEIGHT * (1 - share):.3g}"
        for i, share in enumerate(shares.tolist()) if share > 0
    )
    label = f"largest mean of a bin {peak:.3g}"
    return _svg(128, 24, len(shares), _BAR_HEIGHT, label, f'<path d="{path}"/>')


def _map(cells: Numbers) -> str:
    """Map of weights, (rows, columns), in shades that go by the square root of a cell's share."""
    if not cells.size:
        return _NOTHING
    sums, lengths = _pooled(cells, MOST_CELLS, 0)
    shares, _ = _pooled(sums / lengths[:, None], MOST_CELLS, 1)
    shares, peak = _scaled(shares)
    levels = np.rint(np.sqrt(shares) * LEVELS).astype(int).tolist()
    paths = [""] * (LEVELS + 1)
    for i, row in enumerate(levels):
        j = 0
        for level, run in itertools.groupby(row):
            width = len(list(run))
            paths[level] += f"M{j} {i + 0.5}h{width}"
            j += width
    drawn = "".join(
        f'<path stroke-opacity="{level / LEVELS:.3g}" d="{path}"/>'
        for level, path in enumerate(paths) if path and level
    )
    rows, columns = shares.shape
    return _svg(64, 64, columns, rows, f"largest cell {peak:.3g}", drawn)


def _svg(width: int, height: int, columns: int, rows: int, label: str, drawn: str) -> str:
    """Picture of so many pixels whose lines are one unit of its own wide."""
    return (
        f'<svg width="{width}" height="{height}" viewBox="0 0 {columns} {rows}" '
        f'preserveAspectRatio="none" role="img" aria-label="{escape(label)}" '
        f'stroke="currentColor" shape-rendering="crispEdges">'
        f"<title>{escape(label)}</title>{drawn}</svg>"
    )
