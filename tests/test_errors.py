"""One test for every error message: its type, its style, and the argument that it names."""

import ast
import functools
import inspect
import math
import operator
import os
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import scaledot as sd
from conftest import IMPLEMENTATIONS
from scaledot import _threads

SOURCE = Path(sd.__file__).parent
ELSEWHERE = ("_family", "_family_checks")  # their errors are tested beside their functions
SEEN = []  # (file, line) in the source where the error of some test was raised
RAN = []  # tests of this file that have run
STYLE = re.compile(r".+?, got .+\. .+[.?]", re.DOTALL)  # what must hold, what was given, what to do
ANY = (TypeError, ValueError, LookupError, ArithmeticError, RuntimeError, MemoryError)


@pytest.fixture(autouse=True)
def _counted(request):
    RAN.append(request.node.nodeid)


def raises(error, must_hold, given, call, *arguments, **options):
    """Call, and check the error: exact type, style, first words, and what is said to be given."""
    with pytest.raises(ANY) as info:
        call(*arguments, **options)
    place = info.traceback[-1]
    if SOURCE in Path(place.path).parents:
        SEEN.append((Path(place.path).relative_to(SOURCE).as_posix(), place.lineno + 1))
    message = str(info.value)
    assert type(info.value) is error, message
    assert STYLE.fullmatch(message), message
    assert message.startswith(must_hold), message
    assert given in message.partition(", got ")[2], message
    return message


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
SAME = "query and key must have the same"
ONE_OF = "must be one of arrays of NumPy, PyTorch, JAX or array-api-strict"
SHARE = "query, key and value must share one dtype of float32, float64, float16, bfloat16"
GROUPS = "num_heads of query must be a multiple of num_kv_heads of key"
SCORES = "must broadcast to (..., num_heads, len_q, len_kv)"
LEADING = "must broadcast to the leading axes, before num_heads, = (2,)"
BLOCKS = "block_mask must broadcast to (..., num_heads, blocks of 128 queries, blocks of 128 keys)"
REACH = "kv_len must lie between 0 and len_kv = "
FLOAT = "must have a floating-point dtype"

