"""Detectors: planted heads are found, others are not, and scores are those of dense weights."""

import math
import tracemalloc

import numpy as np
import pytest

import naive
from compare import EPS, assert_close
from scaledot import Stats, introspect
from scaledot.lessons import _sentence

HALF = 14
N = 2 * HALF
TOKENS = [f"word{i % HALF}" for i in range(N)]  # each once, then all of them again
SHARP, BLUNT = 9.0, 6.0  # scores of a planted key: 0.997 and 0.94 of the weight of 28 keys


def planted():
    """Scores of heads that do one thing each, (num_heads, N, N), and what each must be found as."""
    q, kv = np.indices((N, N))
    rng = np.random.default_rng(5)
    same = (q % HALF == kv % HALF) & (kv < q)
    return {
        "previous": (BLUNT * (kv == q - 1), {"previous token"}),
        "sharp previous": (2 * SHARP * (kv == q - 1), {"previous token", "saturated"}),
        "induction": (BLUNT * ((q % HALF == (kv - 1) % HALF) & (kv > 0) & (kv < q)), {"induction"}),
        "duplicate": (BLUNT * same, {"duplicate token"}),
        "rests on the first": (4.5 * (kv == 0), {"sink"}),
        "rests on the fourth": (BLUNT * (kv == 3), {"sink"}),
        "only the first": (SHARP * (kv == 0), {"sink", "dead", "saturated"}),
        "only the last": (SHARP * (kv == N - 1), {"sink", "dead", "saturated"}),
        "even": (0.0 * kv, {"uniform"}),
        "itself": (SHARP * (kv == q), {"saturated"}),
        "next": (BLUNT * (kv == q + 1), set()),
        **{f"noise {i}": (rng.standard_normal((N, N)) * 1.5, set()) for i in range(4)},
    }


def of_scores(scores, *, tokens=TOKENS, **options):
    """A trace of one layer whose scores are given, (num_heads, len_q, len_kv)."""
    key = np.eye(scores.shape[-1], dtype=scores.dtype)[None]  # one key head, shared
    return introspect.trace([scores], [key], scale=1.0, tokens=tokens, **options)


def kinds(trace):
    """Kinds that were found, for each head of the only layer."""
    found = [set() for _ in range(trace.layers[0].num_heads)]
    for finding in introspect.findings(trace):
        assert finding.layer == 0
        found[finding.head].add(finding.kind)
    return found


@pytest.mark.parametrize("causal", [False, True])
def test_planted_heads(causal):
    heads = planted()
    if causal:
        for name in ("next", "rests on the fourth", "only the last"):
            del heads[name]  # there is nothing to be seen
    scores = np.stack([scores for scores, _ in heads.values()])
    found = kinds(of_scores(scores, causal=causal))
    assert dict(zip(heads, found, strict=True)) == {n: kinds for n, (_, kinds) in heads.items()}


def test_without_tokens_two_kinds_cannot_be_told():
    scores = np.stack([scores for scores, _ in planted().values()])
    trace = of_scores(scores, tokens=None)
    found = introspect.head_scores(trace)
    assert tuple(found) == introspect.KINDS
    for kind, score in found.items():
        assert score.shape == (1, len(scores))
        assert np.isnan(score).all() == (kind in ("induction", "duplicate token"))
    assert not {"induction", "duplicate token"} & set.union(*kinds(trace))


def test_what_cannot_be_told_is_said():
    few, x = f"no query sees {5} keys", np.zeros((1, 1, 4, 4))
    tokens = "there are no tokens to compare"
    kinds = introspect.KINDS
    unknown = introspect.unknown(introspect.trace(x, x))
    assert unknown == {"sink": few, "uniform": few, "previous token": few, "induction": tokens,
                       "duplicate token": tokens}  # fmt: skip
    assert list(unknown) == [kind for kind in kinds if kind in unknown]
    long = np.zeros((1, 2, 12, 4))
    assert introspect.unknown(introspect.trace(long, long, tokens=[*"abcdefabcdef"])) == {}
    never = "no token comes again before enough others"
    unknown = introspect.unknown(introspect.trace(long, long, tokens=[*"abcdefghijkl"]))
    assert unknown == {"induction": never, "duplicate token": never}
    alone = introspect.unknown(introspect.trace(long[:, :, :1], long[:, :, :1]))
    assert alone["saturated"] == "no query sees two keys"


