"""Names of files that a command writes where it was given none."""

from __future__ import annotations

import itertools
from pathlib import Path

import typer


def free_name(name: str, force: bool) -> Path:
    """Return a name in the current folder or, unless forced, the next free one, and say so."""
    path = Path(name)
    if force or not path.exists():
        return path
    typer.echo(f"{name} exists and stays as it is (--force replaces it).")
    names = (path.with_stem(f"{path.stem}-{i}") for i in itertools.count(1))
    return next(p for p in names if not p.exists())
