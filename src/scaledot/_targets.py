"""Files that are written whole or not at all: where they may be, and how they get there."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path

from scaledot._errors import value_error


def check(
    path: str | os.PathLike[str], what: str, endings: tuple[str, ...], why: str, *, overwrite: bool
) -> Path:
    """Return the file, links followed; raise unless it can be written.

    ``what`` names it in messages, such as "picture"; ``why`` tells what its ending is for.
    """
    target = Path(path)
    if target.suffix.lower() not in endings:
        raise value_error(
            f"the {what}'s file name must end in {' or '.join(endings)}", repr(str(target)), why
        )
    if target.is_dir():
        raise IsADirectoryError(
            f"The {what} must be a file, got the folder {target}. Name a file in it."
        )
    if not target.parent.is_dir():
        raise FileNotFoundError(
            f"The {what}'s folder must exist, got {target.parent}. Create it first."
        )
    if target.exists() and not overwrite:
        raise _exists(target, what)
    target = target.resolve()
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise value_error(
            f"the {what}'s folder must be writable", target.parent, "Choose another."
        )
    return target


def place(write: Callable[[Path], object], target: Path, what: str, *, overwrite: bool) -> None:
    """Call ``write`` with another name beside the target, then give the file its own name."""
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        write(temporary)
        settle(temporary, target, what, overwrite=overwrite)
    finally:
        temporary.unlink(missing_ok=True)


def settle(finished: Path, target: Path, what: str, *, overwrite: bool) -> None:
    """Give a finished file its own name; what fails leaves it as it is."""
    if overwrite:
        finished.replace(target)
        return
    try:
        # Unlike a rename, a link fails if the name was taken in the meantime.
        os.link(finished, target)
    except FileExistsError:
        raise _exists(target, what) from None
    except OSError:  # a file system without links
        if target.exists():
            raise _exists(target, what) from None
        finished.replace(target)


def _exists(target: Path, what: str) -> FileExistsError:
    return FileExistsError(
        f"The {what} must not exist yet, got {target}, which does. Choose another name, or "
        "replace it with --force (overwrite=True in Python)."
    )
