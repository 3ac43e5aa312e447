"""Whether what a layer is made of fits together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scaledot import Stats, _arrays
from scaledot._errors import type_error, value_error

_HINT = "scaledot.introspect.look(query, key) makes a layer of one sequence."
_OPTIONAL = ("received_last", "block_map")


def check_layer(stats: Any, query: Any, key: Any, options: Any) -> None:
    """Raise unless these are NumPy arrays of one sequence whose shapes fit, and a mapping."""
    if not isinstance(stats, Stats):
        raise type_error("stats must be a scaledot.Stats", type(stats).__name__, _HINT)
    if not isinstance(options, Mapping):
        raise type_error(
            "options must be a mapping", type(options).__name__, "Pass {'causal': True}, say."
        )
    for name, x in zip(Stats._fields, stats, strict=True):
        if not (x is None and name in _OPTIONAL):
            _check_numpy(f"{name} of a layer's stats", x)
    if stats.lse.ndim != 2 or stats.received.ndim != 2:
        raise value_error(
            "stats of a layer must be of one sequence, lse (num_heads, len_q) and received "
            "(num_heads, len_kv)", f"{stats.lse.shape} and {stats.received.shape}", _HINT,
        )
    for name, wanted in _shapes(stats).items():
        x = getattr(stats, name)
        if x is not None and x.shape != wanted:
            raise value_error(
                f"{name} of a layer's stats must have the shape {wanted}, as lse "
                f"{stats.lse.shape} and received {stats.received.shape} have it", x.shape, _HINT,
            )
    for name, x in (("query", query), ("key", key)):
        if x is not None:
            _check_operand(name, x, stats)
    if query is not None and key is not None:
        _check_pair(query, key)


def _check_numpy(name: str, x: Any) -> None:
    if _arrays.library(x) != "numpy":
        raise type_error(f"{name} must be a NumPy array", _arrays.describe(x), _HINT)


def _shapes(stats: Stats) -> dict[str, tuple[int, ...]]:
    """Shapes that all follow from few of them, by name."""
    rows, keys = stats.lse.shape, stats.received.shape
    of_rows = ("entropy", "max_weight", "mean_distance", "saturation", "visible")
    shapes = dict.fromkeys(of_rows, rows)
    shapes["received"] = shapes["received_last"] = (rows[0], keys[1])
    shapes["top_keys"] = shapes["top_weights"] = (*rows, *stats.top_keys.shape[-1:])
    shapes["sink_mass"] = rows[:1]
    if stats.block_map is not None:
        shapes["block_map"] = (rows[0], *stats.block_map.shape[-2:])
    return shapes


def _check_operand(name: str, x: Any, stats: Stats) -> None:
    """Raise unless query or key is NumPy's (heads, len, d), as long as the statistics say."""
    _check_numpy(f"{name} of a layer", x)
    side, length = ("len_q", stats.lse.shape[1])
    if name == "key":
        side, length = ("len_kv", stats.received.shape[1])
    if x.ndim != 3 or x.shape[1] != length:
        raise value_error(
            f"{name} of a layer must be (heads, {side}, d_k) with {side} = {length}, as its stats "
            "have it", x.shape, _HINT,
        )
    if name == "query" and len(x) != len(stats.lse):
        raise value_error(
            f"query of a layer must have the {len(stats.lse)} heads of its stats", x.shape, _HINT
        )


def _check_pair(query: Any, key: Any) -> None:
    """Raise unless the heads and widths of query and key fit."""
    if len(query) % len(key) if len(key) else len(query):
        raise value_error(
            "num_heads of a layer's query must be a multiple of num_kv_heads of its key",
            f"{len(query)} and {len(key)}", _HINT,
        )
    if query.shape[2] != key.shape[2]:
        raise value_error(
            "query and key of a layer must have the same d_k",
            f"{query.shape[2]} and {key.shape[2]}", _HINT,
        )
