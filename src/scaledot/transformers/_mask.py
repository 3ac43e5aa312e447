"""What transformers hands to attention as its mask: positions and lengths instead of a matrix."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

from scaledot._errors import type_error, value_error
from scaledot.transformers._model import adds_masks, check
from scaledot.transformers._pattern import MaskFunction, Pattern, recognised


@dataclass(frozen=True, eq=False)
class Visible:
    """Which keys each query sees, as options of `scaledot.attention`.

    It stands for a boolean tensor (batch, 1, len_q, len_kv), True = may be seen, and has its shape
    and dtype. Any other use of it, by an operator, a method or a function of PyTorch, is one of
    that tensor, which is made then: quadratic in the length, but right. Two uses raise: changing
    it in place, as a tensor that is made each time would lose the change; and adding it to
    floating-point numbers, subtracting or multiplying it, as code does that takes it for a mask
    of 0 and -inf.

    Attributes
    ----------
    shape : torch.Size
        (batch, 1, len_q, len_kv).
    device : torch.device
        Of its tensors.
    options : dict
        Of `scaledot.attention`, for the first ``end`` keys.
    end : int
        No query sees a key from here on.
    """

    shape: torch.Size
    device: torch.device
    options: dict[str, Any]
    end: int
    dtype: torch.dtype = field(default=torch.bool, init=False)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def to(self, *args: Any, **options: Any) -> Any:
        """Itself where only a device is asked for that it is on, else a boolean tensor, moved."""
        wanted = torch.empty(0, dtype=self.dtype, device=self.device).to(*args, **options)
        if (wanted.dtype, wanted.device) == (self.dtype, self.device):
            return self
        return self.dense().to(*args, **options)

    def dense(self) -> Tensor:
        """The boolean tensor (batch, 1, len_q, len_kv)."""
        batch, _, len_q, len_kv = self.shape
        given = self.options
        keys = torch.arange(self.end, device=self.device)
        ahead = keys - torch.arange(len_q, device=self.device)[:, None] - given.get("q_offset", 0)
        seen = torch.ones(batch, 1, len_q, self.end, dtype=torch.bool, device=self.device)
        if given.get("causal"):
            seen = seen & (ahead <= 0)
        left, right = given.get("window") or (None, None)
        if left is not None:
            seen = seen & (ahead >= -left)
        if right is not None:
            seen = seen & (ahead <= right)
        if "kv_len" in given:
            lengths = torch.as_tensor(given["kv_len"], device=self.device)
            seen = seen & (keys < lengths.reshape(-1, 1, 1, 1))
        if "mask" in given:
            seen = seen & given["mask"]
        if "segment_ids" in given:
            q_ids, kv_ids = (ids[:, None] for ids in given["segment_ids"])
            seen = seen & (q_ids[..., None] == kv_ids[..., None, :]) & (kv_ids >= 0)[..., None, :]
        return torch.nn.functional.pad(seen, (0, len_kv - self.end))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(name)
        if _changes(name):
            raise _in_place(name)

        def method(*args: Any, **options: Any) -> Any:
            return self.__torch_function__(found, (type(self),), (self, *args), options)

        found = getattr(Tensor, name)
        return method if callable(found) else getattr(self.dense(), name)

    def __bool__(self) -> bool:
        return bool(self.dense())

    def __getitem__(self, index: Any) -> Visible | Tensor:
        rows = _rows_alone(index, self.shape[-2])
        return self.dense()[index] if rows is None else self._of(rows)

    def _of(self, rows: slice) -> Visible:
        """The same for some of the queries, one after another."""
        options = dict(self.options)
        if "q_offset" in options:
            options["q_offset"] = options["q_offset"] + rows.start
        if "segment_ids" in options:
            of_queries, of_keys = options["segment_ids"]
            options["segment_ids"] = of_queries[:, rows], of_keys
        if "mask" in options and options["mask"].shape[-2] > 1:
            options["mask"] = options["mask"][:, :, rows]
        shape = torch.Size((*self.shape[:2], rows.stop - rows.start, self.shape[-1]))
        return Visible(shape, self.device, options, self.end)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function of PyTorch with the tensor itself."""
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if isinstance(kwargs.get("out"), Visible) or (
            _changes(name) and args and isinstance(args[0], Visible)
        ):
            raise _in_place(name)
        if name.strip("_") in _ARITHMETIC:
            _check_no_float((*args, *kwargs.values()))
        return function(*_dense(args), **_dense(kwargs))


