"""Derivative rules of PyTorch: both modes, twice, and the transforms of torch.func."""

import functools
import gc
import math
import weakref

import numpy as np
import pytest

import cases
from compare import EPS, assert_close
from scaledot import _blockwise
from scaledot._spec import Options

torch = pytest.importorskip("torch")
from scaledot import _torch_rules as rules  # noqa: E402

# PyTorch's forward mode loads rules that it compiles in a way that it calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
func = torch.func
COMBINATIONS = cases.pairwise()
TINY = cases.Size(len_q=3, len_kv=5, d_k=2, num_heads=2, num_kv_heads=1, lead=(2,))
WITH_GRADIENTS = ("query", "key", "value", "bias", "sinks", "alibi_slopes")
# Largest errors of gradients may be three times the yardstick's; sums are taken in other orders.
assert_gradient = functools.partial(assert_close, factor=3.0)
assert_same = functools.partial(assert_close, eps=8 * EPS["float64"], len_kv=64)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Cut even these sizes into tiles."""
    monkeypatch.setattr(_blockwise, "BLOCK_Q", 2)
    monkeypatch.setattr(_blockwise, "BLOCK_KV", 3)
    monkeypatch.setattr(_blockwise, "TILE_SCORES", 24)


@pytest.fixture(autouse=True, scope="module")
def torch_on_one_thread():
    """PyTorch's threads, waiting for one another on a busy machine, take most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def state(query, key, value, *, slices=False, wide=False, **options):
    return rules.attention(query, key, value, Options(**options), slices=slices, wide=wide)


def attention(query, key, value, **options):
    return state(query, key, value, **options).out


def double(x):
    """A tensor with the values of a NumPy array, in float64 where these are floats."""
    return torch.tensor(
        np.ascontiguousarray(x), dtype=torch.float64 if x.dtype.kind == "f" else None
    )


def normal(seed, *shape):
    return double(np.random.default_rng(seed).standard_normal(shape))


SLOPES = {
    "distance": lambda score, batch, head, q_pos, kv_pos: score * 0 + 0.75,
    "table": lambda score, batch, head, q_pos, kv_pos: score * 0 + 1,
}


def problem(index):
    """Arguments of a combination of options as tensors of float64, score_mod with its slope."""
    rng = np.random.default_rng(index)
    arguments = {name: double(x) for name, x in TINY.arrays(rng).items()}
    arguments |= cases.options_of(COMBINATIONS[index], TINY, rng, double)
    if "score_mod" in arguments:
        slope = SLOPES[COMBINATIONS[index]["score_mod"].name]
        arguments["score_mod"] = (arguments["score_mod"], slope)
    return arguments | {"impl": "blockwise" if index % 2 else "auto"}


def leaves_of(arguments):
    """The names of the arguments that have gradients, and these, ready to collect them."""
    names = [name for name in WITH_GRADIENTS if name in arguments]
    return names, [arguments[name].detach().clone().requires_grad_() for name in names]


def function_of(arguments, names):
    """Out and lse as functions of the arguments named; an infinite lse is replaced by 0."""

    def call(*leaves):
        found = state(**arguments | dict(zip(names, leaves, strict=True)))
        return found.out, torch.where(found.lse.isinf(), 0.0, found.lse)

    return call


SIMPLER = 14  # from here on combinations have few options


def label(index):
    return f"{index}:{cases.label(COMBINATIONS[index])}"


each_combination = pytest.mark.parametrize("index", range(len(COMBINATIONS)), ids=label)


@each_combination
def test_gradients_and_tangents_are_those_of_finite_differences(index):
    """Both modes; the whole Jacobian for a few, else one direction."""
    arguments = problem(index)
    names, leaves = leaves_of(arguments)
    call, whole = function_of(arguments, names), index in (4, 10, 13)
    batched = index in (4, 10)  # no mods
    assert torch.autograd.gradcheck(
        call, leaves, fast_mode=not whole, check_forward_ad=True, check_batched_grad=batched,
        check_batched_forward_grad=batched,
    )  # fmt: skip


