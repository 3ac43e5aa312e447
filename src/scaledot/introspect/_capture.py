"""The attention of a model while it runs, layer by layer."""

from __future__ import annotations

import contextlib
import math
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from scaledot import _watch
from scaledot._errors import type_error, value_error
from scaledot.introspect._trace import _OPTION_AXES, Layer, Trace, look


class Capture:
    """What `capture` has seen.

    Attributes
    ----------
    layers : list of Layer
        One for each call of attention, in the order of the calls, named by its module in the
        model. Further calls of one module, as where layers share their weights, have a number.
    """

    def __init__(self, names: Mapping[int, str], entry: int | None, wanted: Mapping[str, Any],
                 keep: bool) -> None:  # fmt: skip
        self.layers: list[Layer] = []
        self._names, self._entry, self._wanted, self._keep = names, entry, wanted, keep
        self._calls: Counter[str] = Counter()
        self._is_over = False

    def trace(
        self,
        *,
        tokens: Sequence[str] | None = None,
        key_tokens: Sequence[str] | None = None,
        title: str = "",
        match: str | None = None,
    ) -> Trace:
        """Layers as a `Trace`, for `findings`, `scaledot.report.write` and the like.

        Parameters
        ----------
        tokens, key_tokens, title : optional
            As in `Trace`.
        match : str, optional
            A regular expression; only layers in whose names it is found are taken. Models with an
            encoder and a decoder need it with tokens, because their layers have other lengths.

        Returns
        -------
        Trace
            Of the layers so far.

        Raises
        ------
        ValueError
            There is no such layer; numbers of tokens that do not fit.

        Examples
        --------
        >>> from scaledot import introspect
        >>> import torch
        >>> with introspect.capture(torch.nn.Linear(2, 2)) as seen:
        ...     pass  # no attention here
        >>> seen.trace()
        Traceback (most recent call last):
        ...
        ValueError: attention of the model must have run inside capture, got none. ...
        """
        if not self.layers:
            raise value_error(
                "attention of the model must have run inside capture", "none",
                "Load the model with attn_implementation='scaledot', after scaledot.transformers."
                "register(), and run it in this thread and not compiled.",
            )
        chosen = [
            layer for layer in self.layers if match is None or re.search(match, layer.name)
        ]
        if not chosen:
            raise value_error(
                f"match must be found in a layer's name, as in {self.layers[0].name!r}", match,
                "It is a regular expression.",
            )
        # It takes any sequence, and says what is wrong with what is none.
        return Trace(tuple(chosen), cast(Any, tokens), cast(Any, key_tokens), title)

    def _show(self, module: Any, query: Any, key: Any, options: Mapping[str, Any]) -> None:
        """Keep what is wanted of one call, query (..., num_heads, len_q, d_k)."""
        name = self._names.get(id(module))
        if name is None or self._is_over:
            return
        try:
            lead = np.broadcast_shapes(*_leads(query, key, options))
        except ValueError:
            return  # attention says what does not fit
        entry, batch = self._entry, math.prod(lead)
        if entry is None:
            if batch != 1:
                raise value_error(
                    "capture must be of one sequence", f"a batch of {batch} in {name}",
                    "Run the model on one, or say which with capture(model, entry=0).",
                )
            entry = 0
        if not -batch <= entry < batch:
            raise value_error(
                f"entry must be one of the batch of {batch} in {name}", entry,
                "The first is 0.",
            )
        place = tuple(int(i) for i in np.unravel_index(entry % batch, lead))
        layer = look(
            _one(query, 3, place), _one(key, 3, place), **self._wanted,
            **{option: _one(x, _OPTION_AXES.get(option), place) for option, x in options.items()},
        )  # fmt: skip
        self._calls[name] += 1
        count = self._calls[name]
        name = name if count == 1 else f"{name} ({count})"
        if self._keep and layer.query is not None and layer.key is not None:
            # A cache may be written again where these lie.
            layer = replace(layer, name=name, query=layer.query.copy(), key=layer.key.copy())
        else:
            # Of the options, all but those that are as large as the scores.
            small = {n: x for n, x in layer.options.items() if n not in ("mask", "bias")}
            layer = Layer(name, layer.stats, options=small)
        self.layers.append(layer)


