"""Facts, each found by a function that may fail or hang. Knows nothing of what they mean."""

import pathlib
import subprocess
import threading
from collections.abc import Callable, Mapping
from typing import Any

__all__ = [
    "Facts",
    "Probes",
    "Unknown",
    "collect",
    "find",
    "first_line",
    "output_of",
    "read",
    "within",
]

Facts = dict[str, Any]  # as JSON has them
Probes = Mapping[str, Callable[[], Any]]

PATIENCE_S = 4.0  # with one section of facts
COMMAND_S = 3.0  # with another program


class Unknown(str):
    """What stands in the place of a fact that could not be found."""

    __slots__ = ()

    def __new__(cls, why: object) -> "Unknown":
        if isinstance(why, BaseException):
            why = f"{type(why).__name__}: {first_line(why)}".removesuffix(": ")
        return super().__new__(cls, f"unknown: {why}")


def first_line(text: object) -> str:
    """The first line of something that says more, without control characters."""
    lines = str(text).strip().splitlines()
    return "".join(c for c in lines[0] if c.isprintable())[:300] if lines else ""


def collect(probes: Probes) -> Facts:
    """What each probe finds, `Unknown` where it fails; nothing where it finds None."""
    facts: Facts = {}
    for name, probe in probes.items():
        try:
            found = probe()
        except Exception as error:
            found = Unknown(error)
        if found is not None:
            facts[name] = found
    return facts


def within(function: Callable[[], Facts], patience_s: float = PATIENCE_S) -> Facts:
    """What a function finds, unless it fails, or takes so long that it may never end."""
    found: list[Facts] = []

    def run() -> None:
        try:
            found.append(function())
        except Exception as error:
            found.append({"all of it": Unknown(error)})

    thread = threading.Thread(target=run, daemon=True, name="zeroshard-doctor")
    thread.start()
    thread.join(patience_s)
    return found[0] if found else {"all of it": Unknown(f"no answer within {patience_s:.0f} s")}


def find(facts: Mapping[str, Facts], section: str, name: str, kind: type) -> Any:
    """A fact of that kind; None where it is missing, unknown, or something else."""
    value = facts.get(section, {}).get(name)
    is_right = isinstance(value, kind) and not isinstance(value, Unknown)
    return value if is_right and (kind is bool or not isinstance(value, bool)) else None


def output_of(*command: str) -> str | None:
    """What a program prints; None where it is not installed."""
    try:
        done = subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=COMMAND_S
        )
    except FileNotFoundError:
        return None
    return done.stdout


def read(path: pathlib.Path) -> str | None:
    """The content of a small file, if there is one."""
    try:
        return path.read_text(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
