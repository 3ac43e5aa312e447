"""Weights in graphs of PyTorch's compilers: one operator, with gradients, whoever asks for them."""

import functools
import sys

import numpy as np
import pytest

import scaledot as sd
from compare import EPS, assert_close
from scaledot._spec import Options

torch = pytest.importorskip("torch")
import scaledot.torch  # noqa: E402
from scaledot import _torch_ops  # noqa: E402
from seen_operators import Seen  # noqa: E402

# PyTorch's own, of its exporter, and of Dynamo where Python is told to warn.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec:FutureWarning"),
]
assert_same = functools.partial(assert_close, eps=8 * EPS["float64"], len_kv=64)


@pytest.fixture(autouse=True)
def forgotten():
    """Compile anew, so that no test meets what another has left."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def normal(seed, *shape):
    return torch.tensor(np.random.default_rng(seed).standard_normal(shape))


def operands():
    """Two samples, four heads of queries on two of keys, five queries, six keys."""
    return normal(0, 2, 4, 5, 3), normal(1, 2, 2, 6, 3)


def options():
    """Sets of options by name; what is a float tensor has a gradient."""
    return {
        "none": {},
        "terms": {
            "bias": normal(2, 4, 1, 6), "sinks": normal(3, 4), "alibi_slopes": normal(4, 4),
            "softcap": 2, "scale": 0.3, "kv_len": torch.tensor([6, 4]), "window": (3, None),
        },
        "exclusions": {
            "causal": True, "mask": np.tri(5, 6, 2, dtype=bool), "q_offset": torch.tensor([1, 3]),
            "segment_ids": (torch.arange(5) // 3, torch.arange(6) // 3), "kv_offset": 1,
            "block_mask": torch.tensor([[[True]], [[True]], [[False]], [[True]]]),
        },
    }  # fmt: skip


def call_of(name, rows=None):
    """Weights as a function of all arguments with gradients, and these."""
    chosen = options()[name]
    names = [n for n, x in chosen.items() if torch.is_tensor(x) and x.is_floating_point()]

    def call(query, key, *given):
        terms = dict(zip(names, given, strict=True))
        return sd.attention_weights(query, key, rows=rows, **chosen | terms)

    return call, [*operands(), *(chosen[n] for n in names)]


def with_gradients(function, given, seed=5):
    """What a function gives, and its gradients for some numbers that come back."""
    leaves = [x.detach().clone().requires_grad_() for x in given]
    out = function(*leaves)
    return [out, *torch.autograd.grad(out, leaves, normal(seed, *out.shape))]


def assert_alike(function, other, given):
    for got, exact in zip(
        with_gradients(function, given), with_gradients(other, given), strict=True
    ):
        assert_same(got.detach(), exact.detach())


def textbook(query, key):
    scores = query @ key.repeat_interleave(2, 1).transpose(-1, -2) / query.shape[-1] ** 0.5
    return scores.softmax(-1)


@pytest.mark.heavy
def test_one_graph():
    graphs = []

    def backend(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes if "call" in node.op])
        return graph

    compiled = torch.compile(sd.attention_weights, fullgraph=True, backend=backend)
    assert_alike(compiled, textbook, operands())
    (called,) = graphs
    called = [name for name in called if "functorch" not in name]  # PyTorch looks for transforms
    assert called == ["scaledot.attention_weights.default"]


@pytest.mark.heavy
@pytest.mark.parametrize("rows", [None, [0, -1, 2]], ids=["all", "rows"])
@pytest.mark.parametrize("name", options())
def test_the_operators_keep_pytorchs_rules(name, rows):
    """Schema, fake tensors, and gradients, which are those of finite differences."""
    query, key = operands()
    given = _torch_ops.weights_arguments(query, Options(**options()[name]), rows)
    given = [
        x.requires_grad_() if torch.is_tensor(x) and x.is_floating_point() else x
        for x in (query, key, *given)
    ]
    forward = torch.ops.scaledot.attention_weights.default
    torch.library.opcheck(forward, given)
    places = [i for i in _torch_ops.WEIGHTS_PLACES.values() if given[i] is not None]

    def call(*leaves):
        changed = dict(zip(places, leaves, strict=True))
        return forward(*(changed.get(i, x) for i, x in enumerate(given)))

    assert torch.autograd.gradcheck(call, [given[i] for i in places], fast_mode=True)
    plain = [x.detach() if torch.is_tensor(x) else x for x in given]
    present = [given[i] is not None for i in _torch_ops.WEIGHTS_PLACES.values()]
    for wanted in (present, [False, *present[1:]]):
        torch.library.opcheck(
            torch.ops.scaledot.attention_weights_backward.default,
            (*plain, torch.ones_like(forward(*plain)), wanted),
        )


@pytest.mark.heavy
@pytest.mark.parametrize("rows", [None, [0, -1], np.arange(3), torch.tensor([4, 1]), range(2)])
def test_rows_in_a_graph(rows):
    call, given = call_of("terms", rows)
    assert_alike(torch.compile(call, fullgraph=True, backend="aot_eager"), call, given)


@pytest.mark.heavy
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", options())
def test_options_in_a_graph(name, dynamic):
    call, given = call_of(name)
    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    assert_alike(compiled, call, given)


@pytest.mark.heavy
def test_by_the_default_compiler():
    assert_alike(torch.compile(sd.attention_weights, fullgraph=True), textbook, operands())


def operator(query, **options):
    """Weights as a graph calls them, given query and key."""
    given = _torch_ops.weights_arguments(query, Options(**options), None)
    return lambda query, key: torch.ops.scaledot.attention_weights(query, key, *given)


def test_masked_keys_cannot_matter():
    query, key = operands()
    call = operator(query, mask=torch.arange(6) < 4)
    clean = with_gradients(call, (query, key))
    key[..., 4:, :] = torch.nan
    for got, exact in zip(with_gradients(call, (query, key)), clean, strict=True):
        assert torch.equal(got, exact)


def test_no_keys_have_a_gradient():
    """Of none: PyTorch has no graph there, and an operator gives zeros."""
    query, key = operands()
    key = key[..., :0, :]
    out, *gradients = with_gradients(operator(query), (query, key))
    assert out.shape == (2, 4, 5, 0)
    assert torch.equal(gradients[0], torch.zeros_like(query))
    assert gradients[1].shape == key.shape


def test_kernels_asked_for_have_a_gradient():
    query, key = operands()
    assert_alike(operator(query, impl="kernels"), textbook, (query, key))


def test_there_is_no_second_derivative():
    query, key = (x.requires_grad_() for x in operands())
    out = operator(query)(query, key)
    (first,) = torch.autograd.grad(out.square().sum(), query, create_graph=True)
    with pytest.raises(ValueError, match="attention_weights must be differentiated once where"):
        first.sum().backward()


@pytest.mark.heavy
def test_transforms_leave_compiled_graphs():
    """As those of attention do: the graph ends there, and says why if it may not."""
    transform = torch.func.vmap(sd.attention_weights)
    given = operands()
    assert_same(torch.compile(transform, backend="aot_eager")(*given), textbook(*given))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="need Functions of scaledot"):
        torch.compile(transform, fullgraph=True, backend="aot_eager")(*given)


def test_a_mode_sees_the_operators():
    call, given = call_of("terms", [0, -1])
    exact = with_gradients(call, given)
    with Seen() as seen:
        found = with_gradients(call, given)
    for got, truth in zip(found, exact, strict=True):
        assert_same(got.detach(), truth.detach())
    assert [name for name in seen.names if "scaledot" in name] == [
        "scaledot.attention_weights.default", "scaledot.attention_weights_backward.default"
    ]


def test_fake_tensors():
    """Without memory: shapes and dtypes."""
    with torch._subclasses.FakeTensorMode() as mode:
        query, key = (mode.from_tensor(x.bfloat16()).requires_grad_() for x in operands())
        found = sd.attention_weights(query, key, rows=[1, 2, 3])
        assert (found.shape, found.dtype) == ((2, 4, 3, 6), torch.float32)
        gradients = torch.autograd.grad(found.sum(), (query, key))
        assert [(g.shape, g.dtype) for g in gradients] == [
            (x.shape, torch.bfloat16) for x in (query, key)
        ]
        matrix = sd.attention_weights(query[0, 0].double(), key[0, 0].double())
        assert (matrix.shape, matrix.dtype) == ((5, 6), torch.float64)
        with pytest.raises(ValueError, match="query and key must have the same d_k"):
            sd.attention_weights(query, key[..., :2])


def test_tangents_that_are_traced():
    """Through the array operations, because the operator has no rule for them."""
    given, tangents = operands(), (normal(2, 2, 4, 5, 3), normal(3, 2, 2, 6, 3))

    def moved(function):
        return lambda *given: torch.func.jvp(function, given, tangents)[1]

    graph = torch.fx.experimental.proxy_tensor.make_fx(moved(sd.attention_weights))(*given)
    assert_same(graph(*given), moved(textbook)(*given))


@pytest.mark.heavy
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_the_textbook_form(dynamic):
    """Output and weights in one graph, also with a mask of 0 and 1."""
    x = operands()[0]
    mask = torch.ones(5, 5).tril()

    def call(query, key, value):
        return torch.cat(sd.scaled_dot_product_attention(query, key, value, mask), -1)

    def exact(query, key, value):
        scores = query @ key.transpose(-1, -2) / 3**0.5
        weights = scores.masked_fill(mask == 0, -torch.inf).softmax(-1)
        return torch.cat([weights @ value, weights], -1)

    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    assert_alike(compiled, exact, [x, x + 1, x - 1])


@pytest.mark.heavy
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_module_that_gives_weights(dynamic):
    """As PyTorch's own module, in one graph."""
    theirs = torch.nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    ours = scaledot.torch.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    ours.load_state_dict(theirs.state_dict())
    x, padding = normal(0, 2, 5, 8), torch.arange(5) >= torch.tensor([5, 3])[:, None]

    def call(module):
        return lambda x: torch.cat(module(x, x, x, key_padding_mask=padding), -1)

    compiled = torch.compile(call(ours), fullgraph=True, dynamic=dynamic, backend="aot_eager")
    assert_alike(compiled, call(theirs), [x])


@pytest.mark.heavy
def test_a_model_that_gives_weights():
    """``output_attentions=True``, in one graph, as with the attention of transformers itself."""
    transformers = pytest.importorskip("transformers")
    import scaledot.transformers

    scaledot.transformers.register()
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=32,
    )
    model = transformers.LlamaModel(config).eval()
    tokens = torch.arange(1, 13)[None]
    found = {}
    for name in ("eager", "scaledot"):
        model.set_attn_implementation(name)
        torch._dynamo.reset()
        model(tokens, output_attentions=True)  # transformers sets its hooks up in the first call
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        found[name] = compiled(tokens, output_attentions=True).attentions[0].detach()
    assert_close(found["scaledot"], found["eager"], eps=8 * EPS["float32"], len_kv=12)
