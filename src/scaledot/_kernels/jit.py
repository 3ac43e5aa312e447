"""How kernels are compiled, and where compiled kernels are kept."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import pickle
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import llvmlite
import numba
import numba.extending
from numba.core import registry, types
from numba.core.codegen import CPUCodeLibrary, JITCPUCodegen
from numba.core.compiler_lock import global_compiler_lock
from numba.core.runtime.nrt import rtsys

from scaledot._kernels.target import HOST
from scaledot._threads import undisturbed

VARIABLE = "SCALEDOT_CACHE_DIR"


def _digest() -> str:
    """Hash of all that machine code depends on.

    The sources, among them the code that emits IR, the shapes of the target, and the compiler.
    """
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    codegen = registry.cpu_target.target_context.codegen().magic_tuple()
    digest.update(repr((HOST, codegen, numba.__version__, llvmlite.__version__)).encode())
    digest.update(sys.version.encode())
    return digest.hexdigest()[:24]


_VERSION = _digest()  # at once: sources may change while a process runs


def _cache_folder() -> Path:
    """Folder of this version of the kernels on this processor."""
    root = os.environ.get(VARIABLE)
    base = Path(root) if root else Path.home() / ".cache" / "scaledot" / "kernels"
    return base / _VERSION


_separate: set[str] = set()
_lock = threading.RLock()
_warned = False


def _warn(problem: object) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"compiled kernels cannot be kept, each process compiles them anew ({problem}); "
            f"set {VARIABLE} to a writable folder",
            RuntimeWarning,
            stacklevel=2,
        )


def _stands_alone(symbol: str, entry: str) -> bool:
    """Whether a function must not be put into its callers, by its mangled name."""
    return any(f"{len(name)}{name}B" in symbol for name in (*_separate, entry))


@contextlib.contextmanager
def _pieces_as_they_are(entry: str) -> Iterator[None]:
    """While an entry point is compiled, optimise it once, whole, and nothing before.

    Numba optimises each function and makes machine code of it, then links it into its caller and
    optimises that: a piece six calls deep is compiled six times, which took most of the time.
    """
    libraries, codegen = cast(Any, CPUCodeLibrary), cast(Any, JITCPUCodegen)
    optimize, finalize = libraries._optimize_final_module, libraries._finalize_final_module
    set_env = codegen.set_env

    def optimize_entry(library: Any) -> None:
        if library.name == entry:
            for function in library._final_module.functions:
                if not function.is_declaration and _stands_alone(function.name, entry):
                    function.add_function_attribute("noinline")
            optimize(library)

    def finalize_entry(library: Any) -> None:
        if library.name == entry:
            finalize(library)
        else:
            library._finalize_dynamic_globals()
            library._finalized = True

    libraries._optimize_final_module = optimize_entry
    libraries._finalize_final_module = finalize_entry
    codegen.set_env = lambda *_: None  # of exceptions, which kernels do not raise
    try:
        yield
    finally:
        codegen.set_env = set_env
        libraries._optimize_final_module = optimize
        libraries._finalize_final_module = finalize


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Without the garbage collector, which takes a tenth of the time to find nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


# A child that is forked in the midst of a compilation would wait for ever for its end.
if hasattr(os, "register_at_fork"):
    for lock in (global_compiler_lock, _lock):  # taken in the other order
        os.register_at_fork(
            before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release
        )


class Kernel:
    """A function of int64 that returns int64, compiled at its first use.

    Its machine code is kept on disk. Whatever is wrong there costs a compilation, never a result:
    files are written whole under another name first, and carry a checksum.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.signature = types.int64(*(types.int64,) * function.__code__.co_argcount)
        self.name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        self._address = 0
        self._library: Any = None

    @property
    def address(self) -> int:
        """Address of the native function; compiles or loads it."""
        if not self._address:
            undisturbed(self._prepare)
        return self._address

    def _prepare(self) -> None:
        with _lock:
            if not self._address:
                self._address = self._loaded()
            if not self._address:
                self._compile()

    def _file(self) -> Path:
        return _cache_folder() / f"{self.name}.bin"

    def _loaded(self) -> int:
        """Address of the function from disk; 0 where there is none, or none that is sound."""
        try:
            data = self._file().read_bytes()
            digest, content = data[:32], data[32:]
            if hashlib.sha256(content).digest() != digest:
                return 0
            symbol, state = pickle.loads(content)
        except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError):
            return 0
        context = registry.cpu_target.target_context
        rtsys.initialize(context)
        self._library = context.codegen().unserialize_library(state)
        return int(self._library.get_pointer_to_function(symbol))

    def _compile(self) -> None:
        with global_compiler_lock, _pieces_as_they_are(self.function.__name__), _no_collection():
            compiled: Any = numba.cfunc(self.signature, error_model="numpy")(self.function)
        self._library, self._address = compiled._library, int(compiled.address)
        self._save(compiled._wrapper_name)

    def _save(self, symbol: str) -> None:
        content = pickle.dumps((symbol, self._library.serialize_using_object_code()))
        temporary = None
        try:
            target = self._file()
            target.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=target.parent)
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(content).digest() + content)
            os.replace(temporary, target)
            temporary = None
        except (OSError, RuntimeError) as error:  # no home, no permission, a full disk
            _warn(error)
        finally:
            if temporary is not None:
                Path(temporary).unlink(missing_ok=True)


def kernel(function: Callable[..., Any]) -> Kernel:
    """Make an entry point: run without the GIL, without fast-math, kept on disk."""
    return Kernel(function)


def inlined(function: Callable[..., Any]) -> Any:
    """Compile a piece of a kernel into its callers, without entries of its own."""
    options: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return numba.njit(nogil=True, error_model="numpy", forceinline=True, **options)(function)


def separate(function: Callable[..., Any]) -> Any:
    """Compile a piece of a kernel as a function of its own.

    It is compiled once, however many call it, and the registers of an inner loop are not wanted by
    what is around.
    """
    _separate.add(function.__name__)
    options: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    # Said aloud, or it is inherited from who calls.
    return numba.njit(nogil=True, error_model="numpy", forceinline=False, **options)(function)


def intrinsic(function: Callable[..., Any]) -> Any:
    """Numba's decorator for functions that emit IR; called from kernels without the context."""
    return numba.extending.intrinsic(function)
