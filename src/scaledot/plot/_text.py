"""Text that Matplotlib can draw: tokens as short labels, characters without a glyph by number."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

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
