"""The scripts of examples/ as modules, and their training as tests run it."""

import contextlib
import importlib
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def example_script(name):
    """Import a script by its name, without the ending."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        return importlib.import_module(name)


@contextlib.contextmanager
def one_thread_of_torch():
    """Let torch compute on one thread, which small models are trained on fastest."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
