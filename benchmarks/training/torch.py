"""PyTorch's scaled_dot_product_attention and its own gradients, without compilation."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from peers._tensors import tensors
from training._torch import pulled

TITLE = "PyTorch"
ENV = "torch"
REQUIREMENTS = ("torch==2.13.0", "numpy==2.4.6", "ml_dtypes==0.6.0")
FIRST_CALL_COMPILES = False


def start(threads):
    torch.set_num_threads(threads)


def variants(case, arrays):
    def attend(query, key, value, bias=None):
        if case.dropout:
            torch.manual_seed(1)
        return scaled_dot_product_attention(
            query, key, value, attn_mask=bias, dropout_p=case.dropout, is_causal=case.causal
        )

    return {"sdpa": lambda: pulled(case, tensors(arrays), attend)}
