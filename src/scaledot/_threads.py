"""How many threads scaledot's own work uses, and work that signals do not reach."""

from __future__ import annotations

import operator
import os
import threading
from collections.abc import Callable

from scaledot._errors import type_error, value_error

VARIABLE = "SCALEDOT_NUM_THREADS"
_HINT = "One thread runs everything on the caller's thread."


def _checked(value: object, name: str) -> int:
    try:
        # bool counts as an int in Python; a number of threads it is not.
        count = operator.index(None if isinstance(value, bool) else value)  # type: ignore[arg-type]
    except TypeError:
        raise type_error(f"{name} must be a whole number", repr(value), _HINT) from None
    if count < 1:
        raise value_error(f"{name} must be at least 1", repr(value), _HINT)
    return count


def _default() -> int:
    text = os.environ.get(VARIABLE)
    if text:
        try:
            return _checked(int(text), VARIABLE)
        except ValueError:
            raise value_error(f"{VARIABLE} must be a whole number ≥ 1", repr(text), _HINT) from None
    # The affinity, not the machine: containers and batch systems hand out a part of it.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_num_threads: int | None = None


def set_num_threads(n: int | None) -> None:
    """Set how many threads scaledot uses for one call.

    Results do not depend on it: work is cut by lengths, never by the number of threads.
    The environment variable ``SCALEDOT_NUM_THREADS`` sets the value at start. Without both, all
    processors that this process may run on are used, and for tensors ``torch.get_num_threads()``.
    It is the kernels' number: what runs by ``impl="dense"`` or ``"blockwise"`` uses the threads of
    its array library and BLAS.

    Parameters
    ----------
    n : int or None
        At least 1; it may exceed the number of processors. None takes what was set back.

    Raises
    ------
    TypeError, ValueError
        ``n`` is not a whole number of at least 1.

    Examples
    --------
    >>> import scaledot as sd
    >>> sd.set_num_threads(1)
    >>> sd.get_num_threads()
    1
    >>> sd.set_num_threads(None)
    """
    global _num_threads
    _num_threads = None if n is None else _checked(n, "n")


def get_num_threads() -> int:
    """Return how many threads scaledot uses for one call.

    Returns
    -------
    int
        What `set_num_threads` or ``SCALEDOT_NUM_THREADS`` set, else the number of processors
        that this process may run on; calls on tensors then use ``torch.get_num_threads()``.

    Raises
    ------
    ValueError
        ``SCALEDOT_NUM_THREADS`` holds no whole number of at least 1.

    Examples
    --------
    >>> import scaledot as sd
    >>> sd.get_num_threads() >= 1
    True
    """
    return _default() if _num_threads is None else _num_threads


def is_set() -> bool:
    """Whether somebody has said how many threads to use."""
    return _num_threads is not None or bool(os.environ.get(VARIABLE))


def undisturbed(work: Callable[[], object]) -> None:
    """Run work on a thread of its own while the caller waits: Ctrl-C does not reach it.

    Numba, interrupted while it is imported or compiles, can be left unable to compile again. The
    caller is interrupted at once, and what was begun is finished behind it.
    """
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="scaledot", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no more threads, or Python is ending
        work()
        return
    thread.join()
    if failed:
        raise failed[0]
