"""Inline SVG that fits any width: timelines, bars and swatches. Knows no page."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from .comparison import unit_of
from .palette import in_words, paint_of
from .schema import PHASES, Sample, gib
from .thinning import Run, end_of

__all__ = ["STRIPES", "Scale", "areas", "bar", "lanes", "percent", "swatch", "ticks"]

# A drawing is stretched to the width that it gets, so text is never part of one, and a stroke
# keeps its width. Stripes must not be stretched: they lie on a plain rectangle, cut out by the
# stretched path.
WIDTH, HEIGHT = 10000, 3000
NARROWEST = 25  # of a phase, so that a short one is seen

STRIPES = (
    '<svg class="definitions" aria-hidden="true" width="0" height="0"><defs>'
    '<pattern id="stripes" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="2.2" height="6" fill="#fff" fill-opacity="0.6"/>'
    "</pattern></defs></svg>"
)
"""What striped paints refer to; once in a document, before them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """From events and bytes to a drawing.

    Attributes:
        start: the event at its left edge.
        end: the one at its right edge.
        top: bytes at its upper edge.
    """

    start: int
    end: int
    top: int

    @staticmethod
    def of(timeline: Sequence[Sample]) -> "Scale":
        """One with room above the highest sample."""
        highest = max(sample.total for sample in timeline)
        return Scale(
            start=timeline[0].at, end=end_of(timeline), top=max(math.ceil(1.15 * highest), 1)
        )

    def across(self, at: float) -> float:
        """0 at the left edge, 1 at the right one."""
        return (at - self.start) / (self.end - self.start)

    def down(self, nbytes: float) -> float:
        """0 at the upper edge, 1 at the lower one."""
        return 1 - nbytes / self.top


def percent(share: float) -> str:
    """Of a width or a height, for SVG and CSS."""
    return f"{100 * share:.2f}".rstrip("0").rstrip(".") + "%"


def areas(timeline: Sequence[Sample], scale: Scale, names: Sequence[str], prefix: str) -> str:
    """Bytes by category, stacked in the order of `names`.

    Each area reaches down to zero and is covered by those below it, so that one edge is enough.

    Args:
        timeline: thinned.
        scale: of the drawing.
        names: the categories that it holds.
        prefix: of all ids in it.
    """
    heights = [0] * len(timeline)
    drawn: list[str] = []
    for name in names:
        own = [sample.categories.get(name, 0) for sample in timeline]
        heights = [height + nbytes for height, nbytes in zip(heights, own, strict=True)]
        drawn.append(_area(name, _edge(timeline, heights, scale), f"{prefix}-{len(drawn)}"))
    if not drawn:
        return ""
    outline = f'<use class="outline" href="#{prefix}-{len(names) - 1}"/>'
    return "".join(reversed(drawn)) + _stretched(outline)


def _area(name: str, path: str, key: str) -> str:
    paint = paint_of(name)
    drawn = _stretched(f'<g fill="{paint.color}"><path id="{key}" d="{path}"/></g>')
    if not paint.is_striped:
        return drawn
    scale = f"scale({1 / WIDTH:.8f},{1 / HEIGHT:.8f})"
    return (
        f'{drawn}<clipPath id="{key}-cut" clipPathUnits="objectBoundingBox">'
        f'<use href="#{key}" transform="{scale}"/></clipPath>'
        f'<rect width="100%" height="100%" fill="url(#stripes)" clip-path="url(#{key}-cut)"/>'
    )


def _edge(timeline: Sequence[Sample], heights: Sequence[int], scale: Scale) -> str:
    """Steps, left to right, and then around the area below; relative, which is shorter."""
    x, y = 0, round(HEIGHT * scale.down(heights[0]))
    parts = [f"M0 {y}"]
    for sample, height in zip(timeline, heights, strict=True):
        level = round(HEIGHT * scale.down(height))
        if level != y:
            here = round(WIDTH * scale.across(sample.at))
            parts.append(f"h{here - x}v{level - y}")
            x, y = here, level
    return "".join([*parts, f"H{WIDTH}V{HEIGHT}H0z"])


def _stretched(content: str, height: int = HEIGHT) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" preserveAspectRatio="none" width="100%" '
        f'height="100%">{content}</svg>'
    )


def lanes(runs: Sequence[Run], scale: Scale) -> Mapping[str, str]:
    """When each phase was under way: phase -> a drawing of a band."""
    drawn = {}
    for phase in [*PHASES, *sorted({run.phase for run in runs} - set(PHASES))]:
        bands = [
            (round(WIDTH * scale.across(run.start)), round(WIDTH * scale.across(run.end)))
            for run in runs
            if run.phase == phase
        ]
        if bands:
            path = "".join(f"M{x} 0h{end - x}v1h{x - end}z" for x, end in _joined(bands))
            drawn[phase] = _stretched(f'<path d="{path}"/>', height=1)
    return drawn


def _joined(bands: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """What nobody could see apart becomes one band; none is too narrow to be seen."""
    joined: list[tuple[int, int]] = []
    for start, end in bands:
        end = max(end, min(start + NARROWEST, WIDTH))
        start = min(start, end - NARROWEST)
        if joined and start - joined[-1][1] < NARROWEST // 2:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def ticks(top: int) -> list[tuple[int, str]]:
    """Round numbers up to `top` bytes, three to six of them, with their labels; 0 first."""
    unit, size = unit_of(top)
    rough = top / size / 5
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return [
        (round(number * step * size), f"{number * step:.{digits}f} {unit}")
        for number in range(int(top / size / step) + 1)
    ]


def bar(categories: Mapping[str, int], names: Sequence[str], longest: int) -> str:
    """A horizontal stack of what `categories` hold, on a scale that ends at `longest` bytes."""
    parts, start = [], 0
    for name in names:
        nbytes = categories.get(name, 0)
        if nbytes:
            place = f'x="{percent(start / longest)}" width="{percent(nbytes / longest)}"'
            parts.append(
                f"<g><title>{escape(in_words(name))} {gib(nbytes)}</title>"
                f"{_filled(name, place)}</g>"
            )
        start += nbytes
    return f'<svg width="100%" height="100%">{"".join(parts)}</svg>'


def swatch(name: str) -> str:
    """A little square of a category's paint."""
    drawn = _filled(name, 'width="100%"')
    return f'<svg class="swatch" aria-hidden="true" width="14" height="14">{drawn}</svg>'


def _filled(name: str, place: str) -> str:
    paint = paint_of(name)
    drawn = f'<rect {place} height="100%" fill="{paint.color}"/>'
    if paint.is_striped:
        drawn += f'<rect {place} height="100%" fill="url(#stripes)"/>'
    return drawn
