"""The oracle against numbers worked by hand, facts of softmax and the shared oracle."""

import ast
import inspect
import itertools
import math
from pathlib import Path

import numpy as np
import pytest

import attention_cases
import cases
import naive

INF = math.inf


def assert_close(result, truth, terms=1, largest_score=1.0):
    """Assert equality up to rounding: a sum of `terms`, each with the error of its exponential.

    The rounding error of a score, eps times its magnitude, is the relative error of its weight.
    """
    result, truth = np.asarray(result, np.float64), np.asarray(truth, np.float64)
    assert result.shape == truth.shape
    finite = np.isfinite(truth)
    np.testing.assert_array_equal(result[~finite], truth[~finite])
    if finite.any():
        eps = np.finfo(np.float64).eps
        floor = eps * (math.sqrt(terms) + largest_score) * max(np.abs(truth[finite]).max(), 1)
        assert np.abs(result[finite] - truth[finite]).max() <= 2 * floor


def weights_of(scores, **options):
    """Return out, lse and weights of one query whose scores are those given, values 0, 1, ..."""
    key = np.array(scores, np.float64)[:, None]
    value = np.arange(len(scores), dtype=np.float64)[:, None]
    return naive.attention(np.ones((1, 1)), key, value, scale=1.0, **options)


def picture(len_q, len_kv, **options):
    """Return which keys each query sees, as rows of 0 and 1."""
    _, _, weights = naive.attention(
        np.zeros((len_q, 1)), np.zeros((len_kv, 1)), np.zeros((len_kv, 1)), **options
    )
    return ["".join(str(int(w > 0)) for w in row) for row in weights]


def test_two_scores():
    out, lse, weights = weights_of([2.0, 0.0])
    assert [round(w, 6) for w in weights[0]] == [0.880797, 0.119203]
    assert_close(weights, [[1 / (1 + math.exp(-2)), 1 / (1 + math.exp(2))]])
    assert_close(out, [[1 / (1 + math.exp(2))]])
    assert_close(lse, [math.log(math.exp(2) + 1)])


@pytest.mark.parametrize(
    ("width", "scale", "score"), [(4, None, 2.0), (9, None, 3.0), (0, None, 0.0), (4, -3.0, -12.0)]
)
def test_default_scale_is_one_over_root_d_k(width, scale, score):
    query, key, value = np.ones((2, width)), np.ones((4, width)), np.array([[1.0], [2], [3], [6]])
    out, lse, weights = naive.attention(query, key, value, scale=scale)
    assert_close(lse, [score + math.log(4)] * 2, largest_score=12)
    assert_close(weights, np.full((2, 4), 0.25))
    assert_close(out, [[3.0], [3.0]])


def test_score_of_minus_infinity_is_a_key_that_is_not_there():
    arrays = [[1.0]], [[-INF], [1.0], [1.0]], [[np.nan], [4.0], [6.0]]
    for result, truth in zip(
        naive.attention(*arrays, scale=1.0),
        ([[5]], [1 + math.log(2)], [[0, 0.5, 0.5]]),
        strict=True,
    ):
        assert_close(result, truth)


def test_softcap_comes_before_bias():
    _, lse, _ = weights_of([3.0], softcap=2.0, bias=10.0)
    assert_close(lse, [2 * math.tanh(1.5) + 10])


def test_huge_scores_do_not_overflow():
    out, lse, weights = weights_of([1000.0, -1000.0, 999.0])
    assert weights[0, 1] == 0
    assert_close(weights[0, [0, 2]], [1 / (1 + math.exp(-1)), 1 / (1 + math.exp(1))])
    assert_close(lse, [1000 + math.log1p(math.exp(-1))])
    assert_close(out, [[2 / (1 + math.exp(1))]])


def test_sink_takes_its_share():
    out, lse, weights = weights_of([0.0, 0.0], sinks=[math.log(2)])
    assert_close(weights, [[0.25, 0.25]])
    assert_close(out, [[0.25]])
    assert_close(lse, [math.log(4)])


