"""What the ways in for PyTorch's users share: whose tensors these are, autocast, seeds, scopes."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import has_torch_function

from scaledot._arrays import is_distributed
from scaledot._errors import type_error


def is_ours(**arguments: Tensor | None) -> bool:
    """Whether all are plain tensors in the CPU's memory; raise for anything but tensors."""
    tensors = []
    for name, x in arguments.items():
        if isinstance(x, Tensor):
            tensors.append(x)
        elif x is not None or not name.endswith("mask"):
            raise type_error(
                f"{name} must be a torch.Tensor", type(x).__name__,
                "Arrays of other libraries go to scaledot.attention.",
            )
    if any(
        x.device.type != "cpu" or x.is_nested or x.layout != torch.strided
        or (type(x) is not Tensor and is_distributed(x))
        for x in tensors
    ):  # fmt: skip
        return False
    # An active mode (a default device is one) is no class with rules of its own.
    return not (has_torch_function(tuple(tensors)) and any(map(_has_rules, tensors)))


def _has_rules(tensor: Tensor) -> bool:
    """Whether the tensor's class answers calls of PyTorch's functions in its own way."""
    rule = getattr(type(tensor).__torch_function__, "__func__", None)
    plain = getattr(Tensor.__torch_function__, "__func__", None)
    return rule is not None and rule is not plain


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Dtype of autocast on a device; None where it is off, or where there is none."""
    kind = device.type
    if kind != "cpu" and not torch.amp.is_autocast_available(kind):
        return None
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def cast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what autocast on query's device makes of them: all but float64 in its dtype."""
    dtype = autocast_dtype(query.device)
    if dtype is None:
        return query, key, value
    query, key, value = (
        x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x
        for x in (query, key, value)
    )
    return query, key, value


def no_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Switch autocast on a device off: it would round what attention holds in float32."""
    if autocast_dtype(device) is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def seeds(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """One seed of PyTorch's generator for each entry of the leading axes, broadcast.

    In a tensor: what compiles, checkpoints or differentiates the call keeps it, and computes with
    one mask forwards and backwards.
    """
    broadcast: Any = torch.broadcast_shapes
    try:
        lead = broadcast(*(x.shape[:-3] for x in (query, key, value)))
    except RuntimeError:
        lead = ()  # of a call that is an error, and attention says which
    return torch.randint(2**63 - 1, lead, dtype=torch.int64, device=query.device)


_lock = threading.RLock()
"""Held while a shared change is made or taken back."""
_changes: weakref.WeakSet[Shared] = weakref.WeakSet()


class Shared:
    """A change to the whole process that holds while any thread is inside of its scope.

    Who enters first makes it, who leaves last takes it back. A child that is forked has the scopes
    of the thread that forks: no other lives there to leave.
    """

    def __init__(self, change: Callable[[], contextlib.AbstractContextManager[object]]) -> None:
        self._change, self._undo = change, contextlib.ExitStack()
        self._inside: dict[object, int] = {}  # the thread that each scope is of
        _changes.add(self)

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Be inside."""
        scope = object()
        with _lock:
            if not self._inside:
                self._undo.enter_context(self._change())
            self._inside[scope] = threading.get_ident()
        try:
            yield
        finally:
            with _lock:
                self._inside.pop(scope, None)
                self._leave()

    def keep(self, thread: int) -> None:
        """End the scopes of all other threads."""
        self._inside = {scope: of for scope, of in self._inside.items() if of == thread}
        self._leave()

    def _leave(self) -> None:
        """Take the change back where nobody is inside."""
        if not self._inside:
            self._undo.close()


def _after_fork() -> None:
    """Begin anew in a child, where the thread that forked is the only one."""
    try:
        for change in _changes:
            change.keep(threading.get_ident())
    finally:
        _lock.release()


# A child that is forked while another thread makes a change would wait for ever for its end.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_after_fork
    )


@contextlib.contextmanager
def _without_fast_path() -> Iterator[None]:
    """Switch off PyTorch's native path of inference, which does not call its function."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


no_fast_path = Shared(_without_fast_path)
