"""Modules of an existing model that are of another class for a while."""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn

from scaledot._errors import type_error, value_error

_lock = threading.Lock()
_scopes: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
"""How many scopes, of all threads, each module is in whose class is not its own now."""
_TO_THE_CALLER = 6
"""Frames from a warning to the ``with`` that it is about."""


@contextlib.contextmanager
def exchanged_classes(
    model: nn.Module, theirs: type[nn.Module], ours: type[nn.Module], need_weights: bool
) -> Iterator[None]:
    """Let the modules of class ``theirs`` in a model be of its subclass ``ours``.

    The modules stay the objects that they are, and all that they hold stays too.
    """
    found = _found(model, theirs, ours)
    hook: Any = calls_are_seen if need_weights else _without_weights
    with contextlib.ExitStack() as undo:
        for module in found:
            _enter(module, theirs, ours)
            undo.callback(_leave, module, theirs)
            handle = module.register_forward_pre_hook(hook, with_kwargs=not need_weights)
            undo.callback(handle.remove)
        yield


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


def _enter(module: nn.Module, theirs: type[nn.Module], ours: type[nn.Module]) -> None:
    """Change a module's class, unless another scope has done it."""
    with _lock:
        if type(module) is theirs:
            module.__class__ = ours
            _scopes[module] = 1
        elif module in _scopes:
            _scopes[module] += 1


def _leave(module: nn.Module, theirs: type[nn.Module]) -> None:
    """Change a module's class back, unless another scope is left that needs it."""
    with _lock:
        if module not in _scopes:
            return  # it was ours before
        _scopes[module] -= 1
        if not _scopes[module]:
            del _scopes[module]
            module.__class__ = theirs


def _found(
    model: nn.Module, theirs: type[nn.Module], ours: type[nn.Module]
) -> list[nn.Module]:
    """Modules of the two classes; raise where there is none, warn of those that are left."""
    if not isinstance(model, nn.Module):
        raise type_error(
            "model must be a torch.nn.Module", type(model).__name__,
            "Pass the module that contains the attention modules, or one of them.",
        )
    found, left = [], []
    for name, module in model.named_modules():
        # A forward of the module's own would hide that of its class.
        if type(module) in (theirs, ours) and "forward" not in vars(module):
            found.append(module)
        elif isinstance(module, theirs):
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
