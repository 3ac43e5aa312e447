"""`scaledot.torch.MultiheadAttention` beside PyTorch's module, and in PyTorch's layers."""

import copy
import importlib
import io
import itertools
import math
import warnings

import pytest

from compare import EPS, assert_close
from scaledot import attention, attention_weights

torch = pytest.importorskip("torch")
module = importlib.import_module("scaledot.torch")
MultiheadAttention = module.MultiheadAttention
nn = torch.nn

BATCH, LEN_Q, LEN_KV, WIDTH, HEADS = 2, 4, 5, 8, 2
OPTIONS = {
    "inputs": ("self", "cross", "key is value", "widths"),
    "layout": ("length first", "batch first", "one sample"),
    "bias": (True, False),
    "add_bias_kv": (False, True),
    "add_zero_attn": (False, True),
    "padding": ("none", "bool", "float"),
    "mask": ("none", "bool", "float", "bool of heads", "float of heads", "causal", "causal float"),
    "weights": ("none", "mean", "heads"),
}


def pairwise(options):
    """Combinations, in which every setting of an option stands beside every one of another."""
    def pairs(row):
        return set(itertools.combinations(row.items(), 2))

    missing = dict.fromkeys(
        pair for a, b in itertools.combinations(options, 2)
        for pair in itertools.product(((a, x) for x in options[a]), ((b, y) for y in options[b]))
    )
    rows = []
    while missing:
        fixed = dict(next(iter(missing)))
        row = {}
        for name, settings in options.items():
            free = [fixed[name]] if name in fixed else settings
            row[name] = max(free, key=lambda x: len(pairs(row | {name: x}) & missing.keys()))
        rows.append(row)
        for pair in pairs(row):
            missing.pop(pair, None)
    return rows


ROWS = pairwise(OPTIONS)


@pytest.fixture(autouse=True, scope="module")
def torch_on_one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def numbers(request):
    torch.manual_seed(sum(request.node.name.encode()))


@pytest.fixture
def calls(monkeypatch):
    """Names and options of what is computed here."""
    seen = []

    def counted(function):
        def call(*arrays, **options):
            seen.append((function.__name__, options))
            return function(*arrays, **options)

        return call

    for function in (attention, attention_weights):
        monkeypatch.setattr(module, function.__name__, counted(function))
    return seen


def pair_of_modules(*arguments, **options):
    """PyTorch's module and ours with the same parameters, none of them zero."""
    theirs = nn.MultiheadAttention(*arguments, **options)
    with torch.no_grad():
        for x in theirs.parameters():
            x.normal_(std=0.4)
    ours = MultiheadAttention(*arguments, **options)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return theirs, ours


def inputs_of(row):
    """Query, key and value, some of them the same tensor."""
    len_kv = LEN_Q if row["inputs"] == "self" else LEN_KV
    widths = (6, 3) if row["inputs"] == "widths" else (WIDTH, WIDTH)
    lengths_and_widths = ((LEN_Q, WIDTH), (len_kv, widths[0]), (len_kv, widths[1]))
    shapes = {
        "length first": lambda n, d: (n, BATCH, d), "batch first": lambda n, d: (BATCH, n, d),
        "one sample": lambda n, d: (n, d),
    }  # fmt: skip
    query, key, value = (
        torch.randn(shapes[row["layout"]](*x)) for x in lengths_and_widths
    )  # fmt: skip
    if row["inputs"] == "self":
        return query, query, query
    return query, key, key if row["inputs"] == "key is value" else value


def masks_of(row, len_kv):
    """Options of forward; every query sees a key."""
    batch = () if row["layout"] == "one sample" else (BATCH,)
    options = {}
    if row["padding"] != "none":
        left_out = torch.rand(*batch, len_kv) < 0.4
        left_out[..., 0] = False
        floats = torch.randn(*batch, len_kv).masked_fill(left_out, -math.inf)
        options["key_padding_mask"] = left_out if row["padding"] == "bool" else floats
    if row["mask"] != "none":
        shape = (math.prod(batch) * HEADS,) if "heads" in row["mask"] else ()
        left_out = torch.rand(*shape, LEN_Q, len_kv) < 0.4
        if "causal" in row["mask"]:
            left_out = torch.ones(LEN_Q, len_kv, dtype=torch.bool).triu(1)
        left_out[..., 0] = False
        floats = torch.randn(left_out.shape) * ("causal" not in row["mask"])
        floats = floats.masked_fill(left_out, -math.inf)
        options["attn_mask"] = floats if "float" in row["mask"] else left_out
    return options | {
        "need_weights": row["weights"] != "none",
        "average_attn_weights": row["weights"] == "mean",
    }


