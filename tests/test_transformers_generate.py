"""Generation gives the same tokens as with eager attention, whatever cache it has."""

import pytest

pytest.importorskip("transformers")

import torch

import tiny_models as tiny


@pytest.fixture(scope="module", autouse=True)
def _registered():
    tiny.register()


WAYS = {
    "greedy": {},
    "static cache": {"cache_implementation": "static"},
    "beams": {"num_beams": 3},
    "beams, static cache": {"num_beams": 3, "cache_implementation": "static"},
    "without cache": {"use_cache": False},
}


def generated(model, impl, given):
    """Tokens under an implementation."""
    model.set_attn_implementation(impl)
    return model.generate(
        **given, max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None
    )


def cases():
    """Models in some ways, a few of them in all; most are of the tier of models."""
    quick = {("llama", "static cache"), ("mistral", "greedy")}
    found = []
    for name in (*tiny.DECODERS, "t5"):
        for way in WAYS if name in ("mistral", "gpt_oss", "t5") else ("greedy", "static cache"):
            marks = () if (name, way) in quick else pytest.mark.models
            found.append(pytest.param(name, way, marks=marks, id=f"{name}, {way}"))
    return found


@pytest.mark.parametrize(("name", "way"), cases())
def test_tokens_equal_those_of_eager(name, way):
    model = tiny.build(name)
    given = {"input_ids": tiny.token_ids(), "attention_mask": tiny.padding("left"), **WAYS[way]}
    known, found = (generated(model, impl, given) for impl in ("eager", "scaledot"))
    assert found.shape[1] > 8
    assert torch.equal(found, known)


@pytest.mark.models
@pytest.mark.filterwarnings("ignore")  # of Whisper's own generate, about its arguments
@pytest.mark.parametrize("way", WAYS)
def test_whisper_writes_the_same(way):
    model = tiny.build("whisper")
    audio = tiny.inputs("whisper")["input_features"].float()
    given = {"input_features": audio, **WAYS[way]}
    known, found = (generated(model, impl, given) for impl in ("eager", "scaledot"))
    assert torch.equal(found, known)
