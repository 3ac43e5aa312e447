"""Attention of few queries by the kernels over eight-bit codes, which they read as they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from scaledot._bridges import cpu
from scaledot._kernels import decode
from scaledot._kernels.simd import SINGLE
from scaledot._kernels.target import HOST
from scaledot._launch import address, launch, memory
from scaledot._spec import Problem
from scaledot._state import State
from scaledot._typing import Array


class Codes(NamedTuple):
    """Codes and the float32 scale of each token, (batch, num_kv_heads, tokens, d or 1)."""

    key: Array
    key_scale: Array
    value: Array
    value_scale: Array


KERNELS = {"float32": decode.decode_codes}
if HOST.bf16:
    KERNELS["bfloat16"] = decode.decode_code_pairs


def can_do(problem: Problem) -> bool:
    """Whether the kernels take a call on codes: one of few queries, of a dtype that they have."""
    spec = problem.spec
    return spec.dtype in KERNELS and spec.len_q <= decode.few(SINGLE.lanes)


def run(
    given: Problem, codes: Codes, window: tuple[int | None, int | None], kv_offset: Any, kv_len: Any
) -> State:
    """Attention without sinks, as `attention_state` of the numbers that the codes stand for.

    ``given`` is the call without any token; the others are those of `attention`, for these tokens.
    """
    problem = _problem(given, codes, window, kv_offset, kv_len)
    query = problem.query
    if given.spec.library == "jax":
        codes = Codes(*map(np.asarray, codes))
    spec, numbers = problem.spec, np.dtype(np.float32)
    chosen = cpu.plan(spec)._replace(kernel=KERNELS[spec.dtype])
    out, lse = cpu.results((*spec.scores_shape[:-1], spec.d_v), numbers, numbers, query)
    key, value, heads = memory(codes.key), memory(codes.value), (*spec.lead, spec.num_kv_heads)
    own: dict[str, Any] = {
        "k_row": key.strides[-2], "k_column": key.strides[-1],
        "v_row": value.strides[-2], "v_column": value.strides[-1],
        "k_places": cpu.places_of(key, heads), "v_places": cpu.places_of(value, heads),
    }  # fmt: skip
    for letter, x in (("k", codes.key_scale), ("v", codes.value_scale)):
        scales = memory(x)
        own |= {
            f"{letter}_scales": address(x), f"{letter}_scale_row": scales.strides[-2],
            f"{letter}_scale_places": cpu.places_of(scales, heads),
        }  # fmt: skip
    call = cpu.prepared(problem, chosen, memory(out), numbers, **own)
    if call.tasks:
        terms = problem.terms
        launch(call, query, codes.key, codes.value, terms.mask, terms.bias, out, lse)
    return State(cpu.back(out, given), cpu.back(lse, given))


def _problem(
    given: Problem, codes: Codes, window: tuple[int | None, int | None], kv_offset: Any, kv_len: Any
) -> Problem:
    """The call with these tokens."""
    here = cpu.on_host(given)

    def entries(x: Any) -> Any:
        return np.asarray(x, dtype=np.int64).reshape(-1, 1, 1, 1)

    left, right = window
    spec = replace(here.spec, len_kv=int(codes.key.shape[-2]), left=left, right=right)
    terms = replace(here.terms, kv_start=entries(kv_offset), kv_count=entries(kv_len))
    return replace(here, spec=spec, terms=terms, columns=range(spec.len_kv))
