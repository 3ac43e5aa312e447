"""Two ways to score a pair: an inner product, or a small network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from scaledot import plot
from scaledot._attention import attention
from scaledot._explain import explain
from scaledot._family import additive_attention
from scaledot.lessons._measure import best_seconds
from scaledot.lessons._page import Table


@dataclass(frozen=True, eq=False)
class Additive:
    """Result of `additive`; ``dot_*`` and ``additive_*`` side by side.

    Outputs are (len, d_v), ``flops`` floating-point operations with tanh counted as one,
    ``seconds`` the shortest of 20.
    """

    title: ClassVar[str] = "Additive: a network for each pair, or one inner product"
    text: ClassVar[str] = (
        "Additive attention scores a pair with a one-layer network, v·tanh(W·q + U·k). It "
        "can learn any comparison, but a tanh for every pair and hidden unit cannot be written as "
        "a matrix product. The inner product has no parameters and is one matrix product, which "
        "processors do best. Both then take the same softmax and the same mean of the values."
    )
    length: int
    d_k: int
    hidden: int
    dot_out: npt.NDArray[np.float64]
    additive_out: npt.NDArray[np.float64]
    dot_parameters: int
    additive_parameters: int
    dot_flops: int
    additive_flops: int
    dot_seconds: float
    additive_seconds: float

    def tables(self) -> tuple[Table, ...]:
        """Return results, parameters, operations and time of both."""
        rows = (
            ("first numbers", _start(self.dot_out), _start(self.additive_out)),
            ("parameters", f"{self.dot_parameters:,}", f"{self.additive_parameters:,}"),
            ("operations", f"{self.dot_flops:,}", f"{self.additive_flops:,}"),
            ("time", f"{self.dot_seconds * 1e3:.3f} ms", f"{self.additive_seconds * 1e3:.3f} ms"),
        )
        caption = f"{self.length} tokens, d_k = {self.d_k}, {self.hidden} hidden units, float64"
        return (Table(("", "inner product", "additive"), rows, caption),)

    def plot(self, ax: plot.Axes | None = None) -> plot.Axes:
        """Draw operations and time of the additive form as multiples of the inner product's."""
        operations = self.additive_flops / self.dot_flops
        seconds = self.additive_seconds / self.dot_seconds
        return plot.bars(
            ["operations", "time"],
            {"inner product": (1.0, 1.0), "additive": (operations, seconds)},
            digits=1,
            y_label="inner product = 1",
            title="Cost of two ways to score a pair",
            ax=ax,
        )


def additive() -> Additive:
    """Compare dot-product and additive attention on the same input.

    Returns
    -------
    Additive
        Results, number of parameters, operations and measured time for 128 tokens, 64 wide, with
        64 hidden units and random parameters.

    References
    ----------
    Additive attention: arXiv 1409.0473. Compared: arXiv 1706.03762, section 3.2.1.
    """
    length, d_k, hidden = 128, 64, 64
    rng = np.random.default_rng(0)
    query, key, value = rng.standard_normal((3, length, d_k))
    w_q, w_k = rng.standard_normal((2, hidden, d_k)) / np.sqrt(d_k)
    v = rng.standard_normal(hidden)

    def by_product() -> npt.NDArray[np.float64]:
        return attention(query, key, value)

    def by_network() -> npt.NDArray[np.float64]:
        return np.asarray(additive_attention(query, key, value, w_q, w_k, v))

    # For each pair and hidden unit: one addition, one tanh, one product and one sum with v.
    scoring = length * length * hidden * 4 + 2 * (2 * length * d_k * hidden)
    return Additive(
        length=length,
        d_k=d_k,
        hidden=hidden,
        dot_out=by_product(),
        additive_out=by_network(),
        dot_parameters=0,
        additive_parameters=w_q.size + w_k.size + v.size,
        dot_flops=explain(query, key, value).flops,
        additive_flops=scoring + 2 * length * length * d_k,
        dot_seconds=best_seconds(by_product, 20),
        additive_seconds=best_seconds(by_network, 20),
    )


def _start(out: npt.NDArray[np.float64]) -> str:
    """First numbers of the first row."""
    return "  ".join(f"{number:.3f}" for number in out[0, :3])
