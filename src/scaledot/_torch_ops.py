"""Passes and weights as operators of PyTorch: what compilers, exporters and modes see of a call.

An operator takes the arguments of a call one by one, because schemas know no options: tensors
first, each None where there is none or where it is a number, then numbers. What a backward pass
does not want is an empty tensor, because operators return no None.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from scaledot import _checks, _choice, _passes
from scaledot._derivatives import Grads
from scaledot._errors import type_error, value_error
from scaledot._spec import Options

Given = Tensor | None
_jit: Any = torch.jit
_forward_ad: Any = torch.autograd.forward_ad
_OLD_VMAP: Any = torch._C._parse_dispatch_key("VmapMode")
_broadcast_shapes: Any = torch.broadcast_shapes


class Tensors(NamedTuple):
    """What of the options may be a tensor, in the order of the operators' arguments."""

    mask: Given = None
    bias: Given = None
    q_segment: Given = None
    kv_segment: Given = None
    alibi_slopes: Given = None
    sinks: Given = None
    block_mask: Given = None
    seed: Given = None
    q_offset: Given = None
    kv_offset: Given = None
    kv_len: Given = None


class Numbers(NamedTuple):
    """What of the options is not a tensor, in the order of the operators' arguments."""

    causal: bool
    left: int | None
    right: int | None
    scale: float | None
    softcap: float | None
    dropout: float
    impl: str
    seed_number: int | None
    q_start: int | None
    kv_start: int | None
    kv_count: int | None
    slices: bool


ARRAYS = (*Tensors._fields[:2], *Tensors._fields[4:])
"""Options that are one tensor or number; segment ids may be two."""
NAMES = ("query", "key", "value", *Tensors._fields)
"""All tensors of a call, in the order of the operators' arguments."""
PLACES = {name: NAMES.index(name) for name in Grads._fields}
"""Where each argument with a gradient stands among them."""
SECONDS = (*Grads._fields, "grad_out", "grad_lse")
"""What a second backward pass has gradients for."""
WEIGHTS_PLACES = {
    name: place - (place > PLACES["value"]) for name, place in PLACES.items() if name != "value"
}
"""Where each argument with a gradient stands among those of weights, which have no value."""
_COUNT = len(NAMES)
_NUMBERS_END = _COUNT + len(Numbers._fields)


def is_dispatched() -> bool:
    """Whether someone looks at every operator: a mode, a tracer, vmap of `torch.autograd`.

    That vmap, not the one of torch.func, is behind ``is_grads_batched``. It knows no Functions and
    runs operators once for each element.
    """
    return (
        torch._C._len_torch_dispatch_stack() > 0 or bool(_jit.is_tracing())
        or torch._C._dispatch_tls_is_dispatch_key_included(_OLD_VMAP)
    )  # fmt: skip


def is_transformed() -> bool:
    """Whether a transform of torch.func or forward mode is on, which operators know nothing of."""
    return torch._C._are_functorch_transforms_active() or _forward_ad._current_level >= 0


def split(options: Options) -> tuple[Tensors, Options]:
    """Part options into tensors and the rest."""
    found: dict[str, Any] = {}
    for name in ARRAYS:
        x = getattr(options, name)
        if isinstance(x, Tensor):
            found[name] = x
    rest = options._replace(**dict.fromkeys(found)) if found else options
    segments = options.segment_ids
    if isinstance(segments, Tensor):
        found["q_segment"] = segments
    elif (
        isinstance(segments, (tuple, list)) and len(segments) == 2
        and isinstance(segments[0], Tensor) and isinstance(segments[1], Tensor)
    ):  # fmt: skip
        found["q_segment"], found["kv_segment"] = segments
    if "q_segment" in found:
        rest = rest._replace(segment_ids=None)
    return Tensors(**found), rest


def joined(tensors: Tensors, rest: Options) -> Options:
    """Options of which `split` made these parts."""
    given: dict[str, Any] = {}
    for name in ARRAYS:
        x = getattr(tensors, name)
        if x is not None:
            given[name] = x
    if tensors.q_segment is not None:
        one = tensors.kv_segment is None
        given["segment_ids"] = tensors.q_segment if one else (tensors.q_segment, tensors.kv_segment)
    return rest._replace(**given) if given else rest


