"""The attention function of transformers, by `scaledot.attention`."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from scaledot import _watch, attention, attention_weights
from scaledot._errors import type_error, value_error
from scaledot._torch_calls import autocast_dtype, cast, seeds
from scaledot.transformers._mask import Visible

_NOTHING = contextlib.nullcontext()
_collector: Any = None
with contextlib.suppress(ImportError):  # of a version that collects in another way
    from transformers.utils.output_capturing import _active_collector as _collector

HARMLESS = {
    "position_ids": "used before attention, for rotary embeddings and the mask",
    "cache_position": "used before attention, by the cache",
    "max_length_q": "the longest of packed sequences, which their bounds tell",
    "max_length_k": "the longest of packed sequences, which their bounds tell",
    "seq_idx": "for state-space layers; attention is told by the mask",
    "use_cache": "what the model returns",
    "return_dict": "what the model returns",
    "output_hidden_states": "what the model returns",
    "output_router_logits": "what the model returns",
    "logits_to_keep": "what the model returns",
    "num_items_in_batch": "how the loss is averaged",
    "reduction": "how the loss is averaged",
    "shift_labels": "what the loss compares with",
    "ignore_index": "which labels the loss leaves out",
    "token_type_ids": "used before attention, for embeddings and the mask",
    "mm_token_type_ids": "used before attention, for rotary embeddings and the mask",
    "deterministic": "attention here is, always",
    "kernel_options": "how another implementation runs",
}
"""Arguments that models pass along and that attention does not depend on, and why."""


def attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor,
    attention_mask: Tensor | Visible | None, dropout: float = 0.0, scaling: float | None = None,
    is_causal: bool | None = None, sliding_window: int | None = None,
    softcap: float | None = None, s_aux: Tensor | None = None,
    position_bias: Tensor | None = None, output_attentions: bool | None = None,
    cu_seq_lens_q: Tensor | None = None, cu_seq_lens_k: Tensor | None = None, **others: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Attention function of transformers: output (batch, len_q, num_heads, d_v), and weights.

    query is (batch, num_heads, len_q, d_k), key and value have as many heads or fewer. Weights
    (batch, num_heads, len_q, len_kv) are those without dropout, None unless they are asked for.
    """
    _refuse_unknown(others)
    # Decoders of small models spend much of a token's time here: each step below is taken only
    # where there is something to do.
    is_cast = autocast_dtype(query.device) is not None
    if is_cast:
        query, key, value = cast(query, key, value)
    if attention_mask is None:
        # Masks that are causal come as masks: a module that does not say so itself is not.
        causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
        options, end = _without_mask(query, key, causal, sliding_window)
    else:
        options, end = _with_mask(query, key, attention_mask)
    if cu_seq_lens_q is not None:
        options |= _sequences(query, key, cu_seq_lens_q, cu_seq_lens_k, options)
    if softcap is not None or s_aux is not None or position_bias is not None:
        options |= _scores(softcap, s_aux, position_bias, options, end)
    options["scale"] = scaling
    len_kv = key.shape[-2]
    if end < len_kv:
        key, value = key[..., :end, :], value[..., :end, :]
    if not torch.compiler.is_compiling():
        _watch.show(module, query, key, options)
    seed = seeds(query, key, value) if dropout else None
    weights = None
    with torch.autocast(query.device.type, enabled=False) if is_cast else _NOTHING:
        out = attention(query, key, value, dropout=dropout, seed=seed, **options)
        if output_attentions or _are_collected(module):
            with _NOTHING if output_attentions else _outside_checkpoints():
                weights = attention_weights(query, key, **options).to(query.dtype)
                weights = torch.nn.functional.pad(weights, (0, len_kv - end))
    return out.transpose(1, 2).contiguous(), weights


def _refuse_unknown(others: dict[str, Any]) -> None:
    """Raise for an argument that may change what attention means."""
    for name, given in others.items():
        if name not in HARMLESS and given is not None and given is not False:
            raise value_error(
                f"arguments of attention must be known to scaledot, but {name} is not",
                type(given).__name__, "Use attn_implementation='sdpa' or 'eager' for this model.",
            )


def _are_collected(module: torch.nn.Module) -> bool:
    """Whether hooks of transformers take weights from this pass, of which few models tell."""
    if _collector is None:
        return False
    if torch.compiler.is_compiling() and not (_collector.compiling or module._forward_hooks):
        return False  # a layer by itself: to ask would part its graph, as hooks do anyway
    wanted = _collector.get()
    return bool(wanted) and any(kind.endswith("attentions") for kind in wanted)


