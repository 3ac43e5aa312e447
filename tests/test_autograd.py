"""Gradients by the host libraries: against finite differences, and against a textbook's."""

import functools
import math

import numpy as np
import pytest

import cases
import naive
import scaledot as sd
from compare import EPS, as_float64, assert_close
from conftest import Library
from scaledot import _blockwise, _derivatives

torch = pytest.importorskip("torch")

# Largest errors of gradients may be three times the yardstick's.
assert_gradient = functools.partial(assert_close, factor=3.0)
COMBINATIONS = cases.pairwise()
TINY = cases.Size(len_q=3, len_kv=5, d_k=2, num_heads=2, num_kv_heads=1, lead=(2,))
SMALL = cases.Size(len_q=6, len_kv=9, d_k=4, d_v=5, num_heads=4, num_kv_heads=2, lead=(2,))
EACH_SHAPE = "JAX compiles for every shape: the other implementation runs this"
WITH_GRADIENTS = ("query", "key", "value", "bias", "sinks", "alibi_slopes")


@pytest.fixture(params=["dense", "blockwise"])
def impl(request, monkeypatch):
    """Both implementations that differentiate; `blockwise` cuts even these sizes into tiles."""
    monkeypatch.setattr(_blockwise, "BLOCK_Q", 2)
    monkeypatch.setattr(_blockwise, "BLOCK_KV", 2)
    monkeypatch.setattr(_blockwise, "TILE_SCORES", 8)
    return request.param


