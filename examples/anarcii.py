"""Number antibodies by ANARCII, an encoder-decoder that writes one number for each residue.

python examples/anarcii.py [SEQUENCE ...]
"""

import sys
import tempfile
import timeit
from pathlib import Path

import torch

import scaledot

sys.path.extend(str(Path(__file__).parents[1] / x) for x in ("tools", "tests/models"))
from anarcii_numbering import PACKAGE, SHA256, VERSION, numberer, unpack
from antibodies import TRASTUZUMAB_HEAVY, TRASTUZUMAB_LIGHT
from fetch_weights import fetch


def main() -> None:
    """Print each sequence numbered, and times with PyTorch's attention and scaledot's."""
    torch.set_num_threads(1)  # a step is too short to share
    scaledot.set_num_threads(1)
    sequences = sys.argv[1:] or [TRASTUZUMAB_HEAVY, TRASTUZUMAB_LIGHT]
    named = {f"sequence {i}": sequence for i, sequence in enumerate(sequences, 1)}
    with tempfile.TemporaryDirectory() as folder:
        unpack(fetch(PACKAGE, VERSION, SHA256), folder)
        # The package's own code; the second runs it in scaledot.torch.exchanged.
        ways = {way: numberer("antibody", way) for way in ("pytorch", "scaledot")}
        for name, result in ways["scaledot"](named).items():
            print(f"{name}, chain {result['chain_type']}, score {result['score']:.1f}")
            for (number, letter), residue in result["numbering"] or ():
                print(f"{residue}{number}{letter.strip()}", end=" ")
            print()
        for way, number in ways.items():
            times = timeit.repeat(lambda number=number: number(named), number=1, repeat=3)
            print(f"{way:8}  {min(times):.2f} s for {len(named)} sequences")


if __name__ == "__main__":
    main()
