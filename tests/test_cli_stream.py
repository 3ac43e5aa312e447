"""``scaledot run`` on keys and values that do not fit into memory."""

import os
import time
from pathlib import Path

import numpy as np
import pytest

import scaledot as sd
import textbook
from cli_runs import (
    BFLOAT16,
    invoke,
    launch,
    load,
    one_line,
    operands,
    same_bits,
    save,
    shrink,
    succeed,
)
from compare import EPS, as_float64, assert_close
from scaledot.cli import _attend, _files, _head_stats, _job

LEN_Q, LEN_KV = 600, 1300


@pytest.fixture
def small(monkeypatch):
    """Sizes at which few keys are many."""
    shrink(monkeypatch)


def job(folder, arrays, dtype=None, **scalars):
    files = [Path(name) for name in save(folder, ".npy", arrays)]
    names = [str(folder / f"{n}.npy") if n in arrays else None for n in ("mask", "bias")]
    defaults = {"causal": False, "window": None, "scale": None, "softcap": None, "impl": "auto"}
    dtype = np.dtype(dtype or arrays["query"].dtype)
    return _job.Job(_files.open_inputs(files, *names), dtype, {**defaults, **scalars})


def seen(len_q, len_kv, causal=False, window=None, mask=True):
    q_pos, kv_pos = np.arange(len_q)[:, None] + len_kv - len_q, np.arange(len_kv)
    left, right = window or (None, None)
    found = np.ones((len_q, len_kv), bool) & mask
    found &= (kv_pos <= q_pos) | (not causal)
    found &= True if left is None else kv_pos >= q_pos - left
    return found & (True if right is None else kv_pos <= q_pos + right)


def check(got, arrays, *, dtype="float32", **options):
    """Judge a result by the rule of all tests."""
    dtype = BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
    terms = {name: options[name] for name in ("scale", "softcap", "bias") if name in options}
    visible = {name: x for name, x in options.items() if name in ("causal", "window", "mask")}
    visible = seen(arrays["query"].shape[-2], arrays["key"].shape[-2], **visible)
    rounded = [arrays[name].astype(dtype) for name in ("query", "key", "value")]
    truth, _ = textbook.attention(*map(as_float64, rounded), visible, **terms)
    yardstick, _ = textbook.attention(*rounded, visible, **terms)
    assert got.dtype == dtype
    assert_close(got, truth, yardstick, eps=EPS[dtype.name], len_kv=arrays["key"].shape[-2])


