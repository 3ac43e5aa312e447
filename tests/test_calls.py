"""What is kept of a call for those alike: never anything of another call, nor of its data."""

import gc
import itertools
import os
import subprocess
import sys
import textwrap
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest

import scaledot as sd
from compare import EPS, assert_close
from conftest import Library
from scaledot import _attention, _choice, _launch, _packed, _varlen

MASKS = {"full": (7, 9), "row": (9,), "column": (7, 1), "heads": (4, 7, 9)}


@pytest.fixture(autouse=True)
def nothing_kept():
    """Begin without kept calls; leave the number of threads as it was."""
    _choice._kept.clear()
    yield
    sd.set_num_threads(None)


@pytest.fixture
def resolved(monkeypatch):
    """A list that grows with each call that is checked and prepared anew."""
    calls = []

    def counting(*arguments, **options):
        calls.append(arguments)
        return resolve(*arguments, **options)

    resolve = _attention.resolve
    monkeypatch.setattr(_attention, "resolve", counting)
    return calls


def arrays(rng, *, num_heads=4, num_kv_heads=2, len_q=7, len_kv=9, d=8, lead=(), dtype="float32"):
    shapes = [(num_heads, len_q), (num_kv_heads, len_kv), (num_kv_heads, len_kv)]
    return [rng.standard_normal((*lead, *s, d)).astype(dtype) for s in shapes]


def laid_out(rng, x):
    """The numbers of x in a layout drawn at random."""
    way = rng.integers(6)
    if way == 0 and x.ndim > 2:  # axes of heads and positions exchanged
        return np.ascontiguousarray(x.swapaxes(-3, -2)).swapaxes(-3, -2)
    if way == 1:  # backwards
        return np.ascontiguousarray(x[..., ::-1, :])[..., ::-1, :]
    if way == 2:  # a slice of something wider
        wide = np.full((*x.shape[:-1], x.shape[-1] + 3), np.nan, dtype=x.dtype)
        wide[..., :-3] = x
        return wide[..., :-3]
    return x.copy()


def check(call, query, key, value, options):
    """The rule of `compare` with float64 as the truth, and the bits of a call of its own."""
    got = call(query, key, value, **options)
    kept = dict(_choice._kept)
    _choice._kept.clear()
    fresh = call(query, key, value, **options)
    _choice._kept.update(kept)
    wide = [np.asarray(x, dtype=np.float64) for x in (query, key, value)]
    truth = call(*wide, **options, impl="blockwise")
    dense = call(query, key, value, **options, impl="dense")
    for result, own, right, textbook in zip(*map(parts, (got, fresh, truth, dense)), strict=True):
        np.testing.assert_array_equal(np.asarray(result), np.asarray(own))
        assert_close(result, right, textbook, eps=EPS[query.dtype.name], len_kv=key.shape[-2])


def parts(result):
    return tuple(result) if isinstance(result, tuple) else (result,)


