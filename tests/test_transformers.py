"""Models of transformers give with scaledot what they give with their own attention."""

import copy
import gc
import sys

import pytest

pytest.importorskip("transformers")

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import scaledot.transformers
import tiny_models as tiny
from compare import EPS, assert_close
from scaledot.transformers import _model
from scaledot.transformers._model import check

ROOM = {"eps": EPS["float32"], "len_kv": tiny.LENGTH}


@pytest.fixture(scope="module", autouse=True)
def _registered():
    tiny.register()


def models(*quick):
    """All models; those beyond the quick ones are of the tier of models."""
    return [
        name if name in quick else pytest.param(name, marks=pytest.mark.models)
        for name in tiny.CONFIGS
    ]


def valid_tokens(name, given):
    return given.get("attention_mask") if name in tiny.TEXT else None


def padded(*quick):
    """Models with paddings; those beyond the quick ones are of the tier of models."""
    found = []
    for name in tiny.CONFIGS:
        masked = name not in ("vit", "whisper")  # these take no mask
        many = name in ("mistral", "gemma2", "bert", "t5")
        count = 5 if many else 3 if masked else 1
        for where in ("none", "left", "right", "both", "holes")[:count]:
            marks = () if (name, where) in quick else pytest.mark.models
            found.append(pytest.param(name, where, marks=marks, id=f"{name}, {where}"))
    return found


@pytest.mark.parametrize(
    ("name", "where"),
    padded(("llama", "none"), ("llama", "right"), ("mistral", "left"), ("mistral", "both")),
)
def test_outputs_equal_those_of_its_own_attention(name, where):
    given = tiny.inputs(name, where)
    valid = valid_tokens(name, given)
    model, exact = tiny.build(name), tiny.build(name, torch.float64)
    with torch.no_grad():
        known = tiny.run(exact, "truth", given, valid)
        eager, found = (tiny.run(model, impl, given, valid) for impl in ("eager", "scaledot"))
        everywhere = tiny.run(model, "scaledot", given)
    assert_close(found, known, eager, **ROOM)
    assert torch.isfinite(everywhere).all()  # rows of padding too


@pytest.mark.parametrize("name", models("mistral", "t5"))
def test_gradients_equal_those_of_its_own_attention(name):
    given = tiny.inputs(name, "none" if name in ("vit", "whisper") else "left")
    valid = valid_tokens(name, given)
    known, eager, found = (
        gradients(tiny.build(name, dtype), impl, given, valid) for impl, dtype in (
            ("truth", torch.float64), ("eager", torch.float32), ("scaledot", torch.float32),
        )
    )  # fmt: skip
    assert found.keys() == known.keys()
    largest = max(x.abs().max() for x in known.values())
    for parameter, truth in known.items():
        if truth.abs().max() < EPS["float32"] * largest:
            # A bias that all keys share changes nothing: what is there is rounding.
            assert found[parameter].abs().max() < 10 * ROOM["eps"] * largest
        else:
            assert_close(found[parameter], truth, eager[parameter], **ROOM, factor=3)


def gradients(model, impl, given, valid):
    """Gradient of each parameter that has one."""
    tiny.run(model, impl, given, valid).square().mean().backward()
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def test_a_learnt_position_bias_has_its_gradient():
    found = gradients(tiny.build("t5"), "scaledot", tiny.inputs("t5"), None)
    names = [name for name in found if "relative_attention_bias" in name]
    assert len(names) == 2
    assert all(found[name].abs().max() > 0 for name in names)


class Sizes(TorchDispatchMode):
    """Notes the largest number of axes of one length among the tensors that are made."""

    def __init__(self, length):
        super().__init__()
        self.length, self.most = length, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for x in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(x, torch.Tensor):
                self.most = max(self.most, sum(n == self.length for n in x.shape))
        return made


