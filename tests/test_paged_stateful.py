"""The paged cache against lists of tokens, with nan in all memory that no token lies in."""

import copy
import pickle
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from conftest import Library
from scaledot import _paged_cache
from scaledot._paged_cache import PagedKVCache
from test_errors import raises
from test_paged import D_K, D_V, NUM_HEADS, NUM_KV_HEADS, OPTIONS, check, queries

NUMBER = st.integers(0, 2**32 - 1)
SEQUENCES = 6  # at most, of one machine


def tokens(rng, count, new):
    """Keys and values to append to `count` sequences."""
    return tuple(
        rng.standard_normal((count, NUM_KV_HEADS, new, d)).astype(np.float32) for d in (D_K, D_V)
    )


def cache_of(num_pages=8, page_size=4, dtype="float32", **options):
    return PagedKVCache(num_pages, page_size, NUM_KV_HEADS, D_K, D_V, dtype, **options)


def bookkeeping(cache):
    return pickle.dumps({n: x for n, x in vars(cache).items() if n not in ("_key", "_value")})


class Model:
    """A cache and, for each id, the keys and values that it must hold, one row for a token."""

    def __init__(self, num_pages, page_size):
        self.cache = cache_of(num_pages, page_size)
        self.histories = {}
        self.poison()

    def pages(self):
        return {id: [n for n in self.cache.page_table([id])[0] if n >= 0] for id in self.histories}

    def users(self):
        return Counter(page for pages in self.pages().values() for page in pages)

    def poison(self):
        """Write nan wherever no token lies."""
        size = self.cache.key_pages.shape[1]
        used = np.zeros(self.cache.key_pages.shape[:2], bool)
        for id, pages in self.pages().items():
            for token in range(len(self.histories[id][0])):
                used[pages[token // size], token % size] = True
        for pool in (self.cache.key_pages, self.cache.value_pages):
            pool[~used] = np.nan

    def needed(self, counts):
        """Pages for that many more tokens of each id, by counting users of every last page."""
        size, pages, users = self.cache.key_pages.shape[1], self.pages(), self.users()
        total, writers = 0, Counter()
        for id, count in counts.items():
            length = len(self.histories[id][0])
            total += -(-(length + count) // size) - -(-length // size)
            if count and length % size:
                writers[pages[id][-1]] += 1
        return total + sum(min(n, users[page] - 1) for page, n in writers.items())

    def append(self, ids, key, value, lengths):
        self.cache.append(ids, key, value, lengths=lengths)
        for entry, id in enumerate(ids):
            count = key.shape[2] if lengths is None else lengths[entry]
            new = (x[entry, :, :count].swapaxes(0, 1) for x in (key, value))
            self.histories[id] = tuple(
                np.concatenate(pair) for pair in zip(self.histories[id], new, strict=True)
            )


class PagedCacheMachine(RuleBasedStateMachine):
    @initialize(num_pages=st.integers(4, 20), page_size=st.sampled_from([4, 3, 5, 2, 1]),
                length=st.integers(0, 8), seed=NUMBER)  # fmt: skip
    def begin(self, num_pages, page_size, length, seed):
        """With a sequence and its fork: pages are shared from the first step on."""
        self.model, self.freed = Model(num_pages, page_size), set()
        self.new()
        length = min(length, num_pages * page_size)
        self.model.append([0], *tokens(np.random.default_rng(seed), 1, length), None)
        self.fork(0)

    def some(self, data, most=SEQUENCES):
        ids = st.sampled_from(sorted(self.model.histories))
        return data.draw(st.lists(ids, min_size=1, max_size=most, unique=True))

    @precondition(lambda self: len(self.model.histories) < SEQUENCES)
    @rule()
    def new(self):
        id = self.model.cache.new()
        assert id not in self.model.histories
        assert id not in self.freed
        self.model.histories[id] = tuple(
            np.zeros((0, NUM_KV_HEADS, d), np.float32) for d in (D_K, D_V)
        )

    @precondition(lambda self: 0 < len(self.model.histories) < SEQUENCES)
    @rule(data=st.data())
    def fork_one(self, data):
        self.fork(*self.some(data, 1))

    def fork(self, parent):
        free = self.model.cache.num_free
        id = self.model.cache.fork(parent)
        assert id not in self.model.histories
        assert self.model.cache.num_free == free
        self.model.histories[id] = self.model.histories[parent]

    @precondition(lambda self: self.model.histories)
    @rule(data=st.data())
    def free(self, data):
        (id,) = self.some(data, 1)
        self.model.cache.free(id)
        del self.model.histories[id]
        self.freed.add(id)

    @precondition(lambda self: self.freed)
    @rule(data=st.data())
    def use_after_free(self, data):
        id = data.draw(st.sampled_from(sorted(self.freed)))
        before = bookkeeping(self.model.cache)
        for call in (self.model.cache.free, self.model.cache.fork):
            raises(ValueError, "id must be that of a seq", f"{id}, which was freed", call, id)
        assert bookkeeping(self.model.cache) == before

    @precondition(lambda self: self.model.histories)
    @rule(data=st.data(), seed=NUMBER)
    def append_one_token(self, data, seed):
        ids = self.some(data)
        self.append(ids, *tokens(np.random.default_rng(seed), len(ids), 1), None)

    @precondition(lambda self: self.model.histories)
    @rule(data=st.data(), new=st.integers(0, 7), seed=NUMBER)
    def append_some(self, data, new, seed):
        ids = self.some(data)
        lengths = None
        if data.draw(st.booleans()):
            lengths = [data.draw(st.integers(0, new)) for _ in ids]
        key, value = tokens(np.random.default_rng(seed), len(ids), new)
        if lengths is not None:  # padding must not be stored
            for entry, count in enumerate(lengths):
                key[entry, :, count:], value[entry, :, count:] = np.nan, np.nan
        self.append(ids, key, value, lengths)

    def append(self, ids, key, value, lengths):
        """Also of more than there is room for, which must change nothing."""
        cache = self.model.cache
        counts = lengths or [key.shape[2]] * len(ids)
        needed = self.model.needed(dict(zip(ids, counts, strict=True)))
        if needed <= cache.num_free:
            free = cache.num_free
            self.model.append(ids, key, value, lengths)
            assert cache.num_free == free - needed
            return
        before = bookkeeping(cache), cache.key_pages.tobytes(), cache.value_pages.tobytes()
        raises(ValueError, "append must find a free page", f"{needed} needed", cache.append, ids,
               key, value, lengths=lengths)
        assert before == (
            bookkeeping(cache), cache.key_pages.tobytes(), cache.value_pages.tobytes()
        )

    @precondition(lambda self: self.model.histories)
    @rule(data=st.data(), len_q=st.integers(1, 4), options=st.sampled_from([*OPTIONS.values()]),
          seed=NUMBER)  # fmt: skip
    def attention(self, data, len_q, options, seed):
        ids = self.some(data, 3)
        query = queries(np.random.default_rng(seed), len(ids), len_q)
        got = self.model.cache.attention(query, ids, **options)
        check(got, query, [self.model.histories[id] for id in ids], options)

    @rule()
    def pickled(self):
        self.model.cache = pickle.loads(pickle.dumps(self.model.cache))

    @invariant()
    def nothing_leaks(self):
        model = self.model
        model.poison()
        cache, users = model.cache, model.users()
        num_pages, size = cache.key_pages.shape[:2]
        assert cache._references == [users[page] for page in range(num_pages)]
        assert sorted(cache._free) == [page for page in range(num_pages) if not users[page]]
        assert cache.num_free == num_pages - len(users)
        for id, pages in model.pages().items():
            key, value = model.histories[id]
            assert cache.lengths([id]).tolist() == [len(key)]
            assert len(pages) == -(-len(key) // size)
            for pool, history in ((cache.key_pages, key), (cache.value_pages, value)):
                held = pool[pages].reshape(-1, *history.shape[1:])[: len(history)]
                np.testing.assert_array_equal(held, history)


TestPagedCache = PagedCacheMachine.TestCase
TestPagedCache.settings = settings(
    deadline=None, derandomize=True, max_examples=150, stateful_step_count=30,
    phases=[Phase.generate],  # making a failure smaller takes minutes
)  # fmt: skip


@pytest.fixture
def sharing(rng):
    """Two sequences of six tokens in two pages of four: the second page is shared and not full."""
    cache = cache_of(num_pages=4)
    parent = cache.new()
    key, value = tokens(rng, 1, 6)
    cache.append([parent], key, value)
    return cache, parent, cache.fork(parent), (key[0].swapaxes(0, 1), value[0].swapaxes(0, 1))


def test_a_shared_page_is_copied_by_the_first_who_writes(sharing, rng):
    cache, parent, child, old = sharing
    assert cache.num_free == 2
    key, value = tokens(rng, 2, 1)
    cache.append([parent, child], key, value)  # one copy; the other writes where it was
    assert cache.num_free == 1
    first, second = cache.page_table([parent, child]).tolist()
    assert first[0] == second[0]
    assert first[1] != second[1]
    histories = [
        tuple(np.concatenate([x, new[entry].swapaxes(0, 1)])
              for x, new in zip(old, (key, value), strict=True))
        for entry in range(2)
    ]  # fmt: skip
    query = queries(rng, 2, 1)
    check(cache.attention(query, [parent, child]), query, histories, {})


def test_a_full_page_is_never_copied(sharing, rng):
    cache, parent, child, _ = sharing
    cache.append([parent], *tokens(rng, 1, 2))  # copies, and fills
    grandchild = cache.fork(parent)
    assert cache.num_free == 1
    cache.append([grandchild], *tokens(rng, 1, 1))
    assert cache.num_free == 0
    assert cache.page_table([grandchild])[0, :2].tolist() == cache.page_table([parent])[0].tolist()
    cache.append([child], *tokens(rng, 1, 2))  # nobody shares its last page any more
    assert cache.num_free == 0


def test_pages_outlive_the_parent(sharing, rng):
    cache, parent, child, old = sharing
    cache.free(parent)
    assert cache.num_free == 2
    query = queries(rng, 1, 2)
    check(cache.attention(query, [child]), query, [old], {})
    cache.free(child)
    assert cache.num_free == 4


def test_the_last_free_page_counts(sharing, rng):
    cache, parent, child, _ = sharing
    before = bookkeeping(cache), cache.key_pages.tobytes(), cache.value_pages.tobytes()
    key, value = tokens(rng, 2, 3)
    # Two to grow and one to copy, two free
    raises(ValueError, "append must find a free page for all that it needs",
           "3 needed, 1 of them for copies of shared pages, and 2 free of 4",
           cache.append, [parent, child], key, value)  # fmt: skip
    assert before == (bookkeeping(cache), cache.key_pages.tobytes(), cache.value_pages.tobytes())
    cache.append([parent, child], key, value, lengths=[3, 2])
    assert cache.num_free == 0


@pytest.mark.parametrize("failing", ["_key", "_value"])
def test_a_write_that_fails_changes_nothing(failing, sharing, rng):
    class Broken(np.ndarray):
        def __setitem__(self, index, value):
            if isinstance(index[0], np.ndarray):  # the new tokens, after the copy
                raise MemoryError
            super().__setitem__(index, value)

    cache, parent, child, old = sharing
    before, pages = bookkeeping(cache), vars(cache)[failing]
    setattr(cache, failing, pages.view(Broken))
    with pytest.raises(MemoryError):
        cache.append([parent, child], *tokens(rng, 2, 3), lengths=[1, 2])
    setattr(cache, failing, pages)
    assert bookkeeping(cache) == before
    query = queries(rng, 2, 1)
    check(cache.attention(query, [parent, child]), query, [old, old], {})


@pytest.mark.parametrize("page_size", [1, 4, 256])
def test_chunked_prefill_then_decoding(page_size, rng):
    """Sequences of different lengths, in chunks of which each has as many tokens as are left."""
    lengths, chunk = np.array([11, 5, 0]), 4
    cache = cache_of(40, page_size)
    ids = [cache.new() for _ in lengths]
    keys, values = tokens(rng, 3, 12)
    query = queries(rng, 3, 12)
    out = np.zeros((3, NUM_HEADS, 12, D_V), np.float32)
    for start in range(0, 12, chunk):
        part = slice(start, start + chunk)
        valid = np.clip(lengths - start, 0, chunk)
        cache.append(ids, keys[:, :, part], values[:, :, part], lengths=valid)
        got = cache.attention(query[:, :, part], ids, lengths=valid)
        for entry, count in enumerate(valid):
            out[entry, :, start : start + count] = got[entry, :, :count]
    cache.append(ids, keys[:, :, -1:], values[:, :, -1:])
    last = cache.attention(query[:, :, -1:], ids)
    for entry, length in enumerate(lengths):
        where = [*range(length), 11]
        whole = tuple(x[entry][:, where].swapaxes(0, 1) for x in (keys, values))
        found = np.concatenate([out[entry, :, :length], last[entry]], axis=1)[None]
        check(found, query[entry][None, :, where], [whole], {})


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_libraries_and_dtypes(library, dtype, rng):
    library = Library(library)
    small = pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype
    cache = cache_of(dtype=dtype, like=library.array(np.zeros(1)))
    key, value = (x.astype(small) for x in tokens(rng, 2, 7))
    query = queries(rng, 2, 3, dtype)
    ids = [cache.new(), cache.new()]
    cache.append(ids, library.array(key), library.array(value))
    cache.append([cache.fork(ids[0])], library.array(key[:1]), library.array(value[:1]))
    cache = copy.deepcopy(cache)
    got = cache.attention(library.array(query), ids, impl="blockwise")
    assert type(got) is type(library.array(query))
    assert got.dtype == cache.key_pages.dtype
    if library.name == "torch":
        got = got.double().numpy().astype(small)
    histories = [(key[n].swapaxes(0, 1), value[n].swapaxes(0, 1)) for n in range(2)]
    check(got, query, histories, {}, dtype=dtype)


def test_a_dtype_names_its_library(monkeypatch):
    torch = pytest.importorskip("torch")
    assert cache_of(dtype=torch.bfloat16).key_pages.dtype is torch.bfloat16
    for dtype in ("float16", np.float16, np.dtype("float16")):
        assert cache_of(dtype=dtype).value_pages.dtype == np.float16
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(ImportError, match=r"ml_dtypes is needed .*pip install 'scaledot\[bf16\]'"):
        cache_of(dtype="bfloat16")


def test_tokens_are_stored_as_constants(rng):
    torch = pytest.importorskip("torch")
    cache = cache_of(dtype=torch.float32)
    key, value, query = (torch.tensor(x) for x in (*tokens(rng, 1, 3), queries(rng, 1, 2)))
    for x in (key, value, query):
        x.requires_grad_()
    cache.append([cache.new()], key, value)
    cache.attention(query, [0]).sum().backward()
    assert query.grad is not None
    assert key.grad is None
    assert value.grad is None


def test_no_sequence_at_all():
    cache = cache_of()
    cache.append([], *tokens(np.random.default_rng(0), 0, 2))
    assert cache.page_table([]).shape == (0, 0)
    assert cache.lengths([]).shape == (0,)
    got = cache.attention(queries(np.random.default_rng(0), 0, 2), [])
    assert got.shape == (0, NUM_HEADS, 2, D_V)


NEW = tokens(np.random.default_rng(0), 2, 3)
SHAPE = "must have the shape (len(ids), num_kv_heads, new, d) = "
PUT = {"ids": [0, 1], "key": NEW[0], "value": NEW[1]}
ASK = {"ids": [0, 1], "query": queries(np.random.default_rng(0), 2, 3)}
UNKNOWN = "must be that of a sequence in the cache"
MAKE = dict(zip(("num_pages", "page_size", "num_kv_heads", "d_k", "d_v"), (8, 4, 2, 5, 3),
                strict=True), dtype="float32")  # fmt: skip
ERRORS = [
    *(("append", PUT, *case) for case in [
        (ValueError, "ids must be different", "one of them twice", {"ids": [1, 1]}),
        (ValueError, f"ids {UNKNOWN}", "2, which was freed", {"ids": [0, 2]}),
        (ValueError, f"ids {UNKNOWN}", "7, which never was in it", {"ids": [0, 7]}),
        (ValueError, f"ids {UNKNOWN}", "-1, which never was in it", {"ids": [0, -1]}),
        (TypeError, "ids must be a 1-D sequence of integers", "int", {"ids": 0}),
        (TypeError, "ids must be a 1-D sequence of integers", "float64", {"ids": [0.0, 1.0]}),
        (TypeError, "key_pages, key and value must share one dtype", "float32, float64, float64",
         {"key": NEW[0].astype(float), "value": NEW[1].astype(float)}),
        (TypeError, "value must be one of arrays", "builtins.list", {"value": NEW[1].tolist()}),
        (ValueError, f"key {SHAPE}(2, 2, new, 5)", "(2, 2, 3, 3)", {"key": NEW[1]}),
        (ValueError, f"key {SHAPE}(2, 2, new, 5)", "(2, 3, 5)", {"key": NEW[0][0]}),
        (ValueError, f"key {SHAPE}(1, 2, new, 5)", "(2, 2, 3, 5)", {"ids": [0]}),
        (ValueError, f"value {SHAPE}(2, 2, 3, 3)", "(2, 2, 2, 3)", {"value": NEW[1][:, :, :2]}),
        (ValueError, "lengths must have one entry for each of the 2 seq", "(1,)", {"lengths": [1]}),
        (TypeError, "lengths must be a 1-D sequence of integers", "int", {"lengths": 1}),
        (ValueError, "lengths must lie between 0 and new = 3", "0 to 4", {"lengths": [0, 4]}),
        (ValueError, "lengths must lie between 0 and new = 3", "-1 to 2", {"lengths": [2, -1]}),
        (ValueError, "append must find a free page for all that it needs",
         "9 needed, 0 of them for copies of shared pages, and 7 free of 8",
         {"key": NEW[0].repeat(6, axis=2), "value": NEW[1].repeat(6, axis=2)}),
    ]),
    *(("attention", ASK, *case) for case in [
        (TypeError, "query must be one of arrays", "builtins.list", {"query": [1.0]}),
        (ValueError, f"ids {UNKNOWN}", "2, which was freed", {"ids": [0, 2]}),
        (ValueError, "query must have the axes (len(ids) = 1, num_heads, len_q, d_k)",
         "(2, 4, 3, 5)", {"ids": [1]}),
        (ValueError, "query must have the axes (len(ids) = 2, ", "(4, 3, 5)",
         {"query": ASK["query"][0]}),
        (ValueError, "lengths must lie between 0 and len_q = 3", "1 to 4", {"lengths": [4, 1]}),
        (ValueError, "softcap must be positive", "-1", {"softcap": -1.0}),
        (TypeError, "query, key_pages and value_pages must share one dtype", "float64",
         {"query": ASK["query"].astype(float)}),
    ]),
    *((name, {"id": 0}, *case) for name in ("fork", "free") for case in [
        (ValueError, f"id {UNKNOWN}", "2, which was freed", {"id": 2}),
        (ValueError, f"id {UNKNOWN}", "9, which never was in it", {"id": 9}),
        (TypeError, "id must be an integer", "[0]", {"id": [0]}),
        (TypeError, "id must be an integer", "True", {"id": True}),
    ]),
    *((name, {"ids": [0]}, ValueError, f"ids {UNKNOWN}", "2, which was freed", {"ids": [2]})
      for name in ("lengths", "page_table")),
    *(("PagedKVCache", MAKE, *case) for case in [
        *((ValueError, f"{n} must be at least 1", "0", {n: 0}) for n in MAKE if n != "dtype"),
        (TypeError, "page_size must be an integer", "4.0", {"page_size": 4.0}),
        (ValueError, f"keys and values must have at most {2**63 - 1} bytes each",
         f"num_pages={2**62} of ", {"num_pages": 2**62}),
        (TypeError, "dtype must be one of float32, float64, float16, bfloat16", "'int8'",
         {"dtype": "int8"}),
        (TypeError, "dtype must be one of float32, ", "None", {"dtype": None}),
        (TypeError, "like must be one of arrays", "builtins.str", {"like": "torch"}),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "right", "error", "must_hold", "given", "wrong"), ERRORS,
                         ids=[f"{case[0]}-{case[3]}-{case[4]}" for case in ERRORS])  # fmt: skip
def test_errors_change_nothing(name, right, error, must_hold, given, wrong, rng):
    if name == "PagedKVCache":
        PagedKVCache(**right)
        raises(error, must_hold, given, PagedKVCache, **right | wrong)
        return
    cache = cache_of()
    ids = [cache.new() for _ in range(3)]
    cache.free(ids[2])
    cache.append(ids[:1], *tokens(rng, 1, 2))
    getattr(copy.deepcopy(cache), name)(**right)
    before = pickle.dumps(cache)
    raises(error, must_hold, given, getattr(cache, name), **right | wrong)
    assert pickle.dumps(cache) == before


@pytest.mark.parametrize("copied", [False, True])
def test_pools_made_in_inference_mode_are_written_outside(rng, copied):
    torch = pytest.importorskip("torch")
    plain, like = cache_of(), torch.zeros(1)
    if copied:
        cache = cache_of(like=like)
    with torch.inference_mode():
        cache = copy.deepcopy(cache) if copied else cache_of(like=like)
    ids = [cache.new(), cache.new()]
    assert ids == [plain.new(), plain.new()]
    for _ in range(2):
        new = tokens(rng, 2, 3)
        plain.append(ids, *new)
        cache.append(ids, *map(torch.tensor, new))
    for name in ("key_pages", "value_pages"):
        assert np.array_equal(getattr(cache, name).numpy(), getattr(plain, name))


def test_arrays_that_cannot_be_written_to():
    jax = pytest.importorskip("jax")
    raises(TypeError, "like must be an array of NumPy or PyTorch", "jax", _paged_cache.PagedKVCache,
           **MAKE, like=jax.numpy.zeros(1))  # fmt: skip
