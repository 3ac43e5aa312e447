"""The public call for statistics: validates, chooses an implementation, finishes."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from scaledot import _arrays, _checks, _choice, _stats
from scaledot._errors import type_error, value_error
from scaledot._rules import without_graph
from scaledot._spec import Options, Problem, complete, resolve
from scaledot._stats import Stats, Wanted
from scaledot._typing import Array, Impl, MaskMod, Offsets, ScoreMod

MOST = 2**20
"""Largest ``top_k``."""


def attention_stats(
    query: Array,
    key: Array,
    *,
    top_k: int = 8,
    last: int | None = None,
    map_shape: tuple[int, int] | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    mask: Array | None = None,
    bias: Array | None = None,
    segment_ids: Array | tuple[Array, Array] | None = None,
    kv_len: Offsets | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    block_mask: Array | None = None,
    q_offset: Offsets | None = None,
    kv_offset: Offsets = 0,
    impl: Impl = "auto",
) -> Stats:
    """What attention does, without its matrix: statistics of ``softmax(Q Kᵀ / √d_k)``.

    Entropy, largest weights and reach of each query, weight that each key receives, and a picture
    of the whole matrix at any resolution, in memory that is linear in the lengths.

    Parameters
    ----------
    query, key : array
        As in `attention`.
    top_k : int
        How many of the largest weights of each query are kept.
    last : int, optional
        Count what each key receives from this many last queries apart, too.
    map_shape : (int, int), optional
        Rows and columns of `Stats.block_map`; at most len_q and len_kv.
    causal, window, mask, bias, segment_ids, kv_len, scale, softcap, alibi_slopes : optional
        As in `attention`.
    sinks, score_mod, mask_mod, block_mask, q_offset, kv_offset, impl : optional
        As in `attention`. Sinks take their share, so that the weights on keys sum to less than 1.

    Returns
    -------
    Stats
        Arrays in the library of query, in the accumulation dtype: float32, or float64 for
        float64. Without an axis of heads where query and key have none.

    Raises
    ------
    TypeError, ValueError
        As in `attention`, and for counts that are not positive integers or a map with more rows
        or columns than there are queries or keys.

    Notes
    -----
    Kernels go over the keys twice for each block of queries: once for the sums of the softmax,
    once for what the weights tell. Extra memory does not grow with ``len_q × len_kv``, except for
    ``impl="dense"``. Statistics carry no gradients.

    References
    ----------
    Entropy of heads: arXiv 1906.04341. Keys that receive much, and last queries: arXiv 2306.14048,
    2404.14469. Sinks: arXiv 2309.17453.

    Examples
    --------
    >>> import numpy as np, scaledot as sd
    >>> x = np.eye(4) * 6
    >>> stats = sd.attention_stats(x, x, causal=True, top_k=2)
    >>> stats.visible
    array([1, 2, 3, 4])
    >>> stats.top_keys[3]
    array([3, 0])
    >>> stats.entropy.round(3)  # sharp: each looks at itself
    array([0., 0., 0., 0.])
    """
    _checks.operands(query=query, key=key)
    wanted = _wanted(query, key, top_k, last, map_shape)
    options = Options(
        causal, window, mask, bias, segment_ids, kv_len, scale, softcap, alibi_slopes, sinks,
        score_mod, mask_mod, block_mask, 0.0, None, q_offset, kv_offset, impl,
    )  # fmt: skip
    query, key, options = (without_graph(x) for x in (query, key, options))
    problem = resolve(query, key, cast(Any, key)[..., :0], options)  # no values are needed
    stats = Stats(*(None if x is None else _arrays.constant(x) for x in _run(problem, wanted)))
    if not problem.spec.matrix:
        return stats
    return Stats(*(None if x is None else x[0, ...] for x in stats))


def _wanted(query: Any, key: Any, top_k: Any, last: Any, map_shape: Any) -> Wanted:
    """Check what is asked for."""
    hint = "Pass 8 for the eight largest weights of each query."
    top_k = _positive("top_k", top_k, hint)
    if top_k > MOST:
        raise value_error(f"top_k must be at most {MOST}", top_k, hint)
    if last is not None:
        last = _positive("last", last, "Pass the number of queries to count apart, such as 32.")
    if map_shape is None:
        return Wanted(top_k, last, None)
    hint = "Pass (64, 64), or fewer where there are fewer queries or keys."
    if not isinstance(map_shape, (tuple, list)) or len(map_shape) != 2:
        raise type_error("map_shape must be a pair of integers", repr(map_shape), hint)
    rows, columns = (_positive("map_shape", n, hint) for n in map_shape)
    most = query.shape[-2], key.shape[-2]
    if rows > most[0] or columns > most[1]:
        raise value_error(
            f"map_shape must be at most (len_q, len_kv) = {most}", (rows, columns), hint
        )
    return Wanted(top_k, last, (rows, columns))


def _positive(name: str, number: Any, hint: str) -> int:
    if isinstance(number, (bool, np.bool_)) or not isinstance(number, (int, np.integer)):
        raise type_error(f"{name} must be a positive integer", repr(number), hint)
    if number < 1:
        raise value_error(f"{name} must be at least 1", number, hint)
    return int(number)


def _run(problem: Problem, wanted: Wanted) -> Stats:
    """Statistics by the chosen implementation."""
    problem = _choice.forward_only(problem)
    name, _ = _choice.choose(problem, problem.sinks)
    if name == "dense":
        return _stats.dense_stats(complete(problem), wanted)
    if name == "blockwise":
        return _stats.blockwise_stats(complete(problem), wanted)
    _choice.bridge()
    from scaledot import _stat_kernels

    try:
        return _stat_kernels.run(problem, wanted)
    except _stat_kernels.ModError:
        if problem.spec.impl == "kernels":
            raise
        return _stats.blockwise_stats(complete(problem), wanted)  # shows the error of the function
