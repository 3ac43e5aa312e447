"""Statistics in notebooks: the numbers and pictures of the table, and that it is small and safe."""

import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

import naive
import scaledot as sd
from scaledot import _stats_view

LEN_Q, LEN_KV = 5, 7


def operands(*lead, len_q=LEN_Q, len_kv=LEN_KV, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((*lead, len_q, 4)), rng.standard_normal((*lead, len_kv, 4))


def rows(stats):
    """Text of the cells of each row, titles first; pictures are elements."""
    table = ET.fromstring(stats._repr_html_()).find("table")
    return [
        [cell[0] if len(cell) else cell.text for cell in row] for row in table.iter("tr")
    ]


def naive_stats(query, key, map_shape=None):
    """Statistics of one head of causal attention, by loops."""
    _, _, weights, visible = naive.whole(query, key, key, causal=True)
    distance = np.abs(LEN_KV - LEN_Q + np.arange(LEN_Q)[:, None] - np.arange(LEN_KV))
    return naive.stats(weights, visible, distance, np.zeros(LEN_Q), top_k=1, last=1,
                       map_shape=map_shape)  # fmt: skip


def number(x):
    return f"{x:#.3g}"


def test_numbers_are_means_over_the_queries():
    query, key = operands(3)
    titles, *cells = rows(sd.attention_stats(query, key, causal=True))
    assert titles == [
        "head", "entropy (nats), of log(visible)", "largest weight", "saturation",
        "distance (tokens)", "weight on sinks", "received by keys 0 … 6",
    ]  # fmt: skip
    assert len(cells) == 3
    for head, row in enumerate(cells):
        truth = naive_stats(query[head], key[head])
        entropy, most = truth["entropy"].mean(), np.log(truth["visible"]).mean()
        assert row[:6] == [
            str(head), f"{number(entropy)} ({entropy / most:.0%})",
            *(number(truth[n].mean()) for n in ("max_weight", "saturation", "mean_distance")),
            number(truth["sink_mass"]),
        ]


def test_queries_that_see_nothing_do_not_count():
    query, key = operands(2)
    mask = np.ones((2, LEN_Q, LEN_KV), dtype=bool)
    mask[0, 1:4] = mask[1] = False
    _, first, second = rows(sd.attention_stats(query, key, mask=mask))
    _, whole, _ = rows(sd.attention_stats(query[:, [0, 4]], key))
    assert first[1:4] == whole[1:4]
    assert second[:6] == ["1", "–", "–", "–", "–", "0.00"]


def test_large_numbers_are_written_out():
    assert [_stats_view._number(x) for x in (12345.6, 99.94, 0.0, np.nan, None)] == [
        "12,346", "99.9", "0.00", "nan", "–",
    ]  # fmt: skip


@pytest.mark.parametrize("len_kv", [1, 7, 64, 65, 200])
def test_bars_are_what_bins_of_keys_receive(len_kv):
    query, key = operands(1, len_kv=len_kv)
    stats = sd.attention_stats(query, key)
    picture = rows(stats)[1][6]
    path = picture.find("path").get("d")
    bars = np.array([[float(x) for x in bar] for bar in re.findall(r"M(\S+) 20V([^M]+)", path)])
    count = min(len_kv, 64)
    weights = naive.attention(query, key, key)[2][0].sum(axis=0)
    bins = [[] for _ in range(count)]
    for j, weight in enumerate(weights):
        bins[j * count // len_kv].append(weight)
    means = np.array([np.mean(weights) for weights in bins])
    assert np.array_equal(bars[:, 0], np.arange(count) + 0.5)
    assert picture.get("viewBox") == f"0 0 {count} 20"
    # Ends are written with three digits, of numbers up to 20.
    assert np.abs(bars[:, 1] - 20 * (1 - means / means.max())).max() <= 0.051
    assert picture.get("aria-label") == f"largest mean of a bin {means.max():.3g}"


def levels(picture):
    """Shades of the cells of a map."""
    columns, shown = (int(x) for x in picture.get("viewBox").split()[2:])
    found = np.zeros((shown, columns), dtype=int)
    for path in picture.findall("path"):
        for j, i, width in re.findall(r"M(\d+) (\d+)\.5h(\d+)", path.get("d")):
            cells = found[int(i), int(j) : int(j) + int(width)]
            assert not cells.any()
            cells[:] = round(float(path.get("stroke-opacity")) * 8)
    return found


@pytest.mark.parametrize("map_shape", [(1, 1), (3, 4), (5, 7)])
def test_shades_go_by_the_square_root_of_the_weight(map_shape):
    query, key = operands(2)
    stats = sd.attention_stats(query, key, causal=True, map_shape=map_shape)
    for head, row in enumerate(rows(stats)[1:]):
        truth = naive_stats(query[head], key[head], map_shape)["block_map"]
        shades = np.rint(8 * np.sqrt(truth / truth.max()))
        assert np.array_equal(levels(row[7]), shades)
        assert shades.max() == 8


def test_large_maps_are_joined():
    # Rows join in bins of one and two, of which a map has the mean; columns in threes, their sum.
    cells = np.zeros((1, 20, 48))
    cells[0, 2:4, 9:12] = 1
    cells[0, 11, 30] = 0.75  # row 10 joins
    query, key = operands(1)
    stats = sd.attention_stats(query, key)._replace(block_map=cells)
    expected = np.zeros((16, 16), dtype=int)
    for i in range(16):
        joined = [row for row in range(20) if row * 16 // 20 == i]
        shares = cells[0, joined].mean(axis=0).reshape(16, 3).sum(axis=-1)
        expected[i] = np.rint(8 * np.sqrt(shares / 3))
    assert sorted(set(expected.ravel().tolist())) == [0, 3, 8]
    assert np.array_equal(levels(rows(stats)[1][7]), expected)


@pytest.mark.parametrize("lead", [(), (1,), (2, 3), (2, 2, 3), (17,), (3, 6)])
def test_heads_are_counted_along_all_leading_axes(lead):
    query, key = operands(*lead)
    total = int(np.prod(lead))
    found = rows(sd.attention_stats(query, key))[1:]
    places = [", ".join(map(str, place)) for place in np.ndindex(lead)] if lead else ["0"]
    assert [row[0] for row in found[:16]] == places[:16]
    assert [row[0] for row in found[16:]] == ([f"… and {total - 16} more"] if total > 16 else [])
    for place, row in zip(np.ndindex(lead), found[:16], strict=False):
        alone = rows(sd.attention_stats(query[place], key[place]))[1]
        assert row[1:6] == alone[1:6]


def test_arrays_of_any_library(xp):
    query, key = operands(2, 3)
    stats = sd.attention_stats(query.astype(np.float32), key.astype(np.float32), map_shape=(2, 2))
    given = sd.Stats(*(None if x is None else xp.array(x) for x in stats))
    assert given._repr_html_() == stats._repr_html_()


@pytest.mark.parametrize(
    ("lead", "len_q", "len_kv"), [((2,), 0, 7), ((2,), 5, 0), ((2,), 0, 0), ((0,), 5, 7),
                                  ((3, 0), 5, 7), ((0, 3), 5, 7), ((), 0, 0)],
)  # fmt: skip
def test_empty_shapes(lead, len_q, len_kv):
    query, key = operands(*lead, len_q=len_q, len_kv=len_kv)
    _, *found = rows(sd.attention_stats(query, key))
    assert len(found) == int(np.prod(lead))
    for row in found:
        assert row[1:5] == ["–"] * 4
        assert row[5] == ("0.00" if len_q else "–")
        assert (row[6] == "–") == (len_kv == 0)


def test_nan_is_shown_where_it_is():
    query, key = operands(2)
    query[1, 2] = np.nan
    stats = sd.attention_stats(query, key, map_shape=(5, 7))
    _, clean, poisoned = rows(stats)
    assert poisoned[1:6] == ["nan"] * 5
    assert "nan" not in "".join(clean[1:6])
    assert poisoned[6].find("path").get("d") == ""  # every key has received nan
    assert not levels(poisoned[7])[2].any()
    assert levels(poisoned[7])[[0, 1, 3, 4]].max() == 8


def test_it_has_the_colour_of_the_page():
    text = sd.attention_stats(*operands(2), map_shape=(3, 3))._repr_html_()
    assert text.count('stroke="currentColor"') == 4
    assert "style" not in text
    assert "#" not in text
    assert "rgb" not in text
    assert "://" not in text


def test_without_values_the_text_is_the_plain_one():
    stats = sd.Stats(*["<script>alert(1)</script>"] * 12)
    assert stats._repr_html_() == (
        "<pre>" + repr(stats).replace("<", "&lt;").replace(">", "&gt;").replace("'", "&#x27;")
        + "</pre>"
    )


def test_while_a_compiler_is_tracing():
    jax = pytest.importorskip("jax")
    texts = []

    def traced(query):
        texts.append(sd.attention_stats(query, query, impl="blockwise")._repr_html_())
        return query

    jax.jit(traced)(np.zeros((2, 5, 4), dtype=np.float32))
    assert texts[0].startswith("<pre>Stats(lse=")


def test_a_large_model_fits():
    rng = np.random.default_rng(0)
    shape, length = (12, 12), 2000
    long = rng.random((*shape, length))
    stats = sd.Stats(
        *[long] * 3, *[None] * 2, *[long] * 2, np.full((*shape, length), 100_000), long * 1e5, None,
        rng.random(shape), rng.random((*shape, 64, 64)),
    )
    text = stats._repr_html_()
    assert len(text.encode()) < 60_000
    assert text.count("<svg") == 32
    assert "… and 128 more" in text