def results(mha, inputs, options, dtype):
    """Output, weights or a zero, and all gradients of a ramp over both."""
    mha = copy.deepcopy(mha).to(dtype)
    made = {}  # the same tensor stays the same tensor
    for x in [*inputs, *options.values()]:
        if torch.is_tensor(x) and x.is_floating_point():
            made.setdefault(id(x), x.detach().to(dtype).requires_grad_())
    out, weights = mha(
        *(made[id(x)] for x in inputs), **{n: made.get(id(x), x) for n, x in options.items()}
    )  # fmt: skip
    assert (weights is not None) == options["need_weights"]
    weights = out.new_zeros(1) if weights is None else weights
    loss = sum(
        (x * (torch.arange(x.shape[-1], dtype=dtype) - 1.3)).sum() for x in (out, weights)
    )
    leaves = [*made.values(), *mha.parameters()]
    # A hint in place of the mask leaves it without a gradient.
    return [out, weights, *torch.autograd.grad(loss, leaves, allow_unused=True)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: ",".join(map(str, row.values())))
def test_as_pytorch(row):
    """Output, weights and the gradients of inputs, parameters and floating-point masks.

    PyTorch's module is not told that a mask is causal: then the hint must not matter.
    """
    widths = {"kdim": 6, "vdim": 3} if row["inputs"] == "widths" else {}
    theirs, ours = pair_of_modules(
        WIDTH, HEADS, bias=row["bias"], add_bias_kv=row["add_bias_kv"],
        add_zero_attn=row["add_zero_attn"], batch_first=row["layout"] == "batch first", **widths,
    )  # fmt: skip
    inputs = inputs_of(row)
    options = masks_of(row, LEN_Q if row["inputs"] == "self" else LEN_KV)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Support for mismatched")
        truth = results(theirs, inputs, options, torch.float64)
        yardstick = results(theirs, inputs, options, torch.float32)
    options["is_causal"] = "causal" in row["mask"]
    found = results(ours, inputs, options, torch.float32)
    hint = options["is_causal"] and not options["need_weights"] and row["padding"] == "none"
    count = LEN_KV * WIDTH  # sums run over keys and over widths
    for i, (got, exact, other) in enumerate(zip(found, truth, yardstick, strict=True)):
        if got is None:
            assert hint
            continue
        assert got.dtype == other.dtype
        factor = 3.0 if i > 1 else 2.0
        assert_close(got, exact, other, eps=EPS["float32"], len_kv=count, factor=factor)


@pytest.mark.parametrize(
    "options", [{}, {"kdim": 6, "vdim": 3}, {"bias": False, "add_bias_kv": True}], ids=str
)
def test_state_dicts_load_both_ways(options):
    theirs = nn.MultiheadAttention(WIDTH, HEADS, **options)
    ours = MultiheadAttention(WIDTH, HEADS, **options)
    assert isinstance(ours, nn.MultiheadAttention)
    for source, target in ((theirs, ours), (ours, theirs)):
        with torch.no_grad():
            for x in source.parameters():
                x.normal_()
        target.load_state_dict(source.state_dict(), strict=True)
        assert list(source.state_dict()) == list(target.state_dict())
        assert all(map(torch.equal, source.parameters(), target.parameters()))


def test_the_parameters_are_those_of_pytorch_for_the_same_seed():
    made = []
    for cls in (nn.MultiheadAttention, MultiheadAttention):
        torch.manual_seed(4)
        made.append(cls(WIDTH, HEADS, add_bias_kv=True))
    assert all(map(torch.equal, *(x.parameters() for x in made)))


def test_the_causal_hint_replaces_the_mask(calls):
    _, ours = pair_of_modules(WIDTH, HEADS, batch_first=True)
    x = torch.randn(BATCH, LEN_Q, WIDTH)
    mask = nn.Transformer.generate_square_subsequent_mask(LEN_Q)
    ours(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)
    ours(x, x, x, attn_mask=mask, is_causal=True)
    ours(x, x, x, torch.zeros(BATCH, LEN_Q), attn_mask=mask, is_causal=True, need_weights=False)
    of_attention = [options for name, options in calls if name == "attention"]
    assert [o["causal"] for o in of_attention] == [True, False, False]
    assert [o["bias"] is None for o in of_attention] == [True, False, False]


