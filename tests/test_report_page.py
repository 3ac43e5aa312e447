"""The report in a browser: what a person sees, chooses and reads there."""

import re

import numpy as np
import pytest

import browser as browsers
from scaledot import attention_weights, introspect, report
from scaledot.lessons._sentence import load

LONG = 2000
# Half a unit of the last decimal that the page shows, and the rounding of these sums.
THREE_DECIMALS, FOUR_DECIMALS = 0.51e-3, 0.51e-4
LARGEST_CODE = 2**16 - 3  # of 16 bits; two codes are no weights
AWKWARD = ["</script><b>x</b>", "\"'&", "😀", "שלום", "a\nb", "", " ", "it", "{{data}}"]


@pytest.fixture(scope="module")
def browser():
    with browsers.chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("reports")


@pytest.fixture(scope="module")
def demo(folder):
    data = load()
    trace = introspect.trace(data.query, data.key, tokens=data.tokens, title=data.sentence)
    return report.write(trace, folder / "demo.html")


@pytest.fixture(scope="module")
def long(folder):
    rng = np.random.default_rng(0)
    query, key = rng.standard_normal((2, 2, 4, LONG, 16), dtype=np.float32)
    trace = introspect.trace(query, key, tokens=[f"word{i}" for i in range(LONG)], causal=True)
    return report.write(trace, folder / "long.html", max_bytes=400_000)


@pytest.fixture(scope="module")
def window(browser, demo):
    with browsers.opened(browser, demo) as page:
        yield page


@pytest.fixture
def page(window, demo):
    """The sentence's report as it opens, in a window that the tests share."""
    window.mouse.move(0, 0)
    window.goto(demo.as_uri())
    return window


def logarithms(layer, head):
    """Logarithms of the sentence's weights in float64, in textbook form."""
    data = load()
    query, key = (x[layer, head].astype(np.float64) for x in (data.query, data.key))
    scores = query @ key.T / np.sqrt(query.shape[-1])
    return scores - np.log(np.exp(scores).sum(axis=-1, keepdims=True))


def step(layer, head):
    """From one code of a head's weights to the next, in their logarithms."""
    return -logarithms(layer, head).min() / LARGEST_CODE


def room(layer, head, value, decimals):
    """How far the weight may be that the page shows: half a step, and half a decimal."""
    return step(layer, head) / 2 * value + decimals


def rescaled(logs, factor):
    weights = np.exp(factor * logs)
    return weights / weights.sum(axis=-1, keepdims=True)


def chosen(page):
    """Layer and head in the heading of the large map."""
    text = page.locator("#heat-title").inner_text()
    return tuple(map(int, re.fullmatch(r"Layer (\d+), head (\d+)", text).groups()))


def cell(page, layer, head):
    name = re.compile(rf"^layer {layer}, head {head},")
    return page.get_by_role("gridcell", name=name)


def hover(page, row, column, shape):
    """Put the pointer on a cell of the whole map."""
    canvas = page.locator("#map")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    page.mouse.move(
        box["x"] + (column + 0.5) * box["width"] / shape[1],
        box["y"] + (row + 0.5) * box["height"] / shape[0],
    )
    return page.locator("#readout").inner_text()


def table(page, name):
    """Names and weights of one of the two lists, from the top."""
    rows = page.locator(f"#{name} tbody tr").all_inner_texts()
    return [tuple(row.split("\t")[1:3]) for row in rows]


def overflow(page):
    return page.evaluate("document.documentElement.scrollWidth - innerWidth")


def test_the_first_screen_tells_what_it_refers_to(page):
    assert page.title() == load().sentence
    shown = page.get_by_role("listbox", name="The text")
    assert shown.get_by_role("option", selected=True).inner_text() == "it"
    first = page.locator("#links button").first
    box = first.bounding_box()
    assert box["y"] + box["height"] < 900
    assert re.sub(r"\s+", " ", first.inner_text()) == "→ animal 0.677 layer 3, head 1"
    assert chosen(page) == (3, 1)
    assert page.locator("#readout").inner_text() == "“it” looks most at “animal”: 0.6768"


