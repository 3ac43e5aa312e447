"""AntiBERTy, a BERT of antibodies: masked residues, species and chain of padded batches."""

import pytest

from agreement import attending, fetched, in_float64
from antibodies import ADALIMUMAB_HEAVY, HUMAN_HEAVY, MOUSE_LIGHT, TRASTUZUMAB_LIGHT
from bert_weights import antiberty, batch, residue_ids
from compare import EPS, assert_close

pytestmark = pytest.mark.models

ROOM = {"eps": EPS["float32"], "len_kv": 512}  # the width
CHAINS = [HUMAN_HEAVY, MOUSE_LIGHT, ADALIMUMAB_HEAVY, TRASTUZUMAB_LIGHT]
# Residues that antibodies almost always have: both cysteines of the disulphide bridge, the
# tryptophan between them, and the tryptophan or phenylalanine at which the last strand begins.
MASKED = [
    (HUMAN_HEAVY, (21, 35, 95, 112)),
    (MOUSE_LIGHT, (22, 39, 92, 102)),
    (ADALIMUMAB_HEAVY, (21, 35, 95, 110)),
    (TRASTUZUMAB_LIGHT, (22, 34, 87, 97)),
]


def with_masks(chain, places):
    """The chain with ``_`` at the places."""
    return "".join("_" if i in places else residue for i, residue in enumerate(chain))


@pytest.fixture(scope="module")
def loaded():
    return fetched(antiberty)


@pytest.fixture(scope="module")
def rows(loaded):
    chains = [with_masks(*one) for one in MASKED]
    return [residue_ids(chain, loaded[1]) for chain in (*CHAINS, *chains)]


@pytest.fixture(scope="module")
def truth(loaded, rows):
    """Output of each chain alone, in float64."""
    with attending(in_float64(loaded[0]), "eager") as model:
        return [model(**batch([ids])) for ids in rows]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("own", ["eager", "sdpa"])
def test_logits_of_padded_batches(loaded, rows, truth, side, own):
    inputs = batch(rows, side=side)
    logits = {}
    for name in ("scaledot", own):
        with attending(loaded[0], name) as model:
            logits[name] = model(**inputs)
    for i, exact in enumerate(truth):
        seen = inputs["attention_mask"][i] == 1
        ours, theirs = (logits[name]["predictions"][i][seen] for name in ("scaledot", own))
        assert_close(ours, exact["predictions"][0], theirs, **ROOM)
        if side == "right":  # the pooled token is the first, which is padding on the left
            for head in ("species", "chain", "graft"):
                ours, theirs = (logits[name][head][i] for name in ("scaledot", own))
                assert_close(ours, exact[head][0], theirs, **ROOM)


def test_masked_residues_are_restored(loaded, rows):
    residues = {i: token for token, i in loaded[1].items() if len(token) == 1}
    with attending(loaded[0], "scaledot") as model:
        logits = model(**batch(rows[len(CHAINS) :]))["predictions"][..., list(residues)]
    best = [list(residues.values())[i] for i in logits.argmax(-1).flatten()]
    for i, (chain, places) in enumerate(MASKED):
        # One mark lies before the chain.
        found = [best[i * logits.shape[1] + place + 1] for place in places]
        assert found == [chain[place] for place in places]


def test_species_and_chains(loaded, rows, truth):
    with attending(loaded[0], "scaledot") as model:
        logits = model(**batch(rows[: len(CHAINS)]))
    for head in ("species", "chain"):
        exact = [int(output[head].argmax()) for output in truth[: len(CHAINS)]]
        assert logits[head].argmax(-1).tolist() == exact
    # What the documentation's examples are known to be.
    species = ("Camel", "Human", "Mouse", "Rabbit", "Rat", "Rhesus")
    assert [species[i] for i in logits["species"][:2].argmax(-1)] == ["Human", "Mouse"]
    chains = [("Heavy", "Light")[i] for i in logits["chain"].argmax(-1)]
    assert chains == ["Heavy", "Light", "Heavy", "Light"]
