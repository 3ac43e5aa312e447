"""scaledot's `attention_vjp` on NumPy arrays."""

from __future__ import annotations

import numpy as np

import scaledot as sd

TITLE = "scaledot, `attention_vjp`"
ENV = ""
REQUIREMENTS = ("numpy", "numba", "ml_dtypes")
FIRST_CALL_COMPILES = True


def start(threads):
    sd.set_num_threads(threads)


def variants(case, arrays):
    if case.passes == "double":
        raise NotImplementedError("a pullback has no derivative of its own")
    query, key, value, grad_out = (arrays[n] for n in ("query", "key", "value", "grad_out"))
    options = {"causal": case.causal, "bias": arrays.get("bias")}
    options |= {"dropout": case.dropout, "seed": 1} if case.dropout else {}

    def call():
        out, pullback = sd.attention_vjp(query, key, value, **options)
        return out, pullback(grad_out)

    def named(result):
        found = {"out": result[0], **result[1]._asdict()}
        if case.dropout:
            n = case.len_kv
            one = np.broadcast_to(np.eye(n, dtype=key.dtype), (*key.shape[:-1], n))
            found["kept"] = sd.attention(0 * query, key, one, **options)[-1, -1] > 0
        return found

    return {"attention_vjp": lambda: (call, named)}
