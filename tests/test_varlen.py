"""Packed sequences and their gradients by the kernels: each has what it has alone, to the bit."""

import itertools
import tracemalloc

import numpy as np
import pytest

import cases
import naive_gradients
import scaledot as sd
from compare import EPS, assert_close
from scaledot import _packed_gradients, _passes, _varlen
from scaledot._spec import batch_seeds
from test_gradients import assert_gradient, expected_of, slope_of_distance


def distance(score, batch, head, q_pos, kv_pos):
    """A score_mod that depends on everything but the sequence."""
    return score * 0.75 + (q_pos - kv_pos) * (head + 1) * 0.001


def diagonals(batch, head, q_pos, kv_pos):
    """A mask_mod that does, too."""
    return ((q_pos - kv_pos + head) % 3 != 0) | (q_pos == kv_pos)


HEADS, KV_HEADS = 4, 2
OPERANDS = ("query", "key", "value")
OPTIONS = {
    "causal": True, "window": (90, 40), "scale": -0.3, "softcap": 2.0,
    "alibi_slopes": cases.slopes(HEADS), "sinks": np.array([0.5, -1, 2, 0], np.float32),
    "score_mod": (distance, slope_of_distance), "mask_mod": diagonals,
    "dropout": 0.3,
}  # fmt: skip
DTYPES = ("float32", "bfloat16", "float64", "float16")


def on(row, column):
    """An orthogonal array: in 16 rows any two columns meet in all four ways, equally often."""
    return (row & column).bit_count() % 2 == 1


def drawn(row):
    """Options of a row, and its dtype."""
    options = {name: x for i, (name, x) in enumerate(OPTIONS.items(), 1) if on(row, i)}
    if "dropout" in options:
        options["seed"] = 11
    return options, DTYPES[on(row, 10) + 2 * on(row, 12)]


def packed(len_q, len_kv, dtype, d_k=72, d_v=104):
    """Query, key, value and the gradient of the result, and where sequences start."""
    rng = np.random.default_rng(len(len_q))
    starts = [np.cumsum([0, *x]).tolist() for x in (len_q, len_kv)]
    queries, keys = (x[-1] for x in starts)
    shapes = ((queries, HEADS, d_k), (keys, KV_HEADS, d_k), (keys, KV_HEADS, d_v),
              (queries, HEADS, d_v))  # fmt: skip
    return [rng.standard_normal(s).astype(cases.dtype_named(dtype)) for s in shapes], starts


def sequences(arrays, starts, options):
    """Arguments, (heads, tokens, d), and gradient of the result of each sequence alone."""
    seeds = batch_seeds(options.get("seed", 0), len(starts[0]) - 1)
    pairs = zip(*map(itertools.pairwise, starts), strict=True)
    for number, (q, kv) in enumerate(pairs):
        parts = [x[slice(*p)].swapaxes(0, 1) for x, p in zip(arrays, (q, kv, kv, q), strict=True)]
        own = options | ({"seed": seeds[number, ...]} if "seed" in options else {})
        yield dict(zip(OPERANDS, parts, strict=False)) | own, parts[3]


def joined(parts):
    return np.concatenate([x.swapaxes(0, 1) for x in parts])


def each_alone(arrays, starts, options):
    """Result and gradients of one sequence after the other."""
    results = []
    for arguments, grad_out in sequences(arrays, starts, options):
        out, pullback = sd.attention_vjp(**arguments)
        results.append((out, *pullback(grad_out)))
    return results


def all_alone(arrays, starts, options):
    """The same, packed, of what is not summed over the sequences."""
    parts = each_alone(arrays, starts, options)
    return [joined(x) for x in list(zip(*parts, strict=True))[:4]]


@pytest.fixture
def at_once(monkeypatch):
    """No sequence may be computed by itself."""
    monkeypatch.setattr(_varlen, "attention", None)
    monkeypatch.setattr(_varlen, "attention_vjp", None)


