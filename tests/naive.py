"""Attention by its definition: the truth that every test and benchmark compares with.

Plain loops over float64, one (query, key) pair after the other, nothing shared with the library.
Only visible pairs are ever computed, so what lies at an excluded place cannot matter.
Nothing is validated here: the arguments are taken to be right.
"""

import math

import numpy as np

BLOCK = 128  # rows and columns of the scores that one entry of `block_mask` stands for


def attention(query, key, value, **options):
    """Return `(out, lse, weights)` of softmax(scores) @ value in float64, see `whole`."""
    return whole(query, key, value, **options)[:3]


def whole(
    query, key, value, *, causal=False, window=None, mask=None, bias=None, segment_ids=None,
    kv_len=None, scale=None, softcap=None, alibi_slopes=None, sinks=None, score_mod=None,
    mask_mod=None, block_mask=None, dropout=0.0, seed=None, q_offset=None, kv_offset=0,
):  # fmt: skip
    """Return `(out, lse, weights, visible)` of softmax(scores) @ value in float64.

    Parameters
    ----------
    query, key, value
        Arrays `(..., num_heads, len_q, d_k)`, `(..., num_kv_heads, len_kv, d_k)` and
        `(..., num_kv_heads, len_kv, d_v)`; three 2-D arrays are one head.

    Returns
    -------
    out, lse, weights, visible
        Arrays `(..., num_heads, len_q, d_v)`, `(..., num_heads, len_q)` and, twice,
        `(..., num_heads, len_q, len_kv)`, without the head axis for 2-D input. `lse` and
        `weights` are those without dropout; a sink takes its share of the weights. `visible`
        tells which keys have a score.
    """
    query, key, value = (np.asarray(x, dtype=np.float64) for x in (query, key, value))
    two_axes = query.ndim == key.ndim == value.ndim == 2
    query, key, value = (x[None] if x.ndim == 2 else x for x in (query, key, value))
    num_heads, len_q, _ = query.shape[-3:]
    num_kv_heads, len_kv, d_v = value.shape[-3:]
    group_size = num_heads // max(num_kv_heads, 1)
    lead = np.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    query, key, value = (np.broadcast_to(x, lead + x.shape[-3:]) for x in (query, key, value))

    # An option that is not given is its neutral value from here on.
    pairs = (*lead, num_heads, len_q, len_kv)
    mask = np.broadcast_to(True if mask is None else mask, pairs)
    bias = np.broadcast_to(0.0 if bias is None else np.asarray(bias, dtype=np.float64), pairs)
    blocks = (*lead, num_heads, math.ceil(len_q / BLOCK), math.ceil(len_kv / BLOCK))
    block_mask = np.broadcast_to(True if block_mask is None else block_mask, blocks)
    q_segment, kv_segment = segments(segment_ids, lead, len_q, len_kv)
    kv_len = np.broadcast_to(np.int64(len_kv if kv_len is None else kv_len), lead)
    kv_offset = np.broadcast_to(np.int64(kv_offset), lead)
    q_offset = np.broadcast_to(kv_offset + kv_len - len_q if q_offset is None else q_offset, lead)
    slopes = np.zeros(num_heads) if alibi_slopes is None else alibi_slopes
    sinks = np.full(num_heads, -math.inf) if sinks is None else sinks

    out = np.zeros((*lead, num_heads, len_q, d_v))
    lse = np.full((*lead, num_heads, len_q), -math.inf)
    weights, there = np.zeros(pairs), np.zeros(pairs, dtype=bool)
    for batch, entry in enumerate(np.ndindex(lead)):
        seed_here = seed_of(seed, batch, entry, lead) if dropout else None
        for head in range(num_heads):
            here, kv_here = (*entry, head), (*entry, head // group_size)
            out[here], lse[here], weights[here], there[here] = one_head(
                query[here], key[kv_here], value[kv_here], batch, head,
                causal=causal, window=window, mask=mask[here], bias=bias[here],
                block_mask=block_mask[here], q_segment=q_segment[entry],
                kv_segment=kv_segment[entry], kv_len=int(kv_len[entry]), scale=scale,
                softcap=softcap, slope=float(slopes[head]), sink=float(sinks[head]),
                score_mod=score_mod, mask_mod=mask_mod, dropout=dropout, seed=seed_here,
                q_offset=int(q_offset[entry]), kv_offset=int(kv_offset[entry]),
            )  # fmt: skip
    found = out, lse, weights, there
    return tuple(x[0] for x in found) if two_axes else found


@np.errstate(all="ignore")  # nan and inf in visible data are results here, not accidents
def one_head(
    query, key, value, batch, head, *, causal, window, mask, bias, block_mask, q_segment,
    kv_segment, kv_len, scale, softcap, slope, sink, score_mod, mask_mod, dropout, seed,
    q_offset, kv_offset,
):  # fmt: skip
    """Return `(out, lse, weights, visible)` of one head: query `(len_q, d_k)`, others alike."""
    len_q, d_k = query.shape
    if scale is None:
        scale = 1 / math.sqrt(d_k) if d_k else 0.0
    left, right = (None, None) if window is None else window
    out = np.zeros((len_q, value.shape[-1]))
    lse = np.zeros(len_q)
    weights, there = np.zeros((len_q, len(key))), np.zeros((len_q, len(key)), dtype=bool)
    for i in range(len_q):
        q_pos = q_offset + i
        scores = {}  # of the visible keys
        for j in range(kv_len):
            kv_pos = kv_offset + j
            visible = (
                mask[i, j]
                and bias[i, j] != -math.inf
                and block_mask[i // BLOCK, j // BLOCK]
                and 0 <= q_segment[i] == kv_segment[j]
                and (not causal or kv_pos <= q_pos)
                and (left is None or q_pos - left <= kv_pos)
                and (right is None or kv_pos <= q_pos + right)
                and (mask_mod is None or mask_mod(batch, head, q_pos, kv_pos))
            )
            if not visible:
                continue
            score = scale * float(query[i] @ key[j])
            if softcap is not None:
                score = softcap * math.tanh(score / softcap)
            score = score + float(bias[i, j]) - slope * abs(q_pos - kv_pos)
            if score_mod is not None:
                score = float(score_mod(np.float64(score), batch, head, q_pos, kv_pos))
            if score != -math.inf:  # a key with that score is not there
                scores[j] = score
        seen = list(scores)
        row, lse[i] = softmax(scores.values(), sink)
        weights[i, seen], there[i, seen] = row, True
        if dropout:
            row = row * [kept(dropout, seed, head, q_pos, kv_offset + j) for j in seen]
        out[i] = row @ value[seen]
    return out, lse, weights, there


def stats(weights, visible, distance, sink_weights, *, top_k, last, map_shape):
    """What `attention_stats` tells of one head, by name.

    `weights` and `visible` are `(len_q, len_kv)`, `distance` the numbers of tokens between query
    and key, `sink_weights` `(len_q,)` the weights on the sink.
    """
    len_q, len_kv = weights.shape
    found = {name: np.zeros(len_q) for name in ("entropy", "max_weight", "mean_distance")}
    found["top_weights"] = np.zeros((len_q, top_k))
    rows, columns = map_shape or (1, 1)
    found["block_map"] = np.zeros((rows, columns))
    sizes = [sum(i * rows // len_q == row for i in range(len_q)) for row in range(rows)]
    for i in range(len_q):
        largest = sorted((float(w) for w in weights[i]), key=lambda w: (w == w, -w))[:top_k]
        found["top_weights"][i, : len(largest)] = largest
        found["max_weight"][i] = found["top_weights"][i, 0]
        row = i * rows // len_q
        for j in range(len_kv):
            w = float(weights[i, j])
            if w != 0:
                found["entropy"][i] -= w * math.log(w) if w == w else math.nan
            found["mean_distance"][i] += w * float(distance[i, j])
            found["block_map"][row, j * columns // len_kv] += w / sizes[row]
    top = found["max_weight"]
    return found | {
        "saturation": top * (1 - top), "visible": visible.sum(axis=-1),
        "received": np.array([sum(column) for column in weights.T], dtype=float),
        "received_last": np.array([sum(column[-last:]) for column in weights.T], dtype=float),
        "sink_mass": sum([*weights[:, :1].ravel(), *sink_weights]) / max(1, len_q),
    }  # fmt: skip


def segments(segment_ids, lead, len_q, len_kv):
    """Return the ids of the queries `(..., len_q)` and those of the keys `(..., len_kv)`."""
    if segment_ids is None:
        segment_ids = 0
    of_q, of_kv = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    return np.broadcast_to(of_q, (*lead, len_q)), np.broadcast_to(of_kv, (*lead, len_kv))


def softmax(scores, sink=-math.inf):
    """Return the weights of one row and its log-sum-exp; the sink is a key without a value."""
    terms = [*scores, sink]
    top = float(np.max(terms))  # nan if any term is
    if top == -math.inf:
        return np.zeros(len(terms) - 1), -math.inf
    powers = [math.exp(term - top) for term in terms]
    total = sum(powers)
    return np.array(powers[:-1]) / total, top + math.log(total)


def merge(states):
    """Return the exact `(out, lse)` of partial states `(out, lse)` over disjoint key sets."""
    states = [(np.asarray(out, np.float64), np.asarray(lse, np.float64)) for out, lse in states]
    shape = np.broadcast_shapes(*(lse.shape for _, lse in states))
    d_v = states[0][0].shape[-1]
    outs = [np.broadcast_to(out, (*shape, d_v)) for out, _ in states]
    lses = [np.broadcast_to(lse, shape) for _, lse in states]
    merged, total = np.zeros((*shape, d_v)), np.full(shape, -math.inf)
    for row in np.ndindex(shape):
        live = [n for n in range(len(states)) if lses[n][row] != -math.inf]
        shares, total[row] = softmax(float(lses[n][row]) for n in live)
        for share, n in zip(shares, live, strict=True):
            merged[row] += share * outs[n][row]
    return merged, total


def varlen(
    query, key, value, cu_seqlens_q, cu_seqlens_kv, *, causal=False, window=None, scale=None,
    softcap=None, alibi_slopes=None, sinks=None, score_mod=None, mask_mod=None, dropout=0.0,
    seed=None,
):  # fmt: skip
    """Return `(out, lse)` of packed sequences: attention inside each, nothing between them.

    Parameters
    ----------
    query, key, value
        Arrays `(tokens, heads, d)`; sequence s is `query[cu_seqlens_q[s]:cu_seqlens_q[s + 1]]`.

    Returns
    -------
    out, lse
        Arrays `(tokens, num_heads, d_v)` and `(num_heads, tokens)`.
    """
    tokens, num_heads, _ = np.shape(query)
    out = np.zeros((tokens, num_heads, np.shape(value)[-1]))
    lse = np.full((num_heads, tokens), -math.inf)
    num_sequences = len(cu_seqlens_q) - 1
    for s in range(num_sequences):
        rows = slice(int(cu_seqlens_q[s]), int(cu_seqlens_q[s + 1]))
        columns = slice(int(cu_seqlens_kv[s]), int(cu_seqlens_kv[s + 1]))

        def score_of_s(score, _, *where, s=s):
            return score_mod(score, s, *where)

        def mask_of_s(_, *where, s=s):
            return mask_mod(s, *where)

        seed_of_s = seed_of(seed, s, (s,), (num_sequences,)) if dropout else 0
        result, lse[:, rows], _ = attention(
            np.swapaxes(query[rows], 0, 1), np.swapaxes(key[columns], 0, 1),
            np.swapaxes(value[columns], 0, 1), causal=causal, window=window, scale=scale,
            softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
            score_mod=None if score_mod is None else score_of_s,
            mask_mod=None if mask_mod is None else mask_of_s,
            dropout=dropout, seed=np.array(seed_of_s, np.uint64),
        )  # fmt: skip
        out[rows] = np.swapaxes(result, 0, 1)
    return out, lse


def multi_head(
    x, context, w_q, w_k, w_v, w_o, num_heads, num_kv_heads=None, causal=False, mask=None
):
    """Return `(..., len_q, d_out)`: project, attend in every head, join the heads, project.

    Parameters
    ----------
    x, context
        Arrays `(..., len_q, d_model)` and `(..., len_kv, d_context)`.
    w_q, w_k, w_v, w_o
        Arrays `(d_model, num_heads * d_k)`, `(d_context, num_kv_heads * d_k)`,
        `(d_context, num_kv_heads * d_v)` and `(num_heads * d_v, d_out)`.
    """
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    x, context, w_q, w_k, w_v, w_o = (
        np.asarray(a, np.float64) for a in (x, context, w_q, w_k, w_v, w_o)
    )
    out, _, _ = attention(
        split_heads(x @ w_q, num_heads),
        split_heads(context @ w_k, num_kv_heads),
        split_heads(context @ w_v, num_kv_heads),
        causal=causal,
        mask=mask,
    )
    return np.concatenate([out[..., head, :, :] for head in range(num_heads)], axis=-1) @ w_o


def split_heads(x, num_heads):
    """Return `(..., num_heads, len, d)` from `(..., len, num_heads * d)`."""
    d = x.shape[-1] // num_heads
    return np.stack([x[..., head * d : (head + 1) * d] for head in range(num_heads)], axis=-3)


def additive(query, key, value, w_q, w_k, v, mask=None):
    """Return `(out, lse)` for the score `v · tanh(w_q q + w_k k)`.

    Parameters
    ----------
    query, key, value
        Arrays `(..., len_q, d_q)`, `(..., len_kv, d_k)` and `(..., len_kv, d_v)`, without heads.
    w_q, w_k, v
        Arrays `(d_hidden, d_q)`, `(d_hidden, d_k)` and `(d_hidden,)`.
    """
    w_q, w_k, v = (np.asarray(a, np.float64) for a in (w_q, w_k, v))
    return attention_by(lambda q, k: v @ np.tanh(w_q @ q + w_k @ k), query, key, value, mask)


def multiplicative(query, key, value, w=None, v=None, form="dot", mask=None):
    """Return `(out, lse)` for the score `q · k`, `q · w k` or `v · tanh(w [q; k])`.

    Parameters
    ----------
    query, key, value
        Arrays `(..., len_q, d_q)`, `(..., len_kv, d_k)` and `(..., len_kv, d_v)`, without heads.
    w, v
        `general`: w `(d_q, d_k)`; `concat`: w `(d_hidden, d_q + d_k)` and v `(d_hidden,)`.
    """
    w, v = (None if a is None else np.asarray(a, np.float64) for a in (w, v))
    scores = {
        "dot": lambda q, k: q @ k,
        "general": lambda q, k: q @ (w @ k),
        "concat": lambda q, k: v @ np.tanh(w @ np.concatenate([q, k])),
    }
    return attention_by(scores[form], query, key, value, mask)


@np.errstate(all="ignore")
def attention_by(score, query, key, value, mask):
    """Return `(out, lse)` for any `score(q, k)` of two vectors; there is no head axis."""
    query, key, value = (np.asarray(x, dtype=np.float64) for x in (query, key, value))
    lead = np.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    query, key, value = (np.broadcast_to(x, lead + x.shape[-2:]) for x in (query, key, value))
    len_q, (len_kv, d_v) = query.shape[-2], value.shape[-2:]
    mask = np.broadcast_to(True if mask is None else mask, (*lead, len_q, len_kv))
    out, lse = np.zeros((*lead, len_q, d_v)), np.full((*lead, len_q), -math.inf)
    for row in np.ndindex(lse.shape):
        *entry, _ = row
        keys, values = key[*entry], value[*entry]
        scores = {j: float(score(query[row], keys[j])) for j in range(len_kv) if mask[row][j]}
        scores = {j: s for j, s in scores.items() if s != -math.inf}
        row_weights, lse[row] = softmax(scores.values())
        out[row] = row_weights @ values[list(scores)]
    return out, lse


def seed_of(seed, batch, entry, lead):
    """Return the 64-bit seed of a batch entry: a hash of an int seed, an array's own value."""
    if np.ndim(seed) or isinstance(seed, np.ndarray):
        return int(np.broadcast_to(seed, lead)[entry]) % 2**64
    z = (int(seed) + (batch + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


def mix(x):
    """Return a 32-bit hash of a 32-bit number."""
    x ^= x >> 16
    x = (x * 0x7FEB352D) % 2**32
    x ^= x >> 15
    x = (x * 0x846CA68B) % 2**32
    return x ^ (x >> 16)


def kept(dropout, seed, head, q_pos, kv_pos):
    """Return the factor of a weight under dropout: 1 / (1 - dropout) if it is kept, else 0."""
    low, high = seed % 2**32, seed >> 32
    h1 = mix(mix(mix(low) ^ high) ^ head)
    h2 = mix((h1 + 0x9E3779B9) % 2**32)
    a = mix(h1 ^ (q_pos % 2**32))
    b = mix(((a + 0x9E3779B9) % 2**32) ^ h2)
    x = (kv_pos % 2**32) ^ a
    x = (x * 0x7FEB352D) % 2**32
    x ^= x >> 15
    x = (x + b) % 2**32
    x = (x * 0x846CA68B) % 2**32
    x ^= x >> 16
    return 1 / (1 - dropout) if (x >> 8) >= round(dropout * 2**24) else 0.0
