"""Laws: relations between calls that hold whatever the numbers are.

The left side of each law is the library's, the right side the oracle's, so that an error common
to both sides of the library cannot hide.
"""

import functools
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cases
import naive
import scaledot as sd
from compare import EPS, assert_close
from test_attention import truth_of

IMPLEMENTATIONS = ("dense", "blockwise", "auto")  # auto: kernels where they can do the call
IMPLEMENTATION = st.sampled_from(IMPLEMENTATIONS)
NUMBER = st.integers(0, 2**32 - 1)
# What block_mask cuts does not follow the keys when these are split or reordered.
SPLITTABLE = [name for name in cases.OPTIONS if name not in ("block_mask", "sinks")]
PLACELESS = ["mask", "bias", "kv_len", "scale", "softcap"]

law = settings(deadline=None, derandomize=True, max_examples=150)


@st.composite
def sizes(draw, min_queries=1, same_length=False):
    """Small shapes: heads in groups, leading axes, values wider than keys.

    Enough numbers in each output for its largest error to be typical of its kind.
    """
    num_kv_heads = draw(st.integers(1, 2))
    len_q = draw(st.integers(min_queries, 6))
    return cases.Size(
        len_q=len_q,
        len_kv=len_q if same_length else draw(st.integers(1, 10)),
        d_k=draw(st.integers(1, 5)),
        d_v=draw(st.integers(6, 9)),
        num_heads=num_kv_heads * draw(st.integers(1, 3)),
        num_kv_heads=num_kv_heads,
        lead=draw(st.sampled_from([(), (2,), (2, 1)])),
    )


@st.composite
def problems(draw, options=(), dtype="float32", **sized):
    """Arguments of attention with some of the options named."""
    size = draw(sizes(**sized))
    used = [name for name in cases.OPTIONS if name in options]
    chosen = {name: draw(st.sampled_from(cases.OPTIONS[name])) for name in used}
    rng = np.random.default_rng(draw(NUMBER))
    arrays = {name: x.astype(dtype) for name, x in size.arrays(rng).items()}
    options = cases.options_of(chosen, size, rng)
    if isinstance(options.get("seed"), np.generic):  # without leading axes a setting makes scalars
        options["seed"] = int(options["seed"])
    return arrays | options


def lead_of(arguments):
    return np.broadcast_shapes(*(arguments[n].shape[:-3] for n in ("query", "key", "value")))


def with_positions(arguments):
    """The same with offsets as numbers or arrays, as slices of the keys need them."""
    kv_offset, kv_len = arguments.get("kv_offset", 0), arguments.get("kv_len")
    len_q, len_kv = arguments["query"].shape[-2], arguments["key"].shape[-2]
    q_offset = arguments.get("q_offset")
    if q_offset is None:
        q_offset = kv_offset + (len_kv if kv_len is None else kv_len) - len_q
    return arguments | {"q_offset": q_offset, "kv_offset": kv_offset}


def slice_of_keys(arguments, start, stop):
    """The part of a call with positions that belongs to a slice of its keys."""
    part = dict(arguments)
    for name in ("key", "value"):
        part[name] = arguments[name][..., start:stop, :]
    for name in ("mask", "bias"):
        if name in arguments and arguments[name].shape[-1] > 1:
            part[name] = arguments[name][..., start:stop]
    if "segment_ids" in arguments:
        of_q, of_kv = arguments["segment_ids"]
        part["segment_ids"] = (of_q, of_kv[..., start:stop])
    if "kv_len" in arguments:
        part["kv_len"] = np.clip(arguments["kv_len"] - start, 0, stop - start)
    part["kv_offset"] = arguments["kv_offset"] + start
    return part


def check(got, truth, yardstick, arguments, dtype=None):
    """Apply the rule of tolerance, for the working dtype of a call."""
    dtype = arguments["query"].dtype.name if dtype is None else dtype
    assert_close(got, truth, yardstick, eps=EPS[dtype], len_kv=arguments["key"].shape[-2])