@pytest.fixture(autouse=True)
def restored_threads():
    """Let no number of threads stay set."""
    yield
    sd.set_num_threads(None)


SPREAD = [[0, 1, 127, 128, 129, 600, 5, 0, 33, 1], [4, 1, 129, 128, 127, 430, 0, 0, 70, 200]]


@pytest.mark.parametrize("row", [
    *range(8), *(pytest.param(row, marks=pytest.mark.heavy) for row in range(8, 16))
])  # fmt: skip
def test_each_sequence_has_what_it_has_alone(row, at_once):
    options, dtype = drawn(row)
    arrays, starts = packed(*SPREAD, dtype)
    sd.set_num_threads(1)
    parts = each_alone(arrays, starts, options)
    expected = [joined(x) for x in list(zip(*parts, strict=True))[:4]]
    sd.set_num_threads(3)
    out, pullback = sd.varlen_attention_vjp(*arrays[:3], *starts, **options)
    got = out, *pullback(arrays[3])
    for name, x, right in zip(("out", *OPERANDS), got, expected, strict=False):
        assert x.dtype == right.dtype
        np.testing.assert_array_equal(x, right, err_msg=name)
    if "alibi_slopes" in options:  # summed in float64; those of each sequence are rounded once
        each = np.array([part[-1] for part in parts], dtype=np.float64)
        assert got[-1].dtype == np.float32
        rounded = np.abs(each).sum(axis=0) * EPS["float32"]
        assert (np.abs(got[-1] - each.sum(axis=0)) <= rounded).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scores_whose_lse_is_large(dtype, at_once):
    """Weights of some sequences are scaled anew, those of others are not."""
    arrays, starts = packed([20, 130, 7], [30, 140, 7], dtype)
    arrays[0][:20] *= 0.01
    options = {"scale": 1.5, "sinks": OPTIONS["sinks"]}
    expected = all_alone(arrays, starts, options)
    out, pullback = sd.varlen_attention_vjp(*arrays[:3], *starts, **options)
    for x, right in zip((out, *pullback(arrays[3])[:3]), expected, strict=True):
        np.testing.assert_array_equal(x, right)


def test_sinks_beside_scores_that_are_as_large(at_once):
    """Of four equal scores and a sink each has a fifth, which such an lse does not hold."""
    starts = [0, 2, 5], [0, 4, 8]
    query, key = np.full((5, HEADS, 1), 300, "f"), np.full((8, KV_HEADS, 1), 300, "f")
    value = np.arange(16, dtype=np.float32).reshape(8, KV_HEADS, 1)
    sinks = np.full(HEADS, 90000, np.float32)
    out, pullback = sd.varlen_attention_vjp(query, key, value, *starts, scale=1.0, sinks=sinks)
    # The sink's value is 0: its dS is 0.2 · (0 - out).
    expected = -0.2 * out.sum(axis=(0, 2), dtype=np.float64)
    grads = pullback(np.ones_like(out))
    assert_close(grads.sinks, expected, eps=4 * EPS["float32"], len_kv=4)


def summed(parts):
    """What is expected of gradients for each head, which are sums over the sequences."""
    first = parts[0]

    def total(gradients):
        return first.gradients._replace(**{
            name: sum(np.asarray(getattr(g, name), np.float64) for g in gradients)
            for name in ("sinks", "alibi_slopes") if getattr(gradients[0], name) is not None
        })  # fmt: skip

    # An error of the sum is at most the sum of errors: their signs are not known.
    near = total([
        p.gradients._replace(**{
            name: np.abs(getattr(p.near[2], name) - getattr(p.gradients, name))
            for name in ("sinks", "alibi_slopes") if getattr(p.gradients, name) is not None
        }) for p in parts
    ])  # fmt: skip
    exact, sizes = total([p.gradients for p in parts]), total([p.sizes for p in parts])
    near = exact._replace(**{
        name: getattr(exact, name) + getattr(near, name)
        for name in ("sinks", "alibi_slopes") if getattr(exact, name) is not None
    })  # fmt: skip
    lse = np.concatenate([p.lse.reshape(-1) for p in parts])
    return first._replace(gradients=exact, near=(*first.near[:2], near), sizes=sizes, lse=lse)


