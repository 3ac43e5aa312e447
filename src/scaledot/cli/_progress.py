"""A progress bar for work that turns out to take long."""

from __future__ import annotations

import threading
import time

import rich.console
import rich.progress

QUIET_SECONDS = 1.0


class Progress:
    """Bar on stderr with rate and time left: on terminals only, and after a second of work.

    Parameters
    ----------
    what : str
        Name of the work.
    total : int
        Amount of work, in any unit that grows evenly with time.
    counted : str
        Name of what `update` counts.
    """

    def __init__(self, what: str, total: int, counted: str) -> None:
        console = rich.console.Console(stderr=True)
        self._counted = counted
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(bar_width=None),
            rich.progress.TaskProgressColumn(),
            rich.progress.TextColumn("{task.fields[rate]}"),
            rich.progress.TimeRemainingColumn(),
            rich.progress.TextColumn("left"),
            console=console, transient=True, expand=True, disable=not console.is_interactive,
        )
        self._task = self._bar.add_task(what, total=total, rate="")
        # The first block may itself take long, so a timer shows the bar, not the end of a block.
        self._timer = threading.Timer(QUIET_SECONDS, self._bar.start)
        self._timer.daemon = True

    def __enter__(self) -> Progress:
        self._started = time.perf_counter()
        self._timer.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._timer.cancel()
        self._timer.join()
        self._bar.stop()

    def update(self, done: int, count: int) -> None:
        """Tell the work done so far, and how many of the counted things that makes."""
        rate = count / max(time.perf_counter() - self._started, 1e-9)
        self._bar.update(self._task, completed=done, rate=f"{rate:,.0f} {self._counted}/s")
