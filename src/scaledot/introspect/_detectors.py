"""Heads that do one recognisable thing, found in the statistics alone."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from scaledot._errors import type_error, value_error
from scaledot.introspect._facts import FEWEST, Facts, Flags, Integers
from scaledot.introspect._tables import Numbers, mean_over, table
from scaledot.introspect._trace import Trace, check_trace


@dataclass(frozen=True)
class Thresholds:
    """Scores from which on a head is reported; `head_scores` defines the scores.

    Attributes
    ----------
    not_a_number : float
        1e-9: a single query.
    saturated : float
        0.9: a largest weight of about 0.975 in every row.
    sink : float
        0.5: half of the weight, on average. arXiv 2410.10781 counts from 0.3.
    dead : float
        0.95: a twentieth of the output comes from elsewhere.
    uniform : float
        0.98 of the entropy that there can be.
    previous_token, induction, duplicate_token : float
        0.5: half of the weight, on average.
    """

    not_a_number: float = 1e-9
    saturated: float = 0.9
    sink: float = 0.5
    dead: float = 0.95
    uniform: float = 0.98
    previous_token: float = 0.5
    induction: float = 0.5
    duplicate_token: float = 0.5

    def __post_init__(self) -> None:
        """Check that all are numbers; infinity turns a kind off."""
        for name in (x.name for x in fields(self)):
            given = getattr(self, name)
            if isinstance(given, (bool, np.bool_)) or not isinstance(given, numbers.Real):
                raise type_error(
                    f"{name} of the thresholds must be a number", repr(given),
                    "Pass math.inf for a kind that is not to be reported.",
                )
            if math.isnan(given):
                raise value_error(
                    f"{name} of the thresholds must be a number", given,
                    "Pass math.inf for a kind that is not to be reported.",
                )


@dataclass(frozen=True)
class Finding:
    """One thing that one head does.

    Attributes
    ----------
    kind : str
        One of `KINDS`.
    layer, head : int
        From 0.
    score : float
        As `head_scores` has it.
    threshold : float
        The score it reached.
    reason : str
        What was seen, in numbers, and what it means.
    """

    kind: str
    layer: int
    head: int
    score: float
    threshold: float
    reason: str


class Measure(NamedTuple):
    """Scores of all heads of a layer, (num_heads,), and what to say about one of them."""

    score: Numbers
    reason: Callable[[int], str]


def head_scores(trace: Trace) -> dict[str, Numbers]:
    """How much each head behaves in each of the known ways, 0 to 1.

    Parameters
    ----------
    trace : Trace
        As `scaledot.introspect.trace` makes it; only its statistics are read.

    Returns
    -------
    dict of str to array, shape (num_layers, num_heads)
        One entry for each of `KINDS`. nan where nothing can be said: without tokens for
        induction and duplicate token, without a query that counts, for heads that are not there.

    Raises
    ------
    TypeError
        Not a trace.

    Notes
    -----
    Scores are means over the queries that count. So that they mean something, a query counts only
    if the keys in question are at most a fifth of those it sees: even attention then reaches no
    threshold. The first tokens of a causal model, which have little choice, do not count.

    not a number
        Share of the queries that see a key whose weights are nan. The head's other scores are nan
        where such a query counts.
    saturated
        ``1 - 4 · saturation`` where the largest weight is above ½, else 0, over the queries that
        see at least two keys. The softmax's derivative ``diag(w) - w wᵀ`` vanishes at 1.
    sink
        Weight on the one key that takes the most, and on the head's learnt sink, over the queries
        that see at least five keys.
    dead
        The larger of two: the score of sink; and the share of queries that see no key. At 1 the
        head adds the same vector, or 0, everywhere.
    uniform
        ``entropy / log(visible)``, over the queries that see at least five keys. What learnt sinks
        take lowers it.
    previous token
        Weight on the key at the position before the query's.
    induction
        Weight on keys before the query's position that come right after an earlier occurrence of
        the query's token: having seen ``A B … A``, the head looks at ``B``.
    duplicate token
        Weight on earlier occurrences of the query's token.

    The last three add up weights among the `top_k` largest of each query, and so are lower bounds:
    a larger ``top_k`` makes them exact. Occurrences outside of the window or in another segment do
    not count; what masks hide is not known here and lowers the scores.

    References
    ----------
    saturated: arXiv 1706.03762 (section 3.2.1). sink: arXiv 2309.17453, 2410.10781. dead: arXiv
    1906.04341 (attention as a no-op). previous token, duplicate token: arXiv 2211.00593.
    induction: arXiv 2209.11895.

    Examples
    --------
    >>> import numpy as np
    >>> from scaledot import introspect
    >>> x = np.zeros((1, 2, 8, 4))
    >>> introspect.head_scores(introspect.trace(x, x, causal=True))["uniform"]
    array([[1., 1.]])
    """
    check_trace("trace", trace)
    measures = [_measures(Facts(trace, layer)) for layer in trace.layers]
    return {kind: table([found[kind].score for found in measures]) for kind in KINDS}


def findings(trace: Trace, *, thresholds: Thresholds = Thresholds()) -> list[Finding]:
    """Heads that do something recognisable, with the reason in words.

    Parameters
    ----------
    trace : Trace
        As `scaledot.introspect.trace` makes it; only its statistics are read. With tokens, they
        are named, and induction and duplicate-token heads can be found.
    thresholds : Thresholds
        Scores from which on a head is reported.

    Returns
    -------
    list of Finding
        By layer, head and the order of `KINDS`. A head may do several things.

    Raises
    ------
    TypeError
        Not a trace, or thresholds that are not `Thresholds`.

    Notes
    -----
    `head_scores` defines the scores. They describe where a head looks in this one input: that a
    head is reported says nothing about what happens without it, and a head that is not may do the
    same elsewhere.

    References
    ----------
    As in `head_scores`.

    Examples
    --------
    >>> import numpy as np
    >>> from scaledot import introspect
    >>> x = np.eye(8)[None, None] * 8
    >>> before = np.roll(x, -1, axis=-2)  # the query at i looks for the key at i - 1
    >>> for found in introspect.findings(introspect.trace(np.roll(x, 1, axis=-2), x)):
    ...     print(found.kind, round(found.score, 3))
    saturated 1.0
    previous token 1.0
    """
    check_trace("trace", trace)
    if not isinstance(thresholds, Thresholds):
        raise type_error(
            "thresholds must be scaledot.introspect.Thresholds", type(thresholds).__name__,
            "Pass Thresholds(sink=0.8), for example.",
        )
    found = []
    for number, layer in enumerate(trace.layers):
        measures = _measures(Facts(trace, layer))
        for head in range(layer.num_heads):
            for kind in KINDS:
                score = float(measures[kind].score[head])
                threshold = float(getattr(thresholds, kind.replace(" ", "_")))
                if score >= threshold:
                    reason = measures[kind].reason(head)
                    found.append(Finding(kind, number, head, score, threshold, reason))
    return found


def unknown(trace: Trace) -> dict[str, str]:
    """Kinds of findings about which this trace can say nothing, with the reason.

    Parameters
    ----------
    trace : Trace
        As `scaledot.introspect.trace` makes it.

    Returns
    -------
    dict of str to str
        From the kind to the reason, in the order of `KINDS`; kinds that `head_scores` has a
        number of for at least one head are not there.

    Raises
    ------
    TypeError
        Not a trace.

    Notes
    -----
    That no head was found is news only for the other kinds.

    References
    ----------
    As in `head_scores`.

    Examples
    --------
    >>> import numpy as np
    >>> from scaledot import introspect
    >>> x = np.zeros((1, 2, 8, 4))
    >>> introspect.unknown(introspect.trace(x, x))["induction"]
    'there are no tokens to compare'
    """
    scores = head_scores(trace)
    broken = scores["not a number"]
    where = ""
    if (broken > 0).any():
        where = "in heads whose weights are all numbers, "
    few = f"{where}no query sees {FEWEST} keys"
    reasons = {"not a number": "no query sees a key", "saturated": f"{where}no query sees two keys"}
    if (broken > 0).any() and not (broken == 0).any():
        few = reasons["saturated"] = "no head has weights that are all numbers"
    for kind in ("induction", "duplicate token"):
        if trace.tokens is None:
            reasons[kind] = "there are no tokens to compare"
        elif not few.startswith("no head"):
            reasons[kind] = f"{where}no token comes again before enough others"
    return {kind: reasons.get(kind, few) for kind in KINDS if np.isnan(scores[kind]).all()}


def _measures(facts: Facts) -> dict[str, Measure]:
    return {kind: detector(facts) for kind, detector in _DETECTORS.items()}


def _not_a_number(facts: Facts) -> Measure:
    seeing = facts.visible > 0

    def reason(head: int) -> str:
        first = facts.query_name(int(facts.broken[head].argmax()))
        return (
            f"{facts.broken[head].sum()} of {seeing[head].sum()} queries have no number: their "
            f"weights are nan, and so is what the head adds there; {first} is the first. The query "
            "itself, a key it sees, its bias or the head's sink is nan or infinite, or a score is "
            "too large."
        )

    return Measure(mean_over(facts.broken.astype(np.float64), seeing), reason)


def _saturated(facts: Facts) -> Measure:
    stats, several = facts.stats, facts.visible >= 2
    sharp = np.where(stats.max_weight > 0.5, 1 - 4 * stats.saturation, 0.0)
    sharp = np.where(np.isnan(stats.max_weight), np.nan, sharp)

    def reason(head: int) -> str:
        use = several[head]
        return (
            f"The largest weight is {stats.max_weight[head, use].mean():.3f} on average over the "
            f"{use.sum()} queries that see at least two keys. The derivative of the softmax, which "
            f"can be 0.25, is {stats.saturation[head, use].mean():.2g} there: almost no gradient "
            "reaches the scores, so training hardly changes where the head looks."
        )

    return Measure(mean_over(sharp, several), reason)


class _Rest(NamedTuple):
    """Where the queries of each head rest, (num_heads,)."""

    key: Integers  # the one that takes most
    share: Numbers  # its weight, over the queries that see enough keys
    learnt: Numbers  # that of the learnt sink
    queries: Integers  # how many of them


def _rest(facts: Facts) -> _Rest:
    mass, count = facts.key_mass(), facts.enough.sum(axis=-1)
    key = mass.argmax(axis=-1) if facts.len_kv else np.zeros(len(mass), np.int64)
    share = _share(mass.max(axis=-1, initial=0.0), count)
    return _Rest(key, share, mean_over(facts.learnt, facts.enough), count)


def _sink(facts: Facts) -> Measure:
    rest = _rest(facts)

    def reason(head: int) -> str:
        text = (
            f"{facts.key_name(int(rest.key[head]))} takes {rest.share[head]:.2f} of the weight, on "
            f"average over the {rest.queries[head]} queries that see at least {FEWEST} keys"
        )
        if rest.learnt[head] > 0:
            text += f", and the learnt sink {rest.learnt[head]:.2f}"
        return (
            f"{text}. Queries that find nothing to read tend to rest on such a key; the rest of "
            "the weight is what the head reads elsewhere."
        )

    return Measure(rest.share + rest.learnt, reason)


def _dead(facts: Facts) -> Measure:
    rest = _rest(facts)
    idle = rest.share + rest.learnt
    blind = mean_over((facts.visible == 0).astype(np.float64), np.ones_like(facts.enough))

    def reason(head: int) -> str:
        if not idle[head] > blind[head]:
            return (
                f"{blind[head]:.0%} of the queries see no key, so the output there is 0. If they "
                "are padding, trace the tokens alone."
            )
        takes = "and the learnt sink take" if facts.learnt[head].any() else "takes"
        return (
            f"{facts.key_name(int(rest.key[head]))} {takes} {idle[head]:.3f} of the weight, on "
            f"average over the {rest.queries[head]} queries that see at least {FEWEST} keys. The "
            "head adds (almost) the same vector for each: it moves nothing between tokens here."
        )

    return Measure(np.where(rest.queries > 0, np.maximum(idle, blind), blind), reason)


def _uniform(facts: Facts) -> Measure:
    entropy, most = facts.stats.entropy, np.log(np.maximum(facts.visible, 2))

    def reason(head: int) -> str:
        use = facts.enough[head]
        alike, seen = np.exp(entropy[head, use]).mean(), facts.visible[head, use].mean()
        return (
            f"The entropy is {entropy[head, use].mean():.2f} nats of {most[head, use].mean():.2f} "
            f"that there can be, on average over the {use.sum()} queries that see at least "
            f"{FEWEST} keys, as if {alike:.1f} keys of {seen:.1f} were read alike: the head "
            "averages over what it sees and chooses nothing."
        )

    return Measure(mean_over(entropy / most, facts.enough), reason)


def _previous_token(facts: Facts) -> Measure:
    before = facts.q_pos - 1 - facts.kv_offset  # number of the key before each query
    use = facts.enough & ((before >= 0) & (before < facts.kv_count))
    return _listed(
        facts, facts.stats.top_keys == before[:, None], use,
        "lies on the key just before the query: the head looks one token back, which other heads "
        "can build on.",
    )


def _induction(facts: Facts) -> Measure:
    if facts.tokens is None or not facts.len_kv:
        return _unknown(facts)
    query, key = facts.token_numbers
    together = facts.kv_segment[1:] == facts.kv_segment[:-1]
    after = np.append(-1, np.where(together, key[:-1], -1))  # the token before each key
    return _earlier(
        facts, query, after,
        "lies on what followed an earlier occurrence of the query's token: having seen “A B … A”, "
        "the head looks at “B”, which copying and learning in context rest on.",
    )


def _duplicate_token(facts: Facts) -> Measure:
    if facts.tokens is None or not facts.len_kv:
        return _unknown(facts)
    query, key = facts.token_numbers
    return _earlier(
        facts, query, key,
        "lies on earlier occurrences of the query's own token: the head tells that, and where, a "
        "token came before.",
    )


def _unknown(facts: Facts) -> Measure:
    """Measure nothing, nan for each head."""
    return Measure(np.full(len(facts.visible), np.nan), str)


def _earlier(facts: Facts, query: Integers, key: Integers, meaning: str) -> Measure:
    """Weight on keys before the query whose number is the query's, (n,) and (m,)."""
    top = facts.stats.top_keys
    hit = (key[top] == query[:, None]) & (top + facts.kv_offset < facts.q_pos[:, None]) & (top >= 0)
    count = _count_earlier(facts, query, key)
    use = (count > 0) & (count * FEWEST <= facts.visible)
    return _listed(facts, hit, use, meaning)


