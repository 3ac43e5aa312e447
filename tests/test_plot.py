"""Pictures: what is on the axes, what is in the file, and that nothing touches or is cut off."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from scaledot import plot

SRC = Path(__file__).resolve().parents[1] / "src"
TOKENS = ["[CLS]", "the", "animal", "was", "$tired$"]


@pytest.fixture
def matplotlib():
    return pytest.importorskip("matplotlib")


@pytest.fixture
def weights():
    scores = np.random.default_rng(0).standard_normal((5, 5))
    return np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)


def pixels(path):
    image = pytest.importorskip("matplotlib.image").imread(path)
    return (image[..., :3] * 255).round().astype(int)


def texts(ax):
    """Every text that is drawn on the axes' figure and not empty, with its box in pixels."""
    figure = ax.figure
    figure.draw_without_rendering()
    text = pytest.importorskip("matplotlib.text").Text
    tick = pytest.importorskip("matplotlib.axis").Tick
    # Axes keep ticks that they do not draw: outside the limits, or left over.
    drawn = {id(t) for one in figure.axes for axis in (one.xaxis, one.yaxis) for t in ticks(axis)}
    kept = [t for t in figure.findobj(tick) if id(t) not in drawn]
    hidden = {id(label) for t in kept for label in (t.label1, t.label2)}
    found = [t for t in figure.findobj(text) if t.get_visible() and t.get_text().strip()]
    return [(t, t.get_window_extent()) for t in found if id(t) not in hidden]


def ticks(axis):
    low, high = sorted(axis.get_view_interval())
    every = (*axis.get_major_ticks(), *axis.get_minor_ticks())
    return [tick for tick in every if low <= tick.get_loc() <= high]


def assert_tidy(ax):
    """No text overlaps another or leaves the figure."""
    found = texts(ax)
    assert found
    width, height = ax.figure.canvas.get_width_height()
    for i, (text, box) in enumerate(found):
        assert 0 <= box.x0 < box.x1 <= width, text.get_text()
        assert 0 <= box.y0 < box.y1 <= height, text.get_text()
        for other, its in found[i + 1 :]:
            assert not box.overlaps(its), (text.get_text(), other.get_text())


def labels(ticks):
    return [t.get_text() for t in ticks]


def test_assert_tidy_can_fail(matplotlib):
    ax = plot.axes()
    ax.text(0.5, 0.5, "one")
    ax.text(0.5, 0.5, "two")
    with pytest.raises(AssertionError, match="one"):
        assert_tidy(ax)
    ax = plot.axes()
    ax.text(0.9, 0.5, "leaves the figure at its right edge").set_in_layout(False)
    with pytest.raises(AssertionError, match="leaves"):
        assert_tidy(ax)


def test_weights(matplotlib, weights):
    ax = plot.weights(weights, TOKENS, title="One head")
    assert labels(ax.get_xticklabels()) == TOKENS
    assert labels(ax.get_yticklabels()) == TOKENS
    assert ax.get_title() == "One head"
    (image,) = ax.images
    np.testing.assert_array_equal(image.get_array(), weights)
    assert image.get_clim() == (0.0, weights.max())
    assert_tidy(ax)


