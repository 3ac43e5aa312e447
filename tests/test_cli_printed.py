"""``scaledot inspect``: what it prints about the heads, and how its report is called."""

import importlib

import numpy as np
import pytest

from scaledot import introspect
from scaledot.cli import _inspect, _load
from test_cli_inspect import operands, saved, succeed


def test_findings_are_printed(tmp_path):
    # All heads but the last look one token back; the last has nothing to tell keys apart.
    key = np.zeros((2, 4, 16, 16))
    key[:] = np.eye(16) * 9
    query = np.roll(key, 1, axis=-2) * 4
    query[1, 3] = 0
    query[0, 0] /= 10  # still back, but less
    files = saved(tmp_path, ".npz", {"query": query, "key": key})
    result = succeed(*files, "-o", tmp_path / "a.html")
    lines = result.stdout.splitlines()
    assert lines[0] == "layers 2, heads 4, queries 16, keys 16, float64"
    assert lines[1:8] == [
        "",
        "Found in 8 of 8 heads: saturated 7, uniform 1, previous token 7",
        "layer 0, head 1  saturated 1.00, previous token 1.00",
        "layer 0, head 2  saturated 1.00, previous token 1.00",
        "layer 0, head 3  saturated 1.00, previous token 1.00",
        "layer 1, head 3  uniform 1.00",
        "and 4 more, in the report",
    ]
    size = (tmp_path / "a.html").stat().st_size
    assert lines[-1].startswith(f"Report: {tmp_path / 'a.html'} ({size / 1024:,.1f} KiB), after ")


def test_findings_of_many_heads_are_few_lines(tmp_path, monkeypatch):
    def finding(kind, layer, head, score):
        return introspect.Finding(kind, layer, head, score, 0.0, "")

    # All of 30 × 9 heads do everything; which do it most differs from kind to kind.
    kinds = introspect.KINDS
    found = [
        finding(kind, layer, head, 1 - abs(layer - 3 * i) / 100 - head / 1e4)
        for layer in range(30) for head in range(9) for i, kind in enumerate(kinds)
    ]
    monkeypatch.setattr(introspect, "findings", lambda trace: found)
    monkeypatch.setattr(introspect, "unknown", lambda trace: {})
    files = saved(tmp_path, ".npz", operands(30, heads=9, kv_heads=1))
    lines = succeed(*files, "-o", tmp_path / "a.html").stdout.splitlines()
    assert len(lines) <= 30
    assert lines[2] == "Found in 270 of 270 heads: " + ", ".join(f"{kind} 270" for kind in kinds)
    heads = [line.split("  ")[0] for line in lines[3:-3]]
    assert [name.strip() for name in heads] == [
        f"layer {layer}, head {head}" for layer in range(0, 24, 3) for head in range(3)
    ]
    assert lines[3].startswith(f"layer 0, head 0   {kinds[0]} 1.00, {kinds[1]} 0.97, ")
    assert lines[-4:-2] == [
        ", ".join([
            f"layer 21, head 2  {kinds[7]} 1.00", *(f"{k} {1 - (7 - i) * 0.03:.2f}"
            for i, k in reversed(list(enumerate(kinds[:7]))))
        ]), "and 246 more, in the report",
    ]  # fmt: skip


def test_a_report_without_a_name_is_called_after_its_input(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "attention.html").write_bytes(b"of the demonstration")
    succeed(*saved(tmp_path, ".npz", operands()))
    succeed(*saved(tmp_path, ".npy", operands()))
    names = ["input-attention.html", "query-attention.html"]
    assert {path.name for path in tmp_path.glob("*.html")} == {"attention.html", *names}
    before = (tmp_path / names[0]).read_bytes()
    printed = succeed(tmp_path / "input.npz", "--title", "again").stdout
    assert f"{names[0]} exists and stays as it is (--force replaces it).\n" in printed
    assert "Report: input-attention-1.html (" in printed
    assert (tmp_path / names[0]).read_bytes() == before
    succeed(tmp_path / "input.npz", "--title", "again", "--force")
    assert (tmp_path / names[0]).read_bytes() == (tmp_path / "input-attention-1.html").read_bytes()
    assert (tmp_path / "attention.html").read_bytes() == b"of the demonstration"


def test_a_report_without_a_name_is_called_after_its_model(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    folders = importlib.import_module("model_folders")
    folder = folders.save_model("llama", tmp_path)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    printed = succeed("--model", folder, "--text", folders.TEXT).stdout
    assert "\nReport: llama-attention.html (" in printed
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["llama-attention.html"]
    source = _load.Source(tmp_path, "SmolLM2-1.7B.Q4_0.gguf")
    assert _inspect._own_name(source, []) == "SmolLM2-1.7B.Q4_0-attention.html"


def test_no_findings(tmp_path):
    result = succeed(*saved(tmp_path, ".npz", operands(2)), "-o", tmp_path / "a.html")
    none, unknown, *_ = result.stdout.split("\n\n")[1].splitlines()
    assert none == "No head does one of: " + ", ".join(introspect.KINDS[:6])
    assert unknown == (
        "Could not be told: induction, duplicate token (there are no tokens to compare)"
    )
