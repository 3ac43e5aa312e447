"""The one JIT decorator of the kernels, and where compiled kernels are kept."""

from __future__ import annotations

import hashlib
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numba.extending

from scaledot._kernels.target import HOST

VARIABLE = "SCALEDOT_CACHE_DIR"


def _cache_folder() -> Path:
    """Folder of this version of the kernels on this processor.

    Numba's own key knows a function's file but not the IR that its intrinsics emit, nor the
    shapes of the target: the folder's name holds a hash of all of them.
    """
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    digest.update(repr((HOST, numba.__version__, llvmlite.__version__, sys.version)).encode())
    root = os.environ.get(VARIABLE)
    base = Path(root) if root else Path.home() / ".cache" / "scaledot" / "kernels"
    return base / digest.hexdigest()[:24]


def _usable_cache() -> str | None:
    try:
        folder = _cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return str(folder)
        problem = f"{folder} is not writable"
    except (OSError, RuntimeError) as error:
        problem = str(error)
    warnings.warn(
        f"compiled kernels cannot be kept, each process compiles them anew ({problem}); "
        f"set {VARIABLE} to a writable folder",
        RuntimeWarning,
        stacklevel=2,
    )
    return None


_CACHE = _usable_cache()


def kernel(function: Callable[..., Any]) -> Any:
    """Compile an entry point: without the GIL, without fast-math, kept on disk."""
    # Numba asks for its folder when the decorator runs, and only through its configuration.
    before = numba.config.CACHE_DIR  # type: ignore[attr-defined]
    numba.config.CACHE_DIR = _CACHE or before  # type: ignore[attr-defined]
    try:
        return numba.njit(nogil=True, cache=_CACHE is not None, error_model="numpy")(function)
    finally:
        numba.config.CACHE_DIR = before  # type: ignore[attr-defined]


def inlined(function: Callable[..., Any]) -> Any:
    """Compile a piece of a kernel into its callers, without entries of its own."""
    options: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return numba.njit(nogil=True, error_model="numpy", forceinline=True, **options)(function)


def spliced(function: Callable[..., Any]) -> Any:
    """Put a large piece that is called once into its caller before anything is compiled.

    Each level of compiled pieces would be optimised again in the next: a third of the time.
    """
    return numba.njit(nogil=True, error_model="numpy", inline="always")(function)


def intrinsic(function: Callable[..., Any]) -> Any:
    """Numba's decorator for functions that emit IR; called from kernels without the context."""
    return numba.extending.intrinsic(function)
