"""Multi-head attention against the oracle."""

import functools

import numpy as np
import pytest

import naive
import textbook
from compare import EPS, assert_close
from conftest import Library
from scaledot import _family
from scaledot._family import multi_head_attention
from test_family import HALVES, cast, product, random_mask, torch_arrays

LEN_Q, LEN_KV = 12, 9
D_MODEL, D_CONTEXT, D_OUT = 6, 5, 7


def head_arrays(rng, dtype="float32", *, heads=(4, 2), self_attention=False, leads=((2,), (2,))):
    """Arguments of multi-head attention, heads of width 3 (keys) and 2 (values)."""
    of_q, of_kv = heads
    d_context = D_MODEL if self_attention else D_CONTEXT
    shapes = {
        "x": (*leads[0], LEN_Q, D_MODEL),
        "context": (*leads[1], LEN_KV, d_context),
        "w_q": (D_MODEL, of_q * 3),
        "w_k": (d_context, of_kv * 3),
        "w_v": (d_context, of_kv * 2),
        "w_o": (of_q * 2, D_OUT),
    }
    arrays = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    if self_attention:
        arrays["context"] = arrays["x"]
    return cast(arrays, dtype)


def multi_head_yardstick(arrays, num_heads, num_kv_heads, mask=None):
    """Multi-head attention as textbooks compute it, every array in the working dtype."""
    x, context = arrays["x"], arrays["context"]
    query, key, value = (
        naive.split_heads(product(source, arrays[w]), count)
        for source, w, count in (
            (x, "w_q", num_heads), (context, "w_k", num_kv_heads), (context, "w_v", num_kv_heads)
        )
    )
    lead = np.broadcast_shapes(query.shape[:-3], key.shape[:-3])
    seen = np.broadcast_to(
        True if mask is None else mask, (*lead, num_heads, x.shape[-2], context.shape[-2])
    )
    out, _ = textbook.attention(query, key, value, seen)
    joined = np.concatenate([out[..., head, :, :] for head in range(num_heads)], axis=-1)
    return product(joined, arrays["w_o"])


def check_heads(arrays, heads, mask, dtype, xp):
    truth = naive.multi_head(**arrays, num_heads=heads[0], num_kv_heads=heads[1], mask=mask)
    yardstick = multi_head_yardstick(arrays, *heads, mask)
    given = {name: xp.array(x) for name, x in arrays.items()}
    got = multi_head_attention(
        **given, num_heads=heads[0], num_kv_heads=heads[1],
        mask=None if mask is None else xp.array(mask),
    )
    assert type(got) is type(given["x"])
    assert got.dtype == given["x"].dtype
    assert_close(got, truth, yardstick, eps=EPS[dtype], len_kv=arrays["context"].shape[-2])


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("self_attention", [True, False])
def test_heads(heads, self_attention, xp, rng):
    arrays = head_arrays(rng, heads=heads, self_attention=self_attention)
    len_kv = arrays["context"].shape[-2]
    check_heads(arrays, heads, None, "float32", xp)
    check_heads(arrays, heads, random_mask(rng, heads[0], LEN_Q, len_kv), "float32", xp)


@pytest.mark.parametrize("dtype", ["float64", *HALVES])
def test_heads_in_other_dtypes(dtype, xp, rng):
    check_heads(head_arrays(rng, dtype), (4, 2), random_mask(rng, LEN_Q, LEN_KV), dtype, xp)


@pytest.mark.parametrize("leads", [((), ()), ((2, 1), (3,)), ((), (2,))], ids=str)
def test_leading_axes_of_heads(leads, rng):
    check_heads(head_arrays(rng, leads=leads), (4, 2), None, "float32", Library("numpy"))


def test_as_many_heads_of_keys_by_default(rng):
    arrays = head_arrays(rng, heads=(4, 4))
    np.testing.assert_array_equal(
        multi_head_attention(**arrays, num_heads=4),
        multi_head_attention(**arrays, num_heads=4, num_kv_heads=4),
    )


