"""Derivative rules of PyTorch: backward, twice, and forward mode, vmap, and one operator to trace.

Outside of compilers a call is an `autograd.Function`, whose rules call further ones: the gradient
of `_Attention` is `_Backward`, its tangent `_Tangent`, and the gradient of both `_Second`. The
derivative of `_Backward` along a tangent needs no pass of its own: second derivatives commute, so
it is what `_Second` returns for that tangent. All is done by `_passes`, in linear memory.

Compilers refuse a Function with a rule for forward mode; they see the operators of `_torch_ops`.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from scaledot import _choice, _passes, _torch_ops
from scaledot._derivatives import Grads
from scaledot._errors import value_error
from scaledot._spec import Options, batch_seeds
from scaledot._state import State
from scaledot._torch_closures import enclosed
from scaledot._torch_ops import NAMES, PLACES, Given, alone, no_third, or_zeros, split

_forward_ad: Any = forward_ad
_PLAIN = (Tensor, torch.nn.Parameter)
_COUNT = len(NAMES)
_TANGENTS = tuple(f"tangent_{name}" for name in PLACES)
_RESULTS, _GRADS = ("out", "lse"), ("grad_out", "grad_lse")
_PER_HEAD = {"sinks", "alibi_slopes", "tangent_sinks", "tangent_alibi_slopes"}
# What must have the axis of a batch together with its tangent.
_MOVED = tuple(n for n in (*PLACES, *_TANGENTS) if n not in _PER_HEAD)
# Axes of each tensor behind the leading ones.
_TAILS = dict.fromkeys((*NAMES, *_RESULTS, *_GRADS, *_TANGENTS), 3) | {
    "q_segment": 1, "kv_segment": 1, "seed": 0, "q_offset": 0, "kv_offset": 0, "kv_len": 0,
    "lse": 2, "grad_lse": 2,
}  # fmt: skip


def applies(query: Tensor, key: Any, value: Any, options: Options) -> bool:
    """Whether PyTorch differentiates, transforms or traces a call that these rules can do.

    They cannot do a score_mod without derivative, mods whose own tensors are differentiated, mods
    that are traced, and subclasses of tensors: array operations serve these.
    """
    mods = (options.score_mod, options.mask_mod)
    if torch.compiler.is_compiling():
        return mods == (None, None)
    if options.score_mod is not None and not isinstance(options.score_mod, tuple):
        return False
    tensors = [x for x in (query, key, value, *split(options)[0]) if isinstance(x, Tensor)]
    if any(isinstance(x, FakeTensor) for x in tensors) or _torch_ops.is_dispatched():
        return mods == (None, None)
    if any(type(x) not in _PLAIN for x in tensors) or not any(map(_is_tracked, tensors)):
        return False
    if mods == (None, None):
        return True
    read = enclosed(mods)
    return read is not None and not any(map(_is_tracked, read))


def traces(query: Tensor, options: Options) -> bool:
    """Whether PyTorch traces a call for weights that `weights` can do: one without mods."""
    return options.score_mod is None and options.mask_mod is None and _through_operator([query])


def _is_tracked(x: Tensor) -> bool:
    """Whether x is differentiated, in either direction, or transformed."""
    if x.requires_grad and torch.is_grad_enabled():
        return True
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        return True
    return _forward_ad._current_level >= 0 and _forward_ad.unpack_dual(x).tangent is not None


def attention(
    query: Tensor, key: Tensor, value: Tensor, options: Options, *, slices: bool = False,
    wide: bool = False,
) -> State:  # fmt: skip
    """Attention that PyTorch can differentiate, transform and compile.

    Parameters
    ----------
    query, key, value : Tensor
        As in `scaledot.attention`.
    options : Options
        As the caller gave them.
    slices, wide : bool
        As in `_passes.forward`.

    Returns
    -------
    State
        ``out`` in query's dtype, or wide, and ``lse``, sinks included.
    """
    if torch.compiler.is_compiling():
        if not _torch_ops.is_transformed():
            given = _torch_ops.arguments(query, options, slices)
            return State(*torch.ops.scaledot.attention.default(query, key, value, *given, wide))
        _leave_graph()
    tensors, rest = split(options)
    call = _Call(rest, slices, wide)
    return State(*apply_alone(_Attention, call, query, key, value, *tensors))


def weights(query: Tensor, key: Tensor, options: Options, rows: Any) -> Tensor:
    """`scaledot.attention_weights` as one operator; under transforms as array operations.

    These are outside of compiled graphs, and have all derivatives.
    """
    if _torch_ops.is_transformed():
        _leave_graph()
        return cast(Tensor, _alone(_choice.weights_of, query, key, options, rows))
    given = _torch_ops.weights_arguments(query, options, rows)
    return cast(Tensor, torch.ops.scaledot.attention_weights.default(query, key, *given))


def _leave_graph() -> None:
    """End the graph that is being compiled, if one is."""
    if torch.compiler.is_dynamo_compiling():
        torch._dynamo.graph_break(msg="torch.func and forward mode need Functions of scaledot")


def apply_alone(function: Any, *given: Any) -> Any:
    """Apply a Function outside of compilers; they do not look at it."""
    return _alone(_apply, function, *given)


def _alone(run: Any, *given: Any) -> Any:
    return (_undisturbed(run) if "torch._dynamo" in sys.modules else run)(*given)


@functools.cache
def _undisturbed(run: Any) -> Any:
    """Return ``run`` for where a graph was left: its frames are not looked at for another one."""
    dynamo: Any = torch._dynamo
    return dynamo.disable(run)


@dataclass(frozen=True, slots=True)
class _Call:
    """What of a call is not a tensor; opaque to PyTorch."""

    rest: Options
    slices: bool
    wide: bool
    wanted: tuple[str, ...] = ()

    def options(self, tensors: Sequence[Given]) -> Options:
        """Return all options, given all tensors."""
        return _torch_ops.joined(_torch_ops.Tensors(*tensors[3:_COUNT]), self.rest)


def _apply(function: Any, *given: Any) -> Any:
    return function.apply(*given)


def _operator(call: _Call, tensors: Sequence[Given], name: str, *more: Any) -> Any:
    """Run the operator of that name."""
    query = cast(Tensor, tensors[0])
    given = _torch_ops.arguments(query, call.options(tensors), call.slices)
    return getattr(torch.ops.scaledot, name).default(*tensors[:3], *given, *more)


def _through_operator(tensors: Sequence[Given]) -> bool:
    return (
        torch.compiler.is_compiling() or _torch_ops.is_dispatched()
        or isinstance(tensors[0], FakeTensor)
    )  # fmt: skip


def _is_last() -> bool:
    """Whether nothing differentiates or transforms what is computed now."""
    return not torch.is_grad_enabled() and not _torch_ops.is_transformed()


class _Attention(torch.autograd.Function):
    """``(call, *tensors) -> out, lse``."""

    @staticmethod
    def forward(*given: Any) -> Any:
        call, *tensors = given
        if _through_operator(tensors):
            return _operator(call, tensors, "attention", call.wide)
        query, key, value, *_ = plain = tuple(map(alone, tensors))
        options = call.options(plain)
        return tuple(_passes.forward(
            query, key, value, options, slices=call.slices, wide=call.wide
        ))  # fmt: skip

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _keep(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, *grads: Given) -> Any:
        if grads[0] is None and grads[1] is None:
            return (None,) * (1 + _COUNT)
        found = _backward(ctx.call, _wanted(ctx), ctx.saved_tensors, *grads)
        return _spread(1 + _COUNT, found)

    @staticmethod
    def jvp(ctx: Any, *given: Given) -> Any:
        return _apply(_Tangent, ctx.call, *ctx.saved_tensors, *_of_arguments(given[1:]))

    @staticmethod
    def vmap(info: Any, in_dims: Any, call: _Call, *tensors: Given) -> Any:
        batch = _Batch(info, NAMES, in_dims[1:], tensors)
        if batch.is_looped(call):
            return batch.each(_Attention, call)
        return batch.results(_apply(_Attention, batch.call(call), *batch.tensors()))


class _Backward(torch.autograd.Function):
    """``(call, *tensors, out, lse, grad_out, grad_lse) -> gradients of call.wanted``."""

    @staticmethod
    def forward(*given: Any) -> Any:
        call, *tensors = given
        return _run_backward(call, tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _keep(ctx, inputs, ())

    @staticmethod
    def backward(ctx: Any, *tangents: Given) -> Any:
        count = _COUNT + 5
        if all(t is None for t in tangents):
            return (None,) * count
        more = tuple(
            name for name, i in (("grad_out", count - 2), ("grad_lse", count - 1))
            if ctx.needs_input_grad[i]
        )
        given = Grads(**dict(zip(ctx.call.wanted, tangents, strict=True)))
        found = _second(ctx.call, _wanted(ctx) + more, ctx.saved_tensors, given)
        return _spread(count, found)

    @staticmethod
    def jvp(ctx: Any, *given: Given) -> Any:
        call, saved = ctx.call, ctx.saved_tensors
        tangents = _of_arguments(given[1:])
        found: dict[str, Any] = dict.fromkeys(call.wanted)
        if any(t is not None for t in tangents):
            found = _second(call, call.wanted, saved, tangents)
        if given[-2] is not None or given[-1] is not None:
            more = _backward(call, call.wanted, saved[:-2], given[-2], given[-1])
            found = {n: x if found[n] is None else x + found[n] for n, x in more.items()}
        return tuple(found[name] for name in call.wanted)

    @staticmethod
    def vmap(info: Any, in_dims: Any, call: _Call, *tensors: Given) -> Any:
        batch = _Batch(info, (*NAMES, *_RESULTS, *_GRADS), in_dims[1:], tensors)
        if batch.is_looped(call):
            return batch.each(_Backward, call)
        found = _apply(_Backward, batch.call(call), *batch.tensors(*call.wanted))
        return batch.gradients(call.wanted, found)


class _Tangent(torch.autograd.Function):
    """``(call, *tensors, out, lse, *tangents) -> tangents of out and lse``."""

    @staticmethod
    def forward(*given: Any) -> Any:
        call, *tensors = given
        return _run_tangent(call, tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _keep(ctx, inputs, ())

    @staticmethod
    def backward(ctx: Any, *grads: Given) -> Any:
        count = 1 + _COUNT + 2 + len(PLACES)
        if grads[0] is None and grads[1] is None:
            return (None,) * count
        saved, tangents = ctx.saved_tensors[: _COUNT + 2], ctx.saved_tensors[_COUNT + 2 :]
        wanted, needed = _wanted(ctx), ctx.needs_input_grad[-len(PLACES) :]
        result: list[Any] = [None] * count
        if wanted:
            filled = (or_zeros(grads[0], saved[_COUNT]), grads[1])
            found = _second(ctx.call, wanted, (*saved, *filled), Grads(*tangents))
            result = [*_spread(count, found)]
        linear = tuple(n for n, is_needed in zip(PLACES, needed, strict=True) if is_needed)
        if linear:
            found = _backward(ctx.call, linear, saved, *grads)
            result[-len(PLACES) :] = [found.get(name) for name in PLACES]
        return tuple(result)

    @staticmethod
    def jvp(*_: Any) -> Any:
        raise value_error(
            "forward mode must be around reverse mode, or once",
            "forward mode around forward mode",
            "Use torch.func.hessian, or jacfwd(jacrev(...)), or jacrev.",
        )

    @staticmethod
    def vmap(info: Any, in_dims: Any, call: _Call, *tensors: Given) -> Any:
        batch = _Batch(info, (*NAMES, *_RESULTS, *_TANGENTS), in_dims[1:], tensors)
        if batch.is_looped(call):
            return batch.each(_Tangent, call)
        return batch.results(_apply(_Tangent, batch.call(call), *batch.tensors(*_MOVED)))


class _Second(torch.autograd.Function):
    """``(call, *tensors, out, lse, grad_out, grad_lse, *tangents) -> gradients of call.wanted``."""

    @staticmethod
    def forward(*given: Any) -> Any:
        call, *tensors = given
        return _run_second(call, tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(*_: Any) -> Any:
        no_third()

    @staticmethod
    def jvp(*_: Any) -> Any:
        no_third()

    @staticmethod
    def vmap(info: Any, in_dims: Any, call: _Call, *tensors: Given) -> Any:
        batch = _Batch(info, (*NAMES, *_RESULTS, *_GRADS, *_TANGENTS), in_dims[1:], tensors)
        if batch.is_looped(call):
            return batch.each(_Second, call)
        found = _apply(_Second, batch.call(call), *batch.tensors(*_MOVED))
        return batch.gradients(call.wanted, found)


def _keep(ctx: Any, inputs: tuple[Any, ...], results: tuple[Tensor, ...]) -> None:
    """Keep a Function's arguments, and maybe its results, for its rules."""
    ctx.set_materialize_grads(False)
    ctx.call = inputs[0]
    ctx.save_for_backward(*inputs[1:], *results)
    ctx.save_for_forward(*inputs[1:], *results)


