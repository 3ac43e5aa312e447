"""Attention of diffusers' models: a scope for whole pipelines, and a processor for `Attention`.

`patched` computes what any processor asks of PyTorch's function or of diffusers' dispatcher;
`set_processor` exchanges the standard processors for `AttnProcessor`, also those that hold all
weights in memory. Both compute on the CPU; tensors elsewhere are left to PyTorch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import scaledot.torch
from scaledot._errors import missing_extra, type_error, value_error
from scaledot._torch_calls import Shared
from scaledot.torch import scaled_dot_product_attention

try:
    import diffusers  # noqa: F401
except ImportError:
    raise missing_extra("diffusers", "diffusers") from None

import torch
from diffusers.models import attention_processor
from diffusers.models.attention_dispatch import attention_backend
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["AttnProcessor", "patched", "set_processor"]

# Not a scope for each thread: who leaves would set the backend that it found, for all.
_native = Shared(lambda: attention_backend("native"))


@contextlib.contextmanager
def patched() -> Iterator[None]:
    """Compute the attention of diffusers' models by `scaledot.attention`.

    Within ``with patched():`` models and pipelines run with the processors that they have: those
    that call PyTorch's ``scaled_dot_product_attention``, and those that go through diffusers'
    ``dispatch_attention_fn``.

    Yields
    ------
    None

    Notes
    -----
    It is `scaledot.torch.patched`, for the thread that enters it, with diffusers' own
    ``attention_backend("native")``, which holds for all threads: another backend that an
    environment variable or a model has made the active one rests meanwhile. Left as they are:
    processors with a backend of their own (``model.set_attention_backend``; undone by
    ``model.reset_attention_backend()``), and those that write attention out and keep all weights,
    ``diffusers.models.attention_processor.AttnProcessor`` and ``SlicedAttnProcessor``, which
    `set_processor` exchanges.

    Examples
    --------
    >>> import diffusers, scaledot.diffusers, torch
    >>> unet = diffusers.UNet2DModel(
    ...     8, 1, 1, block_out_channels=(8,), norm_num_groups=4, attention_head_dim=4,
    ...     down_block_types=("AttnDownBlock2D",), up_block_types=("AttnUpBlock2D",),
    ... )
    >>> with scaledot.diffusers.patched(), torch.no_grad():
    ...     unet(torch.zeros(1, 1, 8, 8), 0).sample.shape
    torch.Size([1, 1, 8, 8])
    """
    with _native.scope(), scaledot.torch.patched():
        yield


class AttnProcessor:
    """Processor for modules of diffusers' class ``Attention``.

    ``softmax(Q Kᵀ · scale + attention_mask) V`` between the module's own projections, in linear
    memory. What the module has decides its form: without projections for added keys it is self-
    or cross-attention; with those for added keys and values, text is put before the pixels
    (``AttnAddedKVProcessor``); with those for added queries too, image and text attend to both
    together (``JointAttnProcessor2_0``, Stable Diffusion 3).

    Notes
    -----
    Group, spatial, cross-attention and query-key norms, the residual and its factor are applied
    where the standard processors do. ``scale_qk=False`` and fewer heads of keys (``kv_heads``)
    are respected, where ``AttnProcessor2_0`` would ignore them. Scores and softmax are in float32
    or wider, so that ``upcast_attention`` and ``upcast_softmax`` change nothing. A mask is used
    as it is given, not repeated for each head.

    References
    ----------
    arXiv 1706.03762, 2403.03206.

    Examples
    --------
    >>> import torch
    >>> from diffusers.models.attention_processor import Attention
    >>> from scaledot.diffusers import AttnProcessor
    >>> module = Attention(query_dim=8, heads=2, dim_head=4, processor=AttnProcessor())
    >>> module(torch.zeros(1, 5, 8)).shape
    torch.Size([1, 5, 8])
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return what the module's standard processor would; called by ``Attention.forward``.

        Parameters
        ----------
        attn : diffusers.models.attention_processor.Attention
            The module whose projections and norms are used.
        hidden_states : tensor, shape (batch, len_q, width), or (batch, width, ...) for images
            What asks.
        encoder_hidden_states : tensor, shape (batch, len_text, text_width), optional
            What is asked beside or instead of `hidden_states`.
        attention_mask : tensor, shape (batch, 1 or len_q, len_kv), optional
            Boolean, True = may be seen; or floating-point, added to the scores. The first axis
            may be batch * heads, and the second missing. With added keys it may cover those
            alone. Not in joint attention.
        temb : tensor, optional
            For the spatial norm.

        Returns
        -------
        tensor, or a pair of them
            In the shape of `hidden_states`; joint attention to a text returns the text's too.

        Raises
        ------
        ValueError
            A mask in joint attention, or one of the wrong shape.
        """
        if attention_mask is not None:
            _check_mask(attn, hidden_states.shape[0], attention_mask)
        form = _form(attn)
        if form == "plain":
            return _plain(attn, hidden_states, encoder_hidden_states, attention_mask, temb)
        if form == "added keys":
            return _with_added_keys(attn, hidden_states, encoder_hidden_states, attention_mask)
        return _joint(attn, hidden_states, encoder_hidden_states)


# Forms of what processors compute, by their exact classes: subclasses do more.
_EXCHANGED = {
    attention_processor.AttnProcessor: "plain",
    attention_processor.AttnProcessor2_0: "plain",
    attention_processor.SlicedAttnProcessor: "plain",
    attention_processor.AttnAddedKVProcessor: "added keys",
    attention_processor.AttnAddedKVProcessor2_0: "added keys",
    attention_processor.SlicedAttnAddedKVProcessor: "added keys",
    attention_processor.JointAttnProcessor2_0: "joint",
}


def set_processor(model: nn.Module) -> None:
    """Give every attention module of a model an `AttnProcessor`.

    Parameters
    ----------
    model : torch.nn.Module
        A model of diffusers, or any module that contains its ``Attention`` modules. Of a
        pipeline, pass ``pipe.unet`` or ``pipe.transformer``.

    Raises
    ------
    TypeError
        If it is not a module.
    ValueError
        If it contains no ``Attention``, or a processor that computes something else, such as one
        with rotary embeddings, an adapter or fused projections, or one that leaves out projections
        for added keys that its module has. Nothing is changed then.

    Notes
    -----
    ``before = dict(model.attn_processors)`` and ``model.set_attn_processor(before)`` undo it.

    Examples
    --------
    >>> from diffusers.models.attention_processor import Attention
    >>> module = Attention(query_dim=8, heads=2, dim_head=4)
    >>> set_processor(module)
    >>> type(module.processor)
    <class 'scaledot.diffusers.AttnProcessor'>
    """
    if not isinstance(model, nn.Module):
        raise type_error(
            "model must be a torch.nn.Module", type(model).__name__,
            "Of a pipeline, pass pipe.unet or pipe.transformer.",
        )
    # Attention of other classes has a processor too, but not the projections used here.
    modules: dict[str, Any] = {
        name: module for name, module in model.named_modules() if hasattr(module, "processor")
    }
    other = {
        f"{type(module.processor).__name__} at {name or 'the model itself'}"
        for name, module in modules.items()
        if not isinstance(module, attention_processor.Attention)
        or not _is_standard(module)
    }
    if not modules or other:
        raise value_error(
            "model must contain Attention modules, all with standard processors",
            ", ".join(sorted(other)) or "none",
            "Run it as it is within scaledot.diffusers.patched().",
        )
    for module in modules.values():
        module.set_processor(AttnProcessor())


def _form(attn: Any) -> str:
    """What the projections of a module are for: "plain", "added keys" or "joint"."""
    if getattr(attn, "add_k_proj", None) is None:
        return "plain"
    return "added keys" if getattr(attn, "add_q_proj", None) is None else "joint"


def _is_standard(module: Any) -> bool:
    """Whether the processor of a module computes what AttnProcessor does with its projections."""
    kind = type(module.processor)
    if kind is attention_processor.JointAttnProcessor2_0 and _form(module) == "plain":
        # On one stream alone, as in the second attention of a block; it takes no part of these.
        norms = (module.group_norm, module.spatial_norm)
        has_more = module.residual_connection or module.rescale_output_factor != 1
        return norms == (None, None) and not has_more
    return kind is AttnProcessor or _EXCHANGED.get(kind) == _form(module)


def _check_mask(attn: Any, batch: int, mask: Tensor) -> None:
    """Raise unless a mask has an entry for each sample, or for each sample and head."""
    if getattr(attn, "add_q_proj", None) is not None:
        raise value_error(
            "attention_mask must be None in joint attention", tuple(mask.shape),
            "The standard processor would ignore it: leave it out.",
        )
    if mask.dim() < 2 or mask.shape[0] not in (batch, batch * attn.heads):
        raise value_error(
            f"attention_mask must have a first axis of {batch} (batch) or {batch * attn.heads} "
            "(batch * heads)", tuple(mask.shape),
            "Axes are (batch, 1 or len_q, len_kv); expand what all samples share.",
        )  # fmt: skip


def _heads(attn: Any, query: Tensor, *others: Tensor) -> list[Tensor]:
    """Cut (batch, len, width) into (batch, heads, len, d): query's width sets d for all."""
    d = query.shape[-1] // attn.heads
    return [x.reshape(*x.shape[:2], -1, d).transpose(1, 2) for x in (query, *others)]


