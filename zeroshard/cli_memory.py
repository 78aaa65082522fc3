"""The commands about memory: parse, call, print."""

import argparse
import json
import re
from typing import Any

from .errors import ConfigError
from .memory.models import DTYPES, ModelShape, shape_of
from .memory.moments import CHECKPOINTING
from .memory.plan import Batch
from .memory.planning_table import (
    MOMENTS,
    SOLVED,
    Choices,
    Row,
    markdown,
    planning_table,
    shortage,
    table,
    to_json,
)
from .memory.schema import gib

__all__ = ["add_model_flags", "add_plan", "size"]

SHOWN = 16  # rows, unless all are asked for
UNITS = {
    "": 1,
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGTP", start=1)},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGTP", start=1)},
}


def size(text: str) -> int:
    """Bytes of "80GiB", "400GB/s" or "1e9".

    Raises:
        argparse.ArgumentTypeError: it is no size.
    """
    units = {unit.lower(): factor for unit, factor in UNITS.items()}
    found = re.fullmatch(r"\s*([0-9.]+(?:e\+?\d+)?)\s*([kmgtp]?i?b?)(?:/s)?\s*", text.lower())
    if found is None or found[2] not in units:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size: write 80GiB (1024^3) or 80GB (1000^3)"
        )
    try:
        return int(float(found[1]) * units[found[2]])
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write 80GiB") from None


def add_model_flags(command: argparse.ArgumentParser) -> None:
    """What plan and simulate are told: the model, the ranks, the batch, the choices."""
    command.add_argument(
        "--model",
        required=True,
        metavar="MODEL",
        help="a published model's name (llama-3-8b ...), a path to a config.json, or "
        "package.module:function that returns a module",
    )
    command.add_argument(
        "--gpus", type=int, default=1, metavar="N", help="ranks that share the states"
    )
    command.add_argument(
        "--gpu-memory", type=size, metavar="SIZE", help="of one GPU, 80GiB say; exit 1 above it"
    )
    command.add_argument("--seq", type=int, metavar="N", help="tokens of a sequence")
    command.add_argument(
        "--micro-batch", type=int, default=1, metavar="N", help="sequences of a backward on a rank"
    )
    command.add_argument(
        "--dtype", choices=DTYPES, help="of the parameters; bf16, and for a module its own"
    )
    command.add_argument(
        "--stage", dest="stages", type=int, choices=(1, 2, 3), action="append", help="only this one"
    )
    command.add_argument(
        "--master", dest="masters", choices=("auto", "split", "fp32", "none"), action="append"
    )
    command.add_argument("--moments", choices=MOMENTS, action="append")
    command.add_argument("--checkpointing", choices=CHECKPOINTING, action="append")
    command.add_argument(
        "--reduce", choices=("auto", "fp32", "wire16", "param"), default="auto",
        help="what gradients travel and are summed in",
    )  # fmt: skip
    command.add_argument(
        "--bucket-mb", type=float, default=25, metavar="MIB", help="size of a communication bucket"
    )
    command.add_argument("--json", action="store_true", help="print JSON, bytes everywhere")
    command.add_argument("--markdown", action="store_true", help="print Markdown")


def add_plan(commands: Any) -> None:
    """`zeroshard plan`."""
    command = commands.add_parser(
        "plan",
        help="what fits: memory by arithmetic, before anything is built",
        description="What each rank would hold, over stages, precisions and checkpointing, best "
        "first. Flags that are given several times narrow the table to these.",
        allow_abbrev=False,
    )
    add_model_flags(command)
    command.add_argument(
        "--bandwidth", type=size, metavar="SIZE/s", help="what a rank sends, 400GB/s say"
    )
    command.add_argument("--solve", choices=SOLVED, help="find the largest that fits")
    command.add_argument("--all", action="store_true", help=f"print more than {SHOWN} rows")
    command.set_defaults(run=_plan)


def _plan(chosen: argparse.Namespace) -> None:
    if chosen.json and chosen.markdown:
        raise ConfigError("--json and --markdown: choose one")
    shape = shape_of(chosen.model, dtype=chosen.dtype)
    seq = 1 if chosen.solve == "seq" else chosen.seq
    if chosen.solve is not None and (chosen.gpu_memory is None or seq is None):
        raise ConfigError(
            f"--solve {chosen.solve} needs --gpu-memory"
            + (" and --seq" if chosen.solve != "seq" else "")
        )
    batch = Batch(seq=1 if seq is None else seq, micro_batch=chosen.micro_batch)
    rows = planning_table(
        shape,
        Choices(
            world_size=chosen.gpus,
            gpu_memory=chosen.gpu_memory,
            batch=None if seq is None else batch,
            stages=chosen.stages,
            masters=chosen.masters,
            moments=chosen.moments,
            checkpointing=chosen.checkpointing,
            reduce=chosen.reduce,
            bucket_mb=chosen.bucket_mb,
            bandwidth=chosen.bandwidth,
            solve=chosen.solve,
        ),
    )
    shown = rows if chosen.all or chosen.json else rows[:SHOWN]
    if chosen.json:
        print(json.dumps(to_json(shown), indent=1))
    else:
        print(_text(shape, chosen, shown, len(rows)), end="")
    short = shortage(rows)
    if short is not None:
        raise ConfigError(short)


def _text(shape: ModelShape, chosen: argparse.Namespace, rows: list[Row], how_many: int) -> str:
    batch = f"{chosen.micro_batch} x {chosen.seq} tokens" if chosen.seq else "states only"
    if chosen.solve:
        batch = f"the largest {chosen.solve}"
    elif shape.architecture is None:
        batch = "states and gradients only, since the activations of this model are not known"
    limit = f" of {gib(chosen.gpu_memory)}" if chosen.gpu_memory else ""
    billions = f"{shape.numel / 1e9:.2f} billion parameters"
    lines = [f"{shape.name}: {billions}, {chosen.gpus} GPUs{limit}, {batch}"]
    lines += ["What one rank holds at the peak of a step, in GiB, best first", ""]
    lines += [markdown(rows) if chosen.markdown else table(rows)]
    if how_many > len(rows):
        lines += [f"{how_many - len(rows)} more: --all", ""]
    best = rows[0].report
    said = [f"The first one: {best.peak.in_words()}", *best.notes]
    lines += [f"- {line}" for line in said] if chosen.markdown else said
    return "\n".join(lines) + "\n"
