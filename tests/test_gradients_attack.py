"""Gradients where they once went wrong."""

import functools

import numpy as np
import pytest

import scaledot as sd
from compare import EPS, assert_close

WIDTHS = [(64, 64), (128, 100), (33, 7)]


def normal(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def test_the_result_may_be_changed_before_going_back(impl):
    query, key, value = normal(3, 2, 5, 4)
    out, pullback = sd.attention_vjp(query, key, value, impl=impl)
    before = pullback(out - 1)
    grad_out = out - 1
    out[...] = 7
    pullback.lse[...] = 0
    for x, y in zip(pullback(grad_out)[:3], before[:3], strict=True):
        np.testing.assert_array_equal(x, y)


def test_sinks_without_keys_have_the_gradient_of_lse(impl):
    query, key = np.ones((2, 5, 4), "f"), np.ones((2, 0, 4), "f")
    _, pullback = sd.attention_vjp(query, key, key, sinks=np.zeros(2, "f"), impl=impl)
    grads = pullback(np.zeros((2, 5, 4), "f"), np.ones((2, 5), "f"))
    np.testing.assert_array_equal(grads.sinks, [5, 5])


@pytest.mark.parametrize("level", [20.0, 100.0, 1e3, 6e4, 1e9])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_level_of_all_scores_changes_no_weight(level, dtype, impl):
    """Weights are exp(score - lse), and lse is rounded: by more, the larger it is."""
    query, key, value = np.zeros((3, 1, 3, 4), dtype)
    value[...] = normal(3, 4, dtype=dtype)
    bias = np.full((1, 3), level, dtype)
    _, pullback = sd.attention_vjp(query, key, value, bias=bias, impl=impl)
    grads = pullback(np.ones((1, 3, 4), dtype))
    assert_close(grads.value, np.ones((1, 3, 4)), eps=EPS[dtype], len_kv=3)
    _, tangent = sd.attention_jvp(
        (query, key, value), (None, None, np.ones_like(value)), bias=bias, impl=impl
    )
    assert_close(tangent, np.ones((1, 3, 4)), eps=EPS[dtype], len_kv=3)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("d_k", "d_v"), WIDTHS)
def test_one_visible_key_has_no_gradient_of_its_score(d_k, d_v, dtype):
    """The mean of one product is that product, to the bit."""
    query, key = normal(2, 2, 200, d_k, dtype=dtype)
    value, grad_out = normal(2, 2, 200, d_v, dtype=dtype, seed=1)
    _, pullback = sd.attention_vjp(query, key, value, window=(0, 0), impl="kernels")
    grads = pullback(grad_out)
    assert not grads.query.any()
    assert not grads.key.any()
    np.testing.assert_array_equal(grads.value, grad_out)


def test_no_query_heads(impl):
    query, key = np.ones((0, 5, 8)), np.ones((2, 7, 8))
    _, pullback = sd.attention_vjp(query, key, key, impl=impl)
    grads = pullback(np.ones((0, 5, 8)))
    assert grads.query.shape == (0, 5, 8)
    assert grads.key.shape == (2, 7, 8)
    assert not grads.key.any()


def test_arrays_that_a_library_differentiates_are_refused_everywhere():
    torch = pytest.importorskip("torch")
    x = torch.ones(2, 5, 4)
    with pytest.raises(TypeError, match="plain arrays, got one that torch differentiates"):
        sd.attention_vjp(x, x, x, bias=torch.ones(5, requires_grad=True))
    _, pullback = sd.attention_vjp(x, x, x)
    with pytest.raises(TypeError, match="plain arrays, got one that torch differentiates"):
        pullback(torch.ones(2, 5, 4, requires_grad=True))


@pytest.mark.parametrize("impl", ["auto", "kernels", "blockwise"])
def test_packed_tensors_with_gradients(impl):
    torch = pytest.importorskip("torch")
    x = torch.tensor(normal(5, 2, 4), requires_grad=True)
    sd.varlen_attention(x, x, x, [0, 2, 5], [0, 2, 5], impl=impl).square().sum().backward()

    def gradient(dtype):
        plain = normal(5, 2, 4).astype(dtype)
        given = plain, plain, plain, [0, 2, 5], [0, 2, 5]
        out, pullback = sd.varlen_attention_vjp(*given, impl="dense")
        grads = pullback(2 * out)
        return grads.query + grads.key + grads.value

    assert_close(x.grad, gradient("float64"), gradient("float32"), eps=EPS["float32"], len_kv=3,
                 factor=3)  # fmt: skip


def table_in(place):
    """A score_mod that adds a table which it reaches in one of many ways, and the table."""
    torch = pytest.importorskip("torch")
    table = torch.zeros(5, requires_grad=True)

    def add(t, score, batch, head, q_pos, kv_pos):
        return score + t[kv_pos]

    class Holder:
        def method(self, score, batch, head, q_pos, kv_pos):
            return score + self.held[kv_pos]

        def __init__(self):
            self.held = table

    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Parameter(torch.zeros(5))

        def forward(self, score, batch, head, q_pos, kv_pos):
            return score + self.table[kv_pos]

    if place == "module":
        module = Module()
        return module, module.table
    holder, kept = Holder(), {"t": [table]}
    return {
        "cell": lambda s, b, h, i, j: s + table[j],
        "containers": lambda s, b, h, i, j: s + kept["t"][0][j],
        "method": holder.method,
        "partial": functools.partial(add, table),
        "default": lambda s, b, h, i, j, t=table: s + t[j],
        "nested": lambda s, b, h, i, j: (lambda: s + table[j])(),
    }[place], table


@pytest.mark.parametrize(
    "place", ["cell", "containers", "method", "partial", "default", "nested", "module"]
)
def test_tensors_that_a_mod_reads_get_their_gradients(place):
    torch = pytest.importorskip("torch")
    mod, table = table_in(place)
    query = torch.tensor(normal(1, 3, 4), requires_grad=True)
    key = torch.tensor(normal(1, 5, 4))
    out = sd.attention(query, key, key, score_mod=(mod, lambda s, b, h, i, j: s * 0 + 1))
    (grad,) = torch.autograd.grad(out.square().sum(), table)

    def expected(dtype):
        bias = torch.zeros(5, requires_grad=True, dtype=dtype)
        out = sd.attention(*(x.to(dtype) for x in (query, key, key)), bias=bias, impl="dense")
        return torch.autograd.grad(out.square().sum(), bias)[0]

    assert_close(grad, expected(torch.float64), expected(torch.float32), eps=EPS["float32"],
                 len_kv=5, factor=3)  # fmt: skip


@pytest.mark.parametrize("impl", ["kernels", "blockwise"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_gradients_of_a_state(dtype, impl):
    """Its out, and the gradient of that, are float32 whatever the arguments are."""
    torch = pytest.importorskip("torch")
    arrays = [torch.tensor(x).to(getattr(torch, dtype)) for x in normal(3, 2, 50, 16)]

    def gradients(function, *given):
        given = [x.clone().requires_grad_() for x in given]
        loss = function(*given).float().square().sum()
        return torch.autograd.grad(loss, given)

    def textbook(query, key, value):
        return (query @ key.mT / 4).softmax(-1) @ value

    got = gradients(lambda *x: sd.attention_state(*x, impl=impl).out, *arrays)
    truth = gradients(textbook, *(x.double() for x in arrays))
    yardstick = gradients(textbook, *arrays)
    for x, exact, near in zip(got, truth, yardstick, strict=True):
        assert x.dtype == arrays[0].dtype
        assert_close(x, exact, near, eps=EPS[dtype], len_kv=50, factor=3.0)
