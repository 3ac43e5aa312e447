"""Models end to end: eager, sdpa and scaledot attention, each in the same model.

    python models.py [--repeats 5] [--threads 2] [--only NAME] [--write]

A case is a pass over a prompt, an image or a recording and, of a decoder, new tokens one by one.
The three answers are compared first; then they are timed in turns in one process. ``--write`` puts
the table into results/models.md and .json. Weights come from packages, as in tests/models; a case
whose package cannot be had is left out, and said so.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

import machine
import scaledot as sd
import scaledot.transformers
from scaledot.cli._bench import BESIDE, WAYS, Work, measure, threads_of_torch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Case(NamedTuple):
    """What is measured, made when its turn comes."""

    name: str
    make: Callable[[], Work]


def tokens(model: Any, count: int) -> Any:
    """Random tokens (1, count) of a model's vocabulary."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.config.vocab_size, (1, count), generator=generator)


def smollm2(dtype: str, prompt: int, new_tokens: int) -> Work:
    import gguf_weights

    model = gguf_weights.load_smollm2()[0].to(DTYPES[dtype])
    return Work(model, {"input_ids": tokens(model, prompt)}, new_tokens)


def minilm(dtype: str, batch: int, length: int) -> Work:
    import bert_weights

    model = bert_weights.minilm()[0].to(DTYPES[dtype])
    return Work(model, {"input_ids": tokens(model, batch * length).reshape(batch, length)})


def dinov2(dtype: str, side: int) -> Work:
    import onnx_weights

    model = onnx_weights.backbone(onnx_weights.arrays_of(onnx_weights.load_graph()))
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(1, 3, side, side, generator=generator, dtype=torch.float32)
    return Work(model.to(DTYPES[dtype]), {"pixel_values": pixels.to(DTYPES[dtype])})


def whisper(dtype: str) -> Work:
    import whisper_weights

    model = whisper_weights.load_whisper()[0].to(DTYPES[dtype])
    generator = torch.Generator().manual_seed(0)
    sound = torch.randn(30 * 16_000, generator=generator).numpy() / 10
    extractor = transformers.WhisperFeatureExtractor()
    features = extractor(sound, sampling_rate=16_000, return_tensors="pt")["input_features"]
    # The tokens that every English transcript without times begins with.
    start = torch.tensor([[model.config.decoder_start_token_id, 50362]])
    inputs = {"input_features": features.to(DTYPES[dtype]), "decoder_input_ids": start}
    return Work(model, inputs, new_tokens=100)


def random_weights(config: Any, dtype: str, prompt: int, new_tokens: int) -> Work:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).to(DTYPES[dtype]).eval()
    return Work(model, {"input_ids": tokens(model, prompt)}, new_tokens)


# Wide and grouped heads; two layers, because each is like the other.
LLAMA = transformers.LlamaConfig(
    hidden_size=2048, intermediate_size=8192, num_hidden_layers=2, num_attention_heads=16,
    num_key_value_heads=4, head_dim=128, vocab_size=32_000, max_position_embeddings=32_768,
)  # fmt: skip
STARCODER2 = transformers.Starcoder2Config(
    hidden_size=1536, intermediate_size=6144, num_hidden_layers=2, num_attention_heads=12,
    num_key_value_heads=2, vocab_size=32_000, sliding_window=1024, bos_token_id=1,
    eos_token_id=2,
)  # fmt: skip


def cases() -> list[Case]:
    """Everything that is measured."""
    found = []
    for dtype in DTYPES:
        found += [
            Case(f"SmolLM2-135M, {dtype}, prompt 2048",
                 lambda d=dtype: smollm2(d, 2048, 64)),
            Case(f"SmolLM2-135M, {dtype}, prompt 4096",
                 lambda d=dtype: smollm2(d, 4096, 64)),
            Case(f"Llama layers 16/4 heads of 128, {dtype}, prompt 4096",
                 lambda d=dtype: random_weights(LLAMA, d, 4096, 32)),
            Case(f"StarCoder2 layers, window 1024, {dtype}, prompt 4096",
                 lambda d=dtype: random_weights(STARCODER2, d, 4096, 32)),
            Case(f"MiniLM, {dtype}, 1 × 512 tokens", lambda d=dtype: minilm(d, 1, 512)),
            Case(f"MiniLM, {dtype}, 16 × 128 tokens", lambda d=dtype: minilm(d, 16, 128)),
            Case(f"DINOv2-S, {dtype}, 224 pixels", lambda d=dtype: dinov2(d, 224)),
            Case(f"DINOv2-S, {dtype}, 518 pixels", lambda d=dtype: dinov2(d, 518)),
            Case(f"Whisper tiny.en, {dtype}, 30 s and 100 tokens", lambda d=dtype: whisper(d)),
        ]
    return found


