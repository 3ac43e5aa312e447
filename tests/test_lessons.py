"""Lessons: their numbers, what the command line prints, and their pictures."""

import dataclasses
import re
import sys

import numpy as np
import pytest

import naive
import scaledot as sd
from compare import EPS, assert_close
from scaledot import lessons, plot
from scaledot.lessons import _backward, _measure, _sentence
from test_plot import assert_tidy, pixels

typer = pytest.importorskip("typer")
testing = pytest.importorskip("typer.testing")
cli_frame = pytest.importorskip("scaledot.cli._app")
cli_lesson = pytest.importorskip("scaledot.cli._lesson")

ALL = ("saturation", "variance", "memory", "masking", "additive", "heads", "backward")


@pytest.fixture(scope="module")
def results():
    """Results of lessons, each computed once, by two threads."""
    found = {}

    def result(name):
        if name not in found:
            sd.set_num_threads(2)
            try:
                found[name] = getattr(lessons, name)()
            finally:
                sd.set_num_threads(None)
        return found[name]

    return result


@pytest.fixture
def run(monkeypatch, results):
    """Run ``lesson`` with arguments, without computing a lesson twice."""
    once = {name: lambda name=name: results(name) for name in ALL}
    for name in ALL:
        once[name].__doc__ = lessons.LESSONS[name].__doc__
    monkeypatch.setattr(lessons, "LESSONS", once)
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(cli_frame.guarded(cli_lesson.lesson))

    def run(*arguments):
        runner = testing.CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"})
        return runner.invoke(app, [str(a) for a in arguments])

    return run


def test_names():
    assert ALL == lessons.NAMES
    assert all(getattr(lessons, name) is lessons.LESSONS[name] for name in ALL)


@pytest.mark.parametrize("name", ALL)
def test_a_result_is_frozen(results, name):
    result = results(name)
    field = dataclasses.fields(result)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(result, field, None)


def test_saturation(results):
    unscaled, scaled, far = results("saturation").cases
    assert unscaled.scores == (6, 4)
    assert scaled.scores == (3, 2)
    assert far.scores == (10, 1)
    assert [round(w, 5) for w in unscaled.weights] == [0.88080, 0.11920]
    assert [round(w, 5) for w in scaled.weights] == [0.73106, 0.26894]
    assert [round(w, 5) for w in far.weights] == [0.99988, 0.00012]
    gradients = [round(case.gradient, 6) for case in (unscaled, scaled, far)]
    assert gradients == [0.104994, 0.196612, 0.000123]


def test_variance(results):
    result = results("variance")
    assert result.num_pairs == 100_000
    assert result.d_k == (4, 64, 512)
    assert [round(v, 2) for v in result.unscaled] == [4.03, 63.20, 510.75]
    assert [round(v, 3) for v in result.scaled] == [1.007, 0.988, 0.998]


def test_variance_draws_in_blocks_what_one_draw_gives(monkeypatch):
    monkeypatch.setattr(lessons._variance, "_BLOCK", 7)
    rng = np.random.default_rng(3)
    q, k = rng.standard_normal((20, 5)), rng.standard_normal((20, 5))
    products, after = lessons._variance._products(np.random.default_rng(3), 20, 5)
    assert_close(products, (q * k).sum(-1), eps=EPS["float64"], len_kv=5)
    assert after.standard_normal() == rng.standard_normal()


def test_variance_holds_little_memory():
    rng = np.random.default_rng(0)
    (_, memory) = _measure.extra_memory(lambda: lessons._variance._products(rng, 20_000, 512)[0])
    assert memory < 20_000 * 512 * 8  # one of the two arrays


def test_memory(results):
    result = results("memory")
    assert result.lengths == (3, 512, 4096)
    assert result.scores == (9, 262_144, 16_777_216)
    assert result.full_matrix == (72, 2_097_152, 134_217_728)
    assert result.num_threads == 2


def test_memory_of_blockwise_is_a_fraction_of_the_matrix(results):
    result = results("memory")
    assert 0 < result.blockwise_measured[2] < result.full_matrix[2] / 8
    assert 0 < result.blockwise_predicted[2] < result.full_matrix[2] / 8


