"""The fold: attention over keys that come in chunks."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

from scaledot._attention import attention_state
from scaledot._errors import type_error, value_error
from scaledot._state import State, merge
from scaledot._typing import Array, Impl, MaskMod, Offsets, ScoreMod


class Chunk(NamedTuple):
    """A slice of keys and values with its place in the sequence.

    Attributes
    ----------
    key : array, shape (..., num_kv_heads, len_kv, d_k)
    value : array, shape (..., num_kv_heads, len_kv, d_v)
    kv_offset : int or integer array
        Position of the first key.
    kv_len : int or integer array, optional
        Valid keys of this chunk, counted from its start.
    mask, bias : array, optional
        As in `attention`, for the keys of this chunk.
    """

    key: Array
    value: Array
    kv_offset: Offsets
    kv_len: Offsets | None = None
    mask: Array | None = None
    bias: Array | None = None


def attend_chunks(
    query: Array,
    chunks: Iterable[Chunk],
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Array | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    dropout: float = 0.0,
    seed: int | Array | None = None,
    q_offset: Offsets | None = None,
    impl: Impl = "auto",
) -> State:
    """Attention over chunks of keys, one at a time: `merge` folded over `attention_state`.

    Parameters
    ----------
    query : array, shape (..., num_heads, len_q, d_k)
        As in `attention`.
    chunks : iterable of Chunk
        Disjoint slices of keys and values, in any order; an iterator is read once.
    causal, window, scale, softcap, alibi_slopes, score_mod, mask_mod, dropout, seed, impl
        As in `attention`.
    q_offset : int or integer array, optional
        Position of the first query. Needed when anything that uses positions is on.

    Returns
    -------
    State
        Over all keys; as from `attention_state`.

    Raises
    ------
    TypeError
        An item that is not a Chunk.
    ValueError
        No chunk at all, and as in `attention_state`.

    Notes
    -----
    Memory is that of one chunk at a time and of two states.

    References
    ----------
    arXiv 1805.02867, 2310.01889.

    Examples
    --------
    >>> import numpy as np, scaledot as sd
    >>> query, key, value = np.random.default_rng(0).standard_normal((3, 6, 4))
    >>> chunks = (sd.Chunk(key[i : i + 2], value[i : i + 2], i) for i in range(0, 6, 2))
    >>> state = sd.attend_chunks(query, chunks, causal=True, q_offset=0)
    >>> np.allclose(state.out, sd.attention(query, key, value, causal=True))
    True
    """

    def partial(chunk: Chunk) -> State:
        if not isinstance(chunk, Chunk):
            raise type_error(
                "chunks must hold Chunk objects", type(chunk).__name__,
                "Write Chunk(key, value, kv_offset).",
            )
        return attention_state(
            query, chunk.key, chunk.value, causal=causal, window=window, mask=chunk.mask,
            bias=chunk.bias, kv_len=chunk.kv_len, scale=scale, softcap=softcap,
            alibi_slopes=alibi_slopes, score_mod=score_mod, mask_mod=mask_mod, dropout=dropout,
            seed=seed, q_offset=q_offset, kv_offset=chunk.kv_offset, impl=impl,
        )

    if not isinstance(chunks, Iterable):
        raise type_error(
            "chunks must be an iterable of Chunk objects", type(chunks).__name__, "Pass a list."
        )
    states = map(partial, chunks)
    first = next(states, None)
    if first is None:
        raise value_error(
            "chunks must hold at least one chunk", "none",
            "A chunk of length 0 gives the width of the values.",
        )
    return functools.reduce(merge, states, first)
