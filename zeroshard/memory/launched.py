"""One report of all ranks of a launcher, through its store: also after a script that failed."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ..errors import CommunicationError
from ..transport.meeting import Meeting
from .ranks import of_all_ranks
from .schema import Report

__all__ = ["is_launched", "of_all_launched"]


def is_launched() -> bool:
    """Whether a launcher started this process as one of several."""
    named = all(name in os.environ for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"))
    return named and os.environ.get("WORLD_SIZE", "1") != "1"


def of_all_launched(reports: Sequence[Report], patience_s: float) -> list[Report] | None:
    """What all ranks have measured, on the first; None on the others, whose part is done then.

    Args:
        reports: of this rank, in the order in which its optimizers were made.
        patience_s: for how long the first rank waits for the others.

    Raises:
        CommunicationError: nobody answers at the launcher's address.
    """
    meeting = Meeting(patience_s, "profile")
    short = [replace(report, timeline=()).to_json() for report in reports]
    meeting.tell("short", short)
    if meeting.rank != 0:
        # The first rank waits for the last one, and only then asks. It ends when it has heard those
        # that it asked, which may be before others have seen that they were not.
        with suppress(CommunicationError):
            asked = meeting.hear("asked", [0], 2 * patience_s).get(0, {})
            if wanted := asked.get(str(meeting.rank)):
                meeting.tell("whole", [reports[number].to_json() for number in wanted])
        return None
    ranks = range(meeting.world_size)
    told = _parsed(meeting.hear("short", ranks, patience_s))
    highest: dict[int, list[int]] = {}
    most = max(map(len, told.values()), default=0)  # a rank may have failed before its first step
    for number in range(most):
        peaks = {rank: own[number].peak.total for rank, own in told.items() if number < len(own)}
        highest.setdefault(max(peaks, key=lambda rank: peaks[rank]), []).append(number)
    meeting.tell("asked", highest)
    for rank, numbers in highest.items():
        if rank == 0:
            whole = [reports[number] for number in numbers]
        else:
            whole = _parsed(meeting.hear("whole", [rank], patience_s)).get(rank, [])
        for number, report in zip(numbers, whole, strict=False):
            told[rank][number] = report
    return [_combined(number, told, ranks) for number in range(most)]


def _parsed(told: Mapping[int, list[Any]]) -> dict[int, list[Report]]:
    return {rank: [Report.from_json(entry) for entry in told[rank]] for rank in sorted(told)}


def _combined(number: int, told: Mapping[int, Sequence[Report]], ranks: Sequence[int]) -> Report:
    known = {rank: own[number] for rank, own in told.items() if number < len(own)}
    found = of_all_ranks([*known.values()], [*known])
    missing = [str(rank) for rank in ranks if rank not in known]
    if not missing:
        return found
    named = f"ranks {', '.join(missing)}" if len(missing) > 1 else f"rank {missing[0]}"
    return replace(found, notes=[f"Of {named} nothing is known.", *found.notes])
