"""What a result was measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

PACKAGES = ("scaledot", "numpy", "numba", "torch", "jax")


def describe() -> list[str]:
    """Lines that name the processor, the cores in use, the system and the versions."""
    model = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    cores = len(os.sched_getaffinity(0))
    versions = []
    for package in PACKAGES:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return [
        f"{model}, {cores} cores, {platform.system()} {platform.machine()}",
        f"Python {platform.python_version()}, {', '.join(versions)}",
    ]
