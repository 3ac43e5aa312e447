"""The process of one peer: reads commands, a JSON object a line, and answers each in one line.

    python worker.py PACKAGE PEER THREADS

``prepare`` builds every variant of a case that the peer has, calls it, and returns the rows to
check; ``run`` times calls of one. Whatever libraries print goes to stderr.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.metadata
import json
import os
import platform
import re
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import gradients
from workloads import Case

# A first call of this many seconds is not repeated for having compiled: it did other things too.
LONG = 10.0
VARIANTS: dict[str, Any] = {}  # name -> call, of the case prepared last


def status_kib(path: str, field: str) -> int:
    """A figure of /proc, in KiB."""
    for line in Path(path).read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise KeyError(field)


def settle() -> None:
    """Give back what is not in use: memory kept for later calls would hide what they need."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def measured(call: Any) -> tuple[Any, float, float]:
    """Result of a call, its seconds, and MiB by which resident memory rose above that before."""
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before, start = status_kib("/proc/self/status", "VmRSS"), time.perf_counter()
    raw = call()
    seconds = time.perf_counter() - start
    return raw, seconds, (status_kib("/proc/self/status", "VmHWM") - before) / 1024


def try_variant(plugin: Any, build: Any, case: Case, folder: Path) -> dict[str, Any]:
    """Build a variant and call it; keep it, and report it."""
    settle()
    start = time.perf_counter()
    call, to_numpy = build()
    raw, seconds, extra = measured(call)
    first = time.perf_counter() - start
    if plugin.FIRST_CALL_COMPILES and seconds < LONG:
        del raw
        settle()
        raw, seconds, extra = measured(call)
    result = to_numpy(raw)
    trained = case.passes != "forward"
    rows = gradients.answer(case, result, folder) if trained else case.answer(result)
    extra -= case.result_bytes / 2**20
    del raw, result
    usual = min([seconds, *(timed(call) for _ in range(2 if seconds < 0.5 else 0))])
    return {"call": call, "rows": rows, "first_s": first, "extra_mib": extra, "usual_s": usual}


def timed(call: Any) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def prepare(plugin: Any, case: Case, folder: Path) -> dict[str, Any]:
    """Build and call all variants of a case."""
    VARIANTS.clear()
    gc.collect()
    answer: dict[str, Any] = {"variants": {}, "failed": {}}
    for name, build in plugin.variants(case, case.read_inputs(folder)).items():
        try:
            report = try_variant(plugin, build, case, folder)
        except Exception as error:  # of a foreign library: any kind
            answer["failed"][name] = explained(error)
            continue
        VARIANTS[name] = report.pop("call")
        answer["variants"][name] = report
    return answer


def run(variant: str, count: int, limit: float) -> dict[str, Any]:
    """Time up to ``count`` calls of one variant, for ``limit`` seconds; the others are forgotten.

    Where several calls fit, one more comes first: others had the caches meanwhile.
    """
    for other in set(VARIANTS) - {variant}:
        del VARIANTS[other]
    call, seconds = VARIANTS[variant], []
    gc.collect()
    if count > 1:
        call()
    while not seconds or (len(seconds) < count and sum(seconds) < limit):
        seconds.append(timed(call))
    return {"seconds": seconds}


def explained(error: BaseException) -> str:
    """Kind and first words of an error."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}"[:150]


def versions(plugin: Any) -> dict[str, str]:
    """Versions of what the plug-in requires, as they are here."""
    found = {"python": platform.python_version()}
    for requirement in plugin.REQUIREMENTS:
        package = re.split(r"[=<>~\[]", requirement)[0]
        found[package] = importlib.metadata.version(package)
    return found


def main() -> None:
    """Serve until stdin closes."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: not to outlive a killed parent
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # What does not fit fails here, with an error, and takes nobody else's memory.
    limit = status_kib("/proc/meminfo", "MemAvailable") * 1024 * 3 // 4
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        plugin = importlib.import_module(".".join(sys.argv[1:3]))
        plugin.start(int(sys.argv[3]))
        answer: dict[str, Any] = {"versions": versions(plugin)}
    except Exception as error:
        answer = {"error": explained(error)}
    print(json.dumps(answer), file=channel, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if command.pop("do") == "prepare":
                answer = prepare(plugin, Case(**command["case"]), Path(command["folder"]))
            else:
                answer = run(**command)
        except Exception as error:
            answer = {"error": explained(error)}
        print(json.dumps(answer), file=channel, flush=True)


if __name__ == "__main__":
    main()
