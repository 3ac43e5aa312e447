"""Where pictures are written: PNG and SVG files, whole or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

from scaledot._errors import type_error, value_error
from scaledot.plot._extra import matplotlib_package

ENDINGS = (".png", ".svg")
"""File formats that `save` writes."""


def check_target(path: str | os.PathLike[str], *, overwrite: bool = True) -> Path:
    """Raise unless `save` can write there, before any work is done for the picture.

    Parameters
    ----------
    path : str or path
        Ends in ``.png`` or ``.svg``; its folder exists.
    overwrite : bool
        Whether a file that exists may be replaced.

    Returns
    -------
    pathlib.Path
        The file; a link is followed.

    Raises
    ------
    ValueError
        The ending is another one.
    OSError
        The folder does not exist, the file exists and must stay, or the path is a folder.
    """
    target = Path(path)
    if target.suffix.lower() not in ENDINGS:
        raise value_error(
            f"the picture's file name must end in {' or '.join(ENDINGS)}",
            repr(str(target)),
            "The ending chooses the format.",
        )
    if target.is_dir():
        raise IsADirectoryError(
            f"The picture must be a file, got the folder {target}. Name a file in it."
        )
    if not target.parent.is_dir():
        raise FileNotFoundError(
            f"The picture's folder must exist, got {target.parent}. Create it first."
        )
    if target.exists() and not overwrite:
        raise FileExistsError(
            f"The picture must not exist yet, got {target}, which does. Choose another name, or "
            "replace it with overwrite=True (--force on the command line)."
        )
    return target.resolve()


def save(
    drawing: Any, path: str | os.PathLike[str], *, overwrite: bool = True
) -> Path:
    """Write a drawing as PNG or SVG, whole or not at all.

    The file is written beside its place under another name and then renamed.

    Parameters
    ----------
    drawing : matplotlib.axes.Axes or matplotlib.figure.Figure
        What the functions of this module return, or any other.
    path : str or path
        Ends in ``.png`` or ``.svg``.
    overwrite : bool
        Whether a file that exists is replaced.

    Returns
    -------
    pathlib.Path
        The file written.

    Raises
    ------
    ImportError
        Matplotlib is not installed.
    TypeError
        Not a drawing.
    ValueError, OSError
        As in `check_target`.
    """
    matplotlib = matplotlib_package()
    target = check_target(path, overwrite=overwrite)
    figure = getattr(drawing, "figure", drawing)
    if not hasattr(figure, "savefig"):
        raise type_error(
            "drawing must be Matplotlib axes or a figure", type(drawing).__name__,
            "Pass what scaledot.plot.weights and its like return.",
        )
    kind = target.suffix.lower()[1:]
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    # Without a date and with a fixed salt the same drawing gives the same SVG.
    metadata = {"Date": None} if kind == "svg" else {}
    try:
        with matplotlib.rc_context({"svg.hashsalt": "scaledot"}):
            figure.savefig(temporary, format=kind, metadata=metadata)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return target
