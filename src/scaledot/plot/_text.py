"""Text that Matplotlib can draw: tokens as short labels, characters without a glyph by number."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

from scaledot.plot._extra import matplotlib_package

MOST_CHARACTERS = 20
"""Longer tokens are cut; their last character is then an ellipsis."""

_GENERIC = ("serif", "sans-serif", "cursive", "fantasy", "monospace")


def glyphs(text: object) -> str:
    """Text with characters that no font in use has as code points, such as U+732B.

    Fonts in use are those of ``matplotlib.rcParams["font.family"]``. Line breaks stay.
    """
    string = str(text)
    if string.isascii():
        return string
    known = _characters(_families())
    return "".join(
        c if c == "\n" or ord(c) in known else f"U+{ord(c):04X}" for c in string
    )


def token(text: object) -> str:
    """Label of a token: one line, at most `MOST_CHARACTERS`, spaces and controls made visible."""
    string = str(text)
    if string.isspace():
        string = string.replace(" ", "␣")
    parts = [glyphs(c) if c.isprintable() else c.encode("unicode_escape").decode() for c in string]
    if sum(map(len, parts)) <= MOST_CHARACTERS:
        return "".join(parts)
    ends = itertools.accumulate(map(len, parts))
    count = sum(end < MOST_CHARACTERS for end in ends)  # whole parts, with room for the ellipsis
    return "".join(parts[:count]) + "…"


def text_width(text: str, size: Any, is_math: bool = False) -> float:
    """Inches that the longest line of a text takes in letters of a size, as Matplotlib names it.

    ``is_math`` tells that parts between dollar signs are formulas.
    """
    matplotlib_package()
    from matplotlib.cbook import is_math_text
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font, measure = FontProperties(size=size), text_to_path.get_text_width_height_descent
    lines = [line for line in text.split("\n") if line]
    points = (measure(line, font, is_math and is_math_text(line))[0] for line in lines)
    return float(max(points, default=0.0)) / 72


def wrapped(text: str, size: Any, room: float) -> str:
    """Text with more line breaks, so that no line takes more than ``room`` inches.

    Breaks replace spaces, or fall into a word that has no room by itself.
    """
    lines: list[str] = []
    for line in text.split("\n"):
        lines.append("")
        for i, word in enumerate(line.split(" ")):
            longer = f"{lines[-1]} {word}" if i else word
            if text_width(longer, size) <= room or not lines[-1]:
                lines[-1] = longer
            else:
                lines.append(word)
            while len(lines[-1]) > 1 and text_width(lines[-1], size) > room:
                whole = lines.pop()
                counts = range(len(whole) - 1, 1, -1)
                count = next((n for n in counts if text_width(whole[:n], size) <= room), 1)
                lines += [whole[:count], whole[count:]]
    return "\n".join(lines)


def _families() -> tuple[str, ...]:
    """Names of the font families in use, generic ones replaced by what they stand for."""
    parameters = matplotlib_package().rcParams
    names: list[str] = []
    for name in parameters["font.family"]:
        names += parameters[f"font.{name}"] if name in _GENERIC else [name]
    return tuple(names)


@functools.lru_cache(maxsize=8)
def _characters(families: Sequence[str]) -> frozenset[int]:
    """Code points that the installed ones of these families have, or else the default font."""
    from matplotlib import font_manager

    installed = set(font_manager.get_font_names())
    names = [name for name in families if name in installed] or ["DejaVu Sans"]
    known: set[int] = set()
    for name in names:
        properties = font_manager.FontProperties(family=[name])
        known.update(font_manager.get_font(font_manager.findfont(properties)).get_charmap())
    return frozenset(known)
