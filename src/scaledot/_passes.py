"""What differentiation needs of a call, on plain arrays: each pass by the chosen implementation.

Rules of array libraries (`_torch_rules`, `_jax_rules`) and the functions for NumPy are built on
these four.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from scaledot import _arrays, _choice, _derivatives, _reference
from scaledot._derivatives import Grads, Rows, Second
from scaledot._errors import value_error
from scaledot._spec import Options, Problem, accumulation, complete, resolve
from scaledot._state import State, merged
from scaledot._typing import Array

Result = TypeVar("Result")
_UNNAMED = ("segment_ids", "alibi_slopes", "sinks", "score_mod", "mask_mod", "block_mask")
"""Options with which the preparation of a call is not kept."""


class Packed(NamedTuple):
    """A call on packed sequences but for its tokens."""

    options: Options  # of the first sequence
    starts_q: list[int]
    starts_kv: list[int]
    seeds: Any  # of each sequence; None without dropout


def packed_problem(call: Packed, query: Array, key: Array, value: Array) -> Problem | None:
    """The problem of the first sequence on the tokens of all, (1, heads, tokens, d).

    None where it is not one for the kernels.
    """
    if len(call.starts_q) == 1:
        return None
    xp = _arrays.namespace(query)
    q, k, v = (xp.permute_dims(x, (1, 0, 2)) for x in (query, key, value))
    end_q, end_kv = call.starts_q[1], call.starts_kv[1]
    problem = resolve(q[:, :end_q, :], k[:, :end_kv, :], v[:, :end_kv, :], call.options)
    if _choice.choose(problem)[0] != "kernels":
        return None
    return replace(problem, query=q[None, ...], key=k[None, ...], value=v[None, ...])


def check(query: Array, key: Array, value: Array, options: Options) -> None:
    """Raise for arguments that are wrong, or that cannot be differentiated."""
    _need_slope(resolve(query, key, value, options))


def forward(
    query: Array, key: Array, value: Array, options: Options, *, slices: bool = False,
    wide: bool = False,
) -> State:  # fmt: skip
    """Attention with its log-sum-exp, sinks included.

    Parameters
    ----------
    query, key, value : array
        As in `attention`, without a graph.
    options : Options
        As the caller gave them.
    slices : bool
        Whether key may be a slice, as in `attention_state`.
    wide : bool
        Return ``out`` in the accumulation dtype, not in that of query.
    """
    name, arrays = None, (query, key, value, options.mask, options.bias)
    if all(getattr(options, option) is None for option in _UNNAMED):
        name = _choice.name_of(
            arrays, options.window, "wide" if wide else "rounded", options.causal, options.kv_len,
            options.scale, options.softcap, options.dropout, options.q_offset, options.kv_offset,
            options.impl, slices,
        )  # fmt: skip
    state: State | None = _choice.again(name, arrays)
    if state is None:
        problem = resolve(query, key, value, options, slices=slices)
        rounded = not wide and problem.sinks is None
        state = _choice.run(problem, rounded=rounded, with_lse=True, name=name)
        xp = _arrays.namespace(query)
        with _arrays.quiet(xp):
            if problem.sinks is not None:
                state = merged(xp, state, _reference.keyless(xp, problem))
            if not wide:
                state = state._replace(out=xp.astype(state.out, query.dtype, copy=False))
    if query.ndim == key.ndim == value.ndim == 2:
        return State(state.out[0, ...], state.lse[0, ...])
    return state


def backward(
    query: Array, key: Array, value: Array, options: Options, out: Array, lse: Array,
    grad_out: Array, grad_lse: Array | None, *, wanted: Collection[str], slices: bool = False,
) -> Grads:  # fmt: skip
    """Gradients of the arguments named in ``wanted``, each with its argument's shape and dtype.

    ``out`` and ``lse`` are those of `forward`; ``grad_lse`` may be None for zeros.
    """
    name, arrays = None, (query, key, value, out, lse, grad_out, grad_lse)
    rank = query.ndim
    if (
        rank == key.ndim == value.ndim > 2 and options.mask is None and options.bias is None
        and all(getattr(options, option) is None for option in _UNNAMED)
    ):  # fmt: skip
        name = _choice.name_of(
            arrays, options.window, "backward", *sorted(wanted), options.causal, options.kv_len,
            options.scale, options.softcap, options.dropout, options.q_offset, options.kv_offset,
            options.impl, slices,
        )  # fmt: skip
        grads = _choice.again(name, arrays)
        if grads is not None:
            return cast(Grads, grads)

    def run(options: Options) -> Grads:
        problem = resolve(query, key, value, options, slices=slices)
        return _backward(problem, options, (query, key, value), arrays[3:], wanted, name)

    return _or_shown(run, options)


def _or_shown(run: Callable[[Options], Result], options: Options) -> Result:
    """Run a pass; where a user's function raises an error, again by what shows it."""
    try:
        return run(options)
    except ValueError as error:
        if options.impl != "auto" or not _choice.is_mod_error(error):
            raise
    return run(options._replace(impl="blockwise"))


