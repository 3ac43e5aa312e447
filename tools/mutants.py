"""Planted bugs, one at a time, each of which the tests must find: ``python tools/mutants.py``.

A mutant replaces one piece of text of the package and names the tests that must fail then. Work
goes on in a temporary copy. The exit code is 1 where a mutant survives or its text is not found
exactly once (the code has changed: adapt the mutant), 2 where the copy fails without any bug.
"""

from __future__ import annotations

import argparse
import dataclasses
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

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("src", "tests", "tools", "pyproject.toml", "README.md")
SECONDS = 300  # for the tests of one mutant
PYTEST = (
    "-n", "0", "-x", "-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:randomly",
    "-k", "not jax and not strict", "-m", "not models",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A bug: ``new`` in place of ``old``, which occurs once in ``file``; ``tests`` find it."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def in_package(name: str, file: str, old: str, new: str, *tests: str) -> Mutant:
    """Return a mutant of src/scaledot with tests named from their file, without ``test_``."""
    ids = tuple("tests/test_" + test.replace("::", ".py::test_", 1) for test in tests)
    return Mutant(name, f"src/scaledot/{file}", old, new, ids)


def by_case(name: str, file: str, old: str, new: str, *cases: str) -> Mutant:
    """Return a mutant that named cases of attention find, such as ``dense-causal``."""
    ids = (f"attention::named_case[numpy-{case}]" for case in cases)
    return in_package(name, file, old, new, *ids)


MUTANTS = (
    # From a product to a score
    by_case(
        "scale-forgotten", "_scores.py",
        "score = product * scale",
        "score = product", "dense-plain",
    ),
    by_case(
        "scale-without-root", "_spec.py",
        "scale = 1 / math.sqrt(d_k) if d_k else 0.0",
        "scale = 1 / d_k if d_k else 0.0", "dense-plain",
    ),
    by_case(
        "scale-zero-is-default", "_spec.py",
        "if options.scale is not None:",
        "if options.scale:", "dense-scale_zero",
    ),
    by_case(
        "softcap-after-bias", "_reference.py",
        """\
        before = _scores.logit(scores, spec.scale, spec.softcap, None, None, None, xp.tanh)
        bias = _finite_bias(xp, terms.bias, seen, dtype)
        scores = _scores.logit(before, 1.0, None, bias, terms.slopes, distance, xp.tanh)
""",
        """\
        before = _scores.logit(scores, spec.scale, None, None, None, None, xp.tanh)
        before = before + _finite_bias(xp, terms.bias, seen, dtype)
        scores = _scores.logit(before, 1.0, spec.softcap, None, terms.slopes, distance, xp.tanh)
""",
        "dense-bias_softcap_sinks_segments",
    ),
    by_case(
        "alibi-sign", "_scores.py",
        "score = score - slope * distance",
        "score = score + slope * distance", "dense-alibi",
    ),
    by_case(
        "alibi-signed-distance", "_reference.py",
        "xp.abs(q_pos - kv_pos)",
        "(q_pos - kv_pos)", "dense-chunk_alibi_window_dropout",
    ),
    in_package(
        "bias-overflows", "_reference.py",
        "bounded = xp.clip(bias, limits.min, limits.max)",
        "bounded = bias", "attention::bias_beyond_the_range_of_float32[dense]",
    ),
    by_case(
        "sum-of-finite-terms-excludes", "_reference.py",
        "scores = xp.where(fell, lowest, scores)",
        "pass", "dense-bias_falls",
    ),
    # Which keys are seen
    by_case(
        "causal-off-by-one", "_masks.py",
        "(kv_pos - q_pos <= right)",
        "(kv_pos - q_pos < right)", "dense-causal",
    ),
    by_case(
        "window-swapped", "_reference.py",
        "for x in (spec.left, spec.right))",
        "for x in (spec.right, spec.left))", "dense-window_both",
    ),
    in_package(
        "kv_len-ignored", "_spec.py",
        "kv_end = kv_offset + kv_count",
        "kv_end = kv_offset + spec.len_kv",
        "determinism::positions_beyond_32_bits[dense-kv_len-2147483645]",
    ),
    in_package(
        "kv_len-from-position-0", "_spec.py",
        "kv_end = kv_offset + kv_count",
        "kv_end = kv_count", "determinism::positions_beyond_32_bits[dense-kv_len-2147483645]",
    ),
    by_case(
        "mask-inverted", "_reference.py",
        "conditions.append(terms.mask)",
        "conditions.append(~terms.mask)", "dense-mask_key",
    ),
    by_case(
        "minus-infinity-does-not-exclude", "_reference.py",
        "conditions.append(terms.bias != -math.inf)",
        "pass", "dense-bias_excludes",
    ),
    by_case(
        "lowest-number-excludes", "_reference.py",
        "conditions.append(terms.bias != -math.inf)",
        "conditions.append(terms.bias > -1e38)", "dense-bias_minimum",
    ),
    by_case(
        "negative-segments-seen", "_masks.py",
        "(q_segment == kv_segment) & (kv_segment >= 0)",
        "q_segment == kv_segment", "dense-segments_negative",
    ),
    by_case(
        "block_mask-transposed", "_reference.py",
        "spread: Array = problem.block_mask",
        "spread: Array = xp.matrix_transpose(problem.block_mask)", "dense-block_mask",
    ),
    in_package(
        "block_mask-counted-in-tiles", "_reference.py",
        "np.asarray(indices, dtype=np.int64) // BLOCK_MASK",
        "np.arange(len(indices)) // BLOCK_MASK",
        "poison::hidden_keys_cannot_matter[blockwise-with_block_mask]",
    ),
    by_case(
        "default-q_offset-top-left", "_spec.py",
        "q_offset = kv_offset + (spec.len_kv if kv_count is None else kv_count) - spec.len_q",
        "q_offset = kv_offset", "dense-causal",
    ),
    by_case(
        "default-q_offset-without-kv_len", "_spec.py",
        "q_offset = kv_offset + (spec.len_kv if kv_count is None else kv_count) - spec.len_q",
        "q_offset = kv_offset + spec.len_kv - spec.len_q", "dense-kv_len_batch",
    ),
    # Softmax, values, states
    in_package(
        "maximum-before-masks", "_reference.py",
        "row_max = xp.max(scores, axis=-1, keepdims=True)",
        "row_max = xp.max(_masked_scores(xp, problem, None), axis=-1, keepdims=True)",
        "poison::hidden_keys_cannot_matter[dense-with_mask]",
    ),
    in_package(
        "lse-without-maximum", "_reference.py",
        "row_max + xp.log(row_sum)",
        "xp.log(row_sum)", "attention::named_case[numpy-dense-plain]",
    ),
    in_package(
        "nan-counts-as-empty", "_reference.py",
        "empty = row_sum == 0",
        "empty = ~(row_sum > 0)", "poison::infinite_scores_are_the_oracles[dense-numpy-query]",
    ),
    in_package(
        "nan-leaks-from-values", "_reference.py",
        "if not _not_finite(xp, v):",
        "if True:", "poison::hidden_keys_cannot_matter[dense-with_mask]",
    ),
    in_package(
        "nan-of-values-swallowed", "_reference.py",
        "lost = reached(xp.isnan(v)) | (up & down)",
        "lost = up & down", "poison::infinite_scores_are_the_oracles[dense-numpy-query]",
    ),
    by_case(
        "heads-interleaved", "_reference.py",
        """\
    rows = xp.reshape(rows, (*rows.shape[:-3], num_kv_heads, num_heads // num_kv_heads * m, k))
    product = xp.matmul(rows, columns)
    return xp.reshape(product, (*product.shape[:-3], num_heads, m, n))
""",
        """\
    rows = xp.reshape(rows, (*rows.shape[:-3], num_heads // num_kv_heads, num_kv_heads, m, k))
    product = xp.matmul(rows, columns[..., None, :, :, :])
    return xp.reshape(product, (*product.shape[:-4], num_heads, m, n))
""",
        "dense-gqa",
    ),
    in_package(
        "merge-weights-swapped", "_state.py",
        "_weighted(xp, a, weight_a / divisor) + _weighted(xp, b, weight_b / divisor)",
        "_weighted(xp, a, weight_b / divisor) + _weighted(xp, b, weight_a / divisor)",
        "attention::merge_is_commutative_to_the_bit_and_takes_empty_states[numpy]",
    ),
    in_package(
        "merge-overflows", "_state.py",
        "larger = xp.maximum(a.lse, b.lse)",
        "larger = xp.zeros_like(a.lse)", "shared_cases::shared_case[B65-blockwise]",
    ),
    in_package(
        "merge-of-empty-states-nan", "_state.py",
        "divisor = xp.where(empty, xp.ones_like(total), total)",
        "divisor = total", "shared_cases::shared_case[B10-blockwise]",
    ),
    in_package(
        "merge-swallows-nan", "_state.py",
        "empty = total == 0",
        "empty = ~(total > 0)", "attention::merge_keeps_nan",
    ),
    by_case(
        "sinks-scaled", "_reference.py",
        "return State(xp.zeros_like(sinks), sinks[..., 0])",
        "return State(xp.zeros_like(sinks), sinks[..., 0] * problem.spec.scale)", "dense-sinks",
    ),
    in_package(
        "sinks-in-every-tile", "_blockwise.py",
        "return functools.reduce(lambda a, b: merged(xp, a, b), parts)",
        "if problem.sinks is not None:\n"
        "        from scaledot._reference import keyless\n"
        "        parts = (merged(xp, part, keyless(xp, problem)) for part in parts)\n"
        "    return functools.reduce(lambda a, b: merged(xp, a, b), parts)",
        "determinism::blocks_against_dense[blockwise-mask, bias, sinks]",
    ),
    in_package(
        "weights-without-sinks", "_reference.py",
        "state = merged(xp, state, keyless(xp, problem))",
        "pass", "attention::named_case[numpy-dense-sinks]",
    ),
    in_package(
        "positions-of-rows-forgotten", "_spec.py",
        "terms=terms, rows=rows,\n        spec=",
        "terms=terms, rows=range(len(rows)),\n        spec=",
        "attention::weights_of_rows[numpy-dense]",
    ),
    by_case(
        "dropout-not-rescaled", "_reference.py",
        "1 / (1 - spec.dropout) if",
        "1.0 if", "dense-dropout",
    ),
    in_package(
        "dropout-keyed-by-tile", "_reference.py",
        "return _masks.dropout_keeps(row_a, row_b, kv_pos, threshold)",
        "return _masks.dropout_keeps(row_a, row_b, kv_pos - problem.columns[0], threshold)",
        "laws::laws_beyond_one_block[blockwise]",
    ),
    in_package(
        "one-seed-for-all-entries", "_spec.py",
        "np.arange(1, count + 1, dtype=u64)",
        "np.ones(count, dtype=u64)", "attention::named_case[numpy-dense-dropout]",
    ),
    in_package(
        "rounded-to-no-dtype", "_attention.py",
        "out = xp.astype(state.out, cast(Any, query).dtype, copy=False)",
        "out = state.out", "attention::named_case_in_other_dtypes[dense-plain-float16]",
    ),
    in_package(
        "query-scaled-in-place", "_reference.py",
        "scores = _products(xp, problem, dtype)",
        "problem.query[...] = problem.query * spec.scale\n"
        "    spec = replace(spec, scale=1.0)\n"
        "    scores = _products(xp, problem, dtype)",
        "attention::named_case[numpy-readonly-dense-plain]",
    ),
    # Tiles
    in_package(
        "last-visible-block-skipped", "_masks.py",
        "min(kv_count, last + right - kv_start + 1)",
        "min(kv_count, last + right - kv_start)",
        "laws::decoding_step_by_step_is_the_whole",
    ),
    in_package(
        "first-visible-block-skipped", "_blockwise.py",
        "range(low // BLOCK_KV * BLOCK_KV, high, BLOCK_KV)",
        "range(-(-low // BLOCK_KV) * BLOCK_KV, high, BLOCK_KV)",
        "attention::named_case[numpy-blockwise-window_long]",
    ),
    in_package(
        "key-heads-cut-like-query-heads", "_spec.py",
        "start // group, -(-stop // group)",
        "start, stop", "determinism::blocks_against_dense[blockwise-plain]",
    ),
    # Compositions, checks, surroundings
    in_package(
        "chunks-all-at-position-0", "_chunks.py",
        "kv_offset=chunk.kv_offset",
        "kv_offset=0", "attention::chunks_in_any_order_are_the_whole[numpy]",
    ),
    in_package(
        "packed-positions", "_varlen.py",
        "score_mod=_of_sequence(score_mod, number, 1),",
        "score_mod=_of_sequence(score_mod, number, 1),\n"
        "            q_offset=starts_q[number], kv_offset=starts_kv[number],",
        "shared_cases::shared_case[B42-blockwise]",
    ),
    in_package(
        "heads-not-joined", "_family.py",
        "joined = xp.moveaxis(heads, -3, -2)",
        "joined = heads", "multi_head::as_many_heads_of_keys_by_default",
    ),
    in_package(
        "heads-that-do-not-divide", "_checks.py",
        "if heads[0] % heads[1] if heads[1] else heads[0]:",
        "if not heads[1] and heads[0]:",
        "errors::arguments[attention-key-value-4 and 3 (query (2, 4, 5, 8), key (2, 3, 7, 8)]",
    ),
    in_package(
        "kv_len-beyond-the-keys", "_spec.py",
        "((known_count < 0) | (known_count > spec.len_kv))",
        "(known_count < 0)", "errors::arguments[attention-kv_len- to 8_0]",
    ),
    # Kernels, compiled anew with each bug
    by_case(
        "kernel-forgets-to-rescale", "_kernels/forward.py",
        "            row_sum[r] *= a\n",
        "", "kernels-long",
    ),
    by_case(
        "kernel-causal-off-by-one", "_kernels/forward.py",
        "min(count, p + call.right + 1)",
        "min(count, p + call.right)", "kernels-causal",
    ),
    by_case(
        "kernel-swaps-heads-of-a-group", "_kernels/forward.py",
        "head // call.group_size\n",
        "head % (call.num_heads // call.group_size)\n", "kernels-gqa",
    ),
    in_package(
        "kernel-multiplies-odd-values", "_kernels/pack.py",
        "            marks[j] = 1\n            marked += 1\n",
        "            break\n", "poison::hidden_keys_cannot_matter[kernels-with_kv_len]",
    ),
    in_package(
        "plot-loaded-at-import", "__init__.py",
        '__version__ = "',
        'import scaledot.plot\n\n__version__ = "',
        "imports::import_from_the_sources_loads_nothing_heavy",
    ),
)


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


def python(copy: Path, *arguments: str, bytecode: bool) -> subprocess.CompletedProcess[str]:
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
        check=False, timeout=SECONDS,
    )  # fmt: skip


def wrong_without_bugs(copy: Path, mutants: Sequence[Mutant]) -> str:
    """Return what is wrong about a copy without bugs, or an empty string."""
    found = python(copy, "-c", "import scaledot; print(scaledot.__file__)", bytecode=True)
    if found.returncode or copy not in Path(found.stdout.strip()).parents:
        return f"scaledot must be imported from {copy}, got:\n{found.stdout}{found.stderr}"
    tests = dict.fromkeys(test for mutant in mutants for test in mutant.tests)
    # Compiled modules are kept here, and only here: runs of mutants start in half the time.
    done = python(copy, "-m", "pytest", *PYTEST, "--tb=short", *tests, bytecode=True)
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
    chosen = [known[name] for name in given.names] or list(MUTANTS)
    if given.list:
        for mutant in chosen:
            print(f"{mutant.name:32}  {mutant.file:30}  {' '.join(mutant.tests)}")
        return 0
    return check(ROOT, chosen, given.jobs)


if __name__ == "__main__":
    sys.exit(main())
