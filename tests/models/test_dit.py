"""DiT and Stable Diffusion 3: diffusers' transformers with random weights, ten denoising steps.

Truth is diffusers' own attention in float64, and the yardstick is that in float32.
"""

import copy
import importlib

import pytest

from compare import EPS, assert_close
from counted import counted_calls

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

module = importlib.import_module("scaledot.diffusers")
with_random_weights = importlib.import_module("agreement").with_random_weights

pytestmark = pytest.mark.models

STEPS, LAYERS = 10, 2
GUIDANCE = 3.0
NO_CLASS = 5


@pytest.fixture
def calls(monkeypatch):
    return counted_calls(monkeypatch)


def dit():
    return with_random_weights(
        diffusers.DiTTransformer2DModel(
            num_attention_heads=4, attention_head_dim=8, in_channels=4, out_channels=8,
            num_layers=LAYERS, sample_size=16, patch_size=2, num_embeds_ada_norm=NO_CLASS,
            norm_num_groups=4,
        )
    )  # fmt: skip


def sd3():
    """With norms of queries and keys, and a second self-attention in its first block (SD 3.5)."""
    return with_random_weights(
        diffusers.SD3Transformer2DModel(
            sample_size=16, patch_size=2, in_channels=4, num_layers=LAYERS, attention_head_dim=8,
            num_attention_heads=4, joint_attention_dim=20, caption_projection_dim=32,
            pooled_projection_dim=12, out_channels=4, pos_embed_max_size=16,
            dual_attention_layers=(0,), qk_norm="rms_norm",
        )
    )  # fmt: skip


@torch.no_grad()
def classes_denoised(model, dtype):
    """Two images of classes, from noise, by DDIM with classifier-free guidance."""
    model = copy.deepcopy(model).to(dtype)
    generator = torch.Generator().manual_seed(1)
    sample = torch.randn(2, 4, 16, 16, generator=generator).to(dtype)
    labels = torch.tensor([1, 3, NO_CLASS, NO_CLASS])
    scheduler = diffusers.DDIMScheduler()
    scheduler.set_timesteps(STEPS)
    for step in scheduler.timesteps:
        out = model(torch.cat([sample, sample]), step.expand(4), labels).sample[:, :4]
        of_class, of_none = out.chunk(2)
        noise = of_none + GUIDANCE * (of_class - of_none)
        sample = scheduler.step(noise, step, sample).prev_sample
    assert sample.dtype == dtype
    return sample


@torch.no_grad()
def texts_denoised(model, dtype):
    """Two images of texts, from noise, along the straight flow by Euler's steps."""
    model = copy.deepcopy(model).to(dtype)
    generator = torch.Generator().manual_seed(1)
    sample, text, pooled = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((2, 4, 16, 16), (2, 7, 20), (2, 12))
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(STEPS)
    sigmas = scheduler.sigmas.to(dtype)
    for i, step in enumerate(scheduler.timesteps):
        flow = model(sample, text, pooled, step.expand(2)).sample
        # The scheduler's own step, but not rounded to float32.
        sample = sample + (sigmas[i + 1] - sigmas[i]) * flow
    assert sample.dtype == dtype
    return sample


IMAGE, BOTH = [(4, 4, 64, 8)] * 3, [(2, 4, 71, 8)] * 3
SYSTEMS = {
    "DiT": (dit, classes_denoised, [IMAGE] * LAYERS),
    "Stable Diffusion 3": (sd3, texts_denoised, [BOTH, [(2, 4, 64, 8)] * 3, BOTH]),
}


@pytest.mark.parametrize("way", ["patched", "processor"])
@pytest.mark.parametrize("system", SYSTEMS)
def test_denoising(system, way, calls):
    make, denoised, shapes = SYSTEMS[system]
    model = make()
    truth = denoised(model, torch.float64)
    yardstick = denoised(model, torch.float32)
    assert not calls
    if way == "patched":
        with module.patched():
            found = denoised(model, torch.float32)
    else:
        module.set_processor(model)
        found = denoised(model, torch.float32)
    assert calls == shapes * STEPS
    # Steps add up, and behind each attention come sums over the width.
    assert_close(found, truth, yardstick, eps=EPS["float32"], len_kv=64)
