"""Ring attention on two processes with one thread each, beside one process with two threads.

    python benchmarks/ring.py [--rounds 3] [--lengths 8192 16384]
    python benchmarks/ring.py --docs      writes the tables of docs/scaling.md from the results

Measures what the model of `scaling_model` needs, the time of a message by its size and the rate of
one thread, then times the calls, both ways in turn, and puts the model's prediction beside each.
Outputs are compared with float64 before anything is timed. Results: results/ring.md and ring.json.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import machine
import scaling_model as model

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PAGE = HERE.parent / "docs" / "scaling.md"
NUM_HEADS, D, WORLD_SIZE = 8, 64, 2
SIZES = [2**power for power in range(10, 27, 4)]  # bytes of a message
LIMIT = 1.15  # the ring's time, in those of one process
RATE_LENGTH = 4096

Call = dict[str, Any]


def calls(lengths: Sequence[int]) -> list[Call]:
    """What is timed."""
    return [
        {"length": n, "dtype": dtype, "causal": causal, "back": back}
        for n in lengths for dtype in ("float32", "bfloat16") for causal in (True, False)
        for back in (False, True)
    ]  # fmt: skip


def title_of(call: Call) -> str:
    kind = "causal, zigzag" if call["causal"] else "full, contiguous"
    passes = "forward + backward" if call["back"] else "forward"
    return f"{call['dtype']} (1, {NUM_HEADS}, {call['length']}, {D}) {kind}, {passes}"


# A process that is timed


def own_tokens(call: Call, rank: int, world_size: int) -> Any:
    """Numbers of the tokens of one rank."""
    count = 2 * world_size if call["causal"] else world_size
    pieces = np.array_split(np.arange(call["length"]), count)
    if world_size > 1 and call["causal"]:
        return np.concatenate([pieces[rank], pieces[-1 - rank]])
    return np.concatenate(pieces) if world_size == 1 else pieces[rank]


@functools.lru_cache(maxsize=1)
def inputs(length: int, dtype: str) -> list[Any]:
    """Query, key, value and gradient of out of the whole sequence, the same in every process."""
    import torch

    rng = torch.Generator().manual_seed(length)
    shape = (1, NUM_HEADS, length, D)
    return [torch.randn(shape, generator=rng).to(getattr(torch, dtype)) for _ in range(4)]


class Worker:
    """One process: the whole sequence, or the share of a rank."""

    def __init__(self, rank: int, world_size: int, folder: str) -> None:
        import torch
        import torch.distributed as dist

        self.rank, self.world_size, self.dist = rank, world_size, dist
        torch.set_num_threads(WORLD_SIZE // world_size)
        if world_size > 1:
            dist.init_process_group(
                "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world_size
            )

    def barrier(self) -> None:
        """Wait for the other ranks."""
        if self.world_size > 1:
            self.dist.barrier()

    def timed(self, run: Callable[[], Any], repeats: int) -> list[float]:
        """Seconds of calls that all ranks start together."""
        seconds = []
        for _ in range(repeats):
            self.barrier()
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        return seconds

    def call(self, call: Call, repeats: int) -> dict[str, Any]:
        """Seconds and the error of a call; repeats of 0 check the answer."""
        import scaledot as sd

        whole = inputs(call["length"], call["dtype"])
        own = own_tokens(call, self.rank, self.world_size)
        operands = [x[:, :, own].requires_grad_(call["back"]) for x in whole[:3]]
        layout = "zigzag" if call["causal"] else "contiguous"

        def run() -> Any:
            if self.world_size == 1:
                out = sd.attention(*operands, causal=call["causal"])
            else:
                out = sd.ring_attention(*operands, causal=call["causal"], layout=layout)
            if call["back"]:
                for x in operands:
                    x.grad = None
                out.backward(whole[3][:, :, own])
            return out

        if repeats:
            return {"seconds": self.timed(run, repeats)}
        out = run()
        return {"excess": excess(call, whole, own, out, operands[0].grad)}

    def constants(self) -> dict[str, Any]:
        """Seconds of a message by its size, and operations per second of one thread."""
        import torch

        import scaledot as sd
        from scaledot._ring_transport import ProcessGroupRing

        ring, found = ProcessGroupRing(None), {}
        for size in SIZES:
            x = torch.zeros(size, dtype=torch.uint8)
            pass_on = lambda x=x: ring.rotate([x], [tuple(x.shape)])()  # noqa: E731
            found[size] = statistics.median(self.timed(pass_on, 12)[2:])
        rates = {}
        for dtype in ("float32", "bfloat16"):
            *operands, grad_out = inputs(RATE_LENGTH, dtype)
            flops = model.FLOPS * RATE_LENGTH**2 * D * NUM_HEADS
            operands = [x.clone().requires_grad_() for x in operands]
            there = self.timed(lambda o=operands: sd.attention(*(x.detach() for x in o)), 4)[1:]
            both = self.timed(
                lambda o=operands, g=grad_out: sd.attention(*o).backward(g), 4
            )[1:]  # fmt: skip
            first, all_ = min(there), min(both)
            rates[dtype] = (flops / first, model.BACK * flops / max(all_ - first, first))
        return {"messages": found, "rates": rates}


def excess(call: Call, whole: list[Any], own: Any, out: Any, grad: Any) -> float:
    """Largest error in units of what is allowed, in some rows of the last head.

    Allowed is twice the error of the textbook computation in the same dtype (three times that for
    a gradient), and rounding.
    """
    import torch

    places = [0, len(own) // 2, len(own) - 1]
    rows, worst = torch.as_tensor(own[places]), 0.0

    def textbook(kind: Any) -> tuple[Any, Any]:
        q, k, v, g = (x[0, -1].to(kind) for x in whole)
        scores = (q[rows] @ k.T) * D**-0.5
        if call["causal"]:
            hidden = torch.arange(call["length"])[None] > rows[:, None]
            scores = scores.masked_fill(hidden, -torch.inf)
        weights = torch.softmax(scores, dim=-1)
        products = g[rows] @ v.T
        delta = (weights * products).sum(dim=-1, keepdim=True)
        return weights @ v, (weights * (products - delta)) @ k * D**-0.5

    truths = textbook(torch.float64)
    nears = textbook(getattr(torch, call["dtype"]))
    eps = torch.finfo(getattr(torch, call["dtype"])).eps
    for got, truth, near, factor in zip((out, grad), truths, nears, (2, 3), strict=True):
        if got is None:
            continue
        error = (got[0, -1, places].detach().double() - truth).abs().max()
        allowed = factor * (near.double() - truth).abs().max()
        allowed = allowed + eps * call["length"] ** 0.5 * truth.abs().max()
        worst = max(worst, float(error / allowed))
    return worst


def work(rank: int, world_size: int, folder: str) -> None:
    """Do what comes as lines of JSON on the standard input."""
    worker = Worker(rank, world_size, folder)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        print(json.dumps(getattr(worker, name)(*arguments)), flush=True)


# The parent


class Team:
    """Processes that do the same at once."""

    def __init__(self, world_size: int, folder: str) -> None:
        environment = os.environ | {
            "SCALEDOT_NUM_THREADS": str(WORLD_SIZE // world_size), "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": str(WORLD_SIZE // world_size),
            "PYTHONPATH": os.pathsep.join([str(HERE.parent / "src"), str(HERE)]),
        }  # fmt: skip
        self.members = [
            subprocess.Popen(
                [sys.executable, __file__, "--work", str(rank), str(world_size), folder],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
            )
            for rank in range(world_size)
        ]  # fmt: skip

    def ask(self, name: str, *arguments: Any) -> list[dict[str, Any]]:
        """What each process answers."""
        for member in self.members:
            assert member.stdin is not None
            member.stdin.write(json.dumps([name, arguments]) + "\n")
            member.stdin.flush()
        answers = []
        for member in self.members:
            assert member.stdout is not None
            line = member.stdout.readline()
            if not line:
                raise RuntimeError(f"process {member.args!r} has ended; its error is above")
            answers.append(json.loads(line))
        return answers

    def end(self) -> None:
        """Let all end, and wait for them."""
        for member in self.members:
            assert member.stdin is not None
            member.stdin.close()
            member.wait(timeout=60)


@contextmanager
def teams() -> Iterator[tuple[Team, Team]]:
    """One process, and the ring."""
    with tempfile.TemporaryDirectory() as folder:
        both = Team(1, folder), Team(WORLD_SIZE, folder)
        try:
            yield both
        finally:
            for team in both:
                team.end()


def predicted(call: Call, constants: dict[str, Any]) -> float:
    """Seconds by the model."""
    size = 4 if call["dtype"] == "float32" else 2
    layer = model.Layer(NUM_HEADS, NUM_HEADS, D, item_bytes=size, causal=call["causal"])
    there, back = constants["rates"][call["dtype"]]
    rank = model.Rank(there, back, constants["bandwidth"], constants["latency"])
    tokens = call["length"] / WORLD_SIZE
    seconds = model.forward(layer, rank, tokens, WORLD_SIZE).total
    if call["back"]:
        seconds += model.backward(layer, rank, tokens, WORLD_SIZE).total
    return seconds


def measure(lengths: Sequence[int], rounds: int) -> dict[str, Any]:
    """Check and time all calls."""
    load = [os.getloadavg()[0]]
    with teams() as both:
        constants = both[1].ask("constants")[0]
        sizes = {int(size): x for size, x in constants["messages"].items()}
        constants["latency"] = sizes[min(sizes)]
        constants["bandwidth"] = max(sizes) / sizes[max(sizes)]
        rows = []
        for call in calls(lengths):
            for team in both:
                for answer in team.ask("call", call, 0):
                    if not answer["excess"] <= 1:
                        raise RuntimeError(f"{title_of(call)}: {answer['excess']} of the error "
                                           "allowed")  # fmt: skip
            seconds: list[list[float]] = [[], []]
            for _ in range(rounds):
                for found, team in zip(seconds, both, strict=True):
                    answers = [answer["seconds"] for answer in team.ask("call", call, 1)]
                    found += [max(ranks) for ranks in zip(*answers, strict=True)]
            rows.append(call | {"one": seconds[0], "ring": seconds[1],
                                "predicted": predicted(call, constants)})  # fmt: skip
            print(row_of(rows[-1]), flush=True)
    load.append(os.getloadavg()[0])
    return {"machine": machine.describe(), "load": load, "rounds": rounds,
            "constants": constants, "rows": rows}  # fmt: skip


def row_of(row: dict[str, Any]) -> str:
    one, ring = (1e3 * statistics.median(row[name]) for name in ("one", "ring"))
    ratio = f"{ring / one:.2f}"
    ratio = f"**{ratio}**" if ring > LIMIT * one else ratio
    model_ms = 1e3 * row["predicted"]
    return f"| {title_of(row)} | {one:.0f} | {ring:.0f} | {ratio} | {model_ms:.0f} | " \
           f"{ring / model_ms:.2f} |"  # fmt: skip


def tables(result: dict[str, Any]) -> list[str]:
    """What was measured, as the page shows it."""
    constants = result["constants"]
    lines = [*result["machine"], ""]
    lines += ["| Message between processes, gloo | µs | GB/s |", "|---|---|---|"]
    for size, seconds in ((int(n), x) for n, x in constants["messages"].items()):
        lines.append(f"| {size:,} bytes | {1e6 * seconds:.0f} | {size / seconds / 1e9:.2f} |")
    lines += ["", "| One thread, both cores busy | forward, GFLOP/s | backward, GFLOP/s |",
              "|---|---|---|"]  # fmt: skip
    for dtype, rates in constants["rates"].items():
        lines.append(f"| {dtype} | {rates[0] / 1e9:.0f} | {rates[1] / 1e9:.0f} |")
    lines += [
        "",
        "| Call | one process, 2 threads, ms | ring of 2, ms | ratio | model, ms | ring / model |",
        "|---|---|---|---|---|---|", *map(row_of, result["rows"]),
    ]  # fmt: skip
    return lines


def page(result: dict[str, Any]) -> str:
    """results/ring.md."""
    low, high = result["load"]
    return "\n".join([
        "# Ring attention: two processes beside two threads", "",
        f"{result['rounds']} rounds, both ways in turn, medians. Load of the machine before and "
        f"after: {low:.1f}, {high:.1f}. Bold is more than {LIMIT} times one process.", "",
        *tables(result), "",
    ])  # fmt: skip


def put_between(text: str, name: str, lines: Sequence[str]) -> str:
    """A page with the lines between its marks of a name."""
    start, end = f"<!-- {name}: written by benchmarks/ring.py --docs -->", f"<!-- end of {name} -->"
    before, found, rest = text.partition(start)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{PAGE.name} must have the marks {start} and {end}")
    return "\n".join([before + start, "", *lines, "", end]) + after


def write_docs() -> None:
    """Renew the tables of docs/scaling.md."""
    text, file = PAGE.read_text(), RESULTS / "ring.json"
    if file.exists():
        text = put_between(text, "measured", tables(json.loads(file.read_text())))
    PAGE.write_text(put_between(text, "predicted", model.predictions()))


def main() -> None:
    """Measure, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 16384])
    parser.add_argument("--docs", action="store_true")
    parser.add_argument("--work", nargs=3, metavar=("RANK", "WORLD_SIZE", "FOLDER"))
    arguments = parser.parse_args()
    if arguments.work:
        rank, world_size, folder = arguments.work
        work(int(rank), int(world_size), folder)
    elif arguments.docs:
        write_docs()
    else:
        result = measure(arguments.lengths, arguments.rounds)
        (RESULTS / "ring.json").write_text(json.dumps(result, indent=1) + "\n")
        (RESULTS / "ring.md").write_text(page(result))


if __name__ == "__main__":
    main()
