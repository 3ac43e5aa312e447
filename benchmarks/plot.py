"""Picture of speed against length, all peers, from the result of a run.

    python benchmarks/plot.py benchmarks/results/NAME.json [--out docs/img/speed.png]

The cases of the picture are float32, (1, 8, length, 64), without options.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt

from report import OURS, cells_of
from workloads import Case, is_sweep

OUT = Path(__file__).parent.parent / "docs" / "img" / "speed.png"


def draw(result: dict, threads: int, out: Path) -> None:
    """Draw GFLOP/s against length, a line for each peer."""
    cells = cells_of(result, threads)
    cases = [Case(**fields) for fields in result["cases"]]
    lengths = {case.len_q: case.name for case in cases if is_sweep(case)}
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    peak = result["peaks"][str(threads)].get("tile")
    if peak:
        axes.axhline(peak, color="0.5", linestyle=":", linewidth=1)
        axes.annotate("peak of multiply-adds", (min(lengths), peak), xytext=(0, 3),
                      textcoords="offset points", color="0.4", fontsize=8)  # fmt: skip
    for (name, peer), marker in zip(result["peers"].items(), "osD^vP*X", strict=False):
        points = [
            (length, cells[case, name]["gflop_per_s"]) for length, case in sorted(lengths.items())
            if "gflop_per_s" in cells.get((case, name), {})
        ]  # fmt: skip
        if points:
            ours = name == OURS
            axes.plot(*zip(*points, strict=True), label=peer["title"], marker=marker,
                      markersize=5, linewidth=2.4 if ours else 1.3, zorder=3 if ours else 2,
                      color="#c1121f" if ours else None)  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(lengths), [f"{n:,}" for n in sorted(lengths)])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("length (queries = keys)")
    axes.set_ylabel("GFLOP/s")
    words = f"{threads} thread" + "s" * (threads > 1)
    axes.set_title(f"float32, (1, 8, length, 64), {words}\n{result['machine'][0]}", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, ncols=2, fontsize=8)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)


def main() -> None:
    """Read the result and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--threads", type=int, help="default: the most that were measured")
    options = parser.parse_args()
    mpl.use("agg")
    result = json.loads(options.result.read_text())
    threads = options.threads or max(map(int, result["peaks"]))
    draw(result, threads, options.out)


if __name__ == "__main__":
    main()