def _on_device(query: Tensor, x: Any) -> Any:
    """NumPy's arrays as tensors; anything else as it is."""
    if not isinstance(x, np.ndarray):
        return x
    if not torch.compiler.is_compiling() and x.dtype.kind in "iu":
        x = x.astype(np.int64)  # the bits of a seed; PyTorch computes little with unsigned numbers
    return torch.as_tensor(x, device=query.device)


def _integer(x: Any) -> Any:
    """Return what is no tensor, as the schema wants it."""
    return int(x) if isinstance(x, np.integer) else None if isinstance(x, Tensor) else x


def _seed(x: Any) -> Any:
    """64 bits of a seed that is a number, of which no more count."""
    x = _integer(x)
    return x if x is None or -(2**63) <= x < 2**63 else (x + 2**63) % 2**64 - 2**63


def _real(x: Any) -> Any:
    return x if x is None or isinstance(x, float) else float(x)


def arguments(query: Tensor, options: Options, slices: bool) -> tuple[Any, ...]:
    """Return the options as arguments of the operators."""
    if options.score_mod is not None or options.mask_mod is not None:
        raise type_error(
            "score_mod and mask_mod must be None in a call that PyTorch traces as one operator",
            "a function", "Pass bias= or mask=, or leave this call out of the compiled function.",
        )
    converted = {name: _on_device(query, getattr(options, name)) for name in ARRAYS}
    segments = options.segment_ids
    if isinstance(segments, (tuple, list)):
        segments = tuple(_on_device(query, x) for x in segments)
    else:
        segments = _on_device(query, segments)
    tensors, rest = split(options._replace(segment_ids=segments, **converted))
    left, right = (None, None) if rest.window is None else rest.window
    numbers = Numbers(
        rest.causal, _integer(left), _integer(right), _real(rest.scale), _real(rest.softcap),
        _real(rest.dropout), rest.impl, _seed(rest.seed), _integer(rest.q_offset),
        _integer(rest.kv_offset), _integer(rest.kv_len), slices,
    )
    return (*tensors, *numbers)


def weights_arguments(query: Tensor, options: Options, rows: Any) -> tuple[Any, ...]:
    """Return options and rows as arguments of the operators of weights."""
    if rows is not None and not isinstance(rows, Tensor):
        rows = torch.as_tensor(list(rows) if isinstance(rows, range) else rows)
    return *arguments(query, options, False), rows


def _options(given: Sequence[Any]) -> tuple[Options, bool]:
    """Options, and whether keys may be a slice, from the arguments of an operator."""
    numbers = Numbers(*given[_COUNT:_NUMBERS_END])
    limited = numbers.left is not None or numbers.right is not None
    rest = Options(
        causal=numbers.causal, window=(numbers.left, numbers.right) if limited else None,
        scale=numbers.scale, softcap=numbers.softcap, dropout=numbers.dropout, impl=numbers.impl,
        seed=numbers.seed_number, q_offset=numbers.q_start, kv_len=numbers.kv_count,
        kv_offset=numbers.kv_start,
    )
    return joined(Tensors(*given[3:_COUNT]), rest), numbers.slices


def alone(x: Any) -> Any:
    """The tensor without its graph."""
    return x.detach() if isinstance(x, Tensor) and x.requires_grad else x


def or_zeros(grad: Given, like: Tensor) -> Tensor:
    """Return the gradient, or zeros where there is none."""
    return torch.zeros_like(like) if grad is None else grad


def forward(*given: Any) -> tuple[Tensor, Tensor]:
    """Run `_passes.forward` on the arguments of `attention`."""
    query, key, value, *_ = given = tuple(map(alone, given))
    options, slices = _options(given)
    state = _passes.forward(query, key, value, options, slices=slices, wide=given[-1])
    return state.out.contiguous(), state.lse.contiguous()


