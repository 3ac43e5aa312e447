"""Arrays in files: read part by part, and written so that a failure leaves nothing behind."""

from __future__ import annotations

import errno
import math
import os
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scaledot._errors import missing_extra, type_error, value_error

NDArrayAny = NDArray[Any]

FORMATS = (".npy", ".npz", ".safetensors")
OPERANDS = ("query", "key", "value")

# Room for the names and headers of a converted file, and bytes written at once.
_OVERHEAD = 4096
_PIECE = 2**20

_HINT_INPUT = (
    "Pass one .npz or .safetensors file with query, key and value, or three .npy files in this "
    "order."
)


@dataclass(frozen=True)
class Source:
    """An array in a file: its data is read when a part is asked for.

    Attributes
    ----------
    shape : tuple of int
        Shape of the whole array.
    dtype : numpy.dtype
        As stored.
    place : str
        File, and name inside it, for people.
    read : callable
        Takes a slice along the axis before the last; needs at least two axes.
    whole : callable
        Returns the whole array.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    place: str
    read: Callable[[slice], NDArrayAny]
    whole: Callable[[], NDArrayAny]

    @property
    def rows(self) -> int:
        """Length of the axis before the last; 1 where there is none."""
        return self.shape[-2] if len(self.shape) > 1 else 1


@dataclass(frozen=True)
class Inputs:
    """What one call reads."""

    query: Source
    key: Source
    value: Source
    mask: Source | None
    bias: Source | None

    @property
    def given(self) -> dict[str, Source]:
        """Every array that there is, by the name of its argument."""
        return {name: source for name, source in vars(self).items() if source is not None}


def bfloat16() -> np.dtype[Any]:
    """Return the dtype that NumPy itself does not have."""
    try:
        import ml_dtypes
    except ModuleNotFoundError:
        raise missing_extra("ml_dtypes", "bf16") from None
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


def open_inputs(files: list[Path], mask: str | None, bias: str | None) -> Inputs:
    """Find query, key, value and the arrays of options; their data stays in the files.

    Parameters
    ----------
    files : list of Path
        One ``.npz`` or ``.safetensors`` file, or three ``.npy`` files.
    mask, bias : str, optional
        Names of arrays inside the one file, or further ``.npy`` files.
    """
    endings = [file.suffix.lower() for file in files]
    if endings == [".npy"] * 3:
        paths = dict(zip(OPERANDS, files, strict=True))
        paths |= {k: Path(v) for k, v in (("mask", mask), ("bias", bias)) if v is not None}
        found = {name: _open_npy(path) for name, path in paths.items()}
    elif len(files) == 1 and endings[0] in (".npz", ".safetensors"):
        opening = _open_npz if endings[0] == ".npz" else _open_safetensors
        with opening(files[0]) as opened:
            found = {name: _pick(opened, files[0], name, name, name[0]) for name in OPERANDS}
            for name, wanted in (("mask", mask), ("bias", bias)):
                if wanted is not None:
                    found[name] = _pick(opened, files[0], name, wanted)
    else:
        raise value_error(
            "INPUT must be one .npz file, one .safetensors file or three .npy files",
            " ".join(map(str, files)), _HINT_INPUT,
        )
    return Inputs(
        found["query"], found["key"], found["value"], found.get("mask"), found.get("bias")
    )


def _pick(
    opened: Mapping[str, Callable[[], Source]], path: Path, role: str, *names: str
) -> Source:
    """Open the first of these names that the file holds."""
    for name in names:
        if name in opened:
            return opened[name]()
    raise value_error(
        f"{path} must hold an array {' or '.join(names)} for {role}",
        f"the arrays {', '.join(opened)}" if opened else "a file without arrays",
        "Arrays are found by name: save them under the names query, key, value (or q, k, v)."
        if role in OPERANDS else f"Name one of the arrays in the file with --{role}.",
    )


@contextmanager
def _reading(path: Path, what: str) -> Iterator[None]:
    """Turn what readers raise at a damaged or foreign file into one message."""
    try:
        yield
    except (OSError, MemoryError, ImportError):
        raise
    except (ValueError, TypeError, EOFError, KeyError, RuntimeError, NotImplementedError,
            zipfile.BadZipFile, zlib.error) as error:
        raise value_error(
            f"{path} must be a whole {what}", f"one that cannot be read ({error})",
            "Write it again" + ("." if path.suffix.lower() == ".safetensors" else
                                ", without Python objects in it."),
        ) from error


def _open_npy(path: Path) -> Source:
    _check_file(path)
    if path.suffix.lower() != ".npy":
        raise value_error(
            "beside .npy inputs, --mask and --bias must name .npy files", path, _HINT_INPUT
        )
    with _reading(path, ".npy file of numbers"):
        array = np.lib.format.open_memmap(path, mode="r")
    return _from_memory(array, str(path))


@contextmanager
def _open_npz(path: Path) -> Iterator[dict[str, Callable[[], Source]]]:
    """Arrays of an archive, loaded as they are opened: compressed data cannot be mapped."""
    _check_file(path)
    with _reading(path, ".npz file"):
        if not zipfile.is_zipfile(path):
            raise ValueError("it is no complete zip archive")
        archive = np.load(path, allow_pickle=False)

    def opener(name: str) -> Callable[[], Source]:
        def load() -> Source:
            with _reading(path, f".npz file; its {name} must be an array of numbers"):
                array = archive[name]
                if not isinstance(array, np.ndarray):
                    raise ValueError("it is not an array")
            return _from_memory(array, f"{path}: {name}")

        return load

    with archive:
        yield {name: opener(name) for name in archive.files}


@contextmanager
def _open_safetensors(path: Path) -> Iterator[dict[str, Callable[[], Source]]]:
    """Arrays of a safetensors file, which stays open for as long as one of them is in use."""
    _check_file(path)
    safetensors = _safetensors()
    what = ".safetensors file"
    with _reading_safetensors(path, what):
        archive = safetensors.safe_open(path, framework="numpy")
        names = list(archive.keys())

    def opener(name: str) -> Callable[[], Source]:
        def read(index: tuple[slice, ...]) -> NDArrayAny:
            with _reading_safetensors(path, f"{what}; its {name} must be readable by NumPy"):
                part: NDArrayAny = archive.get_slice(name)[index]
                return part

        def whole() -> NDArrayAny:
            with _reading_safetensors(path, f"{what}; its {name} must be readable by NumPy"):
                array: NDArrayAny = archive.get_tensor(name)
                return array

        def load() -> Source:
            with _reading_safetensors(path, what):
                header = archive.get_slice(name)
                shape = tuple(header.get_shape())
                if header.get_dtype() == "BF16":
                    bfloat16()  # the library leaves it to us to make the dtype known to NumPy
            place = f"{path}: {name}"
            if len(shape) < 2 or 0 in shape:  # the library slices no empty arrays
                return _from_memory(whole(), place)
            every = (slice(None),) * (len(shape) - 2)
            first = read((slice(0, 1),) * len(shape))
            return Source(
                shape, first.dtype, place, lambda rows: read((*every, rows, slice(None))), whole
            )

        return load

    yield {name: opener(name) for name in names}


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.numpy
    except ModuleNotFoundError:
        raise missing_extra("safetensors", "cli") from None
    return safetensors


@contextmanager
def _reading_safetensors(path: Path, what: str) -> Iterator[None]:
    error_type: type[Exception] = _safetensors().SafetensorError
    with _reading(path, what):
        try:
            yield
        except (error_type, AttributeError) as error:
            raise ValueError(str(error)) from error


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise value_error(
            "an input must be a file", f"{path}, which " + (
                "is a folder" if path.is_dir() else "does not exist"
            ),
            "Check the path.",
        )


def _from_memory(array: NDArrayAny, place: str) -> Source:
    """Source over an array that is in memory or mapped into it."""
    plain = np.asarray(array)
    if plain.dtype == np.dtype("V2"):
        # The only two-byte type that NumPy's formats cannot name.
        plain = plain.view(bfloat16())
    return Source(
        plain.shape, plain.dtype, place, lambda rows: plain[..., rows, :], lambda: plain
    )


def check_output(path: Path, *, force: bool) -> None:
    """Raise unless a file may be made at ``path``."""
    if path.suffix.lower() not in FORMATS:
        raise value_error(
            f"the output's name must end in {', '.join(FORMATS)}", path, "The ending is the format."
        )
    if not path.parent.is_dir():
        raise value_error("the output's folder must exist", path.parent, "Make it first.")
    if path.is_dir():
        raise value_error("the output must be a file", f"the folder {path}", "Choose a name in it.")
    if path.exists() and not force:
        raise value_error("the output must not exist yet", path, "Pass --force to replace it.")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise value_error("the output's folder must be writable", path.parent, "Choose another.")
    if path.suffix.lower() == ".safetensors":
        _safetensors()


def check_storable(path: Path, dtype: np.dtype[Any]) -> None:
    """Raise if the format that ``path`` ends in has no name for the dtype."""
    if dtype.name == "bfloat16" and path.suffix.lower() != ".safetensors":
        raise type_error(
            f"a {path.suffix} file must hold a dtype of NumPy", dtype.name,
            "Write .safetensors, or choose another --dtype.",
        )


class Output:
    """A result on its way into a file: a context manager that leaves the whole file or nothing.

    Rows go into ``array``, which is mapped to a file in a hidden folder beside the output, so
    that no result has to fit into memory. The room is taken at once: a full disk is found before
    the work.
    """

    def __init__(
        self, path: Path, shape: tuple[int, ...], dtype: np.dtype[Any], *, force: bool
    ) -> None:
        self.path = path.resolve()  # a link is followed, not replaced
        self.shape = shape
        self.dtype = dtype
        self.force = force
        self.ending = path.suffix.lower()

    def __enter__(self) -> Output:
        folder = self.path.parent
        self._folder = Path(tempfile.mkdtemp(prefix=".scaledot-", dir=folder))
        try:
            self._prepare()
        except BaseException as error:
            self.__exit__()
            if isinstance(error, OSError):
                count = math.prod(self.shape) * self.dtype.itemsize
                copies = "" if self.ending == ".npy" else "twice "
                reason = f"{error.strerror}; the output needs {copies}{count:,} bytes in"
                raise OSError(error.errno, reason, str(folder)) from error
            raise
        return self

    def _prepare(self) -> None:
        rows = self._folder / "rows.npy"
        # A dtype that NumPy's format cannot name goes through it as plain bytes.
        named = self.dtype.name != "bfloat16"
        self._mapped = np.lib.format.open_memmap(
            rows, mode="w+", dtype=self.dtype if named else np.dtype("V2"), shape=self.shape
        )
        size = rows.stat().st_size
        _take_room(rows, self._mapped.offset, size)
        if self.ending != ".npy":
            reserved = self._folder / "reserved"
            reserved.touch()
            _take_room(reserved, 0, size + _OVERHEAD)
        self.array: NDArrayAny = np.asarray(self._mapped).view(self.dtype)

    def __exit__(self, *exc_info: object) -> None:
        self.__dict__.pop("array", None)  # Windows removes no file that is still mapped
        self.__dict__.pop("_mapped", None)
        shutil.rmtree(self._folder, ignore_errors=True)

    def commit(self) -> int:
        """Put the file into its place; return its size in bytes."""
        self._mapped.flush()
        rows = self._folder / "rows.npy"
        finished = rows
        if self.ending != ".npy":
            finished = self._folder / f"finished{self.ending}"
            (self._folder / "reserved").unlink()
            self._convert(finished)
            shutil.copymode(rows, finished)
        del self.array, self._mapped
        with finished.open("rb+") as file:
            os.fsync(file.fileno())
        size = finished.stat().st_size
        self._place(finished)
        return size

    def _convert(self, finished: Path) -> None:
        if self.ending == ".npz":
            np.savez(finished, out=self.array)
            return
        safetensors = _safetensors()
        try:
            safetensors.numpy.save_file({"out": self.array}, finished)
        except safetensors.SafetensorError as error:
            raise OSError(f"the output could not be written: {error}") from error

    def _place(self, finished: Path) -> None:
        if self.force:
            os.replace(finished, self.path)
        else:
            try:
                # Unlike a rename, a link fails if the name was taken in the meantime.
                os.link(finished, self.path)
            except FileExistsError:
                raise value_error(
                    "the output must not exist yet", self.path,
                    "It appeared during the work. Pass --force to replace it.",
                ) from None
            except OSError:  # a file system without links
                check_output(self.path, force=False)
                os.replace(finished, self.path)
        if hasattr(os, "O_DIRECTORY"):  # the new name, too, has to reach the disk
            folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


def _take_room(path: Path, start: int, stop: int) -> None:
    """Give a file its room on the disk; its bytes from ``start`` on are zero, or not there yet.

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
        file.seek(start)
        for position in range(start, stop, _PIECE):
            file.write(bytes(min(_PIECE, stop - position)))