def drawn_options(rng, len_q, len_kv):
    """Options as a caller may change them from call to call."""
    choices = {
        "causal": [False, True], "window": [None, (3, 0), (None, 2), (1, None)],
        "scale": [None, 0.5, 1, -1.0, np.float64(0.25), 0.0], "softcap": [None, 2, 5.0],
        "kv_len": [None, 1, len_kv, len_kv // 2], "q_offset": [0, 3, -2, len_kv - len_q],
        "kv_offset": [0, 2], "seed": [None, 3],
    }  # fmt: skip
    options = {name: x[rng.integers(len(x))] for name, x in choices.items() if rng.random() < 0.4}
    options.setdefault("q_offset", 0)
    if rng.random() < 0.3:
        shape = (len_q, len_kv)[rng.integers(2) :]
        options["mask"] = laid_out(rng, rng.random((1, *shape)[-3:]) < 0.8)
    if rng.random() < 0.3:
        bias = rng.standard_normal((1, len_q, len_kv))
        options["bias"] = laid_out(rng, bias.astype(rng.choice(["float32", "float64"])))
    return options


@pytest.mark.parametrize("seed", range(6))
def test_calls_in_any_order(seed):
    """Data, layouts, lengths and options change from call to call; few kinds, so that they meet."""
    rng = np.random.default_rng(seed)
    for _ in range(40):
        len_q, len_kv = rng.choice([1, 7, 12]), rng.choice([6, 9])
        dtype = rng.choice(["float32", "float64"], p=[0.8, 0.2])
        made = arrays(rng, len_q=len_q, len_kv=len_kv, dtype=dtype)
        made = [laid_out(rng, x) for x in made]
        if rng.random() < 0.1:
            made = [x[0] for x in made]  # matrices
        options = drawn_options(rng, int(len_q), int(len_kv))
        if made[0].ndim == 2:
            options = {n: x[0] if n in ("mask", "bias") and x.ndim > 2 else x
                       for n, x in options.items()}  # fmt: skip
        check((sd.attention, sd.attention_state)[rng.integers(2)], *made, options)


def test_a_repeated_call_is_not_resolved_again(rng, resolved):
    for call in (sd.attention, sd.attention_state):
        for number in range(3):
            call(*arrays(rng), causal=True, scale=0.5, window=(3, 0), q_offset=0, kv_len=7)
            assert len(resolved) == 1, number
        resolved.clear()


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_lengths_in_an_array_are_a_part_of_the_call(library, rng, resolved):
    """Their numbers count, not the array that they come in, which may be written again."""
    query, key, value = arrays(rng, lead=(2,))
    lengths = np.full(2, 5)
    if library == "torch":
        torch = pytest.importorskip("torch")
        query, key, value, lengths = map(torch.tensor, (query, key, value, lengths))
    five = sd.attention(query, key, value, kv_len=lengths)
    assert len(resolved) == 1
    copy = lengths.copy() if library == "numpy" else lengths.clone()
    np.testing.assert_array_equal(sd.attention(query, key, value, kv_len=copy), five)
    assert len(resolved) == 1
    lengths += 1
    six = sd.attention(query, key, value, kv_len=lengths)
    assert len(resolved) == 2
    np.testing.assert_array_equal(sd.attention(query, key, value, kv_len=6), six)
    assert not np.array_equal(five, six)
    tiled, long = arrays(rng, lead=(100,)), np.full(100, 5)
    if library == "torch":
        *tiled, long = map(torch.tensor, (*tiled, long))
    resolved.clear()
    for _ in range(2):  # too many numbers for a name
        sd.attention(*tiled, kv_len=long)
    assert len(resolved) == 2


DIFFERENT = {
    "causal": {"causal": True}, "window": {"window": (3, 0)}, "other window": {"window": (0, 3)},
    "scale": {"scale": 0.5}, "softcap": {"softcap": 0.5}, "kv_len": {"kv_len": 5},
    "q_offset": {"causal": True, "q_offset": 3},
    "kv_offset": {"causal": True, "kv_offset": 5, "q_offset": 7},
    "dropout": {"dropout": 0.5, "seed": 1}, "another seed": {"dropout": 0.5, "seed": 2},
    "array of lengths": {"kv_len": np.array(4)}, "unsigned": {"kv_len": np.array(3, np.uint8)},
    "segments": {"segment_ids": (np.arange(7), np.arange(9))},
    "slopes": {"alibi_slopes": np.ones(4)}, "sinks": {"sinks": np.ones(4)},
    "block mask": {"block_mask": np.zeros((1, 1), dtype=bool)},
    **{f"mask, {name}": {"mask": np.arange(int(np.prod(s))).reshape(s) % 3 > 0}
       for name, s in MASKS.items()},
    "bias": {"bias": np.eye(7, 9)}, "narrow bias": {"bias": np.eye(7, 9, dtype=np.float16)},
    "turned bias": {"bias": np.eye(9, 7).T},
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENT)
def test_another_option_is_another_call(name, rng):
    made = arrays(rng)
    plain = sd.attention(*made)
    got = sd.attention(*made, **DIFFERENT[name])
    np.testing.assert_array_equal(sd.attention(*made), plain)
    assert not np.array_equal(got, plain)
    _choice._kept.clear()
    np.testing.assert_array_equal(sd.attention(*made, **DIFFERENT[name]), got)


WRONG = {
    "causal": [1, 1.0, np.float32(1), None], "kv_len": [True, 7.0, np.ones(2, dtype=int), 10],
    "q_offset": [False, 0.0, "0"], "scale": [True, "1", 1j, np.nan, np.ones(2)],
    "window": [(3.0, 0), (True, 0), "30", (3, 0, 0), (-1, 0), {3, 0}],
    "softcap": [True, 0, "1"], "kv_offset": [False, 0.0], "impl": ["fast", None, b"auto"],
    "dropout": [False, 0.5, 2, "0"], "mask": [np.ones((7, 9)), np.ones((7, 8), bool), True],
    "bias": [np.ones((7, 9), int), 1.0], "score_mod": [3], "sinks": [3.0], "block_mask": [1],
}  # fmt: skip
RIGHT = {
    "causal": True, "kv_len": 7, "q_offset": 0, "scale": 1, "window": (3, 0), "softcap": 1,
    "kv_offset": 0, "impl": "auto", "dropout": 0.0, "mask": np.ones((7, 9), bool),
    "bias": np.ones((7, 9)),
}  # fmt: skip


@pytest.mark.parametrize(("name", "wrong"), [(n, x) for n, xs in WRONG.items() for x in xs])
def test_wrong_options_are_refused_after_right_ones(name, wrong, rng):
    """Some of them are equal to right ones: 1 and 1.0 to True, 7.0 to 7."""
    made = arrays(rng)
    with pytest.raises((TypeError, ValueError)) as first:
        sd.attention(*made, **{name: wrong})
    if name in RIGHT:
        sd.attention(*made, **{name: RIGHT[name]})
        assert _choice._kept
    with pytest.raises(type(first.value)) as second:
        sd.attention(*made, **{name: wrong})
    assert str(second.value) == str(first.value)


def test_wrong_arrays_are_refused_after_right_ones(rng):
    query, key, value = made = arrays(rng)
    sd.attention(*made)
    for bad, words in [
        ((query.astype(">f4"), key.astype(np.float64), value), "share one dtype"),
        ((query, key[:, :5], value), "the same length"), ((query[..., :4], key, value), "same d_k"),
        ((np.ma.MaskedArray(query), key, value), "plain array"),
        ((query, key.tolist(), value), "arrays of NumPy"),
    ]:  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=words):
            sd.attention(*bad)


