"""Vector shapes of other processors: run where this one can run them, else compiled and read.

Numba is told the processor by its own settings, in a process of its own: LLVM then emits for that
processor, and the kernels choose their shapes by it.
"""

import functools
import itertools
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import llvmlite.binding as llvm
import numba
import numpy as np
import pytest

import cases
import scaledot as sd
import test_attention
import test_gradients
import test_gradients_options
import test_gradients_second
import test_tiles

SSE2 = ["sse", "sse2"]
AVX2 = [*SSE2, "sse3", "ssse3", "sse4.1", "sse4.2", "popcnt", "avx", "avx2", "fma", "f16c", "bmi",
        "bmi2", "lzcnt", "movbe"]  # fmt: skip
AVX512 = [*AVX2, "avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"]


class Processor(NamedTuple):
    """What LLVM calls it, what it has, and what must be seen in machine code for it."""

    cpu: str
    features: list[str]
    products: list[str]  # instructions of which an inner loop has mr · nr each, in float32
    foreign: str  # registers and instructions that it does not have
    dtypes: tuple[str, ...] = ("float32", "float64", "float16", "bfloat16")
    kinds: tuple[str, ...] = ("Single", "Double")


pytestmark = pytest.mark.heavy  # kernels of four targets are compiled

# Each kernel takes seconds to compile: a dtype is left out where another has the same loops.
PROCESSORS = {
    "avx2": Processor("haswell", AVX2, [r"vfmadd\d+ps\s.*ymm"], "zmm|bf16"),
    "generic": Processor("x86-64", SSE2, [r"mulps\s.*xmm", r"addps\s.*xmm"], "[yz]mm|fmadd|cvtph",
                         ("float32", "float64", "float16")),
    "avx512": Processor("skylake-avx512", AVX512, [r"vfmadd\d+ps\s.*zmm"], "bf16", ("bfloat16",)),
    "avx512-bf16": Processor(
        "cooperlake", [*AVX512, "avx512vnni", "avx512bf16"], [r"vdpbf16ps\s.*zmm"], r"v\w+ph\s",
        ("bfloat16",), ("Pairs",),
    ),
}  # fmt: skip
AARCH64 = "aarch64-unknown-linux-gnu"

on_x86 = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"),
    reason="LLVM makes code here for processors that are not x86-64",
)


def in_a_process(call, settings):
    """Run a function of this file in a process of other settings."""
    names = ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_OPT", "SCALEDOT_TARGET")
    given = {name: x for name, x in os.environ.items() if name not in names}
    paths = (str(Path(sd.__file__).parents[1]), str(Path(__file__).parent))
    given |= {"PYTHONPATH": os.pathsep.join(paths), "OPENBLAS_NUM_THREADS": "1", **settings}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"import test_targets; test_targets.{call}"],
        env=given, text=True, capture_output=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-8000:]


def settings_of(name):
    processor = PROCESSORS[name]
    features = ",".join(f"+{feature}" for feature in processor.features)
    return {"NUMBA_CPU_NAME": processor.cpu, "NUMBA_CPU_FEATURES": features}


def check_on(name, what):
    """Run a check by kernels for that processor, unless this one lacks its instructions."""
    host = llvm.get_host_cpu_features()
    lacking = [feature for feature in PROCESSORS[name].features if not host.get(feature)]
    if lacking:
        pytest.skip(f"this processor lacks {', '.join(lacking)}")
    in_a_process(f"check_{what}({name!r})", settings_of(name))


# One with products of bfloat16 runs all other tests so.
OTHERS = [name for name in PROCESSORS if name != "avx512-bf16"]


@on_x86
@pytest.mark.parametrize("name", OTHERS)
def test_results(name):
    check_on(name, "results")


@on_x86
@pytest.mark.parametrize("name", PROCESSORS)
def test_machine_code(name):
    """It need not run here: sums stay in registers, and no instruction is of another processor."""
    in_a_process(f"check_machine_code({name!r})", settings_of(name))


