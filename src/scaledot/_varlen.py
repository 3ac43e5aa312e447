"""Attention over sequences of different lengths, packed one after the other."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, cast

from scaledot import _arrays, _checks
from scaledot._attention import attention
from scaledot._derivatives import Grads
from scaledot._errors import value_error
from scaledot._gradients import attention_vjp, check_like
from scaledot._passes import Packed, packed_problem
from scaledot._rules import derivative_rules, packed_rules
from scaledot._spec import Options, batch_seeds
from scaledot._state import State
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
    Sequences may be empty. A sequence without keys gives rows of 0. The kernels take sequences of
    similar lengths at once, and the backward pass of tensors that require gradients all of them;
    each has the bits that it has alone. One after the other are those of a function that reads
    ``batch``, of other implementations, and what a library traces or transforms, second
    derivatives among it.

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
    options = Options(
        causal=causal, window=window, scale=scale, softcap=softcap, alibi_slopes=alibi_slopes,
        sinks=sinks, score_mod=score_mod, mask_mod=mask_mod, dropout=dropout, seed=seed, impl=impl,
    )  # fmt: skip
    call = _call_of(options, starts_q, starts_kv)
    found = _at_once(call, query, key, value)
    return cast(ArrayT, _one_by_one(call, query, key, value) if found is None else found)


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

    Each sequence has the bits that `attention_vjp` gives it alone.

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
    The kernels go back through all sequences in two launches, deltas of rows and the gradients,
    and nothing is padded: memory is linear in the tokens. A sequence without keys, or without
    queries, has gradients of 0.

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
    options = Options(
        causal=causal, window=window, scale=scale, softcap=softcap, alibi_slopes=alibi_slopes,
        sinks=sinks, score_mod=score_mod, mask_mod=mask_mod, dropout=dropout, seed=seed, impl=impl,
    )  # fmt: skip
    pullback = _Pullback(_call_of(options, starts_q, starts_kv), (query, key, value))
    return cast(ArrayT, pullback.out), pullback


class _Pullback:
    """From the gradient of the result of packed sequences to those of their arguments."""

    def __init__(self, call: Packed, arrays: tuple[Array, Array, Array]) -> None:
        self._call, self._arrays = call, arrays
        self._parts: list[Any] | None = None
        self._state: State | None = None
        mod = call.options.score_mod
        if mod is None or isinstance(mod, tuple):
            self._state = _plain_state(call, *arrays, with_lse=True)
        if self._state is None:
            self.out = self._joined([out for out, _ in self._each()])
        else:  # a copy: what the caller does to it must not change its gradient
            xp = _arrays.namespace(arrays[0])
            self.out = xp.asarray(self._state.out, copy=True)

    def __call__(self, grad_out: Array) -> Grads:
        """Gradients of all arguments, given that of the result."""
        check_like("grad_out", grad_out, self._arrays[0], self.out.shape)
        if self._state is not None:
            from scaledot import _packed_gradients

            found = _packed_gradients.backward(
                self._call, *self._arrays, self._state, grad_out, Grads._fields
            )
            if found is not None:
                return found
        return self._by_parts(grad_out)

    def _by_parts(self, grad_out: Array) -> Grads:
        """Gradients by one sequence after the other."""
        rows = _arrays.namespace(grad_out).permute_dims(grad_out, (1, 0, 2))
        starts = self._call.starts_q if len(self._call.starts_q) > 1 else [0, 0]
        grads = [
            back(rows[:, start:stop, :])
            for (_, back), start, stop in zip(self._each(), starts, starts[1:], strict=False)
        ]
        sums = {
            name: functools.reduce(lambda a, b: a + b, [getattr(g, name) for g in grads])
            for name in ("sinks", "alibi_slopes") if getattr(grads[0], name) is not None
        }  # fmt: skip
        operands = {
            n: self._joined([getattr(g, n) for g in grads]) for n in ("query", "key", "value")
        }
        return Grads(**operands, **sums)

    def _each(self) -> list[Any]:
        """Result and pullback of every sequence alone."""
        if self._parts is None:
            self._parts = _each(attention_vjp, self._call, *self._arrays)
        return self._parts

    def _joined(self, found: list[Array]) -> Array:
        xp = _arrays.namespace(self._arrays[0])
        return cast(Array, xp.permute_dims(xp.concat(found, axis=1), (1, 0, 2)))


def _call_of(options: Options, starts_q: list[int], starts_kv: list[int]) -> Packed:
    """The call, with seeds for all sequences."""
    count, seeds = len(starts_q) - 1, None
    if _checks.dropout(options.dropout, options.seed):
        seeds = _sequence_seeds(options.seed, count)
    first = None if seeds is None or not count else seeds[0, ...]
    return Packed(options._replace(seed=first), starts_q, starts_kv, seeds)


def _plain_state(
    call: Packed, query: Array, key: Array, value: Array, *, with_lse: bool = False
) -> State | None:
    """All sequences by the kernels; None where these cannot, or a library is to see it done."""
    if derivative_rules(query, key, value, call.options) is not None:
        return None
    problem = packed_problem(call, query, key, value)
    if problem is None:
        return None
    from scaledot import _packed_gradients  # loads Numba

    return _packed_gradients.forward(call, problem, with_lse=with_lse)


def _at_once(call: Packed, query: Array, key: Array, value: Array) -> Array | None:
    """All sequences by the kernels, differentiable; None where it must be one after the other."""
    rules = packed_rules(query, key, value, call.options)
    if rules is not None:
        return cast(Array | None, rules.attention(call, query, key, value, _one_by_one))
    state = _plain_state(call, query, key, value)
    return None if state is None else state.out


def _one_by_one(call: Packed, query: Array, key: Array, value: Array) -> Array:
    """One sequence after the other: the definition, whatever differentiates or traces it."""
    xp = _arrays.namespace(query)
    parts = _each(attention, call, query, key, value)
    return cast(Array, xp.permute_dims(xp.concat(parts, axis=1), (1, 0, 2)))


def _each(
    function: Callable[..., Any], call: Packed, query: Array, key: Array, value: Array
) -> list[Any]:
    """Results of a function for every sequence, (heads, tokens, d)."""
    starts_q, starts_kv, seeds = call.starts_q, call.starts_kv, call.seeds
    # A packed batch of no sequences still has its shape and is checked as one empty sequence.
    if len(starts_q) == 1:
        starts_q, starts_kv = [0, 0], [0, 0]
        seeds = None if seeds is None else batch_seeds(0, 1)
    xp = _arrays.namespace(query)
    heads_first = [xp.permute_dims(x, (1, 0, 2)) for x in (query, key, value)]
    taken = ("causal", "window", "scale", "softcap", "alibi_slopes", "sinks", "dropout", "impl")
    options = {name: getattr(call.options, name) for name in taken}
    score_mod, mask_mod = call.options.score_mod, call.options.mask_mod
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