def _rows_alone(index: Any, length: int) -> slice | None:
    """Queries that an index takes if it takes all else, as models do that keep few tokens."""
    if not (isinstance(index, tuple) and len(index) in (3, 4)):
        return None
    before, rows, keys = index[:2], index[2], index[3:]
    if not all(isinstance(part, slice) for part in index):
        return None
    if any(part != slice(None) for part in (*before, *keys)):
        return None
    start, stop, step = rows.indices(length)
    return slice(start, stop) if step == 1 and start < stop else None


def _dense(x: Any) -> Any:
    """Arguments with every `Visible` among them as a tensor."""
    if isinstance(x, Visible):
        return x.dense()
    if isinstance(x, (list, tuple)):
        return type(x)(map(_dense, x))
    return {name: _dense(item) for name, item in x.items()} if isinstance(x, dict) else x


_ARITHMETIC = frozenset(
    front + name
    for name in ("add", "sub", "mul", "subtract", "multiply") for front in ("", "r", "i")
)  # fmt: skip
"""Functions and methods of PyTorch, without underscores, that no boolean mask is right in."""


def _changes(name: str) -> bool:
    """Whether a method of tensors changes what it is called on, by its name."""
    return name.endswith("_") and not name.startswith("__")


def _in_place(name: str) -> TypeError:
    return type_error(
        "the mask of attn_implementation='scaledot' must not be changed in place", name,
        "Use the function that returns a new tensor.",
    )  # fmt: skip


def _check_no_float(operands: tuple[Any, ...]) -> None:
    """Raise where a boolean mask meets floating-point numbers in a sum or a product."""
    for x in operands:
        if isinstance(x, float) or (isinstance(x, Tensor) and x.is_floating_point()):
            raise type_error(
                "the mask of attn_implementation='scaledot' must not be added or multiplied, being "
                "boolean (True = may be seen)", "floating-point numbers beside it",
                "This model has an attention of its own: use 'eager' or 'sdpa'.",
            )


def _operator(name: str) -> Any:
    """An operator of tensors, by the name of its method."""

    def operate(self: Visible, *others: Any) -> Any:
        return self.__torch_function__(getattr(Tensor, name), (Visible,), (self, *others))

    return operate


for _name in ("add", "and", "eq", "mul", "ne", "or", "radd", "rand", "rmul", "ror", "rsub", "xor",
              "sub", "invert"):  # fmt: skip
    setattr(Visible, f"__{_name}__", _operator(f"__{_name}__"))


def mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: int | Tensor = 0, kv_offset: int = 0,
    mask_function: MaskFunction = causal_mask_function,
    attention_mask: Tensor | Visible | None = None, local_size: int | None = None,
    allow_is_causal_skip: bool = True, allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False, device: torch.device | str = "cpu", config: Any = None, **others: Any,
) -> Visible | Tensor | None:  # fmt: skip
    """Mask function of transformers: what is seen, as little of it as has to be said.

    The arguments are those of ``transformers.masking_utils.sdpa_mask``. A single query gets that
    one's mask, which is linear in the length. So does whatever is not recognised, in a `Visible`
    unless a graph is made, so that no model adds it to its scores. Several queries that see keys
    causally never get None: models cut rows out of masks, and what is_causal says is about all
    rows.
    """
    check(config)
    _refuse_unknown(others)
    if isinstance(attention_mask, Visible):
        return attention_mask  # prepared before, by `generate`
    given: dict[str, Any] = {
        "batch_size": batch_size, "q_length": q_length, "kv_length": kv_length,
        "q_offset": q_offset, "kv_offset": kv_offset, "mask_function": mask_function,
        "attention_mask": attention_mask, "local_size": local_size, "use_vmap": use_vmap,
        "allow_is_bidirectional_skip": allow_is_bidirectional_skip, "device": device,
    }  # fmt: skip
    if adds_masks(config):
        numbers: Tensor | None = eager_mask(**given, dtype=others.get("dtype") or torch.float32)
        return numbers
    pattern = None if use_vmap or q_length == 1 or _is_exported() else recognised(mask_function)
    if pattern is None:
        made: Tensor | None = sdpa_mask(
            **given, allow_is_causal_skip=allow_is_causal_skip and q_length == 1
        )
        if made is None or q_length == 1 or torch.compiler.is_compiling() or _is_exported():
            return made
        return Visible(made.shape, made.device, {"mask": made}, kv_length)
    if isinstance(q_offset, Tensor) and not torch.compiler.is_compiling():
        q_offset = int(q_offset)
    first = q_offset - kv_offset  # place of the first query among the keys
    options = _by_positions(pattern, first, q_length, kv_length, kv_offset)
    options |= _by_padding(attention_mask, kv_length, kv_offset)
    end = kv_length
    if pattern.causal and not isinstance(first, Tensor):
        end = max(0, min(kv_length, first + q_length))
    if allow_is_bidirectional_skip and _sees_all(pattern, options, kv_length):
        return None
    shape = torch.Size((batch_size, 1, q_length, kv_length))
    return Visible(shape, torch.device(device), _for_keys_before(end, options), end)