def _backward(
    problem: Problem, options: Options, operands: tuple[Array, Array, Array],
    given: tuple[Any, ...], wanted: Collection[str], name: _choice.Name | None,
) -> Grads:  # fmt: skip
    """Do what `backward` does, anew; ``name`` is that of the pass for the next time."""
    _need_slope(problem)
    xp = _arrays.namespace(problem.query)
    arguments, (out, lse, grad_out, grad_lse) = _arguments(*operands, options), given
    wanted = {name for name in wanted if getattr(arguments, name) is not None}
    chosen, _ = _choice.choose(problem)
    with _arrays.quiet(xp):
        mass = _mass(xp, problem, chosen, lse)
        if chosen == "kernels":
            grads, rows, run = _by_kernels(xp, problem, out, lse, grad_out, grad_lse, mass, wanted)
            if name is not None:
                _choice.keep(name, problem, run)
        else:
            rows = _row_terms(xp, problem, out, lse, grad_out, grad_lse, mass)
            grads = _derivatives.backward(
                complete(problem), rows, wanted, in_blocks=chosen != "dense"
            )
        if "sinks" in wanted:
            shares = _sink_weights(xp, problem, rows) * rows.delta
            grads = grads._replace(sinks=-_of_heads(xp, problem, shares))
        return like_arguments(xp, grads, arguments)


def _by_kernels(
    xp: Any, problem: Problem, out: Array, lse: Array, grad_out: Array, grad_lse: Array | None,
    mass: Array | None, wanted: Collection[str],
) -> tuple[Grads, Rows, Any]:  # fmt: skip
    """Gradients by the kernels, what of the rows the gradient of sinks needs, and how to go on."""
    from scaledot import _kernel_gradients  # loads Numba

    passed = _kernel_gradients.passed_of(problem, out, lse, grad_out, grad_lse, mass)
    run = _kernel_gradients.prepared(problem, passed, wanted)
    grads = run(_kernel_gradients.Arrays.of(problem), passed)
    kept = functools.partial(_again, _kernel_gradients.thin(problem), run)
    known, delta = (
        _kernel_gradients.in_library(x, problem)[..., None] for x in (passed.lse, passed.delta)
    )
    empty = known == -math.inf
    known, delta = (xp.where(empty, xp.zeros_like(x), x) for x in (known, delta))
    return grads, Rows(known, passed.grad_out, delta, mass=mass), kept


def _again(
    problem: Problem, run: Any, query: Array, key: Array, value: Array, out: Array, lse: Array,
    grad_out: Array, grad_lse: Array | None,
) -> Grads | None:  # fmt: skip
    """Run a kept backward pass of query, key and value; None where some lse is large."""
    from scaledot import _kernel_gradients  # loads Numba

    passed = _kernel_gradients.passed_of(problem, out, lse, grad_out, grad_lse, None)
    if _reference.is_large(np, passed.lse).any():
        return None
    grads = run(_kernel_gradients.Arrays(query, key, value, None, None), passed)
    return like_arguments(_arrays.namespace(query), grads, Grads(query, key, value))


def tangent(
    query: Array, key: Array, value: Array, options: Options, out: Array, lse: Array,
    tangents: Grads, *, slices: bool = False,
) -> State:  # fmt: skip
    """Tangents of ``out`` and ``lse`` along ``tangents`` of the arguments (None is zero)."""
    xp = _arrays.namespace(query)

    def run(options: Options) -> State:
        problem = resolve(query, key, value, options, slices=slices)
        _need_slope(problem)
        name, _ = _choice.choose(problem)
        with _arrays.quiet(xp):
            mass = _mass(xp, problem, name, lse)
            moved = _moved(xp, problem, name, out, lse, mass, _normal(xp, problem, tangents))
            found = State(xp.astype(moved[0], out.dtype, copy=False), moved[1][..., 0])
        return State(found.out[0, ...], found.lse[0, ...]) if problem.spec.matrix else found

    return _or_shown(run, options)


