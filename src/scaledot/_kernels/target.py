"""Which vector shapes the kernels use on this processor."""

from __future__ import annotations

import os
from dataclasses import dataclass

import llvmlite.binding as llvm

from scaledot._errors import value_error

VARIABLE = "SCALEDOT_TARGET"


@dataclass(frozen=True)
class Target:
    """Shapes of the micro-kernels, in lanes of float32.

    ``mr × nr`` vectors of sums, ``nr`` vectors of one factor and one broadcast of the other must
    fit into the registers: 6 × 4 in 32 registers of AVX-512, 6 × 2 in 16 of AVX2.
    """

    name: str
    lanes: int
    mr: int
    nr: int
    block_q: int
    block_kv: int

    @property
    def panel(self) -> int:
        """Keys that one micro-kernel scores at once."""
        return self.lanes * self.nr


TARGETS = {
    "avx512": Target("avx512", 16, 6, 4, 192, 256),
    "avx2": Target("avx2", 8, 6, 2, 96, 256),
    "neon": Target("neon", 4, 6, 4, 96, 256),
    "generic": Target("generic", 4, 4, 2, 96, 256),
}


def detect() -> Target:
    """Target of this process: ``SCALEDOT_TARGET`` where it is set, else from the processor."""
    name = os.environ.get(VARIABLE)
    if name:
        if name not in TARGETS:
            raise value_error(
                f"{VARIABLE} must be one of {', '.join(TARGETS)}", repr(name),
                "Unset it to choose by the processor.",
            )
        return TARGETS[name]
    features = llvm.get_host_cpu_features()
    if features.get("avx512f") and features.get("avx512vl"):
        return TARGETS["avx512"]
    if features.get("avx2") and features.get("fma"):
        return TARGETS["avx2"]
    if features.get("neon"):
        return TARGETS["neon"]
    return TARGETS["generic"]


HOST = detect()
