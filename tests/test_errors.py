"""One test for every error message: its type, its style, and the argument that it names."""

import ast
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

import naive
import scaledot as sd
import textbook
from compare import EPS, assert_close
from error_cases import (
    BASE,
    BASES,
    BROADCAST,
    CHANGES,
    COMMON,
    GRADIENTS,
    KERNELS,
    KEY,
    OPTIONS,
    OTHERS,
    PACKED,
    PARAMETERS,
    QUERY,
    SAME,
    SEES,
    SHARE,
    STARTS_Q,
    VALUE,
    WHOLE,
    bools,
    differentiate,
    each,
    ints,
    one,
    ones,
    run,
    table,
)
from scaledot import _threads
from scaledot._bridges import cpu
from scaledot._kernels import mods, target
from scaledot._spec import Options

SOURCE = Path(sd.__file__).parent
ELSEWHERE = (  # their errors are tested beside their functions
    "_cache", "_cache_checks", "_cache_file", "_cache_memory", "_family", "_family_checks",
    "_paged", "_paged_cache", "_ring", "_ring_plan", "_ring_rules", "_ring_transport", "_stream",
    "_targets", "_torch_calls", "_torch_exchange", "_ulysses",
)
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


SCALAR_MODS = {
    "mask_mod-and": lambda b, h, i, j: i >= 2 and i > j,
    "mask_mod-int": lambda b, h, i, j: int(i) > j,
    "score_mod-if": lambda s, b, h, i, j: s if i > j else -s,
    "score_mod-math": lambda s, b, h, i, j: s + math.sin(j),
}
ON_ARRAYS = [
    *((library, impl) for library in ("numpy", "torch", "jax.numpy")
      for impl in ("dense", "blockwise")),
    ("array_api_strict", "auto"),
]


@pytest.mark.parametrize(("library", "impl"), ON_ARRAYS)
@pytest.mark.parametrize("mod", SCALAR_MODS)
def test_a_mod_written_for_one_number(mod, library, impl):
    """Where mods are called on arrays."""
    arrays = {n: pytest.importorskip(library).asarray(x.copy()) for n, x in BASE.items()}
    name = mod.partition("-")[0]
    raises(TypeError, f"{name} must be written with arithmetic, comparisons, & and |", "a branch or"
           " a conversion of an array (", sd.attention, **arrays, impl=impl,
           **{name: SCALAR_MODS[mod]})


@pytest.mark.parametrize("library", ["numpy", "torch", "jax.numpy"])
@pytest.mark.parametrize("impl", ["auto", "kernels"])
@pytest.mark.parametrize("mod", SCALAR_MODS)
def test_kernels_call_a_mod_on_one_number(mod, impl, library):
    rng = np.random.default_rng(0)
    arrays = {n: rng.standard_normal(x.shape).astype("f") for n, x in BASE.items()}
    name = mod.partition("-")[0]
    option = {name: SCALAR_MODS[mod]}
    out, _, weights = naive.attention(**arrays, **option)
    score_mod = np.vectorize(option["score_mod"], otypes="f") if name == "score_mod" else None
    positions = {"q_pos": np.arange(2, 7)[:, None], "kv_pos": np.arange(7)}
    yardstick, _ = textbook.attention(*arrays.values(), weights > 0, score_mod=score_mod,
                                      **positions)
    module = pytest.importorskip(library)
    given = {n: module.asarray(x) for n, x in arrays.items()}
    got = sd.attention(**given, **option, impl=impl)
    assert type(got) is type(given["query"])
    assert_close(got, out, yardstick, eps=EPS["float32"], len_kv=7)


def add_of(x):
    return lambda s, b, h, i, j: s + x


COMPILED = [
    one(ValueError, "score_mod must be a function that Numba can compile", "add(float32",
        function=lambda s, b, h, i, j: s + "a"),
    one(TypeError, "score_mod must return a floating-point number", "int64",
        function=lambda s, b, h, i, j: i),
    one(TypeError, "score_mod must read attributes that exist", "numpy.nothing",
        function=lambda s, b, h, i, j: np.nothing(s)),
    one(TypeError, "arrays that score_mod reads must lie in the CPU's memory", "MaskedArray",
        function=add_of(np.ma.array([1.0]))),
]


@pytest.mark.parametrize(("error", "must_hold", "given", "arguments"), COMPILED,
                         ids=[case[2] for case in COMPILED])
def test_a_mod_that_cannot_be_compiled(error, must_hold, given, arguments):
    raises(error, must_hold, given, mods.compile_score_mod, **arguments, precision="float32")


class OfTheUserError(Exception):
    pass