def _outside_checkpoints() -> contextlib.AbstractContextManager[Any]:
    """Context in which what gradients need is kept, also where layers are computed once more.

    Nothing is collected then, so that there would be less than a checkpoint counted before.
    """
    if torch.compiler.is_compiling():
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)


def _without_mask(
    query: Tensor, key: Tensor, causal: bool, sliding_window: int | None
) -> tuple[dict[str, Any], int]:
    """Options where the model gives no mask, and how many keys they are for.

    One query is the last and sees all keys; several that are causal begin at the first key, as in
    a cache that is not full yet. Others end at the last key.
    """
    len_q, len_kv = query.shape[-2], key.shape[-2]
    options: dict[str, Any] = {}
    if sliding_window is not None and sliding_window <= len_kv:
        options["window"] = (sliding_window - 1, 0 if causal else sliding_window - 1)
        options["q_offset"] = len_kv - len_q
    if not causal or len_q == 1:
        return options, len_kv
    return options | {"causal": True, "q_offset": 0}, min(len_q, len_kv)


def _with_mask(
    query: Tensor, key: Tensor, mask: Tensor | Visible
) -> tuple[dict[str, Any], int]:
    """Options for what the model gives as its mask, and how many keys they are for."""
    len_q, len_kv = query.shape[-2], key.shape[-2]
    if isinstance(mask, Visible):
        if mask.shape[-2:] != (len_q, len_kv):
            raise value_error(
                f"the mask must be for len_q = {len_q} and len_kv = {len_kv}",
                tuple(mask.shape), "Use attn_implementation='sdpa' or 'eager' for this model.",
            )
        return dict(mask.options), mask.end
    if not isinstance(mask, Tensor):
        raise type_error(
            "attention_mask must be None, a tensor, or what transformers makes for "
            "attn_implementation='scaledot'", type(mask).__name__,
            "Pass the tokenizer's mask (batch, len) to the model.",
        )
    if mask.is_floating_point():
        return {"bias": mask}, len_kv
    return {"mask": mask if mask.dtype == torch.bool else mask != 0}, len_kv


def _sequences(
    query: Tensor, key: Tensor, of_queries: Tensor, of_keys: Tensor | None, options: dict[str, Any]
) -> dict[str, Any]:
    """Options for packed sequences that are given by their bounds (number + 1,)."""
    if of_keys is not None and of_keys is not of_queries:
        _check_same(of_queries, of_keys)
    if "segment_ids" in options:  # transformers found them by the positions
        return {}
    len_q, len_kv = query.shape[-2], key.shape[-2]
    if len_q != len_kv:
        raise value_error(
            "packed queries must be as many as their keys", f"{len_q} and {len_kv}",
            "Leave cu_seq_lens_q out and pass attention_mask.",
        )
    places = torch.arange(len_q, device=query.device)
    return {"segment_ids": torch.bucketize(places, of_queries[1:], right=True)}


def _check_same(of_queries: Tensor, of_keys: Tensor) -> None:
    """Raise where keys are packed otherwise than queries; in a graph only numbers are compared."""
    if of_keys.shape == of_queries.shape and (
        torch.compiler.is_compiling() or not bool((of_keys != of_queries).any())
    ):
        return
    raise value_error(
        "cu_seq_lens_k must equal cu_seq_lens_q", "other bounds",
        "Leave both out and pass attention_mask.",
    )


def _scores(
    softcap: float | None, sinks: Tensor | None, bias: Tensor | None, options: dict[str, Any],
    end: int,
) -> dict[str, Any]:  # fmt: skip
    """Options that change scores, of those that are given; a bias is for the first end keys."""
    given: dict[str, Any] = {"softcap": softcap, "sinks": sinks}
    if bias is not None:
        bias = bias[..., :end] if bias.shape[-1] > 1 else bias
        given["bias"] = bias + options["bias"] if "bias" in options else bias
    if sinks is not None and sinks.ndim != 1:
        raise value_error(
            "s_aux must hold one sink for each head", tuple(sinks.shape),
            "Use attn_implementation='eager' for this model.",
        )
    return {name: x for name, x in given.items() if x is not None}
