"""The key-value cache against attention over the whole history."""

import itertools
import pickle
import re
import sys
import tracemalloc

import numpy as np
import pytest

import naive
import textbook
from compare import EPS, as_float64, assert_close
from conftest import Library
from scaledot import _cache_memory
from scaledot._attention import attention
from scaledot._cache import KVCache

LIBRARIES = ("numpy", "torch", "jax")
DTYPES = ("float64", "float32", "float16", "bfloat16")
# JAX compiles every shape anew: it takes part where it is written or read in another way.
PAIRS = [*(("numpy", dtype) for dtype in DTYPES), ("torch", "float32"), ("torch", "bfloat16"),
         ("jax", "float32")]
BATCH, HEADS, KV_HEADS, D_K, D_V = 3, 4, 2, 8, 5
RAGGED = ([4, 1, 0], [1, 1, 1], [3, 5, 1], [1, 0, 1], [0, 2, 6])  # new tokens, one list a step
EVEN = ([5] * 3, [1] * 3, [1] * 3, [4] * 3)


def dtype_of(name):
    return pytest.importorskip("ml_dtypes").bfloat16 if name == "bfloat16" else np.dtype(name)


def stream(rng, length, dtype="float32", batch=BATCH):
    """Queries, keys and values of all tokens."""
    shapes = ((HEADS, D_K), (KV_HEADS, D_K), (KV_HEADS, D_V))
    return [rng.standard_normal((batch, h, length, d)).astype(dtype_of(dtype)) for h, d in shapes]


def make(capacity, dtype="float32", library="numpy", batch=BATCH, **options):
    like = None if library == "numpy" else Library(library).array(np.zeros(1, np.float32))
    return KVCache(batch, KV_HEADS, D_K, D_V, capacity, dtype, like=like, **options)


def unused(cache):
    """Boolean array (batch, capacity): slots that hold no token."""
    memory, free = cache._memory, np.ones((len(cache.lengths), cache.capacity), bool)
    sinks, ring = cache.num_sinks, cache.capacity - cache.num_sinks
    for entry, length in enumerate(cache.lengths):
        free[entry, : min(sinks, length)] = False
        for position in range(memory.oldest[entry], length):
            free[entry, sinks + (position - sinks) % ring] = False
    return free


def poison(cache):
    """Put nan into every slot that holds no token."""
    entry, slot = np.nonzero(unused(cache))
    int8 = cache.dtype == "int8"
    for part, x in cache._memory.arrays.items():
        if int8 == part.endswith("_scale"):
            shape = (len(entry), *x.shape[1:2], x.shape[3])
            stored = dtype_of("float32" if int8 else cache.dtype)
            nan = Library(library_of(x)).array(np.full(shape, np.nan, stored))
            cache._memory.arrays[part] = _cache_memory.put(x, (entry, slice(None), slot), nan)


def library_of(x):
    return {"ndarray": "numpy", "Tensor": "torch"}.get(type(x).__name__, "jax")


def fed(cache, arrays, steps, library="numpy", attend=True, **options):
    """Feed tokens in steps; return the outputs of all queries, in the order of the stream.

    Every entry has its own number of new tokens; behind those of an entry arrays hold nan.
    """
    batch, _, length, _ = arrays[0].shape
    out = np.zeros((batch, HEADS, length, D_V))
    for counts in steps:
        start, most = cache.lengths, max(counts)
        chunk = [np.full((*x.shape[:2], most, x.shape[3]), np.nan, x.dtype) for x in arrays]
        for b, count in enumerate(counts):
            for new, x in zip(chunk, arrays, strict=True):
                new[b, :, :count] = x[b, :, start[b] : start[b] + count]
        lengths = None if len(set(counts)) == 1 else counts
        query, key, value = map(Library(library).array, chunk)
        assert cache.append(key, value, lengths=lengths) is None
        poison(cache)
        if attend:
            got = cache.attention(query, lengths=lengths, **options)
            assert library_of(got) == library
            assert got.dtype == query.dtype
            got = as_float64(got)
            for b, count in enumerate(counts):
                out[b, :, start[b] : start[b] + count] = got[b, :, :count]
                assert not got[b, :, count:].any()
    return out


