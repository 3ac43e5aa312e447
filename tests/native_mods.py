"""Calls of compiled score_mods and mask_mods by address, and what they must give."""

import ctypes

import numpy as np

import compare
from scaledot._kernels.mods import compile_mask_mod, compile_score_mod

NATIVE = ctypes.CFUNCTYPE(*[ctypes.c_int64] * 7)
COUNT = 9
TABLE = np.random.default_rng(0).standard_normal((4, 20)).astype(np.float32)


def run(mod, numbers, batch=1, head=2, q_pos=3, kv_pos=6):
    """Call a native function on a copy of the numbers; return its status and what it wrote."""
    numbers = numbers.copy()
    status = NATIVE(mod.address)(
        numbers.ctypes.data, batch, head, q_pos, kv_pos, len(numbers)
    )
    return status, numbers


def check_score(function, precision="float32", on_scalars=None):
    """Compare a compiled score_mod with the function, or another one, called on scalars."""
    scores = np.random.default_rng(1).standard_normal(COUNT).astype(precision)
    truth, yardstick = (
        [
            float((on_scalars or function)(dtype(score), np.int64(1), np.int64(2), np.int64(3 + i),
                                           np.int64(6)))
            for i, score in enumerate(scores)
        ]
        for dtype in (np.float64, np.dtype(precision).type)
    )
    mod = compile_score_mod(function, precision)
    status, got = run(mod, scores)
    assert status == 0
    fault = compare.close(got, truth, np.array(yardstick).astype(precision),
                          eps=compare.EPS[precision], len_kv=1)
    assert not fault, fault
    return mod


def check_mask(function, on_scalars=None):
    called = on_scalars or function
    expected = [bool(called(np.int64(1), np.int64(2), np.int64(3 + i), np.int64(6)))
                for i in range(COUNT)]
    assert 0 < sum(expected) < COUNT  # the case tells the two apart
    mod = compile_mask_mod(function)
    for before in (0, 1):
        status, seen = run(mod, np.full(COUNT, before, np.uint8))
        assert status == 0
        assert seen.tolist() == expected
    return mod


def reading(table):
    return lambda score, batch, head, q_pos, kv_pos: score + table[head, q_pos]
