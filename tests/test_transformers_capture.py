"""capture: the statistics of a model while it runs, layer by layer."""

import threading

import pytest

pytest.importorskip("transformers")

import numpy as np
import torch

import scaledot as sd
import tiny_models as tiny
from compare import EPS, assert_close
from scaledot import _watch, introspect, report

# Models round to float32 between their layers, in norms, also where all else is float64.
ROOM = {"eps": EPS["float32"], "len_kv": tiny.LENGTH}


@pytest.fixture(scope="module", autouse=True)
def _registered():
    tiny.register()


def ready(name):
    """A model in float64 that attends by scaledot."""
    model = tiny.build(name, torch.float64)
    model.set_attn_implementation("scaledot")
    return model


def exact(name, given):
    """Weights of all layers by the truth, from the same weights of the model."""
    model = tiny.build(name, torch.float64)
    model.set_attn_implementation("truth")
    with torch.no_grad():
        return model(**given, output_attentions=True)


@pytest.mark.parametrize("name", [
    "mistral", *(pytest.param(n, marks=pytest.mark.models) for n in ("gemma2", "gpt_oss", "bert")),
])  # fmt: skip
def test_statistics_are_those_of_the_weights(name):
    given = tiny.inputs(name, "left")
    with introspect.capture(ready(name), entry=1, top_k=2, last=3, map_shape=(2, 3)) as seen:
        pass
    assert seen.layers == []
    model = ready(name)
    with introspect.capture(model, entry=1, top_k=2, last=3, map_shape=(2, 3)) as seen:
        model(**given)
    whole = exact(name, given)
    assert len(seen.layers) == 2
    for layer, weights in zip(seen.layers, whole.attentions, strict=True):
        known = weights[1].numpy()
        assert (layer.query, layer.key) == (None, None)
        assert not {"mask", "bias"} & layer.options.keys()
        assert ("sinks" in layer.options) == (name == "gpt_oss")
        assert_close(layer.stats.max_weight, known.max(-1), **ROOM)
        assert_close(layer.stats.received, known.sum(-2), **ROOM)
        assert_close(layer.stats.received_last, known[:, -3:].sum(-2), **ROOM)
        assert layer.stats.top_weights.shape[-1] == 2
        assert layer.stats.block_map.shape[-2:] == (2, 3)
        assert (layer.stats.visible[:, :7] == 0).all() == (name != "bert")


BROADCAST = {  # leading axes of query, key, and an option with its own
    "query alone": ((3,), (1,), {}),
    "key alone": ((1,), (3,), {}),
    "bias alone": ((1,), (1,), {"bias": (3, 1, 4, 6)}),
    "mask alone": ((1,), (1,), {"mask": (3, 1, 4, 6)}),
    "key and mask": ((1,), (3,), {"mask": (1, 1, 4, 6)}),
    "lengths alone": ((1,), (1,), {"kv_len": (3,)}),
    "ids of keys alone": ((1,), (1,), {"segment_ids": (3, 6)}),
    "two axes": ((2, 1), (3,), {"mask": (2, 3, 1, 4, 6), "bias": (3, 2, 4, 6)}),
}


class Attends(torch.nn.Module):
    """Shows one call to whoever looks on, as an attention function does."""

    def forward(self, query, key, options):
        _watch.show(self, query, key, options)


@pytest.mark.parametrize("name", BROADCAST)
def test_entries_are_those_of_the_broadcast_batch(name):
    rng = np.random.default_rng(0)
    of_query, of_key, shapes = BROADCAST[name]
    query, key = rng.standard_normal((*of_query, 2, 4, 8)), rng.standard_normal((*of_key, 2, 6, 8))
    made = {
        "bias": rng.standard_normal, "kv_len": lambda shape: np.array([2, 6, 4]),
        "mask": lambda shape: rng.random(shape) < 0.7, "segment_ids": lambda shape: (
            np.zeros((1, 4), int), rng.integers(0, 2, shape)),
    }  # fmt: skip
    options = {option: made[option](shape) for option, shape in shapes.items()}
    lead = (2, 3) if name == "two axes" else (3,)
    whole = (np.broadcast_to(x, (*lead, *x.shape[-3:])) for x in (query, key))
    known = sd.attention_weights(*whole, **options)
    known = known.reshape(-1, *known.shape[-3:])
    batch = len(known)
    given = {n: tuple(map(torch.tensor, x)) if isinstance(x, tuple) else torch.tensor(x)
             for n, x in options.items()}  # fmt: skip
    model = Attends()
    for entry in (*range(batch), -1):
        with introspect.capture(model, entry=entry, keep=True) as seen:
            model(torch.tensor(query), torch.tensor(key), given)
        found = seen.layers[0]
        assert_close(found.weights(), known[entry], eps=EPS["float64"], len_kv=6)
        assert_close(found.stats.received, known[entry].sum(-2), eps=EPS["float64"], len_kv=6)
    for options, message in (
        ({}, f"one sequence, got a batch of {batch} in Attends"),
        ({"entry": batch}, f"one of the batch of {batch} in Attends, got {batch}"),
        ({"entry": -batch - 1}, f"one of the batch of {batch} in Attends, got -{batch + 1}"),
    ):
        with pytest.raises(ValueError, match=message), introspect.capture(model, **options):
            model(torch.tensor(query), torch.tensor(key), given)


