"""Which query sees which key, and which weights dropout keeps: functions of positions alone.

Every function is written with comparisons, ``&``, ``|`` and integer arithmetic only, so that the
same code runs on arrays of any library that broadcast against each other and on scalars.
"""

from __future__ import annotations

from typing import Any

from scaledot._typing import Array


def in_window(q_pos: Array, kv_pos: Array, left: int, right: int) -> Array:
    """Whether key position lies in ``[q_pos - left, q_pos + right]``; causal is ``right <= 0``.

    Written with differences: positions near the ends of the integers do not overflow.
    """
    return (q_pos - kv_pos <= left) & (kv_pos - q_pos <= right)


def in_length(kv_pos: Array, kv_end: Array) -> Array:
    """Whether the key is a valid one: position below ``kv_offset + kv_len``."""
    return kv_pos < kv_end


def in_segment(q_segment: Array, kv_segment: Array) -> Array:
    """Whether query and key carry the same id; negative ids see nothing."""
    return (q_segment == kv_segment) & (kv_segment >= 0)


def visible(
    q_pos: Array,
    kv_pos: Array,
    left: int,
    right: int,
    kv_end: Array,
    q_segment: Array,
    kv_segment: Array,
) -> Array:
    """Whether a key may be seen, from positions, lengths and segments together."""
    return (
        in_window(q_pos, kv_pos, left, right)
        & in_length(kv_pos, kv_end)
        & in_segment(q_segment, kv_segment)
    )


def visible_range(
    first: Any, last: Any, left: int | None, right: int | None, kv_start: int, kv_count: int
) -> tuple[Any, Any]:
    """Half-open range of key indices that queries at positions first to last can see at all.

    ``first`` and ``last`` are integers, or arrays of one shape: then so are the ends of the ranges.
    Empty ranges lie between 0 and ``kv_count``, too.
    """
    low, high = first * 0, last * 0 + kv_count
    if left is not None:
        low = _smaller(_larger(low, first - left - kv_start), high)
    if right is not None:
        high = _larger(low, _smaller(high, last + right - kv_start + 1))
    return low, high


def _larger(a: Array, b: Array) -> Array:
    """The larger one of two integers, or of each pair of two arrays of them."""
    return a + (b - a) * (b > a)


def _smaller(a: Array, b: Array) -> Array:
    """The smaller one of two integers, or of each pair of two arrays of them."""
    return a + (b - a) * (b < a)


# Dropout must not depend on tiles, threads or shards, so each weight has its own number: a hash
# of (seed, head, q_pos, kv_pos) in 32-bit arithmetic that wraps around. Signed, because PyTorch
# offers no arithmetic on unsigned integers; constants above 2**31 are written as their negatives.
_GOLDEN = 0x9E3779B9 - 2**32
_FIRST = 0x7FEB352D
_SECOND = 0x846CA68B - 2**32


def _shift_right(x: Array, bits: int) -> Array:
    """Logical shift of a signed 32-bit integer."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)


def _mix(x: Array) -> Array:
    """Bijection of 32-bit integers in which every input bit reaches every output bit."""
    x = x ^ _shift_right(x, 16)
    x = x * _FIRST
    x = x ^ _shift_right(x, 15)
    x = x * _SECOND
    return x ^ _shift_right(x, 16)


def dropout_head_keys(seed_low: Array, seed_high: Array, head: Array) -> Any:
    """Two 32-bit keys of a head of one batch entry."""
    first = _mix(_mix(_mix(seed_low) ^ seed_high) ^ head)
    return first, _mix(first + _GOLDEN)


def dropout_row_keys(seed_low: Array, seed_high: Array, head: Array, q_pos: Array) -> Any:
    """Two 32-bit keys of a row of weights; within one head no two rows share the first."""
    first, second = dropout_head_keys(seed_low, seed_high, head)
    row_a = _mix(first ^ q_pos)
    row_b = _mix((row_a + _GOLDEN) ^ second)
    return row_a, row_b


def dropout_threshold(dropout: float) -> int:
    """Number of the 2**24 hash values that are dropped."""
    return round(dropout * 2**24)


def dropout_keeps(row_a: Array, row_b: Array, kv_pos: Array, threshold: int) -> Array:
    """Whether dropout keeps the weight of this key, with probability 1 - threshold / 2**24."""
    x = (kv_pos ^ row_a) * _FIRST
    x = (x ^ _shift_right(x, 15)) + row_b
    x = x * _SECOND
    x = x ^ _shift_right(x, 16)
    return _shift_right(x, 8) >= threshold