def _of_arguments(given: Sequence[Given]) -> Grads:
    """What stands at the places of arguments with gradients among all tensors."""
    return Grads(*(given[i] for i in PLACES.values()))


def _wanted(ctx: Any) -> tuple[str, ...]:
    needed = ctx.needs_input_grad[1:]
    return tuple(name for name, i in PLACES.items() if needed[i])


def _spread(count: int, found: dict[str, Any]) -> tuple[Any, ...]:
    """Gradients at the places of the arguments of a Function; those of grads come last."""
    result: list[Any] = [None] * count
    for name, x in found.items():
        place = {"grad_out": count - 2, "grad_lse": count - 1}.get(name, -1)
        result[1 + PLACES[name] if place < 0 else place] = x
    return tuple(result)


def _backward(
    call: _Call, wanted: tuple[str, ...], saved: Sequence[Given], grad_out: Given, grad_lse: Given
) -> dict[str, Any]:
    """Gradients by name, differentiable where that may matter."""
    call = replace(call, wanted=wanted)
    given = (*saved, or_zeros(grad_out, cast(Tensor, saved[_COUNT])), grad_lse)
    found = _run_backward(call, given) if _is_last() else _apply(_Backward, call, *given)
    return dict(zip(wanted, found, strict=True))


def _run_backward(call: _Call, given: Sequence[Given]) -> tuple[Any, ...]:
    if _through_operator(given):
        flags = [name in call.wanted for name in PLACES]
        found = _operator(call, given, "attention_backward", *given[_COUNT:], flags)
        return tuple(x for x, is_wanted in zip(found, flags, strict=True) if is_wanted)
    query, key, value, *_ = given = tuple(map(alone, given))
    out, lse, grad_out, grad_lse = given[_COUNT:]
    grads = _passes.backward(
        query, key, value, call.options(given), out, lse, grad_out, grad_lse, wanted=call.wanted,
        slices=call.slices,
    )
    return tuple(getattr(grads, name) for name in call.wanted)


