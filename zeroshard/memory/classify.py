"""From what a tracker saw of a step to categories, peaks and a timeline."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .schema import Peak, Sample
from .stored import Moment, Step, Stored

__all__ = ["StepSummary", "category_of", "summarise", "timeline_of"]

MAX_SAMPLES = 3000

Totals = dict[str, int]


def category_of(stored: Stored) -> str:
    """The category of a storage whose step is over: by owner, by identity, by lifetime."""
    if stored.owner or stored.identity:
        return stored.owner or stored.identity
    if stored.was_sent and stored.outlived_step:
        return "communication"  # such as a bucket of DDP's, wherever that was made
    if stored.is_behind_blocks:
        return "logits_and_loss"
    if stored.outlived_forward:
        return "activations"
    return "bookkeeping" if stored.outlived_step else "temporary"


@dataclass(frozen=True, kw_only=True)
class StepSummary:
    """What a step held.

    Attributes:
        number: of the step, from 1.
        peak: the highest total.
        points: bytes by category at each point.
        maxima: the most that each category held.
        num_changes: allocations and releases.
    """

    number: int
    peak: Peak
    points: Mapping[str, Mapping[str, int]]
    maxima: Mapping[str, int]
    num_changes: int


def summarise(step: Step, of: str = "requested") -> StepSummary:
    """Peak, points and maxima of a step that is over."""
    wanted = {at: name for name, at in step.points.items()}
    points: dict[str, Totals] = {}
    maxima: Counter[str] = Counter()
    highest, peak_at, at_peak = -1, 0, Counter[str]()

    def look(at: int, held: Counter[str], total: int) -> None:
        nonlocal highest, peak_at, at_peak
        if total > highest:
            highest, peak_at, at_peak = total, at, held.copy()
        if at in wanted:
            for name, place in step.points.items():
                if place == at:
                    points[name] = _positive(held)

    _replay(step, look, maxima)
    moment = _moment_at(step.moments, peak_at)
    return StepSummary(
        number=step.number,
        peak=Peak(
            of=of,
            step=step.number,
            phase=moment.phase,
            where=moment.where,
            categories=_positive(at_peak),
        ),
        points=points,
        maxima=_positive(maxima),
        num_changes=len(step.changes),
    )


def timeline_of(step: Step, max_samples: int = MAX_SAMPLES) -> list[Sample]:
    """What was held in the course of a step: its outline, with the highest and lowest points."""
    totals: list[int] = []
    _replay(step, lambda at, held, total: totals.append(total), Counter())
    chosen = {0, len(totals) - 1, *step.points.values()}
    chosen.update(moment.at for moment in step.moments if moment.at < len(totals))
    chosen = _thinned(sorted(chosen), max_samples // 2)
    chosen.add(max(range(len(totals)), key=totals.__getitem__))
    width = max(-(-len(totals) // max(max_samples // 4, 1)), 1)
    for start in range(0, len(totals), width):
        part = range(start, min(start + width, len(totals)))
        chosen |= {max(part, key=totals.__getitem__), min(part, key=totals.__getitem__)}
    samples: list[Sample] = []

    def keep(at: int, held: Counter[str], total: int) -> None:
        if at in chosen:
            moment = _moment_at(step.moments, at)
            samples.append(
                Sample(at=at, phase=moment.phase, where=moment.where, categories=_positive(held))
            )

    _replay(step, keep, Counter())
    return samples


def _replay(
    step: Step, look: Callable[[int, Counter[str], int], None], maxima: Counter[str]
) -> None:
    """Call `look` with what was held before the first change and after each one."""
    held: Counter[str] = Counter()
    present: dict[int, int] = {}
    category: dict[int, str] = {}
    for stored, nbytes in step.before:
        present[id(stored)] = nbytes
        name = category[id(stored)] = category_of(stored)
        held[name] += nbytes
    maxima.update(held)
    total = sum(held.values())
    look(0, held, total)
    for at, (stored, nbytes) in enumerate(step.changes, start=1):
        key = id(stored)
        if key not in category:
            category[key] = category_of(stored)
        name = category[key]
        change = nbytes - present.get(key, 0)
        present[key] = nbytes
        held[name] += change
        total += change
        maxima[name] = max(maxima[name], held[name])
        look(at, held, total)


def _positive(held: Mapping[str, int]) -> Totals:
    return {name: nbytes for name, nbytes in held.items() if nbytes}


def _moment_at(moments: Sequence[Moment], at: int) -> Moment:
    """The moment under way after `at` changes: that in which the last of them was made."""
    low, high = 0, len(moments)
    while low < high:
        middle = (low + high) // 2
        if moments[middle].at < max(at, 1):
            low = middle + 1
        else:
            high = middle
    return moments[low - 1] if low else Moment(0, "data", "")


def _thinned(places: Sequence[int], most: int) -> set[int]:
    step = max(-(-len(places) // max(most, 1)), 1)
    return set(places[::step])
