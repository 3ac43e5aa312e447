"""Wrong calls, as data: the error, the start of its message, what it says was given."""

import functools
import inspect
import math

import numpy as np
import pytest

import scaledot as sd


def one(error, must_hold, given, **arguments):
    """A case: the error, the start of its message, what it says was given, the arguments."""
    return error, must_hold, given, arguments


def each(error, must_hold, given=None, /, **argument):
    """A case for every value of one argument; given follows from the value where it is None."""
    ((name, values),) = argument.items()
    part = "shape" if error is ValueError else "dtype"
    shown = [str(getattr(x, part)) if isinstance(x, np.ndarray) else repr(x) for x in values]
    return [one(error, must_hold, text if given is None else given, **{name: x})
            for text, x in zip(shown, values, strict=True)]


def table(**cases):
    """Parameters of a test, named by function, arguments, and what the message says was given."""
    return [pytest.param(function, *case, id="-".join([function, *case[-1], case[-2]]))
            for function, some in cases.items() for case in some]


PARAMETERS = ("function", "error", "must_hold", "given", "arguments")
ones, ints, bools = (functools.partial(np.ones, dtype=d) for d in (np.float32, np.int64, bool))
BASE = {"query": ones((2, 4, 5, 8)), "key": ones((2, 2, 7, 8)), "value": ones((2, 2, 7, 3))}
QUERY, KEY, VALUE = BASE.values()
PACKED = {"query": ones((5, 4, 8)), "key": ones((7, 2, 8)), "value": ones((7, 2, 3)),
          "cu_seqlens_q": [0, 2, 5], "cu_seqlens_kv": [0, 3, 7]}
MASKED = np.ma.array(np.ones(7))
SAME = "query and key must have the same"
ONE_OF = "must be one of arrays of NumPy, PyTorch, JAX or array-api-strict"
ONE_DTYPE = "must share one dtype of float32, float64, float16, bfloat16"
SHARE = f"query, key and value {ONE_DTYPE}"
GROUPS = "num_heads of query must be a multiple of num_kv_heads of key"
SCORES = "must broadcast to (..., num_heads, len_q, len_kv)"
LEADING = "must broadcast to the leading axes, before num_heads, = (2,)"
BLOCKS = "block_mask must broadcast to (..., num_heads, blocks of 128 queries, blocks of 128 keys)"
REACH = "kv_len must lie between 0 and len_kv = "
FLOAT = "must have a floating-point dtype"
KERNELS = "impl='kernels' must be given a call that the kernels can do"
FAR = 2**60
BOUND = f"must lie between -{FAR} and {FAR}"

# What is wrong about query, key and value, or about an option beside their lengths.
OPERANDS = [
    *each(TypeError, f"query {ONE_OF}", "builtins.", query=[[[1.0]], 1.0, None, "x"]),
    *each(TypeError, f"key {ONE_OF}", "numpy.float32", key=[np.float32(1)]),
    *each(TypeError, f"value {ONE_OF}", "builtins.NoneType", value=[None]),
    *each(TypeError, "query must be a plain array", "matrix", query=[ones((5, 8)).view(np.matrix)]),
    *each(TypeError, "value must be a plain array", "MaskedArray", value=[np.ma.array(VALUE)]),
    *each(TypeError, SHARE, "float32, float64", key=[KEY.astype(np.float64)]),
    *each(TypeError, SHARE, "float32, float32, float16", value=[VALUE.astype(np.float16)]),
    *(one(TypeError, SHARE, np.dtype(d).name, **{n: x.astype(d) for n, x in BASE.items()})
      for d in (np.int64, np.uint8, np.complex64, object, np.longdouble, bool, "U1")),
    *(case for n in BASE for case in
      each(ValueError, f"{n} must have at least two axes", **{n: [ones(8), ones(())]})),
    *each(ValueError, f"{SAME} d_k", "8 and 6 (query (2, 4, 5, 8)", key=[ones((2, 2, 7, 6))]),
    *each(ValueError, "key and value must have the same length", "7 and", value=[KEY[:, :, :6]]),
    *each(ValueError, "key and value must have the same num_kv_heads", "1 (", value=[VALUE[:, :1]]),
    *(one(ValueError, GROUPS, f"4 and {h} (query (2, 4, 5, 8), key (2, {h}, 7, 8)",
          key=ones((2, h, 7, 8)), value=ones((2, h, 7, 3))) for h in (0, 3, 8)),
    one(ValueError, "leading axes of query, key and value must broadcast", "key (3, 2, 7, 8)",
        key=ones((3, 2, 7, 8)), value=ones((3, 2, 7, 3))),
    *each(ValueError, REACH + "7", " to 8", kv_len=[8, np.array([7, 8])]),
    *each(ValueError, "segment_ids of key must broadcast", "(5,)", segment_ids=[ints(5)]),
]


