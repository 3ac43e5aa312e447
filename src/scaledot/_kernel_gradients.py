"""Gradients by the kernels: deltas of rows, then query, key and value, then a bias."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from scaledot import _arrays
from scaledot._bridges import cpu
from scaledot._derivatives import Grads, Rows
from scaledot._kernels import backward, bias, gradient
from scaledot._kernels import second as kernel_second
from scaledot._kernels import tangent as kernel_tangent
from scaledot._kernels.jit import Kernel
from scaledot._kernels.kinds import BLOCK_KV, SUBS
from scaledot._kernels.pack import DTYPES
from scaledot._kernels.simd import DOUBLE, SINGLE, Vectors
from scaledot._kernels.target import HOST
from scaledot._launch import Memory, Prepared, address, launch, memory, packed, whole_record
from scaledot._spec import Problem
from scaledot._typing import Array


class Arrays(NamedTuple):
    """What a kernel reads where it lies, in normal form."""

    query: Array
    key: Array
    value: Array
    mask: Array | None
    bias: Array | None

    @classmethod
    def of(cls, problem: Problem) -> Arrays:
        """Those of a problem."""
        terms = problem.terms
        return cls(problem.query, problem.key, problem.value, terms.mask, terms.bias)


class Passed(NamedTuple):
    """What a backward pass is given, in normal form."""

    out: Array  # (lead, num_heads, len_q, d_v), in order, of the problem's library
    lse: Any  # (lead, num_heads, len_q) of NumPy, in order, in the accumulation dtype
    grad_out: Array  # like out, any strides and dtype
    delta: Any  # like lse: the gradient of lse, which becomes delta = rowsum(dO∘O) - dlse
    shift: Any = None  # like lse: power of two by which exp(S - lse) is too small


def passed_of(
    problem: Problem, out: Array, lse: Array, grad_out: Array, grad_lse: Array | None,
    mass: Array | None,
) -> Passed:
    """Arrays of the caller as the kernels read them; copies only where they must be."""
    shape, numbers = problem.spec.scores_shape[:-1], cpu.numbers_of(problem.spec)
    known = np.ascontiguousarray(_plain(lse), dtype=numbers).reshape(shape)
    if grad_lse is None:
        delta = np.zeros(shape, dtype=numbers)
    else:
        delta = np.array(_plain(grad_lse), dtype=numbers, order="C").reshape(shape)
    wide = (*shape, problem.spec.d_v)
    grad_out = readable(grad_out, problem.query if problem.spec.dtype == "bfloat16" else None)
    return Passed(
        _in_order(out).reshape(wide), known, grad_out.reshape(wide), delta, _shift(mass)
    )


def _shift(mass: Array | None) -> Any:
    """Power of two that makes the weights of a row sum to 1, of their sum (..., 1)."""
    return None if mass is None else np.ascontiguousarray(-np.log2(_plain(mass)[..., 0]))


def _plain(x: Array) -> Any:
    """An array or a tensor as NumPy's."""
    return x if isinstance(x, np.ndarray) else x.detach().resolve_neg().numpy()


def _in_order(x: Array) -> Array:
    return np.ascontiguousarray(x) if isinstance(x, np.ndarray) else x.contiguous()


def readable(x: Array, like: Array | None) -> Array:
    """An array whose numbers the kernels can read where they lie; of a dtype, if one is given."""
    if isinstance(x, np.ndarray):
        known = _arrays.dtype_name(x) in _arrays.FLOATS and x.dtype.isnative
        x = x if known else x.astype(np.float64)
        return x if like is None else x.astype(like.dtype, copy=False)
    x = x.resolve_neg() if like is None else x.resolve_neg().to(like.dtype)
    return x.clone() if x._is_zerotensor() else x


def in_library(x: Any, problem: Problem) -> Array:
    """A result of NumPy in the library of a problem; integers of 16 bits are its bfloat16."""
    numpy_problem = isinstance(problem.query, np.ndarray)
    if not numpy_problem:
        x = sys.modules["torch"].from_numpy(x)
    return x.view(problem.query.dtype) if "int" in str(x.dtype) else x


def prepared(problem: Problem, passed: Passed, wanted: Collection[str]) -> Pass:
    """Return the function that runs a backward pass on arrays that lie as these do.

    ``pass(arrays, passed) -> Grads`` of the arguments named; ``passed.delta`` is then delta. Each
    gradient has its argument's shape in normal form. Those of key and value are in the argument's
    dtype where nothing had to be added up afterwards, the others in the accumulation dtype.
    """
    empty = not math.prod(problem.spec.scores_shape[:-1]) or not problem.spec.len_kv
    call = None if empty else _Backward(problem, memory(passed.out), memory(passed.grad_out))
    problem = thin(problem)

    def run(arrays: Arrays, passed: Passed) -> Grads:
        if call is None:  # out is 0
            np.negative(passed.delta, out=passed.delta)
            found = _zeros(problem, wanted)
        else:
            found = call.run(wanted, arrays, passed)
        return Grads(**{name: in_library(x, problem) for name, x in found.items()})

    return run


