"""Attention followed through the layers."""

from __future__ import annotations

import itertools
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from scaledot import _checks, attention_vjp
from scaledot._errors import value_error
from scaledot.introspect._rows import blocks, indices
from scaledot.introspect._tables import without_number
from scaledot.introspect._trace import Floats, Layer, Trace, check_trace, kept

Flags = npt.NDArray[np.bool_]

_WIDTH = 64  # rows of the result that are followed at once


def rollout(
    trace: Trace,
    *,
    rows: Any = None,
    residual: float = 0.5,
    heads: Literal["mean", "max", "min"] = "mean",
) -> Floats:
    """Attention rollout: how much each input token reaches chosen places of the last layer.

    ``rollout = A_L … A_2 A_1`` with ``A_l = residual · I + (1 - residual) · W_l``, where ``W_l``
    are the weights of layer l, fused over its heads; rows of the product, from the last layer down.

    Parameters
    ----------
    trace : Trace
        Of layers with query and key. With a residual, each has as many keys as queries; without,
        a layer has as many keys as the one below has queries.
    rows : 1-D integer array or sequence, optional
        Queries of the last layer; negative ones count from the end. None is all of them, which is
        quadratic in the length by nature.
    residual : float
        Share of a token that goes past the attention, 0 to 1.
    heads : {"mean", "max", "min"}
        How the heads of a layer become one matrix. The largest or smallest weights of the heads
        do not sum to 1, so their rows are divided by their sums.

    Returns
    -------
    array, shape (len(rows), len_kv)
        Keys are those of the first layer; float64 if a layer is, else float32. Rows sum to 1, or
        to less: what a query that sees no key would read is lost and, under the mean, what goes
        to learnt sinks. A row is nan where it reaches a query of any layer whose weights are nan
        in a head.

    Raises
    ------
    TypeError
        Not a trace; rows that are not integers, a residual that is no number.
    ValueError
        A layer without query and key or without heads, lengths that do not follow one another,
        rows out of range.

    Notes
    -----
    With the mean, a row ``r`` goes down a layer as ``r W``, the gradient of attention by a value
    of width 1 for ``grad_out = r``: `scaledot.attention_vjp` gives it without the matrix. The
    largest and smallest weights are computed a block of rows at a time. Either way memory is
    linear in the length. The time of a layer is that of attention and its gradients for every 64
    rows, two to three times that of attention alone; that of all weights for the extremes.

    Rollout knows neither values nor the layers between: it tells where attention could have
    carried a token's content, not what the model made of it.

    References
    ----------
    arXiv 2005.00928.

    Examples
    --------
    >>> import numpy as np
    >>> from scaledot import introspect
    >>> x = np.zeros((2, 1, 4, 8))  # two layers that look at everything alike
    >>> introspect.rollout(introspect.trace(x, x), rows=[0])
    array([[0.4375, 0.1875, 0.1875, 0.1875]])
    """
    check_trace("trace", trace)
    layers = trace.layers
    residual = _checks.real("residual", residual)
    if not 0 <= residual <= 1:
        raise value_error("residual must lie between 0 and 1", residual, "It is a share.")
    if heads not in ("mean", "max", "min"):
        raise value_error(
            "heads must be 'mean', 'max' or 'min'", repr(heads), "It says how heads are fused."
        )
    _check_lengths(layers, residual)
    index = indices("rows", rows, layers[-1].len_q)
    double = any(kept(layer)[0].dtype == np.float64 for layer in layers)
    reached = np.zeros((len(index), layers[-1].len_q), np.float64 if double else np.float32)
    reached[np.arange(len(index)), index] = 1
    nan_rows = np.zeros(len(index), np.bool_)
    for layer in reversed(layers):
        if residual == 1:
            break
        lost: Flags = np.any(without_number(layer.stats), axis=0)  # (len_q,)
        nan_rows |= (reached[:, lost] != 0).any(axis=-1)
        reached[:, lost] = 0
        below = (
            _mean(layer, reached, lost) if heads == "mean"
            else _extreme(layer, reached, lost, heads)
        )  # fmt: skip
        reached = (1 - residual) * below + (residual * reached if residual else 0)
    reached[nan_rows] = np.nan
    return reached


