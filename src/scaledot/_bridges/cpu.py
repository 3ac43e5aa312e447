"""From arrays in this machine's memory, of NumPy, PyTorch or JAX, to the kernels and back.

`prepare` describes a call to a kernel but for the addresses of its arrays; `run` runs it on arrays
that lie as those did.
"""

from __future__ import annotations

import itertools
import math
import sys
from dataclasses import fields, replace
from typing import Any, NamedTuple, cast

import numpy as np

from scaledot import _arrays, _launch, _masks
from scaledot._blockwise import Tiles
from scaledot._kernels import decode, forward, layout, mods, options, room, weights
from scaledot._kernels.jit import Kernel
from scaledot._kernels.kinds import BLOCK_KV, block_q
from scaledot._kernels.pack import DTYPES
from scaledot._kernels.simd import DOUBLE, SINGLE, Vectors
from scaledot._kernels.target import HOST
from scaledot._kernels.threads import NO_LIMIT
from scaledot._launch import (
    Memory,
    Prepared,
    address,
    by_token,
    in_order,
    launch,
    memory,
    num_workers,
    packed,
)
from scaledot._spec import Problem, Spec, Terms
from scaledot._state import State
from scaledot._typing import Array

ModError = _launch.ModError
FLOAT32_MAX = float(np.finfo(np.float32).max)


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
    if spec.len_q <= decode.few(vectors.lanes):
        kernel = {
            "float64": decode.decode_double, "float32": decode.decode_single,
            "float16": decode.decode_half,
            "bfloat16": decode.decode_pairs if HOST.bf16 else decode.decode_brain,
        }[spec.dtype]  # fmt: skip
        parts = room.num_parts(spec.len_kv)
        scratch = room.room_bytes(*shape, spec.group_size * spec.len_q)
        return Plan(kernel, vectors, entries * spec.num_kv_heads * parts, scratch, parts)
    blocks = -(-spec.len_q // block_q(vectors.lanes, spec.len_kv))
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


def run(call: Prepared, query: Array, key: Array, value: Array, mask: Any, bias: Any) -> State:
    """Attention without sinks on NumPy arrays or CPU tensors, as prepared."""
    if call.by_token:
        *lead, heads, rows, width = call.shape
        out = query.new_empty((*lead, rows, heads, width)).transpose(-3, -2)
        if call.tasks:
            launch(call, query, key, value, mask, bias, out)
        return State(out, None)
    out, lse = results(call.shape, call.numbers, call.lse, query)
    if call.tasks:
        launch(call, query, key, value, mask, bias, out, lse)
    if isinstance(query, np.ndarray):
        return State(out, lse)
    return State(*(
        sys.modules["torch"].from_numpy(x) if isinstance(x, np.ndarray) else x for x in (out, lse)
    ))  # fmt: skip


def results(shape: tuple[int, ...], numbers: Any, sums: Any, query: Array) -> tuple[Any, Any]:
    """Room for ``out`` and ``lse``, of these dtypes; None is that of query, and no lse."""
    lse = None if sums is None else np.empty(shape[:-1], dtype=sums)
    if numbers is None and not isinstance(query, np.ndarray):
        return query.new_empty(shape), lse
    return np.empty(shape, dtype=query.dtype if numbers is None else numbers), lse


def prepare(problem: Problem, *, rounded: bool, with_lse: bool = False) -> Prepared:
    """Everything about a call but where its arrays lie; mods are compiled.

    With ``rounded``, ``out`` comes in the dtype of query, and ``lse`` only if it is wanted.
    """
    spec, sums = problem.spec, numbers_of(problem.spec)
    shape, numbers = (*spec.scores_shape[:-1], spec.d_v), None if rounded else sums
    joins = rounded and not with_lse and _lies_by_token(problem.query)
    place = by_token if joins else in_order
    call = prepared(problem, plan(spec), place(shape, *_item(spec, numbers)), numbers)
    return call._replace(lse=sums if with_lse else call.lse, by_token=joins)


def _lies_by_token(query: Array) -> bool:
    """Whether heads of a token are neighbours in a tensor (..., num_heads, len_q, d_k).

    Its result lies so too, as that of PyTorch's own function: models join the heads of a token,
    without a copy then.
    """
    if isinstance(query, np.ndarray) or query.shape[-3] == 1 or query.shape[-2] == 1:
        return False
    return bool(query.stride(-3) < query.stride(-2))


def _item(spec: Spec, numbers: Any) -> tuple[int, int]:
    """Bytes of a number in the result, and the code of its dtype."""
    name = spec.dtype if numbers is None else numbers.name
    return _arrays.itemsize(name), DTYPES[name]


def prepared(
    problem: Problem, chosen: Plan, out: Memory, numbers: Any, **own: Any
) -> Prepared:
    """Fill a record in; ``own`` are arrays and numbers instead of those that follow from shapes."""
    spec = problem.spec
    arrays = option_arrays(problem, out)
    arrays |= {name: x for name, x in own.items() if isinstance(x, np.ndarray)}
    known = {
        **fields_of(problem, out), "scratch_bytes": chosen.scratch, "parts": chosen.parts,
        "most_rows": spec.group_size * spec.len_q,
        **{name: x for name, x in own.items() if name not in arrays},
    }  # fmt: skip
    keep = laid_out(arrays, known)
    keep += add_mods(problem, known)
    known |= option_functions(known, chosen.vectors)
    return Prepared(
        chosen.kernel, packed(known), keep, chosen.tasks if math.prod(out.shape[:-1]) else 0,
        _work(spec), chosen.scratch, _part_bytes(chosen, spec), out.shape, numbers, numbers,
        width=spec.d_k + spec.d_v,
    )  # fmt: skip


def _work(spec: Spec) -> int:
    """Multiply-adds of a call that sees all keys."""
    return math.prod(spec.scores_shape) * (spec.d_k + spec.d_v)


def option_functions(known: dict[str, Any], vectors: Vectors) -> dict[str, int]:
    """Addresses of the native functions that the options of a call need."""
    return options.functions(known, double=vectors is DOUBLE)


def laid_out(arrays: dict[str, Any], known: dict[str, Any]) -> list[Any]:
    """Add the addresses of arrays; those of int64 are put into one, which is cheaper."""
    integers = {name: x.reshape(-1) for name, x in arrays.items() if x.dtype == np.int64}
    block = np.concatenate([*integers.values()])
    place = address(block)
    for name, x in integers.items():
        known[name] = place
        place += x.nbytes
    others = {n: np.ascontiguousarray(x) for n, x in arrays.items() if n not in integers}
    known |= {name: address(x) for name, x in others.items()}
    return [block, others]


def _part_bytes(chosen: Plan, spec: Spec) -> tuple[int, int, int]:
    """Room for the results of parts of the keys."""
    if chosen.parts <= 1:
        return 0, 0, 0
    entries, size = math.prod(spec.lead), chosen.vectors.size
    rows = entries * spec.num_heads * chosen.parts * spec.len_q
    out, lse = (-(-n * size // layout.LINE) * layout.LINE for n in (rows * spec.d_v, rows))
    return out, lse, 8 * entries * spec.num_kv_heads


def weigh(problem: Problem) -> Array:
    """Attention weights of the queries of a problem, sinks among them."""
    spec = problem.spec
    here = on_host(problem)
    out, own = np.empty(spec.scores_shape, dtype=numbers_of(spec)), {}
    if here.sinks is not None:
        sinks = np.asarray(_arrays.host(here.sinks), dtype=np.float64).reshape(-1)
        own["sinks"] = np.ascontiguousarray(sinks)
    for start, stop in _runs(here) if out.size else ():
        rows = out[..., start:stop, :]
        part = here if (start, stop) == (0, spec.len_q) else here.cut(-2, start, stop)
        call = prepared(part, _plan_of_weights(part.spec), memory(rows), out.dtype, **own)
        terms = part.terms
        launch(call, part.query, part.key, part.value, terms.mask, terms.bias, rows)
    return back(out, problem)


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


def numbers_of(spec: Spec) -> Any:
    """Dtype of NumPy in which a call accumulates."""
    return np.dtype(np.float64 if spec.dtype == "float64" else np.float32)


def on_host(problem: Problem) -> Problem:
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


def back(x: Any, problem: Problem) -> Array:
    """A result in the library of the problem, in its place."""
    if problem.spec.library == "torch":
        return sys.modules["torch"].from_numpy(x) if isinstance(x, np.ndarray) else x
    if problem.spec.library == "jax":
        return sys.modules["jax"].device_put(x, next(iter(problem.query.devices())))
    return cast(Array, x)


def mod_obstacle(problem: Problem) -> str:
    """Why a mod of a problem cannot be compiled; empty where all can."""
    try:
        _compiled(problem)
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


def reads_batch(problem: Problem) -> bool:
    """Whether a mod depends on the entry of the batch."""
    return any(mod is not None and mod.uses_batch for mod in _compiled(problem))


def _compiled(problem: Problem) -> tuple[mods.Mod | None, mods.Mod | None, mods.Mod | None]:
    """score_mod, mask_mod, and the derivative of score_mod."""
    mask_mod = problem.mask_mod
    precision: Any = "float64" if problem.spec.dtype == "float64" else "float32"
    score_mod, slope = (
        None if function is None else mods.compile_score_mod(function, precision)
        for function in (problem.score_mod, problem.score_slope)
    )
    return score_mod, None if mask_mod is None else mods.compile_mask_mod(mask_mod), slope


def add_mods(problem: Problem, known: dict[str, Any]) -> list[Any]:
    """Compile mods; class the tiles of mask_mod once, for all heads and batches that it ignores.

    Adds to the fields of a record; returns what owns the memory that it points to.
    """
    spec = problem.spec
    score_mod, mod, slope = _compiled(problem)
    if score_mod is not None:
        known["score_mod"] = score_mod.address
    if slope is not None:
        known["score_slope"] = slope.address
    if mod is None or not spec.len_kv:
        return [score_mod, slope]
    known["mask_mod"] = mod.address
    vectors = DOUBLE if spec.dtype == "float64" else SINGLE
    tiles = -(-spec.len_q // (HOST.nr * vectors.lanes)) * -(-spec.len_kv // BLOCK_KV)
    terms = problem.terms
    # Entries whose positions differ see other numbers, whatever the function reads.
    by_entry = mod.uses_batch or max(np.size(x) for x in (terms.q_start, terms.kv_start)) > 1
    entries = math.prod(spec.lead) if by_entry else 1
    heads = spec.num_heads if mod.uses_head else 1
    classes = np.empty(entries * heads * tiles, dtype=np.uint8)
    known["classes"], known["num_classes"] = address(classes), len(classes)
    known["class_head"] = tiles if mod.uses_head else 0
    known["class_entry"] = heads * tiles if by_entry else 0
    kernel = options.class_double if vectors is DOUBLE else options.class_single
    record = packed({**known, "scratch_bytes": layout.CLASS_BYTES})
    keep = [score_mod, mod, slope, classes]
    work = len(classes) * HOST.nr * vectors.lanes * BLOCK_KV
    launch(Prepared(kernel, record, keep, len(classes), work, layout.CLASS_BYTES, (0, 0, 0), (),
                    None))  # fmt: skip
    return keep


def fields_of(problem: Problem, out: Memory) -> dict[str, Any]:
    """Describe the problem to the kernel: all but addresses of arrays made for it."""
    spec, terms = problem.spec, problem.terms
    query, key, value = (memory(x) for x in (problem.query, problem.key, problem.value))
    known: dict[str, Any] = {
        "first_row": _first_row(problem), "block_rows": _block_rows(problem),
        "num_entries": math.prod(spec.lead), "num_heads": spec.num_heads,
        "group_size": spec.group_size, "len_q": spec.len_q, "len_kv": spec.len_kv,
        "d_k": spec.d_k, "d_v": spec.d_v, "dtype": query.dtype, "out_dtype": out.dtype,
        "left": NO_LIMIT if spec.left is None else spec.left,
        "right": NO_LIMIT if spec.right is None else spec.right,
        "q_row": query.strides[-2], "q_column": query.strides[-1],
        "k_row": key.strides[-2], "k_column": key.strides[-1],
        "v_row": value.strides[-2], "v_column": value.strides[-1], "out_row": out.strides[-2],
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
            known |= {f"{name}_row": row, f"{name}_column": column, f"{name}_dtype": found.dtype}
    return known


def _first_row(problem: Problem) -> int:
    return int(problem.rows[0]) if len(problem.rows) else 0


def _softcap(spec: Spec) -> float:
    """Cap of the scores, 0 for none; one beyond float32's numbers changes none of them."""
    highest = sys.float_info.max if spec.dtype == "float64" else FLOAT32_MAX
    return spec.softcap if spec.softcap is not None and spec.softcap <= highest else 0.0


def option_arrays(problem: Problem, out: Memory) -> dict[str, Any]:
    """Positions, places and options that the kernel reads, as contiguous arrays."""
    spec, terms = problem.spec, problem.terms
    entries = math.prod(spec.lead)
    heads, key_heads = (*spec.lead, spec.num_heads), (*spec.lead, spec.num_kv_heads)

    def places(x: Array, target: tuple[int, ...]) -> Any:
        return places_of(memory(x), target)

    arrays = {
        "q_start": _per_entry(terms.q_start + _first_row(problem), spec),
        "kv_start": _per_entry(terms.kv_start, spec),
        "q_count": np.full(entries, spec.len_q),
        "kv_count": np.full(entries, spec.len_kv) if terms.kv_count is None
        else _per_entry(terms.kv_count, spec),
        "out_places": places_of(out, heads),
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
    return arrays


def places_of(x: Memory, heads: tuple[int, ...]) -> Any:
    """Bytes from an array's first element to the first row of each index of ``heads``.

    The array's leading axes broadcast to ``heads``.
    """
    total = np.zeros(heads, dtype=np.int64)
    for axis, (length, stride) in enumerate(zip(x.shape[:-2], x.strides[:-2], strict=True)):
        if length != 1:
            steps = np.arange(length, dtype=np.int64) * stride
            total += steps.reshape((-1,) + (1,) * (len(heads) - axis - 1))
    return total.reshape(-1)


def _per_entry(x: Any, spec: Spec) -> Any:
    """Number of each entry of the flattened leading axes."""
    x = np.asarray(x, dtype=np.int64)
    if x.size == 1:
        return np.full(math.prod(spec.lead), x.item())
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
    """Block mask of each pair, an entry for each block."""
    blocks = np.asarray(_arrays.host(problem.block_mask))
    columns = -(-problem.spec.len_kv // BLOCK_KV)
    return np.broadcast_to(blocks, (*heads, _block_rows(problem), columns))


def _block_rows(problem: Problem) -> int:
    """Rows of blocks: those of the whole call, of which the queries may be a part."""
    if problem.block_mask is None:
        return 0
    given = int(problem.block_mask.shape[-2])
    return given if given > 1 else -(-(_first_row(problem) + problem.spec.len_q) // BLOCK_KV)


def tiles(problem: Problem) -> Tiles:
    """Count the work and the memory of `run` without doing it."""
    spec, terms = problem.spec, problem.terms
    chosen = plan(spec)
    rows = block_q(chosen.vectors.lanes, spec.len_kv)
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
    workers = num_workers(problem.query, _work(spec), chosen.tasks)
    return workers * chosen.scratch + parts + wide + 8 * math.prod(spec.lead) * segments