@pytest.mark.parametrize("row", range(16))
def test_gradients_are_those_of_the_oracle(row):
    options, dtype = drawn(row)
    arrays, starts = packed([2, 0, 5, 1, 3], [3, 2, 4, 0, 3], dtype, d_k=3, d_v=5)
    parts = []
    for number, (arguments, grad_out) in enumerate(sequences(arrays, starts, options)):
        if not grad_out.size or not arguments["key"].size:
            continue
        expected = expected_of(arguments, dtype, with_lse=False)
        parts.append((number, expected))
        arrays[3][starts[0][number] : starts[0][number + 1]] = expected.grad_out.swapaxes(0, 1)
    out, pullback = sd.varlen_attention_vjp(*arrays[:3], *starts, **options)
    gradients = pullback(arrays[3])
    for number, expected in parts:
        for name in ("out", *OPERANDS):
            whole = out if name == "out" else getattr(gradients, name)
            side = starts[name in ("key", "value")]
            got = whole[side[number] : side[number + 1]].swapaxes(0, 1)
            if name == "out":
                assert_close(got, expected.out, expected.near[0], eps=EPS[dtype], len_kv=4)
            else:
                assert_gradient(name, got, expected, dtype, 4)
    for name in {"sinks", "alibi_slopes"} & options.keys():
        total = summed([expected for _, expected in parts])
        assert_gradient(name, getattr(gradients, name), total, dtype, 12)
    for number, name in ((1, "key"), (1, "value"), (3, "query")):  # nothing on the other side
        side = starts[name != "query"]
        assert not getattr(gradients, name)[side[number] : side[number + 1]].any()


def test_a_mod_that_knows_its_sequence():
    arrays, starts = packed([2, 3], [4, 3], "float64", d_k=3, d_v=3)
    table = np.array([0.5, 2.0])
    pair = (lambda score, batch, head, q_pos, kv_pos: score * table[batch],
            lambda score, batch, head, q_pos, kv_pos: table[batch] + 0 * score)  # fmt: skip
    truth = naive_gradients.varlen(*arrays[:3], *starts, arrays[3], score_mod=pair)
    _, pullback = sd.varlen_attention_vjp(*arrays[:3], *starts, score_mod=pair)
    for got, right in zip(pullback(arrays[3])[:3], truth, strict=False):
        assert_close(got, right, eps=16 * EPS["float64"], len_kv=4)


def test_a_derivative_that_raises_shows_its_error():
    arrays, starts = packed([2, 3], [4, 3], "float32", d_k=3, d_v=3)
    table = np.ones(3, np.float32)
    pair = (lambda score, batch, head, q_pos, kv_pos: score,
            lambda score, batch, head, q_pos, kv_pos: table[kv_pos] + 0 * score)  # fmt: skip
    _, pullback = sd.varlen_attention_vjp(*arrays[:3], *starts, score_mod=pair)
    with pytest.raises(IndexError, match="out of bounds"):
        pullback(arrays[3])


def test_all_sequences_in_two_launches(monkeypatch):
    launches, launch = [], _packed_gradients.launch
    monkeypatch.setattr(
        _packed_gradients, "launch", lambda *a, **o: launches.append(a) or launch(*a, **o)
    )
    lengths = np.random.default_rng(0).integers(0, 70, 100)
    arrays, starts = packed(lengths, lengths[::-1], "float32", d_k=8, d_v=8)
    _, pullback = sd.varlen_attention_vjp(*arrays[:3], *starts, causal=True)
    assert launches == []
    pullback(arrays[3])
    assert len(launches) == 2