def second(
    query: Array, key: Array, value: Array, options: Options, out: Array, lse: Array,
    grad_out: Array, grad_lse: Array | None, tangents: Grads, *,
    wanted: Collection[str] = Grads._fields, slices: bool = False,
) -> Second:  # fmt: skip
    """Vector-Jacobian product of `backward`, given cotangents ``tangents`` of its results.

    The inner product of backward's results with the tangents is that of ``(grad_out, grad_lse)``
    with `tangent`: what reaches these is the tangent itself.
    """
    problem = resolve(query, key, value, options, slices=slices)
    if problem.score_mod is not None:
        raise value_error(
            "second derivatives must be of a call without score_mod", "a score_mod",
            "bias, alibi_slopes and softcap have them.",
        )
    xp = _arrays.namespace(query)
    arguments = _arguments(query, key, value, options)
    wanted = {name for name in wanted if getattr(arguments, name) is not None}
    name, _ = _choice.choose(problem)
    with _arrays.quiet(xp):
        given = _normal(xp, problem, tangents)
        mass = _mass(xp, problem, name, lse)
        out_tangent, lse_tangent = _moved(xp, problem, name, out, lse, mass, given)
        rows = _row_terms(xp, problem, out, lse, grad_out, grad_lse, mass)
        mean = xp.sum(rows.grad_out * out_tangent, axis=-1, keepdims=True)
        rows = rows._replace(tangent=lse_tangent, mean=mean - lse_tangent * rows.delta)
        grads = _second(xp, problem, name, rows, given, wanted)
        if "sinks" in wanted:
            weighed = -rows.mean
            if given.sinks is not None:
                weighed = weighed - rows.delta * given.sinks
            shares = _sink_weights(xp, problem, rows) * weighed
            grads = grads._replace(sinks=_of_heads(xp, problem, shares))
        of_out = xp.astype(out_tangent, grad_out.dtype, copy=False)
        of_lse = lse_tangent[..., 0]
        if problem.spec.matrix:
            of_out, of_lse = of_out[0, ...], of_lse[0, ...]
        return Second(like_arguments(xp, grads, arguments), of_out, of_lse)


def _need_slope(problem: Problem) -> None:
    if problem.score_mod is not None and problem.score_slope is None:
        raise value_error(
            "score_mod must come with its derivative where gradients are taken",
            "a function alone",
            "Pass score_mod=(f, df): df has the arguments of f and returns df/dscore.",
        )


def _arguments(query: Array, key: Array, value: Array, options: Options) -> Grads:
    return Grads(query, key, value, options.bias, options.sinks, options.alibi_slopes)


def masses(
    query: Array, key: Array, value: Array, options: Options, lse: Array
) -> Array | None:
    """What `backward` divides the weights of each row by, (..., num_heads, len_q, 1), or None."""
    problem = resolve(query, key, value, options)
    xp = _arrays.namespace(query)
    with _arrays.quiet(xp):
        return _mass(xp, problem, _choice.choose(problem)[0], lse)


def _mass(xp: Any, problem: Problem, name: str, lse: Array) -> Array | None:
    """Sums of ``exp(score - lse)`` where lse is large, 1 elsewhere; None where it is nowhere."""
    if not _arrays.may_hold(xp.any(_reference.is_large(xp, lse))):
        return None
    rows = _row_terms(xp, problem, None, lse, None, None, None)
    if name == "kernels":
        from scaledot import _kernel_gradients  # loads Numba

        _, mass = _kernel_gradients.tangent(problem, rows, None)
    else:
        mass = _derivatives.masses(complete(problem), rows, in_blocks=name != "dense")
    if problem.sinks is not None:
        mass = mass + xp.exp(problem.sinks - rows.lse)
    large = _reference.is_large(xp, rows.lse) & (mass > 0)
    return xp.where(large, mass, xp.ones_like(mass))


