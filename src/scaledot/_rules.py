"""Which derivative rules a call goes by: those of the library that differentiates or traces it."""

from __future__ import annotations

from typing import Any

import numpy as np

from scaledot import _arrays
from scaledot._spec import Options


def derivative_rules(query: Any, key: Any, value: Any, options: Options) -> Any:
    """Module of the rules by which a library differentiates, transforms or traces a call.

    None where nobody does, or where it is to see the array operations that the call consists of.
    """
    kind = "numpy" if isinstance(query, np.ndarray) else _arrays.library(query)
    if kind == "torch":
        from scaledot import _torch_rules

        return _torch_rules if _torch_rules.applies(query, key, value, options) else None
    if kind == "jax":
        from scaledot import _jax_rules

        return _jax_rules if _jax_rules.applies(query, options, key, value) else None
    return None


def tracing_rules(query: Any, options: Options) -> Any:
    """Module of the rules by which a library traces weights as one operator, or None."""
    if _arrays.library(query) != "torch":
        return None
    from scaledot import _torch_rules

    return _torch_rules if _torch_rules.traces(query, options) else None


def packed_rules(query: Any, key: Any, value: Any, options: Options) -> Any:
    """Module of the rules by which a library differentiates packed sequences at once, or None."""
    if _arrays.library(query) != "torch":
        return None
    from scaledot import _torch_packed

    return _torch_packed if _torch_packed.applies(query, key, value, options) else None


def without_graph(x: Any) -> Any:
    """A tensor as a constant; a pair, or options, of tensors as constants; else x as it is."""
    if isinstance(x, Options):
        return Options(*map(without_graph, x))
    if isinstance(x, tuple):
        return tuple(map(without_graph, x))
    return x.detach() if _arrays.library(x) == "torch" else x
