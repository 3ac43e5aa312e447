"""attention_stats against loops over the oracle's weights, case by case."""

import functools
import pickle

import numpy as np
import pytest

import cases
import naive
import scaledot as sd
from compare import EPS, as_float64, assert_close
from conftest import IMPLEMENTATIONS
from scaledot import _blockwise
from test_attention import COMBINATIONS, NAMES, combination_arguments, score_floor

WANTED = {"top_k": 3, "last": 2}
SMALLEST = 2.0**-126


def shaping_of(arguments):
    return {n: x for n, x in arguments.items() if n not in ("value", "dropout", "seed")}


def map_shape_of(weights):
    len_q, len_kv = weights.shape[-2:]
    return (min(3, len_q), min(4, len_kv)) if len_q and len_kv else None


def distances_of(arguments, lead):
    """|q_pos - kv_pos|, shape (*lead, 1, len_q, len_kv)."""
    len_q, len_kv = arguments["query"].shape[-2], arguments["key"].shape[-2]
    kv_offset = np.broadcast_to(arguments.get("kv_offset", 0), lead)
    kv_len = arguments.get("kv_len")
    q_offset = arguments.get("q_offset")
    if q_offset is None:
        q_offset = kv_offset + (len_kv if kv_len is None else np.asarray(kv_len)) - len_q
    first = np.broadcast_to(q_offset, lead) - kv_offset
    apart = np.arange(len_q)[:, None] - np.arange(len_kv)
    return np.abs(first[..., None, None, None] + apart)


def truth_of(arguments, error=0.0, **wanted):
    """Statistics of every head by loops, from weights that are off by a relative error."""
    shaping = shaping_of(arguments)
    empty = np.zeros((*shaping["key"].shape[:-1], 1))
    _, lse, weights, visible = naive.whole(shaping.pop("query"), shaping.pop("key"), empty,
                                           **shaping)  # fmt: skip
    lead, len_q = weights.shape[:-3] if weights.ndim > 2 else (), weights.shape[-2]
    distance = np.broadcast_to(distances_of(arguments, lead), (*lead, 1, *weights.shape[-2:]))
    sinks = np.asarray(arguments.get("sinks", -np.inf), dtype=np.float64)
    with np.errstate(all="ignore"):
        on_sinks = np.exp(sinks[..., None] - lse)
    on_sinks = np.where(np.isneginf(sinks[..., None]) | np.isneginf(lse), 0, on_sinks)
    heads, found = weights.shape[:-2], {}
    if 0 in heads:  # there is no head to look at: the shapes alone
        one = naive.stats(*np.zeros((3, *weights.shape[-2:])), np.zeros(len_q), **wanted)
        found = {name: np.zeros((*heads, *np.shape(x))) for name, x in one.items()}
    for head in np.ndindex(heads):
        distance_here = distance[(*head[:-1], 0)] if head else distance[0]
        one = naive.stats(weights[head] * (1 + error), visible[head], distance_here,
                          on_sinks[head] * (1 + error), **wanted)  # fmt: skip
        for name, x in one.items():
            place = found.setdefault(name, np.zeros((*heads, *np.shape(x))))
            place[head] = x
    return found | {"lse": lse * (1 + error), "weights": weights}


@functools.cache
def truths(kind, index, dtype):
    """Statistics of a case by the oracle, and those of weights with one rounding each."""
    arguments = cases.case(NAMES[index]).arguments(dtype) if kind == "case" else (
        combination_arguments(index))  # fmt: skip
    plain = naive.attention(**{n: x for n, x in arguments.items() if n not in ("dropout", "seed")})
    wanted = WANTED | {"map_shape": map_shape_of(plain[2])}
    error = score_floor(plain[1], "float64" if dtype == "float64" else "float32")
    return truth_of(arguments, **wanted), truth_of(arguments, error, **wanted), wanted


def check(arguments, kind, index, dtype, impl):
    truth, yardstick, wanted = truths(kind, index, dtype)
    got = sd.attention_stats(**shaping_of(arguments), **wanted, impl=impl)
    state_dtype = "float64" if dtype == "float64" else "float32"
    len_kv = truth["weights"].shape[-1]
    for name, x in got._asdict().items():
        assert x is None or type(x) is type(arguments["query"])
        if name in ("top_keys", "visible"):
            continue
        if name == "block_map" and wanted["map_shape"] is None:
            assert x is None
            continue
        assert str(x.dtype).endswith(state_dtype)
        assert_close(x, truth[name], yardstick[name], eps=EPS[state_dtype], len_kv=len_kv)
    assert np.array_equal(as_float64(got.visible), truth["visible"])
    check_keys(as_float64(got.top_keys).astype(int), truth, yardstick, state_dtype)


