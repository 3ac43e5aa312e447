"""Packed sequences of different lengths beside the same sequences padded to the longest.

    python benchmarks/varlen.py --write              # results/varlen.json and results/varlen.md
    python benchmarks/varlen.py --rounds 1 --cases f32   # to try something out

Every answer is checked against float64, in all sequences of one head, before it is timed. Peers run
in processes of their own and are timed in turn, as by `run.py`; the environment of PyTorch is its.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import gradients
from plugins import HERE, Peer, PeerError, Plugin, discover, environment
from report import three
from workloads import Arrays, Case

LONGEST = 1024
HEADS, D = 8, 64
ABOUT = (
    "A batch of 16 sequences of 1 to 1024 tokens, one in each sixteenth of that range: "
    "half of a padded batch is padding. 8 heads, d 64. scaledot gets them packed, PyTorch padded "
    "to the longest with a boolean mask, or one after the other; preparing any of that is not "
    "timed. GFLOP/s count visible scores, seven products for forward and backward. Milliseconds "
    "are medians of rounds (fastest to slowest)."
)
PATIENCE = 120  # seconds that a peer may take to prepare a case


@dataclasses.dataclass(frozen=True)
class Packed:
    """A batch of sequences, with as many keys as queries each."""

    name: str
    dtype: str
    causal: bool
    backward: bool

    @property
    def title(self) -> str:
        """What a table calls it."""
        words = [{"bfloat16": "bf16"}.get(self.dtype, "f32")] + ["causal"] * self.causal
        return " ".join(words) + (", forward + backward" if self.backward else ", forward")

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        rng, step = np.random.default_rng(5), LONGEST // 16
        return [int(x) for x in rng.permutation(np.arange(16) * step + rng.integers(1, step + 1))]

    def alone(self, length: int) -> Case:
        """One head of one sequence."""
        return Case("", 1, 1, length, D, dtype=self.dtype, causal=self.causal, passes="backward")

    @property
    def flops(self) -> int:
        """Operations of the products, on visible scores."""
        passes = "backward" if self.backward else "forward"
        return sum(
            HEADS * dataclasses.replace(self.alone(n), passes=passes).flops for n in self.lengths
        )

    def inputs(self) -> Arrays:
        """Packed query, key, value and gradient of the result."""
        rng, tokens = np.random.default_rng(7), sum(self.lengths)
        dtype = self.alone(1).numpy_dtype
        return {
            name: rng.standard_normal((tokens, HEADS, D), dtype=np.float32).astype(dtype)
            for name in ("query", "key", "value", "grad_out")
        }


CASES = [
    Packed("-".join(["f32" if dtype == "float32" else "bf16", *["causal"] * causal,
                     "train" if backward else "forward"]), dtype, causal, backward)
    for backward, dtype, causal in itertools.product((False, True), ("float32", "bfloat16"),
                                                     (False, True))
]  # fmt: skip


# The process of a peer. A peer makes, of a case and its arrays, a call and what turns its results
# into packed arrays.

Made = tuple[Callable[[], Any], Callable[[Any], list[np.ndarray]]]


def pulled(case: Packed, x: dict[str, Any], attend: Callable[..., Any]) -> Callable[[], list[Any]]:
    """The call: ``attend`` of query, key and value, and with a backward pass their gradients."""
    import torch

    grad_out, operands = x["grad_out"], [x[name] for name in ("query", "key", "value")]
    if not case.backward:
        return lambda: [attend(*operands)]
    operands = [t.requires_grad_() for t in operands]

    def call() -> list[Any]:
        out = attend(*operands)
        return [out.detach(), *torch.autograd.grad(out, operands, grad_out)]

    return call


def packed_by_scaledot(case: Packed, x: dict[str, Any], threads: int) -> Made:
    """Scaledot on packed tensors."""
    import scaledot as sd

    sd.set_num_threads(threads)
    starts = [0, *itertools.accumulate(case.lengths)]

    def attend(query: Any, key: Any, value: Any) -> Any:
        return sd.varlen_attention(query, key, value, starts, starts, causal=case.causal)

    return pulled(case, x, attend), lambda found: [t.double().numpy() for t in found]


def padded_by_torch(case: Packed, x: dict[str, Any], threads: int) -> Made:
    """PyTorch's attention of padded tensors, (sequences, heads, longest, d), under a mask."""
    import torch

    longest = max(case.lengths)
    held = torch.arange(longest) < torch.tensor(case.lengths)[:, None]  # (sequences, longest)
    mask = held[:, None, None, :]
    if case.causal:
        mask = mask & torch.ones(longest, longest, dtype=torch.bool).tril()

    def padded(t: Any) -> Any:
        wide = t.new_zeros(len(case.lengths), longest, HEADS, D)
        wide[held] = t
        return wide.transpose(1, 2).contiguous()

    def attend(query: Any, key: Any, value: Any) -> Any:
        attention = torch.nn.functional.scaled_dot_product_attention
        return attention(query, key, value, attn_mask=mask)

    call = pulled(case, {name: padded(t) for name, t in x.items()}, attend)
    return call, lambda found: [t.transpose(1, 2)[held].double().numpy() for t in found]


