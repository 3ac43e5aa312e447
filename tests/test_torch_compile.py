"""What PyTorch's compilers, exporters and modes see of a call: operators; who takes which calls."""

import functools

import numpy as np
import pytest

import cases
import scaledot as sd
from compare import EPS, assert_close
from scaledot._spec import Options

torch = pytest.importorskip("torch")
from scaledot import _torch_ops  # noqa: E402
from scaledot import _torch_rules as rules  # noqa: E402
from seen_operators import Seen  # noqa: E402

# PyTorch's own, of its forward mode, of its exporter, and of Dynamo where Python is told to warn.
pytestmark = [
    pytest.mark.heavy,
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec:FutureWarning"),
]
SIZE = cases.Size(len_q=5, len_kv=6, d_k=4, d_v=3, num_heads=4, num_kv_heads=2, lead=(2,))
assert_same = functools.partial(assert_close, eps=8 * EPS["float64"], len_kv=64)


@pytest.fixture(autouse=True)
def forgotten():
    """Compile anew, so that no test meets what another has left."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def attention(query, key, value, **options):
    return rules.attention(query, key, value, Options(**options)).out


def arrays(size=SIZE, *, seed=0):
    return [torch.tensor(x) for x in size.arrays(np.random.default_rng(seed)).values()]


def normal(seed, *shape):
    return torch.tensor(np.random.default_rng(seed).standard_normal(shape))


def options():
    """Sets of options by name; what is a float tensor has a gradient."""
    lengths = torch.tensor([6, 4])
    return {
        "none": {},
        "causal": {"causal": True, "mask": normal(1, 5, 6) > -1},
        "terms": {
            "bias": normal(2, 4, 1, 6), "sinks": normal(3, 4), "alibi_slopes": normal(4, 4),
            "softcap": 2, "scale": 0.3, "kv_len": lengths, "window": (3, None),
        },
        "numbers": {
            "kv_len": np.int64(5), "q_offset": 2, "kv_offset": 1, "causal": True,
            "dropout": 0.5, "seed": 5 - 2**70, "scale": np.float32(0.5),
        },
        "tensors": {
            "q_offset": torch.tensor([1, 3]), "kv_offset": torch.tensor([0, 2]),
            "dropout": 0.25, "seed": torch.tensor([5, 2**40]), "window": (4, 2),
            "segment_ids": (torch.arange(5) // 3, torch.arange(6) // 3),
            "block_mask": torch.tensor([[[True]], [[True]], [[False]], [[True]]]),
        },
        "arrays": {
            "mask": np.tri(5, 6, 2, dtype=bool), "bias": np.arange(6.0), "dropout": 0.25,
            "seed": np.array([1, 2**63], dtype=np.uint64), "segment_ids": np.zeros(1, dtype=int),
        },
    }  # fmt: skip


def arguments(name):
    """The arguments of `scaledot::attention`, those with gradients ready to collect them."""
    given = {"query": None, "key": None, "value": None} | options()[name]
    given |= dict(zip(given, arrays(), strict=False))
    for x in given.values():
        if torch.is_tensor(x) and x.is_floating_point():
            x.requires_grad_()
    query, key, value = (given.pop(n) for n in ("query", "key", "value"))
    return query, key, value, *_torch_ops.arguments(query, Options(**given), False)


def like(x, seed):
    return None if x is None else normal(seed, *x.shape)


def state_of(given):
    """The arguments without a graph, and out and lse."""
    plain = [x.detach() if torch.is_tensor(x) else x for x in given]
    return plain, torch.ops.scaledot.attention(*plain, False)


@pytest.mark.parametrize("name", options())
def test_the_operators_keep_pytorchs_rules(name):
    """Schema, autograd registration, fake tensors, and compiled as in eager mode."""
    given = arguments(name)
    torch.library.opcheck(torch.ops.scaledot.attention.default, (*given, False))
    _, (out, lse) = state_of(given)
    grads = normal(5, *out.shape).requires_grad_(), normal(6, *lse.shape).requires_grad_()
    present = [given[i] is not None for i in _torch_ops.PLACES.values()]
    torch.library.opcheck(
        torch.ops.scaledot.attention_backward.default, (*given, out, lse, *grads, present)
    )


def test_the_operators_of_second_derivatives_and_tangents_keep_pytorchs_rules():
    plain, (out, lse) = state_of(arguments("terms"))
    tangents = [like(plain[i], i) for i in _torch_ops.PLACES.values()]
    grads = normal(5, *out.shape), None
    for wanted in ([True] * 8, [True, False] * 4):
        torch.library.opcheck(
            torch.ops.scaledot.attention_second.default,
            (*plain, out, lse, *grads, *tangents, wanted),
        )
    torch.library.opcheck(
        torch.ops.scaledot.attention_tangent.default, (*plain, out, lse, *tangents)
    )
    wanted = [True, False, False, True, False, False]
    given = arguments("terms")
    torch.library.opcheck(
        torch.ops.scaledot.attention_backward.default, (*given, out, lse, None, lse, wanted)
    )


def test_operators_have_second_derivatives():
    """By themselves, as a compiled graph that is run in eager mode has them."""
    given = arguments("terms")
    leaves = [given[i] for i in _torch_ops.PLACES.values()]

    def call(*leaves):
        changed = dict(zip(_torch_ops.PLACES.values(), leaves, strict=True))
        full = [changed.get(i, x) for i, x in enumerate(given)]
        return torch.ops.scaledot.attention(*full, False)

    assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)
    (first,) = torch.autograd.grad(call(*leaves)[0].sum(), leaves[0], create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), leaves[0], create_graph=True)
    with pytest.raises(ValueError, match="attention must be differentiated at most twice"):
        second.sum().backward()


def out_and_gradients(function, given):
    leaves = [x.detach().clone().requires_grad_() for x in given]
    out = function(*leaves)
    (out**2).sum().backward()
    return [out, *(x.grad for x in leaves)]


def assert_alike(compiled, eager, given):
    for got, exact in zip(
        out_and_gradients(compiled, given), out_and_gradients(eager, given), strict=True
    ):
        assert_same(got, exact)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", options())
def test_compiled_whole(name, dynamic):
    """One graph, forward and backward, as in eager mode."""
    chosen = options()[name]
    if name == "numbers":  # what a compiler turns into arrays
        chosen |= {"kv_len": 5, "scale": 0.5}
    if name == "arrays":  # which it reads as PyTorch's
        chosen["seed"] = np.array([1, 2**40])
    terms = {n: x for n, x in chosen.items() if torch.is_tensor(x) and x.is_floating_point()}

    def call(query, key, value, *given):
        return attention(query, key, value, **chosen | dict(zip(terms, given, strict=True)))

    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    assert_alike(compiled, call, [*arrays(), *terms.values()])


def test_compiled_by_the_default_compiler():
    call = functools.partial(attention, causal=True)
    assert_alike(torch.compile(call, fullgraph=True), call, arrays())


def test_a_state_is_compiled():
    """Both of its parts have gradients."""

    def call(query, key, value):
        found = rules.attention(
            query, key, value, Options(causal=True, q_offset=1), slices=True, wide=True
        )
        return torch.cat([found.out, found.lse[..., None]], -1)

    assert_alike(torch.compile(call, fullgraph=True, backend="aot_eager"), call, arrays())


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_states_are_merged_in_a_graph(dynamic):
    """Nothing is read of what they hold: one of them may be empty."""

    def call(query, key, value, counts):
        first = sd.attention_state(query, key, value, kv_len=counts)
        rest = sd.attention_state(query, key * 2, value, kv_len=6 - counts)
        return torch.cat([x if x.ndim > 3 else x[..., None] for x in sd.merge(first, rest)], -1)

    counts = torch.tensor([0, 4])
    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for function in (compiled, call):
        assert function(*arrays(), counts)[0].isfinite().all()
    assert_alike(
        lambda *given: compiled(*given, counts), lambda *given: call(*given, counts), arrays()
    )


def test_one_graph_serves_all_lengths_and_numbers():
    counter = torch._dynamo.testing.CompileCounter()

    def call(query, key, value, number):
        return attention(
            query, key, value, q_offset=number, kv_offset=number, window=(number, None),
            dropout=0.25, seed=number,
        )  # fmt: skip

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    for length, number in ((5, 11), (7, 13), (9, 17)):
        given = arrays(cases.Size(length, length + 2, d_k=4))
        assert_same(compiled(*given, number), call(*given, number))
    assert counter.frame_count == 1


class Layer(torch.nn.Module):
    def forward(self, query, key, value, mask):
        return attention(query, key, value, mask=mask, causal=True)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    """With lengths that are not fixed, and taken apart as far as it goes."""
    given = (*arrays(cases.Size(6, 6, d_k=4)), torch.ones(6, 6, dtype=torch.bool))
    length = torch.export.Dim("length", min=2, max=64)
    shapes = ({2: length}, {2: length}, {2: length}, {0: length, 1: length})
    program = torch.export.export(Layer(), given, dynamic_shapes=shapes, strict=strict)
    other = (*arrays(cases.Size(9, 9, d_k=4)), torch.ones(9, 9, dtype=torch.bool))
    for exported in (program, program.run_decompositions()):
        targets = [str(n.target) for n in exported.graph.nodes if n.op == "call_function"]
        assert targets.count("scaledot.attention.default") == 1
        for inputs in (given, other):
            assert_same(exported.module()(*inputs), Layer()(*inputs))


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(use_reentrant, is_compiled):
    call = functools.partial(attention, causal=True, dropout=0.5, seed=3)

    def checkpointed(*given):
        return torch.utils.checkpoint.checkpoint(call, *given, use_reentrant=use_reentrant)

    function = checkpointed
    if is_compiled:
        function = torch.compile(checkpointed, fullgraph=True, backend="aot_eager")
    assert_alike(function, call, arrays())


def test_the_operator_can_be_saved_by_a_selective_checkpoint():
    """It is not run again in the backward pass."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    runs = []

    def policy(context, op, *args, **kwargs):
        if op is torch.ops.scaledot.attention.default:
            runs.append(context.is_recompute)
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    def checkpointed(*given):
        return torch.utils.checkpoint.checkpoint(
            lambda q, k, v: attention(q, k, v).sin(), *given, use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
        )  # fmt: skip

    assert_alike(checkpointed, lambda *given: attention(*given).sin(), arrays())
    assert runs
    assert not runs[0]


