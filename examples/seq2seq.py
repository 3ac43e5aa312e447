"""Bahdanau's and Luong's attention between two LSTMs that learn to write words backwards.

    python examples/seq2seq.py [--steps 400] [--out alignment.png]

A bidirectional LSTM reads a word and another LSTM writes. All that the writer learns of the word
comes through attention, and what it says follows from what it finds alone: the letters themselves
are the values (the papers take the reader's states, which know the letters around, too). So the
weights say where each letter was taken from. Drawing them needs matplotlib.

References
----------
Additive attention: arXiv 1409.0473. Multiplicative attention: arXiv 1508.04025.
"""

import argparse
import math

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import scaledot as sd

ALPHABET = "abcdefghijkl"
PAD, START, FIRST = 0, 1, 2  # numbers of the padding, of the writer's first input, of "a"
SHORTEST, LONGEST = 3, 8
WIDTH, BATCH, RATE = 32, 64, 1e-2


class Seq2Seq(nn.Module):
    """Reader, and the frame of a writer: its subclasses attend in their own ways."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(FIRST + len(ALPHABET), WIDTH)
        self.reader = nn.LSTM(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)
        self.scores = nn.Linear(WIDTH, FIRST + len(ALPHABET))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """Attention of states (batch, len_q, WIDTH) to annotations (batch, len_kv, WIDTH)."""
        raise NotImplementedError

    def write(
        self, target: Tensor, key: Tensor, value: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Queries after each letter of `target` and what they find, both (batch, len_q, WIDTH)."""
        raise NotImplementedError

    def read(self, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values (batch, len_kv, WIDTH), and the mask of letters (batch, 1, len_kv)."""
        real = source != PAD
        letters = self.letters(source)
        packed = pack_padded_sequence(
            letters, real.sum(dim=1), batch_first=True, enforce_sorted=False
        )
        annotations, _ = self.reader(packed)
        annotations, _ = pad_packed_sequence(
            annotations, batch_first=True, total_length=source.shape[1]
        )
        return annotations, letters, real[:, None, :]

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Scores of the letter that follows each of `target`, (batch, len_q, letters)."""
        _, found = self.write(target, *self.read(source))
        return self.scores(found)

    def alignment(self, source: Tensor, target: Tensor) -> Tensor:
        """Attention weights (batch, len_q, len_kv): what attention to unit vectors returns."""
        key, value, mask = self.read(source)
        query, _ = self.write(target, key, value, mask)
        units = torch.eye(source.shape[1], dtype=key.dtype)
        return self.attend(query, key, units, mask)


class Bahdanau(Seq2Seq):
    """The state before a letter asks, and what it finds goes into the step: vᵀ tanh(W q + U k)."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(2 * WIDTH, WIDTH)
        self.w_q, self.w_k = (
            nn.Parameter(torch.randn(WIDTH, WIDTH) / math.sqrt(WIDTH)) for _ in range(2)
        )
        self.v = nn.Parameter(torch.randn(WIDTH))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """Additive attention."""
        return sd.additive_attention(query, key, value, self.w_q, self.w_k, self.v, mask=mask)

    def write(
        self, target: Tensor, key: Tensor, value: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One step after the other: each needs what the state before it found."""
        state = memory = key.new_zeros(len(key), WIDTH)
        queries, finds = [], []
        for letter in self.letters(target).unbind(dim=1):
            queries.append(state)
            finds.append(self.attend(state[:, None], key, value, mask)[:, 0])
            state, memory = self.cell(torch.cat([letter, finds[-1]], dim=-1), (state, memory))
        return torch.stack(queries, dim=1), torch.stack(finds, dim=1)


class Luong(Seq2Seq):
    """The state after a letter asks: qᵀ W k. No step waits for it, so all ask in one call."""

    def __init__(self) -> None:
        super().__init__()
        self.writer = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH) / math.sqrt(WIDTH))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """Multiplicative attention with a learned matrix."""
        return sd.multiplicative_attention(query, key, value, self.w, form="general", mask=mask)

    def write(
        self, target: Tensor, key: Tensor, value: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """All states by one LSTM, then one attention."""
        states, _ = self.writer(self.letters(target))
        return states, self.attend(states, key, value, mask)


def words(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Random words, what the writer is given, and what it shall say: the word backwards.

    All (count, LONGEST), padded at the end; the writer is given each right letter after it spoke.
    """
    lengths = torch.randint(SHORTEST, LONGEST + 1, (count, 1), generator=generator)
    places = torch.arange(LONGEST)
    letters = torch.randint(FIRST, FIRST + len(ALPHABET), (count, LONGEST), generator=generator)
    source = letters.where(places < lengths, PAD)
    wanted = source.gather(1, (lengths - 1 - places).clamp(min=0)).where(places < lengths, PAD)
    target = torch.cat([torch.full((count, 1), START), wanted[:, :-1]], dim=1)
    return source, target, wanted


def train(model: Seq2Seq, steps: int, seed: int = 0) -> None:
    """Adam on fresh words, with a rate that falls to 0."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), RATE)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        source, target, wanted = words(BATCH, generator)
        loss = nn.functional.cross_entropy(
            model(source, target).flatten(0, 1), wanted.flatten(), ignore_index=PAD
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rates.step()


@torch.no_grad()
def spoken(model: Seq2Seq, source: Tensor) -> Tensor:
    """The letters that the model says one after the other, each the most likely one."""
    said = torch.full((len(source), 1), START)
    for _ in range(source.shape[1]):
        said = torch.cat([said, model(source, said)[:, -1:].argmax(dim=-1)], dim=1)
    return said[:, 1:]


def text(numbers: Tensor) -> str:
    """Letters of one word (len,), padding left out."""
    return "".join(ALPHABET[n - FIRST] for n in numbers.tolist() if n >= FIRST)


def main() -> None:
    """Train both, print how they do, and draw the alignment of one word for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", help="file for the picture, such as alignment.png")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # threads would wait for one another: the arrays are small
    source, target, wanted = words(500, torch.Generator().manual_seed(1))
    longest = int((source != PAD).sum(dim=1).argmax())
    drawn = []
    for kind in (Bahdanau, Luong):
        torch.manual_seed(0)
        model = kind()
        train(model, arguments.steps)
        said = spoken(model, source).where(wanted != PAD, PAD)
        right = (said == wanted).all(dim=1).double().mean()
        print(f"{kind.__name__}: {right:.1%} of new words right, as in", end=" ")
        print(f"{text(source[longest])} → {text(said[longest])}")
        with torch.no_grad():
            drawn.append((kind.__name__, model.alignment(source, target)[longest].numpy()))
    if arguments.out:
        draw(drawn, text(source[longest]), text(wanted[longest]), arguments.out)


def draw(drawn: list, source: str, wanted: str, file: str) -> None:
    """Both alignments side by side: rows = letters said, columns = letters read."""
    import matplotlib.pyplot as plt

    from scaledot import plot

    figure, places = plt.subplots(1, len(drawn), figsize=(5 * len(drawn), 4), layout="constrained")
    for place, (name, weights) in zip(places, drawn, strict=True):
        plot.weights(weights, list(wanted), list(source), title=name, ax=place)
    figure.savefig(file)


if __name__ == "__main__":
    main()
