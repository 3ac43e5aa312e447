"""Arrays in files, and runs of the command line in this process and in others."""

import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import safetensors.numpy
from typer.testing import CliRunner

import scaledot as sd
from scaledot.cli import _attend, _job, _output, app

SOURCES = Path(sd.__file__).parents[1]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
INPUT_FORMATS = (".npy", ".npz", ".safetensors")
OUTPUT_FORMATS = (".npy", ".npz", ".safetensors")
# Several chunks, and several blocks of queries in each of several passes.
SMALL_SIZES = {"BUDGET": 2**10, "CHUNK_BYTES": 2**14, "STATE_BYTES": 2**16, "BLOCK_BYTES": 2**12}


def operands(len_q=40, len_kv=50, lead=(2,), heads=4, kv_heads=2, d_k=8, d_v=5, dtype=np.float32):
    rng = np.random.default_rng(7)
    shapes = {
        "query": (*lead, heads, len_q, d_k),
        "key": (*lead, kv_heads, len_kv, d_k),
        "value": (*lead, kv_heads, len_kv, d_v),
    }
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def save(folder, ending, arrays):
    """Write arrays in a format; return the INPUT arguments, which are always three for .npy."""
    if ending == ".npy":
        for name, array in arrays.items():
            np.save(folder / f"{name}.npy", array)
        return [str(folder / f"{name}.npy") for name in ("query", "key", "value")]
    path = folder / f"input{ending}"
    if ending == ".npz":
        np.savez(path, **arrays)
    else:
        safetensors.numpy.save_file(
            {name: np.ascontiguousarray(array) for name, array in arrays.items()}, path
        )
    return [str(path)]


def load(path):
    if path.suffix == ".npy":
        return np.load(path, allow_pickle=False)
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as archive:
            assert archive.files == ["out"]
            return archive["out"]
    arrays = safetensors.numpy.load_file(path)
    assert list(arrays) == ["out"]
    return arrays["out"]


def invoke(*arguments):
    return CliRunner().invoke(app, ["run", *map(str, arguments)])


def succeed(*arguments):
    result = invoke(*arguments)
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    return result


def shrink(monkeypatch):
    """Take few keys for many, and record every finished block."""
    for name, size in SMALL_SIZES.items():
        monkeypatch.setattr(_job, name, size)
    monkeypatch.setattr(_attend, "BLOCK_BYTES", SMALL_SIZES["BLOCK_BYTES"])
    monkeypatch.setattr(_attend, "BLOCK_SECONDS", 0.0)
    monkeypatch.setattr(_output, "SYNC_SECONDS", 0.0)


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def launch(arguments, before="", **keywords):
    """Start the command in a process of its own, after some lines of Python."""
    program = (
        "import sys\n"
        f"{before}\n"
        "from scaledot.cli import main\n"
        f"sys.argv = ['scaledot', 'run', *{[str(a) for a in arguments]!r}]\n"
        "main()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
    return subprocess.Popen(
        [sys.executable, "-c", program], env=environment, text=True, stdout=subprocess.PIPE,
        **{"stderr": subprocess.PIPE, **keywords},
    )


def one_line(stderr):
    assert stderr.startswith("scaledot: ")
    assert stderr.count("\n") == 1
    assert stderr.endswith("\n")
    assert "Traceback" not in stderr
    return stderr