def offsets(name, right):
    """Wrong offsets or lengths; ``right`` would be a right one."""
    return [
        *each(TypeError, f"{name} must be an integer", **{name: [1.0, True, "0", [1, 2]]}),
        *each(TypeError, f"{name} must be an int or an integer array",
              **{name: [np.ones(2), bools(2)]}),
        *each(ValueError, f"{name} {LEADING}", **{name: [right * ints(3), right * ints((2, 4))]}),
        *each(ValueError, f"{name} {BOUND}", **{name: [FAR + 1, -FAR - 1, 10**30]}),
        *each(ValueError, f"{name} {BOUND}", f"{-2**63}", **{name: [np.array([0, -2**63])]}),
        *each(ValueError, f"{name} {BOUND}", f"{2**63}",
              **{name: [np.uint64(2**63), np.array([2**63, 0], np.uint64)]}),
    ]


def per_head(name):
    return [
        *each(TypeError, f"{name} {ONE_OF}", "builtins.list", **{name: [[1.0] * 4]}),
        *each(TypeError, f"{name} {FLOAT}", **{name: [ints(4), bools(4)]}),
        *each(ValueError, f"{name} must have the shape (num_heads,) = (4,)",
              **{name: [ones(2), ones(1), ones((4, 1))]}),
    ]


def real(name):
    return [
        *each(TypeError, f"{name} must be a real number", "", **{name: ["1", True, 1j, ones(1)]}),
        *each(ValueError, f"{name} must be finite", **{name: [math.nan, math.inf, -math.inf]}),
        *each(ValueError, f"{name} must", "", **{name: [10**400]}),
    ]


OPTIONS = [
    *each(TypeError, "causal must be True or False", causal=[1, None, "yes"]),
    *each(TypeError, "window must be a pair (left, right)", window=[3, (1,), (1, 2, 3), "ab"]),
    *each(TypeError, "window must be an integer", "", window=[(0, 1.0), (True, 0), ("1", None)]),
    *each(ValueError, "both sides of window must be at least 0", window=[(-1, 0), (None, -2)]),
    *each(TypeError, "mask must be boolean", " bias=", mask=[ones(7), ints(7), np.ones(7, "u1")]),
    *each(TypeError, f"mask {ONE_OF}", "builtins.", mask=[[[True] * 7] * 5, True]),
    *each(TypeError, "mask must be a plain array", "MaskedArray", mask=[np.ma.array(bools(7))]),
    *each(ValueError, f"mask {SCORES}", mask=[bools(s) for s in ((6,), (3, 1, 1, 1), (2, 1, 1))]),
    *each(TypeError, f"bias {FLOAT}", bias=[ints(7), bools(7), np.ones(7, complex)]),
    *each(TypeError, f"bias {ONE_OF}", "builtins.float", bias=[0.5]),
    *each(ValueError, f"bias {SCORES}", bias=[ones(6), ones((3, 1, 1, 1)), ones((1, 1, 1, 1, 1))]),
    *each(TypeError, "segment_ids of query must be integers", segment_ids=[ones(5), bools(5)]),
    *each(TypeError, "segment_ids of key must be integers", "b", segment_ids=[(ints(1), bools(7))]),
    *each(TypeError, "segment_ids must be one integer array or a pair (query's, key's)", "3 items",
          segment_ids=[(ints(1),) * 3, [0] * 3]),
    *each(TypeError, f"segment_ids of query {ONE_OF}", "builtins.", segment_ids=[([0], [0]), 0]),
    *each(ValueError, "segment_ids of query must broadcast to (..., len)", "(",
          segment_ids=[(ints(4), ints(1)), (ints((3, 1)), ints(1)), (ints((1, 1, 1)), ints(1))]),
    *offsets("kv_len", 3), *offsets("q_offset", 0), *offsets("kv_offset", 0),
    *each(TypeError, "kv_offset must be an integer", kv_offset=[None]),
    *each(ValueError, REACH, "-2 to ", kv_len=[-2, np.array([-2, 7])]),
    *each(ValueError, REACH, f"to {2**41}", kv_len=[2**41, np.array([7, 2**41])]),
    *real("scale"), *real("softcap"), *real("dropout"),
    *each(ValueError, "softcap must be positive", softcap=[0.0, -1.0]),
    *per_head("alibi_slopes"), *per_head("sinks"),
    *each(TypeError, "score_mod must be a function (score, batch, head, q_", "int", score_mod=[3]),
    *each(TypeError, "mask_mod must be a function (batch, head, q_pos, kv_", "str", mask_mod=["x"]),
    *each(TypeError, "block_mask must be boolean", block_mask=[ones((1, 1)), ints((1, 1))]),
    *each(TypeError, f"block_mask {ONE_OF}", "builtins.list", block_mask=[[[True]]]),
    *each(ValueError, BLOCKS, block_mask=[bools((5, 7)), bools((3, 1, 1, 1))]),
    *each(ValueError, "dropout must lie between 0 and 1", dropout=[-0.1, 1.5]),
    *each(ValueError, "dropout needs a seed", "dropout=0.5 and seed=None", dropout=[0.5]),
    *each(TypeError, "seed must be an integer", seed=[1.0, True, "x", [1, 2]]),
    *each(TypeError, "seed must be an int or integers", seed=[np.ones(2), bools(2)]),
    *each(ValueError, f"seed {LEADING}", seed=[ints(3)]),
    *each(ValueError, "impl must be one of 'auto', ", "", impl=["fast", None, ["auto"], ones(2)]),
    one(ValueError, KERNELS, "float16, bfloat16, this is float128",
        impl="kernels", bias=np.ones(1, np.longdouble)),
]

