"""Types of the public surface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, TypeVar

Array: TypeAlias = Any
"""An array of NumPy, PyTorch, JAX or array-api-strict; the four share no static type."""

ArrayT = TypeVar("ArrayT")
"""Type in = type out."""

Impl: TypeAlias = Literal["auto", "kernels", "blockwise", "dense"]

ScoreFunction: TypeAlias = Callable[[Any, Any, Any, Any, Any], Any]
"""``score_mod(score, batch, head, q_pos, kv_pos) -> score``, or its derivative by the score."""

ScoreMod: TypeAlias = ScoreFunction | tuple[ScoreFunction, ScoreFunction]
"""A function of the score, or a pair of it and its derivative."""

MaskMod: TypeAlias = Callable[[Any, Any, Any, Any], Any]
"""``mask_mod(batch, head, q_pos, kv_pos) -> bool``."""

Offsets: TypeAlias = Any
"""An int, or an integer array that broadcasts to the leading axes."""
