"""Packed sequences on plain arrays: their attention, and its gradients in two launches.

Each sequence has a record of its own, as if it were called alone, and all of them are worked on at
once. Nothing is padded: rows of gradients lie where those of their arguments do.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection
from dataclasses import replace
from typing import Any, cast

import numpy as np

from scaledot import _arrays, _kernel_gradients, _packed, _reference
from scaledot._bridges import cpu
from scaledot._derivatives import Grads
from scaledot._kernels import backward as kernels
from scaledot._kernels import gradient
from scaledot._kernels.call import CALL
from scaledot._kernels.jit import Kernel
from scaledot._kernels.kinds import BLOCK_KV, SUBS
from scaledot._kernels.pack import DTYPES
from scaledot._kernels.simd import DOUBLE, SINGLE
from scaledot._kernels.target import HOST
from scaledot._launch import Memory, Prepared, address, launch, memory, packed, whole_record
from scaledot._packed import Sequences
from scaledot._passes import Packed, like_arguments, masses, packed_problem
from scaledot._spec import Options, Problem, seed_halves
from scaledot._state import State, merged
from scaledot._typing import Array


def forward(call: Packed, problem: Problem, *, with_lse: bool = False) -> State | None:
    """Attention in query's dtype, (tokens, heads, d_v), and its lse, (tokens, heads).

    ``problem`` is that of `packed_problem`. ``lse`` includes sinks, and may be None where it is
    not wanted. None instead of all where the kernels cannot do it: a function that depends on the
    number of the sequence, or raises an error.
    """
    if cpu.reads_batch(problem):
        return None
    try:
        state = _packed.run(
            problem, call.starts_q, call.starts_kv, _halves(call, problem), with_lse=with_lse
        )
    except cpu.ModError:
        return None
    if problem.sinks is None:
        return state
    xp = _arrays.namespace(problem.query)
    with _arrays.quiet(xp):
        sinks = xp.reshape(problem.sinks, (problem.spec.num_heads,))
        state = merged(xp, state, State(xp.zeros_like(sinks)[:, None], sinks))
        return state._replace(out=xp.astype(state.out, problem.query.dtype, copy=False))


def _halves(call: Packed, problem: Problem) -> Any:
    """Both halves of the seeds of all sequences, of NumPy."""
    if call.seeds is None:
        return None
    spec = replace(problem.spec, lead=(len(call.starts_q) - 1,))
    return [_arrays.host(x) for x in seed_halves(problem.query, call.seeds, spec)]


def backward(
    call: Packed, query: Array, key: Array, value: Array, state: State, grad_out: Array,
    wanted: Collection[str],
) -> Grads | None:  # fmt: skip
    """Gradients of the arguments named, each with its argument's shape and dtype.

    ``state`` is that of `forward`. None where the kernels cannot do it.
    """
    first = query
    if _arrays.library(query) == "jax":
        call = call._replace(
            options=Options(*map(_on_host, call.options)), seeds=_on_host(call.seeds)
        )
        query, key, value, grad_out = map(_on_host, (query, key, value, grad_out))
        state = State(*map(_on_host, state))
    problem = packed_problem(call, query, key, value)
    if problem is None:
        return None
    options = call.options
    arguments = Grads(query, key, value, None, options.sinks, options.alibi_slopes)
    wanted = {name for name in wanted if getattr(arguments, name) is not None}
    every = _packed.sequences(call.starts_q, call.starts_kv)
    with _arrays.quiet(_arrays.namespace(query)):
        try:
            mass = _masses(call, every, query, key, value, state.lse)
            all_of_them = _Backward(problem, every, _halves(call, problem))
            found = all_of_them.run(state.out, np.asarray(state.lse), mass, grad_out, wanted)
        except cpu.ModError:
            return None
        grads = Grads(**{n: _kernel_gradients.in_library(x, problem) for n, x in found.items()})
        grads = like_arguments(_arrays.namespace(query), grads, arguments)
    if _arrays.library(first) == "jax":
        place = next(iter(cast(Any, first).devices()))
        grads = Grads(*(None if x is None else sys.modules["jax"].device_put(x, place)
                        for x in grads))  # fmt: skip
    return grads


def _on_host(x: Any) -> Any:
    """A JAX array as NumPy's; everything else as it is."""
    return np.asarray(x) if _arrays.library(x) == "jax" else x


