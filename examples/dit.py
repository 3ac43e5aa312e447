"""A diffusion transformer denoises an image, its attention computed by scaledot.

    python examples/dit.py

Its weights are random, so that it needs no download, and it paints nothing: the loop is the one
of a pipeline, which runs within ``scaledot.diffusers.patched()`` just so. Needs diffusers.
"""

import contextlib
import time

import torch
from diffusers import DDIMScheduler, DiTTransformer2DModel

import scaledot.diffusers

torch.manual_seed(0)
model = DiTTransformer2DModel(
    num_attention_heads=6, attention_head_dim=64, num_layers=4, sample_size=64, patch_size=2,
    in_channels=4, out_channels=8, num_embeds_ada_norm=1000,
).eval()  # fmt: skip
noise = torch.randn(1, 4, 64, 64)
scheduler = DDIMScheduler()
scheduler.set_timesteps(10)


@torch.inference_mode()
def denoised() -> torch.Tensor:
    """Ten steps from the same noise; 1,024 patches attend to one another in each layer."""
    sample, label = noise, torch.tensor([207])
    for step in scheduler.timesteps:
        predicted = model(sample, step[None], label).sample[:, :4]
        sample = scheduler.step(predicted, step, sample).prev_sample
    return sample


images = {}
for name, scope in (("sdpa", contextlib.nullcontext), ("scaledot", scaledot.diffusers.patched)):
    with scope():
        denoised()
        start = time.perf_counter()
        images[name] = denoised()
    print(f"{name:9} {time.perf_counter() - start:.2f} s")
print("largest difference:", (images["sdpa"] - images["scaledot"]).abs().max().item())
