"""What is kept of a layer and of a whole model, and how it is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from scaledot import Stats, _arrays, _checks, attention_stats, attention_weights
from scaledot._errors import type_error, value_error
from scaledot._typing import Array, Impl, MaskMod, Offsets, ScoreMod
from scaledot.introspect._layer_checks import check_layer
from scaledot.introspect._mods import for_numpy
from scaledot.introspect._rows import indices
from scaledot.introspect._tokens import as_tokens

Floats = npt.NDArray[Any]

DEFAULTS: dict[str, Any] = {
    "causal": False, "window": None, "mask": None, "bias": None, "segment_ids": None,
    "kv_len": None, "scale": None, "softcap": None, "alibi_slopes": None, "sinks": None,
    "score_mod": None, "mask_mod": None, "block_mask": None, "q_offset": None, "kv_offset": 0,
}  # fmt: skip
"""Options that shape the weights, with what they are when they are not given."""

_OPTION_AXES = {
    "mask": 3, "bias": 3, "block_mask": 3, "segment_ids": 1, "kv_len": 0, "q_offset": 0,
    "kv_offset": 0,
}  # fmt: skip
"""Axes that an option has at most for one sequence."""

_PER_HEAD = ("alibi_slopes", "sinks")


@dataclass(frozen=True, eq=False)
class Layer:
    """Attention of one layer on one sequence.

    Attributes
    ----------
    name : str
        How the layer is called.
    stats : Stats
        What `scaledot.attention_stats` found, in NumPy arrays with an axis of heads.
    query : array, shape (num_heads, len_q, d_k), or None
        NumPy; None where only the statistics were kept.
    key : array, shape (num_kv_heads, len_kv, d_k), or None
        NumPy; None where only the statistics were kept.
    options : mapping
        The options of `scaledot.attention_weights` that are not at their default, arrays among
        them in NumPy, without leading axes. A function of the user that was given beside arrays
        of another library is one for NumPy arrays here.

    Raises
    ------
    TypeError, ValueError
        Arrays that are not NumPy's, or whose shapes do not fit together.
    """

    name: str
    stats: Stats
    query: Floats | None = None
    key: Floats | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check that these are NumPy arrays of one sequence that fit together."""
        check_layer(self.stats, self.query, self.key, self.options)

    def __repr__(self) -> str:
        """Name and sizes."""
        return (
            f"Layer({self.name!r}, num_heads={self.num_heads}, len_q={self.len_q}, "
            f"len_kv={self.len_kv})"
        )

    @property
    def num_heads(self) -> int:
        """Number of query heads."""
        return int(self.stats.lse.shape[0])

    @property
    def len_q(self) -> int:
        """Number of queries."""
        return int(self.stats.lse.shape[1])

    @property
    def len_kv(self) -> int:
        """Number of keys."""
        return int(self.stats.received.shape[1])

    @property
    def has_mods(self) -> bool:
        """Whether functions of the user shape the weights."""
        return "score_mod" in self.options or "mask_mod" in self.options

    def weights(self, rows: Any = None, heads: Any = None) -> Floats:
        """Attention weights of chosen queries and heads.

        Parameters
        ----------
        rows : 1-D integer array or sequence, optional
            Indices of the queries, as in `scaledot.attention_weights`. None is all of them, which
            is quadratic in the length by nature.
        heads : 1-D integer array or sequence, optional
            Indices of the heads; negative ones count from the end. None is all of them.

        Returns
        -------
        array, shape (len(heads), len(rows), len_kv)
            NumPy, in the accumulation dtype. Rows sum to 1, to less with learnt sinks, and to 0
            where no key is seen.

        Raises
        ------
        TypeError, ValueError
            The layer has no query and key, or indices are out of range.

        Notes
        -----
        A ``score_mod`` or ``mask_mod`` is called with arrays of the library that `look` was given.

        Examples
        --------
        >>> import numpy as np
        >>> from scaledot import introspect
        >>> layer = introspect.look(np.zeros((2, 4, 3)), np.zeros((2, 4, 3)), causal=True)
        >>> layer.weights(rows=[1], heads=[0])
        array([[[0.5, 0.5, 0. , 0. ]]])
        """
        query, key = kept(self)
        index = indices("heads", heads, self.num_heads)
        if np.array_equal(index, np.arange(self.num_heads)):
            return attention_weights(query, key, rows=rows, **self.options)
        if self.has_mods:  # they are told the head
            return attention_weights(query, key, rows=rows, **self.options)[index]
        options = dict(self.options)
        for name in (*_PER_HEAD, "mask", "bias", "block_mask"):
            x = options.get(name)
            if x is not None and x.ndim == (1 if name in _PER_HEAD else 3):
                options[name] = x if len(x) == 1 else x[index]
        group_size = self.num_heads // max(1, len(key))
        chosen = key[index // max(1, group_size)]
        return attention_weights(query[index], chosen, rows=rows, **options)


@dataclass(frozen=True, eq=False)
class Trace:
    """Attention of all layers of a model on one sequence.

    Attributes
    ----------
    layers : tuple of Layer
        From the first layer to the last; at least one.
    tokens : tuple of str, or None
        One for each query.
    key_tokens : tuple of str, or None
        One for each key; None where they are those of the queries.
    title : str
        What the trace is of.
    """

    layers: tuple[Layer, ...]
    tokens: tuple[str, ...] | None = None
    key_tokens: tuple[str, ...] | None = None
    title: str = ""

    def __post_init__(self) -> None:
        """Turn sequences into tuples, and check that tokens and lengths fit."""
        layers = tuple(self.layers)
        if not layers:
            raise value_error(
                "a trace must have at least one layer", "none", "Pass what scaledot.introspect."
                "look returns for each layer.",
            )
        for layer in layers:
            if not isinstance(layer, Layer):
                raise type_error(
                    "layers must be scaledot.introspect.Layer", type(layer).__name__,
                    "scaledot.introspect.look makes one.",
                )
        tokens = as_tokens("tokens", self.tokens)
        key_tokens = as_tokens("key_tokens", self.key_tokens)
        sides = (
            ("tokens", tokens, "len_q"),
            ("key_tokens" if key_tokens is not None else "tokens (key_tokens are not given)",
             tokens if key_tokens is None else key_tokens, "len_kv"),
        )  # fmt: skip
        for name, given, length in sides:
            for layer in layers if given is not None else ():
                if len(given or ()) != getattr(layer, length):
                    raise value_error(
                        f"{name} must have one string for each of the {length} = "
                        f"{getattr(layer, length)} places of layer {layer.name!r}",
                        len(given or ()), "tokens name the queries, key_tokens the keys.",
                    )
        for name, value in (("layers", layers), ("tokens", tokens), ("key_tokens", key_tokens)):
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        """Title, numbers of layers and tokens, and the first layer."""
        tokens = "no" if self.tokens is None else len(self.tokens)
        return (
            f"Trace({self.title!r}, {len(self.layers)} layers, {tokens} tokens, "
            f"first {self.layers[0]!r})"
        )


def kept(layer: Layer) -> tuple[Floats, Floats]:
    """Query and key of a layer, or the error that they were not kept."""
    if layer.query is None or layer.key is None:
        raise value_error(
            "weights need the layer's query and key", f"layer {layer.name!r}, which has none",
            "Keep them: pass query= and key= to Layer, as scaledot.introspect.look does.",
        )
    return layer.query, layer.key


def look(
    query: Array,
    key: Array,
    *,
    name: str = "attention",
    top_k: int = 8,
    last: int | None = None,
    map_shape: tuple[int, int] | None = None,
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
    q_offset: Offsets | None = None,
    kv_offset: Offsets = 0,
    impl: Impl = "auto",
) -> Layer:
    """Statistics of one layer's attention on one sequence, with what is needed to ask for more.

    Parameters
    ----------
    query : array, shape (num_heads, len_q, d_k)
        NumPy, PyTorch or JAX, of any dtype that `scaledot.attention` takes. ``(len_q, d_k)`` is
        one head; further leading axes must be 1.
    key : array, shape (num_kv_heads, len_kv, d_k)
        Likewise.
    name : str
        How the layer is called.
    top_k, last, map_shape : optional
        As in `scaledot.attention_stats`.
    causal, window, mask, bias, segment_ids, kv_len, scale, softcap, alibi_slopes : optional
        As in `scaledot.attention`.
    sinks, score_mod, mask_mod, block_mask, q_offset, kv_offset, impl : optional
        As in `scaledot.attention`.

    Returns
    -------
    Layer
        Everything in NumPy arrays. NumPy arrays and PyTorch tensors on the host are kept as they
        are, not copied: when they change, so do the weights that the layer gives later.

    Raises
    ------
    TypeError, ValueError
        As in `scaledot.attention_stats`; more than one sequence; values that are being traced.

    Notes
    -----
    Statistics are computed where query lies, then moved to the host. bfloat16 is kept as float32,
    which holds the same numbers. Memory is linear in the lengths.

    References
    ----------
    arXiv 1706.03762.

    Examples
    --------
    >>> import numpy as np
    >>> from scaledot import introspect
    >>> query, key = np.random.default_rng(0).standard_normal((2, 4, 10, 8))
    >>> layer = introspect.look(query, key, causal=True, name="layer 0")
    >>> layer.num_heads, layer.len_q, layer.stats.entropy.shape
    (4, 10, (4, 10))
    """
    given = (
        causal, window, mask, bias, segment_ids, kv_len, scale, softcap, alibi_slopes, sinks,
        score_mod, mask_mod, block_mask, q_offset, kv_offset,
    )  # fmt: skip
    options = dict(zip(DEFAULTS, given, strict=True))
    return _look(query, key, name, _Wanted(top_k, last, map_shape, impl), options)


def trace(
    query: Array | Sequence[Array],
    key: Array | Sequence[Array],
    *,
    names: Sequence[str] | None = None,
    tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
    title: str = "",
    top_k: int = 8,
    last: int | None = None,
    map_shape: tuple[int, int] | None = None,
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
    q_offset: Offsets | None = None,
    kv_offset: Offsets = 0,
    impl: Impl = "auto",
) -> Trace:
    """`look` at every layer of a model.

    Parameters
    ----------
    query : array, shape (num_layers, num_heads, len_q, d_k), or a sequence of arrays
        One entry for each layer, each as `look` takes it.
    key : array, shape (num_layers, num_kv_heads, len_kv, d_k), or a sequence of arrays
        Likewise.
    names : sequence of str, optional
        One for each layer; without them ``layer 0``, ``layer 1`` and so on.
    tokens : sequence of str, optional
        One for each query, for `findings` and reports.
    key_tokens : sequence of str, optional
        One for each key, where they are not those of the queries.
    title : str
        What the trace is of.
    top_k, last, map_shape : optional
        As in `scaledot.attention_stats`.
    causal, window, mask, bias, segment_ids, kv_len, scale, softcap, alibi_slopes : optional
        As in `scaledot.attention`; shared by all layers.
    sinks, score_mod, mask_mod, block_mask, q_offset, kv_offset, impl : optional
        Likewise. Layers with options of their own are put together as
        ``Trace((look(...), look(...)))``.

    Returns
    -------
    Trace
        Its layers are what `look` returns.

    Raises
    ------
    TypeError, ValueError
        As in `look`; numbers of layers, names or tokens that do not fit.

    Notes
    -----
    Statistics take memory that is linear in the lengths.

    References
    ----------
    arXiv 1706.03762.

    Examples
    --------
    >>> import numpy as np
    >>> from scaledot import introspect
    >>> query, key = np.random.default_rng(0).standard_normal((2, 3, 4, 5, 8))
    >>> found = introspect.trace(query, key, tokens="to be or not to".split(), causal=True)
    >>> [layer.name for layer in found.layers]
    ['layer 0', 'layer 1', 'layer 2']
    """
    given = (
        causal, window, mask, bias, segment_ids, kv_len, scale, softcap, alibi_slopes, sinks,
        score_mod, mask_mod, block_mask, q_offset, kv_offset,
    )  # fmt: skip
    options = dict(zip(DEFAULTS, given, strict=True))
    queries, keys = _each_layer("query", query), _each_layer("key", key)
    if names is None:
        names = [f"layer {i}" for i in range(len(queries))]
    elif not hasattr(names, "__len__"):
        raise type_error("names must be a sequence", type(names).__name__, "Pass a list of them.")
    if not len(queries) == len(keys) == len(names):
        raise value_error(
            "query, key and names must have one entry for each layer",
            f"{len(queries)}, {len(keys)} and {len(names)}",
            "The first axis, or the sequence, counts the layers.",
        )
    wanted = _Wanted(top_k, last, map_shape, impl)
    layers = tuple(
        _look(q, k, str(name), wanted, options)
        for q, k, name in zip(queries, keys, names, strict=True)
    )
    return Trace(layers, as_tokens("tokens", tokens), as_tokens("key_tokens", key_tokens), title)


@dataclass(frozen=True)
class _Wanted:
    """What is asked of `attention_stats` beside the options of the scores."""

    top_k: Any
    last: Any
    map_shape: Any
    impl: Any


def _each_layer(name: str, given: Any) -> list[Array]:
    """Entries of an array of four axes or more, or of a sequence of arrays."""
    hint = "Axes are (num_layers, num_heads, len, d); or pass a list with one array a layer."
    if _arrays.library(given) is None:
        if not isinstance(given, (list, tuple)):
            raise type_error(f"{name} must be an array or a sequence of them",
                             type(given).__name__, hint)  # fmt: skip
        return list(given)
    if given.ndim < 4:
        raise value_error(f"{name} must have an axis of layers", tuple(given.shape), hint)
    return [given[i, ...] for i in range(given.shape[0])]


def _look(
    query: Array, key: Array, name: str, wanted: _Wanted, options: dict[str, Any]
) -> Layer:
    """`look` with the options by name."""
    _checks.operands(query=query, key=key)
    query, key = (_one_sequence(n, x) for n, x in (("query", query), ("key", key)))
    options = {
        n: _one_option(n, x) for n, x in options.items()
        if x is not DEFAULTS[n] and not (n == "kv_offset" and type(x) is int and x == 0)
    }  # fmt: skip
    stats = attention_stats(
        query, key, top_k=wanted.top_k, last=wanted.last, map_shape=wanted.map_shape,
        impl=wanted.impl, **options,
    )  # fmt: skip
    options = {n: for_numpy(n, _on_host(x), query) for n, x in options.items()}
    return Layer(
        str(name), Stats(*map(_on_host, stats)), _on_host(query), _on_host(key), options
    )


def _one_sequence(name: str, x: Array) -> Array:
    """Query or key as (heads, len, d); raise for more than one sequence."""
    if any(n != 1 for n in x.shape[:-3]):
        raise value_error(
            f"{name} must be of one sequence, (num_heads, len, d)", tuple(x.shape),
            "Look at one entry of the leading axes at a time.",
        )
    if _arrays.host(x[..., :0, :0]) is None:
        raise type_error(
            f"{name} must hold values", "an array that a compiler is tracing",
            "Look at it outside of the compiled function.",
        )
    return x[None, ...] if x.ndim == 2 else x[(0,) * (x.ndim - 3) + (...,)]


def _one_option(name: str, x: Any) -> Any:
    """An option for one sequence: an array loses its leading axes of length 1."""
    if name not in _OPTION_AXES:
        return x
    if isinstance(x, (tuple, list)):  # of segment_ids
        return tuple(_one_option(name, side) for side in x)
    if _arrays.library(x) is None:
        return x
    extra = x.ndim - _OPTION_AXES[name]
    if extra <= 0 or any(n != 1 for n in x.shape[:extra]):
        return x  # what does not fit is said by attention_stats
    return x[(0,) * extra + (...,)]


def _on_host(x: Any) -> Any:
    """Array, or tuple of arrays, in NumPy, bfloat16 as float32; anything else as it is."""
    if isinstance(x, tuple) and all(_arrays.library(item) for item in x):
        return tuple(map(_on_host, x))
    if _arrays.library(x) is None:
        return x
    known = _arrays.host(x)
    if known is None:
        return x
    if known.dtype.name == "bfloat16":
        return known.astype(np.float32)
    return known.item() if known.ndim == 0 else known


def check_trace(name: str, x: object) -> None:
    """Raise unless an argument is a trace."""
    if not isinstance(x, Trace):
        raise type_error(
            f"{name} must be a scaledot.introspect.Trace", type(x).__name__,
            "Make one with scaledot.introspect.trace(query, key), or Trace([layer]) of one layer.",
        )
