"""A result on its way into a file: a failure leaves nothing behind, or what can be continued."""

from __future__ import annotations

import errno
import math
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from scaledot import _targets
from scaledot._errors import type_error, value_error
from scaledot.cli._files import FORMATS, NDArrayAny, safetensors_module
from scaledot.cli._partial import Call, Partial, Place, sync_folder

SYNC_SECONDS = 2.0
"""Time between two entries of the journal; each waits for the disk."""

# Room for the names and headers of a converted file, and bytes written at once.
_OVERHEAD = 4096
_PIECE = 2**20


def check_output(path: Path, *, force: bool) -> None:
    """Raise unless a file may be made at ``path``."""
    _targets.check(path, "output", FORMATS, "The ending is the format.", overwrite=force)
    if path.suffix.lower() == ".safetensors":
        safetensors_module()


def check_storable(path: Path, dtype: np.dtype[Any]) -> None:
    """Raise if the format that ``path`` ends in has no name for the dtype."""
    if dtype.name == "bfloat16" and path.suffix.lower() != ".safetensors":
        raise type_error(
            f"a {path.suffix} file must hold a dtype of NumPy", dtype.name,
            "Write .safetensors, or choose another --dtype.",
        )


class Output:
    """A result on its way into a file: a context manager that leaves the whole file or nothing.

    Rows go into ``array``, which is mapped to a file in the folder ``OUTPUT.partial``, so that
    no result has to fit into memory. The room is taken at once: a full disk is found before the
    work. With ``resume`` the folder stays when the work is stopped, and `finished` tells how far
    an earlier run of the same ``call`` came: to a place where ``may_stop`` says that it could.
    """

    def __init__(
        self,
        path: Path,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        *,
        force: bool,
        resume: bool = False,
        call: Call | None = None,
        may_stop: Callable[[Place], bool] = lambda place: True,
    ) -> None:
        self.path = path.resolve()  # a link is followed, not replaced
        self.shape = shape
        self.dtype = dtype
        self.force = force
        self.resume = resume
        self.call = call or {}
        self.may_stop = may_stop
        self.ending = path.suffix.lower()
        self.finished: Place = (0, 0)
        self._partial = Partial(self.path)
        self._recorded: Place = (0, 0)

    def __enter__(self) -> Output:
        try:
            self._partial.open()
            self.finished = self._partial.left(
                self.call, self.may_stop, resume=self.resume, force=self.force
            )
        except BaseException:
            # What another run has left stays; a folder of this one has nothing in it yet.
            self._partial.close(remove=self._partial.is_bare())
            raise
        self._recorded = self.finished
        try:
            self._prepare()
        except BaseException as error:
            self.__exit__()
            if isinstance(error, OSError):
                count = math.prod(self.shape) * self.dtype.itemsize
                copies = "" if self.ending == ".npy" else "twice "
                reason = f"{error.strerror}; the output needs {copies}{count:,} bytes in"
                raise OSError(error.errno, reason, str(self.path.parent)) from error
            raise
        self._synced = time.monotonic()
        return self

    def _prepare(self) -> None:
        rows, again = self._partial / "rows.npy", self.finished > (0, 0)
        # A dtype that NumPy's format cannot name goes through it as plain bytes.
        dtype = self.dtype if self.dtype.name != "bfloat16" else np.dtype("V2")
        if again:
            self._mapped = self._opened(rows, dtype)
        else:
            self._mapped = np.lib.format.open_memmap(
                rows, mode="w+", dtype=dtype, shape=self.shape
            )
        size = rows.stat().st_size
        _take_room(rows, self._mapped.offset, size)  # also again: a copy may have holes
        if self.ending != ".npy":
            (self._partial / f"finished{self.ending}").unlink(missing_ok=True)
            reserved = self._partial / "reserved"
            reserved.touch()
            _take_room(reserved, 0, size + _OVERHEAD)
        self.array: NDArrayAny = np.asarray(self._mapped).view(self.dtype)

    def _opened(self, rows: Path, dtype: np.dtype[Any]) -> np.memmap[Any, Any]:
        """Map the rows of an earlier run."""
        problem = "another array"
        try:
            # Read-only first: a map that may be written makes a file that is too short longer.
            found = np.lib.format.open_memmap(rows, mode="r")
        except (ValueError, EOFError) as error:
            problem = f"a damaged file ({error})"
        else:
            size, expected = rows.stat().st_size, found.offset + found.nbytes
            if size != expected:
                problem = f"a damaged file ({size:,} bytes instead of {expected:,})"
            elif found.shape == self.shape and found.dtype == dtype and found.flags.c_contiguous:
                return np.lib.format.open_memmap(rows, mode="r+")
        raise value_error(
            f"{rows} must hold the rows of the run that was stopped", problem,
            "Pass --force without --resume to start anew.",
        )

    def record(self, part: int, rows: int) -> None:
        """Tell that rows up to a number are written, in this part and in all before it.

        What is told is on disk after the next call that comes `SYNC_SECONDS` later.
        """
        self.finished = (part, rows)
        if time.monotonic() - self._synced >= SYNC_SECONDS:
            self._sync()

    def _sync(self) -> None:
        self._mapped.flush()
        self._partial.record(self.call, self.finished)
        self._recorded, self._synced = self.finished, time.monotonic()

    def __exit__(self, *exc_info: object) -> None:
        keep = self.resume and self.finished > (0, 0) and hasattr(self, "_mapped")
        try:
            if keep and self.finished > self._recorded:
                self._sync()
        finally:
            self.__dict__.pop("array", None)  # Windows removes no file that is still mapped
            self.__dict__.pop("_mapped", None)
            # What this run could not even open is left to be looked at.
            self._partial.close(remove=not (self.resume and self._recorded > (0, 0)))

    def commit(self) -> int:
        """Put the file into its place; return its size in bytes."""
        if self.resume and self.finished > self._recorded:
            self._sync()  # what follows may fail, too
        self._mapped.flush()
        rows = self._partial / "rows.npy"
        finished = rows
        if self.ending != ".npy":
            finished = self._partial / f"finished{self.ending}"
            (self._partial / "reserved").unlink()
            self._convert(finished)
            shutil.copymode(rows, finished)
        del self.array, self._mapped
        with finished.open("rb+") as file:
            os.fsync(file.fileno())
        size = finished.stat().st_size
        self._place(finished)
        self._recorded = (0, 0)  # there is nothing left to continue
        return size

    def _convert(self, finished: Path) -> None:
        if self.ending == ".npz":
            np.savez(finished, out=self.array)
            return
        safetensors = safetensors_module()
        try:
            safetensors.numpy.save_file({"out": self.array}, finished)
        except safetensors.SafetensorError as error:
            raise OSError(f"the output could not be written: {error}") from error

    def _place(self, finished: Path) -> None:
        _targets.settle(finished, self.path, "output", overwrite=self.force)
        sync_folder(self.path.parent)  # the new name, too, has to reach the disk


def _take_room(path: Path, start: int, stop: int) -> None:
    """Give a file its room on the disk; bytes that are there stay, others become zero.

    Pages of a mapped file that find no room when they are written kill the process.
    """
    if stop <= start:
        return
    with path.open("rb+") as file:
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(file.fileno(), start, stop - start)
                return
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise
        for position in range(start, stop, _PIECE):
            length = min(_PIECE, stop - position)
            file.seek(position)
            there = file.read(length)
            file.seek(position)
            file.write(there.ljust(length, b"\0"))
