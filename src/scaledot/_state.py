"""Partial attention results and how two of them become one."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from scaledot import _arrays, _checks
from scaledot._errors import type_error, value_error
from scaledot._typing import Array

LARGE_LSE = 16.0
"""Beyond it, weights ``exp(score - lse)`` are scaled to sum to 1: they are off by ``eps·|lse|``."""


class State(NamedTuple):
    """Attention over some of the keys.

    Attributes
    ----------
    out : array, shape (..., d_v)
        Mean of the values of these keys, weighted by softmax, in the accumulation dtype.
    lse : array, shape (...)
        Natural logarithm of the sum of the exponentials of the scores; -inf without keys.

    Notes
    -----
    A state without keys is ``out = 0``, ``lse = -inf`` and is neutral for `merge`. A sink is the
    keyless state ``out = 0``, ``lse = sink``.
    """

    out: Array
    lse: Array


def merge(a: State, b: State) -> State:
    """Combine the attention over two disjoint sets of keys into that over both.

    With ``w = exp(lse)``: ``out = (w_a out_a + w_b out_b) / (w_a + w_b)`` and
    ``lse = log(w_a + w_b)``.

    Parameters
    ----------
    a, b : State
        ``out`` of shape ``(..., d_v)`` and ``lse`` of shape ``(...)``, which broadcast.

    Returns
    -------
    State
        The state over all keys, in the dtype of the arguments.

    Raises
    ------
    TypeError
        Not a pair of arrays, or arrays of two libraries.
    ValueError
        Shapes that do not broadcast.

    Notes
    -----
    Commutative to the bit, associative to rounding. A state with ``lse = -inf`` is neutral
    whatever its ``out`` holds; two of them give ``out = 0``, ``lse = -inf``. Weights are taken
    relative to the larger ``lse``, so that nothing overflows.

    References
    ----------
    Online softmax: arXiv 1805.02867. Merging for rings: arXiv 2310.01889.

    Examples
    --------
    >>> import numpy as np, scaledot as sd
    >>> rng = np.random.default_rng(0)
    >>> query, key, value = rng.standard_normal((3, 2, 6, 4))
    >>> first = sd.attention_state(query, key[:, :4], value[:, :4])
    >>> rest = sd.attention_state(query, key[:, 4:], value[:, 4:])
    >>> np.allclose(sd.merge(first, rest).out, sd.attention(query, key, value))
    True
    """
    _check(a, b)
    xp = _arrays.namespace(a[0])
    with _arrays.quiet(xp):
        return merged(xp, State(*a), State(*b))


def merged(xp: Any, a: State, b: State) -> State:
    """`merge` without checks, for states that are known to fit."""
    infinity = xp.full_like(a.lse, -math.inf)
    larger = xp.maximum(a.lse, b.lse)
    reference = _arrays.constant(xp.where(larger == -math.inf, xp.zeros_like(larger), larger))
    weight_a, weight_b = xp.exp(a.lse - reference), xp.exp(b.lse - reference)
    total = weight_a + weight_b
    # == 0, not > 0: nan must stay nan.
    empty = total == 0
    divisor = xp.where(empty, xp.ones_like(total), total)
    out = _weighted(xp, a, weight_a / divisor) + _weighted(xp, b, weight_b / divisor)
    return State(out, xp.where(empty, infinity, reference + xp.log(divisor)))


def _weighted(xp: Any, state: State, weight: Array) -> Array:
    """Share of a state in the merged out, shape (..., d_v); an empty state's out is not read."""
    empty, out, weight = (state.lse == -math.inf)[..., None], state.out, weight[..., None]
    if _arrays.may_hold(xp.any(empty)):
        out = xp.where(empty, xp.zeros_like(weight), out)
    share = weight * out
    if _arrays.may_hold(xp.any(weight == 0)):
        # A weight that rounds to 0 is still above it: an infinite value must not become nan.
        share = xp.where((weight == 0) & xp.isinf(out), out, share)
    return share


def empty_state(xp: Any, shape: tuple[int, ...], d_v: int, dtype: Any, place: Array) -> State:
    """State without keys: out (*shape, d_v) zeros, lse (*shape,) -inf; on the device of place."""
    return State(
        xp.zeros((*shape, d_v), dtype=dtype, **_arrays.device_of(place)),
        xp.full(shape, -math.inf, dtype=dtype, **_arrays.device_of(place)),
    )


def _check(a: State, b: State) -> None:
    for name, state in (("a", a), ("b", b)):
        if not isinstance(state, tuple) or len(state) != 2:
            raise type_error(
                f"{name} must be a State (out, lse)",
                type(state).__name__,
                "attention_state returns one.",
            )
        _arrays.check_array(f"{name}.out", state[0])
        _arrays.check_array(f"{name}.lse", state[1])
        out_shape, lse_shape = tuple(state[0].shape), tuple(state[1].shape)
        if len(out_shape) != len(lse_shape) + 1:
            raise value_error(
                f"{name}.out must have one more axis than {name}.lse, the last, of length d_v",
                f"out {out_shape} and lse {lse_shape}",
                "Pass the pair as attention_state returned it.",
            )
    arrays = {"a.out": a[0], "a.lse": a[1], "b.out": b[0], "b.lse": b[1]}
    _checks.alike(**arrays)
    rows = (tuple(x.shape) for x in (a[0], b[0], a[1][..., None], b[1][..., None]))
    try:
        np.broadcast_shapes(*rows)
    except ValueError:
        raise value_error(
            "two states must broadcast against each other",
            _checks.shapes(**arrays),
            "Both must come from the same queries and have the same d_v.",
        ) from None
