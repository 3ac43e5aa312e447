"""BERT: all-MiniLM-L6-v2, a model of sentences, on padded batches with its real weights."""

import numpy as np
import pytest
import torch

import capture_minilm
from agreement import attending, fetched, in_float64
from bert_weights import batch, minilm
from compare import EPS, assert_close
from scaledot import introspect

pytestmark = pytest.mark.models

SENTENCES = [
    "The cat sits outside.",
    "A feline is resting in the garden.",
    "He is playing the guitar on a stage in front of a large and very enthusiastic crowd.",
    "A musician performs with his instrument before many people.",
    "The new movie is awesome.",
    "I liked that film a lot.",
    "Rain.",
]
# Each sentence's paraphrase; the last has none.
PARAPHRASE = {0: 1, 1: 0, 2: 3, 3: 2, 4: 5, 5: 4}
ROOM = {"eps": EPS["float32"], "len_kv": 384}  # the width


@pytest.fixture(scope="module")
def loaded():
    return fetched(minilm)


@pytest.fixture(scope="module")
def rows(loaded):
    return [loaded[1].encode(sentence).ids for sentence in SENTENCES]


@pytest.fixture(scope="module")
def truth(loaded, rows):
    """Hidden states and attention weights of each sentence alone, in float64."""
    with attending(in_float64(loaded[0]), "eager") as model:
        outputs = [
            model(**batch([ids]), output_hidden_states=True, output_attentions=True)
            for ids in rows
        ]
    return [
        {"hidden": stacked(output.hidden_states)[:, 0], "weights": stacked(output.attentions)[:, 0]}
        for output in outputs
    ]


def stacked(tensors):
    """A tuple of tensors, one a layer, as one array."""
    return torch.stack(tuple(tensors)).numpy()


def embeddings(hidden, seen):
    """Unit vectors of sentences, (batch, width): means of the last hidden states of words."""
    means = (hidden * seen[..., None]).sum(1) / seen.sum(1, keepdims=True)
    return means / np.linalg.norm(means, axis=-1, keepdims=True)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("own", ["eager", "sdpa"])
def test_hidden_states_of_padded_batches(loaded, rows, truth, side, own):
    inputs = batch(rows, side=side)
    hidden = {}
    for name in ("scaledot", own):
        with attending(loaded[0], name) as model:
            hidden[name] = stacked(model(**inputs, output_hidden_states=True).hidden_states)
    for i, one in enumerate(truth):
        seen = inputs["attention_mask"][i].numpy() == 1
        for layer, exact in enumerate(one["hidden"]):
            ours, theirs = (hidden[name][layer, i][seen] for name in ("scaledot", own))
            assert_close(ours, exact, theirs, **ROOM)


@pytest.mark.parametrize("side", ["right", "left"])
def test_output_attentions(loaded, rows, truth, side):
    inputs = batch(rows, side=side)
    weights = {}
    for name in ("scaledot", "eager"):
        with attending(loaded[0], name) as model:
            weights[name] = stacked(model(**inputs, output_attentions=True).attentions)
    for i, one in enumerate(truth):
        seen = inputs["attention_mask"][i].numpy() == 1
        for layer, exact in enumerate(one["weights"]):
            ours, dense = (
                weights[name][layer, i][:, seen][:, :, seen] for name in ("scaledot", "eager")
            )
            assert_close(ours, exact, dense, **ROOM)
            assert not weights["scaledot"][layer, i][:, seen][:, :, ~seen].any()


@pytest.mark.parametrize("side", ["right", "left"])
def test_sentence_similarities(loaded, rows, side):
    inputs = batch(rows, side=side)
    seen = inputs["attention_mask"].numpy()
    # The truth is the forward pass of tools/capture_minilm.py, in NumPy and float64.
    files = capture_minilm.load_model()
    last = [capture_minilm.forward(files, ids).hidden[-1] for ids in rows]
    exact = np.concatenate([embeddings(x[None], np.ones((1, len(x)))) for x in last])
    found = {}
    for name in ("scaledot", "eager"):
        with attending(loaded[0], name) as model:
            found[name] = embeddings(model(**inputs).last_hidden_state.numpy(), seen)
    similarities = found["scaledot"] @ found["scaledot"].T
    assert_close(similarities, exact @ exact.T, found["eager"] @ found["eager"].T, **ROOM)
    np.fill_diagonal(similarities, -1)
    for i, paraphrase in PARAPHRASE.items():
        assert similarities[i].argmax() == paraphrase


def test_what_padding_holds_does_not_matter(loaded, rows):
    inputs = batch(rows)
    other = dict(inputs)
    word = loaded[1].token_to_id("guitar")
    other["input_ids"] = inputs["input_ids"].where(inputs["attention_mask"] == 1, word)
    assert (other["input_ids"] != inputs["input_ids"]).any()
    with attending(loaded[0], "scaledot") as model:
        one, two = (model(**x).last_hidden_state for x in (inputs, other))
    seen = inputs["attention_mask"] == 1
    assert (one[seen] == two[seen]).all()


@pytest.mark.parametrize("side", ["right", "left"])
def test_captured_statistics(loaded, rows, truth, side):
    inputs = batch(rows, side=side)
    with attending(loaded[0], "eager") as model:
        dense = stacked(model(**inputs, output_attentions=True).attentions)
    entry = 0
    with (
        attending(loaded[0], "scaledot") as model,
        introspect.capture(model, entry=entry) as captured,
    ):
        model(**inputs)
    assert [layer.name for layer in captured.layers] == [
        f"encoder.layer.{i}.attention.self" for i in range(6)
    ]
    seen = inputs["attention_mask"][entry].numpy() == 1
    for layer, exact, own in zip(
        captured.layers, truth[entry]["weights"], dense[:, entry], strict=True
    ):
        own = own[:, seen][:, :, seen]
        stats = layer.stats
        assert_close(stats.entropy[:, seen], entropy(exact), entropy(own), **ROOM)
        assert_close(stats.max_weight[:, seen], exact.max(-1), own.max(-1), **ROOM)
        assert (stats.visible[:, seen] == seen.sum()).all()


def entropy(weights):
    """Entropy in nats of each row of weights (..., len_kv), all above 0."""
    weights = weights.astype(np.float64)
    return -(weights * np.log(weights)).sum(-1)