def _refuse_unknown(others: dict[str, Any]) -> None:
    """Raise for an argument that may change what the mask means; boolean masks have no dtype."""
    for name, given in others.items():
        if name != "dtype" and given is not None:
            raise value_error(
                f"arguments of masks must be known to scaledot, but {name} is not",
                type(given).__name__, "Use attn_implementation='sdpa' or 'eager' for this model.",
            )


def _is_exported() -> bool:
    """Whether a graph is made that others run: it must hold nothing but tensors."""
    jit: Any = torch.jit
    return torch.compiler.is_exporting() or bool(jit.is_tracing())


def _by_positions(
    pattern: Pattern, first: int | Tensor, q_length: int, kv_length: int, kv_offset: int
) -> dict[str, Any]:
    """Options for a pattern; the first query stands at place ``first`` among the keys."""
    options: dict[str, Any] = {}
    left, right = pattern.left, pattern.right
    if not isinstance(first, Tensor):  # limits that nothing reaches
        left = None if left is not None and left >= first + q_length - 1 else left
        right = None if right is not None and right >= kv_length - 1 - first else right
    if pattern.causal:
        options["causal"] = True
    if left is not None or right is not None:
        options["window"] = (left, right)
    if options:
        options["q_offset"] = first
    ids = _segment_ids(pattern, first, q_length, kv_length, kv_offset)
    return options if ids is None else options | {"segment_ids": ids}


def _segment_ids(
    pattern: Pattern, first: int | Tensor, q_length: int, kv_length: int, kv_offset: int
) -> tuple[Tensor, Tensor] | None:
    """Ids (batch, len) of the chunks and sequences that queries and keys are in."""
    if pattern.packed is not None:
        ids, positions = pattern.packed
        if pattern.chunk is not None:
            size, start = pattern.chunk
            chunk = (positions - start[:, None]).div(size, rounding_mode="floor")
            ids = ids * (1 + chunk.amax()) + chunk
        return ids, ids
    if pattern.chunk is None:
        return None
    size, start = pattern.chunk
    # Before the start there is only padding, whose ids are negative: it sees nothing.
    begin = kv_offset - start[:, None]
    queries = torch.arange(q_length, device=start.device) + begin + first
    keys = torch.arange(kv_length, device=start.device) + begin
    return queries.div(size, rounding_mode="floor"), keys.div(size, rounding_mode="floor")


def _by_padding(padding: Tensor | None, kv_length: int, kv_offset: int) -> dict[str, Any]:
    """Options for a mask (batch, len) of tokens, True = no padding."""
    if padding is None:
        return {}
    missing = kv_length + kv_offset - padding.shape[-1]
    if missing > 0:  # of a cache that is longer than what was seen
        padding = torch.nn.functional.pad(padding, (0, missing))
    padding = padding[:, kv_offset : kv_offset + kv_length]
    if torch.compiler.is_compiling() or isinstance(padding, FakeTensor):  # it has no values yet
        return {"mask": padding[:, None, None, :]}
    if bool(padding.all()):
        return {}
    if bool((padding[:, 1:] & ~padding[:, :-1]).any()):  # begins somewhere in the middle
        return {"mask": padding[:, None, None, :]}
    lengths = padding.sum(-1)
    least, most = lengths.aminmax()
    return {"kv_len": int(most) if least == most else lengths}


def _sees_all(pattern: Pattern, options: dict[str, Any], kv_length: int) -> bool:
    """Whether queries see all keys.

    Not where a window could be taken for one that matters: models tell attention of it as well.
    """
    return not options and (pattern.left is None or pattern.left >= kv_length)


def _for_keys_before(end: int, options: dict[str, Any]) -> dict[str, Any]:
    """Options for the first ``end`` keys alone."""
    options = dict(options)
    if "mask" in options:
        options["mask"] = options["mask"][..., :end]
    if "segment_ids" in options:
        of_queries, of_keys = options["segment_ids"]
        options["segment_ids"] = of_queries, of_keys[:, :end]
    if "kv_len" in options:
        lengths = options["kv_len"]
        most = lengths.clamp(max=end) if isinstance(lengths, Tensor) else min(lengths, end)
        options["kv_len"] = most
    return options
