"""What is written about memory: pages, pictures, tables and scalars hold what the reports hold."""

import itertools
import json
import random
import re
import struct
import sys
from collections import Counter
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
import torch
from memory_samples import MIB, sawtooth

from zeroshard.errors import ConfigError
from zeroshard.memory import palette, svg
from zeroshard.memory.assets import STYLE
from zeroshard.memory.comparison import grid_of, labels
from zeroshard.memory.page import MOST_OF_ONE
from zeroshard.memory.report import (
    html,
    log_wandb,
    markdown,
    scalars,
    table,
    write_html,
    write_png,
    write_tensorboard,
)
from zeroshard.memory.schema import CATEGORIES, DEVICE_CATEGORIES, Peak, Report, Sample, gib
from zeroshard.memory.thinning import peak_index, runs_of_phases, thinned

LIMIT = 24 * 2**30


@pytest.fixture(scope="module")
def reports():
    return [sawtooth(stage, world_size) for stage in (1, 3) for world_size in (8, 64)]


def report_of(held, timeline=(), **values):
    peak = Peak(of="requested", step=2, phase="step", where="", categories=held)
    values = {"source": "profile", "configuration": {}, **values}
    return Report(peak=peak, timeline=timeline, **values)


# --- colors -----------------------------------------------------------------------------------

# From linear RGB to what is seen of it where one kind of cones is missing. Source: Machado,
# Oliveira & Fernandes 2009, "A physiologically-based model for simulation of color vision
# deficiency", severity 1.
SIGHTS = {
    "all cones": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "no long ones": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "no middle ones": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "no short ones": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}


