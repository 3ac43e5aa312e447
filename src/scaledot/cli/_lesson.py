"""``scaledot lesson``: run a lesson, print its numbers, draw them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from scaledot import lessons, plot
from scaledot._errors import value_error


def lesson(
    name: Annotated[
        str | None, typer.Argument(help="Name of the lesson; without it they are listed.")
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw the lesson to a .png or .svg file."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it exists.")] = False,
) -> None:
    """Run a lesson on how attention works; its numbers are computed here and now."""
    if name is None:
        for known, function in lessons.LESSONS.items():
            summary = (function.__doc__ or "").strip().split("\n")[0]
            typer.echo(f"{known:<11} {summary}")
        typer.echo("\nRun one with: scaledot lesson NAME")
        return
    if name not in lessons.LESSONS:
        raise value_error("there must be a lesson of that name", repr(name),
                          f"Lessons: {', '.join(lessons.NAMES)}.")
    if picture is not None:  # before the lesson takes its time
        plot.check_target(picture, overwrite=force)
        plot.axes()
    result = lessons.LESSONS[name]()
    _show(result)
    if picture is not None:
        plot.save(result.plot(), picture, overwrite=force)
        typer.echo(f"Picture: {picture}")


def _show(result: lessons.Lesson) -> None:
    """Print title, text and tables of a lesson."""
    console = Console(highlight=False, markup=False)
    console.print(Text(result.title, style="bold"))
    console.print(Text(result.text))
    for numbers in result.tables():
        # A caption inside the table would be wrapped to its width, so it stands below as text.
        table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
        for i, column in enumerate(numbers.columns):
            table.add_column(Text(column), justify="right" if i else "left", no_wrap=True)
        for row in numbers.rows:
            table.add_row(*(Text(cell) for cell in row))
        console.print(table)
        if numbers.caption:
            console.print(Text(numbers.caption, style="italic"))
            console.print()
