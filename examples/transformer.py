"""The Transformer of 2017 learns to write dates: "October 21, 2015" becomes "2015-10-21".

    python examples/transformer.py [--steps 300] [--out attention.png] ["21 October 2015" ...]

An encoder reads the letters of a date and a decoder writes the other form, one letter after the
other. Attention is in the three places of the paper: what is read looks at itself, what is written
at what was written before it, and at what is read. The weights of this last one are shown for one
date. Unlike the paper's, norms come before each part, which learns faster. Drawing them into a
file needs matplotlib.

References
----------
The Transformer: arXiv 1706.03762.
"""

import argparse
import calendar
import datetime
import math
import random

import torch
from torch import Tensor, nn

from scaledot.torch import MultiheadAttention

MONTHS = calendar.month_name[1:]
PAD = START = 0  # numbers of the padding, and of the decoder's first input
LETTERS = "\0" + "".join(sorted({*"".join(MONTHS), *"0123456789 ,-"}))
LONGEST, WRITTEN = len("September 30, 2015"), len("2015-09-30")
WIDTH, HEADS, BATCH, WARM_UP, RATE = 64, 4, 64, 30, 4e-3
SHADES = " .:-=+*#"


def attention() -> nn.Module:
    """Queries, keys and values in heads: the attention of this package."""
    return MultiheadAttention(WIDTH, HEADS, batch_first=True)


def positionwise() -> nn.Module:
    """What each position computes by itself."""
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))


class Encoder(nn.Module):
    """Self-attention to all that is read."""

    def __init__(self) -> None:
        super().__init__()
        self.itself, self.alone = attention(), positionwise()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        """Return x (batch, len_kv, WIDTH), read; `padding` (batch, len_kv) is not looked at."""
        y = self.norms[0](x)
        x = x + self.itself(y, y, y, key_padding_mask=padding, need_weights=False)[0]
        return self.norms[2](x + self.alone(self.norms[1](x)))


class Decoder(nn.Module):
    """Masked self-attention to what was written, and cross-attention to what is read."""

    def __init__(self) -> None:
        super().__init__()
        self.itself, self.across, self.alone = attention(), attention(), positionwise()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))

    def forward(
        self, x: Tensor, read: Tensor, padding: Tensor, *, need_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return x (batch, len_q, WIDTH), and the weights (batch, len_q, len_kv) of `read`."""
        y = self.norms[0](x)
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        x = x + self.itself(y, y, y, attn_mask=future, is_causal=True, need_weights=False)[0]
        found, weights = self.across(
            self.norms[1](x), read, read, key_padding_mask=padding, need_weights=need_weights
        )
        x = x + found
        return self.norms[3](x + self.alone(self.norms[2](x))), weights


class Transformer(nn.Module):
    """Embeddings with sinusoidal positions, an encoder, a decoder, and scores of letters."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS), WIDTH)
        self.encoder, self.decoder = Encoder(), Decoder()
        self.scores = nn.Linear(WIDTH, len(LETTERS))
        rates = 10000.0 ** (-torch.arange(0, WIDTH, 2) / WIDTH)
        angles = torch.arange(LONGEST)[:, None] * rates
        self.register_buffer("places", torch.stack([angles.sin(), angles.cos()], -1).flatten(1))

    def embedded(self, numbers: Tensor) -> Tensor:
        """Letters and where they stand, (batch, len, WIDTH)."""
        return self.letters(numbers) + self.places[: numbers.shape[1]]

    def forward(
        self, source: Tensor, target: Tensor, *, need_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Scores of the letter after each of `target`, and the cross-attention's weights."""
        padding = source == PAD
        read = self.encoder(self.embedded(source), padding)
        x, weights = self.decoder(
            self.embedded(target), read, padding, need_weights=need_weights
        )
        return self.scores(x), weights


def numbers(text: str, length: int) -> list[int]:
    """The number of each letter, padded to `length`."""
    return [LETTERS.index(letter) for letter in text.ljust(length, LETTERS[PAD])]


def dates(count: int, rng: random.Random, remainder: int) -> tuple[Tensor, Tensor]:
    """Random dates as they are read, (count, LONGEST), and as they shall be written.

    Every other day, so that those with one remainder never show up among those with the other.
    """
    first, last = (datetime.date(year, 1, 1).toordinal() // 2 for year in (1900, 2100))
    read, written = [], []
    for _ in range(count):
        day = datetime.date.fromordinal(2 * rng.randrange(first, last) + remainder)
        month = MONTHS[day.month - 1]
        forms = [f"{day.day} {month} {day.year}", f"{month} {day.day}, {day.year}"]
        read.append(numbers(rng.choice(forms), LONGEST))
        written.append(numbers(day.isoformat(), WRITTEN))
    return torch.tensor(read), torch.tensor(written)


def train(model: Transformer, steps: int, seed: int = 0) -> None:
    """Adam with a rate that rises first; the decoder is given the letters before each."""
    rng = random.Random(seed)
    optimizer = torch.optim.Adam(model.parameters(), RATE, betas=(0.9, 0.98))
    rates = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1, (step + 1) / WARM_UP) * math.cos(math.pi / 2 * step / steps),
    )
    for _ in range(steps):
        source, wanted = dates(BATCH, rng, 0)
        target = nn.functional.pad(wanted[:, :-1], (1, 0), value=START)
        scores, _ = model(source, target)
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rates.step()


@torch.no_grad()
def written(model: Transformer, source: Tensor) -> tuple[Tensor, Tensor]:
    """The letters that the model writes, each the most likely, and the weights of all of them."""
    target = torch.full((len(source), 1), START)
    for _ in range(WRITTEN):
        scores, weights = model(source, target, need_weights=True)
        target = torch.cat([target, scores[:, -1:].argmax(dim=-1)], dim=1)
    return target[:, 1:], weights


def text(row: Tensor) -> str:
    """Letters of one date, padding left out."""
    return "".join(LETTERS[number] for number in row.tolist() if number != PAD)


def main() -> None:
    """Train, tell how many unseen dates are right, and show where the decoder looks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dates", nargs="*", default=["October 21, 2015"])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", help="file for the picture of the first one's weights")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # threads would wait for one another: the arrays are small
    torch.manual_seed(0)
    model = Transformer()
    train(model, arguments.steps)
    source, wanted = dates(500, random.Random(1), 1)
    right = (written(model, source)[0] == wanted).all(dim=1).double().mean()
    print(f"{right:.1%} of 500 dates that training has not seen are right")
    source = torch.tensor([numbers(date, LONGEST) for date in arguments.dates])
    for date, row, weights in zip(arguments.dates, *written(model, source), strict=True):
        print(f"\n{date} is {text(row)}\n\n  {date}")
        for letter, looks in zip(text(row), weights[:, : len(date)], strict=True):
            print(letter, "".join(SHADES[min(7, int(8 * weight))] for weight in looks))
    if arguments.out:
        from scaledot import plot

        date, (row, weights) = arguments.dates[0], (x[0] for x in written(model, source))
        axes = plot.weights(weights[:, : len(date)].numpy(), list(text(row)), list(date))
        plot.save(axes, arguments.out)


if __name__ == "__main__":
    main()
