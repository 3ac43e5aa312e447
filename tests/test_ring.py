"""Ring and Ulysses attention, the ranks being threads, against the oracle on the whole sequence."""

import functools
import itertools

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import cases
import scaledot as sd
from compare import EPS, as_float64, assert_close
from ring_calls import (
    FUNCTIONS,
    LAYOUTS,
    OPTIONS,
    Found,
    arguments_of,
    as_tensors,
    normal,
    own_share,
    shards_of,
    spread,
    tensor,
)
from scaledot import _ring_plan
from scaledot._ring import ring_attention
from scaledot._ring_transport import InProcessRing
from scaledot._ulysses import ulysses_attention
from test_gradients import assert_gradient, expected_of


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Threads of many ranks, waiting for one another on a busy machine, take most of the time."""
    before = torch.get_num_threads(), sd.get_num_threads()
    torch.set_num_threads(1)
    sd.set_num_threads(1)
    yield
    torch.set_num_threads(before[0])
    sd.set_num_threads(before[1])


def check(arguments, dtype, world_size, layout, expected=None, **more):
    """Hold the joined results to the rule of all tests."""
    if expected is None:
        expected = expected_of(arguments, dtype, with_lse=False)
    found = spread(arguments, expected.grad_out, world_size, layout, **more)
    len_kv = arguments["key"].shape[-2]
    assert str(found.out.dtype) == f"torch.{dtype}"
    assert_close(found.out, expected.out, expected.near[0], eps=EPS[dtype], len_kv=len_kv)
    assert found.grads
    for name, got in found.grads.items():
        argument = arguments[name]
        assert tuple(got.shape) == argument.shape, name
        assert str(got.dtype) == f"torch.{argument.dtype}", name
        got = as_float64(got).astype(argument.dtype)
        assert_gradient(name, got, expected, dtype, len_kv)
    return found


@functools.cache
def expected_of_option(option, dtype):
    return expected_of(arguments_of(option, dtype), dtype, with_lse=False)


# Equality with the whole sequence

PLACES = list(itertools.product((2, 3, 4), LAYOUTS))
TURNS = [(option, *PLACES[(i + j * 2) % 6], ("float32", "float64")[(i + j) % 2])
         for i, option in enumerate(OPTIONS) for j in range(2)]  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("option", "world_size", "layout", "dtype"), TURNS)
def test_every_option(option, world_size, layout, dtype, function):
    check(arguments_of(option, dtype), dtype, world_size, layout,
          expected_of_option(option, dtype), function=FUNCTIONS[function])  # fmt: skip


@pytest.fixture
def small_pieces(monkeypatch):
    """Every key head travels by itself; every head of query is computed with by itself."""
    monkeypatch.setattr(_ring_plan, "PIECE_BYTES", 1)


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_in_pieces(option, small_pieces):
    world_size, layout = PLACES[len(option) % 6]
    check(arguments_of(option), "float32", world_size, layout,
          expected_of_option(option, "float32"))  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 1), (12, 4), (10, 5), (24, 12)])
def test_heads_in_pieces(heads, kv_heads, dtype, small_pieces):
    """Groups that are cut and ranges of heads that one seed does not serve."""
    size = cases.Size(len_q=9, len_kv=9, num_heads=heads, num_kv_heads=kv_heads, lead=(2,))
    options = {"dropout": 0.4, "seed": 5, "alibi_slopes": normal(heads) ** 2, "causal": True}
    arguments = arguments_of("plain", dtype, size) | options
    expected = expected_of(arguments, dtype, with_lse=False)
    check(arguments, dtype, 3, "zigzag", expected, lengths=(4, 0, 5))


def test_pieces_change_no_bit(monkeypatch):
    arguments = arguments_of("everything")
    grad_out = expected_of_option("everything", "float32").grad_out
    whole = spread(arguments, grad_out, 4, "zigzag")
    monkeypatch.setattr(_ring_plan, "PIECE_BYTES", 1)
    assert torch.equal(spread(arguments, grad_out, 4, "zigzag").out, whole.out)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_everything_at_once(world_size, layout, function):
    check(arguments_of("everything"), "float32", world_size, layout,
          expected_of_option("everything", "float32"), function=FUNCTIONS[function])  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "lengths", [(5, 8), (13, 0), (0, 13), (1, 10, 2), (0, 4, 0, 9), (7, 1, 0, 5)]
)
def test_uneven_and_empty_shards(lengths, layout, function):
    check(arguments_of("everything"), "float32", len(lengths), layout,
          expected_of_option("everything", "float32"), function=FUNCTIONS[function],
          lengths=lengths)  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("len_q", "len_kv"), [(6, 13), (13, 5), (4, 0), (0, 6)])
def test_other_numbers_of_queries_than_of_keys(len_q, len_kv, layout, function):
    size = cases.Size(len_q=len_q, len_kv=len_kv, d_k=4, d_v=5, num_heads=4, num_kv_heads=2)
    arguments = arguments_of("causal", "float64", size) | {"sinks": normal(4)}
    check(arguments, "float64", 2, layout, function=FUNCTIONS[function])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "size",
    [
        cases.Size(len_q=9, len_kv=9, num_heads=None, lead=()),
        cases.Size(len_q=9, len_kv=9, num_heads=3, num_kv_heads=1, lead=(2, 2), key_lead=(1, 2),
                   value_lead=()),
    ],
    ids=["matrix", "broadcast"],
)  # fmt: skip
def test_shapes(size, layout):
    check(arguments_of("causal", "float64", size), "float64", 3, layout)
    if size.num_heads is None:
        check(arguments_of("window", "float64", size), "float64", 1, layout,
              function=ulysses_attention)  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(dtype, function):
    check(arguments_of("sinks", dtype), dtype, 4, "zigzag", function=FUNCTIONS[function])


@pytest.mark.parametrize("impl", ["dense", "blockwise", "kernels"])
def test_every_implementation(impl):
    expected = expected_of_option("sinks", "float32")
    check(arguments_of("sinks"), "float32", 3, "zigzag", expected, impl=impl)


@pytest.mark.parametrize("amplitude", [6.0, 60.0])
def test_rows_with_a_large_lse(amplitude):
    size = cases.Size(len_q=9, len_kv=9, d_k=16, num_heads=2, lead=(), amplitude=amplitude)
    arguments = arguments_of("plain", size=size)
    expected = expected_of(arguments, "float32", with_lse=False)
    assert np.abs(expected.lse).max() > 16
    check(arguments, "float32", 3, "contiguous", expected)


def test_a_bias_that_says_nothing_shares_its_row_alike():
    """All scores are the lowest number: lse is the same for one key and for all.

    Two shards of one length are what can be told apart then.
    """
    size = cases.Size(len_q=12, len_kv=12, d_k=4, num_heads=4, num_kv_heads=2, lead=())
    arguments = arguments_of("plain", size=size) | {"bias": np.full((12, 12), cases.FLOAT32_MIN)}
    found = spread(arguments, np.ones((4, 12, 4), np.float32), 2, "contiguous")
    mean = arguments["value"].repeat(2, axis=0).mean(axis=-2, keepdims=True)
    assert_close(found.out, np.broadcast_to(mean, found.out.shape), eps=EPS["float32"], len_kv=12)
    grad = np.full((2, 12, 4), 2.0)  # two heads, each query giving 1/12 to each key
    assert_close(found.grads["value"], grad, eps=EPS["float32"], len_kv=12)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("heads", "kv_heads", "world_size"), [(12, 4, 4), (10, 5, 3), (3, 3, 2)])
def test_ulysses_drops_what_the_whole_drops(heads, kv_heads, world_size, function):
    """Shares of heads start at numbers that are no power of 2."""
    size = cases.Size(len_q=6, len_kv=6, num_heads=heads, num_kv_heads=kv_heads, lead=(2,))
    options = {"dropout": 0.4, "alibi_slopes": normal(heads) ** 2}
    for seed in (3, np.array([2**40 + 1, -7])):
        check(arguments_of("plain", "float64", size) | options | {"seed": seed}, "float64",
              world_size, "contiguous", function=FUNCTIONS[function])  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS)
def test_hidden_nan_reaches_nothing(function):
    arguments = arguments_of("causal")
    arguments["key"][..., 10:, :] = np.nan
    arguments["value"][..., 10:, :] = np.inf
    clean = expected_of_option("causal", "float32")
    grad_out = clean.grad_out.copy()
    grad_out[..., 10:, :] = 0
    found = spread(arguments, grad_out, 4, "zigzag", function=FUNCTIONS[function])
    assert_close(found.out[..., :10, :], clean.out[..., :10, :], clean.near[0][..., :10, :],
                 eps=EPS["float32"], len_kv=13)  # fmt: skip
    assert torch.isnan(found.out[..., 10:, :]).all()
    assert torch.isfinite(found.grads["query"][..., :10, :]).all()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_rows_without_keys(function):
    options = {"segment_ids": (np.arange(13) - 4, np.arange(13) // 2 + 5)}
    arguments = arguments_of("plain", "float64") | options
    found = check(arguments, "float64", 3, "zigzag", function=FUNCTIONS[function])
    assert (found.out[..., :9, :] == 0).all()
    assert (found.grads["query"][..., :9, :] == 0).all()


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    "wanted", [("query",), ("key",), ("value", "sinks"), ("sinks",), ("bias",)], ids="-".join
)
def test_gradients_of_some_arguments(wanted, function):
    arguments = arguments_of("everything")
    expected = expected_of_option("everything", "float32")
    shards = shards_of(13, 3, "zigzag")

    def work(group):
        share = as_tensors(own_share(arguments, shards[group.rank], shards[group.rank]))
        leaves = [share[name].requires_grad_() for name in wanted]
        out = FUNCTIONS[function](**share, group=group, layout="zigzag")
        grad_out = tensor(expected.grad_out[..., shards[group.rank], :])
        return out.detach(), dict(zip(wanted, torch.autograd.grad(out, leaves, grad_out),
                                      strict=True))  # fmt: skip

    found = Found(arguments, InProcessRing(3).run(work), shards, shards)
    for name in wanted:
        got = as_float64(found.grads[name]).astype(arguments[name].dtype)
        assert_gradient(name, got, expected, "float32", 13)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_numpy_forward(layout, function):
    arguments, expected = arguments_of("everything"), expected_of_option("everything", "float32")
    shards = shards_of(13, 3, layout)

    def work(group):
        share = own_share(arguments, shards[group.rank], shards[group.rank])
        return FUNCTIONS[function](**share, group=group, layout=layout)

    parts = InProcessRing(3).run(work)
    out = np.concatenate(parts, axis=-2)[..., np.argsort(np.concatenate(shards)), :]
    assert out.dtype == np.float32
    assert_close(out, expected.out, expected.near[0], eps=EPS["float32"], len_kv=13)


def test_same_bits_every_time():
    arguments = arguments_of("everything")
    grad_out = expected_of_option("everything", "float32").grad_out
    first, second = (spread(arguments, grad_out, 4, "zigzag") for _ in range(2))
    assert torch.equal(first.out, second.out)
    assert all(torch.equal(x, second.grads[name]) for name, x in first.grads.items())


def test_backward_twice_gives_the_same():
    x = torch.tensor(normal(2, 6, 4))

    def work(group):
        shard = x[:, 3 * group.rank :][:, :3].clone().requires_grad_()
        loss = ring_attention(shard, shard, shard, group=group, causal=True).sum()
        return [torch.autograd.grad(loss, shard, retain_graph=True)[0] for _ in range(2)]

    for once, again in InProcessRing(2).run(work):
        assert torch.equal(once, again)