def expected_scores(weights, visible, learnt, *, tokens, key_tokens, q_pos, kv_offset=0,
                    left=None, kv_len=None, q_segment=None, kv_segment=None):  # fmt: skip
    """Scores of one head by their definitions, from all weights and pair by pair."""
    len_q, len_kv = weights.shape
    kv_len = len_kv if kv_len is None else kv_len
    q_segment = np.zeros(len_q) if q_segment is None else q_segment
    kv_segment = np.zeros(len_kv) if kv_segment is None else kv_segment
    rows = {kind: [] for kind in introspect.KINDS}
    enough = []
    for i in range(len_q):
        seen = int(visible[i].sum())
        largest = weights[i].max()
        if seen >= 2:
            rows["saturated"].append((2 * largest - 1) ** 2 if largest > 0.5 else 0.0)
        if seen >= 5:
            enough.append(i)
            entropy = -sum(w * math.log(w) for w in weights[i] if w > 0)
            rows["uniform"].append(entropy / math.log(seen))
            before = q_pos[i] - 1 - kv_offset
            if 0 <= before < kv_len:
                rows["previous token"].append(weights[i, before])
        reach = [
            j for j in range(kv_len)
            if kv_offset + j < q_pos[i] and (left is None or q_pos[i] - left <= kv_offset + j)
            and q_segment[i] == kv_segment[j]
        ]  # fmt: skip
        twins = [j for j in reach if key_tokens[j] == tokens[i]]
        after = [j for j in reach if j and key_tokens[j - 1] == tokens[i]
                 and kv_segment[j - 1] == kv_segment[j]]  # fmt: skip
        for kind, hits in (("duplicate token", twins), ("induction", after)):
            if hits and 5 * len(hits) <= seen:
                rows[kind].append(weights[i, hits].sum())
    if enough:
        rows["sink"] = [weights[enough].sum(axis=0).max() / len(enough) + learnt[enough].mean()]
        rows["dead"] = list(rows["sink"])
    rows["not a number"] = [0.0 for i in range(len_q) if visible[i].any()]
    blind = np.mean([not visible[i].any() for i in range(len_q)])
    rows["dead"] = [max(*rows["dead"], blind)] if rows["dead"] else [blind]
    return {kind: np.mean(x) if len(x) else np.nan for kind, x in rows.items()}


def cases():
    """Options, with the lengths and what else the definitions need to know."""
    rng = np.random.default_rng(11)
    segments, mixed = np.repeat([0, 1, 2], [7, 9, 8]), np.arange(24) % 5 // 2
    return {
        "full": ({}, 24, 24, {}),
        "causal": ({"causal": True}, 24, 24, {}),
        "window": ({"window": (9, 2)}, 24, 24, {"left": 9}),
        "decoding": ({"causal": True}, 6, 24, {}),
        "cross": ({"q_offset": 15, "kv_offset": 4}, 9, 24, {"kv_offset": 4}),
        "segments": ({"segment_ids": segments}, 24, 24,
                     {"q_segment": segments, "kv_segment": segments}),
        "lengths": ({"kv_len": 17}, 12, 24, {"kv_len": 17}),
        "lengths, ahead": ({"kv_len": 9, "q_offset": 3}, 12, 24, {"kv_len": 9}),
        "beyond": ({"q_offset": 22}, 9, 24, {}),
        "before": ({"q_offset": -4}, 9, 24, {}),
        "mixed segments": ({"segment_ids": mixed}, 24, 24,
                           {"q_segment": mixed, "kv_segment": mixed}),
        "padding": ({"segment_ids": np.where(np.arange(24) < 3, 0, -1)}, 24, 24,
                    {"q_segment": np.where(np.arange(24) < 3, 0, -1),
                     "kv_segment": np.where(np.arange(24) < 3, 0, -1)}),
        "sinks": ({"sinks": rng.standard_normal(3) + 2, "causal": True}, 24, 24, {}),
        "sinks, blind": ({"sinks": np.zeros(3), "mask": rng.random((3, 24, 1)) < 0.5}, 24, 24, {}),
        "mask": ({"mask": rng.random((3, 24, 24)) < 0.4}, 24, 24, {}),
        "few": ({"causal": True}, 4, 4, {}),
    }  # fmt: skip


