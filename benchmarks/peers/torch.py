"""PyTorch's scaled_dot_product_attention, without compilation."""

from __future__ import annotations

import torch

from peers._tensors import tensors, to_numpy

TITLE = "PyTorch"
ENV = "torch"
REQUIREMENTS = ("torch==2.13.0", "numpy==2.4.6", "ml_dtypes==0.6.0")
FIRST_CALL_COMPILES = False


def start(threads):
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)


def variants(case, arrays):
    x = tensors(arrays)
    mask = x.get("mask", x.get("bias"))
    if case.window:
        mask = torch.from_numpy(case.dense_mask())
    options = {
        "attn_mask": mask,
        "is_causal": case.causal and mask is None,
        "enable_gqa": case.num_heads != case.num_kv_heads,
    }

    def call():
        return torch.nn.functional.scaled_dot_product_attention(
            x["query"], x["key"], x["value"], **options
        )

    return {"sdpa": lambda: (call, to_numpy)}