@pytest.fixture(autouse=True, scope="module")
def torch_on_one_thread():
    """PyTorch's threads, waiting for one another on a busy machine, take most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def double(x):
    """A tensor with the values of a NumPy array, in float64 where these are floats."""
    return torch.tensor(
        np.ascontiguousarray(x), dtype=torch.float64 if x.dtype.kind == "f" else None
    )


def problem(index):
    """Arguments of a combination of options as tensors of float64."""
    rng = np.random.default_rng(index)
    arrays = {name: double(x) for name, x in TINY.arrays(rng).items()}
    return arrays | cases.options_of(COMBINATIONS[index], TINY, rng, double)


def leaves_of(arguments):
    """The names of the arguments that have gradients, and these, ready to collect them."""
    names = [name for name in WITH_GRADIENTS if name in arguments]
    return names, [arguments[name].detach().clone().requires_grad_() for name in names]


def function_of(arguments, names, impl, function=sd.attention):
    """The call as a function of the arguments named; an infinite lse is replaced by 0."""

    def call(*leaves):
        result = function(**arguments | dict(zip(names, leaves, strict=True)), impl=impl)
        if not isinstance(result, tuple):
            return result
        return result.out, torch.where(result.lse.isinf(), 0.0, result.lse)

    return call


@pytest.mark.heavy  # test_torch_rules has the same combinations, by what auto takes
@pytest.mark.parametrize(
    "index", range(len(COMBINATIONS)), ids=lambda i: f"{i}:{cases.label(COMBINATIONS[i])}"
)
def test_gradients_are_those_of_finite_differences(index, impl):
    """Of out and of lse; every entry of the Jacobian, or, for every second, one direction."""
    arguments = problem(index)
    names, leaves = leaves_of(arguments)
    fast = (index % 2 == 0) == (impl == "dense")
    assert torch.autograd.gradcheck(function_of(arguments, names, impl), leaves, fast_mode=fast)
    arguments.pop("sinks", None)
    arguments = with_positions(arguments)
    names, leaves = leaves_of(arguments)
    state = function_of(arguments, names, impl, sd.attention_state)
    assert torch.autograd.gradcheck(state, leaves, fast_mode=True)


def with_positions(arguments):
    """The same with a q_offset, which a state cannot do without."""
    if "q_offset" in arguments:
        return arguments
    kv_len = arguments.get("kv_len", TINY.len_kv)
    return arguments | {"q_offset": arguments.get("kv_offset", 0) + kv_len - TINY.len_q}


# bias that excludes, softcap, ALiBi, sinks, dropout, mods, segments, lengths: a few at a time
@pytest.mark.parametrize("index", [0, 2, 4, 6, 12])
def test_second_gradients(index, impl):
    arguments = problem(index)
    names, leaves = leaves_of(arguments)
    call = function_of(arguments, names, impl)
    assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)


BIASES = ((5,), (3, 5), (3, 1), (2, 1, 5), (2, 1, 1, 5), (1, 1, 1, 1), ())


@pytest.mark.parametrize("shape", BIASES, ids=str)
def test_a_bias_has_a_gradient_of_its_own_shape(shape, impl):
    rng = np.random.default_rng(len(shape))
    arguments = {n: double(x) for n, x in TINY.arrays(rng).items()} | {"causal": True}
    bias = double(rng.standard_normal(shape)).requires_grad_()
    call = function_of(arguments, ["bias"], impl)
    out = call(bias)
    assert out.requires_grad
    (gradient,) = torch.autograd.grad(out.square().sum(), bias)
    assert gradient.shape == bias.shape
    assert torch.autograd.gradcheck(call, [bias])


@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_one_argument_alone_has_a_gradient(name, impl):
    """And it is what it is beside the others; nothing else gets one."""
    rng = np.random.default_rng(3)
    arguments = {n: double(x) for n, x in TINY.arrays(rng).items()} | {
        "bias": double(rng.standard_normal((3, 5))), "sinks": double(rng.standard_normal(2)),
        "alibi_slopes": double(rng.random(2)), "causal": True,
    }  # fmt: skip
    names, leaves = leaves_of(arguments)
    together = torch.autograd.grad(function_of(arguments, names, impl)(*leaves).sum(), leaves)
    alone = arguments[name].requires_grad_()
    sd.attention(**arguments, impl=impl).sum().backward()
    for other in arguments.values():
        assert other is alone or not torch.is_tensor(other) or other.grad is None
    assert alone.grad.any()
    assert torch.equal(alone.grad, together[names.index(name)])


def test_broadcast_leading_axes_have_gradients_of_their_own_shape(impl):
    size = cases.Size(3, 4, d_k=2, lead=(2, 1), key_lead=(1, 3), value_lead=(3,))
    rng = np.random.default_rng(5)
    leaves = [double(x).requires_grad_() for x in size.arrays(rng).values()]
    call = function_of({"causal": True}, ["query", "key", "value"], impl)
    assert torch.autograd.gradcheck(call, leaves, fast_mode=impl == "blockwise")
    gradients = torch.autograd.grad(call(*leaves).sum(), leaves)
    assert [g.shape for g in gradients] == [x.shape for x in leaves]


def test_gradients_through_merged_states(impl):
    """Of slices of the keys, and of a sink as a state without keys."""
    rng = np.random.default_rng(6)
    leaves = [double(x).requires_grad_() for x in TINY.arrays(rng).values()]
    leaves.append(double(rng.standard_normal(2)).requires_grad_())

    def call(query, key, value, sinks):
        def part(a, b):
            return sd.attention_state(
                query, key[..., a:b, :], value[..., a:b, :], causal=True, q_offset=1, kv_offset=a,
                impl=impl,
            )  # fmt: skip

        sink = sd.State(torch.zeros(2, 1, 1, dtype=torch.float64), sinks[:, None])
        return sd.merge(sd.merge(part(4, 5), sink), sd.merge(part(0, 2), part(2, 4)))

    assert torch.autograd.gradcheck(call, leaves)
    whole = sd.attention(*leaves[:3], causal=True, q_offset=1, sinks=leaves[3], impl=impl)
    expected = torch.autograd.grad(whole.square().sum(), leaves)
    merged = torch.autograd.grad(call(*leaves).out.square().sum(), leaves)
    for got, truth in zip(merged, expected, strict=True):
        assert_gradient(got, truth, eps=8 * EPS["float64"], len_kv=5)


# Against a textbook, which shares nothing with the library.


def textbook(query, key, value, seen, bias, sinks, softcap, kept):
    """Output of attention, all scores in memory; `kept` are factors of the weights."""
    group_size = query.shape[-3] // key.shape[-3]
    key, value = (x.repeat_interleave(group_size, dim=-3) for x in (key, value))
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    scores = softcap * torch.tanh(scores / softcap) + bias
    scores = torch.where(seen, scores, -math.inf)
    sink = sinks[:, None, None].expand(*scores.shape[:-1], 1)
    weights = torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]
    return (weights * kept) @ value


def textbook_problem():
    """Arguments as NumPy arrays of float32, and the matrices that the textbook takes instead."""
    rng = np.random.default_rng(7)
    arguments = {name: x.astype(np.float32) for name, x in SMALL.arrays(rng).items()}
    lengths, positions = np.array([9, 6]), np.array([3, 4])
    mask = cases.maybe(rng, 6, 9, p=0.8)
    options = {
        "bias": cases.normal(rng, 4, 1, 9), "sinks": cases.normal(rng, 4), "softcap": 2.0,
        "mask": mask, "causal": True, "window": (5, None), "dropout": 0.25,
        "seed": np.array([3, 2**33]), "kv_len": lengths, "q_offset": positions,
    }  # fmt: skip
    q_pos, kv_pos = positions[:, None, None] + np.arange(6)[:, None], np.arange(9)
    seen = mask & (kv_pos <= q_pos) & (q_pos <= kv_pos + 5) & (kv_pos < lengths[:, None, None])
    kept = [
        [[[naive.kept(0.25, int(seed), head, int(first) + i, j) for j in range(9)]
          for i in range(6)] for head in range(4)]
        for seed, first in zip(options["seed"], positions, strict=True)
    ]  # fmt: skip
    return arguments | options, seen[:, None], np.array(kept)


LEAVES = ("query", "key", "value", "bias", "sinks")


@functools.cache
def textbook_gradients(dtype):
    """Gradients of the ramp below by the textbook, computed in that dtype from rounded inputs."""
    arguments, seen, kept = textbook_problem()
    rounded = [torch.tensor(arguments[n]).to(getattr(torch, dtype)) for n in LEAVES]
    found = []
    for working in (torch.float64, rounded[0].dtype):
        leaves = [x.to(working).requires_grad_() for x in rounded]
        matrices = torch.tensor(seen), torch.tensor(kept).to(working)
        out = textbook(*leaves[:3], matrices[0], *leaves[3:], 2.0, matrices[1])
        found.append(torch.autograd.grad((out * ramp(torch, out)).sum(), leaves))
    return found


def ramp(xp, out):
    """Weights of the loss: each column of the output has its own."""
    return xp.arange(out.shape[-1]) - 1.5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_gradients_of_every_dtype(dtype, impl):
    """They come in the dtype of their argument, and as exact as the textbook's.

    The textbook's in float64 are the truth, which is no truth for float64.
    """
    truth, yardstick = textbook_gradients(dtype)
    arguments = Library("torch").arguments(textbook_problem()[0])
    leaves = [arguments[n].to(getattr(torch, dtype)).requires_grad_() for n in LEAVES]
    out = function_of(arguments, LEAVES, impl)(*leaves)
    assert out.dtype == leaves[0].dtype
    gradients = torch.autograd.grad((out * ramp(torch, out)).sum(), leaves)
    for leaf, got, exact, of_textbook in zip(leaves, gradients, truth, yardstick, strict=True):
        assert got.dtype == leaf.dtype
        assert got.isfinite().all()
        assert_gradient(got, exact, of_textbook, eps=EPS[dtype], len_kv=9)


def test_gradients_by_jax(impl, monkeypatch):
    """Compiled with arrays for lengths, offsets, seeds and mask that hold no values yet."""
    jax = pytest.importorskip("jax")
    monkeypatch.setattr(_blockwise, "BLOCK_Q", 6)
    monkeypatch.setattr(_blockwise, "BLOCK_KV", 5)
    monkeypatch.setattr(_blockwise, "TILE_SCORES", 1000)
    truth, yardstick = textbook_gradients("float32")
    arguments = Library("jax").arguments(textbook_problem()[0])
    names = (*LEAVES, "mask", "seed", "kv_len", "q_offset")
    fixed = {n: x for n, x in arguments.items() if n not in names}

    @jax.jit
    @functools.partial(jax.grad, argnums=tuple(range(len(LEAVES))))
    def gradient(*given):
        out = sd.attention(**fixed, **dict(zip(names, given, strict=True)), impl=impl)
        return (out * ramp(jax.numpy, out)).sum()

    gradients = gradient(*(arguments[n] for n in names))
    for got, exact, of_textbook in zip(gradients, truth, yardstick, strict=True):
        assert got.dtype == np.float32
        assert_gradient(got, exact, of_textbook, eps=EPS["float32"], len_kv=9)


def test_jax_vmap_and_jvp():
    """Over a batch of calls, each with its own length; the tangent is the gradient's transpose."""
    jax = pytest.importorskip("jax")
    rng = np.random.default_rng(8)
    arrays = [jax.numpy.asarray(x) for x in SMALL.arrays(rng).values()]
    kv_len = jax.numpy.asarray([9, 4])

    def call(query, key, value, kv_len):
        return sd.attention(query, key, value, kv_len=kv_len, causal=True)

    mapped = jax.jit(jax.vmap(call))(*arrays, kv_len)
    options = {"kv_len": np.array([9, 4]), "causal": True}
    truth = naive.attention(*map(np.asarray, arrays), **options)[0]
    assert_close(mapped, truth, eps=EPS["float64"], len_kv=9)

    tangents = [jax.numpy.asarray(x) for x in SMALL.arrays(rng).values()]
    of_arrays = functools.partial(jax.vmap(call), kv_len=kv_len)
    out, tangent = jax.jit(lambda a, t: jax.jvp(of_arrays, tuple(a), tuple(t)))(arrays, tangents)
    cotangent = jax.numpy.asarray(rng.standard_normal(out.shape))
    back = jax.jit(lambda a, c: jax.vjp(of_arrays, *a)[1](c))(arrays, cotangent)
    forward = float((cotangent * tangent).sum())
    backward = sum(float((t * g).sum()) for t, g in zip(tangents, back, strict=True))
    assert_close(backward, forward, eps=EPS["float64"], len_kv=out.size)