@pytest.mark.parametrize(
    ("name", "where"),
    [(name, where) for name in ("mistral", "bert") for where in ("none", "left", "right", "holes")]
    + [pytest.param(name, "left", marks=pytest.mark.models) for name in tiny.TEXT],
)
def test_no_matrix_of_queries_and_keys_is_made(name, where):
    model, given = tiny.build(name), tiny.inputs(name, where)
    model.set_attn_implementation("scaledot")
    with torch.no_grad(), Sizes(tiny.LENGTH) as sizes:
        model(**given)
    assert sizes.most == 1


@pytest.mark.parametrize("impl", ["eager", "sdpa"])
def test_a_matrix_would_be_noticed(impl):
    model, given = tiny.build("mistral"), tiny.inputs("mistral", "left")
    model.set_attn_implementation(impl)
    with torch.no_grad(), Sizes(tiny.LENGTH) as sizes:
        model(**given)
    assert sizes.most == 2


@pytest.mark.parametrize("name", ["llama", pytest.param("llama4", marks=pytest.mark.models),
                                  pytest.param("mistral", marks=pytest.mark.models)])
def test_sequences_that_are_packed_do_not_see_one_another(name):
    ids = tiny.token_ids(1)
    places = torch.cat([torch.arange(8), torch.arange(tiny.LENGTH - 8)])[None]
    model = tiny.build(name)
    model.set_attn_implementation("scaledot")
    with torch.no_grad(), Sizes(tiny.LENGTH) as sizes:
        found = model(ids, position_ids=places, use_cache=False)[0][0]
    assert sizes.most == 1
    parts = []
    for dtype, impl in ((torch.float64, "truth"), (torch.float32, "eager")):
        alone = tiny.build(name, dtype)
        alone.set_attn_implementation(impl)
        with torch.no_grad():
            parts.append(torch.cat([alone(part)[0][0] for part in (ids[:, :8], ids[:, 8:])]))
    assert_close(found, *parts, **ROOM)


@pytest.mark.parametrize("name", ["gpt_oss", "t5"])
def test_weights_are_those_of_its_own_attention(name):
    given = tiny.inputs(name, "left")
    model, exact = tiny.build(name), tiny.build(name, torch.float64)
    results = []
    for one, impl in ((exact, "truth"), (model, "eager"), (model, "scaledot")):
        one.set_attn_implementation(impl)
        with torch.no_grad():
            results.append(one(**given, output_attentions=True))
    kinds = ("attentions",) if name == "gpt_oss" else (
        "encoder_attentions", "decoder_attentions", "cross_attentions")  # fmt: skip
    for kind in kinds:
        layers = list(zip(*(result[kind] for result in results), strict=True))
        assert len(layers) == 2
        for known, eager, found in layers:
            rows = slice(7, None) if kind in ("attentions", "encoder_attentions") else slice(None)
            assert_close(*(x[:, :, rows] for x in (found, known, eager)), **ROOM)


@pytest.mark.parametrize("name", tiny.OWN)
def test_models_that_use_masks_in_their_own_way_are_refused(name):
    kind, config = tiny.OWN[name]
    model = kind._from_config(config(), attn_implementation="scaledot").eval()
    message = rf"got {kind.__name__[:3]}\w+, which uses masks in its own way"
    for keep in (None, tiny.padding("left")):
        with pytest.raises(ValueError, match=message):
            model(tiny.token_ids(), attention_mask=keep)


def of_others(name, config, module="of_a_notebook"):
    """A class of models that transformers would not exchange: its source cannot be read."""
    members = {"config_class": config, "__module__": module}
    return type(name, (tiny.hf.PreTrainedModel,), members)


def test_models_of_others_that_have_the_same_config_decide_nothing():
    config = tiny.CONFIGS["llama"][1]()
    model = tiny.hf.LlamaForCausalLM._from_config(config, attn_implementation="scaledot")
    probe = of_others("Probe", tiny.hf.LlamaConfig)
    assert model.config.architectures is None
    with torch.no_grad():
        assert torch.isfinite(model(tiny.token_ids()).logits).all()
    model.config.architectures = [probe.__name__]
    with pytest.raises(ValueError, match="got Probe, which uses masks in its own way"):
        model(tiny.token_ids())


