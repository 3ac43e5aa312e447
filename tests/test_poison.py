"""What is excluded cannot matter, whatever it holds; what is visible reaches its rows and no other.

Lengths exceed one block of queries and of keys, so that merging carries the poison too.
"""

import functools

import numpy as np
import pytest

import cases
import naive
import scaledot as sd
from compare import EPS, as_float64, assert_close
from conftest import IMPLEMENTATIONS, Library
from test_attention import truth_of

NAN, INF = np.nan, np.inf


def lengths(library, impl):
    """Several tiles for `blockwise`; less for the others, and for JAX, which compiles for each."""
    return (258, 700) if impl == "blockwise" and library != "jax" else (8, 520)


@pytest.fixture(autouse=True, scope="module")
def torch_on_one_thread():
    """PyTorch's threads, waiting for one another on a busy machine, take most of the time."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# Each returns options and which keys (2, len_kv) nothing sees under them.


def with_kv_len(rng, len_q, len_kv):
    kv_len = np.array([len_kv - 7, len_kv // 3])
    return {"kv_len": kv_len, "causal": True}, kv_len[:, None] <= np.arange(len_kv)


def with_no_key_at_all(rng, len_q, len_kv):
    kv_len = np.array([len_kv, 0])
    return {"kv_len": kv_len}, kv_len[:, None] <= np.arange(len_kv)


def with_mask(rng, len_q, len_kv):
    seen = cases.maybe(rng, 2, len_kv)
    return {"mask": seen[:, None, None], "softcap": 2.0}, ~seen


def with_mask_and_dropout(rng, len_q, len_kv):
    seen = cases.maybe(rng, len_kv)
    return {"mask": seen, "dropout": 0.4, "seed": 5, "scale": 0.9}, np.stack([~seen] * 2)


def with_minus_infinity(rng, len_q, len_kv):
    seen = cases.maybe(rng, len_kv)
    bias = np.where(seen, cases.normal(rng, len_kv), np.float32(-INF))
    return {"bias": bias}, np.stack([~seen] * 2)


def with_causal(rng, len_q, len_kv):
    q_offset = np.array([0, len_kv // 3])
    return {"causal": True, "q_offset": q_offset}, q_offset[:, None] + len_q <= np.arange(len_kv)


def with_window(rng, len_q, len_kv):
    keys = np.arange(len_kv)
    hidden = (keys < 400 - 100) | (keys > 400 + len_q - 1 + 50)
    options = {"window": (100, 50), "q_offset": 400, "alibi_slopes": cases.slopes(2)}
    return options, np.stack([hidden] * 2)


def with_segments(rng, len_q, len_kv):
    ids = rng.integers(-1, 3, (2, len_kv))
    return {"segment_ids": (np.arange(len_q) % 2 * 2, ids)}, (ids != 0) & (ids != 2)


def with_mask_mod(rng, len_q, len_kv):
    hidden = (np.arange(len_kv) + np.array([[0], [1]])) % 3 == 0
    return {"mask_mod": lambda batch, head, q_pos, kv_pos: (kv_pos + batch) % 3 != 0}, hidden


def with_block_mask(rng, len_q, len_kv):
    blocks = np.arange(-(-len_kv // 128)) % 3 != 1
    options = {"block_mask": blocks[None], "score_mod": cases.distance_mod}
    return options, np.stack([~np.repeat(blocks, 128)[:len_kv]] * 2)


def with_much(rng, len_q, len_kv):
    seen, keys = cases.maybe(rng, len_kv), np.arange(len_kv)
    kv_len, q_offset = np.array([len_kv - 9, len_kv // 2 + 90]), np.array([len_kv // 2, 250])
    reach = len_kv // 2 - 11
    options = {
        "mask": seen, "kv_len": kv_len, "causal": True, "window": (reach, None),
        "q_offset": q_offset, "alibi_slopes": cases.slopes(2), "softcap": 3.0,
        "dropout": 0.2, "seed": np.array([1, 2]),
    }  # fmt: skip
    first, count = q_offset[:, None], kv_len[:, None]
    return options, ~seen | (count <= keys) | (first + len_q <= keys) | (first - reach > keys)


HIDING = {
    function.__name__: function
    for function in (
        with_kv_len, with_no_key_at_all, with_mask, with_mask_and_dropout, with_minus_infinity,
        with_causal, with_window, with_segments, with_mask_mod, with_block_mask, with_much,
    )
}  # fmt: skip


# JAX compiles for every shape: it runs some of them, each by one implementation.
OTHER_LIBRARIES = pytest.mark.parametrize(
    ("library", "impl", "name"),
    [("torch", impl, name) for impl in IMPLEMENTATIONS for name in HIDING]
    + [
        pytest.param("jax", "dense", "with_minus_infinity", marks=pytest.mark.heavy),
        ("jax", "blockwise", "with_much"),
    ],
)


def problem(name, library, impl, dtype="float32"):
    """Clean arguments, always the same for a name, and which keys of them nothing sees."""
    rng = np.random.default_rng(list(name.encode()))
    len_q, len_kv = lengths(library, impl)
    # One group of heads: none has keys hidden that the others see.
    size = cases.Size(len_q, len_kv, d_k=4, d_v=3, num_heads=2, num_kv_heads=1)
    arrays = {n: x.astype(cases.dtype_named(dtype)) for n, x in size.arrays(rng).items()}
    options, hidden = HIDING[name](rng, len_q, len_kv)
    options.setdefault("bias", cases.normal(rng, 2, 1, 1, len_kv))
    assert hidden.any()
    assert not hidden.all()
    return arrays | options, hidden


def poisoned(arguments, hidden, poison, targets=("key", "value", "bias")):
    """The same arguments with poison at the hidden keys; None is nan, inf and -inf in turn."""
    values = np.array([NAN, INF, -INF] if poison is None else [poison])
    values = values[np.arange(hidden.size) % len(values)].reshape(hidden.shape)
    dirty = dict(arguments)
    for name in targets:
        x = arguments[name]
        if name == "bias" and x.ndim == 1:
            continue  # it does the hiding
        by_key = values[:, None, None, :] if name == "bias" else values[:, None, :, None]
        where = hidden[:, None, None, :] if name == "bias" else hidden[:, None, :, None]
        dirty[name] = np.where(where, by_key.astype(x.dtype), x)
        assert not np.isfinite(dirty[name].astype(np.float64)).all()
    return dirty


def same_bits(a, b):
    """Whether two arrays of one library hold the same bits, bfloat16 included."""
    a, b = (np.asarray(x.detach().float() if hasattr(x, "detach") else x) for x in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def with_weights(impl):
    """Return the implementation of weights: the kernels never hold any."""
    return "auto" if impl == "kernels" else impl


def results(arguments, impl):
    """Everything that one set of arguments gives: out, state, weights of a few rows."""
    weights_of = {n: x for n, x in arguments.items() if n not in ("value", "dropout", "seed")}
    positions = {} if "q_offset" in arguments else {"q_offset": 800}
    return [
        sd.attention(**arguments, impl=impl),
        *sd.attention_state(**arguments | positions, impl=impl),
        sd.attention_weights(**weights_of, rows=[0, 3, -2, -1], impl=with_weights(impl)),
    ]


@pytest.mark.parametrize("name", HIDING)
def test_hidden_keys_cannot_matter(name, impl):
    arguments, hidden = problem(name, "numpy", impl)
    clean = results(arguments, impl)
    assert all(map(same_bits, clean, results(poisoned(arguments, hidden, None), impl)))
    for poison in (NAN, INF, -INF):
        dirty = poisoned(arguments, hidden, poison)
        assert same_bits(clean[0], sd.attention(**dirty, impl=impl))
        for name in ("key", "value", "bias"):
            alone = arguments | {name: dirty[name]}
            assert poison != -INF or same_bits(clean[0], sd.attention(**alone, impl=impl))


@OTHER_LIBRARIES
def test_hidden_keys_cannot_matter_in_other_libraries(name, library, impl):
    xp = Library(library)
    arguments, hidden = problem(name, library, impl)
    clean = results(xp.arguments(arguments), impl)
    dirty = results(xp.arguments(poisoned(arguments, hidden, None)), impl)
    assert all(map(same_bits, clean, dirty))


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("name", ["with_kv_len", "with_mask_and_dropout", "with_minus_infinity"])
def test_hidden_keys_cannot_matter_in_other_dtypes(name, dtype, library, impl):
    xp = Library(library)
    arguments, hidden = problem(name, library, impl, dtype)
    clean = results(xp.arguments(arguments), impl)
    dirty = results(xp.arguments(poisoned(arguments, hidden, None)), impl)
    assert all(map(same_bits, clean, dirty))


def gradients(library, arguments, impl, names=("query", "key", "value", "bias")):
    """Gradients of a fixed linear function of out and lse, as NumPy arrays."""
    arguments = Library(library).arguments(arguments)
    arguments.setdefault("q_offset", 800)

    def loss(xp, *arrays):
        state = sd.attention_state(**arguments | dict(zip(names, arrays, strict=True)), impl=impl)
        lse = xp.where(xp.isfinite(state.lse), state.lse, xp.zeros_like(state.lse))
        ramp = xp.reshape(xp.arange(state.out.shape[-2]), (-1, 1)) % 7 - 2.5
        return xp.sum(state.out * ramp) + xp.sum(lse * ramp[:, 0] * 0.5)

    if library == "torch":
        import torch

        leaves = [arguments[n].clone().requires_grad_() for n in names]
        return [as_float64(g) for g in torch.autograd.grad(loss(torch, *leaves), leaves)]
    import jax

    of_all = jax.grad(lambda *arrays: loss(jax.numpy, *arrays), argnums=tuple(range(len(names))))
    return [as_float64(g) for g in of_all(*(arguments[n] for n in names))]


@OTHER_LIBRARIES
def test_hidden_keys_cannot_matter_to_gradients(name, library, impl):
    arguments, hidden = problem(name, library, impl)
    clean = gradients(library, arguments, impl)
    for poison in (None,) if library == "jax" else (NAN, INF, None):
        dirty = gradients(library, poisoned(arguments, hidden, poison), impl)
        for a, b in zip(clean, dirty, strict=True):
            assert np.isfinite(b).all()
            assert np.array_equal(a, b)
    _, of_key, of_value, of_bias = dirty
    for gradient in (of_key, of_value):
        assert (np.swapaxes(gradient, 1, 2)[hidden] == 0).all()
        assert gradient.any()
    if of_bias.ndim > 1:
        assert (of_bias[hidden[:, None, None]] == 0).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_hidden_keys_cannot_matter_to_gradients_in_other_dtypes(dtype, impl):
    arguments, hidden = problem("with_much", "torch", impl, dtype)
    clean = gradients("torch", arguments, impl)
    dirty = gradients("torch", poisoned(arguments, hidden, None), impl)
    for a, b in zip(clean, dirty, strict=True):
        assert np.isfinite(b).all()
        assert np.array_equal(a, b)


# Where poison is visible: grouped heads, causal, a mask of each head, rows that see nothing.

EMPTY = 5  # rows 5, 55, 105, ... see nothing


def visible_problem(library, impl, **options):
    """Arguments and what each row sees, (2, 4, len_q, len_kv)."""
    rng = np.random.default_rng(8)
    len_q, len_kv = lengths(library, impl)
    size = cases.Size(len_q, len_kv, d_k=4, d_v=3, num_heads=4, num_kv_heads=2)
    arrays = {n: x.astype(np.float32) for n, x in size.arrays(rng).items()}
    queries, keys = np.arange(len_q)[:, None], np.arange(len_kv)
    mask = cases.maybe(rng, 2, 4, 1, len_kv, p=0.9) & (queries % 50 != EMPTY)
    q_offset, reach = len_kv - len_q - 5, len_kv // 2 + 3
    seen = mask & (keys <= queries + q_offset) & (keys >= queries + q_offset - reach)
    named = {name: make(rng, len_q, len_kv) for name, make in options.items() if callable(make)}
    arguments = arrays | options | named | {
        "mask": mask, "causal": True, "window": (reach, None), "q_offset": q_offset,
    }  # fmt: skip
    return arguments, seen


def visible_keys(seen, count):
    """Keys that several rows of every head see, spread over the blocks."""
    found = np.flatnonzero((seen.sum(axis=-2) > 1).all(axis=(0, 1)))
    return found[np.linspace(0, len(found) - 1, count).astype(int)]


def run(library, arguments, impl):
    """The state in NumPy arrays."""
    converted = Library(library).arguments(arguments)
    state = sd.attention_state(**converted, impl=impl)
    return [np.asarray(x) for x in state]


@functools.cache
def clean_run(library, impl, **options):
    """The state of a visible problem, for all the poisons that it is compared with."""
    return run(library, visible_problem(library, impl, **options)[0], impl)


def assert_reached(
    library, arguments, dirty, rows, impl, *, clean=None, columns=slice(None), value=NAN
):  # fmt: skip
    """Poison reaches out and lse of these rows, and not one bit of anything else."""
    assert rows.any()
    assert not rows.all()
    out, lse = clean or run(library, arguments, impl)
    dirty_out, dirty_lse = run(library, dirty, impl)
    reached = np.zeros(out.shape, dtype=bool)
    reached[..., columns] = rows[..., None]
    assert np.array_equal(dirty_out[reached], np.full(reached.sum(), value), equal_nan=True)
    assert same_bits(dirty_out[~reached], out[~reached])
    of_values = "value" if dirty["value"] is not arguments["value"] else "scores"
    if of_values == "scores":
        assert np.isnan(dirty_lse[rows]).all()
        assert same_bits(dirty_lse[~rows], lse[~rows])
    else:
        assert same_bits(dirty_lse, lse)


def changed(arguments, name, index, value):
    """The same arguments with one element of one array replaced."""
    x = arguments[name].copy()
    x[index] = value
    return arguments | {name: x}


LIBRARIES = pytest.mark.parametrize("library", ["numpy", "torch", "jax"])


@LIBRARIES
@pytest.mark.parametrize("options", [{}, {"dropout": 0.5, "seed": 3}], ids=["plain", "dropout"])
def test_nan_in_a_visible_key_reaches_the_rows_that_see_it(library, impl, options):
    arguments, seen = visible_problem(library, impl, **options)
    for entry, head, key in zip((0, 1, 1), (1, 0, 1), visible_keys(seen, 3), strict=True):
        rows = np.zeros(seen.shape[:-1], dtype=bool)
        group = slice(2 * head, 2 * head + 2)
        rows[entry, group] = seen[entry, group, :, key]
        dirty = changed(arguments, "key", (entry, head, key, 2), NAN)
        clean = clean_run(library, impl, **options)
        assert_reached(library, arguments, dirty, rows, impl, clean=clean)


@LIBRARIES
@pytest.mark.parametrize("poison", ["nan", "inf", "-inf", "nan with dropout"])
def test_poison_in_a_visible_value_reaches_its_column(library, impl, poison):
    """Inf keeps its sign. Nan also reaches rows that drop its weight: 0·nan is nan."""
    options = {"dropout": 0.5, "seed": 3} if "dropout" in poison else {}
    arguments, seen = visible_problem(library, impl, **options)
    entry, head, key, poison = 1, 1, visible_keys(seen, 3)[1], float(poison.split()[0])
    rows = np.zeros(seen.shape[:-1], dtype=bool)
    rows[entry, 2:] = seen[entry, 2:, :, key]
    dirty = changed(arguments, "value", (entry, head, key, 1), poison)
    clean = clean_run(library, impl, **options)
    assert_reached(
        library, arguments, dirty, rows, impl, clean=clean, columns=[1], value=poison
    )  # fmt: skip


@LIBRARIES
def test_infinities_of_both_signs_give_nan(library, impl):
    """Two keys in two blocks: some rows see one of them, some both."""
    arguments, seen = visible_problem(library, impl)
    rows, keys = seen[0, :2], visible_keys(seen, 20)
    first, second = next(
        (a, b)
        for a in keys[keys < 512]
        for b in keys[keys >= 512]
        if (rows[..., a] & rows[..., b]).any() and (rows[..., a] & ~rows[..., b]).any()
    )
    value = arguments["value"].copy()
    value[0, 0, first, 0], value[0, 0, second, 0] = INF, -INF
    out, lse = clean_run(library, impl)
    dirty_out, dirty_lse = run(library, arguments | {"value": value}, impl)
    up, down = rows[..., first], rows[..., second]
    assert (up & down).any()
    assert (up ^ down).any()
    truth = out[0, :2, :, 0].copy()
    truth[up], truth[down], truth[up & down] = INF, -INF, NAN
    assert np.array_equal(dirty_out[0, :2, :, 0], truth, equal_nan=True)
    assert same_bits(dirty_out[..., 1:], out[..., 1:])
    assert same_bits(dirty_out[1], out[1])
    assert same_bits(dirty_out[0, 2:], out[0, 2:])
    assert same_bits(dirty_lse, lse)


@pytest.mark.parametrize("at", [3, 600], ids=["first block", "second block"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_visible_infinity_counts_however_small_its_weight(library, impl, at):
    """The weight exp(-150) is 0 in float32; it is positive, and so is its product with inf."""
    query, key = np.ones((1, 1), np.float32), np.zeros((1030, 1), np.float32)
    value = np.ones((1030, 1), np.float32)
    key[700 if at < 512 else 200] = 150
    value[at] = INF
    truth = naive.attention(query, key, value)[0]
    assert truth == INF
    assert run(library, {"query": query, "key": key, "value": value}, impl)[0] == INF


@LIBRARIES
def test_nan_in_a_query_reaches_its_row(library, impl):
    """A row that sees nothing is empty with nan as without."""
    arguments, seen = visible_problem(library, impl)
    query = arguments["query"].copy()
    rows = np.zeros(seen.shape[:-1], dtype=bool)
    for entry, head, row in ((0, 0, 3), (0, 3, -2), (1, 2, EMPTY), (1, 3, -1)):
        query[entry, head, row, 1] = NAN
        rows[entry, head, row] = seen[entry, head, row].any()
    assert not rows[1, 2].any()
    dirty = arguments | {"query": query}
    assert_reached(library, arguments, dirty, rows, impl, clean=clean_run(library, impl))


@pytest.mark.parametrize("poison", [NAN, INF])
@LIBRARIES
def test_poison_in_a_visible_bias_reaches_its_row(library, impl, poison):
    """Inf too: exp(inf - inf) is nan."""
    arguments, seen = visible_problem(
        library, impl, bias=lambda rng, len_q, len_kv: cases.normal(rng, 2, 4, len_q, len_kv)
    )
    bias = arguments["bias"].copy()
    places = np.random.default_rng(9).integers(0, np.reshape(bias.shape, (4, 1)), (4, 40))
    bias[tuple(places)] = poison
    rows = np.zeros(seen.shape[:-1], dtype=bool)
    for *row, key in places.T:
        rows[tuple(row)] |= seen[*row, key]
    assert_reached(library, arguments, arguments | {"bias": bias}, rows, impl)


@LIBRARIES
def test_nan_from_a_score_mod_reaches_its_rows(library, impl):
    """It comes by a table, so that the mod is one that every library can run."""
    xp = Library(library)

    def mod(*places):
        table = np.zeros((4, 1030), dtype=np.float32)
        table[tuple(zip(*places, strict=True))] = NAN
        converted = xp.array(table)
        return lambda score, batch, head, q_pos, kv_pos: score + converted[head, kv_pos]

    arguments, seen = visible_problem(library, impl)
    first, _, second = visible_keys(seen, 3)
    rows = np.zeros(seen.shape[:-1], dtype=bool)
    rows[:, 1], rows[:, 2] = seen[:, 1, :, first], seen[:, 2, :, second]
    clean = arguments | {"score_mod": mod((0, 0))}  # nothing sees key 0
    dirty = arguments | {"score_mod": mod((1, first), (2, second))}
    assert_reached(library, clean, dirty, rows, impl)


@pytest.mark.parametrize("name", ["query", "key"])
def test_infinite_scores_are_the_oracles(name, impl, xp, rng):
    """+inf gives nan; -inf is a key that is not there."""
    size = cases.Size(6, 9, d_k=3, num_heads=2, num_kv_heads=1)
    arguments = {n: x.astype(np.float32) for n, x in size.arrays(rng).items()}
    arguments[name][0, 0, 2, 1] = INF
    arguments[name][1, 0, 3, 0] = -INF
    arguments["value"][0, 0, 2, 1] = NAN
    out, lse, weights, yardstick, yardstick_lse = truth_of(arguments)
    assert np.isnan(out).any()
    assert np.isfinite(out).any()
    converted = xp.arguments(arguments)
    state = sd.attention_state(**converted, impl=impl)
    assert_close(state.out, out, yardstick, eps=EPS["float32"], len_kv=9)
    assert_close(state.lse, lse, yardstick_lse, eps=EPS["float32"], len_kv=9)
    del converted["value"]
    rows = np.isnan(as_float64(sd.attention_weights(**converted, impl=with_weights(impl)))).any(
        axis=-1
    )
    assert np.array_equal(rows, np.isnan(weights).any(axis=-1))


@LIBRARIES
def test_sinks_of_minus_infinity_take_nothing(library, impl):
    """They leave the result of that head as it is without sinks; empty rows stay empty."""
    arguments, _ = visible_problem(library, impl)
    del arguments["q_offset"]
    xp = Library(library)
    plain = as_float64(sd.attention(**xp.arguments(arguments), impl=impl))
    sinks = np.array([-INF, 0.5, -INF, -INF], dtype=np.float32)
    got = as_float64(sd.attention(**xp.arguments(arguments | {"sinks": sinks}), impl=impl))
    assert same_bits(got[:, [0, 2, 3]], plain[:, [0, 2, 3]])
    shrunk = np.abs(got[:, 1]) < np.abs(plain[:, 1])
    assert np.array_equal(shrunk.any(axis=-1), (plain[:, 1] != 0).any(axis=-1))


def test_gradients_of_sinks_of_minus_infinity(impl):
    import torch

    arguments, _ = visible_problem("torch", impl)
    sinks = np.array([-INF, 0.5, -INF, -INF], dtype=np.float32)
    converted = Library("torch").arguments(arguments | {"sinks": sinks})
    leaves = [converted[n].requires_grad_() for n in ("query", "key", "value", "sinks")]
    out = sd.attention(**converted, impl=impl)
    gradients = torch.autograd.grad(out.square().sum(), leaves)
    assert all(g.isfinite().all() for g in gradients)
    assert (gradients[-1] != 0).tolist() == [False, True, False, False]


def test_nan_in_masked_bias_behind_a_nonlinear_score_mod(impl):
    """The mod's derivative at the masked place is nan; it must reach no gradient."""
    import torch

    rng = np.random.default_rng(4)
    arrays = {n: x.astype(np.float64) for n, x in cases.Size(5, 700, d_k=3).arrays(rng).items()}
    mask = cases.maybe(rng, 700)
    bias = rng.standard_normal((5, 700))

    def of(bias):
        converted = {n: torch.tensor(x).requires_grad_() for n, x in arrays.items()}
        converted["bias"] = torch.tensor(bias).requires_grad_()
        out = sd.attention(**converted, mask=torch.tensor(mask), impl=impl,
                           score_mod=lambda score, *where: torch.tanh(score) * score)  # fmt: skip
        return torch.autograd.grad(out.square().sum(), list(converted.values()))

    for clean, dirty in zip(of(bias), of(np.where(mask, bias, NAN)), strict=True):
        assert dirty.isfinite().all()
        assert torch.equal(clean, dirty)