@pytest.mark.parametrize(
    "index",
    [
        pytest.param(i, marks=() if i < SIMPLER else pytest.mark.heavy)
        for i in range(len(COMBINATIONS))
    ],
    ids=label,
)
def test_second_gradients(index):
    """Reverse over reverse and forward over reverse; a score_mod has none."""
    arguments = problem(index)
    if "score_mod" in arguments:
        names, leaves = leaves_of(arguments)
        (first,) = torch.autograd.grad(
            function_of(arguments, names)(*leaves)[0].sum(), leaves[:1], create_graph=True
        )
        with pytest.raises(ValueError, match="second derivatives must be of a call without"):
            first.sum().backward()
        del arguments["score_mod"]
    names, leaves = leaves_of(arguments)
    call = function_of(arguments, names)
    assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True, check_fwd_over_rev=True)


def test_a_slice_of_the_keys():
    """Wide, and never without the position of the first query."""
    given = [double(x) for x in TINY.arrays(np.random.default_rng(1)).values()]
    leaves = [x.float().requires_grad_() for x in given]
    with pytest.raises(ValueError, match="q_offset must be given with causal"):
        state(*leaves, causal=True, slices=True)
    half = [x.detach().to(torch.bfloat16).requires_grad_() for x in leaves]
    found = state(*half, causal=True, q_offset=2, slices=True, wide=True)
    assert found.out.dtype == found.lse.dtype == torch.float32
    assert state(*half, causal=True).out.dtype == torch.bfloat16
    gradients = torch.autograd.grad(found.out.sum() + found.lse.sum(), half)
    assert {g.dtype for g in gradients} == {torch.bfloat16}


# Against a textbook, which shares nothing with the library.


def textbook(query, key, value, bias=0.0, sinks=None, *, causal=True):
    """Output of attention, all scores in memory, differentiated by PyTorch."""
    key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scores = query @ key.mT / math.sqrt(query.shape[-1]) + bias
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool)
        seen = seen.tril(scores.shape[-1] - scores.shape[-2])
        scores = scores.masked_fill(~seen, -math.inf)
    if sinks is None:
        return torch.softmax(scores, -1) @ value
    sinks = sinks[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1] @ value


def five(seed=0, lead=()):
    """Query, key, value, bias and sinks."""
    return (
        normal(seed, *lead, 4, 3, 2), normal(seed + 1, *lead, 2, 5, 2),
        normal(seed + 2, *lead, 2, 5, 3), normal(seed + 3, 4, 3, 5), normal(seed + 4, 4),
    )  # fmt: skip


def ours(query, key, value, bias=None, sinks=None):
    return attention(query, key, value, bias=bias, sinks=sinks, causal=True)


def loss(function):
    return lambda *given: (function(*given) ** 3).sum()


TRANSFORMS = {
    "grad": lambda f: func.grad(loss(f), argnums=(0, 1, 2, 3, 4)),
    "jacrev": lambda f: func.jacrev(f, argnums=(0, 1, 2, 3, 4)),
    "jacfwd": lambda f: func.jacfwd(f, argnums=(0, 1, 2, 3, 4)),
    "hessian": lambda f: func.hessian(loss(f), argnums=(0, 1, 4)),
    "jacrev of jacrev": lambda f: func.jacrev(func.jacrev(loss(f), argnums=(0, 3)), argnums=(2, 4)),
    "jacrev of jacfwd": lambda f: func.jacrev(func.jacfwd(loss(f), argnums=(0, 3)), argnums=(1, 2)),
    "jacobian of autograd": lambda f: lambda *given: torch.autograd.functional.jacobian(
        f, given, vectorize=True
    ),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name):
    transform, given = TRANSFORMS[name], five()
    found, _ = torch.utils._pytree.tree_flatten(transform(ours)(*given))
    truth, _ = torch.utils._pytree.tree_flatten(transform(textbook)(*given))
    for got, exact in zip(found, truth, strict=True):
        assert_same(got, exact)