# What is wrong about query, key and value, or about an option beside their lengths.
OPERANDS = [
    *each(TypeError, f"query {ONE_OF}", "builtins.", query=[[[1.0]], 1.0, None, "x"]),
    *each(TypeError, f"key {ONE_OF}", "numpy.float32", key=[np.float32(1)]),
    *each(TypeError, f"value {ONE_OF}", "builtins.NoneType", value=[None]),
    *each(TypeError, "query must be a plain array", "matrix", query=[ones((5, 8)).view(np.matrix)]),
    *each(TypeError, "value must be a plain array", "MaskedArray", value=[np.ma.array(VALUE)]),
    *each(TypeError, SHARE, "float32, float64, float", key=[KEY.astype(np.float64)]),
    *each(TypeError, SHARE, "float32, float32, float16", value=[VALUE.astype(np.float16)]),
    *(one(TypeError, SHARE, str(np.dtype(d)), **{n: x.astype(d) for n, x in BASE.items()})
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
        *each(ValueError, f"{name} must", "", **{name: [2**63]}),
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
    *each(ValueError, "impl='kernels' needs compiled kernels", impl=["kernels"]),
]

CHUNK = ("key", "value", "kv_offset", "kv_len", "mask", "bias")
TAKES = {
    f.__name__: set(inspect.signature(f).parameters)
    for f in (sd.attention, sd.attention_state, sd.attention_weights, sd.explain, sd.attend_chunks,
              sd.varlen_attention)
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
    if name == "attention_weights":
        arguments.pop("value")
    if name == "attend_chunks":
        chunk = {"kv_offset": 0} | {n: arguments.pop(n) for n in CHUNK if n in arguments}
        arguments.setdefault("chunks", [sd.Chunk(**chunk)])
    return getattr(sd, name)(**arguments)


SEES = "mask_mod must return a boolean array of the library of its arguments"
CHANGES = "score_mod must return scores: a floating-point array of its argument's library"
MODS = [
    *each(TypeError, SEES, "", mask_mod=[
        lambda b, h, i, j: i - j, lambda b, h, i, j: (i >= j) * 1.0, lambda b, h, i, j: True,
        lambda b, h, i, j: None]),
    *each(ValueError, "mask_mod must", "(3,", mask_mod=[
        lambda b, h, i, j: bools(3), lambda b, h, i, j: bools((3, 1, 1, 1))]),
    *each(TypeError, CHANGES, "", score_mod=[
        lambda s, b, h, i, j: s > 0, lambda s, b, h, i, j: 1.0, lambda s, b, h, i, j: s * 1j]),
    *each(ValueError, "score_mod must", "(", score_mod=[
        lambda s, b, h, i, j: s[..., :3], lambda s, b, h, i, j: s[None]]),
]
ROWS = "rows must be a 1-D sequence of integers"
STARTS_Q, STARTS_KV = "cu_seqlens_q", "cu_seqlens_kv"
KNOWN = "must be a 1-D array of known integers"
BOTH = "of both states must broadcast"


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
        (*case[:3], case[3] | {"impl": impl}) for case in MODS for impl in IMPLEMENTATIONS
    ],
    "attention_weights": [
        *each(ValueError, "rows must lie between -5 and 4 for len_q = 5", rows=[[0, 5], [-6]]),
        *each(ValueError, "rows must lie between", "", rows=[np.array([2**64 - 1], np.uint64)]),
        *each(TypeError, ROWS, "", rows=[[[0, 1]], 2, [0.0], [True] * 5, [None], [[0], [1, 2]]]),
    ],
    "varlen_attention": [
        *(one(ValueError, f"{name} must have the axes (tokens, heads, d)", str(QUERY.shape),
              **{name: QUERY}) for name in BASE),
        *each(TypeError, SHARE, "float32, float64, float32", key=[np.ones((7, 2, 8))]),
        one(ValueError, GROUPS, "4 and 3", key=ones((7, 3, 8)), value=ones((7, 3, 3))),
        *each(ValueError, "", "", value=[ones((9, 2, 3)), ones((6, 2, 3))]),  # as long as key
        *each(ValueError, f"{STARTS_Q} must start with 0", "[1]", cu_seqlens_q=[[1, 2, 5]]),
        *each(ValueError, f"{STARTS_KV} must start with 0", "nothing", cu_seqlens_kv=[ints(0)]),
        *each(ValueError, f"{STARTS_Q} must not decrease", "5 and then", cu_seqlens_q=[[0, 5, 4]]),
        *each(ValueError, f"{STARTS_KV} must not decrease", "9 and", cu_seqlens_kv=[[0, 9, 7]]),
        *each(ValueError, f"{STARTS_Q} must end with the number", "4", cu_seqlens_q=[[0, 2, 4]]),
        *each(ValueError, f"{STARTS_Q} must end with the number", "6", cu_seqlens_q=[[0, 2, 6]]),
        *each(ValueError, f"{STARTS_KV} must end with the nu", "3", cu_seqlens_kv=[[0, 1, 3]]),
        *each(ValueError, f"{STARTS_Q} and {STARTS_KV} must", "2 and 1", cu_seqlens_kv=[[0, 7]]),
        *each(TypeError, f"{STARTS_Q} {KNOWN}", "float64 (2,)", cu_seqlens_q=[[0.0, 5.0]]),
        *each(TypeError, f"{STARTS_KV} {KNOWN}", "bool (2,)", cu_seqlens_kv=[[False, True]]),
        *each(TypeError, f"{STARTS_Q} {KNOWN}", "", cu_seqlens_q=[[[0, 5]], None, [[0], [2, 5]]]),
        *each(TypeError, "seed must be an integer", seed=["x"]),
        *each(TypeError, "seed must be an int or integers", seed=[np.ones(2)]),
        *each(ValueError, "seed must have one entry for each of the 2 seq", seed=[ints(3)]),
    ],
    "merge": [
        *each(TypeError, "a must be a State (out, lse)", "list", a=[list(state())]),
        *each(TypeError, "b must be a State (out, lse)", "", b=[(*state(), 1), ones(2), None]),
        *each(TypeError, f"b.out {ONE_OF}", "builtins.float", b=[sd.State(0.0, 1.0)]),
        *each(TypeError, f"a.lse {ONE_OF}", "builtins.None", a=[sd.State(ones((2, 3)), None)]),
        *each(ValueError, "a.out must have the axes of", "lse (2, 4)", a=[state(lse=(2, 4))]),
        *each(ValueError, "b.out must have the axes of", "out () and lse ()", b=[state((), ())]),
        *each(ValueError, f"the out {BOTH}", "(2, 4, 5, 3) and (2, 4, ",
              b=[state((2, 4, 5, 2)), state((2, 4, 6, 3), (2, 4, 6))]),
        one(ValueError, f"the lse {BOTH}", "(2, 1, 5) and (3, 1, 1)",
            a=state((1, 4, 5, 3), (2, 1, 5)), b=state((1, 4, 5, 3), (3, 1, 1))),
        # out of one beside lse of the other
        one(ValueError, "", "", a=state((4, 5, 3), (2, 4, 5)), b=state((3, 4, 5, 3), (4, 5))),
        *each(TypeError, "a.", "", a=[state(dtype=d) for d in (int, bool, complex, object)]),
    ],
    "attend_chunks": [
        *each(TypeError, "chunks must hold Chunk objects", "",
              chunks=[[(KEY, VALUE, 0)], sd.Chunk(KEY, VALUE, 0), [CHUNKS[0], None]]),
        *each(TypeError, "chunks must", "", chunks=[5]),
        *each(ValueError, "chunks must hold at least one chunk", "none", chunks=[[]]),
        *each(ValueError, f"the out {BOTH}", "(2, 4, 5, 3) and (2, 4, 5, 2)", chunks=[CHUNKS]),
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


@pytest.mark.parametrize(PARAMETERS, [*table(**COMMON), *table(**OTHERS)])
def test_arguments(function, error, must_hold, given, arguments):
    arrays = {name: x for name, x in (BASE | PACKED | arguments).items() if hasattr(x, "tobytes")}
    before = {name: x.copy() for name, x in arrays.items()}
    raises(error, must_hold, given, run, function, arguments)
    for name, x in before.items():
        assert x.tobytes() == arrays[name].tobytes(), f"{name} was written"


USES_POSITIONS = {
    "causal": True, "window": (3, None), "alibi_slopes": ones(4), "dropout": 0.1,
    "score_mod": lambda score, batch, head, q_pos, kv_pos: score,
    "mask_mod": lambda batch, head, q_pos, kv_pos: kv_pos <= q_pos,
}


@pytest.mark.parametrize("function", ["attention_state", "attend_chunks"])
@pytest.mark.parametrize("option", USES_POSITIONS)
def test_a_slice_needs_q_offset(function, option):
    arguments = {"dropout": 0.0, "seed": 0, option: USES_POSITIONS[option]}
    raises(ValueError, f"q_offset must be given with {option}", "q_offset=None", run, function,
           arguments | {"q_offset": None})
    run(function, arguments | {"q_offset": 0})


@pytest.mark.parametrize("function", ["attention", "varlen_attention"])
@pytest.mark.parametrize("seed", ["x", 1.0, np.ones(5)])
def test_a_seed_is_not_looked_at_without_dropout(function, seed):
    run(function, {"seed": seed, "dropout": 0.0})


BRANCHES = {
    "mask_mod": lambda b, h, i, j: i >= 2 and i > j,
    "score_mod": lambda s, b, h, i, j: s if i > j else -s,
}


@pytest.mark.parametrize("library", ["numpy", "torch", "jax.numpy", "array_api_strict"])
@pytest.mark.parametrize("name", BRANCHES)
def test_a_mod_that_branches(name, library):
    arrays = {n: pytest.importorskip(library).asarray(x.copy()) for n, x in BASE.items()}
    raises(TypeError, f"{name} must be written with arithmetic, comparisons, & and |",
           "a branch on an array (", sd.attention, **arrays, **{name: BRANCHES[name]})


def elsewhere(tensor):
    """Stand-in for a tensor on a GPU, which needs none."""
    torch = pytest.importorskip("torch")
    with torch._subclasses.FakeTensorMode():
        return torch.empty(tensor.shape, device="cuda")


def nested(tensor):
    torch = pytest.importorskip("torch")
    return torch.nested.nested_tensor(list(tensor), layout=torch.jagged)


ONE_LIBRARY = "query and {} must belong to one library"
SPARSE = operator.methodcaller("to_sparse")
# An argument is a function of the right tensor.
TORCH = [
    *each(TypeError, "query must be a dense tensor", "layout torch.sparse", query=[SPARSE]),
    *each(TypeError, "key must be a dense tensor", "", key=[lambda t: t.to_mkldnn(), nested]),
    *each(TypeError, "mask must be a dense tensor", "sparse", mask=[SPARSE]),
    *each(TypeError, "value must hold data", "a meta tensor", value=[lambda t: t.to("meta")]),
    *each(TypeError, ONE_LIBRARY.format("key"), "numpy and torch", query=[lambda t: QUERY]),
    *each(TypeError, ONE_LIBRARY.format("value"), "torch and numpy", value=[lambda t: VALUE]),
    *each(TypeError, SHARE, "float32, ", key=[lambda t: t.bfloat16(), lambda t: t.int()]),
    *each(ValueError, "query and key must be on one device", "cpu and cuda:0", key=[elsewhere]),
    *each(TypeError, SEES, "numpy", mask_mod=[lambda t: lambda b, h, i, j: bools((5, 7))]),
    *each(TypeError, CHANGES, "numpy", score_mod=[lambda t: lambda s, b, h, i, j: QUERY]),
]
TORCH_STATE = each(TypeError, ONE_LIBRARY.format("b.out"), "numpy and torch",
                   b=[lambda t: sd.State(t, t[0])])


@pytest.mark.filterwarnings("ignore")  # of PyTorch, about some of these kinds of tensors
@pytest.mark.parametrize(PARAMETERS, table(attention=TORCH, merge=TORCH_STATE))
def test_torch(function, error, must_hold, given, arguments):
    torch = pytest.importorskip("torch")
    tensors = {name: torch.tensor(x) for name, x in BASE.items()}
    mask = torch.ones(7, dtype=torch.bool)
    changed = {name: change(tensors.get(name, mask)) for name, change in arguments.items()}
    right = {} if function in BASES else tensors
    raises(error, must_hold, given, run, function, right | changed)


@pytest.mark.parametrize("name", ["mask", "bias", "alibi_slopes", "kv_len", "seed"])
def test_an_option_of_a_third_library(name):
    torch = pytest.importorskip("torch")
    option = torch.tensor({"mask": bools(7), "kv_len": ints(2), "seed": ints(2)}.get(name, ones(4)))
    raises(TypeError, f"{name} must belong to the library of query, or to NumPy",
           "torch beside numpy", run, "attention", {"dropout": 0.5, "seed": 1} | {name: option})


def test_values_that_a_compiler_traces():
    jax = pytest.importorskip("jax")
    rows = jax.jit(lambda query, rows: sd.attention_weights(query, query, rows=rows))
    raises(TypeError, ROWS, "traced values", rows, QUERY, np.arange(2))
    packed = jax.jit(lambda x, starts: sd.varlen_attention(x, x, x, starts, starts))
    raises(TypeError, f"cu_seqlens_q {KNOWN}", "traced", packed, PACKED["query"], np.array([0, 5]))


COUNTS = [
    *each(ValueError, "n must be at least 1", n=[0, -2]),
    *each(TypeError, "n must be a whole number", n=[1.5, 2.0, True, np.True_, "2", None]),
]


@pytest.mark.parametrize(PARAMETERS, table(set_num_threads=COUNTS))
def test_number_of_threads(function, error, must_hold, given, arguments, monkeypatch):
    monkeypatch.setattr(_threads, "_num_threads", 3)
    raises(error, must_hold, given, getattr(sd, function), **arguments)
    assert sd.get_num_threads() == 3


VARIABLE = "SCALEDOT_NUM_THREADS must be a whole number ≥ 1"


@pytest.mark.parametrize("text", ["many", "0", "-1", "1.5", "2 threads"])
def test_nonsense_in_the_variable(text, monkeypatch):
    monkeypatch.setattr(_threads, "_num_threads", None)
    monkeypatch.setenv("SCALEDOT_NUM_THREADS", text)
    raises(ValueError, VARIABLE, repr(text), sd.get_num_threads)
    raises(ValueError, VARIABLE, repr(text), run, "attention", {})


def test_nonsense_in_the_variable_of_a_new_process():
    program = f"import sys; sys.path.insert(0, {str(SOURCE.parent)!r}); import numpy, scaledot\n"
    program += "scaledot.attention(*[numpy.ones((3, 2))] * 3)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          env=os.environ | {"SCALEDOT_NUM_THREADS": "many"}, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"ValueError: {VARIABLE}, got 'many'. ")


LONG = 2**40
VIRTUAL = {n: np.broadcast_to(x[..., :1, :1], (*x.shape[:-2], LONG, x.shape[-1]))
           for n, x in BASE.items()}
TOKENS = np.broadcast_to(np.float32(1), (LONG, 4, 8))
BEFORE_MEMORY = {
    "attention": [*OPTIONS, *each(ValueError, f"{SAME} d_k", "", key=[VIRTUAL["value"]])],
    "attention_state": [one(ValueError, "q_offset must be", "", q_offset=None, causal=True)],
    "attention_weights": each(ValueError, "rows must lie between", "", rows=[[LONG]]),
    "explain": each(ValueError, "softcap must be positive", "", softcap=[0]),
    "varlen_attention": each(ValueError, f"{STARTS_Q} must end with", "", query=[TOKENS]),
    "merge": each(ValueError, f"the out {BOTH}", "", a=[sd.State(TOKENS, TOKENS[..., 0])]),
}


@pytest.mark.parametrize(PARAMETERS, table(**BEFORE_MEMORY))
def test_errors_come_before_any_memory(function, error, must_hold, given, arguments):
    arguments = ({} if function in BASES else VIRTUAL) | arguments
    tracemalloc.start()
    try:
        raises(error, must_hold, given, run, function, arguments)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def without_a_test(root, seen):
    """Errors of the core that no test saw raised in the statement that builds them."""
    missing = []
    for path in sorted({*root.glob("_*.py"), *root.glob("_*/**/*.py")}):
        if path.stem in ELSEWHERE:
            continue
        file = path.relative_to(root).as_posix()
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        lines = [range(n.lineno, n.end_lineno + 1) for n in nodes if isinstance(n, ast.Raise)]
        tested = [span for span in lines if any((file, line) in seen for line in span)]
        missing += sorted(
            f"{file}:{n.lineno} {ast.unparse(n.args[0])}" for n in nodes
            if isinstance(n, ast.Call) and re.search(r"(value|type)_error$", ast.unparse(n.func))
            and not any(n.lineno in span for span in tested)
        )
    return missing


def test_an_error_without_a_test_is_found(tmp_path):
    (tmp_path / "_new.py").write_text(
        "def check(x):\n    if x:\n        raise value_error('x must hold', x, 'Change it.')\n"
        "    error = _errors.type_error('y must hold', x, 'Change it.')\n    raise error\n"
    )
    seen, unseen = "_new.py:3 'x must hold'", "_new.py:4 'y must hold'"
    assert without_a_test(tmp_path, []) == [seen, unseen]
    assert without_a_test(tmp_path, [("_new.py", 3), ("_new.py", 5)]) == [unseen]


def test_every_error_has_a_test():
    sizes = [
        math.prod(len(mark.args[1]) for mark in getattr(test, "pytestmark", [])
                  if mark.name == "parametrize")
        for name, test in globals().items() if name.startswith("test_")
    ]
    if len(set(RAN)) < sum(sizes):
        pytest.skip(f"{len(set(RAN))} of the {sum(sizes)} tests of this file have run")
    for library in ("torch", "jax", "array_api_strict"):
        pytest.importorskip(library)
    assert without_a_test(SOURCE, SEEN) == []