@pytest.mark.parametrize("need_weights", [False, True])
def test_weights_are_computed_on_request_alone(need_weights, calls):
    _, ours = pair_of_modules(WIDTH, HEADS)
    x = torch.randn(LEN_Q, BATCH, WIDTH)
    ours(x, x, x, need_weights=need_weights)
    assert [name for name, _ in calls] == ["attention"] + ["attention_weights"] * need_weights


@pytest.mark.parametrize("of", ["bool", "float"])
def test_samples_of_padding_alone(of):
    """They give the output projection's bias and weights 0; PyTorch gives nan."""
    theirs, ours = pair_of_modules(WIDTH, HEADS, batch_first=True)
    x = torch.randn(BATCH, LEN_Q, WIDTH).requires_grad_()
    padding = torch.zeros(BATCH, LEN_Q, dtype=torch.bool)
    padding[1] = True
    if of == "float":
        padding = torch.zeros(BATCH, LEN_Q).masked_fill(padding, -math.inf)
    assert theirs(x, x, x, padding)[0][1].isnan().all()
    out, weights = ours(x, x, x, padding)
    assert torch.equal(out[1], ours.out_proj.bias.expand(LEN_Q, WIDTH))
    assert not weights[1].any()
    exact = copy.deepcopy(theirs).double()(*[x[:1].double()] * 3)[0]
    assert_close(out[:1], exact, theirs(x, x, x)[0][:1], eps=EPS["float32"], len_kv=LEN_Q)
    gradients = torch.autograd.grad((out * out).sum() + weights.sum(), [x, *ours.parameters()])
    assert all(g.isfinite().all() for g in gradients)
    assert not gradients[0][1].any()


def test_what_padding_holds_cannot_matter():
    _, ours = pair_of_modules(WIDTH, HEADS, batch_first=True)
    query, clean = torch.randn(BATCH, LEN_Q, WIDTH), torch.randn(BATCH, LEN_KV, WIDTH)
    padding = torch.zeros(BATCH, LEN_KV, dtype=torch.bool)
    padding[0, 3:] = True
    poisoned = clean.masked_fill(padding[..., None], math.nan)
    for given, expected in zip(
        ours(query, poisoned, poisoned, padding), ours(query, clean, clean, padding), strict=True
    ):
        assert torch.equal(given, expected)


def test_dropout_in_training_alone():
    """Its mean is the output without, and weights are those before dropout."""
    _, ours = pair_of_modules(WIDTH, HEADS, dropout=0.5, batch_first=True)
    x = torch.randn(1, LEN_KV, WIDTH)
    with torch.no_grad():
        exact, weights = ours.eval()(x, x, x)
        assert torch.equal(ours(x, x, x)[0], exact)
        ours.train()
        many = x.expand(4000, -1, -1)
        out, dropped = ours(many, many, many)
    assert_close(dropped, weights.expand_as(dropped), eps=EPS["float32"], len_kv=LEN_KV)
    assert out.std(dim=0).min() > 0
    assert ((out.mean(dim=0) - exact[0]).abs() < 5 * out.std(dim=0) / math.sqrt(4000)).all()


@pytest.mark.parametrize("need_weights", [False, True])
def test_autocast(need_weights):
    theirs, ours = pair_of_modules(WIDTH, HEADS, batch_first=True)
    x = torch.randn(BATCH, LEN_Q, WIDTH)
    mask = torch.randn(LEN_Q, LEN_Q)
    options = {"attn_mask": mask, "need_weights": need_weights}
    exact = copy.deepcopy(theirs).double()(*[x.double()] * 3, attn_mask=mask.double())
    with torch.autocast("cpu", torch.bfloat16):
        yardstick, found = (mha(x, x, x, **options) for mha in (theirs, ours))
    assert found[0].dtype == yardstick[0].dtype == torch.bfloat16
    for got, truth, other in list(zip(found, exact, yardstick, strict=True))[: 1 + need_weights]:
        assert_close(got, truth, other, eps=EPS["bfloat16"], len_kv=LEN_Q)


def swapped(model):
    """A copy of a model of PyTorch with our modules in place of its own."""
    model = copy.deepcopy(model)
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.MultiheadAttention:
                ours = MultiheadAttention(
                    child.embed_dim, child.num_heads, child.dropout, batch_first=child.batch_first
                ).train(child.training)  # fmt: skip
                ours.load_state_dict(child.state_dict())
                setattr(parent, name, ours)
    return model


