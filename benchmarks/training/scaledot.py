"""scaledot on tensors of PyTorch that require gradients."""

from __future__ import annotations

import torch

import scaledot as sd
from peers._tensors import tensors
from training._torch import pulled

TITLE = "scaledot, tensors"
ENV = ""
REQUIREMENTS = ("torch", "numpy", "numba", "ml_dtypes")
FIRST_CALL_COMPILES = True


def start(threads):
    sd.set_num_threads(threads)
    torch.set_num_threads(threads)


def variants(case, arrays):
    def attend(query, key, value, bias=None):
        return sd.attention(query, key, value, causal=case.causal, bias=bias, **options)

    options = {"dropout": case.dropout, "seed": 1} if case.dropout else {}
    return {"attention": lambda: pulled(case, tensors(arrays), attend)}