def check_state(state, arguments, lse_plus=0.0):
    """Compare a state with the oracle's for these arguments."""
    out, lse, _, yardstick_out, yardstick_lse = truth_of(arguments)
    check(state.out, out, yardstick_out, arguments)
    # A capped score is rounded at the size of the cap; what a mod adds may bring lse nearer to 0.
    nearest = np.finfo(state.lse.dtype).eps * arguments.get("softcap", 0.0)
    truth = lse + lse_plus
    with np.errstate(invalid="ignore"):  # of infinities, which stay
        moved = truth + np.clip(state.lse - truth, -nearest, nearest)
    truth = np.where(np.isfinite(truth), moved, truth)
    check(state.lse, truth, yardstick_lse + lse_plus, arguments)


def check_out(got, arguments):
    """Compare an output with the oracle's for these arguments."""
    out, _, _, yardstick, _ = truth_of(arguments)
    check(got, out, yardstick, arguments)


@given(problems(SPLITTABLE), st.lists(st.integers(0, 10), max_size=3), NUMBER, IMPLEMENTATION)
@settings(law, max_examples=500)
def test_keys_split_anywhere_merge_to_the_whole(arguments, cuts, order, impl):
    """Also into empty slices, and merged in any order and any grouping."""
    arguments = with_positions(arguments)
    len_kv = arguments["key"].shape[-2]
    bounds = [0, *sorted(min(cut, len_kv) for cut in cuts), len_kv]
    states = [
        sd.attention_state(**slice_of_keys(arguments, start, stop), impl=impl)
        for start, stop in itertools.pairwise(bounds)
    ]
    rng = np.random.default_rng(order)
    while len(states) > 1:  # merge two at random until one is left
        rng.shuffle(states)
        states.append(sd.merge(states.pop(), states.pop()))
    check_state(states[0], arguments)


@pytest.mark.parametrize("option", [name for name in SPLITTABLE if len(cases.OPTIONS[name]) > 1])
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_keys_split_in_three_with_each_option(option, impl, rng):
    size = cases.Size(len_q=5, len_kv=9, d_k=4, d_v=3, num_heads=4, num_kv_heads=2, lead=(2,))
    arrays = {name: x.astype(np.float32) for name, x in size.arrays(rng).items()}
    for setting in cases.OPTIONS[option][1:]:
        causal = cases.OPTIONS["causal"][1]  # beside which offsets matter
        options = cases.options_of({"causal": causal, option: setting}, size, rng)
        arguments = with_positions(arrays | options)
        states = [
            sd.attention_state(**slice_of_keys(arguments, *bounds), impl=impl)
            for bounds in ((7, 9), (0, 3), (3, 3), (3, 7))
        ]
        for order in (states, states[::-1], states[2:] + states[:2]):
            check_state(functools.reduce(sd.merge, order), arguments)


@given(problems(SPLITTABLE), st.floats(-30, 30), IMPLEMENTATION)
@law
def test_a_constant_added_to_all_scores_moves_only_lse(arguments, c, impl):
    """The constant comes by the bias, or by the score_mod where there is one."""
    arguments = with_positions(arguments)
    plain = dict(arguments)
    if "score_mod" in arguments:
        original = arguments["score_mod"]
        arguments["score_mod"] = lambda score, *where: original(score, *where) + np.float32(c)
    else:
        bias = arguments.get("bias", np.zeros(1, dtype=np.float64))
        arguments["bias"] = bias.astype(np.float64) + np.float32(c)
    out, lse, *_ = truth_of(plain)
    _, _, _, yardstick_out, yardstick_lse = truth_of(arguments)
    state = sd.attention_state(**arguments, impl=impl)
    check(state.out, out, yardstick_out, arguments)
    check(state.lse, lse + np.float32(c).astype(np.float64), yardstick_lse, arguments)


@given(problems(["mask", "bias", "scale", "softcap", "sinks"]), NUMBER, IMPLEMENTATION)
@law
def test_the_order_of_keys_does_not_matter_without_positions(arguments, number, impl):
    order = np.random.default_rng(number).permutation(arguments["key"].shape[-2])
    shuffled = dict(arguments)
    for name, axis in (("key", -2), ("value", -2), ("mask", -1), ("bias", -1)):
        if name in arguments:
            shuffled[name] = np.take(arguments[name], order, axis=axis)
    check_out(sd.attention(**shuffled, impl=impl), arguments)


