"""One color for each category, in every picture. No pictures."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .schema import CATEGORIES, DEVICE_CATEGORIES, Report

__all__ = ["PAINTS", "Paint", "in_words", "paint_of", "shown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Paint:
    """How a category looks.

    Attributes:
        color: as "#rrggbb"; the same on a light and on a dark page.
        is_striped: whether light stripes lie over it.
    """

    color: str
    is_striped: bool = False


# Fourteen colors cannot be told apart by hue alone, least of all by someone who sees two primary
# colors. So seven hues say what kind of thing it is, and of the two of a hue one is striped: two
# plain ones, or two striped ones, always differ in lightness or hue for every kind of sight, which
# a test computes. The values were searched for that, all at once.
PAINTS: Mapping[str, Paint] = {
    "parameters": Paint(color="#4f83fb"),
    "unsharded_parameters": Paint(color="#374bb0", is_striped=True),
    "buffers": Paint(color="#47b4cf"),
    "inputs": Paint(color="#137b8e", is_striped=True),
    "gradients": Paint(color="#c86337"),
    "master": Paint(color="#683480"),
    "moments": Paint(color="#bf53e1", is_striped=True),
    "communication": Paint(color="#e07a0e", is_striped=True),
    "activations": Paint(color="#125624"),
    "logits_and_loss": Paint(color="#65a984", is_striped=True),
    "temporary": Paint(color="#e0c46d"),
    "bookkeeping": Paint(color="#835f22", is_striped=True),
    "allocator_overhead": Paint(color="#cdd5e2"),
    "outside_torch": Paint(color="#414853", is_striped=True),
}

_UNKNOWN = Paint(color="#8a8a8a")


def paint_of(category: str) -> Paint:
    """How it looks; grey for one that the schema does not know."""
    return PAINTS.get(category, _UNKNOWN)


def in_words(category: str) -> str:
    """Its name for people: "logits and loss"."""
    return category.replace("_", " ")


def shown(reports: Sequence[Report]) -> list[str]:
    """The categories that a picture of these reports needs, in the order of the schema.

    Those of torch are always among them; those of a device and unknown ones where a report has
    them.
    """
    found = {name for report in reports for held in _holdings(report) for name in held}
    devices = [name for name in DEVICE_CATEGORIES if name in found]
    return [*CATEGORIES, *devices, *sorted(found - set(CATEGORIES) - set(DEVICE_CATEGORIES))]


def _holdings(report: Report) -> Iterable[Mapping[str, int]]:
    yield report.peak.categories
    yield report.maxima
    yield from report.points.values()
    for sample in report.timeline:
        yield sample.categories