def _run_tangent(call: _Call, given: Sequence[Given]) -> tuple[Any, ...]:
    if _through_operator(given):
        return tuple(_operator(call, given, "attention_tangent", *given[_COUNT:]))
    query, key, value, *_ = given = tuple(map(alone, given))
    out, lse, *tangents = given[_COUNT:]
    state = _passes.tangent(
        query, key, value, call.options(given), out, lse, Grads(*tangents), slices=call.slices
    )
    return tuple(state)


def _second(
    call: _Call, wanted: tuple[str, ...], saved: Sequence[Given], tangents: Grads
) -> dict[str, Any]:
    """Second derivatives by name, differentiable only to say that they are not."""
    call = replace(call, wanted=wanted)
    given = (*saved, *tangents)
    found = _run_second(call, given) if _is_last() else _apply(_Second, call, *given)
    return dict(zip(wanted, found, strict=True))


def _run_second(call: _Call, given: Sequence[Given]) -> tuple[Any, ...]:
    if _through_operator(given):
        flags = [name in call.wanted for name in _torch_ops.SECONDS]
        found = _operator(call, given, "attention_second", *given[_COUNT:], flags)
        by_name = dict(zip(_torch_ops.SECONDS, found, strict=True))
        return tuple(by_name[name] for name in call.wanted)
    query, key, value, *_ = given = tuple(map(alone, given))
    out, lse, grad_out, grad_lse, *tangents = given[_COUNT:]
    found = _passes.second(
        query, key, value, call.options(given), out, lse, grad_out, grad_lse, Grads(*tangents),
        wanted=[name for name in call.wanted if name in PLACES], slices=call.slices,
    )
    by_name = found.grads._asdict() | {"grad_out": found.grad_out, "grad_lse": found.grad_lse}
    return tuple(by_name[name] for name in call.wanted)