@pytest.mark.parametrize(("sinks", "lse"), [(None, -INF), ([1.5], 1.5)])
def test_row_without_keys(sinks, lse):
    result = weights_of([0.0, 0.0], mask=False, sinks=sinks)
    np.testing.assert_array_equal(result[0], [[0.0]])
    np.testing.assert_array_equal(result[1], [lse])
    np.testing.assert_array_equal(result[2], [[0.0, 0.0]])


def test_alibi_counts_the_distance_between_positions():
    _, _, weights = weights_of([0.0, 0.0, 0.0], alibi_slopes=[math.log(2)])
    assert_close(weights, np.array([[1, 2, 4]]) / 7)  # the query is at position 2
    _, _, weights = weights_of([0.0, 0.0, 0.0], alibi_slopes=[math.log(2)], q_offset=1)
    assert_close(weights, np.array([[1, 2, 1]]) / 4)


def test_score_mod_sees_the_biased_score_and_where_it_is():
    calls = []

    def score_mod(score, batch, head, q_pos, kv_pos):
        calls.append((score, batch, head, q_pos, kv_pos))
        return -score

    arrays = np.zeros((2, 1, 2, 1, 1)), np.zeros((3, 2, 2, 1)), np.zeros((3, 2, 2, 1))
    bias = np.array([1.0, -INF])
    _, lse, _ = naive.attention(*arrays, bias=bias, score_mod=score_mod, q_offset=9, kv_offset=7)
    assert calls == [(1.0, batch, head, 9, 7) for batch in range(6) for head in range(2)]
    # Wide on purpose: a float32 table added to Python's own float would round to float32.
    assert {type(argument) for argument in calls[0]} == {np.float64, int}
    assert_close(lse, np.full((2, 3, 2, 1), -1.0))


@pytest.mark.parametrize(
    ("sizes", "options", "rows"),
    [
        ((2, 5), {"causal": True}, ["11110", "11111"]),
        ((5, 2), {"causal": True}, ["00", "00", "00", "10", "11"]),
        ((2, 5), {"causal": True, "q_offset": 0}, ["10000", "11000"]),
        ((2, 5), {"causal": True, "kv_offset": 7}, ["11110", "11111"]),
        ((2, 5), {"causal": True, "q_offset": 7, "kv_offset": 6}, ["11000", "11100"]),
        ((3, 3), {"causal": True, "q_offset": -1}, ["000", "100", "110"]),
        ((2, 5), {"causal": True, "kv_len": 3}, ["11000", "11100"]),
        ((2, 5), {"kv_len": 0}, ["00000", "00000"]),
        ((4, 4), {"window": (1, 0)}, ["1000", "1100", "0110", "0011"]),
        ((4, 4), {"window": (0, None)}, ["1111", "0111", "0011", "0001"]),
        ((4, 4), {"window": (None, 1), "q_offset": 1}, ["1110", "1111", "1111", "1111"]),
        ((4, 4), {"window": (1, 2), "causal": True}, ["1000", "1100", "0110", "0011"]),
        ((4, 4), {"window": (9, 9)}, ["1111"] * 4),
        ((3, 3), {"segment_ids": np.array([0, 0, 1])}, ["110", "110", "001"]),
        ((3, 3), {"segment_ids": np.array([0, -1, -1])}, ["100", "000", "000"]),
        ((2, 3), {"segment_ids": (np.array([4, 2]), np.array([2, -4, 4]))}, ["001", "100"]),
        ((2, 3), {"mask": np.array([[True], [False]])}, ["111", "000"]),
        ((2, 3), {"bias": np.array([0.0, -INF, np.finfo(np.float64).min])}, ["100", "100"]),
        ((1, 2), {"bias": np.full(2, np.finfo(np.float64).min)}, ["11"]),
        ((2, 3), {"mask_mod": lambda b, h, q, k: (q + k) % 2 == 0}, ["010", "101"]),
        ((2, 3), {"mask_mod": lambda b, h, q, k: k != 9, "kv_offset": 8}, ["101", "101"]),
    ],
)
def test_pictures(sizes, options, rows):
    assert picture(*sizes, **options) == rows


