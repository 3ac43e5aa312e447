"""Which vector shapes the kernels use on this processor."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import llvmlite.binding as llvm
from numba.core import config

from scaledot._errors import value_error

VARIABLE = "SCALEDOT_TARGET"


@dataclass(frozen=True)
class Target:
    """Shapes of the micro-kernels, in lanes of float32.

    ``mr × nr`` vectors of sums, ``nr`` vectors of one factor and one broadcast of the other must
    fit into the registers: 8 × 3 in 32 registers of AVX-512, 4 × 3 in 16 of AVX2.
    """

    name: str
    lanes: int
    mr: int
    nr: int
    fma: bool = True
    f16: bool = True
    """Whether float16 is widened by an instruction."""
    bf16: bool = False
    """Whether two products of bfloat16 are added to a float32 by one instruction."""
    bytes: bool = False
    """Whether one instruction looks bytes up in a table of 128."""


TARGETS = {
    "avx512": Target("avx512", 16, 8, 3),
    "avx2": Target("avx2", 8, 4, 3),
    "neon": Target("neon", 4, 8, 3),
    "generic": Target("generic", 4, 4, 2, fma=False, f16=False),
}


def features() -> dict[str, bool]:
    """Features of the processor that Numba compiles for: this one, unless its settings say else."""
    settings: Any = config
    if not settings.CPU_NAME:
        return dict(llvm.get_host_cpu_features())
    named = (settings.CPU_FEATURES or "").split(",")
    return {feature[1:]: feature[0] == "+" for feature in named if feature}


def detect() -> Target:
    """Target of this process: ``SCALEDOT_TARGET`` where it is set, else from the processor.

    ``avx512-bf16`` stands for AVX-512 with products of bfloat16.
    """
    has = features()
    name = os.environ.get(VARIABLE)
    if name:
        base = name.removesuffix("-bf16")
        if base not in TARGETS or (name != base and base != "avx512"):
            raise value_error(
                f"{VARIABLE} must be one of {', '.join(TARGETS)}, avx512-bf16", repr(name),
                "Unset it to choose by the processor.",
            )
        return replace(TARGETS[base], bf16=name != base)
    if has.get("avx512f") and has.get("avx512vl") and has.get("avx512dq"):
        bf16, lookup = (bool(has.get(name)) for name in ("avx512bf16", "avx512vbmi"))
        return replace(TARGETS["avx512"], bf16=bf16, bytes=bf16 and lookup)
    if has.get("avx2") and has.get("fma"):
        return TARGETS["avx2"]
    return TARGETS["neon" if has.get("neon") else "generic"]


HOST = detect()