def backward(*given: Any) -> tuple[Tensor, ...]:
    """Run `_passes.backward` on the arguments of `attention_backward`."""
    query, key, value, *_ = given = tuple(map(alone, given))
    options, slices = _options(given)
    out, lse, grad_out, grad_lse, wanted = given[_NUMBERS_END:]
    grads = _passes.backward(
        query, key, value, options, out, lse, or_zeros(grad_out, out), grad_lse,
        wanted=_names(wanted), slices=slices,
    )
    return _filled(query, grads, wanted)


def tangent(*given: Any) -> tuple[Tensor, Tensor]:
    """Run `_passes.tangent` on the arguments of `attention_tangent`."""
    query, key, value, *_ = given = tuple(map(alone, given))
    options, slices = _options(given)
    out, lse, *tangents = given[_NUMBERS_END:]
    state = _passes.tangent(query, key, value, options, out, lse, Grads(*tangents), slices=slices)
    return state.out.contiguous(), state.lse.contiguous()


def second(*given: Any) -> tuple[Tensor, ...]:
    """Run `_passes.second` on the arguments of `attention_second`."""
    query, key, value, *_ = given = tuple(map(alone, given))
    options, slices = _options(given)
    out, lse, grad_out, grad_lse, *tangents, wanted = given[_NUMBERS_END:]
    found = _passes.second(
        query, key, value, options, out, lse, or_zeros(grad_out, out), grad_lse,
        Grads(*tangents), wanted=_names(wanted[:-2]), slices=slices,
    )
    return _filled(query, (*found.grads, found.grad_out, found.grad_lse), wanted)


def weights(*given: Any) -> Tensor:
    """Run `_choice.weights_of` on the arguments of `attention_weights`."""
    found: Tensor = _choice.weights_of(*_of_weights([*map(alone, given)]))
    return found.contiguous()


def weights_backward(*given: Any) -> tuple[Tensor, ...]:
    """Differentiate weights as PyTorch does it outside of graphs: through the array operations."""
    *call, grad, wanted = given
    call, leaves = [*map(alone, call)], []
    with _recorded():
        for place, is_wanted in zip(WEIGHTS_PLACES.values(), wanted, strict=True):
            if is_wanted:
                call[place] = call[place].detach().requires_grad_()
                leaves.append(call[place])
        query, key, options, rows = _of_weights(call)
        if options.impl == "kernels":  # which leave no graph
            options = options._replace(impl="auto")
        result = _choice.weights_of(query, key, options, rows)
        found: Any = map(torch.zeros_like, leaves)
        if result.requires_grad:  # not where there are no keys
            found = torch.autograd.grad(result, leaves, grad, materialize_grads=True)
    by_place = iter(found)
    return _filled(given[0], [next(by_place) if flag else None for flag in wanted], wanted)


def _of_weights(given: Sequence[Any]) -> tuple[Tensor, Tensor, Options, Given]:
    """Query, key, options and rows from the arguments of `attention_weights`."""
    query, key, *rest, rows = given
    options, _ = _options((query, key, None, *rest))
    return query, key, options, rows


@contextlib.contextmanager
def _recorded() -> Iterator[None]:
    """Let PyTorch record what is computed, which it does not do within an operator."""
    autograd: Any = torch._C.DispatchKey.AutogradFunctionality
    with torch._C._SetExcludeDispatchKeyGuard(autograd, False), torch.enable_grad():
        yield


def _names(wanted: Sequence[bool]) -> list[str]:
    return [name for name, is_wanted in zip(PLACES, wanted, strict=True) if is_wanted]


def _filled(query: Tensor, found: Sequence[Any], wanted: Sequence[bool]) -> tuple[Tensor, ...]:
    """Tensors in C order, empty ones for what is not wanted."""
    return tuple(
        x.contiguous() if is_wanted else query.new_empty(0)
        for x, is_wanted in zip(found, wanted, strict=True)
    )


def _fake_forward(*given: Any) -> tuple[Tensor, Tensor]:
    query, key, value = given[:3]
    rows = (*_heads(query, key, value), query.shape[-2])
    numbers = _sums(query) if given[-1] else query.dtype
    return (
        query.new_empty((*rows, value.shape[-1]), dtype=numbers),
        query.new_empty(rows, dtype=_sums(query)),
    )


