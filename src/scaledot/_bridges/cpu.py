"""From arrays in this machine's memory, of NumPy, PyTorch or JAX, to the kernels and back."""

from __future__ import annotations

import functools
import itertools
import math
import sys
from dataclasses import fields, replace
from typing import Any, NamedTuple, cast

import numpy as np

from scaledot import _arrays, _masks, _threads
from scaledot._blockwise import Tiles
from scaledot._errors import value_error
from scaledot._kernels import decode, forward, layout, mods, options, room, threads, weights
from scaledot._kernels.call import CALL
from scaledot._kernels.jit import Kernel
from scaledot._kernels.kinds import BLOCK_KV, subs_of
from scaledot._kernels.pack import DTYPES
from scaledot._kernels.simd import DOUBLE, SINGLE, Vectors
from scaledot._kernels.target import HOST
from scaledot._spec import Problem, Spec, Terms
from scaledot._state import State
from scaledot._typing import Array

NO_LIMIT = 2**62
SMALL = 2**15
"""Scores below which a call stays on the caller's thread."""


class ModError(ValueError):
    """A user's function raised an error inside a kernel."""


class Memory(NamedTuple):
    """Where an array lies: address, shape, strides in bytes, code of the dtype."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: int


def memory(x: Array) -> Memory:
    """Where the elements of a NumPy array or a CPU tensor lie; nothing is copied."""
    code = DTYPES.get(_arrays.dtype_name(x), -1)
    if isinstance(x, np.ndarray):
        return Memory(x.__array_interface__["data"][0], x.shape, x.strides, code)
    size = x.element_size()
    return Memory(x.data_ptr(), tuple(x.shape), tuple(size * s for s in x.stride()), code)


@functools.lru_cache(maxsize=512)
def _places(shape: tuple[int, ...], strides: tuple[int, ...], heads: tuple[int, ...]) -> Any:
    """Bytes from an array's first element to the first row of each index of ``heads``.

    ``shape`` and ``strides`` are those of the array's leading axes; it broadcasts to ``heads``.
    """
    total = np.zeros(heads, dtype=np.int64)
    for axis, (length, stride) in enumerate(zip(shape, strides, strict=True)):
        if length != 1:
            steps = np.arange(length, dtype=np.int64) * stride
            total += steps.reshape((-1,) + (1,) * (len(heads) - axis - 1))
    total = total.reshape(-1)
    total.setflags(write=False)
    return total


@functools.lru_cache(maxsize=64)
def _constant(value: int, count: int) -> Any:
    """Read-only array of one number."""
    x = np.full(count, value, dtype=np.int64)
    x.setflags(write=False)
    return x


class Plan(NamedTuple):
    """How a call is cut: which kernel, in what numbers, into how many tasks."""

    kernel: Kernel
    vectors: Vectors
    tasks: int
    scratch: int  # bytes of each worker
    parts: int  # of the keys, merged at the end; 0 where one task sees all keys


def plan(spec: Spec) -> Plan:
    """Kernel and tasks of a call; how they are cut follows from its lengths and dtype alone."""
    entries, double = math.prod(spec.lead), spec.dtype == "float64"
    vectors = DOUBLE if double else SINGLE
    shape = (vectors.lanes, vectors.size, spec.d_k, spec.d_v)
    if spec.len_q <= decode.FEW:
        kernel = {
            "float64": decode.decode_double, "float32": decode.decode_single,
            "float16": decode.decode_half,
            "bfloat16": decode.decode_pairs if HOST.bf16 else decode.decode_brain,
        }[spec.dtype]  # fmt: skip
        parts = max(1, -(-spec.len_kv // room.part_length(spec.len_kv)))
        scratch = room.room_bytes(*shape, spec.group_size * spec.len_q)
        return Plan(kernel, vectors, entries * spec.num_kv_heads * parts, scratch, parts)
    blocks = -(-spec.len_q // (subs_of(spec.len_kv) * HOST.nr * vectors.lanes))
    kernel = forward.attend_double if double else forward.attend_single
    if spec.dtype == "bfloat16" and HOST.bf16:
        kernel = forward.attend_pairs
    scratch = layout.scratch_bytes(*shape, spec.len_q)
    return Plan(kernel, vectors, entries * spec.num_heads * blocks, scratch, 0)


def _plan_of_weights(spec: Spec) -> Plan:
    double = spec.dtype == "float64"
    vectors, kernel = (DOUBLE, weights.weigh_double) if double else (SINGLE, weights.weigh_single)
    if spec.dtype == "bfloat16" and HOST.bf16:
        kernel = weights.weigh_pairs
    span = HOST.nr * vectors.lanes
    tasks = math.prod(spec.lead) * spec.num_heads * -(-spec.len_q // span)
    scratch = layout.scratch_bytes(
        vectors.lanes, vectors.size, spec.d_k, spec.d_v, spec.len_q
    )
    return Plan(kernel, vectors, tasks, scratch, 0)


def run(problem: Problem, *, rounded: bool) -> State:
    """Attention without sinks, by the kernels.

    With ``rounded``, ``out`` comes in the dtype of query, and there is no ``lse``.
    """
    spec = problem.spec
    shape, numbers = spec.scores_shape[:-1], _numbers(spec)
    here = _on_host(problem)
    out = _empty(here, (*shape, spec.d_v), here.query.dtype if rounded else numbers)
    lse = None if rounded else np.empty(shape, dtype=numbers)
    if math.prod(shape):
        _launch(plan(here.spec), here, {"out": out, "lse": lse})
    return State(*(None if x is None else _back(x, problem) for x in (out, lse)))


def weigh(problem: Problem) -> Array:
    """Attention weights of the queries of a problem, sinks among them."""
    spec = problem.spec
    here = _on_host(problem)
    out = np.empty(spec.scores_shape, dtype=_numbers(spec))
    sinks = None
    if here.sinks is not None:
        sinks = np.asarray(_arrays.host(here.sinks), dtype=np.float64).reshape(-1)
        sinks = np.ascontiguousarray(sinks)
    for start, stop in _runs(here) if out.size else ():
        results = {"out": out[..., start:stop, :], "lse": None, "sinks": sinks}
        part = here if (start, stop) == (0, spec.len_q) else here.cut(-2, start, stop)
        _launch(_plan_of_weights(part.spec), part, results)
    return _back(out, problem)


def _runs(problem: Problem) -> list[tuple[int, int]]:
    """Cut chosen rows where they do not follow each other, if anything depends on where they are.

    Kernels take the queries of a call to be neighbours.
    """
    spec, rows = problem.spec, np.asarray(problem.rows)
    somewhere = (
        spec.left is None and spec.right is None and problem.terms.slopes is None
        and problem.score_mod is None and problem.mask_mod is None and problem.block_mask is None
    )  # fmt: skip
    cuts = [] if somewhere else [int(i) for i in np.flatnonzero(np.diff(rows) != 1) + 1]
    return list(itertools.pairwise([0, *cuts, spec.len_q]))


def _numbers(spec: Spec) -> Any:
    return np.dtype(np.float64 if spec.dtype == "float64" else np.float32)


def _empty(problem: Problem, shape: tuple[int, ...], dtype: Any) -> Any:
    if isinstance(dtype, np.dtype):
        return np.empty(shape, dtype=dtype)
    return sys.modules["torch"].empty(shape, dtype=dtype)


def _on_host(problem: Problem) -> Problem:
    """The same call on NumPy arrays, where it is one on JAX arrays: views of their memory."""
    if problem.spec.library != "jax":
        return problem

    def view(x: Any) -> Any:
        return np.asarray(x) if _arrays.library(x) == "jax" else x

    terms = replace(
        problem.terms, **{f.name: view(getattr(problem.terms, f.name)) for f in fields(Terms)}
    )
    names = ("query", "key", "value", "block_mask", "sinks")
    return replace(
        problem, terms=terms, spec=replace(problem.spec, library="numpy"),
        **{name: view(getattr(problem, name)) for name in names},
    )


def _back(x: Any, problem: Problem) -> Array:
    """A result in the library of the problem, in its place."""
    if problem.spec.library == "torch":
        return sys.modules["torch"].from_numpy(x) if isinstance(x, np.ndarray) else x
    if problem.spec.library == "jax":
        return sys.modules["jax"].device_put(x, next(iter(problem.query.devices())))
    return cast(Array, x)


def _launch(chosen: Plan, problem: Problem, results: dict[str, Any]) -> None:
    """Run a kernel on as many threads as there is work for."""
    spec = problem.spec
    small = math.prod(spec.scores_shape) * (spec.d_k + spec.d_v) < SMALL
    num_threads = 1 if small else max(1, min(_threads.get_num_threads(), chosen.tasks))
    record = np.zeros(1, dtype=CALL)
    arrays = {
        "counter": np.zeros(2, dtype=np.int64),  # and the status
        "scratch": np.empty(num_threads * chosen.scratch, dtype=np.uint8),
        **_option_arrays(problem, results["out"]), **_part_arrays(chosen, spec),
    }  # fmt: skip
    known = _fields(problem, results["out"])
    known.update({name: x.ctypes.data for name, x in arrays.items()})
    known.update({name: x.ctypes.data for name, x in results.items()
                  if x is not None and name != "out"})  # fmt: skip
    known["scratch_bytes"] = chosen.scratch
    known["status"] = known["counter"] + 8
    held = [problem, arrays, results, record]
    _add_mods(problem, arrays, known, held)
    known |= options.functions(known, double=chosen.vectors is DOUBLE)
    _go(chosen.kernel, record, known, arrays["counter"], num_threads, held)
    if arrays["counter"][1]:
        error = value_error(
            "score_mod and mask_mod must work for every position of the call",
            "one that raised an error, for example an index out of bounds",
            "impl='blockwise' calls it on arrays and shows the error.",
        )
        raise ModError(str(error))


def _go(
    kernel: Kernel, record: Any, known: dict[str, Any], counter: Any, num_threads: int, held: Any
) -> None:
    known["address"] = record.ctypes.data
    record[0] = tuple(known.get(name, 0) for name in CALL.names)  # type: ignore[union-attr]

    def stop() -> None:
        counter[0] = NO_LIMIT  # workers end after the task that they are at

    status = threads.run(kernel.address, record.ctypes.data, num_threads, stop, held)
    if status == threads.LOST:
        raise RuntimeError("the process was forked, by a signal handler, in the midst of the call")


def mod_obstacle(problem: Problem) -> str:
    """Why a mod of a problem cannot be compiled; empty where all can."""
    try:
        _compiled(problem)
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


def _compiled(problem: Problem) -> tuple[mods.Mod | None, mods.Mod | None]:
    score_mod, mask_mod = problem.score_mod, problem.mask_mod
    precision: Any = "float64" if problem.spec.dtype == "float64" else "float32"
    return (
        None if score_mod is None else mods.compile_score_mod(score_mod, precision),
        None if mask_mod is None else mods.compile_mask_mod(mask_mod),
    )


def _add_mods(
    problem: Problem, arrays: dict[str, Any], known: dict[str, Any], held: list[Any]
) -> None:
    """Compile mods; class the tiles of mask_mod once, for all heads and batches that it ignores."""
    spec = problem.spec
    score_mod, mod = _compiled(problem)
    held += [score_mod, mod]
    if score_mod is not None:
        known["score_mod"] = score_mod.address
    if mod is None or not spec.len_kv:
        return
    known["mask_mod"] = mod.address
    vectors = DOUBLE if spec.dtype == "float64" else SINGLE
    span = HOST.nr * vectors.lanes
    tiles = -(-spec.len_q // span) * -(-spec.len_kv // BLOCK_KV)
    terms = problem.terms
    # Entries whose positions differ see other numbers, whatever the function reads.
    by_entry = mod.uses_batch or max(np.size(x) for x in (terms.q_start, terms.kv_start)) > 1
    entries = math.prod(spec.lead) if by_entry else 1
    heads = spec.num_heads if mod.uses_head else 1
    arrays["classes"] = np.empty(entries * heads * tiles, dtype=np.uint8)
    known["classes"] = arrays["classes"].ctypes.data
    known["class_head"] = tiles if mod.uses_head else 0
    known["class_entry"] = heads * tiles if by_entry else 0
    known["num_classes"] = len(arrays["classes"])
    kernel = options.class_double if vectors is DOUBLE else options.class_single
    workers = max(1, min(_threads.get_num_threads(), len(arrays["classes"])))
    bytes_of_tiles = np.empty(workers * layout.CLASS_BYTES, dtype=np.uint8)
    counter = np.zeros(1, dtype=np.int64)
    record = np.zeros(1, dtype=CALL)
    own = {**known, "scratch": bytes_of_tiles.ctypes.data, "scratch_bytes": layout.CLASS_BYTES,
           "counter": counter.ctypes.data}  # fmt: skip
    _go(kernel, record, own, counter, workers, [held, arrays, bytes_of_tiles, counter, record])


def _part_arrays(chosen: Plan, spec: Spec) -> dict[str, Any]:
    """Room for the results of parts of the keys."""
    if chosen.parts <= 1:
        return {}
    rows = math.prod(spec.lead) * spec.num_heads * chosen.parts * spec.len_q
    return {
        "part_out": np.empty(rows * spec.d_v, dtype=_numbers(spec)),
        "part_lse": np.empty(rows, dtype=_numbers(spec)),
        "finished": np.zeros(math.prod(spec.lead) * spec.num_kv_heads, dtype=np.int64),
    }


def _fields(problem: Problem, out: Any) -> dict[str, Any]:
    """Describe the problem to the kernel: all but addresses of arrays made for it."""
    spec, terms = problem.spec, problem.terms
    query, key, value = (memory(x) for x in (problem.query, problem.key, problem.value))
    result = memory(out)
    blocks = problem.block_mask
    known: dict[str, Any] = {
        "first_row": _first_row(problem), "block_rows": 0 if blocks is None else blocks.shape[-2],
        "num_entries": math.prod(spec.lead), "num_heads": spec.num_heads,
        "group_size": spec.group_size, "len_q": spec.len_q, "len_kv": spec.len_kv,
        "d_k": spec.d_k, "d_v": spec.d_v, "dtype": query.dtype, "out_dtype": result.dtype,
        "left": NO_LIMIT if spec.left is None else spec.left,
        "right": NO_LIMIT if spec.right is None else spec.right,
        "query": query.address, "q_row": query.strides[-2], "q_column": query.strides[-1],
        "key": key.address, "k_row": key.strides[-2], "k_column": key.strides[-1],
        "value": value.address, "v_row": value.strides[-2], "v_column": value.strides[-1],
        "out": result.address, "out_row": result.strides[-2],
        "threshold": _masks.dropout_threshold(spec.dropout),
        "kept_scale": 1 / (1 - spec.dropout) if spec.dropout < 1 else 0.0,
        "scale": spec.scale, "softcap": _softcap(spec),
    }  # fmt: skip
    for name in ("mask", "bias"):
        x = getattr(terms, name)
        if x is not None:
            found = memory(x)
            last = zip(found.shape[-2:], found.strides[-2:], strict=True)
            row, column = (0 if n == 1 else s for n, s in last)
            known |= {name: found.address, f"{name}_row": row, f"{name}_column": column}
            known["bias_dtype"] = found.dtype if name == "bias" else 0
    return known


def _first_row(problem: Problem) -> int:
    return int(problem.rows[0]) if len(problem.rows) else 0


def _softcap(spec: Spec) -> float:
    """Cap of the scores, 0 for none; one beyond float32's numbers changes none of them."""
    highest = np.finfo(np.float64 if spec.dtype == "float64" else np.float32).max
    return spec.softcap if spec.softcap is not None and spec.softcap <= highest else 0.0


