"""`scaledot.torch`: PyTorch's attention function, by its arguments, and calls of it routed here."""

import functools
import importlib
import inspect
import math
import os
import subprocess
import sys
import threading

import pytest

from compare import EPS, assert_close
from scaledot import attention

torch = pytest.importorskip("torch")
module = importlib.import_module("scaledot.torch")
patched = module.patched
scaled_dot_product_attention = module.scaled_dot_product_attention
functional = torch.nn.functional
imported_by_name = functional.scaled_dot_product_attention

# query, key, value: every way in which the axes before the last two may broadcast.
SHAPES = {
    "two axes": ((4, 3), (5, 3), (5, 2)),
    "three axes": ((2, 4, 3), (2, 5, 3), (2, 5, 2)),
    "three axes, one key": ((2, 4, 3), (1, 5, 3), (1, 5, 2)),
    "four axes": ((2, 3, 4, 3), (2, 3, 5, 3), (2, 3, 5, 2)),
    "batch of keys": ((1, 3, 4, 3), (2, 3, 5, 3), (2, 3, 5, 3)),
    "one head of keys": ((2, 3, 4, 3), (2, 1, 5, 3), (2, 1, 5, 2)),
    "one head of query": ((2, 1, 4, 3), (2, 3, 5, 3), (2, 3, 5, 2)),
    "key and value differ": ((2, 3, 4, 3), (2, 1, 5, 3), (1, 3, 5, 2)),
    "five axes": ((2, 1, 3, 4, 3), (1, 2, 3, 5, 3), (1, 2, 3, 5, 2)),
    "axes missing": ((2, 3, 4, 3), (5, 3), (3, 5, 2)),
    "grouped": ((2, 4, 4, 3), (2, 2, 5, 3), (2, 2, 5, 2)),
    "more queries": ((2, 3, 5, 3), (2, 3, 4, 3), (2, 3, 4, 2)),
}
MASKS = ("none", "causal", "bool", "bool row", "bool, empty rows", "float", "float32", "float -inf")


@pytest.fixture(autouse=True, scope="module")
def torch_on_one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def generator(request):
    return torch.Generator().manual_seed(sum(request.node.name.encode()))


def normal(generator, *shape, dtype=torch.float32):
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def problem(shape, mask, generator, dtype):
    """Arguments of a call, those with gradients first."""
    leaves = [normal(generator, *x, dtype=dtype) for x in SHAPES[shape]]
    len_q, len_kv = leaves[0].shape[-2], leaves[1].shape[-2]
    options = {"enable_gqa": True} if shape == "grouped" else {}
    if mask == "causal":
        options["is_causal"] = True
    elif mask.startswith("float"):
        bias = normal(generator, len_q, len_kv, dtype=dtype)
        bias = bias.float() if mask == "float32" and dtype != torch.float64 else bias
        if mask == "float -inf":
            bias = bias.masked_fill(bias > 0.5, -math.inf)
        leaves.append(bias)
    elif mask != "none":
        seen = torch.rand(1 if mask == "bool row" else len_q, len_kv, generator=generator) < 0.7
        seen[:, 0] = True
        if "empty" in mask:
            seen[1:3] = False
        options["attn_mask"] = seen
    return leaves, options


def results(function, leaves, options, dtype=None, autocast=None):
    """Output, computed under autocast or without, and the gradients of a ramp over it."""
    leaves = [
        x.detach().to(x.dtype if dtype is None else dtype).requires_grad_() for x in leaves
    ]
    options = dict(options)
    if len(leaves) > 3:
        options["attn_mask"] = leaves[3]
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        out = function(*leaves[:3], **options)
    ramp = torch.arange(out.shape[-1], dtype=torch.float64) - 0.7
    return [out, *torch.autograd.grad((out * ramp).sum(), leaves)]


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_as_pytorch(shape, mask, dtype, generator):
    """Output and gradients, of a floating-point mask too.

    PyTorch's in float64 is the truth, but for float64 just another result.
    """
    leaves, options = problem(shape, mask, generator, getattr(torch, dtype))
    eps = EPS[dtype] * (8 if dtype == "float64" else 1)
    for scale in (None, -0.3):
        options["scale"] = scale
        truth = results(imported_by_name, leaves, options, torch.float64)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            yardstick = results(imported_by_name, leaves, options)
        found = results(scaled_dot_product_attention, leaves, options)
        for i, (got, exact, other) in enumerate(zip(found, truth, yardstick, strict=True)):
            assert got.dtype == other.dtype
            assert_close(got, exact, other, eps=eps, len_kv=5, factor=3.0 if i else 2.0)