@pytest.mark.heavy
def test_links_are_the_largest_weights_on_other_words(page):
    data = load()
    weights = attention_weights(data.query, data.key)
    row = data.tokens.index("it")
    others = [j for j, t in enumerate(data.tokens) if abs(j - row) > 1 and t.isalpha()]
    best = []
    for layer, head in np.ndindex(weights.shape[:2]):
        j = max(others, key=lambda j: weights[layer, head, row, j])
        best.append((weights[layer, head, row, j], data.tokens[j], layer, head, j < row))
    best.sort(reverse=True)
    expected = [
        f"→ {token} {w:.3f} layer {layer}, head {head}"
        for before in (True, False)
        for w, token, layer, head, earlier in [b for b in best if b[4] is before][:6]
    ]
    found = [re.sub(r"\s+", " ", t) for t in page.locator("#links button").all_inner_texts()]
    assert found == expected


def test_a_link_chooses_its_head(page):
    page.locator("#links button").nth(6).click()
    assert chosen(page) == (2, 1)
    assert page.locator("#links button[aria-pressed=true]").inner_text().endswith("layer 2, head 1")


def test_a_head_is_chosen_by_click_and_by_keys(page):
    cell(page, 1, 8).click()
    assert chosen(page) == (1, 8)
    for key, expected in (
        ("ArrowRight", (1, 9)), ("ArrowDown", (2, 9)), ("ArrowLeft", (2, 8)), ("ArrowUp", (1, 8)),
        ("Home", (1, 0)), ("End", (1, 11)), ("ArrowRight", (2, 0)),
    ):  # fmt: skip
        page.keyboard.press(key)
        assert chosen(page) == expected
    assert page.get_by_role("gridcell", selected=True).count() == 1
    page.get_by_label("Layer", exact=True).select_option("5")
    page.get_by_label("Head", exact=True).select_option("3")
    assert chosen(page) == (5, 3)
    page.wait_for_url(re.compile("#layer=5&head=3&"))


def test_the_pointer_reads_the_weight(page):
    data = load()
    cell(page, 4, 5).click()
    weights = attention_weights(data.query[4, 5], data.key[4, 5]).astype(np.float64)
    for row, column in ((0, 0), (10, 2), (15, 14), (7, 15)):
        text = hover(page, row, column, weights.shape)
        found = re.fullmatch(
            r"“(.+)” \(query (\d+)\) → “(.+)” \(key (\d+)\): weight (\S+), rank (\d+) of 16", text
        )
        assert found, text
        query, i, key, j, weight, rank = found.groups()
        assert (query, key) == (data.tokens[row], data.tokens[column])
        assert (int(i), int(j)) == (row, column)
        value = weights[row, column]
        assert float(weight) == pytest.approx(value, abs=room(4, 5, value, FOUR_DECIMALS))
        assert int(rank) == 1 + (weights[row] > weights[row, column]).sum()


def test_the_map_is_drawn_as_the_weights_are(page):
    """The darker of two cells has the larger weight; rows are queries."""
    cell(page, 2, 1).click()
    weights = np.exp(logarithms(2, 1))
    lightness = np.array(
        page.evaluate(
            """() => {
              const map = document.getElementById("map"), out = [];
              const canvas = document.createElement("canvas");
              canvas.width = map.width;
              canvas.height = map.height;
              const context = canvas.getContext("2d", { willReadFrequently: true });
              context.drawImage(map, 0, 0);
              for (let i = 0; i < 16; i++) for (let j = 0; j < 16; j++) {
                const x = (j + 0.5) * canvas.width / 16, y = (i + 0.5) * canvas.height / 16;
                const [r, g, b] = context.getImageData(x, y, 1, 1).data;
                out.push(r + g + b);
              }
              return out;
            }"""
        )
    ).reshape(16, 16)
    order = np.argsort(weights, axis=None)
    spaced = order[np.concatenate([[True], np.diff(weights.flat[order]) > 0.01])]
    assert len(spaced) > 10
    assert (np.diff(lightness.flat[spaced]) < 0).all()