def test_all_exclusions_are_intersected():
    rows = picture(
        3, 5, causal=True, window=(3, 0), mask=np.array([0, 1, 1, 1, 1], bool),
        bias=np.array([[0, 0, 0, 0, 0], [0, 0, -INF, 0, 0], [0, 0, 0, 0, 0]]),
        segment_ids=(np.zeros(3, int), np.array([0, 0, 0, 1, 0])),
        mask_mod=lambda b, h, q, k: (q, k) != (4, 4),
    )  # fmt: skip
    assert rows == ["01100", "01000", "01100"]


def test_block_mask_counts_in_blocks_of_128_by_index():
    blocks = np.array([[True, False, True], [False, True, False]])
    rows = picture(130, 257, block_mask=blocks, q_offset=1000, kv_offset=-5)
    assert rows[127] == "1" * 128 + "0" * 128 + "1"
    assert rows[128] == "0" * 128 + "1" * 128 + "0"


def test_offsets_and_lengths_differ_by_batch_entry():
    zeros = np.zeros((2, 2, 1, 2, 1)), np.zeros((2, 2, 1, 3, 1)), np.zeros((2, 2, 1, 3, 1))
    options = {"causal": True, "kv_len": np.array([[3], [2]], np.uint8)}
    _, lse, _ = naive.attention(*zeros, **options)
    assert_close(np.exp(lse[:, :, 0]), [[[2, 3]] * 2, [[1, 2]] * 2])
    _, lse, _ = naive.attention(*zeros, **options, q_offset=np.array([-1, 1]))
    assert_close(np.exp(lse[:, :, 0]), [[[0, 1], [2, 3]], [[0, 1], [2, 2]]])


def test_grouped_heads_read_neighbours():
    # four query heads over two key heads: 0, 0, 1, 1
    value = np.array([[[1.0]], [[2.0]]])
    out, _, _ = naive.attention(np.ones((4, 1, 1)), np.ones((2, 1, 1)), value)
    assert out.ravel().tolist() == [1, 1, 2, 2]


def test_leading_axes_broadcast_together():
    value = np.arange(3.0).reshape(3, 1, 1, 1)
    out, lse, weights = naive.attention(np.ones((2, 1, 1, 1, 1)), np.ones((1, 1, 1, 1)), value)
    assert (out.shape, lse.shape, weights.shape) == ((2, 3, 1, 1, 1), (2, 3, 1, 1), (2, 3, 1, 1, 1))
    assert out.ravel().tolist() == [0, 1, 2, 0, 1, 2]


def test_two_axes_are_one_head():
    arrays = cases.case("two_axes").arguments("float64")
    results = naive.attention(**arrays, mask=np.ones((1, 5, 7), bool))
    truths = naive.attention(**{name: x[None] for name, x in arrays.items()})
    for result, truth in zip(results, truths, strict=True):
        np.testing.assert_array_equal(result, truth[0])


def test_hidden_data_cannot_matter():
    clean = cases.case("causal").arguments("float64") | {"kv_len": 6}
    clean["mask"] = np.array([1, 1, 0, 1, 1, 1, 1], bool)
    dirty = {name: np.array(x) for name, x in clean.items()} | {"bias": np.zeros((5, 7))}
    for name in ("key", "value"):
        dirty[name][..., 6, :] = np.nan  # behind the length
        dirty[name][..., 2, :] = -INF  # behind the mask
    dirty["bias"][0, 5] = np.nan  # in the future of query 0
    for result, truth in zip(naive.attention(**dirty), naive.attention(**clean), strict=True):
        np.testing.assert_array_equal(result, truth)


