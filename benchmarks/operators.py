"""Attention between operators of PyTorch, as in a model: by the pool, PyTorch's threads, sdpa.

    python operators.py [--rounds 50] [--write]     # results/operators.md

PyTorch's threads spin for some milliseconds after each operator. A call is timed alone, and behind
a product of matrices, and so is the product behind the call.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import machine
import scaledot as sd
from scaledot._kernels import team

RESULTS = Path(__file__).parent / "results"
WAYS = ("pool", "PyTorch's threads", "sdpa")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def milliseconds(work: Callable[[], object]) -> float:
    """Time of one call."""
    start = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - start)


def calls(dtype: torch.dtype, length: int) -> dict[str, Callable[[], object]]:
    """Causal attention of nine heads on three, as in SmolLM2."""
    query = torch.randn(1, 9, length, 64).to(dtype)
    key, value = torch.randn(2, 1, 3, length, 64).to(dtype)
    size_for = team.size_for

    def by_pool() -> object:
        team.size_for = lambda *_: 0
        try:
            return sd.attention(query, key, value, causal=True)
        finally:
            team.size_for = size_for

    return dict(zip(WAYS, (
        by_pool,
        lambda: sd.attention(query, key, value, causal=True),
        lambda: torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        ),
    ), strict=True))  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    lines = [
        "# Attention between operators of PyTorch", "", *machine.describe(), "",
        f"{threads} threads, causal, 9 heads on 3, d 64; milliseconds, medians of {given.rounds} "
        "rounds in turns. The product is (length, 576) by (576, 576).", "",
        "| dtype | length | by | alone | behind a product | product behind it |",
        "|---|--:|---|--:|--:|--:|",
    ]  # fmt: skip
    with torch.inference_mode():
        for name, dtype in DTYPES.items():
            for length in (128, 256, 512, 1024, 2048):
                states = torch.randn(length, 576).to(dtype)
                weight = torch.randn(576, 576).to(dtype)
                found: dict[str, list[list[float]]] = {way: [[], [], []] for way in WAYS}
                for _ in range(given.rounds):
                    for way, call in calls(dtype, length).items():
                        call()
                        time.sleep(0.02)  # nobody spins any longer
                        found[way][0].append(milliseconds(call))
                        states @ weight
                        found[way][1].append(milliseconds(call))
                        found[way][2].append(milliseconds(lambda x=states, y=weight: x @ y))
                for way, times in found.items():
                    cells = " | ".join(f"{statistics.median(x):.2f}" for x in times)
                    lines.append(f"| {name} | {length} | {way} | {cells} |")
    print("\n".join(lines))
    if given.write:
        (RESULTS / "operators.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
