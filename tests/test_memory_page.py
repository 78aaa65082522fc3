"""The HTML report in a real browser: readable at every width, and it answers mouse and keyboard."""

import dataclasses
import json

import pytest
from browser import Browser, find_browser
from memory_samples import MIB, sawtooth

from zeroshard.memory.report import write_html
from zeroshard.memory.schema import CATEGORIES, gib
from zeroshard.memory.thinning import peak_index

pytestmark = pytest.mark.skipif(
    find_browser() is None, reason="needs chromium, on the PATH or where CHROMIUM says"
)

SIZES = [(400, False), (400, True), (900, False), (900, True), (1600, False), (1600, True)]

# Pieces of text that are seen: of each its place, what it says, and how it looks.
PIECES = """
(() => {
  const pieces = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, parent = node.parentElement;
    if (!node.textContent.trim() || parent.closest("script, title, desc")) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const style = getComputedStyle(parent), scrolls = parent.closest(".scroll");
    for (const box of range.getClientRects())
      pieces.push({ text: node.textContent, left: box.left, right: box.right, top: box.top,
        bottom: box.bottom, size: parseFloat(style.fontSize), scrolls: scrolls !== null });
  }
  return JSON.stringify(pieces);
})()
"""


@pytest.fixture(scope="module")
def reports():
    plain = sawtooth(3, 8)
    long = dataclasses.replace(
        sawtooth(1, 1024, checkpointing="block", master="fp32", moments="int8", seq=32768),
        notes=["A note on /a/very/long/path" + 40 * "/without/a/place/to/break"],
        ranks=[30 * 2**30, 31 * 2**30],
    )
    deep = 12 * "base_model.model."
    where = [dataclasses.replace(s, where=deep + s.where) for s in long.timeline]
    small = sawtooth(2, 8, blocks=1, events=1)
    return [plain, dataclasses.replace(long, timeline=where), small]


