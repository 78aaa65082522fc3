"""What memory is made of, and one report for what is planned, simulated and measured. No tensors.

A storage is in exactly one category, whole, padding included, so that categories add up to totals.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ..errors import ConfigError

__all__ = [
    "CATEGORIES",
    "DEVICE_CATEGORIES",
    "PHASES",
    "POINTS",
    "Peak",
    "Report",
    "Sample",
    "compare",
    "differences",
    "gib",
]

CATEGORIES: Mapping[str, str] = {
    "parameters": "those that stay: flat buffers or shards, frozen ones included",
    "unsharded_parameters": "of units that stage 3 holds whole for their use",
    "buffers": "of modules",
    "inputs": "what the batch is made of",
    "gradients": "autograd's until they are moved, shards, full buffers that stay",
    "master": "fp32 weights, or the halves of them that parameters do not hold",
    "moments": "AdamW's, with their scales",
    "communication": "buckets, wire casts and staging of collectives",
    "activations": "what a forward or a recomputation made and left for backward",
    "logits_and_loss": "what was made behind the last block, until backward comes back to it",
    "temporary": "what lives shortly within a forward, a backward or a step",
    "bookkeeping": "counters, tables, flags and placeholders",
}
"""Name of each category -> what it holds, in the order in which they are shown."""

DEVICE_CATEGORIES: Mapping[str, str] = {
    "allocator_overhead": "reserved by torch's allocator and in no tensor",
    "outside_torch": "used on the device and not by torch: the driver, libraries, other processes",
}
"""Further ones, which only a measurement on a GPU has."""

PHASES = ("construction", "data", "forward", "backward", "reduce", "step", "gather")

POINTS = ("constructed", "after_forward", "after_backward", "after_step", "after_zero_grad")
"""Moments at which nothing is under way."""

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What was held from one moment of a step to the next.

    Attributes:
        at: how many allocations and releases into the step.
        phase: one of PHASES.
        where: the innermost module under way, "" for none.
        categories: bytes of each category that is not empty.
    """

    at: int
    phase: str
    where: str
    categories: Mapping[str, int]

    @property
    def total(self) -> int:
        """Bytes of all categories."""
        return sum(self.categories.values())


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The highest total of a step.

    Attributes:
        of: what is counted: "requested" (bytes of storages), "allocated" or "reserved".
        step: which step, from 1; None for a plan, which has none.
        phase: one of PHASES.
        where: the innermost module under way, "" for none.
        categories: bytes of each category that is not empty.
    """

    of: str
    step: int | None
    phase: str
    where: str
    categories: Mapping[str, int]

    @property
    def total(self) -> int:
        """Bytes of all categories."""
        return sum(self.categories.values())

    def in_words(self) -> str:
        """One line: how much, where, and what it is made of."""
        where = f" of {self.where}" if self.where else ""
        step = f", step {self.step}" if self.step is not None else ""
        parts = sorted(self.categories.items(), key=lambda item: -item[1])
        total = max(self.total, 1)
        shares = ", ".join(
            f"{name.replace('_', ' ')} {100 * nbytes / total:.0f} %"
            for name, nbytes in parts
            if nbytes >= total / 100
        )
        return f"peak {gib(self.total)} {self.of} in {self.phase}{where}{step}: {shares}"


@dataclass(frozen=True, kw_only=True)
class Report:
    """What one rank holds: planned, simulated or measured.

    Attributes:
        source: "plan", "simulate" or "profile".
        configuration: what was asked for (model, stage, world_size, seq ...), as plain values.
        peak: the highest total, of step 2 or later where steps were run.
        points: at each of POINTS that is known, bytes by category.
        maxima: the most that each category held, not all at the same time.
        timeline: of the step of the peak, where steps were run; the peak's sample is among them.
        ranks: the peak's total of every rank, where more than one was measured.
        notes: what a reader must know, in sentences.
        seconds: how long it took to find out.
    """

    source: str
    configuration: Mapping[str, Any]
    peak: Peak
    points: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    maxima: Mapping[str, int] = field(default_factory=dict)
    timeline: Sequence[Sample] = ()
    ranks: Sequence[int] = ()
    notes: Sequence[str] = ()
    seconds: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values; bytes everywhere."""
        values = asdict(self)
        values["peak"]["total"] = self.peak.total
        return {"format": "zeroshard memory", "version": VERSION, **values}

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "Report":
        """What `to_json` gave.

        Raises:
            ConfigError: something else.
        """
        try:
            if values["format"] != "zeroshard memory" or values["version"] != VERSION:
                raise ConfigError(
                    f"expected a zeroshard memory report of version {VERSION}, got "
                    f"{values['format']!r} of version {values['version']!r}"
                )
            known = {f.name: values[f.name] for f in fields(Report) if f.name in values}
            peak = {f.name: values["peak"][f.name] for f in fields(Peak)}
            samples = [Sample(**sample) for sample in values.get("timeline", ())]
            return Report(**{**known, "peak": Peak(**peak), "timeline": samples})
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"this is not a zeroshard memory report: {error!r}") from error

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n")

    @staticmethod
    def load(path: Path) -> "Report":
        """Read what `save` wrote.

        Raises:
            ConfigError: the file is no report; says which file.
        """
        try:
            return Report.from_json(json.loads(path.read_text()))
        except (ConfigError, ValueError) as error:
            raise ConfigError(f"{path}: {error}") from error


def gib(nbytes: float) -> str:
    """Bytes for people: "71.3 GiB"; small ones in MiB or KiB."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(nbytes) >= 0.1 * size:
            return (
                f"{nbytes / size:.2f} {unit}"
                if nbytes < 10 * size
                else f"{nbytes / size:.1f} {unit}"
            )
    return f"{nbytes:.0f} B"


def compare(first: Mapping[str, int], second: Mapping[str, int]) -> Iterable[tuple[str, int, int]]:
    """(category, bytes of the first, bytes of the second), in the order of CATEGORIES."""
    known = [*CATEGORIES, *DEVICE_CATEGORIES]
    names = {**dict.fromkeys(known), **dict.fromkeys(first), **dict.fromkeys(second)}
    for name in names:
        if name in first or name in second:
            yield name, first.get(name, 0), second.get(name, 0)


def differences(
    measured: Mapping[str, int], expected: Mapping[str, int], tolerance: float
) -> list[str]:
    """The categories that differ by more than a share of the expected total, in words."""
    allowed = tolerance * sum(expected.values())
    return [
        f"{name}: {gib(got)} instead of {gib(wanted)}"
        for name, got, wanted in compare(measured, expected)
        if abs(got - wanted) > allowed
    ]
