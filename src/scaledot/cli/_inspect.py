"""``scaledot inspect``: a report on what each head looks at, for arrays in files or a model."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import scaledot
from scaledot import _stream, introspect, report
from scaledot._errors import type_error, value_error
from scaledot.cli import _files, _load, _model, _report, _run
from scaledot.cli._job import EVERY, Job, Part
from scaledot.cli._names import free_name
from scaledot.cli._progress import Progress

FINEST = 512
"""Rows and columns of a block map, at most."""

FINER = 16
"""Cells of the block maps for each byte of the report, which joins them to what fits."""

SHOWN = 3
"""Heads that are printed for each kind of finding: those with the highest scores."""

Tokens = tuple[str, ...] | None

InputFiles = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="INPUT",
        help="A .npz or .safetensors file that holds query and key (or q and k), or .npy files in "
        "this order. A value may be there, as for run; it is not read.",
    ),
]
OutputFile = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", metavar="OUTPUT",
        help="The report, a .html file; otherwise it is named after the model or the first INPUT, "
        "MODEL-attention.html or the next free name.",
    ),
]  # fmt: skip
TokensFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Tokens of the queries: a list in a .json file, else UTF-8 text with one a line.",
    ),
]
KeyTokensFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Tokens of the keys, where they are not the queries'."),
]
Title = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT",
        help="Heading, by default the name of the one INPUT, or of the model and what it is shown.",
    ),
]
LayerAxis = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Axis of the layers, from 0, for arrays of five axes or more; of the other leading "
        "axes entry 0 is shown. By default the only leading axis that is longer than 1.",
    ),
]
MaxBytes = Annotated[int, typer.Option(metavar="N", help="Size of the report, at most.")]
Force = Annotated[bool, typer.Option("--force", help="Replace OUTPUT if it exists.")]


def inspect(
    inputs: InputFiles = None,
    output: OutputFile = None,
    model: _load.ModelPlace = None,
    text: _model.Text = None,
    image: _model.ImageFile = None,
    audio: _model.AudioFile = None,
    attention: _model.Attention = None,
    max_tokens: _model.MaxTokens = None,
    tokens: TokensFile = None,
    key_tokens: KeyTokensFile = None,
    title: Title = None,
    layer_axis: LayerAxis = None,
    causal: _run.Causal = False,
    window: _run.Window = None,
    scale: _run.Scale = None,
    softcap: _run.Softcap = None,
    mask: _run.Mask = None,
    bias: _run.Bias = None,
    dtype: _run.Dtype = None,
    impl: _run.Impl = "auto",
    max_bytes: MaxBytes = report.MAX_BYTES,
    force: Force = False,
    threads: _run.Threads = None,
) -> None:
    """Show in one HTML page what each head looks at.

    INPUT are arrays in files. Those of four axes are (num_layers, num_heads, len, d); a batch in
    place of the layers is shown as if its entries were layers. Arrays of three axes are one layer,
    of two axes one head.

    With --model DIR and --text, --image or --audio, a model that transformers knows is run once, in
    float32 unless --dtype says otherwise, and the attention of all its layers is shown. It is read
    from this machine only.

    The page needs no network. It holds all weights where they fit, else maps of them, which are
    computed in memory that is linear in the length. Findings, heads that do something well known,
    are printed too.
    """
    started = time.perf_counter()
    of_arrays = {
        "INPUT": bool(inputs), "--tokens": tokens, "--key-tokens": key_tokens,
        "--layer-axis": layer_axis, "--causal": causal, "--window": window, "--scale": scale,
        "--softcap": softcap, "--mask": mask, "--bias": bias, "--impl": impl != "auto",
    }  # fmt: skip
    asked = _model.Asked(text, image, audio, attention, max_tokens)
    _check_together(model is not None, of_arrays, asked)
    with _run.limited(threads):
        source = None if model is None else _load.source_of(model)
        if output is None:
            output = free_name(_own_name(source, inputs or []), force)
        target = report.check_target(output, overwrite=force)
        if source is not None:
            working = dtype or "float32"
            trace = _model.look(source, asked, working, title, typer.echo)
        else:
            scalars = {"causal": causal, "window": _run.window_of(window), "scale": scale,
                       "softcap": softcap, "impl": impl}  # fmt: skip
            files = inputs or []
            opened = _opened(files, mask, bias)
            job = Job(opened, _run.dtype_of(opened, dtype), scalars)
            trace = _of_arrays(job, files, (tokens, key_tokens), title, layer_axis, max_bytes)
            working = job.dtype.name
        report.write(trace, target, overwrite=force, max_bytes=max_bytes)
    _show(trace, working)
    seconds, size = time.perf_counter() - started, target.stat().st_size
    typer.echo(f"\nReport: {output} ({_report.as_bytes(size)}), after {seconds:.3g} s")


def _own_name(source: _load.Source | None, files: list[Path]) -> str:
    """Name of a report: no other model's, nor that of the demonstration."""
    if source is None:
        name = files[0].stem
    else:
        name = source.name if source.gguf is None else Path(source.gguf).stem
    return f"{name}-attention.html"


