"""Decoding from caches: pages beside contiguous memory, eight bits, shared beginnings.

    python caches.py [--repeats 15] [--threads 2] [--write]

Each pair is measured in turns in one process, after its answers were compared. ``--write`` puts the
table into results/caches.md and .json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import machine
import scaledot as sd

RESULTS = Path(__file__).parent / "results"
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
HEADS, KEY_HEADS, WIDTH = 32, 8, 128
Call = Callable[[], Any]


class Pair(NamedTuple):
    """Two ways to the same answer."""

    name: str
    first: tuple[str, Call]
    second: tuple[str, Call]
    tokens: int  # made by one call
    close: float = 0.02


def tokens(rng: Any, batch: int, heads: int, count: int, dtype: str) -> Any:
    """Random numbers (batch, heads, count, WIDTH)."""
    return rng.standard_normal((batch, heads, count, WIDTH), np.float32).astype(DTYPES[dtype])


def filled_pages(
    rng: Any, page_size: int, key: Any, value: Any, dtype: str
) -> tuple[sd.PagedKVCache, list[int]]:
    """A cache whose sequences have their pages all over the pool."""
    batch, heads, length, _ = key.shape
    pages = -(-length // page_size)
    cache = sd.PagedKVCache(batch * pages, page_size, heads, WIDTH, WIDTH, dtype)
    scattered = [int(x) for x in rng.permutation(batch * pages)]
    cache._free = scattered  # as after many sequences have come and gone
    ids = [cache.new() for _ in range(batch)]
    cache.append(ids, key, value)
    return cache, ids


def pages_beside_contiguous(rng: Any, dtype: str, batch: int, length: int, page_size: int) -> Pair:
    """The same tokens in `PagedKVCache` and in `KVCache`."""
    query = tokens(rng, batch, HEADS, 1, dtype)
    key, value = (tokens(rng, batch, KEY_HEADS, length, dtype) for _ in range(2))
    contiguous = sd.KVCache(batch, KEY_HEADS, WIDTH, WIDTH, length, dtype)
    contiguous.append(key, value)
    paged, ids = filled_pages(rng, page_size, key, value, dtype)
    return Pair(
        f"pages of {page_size}, {dtype}, batch {batch}, {length} tokens",
        ("PagedKVCache", lambda: paged.attention(query, ids)),
        ("KVCache", lambda: contiguous.attention(query)), batch,
    )  # fmt: skip


def eight_bits(rng: Any, batch: int, length: int, key_heads: int) -> Pair:
    """The same tokens as int8 and as bfloat16."""
    query = tokens(rng, batch, HEADS, 1, "bfloat16")
    key, value = (tokens(rng, batch, key_heads, length, "bfloat16") for _ in range(2))
    caches = []
    for dtype in ("int8", "bfloat16"):
        cache = sd.KVCache(batch, key_heads, WIDTH, WIDTH, length, dtype)
        cache.append(key, value)
        caches.append(cache)
    small, wide = caches
    return Pair(
        f"int8, batch {batch}, {length} tokens, {key_heads} key heads",
        ("int8", lambda: small.attention(query)), ("bfloat16", lambda: wide.attention(query)),
        batch,
    )  # fmt: skip


def shared_beginning(rng: Any, dtype: str, heads: int, key_heads: int) -> Pair:
    """Sixteen sequences of 8192 common and 128 own tokens: together, and each alone."""
    prefix, suffix, batch, page_size = 8192, 128, 16, 16
    pages = (prefix + batch * suffix) // page_size
    cache = sd.PagedKVCache(pages, page_size, key_heads, WIDTH, WIDTH, dtype)
    parent = cache.new()
    cache.append([parent], *(tokens(rng, 1, key_heads, prefix, dtype) for _ in range(2)))
    ids = [cache.fork(parent) for _ in range(batch)]
    cache.append(ids, *(tokens(rng, batch, key_heads, suffix, dtype) for _ in range(2)))
    query = tokens(rng, batch, heads, 1, dtype)

    def alone() -> Any:
        return np.concatenate([
            cache.attention(query[i : i + 1], ids[i : i + 1]) for i in range(batch)
        ])

    return Pair(
        f"shared beginning, {dtype}, {heads} heads, {key_heads} key heads",
        ("together", lambda: cache.attention(query, ids)), ("each alone", alone), batch, 0.0,
    )  # fmt: skip


def cases(rng: Any) -> list[Callable[[], Pair]]:
    """Everything that is measured, made when its turn comes."""
    found: list[Callable[[], Pair]] = []
    for dtype in DTYPES:
        for batch, length in ((1, 32768), (16, 4096)):
            for page_size in (1, 16, 128):
                found.append(lambda d=dtype, b=batch, n=length, p=page_size:  # type: ignore[misc]
                             pages_beside_contiguous(rng, d, b, n, p))  # fmt: skip
    for batch, length, key_heads in ((1, 16384, 32), (8, 2048, 32), (1, 65536, 8), (16, 4096, 8)):
        found.append(lambda b=batch, n=length, k=key_heads:  # type: ignore[misc]
                     eight_bits(rng, b, n, k))  # fmt: skip
    for dtype in DTYPES:
        for heads, key_heads in ((8, 8), (32, 8)):
            found.append(lambda d=dtype, h=heads, k=key_heads:  # type: ignore[misc]
                         shared_beginning(rng, d, h, k))  # fmt: skip
    return found


def measured(pair: Pair, repeats: int) -> dict[str, Any]:
    """Medians of both ways in milliseconds, measured in turns, once their answers agree."""
    ways = (pair.first, pair.second)
    first, second = (np.asarray(call(), dtype=np.float64) for _, call in ways)
    error = float(np.abs(first - second).max())
    if not error <= pair.close:
        raise SystemExit(f"{pair.name}: answers differ by {error}")
    seconds: list[list[float]] = [[], []]
    for _ in range(repeats):
        for spent, (_, call) in zip(seconds, ways, strict=True):
            start = time.perf_counter()
            call()
            spent.append(time.perf_counter() - start)
    medians = [1e3 * statistics.median(x) for x in seconds]
    return {
        "case": pair.name, "ways": [name for name, _ in ways], "ms": medians,
        "best_ms": [1e3 * min(x) for x in seconds], "times_as_fast": medians[1] / medians[0],
        "tokens_per_s": pair.tokens / medians[0] * 1e3, "error": error,
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Lines of a table."""
    lines = [
        "| Case | ms | beside | ms | times as fast | tokens/s |",
        "|---|--:|---|--:|--:|--:|",
    ]
    for row in rows:
        lines.append(
            f"| {row['case']} | {row['ms'][0]:.2f} | {row['ways'][1]} | {row['ms'][1]:.2f} | "
            f"{row['times_as_fast']:.2f} | {row['tokens_per_s']:.0f} |"
        )
    return lines


def main() -> None:
    """Run all cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default="")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    sd.set_num_threads(given.threads)
    rows = []
    for case in cases(np.random.default_rng(0)):
        pair = case()
        if given.only in pair.name:
            rows.append(measured(pair, given.repeats))
            print(table(rows)[-1], flush=True)
    setting = (
        f"{given.threads} threads; medians of {given.repeats} calls in turns; one query for each "
        f"sequence; width {WIDTH}; {HEADS} heads and {KEY_HEADS} key heads unless named."
    )
    lines = ["# Decoding from caches", "", *machine.describe(), "", setting, "", *table(rows), ""]
    if given.write:
        (RESULTS / "caches.md").write_text("\n".join(lines), encoding="utf-8")
        (RESULTS / "caches.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
