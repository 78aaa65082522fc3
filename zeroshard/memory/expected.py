"""Reports that were written before, and whether a new one is what they promised."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..formats import AUTO_MASTER
from .schema import Report, differences, gib

__all__ = ["load_reports", "matching", "unmet"]

COMPARED = (
    "stage",
    "world_size",
    "dtype",
    "master",
    "moments",
    "seq",
    "micro_batch",
    "checkpointing",
)
"""What two configurations must have in common, where both say it."""


def load_reports(path: Path) -> list[Report]:
    """One report or a list of them, as the commands write it with --json.

    Raises:
        ConfigError: the file is missing or holds something else.
    """
    try:
        content = json.loads(path.read_text())
        entries = content if isinstance(content, list) else [content]
        reports = [Report.from_json(entry) for entry in entries]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} holds no reports of memory: {error}") from error
    if not reports:
        raise ConfigError(f"{path} holds no reports of memory: its list is empty")
    return reports


def matching(reports: Sequence[Report], configuration: Mapping[str, Any], where: str) -> Report:
    """The report of a configuration.

    Args:
        reports: to choose from.
        configuration: what to look for.
        where: names them, for messages.

    Raises:
        ConfigError: there is none, or more than one; says what is there.
    """
    found = [r for r in reports if not _conflicts(r.configuration, configuration)]
    if len(found) > 1 and configuration.get("master", "auto") == "auto":
        found = [r for r in found if _is_automatic(r.configuration)] or found
    if len(found) > 1:
        differing = [
            name
            for name in COMPARED
            if len({str(report.configuration.get(name)) for report in found}) > 1
        ]
        raise ConfigError(
            f"{where} has {len(found)} reports that may be of this configuration, which differ in "
            f"{', '.join(differing).replace('_', ' ') or 'nothing that is compared'}: give a file "
            "with one of them"
        )
    if found:
        return found[0]
    closest = min(reports, key=lambda r: len(_conflicts(r.configuration, configuration)))
    said = "; ".join(
        f"{name.replace('_', ' ')} {closest.configuration[name]} instead of {configuration[name]}"
        for name in _conflicts(closest.configuration, configuration)
    )
    raise ConfigError(
        f"{where} has no report of this configuration; the closest one has {said}: write one of "
        "the same configuration"
    )


def _conflicts(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    return [
        name
        for name in COMPARED
        if name in first and name in second and not _is_same(first[name], second[name])
    ]


def _is_automatic(configuration: Mapping[str, Any]) -> bool:
    """Whether the master is what "auto" means for the parameters."""
    master, dtype = configuration.get("master"), configuration.get("dtype", "bfloat16")
    return master in ("auto", AUTO_MASTER.get(str(dtype)))


def _is_same(first: Any, second: Any) -> bool:
    return first == second or "auto" in (first, second)


def unmet(
    report: Report,
    *,
    limit: int | None = None,
    expected: Report | None = None,
    tolerance: float = 0.0,
) -> list[str]:
    """What a report does not keep to, in words; nothing where all is well.

    Args:
        report: what was found.
        limit: bytes that the peak, of the rank that holds most, must not be above.
        expected: what the peak should be made of.
        tolerance: by how much a category may differ, as a share of the expected peak.
    """
    found = []
    highest = max([report.peak.total, *report.ranks])
    if limit is not None and highest > limit:
        found.append(
            f"the peak is {gib(highest)}, which is {gib(highest - limit)} more than the "
            f"{gib(limit)} of a GPU"
        )
    if expected is not None:
        differing = differences(report.peak.categories, expected.peak.categories, tolerance)
        if differing:
            found.append(
                f"the peak of {gib(report.peak.total)} instead of {gib(expected.peak.total)} "
                f"differs by more than {100 * tolerance:g} % of it in {'; '.join(differing)}"
            )
    return found