def test_torch_transforms(impl):
    """`vmap` and `grad` of torch.func see tensors without values."""
    rng = np.random.default_rng(9)
    arrays = [double(x) for x in SMALL.arrays(rng).values()]
    kv_len = torch.tensor([9, 4])

    def call(query, key, value, kv_len):
        return sd.attention(query, key, value, kv_len=kv_len, causal=True, impl=impl)

    mapped = torch.func.vmap(call)(*arrays, kv_len)
    options = {"kv_len": np.array([9, 4]), "causal": True}
    truth = naive.attention(*(x.numpy() for x in arrays), **options)[0]
    assert_close(mapped, truth, eps=EPS["float64"], len_kv=9)

    of_each = torch.func.vmap(torch.func.grad(lambda *given: call(*given).square().sum()))
    query = arrays[0].clone().requires_grad_()
    whole = sd.attention(query, *arrays[1:], kv_len=kv_len, causal=True, impl=impl)
    (expected,) = torch.autograd.grad(whole.square().sum(), query)
    assert_gradient(of_each(*arrays, kv_len), expected, eps=EPS["float64"], len_kv=9)


EMPTY = {
    "no row": {"mask": np.zeros((), dtype=bool)},
    "some rows": {"mask": np.array([1, 0, 1, 0, 0, 1], dtype=bool)[:, None]},
    "no key": {"kv_len": np.array([0, 9])},
    "far window": {"window": (2, 2), "q_offset": 500},
    "bias": {"bias": np.full((6, 9), -np.inf)},
    "causal": {"causal": True, "q_offset": np.array([-3, -10])},
}


