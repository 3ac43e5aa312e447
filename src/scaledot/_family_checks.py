"""Checks of arrays that belong together: one library, device and dtype, shapes that fit."""

from __future__ import annotations

from typing import Any

import numpy as np

from scaledot import _arrays
from scaledot._checks import alike, broadcastable, integer, option_array, real, shapes
from scaledot._errors import type_error, value_error
from scaledot._typing import Array

FORMS: dict[str, tuple[str, ...]] = {"dot": (), "general": ("w",), "concat": ("w", "v")}
"""Forms of multiplicative attention and the weights that each takes."""


def leading_axes(**arrays: Array) -> tuple[int, ...]:
    """Broadcast shape of the axes before the last two, which every array must have."""
    for name, x in arrays.items():
        if x.ndim < 2:
            raise value_error(
                f"{name} must have at least two axes", f"{name} {tuple(x.shape)}",
                "The last two are (len, width); an axis of length 1 is enough.",
            )
    try:
        return np.broadcast_shapes(*(tuple(x.shape[:-2]) for x in arrays.values()))
    except ValueError:
        raise value_error(
            f"leading axes of {', '.join(arrays)} must broadcast", shapes(**arrays),
            "Axes before the last two are equal or 1; insert axes of length 1 where they differ.",
        ) from None


def exact_shape(name: str, x: Array, shape: tuple[int, ...], axes: str) -> None:
    """Raise unless x has this shape, written ``axes`` in the message."""
    if tuple(x.shape) != shape:
        raise value_error(
            f"{name} must have the shape {axes} = {shape}", tuple(x.shape),
            "Widths follow from the other arrays; is it transposed?",
        )


def pairs(query: Array, key: Array, value: Array, mask: Array | None) -> Array | None:
    """Check shapes without heads, (..., len, width), and the mask; return it with a head axis."""
    lead = leading_axes(query=query, key=key, value=value)
    len_q, len_kv = query.shape[-2], key.shape[-2]
    if value.shape[-2] != len_kv:
        raise value_error(
            "key and value must have the same length",
            f"{len_kv} and {value.shape[-2]} ({shapes(key=key, value=value)})",
            "Axes are (..., len, width): is one of them transposed?",
        )
    if mask is None:
        return None
    mask = option_array("mask", mask, query)
    if not _arrays.is_bool(mask):
        raise type_error(
            "mask must be boolean (True = may be seen)", _arrays.describe(mask),
            "Turn a 0/1 mask into mask != 0.",
        )
    broadcastable("mask", mask, (*lead, len_q, len_kv), "(..., len_q, len_kv)")
    return mask[..., None, :, :] if mask.ndim > 1 else mask


def additive(
    query: Array, key: Array, value: Array, w_q: Array, w_k: Array, v: Array, mask: Array | None
) -> Array | None:
    """Check the arguments of additive attention; return the mask as `pairs` does."""
    alike(query=query, key=key, value=value, w_q=w_q, w_k=w_k, v=v)
    mask = pairs(query, key, value, mask)
    d_hidden = _hidden(v)
    exact_shape("w_q", w_q, (d_hidden, query.shape[-1]), "(d_hidden, d_query)")
    exact_shape("w_k", w_k, (d_hidden, key.shape[-1]), "(d_hidden, d_key)")
    return mask