def test_no_array_is_kept_alive(rng):
    made = [*arrays(rng), np.ones((7, 9), dtype=bool), np.ones((7, 9))]
    query, key, value, mask, bias = made
    for _ in range(2):
        sd.attention(query, key, value, mask=mask, bias=bias)
    assert _choice._kept
    gone = [weakref.ref(x) for x in made]
    del made, query, key, value, mask, bias
    gc.collect()
    assert [ref() for ref in gone] == [None] * 5


def test_what_is_kept_is_bounded(rng):
    query, key, value = arrays(rng, num_heads=1, num_kv_heads=1, len_q=1)
    sd.attention(query, key, value, scale=-1.0)
    for number in range(_choice.KEPT - 1):
        sd.attention(query, key, value, scale=float(number))
    assert len(_choice._kept) == _choice.KEPT
    first, second, *_ = _choice._kept
    sd.attention(query, key, value, scale=-1.0)  # used again: the second is the oldest now
    sd.attention(query, key, value, scale=-2.0)
    assert len(_choice._kept) == _choice.KEPT
    assert first in _choice._kept
    assert second not in _choice._kept
    _choice._kept.clear()
    x = np.zeros((_choice.KEPT_PAIRS + 1, 1, 1, 1), dtype=np.float32)
    sd.attention(x, x, x)
    assert not _choice._kept


