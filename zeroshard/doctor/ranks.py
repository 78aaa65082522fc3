"""The ranks of a launcher: who came, in what they differ, and whether the wire between them works.

Every wait has an end, which is told as a sentence: the operations themselves run on a thread that
may never come back.
"""

import os
import socket
import sys
import threading
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..errors import CommunicationError
from ..transport.meeting import Meeting
from ..transport.self_test import Trial, leave, try_wire
from .backends import device_of_rank
from .diagnosis import Advice
from .facts import Facts
from .software import OF_ALL_RANKS, environment, versions

__all__ = ["Ranks", "has_ranks"]

TEST_S = 2.0  # that the operations take, beside the patience
FAREWELL_S = 2.0  # for the other ranks to hear the verdict


def has_ranks() -> bool:
    """Whether a launcher says that this process is one of several ranks."""
    return all(
        os.environ.get(name, "").isdigit() for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")
    ) and bool(os.environ.get("MASTER_ADDR"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the ranks found out together, as the first one knows it."""

    facts: Facts
    advice: list[Advice]


class Ranks:
    """This rank among the others.

    Args:
        patience_s: how long to wait for a rank.

    Raises:
        CommunicationError: nobody answers at the launcher's address, or the first rank does not.
    """

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s
        self.meeting = Meeting(patience_s)
        self.rank = self.meeting.rank
        self.is_stuck = False  # a thread that does not come back keeps the process from ending
        self.all = range(self.meeting.world_size)
        self.present = list(self.all)

    def confer(self) -> Outcome:
        """Meet, compare, and try the wire; complete on the first rank only."""
        self.meeting.tell("card", _card())
        cards = self.meeting.hear("card", self.all, self.patience_s)
        self.present = sorted(cards)
        missing = [rank for rank in self.all if rank not in cards]
        if 0 in missing:
            raise CommunicationError(
                f"rank 0, which would have reported, did not answer within {self.patience_s:g} s"
            )
        advice = [*compare(cards)]
        facts: Facts = {"how_many": len(self.all), "where": _by_host(cards)}
        if missing:
            advice.append(_not_there(missing, cards, self.patience_s))
            return Outcome(facts=facts, advice=advice)
        devices = [torch.device("cpu")]
        kinds = {card["device"].split(":")[0] for card in cards.values()}
        if kinds == {"cuda"} and not _shared_devices(cards) and "NCCL" in cards[0]["versions"]:
            devices.append(device_of_rank())
        results = self._try(devices)
        facts.update(_table(results))
        advice += _failures(results, self._places(results))
        return Outcome(facts=facts, advice=advice)

    def _try(self, devices: list[torch.device]) -> dict[int, list[Trial]]:
        """What happened on each rank that came to an end in time."""

        def run() -> None:
            teller = Meeting(self.patience_s)  # a connection waits for one thread at a time
            try:
                done = try_wire(devices, self.patience_s, lambda place: teller.tell("place", place))
            except Exception as error:
                done = [Trial(backend="", operation="self-test", error=f"{type(error)}: {error}")]
            teller.tell("result", [asdict(trial) for trial in done])

        thread = threading.Thread(target=run, daemon=True, name="zeroshard-self-test")
        thread.start()
        told = self.meeting.hear("result", self.all, self.patience_s + TEST_S)
        thread.join(0.1 if self.rank in told else 0)
        self.is_stuck = thread.is_alive()
        if len(told) == len(self.all) and not self.is_stuck:
            leave()
        else:
            self.is_stuck = True  # other ranks may still wait for what is open here
        return {rank: [Trial(**trial) for trial in trials] for rank, trials in told.items()}

    def _places(self, results: dict[int, list[Trial]]) -> dict[int, str]:
        return self.meeting.told("place", [rank for rank in self.all if rank not in results])

    def agree_to_end(self, is_sound: bool) -> bool:
        """Wait until the first rank has reported; whether it found everything sound.

        A launcher ends all ranks once one of them has ended in a failure; and the first one may
        have the store of all.
        """
        if self.rank == 0:
            self.meeting.tell("verdict", is_sound)
            self.meeting.hear("end", self.present[1:], FAREWELL_S)
            return is_sound
        said = self.meeting.hear("verdict", [0], 2 * self.patience_s + TEST_S)
        self.meeting.tell("end", True)
        return bool(said.get(0, False))

    def end(self, code: int) -> None:
        """End the process at once, where a thread does not come back."""
        if self.is_stuck:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def _card() -> dict[str, Any]:
    """What the others should know of this rank."""
    variables = {k: v for k, v in environment().items() if k in OF_ALL_RANKS}
    return {
        "host": socket.gethostname(),
        "device": str(device_of_rank()),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        "versions": versions(),
        "environment": variables,
    }


def _by_host(cards: dict[int, Any]) -> dict[str, str]:
    hosts: dict[str, list[str]] = defaultdict(list)
    for rank, card in sorted(cards.items()):
        hosts[card["host"]].append(f"rank {rank} on {card['device']}")
    return {host: ", ".join(ranks) for host, ranks in hosts.items()}


def _shared_devices(cards: dict[int, Any]) -> dict[tuple[str, ...], list[int]]:
    """Ranks that would train on the same GPU."""
    users: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for rank, card in sorted(cards.items()):
        if card["device"] != "cpu":
            users[card["host"], card["device"], card["visible"]].append(rank)
    return {device: ranks for device, ranks in users.items() if len(ranks) > 1}


def compare(cards: dict[int, Any]) -> list[Advice]:
    """What differs between ranks, by their cards."""
    advice = []
    for kind, what in (("versions", ""), ("environment", "the variable ")):
        for name in sorted({name for card in cards.values() for name in card[kind]}):
            by_value: dict[str, list[int]] = defaultdict(list)
            for rank, card in sorted(cards.items()):
                by_value[card[kind].get(name, "none")].append(rank)
            if len(by_value) > 1:
                said = "; ".join(f"{_ranks(r)}: {value}" for value, r in by_value.items())
                is_fault = kind == "versions" and name != "Python"
                advice.append(
                    Advice(
                        what=f"{what}{name} differs between ranks ({said})",
                        remedy="install the same everywhere"
                        if kind == "versions"
                        else "set it alike everywhere",
                        is_fault=is_fault,
                    )
                )
    kinds = defaultdict(list)
    for rank, card in sorted(cards.items()):
        kinds[card["device"].split(":")[0]].append(rank)
    if len(kinds) > 1:
        said = "; ".join(f"{_ranks(ranks)}: {kind}" for kind, ranks in kinds.items())
        advice.append(
            Advice(
                what=f"some ranks have a GPU and others do not ({said})",
                remedy="give every rank one, or none",
                is_fault=True,
            )
        )
    for (host, device, _), ranks in _shared_devices(cards).items():
        advice.append(
            Advice(
                what=f"{_ranks(ranks)} have the same GPU, {device} of {host}, which NCCL refuses",
                remedy="start no more ranks on a host than it has GPUs, and let each take that of "
                "its LOCAL_RANK",
                is_fault=True,
            )
        )
    return advice


def _not_there(missing: list[int], cards: dict[int, Any], patience_s: float) -> Advice:
    hosts = sorted({card["host"] for card in cards.values()})
    return Advice(
        what=f"{_ranks(missing)} did not answer within {patience_s:g} s; the others are on "
        f"{', '.join(hosts)}",
        remedy="look at their output, and whether their hosts reach MASTER_ADDR at MASTER_PORT",
        is_fault=True,
    )


def _failures(results: dict[int, list[Trial]], places: dict[int, str]) -> list[Advice]:
    advice = []
    failed: dict[str, list[int]] = defaultdict(list)
    for rank, trials in results.items():
        for trial in trials:
            if trial.error:
                failed[f"{trial.operation} ({trial.backend}): {trial.error}"].append(rank)
    for what, ranks in failed.items():
        advice.append(
            Advice(
                what=f"the self-test failed on {_ranks(ranks)} in {what}",
                remedy="NCCL_DEBUG=INFO, or TORCH_CPP_LOG_LEVEL=INFO for gloo, says more; then "
                "look at the interfaces and at the variables above",
                is_fault=True,
            )
        )
    stuck: dict[str, list[int]] = defaultdict(list)
    for rank, place in places.items():
        stuck[place].append(rank)
    for place, ranks in stuck.items():
        advice.append(
            Advice(
                what=f"{_ranks(ranks)} did not come to the end of the self-test, and stood at "
                f"{place}",
                remedy="what they wait for does not arrive: look at firewalls, interfaces "
                "(GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), NCCL_DEBUG=INFO, and whether a rank "
                "above failed",
                is_fault=True,
            )
        )
    return advice


def _table(results: dict[int, list[Trial]]) -> Facts:
    """What worked on all ranks that came to an end, by backend."""
    operations: dict[str, list[str]] = defaultdict(list)
    speeds: dict[str, list[float]] = defaultdict(list)
    for trials in results.values():
        for trial in trials:
            if trial.gib_per_s:
                speeds[trial.backend].append(trial.gib_per_s)
    everyone = list(results.values())
    for trial in everyone[0] if everyone else ():
        same = [
            t
            for trials in everyone
            for t in trials
            if (t.backend, t.operation, t.error) == (trial.backend, trial.operation, "")
        ]
        if len(same) == len(everyone) and not trial.gib_per_s:
            operations[trial.backend].append(trial.operation)
    facts: Facts = {f"{backend}_right": ", ".join(names) for backend, names in operations.items()}
    for backend, found in speeds.items():
        facts[f"{backend}_all-gather"] = (
            f"{min(found):.2f} GiB/s received by the slowest rank, {max(found):.2f} by the fastest"
        )
    return facts


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