def _masses(
    call: Packed, every: Sequences, query: Array, key: Array, value: Array, lse: Array
) -> Any:
    """What weights are divided by, (tokens, heads), 1 but where lse is large; or None."""
    known = np.asarray(lse)
    large = _reference.is_large(np, known).any(axis=1)
    if not large.any():
        return None
    xp, found = _arrays.namespace(query), np.ones_like(known)
    heads_first = [xp.permute_dims(x, (1, 0, 2)) for x in (query, key, value)]
    for member in np.unique(np.repeat(np.arange(len(every.q_count)), every.q_count)[large]):
        q_start, q_count, kv_start, kv_count = (int(x[member]) for x in every)
        rows, columns = (slice(s, s + n) for s, n in ((q_start, q_count), (kv_start, kv_count)))
        options = call.options
        if call.seeds is not None:
            options = options._replace(seed=call.seeds[int(member), ...])
        q = heads_first[0][:, rows, :]
        k, v = (x[:, columns, :] for x in heads_first[1:])
        mass = masses(q, k, v, options, xp.permute_dims(lse[rows, :], (1, 0)))
        if mass is not None:
            found[rows] = np.asarray(mass)[..., 0].T
    return found


class _Backward:
    """A backward pass of all sequences that have queries and keys, those with most work first."""

    def __init__(self, problem: Problem, every: Sequences, halves: Any) -> None:
        spec = problem.spec
        work = every.q_count * every.kv_count
        index = np.argsort(-work, kind="stable")[: np.count_nonzero(work)]
        self.every, self.group = every, Sequences(*(x[index] for x in every))
        self.count = len(index)
        self.vectors = DOUBLE if spec.dtype == "float64" else SINGLE
        self.numbers = cpu.numbers_of(spec)
        self.work = int(work.sum()) * spec.num_heads * (spec.d_k + spec.d_v)
        longest = gradient.range_of(self.vectors.size, spec.d_k, spec.d_v)
        self.range = np.minimum(-(-self.group.kv_count // BLOCK_KV) * BLOCK_KV, longest)
        self.ranges = -(-self.group.kv_count // np.maximum(1, self.range))
        self.blocks = -(-self.group.q_count // (SUBS * HOST.nr * self.vectors.lanes))
        self.keep: list[Any] = []
        self.status = np.zeros(1, dtype=np.int64)
        self.problem = self._of_group(problem, index, halves)

    def _of_group(self, problem: Problem, index: Any, halves: Any) -> Problem:
        """The problem with an entry for each sequence, all as long as the longest."""
        group, terms = self.group, problem.terms
        if halves is not None:
            terms = replace(terms, seed_low=halves[0][index], seed_high=halves[1][index])
        lengths = [int(x.max(initial=0)) for x in (group.q_count, group.kv_count)]
        spec = replace(problem.spec, lead=(self.count,), len_q=lengths[0], len_kv=lengths[1])
        terms = replace(
            terms, q_start=_entries(group.kv_count - group.q_count),
            kv_start=np.zeros((1, 1, 1, 1), dtype=np.int64), kv_count=_entries(group.kv_count),
        )  # fmt: skip
        return replace(
            problem, spec=spec, terms=terms, rows=range(spec.len_q), columns=range(spec.len_kv)
        )

    def run(
        self, out: Array, lse: Any, mass: Any, grad_out: Array, wanted: Collection[str]
    ) -> dict[str, Any]:
        """Gradients by name, (tokens, heads, width) or for each head.

        ``lse``, and ``mass`` where it is not None, are of NumPy, (tokens, heads).
        """
        spec = self.problem.spec
        query = self.problem.query
        rows, heads = int(self.every.q_count.sum()), spec.num_heads
        grad_out = _kernel_gradients.readable(
            grad_out, query if spec.dtype == "bfloat16" else None
        )
        results = self._results(wanted, rows)
        place = self._by_sequence()
        arranged, delta = np.empty(rows * heads, self.numbers), np.zeros(rows * heads, self.numbers)
        arranged[place] = lse
        if self.count:
            progress = np.zeros(int(self.blocks.sum()) * heads, dtype=np.int64)
            shift = None
            if mass is not None:
                shift = np.empty_like(arranged)
                shift[place] = -np.log2(mass)
            held = [out, grad_out, arranged, delta, shift, progress]
            records = self._records(results, *held)
            held += [query, self.problem.key, self.problem.value, results]
            self._launch(records, held, is_pull=False)
            if {"query", "key", "value", "alibi_slopes"} & set(wanted):
                self._launch(records, held, is_pull=True)
            if self.status[0]:
                raise cpu.ModError
        if "alibi_slopes" in results:
            results["alibi_slopes"] = self._slopes(results["alibi_slopes"])
        if "sinks" in wanted:
            results["sinks"] = self._sinks(lse, mass, delta[place])
        return results

    def _results(self, wanted: Collection[str], rows: int) -> dict[str, Any]:
        """Room for gradients; what no task writes is 0."""
        spec, made = self.problem.spec, dict[str, Any]()
        keys = int(self.every.kv_count.sum())
        filled = int(self.group.kv_count.sum()) == keys
        for name, width in (("query", spec.d_k), ("key", spec.d_k), ("value", spec.d_v)):
            if name not in wanted:
                continue
            if name == "query":  # summed there
                made[name] = np.zeros((rows, spec.num_heads, width), dtype=self.numbers)
            else:
                make = np.empty if filled else np.zeros
                dtype = _kernel_gradients.numpy_dtype(spec.dtype)
                made[name] = make((keys, spec.num_kv_heads, width), dtype=dtype)
        if "alibi_slopes" in wanted:
            most = int(self.ranges.max(initial=0))
            made["alibi_slopes"] = np.zeros((self.count, spec.num_heads * most))
        return made

    def _by_sequence(self) -> Any:
        """Places of (tokens, heads) where each sequence has its rows head after head."""
        heads = self.problem.spec.num_heads
        start, length = (np.repeat(x, self.every.q_count) for x in self.every[:2])
        inside = np.arange(len(start)) - start
        return (start * heads + inside)[:, None] + length[:, None] * np.arange(heads)

    def _records(
        self, results: dict[str, Any], out: Array, grad_out: Array, lse: Any, delta: Any,
        shift: Any, progress: Any,
    ) -> Any:  # fmt: skip
        """One record for each sequence."""
        spec, group = self.problem.spec, self.group
        rows, grad = self._heads_first(out), self._heads_first(grad_out)
        arrays = cpu.option_arrays(self.problem, rows)
        heads = (self.count, spec.num_heads)
        arrays |= {"q_count": group.q_count, "grad_places": cpu.places_of(grad, heads)}
        known = cpu.fields_of(self.problem, rows)
        self.keep.append(cpu.laid_out(arrays, known))
        known |= {
            "grad_row": grad.strides[-2], "grad_column": grad.strides[-1],
            "grad_dtype": grad.dtype, "num_entries": 1, "num_groups": self.count,
            "key_range": BLOCK_KV, "status": address(self.status),
            "slope_sums": address(results.get("alibi_slopes")),
        }  # fmt: skip
        classes = self._add_mods(known)
        known |= cpu.option_functions(known, self.vectors)
        records = np.repeat(whole_record(known).view(CALL), self.count)
        for name, column in classes.items():
            records[name] = column
        number, size = np.arange(self.count), self.vectors.size
        for name in ("q_start", "kv_start", "q_count", "kv_count"):
            records[name] += 8 * number
        if spec.dropout:
            records["head_keys"] += 8 * spec.num_heads * number
        records["address"] = _address_of(records) + CALL.itemsize * number
        records["len_q"], records["len_kv"] = group.q_count, group.kv_count
        records["key_range"] = self.range
        operands = [memory(x) for x in (self.problem.query, self.problem.key, self.problem.value)]
        for name, x, lies, start in (
            ("query", self.problem.query, operands[0], group.q_start),
            ("key", self.problem.key, operands[1], group.kv_start),
            ("value", self.problem.value, operands[2], group.kv_start),
            ("out", out, rows, group.q_start), ("grad_out", grad_out, grad, group.q_start),
        ):  # fmt: skip
            records[name] = address(x) + start * lies.strides[-2]
        for name, x in (("lse", lse), ("delta", delta), ("row_shift", shift)):
            if x is None:
                continue
            records[name] = address(x) + size * spec.num_heads * group.q_start
        for name, result, start in (
            ("dq", "query", group.q_start), ("dk", "key", group.kv_start),
            ("dv", "value", group.kv_start),
        ):  # fmt: skip
            if result in results:
                x = results[result]
                records[name] = address(x) + x.strides[0] * start
        counters = np.cumsum(self.blocks) - self.blocks
        records["progress"] = address(progress) + 8 * spec.num_heads * counters
        if "alibi_slopes" in results:
            records["slope_sums"] += results["alibi_slopes"].strides[0] * number
        return records

    def _heads_first(self, x: Array) -> Memory:
        """How (tokens, heads, width) lies, as (sequences, heads, tokens, width)."""
        spec = self.problem.spec
        _, (row, head, column), dtype = memory(x)
        shape = (self.count, spec.num_heads, spec.len_q, spec.d_v)
        return Memory(shape, (0, head, row, column), dtype)

    def _add_mods(self, known: dict[str, Any]) -> dict[str, Any]:
        """Compile mods; return what differs between sequences: the classes of mask_mod's tiles.

        These follow from the lengths alone, so that sequences of the same lengths share them.
        """
        problem, group = self.problem, self.group
        if problem.mask_mod is None:
            self.keep.append(cpu.add_mods(problem, known))
            return {}
        lengths = np.stack([group.q_count, group.kv_count], axis=1)
        distinct, first, which = np.unique(lengths, axis=0, return_index=True, return_inverse=True)
        names = ("classes", "num_classes", "class_head", "class_entry")
        found = np.empty((len(distinct), len(names)), dtype=np.int64)
        for i, ((len_q, len_kv), member) in enumerate(zip(distinct.tolist(), first, strict=True)):
            spec = replace(problem.spec, lead=(1,), len_q=len_q, len_kv=len_kv)
            start = np.full((1, 1, 1, 1), len_kv - len_q)
            terms = replace(problem.terms, q_start=start, kv_count=None)
            own = known | {"len_q": len_q, "len_kv": len_kv}
            for name in ("q_start", "kv_start", "q_count", "kv_count"):
                own[name] += 8 * int(member)
            self.keep.append(cpu.add_mods(replace(problem, spec=spec, terms=terms), own))
            found[i] = [own[name] for name in names]
        known |= {name: own[name] for name in ("mask_mod", "score_mod", "score_slope", "classes")
                  if name in own}  # fmt: skip
        return dict(zip(names, found[which.reshape(-1)].T, strict=True))

    def _launch(self, records: Any, held: list[Any], *, is_pull: bool) -> None:
        """Run one of the two kernels on all sequences."""
        spec, vectors = self.problem.spec, self.vectors
        double = vectors is DOUBLE
        if is_pull:
            kernel: Kernel = kernels.pull_double if double else kernels.pull_single
            if spec.dtype == "bfloat16" and HOST.bf16:
                kernel = kernels.pull_pairs
            tasks = spec.num_kv_heads * self.ranges
            scratch = gradient.room_bytes(
                vectors.lanes, vectors.size, spec.d_k, spec.d_v, spec.len_q, int(self.range.max())
            )
            records["out_dtype"] = DTYPES[spec.dtype]
        else:
            kernel = kernels.deltas_double if double else kernels.deltas_single
            tasks = spec.num_heads * self.blocks
            scratch = kernels.delta_bytes(vectors.lanes, vectors.size, spec.d_v)
        starts = np.zeros(self.count + 1, dtype=np.int64)
        np.cumsum(tasks, out=starts[1:])
        record = packed({
            "num_groups": self.count, "members": _address_of(records),
            "member_starts": address(starts), "scratch_bytes": scratch, "d_k": spec.d_k,
            "d_v": spec.d_v, "key_range": BLOCK_KV,
        })  # fmt: skip
        keep = [self.keep, records, starts, held]
        launch(Prepared(kernel, record, keep, int(starts[-1]), self.work, scratch, (0, 0, 0), (),
                        None, width=spec.d_k + spec.d_v))  # fmt: skip

    def _slopes(self, sums: Any) -> Any:
        """Gradient of the slopes, (heads,), from the sums of heads and ranges of keys."""
        heads, total = self.problem.spec.num_heads, 0.0
        for most in np.unique(self.ranges):
            alike = sums[self.ranges == most, : heads * most]
            total = total + alike.reshape(-1, heads, most).sum(axis=(0, 2))
        return np.broadcast_to(total, (heads,)).astype(self.numbers)

    def _sinks(self, lse: Any, mass: Any, delta: Any) -> Any:
        """Gradient of the sinks, (heads,)."""
        sinks = np.asarray(_arrays.host(self.problem.sinks)).reshape(-1).astype(self.numbers)
        empty = lse == -math.inf
        weights = np.exp(sinks - np.where(empty, 0, lse))
        weights = weights if mass is None else weights / mass
        shares = weights * np.where(empty, 0, delta)
        return -shares.sum(axis=0, dtype=np.float64).astype(self.numbers)


def _entries(x: Any) -> Any:
    """One number for each entry of the leading axes."""
    return x.reshape(-1, 1, 1, 1)


def _address_of(records: Any) -> int:
    """Address of the first record; NumPy would describe all the fields on the way."""
    return address(records.view(np.uint8))
