"""JAX's transformations of the kernels: against `dense`, which JAX differentiates itself."""

import functools
import math
import operator
import threading

import numpy as np
import pytest

import cases
import scaledot as sd
from compare import EPS, as_float64, assert_close
from scaledot._derivatives import Grads
from scaledot._spec import Options

jax = pytest.importorskip("jax")
jnp = jax.numpy

from scaledot import _jax_rules  # noqa: E402  (imports JAX)

pytestmark = pytest.mark.heavy  # it compiles for every shape

COMBINATIONS = cases.pairwise()[:4]  # these hold every setting of every option
TINY = cases.Size(len_q=3, len_kv=5, d_k=2, num_heads=2, num_kv_heads=1, lead=(2,))
NAMES = Grads._fields
# JAX's own derivatives, the truth, are sums of some dozens of rounded terms themselves.
EXACT = {"eps": 8 * EPS["float64"], "len_kv": 5 * 24}


def attention(*, query, key, value, **options):
    """The call by the primitives, concrete or not; `impl` is auto."""
    state = _jax_rules.attention(query, key, value, Options(**options), False, False)
    return state.out


def attention_state(*, query, key, value, **options):
    return _jax_rules.attention(query, key, value, Options(**options), True, True)


dense = functools.partial(sd.attention, impl="dense")


def numbers(x):
    """Array of JAX, in float64 where it has fractions."""
    return jnp.asarray(x, dtype=jnp.float64 if np.asarray(x).dtype.kind == "f" else None)


def problem(combination, size=TINY, seed=0):
    """Arguments that have gradients and the others, for a combination of options."""
    rng = np.random.default_rng(seed)
    arrays = {name: numbers(x) for name, x in size.arrays(rng).items()}
    arrays |= cases.options_of(combination, size, rng, numbers)
    return ({n: x for n, x in arrays.items() if n in NAMES},
            {n: x for n, x in arrays.items() if n not in NAMES})  # fmt: skip


def normal_like(tree, seed=1):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), tree)


def assert_same(got, truth):
    """Trees alike in shapes and dtypes, with values as close as float64 allows."""
    got, truth = (jax.tree.leaves_with_path(x) for x in (got, truth))
    assert [path for path, _ in got] == [path for path, _ in truth]
    for (path, a), (_, b) in zip(got, truth, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), path
        assert_close(a, b, **EXACT)


def loss_of(function, fixed):
    """A loss with a curvature of its own."""

    def loss(x):
        out = function(**x, **fixed)
        return (jnp.sin(out) * jnp.arange(1.0, out.size + 1).reshape(out.shape)).sum()

    return loss


def first_and_second(function, fixed):
    """Every derivative up to the second, of the result along t and of a loss."""

    def derivatives(x, t):
        loss = loss_of(function, fixed)
        of_loss = jax.grad(loss)

        def steepness(x):
            return sum((g * d).sum() for g, d in zip(*map(jax.tree.leaves, (of_loss(x), t)),
                                                     strict=True))  # fmt: skip

        def slope(x):
            return jnp.cos(jax.jvp(lambda x: function(**x, **fixed), (x,), (t,))[1]).sum()

        return {
            "jvp": jax.jvp(lambda x: function(**x, **fixed), (x,), (t,)),
            "jvp of grad": jax.jvp(of_loss, (x,), (t,)),
            "grad of grad": jax.grad(steepness)(x),
            "grad of jvp": jax.grad(slope)(x),
        }

    return derivatives


@pytest.mark.parametrize("index", range(len(COMBINATIONS)))
def test_derivatives_are_those_of_dense(index):
    combination = {n: s for n, s in COMBINATIONS[index].items() if not n.endswith("_mod")}
    x, fixed = problem(combination, seed=index)
    t = normal_like(x)
    truth = jax.jit(first_and_second(dense, fixed))(x, t)
    assert_same(jax.jit(first_and_second(attention, fixed))(x, t), truth)
    if index == 0:  # without a compiler around them
        assert_same(first_and_second(attention, fixed)(x, t), truth)


def test_the_combinations_hold_every_setting():
    """But for some of the functions, which the primitives do not take."""
    seen = {(name, setting.name) for row in COMBINATIONS for name, setting in row.items()}
    expected = {(name, s.name) for name, found in cases.OPTIONS.items() for s in found}
    assert {name for name, _ in expected - seen} <= {"score_mod", "mask_mod"}


