"""Weights that are computed between products: whole tiles of bfloat16, rows whose maximum rises.

Where processors have no products of bfloat16, the same calls go other ways: they hold as well.
"""

import numpy as np
import pytest

import cases
import scaledot as sd
from scaledot._kernels.simd import EXP2_SHORT
from test_tiles import arrays, check, visible

BLOCK, TILE = 48, 128


def bfloat16(x):
    return x.astype(cases.dtype_named("bfloat16"))


def rising(steps, len_q=2 * BLOCK, d_k=64, **size):
    """Arguments whose scores grow by e**step from tile to tile, for some of the queries."""
    given = arrays("bfloat16", len_q, TILE * len(steps), d_k=d_k, d_v=32, **size)
    key = given["key"].astype("f4")
    query = given["query"].astype("f4") * 0.3
    query[..., 0] = np.arange(len_q) % 3 == 0  # one in three rises
    key[..., 0] = np.repeat(np.cumsum(steps), TILE) * np.sqrt(d_k)
    return given | {"query": bfloat16(query), "key": bfloat16(key)}


# Around LIMIT, log(1024 / 128) = 2.1 for a whole tile and 6.9 for one key, and far beyond.
STEPS = ([0, 2, 2, 2], [0, 7, -7, 8], [0, 30, 30, 30], [0, 0, 90, -90], [0, 100, 100, 100],
         [0, -30, -60, -90])  # fmt: skip


@pytest.mark.parametrize("steps", STEPS, ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (200, 30)}], ids=str)
def test_rising_scores(steps, options):
    check(rising(steps) | options)


@pytest.mark.parametrize("d_k", [48, 49, 50, 51, 64, 66, 80, 128, 130, 200, 256])
def test_depths(d_k):
    """From which depth there is room for weights, and one product or several of them."""
    check(arrays("bfloat16", 100, 3 * TILE + 5, d_k=d_k, d_v=40, num_heads=2))


@pytest.mark.parametrize("scale", [-30.0, -0.5, 0.0, 1e-30, 1e-18, 0.9, 3.0, 30.0, 1e18])
def test_scales(scale):
    given = arrays("bfloat16", 100, 3 * TILE, d_k=64, d_v=32)
    check(given | {"scale": scale, "query": bfloat16(given["query"].astype("f4") / max(1, scale))})


def test_large_values():
    """Weights beyond 1, before a maximum is raised, must not carry them beyond all numbers."""
    given = rising([0, 20, 20])
    check(given | {"value": bfloat16(given["value"].astype("f4") * 1e33)})


def test_rounded_weights_cancel():
    """A weight of 686.3 is 688 in bfloat16: what one key has almost alone is divided by that."""
    given = arrays("bfloat16", BLOCK, 4 * TILE, d_k=64, d_v=32)
    query, key = np.zeros_like(given["query"]), np.zeros_like(given["key"])
    query[..., 0], key[..., 0] = 8, -30
    key[..., 5, 0], key[..., 300, 0] = 0, 6.53125
    given = given | {"query": query, "key": key}
    out = sd.attention_state(**given, q_offset=0, impl="kernels").out
    truth = sd.attention(**{name: x.astype("f8") for name, x in given.items()}, impl="dense")
    assert abs(out - truth).max() < 2.0**-13 * abs(truth).max()


def test_rows_that_begin_late():
    """Nothing is seen of the first tiles, by some rows of a block or by all."""
    mask = np.ones((100, 4 * TILE), dtype=bool)
    mask[:10, :TILE] = mask[20:30, : 2 * TILE] = mask[48:96, : 3 * TILE] = mask[98] = False
    check(arrays("bfloat16", 100, 4 * TILE, d_k=64, d_v=32) | {"mask": mask})
    check(rising([0, 9, 9, 9], 100) | {"mask": mask})  # others are raised meanwhile


def in_bits(given, rows=slice(None)):
    """Bits of the rows of out and of lse."""
    state = sd.attention_state(**{"q_offset": 0} | given, impl="kernels")
    return [x[..., rows, :].astype("f4").tobytes() for x in (state.out, state.lse[..., None])]


@pytest.mark.parametrize("steps", STEPS, ids=str)
def test_bits_do_not_depend_on_other_rows(steps):
    """A row whose maximum rises has its tile computed anew, for all rows of its block."""
    given = rising(steps)
    calm = given["query"].copy()
    calm[..., 0] = 0
    stays = np.arange(2 * BLOCK) % 3 != 0
    assert in_bits(given, stays) == in_bits(given | {"query": calm}, stays)
    # The other way round: those that rise, among others that do not, and each by itself.
    alone = calm.copy()
    alone[..., 3, :] = given["query"][..., 3, :]
    assert in_bits(given, [3]) == in_bits(given | {"query": alone}, [3])


@pytest.mark.parametrize("steps", STEPS, ids=str)
def test_bits_do_not_depend_on_what_a_block_sees(steps):
    """Whole tiles, and tiles of which others see a part."""
    given = rising(steps)
    mask = np.ones((2 * BLOCK, TILE * len(steps)), dtype=bool)
    mask[5, ::7] = mask[BLOCK + 9, 3] = False
    others = np.delete(np.arange(2 * BLOCK), [5, BLOCK + 9])
    assert in_bits(given, others) == in_bits(given | {"mask": mask}, others)
    mask[5] = mask[BLOCK + 9] = False
    mask[5, 300:310] = mask[BLOCK + 9, 3] = True
    check(given | {"mask": mask})


@pytest.mark.parametrize("options", [{"causal": True}, {"window": (200, 30)}, {"kv_len": 391}])
@pytest.mark.parametrize("len_q", [4 * TILE, 2 * BLOCK])
def test_bits_do_not_depend_on_how_keys_are_hidden(options, len_q):
    """Inside of a tile that others see whole, or by a mask, which makes all tiles partial."""
    given = rising([0, 7, -7, 8], len_q)
    given = given | {"q_offset": 4 * TILE - len_q}
    mask = visible(given | options)[0]
    assert in_bits(given | options) == in_bits(given | {"mask": mask})


@pytest.mark.parametrize("where", ["query", "key", "value"])
@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf, 1e36])
def test_odd_numbers(where, odd):
    """One of them in the last of four tiles: it reaches what it should, and nothing else."""
    given = arrays("bfloat16", 2 * BLOCK, 4 * TILE, d_k=64, d_v=32)
    expected = sd.attention(**given, impl="kernels").astype("f4")
    changed = given[where].copy()
    changed[..., -5, 7] = odd
    given = given | {where: changed}
    got = sd.attention(**given, impl="kernels").astype("f4")
    with np.errstate(all="ignore"):
        truth = sd.attention(**{n: x.astype("f8") for n, x in given.items()}, impl="dense")
    plain = np.isfinite(truth) & (abs(truth) < 1e30)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(truth))
    assert plain.any() or where == "key"
    if where == "query":
        np.testing.assert_array_equal(np.delete(got, -5, axis=-2), np.delete(expected, -5, axis=-2))
    if where == "value":
        np.testing.assert_array_equal(np.delete(got, 7, axis=-1), np.delete(expected, 7, axis=-1))


def test_the_short_exponential():
    x = np.linspace(-0.5, 0.5, 10001)
    power = np.polyval(np.float32(EXP2_SHORT).astype("f8"), x)
    assert abs(power / 2**x - 1).max() < 1e-7
