"""Pictures of heads and keys: the numbers that are drawn, and how they are labelled."""

import itertools
import math

import numpy as np
import pytest

import scaledot as sd
from scaledot import introspect, plot
from test_plot import assert_tidy, labels, texts

pytest.importorskip("matplotlib")

from matplotlib.colors import to_rgb
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

LONG = 100_000
AWKWARD = ["$x$", "a\nb", "   ", "猫が好き", "🫠", "Donaudampfschifffahrtsgesellschaft", "\t", "é"]


@pytest.fixture
def heads(rng):
    """Query and key of four heads over nine tokens, and their causal weights."""
    query, key = rng.standard_normal((2, 4, 9, 8))
    return query, key, sd.attention_weights(query, key, causal=True)


def elements(ax):
    """Number of things that are drawn."""
    figure = ax.figure
    return len(figure.findobj(lambda a: isinstance(a, AxesImage | Line2D | Patch))) + len(texts(ax))


def heights(ax):
    """Heights of the bars."""
    return [patch.get_height() for patch in ax.patches if isinstance(patch, Rectangle)]


def legend_words(ax):
    (legend,) = ax.figure.legends or [ax.get_legend()]
    return [text.get_text() for text in legend.get_texts()]


def luminance(colour):
    """Relative luminance as WCAG 2 defines it."""
    parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour[:3]]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), parts, strict=True))


def contrast(first, second):
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def test_awkward_tokens_are_drawn_as_text():
    ax = plot.weights(np.eye(8), AWKWARD)
    assert labels(ax.get_yticklabels()) == [
        "$x$", "a\\nb", "␣␣␣", "U+732BU+304CU+597D…", "U+1FAE0", "Donaudampfschifffah…", "\\t", "é",
    ]  # fmt: skip
    assert_tidy(ax)
    assert_tidy(plot.received(np.eye(8), AWKWARD, title="猫"))
    assert_tidy(plot.visible(8, row_labels=AWKWARD, title="猫"))
    assert_tidy(plot.bars(AWKWARD[3:5], {"猫": [1.0, 2.0]}, y_label="猫"))


def test_characters_of_a_font_in_use_stay():
    import matplotlib as mpl

    mathtext = {"axes.formatter.use_mathtext": True}  # this font has Latin letters alone
    with mpl.rc_context({"font.family": ["cmr10", "not installed"], **mathtext}):
        label = labels(plot.weights(np.eye(1), ["aЖ"]).get_yticklabels())
    assert label == ["aU+0416"]
    with mpl.rc_context({"font.family": ["cmr10", "DejaVu Sans"], **mathtext}):
        assert labels(plot.weights(np.eye(1), ["aЖ"]).get_yticklabels()) == ["aЖ"]


@pytest.mark.parametrize("length", [4, 64, LONG])
@pytest.mark.parametrize("width", [None, 3.6])
def test_block_maps_have_true_places(length, width):
    cells = min(length, 16)
    names = [f"token{i}" for i in range(length)]
    given = None if width is None else plot.axes(width, 3.2)
    ax = plot.weights(np.tri(cells), names, lengths=(length, length), ax=given)
    assert ax.images[0].get_extent() == [-0.5, length - 0.5, length - 0.5, -0.5]
    shown = labels(ax.get_xticklabels())
    assert shown[0] == "token0"
    assert [f"token{int(place)}" for place in ax.get_xticks()] == shown
    assert (4 if width is None else 2) <= len(shown) <= 64
    assert_tidy(ax)


def test_lengths_are_those_of_a_larger_matrix():
    with pytest.raises(ValueError, match=r"lengths must be .* at least \(3, 4\).*got \(3, 2\)"):
        plot.weights(np.ones((3, 4)), lengths=(3, 2))
    with pytest.raises(ValueError, match="row_labels must have one label for each of 50"):
        plot.weights(np.ones((3, 4)), ["a"] * 3, lengths=(50, 60))


