"""Statistics of weights by the kernels."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from scaledot import _arrays, _stats
from scaledot._bridges import cpu
from scaledot._kernels import stats
from scaledot._kernels.kinds import block_q
from scaledot._kernels.simd import DOUBLE, SINGLE
from scaledot._kernels.target import HOST
from scaledot._launch import address, in_order, launch
from scaledot._spec import Problem, Spec
from scaledot._stats import Stats, Wanted

ModError = cpu.ModError


def run(problem: Problem, wanted: Wanted) -> Stats:
    """Statistics of all queries of a problem, sinks among them."""
    here, spec = cpu.on_host(problem), problem.spec
    numbers, heads = cpu.numbers_of(spec), spec.scores_shape[:-2]
    rows = spec.scores_shape[:-1]
    kept = min(wanted.top_k, max(1, spec.len_kv))
    lse = np.full(rows, -np.inf, numbers)
    entropy, mean_distance = (np.zeros(rows, numbers) for _ in range(2))
    visible = np.zeros(rows, np.int64)
    top_weights = np.zeros((*rows, kept), numbers)
    top_keys = np.full(top_weights.shape, -1)
    # Sums of many tasks, whose numbers are rounded once.
    received, received_last = (np.zeros((*heads, spec.len_kv)) for _ in range(2))
    cells = np.zeros((*heads, *(wanted.map_shape or (0, 0))))
    progress = np.zeros(math.prod(heads), np.int64)
    if lse.size:
        written = {
            "entropy": entropy, "mean_distance": mean_distance, "visible": visible,
            "top_weights": top_weights, "top_keys": top_keys, "received": received,
            "received_last": received_last, "cells": cells, "progress": progress,
        }  # fmt: skip
        own: dict[str, Any] = {name: address(x) for name, x in written.items()}
        if here.sinks is not None:
            own["sinks"] = np.asarray(_arrays.host(here.sinks), dtype=np.float64).reshape(-1)
        asked = _asked(spec, wanted, kept)
        out = in_order((*rows, 0), numbers.itemsize, 0)
        call = cpu.prepared(here, _plan(spec, asked), out, numbers, **own, **asked)
        launch(call, here.query, here.key, None, here.terms.mask, here.terms.bias, None, lse)
    more = [(0, 0)] * len(rows) + [(0, wanted.top_k - kept)]
    found = {
        "entropy": entropy, "max_weight": top_weights[..., 0].copy(),
        "top_keys": np.pad(top_keys, more, constant_values=-1),
        "top_weights": np.pad(top_weights, more), "mean_distance": mean_distance,
        "visible": visible,
    }  # fmt: skip
    block_map = None
    if wanted.map_shape is not None:
        counts = [stop - start for start, stop in _stats.bins(spec.len_q, wanted.map_shape[0])]
        cells /= np.array(counts)[:, None]
        block_map = cells.astype(numbers, copy=False)
    received, received_last = (
        x.astype(numbers, copy=False) for x in (received, received_last)
    )
    sinks = None if here.sinks is None else np.asarray(_arrays.host(here.sinks))
    xp = _arrays.namespace(lse)
    with _arrays.quiet(xp):
        done = _stats.finished(
            xp, spec, sinks, lse, found, received, None if wanted.last is None else received_last,
            block_map,
        )  # fmt: skip
    return Stats(*(None if x is None else cpu.back(x, problem) for x in done))


def _asked(spec: Spec, wanted: Wanted, kept: int) -> dict[str, int]:
    """Numbers of the record that tell what is wanted; ``kept`` weights of each query."""
    rows, columns = wanted.map_shape or (0, 0)
    # Neighbours of n queries are in n·rows / len_q bins, and one more at either end.
    most = min(rows, _step(spec) * rows // max(1, spec.len_q) + 2)
    return {
        "top_k": kept, "last": min(wanted.last or 0, spec.len_q), "map_rows": rows,
        "map_columns": columns, "map_most": most,
    }  # fmt: skip


def _step(spec: Spec) -> int:
    """Queries of a task."""
    return block_q((DOUBLE if spec.dtype == "float64" else SINGLE).lanes, spec.len_kv)


def _plan(spec: Spec, asked: dict[str, int]) -> cpu.Plan:
    """Kernel and tasks; how they are cut follows from the lengths and the dtype alone."""
    kernel, vectors = stats.count_single, SINGLE
    if spec.dtype == "float64":
        kernel, vectors = stats.count_double, DOUBLE
    elif spec.dtype == "bfloat16" and HOST.bf16:
        kernel = stats.count_pairs
    scratch = stats.room_bytes(
        vectors.lanes, vectors.size, spec.d_k, spec.len_q, spec.len_kv, asked["top_k"],
        asked["last"], asked["map_most"], asked["map_columns"],
    )  # fmt: skip
    pairs = math.prod(spec.lead) * spec.num_heads
    return cpu.Plan(kernel, vectors, pairs * -(-spec.len_q // _step(spec)), scratch, 0)
