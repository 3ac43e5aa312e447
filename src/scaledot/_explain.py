"""What a call will do and cost, without running it."""

from __future__ import annotations

from dataclasses import dataclass

from scaledot import _arrays, _choice
from scaledot._rules import derivative_rules, without_graph
from scaledot._spec import Options, resolve
from scaledot._typing import Array, Impl, MaskMod, Offsets, ScoreMod


@dataclass(frozen=True)
class Plan:
    """What `attention` will do with the same arguments.

    Attributes
    ----------
    implementation : str
        ``"kernels"``, ``"blockwise"`` or ``"dense"``.
    reason : str
        Why this one.
    block_q, block_kv : int
        Queries and keys of one tile of scores.
    tiles_run, tiles_skipped : int
        Tiles of one head each, over all heads and leading axes; those that positions show to be
        invisible are skipped.
    flops : int
        Floating-point operations of the two products in the tiles that run.
    bytes_moved : int
        Bytes of query, key, value and result, each counted once.
    peak_extra_memory : int
        Bytes held during the call besides arguments and result, at most; within a factor of 2.
    """

    implementation: str
    reason: str
    block_q: int
    block_kv: int
    tiles_run: int
    tiles_skipped: int
    flops: int
    bytes_moved: int
    peak_extra_memory: int

    def __str__(self) -> str:
        """Return one line for each figure."""
        total = self.tiles_run + self.tiles_skipped
        return "\n".join(
            (
                f"implementation     {self.implementation} ({self.reason})",
                f"tiles              {self.block_q} queries × {self.block_kv} keys: "
                f"{self.tiles_run:,} run, {self.tiles_skipped:,} of {total:,} skipped",
                f"operations         {self.flops / 1e9:,.3f} GFLOP",
                f"arguments, result  {self.bytes_moved / 2**20:,.2f} MiB",
                f"peak extra memory  {self.peak_extra_memory / 2**20:,.2f} MiB",
            )
        )


def explain(
    query: Array,
    key: Array,
    value: Array,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    mask: Array | None = None,
    bias: Array | None = None,
    segment_ids: Array | tuple[Array, Array] | None = None,
    kv_len: Offsets | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    block_mask: Array | None = None,
    dropout: float = 0.0,
    seed: int | Array | None = None,
    q_offset: Offsets | None = None,
    kv_offset: Offsets = 0,
    impl: Impl = "auto",
) -> Plan:
    """Say how `attention` will run these arguments, and what that costs, without running it.

    Parameters
    ----------
    query, key, value : array
        As in `attention`; their data is not read.
    causal, window, mask, bias, segment_ids, kv_len, scale, softcap, alibi_slopes, sinks : optional
        As in `attention`.
    score_mod, mask_mod, block_mask, dropout, seed, q_offset, kv_offset, impl : optional
        As in `attention`.

    Returns
    -------
    Plan
        Implementation and why, tiles run and skipped, FLOPs, bytes moved, peak extra memory.

    Raises
    ------
    TypeError, ValueError
        As in `attention`; also where the implementation asked for cannot do the job.

    Notes
    -----
    ``peak_extra_memory`` counts what the forward pass on plain arrays takes; functions given as
    mods may hold more. Where a score_mod without its derivative is differentiated by PyTorch or
    JAX, these keep each tile for the backward pass, which is not counted.

    References
    ----------
    arXiv 2205.14135 counts tiles and bytes in the same way.

    Examples
    --------
    >>> import numpy as np, scaledot as sd
    >>> x = np.zeros((1, 1, 2048, 64), dtype=np.float32)
    >>> plan = sd.explain(x, x, x, causal=True, impl="blockwise")
    >>> plan.block_q, plan.block_kv, plan.tiles_run, plan.tiles_skipped
    (256, 512, 20, 12)
    """
    options = Options(
        causal, window, mask, bias, segment_ids, kv_len, scale, softcap, alibi_slopes, sinks,
        score_mod, mask_mod, block_mask, dropout, seed, q_offset, kv_offset, impl,
    )  # fmt: skip
    has_rules = derivative_rules(query, key, value, options) is not None
    if has_rules:
        query, key, value, options = map(without_graph, (query, key, value, options))
    problem = resolve(query, key, value, options)
    name, reason = _choice.choose(problem)
    if has_rules:
        reason += "; gradients by the same, in linear memory"
    tiles = _choice.tiles(problem)
    spec = problem.spec
    result = 1
    for length in (*spec.scores_shape[:-1], spec.d_v):
        result *= length
    elements = sum(_count(x) for x in (query, key, value)) + result
    return Plan(
        implementation=name,
        reason=reason,
        block_q=tiles.block_q,
        block_kv=tiles.block_kv,
        tiles_run=tiles.run,
        tiles_skipped=tiles.skipped,
        flops=2 * (spec.d_k + spec.d_v) * tiles.scores,
        bytes_moved=elements * _arrays.itemsize(spec.dtype),
        peak_extra_memory=tiles.memory,
    )


def _count(x: Array) -> int:
    count = 1
    for length in x.shape:
        count *= length
    return count
