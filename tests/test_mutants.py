"""The tool that plants bugs: its list is true, its answers are right, it touches nothing."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import mutants
from mutants import MUTANTS, Mutant, check

ROOT = Path(__file__).resolve().parents[1]
SOURCE = "src/scaledot/__init__.py"
FIRST, SECOND = "tests/test_small.py::test_double", "tests/test_small.py::test_nothing"
KILLED = Mutant("killed", SOURCE, "2 * x", "3 * x", (SECOND, FIRST))  # as long as before
SURVIVES = Mutant("survives", SOURCE, "2 * x", "3 * x", (SECOND,))
STALE = Mutant("stale", SOURCE, "4 * x", "3 * x", (FIRST,))
TWICE = Mutant("twice", SOURCE, "x", "y", (FIRST,))
BROKEN = Mutant("broken", SOURCE, "2 * x", "2 *", (FIRST,))
TESTS = sorted({test for mutant in MUTANTS for test in mutant.tests})


@pytest.fixture
def project(tmp_path):
    """A package with one function, and two tests."""
    root = tmp_path / "project"
    for folder in ("src/scaledot", "tests", "tools"):
        (root / folder).mkdir(parents=True)
    (root / SOURCE).write_text("def double(x):\n    return 2 * x\n")
    (root / "tests/test_small.py").write_text(
        "import scaledot\n\n"
        "def test_nothing():\n    pass\n\n"
        "def test_double():\n    assert scaledot.double(3) == 6\n"
    )
    (root / "pyproject.toml").write_text('[tool.pytest.ini_options]\npythonpath = ["src"]\n')
    (root / "README.md").write_text("A project.\n")
    return root


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Another package of that name, which Python finds without any copy."""
    place = tmp_path / "installed" / "scaledot"
    place.mkdir(parents=True)
    (place / "__init__.py").write_text("def double(x):\n    return x + x\n")
    monkeypatch.setenv("PYTHONPATH", str(place.parent))
    return place


def contents(root):
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_list_fits_the_code(mutant):
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    assert text.count(mutant.old) == 1
    assert mutant.new != mutant.old
    compile(text.replace(mutant.old, mutant.new), mutant.file, "exec")
    assert mutant.tests


def test_the_tests_of_the_list_have_these_names():
    named = {}
    for test in TESTS:
        path, *scopes = test.partition("[")[0].split("::")
        if path not in named:
            named[path] = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
        body = named[path]
        for scope in scopes:
            body = next((node.body for node in body if getattr(node, "name", "") == scope), None)
            assert body is not None, test


@pytest.mark.heavy  # it imports the files that they are in
def test_the_tests_of_the_list_are_there():
    """To the parameters in brackets; the tool would stop at one that has another name now."""
    command = [sys.executable, "-m", "pytest", *mutants.PYTEST, "--collect-only", *TESTS]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


def test_names_are_unique_and_listed(capsys):
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names)
    assert mutants.main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == names
    assert mutants.main(["--list", names[3]]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


@pytest.mark.parametrize("arguments", [["no-such-name"], ["--jobs", "0"]], ids=" ".join)
def test_wrong_arguments(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        mutants.main(arguments)
    assert stopped.value.code == 2
    assert "must be" in capsys.readouterr().err


def test_what_survives_and_what_no_longer_fits(project, capsys):
    before = contents(project)
    assert check(project, [KILLED, SURVIVES, STALE, TWICE, BROKEN], jobs=2) == 1
    lines = capsys.readouterr().out.splitlines()
    wanted = (
        f"killed by {FIRST}", "SURVIVED", "must occur once in src/scaledot/__init__.py, found 0",
        "found 2 times", "no test failed, but pytest ended with", "1 of 5 planted bugs found",
    )  # fmt: skip
    assert len(lines) == len(wanted)
    for line, part in zip(lines, wanted, strict=True):
        assert part in line
    assert contents(project) == before


def test_the_copy_comes_before_an_installed_package(project, installed, capsys):
    assert check(project, [KILLED], jobs=3) == 0
    assert f"killed by {FIRST}" in capsys.readouterr().out


def test_an_installed_package_is_not_tested(project, installed, capsys):
    (project / SOURCE).unlink()
    (project / SOURCE).parent.rmdir()
    assert check(project, [KILLED], jobs=1) == 2
    assert "scaledot must be imported from" in capsys.readouterr().out


@pytest.mark.parametrize("test", [FIRST, "tests/test_small.py::test_that_is_not_there"])
def test_tests_must_pass_without_a_bug(project, test, capsys):
    path = project / "tests/test_small.py"
    path.write_text(path.read_text().replace("== 6", "== 7"))
    assert check(project, [Mutant("any", SOURCE, "2 * x", "3 * x", (test,))], jobs=1) == 2
    output = capsys.readouterr().out
    assert test.split("::")[1] in output
    assert "must pass without a bug" in output
