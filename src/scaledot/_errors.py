"""One style for every message: what must hold, what was given, what to do."""

from __future__ import annotations


def _message(must_hold: str, given: str, what_to_do: str) -> str:
    return f"{must_hold}, got {given}. {what_to_do}"


def value_error(must_hold: str, given: object, what_to_do: str) -> ValueError:
    """Build a ValueError: the type is right, the value, shape or length is not."""
    return ValueError(_message(must_hold, str(given), what_to_do))


def type_error(must_hold: str, given: object, what_to_do: str) -> TypeError:
    """Build a TypeError: another kind of object, array or dtype was expected."""
    return TypeError(_message(must_hold, str(given), what_to_do))


def missing_extra(module: str, extra: str) -> ImportError:
    """Build the ImportError of an optional dependency, with the command that installs it."""
    return ImportError(
        f"{module} is needed here and is not installed. "
        f"Install it with: pip install 'scaledot[{extra}]'"
    )
