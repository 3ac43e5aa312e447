"""A child that a test forks while other threads are inside of what is tested."""

import os
import signal
import warnings

import pytest

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")


def in_a_child(work):
    """Fork; return whether a function returns true in the child."""
    with warnings.catch_warnings():
        # Python 3.12 and later warn about any fork beside threads, JAX about any fork at all.
        warnings.filterwarnings("ignore", r".*multi-threaded.*fork", DeprecationWarning)
        warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
        child = os.fork()
    if not child:
        code = 1
        try:
            signal.alarm(20)  # what hangs ends by a signal
            code = 0 if work() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
