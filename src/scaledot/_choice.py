"""Which implementation a call runs by, and why."""

from __future__ import annotations

import os
import sys
from dataclasses import fields

from scaledot import _arrays, _blockwise, _reference
from scaledot._errors import value_error
from scaledot._spec import Problem
from scaledot._state import State
from scaledot._typing import Array

FEW = 16
"""Queries of all heads of a group below which packing its keys costs more than it saves."""


def choose(problem: Problem) -> tuple[str, str]:
    """Return the implementation's name and the reason.

    ``auto`` is a pure function of the call's arguments, never of the machine's load, and never
    takes one whose memory is quadratic in the length: only ``dense``, asked for by name, is.
    """
    impl = problem.spec.impl
    if impl in ("dense", "blockwise"):
        return impl, "asked for by name"
    obstacle = _obstacle(problem)
    if impl == "kernels":
        if obstacle:
            raise value_error(
                "impl='kernels' must be given a call that the kernels can do",
                f"one that they cannot: {obstacle}",
                "Use impl='auto', which takes 'blockwise' where there is no kernel.",
            )
        return impl, "asked for by name"
    if obstacle:
        return "blockwise", f"auto: no kernels, {obstacle}"
    if problem.spec.group_size * problem.spec.len_q < FEW:
        return "blockwise", "auto: too few queries for each key to be worth packing the keys"
    return "kernels", "auto: compiled kernels, linear memory"


def run(problem: Problem) -> State:
    """Attention without sinks by the chosen implementation."""
    name, _ = choose(problem)
    if name == "dense":
        return _reference.dense(problem)
    if name == "blockwise":
        return _blockwise.blockwise(problem)
    from scaledot._bridges import cpu  # loads Numba

    return cpu.run(problem)


def tiles(problem: Problem) -> _blockwise.Tiles:
    """Work and memory of the chosen implementation."""
    name, _ = choose(problem)
    if name == "kernels":
        from scaledot._bridges import cpu

        return cpu.tiles(problem)
    return _blockwise.tiles(problem, in_blocks=name == "blockwise")


def _obstacle(problem: Problem) -> str:
    """Why the kernels cannot do a call; empty where they can."""
    spec, terms = problem.spec, problem.terms
    if spec.library not in ("numpy", "torch"):
        return f"they read NumPy arrays and CPU tensors of PyTorch, these belong to {spec.library}"
    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        return "NUMBA_DISABLE_JIT is set"
    if spec.dtype == "float64":
        return "they compute in float32, these are float64"
    if problem.score_mod is not None or problem.mask_mod is not None:
        return "score_mod and mask_mod are called on arrays"
    bias = "float32" if terms.bias is None else _arrays.dtype_name(terms.bias)
    if bias not in _arrays.FLOATS:
        return f"they read a bias of {', '.join(_arrays.FLOATS)}, this is {bias}"
    arrays = [getattr(terms, field.name) for field in fields(terms)]
    arrays += [problem.query, problem.key, problem.value, problem.block_mask]
    given = [x for x in arrays if x is not None and _arrays.library(x) == spec.library]
    if spec.library == "torch":
        return _torch_obstacle(given)
    swapped = any(not x.dtype.isnative for x in given)
    return "the bytes of an array are not in this machine's order" if swapped else ""


def _torch_obstacle(given: list[Array]) -> str:
    """Why tensors cannot be read at their addresses, as numbers of this call alone."""
    torch = sys.modules["torch"]
    traced = (
        torch.compiler.is_compiling() or torch.jit.is_tracing()
        or torch._C._len_torch_dispatch_stack() > 0
    )  # fmt: skip
    if traced or any(type(x) not in (torch.Tensor, torch.nn.Parameter) for x in given):
        return "the tensors are being traced or are of a subclass"
    if any(torch._C._functorch.is_functorch_wrapped_tensor(x) for x in given):
        return "the tensors are being transformed (vmap, grad, jvp)"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode differentiation is on"
    if any(x.device.type != "cpu" for x in given):
        return "the tensors are not in the CPU's memory"
    if any(x.is_neg() or x._is_zerotensor() for x in given):
        return "the numbers of a tensor are not those in its memory (lazy negation, zeros)"
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        return "a tensor requires a gradient"
    return ""