def multiplicative(
    query: Array, key: Array, value: Array, w: Any, v: Any, form: str, mask: Array | None
) -> Array | None:
    """Check the arguments of multiplicative attention; return the mask as `pairs` does."""
    if form not in FORMS:
        raise value_error(
            f"form must be one of {', '.join(map(repr, FORMS))}", repr(form),
            "'dot' is q·k, 'general' q·(W k), 'concat' v·tanh(W [q; k]).",
        )
    weights = {name: x for name, x in (("w", w), ("v", v)) if x is not None}
    if tuple(weights) != FORMS[form]:
        raise value_error(
            f"form={form!r} takes {' and '.join(FORMS[form]) or 'no weights'}",
            " and ".join(weights) or "none",
            "'dot' takes neither w nor v, 'general' w alone, 'concat' both.",
        )
    alike(query=query, key=key, value=value, **weights)
    mask = pairs(query, key, value, mask)
    d_query, d_key = query.shape[-1], key.shape[-1]
    if form == "concat":
        exact_shape("w", w, (_hidden(v), d_query + d_key), "(d_hidden, d_query + d_key)")
    elif form == "general":
        exact_shape("w", w, (d_query, d_key), "(d_query, d_key)")
    elif d_query != d_key:
        raise value_error(
            "query and key must have the same width for form='dot'",
            f"{d_query} and {d_key} ({shapes(query=query, key=key)})",
            "Use form='general' with a matrix w of shape (d_query, d_key).",
        )
    return mask


def _hidden(v: Array) -> int:
    """Return d_hidden, the length of v."""
    if v.ndim != 1:
        raise value_error(
            "v must have the shape (d_hidden,)", tuple(v.shape), "One weight for a hidden unit."
        )
    return int(v.shape[0])


def recall(
    query: Array, patterns: Array, beta: object, steps: object, tolerance: object
) -> tuple[int, ...]:
    """Check the arguments of `retrieve`; return the broadcast leading axes."""
    alike(query=query, patterns=patterns)
    lead = leading_axes(query=query, patterns=patterns)
    if query.shape[-1] != patterns.shape[-1]:
        raise value_error(
            "query and patterns must have the same width",
            f"{query.shape[-1]} and {patterns.shape[-1]}",
            "A query is a pattern, whole or damaged.",
        )
    if beta is not None:
        real("beta", beta)
    if integer("steps", steps) < 1:
        raise value_error("steps must be at least 1", steps, "It bounds the repetitions.")
    if real("tolerance", tolerance) < 0:
        raise value_error(
            "tolerance must be at least 0", tolerance, "It counts rounding errors; 4.0 is usual."
        )
    return lead


def heads(
    arrays: dict[str, Array], num_heads: object, num_kv_heads: object
) -> tuple[int, int]:
    """Check the arrays of multi-head attention, by name; return both numbers of heads."""
    alike(**arrays)
    leading_axes(x=arrays["x"], context=arrays["context"])
    of_q = integer("num_heads", num_heads)
    of_kv = of_q if num_kv_heads is None else integer("num_kv_heads", num_kv_heads)
    if of_kv < 1 or of_q < 1 or of_q % of_kv:
        raise value_error(
            "num_heads must be a positive multiple of num_kv_heads", f"{of_q} and {of_kv}",
            "Every head of keys serves equally many heads of queries.",
        )
    for name, count in (("w_q", of_q), ("w_k", of_kv), ("w_v", of_kv), ("w_o", 1)):
        shape = tuple(arrays[name].shape)
        if len(shape) != 2 or shape[1] % count:
            raise value_error(
                f"{name} must be a matrix with a multiple of {count} columns", shape,
                "The columns of one head lie next to each other.",
            )
    d_model, d_context = arrays["x"].shape[-1], arrays["context"].shape[-1]
    d_k, d_v = arrays["w_q"].shape[1] // of_q, arrays["w_v"].shape[1] // of_kv
    exact_shape("w_q", arrays["w_q"], (d_model, of_q * d_k), "(d_model, num_heads * d_k)")
    exact_shape("w_k", arrays["w_k"], (d_context, of_kv * d_k), "(d_context, num_kv_heads * d_k)")
    exact_shape("w_v", arrays["w_v"], (d_context, of_kv * d_v), "(d_context, num_kv_heads * d_v)")
    d_out = arrays["w_o"].shape[1]
    exact_shape("w_o", arrays["w_o"], (of_q * d_v, d_out), "(num_heads * d_v, d_out)")
    return of_q, of_kv
