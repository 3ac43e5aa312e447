"""Matplotlib, which is imported by the first call that draws."""

from __future__ import annotations

from typing import Any

from scaledot._errors import missing_extra


def matplotlib_package() -> Any:
    """Import Matplotlib, or say how to install it."""
    try:
        import matplotlib
    except ImportError:
        raise missing_extra("matplotlib", "plot") from None
    return matplotlib
