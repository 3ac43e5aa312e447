"""When a result counts as right: the one rule of all tests.

Truth is float64. The yardstick is the textbook computation, all scores in memory, in the working
dtype: a result may be at most twice as far from the truth as the yardstick is (three times for
gradients), plus a rounding floor eps·sqrt(len_kv)·max|truth|.
"""

import numpy as np

EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def as_float64(x):
    """Values of an array of any library."""
    if hasattr(x, "detach"):
        x = x.detach().double().cpu().numpy()
    if type(x).__module__.startswith("array_api_strict"):
        x = x._array
    return np.asarray(x).astype(np.float64)


def close(got, truth, yardstick=None, *, eps, len_kv, factor=2.0):
    """Return what is wrong with a result, or an empty string."""
    got, truth = as_float64(got), as_float64(truth)
    yardstick = truth if yardstick is None else as_float64(yardstick)
    if got.shape != truth.shape:
        return f"shape {got.shape} instead of {truth.shape}"
    finite = np.isfinite(truth)
    if not np.array_equal(np.where(finite, 0, got), np.where(finite, 0, truth), equal_nan=True):
        return "nan or inf at other places than in the truth"
    if not np.isfinite(got[finite]).all():
        return "nan or inf where the truth is finite"
    if not finite.any():
        return ""
    error = np.abs(got[finite] - truth[finite]).max()
    usable = finite & np.isfinite(yardstick)
    reference = np.abs(yardstick[usable] - truth[usable]).max() if usable.any() else 0.0
    limit = factor * reference + eps * np.sqrt(max(len_kv, 1)) * np.abs(truth[finite]).max()
    return "" if error <= limit else f"largest error {error:.3g}, allowed {limit:.3g}"


def assert_close(got, truth, yardstick=None, *, eps, len_kv, factor=2.0):
    """Fail unless `close`."""
    wrong = close(got, truth, yardstick, eps=eps, len_kv=len_kv, factor=factor)
    assert not wrong, wrong