def compared(kind, top_k):
    """Scores of a case, (num_heads,) for each kind, and those by the definitions."""
    options, len_q, len_kv, known = cases()[kind]
    rng = np.random.default_rng(7)
    query = 2 * rng.standard_normal((3, len_q, 8))
    key = rng.standard_normal((3, len_kv, 8))
    words = rng.integers(0, 6, len_kv).tolist()
    tokens = words if len_q == len_kv else rng.integers(0, 6, len_q).tolist()
    trace = introspect.trace([query], [key], tokens=tokens, key_tokens=words, top_k=top_k,
                             **options)  # fmt: skip
    got = introspect.head_scores(trace)
    _, lse, weights, visible = naive.whole(query, key, key, **options)
    first = options.get("q_offset", options.get("kv_len", len_kv) - len_q)
    want = [
        expected_scores(
            weights[h], visible[h],
            np.where(np.isinf(lse[h]) | ("sinks" not in options), 0, 1 - weights[h].sum(-1)),
            tokens=tokens, key_tokens=words, q_pos=first + np.arange(len_q), **known,
        )
        for h in range(3)
    ]  # fmt: skip
    return got, {kind: np.array([[scores[kind] for scores in want]]) for kind in got}


@pytest.mark.parametrize("kind", cases())
def test_scores_are_those_of_dense_weights(kind):
    got, want = compared(kind, top_k=24)
    for name in introspect.KINDS:
        # Scores lie between 0 and 1, and are as exact as numbers of that size.
        assert_close(1 + got[name], 1 + want[name], eps=EPS["float64"], len_kv=24)


@pytest.mark.parametrize("kind", ["causal", "mask", "sinks"])
@pytest.mark.parametrize("top_k", [1, 3])
def test_fewer_top_keys_give_lower_bounds(kind, top_k):
    got, want = compared(kind, top_k)
    exact, _ = compared(kind, 24)
    for name in ("saturated", "uniform"):
        np.testing.assert_array_equal(got[name], exact[name])
    for name in ("sink", "dead", "previous token", "induction", "duplicate token"):
        assert (got[name] <= want[name] + 24 * EPS["float64"]).all(), name


@pytest.mark.parametrize("words", [1, 2, 4])
def test_an_even_head_copies_nothing(words):
    """However few words there are, a head that reads everything alike is only uniform."""
    tokens = [str(i % words) for i in range(40)]
    assert kinds(of_scores(np.zeros((1, 40, 40)), tokens=tokens, causal=True)) == [{"uniform"}]


def test_one_query_of_another_length():
    trace = introspect.trace([np.zeros((2, 1, 4))], [np.zeros((2, 1, 4))], tokens=["a"])
    for kind, score in introspect.head_scores(trace).items():
        known = kind in ("dead", "not a number")  # it sees a key, with a number: neither
        assert np.isnan(score).all() != known, kind
    assert introspect.findings(trace) == []
    none = introspect.trace([np.zeros((2, 0, 4))], [np.zeros((2, 0, 4))], tokens=[])
    assert all(np.isnan(score).all() for score in introspect.head_scores(none).values())


def test_nan_is_a_finding_of_its_own():
    scores, bias = np.zeros((2, 8, 8)), np.zeros((2, 8, 8))
    scores[1, [0, 5, 6]] = np.nan  # the first sees nothing
    bias[0, 5, 6] = np.nan  # hidden
    mask = np.tri(8, k=-1, dtype=bool)
    trace = of_scores(scores, tokens=[*"abcdabcd"], mask=mask, bias=bias)
    assert kinds(trace) == [{"uniform"}, {"not a number"}]
    score = introspect.head_scores(trace)["not a number"]
    np.testing.assert_array_equal(score, [[0.0, 2 / 7]])
    reason = next(f.reason for f in introspect.findings(trace) if f.head == 1)
    assert reason.startswith("2 of 7 queries have no number")
    assert "'b' (query 5) is the first" in reason
    bound = introspect.Thresholds(not_a_number=0.5)
    assert not [f for f in introspect.findings(trace, thresholds=bound) if f.head == 1]


