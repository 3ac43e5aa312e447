"""The command ``scaledot``: attention on files, a demonstration and lessons."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from scaledot._errors import missing_extra

if TYPE_CHECKING:
    from scaledot.cli._app import app

__all__ = ["app", "main"]


def __getattr__(name: str) -> Any:
    # Imported late, so that `main` can say in one line what to install where typer is missing.
    if name == "app":
        from scaledot.cli._app import app

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def main() -> None:
    """Run the command line with the arguments of this process, then exit."""
    try:
        from scaledot.cli._app import app
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("typer", "rich"):
            raise
        print(f"scaledot: {missing_extra(missing, 'cli')}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    app()
