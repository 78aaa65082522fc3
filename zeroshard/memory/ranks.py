"""One report of what was measured on several ranks. Communicates nothing."""

from collections.abc import Sequence
from dataclasses import replace

from .schema import Report, compare, gib

__all__ = ["of_all_ranks"]


def of_all_ranks(reports: Sequence[Report], numbers: Sequence[int] | None = None) -> Report:
    """The report of the rank with the highest peak, with what there is to say of the others.

    Args:
        reports: by rank, at least one. All but that one may be without a timeline.
        numbers: of these ranks; None: 0, 1, 2 ...

    Returns:
        Maxima are those over ranks; notes say by how much the ranks differ, and in what.
    """
    totals = [report.peak.total for report in reports]
    most, least = totals.index(max(totals)), totals.index(min(totals))
    highest = reports[most]
    maxima = {
        name: max(report.maxima.get(name, 0) for report in reports)
        for name in dict.fromkeys(name for report in reports for name in report.maxima)
    }
    notes = list(highest.notes)
    if len(reports) > 1:
        notes.insert(0, _imbalance(reports, most, least, numbers or range(len(reports))))
    return replace(highest, maxima=maxima, ranks=totals, notes=notes)


def _imbalance(reports: Sequence[Report], most: int, least: int, numbers: Sequence[int]) -> str:
    peaks = [reports[rank].peak for rank in (most, least)]
    difference = peaks[0].total - peaks[1].total
    if difference == 0:
        return f"All {len(reports)} ranks have the same peak."
    name, high, low = max(
        compare(peaks[0].categories, peaks[1].categories), key=lambda row: abs(row[1] - row[2])
    )
    return (
        f"Rank {numbers[most]} holds most, {gib(peaks[0].total)}, and rank {numbers[least]} least, "
        f"{gib(peaks[1].total)} ({100 * difference / peaks[0].total:.1f} % less); they differ most "
        f"in {name.replace('_', ' ')}, {gib(high)} and {gib(low)}."
    )
