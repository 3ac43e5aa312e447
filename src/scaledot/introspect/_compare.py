"""How the attention of two traces differs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from scaledot import _checks
from scaledot._errors import value_error
from scaledot.introspect._rows import blocks, indices
from scaledot.introspect._tables import Numbers, mean_over, table
from scaledot.introspect._trace import Layer, Trace, check_trace


class Difference(NamedTuple):
    """One head of `Comparison.largest`, with its total variation."""

    layer: int
    head: int
    total_variation: float


@dataclass(frozen=True, eq=False)
class Comparison:
    """Differences of two traces; arrays have the shape (num_layers, num_heads).

    Attributes
    ----------
    total_variation : array
        ``½ Σ |a - b|`` over the keys of a row, the mean over the rows: the share of the weight
        that lies elsewhere, 0 to 1. nan where a layer was kept without query and key.
    total_variation_max : array
        The largest of a row.
    divergence : array
        Jensen-Shannon divergence of a row in nats, the mean over the rows: 0 to log 2. nan where
        a layer was kept without query and key.
    divergence_max : array
        The largest of a row.
    received_variation : array
        Total variation of the mean rows, from the statistics alone: at most ``total_variation``
        over all rows.
    top_key_agreement : array
        Share of the queries whose largest weight is on the same key.
    entropy_difference : array
        Mean of ``b``'s entropy less that of ``a``, in nats.
    max_weight_difference : array
        Mean of ``b``'s largest weight less that of ``a``.
    """

    total_variation: Numbers
    total_variation_max: Numbers
    divergence: Numbers
    divergence_max: Numbers
    received_variation: Numbers
    top_key_agreement: Numbers
    entropy_difference: Numbers
    max_weight_difference: Numbers

    def largest(self, n: int = 10) -> list[Difference]:
        """Heads that differ most, the largest difference first, before them those without numbers.

        Parameters
        ----------
        n : int
            How many, at most.

        Returns
        -------
        list of Difference
            Layer, head and total variation; where it is nan, ``received_variation``, which is at
            most that. Heads in which a query that sees a key has nan for weights, in either trace,
            come first. Heads whose queries see nothing are left out.

        Raises
        ------
        TypeError, ValueError
            ``n`` is not a positive integer.

        Examples
        --------
        >>> import numpy as np
        >>> from scaledot import introspect
        >>> x = np.random.default_rng(0).standard_normal((1, 2, 6, 4))
        >>> y = np.stack([x[0] * [[[1]], [[3]]]])  # the second head is sharper
        >>> found = introspect.compare(introspect.trace(x, x), introspect.trace(y, x))
        >>> [place[:2] for place in found.largest(1)]
        [(0, 1)]
        """
        if _checks.integer("n", n) < 1:
            raise value_error("n must be at least 1", n, "It counts heads.")
        known = self.total_variation
        values = np.where(np.isnan(known), self.received_variation, known)
        seen = ~np.isnan(self.top_key_agreement)  # a number where a query sees a key
        broken = seen & np.isnan(self.max_weight_difference)
        order = np.argsort(np.where(broken, -np.inf, -values), axis=None, kind="stable")
        places = zip(*np.unravel_index(order[seen.ravel()[order]][:n], values.shape), strict=True)
        return [Difference(int(i), int(h), float(values[i, h])) for i, h in places]


def compare(a: Trace, b: Trace, *, rows: Any = None) -> Comparison:
    """How far the attention of each head in one trace is from that in another.

    For two models, or one model before and after training, quantisation, or a change of the code
    that runs it, on the same tokens.

    Parameters
    ----------
    a, b : Trace
        With the same numbers of layers, heads, queries and keys.
    rows : 1-D integer array or sequence, optional
        Queries to compare the weights of, negative ones count from the end; a sample bounds the
        time for long contexts. None is all of them. Numbers that come from the statistics are
        always over all queries.

    Returns
    -------
    Comparison
        Arrays of shape (num_layers, num_heads). Means are over the queries that see a key in
        either trace; nan where there are none.

    Raises
    ------
    TypeError
        Not a trace; rows that are not integers.
    ValueError
        Traces that do not fit each other, rows out of range.

    Notes
    -----
    Weights are computed from query and key, exactly and a block of rows at a time: memory is
    linear in the length, time is quadratic. What learnt sinks take counts as one more key, and
    so does what a query that sees nothing does not read. Sums are in float64.

    References
    ----------
    Jensen-Shannon divergence of heads: arXiv 1906.04341 (section 6).

    Examples
    --------
    >>> import numpy as np
    >>> from scaledot import introspect
    >>> x = np.random.default_rng(0).standard_normal((1, 2, 6, 4))
    >>> before, after = introspect.trace(x, x), introspect.trace(x, x, scale=1.0)
    >>> found = introspect.compare(before, after)
    >>> bool((found.entropy_difference < 0).all())  # a larger scale is sharper
    True
    """
    check_trace("a", a)
    check_trace("b", b)
    if len(a.layers) != len(b.layers):
        raise value_error(
            "two traces must have the same number of layers",
            f"{len(a.layers)} and {len(b.layers)}", "Compare layers that correspond.",
        )
    pairs = list(zip(a.layers, b.layers, strict=True))
    for first, second in pairs:
        shapes = [(x.num_heads, x.len_q, x.len_kv) for x in (first, second)]
        if shapes[0] != shapes[1]:
            raise value_error(
                "layers to compare must have the same (num_heads, len_q, len_kv)",
                f"{shapes[0]} and {shapes[1]} in {first.name!r}", "Trace the same tokens twice.",
            )
    chosen = [indices("rows", rows, first.len_q) for first, _ in pairs]
    found = [
        (*_of_weights(first, second, index), *_of_stats(first, second))
        for (first, second), index in zip(pairs, chosen, strict=True)
    ]
    return Comparison(*(table(x) for x in zip(*found, strict=True)))


def _of_weights(
    a: Layer, b: Layer, index: npt.NDArray[np.int64]
) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """Mean and largest total variation and divergence of rows, each (num_heads,)."""
    if any(x is None for x in (a.query, a.key, b.query, b.key)):
        nan = np.full(a.num_heads, np.nan)
        return nan, nan, nan, nan
    variation, divergence = np.zeros((2, a.num_heads, len(index)))
    together = a.has_mods or b.has_mods
    for part, heads in blocks(len(index), a.num_heads, a.len_kv, together=together):
        some = {"rows": index[part], "heads": np.arange(heads.start, heads.stop)}
        p, q = (_with_rest(layer.weights(**some)) for layer in (a, b))
        variation[heads, part] = np.abs(p - q).sum(axis=-1) / 2
        middle = (p + q) / 2
        divergence[heads, part] = (_relative(p, middle) + _relative(q, middle)) / 2
    seen = ((a.stats.visible > 0) | (b.stats.visible > 0))[:, index]
    return (
        mean_over(variation, seen), _max_over(variation, seen),
        mean_over(divergence, seen), _max_over(divergence, seen),
    )  # fmt: skip


def _with_rest(weights: npt.NDArray[Any]) -> Numbers:
    """Weights (..., len_kv) with what they lack to 1 as one more key, in float64."""
    wide = weights.astype(np.float64)
    rest = np.maximum(1 - wide.sum(axis=-1, keepdims=True), 0)
    return np.concatenate([wide, rest], axis=-1)


def _relative(p: Numbers, middle: Numbers) -> Numbers:
    """``Σ p log(p / middle)`` along the last axis, where p is at most twice the middle."""
    ratio = np.divide(p, middle, out=np.ones_like(p), where=p != 0)
    total: Numbers = (p * np.log(ratio)).sum(axis=-1)
    return total


def _max_over(values: Numbers, use: npt.NDArray[np.bool_]) -> Numbers:
    """Largest along the last axis, 0 where not in use, (num_heads,); nan where none is."""
    return np.where(use.any(axis=-1), values.max(axis=-1, initial=0.0), np.nan)


def _of_stats(a: Layer, b: Layer) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """What the statistics tell of the difference, each (num_heads,)."""
    seen = (a.stats.visible > 0) | (b.stats.visible > 0)
    agree = a.stats.top_keys[..., 0] == b.stats.top_keys[..., 0]
    count = seen.sum(axis=-1)
    apart = [x.stats.received.astype(np.float64) for x in (a, b)]
    moved = np.abs(apart[0] - apart[1]).sum(axis=-1)
    moved += np.abs(apart[0].sum(axis=-1) - apart[1].sum(axis=-1))  # what no key receives
    return (
        np.divide(moved, 2 * count, out=np.full(count.shape, np.nan), where=count > 0),
        mean_over(agree.astype(np.float64), seen),
        mean_over(b.stats.entropy - a.stats.entropy, seen),
        mean_over(b.stats.max_weight - a.stats.max_weight, seen),
    )  # fmt: skip
