"""A model in a local directory, loaded by transformers without a network."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from scaledot._arrays import FLOATS
from scaledot._errors import missing_extra, value_error

ModelPlace = Annotated[
    Path | None,
    typer.Option(
        "--model", metavar="DIR",
        help="A directory with config.json, weights and tokenizer, or a .gguf file.",
    ),
]  # fmt: skip


class Source(NamedTuple):
    """Where a model is: a folder, and in it a GGUF file or None."""

    folder: Path
    gguf: str | None

    @property
    def name(self) -> str:
        """Name to show."""
        return self.gguf or self.folder.resolve().name

    def read(self, loader: Any, what: str, **options: Any) -> Any:
        """Call ``from_pretrained`` of a class of transformers; tell in one line what fails."""
        if self.gguf is not None:
            options["gguf_file"] = self.gguf
        # Bars of the reader of GGUF do not heed `quiet`.
        bars = contextlib.nullcontext() if self.gguf is None else contextlib.redirect_stderr(
            io.StringIO()
        )
        try:
            with bars:
                return loader.from_pretrained(
                    self.folder, local_files_only=True, trust_remote_code=False, **options
                )
        except OSError as error:
            if error.errno is not None:  # of the system, not of transformers
                raise
            failure: Exception = error
        except (ImportError, MemoryError):
            raise
        except Exception as error:  # transformers raises whatever its readers do
            if _is_of_memory(error):
                raise  # which is none of the file
            wanted = options.get("attn_implementation")
            if isinstance(error, KeyError) and error.args == (wanted,):
                # Some models look their attention up in tables of their own.
                raise value_error(
                    "the model must be one whose attention transformers can exchange",
                    f"{loader.__name__}, which knows its own alone",
                    "It can be neither shown nor measured.",
                ) from error
            failure = error
        lines = [line.strip() for line in str(failure).splitlines() if line.strip()] or [""]
        told = " ".join(lines) if lines[0].endswith(":") else lines[0]
        raise value_error(
            f"{self.folder} must have {what} that transformers can read",
            f"{type(failure).__name__}: {told.rstrip('.')}",
            "Save the model anew with save_pretrained, or update transformers.",
        ) from failure


def source_of(place: Path) -> Source:
    """Find the model, or raise."""
    if place.suffix.lower() == ".gguf" and place.is_file():
        return Source(place.parent, place.name)
    if not place.is_dir():
        raise value_error(
            "--model must be a directory, or a .gguf file, on this machine", place,
            "Download the model first; nothing is fetched from a network here.",
        )
    if (place / "config.json").is_file():
        return Source(place, None)
    files = sorted(file.name for file in place.glob("*.gguf"))
    if len(files) == 1:
        return Source(place, files[0])
    raise value_error(
        f"{place} must have a config.json, or one .gguf file",
        " and ".join(files) if files else "neither",
        "Name the one to read." if files else "Pass the directory that save_pretrained wrote.",
    )


def transformers_module() -> Any:
    """Import transformers, kept from the network."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # is read when the library is imported
    for module, extra in (("torch", "torch"), ("transformers", "hf")):
        if importlib.util.find_spec(module) is None:
            raise missing_extra(module, extra)
    return importlib.import_module("transformers")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' progress bars and advice from the terminal."""
    log = transformers_module().utils.logging
    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()


@contextlib.contextmanager
def fitting(what: str, what_to_do: str) -> Iterator[None]:
    """Raise a ValueError where torch cannot have the memory that it asks the system for."""
    try:
        yield
    except RuntimeError as error:
        if not _is_of_memory(error):
            raise
        size = re.search(r"allocate (\d+) bytes", str(error))
        asked = f"{int(size[1]):,} bytes" if size else "more"
        raise value_error(
            f"{what} must fit into memory", f"{asked} asked for at once and refused", what_to_do
        ) from error


def _is_of_memory(error: Exception) -> bool:
    """Whether torch could not have its memory, for which it has no type of its own."""
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def embeddings(model: Any) -> Any:
    """Return the module that makes vectors of a model's tokens, None where it tells of none."""
    try:
        return model.get_input_embeddings()
    except NotImplementedError:  # as of models of texts and images
        return None


def places(model: Any) -> int | None:
    """Return for how many tokens of text a model has positions, None if for any number."""
    found = getattr(model.config.get_text_config(), "max_position_embeddings", None) or None
    for name, module in model.named_modules():
        padding = getattr(module, "padding_idx", None)
        if name.rpartition(".")[2] == "position_embeddings" and padding is not None:
            # A table with a row for padding, as RoBERTa's: the first token has the row after it.
            rows = len(module.weight) - padding - 1
            found = rows if found is None else min(found, rows)
    return found


@fitting("the model", "Take a smaller one, or a --dtype of fewer bits.")
def load(source: Source, dtype: str, note: Callable[[str], None]) -> Any:
    """Return the model with its attention by scaledot, in eval mode; ``note`` takes warnings."""
    if dtype not in FLOATS:
        raise value_error(f"--dtype must be one of {', '.join(FLOATS)}", dtype, "Choose one.")
    transformers = transformers_module()
    if source.gguf is not None:
        missing = [name for name in ("gguf", "accelerate") if not importlib.util.find_spec(name)]
        if missing:
            raise ImportError(
                f"{' and '.join(missing)} must be installed to read a GGUF file. "
                f"Install with: pip install {' '.join(missing)}"
            )
    from scaledot.transformers import register

    register()
    config = source.read(transformers.AutoConfig, "a configuration")
    loader = _class_of(transformers, config, source)
    model, found = source.read(
        loader, "weights", dtype=getattr(importlib.import_module("torch"), dtype),
        attn_implementation="scaledot", output_loading_info=True, ignore_mismatched_sizes=True,
    )  # fmt: skip
    for name, in_file, in_model in sorted(found["mismatched_keys"]):
        raise value_error(
            f"weights in {source.folder} must have the shapes that its configuration says",
            f"{name} of {tuple(in_file)}, not {tuple(in_model)}", "They are not of one model.",
        )
    absent = sorted(found["missing_keys"])
    if absent:
        more = f" and {len(absent) - 3:,} more" if len(absent) > 3 else ""
        note(f"not in the file, so of random values: {', '.join(absent[:3])}{more}")
    return model.eval()


def _class_of(transformers: Any, config: Any, source: Source) -> Any:
    """Return the class that the configuration names, else the one without a head."""
    if source.gguf is not None:
        return transformers.AutoModelForCausalLM
    for name in config.architectures or ():
        named = getattr(transformers, name, None)
        if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel):
            return named
    return transformers.AutoModel
