"""``scaledot bench``: a model's speed with eager, sdpa and scaledot attention."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

import scaledot
from scaledot import _threads, _watch, plot
from scaledot._errors import value_error
from scaledot.cli import _load, _run
from scaledot.cli._progress import Progress

WAYS = ("eager", "sdpa", "scaledot")
"""Implementations that are measured: answers are compared with the first."""

BESIDE = "sdpa"
"""Speeds are beside this one's; beside the first's where transformers has none for a model."""

PROMPT_TOKENS = {"decoder": 2048, "encoder": 512}
"""Length of the prompt unless told otherwise, where the model has as many places."""

NEW_TOKENS = 64


@dataclass(frozen=True)
class Work:
    """What is measured: a pass over the inputs, then new tokens one by one.

    Attributes
    ----------
    model : transformers.PreTrainedModel
        In eval mode.
    inputs : mapping
        Arguments of the first pass.
    new_tokens : int
        Passes of one token after it; with 0 the model is run without its head.
    """

    model: Any
    inputs: Mapping[str, Any]
    new_tokens: int = 0


@dataclass
class Measured:
    """Seconds of the passes of one implementation, and how its answers compare.

    Attributes
    ----------
    prefill, decode : list of float
        One entry for each repetition.
    difference, allowed : float
        Largest difference from the answers of the first implementation, and what it may be.
    same : int
        Tokens chosen alike, of one more than there are new tokens.
    """

    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    difference: float = 0.0
    allowed: float = 0.0
    same: int = 0


def measure(
    work: Work, repeats: int, told: Callable[[], None] = lambda: None
) -> dict[str, Measured]:
    """Compare the answers of all implementations, then time them in turns.

    All follow the tokens that the first chooses, so all do the same work.

    Raises
    ------
    ValueError
        The model does not take one of the implementations, so that another would be measured in
        its place. Or answers are not finite. Or they differ by more than rounding: twice the
        difference of sdpa and eager, and a floor of ``eps · √len · max |answer|`` in float32 and
        of one rounding in the model's dtype. Where transformers has no sdpa for the model, it is
        left out, and what is read is rounded otherwise in its place.
    """
    torch = importlib.import_module("torch")
    before = work.model.config._attn_implementation
    found = {name: Measured() for name in ways(work.model)}
    try:
        with torch.inference_mode():
            follow = _compare(work, found, told)
            for _ in range(repeats):
                for name, figures in found.items():
                    _switch(work.model, name)
                    _, _, prefill, decode = _passed(work, follow)
                    figures.prefill.append(prefill)
                    figures.decode.append(decode)
                    told()
    finally:
        work.model.set_attn_implementation(before)
    return found


def ways(model: Any) -> tuple[str, ...]:
    """Implementations that can be measured: all, or without sdpa where transformers refuses it."""
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation("sdpa")
    except ValueError:
        return tuple(name for name in WAYS if name != "sdpa")
    finally:
        model.set_attn_implementation(before)
    return WAYS


def beside(found: Mapping[str, Measured]) -> str:
    """Name of the implementation that the speeds of the others are compared with."""
    return BESIDE if BESIDE in found else WAYS[0]


def _compare(work: Work, found: dict[str, Measured], told: Callable[[], None]) -> Any:
    """Check the answers of every implementation; return the tokens (new_tokens,) to follow."""
    torch = importlib.import_module("torch")
    answers, follow = {}, None
    for name in found:
        _switch(work.model, name)
        calls = 0

        def count(*_: Any) -> None:
            nonlocal calls
            calls += 1

        with _watch.watching(count):
            answer, chosen, _, _ = _passed(work, follow)
        if (calls > 0) != (name == "scaledot"):
            raise _not_exchanged(work.model, name)
        finite = int(answer.isfinite().sum())
        if finite < answer.numel():
            raise value_error(
                "the model's answers must be finite numbers",
                f"{answer.numel() - finite:,} of {answer.numel():,} with {name} that are not",
                "Nothing was timed. Check the weights, or choose another --dtype."
                if name == WAYS[0] else f"Nothing was timed; with {WAYS[0]} they are. Please "
                "report it, with the model's config.json.",
            )
        answers[name] = answer
        follow = chosen if follow is None else follow
        told()
    truth, length = answers[WAYS[0]], next(iter(work.inputs.values())).shape[-1]
    largest = float(truth.abs().max())
    eps = torch.finfo(torch.float32).eps * math.sqrt(length) + torch.finfo(work.model.dtype).eps
    other = answers[BESIDE] if BESIDE in answers else _nudged(work, follow)
    yardstick = float((other - truth).abs().max())
    for name, figures in found.items():
        figures.difference = float((answers[name] - truth).abs().max())
        figures.allowed = 2 * yardstick + eps * largest
        figures.same = int((answers[name].argmax(-1) == truth.argmax(-1)).sum())
        if not figures.difference <= figures.allowed:
            raise value_error(
                f"the answers of {name} must be those of {WAYS[0]} within {figures.allowed:.2g}",
                f"a difference of {figures.difference:.2g} (largest answer {largest:.3g})",
                "Nothing was timed. Please report it, with the model's config.json.",
            )
    return follow


def _nudged(work: Work, follow: Any) -> Any:
    """Answers of the first implementation where all that is read is one rounding away.

    That are pixels, or features of sound, or else the vectors of tokens.
    """
    torch = importlib.import_module("torch")

    def nudged(x: Any) -> Any:
        up = torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) < 0.5
        eps = torch.finfo(x.dtype).eps
        return torch.where(up, x * (1 + eps), x * (1 - eps))

    _switch(work.model, WAYS[0])
    read = {name: nudged(x) for name, x in work.inputs.items() if x.is_floating_point()}
    if read:
        return _passed(replace(work, inputs={**work.inputs, **read}), follow)[0]
    table = _load.embeddings(work.model)
    if table is None:
        raise value_error(
            f"the model must have input embeddings for answers to be compared without {BESIDE}",
            type(work.model).__name__, "Nothing was timed.",
        )
    hook = table.register_forward_hook(lambda module, args, out: nudged(out))
    try:
        return _passed(work, follow)[0]
    finally:
        hook.remove()


def _switch(model: Any, name: str) -> None:
    """Set an implementation, which transformers leaves as it is where it knows it has no effect."""
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise _not_exchanged(model, name)


def _not_exchanged(model: Any, name: str) -> ValueError:
    return value_error(
        f"the model must be one whose attention transformers can change to {name}",
        f"{type(model).__name__}, which computes its own", "Nothing was timed.",
    )  # fmt: skip


def _passed(work: Work, follow: Any) -> tuple[Any, Any, float, float]:
    """Answers (passes, width) in float32, the tokens fed, seconds of prefill and of decoding.

    Without tokens to follow, each is the best of the one before.
    """
    torch = importlib.import_module("torch")
    model = work.model
    start = time.perf_counter()
    if not work.new_tokens:
        out = model.base_model(**work.inputs).last_hidden_state
        return out.float().flatten(0, -2), None, time.perf_counter() - start, 0.0
    takes = inspect.signature(model.forward).parameters
    last = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
    transformers = importlib.import_module("transformers")
    cache, token = transformers.DynamicCache(config=model.config), "input_ids"
    if model.config.is_encoder_decoder:
        cache = transformers.EncoderDecoderCache(cache, transformers.DynamicCache())
        token = "decoder_input_ids"
    # Newer versions call the argument cache.
    cached = {"cache" if "cache" in takes else "past_key_values": cache, "use_cache": True}
    first = model(**work.inputs, **cached, **last)
    answers = [first.logits[0, -1]]
    if model.config.is_encoder_decoder:  # which is not run again
        cached["encoder_outputs"] = (first.encoder_last_hidden_state,)
    middle = time.perf_counter()
    fed = []
    for step in range(work.new_tokens):
        fed.append(answers[-1].argmax() if follow is None else follow[step])
        answers.append(model(**{token: fed[-1].reshape(1, 1)}, **cached).logits[0, -1])
    end = time.perf_counter()
    return torch.stack(answers).float(), torch.stack(fed), middle - start, end - middle


@contextlib.contextmanager
def threads_of_torch(threads: int | None) -> Iterator[int]:
    """Let torch compute with so many threads; None leaves their number as it is."""
    torch = importlib.import_module("torch")
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


Model = Annotated[
    Path,
    typer.Option(
        "--model", metavar="DIR",
        help="A directory with config.json and weights, or a .gguf file: of a decoder, or of an "
        "encoder of text.",
    ),
]  # fmt: skip
PromptTokens = Annotated[
    int | None,
    typer.Option(
        "--prompt-tokens", metavar="N",
        help="Length of the prompt, random tokens; 2048 if not given, of an encoder 512, or what "
        "the model has places for.",
    ),
]  # fmt: skip
NewTokens = Annotated[
    int | None,
    typer.Option(
        "--new-tokens", metavar="N",
        help=f"Tokens that a decoder adds, one by one; {NEW_TOKENS} if not given.",
    ),
]  # fmt: skip
Dtype = Annotated[
    str, typer.Option("--dtype", metavar="DTYPE", help="float32, bfloat16, float16 or float64.")
]
Repeats = Annotated[
    int, typer.Option("--repeats", metavar="N", help="Measurements; their median is shown.")
]
Picture = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", help="Draw the speeds: a .png or .svg file."),
]  # fmt: skip
Force = Annotated[bool, typer.Option("--force", help="Replace FILE if it exists.")]
Threads = Annotated[int | None, typer.Option("--threads", metavar="N", help="Threads to use.")]


def bench(
    model: Model,
    prompt_tokens: PromptTokens = None,
    new_tokens: NewTokens = None,
    dtype: Dtype = "float32",
    repeats: Repeats = 3,
    threads: Threads = None,
    output: Picture = None,
    force: Force = False,
) -> None:
    """Measure a model's tokens per second with eager, sdpa and scaledot attention.

    First the three are compared: all read the same prompt and follow the same tokens, and what they
    answer must be equal up to rounding. Then each is timed in turns. Where transformers has no sdpa
    for the model, it is left out.
    """
    for name, value in (("prompt-tokens", prompt_tokens), ("new-tokens", new_tokens),
                        ("repeats", repeats)):  # fmt: skip
        if value is not None and value < 1:
            raise value_error(f"--{name} must be at least 1", value, "Leave it out for the usual.")
    if output is not None:  # before the work
        plot.check_target(output, overwrite=force)
        plot.axes()
    source = _load.source_of(model)
    with _run.limited(threads), _load.quiet(), threads_of_torch(threads) as used:
        loaded = _load.load(source, dtype, typer.echo)
        work = _work(loaded, prompt_tokens, new_tokens)
        measured = ways(loaded)
        if measured != WAYS:
            typer.echo(
                f"transformers has no sdpa for {type(loaded).__name__}: it is left out, and speeds "
                f"are beside those of {WAYS[0]}"
            )
        passes = len(measured) * (repeats + 1)
        count = work.inputs["input_ids"].shape[-1]
        fits = _load.fitting(
            f"attention over a prompt of {count:,} tokens",
            f"{WAYS[0]} has matrices of {count:,} × {count:,}: pass fewer --prompt-tokens.",
        )
        with fits, Progress("measuring", passes, "passes") as progress:
            done = iter(range(1, passes + 1))

            def told() -> None:
                number = next(done)
                progress.update(number, number)

            found = measure(work, repeats, told)
    ours = threads or (scaledot.get_num_threads() if _threads.is_set() else used)
    title = (
        f"{source.name}, {dtype}, prompt of {count:,} tokens, "
        f"{used} of torch's threads, {ours} of scaledot's"
    )
    _show(title, work, found, repeats)
    if output is not None:
        plot.save(_drawn(source.name, work, found), output, overwrite=force)
        typer.echo(f"Picture: {output}")


def _work(model: Any, prompt_tokens: int | None, new_tokens: int | None) -> Work:
    """Choose prompt and new tokens as asked and as the model allows."""
    torch = importlib.import_module("torch")
    config = model.config
    if config.is_encoder_decoder or model.main_input_name != "input_ids":
        raise value_error(
            "the model must be a decoder, or an encoder of text", type(model).__name__,
            "scaledot inspect shows what others look at.",
        )
    writes = model.can_generate()
    if new_tokens is not None and not writes:
        raise value_error("--new-tokens must come with a model that writes", type(model).__name__,
                          "Leave it out.")  # fmt: skip
    new = (NEW_TOKENS if new_tokens is None else new_tokens) if writes else 0
    text = config.get_text_config()
    places = _load.places(model) or math.inf
    count = prompt_tokens
    if count is None:
        count = int(min(PROMPT_TOKENS["decoder" if writes else "encoder"], places - new))
    if count < 1 or count + new > places:
        raise value_error(
            f"prompt and new tokens must fit into the {places:,} places of the model",
            f"{count:,} and {new:,}", "Pass fewer --prompt-tokens or --new-tokens.",
        )
    prompt = torch.randint(
        text.vocab_size, (1, count), generator=torch.Generator().manual_seed(0)
    )
    return Work(model, {"input_ids": prompt}, new)


def speeds(work: Work, figures: Measured) -> tuple[float, float | None]:
    """Tokens per second of prefill and, where there are new ones, of decoding."""
    prompt = next(iter(work.inputs.values())).shape[-1]
    decode = work.new_tokens / statistics.median(figures.decode) if work.new_tokens else None
    return prompt / statistics.median(figures.prefill), decode


def _show(title: str, work: Work, found: dict[str, Measured], repeats: int) -> None:
    """Print the speeds, beside those of one implementation, and how the answers compare."""
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("attention")
    other_name = beside(found)
    columns = ["prefill\ntokens/s", f"\n× {other_name}"]
    if work.new_tokens:
        columns += ["decode\ntokens/s", f"\n× {other_name}", "same\ntokens"]
    for column in (*columns, "largest\ndifference"):
        table.add_column(column, justify="right", no_wrap=True)
    others = speeds(work, found[other_name])
    for name, figures in found.items():
        cells = []
        for speed, other in zip(speeds(work, figures), others, strict=True):
            if speed is not None and other is not None:
                cells += [f"{speed:,.4g}", f"{speed / other:.2f}"]
        if work.new_tokens:
            cells.append(f"{figures.same} of {work.new_tokens + 1}")
        table.add_row(name, *cells, f"{figures.difference:.1e}")
    console = Console(highlight=False, markup=False)
    console.print(Text(title))
    console.print(table)
    allowed = found[WAYS[0]].allowed
    text = (
        f"Medians of {repeats}, measured in turns. What the model answers, its "
        f"{'logits' if work.new_tokens else 'last hidden states'}, is compared with {WAYS[0]}: a "
        f"difference of {allowed:.1e} is rounding."
    )
    if work.new_tokens:
        text += " A token differs only where the two best logits lie closer than twice that."
    console.print(text)


def _drawn(name: str, work: Work, found: dict[str, Measured]) -> plot.Axes:
    """Bars of the speeds beside those of one implementation."""
    other_name = beside(found)
    others = speeds(work, found[other_name])
    ratios = {
        way: [
            speed / other for speed, other in zip(speeds(work, figures), others, strict=True)
            if speed is not None and other is not None
        ]
        for way, figures in found.items()
    }
    groups = ["prefill", "decode"][: len(ratios[other_name])]
    return plot.bars(
        groups, ratios, digits=2, y_label=f"tokens per second, {other_name} = 1", title=name
    )