def test_modes_agree():
    """⟨tangent, cotangent⟩ is ⟨direction, gradient⟩; a tangent's gradient is that of a gradient."""
    given, directions = five(), five(10)
    cotangent = normal(20, 4, 3, 3)
    out, tangent = func.jvp(ours, given, directions)
    gradients = func.vjp(ours, *given)[1](cotangent)
    assert_same((tangent * cotangent).sum(), sum(
        (d * g).sum() for d, g in zip(directions, gradients, strict=True)
    ))  # fmt: skip
    assert_same(out, ours(*given))

    def along(*x):
        return (func.jvp(ours, x[:5], x[5:])[1] * cotangent).sum()

    every = tuple(range(5))
    found = func.grad(along, tuple(range(10)))(*given, *directions)
    back = func.grad(lambda *x: (ours(*x) * cotangent).sum(), every)
    for got, truth in zip(
        found, (*func.jvp(back, given, directions)[1], *gradients), strict=True
    ):
        assert_same(got, truth)


# vmap: as a loop over the batch

EVERY = {
    "query": normal(0, 4, 3, 2), "key": normal(1, 2, 5, 2), "value": normal(2, 2, 5, 3),
    "bias": normal(3, 4, 1, 5), "sinks": normal(4, 4), "alibi_slopes": normal(5, 4),
    "mask": normal(6, 3, 5) > -1, "q_segment": torch.tensor([0, 0, 1]),
    "kv_segment": torch.tensor([0, 0, 0, 1, 1]), "q_offset": torch.tensor(3),
    "kv_offset": torch.tensor(1), "kv_len": torch.tensor(4), "seed": torch.tensor(7),
    "block_mask": torch.ones(1, 1, dtype=torch.bool),
}  # fmt: skip
BATCH = 3


def with_every_option(*given):
    options = dict(zip(EVERY, given, strict=True))
    options["segment_ids"] = options.pop("q_segment"), options.pop("kv_segment")
    return attention(**options, causal=True, softcap=2.0, dropout=0.25)


def batched(name, x):
    """Three of an argument, none like another."""
    if x.dtype == torch.bool:
        return torch.stack([x, ~x, torch.ones_like(x)])
    if x.dtype == torch.int64:
        return torch.stack([x, x - 1, x - x])
    return torch.stack([x, 2 * x, -x])


def looped(function, in_dims, given):
    results = []
    for i in range(BATCH):
        pairs = zip(given, in_dims, strict=True)
        one = [x if dim is None else x.select(dim, i) for x, dim in pairs]
        results.append(torch.utils._pytree.tree_flatten(function(*one))[0])
    return [torch.stack(parts) for parts in zip(*results, strict=True)]


def assert_mapped(function, in_dims, given):
    mapped = func.vmap(function, in_dims=tuple(in_dims))(*given)
    expected = looped(function, in_dims, given)
    for got, exact in zip(torch.utils._pytree.tree_flatten(mapped)[0], expected, strict=True):
        assert_same(got, exact)


gradient_of_every = func.grad(lambda *x: with_every_option(*x).square().sum(), tuple(range(6)))


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("function", [with_every_option, gradient_of_every], ids=["out", "grad"])
def test_vmap_over_one_argument(name, function):
    given = [batched(name, x) if n == name else x for n, x in EVERY.items()]
    assert_mapped(function, [0 if n == name else None for n in EVERY], given)


def test_vmap_over_all_arguments_and_any_axis():
    given, in_dims = [], []
    for i, (name, x) in enumerate(EVERY.items()):
        in_dims.append(-1 if i % 2 else 0)
        given.append(batched(name, x).movedim(0, in_dims[-1]))
    assert_mapped(with_every_option, in_dims, given)


