"""``scaledot inspect``: what its report holds, what it prints, and what it refuses."""

import json
import os
import tracemalloc

import numpy as np
import pytest
from typer.testing import CliRunner

import naive
import scaledot as sd
from cli_runs import BFLOAT16, INPUT_FORMATS, one_line, save
from compare import EPS, assert_close
from scaledot import introspect
from scaledot.cli import _inspect, app
from test_report import codes_of, data_of

EXCLUDED = 2**16 - 1  # code of a weight of 0
WORDS = ["[CLS]", "the", "animal", "“it”", "", "a\u2028b\x0bc", "\ttab ", "."]


def operands(*lead, heads=4, kv_heads=2, len_q=8, len_kv=8, dtype=np.float64):
    rng = np.random.default_rng(7)
    shapes = {"query": (*lead, heads, len_q, 5), "key": (*lead, kv_heads, len_kv, 5)}
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def saved(folder, ending, arrays):
    """Write arrays; return the INPUT arguments, two for .npy where there is no value."""
    files = save(folder, ending, arrays)
    return files if ending != ".npy" or "value" in arrays else files[:2]


def invoke(*arguments):
    return CliRunner().invoke(app, ["inspect", *map(str, arguments)])


def succeed(*arguments):
    result = invoke(*arguments)
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    return result


@pytest.fixture
def looked(tmp_path, monkeypatch):
    """Run ``inspect``; return the trace that the report is made of."""
    traces, write = [], _inspect.report.write

    def recording(trace, *arguments, **options):
        traces.append(trace)
        return write(trace, *arguments, **options)

    monkeypatch.setattr(_inspect.report, "write", recording)

    def run(*arguments):
        succeed(*arguments, "-o", tmp_path / "report.html", "--force")
        return traces.pop()

    return run


@pytest.fixture
def refused(tmp_path, monkeypatch):
    """Check that a run ends before the work, with code 2 and one line, and changes no file."""

    def check(*arguments, output="report.html"):
        before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
        with monkeypatch.context() as patch:
            patch.setattr(introspect, "look", None)
            result = invoke(*arguments, "-o", tmp_path / output)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
        return one_line(result.stderr)

    return check


def weights_in(page, layer):
    """Weights (num_heads, len_q, len_kv) of a layer as the page has them, and their steps."""
    data = data_of(page)
    codes = codes_of(data, layer, "<u2").astype(np.float64)
    steps = np.array(data["layers"][layer]["steps"])[:, None, None]
    return np.where(codes == EXCLUDED, 0, np.exp(-codes * steps)), steps


@pytest.mark.parametrize("ending", INPUT_FORMATS)
def test_the_page_has_the_weights_of_every_layer(tmp_path, ending):
    arrays = operands(3)
    (tmp_path / "tokens.txt").write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    succeed(*saved(tmp_path, ending, arrays), "-o", tmp_path / "a.html", "--causal", "--tokens",
            tmp_path / "tokens.txt", "--title", "A <title>")  # fmt: skip
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    data = data_of(page)
    assert (data["kind"], data["title"]) == ("weights", "A <title>")
    assert data["names"] == ["layer 0", "layer 1", "layer 2"]
    assert data["queries"] == data["keys"] == WORDS
    for layer in range(3):
        query, key = arrays["query"][layer], arrays["key"][layer]
        truth = naive.attention(query, key, key, causal=True)[2]
        found, steps = weights_in(page, layer)
        assert np.array_equal(found > 0, truth > 0)
        # A code is off by half at most, which is a share of the weight.
        assert (np.abs(found - truth) <= 0.51 * steps * truth).all()


