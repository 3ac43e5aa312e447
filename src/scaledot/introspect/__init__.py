"""Look inside attention: what each head does, in memory linear in the length.

`look` takes the queries and keys of one layer, `trace` those of a whole model; both compute
`scaledot.attention_stats` once and keep it. Everything else reads what they keep: `findings` and
`head_scores` tell which heads do what, `unknown` what cannot be told, `summary` and `compare` give
numbers for each layer and head, `rollout` follows attention through the layers, `to_bertviz` hands
the weights on. `capture` makes a trace of what a model computes while it runs.
"""

from scaledot.introspect._bertviz import to_bertviz
from scaledot.introspect._capture import Capture, capture
from scaledot.introspect._compare import Comparison, Difference, compare
from scaledot.introspect._detectors import (
    KINDS,
    Finding,
    Thresholds,
    findings,
    head_scores,
    unknown,
)
from scaledot.introspect._rollout import rollout
from scaledot.introspect._summary import Summary, summary
from scaledot.introspect._trace import Layer, Trace, look, trace

__all__ = [
    "KINDS",
    "Capture",
    "Comparison",
    "Difference",
    "Finding",
    "Layer",
    "Summary",
    "Thresholds",
    "Trace",
    "capture",
    "compare",
    "findings",
    "head_scores",
    "look",
    "rollout",
    "summary",
    "to_bertviz",
    "trace",
    "unknown",
]
