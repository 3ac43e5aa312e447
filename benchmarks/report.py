"""Tables from the result of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workloads import Case

Result = dict[str, Any]
Cell = dict[str, Any]
OURS = "scaledot"
# dtype of a case -> whose peak it is measured by
PEAKS = {"float32": "tile", "float16": "tile", "float64": "float64", "bfloat16": "bfloat16"}


def share(case: Case, seconds: float, peaks: dict[str, float]) -> float | None:
    """Share of the measured peak: of read bandwidth to decode, else of multiply-adds."""
    if not case.flops:
        return None
    if case.decode:
        return case.kv_bytes / seconds / 1e9 / peaks["read"] if "read" in peaks else None
    # Without a micro-kernel, registers; without instructions for bfloat16, those for float32.
    peak = peaks.get(PEAKS[case.dtype], peaks.get("float32"))
    return case.flops / seconds / 1e9 / peak if peak else None


def three(x: float) -> str:
    """Three significant digits."""
    digits = 2 if x < 9.995 else 1 if x < 99.95 else 0
    return f"{x:.{digits}f}" if x >= 0.0995 else f"{x:.2g}"


def time_of(cell: Cell) -> str:
    low, high = (three(1e3 * x) for x in (cell["min_s"], cell["max_s"]))
    return f"{three(1e3 * cell['median_s'])} ({low}–{high})"


def rate_of(cell: Cell) -> str:
    if not cell["gflop_per_s"]:
        return ""
    rate = f"{three(cell['gb_per_s'])} GB/s" if "gb_per_s" in cell else three(cell["gflop_per_s"])
    return rate if cell["share"] is None else f"{rate}, {100 * cell['share']:.0f} %"


def cost_of(cell: Cell) -> str:
    return f"{max(0, cell['extra_mib']):.0f} MiB, {three(cell['first_s'])} s"


def checked_of(cell: Cell) -> str:
    return f"{cell['variant']}, {cell['error']:.1g}"


def cells_of(result: Result, threads: int) -> dict[tuple[str, str], Cell]:
    """Cells by case and peer."""
    return {(c["case"], c["peer"]): c for c in result["cells"] if c["threads"] == threads}


def grid(result: Result, threads: int, show: Callable[[Cell], str]) -> list[str]:
    """Table of cases × peers."""
    cells, peers = cells_of(result, threads), result["peers"]
    lines = ["| Case | " + " | ".join(p["title"] for p in peers.values()) + " |"]
    lines.append("|---" * (1 + len(peers)) + "|")
    for fields in result["cases"]:
        found = [cells.get((fields["name"], peer), {}) for peer in peers]
        shown = [show(cell) if "median_s" in cell else "" for cell in found]
        lines.append(f"| {Case(**fields).title} | {' | '.join(shown)} |")
    return lines


def against_others(result: Result, threads: int) -> list[str]:
    """Table of scaledot beside the fastest other, and beside what is asked of it."""
    cells = cells_of(result, threads)
    lines = [
        "| Case | scaledot, ms | fastest other, ms | times as fast | asked | of peak | asked |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in (Case(**fields) for fields in result["cases"]):
        ours = cells.get((case.name, OURS), {})
        if "median_s" not in ours:
            continue
        others = [
            cell for (name, peer), cell in cells.items()
            if name == case.name and not peer.startswith(OURS) and "median_s" in cell
            and peer in (case.against or peer)
        ]  # fmt: skip
        other = min(others, key=lambda cell: cell["median_s"], default=None)
        ratio = other["median_s"] / ours["median_s"] if other else None
        title = result["peers"][other["peer"]]["title"] if other else ""
        row = [
            case.title, three(1e3 * ours["median_s"]),
            f"{three(1e3 * other['median_s'])} {title}" if other else "",
            verdict(ratio, case.ratio, "{:.2f}×"), f"{case.ratio}×" if case.ratio else "",
            verdict(ours["share"], case.share, "{:.0%}"), f"{case.share:.0%}" if case.share else "",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(row)} |")
    return lines


def verdict(x: float | None, needed: float, form: str) -> str:
    """A figure, bold where it falls short."""
    if x is None:
        return ""
    return f"**{form.format(x)}**" if x < needed else form.format(x)


def specials(result: Result) -> list[str]:
    """Table of what is measured of scaledot alone."""
    lines = ["| Of scaledot alone | measured | asked |", "|---|---|---|"]
    for row in result["special"]:
        shown = row["shown"] if row["value"] <= row["limit"] else f"**{row['shown']}**"
        lines.append(f"| {row['title']} | {shown} | {row['asked']} |")
    return lines


def blanks(result: Result, threads: int) -> list[str]:
    """Why cells are blank, a line for each peer and reason."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for cell in cells_of(result, threads).values():
        if "reason" in cell:
            title = result["peers"][cell["peer"]]["title"]
            reasons.setdefault((title, cell["reason"]), []).append(cell["case"])
    return [f"* {title}, {', '.join(c)}: {reason}" for (title, reason), c in reasons.items()]


def markdown(result: Result) -> str:
    """The whole result as a page."""
    lines = [f"# {result.get('title', 'Speed')}", "", *result["machine"], ""]
    for peer in result["peers"].values():
        found = ", ".join(f"{name} {x}" for name, x in peer["versions"].items())
        lines.append(f"* {peer['title']}: {found or peer['reason']}")
    lines += ["", f"{result['rounds']} rounds, the peers in turn. Load of the machine before and "
              f"after: {result['load'][0]:.1f}, {result['load'][1]:.1f}.", ""]  # fmt: skip
    lines += [result["about"], ""] if result.get("about") else []
    for threads, peaks in ((int(n), x) for n, x in result["peaks"].items()):
        shown = ", ".join(f"{name} {x:.0f}" for name, x in peaks.items() if name != "read")
        lines += [
            f"## {threads} {'thread' if threads == 1 else 'threads'}", "",
            f"Peak in GFLOP/s: {shown}; read bandwidth {peaks.get('read', 0):.1f} GB/s.", "",
            "### scaledot and the fastest other; bold falls short of what is asked", "",
            *against_others(result, threads), "",
            "### Milliseconds: median of the rounds (fastest to slowest round)", "",
            *grid(result, threads, time_of), "",
            "### GFLOP/s on visible scores, GB/s of K and V to decode, and share of the peak", "",
            *grid(result, threads, rate_of), "",
            "### Memory of a call above that before it, and time to the first result", "",
            *grid(result, threads, cost_of), "",
            "### Variant taken, and largest error against float64 in the rows checked", "",
            *grid(result, threads, checked_of), "", *blanks(result, threads), "",
        ]  # fmt: skip
    if result["special"]:
        lines += ["## Other figures", "", *specials(result), ""]
    return "\n".join(lines)