def test_models_of_others_do_not_free_those_that_a_config_is_from():
    config = tiny.OWN["bloom"][1]()
    model = tiny.hf.BloomForCausalLM._from_config(config, attn_implementation="scaledot")
    free = type("Free", (tiny.hf.PreTrainedModel,), {"config_class": tiny.hf.BloomConfig})
    assert free._can_set_attn_implementation()
    with pytest.raises(ValueError, match=r"got Bloom\w+, which uses masks in its own way"):
        model(tiny.token_ids())


def test_one_of_several_models_that_a_config_is_from_is_enough():
    # The folding model, which is loaded with its triangle attention, has one of its own.
    with scaledot.transformers.esmfold_attention():
        folding = sys.modules["transformers.models.esm.modeling_esmfold"].EsmForProteinFolding
    assert not folding._can_set_attn_implementation()
    config = tiny.hf.EsmConfig(**tiny._encoder, pad_token_id=0, mask_token_id=1)
    model = tiny.hf.EsmModel._from_config(config, attn_implementation="scaledot").eval()
    with torch.no_grad():
        assert torch.isfinite(model(tiny.token_ids())[0]).all()


def test_models_that_are_loaded_later_are_asked_too():
    config = type("LaterConfig", (tiny.hf.PreTrainedConfig,), {"__module__": "of_a_notebook"})
    before = config()
    check(before)
    later = of_others("Later", config)
    for one in (before, config()):
        with pytest.raises(ValueError, match=f"got {later.__name__}, which uses masks"):
            check(one)


def test_models_are_looked_for_once(monkeypatch):
    looked, found = [], _model._found
    monkeypatch.setattr(_model, "_found", lambda *of: looked.append(of) or found(*of))
    config = tiny.CONFIGS["llama"][1]()
    model = tiny.hf.LlamaForCausalLM._from_config(config, attn_implementation="scaledot")
    for _ in range(3):
        with torch.no_grad():
            model(tiny.token_ids())
    assert looked == [(tiny.hf.LlamaConfig, ())]
    config = model.config
    config.architectures = ["LlamaForCausalLM"]
    check(config)
    check(copy.copy(config))
    check(config)
    assert looked[1:] == [(tiny.hf.LlamaConfig, ("LlamaForCausalLM",))] * 2


def test_configs_that_are_gone_are_forgotten():
    config = tiny.CONFIGS["llama"][1]()
    check(config)
    key = id(config)
    assert key in _model._passed
    del config
    gc.collect()
    assert key not in _model._passed


def test_what_the_loss_takes_and_tokenizers_give_changes_no_attention():
    ids = tiny.token_ids()
    losses = []
    for dtype, impl in (
        (torch.float32, "scaledot"), (torch.float64, "truth"), (torch.float32, "eager"),
    ):  # fmt: skip
        model = tiny.build("llama", dtype)
        model.set_attn_implementation(impl)
        with torch.no_grad():
            losses.append(model(
                ids, labels=ids, shift_labels=ids.roll(-1, 1), ignore_index=int(ids[0, 1]),
                reduction="mean", token_type_ids=torch.zeros_like(ids),
                mm_token_type_ids=torch.zeros_like(ids),
            ).loss)  # fmt: skip
    assert_close(*losses, **ROOM)


def test_an_encoder_that_does_not_say_that_it_is_none_of_a_decoder_sees_all():
    logits = []
    for dtype, impl in (
        (torch.float32, "scaledot"), (torch.float64, "eager"), (torch.float32, "eager"),
    ):  # fmt: skip
        torch.manual_seed(0)
        config = tiny.hf.SplinterConfig(**tiny._encoder)
        model = tiny.hf.SplinterModel._from_config(config, attn_implementation=impl)
        with torch.no_grad():
            logits.append(model.to(dtype).eval()(tiny.token_ids())[0])
    assert_close(*logits, **ROOM)