def test_memory_without_kernels(monkeypatch):
    def explain(*arrays, impl):
        if impl == "kernels":
            raise ValueError("no kernels")
        return sd.explain(*arrays, impl=impl)

    monkeypatch.setattr(lessons._memory, "explain", explain)
    monkeypatch.setattr(lessons._memory, "attention", lambda query, *_, **options: query)
    result = lessons.memory()
    assert result.kernels_predicted == (None, None, None)
    assert [row[3] for row in result.tables()[1].rows] == ["not here"] * 3


def test_memory_with_kernels(monkeypatch, results):
    result = dataclasses.replace(results("memory"), kernels_predicted=(1, 2000, 3))
    assert [row[3] for row in result.tables()[1].rows] == ["1", "2,000", "3"]


def test_extra_memory_counts_what_is_let_go_and_not_the_result():
    def call():
        scratch = np.ones(1_000_000)
        return scratch[:1000] + 1

    result, memory = _measure.extra_memory(call)
    assert result.shape == (1000,)
    assert 8_000_000 - 8000 <= memory < 8_100_000


def test_masking(results):
    result = results("masking")
    np.testing.assert_array_equal(result.visible, np.tri(5))
    np.testing.assert_array_equal(result.weights == 0, np.tri(5) == 0)
    assert_close(result.row_sums, np.ones(5), eps=EPS["float64"], len_kv=5)
    assert_close(result.weights.sum(-1), np.ones(5), eps=EPS["float64"], len_kv=5)
    assert result.largest_future == 0
    assert (result.weights[~result.visible] == 0).all()
    assert result.largest_padded == 0
    assert (result.padded_weights[:, result.kv_len :] == 0).all()
    assert (result.padded_weights[:, : result.kv_len] > 0).all()


def test_additive(results):
    result = results("additive")
    rng = np.random.default_rng(0)
    query, key, value = rng.standard_normal((3, 128, 64))
    w_q, w_k = rng.standard_normal((2, 64, 64)) / 8
    v = rng.standard_normal(64)
    options = {"eps": EPS["float64"], "len_kv": 128}
    truth = naive.attention(query, key, value)[0]
    assert_close(result.dot_out, truth, textbook(query @ key.T / 8, value), **options)
    truth = naive.additive(query, key, value, w_q, w_k, v)
    truth = truth[0] if isinstance(truth, tuple) else truth
    hidden = np.tanh((query @ w_q.T)[:, None] + key @ w_k.T)
    assert_close(result.additive_out, truth, textbook(hidden @ v, value), **options)
    assert result.dot_parameters == 0
    assert result.additive_parameters == 2 * 64 * 64 + 64
    assert result.dot_flops == 2 * 128 * 128 * 64 * 2
    # Projections, then sum, tanh, product and sum for each pair and hidden unit, then the values.
    assert result.additive_flops == 2 * 2 * 128 * 64 * 64 + 4 * 128**2 * 64 + 2 * 128**2 * 64
    assert result.dot_seconds > 0
    assert result.additive_seconds > 0


def textbook(scores, value):
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True) @ value


def test_heads(results):
    result = results("heads")
    assert result.narrow_shape == (12, 16, 32)
    assert result.wide_shape == (1, 16, 384)
    assert result.narrow_flops == result.wide_flops == 2 * 2 * 16 * 16 * 384
    assert result.narrow_weights.shape == (12, 16)
    assert round(float(result.narrow_weights[1, result.tokens.index("animal")]), 3) == 0.677
    # One wide head: the scores of the narrow ones add up.
    data = _sentence.load()
    q, k = (x[3, :, :].astype(np.float64) for x in (data.query, data.key))
    it = data.tokens.index("it")
    scores = sum(q[h, it] @ k[h].T for h in range(12)) / np.sqrt(384)
    truth = np.exp(scores) / np.exp(scores).sum()
    single = (scores - scores.max()).astype(np.float32)
    yardstick = np.exp(single) / np.exp(single).sum()
    assert_close(result.wide_weights[0], truth, yardstick, eps=EPS["float32"], len_kv=384)
    assert np.abs(result.wide_weights - result.narrow_weights).max(-1).min() > 0.1


