"""Frame of the command line: sub-commands, version, and how failures are told."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated, ParamSpec

import typer

import scaledot
from scaledot.cli import _bench, _demo, _inspect, _lesson, _run

P = ParamSpec("P")

EXIT_FAILURE = 2

# What a user can cause: bad files and arguments, a full disk, too little memory, a missing extra.
_EXPECTED = (ValueError, TypeError, OSError, MemoryError, ImportError)


class _Stopped(BaseException):
    """A signal asked for the end; like KeyboardInterrupt, nothing but the frame catches it."""


@contextmanager
def _stoppable() -> Iterator[None]:
    """Make a request to end unwind the stack, so that unfinished files are removed."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise _Stopped(number)

    names = ("SIGTERM", "SIGHUP")
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    # A signal that is ignored, as under nohup, stays ignored; only the main thread may ask.
    in_main = threading.current_thread() is threading.main_thread()
    ours = [n for n in numbers if in_main and signal.getsignal(n) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _one_line(error: BaseException) -> str:
    """Text of an error without line breaks."""
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    else:
        text = str(error) or type(error).__name__
    return " ".join(text.split())


def guarded(command: Callable[P, None]) -> Callable[P, None]:
    """Tell expected failures in one line on stderr, with exit code 2; Ctrl-C exits with 130."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            with _stoppable():
                command(*args, **kwargs)
        except BrokenPipeError:
            raise  # the reader of our output has left: typer ends without a word
        except _EXPECTED as error:
            typer.echo(f"scaledot: {_one_line(error)}", err=True)
            raise typer.Exit(EXIT_FAILURE) from None
        except KeyboardInterrupt:
            typer.echo("scaledot: interrupted", err=True)
            raise typer.Exit(128 + signal.SIGINT) from None
        except _Stopped as stopped:
            typer.echo("scaledot: stopped by a signal", err=True)
            raise typer.Exit(128 + int(stopped.args[0])) from None

    return run


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"scaledot {scaledot.__version__}")
        raise typer.Exit


app = typer.Typer(
    help="Scaled dot-product attention, softmax(Q Kᵀ / √d_k) V: exact, in linear memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _frame(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print it, exit."),
    ] = False,
) -> None:
    pass


for _command in (_run.run, _inspect.inspect, _bench.bench, _demo.demo, _lesson.lesson):
    app.command()(guarded(_command))
