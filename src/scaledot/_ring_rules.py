"""A derivative rule of PyTorch around a pair of functions that talk to other ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

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
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        saved = ctx.saved_tensors
        tensors, results = saved[: ctx.count], saved[ctx.count :]
        filled = [
            torch.zeros_like(result) if grad is None else grad
            for result, grad in zip(results, grads, strict=True)
        ]
        return (None, None, *ctx.back(tensors, results, filled, ctx.needed))


def differentiable(forward: Forward, backward: Backward, *tensors: Any) -> tuple[Tensor, ...]:
    """Results of ``forward``, differentiated once by ``backward``; a tensor may be None."""
    apply: Callable[..., tuple[Tensor, ...]] = _Rule.apply
    return apply(forward, backward, *tensors)