def test_backward(results):
    result = results("backward")
    assert result.d_k == (4, 8, 16, 32, 64, 128, 256, 512, 1024)
    for ratio in (result.query_ratio, result.key_ratio):
        assert ratio[-1] < 0.01
        assert ratio[-1] < ratio[-2] < ratio[-3] < ratio[-4] < 1 < ratio[0]
    for scaled in (result.query_scaled, result.key_scaled):
        assert max(scaled) < 2 * min(scaled)
    assert min(result.mean_ratio) > 1  # what the text says of the mean


def test_backward_trains_with_the_scale_alone(results):
    result = results("backward")
    assert result.trained_seeds > 5
    assert result.steps[0] == 1
    for model in (result.scaled, result.unscaled):
        assert len(model.losses) == len(model.recalled) == len(result.rates)
        assert {len(losses) for losses in model.losses} == {len(result.steps)}
        assert len({losses[0] for losses in model.losses}) == 1  # one start for all rates
        assert model.lowest <= min(losses[-1] for losses in model.losses)
        assert model.best[-1] == min(losses[-1] for losses in model.losses)
    best = result.scaled.losses.index(result.scaled.best)
    assert result.scaled.best[-1] < result.scaled.best[0] / 100
    assert result.scaled.recalled[best] == 1
    assert 0 < best < len(result.rates) - 1  # rates on both sides of the best were tried
    # What the text says: of all seeds and rates none beats a model that always answers 0.
    assert result.unscaled.lowest > 1
    assert max(result.unscaled.recalled) < 0.5


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_backward_descends_along_the_gradient(scale):
    rng = np.random.default_rng(0)
    w_q, w_k = rng.standard_normal((2, 5, 16)) / 2
    asked, named, value = (rng.standard_normal((6, n)) for n in (5, 5, 3))

    def by_jacobian(dtype):
        x, y, v = (z.astype(dtype) for z in (named, asked, value))
        q, k = y @ w_q.astype(dtype), x @ w_k.astype(dtype)
        dq, dk, loss = np.zeros_like(q), np.zeros_like(k), dtype(0)
        for i in range(6):
            scores = dtype(scale) * k @ q[i]
            p = np.exp(scores - scores.max())
            p /= p.sum()
            error = p @ v - v[i]
            loss += (error**2).sum() / v.size
            ds = (np.diag(p) - np.outer(p, p)) @ (v @ (2 * error / v.size))
            dq[i] = dtype(scale) * k.T @ ds
            dk += dtype(scale) * np.outer(ds, q[i])
        return np.array([loss]), y.T @ dq, x.T @ dk

    step = _backward._step(w_q, w_k, asked, named, value, scale)
    got = (np.array([step.loss]), step.grad_w_q, step.grad_w_k)
    for one, truth, yardstick in zip(
        got, by_jacobian(np.longdouble), by_jacobian(np.float64), strict=True
    ):
        assert_close(one, truth, yardstick, eps=EPS["float64"], len_kv=6, factor=3.0)


def test_backward_trains_each_seed_and_rate_alone():
    rng = np.random.default_rng(1)
    w_q, w_k = rng.standard_normal((2, 3, 2, 5, 16))
    asked, named, value = (rng.standard_normal((2, 6, n)) for n in (5, 5, 3))
    together = _backward._step(w_q, w_k, asked, named, value, 0.25)
    for i in np.ndindex(3, 2):
        s = i[1]
        alone = _backward._step(w_q[i], w_k[i], asked[s], named[s], value[s], 0.25)
        for name in alone._fields:
            one, all_of_them = getattr(alone, name), getattr(together, name)
            assert_close(all_of_them[i], one, eps=EPS["float64"], len_kv=6)


def test_backward_picture_on_given_axes_is_of_training(results):
    pytest.importorskip("matplotlib")
    result, given = results("backward"), plot.axes()
    ax = result.plot(given)
    assert ax is given
    assert len(ax.figure.axes) == 1
    assert [tuple(line.get_ydata()) for line in ax.lines] == [
        result.scaled.best, result.unscaled.best,
    ]  # fmt: skip
    assert_tidy(ax)
    left, right = result.plot().figure.axes
    assert tuple(left.lines[0].get_ydata()) == result.query_scaled
    assert_tidy(left)
    assert [tuple(line.get_ydata()) for line in right.lines] == [
        tuple(line.get_ydata()) for line in ax.lines
    ]