def test_forward_over_forward():
    """Along two directions, also mapped, with what differs from head to head mapped twice."""
    fixed = {"causal": True, "softcap": 2.0, "dropout": 0.2, "seed": jnp.asarray([5, 2**40]),
             "alibi_slopes": jnp.asarray([0.5, 0.1])}  # fmt: skip
    x, _ = problem({}, seed=2)
    many = {"sinks": jnp.asarray([[[0.5, -1.0]], [[2.0, 0.0]]])}
    t, s = normal_like(x, 3), normal_like(x, 4)

    def curve(function):
        def along(sinks):
            def result(x):
                return function(**x, sinks=sinks, **fixed)

            return jax.jvp(lambda x: jax.jvp(result, (x,), (t,))[1], (x,), (s,))[1]

        return jax.jit(jax.vmap(jax.vmap(along)))(many["sinks"])

    assert_same(curve(attention), curve(dense))


def test_jvp_of_grad_is_that_of_finite_differences():
    """As far as it is for `dense`: the difference is that of the quotient alone."""
    x, fixed = problem({}, seed=3)
    fixed |= {"causal": True, "sinks": jnp.asarray([0.3, -1.0])}
    t = normal_like(x)
    step = EPS["float64"] ** (1 / 3)

    def error(function):
        gradient = jax.jit(jax.grad(loss_of(function, fixed)))
        exact = jax.jvp(gradient, (x,), (t,))[1]
        ahead = gradient(jax.tree.map(lambda a, b: a + step * b, x, t))
        behind = gradient(jax.tree.map(lambda a, b: a - step * b, x, t))
        quotient = jax.tree.map(lambda a, b: (a - b) / (2 * step), ahead, behind)
        pairs = zip(jax.tree.leaves(quotient), jax.tree.leaves(exact), strict=True)
        return max(float(jnp.abs(a - b).max()) for a, b in pairs)

    assert error(attention) <= 3 * error(dense)


def test_hessians_and_jacobians():
    x, fixed = problem({}, cases.Size(2, 3, d_k=2, num_heads=2, num_kv_heads=1, lead=()))
    fixed |= {"causal": True}
    for take in (jax.hessian, lambda f: jax.jacrev(jax.jacrev(f))):
        assert_same(*(jax.jit(take(loss_of(f, fixed)))(x) for f in (attention, dense)))
    for take in (jax.jacrev, jax.jacfwd):
        assert_same(*(jax.jit(take(lambda x, f=f: f(**x, **fixed)))(x)
                      for f in (attention, dense)))  # fmt: skip


def test_lse_has_derivatives_and_empty_rows_have_none():
    x, _ = problem({}, seed=4)
    fixed = {"mask": jnp.asarray([[True], [False], [True]]), "q_offset": 1, "causal": True}

    def loss(function):
        def of(x):
            state = function(**x, **fixed)
            lse = jnp.where(jnp.isinf(state.lse), 0.0, state.lse)
            return (lse * jnp.arange(3.0)).sum() + jnp.sin(state.out).sum()

        return jax.jit(jax.value_and_grad(of))

    got = loss(attention_state)(x)
    assert_same(got, loss(functools.partial(sd.attention_state, impl="dense"))(x))
    assert not got[1]["query"][..., 1, :].any()


# Mapping. Axes of a batch that lead nowhere near the leading axes of the call.
SHAPES = {
    "query": (2, 2, 3, 2), "key": (1, 5, 2), "value": (1, 1, 5, 3), "bias": (3, 5),
    "sinks": (2,), "alibi_slopes": (2,), "mask": (5,), "kv_len": (2,), "q_offset": (2,),
    "seed": (), "segment_ids": (2, 5), "block_mask": (2, 1, 1),
}  # fmt: skip
DRAWS = {
    "mask": lambda rng, shape: rng.random(shape) < 0.8,
    "block_mask": lambda rng, shape: rng.random(shape) < 0.8,
    "kv_len": lambda rng, shape: rng.integers(2, 6, shape),
    "q_offset": lambda rng, shape: rng.integers(1, 4, shape),
    "seed": lambda rng, shape: rng.integers(-(2**40), 2**40, shape),
    "segment_ids": lambda rng, shape: np.sort(rng.integers(0, 2, shape), axis=-1),
}


def mapped_problem(mapped, axis):
    """Arguments with three entries along a new axis of those that are mapped."""
    rng = np.random.default_rng(6)
    arguments, axes = {}, {}
    for name, shape in SHAPES.items():
        draw = DRAWS.get(name, lambda rng, shape: rng.standard_normal(shape))
        axes[name] = min(axis, len(shape)) if name in mapped else None
        at = axes[name]
        shape = shape if at is None else (*shape[:at], 3, *shape[at:])
        arguments[name] = jnp.asarray(draw(rng, shape))
    return arguments, axes