@pytest.mark.parametrize("place", range(4))
def test_nan_stays_in_its_sequence(place):
    lengths = [3, 150, 40, 9]
    arrays, starts = packed(lengths, lengths, "float32")
    clean, pullback = sd.varlen_attention_vjp(*arrays[:3], *starts, causal=True)
    right = clean, *pullback(arrays[3])[:3]
    start, stop = starts[0][2:4]
    arrays[place][start:stop] = np.nan
    out, pullback = sd.varlen_attention_vjp(*arrays[:3], *starts, causal=True)
    got = out, *pullback(arrays[3])[:3]
    alone = all_alone(arrays, starts, {"causal": True})
    assert any(np.isnan(x).any() for x in got)
    for x, undisturbed, single in zip(got, right, alone, strict=True):
        np.testing.assert_array_equal(x, single)
        np.testing.assert_array_equal(x[:start], undisturbed[:start])
        np.testing.assert_array_equal(x[stop:], undisturbed[stop:])


@pytest.mark.parametrize("case", ["strides", "broadcast", "dtype"])
def test_gradients_of_a_result_that_lie_anyhow(case, at_once):
    arrays, starts = packed([30, 60], [50, 20], "float32")
    grad_out = {
        "strides": arrays[3][:, ::-1, ::-1],
        "broadcast": np.broadcast_to(np.float32(0.5), arrays[3].shape),
        "dtype": arrays[3].astype(np.float64),
    }[case]
    expected = all_alone([*arrays[:3], grad_out], starts, {})
    _, pullback = sd.varlen_attention_vjp(*arrays[:3], *starts)
    for got, right in zip(pullback(grad_out)[:3], expected[1:], strict=True):
        np.testing.assert_array_equal(got, right)
    half = [x[::-1][:, ::-1, ::-1][::-1] for x in arrays]  # operands with negative strides
    expected = all_alone(half, starts, {})
    out, pullback = sd.varlen_attention_vjp(*half[:3], *starts)
    for got, right in zip((out, *pullback(half[3])[:3]), expected, strict=True):
        np.testing.assert_array_equal(got, right)


def test_a_pullback_keeps_its_own_result():
    arrays, starts = packed([5, 3], [4, 3], "float32")
    out, pullback = sd.varlen_attention_vjp(*arrays[:3], *starts)
    before = pullback(arrays[3])
    out[:] = 7
    for got, right in zip(pullback(arrays[3])[:3], before, strict=False):
        np.testing.assert_array_equal(got, right)


def test_nothing_is_padded():
    """One long sequence among many short ones: padded, they would be thirty times as large."""
    lengths = [3000, *[10] * 300]
    arrays, starts = packed(lengths, lengths, "float32", d_k=16, d_v=16)
    sd.set_num_threads(1)

    def run():
        _, pullback = sd.varlen_attention_vjp(*arrays[:3], *starts, causal=True)
        return pullback(arrays[3])

    run()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    grads = run()
    most = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    most -= sum(x.nbytes for x in grads[:3])
    padded = len(lengths) * max(lengths) * KV_HEADS * 16 * 4
    scores = max(lengths) ** 2 * 4
    assert most < min(padded, scores) / 2


# Other libraries


def as_torch(x):
    torch = pytest.importorskip("torch")
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(np.ascontiguousarray(x).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(x))


