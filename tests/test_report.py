"""The report's file: what it holds, how exactly, how large it is, and that it is safe to open."""

import base64
import itertools
import json
import zipfile
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from scaledot import introspect, report
from scaledot._stats import bin_edges
from scaledot.report import _maps, _page

# Half a unit of the last digit kept, beside the smallest number that has so many, and the rounding
# of float32, in which these sums of at most 16 terms are computed.
FOUR_DIGITS, FIVE_DIGITS = (
    0.5 * 10.0 ** (1 - digits) + 16 * np.finfo(np.float32).eps for digits in (4, 5)
)

AWKWARD = (
    "</script><script>alert(1)</script>", "<!--", "\"'&amp;", "😀", "שלום", "a\nb", "", "\u2028",
    "\ud800", "{{data}}",
)  # fmt: skip


class Reader(HTMLParser):
    """Elements of a page, and the text of its scripts."""

    def __init__(self, page):
        super().__init__()
        self.elements, self.scripts, self.inside = [], [], None
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self.inside = None

    def handle_data(self, data):
        if self.inside == "script":
            self.scripts[-1] += data


def data_of(page):
    return json.loads(Reader(page).scripts[0])


def codes_of(data, layer, dtype):
    raw = base64.b64decode(data["layers"][layer]["codes"])
    shape = data["numHeads"], len(data["queries"]), len(data["keys"])
    return np.frombuffer(raw, dtype).reshape(shape)


def arrays(num_layers=2, num_heads=3, len_q=5, len_kv=None, d_k=8, seed=0):
    rng = np.random.default_rng(seed)
    query = rng.standard_normal((num_layers, num_heads, len_q, d_k))
    return query, rng.standard_normal((num_layers, num_heads, len_kv or len_q, d_k))


def textbook(query, key, visible=True, factor=1.0):
    """Logarithms of the weights in float64; -inf where a key is not seen."""
    scores = factor * (query @ key.swapaxes(-1, -2)) / np.sqrt(query.shape[-1])
    scores = np.where(visible, scores, -np.inf)
    scores = scores - scores.max(axis=-1, keepdims=True)
    return scores - np.log(np.exp(scores).sum(axis=-1, keepdims=True))


