"""What models of OpenVINO need to run on NumPy arrays."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from openvino import Core, Tensor, Type
from openvino import opset13 as ops

TYPES = {"float32": Type.f32, "float16": Type.f16, "bfloat16": Type.bf16, "bool": Type.boolean}


def tensor(x):
    """Tensor with a copy of an array, bfloat16 by its bits."""
    t, bits = Tensor(TYPES.get(x.dtype.name, Type.i32), x.shape), f"u{x.dtype.itemsize}"
    t.data.view(bits)[...] = np.ascontiguousarray(x).view(bits)
    return t


def repeated(x, case):
    """Key heads for all of a group, in the form that the kernel with a cache sees through."""
    if case.num_heads == case.num_kv_heads:
        return x
    ones = np.ones((1, 1, case.num_heads // case.num_kv_heads, 1, 1))
    x = ops.multiply(ops.unsqueeze(x, ops.constant(2)), ops.constant(ones, TYPES[case.dtype]))
    return ops.reshape(x, ops.constant([0, case.num_heads, -1, case.d]), special_zero=True)


def request_of(model, feeds, state, config):
    request = Core().compile_model(model, "CPU", config).create_infer_request()
    for i, x in enumerate(feeds):
        request.set_input_tensor(i, tensor(x))
    for variable in request.query_state():
        variable.state = tensor(state[variable.name])
    return request


def result_of(request):
    out = request.get_output_tensor(0)
    return out.data.view(ml_dtypes.bfloat16) if out.element_type == Type.bf16 else out.data
