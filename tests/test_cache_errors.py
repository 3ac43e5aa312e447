"""One test for every error message of the key-value cache; none of them changes anything."""

import pickle
import re

import numpy as np
import pytest

from scaledot import _cache_file
from scaledot._cache import KVCache

# Cases: the error, the start of its message, what it says was given, the arguments.
KEY, VALUE = np.ones((3, 2, 4, 8), np.float32), np.ones((3, 2, 4, 5), np.float32)
QUERY = np.ones((3, 4, 1, 8), np.float32)
RIGHT = {"batch": 3, "num_kv_heads": 2, "d_k": 8, "d_v": 5, "capacity": 9, "dtype": "float32"}
FAR = f"keys and values must have at most {2**63 - 1} bytes each"
ALL = "dtype must be one of float32, float64, float16, bfloat16, int8"
MADE = [
    *((ValueError, f"{name} must be at least 1", "0", {name: 0})
      for name in ("batch", "num_kv_heads", "d_k", "d_v", "capacity")),
    (ValueError, "num_sinks must be at least 0", "-1", {"num_sinks": -1}),
    (ValueError, "window must be at least 1", "0", {"window": 0}),
    (TypeError, "capacity must be an integer", "9.0", {"capacity": 9.0}),
    (TypeError, "window must be an integer", "(3, 0)", {"window": (3, 0)}),
    (ValueError, "num_sinks must be 0 without a window", "4", {"num_sinks": 4}),
    (ValueError, "capacity must be at least num_sinks + window = 10", "9",
     {"window": 8, "num_sinks": 2}),
    # A token of the wider keys takes 3·2·8·4 bytes.
    (ValueError, FAR, f"capacity={2**62} of 192 bytes. Addresses reach as far as "
     f"capacity={(2**63 - 1) // 192},", {"capacity": 2**62}),
    (ValueError, FAR, "capacity=9 of 295147905179352825856 bytes. Make", {"batch": 2**62}),
    (ValueError, FAR, f"capacity={2**60} of 24 bytes", {"capacity": 2**60, "dtype": "int8",
     "d_k": 1, "d_v": 2}),
    *((TypeError, ALL, repr(x), {"dtype": x}) for x in (None, "f4", np.int32, "bool", 3)),
    (TypeError, "like must be one of arrays of NumPy", "builtins.str", {"like": "torch"}),
]
WIDE = KEY.astype(np.float64)
NEW = [
    (TypeError, "key must be one of arrays of NumPy", "builtins.list", {"key": [[1.0]]}),
    (TypeError, "value must be a plain array", "MaskedArray", {"value": np.ma.array(VALUE)}),
    (TypeError, "the dtype of key must be the cache's, float32", "float64", {"key": WIDE}),
    (TypeError, "the dtype of value must be the cache's, float32", "int64",
     {"value": VALUE.astype(int)}),
    *((ValueError, "key must have the shape (batch, num_kv_heads, new, d_k) = (3, 2, new, 8)",
       str(x.shape), {"key": x}) for x in (KEY[0], KEY[:2], KEY[:, :1], KEY[..., :5], KEY[None])),
    (ValueError, "value must have the shape (batch, num_kv_heads, new, d_v) = (3, 2, new, 5)",
     "(3, 2, 4, 8)", {"value": KEY}),
    (ValueError, "key and value must have the same number of tokens", "4 and 3",
     {"value": VALUE[:, :, :3]}),
    (ValueError, "the cache must have room for the new tokens (capacity = 9)",
     "4 after the 6 of entry 0", {}),
    (ValueError, "the cache must have room for the new tokens (capacity = 9)",
     "2 after the 8 of entry 2", {"lengths": [3, 2, 2]}),
    (ValueError, "lengths must lie between 0 and the number of tokens given, 4", "[1, 5, 1]",
     {"lengths": [1, 5, 1]}),
    (ValueError, "lengths must lie between 0 and the number of tokens given, 4", "[1, -1, 1]",
     {"lengths": [1, -1, 1]}),
    (ValueError, "lengths must have one number for each of the 3 entries", "2",
     {"lengths": [1, 1]}),
    (TypeError, "lengths must be a 1-D sequence of integers", "float64 (3,)",
     {"lengths": [1.0, 1.0, 1.0]}),
    (TypeError, "lengths must be a 1-D sequence of integers", "int64 ()", {"lengths": 2}),
]
ASKED = [
    (TypeError, "query must be one of arrays of NumPy", "builtins.float", {"query": 1.0}),
    (TypeError, "the dtype of query must be the cache's, float32", "float64",
     {"query": QUERY.astype(np.float64)}),
    *((ValueError, "query must have the shape (batch, num_heads, len_q, d_k) = (3, num_heads, "
       "len_q, 8)", str(x.shape), {"query": x}) for x in (QUERY[:1], QUERY[..., :5], QUERY[0])),
    (ValueError, "num_heads of query must be a multiple of num_kv_heads", "3 and 2",
     {"query": QUERY[:, :3]}),
    (ValueError, "lengths must lie between 0 and the number of tokens given, 1", "[1, 2, 1]",
     {"lengths": [1, 2, 1]}),
    (ValueError, "softcap must be positive", "0.0", {"softcap": 0.0}),
    (ValueError, "dropout needs a seed", "dropout=0.5", {"dropout": 0.5}),
    (ValueError, "sinks must have the shape (num_heads,) = (4,)", "(3,)",
     {"sinks": np.ones(3, np.float32)}),
    (TypeError, "window must be a pair (left, right)", "3", {"window": 3}),
    (TypeError, "causal must be True or False", "1", {"causal": 1}),
]
SHORTER = [
    (ValueError, "lengths must lie between 0 and the present ones",
     "9 for entry 2, which has 8 tokens", [6, 7, 9]),
    (ValueError, "lengths must lie between 0 and the present ones", "7 for entry 0", 7),
    (ValueError, "lengths must lie between 0 and the present ones", "-1 for entry 1", [1, -1, 0]),
    (ValueError, "lengths must have one number for each of the 3 entries", "1", [4]),
    (TypeError, "lengths must be a 1-D sequence of integers", "bool (3,)", True),
    (TypeError, "lengths must be a 1-D sequence of integers", "float64 ()", 2.0),
    (ValueError, "lengths must be indices", str(2**62), 2**62),
]
ORDERS = [
    *((ValueError, "indices must name at least one entry, from 0 to 2", str(x), x)
      for x in ([0, 3, 1], [-1], [])),
    (TypeError, "indices must be a 1-D sequence of integers", "float64 (1,)", [0.0]),
    (TypeError, "indices must be a 1-D sequence of integers", "int64 ()", 1),
]


