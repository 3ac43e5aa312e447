"""scaledot on NumPy arrays, by the implementation that `auto` takes."""

from __future__ import annotations

import numpy as np

import scaledot as sd

TITLE = "scaledot"
ENV = ""
REQUIREMENTS = ("numpy", "numba", "ml_dtypes")
FIRST_CALL_COMPILES = True


def start(threads):
    sd.set_num_threads(threads)


def variants(case, arrays):
    options = {"causal": case.causal, "window": (case.window - 1, 0) if case.window else None}
    options |= {name: arrays[name] for name in ("mask", "bias") if name in arrays}
    query, key, value = (arrays[name] for name in ("query", "key", "value"))
    plan = sd.explain(query, key, value, **options)
    return {
        plan.implementation: lambda: (
            lambda: sd.attention(query, key, value, **options),
            np.asarray,
        )
    }