CHUNK = ("key", "value", "kv_offset", "kv_len", "mask", "bias")
TAKES = {
    f.__name__: set(inspect.signature(f).parameters)
    for f in (sd.attention, sd.attention_state, sd.attention_stats, sd.attention_weights,
              sd.explain, sd.attend_chunks, sd.varlen_attention)
}
TAKES["attend_chunks"] |= set(CHUNK)
TAKES["varlen_attention"] -= {"query", "key", "value", "seed"}  # these have cases of their own


def run(name, arguments):
    """Call a function with some arguments, the others being right."""
    arguments = BASES.get(name, BASE) | arguments
    if "seed" in arguments:
        arguments.setdefault("dropout", 0.5)
    if name in ("attention_state", "attend_chunks"):
        arguments.setdefault("q_offset", 0)
    if name in ("attention_stats", "attention_weights"):
        arguments.pop("value")
    if name == "attend_chunks":
        chunk = {"kv_offset": 0} | {n: arguments.pop(n) for n in CHUNK if n in arguments}
        arguments.setdefault("chunks", [sd.Chunk(**chunk)])
    return getattr(sd, name)(**arguments)


SEES = "mask_mod must return a boolean array of the library of its arguments"
CHANGES = "score_mod must return a floating-point array of the library of its arguments"
MODS = [
    *each(TypeError, SEES, "", mask_mod=[
        lambda b, h, i, j: i - j, lambda b, h, i, j: (i >= j) * 1.0, lambda b, h, i, j: True,
        lambda b, h, i, j: None]),
    *each(ValueError, f"the result of mask_mod {SCORES} = (2, 4, 5, 7)", "(3,", mask_mod=[
        lambda b, h, i, j: bools(3), lambda b, h, i, j: bools((3, 1, 1, 1))]),
    *each(TypeError, CHANGES, "", score_mod=[
        lambda s, b, h, i, j: s > 0, lambda s, b, h, i, j: 1.0, lambda s, b, h, i, j: s * 1j]),
    *each(ValueError, f"the result of score_mod {SCORES} = (2, 4, 5, 7)", "2, 4, 5", score_mod=[
        lambda s, b, h, i, j: s[..., :3], lambda s, b, h, i, j: s[None]]),
]
# Why the kernels cannot run a mod, in the error for who asks for them by name.
SWAPPED = np.dtype(np.float32).newbyteorder("S")
NOT_COMPILED = [
    one(ValueError, KERNELS, f"one that they cannot: {why}", impl="kernels", **{name: mod})
    for why, name, mod in [
        ("score_mod must be a function that Numba can compile, got ", "score_mod",
         lambda s, b, h, i, j: s + "a"),
        ("score_mod must return a floating-point number, got bool", "score_mod",
         lambda s, b, h, i, j: s > 0),
        ("mask_mod must return a boolean, got int64", "mask_mod", lambda b, h, i, j: i - j),
        ("arrays that mask_mod reads must lie in the CPU's memory", "mask_mod",
         lambda b, h, i, j: MASKED[j] > i),
    ]
]
WHOLE = "must be a 1-D sequence of integers"
STARTS_Q, STARTS_KV = "cu_seqlens_q", "cu_seqlens_kv"
BROADCAST = "two states must broadcast against each other"


