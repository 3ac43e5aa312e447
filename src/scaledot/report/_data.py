"""What the page knows, as plain lists and numbers that JSON can hold."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from scaledot import attention_weights, introspect
from scaledot._errors import value_error
from scaledot.report import _codes, _maps, _page

Floats = _codes.Floats

MEASURES = tuple(field.name for field in dataclasses.fields(introspect.Summary))
"""Fields of a summary, each (num_layers, num_heads)."""

# What changes the scores by more than a factor: with it, the page's slider is a temperature.
_NOT_PLAIN = ("softcap", "bias", "alibi_slopes", "sinks", "score_mod")

_MOST_RECEIVED = 5
_STEP_CHARACTERS = 26


def page_data(trace: introspect.Trace, max_bytes: int, frame: int) -> dict[str, Any]:
    """Return the data of a page whose other bytes are ``frame``: weights if they fit, else maps."""
    first = trace.layers[0]
    queries, keys = _labels(trace.tokens, first.len_q), _labels(_key_tokens(trace), first.len_kv)
    data = _common(trace, queries, keys)
    if all(layer.query is not None for layer in trace.layers):
        size = 2 * first.num_heads * first.len_q * first.len_kv
        whole = data | {"kind": "weights", "queries": queries, "keys": keys, "rests": []}
        if frame + _size(trace, whole, size) <= max_bytes:
            return _with_weights(trace, whole)
    return _with_maps(trace, data, max_bytes, frame)


def _common(
    trace: introspect.Trace, queries: Sequence[str], keys: Sequence[str]
) -> dict[str, Any]:
    """Return everything but codes and labels."""
    first = trace.layers[0]
    summary = introspect.summary(trace)
    return {
        "title": trace.title,
        "numHeads": first.num_heads,
        "lenQ": first.len_q,
        "lenKv": first.len_kv,
        "offset": _offset(trace),
        "plain": not any(
            layer.options.get(name) is not None for layer in trace.layers for name in _NOT_PLAIN
        ),
        "names": [layer.name for layer in trace.layers],
        "summary": {name: _rounded(getattr(summary, name)) for name in MEASURES},
        "received": [_most_received(layer, keys) for layer in trace.layers],
        "findings": [
            {"kind": f.kind, "layer": f.layer, "head": f.head, "reason": f.reason}
            for f in introspect.findings(trace)
        ],
        "kinds": introspect.KINDS,
        "unknown": introspect.unknown(trace),
    }


def _with_weights(trace: introspect.Trace, data: dict[str, Any]) -> dict[str, Any]:
    """Add the codes of all weights, layer by layer."""
    layers = []
    for layer in trace.layers:
        weights = weights_of(layer)
        codes, steps = _codes.log_codes(weights)
        layers.append({"codes": codes, "steps": steps})
        if layer.options.get("sinks") is not None:
            rest = (1 - weights.sum(axis=-1)).clip(0)  # (num_heads, len_q)
            data["rests"].append(_rounded(np.where(weights.any(axis=-1), rest, 0)))
        else:
            data["rests"].append(None)
    return data | {"layers": layers}


def weights_of(layer: introspect.Layer) -> Floats:
    """Weights (num_heads, len_q, len_kv) in float64, where weights down to 1e-308 survive."""
    query, key = (np.asarray(x, dtype=np.float64) for x in (layer.query, layer.key))
    # The page holds few weights; "dense" keeps the small ones that kernels round to 0.
    weights = attention_weights(query, key, **layer.options, impl="dense")
    return weights.reshape(layer.num_heads, layer.len_q, layer.len_kv)


def _with_maps(
    trace: introspect.Trace, data: dict[str, Any], max_bytes: int, frame: int
) -> dict[str, Any]:
    """Add block maps of the best shape that fits."""
    heads = trace.layers[0].num_heads

    def described(plan: _maps.Plan) -> dict[str, Any]:
        rows, columns = plan.edges
        return data | {
            "kind": "maps",
            "queries": _ranges(rows, trace.tokens),
            "keys": _ranges(columns, _key_tokens(trace)),
            "queryEdges": rows,
            "keyEdges": columns,
        }

    def size(plan: _maps.Plan) -> int:
        cells = heads * plan.shape[0] * plan.shape[1]
        return frame + _size(trace, described(plan), cells)

    plans = _maps.plans(trace)
    plan = next((plan for plan in plans if size(plan) <= max_bytes), None)
    if plan is None:
        raise value_error(
            f"max_bytes must be at least {size(plans[-1]):,} for {len(trace.layers)} layers of "
            f"{heads} heads",
            f"{max_bytes:,}", "Allow a larger page, or leave out layers.",
        )
    layers = []
    for block_map in _maps.made(trace, plan):
        codes, steps = _codes.share_codes(block_map)
        layers.append({"codes": codes, "steps": steps})
    return described(plan) | {"layers": layers}


def _size(trace: introspect.Trace, data: dict[str, Any], layer_bytes: int) -> int:
    """Bytes of data with codes of so many bytes a layer, at most."""
    heads = trace.layers[0].num_heads
    rests = heads * trace.layers[0].len_q * 10 if "rests" in data and not data["plain"] else 8
    each = _codes.text_length(layer_bytes) + heads * _STEP_CHARACTERS + 40 + rests
    return len(_page.to_json(data)) + len(trace.layers) * each + 40


def _key_tokens(trace: introspect.Trace) -> tuple[str, ...] | None:
    return trace.tokens if trace.key_tokens is None else trace.key_tokens


def _labels(tokens: Sequence[str] | None, length: int) -> list[str]:
    """One label for each position: its token or, where there is none, its index."""
    return [str(i) for i in range(length)] if tokens is None else list(map(str, tokens))


def _ranges(edges: Sequence[int], tokens: Sequence[str] | None) -> list[str]:
    """One label for each bin: where it starts and ends, and its first token."""
    labels = []
    for start, stop in itertools.pairwise(edges):
        span = f"{start:,}" if stop - start == 1 else f"{start:,}–{stop - 1:,}"
        labels.append(span if tokens is None else f"{span}: {tokens[start][:20]} …")
    return labels


def _offset(trace: introspect.Trace) -> int | None:
    """Index of the first query among the keys; None where the keys are another sequence."""
    first = trace.layers[0]
    offset = first.len_kv - first.len_q
    if trace.key_tokens is None:
        return 0 if offset == 0 else None
    if trace.tokens is None or offset < 0 or trace.key_tokens[offset:] != trace.tokens:
        return None
    return offset


def _most_received(layer: introspect.Layer, keys: Sequence[str]) -> list[list[list[Any]]]:
    """For each head, the keys with the largest mean weight over the queries, with that mean."""
    received = np.asarray(layer.stats.received, dtype=np.float64)
    received = received.reshape(layer.num_heads, layer.len_kv) / max(1, layer.len_q)
    received = np.nan_to_num(received)
    order = np.argsort(-received, axis=-1, kind="stable")[:, :_MOST_RECEIVED]
    return [
        [[int(j), keys[j][:40], float(f"{received[h, j]:.4g}")] for j in order[h]]
        for h in range(layer.num_heads)
    ]


def _rounded(x: Any) -> Any:
    """Nested lists of an array's numbers to five digits; what is not finite is None."""
    if isinstance(x, list):
        return [_rounded(item) for item in x]
    if isinstance(x, float | int):
        return float(f"{x:.5g}") if math.isfinite(x) else None
    return _rounded(np.asarray(x, dtype=np.float64).tolist())