def check_keys(keys, truth, yardstick, dtype):
    """The keys are different ones, with the weights that they should have, and -1 elsewhere."""
    weights, top = truth["weights"], truth["top_weights"]
    there = top >= SMALLEST  # smaller ones are 0, and nan is nobody's
    assert np.array_equal(keys >= 0, there)
    safe = np.where(there, keys, 0)
    if weights.shape[-1]:
        found = np.take_along_axis(weights, safe, axis=-1)
        assert_close(np.where(there, found, 0), np.where(there, top, 0),
                     np.where(there, yardstick["top_weights"], 0), eps=EPS[dtype],
                     len_kv=weights.shape[-1])  # fmt: skip
    for row in keys.reshape(-1, keys.shape[-1]):
        known = row[row >= 0]
        assert len(set(known)) == len(known)


def skip_what_cannot_be(xp, arguments, impl, index):
    if xp.name in ("strict", "numpy-readonly") and index % 4:
        pytest.skip("every fourth case of these, for time")
    if xp.name == "strict" and arguments.get("score_mod") is cases.distance_mod:
        pytest.skip("array-api-strict does not multiply integers by floats, as this mod does")
    if xp.name == "jax" and (IMPLEMENTATIONS[index % 3] != impl or index % 8):
        pytest.skip("JAX compiles for every shape: some cases run, each by one implementation")


@pytest.mark.parametrize("index", range(len(NAMES)), ids=NAMES)
def test_named_case(index, xp, impl):
    arguments = cases.case(NAMES[index]).arguments(to_array=xp.array)
    skip_what_cannot_be(xp, arguments, impl, index)
    check(arguments, "case", index, "float32", impl)


def in_other_dtypes():
    """Every fifth case in each; the long one, whose truth takes seconds, by default in one."""
    for index in range(0, len(NAMES), 5):
        for dtype in ("float64", "float16", "bfloat16"):
            is_slow = NAMES[index] == "long" and dtype != "float16"
            marks = pytest.mark.heavy if is_slow else ()
            yield pytest.param(index, dtype, id=f"{NAMES[index]}-{dtype}", marks=marks)


@pytest.mark.parametrize(("index", "dtype"), list(in_other_dtypes()))
def test_named_case_in_other_dtypes(index, dtype, impl):
    check(cases.case(NAMES[index]).arguments(dtype), "case", index, dtype, impl)


@pytest.mark.parametrize("index", range(0, len(COMBINATIONS), 4))
def test_pairs_of_options(index, impl):
    check(combination_arguments(index), "pair", index, "float32", impl)


