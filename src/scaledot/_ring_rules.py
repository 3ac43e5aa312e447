"""A derivative rule of PyTorch around a pair of functions that talk to other ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from scaledot._errors import value_error

Forward = Callable[..., tuple[Tensor, ...]]
"""``forward(*tensors) -> results``, without graph."""
Backward = Callable[[Sequence[Any], Sequence[Tensor], Sequence[Any], Sequence[bool]], Sequence[Any]]
"""``backward(tensors, results, grads of results, which tensors need one) -> their gradients``."""


class _Rule(torch.autograd.Function):
    """``(forward, backward, *tensors) -> results``; ranks go back together, as they went forth."""

    @staticmethod
    def forward(ctx: Any, forward: Forward, backward: Backward, *tensors: Any) -> Any:
        results = forward(*(x.detach() if isinstance(x, Tensor) else x for x in tensors))
        ctx.set_materialize_grads(False)
        ctx.back, ctx.count = backward, len(tensors)
        # As it is now: every rank has to do the same, whatever it is asked for later.
        ctx.needed = tuple(ctx.needs_input_grad[2:])
        ctx.save_for_backward(*tensors, *results)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if any(map(_is_batched, grads)):
            raise value_error(
                "gradients of attention over several ranks must be computed one by one",
                "a batch of them (vmap, is_grads_batched)",
                "Loop over them: every rank takes part in each.",
            )
        saved = ctx.saved_tensors
        tensors, results = saved[: ctx.count], saved[ctx.count :]
        with torch.no_grad():
            filled = [
                torch.zeros_like(result) if grad is None else grad
                for result, grad in zip(results, grads, strict=True)
            ]
            found = ctx.back(tensors, results, filled, ctx.needed)
        if torch.is_grad_enabled():
            apply: Callable[..., tuple[Any, ...]] = _Once.apply
            found = apply(len(found), *found, *tensors, *grads)
        return (None, None, *found)


class _Once(torch.autograd.Function):
    """``(count, *gradients, *what they depend on) -> gradients``, which have no derivatives."""

    @staticmethod
    def forward(ctx: Any, count: int, *given: Any) -> Any:
        return tuple(given[:count])

    @staticmethod
    def backward(*_: Any) -> Any:
        raise value_error(
            "attention over several ranks must be differentiated once",
            "a second derivative",
            "Detach its gradients, or call attention on one process, which has second ones.",
        )


def _is_batched(grad: Any) -> bool:
    functorch: Any = torch._C._functorch
    return grad is not None and (
        functorch.is_functorch_wrapped_tensor(grad) or functorch.is_legacy_batchedtensor(grad)
    )


def differentiable(forward: Forward, backward: Backward, *tensors: Any) -> tuple[Tensor, ...]:
    """Results of ``forward``, differentiated once by ``backward``; a tensor may be None."""
    apply: Callable[..., tuple[Tensor, ...]] = _Rule.apply
    return apply(forward, backward, *tensors)
