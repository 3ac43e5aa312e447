"""Whether a model's attention is exchanged together with its masks."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from scaledot._errors import value_error

_JOINS_MASKS = "deepseek_v4"
"""This one joins masks with numbers that it adds to scores, in the mask's dtype."""

_ADDS_MASKS = "gemma4_audio"
"""This part of larger models attends by itself, in blocks, whatever implementation is set."""

_passed: dict[int, tuple[weakref.ref[Any], tuple[Any, ...]]] = {}
"""Configs that are in order, by their ids, and what that was found for."""


def adds_masks(config: Any) -> bool:
    """Whether a config is of a model that takes none but eager's masks, and does without ours."""
    return getattr(config, "model_type", None) == _ADDS_MASKS


def check(config: Any) -> None:
    """Raise for the config of a model that would use the masks made here in its own way.

    Several models ask for masks by transformers' functions, for whatever implementation is set, and
    then compute attention themselves: a mask of another kind gives wrong answers.
    """
    if config is None:
        return
    architectures = tuple(getattr(config, "architectures", None) or ())
    if torch.compiler.is_compiling():
        name = _in_the_way(type(config), architectures)
    else:
        name = _remembered(config, architectures)
    if name is not None:
        raise value_error(
            "attn_implementation='scaledot' must be given to a model whose attention "
            "transformers can exchange", f"{name}, which uses masks in its own way",
            "Use attn_implementation='eager' or 'sdpa' for this model.",
        )


def _remembered(config: Any, architectures: tuple[str, ...]) -> str | None:
    """What is found, looked for once: each pass of a model asks, for each of its masks.

    Once more where models were loaded since, of which each brings classes right below
    transformers' own, and for each config, as models have theirs.
    """
    key, found_for = id(config), (architectures, len(PreTrainedModel.__subclasses__()))
    reference, before = _passed.get(key, (None, ()))
    if reference is not None and reference() is config and before == found_for:
        return None
    name = _found(type(config), architectures)
    if name is None:
        _passed[key] = weakref.ref(config, lambda _: _passed.pop(key, None)), found_for
    return name


def _in_the_way(kind: type, architectures: tuple[str, ...]) -> str | None:
    """What is found, for a graph."""
    return _found(kind, architectures)


_constant: Any = torch.compiler.assume_constant_result
_constant(_in_the_way)  # marks it: graphs hold what it returns, not how that is found


def _found(kind: type, architectures: tuple[str, ...]) -> str | None:
    """Name of the model with such a config that uses masks in its own way, None for others.

    Classes of anybody's may have the config of a model: unless the config names its models, those
    that it came with decide, and one that can be exchanged is enough.
    """
    # Only those that are loaded are known, and one that asks for a mask is. More may come.
    models = [model for model in _subclasses(PreTrainedModel) if model.config_class is kind]
    named = [model for model in models if model.__name__ in architectures]
    beside = [model for model in models if _package(model) == _package(kind)]
    models = named or beside or models
    if getattr(kind, "model_type", None) == _JOINS_MASKS:
        return (*(model.__name__ for model in models), kind.__name__)[0]
    refused = [model.__name__ for model in models if not model._can_set_attn_implementation()]
    return refused[0] if refused and len(refused) == len(models) else None


def _package(kind: type[Any]) -> str:
    """Package of the module in which a class is."""
    return kind.__module__.rpartition(".")[0]


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    """All classes that derive from a class, those that derive directly first."""
    for derived in kind.__subclasses__():
        yield derived
        yield from _subclasses(derived)