def _check_together(has_model: bool, of_arrays: dict[str, Any], asked: _model.Asked) -> None:
    """Raise unless there are either files or a model, each with its own options."""
    of_model = {f"--{n.replace('_', '-')}": x for n, x in asked._asdict().items()}
    wrong = [
        name for name, value in (of_arrays if has_model else of_model).items()
        if value is not None and value is not False
    ]
    if wrong and has_model:
        raise value_error(
            "--model must not come with INPUT or options for arrays", ", ".join(wrong),
            "The model says which attention it is.",
        )
    if wrong:
        raise value_error(
            f"{wrong[0]} must come with --model", ", ".join(wrong), "Pass the model's directory."
        )
    if not has_model and not of_arrays["INPUT"]:
        raise value_error(
            "there must be INPUT or --model", "neither",
            "Pass files with query and key, or the directory of a model.",
        )


def _of_arrays(
    job: Job, files: list[Path], tokens: tuple[Path | None, Path | None], title: str | None,
    layer_axis: int | None, max_bytes: int,
) -> introspect.Trace:  # fmt: skip
    """Look at the arrays of a job."""
    layers = _layers(job, layer_axis)
    names = _names(job, *tokens)
    if title is None:
        title = files[0].name if len(files) == 1 else ""
    return introspect.Trace(_looked_at(job, layers, max_bytes), *names, title)


def _opened(files: list[Path], mask: str | None, bias: str | None) -> _files.Inputs:
    """Find query, key and the arrays of options; the key stands in for the value."""
    endings = [file.suffix.lower() for file in files]
    if endings in ([".npy"] * 2, [".npy"] * 3):
        opened = _files.open_inputs([*files, *files[1:]][:3], mask, bias)
        return dataclasses.replace(opened, value=opened.key)
    if endings not in ([".npz"], [".safetensors"]):
        raise value_error(
            "INPUT must be one .npz file, one .safetensors file, or two or three .npy files",
            " ".join(map(str, files)),
            "Pass one file with query and key, or .npy files in this order.",
        )
    opening = _files.open_npz if endings == [".npz"] else _files.open_safetensors
    with opening(files[0]) as arrays:
        query, key = (_files.pick(arrays, files[0], n, n, n[0]) for n in ("query", "key"))
        terms = (
            None if name is None else _files.pick(arrays, files[0], role, name)
            for role, name in (("mask", mask), ("bias", bias))
        )
        return _files.Inputs(query, key, key, *terms)