def mapped_call(x, fixed):
    segments = fixed["segment_ids"]
    rest = {n: a for n, a in fixed.items() if n != "segment_ids"}
    return attention(
        **x, **rest, segment_ids=(segments[..., :3], segments), causal=True, dropout=0.25
    )


def gradient_and_change(x, t, fixed):
    """Of one entry: the result, its gradient, and the change of that along t."""

    def loss(x):
        out = mapped_call(x, fixed)
        return (jnp.sin(out) * jnp.arange(1.0, 4.0)).sum(), out

    return jax.jvp(jax.grad(loss, has_aux=True), (x,), (t,))


def parts_of(arguments):
    x = {n: a for n, a in arguments.items() if n in NAMES}
    return x, {n: a for n, a in arguments.items() if n not in NAMES}


@pytest.mark.parametrize("mapped", [*([n] for n in SHAPES), ["query", "sinks"], [*SHAPES]], ids=str)
def test_vmap_over_each_argument(mapped):
    """Of results and, entry by entry, of gradients, also by what is not mapped."""
    arguments, axes = mapped_problem(mapped, axis=len(mapped) % 3)
    (x, fixed), (of_x, of_fixed) = parts_of(arguments), parts_of(axes)
    t = normal_like(x)
    got = jax.vmap(gradient_and_change, in_axes=(of_x, of_x, of_fixed))(x, t, fixed)
    for entry in range(3):
        one = {n: a if axes[n] is None else a.take(entry, axes[n]) for n, a in arguments.items()}
        x, fixed = parts_of(one)
        of_one = {n: a if of_x[n] is None else a.take(entry, of_x[n]) for n, a in t.items()}
        found = jax.tree.map(operator.itemgetter(entry), got)
        assert_same(found, gradient_and_change(x, of_one, fixed))


def test_gradients_through_vmap_are_sums_over_its_entries():
    arguments, axes = mapped_problem(["query", "kv_len", "sinks"], axis=0)
    (x, fixed), (of_x, of_fixed) = parts_of(arguments), parts_of(axes)
    t = normal_like(x)

    def loss(x, one):
        if one:
            return sum(jnp.sin(mapped_call(*(
                {n: a if a is None or ax[n] is None else a[i] for n, a in part.items()}
                for part, ax in ((x, of_x), (fixed, of_fixed))
            ))).sum() for i in range(3))  # fmt: skip
        return jnp.sin(jax.vmap(mapped_call, in_axes=(of_x, of_fixed))(x, fixed)).sum()

    got, truth = (
        jax.jvp(jax.grad(functools.partial(loss, one=one)), (x,), (t,)) for one in (False, True)
    )
    assert_same(got, truth)


def test_a_seed_that_is_an_int_makes_one_mask_for_every_mapped_entry():
    x, _ = problem({}, seed=7)
    call = functools.partial(attention, dropout=0.5, seed=11)
    query = jnp.stack([x["query"]] * 3)
    got = jax.vmap(lambda query: call(**x | {"query": query}))(query)
    assert_same([*got], [call(**x)] * 3)


def test_two_axes_and_broadcast_leading_axes():
    rng = np.random.default_rng(8)
    x = jnp.asarray(rng.standard_normal((4, 2)))
    for size in (None, cases.Size(3, 4, d_k=2, lead=(2, 1), key_lead=(1, 3), value_lead=(3,))):
        given = dict.fromkeys(("query", "key", "value"), x)
        if size is not None:
            given = {n: jnp.asarray(a) for n, a in size.arrays(rng).items()}
        both = [jax.jit(jax.value_and_grad(loss_of(f, {"causal": True})))(given)
                for f in (attention, dense)]  # fmt: skip
        assert_same(*both)
    mapped = jax.vmap(lambda x: attention(query=x, key=x, value=x))(jnp.stack([x, x + 1]))
    assert_same(mapped[1], dense(x + 1, x + 1, x + 1))


@pytest.mark.parametrize("lengths", [(3, 0), (0, 3)], ids=["no keys", "no queries"])
def test_derivatives_of_nothing(lengths):
    x, _ = problem({}, cases.Size(*lengths, d_k=2, num_heads=2))
    got = jax.jit(jax.grad(lambda x: attention(**x).sum()))(x)
    assert {n: a.shape for n, a in got.items()} == {n: a.shape for n, a in x.items()}
    assert not any(a.any() for a in got.values())


# Under jit.