def as_numpy(x, like):
    """A tensor's numbers; bfloat16 as it is in ml_dtypes."""
    if like.dtype.name == "bfloat16":
        return x.view(pytest.importorskip("torch").int16).numpy().view(like.dtype)
    return x.numpy()


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_that_require_gradients(dtype, at_once):
    """One Function for all sequences, with the bits of the pullback."""
    torch = pytest.importorskip("torch")
    arrays, starts = packed([0, 1, 129, 40, 0], [3, 2, 70, 140, 0], dtype)
    for options in ({"causal": True}, {"dropout": 0.2, "seed": 4, "window": (30, 2)}):
        out, pullback = sd.varlen_attention_vjp(*arrays[:3], *starts, **options)
        right = out, *pullback(arrays[3])[:3]
        tensors = [as_torch(x).requires_grad_() for x in arrays[:3]]
        found = sd.varlen_attention(*tensors, *starts, **options)
        assert type(found.grad_fn).__name__.startswith("_Sequences")
        grads = torch.autograd.grad(found, tensors, as_torch(arrays[3]))
        for got, x in zip((found.detach(), *grads), right, strict=True):
            np.testing.assert_array_equal(as_numpy(got, x), x)


def test_a_tensor_that_alone_requires_a_gradient():
    torch = pytest.importorskip("torch")
    arrays, starts = packed([3, 8], [5, 2], "float32")
    sinks = as_torch(OPTIONS["sinks"]).requires_grad_()
    plain = [as_torch(x) for x in arrays]
    _, pullback = sd.varlen_attention_vjp(*plain[:3], *starts, sinks=sinks.detach())
    right = pullback(plain[3])
    sd.varlen_attention(*plain[:3], *starts, sinks=sinks).backward(plain[3])
    assert torch.equal(sinks.grad, right.sinks)
    value = plain[2].clone().requires_grad_()
    sd.varlen_attention(*plain[:2], value, *starts, sinks=sinks.detach()).backward(plain[3])
    assert torch.equal(value.grad, right.value)


DIFFERENTIATED = {
    "causal, softcap": {"causal": True, "softcap": 2.0},
    "window, slopes": {"window": (1, 0), "alibi_slopes": np.array([0.1, 0.2, 0.3, 0.4])},
    "sinks, dropout": {"sinks": np.array([0.5, -1, 1, 0.0]), "dropout": 0.3, "seed": 5},
}


def differentiated(options):
    """A function of tensors, and its arguments."""
    arrays, starts = packed([2, 0, 1], [2, 1, 3], "float64", d_k=2, d_v=2)
    heads = {name: x for name, x in options.items() if isinstance(x, np.ndarray)}
    tensors = [as_torch(x).requires_grad_() for x in (*arrays[:3], *heads.values())]

    def function(query, key, value, *others):
        own = options | dict(zip(heads, others, strict=True))
        return sd.varlen_attention(query, key, value, *starts, **own)

    return function, tensors


@pytest.mark.heavy
@pytest.mark.parametrize("options", DIFFERENTIATED.values(), ids=DIFFERENTIATED)
def test_derivatives_of_tensors(options):
    """First ones at once, second ones through the loop."""
    torch = pytest.importorskip("torch")
    function, tensors = differentiated(options)
    assert torch.autograd.gradcheck(function, tensors)
    assert torch.autograd.gradgradcheck(function, tensors, fast_mode=True)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # PyTorch's forward mode
@pytest.mark.heavy
@pytest.mark.parametrize("options", DIFFERENTIATED.values(), ids=DIFFERENTIATED)
def test_transforms_of_tensors(options):
    """Whoever transforms a call, or its gradient, sees one sequence after the other."""
    torch = pytest.importorskip("torch")
    function, tensors = differentiated(options)
    out = function(*tensors)
    assert type(out.grad_fn).__name__.startswith("_Sequences")
    grads = torch.from_numpy(np.random.default_rng(2).standard_normal((3, *out.shape)))

    def pulled(grad):
        return torch.autograd.grad(out, tensors, grad, retain_graph=True)

    right = [torch.stack(x) for x in zip(*map(pulled, grads), strict=True)]
    batched = torch.autograd.grad(out, tensors, grads, retain_graph=True, is_grads_batched=True)
    _, pullback = torch.func.vjp(function, *tensors)
    mapped, of_vjp = torch.func.vmap(pulled)(grads), torch.func.vmap(pullback)(grads)
    for found in (batched, mapped, of_vjp):
        for got, x in zip(found, right, strict=True):
            assert_close(got, x, eps=16 * EPS["float64"], len_kv=3)
    moves = [torch.ones_like(x) for x in tensors]
    _, moved = torch.func.jvp(function, tuple(tensors), tuple(moves))
    along = sum((g[0] * t).sum() for g, t in zip(right, moves, strict=True))
    # A sum of some twenty products, of which many cancel.
    sizes = sum((g[0] * t).abs().sum() for g, t in zip(right, moves, strict=True))
    difference = abs((moved * grads[0]).sum() - along)
    assert difference <= 64 * EPS["float64"] * sizes