def textbook(arrays, dtype, *, scale=None, softcap=None, causal=False, window=(None, None)):
    """Weights of each query by the definition, in a dtype."""
    query, key = (arrays[name].astype(dtype) for name in ("query", "key"))
    key = np.repeat(key, query.shape[-3] // key.shape[-3], axis=-3)
    factor = 1 / np.sqrt(query.shape[-1]) if scale is None else scale
    scores = query @ key.swapaxes(-1, -2) * dtype(factor)
    if softcap is not None:
        scores = dtype(softcap) * np.tanh(scores / dtype(softcap))
    scores = scores + arrays.get("bias", np.zeros(())).astype(dtype)
    len_q, len_kv = scores.shape[-2:]
    apart = np.arange(len_kv) - np.arange(len_kv - len_q, len_kv)[:, None]
    left, right = window
    shown = np.broadcast_to(arrays.get("mask", True), scores.shape).copy()
    shown &= (apart <= 0) | (not causal)
    shown &= (left is None) | (apart >= -(left or 0))
    shown &= (right is None) | (apart <= (right or 0))
    powers = np.exp(np.where(shown, scores, -np.inf) - scores.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


CALLS = {
    "plain": ({}, []),
    "causal": ({"causal": True}, ["--causal"]),
    "window": ({"window": (5, 2)}, ["--window", "5,2"]),
    "left": ({"window": (9, None), "causal": True}, ["--window", "9,none", "--causal"]),
    "scale, softcap": ({"scale": -0.7, "softcap": 1.5}, ["--scale", "-0.7", "--softcap", "1.5"]),
    "blockwise": ({}, ["--impl", "blockwise"]),
    "dense, one thread": ({}, ["--impl", "dense", "--threads", "1"]),
}
TERMS = {
    "none": {},
    "mask": {"mask": (2, 4, 30, 40)},
    "mask of a head": {"mask": (4, 1, 40)},
    "bias": {"bias": (4, 30, 40)},
    "both": {"mask": (1, 40), "bias": (2, 1, 30, 1)},
}
# Two calls with every term, and every call with all terms.
PAIRS = [(c, t) for c in CALLS for t in TERMS if c in ("plain", "left") or t == "both"]


def terms_of(shapes):
    rng = np.random.default_rng(3)
    made = {name: rng.random(shape) for name, shape in shapes.items()}
    if "mask" in made:
        made["mask"] = made["mask"] < 0.8
    return made


@pytest.fixture
def maps_alone(monkeypatch):
    """Take every input for a long one, with maps of at most so many rows and columns."""
    monkeypatch.setattr(_inspect, "FINEST", 6)
    looking = _inspect._looked_at
    monkeypatch.setattr(
        _inspect, "_looked_at", lambda job, layers, max_bytes: looking(job, layers, 4000)
    )


@pytest.mark.parametrize(("call", "term"), PAIRS)
def test_statistics_are_those_of_the_definition(tmp_path, looked, request, call, term):
    options, arguments = CALLS[call]
    arrays = operands(2, len_q=30, len_kv=40, dtype=np.float32) | terms_of(TERMS[term])
    files = saved(tmp_path, ".npz", arrays)
    arguments = [*files, *arguments, *(x for name in TERMS[term] for x in (f"--{name}", name))]
    whole = looked(*arguments)
    request.getfixturevalue("maps_alone")
    long = looked(*arguments)
    truth, yardstick = (textbook(arrays, x, **options) for x in (np.float64, np.float32))
    for layer in range(2):
        kept, mapped = whole.layers[layer], long.layers[layer]
        assert kept.query is not None
        assert mapped.query is mapped.key is None
        assert mapped.options.keys() == kept.options.keys() - TERMS[term].keys()
        for stats in (kept.stats, mapped.stats):
            for name, of in (("received", lambda w: w.sum(axis=-2)),
                             ("max_weight", lambda w: w.max(axis=-1))):  # fmt: skip
                assert_close(getattr(stats, name), of(truth[layer]), of(yardstick[layer]),
                             eps=EPS["float32"], len_kv=40)  # fmt: skip
        assert_close(kept.weights(), truth[layer], yardstick[layer], eps=EPS["float32"], len_kv=40)
        for name, x in kept.stats._asdict().items():
            if name not in ("block_map", "received_last"):
                assert np.array_equal(getattr(mapped.stats, name), x), name
        maps = truth[layer].reshape(4, 6, 5, 40).mean(axis=2)
        bins = np.arange(40) * 6 // 40
        maps = np.stack([maps[..., bins == j].sum(axis=-1) for j in range(6)], axis=-1)
        assert_close(mapped.stats.block_map, maps, eps=EPS["float32"], len_kv=40)


def test_a_report_of_maps(tmp_path):
    arrays = operands(heads=2, kv_heads=1, len_q=900, len_kv=900, dtype=np.float32)
    result = succeed(*saved(tmp_path, ".npy", arrays), "-o", tmp_path / "a.html")
    data = data_of((tmp_path / "a.html").read_text(encoding="utf-8"))
    assert data["kind"] == "maps"
    assert data["names"] == ["attention"]
    assert 256 <= len(data["queries"]) <= 512
    assert (tmp_path / "a.html").stat().st_size <= 2_000_000
    assert "layers 1, heads 2, queries 900, keys 900, float32\n" in result.stdout


def test_the_size_of_the_report(tmp_path):
    files = saved(tmp_path, ".npz", operands(2, len_q=100, len_kv=100))
    kinds = []
    for most in (90_000, 300_000):
        succeed(*files, "-o", tmp_path / "a.html", "--force", "--max-bytes", most)
        assert (tmp_path / "a.html").stat().st_size <= most
        kinds.append(data_of((tmp_path / "a.html").read_text(encoding="utf-8"))["kind"])
    assert kinds == ["maps", "weights"]


def test_memory_is_not_that_of_the_matrix(tmp_path):
    length = 6000
    files = saved(tmp_path, ".npy", operands(heads=1, kv_heads=1, len_q=length, len_kv=length,
                                             dtype=np.float32))  # fmt: skip
    tracemalloc.start()
    try:
        succeed(*files, "-o", tmp_path / "a.html")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < length * length * 4 / 4


def test_progress_counts_every_row(tmp_path, monkeypatch, looked, maps_alone):
    told = []

    class Recorder(_inspect.Progress):
        def __init__(self, what, total, counted):
            super().__init__(what, total, counted)
            told.append((total, counted))

        def update(self, done, count):
            super().update(done, count)
            told.append(done)

    monkeypatch.setattr(_inspect, "Progress", Recorder)
    looked(*saved(tmp_path, ".npz", operands(3, len_q=30, len_kv=40)))
    assert told == [(360, "rows of weights"), 60, 120, 180, 240, 300, 360]


SHAPES = {
    "one head": ((8, 5), (9, 5), []),
    "one layer": ((4, 8, 5), (2, 9, 5), []),
    "layers": ((3, 4, 8, 5), (3, 2, 9, 5), []),
    "one of a batch": ((1, 3, 4, 8, 5), (1, 3, 2, 9, 5), []),
    "a batch of one": ((3, 1, 4, 8, 5), (3, 1, 2, 9, 5), []),
    "axis of layers": ((3, 2, 4, 8, 5), (3, 2, 2, 9, 5), ["--layer-axis", "0"]),
    "another axis": ((2, 3, 4, 8, 5), (2, 3, 2, 9, 5), ["--layer-axis", "1"]),
    "one axis": ((1, 1, 4, 8, 5), (1, 1, 2, 9, 5), []),
    "keys shared by layers": ((3, 4, 8, 5), (2, 9, 5), []),
}


@pytest.mark.parametrize("case", SHAPES)
@pytest.mark.parametrize("ending", [".npy", ".safetensors"])
def test_axes(tmp_path, looked, request, case, ending):
    query_shape, key_shape, arguments = SHAPES[case]
    rng = np.random.default_rng(1)
    query, key = rng.standard_normal(query_shape), rng.standard_normal(key_shape)
    files = saved(tmp_path, ending, {"query": query, "key": key})
    arguments = [*files, *arguments]
    traces = [looked(*arguments)]
    request.getfixturevalue("maps_alone")
    traces.append(looked(*arguments))
    heads = query.shape[-3] if query.ndim > 2 else 1
    batch_first = case in ("one of a batch", "another axis")
    if query.ndim == 5:
        query, key = (x[0] if batch_first else x[:, 0] for x in (query, key))
    query = query.reshape(-1, heads, 8, 5)
    key = key.reshape(-1, max(1, heads // 2), 9, 5)
    key = np.broadcast_to(key, (len(query), *key.shape[1:]))
    for trace in traces:
        assert len(trace.layers) == len(query)
        for layer, q, k in zip(trace.layers, query, key, strict=True):
            truth = naive.attention(q, k, k)[2].sum(axis=-2)
            assert_close(layer.stats.received, truth, eps=EPS["float64"], len_kv=9)


def test_axes_that_cannot_be_shown(tmp_path, refused):
    files = saved(tmp_path, ".npz", operands(3, 2))
    assert "--layer-axis" in refused(*files)
    assert "(3, 2)" in refused(*files)
    assert "2 with 2 such axes" in refused(*files, "--layer-axis", 2)
    assert "-1 with 2 such axes" in refused(*files, "--layer-axis", -1)
    files = saved(tmp_path, ".npz", operands())
    assert "0 with 0 such axes" in refused(*files, "--layer-axis", 0)


@pytest.mark.parametrize("name", ["len_q", "len_kv", "layers"])
def test_nothing_to_show(tmp_path, refused, name):
    arrays = operands(0) if name == "layers" else operands(**{name: 0})
    assert "at least one" in refused(*saved(tmp_path, ".npz", arrays))


@pytest.mark.parametrize("ending", INPUT_FORMATS)
def test_a_value_is_not_read(tmp_path, looked, ending):
    files = saved(tmp_path, ending, operands() | {"value": np.zeros((1, 2, 3, 4, 5), np.int8)})
    assert len(files) == (3 if ending == ".npy" else 1)
    assert len(looked(*files).layers) == 1


@pytest.mark.parametrize("ending", [".npz", ".safetensors"])
def test_short_names(tmp_path, looked, ending):
    arrays = operands(2)
    trace = looked(*saved(tmp_path, ending, {name[0]: x for name, x in arrays.items()}))
    assert np.array_equal(trace.layers[1].query, arrays["query"][1])


@pytest.mark.parametrize(("stored", "asked"), [
    ("float16", None), ("bfloat16", None), ("int16", "float32"), (">f4", "float64"),
    ("float64", "bfloat16"),
])  # fmt: skip
def test_dtypes(tmp_path, looked, stored, asked):
    def of(name):
        return BFLOAT16 if name == "bfloat16" else np.dtype(name)

    arrays = {name: (4 * x).astype(of(stored)) for name, x in operands(2).items()}
    trace = looked(*saved(tmp_path, ".npy", arrays), *(["--dtype", asked] if asked else []))
    working = {name: x.astype(of(asked or stored)) for name, x in arrays.items()}
    for layer in range(2):
        stats = sd.attention_stats(working["query"][layer], working["key"][layer])
        assert np.array_equal(trace.layers[layer].stats.received, stats.received)


def test_the_title_is_the_name_of_one_file(tmp_path, looked):
    arrays = operands()
    assert looked(*saved(tmp_path, ".npz", arrays)).title == "input.npz"
    assert looked(*saved(tmp_path, ".npy", arrays)).title == ""
    assert looked(*saved(tmp_path, ".npz", arrays), "--title", "").title == ""


def test_the_number_of_threads_is_put_back(tmp_path, looked):
    before = sd.get_num_threads()
    looked(*saved(tmp_path, ".npz", operands()), "--threads", before + 3)
    assert sd.get_num_threads() == before


TOKEN_FILES = {
    "lines": ("a.txt", "\n".join(WORDS) + "\n"),
    "no last end": ("a.txt", "\n".join(WORDS)),
    "of Windows": ("a.txt", "\r\n".join(WORDS) + "\r\n"),
    "with a mark": ("a.txt", "\ufeff" + "\n".join(WORDS)),
    "json": ("a.json", json.dumps(WORDS, indent=1)),
    "json in capitals": ("a.JSON", json.dumps(WORDS, ensure_ascii=False)),
}


@pytest.mark.parametrize("case", TOKEN_FILES)
def test_tokens(tmp_path, looked, case):
    name, text = TOKEN_FILES[case]
    (tmp_path / name).write_bytes(text.encode())
    trace = looked(*saved(tmp_path, ".npz", operands()), "--tokens", tmp_path / name)
    assert trace.tokens == tuple(WORDS)
    assert trace.key_tokens is None


def test_tokens_of_keys(tmp_path, looked):
    (tmp_path / "queries.json").write_text("[101, 7]")
    (tmp_path / "keys.txt").write_text("x\ny\n\n")
    files = saved(tmp_path, ".npz", operands(len_q=2, len_kv=3))
    keys = ["--key-tokens", tmp_path / "keys.txt"]
    trace = looked(*files, *keys, "--tokens", tmp_path / "queries.json")
    assert (trace.tokens, trace.key_tokens) == (("101", "7"), ("x", "y", ""))
    assert looked(*files, *keys).tokens is None


def test_tokens_that_do_not_fit(tmp_path, refused):
    def written(name, content):
        (tmp_path / name).write_bytes(content)
        return tmp_path / name

    files = saved(tmp_path, ".npz", operands(len_q=2, len_kv=3))
    two, three = written("two.txt", b"a\nb\n"), written("three.txt", b"a\nb\nc\n")
    assert "each of the 2 queries, got 3 in" in refused(*files, "--tokens", three)
    assert "each of the 3 keys, got 2 in" in refused(*files, "--key-tokens", two)
    assert "--key-tokens must be there" in refused(*files, "--tokens", two)
    for content in (b'["a", ["b"]]', b'{"a": 1}', b"[true, 1]", b'"ab"'):
        assert "must hold a list" in refused(*files, "--tokens", written("a.json", content))
    assert "cannot be read" in refused(*files, "--tokens", written("a.json", b"[1"))
    assert "UTF-8" in refused(*files, "--tokens", written("a.txt", b"\xff\n"))
    assert "No such file" in refused(*files, "--tokens", tmp_path / "missing.txt")


def test_refused_outputs(tmp_path, refused):
    files = saved(tmp_path, ".npz", operands())
    assert ".html" in refused(*files, output="report.htm")
    assert "folder must exist" in refused(*files, output="missing/report.html")
    (tmp_path / "folder.html").mkdir()
    assert "the folder" in refused(*files, "--force", output="folder.html")
    (tmp_path / "old.html").write_text("precious")
    assert "replace it with --force" in refused(*files, output="old.html")
    succeed(*files, "-o", tmp_path / "old.html", "--force")
    assert (tmp_path / "old.html").read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write")
def test_a_folder_without_permission(tmp_path, refused):
    (tmp_path / "closed").mkdir(mode=0o500)
    files = saved(tmp_path, ".npz", operands())
    assert "writable" in refused(*files, output="closed/report.html")


def test_refused_inputs(tmp_path, refused):
    arrays = operands()
    query, key = saved(tmp_path, ".npy", arrays)
    assert "two or three .npy files" in refused(query)
    assert "two or three .npy files" in refused(query, key, key, key)
    assert "two or three .npy files" in refused(query, tmp_path / "key.npz")
    assert "does not exist" in refused(tmp_path / "missing.npz")
    assert "does not exist" in refused(query, tmp_path / "missing.npy")
    one = saved(tmp_path, ".npz", {"query": arrays["query"]})
    assert "array key or k for key" in refused(*one)
    whole = saved(tmp_path, ".npz", arrays)
    assert "array m for mask" in refused(*whole, "--mask", "m")
    assert "--threads" in refused(*whole, "--threads", 0)
    assert "--window" in refused(*whole, "--window", "1")
    narrow = saved(tmp_path, ".npz", arrays | {"key": arrays["key"][..., :3]})
    assert "d_k" in refused(*narrow)
    whole = saved(tmp_path, ".npz", {name: x.astype(int) for name, x in arrays.items()})
    assert "--dtype float32" in refused(*whole)