def _count_earlier(facts: Facts, query: Integers, key: Integers) -> Integers:
    """Number of keys in reach before each query that have the query's number, (n,)."""
    size = len(key) + 1
    places = np.sort(key * size + np.arange(len(key)))
    stop = np.clip(facts.q_pos - facts.kv_offset, 0, facts.kv_count)
    start = np.zeros_like(stop)
    if facts.left is not None:
        start = np.clip(facts.q_pos - facts.left - facts.kv_offset, 0, stop)
    return np.searchsorted(places, query * size + stop) - np.searchsorted(
        places, query * size + start
    )


def _listed(facts: Facts, hit: Flags, use: Flags, meaning: str) -> Measure:
    """Weight on the top keys that are hits, (H, n, k), over the queries in use, (H, n)."""
    weight = np.where(hit, facts.stats.top_weights, 0.0).sum(axis=-1)
    weight = np.where(np.isnan(facts.stats.max_weight), np.nan, weight)
    score = mean_over(weight, use)

    def reason(head: int) -> str:
        count = use[head].sum()
        text = f"{score[head]:.2f} of the weight, on average over {count} queries, {meaning}"
        query = int(np.where(use[head], weight[head], -1.0).argmax())
        if not weight[head, query] > 0:  # nothing to show
            return text
        rank = int(np.where(hit[head, query], facts.stats.top_weights[head, query], -1.0).argmax())
        key = facts.key_name(int(facts.stats.top_keys[head, query, rank]))
        single = facts.stats.top_weights[head, query, rank]
        return f"{text} For example {facts.query_name(query)} looks at {key} with {single:.2f}."

    return Measure(score, reason)


def _share(mass: Numbers, count: Integers) -> Numbers:
    """Mass per query, (num_heads,); nan without queries."""
    share: Numbers = np.divide(mass, count, out=np.full(mass.shape, np.nan), where=count > 0)
    return share


_DETECTORS: dict[str, Callable[[Facts], Measure]] = {
    "not a number": _not_a_number,
    "saturated": _saturated,
    "sink": _sink,
    "dead": _dead,
    "uniform": _uniform,
    "previous token": _previous_token,
    "induction": _induction,
    "duplicate token": _duplicate_token,
}

KINDS = tuple(_DETECTORS)
"""Kinds of findings, in their order."""