@pytest.mark.heavy
def test_keys_move_over_the_map(page):
    page.locator("#map").focus()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowLeft")
    assert "(query 9) → “because” (key 9)" in page.locator("#readout").inner_text()
    page.keyboard.press("Enter")
    assert page.locator("#links-title").inner_text() == "Heads that link “because” to …"
    page.keyboard.press("Escape")
    assert "“because” looks most at" in page.locator("#readout").inner_text()


def test_a_token_shows_its_row_and_its_column(page):
    data = load()
    page.get_by_role("option", name="tired").click()
    weights = np.exp(logarithms(3, 1))
    i = data.tokens.index("tired")
    for name, values in (("row", weights[i]), ("column", weights[:, i])):
        found, order = table(page, name), np.argsort(-values)
        assert [token for token, _ in found] == [data.tokens[j] for j in order]
        for (_, weight), value in zip(found, values[order], strict=True):
            assert float(weight) == pytest.approx(value, abs=room(3, 1, value, FOUR_DECIMALS))
    shades = page.locator(".chip").evaluate_all(
        "all => all.map(chip => Number(getComputedStyle(chip).getPropertyValue('--weight')))"
    )
    # Shades are roots, to four decimals: a weight's half step is a quarter there.
    near = {"rtol": step(3, 1) / 4, "atol": FOUR_DECIMALS}
    np.testing.assert_allclose(shades, np.sqrt(weights[i]), **near)
    page.get_by_role("button", name="who looks at it").click()
    shades = page.locator(".chip").evaluate_all(
        "all => all.map(chip => Number(getComputedStyle(chip).getPropertyValue('--weight')))"
    )
    np.testing.assert_allclose(shades, np.sqrt(weights[:, i]), **near)


@pytest.mark.heavy
def test_tokens_are_chosen_by_keys(page):
    page.get_by_role("listbox").get_by_role("option", selected=True).focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#links-title").inner_text() == "Heads that link “was” to …"
    page.keyboard.press("End")
    assert page.locator("#links-title").inner_text() == "Heads that link “[SEP]” to …"
    assert page.evaluate("document.activeElement.textContent") == "[SEP]"


def test_the_slider_computes_the_softmax_anew(page):
    slider = page.get_by_role("slider")
    for power in (-1, -0.4, 0, 0.3, 1):
        slider.fill(str(power))
        factor = 10**power
        weights = rescaled(logarithms(3, 1), factor)
        logs = np.log(np.where(weights > 0, weights, 1))
        expected = {
            "entropy": -(weights * logs).sum(-1).mean(),
            "largest": weights.max(-1).mean(),
            "gradient": (weights * (1 - weights)).sum(-1).mean(),
        }
        for name, value in expected.items():
            found = float(page.locator(f"#figure-{name}").inner_text())
            # Half a step in the power of a weight, half in the sum that divides it; a mean is off
            # by as large a share of itself or of the sum of the weights, which is 1.
            near = factor * step(3, 1) * max(1, value) + THREE_DECIMALS
            assert found == pytest.approx(value, abs=near), (name, factor)
        text = hover(page, 10, 2, (16, 16))
        weight = float(re.search(r"weight (\S+),", text)[1])
        near = factor * step(3, 1) * weights[10, 2] + FOUR_DECIMALS
        assert weight == pytest.approx(weights[10, 2], abs=near)
        said = float(slider.get_attribute("aria-valuetext").split()[0])
        assert said == pytest.approx(factor, rel=6e-3)
    page.get_by_role("button", name="Back to ×1").click()
    assert page.locator("#scale-text").inner_text() == "×1"
    assert float(page.locator("#figure-largest").inner_text()) == pytest.approx(
        np.exp(logarithms(3, 1)).max(-1).mean(), abs=THREE_DECIMALS
    )


