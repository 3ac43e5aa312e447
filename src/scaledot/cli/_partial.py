"""The folder beside an output that is not finished: a lock, and a journal of what is."""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from scaledot._errors import value_error

ENDING = ".partial"
NAMES = (
    "rows.npy", "reserved", "finished.npz", "finished.safetensors", "journal", "lock"
)
_FORMAT = "scaledot run 1"
# Of file systems that have no locks: there, runs are not kept apart.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

Call = Mapping[str, str]
"""What decides about the bits of a result, as texts by name."""

Place = tuple[int, int]
"""Number of a part, and the rows of it that are on disk; all parts before it are."""


class Partial:
    """The folder ``OUTPUT.partial`` of a run: only one process at a time may be in it.

    The lock is the system's, on an open file: it ends with the process, however that ends.
    """

    def __init__(self, output: Path) -> None:
        self.output = output
        self.folder = output.with_name(output.name + ENDING)
        self._lock: int | None = None

    def __truediv__(self, name: str) -> Path:
        return self.folder / name

    def open(self) -> None:
        """Make the folder if it is not there, and lock it; an interruption leaves none."""
        is_new = not self.folder.exists()
        try:
            self._open()
        except BaseException:
            if is_new and self._lock is None:
                self._drop()
            raise

    def _drop(self) -> None:
        """Remove a folder with no more than a lock in it that nobody holds."""
        with contextlib.suppress(OSError):
            if (self / "lock").exists():
                lock = os.open(self / "lock", os.O_RDWR)
                if _locked(lock) and os.listdir(self.folder) == ["lock"]:
                    (self / "lock").unlink()
                os.close(lock)
            self.folder.rmdir()  # fails if there is anything in it

    def _open(self) -> None:
        while self._lock is None:
            with contextlib.suppress(FileExistsError):
                self.folder.mkdir()
            self._check_folder()
            try:
                lock = os.open(self / "lock", os.O_RDWR | os.O_CREAT, 0o666)
            except FileNotFoundError:  # the run that was in it has just removed it
                continue
            if not _locked(lock):
                os.close(lock)
                raise value_error(
                    "an output must be written by one run at a time",
                    f"{self.output}, which another process is writing",
                    "Wait for it, or choose another name.",
                )
            try:
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(lock), os.stat(self / "lock")):
                        self._lock = lock
            finally:
                if self._lock is None:  # it was that of a folder which is gone
                    os.close(lock)

    def _check_folder(self) -> None:
        others = []
        if self.folder.is_dir():
            with contextlib.suppress(FileNotFoundError):
                others = sorted(set(os.listdir(self.folder)) - set(NAMES))
        if others or (self.folder.exists() and not self.folder.is_dir()):
            raise value_error(
                f"{self.folder} must be free for the unfinished output",
                f"a folder with {others[0]} in it" if others else "a file",
                "Move it away, or choose another name for the output.",
            )

    def clear(self) -> None:
        """Remove what a run has left behind, but for the lock."""
        for name in NAMES:
            if name != "lock":
                (self / name).unlink(missing_ok=True)

    def is_bare(self) -> bool:
        """Whether there is nothing in the folder but its lock."""
        try:
            return set(os.listdir(self.folder)) <= {"lock"}
        except OSError:
            return False

    def close(self, *, remove: bool) -> None:
        """Unlock the folder, or remove it with all that it holds."""
        if self._lock is None:
            return
        if remove:
            with contextlib.suppress(OSError):
                self.clear()
                if os.name == "nt":  # where no open file can be removed
                    self._unlock()
                (self / "lock").unlink()
                self.folder.rmdir()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def left(
        self, call: Call, may_stop: Callable[[Place], bool], *, resume: bool, force: bool
    ) -> Place:
        """How far a run came that was stopped; (0, 0) for a new start, with nothing left over.

        The journal counts up to its first line that is damaged or names a place where ``may_stop``
        says that this call never stops; under ``resume`` it is cut there.
        """
        head, lines = (b"", []) if force and not resume else self._read()
        if lines and not resume:
            raise value_error(
                "an output must be new or be continued",
                f"{self.folder}, which holds finished rows of a run that was stopped",
                "Pass --resume to continue it, or --force to start anew.",
            )
        length, place = len(head) + 1, (0, 0)
        if lines:
            self._compare(call, _parsed(head)["call"])
        for line in lines:
            found = _place(line)
            if found is None or found <= place or not may_stop(found):
                break
            length, place = length + len(line) + 1, found
        if place > (0, 0):
            os.truncate(self / "journal", length)
        else:
            self.clear()
        return place

    def _compare(self, now: Call, then: Call) -> None:
        differ = [
            f"{name} {now.get(name, 'none')} instead of {then.get(name, 'none')}"
            for name in sorted({*now, *then}) if now.get(name) != then.get(name)
        ]
        if differ:
            raise value_error(
                "--resume must be given the call that was stopped", "; ".join(differ),
                "Repeat that call with its inputs as they were, or pass --force without --resume "
                "to start anew.",
            )

    def _read(self) -> tuple[bytes, list[bytes]]:
        """First line of the journal, which holds the call, and its other whole lines.

        There are none where the second is not a place: then nothing was recorded.
        """
        path = self / "journal"
        if not path.exists() or not (self / "rows.npy").exists():
            return b"", []
        head, *lines = path.read_bytes().split(b"\n")
        if not lines:  # the first line never ended
            return b"", []
        parsed = _parsed(head)
        if (
            not isinstance(parsed, dict) or parsed.get("format") != _FORMAT
            or not isinstance(parsed.get("call"), dict)
        ):  # fmt: skip
            raise value_error(
                f"{path} must be the journal of a run", "one that cannot be read",
                f"Remove the folder {self.folder} to start anew.",
            )
        whole = lines[:-1]  # behind the last end of a line is what a power loss left of one
        return head, whole if whole and _place(whole[0]) else []

    def record(self, call: Call, place: Place) -> None:
        """Write down how far a run came; the rows must be on disk already."""
        path = self / "journal"
        new = not path.exists()
        with path.open("ab") as journal:
            if new:
                head = json.dumps({"format": _FORMAT, "call": dict(call)})
                journal.write(head.encode() + b"\n")
            journal.write(json.dumps(place).encode() + b"\n")
            journal.flush()
            os.fsync(journal.fileno())
        if new:
            sync_folder(self.folder)
            sync_folder(self.folder.parent)


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    if hasattr(os, "O_DIRECTORY"):
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def _locked(file: int) -> bool:
    """Lock an open file for this process; False where another one holds it."""
    try:
        if os.name == "nt":
            system: Any = importlib.import_module("msvcrt")
            system.locking(file, system.LK_NBLCK, 1)
        else:
            system = importlib.import_module("fcntl")
            system.flock(file, system.LOCK_EX | system.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _place(line: bytes) -> Place | None:
    """The place that a line of the journal names; None for one that is damaged."""
    found = _parsed(line)
    if not isinstance(found, list) or len(found) != 2 or any(type(x) is not int for x in found):
        return None
    return found[0], found[1]
