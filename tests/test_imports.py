"""What `import scaledot` loads, and the rules that every public name keeps."""

import ast
import dataclasses
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest

import scaledot as sd

SOURCE = Path(sd.__file__).parent
HEAVY = (
    "array_api_strict", "jax", "llvmlite", "matplotlib", "numba", "rich", "scipy", "threadpoolctl",
    "torch", "typer",
)
SUBMODULES = (
    "cli", "diffusers", "introspect", "jax", "lessons", "plot", "report", "testing", "torch",
    "transformers",
)
# All names of the design; a version has those whose functions it contains.
NAMES = (
    "Chunk", "Grads", "KVCache", "PagedKVCache", "Plan", "State", "Stats", "additive_attention",
    "attend_chunks", "attention", "attention_jvp", "attention_state", "attention_stats",
    "attention_vjp", "attention_weights", "explain", "get_num_threads", "merge",
    "multi_head_attention", "multiplicative_attention", "paged_attention", "read_ahead",
    "read_chunks", "retrieve", "ring_attention", "scaled_dot_product_attention",
    "set_num_threads", "ulysses_attention", "varlen_attention", "varlen_attention_vjp",
)
SETTINGS = ("get_num_threads", "set_num_threads")  # not computations: no arXiv id, no precision
TEXTBOOK = ("scaled_dot_product_attention",)  # the textbook's own signature
# What a cache holds came one after the other: its last tokens must not see each other's future.
# A table of pages says nothing without the lengths.
OF_CACHES = {("attention", "causal"), ("paged_attention", "causal"), ("paged_attention", "kv_len")}


def import_in_new_process(path, folder):
    """Names in sys.modules, and the file of the package, after `import scaledot` alone."""
    program = (
        "import json, sys, scaledot\n"
        "print(json.dumps([sorted(sys.modules), scaledot.__file__, scaledot.__version__]))"
    )
    environment = {name: x for name, x in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=False,
        env=environment | {"PYTHONPATH": os.pathsep.join(map(str, path))},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def too_much(modules):
    """Heavy packages, and submodules that load only when imported, among loaded modules."""
    heavy = {name.partition(".")[0] for name in modules} & set(HEAVY)
    return sorted(heavy | {f"scaledot.{name}" for name in SUBMODULES} & set(modules))


def test_import_from_the_sources_loads_nothing_heavy(tmp_path):
    modules, file, version = import_in_new_process([SOURCE.parent], tmp_path)
    assert Path(file).parent == SOURCE
    assert version == sd.__version__
    assert "scaledot._attention" in modules
    assert too_much(modules) == []


@pytest.mark.parametrize("name", [*HEAVY, "scaledot.plot", "scaledot.lessons"])
def test_a_planted_import_is_found(name, tmp_path):
    package = tmp_path / "scaledot"
    shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("data", "__pycache__"))
    if "." not in name:  # a stand-in, so that the real one need not be there
        (tmp_path / f"{name}.py").write_text("")
    else:
        shutil.rmtree(package / name.partition(".")[2], ignore_errors=True)
        (package / f"{name.partition('.')[2]}.py").write_text("")
    with (package / "__init__.py").open("a") as opened:
        opened.write(f"import {name}\n")
    modules, file, _ = import_in_new_process([tmp_path], tmp_path)
    assert Path(file) == package / "__init__.py"
    assert too_much(modules) == [name]


