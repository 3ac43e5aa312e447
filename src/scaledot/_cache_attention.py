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
    xp, wide = _arrays.namespace(query), query
    if memory.is_int8:  # numbers are restored in the precision of the scores
        dtype = _arrays.accumulation_dtype(xp, _arrays.dtype_name(query))
        wide = xp.astype(query, dtype, copy=False)
    problem, reads_codes = _resolved(memory, query, options)
    if wide is not query and not reads_codes:
        problem, reads_codes = _resolved(memory, wide, options)

    first = options.q_offset - (_checks.FARTHEST if window[0] is None else window[0])
    kinds = [(memory.ring(first), window, first)]
    if memory.num_sinks:
        kinds.insert(0, (memory.sinks(), options.window, 0))
    states = (
        _of_codes(memory, problem, stretches, _checks.window(seen, options.causal))
        if reads_codes
        else _of_numbers(memory, wide, options._replace(window=seen), stretches, start)
        for stretches, seen, start in kinds
    )
    state = functools.reduce(merge, states)
    if problem.sinks is not None:
        state = merge(state, _reference.keyless(xp, problem))
    return xp.astype(state.out, query.dtype, copy=False)


def _of_codes(
    memory: Memory, problem: Problem, stretches: list[Stretch], sides: tuple[int | None, int | None]
) -> State:
    """State over tokens whose codes the kernels read where they lie."""
    from scaledot import _code_kernels

    states = (
        _code_kernels.run(
            problem, _code_kernels.Codes(*memory.codes(slots)), sides, offset, length
        )
        for slots, offset, length in stretches
    )
    return functools.reduce(merge, states)


def _of_numbers(
    memory: Memory, query: Array, options: Options, stretches: list[Stretch], first: Any
) -> State:
    """State over tokens from position ``first`` on, as numbers of query's dtype."""
    chunks = memory.chunks(stretches, query.dtype, options.mask, first)
    return attend_chunks(
        query, chunks, causal=options.causal, window=options.window, scale=options.scale,
        softcap=options.softcap, alibi_slopes=options.alibi_slopes, score_mod=options.score_mod,
        mask_mod=options.mask_mod, dropout=options.dropout, seed=options.seed,
        q_offset=options.q_offset, impl=options.impl,
    )


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