def kept_by(window, num_sinks, length):
    """Pairs that a cache shows: the window and the sinks."""
    pos = np.arange(length)
    return (pos < num_sinks) | (pos[:, None] - pos < window)


def check(got, arrays, lengths, dtype="float32", mask=None, causal=True, **options):
    """Compare outputs (batch, num_heads, len, d_v) with the oracle, up to each entry's length."""
    length = arrays[0].shape[2]
    pos = np.arange(length)
    mask = np.ones((length, length), bool) if mask is None else mask
    truth, _, weights = naive.attention(
        *map(as_float64, arrays), causal=causal, mask=mask, kv_len=np.array(lengths), q_offset=0,
        **options,
    )
    shaping = {n: options[n] for n in ("scale", "softcap", "alibi_slopes", "sinks") if n in options}
    yardstick, _ = textbook.attention(
        *arrays, weights > 0, q_pos=pos[:, None], kv_pos=pos, **shaping
    )
    rows = (pos < np.array(lengths)[:, None])[:, None, :, None]
    assert_close(*(np.where(rows, as_float64(x), 0) for x in (got, truth, yardstick)),
                 eps=EPS[dtype], len_kv=length)


@pytest.mark.parametrize(("library", "dtype"), PAIRS)
def test_steps_are_the_whole_pass(rng, library, dtype):
    """Chunked prefill and decoding, entries of different lengths, grouped queries."""
    arrays = stream(rng, 12, dtype)
    cache = make(14, dtype, library)
    steps = RAGGED[:2] if library == "jax" else RAGGED
    got = fed(cache, arrays, steps, library)
    assert cache.lengths.dtype == np.int64
    assert cache.lengths.tolist() == np.sum(steps, axis=0).tolist()
    check(got, arrays, cache.lengths, dtype)


OPTIONS = {
    "scale": 0.3, "softcap": 1.5, "window": (3, 1),
    "alibi_slopes": np.array([0.5, 0.25, 0.1, 0.0], np.float32),
    "sinks": np.array([0.3, -1.0, 2.0, 0.0], np.float32),
    "mask_mod": lambda batch, head, q_pos, kv_pos: (kv_pos != 1) | (batch == 1),
}


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("option", [*OPTIONS, "dropout"])
def test_options(rng, option, ring):
    arrays = stream(rng, 12)
    options = {"dropout": 0.4, "seed": 7} if option == "dropout" else {option: OPTIONS[option]}
    cache = make(13, window=6, num_sinks=1) if ring else make(13)
    got = fed(cache, arrays, EVEN, **options)
    check(got, arrays, [11] * 3, mask=kept_by(6, 1, 12) if ring else None, **options)


@pytest.mark.parametrize("window", [(2, None), (9, 0)])
def test_a_window_beside_that_of_the_cache(rng, window):
    """Both hold, that of the call for the sinks too."""
    arrays = stream(rng, 12)
    got = fed(make(11, window=5, num_sinks=2), arrays, EVEN[:2] * 2, window=window)
    check(got, arrays, [12] * 3, mask=kept_by(5, 2, 12), window=window)


@pytest.mark.parametrize("ring", [False, True])
def test_not_causal(rng, ring):
    arrays = stream(rng, 9)
    cache = make(12, window=4, num_sinks=2) if ring else make(12)
    fed(cache, arrays, ([5] * 3,))
    got = np.zeros((BATCH, HEADS, 9, D_V))
    got[:, :, 5:] = fed(cache, arrays, ([4] * 3,), causal=False)[:, :, 5:]
    mask = kept_by(4, 2, 9) if ring else np.ones((9, 9), bool)
    mask[:5] = False  # the first chunk is not looked at
    check(got, arrays, [9] * 3, mask=mask, causal=False)


