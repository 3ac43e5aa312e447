r"""Derivative rules of JAX: attention as primitives that NumPy computes, in linear memory.

Write f for attention, x for its arguments that have gradients, w for a cotangent of its results
and H for the derivative of ``Df(x)ᵀ w`` by x, which is symmetric. Each primitive is linear in the
operands whose names start as its second column says; the last one turns it around.

========== =================== ==================== =========
primitive  computes            linear in            transpose
========== =================== ==================== =========
attend     f(x)
tangent    Df(x) t             tangent\_
backward   Df(x)ᵀ w            grad\_                tangent
turn       H t + Df(x)ᵀ dw     tangent\_             second
second     (H t, Df(x) t)      tangent\_             turn
curve      D²f(x)(t, s)        tangent\_ , along\_    second
========== =================== ==================== =========

``out`` and ``lse`` are operands of all but the first; they are functions of x, and what changes
with them is counted with x.

Values come from `_passes` through a callback that hands over NumPy views of JAX's memory and
touches no JAX: one that does waits for the threads it runs on. Only ``curve``, which nothing but
forward over forward mode evaluates, is made of JAX's operations.

This module imports JAX: `_attention` loads it when it meets a JAX array.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from scaledot import _arrays, _choice, _passes, _reference
from scaledot._derivatives import Grads
from scaledot._errors import value_error
from scaledot._spec import Options, Problem, resolve
from scaledot._state import State, merged
from scaledot._typing import Array

Named = dict[str, Any]
"""Operands by their names, in order."""

ARGUMENTS = Grads._fields
PER_HEAD = ("sinks", "alibi_slopes")
COTANGENTS = ("grad_out", "grad_lse")


class Call(NamedTuple):
    """What of a call is known while JAX is tracing, hashable; the arrays are operands."""

    causal: bool
    window: tuple[int | None, int | None]
    scale: float
    softcap: float | None
    dropout: float
    impl: str
    kv_len: int | None
    q_offset: int | None
    kv_offset: int | None
    wide: bool


class Form(NamedTuple):
    """The static parameter of the primitives: a call, the names of operands and of results.

    Only backward, turn and second have results to choose from; the others return out and lse.
    """

    call: Call
    names: tuple[str, ...]
    wanted: tuple[str, ...] = ()


def applies(query: Array, options: Options, *others: Array) -> bool:
    """Whether a call is one of this module: something is traced, on a CPU, by the kernels.

    ``others`` are key and value. Functions given as options are differentiated by JAX itself.
    """
    if options.impl not in ("auto", "kernels"):
        return False
    if options.score_mod is not None or options.mask_mod is not None:
        return False
    pair = options.segment_ids if isinstance(options.segment_ids, (tuple, list)) else ()
    given = (query, *others, *options, *pair)
    traced = any(isinstance(x, jax.core.Tracer) for x in given)
    return traced and jax.default_backend() == "cpu"


def attention(
    query: Array, key: Array, value: Array, options: Options, slices: bool, wide: bool
) -> State:
    """Attention as a primitive: out, in the accumulation dtype if ``wide``, and lse with sinks."""
    problem = resolve(query, key, value, options, slices=slices)
    call, operands = _in_parts(problem, options, wide)
    out, lse = _bind("attend", operands, call)
    return State(out[0], lse[0]) if problem.spec.matrix else State(out, lse)


def _in_parts(problem: Problem, options: Options, wide: bool) -> tuple[Call, Named]:
    """The static part of a call, and its arrays, of which all have the same leading axes."""
    spec, terms, places = problem.spec, problem.terms, problem.places
    numbers: dict[str, int | None] = {}
    arrays: Named = {}
    for name in ("kv_len", "q_offset", "kv_offset"):
        given = getattr(options, name)
        if _arrays.library(given) is None:
            numbers[name] = None if given is None else int(given)
        else:
            numbers[name] = None
            arrays[name] = _of_lead(_arrays.like(problem.query, getattr(places, name)))
    call = Call(
        bool(options.causal), (spec.left, spec.right), spec.scale, spec.softcap, spec.dropout,
        spec.impl, numbers["kv_len"], numbers["q_offset"], numbers["kv_offset"], wide,
    )  # fmt: skip
    pairs = {"mask": terms.mask, "bias": terms.bias, "block_mask": problem.block_mask}
    sides = {"q_segment": terms.q_segment, "kv_segment": terms.kv_segment}
    seeds = {"seed_low": terms.seed_low, "seed_high": terms.seed_high}
    heads = {"sinks": problem.sinks, "alibi_slopes": terms.slopes}
    arrays |= {n: x for n, x in pairs.items() if x is not None}
    arrays |= {n: _of_lead(x, math.prod(x.shape[-3:])) for n, x in sides.items() if x is not None}
    arrays |= {n: _of_lead(x) for n, x in seeds.items() if x is not None}
    arrays |= {n: x.reshape(spec.num_heads) for n, x in heads.items() if x is not None}
    operands = {"query": problem.query, "key": problem.key, "value": problem.value} | arrays
    return call, operands


def _of_lead(x: Array, *length: int) -> Array:
    """Cut an array in normal form down to the leading axes and, perhaps, one of positions."""
    return x.reshape((*x.shape[:-3], *length))


def _bind(kind: str, operands: Named, call: Call, wanted: Sequence[str] = ()) -> list[Any]:
    """Results of a primitive for operands by their names."""
    given = list(operands.values())
    axes = frozenset().union(*(_manual_axes(jax.typeof(x)) for x in given))
    if axes:  # inside shard_map: all must say that they differ from device to device
        missing = [tuple(axes - _manual_axes(jax.typeof(x))) for x in given]
        given = [jax.lax.pcast(x, more, to="varying") if more else x
                 for x, more in zip(given, missing, strict=True)]  # fmt: skip
    form = Form(call, tuple(operands), tuple(wanted))
    return list(PRIMITIVES[kind].bind(*given, form=form))


def _manual_axes(kind: Any) -> frozenset[Any]:
    """Axes of a mesh over which an array differs inside `shard_map`, by its type."""
    kind = getattr(kind, "manual_axis_type", kind)
    return getattr(kind, "varying", None) or getattr(kind, "vma", None) or frozenset()


# Values, in NumPy.


def _results(kind: str, given: Named, form: Form) -> list[tuple[Any, Any]]:
    """Shapes and dtypes of what a primitive returns; of operands only these two are looked at."""
    if kind in ("backward", "turn", "second"):
        sources = [given[{"grad_out": "out", "grad_lse": "lse"}.get(n, n)] for n in form.wanted]
        return [(tuple(x.shape), x.dtype) for x in sources]
    if kind != "attend":
        return [(tuple(given[n].shape), given[n].dtype) for n in ("out", "lse")]
    query, key, value = (given[n] for n in ("query", "key", "value"))
    lead = np.broadcast_shapes(*(x.shape[:-3] for x in (query, key, value)))
    rows = (*lead, *query.shape[-3:-1])
    sums = np.dtype(np.float64 if query.dtype == np.float64 else np.float32)
    return [((*rows, value.shape[-1]), sums if form.call.wide else query.dtype), (rows, sums)]


def _values(kind: str, *operands: Any, form: Form) -> list[Any]:
    """Results of a primitive as NumPy arrays.

    Numbers per head that differ along a mapped axis are taken one after the other: they have
    the shape (mapped axes, num_heads), and those axes lead in everything else.
    """
    given = {name: np.asarray(x) for name, x in zip(form.names, operands, strict=True)}
    results = _results(kind, given, form)
    per_head = [x for name, x in given.items() if name.endswith(PER_HEAD)]
    loops = np.broadcast_shapes((), *(x.shape[:-1] for x in per_head))
    if all(n == 1 for n in loops):
        found = _once(kind, given, form)
        return [np.asarray(x, dtype=dtype).reshape(shape)
                for x, (shape, dtype) in zip(found, results, strict=True)]  # fmt: skip
    sums = [np.zeros(shape, np.result_type(dtype, np.float32)) for shape, dtype in results]
    for index in np.ndindex(loops):
        part = {name: x[_at(index, x)] for name, x in given.items()}
        for total, x in zip(sums, _once(kind, part, form), strict=True):
            region = total[_at(index, total)]
            region += np.asarray(x).reshape(region.shape)
    return [x.astype(dtype, copy=False) for x, (_, dtype) in zip(sums, results, strict=True)]


def _at(index: tuple[int, ...], x: Any) -> tuple[slice, ...]:
    """The place of an array at an index of its first axes, which are kept."""
    pairs = zip(index, x.shape, strict=False)
    return tuple(slice(None) if length == 1 else slice(i, i + 1) for i, length in pairs)


def _once(kind: str, given: Named, form: Form) -> Sequence[Any]:
    """Results of a primitive by one pass, two for ``turn``."""
    given = {n: x.reshape(-1) if n.endswith(PER_HEAD) else x for n, x in given.items()}
    options = _options(form.call, given)
    if "seed_low" in given:
        options = options._replace(seed=_seed(given["seed_low"], given["seed_high"]))
    arrays = (given["query"], given["key"], given["value"])
    if kind == "attend":
        return _passes.forward(*arrays, options, wide=form.call.wide)
    state = (given["out"], given["lse"])
    tangents = Grads(*(given.get(f"tangent_{name}") for name in ARGUMENTS))
    if kind == "tangent":
        return _passes.tangent(*arrays, options, *state, tangents)
    among = [name for name in form.wanted if name in ARGUMENTS]
    found: Named = {}
    if kind in ("turn", "second"):
        pair = _cotangents(given)
        second = _passes.second(*arrays, options, *state, *pair, tangents, wanted=among)
        found = second.grads._asdict() | {"grad_out": second.grad_out, "grad_lse": second.grad_lse}
    prefix = "tangent_" if kind == "turn" else ""
    if kind != "second" and any(prefix + name in given for name in COTANGENTS):
        pair = _cotangents(given, prefix)
        grads = _passes.backward(*arrays, options, *state, *pair, wanted=among)._asdict()
        found = {n: found[n] + grads[n] if found else grads[n] for n in among}
    return [found[name] for name in form.wanted]


def _cotangents(given: Named, prefix: str = "") -> tuple[Any, Any]:
    """Cotangents of out, zeros where there is none, and of lse."""
    of_out, of_lse = (given.get(prefix + name) for name in COTANGENTS)
    return np.zeros_like(given["out"]) if of_out is None else of_out, of_lse


def _options(call: Call, given: Named) -> Options:
    """The options of a call but for its seed, of which only the halves are known."""
    options = Options(**{n: x for n, x in call._asdict().items() if n != "wide"}, seed=0)
    if "q_segment" in given:
        options = options._replace(segment_ids=(given["q_segment"], given["kv_segment"]))
    return options._replace(**{n: x for n, x in given.items() if n in Options._fields})


def _seed(low: Any, high: Any) -> Any:
    """Put the halves of a seed together; for JAX without 64-bit integers as NumPy has them."""
    low, high = (np.asarray(x).astype(np.uint32).astype(np.uint64) for x in (low, high))
    return high << np.uint64(32) | low


def _curve(*operands: Any, form: Form) -> Sequence[Any]:
    """Second derivative along two directions, by JAX from the tiles of `_blockwise`."""
    given = dict(zip(form.names, operands, strict=True))

    def function(x: Named) -> State:
        arrays = given | x
        heads = {name: arrays.pop(name)[..., None, None] for name in PER_HEAD if name in arrays}
        options = _options(form.call, arrays)._replace(impl="blockwise")
        problem = resolve(arrays["query"], arrays["key"], arrays["value"], options)
        terms = {n: x[..., None, None, None] for n, x in arrays.items() if n.startswith("seed_")}
        if (slopes := heads.get("alibi_slopes")) is not None:
            terms["slopes"] = _level(slopes, problem.spec.rank)
        problem = replace(problem, terms=replace(problem.terms, **terms))
        state = _choice.run(problem)
        if (sinks := heads.get("sinks")) is not None:
            problem = replace(problem, sinks=_level(sinks, problem.spec.rank))
            xp = _arrays.namespace(problem.query)
            state = merged(xp, state, _reference.keyless(xp, problem))
        return State(state.out.astype(given["out"].dtype), state.lse)

    def along(prefix: str) -> Named:
        return {n: given.get(prefix + n, jax.numpy.zeros_like(a)) for n, a in x.items()}

    def tangent(x: Named) -> Any:
        return jax.jvp(function, (x,), (along("tangent_"),))[1]

    x = {name: given[name] for name in ARGUMENTS if name in given}
    found = jax.jvp(tangent, (x,), (along("along_"),))[1]
    return [x.astype(given[n].dtype) for n, x in zip(("out", "lse"), found, strict=True)]


def _level(x: Array, rank: int) -> Array:
    """Insert axes between the mapped ones and the heads until there are ``rank`` of them."""
    return x.reshape((*x.shape[:-3], *(1,) * (rank - x.ndim), *x.shape[-3:]))


def _evaluate(kind: str, *operands: Any, **static: Any) -> list[Any]:
    """Results of a primitive for arrays that hold values, where the first of these lies."""
    first = next((x for x in operands if isinstance(x, jax.Array)), None)
    alone = first is not None and first.committed and len(first.devices()) == 1
    device = next(iter(first.devices())) if alone else None  # type: ignore[union-attr]
    return list(jax.device_put(_values(kind, *operands, **static), device))


# Rules. A dict of operands says which of them move, and how.


def _moving(
    names: Sequence[str], primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[Named, Named]:
    """Operands, and the tangents of those that have any; integers and booleans have none."""
    moved = {
        name: t for name, t in zip(names, tangents, strict=True)
        if not isinstance(t, ad.Zero) and t.dtype != jax.dtypes.float0
    }  # fmt: skip
    return dict(zip(names, primals, strict=True)), moved


def _renamed(moved: Named, old: str, new: str, among: Sequence[str]) -> Named:
    """Operands named ``old`` and one of ``among``, with ``new`` in place of ``old``."""
    return {new + name: moved[old + name] for name in among if old + name in moved}


def _without(given: Named, *prefixes: str) -> Named:
    return {name: x for name, x in given.items() if not name.startswith(prefixes)}


def _total(parts: list[list[Any]], results: list[Any]) -> list[Any]:
    """Sum of tangents, which are symbolic zeros where there are no parts."""
    if not parts:
        return [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in results]
    return [functools.reduce(lambda a, b: a + b, same) for same in zip(*parts, strict=True)]


def _attend_jvp(primals: Any, tangents: Any, *, form: Form) -> Any:
    given, moved = _moving(form.names, primals, tangents)
    out, lse = _bind("attend", given, form.call)
    moved = _renamed(moved, "", "tangent_", ARGUMENTS)
    parts = []
    if moved:
        parts.append(_bind("tangent", given | {"out": out, "lse": lse} | moved, form.call))
    return [out, lse], _total(parts, [out, lse])


def _tangent_jvp(primals: Any, tangents: Any, *, form: Form) -> Any:
    given, moved = _moving(form.names, primals, tangents)
    results = _bind("tangent", given, form.call)
    parts = _along("tangent", given, moved, ("tangent_",), form)
    other = _renamed(moved, "", "along_", ARGUMENTS)
    if other:
        parts.append(_bind("curve", given | other, form.call))
    return results, _total(parts, results)


def _backward_jvp(primals: Any, tangents: Any, *, form: Form) -> Any:
    given, moved = _moving(form.names, primals, tangents)
    results = _bind("backward", given, form.call, form.wanted)
    if any(name in moved for name in ARGUMENTS):
        directions = _renamed(moved, "", "tangent_", (*ARGUMENTS, *COTANGENTS))
        parts = [_bind("turn", given | directions, form.call, form.wanted)]
    else:
        parts = _along("backward", given, moved, ("grad_",), form)
    return results, _total(parts, results)


def _last_jvp(
    kind: str, prefixes: tuple[str, ...], primals: Any, tangents: Any, *, form: Form
) -> Any:
    """Of a second derivative only what it is linear in can move."""
    given, moved = _moving(form.names, primals, tangents)
    if any(name in moved for name in (*ARGUMENTS, *COTANGENTS)):
        raise value_error(
            "derivatives of attention under JAX must be of first or second order",
            "a third derivative", "Pass impl='blockwise', which JAX differentiates to any order.",
        )  # fmt: skip
    results = _bind(kind, given, form.call, form.wanted)
    return results, _total(_along(kind, given, moved, prefixes, form), results)


def _along(
    kind: str, given: Named, moved: Named, prefixes: tuple[str, ...], form: Form
) -> list[list[Any]]:
    """Values of a primitive at the tangents of what it is linear in, one for each prefix."""
    parts = []
    for prefix in prefixes:
        directions = {name: t for name, t in moved.items() if name.startswith(prefix)}
        if directions:
            operands = _without(given, prefix) | directions
            parts.append(_bind(kind, operands, form.call, form.wanted))
    return parts


def _transpose(kind: str, cotangents: Sequence[Any], *operands: Any, form: Form) -> list[Any]:
    """Cotangents of what a primitive is linear in; None for its other operands."""
    given = dict(zip(form.names, operands, strict=True))
    sought = {n: x.aval for n, x in given.items() if isinstance(x, ad.UndefinedPrimal)}
    pairs = zip(form.wanted or COTANGENTS, cotangents, strict=True)
    back = {name: ct for name, ct in pairs if not isinstance(ct, ad.Zero)}
    if not back:
        return [ad.Zero(sought[n]) if n in sought else None for n in form.names]
    given = {n: x for n, x in given.items() if n not in sought}
    plain = [n.removeprefix("tangent_").removeprefix("along_") for n in sought]
    found = dict(zip(sought, _turned(kind, given, back, plain, form.call), strict=True))
    return [found.get(name) for name in form.names]


def _turned(kind: str, given: Named, back: Named, plain: list[str], call: Call) -> list[Any]:
    """Results of the transpose of a primitive for the cotangents ``back``."""
    if kind == "curve":  # whichever of the two directions is known
        known = _renamed(given, "tangent_", "tangent_", ARGUMENTS)
        known |= _renamed(given, "along_", "tangent_", ARGUMENTS)
        return _bind("second", _without(given, "tangent_", "along_") | known | back, call, plain)
    given = _without(given, "tangent_")
    if kind == "tangent":
        return _bind("backward", given | back, call, plain)
    directions = _renamed(back, "", "tangent_", (*ARGUMENTS, *COTANGENTS))
    if kind == "backward":
        found = _bind("tangent", _without(given, "grad_") | directions, call)
        return [found[COTANGENTS.index(name)] for name in plain]
    if kind == "turn":
        return _bind("second", given | directions, call, plain)
    if not any(name in back for name in ARGUMENTS):
        return _bind("backward", _without(given, "grad_") | back, call, plain)
    return _bind("turn", given | directions, call, plain)


def _batch(
    kind: str, operands: Sequence[Any], axes: Sequence[int | None], *, form: Form
) -> tuple[list[Any], list[int]]:
    """Make the mapped axis the first of the leading ones, of length 1 where it is not mapped.

    What is wanted for each entry must be given for each; a mapped option alone needs a query
    that has the axis, for options do not enlarge the result.
    """
    numpy = jax.numpy
    given = list(zip(form.names, operands, axes, strict=True))
    size = next(x.shape[axis] for _, x, axis in given if axis is not None)
    full = {name for name, _, axis in given if axis is not None}
    full |= {name for name in form.names if name.endswith(("out", "lse"))} | {*form.wanted}
    if kind != "attend" or full.isdisjoint(("query", "key", "value")):
        full.add("query")
    for name in ARGUMENTS:
        alike = {name, f"tangent_{name}", f"along_{name}"}
        if not full.isdisjoint(alike):
            full |= alike
    moved = {}
    for name, x, axis in given:
        if axis is not None:
            moved[name] = numpy.moveaxis(x, axis, 0)
        else:
            moved[name] = numpy.broadcast_to(x, (size if name in full else 1, *x.shape))
    results = _bind(kind, moved, form.call, form.wanted)
    return results, [0] * len(results)


def _abstract(kind: str, *operands: Any, form: Form) -> list[Any]:
    results = _results(kind, dict(zip(form.names, operands, strict=True)), form)
    model = next((x for x in operands if _manual_axes(x)), None)
    if model is None:
        return [jax.core.ShapedArray(shape, dtype) for shape, dtype in results]
    spec: Any = jax.sharding.PartitionSpec
    mesh = model.sharding.mesh
    whole = [jax.sharding.NamedSharding(mesh, spec(*(None,) * len(shape))) for shape, _ in results]
    return [
        model.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)
        for (shape, dtype), sharding in zip(results, whole, strict=True)
    ]


def _lower(kind: str, context: Any, *operands: Any, form: Form) -> Any:
    # Not `jax.pure_callback`: it makes JAX arrays of the operands on the thread that they need.
    results, _, _ = mlir.emit_python_callback(
        context, functools.partial(_values, kind, form=form), None, list(operands),
        context.avals_in, context.avals_out, has_side_effect=False, returns_token=False,
    )  # fmt: skip
    return results


def _primitive(kind: str, jvp: Any) -> Any:
    """Register a primitive with its rules."""
    primitive: Any = Primitive(f"scaledot_{kind}")
    primitive.multiple_results = True
    primitive.def_abstract_eval(functools.partial(_abstract, kind))
    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = functools.partial(_transpose, kind)
    batching.primitive_batchers[primitive] = functools.partial(_batch, kind)
    if kind == "curve":
        primitive.def_impl(jax.jit(_curve, static_argnames="form"))
        mlir.register_lowering(primitive, mlir.lower_fun(_curve, multiple_results=True))
    else:
        primitive.def_impl(functools.partial(_evaluate, kind))
        mlir.register_lowering(primitive, functools.partial(_lower, kind))
    return primitive


JVPS = {
    "attend": _attend_jvp,
    "tangent": _tangent_jvp,
    "backward": _backward_jvp,
    "turn": functools.partial(_last_jvp, "turn", ("tangent_",)),
    "second": functools.partial(_last_jvp, "second", ("tangent_",)),
    "curve": functools.partial(_last_jvp, "curve", ("tangent_", "along_")),
}
PRIMITIVES = {kind: _primitive(kind, jvp) for kind, jvp in JVPS.items()}
