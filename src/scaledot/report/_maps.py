"""Block maps of all layers in one shape: computed where query and key are kept, else joined."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from scaledot import attention_stats, introspect
from scaledot._errors import value_error
from scaledot._stats import bin_edges
from scaledot.report._codes import Floats, pool

_FINEST = 512


@dataclass(frozen=True)
class Plan:
    """How to make the maps: in shape ``source``, then joined by ``factors``."""

    source: tuple[int, int]
    factors: tuple[int, int]
    lengths: tuple[int, int]

    @property
    def edges(self) -> tuple[list[int], list[int]]:
        """Where the bins of queries and of keys start and end."""
        rows, columns = (
            [*bin_edges(length, bins)[:-1:factor], length]
            for length, bins, factor in zip(self.lengths, self.source, self.factors, strict=True)
        )
        return rows, columns

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of a map."""
        rows, columns = self.edges
        return len(rows) - 1, len(columns) - 1


def plans(trace: introspect.Trace) -> list[Plan]:
    """Return the shapes that all layers can have, the finest first."""
    first = trace.layers[0]
    lengths = (first.len_q, first.len_kv)
    kept = {_shape(layer) for layer in trace.layers if layer.query is None}
    if not kept:
        longest = min(_FINEST, max(lengths))
        sides = sorted({longest, *(round(2 ** (i / 8)) for i in range(73))}, reverse=True)
        return [
            Plan((min(n, lengths[0]), min(n, lengths[1])), (1, 1), lengths)
            for n in sides if n <= longest
        ]
    if len(kept) > 1:
        raise value_error(
            "block maps of layers without query and key must agree in shape",
            ", ".join(map(str, sorted(kept))), "Give all layers the same map_shape.",
        )
    source = kept.pop()
    return [
        Plan(source, (min(n, source[0]), min(n, source[1])), lengths)
        for n in range(1, max(source) + 1)
    ]


def _shape(layer: introspect.Layer) -> tuple[int, int]:
    """Rows and columns of the map that a layer has kept."""
    block_map = layer.stats.block_map
    if block_map is None:
        raise value_error(
            "each layer must hold query and key, or a block map",
            f"neither in layer {layer.name!r}",
            "Keep query and key, or give map_shape when the trace is made.",
        )
    return tuple(np.shape(block_map)[-2:])


def made(trace: introspect.Trace, plan: Plan) -> Iterator[Floats]:
    """Yield the maps (num_heads, rows, columns) of each layer."""
    for layer in trace.layers:
        found = layer.stats.block_map
        if layer.query is not None and (found is None or np.shape(found)[-2:] != plan.source):
            stats = attention_stats(
                layer.query, layer.key, top_k=1, map_shape=plan.source, **layer.options
            )
            found = stats.block_map
        whole = np.asarray(found, dtype=np.float64).reshape(layer.num_heads, *plan.source)
        yield pool(whole, layer.len_q, plan.factors)