def test_visible_nan_reaches_the_rows_that_see_it():
    arguments = cases.case("causal").arguments("float64")  # query i sees keys 0 to i + 2
    arguments["key"][0, 1, 4, 0] = np.nan
    out, lse, weights = naive.attention(**arguments)
    expected = np.zeros((2, 2, 5), bool)
    expected[0, 1, 2:] = True
    np.testing.assert_array_equal(np.isnan(lse), expected)
    np.testing.assert_array_equal(np.isnan(out), np.repeat(expected[..., None], 4, axis=-1))
    np.testing.assert_array_equal(np.isnan(weights).any(-1), expected)


def test_visible_nan_in_a_value_reaches_its_column():
    value = np.ones((3, 2))
    value[1, 0] = np.nan
    out, lse, _ = naive.attention(np.ones((2, 1)), np.ones((3, 1)), value, causal=True, q_offset=0)
    assert np.isnan(out).tolist() == [[False, False], [True, False]]
    assert np.isfinite(lse).all()


def test_mix_of_small_numbers():
    # by hand: 1 * 0x7FEB352D, ^ >> 15, * 0x846CA68B, ^ >> 16
    assert naive.mix(0) == 0
    x = 0x7FEB352D ^ 0xFFD6
    x = (x * 0x846CA68B) & 0xFFFFFFFF
    assert naive.mix(1) == x ^ (x >> 16)


