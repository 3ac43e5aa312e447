"""``scaledot run``: attention on arrays in files."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import scaledot
from scaledot._arrays import FLOATS
from scaledot._errors import type_error, value_error
from scaledot.cli import _head_stats, _report
from scaledot.cli._files import (
    OPERANDS,
    Inputs,
    NDArrayAny,
    Output,
    Source,
    bfloat16,
    check_output,
    check_storable,
    open_inputs,
)
from scaledot.cli._progress import Progress

BLOCK_SECONDS = 0.25
MOST_BLOCKS = 64


@dataclass(frozen=True)
class Job:
    """One call on files: where the arrays are, in which dtype it runs, and its options."""

    inputs: Inputs
    dtype: np.dtype[Any]
    scalars: dict[str, Any]

    @property
    def len_q(self) -> int:
        """Number of queries."""
        return self.inputs.query.rows

    @property
    def len_kv(self) -> int:
        """Number of keys."""
        return self.inputs.key.rows

    def operand(self, name: str, rows: slice | None = None) -> NDArrayAny:
        """Query, key or value, or rows of it, in the job's dtype."""
        source: Source = getattr(self.inputs, name)
        return _converted(name, source.whole() if rows is None else source.read(rows), self.dtype)

    def options(self, rows: slice) -> dict[str, Any]:
        """Options of `scaledot.attention` for a block of queries, as they stand in one call."""
        options = {**self.scalars, "q_offset": self.len_kv - self.len_q + rows.start}
        for name in ("mask", "bias"):
            source: Source | None = getattr(self.inputs, name)
            if source is not None:
                array = source.whole() if source.rows == 1 else source.read(rows)
                options[name] = array.astype(array.dtype.newbyteorder("="), copy=False)
        return options

    def plan(self) -> scaledot.Plan:
        """Check the whole call and say how it will run; no data is read."""

        def stand_in(source: Source, dtype: np.dtype[Any]) -> NDArrayAny:
            return np.broadcast_to(np.zeros((), dtype), source.shape)

        arrays: dict[str, Any] = {
            name: stand_in(
                source, self.dtype if name in OPERANDS else source.dtype.newbyteorder("=")
            )
            for name, source in self.inputs.given.items()
        }
        return scaledot.explain(**arrays, **self.scalars)

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of the result, for a job that `plan` has found right."""
        shapes = [getattr(self.inputs, name).shape for name in OPERANDS]
        if all(len(shape) == 2 for shape in shapes):
            return (self.len_q, shapes[2][-1])
        heads = shapes[0][-3] if len(shapes[0]) > 2 else 1
        lead = np.broadcast_shapes(*(shape[:-3] for shape in shapes))
        return (*lead, heads, self.len_q, shapes[2][-1])


@dataclass
class Timing:
    """Seconds in all and in the attention calls alone, and the memory seen between blocks."""

    started: float = field(default_factory=time.perf_counter)
    attention: float = 0.0
    anonymous: int = 0

    @property
    def total(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.started


def _converted(name: str, array: NDArrayAny, dtype: np.dtype[Any]) -> NDArrayAny:
    with np.errstate(over="raise"):
        try:
            return array.astype(dtype, copy=False)
        except FloatingPointError:
            largest = float(np.nanmax(np.abs(array[np.isfinite(array)])))
            raise value_error(
                f"{name} must fit into {dtype.name}", f"an entry of size {largest:.6g}",
                "Choose a --dtype with a wider range.",
            ) from None


def _dtype_of(inputs: Inputs, asked: str | None) -> np.dtype[Any]:
    """Dtype of the work: the one asked for, else the one that query, key and value share."""
    sources = {name: inputs.given[name] for name in OPERANDS}
    if asked is not None:
        if asked not in FLOATS:
            raise value_error(
                f"--dtype must be one of {', '.join(FLOATS)}", asked, "Leave it out to keep the "
                "dtype of the input."
            )
        for name, source in sources.items():
            if source.dtype.kind not in "iuf" and source.dtype.name != "bfloat16":
                raise type_error(
                    f"{name} must hold real numbers to be converted", f"{source.dtype} in "
                    f"{source.place}", "Save it as floating-point numbers.",
                )
        return bfloat16() if asked == "bfloat16" else np.dtype(asked)
    names = {source.dtype.name for source in sources.values()}
    if len(names) > 1 or not names <= set(FLOATS):
        given = ", ".join(f"{name} {source.dtype.name}" for name, source in sources.items())
        raise type_error(
            f"query, key and value must share one dtype of {', '.join(FLOATS)}", given,
            "Pass --dtype float32 to convert them.",
        )
    return inputs.query.dtype.newbyteorder("=")


def _window(text: str | None) -> tuple[int | None, int | None] | None:
    if text is None:
        return None
    sides = [side.strip().lower() for side in text.split(",")]
    try:
        left, right = (None if side in ("", "none") else int(side) for side in sides)
    except ValueError:
        raise value_error(
            "--window must be two integers LEFT,RIGHT", repr(text),
            "Write none for no limit, for example --window 128,0 or --window none,16.",
        ) from None
    return left, right


def _blocks(job: Job, plan: scaledot.Plan, heads: int) -> Iterator[slice]:
    """Cut the queries into blocks that take about `BLOCK_SECONDS` each, from the last one's time.

    A block is a multiple of the plan's tile, and none is shorter (unless there are fewer
    queries): so a block's tiles are those of one call, and its bits too.
    """
    unit = max(1, plan.block_q)
    fewest = max(1, math.ceil(scaledot.get_num_threads() / max(1, heads)))
    count, start = fewest, 0
    while start < job.len_q:
        stop = min(start + count * unit, job.len_q)
        if job.len_q - stop < unit:
            stop = job.len_q
        before = time.perf_counter()
        yield slice(start, stop)
        seconds = max(time.perf_counter() - before, 1e-9)
        # Growth is limited, for the first block may be no measure of the others.
        wanted = min(BLOCK_SECONDS / seconds * count, 4 * count, MOST_BLOCKS)
        count = max(fewest, int(wanted))
        start = stop


def _work_before(job: Job) -> NDArrayAny:
    """Keys seen by all queries before each, and one more per query, by causal and window alone."""
    left, right = job.scalars["window"] or (None, None)
    right = 0 if job.scalars["causal"] else right
    position = np.arange(job.len_q) + job.len_kv - job.len_q
    low = np.zeros_like(position) if left is None else np.maximum(0, position - left)
    high = job.len_kv if right is None else np.minimum(job.len_kv, position + right + 1)
    return np.concatenate(([0], np.cumsum(np.maximum(0, high - low) + 1)))


def _attend(job: Job, plan: scaledot.Plan, out: NDArrayAny, timing: Timing) -> None:
    """Compute the result block by block."""
    key, value = job.operand("key"), job.operand("value")
    work = _work_before(job)
    heads = math.prod(job.out_shape[:-2])
    with Progress("attention", int(work[-1]), "queries") as progress:
        for rows in _blocks(job, plan, heads):
            query = job.operand("query", rows)
            options = job.options(rows)
            before = time.perf_counter()
            result = scaledot.attention(query, key, value, **options)
            timing.attention += time.perf_counter() - before
            out[..., rows, :] = result
            timing.anonymous = max(timing.anonymous, _report.anonymous_memory() or 0)
            progress.update(int(work[rows.stop]), rows.stop)


InputFiles = Annotated[
    list[Path],
    typer.Argument(
        metavar="INPUT",
        help="A .npz or .safetensors file that holds query, key and value (or q, k, v), or three "
        ".npy files in this order.",
    ),
]
OutputFile = Annotated[
    Path,
    typer.Option(
        "--output", "-o", metavar="OUTPUT",
        help="A .npy, .npz or .safetensors file; the array in it is called out.",
    ),
]
Causal = Annotated[
    bool,
    typer.Option("--causal", help="Hide keys after a query; the last query is at the last key."),
]
Window = Annotated[
    str | None,
    typer.Option(metavar="LEFT,RIGHT", help="Reach of a query; none is no limit: 128,none."),
]
Scale = Annotated[
    float | None, typer.Option(metavar="X", help="Factor of the scores, by default 1/√d_k.")
]
Softcap = Annotated[
    float | None, typer.Option(metavar="X", help="Cap the scores: X·tanh(score / X).")
]
Mask = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Boolean array, True = may be seen: its name in INPUT, or a .npy file beside .npy "
        "inputs.",
    ),
]
Bias = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Array that is added to the scores, named like the mask."),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="DTYPE",
        help="Convert to float32, float64, float16 or bfloat16 before the work.",
    ),
]
Impl = Annotated[str, typer.Option(metavar="NAME", help="auto, kernels, blockwise or dense.")]
Stats = Annotated[
    bool, typer.Option("--stats", help="Describe the weights of each head, over all queries.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace OUTPUT if it exists.")]
Threads = Annotated[
    int | None, typer.Option(metavar="N", help="Threads to use; results do not depend on it.")
]


def run(
    inputs: InputFiles,
    output: OutputFile,
    causal: Causal = False,
    window: Window = None,
    scale: Scale = None,
    softcap: Softcap = None,
    mask: Mask = None,
    bias: Bias = None,
    dtype: Dtype = None,
    impl: Impl = "auto",
    stats: Stats = False,
    force: Force = False,
    threads: Threads = None,
) -> None:
    """Compute attention on arrays in files.

    Files are mapped into memory where the format allows, and read and written in blocks.
    """
    timing = Timing()
    threads_before = scaledot.get_num_threads()
    if threads is not None:
        if threads < 1:
            raise value_error("--threads must be at least 1", threads, "Leave it out to use all.")
        scaledot.set_num_threads(threads)
    try:
        check_output(output, force=force)
        opened = open_inputs(inputs, mask, bias)
        job = Job(
            opened, _dtype_of(opened, dtype),
            {"causal": causal, "window": _window(window), "scale": scale, "softcap": softcap,
             "impl": impl},
        )
        check_storable(output, job.dtype)
        plan = job.plan()
        with Output(output, job.out_shape, job.dtype, force=force) as out:
            _attend(job, plan, out.array, timing)
            table = _head_stats.head_stats(job) if stats else None
            size = out.commit()
        _report.show(job, plan, timing, output, size, table)
    finally:
        scaledot.set_num_threads(threads_before)
