"""Whisper tiny.en by scaledot: what is said in a clip, and when each word begins."""

import sys
import time
from pathlib import Path

import torch
import transformers

import scaledot.transformers

sys.path.extend(str(Path(__file__).parents[1] / x) for x in ("tools", "tests/models"))
from whisper_weights import RATE, load_speech, load_whisper
from word_times import FRAME, token_starts

scaledot.transformers.register()
model, tokenizer = load_whisper()
clip, rules = load_speech("beckett.wav"), model.generation_config
extract = transformers.WhisperFeatureExtractor(feature_size=model.config.num_mel_bins)
spectrogram = extract(clip, sampling_rate=RATE, return_tensors="pt").input_features

for dtype in (torch.bfloat16, torch.float32):
    for attention in ("sdpa", "scaledot"):
        model.to(dtype).set_attn_implementation(attention)
        start = time.perf_counter()
        tokens = model.generate(spectrogram.to(dtype))[0].tolist()
        speed = f"{len(tokens) / (time.perf_counter() - start):.1f} tokens/s"
        print(f"{dtype} {attention}: {speed},{tokenizer.decode(tokens)}", flush=True)

ids = torch.tensor([[rules.decoder_start_token_id, rules.no_timestamps_token_id, *tokens]])
with torch.no_grad():
    weights = model(spectrogram, decoder_input_ids=ids, output_attentions=True).cross_attentions
frames = round(len(clip) / RATE / FRAME)
starts = token_starts([weights[n][0, head, 1:-1, :frames] for n, head in rules.alignment_heads])
for token, start in zip(tokens, starts, strict=True):
    print(f"{start:5.2f} s{tokenizer.decode([token])}")
