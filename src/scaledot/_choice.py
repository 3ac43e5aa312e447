"""Which implementation a call runs by, and why."""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import os
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, cast

import numpy as np

from scaledot import _arrays, _blockwise, _checks, _reference, _threads
from scaledot._errors import value_error
from scaledot._spec import Options, Problem, complete, resolve
from scaledot._state import State
from scaledot._typing import Array

FLOAT32_MAX = float(np.finfo(np.float32).max)


def choose(problem: Problem, sinks: Array | None = None) -> tuple[str, str]:
    """Return the implementation's name and the reason.

    ``sinks`` are given where the implementation itself computes with them.
    ``auto`` is a pure function of the call's arguments, never of the machine's load, and never
    takes one whose memory is quadratic in the length: only ``dense``, asked for by name, is.
    """
    impl = problem.spec.impl
    if impl in ("dense", "blockwise"):
        return impl, "asked for by name"
    obstacle = _obstacle(problem, sinks) or _mod_obstacle(problem)
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


def run(
    problem: Problem, *, rounded: bool = False, with_lse: bool = False, name: Name | None = None
) -> State:
    """Attention without sinks by the chosen implementation.

    With ``rounded`` kernels give ``out`` in query's dtype, and ``lse`` only if that is wanted too:
    the others round nothing. ``name`` is that of the call for `again`.
    """
    problem = forward_only(problem)
    implementation, _ = choose(problem)
    if implementation == "dense":
        return _reference.dense(complete(problem))
    if implementation == "blockwise":
        return _blockwise.blockwise(complete(problem))
    cpu = bridge()
    here = cpu.on_host(problem)
    try:
        call = functools.partial(cpu.run, cpu.prepare(here, rounded=rounded, with_lse=with_lse))
        keep(name, problem, call)
        state = call(here.query, here.key, here.value, here.terms.mask, here.terms.bias)
        return State(*(None if x is None else cpu.back(x, problem) for x in state))
    except cpu.ModError:
        if problem.spec.impl == "kernels":
            raise
        return _blockwise.blockwise(complete(problem))  # shows the error that the function raises


def forward_only(problem: Problem) -> Problem:
    """A problem without what only its derivatives need, and would be compiled for."""
    return problem if problem.score_slope is None else replace(problem, score_slope=None)


# Calls of a model repeat: the checks and the preparation of one serve all that are alike. The name
# of a call is everything about it but the numbers in its arrays and where these lie.
Name = tuple[Any, ...]
KEPT = 256
"""Calls that are kept; the least recently used of them is dropped."""
KEPT_PAIRS = 2**10
"""Heads, over all entries of a batch, in the largest call that is kept."""
_SCALARS = frozenset(
    (type(None), bool, int, float, str, np.float64, np.float32, np.int64, np.int32)
)
MOST_NUMBERS = 64
"""Integers in an option that is a part of a name."""
_NAMELESS = ("nameless",)
_kept: OrderedDict[Name, Callable[..., Any]] = OrderedDict()


def name_of(arrays: tuple[Any, ...], window: Any, *options: Any) -> Name | None:
    """The name of a call; None where there is more to it, so that it must be looked at anew.

    Of ``arrays`` all but the first may be None.
    """
    torch = sys.modules.get("torch")
    query = type(arrays[0])
    if query is not np.ndarray and not _is_plain(torch, arrays):
        return None
    if not _SCALARS.issuperset(map(type, options)):
        options = tuple(map(_by_value, options))
        if _NAMELESS in options:
            return None
    parts: list[Any] = [query, *map(type, options), *options, window]  # True is not 1
    if window is not None:
        if type(window) is not tuple or not _SCALARS.issuperset(sides := [*map(type, window)]):
            return None
        parts += sides
    for x in arrays:
        if x is None:
            parts.append(None)
        elif query is not np.ndarray:
            keys = torch._C._dispatch_keys(x).raw_repr()  # type: ignore[union-attr]
            try:
                parts += (x.shape, x.stride(), x.dtype, keys)
            except RuntimeError:  # it has no strides, or not even a shape: sparse, nested
                return None
        elif type(x) is np.ndarray:
            parts += (x.shape, x.strides, x.dtype)
        else:
            return None
    return tuple(parts)


def _by_value(option: Any) -> Any:
    """An option as a part of a name: a short array of integers, such as lengths, is its numbers."""
    if type(option) in _SCALARS:
        return option
    kind, torch = type(option), sys.modules.get("torch")
    if torch is not None and kind is torch.Tensor:
        if option.device.type != "cpu" or option.numel() > MOST_NUMBERS:
            return _NAMELESS
        try:
            option = option.numpy()
        except (RuntimeError, TypeError):  # it is traced or transformed, or NumPy has no such dtype
            return _NAMELESS
    if type(option) is not np.ndarray or option.dtype.kind not in "iu":
        return _NAMELESS
    if option.size > MOST_NUMBERS:
        return _NAMELESS
    return kind, option.dtype.str, option.shape, option.tobytes()


def _is_plain(torch: Any, arrays: tuple[Any, ...]) -> bool:
    """Whether these are tensors that nobody traces, transforms or differentiates.

    Everything else about them is told by the keys that PyTorch dispatches by.
    """
    if torch is None or _torch_is_tracing(torch) or _is_forward_mode(torch):
        return False
    watches = torch.is_grad_enabled()
    for x in arrays:
        if x is None:
            continue
        if type(x) is not torch.Tensor and type(x) is not torch.nn.Parameter:
            return False
        if watches and x.requires_grad:
            return False
    return True