def test_a_finding_leads_to_its_head(page):
    trace = introspect.trace(load().query, load().key, tokens=load().tokens)
    finding = introspect.findings(trace)[-1]
    page.locator("#findings details:not([open]) summary").last.click()
    item = page.locator("#findings li", has_text=finding.reason)
    name = f"Layer {finding.layer}, head {finding.head}"
    item.get_by_role("button", name=name, exact=True).click()
    assert chosen(page) == (finding.layer, finding.head)
    assert -1 <= page.locator("#heat").bounding_box()["y"] < 400
    assert page.evaluate("document.activeElement.id") == "heat"


@pytest.mark.heavy
def test_what_could_not_be_told(browser, folder):
    """Four equal tokens: nothing is known of heads that need five keys, or tokens."""
    x = np.zeros((1, 1, 4, 4))
    path = report.write(introspect.trace(x, x), folder / "few.html")
    with browsers.opened(browser, path) as page:
        text = page.locator("#findings").inner_text()
    assert "No head is found to be one of: not a number, saturated, dead." in text
    assert "Could not be told: sink, uniform, previous token (no query sees 5 keys)." in text
    assert "induction, duplicate token (there are no tokens to compare)" in text


@pytest.mark.heavy
def test_the_table_sorts(page):
    data = load()
    expected = introspect.summary(introspect.trace(data.query, data.key)).sink_mass
    heading = page.locator("#summary").get_by_role("button", name="first key, sink")
    for direction in ("descending", "ascending"):
        heading.click()
        column = page.locator("#summary th[aria-sort]")
        assert column.get_attribute("aria-sort") == direction
        found = [float(t) for t in page.locator("#summary td:last-child").all_inner_texts()]
        ordered = np.sort(expected, axis=None)
        np.testing.assert_allclose(
            found, ordered if direction == "ascending" else ordered[::-1], atol=THREE_DECIMALS
        )
    page.locator("#summary tbody button").first.click()
    assert chosen(page) == tuple(np.unravel_index(np.argmin(expected), expected.shape))


def test_dark_and_light(browser, demo, page):
    def background():
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    light = background()
    button = page.get_by_role("button", name="Dark")
    button.click()
    assert button.get_attribute("aria-pressed") == "true"
    dark = background()
    assert dark != light
    with browsers.opened(browser, demo, dark=True) as other:
        assert other.evaluate("getComputedStyle(document.body).backgroundColor") == dark
        assert other.get_by_role("button", name="Dark").get_attribute("aria-pressed") == "true"