def _fake_weights(*given: Any) -> Tensor:
    query, key, rows = *given[:2], given[-1]
    count = query.shape[-2] if rows is None else rows.numel()
    shape = (*_heads(query, key, key), count, key.shape[-2])
    found: Tensor = query.new_empty(shape, dtype=_sums(query))
    return found


def _heads(*operands: Tensor) -> tuple[Any, ...]:
    """Leading axes and heads of the result, none for matrices; raise for shapes that do not fit."""
    if all(isinstance(n, int) for x in operands for n in x.shape):
        _checks.operand_shapes(*operands)
    if all(x.ndim == 2 for x in operands):
        return ()
    query, *_ = operands
    lead = _broadcast_shapes(*(x.shape[:-3] for x in operands))
    return (*lead, query.shape[-3] if query.ndim > 2 else 1)


def _sums(query: Tensor) -> torch.dtype:
    """Dtype of sums."""
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def _fake_backward(*given: Any) -> tuple[Tensor, ...]:
    return _like([given[i] for i in PLACES.values()], given)


def _fake_weights_backward(*given: Any) -> tuple[Tensor, ...]:
    return _like([given[i] for i in WEIGHTS_PLACES.values()], given)


def _fake_tangent(*given: Any) -> tuple[Tensor, Tensor]:
    out, lse = given[_NUMBERS_END : _NUMBERS_END + 2]
    return out.new_empty(out.shape), lse.new_empty(lse.shape)


def _fake_second(*given: Any) -> tuple[Tensor, ...]:
    out, lse = given[_NUMBERS_END : _NUMBERS_END + 2]
    return _like([*(given[i] for i in PLACES.values()), out, lse], given)