@pytest.mark.heavy  # compiles
@pytest.mark.filterwarnings("ignore")  # of the compiler, about tensors that are no leaves
def test_a_compiler_sees_one_sequence_after_the_other():
    torch = pytest.importorskip("torch")
    _, tensors = differentiated({})
    starts = [0, 2, 2, 3], [0, 2, 3, 6]

    def loss(query, key, value):
        return sd.varlen_attention(query, key, value, *starts, causal=True).square().sum()

    compiled = torch.compile(loss, backend="aot_eager")
    right = torch.autograd.grad(loss(*tensors), tensors)
    for got, x in zip(torch.autograd.grad(compiled(*tensors), tensors), right, strict=True):
        assert_close(got, x, eps=16 * EPS["float64"], len_kv=3)


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_pullbacks_of_other_libraries(library, at_once):
    arrays, starts = packed([3, 0, 140, 20], [5, 2, 130, 0], "float32")
    array = as_torch
    if library == "jax":
        array = pytest.importorskip("jax").numpy.asarray
    options = {"causal": True, "alibi_slopes": OPTIONS["alibi_slopes"], "scale": 2.0,
               "dropout": 0.2, "seed": np.array([4, 1, 3, 2])}  # fmt: skip
    out, pullback = sd.varlen_attention_vjp(*arrays[:3], *starts, **options)
    right = out, *pullback(arrays[3])
    options |= {n: array(x) for n, x in options.items() if isinstance(x, np.ndarray)}
    out, pullback = sd.varlen_attention_vjp(*map(array, arrays[:3]), *starts, **options)
    for got, x in zip((out, *pullback(array(arrays[3]))), right, strict=True):
        assert (got is None) == (x is None)
        if x is not None:
            assert type(got) is type(out)
            np.testing.assert_array_equal(np.asarray(got), x)


def test_the_call_is_resolved_once(monkeypatch):
    """Not for each of a thousand sequences."""
    arrays, starts = packed([1] * 1000, [2] * 1000, "float32", d_k=4, d_v=4)
    resolved, resolve = [], _passes.resolve
    monkeypatch.setattr(_passes, "resolve", lambda *a, **o: resolved.append(a) or resolve(*a, **o))
    _, pullback = sd.varlen_attention_vjp(*arrays[:3], *starts)
    pullback(arrays[3])
    assert len(resolved) == 2


def test_slopes_of_sequences_in_different_numbers_of_ranges():
    """Gradients of slopes are sums over all sequences, long ones and short ones."""
    rng, lengths = np.random.default_rng(3), (70, 5000, 1, 2600)
    starts = np.cumsum([0, *lengths])
    query, key, value, grad = rng.standard_normal((4, starts[-1], 1, 3))
    slopes = {"alibi_slopes": np.array([0.02])}
    _, back = sd.varlen_attention_vjp(query, key, value, starts, starts, causal=True, **slopes)
    total = 0.0
    for start, stop in itertools.pairwise(starts):
        q, k, v, g = (x[start:stop].swapaxes(0, 1) for x in (query, key, value, grad))
        total += sd.attention_vjp(q, k, v, causal=True, **slopes)[1](g).alibi_slopes
    found = back(grad).alibi_slopes
    assert_close(found, total, eps=EPS["float64"], len_kv=starts[-1])