def state(out=(2, 4, 5, 3), lse=(2, 4, 5), dtype=np.float32):
    return sd.State(np.ones(out).astype(dtype), np.ones(lse).astype(dtype))


CHUNKS = [sd.Chunk(KEY, VALUE, 0), sd.Chunk(KEY, VALUE[..., :2], 7)]
BASES = {
    "varlen_attention": PACKED,
    "merge": {"a": state(), "b": state()},
    "scaled_dot_product_attention": {"Q": QUERY, "K": ones((2, 4, 7, 8)), "V": ones((2, 4, 7, 3))},
}
OTHERS = {
    "attention": [
        *((*case[:3], case[3] | {"impl": impl})
          for case in MODS for impl in ("dense", "blockwise")),
        *NOT_COMPILED,
        one(ValueError, KERNELS, "the bytes of an array are not in this machine's order",
            impl="kernels", bias=ones(7).astype(SWAPPED)),
    ],
    "attention_stats": [
        *each(ValueError, "top_k must be at least 1", top_k=[0, -3]),
        *each(TypeError, "top_k must be a positive integer", top_k=[2.0, True, None, np.True_]),
        *each(ValueError, "top_k must be at most 1048576", top_k=[2**20 + 1, 2**62]),
        *each(ValueError, "last must be at least 1", last=[0, -1]),
        *each(TypeError, "last must be a positive integer", last=["2", False]),
        *each(TypeError, "map_shape must be a pair of integers", map_shape=[64, (1, 2, 3), "ab"]),
        *each(TypeError, "map_shape must be a positive integer", "2.0", map_shape=[(2, 2.0)]),
        *each(ValueError, "map_shape must be at least 1", "0", map_shape=[(0, 2), [3, 0]]),
        *each(ValueError, "map_shape must be at most (len_q, len_kv) = (5, 7)",
              map_shape=[(6, 2), (5, 8)]),
    ],
    "attention_weights": [
        one(ValueError, "rows must lie between -5 and 4 for len_q = 5", "0 to 5", rows=[0, 5]),
        one(ValueError, "rows must lie between -5 and 4 for len_q = 5", "-6 to -6", rows=[-6]),
        *NOT_COMPILED,
        *each(ValueError, "rows must lie between", "-9223372036854775808", rows=[[-2**63]]),
        *each(ValueError, "rows must be indices", f"{2**64 - 1}",
              rows=[[2**64 - 1], np.array([0, 2**64 - 1], np.uint64)]),
        *each(ValueError, "rows must be indices", f"{FAR + 1}", rows=[[0, FAR + 1]]),
        *each(TypeError, f"rows {WHOLE}", "int64 (1, 2)", rows=[[[0, 1]], ints((1, 2))]),
        *each(TypeError, f"rows {WHOLE}", "float64 (1,)", rows=[[0.0], np.ones(1)]),
        *each(TypeError, f"rows {WHOLE}", "bool (5,)", rows=[[True] * 5, bools(5)]),
        *each(TypeError, f"rows {WHOLE}", "<U1 (2,)", rows=[["0", "1"]]),
        *each(TypeError, f"rows {WHOLE}", "list", rows=[[[0], [1, 2]]]),  # ragged
        *each(TypeError, f"rows {WHOLE}", "", rows=[2, [None], {0, 1}]),
        *each(TypeError, "rows must be a plain array", "Mask", rows=[np.ma.array(ints(2))]),
    ],
    "varlen_attention": [
        *(one(ValueError, f"{name} must have the axes (tokens, heads, d)", str(QUERY.shape),
              **{name: QUERY}) for name in BASE),
        *each(TypeError, SHARE, "float32, float64, float32", key=[np.ones((7, 2, 8))]),
        one(ValueError, GROUPS, "4 and 3", key=ones((7, 3, 8)), value=ones((7, 3, 3))),
        *each(ValueError, "key and value must have the same number of tokens", "7 and ",
              value=[ones((9, 2, 3)), ones((6, 2, 3))]),
        *each(ValueError, f"{STARTS_Q} must start with 0", "[1]", cu_seqlens_q=[[1, 2, 5]]),
        *each(ValueError, f"{STARTS_KV} must start with 0", "nothing", cu_seqlens_kv=[ints(0)]),
        *each(ValueError, f"{STARTS_Q} must not decrease", "5 and then", cu_seqlens_q=[[0, 5, 4]]),
        *each(ValueError, f"{STARTS_KV} must not decrease", "9 and", cu_seqlens_kv=[[0, 9, 7]]),
        *each(ValueError, f"{STARTS_Q} must end with the number", "4", cu_seqlens_q=[[0, 2, 4]]),
        *each(ValueError, f"{STARTS_Q} must end with the number", "6", cu_seqlens_q=[[0, 2, 6]]),
        *each(ValueError, f"{STARTS_KV} must end with the nu", "3", cu_seqlens_kv=[[0, 1, 3]]),
        *each(ValueError, f"{STARTS_Q} and {STARTS_KV} must", "2 and 1", cu_seqlens_kv=[[0, 7]]),
        *each(ValueError, f"{STARTS_Q} must be indices", f"{FAR + 1}", cu_seqlens_q=[[0, FAR + 1]]),
        *each(TypeError, f"{STARTS_Q} {WHOLE}", "float64 (2,)", cu_seqlens_q=[[0.0, 5.0]]),
        *each(TypeError, f"{STARTS_KV} {WHOLE}", "bool (2,)", cu_seqlens_kv=[[False, True]]),
        *each(TypeError, f"{STARTS_Q} {WHOLE}", "int64 (1, 2)", cu_seqlens_q=[[[0, 5]]]),
        *each(TypeError, f"{STARTS_KV} {WHOLE}", "list", cu_seqlens_kv=[[[0], [3, 7]]]),  # ragged
        *each(TypeError, f"{STARTS_Q} {WHOLE}", "", cu_seqlens_q=[None, 5]),
        *each(TypeError, "seed must be an integer", seed=["x"]),
        *each(TypeError, "seed must be an int or integers", seed=[np.ones(2)]),
        *each(ValueError, "seed must have one entry for each of the 2 seq", seed=[ints(3)]),
    ],
    "merge": [
        *each(TypeError, "a must be a State (out, lse)", "list", a=[list(state())]),
        *each(TypeError, "b must be a State (out, lse)", "", b=[(*state(), 1), ones(2), None]),
        *each(TypeError, f"b.out {ONE_OF}", "builtins.float", b=[sd.State(0.0, 1.0)]),
        *each(TypeError, f"a.lse {ONE_OF}", "builtins.None", a=[sd.State(ones((2, 3)), None)]),
        *each(ValueError, "a.out must have one more axis than a.lse", "lse (2, 4)",
              a=[state(lse=(2, 4))]),
        *each(ValueError, "b.out must have one more axis than b.lse", "out () and lse ()",
              b=[state((), ())]),
        *each(ValueError, BROADCAST, "b.out (2, 4, 5, 2), b.lse (2, 4, 5)",
              b=[state((2, 4, 5, 2))]),
        *each(ValueError, BROADCAST, "a.lse (2, 4, 5), b.out (2, 4, 6, 3)",
              b=[state((2, 4, 6, 3), (2, 4, 6))]),
        one(ValueError, BROADCAST, "a.lse (2, 1, 5), b.out (1, 4, 5, 3), b.lse (3, 1, 1)",
            a=state((1, 4, 5, 3), (2, 1, 5)), b=state((1, 4, 5, 3), (3, 1, 1))),
        # out beside lse, of one state and of both
        *each(ValueError, BROADCAST, "a.lse (3, 4, 5)", a=[state(lse=(3, 4, 5))]),
        one(ValueError, BROADCAST, "a.out (1, 4, 5, 3), a.lse (2, 4, 5), b.out (3, 4, 5, 3)",
            a=state((1, 4, 5, 3)), b=state((3, 4, 5, 3), (1, 4, 5))),
        *(one(TypeError, f"a.out, a.lse, b.out and b.lse {ONE_DTYPE}", str(np.dtype(d)),
              a=state(dtype=d)) for d in (int, bool, complex, object, np.float16)),
        *each(TypeError, f"a.out, a.lse, b.out and b.lse {ONE_DTYPE}", "float32, float64, float32",
              a=[sd.State(state().out, np.ones((2, 4, 5)))]),
    ],
    "attend_chunks": [
        *each(TypeError, "chunks must hold Chunk objects", "",
              chunks=[[(KEY, VALUE, 0)], sd.Chunk(KEY, VALUE, 0), [CHUNKS[0], None]]),
        *each(TypeError, "chunks must be an iterable of Chunk objects", "int", chunks=[5]),
        *each(ValueError, "chunks must hold at least one chunk", "none", chunks=[[]]),
        *each(ValueError, BROADCAST, "b.out (2, 4, 5, 2)", chunks=[CHUNKS]),
    ],
    "scaled_dot_product_attention": [
        *each(TypeError, f"mask {ONE_OF}", "builtins.list", mask=[[[1, 0]]]),
        *each(ValueError, f"mask {SCORES}", mask=[ints((5, 6))]),
        *each(ValueError, "mask must hold only 0 and 1", "numpy float64 (1,)",
              mask=[np.array([x]) for x in (2.0, -1.0, 0.5, math.nan, -math.inf)]),
        *each(ValueError, f"{SAME} d_k", "8 and 6", K=[ones((2, 4, 7, 6))]),
        *each(TypeError, SHARE, "float32, float32, float64", V=[np.ones((2, 4, 7, 3))]),
    ],
}
COMMON = {
    function: [case for case in OPERANDS + OPTIONS
               if set(case[-1]) & takes and set(case[-1]) - {"value"} <= takes]
    for function, takes in TAKES.items()
}
for name in ("attention_stats", "attention_weights"):
    COMMON[name] = [
        (error, must_hold.replace(SHARE, f"query and key {ONE_DTYPE}"), *rest)
        for error, must_hold, *rest in COMMON[name]
    ]

