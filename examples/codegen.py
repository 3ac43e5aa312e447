"""Completing code over a long context by scaledot beside PyTorch: StarCoder2's architecture."""

import inspect
import time
import tokenize

import torch
import transformers

import scaledot.transformers

CONTEXT, DECODE = 4096, 32

scaledot.transformers.register()
torch.manual_seed(0)  # random weights: the bytes are noise, the same noise by both
config = transformers.Starcoder2Config(
    vocab_size=256, hidden_size=512, intermediate_size=1024, num_hidden_layers=4,
    num_attention_heads=8, num_key_value_heads=2, sliding_window=1024, initializer_range=0.1,
    max_position_embeddings=2 * CONTEXT,
)  # fmt: skip
model = transformers.Starcoder2ForCausalLM(config).eval()
source = torch.tensor([list(inspect.getsource(tokenize).encode()[:CONTEXT])])  # a byte is a token


class Clock(list):
    """Notes when the prompt and each token after it is known."""

    put = end = lambda self, *_: self.append(time.perf_counter())


for dtype in (torch.float32, torch.bfloat16):
    for attention in ("sdpa", "scaledot"):
        model.to(dtype).set_attn_implementation(attention)
        for count in (2, 1 + DECODE):  # the first one warms up
            clock, limits = Clock(), {"min_new_tokens": count, "max_new_tokens": count}
            out = model.generate(source, do_sample=False, streamer=clock, **limits)
        first, later = clock[1] - clock[0], clock[count] - clock[1]
        speed = f"prefill {CONTEXT / first:.0f}, decode {DECODE / later:.1f} tokens/s"
        print(f"{dtype} {attention}: {speed}, {bytes(out[0, CONTEXT:].tolist())[:6].hex(' ')}")
