"""CLIP: both towers with random weights, texts of different lengths in one batch.

Truth is transformers' own attention in float64, on each text and image alone; the yardstick is its
own in float32.
"""

import copy
import importlib

import pytest

from compare import EPS, assert_close
from scaledot import introspect

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
agreement = importlib.import_module("agreement")

pytestmark = pytest.mark.models

WIDTH, HEADS, LAYERS = 32, 4, 2
END = 2  # the token whose place tells what the text says
LENGTHS = (3, 9, 6)


@pytest.fixture(scope="module")
def model():
    sizes = {
        "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "projection_dim": 16,
    }  # fmt: skip
    text = {
        "vocab_size": 40, "max_position_embeddings": 12, "bos_token_id": 1, "eos_token_id": END,
        "pad_token_id": 0,
    }  # fmt: skip
    config = transformers.CLIPConfig(
        text_config=sizes | text, vision_config=sizes | {"image_size": 24, "patch_size": 4},
        projection_dim=16, attn_implementation="eager",
    )  # fmt: skip
    return agreement.with_random_weights(transformers.CLIPModel(config))


@pytest.fixture(scope="module")
def batch():
    """Texts, padded behind their end, and one image more than texts."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.int64)
    for row, length in zip(ids, LENGTHS, strict=True):
        row[:length] = torch.randint(3, 40, (length,), generator=generator)
        row[0], row[length - 1] = 1, END
    seen = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).long()
    pixels = torch.randn(len(LENGTHS) + 1, 3, 24, 24, generator=generator)
    return {"input_ids": ids, "attention_mask": seen, "pixel_values": pixels}


@pytest.fixture(scope="module")
def truth(model, batch):
    """Logits of each text with each image, alone, in float64: (images, texts)."""
    exact = agreement.in_float64(model)
    pixels = batch["pixel_values"].double()
    with torch.no_grad():
        columns = [
            torch.cat([
                exact(input_ids=ids[None, :length], pixel_values=image[None]).logits_per_image
                for image in pixels
            ])
            for ids, length in zip(batch["input_ids"], LENGTHS, strict=True)
        ]
    return torch.cat(columns, dim=1)


def logits(model, batch, implementation):
    """Logits of images and texts, both transposed alike: (images, texts)."""
    with torch.no_grad():
        out = agreement.switched(model, implementation)(**batch)
    assert torch.equal(out.logits_per_image, out.logits_per_text.T)
    return out.logits_per_image


@pytest.mark.parametrize("own", ["eager", "sdpa"])
def test_logits(model, batch, truth, own):
    yardstick = logits(model, batch, own)
    found = logits(model, batch, "scaledot")
    assert_close(found, truth, yardstick, eps=EPS["float32"], len_kv=WIDTH)


def test_texts_are_causal_and_padding_is_not_seen(model, batch):
    plain = logits(model, batch, "scaledot")
    padding = batch["attention_mask"] == 0
    other = batch | {"input_ids": batch["input_ids"].masked_fill(padding, 7)}
    assert torch.equal(logits(model, other, "scaledot"), plain)
    # What comes first is seen by what comes later.
    changed = batch["input_ids"].clone()
    changed[:, 1] = 5
    assert (logits(model, batch | {"input_ids": changed}, "scaledot") != plain).all()


def loss_and_gradients(model, batch, implementation, dtype):
    """The contrastive loss of three pairs, and its gradients in a row."""
    model = agreement.switched(copy.deepcopy(model).to(dtype), implementation)
    pixels = batch["pixel_values"][: len(LENGTHS)].to(dtype)
    loss = model(**batch | {"pixel_values": pixels}, return_loss=True).loss
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return loss[None], torch.cat([x.flatten() for x in gradients])


def test_gradients_of_the_contrastive_loss(model, batch):
    exact = loss_and_gradients(model, batch, "eager", torch.float64)
    yardstick = loss_and_gradients(model, batch, "eager", torch.float32)
    found = loss_and_gradients(model, batch, "scaledot", torch.float32)
    for pair in zip(found, exact, yardstick, strict=True):
        assert_close(*pair, eps=EPS["float32"], len_kv=WIDTH, factor=3.0)


def test_both_towers_can_be_looked_at(model, batch):
    agreement.switched(model, "scaledot")
    with introspect.capture(model, entry=1) as seen, torch.no_grad():
        model(**batch)
    for tower, length in (("text", max(LENGTHS)), ("vision", 37)):
        trace = seen.trace(match=tower)
        assert [x.stats.entropy.shape for x in trace.layers] == [(HEADS, length)] * LAYERS
    visible = seen.trace(match="text").layers[0].stats.visible
    assert (visible[0] == range(1, max(LENGTHS) + 1)).all()
