"""Gradients of attention by their formulas: the truth that the tests of gradients compare with.

Plain loops over float64, one visible (query, key) pair after the other, nothing shared with the
library; which pairs are visible and their weights come from `naive`. Nothing is validated here.

Of a row, with weights w (without dropout), factors f of dropout, output o = sum(w f v) and
cotangents g of o and l of lse, the gradient by a score is `w (f g·v - g·o + l)`.
"""

import math
from typing import NamedTuple

import numpy as np

import naive


class Gradients(NamedTuple):
    """One for each argument, of its shape; None where it is absent."""

    query: np.ndarray | None = None
    key: np.ndarray | None = None
    value: np.ndarray | None = None
    bias: np.ndarray | None = None
    sinks: np.ndarray | None = None
    alibi_slopes: np.ndarray | None = None


@np.errstate(all="ignore")  # nan and inf in visible data are results here, not accidents
def attention(query, key, value, grad_out, grad_lse=None, **options):
    """Return the `Gradients` of `sum(out * grad_out) + sum(lse * grad_lse)`.

    Parameters
    ----------
    query, key, value
        As in `naive.attention`, and so are the options, but `score_mod` is a pair `(f, df)`:
        df is the derivative of f by the score.
    grad_out, grad_lse
        Arrays of the shapes of out and lse; that of lse may be None, for 0.
    """
    function, derivative = options.pop("score_mod", None) or (None, None)
    out, lse, weights = naive.attention(query, key, value, score_mod=function, **options)
    given = {"query": query, "key": key, "value": value}
    given |= {name: options.get(name) for name in ("bias", "sinks", "alibi_slopes")}

    query, key, value, grad_out = (np.asarray(x, np.float64) for x in (query, key, value, grad_out))
    grad_lse = np.zeros_like(lse) if grad_lse is None else np.asarray(grad_lse, np.float64)
    if query.ndim == key.ndim == value.ndim == 2:
        out, lse, weights, grad_out, grad_lse = (
            x[None] for x in (out, lse, weights, grad_out, grad_lse)
        )
    query, key, value = (x[None] if x.ndim == 2 else x for x in (query, key, value))
    *lead, num_heads, len_q, len_kv = weights.shape
    lead, group_size = tuple(lead), num_heads // max(key.shape[-3], 1)
    query, key, value = (np.broadcast_to(x, lead + x.shape[-3:]) for x in (query, key, value))
    bias, sinks, slopes = (
        np.asarray(neutral if given[name] is None else given[name], np.float64)
        for name, neutral in (("bias", 0.0), ("sinks", -math.inf), ("alibi_slopes", 0.0))
    )
    bias = np.broadcast_to(bias, weights.shape)
    sinks, slopes = (np.broadcast_to(x, num_heads) for x in (sinks, slopes))
    kv_len, kv_offset, q_offset = (options.get(n) for n in ("kv_len", "kv_offset", "q_offset"))
    kv_len = np.broadcast_to(np.int64(len_kv if kv_len is None else kv_len), lead)
    kv_offset = np.broadcast_to(0 if kv_offset is None else kv_offset, lead)
    q_offset = np.broadcast_to(kv_offset + kv_len - len_q if q_offset is None else q_offset, lead)
    dropout, seed = options.get("dropout", 0.0), options.get("seed")

    wide = (query, key, value, bias, sinks, slopes)
    found = Gradients(*(np.zeros(x.shape) for x in wide))
    for batch, entry in enumerate(np.ndindex(lead)):
        seed_here = naive.seed_of(seed, batch, entry, lead) if dropout else None
        for head in range(num_heads):
            here, kv_here = (*entry, head), (*entry, head // group_size)
            found.sinks[head] += one_head(
                Gradients(query[here], key[kv_here], value[kv_here], bias[here], sinks[head],
                          slopes[head]),
                Gradients(found.query[here], found.key[kv_here], found.value[kv_here],
                          found.bias[here], None, found.alibi_slopes[head:]),
                out[here], lse[here], weights[here], grad_out[here], grad_lse[here], batch, head,
                scale=options.get("scale"), softcap=options.get("softcap"), derivative=derivative,
                dropout=dropout, seed=seed_here, q_offset=int(q_offset[entry]),
                kv_offset=int(kv_offset[entry]),
            )  # fmt: skip
    return Gradients(*(
        None if x is None else summed_to(gradient, np.shape(x))
        for gradient, x in zip(found, given.values(), strict=True)
    ))


def one_head(
    given, found, out, lse, weights, grad_out, grad_lse, batch, head, *, scale, softcap, derivative,
    dropout, seed, q_offset, kv_offset,
):  # fmt: skip
    """Add the gradients of one head to those found, in place; return that of its sink."""
    of_sink = 0.0
    for i in range(len(weights)):
        q, g, q_pos = given.query[i], grad_out[i], q_offset + i
        common = float(grad_lse[i]) - float(g @ out[i])
        if given.sinks != -math.inf:
            of_sink += math.exp(given.sinks - lse[i]) * common
        for j in np.flatnonzero(weights[i]).tolist():  # nan is seen, too
            k, v, kv_pos = given.key[j], given.value[j], kv_offset + j
            distance, weight = abs(q_pos - kv_pos), float(weights[i, j])
            factor = naive.kept(dropout, seed, head, q_pos, kv_pos) if dropout else 1.0
            found.value[j] += weight * factor * g
            by_bias, by_dot = slopes_of_score(
                q, k, scale, softcap, float(given.bias[i, j]) - given.alibi_slopes * distance,
                derivative, (batch, head, q_pos, kv_pos),
            )  # fmt: skip
            of_score = weight * (factor * float(g @ v) + common)
            found.bias[i, j] = of_score * by_bias
            found.alibi_slopes[0] -= of_score * by_bias * distance
            found.query[i] += of_score * by_dot * k
            found.key[j] += of_score * by_dot * q
    return of_sink


def slopes_of_score(q, k, scale, softcap, added, derivative, where):
    """Return the derivatives of one score by what is added to it and by the product q·k."""
    if scale is None:
        scale = 1 / math.sqrt(len(q)) if len(q) else 0.0
    score, by_dot = scale * float(q @ k), scale
    if softcap is not None:
        capped = math.tanh(score / softcap)
        score, by_dot = softcap * capped, scale * (1 - capped**2)
    by_bias = 1.0
    if derivative is not None:
        by_bias = float(derivative(np.float64(score + added), *where))
    return by_bias, by_bias * by_dot


def summed_to(x, shape):
    """Return the gradient of an array of that shape, given that of the array it broadcasts to."""
    if x.ndim > len(shape):
        x = x.sum(axis=tuple(range(x.ndim - len(shape))))
    wide = tuple(axis for axis, n in enumerate(shape) if n == 1 and x.shape[axis] != 1)
    return x.sum(axis=wide, keepdims=True).reshape(shape)


def varlen(
    query, key, value, cu_seqlens_q, cu_seqlens_kv, grad_out, *, score_mod=None, mask_mod=None,
    dropout=0.0, seed=None, **options,
):  # fmt: skip
    """Return the `Gradients` of packed sequences, arrays `(tokens, heads, d)` as in `naive`."""
    number = {name: np.zeros(np.shape(x)) for name, x in
              {"query": query, "key": key, "value": value}.items()}  # fmt: skip
    number |= {name: np.zeros(np.shape(options[name])) for name in ("sinks", "alibi_slopes")
               if options.get(name) is not None}  # fmt: skip
    num_sequences = len(cu_seqlens_q) - 1
    for s in range(num_sequences):
        rows = slice(int(cu_seqlens_q[s]), int(cu_seqlens_q[s + 1]))
        columns = slice(int(cu_seqlens_kv[s]), int(cu_seqlens_kv[s + 1]))

        def of_s(function, s=s):
            return lambda score, _, *where: function(score, s, *where)

        def mask_of_s(_, *where, s=s):
            return mask_mod(s, *where)

        seed_here = naive.seed_of(seed, s, (s,), (num_sequences,)) if dropout else 0
        found = attention(
            *(np.swapaxes(x, 0, 1) for x in (query[rows], key[columns], value[columns])),
            np.swapaxes(grad_out[rows], 0, 1),
            score_mod=None if score_mod is None else tuple(map(of_s, score_mod)),
            mask_mod=None if mask_mod is None else mask_of_s,
            dropout=dropout, seed=np.array(seed_here, np.uint64), **options,
        )  # fmt: skip
        number["query"][rows] += np.swapaxes(found.query, 0, 1)
        number["key"][columns] += np.swapaxes(found.key, 0, 1)
        number["value"][columns] += np.swapaxes(found.value, 0, 1)
        for name in ("sinks", "alibi_slopes"):
            if name in number:
                number[name] += getattr(found, name)
    return Gradients(**number)
