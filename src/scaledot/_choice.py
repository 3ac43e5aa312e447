"""Which implementation a call runs by, and why."""

from __future__ import annotations

from scaledot import _blockwise, _reference
from scaledot._errors import value_error
from scaledot._spec import Problem
from scaledot._state import State


def choose(problem: Problem) -> tuple[str, str]:
    """Return the implementation's name and the reason.

    ``auto`` is a pure function of the call's arguments, never of the machine's load, and never
    takes one whose memory is quadratic in the length: only ``dense``, asked for by name, is.
    """
    impl = problem.spec.impl
    if impl == "kernels":
        raise value_error(
            "impl='kernels' needs compiled kernels, which this version does not contain",
            "impl='kernels'",
            "Use impl='auto', which takes the fastest implementation there is.",
        )
    if impl == "auto":
        return "blockwise", "auto: linear memory, for arrays of every library and device"
    return impl, "asked for by name"


def run(problem: Problem) -> State:
    """Attention without sinks by the chosen implementation."""
    name, _ = choose(problem)
    return _reference.dense(problem) if name == "dense" else _blockwise.blockwise(problem)
