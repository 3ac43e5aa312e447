"""Every thread gives the same bits, whatever mode of floating point its owner has set.

A library that was compiled for speed turns subnormal numbers off for the thread that loads it, as
PyTorch's compiled code does. Those of float16 and bfloat16 are ordinary data.
"""

import contextlib
import ctypes
import ctypes.util
import platform
import sys

import numpy as np
import pytest

import cases
import scaledot as sd

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"),
    reason="how the mode is set is known for Linux on x86-64 and AArch64",
)
UPWARD = {"x86_64": 0x800, "aarch64": 0x400000}.get(platform.machine())


@contextlib.contextmanager
def rounding_up():
    """Round every result of this thread up."""
    libm = ctypes.CDLL(ctypes.util.find_library("m"))
    assert libm.fesetround(UPWARD) == 0
    try:
        yield
    finally:
        libm.fesetround(0)


@contextlib.contextmanager
def without_subnormal_numbers():
    """Take subnormal numbers for 0 in this thread."""
    assert torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def rounds_up():
    return np.float32([1])[0] + np.float32([2**-30])[0] > 1


def has_subnormal_numbers():
    return (np.float32([1e-40]) * np.float32(2**20))[0] > 0


MODES = {
    "up": (rounding_up, rounds_up),
    "flushed": (without_subnormal_numbers, lambda: not has_subnormal_numbers()),
}
each_mode = pytest.mark.parametrize("mode", MODES)
each_dtype = pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])


@pytest.fixture(autouse=True)
def restored_threads():
    """Let no number of threads stay set."""
    yield
    sd.set_num_threads(None)


def operands(dtype, len_q):
    """Arguments whose magnitudes go down to those that are subnormal in every dtype but float64."""
    rng = np.random.default_rng(len_q)
    shapes = [(4, len_q, 40), (2, 700, 40), (2, 700, 24), (4, len_q, 24)]
    small = {"float16": 2.0**-22, "float64": 2.0**-1060}.get(dtype, 2.0**-130)
    return [
        (rng.standard_normal(s) * np.where(rng.random(s) < 0.5, 1, small))
        .astype(cases.dtype_named(dtype)) for s in shapes
    ]


@each_mode
@each_dtype
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("len_q", [1, 600])
def test_results(mode, dtype, num_threads, len_q):
    query, key, value, _ = operands(dtype, len_q)
    sd.set_num_threads(num_threads)
    # Given, as Python would round it, too.
    options = {"scale": 0.125, "impl": "kernels"}
    expected = sd.attention(query, key, value, **options)
    enter, holds = MODES[mode]
    with enter():
        out = sd.attention(query, key, value, **options)
        kept = holds()
    assert kept, "the caller's mode was not restored"
    np.testing.assert_array_equal(out, expected)


@each_mode
@each_dtype
@pytest.mark.parametrize("num_threads", [1, 3])
def test_gradients(mode, dtype, num_threads):
    query, key, value, grad_out = operands(dtype, 600)
    sd.set_num_threads(num_threads)
    _, pullback = sd.attention_vjp(query, key, value, scale=0.125, impl="kernels")
    expected = pullback(grad_out)
    with MODES[mode][0]():
        grads = pullback(grad_out)
    for name in ("query", "key", "value"):
        np.testing.assert_array_equal(getattr(grads, name), getattr(expected, name), err_msg=name)


@each_mode
def test_a_team(mode):
    """Calls on tensors that run on PyTorch's threads, of which one is the caller's."""
    query, key, value = (torch.tensor(x) for x in operands("float16", 600)[:3])
    size = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        expected = sd.attention(query, key, value, scale=0.125)
        with MODES[mode][0]():
            out = sd.attention(query, key, value, scale=0.125)
    finally:
        torch.set_num_threads(size)
    assert torch.equal(out, expected)


@pytest.mark.parametrize(("dtype", "number"), [
    ("float32", 2.0**-140), ("float64", 2.0**-1065), ("float16", 2.0**-20),
])  # fmt: skip
@pytest.mark.parametrize("len_q", [1, 600])
def test_subnormal_values_are_kept(dtype, number, len_q):
    """Every mean of one number is this number, to a step of those that the dtype has there."""
    query, key, value, _ = operands(dtype, len_q)
    value[:] = number
    out = sd.attention(query, key, value, impl="kernels")
    step = np.finfo(dtype).smallest_subnormal
    assert step < number < np.finfo(dtype).smallest_normal
    np.testing.assert_allclose(out.astype("float64"), number, rtol=0, atol=step)