def test_head_grid(heads):
    weights = heads[2]
    ax = plot.head_grid(weights, title="Layer 0")
    for image, matrix in zip(ax.images, weights, strict=True):
        np.testing.assert_array_equal(image.get_array(), matrix)
        assert image.get_clim() == (0.0, weights.max())
    assert [text.get_text() for text in ax.texts] == ["head 0", "head 1", "head 2", "head 3"]
    weights = weights * np.array([0.2, 1, 0.5, 0.1])[:, None, None]
    own = plot.head_grid(weights, shared=False, titles=["a", "b", "$c$", "猫"])
    assert [image.get_clim()[1] for image in own.images] == list(weights.max(axis=(1, 2)))
    assert [text.get_text() for text in own.texts] == ["a", "b", "$c$", "U+732B"]
    assert_tidy(own)
    with pytest.raises(ValueError, match="titles must have one label for each of 4, got 1"):
        plot.head_grid(weights, titles=["a"])
    with pytest.raises(ValueError, match=r"weights must be an array .*got the shape \(9, 9\)"):
        plot.head_grid(weights[0])


def test_head_grid_of_layers_is_one_picture():
    weights = np.random.default_rng(0).random((12, 12, 5, 6))
    ax = plot.head_grid(weights, lengths=(LONG, LONG))
    shown = np.stack([image.get_array() for image in ax.images])
    np.testing.assert_array_equal(shown, weights.reshape(144, 5, 6))
    corners = [image.get_extent()[::3] for image in ax.images]  # left, top
    assert corners == sorted(corners, key=lambda corner: (corner[1], corner[0]))
    assert labels(ax.get_xticklabels()) == labels(ax.get_yticklabels()) == list(map(str, range(12)))
    assert "100,000 keys" in ax.get_xlabel()
    assert elements(ax) < 2000


