"""Bits, memory, packed sequences and errors of the gradients."""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import threadpoolctl

import cases
import error_cases
import naive
import naive_gradients
import scaledot as sd
import test_determinism
import test_tiles
from compare import EPS, assert_close
from naive_gradients import Gradients
from test_gradients import (
    COMBINATIONS,
    Expected,
    alone,
    assert_gradient,
    backward,
    combination,
    forward,
    near_of,
    paired,
    sizes,
    slope_of_distance,
)
from test_gradients_options import OPERANDS, gradients, same_bits


@pytest.fixture(autouse=True, scope="module")
def blas_on_one_thread():
    """Its threads, waiting for one another on a busy machine, take most of the time."""
    with threadpoolctl.threadpool_limits(1, user_api="blas"):
        yield


@pytest.fixture(autouse=True)
def restored_threads():
    """Let no number of threads stay set."""
    yield
    sd.set_num_threads(None)


# Memory and bits


@pytest.mark.parametrize("index", range(0, len(COMBINATIONS), 6))
def test_arguments_are_never_written_nor_returned(index, impl):
    arguments = paired(combination(index))
    grads = [cases.normal(np.random.default_rng(0), 2, 4, 5, *s) for s in ((3,), ())]
    given = [x for x in (*arguments.values(), *grads) if isinstance(x, np.ndarray)]
    before = [x.tobytes() for x in given]
    out, pullback = sd.attention_vjp(**arguments, impl=impl)
    lse, found = pullback.lse, pullback(*grads)
    kept = out.copy(), lse.copy()
    results = [out, lse, *(g for g in found if g is not None)]
    assert [x.tobytes() for x in given] == before
    for result in results:
        assert result.flags.writeable or not result.size
        assert not any(np.shares_memory(result, x) for x in given)
    for a, b in itertools.combinations(results, 2):
        assert not np.shares_memory(a, b)
    again = [None if g is None else g.copy() for g in found]
    for g in found:
        if g is not None:
            g[...] = 7  # a result is the caller's: the next does not depend on it
    assert same_bits(pullback(*grads), again)
    assert same_bits((out, lse), kept)


BITS = cases.Size(len_q=200, len_kv=600, d_k=16, d_v=5, num_heads=4, num_kv_heads=2, lead=(3,))
DRAWN = np.random.default_rng(9)
SAME = {
    "plain": {},
    "causal, sinks": {"causal": True, "sinks": np.array([0.5, -1, 2, 0], "f")},
    "mask, bias": {"mask": DRAWN.random((3, 1, 200, 600)) < 0.7, "bias": cases.normal(DRAWN, 600)},
    "window, ALiBi": {"window": (150, 50), "alibi_slopes": cases.slopes(4) / 16},
    "lengths, dropout": {"kv_len": np.array([600, 400, 0]), "softcap": 3.0, "causal": True,
                         "dropout": 0.3, "seed": np.array([1, 2, 3])},
    "mods": {"score_mod": (cases.distance_mod, slope_of_distance), "mask_mod": cases.dilated,
             "scale": 0.01},
}  # fmt: skip


def bit_problem(options, dtype="float32"):
    arguments = test_determinism.arrays(dtype, BITS) | options
    rng = np.random.default_rng(10)
    return arguments, (cases.normal(rng, 3, 4, 200, 5).astype(arguments["query"].dtype),
                       cases.normal(rng, 3, 4, 200))  # fmt: skip


@pytest.mark.parametrize("options", SAME.values(), ids=SAME)
def test_any_number_of_threads_gives_the_same_bits(options, impl):
    arguments, grads = bit_problem(options)
    found = []
    for num_threads in (1, 2, 3):
        sd.set_num_threads(num_threads)
        found.append(gradients(arguments, *grads, impl))
    assert same_bits(found[0], found[1])
    assert same_bits(found[0], found[2])


