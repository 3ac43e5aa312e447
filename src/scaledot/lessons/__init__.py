"""Lessons: how attention works, in numbers that the library computes when asked.

Each function runs one small experiment and returns its numbers as a frozen dataclass, with
``tables()`` to print and ``plot()`` to draw them. ``scaledot lesson NAME`` does both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from scaledot.lessons._additive import Additive, additive
from scaledot.lessons._backward import Backward, backward
from scaledot.lessons._heads import Heads, heads
from scaledot.lessons._masking import Masking, masking
from scaledot.lessons._memory import Memory, memory
from scaledot.lessons._page import Lesson, Table
from scaledot.lessons._saturation import Case, Saturation, saturation
from scaledot.lessons._variance import Variance, variance

LESSONS: Mapping[str, Callable[[], Lesson]] = MappingProxyType(
    {
        "saturation": saturation,
        "variance": variance,
        "memory": memory,
        "masking": masking,
        "additive": additive,
        "heads": heads,
        "backward": backward,
    }
)
"""The lessons by name, in the order in which to read them."""

NAMES: tuple[str, ...] = tuple(LESSONS)
"""Names of the lessons."""

__all__ = [
    "LESSONS",
    "NAMES",
    "Additive",
    "Backward",
    "Case",
    "Heads",
    "Lesson",
    "Masking",
    "Memory",
    "Saturation",
    "Table",
    "Variance",
    "additive",
    "backward",
    "heads",
    "masking",
    "memory",
    "saturation",
    "variance",
]