def _layers(job: Job, axis: int | None) -> list[Part]:
    """Check the call; return each layer, all its heads."""
    _ = job.plan  # raises where arrays and options do not fit
    lead, shape = job.out_shape[:-3], job.out_shape[:-1]
    if 0 in (*shape, job.len_kv):
        raise value_error(
            "there must be at least one layer, head, query and key",
            f"query {job.inputs.query.shape}, key {job.inputs.key.shape}", "Nothing can be shown.",
        )
    if axis is None:
        several = [i for i, n in enumerate(lead) if n > 1]
        if len(several) > 1:
            raise value_error(
                "only one axis before (num_heads, len, d) may be longer than 1",
                f"{lead}", "Choose the axis of the layers with --layer-axis.",
            )
        axis = several[0] if several else 0
    elif not 0 <= axis < len(lead):
        raise value_error(
            "--layer-axis must be one of the axes before (num_heads, len, d)",
            f"{axis} with {len(lead)} such axes", "Axes count from 0.",
        )
    num_heads = shape[-2] if len(shape) > 1 else 1
    kv_heads = _kv_heads(job)
    return [
        Part(
            tuple(slice(i, i + 1) if a == axis else slice(0, 1) for a in range(len(lead))),
            EVERY, num_heads // kv_heads, kv_heads,
        )
        for i in range(lead[axis] if lead else 1)
    ]  # fmt: skip


def _kv_heads(job: Job) -> int:
    shape = job.inputs.key.shape
    return int(shape[-3]) if len(shape) > 2 else 1


def _names(job: Job, tokens: Path | None, key_tokens: Path | None) -> tuple[Tokens, Tokens]:
    """Tokens of the queries and of the keys, one for each."""
    queries = None if tokens is None else _read_tokens(tokens)
    keys = None if key_tokens is None else _read_tokens(key_tokens)
    for option, file, found, length, of in (
        ("--tokens", tokens, queries, job.len_q, "queries"),
        ("--key-tokens", key_tokens, keys, job.len_kv, "keys"),
    ):
        if found is not None and len(found) != length:
            raise value_error(
                f"{option} must hold one token for each of the {length:,} {of}",
                f"{len(found):,} in {file}", "Each line is a token, an empty one too.",
            )
    if queries is not None and keys is None and job.len_kv != job.len_q:
        raise value_error(
            f"--key-tokens must be there for {job.len_kv:,} keys beside {job.len_q:,} queries",
            "--tokens alone", "Write the tokens of the keys to a file, too.",
        )
    return queries, keys


def _read_tokens(file: Path) -> tuple[str, ...]:
    """Read tokens from a list in JSON or from lines; the last line may end or not."""
    try:
        text = file.read_text(encoding="utf-8-sig")
        found = json.loads(text) if file.suffix.lower() == ".json" else text.split("\n")
    except ValueError as error:
        raise value_error(
            f"{file} must be UTF-8 text, and JSON where its name ends in .json",
            f"one that cannot be read ({error})", "Write it again.",
        ) from None
    if file.suffix.lower() != ".json":
        return tuple(found[:-1] if found[-1] == "" else found)
    kinds = {type(token) for token in found} if isinstance(found, list) else {type(found)}
    if not isinstance(found, list) or not kinds <= {str, int}:
        raise type_error(
            f"{file} must hold a list of strings, or of the numbers of tokens",
            ", ".join(sorted(kind.__name__ for kind in kinds)), 'Write ["the", "animal"].',
        )
    return tuple(map(str, found))


