"""Keys and values of what has been read so far, for decoding and chunked prefill."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from scaledot import _arrays, _cache_attention, _cache_checks, _checks
from scaledot._attention import attention
from scaledot._cache_memory import Memory
from scaledot._errors import value_error
from scaledot._spec import Options
from scaledot._typing import Array, ArrayT, Impl, MaskMod, ScoreMod

VERSION = 1
"""Of the files that `KVCache.save` writes."""


class KVCache:
    """Keys and values of a batch of growing sequences, with attention over them.

    Token p of an entry lies in slot p. With a window, only the first ``num_sinks`` tokens and the
    latest ones are kept: token ``p >= num_sinks`` lies in slot
    ``num_sinks + (p - num_sinks) % (capacity - num_sinks)``, in the place of an older one.

    Parameters
    ----------
    batch, num_kv_heads, d_k, d_v : int
        Sizes of the arrays to come, each at least 1.
    capacity : int
        Tokens of each entry that there is memory for. With a window, at least
        ``num_sinks + window``; every further one lets `attention` take one more query at once and
        `truncate` take back one more token.
    dtype : str or dtype
        float32, float64, float16, bfloat16, or int8: numbers are then stored in 8 bits, with a
        scale for each token and head, and may be given in any of the others.
    window : int, optional
        Tokens that a query sees, itself included, beside the first ``num_sinks``. Older ones make
        room, so that sequences may be of any length. None keeps all.
    num_sinks : int
        Tokens at the start that stay visible; needs a window.
    like : array, optional
        The memory is of its library, NumPy, PyTorch or JAX, and on its device. None is NumPy.

    Raises
    ------
    TypeError
        Sizes that are no integers, a dtype or library that cannot be stored.
    ValueError
        Sizes below 1, a capacity that does not hold sinks and window.
    ImportError
        bfloat16 of NumPy without ml_dtypes.

    Notes
    -----
    Positions are those of the stream and never change. With a window, `attention` equals
    attention over the whole history with the mask ``kv_pos < num_sinks or q_pos - kv_pos <
    window``: the sinks and the at most two stretches of the ring are attended to where they lie,
    and merged.

    As int8, x is stored as ``round(x / scale)`` with ``scale = max|x| / 127`` over the features of
    one token and head, at least 2⁻¹²⁶: what is read differs from x by at most ``scale / 2``, to
    rounding of float32. Scores then differ by at most ``δ = |attention scale|·‖q‖₁·scale_k / 2``
    and the output by at most ``(exp(2δ) - 1)·max|v| + scale_v / 2``, with the largest scales among
    the visible tokens. A few queries of float32, or of bfloat16 where the processor multiplies it,
    read codes as they are (bfloat16 holds them all; weights times scales are rounded to it, as
    other weights are); for others numbers are restored 1024 tokens at a time, in float32 (float64
    for queries in float64). A token that holds nan, inf or what exceeds float32 becomes nan.

    Gradients reach the query but stop at the cache. JAX arrays cannot be written, so that each
    change there makes a new array of the whole memory. A cache can be pickled.

    References
    ----------
    Sinks and windows: arXiv 2309.17453. Quantised caches: arXiv 2402.02750.

    Examples
    --------
    >>> import numpy as np, scaledot as sd
    >>> query, key, value = np.random.default_rng(0).standard_normal((3, 1, 2, 6, 4))
    >>> cache = sd.KVCache(1, 2, 4, 4, capacity=8, dtype="float64")
    >>> rows = []
    >>> for step in (slice(0, 4), slice(4, 5), slice(5, 6)):  # a prompt, then two tokens
    ...     cache.append(key[:, :, step], value[:, :, step])
    ...     rows.append(cache.attention(query[:, :, step]))
    >>> cache.lengths
    array([6])
    >>> whole = sd.attention(query, key, value, causal=True)
    >>> np.allclose(np.concatenate(rows, axis=2), whole)
    True
    """

    def __init__(
        self,
        batch: int,
        num_kv_heads: int,
        d_k: int,
        d_v: int,
        capacity: int,
        dtype: Any,
        *,
        window: int | None = None,
        num_sinks: int = 0,
        like: Array | None = None,
    ) -> None:
        shape = _cache_checks.size("batch", batch), _cache_checks.size("num_kv_heads", num_kv_heads)
        widths = _cache_checks.size("d_k", d_k), _cache_checks.size("d_v", d_v)
        slots, self._window, sinks = _cache_checks.slots(capacity, window, num_sinks)
        name = _cache_checks.dtype_name(dtype)
        _cache_checks.place(like)
        _cache_checks.room((*shape, *widths), name, slots)
        self._memory = Memory.new((*shape, slots), widths, name, sinks, like)

    def __repr__(self) -> str:
        batch, num_kv_heads, capacity, d_k = self._memory.arrays["key"].shape
        d_v = self._memory.arrays["value"].shape[-1]
        return (
            f"KVCache({batch}, {num_kv_heads}, {d_k}, {d_v}, {capacity}, {self.dtype!r}, "
            f"window={self.window}, num_sinks={self.num_sinks}, lengths={self.lengths.tolist()})"
        )

    @property
    def lengths(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Tokens of each entry so far, evicted ones included, shape (batch,); a copy."""
        return self._memory.lengths.copy()

    @property
    def capacity(self) -> int:
        """Tokens of each entry that there is memory for."""
        return self._memory.capacity

    @property
    def dtype(self) -> str:
        """Name of the dtype that is stored."""
        return self._memory.dtype

    @property
    def window(self) -> int | None:
        """Tokens that a query sees beside the sinks; None where nothing is evicted."""
        return self._window

    @property
    def num_sinks(self) -> int:
        """Tokens at the start that are never evicted."""
        return self._memory.num_sinks

    def append(self, key: Array, value: Array, *, lengths: Array | None = None) -> None:
        """Add tokens at the end of each entry.

        Parameters
        ----------
        key : array, shape (batch, num_kv_heads, new, d_k)
            In the library and dtype of the cache; any floating-point dtype for int8.
        value : array, shape (batch, num_kv_heads, new, d_v)
            Likewise.
        lengths : integers, shape (batch,), optional
            How many of the new tokens of each entry are valid, counted from the start.

        Raises
        ------
        TypeError, ValueError
            Arrays that do not fit; more tokens than there is room for. Nothing has changed then.

        Examples
        --------
        >>> import numpy as np, scaledot as sd
        >>> cache = sd.KVCache(2, 1, 4, 4, capacity=8, dtype="float32")
        >>> new = np.ones((2, 1, 3, 4), dtype=np.float32)
        >>> cache.append(new, new, lengths=[3, 1])
        >>> cache.lengths
        array([3, 1])
        """
        given = {"key": key, "value": value}
        for name, x in given.items():
            _cache_checks.tokens(self._memory, name, x, "num_kv_heads", "new")
        if key.shape[2] != value.shape[2]:
            raise value_error(
                "key and value must have the same number of tokens",
                f"{key.shape[2]} and {value.shape[2]}", "Axes are (batch, num_kv_heads, new, d).",
            )
        counts = _cache_checks.counts(self._memory, lengths, key.shape[2])
        present = self._memory.lengths
        full = present + counts > self.capacity
        if self.window is None and np.any(full):
            entry = int(np.argmax(full))
            raise value_error(
                f"the cache must have room for the new tokens (capacity = {self.capacity})",
                f"{counts[entry]} after the {present[entry]} of entry {entry}",
                "Call grow or truncate first, or make the cache with a window.",
            )
        self._memory.write(given, counts)

    def attention(
        self,
        query: ArrayT,
        *,
        causal: bool = True,
        window: tuple[int | None, int | None] | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        alibi_slopes: Array | None = None,
        sinks: Array | None = None,
        score_mod: ScoreMod | None = None,
        mask_mod: MaskMod | None = None,
        dropout: float = 0.0,
        seed: int | Array | None = None,
        lengths: Array | None = None,
        impl: Impl = "auto",
    ) -> ArrayT:
        """Attention of the last tokens of each entry over all that are in the cache.

        Append their keys and values first: query ``len_q - 1`` is at the last position.

        Parameters
        ----------
        query : array, shape (batch, num_heads, len_q, d_k)
            In the library and dtype of the cache; any floating-point dtype for int8.
        causal : bool
            A query sees keys at its own position and before.
        window : (int or None, int or None), optional
            As in `scaledot.attention`, in addition to the window of the cache.
        scale, softcap, alibi_slopes, sinks, score_mod, mask_mod, dropout, seed, impl : optional
            As in `scaledot.attention`; positions are those of the stream.
        lengths : integers, shape (batch,), optional
            How many queries of each entry are valid, counted from the start, as in `append`: the
            last valid one is at the last position.

        Returns
        -------
        array, shape (batch, num_heads, len_q, d_v)
            In the library and dtype of query. Rows past ``lengths``, and rows of entries with
            fewer tokens than queries that fall before the first token, are 0.

        Raises
        ------
        TypeError, ValueError
            As in `scaledot.attention`; a query that sees a token which has been evicted.

        Notes
        -----
        A chunk of n tokens is appended before it is attended to, so its first query needs
        ``window + n - 1`` tokens: with a window, chunks may have up to
        ``capacity - num_sinks - window + 1`` tokens once anything has been evicted.

        Examples
        --------
        >>> import numpy as np, scaledot as sd
        >>> cache = sd.KVCache(2, 1, 4, 4, capacity=8, dtype="float32")
        >>> new = np.ones((2, 1, 3, 4), dtype=np.float32)
        >>> cache.append(new, new, lengths=[3, 1])
        >>> cache.attention(new, lengths=[3, 1])[:, 0, :, 0]
        array([[1., 1., 1.],
               [1., 0., 0.]], dtype=float32)
        """
        _cache_checks.tokens(self._memory, "query", query, "num_heads", "len_q")
        len_q = cast(Any, query).shape[2]
        counts = _cache_checks.counts(self._memory, lengths, len_q)
        left, right = _checks.window(window, False)
        mask = None
        if np.any(counts < len_q):
            mask = (np.arange(len_q) < counts[:, None])[:, None, :, None]  # (batch, 1, len_q, 1)
        memory, q_offset = self._memory, self._memory.lengths - counts
        options: dict[str, Any] = {
            "causal": causal, "scale": scale, "softcap": softcap, "alibi_slopes": alibi_slopes,
            "score_mod": score_mod, "mask_mod": mask_mod, "dropout": dropout, "seed": seed,
            "q_offset": q_offset, "impl": impl,
        }  # fmt: skip
        if self.window is None and not memory.is_int8:
            return cast(ArrayT, attention(
                query, memory.arrays["key"], memory.arrays["value"], window=window, mask=mask,
                kv_len=memory.lengths, sinks=sinks, **options,
            ))  # fmt: skip
        if self.window is not None:
            left = self.window - 1 if left is None else min(left, self.window - 1)
            _cache_checks.kept(memory, q_offset, counts, left)

        return cast(ArrayT, _cache_attention.over(
            memory, query, Options(window=window, mask=mask, sinks=sinks, **options), (left, right)
        ))  # fmt: skip

    def grow(self, capacity: int) -> None:
        """Make room for more tokens; what has been evicted stays so.

        Parameters
        ----------
        capacity : int
            At least the present one.

        Raises
        ------
        TypeError, ValueError
            Not an integer; less than the present capacity.

        Examples
        --------
        >>> import scaledot as sd
        >>> cache = sd.KVCache(2, 1, 4, 4, capacity=8, dtype="float32")
        >>> cache.grow(16)
        >>> cache.capacity
        16
        """
        capacity = _checks.integer("capacity", capacity)
        if capacity < self.capacity:
            raise value_error(
                f"capacity must be at least the present one, {self.capacity}", capacity,
                "A cache only grows; make a smaller one instead.",
            )
        batch, num_kv_heads, _, d_k = self._memory.arrays["key"].shape
        d_v = self._memory.arrays["value"].shape[-1]
        _cache_checks.room((batch, num_kv_heads, d_k, d_v), self.dtype, capacity)
        if capacity > self.capacity:
            self._memory.grow(capacity)

    def truncate(self, lengths: int | Array) -> None:
        """Take back tokens at the end, for example those of a rejected draft.

        Parameters
        ----------
        lengths : int or integers of shape (batch,)
            Tokens to keep of all entries, or of each: at most as many as there are.

        Raises
        ------
        TypeError, ValueError
            Not integers; lengths out of range; with a window, so few tokens that the next one
            would see what has been evicted. Nothing has changed then.

        Examples
        --------
        >>> import numpy as np, scaledot as sd
        >>> cache = sd.KVCache(2, 1, 4, 4, capacity=8, dtype="float32")
        >>> new = np.ones((2, 1, 5, 4), dtype=np.float32)
        >>> cache.append(new, new)
        >>> cache.truncate([3, 4])
        >>> cache.lengths
        array([3, 4])
        """
        wanted, oldest = _cache_checks.shorter(self._memory, lengths, self.window)
        self._memory.lengths, self._memory.oldest = wanted, oldest

    def reorder(self, indices: Array) -> None:
        """Make entry i a copy of the present entry ``indices[i]``, as beam search does.

        Parameters
        ----------
        indices : 1-D integers, at least one
            Entries may be repeated and left out; their number becomes the batch.

        Raises
        ------
        TypeError, ValueError
            Not integers; indices out of range. Nothing has changed then.

        Notes
        -----
        While the batch keeps its size, only entries that change are copied, and only their slots
        in use.

        Examples
        --------
        >>> import numpy as np, scaledot as sd
        >>> cache = sd.KVCache(2, 1, 4, 4, capacity=8, dtype="float32")
        >>> new = np.ones((2, 1, 3, 4), dtype=np.float32)
        >>> cache.append(new, new, lengths=[3, 1])
        >>> cache.reorder([1, 1, 0])
        >>> cache.lengths
        array([1, 1, 3])
        """
        hint = "Each new entry names the one that it continues, counted from 0."
        source, batch = _checks.integers("indices", indices, hint), len(self._memory.lengths)
        if not len(source) or np.any((source < 0) | (source >= batch)):
            raise value_error(
                f"indices must name at least one entry, from 0 to {batch - 1}",
                source.tolist(), hint,
            )
        self._memory.reorder(source)

    def save(self, path: Any) -> None:
        """Write the cache to a safetensors file.

        Parameters
        ----------
        path : str or path
            The file appears whole or not at all: an older one stays until then.

        Raises
        ------
        ImportError
            Without safetensors.
        ValueError
            A folder that does not exist.

        Examples
        --------
        >>> import os, tempfile, scaledot as sd
        >>> cache = sd.KVCache(2, 1, 4, 4, capacity=8, dtype="float32")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "cache.safetensors")
        ...     cache.save(path)
        ...     sd.KVCache.load(path)
        KVCache(2, 1, 4, 4, 8, 'float32', window=None, num_sinks=0, lengths=[0, 0])
        """
        from scaledot import _cache_file  # loads modules that few need

        memory = self._memory
        xp = _arrays.namespace(memory.arrays["key"])
        header = {
            "version": VERSION, "library": _arrays.library(memory.arrays["key"]),
            "capacity": self.capacity, "window": self.window, "num_sinks": self.num_sinks,
            "lengths": memory.lengths.tolist(), "oldest": memory.oldest.tolist(),
        }  # fmt: skip
        in_use = {
            part: _arrays.packed(xp, x[:, :, : memory.used], x.dtype)
            for part, x in memory.arrays.items()
        }
        _cache_file.write(path, in_use, header)

    @classmethod
    def load(cls, path: Any, *, like: Array | None = None) -> KVCache:
        """Read a cache that `save` has written.

        Parameters
        ----------
        path : str or path
            The file.
        like : array, optional
            The library and device of the memory. None is the library it was saved from, on the
            CPU.

        Returns
        -------
        KVCache
            As it was.

        Raises
        ------
        ImportError
            Without safetensors, or without the library of the arrays.
        ValueError
            A file of another kind, or damaged.

        Examples
        --------
        See `save`.
        """
        from scaledot import _cache_file

        header, saved = _cache_file.read(path, None if like is None else _arrays.library(like))
        try:
            return _made_of(cls, header, saved, saved["key"] if like is None else like)
        except (LookupError, ValueError, TypeError, AttributeError) as error:
            raise _cache_file.foreign(path, str(error)) from error


def _made_of(
    kind: type[KVCache], header: dict[str, Any], saved: dict[str, Array], like: Array
) -> KVCache:
    """A cache with what a file holds; raises ValueError where that does not fit together."""
    if header["version"] != VERSION:
        raise ValueError(f"version {header['version']}")
    batch, num_kv_heads, _, d_k = saved["key"].shape
    cache = kind(
        batch, num_kv_heads, d_k, saved["value"].shape[-1], header["capacity"],
        _arrays.dtype_name(saved["key"]), window=header["window"], num_sinks=header["num_sinks"],
        like=like,
    )  # fmt: skip
    memory, least = cache._memory, cache.num_sinks
    lengths, oldest = (
        _cache_checks.per_entry(memory, header[name], "") for name in ("lengths", "oldest")
    )
    end = np.maximum(lengths, least)
    most = least if cache.window is None else end
    if np.any((oldest < least) | (oldest > most) | (end - oldest > cache.capacity - least)):
        raise ValueError("lengths that do not fit")
    memory.lengths, memory.oldest = lengths, oldest
    memory.load(saved)
    return cache
