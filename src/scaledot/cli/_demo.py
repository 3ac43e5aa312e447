"""``scaledot demo``: attention on a real sentence, beside the textbook computation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from scaledot import introspect, plot, report
from scaledot._attention import attention, attention_weights
from scaledot._errors import value_error
from scaledot._explain import explain
from scaledot._threads import get_num_threads
from scaledot.cli._names import free_name
from scaledot.lessons._measure import best_seconds, extra_memory
from scaledot.lessons._sentence import Sentence, load

DEFAULT_PICTURE = "scaledot-demo.png"
DEFAULT_REPORT = "attention.html"

TELLING = {
    (3, 1): "it → animal",
    (0, 2): "one before",
    (1, 8): "one after",
    (4, 5): "rests",
    (2, 1): "it → tired",
}
"""Heads, as (layer, head), whose weights are easy to read, with what to look for."""

_REPEATS = 128

Floats = npt.NDArray[Any]


class Row(NamedTuple):
    """One way to compute the same result, as measured."""

    name: str
    seconds: float
    memory: int | None
    error: float


def demo(
    picture: Annotated[
        Path | None,
        typer.Option(
            "--plot", metavar="FILE",
            help=f"Where to draw, .png or .svg; otherwise {DEFAULT_PICTURE} or the next free name.",
        ),
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option(
            "--report", metavar="FILE",
            help="Where to write the report of all heads, a .html file; otherwise "
            f"{DEFAULT_REPORT} or the next free name.",
        ),
    ] = None,
    without_report: Annotated[
        bool, typer.Option("--no-report", help="Write no report.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the picture and the report if they exist.")
    ] = False,
    layer: Annotated[int, typer.Option(help="Layer of the head to draw, from 0.")] = 3,
    head: Annotated[int, typer.Option(help="Head to draw, from 0.")] = 1,
) -> None:
    """Attention in a real model on one sentence: who looks at whom, how exact, at what cost."""
    data = load()
    num_layers, num_heads = data.query.shape[:2]
    if not (0 <= layer < num_layers and 0 <= head < num_heads):
        raise value_error(
            f"--layer must be 0 to {num_layers - 1} and --head 0 to {num_heads - 1}",
            f"{layer} and {head}", "Both count from 0.",
        )
    if page is not None and without_report:
        raise value_error("--report and --no-report must not be given together", "both",
                          "Leave one out.")  # fmt: skip
    if picture is not None:  # before the work
        plot.check_target(picture, overwrite=force)
        plot.axes()
    if page is not None:
        report.check_target(page, overwrite=force)
    console = Console(highlight=False, markup=False)
    _introduce(console, data)
    weights = attention_weights(data.query, data.key)  # (layers, heads, len, len)
    _show_heads(console, data, weights, (layer, head))
    _compare(console, data)
    typer.echo()
    _draw(data, weights[layer, head], (layer, head), picture, force)
    if not without_report:
        _report(data, page, force)


def _introduce(console: Console, data: Sentence) -> None:
    num_layers, num_heads, length, d_k = data.query.shape
    console.print(Text(f"“{data.sentence}”", style="bold"))
    console.print(
        "Queries, keys and values of a pretrained BERT that reads this sentence of "
        f"{length} tokens: {num_layers} layers of {num_heads} heads, {d_k} wide. "
        "Layers and heads count from 0.\n"
        f"Model: {data.model} ({data.licence}), from {data.source}."
    )


def _show_heads(
    console: Console, data: Sentence, weights: Floats, chosen: tuple[int, int]
) -> None:
    """Print what each token attends to most in telling heads, or in the one asked for."""
    places = tuple(TELLING) if chosen in TELLING else (chosen,)
    table = Table(box=box.SIMPLE, padding=0, pad_edge=False)
    table.add_column("token", no_wrap=True)
    for place in places:
        name = f"layer {place[0]}\nhead {place[1]}\n{TELLING.get(place, '')}".rstrip()
        table.add_column(Text(name), justify="right", no_wrap=True)
    for i, token in enumerate(data.tokens):
        cells = [Text(token)]
        for place in places:
            row = weights[place][i]
            cells.append(Text(f"{data.tokens[int(row.argmax())]} {row.max():.3f}"))
        table.add_row(*cells, style="bold" if token == "it" else "")
    console.print("\nWhat each token attends to most, and with which weight (of 1):")
    console.print(table)
    if chosen in TELLING:
        it, animal = data.tokens.index("it"), data.tokens.index("animal")
        console.print(
            f"Head 1 of layer 3 links “it” to “animal” ({weights[3, 1, it, animal]:.3f}), others "
            "follow positions or rest on the first token. Weights say where a head reads from, "
            "not what the model understands."
        )


def _compare(console: Console, data: Sentence) -> None:
    """Print time, memory and error: all heads on the sentence, and one layer on a long input."""
    arrays = (data.query, data.key, data.value)
    truth = _textbook(*(x.astype(np.float64) for x in arrays))
    num_layers, num_heads, length, _ = data.query.shape
    console.print(f"\nAll {num_layers * num_heads} heads in one call:")
    with console.status("measuring"):
        rows = _measure(arrays, truth, repeats=50)
    console.print(_comparison(rows))
    # A sentence that repeats itself has the result of the sentence: the truth is known.
    layer = num_layers // 2
    long = tuple(np.tile(x[layer], (1, _REPEATS, 1)) for x in arrays)
    count = length * _REPEATS
    console.print(
        f"The same sentence {_REPEATS} times over: {count:,} tokens in the {num_heads} heads of "
        f"layer {layer}, {num_heads * count * count:,} scores:"
    )
    with console.status("measuring"):
        rows = _measure(long, np.tile(truth[layer], (1, _REPEATS, 1)), repeats=3)
    console.print(_comparison(rows))
    plan = explain(*long)
    threads = get_num_threads()
    console.print(
        f"Time: the best of some calls, the first excluded; scaledot on {threads} "
        f"thread{'s' if threads > 1 else ''}, here by {plan.implementation}. Memory: what NumPy "
        "holds at the peak besides arguments and result; PyTorch's is not visible from here. "
        "Error: the largest against float64. Textbook NumPy holds all scores at once, in place."
    )
    if not any(row.name.startswith("PyTorch") for row in rows):
        console.print("PyTorch is not installed, so it is not in the tables.")


def _textbook(query: Floats, key: Floats, value: Floats) -> Floats:
    """Compute softmax(Q Kᵀ / √d_k) V with the whole matrix of scores, in the arrays' dtype."""
    p = query @ key.swapaxes(-1, -2)  # (..., len_q, len_kv)
    p *= 1 / np.sqrt(query.shape[-1])
    p -= p.max(axis=-1, keepdims=True)
    np.exp(p, out=p)
    p /= p.sum(axis=-1, keepdims=True)
    out: Floats = p @ value
    return out


