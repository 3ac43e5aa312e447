"""PyTorch's flex_attention, compiled."""

from __future__ import annotations

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from peers._tensors import tensors, to_numpy

TITLE = "flex_attention"
ENV = "torch"
REQUIREMENTS = ("torch==2.13.0", "numpy==2.4.6", "ml_dtypes==0.6.0")
FIRST_CALL_COMPILES = True


def start(threads):
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)


def variants(case, arrays):
    torch._dynamo.reset()
    x, options = tensors(arrays), {"enable_gqa": case.num_heads != case.num_kv_heads}
    window, lengths = case.window or case.len_kv, torch.tensor(case.lengths)
    sizes = {"Q_LEN": case.len_q, "KV_LEN": case.len_kv, "device": "cpu"}
    if case.causal:
        options["block_mask"] = create_block_mask(
            lambda b, h, i, j: (j <= i) & (i - j < window), None, None, **sizes
        )
    if case.lengths:
        options["block_mask"] = create_block_mask(
            lambda b, h, i, j: j < lengths[b], case.batch, None, **sizes
        )
    if case.bias:
        bias = x["bias"][0]
        options["score_mod"] = lambda score, b, h, i, j: score + bias[h, i, j]
    compiled = torch.compile(flex_attention, dynamic=False)
    qkv = [x[name] for name in ("query", "key", "value")]
    return {"compiled": lambda: (lambda: compiled(*qkv, **options), to_numpy)}