def thin(problem: Problem) -> Problem:
    """A problem with arrays of the same shapes and dtypes as its operands, but without memory."""

    def shadow(x: Array) -> Array:
        if isinstance(x, np.ndarray):
            return np.broadcast_to(np.zeros((), dtype=x.dtype), x.shape)
        return x.new_zeros(()).expand(x.shape)

    operands = {name: shadow(getattr(problem, name)) for name in ("query", "key", "value")}
    return replace(problem, **operands)


def tangent(problem: Problem, rows: Rows, tangents: Grads | None) -> tuple[Array, Array]:
    """`_derivatives.tangent` of finite tangents in normal form, of the problem's library.

    Without tangents the second result are the sums of weights.
    """
    spec, numbers = problem.spec, cpu.numbers_of(problem.spec)
    total = np.zeros((*spec.scores_shape[:-1], spec.d_v), dtype=numbers)
    mean = np.zeros((*spec.scores_shape[:-1], 1), dtype=numbers)
    if mean.size and spec.len_kv:
        lse, shift = np.ascontiguousarray(_plain(rows.lse)), _shift(rows.mass)
        passed = Passed(total, lse, total, mean, shift)
        call = _Backward(problem, memory(total), memory(total))
        moves = {"weighs": 1} if tangents is None else call.moves(tangents)
        known = call.tiles(moves | {"row_tangent": address(mean)})
        scratch = kernel_tangent.room_bytes(
            call.vectors.lanes, call.vectors.size, spec.d_k, spec.d_v, spec.len_q
        )
        kernel = kernel_tangent.move_rows_double if call.double else kernel_tangent.move_rows_single
        tasks = math.prod(spec.lead) * spec.num_heads * call.blocks
        call.launch(kernel, tasks, scratch, known, Arrays.of(problem), passed)
    return in_library(total, problem), in_library(mean, problem)


def second(problem: Problem, rows: Rows, tangents: Grads, wanted: Collection[str]) -> Grads:
    """`_derivatives.second` by query, key and value, of finite tangents and gradients."""
    numbers = cpu.numbers_of(problem.spec)
    grad_out = _in_order(rows.grad_out)
    lse, delta, of_lse, mean = (
        np.ascontiguousarray(_plain(x), dtype=numbers)
        for x in (rows.lse, rows.delta, rows.tangent, rows.mean)
    )
    if not delta.size or not problem.spec.len_kv:
        found = _zeros(problem, wanted)
    else:
        passed = Passed(grad_out, lse, grad_out, delta, _shift(rows.mass))
        call = _Backward(problem, memory(grad_out), memory(grad_out))
        known = call.moves(tangents)
        known |= {"row_tangent": address(of_lse), "row_mean": address(mean)}
        found = call.operands(wanted, Arrays.of(problem), passed, known)
    return Grads(**{name: in_library(x, problem) for name, x in found.items()})


def _zeros(problem: Problem, wanted: Collection[str]) -> dict[str, Any]:
    terms, numbers = problem.terms, cpu.numbers_of(problem.spec)
    arrays = Grads(problem.query, problem.key, problem.value, terms.bias, None, terms.slopes)
    return {
        name: np.zeros(tuple(x.shape), dtype=numbers)
        for name, x in arrays._asdict().items() if name in wanted and x is not None
    }  # fmt: skip


Pass = Callable[[Arrays, Passed], Grads]


