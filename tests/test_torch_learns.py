"""A small transformer with this attention learns to reverse strings, as it does with PyTorch's."""

import importlib
import math

import pytest

from compare import EPS, as_float64, assert_close

torch = pytest.importorskip("torch")
MultiheadAttention = importlib.import_module("scaledot.torch").MultiheadAttention
nn = torch.nn

ALPHABET = "abcdefghijkl"
PAD, START, FIRST = 0, 1, 2  # numbers of the padding, of the decoder's first input, of "a"
SHORTEST, LONGEST = 3, 8
WIDTH, HEADS, BATCH = 32, 4, 128
STEPS, RATE = 400, 4e-3


class Block(nn.Module):
    """Attention and two layers for each position, each added to its normalized input."""

    def __init__(self, attention, reads_source):
        super().__init__()
        self.attention = attention(WIDTH, HEADS, batch_first=True)
        self.source = attention(WIDTH, HEADS, batch_first=True) if reads_source else None
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.positionwise = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x, *, mask=None, padding=None, source=None, source_padding=None):
        y = self.norms[0](x)
        y, _ = self.attention(
            y, y, y, key_padding_mask=padding, attn_mask=mask, is_causal=mask is not None,
            need_weights=False,
        )  # fmt: skip
        x = x + y
        if self.source is not None:
            y, _ = self.source(
                self.norms[1](x), source, source, key_padding_mask=source_padding,
                need_weights=False,
            )  # fmt: skip
            x = x + y
        return x + self.positionwise(self.norms[2](x))


class Reverser(nn.Module):
    """Encoder and decoder of one block each."""

    def __init__(self, attention):
        super().__init__()
        self.letters = nn.Embedding(FIRST + len(ALPHABET), WIDTH)
        self.places = nn.Embedding(LONGEST + 1, WIDTH)
        self.encoder = Block(attention, reads_source=False)
        self.decoder = Block(attention, reads_source=True)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.scores = nn.Linear(WIDTH, FIRST + len(ALPHABET))

    def embedded(self, numbers):
        return self.letters(numbers) + self.places.weight[: numbers.shape[1]]

    def forward(self, source, target):
        """Scores of the next letter after each of `target`, (batch, len, letters)."""
        padding = source == PAD
        read = self.norms[0](self.encoder(self.embedded(source), padding=padding))
        length = target.shape[1]
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        x = self.decoder(
            self.embedded(target), mask=future, source=read, source_padding=padding
        )  # fmt: skip
        return self.scores(self.norms[1](x))


def strings(count, generator):
    """Random strings, the decoder's inputs and what it shall say: the string reversed."""
    lengths = torch.randint(SHORTEST, LONGEST + 1, (count, 1), generator=generator)
    places = torch.arange(LONGEST)
    letters = torch.randint(FIRST, FIRST + len(ALPHABET), (count, LONGEST), generator=generator)
    source = letters.where(places < lengths, PAD)
    wanted = source.gather(1, (lengths - 1 - places).clamp(min=0)).where(places < lengths, PAD)
    target = torch.cat([torch.full((count, 1), START), wanted[:, :-1]], dim=1)
    return source, target, wanted


def trained(model, steps, seed=0):
    """Train; return the loss of each step."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), RATE)
    rates = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 30) * math.cos(math.pi / 2 * step / STEPS)
    )
    losses = []
    for _ in range(steps):
        source, target, wanted = strings(BATCH, generator)
        loss = nn.functional.cross_entropy(
            model(source, target).flatten(0, 1), wanted.flatten(), ignore_index=PAD
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rates.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def decoded(model, source):
    """The letters that the model says one after the other, each the most likely."""
    said = torch.full((len(source), 1), START)
    for _ in range(LONGEST):
        said = torch.cat([said, model(source, said)[:, -1:].argmax(dim=-1)], dim=1)
    return said[:, 1:]


@pytest.fixture(autouse=True, scope="module")
def torch_on_one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.heavy  # the default tier compares the first steps with PyTorch's
def test_it_learns_to_reverse_strings():
    torch.manual_seed(0)
    model = Reverser(MultiheadAttention)
    trained(model, STEPS)
    source, target, wanted = strings(1000, torch.Generator().manual_seed(1))
    real = wanted != PAD
    with torch.no_grad():
        right = model(source, target).argmax(dim=-1) == wanted
    assert right[real].double().mean() > 0.99
    said = decoded(model, source[:200]).where(real[:200], PAD)
    assert (said == wanted[:200]).all(dim=1).double().mean() > 0.95


def test_the_loss_falls_as_with_the_modules_of_pytorch():
    """From the same parameters, step by step; PyTorch's in float64 is the truth."""
    torch.manual_seed(0)
    theirs = Reverser(nn.MultiheadAttention)
    start = theirs.state_dict()
    curves = []
    for attention, dtype in (
        (nn.MultiheadAttention, torch.float64), (nn.MultiheadAttention, torch.float32),
        (MultiheadAttention, torch.float32),
    ):  # fmt: skip
        model = Reverser(attention)
        model.load_state_dict(start)
        curves.append(torch.tensor(trained(model.to(dtype), 50), dtype=torch.float64))
    truth, yardstick, found = map(as_float64, curves)
    assert found[-1] < 0.9 * found[0]
    assert_close(found, truth, yardstick, eps=EPS["float32"], len_kv=50, factor=3.0)
