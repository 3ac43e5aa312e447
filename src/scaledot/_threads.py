"""How many threads scaledot's own work uses, and how independent pieces of work share them."""

from __future__ import annotations

import contextlib
import operator
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from scaledot._errors import type_error, value_error

T = TypeVar("T")

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


def set_num_threads(n: int) -> None:
    """Set how many threads scaledot uses for one call.

    Results do not depend on it: work is cut by lengths, never by the number of threads.
    The environment variable ``SCALEDOT_NUM_THREADS`` sets the value at start; without it, all
    processors that this process may run on are used. PyTorch and JAX arrays that run by
    ``impl="dense"`` or ``"blockwise"`` use the threads of their own library.

    Parameters
    ----------
    n : int
        At least 1; it may exceed the number of processors.

    Raises
    ------
    TypeError, ValueError
        ``n`` is not a whole number of at least 1.

    Examples
    --------
    >>> import scaledot as sd
    >>> before = sd.get_num_threads()
    >>> sd.set_num_threads(1)
    >>> sd.get_num_threads()
    1
    >>> sd.set_num_threads(before)
    """
    global _num_threads
    _num_threads = _checked(n, "n")


def get_num_threads() -> int:
    """Return how many threads scaledot uses for one call.

    Returns
    -------
    int
        What `set_num_threads` or ``SCALEDOT_NUM_THREADS`` set, else the number of processors
        that this process may run on.

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


class _BlasLimit:
    """Keeps BLAS on one thread while calls of ours run; nested and concurrent calls share it.

    Our threads work on separate tiles: BLAS threads below them would fight for the same
    processors (measured: three times slower), and products could depend on their number.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._limiter: Any = None
        self._controller: Any = None

    def forget(self) -> None:
        """Start anew in a forked child, where no call of the parent goes on."""
        self._lock = threading.Lock()
        if self._users:
            self._users = 0
            self._limiter.restore_original_limits()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        with self._lock:
            if self._users == 0:
                if self._controller is None:
                    import threadpoolctl

                    self._controller = threadpoolctl.ThreadpoolController()
                self._limiter = self._controller.limit(limits=1, user_api="blas")
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._limiter.restore_original_limits()


_blas = _BlasLimit()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_blas.forget)


def for_each(function: Callable[[T], None], items: Sequence[T]) -> None:
    """Call function on every item, on up to `get_num_threads` threads; the first error is raised.

    BLAS stays on one thread meanwhile, also where a single item is left.
    """
    num_threads = min(get_num_threads(), len(items))
    with _blas.held():
        if num_threads <= 1:
            for item in items:
                function(item)
            return
        pool = ThreadPoolExecutor(num_threads)
        try:
            for future in [pool.submit(function, item) for item in items]:
                future.result()
        finally:
            # After an error or Ctrl-C nothing new starts; what runs ends before memory goes away.
            pool.shutdown(wait=True, cancel_futures=True)
