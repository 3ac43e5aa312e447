"""What the matrix of scores costs, and what attention takes without it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from scaledot import plot
from scaledot._attention import attention
from scaledot._explain import explain
from scaledot._threads import get_num_threads
from scaledot._typing import Array, Impl
from scaledot.lessons._measure import extra_memory
from scaledot.lessons._page import Table

_ABSENT = "not here"


@dataclass(frozen=True)
class Memory:
    """Result of `memory`; each tuple has one entry for each length, bytes where not said.

    ``kernels_predicted`` is None where compiled kernels cannot do the job.
    """

    title: ClassVar[str] = "Memory: attention without the n × n matrix"
    text: ClassVar[str] = (
        "n tokens have n × n scores, so eight times the length takes 64 times the memory. Softmax "
        "can be computed tile by tile: each tile leaves a partial result and the log of its sum, "
        "and two such results merge into one. The answer is the same. What it takes is a tile and "
        "its copies: more than the matrix of a short input, and no more for a long one. The "
        "kernels also hold keys and values once more, in the order in which they read them."
    )
    num_threads: int
    d_k: int
    lengths: tuple[int, ...]
    scores: tuple[int, ...]
    full_matrix: tuple[int, ...]
    blockwise_measured: tuple[int, ...]
    blockwise_predicted: tuple[int, ...]
    kernels_predicted: tuple[int | None, ...]

    def tables(self) -> tuple[Table, ...]:
        """Return the sizes of the matrix, and the extra memory of each implementation."""
        matrix = tuple(
            (f"{n:,}", f"{scores:,}", f"{size:,}")
            for n, scores, size in zip(self.lengths, self.scores, self.full_matrix, strict=True)
        )
        columns = zip(
            self.lengths, self.blockwise_measured, self.blockwise_predicted,
            self.kernels_predicted, strict=True,
        )
        extra = tuple(
            (f"{n:,}", f"{seen:,}", f"{said:,}", _ABSENT if other is None else f"{other:,}")
            for n, seen, said, other in columns
        )
        caption = (
            "bytes besides arguments and result, predicted by explain; "
            f"{self.num_threads} thread{'s' if self.num_threads > 1 else ''}"
        )
        return (
            Table(("n", "scores", "full matrix, bytes"), matrix, f"float64, d_k = {self.d_k}"),
            Table(("n", "blockwise, measured", "predicted", "kernels in float32"), extra, caption),
        )

    def plot(self, ax: plot.Axes | None = None) -> plot.Axes:
        """Draw bytes over the length."""
        curves: dict[str, tuple[float, ...]] = {
            "full matrix": self.full_matrix,
            "blockwise, measured": self.blockwise_measured,
            "blockwise, predicted": self.blockwise_predicted,
        }
        known = tuple(size for size in self.kernels_predicted if size is not None)
        if len(known) == len(self.lengths):
            curves["kernels in float32, predicted"] = known
        return plot.curves(
            self.lengths, curves, x_label="n, tokens", y_label="bytes",
            title="Memory for one head in float64", ax=ax,
        )


def memory() -> Memory:
    """Compare the bytes of all scores with what attention needs.

    Returns
    -------
    Memory
        For n = 3, 512 and 4096 tokens in one head, 64 wide, in float64: the matrix of scores,
        the extra memory of ``impl="blockwise"`` as measured and as `scaledot.explain` predicts,
        and what it predicts for ``impl="kernels"``, which computes in float32.

    Notes
    -----
    Measured with ``tracemalloc``: the peak during the call without the result. At n = 3 it is
    mostly Python's own objects.

    References
    ----------
    arXiv 2112.05682, 2205.14135.
    """
    d_k, lengths = 64, (3, 512, 4096)
    rng = np.random.default_rng(0)
    measured, blockwise, kernels = [], [], []
    for n in lengths:
        query, key, value = rng.standard_normal((3, n, d_k))
        attention(query[:1], key[:1], value[:1], impl="blockwise")  # imports are not its memory
        run = functools.partial(attention, query, key, value, impl="blockwise")
        measured.append(extra_memory(run)[1])
        blockwise.append(explain(query, key, value, impl="blockwise").peak_extra_memory)
        single = [x.astype(np.float32) for x in (query, key, value)]  # what kernels compute in
        kernels.append(_predicted(single[0], single[1], single[2], "kernels"))
    return Memory(
        num_threads=get_num_threads(),
        d_k=d_k,
        lengths=lengths,
        scores=tuple(n * n for n in lengths),
        full_matrix=tuple(n * n * np.dtype(np.float64).itemsize for n in lengths),
        blockwise_measured=tuple(measured),
        blockwise_predicted=tuple(blockwise),
        kernels_predicted=tuple(kernels),
    )


def _predicted(query: Array, key: Array, value: Array, impl: Impl) -> int | None:
    """Peak extra memory that explain predicts; None where the implementation cannot do it."""
    try:
        return explain(query, key, value, impl=impl).peak_extra_memory
    except ValueError:
        return None