@contextmanager
def attention_alone(name: str) -> Iterator[list[float]]:
    """Collect the seconds inside an attention function of transformers."""
    function, seconds = transformers.AttentionInterface()[name], []

    def timed(*args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        out = function(*args, **options)
        seconds.append(time.perf_counter() - start)
        return out

    transformers.AttentionInterface.register(name, timed)
    try:
        yield seconds
    finally:
        transformers.AttentionInterface.register(name, function)


def alone(work: Work, repeats: int) -> dict[str, float]:
    """Median seconds in attention of one first pass, of those whose function can be timed."""
    found: dict[str, list[float]] = {name: [] for name in WAYS if name != "eager"}
    with torch.inference_mode():
        for _ in range(repeats):
            for name, totals in found.items():
                work.model.set_attn_implementation(name)
                with attention_alone(name) as seconds:
                    work.model.base_model(**work.inputs)
                totals.append(sum(seconds))
    return {name: statistics.median(totals) for name, totals in found.items()}


def measured(case: Case, repeats: int) -> list[dict[str, Any]]:
    """Rows of a case, one for each implementation, in milliseconds."""
    work = case.make()
    figures, inside = measure(work, repeats), alone(work, repeats)
    rows = []
    for name in WAYS:
        of, beside = figures[name], figures[BESIDE]
        row: dict[str, Any] = {"case": case.name, "attention": name}
        for part in ("prefill", "decode"):
            own, other = (statistics.median(getattr(x, part)) for x in (of, beside))
            if part == "prefill" or work.new_tokens:
                count = 1 if part == "prefill" else work.new_tokens
                row |= {f"{part}_ms": 1e3 * own / count, f"{part}_times": other / own,
                        f"{part}_all_ms": [1e3 * x / count for x in getattr(of, part)]}  # fmt: skip
        if name in inside:
            row |= {"attention_ms": 1e3 * inside[name],
                    "attention_times": inside[BESIDE] / inside[name]}  # fmt: skip
        row |= {"difference": of.difference, "allowed": of.allowed}
        if work.new_tokens:
            row |= {"same": of.same, "of": work.new_tokens + 1}
        rows.append(row)
    return rows


COLUMNS = {
    "prefill_ms": "first pass, ms", "prefill_times": f"× {BESIDE}",
    "attention_ms": "its attention, ms", "attention_times": f"× {BESIDE}",
    "decode_ms": "a new token, ms", "decode_times": f"× {BESIDE}",
}  # fmt: skip


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Lines of a table."""
    lines = [
        f"| Case | attention | {' | '.join(COLUMNS.values())} | same tokens | largest difference |",
        "|---|---|" + "--:|" * (len(COLUMNS) + 2),
    ]
    for row in rows:
        cells = [f"{row[name]:.2f}" if name in row else "" for name in COLUMNS]
        same = f"{row['same']} of {row['of']}" if "same" in row else ""
        lines.append(
            f"| {row['case']} | {row['attention']} | {' | '.join(cells)} | {same} | "
            f"{row['difference']:.1e} of {row['allowed']:.1e} |"
        )
    return lines


def main() -> None:
    """Run all cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default="")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    # The weights' loaders, and what they fetch with.
    sys.path += [str(ROOT / "tests" / "models"), str(ROOT / "tests"), str(ROOT / "tools")]
    from fetch_weights import FetchError

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    scaledot.transformers.register()
    sd.set_num_threads(given.threads)
    rows, left_out = [], []
    with threads_of_torch(given.threads):
        for case in cases():
            if given.only not in case.name:
                continue
            try:
                found = measured(case, given.repeats)
            except (FetchError, ImportError) as error:
                left_out.append(f"{case.name}: {str(error).splitlines()[0]}")
                print(f"left out: {left_out[-1]}", flush=True)
                continue
            rows += found
            print("\n".join(table(found)[2:]), flush=True)
    setting = (
        f"transformers {transformers.__version__}; {given.threads} threads; medians of "
        f"{given.repeats} passes in turns; batch 1 unless named; attention is timed in the first "
        "pass, of the implementations that transformers calls by name. Layers without a model's "
        "name have random weights."
    )
    lines = ["# Models end to end", "", *machine.describe(), "", setting, "", *table(rows), ""]
    lines += [f"Left out: {line}" for line in left_out]
    if given.write:
        (RESULTS / "models.md").write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
        (RESULTS / "models.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