def test_machine_code_of_neon():
    """Compiled for AArch64, wherever this is; it is not run."""
    llvm.initialize_all_targets()
    try:
        llvm.Target.from_triple(AARCH64)
    except RuntimeError as error:
        pytest.skip(f"this LLVM makes no code for AArch64: {error}")
    in_a_process("check_neon()", {"SCALEDOT_TARGET": "neon", "NUMBA_OPT": "0"})


def check_target(name):
    from scaledot._kernels.target import HOST

    assert HOST.name == name.removesuffix("-bf16"), HOST
    assert HOST.bf16 == name.endswith("-bf16"), HOST
    assert (HOST.fma, HOST.f16) == ((name != "generic"),) * 2, HOST


# Few queries go to the decode kernel. The widths are no multiples of a vector, 70 is more than is
# summed in one go; the lengths leave rests in every block.
FEW = cases.Size(5, 150, d_k=19, d_v=7, num_heads=2, num_kv_heads=1)
MANY = cases.Size(21, 140, d_k=70, d_v=9, num_heads=2, num_kv_heads=1)
BLOCKS = cases.Size(130, 140, d_k=2, lead=())


def problems(dtype):
    """Every shape beside nothing; every third of the combinations that bring options together."""
    sizes = [cases.Size(n, 2 * n + 1, n, n + 1, lead=()) for n in (1, 2, 7, 9, 16, 33)]
    sizes += [cases.Size(101, 128, 64, 64, num_heads=1, lead=()), cases.Size(3, 1100, 32, 32)]
    sizes += [cases.Size(20, 0), cases.Size(12, 40, 3, 300, lead=()), FEW, MANY]
    for number, size in enumerate(sizes):
        yield f"{dtype} {size}", size, {}, number
    yield f"{dtype} blocks", BLOCKS, {"block_mask": cases.OPTIONS["block_mask"][1]}, 0
    for number, combination in list(enumerate(cases.pairwise()))[::3]:
        others = {name: x for name, x in combination.items() if name != "block_mask"}
        yield f"{dtype} {cases.label(others)}", (FEW, MANY)[number % 2], others, number


def check_results(name):
    check_target(name)
    wrong, count = [], 0
    for dtype in PROCESSORS[name].dtypes:
        for label, size, combination, number in problems(dtype):
            rng = np.random.default_rng(number)
            arrays = {n: x.astype(cases.dtype_named(dtype)) for n, x in size.arrays(rng).items()}
            arguments = arrays | cases.options_of(combination, size, rng)
            truth = test_attention.truth_of(arguments)
            try:
                test_attention.check(arguments, truth, dtype, "kernels")
            except AssertionError as error:
                wrong.append(f"{label}: {error}")
            count += 1
    assert not wrong, f"{len(wrong)} of {count}:\n" + "\n".join(wrong)


def gradient_checks(dtype):
    """Labels and checks: edges, every third of the options, forward mode, second derivatives."""
    widths = itertools.cycle((1, 7, 16, 33, 70))
    for len_q, len_kv in itertools.product((1, 7, 26, 130), (3, 129, 515)):
        size = {"d_k": next(widths), "d_v": next(widths), "num_heads": 2, "num_kv_heads": 1}
        arguments = test_tiles.arrays(dtype, len_q, len_kv, **size) | {"causal": len_q % 2 > 0}
        yield str((len_q, len_kv)), functools.partial(test_gradients.check_tiles, arguments, dtype)
    for name, options in list(test_tiles.OPTIONS.items())[::3]:
        arguments = test_tiles.arrays(dtype, 201, 300, num_heads=6, num_kv_heads=2, lead=(2,))
        yield name, functools.partial(test_gradients.check_tiles, arguments | options, dtype)
    yield "tangents", functools.partial(
        test_gradients_options.test_tangents_over_several_tiles, dtype, "kernels"
    )
    if dtype in ("float32", "float64"):
        for name in test_gradients_second.CASES:
            yield name, functools.partial(
                test_gradients_second.test_second_derivatives, name, dtype, "kernels"
            )


def check_gradients(name):
    check_target(name)
    wrong, count = [], 0
    for dtype in PROCESSORS[name].dtypes:
        for label, check in gradient_checks(dtype):
            try:
                check()
            except AssertionError as error:
                wrong.append(f"{dtype} {label}: {error}")
            count += 1
    assert not wrong, f"{len(wrong)} of {count}:\n" + "\n".join(wrong)


