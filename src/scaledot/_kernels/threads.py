"""The pool: threads that wait in native code for a function to run together with the caller.

A worker and its caller talk through a row of 64-bit integers, the worker's *place*. Its first
number is the state:

    IDLE → CALLED (by the caller) → BUSY → IDLE (by the worker)    the normal course
    IDLE → ASLEEP (by the worker) → CALLED (who calls wakes it)    nothing to do for some time
    CALLED → IDLE (by the caller)                                  too late: nothing is left to do
    BUSY → WATCHED (by the caller, who sleeps) → IDLE (by the worker, who wakes the caller)

A worker takes part in one call at a time, whose *token* is in its place from before it is called
until the caller has collected its status. Nothing here holds a lock: neither a fork nor a signal
handler can find one held.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from scaledot._kernels import atomics, jit
from scaledot._kernels.atomics import add, invoke, load, pause, sleep, store, swap, swap_if, wake

SLICE = 2**28
"""Units of work, such as a multiply-add, between two looks at signals: well under a second."""
NO_LIMIT = 2**62
MORE = 1
"""Status of a function that came back early and wants to be called again."""
LOST = -(2**31)
"""Status of a call that was at work when its thread forked: the child has not its workers."""
MAX_WORKERS = 1023
SPINS = 200
"""Looks before a thread goes to sleep: some microseconds."""
NAP = 50_000_000
"""Nanoseconds that a caller sleeps at most before Python looks at signals."""

IDLE, ASLEEP, CALLED, BUSY, WATCHED = range(5)
# Offsets in bytes: in the place of a worker, in the head of the board, in a caller's request, whose
# others are those of a place. `LONGEST` is how long a caller may sleep; 0: there is no futex.
STATE, TOKEN, FUNCTION, CALL, WORKER, STATUS = range(0, 48, 8)
NUM_WORKERS, LOOKS, LONGEST = range(0, 24, 8)
WANTED = 0
# Two places, of 48 bytes, never share a cache line, nor a pair of lines that are fetched together.
STRIDE = 128


@jit.kernel
def serve(board, place, unused):  # type: ignore[no-untyped-def]
    """Work for whoever calls, in a place or, at first, in the next free one.

    With a futex this does not end. Without, it returns the place when the worker is to sleep; 0
    when no place is free.
    """
    if place == 0:
        number = add(board + NUM_WORKERS, 1)
        if number >= MAX_WORKERS:
            return 0
        place = board + (number + 1) * STRIDE
    while True:
        looks = load(board + LOOKS)
        while load(place) != CALLED:
            if looks > 0:
                pause()
                looks -= 1
                continue
            swap_if(place, IDLE, ASLEEP)
            while load(place) == ASLEEP:
                if load(board + LONGEST) == 0:
                    return place
                sleep(place, ASLEEP, 0)
            # Who is called too late finds IDLE, and is likely to be called again soon.
            looks = load(board + LOOKS)
        if swap_if(place, CALLED, BUSY):
            status = MORE
            while status > 0:
                function, call = load(place + FUNCTION), load(place + CALL)
                status = invoke(function, call, load(place + WORKER), NO_LIMIT)
            store(place + STATUS, status)
            # From here on the memory of the call may be gone.
            if swap(place, IDLE) == WATCHED:
                wake(place)


@jit.inlined
def summon(board, request):  # type: ignore[no-untyped-def]
    """Call as many workers as are wanted and free."""
    worker = 1
    for number in range(min(load(board + NUM_WORKERS), MAX_WORKERS)):
        if worker > load(request + WANTED):
            break
        place = board + (number + 1) * STRIDE
        if load(place + TOKEN) == 0 and swap_if(place + TOKEN, 0, load(request + TOKEN)):
            store(place + FUNCTION, load(request + FUNCTION))
            store(place + CALL, load(request + CALL))
            store(place + WORKER, worker)
            store(place + STATUS, 0)
            worker += 1
            if swap(place, CALLED) == ASLEEP:
                wake(place)


@jit.inlined
def has_left(place, looks, longest):  # type: ignore[no-untyped-def]
    """Whether a worker is at work no more; one that has not begun need not come."""
    if swap_if(place, CALLED, IDLE):
        return True
    while load(place) >= BUSY and looks > 0:
        pause()
        looks -= 1
    if longest > 0 and load(place) >= BUSY:
        swap_if(place, BUSY, WATCHED)
        sleep(place, WATCHED, longest)
    return load(place) < BUSY


@jit.kernel
def step(board, request, budget):  # type: ignore[no-untyped-def]
    """Call workers, if any are wanted; work for one budget, if there is more; see who has left.

    Returns whether to come again. The request's status is the caller's, at the end the smallest.
    """
    longest = load(board + LONGEST)
    if load(request + WANTED) > 0:
        summon(board, request)
        store(request + WANTED, 0)
        if longest == 0:
            return 1  # Python must wake them
    status = load(request + STATUS)
    if status > 0:
        status = invoke(load(request + FUNCTION), load(request + CALL), 0, budget)
        store(request + STATUS, status)
        if status > 0:
            return 1
    token = load(request + TOKEN)
    count = min(load(board + NUM_WORKERS), MAX_WORKERS)
    for number in range(count):
        place = board + (number + 1) * STRIDE
        if load(place + TOKEN) == token and not has_left(place, load(board + LOOKS), longest):
            return 1
    for number in range(count):
        place = board + (number + 1) * STRIDE
        if load(place + TOKEN) == token:
            status = min(status, load(place + STATUS))
            store(place + TOKEN, 0)
    store(request + STATUS, status)
    return 0


@jit.kernel
def alone(function, call, budget):  # type: ignore[no-untyped-def]
    """Work for one budget without others; the status."""
    return invoke(function, call, 0, budget)


@functools.cache
def _native(address: int) -> Callable[[int, int, int], int]:
    """Return what calls a native function without the GIL."""
    return ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 3)(address)


class _Pool:
    """The workers of this process."""

    def __init__(self, longest: int = NAP if atomics.HAS_FUTEX else 0) -> None:
        self.board = np.zeros((1 + MAX_WORKERS, STRIDE // 8), dtype=np.int64)
        affinity = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))
        self.board[0, LOOKS // 8] = SPINS if len(affinity(0)) > 1 else 0
        self.board[0, LONGEST // 8] = longest
        self.address = self.board.ctypes.data
        self.sleeps_in_python = longest == 0
        self.threads: list[threading.Thread] = []
        self.bells: list[queue.SimpleQueue[None]] = []
        self.held: dict[int, object] = {}

    def work(self, function: Callable[[int, int, int], int]) -> None:
        """Live as a worker; this frame keeps the board."""
        place, bell = 0, queue.SimpleQueue[None]()
        self.bells.append(bell)
        while place := function(self.address, place, 0):
            bell.get()

    def grow(self, wanted: int) -> None:
        """Start the workers that are missing, if the system lets us."""
        # Compiled here: several threads would wait for one another's compilations.
        arguments = (_native(serve.address),)
        # Late in the interpreter's exit a new thread would never come to run.
        while len(self.threads) < min(wanted, MAX_WORKERS) and not sys.is_finalizing():
            name = f"scaledot-{len(self.threads) + 1}"
            thread = threading.Thread(target=self.work, args=arguments, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError:
                break
            self.threads.append(thread)
        # Those who are on their way shall take part in the first call, which may be long.
        deadline = time.monotonic() + 1
        while self.board[0, NUM_WORKERS // 8] < len(self.threads) and time.monotonic() < deadline:
            time.sleep(1e-4)

    def share(self, request: Any) -> int:
        """Run a function on the caller's thread and on free workers until all have left."""
        do_step, place = _native(step.address), ctypes.addressof(request)
        while do_step(self.address, place, SLICE):
            if self.sleeps_in_python:
                self.wait(request)
        return int(request[STATUS // 8])

    def leave(self, request: Any, stop: Callable[[], None]) -> None:
        """Return when no worker is at work any more, whatever is raised meanwhile."""
        while True:
            with contextlib.suppress(BaseException):  # also one more Ctrl-C, before it has stopped
                with contextlib.suppress(Exception):
                    stop()
                request[WANTED // 8] = request[STATUS // 8] = 0
                self.share(request)
                return

    def wait(self, request: Any) -> None:
        """Do what a futex does elsewhere: wake those who are called, or wait for them."""
        if request[STATUS // 8] > 0:
            for bell in self.bells:
                if bell.empty():
                    bell.put(None)  # who is not called looks, and goes back to sleep
        else:
            time.sleep(1e-4)


_pool = _Pool()
_tokens = itertools.count(1)


def _after_fork() -> None:
    """Begin anew in a child, where no worker lives."""
    global _pool
    states = _pool.board[1:, STATE // 8]
    lost = states >= BUSY
    # For a call that this very thread is in the middle of: a signal handler has forked.
    _pool.board[1:, STATUS // 8][lost] = LOST
    states[lost] = IDLE
    _pool = _Pool()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def run(function: int, call: int, num_threads: int, stop: Callable[[], None], keep: object) -> int:
    """Run a native function, ``f(call, worker, budget) -> status``, on several threads.

    It takes its tasks from a counter that its threads share. The caller is worker 0 and does what
    nobody else does: who is late, busy with another call or cannot be started is not waited for.

    Parameters
    ----------
    function : int
        Address of the function.
    call : int
        The address of a description of its work.
    num_threads : int
        How many threads may work, at least 1.
    stop : callable
        Makes the function return soon; called at an exception, such as Ctrl-C, and again at each
        further one while workers are waited for.
    keep : object
        Owner of the memory at ``call``: lives until the last worker has left.

    Returns
    -------
    int
        The smallest status: 0, or that of an error.
    """
    if num_threads == 1:
        try:
            while (status := _native(alone.address)(function, call, SLICE)) > 0:
                pass
        except BaseException:
            stop()
            raise
        return status
    pool, token = _pool, next(_tokens)
    if len(pool.threads) < num_threads - 1:
        pool.grow(num_threads - 1)
    request = (ctypes.c_int64 * 6)(num_threads - 1, token, function, call, 0, MORE)
    # The frame would do, could no second Ctrl-C come just before `leave` is ready for it.
    pool.held[token] = keep
    try:
        status = pool.share(request)
    except BaseException:
        pool.leave(request, stop)
        del pool.held[token]
        raise
    del pool.held[token]
    return status
