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
from typing import Any

from scaledot import _threads
from scaledot._kernels import jit
from scaledot._kernels.atomics import add, invoke, load, store

LEAST_WORK, MOST_WORK = 2**20, 2**34
"""Multiply-adds of the calls for a team: ten microseconds to a fraction of a second.

A team waits for all its threads, even where another program has a processor to itself for some
milliseconds; the pool waits for nobody who has not begun. Signals wait until a call ends, and where
it takes longer the first milliseconds do not matter.
"""
NO_LIMIT = 2**62
# Offsets in a request.
FUNCTION, CALL, WORKERS, NEXT, STATUS = range(0, 40, 8)


@jit.kernel
def take_part(request):  # type: ignore[no-untyped-def]
    """Do a call together with the other threads of the team."""
    worker = add(request + NEXT, 1)
    if worker < load(request + WORKERS):
        status = 1
        while status > 0:
            function, call = load(request + FUNCTION), load(request + CALL)
            status = invoke(function, call, worker, NO_LIMIT)
        if status < 0:
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
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(x, torch.Tensor) else None


def num_threads(query: Any) -> int:
    """Threads for a call: those that were asked for, else for tensors as many as PyTorch's."""
    torch = _torch_of(query)
    if torch is None or _threads.is_set():
        return _threads.get_num_threads()
    return int(torch.get_num_threads())


def may_do(query: Any, work: int, size: int) -> bool:
    """Whether a call of so many multiply-adds is for a team of that size.

    One of another size than PyTorch's operators want would be taken apart after each call. A child
    of a fork has no team: its threads have stayed behind.
    """
    torch = _torch_of(query)
    if torch is None or _is_child or not LEAST_WORK <= work < MOST_WORK:
        return False
    return torch.get_num_threads() == size and _parallel() is not None


def run(function: int, call: int, workers: int, size: int) -> int:
    """Run a native function as `threads.run` does, on the first threads of the team to come.

    It returns when all have left.
    """
    request = (ctypes.c_int64 * 5)(function, call, workers)
    _parallel()(take_part.address, ctypes.addressof(request), size, 0)
    return int(request[STATUS // 8])
