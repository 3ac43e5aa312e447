"""Figures of scaledot alone, each measured in a process of its own.

    python special.py weights | memory | first | beside

prints JSON. ``first`` times itself, imports included, so nothing is imported above.
"""

import time

START = time.perf_counter()

import json  # noqa: E402
import sys  # noqa: E402
from typing import Any  # noqa: E402


def weights() -> dict[str, float]:
    """Seconds of `attention_weights` of 16 rows of (1, 8, 8192, 64): median of 20 calls."""
    import numpy as np

    import scaledot as sd

    rng = np.random.default_rng(0)
    query, key = (rng.standard_normal((1, 8, 8192, 64), dtype=np.float32) for _ in range(2))
    rows, seconds = np.arange(16) * 500, []
    for _ in range(23):
        start = time.perf_counter()
        sd.attention_weights(query, key, rows=rows)
        seconds.append(time.perf_counter() - start)
    return {"seconds": sorted(seconds[3:])[10]}


def memory() -> dict[str, float]:
    """MiB that one call on (1, 1, 32768, 64) needs besides arguments and result."""
    import numpy as np

    import scaledot as sd
    from worker import measured, settle

    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 1, 32768, 64), dtype=np.float32)
    sd.attention(*[x[:, :, :600]] * 3)
    settle()
    out, _, extra = measured(lambda: sd.attention(x, x, x))
    return {"mib": extra - out.nbytes / 2**20}


def first() -> dict[str, float]:
    """Seconds from before the imports until the first result is there."""
    import numpy as np

    import scaledot as sd

    x = np.ones((1, 8, 1024, 64), dtype=np.float32)
    sd.attention(x, x, x, causal=True)
    return {"seconds": time.perf_counter() - START}


def beside() -> dict[str, float]:
    """Seconds of PyTorch's own attention before scaledot is loaded, between its calls, and after.

    Medians of 30 calls on (1, 8, 1024, 64) of float32.
    """
    import torch

    x = torch.ones(1, 8, 1024, 64)

    def pytorch() -> None:
        torch.nn.functional.scaled_dot_product_attention(x, x, x)

    def median(*calls: Any) -> float:
        """Of the first call's seconds; the others are made in between."""
        seconds = []
        for _ in range(33):
            start = time.perf_counter()
            calls[0]()
            seconds.append(time.perf_counter() - start)
            for call in calls[1:]:
                call()
        return sorted(seconds[3:])[15]

    found = {"before": median(pytorch)}
    import scaledot as sd

    sd.attention(x, x, x)
    found["between"] = median(pytorch, lambda: sd.attention(x, x, x))
    found["after"] = median(pytorch)
    return found


if __name__ == "__main__":
    measures = {"weights": weights, "memory": memory, "first": first, "beside": beside}
    print(json.dumps(measures[sys.argv[1]]()))
