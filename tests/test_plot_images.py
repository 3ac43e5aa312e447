"""Pictures of the gallery are as they were: their texts to the letter, the rest to the pixel.

`python tools/draw_gallery.py` renews them.
"""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from test_plot import assert_tidy

pytest.importorskip("matplotlib")

import matplotlib as mpl
from matplotlib.image import imread

import draw_gallery
from draw_gallery import GALLERY, LONG, TOKENS, attention_weights, bare, defaults, packed
from scaledot import plot

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "tests" / "images"
WORDS = json.loads((IMAGES / "texts.json").read_text(encoding="utf-8"))

# Without letters and layout nothing is left but lines and areas, whose edges another version of
# Matplotlib may smooth otherwise: a pixel may differ by so much, and so many in ten thousand more.
LEVELS, IN_TEN_THOUSAND = 8, 2


def differs(name, words, picture):
    """Whether words or pixels are not those of the stored picture; empty where all are."""
    stored = (imread(IMAGES / f"{name}.png")[..., :3] * 255).round().astype(int)
    faults = [] if words == WORDS[name] else ["words"]
    if picture.shape != stored.shape:
        return [*faults, "pixels"]
    changed = (np.abs(picture - stored).max(axis=-1) > LEVELS).mean() * 10_000
    return [*faults, "pixels"] if changed > IN_TEN_THOUSAND else faults


@pytest.mark.parametrize("name", [
    name if place % 3 == 0 else pytest.param(name, marks=pytest.mark.heavy)
    for place, name in enumerate(GALLERY)
])  # fmt: skip
def test_a_picture_is_as_it_was(name):
    with defaults():
        assert differs(name, *bare(GALLERY[name]())) == []


CHANGED = {
    "weights": (lambda: plot.weights(attention_weights(1)[0].T, TOKENS, title="One head"),
                ["pixels"]),
    "head-grid": (lambda: plot.head_grid(attention_weights(8)[::-1], title="Heads of a layer"),
                  ["pixels"]),
    "received": (lambda: plot.received(attention_weights(4).sum(axis=-2), title="Who is looked at"),
                 ["words"]),
    "mask": (lambda: plot.mask(np.tri(5, 8, 2), title="The last five of eight tokens"),
             ["words", "pixels"]),
    "packed-long": (lambda: plot.visible(LONG, causal=True, segment_ids=packed(50_000, 29_000,
                                         21_000), title="Three packed sequences"), ["pixels"]),
    "softmax-bars": (lambda: plot.softmax_bars(
        [6, 4, 1], {"unscaled": 1.0, "divided by 2": 0.5, "divided by 8": 0.12},
        title="Softmax of three scores"), ["words"]),
    "data-flow": (lambda: plot.data_flow(10, 12, 64, 32), ["words", "pixels"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGED)
def test_a_changed_picture_is_found(name):
    draw, expected = CHANGED[name]
    with defaults():
        found = differs(name, *bare(draw()))
    assert set(expected) <= set(found)


@pytest.mark.heavy
@pytest.mark.parametrize("settings", [
    {"text.hinting": "none"}, {"text.hinting": "force_autohint"}, {"text.antialiased": False},
    {"font.family": "serif"},
])  # fmt: skip
@pytest.mark.parametrize("name", ["distances", "tiles"])
def test_other_letters_change_nothing(name, settings):
    with defaults(), mpl.rc_context(settings):
        assert differs(name, *bare(GALLERY[name]())) == []


@pytest.mark.heavy  # other files look at short and long ones
@pytest.mark.parametrize("name", GALLERY)
def test_a_picture_is_tidy(name):
    with defaults():
        assert_tidy(GALLERY[name]())


def test_the_gallery_is_stored_and_shown():
    assert set(WORDS) == set(GALLERY)
    assert {path.stem for path in IMAGES.glob("*.png")} == set(GALLERY)
    pages = {path.name: path for path in (ROOT / "docs" / "img").glob("plot-*.png")}
    assert set(pages) == {f"plot-{name}.png" for name in GALLERY}
    assert max(path.stat().st_size for path in pages.values()) < 80_000
    page = (ROOT / "docs" / "plot.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"\(img/(plot-[\w-]+\.png)\)", page)) == sorted(pages)


def test_the_tool_renews_what_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(
        sys, "argv", ["draw_gallery.py", "distances", "--folder", str(tmp_path)]
    )
    draw_gallery.main()
    written = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    assert written == {
        "docs/img/plot-distances.png", "tests/images/distances.png", "tests/images/texts.json",
    }  # fmt: skip
    texts = json.loads((tmp_path / "tests" / "images" / "texts.json").read_text(encoding="utf-8"))
    assert texts == {"distances": WORDS["distances"]}
    stored = imread(tmp_path / "tests" / "images" / "distances.png")
    np.testing.assert_array_equal(stored, imread(IMAGES / "distances.png"))


def test_the_tool_knows_its_pictures(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["draw_gallery.py", "none", "--folder", str(tmp_path)])
    with pytest.raises(SystemExit):
        draw_gallery.main()
    assert "no picture is called none" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