def test_an_entry_without_tokens_and_more_queries_than_tokens():
    query, key, value = (np.ones((2, 1, 3, 2), np.float32) for _ in range(3))
    for options in ({}, {"window": 2, "num_sinks": 1}):
        cache = KVCache(2, 1, 2, 2, 6, "float32", **options)
        assert not cache.attention(query).any()
        cache.append(key, value, lengths=[2, 0])
        assert cache.attention(query)[..., 0].tolist() == [[[0, 1, 1]], [[0, 0, 0]]]


WINDOWS = [(1, 0, 0), (1, 3, 0), (4, 0, 0), (4, 2, 3), (5, 1, 2), (3, 5, 6), (20, 2, 0)]


@pytest.mark.parametrize(
    ("library", "window", "num_sinks", "slack"),
    [*(("numpy", *sizes) for sizes in WINDOWS), ("torch", 4, 2, 3)],
)
def test_a_ring_is_a_mask(rng, library, window, num_sinks, slack):
    """Sinks and the last tokens, long after the ring has gone round, chunks as large as fit."""
    length, dtype = 23, "float64" if window == 1 else "float32"
    arrays = stream(rng, length, dtype)
    cache = make(num_sinks + window + slack, dtype, library, window=window, num_sinks=num_sinks)
    counts = [rng.integers(0, slack + 2, BATCH).tolist() for _ in range(40)]
    steps, end = [], np.zeros(BATCH, int)
    for step in counts:
        step = np.minimum(step, length - end)
        if step.any():
            steps.append(step.tolist())
            end += step
    got = fed(cache, arrays, steps, library)
    check(got, arrays, end, dtype, kept_by(window, num_sinks, length))
    assert cache.capacity == num_sinks + window + slack


@pytest.mark.parametrize("counts", [[19, 19, 19], [19, 2, 7]])
def test_more_new_tokens_than_the_ring_holds(rng, counts):
    arrays = stream(rng, 21)
    cache = make(5, window=4, num_sinks=1)
    fed(cache, arrays, (counts,), attend=False)
    got = np.zeros((BATCH, HEADS, 21, D_V))
    last = np.stack([x[:, n - 1 : n] for x, n in zip(arrays[0], counts, strict=True)])
    rows = cache.attention(last)
    for b, n in enumerate(counts):
        got[b, :, n - 1] = rows[b, :, 0]
    mask = np.zeros((BATCH, 1, 21, 21), bool)
    for b, n in enumerate(counts):
        mask[b, :, n - 1] = kept_by(4, 1, 21)[n - 1]
    check(got, arrays, counts, mask=mask)
    with pytest.raises(ValueError, match="queries must see only tokens that are still in memory"):
        cache.attention(arrays[0][:, :, :2])


def test_chunks_up_to_the_slack_and_no_larger(rng):
    """What the docstring of `attention` promises about chunks."""
    arrays = stream(rng, 30)
    largest = 12 - 2 - 6 + 1
    cache = make(12, window=6, num_sinks=2)
    steps = [[largest] * 3] * 6
    check(fed(cache, arrays, steps), arrays, [30] * 3, mask=kept_by(6, 2, 30))
    cache.append(arrays[1][:, :, : largest + 1], arrays[2][:, :, : largest + 1])
    with pytest.raises(ValueError, match=f"at most {largest} tokens"):
        cache.attention(arrays[0][:, :, : largest + 1])