def test_what_is_compiled_is_what_is_not():
    """To the bit, with every array of the options traced; and it is what NumPy's arrays get."""
    combination = {n: s for n, s in COMBINATIONS[1].items() if not n.endswith("_mod")}
    x, fixed = problem(combination, cases.Size(130, 150, d_k=8, num_heads=2, lead=(2,)))
    given = {n: a.astype(jnp.float32) for n, a in x.items()} | fixed
    static = {n: a for n, a in given.items() if isinstance(a, bool | int | float) or n == "window"}
    arrays = {n: a for n, a in given.items() if n not in static}
    compiled = jax.jit(lambda arrays: attention(**arrays, **static))(arrays)
    np.testing.assert_array_equal(compiled, attention(**given))
    plain = jax.tree.map(np.asarray, arrays)
    np.testing.assert_array_equal(compiled, sd.attention(**plain, **static, impl="kernels"))


def test_control_flow_and_rematerialization():
    x, _ = problem({}, cases.Size(4, 4, d_k=2))

    def step(function, query):
        return jax.lax.cond(query.sum() > 0, lambda q: function(query=q, key=x["key"],
                            value=x["value"]), lambda q: q, query)  # fmt: skip

    def loss(function, remat):
        one = functools.partial(step, function)
        one = jax.checkpoint(one) if remat else one
        return lambda q: jax.lax.scan(lambda q, _: (one(q), None), q, None, length=3)[0].sum()

    truth = jax.grad(loss(dense, False))(x["query"])
    for remat in (False, True):
        assert_same(jax.jit(jax.grad(loss(attention, remat)))(x["query"]), truth)


