"""Forward and backward together: the problems that are timed, and how their answers are judged.

One head is checked, the last, in some of its rows. Its truth is dense attention with its
gradients in float64, a block of queries at a time; the yardstick is the same in the case's dtype,
every matrix rounded to it. Needs NumPy and ml_dtypes only, as `workloads` does.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from workloads import Arrays, Case

PACKAGE = "training"  # folder of the plug-ins
TITLE = "Training: forward and backward together"
ABOUT = (
    "A figure is that of one call which returns attention's result and, given the gradient of it, "
    "those of query, key, value and, where there is one, bias; GFLOP/s count seven products of "
    "visible scores. `twice` is the gradient of half the sum of squares of the gradients of query, "
    "key and value, the first backward pass included. Every result is compared with float64 in "
    "some rows of one head: allowed is three times the error of the textbook computation in the "
    "same dtype, plus rounding; with dropout, under the mask that the peer has drawn."
)
BLOCK = 512  # queries that the judge computes at a time

Rows = dict[str, list[list[float]]]


def _cases() -> Iterator[Case]:
    back: dict[str, Any] = {"passes": "backward"}
    yield Case("train-causal", 1, 8, 2048, 64, causal=True, **back)
    yield Case("train-bf16-causal", 1, 8, 2048, 64, dtype="bfloat16", causal=True, **back)
    # Which weights a peer drops is read off with n values of n numbers: not at 8192.
    yield Case("train-4k-dropout", 1, 4, 4096, 64, dropout=0.1, **back)
    yield Case("train-8k-d_v", 1, 4, 8192, 64, d_v=32, **back)
    yield Case("train-8k-1", 1, 1, 8192, 64, **back)
    yield Case("train-8k", 1, 4, 8192, 64, **back)
    # One number for each key: PyTorch computes all n² scores for any bias that needs a gradient,
    # and a bias of n² numbers would be 1 GiB by itself.
    yield Case("train-8k-bias", 1, 4, 8192, 64, key_bias=True, **back)
    yield Case("train-16k", 1, 4, 16384, 64, alone=True, **back)
    yield Case("train-16k-twice", 1, 4, 16384, 64, alone=True, passes="double")


GRADIENTS = list(_cases())


def places(n: int) -> list[int]:
    """Rows of n that are checked: at both ends, some between."""
    return sorted({0, 1, n // 3, n // 2, n - 2, n - 1} & set(range(n)))


def rows_of(case: Case, x: np.ndarray, name: str) -> np.ndarray:
    """The rows that are checked of one head's result, in float64."""
    picked = {"query": places(case.len_q), "out": places(case.len_q), "bias": [0]}
    return np.asarray(x[picked.get(name, places(case.len_kv))], dtype=np.float64)


def answer(case: Case, results: dict[str, np.ndarray], folder: Path) -> dict[str, Any]:
    """What `judge` is shown of a peer's results.

    Parameters
    ----------
    case : Case
        The problem.
    results : dict
        Arrays of the shapes ``case.results``; with dropout also ``kept``, (len_q, len_kv), the
        weights of the last head that were not dropped.
    folder : Path
        Where ``kept`` is left for the judge.
    """
    rows: dict[str, Any] = {}
    for name, shape in case.results.items():
        if results[name].shape != shape:
            raise ValueError(f"{name} of shape {results[name].shape} instead of {shape}")
        rows[name] = rows_of(case, results[name][-1, -1], name).tolist()
    if case.dropout:
        kept = np.asarray(results["kept"], dtype=bool)
        if kept.shape != (case.len_q, case.len_kv):
            raise ValueError(f"kept of shape {kept.shape}")
        share = 1 - kept.mean()
        if abs(share - case.dropout) > 6 * (case.dropout / kept.size) ** 0.5:
            raise ValueError(f"drops {share:.4f} of the weights instead of {case.dropout}")
        bits = np.packbits(kept)
        rows["kept"] = str(folder / f"{zlib.crc32(bits):08x}.kept")
        with Path(rows["kept"]).open("wb") as file:
            np.save(file, bits)
    return rows


def judge(case: Case, folder: Path, given: dict[str, Any]) -> tuple[float, float]:
    """Compare rows of results with the truth.

    Returns
    -------
    error, excess
        The largest error of all results, and the largest ratio of a result's error to what is
        allowed: three times that of the textbook computation in the case's dtype, and rounding.
    """
    worst = excess = 0.0
    exact = np.finfo("float64" if case.dtype == "float64" else "float32").eps
    rounding = float(ml_dtypes.finfo(case.numpy_dtype).eps) + float(exact) * case.len_kv**0.5
    for name, (truth, textbook) in _truths(case, folder, given.get("kept", "")).items():
        error = float(np.abs(np.array(given[name]) - truth).max())
        allowed = 3 * np.abs(textbook - truth).max() + rounding * np.abs(truth).max()
        worst = max(worst, error) if error == error else error  # nan stays
        excess = max(excess, float(error / allowed)) if error == error else np.inf
    return worst, excess


