"""Reports as one HTML file that needs nothing else. Draws nothing itself."""

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from . import svg
from .assets import SCRIPT, STYLE
from .comparison import cell, common, grid_of, labels, unit_of
from .palette import in_words, shown
from .schema import CATEGORIES, DEVICE_CATEGORIES, POINTS, Report, Sample, gib
from .thinning import peak_index, runs_of_phases, thinned

__all__ = ["html", "write_html"]

# Of all timelines together, and of one: a plot is some thousand pixels wide at most, and a page
# of dozens of timelines should still be one that a mail can carry.
MOST_SAMPLES, MOST_OF_ONE, LEAST_OF_ONE = 6000, 1000, 100

# Not even a mistake in this file can make a report fetch something.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"

UNKNOWN = "unknown to this version"


def write_html(
    reports: Sequence[Report],
    path: str | Path,
    title: str = "Memory of a training step",
    limit_nbytes: int | None = None,
) -> None:
    """Write one self-contained HTML file: bars, tables, and a timeline of each report that has one.

    Args:
        reports: at least one.
        path: of the file, which is replaced.
        title: of the page.
        limit_nbytes: a GPU's memory, which becomes a line across the bars.

    Raises:
        ConfigError: there is no report, or the limit is not positive.
    """
    Path(path).write_text(html(reports, title, limit_nbytes), encoding="utf-8")


