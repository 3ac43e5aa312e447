"""The Transformer of 2017: PyTorch's ``nn.Transformer`` with this attention in all three places.

Self-attention of the encoder, masked self-attention of the decoder, and cross-attention. Sinusoidal
positions, shared embeddings, layer norm behind each part, Adam's numbers and label smoothing are
those of arXiv 1706.03762, sections 3 and 5.
"""

import copy
import importlib
import math

import pytest

from compare import EPS, assert_close
from test_torch_learns import ALPHABET, FIRST, LONGEST, PAD, decoded, strings

torch = pytest.importorskip("torch")
scripts = importlib.import_module("example_scripts")
scaledot_torch = importlib.import_module("scaledot.torch")
nn = torch.nn

pytestmark = pytest.mark.models

WIDTH, HEADS, HIDDEN, BATCH = 32, 4, 64, 128
STEPS, WARM_UP, RATE = 400, 30, 6e-3


class Transformer(nn.Module):
    """Embeddings, ``nn.Transformer`` as it is, and scores by the embeddings again."""

    def __init__(self):
        super().__init__()
        self.letters = nn.Embedding(FIRST + len(ALPHABET), WIDTH)
        nn.init.normal_(self.letters.weight, std=WIDTH**-0.5)
        self.core = nn.Transformer(
            WIDTH, HEADS, num_encoder_layers=1, num_decoder_layers=1, dim_feedforward=HIDDEN,
            dropout=0.0, batch_first=True,
        )  # fmt: skip
        rates = 10000.0 ** (-torch.arange(0, WIDTH, 2) / WIDTH)
        angles = torch.arange(LONGEST + 1)[:, None] * rates
        self.register_buffer("places", torch.stack([angles.sin(), angles.cos()], -1).flatten(1))

    def embedded(self, numbers):
        return self.letters(numbers) * math.sqrt(WIDTH) + self.places[: numbers.shape[1]]

    def forward(self, source, target):
        """Scores of the next letter after each of `target`, (batch, len, letters)."""
        length = target.shape[1]
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        x = self.core(
            self.embedded(source), self.embedded(target), tgt_mask=future, tgt_is_causal=True,
            src_key_padding_mask=source == PAD, memory_key_padding_mask=source == PAD,
        )  # fmt: skip
        return x @ self.letters.weight.mT


def with_this_attention(model):
    """A copy whose attention modules are those of scaledot, with the same parameters."""
    model = copy.deepcopy(model)
    for layer in model.modules():
        for name, module in list(layer.named_children()):
            if type(module) is nn.MultiheadAttention:
                ours = scaledot_torch.MultiheadAttention(WIDTH, HEADS, batch_first=True)
                ours.load_state_dict(module.state_dict())
                setattr(layer, name, ours)
    return model


def attentions(model):
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)}


def train(model):
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), RATE, betas=(0.9, 0.98), eps=1e-9)
    rates = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1, (step + 1) / WARM_UP) * math.cos(math.pi / 2 * step / STEPS),
    )
    for _ in range(STEPS):
        source, target, wanted = strings(BATCH, generator)
        loss = nn.functional.cross_entropy(
            model(source, target).flatten(0, 1), wanted.flatten(), ignore_index=PAD,
            label_smoothing=0.1,
        )  # fmt: skip
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rates.step()


@pytest.fixture(autouse=True, scope="module")
def torch_on_one_thread():
    with scripts.one_thread_of_torch():
        yield


@pytest.fixture(scope="module")
def trained():
    torch.manual_seed(0)
    model = with_this_attention(Transformer())
    assert {type(m) for m in attentions(model).values()} == {scaledot_torch.MultiheadAttention}
    assert len(attentions(model)) == 3
    train(model)
    return model


def test_it_learns_to_reverse_strings(trained):
    source, target, wanted = strings(1000, torch.Generator().manual_seed(1))
    real = wanted != PAD
    with torch.no_grad():
        right = trained(source, target).argmax(dim=-1) == wanted
    assert right[real].double().mean() > 0.98
    said = decoded(trained, source[:200]).where(real[:200], PAD)
    assert (said == wanted[:200]).all(dim=1).double().mean() > 0.95


def test_cross_attention_looks_at_the_letter_that_is_said(trained):
    """The weights, averaged over heads, are largest along the anti-diagonal."""
    source, target, wanted = strings(200, torch.Generator().manual_seed(1))
    cross = trained.core.decoder.layers[0].multihead_attn
    seen = []

    def look(module, arguments, options):
        options = options | {"need_weights": True}
        seen.append(scaledot_torch.MultiheadAttention.forward(module, *arguments, **options)[1])

    hook = cross.register_forward_pre_hook(look, with_kwargs=True)
    with torch.no_grad():
        trained(source, target)
    hook.remove()
    places = (source != PAD).sum(dim=1, keepdim=True) - 1 - torch.arange(LONGEST)
    looks = seen[0].argmax(dim=-1) == places  # (batch, len)
    assert looks[wanted != PAD].double().mean() > 0.8


@torch.no_grad()
def test_no_letter_knows_those_after_it(trained):
    source, target, _ = strings(50, torch.Generator().manual_seed(2))
    other = target.clone()
    other[:, 4:] = target[:, 4:].flip(0)
    assert not torch.equal(other, target)
    before, after = trained(source, target), trained(source, other)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.equal(before[:, 4:], after[:, 4:])


@pytest.mark.parametrize("training", [True, False])
def test_scores_and_gradients_are_those_of_pytorch(training):
    """With the attention of PyTorch in float64 as the truth, in float32 as the yardstick."""
    torch.manual_seed(0)
    theirs = Transformer()
    source, target, wanted = strings(32, torch.Generator().manual_seed(3))

    def results(model, dtype):
        model = copy.deepcopy(model).to(dtype).train(training)
        scores = model(source, target)
        nn.functional.cross_entropy(
            scores.flatten(0, 1), wanted.flatten(), ignore_index=PAD
        ).backward()
        return {"scores": scores} | {name: x.grad for name, x in model.named_parameters()}

    truth, yardstick = (results(theirs, dtype) for dtype in (torch.float64, torch.float32))
    found = results(with_this_attention(theirs), torch.float32)
    assert found.keys() == truth.keys()
    for name, exact in truth.items():
        assert exact.abs().max() > 0, name
        assert_close(found[name], exact, yardstick[name], eps=EPS["float32"], len_kv=LONGEST,
                     factor=2.0 if name == "scores" else 3.0)  # fmt: skip
