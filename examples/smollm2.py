"""SmolLM2-135M by scaledot beside PyTorch's attention: the same text, and tokens per second."""

import sys
import time
from pathlib import Path

import torch

import scaledot.transformers

sys.path.extend(str(Path(__file__).parents[1] / x) for x in ("tools", "tests/models"))
from gguf_weights import load_smollm2

PREFILL, DECODE = 2048, 64

scaledot.transformers.register()
model, tokenizer = load_smollm2()
prompt = tokenizer.encode("The capital of France is").ids
long = tokenizer.encode("To be, or not to be, that is the question. " * 200).ids[:PREFILL]


class Clock(list):
    """Notes when the prompt and each token after it is known."""

    put = end = lambda self, *_: self.append(time.perf_counter())


def generated(ids, count):
    """Return `count` new tokens, the seconds of all after the first one, and those of it."""
    clock, limits = Clock(), {"min_new_tokens": count, "max_new_tokens": count}
    out = model.generate(torch.tensor([ids]), do_sample=False, streamer=clock, **limits)
    return out[0, len(ids) :].tolist(), clock[count] - clock[1], clock[1] - clock[0]


for dtype in (torch.float32, torch.bfloat16):
    for attention in ("sdpa", "scaledot"):
        model.to(dtype).set_attn_implementation(attention)
        text = tokenizer.decode(generated(prompt, 16)[0])
        for count in (2, 1 + DECODE):  # the first one warms up
            _, later, first = generated(long, count)
        speed = f"prefill {PREFILL / first:.0f}, decode {DECODE / later:.1f} tokens/s"
        print(f"{dtype} {attention}: {speed}, {text!r}", flush=True)
