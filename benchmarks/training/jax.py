"""JAX's dot_product_attention and its gradients in one jitted function, in JAX's layout."""

from __future__ import annotations

import numpy as np

from peers.jax import start  # noqa: F401

TITLE = "JAX"
ENV = "jax"
REQUIREMENTS = ("jax==0.10.2", "numpy==2.4.6", "ml_dtypes==0.6.0")
FIRST_CALL_COMPILES = False


def variants(case, arrays):
    import jax

    if case.dropout:
        raise NotImplementedError("dot_product_attention has no dropout")
    given = [jax.numpy.asarray(turned(n, arrays[n])) for n in ("grad_out", *case.shapes)]

    def both(grad_out, *inputs):
        out, pull = jax.vjp(attention, *inputs)
        return out, *pull(grad_out)

    def attention(query, key, value, bias=None):
        return jax.nn.dot_product_attention(query, key, value, bias, is_causal=case.causal)

    def build():
        compiled = jax.jit(both).lower(*given).compile()
        return lambda: jax.block_until_ready(compiled(*given)), named

    def named(results):
        return {n: turned(n, np.asarray(x)) for n, x in zip(case.results, results, strict=True)}

    return {"xla": build}


def turned(name, x):
    return x if name == "bias" else x.swapaxes(1, 2)