def some(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def assert_same(a, b):
    """Equal to the bit, field by field."""
    for name, x in a._asdict().items():
        y = getattr(b, name)
        assert (x is None) == (y is None), name
        assert x is None or np.array_equal(x, y, equal_nan=True), name


def weights_of(query, key, causal=False, window=None):
    """Weights in float64, in plain NumPy; also which keys are seen, and how far they are."""
    query, key = query.astype(np.float64), key.astype(np.float64)
    first = key.shape[-2] - query.shape[-2]
    apart = first + np.arange(query.shape[-2])[:, None] - np.arange(key.shape[-2])
    seen = np.ones(apart.shape, dtype=bool)
    if causal:
        seen &= apart >= 0
    if window is not None:
        seen &= (apart <= window[0]) & (apart >= -window[1])
    scores = np.where(seen, query @ key.mT / np.sqrt(query.shape[-1]), -np.inf)
    with np.errstate(invalid="ignore"):
        powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    powers = np.where(seen, powers, 0)
    total = powers.sum(axis=-1, keepdims=True)
    weights = np.divide(powers, total, out=np.zeros_like(powers), where=total > 0)
    return weights, np.broadcast_to(seen, weights.shape), np.abs(apart)


@pytest.mark.parametrize("shape", [(200, 300), (48, 128), (193, 129), (1, 300)])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_many_tiles(shape, dtype):
    """Lengths with several tasks, tiles and bins beside loops over weights."""
    len_q, len_kv = shape
    query = some(2, len_q, 16).astype(cases.dtype_named(dtype))
    key = some(1, len_kv, 16, seed=1).astype(cases.dtype_named(dtype))
    eps = EPS["float64" if dtype == "float64" else "float32"]
    for options, last in (({}, 1), ({"causal": True}, 70), ({"window": (100, 3)}, len_q)):
        wanted = {"map_shape": (min(len_q, 7), min(len_kv, 11)), "top_k": 5, "last": last}
        weights, seen, apart = weights_of(query, key, **options)
        # Scores of up to some units carry a rounding each.
        size = float(np.abs(query.astype(float) @ key.astype(float).mT).max() / 4)
        truth, yardstick = (
            [naive.stats(w * factor, s, apart, np.zeros(len_q), **wanted)
             for w, s in zip(weights, seen, strict=True)]
            for factor in (1.0, 1 + eps * (1 + size))
        )  # fmt: skip
        for impl in ("blockwise", "kernels"):
            got = sd.attention_stats(query, key, impl=impl, **options, **wanted)
            for name in truth[0]:
                known, loose = (np.stack([x[name] for x in some]) for some in (truth, yardstick))
                assert_close(getattr(got, name), known, loose, eps=eps, len_kv=len_kv)
            found = np.take_along_axis(weights, np.maximum(got.top_keys, 0), axis=-1)
            known, loose = (np.stack([x["top_weights"] for x in s]) for s in (truth, yardstick))
            assert np.array_equal(got.top_keys < 0, known == 0)
            assert_close(np.where(got.top_keys < 0, 0, found), known, loose, eps=eps,
                         len_kv=len_kv)  # fmt: skip


def test_a_map_of_the_matrix_is_its_weights(impl):
    query, key = some(2, 50, 8), some(2, 70, 8, seed=1)
    stats = sd.attention_stats(query, key, causal=True, map_shape=(50, 70), impl=impl)
    weights, _, _ = weights_of(query, key, causal=True)
    assert_close(stats.block_map, weights, eps=EPS["float32"], len_kv=70)


def test_a_map_of_one_cell_is_the_share_of_rows_that_see(impl):
    query, key = some(10, 8), some(6, 8, seed=1)  # four rows see nothing
    stats = sd.attention_stats(query, key, causal=True, map_shape=(1, 1), impl=impl)
    assert_close(stats.block_map, np.array([[0.6]]), eps=EPS["float32"], len_kv=6)


def test_two_axes_have_no_heads(impl):
    stats = sd.attention_stats(some(5, 4), some(7, 4), top_k=2, last=1, map_shape=(2, 3), impl=impl)
    shapes = {name: x.shape for name, x in stats._asdict().items()}
    assert shapes.pop("received") == shapes.pop("received_last") == (7,)
    assert shapes.pop("top_keys") == shapes.pop("top_weights") == (5, 2)
    assert shapes.pop("sink_mass") == ()
    assert shapes.pop("block_map") == (2, 3)
    assert set(shapes.values()) == {(5,)}


def test_equal_weights_are_listed_by_their_keys(impl):
    stats = sd.attention_stats(np.zeros((300, 4)), np.zeros((300, 4)), top_k=4, impl=impl)
    assert np.array_equal(stats.top_keys, np.tile(np.arange(4), (300, 1)))
    assert np.array_equal(stats.top_weights, np.full((300, 4), 1 / 300))


def test_ascending_and_descending_weights(impl):
    """Every key is larger than all before it, or smaller: lists are filled from both sides."""
    rising = np.linspace(0, 9, 500)[:, None]
    stats = sd.attention_stats(np.ones((100, 1)), rising, top_k=3, impl=impl)
    assert np.array_equal(stats.top_keys, np.tile([499, 498, 497], (100, 1)))
    stats = sd.attention_stats(np.ones((100, 1)), rising[::-1], top_k=3, impl=impl)
    assert np.array_equal(stats.top_keys, np.tile([0, 1, 2], (100, 1)))


def test_sums_over_many_keys(impl):
    """A hundred thousand equal keys: sums of small numbers do not drift."""
    count = 20_000 if impl != "kernels" else 100_000
    query, key = np.zeros((1, 3, 8), np.float32), np.zeros((1, count, 8), np.float32)
    stats = sd.attention_stats(query, key, map_shape=(1, 1), q_offset=0, impl=impl)
    eps = EPS["float32"]
    assert_close(stats.entropy, np.full((1, 3), np.log(count)), eps=eps, len_kv=count)
    away = [[np.abs(np.arange(count) - i).mean() for i in range(3)]]
    assert_close(stats.mean_distance, np.array(away), eps=eps, len_kv=count)
    assert_close(stats.block_map, np.ones((1, 1, 1)), eps=eps, len_kv=count)


def test_share_of_a_sink_beside_large_scores(impl):
    """At 1e8 neighbouring numbers of float32 are 8 apart, so lse says nothing of eight keys."""
    query = np.zeros((1, 8, 4), np.float32)
    options = {"bias": np.full((8, 8), 1e8), "sinks": np.array([1e8]), "impl": impl}
    stats = sd.attention_stats(query, query, **options)
    assert_close(stats.sink_mass, np.array([2 / 9]), eps=EPS["float32"], len_kv=9)


def test_windows_leave_tiles_out(monkeypatch):
    """`blockwise` goes over the keys that a block of queries may see, and no others."""
    query, key = some(1, 600, 8), some(1, 6000, 8, seed=1)
    plain = sd.attention_stats(query, key, window=(40, 0), impl="kernels")
    widths, weigh = [], _blockwise.tile_weights

    def watched(xp, problem, lse):
        widths.append(problem.spec.len_kv)
        return weigh(xp, problem, lse)

    monkeypatch.setattr(_blockwise, "tile_weights", watched)
    stats = sd.attention_stats(query, key, window=(40, 0), impl="blockwise")
    assert sum(widths) <= 2 * 3 * _blockwise.BLOCK_KV
    assert np.array_equal(stats.visible, plain.visible)
    assert_close(stats.received, plain.received, eps=EPS["float32"], len_kv=6000)


def test_nan_reaches_the_rows_and_keys_that_see_it(impl):
    query, key = some(60, 8), some(200, 8, seed=1)
    clean = sd.attention_stats(query, key, causal=True, last=3, map_shape=(4, 5), impl=impl)
    key[150] = np.nan  # seen from position 150 on, which is query 10
    got = sd.attention_stats(query, key, causal=True, last=3, map_shape=(4, 5), impl=impl)
    for name in ("entropy", "max_weight", "mean_distance", "saturation"):
        assert np.isnan(getattr(got, name)[10:]).all()
        assert np.array_equal(getattr(got, name)[:10], getattr(clean, name)[:10])
    assert np.isnan(got.top_weights[10:]).all()
    assert (got.top_keys[10:] == -1).all()
    assert np.array_equal(got.visible, clean.visible)
    assert np.isnan(got.received).all()  # each key is seen by a query that sees the nan
    # Each bin of 15 queries has one that sees it; keys from 160 on are seen from query 20 on.
    cells = np.ones((4, 5), dtype=bool)
    cells[0, 4] = False
    assert np.array_equal(np.isnan(got.block_map), cells)


def test_hidden_nan_cannot_matter(impl):
    query, key = some(60, 8), some(200, 8, seed=1)
    options = {"kv_len": 180, "q_offset": 150, "map_shape": (4, 5), "last": 7, "impl": impl}
    clean = sd.attention_stats(query, key, **options)
    key[180:] = np.nan
    assert_same(sd.attention_stats(query, key, **options), clean)


def test_bits_do_not_depend_on_threads_or_batch(impl):
    query, key = some(3, 2, 500, 16), some(3, 2, 400, 16, seed=1)
    wanted = {"causal": True, "map_shape": (9, 7), "last": 20, "impl": impl}
    before = sd.get_num_threads()
    try:
        sd.set_num_threads(1)
        alone = sd.attention_stats(query, key, **wanted)
        for count in (2, 3, 5):
            sd.set_num_threads(count)
            assert_same(sd.attention_stats(query, key, **wanted), alone)
    finally:
        sd.set_num_threads(before)
    one = sd.attention_stats(query[1:2, 1:], key[1:2, 1:], **wanted)
    assert_same(one, sd.Stats(*(x[1:2, 1:] for x in alone)))


def test_sums_are_added_one_after_the_other():
    """Many short tasks that end at different times: each run has the bits of one thread."""
    query, key = some(4000, 4), some(600, 4, seed=1)
    wanted = {"causal": True, "q_offset": -3300, "map_shape": (3, 5), "impl": "kernels"}
    before = sd.get_num_threads()
    try:
        sd.set_num_threads(1)
        alone = sd.attention_stats(query, key, **wanted)
        sd.set_num_threads(8)
        for _ in range(20):
            assert_same(sd.attention_stats(query, key, **wanted), alone)
    finally:
        sd.set_num_threads(before)


@pytest.mark.parametrize("strides", ["transposed", "reversed", "every other", "read-only"])
def test_strides(strides, impl):
    query, key = some(2, 130, 8), some(2, 140, 8, seed=1)
    plain = sd.attention_stats(query, key, impl=impl)
    if strides == "transposed":
        query, key = (np.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1) for x in (query, key))
    elif strides == "reversed":
        query, key = (np.ascontiguousarray(x[..., ::-1])[..., ::-1] for x in (query, key))
    elif strides == "every other":
        query, key = (np.repeat(x, 2, axis=-2)[..., ::2, :] for x in (query, key))
    else:
        query.flags.writeable = key.flags.writeable = False
    assert_same(sd.attention_stats(query, key, impl=impl), plain)