def refuses(*positions):
    """A mod that raises where it is called on one number, or on an array of one."""
    if positions[-1] >= 0:
        raise OfTheUserError
    return positions[-1] < 0


@pytest.mark.parametrize("len_q", [1, 9], ids=["decode", "forward"])
@pytest.mark.parametrize("call", [
    sd.attention, lambda query, key, value, **options: sd.attention_weights(query, key, **options),
    lambda query, key, value, **options: sd.attention_stats(query, key, **options),
], ids=["attention", "weights", "stats"])  # fmt: skip
def test_a_mod_that_raises(call, len_q):
    arrays = {"query": ones((len_q, 8)), "key": ones((1, 8)), "value": ones((1, 8))}
    message = raises(cpu.ModError, "score_mod and mask_mod must work for every position", "raised",
                     call, **arrays, impl="kernels", mask_mod=refuses)
    assert "impl='blockwise'" in message
    if len_q == 1:
        with pytest.raises(OfTheUserError):
            call(**arrays, mask_mod=refuses)


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
    one(ValueError, KERNELS, "the tensors are being traced or are of a subclass",
        query=lambda t: t.as_subclass(type("Own", (type(t),), {})), impl=lambda _: "kernels"),
]
# What has no derivative rule of its own is differentiated operation by operation.
TORCH_WEIGHTS = [
    one(ValueError, KERNELS, "a tensor requires a gradient",
        query=lambda t: t.requires_grad_(), impl=lambda _: "kernels"),
]
TORCH_STATE = [
    *each(TypeError, "a.out and b.out must belong to one library", "numpy and torch",
          b=[lambda t: sd.State(t, t[0])]),
    *each(TypeError, "a.out and a.lse must belong to one library", "numpy and torch",
          a=[lambda t: sd.State(ones((2, 3)), t)]),
    *each(TypeError, "a.lse must be a dense tensor", "layout torch.sparse",
          a=[lambda t: sd.State(ones((7, 3)), t.to_sparse())]),
]


@pytest.mark.filterwarnings("ignore")  # of PyTorch, about some of these kinds of tensors
@pytest.mark.parametrize(PARAMETERS, table(
    attention=TORCH, attention_weights=TORCH_WEIGHTS, merge=TORCH_STATE,
))  # fmt: skip
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
    raises(TypeError, f"rows {WHOLE}", "values that are being traced", rows, QUERY, np.arange(2))
    raises(TypeError, f"rows {WHOLE}", "list", jax.jit(lambda query, row: sd.attention_weights(
        query, query, rows=[0, row])), QUERY, 1)
    raises(TypeError, "scale must be a real number", "Tracer", jax.jit(
        lambda query, scale: sd.attention_weights(query, query, scale=scale)), QUERY, 2.0)
    packed = jax.jit(lambda x, starts: sd.varlen_attention(x, x, x, starts, starts))
    raises(TypeError, f"{STARTS_Q} {WHOLE}", "values that are being traced", packed,
           PACKED["query"], np.array([0, 5]))


@pytest.mark.parametrize(PARAMETERS, table(**GRADIENTS))
def test_gradients(function, error, must_hold, given, arguments):
    raises(error, must_hold, given, differentiate, function, arguments)


def leaves():
    torch = pytest.importorskip("torch")
    return [torch.ones(1, 2, 2, dtype=torch.float64, requires_grad=True) for _ in range(3)]


def test_gradients_of_what_a_library_differentiates():
    """And of what it traces."""
    jax = pytest.importorskip("jax")
    message = "attention_vjp and attention_jvp must be given plain arrays"
    raises(TypeError, message, "torch differentiates", sd.attention_vjp, *leaves())
    raises(TypeError, message, "jax differentiates", jax.jit(
        lambda *operands: sd.attention_vjp(*operands)[0]), QUERY, KEY, VALUE)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # forward mode uses it
def test_derivatives_that_torch_cannot_have():
    torch = pytest.importorskip("torch")
    from scaledot import _torch_ops

    mods = "score_mod and mask_mod must be None in a call that PyTorch traces"
    raises(TypeError, mods, "a function", _torch_ops.arguments, leaves()[0],
           Options(mask_mod=lambda b, h, i, j: i >= j), False)

    def square(query):
        return sd.attention(query, *others).square().sum()

    query, *others = leaves()
    pair = {"score_mod": (lambda s, b, h, i, j: s * 2, lambda s, b, h, i, j: s * 0 + 2)}
    (first,) = torch.autograd.grad(square(query), query, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), query, create_graph=True)
    raises(ValueError, "attention must be differentiated at most twice", "a third derivative",
           second.sum().backward)
    raises(ValueError, "forward mode must be around reverse mode, or once", "forward mode around",
           torch.func.jacfwd(torch.func.jacfwd(square)), query)

    (first,) = torch.autograd.grad(sd.attention(query, *others, **pair).square().sum(), query,
                                   create_graph=True)
    raises(ValueError, "second derivatives must be of a call without score_mod", "a score_mod",
           first.sum().backward)


