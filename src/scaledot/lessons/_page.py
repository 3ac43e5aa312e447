"""What every lesson's result offers to whoever prints or draws it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from scaledot.plot import Axes


class Table(NamedTuple):
    """Numbers of a lesson as text: at most 76 characters wide, numbers right-aligned."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""


class Lesson(Protocol):
    """A lesson's result: its numbers as fields, and how to show them."""

    @property
    def title(self) -> str:
        """What the lesson shows, in one line."""

    @property
    def text(self) -> str:
        """One paragraph on what the numbers mean."""

    def tables(self) -> tuple[Table, ...]:
        """Return the numbers as text."""

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the numbers; needs the ``plot`` extra."""
