"""What reaches queries and keys on the way back, and what training makes of it, by the scale."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from scaledot import plot
from scaledot._gradients import attention_vjp
from scaledot.lessons._page import Table

Floats: TypeAlias = npt.NDArray[Any]

_NUM_SEEDS, _LEN_KV, _D_V = 256, 16, 16
# Training: so many pairs of vectors of so many numbers, and values, for each of so many seeds.
_TRAINED_SEEDS, _NUM_PAIRS, _D_MODEL, _D_K = 7, 16, 32, 256
_RATES = (0.001, 0.01, 0.1, 1.0, 10.0)
_STEPS = tuple(2**i for i in range(8))


@dataclass(frozen=True)
class Trained:
    """Losses of one model under plain gradient descent, medians over seeds.

    Attributes
    ----------
    losses : tuple
        For each of `Backward.rates`, the loss before each of `Backward.steps`; the first is
        that of the random start.
    recalled : tuple
        For each rate, the share of queries that give their own key the largest weight at the end.
    lowest : float
        Smallest last loss of any seed at any rate.
    """

    losses: tuple[tuple[float, ...], ...]
    recalled: tuple[float, ...]
    lowest: float

    @property
    def best(self) -> tuple[float, ...]:
        """The losses at the rate whose last one is smallest."""
        return min(self.losses, key=lambda losses: losses[-1])


@dataclass(frozen=True)
class Backward:
    """Result of `backward`; each tuple of norms has one entry for each width.

    ``query_*`` and ``key_*`` are medians over seeds of the norm of the gradient that reaches one
    query and its keys; ``mean_ratio`` is that of the means of the query's. ``scaled`` and
    ``unscaled`` are models of width ``trained_d_k`` that were trained at each of ``rates``.
    """

    title: ClassVar[str] = "Backward: without the scale the gradient stops arriving"
    text: ClassVar[str] = (
        "On the way back the weights' gradient passes softmax's Jacobian before it reaches Q and "
        "K. With the scale its typical size hardly depends on the width. Without it scores spread "
        "as √d_k, softmax saturates, and for the typical query almost nothing arrives. The "
        "mean does not show it: the few queries whose two best keys nearly tie get a gradient "
        "that is larger by √d_k. Rare and violent is no better for training than absent. A model "
        "that is to find W_q and W_k with which each query finds its key among 16 learns it with "
        "the scale. Without it, from the same numbers, it stays worse than one that always "
        "answers 0, at every step size."
    )
    num_seeds: int
    d_k: tuple[int, ...]
    query_scaled: tuple[float, ...]
    query_unscaled: tuple[float, ...]
    key_scaled: tuple[float, ...]
    key_unscaled: tuple[float, ...]
    mean_ratio: tuple[float, ...]
    trained_seeds: int
    trained_d_k: int
    rates: tuple[float, ...]
    steps: tuple[int, ...]
    scaled: Trained
    unscaled: Trained

    @property
    def query_ratio(self) -> tuple[float, ...]:
        """Unscaled by scaled, medians of the query's gradient."""
        return tuple(
            a / b for a, b in zip(self.query_unscaled, self.query_scaled, strict=True)
        )

    @property
    def key_ratio(self) -> tuple[float, ...]:
        """Unscaled by scaled, medians of the keys' gradient."""
        return tuple(a / b for a, b in zip(self.key_unscaled, self.key_scaled, strict=True))

    def tables(self) -> tuple[Table, ...]:
        """Return the medians for each width and their ratios, and what training came to."""
        columns = zip(
            self.query_scaled, self.query_unscaled, self.query_ratio,
            self.key_scaled, self.key_unscaled, self.key_ratio, self.mean_ratio, strict=True,
        )
        rows = tuple(
            (f"{d_k}", *(f"{number:#.2g}" for number in row))
            for d_k, row in zip(self.d_k, columns, strict=True)
        )
        norms = Table(
            ("d_k", "dQ scaled", "unscaled", "ratio",
             "dK scaled", "unscaled", "ratio", "means"),
            rows,
            f"median norms over {self.num_seeds} seeds, one query, {_LEN_KV} keys; "
            "means: ratio of dQ's means",
        )  # fmt: skip
        return norms, self._training_table()

    def _training_table(self) -> Table:
        """Last losses at each rate, and what was found."""
        columns = zip(
            self.rates, self.scaled.losses, self.unscaled.losses,
            self.scaled.recalled, self.unscaled.recalled, strict=True,
        )
        rows = tuple(
            (f"{rate:g}", f"{scaled[-1]:.4f}", f"{unscaled[-1]:.4f}",
             f"{100 * found:.0f} %", f"{100 * without:.0f} %")
            for rate, scaled, unscaled, found, without in columns
        )  # fmt: skip
        return Table(
            ("step size", "loss scaled", "unscaled", "found scaled", "unscaled"),
            rows,
            f"mean squared error before step {self.steps[-1]} of plain gradient descent, medians "
            f"over {self.trained_seeds} seeds, d_k = {self.trained_d_k}; at the start "
            f"{self.scaled.losses[0][0]:.2f} and {self.unscaled.losses[0][0]:.2f}, about 1 for a "
            f"model that always says 0; lowest of any seed {self.scaled.lowest:.4f} and "
            f"{self.unscaled.lowest:.4f}; found: queries with the largest weight on their key",
        )

    def _draw_norms(self, ax: plot.Axes) -> None:
        """Draw the medians over the width."""
        plot.curves(
            self.d_k,
            {
                "dQ, scaled": self.query_scaled,
                "dQ, unscaled": self.query_unscaled,
                "dK, scaled": self.key_scaled,
                "dK, unscaled": self.key_unscaled,
            },
            x_label="$d_k$",
            y_label="median norm of the gradient",
            title="Gradient that reaches Q and K",
            ax=ax,
        )

    def plot(self, ax: plot.Axes | None = None) -> plot.Axes:
        """Draw the medians over the width and the losses over the steps; on ``ax`` the losses."""
        if ax is None:
            left = plot.axes(10.0, 4.4)
            grid = left.figure.add_gridspec(1, 2)
            left.set_subplotspec(grid[0, 0])
            ax = left.figure.add_subplot(grid[0, 1])
            self._draw_norms(left)
        return plot.curves(
            self.steps,
            {"scaled": self.scaled.best, "unscaled": self.unscaled.best},
            x_label="step",
            y_label="median loss at the best step size",
            title=f"Training W_q and W_k, d_k = {self.trained_d_k}",
            ax=ax,
        )