@pytest.fixture(scope="module")
def path(reports, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    write_html(reports, path, limit_nbytes=24 * 2**30)
    return path


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(autouse=True)
def no_complaints(browser):
    browser.complaints.clear()
    yield
    assert browser.complaints == []


def pieces(browser):
    found = json.loads(browser.value(PIECES))
    assert len(found) > 200
    return found


def overlapping(found):
    """Pairs of texts that lie on each other by more than the room between two lines."""
    found = sorted(found, key=lambda piece: piece["top"])
    for number, one in enumerate(found):
        for other in found[number + 1 :]:
            if other["top"] > one["bottom"] - 3:
                break
            if min(one["right"], other["right"]) - max(one["left"], other["left"]) > 1:
                yield one["text"], other["text"]


@pytest.mark.parametrize(("width", "dark"), SIZES)
def test_all_text_is_readable(width, dark, browser, path):
    browser.open(path, width=width, dark=dark)
    assert browser.value("document.documentElement.scrollWidth") <= width
    found = pieces(browser)
    assert min(piece["size"] for piece in found) >= 11.9
    found = [piece for piece in found if not piece["scrolls"]]
    assert [p["text"] for p in found if p["left"] < 0 or p["right"] > width] == []
    assert list(overlapping(found)) == []


@pytest.mark.parametrize("width", [400, 900])
def test_a_table_that_is_too_wide_scrolls_by_itself(width, browser, path):
    browser.open(path, width=width)
    wide = browser.value(
        "[...document.querySelectorAll('.scroll')].map(e => [e.scrollWidth > e.clientWidth,"
        " e.tabIndex === 0, getComputedStyle(e).overflowX])"
    )
    assert all(row[1:] == [True, "auto"] for row in wide)
    assert any(row[0] for row in wide) or width > 400


@pytest.mark.parametrize("dark", [False, True])
def test_the_page_follows_the_color_scheme(dark, browser, path):
    browser.open(path, width=900, dark=dark)
    red, *_ = json.loads(
        browser.value("getComputedStyle(document.body).backgroundColor")
        .replace("rgb(", "[")
        .replace(")", "]")
    )
    assert (red < 64) == dark


def readout(browser, number):
    """What stands beside a timeline: the moment, and text by category."""
    table = browser.value(
        f"[...document.querySelectorAll('.timeline')[{number}].querySelectorAll('.readout tr')]"
        ".map(row => [...row.cells].map(cell => cell.textContent.trim()))"
    )
    moment = browser.value(f"document.querySelectorAll('.moment')[{number}].textContent")
    return moment, dict(table)


def box_of(browser, selector, number=0):
    browser.value(f"document.querySelectorAll('{selector}')[{number}].scrollIntoView()")
    return browser.value(
        f"(b => [b.left, b.top, b.width, b.height])"
        f"(document.querySelectorAll('{selector}')[{number}].getBoundingClientRect())"
    )


def words(sample):
    return f"{sample.phase} of {sample.where}" if sample.where else sample.phase


def test_at_rest_the_values_of_the_peak_are_shown(browser, path, reports):
    browser.open(path, width=900)
    for number, report in enumerate(reports):
        moment, values = readout(browser, number)
        peak = report.timeline[peak_index(report.timeline, report.peak)]
        assert moment == f"peak, event {peak.at}, {words(peak)}"
        assert values.pop("total") == gib(report.peak.total)
        stack = [name.replace("_", " ") for name in reversed(CATEGORIES)]
        assert list(values) == [name for name in stack if name in values]
        assert {n: v for n, v in values.items() if v != "0 B"} == {
            name.replace("_", " "): gib(held) for name, held in report.peak.categories.items()
        }


@pytest.mark.parametrize("width", [400, 1600])
def test_pointing_shows_the_values_there(width, browser, path, reports):
    browser.open(path, width=width)
    number, timeline = 2, reports[2].timeline  # short: nothing of it was left out
    left, top, breadth, height = box_of(browser, ".pointer", number)
    highest = max(sample.total for sample in timeline)
    for index in (0, 1, len(timeline) // 2, len(timeline) - 1):
        sample = timeline[index]
        browser.move_to(left + breadth * (index + 0.5) / len(timeline), top + height - 2)
        moment, values = readout(browser, number)
        assert moment.removeprefix("peak, ") == f"event {sample.at}, {words(sample)}"
        assert values == {
            **dict.fromkeys(values, "0 B"),
            **{name.replace("_", " "): gib(held) for name, held in sample.categories.items()},
            "total": gib(sample.total),
        }
        assert moment.startswith("peak") == (sample.total == highest)
    pointed = "[...document.querySelectorAll('tr.pointed th')].map(e => e.textContent)"
    assert browser.value(pointed) == ["parameters"], "they are at the bottom of the stack"
    browser.move_to(left + breadth / 2, top + 1)
    assert browser.value(pointed) == [], "above all of it"
    browser.move_to(1, 1)
    assert readout(browser, number)[0].startswith("peak")


def test_keys_move_through_the_step(browser, path, reports):
    browser.open(path, width=900)
    timeline = reports[2].timeline
    slider = "document.querySelectorAll('[role=slider]')[2]"
    browser.value(f"{slider}.focus()")

    def at():
        assert browser.value(f"{slider}.getAttribute('aria-valuetext')").startswith(
            readout(browser, 2)[0]
        )
        return int(browser.value(f"{slider}.getAttribute('aria-valuenow')"))

    peak = peak_index(timeline, reports[2].peak)
    assert at() == peak
    seen = []
    for key in ("ArrowLeft", "Home", "ArrowLeft", "ArrowRight", "End", "ArrowRight", "Escape"):
        browser.press(key)
        seen.append(at())
    last = len(timeline) - 1
    assert seen == [peak - 1, 0, 0, 1, last, last, peak]


def test_the_keyboard_reaches_every_timeline(browser, path, reports):
    browser.open(path, width=900)
    pointers = "[...document.querySelectorAll('.pointer')].indexOf(document.activeElement)"
    reached = []
    while len(reached) < 100 and reached[-1:] != [len(reports) - 1]:
        browser.press("Tab")
        reached.append(browser.value(pointers))
    assert [number for number in reached if number >= 0] == list(range(len(reports)))


@pytest.mark.parametrize("width", [400, 1600])
def test_labels_stand_where_the_drawing_says(width, browser, path):
    browser.open(path, width=width)
    gaps = browser.value(
        "[...document.querySelectorAll('.figure')].flatMap(figure => {"
        " const middle = e => (b => (b.top + b.bottom) / 2)(e.getBoundingClientRect());"
        " const lines = [...figure.querySelectorAll('.plot line:not(.peak)')].map(middle);"
        " return [...figure.querySelectorAll('.axis span')].map((e, i) => middle(e) - lines[i]);"
        "})"
    )
    assert len(gaps) > 6
    assert max(map(abs, gaps)) < 1
    places = browser.value(
        "[...document.querySelectorAll('.flag')].map(flag => {"
        " const box = flag.getBoundingClientRect();"
        " const line = flag.parentElement.querySelector('line.peak').getBoundingClientRect();"
        " return Math.min(Math.abs(box.left - line.left), Math.abs(box.right - line.right)); })"
    )
    assert max(places) < 1


def test_on_paper_nothing_is_cut_off(browser, path):
    browser.open(path, width=720, dark=True, media="print")
    assert browser.value("getComputedStyle(document.body).color") == "rgb(27, 31, 36)"
    found = pieces(browser)
    assert max(piece["right"] for piece in found) <= 720
    assert min(piece["left"] for piece in found) >= 0
    assert list(overlapping(found)) == []
    assert not browser.value(
        "[...document.querySelectorAll('.hint, .pointer')].some(e => e.offsetParent !== null)"
    )


def test_without_its_script_the_page_shows_the_same(browser, path, tmp_path):
    browser.open(path, width=900)
    with_script = [(p["text"], p["top"]) for p in pieces(browser) if "arrow keys" not in p["text"]]
    bare = tmp_path / "bare.html"
    content = path.read_text(encoding="utf-8")
    bare.write_text(content[: content.rindex("<script>")] + "</body></html>", encoding="utf-8")
    browser.open(bare, width=900)
    without = [(p["text"], p["top"]) for p in pieces(browser)]
    assert [text for text, _ in without] == [text for text, _ in with_script]


def test_values_are_rounded_as_in_the_text(browser, path):
    browser.open(path, width=900)
    numbers = [0, 1, 102, 103, 2**10, 2**27, 3 * 2**27, 5 * 2**27, 10 * 2**30, 123456789012]
    numbers += [7 * MIB // 8, 2**30 + 2**27 - 1, 2**30 + 3 * 2**25, 41 * 2**28, 43 * 2**28]
    shown = browser.value(f"{numbers}.map(gib)")
    assert shown == [gib(number) for number in numbers]


def test_the_browser_would_tell_of_errors(browser, path, tmp_path):
    broken = tmp_path / "broken.html"
    content = path.read_text(encoding="utf-8")
    broken.write_text(
        content.replace('"use strict";', "missing();").replace(
            "<main>", '<main><img src="https://example.invalid/x.png">'
        ),
        encoding="utf-8",
    )
    browser.open(broken, width=900)
    said = json.dumps(browser.complaints)
    browser.complaints.clear()
    assert "missing is not defined" in said
    assert "Content Security Policy" in said