@pytest.mark.parametrize("name", ALL)
def test_printed(run, results, name):
    result = run(name)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0] == results(name).title
    assert max(map(len, lines)) <= 80
    assert "…" not in result.output  # nothing is cut off
    for table in results(name).tables():
        for row in table.rows:
            in_order = re.compile(r"\s+".join(map(re.escape, filter(None, row))))
            assert any(in_order.search(line) for line in lines), row
        assert all(column in result.output for column in table.columns)


def test_printed_numbers(run):
    output = run("saturation").output
    assert "0.88080  0.11920" in output
    assert "0.104994" in output
    output = run("variance").output
    assert all(n in output for n in ("4.03", "1.007", "63.20", "0.988", "510.75", "0.998"))
    output = run("memory").output
    assert all(n in output for n in ("16,777,216", "134,217,728", "2,097,152"))


def test_lessons_are_listed(run):
    result = run()
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert [line.split()[0] for line in lines[: len(ALL)]] == list(ALL)
    assert all(len(line.split()) > 5 for line in lines[: len(ALL)])
    assert max(map(len, lines)) <= 80


def test_an_unknown_lesson(run):
    result = run("saturated")
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert "'saturated'" in line
    assert ", ".join(ALL) in line


@pytest.mark.parametrize("name", ALL)
def test_picture(run, results, tmp_path, name):
    pytest.importorskip("matplotlib")
    assert_tidy(results(name).plot())
    path = tmp_path / f"{name}.png"
    result = run(name, "--plot", path)
    assert result.exit_code == 0, result.output
    assert str(path) in result.output.replace("\n", "")
    image = pixels(path)
    assert image.shape[0] > 400
    assert image.shape[1] > 500
    assert len(np.unique(image.reshape(-1, 3), axis=0)) > 50
    assert all((e == 255).all() for e in (image[0], image[-1], image[:, 0], image[:, -1]))


def test_picture_labels(results):
    pytest.importorskip("matplotlib")
    ax = results("saturation").plot()
    assert [t.get_text() for t in ax.texts] == [
        "0.88080", "0.73106", "0.99988", "0.11920", "0.26894", "0.00012",
    ]  # fmt: skip
    ax = results("heads").plot()
    assert [t.get_text() for t in ax.get_xticklabels()] == list(results("heads").tokens)
    assert [t.get_text() for t in ax.get_yticklabels()][:2] == ["one wide head", "head 0"]
    ax = results("variance").plot()
    drawn = [tuple(line.get_ydata()) for line in ax.lines]
    assert drawn[0] == (4, 64, 512)
    assert drawn[2] == results("variance").unscaled
    ax = results("memory").plot()
    assert tuple(ax.lines[0].get_ydata()) == results("memory").full_matrix
    ax = results("masking").plot()
    assert "".join(t.get_text() for t in ax.texts) == "1000011000111001111011111"


def test_picture_as_svg(run, tmp_path):
    pytest.importorskip("matplotlib")
    assert run("masking", "--plot", tmp_path / "a.svg").exit_code == 0
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")


def test_a_picture_is_replaced_only_with_force(run, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "a.png"
    path.write_bytes(b"old")
    result = run("masking", "--plot", path)
    assert result.exit_code == 2
    assert "--force" in result.stderr
    assert result.stdout == ""  # refused before the lesson
    assert path.read_bytes() == b"old"
    assert run("masking", "--plot", path, "--force").exit_code == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_another_kind_is_refused(run, tmp_path):
    result = run("masking", "--plot", tmp_path / "a.gif")
    assert result.exit_code == 2
    assert ".png or .svg" in result.stderr


def test_a_picture_needs_matplotlib(run, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run("masking", "--plot", tmp_path / "a.png")
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert "pip install 'scaledot[plot]'" in line
    assert run("masking").exit_code == 0


def test_the_sentence_cannot_be_changed():
    data = _sentence.load()
    assert data is _sentence.load()
    assert data.query.shape == data.key.shape == data.value.shape == (6, 12, 16, 32)
    with pytest.raises(ValueError, match="read-only"):
        data.query[0] = 0
