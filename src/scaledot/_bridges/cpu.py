"""From arrays in this machine's memory, of NumPy or PyTorch, to the kernels and back."""

from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple

import numpy as np

from scaledot import _arrays, _masks, _threads
from scaledot._blockwise import Tiles
from scaledot._kernels import forward
from scaledot._kernels.pack import DTYPES
from scaledot._kernels.target import HOST
from scaledot._spec import Problem, Spec
from scaledot._state import State
from scaledot._typing import Array

NO_LIMIT = 2**62
PACKED_BYTES = 24 * 2**20
"""Packed keys and values at one time; more heads are done in several rounds."""
SMALL = 2**15
"""Scores below which a call stays on the caller's thread."""


ADDRESSES = (
    "q_start", "kv_start", "kv_count", "q_base", "k_base", "v_base", "mask_base", "bias_base",
    "segment_q", "segment_kv", "slopes", "head_keys", "blocks", "keys", "values", "odd", "num_odd",
    "out", "lse",
)  # fmt: skip


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


def _bases(x: Memory, shape: tuple[int, ...]) -> Any:
    """Address of the first row for each index of the leading axes ``shape``, flattened."""
    total = np.full(shape, x.address, dtype=np.int64)
    for axis, (length, stride) in enumerate(zip(x.shape[:-2], x.strides[:-2], strict=True)):
        if length != 1:
            steps = np.arange(length, dtype=np.int64) * stride
            total += steps.reshape((-1,) + (1,) * (len(shape) - axis - 1))
    return total.reshape(-1)


def _steps(x: Memory) -> tuple[int, int]:
    """Strides of the last two axes, 0 along an axis that is broadcast."""
    return tuple(0 if n == 1 else s for n, s in zip(x.shape[-2:], x.strides[-2:], strict=True))  # type: ignore[return-value]


def run(problem: Problem) -> State:
    """Attention without sinks, by the kernels."""
    spec = problem.spec
    num_pairs = math.prod(spec.lead) * spec.num_heads
    out = np.empty((num_pairs, spec.len_q, spec.d_v), dtype=np.float32)
    lse = np.empty((num_pairs, spec.len_q), dtype=np.float32)
    if out.size or lse.size:
        _run(problem, out, lse)
    shape = spec.scores_shape[:-1]
    state = State(out.reshape(*shape, spec.d_v), lse.reshape(shape))
    if spec.library == "torch":
        torch = sys.modules["torch"]
        return State(*(torch.from_numpy(x) for x in state))
    return state


def _run(problem: Problem, out: Any, lse: Any) -> None:
    spec = problem.spec
    width, padded, at_once = _packing(spec)
    num_key_pairs = math.prod(spec.lead) * spec.num_kv_heads
    arrays = {
        "keys": np.empty(at_once * padded * max(1, spec.d_k), dtype=np.float32),
        "values": np.empty(at_once * padded * width, dtype=np.float32),
        "odd": np.empty(at_once * padded, dtype=np.bool_),
        "num_odd": np.zeros(at_once, dtype=np.int64),
        "out": out,
        "lse": lse,
        **_option_arrays(problem),
    }
    # The kernel gets addresses: `arrays` keeps the memory until it returns.
    addresses = {name: x.ctypes.data for name, x in arrays.items()}
    call = _call(problem, width, padded, addresses)
    # 0: on the caller's thread, which is faster than to hand a short call over.
    num_threads = 0 if len(lse) * spec.len_q * spec.len_kv < SMALL else _num_threads(spec)
    group = spec.group_size
    for first in range(0, num_key_pairs, at_once):
        count = min(at_once, num_key_pairs - first)
        part = call._replace(first_key_pair=first)
        _share(num_threads, (problem, arrays), forward.pack, part, count)
        _share(num_threads, (problem, arrays), forward.attend, part, first * group, count * group)