OPTIONS = {
    "causal": {"causal": True},
    "window": {"window": (2, 1)},
    "bias": {"bias": np.linspace(-1, 1, 108).reshape(12, 9)},
    "segment_ids": {"segment_ids": (np.arange(12) // 6, np.arange(9) // 4)},
    "kv_len": {"kv_len": np.array([3, 0])},
    "scale": {"scale": 0.25},
    "softcap": {"softcap": 0.5},
    "alibi_slopes": {"alibi_slopes": np.array([0.1, 0.2, 0.3, 0.4])},
    "sinks": {"sinks": np.array([0.0, 1.0, -1.0, 2.0])},
    "score_mod": {"score_mod": lambda score, _b, head, _q, kv_pos: score + head * kv_pos * 0.1},
    "mask_mod": {"mask_mod": lambda _b, head, _q, kv_pos: (kv_pos + head) % 2 == 0},
    "block_mask": {"block_mask": np.array([[[True]], [[False]], [[True]], [[True]]])},
    "dropout": {"dropout": 0.5, "seed": 7},
    "q_offset": {"q_offset": np.array([0, 2]), "causal": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_heads(name, rng):
    arrays = head_arrays(rng)
    x, context, w_q, w_k, w_v, w_o = (a.astype(np.float64) for a in arrays.values())
    got = multi_head_attention(**arrays, num_heads=4, num_kv_heads=2, **OPTIONS[name])
    out, _, _ = naive.attention(
        naive.split_heads(x @ w_q, 4), naive.split_heads(context @ w_k, 2),
        naive.split_heads(context @ w_v, 2), **OPTIONS[name],
    )
    truth = np.concatenate([out[..., head, :, :] for head in range(4)], axis=-1) @ w_o
    plain = naive.multi_head(**arrays, num_heads=4, num_kv_heads=2)
    # The textbook knows no options: its error is taken from the plain call.
    yardstick = truth + multi_head_yardstick(arrays, 4, 2) - plain
    assert_close(got, truth, yardstick, eps=EPS["float32"], len_kv=LEN_KV)
    assert np.abs(truth - plain).max() > EPS["float32"]  # the option does something


def test_implementation_of_heads(rng):
    arrays = head_arrays(rng, "float64")
    swapped = {name: x.astype(x.dtype.newbyteorder()) for name, x in arrays.items()}
    with pytest.raises(ValueError, match=r"impl='kernels' must be given a call .* order"):
        multi_head_attention(**swapped, num_heads=4, num_kv_heads=2, impl="kernels")


def test_heads_gradient(rng):
    torch = pytest.importorskip("torch")
    arrays = torch_arrays(head_arrays(rng, "float64"))
    mask = torch.tensor(random_mask(rng, LEN_Q, LEN_KV))

    def call(*values):
        return multi_head_attention(*values, num_heads=4, num_kv_heads=2, mask=mask)

    assert torch.autograd.gradcheck(call, tuple(arrays.values()), fast_mode=True)


def test_heads_do_not_see_masked_context(rng):
    arrays = head_arrays(rng, "float64")
    results = []
    for bad in (0.0, np.nan, np.inf):
        arrays["context"][:, 7:] = bad
        leaves = torch_arrays(arrays)
        out = multi_head_attention(**leaves, num_heads=4, num_kv_heads=2, kv_len=7)
        out.sum().backward()
        results.append({"out": out} | {name: x.grad for name, x in leaves.items()})
    for spoilt in results[1:]:
        for name, clean in results[0].items():
            assert_close(spoilt[name], clean, eps=EPS["float64"], len_kv=LEN_KV)


def test_compiled_heads(rng):
    jax = pytest.importorskip("jax")
    arrays = head_arrays(rng, "float64")
    call = functools.partial(multi_head_attention, num_heads=4, num_kv_heads=2, causal=True)
    truth = naive.multi_head(**arrays, num_heads=4, num_kv_heads=2, causal=True)
    assert_close(jax.jit(call)(**arrays), truth, eps=EPS["float64"], len_kv=LEN_KV)


def test_options_are_checked_before_any_product(rng, monkeypatch):
    def project(*_):
        raise AssertionError("a product before the check")

    monkeypatch.setattr(_family, "_project", project)
    arrays = head_arrays(rng)
    for options in (
        {"softcap": -1.0}, {"dropout": 0.5}, {"window": (-1, 0)}, {"kv_len": 10},
        {"mask": np.ones((3, 1, 1), bool)}, {"sinks": np.zeros(2)}, {"impl": "fast"},
    ):
        (name,) = options
        with pytest.raises(ValueError, match=name):
            multi_head_attention(**arrays, num_heads=4, num_kv_heads=2, **options)


def columns(rows, count):
    return np.zeros((rows, count), np.float32)


ERRORS = [
    ({"x": [[0.0]]}, TypeError, r"x must be one of arrays of .*, got builtins.list\. Convert"),
    ({"w_o": np.zeros((8, 7))}, TypeError,
     r"x, context, w_q, w_k, w_v and w_o must share one dtype of .*, got .*, float64\. Convert"),
    ({"x": np.zeros(6, np.float32)}, ValueError, r"x must have at least two axes, got x \(6,\)\."),
    ({"x": np.zeros((3, 4, 6), np.float32)}, ValueError,
     r"leading axes of x, context must broadcast, got x \(3, 4, 6\), context .*\. Axes"),
    ({"num_heads": 4.0}, TypeError, r"num_heads must be an integer, got 4\.0\. Pass an int"),
    ({"num_kv_heads": "2"}, TypeError, r"num_kv_heads must be an integer, got '2'\. Pass an int"),
    ({"num_kv_heads": 3}, ValueError,
     r"num_heads must be a positive multiple of num_kv_heads, got 4 and 3\. Every"),
    ({"num_heads": 0, "num_kv_heads": None}, ValueError, r"positive multiple .* got 0 and 0\."),
    ({"num_kv_heads": -2}, ValueError, r"positive multiple of num_kv_heads, got 4 and -2\."),
    ({"w_q": columns(6, 10)}, ValueError,
     r"w_q must be a matrix with a multiple of 4 columns, got \(6, 10\)\. The columns"),
    ({"w_v": columns(5, 3)}, ValueError, r"w_v must be a matrix with a multiple of 2 columns"),
    ({"w_o": columns(8, 7)[0]}, ValueError, r"w_o must be a matrix .*, got \(7,\)"),
    ({"w_q": columns(5, 12)}, ValueError,
     r"w_q must have the shape \(d_model, num_heads \* d_k\) = \(6, 12\), got \(5, 12\)\. Widths"),
    ({"w_k": columns(5, 8)}, ValueError,
     r"w_k must have the shape \(d_context, num_kv_heads \* d_k\) = \(5, 6\), got \(5, 8\)\."),
    ({"w_v": columns(6, 4)}, ValueError,
     r"w_v must have the shape \(d_context, num_kv_heads \* d_v\) = \(5, 4\), got \(6, 4\)\."),
    ({"w_o": columns(4, 7)}, ValueError,
     r"w_o must have the shape \(num_heads \* d_v, d_out\) = \(8, 7\), got \(4, 7\)\. Widths"),
]


@pytest.mark.parametrize(("given", "error", "message"), ERRORS)
def test_error(given, error, message, rng):
    arguments = head_arrays(rng) | {"num_heads": 4, "num_kv_heads": 2}
    with pytest.raises(error, match=message):
        multi_head_attention(**arguments | given)
