"""Named attention problems, shared by the tests and the benchmarks, and pairs of options.

`CASES` are problems one can name, each about one thing; `pairwise()` puts every setting of every
option beside every setting of every other in a few combinations.

A `score_mod` or `mask_mod` here is written with comparisons, `&`, `|`, arithmetic and indexing
only, so that one function serves scalars and arrays of any library. The table that it indexes
must belong to the library that calls it, which is what `Over` is for.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np

try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None

Lead = tuple[int, ...]
Arguments = dict[str, Any]
ToArray = Callable[[np.ndarray], Any]

FLOAT32_MIN = np.finfo(np.float32).min


@dataclass(frozen=True)
class Size:
    """The shapes of query, key and value; `num_heads=None` is two axes without heads."""

    len_q: int = 5
    len_kv: int = 7
    d_k: int = 4
    d_v: int | None = None
    num_heads: int | None = 2
    num_kv_heads: int | None = None
    lead: Lead = (2,)
    key_lead: Lead | None = None
    value_lead: Lead | None = None
    amplitude: float = 1.0

    def arrays(self, rng: np.random.Generator) -> Arguments:
        """Return normally distributed query, key and value in float64."""
        d_v = self.d_k if self.d_v is None else self.d_v
        num_kv_heads = self.num_kv_heads or self.num_heads
        sizes = {
            "query": (self.lead, self.num_heads, self.len_q, self.d_k),
            "key": (self.key_lead, num_kv_heads, self.len_kv, self.d_k),
            "value": (self.value_lead, num_kv_heads, self.len_kv, d_v),
        }
        arrays = {}
        for name, (lead, num_heads, length, d) in sizes.items():
            lead = self.lead if lead is None else lead
            heads = () if num_heads is None else (num_heads,)
            arrays[name] = self.amplitude * rng.standard_normal((*lead, *heads, length, d))
        return arrays


@dataclass(frozen=True)
class Over:
    """A mod over a table: `make(table)`, once the table is drawn and is some library's array."""

    make: Callable[[Any], Callable[..., Any]]
    table: Callable[[np.random.Generator], np.ndarray]


def drawn(option: Any, rng: np.random.Generator, to_array: ToArray | None) -> Any:
    """Return an option with its arrays copied and turned by `to_array`, its tables drawn."""
    if isinstance(option, Over):
        return option.make(drawn(option.table(rng), rng, to_array))
    if isinstance(option, tuple):
        return tuple(drawn(item, rng, to_array) for item in option)
    if isinstance(option, np.ndarray):
        return option.copy() if to_array is None else to_array(option.copy())
    return option


def dtype_named(name: str) -> np.dtype:
    """Return NumPy's dtype of that name; bfloat16 is that of ml_dtypes."""
    if name != "bfloat16":
        return np.dtype(name)
    if ml_dtypes is None:
        raise ImportError("bfloat16 needs ml_dtypes: pip install ml-dtypes")
    return np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class Case:
    """One attention problem: the arguments of `attention` under a name."""

    name: str
    size: Size
    options: Callable[[np.random.Generator], Arguments] = field(repr=False)

    def arguments(self, dtype: str = "float32", to_array: ToArray | None = None) -> Arguments:
        """Return fresh arguments, always the same for a name and a dtype.

        `dtype` is that of query, key and value; `to_array` turns every NumPy array, also one
        that a mod indexes, into an array of another library.
        """
        rng = np.random.default_rng(list(self.name.encode()))
        arrays = {n: x.astype(dtype_named(dtype)) for n, x in self.size.arrays(rng).items()}
        arguments = arrays | self.options(rng)
        return {name: drawn(option, rng, to_array) for name, option in arguments.items()}


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Return normally distributed float32 numbers, the dtype of biases and of mods' tables."""
    return rng.standard_normal(shape).astype(np.float32)


def maybe(rng: np.random.Generator, *shape: int, p: float = 0.6) -> np.ndarray:
    """Return booleans of which a share of about `p` is True."""
    return rng.random(shape) < p