@given(
    problems(cases.OPTIONS, dtype="float64"),
    st.integers(-4, 4),
    st.integers(-4, 4),
    IMPLEMENTATION,
)
@law
def test_the_output_is_linear_in_value(arguments, a, b, impl):
    """Values are rounded to float32 first: then a·v + b·w is exact in float64."""
    rng = np.random.default_rng(0)
    v = arguments["value"].astype(np.float32).astype(np.float64)
    w = rng.standard_normal(v.shape).astype(np.float32).astype(np.float64)
    of_v, of_w = (arguments | {"value": x} for x in (v, w))
    got = a * sd.attention(**of_v, impl=impl) + b * sd.attention(**of_w, impl=impl)
    yardstick = a * truth_of(of_v)[3] + b * truth_of(of_w)[3]
    check(got, truth_of(arguments | {"value": a * v + b * w})[0], yardstick, arguments)


@given(problems([n for n in cases.OPTIONS if n not in ("dropout", "sinks")]), IMPLEMENTATION)
@law
def test_a_constant_value_comes_back(arguments, impl):
    constant = np.arange(1, 1 + arguments["value"].shape[-1], dtype=arguments["value"].dtype)
    arguments["value"] = np.broadcast_to(constant, arguments["value"].shape)
    _, lse, _, yardstick, _ = truth_of(arguments)
    truth = np.where(np.isneginf(lse)[..., None], 0.0, constant.astype(np.float64))
    check(sd.attention(**arguments, impl=impl), truth, yardstick, arguments)


