"""The page: HTML, style, scripts and data joined into one file."""

from __future__ import annotations

import functools
import html
import json
from importlib.resources import files
from typing import Any

SCRIPTS = (
    "data.js", "colour.js", "parts.js", "state.js", "tokens.js", "heads.js", "heatmap.js",
    "scale.js", "summary.js", "main.js",
)
"""In this order: all of them share one scope."""


def render(title: str, data: dict[str, Any]) -> str:
    """Return the whole page for data that JSON can hold."""
    before, after = _parts(title)
    return before + to_json(data) + after


def frame(title: str) -> int:
    """Bytes of the page without its data."""
    return sum(len(part.encode()) for part in _parts(title))


def to_json(data: object) -> str:
    """Return ASCII that may stand in a script element: nothing in it ends the element."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _parts(title: str) -> tuple[str, str]:
    """Return what stands before and after the data."""
    page = _template()
    # A half of a surrogate pair has no place in UTF-8.
    safe = html.escape(title.encode("utf-8", "replace").decode()) or "Attention report"
    before, after = page.split("{{data}}")
    return before.replace("{{title}}", safe), after


@functools.cache
def _template() -> str:
    """Return the page with its style and scripts, and two places to fill."""
    style = _read("style.css")
    # Declared in one function, the names of the scripts do not reach the window.
    script = '"use strict";\n(() => {\n' + "\n".join(map(_read, SCRIPTS)) + "\n})();\n"
    return _read("page.html").replace("{{style}}", style).replace("{{script}}", script)


def _read(name: str) -> str:
    return files("scaledot.report").joinpath(name).read_text(encoding="utf-8")
