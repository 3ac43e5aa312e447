"""Where pictures are written: PNG and SVG files, whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from scaledot import _targets
from scaledot._errors import type_error
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
        The ending is another one, or the folder is not writable.
    OSError
        The folder does not exist, the file exists and must stay, or the path is a folder.

    Notes
    -----
    Nothing is written, and Matplotlib is not needed. What is true now may change until `save`
    writes; it checks again.

    Examples
    --------
    >>> from scaledot import plot
    >>> plot.check_target("picture.png").name
    'picture.png'
    >>> plot.check_target("picture.pdf")
    Traceback (most recent call last):
        ...
    ValueError: the picture's file name must end in .png or .svg, got 'picture.pdf'. The ending ...
    """
    return _targets.check(
        path, "picture", ENDINGS, "The ending chooses the format.", overwrite=overwrite
    )


def save(drawing: Any, path: str | os.PathLike[str], *, overwrite: bool = True) -> Path:
    """Write a drawing as PNG or SVG, whole or not at all.

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
        The file written; a link is followed.

    Raises
    ------
    ImportError
        Matplotlib is not installed.
    TypeError
        Not a drawing.
    ValueError, OSError
        As in `check_target`; a file that appears while the picture is drawn stays, too, where
        nothing may be replaced.

    Notes
    -----
    The file is written beside its place under another name, which it gives up for its own once it
    is whole. The same drawing gives the same bytes of SVG every time.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from scaledot import plot
    >>> drawing = plot.weights(np.eye(3), ["the", "animal", "slept"])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     plot.save(drawing, f"{folder}/weights.png").name
    'weights.png'
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
    # Without a date and with a fixed salt the same drawing gives the same SVG.
    metadata = {"Date": None} if kind == "svg" else {}
    with matplotlib.rc_context({"svg.hashsalt": "scaledot"}):
        _targets.place(
            lambda temporary: figure.savefig(temporary, format=kind, metadata=metadata),
            target, "picture", overwrite=overwrite,
        )
    return target
