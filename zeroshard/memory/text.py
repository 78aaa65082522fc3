"""Reports as text: for terminals and for Markdown."""

import re
from collections.abc import Sequence

from .comparison import Grid, cell, grid_of, labels, unit_of
from .schema import Report, gib

__all__ = ["markdown", "table"]


def table(reports: Sequence[Report], width: int | None = None) -> str:
    """The peaks by category, and what is to be said about each report, as plain text.

    Args:
        reports: any number.
        width: of the terminal; columns that do not fit are put below. None: never.
    """
    if not reports:
        return "no reports\n"
    grid = grid_of(reports)
    cells = _cells(grid, reports)
    headers = [name for name, _ in grid.rows]
    first = max(len(name) for name in [grid.corner, *headers])
    widths = [
        max(len(header), *(len(row[number]) for row in cells))
        for number, header in enumerate(grid.columns)
    ]
    lines = []
    for start, end in _blocks(widths, first, width):
        for name, row in [(grid.corner, grid.columns), *zip(headers, cells, strict=True)]:
            values = [v.rjust(w) for v, w in zip(row[start:end], widths[start:end], strict=True)]
            lines.append("  ".join([name.ljust(first), *values]).rstrip())
        lines.append("")
    return "\n".join([*lines, *_remarks(reports)]) + "\n"


def markdown(reports: Sequence[Report]) -> str:
    """The same as `table`, in Markdown."""
    if not reports:
        return "no reports\n"
    grid = grid_of(reports)
    lines = [
        _row([grid.corner, *grid.columns]),
        "|---|" + "---:|" * len(grid.columns),
        *(
            _row([name, *row])
            for (name, _), row in zip(
                grid.rows,
                _cells(grid, reports),
                strict=True,
            )
        ),
        "",
        *(f"- {_escaped(remark)}" for remark in _remarks(reports)),
    ]
    return "\n".join(lines) + "\n"


def _cells(grid: Grid, reports: Sequence[Report]) -> list[list[str]]:
    size = unit_of(max(report.peak.total for report in reports))[1]
    return [[cell(nbytes, size) for nbytes in row] for _, row in grid.rows]


def _blocks(widths: Sequence[int], first: int, width: int | None) -> list[tuple[int, int]]:
    """From which column to which each block goes; at least one in each."""
    starts, used = [0], first
    for number, column in enumerate(widths):
        if width is not None and used + 2 + column > width and number > starts[-1]:
            starts.append(number)
            used = first
        used += 2 + column
    return list(zip(starts, [*starts[1:], len(widths)], strict=True))


def _remarks(reports: Sequence[Report]) -> list[str]:
    """What is said of each, and once what is noted of all."""
    shared = [n for n in reports[0].notes if all(n in report.notes for report in reports)]
    said = []
    for label, report in zip(labels(reports), reports, strict=True):
        said.append(f"{label}: {report.peak.in_words()}")
        if len(report.ranks) > 1:
            said.append(
                f"{label}: peaks of {len(report.ranks)} ranks from {gib(min(report.ranks))} to "
                f"{gib(max(report.ranks))}"
            )
        said.extend(f"{label}: {note}" for note in report.notes if note not in shared)
    return [*said, *shared]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(_escaped(cell) for cell in cells) + " |"


def _escaped(text: str) -> str:
    """As it stands, where Markdown would read a mark-up; on one line."""
    return re.sub(r"([\\|*_`<>\[\]#])", r"\\\1", " ".join(text.split()))
