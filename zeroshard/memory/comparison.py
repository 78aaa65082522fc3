"""Reports beside each other: what tells them apart, and their numbers as one grid. No pictures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .palette import in_words, shown
from .schema import Report

__all__ = ["Grid", "cell", "common", "grid_of", "labels", "unit_of"]

_MISSING = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Bytes in rows and columns, and what each row and column is.

    Attributes:
        corner: the unit that people read them in.
        columns: headers.
        rows: header and bytes of each; the total is a row or a column of its own.
    """

    corner: str
    columns: list[str]
    rows: list[tuple[str, list[int]]]


def common(reports: Sequence[Report]) -> dict[str, Any]:
    """What all configurations have in common."""
    first = reports[0].configuration
    return {
        key: value
        for key, value in first.items()
        if all(report.configuration.get(key, _MISSING) == value for report in reports)
    }


def labels(reports: Sequence[Report]) -> list[str]:
    """A short name for each that tells it from the others.

    A single report, and one that differs in nothing but its source, is named after that; equal
    ones are numbered.
    """
    shared = common(reports)
    sources = {report.source for report in reports}
    names = []
    for report in reports:
        parts = [_in_words(k, v) for k, v in report.configuration.items() if k not in shared]
        if len(sources) > 1 or not parts:
            parts.insert(0, report.source)
        names.append(", ".join(parts))
    total = {name: names.count(name) for name in names}
    seen: dict[str, int] = {}
    for number, name in enumerate(names):
        seen[name] = seen.get(name, 0) + 1
        if total[name] > 1:
            names[number] = f"{name} #{seen[name]}"
    return names


def _in_words(key: str, value: Any) -> str:
    key = key.replace("_", " ")
    if value is None or value is False:
        return f"no {key}"
    if value is True:
        return key
    return str(value) if key == "model" else f"{key} {value}"


def grid_of(reports: Sequence[Report]) -> Grid:
    """The peaks by category. Whatever is fewer, reports or categories, makes the columns."""
    names = shown(reports)
    headers = ["peak", *(in_words(name) for name in names)]
    values = [[r.peak.total, *(r.peak.categories.get(n, 0) for n in names)] for r in reports]
    corner = unit_of(max(report.peak.total for report in reports))[0]
    if len(reports) > len(names):
        return Grid(
            corner=corner, columns=headers, rows=list(zip(labels(reports), values, strict=True))
        )
    across = [list(column) for column in zip(*values, strict=True)]
    return Grid(
        corner=corner, columns=labels(reports), rows=list(zip(headers, across, strict=True))
    )


def cell(nbytes: int, size: int) -> str:
    """A number of a table in the unit of `size` bytes; what is little is not shown as nothing."""
    if nbytes == 0:
        return "0"
    return f"{nbytes / size:.2f}" if nbytes >= 0.005 * size else "<0.01"


def unit_of(nbytes: int) -> tuple[str, int]:
    """The unit for a table whose largest number this is: GiB unless all would be 0.0."""
    units: Mapping[str, int] = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
    for name, size in units.items():
        if nbytes >= 0.1 * size:
            return name, size
    return "B", 1