def _row_terms(
    xp: Any, problem: Problem, out: Array | None, lse: Array, grad_out: Array | None,
    grad_lse: Array | None, mass: Array | None,
) -> Rows:
    """What a backward pass knows of each row, in normal form."""
    dtype = accumulation(problem.query, problem.spec)
    shape = problem.spec.scores_shape[:-1]

    def rows(x: Array, width: int) -> Array:
        return xp.reshape(xp.astype(x, dtype, copy=False), (*shape, width))

    lse = rows(lse, 1)
    # A row that sees nothing has no gradient, whatever is asked of its -inf.
    empty = lse == -math.inf
    known = xp.where(empty, xp.zeros_like(lse), lse)
    if out is None or grad_out is None:
        return Rows(known, mass=mass)
    d_v = problem.spec.d_v
    grad_out = rows(grad_out, d_v)
    delta = xp.sum(grad_out * rows(out, d_v), axis=-1, keepdims=True)
    if grad_lse is not None:
        delta = delta - rows(grad_lse, 1)
    return Rows(known, grad_out, xp.where(empty, xp.zeros_like(delta), delta), mass=mass)


def _moved(
    xp: Any, problem: Problem, name: str, out: Array, lse: Array, mass: Array | None,
    tangents: Grads,
) -> tuple[Array, Array]:
    """Tangents of out and lse in the accumulation dtype, in normal form, lse with a last axis."""
    rows = _row_terms(xp, problem, out, lse, out, None, mass)  # grad_out stands for out itself
    if name == "kernels" and _are_finite(xp, *tangents):
        from scaledot import _kernel_gradients  # loads Numba

        total, mean = _kernel_gradients.tangent(problem, rows, tangents)
    else:
        total, mean = _derivatives.tangent(
            complete(problem), rows, tangents, in_blocks=name != "dense"
        )
    if tangents.sinks is not None:
        mean = mean + _sink_weights(xp, problem, rows) * tangents.sinks
    return total - mean * rows.grad_out, mean


def _second(
    xp: Any, problem: Problem, name: str, rows: Rows, tangents: Grads, wanted: Collection[str]
) -> Grads:
    """Second derivatives by the chosen implementation; kernels have those of the operands."""
    operands = {"query", "key", "value"} & set(wanted)
    by_kernels = name == "kernels" and _are_finite(xp, rows.grad_out, *tangents)
    rest = set(wanted) - {"sinks"} - (operands if by_kernels else set())
    grads = Grads()
    if rest:
        grads = _derivatives.second(
            complete(problem), rows, tangents, rest, in_blocks=name != "dense"
        )
    if by_kernels and operands:
        from scaledot import _kernel_gradients  # loads Numba

        found = _kernel_gradients.second(problem, rows, tangents, operands)
        grads = grads._replace(**{name: getattr(found, name) for name in operands})
    return grads


def _are_finite(xp: Any, *arrays: Array | None) -> bool:
    """Whether no array holds nan or infinities: kernels do not trace which of them count."""
    return not _reference.not_finite(xp, *(x for x in arrays if x is not None))


def _sink_weights(xp: Any, problem: Problem, rows: Rows) -> Array:
    """Weight of the sink in each row, (lead, num_heads, len_q, 1)."""
    weights = xp.exp(problem.sinks - rows.lse)
    return weights if rows.mass is None else weights / rows.mass


def _of_heads(xp: Any, problem: Problem, x: Array) -> Array:
    """Sum over everything but heads, (1..., num_heads, 1, 1)."""
    return _derivatives.reduced(xp, x, tuple(cast(Array, problem.sinks).shape))


def _normal(xp: Any, problem: Problem, tangents: Grads) -> Grads:
    """Tangents in the shapes that the arguments have in normal form, in the accumulation dtype."""
    terms, dtype = problem.terms, accumulation(problem.query, problem.spec)
    forms = Grads(
        problem.query, problem.key, problem.value, terms.bias, problem.sinks, terms.slopes
    )

    def placed(x: Array | None, form: Array | None) -> Array | None:
        if x is None or form is None:
            return None
        return xp.reshape(_arrays.like(problem.query, x, dtype), tuple(form.shape))

    return Grads(*(placed(x, form) for x, form in zip(tangents, forms, strict=True)))


def like_arguments(xp: Any, grads: Grads, arguments: Grads) -> Grads:
    """Gradients in the shapes and dtypes of the arguments."""

    def placed(x: Array | None, argument: Array | None) -> Array | None:
        if x is None or argument is None:
            return None
        x = xp.reshape(x, tuple(argument.shape))
        if _arrays.library(argument) == _arrays.library(x):
            return xp.astype(x, argument.dtype, copy=False)
        return x

    return Grads(*(placed(x, a) for x, a in zip(grads, arguments, strict=True)))
