"""Compiled mods between calls: what is kept, what is current, what is refused and how."""

import gc
import math
import threading
import types

import numpy as np
import pytest

from native_mods import NATIVE, TABLE, check_score, reading, run
from scaledot._kernels import mods
from scaledot._kernels.mods import compile_mask_mod, compile_score_mod

CONFIG = types.SimpleNamespace(width=5)


@pytest.fixture
def compilations(monkeypatch):
    """Names of the functions that are compiled in a test, one after the other."""
    done = []

    class Counted(mods._Instance):
        def __init__(self, name, *rest):
            done.append(name)
            super().__init__(name, *rest)

    monkeypatch.setattr(mods, "_Instance", Counted)
    return done


def halved(score, batch, head, q_pos, kv_pos):
    return score * 2.0 ** -(head + 1)


def several_documents(batch, head, q_pos, kv_pos):
    return TABLE[batch, q_pos] == TABLE[batch, kv_pos]


def test_changes_in_place_are_seen(compilations):
    table, zero_d = TABLE.copy(), np.array(2.0)

    def score_mod(score, batch, head, q_pos, kv_pos):
        return score + table[head, q_pos] * zero_d

    check_score(score_mod)
    table += 1
    check_score(score_mod)
    zero_d[...] = -3
    check_score(score_mod)
    held = compile_score_mod(score_mod, "float32")
    table[:] = 7  # while the function is held
    assert run(held, np.zeros(2, np.float32)) == (0, pytest.approx([-21, -21], abs=0))
    assert len(compilations) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_changes_of_tensors_are_seen_by_the_next_call(compilations, dtype):
    torch = pytest.importorskip("torch")
    table = torch.ones(20, dtype=getattr(torch, dtype))

    def score_mod(score, batch, head, q_pos, kv_pos):
        return score + table[q_pos]

    for value in (1, 5):
        table.fill_(value)
        mod = compile_score_mod(score_mod, "float32")
        assert run(mod, np.zeros(1, np.float32))[1] == value
    assert len(compilations) == 1


def test_a_large_table_is_not_compiled_in(compilations):
    tables = [np.full((4, 700_000), value, np.float32) for value in (3, 8)]
    for table in tables:
        mod = compile_score_mod(reading(table), "float32")
        status, got = run(mod, np.zeros(2, np.float32), q_pos=699_990)
        assert status == 0
        assert (got == table[0, 0]).all()
        size = len(mod.keep.instance.code.inspect_llvm())
        del mod  # its code can serve the next table
    assert size < table.nbytes // 100
    assert len(compilations) == 1


def test_arrays_are_kept_as_long_as_the_mod():
    mod = compile_score_mod(reading(np.full((4, 99_999), 5, np.float32)), "float32")
    gc.collect()
    others = [np.full((4, 99_999), 6, np.float32) for _ in range(4)]
    assert run(mod, np.zeros(2, np.float32))[1].tolist() == [5, 5]
    assert len(others) == 4


def test_two_tables_at_once(compilations):
    first, second = np.full((4, 30), 1, np.float64), np.full((4, 30), 2, np.float64)
    a = compile_score_mod(reading(first), "float32")
    same = compile_score_mod(reading(first), "float32")
    b = compile_score_mod(reading(second), "float32")
    got = [run(mod, np.zeros(1, np.float32))[1] for mod in (a, b, same)]
    assert got == [1, 2, 1]
    assert a.address == same.address != b.address
    assert len(compilations) == 2
    del a, same
    c = compile_score_mod(reading(np.full((4, 30), 3, np.float64)), "float32")
    assert run(c, np.zeros(1, np.float32))[1] == 3
    assert run(b, np.zeros(1, np.float32))[1] == 2
    assert len(compilations) == 2


def test_what_is_compiled_again(compilations):
    def made(width, table=TABLE):
        return lambda batch, head, q_pos, kv_pos: (q_pos - kv_pos < width) & (table[0, 0] < 9)

    for _ in range(3):
        compile_mask_mod(made(3))
    assert len(compilations) == 1
    compile_mask_mod(made(4))
    compile_mask_mod(made(4.0))
    assert len(compilations) == 3
    compile_mask_mod(made(3))
    compile_mask_mod(made(3, TABLE + 1))
    assert len(compilations) == 3


def test_equal_numbers_of_other_kinds_are_told_apart():
    for value in (0.0, -0.0, np.float32(-0.0), 0):
        mod = compile_score_mod(lambda s, b, h, i, j, value=value: s * 0 + 1 / value, "float32")
        got = run(mod, np.ones(1, np.float32))[1]
        assert got == math.copysign(math.inf, value)


