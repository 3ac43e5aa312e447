"""What ring and Ulysses attention refuse, and that every rank hears of it."""

import re

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch.autograd import forward_ad

from ring_calls import FUNCTIONS, errors_of, normal
from scaledot._ring import ring_attention
from scaledot._ring_transport import InProcessRing
from scaledot._ulysses import ulysses_attention

BY_ROWS = ("query", "key", "value")


def call(group, function=ring_attention, common=None, **changed):
    """A call in which some arguments of rank 1 differ."""
    arguments = {name: torch.ones(2, 3, 4) for name in BY_ROWS} | {"layout": "contiguous"}
    arguments |= common or {}
    if group.rank == 1:
        arguments |= changed
    return function(**arguments, group=group)


def ones(*shape, **options):
    return torch.ones(*shape, **options)


DIFFERENT = {
    "num_heads": {"query": ones(4, 3, 4)},
    "num_kv_heads": {"key": ones(1, 3, 4), "value": ones(1, 3, 4)},
    "d_k": {"query": ones(2, 3, 5), "key": ones(2, 3, 5)},
    "d_v": {"value": ones(2, 3, 2)},
    "dtype": {name: ones(2, 3, 4, dtype=torch.float64) for name in BY_ROWS},
    "library": {name: np.ones((2, 3, 4), np.float32) for name in BY_ROWS},
    "leading axes of value": {"value": ones(1, 2, 3, 4)},
    "causal and window": {"causal": True},
    "scale": {"scale": 0.25},
    "softcap": {"softcap": 0.5},
    "dropout": {"dropout": 0.5, "seed": 1},
    "seed": {"seed": np.array(3)},  # of one entry; a number is hashed for each
    "impl": {"impl": "dense"},
    "layout": {"layout": "zigzag"},
    "alibi_slopes": {"alibi_slopes": ones(2)},
    "sinks": {"sinks": ones(2)},
    "axes of segment_ids before the last": {"segment_ids": np.zeros(3, int)},
    "dtype and axes of bias, rows left out": {"bias": np.zeros((3, 6), ">f4")},
    "byte order of (query, key, value)": {"key": np.ones((2, 3, 4), ">f4")},
    "requires_grad of (query, key, value, bias, alibi_slopes, sinks)":
        {"query": ones(2, 3, 4).requires_grad_()},
}  # fmt: skip
COMMON = {
    "seed": {"dropout": 0.5, "seed": 3},
    "alibi_slopes": {"alibi_slopes": torch.zeros(2)},
    "sinks": {"sinks": torch.zeros(2)},
    "axes of segment_ids before the last":
        {"query": ones(2, 2, 3, 4), "segment_ids": np.zeros((2, 3), int)},
    "dtype and axes of bias, rows left out": {"bias": np.zeros((3, 6), "<f4")},
    "byte order of (query, key, value)":
        {name: np.ones((2, 3, 4), "<f4") for name in BY_ROWS},
}  # fmt: skip


@pytest.mark.parametrize("what", DIFFERENT)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_difference_is_an_error_on_every_rank(what, function):
    world_size = 2 if what != "num_kv_heads" else 3
    for error in errors_of(world_size, lambda group: call(
        group, FUNCTIONS[function], COMMON.get(what), **DIFFERENT[what])):  # fmt: skip
        assert type(error) is ValueError
        assert str(error).startswith(f"{what} must be the same on every rank, got ")
        assert "on rank 1" in str(error)


OPTIONAL = {
    "bias": ones(3, 6), "segment_ids": np.zeros(3, int), "alibi_slopes": ones(2), "sinks": ones(2),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONAL)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_an_array_of_one_rank_alone(name, function):
    changed = {name: OPTIONAL[name]}
    for error in errors_of(3, lambda group: call(group, FUNCTIONS[function], **changed)):
        assert str(error) == (
            f"{name} must be given on every rank or on none, got none on rank 0, 2. "
            "Each rank passes what belongs to its own tokens, or to all heads."
        )


