"""Arrays in files, read part by part."""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from scaledot import _stream
from scaledot._errors import missing_extra, value_error

NDArrayAny = NDArray[Any]

FORMATS = (".npy", ".npz", ".safetensors")
OPERANDS = ("query", "key", "value")

MAPPED_BYTES = 2**24
"""Smaller arrays in archives are loaded whole."""

_PIECE = 2**20
# Where the header of a file in a zip archive has the lengths of its last two fields.
_ZIP_LENGTHS = 26

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
    file : Path
        Where it is.
    place : str
        File, and name inside it, for people.
    read : callable
        Takes one slice for each axis; returns a view of what is mapped or in memory, else a copy.
    mapped : bool
        Whether parts are views of pages that the system may drop from memory at any time.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    file: Path
    place: str
    read: Callable[[tuple[slice, ...]], NDArrayAny]
    mapped: bool

    @property
    def rows(self) -> int:
        """Length of the axis before the last; 1 where there is none."""
        return self.shape[-2] if len(self.shape) > 1 else 1

    @property
    def name(self) -> str:
        """Name inside the file; empty where the file holds one array."""
        return self.place.removeprefix(str(self.file)).removeprefix(": ")


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
        opening = open_npz if endings[0] == ".npz" else open_safetensors
        with opening(files[0]) as opened:
            found = {name: pick(opened, files[0], name, name, name[0]) for name in OPERANDS}
            for name, wanted in (("mask", mask), ("bias", bias)):
                if wanted is not None:
                    found[name] = pick(opened, files[0], name, wanted)
    else:
        raise value_error(
            "INPUT must be one .npz file, one .safetensors file or three .npy files",
            " ".join(map(str, files)), _HINT_INPUT,
        )
    return Inputs(
        found["query"], found["key"], found["value"], found.get("mask"), found.get("bias")
    )


def pick(
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
    return _from_memory(array, path, "")


@contextmanager
def open_npz(path: Path) -> Iterator[dict[str, Callable[[], Source]]]:
    """Arrays of an archive: large ones are mapped, unless they are compressed, others loaded."""
    _check_file(path)
    with _reading(path, ".npz file"):
        if not zipfile.is_zipfile(path):
            raise ValueError("it is no complete zip archive")
        archive = np.load(path, allow_pickle=False)

    def opener(name: str) -> Callable[[], Source]:
        def load() -> Source:
            with _reading(path, f".npz file; its {name} must be an array of numbers"):
                array = _mapped_member(archive.zip, path, f"{name}.npy")
                if array is None:
                    array = archive[name]
                if not isinstance(array, np.ndarray):
                    raise ValueError("it is not an array")
            return _from_memory(array, path, name)

        return load

    with archive:
        yield {name: opener(name) for name in archive.files}


def _mapped_member(archive: zipfile.ZipFile, path: Path, name: str) -> NDArrayAny | None:
    """Map an array in an archive; None for one that is small, compressed or no plain array."""
    if name not in archive.namelist():
        return None
    member = archive.getinfo(name)
    if member.compress_type != zipfile.ZIP_STORED or member.file_size < MAPPED_BYTES:
        return None
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            return None
        read = getattr(np.lib.format, f"read_array_header_{version[0]}_0")
        shape, is_fortran, dtype = read(file)
        skipped = file.tell()
        while file.read(_PIECE):  # raises an error where the checksum is wrong
            pass
    if dtype.hasobject:
        return None
    with path.open("rb") as file:
        file.seek(member.header_offset + _ZIP_LENGTHS)
        # Before the data come a header of fixed size, a name and further fields.
        lengths = struct.unpack("<HH", file.read(4))
    start = member.header_offset + _ZIP_LENGTHS + 4 + sum(lengths) + skipped
    order: Literal["F", "C"] = "F" if is_fortran else "C"
    return np.memmap(path, dtype, "r", start, shape, order)


@contextmanager
def open_safetensors(path: Path) -> Iterator[dict[str, Callable[[], Source]]]:
    """Arrays of a safetensors file, which stays open for as long as one of them is in use."""
    _check_file(path)
    safetensors = safetensors_module()
    what = ".safetensors file"
    with _reading_safetensors(path, what):
        archive = safetensors.safe_open(path, framework="numpy")
        names = list(archive.keys())

    def opener(name: str) -> Callable[[], Source]:
        def read(index: tuple[slice, ...]) -> NDArrayAny:
            with _reading_safetensors(path, f"{what}; its {name} must be readable by NumPy"):
                part: NDArrayAny = archive.get_slice(name)[index]
                return part

        def load() -> Source:
            with _reading_safetensors(path, what):
                header = archive.get_slice(name)
                shape = tuple(header.get_shape())
                if header.get_dtype() == "BF16":
                    bfloat16()  # the library leaves it to us to make the dtype known to NumPy
            if not shape or 0 in shape:  # the library slices no empty arrays
                with _reading_safetensors(path, f"{what}; its {name} must be readable by NumPy"):
                    return _from_memory(archive.get_tensor(name), path, name)
            first = read((slice(0, 1),) * len(shape))
            return Source(shape, first.dtype, path, f"{path}: {name}", read, False)

        return load

    yield {name: opener(name) for name in names}


def safetensors_module() -> Any:
    try:
        import safetensors
        import safetensors.numpy
    except ModuleNotFoundError:
        raise missing_extra("safetensors", "cli") from None
    return safetensors


@contextmanager
def _reading_safetensors(path: Path, what: str) -> Iterator[None]:
    error_type: type[Exception] = safetensors_module().SafetensorError
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


def _from_memory(array: NDArrayAny, file: Path, name: str) -> Source:
    """Source over an array that is in memory or mapped into it."""
    plain = np.asarray(array)
    if plain.dtype == np.dtype("V2"):
        # The only two-byte type that NumPy's formats cannot name.
        plain = plain.view(bfloat16())
    place = f"{file}: {name}" if name else str(file)

    def read(index: tuple[Any, ...]) -> NDArrayAny:
        part: NDArrayAny = plain[(..., *index)]
        if plain.flags.aligned:
            return part
        copied = part.copy()  # in archives, data begins at any byte
        _stream.give_back(part)
        return copied

    mapped = isinstance(array, np.memmap) and plain.flags.aligned
    return Source(plain.shape, plain.dtype, file, place, read, mapped)