@given(problems([n for n in cases.OPTIONS if n != "dropout"]), IMPLEMENTATION)
@law
def test_the_output_lies_among_the_visible_values(arguments, impl):
    """And among those and 0 where a sink takes a share."""
    _, lse, weights, *_ = truth_of(arguments)
    num_heads, num_kv_heads = arguments["query"].shape[-3], arguments["value"].shape[-3]
    value = np.repeat(arguments["value"], num_heads // num_kv_heads, axis=-3)[..., None, :, :]
    seen = (weights > 0)[..., None]
    lowest = np.where(seen, value, np.inf).min(axis=-2)
    highest = np.where(seen, value, -np.inf).max(axis=-2)
    if "sinks" in arguments:
        lowest, highest = np.minimum(lowest, 0), np.maximum(highest, 0)
    none = ~seen.any(axis=-2)
    lowest, highest = np.where(none, 0.0, lowest), np.where(none, 0.0, highest)
    got = sd.attention(**arguments, impl=impl)
    check(got, np.clip(got.astype(np.float64), lowest, highest), None, arguments)
    assert (got[np.isneginf(lse)] == 0).all()


@given(problems(cases.OPTIONS), IMPLEMENTATION)
@law
def test_grouped_heads_are_repeated_heads(arguments, impl):
    group_size = arguments["query"].shape[-3] // arguments["key"].shape[-3]
    repeated = arguments | {
        name: np.repeat(arguments[name], group_size, axis=-3) for name in ("key", "value")
    }
    check_out(sd.attention(**arguments, impl=impl), repeated)
    check_out(sd.attention(**repeated, impl=impl), arguments)


@given(problems([n for n in SPLITTABLE if n != "kv_len"]), NUMBER, IMPLEMENTATION)
@law
def test_a_length_is_a_slice(arguments, number, impl):
    """With one length for each entry; behind it lies what must not matter."""
    len_kv, lead = arguments["key"].shape[-2], lead_of(arguments)
    kv_len = np.random.default_rng(number).integers(0, len_kv + 1, size=lead)
    got = sd.attention(**arguments, kv_len=kv_len, impl=impl)
    for batch, entry in enumerate(np.ndindex(lead)):
        alone = entry_of(with_positions(arguments | {"kv_len": kv_len}), batch, entry, lead)
        del alone["kv_len"]
        check_out(got[entry], slice_of_keys(alone, 0, int(kv_len[entry])))


def score_in_entry(mod, batch):
    """A score_mod that takes its entry to be number ``batch``; compilable like ``mod``."""
    return lambda score, _, head, q_pos, kv_pos: mod(score, batch, head, q_pos, kv_pos)


def mask_in_entry(mod, batch):
    """A mask_mod that takes its entry to be number ``batch``."""
    return lambda _, head, q_pos, kv_pos: mod(batch, head, q_pos, kv_pos)


def entry_of(arguments, batch, entry, lead):
    """The arguments of one entry of the leading axes as a call without these axes."""
    alone = dict(arguments)
    for name, x in arguments.items():
        if name in ("query", "key", "value", "mask", "bias", "block_mask"):
            alone[name] = drop_lead(x, entry, lead, 3)
        elif name in ("kv_len", "q_offset", "kv_offset"):
            alone[name] = int(np.broadcast_to(x, lead)[entry])
        elif name == "segment_ids":
            alone[name] = tuple(drop_lead(side, entry, lead, 1) for side in x)
        elif name == "seed":
            alone[name] = np.array(naive.seed_of(x, batch, entry, lead), dtype=np.uint64)
        elif name == "score_mod":
            alone[name] = score_in_entry(x, batch)
        elif name == "mask_mod":
            alone[name] = mask_in_entry(x, batch)
    return alone


def drop_lead(x, entry, lead, kept):
    """The part of x that belongs to one entry; x may have fewer leading axes, or lengths of 1."""
    if x.ndim <= kept:
        return x
    return np.broadcast_to(x, (*lead, *x.shape[x.ndim - kept :]))[entry]


@given(problems(cases.OPTIONS), IMPLEMENTATION)
@law
def test_a_batch_is_a_loop_over_its_entries(arguments, impl):
    """To the bit, and with leading axes that are broadcast."""
    lead = lead_of(arguments)
    if lead:
        arguments["key"] = arguments["key"][:1]
    got = sd.attention(**arguments, impl=impl)
    assert got.shape[: len(lead)] == lead
    for batch, entry in enumerate(np.ndindex(lead)):
        alone = entry_of(with_positions(arguments), batch, entry, lead)
        assert got[entry].tobytes() == sd.attention(**alone, impl=impl).tobytes()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_leading_axes_broadcast_like_a_loop(impl, rng):
    query, key, value = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in ((2, 1, 4, 5, 3), (1, 3, 2, 7, 3), (3, 2, 7, 6))
    )
    kv_len, seed = np.array([[7], [3]]), np.array([4, -9, 2**40])
    mask = rng.random((2, 1, 1, 5, 7)) < 0.8
    options = {"causal": True, "q_offset": np.array([2, 5, 0]), "dropout": 0.3}
    got = sd.attention(query, key, value, **options, kv_len=kv_len, seed=seed, mask=mask, impl=impl)
    assert got.shape == (2, 3, 4, 5, 6)
    for i, j in np.ndindex(2, 3):
        alone = options | {"q_offset": int(options["q_offset"][j]), "seed": np.asarray(seed[j])}
        entry = sd.attention(query[i, 0], key[0, j], value[j], **alone, kv_len=int(kv_len[i, 0]),
                             mask=mask[i, 0], impl=impl)  # fmt: skip
        assert got[i, j].tobytes() == entry.tobytes()


@given(problems(SPLITTABLE), st.integers(-(2**40), 2**40), IMPLEMENTATION)
@law
def test_only_differences_of_positions_matter(arguments, shift, impl):
    """Except to dropout and to mods, which get the positions themselves."""
    arguments = with_positions(arguments)
    absolute = {"dropout", "score_mod", "mask_mod"} & arguments.keys()
    shifted = arguments | {n: arguments[n] + shift for n in ("q_offset", "kv_offset")}
    state = sd.attention_state(**shifted, impl=impl)
    check_state(state, shifted)
    if not absolute:
        check_state(state, arguments)