def _like(arguments: Sequence[Any], given: Sequence[Any]) -> tuple[Tensor, ...]:
    """Gradients of the arguments that are wanted, by the last thing given, without memory."""
    return tuple(
        x.new_empty(x.shape) if is_wanted else given[0].new_empty(0)
        for x, is_wanted in zip(arguments, given[-1], strict=True)
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Keep the arguments of an operator, and of the first its results, for what follows."""
    ctx.set_materialize_grads(False)
    ctx.numbers, ctx.rest = inputs[_COUNT:_NUMBERS_END], inputs[-1]
    results = output if len(output) == 2 else ()
    ctx.save_for_backward(*inputs[:_COUNT], *inputs[_NUMBERS_END:-1], *results)


def _back(ctx: Any, grad_out: Given, grad_lse: Given) -> tuple[Given, ...]:
    """Backward of `attention`, by `attention_backward`."""
    count = _NUMBERS_END + 1
    wanted = [ctx.needs_input_grad[i] for i in PLACES.values()]
    if grad_out is None and grad_lse is None:
        return (None,) * count
    saved = ctx.saved_tensors
    found = attention_backward(
        *saved[:_COUNT], *ctx.numbers, *saved[_COUNT:], grad_out, grad_lse, wanted
    )
    return _spread(count, found, wanted, tuple(PLACES.values()))


def _back_again(ctx: Any, *tangents: Given) -> tuple[Given, ...]:
    """Backward of `attention_backward`, by `attention_second`."""
    count = _NUMBERS_END + 5
    places = (*PLACES.values(), _NUMBERS_END + 2, _NUMBERS_END + 3)
    wanted = [ctx.needs_input_grad[i] for i in places]
    given = [t if is_given else None for t, is_given in zip(tangents, ctx.rest, strict=True)]
    if all(t is None for t in given):
        return (None,) * count
    saved = ctx.saved_tensors
    found = attention_second(*saved[:_COUNT], *ctx.numbers, *saved[_COUNT:], *given, wanted)
    return _spread(count, found, wanted, places)


def _keep_call(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keep the arguments of `attention_weights`."""
    ctx.set_materialize_grads(False)
    ctx.numbers = inputs[_COUNT - 1 : -1]
    ctx.save_for_backward(*inputs[: _COUNT - 1], inputs[-1])


def _back_through_weights(ctx: Any, grad: Given) -> tuple[Given, ...]:
    """Backward of `attention_weights`, by `attention_weights_backward`."""
    wanted = [ctx.needs_input_grad[i] for i in WEIGHTS_PLACES.values()]
    if grad is None:
        return (None,) * _NUMBERS_END
    *tensors, rows = ctx.saved_tensors
    found = attention_weights_backward(*tensors, *ctx.numbers, rows, grad, wanted)
    return _spread(_NUMBERS_END, found, wanted, tuple(WEIGHTS_PLACES.values()))


def _spread(
    count: int, found: Sequence[Tensor], wanted: Sequence[bool], places: Sequence[int]
) -> tuple[Given, ...]:
    """Gradients at the places of their arguments, among ``count`` of them."""
    result: list[Given] = [None] * count
    for x, is_wanted, place in zip(found, wanted, places, strict=True):
        result[place] = x if is_wanted else None
    return tuple(result)


def _refusal(must_hold: str, given: str, hint: str) -> Callable[..., Any]:
    """Return a rule for a derivative that there is none of: it raises."""

    def refuse(*_: Any) -> Any:
        raise value_error(must_hold, given, hint)

    return refuse


no_third = _refusal(
    "attention must be differentiated at most twice", "a third derivative",
    "Detach the second derivatives, or take the last one by finite differences.",
)
_no_second = _refusal(
    "attention_weights must be differentiated once where PyTorch traces it as one operator",
    "a second derivative", "Leave this call out of the compiled function.",
)


_OPTIONS = ", ".join((
    *(f"Tensor? {name}" for name in Tensors._fields),
    "bool causal, SymInt? left, SymInt? right, float? scale, float? softcap, float dropout",
    "str impl, SymInt? seed_number, SymInt? q_start, SymInt? kv_start, SymInt? kv_count",
    "bool slices",
))  # fmt: skip
_CALL = f"Tensor query, Tensor key, Tensor value, {_OPTIONS}"
_WEIGHTS = f"Tensor query, Tensor key, {_OPTIONS}, Tensor? rows"
_RESULTS = "Tensor out, Tensor lse, Tensor? grad_out, Tensor? grad_lse"
_TANGENTS = ", ".join(f"Tensor? tangent_{name}" for name in Grads._fields)


def _returns(count: int) -> str:
    return f"({', '.join(['Tensor'] * count)})"


attention = torch.library.custom_op(
    "scaledot::attention", forward, mutates_args=(),
    schema=f"({_CALL}, bool wide) -> {_returns(2)}",
)
attention.register_fake(_fake_forward)
attention.register_autograd(_back, setup_context=_keep)

attention_backward = torch.library.custom_op(
    "scaledot::attention_backward", backward, mutates_args=(),
    schema=f"({_CALL}, {_RESULTS}, bool[] wanted) -> {_returns(len(Grads._fields))}",
)
attention_backward.register_fake(_fake_backward)
attention_backward.register_autograd(_back_again, setup_context=_keep)

attention_tangent = torch.library.custom_op(
    "scaledot::attention_tangent", tangent, mutates_args=(),
    schema=f"({_CALL}, Tensor out, Tensor lse, {_TANGENTS}) -> {_returns(2)}",
)
attention_tangent.register_fake(_fake_tangent)

attention_second = torch.library.custom_op(
    "scaledot::attention_second", second, mutates_args=(),
    schema=f"({_CALL}, {_RESULTS}, {_TANGENTS}, bool[] wanted) -> {_returns(len(SECONDS))}",
)
attention_second.register_fake(_fake_second)
attention_second.register_autograd(no_third)

attention_weights = torch.library.custom_op(
    "scaledot::attention_weights", weights, mutates_args=(), schema=f"({_WEIGHTS}) -> Tensor",
)
attention_weights.register_fake(_fake_weights)
attention_weights.register_autograd(_back_through_weights, setup_context=_keep_call)

attention_weights_backward = torch.library.custom_op(
    "scaledot::attention_weights_backward", weights_backward, mutates_args=(),
    schema=f"({_WEIGHTS}, Tensor grad, bool[] wanted) -> {_returns(len(WEIGHTS_PLACES))}",
)
attention_weights_backward.register_fake(_fake_weights_backward)
attention_weights_backward.register_autograd(_no_second)