def test_what_does_not_fit_is_said_by_attention():
    model = ready("llama")
    seen = torch.ones(3, 1, tiny.LENGTH, tiny.LENGTH, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"^mask must broadcast to "), introspect.capture(model):
        model(tiny.token_ids(2), attention_mask=seen)


def test_layers_have_the_names_of_their_modules():
    model = ready("llama")
    with introspect.capture(model) as seen:
        model(tiny.token_ids(1))
    names = [layer.name for layer in seen.layers]
    assert names == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    modules = dict(model.named_modules())
    assert all(name in modules for name in names)


def test_shared_layers_are_numbered():
    torch.manual_seed(0)
    config = tiny.hf.AlbertConfig(
        hidden_size=32, embedding_size=16, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, vocab_size=64,
    )  # fmt: skip
    model = tiny.hf.AlbertModel(config).eval()
    model.set_attn_implementation("scaledot")
    with introspect.capture(model) as seen:
        model(tiny.token_ids(1))
    name = seen.layers[0].name
    assert [layer.name for layer in seen.layers] == [name, f"{name} (2)", f"{name} (3)"]


def test_with_keep_layers_give_weights():
    given = {"input_ids": tiny.token_ids(1)}
    model = ready("gpt2")
    with introspect.capture(model, keep=True) as seen:
        model(**given)
    for layer, weights in zip(seen.layers, exact("gpt2", given).attentions, strict=True):
        assert_close(layer.weights(), weights[0].numpy(), **ROOM)


@pytest.mark.parametrize("way", [{}, {"cache_implementation": "static"}])
def test_of_generate_it_is_the_prompt(way):
    ids = tiny.token_ids(1)
    model = ready("mistral")
    with introspect.capture(model, keep=True) as seen:
        model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0, **way)
    assert [layer.len_q for layer in seen.layers] == [tiny.LENGTH] * 2
    tokens = [str(i) for i in ids[0].tolist()]
    found = seen.trace(tokens=tokens, title="a prompt")
    assert (found.tokens, found.title) == (tuple(tokens), "a prompt")
    known = exact("mistral", {"input_ids": ids}).attentions
    for layer, weights in zip(found.layers, known, strict=True):
        assert_close(layer.weights(), weights[0].numpy(), **ROOM)
    assert "a prompt" in report.html(found)


def test_encoders_and_decoders_are_told_by_their_names():
    given = {name: x[:1] for name, x in tiny.inputs("t5", "left").items()}
    model = ready("t5")
    with introspect.capture(model) as seen:
        model(**given)
    kinds = {"encoder.*Self": (19, 19), "decoder.*Self": (9, 9), "EncDec": (9, 19)}
    assert len(seen.layers) == 6
    whole = exact("t5", given)
    for (match, lengths), known in zip(kinds.items(), (
        whole.encoder_attentions, whole.decoder_attentions, whole.cross_attentions,
    ), strict=True):  # fmt: skip
        trace = seen.trace(
            match=match, tokens=range(lengths[0]), key_tokens=range(lengths[1])
        )
        assert [(layer.len_q, layer.len_kv) for layer in trace.layers] == [lengths] * 2
        for layer, weights in zip(trace.layers, known, strict=True):
            assert_close(layer.stats.received, weights[0].sum(-2).numpy(), **ROOM)