def _option_arrays(problem: Problem, out: Any) -> dict[str, Any]:
    """Positions, places and options that the kernel reads, as contiguous arrays."""
    spec, terms = problem.spec, problem.terms
    entries = math.prod(spec.lead)
    heads, key_heads = (*spec.lead, spec.num_heads), (*spec.lead, spec.num_kv_heads)

    def places(x: Array, target: tuple[int, ...]) -> Any:
        found = memory(x)
        return _places(found.shape[:-2], found.strides[:-2], target)

    arrays = {
        "q_start": _per_entry(terms.q_start + _first_row(problem), spec), "kv_start": _per_entry(terms.kv_start, spec),
        "q_count": _constant(spec.len_q, entries),
        "kv_count": _constant(spec.len_kv, entries) if terms.kv_count is None
        else _per_entry(terms.kv_count, spec),
        "out_places": places(out, heads),
        "q_places": places(problem.query, heads),
        "k_places": places(problem.key, key_heads), "v_places": places(problem.value, key_heads),
    }  # fmt: skip
    if terms.mask is not None:
        arrays["mask_places"] = places(terms.mask, heads)
    if terms.bias is not None:
        arrays["bias_places"] = places(terms.bias, heads)
    if terms.slopes is not None:
        arrays["slopes"] = np.asarray(_arrays.host(terms.slopes), dtype=np.float64).reshape(-1)
    if terms.q_segment is not None:
        arrays["segment_q"], arrays["segment_kv"] = _segments(problem)
    if spec.dropout:
        arrays["head_keys"] = _head_keys(problem)
    if problem.block_mask is not None:
        arrays["blocks"] = _blocks(problem, heads)
    return {name: np.ascontiguousarray(x) for name, x in arrays.items()}


