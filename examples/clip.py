"""CLIP, both towers: texts and images find each other as before, through scaledot.

    python examples/clip.py

Its weights are random, so that it needs no download; ``CLIPModel.from_pretrained(folder,
attn_implementation="scaledot")`` is all that a real model needs. Needs transformers.
"""

import time

import torch
from transformers import CLIPConfig, CLIPModel

import scaledot.transformers

scaledot.transformers.register()
torch.manual_seed(0)
layers = {"num_hidden_layers": 4}
model = CLIPModel(CLIPConfig(text_config=layers, vision_config=layers)).eval()  # else CLIP B/32

texts = torch.randint(3, 49405, (3, 20))
texts[:, 0], texts[0, 8:], texts[1, 14:], texts[2, 19:] = 49406, 49407, 49407, 49407
padding = (texts != 49407).long()
padding[range(3), padding.sum(1)] = 1  # the first end mark is part of the text
images = torch.randn(4, 3, 224, 224)
batch = {"input_ids": texts, "attention_mask": padding, "pixel_values": images}

for name in ("eager", "sdpa", "scaledot"):
    model.set_attn_implementation(name)
    with torch.inference_mode():
        model(**batch)
        start = time.perf_counter()
        logits = model(**batch).logits_per_image
    print(f"{name} ({(time.perf_counter() - start) * 1e3:.0f} ms): images by texts")
    print(logits)