@functools.lru_cache(maxsize=4)  # all peers of a case are judged by one truth
def _truths(case: Case, folder: Path, kept: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Checked rows of each result in float64, and by the textbook in the case's dtype."""
    arrays, factor = case.read_inputs(folder, mmap=True), None
    if kept:
        bits = np.unpackbits(np.load(kept), count=case.len_q * case.len_kv)
        factor = bits.reshape(case.len_q, case.len_kv) / (1 - case.dropout)
    working = "float64" if case.dtype == "float64" else "float32"
    truth, textbook = (
        _Head(case, arrays, factor, computed, rounded).results()
        for computed, rounded in (("float64", np.dtype("float64")), (working, case.numpy_dtype))
    )
    return {
        name: (rows_of(case, truth[name], name), rows_of(case, textbook[name], name))
        for name in case.results
    }


class _Head:
    """The last head of a problem, computed in one dtype and rounded to another."""

    def __init__(
        self, case: Case, arrays: Arrays, factor: np.ndarray | None, computed: str, rounded: Any
    ) -> None:
        self.case, self.factor = case, factor
        self.rounded, self.computed = rounded, np.dtype(computed)
        self.scale = self.computed.type(case.d**-0.5)
        names = [*case.shapes, "grad_out"]
        self.x = {name: np.asarray(arrays[name][-1, -1], dtype=computed) for name in names}

    def results(self) -> dict[str, np.ndarray]:
        """What is asked for, rounded."""
        found = self.pass_over(self.backward)
        if self.case.passes == "double":
            # The Hessian H is symmetric: the gradient of ½|g|² is H g, the derivative of g along g.
            self.moves = {name: found[name] for name in self.case.shapes}
            found = self.pass_over(self.moved)
        return found

    def round(self, x: np.ndarray) -> np.ndarray:
        """A matrix as it is when the case's dtype has held it."""
        return x if self.rounded == x.dtype else x.astype(self.rounded).astype(self.computed)

    def pass_over(self, step: Callable[..., dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """Collect what a step finds for each block of queries: rows of queries, sums for keys."""
        found: dict[str, Any] = {}
        for start in range(0, self.case.len_q, BLOCK):
            rows = slice(start, min(start + BLOCK, self.case.len_q))
            weights = self.weights(rows)
            factor = None if self.factor is None else self.factor[rows].astype(self.computed)
            for name, x in step(rows, weights, factor).items():
                if name in ("out", "query"):
                    found.setdefault(name, []).append(x)
                else:
                    found[name] = found.get(name, 0) + x
        return {
            name: self.round(np.concatenate(x) if isinstance(x, list) else x)
            for name, x in found.items()
        }

    def weights(self, rows: slice) -> np.ndarray:
        """Weights of some queries before dropout, (rows, len_kv)."""
        scores = self.scale * (self.x["query"][rows] @ self.x["key"].T)
        if "bias" in self.x:
            scores += self.x["bias"]
        scores = self.round(scores)
        if self.case.causal:
            last = np.arange(rows.start, rows.stop) + self.case.len_kv - self.case.len_q
            scores[np.arange(self.case.len_kv) > last[:, None]] = -np.inf
        scores -= scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores, out=scores)
        weights /= weights.sum(axis=-1, keepdims=True)
        return self.round(weights)

    def backward(
        self, rows: slice, weights: np.ndarray, factor: np.ndarray | None
    ) -> dict[str, np.ndarray]:
        """Results and gradients: dS = P∘(D∘(dO Vᵀ) - delta) with delta = rowsum(P∘D∘(dO Vᵀ))."""
        x, grad_out = self.x, self.x["grad_out"][rows]
        kept = weights if factor is None else weights * factor
        products = self.round(grad_out @ x["value"].T)
        if factor is not None:
            products *= factor
        delta = (weights * products).sum(axis=-1, keepdims=True)
        grads = self.round(weights * (products - delta))
        found = {
            "out": kept @ x["value"], "value": kept.T @ grad_out,
            "query": self.scale * (grads @ x["key"]),
            "key": self.scale * (grads.T @ x["query"][rows]),
        }  # fmt: skip
        return found | ({"bias": grads.sum(axis=0, keepdims=True)} if "bias" in x else {})

    def moved(
        self, rows: slice, weights: np.ndarray, factor: np.ndarray | None
    ) -> dict[str, np.ndarray]:
        """Derivatives of the gradients along ``moves``, without dropout."""
        x, moves, grad_out = self.x, self.moves, self.x["grad_out"][rows]
        scores = x["query"][rows] @ moves["key"].T + moves["query"][rows] @ x["key"].T
        scores = self.round(self.scale * scores)
        tilted = weights * (scores - (weights * scores).sum(axis=-1, keepdims=True))
        products = self.round(grad_out @ x["value"].T)
        others = self.round(grad_out @ moves["value"].T)
        products -= (weights * products).sum(axis=-1, keepdims=True)
        # The mean of `tilted` is 0, so that of products may be any constant in it.
        others -= (tilted * products + weights * others).sum(axis=-1, keepdims=True)
        grads, turned = weights * products, tilted * products + weights * others
        return {
            "query": self.scale * (turned @ x["key"] + grads @ moves["key"]),
            "key": self.scale * (turned.T @ x["query"][rows] + grads.T @ moves["query"][rows]),
            "value": tilted.T @ grad_out,
        }
