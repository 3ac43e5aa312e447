"""Speed of scaledot beside other implementations: peers × cases × threads.

    python benchmarks/run.py --setup torch jax ...     # environments of peers, once
    python benchmarks/run.py --write NAME              # results/NAME.json and results/NAME.md
    python benchmarks/run.py --gradients --write NAME  # forward and backward together

Every answer is checked against float64 before it is timed. Peers run in processes of their own and
are timed in turn, A B C A B C ...; see README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fnmatch
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradients
import machine
import report
from plugins import HERE, Peer, PeerError, discover, environment, set_up
from workloads import SWEEP, TABLE, Case

PATIENCE = 120  # seconds that a peer may take to build a case and call it
LONGEST = 3.0  # seconds of timing after which a slow cell gets no more rounds


def note(text: str) -> None:
    """Print how far it is."""
    print(text, file=sys.stderr, flush=True)


def child(scratch: Path, *arguments: str, **variables: str) -> dict[str, Any]:
    """Run one of our scripts with scaledot's interpreter and read the JSON that it prints."""
    done = subprocess.run(
        [sys.executable, HERE / arguments[0], *arguments[1:]],
        env=environment(scratch, own=True) | variables, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} failed: {done.stderr.strip()[-500:]}")
    return json.loads(done.stdout)


@contextlib.contextmanager
def inputs(case: Case, scratch: Path) -> Iterator[Path]:
    """Folder with the arrays of a case, in memory where the system has such a folder."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else scratch) as name:
        case.write_inputs(Path(name))
        yield Path(name)


def prepared(peer: Peer, case: Case, folder: Path) -> dict[str, Any]:
    """Let a peer build its variants; return its fastest right one, or why there is none."""
    try:
        answer = peer.ask(PATIENCE, do="prepare", case=dataclasses.asdict(case), folder=str(folder))
    except PeerError as error:
        return {"reason": str(error)}
    failed, arrays = answer["failed"], case.read_inputs(folder, mmap=True)
    trained = case.passes != "forward"
    best: dict[str, Any] = {}
    for name, variant in answer["variants"].items():
        rows = variant.pop("rows")
        judged = gradients.judge(case, folder, rows) if trained else case.judge(arrays, rows)
        error, excess = judged
        if not excess <= 1:
            failed[name] = f"not exact: error {error:.2g}, {excess:.2g} times what is allowed"
        elif not best or variant["usual_s"] < best["usual_s"]:
            best = {"variant": name, "error": error, "excess": excess, **variant}
    reasons = "; ".join(dict.fromkeys(failed.values()))
    return best or {"reason": reasons or "has no way to do this"}


def time_case(case: Case, peers: list[Peer], scratch: Path, options: Any) -> list[dict[str, Any]]:
    """Cells of all peers for one case."""
    cells = []
    with inputs(case, scratch) as folder:
        for peer in peers:
            about = {"case": case.name, "peer": peer.plugin.name, "threads": peer.threads}
            asked = not case.alone or peer.plugin.name.startswith(report.OURS)
            cell = about | (prepared(peer, case, folder) if asked else {"reason": "not asked"})
            slow = cell.get("usual_s", 0) > LONGEST  # then the call that was checked has to do
            cells.append((peer, cell, [[cell["usual_s"]]] if slow else []))
    for turn in range(options.rounds):
        for peer, cell, rounds in cells:
            usual = cell.get("usual_s", 0)
            if "reason" in cell or usual > LONGEST or (turn > 1 and turn * usual > LONGEST):
                continue
            count = min(1000, max(1, round(options.seconds / usual)))
            command = {"variant": cell["variant"], "count": count, "limit": 2 * options.seconds}
            try:
                rounds.append(peer.ask(PATIENCE, do="run", **command)["seconds"])
            except PeerError as error:
                cell["reason"] = str(error)
    return [cell if "reason" in cell else summed(case, cell, r) for _, cell, r in cells]


def median(numbers: list[float]) -> float:
    """Middle of the numbers."""
    ordered, middle = sorted(numbers), len(numbers) // 2
    return (ordered[middle] + ordered[-1 - middle]) / 2


def summed(case: Case, cell: dict[str, Any], rounds: list[list[float]]) -> dict[str, Any]:
    """A cell with its figures: each round's median counts once."""
    middles = [median(seconds) for seconds in rounds]
    seconds = median(middles)
    figures = {"median_s": seconds, "min_s": min(middles), "max_s": max(middles)}
    figures["calls"] = sum(map(len, rounds))
    figures["gflop_per_s"] = case.flops / seconds / 1e9
    if case.decode:
        figures["gb_per_s"] = case.kv_bytes / seconds / 1e9
    return cell | figures