def test_signature():
    schema = torch.ops.aten.scaled_dot_product_attention.default._schema
    ours = inspect.signature(scaled_dot_product_attention).parameters.values()
    assert [p.name for p in ours] == [a.name for a in schema.arguments]
    assert [p.kind is p.KEYWORD_ONLY for p in ours] == [a.kwarg_only for a in schema.arguments]
    assert [p.default for p in ours][3:] == [a.default_value for a in schema.arguments][3:]


@pytest.mark.parametrize("mask", MASKS)
def test_finite_differences(mask, generator):
    leaves, options = problem("four axes", mask, generator, torch.float64)
    if mask == "float -inf":  # a difference of infinities is no number
        options["attn_mask"] = leaves.pop()

    def call(query, key, value, attn_mask=None, dropout_p=0.0):
        torch.manual_seed(3)
        given = options if attn_mask is None else options | {"attn_mask": attn_mask}
        return scaled_dot_product_attention(query, key, value, **given, dropout_p=dropout_p)

    leaves = [x.requires_grad_() for x in leaves]
    assert torch.autograd.gradcheck(call, leaves, fast_mode=mask != "float")
    with_dropout = functools.partial(call, dropout_p=0.4)
    assert torch.autograd.gradcheck(with_dropout, leaves, fast_mode=True)


def kept_weights(p, seed=0, shape=(2, 3, 48), **options):
    """Weights after dropout of equal scores: 0, or 1 / 48 / (1 - p)."""
    torch.manual_seed(seed)
    query = torch.zeros(*shape, 2)
    value = torch.eye(shape[-1]).expand(*shape, shape[-1])
    return scaled_dot_product_attention(query, query, value, dropout_p=p, **options)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_drops_that_share_and_scales_the_rest(p):
    weights = kept_weights(p)
    count, kept = weights.numel(), (weights > 0).sum().item()
    assert abs(kept - (1 - p) * count) < 5 * math.sqrt(count * p * (1 - p))
    rest = weights[weights > 0]
    assert_close(rest, torch.full_like(rest, 1 / 48 / (1 - p)), eps=EPS["float32"], len_kv=48)
    assert not kept_weights(1.0).any()


def test_dropout_differs_between_batches_heads_rows_and_calls():
    weights = kept_weights(0.5) > 0
    masks = {tuple(row.tolist()) for row in weights.flatten(0, 2)}
    assert len(masks) == weights[..., 0].numel()
    assert not torch.equal(weights, kept_weights(0.5, seed=1) > 0)
    assert torch.equal(weights, kept_weights(0.5) > 0)
    torch.manual_seed(0)
    x = torch.randn(1, 1, 20, 4)
    first, second = (scaled_dot_product_attention(x, x, x, dropout_p=0.5) for _ in range(2))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_dropout_alone_draws_numbers(p):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    x = torch.zeros(1, 1, 4, 2)
    scaled_dot_product_attention(x, x, x, dropout_p=p)
    assert torch.equal(before, torch.get_rng_state()) == (p == 0.0)


def test_dropout_is_the_same_forwards_and_backwards(generator):
    """The output is linear in the value, and its gradient is the same linear map transposed."""
    query, key, value, cotangent = (
        normal(generator, 2, 2, 20, 4, dtype=torch.float64) for _ in range(4)
    )
    value.requires_grad_()
    out = scaled_dot_product_attention(query, key, value, dropout_p=0.5)
    forward = (out * cotangent).sum()
    (gradient,) = torch.autograd.grad(forward, value)
    assert_close((value * gradient).sum(), forward, eps=EPS["float64"], len_kv=out.numel())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_dropout_is_the_same_when_a_checkpoint_computes_again(use_reentrant, generator):
    x = normal(generator, 2, 2, 8, 4, dtype=torch.float64).requires_grad_()

    def call(x):
        return scaled_dot_product_attention(x, x, x, dropout_p=0.5)

    gradients = []
    checkpoint = torch.utils.checkpoint.checkpoint
    for run in (call, functools.partial(checkpoint, call, use_reentrant=use_reentrant)):
        torch.manual_seed(5)
        x.grad = None
        run(x).square().sum().backward()
        gradients.append(x.grad)
    assert_close(*gradients, eps=8 * EPS["float64"], len_kv=8)