def test_derivatives_that_jax_cannot_have():
    jax = pytest.importorskip("jax")

    key, value = map(jax.numpy.asarray, (KEY, VALUE))

    def loss(query):
        return (sd.attention(query, key, value) ** 2).sum()

    def second(query):
        return jax.jvp(jax.grad(loss), (query,), (query,))[1].sum()

    message = raises(ValueError, "derivatives of attention under JAX must be of first or second",
                     "a third derivative", jax.grad(second), jax.numpy.asarray(QUERY))
    assert "impl='blockwise'" in message


COUNTS = [
    *each(ValueError, "n must be at least 1", n=[0, -2]),
    *each(TypeError, "n must be a whole number", n=[1.5, 2.0, True, np.True_, "2"]),
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
    arrays = {name: np.repeat(x, 32, axis=-2) for name, x in BASE.items()}  # to share among threads
    raises(ValueError, VARIABLE, repr(text), run, "attention", arrays | {"impl": "kernels"})


def test_an_unknown_target(monkeypatch):
    monkeypatch.setenv("SCALEDOT_TARGET", "sse2")
    raises(ValueError, "SCALEDOT_TARGET must be one of avx512, ", "'sse2'", target.detect)


def test_nonsense_in_the_variable_of_a_new_process():
    program = f"import sys; sys.path.insert(0, {str(SOURCE.parent)!r}); import numpy, scaledot\n"
    program += "scaledot.get_num_threads()"
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
    "merge": each(ValueError, BROADCAST, f"a.out ({LONG}, 4, 8)",
                  a=[sd.State(TOKENS, TOKENS[..., 0])]),
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


def error_calls(tree, builders):
    """Calls that build an error; what a function only returns is raised where it is called."""
    returned = [n.value for n in ast.walk(tree) if isinstance(n, ast.Return)]
    return [n for n in ast.walk(tree) if isinstance(n, ast.Call) and n not in returned
            and ast.unparse(n.func).rpartition(".")[2] in builders]


def error_builders(trees):
    """Names of functions that return an error for their caller to raise, and of the errors."""
    names, before = {"ValueError", "TypeError", "value_error", "type_error"}, set()
    functions = [f for tree in trees for f in ast.walk(tree) if isinstance(f, ast.FunctionDef)]
    while names != before:
        before = set(names)
        names |= {f.name for f in functions for n in ast.walk(f) if isinstance(n, ast.Return)
                  and isinstance(n.value, ast.Call) and ast.unparse(n.value.func) in before}
    return names


def without_a_test(root, seen):
    """Errors of the core that no test saw raised in the statement that builds them."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8"))
             for path in sorted({*root.glob("_*.py"), *root.glob("_*/**/*.py")})}
    builders, missing = error_builders(trees.values()), []
    for path, tree in trees.items():
        if path.stem in ELSEWHERE:
            continue
        file = path.relative_to(root).as_posix()
        lines = [range(n.lineno, n.end_lineno + 1) for n in ast.walk(tree)
                 if isinstance(n, ast.Raise)]
        tested = [span for span in lines if any((file, line) in seen for line in span)]
        missing += sorted(
            f"{file}:{n.lineno} {ast.unparse(n.args[0])}" for n in error_calls(tree, builders)
            if not any(n.lineno in span for span in tested)
        )
    return missing


def test_an_error_without_a_test_is_found(tmp_path):
    (tmp_path / "_new.py").write_text(
        "def check(x):\n    if x:\n        raise value_error('x must hold', x, 'Change it.')\n"
        "    error = _errors.type_error('y must hold', x, 'Change it.')\n    raise error\n"
        "def _far(name, x):\n    return value_error(f'{name} must be near', x, 'Change it.')\n"
        "def measure(x):\n    if x:\n        raise _far('x', x)\n    raise _far('y', x)\n"
        "def plain(x):\n    raise TypeError('z must hold')\n"
    )
    missing = ["_new.py:3 'x must hold'", "_new.py:4 'y must hold'", "_new.py:10 'x'",
               "_new.py:11 'y'", "_new.py:13 'z must hold'"]
    assert sorted(without_a_test(tmp_path, [])) == sorted(missing)
    seen = [("_new.py", line) for line in (3, 5, 7, 11, 13)]
    assert without_a_test(tmp_path, seen) == ["_new.py:10 'x'", "_new.py:4 'y must hold'"]


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