@pytest.mark.parametrize("seeds", [(3, np.int64(3)), (np.array(3), torch.tensor(3))])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_seed_is_its_value(function, seeds):
    def work(group, seed):
        x = torch.tensor(normal(2, 6, 4))[:, 3 * group.rank :][:, :3]
        return FUNCTIONS[function](x, x, x, dropout=0.5, seed=seed, group=group)

    mixed = InProcessRing(2).run(lambda group: work(group, seeds[group.rank]))
    plain = InProcessRing(2).run(lambda group: work(group, seeds[0]))
    assert torch.equal(torch.stack(mixed), torch.stack(plain))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_other_byte_orders(function):
    """The same results wherever all ranks have the same one."""
    def work(group, order):
        x = normal(2, 6, 4, dtype=f"{order}f4")[:, 3 * group.rank :][:, :3]
        bias = normal(6, 6, dtype=f"{order}f4")[3 * group.rank :][:3]
        return FUNCTIONS[function](x, x, x, bias=bias, causal=True, impl="blockwise", group=group)

    little, big = (InProcessRing(2).run(lambda group, o=o: work(group, o)) for o in "<>")
    np.testing.assert_array_equal(little, big)


def test_functions_must_be_the_same():
    for error in errors_of(2, lambda g: call(g, list(FUNCTIONS.values())[g.rank])):
        assert str(error).startswith("function must be the same on every rank")


