"""Imports point strictly down, and files and functions stay small enough to read.

Each check returns what is wrong as a list of lines; its twins plant one fault in a copy of the
package and expect exactly that fault.
"""

import ast
import shutil
from pathlib import Path

import pytest

import scaledot

SOURCE = Path(scaledot.__file__).parent

# From low to high. Within the package, a module imports from lower layers only; the top-level
# `__init__` joins the underscore modules, and what is loaded by name alone lies above it.
LAYERS = (
    ("_typing", "_watch"),
    ("_errors",),
    ("_arrays", "_targets"),
    ("_threads", "_checks"),
    ("_spec", "_family_checks"),
    ("_masks", "_scores", "_state"),
    ("_reference", "_kernels"),
    ("_blockwise", "_launch", "_stats_view"),
    ("_derivatives", "_stats"),
    ("_bridges",),
    ("_choice", "_packed", "_page_kernels", "_code_kernels", "_kernel_gradients",
     "_stat_kernels"),
    ("_passes",),
    ("_torch_ops", "_torch_closures", "_torch_calls", "_torch_exchange", "_packed_gradients"),
    ("_torch_rules", "_jax_rules"),
    ("_torch_packed",),
    ("_rules",),
    ("_attention", "_attention_stats", "_explain"),
    ("_chunks", "_gradients"),
    ("_cache_memory", "_cache_file", "_ring_transport"),
    ("_cache_checks", "_cache_attention", "_ring_plan", "_ring_rules"),
    ("_cache", "_paged", "_ring", "_ulysses", "_stream", "_varlen", "_family"),
    ("_paged_cache",),
    ("__init__",),
    ("introspect", "plot", "testing", "torch", "jax"),
    ("report", "lessons", "transformers", "diffusers"),
    ("cli",),
    ("__main__",),
)
HEIGHT = {name: height for height, names in enumerate(LAYERS) for name in names}
# Packages whose modules may import one another.
TOGETHER = ("cli", "introspect", "lessons", "plot", "report", "transformers", "_kernels")
PURE = ("_masks", "_scores", "_state")  # mathematics that runs on arrays of any library
ARRAY_LIBRARIES = {
    "array_api_compat", "array_api_strict", "cupy", "dask", "jax", "jaxlib", "ml_dtypes", "sparse",
    "tensorflow", "torch",
}
FILE_LINES = 500  # at most
FUNCTION_LINES = 60  # fewer, without the docstring


def modules(root):
    """Files of the package with the parts of their module names, `__init__` kept."""
    for path in sorted(root.rglob("*.py")):
        yield path, path.relative_to(root).with_suffix("").parts


