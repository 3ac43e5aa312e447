"""Everything about one call that a kernel reads: one record of numbers and addresses."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import carray  # type: ignore[attr-defined]
from numba.core import types

from scaledot._kernels.jit import inlined, intrinsic
from scaledot._kernels.simd import I64

# A *pair* is one head of one entry of the flattened leading axes. Strides are in bytes. An address
# of 0 stands for an option that is not in use; arrays at addresses are contiguous.
VOLATILE = (
    "address",  # of this record
    "counter",  # int64: the next task
    "query", "key", "value", "mask", "bias",
    "out",
    "lse",  # (pairs, len_q) of float32 or float64, or 0
    "part_out", "part_lse", "finished",  # of the parts of the keys, and how many are done
    "workers", "scratch",
    "status",  # int64: what went wrong
)  # fmt: skip
"""What differs between calls that are alike; the rest of a record is made once for them."""
INTEGERS = (
    *VOLATILE,
    "num_entries", "num_heads", "group_size", "len_q", "len_kv", "d_k", "d_v",
    "dtype", "out_dtype",
    "left", "right",  # reach of a query
    "q_start", "kv_start",  # int64 per entry: position of the first query, of the first key
    "q_count", "kv_count",  # int64 per entry: number of queries and of valid keys
    "q_places", "q_row", "q_column",  # places: int64 per pair, from the address `query`
    "k_places", "k_row", "k_column",  # per entry and key head
    "v_places", "v_row", "v_column",
    "page_table",  # int64 (entries, pages_of_entry): tokens lie in pages, places count from page 0
    "page_size", "pages_of_entry",
    "k_page", "v_page",  # steps from page to page
    "k_scales", "k_scale_places", "k_scale_row",  # float32 of each token, of eight-bit codes
    "v_scales", "v_scale_places", "v_scale_row",
    "mask_places", "mask_row", "mask_column",
    "bias_places", "bias_row", "bias_column", "bias_dtype",
    "segment_q", "segment_kv",  # int64 (entries, len)
    "slopes", "sinks",  # float64 per head; sinks only for weights and statistics
    "head_keys",  # uint32 (pairs, 2): keys of the dropout hash
    "threshold",  # 0: no dropout
    "blocks", "block_rows",  # bool (pairs, block_rows, blocks of keys)
    "first_row",  # number of the first query, among those that the blocks count
    "score_mod", "mask_mod",  # addresses of native functions
    "adjust", "classify", "drop",  # of `options`, which only calls that need them compile
    "classes",  # uint8 (entries or 1, heads or 1, SUBS · tasks, tiles): what mask_mod leaves
    "class_entry", "class_head",  # steps in `classes`, 0 where they are shared
    "num_classes",
    "out_places", "out_row",  # d_v is without gaps
    "parts",  # of the keys, at most
    "most_rows",  # of a task with few queries
    "shares", "num_shares",  # int64 (.., 5): keys start..stop, their part, for members first..end
    "entry_parts",  # int64 per entry: its parts, where there are shares
    # Of the backward pass; arrays of the kind's numbers are contiguous where nothing else is said.
    "grad_out", "grad_places", "grad_row", "grad_column", "grad_dtype",
    "delta",  # (pairs, len_q)
    "row_shift",  # (pairs, len_q): power of two by which exp(S - lse) is too small, or 0
    "key_range",  # keys of a task
    "progress",  # int64 (pairs, blocks of queries): ranges whose share of dq has been added;
    # of statistics (pairs,): tasks whose sums have been added
    "dq",  # (pairs, len_q, d_k), or 0
    "dk", "dv",  # (entries and key heads, len_kv, width) of out_dtype, or 0
    "slope_sums",  # float64 (pairs, ranges), or 0
    "chain",  # of `options`, where the scores' derivative is not the scale
    "score_slope",  # address of a native function: derivative of score_mod
    "bias_sums",  # (groups, rows or 1, keys or 1), or (groups, ranges, rows or 1) for 1
    "bias_rows", "bias_columns",  # their lengths
    # Pairs of each group that shares a bias; or entries of each share; or records of sequences.
    "members", "num_groups", "member_starts",  # int64: members, one group after the other
    # Of forward mode and second derivatives: tangents in the kind's numbers, rows without gaps.
    "tangent_query", "tangent_q_places", "tangent_key", "tangent_k_places",
    "tangent_value", "tangent_v_places",
    "tangent_call",  # a record whose bias and slopes are the tangents of bias and slopes, or 0
    "move", "bend",  # of `options`
    "weighs",  # 1: the sums of weights are asked for, not those of tangents
    "row_tangent", "row_mean",  # (pairs, len_q): tangent of lse; mean of what is weighed
    # Of statistics: arrays of the pairs in order, sums of 0 that are added to.
    "top_k", "top_weights", "top_keys",  # (pairs, len_q, top_k), of the kind's numbers and int64
    "entropy", "mean_distance", "visible",  # (pairs, len_q), the last int64
    "last", "received", "received_last",  # float64 (pairs, len_kv)
    "map_rows", "map_columns", "cells",  # float64 (pairs, map_rows, map_columns)
    "map_most",  # rows of the map that a task has a part in, at most
    "scratch_bytes",  # of each worker
)  # fmt: skip
FLOATS = ("scale", "softcap", "kept_scale")  # softcap 0: none
CALL = np.dtype([(name, np.int64) for name in INTEGERS] + [(name, np.float64) for name in FLOATS])
_RECORD = numba.from_dtype(CALL)


@intrinsic
def _record_pointer(context: Any, address: Any) -> Any:
    def emit(cx: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.inttoptr(args[0], cx.get_value_type(sig.return_type))

    return types.CPointer(_RECORD)(types.intp), emit  # type: ignore[no-untyped-call]


@inlined
def read(address):  # type: ignore[no-untyped-def]
    """Return the record at an address."""
    return carray(_record_pointer(address), 1)[0]


@intrinsic
def ask(context: Any, function: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any,
        h: Any) -> Any:  # fmt: skip
    """Call a native function of eight int64 at an address."""

    def emit(cx: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = ir.FunctionType(I64, [I64] * 8)
        return builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])

    return types.int64(*(types.int64,) * 9), emit