def _num_threads(spec: Spec) -> int:
    """Threads of a call: not more than there are blocks of queries."""
    blocks = math.prod(spec.lead) * spec.num_heads * -(-spec.len_q // HOST.block_q)
    return max(1, min(_threads.get_num_threads(), blocks))


def _share(num_threads: int, memory: Any, worker: Any, *arguments: Any) -> None:
    """Run a worker on several threads, which take their tasks from one counter.

    ``memory`` is what the addresses among the arguments point into: each thread holds it until
    it ends, whatever becomes of the caller.
    """
    counter = np.zeros(1, dtype=np.int64)
    if num_threads == 0:
        worker(*arguments, counter.ctypes.data)
        return

    def stop() -> None:
        counter[0] = NO_LIMIT  # workers end after the block of queries that they are at

    def work(held: Any) -> None:
        worker(*arguments, held[0].ctypes.data)

    _threads.for_each(work, [(counter, memory)] * num_threads, stop)


def _call(problem: Problem, width: int, padded: int, addresses: dict[str, int]) -> forward.Call:
    """Describe the problem to the kernel."""
    spec, terms = problem.spec, problem.terms
    query, key, value = (memory(x) for x in (problem.query, problem.key, problem.value))
    steps = {}
    for name in ("mask", "bias"):
        x = getattr(terms, name)
        steps[name] = (0, 0, 0) if x is None else (*_steps(memory(x)), memory(x).dtype)
    return forward.Call(
        num_heads=spec.num_heads, group_size=spec.group_size, len_q=spec.len_q,
        len_kv=spec.len_kv, d_k=spec.d_k, d_v=spec.d_v, width=width, padded=padded,
        dtype=query.dtype, scale=spec.scale, softcap=spec.softcap or 0.0,
        left=NO_LIMIT if spec.left is None else spec.left,
        right=NO_LIMIT if spec.right is None else spec.right,
        q_row=query.strides[-2], q_column=query.strides[-1],
        k_row=key.strides[-2], k_column=key.strides[-1],
        v_row=value.strides[-2], v_column=value.strides[-1],
        mask_row=steps["mask"][0], mask_column=steps["mask"][1],
        bias_row=steps["bias"][0], bias_column=steps["bias"][1], bias_dtype=steps["bias"][2],
        threshold=_masks.dropout_threshold(spec.dropout),
        kept_scale=1 / (1 - spec.dropout) if spec.dropout < 1 else 0.0,
        first_key_pair=0,
        **{name: addresses.get(name, 0) for name in ADDRESSES},
    )  # fmt: skip


def _option_arrays(problem: Problem) -> dict[str, Any]:
    """Positions, base addresses and options that the kernel reads, as contiguous arrays."""
    spec, terms = problem.spec, problem.terms
    heads, key_heads = (*spec.lead, spec.num_heads), (*spec.lead, spec.num_kv_heads)
    counts = np.asarray(spec.len_kv) if terms.kv_count is None else terms.kv_count
    arrays = {
        "q_start": _per_entry(terms.q_start, spec),
        "kv_start": _per_entry(terms.kv_start, spec),
        "kv_count": _per_entry(np.broadcast_to(counts, (1,) * spec.rank) if counts.ndim == 0
                               else counts, spec),
        "q_base": _bases(memory(problem.query), heads),
        "k_base": _bases(memory(problem.key), key_heads),
        "v_base": _bases(memory(problem.value), key_heads),
    }  # fmt: skip
    if terms.mask is not None:
        arrays["mask_base"] = _bases(memory(terms.mask), heads)
    if terms.bias is not None:
        arrays["bias_base"] = _bases(memory(terms.bias), heads)
    if terms.slopes is not None:
        arrays["slopes"] = np.asarray(_arrays.host(terms.slopes), dtype=np.float32).reshape(-1)
    if terms.q_segment is not None:
        arrays["segment_q"] = _segments(terms.q_segment, spec, spec.len_q)
        arrays["segment_kv"] = _segments(terms.kv_segment, spec, spec.len_kv)
    if spec.dropout:
        arrays["head_keys"] = _head_keys(problem)
    if problem.block_mask is not None:
        arrays["blocks"] = _blocks(problem, heads)
    return {name: np.ascontiguousarray(x) for name, x in arrays.items()}


def _per_entry(x: Any, spec: Spec) -> Any:
    """Number of each entry of the flattened leading axes."""
    return np.broadcast_to(x.reshape(x.shape[: len(spec.lead)]), spec.lead).reshape(-1)


def _segments(x: Array, spec: Spec, length: int) -> Any:
    """Segment ids of one side, (lead, length)."""
    ids = np.asarray(_arrays.host(x), dtype=np.int64)
    ids = ids.reshape(*ids.shape[:-3], ids.shape[-2] * ids.shape[-1])
    return np.broadcast_to(ids, (*spec.lead, length))


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
    spec = problem.spec
    shape = tuple(-(-n // 128) for n in (spec.len_q, spec.len_kv))
    return np.broadcast_to(blocks, (*heads, *shape))


def tiles(problem: Problem) -> Tiles:
    """Count the work and the memory of `run` without doing it."""
    spec, terms = problem.spec, problem.terms
    counts = np.asarray(spec.len_kv) if terms.kv_count is None else terms.kv_count
    start, count = np.broadcast_arrays(terms.q_start - terms.kv_start, counts)
    start, count = (x.reshape(-1, 1) for x in (start, count))
    first = np.arange(0, spec.len_q, HOST.block_q)
    last = np.minimum(first + HOST.block_q, spec.len_q) - 1
    left, right = (NO_LIMIT if x is None else x for x in (spec.left, spec.right))
    low = np.clip(start + first - left, 0, count)
    high = np.maximum(low, np.clip(start + last + right + 1, 0, count))
    run = np.where(high > low, -(-high // HOST.block_kv) - low // HOST.block_kv, 0)
    heads = math.prod(spec.lead) * spec.num_heads
    repeat = heads // max(1, len(start))  # entries that share their positions, and heads
    total = heads * len(first) * -(-spec.len_kv // HOST.block_kv)
    scores = int(((last - first + 1) * (high - low)).sum()) * repeat
    done = int(run.sum()) * repeat
    return Tiles(HOST.block_q, HOST.block_kv, done, total - done, scores, _bytes(problem))


def _bytes(problem: Problem) -> int:
    """Bytes held during the call: packed keys and values, scratch of the threads, wide results."""
    spec = problem.spec
    width, padded, at_once = _packing(spec)
    packed = at_once * padded * (4 * (max(1, spec.d_k) + width) + 1)
    per_row = 4 * (max(1, spec.d_k) + HOST.block_kv + width + HOST.lanes + 2)
    rows = math.prod(spec.scores_shape[:-1])
    wide = (2 if problem.sinks is not None else 0) + (1 if spec.dtype != "float32" else 0)
    segments = 0 if problem.terms.q_segment is None else spec.len_q + spec.len_kv
    return (
        packed + _num_threads(spec) * HOST.block_q * per_row
        + 4 * rows * (1 + wide * spec.d_v) + 8 * math.prod(spec.lead) * segments
    )  # fmt: skip


def _packing(spec: Spec) -> tuple[int, int, int]:
    """Columns of packed values, rows of packed keys, and key heads packed at one time."""
    width = -(-max(1, spec.d_v) // HOST.lanes) * HOST.lanes
    padded = -(-max(1, spec.len_kv) // HOST.panel) * HOST.panel
    per_pair = 4 * padded * (max(1, spec.d_k) + width)
    pairs = math.prod(spec.lead) * spec.num_kv_heads
    return width, padded, max(1, min(pairs, PACKED_BYTES // per_pair))
