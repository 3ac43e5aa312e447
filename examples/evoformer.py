"""The attention of AlphaFold 2's Evoformer: gates, a bias of pairs, and masks, in linear memory.

    python examples/evoformer.py [--length 128]

Row, column and triangle attention are one module, `GatedAttention`, over different axes. The scores
of triangle attention would be an array with three lengths, (residues, heads, residues, residues);
here the bias of pairs is broadcast over the first of them, and so is its gradient.
`scaledot.transformers.esmfold_attention` computes the attention of transformers' ESMFold in the
same way, without a change of the model.

References
----------
AlphaFold 2, doi 10.1038/s41586-021-03819-2, supplement 1.6; ESMFold, doi 10.1126/science.ade2574.
"""

import argparse

import torch
from torch import Tensor, nn
from transformers.models.esm.modeling_esmfold import EsmFoldTriangleAttention

import scaledot as sd
from scaledot.transformers import esmfold_attention


class GatedAttention(nn.Module):
    """Multi-head self-attention along the axis before the last, gated, with a bias of pairs.

    ``W_o (sigmoid(W_g x) ∘ softmax(Q Kᵀ / √d + bias) V)``
    """

    def __init__(self, width: int, num_heads: int, d: int, pair_width: int | None = None) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * num_heads * d, bias=False)
        self.gate = nn.Linear(width, num_heads * d)
        self.out = nn.Linear(num_heads * d, width)
        self.pair_norm = self.pair_bias = None
        if pair_width is not None:
            self.pair_norm = nn.LayerNorm(pair_width)
            self.pair_bias = nn.Linear(pair_width, num_heads, bias=False)

    def forward(self, x: Tensor, mask: Tensor, pair: Tensor | None = None) -> Tensor:
        """Attend in x (..., rows, len, width) along len.

        `mask` (..., rows, len) is True at what may be seen; `pair` (..., len, len, pair_width)
        gives each head a bias that all rows share.
        """
        x = self.norm(x)
        query, key, value = (
            y.unflatten(-1, (self.num_heads, -1)).transpose(-2, -3)  # (..., rows, heads, len, d)
            for y in self.qkv(x).chunk(3, dim=-1)
        )
        bias = None
        if pair is not None:
            bias = self.pair_bias(self.pair_norm(pair)).movedim(-1, -3)  # (..., heads, len, len)
            bias = bias[..., None, :, :, :]  # (..., 1, heads, len, len): broadcast over rows
        found = sd.attention(query, key, value, mask=mask[..., None, None, :], bias=bias)
        found = found.transpose(-2, -3).flatten(-2)  # (..., rows, len, heads * d)
        return self.out(torch.sigmoid(self.gate(x)) * found)


class Evoformer(nn.Module):
    """The four attentions of a block, each added to its input; all else of a block is left out."""

    def __init__(self, width: int = 32, pair_width: int = 16, num_heads: int = 4, d: int = 8):
        super().__init__()
        self.row = GatedAttention(width, num_heads, d, pair_width)
        self.column = GatedAttention(width, num_heads, d)
        self.starting, self.ending = (
            GatedAttention(pair_width, num_heads, d, pair_width) for _ in range(2)
        )

    def forward(
        self, alignment: Tensor, pair: Tensor, mask: Tensor, pair_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Update alignment (..., sequences, residues, width) and pair (..., residues, residues, ·).

        Masks have the same axes without the last.
        """
        alignment = alignment + self.row(alignment, mask, pair)
        columns = alignment.transpose(-2, -3)
        alignment = alignment + self.column(columns, mask.mT).transpose(-2, -3)
        pair = pair + self.starting(pair, pair_mask, pair)
        turned = pair.transpose(-2, -3)
        pair = pair + self.ending(turned, pair_mask.mT, turned).transpose(-2, -3)
        return alignment, pair


def main() -> None:
    """Run the attentions of one block on random data and say what the largest call takes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=128)
    length = parser.parse_args().length
    torch.manual_seed(0)
    alignment, pair = torch.randn(1, 16, length, 32), torch.randn(1, length, length, 16)
    masks = (torch.ones(x.shape[:-1], dtype=torch.bool) for x in (alignment, pair))
    alignment, pair = Evoformer()(alignment, pair, *masks)
    (alignment.square().mean() + pair.square().mean()).backward()
    x = torch.empty(1, length, 4, length, 8)
    plan = sd.explain(x, x, x, bias=torch.empty(1, 1, 4, length, length))
    print("triangle attention of", length, "residues, 4 heads of width 8")
    print(plan)
    print(f"all scores         {4 * length**3 * x.element_size() / 2**20:,.2f} MiB, not held")
    module = EsmFoldTriangleAttention(c_in=16, c_hidden=8, no_heads=4)
    nn.init.normal_(module.mha.linear_o.weight)  # it would be 0 before training
    with torch.no_grad():
        theirs = module(pair)
        with esmfold_attention():
            difference = (module(pair) - theirs).abs().max() / theirs.abs().max()
    print(f"ESMFold's own      differs by {difference:.0e} of the largest number")


if __name__ == "__main__":
    main()
