"""The threads of PyTorch's own OpenMP, for calls on its tensors.

After each of PyTorch's operators they spin for some milliseconds in case another one follows, and
any other thread has to share the processors with them. README.md has what that cost. So calls on
tensors are given to the very threads that spin, by the entry point of OpenMP that compilers call
for a parallel region.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from scaledot import _threads
from scaledot._kernels import jit, threads
from scaledot._kernels.atomics import add, invoke, load, store

LEAST_WORK, MOST_WORK = 2**19, 2**34
"""Multiply-adds of the calls for a team: some microseconds to a fraction of a second.

A team waits for all its threads, even where another program has a processor to itself for some
milliseconds; the pool waits for nobody who has not begun. Where a call takes longer, the first
milliseconds do not matter.
"""
SLICE, PER_SCORE = 2**32, 64
"""Units of work of a thread between two looks at signals, under a tenth of a second, if a score
counts for so many more than kernels count: its exponential takes time whatever the widths."""
# Offsets in a request.
FUNCTION, CALL, WORKERS, NEXT, STATUS, MORE, BUDGET = range(0, 56, 8)
_Request = ctypes.c_int64 * 7


@jit.kernel
def take_part(request):  # type: ignore[no-untyped-def]
    """Do a slice of a call together with the other threads of the team."""
    worker = add(request + NEXT, 1)
    if worker < load(request + WORKERS):
        function, call = load(request + FUNCTION), load(request + CALL)
        status = invoke(function, call, worker, load(request + BUDGET))
        if status > 0:
            store(request + MORE, 1)
        elif status < 0:
            store(request + STATUS, status)
    return 0


@functools.cache
def _parallel() -> Any:
    """PyTorch's entry point of OpenMP, None where it has none."""
    with contextlib.suppress(OSError, AttributeError):
        # Looked up through a module of PyTorch, it is the one that PyTorch itself is linked to.
        start = ctypes.CDLL(sys.modules["torch"]._C.__file__).GOMP_parallel
        start.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        start.restype = None
        return start
    return None


_is_child = False


def _after_fork() -> None:
    global _is_child
    _is_child = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _torch_of(x: Any) -> Any:
    """PyTorch, if x is a tensor of it."""
    if isinstance(x, np.ndarray):  # before PyTorch, which another thread may be importing
        return None
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(x, torch.Tensor) else None


def num_threads(query: Any) -> int:
    """Threads for a call: those that were asked for, else for tensors as many as PyTorch's."""
    return crew(query, 0)[0]


def crew(query: Any, work: int) -> tuple[int, int]:
    """Threads for a call of so many multiply-adds, and the size of the team, 0 for the pool.

    A team of another size than PyTorch's operators want would be taken apart after each call. A
    child of a fork has no team: its threads have stayed behind.
    """
    torch = _torch_of(query)
    if torch is None:
        return _threads.get_num_threads(), 0
    size = int(torch.get_num_threads())
    wanted = _threads.get_num_threads() if _threads.is_set() else size
    is_for_team = LEAST_WORK <= work < MOST_WORK and size == wanted and not _is_child
    return wanted, size if is_for_team and _parallel() is not None else 0


def run(
    function: int, call: int, workers: int, size: int, stop: Callable[[], None], width: int
) -> int:
    """Run a native function as `threads.run` does, on the first threads of the team to come.

    ``width`` is how many multiply-adds belong to a score. It returns when all have left; with
    `threads.MORE` in a child that a signal handler has forked between two slices.
    """
    budget = SLICE * width // (width + PER_SCORE)
    request = _Request(function, call, workers, 0, 0, 0, budget)
    try:
        while not _is_child:
            _parallel()(take_part.address, ctypes.addressof(request), size, 0)
            *_, status, more, _ = request
            if status or not more:
                return status
            request[NEXT // 8] = request[MORE // 8] = 0
    except BaseException:
        stop()
        raise
    return threads.MORE