def _per_entry(x: Any, spec: Spec) -> Any:
    """Number of each entry of the flattened leading axes."""
    x = np.asarray(x, dtype=np.int64)
    if x.size == 1:
        return _constant(int(x.item()), math.prod(spec.lead))
    return np.broadcast_to(x.reshape(x.shape[: len(spec.lead)]), spec.lead).reshape(-1)


def _segments(problem: Problem) -> list[Any]:
    """Segment ids of both sides, (lead, length), as int64."""
    spec, sides = problem.spec, []
    terms = problem.terms
    given = [np.asarray(_arrays.host(x)) for x in (terms.q_segment, terms.kv_segment)]
    if any(x.dtype == np.uint64 for x in given):  # only which are equal matters
        both = np.concatenate([x.reshape(-1).astype(np.uint64) for x in given])
        negative = np.concatenate([(x < 0).reshape(-1) for x in given])
        numbered = np.where(negative, -1, np.unique(both, return_inverse=True)[1])
        halves = np.split(numbered, [given[0].size])
        given = [half.reshape(x.shape) for half, x in zip(halves, given, strict=True)]
    for ids, length in zip(given, (spec.len_q, spec.len_kv), strict=True):
        x = ids.astype(np.int64).reshape(*ids.shape[:-3], ids.shape[-2] * ids.shape[-1])
        sides.append(np.broadcast_to(x, (*spec.lead, length)))
    return sides