def test_nan_is_why_nothing_else_can_be_told():
    kinds, never = introspect.KINDS, "no token comes again before enough others"
    scores = np.full((2, 8, 8), np.nan)
    unknown = introspect.unknown(of_scores(scores, tokens=[*"abcdabcd"]))
    assert unknown == dict.fromkeys(kinds[1:], "no head has weights that are all numbers") | {
        "dead": unknown.get("dead")
    }
    scores[1] = 0
    assert introspect.unknown(of_scores(scores, tokens=[*"abcdabcd"])) == {}
    unknown = introspect.unknown(of_scores(scores[:, :4, :4], tokens=[*"abcd"]))
    others = "in heads whose weights are all numbers, "
    assert unknown["uniform"] == f"{others}no query sees 5 keys"
    assert unknown["induction"] == f"{others}{never}"


@pytest.mark.parametrize("name", ["sink", "not_a_number"])
def test_thresholds_are_numbers(name):
    with pytest.raises(TypeError, match=f"^{name} of the thresholds must be a number, got None"):
        introspect.Thresholds(**{name: None})
    with pytest.raises(ValueError, match=f"^{name} of the thresholds must be a number, got nan"):
        introspect.Thresholds(**{name: math.nan})


@pytest.mark.parametrize("size", [0.0, 1e5, 1e8])
def test_the_weight_of_a_sink_beside_scores_as_large(size):
    """Where lse is rounded to more than the weights, scores are those of small numbers."""
    rng = np.random.default_rng(2)
    bias = 16.0 * rng.integers(-1, 2, (3, 9, 8))  # exact beside 1e8 in float32
    sinks = np.array([16.0, -np.inf, 0.0])
    blind = np.arange(9) != 4
    kept = {"tokens": None, "mask": blind[:, None]}
    want = of_scores(np.zeros((3, 9, 8)), bias=bias, sinks=sinks, **kept)
    got = of_scores(np.zeros((3, 9, 8), "float32"), bias=(bias + size).astype("float32"),
                    sinks=(sinks + size).astype("float32"), **kept)  # fmt: skip
    for kind in ("sink", "dead"):
        a, b = (introspect.head_scores(x)[kind] for x in (got, want))
        assert_close(a, b, eps=EPS["float32"], len_kv=8)


def test_layers_of_different_heads():
    layers = [np.zeros((h, 8, 4)) for h in (1, 3)]
    trace = introspect.trace(layers, layers)
    uniform = introspect.head_scores(trace)["uniform"]
    np.testing.assert_array_equal(np.isnan(uniform), [[False, True, True], [False] * 3])
    assert [(f.layer, f.head) for f in introspect.findings(trace)] == [(0, 0)] + [
        (1, h) for h in range(3)
    ]


def test_thresholds():
    scores = np.stack([scores for scores, _ in planted().values()])
    trace = of_scores(scores)
    table = introspect.head_scores(trace)
    for kind in introspect.KINDS:
        bound = float(np.sort(table[kind][0])[-3])  # three heads reach it
        bounds = {k.replace(" ", "_"): bound if k == kind else np.inf for k in introspect.KINDS}
        found = introspect.findings(trace, thresholds=introspect.Thresholds(**bounds))
        assert {f.kind for f in found} == {kind}
        assert [f.head for f in found] == np.flatnonzero(table[kind][0] >= bound).tolist()
        assert [f.score for f in found] == [table[kind][0, f.head] for f in found]
        assert all(f.threshold == bound for f in found)


def test_a_score_of_nothing_can_be_reported():
    trace = of_scores(-900.0 * (np.arange(N)[None, :, None] != np.arange(N)))  # sees itself
    found = introspect.findings(trace, thresholds=introspect.Thresholds(induction=0.0))
    reason = next(f.reason for f in found if f.kind == "induction")
    assert reason.startswith("0.00 of the weight")
    assert "For example" not in reason


