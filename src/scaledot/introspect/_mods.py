"""Users' functions of other array libraries, for NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from scaledot import _arrays


@dataclass(frozen=True)
class ForeignMod:
    """A ``score_mod`` or ``mask_mod`` that is called with arrays of the library it is written for.

    A layer holds NumPy arrays, whatever `look` was given. PyTorch's are made on ``device``, where
    tensors that the function uses lie as well.
    """

    function: Callable[..., Any]
    library: str
    device: Any = None

    def __call__(self, *arguments: Any) -> Any:
        """Value of the function, in NumPy where the arguments are."""
        if not any(isinstance(x, (np.ndarray, np.generic)) for x in arguments):
            return self.function(*arguments)
        found = self.function(*(self._theirs(np.asarray(x)) for x in arguments))
        return found if _arrays.library(found) is None else _arrays.host(found)

    def _theirs(self, x: np.ndarray[Any, Any]) -> Any:
        if self.library == "torch":
            import torch

            # A copy: PyTorch warns about read-only memory, which positions may have.
            return torch.tensor(x, device=self.device)
        if self.library == "jax":
            import jax

            return jax.numpy.asarray(x)
        import array_api_strict

        return array_api_strict.asarray(x)


def for_numpy(name: str, option: Any, query: Any) -> Any:
    """Return an option that was given beside query, (num_heads, len_q, d_k), for NumPy arrays.

    Functions of numbers, which only kernels take, are the same for all libraries.
    """
    library = _arrays.library(query)
    if name not in ("score_mod", "mask_mod") or library == "numpy":
        return option
    functions = option if isinstance(option, tuple) else (option,)
    device = query.device if library == "torch" else None
    foreign = tuple(ForeignMod(function, str(library), device) for function in functions)
    if not all(_takes_arrays(mod, name) for mod in foreign):
        return option
    return foreign if isinstance(option, tuple) else foreign[0]


def _takes_arrays(mod: ForeignMod, name: str) -> bool:
    """Whether a function can be called with arrays of its library, rather than with numbers."""
    one, two = np.zeros((1, 1, 1, 1), np.int64), np.zeros((1, 1, 2, 1), np.int64)
    places = (one, one, two, two.swapaxes(-1, -2))  # of the batch, head, query and key
    scores = (np.zeros((1, 1, 2, 2), np.float32),) if name == "score_mod" else ()
    try:
        mod(*scores, *places)
    except Exception:  # of any kind: it is the user's
        return False
    return True
