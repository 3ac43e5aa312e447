"""Kernels that read eight-bit codes, against the oracle on the numbers that these stand for."""

import numpy as np
import pytest

import naive
import scaledot as sd
from compare import EPS, as_float64, assert_close
from conftest import Library
from scaledot import _cache_memory, _code_kernels
from test_attention import textbook_of

OPTIONS = {
    "none": {}, "not causal": {"causal": False}, "window": {"window": (40, None)},
    "softcap, scale": {"softcap": 1.5, "scale": 0.7},
    "alibi, sinks": {"alibi_slopes": np.array([0.5, 0.25, 0.1, 0.0], np.float32),
                     "sinks": np.array([0.3, -1.0, 2.0, 0.0], np.float32)},
    "mods": {"score_mod": lambda score, batch, head, q_pos, kv_pos: score * (1 + head) / 4,
             "mask_mod": lambda batch, head, q_pos, kv_pos: kv_pos % 3 != batch},
    "dropout": {"dropout": 0.3, "seed": 5},
}  # fmt: skip


def arrays(rng, length, d_k=64, d_v=32, *, batch=2, num_heads=4, num_kv_heads=2, len_q=2):
    """A query, and keys and values of very different sizes from token to token."""
    query = rng.standard_normal((batch, num_heads, len_q, d_k), dtype=np.float32)
    pair = [rng.standard_normal((batch, num_kv_heads, length, d)) for d in (d_k, d_v)]
    sizes = np.exp2(rng.integers(-3, 2, (batch, num_kv_heads, length, 1)))
    return query, *((x * sizes).astype(np.float32) for x in pair)


def filled(key, value, library="numpy", **options):
    """A cache with nan in its unused slots."""
    like = None if library == "numpy" else Library(library).array(np.zeros(1, np.float32))
    batch, heads, length, d_k = key.shape
    cache = sd.KVCache(batch, heads, d_k, value.shape[-1], length + 3, "int8", like=like, **options)
    for part in ("key_scale", "value_scale"):
        x = cache._memory.arrays[part]
        cache._memory.arrays[part] = _cache_memory.put(x, (slice(None),) * 4, np.nan)
    cache.append(*map(Library(library).array, (key, value)))
    return cache


def stands_for(x):
    """Numbers that codes of x stand for."""
    return _cache_memory.restored(*_cache_memory.quantised(x), np.dtype(np.float32))


def check(got, query, key, value, options, dtype="float32"):
    """Compare every entry with the oracle on what the codes stand for."""
    query = as_float64(query).astype(np.float32)
    arguments = {"causal": True, "query": query, "key": stands_for(key)} | options
    arguments["value"] = stands_for(value)
    truth, _, weights = naive.attention(**arguments)
    yardstick, _ = textbook_of(arguments, weights)
    assert_close(as_float64(got), truth, yardstick, eps=EPS[dtype], len_kv=key.shape[2])


@pytest.fixture
def no_restoring(monkeypatch):
    """Numbers are not restored anywhere."""
    monkeypatch.setattr(_cache_memory.Memory, "chunks", lambda *_: pytest.fail("restored"))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.usefixtures("no_restoring")
def test_options(options, rng):
    for length in (1, 130, 1100):
        query, key, value = arrays(rng, length, d_k=17, d_v=20, len_q=min(2, length))
        check(filled(key, value).attention(query, **options), query, key, value, options)


@pytest.mark.parametrize(("d_k", "d_v"), [(1, 1), (31, 33), (64, 128), (96, 16)])
@pytest.mark.parametrize("len_q", [1, 3, 8])
@pytest.mark.usefixtures("no_restoring")
def test_widths_and_lengths(d_k, d_v, len_q, rng):
    for length in (8, 127, 129, 300):
        query, key, value = arrays(rng, length, d_k, d_v, len_q=len_q)
        check(filled(key, value).attention(query), query, key, value, {})


