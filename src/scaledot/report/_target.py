"""Where a page may be written, and how it gets there whole."""

from __future__ import annotations

import os
from pathlib import Path

from scaledot import _targets


def check(path: str | os.PathLike[str], *, overwrite: bool) -> Path:
    """Return the file, links followed; raise unless a page can be written there."""
    return _targets.check(
        path, "report", (".html",), "Browsers go by the ending.", overwrite=overwrite
    )


def place(content: bytes, target: Path, *, overwrite: bool) -> None:
    """Write beside the target and give it the name once all bytes are there."""
    _targets.place(
        lambda temporary: temporary.write_bytes(content), target, "report", overwrite=overwrite
    )