def test_vmap_over_tangents_and_second_derivatives():
    """Of what is per head, too, which is done one element after the other."""
    given, directions = five(), five(10)
    many = [torch.stack([x, 2 * x, -x]) for x in directions]

    def tangent(*directions):
        return func.jvp(ours, given, directions)[1]

    def second(*directions):
        return func.jvp(func.grad(loss(ours), (0, 3, 4)), given, directions)[1]

    zero = torch.zeros(4).double()
    for function in (tangent, second):
        assert_mapped(function, [0] * 5, many)
        assert_mapped(lambda *x, of=function: of(*x, zero), [0] * 4, many[:4])


def test_vmap_of_two_axes_without_heads():
    query, key, value = normal(0, BATCH, 3, 2), normal(1, 5, 2), normal(2, 5, 3)
    mask = torch.ones(BATCH, 3, 5, dtype=torch.bool).tril()
    mask[1, 2] = False

    def call(query, key, value, mask):
        return state(query, key, value, mask=mask, causal=True)

    gradient = func.grad(lambda *x: call(*x).out.square().sum(), argnums=(0, 1, 2))
    for function in (lambda *x: call(*x).out, gradient):
        assert_mapped(function, (0, None, None, None), (query, key, value, mask[1]))
        assert_mapped(function, (None, None, None, 0), (query[0], key, value, mask))


def test_vmap_over_vmap():
    query, key, value = normal(0, BATCH, 2, 4, 3, 2), normal(1, 2, 2, 5, 2), normal(2, 2, 5, 3)
    inner = func.vmap(lambda q, k: ours(q, k, value), in_dims=(0, 0))
    assert_mapped(inner, (0, None), (query, key))


@pytest.mark.parametrize("seed", [3, np.array([3, 2**40])], ids=["int", "array"])
def test_dropout_under_vmap_is_that_of_each_element(seed):
    query, (_, key, value, *_) = normal(0, BATCH, 2, 4, 3, 2), five()
    call = functools.partial(attention, key=key, value=value, dropout=0.5, seed=seed)
    assert_mapped(call, (0,), (query,))


def test_mods_under_vmap_see_the_batch_of_each_element():
    query, (_, key, value, *_) = normal(0, BATCH, 2, 4, 3, 2), five()

    def call(query):
        return attention(
            query, key, value, score_mod=(cases.distance_mod, SLOPES["distance"]),
            mask_mod=cases.dilated,
        )  # fmt: skip

    assert_mapped(call, (0,), (query,))
    assert_mapped(func.grad(lambda q: call(q).square().sum()), (0,), (query,))


def test_gradients_of_each_sample_add_up():
    *arrays, bias, sinks = five(lead=(BATCH,))
    gradient = func.grad(loss(ours), argnums=(3, 4))
    each = func.vmap(gradient, in_dims=(0, 0, 0, None, None))(*arrays, bias, sinks)
    for got, whole in zip(each, gradient(*arrays, bias, sinks), strict=True):
        assert got.shape == (BATCH, *whole.shape)
        assert_same(got.sum(0), whole)


# dtypes, shapes, memory


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_gradients_of_every_dtype(dtype):
    """In the dtype of their argument, whatever those of bias and sinks are."""
    rounded = [x.to(getattr(torch, dtype)) for x in five(lead=(2,))]
    found = []
    for function, to in ((textbook, torch.float64), (textbook, rounded[0].dtype), (ours, None)):
        leaves = [x.to(x.dtype if to is None else to).requires_grad_() for x in rounded]
        if to is None:
            leaves[3] = rounded[3].double().requires_grad_()
            leaves[4] = rounded[4].float().requires_grad_()
        out = function(*leaves)
        ramp = torch.arange(3) - 1.5
        found.append(torch.autograd.grad((out * ramp).sum(), leaves))
    assert out.dtype == rounded[0].dtype
    for got, leaf, truth, yardstick in zip(found[2], leaves, found[0], found[1], strict=True):
        assert got.dtype == leaf.dtype
        assert_gradient(got, truth, yardstick, eps=EPS[dtype], len_kv=5)


