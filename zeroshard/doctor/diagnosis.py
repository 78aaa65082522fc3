"""What was found, and how it is written down for people and for programs."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from .facts import Facts

__all__ = ["Advice", "Diagnosis"]

WIDTH = 24  # of the names, at least
FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What is wrong, or may become so, and what to do.

    Attributes:
        is_fault: training here will fail, or be wrong.
    """

    what: str
    remedy: str
    is_fault: bool = False

    def __str__(self) -> str:
        return f"{'FAULT' if self.is_fault else 'warning'}: {self.what}: {self.remedy}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What was found.

    Attributes:
        facts: by section and name, as JSON has them; sizes are in bytes.
        advice: faults first.
    """

    facts: dict[str, Facts]
    advice: list[Advice] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        """Whether there is no fault; there may be warnings."""
        return not any(advice.is_fault for advice in self.advice)

    def extended(self, section: str, facts: Facts, advice: Sequence[Advice]) -> "Diagnosis":
        """With one more section, before the others' advice and behind their facts."""
        ordered = sorted([*advice, *self.advice], key=lambda entry: not entry.is_fault)
        return Diagnosis(facts={**self.facts, section: facts}, advice=ordered)

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "format": FORMAT,
            "is_sound": self.is_sound,
            "advice": [asdict(advice) for advice in self.advice],
            "facts": self.facts,
        }

    def to_text(self) -> str:
        """For people: grouped and aligned, to be pasted into a report."""
        lines = []
        for section, facts in self.facts.items():
            lines += [section, *_lines(facts), ""]
        faults = sum(advice.is_fault for advice in self.advice)
        said = f"{_count(faults, 'fault')}, {_count(len(self.advice) - faults, 'warning')}"
        return "\n".join([*lines, said, *(f"  {advice}" for advice in self.advice)])


def _count(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"


def _lines(facts: Facts) -> Iterator[str]:
    if not facts:
        yield "  nothing"
    labels = {name: name.removesuffix("_nbytes") for name in facts}
    width = max([WIDTH, *map(len, labels.values())])
    for name, value in facts.items():
        label = labels[name] if name.isupper() else labels[name].replace("_", " ")
        shown = list(_shown(name, value)) or ["none"]
        yield f"  {label:<{width}}  {shown[0]}"
        for more in shown[1:]:
            yield f"  {'':<{width}}  {more}"


def _shown(name: str, value: Any) -> Iterator[str]:
    """The lines that a fact takes."""
    if isinstance(value, list):
        for entry in value:
            if isinstance(entry, dict):
                parts = (f"{k.removesuffix('_nbytes')} {_short(k, v)}" for k, v in entry.items())
                yield ", ".join(parts)
            else:
                yield _short(name, entry)
    elif isinstance(value, dict) and set(value) == {"soft", "hard"}:
        yield f"{_limit(value['soft'])} (at most {_limit(value['hard'])})"
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield f"{key}: {_short(key, entry)}"
    else:
        yield _short(name, value)


def _limit(value: int | None) -> str:
    return "unlimited" if value is None else str(value)


def _short(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and name.endswith("_nbytes"):
        return f"{value / 2**30:.2f} GiB"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)
