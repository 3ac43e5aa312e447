"""Models of transformers give with scaledot what they give with their own attention."""

import pytest

pytest.importorskip("transformers")

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tiny_models as tiny
from compare import EPS, assert_close

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
