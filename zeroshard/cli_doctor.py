"""`zeroshard doctor`: what this machine and this installation can do."""

import argparse
import json
import sys
from typing import Any

from .doctor import Diagnosis, examine
from .doctor.ranks import Ranks, has_ranks
from .errors import ConfigError, ZeroShardError

__all__ = ["add_doctor"]

PATIENCE_S = 20.0


def add_doctor(commands: Any) -> None:
    """Add the command to those of a parser."""
    command = commands.add_parser(
        "doctor",
        help="say what this machine and installation can do",
        description="Say what this machine and this installation can do, and what is wrong with "
        "them. Under torchrun also: in what the ranks differ, and whether they reach each other.",
        allow_abbrev=False,
    )
    command.add_argument("--json", action="store_true", help="for programs")
    command.add_argument(
        "--timeout",
        type=float,
        default=PATIENCE_S,
        metavar="SECONDS",
        help="for a rank that does not answer (default: %(default)g)",
    )
    command.set_defaults(run=_doctor)


def _doctor(chosen: argparse.Namespace) -> None:
    if not 0 < chosen.timeout < float("inf"):
        raise ConfigError(f"--timeout must be above 0, got {chosen.timeout:g}")
    if not has_ranks():
        _report(examine(), chosen.json)
        return
    ranks = Ranks(chosen.timeout)
    try:
        outcome = ranks.confer()
        is_sound = True
        if ranks.rank == 0:
            found = examine().extended("ranks", outcome.facts, outcome.advice)
            is_sound = found.is_sound
            _print(found, chosen.json)
        is_sound = ranks.agree_to_end(is_sound)
    except ZeroShardError as error:
        print(f"zeroshard doctor: {error}", file=sys.stderr)
        is_sound = False
    ranks.end(not is_sound)
    if not is_sound:
        sys.exit(1)


def _report(found: Diagnosis, as_json: bool) -> None:
    _print(found, as_json)
    if not found.is_sound:
        sys.exit(1)


def _print(found: Diagnosis, as_json: bool) -> None:
    print(json.dumps(found.to_json(), indent=2) if as_json else found.to_text(), flush=True)