AUTOCAST = {
    "float32": ([torch.float32] * 3, None),
    "mixed": ([torch.float32, torch.float16, torch.bfloat16], None),
    "float64": ([torch.float64] * 3, None),
    "mask": ([torch.float32] * 3, torch.float32),
    "float16 mask": ([torch.float32] * 3, torch.float16),
}


@pytest.mark.parametrize("of", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", AUTOCAST)
def test_autocast(case, of, generator):
    dtypes, of_mask = AUTOCAST[case]
    leaves = [normal(generator, 2, 2, 6, 4, dtype=dtype) for dtype in dtypes]
    leaves += [] if of_mask is None else [normal(generator, 6, 6, dtype=of_mask)]
    # What is compared is computed from the rounded arguments; the mask is not rounded here.
    used = dtypes[0] if case == "float64" else of
    truth = results(imported_by_name, [*(x.to(used) for x in leaves[:3]), *leaves[3:]], {},
                    torch.float64)  # fmt: skip
    yardstick = results(imported_by_name, leaves, {}, autocast=of)
    found = results(scaled_dot_product_attention, leaves, {}, autocast=of)
    assert found[0].dtype == yardstick[0].dtype == used
    # Nothing within is cast any more.
    given = [x.to(used) if i < 3 else x.float() for i, x in enumerate(leaves)]
    plain = results(scaled_dot_product_attention, given, {})
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(found[:2], plain[:2], strict=True))
    eps = EPS[str(used).rpartition(".")[2]] * (8 if case == "float64" else 1)
    assert_close(found[0], truth[0], yardstick[0], eps=eps, len_kv=6)
    for got, exact, other, leaf in zip(
        found[1:], truth[1:], yardstick[1:], leaves, strict=True
    ):  # fmt: skip
        assert got.dtype == leaf.dtype
        assert_close(got, exact, other, eps=eps, len_kv=6, factor=3.0)