class _Backward:
    """A backward pass but for the addresses of its arrays."""

    def __init__(self, problem: Problem, out: Memory, grad: Memory) -> None:
        spec = self.spec = problem.spec
        self.out = out
        self.numbers = cpu.numbers_of(spec)
        self.vectors: Vectors = DOUBLE if spec.dtype == "float64" else SINGLE
        self.double = self.vectors is DOUBLE
        tiles = -(-spec.len_kv // BLOCK_KV) * BLOCK_KV
        self.range = min(tiles, gradient.range_of(self.vectors.size, spec.d_k, spec.d_v))
        self.ranges = -(-spec.len_kv // self.range)
        self.blocks = -(-spec.len_q // (SUBS * HOST.nr * self.vectors.lanes))
        arrays = cpu.option_arrays(problem, out)
        arrays["grad_places"] = cpu.places_of(grad, (*spec.lead, spec.num_heads))
        self.known = cpu.fields_of(problem, out)
        self.keep = cpu.laid_out(arrays, self.known)
        self.known |= {
            "grad_row": grad.strides[-2], "grad_column": grad.strides[-1],
            "grad_dtype": grad.dtype, "key_range": self.range,
        }  # fmt: skip
        self.work = math.prod(spec.scores_shape) * (spec.d_k + spec.d_v)
        self.tiled: dict[str, Any] | None = None
        self.problem = thin(problem)

    def launch(
        self, kernel: Kernel, tasks: int, scratch: int, known: dict[str, Any], arrays: Arrays,
        passed: Passed,
    ) -> None:  # fmt: skip
        """Run a kernel on these arrays."""
        record = packed(known | {
            "grad_out": address(passed.grad_out), "delta": address(passed.delta),
            "row_shift": address(passed.shift), "scratch_bytes": scratch,
        })  # fmt: skip
        call = Prepared(kernel, record, self.keep, tasks, self.work, scratch, (0, 0, 0), (), None,
                        width=self.spec.d_k + self.spec.d_v)  # fmt: skip
        launch(call, *arrays, passed.out, passed.lse)

    def run(self, wanted: Collection[str], arrays: Arrays, passed: Passed) -> dict[str, Any]:
        """First derivatives."""
        pairs = math.prod(self.spec.lead) * self.spec.num_heads
        kernel = backward.deltas_double if self.double else backward.deltas_single
        scratch = backward.delta_bytes(self.vectors.lanes, self.vectors.size, self.spec.d_v)
        self.launch(kernel, pairs * self.blocks, scratch, self.known, arrays, passed)
        found: dict[str, Any] = {}
        fused = "bias" in wanted and self.fuses_bias()
        if fused or {"query", "key", "value", "alibi_slopes"} & set(wanted):
            found |= self.operands([n for n in wanted if fused or n != "bias"], arrays, passed)
        if "bias" in wanted and not fused:
            found["bias"] = self.bias(arrays, passed)
        return found

    def fuses_bias(self) -> bool:
        """Whether the gradient of the bias is summed on the way, for each head apart.

        It is not where heads share one of many queries, which would have to be held for each, and
        where dS is turned into that by the products, or rounded.
        """
        spec, given = self.spec, self.problem.terms.bias
        if given is None or spec.softcap is not None or spec.dtype == "bfloat16":
            return False
        apart = tuple(given.shape[:-2]) == (*spec.lead, spec.num_heads)
        return apart or given.shape[-2] == 1

    def tiles(self, known: dict[str, Any]) -> dict[str, Any]:
        """Add what the kernels that compute tiles need; mods are compiled."""
        whole = {**self.known, **known}
        self.keep = [self.keep, cpu.add_mods(self.problem, whole)]
        return whole | cpu.option_functions(whole, self.vectors)

    def shape(self) -> tuple[int, int, int, int, int, int]:
        """What the scratch memory of a worker depends on."""
        spec, vectors = self.spec, self.vectors
        return vectors.lanes, vectors.size, spec.d_k, spec.d_v, spec.len_q, self.range

    def moves(self, tangents: Grads) -> dict[str, Any]:
        """Describe tangents, arrays of the accumulation dtype in normal form."""
        spec, terms, known = self.spec, self.problem.terms, dict[str, Any](moves=1)
        heads, key_heads = (*spec.lead, spec.num_heads), (*spec.lead, spec.num_kv_heads)
        held = []
        for name, letter, shape in (
            ("query", "q", heads), ("key", "k", key_heads), ("value", "v", key_heads)
        ):  # fmt: skip
            x = getattr(tangents, name)
            if x is not None and x.shape[-1]:
                x = _in_order(x)
                places = cpu.places_of(memory(x), shape)
                known |= {
                    f"tangent_{name}": address(x), f"tangent_{letter}_places": address(places)
                }
                held += [x, places]
        if tangents.bias is not None or tangents.alibi_slopes is not None:
            terms = replace(terms, bias=tangents.bias, slopes=tangents.alibi_slopes)
            other = replace(self.problem, terms=terms)
            arrays = cpu.option_arrays(other, self.out)
            fields = cpu.fields_of(other, self.out)
            held += [terms, cpu.laid_out(arrays, fields)]
            fields |= {"bias": address(tangents.bias), "softcap": 0.0}
            record = whole_record(fields)
            known["tangent_call"] = address(record)
            held.append(record)
        self.keep = [self.keep, held]
        return known

    def operands(
        self, wanted: Collection[str], arrays: Arrays, passed: Passed,
        moves: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Gradients of query, key, value and slopes; second derivatives where there are moves."""
        spec, problem = self.spec, self.problem
        entries = math.prod(spec.lead)
        # dK and dV are rounded in the kernel where each row is its argument's.
        whole = all(tuple(x.shape[:-3]) == spec.lead for x in (problem.key, problem.value))
        dtype = numpy_dtype(spec.dtype) if whole else self.numbers
        shapes = {
            "query": (*spec.scores_shape[:-1], spec.d_k),
            "key": (*spec.lead, spec.num_kv_heads, spec.len_kv, spec.d_k),
            "value": (*spec.lead, spec.num_kv_heads, spec.len_kv, spec.d_v),
        }
        results: dict[str, Any] = {}
        if "query" in wanted:
            results["query"] = np.zeros(shapes["query"], dtype=self.numbers)
        for name in {"key", "value"} & set(wanted):
            results[name] = np.empty(shapes[name], dtype=dtype)
        if "alibi_slopes" in wanted:
            results["alibi_slopes"] = np.zeros((entries, spec.num_heads, self.ranges))
        if "bias" in wanted:
            rows, columns = self.problem.terms.bias.shape[-2:]  # type: ignore[union-attr]
            apart = self.ranges if columns == 1 else 1
            shape = (*spec.scores_shape[:-2], apart, rows, columns)
            results["bias"] = np.zeros(shape, dtype=self.numbers)
        progress = np.zeros(entries * spec.num_heads * self.blocks, dtype=np.int64)
        known = {
            "dq": address(results.get("query")), "dk": address(results.get("key")),
            "dv": address(results.get("value")), "progress": address(progress),
            "slope_sums": address(results.get("alibi_slopes")),
            "bias_sums": address(results.get("bias")),
            "out_dtype": DTYPES["float16" if dtype == np.float16 else spec.dtype if whole
                                else self.numbers.name],
        }  # fmt: skip
        if "bias" in results:
            rows, columns = results["bias"].shape[-2:]
            known |= {"bias_rows": rows, "bias_columns": columns}
        tasks = entries * spec.num_kv_heads * self.ranges
        if moves is not None:
            kernel = kernel_second.second_double if self.double else kernel_second.second_single
            scratch, tiled = kernel_second.second_bytes(*self.shape()), self.tiles(moves | known)
        else:
            kernel = backward.pull_double if self.double else backward.pull_single
            if spec.dtype == "bfloat16" and HOST.bf16:
                kernel = backward.pull_pairs
            scratch = gradient.room_bytes(*self.shape())
            tiled = self.tiled = self.tiled or self.tiles(known)
        self.launch(kernel, tasks, scratch, tiled | known, arrays, passed)
        return {name: self._summed(name, x) for name, x in results.items()}

    def _summed(self, name: str, x: Any) -> Any:
        """A gradient summed over the axes along which its argument is broadcast."""
        if name == "alibi_slopes":
            shape = tuple(self.problem.terms.slopes.shape)  # type: ignore[union-attr]
            return x.sum(axis=(0, 2)).astype(self.numbers).reshape(shape)
        argument: Any = self.problem.terms.bias if name == "bias" else getattr(self.problem, name)
        x = x.sum(axis=-3) if name == "bias" else x  # ranges of keys
        axes = tuple(i for i, n in enumerate(argument.shape) if n == 1 and x.shape[i] != 1)
        return x.sum(axis=axes, keepdims=True) if axes else x

    def bias(self, arrays: Arrays, passed: Passed) -> Any:
        """Gradient of the bias, in its own shape."""
        spec, given = self.spec, self.problem.terms.bias
        assert given is not None
        lead, (rows, columns) = tuple(given.shape[:-2]), given.shape[-2:]
        groups = math.prod(lead)
        apart = self.ranges if columns == 1 else 1
        sums = np.zeros((groups, apart, rows, columns), dtype=self.numbers)
        numbered = np.broadcast_to(
            np.arange(groups).reshape(lead), (*spec.lead, spec.num_heads)
        ).reshape(-1)
        members = np.argsort(numbered, kind="stable").astype(np.int64)
        starts = np.zeros(groups + 1, dtype=np.int64)
        np.cumsum(np.bincount(numbered, minlength=groups), out=starts[1:])
        known = {
            "bias_sums": address(sums), "bias_rows": rows, "bias_columns": columns,
            "members": address(members), "member_starts": address(starts), "num_groups": groups,
        }  # fmt: skip
        kernel = bias.bias_double if self.double else bias.bias_single
        scratch = gradient.room_bytes(*self.shape())
        self.launch(kernel, groups * self.ranges, scratch, self.tiles(known), arrays, passed)
        return sums.sum(axis=1).reshape(given.shape)


def numpy_dtype(name: str) -> Any:
    """Dtype of NumPy of that many bits; bfloat16 is held as integers."""
    return np.dtype(np.uint16 if name == "bfloat16" else name)