@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_one_argument_alone_has_a_gradient(name):
    arguments = {n: EVERY[n] for n in WITH_GRADIENTS}
    names, leaves = leaves_of(arguments)
    together = torch.autograd.grad(function_of(arguments, names)(*leaves)[0].sum(), leaves)
    alone = arguments[name].clone().requires_grad_()
    out = attention(**arguments | {name: alone})
    (got,) = torch.autograd.grad(out.sum(), alone)
    assert got.any()
    assert got.shape == alone.shape
    assert_same(got, together[names.index(name)])


def test_any_strides():
    """Transposed, reversed in steps and expanded arguments have gradients of their own shape."""
    base = [normal(0, 2, 3, 4, 2), normal(1, 1, 1, 5, 2), normal(2, 5, 2, 6)]

    def call(query, key, value):
        key = key.expand(2, 2, 5, 2)
        return ours(query.transpose(1, 2), key, value.permute(1, 0, 2)[..., ::2])

    def copied(query, key, value):
        key = key.expand(2, 2, 5, 2).clone()
        return textbook(query.transpose(1, 2), key, value.permute(1, 0, 2)[..., ::2].clone())

    for got, truth in zip(
        func.grad(loss(call), (0, 1, 2))(*base), func.grad(loss(copied), (0, 1, 2))(*base),
        strict=True,
    ):
        assert_same(got, truth)


def test_empty_rows_have_gradients_of_zero():
    """In both modes and twice, whatever comes back to them."""
    leaves = [x.requires_grad_() for x in five()[:3]]
    mask = torch.tensor([[True], [False], [True]])
    directions = [torch.ones_like(x) for x in leaves]

    def call(*given):
        return tuple(state(*given, mask=mask))

    (out, lse), (moved, of_lse) = func.jvp(call, tuple(leaves), tuple(directions))
    assert not out[:, 1].any()
    assert lse[:, 1].isneginf().all()
    assert not moved[:, 1].any()
    assert not of_lse[:, 1].any()
    out, lse = call(*leaves)
    gradients = torch.autograd.grad(
        (out * out).sum() + (out[:, 1] * 1e30).sum() + lse.sum(), leaves, create_graph=True
    )
    again = torch.autograd.grad(sum(g.square().sum() for g in gradients), leaves)
    for g in (*gradients, *again):
        assert g.isfinite().all()
    assert not gradients[0][:, 1].any()
    assert not again[0][:, 1].any()
    assert gradients[0].any()


def test_only_lse():
    leaves = [x.requires_grad_() for x in five()]
    found = state(*leaves[:3], bias=leaves[3], sinks=leaves[4])
    gradients = torch.autograd.grad(found.lse.sum(), [*leaves[:2], *leaves[3:]])
    shares = gradients[2].sum((1, 2)) + gradients[3]
    assert_same(shares, torch.full((4,), 3.0))  # weights of a row, that of the sink included


def test_what_is_saved_may_not_be_written():
    leaves = [x.requires_grad_() for x in five()[:3]]
    mask = torch.ones(3, 5, dtype=torch.bool)
    copies = [x * 1 for x in leaves]
    for written in (*copies, mask):
        out = attention(*copies, mask=mask)
        with torch.no_grad():
            written[0] = 0
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_nothing_quadratic_is_saved():
    saved = []
    leaves = [normal(i, 1, 60, 2).requires_grad_() for i in range(3)]

    def pack(x):
        saved.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = attention(*leaves, causal=True)
        (first,) = torch.autograd.grad(out.sum(), leaves[0], create_graph=True)
    assert first.requires_grad
    assert saved
    assert max(saved) <= 120


def test_no_reference_cycles():
    leaves = [x.requires_grad_() for x in five()[:3]]

    def first():
        return attention(*leaves)

    def twice():
        return torch.autograd.grad(first().square().sum(), leaves[0], create_graph=True)[0]

    def tangent():
        return func.jvp(attention, tuple(leaves), tuple(leaves))[1]

    gc.collect()
    gc.disable()
    try:
        for function in (first, twice, tangent):
            function()
            kept = weakref.ref(function())
            assert kept() is None
    finally:
        gc.enable()
