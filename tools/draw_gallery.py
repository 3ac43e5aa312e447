"""Draw the pictures of docs/plot.md and those that the tests compare with.

    python tools/draw_gallery.py [NAME ...] [--folder FOLDER]

Writes docs/img/plot-NAME.png and, for tests/test_plot_images.py, tests/images/NAME.png, small and
without text, and the text in tests/images/texts.json. Look at them before they are committed.
Settings of the user do not matter: Matplotlib's own defaults are in force.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.image import imsave

import scaledot as sd
from scaledot import plot

ROOT = Path(__file__).resolve().parents[1]
LARGE, SMALL = 80, 40  # dots per inch
TOKENS = ["The", "animal", "did", "n't", "cross", "the", "street", "because", "it", "was", "too",
          "tired"]
LONG = 100_000


@contextmanager
def defaults() -> Iterator[None]:
    """Matplotlib's own settings, whatever the user's are."""
    with mpl.rc_context():
        mpl.rcdefaults()
        yield


def attention_weights(*lead: int, length: int = len(TOKENS), seed: int = 0) -> np.ndarray:
    """Weights (lead, length, length) of random heads: causal, sharper from head to head."""
    rng = np.random.default_rng(seed)
    query, key = rng.standard_normal((2, *lead, length, 16))
    sharpness = np.linspace(0.2, 3, lead[-1])[:, None, None]
    return sd.attention_weights(query * sharpness, key, causal=True)


def long_map(cells: int = 64) -> np.ndarray:
    """A block map (cells, cells) with a sink, a diagonal and something of everything."""
    row, column = np.arange(cells)[:, None], np.arange(cells)
    mass = np.exp(-(row - column) / 4.0) + 1.5 * (column == 0) + 0.02
    mass = np.where(column <= row, mass, 0.0)
    return mass / mass.sum(axis=-1, keepdims=True)


def long_received(length: int = LONG) -> np.ndarray:
    """Attention that keys of a long input receive: less with the position, and a few sinks."""
    rng = np.random.default_rng(1)
    amount = np.log(length / (1 + np.arange(length))) * rng.gamma(2.0, 0.5, length)
    amount[[0, 1, 41_000, 77_123]] = 21_000, 900, 2_500, 700
    return amount


def packed(*lengths: int) -> np.ndarray:
    """Segment ids of sequences of these lengths, one after the other."""
    return np.repeat(np.arange(len(lengths)), lengths)


def variances() -> tuple[list[int], list[float]]:
    """Widths, and the variance of q·k over 4000 pairs at each."""
    rng = np.random.default_rng(42)
    widths = [4, 16, 64, 256]
    return widths, [
        float(np.einsum("ij,ij->i", *rng.standard_normal((2, 4000, d_k))).var()) for d_k in widths
    ]


GALLERY: dict[str, Callable[[], Any]] = {
    "weights": lambda: plot.weights(attention_weights(1)[0], TOKENS, title="One head"),
    "weights-long": lambda: plot.weights(
        long_map(), lengths=(LONG, LONG), title="A block map of 100,000 tokens"
    ),
    "head-grid": lambda: plot.head_grid(attention_weights(8), title="Heads of a layer"),
    "layer-grid": lambda: plot.head_grid(
        attention_weights(12, 12, length=8), title="Twelve layers of twelve heads", shared=False
    ),
    "head-map": lambda: plot.head_map(
        np.random.default_rng(0).random((6, 12)), label="share", title="A number for each head"
    ),
    "entropy": lambda: plot.entropy(
        np.random.default_rng(3).gamma(4.0, 0.4, (12, 12)), title="Entropy by layer and head"
    ),
    "saturation": lambda: plot.saturation(np.random.default_rng(4).random((6, 12)) / 4),
    "received": lambda: plot.received(
        attention_weights(4).sum(axis=-2), TOKENS, title="Who is looked at"
    ),
    "received-long": lambda: plot.received(
        long_received(), [f"token{i % 50}" for i in range(LONG)], title="100,000 keys"
    ),
    "distances": lambda: plot.distances(attention_weights(4), title="How far attention reaches"),
    "distances-long": lambda: plot.distances(
        attention_weights(1, length=600), title="How far attention reaches"
    ),
    "mask": lambda: plot.mask(np.tri(5, 8, 3), title="The last five of eight tokens"),
    "window": lambda: plot.visible(
        16, causal=True, window=(4, 0), segment_ids=packed(9, 7), title="Two sequences, a window"
    ),
    "packed-long": lambda: plot.visible(
        LONG, causal=True, segment_ids=packed(50_000, 30_000, 20_000),
        title="Three packed sequences",
    ),
    "tiles": lambda: plot.tiles(
        2048, causal=True, segment_ids=packed(1100, 948), block_q=128, block_kv=128
    ),
    "tiles-long": lambda: plot.tiles(
        LONG, causal=True, window=(30_000, 0), block_q=1024, block_kv=1024
    ),
    "softmax-bars": lambda: plot.softmax_bars(
        [6, 4, 1], {"unscaled": 1.0, "divided by 2": 0.5, "divided by 8": 0.125},
        title="Softmax of three scores",
    ),
    "variance": lambda: plot.variance(*variances()),
    "data-flow": lambda: plot.data_flow(10, 12, 64, 32, masked=True),
}  # fmt: skip


def bare(drawing: Any) -> tuple[list[str], np.ndarray]:
    """Texts of a drawing that has not been drawn yet, sorted, and its picture without them.

    Letters are not the same in every version of FreeType, and places that the layout finds depend
    on them: the picture, (height, width, 3) bytes, is one without letters, legends and layout.
    """
    from matplotlib.legend import Legend
    from matplotlib.text import Text

    figure = drawing.figure
    figure.set_layout_engine("none")
    figure.set_dpi(SMALL)
    figure.draw_without_rendering()  # makes the ticks
    texts = [text for text in figure.findobj(Text) if text.get_visible()]
    words = sorted(text.get_text() for text in texts if text.get_text().strip())
    for text in texts:
        text.set_alpha(0)
    for legend in figure.findobj(Legend):
        legend.set_visible(False)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return words, np.asarray(canvas.buffer_rgba())[..., :3]


def draw(names: Iterable[str], folder: Path) -> None:
    """Draw pictures of the gallery, for the page and for the tests."""
    pages, images = folder / "docs" / "img", folder / "tests" / "images"
    texts = images / "texts.json"
    for path in (pages, images):
        path.mkdir(parents=True, exist_ok=True)
    words = json.loads(texts.read_text(encoding="utf-8")) if texts.exists() else {}
    for name in names:
        with defaults():
            GALLERY[name]().figure.savefig(
                pages / f"plot-{name}.png", dpi=LARGE, metadata={"Software": None}
            )
            words[name], picture = bare(GALLERY[name]())
            imsave(images / f"{name}.png", picture, metadata={"Software": None})
    words = {name: words[name] for name in GALLERY if name in words}
    texts.write_text(
        json.dumps(words, ensure_ascii=False, indent=1) + "\n", encoding="utf-8"
    )


def main() -> None:
    """Draw the pictures that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(GALLERY))
    parser.add_argument("--folder", type=Path, default=ROOT, help="of the repository, or another")
    given = parser.parse_args()
    if unknown := set(given.names) - set(GALLERY):
        parser.error(f"no picture is called {', '.join(sorted(unknown))}")
    draw(given.names or GALLERY, given.folder)


if __name__ == "__main__":
    main()
