"""Outputs of one model under several attention implementations, and what they may differ by.

Truth is the model in float64 with its own dense attention, on each sequence alone, so without any
padding. The dense attention in float32 is the yardstick: an error may be at most twice its, plus
the rounding floor ``eps * sqrt(width) * max|truth|`` of one product of the model's width.
"""

import contextlib
import copy
import math

import numpy as np
import torch

import scaledot.transformers

EPS32 = float(np.finfo(np.float32).eps)


@contextlib.contextmanager
def attending(model, implementation):
    """Let a model attend in one way for a while; yields the model."""
    scaledot.transformers.register()
    model.set_attn_implementation(implementation)
    try:
        with torch.no_grad():
            yield model
    finally:
        model.set_attn_implementation("eager")


def in_float64(model):
    """Return a copy of the model in float64."""
    return copy.deepcopy(model).double()


def assert_close(ours, dense, truth, width):
    """Assert that ours is about as close to the truth as dense is; all have one shape."""
    assert ours.shape == dense.shape == truth.shape
    assert np.isfinite(ours).all()
    error, yardstick = (np.abs(x.astype(np.float64) - truth).max() for x in (ours, dense))
    bound = 2 * yardstick + EPS32 * math.sqrt(width) * np.abs(truth).max()
    assert error <= bound, f"{error} > {bound}"
