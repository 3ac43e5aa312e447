"""What the detectors know of one layer: its statistics, positions, and tokens as numbers."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from scaledot.introspect._tables import Numbers, without_number
from scaledot.introspect._trace import Layer, Trace

Flags = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int64]

FEWEST = 5
"""Keys that a query must see to count, for each key in question."""

COARSE = 2.0**-12
"""Rounding of lse from which on the weight of a learnt sink is not computed from it."""


class Facts:
    """One layer of a trace; arrays are NumPy's, H heads, n queries, m keys, k of `top_k`."""

    def __init__(self, trace: Trace, layer: Layer) -> None:
        self.stats, self.len_q, self.len_kv = layer.stats, layer.len_q, layer.len_kv
        self.visible: Integers = np.asarray(layer.stats.visible)  # (H, n)
        self.enough: Flags = self.visible >= FEWEST
        self.broken: Flags = without_number(layer.stats)
        self.tokens, self.key_tokens = trace.tokens, trace.key_tokens or trace.tokens
        options = layer.options
        self.kv_offset = int(options.get("kv_offset", 0))
        self.kv_count = int(options.get("kv_len", layer.len_kv))
        q_offset = options.get("q_offset", self.kv_offset + self.kv_count - layer.len_q)
        self.q_pos: Integers = int(q_offset) + np.arange(layer.len_q)
        left = (options.get("window") or (None, None))[0]
        self.left = None if left is None else int(left)
        segments = options.get("segment_ids")
        pair = segments if isinstance(segments, (tuple, list)) else (segments, segments)
        self.q_segment = _along(pair[0], self.len_q)
        self.kv_segment = _along(pair[1], self.len_kv)
        self.learnt = self._learnt(options.get("sinks"))

    def _learnt(self, sinks: Any) -> Numbers:
        """Weight of each query on its head's learnt sink, (H, n)."""
        lse = self.stats.lse.astype(np.float64)
        if sinks is None:
            return np.zeros_like(lse)
        score = np.asarray(sinks, np.float64)[:, None]
        with np.errstate(invalid="ignore", over="ignore"):  # -inf - -inf, which is replaced
            share = np.exp(score - lse)
        share = np.where((self.visible == 0) & ~np.isnan(lse), 1.0, share)
        share = np.where(lse == -np.inf, 0.0, share)
        coarse = np.abs(lse) * np.finfo(self.stats.lse.dtype).eps > COARSE
        coarse &= (self.visible > 0) & (score > -np.inf)
        # Where lse is rounded too much, what the keys of the head do not receive is shared out.
        left = (lse > -np.inf).sum(axis=-1) - self.stats.received.sum(axis=-1, dtype=np.float64)
        left -= np.where(coarse, 0.0, share).sum(axis=-1)
        each = np.clip(left / np.maximum(1, coarse.sum(axis=-1)), 0, 1)
        return np.where(coarse, each[:, None], np.minimum(share, 1))

    def key_mass(self) -> Numbers:
        """Weight on each key, summed over the queries that see enough keys, (H, m).

        From what each key receives in all, without what the other queries give it. They see so
        few keys that these are among their top keys; where `top_k` is smaller, the part of their
        weight that is not is taken from every key, so that the mass is a lower bound.
        """
        mass: Numbers = self.stats.received.astype(np.float64)
        top_keys, top_weights = self.stats.top_keys, self.stats.top_weights
        for head, few in enumerate(~self.enough):
            if not few.any():
                continue
            keys, weights = top_keys[head, few], top_weights[head, few].astype(np.float64)
            given = np.bincount(keys[keys >= 0], weights[keys >= 0], minlength=self.len_kv)
            in_all = np.where(self.visible[head, few] > 0, 1 - self.learnt[head, few], 0.0)
            hidden = 0.0
            if top_keys.shape[-1] < FEWEST - 1:
                hidden = max(0.0, float((in_all - weights.sum(axis=-1)).sum()))
            mass[head] = np.maximum(mass[head] - given - hidden, 0.0)
        return mass

    def key_name(self, key: int) -> str:
        """Key in words: its token, where there are tokens, and its number."""
        return _named("key", key, self.key_tokens)

    def query_name(self, query: int) -> str:
        """Query in words."""
        return _named("query", query, self.tokens)

    @functools.cached_property
    def token_numbers(self) -> tuple[Integers, Integers]:
        """A number for each query's and key's token, (n,) and (m,), its segment being part of it.

        Equal numbers are equal tokens of one segment. Needs tokens.
        """
        known: dict[tuple[str, int], int] = {}

        def numbers(tokens: tuple[str, ...] | None, segment: Integers) -> Integers:
            pairs = zip(tokens or (), segment.tolist(), strict=True)
            return np.array([known.setdefault(pair, len(known)) for pair in pairs], dtype=np.int64)

        return numbers(self.tokens, self.q_segment), numbers(self.key_tokens, self.kv_segment)


def _along(segment: Any, length: int) -> Integers:
    """Segment of each token, (length,)."""
    return np.broadcast_to(np.int64(0) if segment is None else np.asarray(segment), (length,))


def _named(what: str, place: int, tokens: tuple[str, ...] | None) -> str:
    return f"{what} {place}" if tokens is None else f"{tokens[place]!r} ({what} {place})"