def again(name: Name | None, arrays: tuple[Any, ...]) -> Any:
    """Run a call by what is kept of one alike; None where nothing is.

    The result is what was kept gives: a State for those of `run`.
    """
    if name is None:
        return None
    call = _kept.get(name)
    if call is None or _is_jit_disabled():
        return None
    # A model's weights have gone through the caches since the last call: each function that is
    # called here costs microseconds.
    try:  # noqa: SIM105
        _kept.move_to_end(name)
    except KeyError:  # another thread may have dropped it
        pass
    return call(*arrays)


def keep(name: Name | None, problem: Problem, call: Callable[..., Any]) -> None:
    """Keep how a call of that name is run."""
    spec = problem.spec
    if name is None or spec.dropout or math.prod(spec.lead) * spec.num_heads > KEPT_PAIRS:
        return
    # Without a lock, which a fork might find held: several threads may drop one too many.
    _kept[name] = call
    while len(_kept) > KEPT:
        with contextlib.suppress(KeyError):
            _kept.popitem(last=False)


def is_mod_error(error: Exception) -> bool:
    """Whether a user's function raised an error inside a kernel, which does not know which."""
    return isinstance(error, bridge().ModError)


def weights_of(query: Array, key: Array, options: Options, rows: Any) -> Array:
    """Do the work of `scaledot.attention_weights`."""
    _checks.operands(query=query, key=key)
    empty_value = key[..., :0]  # weights need no values
    index = None if rows is None else _row_index(rows, query)
    problem = resolve(query, key, empty_value, options, rows=index)
    result = weights(problem)
    return result[0, ...] if problem.spec.matrix else result


def _row_index(rows: Any, query: Array) -> Any:
    """Row numbers as a NumPy array of non-negative integers."""
    hint = "Pass indices of queries, for example rows=[0, -1] or numpy.arange(8)."
    known = _checks.integers("rows", rows, hint)
    length = query.shape[-2]
    if np.any((known < -length) | (known >= length)):
        raise value_error(
            f"rows must lie between -{length} and {length - 1} for len_q = {length}",
            f"{known.min()} to {known.max()}", hint,
        )
    return np.where(known < 0, known + length, known)


def weights(problem: Problem) -> Array:
    """Weights of all queries of a problem by the chosen implementation."""
    problem = forward_only(problem)
    name, _ = choose(problem, problem.sinks)
    if name == "dense":
        return _reference.dense_weights(complete(problem))
    if name == "blockwise":
        return _blockwise.blockwise_weights(complete(problem))
    cpu = bridge()
    try:
        return cpu.weigh(problem)
    except cpu.ModError:
        if problem.spec.impl == "kernels":
            raise
        return _blockwise.blockwise_weights(complete(problem))


def tiles(problem: Problem) -> _blockwise.Tiles:
    """Work and memory of the chosen implementation."""
    problem = forward_only(problem)
    name, _ = choose(problem)
    if name == "kernels":
        return cast(_blockwise.Tiles, bridge().tiles(problem))
    return _blockwise.tiles(complete(problem), in_blocks=name == "blockwise")


def _is_jit_disabled() -> bool:
    return os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0")


def _obstacle(problem: Problem, sinks: Array | None) -> str:
    """Why the kernels cannot do a call; empty where they can."""
    spec, terms = problem.spec, problem.terms
    if _is_jit_disabled():
        return "NUMBA_DISABLE_JIT is set"
    if spec.dtype != "float64" and abs(spec.scale) > FLOAT32_MAX:
        return f"they scale in float32, which does not hold {spec.scale}"
    bias = "float32" if terms.bias is None else _arrays.dtype_name(terms.bias)
    if bias not in _arrays.FLOATS:
        return f"they read a bias of {', '.join(_arrays.FLOATS)}, this is {bias}"
    arrays = [getattr(terms, field.name) for field in fields(terms)]
    arrays += [problem.query, problem.key, problem.value, problem.block_mask, sinks]
    arrays += problem.places[:-1]
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
    return str(bridge().mod_obstacle(problem))


def _torch_obstacle(given: list[Array]) -> str:
    """Why tensors cannot be read at their addresses, as numbers of this call alone."""
    torch = sys.modules["torch"]
    plain = (torch.Tensor, torch.nn.Parameter)
    if _torch_is_tracing(torch) or any(type(x) not in plain for x in given):
        return "the tensors are being traced or are of a subclass"
    if any(torch._C._functorch.is_functorch_wrapped_tensor(x) for x in given):
        return "the tensors are being transformed (vmap, grad, jvp)"
    if _is_forward_mode(torch):
        return "forward-mode differentiation is on"
    if any(x.device.type != "cpu" for x in given):
        return "the tensors are not in the CPU's memory"
    if any(x.is_neg() or x._is_zerotensor() for x in given):
        return "the numbers of a tensor are not those in its memory (lazy negation, zeros)"
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        return "a tensor requires a gradient"
    return ""


def _is_forward_mode(torch: Any) -> bool:
    """Whether tangents are carried along; inside of a Function, whose rules do so, they are not."""
    return bool(torch.autograd.forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled())


def _torch_is_tracing(torch: Any) -> bool:
    return bool(
        torch.compiler.is_compiling() or torch._C._is_tracing()
        or torch._C._len_torch_dispatch_stack() > 0
    )  # fmt: skip


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


def bridge() -> Any:
    """What runs kernels; the first time, Numba is imported."""
    if "scaledot._bridges.cpu" not in sys.modules:
        _threads.undisturbed(functools.partial(importlib.import_module, "scaledot._bridges.cpu"))
    from scaledot._bridges import cpu

    return cpu