@pytest.mark.parametrize("training", [True, False])
def test_a_transformer_of_pytorch(training, calls):
    theirs = nn.Transformer(WIDTH, HEADS, 1, 1, 16, dropout=0.0, batch_first=True).train(training)
    ours = swapped(theirs)
    source, target = torch.randn(BATCH, LEN_KV, WIDTH), torch.randn(BATCH, LEN_Q, WIDTH)
    mask = nn.Transformer.generate_square_subsequent_mask(LEN_Q)
    with torch.no_grad():
        yardstick = theirs(source, target, tgt_mask=mask)
        found = ours(source, target, tgt_mask=mask)
        assert [options["causal"] for _, options in calls] == [False, True, False]
        exact = theirs.double()(source.double(), target.double(), tgt_mask=mask.double())
    assert_close(found, exact, yardstick, eps=EPS["float32"], len_kv=WIDTH)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("copies", ["plain", "pickled"])
def test_inference_of_encoders_does_not_go_past_the_module(copies, calls):
    """Of a layer, and of a stack, which makes nested tensors of what is padded."""
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, batch_first=True).eval()
    theirs = nn.TransformerEncoder(layer, 2).eval()
    ours = swapped(theirs)
    if copies == "pickled":
        file = io.BytesIO()
        torch.save(ours, file)
        file.seek(0)
        ours = torch.load(file, weights_only=False)
    x = torch.randn(BATCH, LEN_KV, WIDTH)
    padding = torch.zeros(BATCH, LEN_KV, dtype=torch.bool)
    padding[1, 3:] = True
    with torch.no_grad():
        yardstick = theirs(x, src_key_padding_mask=padding), theirs.layers[0](x)
        found = ours(x, src_key_padding_mask=padding), ours.layers[0](x)
        assert len(calls) == 3
        theirs = theirs.double()
        exact = theirs(x.double(), src_key_padding_mask=padding), theirs.layers[0](x.double())
    for got, truth, other in zip(found, exact, yardstick, strict=True):
        assert_close(got, truth, other, eps=EPS["float32"], len_kv=WIDTH)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("batch_first", [False, True])
def test_nested_tensors(batch_first):
    ours = MultiheadAttention(WIDTH, HEADS, batch_first=batch_first)
    rows = [torch.randn(n, WIDTH) for n in (3, 5)]
    x = torch.nested.nested_tensor(rows)
    out, weights = ours(x, x, x, need_weights=False)
    assert weights is None
    for got, row in zip(out.unbind(), rows, strict=True):
        assert_close(got, ours(row, row, row)[0], eps=EPS["float32"], len_kv=WIDTH)
    with pytest.raises(ValueError, match="need_weights must be False for nested tensors"):
        ours(x, x, x)


def test_tensors_elsewhere_are_left_to_pytorch(calls):
    ours = MultiheadAttention(WIDTH, HEADS, device="meta")
    x = torch.zeros(LEN_Q, BATCH, WIDTH, device="meta")
    assert ours(x, x, x)[0].is_meta
    assert calls == []


X = torch.zeros(LEN_Q, BATCH, WIDTH)
ERRORS = {
    "axes": (ValueError, "must have three axes each, or two each, got query (4, 8), key (4, 2, 8)",
             (X[:, 0], X, X), {}),
    "batch": (ValueError, "must have the same batch (axis 1), got query (4, 1, 8)",
              (X[:, :1], X, X), {}),
    "hint": (ValueError, "is_causal must come with the attn_mask", (X, X, X), {"is_causal": True}),
    "mask": (ValueError, "attn_mask must have the shape (4, 4) or (4, 4, 4), got (2, 4, 4)",
             (X, X, X), {"attn_mask": torch.zeros(2, 4, 4)}),
    "padding": (ValueError, "key_padding_mask must have the shape (2, 4), got (4, 2)", (X, X, X),
                {"key_padding_mask": torch.zeros(4, 2)}),
    "integers": (TypeError, "attn_mask must be boolean (True = left out) or floating-point, got "
                 "torch.int32", (X, X, X), {"attn_mask": torch.zeros(4, 4, dtype=torch.int32)}),
    "array": (TypeError, "key_padding_mask must be a torch.Tensor, got list", (X, X, X),
              {"key_padding_mask": [[True]]}),
    "lengths": (ValueError, "key and value must have the same length", (X, X, X[:2]), {}),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    error, message, arguments, options = ERRORS[case]
    with pytest.raises(error) as caught:
        MultiheadAttention(WIDTH, HEADS)(*arguments, **options)
    assert message in str(caught.value)
