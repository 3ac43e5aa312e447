"""The yardstick: attention as textbooks write it, every array in the working dtype."""

import math

import numpy as np


@np.errstate(all="ignore")
def attention(query, key, value, seen, *, scale=None, softcap=None, bias=None, alibi_slopes=None,
              score_mod=None, sinks=None, q_pos=None, kv_pos=None):  # fmt: skip
    """Return `(out, lse)` of softmax(scores) @ value, all scores in memory.

    `seen` is the boolean matrix of visible pairs, `(..., num_heads, len_q, len_kv)`; positions
    `(..., 1, len_q, 1)` and `(..., 1, 1, len_kv)` serve ALiBi and `score_mod`.
    """
    dtype = query.dtype
    two_axes = query.ndim == 2
    query, key, value = (x[None] if x.ndim == 2 else x for x in (query, key, value))
    group_size = query.shape[-3] // max(key.shape[-3], 1)
    key, value = (np.repeat(x, group_size, axis=-3) for x in (key, value))
    if scale is None:
        scale = 1 / math.sqrt(query.shape[-1]) if query.shape[-1] else 0.0

    # ml_dtypes has no matmul of its own: products in float32, rounded.
    scores = (query.astype(wide(dtype)) @ key.astype(wide(dtype)).swapaxes(-1, -2)).astype(dtype)
    scores = scores * dtype.type(scale)
    if softcap is not None:
        scores = dtype.type(softcap) * np.tanh(scores / dtype.type(softcap))
    if bias is not None:
        scores = scores + np.asarray(bias).astype(dtype)
    num_heads = query.shape[-3]
    if alibi_slopes is not None:
        distance = np.abs(q_pos - kv_pos).astype(dtype)
        scores = scores - np.asarray(alibi_slopes).astype(dtype)[:, None, None] * distance
    if score_mod is not None:
        lead = scores.shape[:-3]
        batch = np.arange(math.prod(lead)).reshape(*lead, 1, 1, 1)
        head = np.arange(num_heads)[:, None, None]
        scores = score_mod(scores, batch, head, q_pos, kv_pos).astype(dtype)
    scores = np.where(seen, scores, -np.inf).astype(dtype)

    top = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    if sinks is not None:
        top = np.maximum(top, np.asarray(sinks).astype(dtype)[:, None, None])
    top = np.where(np.isneginf(top), 0, top).astype(dtype)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True, dtype=dtype)
    if sinks is not None:
        total = total + np.exp(np.asarray(sinks).astype(dtype)[:, None, None] - top)
    weights = (weights / np.where(total == 0, 1, total)).astype(dtype)
    out = (weights.astype(wide(dtype)) @ value.astype(wide(dtype))).astype(dtype)
    lse = (top + np.log(total))[..., 0]
    return (out[0], lse[0]) if two_axes else (out, lse)


def wide(dtype):
    """The dtype itself, float32 for bfloat16."""
    return np.float32 if dtype.name == "bfloat16" else dtype
