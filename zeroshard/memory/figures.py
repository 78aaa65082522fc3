"""Reports as a PNG, through matplotlib, which is imported when one is drawn."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .comparison import labels, unit_of
from .palette import in_words, paint_of, shown
from .schema import Report, gib
from .svg import Scale
from .thinning import peak_index, runs_of_phases, thinned

__all__ = ["write_png"]

INCHES, DPI = 11, 150
BAR, TIMELINE, PHASES = 0.32, 2.9, 1.1  # inches of each
MOST_TIMELINES = 6  # more would be no picture; HTML has them all
MOST_SAMPLES = 1500
BEHIND = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5}  # of a text
HATCH, MARK, FAINT = "////", "#b3124a", "#565f6b"


def write_png(reports: Sequence[Report], path: str | Path, limit_nbytes: int | None = None) -> None:
    """Write the bars of all reports and the timelines of the first six that have one.

    Args:
        reports: at least one.
        path: of the file, which is replaced.
        limit_nbytes: a GPU's memory, which becomes a line across the bars.

    Raises:
        ConfigError: there is no report, or matplotlib is missing.
    """
    if not reports:
        raise ConfigError("expected at least one report, got none: there is nothing to draw")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("a PNG needs matplotlib: pip install matplotlib") from error
    names = shown(reports)
    drawn = [(label, r) for label, r in zip(labels(reports), reports, strict=True) if r.timeline]
    drawn = drawn[:MOST_TIMELINES]
    heights = [BAR * len(reports) + 1.3, *([TIMELINE, PHASES] * len(drawn))]
    figure: Any = Figure(figsize=(INCHES, sum(heights)), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    _draw_bars(axes[0], reports, names, limit_nbytes)
    for number, (label, report) in enumerate(drawn):
        scale = Scale.of(report.timeline)
        _draw_timeline(axes[1 + 2 * number], label, report, names, scale)
        _draw_phases(axes[2 + 2 * number], report, scale)
    figure.legend(
        handles=_handles([n for n in names if any(r.peak.categories.get(n) for r in reports)]),
        loc="outside right upper",
        frameon=False,
    )
    figure.savefig(path, format="png")


def _fill(name: str) -> dict[str, Any]:
    paint = paint_of(name)
    stripes = {"hatch": HATCH, "edgecolor": "#ffffff99"} if paint.is_striped else {}
    return {"facecolor": paint.color, "linewidth": 0, **stripes}


def _handles(names: Sequence[str]) -> list[Any]:
    from matplotlib.patches import Patch

    return [Patch(label=in_words(name), **_fill(name)) for name in reversed(names)]


def _draw_bars(
    axes: Any, reports: Sequence[Report], names: Sequence[str], limit: int | None
) -> None:
    longest = max(*(report.peak.total for report in reports), limit or 0, 1)
    unit, size = unit_of(longest)
    starts = [0.0] * len(reports)
    for name in names:
        widths = [report.peak.categories.get(name, 0) / size for report in reports]
        if any(widths):
            axes.barh(range(len(reports)), widths, left=starts, height=0.75, **_fill(name))
            starts = [start + width for start, width in zip(starts, widths, strict=True)]
    for number, report in enumerate(reports):
        axes.text(
            starts[number], number, f" {gib(report.peak.total)}", va="center", zorder=3, bbox=BEHIND
        )
    if limit is not None:
        axes.axvline(limit / size, color=MARK, linestyle="--")
    axes.set_yticks(range(len(reports)), labels(reports))
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * longest / size)
    axes.set_xlabel(f"peak of one rank, {unit}")
    _plain(axes)


def _draw_timeline(
    axes: Any, label: str, report: Report, names: Sequence[str], scale: Scale
) -> None:
    samples = thinned(report.timeline, report.peak, MOST_SAMPLES)
    unit, size = unit_of(scale.top)
    edges = [*(sample.at for sample in samples), scale.end]
    lower = [0.0] * len(edges)
    for name in names:
        own = [sample.categories.get(name, 0) / size for sample in samples]
        if any(own):
            upper = [low + nbytes for low, nbytes in zip(lower, [*own, own[-1]], strict=True)]
            axes.fill_between(edges, lower, upper, step="post", **_fill(name))
            lower = upper
    peak = samples[peak_index(samples, report.peak)]
    axes.axvline(peak.at, color=MARK, linestyle="--", linewidth=1)
    place = {"ha": "right" if scale.across(peak.at) > 0.5 else "left", "va": "top"}
    axes.text(peak.at, scale.top / size, f" peak {gib(peak.total)} ", color=MARK, **place)
    axes.set_title(f"{label}\n{report.peak.in_words()}", loc="left", fontsize=9, wrap=True)
    axes.set_xlim(scale.start, scale.end)
    axes.set_ylim(0, scale.top / size)
    axes.set_ylabel(unit)
    axes.tick_params(labelbottom=False)
    _plain(axes)


def _draw_phases(axes: Any, report: Report, scale: Scale) -> None:
    """A lane for each phase, below its timeline."""
    runs = list(runs_of_phases(report.timeline))
    phases = list(dict.fromkeys(run.phase for run in runs))
    for number, phase in enumerate(phases):
        bands = [(run.start, run.end - run.start) for run in runs if run.phase == phase]
        axes.broken_barh(bands, (number + 0.2, 0.6), color=FAINT, linewidth=0.5)
    axes.set_xlim(scale.start, scale.end)
    axes.set_ylim(len(phases), 0)
    axes.set_yticks([number + 0.5 for number in range(len(phases))], phases, fontsize=8)
    axes.tick_params(left=False)
    axes.set_xlabel("allocations and releases")
    _plain(axes)


def _plain(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
