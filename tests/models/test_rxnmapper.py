"""RXNMapper, an ALBERT of chemical reactions: its product is the attention of one head.

The mapped reactions and confidences are those that the package's own tests expect, which run its
own code; its tolerance for confidences is NumPy's default.
"""

import re

import numpy as np
import pytest

import scaledot
from agreement import attending, fetched, in_float64
from bert_weights import batch, rxnmapper
from compare import EPS, assert_close
from reaction_atoms import (
    HEAD,
    LAYER,
    atom_mapping,
    atom_places,
    is_atom,
    model_ids,
    numbered,
    tokens_of,
)
from scaledot import introspect

pytestmark = pytest.mark.models

ROOM = {"eps": EPS["float32"], "len_kv": 256}  # the width
# Reaction: the same with its atoms numbered, and the product of the shares, None if not told.
MAPPED = {
    "C(C)O.BrC(C)>>CCOCC": (
        "[CH2:2]([CH3:1])[OH:3].Br[CH2:4][CH3:5]>>[CH3:1][CH2:2][O:3][CH2:4][CH3:5]",
        0.9754605679009868,
    ),
    "CCO.BrCFC>>CCOCFC": (
        "[CH3:1][CH2:2][OH:3].Br[CH2:4][F:5][CH3:6]>>[CH3:1][CH2:2][O:3][CH2:4][F:5][CH3:6]",
        0.9730222157275086,
    ),
    "[1*]C=C.O>>*CCO": (
        "[1*:1][CH:2]=[CH2:3].[OH2:4]>>[*:1][CH2:2][CH2:3][OH:4]",
        0.9988284870307568,
    ),
    "CC[O-]~[Na+].BrCC>>CCOCC": (
        "[CH3:5][CH2:4][O-:3]~[Na+].Br[CH2:2][CH3:1]>>[CH3:1][CH2:2][O:3][CH2:4][CH3:5]",
        None,
    ),
    "NCC[O-]~[Na+].BrCC>>NCCOCC": (
        "[NH2:1][CH2:2][CH2:3][O-:4]~[Na+].Br[CH2:5][CH3:6]>>"
        "[NH2:1][CH2:2][CH2:3][O:4][CH2:5][CH3:6]",
        None,
    ),
    "C(C)C[O-]~[Na+].BrCC>>C(C)COCC": (
        "[CH2:1]([CH3:2])[CH2:3][O-:4]~[Na+].Br[CH2:5][CH3:6]>>"
        "[CH2:1]([CH3:2])[CH2:3][O:4][CH2:5][CH3:6]",
        None,
    ),
    "C1COCCO1.CC(C)(C)OC(=O)CONC(=O)NCc1cccc2ccccc12.Cl>>O=C(O)CONC(=O)NCc1cccc2ccccc12": (
        "C1COCCO1.CC(C)(C)[O:3][C:2](=[O:1])[CH2:4][O:5][NH:6][C:7](=[O:8])[NH:9][CH2:10][c:11]1"
        "[cH:12][cH:13][cH:14][c:15]2[cH:16][cH:17][cH:18][cH:19][c:20]12.Cl>>[O:1]=[C:2]([OH:3])"
        "[CH2:4][O:5][NH:6][C:7](=[O:8])[NH:9][CH2:10][c:11]1[cH:12][cH:13][cH:14][c:15]2[cH:16]"
        "[cH:17][cH:18][cH:19][c:20]12",
        0.9704424331552834,
    ),
}


@pytest.fixture(scope="module")
def loaded():
    return fetched(rxnmapper)


@pytest.fixture(scope="module")
def rows(loaded):
    return [model_ids(tokens_of(reaction), loaded[1]) for reaction in MAPPED]


@pytest.fixture(scope="module")
def truth(loaded, rows):
    """Output of each reaction alone, in float64."""
    with attending(in_float64(loaded[0]), "eager") as model:
        return [model(**batch([ids]), output_attentions=True) for ids in rows]


@pytest.fixture(scope="module")
def dense(loaded, rows):
    """The same in float32 in one padded batch, with the model's own dense attention."""
    with attending(loaded[0], "eager") as model:
        return model(**batch(rows), output_attentions=True)


def numbers(smiles):
    """The numbers of a mapped reaction's atoms on each side, 0 for an atom without one."""
    found = []
    for side in smiles.split(">>"):
        atoms = [token for token in tokens_of(side) if is_atom(token)]
        marks = [re.search(r":(\d+)\]", token) for token in atoms]
        found.append([int(mark.group(1)) if mark else 0 for mark in marks])
    return found


def expected(smiles):
    """For each product atom the reactant atom of its number."""
    old, new = numbers(smiles)
    return [old.index(number) if number in old else -1 for number in new]


def test_hidden_states_of_a_padded_batch(loaded, rows, truth, dense):
    with attending(loaded[0], "scaledot") as model:
        ours = model(**batch(rows)).last_hidden_state
    for i, ids in enumerate(rows):
        exact = truth[i].last_hidden_state[0]
        found, own = (x[i, : len(ids)] for x in (ours, dense.last_hidden_state))
        assert_close(found, exact, own, **ROOM)


def check(reaction, weights, dense_weights, exact_weights):
    """Compare weights (atoms, len) and what they tell with the dense ones and the package's."""
    assert_close(weights, exact_weights, dense_weights, **ROOM)
    tokens = tokens_of(reaction)
    ours, theirs = (atom_mapping(tokens, x) for x in (weights, dense_weights))
    mapped, confidence = MAPPED[reaction]
    assert ours.reactant == theirs.reactant == expected(mapped)
    if confidence is not None:
        assert np.isclose(np.prod(ours.confidence), confidence)
    assert numbers(numbered(tokens, ours)) == numbers(mapped)


def test_mapping_by_output_attentions(loaded, rows, truth, dense):
    with attending(loaded[0], "scaledot") as model:
        weights = model(**batch(rows), output_attentions=True).attentions
    for i, (reaction, ids) in enumerate(zip(MAPPED, rows, strict=True)):
        places = atom_places(tokens_of(reaction))
        parts = (
            x[LAYER][j, HEAD].numpy()[places, : len(ids)]
            for x, j in ((weights, i), (dense.attentions, i), (truth[i].attentions, 0))
        )
        check(reaction, *parts)


def test_mapping_by_capture(loaded, rows, truth, dense):
    """Only the rows of atoms in one head are computed, of queries and keys that capture kept."""
    inputs = batch(rows)
    for i, (reaction, ids) in enumerate(zip(MAPPED, rows, strict=True)):
        with (
            attending(loaded[0], "scaledot") as model,
            introspect.capture(model, keep=True, entry=i) as seen,
        ):
            model(**inputs)
        assert len(seen.layers) == model.config.num_hidden_layers
        layer, places = seen.layers[LAYER], atom_places(tokens_of(reaction))
        query, key = layer.query[HEAD], layer.key[HEAD, : len(ids)]
        weights = scaledot.attention_weights(query, key, rows=places)
        exact = truth[i].attentions[LAYER][0, HEAD, places].numpy()
        own = dense.attentions[LAYER][i, HEAD, places, : len(ids)].numpy()
        check(reaction, weights, own, exact)
        # The layer knows the padding, which has no weight.
        (padded,) = layer.weights(rows=places, heads=[HEAD])
        assert_close(padded[:, : len(ids)], exact, own, **ROOM)
        assert not padded[:, len(ids) :].any()
