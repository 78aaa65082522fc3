"""One report in full, as text: the peak in words, every point by category, notes."""

from .comparison import cell, unit_of
from .palette import in_words, shown
from .schema import POINTS, Report, gib

__all__ = ["in_full"]


def in_full(report: Report) -> str:
    """What there is to say of a report; several are better shown by `text.table`."""
    points = {name: report.points[name] for name in POINTS if name in report.points}
    columns = {"peak": report.peak.categories, **points}
    unit, size = unit_of(report.peak.total)
    names = [
        name for name in shown([report]) if any(column.get(name) for column in columns.values())
    ]
    rows = [[unit, *(in_words(name) for name in columns)]]
    rows += [
        [in_words(name), *(cell(column.get(name, 0), size) for column in columns.values())]
        for name in names
    ]
    rows.append(["total", *(cell(sum(column.values()), size) for column in columns.values())])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [report.peak.in_words(), ""]
    for label, *values in rows:
        cells = [value.rjust(width) for value, width in zip(values, widths[1:], strict=True)]
        lines.append("  ".join([label.ljust(widths[0]), *cells]))
    lines.append("")
    if len(report.ranks) > 1:
        lines.append(
            f"Peaks of {len(report.ranks)} ranks: from {gib(min(report.ranks))} to "
            f"{gib(max(report.ranks))}."
        )
    lines += report.notes
    return "\n".join(lines)
