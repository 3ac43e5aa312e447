"""Where a page may be written, and how it gets there whole."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from scaledot._errors import value_error


def check(path: str | os.PathLike[str], *, overwrite: bool) -> Path:
    """Return the file, links followed; raise unless a page can be written there."""
    target = Path(path)
    if target.suffix.lower() != ".html":
        raise value_error(
            "the report's file name must end in .html", repr(str(target)),
            "Browsers go by the ending.",
        )
    if target.is_dir():
        raise IsADirectoryError(
            f"The report must be a file, got the folder {target}. Name a file in it."
        )
    if not target.parent.is_dir():
        raise FileNotFoundError(
            f"The report's folder must exist, got {target.parent}. Create it first."
        )
    if target.exists() and not overwrite:
        raise _exists(target)
    target = target.resolve()
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise value_error("the report's folder must be writable", target.parent, "Choose another.")
    return target


def place(content: bytes, target: Path, *, overwrite: bool) -> None:
    """Write beside the target and give it the name once all bytes are there."""
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        temporary.write_bytes(content)
        if overwrite:
            temporary.replace(target)
            return
        try:
            # Unlike a rename, a link fails if the name was taken in the meantime.
            os.link(temporary, target)
        except FileExistsError:
            raise _exists(target) from None
        except OSError:  # a file system without links
            if target.exists():
                raise _exists(target) from None
            temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _exists(target: Path) -> FileExistsError:
    return FileExistsError(
        f"The report must not exist yet, got {target}, which does. Choose another name, or "
        "replace it with overwrite=True (--force on the command line)."
    )
