"""The record by which a kernel knows its call, and how a kernel is run.

A record is numbers and addresses. All but a few of them follow from shapes, strides, dtypes and
options and are packed once, in `Prepared`, for all calls that are alike; `launch` adds the rest.
"""

from __future__ import annotations

import itertools
import struct
from typing import Any, NamedTuple, cast

import numpy as np

from scaledot import _arrays
from scaledot._errors import value_error
from scaledot._kernels import team, threads
from scaledot._kernels.call import CALL, VOLATILE
from scaledot._kernels.jit import Kernel
from scaledot._kernels.pack import DTYPES
from scaledot._kernels.threads import NO_LIMIT
from scaledot._typing import Array

SMALL = 2**17
"""Multiply-adds below which a call stays on the caller's thread: others take 20 us to wake."""


class ModError(ValueError):
    """A user's function raised an error inside a kernel."""


class Memory(NamedTuple):
    """Where an array lies: shape, strides in bytes, code of the dtype."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: int


def memory(x: Array) -> Memory:
    """How a NumPy array or a CPU tensor lies in memory."""
    code = DTYPES.get(_arrays.dtype_name(x), -1)
    if isinstance(x, np.ndarray):
        return Memory(x.shape, x.strides, code)
    size = x.element_size()
    return Memory(tuple(x.shape), tuple(size * s for s in x.stride()), code)


def address(x: Any) -> int:
    """Address of the first element; 0 of nothing."""
    if x is None:
        return 0
    first: int  # a cast would be one more call
    if type(x) is not np.ndarray and not isinstance(x, np.ndarray):
        first = x.data_ptr()
    else:
        first = x.__array_interface__["data"][0]
    return first


def in_order(shape: tuple[int, ...], size: int, dtype: int) -> Memory:
    """Memory of a new array."""
    steps = itertools.accumulate(reversed(shape[1:]), int.__mul__, initial=size)
    return Memory(shape, tuple(steps)[::-1], dtype)


def by_token(shape: tuple[int, ...], size: int, dtype: int) -> Memory:
    """Memory of a new array (..., num_heads, len, d) in which heads of a token are neighbours."""
    *lead, heads, rows, width = shape
    *steps, row, head, column = in_order((*lead, rows, heads, width), size, dtype).strides
    return Memory(shape, (*steps, head, row, column), dtype)


_NAMES = cast(tuple[str, ...], CALL.names)
_WHOLE, _REST = (
    struct.Struct("".join("d" if CALL[name].kind == "f" else "q" for name in names))
    for names in (_NAMES, _NAMES[len(VOLATILE) :])
)
_FORMAT = struct.Struct(f"{len(VOLATILE)}q{_REST.size}s")
_COUNTERS = struct.Struct("qq")  # the next task, the status; written whole
# All threads change the counter: nothing that they only read lies near.
_COUNTERS_AT = CALL.itemsize + 128
_PARTS_AT = _COUNTERS_AT + 128


def packed(known: dict[str, Any]) -> bytes:
    """Pack what a record holds behind that which is volatile."""
    return _REST.pack(*[known.get(name, 0) for name in _NAMES[len(VOLATILE) :]])


def whole_record(known: dict[str, Any]) -> Any:
    """A record as bytes, for what another record has the address of."""
    return np.frombuffer(_WHOLE.pack(*[known.get(name, 0) for name in _NAMES]), dtype=np.uint8)


class Prepared(NamedTuple):
    """A call but for the addresses of its arrays and its memory."""

    kernel: Kernel
    record: bytes  # what is not volatile
    keep: object  # owns what the record has addresses of
    tasks: int
    work: int  # multiply-adds, about
    scratch: int  # bytes of each worker
    parts: tuple[int, int, int]  # bytes of part_out, part_lse, finished
    shape: tuple[int, ...]  # of the result
    numbers: Any  # its dtype; None for that of query
    lse: Any = None  # dtype of lse; None where it is not wanted
    by_token: bool = False  # whether the heads of a token lie side by side in the result
    width: int = 1  # multiply-adds of a score, about


def num_workers(query: Array, work: int, tasks: int) -> int:
    """Threads that take part in a call."""
    return _crew(query, work, tasks)[0]


def _crew(query: Array, work: int, tasks: int) -> tuple[int, int]:
    """Threads that take part, and the size of PyTorch's team where it does the work, else 0."""
    if work < SMALL or tasks < 2:
        return 1, 0
    wanted, size = team.crew(query, work)
    workers = max(1, min(wanted, tasks))
    return workers, size if workers > 1 else 0


def launch(
    call: Prepared, query: Any = None, key: Any = None, value: Any = None, mask: Any = None,
    bias: Any = None, out: Any = None, lse: Any = None,
) -> None:  # fmt: skip
    """Run a kernel on these arrays, on as many threads as there is work for."""
    workers, size = _crew(query, call.work, call.tasks)
    lse_at = _PARTS_AT + call.parts[0]
    finished_at = lse_at + call.parts[1]
    scratch_at = finished_at + call.parts[2]
    room: Any = np.empty(scratch_at + workers * call.scratch, dtype=np.uint8)
    base = address(room)
    arrays = (query, key, value, mask, bias, out, lse)
    _FORMAT.pack_into(
        room, 0, base, base + _COUNTERS_AT, *[0 if x is None else address(x) for x in arrays],
        base + _PARTS_AT, base + lse_at, base + finished_at, workers, base + scratch_at,
        base + _COUNTERS_AT + 8, call.record,
    )  # fmt: skip
    _COUNTERS.pack_into(room, _COUNTERS_AT, 0, 0)
    if call.parts[2]:
        room[finished_at:scratch_at] = 0

    def stop() -> None:
        _COUNTERS.pack_into(room, _COUNTERS_AT, NO_LIMIT, 0)  # workers end after their task

    held = (call, room, arrays)
    status = threads.MORE
    if size:
        status = team.run(call.kernel.address, base, workers, size, stop, call.width)
    if status == threads.MORE:
        status = threads.run(call.kernel.address, base, workers, stop, held)
    if status == threads.LOST:
        raise RuntimeError("the process was forked, by a signal handler, in the midst of the call")
    if _COUNTERS.unpack_from(room, _COUNTERS_AT)[1]:
        raise ModError(str(value_error(
            "score_mod and mask_mod must work for every position of the call",
            "one that raised an error, for example an index out of bounds",
            "impl='blockwise' calls it on arrays and shows the error.",
        )))  # fmt: skip
