"""Masks and tiles drawn from options: counted pair by pair, and beside what `explain` says."""

import numpy as np
import pytest

import scaledot as sd
from scaledot import plot
from test_plot import assert_tidy, labels

pytest.importorskip("matplotlib")

LONG = 100_000
EMPTY, PARTIAL, FULL = range(3)
POSITIONS = {
    "everything": {},
    "causal": {"causal": True},
    "top left": {"causal": True, "q_offset": 0},
    "window": {"window": (20, 7)},
    "left alone": {"window": (None, 3), "kv_offset": 5},
    "behind": {"causal": True, "q_offset": -30},
    "valid": {"kv_len": 61, "window": (None, 11)},
    "nothing": {"kv_len": 0},
    "far away": {"window": (3, 3), "q_offset": 10_000},
}
SEGMENTS = {
    "packed": {"segment_ids": np.repeat([0, 1, 2], [40, 30, 40])},
    "packed, causal": {"segment_ids": np.repeat([0, 1, 2], [40, 30, 40]), "causal": True},
    "scattered": {"segment_ids": np.arange(110) % 7 - 1, "window": (30, None)},
    "pair": {"segment_ids": (np.arange(110) // 50 + 3, np.arange(110) // 30)},
    "holes": {"segment_ids": (np.full(110, 2), np.where(np.arange(110) % 30 == 4, -1, 2))},
    "hidden": {"segment_ids": np.full(110, -1)},
}


def pairs(len_q, len_kv, causal=False, window=None, segment_ids=None, kv_len=None, q_offset=None,
          kv_offset=0):  # fmt: skip
    """Visible pairs (len_q, len_kv) by the words of the documentation, one at a time."""
    count = len_kv if kv_len is None else kv_len
    first = kv_offset + count - len_q if q_offset is None else q_offset
    left, right = window or (None, None)
    sides = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    seen = np.zeros((len_q, len_kv), dtype=bool)
    for i in range(len_q):
        for j in range(len_kv):
            q, k = first + i, kv_offset + j
            seen[i, j] = (
                j < count
                and (not causal or k <= q)
                and (left is None or k >= q - left)
                and (right is None or k <= q + right)
                and (segment_ids is None or sides[0][i] == sides[1][j] >= 0)
            )
    return seen


@pytest.mark.parametrize("options", POSITIONS.values(), ids=POSITIONS)
def test_short_masks(options):
    options = {**options, "kv_len": min(options.get("kv_len", 13), 13)}
    drawn = plot.visible(9, 13, **options).images[0].get_array()
    np.testing.assert_array_equal(drawn, pairs(9, 13, **options))


@pytest.mark.parametrize("options", [*POSITIONS.values(), *SEGMENTS.values()],
                         ids=[*POSITIONS, *SEGMENTS])  # fmt: skip
def test_long_masks_are_counted_exactly(options, monkeypatch):
    monkeypatch.setattr("scaledot.plot._visible._MOST_CELLS", 16)
    drawn = plot.visible(110, **options).images[0].get_array()
    seen, sums, counts = pairs(110, 110, **options), np.zeros((16, 16)), np.zeros((16, 16))
    for (i, j), one in np.ndenumerate(seen):
        sums[i * 16 // 110, j * 16 // 110] += one
        counts[i * 16 // 110, j * 16 // 110] += 1
    # Whole numbers; the quotient of two is rounded twice.
    assert np.abs(drawn - sums / counts).max() <= np.finfo(float).eps


@pytest.mark.parametrize("length", [1, 2, 3, 4, 8])
def test_each_place_of_a_short_mask_is_numbered(length):
    ax = plot.visible(length, causal=True)
    ax.figure.draw_without_rendering()
    for axis in (ax.xaxis, ax.yaxis):
        low, high = sorted(axis.get_view_interval())
        places = [place for place in axis.get_majorticklocs() if low <= place <= high]
        assert places == list(range(length))


def test_a_mask_of_its_own_lengths():
    ax = plot.visible(3, 5, causal=True, row_labels=list("abc"), title="Causal")
    assert "".join(text.get_text() for text in ax.texts) == "111001111011111"
    assert labels(ax.get_yticklabels()) == list("abc")
    np.testing.assert_array_equal(
        plot.visible(70, 100, causal=True).images[0].get_array(), np.tri(70, 100, 30)
    )


def test_segments_of_torch():
    torch = pytest.importorskip("torch")
    ids = np.repeat([0, 1], 3)
    drawn = plot.visible(6, segment_ids=torch.tensor(ids)).images[0].get_array()
    np.testing.assert_array_equal(drawn, ids[:, None] == ids)


@pytest.mark.parametrize("length", [4, 64, LONG])
def test_masks_and_tiles_are_tidy_at_any_length(length):
    names = [f"token{i}" for i in range(length)]
    ax = plot.visible(length, causal=True, row_labels=names)
    assert labels(ax.get_xticklabels())[0] == "token0"
    assert_tidy(ax)
    assert_tidy(plot.tiles(length, causal=True, block_q=768, block_kv=128))
    for draw in (plot.visible, plot.tiles):
        given = plot.axes(3.6, 3.2)
        options = {"block_q": 64, "block_kv": 64} if draw is plot.tiles else {}
        assert draw(length, causal=True, ax=given, **options) is given
        assert_tidy_but_the_legend(given)
    if length == LONG:
        shares = np.asarray(plot.visible(length, causal=True).images[0].get_array())
        sides = np.bincount(np.arange(length) * len(shares) // length)
        count = sides @ shares @ sides
        # Each share is rounded twice, the rest are sums of as many numbers as there are cells.
        bound = (shares.size + 4) * np.finfo(float).eps
        truth = length * (length + 1) / 2
        assert abs(count - truth) <= bound * truth


def assert_tidy_but_the_legend(ax):
    """Inside of given axes a legend may lie on the picture."""
    if ax.get_legend() is not None:
        ax.get_legend().remove()
    assert_tidy(ax)


def classes(block_q, block_kv, **options):
    """Classes of tiles of 110 × 110 scores: of the drawing, and by their pairs."""
    drawn = plot.tiles(110, block_q=block_q, block_kv=block_kv, **options).images[0].get_array()
    seen, truth = pairs(110, 110, **options), np.zeros(drawn.shape)
    for i, j in np.ndindex(*drawn.shape):
        tile = seen[i * block_q : (i + 1) * block_q, j * block_kv : (j + 1) * block_kv]
        truth[i, j] = FULL if tile.all() else PARTIAL if tile.any() else EMPTY
    return np.asarray(drawn), truth


@pytest.mark.parametrize("options", POSITIONS.values(), ids=POSITIONS)
@pytest.mark.parametrize("blocks", [(8, 16), (32, 8), (110, 110)])
def test_tiles_by_positions(options, blocks):
    drawn, truth = classes(*blocks, **options)
    np.testing.assert_array_equal(drawn, truth)


@pytest.mark.parametrize("options", SEGMENTS.values(), ids=SEGMENTS)
def test_tiles_by_segments_show_at_least_what_is_visible(options):
    drawn, truth = classes(10, 10, **options)
    # Classes come from ranges of ids: what they call empty or full is, the rest is partial.
    assert (truth[drawn != PARTIAL] == drawn[drawn != PARTIAL]).all()
    if "packed" in options:
        np.testing.assert_array_equal(drawn, truth)


def test_tiles_of_packed_sequences_are_exact():
    drawn, truth = classes(10, 10, **SEGMENTS["packed"])
    np.testing.assert_array_equal(drawn, truth)
    assert set(drawn.ravel()) == {EMPTY, FULL}


def test_keys_of_a_tile_that_positions_hide_have_no_say():
    ids = np.repeat([1, 0, 1], [10, 6, 94])  # of the first tile, queries from 16 see keys of 0
    drawn, truth = classes(8, 16, window=(4, 0), segment_ids=ids)
    assert drawn[2, 0] == truth[2, 0] == EMPTY


def counts(ax):
    return {
        name: int(number.replace(",", ""))
        for name, number in (t.get_text().split() for t in ax.figure.legends[0].get_texts())
    }


@pytest.mark.parametrize("options", POSITIONS.values(), ids=POSITIONS)
@pytest.mark.parametrize("impl", ["kernels", "blockwise"])
def test_tiles_are_those_of_the_implementation(options, impl):
    x = np.zeros((1500, 64), dtype=np.float32)
    plan = sd.explain(x, x, x, impl=impl, **options)
    drawn = counts(plot.tiles(1500, block_q=plan.block_q, block_kv=plan.block_kv, **options))
    assert drawn["empty"] == plan.tiles_skipped
    assert drawn["partial"] + drawn["full"] == plan.tiles_run


def test_tiles_without_blocks_are_those_of_this_machine():
    x = np.zeros((1500, 64), dtype=np.float32)
    plan = sd.explain(x, x, x, causal=True)
    ax = plot.tiles(1500, causal=True)
    assert ax.get_title() == f"Tiles of {plan.block_q:,} × {plan.block_kv:,}"
    assert plot.tiles(1500, block_q=100).images[0].get_array().shape[0] == 15


@pytest.mark.parametrize("draw", [plot.visible, plot.tiles])
def test_options_are_checked_as_those_of_a_call(draw):
    for lengths, message in (((0,), "len_q must be at least 1"), ((3, 0), "len_kv must be")):
        with pytest.raises(ValueError, match=message):
            draw(*lengths)
    with pytest.raises(TypeError, match="len_q must be an integer"):
        draw(3.0)
    with pytest.raises(ValueError, match="kv_len must lie between 0 and len_kv = 3"):
        draw(3, kv_len=4)
    with pytest.raises(TypeError, match="window must be a pair"):
        draw(3, window=2)
    with pytest.raises(TypeError, match="segment_ids of query must be integers"):
        draw(3, segment_ids=[0.5, 1, 2])
    with pytest.raises(ValueError, match=r"segment_ids of query must broadcast"):
        draw(3, segment_ids=[0, 1])


def test_blocks_are_positive():
    for name in ("block_q", "block_kv"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got -1"):
            plot.tiles(4, **{"block_q": 2, "block_kv": 2, name: -1})