def test_both_precisions(compilations):
    for _ in range(2):
        for precision in ("float32", "float64"):
            check_score(halved, precision)
    assert len(compilations) <= 2  # fewer where another test compiled it


def test_numbers_that_change_at_each_call(compilations):
    """As the length of a growing cache does."""
    for length in range(20):
        def score_mod(score, batch, head, q_pos, kv_pos, *, length=length, rate=length / 8):
            return score * rate - abs(q_pos - length)

        check_score(score_mod)
    assert len(compilations) <= mods.VARIANTS + 1


def test_a_number_that_must_be_a_constant(compilations):
    """The parts of this tuple have no common type, so that no number can choose among them."""
    for index in (0, 1, 0, 1, 0):
        for added in (2, 5, 7):
            parts = (added, (1.5, 2.5))
            if index == 0:
                check_score(lambda s, b, h, i, j, p=parts, at=index: s + p[at])
            else:
                check_score(lambda s, b, h, i, j, p=parts, at=index: s + p[at][0])
    assert len(compilations) <= 8


def test_the_least_recently_used_is_dropped(compilations, monkeypatch):
    monkeypatch.setattr(mods, "KEPT", 2)
    monkeypatch.setattr(mods, "_programs", type(mods._programs)())
    functions = [
        lambda b, h, i, j: i > j, lambda b, h, i, j: i > j + 1, lambda b, h, i, j: i > j + 2
    ]
    for index in (0, 1, 0, 2, 0):
        compile_mask_mod(functions[index])
    assert len(compilations) == 3
    compile_mask_mod(functions[1])
    assert len(compilations) == 4
    assert len(mods._programs) == 2


def test_threads(compilations):
    def work(value, start, faults):
        table = np.full((4, 30), value, np.float32)
        start.wait()
        for _ in range(50):
            mod = compile_score_mod(reading(table), "float64")
            status, got = run(mod, np.zeros(5))
            if status != 0 or not (got == value).all():
                faults.append((value, status, got))

    start, faults = threading.Barrier(4), []
    threads = [threading.Thread(target=work, args=(v, start, faults)) for v in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert 1 <= len(compilations) <= 4


def test_threads_with_one_function_compile_it_once(compilations):
    start, functions = threading.Barrier(4), []

    def work():
        start.wait()
        functions.append(compile_mask_mod(several_documents).address)

    mods._programs.clear()
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(functions)) == 1
    assert len(functions) == 4
    assert compilations == ["mask_mod"]


@pytest.mark.parametrize("index", [20, 2**40, -21])
def test_an_index_out_of_bounds_is_a_status(index):
    def score_mod(score, batch, head, q_pos, kv_pos):
        return score + TABLE[head, q_pos]

    mod = compile_score_mod(score_mod, "float32")
    assert run(mod, np.zeros(3, np.float32), q_pos=index)[0] == 1
    assert run(mod, np.zeros(3, np.float32), q_pos=18)[0] == 1  # the third one is
    assert run(mod, np.zeros(3, np.float32), head=4, q_pos=0)[0] == 1
    status, got = run(mod, np.zeros(3, np.float32), q_pos=-20)  # from the end, as in Python
    assert status == 0
    assert np.array_equal(got, TABLE[2, :3])


def test_an_exception_is_a_status():
    def mask_mod(batch, head, q_pos, kv_pos):
        if q_pos > 5:
            raise ValueError("too far")
        return q_pos > 3

    mod = compile_mask_mod(mask_mod)
    assert run(mod, np.zeros(4, np.uint8))[0] == 1
    status, seen = run(mod, np.zeros(3, np.uint8))
    assert (status, seen.tolist()) == (0, [0, 1, 1])


def test_no_queries():
    mod = compile_score_mod(reading(TABLE), "float32")
    assert NATIVE(mod.address)(0, 0, 0, 10**6, 0, 0) == 0


def failing_helper(x):
    y = x + 1
    return y.nothing


LINE = failing_helper.__code__.co_firstlineno + 2
NUMBERS = {"x": 1}


def writes(score, batch, head, q_pos, kv_pos):
    TABLE[0, 0] = 1
    return score


