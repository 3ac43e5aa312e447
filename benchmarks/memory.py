"""Extra memory of one call, option by option: peak of resident memory above that before.

    python benchmarks/memory.py [--length 16384] [--write]

Each option runs in a process of its own. The kernel's high-water mark is reset after a warm-up,
right before the call; the result is not counted. ``--write`` renews
results/memory.md, or results/memory-IMPL.md.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import machine
import scaledot as sd

NUM_HEADS, D = 4, 64
LIMIT_MIB = 200
RESULTS = Path(__file__).parent / "results"

Options = dict[str, Any]


def lower_triangle(n: int) -> Any:
    return np.tri(n, dtype=bool)


OPTIONS: dict[str, Callable[[int], Options]] = {
    "none": lambda n: {},
    "causal": lambda n: {"causal": True},
    "causal, top-left": lambda n: {"causal": True, "q_offset": 0},
    "window": lambda n: {"window": (512, 512)},
    "mask": lambda n: {"mask": lower_triangle(n)},
    "mask of keys": lambda n: {"mask": np.arange(n) < n - 100},
    "bias": lambda n: {"bias": np.ones((n, n), dtype=np.float32)},
    "bias, float64": lambda n: {"bias": np.broadcast_to(np.ones(n), (n, n))},
    "segment_ids": lambda n: {"segment_ids": np.arange(n) // 1000},
    "kv_len": lambda n: {"kv_len": n - n // 16},
    "scale": lambda n: {"scale": 0.5},
    "softcap": lambda n: {"softcap": 20.0},
    "alibi_slopes": lambda n: {"alibi_slopes": 0.5 ** np.arange(1, NUM_HEADS + 1)},
    "sinks": lambda n: {"sinks": np.zeros(NUM_HEADS)},
    "score_mod": lambda n: {"score_mod": lambda s, b, h, i, j: s + 0.001 * (i - j)},
    "mask_mod": lambda n: {"mask_mod": lambda b, h, i, j: (i - j) % 2 == 0},
    "block_mask": lambda n: {"block_mask": np.tri(-(-n // 128), dtype=bool)},
    "dropout": lambda n: {"dropout": 0.1, "seed": 1},
}


def status_kib(field: str) -> int:
    """A figure of /proc/self/status, in KiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise KeyError(field)


def measure(name: str, length: int, impl: str) -> None:
    """Print extra memory in MiB, what explain says of it, and seconds."""
    rng = np.random.default_rng(0)
    shape = (1, NUM_HEADS, length, D)
    query, key, value = (rng.standard_normal(shape, dtype=np.float32) for _ in range(3))
    options = OPTIONS[name](length)
    warm = OPTIONS[name](600)
    sd.attention(query[:, :, :600], key[:, :, :600], value[:, :, :600], impl=impl, **warm)
    plan = sd.explain(query, key, value, impl=impl, **options)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before, start = status_kib("VmRSS"), time.perf_counter()
    out = sd.attention(query, key, value, impl=impl, **options)
    seconds = time.perf_counter() - start
    extra = (status_kib("VmHWM") - before) / 1024 - out.nbytes / 2**20
    print(extra, plan.peak_extra_memory / 2**20, seconds)


def table(length: int, impl: str) -> list[str]:
    """Lines of the table, measured now."""
    lines = [
        f"# Extra memory at length {length:,}, {NUM_HEADS} heads, d = {D}, float32, impl={impl!r}",
        "",
        *machine.describe(),
        f"{sd.get_num_threads()} threads. The {NUM_HEADS * length**2:,} scores alone would take "
        f"{NUM_HEADS * length**2 * 4 / 2**30:.1f} GiB. Required: under {LIMIT_MIB} MiB.",
        "",
        "| Option | extra memory, MiB | by `explain`, MiB | seconds |",
        "|---|---|---|---|",
    ]
    print(*lines, sep="\n")
    for name in OPTIONS:
        command = [sys.executable, __file__, "--one", name, "--length", str(length), "--impl", impl]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        extra, planned, seconds = map(float, output.split())
        verdict = "" if extra < LIMIT_MIB else " **over**"
        lines.append(f"| {name} | {extra:.1f}{verdict} | {planned:.1f} | {seconds:.2f} |")
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    """Run one option or the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=16_384)
    parser.add_argument("--impl", default="auto")
    parser.add_argument("--one", choices=OPTIONS)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    if arguments.one:
        measure(arguments.one, arguments.length, arguments.impl)
        return
    lines = table(arguments.length, arguments.impl)
    if arguments.write:
        name = "memory" if arguments.impl == "auto" else f"memory-{arguments.impl}"
        (RESULTS / f"{name}.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