def backward() -> Backward:
    """Measure gradients and train a model, with and without the scale.

    Returns
    -------
    Backward
        Medians over 256 seeds for d_k = 4, 8, … 1024, with standard normal queries, keys, values
        and gradient of the result; losses of training at d_k = 256 over 128 steps.

    Notes
    -----
    With weights p, ``J = diag(p) - p pᵀ`` and scale c: ``dS = J (V dO)``, ``dQ = c dS K`` and
    ``dK = c dSᵀ Q``, in float64, by `attention_vjp`.

    The model is ``attention(Y W_q, X W_k, V)``, in float32; row i of it shall be row i of V. X, Y
    (16 × 32) and V (16 × 16) are standard normal and stay the same in all steps; W_q and W_k
    (32 × 256) start with the variance 1/32, which gives queries and keys the variance 1. Only
    the scale differs between the two models; each is trained at every step size, and what is
    drawn is its own best. If each step had fresh pairs, near ties would keep turning up among
    them: then the unscaled model learns too, at small step sizes, but later.

    References
    ----------
    arXiv 1706.03762, section 3.2.1.
    """
    widths = tuple(2**i for i in range(2, 11))
    columns: list[tuple[float, ...]] = []
    for d_k in widths:
        scaled_q, scaled_k = _gradient_norms(d_k, 1 / math.sqrt(d_k))
        plain_q, plain_k = _gradient_norms(d_k, 1.0)
        medians = (float(np.median(x)) for x in (scaled_q, plain_q, scaled_k, plain_k))
        columns.append((*medians, float(plain_q.mean() / scaled_q.mean())))
    query_scaled, query_unscaled, key_scaled, key_unscaled, mean_ratio = zip(*columns, strict=True)
    return Backward(
        _NUM_SEEDS, widths, query_scaled, query_unscaled, key_scaled, key_unscaled, mean_ratio,
        _TRAINED_SEEDS, _D_K, _RATES, _STEPS, _trained(1 / math.sqrt(_D_K)), _trained(1.0),
    )  # fmt: skip