def _normed(query: Tensor, key: Tensor, of_query: Any, of_key: Any) -> tuple[Tensor, Tensor]:
    """Apply the norms of queries and keys that there are; (batch, heads, len, d)."""
    return query if of_query is None else of_query(query), key if of_key is None else of_key(key)


def _attended(attn: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of (batch, heads, len, d) with heads joined again, (batch, len_q, width)."""
    if mask is not None:
        batch = query.shape[0]
        # One for each sample broadcasts over the heads: (batch, 1, 1 or len_q, len_kv).
        heads = 1 if mask.shape[0] == batch else attn.heads
        mask = mask.reshape(batch, heads, -1, mask.shape[-1])
    out = scaled_dot_product_attention(
        query, key, value, mask, scale=attn.scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out.transpose(1, 2).flatten(-2)


def _projected(attn: Any, x: Tensor) -> Tensor:
    """Apply the projection of the output and its dropout, (batch, len_q, width)."""
    x = attn.to_out[0](x)
    dropped: Tensor = attn.to_out[1](x)
    return dropped


def _group_normed(attn: Any, x: Tensor) -> Tensor:
    """Apply the group norm, if there is one, over the width of (batch, len, width)."""
    if attn.group_norm is None:
        return x
    normed: Tensor = attn.group_norm(x.transpose(1, 2))
    return normed.transpose(1, 2)


def _plain(
    attn: Any, x: Tensor, source: Tensor | None, mask: Tensor | None, temb: Tensor | None
) -> Tensor:
    """Self-attention of x, (batch, len_q, width), or cross-attention to source."""
    residual = x
    if attn.spatial_norm is not None:
        x = attn.spatial_norm(x, temb)
    if residual.dim() == 4:
        x = x.flatten(2).transpose(1, 2)  # pixels in a row: (batch, len_q, width)
    x = _group_normed(attn, x)
    if source is None:
        source = x
    elif attn.norm_cross:
        source = attn.norm_encoder_hidden_states(source)
    query, key, value = _heads(attn, attn.to_q(x), attn.to_k(source), attn.to_v(source))
    query, key = _normed(query, key, attn.norm_q, attn.norm_k)
    x = _projected(attn, _attended(attn, query, key, value, mask))
    if residual.dim() == 4:
        x = x.transpose(1, 2).reshape(residual.shape)
    if attn.residual_connection:
        x = x + residual
    scaled: Tensor = x / attn.rescale_output_factor
    return scaled


def _with_added_keys(attn: Any, x: Tensor, source: Tensor | None, mask: Tensor | None) -> Tensor:
    """Attention of pixels, (batch, width, ...), to a text and, but for text alone, to pixels."""
    residual = x
    x = x.flatten(2).transpose(1, 2)  # (batch, len_q, width)
    if source is None:
        source = x
    elif attn.norm_cross:
        source = attn.norm_encoder_hidden_states(source)
    x = _group_normed(attn, x)
    key, value = attn.add_k_proj(source), attn.add_v_proj(source)
    if not attn.only_cross_attention:
        # (batch, len_text + len_q, width)
        key = torch.cat([key, attn.to_k(x)], dim=1)
        value = torch.cat([value, attn.to_v(x)], dim=1)
    query, key, value = _heads(attn, attn.to_q(x), key, value)
    if mask is not None and mask.shape[-1] == source.shape[1]:
        # A mask of the text says nothing about the pixels: they are seen.
        seen = float(mask.dtype == torch.bool)
        mask = functional.pad(mask, (0, key.shape[-2] - mask.shape[-1]), value=seen)
    x = _projected(attn, _attended(attn, query, key, value, mask))
    return x.transpose(1, 2).reshape(residual.shape) + residual


def _joint(attn: Any, x: Tensor, source: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of image and text, (batch, len, width) each, to both; their outputs apart."""
    query, key, value = _heads(attn, attn.to_q(x), attn.to_k(x), attn.to_v(x))
    query, key = _normed(query, key, attn.norm_q, attn.norm_k)
    if source is None:
        return _projected(attn, _attended(attn, query, key, value, None))
    added = (attn.add_q_proj(source), attn.add_k_proj(source), attn.add_v_proj(source))
    query_of_text, key_of_text, value_of_text = _heads(attn, *added)
    query_of_text, key_of_text = _normed(
        query_of_text, key_of_text, attn.norm_added_q, attn.norm_added_k
    )
    # (batch, heads, len_image + len_text, d)
    query = torch.cat([query, query_of_text], dim=2)
    key = torch.cat([key, key_of_text], dim=2)
    value = torch.cat([value, value_of_text], dim=2)
    out = _attended(attn, query, key, value, None)
    of_image, of_text = out[:, : x.shape[1]], out[:, x.shape[1] :]
    if not attn.context_pre_only:
        of_text = attn.to_add_out(of_text)
    return _projected(attn, of_image), of_text
