"""Array libraries and implementations as fixtures."""

import os
import sys

# Before NumPy and JAX are imported: several CPU devices are not needed, float64 is.
os.environ.setdefault("JAX_ENABLE_X64", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Two test processes share the processors: threads of theirs would wait for one another.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest

LIBRARIES = (
    "numpy", "numpy-readonly", "strict", "torch",
    pytest.param("jax", marks=pytest.mark.heavy),  # it compiles for every shape
)
IMPLEMENTATIONS = ("dense", "blockwise", "kernels")


class Library:
    """Makes arrays of one library out of NumPy arrays."""

    def __init__(self, name):
        self.name = name
        modules = {"strict": "array_api_strict", "torch": "torch", "jax": "jax.numpy"}
        module = modules.get(name)
        self.module = pytest.importorskip(module) if module else np

    def array(self, x):
        """An array of this library with the values, dtype and, where it can, strides of x."""
        x = np.asarray(x)
        if self.name == "numpy":
            return x
        if self.name == "numpy-readonly":
            x = x.view()
            x.flags.writeable = False
            return x
        if x.dtype.name == "bfloat16":
            wide = x.astype(np.float32)
            if self.name == "strict":
                pytest.skip("array-api-strict has no bfloat16")
            if self.name == "torch":
                return self.module.tensor(wide).to(self.module.bfloat16)
            return self.module.asarray(wide).astype(self.module.bfloat16)
        if self.name == "strict" and x.dtype == np.float16:
            pytest.skip("array-api-strict has no float16")
        if self.name == "torch":
            return self.module.tensor(np.ascontiguousarray(x).reshape(x.shape))
        return self.module.asarray(x)

    def arguments(self, arguments):
        """The same for every array in a dict of arguments; pairs are converted item by item."""

        def convert(x):
            if isinstance(x, np.ndarray):
                return self.array(x)
            return tuple(map(convert, x)) if isinstance(x, tuple) else x

        return {name: convert(x) for name, x in arguments.items()}


@pytest.fixture(autouse=True)
def subnormal_numbers():
    """Code that PyTorch compiles switches them off: what other tests expect is of NumPy."""
    yield
    if "torch" in sys.modules:
        sys.modules["torch"].set_flush_denormal(False)


@pytest.fixture(params=LIBRARIES)
def xp(request):
    """One array library after the other."""
    return Library(request.param)


@pytest.fixture(params=IMPLEMENTATIONS)
def impl(request):
    """One implementation after the other."""
    return request.param


@pytest.fixture
def rng(request):
    """Random numbers that depend on the name of the test alone."""
    return np.random.default_rng(list(request.node.name.encode()))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """Skip what the kernels say they cannot do: only where a test takes every implementation."""
    try:
        return (yield)
    except ValueError as error:
        callspec = getattr(pyfuncitem, "callspec", None)
        of_kernels = callspec is not None and callspec.params.get("impl") == "kernels"
        if of_kernels and str(error).startswith("impl='kernels' must be given"):
            pytest.skip(str(error))
        raise


def pytest_terminal_summary(terminalreporter):
    """Print the ids of the shared cases that this version does not support."""
    ids = sorted({
        value
        for report in terminalreporter.getreports("skipped")
        for name, value in getattr(report, "user_properties", [])
        if name == "unsupported"
    })
    if ids:
        terminalreporter.write_line(f"unsupported shared cases: {', '.join(ids)}")
