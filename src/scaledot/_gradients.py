"""Gradients of `attention` as functions: for arrays whose library does not differentiate."""

from __future__ import annotations

import sys
from typing import Any, cast

import numpy as np

from scaledot import _arrays, _passes
from scaledot._derivatives import Grads
from scaledot._errors import type_error, value_error
from scaledot._spec import Options
from scaledot._typing import Array, ArrayT, Impl, MaskMod, Offsets, ScoreMod


class Pullback:
    """From the gradient of attention's result to those of its arguments.

    Attributes
    ----------
    lse : array, shape (..., num_heads, len_q)
        Log-sum-exp of the forward pass, sinks included, in the accumulation dtype.
    """

    def __init__(self, arrays: tuple[Array, Array, Array], options: Options) -> None:
        self._arrays, self._options = arrays, options
        query, key, value = _on_host(arrays)
        # Own copies: what the caller does to the result must not change its gradient.
        state = _passes.forward(query, key, value, _options_on_host(options))
        self._state = state
        self.out, self.lse = (_back(_copy(x), arrays[0]) for x in state)

    def __call__(self, grad_out: Array, grad_lse: Array | None = None) -> Grads:
        """Gradients of all arguments, given those of ``out`` and, if it counts, of ``lse``.

        Parameters
        ----------
        grad_out : array, shape (..., num_heads, len_q, d_v)
            Gradient of the loss by ``out``, of any floating-point dtype.
        grad_lse : array, shape (..., num_heads, len_q), optional
            Gradient of the loss by ``lse``.
        """
        out, lse = self._state
        check_like("grad_out", grad_out, self._arrays[0], out.shape)
        if grad_lse is not None:
            check_like("grad_lse", grad_lse, self._arrays[0], lse.shape)
        query, key, value, grad_out, grad_lse = _on_host((*self._arrays, grad_out, grad_lse))
        grads = _passes.backward(
            query, key, value, _options_on_host(self._options), out, lse, grad_out, grad_lse,
            wanted=Grads._fields,
        )
        return Grads(*(_back(x, self._arrays[0]) for x in grads))


def attention_vjp(
    query: ArrayT,
    key: ArrayT,
    value: ArrayT,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    mask: Array | None = None,
    bias: Array | None = None,
    segment_ids: Array | tuple[Array, Array] | None = None,
    kv_len: Offsets | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    block_mask: Array | None = None,
    dropout: float = 0.0,
    seed: int | Array | None = None,
    q_offset: Offsets | None = None,
    kv_offset: Offsets = 0,
    impl: Impl = "auto",
) -> tuple[ArrayT, Pullback]:
    r"""Attention, and the function that takes gradients back through it.

    With weights ``P`` and ``delta = rowsum(dO∘O) - dlse``: ``dV = Pᵀ dO``,
    ``dS = P∘(dO Vᵀ - delta)``, ``dQ = dS K / √d_k``, ``dK = dSᵀ Q / √d_k``.

    Parameters
    ----------
    query, key, value : array
        As in `attention`; they are not copied, and must not change before the pullback is called.
    causal, window, mask, bias, segment_ids, kv_len, scale, softcap, alibi_slopes, sinks : optional
        As in `attention`.
    score_mod : pair of callables (f, df), optional
        The function as in `attention`, and its derivative by the score, with the same arguments.
    mask_mod, block_mask, dropout, seed, q_offset, kv_offset, impl : optional
        As in `attention`.

    Returns
    -------
    out : array, shape (..., num_heads, len_q, d_v)
        As `attention` returns it.
    pullback : callable
        ``pullback(grad_out, grad_lse=None) -> Grads(query, key, value, bias, sinks,
        alibi_slopes)``, each with its argument's shape and dtype, None where there is no such
        argument. It may be called any number of times. ``pullback.lse`` is the log-sum-exp.

    Raises
    ------
    TypeError, ValueError
        As in `attention`; a ``score_mod`` without its derivative.

    Notes
    -----
    Weights are computed anew from ``lse``, tile by tile: memory is linear in the lengths, and the
    gradient of a bias that is broadcast is summed without the full one. Sums are held in float32
    (float64 for float64) and rounded once. A row that sees no key has the gradient 0, and what is
    excluded reaches no gradient, whatever it holds. Bitwise the same for any number of threads.

    References
    ----------
    arXiv 2205.14135 (appendix B), arXiv 2307.08691 (algorithm 2).

    Examples
    --------
    >>> import numpy as np, scaledot as sd
    >>> query, key, value = np.random.default_rng(0).standard_normal((3, 6, 4))
    >>> out, pullback = sd.attention_vjp(query, key, value, causal=True)
    >>> grads = pullback(np.ones_like(out))
    >>> grads.query.shape, grads.bias is None
    ((6, 4), True)
    """
    options = Options(
        causal, window, mask, bias, segment_ids, kv_len, scale, softcap, alibi_slopes, sinks,
        score_mod, mask_mod, block_mask, dropout, seed, q_offset, kv_offset, impl,
    )  # fmt: skip
    arrays = (query, key, value)
    _check_concrete(*arrays, *options)
    _passes.check(*arrays, options)
    pullback = Pullback(arrays, options)
    return cast(ArrayT, pullback.out), pullback


