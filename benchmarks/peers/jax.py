"""JAX's dot_product_attention, jitted, in JAX's layout (batch, len, num_heads, d)."""

from __future__ import annotations

import os

import numpy as np

TITLE = "JAX"
ENV = "jax"
REQUIREMENTS = ("jax==0.10.2", "numpy==2.4.6", "ml_dtypes==0.6.0")
FIRST_CALL_COMPILES = False


def start(threads):
    # XLA counts the processors that it may use when it starts, and has no other setting.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    import jax

    jax.config.update("jax_platforms", "cpu")


def variants(case, arrays):
    import jax

    jax.config.update("jax_enable_x64", case.dtype == "float64")
    given = [jax.numpy.asarray(arrays[n].swapaxes(1, 2)) for n in ("query", "key", "value")]
    given += [None if n not in arrays else jax.numpy.asarray(arrays[n]) for n in ("bias", "mask")]
    window = (case.window - 1, 0) if case.window else None

    def attention(q, k, v, bias, mask):
        return jax.nn.dot_product_attention(
            q, k, v, bias, mask, is_causal=case.causal, local_window_size=window
        )

    def build():
        compiled = jax.jit(attention).lower(*given).compile()
        return lambda: compiled(*given).block_until_ready(), lambda y: np.asarray(y).swapaxes(1, 2)

    return {"xla": build}