CONTRASTS = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (colour, below) => {
    canvas.fillStyle = below; canvas.fillRect(0, 0, 1, 1);
    canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (colour) => colour.map((x) => x / 255)
    .map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4))
    .reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0);
  const under = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const colour = getComputedStyle(e).backgroundColor;
      if (!/, 0\\)$|transparent/.test(colour)) return colour;
    }
    return "#fff";
  };
  return [...document.querySelectorAll("body *")]
    .filter((e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()))
    .filter((e) => e.checkVisibility() && !e.closest("svg, script, style, noscript"))
    .map((e) => {
      const back = under(e);
      const [a, b] = [light(rgba(getComputedStyle(e).color, back)), light(rgba(back, "#fff"))];
      return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), e.className + " " + e.textContent];
    });
}"""


@pytest.mark.heavy
@pytest.mark.parametrize("dark", [False, True])
def test_text_stands_out(browser, demo, dark):
    with browsers.opened(browser, demo, dark=dark) as page:
        # A head that looks at one key alone gives the strongest shade.
        cell(page, 0, 2).click()
        found = page.evaluate(CONTRASTS)
        assert len(found) > 200
        assert min(found)[0] >= 4.5, min(found)


LABELS = """() => ["query-labels", "key-labels"].map((id) =>
  [...document.getElementById(id).children].map((e) => {
    const { left, top, right, bottom } = e.getBoundingClientRect();
    return [left, top, right, bottom];
  }))"""


@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_overlaps_or_scrolls_sideways(browser, demo, long, width):
    for path in (demo, long):
        with browsers.opened(browser, path, width=width) as page:
            assert overflow(page) <= 0
            for boxes in page.evaluate(LABELS):
                assert len(boxes) >= 5
                for i, a in enumerate(boxes):
                    for b in boxes[i + 1 :]:
                        apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
                        assert apart, (a, b)


def test_a_long_input_has_maps_that_zoom(browser, long):
    with browsers.opened(browser, long) as page:
        assert "block maps of" in page.locator("#facts").inner_text()
        assert page.get_by_role("slider").count() == 0

        def labels():
            return page.locator("#query-labels span").all_inner_texts()

        whole = labels()
        first = int(whole[0].split("–")[0].replace(",", ""))
        page.get_by_role("button", name="Zoom in").click()
        page.get_by_role("button", name="Zoom in").click()
        closer = labels()
        assert closer != whole
        assert int(closer[0].split("–")[0].replace(",", "")) > first
        page.get_by_role("button", name="Zoom out").click()
        page.get_by_role("button", name="Whole map").click()
        assert labels() == whole
        page.locator("#map").focus()
        for _ in range(30):  # no closer than some cells
            page.keyboard.press("+")
        # Moving past the edge of what is seen moves the view.
        for key in ("ArrowUp", "ArrowDown"):
            before = labels()
            for _ in range(9):
                page.keyboard.press(key)
            assert labels() != before
        page.keyboard.press("0")
        assert set(labels()) == set(whole)
        box = page.locator("#map").bounding_box()
        page.mouse.move(box["x"] + 20, box["y"] + 20)
        page.mouse.wheel(0, -300)
        page.locator("#map.zoomed").wait_for()
        near = labels()
        page.mouse.down()
        page.mouse.move(box["x"] + 10, box["y"] + 5, steps=3)
        page.mouse.up()
        assert labels() != near


@pytest.mark.heavy
def test_shares_of_a_long_input(browser, long):
    """What the pointer reads is the mean over a range of queries of the weight on a range."""
    rng = np.random.default_rng(0)
    query, key = rng.standard_normal((2, 2, 4, LONG, 16), dtype=np.float32).astype(np.float64)
    scores = np.where(np.tri(LONG, dtype=bool), query[0, 1] @ key[0, 1].T / 4, -np.inf)
    weights = np.exp(scores)
    weights /= weights.sum(-1, keepdims=True)
    with browsers.opened(browser, long, fragment="#layer=0&head=1") as page:
        side = int(re.search(r"maps of (\d+)", page.locator("#facts").inner_text())[1])
        text = hover(page, 1, 0, (side, side))
        row, column, share = re.match(
            r"“(\S+): word\d+ …” \(query 1\) → “(\S+): word\d+ …” \(key 0\): share .* (\S+), rank",
            text,
        ).groups()
        (a, b), (c, d) = (map(int, span.split("–")) for span in (row, column))
        truth = weights[a : b + 1, c : d + 1].sum(axis=-1).mean()
        # 8 bits on a scale of square roots, of at most 1.
        assert np.sqrt(float(share)) == pytest.approx(np.sqrt(truth), abs=0.51 / 255)


@pytest.mark.heavy
def test_an_address_opens_what_it_names(browser, demo):
    with browsers.opened(browser, demo, fragment="#layer=2&head=1&token=4&scale=2") as page:
        assert chosen(page) == (2, 1)
        assert page.locator("#links-title").inner_text() == "Heads that link “'” to …"
        assert page.locator("#scale-text").inner_text() == "×2"
        page.evaluate("location.hash = '#layer=99&head=-1&token=1.5&scale=0&nonsense'")
        page.evaluate("location.hash = '#layer=1'")
        page.locator("#heat-title", has_text="Layer 1,").wait_for()
        assert chosen(page) == (1, 1)


@pytest.mark.heavy
def test_any_token_can_be_shown(browser, folder):
    rng = np.random.default_rng(1)
    query, key = rng.standard_normal((2, 1, 2, len(AWKWARD), 4))
    trace = introspect.trace(query, key, tokens=AWKWARD, title="<i>& \"quoted\"</i>")
    path = report.write(trace, folder / "awkward.html")
    with browsers.opened(browser, path, width=360) as page:
        assert page.title() == "<i>& \"quoted\"</i>"
        assert page.locator("h1").inner_text() == page.title()
        shown = ["</script><b>x</b>", "\"'&", "😀", "שלום", "a⏎b", "∅", "␣", "it", "{{data}}"]
        assert page.locator(".chip").all_text_contents() == shown
        assert page.locator("main b, main i").count() == 0
        assert overflow(page) <= 0


@pytest.mark.heavy
def test_keys_of_another_text(browser, folder):
    rng = np.random.default_rng(2)
    query, key = rng.standard_normal((1, 1, 3, 4)), rng.standard_normal((1, 1, 5, 4))
    mask = np.ones((3, 5), dtype=bool)
    mask[1, 4] = mask[2] = False
    trace = introspect.trace(
        query, key, mask=mask,
        tokens=["Ein", "alter", "Hund"], key_tokens=["an", "old", "dog", "slept", "here"],
    )  # fmt: skip
    path = report.write(trace, folder / "cross.html")
    with browsers.opened(browser, path) as page:
        assert page.get_by_role("listbox").count() == 2
        page.get_by_role("option", name="slept").click()
        page.get_by_role("option", name="Ein").click()
        assert page.locator("#row caption").inner_text() == "“Ein” looks at (layer 0, head 0)"
        assert page.locator("#column caption").inner_text() == "“slept” is looked at by"
        assert "not seen" in hover(page, 1, 4, (3, 5))
        page.mouse.move(0, 0)
        page.get_by_role("option", name="Hund").click()
        assert page.locator("#readout").inner_text() == "“Hund” sees no key"


@pytest.mark.heavy
def test_the_smallest_report(browser, folder):
    path = report.write(introspect.trace(*np.ones((2, 1, 1, 1, 2))), folder / "one.html")
    with browsers.opened(browser, path) as page:
        assert chosen(page) == (0, 0)
        assert page.locator("#readout").inner_text() == "“0” looks most at “0”: 1.0000"
        assert page.locator("#links").inner_text() == "No head looks at another word from here."


@pytest.mark.heavy
def test_nan_is_said(browser, folder):
    query, key = np.random.default_rng(4).standard_normal((2, 1, 1, 3, 4))
    query[0, 0, 1] = np.nan
    path = report.write(introspect.trace(query, key, tokens=["a", "b", "c"]), folder / "nan.html")
    with browsers.opened(browser, path, fragment="#token=1") as page:
        assert page.locator("#readout").inner_text() == "“b” has weights that are nan"
        assert hover(page, 1, 0, (3, 3)).endswith("weight nan, rank 1 of 3")
        assert re.search("weight 0[.]", hover(page, 2, 0, (3, 3)))


@pytest.mark.heavy
def test_sinks_take_their_share_at_every_scale(browser, folder):
    rng = np.random.default_rng(3)
    query, key = rng.standard_normal((2, 1, 1, 4, 8))
    path = report.write(introspect.trace(query, key, sinks=np.array([0.7])), folder / "sinks.html")
    scores = query[0, 0] @ key[0, 0].T / np.sqrt(8)
    scores = np.concatenate([scores, np.full((4, 1), 0.7)], axis=-1)
    logs = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    with browsers.opened(browser, path) as page:
        assert "temperature" in page.locator("#scale-note").inner_text()
        for power in (0, 0.5):
            page.get_by_role("slider").fill(str(power))
            found = float(page.locator("#figure-largest").inner_text())
            truth = rescaled(logs, 10**power)[:, :-1].max(-1).mean()
            assert found == pytest.approx(truth, abs=THREE_DECIMALS)


def test_the_checks_can_fail(browser, folder):
    path = folder / "bad.html"
    path.write_text("<!doctype html><script>console.log('complaint')</script>")
    with pytest.raises(AssertionError, match="complaint"), browsers.opened(browser, path):
        pass
    path.write_text("<!doctype html><img src='other.png'>")
    with pytest.raises(AssertionError), browsers.opened(browser, path):
        pass
