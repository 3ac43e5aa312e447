"""Memory and time of a call, as the lessons and the demo report them."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from typing import Any

_PAUSE = 0.2


def extra_memory(call: Callable[[], Any]) -> tuple[Any, int]:
    """Return the call's result, and the bytes held at its peak besides the result.

    Python and NumPy report to ``tracemalloc``; what other libraries allocate is not seen. The
    call runs once before: the modules that a first call loads are not its memory.
    """
    call()
    running = tracemalloc.is_tracing()
    if not running:
        tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        result = call()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        if not running:
            tracemalloc.stop()
    return result, max(0, peak - before - int(result.nbytes))


def best_seconds(call: Callable[[], Any], repeats: int) -> float:
    """Shortest time of the call over some repeats; one more, before them, is not counted.

    The shortest is the one that other work on the machine disturbed least.
    """
    # Idle threads of other libraries, which ran just before, spin for a while on our processors:
    # without the pause a call of PyTorch after one of NumPy takes a hundred times longer.
    time.sleep(_PAUSE)
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)