@pytest.mark.parametrize("name", ["plain", "causal, sinks", "lengths, dropout"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_batch_gives_the_same_bits(name, dtype, impl):
    """Alone, or beside other entries: gradients by arrays that have an entry for each."""
    arguments, grads = bit_problem(SAME[name], dtype)
    whole = gradients(arguments, *grads, impl)
    for entries in ([2], [0, 1], [1]):
        part = test_determinism.subset(arguments, entries)
        found = gradients(part, *(g[entries] for g in grads), impl)
        assert same_bits(found[:3], [g[entries] for g in whole[:3]])


NEUTRAL = {
    "mask": {"mask": np.ones((200, 600), bool)},
    "kv_len": {"kv_len": 600},
    "window": {"window": (1000, 1000)},
    "one segment": {"segment_ids": (np.zeros(200, int), np.zeros(600, int))},
    "no dropout": {"dropout": 0.0, "seed": 5},
}


@pytest.mark.parametrize("options", NEUTRAL.values(), ids=NEUTRAL)
def test_an_option_that_does_nothing_changes_no_bit(options, impl):
    arguments, grads = bit_problem({})
    assert same_bits(gradients(arguments | options, *grads, impl),
                     gradients(arguments, *grads, impl))  # fmt: skip


# Where glibc fills what it hands out with large numbers, scratch that nobody has written shows.
ON_FILLED_MEMORY = """
import itertools, numpy as np, ml_dtypes, scaledot as sd
sd.set_num_threads(1)
dtypes = (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)
options = ({}, {"causal": True}, {"bias": "f"}, {"mask": "?"}, {"window": (3, 1)})
for dtype, option, lengths in itertools.product(dtypes, options, ((5, 7), (47, 129), (50, 16))):
    query, grad = np.ones((2, 1, lengths[0], 5), dtype)
    key, value = np.ones((2, 1, lengths[1], 5), dtype)
    given = {n: np.ones(lengths, x) if isinstance(x, str) else x for n, x in option.items()}
    out, pullback = sd.attention_vjp(query, key, value, **given)
    _, tangent = sd.attention_jvp((query, key, value), (grad, key, value), **given)
    for x in (out, tangent, *(g for g in pullback(grad) if g is not None)):
        assert np.abs(x.astype(np.float64)).max() < 1e3, (dtype, option, lengths)
"""


def test_scratch_is_written_before_it_is_read():
    pytest.importorskip("ml_dtypes")
    source = str(Path(sd.__file__).parents[1])
    environment = os.environ | {"MALLOC_PERTURB_": "128", "PYTHONPATH": source}
    done = subprocess.run([sys.executable, "-c", ON_FILLED_MEMORY], env=environment, text=True,
                          capture_output=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


# Packed sequences

STARTS_Q, STARTS_KV = [0, 2, 2, 7, 8, 9], [0, 3, 5, 9, 9, 11]
PACKED = {
    "plain": {},
    "causal, sinks": {"causal": True, "sinks": np.array([0.5, -1, 2, 0], "f")},
    "window, softcap": {"window": (1, 0), "softcap": 2.0},
    "alibi, scale": {"alibi_slopes": cases.slopes(4), "scale": -0.7},
    "dropout": {"dropout": 0.4, "seed": 9},
    "seeds": {"dropout": 0.4, "seed": np.array([3, 1, 4, 1, 5])},
    "mask_mod": {"mask_mod": cases.dilated},
    "score_mod": {"score_mod": (cases.distance_mod, slope_of_distance), "scale": 0.3},
}


@pytest.mark.parametrize(
    "xp", ["numpy", "numpy-readonly", "torch", "strict"], indirect=True
)
@pytest.mark.parametrize("options", PACKED.values(), ids=PACKED)
def test_packed_sequences(options, xp, impl):
    """A sequence without queries, one without keys, and single tokens among them."""
    if xp.name == "strict" and "score_mod" in options:
        pytest.skip("array-api-strict does not multiply integers by floats, as this mod does")
    rng = np.random.default_rng(3)
    arrays = [cases.normal(rng, *s) for s in ((9, 4, 3), (11, 2, 3), (11, 2, 5))]
    grad_out = cases.normal(rng, 9, 4, 5)
    truth = naive_gradients.varlen(*arrays, STARTS_Q, STARTS_KV, grad_out, **options)
    given, others = list(map(xp.array, arrays)), xp.arguments(options)
    out, pullback = sd.varlen_attention_vjp(*given, STARTS_Q, STARTS_KV, **others, impl=impl)
    expected = naive.varlen(*arrays, STARTS_Q, STARTS_KV, **alone(options))[0]
    assert_close(out, expected, eps=4 * EPS["float32"], len_kv=4)
    gradients = pullback(xp.array(grad_out))
    by_name = dict(zip(("query", "key", "value"), given, strict=True)) | others
    for name, got, exact in zip(Gradients._fields, gradients, truth, strict=True):
        if exact is None:
            assert got is None
            continue
        assert type(got) is type(by_name[name])
        assert got.dtype == by_name[name].dtype
        # Sequence by sequence there is no yardstick: an error of some roundings of each term.
        assert_close(got, exact, eps=16 * EPS["float32"], len_kv=4)


def test_packed_sequences_beyond_tiles():
    """Each is what it is alone, to rounding."""
    rng = np.random.default_rng(4)
    starts = np.array([0, 130, 131, 331])
    query, key, value, grad_out = (cases.normal(rng, 331, h, 16) for h in (4, 2, 2, 4))
    out, pullback = sd.varlen_attention_vjp(query, key, value, starts, starts, causal=True)
    gradients = pullback(grad_out)
    for first, last in itertools.pairwise(starts):
        part = [x[first:last].swapaxes(0, 1) for x in (query, key, value, grad_out)]
        arguments = dict(zip(("query", "key", "value"), part, strict=False)) | {"causal": True}
        seen, kept = test_tiles.visible(arguments), np.ones((1, 1, 1))
        known = forward(arguments, seen, kept, np.dtype("d"))
        near = near_of(arguments, seen, kept, (part[3], None), "float32")
        truth = backward(arguments, known, part[3], None, np.dtype("d"))
        expected = Expected(part[3], None, known.out, known.lse, truth, near,
                            sizes(arguments, known, part[3], None))  # fmt: skip
        len_kv = int(last - first)
        assert_close(out[first:last].swapaxes(0, 1), known.out, near[0], eps=EPS["float32"],
                     len_kv=len_kv)  # fmt: skip
        for name in ("query", "key", "value"):
            got = getattr(gradients, name)[first:last].swapaxes(0, 1)
            assert_gradient(name, got, expected, "float32", len_kv)


def test_nothing_packed(impl):
    x = np.zeros((0, 2, 3), np.float32)
    for starts in ([0], [0, 0, 0]):
        out, pullback = sd.varlen_attention_vjp(x, x, x, starts, starts, impl=impl)
        assert out.shape == (0, 2, 3)
        assert [g.shape for g in pullback(out)[:3]] == [(0, 2, 3)] * 3


# Errors

STYLE = re.compile(r".+?, got .+\. .+[.?]", re.DOTALL)


def raises(error, must_hold, call, *arguments, **options):
    """Call, and check the error: exact type, style and what must hold."""
    with pytest.raises((TypeError, ValueError)) as info:
        call(*arguments, **options)
    message = str(info.value)
    assert type(info.value) is error, message
    assert STYLE.fullmatch(message), message
    assert must_hold in message.partition(", got ")[0], message


BASE, PACKED_BASE = error_cases.BASE, error_cases.PACKED


def tangents_of(arguments, tangents=(None, None, None)):
    rest = {n: x for n, x in arguments.items() if n not in OPERANDS}
    return sd.attention_jvp(tuple(arguments[n] for n in OPERANDS), tangents, **rest)


@pytest.mark.parametrize("call", [lambda a: sd.attention_vjp(**a), tangents_of],
                         ids=["vjp", "jvp"])  # fmt: skip
def test_errors_of_attention(call):
    """The same messages for the same mistakes."""
    for error, must_hold, _, arguments in error_cases.COMMON["attention"]:
        arguments = {"dropout": 0.5} | arguments if "seed" in arguments else arguments
        raises(error, must_hold, call, BASE | arguments)


def test_errors_of_packed_sequences():
    known = error_cases.COMMON["varlen_attention"] + error_cases.OTHERS["varlen_attention"]
    for error, must_hold, _, arguments in known:
        arguments = {"dropout": 0.5} | arguments if "seed" in arguments else arguments
        raises(error, must_hold, lambda **a: sd.varlen_attention_vjp(**a),
               **PACKED_BASE | arguments)  # fmt: skip


def plus(score, batch, head, q_pos, kv_pos):
    return score + 1


PAIRS = [
    (ValueError, "score_mod must come with its derivative", plus),
    (TypeError, "score_mod must be a function", (plus,)),
    (TypeError, "score_mod must be a function", (plus, plus, plus)),
    (TypeError, "score_mod must be a function", (plus, 1.0)),
    (TypeError, "score_mod must be a function", (None, plus)),
    (TypeError, "score_mod must be a function", [plus, plus]),
]


@pytest.mark.parametrize(("error", "must_hold", "score_mod"), PAIRS)
def test_a_score_mod_needs_its_derivative(error, must_hold, score_mod, impl):
    options = {"score_mod": score_mod, "impl": impl}
    raises(error, must_hold, sd.attention_vjp, **BASE, **options)
    raises(error, must_hold, tangents_of, BASE | options)
    raises(error, must_hold, sd.varlen_attention_vjp, **PACKED_BASE, **options)


def never(score, batch, head, q_pos, kv_pos):
    if kv_pos >= 0:
        raise AssertionError("the forward pass must call no derivative")
    return score


def test_the_forward_pass_ignores_the_derivative(impl):
    arguments = combination(0) | {"score_mod": (cases.distance_mod, never)}
    got = sd.attention(**arguments, impl=impl)
    truth = sd.attention(**alone(arguments), impl=impl)
    assert got.tobytes() == truth.tobytes()


def test_wrong_gradients(xp):
    if xp.name in ("jax", "numpy-readonly"):
        pytest.skip("as NumPy's")
    arguments = xp.arguments(BASE)
    _, pullback = sd.attention_vjp(**arguments)
    right = xp.array(np.ones((2, 4, 5, 3), "f")), xp.array(np.ones((2, 4, 5), "f"))
    pullback(*right)
    wrong = [
        (TypeError, [1.0]), (TypeError, 1.0), (TypeError, np.ma.ones((2, 4, 5, 3))),
        (TypeError, xp.array(np.ones((2, 4, 5, 3), np.int64))),
        (ValueError, xp.array(np.ones((2, 4, 5, 2), "f"))),
        (ValueError, xp.array(np.ones((4, 5, 3), "f"))),
        (ValueError, xp.array(np.ones((), "f"))),
    ]  # fmt: skip
    if xp.name != "numpy":
        wrong.append((TypeError, np.ones((2, 4, 5, 3), "f")))
    for error, x in wrong:
        raises(error, "grad_out must", pullback, x)
        raises(error, "grad_lse must", pullback, right[0], x)
    raises(TypeError, "grad_out must", pullback, None)
    operands = tuple(arguments.values())
    for error, x in wrong:
        for place, name in enumerate(("dq", "dk", "dv")):
            moves = [None] * 3
            moves[place] = x
            raises(error, f"{name} must", sd.attention_jvp, operands, tuple(moves))


def test_wrong_tuples():
    operands = tuple(BASE.values())
    for wrong in (operands[:2], (*operands, None), operands[0], None):
        raises(TypeError, "primals must", sd.attention_jvp, wrong, operands)
        raises(TypeError, "tangents must", sd.attention_jvp, operands, wrong)


def test_tensors_that_their_library_differentiates():
    torch = pytest.importorskip("torch")
    for name in BASE:
        tensors = {n: torch.tensor(x, requires_grad=n == name) for n, x in BASE.items()}
        raises(TypeError, "attention_vjp and attention_jvp must be", sd.attention_vjp, **tensors)
        raises(TypeError, "attention_vjp and attention_jvp must be", tangents_of, tensors)
        with torch.no_grad():
            sd.attention_vjp(**tensors)
