"""ONNX models of a single node, as callables."""

from __future__ import annotations

import numpy as np
import onnxruntime
from onnx import helper

THREADS = [1]
PRESENT = {"present_key": "past_key", "present_value": "past_value"}


def model_of(operator, feeds, names, outputs, attributes):
    types = {name: helper.np_dtype_to_tensor_dtype(x.dtype) for name, x in feeds.items()}
    given = [helper.make_tensor_value_info(n, types[n], x.shape) for n, x in feeds.items()]
    results = [helper.make_tensor_value_info(n, types["query"], None) for n in outputs]
    node = helper.make_node(operator, names, outputs, **attributes)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph([node], operator, given, results)
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


def one_node(operator, feeds, attributes):
    """Return a call that runs the node; inputs in their order, None for one left out."""
    attributes = {"domain": "com.microsoft"} | attributes
    names = [name if x is not None else "" for name, x in feeds.items()]
    feeds = {name: np.ascontiguousarray(x) for name, x in feeds.items() if x is not None}
    outputs = ["out", *(PRESENT if operator == "GroupQueryAttention" else ())]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = THREADS[0], 4
    model = model_of(operator, feeds, names, outputs, attributes)
    session = onnxruntime.InferenceSession(model, options)
    io, values = session.io_binding(), {}
    for name, x in feeds.items():
        values[name] = onnxruntime.OrtValue.ortvalue_from_numpy(x)
        io.bind_ortvalue_input(name, values[name])
    for name in outputs:  # a cache is written in place
        old = values.get(PRESENT.get(name))
        io.bind_ortvalue_output(name, old) if old else io.bind_output(name)
    return lambda: session.run_with_iobinding(io), lambda _: io.get_outputs()[0].numpy()
