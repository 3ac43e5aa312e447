"""The example for the Transformer of 2017 learns to write dates, and looks at what it writes."""

import importlib
import random

import pytest

torch = pytest.importorskip("torch")
scripts = importlib.import_module("example_scripts")

pytestmark = pytest.mark.models

STEPS = 300


@pytest.fixture(scope="module")
def example():
    return scripts.example_script("transformer")


@pytest.fixture(scope="module")
def trained(example):
    torch.manual_seed(0)
    model = example.Transformer()
    with scripts.one_thread_of_torch():
        example.train(model, STEPS)
        yield model


def test_no_date_is_in_training_and_test(example):
    """3,000 of 36,525 dates each: if any could be in both, some would be."""
    seen, unseen = (
        {tuple(row) for row in example.dates(3000, random.Random(seed), seed)[1].tolist()}
        for seed in (0, 1)
    )
    assert len(seen) > 2500
    assert not seen & unseen


def test_it_learns_to_write_dates(example, trained):
    source, wanted = example.dates(500, random.Random(1), 1)
    found, _ = example.written(trained, source)
    assert (found == wanted).all(dim=1).double().mean() > 0.95


def test_it_looks_at_the_year_while_it_writes_the_year(example, trained):
    """Digits of the year are read at its four places, the last ones of a date."""
    source, _ = example.dates(200, random.Random(2), 1)
    _, weights = example.written(trained, source)
    assert weights.shape == (200, example.WRITTEN, example.LONGEST)
    assert torch.equal(weights != 0, (source != example.PAD)[:, None].expand_as(weights))
    ends = (source != example.PAD).sum(dim=1, keepdim=True)
    places = torch.arange(example.LONGEST)
    in_year = (places < ends) & (places >= ends - 4)
    shares = (weights[:, :4] * in_year[:, None]).sum(dim=-1)
    # A quarter of the places or less, and more than half of the weight.
    assert shares.mean() > 0.5