def test_seeds_of_batch_entries():
    # of an int, the first outputs of splitmix64, here those published for the seed 1234567
    outputs = [naive.seed_of(1234567, batch, (batch,), (3,)) for batch in range(3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    seeds = np.array([[5], [-1]])
    assert naive.seed_of(seeds, 2, (1, 0), (2, 2)) == 2**64 - 1
    assert naive.seed_of(np.array(7), 0, (), ()) == 7


def test_ends_of_the_rate_and_one_pattern():
    # the pattern is that of the same hash in NumPy's uint32
    row = [naive.kept(0.5, 2**40 + 1, 2, -3, kv_pos) > 0 for kv_pos in range(-8, 16)]
    assert "".join(str(int(kept)) for kept in row) == "010100110001001010010110"
    assert {naive.kept(1.0, 1, 0, 0, kv_pos) for kv_pos in range(100)} == {0.0}
    assert {naive.kept(2**-26, 1, 0, 0, kv_pos) for kv_pos in range(100)} == {1 / (1 - 2**-26)}


def test_dropout_keeps_the_right_share_and_is_unbiased():
    rate, seeds = 0.3, 200
    arguments = cases.case("plain").arguments("float64")
    arguments["value"] = np.broadcast_to(np.eye(7), (2, 2, 7, 7))  # out is the weights
    _, lse, weights = naive.attention(**arguments)
    kept, total = 0, np.zeros_like(weights)
    for seed in range(seeds):
        out, lse_dropped, undropped = naive.attention(**arguments, dropout=rate, seed=seed)
        np.testing.assert_array_equal(lse_dropped, lse)
        np.testing.assert_array_equal(undropped, weights)
        assert_close(out[out > 0], (weights / (1 - rate))[out > 0])
        kept += np.count_nonzero(out)
        total += out
    count = seeds * weights.size
    assert abs(kept / count - (1 - rate)) < 4 * math.sqrt(rate * (1 - rate) / count)
    deviation = weights * math.sqrt(rate / (1 - rate) / seeds)
    assert (np.abs(total / seeds - weights) < 5 * deviation).all()


@pytest.mark.parametrize("changed", ["seed", "head", "q_pos", "kv_pos"])
def test_dropout_depends_on_each_of_its_keys(changed):
    at = {"seed": 2**40 + 1, "head": 2, "q_pos": 3, "kv_pos": 4}
    row = [naive.kept(0.5, **at | {changed: at[changed] + n}) > 0 for n in range(400)]
    assert 160 < sum(row) < 240  # four standard deviations about the mean
    assert 160 < sum(a == b for a, b in itertools.pairwise(row)) < 240  # neighbours too


def test_dropout_reads_positions_not_indices():
    arguments = cases.case("plain").arguments("float64") | {"dropout": 0.5, "seed": 8}
    whole, _, _ = naive.attention(**arguments, q_offset=-3)
    last = arguments | {"query": arguments["query"][..., 3:, :]}
    np.testing.assert_array_equal(naive.attention(**last, q_offset=0)[0], whole[..., 3:, :])
    shifted, _, _ = naive.attention(**arguments, q_offset=-3, kv_offset=1)
    assert (shifted != whole).any()


def test_merge_by_hand():
    # weights 3 : 1
    out, lse = naive.merge([([[4.0, 0.0]], [math.log(3)]), ([[0.0, 8.0]], [0.0])])
    assert_close(out, [[3.0, 2.0]])
    assert_close(lse, [math.log(4)])


def test_merge_with_empty_states():
    empty, full = (np.full((1, 2), np.nan), [-INF]), ([[1.0, 2.0]], [0.5])
    for states in ([empty, full], [full, empty], [empty, full, empty]):
        out, lse = naive.merge(states)
        np.testing.assert_array_equal(out, full[0])
        np.testing.assert_array_equal(lse, full[1])
    assert np.isnan(naive.merge([full, (np.zeros((1, 2)), [np.nan])])[0]).all()
    out, lse = naive.merge([empty, empty])
    np.testing.assert_array_equal(out, [[0.0, 0.0]])
    np.testing.assert_array_equal(lse, [-INF])


@pytest.mark.parametrize("name", ["plain", "causal", "causal_more_queries", "gqa", "no_keys"])
@pytest.mark.parametrize("split", [0, 1, 3])
def test_merged_halves_are_the_whole(name, split):
    arguments = cases.case(name).arguments("float64")
    whole_out, whole_lse, _ = naive.attention(**arguments)
    len_q, len_kv = arguments["query"].shape[-2], arguments["key"].shape[-2]
    parts = []
    for part in (slice(None, split), slice(split, None)):
        cut = {name: arguments[name][..., part, :] for name in ("key", "value")}
        offsets = {"q_offset": len_kv - len_q, "kv_offset": part.start or 0}
        parts.append(naive.attention(**arguments | cut | offsets)[:2])
    out, lse = naive.merge(parts)
    assert_close(out, whole_out, len_kv, 10)
    assert_close(lse, whole_lse, len_kv, 10)


def test_varlen_is_attention_in_every_sequence():
    rng = np.random.default_rng(0)
    query, key = rng.standard_normal((6, 4, 3)), rng.standard_normal((9, 2, 3))
    value = rng.standard_normal((9, 2, 5))
    cu_q, cu_kv = [0, 1, 1, 4, 6], [0, 4, 5, 7, 9]
    options = {"causal": True, "dropout": 0.3, "softcap": 2.0}

    def mods(s=0):
        """Return mods that take a batch number, shifted by s."""
        return {
            "score_mod": lambda score, b, h, q_pos, kv_pos: score + (b + s) * kv_pos,
            "mask_mod": lambda b, h, q_pos, kv_pos: (kv_pos + b + s) % 4 != 0,
        }

    out, lse = naive.varlen(query, key, value, cu_q, cu_kv, seed=3, **mods(), **options)
    assert out.shape == (6, 4, 5)
    assert lse.shape == (4, 6)
    for s in range(4):
        q, kv = slice(cu_q[s], cu_q[s + 1]), slice(cu_kv[s], cu_kv[s + 1])
        arrays = (np.swapaxes(x, 0, 1) for x in (query[q], key[kv], value[kv]))
        seed = np.array(naive.seed_of(3, s, (s,), (4,)), np.uint64)
        truth_out, truth_lse, _ = naive.attention(*arrays, seed=seed, **mods(s), **options)
        np.testing.assert_array_equal(np.swapaxes(out[q], 0, 1), truth_out)
        np.testing.assert_array_equal(lse[:, q], truth_lse)


def test_additive_by_hand():
    # scores 2 tanh(1 + 0) and 2 tanh(1 + 3 * 1)
    query, key, value = [[0.5]], [[0.0], [1.0]], [[0.0], [1.0]]
    out, lse = naive.additive(query, key, value, w_q=[[2.0]], w_k=[[3.0]], v=[2.0])
    first, second = 2 * math.tanh(1), 2 * math.tanh(4)
    assert_close(out, [[1 / (1 + math.exp(first - second))]])
    assert_close(lse, [math.log(math.exp(first) + math.exp(second))])


def test_multiplicative_by_hand():
    query, key, value = [[1.0, 2.0]], [[1.0, 0.0], [0.0, 1.0]], [[0.0], [1.0]]
    # dot: 1 and 2, not scaled
    out, lse = naive.multiplicative(query, key, value)
    assert_close(out, [[1 / (1 + math.exp(-1))]])
    assert_close(lse, [math.log(math.exp(1) + math.exp(2))])
    # general, w = [[0, 3], [1, 0]]: q w = [2, 3]
    _, lse = naive.multiplicative(query, key, value, w=[[0.0, 3.0], [1.0, 0.0]], form="general")
    assert_close(lse, [math.log(math.exp(2) + math.exp(3))])
    # concat, w sums the query and twice the second entry of the key: tanh(3) and tanh(5)
    w = [[1.0, 1.0, 0.0, 2.0]]
    _, lse = naive.multiplicative(query, key, value, w=w, v=[-4.0], form="concat")
    assert_close(lse, [math.log(math.exp(-4 * math.tanh(3)) + math.exp(-4 * math.tanh(5)))])


def test_masks_of_the_family_hide_garbage():
    key, value = [[1.0], [np.nan]], [[7.0], [np.nan]]
    out, lse = naive.multiplicative([[2.0]], key, value, mask=np.array([True, False]))
    assert_close(out, [[7.0]])
    assert_close(lse, [2.0])
    ones = {"w_q": [[1.0]], "w_k": [[1.0]], "v": [1.0]}
    out, lse = naive.additive([[2.0]], key, value, **ones, mask=np.array(False))
    assert (out.tolist(), lse.tolist()) == ([[0.0]], [-INF])


def test_multi_head_takes_contiguous_columns():
    # one key: the weights are 1, and two value heads of width 2 serve two query heads each
    context, w_v = np.array([[1.0, 10.0]]), np.array([[1.0, 2, 3, 4], [5, 6, 7, 8]])
    w_q, w_k, w_o = np.zeros((3, 8)), np.zeros((2, 4)), np.diag([1.0, 2] * 4)
    out = naive.multi_head(np.ones((2, 3)), context, w_q, w_k, w_v, w_o, 4, num_kv_heads=2)
    assert_close(out, [[51, 124, 51, 124, 73, 168, 73, 168]] * 2)


def shared_arguments(given):
    """Return a shared case's arguments under our names."""
    names = {"q": "query", "k": "key", "v": "value", "kv_lens": "kv_len"}
    arguments = {names.get(n, n): x for n, x in given.items() if n not in ("dout", "dlse")}
    if arguments.pop("align", "bottom_right") == "top_left":
        arguments["q_offset"] = 0
    if "q_pos" in arguments:
        q_pos, kv_pos = arguments.pop("q_pos"), arguments.pop("k_pos")
        arguments |= {"causal": False, "mask_mod": lambda b, h, q, k: kv_pos[k] <= q_pos[q]}
    return arguments


SHARED = [
    case
    for case in attention_cases.CASES
    if case["op"] == "attention" and case["expect"] != "raises" and case["cost"] == "tiny"
]


assert len(SHARED) > 50, "the shared cases are gone"


@pytest.mark.parametrize("case", SHARED, ids=lambda case: case["id"])
def test_agrees_with_the_shared_oracle(case):
    given = case["build"]()
    truth = attention_cases.ref_attention(**given)
    results = naive.attention(**shared_arguments(given))
    largest = np.abs(truth["lse"][np.isfinite(truth["lse"])]).max(initial=1)
    for name, result in zip(("out", "lse", "weights"), results, strict=True):
        assert_close(result, truth[name], given["k"].shape[2], largest)


def test_oracle_imports_only_math_and_numpy():
    tree = ast.parse(Path(inspect.getfile(naive)).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert sorted(ast.unparse(node) for node in imports) == ["import math", "import numpy as np"]


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_cases_are_deterministic_fresh_and_valid(case):
    first, second = case.arguments("float16"), case.arguments("float16")
    query, key, value = first["query"], first["key"], first["value"]
    assert query.dtype == key.dtype == value.dtype == np.float16
    for name, option in first.items():
        if isinstance(option, np.ndarray):
            np.testing.assert_array_equal(option, second[name])
            assert not np.shares_memory(option, second[name])
    out, lse, _ = naive.attention(**first)
    assert np.isfinite(out).all()
    assert not np.isnan(lse).any()


@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
@pytest.mark.parametrize(("mod", "before"), [("mask_mod", ()), ("score_mod", (0.5,))])
def test_mods_are_the_same_on_scalars_and_arrays(mod, before, library):
    to_array = pytest.importorskip({"jax": "jax.numpy"}.get(library, library)).asarray
    for case in cases.CASES:
        scalar = case.arguments()
        if mod not in scalar:
            continue
        array = case.arguments(to_array=to_array)
        shape = (*(case.size.lead or (1,)), case.size.num_heads, case.size.len_q, case.size.len_kv)
        axes = np.meshgrid(*map(np.arange, shape), indexing="ij", sparse=True)
        scores = [to_array(np.full(shape, score, np.float32)) for score in before]
        result = np.asarray(array[mod](*scores, *map(to_array, axes)))
        truth = np.array([scalar[mod](*before, *place) for place in np.ndindex(shape)])
        error = np.abs(np.broadcast_to(result, shape).ravel().astype(float) - truth)
        assert error.max() <= 4 * np.finfo(np.float32).eps * np.abs(truth).max()


def test_pairwise_covers_every_pair():
    rows = cases.pairwise()
    covered = set().union(*(cases.pairs_of(row) for row in rows))
    for (a, of_a), (b, of_b) in itertools.combinations(cases.OPTIONS.items(), 2):
        for left, right in itertools.product(of_a, of_b):
            assert (a, left.name, b, right.name) in covered
    assert len(rows) <= 30
    labels = [cases.label(row) for row in rows]
    assert len(set(labels)) == len(rows)
    assert labels == [cases.label(row) for row in cases.pairwise()]


def test_options_are_all_of_attention_s():
    names = inspect.signature(naive.whole).parameters.keys()
    assert set(cases.OPTIONS) == names - {"query", "key", "value", "seed"}


@pytest.mark.parametrize("row", cases.pairwise(), ids=cases.label)
def test_combinations_are_valid(row):
    sizes = cases.Size(9, 14, num_heads=4, lead=(3,)), cases.Size(8, 3, lead=()), cases.Size(1, 5)
    shares = []
    for size in sizes:
        rng = np.random.default_rng(5)
        arrays = size.arrays(rng)
        out, lse, weights = naive.attention(**arrays, **cases.options_of(row, size, rng))
        assert np.isfinite(out).all()
        assert not np.isnan(lse).any()
        shares.append(np.mean(weights > 0))
    assert shares[0] > 0.1  # so that something is left to compare