def raises(error, must_hold, given, call, *arguments, **options):
    with pytest.raises((TypeError, ValueError, LookupError)) as info:
        call(*arguments, **options)
    message = str(info.value)
    assert type(info.value) is error, message
    assert re.fullmatch(r".+?, got .+\. .+[.?]", message, re.DOTALL), message
    assert message.startswith(must_hold), message
    assert given in message.partition(", got ")[2], message


@pytest.fixture
def full():
    """A cache with 6, 7 and 8 tokens, and a check that nothing has changed."""
    cache = KVCache(**RIGHT)
    cache.append(KEY, VALUE)
    cache.append(KEY, VALUE, lengths=[2, 3, 4])
    before = pickle.dumps(cache)
    yield cache
    assert pickle.dumps(cache) == before


@pytest.mark.parametrize(("error", "must_hold", "given", "arguments"), MADE)
def test_errors_of_a_new_cache(error, must_hold, given, arguments):
    raises(error, must_hold, given, KVCache, **RIGHT | arguments)


@pytest.mark.parametrize(("error", "must_hold", "given", "arguments"), NEW)
def test_errors_of_append(full, error, must_hold, given, arguments):
    raises(error, must_hold, given, full.append, **{"key": KEY, "value": VALUE} | arguments)


@pytest.mark.parametrize(("error", "must_hold", "given", "arguments"), ASKED)
@pytest.mark.parametrize("other", [{}, {"window": 7, "num_sinks": 1}])
def test_errors_of_attention(full, error, must_hold, given, arguments, other):
    for cache in (full, KVCache(**RIGHT, **other)):
        raises(error, must_hold, given, cache.attention, **{"query": QUERY} | arguments)


@pytest.mark.parametrize(("error", "must_hold", "given", "lengths"), SHORTER)
def test_errors_of_truncate(full, error, must_hold, given, lengths):
    raises(error, must_hold, given, full.truncate, lengths)


@pytest.mark.parametrize(("error", "must_hold", "given", "indices"), ORDERS)
def test_errors_of_reorder(full, error, must_hold, given, indices):
    raises(error, must_hold, given, full.reorder, indices)


def test_errors_of_grow(full):
    raises(ValueError, "capacity must be at least the present one, 9", "8", full.grow, 8)
    raises(TypeError, "capacity must be an integer", "'10'", full.grow, "10")
    raises(ValueError, FAR, f"capacity={2**60} of 192 bytes", full.grow, 2**60)


def test_errors_about_evicted_tokens():
    cache = KVCache(**RIGHT, window=3, num_sinks=2)  # a ring of 7
    for _ in range(3):
        cache.append(KEY, VALUE)
    before = pickle.dumps(cache)
    query = np.ones((3, 4, 6, 8), np.float32)
    raises(ValueError, "queries must see only tokens that are still in memory",
           "6 queries of entry 0, the first of which sees back to position 4, where 5 is the "
           "oldest", cache.attention, query)
    cache.attention(query[:, :, :5])
    cache.attention(query, window=(1, None))
    lost = "lengths must leave every token that the next one sees"
    raises(ValueError, lost, "6 for entry 1, of which nothing is left from position 2 to 4",
           cache.truncate, [12, 6, 12])
    assert pickle.dumps(cache) == before
    cache.truncate([7, 2, 0])


