"""Timelines short enough to be drawn. No pictures."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .schema import Peak, Sample

__all__ = ["Run", "end_of", "peak_index", "runs_of_phases", "thinned"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Samples in a row that are of one phase.

    Attributes:
        phase: theirs.
        start: `at` of the first.
        end: `at` of what comes after the last.
    """

    phase: str
    start: int
    end: int


def end_of(timeline: Sequence[Sample]) -> int:
    """The last sample lasts as long as one event."""
    return timeline[-1].at + 1


def runs_of_phases(timeline: Sequence[Sample]) -> Iterator[Run]:
    """The phases in the order of time."""
    if not timeline:
        return
    first = timeline[0]
    for sample in timeline:
        if sample.phase != first.phase:
            yield Run(phase=first.phase, start=first.at, end=sample.at)
            first = sample
    yield Run(phase=first.phase, start=first.at, end=end_of(timeline))


def peak_index(timeline: Sequence[Sample], peak: Peak) -> int:
    """Where the peak is: its own sample, or the highest if that is missing."""

    def likeness(number: int) -> tuple[bool, int, int]:
        sample = timeline[number]
        is_it = (sample.phase, sample.where) == (peak.phase, peak.where)
        return is_it and dict(sample.categories) == dict(peak.categories), sample.total, -number

    return max(range(len(timeline)), key=likeness)


def thinned(timeline: Sequence[Sample], peak: Peak, most: int) -> list[Sample]:
    """At most `most` samples, with the outline of all.

    The first, the last and the peak's stay; of equally many in a row the highest and the lowest,
    so that no spike and no gap is lost.

    Args:
        timeline: at least one sample.
        peak: whose sample must stay.
        most: at least 5.
    """
    if len(timeline) <= most:
        return list(timeline)
    kept = {0, len(timeline) - 1, peak_index(timeline, peak)}
    groups = (most - len(kept)) // 2
    totals = [sample.total for sample in timeline]
    for group in range(groups):
        numbers = range(group * len(totals) // groups, (group + 1) * len(totals) // groups)
        kept.add(max(numbers, key=totals.__getitem__))
        kept.add(min(numbers, key=totals.__getitem__))
    return [timeline[number] for number in sorted(kept)]
