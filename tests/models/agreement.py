"""One model under several attention implementations.

Truth is the model in float64 with its own dense attention, on each sequence alone, so without any
padding; the yardstick is that attention in float32. `compare.assert_close` is the rule, its
``len_kv`` the model's width: behind each attention come sums over that.
"""

import contextlib
import copy
import importlib
import math

import pytest
import torch

from fetch_weights import FetchError


def fetched(load, *arguments):
    """Return what a loader of weights returns; without its package the test is skipped."""
    try:
        return load(*arguments)
    except FetchError as error:
        pytest.skip(f"a package that carries data cannot be had: {error}")


def switched(model, implementation):
    """Return the model, its attention computed by this implementation from now on."""
    # Not at the top: tests that need no transformers share what else is here.
    importlib.import_module("scaledot.transformers").register()
    model.set_attn_implementation(implementation)
    return model


@contextlib.contextmanager
def attending(model, implementation):
    """Let a model attend in one way for a while; yields the model."""
    try:
        with torch.no_grad():
            yield switched(model, implementation)
    finally:
        model.set_attn_implementation("eager")


def in_float64(model):
    """Return a copy of the model in float64."""
    return copy.deepcopy(model).double()


def with_random_weights(model):
    """A model whose attention matters: its weights are larger than at the start of training."""
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=1.5 / math.sqrt(parameter[0].numel()))
        elif "norm" not in name and parameter.dim():
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()
