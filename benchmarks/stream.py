"""`scaledot run` on keys and values larger than memory: seconds, GB/s, peak anonymous memory.

    python benchmarks/stream.py [--gib 8] [--queries 64] [--format npy] [--dtype float32] [--write]

Keys and values of one head are written to a temporary folder (numbers that repeat, so that writing
takes little time) and read by a process of its own, whose anonymous memory is watched from outside.
Some rows are compared with the mean that they must be: all keys are alike. GB/s count the
file once, whatever is read again. ``--write`` renews results/stream.md.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import safetensors.numpy

import machine
import scaledot as sd

D = 128
RESULTS = Path(__file__).parent / "results"
LIMIT = 2**30


def make(folder: Path, gib: float, queries: int, kind: str, dtype: str) -> list[str]:
    """Write inputs; return the INPUT arguments."""
    tokens = int(gib * 2**30) // (2 * D * np.dtype(dtype).itemsize)
    query = np.ones((1, queries, D), dtype)
    values = np.random.default_rng(0).random((2**16, D)).astype(dtype)
    if kind == "safetensors":  # the library writes whole arrays
        value = np.resize(values, (1, tokens, D))
        arrays = {"query": query, "key": np.zeros((1, tokens, D), dtype), "value": value}
        safetensors.numpy.save_file(arrays, folder / "in.safetensors")
        return [str(folder / "in.safetensors")]
    np.save(folder / "query.npy", query)
    for name in ("key", "value"):
        array = np.lib.format.open_memmap(
            folder / f"{name}.npy", mode="w+", dtype=dtype, shape=(1, tokens, D)
        )
        for start in range(0, tokens, len(values)):
            part = array[0, start : start + len(values)]
            part[:] = values[: len(part)] if name == "value" else 0
        array.flush()
    return [str(folder / f"{name}.npy") for name in ("query", "key", "value")]


def watched(command: list[str]) -> tuple[float, int]:
    """Seconds and peak anonymous memory of a command."""
    start, peak = time.perf_counter(), 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except OSError:
            break
        lines = [line for line in status.splitlines() if line.startswith("RssAnon:")]
        peak = max([peak, *(int(line.split()[1]) * 1024 for line in lines)])
        time.sleep(0.005)
    if process.wait():
        raise SystemExit(f"the run failed with code {process.returncode}")
    return time.perf_counter() - start, peak


def drop_from_memory(folder: Path) -> None:
    """Ask the system to forget the files, so that they are read from the disk."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def wrong(out: np.ndarray, folder: Path, kind: str) -> bool:
    """Whether rows are not the mean of all values, within float32's rounding over so many."""
    if kind == "safetensors":
        with safetensors.safe_open(folder / "in.safetensors", "numpy") as file:
            value = file.get_tensor("value")
    else:
        value = np.load(folder / "value.npy", mmap_mode="r")
    mean = value[0, :, :4].mean(axis=0, dtype=np.float64)
    eps = max(2.0**-23, float(np.finfo(out.dtype).eps))
    limit = eps * np.sqrt(value.shape[1]) * np.abs(mean).max()
    return bool(np.abs(out[0, :, :4] - mean).max() > limit)


def measure(options: argparse.Namespace) -> list[str]:
    """Lines of the report, measured now."""
    lines = [
        f"# {options.gib:g} GiB of keys and values ({options.format}, {options.stored}"
        f"{' → ' + options.dtype if options.dtype else ''}), {options.queries} queries, d = {D}",
        "", *machine.describe(), f"{sd.get_num_threads()} threads.", "",
        "| File | seconds | GB/s | peak anonymous memory, MiB |", "|---|---|---|---|",
    ]
    print(*lines, sep="\n")
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        files = make(folder, options.gib, options.queries, options.format, options.stored)
        out = folder / "out.npy"
        command = [sys.executable, "-m", "scaledot", "run", *files, "-o", str(out), "--force"]
        command += ["--dtype", options.dtype] if options.dtype else []
        drop_from_memory(folder)
        for state in ("on disk", "in the page cache"):
            seconds, peak = watched(command)
            if wrong(np.load(out), folder, options.format):
                raise SystemExit("the result is wrong")
            verdict = "" if peak < LIMIT else " **over**"
            rate = options.gib * 2**30 / seconds / 1e9
            lines.append(f"| {state} | {seconds:.1f} | {rate:.2f} | {peak / 2**20:.0f}{verdict} |")
            print(lines[-1], flush=True)
    return lines


def main() -> None:
    """Measure, and write the page if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=8.0)
    parser.add_argument("--queries", type=int, default=64)
    parser.add_argument("--format", choices=("npy", "safetensors"), default="npy")
    parser.add_argument("--stored", default="float32", help="dtype in the file")
    parser.add_argument("--dtype", help="dtype of the work")
    parser.add_argument("--folder", help="where the files are made")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    lines = measure(options)
    if options.write:
        (RESULTS / "stream.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