def _head_keys(problem: Problem) -> Any:
    """Two hash keys of dropout for each pair, before the query's position is mixed in."""
    spec, terms = problem.spec, problem.terms
    low, high = (np.asarray(_arrays.host(x)) for x in (terms.seed_low, terms.seed_high))
    head = np.arange(spec.num_heads, dtype=np.int32)[:, None, None]
    first, second = _masks.dropout_head_keys(low, high, head)
    shape = (*spec.lead, spec.num_heads, 1, 1)
    pair = [np.broadcast_to(x, shape).reshape(-1) for x in (first, second)]
    return np.stack(pair, axis=1).view(np.uint32)


def _blocks(problem: Problem, heads: tuple[int, ...]) -> Any:
    """Block mask of each pair."""
    blocks = np.asarray(_arrays.host(problem.block_mask))
    return np.broadcast_to(blocks, (*heads, *blocks.shape[-2:]))


def tiles(problem: Problem) -> Tiles:
    """Count the work and the memory of `run` without doing it."""
    spec, terms = problem.spec, problem.terms
    chosen = plan(spec)
    rows = subs_of(spec.len_kv) * HOST.nr * chosen.vectors.lanes
    if chosen.parts:
        rows = spec.len_q
    counts = np.asarray(spec.len_kv) if terms.kv_count is None else terms.kv_count
    start, count = np.broadcast_arrays(terms.q_start - terms.kv_start, counts)
    start, count = (x.reshape(-1, 1) for x in (start, count))
    first = np.arange(0, spec.len_q, max(1, rows))
    last = np.minimum(first + rows, spec.len_q) - 1
    left, right = (NO_LIMIT if x is None else x for x in (spec.left, spec.right))
    low = np.clip(start + first - left, 0, count)
    high = np.maximum(low, np.clip(start + last + right + 1, 0, count))
    done = np.where(high > low, -(-high // BLOCK_KV) - low // BLOCK_KV, 0)
    heads = math.prod(spec.lead) * spec.num_heads
    repeat = heads // max(1, len(start))  # entries that share their positions, and heads
    total = heads * len(first) * -(-spec.len_kv // BLOCK_KV)
    scores = int(((last - first + 1) * (high - low)).sum()) * repeat
    run_tiles = int(done.sum()) * repeat
    return Tiles(rows, BLOCK_KV, run_tiles, total - run_tiles, scores, _bytes(problem, chosen))


def _bytes(problem: Problem, chosen: Plan) -> int:
    """Bytes held during the call: scratch memory of the threads, parts, wide results."""
    spec = problem.spec
    size = chosen.vectors.size
    rows = math.prod(spec.scores_shape[:-1])
    parts = rows * chosen.parts * (spec.d_v + 1) * size if chosen.parts > 1 else 0
    # Sinks are merged with results of the accumulation dtype, by NumPy.
    wide = rows * size * (1 + 3 * spec.d_v) if problem.sinks is not None else 0
    segments = 0 if problem.terms.q_segment is None else spec.len_q + spec.len_kv
    workers = max(1, min(_threads.get_num_threads(), chosen.tasks))
    return workers * chosen.scratch + parts + wide + 8 * math.prod(spec.lead) * segments
