"""ANARCII, an encoder-decoder with cross-attention and a cache: its own code, its own numbering.

Truth is the package with PyTorch's attention in float64; what PyTorch's attention in float32 is
off by is the yardstick.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from anarcii_numbering import UNAVAILABLE, WAYS
from antibodies import (
    A6_ALPHA,
    A6_BETA,
    ADALIMUMAB_HEAVY,
    CONSTANT,
    MOUSE_LIGHT,
    TRASTUZUMAB_HEAVY,
    TRASTUZUMAB_LIGHT,
)
from compare import EPS, assert_close

pytestmark = pytest.mark.models

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SEQUENCES = {
    "antibody": {
        "trastuzumab heavy": TRASTUZUMAB_HEAVY,
        "trastuzumab light": TRASTUZUMAB_LIGHT,
        "adalimumab heavy": ADALIMUMAB_HEAVY,
        "mouse light": MOUSE_LIGHT,
        # Longer than the model reads: a window of it is chosen first.
        "with a constant domain": TRASTUZUMAB_HEAVY + CONSTANT,
    },
    "tcr": {"alpha": A6_ALPHA, "beta": A6_BETA},
}
CHAINS = {
    "trastuzumab heavy": "H", "trastuzumab light": "K", "adalimumab heavy": "H",
    "mouse light": "K", "with a constant domain": "H", "alpha": "A", "beta": "B",
}  # fmt: skip
WIDTH = 128


@pytest.fixture(scope="module")
def numbered():
    """``{way: {name: result}}``, of a process of its own."""
    paths = [str(ROOT / "src"), str(ROOT / "tools"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-W", "error", str(HERE / "anarcii_numbering.py")],
        input=json.dumps(SEQUENCES), env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode and done.stderr.startswith(UNAVAILABLE):
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", CHAINS)
def test_numbering_is_identical(numbered, name):
    truth, dense, ours = (numbered[way][name] for way in WAYS)
    for key in ("numbering", "chain_type", "query_start", "query_end", "error", "scheme"):
        assert ours[key] == dense[key] == truth[key]
    scores = (np.array(result["logits"]) for result in (ours, truth, dense))
    assert_close(*scores, eps=EPS["float32"], len_kv=WIDTH)  # sums over the width are behind it


@pytest.mark.parametrize(("name", "chain"), CHAINS.items())
def test_numbering_is_right(numbered, name, chain):
    result = numbered["scaledot"][name]
    assert result["chain_type"] == chain
    places = {(number, letter): residue for (number, letter), residue in result["numbering"]}
    # IMGT's fixed places: the cysteines of the bridge and the tryptophan between them.
    assert [places[number, " "] for number in (23, 41, 104)] == ["C", "W", "C"]
    sequence = (SEQUENCES["antibody"] | SEQUENCES["tcr"])[name]
    start, end = result["query_start"], result["query_end"]
    residues = "".join(residue for _, residue in result["numbering"])
    assert residues.replace("-", "") == sequence[start : end + 1]


def test_attention_is_scaledots(numbered):
    """Other sums than PyTorch's: not to the bit the same, or it was not replaced."""
    assert any(
        numbered["scaledot"][name]["logits"] != numbered["pytorch"][name]["logits"]
        for name in CHAINS
    )