class _Batch:
    """Tensors of which some have an axis of `vmap`, made the first of the leading axes."""

    def __init__(
        self, info: Any, names: Sequence[str], dims: Sequence[int | None], given: Sequence[Given]
    ) -> None:
        self.size, self.names, self.dims, self.given = info.batch_size, names, dims, given
        shapes = [self._shape(i) for i in range(3)]
        self.matrix = all(len(shape) == 2 for shape in shapes)
        self.lead = np.broadcast_shapes(*(shape[:-3] for shape in shapes))

    def _shape(self, place: int) -> tuple[int, ...]:
        """Shape of a tensor for one element of the batch."""
        shape, dim = tuple(cast(Tensor, self.given[place]).shape), self.dims[place]
        return shape if dim is None else shape[:dim] + shape[dim + 1 :]

    def is_looped(self, call: _Call) -> bool:
        """Whether one call cannot do all: what is per head, and mods that count the batch."""
        rest = call.rest
        if rest.score_mod is not None or rest.mask_mod is not None:
            return True
        batched = {n for n, dim in zip(self.names, self.dims, strict=True) if dim is not None}
        return not _PER_HEAD.isdisjoint((*call.wanted, *batched))

    def each(self, function: Any, call: _Call) -> Any:
        """Run one element after the other."""
        results = [
            _apply(function, call, *(
                x if x is None or dim is None else x.select(dim, i)
                for x, dim in zip(self.given, self.dims, strict=True)
            ))
            for i in range(self.size)
        ]  # fmt: skip
        return tuple(map(torch.stack, zip(*results, strict=True))), (0,) * len(results[0])

    def call(self, call: _Call) -> _Call:
        """Return the call with seeds that do not depend on where in the batch an entry is."""
        rest = call.rest
        if not rest.dropout or rest.seed is None or isinstance(rest.seed, np.ndarray):
            return call
        seeds = batch_seeds(int(rest.seed), math.prod(self.lead)).reshape(self.lead)
        return replace(call, rest=rest._replace(seed=seeds))

    def tensors(self, *expanded: str) -> list[Given]:
        """All tensors; those named, and results, have the axis even where they are the same."""
        expanded = (*expanded, "query", "out", "lse", "grad_out", "grad_lse")
        return [
            self._arranged(x, dim, _TAILS[name], name in expanded)
            for x, dim, name in zip(self.given, self.dims, self.names, strict=True)
        ]

    def _arranged(self, x: Given, dim: int | None, tail: int, is_expanded: bool) -> Given:
        if x is None or (dim is None and not is_expanded):
            return x
        x = x.expand(self.size, *x.shape) if dim is None else x.movedim(dim, 0)
        missing = max(0, len(self.lead) + tail - (x.ndim - 1))
        return x.reshape(self.size, *(1,) * missing, *x.shape[1:])

    def results(self, found: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """Out and lse, or their tangents, with the axes that one element has."""
        return tuple(x[:, 0] if self.matrix else x for x in found), (0, 0)

    def gradients(
        self, wanted: Sequence[str], found: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """Gradients with the shapes that their arguments have for one element."""
        shapes = [self._shape(self.names.index(name)) for name in wanted]
        shaped = (x.reshape(self.size, *s) for x, s in zip(found, shapes, strict=True))
        return tuple(shaped), (0,) * len(shapes)
