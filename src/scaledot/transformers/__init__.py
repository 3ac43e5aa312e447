"""Attention of Hugging Face models by this package: one line changed.

After `register`, ``attn_implementation="scaledot"`` is one of transformers' implementations, for
``from_pretrained`` and for ``model.set_attn_implementation``. ESMFold, whose attention is not
exchanged by that, has `esmfold_attention`.
"""

from __future__ import annotations

from typing import Any

from scaledot._errors import missing_extra, type_error, value_error

try:
    import transformers
except ImportError:
    raise missing_extra("transformers", "hf") from None

from scaledot.transformers._attend import attend
from scaledot.transformers._esmfold import esmfold_attention
from scaledot.transformers._mask import mask

__all__ = ["esmfold_attention", "register"]

_READ_IN_NAMES = ("flash", "sdpa", "flex_attention")
"""What transformers looks for in names, to choose masks and to check what is installed."""

_USUAL = "register() takes 'scaledot'."


def register(name: str = "scaledot") -> None:
    """Add this package to the attention implementations of transformers.

    Both the attention function and the function that makes masks for it are registered.

    Parameters
    ----------
    name : str
        What is given as ``attn_implementation``.

    Raises
    ------
    TypeError
        The name is not a string.
    ValueError
        The name is no identifier, has flash, sdpa or flex_attention in it, or is taken: eager, and
        what somebody else has registered, be it for attention or for masks alone. Nothing is
        registered then.

    Notes
    -----
    It may be called again. Masks by causality, padding, sliding windows, chunks and packed
    sequences are handed over as positions and lengths, in memory linear in the length; any other
    is a boolean matrix. Arguments that attention here does not know are errors, and so are models
    that ask transformers for masks and then compute attention themselves. Models that look their
    attention up in a table of their own, as Falcon does, end in transformers' ``KeyError`` when
    they are made. With ``output_attentions=True`` weights are those before dropout, and have their
    gradient.

    References
    ----------
    arXiv 1706.03762, 2205.14135.

    Examples
    --------
    >>> import scaledot.transformers, transformers
    >>> scaledot.transformers.register()
    >>> config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16)
    >>> model = transformers.AutoModel.from_config(config, attn_implementation="scaledot")
    >>> model.config._attn_implementation
    'scaledot'
    """
    if not isinstance(name, str):
        raise type_error("name must be a string", type(name).__name__, _USUAL)
    if not name.isidentifier() or any(part in name for part in _READ_IN_NAMES):
        raise value_error(
            f"name must be an identifier without {', '.join(_READ_IN_NAMES)} in it, from which "
            "transformers tells what an implementation is", repr(name), _USUAL,
        )  # fmt: skip
    attentions: Any = transformers.AttentionInterface
    masks: Any = transformers.AttentionMaskInterface
    for interface, ours in ((attentions, attend), (masks, mask)):
        known = interface().get(name)
        if known not in (None, ours):
            raise value_error(
                f"name must be one that nobody else has registered as {interface.__name__}",
                f"{name!r}, which is {getattr(known, '__qualname__', known)} of "
                f"{getattr(known, '__module__', 'unknown origin')}", _USUAL,
            )  # fmt: skip
    attentions.register(name, attend)
    masks.register(name, mask)