def test_encoders_that_run_before_are_seen():
    model = ready("whisper")
    audio = tiny.inputs("whisper")["input_features"][:1]
    encoder = model.get_encoder()
    with introspect.capture(model) as seen:
        states = encoder(audio)
        model(encoder_outputs=states, decoder_input_ids=tiny.token_ids(1, 3))
        model(encoder_outputs=states, decoder_input_ids=tiny.token_ids(1, 5))
    assert [layer.len_q for layer in seen.layers] == [tiny.LENGTH] * 2 + [3] * 4


def test_it_ends_with_the_context_also_after_an_error():
    model, ids = ready("llama"), tiny.token_ids(1)
    hooks = len(model._forward_hooks)
    with pytest.raises(KeyError), introspect.capture(model) as seen:  # noqa: PT012
        model(ids)
        raise KeyError
    assert len(seen.layers) == 2
    model(ids)
    assert len(seen.layers) == 2
    assert len(model._forward_hooks) == hooks


def test_an_error_in_the_model_ends_what_is_seen():
    model = ready("llama")
    with introspect.capture(model) as seen:
        with pytest.raises(ValueError, match="but indices is not"):
            model(tiny.token_ids(1), indices=3)
        model(tiny.token_ids(1))
    assert seen.layers == []


def test_contexts_nest():
    model, other = ready("llama"), ready("gpt2")
    with introspect.capture(model) as outer:
        with introspect.capture(model, keep=True) as inner, introspect.capture(other) as apart:
            model(tiny.token_ids(1))
        other(tiny.token_ids(1))
    assert [len(seen.layers) for seen in (outer, inner, apart)] == [2, 2, 0]
    assert (outer.layers[0].query is None, inner.layers[0].query is None) == (True, False)
    part = model.model.layers[1]
    with introspect.capture(part) as seen:
        model(tiny.token_ids(1))
    assert [layer.name for layer in seen.layers] == ["self_attn"]


def test_threads_do_not_see_one_another():
    model, lengths = ready("llama"), []

    def other():
        with introspect.capture(model) as its_own:
            model(tiny.token_ids(1, 4))
        lengths.extend(layer.len_q for layer in its_own.layers)

    thread = threading.Thread(target=other)
    with introspect.capture(model) as seen:
        thread.start()
        thread.join()
        model(tiny.token_ids(1, 6))
    assert lengths == [4, 4]
    assert [layer.len_q for layer in seen.layers] == [6, 6]


def test_gradients_pass_by():
    given = {"input_ids": tiny.token_ids(1), "labels": tiny.token_ids(1)}
    grads = []
    for looked_at in (False, True):
        model = ready("llama").train()
        model.activation_checkpointing_enable({"use_reentrant": False})
        if looked_at:
            with introspect.capture(model) as seen:
                model(**given, use_cache=False).loss.backward()
            assert len(seen.layers) == 2  # not those that the checkpoints compute again
            assert isinstance(seen.layers[0].stats.lse, np.ndarray)
        else:
            model(**given, use_cache=False).loss.backward()
        grads.append([x.grad for x in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_errors_say_what_to_do():
    model = ready("llama")
    with pytest.raises(TypeError, match=r"torch.nn.Module, got list. Arrays of queries"):
        introspect.capture([1]).__enter__()
    with pytest.raises(TypeError, match=r"entry must be an integer, got float. The first is 0"):
        introspect.capture(model, entry=1.0).__enter__()
    with pytest.raises(ValueError, match=r"one sequence, got a batch of 2 in model.layers.0"):  # noqa: SIM117
        with introspect.capture(model):
            model(tiny.token_ids(2))
    with pytest.raises(ValueError, match=r"one of the batch of 2 in model.layers.0.self_attn, got"):  # noqa: SIM117
        with introspect.capture(model, entry=2):
            model(tiny.token_ids(2))
    model.set_attn_implementation("eager")
    with introspect.capture(model) as seen:
        model(tiny.token_ids(1))
    with pytest.raises(ValueError, match=r"inside capture, got none. Load the model with"):
        seen.trace()
    model.set_attn_implementation("scaledot")
    with introspect.capture(model) as seen:
        model(tiny.token_ids(1))
    with pytest.raises(ValueError, match=r"found in a layer's name, as in 'model.layers.0.self"):
        seen.trace(match="decoder")
    with pytest.raises(ValueError, match="tokens must have one string"):
        seen.trace(tokens=["one"])
