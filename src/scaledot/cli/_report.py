"""What ``scaledot run`` says at the end."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import rich.console
import rich.table
import rich.text

import scaledot
from scaledot.cli._head_stats import NOTABLE, HeadStats

if TYPE_CHECKING:
    from scaledot.cli._attend import Timing
    from scaledot.cli._job import Job


def anonymous_memory() -> int | None:
    """Bytes of this process's memory that belong to no file; None where it is not told."""
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            for line in status:
                if line.startswith("RssAnon:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def peak_memory() -> int | None:
    """Highest resident memory of this process so far in bytes, pages of mapped files included."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def show(
    job: Job,
    plan: scaledot.Plan,
    timing: Timing,
    output: Path,
    size: int,
    stats: HeadStats | None,
) -> None:
    """Print shapes, options, plan, time, memory and, where there are any, the heads' figures."""
    console = rich.console.Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 1000  # lines in files and pipes are not wrapped
    table = rich.table.Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name, text in [*_arrays(job), *_plan(job, plan), *_cost(plan, timing)]:
        table.add_row(name, rich.text.Text(text))
    table.add_row("output", rich.text.Text(f"{output} ({as_bytes(size)})"))
    console.print(table)
    if stats is not None:
        console.print()
        console.print(_stats_table(stats))


def _arrays(job: Job) -> list[tuple[str, str]]:
    lines = []
    for name, source in job.inputs.given.items():
        text = f"{source.shape} {source.dtype.name}"
        if name in ("query", "key", "value") and source.dtype.name != job.dtype.name:
            text += f" → {job.dtype.name}"
        lines.append((name, f"{text}  {source.place}"))
    return [*lines, ("out", f"{job.out_shape} {job.dtype.name}")]


def _plan(job: Job, plan: scaledot.Plan) -> list[tuple[str, str]]:
    given = [
        name if value is True else f"{name}={value}"
        for name, value in job.scalars.items()
        if value is not None and value is not False and name != "impl"
    ]
    total = plan.tiles_run + plan.tiles_skipped
    return [
        ("options", ", ".join(given) or "none"),
        ("implementation", f"{plan.implementation} ({plan.reason})"),
        (
            "tiles",
            f"{plan.tiles_run:,} of {total:,} run, {plan.tiles_skipped:,} skipped "
            f"({plan.block_q} queries × {plan.block_kv} keys each)",
        ),
    ]


def _cost(plan: scaledot.Plan, timing: Timing) -> list[tuple[str, str]]:
    threads = scaledot.get_num_threads()
    lines = [("time", f"{timing.total:.3g} s, of it {timing.attention:.3g} s in attention")]
    if timing.attention and plan.flops > 10**6:  # less says nothing about speed
        rate = plan.flops / timing.attention / 1e9
        text = f"{rate:.3g} GFLOP/s ({plan.flops / 1e9:.3g} GFLOP; threads: {threads})"
        lines.append(("speed", text))
    parts = []
    peak = peak_memory()
    if peak is not None:
        parts.append(f"{as_bytes(peak)} resident")
    if timing.anonymous:
        parts.append(f"{as_bytes(timing.anonymous)} anonymous, between blocks")
    if parts:
        lines.append(("peak memory", "; ".join(parts)))
    return lines


def _stats_table(stats: HeadStats) -> rich.table.Table:
    table = rich.table.Table(box=None, padding=(0, 2, 0, 0), title_justify="left")
    for heading in (
        "head", "largest weight\nmean", "\nmax", "entropy (nats)\nmean",
        f"keys over {NOTABLE:.0%}\nmean",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    columns = zip(
        stats.mean_largest, stats.max_largest, stats.mean_entropy, stats.mean_notable, strict=True
    )
    for head, (mean, most, entropy, notable) in enumerate(columns):
        table.add_row(str(head), f"{mean:.4f}", f"{most:.4f}", f"{entropy:.3f}", f"{notable:.1f}")
    return table


def as_bytes(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB" if count >= 2**20 else f"{count / 2**10:,.1f} KiB"
