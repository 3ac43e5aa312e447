"""Several narrow heads beside one wide head on the same numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from scaledot import plot
from scaledot._attention import attention_weights
from scaledot._explain import explain
from scaledot.lessons import _sentence
from scaledot.lessons._page import Table

_LAYER, _WORD = 3, "it"


@dataclass(frozen=True, eq=False)
class Heads:
    """Result of `heads`: shapes, operations, and the weights of one word."""

    title: ClassVar[str] = "Heads: the same work, several opinions"
    text: ClassVar[str] = (
        "One head as wide as the model mixes all features into one score and gives each word one "
        "distribution. Cut into narrow heads, the same queries and keys cost the same number of "
        "operations in the two products, but each head has a softmax of its own and may look "
        "elsewhere. Here: one layer of a real model, its heads as they are and joined into one."
    )
    tokens: tuple[str, ...]
    word: str
    narrow_shape: tuple[int, ...]
    wide_shape: tuple[int, ...]
    narrow_flops: int
    wide_flops: int
    narrow_weights: npt.NDArray[np.float32]
    wide_weights: npt.NDArray[np.float32]

    def tables(self) -> tuple[Table, ...]:
        """Return shapes and operations, and what the word looks at in each head."""
        num_heads, length, _ = self.narrow_shape
        sizes = (
            ("one wide head", str(self.wide_shape), f"(1, {length}, {length})",
             f"{self.wide_flops:,}"),
            (f"{num_heads} heads", str(self.narrow_shape), f"({num_heads}, {length}, {length})",
             f"{self.narrow_flops:,}"),
        )
        named = [("one wide head", self.wide_weights[0])]
        named += [(f"head {h}", row) for h, row in enumerate(self.narrow_weights)]
        rows = tuple(
            (name, self.tokens[int(row.argmax())], f"{row.max():.3f}") for name, row in named
        )
        return (
            Table(("", "query", "weights", "operations"), sizes),
            Table(("", f"“{self.word}” looks most at", "weight"), rows),
        )

    def plot(self, ax: plot.Axes | None = None) -> plot.Axes:
        """Draw the word's weights, one row for the wide head and one for each narrow one."""
        rows = np.concatenate([self.wide_weights, self.narrow_weights])
        labels = ["one wide head", *(f"head {h}" for h in range(len(self.narrow_weights)))]
        drawing = plot.weights(
            rows, labels, self.tokens, title=f"Where “{self.word}” looks, layer {_LAYER}", ax=ax
        )
        drawing.set_ylabel("")
        return drawing


def heads() -> Heads:
    """Compare the heads of one layer with one head as wide as all.

    Returns
    -------
    Heads
        For layer 3 of the bundled BERT: 12 heads of width 32 and one of width 384 on the same
        queries and keys, their operations, and where the word "it" looks.

    Notes
    -----
    Each head keeps its own scale, 1/√32 and 1/√384. Operations are those of `scaledot.explain`.

    References
    ----------
    arXiv 1706.03762, section 3.2.2.
    """
    data = _sentence.load()
    narrow = [x[_LAYER] for x in (data.query, data.key, data.value)]  # each (num_heads, len, d_k)
    num_heads, length, d_k = narrow[0].shape
    # Heads side by side: (num_heads, len, d_k) -> (1, len, num_heads * d_k)
    wide = [x.swapaxes(0, 1).reshape(1, length, num_heads * d_k) for x in narrow]
    row = data.tokens.index(_WORD)
    return Heads(
        tokens=data.tokens,
        word=_WORD,
        narrow_shape=narrow[0].shape,
        wide_shape=wide[0].shape,
        narrow_flops=explain(*narrow).flops,
        wide_flops=explain(*wide).flops,
        narrow_weights=attention_weights(narrow[0], narrow[1], rows=[row])[:, 0],
        wide_weights=attention_weights(wide[0], wide[1], rows=[row])[:, 0],
    )
