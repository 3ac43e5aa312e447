"""Which atom of a reaction's product comes from which of its reactants, told by attention.

Reactions are SMILES, ``reactants>>product``. The rule is RXNMapper's (doi 10.1126/sciadv.abe4166):
the weights of one head, both ways between product and reactant atoms of one element, are taken
greedily, the largest share of a product atom first; neighbours of atoms that are matched then
count 90 times as much, and no atom is matched twice.
"""

import re
from typing import NamedTuple

import numpy as np

# RXNMapper's head: of layers and heads, counted from 0.
LAYER, HEAD = 10, 5
NEIGHBOURS = 90.0

_TOKEN = re.compile(r"\[[^\]]+\]|Br|Cl|>>|%\d\d|.")
_ELEMENT = re.compile(r"\[?\d*([A-Za-z][a-z]?|\*)")


class Mapping(NamedTuple):
    """For each product atom the reactant atom (-1: none), and the share that it was taken for."""

    reactant: list[int]
    confidence: list[float]


def tokens_of(smiles):
    """Cut a reaction into atoms, bonds, brackets and ring marks, as the model does."""
    return _TOKEN.findall(smiles)


def model_ids(tokens, vocabulary):
    """Return the ids of the tokens with the model's marks around them."""
    unknown = vocabulary["[UNK]"]
    return [vocabulary.get(token, unknown) for token in ("[CLS]", *tokens, "[SEP]")]


def is_atom(token):
    """Whether a token is an atom, of any element or none (``*``)."""
    return token[0].isalpha() or token[0] in "[*"


def element(token):
    """Return an atom's element, without its isotope, hydrogens and charge."""
    return _ELEMENT.match(token).group(1).capitalize()


def neighbours(tokens):
    """Return which atoms are bound to each other, boolean (atoms, atoms)."""
    bonds, branches, rings = [], [], {}
    last, number = None, -1
    for token in tokens:
        if is_atom(token):
            number += 1
            if last is not None:
                bonds.append((last, number))
            last = number
        elif token == "(":
            branches.append(last)
        elif token == ")":
            last = branches.pop()
        elif token in (".", ">>"):
            last = None
        elif token[-1].isdigit():  # an open ring's other end, or one end
            if token in rings:
                bonds.append((rings.pop(token), last))
            else:
                rings[token] = last
    bound = np.zeros((number + 1, number + 1), dtype=bool)
    for a, b in bonds:
        bound[a, b] = bound[b, a] = True
    return bound


def atom_places(tokens):
    """Return the places of atoms in the model's sequence, which begins with a mark."""
    return np.array([i + 1 for i, token in enumerate(tokens) if is_atom(token)])


def atom_mapping(tokens, weights):
    """Return the mapping that the head's weights tell.

    weights are those of the atoms' queries, (atoms, len): len counts the marks at both ends.
    """
    places, arrow = atom_places(tokens), tokens.index(">>") + 1
    elements = np.array([element(token) for token in tokens if is_atom(token)])
    old, new = places < arrow, places > arrow
    between = np.asarray(weights, dtype=np.float64)[:, places]  # (atoms, atoms)
    scores = between[np.ix_(new, old)] + between[np.ix_(old, new)].T
    scores[elements[new][:, None] != elements[old]] = 0
    bound = neighbours(tokens)
    bound_old, bound_new = bound[np.ix_(old, old)], bound[np.ix_(new, new)]
    result = Mapping([-1] * len(scores), [1.0] * len(scores))
    for _ in range(len(scores)):
        sums = scores.sum(axis=1, keepdims=True)
        shares = np.divide(scores, sums, out=np.zeros_like(scores), where=sums != 0)
        product, reactant = np.unravel_index(shares.argmax(), shares.shape)
        if not shares[product, reactant]:
            break
        result.reactant[product] = int(reactant)
        result.confidence[product] = float(shares[product, reactant])
        scores[np.ix_(bound_new[product], bound_old[reactant])] *= NEIGHBOURS
        scores[product], scores[:, reactant] = 0, 0
    return result


def numbered(tokens, mapping):
    """Write a reaction with matched atoms numbered, ``[C:1]``, without their hydrogens."""
    marks = {old: new for new, old in enumerate(mapping.reactant, 1) if old >= 0}
    written, atom, product = [], 0, False
    for token in tokens:
        if token == ">>":
            atom, product = 0, True
        if is_atom(token):
            number = atom + 1 if product else marks.get(atom)
            matched = number and not (product and mapping.reactant[atom] < 0)
            written.append(f"[{token.strip('[]')}:{number}]" if matched else token)
            atom += 1
        else:
            written.append(token)
    return "".join(written)
