"""Reports: one HTML file that shows what every head of a model looks at.

The page needs no network and no other file. `scaledot.introspect.trace` gathers what it shows.
"""

from __future__ import annotations

import os
from pathlib import Path

from scaledot import introspect
from scaledot._errors import type_error, value_error
from scaledot.report import _data, _page, _target

MAX_BYTES = 2_000_000
"""Size of a page in bytes, at most, unless told otherwise."""

__all__ = ["MAX_BYTES", "check_target", "html", "write"]


def html(trace: introspect.Trace, *, max_bytes: int = MAX_BYTES) -> str:
    """One page of HTML that shows the attention of every layer and head.

    The page has the tokens as text, a map of every head, what each token looks at and who looks
    at it, the heads that link it to other tokens, a slider for the scale that computes the softmax
    anew, the findings of `scaledot.introspect.findings`, and a table of all heads.

    Parameters
    ----------
    trace : scaledot.introspect.Trace
        Layers of one shape: the same number of heads, queries and keys.
    max_bytes : int
        Size of the page in UTF-8, at most. Where the weights of all heads fit, at two bytes each,
        the page holds them; otherwise it holds block maps, as fine as fits.

    Returns
    -------
    str
        The page: no script, style, picture or font comes from elsewhere, and its Content Security
        Policy forbids it to ask for one.

    Raises
    ------
    TypeError
        Not a trace, or ``max_bytes`` is not an integer.
    ValueError
        The layers differ in shape; not even the coarsest maps fit into ``max_bytes``; or a layer
        holds neither query and key nor a block map.

    Notes
    -----
    Weights are computed in float64 and kept as ``exp(-code * step)`` with 16-bit codes and one
    step for each head, the largest ``-log(weight)`` over 65,533: the relative error of a weight is
    at most half a step, 0.0004 where the smallest weight is 1e-22. Shares of block maps have 8
    bits on a scale of square roots. Block maps come from `scaledot.attention_stats`, in memory
    linear in the length. Where a layer has not kept query and key, its ``block_map`` is used.

    Examples
    --------
    >>> import numpy as np
    >>> from scaledot import introspect, report
    >>> query, key = np.random.default_rng(0).standard_normal((2, 6, 12, 5, 32))
    >>> trace = introspect.trace(query, key, tokens=["the", "animal", "did", "not", "move"])
    >>> page = report.html(trace)
    >>> page.startswith("<!doctype html>"), len(page.encode()) < 2_000_000
    (True, True)
    """
    _check(trace, max_bytes)
    data = _data.page_data(trace, max_bytes, _page.frame(trace.title))
    return _page.render(trace.title, data)


def write(
    trace: introspect.Trace,
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    max_bytes: int = MAX_BYTES,
) -> Path:
    """Write the page of `html` to a file, whole or not at all.

    The file is written beside its place under another name and then renamed.

    Parameters
    ----------
    trace : scaledot.introspect.Trace
        As in `html`.
    path : str or path
        Ends in ``.html``; its folder exists.
    overwrite : bool
        Whether a file that exists is replaced.
    max_bytes : int
        As in `html`.

    Returns
    -------
    pathlib.Path
        The file written; a link is followed.

    Raises
    ------
    TypeError
        As in `html`.
    ValueError, OSError
        As in `html` and in `check_target`.

    Examples
    --------
    >>> report.write(trace, "attention.html")  # doctest: +SKIP
    """
    target = check_target(path, overwrite=overwrite)
    page = html(trace, max_bytes=max_bytes)
    _target.place(page.encode(), target, overwrite=overwrite)
    return target


def check_target(path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Raise unless `write` can write there, before any work is done for the page.

    Parameters
    ----------
    path : str or path
        Ends in ``.html``; its folder exists.
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
    """
    return _target.check(path, overwrite=overwrite)


def _check(trace: introspect.Trace, max_bytes: int) -> None:
    """Raise unless this is a trace of layers of one shape, and the size is a number."""
    if not isinstance(trace, introspect.Trace):
        raise type_error(
            "trace must be a scaledot.introspect.Trace", type(trace).__name__,
            "Make one with scaledot.introspect.trace(query, key).",
        )
    if isinstance(max_bytes, bool) or not isinstance(max_bytes, int):
        raise type_error(
            "max_bytes must be an integer", type(max_bytes).__name__,
            "It is the size of the page, 2,000,000 if not given.",
        )
    shapes = {(layer.num_heads, layer.len_q, layer.len_kv) for layer in trace.layers}
    if len(shapes) != 1:
        raise value_error(
            "the layers of a report must agree in num_heads, len_q and len_kv",
            ", ".join(map(str, sorted(shapes))) or "no layer",
            "Make one report for each shape.",
        )
