"""Planted bugs, one at a time, each of which the tests must find: ``python tools/mutants.py``.

A mutant replaces one piece of text of the package and names the tests that must fail then. Work
goes on in a temporary copy. The exit code is 1 where a mutant survives or its text is not found
exactly once (the code has changed: adapt the mutant), 2 where the copy fails without any bug.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import planted_kernels
import planted_models
from planted import PACKAGE, Mutant

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("src", "tests", "tools", "pyproject.toml", "README.md")
SECONDS = 300  # for the tests of one mutant
PYTEST = (
    "-n", "0", "-x", "-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:randomly",
    "-k", "not jax and not strict", "-m", "not models",
)  # fmt: skip
MUTANTS = (*PACKAGE, *planted_models.MODELS, *planted_kernels.KERNELS)


def copied(root: Path, target: Path) -> Path:
    """Copy what the tests need, without caches; return the target."""
    target.mkdir()
    for name in COPIED:
        source = root / name
        if source.is_dir():
            ignore = shutil.ignore_patterns("__pycache__", ".*")
            shutil.copytree(source, target / name, ignore=ignore)
        else:
            shutil.copy2(source, target)
    return target


def python(
    copy: Path, *arguments: str, bytecode: bool, seconds: int | None = SECONDS
) -> subprocess.CompletedProcess[str]:
    """Run Python in a copy, where the copy's package comes before any other."""
    without = ("PYTEST_ADDOPTS", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")
    environment = {name: x for name, x in os.environ.items() if name not in without}
    paths = [str(copy / "src"), os.environ.get("PYTHONPATH", "")]
    environment |= {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "SCALEDOT_CACHE_DIR": str(copy / "kernels"),
        "OPENBLAS_NUM_THREADS": "2",  # a limit to 1 must be seen on any machine
        "COLUMNS": "200",
    }
    if not bytecode:
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
    return subprocess.run(
        [sys.executable, *arguments], cwd=copy, env=environment, capture_output=True, text=True,
        check=False, timeout=seconds,
    )  # fmt: skip


def wrong_without_bugs(copy: Path, mutants: Sequence[Mutant]) -> str:
    """Return what is wrong about a copy without bugs, or an empty string."""
    found = python(copy, "-c", "import scaledot; print(scaledot.__file__)", bytecode=True)
    if found.returncode or copy not in Path(found.stdout.strip()).parents:
        return f"scaledot must be imported from {copy}, got:\n{found.stdout}{found.stderr}"
    tests = dict.fromkeys(test for mutant in mutants for test in mutant.tests)
    # Compiled modules are kept here, and only here: runs of mutants start in half the time.
    done = python(
        copy, "-m", "pytest", *PYTEST, "--tb=short", *tests, bytecode=True, seconds=1200
    )
    return f"{done.stdout}{done.stderr}" if done.returncode else ""


def verdict(copy: Path, mutant: Mutant) -> tuple[bool, str]:
    """Plant one bug, run its tests, take it out; return whether it was found, and what happened."""
    path = copy / mutant.file
    before, times = path.read_text(encoding="utf-8"), path.stat()
    count = before.count(mutant.old)
    if count != 1:
        return False, f"the old text must occur once in {mutant.file}, found {count} times"
    path.write_text(before.replace(mutant.old, mutant.new), encoding="utf-8")
    # Another second than before: else compiled modules of the same length would count as current.
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns + 10**9))
    try:
        done = python(copy, "-m", "pytest", *PYTEST, "--tb=no", *mutant.tests, bytecode=False)
    except subprocess.TimeoutExpired:
        return False, f"no answer within {SECONDS} s"
    finally:
        path.write_text(before, encoding="utf-8")
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    if failed:
        return True, f"killed by {failed[0].removeprefix('FAILED ').partition(' - ')[0]}"
    if done.returncode == 0:
        return False, "SURVIVED"
    # A package that cannot even be imported is no bug that a test finds.
    last = (done.stdout + done.stderr).strip().splitlines()[-1:]
    return False, f"no test failed, but pytest ended with {done.returncode}: {' '.join(last)}"


def verdicts(copies: Sequence[Path], mutants: Sequence[Mutant]) -> Iterator[tuple[bool, str]]:
    """Verdicts in the order of the mutants, as many at a time as there are copies."""
    free: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for copy in copies:
        free.put(copy)

    def timed(mutant: Mutant) -> tuple[bool, str]:
        copy, start = free.get(), time.perf_counter()
        try:
            found, what = verdict(copy, mutant)
        finally:
            free.put(copy)
        return found, f"{time.perf_counter() - start:5.1f} s  {what}"

    with ThreadPoolExecutor(len(copies)) as pool:
        yield from pool.map(timed, mutants)


def check(root: Path, mutants: Sequence[Mutant], jobs: int) -> int:
    """Print a line for each mutant; return the exit code."""
    width = max((len(mutant.name) for mutant in mutants), default=0)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        place = Path(folder).resolve()
        first = copied(root, place / "0")
        wrong = wrong_without_bugs(first, mutants)
        if wrong:
            print(f"{wrong}\nThe tests must pass without a bug.")
            return 2
        others = [place / str(number) for number in range(1, min(jobs, len(mutants)))]
        for other in others:
            shutil.copytree(first, other)
        missed = 0
        for mutant, (found, what) in zip(mutants, verdicts([first, *others], mutants), strict=True):
            missed += not found
            print(f"{mutant.name:{width}}  {what}", flush=True)
    print(f"{len(mutants) - missed} of {len(mutants)} planted bugs found")
    return 1 if missed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description="Plant bugs that the tests must find.")
    parser.add_argument("names", nargs="*", help="mutants to run; none is all")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    parser.add_argument(
        "--every", type=int, default=1, metavar="N",
        help="of those in kernels, which are compiled anew, only every Nth",
    )
    affinity = getattr(os, "sched_getaffinity", None)
    processors = len(affinity(0)) if affinity else os.cpu_count() or 1
    parser.add_argument("--jobs", type=int, default=processors, help="how many at a time")
    given = parser.parse_args(arguments)
    known = {mutant.name: mutant for mutant in MUTANTS}
    unknown = [name for name in given.names if name not in known]
    if unknown:
        parser.error(f"names must be mutants, got {', '.join(unknown)}; --list prints them")
    if given.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {given.jobs}")
    if given.every < 1:
        parser.error(f"--every must be at least 1, got {given.every}")
    some = (*PACKAGE, *planted_models.MODELS, *planted_kernels.KERNELS[:: given.every])
    chosen = [known[name] for name in given.names] or list(some)
    if given.list:
        for mutant in chosen:
            print(f"{mutant.name:32}  {mutant.file:30}  {' '.join(mutant.tests)}")
        return 0
    return check(ROOT, chosen, given.jobs)


if __name__ == "__main__":
    sys.exit(main())