def test_reasons_name_tokens_and_numbers():
    heads = planted()
    trace = of_scores(np.stack([scores for scores, _ in heads.values()]))
    reasons = {(list(heads)[f.head], f.kind): f.reason for f in introspect.findings(trace)}
    assert "'word3' (key 3) takes 0.94" in reasons["rests on the fourth", "sink"]
    assert "over the 28 queries" in reasons["rests on the fourth", "sink"]
    assert "'word0' (key 0) takes 0.997" in reasons["only the first", "dead"]
    assert "3.33 nats of 3.33" in reasons["even", "uniform"]
    assert "as if 28.0 keys of 28.0" in reasons["even", "uniform"]
    assert "The largest weight is 0.997 on average" in reasons["itself", "saturated"]
    induction = reasons["induction", "induction"]
    assert "For example 'word0' (query 14) looks at 'word1' (key 1) with 0.94" in induction
    assert "over 14 queries" in induction
    duplicate = reasons["duplicate", "duplicate token"]
    assert "'word0' (query 14) looks at 'word0' (key 0) with 0.94" in duplicate
    previous = reasons["previous", "previous token"]
    assert "over 27 queries" in previous
    assert "'word0' (query 14)" not in previous
    bare = of_scores(heads["rests on the fourth"][0][None], tokens=None)
    assert "key 3 takes 0.94" in introspect.findings(bare)[0].reason


def test_learnt_sinks_and_queries_that_see_nothing():
    sinks = np.array([20.0, -20.0])
    trace = of_scores(np.zeros((2, 12, 12)), tokens=None, sinks=sinks)
    found = {(f.head, f.kind): f.reason for f in introspect.findings(trace)}
    assert set(found) == {(0, "sink"), (0, "dead"), (1, "uniform")}
    assert "and the learnt sink 1.00" in found[0, "sink"]
    assert "key 0 and the learnt sink take 1.000" in found[0, "dead"]
    mask = np.ones((2, 12, 1), bool)
    mask[1] = False
    found = introspect.findings(of_scores(np.zeros((2, 12, 12)), tokens=None, mask=mask))
    assert [(f.head, f.kind) for f in found] == [(0, "uniform"), (1, "dead")]
    assert "100% of the queries see no key" in found[1].reason


def test_a_real_model():
    data = _sentence.load()
    trace = introspect.trace(data.query, data.key, tokens=data.tokens)
    found = {(f.layer, f.head, f.kind): f for f in introspect.findings(trace)}
    # What data/README.md tells of these heads.
    assert [place for place in found if place[2] == "previous token"] == [(0, 2, "previous token")]
    assert "'[CLS]' (key 0) takes 0.90" in found[4, 5, "sink"].reason
    assert not [place for place in found if place[:2] == (1, 8)]  # looks one ahead
    weights = naive.attention(*(x.astype(float) for x in (data.query, data.key, data.value)))[2]
    sink = weights.mean(axis=2).max(axis=-1)  # every query sees all 16 keys
    scores = introspect.head_scores(trace)
    assert_close(scores["sink"], sink, eps=EPS["float32"], len_kv=16)
    before = np.diagonal(weights, -1, axis1=2, axis2=3)
    shown = np.sort(weights, axis=-1)[:, :, 1:, -8]  # the smallest weight of the top keys
    listed = np.where(before >= shown, before, 0).mean(axis=-1)
    assert_close(scores["previous token"], listed, eps=EPS["float32"], len_kv=16)


def test_a_hundred_thousand_tokens_in_little_memory():
    n, k = 100_000, 2
    place = np.arange(n)
    ones, rows = np.ones((1, n)), np.zeros((1, n))
    stats = Stats(
        lse=rows, entropy=rows, max_weight=ones, saturation=rows, mean_distance=ones,
        top_keys=np.stack([place - 1, place - 2], axis=-1)[None].clip(-1),
        top_weights=np.stack([ones, rows], axis=-1), visible=place[None] + 1,
        received=ones, received_last=None, sink_mass=np.zeros(1), block_map=None,
    )  # fmt: skip
    tokens = [str(i % 5000) for i in range(n)]
    layer = introspect.Layer("long", stats, options={"causal": True})
    trace = introspect.Trace((layer,), tokens)
    tracemalloc.start()
    try:
        scores = introspect.head_scores(trace)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert scores["previous token"] == [[1.0]]
    assert scores["induction"] == [[0.0]]
    assert peak < 100 * 8 * n * k  # some arrays of the size of the statistics; n × n is 80 GB