TRANSFORMS = {
    "grad": lambda q, k, v: torch.func.grad(lambda *x: attention(*x).square().sum())(q, k, v),
    "vmap": lambda q, k, v: torch.func.vmap(attention)(q, k, v),
    "jvp": lambda q, k, v: torch.func.jvp(attention, (q, k, v), (q, k, v))[1],
}
OPERATORS = {"grad": "attention_backward", "vmap": "attention", "jvp": "attention_tangent"}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_leave_compiled_graphs(name):
    """They know nothing of operators: the graph ends there, and says why if it may not."""
    function = TRANSFORMS[name]
    assert_same(torch.compile(function, backend="aot_eager")(*arrays()), function(*arrays()))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="need Functions of scaledot"):
        torch.compile(function, fullgraph=True, backend="aot_eager")(*arrays())


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_are_traced_to_operators(name):
    function = TRANSFORMS[name]
    graph = torch.fx.experimental.proxy_tensor.make_fx(function)(*arrays())
    assert_same(graph(*arrays(seed=1)), function(*arrays(seed=1)))
    targets = [str(node.target) for node in graph.graph.nodes]
    assert f"scaledot.{OPERATORS[name]}.default" in targets


def test_fake_tensors():
    """Without memory: shapes and dtypes of what comes back, in both directions."""
    size = cases.Size(3, 4, d_k=2, d_v=5, lead=(2, 1), key_lead=(1, 3), value_lead=(3,))
    with torch._subclasses.FakeTensorMode() as mode:
        given = [mode.from_tensor(x.bfloat16()).requires_grad_() for x in arrays(size)]
        found = rules.attention(*given, Options(causal=True))
        assert found.out.shape == (2, 3, 2, 3, 5)
        assert found.lse.shape == (2, 3, 2, 3)
        assert (found.out.dtype, found.lse.dtype) == (torch.bfloat16, torch.float32)
        gradients = torch.autograd.grad(found.out.sum(), given)
        assert [g.shape for g in gradients] == [x.shape for x in given]
        two = rules.attention(*(x[0, 0, 0].detach() for x in given[:1]), *(
            x.detach().flatten(0, -3)[0] for x in given[1:]
        ), Options(), wide=True)  # fmt: skip
        assert two.out.shape == (3, 5)
        assert (two.out.dtype, two.lse.shape) == (torch.float32, (3,))
        with pytest.raises(ValueError, match="query and key must have the same d_k"):
            rules.attention(given[0], given[2], given[2], Options())


