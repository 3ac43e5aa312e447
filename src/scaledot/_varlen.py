"""Attention over sequences of different lengths, packed one after the other."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from scaledot import _arrays, _checks, _choice
from scaledot._attention import attention
from scaledot._derivatives import Grads
from scaledot._errors import value_error
from scaledot._gradients import attention_vjp, check_like
from scaledot._rules import derivative_rules
from scaledot._spec import Options, Problem, batch_seeds, resolve, seed_halves
from scaledot._state import State, merged
from scaledot._typing import Array, ArrayT, Impl, MaskMod, ScoreMod


def varlen_attention(
    query: ArrayT,
    key: ArrayT,
    value: ArrayT,
    cu_seqlens_q: Array,
    cu_seqlens_kv: Array,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    dropout: float = 0.0,
    seed: int | Array | None = None,
    impl: Impl = "auto",
) -> ArrayT:
    """Attention inside each of several packed sequences, without padding.

    Sequence s has the queries ``query[cu_seqlens_q[s]:cu_seqlens_q[s + 1]]`` and sees the keys
    ``key[cu_seqlens_kv[s]:cu_seqlens_kv[s + 1]]`` only.

    Parameters
    ----------
    query : array, shape (tokens_q, num_heads, d_k)
        Queries of all sequences, one after the other.
    key : array, shape (tokens_kv, num_kv_heads, d_k)
        Keys of all sequences.
    value : array, shape (tokens_kv, num_kv_heads, d_v)
        Values of all sequences.
    cu_seqlens_q, cu_seqlens_kv : 1-D integer array or sequence, length num_sequences + 1
        Where sequences start: 0 first, never decreasing, the number of tokens last.
    causal, window, scale, softcap, alibi_slopes, sinks : optional
        As in `attention`; positions count inside each sequence and are aligned at its end.
    score_mod, mask_mod : callable, optional
        As in `attention`; ``batch`` is the number of the sequence.
    dropout, seed, impl : optional
        As in `attention`; an array of seeds has one for each sequence.

    Returns
    -------
    array, shape (tokens_q, num_heads, d_v)
        In the library and dtype of query.

    Raises
    ------
    TypeError, ValueError
        As in `attention`; offsets that do not start at 0, decrease, or leave tokens over.

    Notes
    -----
    Sequences may be empty. A sequence without keys gives rows of 0.

    References
    ----------
    arXiv 2307.08691.

    Examples
    --------
    >>> import numpy as np, scaledot as sd
    >>> x = np.ones((5, 1, 2), dtype=np.float32)
    >>> sd.varlen_attention(x, x, x, [0, 2, 5], [0, 2, 5], causal=True).shape
    (5, 1, 2)
    """
    starts_q, starts_kv = _checked(query, key, value, cu_seqlens_q, cu_seqlens_kv)
    count = len(starts_q) - 1
    xp = _arrays.namespace(query)
    heads_first = [xp.permute_dims(x, (1, 0, 2)) for x in (query, key, value)]
    seeds = _sequence_seeds(seed, count) if _checks.dropout(dropout, seed) else None
    if count and mask_mod is None:
        q, k, v = heads_first
        options = Options(
            causal=causal, window=window, scale=scale, softcap=softcap,
            alibi_slopes=alibi_slopes, sinks=sinks, score_mod=score_mod, dropout=dropout,
            seed=None if seeds is None else seeds[0, ...], impl=impl,
        )
        first = q[:, : starts_q[1], :], k[:, : starts_kv[1], :], v[:, : starts_kv[1], :]
        problem = resolve(*first, options)
        if derivative_rules(*first, options) is None and _choice.choose(problem)[0] == "kernels":
            found = _at_once(problem, heads_first, starts_q, starts_kv, seeds)
            if found is not None:
                return cast(ArrayT, found)

    parts = _each(
        attention, heads_first, starts_q, starts_kv, seeds, score_mod, mask_mod,
        {"causal": causal, "window": window, "scale": scale, "softcap": softcap,
         "alibi_slopes": alibi_slopes, "sinks": sinks, "dropout": dropout, "impl": impl},
    )  # fmt: skip
    return cast(ArrayT, xp.permute_dims(xp.concat(parts, axis=1), (1, 0, 2)))


def varlen_attention_vjp(
    query: ArrayT,
    key: ArrayT,
    value: ArrayT,
    cu_seqlens_q: Array,
    cu_seqlens_kv: Array,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    dropout: float = 0.0,
    seed: int | Array | None = None,
    impl: Impl = "auto",
) -> tuple[ArrayT, Callable[[Array], Grads]]:
    """Attention inside each of several packed sequences, and the function that goes back.

    One sequence after the other, each as `attention_vjp` has it.

    Parameters
    ----------
    query, key, value, cu_seqlens_q, cu_seqlens_kv
        As in `varlen_attention`.
    causal, window, scale, softcap, alibi_slopes, sinks, mask_mod, dropout, seed, impl : optional
        As in `varlen_attention`.
    score_mod : pair of callables (f, df), optional
        As in `attention_vjp`.

    Returns
    -------
    out : array, shape (tokens_q, num_heads, d_v)
        As `varlen_attention` returns it.
    pullback : callable
        ``pullback(grad_out) -> Grads``, each with its argument's shape and dtype; those of sinks
        and slopes are summed over the sequences.

    Raises
    ------
    TypeError, ValueError
        As in `varlen_attention` and `attention_vjp`.

    Notes
    -----
    Nothing is padded. A sequence without keys, or without queries, has gradients of 0.

    References
    ----------
    arXiv 2307.08691.

    Examples
    --------
    >>> import numpy as np, scaledot as sd
    >>> x = np.ones((5, 1, 2), dtype=np.float32)
    >>> out, pullback = sd.varlen_attention_vjp(x, x, x, [0, 2, 5], [0, 2, 5], causal=True)
    >>> pullback(out).value.shape
    (5, 1, 2)
    """
    starts_q, starts_kv = _checked(query, key, value, cu_seqlens_q, cu_seqlens_kv)
    xp, count = _arrays.namespace(query), len(starts_q) - 1
    seeds = _sequence_seeds(seed, count) if _checks.dropout(dropout, seed) else None
    parts = _each(
        attention_vjp, [xp.permute_dims(x, (1, 0, 2)) for x in (query, key, value)],
        starts_q, starts_kv, seeds, score_mod, mask_mod,
        {"causal": causal, "window": window, "scale": scale, "softcap": softcap,
         "alibi_slopes": alibi_slopes, "sinks": sinks, "dropout": dropout, "impl": impl},
    )  # fmt: skip

    def joined(found: list[Array]) -> Array:
        return xp.permute_dims(xp.concat(found, axis=1), (1, 0, 2))

    out = joined([out for out, _ in parts])

    def pullback(grad_out: Array) -> Grads:
        check_like("grad_out", grad_out, query, out.shape)
        rows = xp.permute_dims(grad_out, (1, 0, 2))
        starts = starts_q if count else [0, 0]
        grads = [
            back(rows[:, start:stop, :])
            for (_, back), start, stop in zip(parts, starts, starts[1:], strict=False)
        ]
        sums = {
            name: functools.reduce(lambda a, b: a + b, [getattr(g, name) for g in grads])
            for name in ("sinks", "alibi_slopes") if getattr(grads[0], name) is not None
        }  # fmt: skip
        operands = {n: joined([getattr(g, n) for g in grads]) for n in ("query", "key", "value")}
        return Grads(**operands, **sums)

    return cast(ArrayT, out), pullback


def _each(
    function: Callable[..., Any], heads_first: list[Array], starts_q: list[int],
    starts_kv: list[int], seeds: Any, score_mod: Any, mask_mod: Any, options: dict[str, Any],
) -> list[Any]:  # fmt: skip
    """Results of a function for every sequence, given (heads, tokens, d) of all of them."""
    # A packed batch of no sequences still has its shape and is checked as one empty sequence.
    if len(starts_q) == 1:
        starts_q, starts_kv = [0, 0], [0, 0]
        seeds = None if seeds is None else batch_seeds(0, 1)
    results = []
    for number, (rows, columns) in enumerate(
        zip(itertools.pairwise(starts_q), itertools.pairwise(starts_kv), strict=True)
    ):
        q = heads_first[0][:, slice(*rows), :]
        k, v = (x[:, slice(*columns), :] for x in heads_first[1:])
        results.append(function(
            q, k, v, **options, score_mod=_score_mod_of(score_mod, number),
            mask_mod=_mask_mod_of(mask_mod, number),
            seed=None if seeds is None else seeds[number, ...],
        ))  # fmt: skip
    return results


def _at_once(
    problem: Problem, heads_first: list[Array], starts_q: list[int], starts_kv: list[int],
    seeds: Any,
) -> Array | None:
    """All sequences by the kernels, (tokens, heads, d_v), given the problem of the first.

    None where a score_mod must be told which sequence it is in, or raises an error.
    """
    from scaledot import _packed  # loads Numba
    from scaledot._bridges import cpu

    if cpu.reads_batch(problem):
        return None
    query, key, value = (x[None, ...] for x in heads_first)
    spec = replace(problem.spec, lead=(len(starts_q) - 1,))
    halves = None
    if seeds is not None:
        halves = [_arrays.host(x) for x in seed_halves(query, seeds, spec)]
    problem = replace(problem, query=query, key=key, value=value)
    try:
        state = _packed.run(problem, starts_q, starts_kv, halves)
    except cpu.ModError:
        return None
    if problem.sinks is None:
        return state.out
    xp = _arrays.namespace(query)
    with _arrays.quiet(xp):
        sinks = xp.reshape(problem.sinks, (spec.num_heads,))
        state = merged(xp, state, State(xp.zeros_like(sinks)[:, None], sinks))
        return xp.astype(state.out, query.dtype, copy=False)


def _checked(
    query: Array, key: Array, value: Array, cu_seqlens_q: Any, cu_seqlens_kv: Any
) -> tuple[list[int], list[int]]:
    """Check shapes and offsets; return the offsets of both sides."""
    _checks.operands(query=query, key=key, value=value)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim != 3:
            raise value_error(
                f"{name} must have the axes (tokens, heads, d)", tuple(x.shape),
                "Pack sequences one after the other.",
            )
    if value.shape[0] != key.shape[0]:
        raise value_error(
            "key and value must have the same number of tokens",
            f"{key.shape[0]} and {value.shape[0]}", "Axes are (tokens, heads, d).",
        )
    starts_q = _starts("cu_seqlens_q", cu_seqlens_q, query.shape[0], "query")
    starts_kv = _starts("cu_seqlens_kv", cu_seqlens_kv, key.shape[0], "key")
    if len(starts_q) != len(starts_kv):
        raise value_error(
            "cu_seqlens_q and cu_seqlens_kv must describe the same number of sequences",
            f"{len(starts_q) - 1} and {len(starts_kv) - 1}",
            "A sequence may be empty: repeat its start.",
        )
    return starts_q, starts_kv


def _starts(name: str, given: Any, tokens: int, packed: str) -> list[int]:
    """Offsets as a list of ints, checked against the number of tokens."""
    hint = "It holds 0, then the end of each sequence: 0, n_0, n_0 + n_1, ..."
    offsets = [int(x) for x in _checks.integers(name, given, hint)]
    if not offsets or offsets[0] != 0:
        raise value_error(f"{name} must start with 0", offsets[:1] or "nothing", hint)
    for before, after in itertools.pairwise(offsets):
        if after < before:
            raise value_error(f"{name} must not decrease", f"{before} and then {after}", hint)
    if offsets[-1] != tokens:
        raise value_error(
            f"{name} must end with the number of tokens of {packed}, {tokens}", offsets[-1], hint
        )
    return offsets


def _sequence_seeds(seed: Any, count: int) -> Any:
    """One seed for each sequence: from an int as in the entries of a batch, or as given."""
    if seed is None:
        return None
    if _arrays.library(seed) is None:
        return batch_seeds(_checks.integer("seed", seed), count).reshape(count)
    _arrays.check_array("seed", seed)
    if tuple(seed.shape) not in ((), (1,), (count,)):
        raise value_error(
            f"seed must have one entry for each of the {count} sequences", tuple(seed.shape),
            "An int gives each sequence a seed of its own.",
        )
    return _arrays.namespace(seed).broadcast_to(seed, (count,))


def _score_mod_of(given: Any, number: int) -> Any:
    """Give a score_mod, and its derivative, the number of its sequence as ``batch``."""
    if isinstance(given, tuple):
        return tuple(_score_mod_of(function, number) for function in given)
    if not callable(given):
        return given

    def score_mod(score: Any, batch: Any, head: Any, q_pos: Any, kv_pos: Any) -> Any:
        return given(score, batch + number, head, q_pos, kv_pos)

    return score_mod


def _mask_mod_of(function: Any, number: int) -> Any:
    """Give a mask_mod the number of its sequence as ``batch``."""
    if not callable(function):
        return function

    def mask_mod(batch: Any, head: Any, q_pos: Any, kv_pos: Any) -> Any:
        return function(batch + number, head, q_pos, kv_pos)

    return mask_mod
