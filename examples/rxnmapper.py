"""Which atoms of a reaction's product come from where: the attention of RXNMapper's head.

python examples/rxnmapper.py ["REACTANTS>>PRODUCT", as SMILES]
"""

import sys
import timeit
from pathlib import Path

import torch

import scaledot.transformers
from scaledot import introspect

sys.path.extend(str(Path(__file__).parents[1] / x) for x in ("tools", "tests/models"))
import reaction_atoms as atoms
from bert_weights import batch, rxnmapper

REACTION = "CC(C)S.CN(C)C=O.Fc1cccnc1F.O=C([O-])[O-].[K+].[K+]>>CC(C)Sc1ncccc1F"


@torch.no_grad()
def main() -> None:
    """Print the reaction with numbered atoms, and times of PyTorch's attention and scaledot's."""
    tokens = atoms.tokens_of(sys.argv[1] if len(sys.argv) > 1 else REACTION)
    model, vocabulary = rxnmapper()
    inputs = batch([atoms.model_ids(tokens, vocabulary)])
    scaledot.transformers.register()
    model.set_attn_implementation("scaledot")  # the one line that changes
    with introspect.capture(model, keep=True) as seen:
        model(**inputs)
    # Of all weights of all heads only the rows of atoms in one head are computed.
    layer, places = seen.layers[atoms.LAYER], atoms.atom_places(tokens)
    (weights,) = layer.weights(rows=places, heads=[atoms.HEAD])
    print(atoms.numbered(tokens, atoms.atom_mapping(tokens, weights)))
    reactions = {name: x.repeat(32, 1) for name, x in inputs.items()}
    for name in ("sdpa", "scaledot"):
        model.set_attn_implementation(name)
        times = timeit.repeat(lambda: model(**reactions), number=1, repeat=6)
        print(f"{name:8}  {min(times):.2f} s for 32 reactions of {len(tokens) + 2} tokens")


if __name__ == "__main__":
    main()
