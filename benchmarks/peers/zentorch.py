"""AMD's zentorch: the two operators by which it replaces PyTorch's attention."""

from __future__ import annotations

import torch
import zentorch  # noqa: F401  registers the operators

from peers._tensors import tensors, to_numpy

TITLE = "zentorch"
ENV = "zentorch"
REQUIREMENTS = ("zentorch==2.13.0.2", "torch==2.13.0", "numpy==2.4.6", "ml_dtypes==0.6.0")
FIRST_CALL_COMPILES = False


def start(threads):
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)


def variants(case, arrays):
    x, ops = tensors(arrays), torch.ops.zentorch
    q, k, v = (x[name] for name in ("query", "key", "value"))
    mask = x.get("bias")
    if case.lengths:
        mask = torch.zeros(x["mask"].shape, dtype=q.dtype).masked_fill(~x["mask"], -torch.inf)

    def sdpa():
        return ops.zentorch_sdpa(q, k, v, 0.0, case.causal, attn_mask=mask)[0]

    def sdpa_attn():
        out = torch.empty_like(q)
        left = case.window - 1 if case.window else -1
        ops.zentorch_sdpa_attn(q, k, v, out, None, case.causal, None, left, -1)
        return out

    found = {} if case.window else {"sdpa": lambda: (sdpa, to_numpy)}
    return found if mask is not None else found | {"sdpa_attn": lambda: (sdpa_attn, to_numpy)}
