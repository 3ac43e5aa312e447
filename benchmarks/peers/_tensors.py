"""Between NumPy arrays and tensors of PyTorch; NumPy's bfloat16 goes by its bits."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch


def tensors(arrays):
    """Tensors of the arrays, on the same memory."""
    result = {}
    for name, x in arrays.items():
        bits = x.dtype == ml_dtypes.bfloat16
        t = torch.from_numpy(x.view(np.uint16) if bits else x)
        result[name] = t.view(torch.bfloat16) if bits else t
    return result


def to_numpy(x):
    """Array of a tensor, in float64."""
    return x.double().numpy()
