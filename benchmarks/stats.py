"""Statistics of attention beside the forward pass, and beside the whole matrix in NumPy.

    python stats.py [--repeats 5] [--threads 2] [--write]

The ways are measured in turns in one process, after their answers were compared. Extra memory is
the peak of anonymous memory during a call above that before it, in a process of its own; the result
is not counted. ``--write`` puts the table into results/stats.md and .json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import machine
import scaledot as sd
from memory import status_kib

RESULTS = Path(__file__).parent / "results"
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
WHOLE = 4096
"""Longest input whose matrix of weights is made in NumPy."""
MAP = (64, 64)


class Case(NamedTuple):
    """One input."""

    num_heads: int
    length: int
    dtype: str = "float32"
    causal: bool = False

    def arrays(self) -> tuple[Any, ...]:
        """Query, key and value (num_heads, length, 64)."""
        rng = np.random.default_rng(0)
        shape = (3, self.num_heads, self.length, 64)
        return tuple(rng.standard_normal(shape, np.float32).astype(DTYPES[self.dtype]))

    def stats(self, query: Any, key: Any) -> sd.Stats:
        """All statistics, with a map."""
        shape = (min(MAP[0], self.length), min(MAP[1], self.length))
        return sd.attention_stats(query, key, causal=self.causal, map_shape=shape, last=32)


CASES = (
    Case(144, 64), Case(8, 1024), Case(8, 4096), Case(8, 4096, causal=True),
    Case(8, 4096, "bfloat16"), Case(1, 32768), Case(1, 32768, causal=True),
    Case(1, 100_000, causal=True),
)  # fmt: skip


def textbook(query: Any, key: Any, causal: bool) -> dict[str, Any]:
    """The same from all weights of one head after the other, as one writes it in NumPy."""
    found: dict[str, list[Any]] = {"entropy": [], "received": [], "top_weights": []}
    for q, k in zip(query.astype(np.float32), key.astype(np.float32), strict=True):
        w = q @ k.T / 8
        if causal:
            w[np.triu_indices(len(w), 1)] = -np.inf
        w -= w.max(axis=-1, keepdims=True)
        np.exp(w, out=w)
        w /= w.sum(axis=-1, keepdims=True)
        found["entropy"].append(-(w * np.log(np.maximum(w, 1e-37))).sum(axis=-1))
        found["received"].append(w.sum(axis=0))
        top = np.argpartition(w, -8, axis=-1)[:, -8:]
        found["top_weights"].append(np.sort(np.take_along_axis(w, top, axis=-1))[:, ::-1])
    return {name: np.stack(x) for name, x in found.items()}


def check(stats: sd.Stats, truth: dict[str, Any]) -> None:
    """Fail unless the ways agree."""
    for name, x in truth.items():
        error = float(np.abs(getattr(stats, name) - x).max() / np.abs(x).max())
        if error > 0.02:  # of bfloat16's products
            raise SystemExit(f"{name} is off by {error:.2g}")


def seconds_of(ways: list[Callable[[], Any]], repeats: int) -> list[list[float]]:
    """Seconds of each way, measured in turns."""
    times: list[list[float]] = [[] for _ in ways]
    for _ in range(repeats):
        for place, way in enumerate(ways):
            start = time.perf_counter()
            way()
            times[place].append(time.perf_counter() - start)
    return times


def measure(case: Case, repeats: int) -> dict[str, Any]:
    """One row of the table."""
    query, key, value = case.arrays()
    ways: list[Callable[[], Any]] = [
        lambda: sd.attention(query, key, value, causal=case.causal),
        lambda: case.stats(query, key),
    ]
    if case.length <= WHOLE:
        check(case.stats(query, key), textbook(query, key, case.causal))
        ways.append(lambda: textbook(query, key, case.causal))
    for way in ways[:2]:
        way()
    times = seconds_of(ways, repeats if case.length <= 2 * WHOLE else min(repeats, 3))
    middle = [statistics.median(t) for t in times]
    command = [sys.executable, __file__, "--memory", str(CASES.index(case))]
    extra = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {
        **case._asdict(), "forward": middle[0], "stats": middle[1],
        "textbook": middle[2] if len(middle) > 2 else None, "extra_mib": extra,
        "spread": [max(t) / min(t) for t in times],
    }  # fmt: skip


def print_memory(case: Case) -> None:
    """Print the extra memory of one call in MiB."""
    query, key, _ = case.arrays()
    case.stats(query[:, :600], key[:, :600])
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = status_kib("VmRSS")
    stats = case.stats(query, key)
    held = sum(x.nbytes for x in stats if x is not None)
    print((status_kib("VmHWM") - before) / 1024 - held / 2**20)


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The table in Markdown."""
    lines = [
        "| Heads × length, d = 64 | forward, ms | statistics, ms | ratio | matrix in NumPy, ms "
        "| extra memory, MiB |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        name = f"{row['num_heads']} × {row['length']:,} {row['dtype']}"
        name += ", causal" if row["causal"] else ""
        whole = "" if row["textbook"] is None else f"{row['textbook'] * 1e3:,.1f}"
        ratio = row["stats"] / row["forward"]
        lines.append(
            f"| {name} | {row['forward'] * 1e3:,.1f} | {row['stats'] * 1e3:,.1f} | {ratio:.2f} "
            f"| {whole} | {row['extra_mib']:.1f} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--memory", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sd.set_num_threads(options.threads)
    if options.memory is not None:
        print_memory(CASES[options.memory])
        return
    rows = []
    for case in CASES:
        rows.append(measure(case, options.repeats))
        print(table(rows[-1:])[-1], flush=True)
    if options.write:
        described = [
            "# Statistics of attention", "", *(f"* {line}" for line in machine.describe()),
            f"* {options.threads} threads; medians of runs in turns; top_k = 8, last = 32, a map "
            "of 64 × 64", "", *table(rows), "",
        ]  # fmt: skip
        (RESULTS / "stats.md").write_text("\n".join(described))
        (RESULTS / "stats.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