def test_what_can_be_done_about_evicted_tokens():
    """The hint is right before and after grow and truncate, which bring nothing back."""
    cache = KVCache(**RIGHT, window=3, num_sinks=2)  # a ring of 7
    for _ in range(3):
        cache.append(KEY, VALUE)
    queries = [np.ones((3, 4, n, 8), np.float32) for n in range(10)]
    with pytest.raises(ValueError, match="serves chunks of at most 5 tokens"):
        cache.attention(queries[6])
    cache.grow(20)  # would serve chunks of 16
    with pytest.raises(ValueError, match="the last 5 see only what is still there"):
        cache.attention(queries[6])
    cache.attention(queries[5])
    cache.truncate(8)
    with pytest.raises(ValueError, match="the last 1 see only what is still there"):
        cache.attention(queries[2])
    cache.attention(queries[1])
    cache.truncate(7)
    with pytest.raises(ValueError, match=r"the last 0 see only .* to be appended"):
        cache.attention(queries[1])
    cache.append(KEY, VALUE)
    cache.attention(queries[4])


def test_errors_about_libraries():
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    strict = pytest.importorskip("array_api_strict")
    cache, tensor = KVCache(**RIGHT), torch.ones(3, 2, 4, 8)
    one = "cache and {} must belong to one library"
    raises(TypeError, one.format("key"), "numpy and torch", cache.append, tensor, VALUE)
    raises(TypeError, one.format("query"), "numpy and torch", cache.attention, tensor)
    raises(TypeError, "like must be an array of NumPy, PyTorch or JAX", "array_api_strict",
           KVCache, **RIGHT, like=strict.ones(1))
    traced = KVCache(**RIGHT, like=jax.numpy.ones(1))
    raises(TypeError, "key must hold numbers that a cache can keep", "being traced",
           jax.jit(lambda key: traced.append(key, key[..., :5])), KEY)
    int8 = KVCache(**RIGHT | {"dtype": "int8"})
    raises(TypeError, "the dtype of key must be a floating-point dtype", "int8", int8.append,
           KEY.astype(np.int8), VALUE)


DAMAGED = [
    {"version": 2}, {"lengths": [1, 1]}, {"lengths": [1, 1, 99]}, {"lengths": [1, 1, -1]},
    {"oldest": [0, 0, 2]}, {"lengths": [3, 3, 3]}, {"capacity": 2}, {"window": 99},
    {"num_sinks": 1}, {"library": "cupy"}, {"lengths": None}, {"capacity": "9"},
]


@pytest.mark.parametrize("change", DAMAGED)
def test_errors_about_files(tmp_path, change, monkeypatch):
    cache = KVCache(**RIGHT)
    cache.append(KEY, VALUE)
    right = _cache_file.write
    monkeypatch.setattr(
        _cache_file, "write", lambda path, arrays, header: right(path, arrays, header | change)
    )
    cache.save(tmp_path / "x")
    raises(ValueError, f"{tmp_path / 'x'} must be a file written by KVCache.save",
           "one that holds no cache (", KVCache.load, tmp_path / "x")


def test_errors_about_arrays_in_files(tmp_path, monkeypatch):
    cache, path = KVCache(**RIGHT), tmp_path / "x"
    cache.append(KEY, VALUE)
    right = _cache_file.write
    message = f"{path} must be a file written by KVCache.save"
    for change in ({"key": KEY[:, :, :3].copy()}, {"value": VALUE.astype(np.float64)},
                   {"key": KEY[0].copy()}, {"key": KEY.astype(np.int8)}):
        with monkeypatch.context() as patch:
            patch.setattr(_cache_file, "write", lambda path, arrays, header, change=change: right(
                path, arrays | change, header))
            cache.save(path)
        raises(ValueError, message, "one that holds no cache (", KVCache.load, path)


def test_errors_about_foreign_files(tmp_path):
    from safetensors.numpy import save_file

    path = tmp_path / "x"
    message = f"{path} must be a file written by KVCache.save"
    path.write_bytes(b"nonsense")
    raises(ValueError, message, "one that holds no cache (", KVCache.load, path)
    save_file({"key": KEY}, path)
    raises(ValueError, message, "one that holds no cache (", KVCache.load, path)
    cache = KVCache(**RIGHT)
    cache.append(KEY, VALUE)
    cache.save(path)
    path.write_bytes(path.read_bytes()[:-10])
    raises(ValueError, message, "one that holds no cache (", KVCache.load, path)
    with pytest.raises(FileNotFoundError):
        KVCache.load(tmp_path / "missing")
    raises(ValueError, "the folder of path must exist", str(tmp_path / "no"), cache.save,
           tmp_path / "no" / "x")
