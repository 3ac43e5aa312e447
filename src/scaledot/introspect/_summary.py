"""A few numbers for each head."""

from __future__ import annotations

from dataclasses import dataclass, fields

from scaledot.introspect._tables import Numbers, mean_over, table
from scaledot.introspect._trace import Trace, check_trace


@dataclass(frozen=True, eq=False)
class Summary:
    """Means over the queries that see a key; arrays have the shape (num_layers, num_heads).

    Attributes
    ----------
    entropy : array
        In nats: 0 for one key alone, ``log(visible)`` for all alike.
    max_weight : array
        Largest weight of a query.
    saturation : array
        ``max_weight · (1 - max_weight)``, of each query, then the mean.
    mean_distance : array
        Tokens between a query and what it reads.
    sink_mass : array
        Weight on key 0 and on learnt sinks; as `scaledot.Stats` has it, over all queries.
    visible : array
        Keys that a query may see.
    """

    entropy: Numbers
    max_weight: Numbers
    saturation: Numbers
    mean_distance: Numbers
    sink_mass: Numbers
    visible: Numbers


def summary(trace: Trace) -> Summary:
    """Entropy, largest weight, saturation, distance, sinks and sight of each head.

    Parameters
    ----------
    trace : Trace
        As `scaledot.introspect.trace` makes it.

    Returns
    -------
    Summary
        Arrays of shape (num_layers, num_heads), nan where a layer has fewer heads than another or
        no query of a head sees a key.

    Raises
    ------
    TypeError
        Not a trace.

    Notes
    -----
    The numbers come from the statistics alone: the time does not depend on the lengths squared.

    References
    ----------
    Entropy and distance of heads: arXiv 1906.04341. Sinks: arXiv 2309.17453.

    Examples
    --------
    >>> import numpy as np
    >>> from scaledot import introspect
    >>> x = np.zeros((1, 2, 5, 4))  # one layer of two heads that read everything alike
    >>> introspect.summary(introspect.trace(x, x)).max_weight
    array([[0.2, 0.2]])
    """
    check_trace("trace", trace)
    found = {}
    for name in (x.name for x in fields(Summary)):
        found[name] = table([
            layer.stats.sink_mass if name == "sink_mass"
            else mean_over(getattr(layer.stats, name), layer.stats.visible > 0)
            for layer in trace.layers
        ])  # fmt: skip
    return Summary(**found)
