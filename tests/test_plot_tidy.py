"""Pictures of few and many layers, heads and tokens: nothing touches, nothing is cut off."""

import itertools

import numpy as np
import pytest

from scaledot import plot
from test_plot import assert_tidy

pytest.importorskip("matplotlib")

LONG = 100_000
TITLE = "Layer 3, head 1: who looks at whom"
LAYERS, HEADS, TOKENS = (1, 2, 4, 12), (1, 2, 8), (4, LONG)


def words(length):
    return [f"tok{i}" for i in range(length)]


@pytest.mark.parametrize(("layers", "heads"), [*itertools.product(LAYERS, HEADS)])
def test_a_number_for_each_head(layers, heads):
    assert_tidy(plot.entropy(np.ones((layers, heads))))
    assert_tidy(plot.saturation(np.ones((layers, heads)), title=TITLE))


@pytest.mark.parametrize(("heads", "length"), [*itertools.product((1, 2, 3, 4, 8), TOKENS)])
def test_heads_of_a_layer(heads, length):
    ax = plot.head_grid(np.ones((heads, 2, 2)), lengths=(length, length), title=TITLE)
    assert_tidy(ax)
    left, top, right, bottom = ax.images[0].get_window_extent().extents
    assert abs((right - left) - (bottom - top)) < 1  # a pixel: squares stay square


@pytest.mark.parametrize(("layers", "heads", "length"),
                         [*itertools.product((1, 2), (1, 2, 3, 4), (LONG,)), (12, 8, LONG),
                          (1, 2, 4), (2, 3, 4), (4, 1, 4)])  # fmt: skip
def test_heads_of_layers(layers, heads, length):
    weights = np.ones((layers, heads, 2, 2))
    assert_tidy(plot.head_grid(weights, lengths=(length, length), title=TITLE))


@pytest.mark.parametrize("length", [1, 2, 3, 4, LONG])
def test_titles_of_any_number_of_tokens(length):
    cells = min(length, 4)
    lengths = None if length == cells else (length, length)
    labels = words(length)
    assert_tidy(plot.weights(np.eye(cells), labels, lengths=lengths, title=TITLE))
    assert_tidy(plot.visible(length, causal=True, row_labels=labels, title=f"{TITLE} and why"))
    if length == cells:
        assert_tidy(plot.mask(np.eye(length), title=f"{TITLE} and why"))
    assert_tidy(plot.tiles(length, causal=True, block_q=2048, block_kv=2048, title=TITLE * 2))


def test_a_title_without_room_has_several_lines():
    ax = plot.weights(np.eye(4), words(4), title=TITLE * 4)
    assert ax.get_title().replace("\n", " ") == TITLE * 4
    assert_tidy(ax)
    given = plot.axes(3.6, 3.2)
    assert_tidy(plot.weights(np.eye(2), title="猫" * 12, ax=given))
    assert given.get_title().replace("\n", "") == "U+732B" * 12
    assert "\n" in given.get_title()


@pytest.mark.parametrize(("keys", "scales"), [(1, 1), (2, 4), (3, 3), (4, 2), (4, 4)])
def test_bars_are_as_wide_as_their_numbers(keys, scales):
    scores, factors = list(range(keys)), [1 / 2**i for i in range(scales)]
    assert_tidy(plot.softmax_bars(scores, factors, title=TITLE))
    names = ["internationalisation"] * keys
    assert_tidy(plot.softmax_bars(scores, factors, labels=names, digits=9))


@pytest.mark.parametrize("widths", [[4], range(4, 100, 4), range(1, 300), [1, 10, 1_000_000]])
def test_widths_that_lie_close(widths):
    assert_tidy(plot.variance(widths, np.asarray(widths, dtype=float)))


@pytest.mark.parametrize("top", [1, 5, 20])
def test_marks_of_many_keys(top):
    for length in (4, 30, LONG):
        amount = np.linspace(2, 1, length)
        assert_tidy(plot.received(amount, words(length), top=top, title=TITLE))
