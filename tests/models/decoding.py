"""What the tests of decoders share: logits beside float64, greedy text beside that of eager."""

from typing import NamedTuple

import torch

from agreement import in_float64, switched
from compare import EPS, assert_close

OWN = ("eager", "sdpa")  # transformers' own implementations
TIE = 1e-4  # two logits this close may change places by rounding alone


class Text(NamedTuple):
    """Tokens (batch, len) of a greedy run and by how much each logit led the second best."""

    tokens: torch.Tensor
    lead: torch.Tensor


def padded(sequences, side):
    """Return token ids (batch, len) and their 0/1 mask, filled with 0 on one side."""
    length = max(map(len, sequences))
    ids, mask = torch.zeros(2, len(sequences), length, dtype=torch.long)
    for row, sequence in enumerate(sequences):
        start = length - len(sequence) if side == "left" else 0
        ids[row, start : start + len(sequence)] = torch.tensor(sequence)
        mask[row, start : start + len(sequence)] = 1
    return ids, mask


def logits(model, attention, ids, mask=None):
    """Return the logits (batch, len, vocabulary) of one forward pass."""
    positions = None if mask is None else (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        return switched(model, attention)(
            ids, attention_mask=mask, position_ids=positions, use_cache=False
        ).logits


def truths(model, sequences):
    """Return the float64 logits of each sequence alone, by textbook attention."""
    wide = in_float64(model)
    return [logits(wide, "eager", torch.tensor([sequence]))[0] for sequence in sequences]


def assert_logits(model, sequences, truth, side):
    """Fail unless scaledot's logits are as near to float64's as those of the model's own attention.

    The truth knows no padding: in a padded batch each sequence must come out as if alone.
    """
    ids, mask = padded(sequences, side)
    got = logits(model, "scaledot", ids, mask)
    own = [logits(model, name, ids, mask) for name in OWN if name != "sdpa" or model._supports_sdpa]
    for row, expected in enumerate(truth):
        real = mask[row].bool()
        farthest = max(own, key=lambda x: (x[row, real] - expected).abs().max())
        assert_close(
            got[row, real], expected, farthest[row, real],
            eps=EPS["float32"], len_kv=len(expected),
        )  # fmt: skip


def greedy(model, attention, ids, new_tokens, *, mask=None, **options):
    """Return the `new_tokens` tokens that follow `ids`, the most likely one each time."""
    mask = torch.ones_like(ids) if mask is None else mask
    run = switched(model, attention).generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        output_scores=True,
        return_dict_in_generate=True,
        **options,
    )
    best, second = torch.stack(run.scores, dim=1).topk(2).values.unbind(-1)
    return Text(run.sequences[:, ids.shape[1] :], best - second)


def assert_same_text(got, expected):
    """Fail unless two greedy runs have the same tokens, up to one that was a tie."""
    assert got.tokens.shape == expected.tokens.shape
    for row, differs in enumerate(got.tokens != expected.tokens):
        if differs.any():
            first = int(differs.int().argmax())
            assert expected.lead[row, first] < TIE, (
                f"sequence {row}: token {first} differs, {got.tokens[row, first]} instead of "
                f"{expected.tokens[row, first]}, which led by {expected.lead[row, first]:.3g}"
            )
