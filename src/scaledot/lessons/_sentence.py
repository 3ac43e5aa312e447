"""The bundled sentence: queries, keys and values of every head of a real pretrained BERT."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, eq=False)
class Sentence:
    """One sentence inside all heads of a model; arrays are (num_layers, num_heads, len, d_k)."""

    query: npt.NDArray[np.float32]
    key: npt.NDArray[np.float32]
    value: npt.NDArray[np.float32]
    tokens: tuple[str, ...]
    sentence: str
    model: str
    source: str
    licence: str


@functools.cache
def load() -> Sentence:
    """Read the bundled file once; its arrays are read-only, because every caller shares them."""
    with files("scaledot").joinpath("data", "minilm.npz").open("rb") as stream:
        data: dict[str, npt.NDArray[Any]] = dict(np.load(stream, allow_pickle=False))
    for array in data.values():
        array.flags.writeable = False
    return Sentence(
        query=data["query"],
        key=data["key"],
        value=data["value"],
        tokens=tuple(map(str, data["tokens"])),
        sentence=str(data["sentence"]),
        model=str(data["model"]),
        source=str(data["source"]),
        licence=str(data["licence"]),
    )
