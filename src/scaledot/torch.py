"""Attention in the shapes that PyTorch users know: a function, a switch and a module.

`scaled_dot_product_attention` has the signature of PyTorch's, `patched` routes calls of that one
to it, `MultiheadAttention` takes the place of ``torch.nn.MultiheadAttention``, and `exchanged` puts
it there in a model that exists. All compute on the CPU by `scaledot.attention`; tensors elsewhere
are left to PyTorch.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator
from typing import Any

from scaledot import _checks, attention, attention_weights
from scaledot._errors import missing_extra, type_error, value_error

try:
    import torch
except ImportError:
    raise missing_extra("torch", "torch") from None

from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from scaledot._torch_calls import autocast_dtype, cast, is_ours, no_autocast, no_fast_path, seeds
from scaledot._torch_exchange import calls_are_seen, exchanged_modules

__all__ = ["MultiheadAttention", "exchanged", "patched", "scaled_dot_product_attention"]

# PyTorch's own, under whatever name it is called: mode handlers see this object.
_of_pytorch = functional.scaled_dot_product_attention


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention with the arguments of ``torch.nn.functional.scaled_dot_product_attention``.

    ``softmax(Q Kᵀ · scale + attn_mask) V``, in linear memory.

    Parameters
    ----------
    query : tensor, shape (..., num_heads, len_q, d_k)
        On the CPU; tensors on other devices go to PyTorch's function as they are. Two axes
        ``(len, d)`` and three ``(batch, len, d)`` serve too.
    key, value : tensor, shape (..., num_heads, len_kv, d_k) and (..., num_heads, len_kv, d_v)
        All axes before ``len`` broadcast.
    attn_mask : tensor, optional
        Boolean, True = may be seen; or floating-point, of query's dtype or float32, added to the
        scores. Broadcasts to ``(..., num_heads, len_q, len_kv)``.
    dropout_p : float
        Probability of dropping a weight. The seeds are drawn from PyTorch's generator, one
        number for each entry of the leading axes; 0 draws nothing.
    is_causal : bool
        Query i sees keys 0 to i (aligned at the start: ``q_offset=0`` of `scaledot.attention`).
        Not together with ``attn_mask``.
    scale : float, optional
        None is ``1/√d_k``.
    enable_gqa : bool
        Allow fewer heads of key and value than of query: each serves a group of neighbours.

    Returns
    -------
    tensor, shape (..., num_heads, len_q, d_v)
        In query's dtype, under autocast in that of autocast.

    Raises
    ------
    TypeError, ValueError
        What is not a tensor, dtypes or shapes that do not fit, ``is_causal`` with ``attn_mask``.

    Notes
    -----
    A floating-point ``attn_mask`` has a gradient too. Autocast casts query, key and value as for
    PyTorch's function, but not the mask. A row that sees nothing is 0, as there. Nested tensors
    and classes with a ``__torch_function__`` (``torch.nn.attention.bias``) are left to PyTorch.

    References
    ----------
    arXiv 1706.03762, 2205.14135.

    Examples
    --------
    >>> import torch, scaledot.torch
    >>> x = torch.eye(3)
    >>> scaledot.torch.scaled_dot_product_attention(x, x, x, is_causal=True)[0]
    tensor([1., 0., 0.])
    """
    if not is_ours(query=query, key=key, value=value, attn_mask=attn_mask):
        return _of_pytorch(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    query, key, value = cast(query, key, value)
    query, key, value = _with_equal_heads(query, key, value, enable_gqa)
    mask, bias = _mask_or_bias(query, attn_mask)
    if is_causal and attn_mask is not None:
        raise value_error(
            "attn_mask must be None where is_causal=True", f"attn_mask {tuple(attn_mask.shape)}",
            "Put both into one mask, or call scaledot.attention(..., causal=True, q_offset=0).",
        )
    return _attended(
        query, key, value, mask=mask, bias=bias, causal=is_causal, dropout_p=dropout_p, scale=scale
    )


def _with_equal_heads(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Check the numbers of heads; expand those of length 1 that `scaledot.attention` would not."""
    tensors = (query, key, value)
    heads = [x.shape[-3] if x.dim() > 2 else 1 for x in tensors]
    given = functools.partial(_checks.shapes, query=query, key=key, value=value)
    if enable_gqa:
        if heads[1] != heads[2] or heads[0] % max(heads[1], 1):
            raise value_error(
                "with enable_gqa=True key and value must have equally many heads, a divisor of "
                "query's", given(), _checks.AXES,
            )  # fmt: skip
        return query, key, value
    most = max(heads) if min(heads) else 0  # 1 broadcasts to 0
    if any(count not in (1, most) for count in heads):
        raise value_error(
            "query, key and value must have equally many heads, or 1", given(),
            "Pass enable_gqa=True where heads of key and value each serve several of query.",
        )
    if heads[1] == heads[2] and heads[0] == most:
        return tensors
    query, key, value = (x.expand(*x.shape[:-3], most, *x.shape[-2:]) for x in tensors)
    return query, key, value


def _mask_or_bias(query: Tensor, attn_mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return attn_mask as what is seen or as what is added."""
    if attn_mask is None or attn_mask.dtype == torch.bool:
        return attn_mask, None
    fit = [torch.float32, query.dtype]
    fit += [] if autocast_dtype(query.device) is None else [torch.float16, torch.bfloat16]
    if attn_mask.dtype in fit:
        return None, attn_mask
    raise type_error(
        "attn_mask must be boolean, float32 or of query's dtype",
        f"{attn_mask.dtype} beside {query.dtype}", "Convert it with .to(query.dtype) or != 0.",
    )


def _attended(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, bias: Tensor | None,
    causal: bool, dropout_p: float, scale: float | None = None,
) -> Tensor:  # fmt: skip
    """`scaledot.attention` from position 0, with seeds of PyTorch's generator."""
    seed = seeds(query, key, value) if dropout_p else None
    with no_autocast(query.device):
        return attention(
            query, key, value, causal=causal, mask=mask, bias=bias, scale=scale, dropout=dropout_p,
            seed=seed, q_offset=0,
        )  # fmt: skip


def _routed(*args: Any, **options: Any) -> Tensor:
    """Answer a call of PyTorch's function by ours."""
    with contextlib.suppress(TypeError, ValueError):
        return scaled_dot_product_attention(*args, **options)
    # What is no call of ours is PyTorch's to answer, by a result or by its own error.
    return _of_pytorch(*args, **options)


_heads_of_pytorch = functional.multi_head_attention_forward
# A mode rests while it answers a call, so it would miss the one within this function: a copy of
# the function calls ours by name.
_names = _heads_of_pytorch.__globals__ | {"scaled_dot_product_attention": _routed}
_heads_routed = types.FunctionType(
    _heads_of_pytorch.__code__, _names, argdefs=_heads_of_pytorch.__defaults__
)


class _Routed(TorchFunctionMode):
    """Answers calls of PyTorch's attention while it is on the stack of a thread."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ours instead of PyTorch's attention; anything else goes on as it is."""
        if func is _of_pytorch or func is _heads_of_pytorch:
            func = _routed if func is _of_pytorch else _heads_routed
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def patched() -> Iterator[None]:
    """Route calls of PyTorch's ``scaled_dot_product_attention`` to this package's.

    Within ``with patched():`` models compute their attention by `scaled_dot_product_attention`
    here, also where they imported PyTorch's function by name.

    Yields
    ------
    None

    Notes
    -----
    It holds for the thread that enters it, and may be nested. The native inference path of
    ``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer``, which would not call the
    function, is off while any thread of the process is inside, and as before afterwards.
    PyTorch's function still answers for other devices, nested tensors, classes with rules of
    their own, ``is_causal`` with ``attn_mask``, and calls that are errors, which it raises.
    ``nn.MultiheadAttention`` asked for its weights does not call it.

    Examples
    --------
    >>> import torch, scaledot.torch
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> with scaledot.torch.patched(), torch.no_grad():
    ...     layer(torch.zeros(1, 5, 8)).shape
    torch.Size([1, 5, 8])
    """
    with no_fast_path.scope(), _Routed():
        yield


class MultiheadAttention(torch.nn.MultiheadAttention):
    """``torch.nn.MultiheadAttention`` with the attention of this package.

    ``Concat(head_1, …, head_h) W_o`` with ``head_i = attention(Q W_q, K W_k, V W_v)``. It is a
    subclass with the same parameters, so that state dicts load both ways.

    Parameters
    ----------
    embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first
        As in ``torch.nn.MultiheadAttention``; so are ``device`` and ``dtype``.

    Notes
    -----
    Differences from PyTorch's: a sample whose keys are all padding gives weights 0 and the
    output projection's bias, where PyTorch may give nan; weights returned in training are those
    before dropout; the native inference path is not taken. With ``need_weights=False`` memory is
    linear in the length but for the masks given. Other devices are left to PyTorch's module.

    Examples
    --------
    >>> import torch, scaledot.torch
    >>> module = scaledot.torch.MultiheadAttention(8, 2, batch_first=True)
    >>> x = torch.zeros(1, 5, 8)
    >>> output, weights = module(x, x, x)
    >>> output.shape, weights.shape
    (torch.Size([1, 5, 8]), torch.Size([1, 5, 5]))
    """

    def _reset_parameters(self) -> None:
        """Initialize the parameters; called at the end of PyTorch's constructor too."""
        super()._reset_parameters()
        if calls_are_seen not in self._forward_pre_hooks.values():
            self.register_forward_pre_hook(calls_are_seen)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return attention's output and, with ``need_weights``, its weights; None without.

        Parameters
        ----------
        query, key, value : tensor, shape (len, batch, width), or (batch, len, width)
            The second with ``batch_first``; (len, width) is one sample.
        key_padding_mask : tensor, shape (batch, len_kv) or (len_kv,), optional
            Boolean, **True = left out**; or floating-point, added to the scores.
        need_weights, average_attn_weights : bool
            Whether to compute weights, quadratic in the length, and their mean over the heads.
        attn_mask : tensor, shape (len_q, len_kv) or (batch * num_heads, len_q, len_kv), optional
            Like ``key_padding_mask``.
        is_causal : bool
            Says that ``attn_mask`` is the causal one, so that it need not be read.
        """
        alone = query is key is value and key_padding_mask is attn_mask is None
        if query.is_nested and query.device.type == "cpu" and alone:
            return self._of_nested(query, need_weights), None
        masks = {"attn_mask": attn_mask, "key_padding_mask": key_padding_mask}
        if not is_ours(query=query, key=key, value=value, **masks):
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask,
                average_attn_weights, is_causal,
            )  # fmt: skip
        self._check(query, key, value, attn_mask, is_causal)
        batched = query.dim() == 3
        if not batched:
            axis = 0 if self.batch_first else 1
            # What was one tensor stays one, so that it is projected once.
            rows = {id(x): x.unsqueeze(axis) for x in (query, key, value)}
            query, key, value = rows[id(query)], rows[id(key)], rows[id(value)]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        q, k, v = cast(*self._projected(query, key, value))
        len_kv = k.shape[-2]
        k, v = self._appended(k, v)
        # Positions cannot stand for the mask where it shows keys that were appended.
        causal = is_causal and key_padding_mask is None and not need_weights
        causal = causal and k.shape[-2] == len_kv
        terms = self._masks(q, len_kv, None if causal else attn_mask, key_padding_mask)
        mask, bias = (_widened(x, k.shape[-2]) for x in terms)
        dropout_p = self.dropout if self.training else 0.0
        output = self._joined(
            _attended(q, k, v, mask=mask, bias=bias, causal=causal, dropout_p=dropout_p)
        )
        weights = None
        if need_weights:
            with no_autocast(q.device):
                weights = attention_weights(q, k, mask=mask, bias=bias).to(q.dtype)
            weights = weights.mean(dim=1) if average_attn_weights else weights
        if batched:
            return output, weights
        return output.squeeze(axis), None if weights is None else weights.squeeze(0)

    def _check(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool
    ) -> None:
        """Raise unless all have two axes, or three and one batch, and a hint has its mask."""
        given = functools.partial(_checks.shapes, query=query, key=key, value=value)
        batch = 0 if self.batch_first else 1
        if query.dim() not in (2, 3) or not query.dim() == key.dim() == value.dim():
            raise value_error(
                "query, key and value must have three axes each, or two each", given(),
                "Without a batch pass (len, width).",
            )
        sizes = [x.shape[batch] for x in (query, key, value)]
        if query.dim() == 3 and not sizes[0] == sizes[1] == sizes[2]:
            raise value_error(
                f"query, key and value must have the same batch (axis {batch})", given(),
                f"This module has batch_first={self.batch_first}.",
            )
        if is_causal and attn_mask is None:
            raise value_error(
                "is_causal must come with the attn_mask that it describes", "attn_mask=None",
                "Use nn.Transformer.generate_square_subsequent_mask(len_q).",
            )

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Return queries, keys and values of all heads, (batch, num_heads, len, head_dim)."""
        packed, bias = self.in_proj_weight, self.in_proj_bias
        if packed is not None and query is key is value:
            return [self._heads(x) for x in functional.linear(query, packed, bias).chunk(3, -1)]
        weights: Any = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        weights = weights if packed is None else packed.chunk(3)
        biases = (None, None, None) if bias is None else bias.chunk(3)
        return [
            self._heads(functional.linear(x, w, b))
            for x, w, b in zip((query, key, value), weights, biases, strict=True)
        ]

    def _heads(self, x: Tensor) -> Tensor:
        """Cut the width into heads: a view of (batch, num_heads, len, head_dim)."""
        x = x.view(*x.shape[:-1], self.num_heads, self.head_dim)
        return x.transpose(1, 2) if self.batch_first else x.permute(1, 2, 0, 3)

    def _joined(self, out: Tensor) -> Tensor:
        """Join the heads and project: (batch, len, E), or (len, batch, E)."""
        out = out.transpose(1, 2) if self.batch_first else out.permute(2, 0, 1, 3)
        return functional.linear(out.flatten(-2), self.out_proj.weight, self.out_proj.bias)

    def _appended(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values with the learned ones and those of zeros behind them."""
        shape = (k.shape[0], self.num_heads, 1, self.head_dim)
        if self.bias_k is not None and self.bias_v is not None:
            learned = [
                x.view(self.num_heads, 1, self.head_dim).to(k.dtype).expand(shape)
                for x in (self.bias_k, self.bias_v)
            ]
            k, v = (torch.cat(pair, dim=2) for pair in zip((k, v), learned, strict=True))
        if self.add_zero_attn:
            k, v = (torch.cat([x, x.new_zeros(shape)], dim=2) for x in (k, v))
        return k, v

    def _masks(
        self, q: Tensor, len_kv: int, attn_mask: Tensor | None, key_padding_mask: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return what may be seen and what is added, (batch or 1, num_heads or 1, ...)."""
        batch, num_heads, len_q, _ = q.shape
        one = (len_q, len_kv)
        given = []
        if attn_mask is not None:
            _check_mask("attn_mask", attn_mask, one, (batch * num_heads, *one))
            alike = attn_mask.dim() == 2
            given.append(attn_mask if alike else attn_mask.view(batch, num_heads, *one))
        if key_padding_mask is not None:
            _check_mask("key_padding_mask", key_padding_mask, (batch, len_kv))
            given.append(key_padding_mask[:, None, None, :])
        seen = [~x for x in given if x.dtype == torch.bool]
        added = [x for x in given if x.dtype != torch.bool]
        # Two of a kind become one of the size of both; one of each kind stays apart.
        mask = functools.reduce(torch.logical_and, seen) if seen else None
        return mask, functools.reduce(torch.add, added) if added else None

    def _of_nested(self, x: Tensor, need_weights: bool) -> Tensor:
        """Self-attention of a nested tensor, which an encoder makes of padded sequences."""
        if need_weights:
            hint = "Pad the sequences and pass key_padding_mask."
            raise value_error("need_weights must be False for nested tensors", True, hint)
        lengths = [len(sequence) for sequence in x.unbind()]
        padded = x.to_padded_tensor(0.0)  # (batch, len, E)
        padding = torch.arange(padded.shape[1]) >= torch.tensor(lengths)[:, None]
        # Its first axis is the batch, whatever batch_first says.
        padded = padded if self.batch_first else padded.transpose(0, 1)
        output, _ = self.forward(padded, padded, padded, padding, need_weights=False)
        output = output if self.batch_first else output.transpose(0, 1)
        rows = [row[:length] for row, length in zip(output, lengths, strict=True)]
        return torch.nested.as_nested_tensor(rows, layout=x.layout)


def _check_mask(name: str, mask: Tensor, *shapes: tuple[int, ...]) -> None:
    """Raise unless a mask has one of the shapes and is boolean or floating-point."""
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise type_error(
            f"{name} must be boolean (True = left out) or floating-point", mask.dtype, "Use != 0."
        )
    if tuple(mask.shape) not in shapes:
        raise value_error(
            f"{name} must have the shape {' or '.join(map(str, shapes))}", tuple(mask.shape),
            "Axes are (len_q, len_kv) for attn_mask and (batch, len_kv) for key_padding_mask.",
        )


def _widened(x: Tensor | None, len_kv: int) -> Tensor | None:
    """Let a mask or bias see the keys that were appended."""
    if x is None or x.shape[-1] == len_kv:
        return x
    return functional.pad(x, (0, len_kv - x.shape[-1]), value=float(x.dtype == torch.bool))


@contextlib.contextmanager
def exchanged(model: torch.nn.Module, *, need_weights: bool = True) -> Iterator[None]:
    """Let each ``torch.nn.MultiheadAttention`` of a model be this package's `MultiheadAttention`.

    Within ``with exchanged(model):`` the model's modules, at any depth, have this package's class.
    They stay the same objects, with their parameters, hooks and mode, so that optimizers, state
    dicts and whatever else refers to them go on as before. Afterwards they are PyTorch's again.

    Parameters
    ----------
    model : torch.nn.Module
        What contains them, or one of them.
    need_weights : bool
        False: compute no weights, whatever callers ask for. They get None instead: for models that
        ask, as is the default of PyTorch's module, and do not use them.

    Yields
    ------
    None

    Raises
    ------
    TypeError
        If ``model`` is not a module, or ``need_weights`` not True or False.
    ValueError
        If it contains no module of PyTorch's class itself, or of this one. Nothing is changed then.

    Warns
    -----
    UserWarning
        Of subclasses, and of modules with a ``forward`` of their own, which are left as they are.

    Notes
    -----
    It holds for all threads that run the model, and may be nested. Copies of the model that are
    made inside keep the class.

    Examples
    --------
    >>> import torch, scaledot.torch
    >>> model = torch.nn.TransformerDecoderLayer(8, 2, 16, batch_first=True)
    >>> with scaledot.torch.exchanged(model):
    ...     type(model.self_attn)
    <class 'scaledot.torch.MultiheadAttention'>
    >>> type(model.self_attn)
    <class 'torch.nn.modules.activation.MultiheadAttention'>
    """
    weights = _checks.flag("need_weights", need_weights)
    with exchanged_modules(model, MultiheadAttention, weights):
        yield
