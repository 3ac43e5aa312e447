"""The formula as boxes: what is computed, in which order, and the shapes."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

from scaledot import _checks
from scaledot._errors import value_error
from scaledot.plot._axes import BLUE, GREEN, GREY, ORANGE, Axes, axes, name_axes

_HEIGHT = 0.8
_LANES = (2.4, 1.2, 0.0)
_PALE = {BLUE: "#D6E8F3", GREEN: "#D3EFE5", ORANGE: "#FBEBCB", GREY: "#F2F2F2"}


class _Box(NamedTuple):
    """A box at a place, with its formula, what it does or holds, and the shape of the result."""

    x: float
    y: float
    width: float
    formula: str
    words: str
    shape: str
    colour: str

    @property
    def left(self) -> tuple[float, float]:
        return self.x - self.width / 2, self.y

    @property
    def right(self) -> tuple[float, float]:
        return self.x + self.width / 2, self.y


def data_flow(
    len_q: int,
    len_kv: int,
    d_k: int,
    d_v: int | None = None,
    *,
    num_heads: int = 1,
    num_kv_heads: int | None = None,
    masked: bool = False,
    title: str = "softmax(Q Kᵀ / √d_k) V",
    ax: Axes | None = None,
) -> Axes:
    """Draw the formula as boxes with the shape of every intermediate result.

    Parameters
    ----------
    len_q, len_kv : int
        Numbers of queries and keys.
    d_k, d_v : int
        Widths of keys and values; ``d_v`` is ``d_k`` where it is not given.
    num_heads, num_kv_heads : int, optional
        Heads of query and of key and value; equal without ``num_kv_heads``. Shapes name them where
        there is more than one.
    masked : bool
        Whether a step hides keys before softmax.
    title : str
        Above the picture.
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure without it. Letters keep their size, so the axes should be 12
        inches wide; more where shapes have more than 16 characters.

    Returns
    -------
    matplotlib.axes.Axes
        Has boxes and arrows, and no scales.

    Raises
    ------
    ImportError
        Matplotlib is not installed.
    TypeError, ValueError
        A length, width or number of heads is not an integer of at least 1, or ``num_heads`` is no
        multiple of ``num_kv_heads``.

    Notes
    -----
    Each shape is that of the textbook computation: scores of long inputs never lie in memory as a
    whole, see `tiles`.

    References
    ----------
    arXiv 1706.03762, figure 2.

    Examples
    --------
    >>> from scaledot import plot
    >>> ax = plot.data_flow(10, 12, 64, 32)
    >>> [text.get_text() for text in ax.texts if "×" in text.get_text()]
    ['10 × 64', '12 × 64', '12 × 32', '10 × 12', '10 × 12', '10 × 12', '10 × 32', '10 × 32']
    """
    sizes = {"len_q": len_q, "len_kv": len_kv, "d_k": d_k, "d_v": d_k if d_v is None else d_v,
             "num_heads": num_heads,
             "num_kv_heads": num_heads if num_kv_heads is None else num_kv_heads}
    for name, value in sizes.items():
        if _checks.integer(name, value) < 1:
            raise value_error(f"{name} must be at least 1", value, "Nothing else can be drawn.")
    if sizes["num_heads"] % sizes["num_kv_heads"]:
        raise value_error(
            "num_heads must be a multiple of num_kv_heads",
            f"{sizes['num_heads']} and {sizes['num_kv_heads']}", "Query heads share key heads.",
        )
    inputs, steps = _boxes(sizes, masked)
    end = steps[-1].right[0]
    ax = axes(end + 1.4, 3.4) if ax is None else ax  # an inch to a unit: so wide are the letters
    for box in (*inputs, *steps):
        _draw(ax, box)
    for_query, for_key, for_value = inputs
    _arrow(ax, for_query.right, (steps[0].left[0], steps[0].y + 0.15))
    _arrow(ax, for_key.right, (steps[0].left[0], steps[0].y - 0.15))
    for before, after in itertools.pairwise(steps):
        _arrow(ax, before.right, after.left)
    product = steps[-2]
    corner = product.x, for_value.y
    ax.plot([for_value.right[0], corner[0]], [corner[1]] * 2, color="black", linewidth=1)
    _arrow(ax, corner, (product.x, product.y - _HEIGHT / 2))
    ax.set(xlim=(-1.0, end + 0.1), ylim=(-0.5, 2.9), xticks=[], yticks=[])
    ax.axis("off")
    name_axes(ax, "", "", title)
    return ax


def _boxes(sizes: dict[str, int], masked: bool) -> tuple[list[_Box], list[_Box]]:
    """The three inputs, and the steps from the first product to the result."""
    q, kv = ("" if n == 1 else f"{n:,} × " for n in (sizes["num_heads"], sizes["num_kv_heads"]))
    len_q, len_kv, d_k, d_v = (f"{sizes[name]:,}" for name in ("len_q", "len_kv", "d_k", "d_v"))
    width = 0.085 * max(16, len(f"{q}{len_q} × {len_kv}"), len(f"{kv}{len_kv} × {d_k}"))
    scores = f"{q}{len_q} × {len_kv}"
    inputs = [
        _Box(width / 2 - 0.9, y, width, formula, words, shape, BLUE)
        for y, formula, words, shape in (
            (_LANES[0], "Q", "queries", f"{q}{len_q} × {d_k}"),
            (_LANES[1], "K", "keys", f"{kv}{len_kv} × {d_k}"),
            (_LANES[2], "V", "values", f"{kv}{len_kv} × {d_v}"),
        )
    ]
    root = sizes["d_k"] ** -0.5
    parts = [
        ("Q · Kᵀ", "scores", scores, GREY),
        ("· 1/√d_k", f"times {root:.4g}", scores, GREY),
        ("mask", "hidden: −∞", scores, ORANGE),
        ("softmax", "rows sum to 1", scores, GREY),
        ("· V", "weighted mean", f"{q}{len_q} × {d_v}", GREY),
        ("out", "a row a query", f"{q}{len_q} × {d_v}", GREEN),
    ]
    if not masked:
        del parts[2]
    step, start = width + 0.3, inputs[0].right[0] + 0.3 + width / 2
    middle = (_LANES[0] + _LANES[1]) / 2
    return inputs, [
        _Box(start + i * step, middle, width, formula, words, shape, colour)
        for i, (formula, words, shape, colour) in enumerate(parts)
    ]


def _draw(ax: Axes, box: _Box) -> None:
    """Draw a box with its three lines of text."""
    from matplotlib.patches import FancyBboxPatch

    corner = box.left[0], box.y - _HEIGHT / 2
    ax.add_patch(FancyBboxPatch(
        corner, box.width, _HEIGHT, boxstyle="round,pad=0,rounding_size=0.08",
        facecolor=_PALE[box.colour], edgecolor=box.colour if box.colour != GREY else "#606060",
    ))
    lines = ((0.23, box.formula, 10, "bold"), (0.0, box.words, 8, "normal"),
             (-0.23, box.shape, 8, "normal"))
    for up, text, size, weight in lines:
        # This font comes with Matplotlib and has every sign used here.
        ax.text(box.x, box.y + up, text, ha="center", va="center", fontsize=size, weight=weight,
                family="DejaVu Sans")


def _arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    """Draw an arrow from one place to another."""
    style: dict[str, Any] = {"arrowstyle": "-|>", "color": "black", "shrinkA": 0, "shrinkB": 0}
    ax.annotate("", xy=end, xytext=start, arrowprops=style)
