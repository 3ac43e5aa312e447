"""OpenVINO's scaled_dot_product_attention; to decode, also with the cache as state."""

from __future__ import annotations

import numpy as np

from peers._openvino import request_of, result_of
from peers._openvino_models import plain, with_cache

TITLE = "OpenVINO"
ENV = "openvino"
REQUIREMENTS = ("openvino==2026.4.1", "numpy==2.4.6", "ml_dtypes==0.6.0")
FIRST_CALL_COMPILES = False
HINTS = {"float32": ("f32",), "bfloat16": ("bf16",), "float16": ("f16", "f32")}
CONFIG = {"PERFORMANCE_HINT": "LATENCY"}


def start(threads):
    CONFIG["INFERENCE_NUM_THREADS"] = threads


def variants(case, arrays):
    query, key, value = (arrays[name] for name in ("query", "key", "value"))
    feeds = [query, key, value, *([case.dense_mask()[None, None]] if case.window else [])]
    feeds += [arrays[name] for name in ("mask", "bias") if name in arrays]
    # The last key is the new one. Each call adds it once more, which changes the time little.
    cache = {"key": key[:, :, :-1], "value": value[:, :, :-1]}
    new = [query, key[:, :, -1:], value[:, :, -1:], np.arange(case.batch, dtype=np.int32)]

    def build(hint, model, feeds):
        config = CONFIG | {"INFERENCE_PRECISION_HINT": hint, "KV_CACHE_PRECISION": hint}
        request = request_of(model, feeds, cache, config)
        return request.infer, lambda _: result_of(request)

    found = {}
    for hint in HINTS.get(case.dtype, ()):
        found[f"plain {hint}"] = lambda h=hint: build(h, plain(case, feeds), feeds)
        if case.decode:
            found[f"with cache {hint}"] = lambda h=hint: build(h, with_cache(case), new)
    return found
