"""The problems that are timed, their inputs, and how an answer to one is judged.

Needs NumPy and ml_dtypes only: the processes of all peers import it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import ml_dtypes
import numpy as np

Place = tuple[int, int, int]  # batch entry, head, query
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """One problem, of the shapes (batch, num_heads, len_q, d) and (batch, num_kv_heads, len_kv, d).

    ``passes`` is ``"forward"``, ``"backward"`` for the result and the gradients together, given
    ``grad_out``, or ``"double"`` for the gradients of half the sum of squares of the first ones;
    these two are judged in `gradients`. The fields from ``ratio`` on say what is asked of scaledot:
    how many times as fast as the fastest other (or as ``against``), which share of the peak, how
    many seconds.
    """

    name: str
    batch: int
    num_heads: int
    len_q: int
    d: int
    num_kv_heads: int = 0  # 0: as many as num_heads
    len_kv: int = 0  # 0: as many as len_q
    dtype: str = "float32"
    causal: bool = False
    window: int = 0  # keys that a query sees, itself and those before it; 0: no limit
    lengths: tuple[int, ...] = ()  # visible keys of each batch entry, given as a boolean mask
    bias: bool = False  # float32, (1, num_heads, len_q, len_kv)
    key_bias: bool = False  # float32, (1, num_heads, 1, len_kv), and its gradient is asked for
    d_v: int = 0  # 0: as wide as d
    dropout: float = 0.0
    passes: str = "forward"
    alone: bool = False  # only scaledot is asked
    ratio: float = 0.0
    share: float = 0.0
    seconds: float = 0.0
    against: str = ""

    def __post_init__(self) -> None:
        """Fill in what follows from other fields; lists come from JSON."""
        object.__setattr__(self, "num_kv_heads", self.num_kv_heads or self.num_heads)
        object.__setattr__(self, "len_kv", self.len_kv or self.len_q)
        object.__setattr__(self, "d_v", self.d_v or self.d)
        object.__setattr__(self, "lengths", tuple(self.lengths))

    @property
    def title(self) -> str:
        """What a table calls it."""
        words = [{"bfloat16": "bf16"}.get(self.dtype, self.dtype.replace("float", "f"))]
        words += ["causal"] * self.causal
        words += [f"window {self.window}"] if self.window else []
        words += ["padding mask"] * bool(self.lengths) + ["bias"] * self.bias
        words += [f"bias (1, {self.num_heads}, 1, {self.len_kv})"] * self.key_bias
        words += [f"dropout {self.dropout}"] * bool(self.dropout)
        words += ["twice"] * (self.passes == "double")
        keys = f" on {self.len_kv}" if self.decode else ""
        heads = f"{self.num_heads}"
        heads += f" on {self.num_kv_heads}" if self.num_kv_heads != self.num_heads else ""
        wide = f", d_v {self.d_v}" if self.d_v != self.d else ""
        return f"{' '.join(words)} ({self.batch}, {heads}, {self.len_q}{keys}, {self.d}{wide})"

    @property
    def numpy_dtype(self) -> np.dtype:
        """NumPy's dtype of query, key and value."""
        return np.dtype(ml_dtypes.bfloat16 if self.dtype == "bfloat16" else self.dtype)

    @property
    def decode(self) -> bool:
        """Whether reading keys and values is the work, not the products."""
        return self.len_q == 1

    @property
    def kv_bytes(self) -> int:
        """Bytes of key and value."""
        elements = self.batch * self.num_kv_heads * self.len_kv * (self.d + self.d_v)
        return elements * self.numpy_dtype.itemsize

    @property
    def flops(self) -> int:
        """Operations of the products, on visible scores only; 0 where it is not said which.

        Forward and backward together have seven: the scores and dP = dO Vᵀ, out, dV, dQ and dK,
        and the scores once more.
        """
        entries = self.lengths or (self.len_kv,) * self.batch
        rows = np.arange(self.len_q)
        seen = sum(int(np.subtract(*self._range(rows, n)[::-1]).sum()) for n in entries)
        widths = {"forward": self.d + self.d_v, "backward": 4 * self.d + 3 * self.d_v}
        return 2 * widths.get(self.passes, 0) * self.num_heads * seen

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the arguments that may have gradients."""
        queries = (self.batch, self.num_heads, self.len_q)
        keys = (self.batch, self.num_kv_heads, self.len_kv)
        shapes = {"query": (*queries, self.d), "key": (*keys, self.d), "value": (*keys, self.d_v)}
        if self.key_bias:
            shapes["bias"] = (1, self.num_heads, 1, self.len_kv)
        return shapes

    @property
    def results(self) -> dict[str, tuple[int, ...]]:
        """Shapes of what a call returns, gradients under their arguments' names."""
        out = {"out": (self.batch, self.num_heads, self.len_q, self.d_v)}
        return {"forward": out, "backward": out | self.shapes, "double": self.shapes}[self.passes]

    @property
    def result_bytes(self) -> int:
        """Bytes of what a call returns."""
        sizes = {"bias": 4}
        return sum(
            math.prod(shape) * sizes.get(name, self.numpy_dtype.itemsize)
            for name, shape in self.results.items()
        )

    def shrunk(self, factor: int) -> Case:
        """Return the same case with lengths divided by a factor."""
        lengths = tuple(-(-n // factor) for n in self.lengths)
        sizes = {n: -(-getattr(self, n) // factor) for n in ("len_q", "len_kv", "window")}
        return replace(self, lengths=lengths, **sizes)

    def _range(self, rows: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Half-open range of keys that each of the rows sees."""
        position = rows + self.len_kv - self.len_q
        high = np.minimum(position + 1 if self.causal else self.len_kv, length)
        low = np.maximum(position - self.window + 1, 0) if self.window else 0 * rows
        return low, np.maximum(low, high + 0 * rows)

    def dense_mask(self) -> np.ndarray:
        """Causal and window as booleans (len_q, len_kv), for peers that know no windows."""
        low, high = self._range(np.arange(self.len_q), self.len_kv)
        keys = np.arange(self.len_kv)
        return (keys >= low[:, None]) & (keys < high[:, None])

    def write_inputs(self, folder: Path) -> None:
        """Draw the arrays and leave them in a folder, for all peers."""
        rng = np.random.default_rng(7)
        for name, shape in self.shapes.items():
            x = rng.standard_normal(shape, dtype=np.float32)
            np.save(folder / f"{name}.npy", x if name == "bias" else x.astype(self.numpy_dtype))
        if self.passes != "forward":
            x = rng.standard_normal((*self.shapes["query"][:-1], self.d_v), dtype=np.float32)
            np.save(folder / "grad_out.npy", x.astype(self.numpy_dtype))
        if self.lengths:
            mask = np.arange(self.len_kv) < np.array(self.lengths)[:, None]
            np.save(folder / "mask.npy", mask[:, None, None])
        if self.bias:
            shape = (1, self.num_heads, self.len_q, self.len_kv)
            np.save(folder / "bias.npy", rng.standard_normal(shape, dtype=np.float32))

    def read_inputs(self, folder: Path, mmap: bool = False) -> Arrays:
        """Read the arrays: query, key, value, and mask, bias, grad_out where the case has them."""
        arrays = {}
        for path in sorted(folder.glob("*.npy")):
            x = np.load(path, mmap_mode="r" if mmap else None)
            arrays[path.stem] = x.view(self.numpy_dtype) if x.dtype.kind == "V" else x
        return arrays

    def places(self) -> list[Place]:
        """Return the queries whose answers are checked: first, last, some between."""
        rng = np.random.default_rng(11)
        between = [
            tuple(int(rng.integers(n)) for n in (self.batch, self.num_heads, self.len_q))
            for _ in range(4)
        ]
        return [(0, 0, 0), *between, (self.batch - 1, self.num_heads - 1, self.len_q - 1)]

    def answer(self, out: np.ndarray) -> list[list[float]]:
        """Rows of a result at the places to be checked."""
        if out.ndim == 3:  # (batch, len_q, num_heads · d)
            out = out.reshape(self.batch, self.len_q, self.num_heads, -1).swapaxes(1, 2)
        if out.shape != self.results["out"]:
            raise ValueError(f"result of shape {out.shape} instead of {self.results['out']}")
        return [[float(x) for x in out[place]] for place in self.places()]

    def judge(self, arrays: Arrays, answers: list[list[float]]) -> tuple[float, float]:
        """Compare rows of a result with the truth.

        Returns
        -------
        error, excess
            The largest error, and the largest ratio of an error to what is allowed in its row:
            twice the error of the textbook computation in the case's dtype, and rounding.
        """
        worst = excess = 0.0
        exact = {"float64": "float64"}.get(self.dtype, "float32")
        for place, answer in zip(self.places(), answers, strict=True):
            truth, textbook = self._rows(arrays, place)
            error = float(np.abs(np.array(answer) - truth).max())
            rounding = ml_dtypes.finfo(self.numpy_dtype).eps
            rounding = float(rounding) + float(np.finfo(exact).eps) * self.len_kv**0.5
            allowed = 2 * np.abs(textbook - truth).max() + rounding * np.abs(truth).max()
            worst = max(worst, error) if error == error else error  # nan stays
            excess = max(excess, float(error / allowed)) if error == error else np.inf
        return worst, excess

    def _rows(self, arrays: Arrays, place: Place) -> tuple[np.ndarray, np.ndarray]:
        """One row of the result in float64, and by the textbook in the case's dtype."""
        batch, head, row = place
        kv_head = head * self.num_kv_heads // self.num_heads
        length = self.lengths[batch] if self.lengths else self.len_kv
        low, high = (int(x[0]) for x in self._range(np.array([row]), length))
        query = arrays["query"][batch, head, row]
        key, value = (arrays[name][batch, kv_head, low:high] for name in ("key", "value"))
        bias = arrays["bias"][0, head, row, low:high] if self.bias else 0
        working = "float64" if self.dtype == "float64" else "float32"
        results = []
        for computed, kept in (("float64", np.dtype("float64")), (working, self.numpy_dtype)):
            q, k, v = (np.asarray(x, dtype=computed) for x in (query, key, value))
            scores = k @ q / np.sqrt(self.d).astype(computed) + bias
            scores = scores.astype(kept).astype(computed)
            weights = np.exp(scores - scores.max())
            weights = (weights / weights.sum()).astype(kept).astype(computed)
            results.append((weights @ v).astype(kept).astype(np.float64))
        return results[0], results[1]


def _table() -> Iterator[Case]:
    """Rows of the table."""
    yield Case("f32-1k", 1, 8, 1024, 64, ratio=1.05)
    yield Case("f32-4k", 1, 8, 4096, 64, ratio=1.06, share=0.85)
    yield Case("f32-4k-d128", 1, 8, 4096, 128, ratio=1.05, share=0.88)
    yield Case("f32-32k", 1, 1, 32768, 64, ratio=1.06)
    yield Case("causal", 1, 8, 4096, 64, causal=True, ratio=1.3, share=0.80)
    yield Case("causal-gqa", 1, 32, 2048, 128, num_kv_heads=8, causal=True, ratio=1.35)
    yield Case("window", 1, 8, 8192, 64, causal=True, window=512, ratio=2.5)
    yield Case("padding", 4, 8, 1024, 64, lengths=(1024, 960, 896, 768), ratio=1.15)
    yield Case("bias", 1, 8, 2048, 64, bias=True, ratio=1.15)
    half = {"dtype": "bfloat16"}
    yield Case("bf16-4k", 1, 8, 4096, 64, **half, ratio=1.2, share=0.75)
    yield Case("bf16-4k-d128", 1, 8, 4096, 128, **half, ratio=1.15, share=0.78)
    yield Case("bf16-causal", 1, 8, 4096, 64, **half, causal=True, ratio=1.35)
    yield Case("bf16-causal-gqa", 1, 32, 2048, 128, num_kv_heads=8, **half, causal=True, ratio=1.3)
    yield Case("f16-4k", 1, 8, 4096, 64, dtype="float16", ratio=1.08)
    yield Case("f64-2k", 1, 8, 2048, 64, dtype="float64", ratio=1.5, against="torch")
    for name, dtype, heads, ratio in (
        ("decode", "float32", 32, 0.95), ("bf16-decode", "bfloat16", 32, 1.25),
        ("decode-gqa", "float32", 8, 1.5), ("bf16-decode-gqa", "bfloat16", 8, 1.8),
    ):  # fmt: skip
        yield Case(name, 1, 32, 1, 128, heads, 8192, dtype, ratio=ratio, share=0.90)
    yield Case("small", 1, 12, 128, 64, ratio=0.8)
    yield Case("small-batch", 64, 12, 32, 64, ratio=1.1)
    yield Case("tiny", 1, 1, 8, 8, seconds=25e-6)


TABLE = list(_table())
# Lengths between those of the table, for the picture of speed against length.
SWEEP = [Case(f"sweep-{n}", 1, 8, n, 64) for n in (128, 256, 512, 2048, 8192)]


def is_sweep(case: Case) -> bool:
    """Whether a case belongs to the picture: float32, (1, 8, len, 64), no options."""
    plain = replace(case, ratio=0.0, share=0.0, seconds=0.0, against="")
    return plain == Case(case.name, 1, 8, case.len_q, 64)