WRONG = {
    "dtype": ({"query": ones(2, 3, 4, dtype=torch.int64)}, TypeError, "must share one dtype"),
    "list": ({"key": [[1.0]]}, TypeError, "key must be one of arrays"),
    "shape": ({"value": ones(2, 5, 4)}, ValueError, "key and value must have the same length"),
    "layout": ({"layout": "striped"}, ValueError, "layout must be one of"),
    "bias rows": ({"bias": ones(9, 9)}, ValueError,
                  "bias must broadcast to (..., num_heads, own len_q, keys of all ranks) = "
                  "(2, 3, keys of all ranks), got (9, 9)."),
    "bias dtype": ({"bias": torch.ones(3, 9, dtype=torch.int64)}, TypeError,
                   "bias must have a floating-point dtype"),
    "bias list": ({"bias": [[0.0]]}, TypeError, "bias must be one of arrays"),
    "seed": ({"dropout": 0.5}, ValueError, "dropout needs a seed"),
    "window": ({"window": 3}, TypeError, "window must be a pair"),
    "segments": ({"segment_ids": ones(3)}, TypeError, "segment_ids of query must be integers"),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_an_error_of_one_rank_is_told_to_all(what, function):
    changed, kind, message = WRONG[what]
    errors = errors_of(3, lambda group: call(group, FUNCTIONS[function], **changed))
    assert type(errors[1]) is kind
    assert message in str(errors[1])
    for error in (errors[0], errors[2]):
        assert type(error) is ValueError
        assert str(error).startswith(
            "the arguments must be valid on every rank, got an error on rank 1."
        )


class Subclass(torch.Tensor):
    """What the kernels do not read."""


@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_kernels_cannot_do_on_one_rank_is_told_to_all(function):
    def work(group):
        x = ones(2, 3, 4, requires_grad=True)  # is no obstacle: the rules of PyTorch see to it
        key = x.detach().as_subclass(Subclass) if group.rank == 1 else x.detach()
        FUNCTIONS[function](x, key, key, impl="kernels", group=group)

    errors = errors_of(3, work)
    assert str(errors[1]).startswith("impl='kernels' must be given a call that the kernels can do")
    for error in (errors[0], errors[2]):
        assert str(error).startswith(
            "the arguments must be valid on every rank, got an error on rank 1."
        )


@pytest.mark.parametrize("columns", [2, 5])
def test_columns_of_a_bias(columns):
    def work(group):
        x = torch.ones(2, 3, 4)
        ring_attention(x, x, x, bias=torch.zeros(3, 6 if group.rank else columns), group=group)

    for error in errors_of(2, work):
        assert str(error) == (
            "bias must have a column for each of the 6 keys of all ranks, or one, got "
            f"{columns} on rank 0. Each rank passes its own rows, (..., num_heads, own len_q, "
            "all keys)."
        )


def test_ulysses_needs_a_key_head_for_each_rank():
    for error in errors_of(3, lambda group: call(group, ulysses_attention)):
        assert str(error) == ("num_kv_heads must be at least the number of ranks, 3, got 2. "
                              "ring_attention splits no heads.")  # fmt: skip


def test_groups():
    x = torch.ones(2, 3, 4)
    with pytest.raises(ValueError, match=re.escape("group must be a running group of torch.dist")):
        ring_attention(x, x, x)
    jax_numpy = pytest.importorskip("jax.numpy")
    y = jax_numpy.ones((2, 3, 4))
    with pytest.raises(TypeError, match="ring_attention takes tensors of PyTorch"):
        InProcessRing(1).run(lambda group: ring_attention(y, y, y, group=group))


# Derivatives


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("power", [1, 2])  # the gradient that comes in depends on nothing, on all
def test_second_derivatives_are_refused(power, function):
    def work(group):
        x = torch.tensor(normal(2, 3, 4)).requires_grad_()
        loss = FUNCTIONS[function](x, x, x, group=group).pow(power).sum()
        plain, first = (
            torch.autograd.grad(loss, x, retain_graph=True, create_graph=create_graph)[0]
            for create_graph in (False, True)
        )
        assert torch.equal(first, plain)
        assert not plain.requires_grad
        with pytest.raises(ValueError, match="must be differentiated once, got a second derivati"):
            torch.autograd.grad(first.square().sum(), x)
        return True

    assert InProcessRing(2).run(work) == [True, True]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_checkpoints(function):
    def work(group):
        x = torch.tensor(normal(2, 6, 4))[:, 3 * group.rank :][:, :3].clone().requires_grad_()

        def layer(y):
            return FUNCTIONS[function](y, y, y, causal=True, group=group) * y

        again = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        return [torch.autograd.grad(out.sum(), x)[0] for out in (layer(x), again)]

    for plain, found in InProcessRing(2).run(work):
        assert torch.equal(found, plain)


TRANSFORMS = {
    "vmap": lambda f, x: torch.vmap(f)(x[None]),
    "grad": lambda f, x: torch.func.grad(lambda y: f(y).sum())(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # forward mode uses it
@pytest.mark.parametrize("argument", ["value", "sinks"])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_transforms_are_refused(function, transform, argument):
    given = {name: torch.tensor(normal(2, 3, 4)) for name in BY_ROWS} | {"sinks": ones(2)}

    def work(group):
        def attend(x):
            return FUNCTIONS[function](**given | {argument: x}, group=group)

        TRANSFORMS[transform](attend, given[argument])

    for error in errors_of(2, work):
        assert type(error) is TypeError
        name = FUNCTIONS[function].__name__
        assert str(error).startswith(f"{name} must be given plain tensors, got {argument} inside ")


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("function", FUNCTIONS)
def test_tangents_are_refused(function):
    x = torch.tensor(normal(2, 3, 4))
    with forward_ad.dual_level():
        moving = forward_ad.make_dual(x, x)
        for error in errors_of(2, lambda group: FUNCTIONS[function](x, moving, x, group=group)):
            assert type(error) is TypeError
            assert "must be given plain tensors, got key inside of a transform" in str(error)


@pytest.mark.parametrize("by_func", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradients_in_a_batch_are_refused(function, by_func):
    def work(group):
        x = torch.tensor(normal(2, 3, 4)).requires_grad_()
        out = FUNCTIONS[function](x, x, x, group=group)
        if by_func:
            torch.vmap(lambda g: torch.autograd.grad(out, x, g)[0])(out.detach()[None])
        else:
            torch.autograd.grad(out, x, out.detach()[None], is_grads_batched=True)

    for error in errors_of(2, work):
        assert str(error).startswith("gradients of attention over several ranks must be computed")