def documents(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Return ids 0, then 1, along the last axis, as those of two packed documents are."""
    return np.sort(rng.integers(0, 2, shape), axis=-1)


def hidden(bias: np.ndarray, rng: np.random.Generator, fill: float) -> np.ndarray:
    """Return the bias with `fill` at two places of five, and everywhere in the second row."""
    seen = maybe(rng, *bias.shape) & (np.arange(bias.shape[-2]) != 1)[:, None]
    return np.where(seen, bias, bias.dtype.type(fill))


def slopes(num_heads: int) -> np.ndarray:
    """Return one ALiBi slope a head, a geometric sequence."""
    return (0.5 ** np.arange(1, num_heads + 1)).astype(np.float32)


def distance_mod(score, batch, head, q_pos, kv_pos):
    """Change a score by a polynomial of the distance, other in each head and batch entry."""
    return score * 0.75 + (q_pos - kv_pos) * (head + 1) * 0.1 - batch * 0.25


def dilated(batch, head, q_pos, kv_pos):
    """Hide every third diagonal, another one in each head and batch entry, except the next."""
    return ((q_pos - kv_pos + head + batch) % 3 != 0) | (q_pos == kv_pos)


def relative_bias(table):
    """Return a score_mod that adds `table[head, distance % width]`."""
    width = table.shape[1]

    def score_mod(score, batch, head, q_pos, kv_pos):
        return score + table[head, (q_pos - kv_pos) % width]

    return score_mod


def within(ids):
    """Return a mask_mod that shows the keys of the query's own document, up to the query."""

    def mask_mod(batch, head, q_pos, kv_pos):
        return (ids[batch, q_pos] == ids[batch, kv_pos]) & (kv_pos <= q_pos)

    return mask_mod


def prefix(lengths):
    """Return a mask_mod that shows a prefix of `lengths[batch]` keys and all keys up to itself."""

    def mask_mod(batch, head, q_pos, kv_pos):
        return (kv_pos < lengths[batch]) | (kv_pos <= q_pos)

    return mask_mod


def chosen(table):
    """Return a mask_mod that reads `table[head, kv_pos % width]`."""
    width = table.shape[1]

    def mask_mod(batch, head, q_pos, kv_pos):
        return table[head, kv_pos % width] | (kv_pos == q_pos)

    return mask_mod


def named(name: str, size: Size = Size(), /, **options: Any) -> Case:
    """Return a case; an option is its value or, unless it is a mod, a function of a generator."""

    def options_drawn(rng: np.random.Generator) -> Arguments:
        mods = ("score_mod", "mask_mod")
        return {n: o(rng) if callable(o) and n not in mods else o for n, o in options.items()}

    return Case(name, size, options_drawn)


CASES = [
    # shapes
    named("plain"),
    named("two_axes", Size(num_heads=None, lead=())),
    named("five_axes", Size(lead=(2, 1, 3))),
    named("lead_broadcast", Size(lead=(2, 1), key_lead=(1, 3), value_lead=(3,))),
    named("value_wider", Size(d_k=3, d_v=10)),
    named("width_1", Size(d_k=1)),
    named("width_odd", Size(d_k=37)),
    named("width_300", Size(d_k=300)),
    named("gqa", Size(num_heads=6, num_kv_heads=2)),
    named("mqa", Size(num_heads=5, num_kv_heads=1)),
    named("decode", Size(1, 33, num_heads=4, num_kv_heads=2), causal=True),
    named("decode_long", Size(1, 3000, num_kv_heads=1, lead=())),
    named("no_keys", Size(3, 0, d_v=5)),
    named("no_queries", Size(0, 3)),
    named("no_batch", Size(lead=(0,))),
    named("long", Size(300, 700, num_heads=1, lead=())),
    # positions
    named("causal", causal=True),
    named("causal_more_queries", Size(5, 2), causal=True),
    named("causal_top_left", causal=True, q_offset=0),
    named("causal_negative_offset", causal=True, q_offset=-2),
    named("causal_offsets", Size(lead=(3,)), causal=True, q_offset=np.array([0, 4, -3])),
    named(
        "causal_kv_offsets",
        Size(lead=(3, 1)),
        causal=True,
        q_offset=1,
        kv_offset=np.array([[-4], [0], [3]]),
    ),
    named("window_left", window=(2, None)),
    named("window_right", window=(None, 1)),
    named("window_both", Size(9, 9), window=(2, 1)),
    named("window_causal", Size(9, 9), window=(3, 5), causal=True),
    named("window_wide", window=(100, 100)),
    named("window_more_queries", Size(7, 3), window=(1, 0)),
    named("window_long", Size(500, 500, num_heads=1, lead=()), window=(70, 0), causal=True),
    # lengths and segments
    named("kv_len", kv_len=4, causal=True),
    named("kv_len_batch", Size(lead=(4,)), kv_len=np.array([7, 0, 3, 6]), causal=True),
    named("segments", Size(8, 8), segment_ids=lambda rng: documents(rng, 2, 8)),
    named("segments_pair", segment_ids=lambda rng: (documents(rng, 5), documents(rng, 2, 7))),
    named(
        "segments_negative",
        Size(6, 6),
        segment_ids=np.array([[0, 0, 0, 4, -1, -1], [-1, 2, 2, -5, 2, 2]]),
        causal=True,
    ),
    # masks and biases
    named("mask_1d", mask=lambda rng: maybe(rng, 7)),
    named("mask_key", mask=lambda rng: maybe(rng, 2, 1, 1, 7)),
    named("mask_query", mask=np.array([1, 0, 1, 1, 0], bool)[:, None]),
    named("mask_head", mask=np.array([True, False])[:, None, None]),
    named("mask_batch", mask=np.array([False, True])[:, None, None, None]),
    named("mask_scalar", mask=np.array(False)),
    named("mask_empty_row", mask=lambda rng: maybe(rng, 2, 2, 5, 7) & (np.arange(5) != 3)[:, None]),
    named("bias", bias=lambda rng: normal(rng, 2, 2, 5, 7)),
    named("bias_key", bias=lambda rng: normal(rng, 7)),
    named("bias_head", bias=lambda rng: normal(rng, 2, 5, 7)),
    named("bias_query", bias=lambda rng: normal(rng, 2, 1, 5, 1)),
    named("bias_excludes", bias=lambda rng: hidden(normal(rng, 2, 1, 5, 7), rng, -np.inf)),
    # as models write padding; a row of nothing but the minimum weighs its keys evenly
    named("bias_minimum", bias=lambda rng: hidden(np.zeros((2, 1, 5, 7), "f"), rng, FLOAT32_MIN)),
    named(
        "bias_float64",
        bias=lambda rng: np.where(np.arange(7) == 2, float(FLOAT32_MIN), rng.normal(size=(5, 7))),
    ),
    # finite terms whose sum is not: one key, and it is seen
    named(
        "bias_falls", Size(1, 1), bias=np.full((1, 1), FLOAT32_MIN), q_offset=2,
        alibi_slopes=np.full(2, 1e31, "f"),
    ),
    # what shapes the scores
    named("alibi", Size(num_heads=4), alibi_slopes=slopes(4), causal=True),
    named("sinks", sinks=np.array([0.5, 3], np.float32), mask=(np.arange(5) != 2)[:, None]),
    named("scale_zero", scale=0.0),
    named("scale_negative", scale=-0.7),
    named("scale_large", scale=30.0),
    named("scores_40", Size(6, 9, amplitude=4.0)),
    named("softcap", softcap=1.5, scale=1.0),
    named("score_mod", score_mod=distance_mod),
    named("score_mod_table", score_mod=Over(relative_bias, lambda rng: normal(rng, 2, 9))),
    named("mask_mod", mask_mod=dilated),
    named("mask_mod_table", Size(8, 8), mask_mod=Over(within, lambda rng: documents(rng, 2, 8))),
    named(
        "block_mask",
        Size(150, 300, d_k=2, lead=()),
        block_mask=np.array([[[1, 0, 1], [0, 1, 0]], [[0, 0, 0], [1, 1, 1]]], bool),
    ),
    named("dropout", dropout=0.3, seed=2024),
    named("dropout_seeds", Size(lead=(3,)), dropout=0.6, seed=np.array([7, 0, -7])),
    # several options
    named(
        "gqa_decode_window_sinks",
        Size(1, 40, num_heads=4, num_kv_heads=2),
        causal=True,
        window=(15, 0),
        kv_len=np.array([40, 23]),
        sinks=np.array([-1, 0, 1, 2], np.float32),
    ),
    named(
        "causal_window_softcap",
        Size(12, 12, num_heads=4, num_kv_heads=2),
        causal=True,
        window=(4, 0),
        softcap=5.0,
        scale=1.0,
    ),
    named(
        "padding_mask_bias_causal",
        Size(6, 9),
        causal=True,
        kv_len=np.array([5, 9]),
        mask=lambda rng: maybe(rng, 2, 1, 1, 9),
        bias=lambda rng: normal(rng, 2, 6, 9),
    ),
    named(
        "segments_causal_dropout",
        Size(9, 9, num_heads=4, num_kv_heads=1),
        segment_ids=lambda rng: documents(rng, 2, 9),
        causal=True,
        dropout=0.2,
        seed=-1,
    ),
    named(
        "mods_softcap_lengths",
        Size(6, 9),
        score_mod=distance_mod,
        mask_mod=Over(prefix, lambda rng: np.array([3, 5])),
        softcap=2.0,
        kv_len=np.array([9, 7]),
    ),
    named(
        "chunk_alibi_window_dropout",
        Size(4, 6, lead=(3,)),
        alibi_slopes=slopes(2),
        window=(6, 2),
        q_offset=np.array([10, 12, 3]),
        kv_offset=np.array([8, 7, 5]),
        dropout=0.1,
        seed=3,
    ),
    named(
        "bias_softcap_sinks_segments",
        Size(6, 7, d_k=5, d_v=3),
        bias=lambda rng: hidden(normal(rng, 6, 7), rng, -np.inf),
        softcap=1.0,
        sinks=np.array([0, -2], np.float32),
        segment_ids=lambda rng: (documents(rng, 2, 6), documents(rng, 2, 7)),
        scale=-1.0,
    ),
    named(
        "block_mask_mods_causal",
        Size(140, 270, d_k=2, num_kv_heads=1, lead=()),
        block_mask=np.array([[1, 0, 1], [0, 1, 1]], bool),
        mask_mod=dilated,
        score_mod=Over(relative_bias, lambda rng: normal(rng, 2, 5)),
        causal=True,
    ),
]


def case(name: str) -> Case:
    """Return the case of that name."""
    for case in CASES:
        if case.name == name:
            return case
    raise KeyError(f"no case {name!r}, there are {', '.join(case.name for case in CASES)}")


@dataclass(frozen=True)
class Setting:
    """One way to use an option: `make(lead, num_heads, len_q, len_kv, rng)` are its arguments."""

    name: str
    make: Callable[[Lead, int, int, int, np.random.Generator], Arguments] = field(repr=False)


Combination = Mapping[str, Setting]


def settings(**makes: Callable[..., Arguments]) -> list[Setting]:
    """Return the setting `off`, without arguments, and those given."""
    return [Setting("off", lambda *shape: {}), *(Setting(n, make) for n, make in makes.items())]


def per_entry(lead: Lead, period: int) -> np.ndarray:
    """Return an integer in [0, period) for every batch entry."""
    return np.arange(np.prod(lead, dtype=int)).reshape(lead) % period


# Each excludes little: where several come together, pairs must be left to compute.
OPTIONS: dict[str, list[Setting]] = {
    "causal": settings(on=lambda lead, h, q, k, rng: {"causal": True}),
    "window": settings(
        left=lambda lead, h, q, k, rng: {"window": (max(q, k) // 2, None)},
        both=lambda lead, h, q, k, rng: {"window": (k // 2 + 2, k // 3 + 1)},
    ),
    "q_offset": settings(
        number=lambda lead, h, q, k, rng: {"q_offset": k - q + 1},
        array=lambda lead, h, q, k, rng: {"q_offset": k - q - per_entry(lead, 3)},
    ),
    "kv_offset": settings(
        number=lambda lead, h, q, k, rng: {"kv_offset": 2},
        array=lambda lead, h, q, k, rng: {"kv_offset": -per_entry(lead, 2)},
    ),
    "kv_len": settings(
        number=lambda lead, h, q, k, rng: {"kv_len": max(k - 2, 0)},
        array=lambda lead, h, q, k, rng: {"kv_len": np.maximum(k - per_entry(lead, 4), 0)},
    ),
    "mask": settings(
        key=lambda lead, h, q, k, rng: {"mask": maybe(rng, k, p=0.8)},
        full=lambda lead, h, q, k, rng: {"mask": maybe(rng, *lead, h, q, k, p=0.8)},
    ),
    "bias": settings(
        head=lambda lead, h, q, k, rng: {"bias": normal(rng, h, q, k)},
        excludes=lambda lead, h, q, k, rng: {
            "bias": np.where(maybe(rng, q, k, p=0.8), normal(rng, q, k), np.float32(-np.inf))
        },
    ),
    "segment_ids": settings(
        pair=lambda lead, h, q, k, rng: {
            "segment_ids": (documents(rng, *lead, q), documents(rng, *lead, k))
        },
        negative=lambda lead, h, q, k, rng: {
            "segment_ids": (np.zeros(q, int), -(rng.random((*lead, k)) < 0.2).astype(int))
        },
    ),
    "mask_mod": settings(
        dilated=lambda lead, h, q, k, rng: {"mask_mod": dilated},
        table=lambda lead, h, q, k, rng: {
            "mask_mod": Over(chosen, lambda rng: maybe(rng, h, 5, p=0.8))
        },
    ),
    "block_mask": settings(
        head=lambda lead, h, q, k, rng: {
            "block_mask": np.broadcast_to(np.arange(h) != 1, (-(-k // 128), -(-q // 128), h)).T
        }
    ),
    "scale": settings(
        positive=lambda lead, h, q, k, rng: {"scale": 1.5},
        negative=lambda lead, h, q, k, rng: {"scale": -0.4},
    ),
    "softcap": settings(on=lambda lead, h, q, k, rng: {"softcap": 1.25}),
    "alibi_slopes": settings(on=lambda lead, h, q, k, rng: {"alibi_slopes": slopes(h)}),
    "score_mod": settings(
        distance=lambda lead, h, q, k, rng: {"score_mod": distance_mod},
        table=lambda lead, h, q, k, rng: {
            "score_mod": Over(relative_bias, lambda rng: normal(rng, h, 6))
        },
    ),
    "sinks": settings(on=lambda lead, h, q, k, rng: {"sinks": normal(rng, h)}),
    "dropout": settings(
        seed=lambda lead, h, q, k, rng: {"dropout": 0.25, "seed": 99},
        seeds=lambda lead, h, q, k, rng: {"dropout": 0.5, "seed": 5 + per_entry(lead, 7)},
    ),
}


def pairs_of(combination: Combination) -> set[tuple[str, str, str, str]]:
    """Return every (option, setting, option, setting) that come together in a combination."""
    present = [option for option in OPTIONS if option in combination]
    return {(a, combination[a].name, b, combination[b].name) for a, b in combinations(present, 2)}


def pairwise() -> list[dict[str, Setting]]:
    """Return combinations of one setting of every option that hold every pair of settings.

    Greedy: each starts from the first pair that is missing and takes, option by option, the
    setting that brings the most missing pairs, the first of equals, which is often `off`.
    """
    missing = {  # as keys: a set would not keep the order
        (a, of_a.name, b, of_b.name): None
        for a, b in combinations(OPTIONS, 2)
        for of_a in OPTIONS[a]
        for of_b in OPTIONS[b]
    }
    rows: list[dict[str, Setting]] = []
    while missing:
        a, of_a, b, of_b = next(iter(missing))
        fixed = {a: of_a, b: of_b}
        row: dict[str, Setting] = {}
        for option in [*fixed, *(option for option in OPTIONS if option not in fixed)]:
            free = [s for s in OPTIONS[option] if fixed.get(option, s.name) == s.name]
            gains = [len(pairs_of(row | {option: s}) & missing.keys()) for s in free]
            row[option] = free[gains.index(max(gains))]
        for pair in pairs_of(row):
            missing.pop(pair, None)
        rows.append({option: row[option] for option in OPTIONS})
    return rows


def label(combination: Combination) -> str:
    """Return a readable name such as `causal=on,window=left`."""
    used = [f"{name}={s.name}" for name, s in combination.items() if s.name != "off"]
    return ",".join(used) or "none"


def options_of(
    combination: Combination, size: Size, rng: np.random.Generator, to_array: ToArray | None = None
) -> Arguments:
    """Return the arguments of a combination for a problem of that size (with a head axis)."""
    options: Arguments = {}
    for setting in combination.values():
        options |= setting.make(size.lead, size.num_heads, size.len_q, size.len_kv, rng)
    return {name: drawn(option, rng, to_array) for name, option in options.items()}