def linear(color):
    values = torch.tensor([int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)])
    return torch.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def oklab(rgb):
    """Coordinates in which equal distances look equal. Source: Ottosson 2020, "OKLab"."""
    to_cones = [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
    to_lab = [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
    cones = torch.tensor(to_cones) @ rgb.clamp(0, 1)
    return torch.tensor(to_lab) @ cones.pow(1 / 3)


def contrast(first, second):
    """As the accessibility guidelines of the web define it."""
    weights = torch.tensor([0.2126, 0.7152, 0.0722])
    low, high = sorted((weights @ linear(color)).item() + 0.05 for color in (first, second))
    return high / low


def style_colors():
    """The page's colors in a light scheme and in a dark one."""
    light, dark = re.findall(r":root \{([^}]*--ground[^}]*)\}", STYLE)
    for block in (light, dark):
        found = dict(re.findall(r"--(\w+): (#[0-9a-f]{3,6})", block))
        yield {
            n: c if len(c) == 7 else "#" + "".join(2 * d for d in c[1:]) for n, c in found.items()
        }


def test_every_category_has_a_color_of_its_own():
    assert set(palette.PAINTS) == {*CATEGORIES, *DEVICE_CATEGORIES}
    assert len({paint.color for paint in palette.PAINTS.values()}) == len(palette.PAINTS)
    assert palette.paint_of("of the future") not in palette.PAINTS.values()


@pytest.mark.parametrize("sight", SIGHTS)
def test_categories_can_be_told_apart_by_every_kind_of_sight(sight):
    seen = {
        name: oklab(torch.tensor(SIGHTS[sight], dtype=torch.float32) @ linear(paint.color))
        for name, paint in palette.PAINTS.items()
    }
    for one, other in itertools.combinations(palette.PAINTS, 2):
        alike = palette.PAINTS[one].is_striped == palette.PAINTS[other].is_striped
        # 0.02 is what is just seen, side by side; stripes are a second mark.
        assert (seen[one] - seen[other]).norm() > (0.08 if alike else 0.05), (one, other)


def test_colors_and_text_stand_out_from_a_light_and_a_dark_page():
    for colors in style_colors():
        for name in ("ink", "faint", "mark"):
            assert contrast(colors[name], colors["ground"]) >= 4.5, name
            assert contrast(colors[name], colors["raised"]) >= 4.5, name
        for name, paint in palette.PAINTS.items():
            assert contrast(paint.color, colors["ground"]) > 1.4, name


# --- timelines --------------------------------------------------------------------------------


def random_timeline(number, seed=0):
    chance = random.Random(seed)
    return [
        Sample(
            at=2 * at,
            phase="forward" if at < number // 2 else "backward",
            where=f"layers.{at % 7}",
            categories={"parameters": 1000, "activations": chance.randrange(1, 10**6)},
        )
        for at in range(number)
    ]


@pytest.mark.parametrize("most", [5, 100, 999])
def test_a_thinned_timeline_keeps_the_peak_and_the_outline(most):
    timeline = random_timeline(1000)
    highest = max(timeline, key=lambda sample: sample.total)
    report = report_of(highest.categories, timeline)
    kept = thinned(timeline, report.peak, most)
    assert len(kept) <= most
    assert kept == sorted(kept, key=lambda sample: sample.at)
    ats = {sample.at for sample in kept}
    assert {timeline[0].at, timeline[-1].at, highest.at} <= ats
    groups = (most - 3) // 2
    for group in range(groups):
        part = timeline[group * 1000 // groups : (group + 1) * 1000 // groups]
        for extreme in (max, min):
            assert extreme(part, key=lambda sample: sample.total).at in ats


def test_a_short_timeline_stays_as_it_is():
    timeline = random_timeline(100)
    assert thinned(timeline, report_of({}, timeline).peak, 100) == timeline


def test_the_peak_is_found_where_the_report_says_and_else_at_the_top():
    timeline = [
        Sample(at=at, phase=phase, where="", categories={"temporary": nbytes})
        for at, (phase, nbytes) in enumerate([("step", 5), ("forward", 9), ("step", 9)])
    ]
    assert peak_index(timeline, report_of({"temporary": 9}).peak) == 2
    assert peak_index(timeline, report_of({"temporary": 9, "outside_torch": 1}).peak) == 1


def test_phases_are_runs_without_gaps():
    timeline = sawtooth(blocks=3).timeline
    runs = list(runs_of_phases(timeline))
    assert [run.phase for run in runs[:3]] == ["data", "forward", "backward"]
    assert (runs[0].start, runs[-1].end) == (0, timeline[-1].at + 1)
    for run, following in itertools.pairwise(runs):
        assert run.end == following.start
        assert run.phase != following.phase
    assert sum(run.phase == "reduce" for run in runs) == 3
    assert list(runs_of_phases([])) == []


# --- labels and text --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("configurations", "expected"),
    [
        ([{"model": "a", "stage": 1}], ["profile"]),
        ([{"model": "a", "stage": 1}, {"model": "a", "stage": 3}], ["stage 1", "stage 3"]),
        ([{"model": "a", "x_y": True}, {"model": "b", "x_y": None}], ["a, x y", "b, no x y"]),
        ([{"stage": 1}, {"stage": 1}], ["profile #1", "profile #2"]),
        ([{"stage": 1}, {}], ["stage 1", "profile"]),
    ],
)
def test_labels_say_what_differs(configurations, expected):
    assert labels([report_of({}, configuration=c) for c in configurations]) == expected


def test_labels_name_the_source_where_that_differs():
    both = [report_of({}, source=source) for source in ("plan", "simulate")]
    assert labels(both) == ["plan", "simulate"]


def numbers_of(text):
    """Rows of a plain table: name -> its numbers, over all blocks."""
    rows = {}
    for line in text.split("\n\n" + "stage")[0].splitlines():
        name, *cells = re.split(r"  +", line)
        if cells and ":" not in line:
            rows.setdefault(name, []).extend(cells)
    return rows


def test_a_table_shows_every_category_of_every_report(reports):
    rows = numbers_of(table(reports))
    assert list(rows) == ["GiB", "peak", *(name.replace("_", " ") for name in CATEGORIES)]
    assert rows["GiB"] == labels(reports)
    assert rows["peak"] == [f"{report.peak.total / 2**30:.2f}" for report in reports]
    assert rows["moments"] == [
        f"{report.peak.categories['moments'] / 2**30:.2f}" for report in reports
    ]
    assert set(rows["inputs"]) == {"<0.01"}, "little is not nothing"
    assert rows["unsharded parameters"] == [
        f"{report.peak.categories.get('unsharded_parameters', 0) / 2**30:.2f}".replace("0.00", "0")
        for report in reports
    ]


def test_a_table_fits_a_terminal(reports):
    narrow = table(reports, width=60)
    columns = [line for line in narrow.splitlines() if line.startswith(("GiB", "peak  "))]
    assert len(columns) > 2
    assert all(len(line) <= 60 for line in columns)
    assert numbers_of(narrow) == numbers_of(table(reports))
    assert numbers_of(table(reports, width=1)) == numbers_of(table(reports))


def test_many_reports_are_rows():
    many = [report_of({"moments": 2**30 * n}, configuration={"seq": n}) for n in range(1, 20)]
    grid = grid_of(many)
    assert [name for name, _ in grid.rows] == labels(many)
    assert grid.columns[0] == "peak"
    assert [values[0] for _, values in grid.rows] == [2**30 * n for n in range(1, 20)]


def test_a_table_says_the_peak_the_ranks_and_the_notes():
    report = report_of({"moments": 3 * MIB}, ranks=[3 * MIB, 5 * MIB], notes=["It is so."])
    text = table([report])
    assert f"profile: {report.peak.in_words()}\n" in text
    assert "profile: peaks of 2 ranks from 3.00 MiB to 5.00 MiB\n" in text
    assert text.endswith("It is so.\n")
    assert "MiB" in text.splitlines()[0]
    assert table([]) == markdown([]) == "no reports\n"


def test_notes_of_all_are_said_once(reports):
    note = reports[0].notes[0]
    assert table(reports).count(note) == 1
    other = report_of({"moments": MIB}, notes=["Another."])
    assert table([reports[0], other]).count(note) == 1
    assert "profile: Another." in table([reports[0], other])


def test_markdown_keeps_its_columns_whatever_names_hold():
    report = report_of({"moments": MIB}, configuration={"model": "a|b_c <i>"})
    lines = markdown([report, report_of({"moments": MIB}, configuration={"model": "x"})])
    head, rule, *rows = lines.split("\n\n")[0].splitlines()
    assert r"a\|b\_c \<i\>" in head
    for line in (head, *rows):
        assert len(re.findall(r"(?<!\\)\|", line)) == rule.count("|") == 4


# --- the page ---------------------------------------------------------------------------------


class Page(HTMLParser):
    """What a browser makes of a page: elements with their attributes, and their text."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.texts, self.scripts = [], [], []
        self._inside = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._inside.append(tag)

    def handle_endtag(self, tag):
        while self._inside and self._inside.pop() != tag:
            pass

    def handle_data(self, data):
        (self.scripts if "script" in self._inside else self.texts).append(data)

    def values(self, tag, attribute):
        return [attrs[attribute] for t, attrs in self.elements if t == tag and attribute in attrs]

    @property
    def timelines(self):
        return [json.loads(s) for s in self.scripts if s.startswith("{")]


@pytest.fixture(scope="module")
def page(reports):
    return html(reports, "A title", LIMIT)


def test_a_page_holds_every_number_exactly(page, reports):
    written = Counter(int(value) for value in Page(page).values("data", "value"))
    expected = Counter()
    for report in reports:
        held = report.peak.categories
        expected.update(2 * [report.peak.total])
        for name in CATEGORIES:
            expected.update(2 * [held.get(name, 0)])
            expected.update([report.maxima.get(name, 0)])
            expected.update(point.get(name, 0) for point in report.points.values())
        expected.update(sum(point.values()) for point in report.points.values())
    assert written == expected


def test_a_page_holds_its_timelines_exactly(page, reports):
    for data, report in zip(Page(page).timelines, reports, strict=True):
        samples = thinned(report.timeline, report.peak, MOST_OF_ONE)
        at = list(itertools.accumulate(data["at"]))
        held = [list(itertools.accumulate(steps)) for steps in data["held"]]
        shown = [
            Sample(
                at=at[i],
                phase=data["phases"][data["phase"][i]],
                where=data["places"][data["where"][i]],
                categories={n: h[i] for n, h in zip(data["names"], held, strict=True) if h[i]},
            )
            for i in range(len(at))
        ]
        assert shown == samples
        assert shown[data["peak"]].categories == report.peak.categories


def heights_of(path, ats, scale):
    """The height that a path has at each event, in its own units."""
    start, *moves = re.findall(r"([Mhv])(-?\d+)(?: (\d+))?", path)
    x, y = 0, int(start[2])
    steps = [(0, y)]
    for kind, by, _ in moves:
        x, y = (x + int(by), y) if kind == "h" else (x, y + int(by))
        if kind == "v":
            steps.append((x, y))
    places = [round(svg.WIDTH * scale.across(at)) for at in ats]
    return [[y for x, y in steps if x <= place][-1] for place in places]


def test_areas_are_stacked_to_the_totals():
    report = sawtooth(blocks=4, events=3)
    scale = svg.Scale.of(report.timeline)
    drawn = svg.areas(report.timeline, scale, list(CATEGORIES), "t")
    paths = dict(re.findall(r'<path id="t-(\d+)" d="([^"]+)"', drawn))
    ats = [sample.at for sample in report.timeline]
    assert len(paths) == len(CATEGORIES)
    for number, path in paths.items():
        below = list(CATEGORIES)[: int(number) + 1]
        assert heights_of(path, ats, scale) == [
            round(svg.HEIGHT * scale.down(sum(s.categories.get(name, 0) for name in below)))
            for s in report.timeline
        ]
    order = [int(number) for number in re.findall(r'<path id="t-(\d+)"', drawn)]
    assert order == sorted(order, reverse=True), "what is below covers what is above"


def test_a_page_is_made_of_well_formed_drawings_whose_references_exist(page):
    drawings = re.findall(r"<svg class.*?</svg>|<svg role.*?</svg>(?=<span)", page, re.S)
    assert len(drawings) > 20
    for drawing in drawings:
        ElementTree.fromstring(drawing)
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    references = re.findall(r'(?:href="|url\()#([^")]+)', page)
    references += [r for a in re.findall(r'aria-labelledby="([^"]+)"', page) for r in a.split()]
    assert len(references) > 20
    assert set(references) <= set(ids)


def test_a_page_fetches_nothing(page):
    document = Page(page)
    for attribute in ("src", "href", "srcset", "data", "action"):
        for tag in {tag for tag, _ in document.elements}:
            for value in document.values(tag, attribute):
                assert value.startswith(("#", "data:,")), (tag, value)
    assert "default-src 'none'" in page
    assert not re.search(r"@import|url\((?!#)|\bfetch\(|XMLHttpRequest|https?:", page)


def test_what_a_report_says_is_text_and_nothing_else():
    evil = "</script ><i onclick=\"x\" title='y'>&amp;\u2028"
    sample = Sample(at=0, phase=evil, where=evil, categories={evil: MIB})
    peak = Peak(of=evil, step=2, phase=evil, where=evil, categories={evil: MIB})
    reports = [
        Report(
            source=evil,
            configuration={"model": evil, evil: evil + other},
            peak=peak,
            points={evil: {evil: 1}},
            timeline=[sample],
            notes=[evil],
        )
        for other in "12"
    ]
    shown = Page(html(reports, evil))
    harmless = Page(html([sawtooth(blocks=1), sawtooth(blocks=1, events=1)]))
    assert {tag for tag, _ in shown.elements} <= {tag for tag, _ in harmless.elements}
    assert not [attrs for _, attrs in shown.elements if "onclick" in attrs]
    assert len(shown.scripts) == 3
    assert not set("<>&") & set("".join(s for s in shown.scripts if s.startswith("{")))
    assert shown.timelines[0]["names"] == shown.timelines[0]["places"] == [evil]
    texts = "".join(shown.texts)
    assert texts.count(evil) > 10
    assert "&lt;" not in texts, "escaped twice"


def test_a_page_says_what_does_not_fit(page, reports):
    text = "".join(Page(page).texts)
    for report in reports:
        excess = f"{gib(report.peak.total - LIMIT)} too much"
        assert (excess in text) == (report.peak.total > LIMIT)
    assert "too much" in text
    assert f"GPU memory {gib(LIMIT)}" in text
    assert "too much" not in html(reports)


def test_ten_long_timelines_are_a_small_file(tmp_path):
    many = [sawtooth(stage, 2**n, events=16) for stage in (2, 3) for n in range(1, 6)]
    assert min(len(report.timeline) for report in many) >= 3000
    write_html(many, tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 1_500_000


def test_a_page_of_nothing_is_refused(reports, tmp_path):
    with pytest.raises(ConfigError, match="at least one report, got none"):
        write_html([], tmp_path / "page.html")
    with pytest.raises(ConfigError, match="at least one report, got none"):
        write_png([], tmp_path / "page.png")
    with pytest.raises(ConfigError, match="limit_nbytes must be positive, got 0"):
        write_html(reports, tmp_path / "page.html", limit_nbytes=0)
    assert list(tmp_path.iterdir()) == []


def test_a_report_without_timeline_has_bars_and_numbers():
    plan = report_of({"moments": 2 * MIB, "parameters": MIB}, source="plan")
    document = Page(html([plan]))
    assert document.timelines == []
    assert str(2 * MIB) in document.values("data", "value")


def test_a_timeline_of_nothing_is_drawn():
    timeline = [Sample(at=0, phase="step", where="", categories={})]
    page = html([report_of({}, timeline)])
    assert Page(page).timelines[0]["names"] == []
    assert "timeline-0--1" not in page


def test_ticks_are_round_and_few():
    for top in (1, 1000, 2**20 + 1, 3 * 2**30, 71 * 2**30, 1000 * 2**30):
        marks = svg.ticks(top)
        assert 3 <= len(marks) <= 7, (top, marks)
        assert marks[0][0] == 0
        assert marks[-1][0] <= top
        steps = {second - first for (first, _), (second, _) in itertools.pairwise(marks)}
        assert max(steps) - min(steps) <= 1, (top, marks)
        assert len({label for _, label in marks}) == len(marks)


# --- pictures and dashboards ------------------------------------------------------------------


def test_a_png_shows_bars_and_timelines_in_the_colors_of_the_categories(tmp_path):
    image = pytest.importorskip("matplotlib.image", reason="needs matplotlib")
    report = sawtooth(1, blocks=6, events=2)
    heights = []
    for shown in ([report_of(report.peak.categories)], [report]):
        write_png(shown, tmp_path / "picture.png", LIMIT)
        content = (tmp_path / "picture.png").read_bytes()
        assert content.startswith(b"\x89PNG")
        heights.append(struct.unpack(">II", content[16:24])[1])
    assert heights[1] > 2 * heights[0], "the timeline is below the bars"
    pixels = torch.from_numpy((image.imread(tmp_path / "picture.png")[..., :3] * 255).round())
    below = pixels[heights[0] :]  # the bars are above
    sizes = {}
    for name in ("parameters", "gradients", "master", "activations"):
        color = palette.PAINTS[name].color
        wanted = torch.tensor([int(color[start : start + 2], 16) for start in (1, 3, 5)])
        drawn = (below == wanted).all(-1).sum().item()
        sizes[name] = drawn / sum(sample.categories.get(name, 0) for sample in report.timeline)
    # Their edges are blended with what is beside them: a pixel or two of areas of 20 and more.
    assert max(sizes.values()) < 1.15 * min(sizes.values()), sizes


@pytest.mark.parametrize(
    ("missing", "call", "remedy"),
    [
        ("matplotlib.figure", lambda r, p: write_png([r], p), "pip install matplotlib"),
        ("torch.utils.tensorboard", write_tensorboard, "pip install tensorboard"),
        ("wandb", lambda r, p: log_wandb(r), "pip install wandb"),
    ],
)
def test_a_missing_package_is_named(missing, call, remedy, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigError, match=remedy):
        call(report_of({"moments": MIB}), tmp_path / "out")


def test_scalars_hold_the_peak_by_category():
    report = report_of(
        {"moments": 2**30, "outside_torch": 2**29},
        points={"after_step": {"moments": 2**30, "buffers": 2**28}},
        ranks=[2**30, 3 * 2**30],
    )
    values = scalars(report)
    assert values["memory/peak_gib"] == 1.5
    assert values["memory/moments_gib"] == 1.0
    assert values["memory/activations_gib"] == 0.0
    assert values["memory/outside_torch_gib"] == 0.5
    assert values["memory/after_step_gib"] == 1.25
    assert values["memory/peak_of_largest_rank_gib"] == 3.0
    assert values["memory/peak_of_smallest_rank_gib"] == 1.0
    held = [values[f"memory/{name}_gib"] for name in (*CATEGORIES, "outside_torch")]
    assert sum(held) == values["memory/peak_gib"]
    assert len(values) == len(CATEGORIES) + 5


def test_tensorboard_reads_what_was_written(tmp_path):
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    report = sawtooth(blocks=2)
    write_tensorboard(report, tmp_path)
    write_tensorboard(report, str(tmp_path), step=7)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    expected = scalars(report)
    assert set(events.Tags()["scalars"]) == set(expected)
    for name, value in expected.items():
        read = [(event.step, event.value) for event in events.Scalars(name)]
        rounded = torch.tensor(value, dtype=torch.float32).item()  # as its files keep it
        assert read == [(2, rounded), (7, rounded)]


class Writer:
    """What a user may have instead of a directory, or of a run."""

    def __init__(self):
        self.added, self.logged = [], []

    def add_scalar(self, name, value, step):
        self.added.append((name, value, step))

    def log(self, values, step=None):
        self.logged.append((values, step))


def test_a_writer_is_used_and_left_open():
    writer, report = Writer(), sawtooth(blocks=1)
    write_tensorboard(report, writer, step=3)
    assert writer.added == [(name, value, 3) for name, value in scalars(report).items()]


def test_a_run_gets_all_scalars_at_once():
    run, report = Writer(), sawtooth(blocks=1)
    log_wandb(report, run)
    log_wandb(report, run, step=4)
    assert run.logged == [(scalars(report), None), (scalars(report), 4)]


def test_the_run_under_way_is_used_and_its_absence_said(monkeypatch):
    package = type(sys)("wandb")
    package.run = None
    monkeypatch.setitem(sys.modules, "wandb", package)
    report = sawtooth(blocks=1)
    with pytest.raises(ConfigError, match=r"got none: call wandb\.init\(\) first"):
        log_wandb(report)
    package.run = Writer()
    log_wandb(report)
    assert package.run.logged == [(scalars(report), None)]


def test_what_cannot_be_written_to_is_refused():
    with pytest.raises(ConfigError, match="a directory or a writer that has add_scalar, got int"):
        write_tensorboard(sawtooth(blocks=1), 3)
    with pytest.raises(ConfigError, match="expected a run that has log, got int"):
        log_wandb(sawtooth(blocks=1), 3)
