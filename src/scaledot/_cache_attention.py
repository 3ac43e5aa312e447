"""Attention over memory that is not one stretch of numbers: rings with sinks, eight-bit codes."""

from __future__ import annotations

import functools
from typing import Any

from scaledot import _arrays, _checks, _choice, _reference
from scaledot._cache_memory import Memory, Stretch
from scaledot._chunks import attend_chunks
from scaledot._rules import derivative_rules
from scaledot._spec import Options, Problem, resolve
from scaledot._state import State, merge
from scaledot._typing import Array


def over(
    memory: Memory, query: Array, options: Options, window: tuple[int | None, int | None]
) -> Array:
    """Attention of a query over all tokens in memory, in its dtype.

    ``options`` are those of the call; the wider of them go with the sinks, while the ring has a
    ``window`` that leaves lost tokens out.
    """
    xp, wide, plain = _arrays.namespace(query), query, options._replace(sinks=None)
    if memory.is_int8:  # numbers are restored in the precision of the scores
        dtype = _arrays.accumulation_dtype(xp, _arrays.dtype_name(query))
        wide = xp.astype(query, dtype, copy=False)
    problem, reads_codes = _resolved(memory, query, options)
    if wide is not query and not reads_codes:
        problem, reads_codes = _resolved(memory, wide, options)

    def attended(stretches: list[Stretch], window: Any, first: Any) -> State:
        if reads_codes:
            from scaledot import _code_kernels

            sides = _checks.window(window, plain.causal)
            states = (
                _code_kernels.run(
                    problem, _code_kernels.Codes(*memory.codes(slots)), sides, offset, length
                )
                for slots, offset, length in stretches
            )
            return functools.reduce(merge, states)
        chunks = memory.chunks(stretches, wide.dtype, options.mask, first)
        return attend_chunks(
            wide, chunks, causal=plain.causal, window=window, scale=plain.scale,
            softcap=plain.softcap, alibi_slopes=plain.alibi_slopes, score_mod=plain.score_mod,
            mask_mod=plain.mask_mod, dropout=plain.dropout, seed=plain.seed,
            q_offset=plain.q_offset, impl=plain.impl,
        )

    first = options.q_offset - (_checks.FARTHEST if window[0] is None else window[0])
    state = attended(memory.ring(first), window, first)
    if memory.num_sinks:
        state = merge(attended(memory.sinks(), options.window, 0), state)
    if problem.sinks is not None:
        state = merge(state, _reference.keyless(xp, problem))
    return xp.astype(state.out, query.dtype, copy=False)


def _resolved(memory: Memory, query: Array, options: Options) -> tuple[Problem, bool]:
    """The call without any token, all options checked, and whether kernels read codes for it."""
    key, value = (memory.read(part, range(0), query.dtype) for part in ("key", "value"))
    problem = resolve(query, key, value, options)
    if not memory.is_int8 or derivative_rules(query, key, value, options) is not None:
        return problem, False
    if _choice.choose(problem)[0] != "kernels":
        return problem, False
    from scaledot import _code_kernels  # loads Numba

    return problem, _code_kernels.can_do(problem)
