"""What a result was measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

PACKAGES = ("scaledot", "numpy", "numba", "torch", "jax")


def describe() -> list[str]:
    """Lines that name the processor, the cores in use, the system and the versions."""
    known = {}
    for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        known[name.strip()] = value.strip()
    model = known.get("model name", "unknown processor")
    if "cpu family" in known:  # virtual machines hide the rest of the name
        model += f" (family {known['cpu family']}, model {known.get('model', 'unknown')})"
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
