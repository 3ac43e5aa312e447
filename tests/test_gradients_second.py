"""Second derivatives of plain arrays against those that PyTorch takes of the textbook."""

import math

import numpy as np
import pytest

import cases
import test_tiles
from compare import EPS, assert_close
from scaledot import _passes
from scaledot._derivatives import Grads
from scaledot._spec import Options
from test_gradients import kept_of, positions

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.heavy

NAMES = Grads._fields
TILES = {"len_q": 130, "len_kv": 200, "num_heads": 4, "num_kv_heads": 2, "lead": (2,)}
RANGES = {"len_q": 60, "len_kv": 2100, "d_k": 8, "d_v": 24}
DRAWN = np.random.default_rng(21)
CASES = {
    "plain": (TILES, {}),
    "causal, softcap": (TILES, {"causal": True, "softcap": 1.5}),
    "full bias, sinks": (TILES, {"bias": cases.normal(DRAWN, 2, 4, 130, 200),
                                 "sinks": np.array([0.5, -1, 2, 0], "f")}),
    "bias of keys, softcap": (TILES, {"bias": cases.normal(DRAWN, 4, 1, 200), "softcap": 2.0}),
    "ALiBi, window": (TILES, {"alibi_slopes": cases.slopes(4) / 8, "window": (90, 20)}),
    "dropout, mask": (TILES, {"dropout": 0.3, "seed": 4, "scale": -0.4,
                              "mask": DRAWN.random((130, 200)) < 0.8}),
    "everything": (TILES, {"causal": True, "softcap": 2.0, "dropout": 0.2, "seed": 1,
                           "alibi_slopes": cases.slopes(4) / 8, "bias": cases.normal(DRAWN, 130, 1),
                           "sinks": np.array([0, 1, -2, 0.5], "f")}),
    "several ranges": (RANGES, {}),
    "several ranges, causal": (RANGES, {"causal": True, "softcap": 1.0}),
    "several ranges, window": (RANGES, {"window": (1200, 100), "q_offset": 1900}),
}  # fmt: skip


def problem(name, dtype):
    size, options = CASES[name]
    options = {n: x.astype(dtype) if n in NAMES else x for n, x in options.items()}
    arguments = test_tiles.arrays(dtype, **size) | options
    rng = np.random.default_rng(22)
    shape = (*arguments["query"].shape[:-1], arguments["value"].shape[-1])
    grads = [cases.normal(rng, *s).astype(dtype) for s in (shape, shape[:-1])]
    moves = {n: cases.normal(rng, *arguments[n].shape).astype(dtype)
             for n in NAMES if arguments.get(n) is not None}  # fmt: skip
    return arguments, grads, Grads(**moves)


def textbook(leaves, seen, kept, distance, scale, softcap):
    """Out and lse by operations that PyTorch differentiates, all scores in memory."""
    query, key, value = (leaves[n] for n in ("query", "key", "value"))
    group = query.shape[-3] // key.shape[-3]
    key, value = (x.repeat_interleave(group, dim=-3) for x in (key, value))
    scores = query @ key.mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if "bias" in leaves:
        scores = scores + leaves["bias"]
    if "alibi_slopes" in leaves:
        scores = scores - leaves["alibi_slopes"][:, None, None] * distance
    scores = scores.masked_fill(~seen, -math.inf)
    terms = scores
    if "sinks" in leaves:
        sinks = leaves["sinks"][:, None, None].expand(*scores.shape[:-1], 1)
        terms = torch.cat([scores, sinks], dim=-1)
    lse = terms.logsumexp(dim=-1)
    return ((scores - lse[..., None]).exp() * kept) @ value, lse


def by_textbook(arguments, grads, moves, dtype):
    """What reaches the arguments, and the gradients of out and lse."""
    seen = test_tiles.visible(arguments)
    lead = seen.shape[:-3]
    q_pos, kv_pos = positions(arguments, lead)
    scale = arguments.get("scale", 1 / math.sqrt(arguments["query"].shape[-1]))
    shape = (*arguments["query"].shape[:-1], arguments["value"].shape[-1])
    distance, kept = (torch.tensor(np.asarray(x, dtype))
                      for x in (np.abs(q_pos - kv_pos), kept_of(arguments, seen.shape)))
    leaves = {n: torch.tensor(arguments[n].astype(dtype), requires_grad=True)
              for n, x in moves._asdict().items() if x is not None}  # fmt: skip
    grads = [torch.tensor(g.astype(dtype), requires_grad=True) for g in grads]
    given = [torch.tensor(x.astype(dtype)) for x in moves if x is not None]
    out, lse = textbook(leaves, torch.tensor(seen), kept, distance, scale,
                        arguments.get("softcap"))
    results = out.reshape(shape), lse.reshape(shape[:-1])
    first = torch.autograd.grad(results, leaves.values(), grads, create_graph=True)
    second = torch.autograd.grad(first, [*leaves.values(), *grads], given)
    return dict(zip([*leaves, "grad_out", "grad_lse"], (x.numpy() for x in second), strict=True))


def by_library(arguments, grads, moves, impl):
    rest = dict(arguments)
    query, key, value = (rest.pop(n) for n in ("query", "key", "value"))
    options = Options(**rest, impl=impl)
    out, lse = _passes.forward(query, key, value, options)
    found = _passes.second(query, key, value, options, out, lse, *grads, moves)
    return {n: x for n, x in found.grads._asdict().items() if x is not None} | {
        "grad_out": found.grad_out, "grad_lse": found.grad_lse
    }  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", CASES)
def test_second_derivatives(name, dtype, impl):
    arguments, grads, moves = problem(name, dtype)
    truth = by_textbook(arguments, grads, moves, np.float64)
    near = by_textbook(arguments, grads, moves, np.dtype(dtype).type)
    found = by_library(arguments, grads, moves, impl)
    assert found.keys() == truth.keys()
    len_kv = arguments["key"].shape[-2]
    for which, got in found.items():
        assert got.shape == truth[which].shape, which
        assert np.any(got), which
        # Two roundings of each term, and a truth that is rounded itself where all is float64.
        eps = EPS[dtype] * (8 if dtype == "float64" else 1)
        assert_close(got, truth[which], near[which], eps=eps, len_kv=len_kv, factor=3.0)


@pytest.mark.parametrize("name", ["full bias, sinks", "everything"])
def test_second_derivatives_are_linear_in_each_move(name, impl):
    """One that is not given is 0."""
    arguments, grads, moves = problem(name, "float64")
    whole = by_library(arguments, grads, moves, impl)
    parts = [by_library(arguments, grads, Grads(**{n: x}), impl)
             for n, x in moves._asdict().items() if x is not None]  # fmt: skip
    for which, got in whole.items():
        total = np.sum([part[which] for part in parts], axis=0)
        assert_close(got, total, eps=8 * EPS["float64"], len_kv=200)


def test_empty_rows_have_no_second_derivatives(impl):
    arguments, grads, moves = problem("plain", "float64")
    arguments["mask"] = (np.arange(130) % 3 > 0)[:, None]
    found = by_library(arguments, grads, moves, impl)
    for name in ("query", "grad_out", "grad_lse"):
        assert not found[name][:, :, ::3].any()
        assert found[name].any()
    grads[0][:, :, ::3] = 1e30
    again = by_library(arguments, grads, moves, impl)
    assert all(again[name].tobytes() == x.tobytes() for name, x in found.items())