def test_a_model_of_which_only_a_part_is_exchanged_gives_no_wrong_answer():
    # Its text model takes the boolean matrix of images and text for numbers to be added.
    images = {
        "image_size": 16, "patch_size": 8, "hidden_size": tiny.HIDDEN, "intermediate_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 4,
    }  # fmt: skip
    config = tiny.hf.GitConfig(vision_config=images, **tiny._encoder)
    with pytest.raises(KeyError, match="scaledot"):
        tiny.hf.GitModel._from_config(config, attn_implementation="scaledot")
    model = tiny.hf.GitModel._from_config(config, attn_implementation="eager").eval()
    model.set_attn_implementation("scaledot")
    with pytest.raises(TypeError, match=r"must not be added.* attention of its own: use 'eager'"):
        model(tiny.token_ids(), pixel_values=torch.zeros(2, 3, 16, 16))


def test_rows_that_a_model_cuts_out_of_its_masks_are_right():
    # Its last layers compute the tokens whose logits are kept, and those alone.
    kind, config = tiny.CUTS
    logits = []
    for dtype, impl, more in (
        (torch.float32, "scaledot", {"logits_to_keep": 3}), (torch.float64, "truth", {}),
        (torch.float32, "eager", {}),
    ):  # fmt: skip
        torch.manual_seed(0)
        model = kind._from_config(config(), attn_implementation=impl).to(dtype).eval()
        with torch.no_grad():
            logits.append(model(tiny.token_ids(), **more).logits[:, -3:])
    assert_close(*logits, **ROOM)


@pytest.mark.models
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpoints_change_nothing_with_dropout(reentrant):
    given = {**tiny.inputs("mistral", "left"), "labels": tiny.token_ids(), "use_cache": False}
    grads = []
    for checkpoints in (False, True):
        model = tiny.build("mistral").train()
        model.set_attn_implementation("scaledot")
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.5
        if checkpoints:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
        torch.manual_seed(3)
        model(**given).loss.backward()
        grads.append([x.grad for x in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_dropout_follows_the_seed_of_pytorch():
    config = tiny.CONFIGS["llama"][1]()
    config.attention_dropout = 0.5
    torch.manual_seed(0)
    model = tiny.CONFIGS["llama"][0](config).train()
    model.set_attn_implementation("scaledot")

    def output(seed):
        torch.manual_seed(seed)
        with torch.no_grad():
            return model(tiny.token_ids())[0]

    first = output(1)
    assert torch.equal(output(1), first)
    assert not torch.equal(output(2), first)
    model.eval()
    assert torch.equal(output(1), output(2))


@pytest.mark.models
@pytest.mark.parametrize("where", ["none", "left"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_models_compile_as_one_graph(name, where):
    given = {**tiny.inputs(name, where), "use_cache": False}
    model = tiny.build(name)
    with torch.no_grad():
        eager = tiny.run(model, "eager", given, given["attention_mask"])
        model.set_attn_implementation("scaledot")
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        found = compiled(**given)[0]
        known = tiny.run(tiny.build(name, torch.float64), "truth", given, given["attention_mask"])
    valid = given["attention_mask"]
    assert_close(found if valid is None else found[valid.bool()], known, eager, **ROOM)


@pytest.mark.models
def test_layers_compile_one_by_one():
    given = tiny.inputs("mistral", "left")
    valid = given["attention_mask"]
    model = tiny.build("mistral")
    with torch.no_grad():
        known = tiny.run(tiny.build("mistral", torch.float64), "truth", given, valid)
        eager = tiny.run(model, "eager", given, valid)
        model.set_attn_implementation("scaledot")
        torch._dynamo.reset()
        for layer in model.model.layers:
            layer.compile(backend="aot_eager")
        found = model(**given)[0][valid.bool()]
    assert_close(found, known, eager, **ROOM)
