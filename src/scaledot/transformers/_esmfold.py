"""The triangle attention of transformers' ESMFold, by `scaledot.attention`."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from scaledot import attention
from scaledot._errors import value_error
from scaledot._torch_calls import Shared

_WHERE = "transformers.models.esm.modeling_esmfold"
_PARAMETERS = {
    "forward": ("self", "q_x", "kv_x", "biases", "use_memory_efficient_kernel", "use_lma",
                "lma_q_chunk_size", "lma_kv_chunk_size", "use_flash", "flash_mask"),
    "_prep_qkv": ("self", "q_x", "kv_x"),
    "_wrap_up": ("self", "o", "q_x"),
}  # fmt: skip
"""Methods that are replaced or called, and the parameters that they are known with."""


@contextlib.contextmanager
def esmfold_attention() -> Iterator[None]:
    """Compute the triangle attention of transformers' ESMFold by `scaledot.attention`.

    Within ``with esmfold_attention():`` every ``EsmFoldAttention`` of the process computes
    ``softmax(Q Kᵀ / √d + mask bias + bias of pairs) V`` here. Projections, gates and all around
    them stay those of the model.

    Yields
    ------
    None

    Raises
    ------
    ValueError
        If this version of transformers has no ESMFold, or one whose attention takes other
        arguments.

    Notes
    -----
    Scores of triangle attention are an array with three lengths, (batch, residues, heads, residues,
    residues): here memory is quadratic in the number of residues, forwards and backwards. A row of
    padding, where all keys are masked by the same bias, is a mean of values as in the model. The
    model's choice of chunks still holds, and is not needed. It is for all threads, and may be
    nested.

    References
    ----------
    AlphaFold 2, doi 10.1038/s41586-021-03819-2, supplement 1.6; ESMFold, doi
    10.1126/science.ade2574.

    Examples
    --------
    >>> import torch
    >>> from scaledot.transformers import esmfold_attention
    >>> from transformers.models.esm.modeling_esmfold import EsmFoldTriangleAttention
    >>> module = EsmFoldTriangleAttention(c_in=8, c_hidden=4, no_heads=2)
    >>> with esmfold_attention(), torch.no_grad():
    ...     module(torch.zeros(1, 5, 5, 8)).shape
    torch.Size([1, 5, 5, 8])
    """
    _checked()  # imports, which is not to be done while a lock is held
    with _exchanged.scope():
        yield


@contextlib.contextmanager
def _exchange() -> Iterator[None]:
    """Exchange the method."""
    replaced = _checked()
    theirs, replaced.forward = replaced.forward, _forward
    try:
        yield
    finally:
        replaced.forward = theirs


_exchanged = Shared(_exchange)


def _checked() -> Any:
    """Return transformers' class, whose methods must be those that are known here."""
    try:
        kind = importlib.import_module(_WHERE).EsmFoldAttention
    except (ImportError, AttributeError):
        raise _unknown("none") from None
    for name, known in _PARAMETERS.items():
        method = getattr(kind, name, None)
        given = () if method is None else tuple(inspect.signature(method).parameters)
        if given != known:
            raise _unknown(f"{name}({', '.join(given)})")
    return kind


def _unknown(given: str) -> ValueError:
    return value_error(
        "transformers must have ESMFold's EsmFoldAttention with the arguments of 5.24", given,
        "Run the model without esmfold_attention(), or install another version of transformers.",
    )


def _forward(
    self: Any, q_x: Tensor, kv_x: Tensor, biases: Sequence[Tensor] | None = None,
    use_memory_efficient_kernel: bool = False, use_lma: bool = False,
    lma_q_chunk_size: int = 1024, lma_kv_chunk_size: int = 4096, use_flash: bool = False,
    flash_mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Method of ``EsmFoldAttention``: output (..., len_q, width).

    What asks for other ways to compute the same is not needed, and not read.
    """
    query, key, value = self._prep_qkv(q_x, kv_x)  # (..., heads, len, d), query scaled
    found = _with_biases(query, key, value, biases or ())
    out: Tensor = self._wrap_up(found.transpose(-2, -3), q_x)
    return out


def _with_biases(query: Tensor, key: Tensor, value: Tensor, biases: Sequence[Tensor]) -> Tensor:
    """Unscaled attention with several biases that broadcast to (..., heads, len_q, len_kv).

    Their sum may be far larger than each: a mask bias (batch, rows, 1, 1, len) and a bias of pairs
    (batch, 1, heads, len, len) have three lengths together. What depends on the key alone needs
    no room in the scores, it is one more feature of the key, for which every query has a 1.
    """
    of_keys = [bias for bias in biases if bias.ndim > 1 and bias.shape[-2] == 1]
    of_pairs = [bias for bias in biases if bias.ndim < 2 or bias.shape[-2] != 1]
    if of_keys:
        feature = _total(of_keys).mT.expand(*key.shape[:-1], 1)
        # -1e9 is more than float16 holds, and -inf would empty a row where it is everywhere.
        feature = feature.clamp(min=torch.finfo(key.dtype).min).to(key.dtype)
        key = torch.cat([key, feature], dim=-1)
        query = torch.cat([query, torch.ones_like(query[..., :1])], dim=-1)
    return attention(query, key, value, bias=_total(of_pairs) if of_pairs else None, scale=1.0)


def _total(biases: Sequence[Tensor]) -> Tensor:
    """Sum of one bias or more, broadcast together."""
    first, *others = biases
    for bias in others:
        first = first + bias
    return first
