"""Attention as a model of OpenVINO, plain and with keys and values kept as its state."""

from __future__ import annotations

import numpy as np
from openvino import Model, PartialShape, Type, op, opset6
from openvino import opset13 as ops

from peers._openvino import TYPES, repeated


def plain(case, feeds):
    """Query, key, value and perhaps a mask are inputs."""
    inputs = [ops.parameter(x.shape, TYPES[x.dtype.name]) for x in feeds]
    q, k, v, *mask = inputs
    keys = (repeated(x, case) for x in (k, v))
    causal = case.causal and not mask
    return Model([ops.scaled_dot_product_attention(q, *keys, *mask, causal=causal)], inputs, "")


def with_cache(case):
    """One token's query, key and value are inputs, and join what the state holds."""
    kind, beam = TYPES[case.dtype], ops.parameter(PartialShape([-1]), Type.i32)
    heads = (case.num_heads, case.num_kv_heads, case.num_kv_heads)
    inputs = [ops.parameter(PartialShape([-1, h, -1, case.d]), kind) for h in heads]
    keys, kept = [], []
    for name, new in zip(("key", "value"), inputs[1:], strict=True):
        info = op.util.VariableInfo()
        info.data_shape, info.data_type, info.variable_id = new.get_partial_shape(), kind, name
        variable = op.util.Variable(info)
        empty = ops.constant(np.zeros((case.batch, case.num_kv_heads, 0, case.d)), kind)
        past = ops.gather(opset6.read_value(empty, variable), beam, ops.constant(0))
        keys.append(ops.concat([past, new], 2))
        kept.append(opset6.assign(keys[-1], variable))
    out = ops.scaled_dot_product_attention(inputs[0], *(repeated(x, case) for x in keys))
    return Model([ops.result(out)], kept, [*inputs, beam], "")
