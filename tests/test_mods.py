"""Users' score_mod and mask_mod as native functions, against the same functions on scalars."""

import functools
import math
import types

import numba
import numpy as np
import pytest

from native_mods import TABLE, check_mask, check_score, run
from scaledot._kernels.mods import compile_mask_mod, compile_score_mod

IDS = np.arange(40).reshape(2, 20) // 7
WINDOW = 4
CONFIG = types.SimpleNamespace(width=5, table=TABLE, inner=types.SimpleNamespace(slope=0.25))


def helper(x):
    return deeper(x) * WINDOW


def deeper(x):
    return x + TABLE[0, abs(int(x)) % 20]


def inner_functions(score, batch, head, q_pos, kv_pos):
    def row(x):
        return TABLE[head, x % CONFIG.width]

    return score + row(q_pos) + sum([row(i) for i in range(3)])


def branches(score, batch, head, q_pos, kv_pos):
    if q_pos > kv_pos and score > 0:
        return score
    return -score


SCORES = {
    "relative bias": lambda s, b, h, i, j: s - 0.1 * abs(i - j),
    "polynomial": lambda s, b, h, i, j: s * 0.75 + (i - j) * (h + 1) * 0.1 - b * 0.25,
    "where": lambda s, b, h, i, j: np.where((i >= j) & ~(i == 6), s, -math.inf),
    "where and numbers": lambda s, b, h, i, j: np.where(i < j, 1, np.where(s > 0, s, -0.5)),
    "abs, sign, floor": lambda s, b, h, i, j: np.abs(s) + np.sign(i - j) * np.floor(s * 3),
    "minimum, maximum": lambda s, b, h, i, j:
        np.maximum(np.minimum(s, 0.5), -0.5) + np.maximum(i, j),
    "clip": lambda s, b, h, i, j: np.clip(s, -0.5, 0.5) + np.clip(i - j, -2, 2),
    "tanh, exp": lambda s, b, h, i, j: 20 * np.tanh(s / 20) + np.exp(-abs(i - j) / 4),
    "log, sqrt": lambda s, b, h, i, j: np.log(1.5 + i) + np.sqrt(np.abs(s)) + math.sqrt(2),
    "cos, sin": lambda s, b, h, i, j: np.cos(s) + np.sin(0.1 * j),
    "bool as number": lambda s, b, h, i, j: s * (i >= j) + np.pi,
    "whole division": lambda s, b, h, i, j: s + (i - j) // 2 + (i - j) % 3,
    "power": lambda s, b, h, i, j: s * 2.0 ** -(h + 1),
    "branches": branches,
    "conditional": lambda s, b, h, i, j: s if 4 <= i <= 7 else float("-inf"),
    "inner functions": inner_functions,
    "helpers": lambda s, b, h, i, j: helper(s),
    "global table": lambda s, b, h, i, j: s + TABLE[h, (i - j) % 20],
    "rows and shape": lambda s, b, h, i, j: s + TABLE[h][i] + TABLE.shape[1] + len(TABLE),
    "attributes": lambda s, b, h, i, j: s + CONFIG.table[h, i % CONFIG.width] * CONFIG.inner.slope,
    "default arguments": lambda s, b, h, i, j, t=TABLE, w=2.0: s + t[h, i] * w,
}


@pytest.mark.parametrize("name", SCORES)
def test_score_mod(name):
    check_score(SCORES[name])


@pytest.mark.parametrize("name", ["relative bias", "where", "tanh, exp", "global table"])
def test_score_mod_in_float64(name):
    check_score(SCORES[name], "float64")


MASKS = {
    "causal": lambda b, h, i, j: i >= j,
    "window": lambda b, h, i, j: (abs(i - j) < WINDOW) & (j <= i) | (i == 3),
    "not": lambda b, h, i, j: ~((i - j) % 3 == 0),
    "exclusive": lambda b, h, i, j: (i > 5) ^ (i > 8),
    "logical functions": lambda b, h, i, j:
        np.logical_or(np.logical_and(i > 4, i < 8), np.logical_not(i < 10)),
    "documents": lambda b, h, i, j: (IDS[b, i] == IDS[b, j]) & (j <= i + 2),
    "and, or, not": lambda b, h, i, j: (i > 4 and i < 8) or not i < 11,
}