def _leads(query: Any, key: Any, options: Mapping[str, Any]) -> Iterator[tuple[int, ...]]:
    """Leading axes of all tensors that may differ from sequence to sequence."""
    for x, axes in ((query, 3), (key, 3), *((x, _OPTION_AXES.get(n)) for n, x in options.items())):
        for item in x if isinstance(x, tuple) else (x,):
            if axes is not None and hasattr(item, "detach"):
                yield tuple(item.shape[: max(0, item.ndim - axes)])


def _one(x: Any, axes: int | None, place: tuple[int, ...]) -> Any:
    """The part of one sequence, at its place in the broadcast leading axes; options may be pairs.

    ``axes`` are those of one sequence, None for options that all share.
    """
    if isinstance(x, tuple):
        return tuple(_one(item, axes, place) for item in x)
    if not hasattr(x, "detach"):
        return x
    x = x.detach()
    if axes is None or x.ndim <= axes:
        return x
    lead = x.shape[: x.ndim - axes]
    return x[tuple(i if n > 1 else 0 for i, n in zip(place[-len(lead) :], lead, strict=True))]


@contextlib.contextmanager
def capture(
    model: Any,
    *,
    keep: bool = False,
    entry: int | None = None,
    top_k: int = 8,
    last: int | None = None,
    map_shape: tuple[int, int] | None = None,
) -> Iterator[Capture]:
    """Collect `Stats` of a model's attention while it runs, without its weights.

    Parameters
    ----------
    model : torch.nn.Module
        A model whose attention is computed by this package: one of transformers with
        ``attn_implementation="scaledot"`` (`scaledot.transformers.register`).
    keep : bool
        Whether to keep queries and keys too, for `Layer.weights`, `rollout` and `compare`.
    entry : int, optional
        Which entry of a batch to look at; negative ones count from the end. Without it the batch
        must be 1.
    top_k, last, map_shape : optional
        As in `scaledot.attention_stats`.

    Yields
    ------
    Capture
        Its ``layers`` grow while the model runs; its ``trace`` is for reports.

    Raises
    ------
    TypeError, ValueError
        ``model`` is no module, ``entry`` no integer. While the model runs: a batch without
        ``entry``, and as in `scaledot.attention_stats`.

    Notes
    -----
    It sees the calls of the model up to the end of its first ``forward``, encoders that run before
    it included. Of ``generate`` that is the prompt; for the tokens that it made, run the model
    once more on all of them. It holds for the thread that enters it, and may be nested. Memory is
    linear in the lengths; the time is about that of one more pass of attention. A compiled model
    shows nothing.

    The batch is that of each call of attention, its leading axes broadcast together. Models that
    fold windows, rows or frames into it (SAM, Swin and others) have more entries there than
    inputs: window w of n in image i is entry ``i * n + w``, of layers that attend in windows.
    Layers of such a model that see the whole image have fewer, and an ``entry`` that one layer
    does not have is an error: look at a part of the model, ``capture(model.layers[0])``.

    Examples
    --------
    >>> import torch, transformers, scaledot.transformers
    >>> from scaledot import introspect
    >>> scaledot.transformers.register()
    >>> config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=16)
    >>> model = transformers.AutoModel.from_config(config, attn_implementation="scaledot").eval()
    >>> with introspect.capture(model) as seen:
    ...     output = model(torch.tensor([[1, 2, 3]]))
    >>> [layer.name for layer in seen.trace(tokens="one two three".split()).layers]
    ['h.0.attn', 'h.1.attn']
    """
    if not (hasattr(model, "named_modules") and hasattr(model, "register_forward_hook")):
        raise type_error(
            "model must be a torch.nn.Module", type(model).__name__,
            "Arrays of queries and keys go to scaledot.introspect.look and trace.",
        )
    if entry is not None and not hasattr(entry, "__index__"):
        raise type_error("entry must be an integer", type(entry).__name__, "The first is 0.")
    names = {id(module): name or type(module).__name__ for name, module in model.named_modules()}
    wanted = {"top_k": top_k, "last": last, "map_shape": map_shape}
    seen = Capture(names, entry, wanted, keep)
    here = threading.get_ident()

    def is_over(*_: Any) -> None:
        if threading.get_ident() == here:
            seen._is_over = True

    hook = model.register_forward_hook(is_over, always_call=True)
    try:
        with _watch.watching(seen._show):
            yield seen
    finally:
        hook.remove()