def test_weights_are_dark_where_they_are_large(matplotlib, tmp_path):
    path = plot.save(plot.weights(np.eye(4)[::-1], list("abcd")), tmp_path / "weights.png")
    image = pixels(path)
    heat = image[: image.shape[0] * 2 // 3, : image.shape[1] // 2].sum(-1)
    assert heat.min() < 255 < 700 < heat.max()


def test_weights_of_another_shape_have_labels_of_their_own(matplotlib, weights):
    ax = plot.weights(weights[:2], ["a", "b"], TOKENS)
    assert labels(ax.get_yticklabels()) == ["a", "b"]
    assert labels(ax.get_xticklabels()) == TOKENS
    ax = plot.weights(weights[:2], ["a", "b"])
    assert "a" not in labels(ax.get_xticklabels())


def test_many_labels_are_thinned_out(matplotlib):
    names = [f"token{i}" for i in range(500)]
    ax = plot.weights(np.eye(500), names)
    shown = labels(ax.get_xticklabels())
    assert shown[:2] == ["token0", "token8"]
    assert len(shown) == 63
    assert_tidy(ax)


def test_long_labels_do_not_touch(matplotlib):
    assert_tidy(plot.weights(np.eye(16), [f"longtoken{i}" for i in range(16)]))


def test_weights_all_zero(matplotlib):
    assert plot.weights(np.zeros((2, 3))).images[0].get_clim() == (0.0, 1.0)


def test_weights_of_torch(matplotlib):
    torch = pytest.importorskip("torch")
    x = torch.tensor([[0.25, 0.75]], requires_grad=True)
    np.testing.assert_array_equal(plot.weights(x).images[0].get_array(), [[0.25, 0.75]])


def test_weights_on_given_axes(matplotlib, weights):
    ax = plot.axes()
    assert plot.weights(weights, ax=ax) is ax


@pytest.mark.parametrize("shape", [(5,), (1, 5, 5), (0, 5)])
def test_weights_must_be_a_matrix(matplotlib, shape):
    with pytest.raises(ValueError, match=r"weights must be a matrix .* Choose one head"):
        plot.weights(np.zeros(shape))


def test_labels_must_fit(matplotlib, weights):
    with pytest.raises(ValueError, match="row_labels must have one label for each of 5, got 2"):
        plot.weights(weights, ["a", "b"])
    with pytest.raises(ValueError, match="column_labels must have one label for each of 5, got 1"):
        plot.weights(weights, TOKENS, ["a"])


def test_mask(matplotlib):
    visible = np.tri(3, 5, 2, dtype=bool)
    ax = plot.mask(visible, title="Causal")
    assert "".join(t.get_text() for t in ax.texts) == "111001111011111"
    np.testing.assert_array_equal(ax.images[0].get_array(), visible)
    assert_tidy(ax)


def test_large_mask_has_no_digits(matplotlib):
    assert not plot.mask(np.tri(17)).texts
    assert len(plot.mask(np.tri(16)).texts) == 256


def test_mask_refuses_weights(matplotlib, weights):
    with pytest.raises(ValueError, match=r"must hold only 0 and 1 .*plot\.weights"):
        plot.mask(weights)


def test_bars(matplotlib):
    ax = plot.bars(["a", "b"], {"first": [0.25, 0.5], "second": [0.75, 0.5]}, y_label="weight")
    assert [bar.get_height() for bar in ax.patches] == [0.25, 0.5, 0.75, 0.5]
    assert [t.get_text() for t in ax.texts] == ["0.25000", "0.50000", "0.75000", "0.50000"]
    assert labels(ax.get_xticklabels()) == ["a", "b"]
    assert {"first", "second", "weight"} <= {t.get_text() for t, _ in texts(ax)}
    assert_tidy(ax)


def test_series_are_told_apart_without_colours(matplotlib):
    ax = plot.bars(["a", "b"], {str(i): [1.0, 2.0] for i in range(4)})
    hatches = [[bar.get_hatch() or "" for bar in group] for group in ax.containers]
    assert all(first == second for first, second in hatches)
    assert len({first for first, _ in hatches}) == 4
    drawn = ax.figure.legends[0].get_patches()
    assert [patch.get_hatch() or "" for patch in drawn] == [first for first, _ in hatches]
    rows = {str(i): [1.0, 2.0] for i in range(4)}
    lines = plot.curves([1, 2], rows, rows).lines
    assert len({line.get_marker() for line in lines[4:]}) == 4
    assert len({str(line.get_linestyle()) for line in lines[:3]}) == 3
    assert not any(line.is_dashed() for line in lines[4:])


def test_curves(matplotlib):
    ax = plot.curves(
        [4, 64, 512], {"seen": [4.1, 63, 510]}, {"theory": [4, 64, 512]}, x_label="d", y_label="v"
    )
    theory, seen = ax.lines
    np.testing.assert_array_equal(theory.get_ydata(), [4, 64, 512])
    np.testing.assert_array_equal(seen.get_ydata(), [4.1, 63, 510])
    assert theory.get_linestyle() == "--"
    assert seen.get_linestyle() == "None"
    assert theory.get_color() == seen.get_color()
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert labels(ax.get_xticklabels()) == ["4", "64", "512"]
    assert {"seen", "theory", "d", "v"} <= {t.get_text() for t, _ in texts(ax)}
    assert_tidy(ax)


def test_series_must_fit(matplotlib):
    with pytest.raises(ValueError, match="measured must have 2 values, got 3 for 'seen'"):
        plot.curves([1, 2], {"seen": [1, 2, 3]})
    with pytest.raises(ValueError, match="series must hold at most 4 entries, got 5"):
        plot.bars(["a"], {str(i): [1.0] for i in range(5)})


def test_a_legend_stays_inside_axes_that_were_given(matplotlib):
    ax = plot.axes()
    plot.curves([1, 2], {"seen": [1, 2]}, ax=ax)
    assert ax.get_legend() is not None
    assert not ax.figure.legends


@pytest.mark.parametrize("name", ["a.png", "a.svg", "A.PNG"])
def test_save(matplotlib, weights, tmp_path, name):
    path = plot.save(plot.weights(weights, TOKENS), tmp_path / name)
    assert path == tmp_path / name
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG" if name.lower().endswith("png") else b"<?xml")
    assert 4_000 < len(data) < 400_000
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_saved_png_is_a_picture_with_a_white_frame(matplotlib, weights, tmp_path):
    image = pixels(plot.save(plot.weights(weights, TOKENS), tmp_path / "a.png"))
    assert len(np.unique(image.reshape(-1, 3), axis=0)) > 100
    frame = (image[0], image[-1], image[:, 0], image[:, -1])
    assert all((edge == 255).all() for edge in frame)
    assert 0.2 < (image == 255).all(-1).mean() < 0.9


def test_saved_svg_is_the_same_every_time(matplotlib, weights, tmp_path):
    first, second = (plot.save(plot.weights(weights), tmp_path / f"{i}.svg") for i in "ab")
    assert first.read_bytes() == second.read_bytes()


def test_save_takes_a_figure(matplotlib, tmp_path):
    assert plot.save(plot.axes().figure, tmp_path / "a.png").exists()
    with pytest.raises(TypeError, match="drawing must be Matplotlib axes or a figure, got ndarray"):
        plot.save(np.eye(2), tmp_path / "b.png")


def test_save_replaces_only_where_it_may(matplotlib, tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(b"old")
    with pytest.raises(FileExistsError, match=r"a\.png, which does.*--force"):
        plot.save(plot.axes(), path, overwrite=False)
    assert path.read_bytes() == b"old"
    plot.save(plot.axes(), path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_file_that_appears_while_it_draws_stays(matplotlib, tmp_path):
    path = tmp_path / "a.png"

    class Slow:
        figure = None

        def savefig(self, target, **_):
            path.write_bytes(b"theirs")
            Path(target).write_bytes(b"mine")

    Slow.figure = Slow()
    with pytest.raises(FileExistsError, match="must not exist yet"):
        plot.save(Slow(), path, overwrite=False)
    assert path.read_bytes() == b"theirs"
    assert [p.name for p in tmp_path.iterdir()] == ["a.png"]
    plot.save(Slow(), path)
    assert path.read_bytes() == b"mine"


def test_save_follows_a_link(matplotlib, tmp_path):
    (tmp_path / "link.png").symlink_to(tmp_path / "real.png")
    plot.save(plot.axes(), tmp_path / "link.png")
    assert (tmp_path / "link.png").is_symlink()
    assert (tmp_path / "real.png").read_bytes().startswith(b"\x89PNG")


def test_a_failed_save_leaves_the_old_file_alone(matplotlib, tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(b"old")

    class Broken:
        figure = None

        def savefig(self, target, **_):
            Path(target).write_bytes(b"half")
            raise OSError("disk full")

    Broken.figure = Broken()
    with pytest.raises(OSError, match="disk full"):
        plot.save(Broken(), path)
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.png"]


WRONG = {
    "weights of text": (lambda: plot.weights([["a"]]), TypeError, "weights must hold real numbers"),
    "ragged weights": (lambda: plot.weights([[1], [1, 2]]), ValueError, "rows that differ"),
    "weights of objects": (lambda: plot.weights([[None]]), TypeError, "must hold real numbers"),
    "a length": (lambda: plot.weights(np.eye(3), lengths=5), TypeError, "lengths must be a pair"),
    "half lengths": (lambda: plot.weights(np.eye(3), lengths=(5.5, 6)), TypeError,
                     "an entry of lengths must be an integer"),
    "a label": (lambda: plot.weights(np.eye(3), "abc"), TypeError,
                "row_labels must be a sequence of str, got str"),
    "titles": (lambda: plot.head_grid(np.ones((3, 2, 2)), titles=3), TypeError,
               "titles must be a sequence of str, got int"),
    "digits of a map": (lambda: plot.head_map(np.eye(3), digits=-1), ValueError,
                        "digits must be 0 to 16, got -1"),
    "digits of bars": (lambda: plot.bars(["a"], {"b": [1.0]}, digits=17), ValueError,
                       "digits must be 0 to 16, got 17"),
    "groups": (lambda: plot.bars(1, {"b": [1.0]}), TypeError, "groups must be a sequence of str"),
    "no bars": (lambda: plot.bars(["a"], {}), ValueError, "series must hold an entry"),
    "a list of bars": (lambda: plot.bars(["a"], [[1.0]]), TypeError, "series must be a mapping"),
    "bars of text": (lambda: plot.bars(["a"], {"b": ["c"]}), TypeError, "must hold real numbers"),
    "curves at 0": (lambda: plot.curves([0, 1], {"a": [1, 2]}), ValueError,
                    "x must be above 0, got 0"),
    "curves below 0": (lambda: plot.curves([1, 2], {"a": [1, -2]}), ValueError,
                       "values of 'a' must be above 0, got -2"),
    "theory of 0": (lambda: plot.curves([1], {"a": [1]}, {"b": [0]}), ValueError,
                    "values of 'b' must be above 0, got 0"),
    "scores of text": (lambda: plot.softmax_bars(["a"]), TypeError, "scores must hold real numb"),
    "a scale": (lambda: plot.softmax_bars([1.0], 2.0), TypeError, "scales must be a mapping or"),
    "a flat figure": (lambda: plot.axes(0, 3), ValueError, "width and height must be above 0"),
}


@pytest.mark.parametrize(("draw", "error", "message"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_drawn_is_refused(matplotlib, draw, error, message):
    with pytest.raises(error, match=message):
        draw()


def test_what_is_missing_leaves_a_gap(matplotlib):
    (line,) = plot.curves([1, 2, 4], {"a": [1, np.nan, 3]}).lines
    np.testing.assert_array_equal(line.get_ydata(), [1, np.nan, 3])


@pytest.mark.parametrize("name", ["a.pdf", "a", "png"])
def test_other_endings_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match=r"must end in \.png or \.svg"):
        plot.check_target(tmp_path / name)


def test_a_target_needs_a_folder_that_may_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(ValueError, match="the picture's folder must be writable"):
        plot.check_target(tmp_path / "a.png")


def test_a_target_needs_a_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="folder must exist"):
        plot.check_target(tmp_path / "none" / "a.png")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(IsADirectoryError, match="got the folder"):
        plot.check_target(tmp_path / "folder.png")


@pytest.mark.parametrize(
    "draw",
    [
        plot.axes,
        lambda: plot.weights(np.eye(2)),
        lambda: plot.mask(np.eye(2)),
        lambda: plot.bars(["a"], {"b": [1.0]}),
        lambda: plot.curves([1.0], {"b": [1.0]}),
        lambda: plot.head_grid(np.ones((1, 2, 2))),
        lambda: plot.head_map(np.eye(2)),
        lambda: plot.entropy(np.eye(2)),
        lambda: plot.saturation(np.eye(2)),
        lambda: plot.received([1.0]),
        lambda: plot.distances(np.eye(2)),
        lambda: plot.visible(2),
        lambda: plot.visible(70),
        lambda: plot.tiles(2, block_q=1, block_kv=1),
        lambda: plot.softmax_bars([1.0]),
        lambda: plot.variance([1], [1.0]),
        lambda: plot.data_flow(2, 2, 2),
        lambda: plot.save(None, "a.png"),
    ],
)
def test_without_matplotlib_the_error_names_the_command(monkeypatch, draw):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'scaledot\[plot\]'"):
        draw()


def test_matplotlib_is_imported_late_and_pyplot_never(matplotlib):
    program = (
        "import sys; from scaledot import plot, lessons; assert 'matplotlib' not in sys.modules; "
        "plot.weights([[1.0]]); assert 'matplotlib' in sys.modules; "
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": str(SRC)}, check=True)
