"""Which keys are seen, read from the mask functions that transformers composes.

A mask function of transformers tells for two positions whether one is seen from the other. Its
parts are told by their code, and their parameters read from what they enclose. Whatever is not one
of the parts known here is not recognised, and becomes a boolean mask elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils as made

MaskFunction = Callable[..., Any]


class Pattern(NamedTuple):
    """What is seen, by positions alone; the fields are intersected."""

    causal: bool = False
    left: int | None = None
    right: int | None = None
    chunk: tuple[int, Tensor] | None = None
    """Positions in one chunk and, for each sequence (batch,), where its first chunk begins."""
    packed: tuple[Tensor, Tensor] | None = None
    """Number of its sequence and position within that for each token, both (batch, len)."""


def _code(function: Any) -> Any:
    return getattr(function, "__code__", None)


def _code_made_by(name: str, *arguments: Any) -> Any:
    """Code of what a function of transformers returns; of nothing where it has no such function."""
    make = getattr(made, name, None)
    return object() if make is None else _code(make(*arguments))


_zeros = torch.zeros(1, 1, dtype=torch.int64)
_AND = _code_made_by("and_masks")
_LEFT = _code_made_by("sliding_window_overlay", 1)
_BOTH = _code_made_by("sliding_window_bidirectional_overlay", 1)
_CHUNK = _code_made_by("chunked_overlay", 1, _zeros)
_SEQUENCE = _code_made_by("packed_sequence_mask_function", _zeros)
_REMAPPED = _code_made_by(
    "remap_positions_for_packed_sequence", made.causal_mask_function, _zeros
)  # fmt: skip


def recognised(function: MaskFunction) -> Pattern | None:
    """Return what a mask function of transformers means; None where it is not known."""
    if function is made.causal_mask_function:
        return Pattern(causal=True)
    if function is made.bidirectional_mask_function:
        return Pattern()
    if torch.compiler.is_compiling():  # it does not show what a function encloses
        return None
    code = _code(function)
    if code is _AND:
        return _all_of(_enclosed(function)["mask_functions"])
    if code is _LEFT:
        return Pattern(left=_enclosed(function)["sliding_window"] - 1)
    if code is _BOTH:
        reach = _enclosed(function)["sliding_window"]
        return Pattern(left=reach, right=reach)
    if code is _CHUNK:
        held = _enclosed(function)
        return Pattern(chunk=(held["chunk_size"], held["left_padding"]))
    return None


def _enclosed(function: MaskFunction) -> dict[str, Any]:
    """Names and values that a function encloses."""
    cells = function.__closure__ or ()
    return {
        name: cell.cell_contents
        for name, cell in zip(function.__code__.co_freevars, cells, strict=True)
    }


def _all_of(functions: Sequence[MaskFunction]) -> Pattern | None:
    """Intersect the patterns of several functions."""
    if [_code(function) for function in functions] == [_REMAPPED, _SEQUENCE]:
        return _packed(*map(_enclosed, functions))
    whole = Pattern()
    for function in functions:
        part = recognised(function)
        if part is None or part.packed or (part.chunk and whole.chunk):
            return None
        whole = Pattern(
            whole.causal or part.causal, _least(whole.left, part.left),
            _least(whole.right, part.right), whole.chunk or part.chunk,
        )  # fmt: skip
    return whole


def _packed(within: dict[str, Any], between: dict[str, Any]) -> Pattern | None:
    """Pattern of a function of positions within sequences, of which several are packed in one.

    Sequences are parted where positions do not go on by 1, so that within one the distance of two
    tokens is that of their places.
    """
    inner = recognised(within["mask_function"])
    if inner is None or inner.packed:
        return None
    return inner._replace(packed=(between["packed_sequence_mask"], within["position_ids"]))


def _least(a: int | None, b: int | None) -> int | None:
    return a if b is None else b if a is None else min(a, b)