def tree_of(path):
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imported(tree, parts):
    """Names of the modules that a module imports, wherever it does, relative ones resolved."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = ("scaledot", *parts[:-1])
                package = package[: len(package) - node.level + 1]
                base = ".".join((*package, base) if base else package)
            yield from ((node, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:  # import_module("...")
            name = ast.unparse(node.func).rsplit(".", 1)[-1]
            if name in ("import_module", "__import__") and isinstance(node.args[0], ast.Constant):
                yield node, node.args[0].value


def component(root, name):
    """First part below the package of what is imported; None for other packages."""
    first, *rest = name.split(".")
    if first != "scaledot":
        return None
    inside = rest and ((root / f"{rest[0]}.py").exists() or (root / rest[0]).is_dir())
    return rest[0] if inside else "__init__"


def import_faults(root):
    faults = []
    for path, parts in modules(root):
        own, where = parts[0], "/".join(parts)
        if own not in HEIGHT:
            faults.append(f"{where} has no layer")
            continue
        for _, name in imported(tree_of(path), parts):
            target = component(root, name)
            if target is None:
                if own in PURE and name.split(".")[0] in ARRAY_LIBRARIES:
                    faults.append(f"{where} imports an array library: {name}")
            elif target == own and len(parts) > 1:
                if own not in TOGETHER and parts[1:] != ("__init__",):
                    faults.append(f"{where} imports its sibling {name}")
            elif target in HEIGHT and HEIGHT[target] >= HEIGHT[own]:
                faults.append(f"{where} imports {name}, which is not below it")
    return faults


def size_faults(root):
    faults = []
    for path, parts in modules(root):
        where = "/".join(parts)
        count = len(path.read_text(encoding="utf-8").splitlines())
        if count > FILE_LINES:
            faults.append(f"{where} has {count} lines")
        if parts[0] == "_kernels" and parts[-1].startswith("simd"):
            continue  # emitters of instructions
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                count = function_lines(node)
                if count >= FUNCTION_LINES:
                    faults.append(f"{where} {node.name} has {count} lines")
    return faults


def function_lines(node):
    """Lines from `def` to the end without those of the docstring."""
    count = node.end_lineno - node.lineno + 1
    if ast.get_docstring(node, clean=False) is not None:
        count -= node.body[0].end_lineno - node.body[0].lineno + 1
    return count


def name_faults(root):
    """Files that say nothing by their names, and public functions that swallow arguments."""
    faults = []
    exported = {
        alias.asname or alias.name for node in tree_of(root / "__init__.py").body
        if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    for path, parts in modules(root):
        where = "/".join(parts)
        if parts[-1].strip("_") in ("util", "utils", "helpers", "misc", "common"):
            faults.append(f"{where} is a name for anything")
        hidden = any(part.startswith("_") for part in parts if part != "__init__")
        public = [
            node for node in tree_of(path).body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            and (node.name in exported if hidden else not node.name.startswith("_"))
        ]
        for node in public:
            functions = node.body if isinstance(node, ast.ClassDef) else [node]
            faults += [
                f"{where} {function.name} takes **{function.args.kwarg.arg}"
                for function in functions
                if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
                and function.args.kwarg is not None
            ]
    return faults


CHECKS = (import_faults, size_faults, name_faults)


@pytest.mark.parametrize("check", CHECKS)
def test_the_package(check):
    assert check(SOURCE) == []


def test_every_layer_names_a_module_once():
    names = [name for layer in LAYERS for name in layer]
    assert len(names) == len(set(names))
    assert {parts[0] for _, parts in modules(SOURCE)} <= set(names)


NOT_BELOW = "which is not below it"
LONG = "def long(x):\n" + "    x += 1\n" * (FUNCTION_LINES - 1)
DOCUMENTED = 'def long(x):\n    """First.\n\n    More.\n    """\n' + "    x += 1\n" * 59
TWINS = {
    "up": (import_faults, "_spec.py", "from scaledot._attention import attention\n",
           [f"_spec imports scaledot._attention.attention, {NOT_BELOW}"]),
    "up, the whole package": (import_faults, "_chunks.py", "import scaledot\n",
                              [f"_chunks imports scaledot, {NOT_BELOW}"]),
    "up, a public name": (import_faults, "_varlen.py", "from scaledot import attention\n",
                          [f"_varlen imports scaledot.attention, {NOT_BELOW}"]),
    "up, to a leaf": (import_faults, "__init__.py", "from scaledot import plot\n",
                      [f"__init__ imports scaledot.plot, {NOT_BELOW}"]),
    "up, in a function": (import_faults, "_errors.py", "def f():\n    from . import _arrays\n",
                          [f"_errors imports scaledot._arrays, {NOT_BELOW}"]),
    "up, from a package": (import_faults, "lessons/_page.py", "from ..cli import main\n",
                           [f"lessons/_page imports scaledot.cli.main, {NOT_BELOW}"]),
    "up, by a string": (import_faults, "_errors.py", "import_module('scaledot._spec')\n",
                        [f"_errors imports scaledot._spec, {NOT_BELOW}"]),
    "same layer": (import_faults, "_masks.py", "from scaledot import _scores\n",
                   [f"_masks imports scaledot._scores, {NOT_BELOW}"]),
    "same layer, packages": (import_faults, "_reference.py", "import scaledot._kernels.forward\n",
                             [f"_reference imports scaledot._kernels.forward, {NOT_BELOW}"]),
    "itself": (import_faults, "_masks.py", "from scaledot._masks import visible\n",
               [f"_masks imports scaledot._masks.visible, {NOT_BELOW}"]),
    "unknown": (import_faults, "_new.py", "", ["_new has no layer"]),
    "unknown package": (import_faults, "extra/__init__.py", "", ["extra/__init__ has no layer"]),
    "siblings apart": (import_faults, "_bridges/_planted.py", "from scaledot._bridges import one\n",
                       ["_bridges/_planted imports its sibling scaledot._bridges.one"]),
    "siblings together": (import_faults, "lessons/_planted.py", "from . import _page\n", []),
    "down": (import_faults, "_masks.py", "from scaledot import _arrays\nimport numpy\n", []),
    "array library": (import_faults, "_state.py", "def f():\n    import torch.nn\n",
                      ["_state imports an array library: torch.nn"]),
    "long function": (size_faults, "_planted.py", LONG, ["_planted long has 60 lines"]),
    "long method": (size_faults, "_planted.py", "class C:\n    " + LONG.replace("\n", "\n    "),
                    ["_planted long has 60 lines"]),
    "documented function": (size_faults, "_planted.py", DOCUMENTED, ["_planted long has 60 lines"]),
    "short function": (size_faults, "_planted.py", LONG.replace("    x += 1\n", "", 1), []),
    "emitter": (size_faults, "_kernels/simd_planted.py", LONG, []),
    "long file": (size_faults, "_planted.py", "x = 1\n" * 501, ["_planted has 501 lines"]),
    "full file": (size_faults, "_planted.py", "x = 1\n" * 500, []),
    "utils": (name_faults, "lessons/_utils.py", "", ["lessons/_utils is a name for anything"]),
    "kwargs": (name_faults, "_attention.py", "def attention(x, **options): ...\n",
               ["_attention attention takes **options"]),
    "kwargs of a method": (name_faults, "_state.py", "class State:\n    def f(self, **more): ...\n",
                           ["_state f takes **more"]),
    "kwargs of a leaf": (name_faults, "plot.py", "def f(**more): ...\n", ["plot f takes **more"]),
    "private kwargs": (name_faults, "_masks.py", "def f(**more): ...\n", []),
}


@pytest.mark.heavy  # each reads the whole package
@pytest.mark.parametrize(("check", "file", "planted", "expected"), TWINS.values(), ids=TWINS)
def test_a_planted_fault_is_found(check, file, planted, expected, tmp_path):
    root = tmp_path / "scaledot"
    shutil.copytree(SOURCE, root, ignore=shutil.ignore_patterns("data", "__pycache__"))
    path = root / file
    path.parent.mkdir(exist_ok=True)
    with path.open("a", encoding="utf-8") as opened:
        opened.write(planted)
    assert sorted(set(check(root)) - set(check(SOURCE))) == expected
