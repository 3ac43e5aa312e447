"""A key-value cache in a safetensors file."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scaledot import _arrays
from scaledot._errors import missing_extra, value_error
from scaledot._typing import Array

FORMAT = "scaledot.KVCache"
_MODULES = {"numpy": "safetensors.numpy", "torch": "safetensors.torch", "jax": "safetensors.flax"}
_EXTRAS = {"safetensors": "cli", "torch": "torch", "jax": "jax"}


def write(path: Any, arrays: dict[str, Array], header: dict[str, Any]) -> None:
    """Write a safetensors file that appears whole, or not at all."""
    target = Path(path).resolve()  # a link is followed, not replaced
    library = str(_arrays.library(arrays["key"]))
    store = _safetensors(library)
    if not target.parent.is_dir():
        raise value_error("the folder of path must exist", target.parent, "Make it first.")
    folder = Path(tempfile.mkdtemp(prefix=".scaledot-", dir=target.parent))
    try:
        finished = folder / "cache.safetensors"
        try:
            store.save_file(arrays, finished, metadata={FORMAT: json.dumps(header)})
        except _imported("safetensors").SafetensorError as error:
            raise OSError(f"the cache could not be written: {error}") from error
        usual = folder / "usual"
        usual.touch()
        shutil.copymode(usual, finished)  # safetensors lets nobody else read its files
        with finished.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(finished, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if hasattr(os, "O_DIRECTORY"):  # the new name, too, has to reach the disk
        parent = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(parent)
        finally:
            os.close(parent)


def read(path: Any, library: str | None) -> tuple[dict[str, Any], dict[str, Array]]:
    """Header and arrays of a file by `write`; the library is that of the header for None."""
    safetensors = _imported("safetensors")
    with _reading(path, safetensors):
        with safetensors.safe_open(path, framework="numpy") as archive:
            header = json.loads((archive.metadata() or {})[FORMAT])
        library = library or header["library"]
        if library not in _MODULES:
            raise ValueError(f"arrays of {library}")
    store = _safetensors(library)
    with _reading(path, safetensors):
        return header, store.load_file(path)


@contextlib.contextmanager
def _reading(path: Any, safetensors: Any) -> Iterator[None]:
    """Turn what a foreign or damaged file makes others raise into one message."""
    try:
        yield
    except (safetensors.SafetensorError, KeyError, ValueError, TypeError) as error:
        raise foreign(path, str(error) or type(error).__name__) from error


def foreign(path: Any, why: str) -> ValueError:
    """Build the error of a file that holds no cache."""
    return value_error(
        f"{path} must be a file written by KVCache.save", f"one that holds no cache ({why})",
        "Save the cache again.",
    )


def _safetensors(library: str) -> Any:
    """The module of safetensors that stores arrays of a library."""
    if library == "numpy":
        with contextlib.suppress(ImportError):  # needed only for files that hold bfloat16
            importlib.import_module("ml_dtypes")
    return _imported(_MODULES[library])


def _imported(module: str) -> Any:
    """Import a module of safetensors; what is missing may be the library of the arrays."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        name = (error.name or module).partition(".")[0]
        raise missing_extra(name, _EXTRAS[name]) from None
