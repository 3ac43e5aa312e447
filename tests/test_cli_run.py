"""``scaledot run``: formats, options, and what it computes and says."""

import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import scaledot as sd
from cli_runs import (
    BFLOAT16,
    INPUT_FORMATS,
    OUTPUT_FORMATS,
    launch,
    load,
    operands,
    same_bits,
    save,
    succeed,
)
from compare import EPS, assert_close
from scaledot.cli import _attend, _files, _head_stats, _job, _output
from test_cli_stream import figures, weights_of


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks as short as they get; returns the lengths that the core was called with."""
    lengths = []
    attention = sd.attention

    def counting(query, *arguments, **options):
        lengths.append(query.shape[-2])
        return attention(query, *arguments, **options)

    monkeypatch.setattr(sd, "attention", counting)
    monkeypatch.setattr(_attend, "BLOCK_SECONDS", 0.0)
    return lengths


@pytest.mark.parametrize("output", OUTPUT_FORMATS)
@pytest.mark.parametrize("ending", INPUT_FORMATS)
def test_every_format_in_and_out(tmp_path, ending, output):
    arrays = operands()
    out = tmp_path / f"out{output}"
    succeed(*save(tmp_path, ending, arrays), "-o", out)
    assert same_bits(load(out), sd.attention(**arrays))
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("ending", [".npz", ".safetensors"])
def test_short_names(tmp_path, ending):
    arrays = operands()
    files = save(tmp_path, ending, {name[0]: array for name, array in arrays.items()})
    succeed(*files, "-o", tmp_path / "out.npy")
    assert same_bits(load(tmp_path / "out.npy"), sd.attention(**arrays))


def test_full_names_come_first(tmp_path):
    arrays = operands()
    files = save(tmp_path, ".npz", {**arrays, "q": np.zeros((3, 3))})
    succeed(*files, "-o", tmp_path / "out.npy")
    assert same_bits(load(tmp_path / "out.npy"), sd.attention(**arrays))


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_the_dtype_of_the_input_is_kept(tmp_path, dtype):
    arrays = operands(dtype=dtype)
    succeed(*save(tmp_path, ".npz", arrays), "-o", tmp_path / "out.npz")
    assert same_bits(load(tmp_path / "out.npz"), sd.attention(**arrays))


@pytest.mark.parametrize("ending", INPUT_FORMATS)
def test_bfloat16(tmp_path, ending):
    # NumPy's formats keep its bits under a dtype of two unnamed bytes.
    arrays = operands(dtype=BFLOAT16)
    succeed(*save(tmp_path, ending, arrays), "-o", tmp_path / "out.safetensors")
    assert same_bits(load(tmp_path / "out.safetensors"), sd.attention(**arrays))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("stored", ["float64", "int16", ">f4"])
def test_conversion(tmp_path, small_blocks, stored, dtype):
    arrays = {name: (4 * x).astype(stored) for name, x in operands(600).items()}
    result = succeed(
        *save(tmp_path, ".npy", arrays), "-o", tmp_path / "out.safetensors", "--dtype", dtype,
        "--threads", 1,
    )
    working = BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
    whole = sd.attention(**{name: x.astype(working) for name, x in arrays.items()})
    assert len(small_blocks) > 2
    assert same_bits(load(tmp_path / "out.safetensors"), whole)
    stored_name = np.dtype(stored).name
    assert (f"{stored_name} → {dtype}" in result.stdout) == (stored_name != dtype)


def test_any_byte_order_and_memory_order(tmp_path):
    arrays = operands()
    bias = np.random.default_rng(2).normal(size=(40, 50))
    stored = {name: np.asfortranarray(x.astype(">f4")) for name, x in arrays.items()}
    stored["bias"] = bias.astype(">f8")
    files = save(tmp_path, ".npy", stored)
    succeed(*files, "--bias", tmp_path / "bias.npy", "-o", tmp_path / "out.npy")
    assert same_bits(load(tmp_path / "out.npy"), sd.attention(**arrays, bias=bias))


OPTIONS = {
    "none": ({}, []),
    "causal": ({"causal": True}, ["--causal"]),
    "window": ({"window": (100, 17)}, ["--window", "100,17"]),
    "left": ({"window": (300, None), "causal": True}, ["--window", "300,none", "--causal"]),
    "right": ({"window": (None, 0)}, ["--window", ",0"]),
    "scale": ({"scale": -0.7}, ["--scale", "-0.7"]),
    "softcap": ({"softcap": 1.5}, ["--softcap", "1.5"]),
}
TERMS = {
    "mask": (4, 838, 900),
    "mask_2d": (838, 900),
    "mask_keys": (900,),
    "mask_rows": (2, 1, 838, 1),
    "bias": (2, 4, 838, 900),
    "bias_heads": (4, 1, 900),
    "bias_scalar": (),
}


@pytest.mark.parametrize("options", OPTIONS)
def test_blocks_equal_one_call(tmp_path, small_blocks, options):
    arrays = operands(838, 900)
    keywords, arguments = OPTIONS[options]
    succeed(
        *save(tmp_path, ".npy", arrays), "-o", tmp_path / "out.npy", "--threads", 1, *arguments
    )
    unit = sd.explain(*arrays.values(), **keywords).block_q
    assert len(small_blocks) > 2
    assert set(small_blocks[:-1]) == {unit}
    assert unit <= small_blocks[-1] < 2 * unit
    assert same_bits(load(tmp_path / "out.npy"), sd.attention(**arrays, **keywords))


@pytest.mark.parametrize("ending", INPUT_FORMATS)
@pytest.mark.parametrize("term", TERMS)
def test_mask_and_bias_in_blocks_equal_one_call(tmp_path, small_blocks, term, ending):
    arrays = operands(838, 900)
    rng = np.random.default_rng(3)
    option = term.partition("_")[0]
    given = rng.random(TERMS[term]) < 0.7 if option == "mask" else rng.normal(size=TERMS[term])
    given = np.asarray(given)
    files = save(tmp_path, ending, {**arrays, "extra": given})
    name = tmp_path / "extra.npy" if ending == ".npy" else "extra"
    succeed(
        *files, "-o", tmp_path / "out.npy", "--threads", 1, f"--{option}", name, "--causal"
    )
    assert len(small_blocks) > 2
    whole = sd.attention(**arrays, causal=True, **{option: given})
    assert same_bits(load(tmp_path / "out.npy"), whole)


def test_dense_is_one_call(tmp_path, small_blocks):
    arrays = operands(838, 900)
    succeed(*save(tmp_path, ".npy", arrays), "-o", tmp_path / "out.npy", "--impl", "dense")
    assert small_blocks == [838]
    assert same_bits(load(tmp_path / "out.npy"), sd.attention(**arrays, impl="dense"))


@pytest.mark.parametrize(
    "shapes",
    [
        ((9, 4), (7, 4), (7, 3)),
        ((9, 4), (1, 7, 4), (7, 3)),
        ((4, 9, 4), (2, 7, 4), (2, 7, 3)),
        ((3, 1, 4, 9, 4), (2, 4, 7, 4), (1, 4, 7, 3)),
        ((4, 0, 4), (4, 7, 4), (4, 7, 3)),
        ((4, 9, 4), (4, 0, 4), (4, 0, 3)),
        ((9, 4), (7, 4), (7, 0)),
    ],
)
@pytest.mark.parametrize("ending", INPUT_FORMATS)
def test_any_shapes(tmp_path, shapes, ending):
    rng = np.random.default_rng(1)
    arrays = dict(zip(("query", "key", "value"), map(rng.standard_normal, shapes), strict=True))
    succeed(*save(tmp_path, ending, arrays), "-o", tmp_path / f"out{ending}", "--stats")
    assert same_bits(load(tmp_path / f"out{ending}"), sd.attention(**arrays))


def test_the_number_of_threads_is_put_back(tmp_path):
    before = sd.get_num_threads()
    files = save(tmp_path, ".npz", operands())
    result = succeed(*files, "-o", tmp_path / "out.npy", "--threads", before + 3)
    assert f"threads: {before + 3}" in result.stdout or "speed" not in result.stdout
    assert sd.get_num_threads() == before


def test_summary(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    arrays = operands(600, 700)
    files = save(tmp_path, ".npz", arrays)
    result = succeed(*files, "-o", tmp_path / "out.npy", "--causal", "--softcap", 2)
    lines = dict(line.split(None, 1) for line in result.stdout.splitlines() if line[:1] != " ")
    plan = sd.explain(**arrays, causal=True, softcap=2.0)
    assert lines["query"].startswith("(2, 4, 600, 8) float32")
    assert lines["out"].strip() == "(2, 4, 600, 5) float32"
    assert lines["options"].strip() == "causal, softcap=2.0"
    assert lines["implementation"].strip() == f"{plan.implementation} ({plan.reason})"
    assert lines["tiles"].startswith(
        f"{plan.tiles_run} of {plan.tiles_run + plan.tiles_skipped} run, {plan.tiles_skipped} skip"
    )
    assert plan.tiles_skipped > 0
    assert lines["speed"].split()[1] == "GFLOP/s"
    assert str(tmp_path / "out.npy") in lines["output"]


def job(arrays, folder, **scalars):
    files = [Path(name) for name in save(folder, ".npy", arrays)]
    names = [str(folder / f"{n}.npy") if n in arrays else None for n in ("mask", "bias")]
    defaults = {"causal": False, "window": None, "scale": None, "softcap": None, "impl": "auto"}
    return _job.Job(
        _files.open_inputs(files, *names), arrays["query"].dtype, {**defaults, **scalars}
    )


def test_stats_are_those_of_all_weights(tmp_path, monkeypatch):
    arrays = operands(90, 120)
    rng = np.random.default_rng(5)
    arrays |= {"mask": rng.random((4, 1, 120)) < 0.8, "bias": rng.normal(size=(2, 1, 90, 120))}
    monkeypatch.setattr(_head_stats, "MEMORY", 4 * 2 * 120 * 4 * 7)  # 7 rows at a time
    stats = _head_stats.head_stats(job(arrays, tmp_path, causal=True))
    truth, yardstick = (
        figures(weights_of(arrays, dtype, causal=True)) for dtype in (np.float64, np.float32)
    )
    for name, expected in truth.items():
        assert_close(
            getattr(stats, name), expected, yardstick[name], eps=EPS["float32"], len_kv=120
        )
    assert np.array_equal(stats.mean_notable, truth["mean_notable"])


def test_stats_in_the_summary(tmp_path):
    arrays = operands()
    arrays["key"][:] = 0  # every query sees 50 keys alike
    result = succeed(*save(tmp_path, ".npz", arrays), "-o", tmp_path / "out.npy", "--stats")
    rows = [line.split() for line in result.stdout.splitlines()[-4:]]
    assert rows == [[str(h), "0.0200", "0.0200", f"{np.log(50):.3f}", "50.0"] for h in range(4)]


def test_stats_need_no_matrix_of_all_weights(tmp_path, monkeypatch):
    length = 2048
    arrays = operands(length, length, lead=(), heads=1, kv_heads=1)
    monkeypatch.setattr(_head_stats, "MEMORY", length * length)  # a quarter of all weights
    work = job(arrays, tmp_path)
    tracemalloc.start()
    try:
        _head_stats.head_stats(work)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * _head_stats.MEMORY < length * length * 4


@pytest.mark.parametrize("output", OUTPUT_FORMATS)
def test_the_result_is_not_held_in_memory(tmp_path, output):
    shape = (2**15, 512)  # 64 MiB; NumPy writes an archive in pieces of 16 MiB
    tracemalloc.start()
    try:
        with _output.Output(
            tmp_path / f"out{output}", shape, np.dtype(np.float32), force=False
        ) as out:
            out.array[:] = 1
            size = out.commit()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < size // 2
    assert (load(tmp_path / f"out{output}") == 1).all()
    assert size == (tmp_path / f"out{output}").stat().st_size > 4 * 2**15 * 512


def test_an_input_can_be_replaced_by_the_output(tmp_path):
    arrays = operands(600, 600, lead=())
    whole = sd.attention(**arrays)
    files = save(tmp_path, ".npy", arrays)
    succeed(*files, "-o", files[0], "--force")
    assert same_bits(load(Path(files[0])), whole)


def test_a_link_is_followed(tmp_path):
    arrays = operands()
    (tmp_path / "elsewhere").mkdir()
    target = tmp_path / "elsewhere" / "target.npy"
    target.write_bytes(b"old")
    link = tmp_path / "out.npy"
    link.symlink_to(target)
    succeed(*save(tmp_path, ".npz", arrays), "-o", link, "--force")
    assert link.is_symlink()
    assert same_bits(load(target), sd.attention(**arrays))


@pytest.mark.parametrize("output", OUTPUT_FORMATS)
def test_the_output_has_the_usual_permissions(tmp_path, output):
    files = save(tmp_path, ".npz", operands())
    old = os.umask(0o027)
    try:
        succeed(*files, "-o", tmp_path / f"out{output}")
    finally:
        os.umask(old)
    assert (tmp_path / f"out{output}").stat().st_mode & 0o777 == 0o640


@pytest.mark.skipif(os.name != "posix", reason="terminals of POSIX")
def test_a_bar_is_shown_on_terminals(tmp_path):
    pty = pytest.importorskip("pty")
    files = save(tmp_path, ".npz", operands(600, 600))
    ours, theirs = pty.openpty()
    slow = (
        "import scaledot, scaledot.cli._attend as r, scaledot.cli._progress as p, time\n"
        "p.QUIET_SECONDS = 0.0\n"
        "r.BLOCK_SECONDS = 0.0\n"
        "f = scaledot.attention\n"
        "scaledot.attention = lambda *a, **o: (time.sleep(0.3), f(*a, **o))[1]"
    )
    process = launch(
        [*files, "-o", tmp_path / "out.npy", "--threads", "1"], before=slow, stderr=theirs,
    )
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 4096):
            shown += part
    except OSError:  # Linux says so when the other side has closed
        pass
    os.close(ours)
    stdout, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert b"attention" in shown
    assert b"queries/s" in shown
    assert "GFLOP/s" in stdout
