"""Attention over memory that is not one stretch of numbers: rings with sinks, eight-bit codes."""

from __future__ import annotations

import functools
from typing import Any

from scaledot import _arrays, _checks, _choice, _reference
from scaledot._cache_memory import Memory, Stretch
from scaledot._chunks import attend_chunks
from scaledot._rules import derivative_rules
from scaledot._spec import Options, resolve
from scaledot._state import State, merge
from scaledot._typing import Array


def over(
    memory: Memory, query: Array, options: Options, window: tuple[int | None, int | None]
) -> Array:
    """Attention of a query over all tokens in memory, in its dtype.

    ``options`` are those of the call; the wider of them go with the sinks, while the ring has a
    ``window`` that leaves lost tokens out.
    """
    xp, dtype, wide = _arrays.namespace(query), query.dtype, query
    if memory.is_int8:  # numbers are restored in the precision of the scores
        dtype = _arrays.accumulation_dtype(xp, _arrays.dtype_name(query))
        wide = xp.astype(query, dtype, copy=False)
    no_key, no_value = (memory.read(part, range(0), dtype) for part in ("key", "value"))
    # Checks all options before anything is restored.
    problem = resolve(wide, no_key, no_value, options)
    plain = options._replace(sinks=None)
    can_read_codes = (
        memory.is_int8 and derivative_rules(wide, no_key, no_value, plain) is None
        and _choice.choose(problem)[0] == "kernels"
    )  # fmt: skip
    if can_read_codes:
        from scaledot import _code_kernels  # loads Numba

        can_read_codes = _code_kernels.can_do(problem)

    def attended(stretches: list[Stretch], window: Any, first: Any) -> State:
        if can_read_codes:
            here = plain._replace(window=window)
            states = (
                _code_kernels.run(problem, _code_kernels.Codes(*memory.codes(slots)),
                                  here._replace(kv_offset=offset, kv_len=length))
                for slots, offset, length in stretches
            )  # fmt: skip
            return functools.reduce(merge, states)
        chunks = memory.chunks(stretches, dtype, options.mask, first)
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