def binned(weights, shape):
    """Block maps by the definition, entry by entry."""
    (num_heads, len_q, len_kv), (rows, columns) = weights.shape, shape
    out, counts = np.zeros((num_heads, rows, columns)), np.zeros(rows)
    for i in range(len_q):
        counts[i * rows // len_q] += 1
        for j in range(len_kv):
            out[:, i * rows // len_q, j * columns // len_kv] += weights[:, i, j]
    return out / counts[:, None]


@pytest.fixture(scope="module")
def page():
    query, key = arrays()
    trace = introspect.trace(query, key, tokens=list("abcde"), title="A & <b>", causal=True)
    return report.html(trace)


def test_a_page_stands_alone(page):
    reader = Reader(page)
    assert page.startswith("<!doctype html>")
    policy = next(a["content"] for t, a in reader.elements if "http-equiv" in a)
    assert "default-src 'none'" in policy
    links = [a[name] for _, a in reader.elements for name in ("src", "href") if name in a]
    assert all(link.startswith("#") for link in links)
    assert not {"link", "img", "iframe", "base", "form"} & {tag for tag, _ in reader.elements}
    assert page.count("://") == page.count("http://www.w3.org/2000/svg") == 1
    assert "<title>A &amp; &lt;b&gt;</title>" in page
    assert "{{" not in page


def test_twelve_layers_of_twelve_heads_fit():
    query, key = arrays(12, 12, 64, d_k=64)
    page = report.html(introspect.trace(query, key, tokens=[f"token {i}" for i in range(64)]))
    assert data_of(page)["kind"] == "weights"
    assert len(page.encode()) < 2_000_000


@pytest.mark.parametrize("causal", [False, True])
def test_weights_are_within_half_a_step(causal):
    query, key = arrays(len_q=7)
    query *= 40  # weights down to 1e-100
    data = data_of(report.html(introspect.trace(query, key, causal=causal)))
    visible = np.tri(7, dtype=bool) if causal else np.ones((7, 7), dtype=bool)
    truth = textbook(query, key, visible)
    assert truth[:, :, visible].min() < -100
    for layer in range(2):
        codes = codes_of(data, layer, "<u2").astype(np.int64)
        assert np.array_equal(codes == 65535, np.broadcast_to(~visible, codes.shape))
        for head in range(3):
            step = data["layers"][layer]["steps"][head]
            assert step == pytest.approx(-truth[layer, head][visible].min() / 65533)
            error = np.abs(codes[head] * step + truth[layer, head])[visible]
            assert error.max() <= step / 2 * (1 + 1e-6)


def test_sinks_are_kept_as_the_rest():
    query, key = arrays(1, 2, 4)
    sinks = np.array([0.5, -1.0])
    data = data_of(report.html(introspect.trace(query, key, sinks=sinks)))
    scores = query[0] @ key[0].swapaxes(-1, -2) / np.sqrt(8)
    share = np.exp(sinks)[:, None]
    rest = share / (np.exp(scores).sum(axis=-1) + share)
    np.testing.assert_allclose(data["rests"][0], rest, rtol=FIVE_DIGITS)
    assert not data["plain"]
    assert data_of(report.html(introspect.trace(query, key)))["rests"] == [None]


def test_a_page_of_sinks_stays_within_the_size():
    query, key = arrays(4, 8, 40)
    trace = introspect.trace(query, key, sinks=np.zeros(8))
    page = report.html(trace)
    assert data_of(page)["kind"] == "weights"
    size = len(page.encode())
    for limit in range(size - 4000, size + 4000, 1000):
        assert len(report.html(trace, max_bytes=limit).encode()) <= limit


@pytest.mark.parametrize(
    ("option", "plain"),
    [({"causal": True}, True), ({"scale": 0.5}, True), ({"softcap": 5.0}, False),
     ({"bias": np.zeros((5, 5))}, False), ({"alibi_slopes": np.ones(3)}, False)],
)  # fmt: skip
def test_only_plain_scores_can_be_rescaled(option, plain):
    query, key = arrays()
    assert data_of(report.html(introspect.trace(query, key, **option)))["plain"] is plain


def test_nan_is_not_a_hidden_key():
    query, key = arrays(1, 1, 4)
    key[0, 0, 2] = np.nan
    data = data_of(report.html(introspect.trace(query, key, causal=True)))
    codes = codes_of(data, 0, "<u2")[0]
    assert (codes[:2][np.tri(4, dtype=bool)[:2]] < 65534).all()
    assert (codes[2, :3] == 65534).all()
    assert (codes[3] == 65534).all()
    assert data["summary"]["entropy"] == [[None]]


def test_rows_that_see_nothing():
    query, key = arrays(1, 1, 3)
    data = data_of(report.html(introspect.trace(query, key, mask=np.zeros((3, 3), dtype=bool))))
    assert (codes_of(data, 0, "<u2") == 65535).all()


def test_long_inputs_have_maps():
    query, key = arrays(2, 3, 61, 83)
    trace = introspect.trace(query, key)
    limit = report.MAX_BYTES
    while data_of(report.html(trace, max_bytes=limit))["kind"] == "weights":
        limit = limit * 9 // 10
    page = report.html(trace, max_bytes=limit)
    data = data_of(page)
    assert len(page.encode()) <= limit
    rows, columns = len(data["queries"]), len(data["keys"])
    assert 1 < rows <= 61
    assert 1 < columns <= 83
    for layer in range(2):
        truth = binned(np.exp(textbook(query[layer], key[layer])), (rows, columns))
        step = np.asarray(data["layers"][layer]["steps"])[:, None, None]
        root = codes_of(data, layer, np.uint8) * np.sqrt(step)
        # Half a code, in the root, and what statistics are off by.
        assert (np.abs(root - np.sqrt(truth)) <= 0.5001 * np.sqrt(step) + 1e-9).all()


def test_labels_of_maps_are_ranges():
    query, key = arrays(1, 1, 90)
    trace = introspect.trace(query, key, tokens=[f"word{i}" for i in range(90)])
    data = data_of(report.html(trace, max_bytes=_smallest(trace) + 600))
    edges = data["queryEdges"]
    assert edges[0] == 0
    assert edges[-1] == 90
    assert len(edges) == len(data["queries"]) + 1 > 3
    for a, b, label in zip(edges[:-1], edges[1:], data["queries"], strict=True):
        assert all(i * (len(edges) - 1) // 90 == edges.index(a) for i in range(a, b))
        assert label == (f"{a}–{b - 1}" if b > a + 1 else f"{a}") + f": word{a} …"


def _smallest(trace):
    """What the message says the page needs."""
    with pytest.raises(ValueError, match=r"^max_bytes must be at least") as caught:
        report.html(trace, max_bytes=1000)
    return int(str(caught.value).split("at least ")[1].split(" ")[0].replace(",", ""))


def test_the_size_named_in_the_message_suffices():
    query, key = arrays(2, 2, 50)
    trace = introspect.trace(query, key)
    needed = _smallest(trace)
    assert len(report.html(trace, max_bytes=needed).encode()) <= needed
    with pytest.raises(ValueError, match=r"at least .* for 2 layers of 2 heads, got"):
        report.html(trace, max_bytes=needed - 1)


def without_arrays(trace):
    layers = tuple(
        introspect.Layer(layer.name, layer.stats, None, None, layer.options)
        for layer in trace.layers
    )
    return introspect.Trace(layers, trace.tokens, trace.key_tokens, trace.title)


def test_layers_without_query_and_key_show_the_maps_they_have():
    query, key = arrays(2, 2, 23, 29)
    kept = without_arrays(introspect.trace(query, key, map_shape=(10, 7)))
    data = data_of(report.html(kept))
    assert (len(data["queries"]), len(data["keys"])) == (10, 7)
    coarse = data_of(report.html(kept, max_bytes=_smallest(kept) + 100))
    rows = coarse["queryEdges"]
    columns = coarse["keyEdges"]
    assert len(rows) < 11
    weights = np.exp(textbook(query[0], key[0]))
    for a, b in itertools.pairwise(rows):
        means = weights[:, a:b].mean(axis=1)
        truth = np.stack(
            [means[:, c:d].sum(-1) for c, d in itertools.pairwise(columns)], -1
        )
        step = np.asarray(coarse["layers"][0]["steps"])[:, None]
        found = codes_of(coarse, 0, np.uint8)[:, rows.index(a)] * np.sqrt(step)
        assert (np.abs(found - np.sqrt(truth)) <= 0.5001 * np.sqrt(step) + 1e-9).all()


@pytest.mark.parametrize(("length", "bins"), [(1, 1), (7, 3), (10, 10), (1000, 37)])
def test_edges_are_those_of_the_definition(length, bins):
    edges = bin_edges(length, bins)
    for i in range(length):
        b = i * bins // length
        assert edges[b] <= i < edges[b + 1]


def test_maps_that_cannot_be():
    query, key = arrays(2, 1, 12)
    with pytest.raises(ValueError, match="must hold query and key, or a block map, got neither"):
        report.html(without_arrays(introspect.trace(query, key)))
    layers = [
        without_arrays(introspect.trace(query, key, map_shape=shape)).layers[0]
        for shape in ((4, 4), (6, 4))
    ]
    with pytest.raises(ValueError, match=r"must agree in shape, got \(4, 4\), \(6, 4\)"):
        report.html(introspect.Trace(tuple(layers)))


def test_maps_are_finest_first():
    query, key = arrays(1, 1, 600, 30, d_k=4)
    plans = _maps.plans(introspect.trace(query, key))
    assert plans[0].shape == (512, 30)
    assert plans[-1].shape == (1, 1)
    sides = [plan.shape[0] for plan in plans]
    assert sides == sorted(set(sides), reverse=True)


def test_tokens_of_any_kind_arrive_whole():
    query, key = arrays(1, 1, len(AWKWARD))
    page = report.html(introspect.trace(query, key, tokens=AWKWARD, title="</title><b>"))
    reader = Reader(page)
    assert data_of(page)["queries"] == list(AWKWARD)
    assert len(reader.scripts) == 2
    assert "b" not in {tag for tag, _ in reader.elements}
    assert page.encode().decode() == page


@pytest.mark.parametrize(
    ("tokens", "key_tokens", "offset"),
    [("abc", None, 0), ("abc", "xyabc", 2), ("abc", "uvwxy", None), (None, None, None)],
)
def test_where_queries_stand_among_the_keys(tokens, key_tokens, offset):
    query, key = arrays(1, 1, 3, 3 if tokens and key_tokens is None else 5)
    trace = introspect.trace(query, key, tokens=tokens and list(tokens),
                             key_tokens=key_tokens and list(key_tokens))  # fmt: skip
    assert data_of(report.html(trace))["offset"] == offset


def test_what_is_received():
    query, key = arrays(1, 2, 9)
    data = data_of(report.html(introspect.trace(query, key, tokens=list("abcdefghi"))))
    means = np.exp(textbook(query, key))[0].mean(axis=-2)
    for head, found in enumerate(data["received"][0]):
        order = np.argsort(-means[head])[:5]
        assert [index for index, _, _ in found] == order.tolist()
        assert [token for _, token, _ in found] == ["abcdefghi"[j] for j in order]
        kept = [mean for *_, mean in found]
        np.testing.assert_allclose(kept, means[head][order], rtol=FOUR_DIGITS)


def test_findings_and_summary_are_those_of_introspect():
    query, key = arrays(1, 2, 16)
    query[0, 0] *= 1000  # saturated
    trace = introspect.trace(query, key)
    found = introspect.findings(trace)
    assert found
    data = data_of(report.html(trace))
    assert data["findings"] == [
        {"kind": f.kind, "layer": f.layer, "head": f.head, "reason": f.reason} for f in found
    ]
    expected = introspect.summary(trace).max_weight
    np.testing.assert_allclose(data["summary"]["max_weight"], expected, rtol=FIVE_DIGITS)


def test_refused():
    query, key = arrays()
    with pytest.raises(TypeError, match=r"must be a scaledot.introspect.Trace, got list"):
        report.html([query])
    trace = introspect.trace(query, key)
    for wrong in (True, 1e6, "2 MB"):
        with pytest.raises(TypeError, match="max_bytes must be an integer, got"):
            report.html(trace, max_bytes=wrong)
    other = introspect.trace(*arrays(1, 3, 6))
    with pytest.raises(ValueError, match=r"must agree in .* got \(3, 5, 5\), \(3, 6, 6\)"):
        report.html(introspect.Trace(trace.layers + other.layers))


@pytest.fixture(scope="module")
def small():
    return introspect.trace(*arrays(1, 1, 3))


def test_write(small, tmp_path):
    path = report.write(small, tmp_path / "a.html")
    assert path == tmp_path.resolve() / "a.html"
    assert path.read_bytes() == report.html(small).encode()
    assert [p.name for p in tmp_path.iterdir()] == ["a.html"]
    path.write_text("mine")
    with pytest.raises(FileExistsError, match="must not exist yet"):
        report.write(small, path)
    assert path.read_text() == "mine"
    assert report.write(small, str(path), overwrite=True).read_bytes().startswith(b"<!doctype")
    assert [p.name for p in tmp_path.iterdir()] == ["a.html"]


def test_write_follows_links(small, tmp_path):
    target, link = tmp_path / "target.html", tmp_path / "link.html"
    link.symlink_to(target)
    assert report.write(small, link) == target.resolve()
    assert link.is_symlink()
    assert target.read_bytes().startswith(b"<!doctype")


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [("a.htm", ValueError, r"must end in \.html"), ("folder.html", IsADirectoryError, "folder"),
     ("none/a.html", FileNotFoundError, "must exist")],
)  # fmt: skip
def test_paths_are_checked_before_the_work(small, tmp_path, monkeypatch, name, error, message):
    (tmp_path / "folder.html").mkdir()
    monkeypatch.setattr(report, "html", None)
    with pytest.raises(error, match=message):
        report.write(small, tmp_path / name)


def test_a_file_that_appears_during_the_work_stays(small, tmp_path, monkeypatch):
    path, made = tmp_path / "a.html", report.html

    def slow(trace, *, max_bytes):
        path.write_text("theirs")
        return made(trace, max_bytes=max_bytes)

    monkeypatch.setattr(report, "html", slow)
    with pytest.raises(FileExistsError):
        report.write(small, path)
    assert path.read_text() == "theirs"
    assert [p.name for p in tmp_path.iterdir()] == ["a.html"]


def test_a_full_disk_leaves_nothing(small, tmp_path, monkeypatch):
    path = tmp_path / "a.html"
    path.write_text("mine")

    def full(self, content):
        with self.open("wb") as file:
            file.write(content[:10])
        raise OSError("no space left")

    monkeypatch.setattr(type(path), "write_bytes", full)
    with pytest.raises(OSError, match="no space"):
        report.write(small, path, overwrite=True)
    assert path.read_text() == "mine"
    assert [p.name for p in tmp_path.iterdir()] == ["a.html"]


def test_without_links_a_rename_does(small, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError("no links here")

    monkeypatch.setattr("os.link", refuse)
    path = report.write(small, tmp_path / "a.html")
    assert path.read_bytes().startswith(b"<!doctype")


def test_every_part_of_the_page_is_joined():
    folder = files("scaledot.report")
    names = {item.name for item in folder.iterdir() if item.name.endswith((".js", ".css", ".html"))}
    assert names == {*_page.SCRIPTS, "style.css", "page.html"}
    for name in names:
        lines = folder.joinpath(name).read_text(encoding="utf-8").splitlines()
        assert len(lines) <= 500
        assert all(len(line) <= 110 for line in lines), name


def test_the_wheel_holds_every_part(tmp_path):
    hatchling = pytest.importorskip("hatchling.builders.wheel", reason="needs hatchling")
    root = Path(__file__).resolve().parents[1]
    (wheel,) = hatchling.WheelBuilder(str(root)).build(directory=str(tmp_path))
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
    parts = {*_page.SCRIPTS, "style.css", "page.html"}
    assert {f"scaledot/report/{name}" for name in parts} <= names