def _check_lengths(layers: tuple[Layer, ...], residual: float) -> None:
    """Raise unless each layer's keys are the places of the layer below."""
    for layer in layers:
        if not layer.num_heads:
            raise value_error(
                "rollout needs layers with heads", f"none in layer {layer.name!r}",
                "Leave the layer out.",
            )
        if residual and layer.len_q != layer.len_kv:
            raise value_error(
                "rollout with a residual needs as many keys as queries",
                f"{layer.len_q} queries and {layer.len_kv} keys in layer {layer.name!r}",
                "Trace the whole sequence, or pass residual=0.",
            )
    for below, above in itertools.pairwise(layers):
        if above.len_kv != below.len_q:
            raise value_error(
                "rollout needs layers whose keys are the places of the layer below",
                f"{below.len_q} queries in layer {below.name!r} and {above.len_kv} keys in layer "
                f"{above.name!r}", "Trace layers that follow one another.",
            )


def _mean(layer: Layer, reached: Floats, lost: Flags) -> Floats:
    """Rows (count, len_q) times the mean of the heads' weights, (count, len_kv)."""
    dtype = reached.dtype
    query, key = (x.astype(dtype, copy=False) for x in kept(layer))
    options = dict(layer.options)
    if callable(options.get("score_mod")):  # its slope has no part in the gradient by the value
        options["score_mod"] = (options["score_mod"], _no_slope)
    if lost.any():
        options["segment_ids"] = _hiding(layer, lost)
        query = np.where(lost[:, None], dtype.type(0), query)
    parts = [np.zeros((0, layer.len_kv), dtype)]
    for start in range(0, len(reached), _WIDTH):
        part = reached[start : start + _WIDTH].T  # (len_q, width)
        value = np.zeros((*key.shape[:-1], part.shape[1]), dtype)
        _, pullback = attention_vjp(query, key, value, **options)
        grad_out = np.ascontiguousarray(np.broadcast_to(part, (layer.num_heads, *part.shape)))
        grad_value = cast(Floats, pullback(grad_out).value)  # (num_kv_heads, len_kv, width)
        parts.append(grad_value.sum(axis=0).T / layer.num_heads)
    return np.concatenate(parts)


def _hiding(layer: Layer, lost: Flags) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Segments with which lost queries see nothing, of queries and of keys.

    Their weights are nan, and 0 times nan is nan in a product.
    """
    given = layer.options.get("segment_ids", 0)
    pair = given if isinstance(given, (tuple, list)) else (given, given)
    query, key = (
        np.broadcast_to(np.asarray(x, np.int64), (length,))
        for x, length in zip(pair, (layer.len_q, layer.len_kv), strict=True)
    )
    return np.where(lost, -1, query), key


def _no_slope(score: Any, batch: Any, head: Any, q_pos: Any, kv_pos: Any) -> Any:
    """Stand in for the derivative of a score_mod."""
    return score * 0.0


def _extreme(layer: Layer, reached: Floats, lost: Flags, which: str) -> Floats:
    """Rows (count, len_q) times the largest or smallest weights of the heads, (count, len_kv)."""
    below = np.zeros((len(reached), layer.len_kv), reached.dtype)
    extreme = np.maximum if which == "max" else np.minimum
    num_heads, fused = layer.num_heads, np.zeros((0, 0))
    for part, heads in blocks(layer.len_q, num_heads, layer.len_kv, together=layer.has_mods):
        rows = np.arange(part.start, part.stop)
        weights = layer.weights(rows=rows, heads=np.arange(heads.start, heads.stop))
        one = extreme.reduce(weights, axis=0)  # (rows, len_kv)
        fused = one if heads.start == 0 else extreme(fused, one)
        if heads.stop == num_heads:
            fused[lost[part]] = 0
            total = fused.sum(axis=-1, keepdims=True)
            fused = np.divide(fused, total, out=np.zeros_like(fused), where=total != 0)
            below += reached[:, part] @ fused
    return below
