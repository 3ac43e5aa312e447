"""Kernels that find pages themselves: the bits of contiguous memory, whoever shares the pages."""

import tracemalloc

import numpy as np
import pytest

import scaledot as sd
from compare import EPS, as_float64, assert_close
from scaledot import _page_kernels
from scaledot._paged import paged_state
from scaledot._spec import Options
from test_paged import OPTIONS, pages_of, queries, sequences
from test_tiles import DTYPES

SIZES = (1, 3, 16, 100, 128, 256)
RAGGED = (0, 1, 100, 129, 1024, 1025, 2300)
HIDING = {
    "none": {}, "window": {"window": (200, 0)}, "sinks": OPTIONS["sinks"],
    "softcap, alibi": OPTIONS["alibi"] | OPTIONS["softcap and scale"],
}  # fmt: skip


def alone(query, history, options):
    """Attention over one sequence in contiguous memory."""
    key, value = (np.ascontiguousarray(x.swapaxes(0, 1)) for x in history)
    return sd.attention(query, key, value, **{"causal": True} | options)


def with_bits_of_each_alone(query, histories, pages, options, entries=None):
    """Compare with attention over each sequence in contiguous memory, to the bit."""
    lengths = [len(key) for key, _ in histories]
    got = sd.paged_attention(query, *pages, lengths, impl="kernels", **options)
    for entry in range(len(histories)) if entries is None else entries:
        assert_same(got[entry], alone(query[entry], histories[entry], options))
    return got


def assert_same(a, b):
    np.testing.assert_array_equal(as_float64(a), as_float64(b))