def _gradient_norms(d_k: int, scale: float) -> tuple[Floats, Floats]:
    """Norms of dQ and dK for each seed, (num_seeds,); the same numbers for every scale."""
    rng = np.random.default_rng(d_k)
    query = rng.standard_normal((_NUM_SEEDS, 1, 1, d_k))
    key = rng.standard_normal((_NUM_SEEDS, 1, _LEN_KV, d_k))
    value = rng.standard_normal((_NUM_SEEDS, 1, _LEN_KV, _D_V))
    grad_out = rng.standard_normal((_NUM_SEEDS, 1, 1, _D_V))
    # All scores are few here: kernels would take longer to load than this takes to compute.
    _, pullback = attention_vjp(query, key, value, scale=scale, impl="dense")
    grads = pullback(grad_out)
    return _norms(grads.query), _norms(grads.key)


def _norms(x: Any) -> Floats:
    """Norm of each entry of the first axis."""
    norms: Floats = np.linalg.norm(x.reshape(len(x), -1), axis=-1)
    return norms


class _Step(NamedTuple):
    """What one step of training needs, for any leading axes."""

    loss: Floats  # (...)
    grad_w_q: Floats  # (..., d_model, d_k)
    grad_w_k: Floats


def _trained(scale: float) -> Trained:
    """Train all seeds at all rates side by side, the same numbers for every scale."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> Floats:
        return rng.standard_normal((_TRAINED_SEEDS, *shape)).astype(np.float32)

    asked, named = draw(_NUM_PAIRS, _D_MODEL), draw(_NUM_PAIRS, _D_MODEL)
    value = draw(_NUM_PAIRS, _D_V)
    start = (draw(_D_MODEL, _D_K) / np.float32(math.sqrt(_D_MODEL)) for _ in range(2))
    # (rates, seeds, d_model, d_k)
    w_q, w_k = (np.repeat(w[None], len(_RATES), axis=0) for w in start)
    rates = np.array(_RATES, dtype=np.float32)[:, None, None, None]
    losses: list[Floats] = []
    for number in range(1, _STEPS[-1] + 1):
        step = _step(w_q, w_k, asked, named, value, scale)
        if number in _STEPS:
            losses.append(step.loss)
        w_q -= rates * step.grad_w_q
        w_k -= rates * step.grad_w_k
    medians = np.median(np.stack(losses), axis=-1)  # (steps, rates)
    best = ((asked @ w_q) @ (named @ w_k).swapaxes(-1, -2)).argmax(axis=-1)
    recalled = (best == np.arange(_NUM_PAIRS)).mean(axis=-1)  # (rates, seeds)
    return Trained(
        tuple(tuple(map(float, row)) for row in medians.T),
        tuple(map(float, np.median(recalled, axis=-1))),
        float(losses[-1].min()),
    )


def _step(
    w_q: Floats, w_k: Floats, asked: Floats, named: Floats, value: Floats, scale: float
) -> _Step:
    """Loss of the model and its gradients, for each entry of the leading axes of w_q and w_k.

    ``asked`` and ``named`` (..., pairs, d_model) and ``value`` (..., pairs, d_v) broadcast.
    """
    query, key = (asked @ w_q)[..., None, :, :], (named @ w_k)[..., None, :, :]  # one head
    wanted = np.broadcast_to(value[..., None, :, :], (*key.shape[:-1], value.shape[-1]))
    out, pullback = attention_vjp(query, key, wanted, scale=scale, impl="dense")
    error = out - wanted
    grads = pullback(2 * error / math.prod(value.shape[-2:]))
    assert grads.query is not None
    assert grads.key is not None
    return _Step(
        np.square(error).mean(axis=(-3, -2, -1)),
        asked.swapaxes(-1, -2) @ grads.query[..., 0, :, :],
        named.swapaxes(-1, -2) @ grads.key[..., 0, :, :],
    )
