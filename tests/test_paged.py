"""Attention over pages against the oracle on each sequence's tokens, laid out one by one."""

import functools
import tracemalloc

import numpy as np
import pytest

import naive
from compare import EPS, as_float64, assert_close
from conftest import Library
from scaledot import _page_kernels, _paged
from scaledot._paged import paged_attention, paged_state
from scaledot._spec import Options
from test_attention import textbook_of
from test_errors import raises
from test_family import HALVES, cast

NUM_HEADS, NUM_KV_HEADS, D_K, D_V = 4, 2, 5, 3
PAGE_SIZES = (1, 2, 3, 8, 16, 256)
OPTIONS = {
    "none": {},
    "not causal": {"causal": False},
    "window": {"window": (3, None)},
    "two-sided window": {"window": (2, 1), "causal": False},
    "softcap and scale": {"softcap": 1.5, "scale": 0.8},
    "alibi": {"alibi_slopes": np.array([0.5, 0.25, 2.0, 0.0], np.float32)},
    "sinks": {"sinks": np.array([0.5, -1.0, 3.0, -np.inf], np.float32)},
}


def pages_of(histories, page_size, rng, *, layout="permuted", spare=2):
    """Key pages, value pages and table that hold sequences, nan and nonsense everywhere else."""
    counts = [-(-len(key) // page_size) for key, _ in histories]
    num_pages = sum(counts) + spare
    order = np.arange(num_pages)
    if layout == "permuted":
        order = rng.permutation(num_pages)
    elif layout == "pieces":  # neighbours by threes, the pieces out of order
        order = np.concatenate([order[i : i + 3] for i in rng.permutation(range(0, num_pages, 3))])
    pools = tuple(
        np.full((num_pages, page_size, *x.shape[1:]), np.nan, x.dtype) for x in histories[0]
    )
    table = np.full((len(histories), max([*counts, 0]) + 1), 10**6)
    numbers = iter(order)
    for row, history, count in zip(table, histories, counts, strict=True):
        row[:count] = [next(numbers) for _ in range(count)]
        for pool, x in zip(pools, history, strict=True):
            for token, data in enumerate(x):
                pool[row[token // page_size], token % page_size] = data
    return (*pools, table)


def sequences(rng, lengths, dtype="float32", *, num_kv_heads=NUM_KV_HEADS):
    """Keys and values of sequences, each (length, num_kv_heads, d)."""
    return [
        tuple(
            cast({d: rng.standard_normal((n, num_kv_heads, d)) for d in (D_K, D_V)}, dtype).values()
        )
        for n in lengths
    ]


def queries(rng, count, len_q, dtype="float32", *, num_heads=NUM_HEADS):
    return cast({"q": rng.standard_normal((count, num_heads, len_q, D_K))}, dtype)["q"]


def check(got, query, histories, options, *, dtype="float32", q_offset=None):
    """Compare with attention over every history alone."""
    assert got.shape == (*query.shape[:3], D_V)
    assert str(got.dtype).endswith(dtype)
    got, options = as_float64(got), {"causal": True} | options
    for entry, (key, value) in enumerate(histories):
        arguments = options | {
            "query": query[entry], "key": key.swapaxes(0, 1), "value": value.swapaxes(0, 1)
        }
        if q_offset is not None:
            arguments["q_offset"] = int(q_offset[entry])
        truth, _, weights = naive.attention(**arguments)
        yardstick, _ = textbook_of(arguments, weights)
        assert_close(got[entry], truth, yardstick, eps=EPS[dtype], len_kv=len(key))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_permuted_pages(page_size, options, rng):
    histories = sequences(rng, [7, 0, 1, 16, 3])
    for len_q in (1, 4):
        query = queries(rng, len(histories), len_q)
        pages = pages_of(histories, page_size, rng)
        lengths = [len(key) for key, _ in histories]
        check(paged_attention(query, *pages, lengths, **options), query, histories, options)


@pytest.mark.parametrize("library", ["numpy-readonly", "strict", "torch", "jax"])
def test_libraries(library, rng):
    library = Library(library)
    histories = sequences(rng, [5, 8])
    query, lengths = queries(rng, 2, 3), np.array([5, 8])
    arrays = {
        "query": query, **OPTIONS["sinks"], "kv_len": lengths,
        **dict(zip(("key_pages", "value_pages", "page_table"), pages_of(histories, 3, rng),
                   strict=True)),
    }  # fmt: skip
    given = library.arguments(arrays)
    got = paged_attention(**given)
    assert type(got) is type(given["query"])
    check(got, query, histories, OPTIONS["sinks"])


@pytest.mark.parametrize("impl", ["dense", "blockwise", "kernels"])
@pytest.mark.parametrize("dtype", [*HALVES, "float64"])
def test_dtypes(dtype, impl, rng):
    histories = sequences(rng, [11, 4], dtype)
    query = queries(rng, 2, 2, dtype)
    got = paged_attention(query, *pages_of(histories, 4, rng), [11, 4], impl=impl)
    check(got, query, histories, {}, dtype=dtype)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (6, 1), (3, 3), (8, 2)])
def test_groups_of_heads(num_heads, num_kv_heads, rng):
    histories = sequences(rng, [9, 6], num_kv_heads=num_kv_heads)
    query = queries(rng, 2, 2, num_heads=num_heads)
    check(paged_attention(query, *pages_of(histories, 2, rng), [9, 6]), query, histories, {})


LONG = (2 * _paged.SLICE + 5, _paged.SLICE, _paged.SLICE - 1)


@pytest.mark.parametrize("options", [{}, OPTIONS["sinks"], {"window": (1500, None)}], ids=str)
@pytest.mark.parametrize("layout", ["in order", "pieces", "permuted"])
@pytest.mark.parametrize("page_size", [7, 256, 1500])
def test_more_tokens_than_one_slice(page_size, layout, options, rng):
    histories = sequences(rng, LONG, num_kv_heads=1)
    query = queries(rng, 3, 1, num_heads=2)
    options = {name: x[:2] if name == "sinks" else x for name, x in options.items()}
    pages = pages_of(histories, page_size, rng, layout=layout)
    got = paged_attention(query, *pages, LONG, **options)
    check(got, query, histories, options)


def test_bits_follow_from_the_sequence_alone(rng):
    """Not from where pages lie, their size, other sequences, or a window wider than the keys."""
    histories = sequences(rng, LONG, num_kv_heads=1)
    query = queries(rng, 3, 2, num_heads=2)
    call = functools.partial(paged_attention, query, kv_len=LONG)
    wanted = call(*pages_of(histories, 16, rng)[:3])
    for page_size, layout in (
        (1, "permuted"), (16, "in order"), (30, "pieces"), (700, "permuted"), (5000, "in order"),
    ):  # fmt: skip
        key_pages, value_pages, table = pages_of(histories, page_size, rng, layout=layout)
        assert call(key_pages, value_pages, table).tobytes() == wanted.tobytes()
        wide = call(key_pages, value_pages, table, window=(9999, None))
        assert wide.tobytes() == wanted.tobytes()
        for entry in range(3):
            alone = paged_attention(
                query[entry : entry + 1], key_pages, value_pages, table[[entry]], [LONG[entry]]
            )
            assert alone[0].tobytes() == wanted[entry].tobytes()


@pytest.mark.parametrize(
    "options", [{}, {"window": (2, None)}, {"causal": False, "window": (1, 1)}], ids=str
)
def test_queries_at_other_positions(options, rng):
    histories = sequences(rng, [9, 4, 6])
    query, q_offset = queries(rng, 3, 3), [2, -2, 30]
    got = paged_attention(query, *pages_of(histories, 4, rng), [9, 4, 6], **options,
                          q_offset=q_offset)
    check(got, query, histories, options, q_offset=q_offset)


def test_sequences_share_pages(rng):
    (history,) = sequences(rng, [8])
    key_pages, value_pages, table = pages_of([history], 4, rng)
    query = queries(rng, 3, 1)
    got = paged_attention(query, key_pages, value_pages, np.repeat(table, 3, axis=0), [8, 5, 8])
    short = tuple(x[:5] for x in history)
    check(got, query, [history, short, history], {})


def test_memory_of_any_strides(rng):
    """Pools with heads first, every second page of a larger one, and backwards."""
    histories = sequences(rng, [13, 6])
    query = queries(rng, 2, 2)
    for layout in ("in order", "permuted"):
        key_pages, value_pages, table = pages_of(histories, 3, rng, layout=layout)
        heads_first = np.ascontiguousarray(key_pages.transpose(2, 0, 1, 3)).transpose(1, 2, 0, 3)
        backwards = np.ascontiguousarray(value_pages[::-1])[::-1]
        spread = np.repeat(key_pages, 2, axis=0)
        spread[1::2] = np.nan
        for pools in ((heads_first, value_pages), (spread[::2], backwards)):
            check(paged_attention(query, *pools, table, [13, 6]), query, histories, {})


def test_neighbouring_pages_are_read_where_they_lie(rng):
    torch = pytest.importorskip("torch")
    pool = rng.standard_normal((6, 4, 2, 3))
    numbers = np.array([1, 2, 3, 5])
    piece = _paged._tokens(pool, numbers, 2, 11)
    assert np.shares_memory(piece, pool)
    np.testing.assert_array_equal(piece, pool[1:4].reshape(12, 2, 3)[2:11].swapaxes(0, 1))
    tensor = torch.from_numpy(pool)
    assert np.shares_memory(_paged._tokens(tensor, numbers, 2, 11).numpy(), pool)
    scattered = _paged._tokens(pool, numbers, 2, 16)
    assert not np.shares_memory(scattered, pool)
    np.testing.assert_array_equal(scattered, pool[numbers].reshape(16, 2, 3)[2:].swapaxes(0, 1))


def test_scattered_pages_are_gathered_by_slices(rng):
    """32 slices of tokens, and the memory of a few."""
    num_pages, page_size = 2 * _paged.SLICE, 16
    pool = rng.standard_normal((num_pages, page_size, 1, 32)).astype(np.float32)
    table, query = rng.permutation(num_pages)[None], np.ones((1, 1, 1, 32), np.float32)
    call = functools.partial(paged_attention, query, pool, pool, table, [num_pages * page_size])
    call()
    tracemalloc.start()
    try:
        call()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * _paged.SLICE * 32 * 4


def test_slices_out_of_sight_are_left_out():
    size = _paged.SLICE

    def parts(length, start, len_q=1, **options):
        return _paged._visible_parts(length, start, len_q, Options(**options))

    assert parts(2 * size + 5, 2 * size + 4, causal=True) == [
        (0, size), (size, 2 * size), (2 * size, 2 * size + 5)
    ]
    assert parts(2 * size + 5, 2 * size + 4, causal=True, window=(3, None)) == [
        (2 * size, 2 * size + 5)
    ]
    assert parts(2 * size, size + 2, 3, window=(3, 0)) == [(0, size), (size, size + 5)]
    assert parts(0, -1) == [(0, 0)]
    assert parts(size, 5, 0) == [(0, 0)]
    assert parts(size, -2, causal=True) == [(0, 0)]
    assert parts(size, 3 * size, window=(5, 5)) == [(0, 0)]


def test_no_sequence_and_no_query(rng):
    histories = sequences(rng, [3])
    pages = pages_of(histories, 2, rng)
    for query, lengths, table in ((queries(rng, 0, 2), [], pages[2][:0]),
                                  (queries(rng, 1, 0), [3], pages[2])):
        for sinks in (None, np.ones(NUM_HEADS)):
            got = paged_attention(query, *pages[:2], table, lengths, sinks=sinks)
            assert got.shape == (*query.shape[:3], D_V)
    empty = tuple(np.zeros((0, 2, NUM_KV_HEADS, d), np.float32) for d in (D_K, D_V))
    got = paged_attention(queries(rng, 2, 1), *empty, np.full((2, 0), -1), [0, 0])
    np.testing.assert_array_equal(got, np.zeros((2, NUM_HEADS, 1, D_V)))


def test_state_with_and_without_sinks(rng):
    histories = sequences(rng, [6, 0])
    query = queries(rng, 2, 2)
    pages = pages_of(histories, 4, rng)
    for options in ({}, OPTIONS["sinks"]):
        state = paged_state(query, *pages, [6, 0], Options(causal=True, **options))
        for entry, (key, value) in enumerate(histories):
            _, lse, _ = naive.attention(query[entry], key.swapaxes(0, 1), value.swapaxes(0, 1),
                                        causal=True, **options)
            assert_close(state.lse[entry], lse, eps=EPS["float32"], len_kv=6)


def test_gradients_reach_query_and_pages(rng):
    torch = pytest.importorskip("torch")
    histories = sequences(rng, [7, 4], "float64")
    pages = pages_of(histories, 3, rng)
    arrays = [torch.tensor(np.nan_to_num(x)) for x in pages[:2]]
    arrays.insert(0, torch.tensor(queries(rng, 2, 2, "float64")))
    for x in arrays:
        x.requires_grad_()
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda *x: paged_attention(*x[:3], pages[2], [7, 4], sinks=x[3]), (*arrays, sinks),
        fast_mode=True,
    )


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


GIVEN = {
    "query": ones(2, 4, 1, 8), "key_pages": ones(6, 4, 2, 8), "value_pages": ones(6, 4, 2, 3),
    "page_table": np.array([[0, 5], [2, -1]]), "kv_len": [8, 3],
}
INTEGERS = "page_table must be a 2-D array of integers"
EXISTS = "page_table must hold page numbers ≥ 0 and below num_pages = 6"
ONE_ROW = "page_table must have one row for each of the 2 sequences"
ERRORS = [
    (TypeError, "query must be one of arrays", "builtins.list", {"query": [1]}),
    (TypeError, "query, key_pages and value_pages must share one dtype", "float64",
     {"key_pages": ones(6, 4, 2, 8, dtype=np.float64)}),
    (ValueError, "query must have the axes (batch, num_heads, len_q, d)", "(4, 1, 8)",
     {"query": ones(4, 1, 8)}),
    (ValueError, "value_pages must have the axes (num_pages, page_size, num_kv_heads, d)",
     "(6, 4, 2)", {"value_pages": ones(6, 4, 2)}),
    (ValueError, "key_pages and value_pages must have the same first axes",
     "value_pages (6, 4, 1, 3)", {"value_pages": ones(6, 4, 1, 3)}),
    (ValueError, "page_size of key_pages must be at least 1", "(6, 0, 2, 8)",
     {"key_pages": ones(6, 0, 2, 8), "value_pages": ones(6, 0, 2, 3)}),
    (ValueError, "query and key_pages must have the same d_k", "query (2, 4, 1, 7)",
     {"query": ones(2, 4, 1, 7)}),
    (ValueError, "num_heads of query must be a multiple of num_kv_heads of key_pages",
     "3 and 2 (query", {"query": ones(2, 3, 1, 8)}),
    (ValueError, "num_heads of query must be a multiple of num_kv_heads of key_pages", "4 and 0",
     {"key_pages": ones(6, 4, 0, 8), "value_pages": ones(6, 4, 0, 3)}),
    (TypeError, INTEGERS, "float64 (2, 2)", {"page_table": np.zeros((2, 2))}),
    (TypeError, INTEGERS, "bool (1, 2)", {"page_table": [[True, False]]}),
    (TypeError, INTEGERS, "int64 (2,)", {"page_table": [0, 5]}),
    (TypeError, INTEGERS, "list", {"page_table": [[0, 5], [2]]}),
    (TypeError, "page_table must be a plain array", "MaskedArray",
     {"page_table": np.ma.array(GIVEN["page_table"])}),
    (ValueError, ONE_ROW, "(1, 2)", {"page_table": [[0, 5]]}),
    (ValueError, EXISTS, "page 6 at entry 1 of sequence 0, whose 8 tokens are in 2 pages",
     {"page_table": [[0, 6], [2, -1]]}),
    (ValueError, EXISTS, "page -1 at entry 1 of sequence 1", {"kv_len": [8, 5]}),
    (ValueError, EXISTS, f"page {2**64 - 1} at entry 0 of sequence 0",
     {"page_table": np.array([[2**64 - 1, 0], [2, 0]], np.uint64)}),
    (ValueError, EXISTS, "page 9 at entry 0 of sequence 1, whose 1 tokens",
     {"page_table": [[-1, 9], [9, 9]], "kv_len": [0, 1]}),
    (TypeError, "kv_len must be a 1-D sequence of integers", "float64", {"kv_len": [8.0, 3.0]}),
    (ValueError, "kv_len must have one entry for each of the 2 sequences", "(1,)", {"kv_len": [8]}),
    (ValueError, "kv_len must lie between 0 and max_pages × page_size = 8", "3 to 9",
     {"kv_len": [9, 3]}),
    (ValueError, "kv_len must lie between 0", "-1 to 8", {"kv_len": [8, -1]}),
    (TypeError, "q_offset must be a 1-D sequence of integers", "int", {"q_offset": 3}),
    (ValueError, "q_offset must have one entry", "(3,)", {"q_offset": [1, 2, 3]}),
    (ValueError, "q_offset must lie between", f"-{2**62}", {"q_offset": [0, -(2**62)]}),
    # What attention itself checks, before any page is read
    (TypeError, "causal must be True or False", "1", {"causal": 1}),
    (ValueError, "both sides of window must be at least 0", "(-1, 0)", {"window": (-1, 0)}),
    (ValueError, "scale must be finite", "inf", {"scale": np.inf}),
    (ValueError, "softcap must be positive", "0.0", {"softcap": 0.0}),
    (ValueError, "alibi_slopes must have the shape (num_heads,) = (4,)", "(2,)",
     {"alibi_slopes": ones(2)}),
    (ValueError, "sinks must have the shape (num_heads,) = (4,)", "(2,)", {"sinks": ones(2)}),
    (ValueError, "impl must be one of", "'fast'", {"impl": "fast"}),
]  # fmt: skip


@pytest.mark.parametrize(("error", "must_hold", "given", "arguments"), ERRORS,
                         ids=[f"{case[1]}-{case[2]}" for case in ERRORS])  # fmt: skip
def test_errors_before_a_page_is_read(error, must_hold, given, arguments, monkeypatch):
    paged_attention(**GIVEN)
    for module, name in ((_paged, "_folded"), (_page_kernels, "run")):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("pages were read"))
    raises(error, must_hold, given, paged_attention, **GIVEN | arguments)


def test_a_table_that_is_being_traced():
    jax = pytest.importorskip("jax")
    arrays = {n: jax.numpy.asarray(x) for n, x in GIVEN.items() if n != "kv_len"}
    table = arrays.pop("page_table")
    raises(TypeError, INTEGERS, "values that are being traced",
           jax.jit(lambda t: paged_attention(**arrays, page_table=t, kv_len=[8, 3])), table)
