"""``scaledot run``: attention on arrays in files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import scaledot
from scaledot._arrays import FLOATS
from scaledot._errors import type_error, value_error
from scaledot.cli import _head_stats, _report
from scaledot.cli._attend import Timing, attend
from scaledot.cli._files import OPERANDS, Inputs, bfloat16, open_inputs
from scaledot.cli._job import Job
from scaledot.cli._output import Output, check_output, check_storable


def dtype_of(inputs: Inputs, asked: str | None) -> np.dtype[Any]:
    """Dtype of the work: the one asked for, else the one that query, key and value share.

    Where no value is read, the key stands in its place.
    """
    read = OPERANDS if inputs.value is not inputs.key else OPERANDS[:2]
    sources = {name: inputs.given[name] for name in read}
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
            f"{', '.join(read[:-1])} and {read[-1]} must share one dtype of {', '.join(FLOATS)}",
            given,
            "Pass --dtype float32 to convert them.",
        )
    return inputs.query.dtype.newbyteorder("=")


def window_of(text: str | None) -> tuple[int | None, int | None] | None:
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
Force = Annotated[
    bool, typer.Option("--force", help="Replace OUTPUT and OUTPUT.partial if they exist.")
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Continue a run that was killed, from OUTPUT.partial, and keep that folder if this "
        "run is stopped.",
    ),
]
Threads = Annotated[
    int | None, typer.Option(metavar="N", help="Threads to use; results do not depend on it.")
]


@contextlib.contextmanager
def limited(threads: int | None) -> Iterator[None]:
    """Compute with so many threads; None leaves their number as it is."""
    if threads is not None and threads < 1:
        raise value_error("--threads must be at least 1", threads, "Leave it out to use all.")
    if threads is None:
        yield
        return
    scaledot.set_num_threads(threads)
    try:
        yield
    finally:
        scaledot.set_num_threads(None)


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
    resume: Resume = False,
    threads: Threads = None,
) -> None:
    """Compute attention on arrays in files.

    Files are mapped into memory where the format allows, and read and written in blocks. Keys and
    values of a head that are larger than 256 MiB are read in chunks, so that a run takes less than
    1 GiB of memory that is not a file's, whatever the size of files that are not compressed.

    Finished rows are in the folder OUTPUT.partial until the output is whole. A run that is killed
    leaves it: then --resume continues with the same arguments, --force starts anew, and without
    either the next run is an error. Other failures leave the folder only under --resume.
    """
    timing = Timing()
    with limited(threads):
        check_output(output, force=force)
        opened = open_inputs(inputs, mask, bias)
        job = Job(
            opened, dtype_of(opened, dtype),
            {"causal": causal, "window": window_of(window), "scale": scale, "softcap": softcap,
             "impl": impl},
        )
        check_storable(output, job.dtype)
        plan = job.plan
        with Output(
            output, job.out_shape, job.dtype, force=force, resume=resume, call=job.call(),
            may_stop=job.may_stop,
        ) as out:
            attend(job, out, timing)
            table = _head_stats.head_stats(job) if stats else None
            size = out.commit()
        _report.show(job, plan, timing, output, size, table)