def compiled(function):
    """Library of a kernel that is compiled anew and not kept."""
    from scaledot._kernels.jit import Kernel

    class Unkept(Kernel):
        def _save(self, symbol):
            pass

    fresh = Unkept(function)
    fresh._compile()
    return fresh._library


def inner_loops(name):
    """Return functions of one micro-kernel each, scores and weighted values, in a kind."""
    from scaledot._kernels import kinds, matmul
    from scaledot._kernels.target import HOST

    kind = getattr(kinds, name)
    scores = matmul.make_scores(HOST.nr, add=False, last=True)
    accumulate = matmul.make_accumulate(HOST.nr)

    def scores_of(a, lda, ldb):
        b, c, top = a + 4096, a + 8192, a + 64
        scores(kind(0), a, lda, 1, b, ldb, ldb, c, ldb, top, kinds.number(kind(0), 0.5))
        return 0

    def accumulate_to(a, lda, ldb):
        b, c, factor = a + 4096, a + 8192, a + 64
        accumulate(kind(0), a, 1, lda, b, ldb, ldb, c, ldb, factor)
        return 0

    return scores_of, accumulate_to


def loops(assembly):
    """Bodies of the innermost loops: lines from a label to the jump back to it."""
    parts = re.split(r"^(\.L\w+):", assembly, flags=re.M)
    found = []
    for label, text in zip(parts[1::2], parts[2::2], strict=True):
        lines = [line.strip() for line in text.splitlines() if line.startswith("\t")]
        jumps = [i for i, x in enumerate(lines) if re.search(rf"\s{re.escape(label)}$", x)]
        if jumps:
            found.append(lines[: jumps[0] + 1])
    return found


def check_loop(assembly, products):
    """One loop holds mr · nr of each product for a step, and nothing goes to the stack there."""
    from scaledot._kernels.target import HOST

    with_products = [x for x in loops(assembly) if any(re.match(products[0], y) for y in x)]
    assert len(with_products) == 1, assembly
    (lines,) = with_products
    for product in products:
        matching = [line for line in lines if re.match(product, line)]
        assert len(matching) == HOST.mr * HOST.nr, "\n".join(lines)
    on_stack = [line for line in lines if re.search(r"\(%rsp|\[sp|Spill|Reload", line)]
    assert not on_stack, on_stack


def check_machine_code(name):
    check_target(name)
    from scaledot._kernels import weights

    processor = PROCESSORS[name]
    for kind in processor.kinds:
        products = processor.products
        if kind == "Double":
            products = [re.sub(r"ps\\", r"pd\\", product) for product in products]
        for function in inner_loops(kind):
            assembly = compiled(function).get_asm_str()
            check_loop(assembly, products)
            check_foreign(assembly, processor)
    if name in ("avx2", "generic"):  # a whole kernel: the smallest that has scores and exp
        assembly = compiled(weights.weigh_single.function).get_asm_str()
        assert all(re.search(product, assembly) for product in processor.products)
        check_foreign(assembly, processor)


def check_foreign(assembly, processor):
    foreign = [line for line in assembly.splitlines() if re.search(processor.foreign, line)]
    assert not foreign, foreign[:5]


def check_neon():
    check_target("neon")
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    for kind, lanes in {"Single": "4s", "Double": "2d"}.items():
        for function in inner_loops(kind):
            assembly = for_aarch64(str(compiled(function)._final_module))
            check_loop(assembly, [rf"fmla\s+v\d+\.{lanes},"])


def for_aarch64(code):
    """Optimise LLVM's code for AArch64 and make assembly of it."""
    assert numba.config.OPT == 0  # else it has been made for this processor
    machine = llvm.Target.from_triple(AARCH64).create_target_machine(opt=3)
    code = re.sub(r'(?<=target triple = ").*(?=")', AARCH64, code)
    code = re.sub(r'(?<=target datalayout = ").*(?=")', str(machine.target_data), code)
    module = llvm.parse_assembly(code)
    module.verify()
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(3))
    passes.getModulePassManager().run(module, passes)
    return machine.emit_assembly(module)