def special_rows(scratch: Path, cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Figures of scaledot alone."""

    def row(title: str, value: float, limit: float, unit: str) -> dict[str, Any]:
        shown, asked = f"{report.three(value)} {unit}", f"at most {limit:g} {unit}"
        return {"title": title, "value": value, "limit": limit, "shown": shown, "asked": asked}

    rows = [
        row(
            f"{case.title}, {cell['threads']} threads",
            1e6 * cell["median_s"],
            1e6 * case.seconds,
            "µs",
        )
        for case in TABLE
        for cell in cells
        if case.seconds and case.name == cell["case"] and cell["peer"] == report.OURS
    ]
    found = 1e3 * child(scratch, "special.py", "weights")["seconds"]
    rows.append(row("`attention_weights`, 16 rows of f32 (1, 8, 8192, 64)", found, 3, "ms"))
    cold, warm = [], []
    for n in range(3):
        cache = str(scratch / f"kernels-{n}")
        for kind in (cold, warm):
            kind.append(child(scratch, "special.py", "first", SCALEDOT_CACHE_DIR=cache)["seconds"])
    rows.append(row("first call, imports included, no kernels on disk", median(cold), 6, "s"))
    rows.append(row("first call, imports included, kernels on disk", median(warm), 0.9, "s"))
    extra = child(scratch, "special.py", "memory")["mib"]
    rows.append(row("extra memory of f32 (1, 1, 32768, 64)", extra, 64, "MiB"))
    if importlib.util.find_spec("torch"):
        found = child(scratch, "special.py", "beside")
        slower = max(found["between"], found["after"]) / found["before"]
        title = "PyTorch's own attention between and after scaledot's calls, by the time before"
        rows.append(row(title, slower, 1.1, "×"))
    return rows


def measure(options: Any, cases: list[Case], scratch: Path) -> dict[str, Any]:
    """Run everything that was asked for."""
    plugins = {n: x for n, x in discover(options.package).items() if n in options.peers}
    result: dict[str, Any] = {
        "machine": machine.describe(), "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "rounds": options.rounds, "load": [os.getloadavg()[0]], "peaks": {}, "cells": [],
        "cases": [dataclasses.asdict(case) for case in cases], "special": [],
        "peers": {n: {"title": x.title, "versions": {}, "reason": ""} for n, x in plugins.items()},
        "title": gradients.TITLE if options.gradients else "Speed",
        "about": gradients.ABOUT if options.gradients else "",
    }  # fmt: skip
    for threads in options.threads:
        before = child(scratch, "peaks.py", str(threads))
        peers = []
        with contextlib.ExitStack() as stack:
            for plugin in plugins.values():
                peer = Peer(plugin, threads, scratch)
                stack.callback(peer.stop)
                try:
                    peer.start()
                    peers.append(peer)
                    result["peers"][plugin.name]["versions"] = peer.versions
                except PeerError as error:
                    result["peers"][plugin.name]["reason"] = str(error)
                    note(f"{plugin.title}: {error}")
            for case in cases:
                start = time.perf_counter()
                cells = time_case(case, peers, scratch, options)
                result["cells"] += cells
                shown = [f"{c['peer']} {1e3 * c['median_s']:.3g}" for c in cells if "variant" in c]
                note(f"{threads} threads, {case.title}: {', '.join(shown)} ms "
                     f"[{time.perf_counter() - start:.0f} s]")  # fmt: skip
        after = child(scratch, "peaks.py", str(threads))
        # The better of both: a peak is what the processor can do undisturbed.
        peaks = {n: max(x, after.get(n, x)) for n, x in before.items() if not isinstance(x, str)}
        result["peaks"][str(threads)] = peaks
        for cell in result["cells"]:
            if cell["threads"] == threads and "median_s" in cell:
                case = next(case for case in cases if case.name == cell["case"])
                cell["share"] = report.share(case, cell["median_s"], peaks)
    if options.special and "scaledot" in plugins:
        result["special"] = special_rows(scratch, result["cells"])
    result["load"].append(os.getloadavg()[0])
    return result


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = list(discover())
    trainers = list(discover(gradients.PACKAGE))
    add = parser.add_argument
    add("--gradients", action="store_true", help="time forward and backward together; peers: "
        + ", ".join(trainers) + "; cases: " + ", ".join(c.name for c in gradients.GRADIENTS))
    add("--setup", nargs="+", choices=names, metavar="PEER", help="make environments, then stop")
    add("--peers", nargs="+", choices=dict.fromkeys(names + trainers), default=names + trainers,
        metavar="PEER", help=", ".join(names))  # fmt: skip
    add("--cases", nargs="+", default=["*"], metavar="PATTERN",
        help=", ".join(case.name for case in TABLE + SWEEP))  # fmt: skip
    add("--threads", nargs="+", type=int, default=[2])
    add("--rounds", type=int, help="default 5")
    add("--seconds", type=float, help="of timing for a peer in a round, default 0.15")
    add("--shrink", type=int, default=1, metavar="N", help="try out: lengths divided by N")
    add("--quick", action="store_true", help="2 rounds of 0.05 s, without the sweep of lengths")
    add("--no-special", dest="special", action="store_false", help="leave out special.py")
    add("--write", metavar="NAME", help="write results/NAME.json and results/NAME.md")
    options = parser.parse_args()
    options.rounds = options.rounds or (2 if options.quick else 5)
    options.seconds = options.seconds or (0.05 if options.quick else 0.15)
    options.package = gradients.PACKAGE if options.gradients else "peers"
    options.special = options.special and not options.gradients
    return options


def main() -> None:
    """Set up environments, or measure and print."""
    options = arguments()
    if options.setup:
        for name in options.setup:
            set_up(discover()[name])
        return
    known = TABLE if options.quick else TABLE + SWEEP
    known = gradients.GRADIENTS if options.gradients else known
    cases = [c for c in known if any(fnmatch.fnmatch(c.name, p) for p in options.cases)]
    cases = [c.shrunk(options.shrink) for c in cases]
    scratch = Path(tempfile.mkdtemp(prefix="scaledot-bench-"))
    try:
        result = measure(options, cases, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    page = report.markdown(result)
    print(page)
    if options.write:
        folder = HERE / "results"
        (folder / f"{options.write}.json").write_text(json.dumps(result, indent=1) + "\n")
        (folder / f"{options.write}.md").write_text(page)


if __name__ == "__main__":
    main()
