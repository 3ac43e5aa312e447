"""Derivative rule of PyTorch for packed sequences: one Function for all of them.

It is differentiated once. For a second derivative, and for whoever transforms the first, the
gradients are those of one sequence after the other, computed anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scaledot import _packed_gradients, _torch_rules
from scaledot._derivatives import Grads
from scaledot._passes import Packed, packed_problem
from scaledot._spec import Options
from scaledot._state import State
from scaledot._torch_ops import alone, is_dispatched, is_transformed

_NAMES = ("query", "key", "value", "sinks", "alibi_slopes")
Loop = Callable[[Packed, Tensor, Tensor, Tensor], Tensor]


def applies(query: Tensor, key: Any, value: Any, options: Options) -> bool:
    """Whether PyTorch differentiates a call backward, and does nothing else with it."""
    if torch.compiler.is_compiling() or _is_watched():
        return False
    return _torch_rules.applies(query, key, value, options)


def _is_watched() -> bool:
    return is_dispatched() or is_transformed()


def attention(
    call: Packed, query: Tensor, key: Tensor, value: Tensor, loop: Loop
) -> Tensor | None:
    """Attention of all sequences, (tokens, heads, d_v); None where the kernels cannot do it.

    ``loop`` is the same one sequence after the other, which PyTorch can differentiate in any way.
    """
    options = call.options
    plain = call._replace(options=Options(*map(alone, options)))
    problem = packed_problem(plain, *map(alone, (query, key, value)))
    if problem is None:
        return None
    state = _packed_gradients.forward(plain, problem, with_lse=True)
    if state is None:
        return None
    given = (query, key, value, options.sinks, options.alibi_slopes)
    found: Tensor = _torch_rules.apply_alone(_Sequences, _Call(call, plain, state, loop), *given)
    return found


class _Call:
    """What of a call is not a tensor, and its result; opaque to PyTorch."""

    def __init__(self, call: Packed, plain: Packed, state: State, loop: Loop) -> None:
        self.call, self.plain, self.loop = call, plain, loop
        self.state: State | None = state


class _Sequences(torch.autograd.Function):
    """``(call, query, key, value, sinks, slopes) -> out``."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        call, *tensors = given
        out, ctx.lse = call.state
        call.state = None  # kept as a result, which is no cycle
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in tensors), out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        result: list[Any] = [None] * (1 + len(_NAMES))
        wanted = [n for n, needs in zip(_NAMES, ctx.needs_input_grad[1:], strict=True) if needs]
        if grads[0] is None or not wanted:
            return tuple(result)
        *tensors, out = ctx.saved_tensors
        given = dict(zip(_NAMES, tensors, strict=True))
        found = None
        if not (torch.is_grad_enabled() or _is_watched()):
            query, key, value = map(alone, tensors[:3])
            found = _packed_gradients.backward(
                ctx.call.plain, query, key, value, State(alone(out), ctx.lse), grads[0], wanted
            )
        if found is None:
            found = _by_loop(ctx.call, given, grads[0], wanted)
        for name in wanted:
            result[1 + _NAMES.index(name)] = getattr(found, name)
        return tuple(result)


def _by_loop(
    kept: _Call, given: dict[str, Any], grad_out: Tensor, wanted: list[str]
) -> Grads:
    """Gradients of the arguments named, which can be differentiated again."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        options = kept.call.options
        for name in ("sinks", "alibi_slopes"):
            if given[name] is not None:
                options = options._replace(**{name: given[name]})
        query, key, value = (given[name] for name in _NAMES[:3])
        out = kept.loop(kept.call._replace(options=options), query, key, value)
        found = torch.autograd.grad(
            out, [given[name] for name in wanted], grad_out, create_graph=again, allow_unused=True
        )
    return Grads(**dict(zip(wanted, found, strict=True)))
