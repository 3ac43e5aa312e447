"""Bahdanau's and Luong's attention between two LSTMs: they learn, and show where they look.

The models are those of examples/seq2seq.py; they learn to write words backwards, so that the right
alignment is known: the anti-diagonal.
"""

import copy
import importlib
import math

import numpy as np
import pytest

from compare import EPS, assert_close

torch = pytest.importorskip("torch")
scripts = importlib.import_module("example_scripts")

pytestmark = pytest.mark.models

KINDS = ("Bahdanau", "Luong")
STEPS = 300


@pytest.fixture(autouse=True, scope="module")
def torch_on_one_thread():
    with scripts.one_thread_of_torch():
        yield


@pytest.fixture(scope="module")
def example():
    return scripts.example_script("seq2seq")


@pytest.fixture(scope="module")
def untrained(example):
    def model(kind):
        torch.manual_seed(0)
        return getattr(example, kind)()

    return model


@pytest.fixture(scope="module", params=KINDS)
def trained(request, example, untrained):
    model = untrained(request.param)
    example.train(model, STEPS)
    return model


@pytest.fixture(scope="module")
def new(example):
    """Words that no training has seen but by chance: source, target, wanted."""
    return example.words(500, torch.Generator().manual_seed(1))


def mirrored(source, pad):
    """For each letter of the reversed words the place where it stands, (batch, len)."""
    lengths = (source != pad).sum(dim=1, keepdim=True)
    return (lengths - 1 - torch.arange(source.shape[1])).clamp(min=0)


def test_it_learns_to_write_backwards(example, trained, new):
    source, _, wanted = new
    said = example.spoken(trained, source).where(wanted != example.PAD, example.PAD)
    assert (said == wanted).all(dim=1).double().mean() > 0.95


@torch.no_grad()
def test_the_alignment_is_the_anti_diagonal(example, trained, new):
    source, target, wanted = new
    real = wanted != example.PAD
    weights = trained.alignment(source, target)
    total = weights.sum(dim=-1)
    assert_close(total, torch.ones_like(total), eps=EPS["float32"], len_kv=source.shape[1])
    assert not weights.masked_select((source == example.PAD)[:, None]).any()
    places = mirrored(source, example.PAD)
    assert (weights.argmax(dim=-1) == places)[real].double().mean() > 0.95
    # Weights are those of the letters: most of it lies there.
    assert weights.gather(2, places[..., None])[..., 0][real].mean() > 0.6


@torch.no_grad()
def test_a_picture_of_the_alignment(example, trained, new, tmp_path):
    plot = importlib.import_module("scaledot.plot")
    pytest.importorskip("matplotlib")
    source, target, _ = new
    longest = int((source != example.PAD).sum(dim=1).argmax())
    weights = trained.alignment(source, target)[longest].numpy()
    letters = example.text(source[longest])
    assert len(letters) == example.LONGEST
    drawing = plot.weights(weights, list(letters[::-1]), list(letters))
    assert [label.get_text() for label in drawing.get_yticklabels()] == list(letters[::-1])
    drawn = np.asarray(drawing.images[0].get_array())
    assert (drawn.argmax(axis=1) == np.arange(example.LONGEST)[::-1]).all()
    file = tmp_path / "alignment.png"
    plot.save(drawing, file)
    assert file.stat().st_size > 0


# The same model with attention as the papers write it, all scores at once


def additive(model, query, key, value, mask):
    hidden = torch.tanh((query @ model.w_q.mT)[:, :, None] + (key @ model.w_k.mT)[:, None])
    return by_scores(hidden @ model.v, value, mask)


def multiplicative(model, query, key, value, mask):
    return by_scores(torch.einsum("bqd,de,bke->bqk", query, model.w, key), value, mask)


def by_scores(scores, value, mask):
    return scores.masked_fill(~mask, -math.inf).softmax(dim=-1) @ value


@pytest.mark.parametrize(
    ("kind", "textbook"), [("Bahdanau", additive), ("Luong", multiplicative)]
)
def test_scores_and_gradients_are_those_of_the_formula(
    example, untrained, monkeypatch, kind, textbook
):
    source, target, wanted = example.words(16, torch.Generator().manual_seed(2))

    def results(dtype):
        model = copy.deepcopy(untrained(kind)).to(dtype)
        scores = model(source, target)
        loss = torch.nn.functional.cross_entropy(
            scores.flatten(0, 1), wanted.flatten(), ignore_index=example.PAD
        )
        loss.backward()
        return {"scores": scores} | {name: x.grad for name, x in model.named_parameters()}

    found = results(torch.float32)
    monkeypatch.setattr(getattr(example, kind), "attend", textbook)
    truth, yardstick = results(torch.float64), results(torch.float32)
    for name, exact in truth.items():
        assert exact.abs().max() > 0, name
        assert_close(found[name], exact, yardstick[name], eps=EPS["float32"],
                     len_kv=example.LONGEST, factor=2.0 if name == "scores" else 3.0)  # fmt: skip