def test_a_mode_sees_the_operators():
    leaves = [x.requires_grad_() for x in arrays()]
    with Seen() as seen:
        attention(*leaves).sum().backward()
    assert {"scaledot.attention.default", "scaledot.attention_backward.default"} <= set(seen.names)


# Who takes which calls


def applies(query, key, value, **options):
    return rules.applies(query, key, value, Options(**options))


def test_plain_tensors_are_left_alone():
    query, key, value = arrays()
    assert not applies(query, key, value, causal=True, bias=normal(0, 6))
    with torch.no_grad():
        assert not applies(query.requires_grad_(), key, value)
    assert applies(query, key, value)


@pytest.mark.parametrize("name", ["query", "key", "value", "bias", "sinks", "alibi_slopes"])
def test_any_argument_that_is_differentiated_or_transformed_counts(name):
    given = dict(zip(("query", "key", "value"), arrays(), strict=True)) | {
        "bias": normal(0, 6), "sinks": normal(1, 4), "alibi_slopes": normal(2, 4),
    }  # fmt: skip
    assert not applies(**given)
    assert applies(**given | {name: given[name].clone().requires_grad_()})
    with torch.autograd.forward_ad.dual_level():
        assert not applies(**given)
        dual = torch.autograd.forward_ad.make_dual(given[name], given[name])
        assert applies(**given | {name: dual})
    found = []
    torch.func.vmap(lambda x: found.append(applies(**given | {name: x})) or x)(given[name][None])
    assert found == [True]


