"""Which sentences mean the same, by all-MiniLM-L6-v2, and the time of reading long texts.

python examples/bert.py ["A sentence." "Another one." ...]
"""

import sys
import timeit
from pathlib import Path

import torch

import scaledot.transformers

sys.path.extend(str(Path(__file__).parents[1] / x) for x in ("tools", "tests/models"))
from bert_weights import batch, minilm

SENTENCES = [
    "The cat sits outside.", "A musician performs before many people.", "The movie is awesome.",
    "He plays the guitar on a stage.", "I liked that film a lot.", "A feline is in the garden.",
]  # fmt: skip


@torch.no_grad()
def main() -> None:
    """Print the nearest of each sentence, and times with PyTorch's attention and scaledot's."""
    sentences = sys.argv[1:] or SENTENCES
    model, tokenizer = minilm()
    scaledot.transformers.register()
    model.set_attn_implementation("scaledot")  # the one line that changes
    inputs = batch([tokenizer.encode(sentence).ids for sentence in sentences])
    words = inputs["attention_mask"][..., None]
    means = (model(**inputs).last_hidden_state * words).sum(1) / words.sum(1)
    unit = torch.nn.functional.normalize(means)
    similarity, nearest = (unit @ unit.T).fill_diagonal_(-1).max(dim=1)
    for sentence, value, i in zip(sentences, similarity, nearest, strict=True):
        print(f"{value:.2f}  {sentence}  ~  {sentences[i]}")
    texts = batch([(tokenizer.encode(" ".join(sentences)).ids * 20)[:512]] * 8)
    for name in ("sdpa", "scaledot"):
        model.set_attn_implementation(name)
        times = timeit.repeat(lambda: model(**texts), number=1, repeat=6)
        print(f"{name:8}  {min(times):.2f} s for 8 texts of {texts['input_ids'].shape[1]} tokens")


if __name__ == "__main__":
    main()
