"""Complete an antibody by AntiBERTy, and the time of reading a batch of antibodies.

python examples/antiberty.py [SEQUENCE with _ for each unknown residue]
"""

import sys
import timeit
from pathlib import Path

import torch

import scaledot.transformers

sys.path.extend(str(Path(__file__).parents[1] / x) for x in ("tools", "tests/models"))
from antibodies import ADALIMUMAB_HEAVY, HUMAN_HEAVY, MOUSE_LIGHT, TRASTUZUMAB_LIGHT
from bert_weights import antiberty, batch, residue_ids

UNKNOWN = (
    "DVVMTQTPFSLPV__GDQASISCRSSQSLVHSNGNTY_HWYLQKPGQSPKLLIYKVSNRFSG"
    "VPDRFSG_GSGTDFTLKISRVEAEDLGVYFCSQSTHVPYTFGG__KLEIK"
)  # of AntiBERTy's documentation


@torch.no_grad()
def main() -> None:
    """Print the sequence, completed, and times with PyTorch's attention and scaledot's."""
    chain = sys.argv[1] if len(sys.argv) > 1 else UNKNOWN
    model, vocabulary = antiberty()
    scaledot.transformers.register()
    model.set_attn_implementation("scaledot")  # the one line that changes
    logits = model(**batch([residue_ids(chain, vocabulary)]))["predictions"][0, 1:-1]
    letters = {i: token for token, i in vocabulary.items() if len(token) == 1}
    best = [list(letters.values())[i] for i in logits[:, list(letters)].argmax(dim=-1)]
    print(chain)
    print("".join(new if old == "_" else old for old, new in zip(chain, best, strict=True)))
    chains = [HUMAN_HEAVY, MOUSE_LIGHT, ADALIMUMAB_HEAVY, TRASTUZUMAB_LIGHT] * 8
    inputs = batch([residue_ids(chain, vocabulary) for chain in chains])
    for name in ("sdpa", "scaledot"):
        model.set_attn_implementation(name)
        times = timeit.repeat(lambda: model(**inputs), number=1, repeat=6)
        print(f"{name:8}  {min(times):.2f} s for {len(chains)} antibodies")


if __name__ == "__main__":
    main()