@given(problems(["mask", "causal"]), NUMBER, IMPLEMENTATION)
@law
def test_segments_are_a_block_diagonal_mask(arguments, number, impl):
    rng = np.random.default_rng(number)
    lead, len_q, len_kv = lead_of(arguments), *(arguments[n].shape[-2] for n in ("query", "key"))
    of_q, of_kv = rng.integers(-1, 3, (*lead, len_q)), rng.integers(-1, 3, len_kv)
    blocks = (of_q[..., None, :, None] == of_kv) & (of_kv >= 0)
    masked = arguments | {"mask": blocks & arguments.get("mask", True)}
    check_out(sd.attention(**arguments, segment_ids=(of_q, of_kv), impl=impl), masked)
    check_out(sd.attention(**masked, impl=impl), arguments | {"segment_ids": (of_q, of_kv)})


@given(problems(["mask", "bias", "kv_len"]), IMPLEMENTATION)
@law
def test_causal_is_a_triangular_mask(arguments, impl):
    """Bottom-right by default, top-left with q_offset = 0."""
    lead, len_q, len_kv = lead_of(arguments), *(arguments[n].shape[-2] for n in ("query", "key"))
    kv_len = np.broadcast_to(arguments.get("kv_len", len_kv), lead)
    for options in ({}, {"q_offset": 0}):
        diagonal = np.zeros_like(kv_len) if options else kv_len - len_q
        triangles = np.reshape(
            [np.tri(len_q, len_kv, int(k), dtype=bool) for k in diagonal.flat],
            (*lead, 1, len_q, len_kv),
        )
        masked = arguments | {"mask": triangles & arguments.get("mask", True)}
        check_out(sd.attention(**arguments, **options, causal=True, impl=impl), masked)
        check_out(sd.attention(**masked, impl=impl), arguments | options | {"causal": True})


@given(
    problems(["mask", "bias", "causal"]),
    st.none() | st.integers(0, 6),
    st.none() | st.integers(0, 6),
    st.integers(-4, 9),
    IMPLEMENTATION,
)
@law
def test_a_window_is_a_band(arguments, left, right, q_offset, impl):
    len_q, len_kv = (arguments[n].shape[-2] for n in ("query", "key"))
    distance = np.arange(len_kv) - (np.arange(len_q)[:, None] + q_offset)  # to the right
    band = (distance >= -(99 if left is None else left)) & (
        distance <= (99 if right is None else right)
    )
    banded = arguments | {"mask": band & arguments.get("mask", True), "q_offset": q_offset}
    got = sd.attention(**arguments, window=(left, right), q_offset=q_offset, impl=impl)
    check_out(got, banded)


@given(problems(["mask", "causal", "softcap"]), st.integers(-9, 9), IMPLEMENTATION)
@law
def test_alibi_is_a_bias(arguments, q_offset, impl):
    num_heads = arguments["query"].shape[-3]
    len_q, len_kv = (arguments[n].shape[-2] for n in ("query", "key"))
    slopes = cases.slopes(num_heads)
    distance = np.abs(np.arange(len_kv) - (np.arange(len_q)[:, None] + q_offset))
    biased = arguments | {"bias": -slopes[:, None, None] * distance, "q_offset": q_offset}
    got = sd.attention(**arguments, alibi_slopes=slopes, q_offset=q_offset, impl=impl)
    check_out(got, biased)


@given(problems(["mask", "bias", "sinks"]), NUMBER, st.sampled_from(["dense", "blockwise"]))
@law
def test_minus_infinity_from_a_score_mod_is_a_mask(arguments, number, impl):
    """Also for all keys of a row."""
    num_heads, len_q, len_kv = *arguments["query"].shape[-3:-1], arguments["key"].shape[-2]
    rng = np.random.default_rng(number)
    shown = cases.maybe(rng, num_heads, len_q, len_kv) & cases.maybe(rng, len_q, 1)

    def score_mod(score, batch, head, q_pos, kv_pos):
        return np.where(shown[head, q_pos - (len_kv - len_q), kv_pos], score, -np.inf)

    masked = arguments | {"mask": shown & arguments.get("mask", True)}
    check_out(sd.attention(**arguments, score_mod=score_mod, impl=impl), masked)