@pytest.mark.parametrize("options", [{}, {"window": 4, "num_sinks": 1}], ids=["all", "ring"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_an_entry_has_the_same_bits_alone_and_in_any_batch(rng, options, dtype, monkeypatch):
    monkeypatch.setattr(_cache_memory, "PIECE", 4)
    given = "float32" if dtype == "int8" else dtype
    arrays = stream(rng, 17, given)
    steps = [[3, 0, 1], [1, 1, 1], [2, 1, 0], *[[1, 0, 1]] * 10]
    # The capacity is part of the shape of a call, and may decide about the bits.
    whole = fed(make(20, dtype, **options), arrays, steps)
    for b in range(BATCH):
        alone = make(20, dtype, batch=1, **options)
        single = [[step[b]] for step in steps if step[b]]
        np.testing.assert_array_equal(
            fed(alone, [x[b : b + 1] for x in arrays], single)[0], whole[b]
        )


@pytest.mark.parametrize("library", LIBRARIES[:2])
@pytest.mark.parametrize("options", [{}, {"window": 3, "num_sinks": 2}], ids=["all", "ring"])
def test_grow(rng, library, options):
    """In the ring, tokens move to other slots; what is lost stays lost."""
    arrays = stream(rng, 20)
    cache = make(6, library=library, **options)
    steps = ([2, 1, 2], [1, 1, 1], [1, 2, 1])
    got = fed(cache, arrays, steps, library)
    if options:
        got += fed(cache, arrays, ([1, 0, 1],) * 5, library)
    end = cache.lengths
    cache.grow(6)
    cache.grow(13)
    poison(cache)
    assert cache.capacity == 13
    assert cache.lengths.tolist() == end.tolist()
    got += fed(cache, arrays, ([1, 1, 1],), library)
    got += fed(cache, arrays, ([2, 1, 2], [3, 3, 2]), library)
    check(got, arrays, cache.lengths, mask=kept_by(3, 2, 20) if options else None)


@pytest.mark.parametrize("library", LIBRARIES[:2])
@pytest.mark.parametrize("options", [{}, {"window": 3, "num_sinks": 2}], ids=["all", "ring"])
def test_truncate_and_append_others(rng, library, options):
    arrays, others = stream(rng, 20), stream(rng, 20)
    cache = make(9, library=library, **options)
    fed(cache, arrays, ([4] * 3, [4, 3, 2]), library)
    if options:
        fed(cache, arrays, ([2] * 3,) * 4, library)
    kept = cache.lengths - (np.array([0, 3, 2]) if options else np.array([0, 7, 3]))
    cache.truncate(kept)
    poison(cache)
    mixed = [x.copy() for x in arrays]
    for x, y in zip(mixed, others, strict=True):
        for b, n in enumerate(kept):
            x[b, :, n:] = y[b, :, n:]
    got = fed(cache, mixed, ([1, 1, 1], [0, 2, 1]), library)
    mask = np.zeros((BATCH, 1, 20, 20), bool)
    for b, n in enumerate(kept):  # only the rows of this session
        mask[b, :, n:] = kept_by(3, 2, 20)[n:] if options else True
    check(got, mixed, cache.lengths, mask=mask)


def test_truncate_all_entries_to_one_length(rng):
    cache = make(9)
    fed(cache, stream(rng, 8), ([5, 3, 4],), attend=False)
    cache.truncate(np.int32(3))
    assert cache.lengths.tolist() == [3, 3, 3]
    cache.truncate(0)
    assert cache.lengths.tolist() == [0, 0, 0]


def test_a_ring_starts_anew_after_truncation_to_its_sinks(rng):
    arrays = stream(rng, 30)
    cache = make(6, window=3, num_sinks=2)
    fed(cache, arrays, ([2] * 3,) * 8, attend=False)
    cache.truncate([2, 0, 1])
    got = fed(cache, arrays, ([1] * 3,) * 9)
    mask = np.broadcast_to(kept_by(3, 2, 30), (BATCH, 1, 30, 30)).copy()
    for b, n in enumerate([2, 0, 1]):
        mask[b, :, :n] = False
    check(got, arrays, cache.lengths, mask=mask)


@pytest.mark.parametrize("library", LIBRARIES[:2])
@pytest.mark.parametrize("source", [[2, 0, 1], [1, 1, 0], [2, 1, 0], [0], [2, 2, 0, 1, 1]])
@pytest.mark.parametrize("options", [{}, {"window": 3, "num_sinks": 2}], ids=["all", "ring"])
def test_reorder(rng, library, source, options):
    """Beams: an entry is repeated, moved or dropped, and copies go on apart."""
    arrays = stream(rng, 12)
    cache = make(12, library=library, **options)
    fed(cache, arrays, ([4, 1, 2], [3, 4, 3], [1, 0, 1]), library)
    cache.reorder(source)
    start = np.array([8, 5, 6])[source]
    assert cache.lengths.tolist() == start.tolist()
    poison(cache)
    beams = [x[source] for x in arrays]
    rest = stream(rng, 12, batch=len(source))
    for x, y in zip(beams, rest, strict=True):
        for b, n in enumerate(start):
            x[b, :, n:] = y[b, :, n:]
    got = fed(cache, beams, ([1] * len(source), [3] * len(source)), library)
    mask = np.zeros((len(source), 1, 12, 12), bool)
    for b, n in enumerate(start):
        mask[b, :, n:] = kept_by(3, 2, 12)[n:] if options else True
    check(got, beams, cache.lengths, mask=mask)


def test_the_cache_is_read_where_it_lies(rng):
    """A step of decoding makes nothing of the size of the memory, of int8 one piece at a time."""
    for dtype, options in itertools.product(["float32", "int8"], [{}, {"window": 2**15}]):
        cache = KVCache(1, 1, 64, 64, 2**15, dtype, **options)
        new = rng.standard_normal((1, 1, 2**15, 64)).astype(np.float32)
        cache.append(new, new)
        if options:
            cache.append(new[:, :, :100], new[:, :, :100])
        query = new[:, :, :1]
        cache.attention(query)  # compiles
        tracemalloc.start()
        cache.append(query, query) if options else None
        cache.attention(query)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < new.nbytes / 4, (dtype, options, peak, new.nbytes)


@pytest.mark.parametrize(("library", "dtype"), PAIRS)
def test_int8_is_off_by_half_a_scale_at_most(rng, dtype, library):
    x = rng.standard_normal((2, 3, 50, 16)) * 10.0 ** rng.integers(-5, 5, (2, 3, 50, 1))
    x = x.astype(dtype_of(dtype))
    x[0, 0, 0] = 0
    codes, scale = _cache_memory.quantised(Library(library).array(x))
    restored = as_float64(_cache_memory.restored(codes, scale, scale.dtype))
    codes, scale, x = as_float64(codes), as_float64(scale), as_float64(x)
    assert codes.min() >= -127
    assert codes.max() <= 127
    top = np.abs(x).max(-1, keepdims=True)
    np.testing.assert_allclose(scale, np.maximum(top / 127, 2.0**-126), rtol=EPS["float32"])
    assert (np.abs(restored - x) <= scale / 2 + EPS["float32"] * top).all()
    assert np.abs(restored - x).max() > 0
    assert not restored[0, 0, 0].any()


def test_int8_of_extreme_numbers():
    """Small numbers keep the bound; what is not finite in float32 is nan, that token alone."""
    tokens = np.array([[1e-45, 0], [3e-43, -1e-44], [2e-38, 1e-38], [3e38, -1e38], [np.nan, 1],
                       [np.inf, 1], [1, 2]], np.float32)
    codes, scale = _cache_memory.quantised(tokens)
    restored = _cache_memory.restored(codes, scale, np.float64)
    bound = scale.astype(np.float64) / 2 + EPS["float32"] * np.abs(tokens.astype(np.float64))
    fine = np.isfinite(tokens).all(-1)
    assert (np.abs(restored - tokens) <= bound)[fine].all()
    assert np.isnan(restored[~fine]).all()
    assert np.isnan(_cache_memory.restored(
        *_cache_memory.quantised(np.array([[1e300, 1.0]])), np.float64)).all()


@pytest.mark.parametrize(("library", "dtype"), PAIRS[:-1])
@pytest.mark.parametrize("options", [{}, {"window": 4, "num_sinks": 2}], ids=["all", "ring"])
def test_int8_attention(rng, dtype, library, options, monkeypatch):
    """Attention over the restored numbers, whose distance from the exact one has a bound."""
    monkeypatch.setattr(_cache_memory, "PIECE", 3)
    arrays = stream(rng, 12, dtype)
    cache = make(14, "int8", library, **options)
    got = fed(cache, arrays, RAGGED, library)
    wide = "float64" if dtype == "float64" else "float32"
    query, key, value = arrays
    (key, key_scale), (value, value_scale) = map(_cache_memory.quantised, arrays[1:])
    kept = kept_by(4, 2, 12) if options else None
    restored = [_cache_memory.restored(*pair, np.dtype(wide))
                for pair in ((key, key_scale), (value, value_scale))]
    check(got, [query.astype(wide), *restored], [9] * 3, dtype, kept)

    query, key, value = map(as_float64, arrays)
    exact = naive.attention(query, key, value, causal=True, mask=kept, kv_len=9, q_offset=0)[0]
    delta = np.abs(query).sum(-1).max() / np.sqrt(D_K) * key_scale.max() / 2
    bound = np.expm1(2 * delta) * np.abs(value).max() + value_scale.max() / 2
    rounding = EPS[dtype] * 3 * np.abs(exact).max()
    error = np.abs(got - exact)[:, :, :9].max()
    assert 0 < error <= bound + rounding


def test_gradients_reach_the_query_and_stop_at_the_cache(rng):
    torch = pytest.importorskip("torch")
    query, key, value = (torch.tensor(x, requires_grad=True) for x in stream(rng, 6, "float64"))
    for options in ({}, {"window": 4, "num_sinks": 1}):
        cache = make(8, "float64", "torch", **options)
        cache.append(key, value)
        fresh = query.detach().requires_grad_()
        (found,) = torch.autograd.grad(cache.attention(fresh[:, :, -2:]).square().sum(), fresh)
        mask = torch.tensor(kept_by(4, 1, 6)[-2:]) if options else None
        out = attention(fresh[:, :, -2:], key, value, causal=True, mask=mask)
        (right,) = torch.autograd.grad(out.square().sum(), fresh)
        assert_close(found, right, eps=EPS["float64"], len_kv=6)
        assert not any(x.requires_grad for x in cache._memory.arrays.values())


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_memory_made_in_inference_mode_is_written_outside(rng, dtype):
    torch = pytest.importorskip("torch")
    arrays = stream(rng, 12)
    plain, cache = make(9, dtype, "torch", window=4, num_sinks=1), None
    for step in range(4):  # all that makes memory, inside; all that writes it, outside
        rows = slice(3 * step, 3 * step + 3)
        query, key, value = (torch.tensor(x[:, :, rows]) for x in arrays)
        with torch.inference_mode():
            if step == 0:
                cache = make(9, dtype, "torch", window=4, num_sinks=1)
            elif step == 1:
                cache.grow(11)
                cache.append(key, value)
            elif step == 2:
                cache.reorder([0, 1, 2, 0])
                cache.reorder([3, 1, 2])
            else:
                cache = pickle.loads(pickle.dumps(cache))
        if step != 1:
            cache.append(key, value)
        plain.append(key, value)
        if step == 0:
            plain.grow(11)
        assert torch.equal(cache.attention(query), plain.attention(query))
    query.requires_grad_()
    cache.attention(query).sum().backward()


def test_without_ml_dtypes(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(ImportError, match=re.escape("pip install 'scaledot[bf16]'")):
        make(9, "bfloat16")
    make(9, "float32")


def test_dtypes_by_name_and_by_object():
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    for dtype, name in ((np.float32, "float32"), (torch.bfloat16, "bfloat16"), ("int8", "int8"),
                        (jax.numpy.float16, "float16"), (np.dtype("f8"), "float64"),
                        (torch.int8, "int8")):
        assert make(3, dtype).dtype == name
        assert make(3, dtype, "torch").dtype == name


def test_what_lengths_returns_is_a_copy():
    cache = make(4)
    cache.lengths[:] = 3
    assert cache.lengths.tolist() == [0, 0, 0]
    assert (cache.capacity, cache.window, cache.num_sinks) == (4, None, 0)
    assert repr(make(9, "int8", window=3, num_sinks=1)) == (
        "KVCache(3, 2, 8, 5, 9, 'int8', window=3, num_sinks=1, lengths=[0, 0, 0])"
    )