# Gradients

PULLBACK_GIVEN = {"grad_out": ones((2, 4, 5, 3))}
MOVES = {"primals": (QUERY, KEY, VALUE), "tangents": (None, None, None)}


def differentiate(function, arguments):
    """Call a function of gradients with some arguments, the others being right."""
    if function == "attention_jvp":
        return sd.attention_jvp(**MOVES | arguments)
    if function == "pullback":
        return sd.attention_vjp(**BASE)[1](**PULLBACK_GIVEN | arguments)
    right = PACKED if function == "varlen_attention_vjp" else BASE
    out, pullback = getattr(sd, function)(**right | arguments)
    return pullback(out)


def plus(score, batch, head, q_pos, kv_pos):
    return score + 1


A_PAIR = [
    *each(ValueError, "score_mod must come with its derivative", "a function alone",
          score_mod=[plus]),
    *each(TypeError, "score_mod must be a function (score, batch, head, q_pos, kv_pos) -> score or"
          " a pair (f, df)", "(", score_mod=[(plus,), (plus, 1.0), (None, plus), (plus,) * 3]),
]
GRADIENTS = {
    "attention_vjp": A_PAIR, "varlen_attention_vjp": A_PAIR,
    "pullback": [
        *each(TypeError, f"grad_out {FLOAT}", grad_out=[ints((2, 4, 5, 3))]),
        *each(TypeError, f"grad_lse {FLOAT}", grad_lse=[bools((2, 4, 5))]),
        *each(ValueError, "grad_out must have the shape (2, 4, 5, 3)", grad_out=[ones((5, 3))]),
        *each(ValueError, "grad_lse must have the shape (2, 4, 5)", grad_lse=[ones(5)]),
    ],
    "attention_jvp": [
        *A_PAIR,
        *each(TypeError, "primals must be a tuple of three", "tuple", primals=[(QUERY, KEY)]),
        *each(TypeError, "tangents must be a tuple of three", "", tangents=[None, {}, QUERY]),
        *each(ValueError, "dk must have the shape (2, 2, 7, 8)", "(2, 2, 7, 3)",
              tangents=[(None, VALUE, None)]),
    ],
}