@pytest.mark.parametrize(
    ("library", "name"),
    [("torch", name) for name in EMPTY]
    + [("jax", "some rows"), ("jax", "bias")]
    + [
        pytest.param("jax", name, marks=pytest.mark.heavy)
        for name in EMPTY if name not in ("some rows", "bias")
    ],
)  # fmt: skip
def test_empty_rows_have_gradients_of_zero(name, library, impl):
    """And leave no trace in those of keys and values, whatever comes back to them."""
    if library == "jax" and impl == "blockwise":
        pytest.skip(EACH_SHAPE)
    rng = np.random.default_rng(10)
    arrays = {n: x.astype(np.float64) for n, x in SMALL.arrays(rng).items()}
    options = {"q_offset": 3} | EMPTY[name]
    _, lse, _ = naive.attention(**arrays, **options)
    empty = np.isneginf(lse)
    assert empty.any()
    xp = Library(library)
    given, options = list(xp.arguments(arrays).values()), xp.arguments(options)

    def loss(*given):
        state = sd.attention_state(*given, **options, impl=impl)
        where = xp.module.where
        return (
            where(xp.array(empty[..., None]), state.out * 1e30, 0.0).sum()
            + where(xp.array(empty), 0.0, state.lse).sum()
            + (state.out * state.out).sum()
        )

    gradients = [as_float64(g) for g in gradients_of(library, loss, given)]
    assert all(np.isfinite(g).all() for g in gradients)
    assert (gradients[0][empty] == 0).all()
    assert (gradients[0][~empty] != 0).any() or empty.all()
    assert all(np.abs(g).max() < 1e20 for g in gradients)
    if empty.all():
        assert not any(g.any() for g in gradients)


