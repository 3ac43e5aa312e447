"""``scaledot run``: refusals and interruptions, and that they leave nothing behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import scaledot as sd
from cli_runs import (
    BFLOAT16,
    INPUT_FORMATS,
    OUTPUT_FORMATS,
    SOURCES,
    invoke,
    launch,
    load,
    one_line,
    operands,
    same_bits,
    save,
    succeed,
)
from scaledot.cli import _output, _partial


@pytest.fixture
def refused(tmp_path):
    """Check that a run ends with code 2 and one line, and changes nothing in the folder."""

    def check(*arguments, output="out.npy"):
        before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
        result = invoke(*arguments, "-o", tmp_path / output)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
        assert not list(tmp_path.glob("*.partial"))
        return one_line(result.stderr)

    return check


@pytest.mark.parametrize("output", [".npy", ".npz"])
def test_bfloat16_has_no_name_in_the_formats_of_numpy(tmp_path, refused, output):
    files = save(tmp_path, ".safetensors", operands(dtype=BFLOAT16))
    message = refused(*files, output=f"out{output}")
    assert "bfloat16" in message
    assert ".safetensors" in message


def test_an_existing_output_needs_force(tmp_path, refused, monkeypatch):
    arrays = operands()
    files = save(tmp_path, ".npz", arrays)
    out = tmp_path / "out.npy"
    out.write_bytes(b"precious")
    with monkeypatch.context() as patch:
        patch.setattr(sd, "attention", None)  # refused before the work
        assert "replace it with --force" in refused(*files)
    assert out.read_bytes() == b"precious"
    succeed(*files, "-o", out, "--force")
    assert same_bits(load(out), sd.attention(**arrays))


def test_an_output_that_appears_during_the_work_is_kept(tmp_path):
    path = tmp_path / "out.npy"
    with _output.Output(path, (2, 3), np.dtype(np.float32), force=False) as out:
        path.write_bytes(b"precious")
        with pytest.raises(FileExistsError, match=r"not exist yet, .* replace it with --force"):
            out.commit()
    assert path.read_bytes() == b"precious"
    assert os.listdir(tmp_path) == ["out.npy"]


def test_refused_outputs(tmp_path, refused):
    files = save(tmp_path, ".npz", operands())
    assert ".npy or .npz or .safetensors" in refused(*files, output="out.txt")
    assert "folder must exist" in refused(*files, output="missing/out.npy")
    (tmp_path / "folder.npy").mkdir()
    assert "the folder" in refused(*files, "--force", output="folder.npy")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write")
def test_a_folder_without_permission(tmp_path, refused):
    files = save(tmp_path, ".npz", operands())
    (tmp_path / "closed").mkdir(mode=0o500)
    assert "writable" in refused(*files, output="closed/out.npy")


def damaged(folder):
    """INPUT arguments that cannot be read, by what is wrong with them."""
    arrays = operands()
    made = {}
    for ending in INPUT_FORMATS:
        place = folder / ending[1:]
        place.mkdir()
        made[ending] = [Path(name) for name in save(place, ending, arrays)]
    objects = np.array([[{}]], dtype=object)
    np.save(folder / "objects.npy", objects, allow_pickle=True)
    np.savez(folder / "objects.npz", query=objects, key=objects, value=objects)
    (folder / "text.npz").write_text("no archive")
    (folder / "empty.npy").touch()
    (folder / "empty.npz").touch()
    (folder / "empty.safetensors").touch()
    for ending, paths in made.items():
        (folder / f"cut{ending}").write_bytes(paths[0].read_bytes()[:1000])
    whole = bytearray(made[".npz"][0].read_bytes())
    whole[300] ^= 255  # inside the data of query, which has a checksum
    (folder / "flipped.npz").write_bytes(whole)
    others = made[".npy"][1:]
    cases = {
        name: [folder / name, *(others if name.endswith(".npy") else [])]
        for name in ("objects.npy", "objects.npz", "text.npz", "empty.npy", "empty.npz",
                     "empty.safetensors", "cut.npy", "cut.npz", "cut.safetensors", "flipped.npz",
                     "missing.npz", "missing.npy", "missing.safetensors")
    }
    cases["one .npy"] = made[".npy"][:1]
    cases["two formats"] = [*made[".npy"][:2], made[".npz"][0]]
    cases["text"] = [folder / "in.txt"]
    return cases


def test_damaged_and_foreign_inputs(tmp_path, refused):
    for what, files in damaged(tmp_path).items():
        message = refused(*files)
        assert str(files[0]) in message, what


@pytest.mark.parametrize("ending", [".npz", ".safetensors"])
def test_missing_arrays_are_named(tmp_path, refused, ending):
    arrays = operands()
    files = save(tmp_path, ending, {"query": arrays["query"], "keys": arrays["key"]})
    message = refused(*files)
    assert "key or k" in message
    assert "the arrays query, keys" in message or "the arrays keys, query" in message
    files = save(tmp_path, ending, arrays)
    assert "nothing for mask" in refused(*files, "--mask", "nothing")


def test_refused_arrays(tmp_path, refused):
    arrays = operands()
    integers = save(tmp_path, ".npz", {name: x.astype(np.int32) for name, x in arrays.items()})
    message = refused(*integers)
    assert "int32" in message
    assert "--dtype" in message
    mixed = save(tmp_path, ".npz", {**arrays, "key": arrays["key"].astype(np.float64)})
    assert "key float64" in refused(*mixed)
    words = save(tmp_path, ".npz", {**arrays, "key": np.full((3, 3), "word")})
    assert "real numbers" in refused(*words, "--dtype", "float32")
    complexes = save(tmp_path, ".npz", {**arrays, "key": arrays["key"] * 1j})
    assert "real numbers" in refused(*complexes, "--dtype", "float32")
    wide = save(tmp_path, ".npz", {**arrays, "value": arrays["value"] * 1e6})
    assert "float16" in refused(*wide, "--dtype", "float16")
    shapes = save(tmp_path, ".npz", {**arrays, "key": arrays["key"][..., :3]})
    assert "d_k" in refused(*shapes)
    flat = save(tmp_path, ".npz", {**arrays, "query": np.ones(3, np.float32)})
    assert "at least two axes" in refused(*flat)


def test_refused_options(tmp_path, refused):
    arrays = operands()
    files = save(tmp_path, ".npz", {**arrays, "ones": np.ones((40, 50), np.float32)})
    assert "mask must be boolean" in refused(*files, "--mask", "ones")
    assert "broadcast" in refused(*files, "--bias", "value")
    assert "LEFT,RIGHT" in refused(*files, "--window", "3")
    assert "LEFT,RIGHT" in refused(*files, "--window", "3,x")
    assert "at least 0" in refused(*files, "--window", "-1,2")
    assert "softcap must be positive" in refused(*files, "--softcap", "0")
    assert "scale must be finite" in refused(*files, "--scale", "nan")
    assert "--dtype must be one of" in refused(*files, "--dtype", "float8")
    assert "impl must be one of" in refused(*files, "--impl", "fast")
    assert "--threads must be at least 1" in refused(*files, "--threads", "0")
    separate = save(tmp_path, ".npy", arrays)
    assert "must name .npy files" in refused(*separate, "--mask", files[0])


def test_missing_output_is_a_usage_error(tmp_path):
    result = invoke(*save(tmp_path, ".npz", operands()))
    assert result.exit_code == 2
    assert "--output" in result.stderr


def test_too_little_memory_is_one_line(tmp_path, monkeypatch, refused):
    files = save(tmp_path, ".npz", operands())

    def fail(*arguments, **options):
        raise MemoryError("Unable to allocate 9 TiB")

    monkeypatch.setattr(sd, "attention", fail)
    assert "Unable to allocate 9 TiB" in refused(*files)


def test_an_error_of_the_program_is_not_hidden(tmp_path, monkeypatch):
    files = save(tmp_path, ".npz", operands())

    def fail(*arguments, **options):
        raise ZeroDivisionError

    monkeypatch.setattr(sd, "attention", fail)
    result = invoke(*files, "-o", tmp_path / "out.npy")
    assert isinstance(result.exception, ZeroDivisionError)
    assert os.listdir(tmp_path) == ["input.npz"]


def test_module_and_version():
    environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
    command = [sys.executable, "-m", "scaledot"]
    done = subprocess.run(
        [*command, "--version"], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"scaledot {sd.__version__}\n"
    done = subprocess.run(
        [*command, "run", "missing.npz", "-o", "out.npy"], env=environment, capture_output=True,
        text=True, check=False,
    )
    assert done.returncode == 2
    assert "missing.npz" in one_line(done.stderr)


@pytest.mark.parametrize(
    ("module", "extra", "arguments"),
    [
        ("typer", "cli", ()),
        ("rich", "cli", ()),
        ("safetensors", "cli", ("--force",)),
        ("ml_dtypes", "bf16", ("--dtype", "bfloat16")),
    ],
)
def test_a_missing_extra_is_one_line(tmp_path, module, extra, arguments):
    files = save(tmp_path, ".npz", operands())
    out = tmp_path / "out.safetensors"
    process = launch([*files, "-o", out, *arguments], before=f"sys.modules[{module!r}] = None")
    stdout, stderr = process.communicate(timeout=120)
    assert (process.returncode, stdout) == (2, "")
    assert f"pip install 'scaledot[{extra}]'" in one_line(stderr)
    assert not out.exists()


@pytest.mark.parametrize("output", OUTPUT_FORMATS)
def test_a_full_disk_is_found_before_the_work(tmp_path, output):
    pytest.importorskip("resource")
    files = save(tmp_path, ".npz", operands(2000, 50))
    # The limit on a file's size fails a write as a full disk does, with another reason.
    limited = (
        "import resource, scaledot\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))\n"
        "scaledot.attention = None  # must not come to this"
    )
    process = launch([*files, "-o", tmp_path / f"out{output}"], before=limited)
    stdout, stderr = process.communicate(timeout=120)
    assert (process.returncode, stdout) == (2, "")
    needed = "twice 320,000 bytes" if output != ".npy" else "needs 320,000 bytes"
    assert needed in one_line(stderr)
    assert os.listdir(tmp_path) == ["input.npz"]


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="no way to reserve room")
@pytest.mark.parametrize("output", OUTPUT_FORMATS)
def test_the_room_is_taken_at_the_start(tmp_path, output):
    path = tmp_path / f"out{output}"
    with _output.Output(path, (1000, 1000), np.dtype(np.float64), force=False):
        taken = [
            512 * file.stat().st_blocks
            for file in tmp_path.glob("*.partial/*") if file.name != "lock"
        ]
        assert len(taken) == (1 if output == ".npy" else 2)
        assert min(taken) >= 8 * 1000 * 1000
    assert os.listdir(tmp_path) == []


def test_room_is_taken_where_the_system_cannot_reserve_it(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    path = tmp_path / "file"
    path.write_bytes(b"header")
    _output._take_room(path, 6, 3 * _output._PIECE + 5)
    assert path.read_bytes() == b"header" + bytes(3 * _output._PIECE - 1)


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize(
    ("name", "stats"), [("SIGINT", []), ("SIGINT", ["--stats"]), ("SIGTERM", [])]
)
def test_a_signal_leaves_no_file(tmp_path, name, stats):
    arrays = operands(150_000, 150_000, lead=(), heads=1, kv_heads=1, d_k=64, d_v=64)
    if stats:  # short work, long statistics
        arrays["query"] = arrays["query"][:, :2000]
    folder = tmp_path / "outputs"
    folder.mkdir()
    number = getattr(signal, name)
    # A shell may have started the tests with the signal ignored.
    restore = (
        "import signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_DFL)\n"
    )
    announce = "import scaledot.cli._head_stats as s; f = s._normal\n" \
        "s._normal = lambda *a: (print('statistics', flush=True), f(*a))[1]"
    process = launch(
        [*save(tmp_path, ".npy", arrays), "-o", folder / "out.npy", *stats],
        before=restore + (announce if stats else ""),
    )
    if stats:
        assert process.stdout.readline() == "statistics\n"
    while not os.listdir(folder) and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 128 + number
    assert one_line(stderr).split()[1] == ("interrupted" if name == "SIGINT" else "stopped")
    assert os.listdir(folder) == []


@pytest.mark.parametrize("place", ["_check_folder", "left", "os.open", "samestat"])
def test_an_interruption_of_the_start_leaves_no_folder(tmp_path, monkeypatch, place):
    """Wherever it comes between the making of the folder and the work."""

    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    if place == "os.open":
        monkeypatch.setattr(_partial.os, "open", interrupt)
    elif place == "samestat":
        monkeypatch.setattr(_partial.os.path, "samestat", interrupt)
    else:
        monkeypatch.setattr(_partial.Partial, place, interrupt)
    output = _output.Output(tmp_path / "out.npy", (2, 3), np.dtype("float32"), force=False)
    with pytest.raises(KeyboardInterrupt):
        output.__enter__()
    monkeypatch.undo()
    assert os.listdir(tmp_path) == []


def test_an_interruption_leaves_what_another_run_has_left(tmp_path, monkeypatch):
    folder = tmp_path / "out.npy.partial"
    folder.mkdir()
    (folder / "journal").write_bytes(b"half a line")

    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(_partial.Partial, "left", interrupt)
    output = _output.Output(tmp_path / "out.npy", (2, 3), np.dtype("float32"), force=False)
    with pytest.raises(KeyboardInterrupt):
        output.__enter__()
    assert (folder / "journal").read_bytes() == b"half a line"