def test_the_version_is_a_literal_and_that_of_the_project():
    assigned = [
        node.value for node in ast.parse((SOURCE / "__init__.py").read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__"
    ]
    assert [type(value) for value in assigned] == [ast.Constant]
    project = SOURCE.parent.parent / "pyproject.toml"
    if not project.exists():
        pytest.skip("the package is not imported from a checkout")
    assert sd.__version__ == tomllib.loads(project.read_text())["project"]["version"]


def test_types_are_declared():
    assert (SOURCE / "py.typed").is_file()


def defined(root):
    """Functions and classes that the underscore modules define at their top level."""
    files = [*root.glob("_*.py"), *root.glob("_*/**/*.py")]
    return {
        node.name for file in files for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }


def test_the_names_of_the_design_are_public():
    assert set(NAMES) & defined(SOURCE) <= set(sd.__all__)


def test_all_is_sorted_and_all_there_is():
    assert sd.__all__ == sorted(set(sd.__all__))
    public = {
        name for name, x in vars(sd).items()
        if not name.startswith("_") and not isinstance(x, types.ModuleType)
    }
    assert public == set(sd.__all__)


def sections(docstring):
    """Text of each numpydoc section by its title; what comes before the first is ''."""
    found = re.split(r"^(\w[\w ]*)\n-{3,}$", inspect.cleandoc(docstring), flags=re.MULTILINE)
    return dict(zip(["", *found[1::2]], found[::2], strict=True))


def listed(section):
    """Names before the colons of a section of parameters or attributes."""
    heads = [line for line in section.splitlines() if line and not line[0].isspace()]
    return [n.strip().lstrip("*") for line in heads for n in line.partition(" :")[0].split(",")]


def doc_faults(name, function):
    """What a public function's docstring lacks."""
    if not function.__doc__:
        return [f"{name} has no docstring"]
    found, signature = sections(function.__doc__), inspect.signature(function)
    needed = ["Raises", "Examples"]
    needed += [] if name in SETTINGS else ["Notes", "References"]
    needed += ["Parameters"] if signature.parameters else []
    needed += [] if signature.return_annotation in (None, "None") else ["Returns"]
    faults = [f"{name} has no section {title}" for title in needed if title not in found]
    if signature.parameters:
        missing = set(signature.parameters) - set(listed(found.get("Parameters", "")))
        faults += [f"{name} does not describe {parameter}" for parameter in sorted(missing)]
    if ">>>" not in found.get("Examples", ">>>"):
        faults.append(f"{name} has no example that runs")
    summary = found[""].partition("\n")[0]
    if not summary.endswith("."):
        faults.append(f"{name} does not begin with one sentence")
    return faults


PUBLIC = {name: getattr(sd, name) for name in sd.__all__}
FUNCTIONS = {name: x for name, x in PUBLIC.items() if inspect.isfunction(x)}
CLASSES = {name: x for name, x in PUBLIC.items() if inspect.isclass(x)}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstring_of_a_function(name):
    assert doc_faults(name, FUNCTIONS[name]) == []


@pytest.mark.parametrize("name", CLASSES)
def test_docstring_of_a_class(name):
    cls = CLASSES[name]
    assert cls.__doc__
    assert "__doc__" in vars(cls)
    if hasattr(cls, "_fields") or dataclasses.is_dataclass(cls):
        fields = getattr(cls, "_fields", None) or [f.name for f in dataclasses.fields(cls)]
        assert listed(sections(cls.__doc__)["Attributes"]) == list(fields)


ATTENTION = inspect.signature(sd.attention).parameters
OPTIONS = [name for name in ATTENTION if name not in ("query", "key", "value")]


def signature_faults(name, function):
    """What in a signature differs from the rules, `attention` being the model."""
    signature = inspect.signature(function)
    faults = []
    shared = [p for p in signature.parameters if p in OPTIONS and (name, p) not in OF_CACHES]
    if shared != sorted(shared, key=OPTIONS.index):
        faults.append(f"{name} has its options in another order than attention")
    for parameter in signature.parameters.values():
        kind, where = parameter.kind, f"{name}({parameter.name})"
        if kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            faults.append(f"{where} swallows arguments")
        if parameter.name in shared and name not in TEXTBOOK:
            model = ATTENTION[parameter.name]
            if kind is not parameter.KEYWORD_ONLY:
                faults.append(f"{where} is not keyword-only")
            if (parameter.default, parameter.annotation) != (model.default, model.annotation):
                faults.append(f"{where} differs from that of attention")
        if "bool" in str(parameter.annotation) and parameter.name != "causal":
            faults.append(f"{where} is a switch")
    returned = ast.parse(str(signature.return_annotation), mode="eval").body
    if isinstance(returned, ast.BinOp) or re.match(r"Union|Optional|Any$", ast.unparse(returned)):
        faults.append(f"{name} returns one of several types")
    return faults


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signature(name):
    assert signature_faults(name, FUNCTIONS[name]) == []


@pytest.mark.parametrize("name", CLASSES)
def test_signatures_of_methods(name):
    methods = [
        x for method, x in vars(CLASSES[name]).items()
        if inspect.isfunction(x) and method[0] != "_"
    ]
    assert [fault for x in methods for fault in signature_faults(x.__name__, x)] == []


def test_options_of_attention_are_keyword_only():
    kinds = {ATTENTION[name].kind for name in OPTIONS}
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}


def test_faults_in_signatures_and_docstrings_are_found():
    def bad(query, causal: bool = True, *, scale: float | None = None, mask=None,
            return_lse: bool = False, **options) -> int | str:
        """Do

        Parameters
        ----------
        query, causal : what
        """

    assert signature_faults("bad", bad) == [
        "bad has its options in another order than attention",
        "bad(causal) is not keyword-only",
        "bad(causal) differs from that of attention",
        "bad(scale) differs from that of attention",
        "bad(mask) differs from that of attention",
        "bad(return_lse) is a switch",
        "bad(options) swallows arguments",
        "bad returns one of several types",
    ]
    assert doc_faults("bad", bad) == [
        *(f"bad has no section {s}" for s in ("Raises", "Examples", "Notes", "References",
                                              "Returns")),
        *(f"bad does not describe {p}" for p in ("mask", "options", "return_lse", "scale")),
        "bad does not begin with one sentence",
    ]
    bad.__doc__ = None
    assert doc_faults("bad", bad) == ["bad has no docstring"]


def test_a_name_that_is_not_public_is_found(tmp_path):
    (tmp_path / "_new.py").write_text("def retrieve(): ...\n\n\ndef _other(): ...\n")
    assert set(NAMES) & defined(tmp_path) == {"retrieve"}