@pytest.mark.parametrize("name", MASKS)
def test_mask_mod(name):
    check_mask(MASKS[name])


def test_closure_of_numbers():
    slope, width, small, flag = 0.5, 3, np.float32(0.1), np.True_
    half, rates, both = np.float16(1.5), (0.5, 0.25, 2.0), (TABLE, 3.0)

    def score_mod(score, batch, head, q_pos, kv_pos):
        change = small * (q_pos - kv_pos) + half if flag else slope
        return score * slope + change % width + rates[head] + both[0][head, q_pos] * both[1]

    check_score(score_mod)


def unaligned(x):
    return np.frombuffer(b"x" + x.tobytes(), dtype=np.uint8)[1:].view(x.dtype).reshape(x.shape)


def read_only(x):
    x = x.view()
    x.flags.writeable = False
    return x


ARRAYS = {
    "transposed": lambda x: np.asfortranarray(x),
    "sliced": lambda x: np.repeat(x, 2, axis=1)[:, ::2],
    "reversed": lambda x: x[::-1, ::-1],
    "expanded": lambda x: np.broadcast_to(x[:1], x.shape),
    "read-only": read_only,
    "other byte order": lambda x: x.astype(x.dtype.newbyteorder(">")),
    "unaligned": unaligned,
    "float16": lambda x: x.astype(np.float16),
    "float64": lambda x: x.astype(np.float64),
    "longdouble": lambda x: x.astype(np.longdouble),
    "int8": lambda x: (8 * x).astype(np.int8),
    "uint32": lambda x: (8 * np.abs(x)).astype(np.uint32),
    "bool": lambda x: x > 0,
    "0-d": lambda x: x[0, 0, ...],
}


@pytest.mark.parametrize("name", ARRAYS)
def test_closure_of_an_array(name):
    table = ARRAYS[name](TABLE)
    before = table.tobytes()
    if table.ndim:
        mod = check_score(lambda s, b, h, i, j: s + table[h, i] + table[-1, j])
    else:
        mod = check_score(lambda s, b, h, i, j: s + table * i)
    assert table.tobytes() == before
    assert not np.array_equal(run(mod, np.zeros(2, np.float32))[1], [0, 0])


def test_bfloat16_of_numpy():
    table = TABLE.astype(pytest.importorskip("ml_dtypes").bfloat16)
    wide = table.astype(np.float32)
    check_score(lambda s, b, h, i, j: s + table[h, i],
                on_scalars=lambda s, b, h, i, j: s + wide[h, i])


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "int64", "bool"])
def test_tensors(dtype):
    torch = pytest.importorskip("torch")
    table = torch.from_numpy(4 * TABLE).to(getattr(torch, dtype))[:, ::2]
    zero_d, wide = table[1, 1], table.double().numpy()
    check_score(lambda s, b, h, i, j: s + table[h, i % 10] * zero_d,
                on_scalars=lambda s, b, h, i, j: s + wide[h, i % 10] * wide[1, 1])


def test_arrays_of_jax():
    table = pytest.importorskip("jax.numpy").asarray(TABLE)
    check_score(lambda s, b, h, i, j: s + table[h, i],
                on_scalars=lambda s, b, h, i, j: s + TABLE[h, i])


NAMESPACES = ("torch", "jax.numpy", "array_api_strict", "array_api_compat.torch",
              "array_api_compat.numpy")


@pytest.mark.parametrize("name", NAMESPACES)
def test_functions_of_array_libraries(name):
    xp = pytest.importorskip(name)
    from_it = xp.where

    def score_mod(score, batch, head, q_pos, kv_pos):
        shown = from_it(q_pos > kv_pos, xp.tanh(score), xp.abs(score))
        return shown + xp.where(q_pos > 5, 0.5, xp.clip(score, -0.25, 0.25))

    def of_numpy(score, batch, head, q_pos, kv_pos):
        shown = np.where(q_pos > kv_pos, np.tanh(score), np.abs(score))
        return shown + np.where(q_pos > 5, 0.5, np.clip(score, -0.25, 0.25))

    check_score(score_mod, on_scalars=of_numpy)