def weights_of(arrays, dtype, **visible):
    """All weights by their definition, for the mask and bias of arrays: every row sees some key."""
    query, key, bias = (arrays[name].astype(dtype) for name in ("query", "key", "bias"))
    key = np.repeat(key, query.shape[-3] // key.shape[-3], axis=-3)
    scores = query @ key.swapaxes(-1, -2) / dtype(np.sqrt(query.shape[-1])) + bias
    shown = seen(query.shape[-2], key.shape[-2], **visible) & arrays["mask"]
    powers = np.exp(np.where(shown, scores, -np.inf) - scores.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def figures(weights):
    """What `HeadStats` says of weights, shape (batch, num_heads, len_q, len_kv)."""
    weights = weights.astype(np.float64)
    logs = np.log(weights, where=weights > 0, out=np.zeros_like(weights))
    return {
        "mean_largest": weights.max(axis=-1).mean(axis=(0, 2)),
        "max_largest": weights.max(axis=(0, 2, 3)),
        "mean_entropy": -(weights * logs).sum(axis=-1).mean(axis=(0, 2)),
        "mean_notable": (weights > _head_stats.NOTABLE).sum(axis=-1).mean(axis=(0, 2)),
    }


CALLS = {
    "plain": ({}, []),
    "causal": ({"causal": True}, ["--causal"]),
    "window": ({"window": (100, 17)}, ["--window", "100,17"]),
    "left": ({"window": (300, None), "causal": True}, ["--window", "300,none", "--causal"]),
    "right": ({"window": (None, 0)}, ["--window", ",0"]),
    "scale, softcap": ({"scale": -0.7, "softcap": 1.5}, ["--scale", "-0.7", "--softcap", "1.5"]),
    "blockwise": ({}, ["--impl", "blockwise"]),
}


@pytest.mark.parametrize("ending", [".npy", ".npz", ".safetensors"])
@pytest.mark.parametrize("call", CALLS)
def test_streamed_keys(tmp_path, small, call, ending):
    arrays = operands(LEN_Q, LEN_KV)
    keywords, arguments = CALLS[call]
    files = save(tmp_path, ending, arrays)
    succeed(*files, "-o", tmp_path / "out.npy", *arguments)
    check(load(tmp_path / "out.npy"), arrays, **keywords)


TERMS = {
    "mask": (4, LEN_Q, LEN_KV),
    "mask_keys": (LEN_KV,),
    "mask_rows": (2, 1, LEN_Q, 1),
    "bias": (2, 4, LEN_Q, LEN_KV),
    "bias_heads": (4, 1, LEN_KV),
    "bias_scalar": (),
}


@pytest.mark.parametrize(
    "ending", [".npy", pytest.param(".safetensors", marks=pytest.mark.heavy)]
)
@pytest.mark.parametrize("term", TERMS)
def test_mask_and_bias(tmp_path, small, term, ending):
    arrays, rng = operands(LEN_Q, LEN_KV), np.random.default_rng(3)
    name = term.partition("_")[0]
    given = rng.random(TERMS[term]) < 0.7 if name == "mask" else rng.normal(size=TERMS[term])
    given = np.asarray(given)
    files = save(tmp_path, ending, {**arrays, "extra": given})
    place = tmp_path / "extra.npy" if ending == ".npy" else "extra"
    succeed(*files, "-o", tmp_path / "out.npy", f"--{name}", place, "--causal")
    got = load(tmp_path / "out.npy")
    if name == "bias":
        check(got, arrays, causal=True, bias=given)
        return
    hidden = np.broadcast_to(given, (2, 4, LEN_Q, LEN_KV))
    for entry, head in np.ndindex(2, 4):
        one = {n: x[entry, head // (1 if n == "query" else 2)] for n, x in arrays.items()}
        check(got[entry, head], one, causal=True, mask=hidden[entry, head])


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
@pytest.mark.parametrize("stored", ["int16", ">f4"])
def test_chunks_are_converted(tmp_path, small, stored, dtype):
    arrays = {name: (4 * x).astype(stored) for name, x in operands(LEN_Q, LEN_KV).items()}
    out = tmp_path / "out.safetensors"
    succeed(*save(tmp_path, ".npy", arrays), "-o", out, "--dtype", dtype)
    check(load(out), arrays, dtype=dtype)


def test_numbers_that_do_not_fit_are_refused(tmp_path, small):
    arrays = operands(LEN_Q, LEN_KV)
    arrays["value"][1, 1, -1] = 1e6
    result = invoke(*save(tmp_path, ".npy", arrays), "-o", tmp_path / "out.npy",
                    "--dtype", "float16")
    assert "value must fit into float16, got an entry of size 1e+06" in one_line(result.stderr)
    assert not list(tmp_path.glob("out*"))


def test_the_same_bits_for_any_number_of_threads(tmp_path, small):
    files = save(tmp_path, ".npy", operands(LEN_Q, LEN_KV))
    results = []
    for threads in (1, 2, 5):
        out = tmp_path / f"out{threads}.npy"
        succeed(*files, "-o", out, "--threads", threads, "--causal")
        results.append(load(out))
    assert same_bits(results[0], results[1])
    assert same_bits(results[0], results[2])


SHAPES = [
    ((3, 1, 4, 300, 4), (2, 4, 70, 4), (1, 4, 70, 3)),
    ((5, 6, 300, 4), (5, 3, 70, 4), (5, 3, 70, 3)),
    ((300, 4), (1, 70, 4), (70, 3)),
    ((4, 300, 4), (1, 70, 4), (1, 70, 3)),
]


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("budget", [2**30, 60_000, 20_000, 1])
@pytest.mark.parametrize("ending", [".npy", ".safetensors"])
def test_parts_are_the_whole(tmp_path, monkeypatch, shapes, budget, ending):
    monkeypatch.setattr(_job, "BUDGET", budget)
    rng = np.random.default_rng(1)
    arrays = dict(zip(("query", "key", "value"), map(rng.standard_normal, shapes), strict=True))
    arrays["bias"] = rng.standard_normal((shapes[0][-3] if len(shapes[0]) > 2 else 1, 300, 70))
    files = save(tmp_path, ending, arrays)
    bias = tmp_path / "bias.npy" if ending == ".npy" else "bias"
    succeed(*files, "-o", tmp_path / "out.npy", "--stats", "--bias", bias)
    got, whole = load(tmp_path / "out.npy"), sd.attention(**arrays)
    if budget > 1:  # heads are not cut: their bits are those of one call
        assert same_bits(got, whole)
    assert_close(got, whole, eps=EPS["float64"], len_kv=70)


def test_parts_fit_the_budget(tmp_path, monkeypatch):
    work = job(tmp_path, operands(300, 400, lead=(3,), heads=6, kv_heads=3))
    entry = work.entry_bytes(2)
    for budget, count in ((9 * entry, 1), (9 * entry - 1, 2), (3 * entry - 1, 6), (entry, 9)):
        monkeypatch.setattr(_job, "BUDGET", budget)
        work.__dict__.pop("parts", None)
        assert len(work.parts) == count
        assert sum(part.pairs for part in work.parts) == 9
        assert max(part.pairs for part in work.parts) * entry <= budget
        assert not work.streamed


def test_keys_out_of_reach_are_not_read(tmp_path, small, monkeypatch):
    arrays, read = operands(3000, 20_000, lead=(), heads=1, kv_heads=1), []

    def reading(name, array, dtype):
        read.append((name, array.shape[-2]))
        return converted(name, array, dtype)

    converted = _job.converted
    monkeypatch.setattr(_job, "converted", reading)
    files = save(tmp_path, ".safetensors", arrays)
    succeed(*files, "-o", tmp_path / "out.npy", "--causal", "--window", "100,0")
    queries = sum(count for name, count in read if name == "query")
    passes = sum(name == "query" for name, _ in read)
    assert queries == 3000
    assert passes > 1
    assert sum(count for name, count in read if name == "key") == 3000 + 100 * passes
    assert sum(count for name, count in read if name == "value") == 3000 + 100 * passes


def test_a_pass_serves_as_many_queries_as_fit(tmp_path, monkeypatch):
    work = job(tmp_path, operands(40, 50, lead=(), heads=8, kv_heads=2, d_k=64, d_v=64))
    rows, block, keys = work.lengths
    state = 4 * ((64 + 1) * 4 + 64 * 4)
    assert rows * state <= _job.STATE_BYTES < 2 * rows * state
    assert block <= rows
    assert keys * 2 * 64 * 4 == _job.CHUNK_BYTES


@pytest.mark.parametrize("scalars", [
    {}, {"causal": True}, {"window": (3, 2)}, {"window": (None, 4)}, {"window": (5, None)},
    {"causal": True, "window": (0, 9)},
])  # fmt: skip
@pytest.mark.parametrize("lengths", [(7, 13), (13, 7), (5, 5), (1, 1)])
def test_work_is_the_number_of_visible_pairs(tmp_path, lengths, scalars):
    work = job(tmp_path, operands(*lengths, lead=(), heads=1, kv_heads=1), **scalars)
    visible = seen(*lengths, **scalars)
    if scalars.get("causal") and "window" in scalars:
        visible &= seen(*lengths, causal=True)
    for start in range(lengths[0] + 1):
        for stop in range(start, lengths[0] + 1):
            rows = slice(start, stop)
            assert work.work(rows) == visible[rows].sum() + stop - start
            assert work.work(rows, slice(2, 5)) == visible[rows, 2:5].sum() or lengths[1] < 5
            if stop > start:
                low, high = work.reach(rows)
                keys = np.flatnonzero(visible[rows].any(axis=0))
                assert not len(keys) or (low, high) == (keys[0], keys[-1] + 1)
                assert len(keys) or low == high


@pytest.mark.parametrize("empty", [
    ("batch",), ("batch", "len_kv"), ("heads",), ("heads", "kv_heads"), ("len_q",), ("len_kv",),
    ("len_q", "len_kv"), ("d_k",), ("d_v",), ("d_k", "d_v"),
])  # fmt: skip
@pytest.mark.parametrize(("ending", "dtype"), [(".npy", "float64"), (".safetensors", "float32")])
def test_axes_of_length_zero(tmp_path, small, monkeypatch, ending, dtype, empty):
    monkeypatch.setattr(_job, "BUDGET", 0)
    sizes = {"len_q": 20, "len_kv": 900, "heads": 4, "kv_heads": 2, "d_k": 8, "d_v": 5}
    sizes |= {"batch": 2, **dict.fromkeys(empty, 0)}
    arrays = operands(lead=(sizes.pop("batch"),), **sizes, dtype=np.float64)
    files, out = save(tmp_path, ending, arrays), tmp_path / "out.npy"
    result = succeed(*files, "-o", out, "--stats", "--causal", "--dtype", dtype)
    check(load(out), arrays, dtype=dtype, causal=True)
    heads = [line.split()[0] for line in result.stdout.partition("entropy")[2].splitlines()[2:]]
    assert heads == [str(head) for head in range(sizes["heads"])]


def test_stats(tmp_path, small, monkeypatch):
    arrays, rng = operands(90, 1200), np.random.default_rng(5)
    arrays |= {"mask": rng.random((4, 1, 1200)) < 0.8, "bias": rng.normal(size=(2, 1, 90, 1200))}
    monkeypatch.setattr(_head_stats, "MEMORY", 4 * 2 * 1200 * 4 * 7)
    work = job(tmp_path, arrays, causal=True)
    assert work.streamed
    assert len(work.parts) == 4
    assert work.lengths[2] < 600
    stats = _head_stats.head_stats(work)
    truth, yardstick = (
        figures(weights_of(arrays, dtype, causal=True)) for dtype in (np.float64, np.float32)
    )
    for name, expected in truth.items():
        assert_close(
            getattr(stats, name), expected, yardstick[name], eps=EPS["float32"], len_kv=1200
        )


def test_the_bar_counts_chunks(tmp_path, small, monkeypatch):
    told = []

    class Recorder:
        def __init__(self, what, total, counted):
            told.append(total)

        def __enter__(self):
            return self

        def __exit__(self, *exc_info):
            pass

        def update(self, done, count):
            told.append((done, count))

    monkeypatch.setattr(_attend, "Progress", Recorder)
    succeed(*save(tmp_path, ".npy", operands(LEN_Q, LEN_KV)), "-o", tmp_path / "out.npy",
            "--causal")
    total, *updates = told
    assert total == 4 * (seen(LEN_Q, LEN_KV, causal=True).sum() + LEN_Q)
    assert updates == sorted(updates)
    assert total - 1 <= updates[-1][0] <= total
    assert LEN_Q - 1 <= updates[-1][1] <= LEN_Q
    assert len({done for done, _ in updates}) > 4 * 3 * 4  # parts, passes, blocks and chunks


def sparse(folder, dtype, tokens, d):
    """Keys and values in files that take no room; all are 0 but for the last value."""
    for name in ("key", "value"):
        array = np.lib.format.open_memmap(
            folder / f"{name}.npy", mode="w+", dtype=dtype, shape=(tokens, d)
        )
        if name == "value":
            array[-1] = 2**14
    np.save(folder / "query.npy", np.ones((20, d), dtype))
    return [folder / f"{name}.npy" for name in ("query", "key", "value")]


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="memory is told by Linux")
@pytest.mark.parametrize(("dtype", "arguments"), [
    (np.float32, []),
    pytest.param(np.float16, ["--dtype", "float32"], marks=pytest.mark.heavy),
])  # fmt: skip
def test_a_gibibyte_takes_little_memory(tmp_path, dtype, arguments):
    d = 128
    tokens = 2**29 // (d * np.dtype(dtype).itemsize)  # 1 GiB of keys and values
    files = sparse(tmp_path, dtype, tokens, d)
    process = launch([*files, "-o", tmp_path / "out.npy", *arguments])
    peak = 0
    while process.poll() is None:
        try:
            for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
                if line.startswith("RssAnon:"):
                    peak = max(peak, int(line.split()[1]) * 1024)
        except (FileNotFoundError, ProcessLookupError):
            break
        time.sleep(0.005)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    truth = np.full((20, d), 2**14 / tokens)
    assert_close(load(tmp_path / "out.npy"), truth, eps=EPS["float32"], len_kv=tokens)
    assert 0 < peak < 2**29  # less than the keys alone


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["float32", ">f8", "bfloat16"])
def test_arrays_in_archives_are_mapped(tmp_path, monkeypatch, dtype, order):
    monkeypatch.setattr(_files, "MAPPED_BYTES", 0)
    arrays = operands(60, 80, dtype=BFLOAT16 if dtype == "bfloat16" else dtype)
    stored = {name: np.asarray(x, order=order) for name, x in arrays.items()}
    (file,) = save(tmp_path, ".npz", stored)
    loaded = []
    monkeypatch.setattr(np.lib.npyio.NpzFile, "__getitem__", loaded.append)
    source = _files.open_inputs([Path(file)], None, None).key
    part = source.read((slice(0, 1), slice(1, 2), slice(3, 9), slice(None)))
    assert part.flags.aligned
    assert same_bits(part, stored["key"][:1, 1:, 3:9])
    if dtype != "bfloat16":
        dtype = np.dtype(dtype).newbyteorder("=")
        arrays = {name: x.astype(dtype) for name, x in arrays.items()}
    out = tmp_path / "out.safetensors"
    succeed(file, "-o", out)
    assert same_bits(load(out), sd.attention(**arrays))
    assert loaded == []
    whole = bytearray(Path(file).read_bytes())
    whole[400] ^= 255  # inside the data of query
    Path(file).write_bytes(whole)
    assert "CRC" in one_line(invoke(file, "-o", out, "--force").stderr)


def test_compressed_arrays_are_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(_files, "MAPPED_BYTES", 0)
    arrays = operands()
    np.savez_compressed(tmp_path / "in.npz", **arrays)
    succeed(tmp_path / "in.npz", "-o", tmp_path / "out.npy")
    assert same_bits(load(tmp_path / "out.npy"), sd.attention(**arrays))
