"""How long ring attention takes, and how much memory: the model of docs/scaling.md.

A rank with n tokens computes with one shard of keys in each of W hops while the next is on its
way, so a hop takes as long as the longer of the two:

    forward   agreement + (W - 1)·max(compute, transfer) + compute
    backward  (W - 1)·max(compute, transfer) + compute + last gradients
"""

from __future__ import annotations

from dataclasses import dataclass

FLOPS, BACK = 4, 2.5  # of a score, times d; backward has 5 products instead of 2
GRAD_BYTES = 4  # gradients travel in float32
PIECES = 8  # in which a shard travels


@dataclass(frozen=True)
class Layer:
    """One attention layer."""

    num_heads: int
    num_kv_heads: int
    d: int
    item_bytes: int = 2
    causal: bool = True

    def flops(self, len_q: float, len_kv: float) -> float:
        """Forward operations of a rank in one hop; zigzag halves those of causal attention."""
        whole = FLOPS * len_q * len_kv * self.d * self.num_heads
        return whole / 2 if self.causal else whole

    def kv_bytes(self, tokens: float) -> float:
        """Keys and values of a shard."""
        return 2 * tokens * self.num_kv_heads * self.d * self.item_bytes

    def grad_bytes(self, tokens: float) -> float:
        """Their gradients, as they travel."""
        return 2 * tokens * self.num_kv_heads * self.d * GRAD_BYTES

    def shard_bytes(self, tokens: float) -> float:
        """Query, key and value."""
        return self.kv_bytes(tokens) + tokens * self.num_heads * self.d * self.item_bytes


@dataclass(frozen=True)
class Rank:
    """What one rank can do: operations and bytes per second, seconds before the first byte."""

    forward: float
    backward: float
    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Times:
    """Seconds of one hop, and of a pass."""

    compute: float
    transfer: float
    total: float


def forward(layer: Layer, rank: Rank, tokens: float, world_size: int) -> Times:
    """Forward pass of shards of ``tokens``."""
    compute = layer.flops(tokens, tokens) / rank.forward
    transfer = rank.latency + layer.kv_bytes(tokens) / rank.bandwidth
    hops = (world_size - 1) * max(compute, transfer) + compute
    return Times(compute, transfer, rank.latency + hops)  # ranks agree about the call first


def backward(layer: Layer, rank: Rank, tokens: float, world_size: int) -> Times:
    """Backward pass: keys and values travel again, and their gradients with them."""
    compute = BACK * layer.flops(tokens, tokens) / rank.backward
    home = rank.latency + layer.grad_bytes(tokens) / rank.bandwidth / PIECES  # the last piece
    transfer = 2 * rank.latency
    transfer += (layer.kv_bytes(tokens) + layer.grad_bytes(tokens)) / rank.bandwidth
    return Times(compute, transfer, (world_size - 1) * max(compute, transfer) + compute + home)


def hidden_from(layer: Layer, rank: Rank) -> tuple[float, float]:
    """Tokens of a rank from which computing hides the transfer, forward and backward.

    Both grow with the tokens, computing with their square: latency is left out.
    """
    flops = layer.flops(1, 1)
    kv, grads = layer.kv_bytes(1), layer.grad_bytes(1)
    return (
        kv / rank.bandwidth * rank.forward / flops,
        (kv + grads) / rank.bandwidth * rank.backward / (BACK * flops),
    )


def memory(layer: Layer, tokens: float) -> tuple[float, float]:
    """Extra bytes of a rank at the peak, forward and backward, results not counted.

    Forward: keys and values of another rank, a piece of the next ones, and for a piece the state
    and what merging it takes. Backward: also gradients of keys and values; two pieces of keys and
    values and of their gradients, and for a piece of queries three intermediate results. Results
    that are rounded at the end are in float32 until then.
    """
    kv, grads = layer.kv_bytes(tokens), layer.grad_bytes(tokens)
    query = tokens * layer.num_heads * layer.d
    wide = query * (GRAD_BYTES - layer.item_bytes)
    forth = kv + (kv + 4 * query * GRAD_BYTES) / PIECES + wide
    back = kv + grads + (2 * kv + 2 * grads + 3 * query * GRAD_BYTES) / PIECES + wide
    return forth, back


# Predictions

LAYER = Layer(num_heads=64, num_kv_heads=8, d=128)  # of Llama 3 70B, arXiv 2407.21783
GBIT = 1e9 / 8
# An assumption: what some dozen cores do in bfloat16. Latency is that of TCP in a data centre.
SERVER = Rank(1.5e12, 1.2e12, 0.9 * 25 * GBIT, 30e-6)
# NVIDIA's data sheet: 989 TFLOP/s in bfloat16 without sparsity; FlashAttention-3 (arXiv 2407.08608)
# reaches 60 to 75 % of it forward and about 55 % backward. A DGX H100 has 400 Gb/s for each GPU.
GPU = Rank(0.60 * 989e12, 0.50 * 989e12, 0.9 * 400 * GBIT, 5e-6)
CLUSTERS = (
    ("64 servers, 25 GbE", SERVER, 64),
    ("8 H100, 400 Gb/s", GPU, 8),
    ("64 H100, 400 Gb/s", GPU, 64),
    ("256 H100, 400 Gb/s", GPU, 256),
    ("1024 H100, 400 Gb/s", GPU, 1024),
)
LENGTHS = (("1 M", 2**20), ("100 M", 100 * 2**20))
GIB = 2**30


def shown(seconds: float) -> str:
    """A time with three digits, in a unit that suits it."""
    units = (("days", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3))
    for unit, size in units:
        if seconds >= (2 * size if size > 1 else size):
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def predictions() -> list[str]:
    """The table of predictions, one layer, and from where on communication is hidden."""
    lines = [
        "| Cluster | tokens | of a rank | hop back: compute | transfer | forward | backward "
        "| extra memory |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, rank, world_size in CLUSTERS:
        for title, length in LENGTHS:
            tokens = length / world_size
            there = forward(LAYER, rank, tokens, world_size)
            back = backward(LAYER, rank, tokens, world_size)
            extra = max(memory(LAYER, tokens)) / GIB
            mark = " (not hidden)" if back.transfer > back.compute else ""
            row = [
                name, title, f"{tokens:,.0f}", shown(back.compute), shown(back.transfer) + mark,
                shown(there.total), shown(back.total), f"{extra:.3g} GiB",
            ]  # fmt: skip
            lines.append(f"| {' | '.join(row)} |")
    lines += ["", "| A rank | transfers are hidden from, forward | backward |", "|---|---|---|"]
    for title, rank in (("server, 25 GbE", SERVER), ("H100, 400 Gb/s", GPU)):
        there, back = hidden_from(LAYER, rank)
        lines.append(f"| {title} | {there:,.0f} tokens | {back:,.0f} tokens |")
    return lines


if __name__ == "__main__":
    print("\n".join(predictions()))
