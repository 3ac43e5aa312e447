"""What this processor can do at most: multiply-adds on registers and L1, reads from memory.

    python peaks.py THREADS

prints JSON: GFLOP/s by dtype on registers, ``tile`` for scaledot's float32 micro-kernel on data in
L1, and ``read`` in GB/s.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np

REPEATS = 7
GIB = 2**30
FEATURES = llvm.get_host_cpu_features()
BITS = 512 if FEATURES.get("avx512f") else 256 if FEATURES.get("avx2") else 128


def fastest(threads: int, work: Callable[[int], Any]) -> float:
    """Shortest seconds in which all threads did their work; it gets the thread's number."""
    seconds = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(REPEATS):
            start = time.perf_counter()
            list(pool.map(work, range(threads)))
            seconds.append(time.perf_counter() - start)
    return min(seconds)


def assembly(dtype: str, sums: int) -> tuple[str, int]:
    """LLVM code of a loop whose only work is ``sums`` multiply-adds, and operations of a turn."""
    kind, size = ("double", 64) if dtype == "float64" else ("float", 32)
    lanes = BITS // size
    vector = factor = f"<{lanes} x {kind}>"
    call, order = f"@llvm.fma.v{lanes}f{size}", "{f} %x, {f} %x, {v} %s{i}"
    if dtype == "bfloat16":
        factor = f"<{2 * lanes} x bfloat>"
        call, order = f"@llvm.x86.avx512bf16.dpbf16ps.{BITS}", "{v} %s{i}, {f} %x, {f} %x"
    names = range(sums)
    given = order.replace("%x", "").replace("%s{i}", "").format(f=factor, v=vector)
    lines = [
        f"declare {vector} {call}({given})",
        "define void @turns(i64 %n, ptr %p) {",
        f"entry:\n %x = load {factor}, ptr %p, align 4\n br label %body",
        "body:\n %i = phi i64 [0, %entry], [%j, %body]",
        *(f" %s{i} = phi {vector} [zeroinitializer, %entry], [%t{i}, %body]" for i in names),
        *(f" %t{i} = call {vector} {call}({order.format(f=factor, v=vector, i=i)})" for i in names),
        " %j = add i64 %i, 1\n %more = icmp ult i64 %j, %n",
        " br i1 %more, label %body, label %done\ndone:",
        *(f" store volatile {vector} %t{i}, ptr %p, align 4" for i in names),
        " ret void\n}",
    ]
    return "\n".join(lines), 2 * lanes * sums * (2 if dtype == "bfloat16" else 1)


def registers(dtype: str, threads: int, turns: int = 3_000_000) -> float:
    """GFLOP/s of multiply-adds whose operands are all in registers."""
    text, flops = assembly(dtype, 24 if BITS == 512 else 12)
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=FEATURES.flatten(), opt=3
    )
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(text), machine)
    engine.finalize_object()
    address = engine.get_function_address("turns")
    function = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_void_p)(address)  # without the GIL
    places = np.zeros((threads, 1024))
    seconds = fastest(threads, lambda i: function(turns, places[i].ctypes.data))
    return threads * turns * flops / seconds / 1e9


def tile(threads: int, turns: int = 300_000) -> float:
    """GFLOP/s of scaledot's micro-kernel for scores: 64 deep, all of its data in L1."""
    from scaledot._kernels.kinds import Single
    from scaledot._kernels.matmul import make_scores
    from scaledot._kernels.target import HOST

    mr, panel, depth = HOST.mr, HOST.nr * HOST.lanes, 64
    scores = make_scores(HOST.nr, add=False, last=True)

    @numba.njit(nogil=True)
    def repeat(a: int, b: int, c: int, top: int, n: int) -> None:
        for _ in range(n):
            scores(Single(0), a, depth, 1, b, panel, depth, c, panel, top, np.float32(1))

    sizes = (mr * depth, depth * panel, mr * panel, mr * panel)
    memory = [[np.ones(n, np.float32) for n in sizes] for _ in range(threads)]
    repeat(*(x.ctypes.data for x in memory[0]), 10)
    work = [[x.ctypes.data for x in arrays] for arrays in memory]
    seconds = fastest(threads, lambda i: repeat(*work[i], turns))
    return threads * turns * 2 * mr * panel * depth / seconds / 1e9


@numba.njit(nogil=True)
def four_streams(a: Any, b: Any, c: Any, d: Any) -> int:
    """Read four arrays side by side."""
    total = 0
    for i in range(len(a)):
        total += (a[i] ^ b[i]) + (c[i] ^ d[i])
    return total


def read(threads: int) -> float:
    """GB/s of reading 1 GiB, shared by the threads, four streams on each."""
    memory = np.ones(GIB // 8, dtype=np.int64).reshape(threads, 4, -1)
    four_streams(*memory[0, :, :64])
    return GIB / fastest(threads, lambda i: four_streams(*memory[i])) / 1e9


def main() -> None:
    """Measure all and print JSON."""
    threads = int(sys.argv[1])
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    found: dict[str, float | str] = {}
    for dtype in ("float32", "float64", "bfloat16"):
        if dtype != "bfloat16" or FEATURES.get("avx512bf16"):
            found[dtype] = registers(dtype, threads)
    try:
        found["tile"] = tile(threads)
    except Exception as error:  # an internal of scaledot: the other figures stand without it
        found["tile_missing"] = f"{type(error).__name__}: {error}"[:300]
    found["read"] = read(threads)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
