"""ONNX Runtime: the operators Attention, MultiHeadAttention and GroupQueryAttention."""

from __future__ import annotations

import numpy as np

from peers._onnx import THREADS, one_node

TITLE = "ONNX Runtime"
ENV = "onnxruntime"
REQUIREMENTS = ("onnxruntime==1.32.0", "onnx==1.23.2", "numpy==2.4.6", "ml_dtypes==0.6.0")
FIRST_CALL_COMPILES = False


def start(threads):
    THREADS[0] = threads


def variants(case, arrays):
    heads, four = case.num_heads, {n: arrays[n] for n in ("query", "key", "value")}
    # (batch, len, heads · d), the layout of Microsoft's operators
    flat = {n: x.swapaxes(1, 2).reshape(case.batch, x.shape[2], -1) for n, x in four.items()}
    padding, bias = arrays.get("mask"), arrays.get("bias")
    mask = case.dense_mask() if case.window else bias if padding is None else padding
    found = {"Attention": (four | {"mask": mask}, {"domain": "", "is_causal": case.causal})}
    if heads == case.num_kv_heads and not case.window:
        keys = None if padding is None else padding[:, 0, 0].astype(np.int32)
        rest = {"of_qkv": None, "mask": keys, "bias": bias}
        options = {"num_heads": heads, "unidirectional": case.causal}
        found["MultiHeadAttention"] = flat | rest, options
        found["MultiHeadAttention:4-D"] = four | {"query": flat["query"]} | rest, options
    if case.causal or case.decode:
        cache = {f"past_{n}": four[n] if case.decode else None for n in ("key", "value")}
        count = {"last": np.full(case.batch, case.len_kv - 1, np.int32)}
        count["total"] = np.array([case.len_kv], np.int32)
        options = {"num_heads": heads, "kv_num_heads": case.num_kv_heads}
        options |= {"local_window_size": case.window or -1}
        new = {name: x[:, -case.len_q :] for name, x in flat.items()}  # the cache ends with it
        found["GroupQueryAttention"] = new | cache | count, options
    return {n: lambda n=n, x=x: one_node(n.split(":")[0], *x) for n, x in found.items()}
