"""Weights for another tool."""

from __future__ import annotations

from typing import Any

from scaledot._errors import missing_extra, value_error
from scaledot.introspect._trace import Trace, check_trace


def to_bertviz(trace: Trace) -> tuple[list[Any], list[str]]:
    """Weights and tokens as ``head_view`` and ``model_view`` of bertviz take them.

    Parameters
    ----------
    trace : Trace
        Of layers with query and key, self-attention: as many keys as queries.

    Returns
    -------
    attention : list of torch.Tensor, shape (1, num_heads, len, len)
        One float32 tensor for each layer.
    tokens : list of str
        Those of the trace, or the places 0, 1, 2 … where it has none.

    Raises
    ------
    ImportError
        PyTorch is not installed.
    TypeError
        Not a trace.
    ValueError
        A layer without query and key, or with another number of keys than queries; numbers of
        heads or tokens of queries and keys that differ, which bertviz cannot show.

    Notes
    -----
    Quadratic in the length by nature: for what bertviz can draw, not for long contexts.

    References
    ----------
    arXiv 1906.05714.

    Examples
    --------
    >>> import numpy as np
    >>> from scaledot import introspect
    >>> x = np.random.default_rng(0).standard_normal((2, 4, 3, 8))
    >>> found = introspect.trace(x, x, tokens=["a", "b", "c"])
    >>> attention, tokens = introspect.to_bertviz(found)
    >>> len(attention), tuple(attention[0].shape), tokens
    (2, (1, 4, 3, 3), ['a', 'b', 'c'])
    >>> bertviz.head_view(attention, tokens)  # doctest: +SKIP
    """
    check_trace("trace", trace)
    try:
        import torch
    except ImportError:
        raise missing_extra("torch", "torch") from None
    first = trace.layers[0]
    shapes = {(layer.num_heads, layer.len_q, layer.len_kv) for layer in trace.layers}
    if len(shapes) > 1 or first.len_q != first.len_kv:
        raise value_error(
            "bertviz needs self-attention with the same shape (num_heads, len_q, len_kv) in every "
            "layer, len_q = len_kv", ", ".join(map(str, sorted(shapes))),
            "Leave out the layers that differ.",
        )
    if trace.key_tokens is not None and trace.key_tokens != trace.tokens:
        raise value_error(
            "bertviz needs the same tokens for queries and keys", "key_tokens that differ",
            "Make a trace without key_tokens.",
        )
    attention = [torch.as_tensor(layer.weights()).float()[None] for layer in trace.layers]
    return attention, list(trace.tokens or map(str, range(first.len_q)))