def gradients_of(library, loss, given):
    """Gradients of a function of arrays by automatic differentiation."""
    if library == "torch":
        leaves = [x.clone().requires_grad_() for x in given]
        return torch.autograd.grad(loss(*leaves), leaves)
    import jax

    return jax.grad(loss, argnums=tuple(range(len(given))))(*given)


@pytest.mark.parametrize("lengths", [(3, 0), (0, 3)], ids=["no keys", "no queries"])
@pytest.mark.parametrize("library", ["torch", pytest.param("jax", marks=pytest.mark.heavy)])
def test_gradients_of_nothing(lengths, library, impl):
    """They exist, are 0 and have the shapes of the arguments."""
    if library == "jax" and impl == "blockwise":
        pytest.skip(EACH_SHAPE)
    size = cases.Size(*lengths, d_k=2, num_heads=2)
    given = [Library(library).array(x) for x in size.arrays(np.random.default_rng(0)).values()]
    gradients = gradients_of(library, lambda *x: sd.attention(*x, impl=impl).sum(), given)
    for gradient, x in zip(gradients, given, strict=True):
        assert gradient.shape == x.shape
        assert not as_float64(gradient).any()


def test_no_gradient_is_no_graph(impl):
    rng = np.random.default_rng(11)
    arrays = [double(x) for x in SMALL.arrays(rng).values()]
    assert not sd.attention(*arrays, impl=impl).requires_grad
    arrays[0].requires_grad_()
    assert sd.attention(*arrays, impl=impl).requires_grad
    with torch.no_grad():
        assert not sd.attention(*arrays, impl=impl).requires_grad
    with torch.inference_mode():
        assert sd.attention(*arrays, impl=impl).is_inference()


def test_auto_differentiates():
    """Whatever it takes without gradients, beyond one tile too."""
    size = cases.Size(300, 600, d_k=8, num_heads=2, num_kv_heads=1, lead=())
    arrays = [torch.tensor(x, dtype=torch.float32)
              for x in size.arrays(np.random.default_rng(12)).values()]  # fmt: skip
    found = {}
    for impl, dtype in (("auto", "float32"), ("dense", "float32"), ("dense", "float64")):
        leaves = [x.to(getattr(torch, dtype)).requires_grad_() for x in arrays]
        out = sd.attention(*leaves, causal=True, window=(350, None), impl=impl)
        found[impl, dtype] = torch.autograd.grad(out.square().sum(), leaves)
    for got, yardstick, truth in zip(*found.values(), strict=True):
        assert_gradient(got, truth, yardstick, eps=EPS["float32"], len_kv=600)


@pytest.mark.parametrize("impl", ["blockwise", "kernels"])
def test_autocast_does_not_reach_inside(impl):
    """Its products would be rounded to bfloat16; the argument's dtype is what was asked for."""
    query, key, value = (torch.randn(2, 9, 4, requires_grad=True) for _ in range(3))

    def run():
        out = sd.attention(query, key, value, impl=impl)
        return out, *torch.autograd.grad(out.sum(), (query, key, value))

    plain = run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.matmul(query, key.mT).dtype == torch.bfloat16
        inside = run()
    assert all(map(torch.equal, plain, inside))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # PyTorch's forward mode
def test_derivatives_of_tensors_are_the_kernels(monkeypatch):
    """Backward, forward mode and second derivatives, none of them by array operations."""
    for name in ("backward", "tangent", "second"):
        monkeypatch.delattr(_derivatives, name)
    query, key, value = (torch.randn(2, 9, 4, requires_grad=True) for _ in range(3))
    (grad,) = torch.autograd.grad(
        sd.attention(query, key, value).square().sum(), query, create_graph=True
    )
    grad.square().sum().backward()
    assert key.grad.isfinite().all()
    plain = [x.detach() for x in (query, key, value)]
    _, tangent = torch.func.jvp(sd.attention, tuple(plain), (plain[2], plain[0], plain[1]))
    assert tangent.isfinite().all()