def html(
    reports: Sequence[Report],
    title: str = "Memory of a training step",
    limit_nbytes: int | None = None,
) -> str:
    """What `write_html` writes."""
    if not reports:
        raise ConfigError("expected at least one report, got none: there is nothing to show")
    if limit_nbytes is not None and limit_nbytes <= 0:
        raise ConfigError(f"limit_nbytes must be positive, got {limit_nbytes}: pass bytes of a GPU")
    timelines = sum(bool(report.timeline) for report in reports)
    most = max(LEAST_OF_ONE, min(MOST_OF_ONE, MOST_SAMPLES // max(timelines, 1)))
    names = shown(reports)
    sections = [
        f"<h1>{escape(title)}</h1>",
        _facts(common(reports)),
        _bars(reports, names, limit_nbytes),
        _legend(names),
        _comparison(reports),
        *(
            _section(report, label, number, names, most)
            for number, (label, report) in enumerate(zip(labels(reports), reports, strict=True))
        ),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body>\n{svg.STRIPES}<main>\n"
        + "\n".join(sections)
        + f"\n</main><script>{SCRIPT}</script></body></html>\n"
    )


def _facts(values: Mapping[str, Any]) -> str:
    items = [
        f"<div><dt>{escape(in_words(str(key)))}</dt><dd>{escape(str(value))}</dd></div>"
        for key, value in values.items()
    ]
    return f'<dl class="facts">{"".join(items)}</dl>' if items else ""


def _bars(reports: Sequence[Report], names: Sequence[str], limit: int | None) -> str:
    longest = max(*(report.peak.total for report in reports), limit or 0, 1)
    rows = []
    line = ""
    if limit is not None:
        at = svg.percent(limit / longest)
        line = f'<span class="limit" style="left:{at}"></span>'
        rows.append(
            '<div><span class="name empty"></span><div class="lane limit-name">'
            f'<span{_classes(left=limit > longest / 2)} style="left:{at}">GPU memory '
            f"{gib(limit)}</span>"
            "</div></div>"
        )
    for number, (label, report) in enumerate(zip(labels(reports), reports, strict=True)):
        total = report.peak.total
        short = (
            f' <span class="short">{gib(total - limit)} too much</span>'
            if limit is not None and total > limit
            else ""
        )
        rows.append(
            f'<div><span class="name"><a href="#report-{number}">{escape(label)}</a>{short}</span>'
            f'<div class="lane">{svg.bar(report.peak.categories, names, longest)}{line}'
            f'<span class="total" style="left:{svg.percent(total / longest)}">{gib(total)}</span>'
            "</div></div>"
        )
    return (
        '<section aria-label="Peaks"><h2>Peak of one rank</h2>'
        f'<div class="bars">{"".join(rows)}</div></section>'
    )


def _legend(names: Iterable[str]) -> str:
    holds = {**CATEGORIES, **DEVICE_CATEGORIES}
    items = [
        f"<li>{svg.swatch(name)}<span><b>{escape(in_words(name))}</b> "
        f'<span class="faint">{escape(holds.get(name, UNKNOWN))}</span></span></li>'
        for name in names
    ]
    return f'<ul class="legend" aria-label="Categories">{"".join(items)}</ul>'


def _comparison(reports: Sequence[Report]) -> str:
    grid = grid_of(reports)
    unit, size = unit_of(max(report.peak.total for report in reports))
    head = "".join(f'<th scope="col">{escape(header)}</th>' for header in grid.columns)
    body = "".join(
        f'<tr{_classes(sum=name == "peak")}><th scope="row">{escape(name)}</th>'
        f"{''.join(_cell(nbytes, size) for nbytes in row)}</tr>"
        for name, row in grid.rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="Peaks in numbers"><table>'
        f"<caption>At the peak, in {unit}</caption>"
        f"<thead><tr><td></td>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _classes(**applies: bool) -> str:
    names = " ".join(name for name, does in applies.items() if does)
    return f' class="{names}"' if names else ""


def _cell(nbytes: int | None, size: int) -> str:
    """A number for people, and the exact one for programs."""
    if nbytes is None:
        return "<td></td>"
    if nbytes == 0:
        return '<td class="none"><data value="0">0</data></td>'
    return f'<td><data value="{nbytes}">{escape(cell(nbytes, size))}</data></td>'


def _section(report: Report, label: str, number: int, names: Sequence[str], most: int) -> str:
    took = f" in {report.seconds:.1f} s" if report.seconds is not None else ""
    parts = [
        f'<section class="report" id="report-{number}" aria-label="{escape(label)}">',
        f"<h2>{escape(label)}</h2>",
        f'<p class="sentence">{_sentence(report)}</p>',
    ]
    if len(report.ranks) > 1:
        parts.append(
            f"<p>Peaks of {len(report.ranks)} ranks: from {gib(min(report.ranks))} to "
            f"{gib(max(report.ranks))}.</p>"
        )
    if report.timeline:
        parts.append(_timeline(report, number, names, most))
    parts.append(_numbers(report, names))
    if report.notes:
        notes = "".join(f"<li>{escape(note)}</li>" for note in report.notes)
        parts.append(f'<h3>Notes</h3><ul class="notes">{notes}</ul>')
    parts.append(f'<p class="faint">Source: {escape(report.source)}{took}.</p>')
    return "".join([*parts, "</section>"])


def _sentence(report: Report) -> str:
    """Numbers stay on the line of their units."""
    return escape(report.peak.in_words()).replace(" %", "\u00a0%").replace(" GiB", "\u00a0GiB")


def _timeline(report: Report, number: int, names: Sequence[str], most: int) -> str:
    samples = thinned(report.timeline, report.peak, most)
    scale = svg.Scale.of(report.timeline)
    names = [name for name in names if any(s.categories.get(name) for s in samples)]
    peak = samples[peak_index(samples, report.peak)]
    key = f"timeline-{number}"
    across = scale.across(peak.at)
    levels = [(svg.percent(scale.down(nbytes)), text) for nbytes, text in svg.ticks(scale.top)]
    lines = "".join(f'<line x1="0" x2="100%" y1="{y}" y2="{y}"/>' for y, _ in levels)
    bands = svg.lanes(list(runs_of_phases(report.timeline)), scale)
    phases = "".join(
        f'<span class="phase">{escape(phase)}</span><div class="band">{drawn}</div>'
        for phase, drawn in bands.items()
    )
    place = svg.percent(across)
    return (
        '<div class="timeline"><figure class="figure"><div class="axis" aria-hidden="true">'
        + "".join(f'<span style="top:{y}">{text}</span>' for y, text in levels)
        + f'</div><div class="plot"><svg role="img" aria-labelledby="{key}-title {key}-text">'
        f'<title id="{key}-title">Bytes by category over the step</title>'
        f'<desc id="{key}-text">{_sentence(report)}</desc>'
        f"{lines}{svg.areas(samples, scale, names, key)}"
        f'<line class="peak" x1="{place}" x2="{place}" y1="0" y2="100%"/></svg>'
        f'<span{_classes(flag=True, left=across > 0.5)} style="left:{place}">peak {gib(peak.total)}'
        '</span><div class="cursor" hidden></div>'
        f'<div class="pointer" hidden tabindex="0" role="slider" aria-label="Moment of the step" '
        f'aria-valuemin="{scale.start}" aria-valuemax="{scale.end - 1}" '
        f'aria-valuenow="{peak.at}"></div></div>{phases}'
        f'<div class="under"><span>{scale.start}</span>'
        f"<span>allocations and releases</span><span>{scale.end - 1}</span></div></figure>"
        f"{_readout(peak, names)}"
        f'<script type="application/json">{_data(samples, scale, names, report)}</script></div>'
    )


def _readout(peak: Sample, names: Sequence[str]) -> str:
    """The legend of a timeline, with the values at the cursor; before that, and in print, at the
    peak. From top to bottom as in the stack."""
    rows = [
        f'<tr data-row="{number}"><th scope="row">{svg.swatch(name)}{escape(in_words(name))}</th>'
        f"<td>{gib(peak.categories.get(name, 0))}</td></tr>"
        for number, name in enumerate(names)
    ]
    where = f" of {peak.where}" if peak.where else ""
    return (
        f'<div class="readout"><p class="moment">peak, event {peak.at}, '
        f"{escape(peak.phase + where)}</p><table><tbody>{''.join(reversed(rows))}"
        f'<tr class="sum"><th scope="row">total</th><td>{gib(peak.total)}</td></tr></tbody></table>'
        '<p class="hint faint" hidden>Point at the plot, or focus it and use the arrow keys.</p>'
        "</div>"
    )


def _data(samples: Sequence[Sample], scale: svg.Scale, names: Sequence[str], report: Report) -> str:
    """What the script shows, as JSON: exact, and short since most categories rarely change."""
    phases = list(dict.fromkeys(sample.phase for sample in samples))
    places = list(dict.fromkeys(sample.where for sample in samples))
    numbers = {place: number for number, place in enumerate(places)}
    values = {
        "start": scale.start,
        "end": scale.end,
        "top": scale.top,
        "peak": peak_index(samples, report.peak),
        "names": names,
        "phases": phases,
        "places": places,
        "phase": [phases.index(sample.phase) for sample in samples],
        "where": [numbers[sample.where] for sample in samples],
        "at": _steps([sample.at for sample in samples]),
        "held": [_steps([s.categories.get(name, 0) for s in samples]) for name in names],
    }
    text = json.dumps(values, separators=(",", ":"))  # ASCII: no separator of lines ends a script
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _steps(values: Sequence[int]) -> list[int]:
    return [new - old for old, new in zip([0, *values], values, strict=False)]


def _numbers(report: Report, names: Sequence[str]) -> str:
    """What each category holds, at every moment that is known."""
    known = [point for point in POINTS if point in report.points]
    points = [*known, *(point for point in report.points if point not in known)]
    columns: list[tuple[str, Mapping[str, int], int | None]] = [
        ("at the peak", report.peak.categories, report.peak.total)
    ]
    if report.maxima:
        columns.append(("at most", report.maxima, None))
    for point in points:
        held = report.points[point]
        columns.append((in_words(point), held, sum(held.values())))
    unit, size = unit_of(report.peak.total)
    head = "".join(f'<th scope="col">{escape(header)}</th>' for header, _, _ in columns)
    rows = [
        f'<tr><th scope="row">{svg.swatch(name)}{escape(in_words(name))}</th>'
        + "".join(_cell(held.get(name, 0), size) for _, held, _ in columns)
        + "</tr>"
        for name in names
    ]
    totals = "".join(_cell(total, size) for _, _, total in columns)
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Numbers"><table>'
        f"<caption>Held by category, in {unit}</caption><thead><tr><td></td>{head}</tr></thead>"
        f'<tbody>{"".join(rows)}<tr class="sum"><th scope="row">total</th>{totals}</tr></tbody>'
        "</table></div>"
    )