X = torch.zeros(2, 4, 3, 2)
SEEN = torch.ones(3, 3, dtype=torch.bool)
ERRORS = {
    "array": (TypeError, "query must be a torch.Tensor, got ndarray", (X.numpy(), X, X), {}),
    "none": (TypeError, "value must be a torch.Tensor, got NoneType", (X, X, None), {}),
    "list": (TypeError, "attn_mask must be a torch.Tensor, got list", (X, X, X, [True]), {}),
    "dtypes": (TypeError, "query, key and value must share one dtype", (X, X.double(), X), {}),
    "heads": (ValueError, "must have equally many heads, or 1, got query (2, 4, 3, 2), key (2, 2",
              (X, X[:, :2], X[:, :2]), {}),
    "groups": (ValueError, "a divisor of query's, got", (X, X[:, :3], X[:, :3]),
               {"enable_gqa": True}),
    "groups of two sizes": (ValueError, "key and value must have equally many heads, a divisor",
                            (X, X[:, :2], X[:, :1]), {"enable_gqa": True}),
    "integers": (TypeError, "attn_mask must be boolean, float32 or of query's dtype, got "
                 "torch.int32 beside torch.float32", (X, X, X, SEEN.int()), {}),
    "wide mask": (TypeError, "got torch.float64 beside torch.float32", (X, X, X, SEEN.double()),
                  {}),
    "large mask": (ValueError, "mask must broadcast to", (X, X, X, SEEN.expand(3, 1, 3, 3)), {}),
    "both": (ValueError, "attn_mask must be None where is_causal=True", (X, X, X, SEEN),
             {"is_causal": True}),
    "probability": (ValueError, "dropout must lie between 0 and 1, got 1.5", (X, X, X),
                    {"dropout_p": 1.5}),
    "lengths": (ValueError, "key and value must have the same length", (X, X, X[..., :2, :]), {}),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    error, message, arguments, options = ERRORS[case]
    with pytest.raises(error) as caught:
        scaled_dot_product_attention(*arguments, **options)
    assert message in str(caught.value)


def test_without_pytorch(tmp_path):
    program = "import sys; sys.modules['torch'] = None; import scaledot; import scaledot.torch"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode != 0
    assert done.stderr.rstrip().splitlines()[-1].startswith("ImportError: torch is needed here")
    assert "pip install 'scaledot[torch]'" in done.stderr


# Calls of PyTorch's function.


@pytest.fixture
def calls(monkeypatch):
    """The options of each call that is computed here."""
    seen = []

    def counted(*arrays, **options):
        seen.append(options)
        return attention(*arrays, **options)

    monkeypatch.setattr(module, "attention", counted)
    return seen


def test_calls_are_routed_also_by_a_name_imported_before(calls, generator):
    x = normal(generator, 2, 2, 5, 4)
    seen = torch.ones(5, 5, dtype=torch.bool).tril()
    expected = imported_by_name(x, x, x, seen, scale=0.5)
    with patched():
        for function in (imported_by_name, functional.scaled_dot_product_attention):
            out = function(x, x, value=x, attn_mask=seen, scale=0.5)
            assert_close(out, expected, eps=EPS["float32"], len_kv=5)
    assert len(calls) == 2
    imported_by_name(x, x, x)
    assert len(calls) == 2


@patched()
def decorated(x):
    return imported_by_name(x, x, x)


def test_nested_and_as_a_decorator(calls):
    with patched(), patched():
        decorated(X)
    decorated(X)
    assert len(calls) == 2
    with patched():
        with patched():
            pass
        imported_by_name(X, X, X)
        assert not torch.backends.mha.get_fastpath_enabled()
    assert len(calls) == 3
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("enabled", [True, False])
def test_the_native_path_is_off_inside_and_as_before_afterwards(enabled):
    torch.backends.mha.set_fastpath_enabled(enabled)
    try:
        with patched():
            assert not torch.backends.mha.get_fastpath_enabled()
        assert torch.backends.mha.get_fastpath_enabled() == enabled
        with pytest.raises(RuntimeError, match="must match the size"), patched():
            imported_by_name(X, X[:, :2], X[:, :2])
        assert torch.backends.mha.get_fastpath_enabled() == enabled
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_other_threads_are_not_routed_but_keep_the_native_path_off(calls):
    inside, leave = threading.Event(), threading.Event()

    def other():
        with patched():
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=other)
    with patched():
        thread.start()
        assert inside.wait(30)
    imported_by_name(X, X, X)
    assert calls == []
    assert not torch.backends.mha.get_fastpath_enabled()
    leave.set()
    thread.join(30)
    assert torch.backends.mha.get_fastpath_enabled()


def test_what_is_not_ours_goes_to_pytorch(calls, generator):
    from torch.nn.attention.bias import causal_lower_right

    x = normal(generator, 1, 2, 3, 2)
    with patched():
        assert imported_by_name(*[X.to("meta")] * 3).is_meta
        # PyTorch's kernel intersects these two; its documentation says that it is an error.
        out = imported_by_name(x, x, x, SEEN, is_causal=True)
        biased = imported_by_name(x, x, x, causal_lower_right(3, 3))
        with pytest.raises(RuntimeError, match="must match the size"):
            imported_by_name(X, X[:, :2], X[:, :2])
    assert calls == []
    causal = imported_by_name(x, x, x, is_causal=True)
    for got in (out, biased):
        assert_close(got, causal, eps=EPS["float32"], len_kv=3)


def test_an_active_mode_keeps_plain_tensors_here(calls):
    with torch.device("cpu"):
        scaled_dot_product_attention(X, X, X)
    assert len(calls) == 1


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_layers_of_pytorch(training, batch_first, calls, generator):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=batch_first)
    layer = layer.train(training)
    x = normal(generator, 3, 5, 8)
    exact = layer.double()(x.double())
    layer = layer.float()
    with torch.no_grad():
        plain = layer(x)
        assert calls == []
        with patched():
            out = layer(x)
    assert len(calls) == 1
    assert_close(out, exact, plain, eps=EPS["float32"], len_kv=8)