def test_large_matrices_become_block_maps(rng):
    weights = rng.random((2, 130, 70))
    image = plot.head_grid(weights).images[1].get_array()
    truth = np.zeros((64, 64))
    counts = np.zeros(64)
    for i in range(130):
        counts[i * 64 // 130] += 1
        for j in range(70):
            truth[i * 64 // 130, j * 64 // 70] += weights[1, i, j]
    truth /= counts[:, None]
    # Sums of at most six numbers below 2, in another order.
    assert np.abs(image - truth).max() <= 6 * np.finfo(float).eps * truth.max()


def test_numbers_stand_out_from_their_cells():
    values = np.linspace(0, 1, 60).reshape(5, 12)
    ax = plot.head_map(values, label="share", digits=1)
    assert [text.get_text() for text in ax.texts] == [f"{x:.1f}" for x in values.ravel()]
    (image,) = ax.images
    for text, value in zip(ax.texts, values.ravel(), strict=True):
        # Of black and white one has at least √21, whatever the colour.
        assert contrast(to_rgb(text.get_color()), image.cmap(image.norm(value))) >= math.sqrt(21)
    assert_tidy(ax)


def test_nan_has_no_say_in_a_scale():
    weights = np.full((2, 3, 3), np.nan)
    weights[0, 0] = 0.25, 0.5, 0.25
    assert plot.weights(weights[0]).images[0].get_clim() == (0.0, 0.5)
    assert plot.weights(weights[1]).images[0].get_clim() == (0.0, 1.0)
    for shared in (True, False):
        first, second = plot.head_grid(weights, shared=shared).images
        assert first.get_clim() == (0.0, 0.5)
        assert second.get_clim() == (0.0, 0.5 if shared else 1.0)


def test_numbers_need_room():
    values = np.random.default_rng(0).random((96, 64))
    ax = plot.head_map(values)
    assert not ax.texts
    assert_tidy(ax)
    assert not plot.head_map(values[:12, :12], ax=plot.axes(2, 2)).texts
    assert len(plot.head_map(values[:2, :2], ax=plot.axes(2, 2)).texts) == 4


def test_head_map_without_a_number():
    ax = plot.head_map([[1.0, math.nan], [2.0, 3.0]])
    assert [text.get_text() for text in ax.texts] == ["1.00", "2.00", "3.00"]
    assert ax.images[0].get_clim() == (0.0, 3.0)
    low = plot.head_map([[1.0, 2.0]], smallest=None)
    assert low.images[0].get_clim() == (1.0, 2.0)
    assert plot.head_map([[math.nan]]).images[0].get_clim() == (0.0, 1.0)


def test_heads_and_layers_have_names():
    ax = plot.head_map(np.eye(2), layer_labels=["first", "last"], head_labels=["a", "b"])
    assert labels(ax.get_yticklabels()) == ["first", "last"]
    assert labels(ax.get_xticklabels()) == ["a", "b"]
    for name in ("layer_labels", "head_labels"):
        with pytest.raises(ValueError, match=f"{name} must have one label for each of 2, got 1"):
            plot.head_map(np.eye(2), **{name: ["a"]})
    with pytest.raises(ValueError, match=r"values must be a matrix \(num_layers, num_heads\)"):
        plot.head_map(np.ones(3))


def test_entropy_and_saturation_of_stats(heads):
    query, key, _ = heads
    options = {"causal": True, "q_offset": -1}  # the first query sees nothing
    stats = sd.attention_stats(query, key, **options)
    weights = sd.attention_weights(query, key, **options)[:, 1:]
    entropy = [
        np.mean([-math.fsum(p * math.log(p) for p in row if p > 0) for row in head])
        for head in weights
    ]
    drawn = plot.entropy([stats, stats]).images[0].get_array()
    assert drawn.shape == (2, 4)
    # Sums over eight keys and eight queries, in another order.
    bound = 64 * np.finfo(float).eps * max(entropy)
    assert np.abs(drawn - entropy).max() <= bound
    top = weights.max(axis=-1)
    ax = plot.saturation(stats)
    drawn = ax.images[0].get_array()
    assert np.abs(drawn - (top * (1 - top)).mean(axis=-1)).max() <= bound
    assert ax.images[0].get_clim() == (0.0, 0.25)
    one_head = sd.attention_stats(query[0], key[0], **options)
    assert np.abs(plot.entropy(one_head).images[0].get_array() - entropy[0]).max() <= bound


def test_a_head_that_sees_nothing_is_white(heads):
    query, key, _ = heads
    mask = np.ones((4, 1, 9), dtype=bool)
    mask[2] = False
    stats = sd.attention_stats(query, key, mask=mask)
    for draw in (plot.entropy, plot.saturation):
        ax = draw(stats)
        hidden = np.ma.getmaskarray(ax.images[0].get_array())
        np.testing.assert_array_equal(hidden, [[False, False, True, False]])
        assert len(ax.texts) == 3


def test_tables_of_heads_are_drawn(heads):
    query, key, _ = heads
    summary = introspect.summary(introspect.trace(query[None], key[None]))
    for draw, table in ((plot.entropy, summary.entropy), (plot.saturation, summary.saturation)):
        np.testing.assert_array_equal(draw(summary).images[0].get_array(), table)
    for draw in (plot.received, plot.distances):
        with pytest.raises(TypeError, match=r"must be an array or Stats, got Summary.*head_map"):
            draw(summary)
    with pytest.raises(TypeError, match=r"must be Stats, or numbers with entropy .*got Factor"):
        plot.entropy(Factor(2))
    with pytest.raises(TypeError, match="layers must all be Stats, got Stats, list"):
        plot.entropy([sd.attention_stats(query, key), [1.0]])


class Factor:
    """Has a method of that name."""

    def __init__(self, count):
        self.count = count

    def entropy(self):
        return np.log(self.count)


def test_entropy_of_arrays(rng):
    values = rng.random((3, 4, 5))
    np.testing.assert_array_equal(plot.entropy(values).images[0].get_array(), values.mean(-1))
    np.testing.assert_array_equal(plot.entropy(values[0]).images[0].get_array(), values[0])
    with pytest.raises(ValueError, match=r"values must be \(num_layers, num_heads\) or"):
        plot.entropy(values[0, 0])


def test_stats_of_one_sequence(heads):
    query, key, _ = heads
    batch = sd.attention_stats(np.stack([query] * 2), np.stack([key] * 2))
    for draw in (plot.entropy, plot.received, plot.distances):
        with pytest.raises(ValueError, match="Stats must be those of one sequence"):
            draw(batch)
    layers = [sd.attention_stats(query[:n], key[:n]) for n in (2, 4)]
    with pytest.raises(ValueError, match=r"the same number of heads, got \[2, 4\]"):
        plot.saturation(layers)


def test_received(heads):
    query, key, weights = heads
    names = [f"${i}$" for i in range(9)]
    amount = weights.sum(axis=-2).mean(axis=0)
    ax = plot.received(weights.sum(axis=-2), names, top=2)
    np.testing.assert_array_equal(heights(ax), amount)
    first, second = np.argsort(-amount)[:2]
    assert legend_words(ax) == [
        f"1. ${first}$ ({first}): {amount[first]:.3g}",
        f"2. ${second}$ ({second}): {amount[second]:.3g}",
    ]
    assert not any(text.get_parse_math() for text in ax.figure.legends[0].get_texts())
    assert [line.get_xdata()[0] for line in ax.lines[::2]] == [first, second]
    assert [line.get_ydata()[0] for line in ax.lines[::2]] == [amount[first], amount[second]]
    assert_tidy(ax)
    stats = plot.received(sd.attention_stats(query, key, causal=True))
    bound = 36 * np.finfo(float).eps * amount.max()  # sums over four heads of nine queries
    assert np.abs(np.subtract(heights(stats), amount)).max() <= bound
    assert heights(plot.received(amount, top=0)) == list(amount)


def test_received_by_equal_keys():
    assert legend_words(plot.received(np.ones(4), top=2)) == ["1. 0: 1", "2. 1: 1"]
    given = plot.axes(5, 4)
    assert plot.received(np.zeros(3), ax=given) is given
    assert given.get_legend() is not None


@pytest.mark.parametrize("length", [11, 64, LONG])
@pytest.mark.parametrize("width", [None, 3.6])
def test_keys_that_lie_close_have_marks_apart(length, width):
    amount = np.ones(length)
    amount[:10] = np.arange(20, 10, -1)
    ax = plot.received(amount, top=10, ax=None if width is None else plot.axes(width, 3.2))
    for legend in (*ax.figure.legends, *filter(None, [ax.get_legend()])):
        legend.set_visible(False)  # inside of given axes one may lie on the picture
    ax.figure.draw_without_rendering()
    ranks = sorted((t for t in ax.texts if t.get_text()), key=lambda t: int(t.get_text()))
    assert [t.get_text() for t in ranks] == [str(i) for i in range(1, 11)]
    boxes = [t.get_window_extent() for t in ranks]
    assert all(a.x1 < b.x0 for a, b in itertools.pairwise(boxes))
    leads = [t.xy for t in ax.texts if not t.get_text()]
    assert leads == [(key, amount[key]) for key in range(10)]


@pytest.mark.parametrize("length", [4, 64, 65, LONG])
def test_received_at_any_length(length):
    amount = np.random.default_rng(0).gamma(0.3, size=length)
    amount[length // 2] = 1e6
    ax = plot.received(amount, [f"token{i}" for i in range(length)])
    assert f"1. token{length // 2} ({length // 2:,}): 1,000,000" in legend_words(ax)
    assert elements(ax) < 2000
    assert_tidy(ax)
    if length > 64:
        largest, mean = (steps.get_data() for steps in ax.patches[:2])
        assert largest.values.max() == 1e6
        assert 0 < mean.values.min() <= amount.mean()
        assert tuple(largest.edges[[0, -1]]) == (-0.5, length - 0.5)
    assert_tidy(plot.received(np.zeros(length)))


def test_received_needs_a_label_for_each_key():
    with pytest.raises(ValueError, match="labels must have one label for each of 3, got 2"):
        plot.received(np.ones(3), ["a", "b"])
    with pytest.raises(ValueError, match="received must be"):
        plot.received(np.ones((2, 3, 4)))
    with pytest.raises(TypeError, match="top must be an integer"):
        plot.received(np.ones(3), top=1.5)
    for top in (-1, 21):
        with pytest.raises(ValueError, match=f"top must be 0 to 20, got {top}"):
            plot.received(np.ones(3), top=top)


def by_distance(weights, first):
    """Share of all weight at each distance, in plain loops."""
    share = {}
    for head in weights:
        for i, row in enumerate(head):
            for j, p in enumerate(row):
                share.setdefault(abs(first + i - j), []).append(p)
    total = math.fsum(weights.ravel())
    return [math.fsum(share.get(d, [0.0])) / total for d in range(max(share) + 1)]


@pytest.mark.parametrize("q_offset", [None, 0, 7])
def test_distances(heads, q_offset):
    weights = heads[2][:, 5:]  # the last four of nine
    ax = plot.distances(weights, q_offset=q_offset)
    truth = by_distance(weights, 5 if q_offset is None else q_offset)
    drawn = [bar.get_height() for bar in ax.patches]
    assert len(drawn) == len(truth)
    # Sums over 144 weights of 4 in all.
    assert np.abs(np.subtract(drawn, truth)).max() <= 144 * np.finfo(float).eps
    assert labels(ax.get_xticklabels()) == [str(d) for d in range(len(truth))]
    shifted = plot.distances(weights, q_offset=10, kv_offset=10)
    at_zero = plot.distances(weights, q_offset=0)
    assert [b.get_height() for b in shifted.patches] == [b.get_height() for b in at_zero.patches]


def test_long_distances_come_in_ranges(rng):
    weights = rng.random((1, 3, 100))
    truth = by_distance(weights, 97)
    ax = plot.distances(weights[0])
    assert labels(ax.get_xticklabels()) == [
        "0", "1", "2–3", "4–7", "8–15", "16–31", "32–63", "64–99",
    ]  # fmt: skip
    cuts = [(0, 1), (1, 2), (2, 4), (4, 8), (8, 16), (16, 32), (32, 64), (64, 100)]
    drawn = [bar.get_height() for bar in ax.patches]
    expected = [math.fsum(truth[low:high]) for low, high in cuts]
    assert np.abs(np.subtract(drawn, expected)).max() <= 300 * np.finfo(float).eps


def test_mean_distances_of_stats(heads):
    query, key, _ = heads
    stats = sd.attention_stats(query, key, causal=True, q_offset=-1)
    drawn = [bar.get_height() for bar in plot.distances(stats).patches]
    means = np.asarray(stats.mean_distance)[:, 1:].astype(int).ravel()
    truth = [np.count_nonzero(means == d) / 32 for d in range(means.max() + 1)]
    assert drawn == truth
    for offset in ({"q_offset": -1}, {"kv_offset": 2}):
        with pytest.raises(ValueError, match="offsets must come with weights, got Stats"):
            plot.distances(stats, **offset)
    far = stats._replace(mean_distance=np.full((4, LONG), LONG - 1.0), visible=np.ones((4, LONG)))
    ax = plot.distances(far)
    assert labels(ax.get_xticklabels())[-1] == "65,536–99,999"
    assert ax.patches[-1].get_height() == 1
    assert_tidy(ax)


def test_distances_of_nothing():
    assert [bar.get_height() for bar in plot.distances(np.zeros((2, 2))).patches] == [0, 0]
    with pytest.raises(ValueError, match="weights must not be negative, got -1"):
        plot.distances(-np.eye(2))
    with pytest.raises(TypeError, match="q_offset must be an integer"):
        plot.distances(np.eye(2), q_offset=0.5)


def test_softmax_bars():
    ax = plot.softmax_bars([6, 4], {"unscaled": 1, "halved": 0.5}, labels=["a", "b"])
    p = 1 / (1 + math.exp(-2)), 1 / (1 + math.exp(-1))
    drawn = [bar.get_height() for bar in ax.patches]
    assert np.abs(np.subtract(drawn, [*p, *(1 - x for x in p)])).max() <= np.finfo(float).eps
    assert labels(ax.get_xticklabels()) == [
        f"{name}\nlargest gradient {x * (1 - x):.6f}"
        for name, x in zip(["unscaled", "halved"], p, strict=True)
    ]
    assert legend_words(ax) == ["a", "b"]
    assert_tidy(ax)
    p = math.exp(1) / (math.exp(2) + math.exp(1) + 1), math.exp(2) / (math.exp(2) + math.exp(1) + 1)
    (three,) = labels(plot.softmax_bars([2, 1, 0]).get_xticklabels())
    assert three == f"scale 1\nlargest gradient {max(x * (1 - x) for x in p):.6f}"
    plain = plot.softmax_bars([1e4, 0, 0], [1, 1 / 8])
    assert labels(plain.get_xticklabels())[1].startswith("scale 0.125\n")
    assert [bar.get_height() for bar in plain.patches] == [1, 1, 0, 0, 0, 0]


@pytest.mark.parametrize(("scores", "scales", "message"), [
    ([], [1], "scores must be a row of scores"),
    ([1, 2], [], "scales must be one number or more"),
    ([1, math.inf], [1], "scores and scales must be finite"),
    ([1, 2, 3, 4, 5], [1], "scores must hold at most 4 entries"),
])  # fmt: skip
def test_softmax_bars_of_few_numbers(scores, scales, message):
    with pytest.raises(ValueError, match=message):
        plot.softmax_bars(scores, scales)


def test_variance():
    ax = plot.variance([4, 64], [4.4, 60])
    theory, one, before, after = (line.get_ydata() for line in ax.lines)
    assert (list(theory), list(one), list(before)) == ([4, 64], [1, 1], [4.4, 60])
    assert list(after) == [4.4 / 4, 60 / 64]
    assert list(plot.variance([4, 64], [4.4, 60], [1.5, 2]).lines[3].get_ydata()) == [1.5, 2]
    assert_tidy(ax)
    with pytest.raises(ValueError, match="must have 2 values, got 1"):
        plot.variance([4, 64], [4.4])
    with pytest.raises(ValueError, match="d_k must be above 0, got 0"):
        plot.variance([0], [1])
    many = plot.variance(range(4, 100, 4), np.arange(4.0, 100, 4))
    assert labels(many.get_xticklabels())[:3] == ["4", "8", "12"]
    assert_tidy(many)


def boxes(ax):
    """Boxes of a data flow with the lines of text in each, and whether they are inside."""
    ax.figure.draw_without_rendering()
    found = []
    for patch in ax.patches:
        box = patch.get_window_extent()
        inside = [
            text for text in ax.texts
            if text.get_text() and box.contains(*text.get_window_extent().get_points().mean(0))
        ]
        for text in inside:
            extent = text.get_window_extent()
            assert box.x0 <= extent.x0 < extent.x1 <= box.x1, text.get_text()
            assert box.y0 <= extent.y0 < extent.y1 <= box.y1, text.get_text()
        found.append([text.get_text() for text in inside])
    return found


def test_data_flow():
    found = boxes(plot.data_flow(10, 12, 64, 32, masked=True))
    assert [box[0] for box in found] == [
        "Q", "K", "V", "Q · Kᵀ", "· 1/√d_k", "mask", "softmax", "· V", "out",
    ]  # fmt: skip
    assert [box[2] for box in found] == [
        "10 × 64", "12 × 64", "12 × 32", *["10 × 12"] * 4, "10 × 32", "10 × 32",
    ]
    assert found[4][1] == "times 0.125"
    assert "mask" not in [box[0] for box in boxes(plot.data_flow(4, 4, 8))]


def test_data_flow_of_many_heads_and_long_inputs():
    ax = plot.data_flow(LONG, LONG, 128, num_heads=32, num_kv_heads=8, masked=True)
    found = boxes(ax)
    assert [box[2] for box in found[:4]] == [
        "32 × 100,000 × 128", "8 × 100,000 × 128", "8 × 100,000 × 128", "32 × 100,000 × 100,000",
    ]  # fmt: skip
    assert_tidy(ax)


def test_data_flow_of_impossible_sizes():
    with pytest.raises(ValueError, match="len_kv must be at least 1, got 0"):
        plot.data_flow(4, 0, 8)
    with pytest.raises(ValueError, match="multiple of num_kv_heads, got 8 and 3"):
        plot.data_flow(4, 4, 8, num_heads=8, num_kv_heads=3)
    with pytest.raises(TypeError, match="d_k must be an integer"):
        plot.data_flow(4, 4, 8.0)