def test_threads_are_asked_for_at_each_call(rng, monkeypatch):
    made, used = arrays(rng, len_q=300, len_kv=300), []
    run = _launch.threads.run

    def watched(function, call, num_threads, *rest):
        used.append(num_threads)
        return run(function, call, num_threads, *rest)

    monkeypatch.setattr(_launch.threads, "run", watched)
    results = []
    for count in (1, 3, 2, 1):
        sd.set_num_threads(count)
        results.append(sd.attention(*made))
    assert used == [1, 3, 2, 1]
    assert all(np.array_equal(x, results[0]) for x in results)


def test_the_environment_is_asked_at_each_call(rng, monkeypatch):
    made = arrays(rng)
    sd.attention(*made, impl="kernels")
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    with pytest.raises(ValueError, match="NUMBA_DISABLE_JIT is set"):
        sd.attention(*made, impl="kernels")


def test_calls_of_several_threads():
    """More kinds of calls than are kept, from threads that take turns at any time."""
    rng = np.random.default_rng(0)
    made = [arrays(rng, len_q=n % 9 + 1, len_kv=n // 9 + 1) for n in range(27)]
    right, wrong = [sd.attention(*x) for x in made], []

    def work(seed):
        own = np.random.default_rng(seed)
        for number in own.integers(len(made), size=150):
            if not np.array_equal(sd.attention(*made[number]), right[number]):
                wrong.append(number)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    kept, _choice.KEPT = _choice.KEPT, 10
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        _choice.KEPT = kept
    assert not wrong
    assert len(_choice._kept) <= len(made)


def test_a_scale_beyond_float32(rng):
    made, options = arrays(rng), {"scale": 1e39, "softcap": 2.0}
    with pytest.raises(ValueError, match=r"does not hold 1e\+39"):
        sd.attention(*made, **options, impl="kernels")
    right = sd.attention(*made, **options, impl="blockwise")
    assert np.isfinite(right).all()
    np.testing.assert_array_equal(sd.attention(*made, **options), right)


@pytest.fixture
def tensors(rng):
    torch = pytest.importorskip("torch")
    return torch, [torch.from_numpy(x) for x in arrays(rng)]


def test_tensors_repeat_calls_too(tensors, resolved):
    torch, (query, key, value) = tensors
    mask = torch.ones((7, 9), dtype=torch.bool)
    for _ in range(3):
        sd.attention(query.clone(), key, value, mask=mask, causal=True)
    assert len(resolved) == 1
    right = sd.attention(*(x.numpy() for x in (query, key, value)), causal=True)
    np.testing.assert_array_equal(sd.attention(query, key, value, causal=True).numpy(), right)
    with torch.inference_mode():
        got = sd.attention(query.clone(), key, value, causal=True)
    np.testing.assert_array_equal(got.numpy(), right)


def test_gradients_are_asked_for_at_each_call(tensors):
    torch, (query, key, value) = tensors
    plain = sd.attention(query, key, value)
    query.requires_grad_()
    for _ in range(2):
        with torch.no_grad():
            assert not sd.attention(query, key, value).requires_grad
        out = sd.attention(query, key, value)
        assert out.requires_grad
        (grad,) = torch.autograd.grad(out.sum(), query)
        assert grad.abs().max() > 0
    query.requires_grad_(False)
    assert torch.equal(sd.attention(query, key, value), plain)
    bias = torch.zeros((7, 9))
    assert not sd.attention(query, key, value, bias=bias).requires_grad
    assert sd.attention(query, key, value, bias=bias.requires_grad_()).requires_grad
    parameter = torch.nn.Parameter(query)
    assert sd.attention(parameter, key, value).requires_grad


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_tensors_whose_numbers_are_not_in_memory(tensors):
    """A lazy negation, a vmapped tensor and a dual one look like the plain tensor they hold."""
    torch, (query, key, value) = tensors
    sd.attention(query, key, value)
    negative = torch._neg_view(query)
    right = sd.attention(-query, key, value, impl="blockwise")
    torch.testing.assert_close(sd.attention(negative, key, value), right)
    batch = torch.stack([query, -query])
    got = torch.vmap(lambda q: sd.attention(q, key, value))(batch)
    torch.testing.assert_close(got[1], right)
    inside = torch.vmap(lambda x: x + sd.attention(query, key, value))(torch.zeros(2, 1, 1, 1))
    torch.testing.assert_close(inside[1], sd.attention(query, key, value))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(query, torch.ones_like(query))
        out = sd.attention(dual, key, value)
        assert torch.autograd.forward_ad.unpack_dual(out).tangent is not None


def test_another_default_device(tensors):
    torch, (query, key, value) = tensors
    right = sd.attention(query, key, value)
    with torch.device("meta"):
        assert torch.equal(sd.attention(query, key, value), right)
        _choice._kept.clear()
        assert torch.equal(sd.attention(query, key, value), right)


def packed(rng, len_q, len_kv, dtype="float32"):
    starts = [[0, *np.cumsum(x).tolist()] for x in (len_q, len_kv)]
    shapes = [(starts[0][-1], 4, 8), (starts[1][-1], 2, 8), (starts[1][-1], 2, 5)]
    return [rng.standard_normal(s).astype(dtype) for s in shapes], starts


def sequences(starts):
    """Slices of the tokens of each sequence: queries, keys."""
    return zip(*([slice(*x) for x in itertools.pairwise(y)] for y in starts), strict=True)


def one_by_one(made, starts, options):
    """Each sequence by `attention`, in its axes."""
    outs = []
    seeds = options.get("seed")
    for s, (q, kv) in enumerate(sequences(starts)):
        own = options | ({} if seeds is None else {"seed": seeds[s, ...]})
        query, key, value = (x[part].swapaxes(0, 1)
                             for x, part in zip(made, (q, kv, kv), strict=True))
        outs.append(sd.attention(query, key, value, **own).swapaxes(0, 1))
    return np.concatenate(outs)


PACKED = {
    "plain": {}, "causal": {"causal": True}, "window": {"window": (20, 3), "softcap": 3.0},
    "sinks": {"sinks": np.arange(4.0)}, "slopes": {"alibi_slopes": np.arange(4.0) / 8},
    "dropout": {"dropout": 0.4, "seed": 7 * np.arange(40)},
    "score_mod": {"score_mod": lambda score, batch, head, q_pos, kv_pos: score + head * q_pos},
    "batch": {"score_mod": lambda score, batch, head, q_pos, kv_pos: score + 0 * batch},
    "mask_mod": {"mask_mod": lambda batch, head, q_pos, kv_pos: (q_pos + kv_pos) % 3 != 0},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "float32") for name in PACKED), ("plain", "float64"), ("dropout", "float16"),
     ("sinks", "float16")],
)  # fmt: skip
def test_packed_sequences_are_what_each_is_alone(name, dtype, rng):
    """To the bit: empty ones, single queries, those of several parts, and long ones."""
    options = PACKED[name]
    len_q, len_kv = rng.integers(0, 60, 40), rng.integers(0, 70, 40)
    len_q[::4], len_kv[::7], len_q[5], len_kv[8] = rng.integers(0, 9, 10), 0, 300, 2500
    for long in (len_kv, len_kv[::-1]):  # the last sequences end where the memory does
        made, starts = packed(rng, len_q, long, dtype)
        got = sd.varlen_attention(*made, *starts, **options)
        np.testing.assert_array_equal(got, one_by_one(made, starts, options))