@pytest.mark.parametrize("options", HIDING.values(), ids=HIDING)
@pytest.mark.parametrize("len_q", [1, 5, 70])
def test_bits_of_contiguous_memory(len_q, options, rng):
    """Few queries and many, pages that tiles fill, cut, and hold whole."""
    histories = sequences(rng, RAGGED)
    query = queries(rng, len(RAGGED), len_q)
    for page_size in SIZES:
        with_bits_of_each_alone(query, histories, pages_of(histories, page_size, rng), options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_in_odd_pages(dtype, rng):
    """Products of pairs take two keys at once, which may lie in two pages."""
    histories = sequences(rng, (131, 64, 7), dtype)
    for len_q, page_size in ((2, 1), (2, 5), (20, 1), (20, 5), (20, 129)):
        query = queries(rng, 3, len_q, dtype)
        with_bits_of_each_alone(query, histories, pages_of(histories, page_size, rng), {})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("len_q", [2, 20])
def test_odd_values_of_hidden_tokens_do_not_matter(dtype, len_q, rng):
    histories = sequences(rng, (150, 130), dtype)
    hidden = {"window": (60, 0)}
    query = queries(rng, 2, len_q, dtype)
    clean = sd.paged_attention(query, *pages_of(histories, 7, rng), [150, 130], **hidden)
    for key, value in histories:
        key[:40], value[:40] = np.nan, np.inf
    found = with_bits_of_each_alone(query, histories, pages_of(histories, 7, rng), hidden)
    assert_same(found, clean)
    histories[1][1][-1] = np.nan  # the last token: its own query sees it
    found = with_bits_of_each_alone(query, histories, pages_of(histories, 7, rng), hidden)
    assert np.isnan(as_float64(found)[1, :, -1]).all()
    assert not np.isnan(as_float64(found)[0]).any()


def forked(rng, common, own, dtype="float32", page_size=16):
    """Histories that begin alike, and pages that share what is full of the beginning."""
    (start,), rest = sequences(rng, [common], dtype), sequences(rng, own, dtype)
    histories = [tuple(map(np.concatenate, zip(start, x, strict=True))) for x in rest]
    key, value, table = pages_of(histories, page_size, rng)
    table[1:, : common // page_size] = table[0, : common // page_size]
    return histories, (key, value, table)


@pytest.mark.parametrize("options", HIDING.values(), ids=HIDING)
@pytest.mark.parametrize("own", [(5, 300, 0, 16), (7,) * 41], ids=["few", "more than a task"])
def test_a_shared_beginning_is_read_together(own, options, rng, monkeypatch):
    """The bits of each sequence are those it has alone, and parts in common are one task."""
    histories, pages = forked(rng, 2048 + 30, own)
    tasks = []
    made = _page_kernels._shares
    monkeypatch.setattr(_page_kernels, "_shares", lambda *x: tasks.append(made(*x)) or tasks[-1])
    for len_q in (1, 3):
        query = queries(rng, len(own), len_q)
        with_bits_of_each_alone(query, histories, pages, options, entries=(0, 1, len(own) - 1))
    rows = 2 * 1  # queries of one sequence that share a key head
    most = _page_kernels.ROWS // rows
    together = -(-len(own) // most)
    assert len(tasks[0].shares) == 2 * together + len(own)
    assert np.diff(tasks[0].shares[:, 3:]).max() == min(len(own), most)


def test_branches_of_branches(rng):
    """Sequences that part in the first, second and third part of their keys; others beside them."""
    histories, (key, value, table) = forked(rng, 3072, (9, 200, 17, 40))
    stranger = sequences(rng, [2100])
    histories += stranger
    key, value, table = pages_of(histories, 16, rng)
    for entry, pages in ((1, 192), (2, 128), (3, 64)):
        table[entry, :pages] = table[0, :pages]
    query = queries(rng, 5, 2)
    for options in HIDING.values():
        with_bits_of_each_alone(query, histories, (key, value, table), options)
    shares = _page_kernels._shares(_page_kernels.Pages(
        key, value, table, np.array([len(x) for x, _ in histories]), None), 64)  # fmt: skip
    sizes = [int(end - first) for _, _, _, first, end in shares.shares]
    assert sorted(sizes) == [1] * 10 + [2, 3, 4]


def test_who_shares_a_bad_value_sees_it(rng):
    """Nan in a shared beginning, hidden from one sequence by its window, reaches the others."""
    histories, pages = forked(rng, 1024, (300, 20, 600))
    _, value, table = pages
    value[table[0, 55], 3] = np.nan  # token 883
    for entry in range(3):
        histories[entry][1][883] = np.nan
    query = queries(rng, 3, 1)
    found = with_bits_of_each_alone(query, histories, pages, {"window": (500, 0)})
    assert np.isnan(found).any(axis=(1, 2, 3)).tolist() == [True, True, False]


@pytest.mark.parametrize("options", [{}, {"window": (300, 0)}], ids=["causal", "window"])
def test_who_shares_a_part_may_see_little_of_it(options, rng):
    """Queries before its end, before its start, and behind it."""
    histories, pages = forked(rng, 1024, (40, 1, 500, 600))
    starts = np.array([300, -5, 1500, 5])
    lengths = [len(key) for key, _ in histories]
    query = queries(rng, 4, 2)
    got = sd.paged_attention(query, *pages, lengths, q_offset=starts, impl="kernels", **options)
    for entry, start in enumerate(starts.tolist()):
        own = options | {"q_offset": start}
        assert_same(got[entry], alone(query[entry], histories[entry], own))


@pytest.mark.parametrize("len_q", [1, 40])
def test_nothing_is_gathered(len_q, rng):
    """Memory of a call beside 6 MiB of tokens in scattered pages."""
    histories = [tuple(rng.standard_normal((2, 6000, 2, 64), dtype=np.float32))]
    query = rng.standard_normal((1, 2, len_q, 64), dtype=np.float32)
    pages = pages_of(histories, 16, rng)
    sd.paged_attention(query, *pages, [6000], impl="kernels")
    tracemalloc.start()
    sd.paged_attention(query, *pages, [6000], impl="kernels")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    threads = sd.get_num_threads()
    assert peak < 2**20 * (1 + threads // 2)


def test_states_have_lse(rng):
    histories, pages = forked(rng, 1100, (1, 50))
    query, lengths = queries(rng, 2, 2), [1101, 1150]
    state = paged_state(query, *pages, lengths, Options(causal=True))
    for entry, (key, value) in enumerate(histories):
        key, value = key.swapaxes(0, 1), value.swapaxes(0, 1)
        right = sd.attention_state(
            query[entry], key, value, causal=True, q_offset=lengths[entry] - 2
        )
        assert_close(state.lse[entry], right.lse, eps=EPS["float32"], len_kv=lengths[entry])
        np.testing.assert_array_equal(state.out[entry], right.out)


def test_pages_beside_one_that_is_far_longer(rng):
    """Prompts of both kinds of task in one call, in their order."""
    lengths = [50, 2**18 + 1, 300]
    histories = [tuple(x.astype(np.float32) for x in rng.standard_normal((2, n, 1, 3)))
                 for n in lengths]  # fmt: skip
    query = rng.standard_normal((3, 1, 10, 3), dtype=np.float32)
    with_bits_of_each_alone(query, histories, pages_of(histories, 2**12, rng), {})