COMPILE = "score_mod must be a function that Numba can compile"
FAILURES = {
    "attribute in a helper": (
        lambda s, b, h, i, j: s + failing_helper(i), COMPILE,
        f"test_mods_cache.py, line {LINE}: Unknown attribute 'nothing' of type int64"),
    "unknown name": (lambda s, b, h, i, j: s + nowhere, COMPILE, "'nowhere'"),  # noqa: F821
    "text": (lambda s, b, h, i, j: s + "a", COMPILE, "add(float32, Literal[str](a))"),
    "dictionary": (lambda s, b, h, i, j: s + NUMBERS["x"], COMPILE, "test_mods_cache.py, line "),
    "too few arguments": (lambda s, b, h, i: s, COMPILE, "5 argument types given, but function"),
    "writing": (writes, COMPILE, "setitem(readonly array(float32, 2d, C)"),
    "no function": (3, COMPILE, "(float32, int64, int64, int64, int64)"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_what_cannot_be_compiled(name, compilations):
    function, must_hold, given = FAILURES[name]
    for _ in range(2):
        with pytest.raises(ValueError, match=r"Use impl='blockwise', which calls") as info:
            compile_score_mod(function, "float32")
        assert str(info.value).startswith(f"{must_hold}, got ")
        assert given in str(info.value)
        assert "\n" not in str(info.value)
    assert len(compilations) == 1  # the refusal is remembered


@pytest.mark.parametrize(("compiled", "function", "given"), [
    (compile_score_mod, lambda s, b, h, i, j: i, "a floating-point number, got int64. "),
    (compile_score_mod, lambda s, b, h, i, j: None, "a floating-point number, got none. "),
    (compile_score_mod, lambda s, b, h, i, j: i > j, "a floating-point number, got bool. "),
    (compile_mask_mod, lambda b, h, i, j: i & j, "a boolean, got int64. "),
    (compile_mask_mod, lambda b, h, i, j: 0.5 * i, "a boolean, got float64. "),
], ids=["int", "none", "bool", "int-mask", "float-mask"])
def test_the_type_of_a_result(compiled, function, given):
    precision = ("float32",) if compiled is compile_score_mod else ()
    name = "score_mod" if precision else "mask_mod"
    with pytest.raises(TypeError) as info:
        compiled(function, *precision)
    assert str(info.value) == f"{name} must return {given}Combine its arguments."


def test_an_attribute_that_is_missing():
    def mask_mod(batch, head, q_pos, kv_pos):
        return q_pos > CONFIG.nothing

    with pytest.raises(TypeError, match=r"^mask_mod must read attributes that exist.*, got "
                       r"SimpleNamespace\.nothing\. Use impl='blockwise'"):
        compile_mask_mod(mask_mod)


def test_a_function_that_numpy_has_not():
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"got torch\.sigmoid\. Use impl='blockwise'"):
        compile_score_mod(lambda s, b, h, i, j: torch.sigmoid(s), "float32")


@pytest.mark.parametrize(("array", "given"), [
    (np.ma.array([1.0, 2.0]), "an array of the subclass MaskedArray"),
    (np.array([1, "a"], dtype=object), "an array of object"),
    (np.zeros(2, "f4,i4"), "an array of [('f0', '<f4'), ('f1', '<i4')]"),
], ids=["masked", "object", "record"])
def test_arrays_that_cannot_be_read(array, given):
    with pytest.raises(TypeError) as info:
        compile_score_mod(lambda s, b, h, i, j: s + array[0], "float32")
    assert str(info.value).startswith("arrays that score_mod reads must lie in the CPU's memory")
    assert f", got {given}. Use impl='blockwise'" in str(info.value)


def test_tensors_that_cannot_be_read():
    torch = pytest.importorskip("torch")
    trained = torch.ones(3, requires_grad=True)
    for tensor, given in {
        "gradient": (trained, "a tensor that requires a gradient"),
        "meta": (torch.ones(3, device="meta"), "a tensor on meta, layout torch.strided"),
        "sparse": (torch.ones(3).to_sparse(), "a tensor on cpu, layout torch.sparse_coo"),
        "subclass": (torch.ones(3).as_subclass(type("Own", (torch.Tensor,), {})),
                     "a tensor of the subclass Own"),
    }.values():
        with pytest.raises(TypeError, match=f", got {given}. Use impl='blockwise'"):
            compile_score_mod(lambda s, b, h, i, j, t=tensor: s + t[0], "float32")
    with torch.no_grad():
        mod = compile_score_mod(lambda s, b, h, i, j: s + trained[0], "float32")
        assert run(mod, np.zeros(1, np.float32))[1] == 1


def test_tensors_that_are_transformed():
    torch = pytest.importorskip("torch")

    def inside(tensor):
        with pytest.raises(TypeError, match=r"a tensor that NumPy cannot read, of torch\.float32"):
            compile_score_mod(lambda s, b, h, i, j: s + tensor, "float32")
        return tensor

    torch.func.vmap(inside)(torch.ones(2))


def test_arrays_that_are_traced():
    jax = pytest.importorskip("jax")

    def inside(x):
        with pytest.raises(TypeError, match="an array that is being traced or transformed"):
            compile_score_mod(lambda s, b, h, i, j: s + x, "float32")
        return x

    jax.jit(inside)(1.0)
