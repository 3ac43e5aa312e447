"""Attention modules of an existing model that are of another class for a while."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn

from scaledot._errors import type_error, value_error

_lock = threading.RLock()
"""Held while modules change."""
_open: weakref.WeakKeyDictionary[contextlib.ExitStack, int] = weakref.WeakKeyDictionary()
"""What ends each scope, and the thread that it is of."""
_scopes: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
"""How many scopes, of all threads, each module is in whose class is not its own now."""
_TO_THE_CALLER = 6
"""Frames from a warning to the ``with`` that it is about."""


@contextlib.contextmanager
def exchanged_modules(
    model: nn.Module, ours: type[nn.MultiheadAttention], need_weights: bool
) -> Iterator[None]:
    """Let PyTorch's attention modules in a model be of the subclass ``ours``.

    The modules stay the objects that they are, and all that they hold stays too. A child that is
    forked has the scopes of the thread that forks: no other lives there to end its own.
    """
    found = _found(model, ours)
    hook: Any = calls_are_seen if need_weights else _without_weights
    undo = contextlib.ExitStack()
    try:
        with _lock:
            _open[undo] = threading.get_ident()
            for module in found:
                _enter(module, ours)
                undo.callback(_leave, module)
                handle = module.register_forward_pre_hook(hook, with_kwargs=not need_weights)
                undo.callback(handle.remove)
        yield
    finally:
        _end(undo)


def _end(undo: contextlib.ExitStack) -> None:
    """End a scope."""
    with _lock:
        _open.pop(undo, None)
        undo.close()


def _after_fork() -> None:
    """Begin anew in a child, where the thread that forked is the only one."""
    try:
        for undo in [undo for undo, of in _open.items() if of != threading.get_ident()]:
            _end(undo)
    finally:
        _lock.release()


# A child that is forked while another thread changes modules would wait for ever for its end.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_after_fork
    )


def calls_are_seen(module: nn.Module, arguments: tuple[Any, ...]) -> None:
    """Hook without an effect: where a module has one, encoders of PyTorch call the module.

    Otherwise they would compute, in inference, with its parameters alone.
    """


def _without_weights(
    module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Hook that asks for no weights, whatever the caller has asked for."""
    # Its place behind query, key, value and key_padding_mask.
    if len(arguments) > 4:
        return (*arguments[:4], False, *arguments[5:]), options
    return arguments, options | {"need_weights": False}


def _enter(module: nn.MultiheadAttention, ours: type[nn.MultiheadAttention]) -> None:
    """Change a module's class, unless another scope has done it."""
    if type(module) is nn.MultiheadAttention:
        module.__class__ = ours
        _scopes[module] = 1
    elif module in _scopes:
        _scopes[module] += 1


def _leave(module: nn.MultiheadAttention) -> None:
    """Change a module's class back, unless another scope is left that needs it."""
    if module not in _scopes:
        return  # it was ours before
    _scopes[module] -= 1
    if not _scopes[module]:
        del _scopes[module]
        module.__class__ = nn.MultiheadAttention


def _found(
    model: nn.Module, ours: type[nn.MultiheadAttention]
) -> list[nn.MultiheadAttention]:
    """Modules of the two classes; raise where there is none, warn of those that are left."""
    if not isinstance(model, nn.Module):
        raise type_error(
            "model must be a torch.nn.Module", type(model).__name__,
            "Pass the module that contains the attention modules, or one of them.",
        )
    found: list[nn.MultiheadAttention] = []
    left = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.MultiheadAttention):
            continue
        # A forward of the module's own would hide that of its class.
        if type(module) in (nn.MultiheadAttention, ours) and "forward" not in vars(module):
            found.append(module)
        else:
            left.append(f"{type(module).__name__} at {name or 'the model itself'}")
    if not found:
        raise value_error(
            "model must contain torch.nn.MultiheadAttention, not only what derives from it",
            ", ".join(left) or "none",
            "Run it within scaledot.torch.patched(), which routes calls of PyTorch's function.",
        )
    if left:
        warnings.warn(
            f"left as it is, computing attention in its own way: {', '.join(left)}",
            stacklevel=_TO_THE_CALLER,
        )
    return found
