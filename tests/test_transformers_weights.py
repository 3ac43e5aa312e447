"""Weights of models that do not tell attention that they are wanted: transformers collects them."""

import importlib.util
import sys

import pytest

pytest.importorskip("transformers")

import torch
import transformers as hf
from transformers.utils import output_capturing

import tiny_models as tiny
from compare import EPS, assert_close
from scaledot.transformers._attend import attend

_tower = {
    "hidden_size": tiny.HIDDEN, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4,
}  # fmt: skip
MODELS = {
    "gpt2": tiny.CONFIGS["gpt2"],
    "opt": (hf.OPTForCausalLM, lambda: hf.OPTConfig(
        hidden_size=tiny.HIDDEN, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4,
        vocab_size=64, word_embed_proj_dim=tiny.HIDDEN, init_std=0.3, bos_token_id=1,
        eos_token_id=2)),
    "siglip": (hf.SiglipModel, lambda: hf.SiglipConfig(
        text_config={
            **_tower, "vocab_size": 64, "max_position_embeddings": tiny.LENGTH,
            "projection_size": tiny.HIDDEN, "bos_token_id": 1, "eos_token_id": 2,
        },
        vision_config={**_tower, "image_size": 16, "patch_size": 4})),
}  # fmt: skip
# What is to be learnt from all of it: the truth, the yardstick, and ours.
RUNS = ((torch.float64, "truth"), (torch.float32, "truth"), (torch.float32, "scaledot"))


@pytest.fixture(scope="module", autouse=True)
def _registered():
    tiny.register()


def build(name, dtype, impl):
    """A model in evaluation, its weights the same in every dtype, large enough to tell keys."""
    kind, make = MODELS[name]
    torch.manual_seed(0)
    model = kind(make())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    model = model.to(dtype).eval()
    model.set_attn_implementation(impl)
    return model


def collected(name, model):
    """Weights of all layers (batch, num_heads, len_q, len_kv), in their order."""
    ids = tiny.token_ids()
    with torch.no_grad():
        if name != "siglip":
            keep = tiny.padding("right")
            return model(ids, attention_mask=keep, output_attentions=True).attentions
        pixels = tiny.inputs("vit")["pixel_values"].to(next(model.parameters()).dtype)
        output = model(ids, pixels, output_attentions=True)
    return output.text_model_output.attentions + output.vision_model_output.attentions


@pytest.mark.parametrize("name", MODELS)
def test_weights_that_are_collected_are_those_of_its_own_attention(name):
    results = [collected(name, build(name, *run)) for run in RUNS]
    layers = 4 if name == "siglip" else 2
    assert [len(result) for result in results] == [layers] * 3
    for known, yardstick, found in zip(*results, strict=True):
        assert known.std() > 0.01
        assert_close(found, known, yardstick, eps=EPS["float32"], len_kv=tiny.LENGTH)


def test_generate_collects_weights_of_all_steps():
    results = []
    for run in RUNS:
        result = build("gpt2", *run).generate(
            tiny.token_ids(), attention_mask=tiny.padding("none"), max_new_tokens=3,
            do_sample=False, pad_token_id=0, output_attentions=True, return_dict_in_generate=True,
        )  # fmt: skip
        assert [len(step) for step in result.attentions] == [2, 2, 2]
        results.append([weights for step in result.attentions for weights in step])
    for known, yardstick, found in zip(*results, strict=True):
        assert_close(found, known, yardstick, eps=EPS["float32"], len_kv=tiny.LENGTH + 3)


def test_weights_are_computed_where_they_are_wanted_alone(monkeypatch):
    module, calls = sys.modules[attend.__module__], []
    weights = module.attention_weights

    def noting(*arrays, **options):
        calls.append(options)
        return weights(*arrays, **options)

    monkeypatch.setattr(module, "attention_weights", noting)
    model, counts = build("gpt2", torch.float32, "scaledot"), []
    for wanted in ({}, {"output_attentions": True}, {"output_hidden_states": True}):
        with torch.no_grad():
            model(tiny.token_ids(), **wanted)
        counts.append(len(calls))
    assert counts == [0, 2, 2]


def test_weights_that_are_collected_have_gradients_through_checkpoints():
    grads = []
    for checkpoints in (False, True):
        model = build("gpt2", torch.float32, "scaledot").train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        if checkpoints:
            model.activation_checkpointing_enable({"use_reentrant": False})
        output = model(tiny.token_ids(), output_attentions=True, use_cache=False)
        (output.logits.sum() + sum(x.square().sum() for x in output.attentions)).backward()
        grads.append([parameter.grad for parameter in model.parameters()])
        query = model.transformer.h[1].attn.c_attn.weight.grad[:, : tiny.HIDDEN]
        assert query.abs().max() > 0
    assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))


@pytest.mark.heavy
def test_a_layer_that_is_compiled_by_itself_stays_one_graph():
    model = build("gpt2", torch.float32, "scaledot")
    with torch.no_grad():
        plain = model(tiny.token_ids(), use_cache=False).logits
        torch._dynamo.reset()
        for layer in model.transformer.h:
            layer.compile(backend="aot_eager", fullgraph=True)
        found = model(tiny.token_ids(), use_cache=False).logits
    assert_close(found, plain.double(), plain, eps=EPS["float32"], len_kv=tiny.LENGTH)


def test_versions_that_collect_in_another_way_do_without(monkeypatch):
    monkeypatch.delattr(output_capturing, "_active_collector")
    file = sys.modules[attend.__module__].__file__
    spec = importlib.util.spec_from_file_location("attend_of_another_version", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    x = torch.ones(1, 1, 2, 4)
    assert module.attend(torch.nn.Identity(), x, x, x, None)[1] is None
    _, weights = module.attend(torch.nn.Identity(), x, x, x, None, output_attentions=True)
    assert torch.equal(weights, torch.full((1, 1, 2, 2), 0.5))
