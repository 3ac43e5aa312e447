"""Attention of Hugging Face models by this package: one line changed.

After `register`, ``attn_implementation="scaledot"`` is one of transformers' implementations, for
``from_pretrained`` and for ``model.set_attn_implementation``.
"""

from __future__ import annotations

from typing import Any

from scaledot._errors import missing_extra, value_error

try:
    import transformers
except ImportError:
    raise missing_extra("transformers", "hf") from None

from scaledot.transformers._attend import attend
from scaledot.transformers._mask import mask

__all__ = ["register"]


def register(name: str = "scaledot") -> None:
    """Add this package to the attention implementations of transformers.

    Both the attention function and the function that makes masks for it are registered.

    Parameters
    ----------
    name : str
        What is given as ``attn_implementation``.

    Raises
    ------
    ValueError
        The name is one of transformers' own, or is not an identifier.

    Notes
    -----
    It may be called again. Masks by causality, padding, sliding windows, chunks and packed
    sequences are handed over as positions and lengths, in memory linear in the length; any other
    is a boolean matrix. Arguments that attention here does not know are errors, and so are models
    that ask transformers for masks and then compute attention themselves.

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
    registered: Any = transformers.AttentionInterface
    known = registered().get(name)
    if not (isinstance(name, str) and name.isidentifier()) or known not in (None, attend):
        raise value_error(
            "name must be an identifier that transformers does not use itself", repr(name),
            "register() takes 'scaledot'.",
        )
    transformers.AttentionInterface.register(name, attend)
    transformers.AttentionMaskInterface.register(name, mask)