def test_shard_map_with_whole_keys():
    x, _ = problem({}, cases.Size(3, 4, d_k=2), seed=9)
    mesh = jax.make_mesh((1,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    split, whole = jax.sharding.PartitionSpec("batch"), jax.sharding.PartitionSpec()

    def loss(x):
        def call(query, key, value):
            return attention(query=query, key=key, value=value, causal=True)

        mapped = jax.shard_map(call, mesh=mesh, in_specs=(split, whole, whole), out_specs=split)
        return jnp.sin(mapped(*x)).sum()

    x = [x["query"], x["key"][:1], x["value"][:1]]
    truth = jax.grad(lambda x: jnp.sin(dense(*x, causal=True)).sum())(x)
    assert_same(jax.jit(jax.grad(loss))(x), truth)


def test_calls_in_flight_from_two_threads():
    """Large enough that JAX hands them to threads of its own; each must get its own result."""
    rng = np.random.default_rng(10)
    arrays = [jnp.asarray(rng.standard_normal((8, 256, 32)), jnp.float32) for _ in range(3)]

    @jax.jit
    def gradient(query, key, value):
        def loss(query):
            return jnp.sin(attention(query=query * 2, key=key, value=value, causal=True)).sum()

        return jax.grad(loss)(query)

    truth = [np.asarray(gradient(arrays[0] + i, *arrays[1:])) for i in range(4)]
    found = {}

    def work(first):
        calls = [(i, gradient(arrays[0] + i, *arrays[1:])) for i in (first, first + 1)]
        found.update((i, np.asarray(x)) for i, x in calls)

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in (0, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(found) == [0, 1, 2, 3]
    for i, x in found.items():
        np.testing.assert_array_equal(x, truth[i])


def shapes_inside(jaxpr):
    """Numbers of elements of everything that a program computes, parts of it included."""
    for equation in jaxpr.eqns:
        yield from (math.prod(x.aval.shape) for x in equation.outvars)
        for inner in jax.tree.leaves(
            [*equation.params.values()], is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from shapes_inside(inner)


def test_nothing_is_quadratic_in_the_length():
    x, _ = problem({}, cases.Size(512, 512, d_k=4, num_heads=1, lead=()))
    t = normal_like(x)
    largest = {}
    for name, function in (("ours", attention), ("dense", dense)):
        derivatives = first_and_second(function, {"causal": True})
        jaxpr = jax.make_jaxpr(lambda x, d=derivatives: d(x, t))(x).jaxpr
        largest[name] = max(shapes_inside(jaxpr))
    assert largest == {"ours": 512 * 4, "dense": 512 * 512}
    saved = jax.tree.leaves(jax.vjp(lambda x: attention(**x), x)[1])
    assert max(leaf.size for leaf in saved) == 512 * 4


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dtypes(dtype):
    """Gradients come in the dtype of their argument, about as exact as those of `dense`."""
    x, fixed = problem({}, cases.Size(6, 9, d_k=4, num_heads=4, num_kv_heads=2), seed=11)
    x |= {"sinks": jnp.asarray([0.5, 0, -1, 2]), "bias": jnp.asarray(np.eye(6, 9))}
    fixed = {"causal": True, "window": (5, None)}
    rounded = {n: a.astype(dtype) for n, a in x.items()}

    def derivatives(function, x):
        def loss(x):
            out = function(**x, **fixed).astype(jnp.float64)
            return (out * jnp.arange(1.0, 5.0)).sum()

        return jax.jvp(jax.jit(jax.grad(loss)), (x,), (jax.tree.map(lambda a: a / 2, x),))

    truth = derivatives(dense, {n: a.astype(jnp.float64) for n, a in rounded.items()})
    found = [derivatives(f, rounded) for f in (attention, dense)]
    for got, yardstick, exact in zip(*map(jax.tree.leaves, (*found, truth)), strict=True):
        assert got.dtype == dtype
        assert_close(got, exact, yardstick, eps=EPS[dtype], len_kv=9, factor=3.0)
    state = jax.jit(lambda x: attention_state(query=x, key=x, value=x))(rounded["query"])
    assert state.out.dtype == state.lse.dtype == np.float32


def test_without_64_bits_a_seed_of_numpy_keeps_its_own():
    x, _ = problem({}, seed=12)
    plain = {n: np.asarray(a, np.float32) for n, a in x.items()}
    seed = np.array([3, -(2**40)])
    expected = sd.attention(**plain, dropout=0.5, seed=seed)
    with jax.enable_x64(False):
        got = jax.jit(lambda x: attention(**x, dropout=0.5, seed=seed))(
            {n: jnp.asarray(a) for n, a in plain.items()}
        )
    np.testing.assert_array_equal(got, expected)


# Errors, and who takes a call.


def test_errors_that_shapes_tell_are_raised_while_tracing():
    x, _ = problem({})
    with pytest.raises(ValueError, match="key and value must have the same length"):
        jax.jit(lambda x: attention(**x | {"value": x["value"][..., :4, :]}))(x)
    with pytest.raises(ValueError, match="q_offset must be given with causal"):
        jax.jit(lambda x: attention_state(**x, causal=True).out)(x)


def test_errors_that_values_tell_are_raised_by_the_call():
    x, _ = problem({})
    call = jax.jit(lambda x, kv_len: attention(**x, kv_len=kv_len))
    with pytest.raises(RuntimeError, match="kv_len must lie between 0 and len_kv = 5, got 1 to 9"):
        jax.block_until_ready(call(x, jnp.asarray([1, 9])))
    assert_same(call(x, jnp.asarray([1, 5])), dense(**x, kv_len=jnp.asarray([1, 5])))


def test_third_derivatives_are_refused():
    x, _ = problem({})

    def third(function):
        loss = loss_of(function, {})
        second = lambda x: jax.jvp(jax.grad(loss), (x,), (x,))[1]["query"].sum()  # noqa: E731
        return jax.jit(jax.grad(second))(x)

    with pytest.raises(ValueError, match=r"of first or second order.*impl='blockwise'"):
        third(attention)
    assert as_float64(third(functools.partial(sd.attention, impl="blockwise"))["query"]).any()


def test_which_calls_the_rules_take():
    x, _ = problem({})
    asked = {}

    def ask(name, query, key, **options):
        asked[name] = _jax_rules.applies(query, Options(**options), key, x["value"])
        return query.sum() + key.sum()

    ask("concrete", x["query"], x["key"])
    traced = jax.jit(lambda q, name, **o: ask(name, q, x["key"], **o), static_argnums=(1,),
                     static_argnames=("impl", "score_mod", "mask_mod"))  # fmt: skip
    traced(x["query"], "jit")
    traced(x["query"], "kernels", impl="kernels")
    traced(x["query"], "blockwise", impl="blockwise")
    traced(x["query"], "dense", impl="dense")
    traced(x["query"], "score_mod", score_mod=cases.distance_mod)
    traced(x["query"], "mask_mod", mask_mod=cases.dilated)
    jax.grad(lambda key: ask("key alone", x["query"], key))(x["key"])
    jax.jit(lambda ids: ask("ids alone", x["query"], x["key"], segment_ids=(ids[:3], ids)))(
        jnp.zeros(5, int)
    )
    assert asked == {
        "concrete": False, "jit": True, "kernels": True, "blockwise": False, "dense": False,
        "score_mod": False, "mask_mod": False, "key alone": True, "ids alone": True,
    }  # fmt: skip