@pytest.mark.parametrize("len_q", [1, 20, 200])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_what_lies_where_keys_without_features_do(len_q, dtype, impl):
    """With d_k = 0 there is no number to read: the weights are equal."""
    rng = np.random.default_rng(0)
    value = rng.standard_normal((2, 300, 8)).astype(cases.dtype_named(dtype))
    query = np.full((2, len_q, 16), NAN, value.dtype)[..., :0]
    key = np.full((2, 300, 16), NAN, value.dtype)[..., :0]
    truth = np.tile(value.astype(np.float64).mean(axis=1, keepdims=True), (1, len_q, 1))
    out, pullback = sd.attention_vjp(query, key, value, impl=impl)
    grads = pullback(np.ones_like(out))
    assert_close(out, truth, eps=EPS[dtype], len_kv=300)
    assert_close(grads.value, np.full(value.shape, len_q / 300), eps=EPS[dtype], len_kv=300)
    weights = sd.attention_weights(query, key, impl=impl)
    wide = EPS["float64" if dtype == "float64" else "float32"]
    assert_close(weights, np.full(weights.shape, 1 / 300), eps=wide, len_kv=300)
    stats = sd.attention_stats(query, key, impl=impl)
    assert_close(stats.received, np.full((2, 300), len_q / 300), eps=wide, len_kv=300)