def test_statistics_carry_no_graph():
    torch = pytest.importorskip("torch")
    x = torch.randn(2, 9, 4, requires_grad=True)
    stats = sd.attention_stats(x, x, sinks=torch.zeros(2, requires_grad=True), map_shape=(3, 3))
    assert not any(y.requires_grad for y in stats if y is not None)


def test_pickle():
    stats = sd.attention_stats(some(5, 4), some(7, 4), map_shape=(2, 3))
    assert_same(pickle.loads(pickle.dumps(stats)), stats)
    with pytest.raises(AttributeError):
        stats.lse = None


def test_trees():
    torch, tree = pytest.importorskip("torch"), pytest.importorskip("torch.utils._pytree")
    stats = sd.attention_stats(torch.ones(5, 4), torch.ones(7, 4))
    halved = tree.tree_map(lambda x: None if x is None else x / 2, stats)
    assert isinstance(halved, sd.Stats)
    assert torch.equal(halved.received, stats.received / 2)
    assert halved.block_map is None


@pytest.mark.heavy
def test_stats_go_through_jax():
    jax = pytest.importorskip("jax")
    x = jax.numpy.asarray(some(2, 6, 4))
    stats = sd.attention_stats(x, x)
    inside = jax.jit(lambda x: sd.attention_stats(x, x))(x)
    assert isinstance(inside, sd.Stats)
    assert_close(inside.entropy, stats.entropy, eps=EPS["float32"], len_kv=6)
    assert jax.tree.map(lambda x: x + 1, stats).visible.tolist() == [[7] * 6] * 2