@pytest.mark.parametrize("library", ["torch", "jax"])
@pytest.mark.parametrize("name", ["causal", "sinks", "dropout", "score_mod"])
def test_packed_sequences_of_other_libraries(name, library, rng, monkeypatch):
    array = Library(library).array
    options = {n: x[:9] if isinstance(x, np.ndarray) else x for n, x in PACKED[name].items()}
    made, starts = packed(rng, rng.integers(0, 30, 9), rng.integers(0, 40, 9))
    right = sd.varlen_attention(*made, *starts, **options)
    monkeypatch.setattr(_varlen, "attention", None)  # of single sequences
    options = {n: array(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
    got = sd.varlen_attention(*map(array, made), *starts, **options)
    assert type(got) is type(array(right))
    if name == "sinks":  # merged by the library itself
        assert_close(got, right, eps=EPS["float32"], len_kv=40)
    else:
        np.testing.assert_array_equal(np.asarray(got), right)


def test_packed_sequences_take_few_launches(rng, monkeypatch):
    launches, launch = [], _packed.launch
    monkeypatch.setattr(_packed, "launch", lambda *a, **o: launches.append(a) or launch(*a, **o))
    lengths = rng.integers(20, 120, 100)
    made, starts = packed(rng, lengths, lengths)
    sd.varlen_attention(*made, *starts)
    # Keys are read in tiles of 128: the sequences at the end of the memory go by themselves.
    near_the_end = sum(end > starts[1][-1] - 128 for end in starts[1][1:])
    assert 1 < len(launches) <= 1 + near_the_end
    launches.clear()
    made, starts = packed(rng, np.ones(100, dtype=int), np.full(100, 7))
    sd.varlen_attention(*made, *starts, impl="kernels")
    assert len(launches) == 2


def test_a_mod_of_packed_sequences_knows_its_sequence(rng):
    made, starts = packed(rng, [9, 2, 12], [9, 5, 12])
    table = np.array([0.0, 3.0, -3.0], dtype=np.float32)
    got = sd.varlen_attention(
        *made, *starts, score_mod=lambda score, batch, head, q_pos, kv_pos:
        score + table[batch] * (kv_pos % 2),
    )  # fmt: skip
    for s, (q, kv) in enumerate(sequences(starts)):
        bias = table[s] * (np.arange(kv.stop - kv.start) % 2)
        query, key, value = (x[part].swapaxes(0, 1)
                             for x, part in zip(made, (q, kv, kv), strict=True))
        right = sd.attention(query, key, value, bias=bias.astype(np.float32))
        assert_close(got[q].swapaxes(0, 1), right, eps=4 * EPS["float32"], len_kv=12)


GUARDED = """
    import ctypes, mmap
    import numpy as np
    import scaledot as sd

    def at_the_end(shape):
        # An array whose last byte is the last that may be read.
        size = 4 * int(np.prod(shape))
        pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = mmap.mmap(-1, pages + mmap.PAGESIZE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        libc = ctypes.CDLL(None)
        assert libc.mprotect(ctypes.c_void_p(start + pages), mmap.PAGESIZE, 0) == 0
        found = np.frombuffer(memory, np.float32, size // 4, pages - size).reshape(shape)
        found[:] = 1
        return found

    for len_q, len_kv in (([20, 9, 1, 1, 3], [300, 200, 90, 1, 2]), ([33, 11], [129, 127]),
                          ([1] * 6, [70, 140, 3, 0, 8, 9])):
        starts = [[0, *np.cumsum(x).tolist()] for x in (len_q, len_kv)]
        query, key, value = (at_the_end((y[-1], 2, 16)) for y in (starts[0], starts[1], starts[1]))
        out = sd.varlen_attention(query, key, value, *starts, impl="kernels")
        lone = np.concatenate([np.full(q, n > 0) for q, n in zip(len_q, len_kv)])
        assert np.array_equal(out, np.broadcast_to(lone[:, None, None], out.shape)), out
    print("done")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="protects pages as Linux does")
def test_nothing_beyond_the_end_is_read():
    command = [sys.executable, "-c", textwrap.dedent(GUARDED)]
    path = {"PYTHONPATH": str(Path(sd.__file__).parents[1])}
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | path, check=False
    )
    assert done.stdout == "done\n", done.stderr[-2000:] or done.returncode
