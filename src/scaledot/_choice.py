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


def choose(problem: Problem) -> tuple[str, str]:
    """Return the implementation's name and the reason.

    ``auto`` is a pure function of the call's arguments, never of the machine's load, and never
    takes one whose memory is quadratic in the length: only ``dense``, asked for by name, is.
    """
    impl = problem.spec.impl
    if impl in ("dense", "blockwise"):
        return impl, "asked for by name"
    obstacle = _obstacle(problem) or _mod_obstacle(problem)
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
    return "kernels", "auto: compiled kernels, linear memory"


def run(problem: Problem, *, rounded: bool = False) -> State:
    """Attention without sinks by the chosen implementation.

    With ``rounded`` only ``out`` is wanted, in query's dtype: kernels round it themselves.
    """
    name, _ = choose(problem)
    if name == "dense":
        return _reference.dense(problem)
    if name == "blockwise":
        return _blockwise.blockwise(problem)
    from scaledot._bridges import cpu  # loads Numba

    try:
        return cpu.run(problem, rounded=rounded)
    except cpu.ModError:
        if problem.spec.impl == "kernels":
            raise
        return _blockwise.blockwise(problem)  # shows the error that the function raises


def weights(problem: Problem) -> Array:
    """Weights of all queries of a problem by the chosen implementation."""
    name, _ = choose(problem)
    if name == "dense":
        return _reference.dense_weights(problem)
    if name == "blockwise":
        return _blockwise.blockwise_weights(problem)
    from scaledot._bridges import cpu

    try:
        return cpu.weigh(problem)
    except cpu.ModError:
        if problem.spec.impl == "kernels":
            raise
        return _blockwise.blockwise_weights(problem)


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
    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        return "NUMBA_DISABLE_JIT is set"
    bias = "float32" if terms.bias is None else _arrays.dtype_name(terms.bias)
    if bias not in _arrays.FLOATS:
        return f"they read a bias of {', '.join(_arrays.FLOATS)}, this is {bias}"
    arrays = [getattr(terms, field.name) for field in fields(terms)]
    arrays += [problem.query, problem.key, problem.value, problem.block_mask]
    given = [x for x in arrays if x is not None and _arrays.library(x) == spec.library]
    if spec.library == "torch":
        return _torch_obstacle(given)
    if spec.library == "jax":
        return _jax_obstacle(given)
    if spec.library != "numpy":
        return f"they read arrays of NumPy, PyTorch and JAX, these belong to {spec.library}"
    swapped = any(not x.dtype.isnative for x in given)
    return "the bytes of an array are not in this machine's order" if swapped else ""


def _mod_obstacle(problem: Problem) -> str:
    """Why a user's function cannot be compiled."""
    if problem.score_mod is None and problem.mask_mod is None:
        return ""
    from scaledot._bridges import cpu

    return cpu.mod_obstacle(problem)


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


def _jax_obstacle(given: list[Array]) -> str:
    """Why JAX arrays cannot be read in the CPU's memory."""
    jax = sys.modules["jax"]
    if any(isinstance(x, jax.core.Tracer) for x in given):
        return "the arrays are being traced or transformed (jit, grad, vmap)"
    if any(d.platform != "cpu" for x in given for d in x.devices()):
        return "the arrays are not in the CPU's memory"
    if any(len(x.devices()) > 1 for x in given):
        return "an array is spread over several devices"
    return ""