@pytest.mark.parametrize(("d_k", "d_v"), [(1, 2), (17, 20), (64, 64), (96, 160)])
def test_brain_queries(d_k, d_v, rng):
    """Every code is a number of bfloat16; one processor multiplies them so."""
    for length, len_q, options in ((1, 1, {}), (130, 2, OPTIONS["window"]), (1100, 8, {})):
        query, key, value = arrays(rng, length, d_k, d_v, len_q=len_q)
        query = query.astype(pytest.importorskip("ml_dtypes").bfloat16)
        got = filled(key, value).attention(query, **options)
        assert got.dtype == query.dtype
        check(got, query, key, value, options, "bfloat16")


def test_each_code_counts_for_itself():
    """One key, one feature: the product of each code with 1 is the code."""
    codes = np.arange(-127, 128, dtype=np.float32)
    key = np.zeros((1, 1, 255, 40), np.float32)
    key[0, 0, :, 7], key[0, 0, :, 8] = codes, 127  # so that every scale is 1
    query = np.zeros((1, 1, 1, 40), pytest.importorskip("ml_dtypes").bfloat16)
    query[..., 7] = 1
    value = np.eye(255, dtype=np.float32)[None, None]
    cache = sd.KVCache(1, 1, 40, 255, 255, "int8")
    cache.append(key, value)
    weights = as_float64(cache.attention(query, scale=0.01))[0, 0, 0]
    expected = np.exp(0.01 * codes) / np.exp(0.01 * codes).sum()
    np.testing.assert_array_less(abs(weights - expected), 2.0**-7 * expected)


@pytest.mark.parametrize("library", ["torch", "jax"])
@pytest.mark.usefixtures("no_restoring")
def test_libraries(library, rng):
    query, key, value = arrays(rng, 140)
    got = filled(key, value, library).attention(Library(library).array(query))
    check(got, query, key, value, {})


def test_many_queries_are_as_one_by_one(rng):
    """The kernels' few queries and the fold over restored numbers agree."""
    query, key, value = arrays(rng, 200, len_q=20)
    got = filled(key, value).attention(query)
    check(got, query, key, value, {})
    for i in (0, 19):
        part = filled(key[:, :, : 181 + i], value[:, :, : 181 + i])
        one = part.attention(query[:, :, i : i + 1])
        check(one, query[:, :, i : i + 1], key[:, :, : 181 + i], value[:, :, : 181 + i], {})


@pytest.mark.usefixtures("no_restoring")
def test_hidden_tokens_that_are_not_finite(rng):
    """No factor of theirs reaches anybody; who sees such a token gets nan."""
    query, key, value = arrays(rng, 150, len_q=1)
    clean = filled(key, value).attention(query, window=(99, 0))
    value[:, :, 20], key[:, :, 21] = np.inf, np.nan
    cache = filled(key, value)
    np.testing.assert_array_equal(cache.attention(query, window=(99, 0)), clean)
    assert np.isnan(cache.attention(query, window=(128, 0))).all()
    value[:, :, 20], key[:, :, 21] = np.inf, 0
    only_value = filled(key, value).attention(query)
    assert np.isnan(only_value).all()


def test_rings_with_sinks(rng, no_restoring):
    query, key, value = arrays(rng, 90, len_q=1)
    cache = sd.KVCache(2, 2, 64, 32, 44, "int8", window=40, num_sinks=4)
    for token in range(90):
        cache.append(key[:, :, token : token + 1], value[:, :, token : token + 1])
    position = np.arange(90)
    kept = (position < 4) | (position > 89 - 40)
    check(cache.attention(query), query, key, value, {"mask": kept})


def test_what_the_kernels_are_for(rng):
    problem = []
    run = _code_kernels.run

    def watched(*given):
        problem.append(given)
        return run(*given)

    query, key, value = arrays(rng, 40, len_q=1)
    cache = filled(key, value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_code_kernels, "run", watched)
        cache.attention(query)
        assert len(problem) == 1
        for wide in (query.astype(np.float64), np.repeat(query, 9, axis=2)):
            cache.attention(wide)
        cache.attention(query, impl="blockwise")
        assert len(problem) == 1
