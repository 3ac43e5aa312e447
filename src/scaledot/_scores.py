"""From the product of a query and a key to its score."""

from __future__ import annotations

from collections.abc import Callable

from scaledot._typing import Array


def logit(
    product: Array,
    scale: float,
    softcap: float | None,
    bias: Array | None,
    slope: Array | None,
    distance: Array | None,
    tanh: Callable[[Array], Array],
) -> Array:
    """Score ``cap·tanh(scale·q·k / cap) + bias - slope·|q_pos - kv_pos|``.

    Arithmetic only: arguments are arrays that broadcast, or scalars. ``tanh`` is that of the
    array library. A term that is None is left out.
    """
    score = product * scale
    if softcap is not None:
        score = softcap * tanh(score / softcap)
    if bias is not None:
        score = score + bias
    if slope is not None:
        score = score - slope * distance
    return score