def test_names_that_differ_in_pytorch():
    torch = pytest.importorskip("torch")
    check_score(lambda s, b, h, i, j: s + torch.clamp(i - j, min=-2, max=1),
                on_scalars=lambda s, b, h, i, j: s + np.clip(i - j, -2, 1))


class Bias:
    def __init__(self, table, width):
        self.table, self.width = table, width

    def bias(self, head, q_pos):
        return self.table[head, q_pos % self.width]

    def __call__(self, score, batch, head, q_pos, kv_pos):
        return score + self.bias(head, q_pos) * self.width

    def mask_mod(self, batch, head, q_pos, kv_pos):
        return abs(q_pos - kv_pos) < self.width


def first_bound(table, score, batch, head, q_pos, kv_pos, scale=2.0):
    return score + table[head, q_pos] * scale


def by_name(batch, head, q_pos, kv_pos, table, *, width, least=0.0):
    return (abs(q_pos - kv_pos) < width) & (table[head, q_pos] > least)


@numba.njit
def jitted(score, batch, head, q_pos, kv_pos):
    return score * (head + 1)


@numba.njit
def jitted_helper(x):
    return 3 * x


CALLABLES = {
    "object": Bias(TABLE, 3),
    "partial": functools.partial(first_bound, TABLE),
    "partial by name": functools.partial(first_bound, TABLE, scale=3.0),
    "over a default": functools.partial(
        lambda s, b, h, i, j, t=None, w=2: s + w * t[h, i], t=TABLE),
    "over a default array": functools.partial(
        lambda s, b, h, i, j, t=TABLE, w=2: s + w * t[h, i], t=-TABLE, w=3),
    "njit": jitted,
    "partial of njit": functools.partial(jitted),
    "njit within": lambda s, b, h, i, j: jitted_helper(s) + i,
    "any number of arguments": lambda s, *where: s + where[2] - where[3],
    "default arrays by name": lambda s, b, h, i, j, *, t=TABLE, w=2: s + w * t[h, i],
    "defaults for all": lambda s, b=0, h=0, i=0, j=0, t=TABLE: s + b + t[h, i],
    "builtin": min,
}


@pytest.mark.parametrize("name", CALLABLES)
def test_kinds_of_callables(name):
    on_scalars = jitted.py_func if name in ("njit", "partial of njit") else None
    check_score(CALLABLES[name], on_scalars=on_scalars)


CALLABLE_MASKS = {
    "method": Bias(TABLE, 3).mask_mod,
    "partial": functools.partial(by_name, table=TABLE, width=4),
    "other defaults": functools.partial(by_name, width=4, least=-0.5, table=np.abs(TABLE) - 0.5),
}


@pytest.mark.parametrize("name", CALLABLE_MASKS)
def test_kinds_of_callables_of_masks(name):
    check_mask(CALLABLE_MASKS[name])


@pytest.mark.parametrize(("function", "batch", "head"), [
    (lambda s, b, h, i, j: s, False, False),
    (lambda s, b, h, i, j: s + b, True, False),
    (lambda s, b, h, i, j: s + h, False, True),
    (lambda s, b, h, i, j: first_bound(TABLE, s, b, h, i, j), True, True),
    (lambda s, *where: s, True, True),
    (inner_functions, False, True),  # read by an inner function only
    (functools.partial(first_bound, TABLE), False, True),
    (Bias(TABLE, 3), False, True),
    (jitted, False, True),
], ids=str.split("none batch head helper any inner partial object njit"))
def test_which_arguments_are_used(function, batch, head):
    mod = compile_score_mod(function, "float32")
    assert (mod.uses_batch, mod.uses_head) == (batch, head)


def test_which_arguments_of_masks_are_used():
    flags = [compile_mask_mod(MASKS[name]) for name in ("causal", "documents")]
    assert [(mod.uses_batch, mod.uses_head) for mod in flags] == [(False, False), (True, False)]
    assert compile_mask_mod(lambda b, h, i, j: i > h).uses_head