def each_by_torch(case: Packed, x: dict[str, Any], threads: int) -> Made:
    """PyTorch's attention of one sequence after the other, without a mask."""
    import torch

    def first_heads(t: Any) -> list[Any]:
        return [part.transpose(0, 1)[None].contiguous() for part in t.split(case.lengths)]

    parts = {name: first_heads(t) for name, t in x.items()}
    calls = [
        pulled(case, {name: parts[name][i] for name in parts}, lambda query, key, value:
               torch.nn.functional.scaled_dot_product_attention(query, key, value,
                                                                is_causal=case.causal))
        for i in range(len(case.lengths))
    ]  # fmt: skip

    def joined(found: Any) -> list[np.ndarray]:
        return [torch.cat([t[0].transpose(0, 1) for t in same]).double().numpy()
                for same in zip(*found, strict=True)]  # fmt: skip

    return lambda: [call() for call in calls], joined


MAKES = {
    "scaledot": packed_by_scaledot, "torch": padded_by_torch, "torch_each": each_by_torch,
}  # fmt: skip
TITLES = {
    "scaledot": "scaledot, packed", "torch": "PyTorch, padded",
    "torch_each": "PyTorch, one after the other",
}  # fmt: skip


def serve(name: str, threads: int) -> None:
    """Answer commands, a JSON object a line, like `worker.py`."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch

    from peers._tensors import tensors

    torch.set_num_threads(threads)
    call: Callable[[], Any] = list

    def timed() -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    print(json.dumps({"versions": {"torch": torch.__version__}}), file=channel, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if command["do"] == "prepare":
                case = Packed(**command["case"])
                call, named = MAKES[name](case, tensors(case.inputs()), threads)
                np.savez(command["results"], *named(call()))
                answer: dict[str, Any] = {"usual_s": min(timed() for _ in range(3))}
            else:
                gc.collect()
                call()
                answer = {"seconds": [timed() for _ in range(command["count"])]}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:200]}
        print(json.dumps(answer), file=channel, flush=True)


# The process that times them


class Server(Peer):
    """A peer that is served by this script."""

    def start(self) -> None:
        """Start the process and learn its versions."""
        python = self.plugin.python
        if python is None:
            raise PeerError("not installed: python benchmarks/run.py --setup torch")
        log = self._log.open("a")
        command = [python, Path(__file__), "--serve", self.plugin.name, str(self.threads)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            env=environment(self.scratch, own=not self.plugin.env),
        )  # fmt: skip
        log.close()
        self.versions = self._answer(PATIENCE)["versions"]


def judge(case: Packed, found: list[np.ndarray]) -> float:
    """Largest ratio of an error to what is allowed, over all sequences of the last head."""
    arrays, worst, start = case.inputs(), 0.0, 0
    working = np.dtype("float32")
    exact, rounding = np.finfo(working).eps, float(ml_dtypes.finfo(arrays["query"].dtype).eps)
    for length in case.lengths:
        rows = slice(start, start + length)
        part = {name: x[rows, -1][None, None] for name, x in arrays.items()}
        truth, near = (
            gradients._Head(case.alone(length), part, None, computed, dtype).results()
            for computed, dtype in (("float64", np.dtype("float64")),
                                    ("float32", arrays["query"].dtype))
        )  # fmt: skip
        for name, x in zip(("out", "query", "key", "value"), found, strict=False):
            size = np.abs(truth[name]).max()
            factor = 2 if name == "out" else 3
            # A gradient may be 0 where its terms are not, as that of a single key's score is.
            size = max(size, float(np.abs(part["grad_out"].astype(np.float64)).max()))
            allowed = factor * np.abs(near[name] - truth[name]).max()
            allowed += (rounding + exact * length**0.5) * size
            error = np.abs(x[rows, -1] - truth[name]).max()
            worst = max(worst, float(error / allowed)) if error == error else np.inf
        start += length
    return worst


def prepared(case: Packed, peer: Server, scratch: Path) -> dict[str, Any]:
    """Let a peer build a case; seconds of a call, or why there is none."""
    results = scratch / "results.npz"
    try:
        answer = peer.ask(PATIENCE, do="prepare", case=dataclasses.asdict(case),
                          results=str(results))  # fmt: skip
    except PeerError as error:
        return {"reason": str(error)}
    with np.load(results) as file:
        excess = judge(case, [file[name] for name in file.files])
    if not excess <= 1:
        return {"reason": f"not exact: {excess:.2g} times what is allowed"}
    return answer | {"excess": excess}


def time_case(case: Packed, peers: list[Server], scratch: Path, options: Any) -> list[Any]:
    """Cells of all peers for one case."""
    cells = [
        {"case": case.name, "peer": peer.plugin.name, "threads": peer.threads, "rounds": []}
        | prepared(case, peer, scratch) for peer in peers
    ]  # fmt: skip
    for _ in range(options.rounds):
        for peer, cell in zip(peers, cells, strict=True):
            if "reason" in cell:
                continue
            count = min(1000, max(1, round(options.seconds / cell["usual_s"])))
            seconds = peer.ask(PATIENCE, do="run", count=count)["seconds"]
            cell["rounds"].append(float(np.median(seconds)))
    for cell in cells:
        if cell["rounds"]:
            cell["median_s"] = float(np.median(cell["rounds"]))
            cell["gflop_per_s"] = case.flops / cell["median_s"] / 1e9
    return cells


def markdown(result: dict[str, Any]) -> str:
    """The whole result as a page."""
    load = ", ".join(f"{x:.1f}" for x in result["load"])
    lines = ["# Packed sequences", "", *result["machine"], "", ABOUT, "",
             f"{result['rounds']} rounds, the peers in turn. Load of the machine before and after: "
             f"{load}.", ""]  # fmt: skip
    for threads in result["threads"]:
        lines += [f"## {threads} {'thread' if threads == 1 else 'threads'}", "",
                  "| Milliseconds, GFLOP/s | " + " | ".join(TITLES.values())
                  + " | times as fast as padded, as the faster |",
                  "|---" * (2 + len(TITLES)) + "|"]  # fmt: skip
        for case in CASES:
            cells = {c["peer"]: c for c in result["cells"]
                     if c["case"] == case.name and c["threads"] == threads}  # fmt: skip
            if not cells:
                continue
            timed = {n: c["median_s"] for n, c in cells.items() if "median_s" in c}
            own = timed.pop("scaledot", None)
            others = [timed.get("torch"), min(timed.values(), default=None)]
            ratio = ", ".join(f"{x / own:.2f}×" for x in others if x and own)
            shown = [cell_text(cells.get(name, {})) for name in TITLES]
            lines.append(f"| {case.title} | {' | '.join(shown)} | {ratio} |")
        lines.append("")
    return "\n".join(lines)


def cell_text(cell: dict[str, Any]) -> str:
    """What a table says of a cell."""
    if "median_s" not in cell:
        return cell.get("reason", "")
    low, high = (three(1e3 * f(cell["rounds"])) for f in (min, max))
    return f"{three(1e3 * cell['median_s'])} ({low}–{high}), {three(cell['gflop_per_s'])}"


def measure(options: Any, scratch: Path) -> dict[str, Any]:
    """Run all cases that were asked for."""
    import machine

    requirements = discover()["torch"].requirements
    plugins = [
        Plugin(n, title, "" if n == "scaledot" else "torch", requirements, "")
        for n, title in TITLES.items()
    ]
    cases = [case for case in CASES if any(case.name.startswith(p) for p in options.cases)]
    result: dict[str, Any] = {
        "machine": machine.describe(), "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "rounds": options.rounds, "threads": options.threads, "load": [os.getloadavg()[0]],
        "lengths": CASES[0].lengths, "cells": [],
    }  # fmt: skip
    for threads in options.threads:
        peers = [Server(plugin, threads, scratch) for plugin in plugins]
        with contextlib.ExitStack() as stack:
            for peer in peers:
                stack.callback(peer.stop)
            for case in cases:
                cells = time_case(case, peers, scratch, options)
                result["cells"] += cells
                shown = [f"{c['peer']} {1e3 * c['median_s']:.3g}" if "median_s" in c
                         else f"{c['peer']}: {c['reason']}" for c in cells]  # fmt: skip
                print(f"{threads} threads, {case.title}: {', '.join(shown)} ms", file=sys.stderr)
    result["load"].append(os.getloadavg()[0])
    return result


def main() -> None:
    """Measure and print, or serve one peer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--serve", nargs=2, metavar=("PEER", "THREADS"), help=argparse.SUPPRESS)
    add("--cases", nargs="+", default=[""], metavar="START", help=", ".join(c.name for c in CASES))
    add("--threads", nargs="+", type=int, default=[2])
    add("--rounds", type=int, default=5)
    add("--seconds", type=float, default=0.5, help="of timing for a peer in a round")
    add("--write", action="store_true", help="write results/varlen.json and results/varlen.md")
    options = parser.parse_args()
    if options.serve:
        serve(options.serve[0], int(options.serve[1]))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that peers are ended
    scratch = Path(tempfile.mkdtemp(prefix="scaledot-bench-"))
    try:
        result = measure(options, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    page = markdown(result)
    print(page)
    if options.write:
        (HERE / "results" / "varlen.json").write_text(json.dumps(result, indent=1) + "\n")
        (HERE / "results" / "varlen.md").write_text(page)


if __name__ == "__main__":
    main()