def _measure(arrays: tuple[Floats, ...], truth: Floats, repeats: int) -> list[Row]:
    """Error, memory and time of each way to compute attention on float32 arrays."""
    rows = []
    ways: list[tuple[str, Callable[[], Floats]]] = [
        ("scaledot", lambda: attention(*arrays)),
        ("textbook NumPy", lambda: _textbook(*arrays)),
    ]
    for name, call in ways:
        out, memory = extra_memory(call)
        rows.append(Row(name, best_seconds(call, repeats), memory, _largest(out, truth)))
    try:
        import torch
    except ImportError:
        return rows
    q, k, v = (torch.tensor(x) for x in arrays)

    def peer() -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    error = _largest(peer().numpy(), truth)
    rows.append(Row(f"PyTorch {torch.__version__}", best_seconds(peer, repeats), None, error))
    return rows


def _largest(out: Floats, truth: Floats) -> float:
    return float(np.abs(out - truth).max())


def _comparison(rows: list[Row]) -> Table:
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("")
    for column in ("time", "extra memory", "largest error"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        memory = "-" if row.memory is None else f"{row.memory / 2**20:,.2f} MiB"
        table.add_row(Text(row.name), f"{row.seconds * 1e3:,.2f} ms", memory, f"{row.error:.1e}")
    return table


def _draw(
    data: Sentence, weights: Floats, place: tuple[int, int], picture: Path | None, force: bool
) -> None:
    """Draw one head, or say in one line why not."""
    title = f"Layer {place[0]}, head {place[1]}: who looks at whom"
    try:
        drawing = plot.weights(weights, data.tokens, title=title)
    except ImportError as error:
        typer.echo(f"No picture: {error}")
        return
    target = free_name(DEFAULT_PICTURE, force) if picture is None else picture
    plot.save(drawing, target, overwrite=force)
    typer.echo(f"Picture of layer {place[0]}, head {place[1]}: {target}")


def _report(data: Sentence, page: Path | None, force: bool) -> None:
    """Write what all heads do on the sentence, and say where to look."""
    trace = introspect.trace(data.query, data.key, tokens=data.tokens, title=data.sentence)
    target = free_name(DEFAULT_REPORT, force) if page is None else page
    report.write(trace, target, overwrite=force)
    typer.echo(
        f"Report of all {len(trace.layers)} × {trace.layers[0].num_heads} heads: {target}\n"
        "Open it in a browser and look at layer 3, head 1: “it” looks at “animal” there."
    )