def attention_jvp(
    primals: tuple[ArrayT, ArrayT, ArrayT],
    tangents: tuple[Array | None, Array | None, Array | None],
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    mask: Array | None = None,
    bias: Array | None = None,
    segment_ids: Array | tuple[Array, Array] | None = None,
    kv_len: Offsets | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    block_mask: Array | None = None,
    dropout: float = 0.0,
    seed: int | Array | None = None,
    q_offset: Offsets | None = None,
    kv_offset: Offsets = 0,
    impl: Impl = "auto",
) -> tuple[ArrayT, ArrayT]:
    """Attention, and how it changes when query, key and value move along tangents.

    With weights ``P``: ``dS = (dQ Kᵀ + Q dKᵀ) / √d_k`` and
    ``dO = P dV + (P∘dS) V - rowsum(P∘dS) O``.

    Parameters
    ----------
    primals : tuple (query, key, value)
        As in `attention`.
    tangents : tuple (dq, dk, dv)
        Of the same shapes; None stands for zeros.
    causal, window, mask, bias, segment_ids, kv_len, scale, softcap, alibi_slopes, sinks : optional
        As in `attention`.
    score_mod, mask_mod, block_mask, dropout, seed, q_offset, kv_offset, impl : optional
        As in `attention_vjp`.

    Returns
    -------
    out, tangent : array, shape (..., num_heads, len_q, d_v)
        In the library and dtype of query.

    Raises
    ------
    TypeError, ValueError
        As in `attention_vjp`; tangents that do not have their primal's shape.

    Notes
    -----
    Two passes over the keys, memory linear in the lengths.

    References
    ----------
    arXiv 2205.14135.

    Examples
    --------
    >>> import numpy as np, scaledot as sd
    >>> query, key, value = np.random.default_rng(0).standard_normal((3, 6, 4))
    >>> out, tangent = sd.attention_jvp((query, key, value), (None, None, value))
    >>> np.allclose(out, tangent)  # linear in value
    True
    """
    options = Options(
        causal, window, mask, bias, segment_ids, kv_len, scale, softcap, alibi_slopes, sinks,
        score_mod, mask_mod, block_mask, dropout, seed, q_offset, kv_offset, impl,
    )  # fmt: skip
    for name, given in (("primals", primals), ("tangents", tangents)):
        if not isinstance(given, (tuple, list)) or len(given) != 3:
            raise type_error(
                f"{name} must be a tuple of three, for query, key and value", type(given).__name__,
                "Write attention_jvp((query, key, value), (dq, dk, dv)).",
            )
    query, key, value = primals
    _check_concrete(query, key, value, *options)
    _passes.check(query, key, value, options)
    for name, tangent, primal in zip(("dq", "dk", "dv"), tangents, primals, strict=True):
        if tangent is not None:
            check_like(name, tangent, query, cast(Any, primal).shape)
    query, key, value, *moves = _on_host((*primals, *tangents))
    here = _options_on_host(options)
    out, lse = _passes.forward(query, key, value, here)
    moved = _passes.tangent(query, key, value, here, out, lse, Grads(*moves))
    return _back(out, primals[0]), _back(moved.out, primals[0])


def check_like(name: str, x: Array, query: Array, shape: tuple[int, ...]) -> None:
    """Raise unless x is a plain array of this shape, of query's library."""
    _arrays.check_array(name, x)
    _arrays.check_same_place(query=query, **{name: x})
    _check_concrete(x)
    if not _arrays.is_float(x):
        raise type_error(
            f"{name} must have a floating-point dtype", _arrays.describe(x), "Use astype."
        )
    if tuple(x.shape) != tuple(shape):
        raise value_error(
            f"{name} must have the shape {tuple(shape)}", tuple(x.shape),
            "It is that of what it is a gradient or a tangent of.",
        )


def _check_concrete(*arrays: Any) -> None:
    """Raise for arrays that a library is tracing or differentiating itself."""
    for x in arrays:
        kind = _arrays.library(x)
        if (kind == "jax" and isinstance(x, sys.modules["jax"].core.Tracer)) or (
            kind == "torch" and x.requires_grad and sys.modules["torch"].is_grad_enabled()
        ):
            raise type_error(
                "attention_vjp and attention_jvp must be given plain arrays",
                f"one that {kind} differentiates or traces",
                "Differentiate scaledot.attention with the library's own functions.",
            )


def _copy(x: Any) -> Any:
    if _arrays.library(x) == "torch":
        return x.clone()
    return _arrays.namespace(x).asarray(x, copy=True)


def _on_host(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """JAX arrays as NumPy's; everything else as it is."""
    return tuple(np.asarray(x) if _arrays.library(x) == "jax" else x for x in arrays)


def _options_on_host(options: Options) -> Options:
    found = options._replace(**dict(zip(options._fields, _on_host(options), strict=True)))
    if isinstance(options.segment_ids, (tuple, list)):
        found = found._replace(segment_ids=_on_host(tuple(options.segment_ids)))
    return found


def _back(x: Any, query: Array) -> Any:
    """A result in the library of query, in its place."""
    if x is None or _arrays.library(query) != "jax":
        return x
    return sys.modules["jax"].device_put(x, next(iter(cast(Any, query).devices())))