def test_auto_takes_kernels_and_blockwise(monkeypatch):
    query, key = some(5, 4), some(7, 4)
    by_kernels = sd.attention_stats(query, key, impl="kernels")
    assert_same(sd.attention_stats(query, key), by_kernels)
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    blockwise = sd.attention_stats(query, key, impl="blockwise")
    assert_same(sd.attention_stats(query, key), blockwise)
    with pytest.raises(ValueError, match="NUMBA_DISABLE_JIT is set"):
        sd.attention_stats(query, key, impl="kernels")


def test_a_mod_that_fails(impl):
    def beyond(batch, head, q_pos, kv_pos):
        return table[q_pos] < kv_pos

    table = np.zeros(3)
    with pytest.raises((IndexError, ValueError)):
        sd.attention_stats(some(5, 4), some(7, 4), mask_mod=beyond, q_offset=0, impl=impl)


@pytest.mark.heavy
def test_memory_is_linear():
    """100,000 tokens: no more is held than one worker's sums beside the result."""
    import tracemalloc

    query = some(100_000, 16)
    sd.attention_stats(query[:300], query[:300])  # compiled
    tracemalloc.start()
    stats = sd.attention_stats(query, query, window=(500, 0), map_shape=(64, 64))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    held = sum(x.nbytes for x in stats if x is not None)
    assert peak < 3 * held + 2**24
    assert_close(stats.block_map.sum(), 64.0, eps=EPS["float32"], len_kv=500)