@given(problems([n for n in cases.OPTIONS if n != "softcap"]), IMPLEMENTATION)
@law
def test_a_cap_beyond_the_scores_is_no_cap(arguments, impl):
    capped = arguments | {"softcap": 2.0**40}
    yardstick = truth_of(capped)[3]
    check(sd.attention(**capped, impl=impl), truth_of(arguments)[0], yardstick, arguments)


@given(problems(["mask", "bias", "scale", "softcap"]), NUMBER, IMPLEMENTATION)
@law
def test_a_sink_is_a_key_without_a_value(arguments, number, impl):
    """Its score comes by a bias: the key itself is 0."""
    num_heads, len_q = arguments["query"].shape[-3:-1]
    lead, len_kv = lead_of(arguments), arguments["key"].shape[-2]
    sinks = np.random.default_rng(number).standard_normal(num_heads).astype(np.float32)
    extended = dict(arguments)
    for name in ("key", "value"):
        widths = [(0, 0)] * (arguments[name].ndim - 2) + [(0, 1), (0, 0)]
        extended[name] = np.pad(arguments[name], widths)
    pairs = (*lead, num_heads, len_q, len_kv)
    bias = np.broadcast_to(arguments.get("bias", np.float32(0)), pairs)
    column = np.broadcast_to(sinks[:, None, None], (*pairs[:-1], 1))
    extended["bias"] = np.concatenate([bias, column], axis=-1)
    if "mask" in arguments:
        mask = np.broadcast_to(arguments["mask"], pairs)
        extended["mask"] = np.concatenate([mask, np.ones((*pairs[:-1], 1), bool)], axis=-1)
    check_out(sd.attention(**arguments, sinks=sinks, impl=impl), extended)
    check_out(sd.attention(**extended, impl=impl), arguments | {"sinks": sinks})
    state = sd.attention_state(**arguments, impl=impl)
    sink = sd.State(
        np.zeros((num_heads, 1, 1), state.lse.dtype), sinks[:, None].astype(state.lse.dtype)
    )
    check_out(sd.merge(state, sink).out, extended)


@given(
    problems(["bias", "alibi_slopes", "softcap", "sinks", "dropout"], same_length=True),
    st.integers(0, 5),
    IMPLEMENTATION,
)
@law
def test_decoding_step_by_step_is_the_whole(arguments, left, impl):
    """A cache grows by one key a step, and its oldest keys leave the window."""
    arguments |= {"causal": True, "window": (left, None)}
    len_q = arguments["query"].shape[-2]
    steps = []
    for t in range(len_q):
        step = slice_of_keys(with_positions(arguments), max(0, t - left), t + 1)
        step |= {"query": arguments["query"][..., t : t + 1, :], "q_offset": t}
        if "bias" in step:
            step["bias"] = step["bias"][..., t : t + 1, :]
        steps.append(sd.attention(**step, impl=impl))
    check_out(np.concatenate(steps, axis=-2), arguments)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_laws_beyond_one_block(impl, rng):
    """Splits and decoding at lengths that `blockwise` cuts into several tiles."""
    size = cases.Size(len_q=3, len_kv=1300, d_k=5, num_heads=2, num_kv_heads=1, lead=())
    arrays = {name: x.astype(np.float32) for name, x in size.arrays(rng).items()}
    options = {"causal": True, "window": (1100, None), "alibi_slopes": cases.slopes(2) / 64,
               "dropout": 0.4, "seed": 11, "q_offset": 1295, "kv_offset": 0}  # fmt: skip
    arguments = arrays | options
    states = [
        sd.attention_state(**slice_of_keys(arguments, *bounds), impl=impl)
        for bounds in ((513, 1300), (0, 1), (1, 513))
    ]
    check_state(functools.reduce(sd.merge, states), arguments)
    steps = [
        sd.attention(
            **slice_of_keys(arguments | {"q_offset": 1295 + t}, 0, 1296 + t)
            | {"query": arrays["query"][..., t : t + 1, :]},
            impl=impl,
        )
        for t in range(3)
    ]
    check_out(np.concatenate(steps, axis=-2), arguments)