def _looked_at(job: Job, layers: list[Part], max_bytes: int) -> tuple[introspect.Layer, ...]:
    """Look at each layer: with query and key where a report can hold all weights, else maps."""
    part = layers[0]
    heads = len(layers) * part.pairs * part.group
    whole = heads * job.len_q * job.len_kv * 2 <= max_bytes  # two bytes for each weight
    side = min(FINEST, max(1, math.isqrt(FINER * max(0, max_bytes) // heads)))
    found = []
    with Progress("attention", heads * job.len_q, "rows of weights") as progress:
        for number, part in enumerate(layers):
            name = f"layer {number}" if job.out_shape[:-3] else "attention"
            if whole:
                found.append(_kept(job, part, name))
            else:
                rows = number * (heads // len(layers)) * job.len_q
                found.append(_mapped(job, part, name, side, progress, rows))
    return tuple(found)


def _kept(job: Job, part: Part, name: str) -> introspect.Layer:
    """Look at a layer and keep its query and key."""
    options = job.options(part, slice(0, job.len_q))
    return introspect.look(job.operand("query", part), job.operand("key", part), name=name,
                           **options)  # fmt: skip


def _mapped(
    job: Job, part: Part, name: str, side: int, progress: Progress, done: int
) -> introspect.Layer:
    """Look at a layer, one key head after the other; keep statistics and block maps only."""
    shape = (min(side, job.len_q), min(side, job.len_kv))
    found = []
    for head in range(part.pairs):
        heads = EVERY if part.pairs == 1 else slice(head, head + 1)
        group = Part(part.lead, heads, part.group, 1)
        query, key = job.operand("query", group), job.operand("key", group)
        options = job.options(group, slice(0, job.len_q))
        found.append(introspect.look(query, key, name=name, map_shape=shape, **options))
        done += part.group * job.len_q
        progress.update(done, done)
        _stream.give_back(query, key)
        found[-1] = dataclasses.replace(found[-1], query=None, key=None)
    options = {n: x for n, x in found[0].options.items() if n not in ("mask", "bias")}
    fields = zip(*(layer.stats for layer in found), strict=True)
    return introspect.Layer(name, scaledot.Stats(*map(_joined, fields)), options=options)


def _joined(heads: tuple[Any, ...]) -> Any:
    """Statistics of all heads of a layer from those of some; keys and counts in 32 bits."""
    if heads[0] is None:
        return None
    joined = np.concatenate(heads)
    return joined.astype(np.int32) if joined.dtype.kind == "i" else joined


def _show(trace: introspect.Trace, dtype: str) -> None:
    """Print shapes, how many heads do what, and all that those with the highest scores do."""
    first = trace.layers[0]
    typer.echo(
        f"layers {len(trace.layers):,}, heads {first.num_heads:,}, queries {first.len_q:,}, keys "
        f"{first.len_kv:,}, {dtype}\n"
    )
    found, unknown = introspect.findings(trace), introspect.unknown(trace)
    told = [kind for kind in introspect.KINDS if kind not in unknown]
    if told and not found:
        typer.echo(f"No head does one of: {', '.join(told)}")
    if found:
        _show_heads(trace, found)
    for reason in dict.fromkeys(unknown.values()):
        kinds = [kind for kind in unknown if unknown[kind] == reason]
        typer.echo(f"Could not be told: {', '.join(kinds)} ({reason})")


def _show_heads(trace: introspect.Trace, found: list[introspect.Finding]) -> None:
    """Print how many heads do what; then a line for each of those with the highest scores."""
    of_head: dict[tuple[int, int], list[introspect.Finding]] = {}
    of_kind: dict[str, list[introspect.Finding]] = {kind: [] for kind in introspect.KINDS}
    for f in found:
        of_head.setdefault((f.layer, f.head), []).append(f)
        of_kind[f.kind].append(f)
    counts = [f"{kind} {len(heads):,}" for kind, heads in of_kind.items() if heads]
    total = sum(layer.num_heads for layer in trace.layers)
    typer.echo(f"Found in {len(of_head):,} of {total:,} heads: {', '.join(counts)}")
    best = {
        (f.layer, f.head)
        for heads in of_kind.values()
        for f in sorted(heads, key=lambda f: -f.score)[:SHOWN]
    }
    names = {place: f"{trace.layers[place[0]].name}, head {place[1]}" for place in best}
    width = max(map(len, names.values()))
    for place in sorted(best):
        told = (f"{f.kind} {f.score:.2f}" for f in sorted(of_head[place], key=lambda f: -f.score))
        typer.echo(f"{names[place]:<{width}}  {', '.join(told)}")
    if len(of_head) > len(best):
        typer.echo(f"and {len(of_head) - len(best):,} more, in the report")