def test_mods():
    query, key, value = arrays()
    query.requires_grad_()
    table = normal(0, 5)

    def scaled(score, batch, head, q_pos, kv_pos):
        return score * table[kv_pos % 5]

    def slope(score, batch, head, q_pos, kv_pos):
        return score * 0 + table[kv_pos % 5]

    assert applies(query, key, value, mask_mod=cases.dilated)
    assert applies(query, key, value, score_mod=(scaled, slope))
    assert not applies(query, key, value, score_mod=scaled)
    table.requires_grad_()
    assert not applies(query, key, value, score_mod=(scaled, slope))
    with torch._subclasses.FakeTensorMode():
        assert applies(query, key, value)
        assert not applies(query, key, value, mask_mod=cases.dilated)
    with pytest.raises(TypeError, match="score_mod and mask_mod must be None in a call"):
        _torch_ops.arguments(query, Options(mask_mod=cases.dilated), False)


def test_subclasses_are_left_to_array_operations():
    class Odd(torch.Tensor):
        pass

    query, key, value = arrays()
    assert not applies(query.as_subclass(Odd).requires_grad_(), key, value)


def test_what_has_no_rule_says_so():
    query, key, value = (x[0, :1, :2] for x in arrays(cases.Size(2, 2, d_k=2)))

    def loss(query):
        return attention(query, key, value).square().sum()

    with pytest.raises(ValueError, match="forward mode must be around reverse mode"):
        torch.func.jacfwd(torch.func.jacfwd(loss))(query)
    with pytest.raises(ValueError, match="attention must be differentiated at most twice"):
        torch.func.jacrev(torch.func.hessian(loss))(query)
    with pytest.raises(ValueError, match="attention must be differentiated at most twice"):
        torch.func.jacfwd(torch.func.jacrev(torch.func.jacrev(loss)))(query)
