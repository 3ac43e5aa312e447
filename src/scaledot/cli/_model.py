"""What each head of a model looks at, on a text, an image or a recording."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import textwrap
import wave
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from scaledot import introspect
from scaledot._errors import value_error
from scaledot.cli import _load

MAX_TOKENS = 512
"""Tokens of a text, and tokens that a decoder writes, at most, unless told otherwise."""

ATTENTIONS = ("encoder", "decoder", "cross")

_VOCABULARIES = ("tokenizer.*", "vocab*", "*.model", "*tiktoken*", "tekken.json")
"""Names of files with the words of a tokenizer."""

_STATES = "encoder_hidden_states"
"""What decoders call the states of the encoder."""

Labels = tuple[str, ...] | None
Note = Callable[[str], None]

Text = Annotated[
    str | None, typer.Option("--text", metavar="TEXT", help="What the model reads.")
]
ImageFile = Annotated[
    Path | None, typer.Option("--image", metavar="FILE", help="A picture that the model sees.")
]
AudioFile = Annotated[
    Path | None,
    typer.Option("--audio", metavar="FILE", help="A recording that the model hears, a .wav file."),
]  # fmt: skip
Attention = Annotated[
    str | None,
    typer.Option(
        "--attention", metavar="WHICH",
        help="Of a model with encoder and decoder: encoder, decoder, or cross (the default), from "
        "what the decoder writes to what the encoder reads.",
    ),
]  # fmt: skip
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens", metavar="N",
        help="Read, and with a decoder of its own write, so many tokens at most; 512 if not given.",
    ),
]  # fmt: skip


class Asked(NamedTuple):
    """What a model is shown, and of which of its parts the report is."""

    text: str | None
    image: Path | None
    audio: Path | None
    attention: str | None
    max_tokens: int | None

    def check(self) -> None:
        """Raise unless the options fit together."""
        given = [name for name in ("text", "image", "audio") if getattr(self, name) is not None]
        if len(given) != 1:
            raise value_error(
                "--model must come with one of --text, --image and --audio",
                " and ".join(f"--{name}" for name in given) or "none",
                "Say what the model is shown.",
            )
        if self.attention is not None and self.attention not in ATTENTIONS:
            raise value_error(
                f"--attention must be one of {', '.join(ATTENTIONS)}", self.attention, "Choose one."
            )
        if self.text is not None:
            try:
                self.text.encode()
            except UnicodeEncodeError as error:  # bytes of the shell are kept as surrogates
                raise value_error(
                    "--text must be characters in UTF-8",
                    f"a byte or half a character, {self.text[error.start]!a}, after "
                    f"{self.text[: error.start]!r}",
                    "Type that part again, in a terminal whose encoding is UTF-8.",
                ) from None
        if self.max_tokens is not None and self.max_tokens < 1:
            raise value_error("--max-tokens must be at least 1", self.max_tokens,
                              f"Leave it out for {MAX_TOKENS}.")  # fmt: skip

    @property
    def kind(self) -> str:
        """Which of text, image and audio it is."""
        return next(name for name in ("text", "image", "audio") if getattr(self, name) is not None)

    @property
    def title(self) -> str:
        """Short name of what is shown."""
        if self.text is not None:
            return textwrap.shorten(self.text, 80, placeholder=" …") or self.text[:80]
        file = self.image if self.audio is None else self.audio
        return file.name if file is not None else ""

    @property
    def most(self) -> int:
        """Number of tokens, at most."""
        return MAX_TOKENS if self.max_tokens is None else self.max_tokens


class Shown(NamedTuple):
    """What goes into a model, and how its places are called, given their number."""

    inputs: Mapping[str, Any]
    labels: Callable[[int], Labels]


def look(
    source: _load.Source, asked: Asked, dtype: str, title: str | None, note: Note
) -> introspect.Trace:
    """Run a model once and return the attention of all its layers, query and key kept."""
    asked.check()
    _load.transformers_module()  # raises where it or torch is missing
    torch = importlib.import_module("torch")
    fits = _load.fitting(
        "the model and what it is shown",
        "Show it less (--max-tokens for a text), or take a smaller model.",
    )
    with _load.quiet(), torch.no_grad(), fits:
        model = _load.load(source, dtype, note)
        _check_kind(model, asked)
        shown = _SHOWN[asked.kind](model, source, asked, note)
        if model.config.is_encoder_decoder:
            layers, queries, keys = _of_two(model, source, asked, shown)
        else:
            run = getattr(model, f"get_{asked.kind}_features", model.base_model)
            layers, queries, keys = _captured(model, run, shown.inputs), shown.labels, None
    tokens = queries(layers[0].len_q)
    key_tokens = None if keys is None else keys(layers[0].len_kv)
    if keys is not None and key_tokens is None:
        tokens = None  # those of the queries are not those of the keys
    return introspect.Trace(
        layers, tokens, key_tokens, f"{source.name}: {asked.title}" if title is None else title
    )


def _captured(
    model: Any, run: Callable[..., Any], inputs: Mapping[str, Any]
) -> tuple[introspect.Layer, ...]:
    """Layers of the attention of a call."""
    with introspect.capture(model, keep=True) as captured:
        run(**inputs)
    layers = captured.layers
    if not layers:
        raise value_error(
            "the model's attention must be one that can be replaced", type(model).__name__,
            "It does not call transformers' AttentionInterface.",
        )
    return tuple(layers)


def _check_kind(model: Any, asked: Asked) -> None:
    """Raise unless the model takes what it is shown."""
    takes = {
        "text": model.main_input_name == "input_ids",
        "image": model.main_input_name == "pixel_values",
        "audio": model.main_input_name in ("input_features", "input_values"),
    }
    for name in takes:
        takes[name] |= hasattr(model, f"get_{name}_features")
    if not takes[asked.kind]:
        fitting = " or ".join(f"--{name}" for name, fits in takes.items() if fits)
        raise value_error(
            f"--{asked.kind} must be what the model takes",
            f"{type(model).__name__}, which takes {model.main_input_name}",
            f"Pass {fitting}." if fitting else "Models of this kind cannot be shown.",
        )
    if asked.attention is not None and not model.config.is_encoder_decoder:
        raise value_error(
            "--attention must come with a model of encoder and decoder", type(model).__name__,
            "Leave it out: this one has one kind of attention.",
        )


def _text(model: Any, source: _load.Source, asked: Asked, note: Note) -> Shown:
    """Tokens of the text, cut to what was asked for and to what the model can read."""
    tokenizer = _tokenizer(source)
    reader = model.get_encoder() if model.config.is_encoder_decoder else model
    places = _load.places(reader) or asked.most
    most = min(asked.most, places, tokenizer.model_max_length)
    encoded = tokenizer(asked.text, truncation=True, max_length=most, return_tensors="pt")
    whole = len(tokenizer(asked.text)["input_ids"])
    ids = encoded["input_ids"]
    if not ids.numel():
        raise value_error("--text must have at least one token", repr(asked.text), "Write more.")
    rows, largest = _rows(model), int(ids.max())
    if rows is not None and largest >= rows:
        raise value_error(
            f"tokens of {source.folder} must be among the {rows:,} that the model has rows for",
            f"number {largest:,}, {tokenizer.convert_ids_to_tokens(largest)!r}",
            "Save the tokenizer that belongs to the model into its directory.",
        )
    if whole > ids.shape[-1]:
        note(f"the first {ids.shape[-1]:,} of {whole:,} tokens are read")
    labels = _words(tokenizer, ids[0].tolist())
    return Shown(
        {"input_ids": ids, "attention_mask": encoded["attention_mask"]},
        lambda count: labels if count == len(labels) else None,
    )


def _rows(model: Any) -> int | None:
    """Return the number of tokens that a model knows, None where it cannot be told."""
    rows = getattr(_load.embeddings(model), "num_embeddings", None)
    if rows is None:
        rows = getattr(model.config.get_text_config(), "vocab_size", None)
    return rows


def _tokenizer(source: _load.Source) -> Any:
    """Read the tokenizer; without its files transformers may make one that knows no words."""
    has_words = source.gguf is not None or any(
        next(source.folder.glob(pattern), None) is not None for pattern in _VOCABULARIES
    )
    missing = value_error(
        f"{source.folder} must have the files of a tokenizer", "none of them",
        "Save it there too, with tokenizer.save_pretrained(DIR), or copy tokenizer.json and "
        "tokenizer_config.json from where the model is from.",
    )
    try:
        found = source.read(_load.transformers_module().AutoTokenizer, "a tokenizer")
    except ValueError:
        if has_words:
            raise
        raise missing from None
    # Tokenizers of bytes and characters need no files.
    if not has_words and found.vocab_files_names:
        raise missing
    return found


def _words(tokenizer: Any, ids: list[int]) -> tuple[str, ...]:
    """Text of each token; its own name where it is a part of a character."""
    names = tokenizer.convert_ids_to_tokens(ids)
    texts = [tokenizer.decode([number], clean_up_tokenization_spaces=False) for number in ids]
    return tuple(
        name if not text or "\ufffd" in text else text
        for name, text in zip(names, texts, strict=True)
    )


def _image(model: Any, source: _load.Source, asked: Asked, note: Note) -> Shown:
    """Pixels of the picture; its patches are called by row and column."""
    if importlib.util.find_spec("PIL") is None:
        raise ImportError("Pillow must be installed to read an image. "
                          "Install with: pip install pillow")  # fmt: skip
    opened = importlib.import_module("PIL.Image").open(asked.image).convert("RGB")
    processor = source.read(_load.transformers_module().AutoImageProcessor, "an image processor")
    pixels = processor(opened, return_tensors="pt")["pixel_values"].to(model.dtype)
    config = getattr(model.config, "vision_config", model.config)
    patch = getattr(config, "patch_size", None)
    registers = getattr(config, "num_register_tokens", 0)

    def labels(count: int) -> Labels:
        if not isinstance(patch, int):
            return None
        rows, columns = (size // patch for size in pixels.shape[-2:])
        before = ("[CLS]", *(f"[REG {i}]" for i in range(registers)))
        first = before[: count - rows * columns]
        found = (*first, *(f"{row},{column}" for row in range(rows) for column in range(columns)))
        return found if len(found) == count else None

    return Shown({"pixel_values": pixels}, labels)


def _audio(model: Any, source: _load.Source, asked: Asked, note: Note) -> Shown:
    """Features of the recording; places are called by their time."""
    extractor = source.read(
        _load.transformers_module().AutoFeatureExtractor, "a feature extractor"
    )
    rate = extractor.sampling_rate
    sound = _samples(asked.audio or Path(), rate)
    # Whisper hears a fixed length.
    heard = getattr(extractor, "n_samples", None) or len(sound)
    if len(sound) > heard:
        note(f"the first {heard / rate:g} of {len(sound) / rate:.1f} seconds are heard")
    features = extractor(sound, sampling_rate=rate, return_tensors="pt")
    name = model.main_input_name
    return Shown(
        {name: features[name].to(model.dtype)},
        lambda count: tuple(f"{i * heard / rate / count:.2f} s" for i in range(count)),
    )


def _samples(file: Path, rate: int) -> Any:
    """Samples of a recording in float32, its channels averaged."""
    try:
        with wave.open(str(file), "rb") as opened:
            given = opened.getframerate(), opened.getsampwidth() * 8
            channels, frames = opened.getnchannels(), opened.getnframes()
            data = opened.readframes(frames)
            found = len(data) // (channels * opened.getsampwidth())
    except (wave.Error, EOFError) as error:
        raise value_error(
            f"{file} must be a .wav file of integers", str(error) or "the start of one",
            f"Convert it: ffmpeg -i FILE -ar {rate} -c:a pcm_s16le NEW.wav",
        ) from None
    if given != (rate, 16) or not data:
        raise value_error(
            f"{file} must have samples of 16 bits, {rate:,} in a second",
            f"{len(data)} bytes of {given[1]} bits, {given[0]:,} in a second",
            f"Convert it: ffmpeg -i FILE -ar {rate} -c:a pcm_s16le NEW.wav",
        )
    if found != frames:
        raise value_error(
            f"{file} must be whole, {frames:,} samples by its header", f"{found:,}",
            f"Copy it again, or keep what is there: ffmpeg -i FILE -ar {rate} -c:a pcm_s16le "
            "NEW.wav",
        )
    samples = np.frombuffer(data, "<i2").astype(np.float32) / 2**15
    return samples.reshape(-1, channels).mean(axis=1)


_SHOWN = {"text": _text, "image": _image, "audio": _audio}


def _of_two(
    model: Any, source: _load.Source, asked: Asked, shown: Shown
) -> tuple[tuple[introspect.Layer, ...], Callable[[int], Labels], Callable[[int], Labels] | None]:
    """Layers of one kind of attention of an encoder-decoder; labels of queries and of keys."""
    encoder = model.get_encoder()
    if asked.attention == "encoder":
        return _captured(model, encoder, shown.inputs), shown.labels, None
    if not model.can_generate():
        raise value_error(
            "the model must be able to write for its decoder to be shown", type(model).__name__,
            "Pass --attention encoder, or save the model with its output layer.",
        )
    limits = (getattr(model.config, "max_target_positions", None),
              _load.places(model.get_decoder()))  # fmt: skip
    written = model.generate(
        **shown.inputs, max_length=min([asked.most, *(limit for limit in limits if limit)]),
        do_sample=False, num_beams=1, return_dict_in_generate=True,
    ).sequences[:, : asked.most]  # Whisper counts without its prompt
    inputs = {**shown.inputs, "decoder_input_ids": written}
    own, cross = _kinds(model, inputs)
    layers, kind, keys = (
        (own, "self", None) if asked.attention == "decoder" else (cross, "cross", shown.labels)
    )
    if not layers:
        raise value_error(
            f"the decoder must have {kind}-attention that can be replaced", type(model).__name__,
            "Choose another with --attention.",
        )
    words = _words(_tokenizer(source), written[0].tolist())
    return layers, lambda count: words if count == len(words) else None, keys


def _kinds(
    model: Any, inputs: Mapping[str, Any]
) -> tuple[tuple[introspect.Layer, ...], tuple[introspect.Layer, ...]]:
    """Run the model; layers of its decoder that look at itself, and those that look at the encoder.

    The latter are told by what they are given: the states of the encoder, as the decoder got them,
    or an argument that is called as such states are, where the decoder has projected them.
    """
    decoder = model.get_decoder()
    names = {id(module): name for name, module in model.named_modules()}
    signature = inspect.signature(decoder.forward)
    states: Any = None
    given: set[str] = set()

    def note(module: Any, args: Any, options: Any) -> None:
        nonlocal states
        if module is decoder:
            states = signature.bind_partial(*args, **options).arguments.get(_STATES)
        if states is not None and (
            any(x is states for x in (*args, *options.values()))
            or any(options.get(name) is not None for name in (_STATES, "key_value_states"))
        ):
            given.add(names[id(module)])

    hooks = [x.register_forward_pre_hook(note, with_kwargs=True) for x in decoder.modules()]
    try:
        layers = _captured(model, model.base_model, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    own: list[introspect.Layer] = []
    cross: list[introspect.Layer] = []
    for layer in layers:
        if layer.name.startswith(f"{names[id(decoder)]}."):
            # Further calls of one module have a number.
            (cross if layer.name.split(" (")[0] in given else own).append(layer)
    return tuple(own), tuple(cross)
