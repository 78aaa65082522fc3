"""The commands that run something: `zeroshard simulate` and `zeroshard profile`."""

import argparse
import json
import os
import re
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from .cli_memory import add_model_flags, size
from .config import Precision
from .errors import CommunicationError, ConfigError
from .memory.building import workload_of
from .memory.expected import load_reports, matching, unmet
from .memory.launched import is_launched, of_all_launched
from .memory.plan import Batch, plan
from .memory.report import markdown, table, write_html
from .memory.schema import Report
from .memory.scripts import Profiled, run_script
from .memory.simulate import NotSimulatedError, simulate
from .memory.words import in_full

__all__ = ["add_profile", "add_simulate"]

PATIENCE_S = 30.0


def share(text: str) -> float:
    """0.02 of "2%" or "0.02".

    Raises:
        argparse.ArgumentTypeError: it is no share.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(%?)\s*", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no share: write 2% or 0.02")
    return float(found[1]) / (100 if found[2] else 1)


def _add_checks(command: argparse.ArgumentParser) -> None:
    command.add_argument("--html", type=Path, metavar="FILE", help="write a page with pictures")
    command.add_argument(
        "--against",
        type=Path,
        metavar="FILE",
        help="what plan, simulate or profile wrote as JSON; exit 1 if the peak is made of "
        "something else",
    )
    command.add_argument(
        "--tolerance",
        type=share,
        default=0.02,
        metavar="SHARE",
        help="of the expected peak, by which a category may differ (default: 2%%)",
    )


def add_simulate(commands: Any) -> None:
    """`zeroshard simulate`."""
    command = commands.add_parser(
        "simulate",
        help="memory of a training step, without a GPU and without the other ranks",
        description="Runs the training steps of one rank on tensors without values, and says what "
        "it would hold. Flags that are given several times ask for several simulations.",
        allow_abbrev=False,
    )
    add_model_flags(command)
    _add_checks(command)
    command.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="as whose memory (default: cuda; cpu is what profile measures without a GPU)",
    )
    command.add_argument(
        "--micro-batches", type=int, default=1, metavar="N", help="backwards before a step"
    )
    command.set_defaults(run=_simulate)


def _simulate(chosen: argparse.Namespace) -> None:
    if chosen.json and chosen.markdown:
        raise ConfigError("--json and --markdown: choose one")
    expected = [] if chosen.against is None else load_reports(chosen.against)
    stages, masters = chosen.stages or [2], chosen.masters or ["auto"]
    moments, checkpointing = chosen.moments or ["fp32"], chosen.checkpointing or ["none"]
    reports = [
        _simulated(chosen, *choice) for choice in product(stages, masters, moments, checkpointing)
    ]
    if chosen.json:
        values = [report.to_json() for report in reports]
        print(json.dumps(values if len(values) > 1 else values[0], indent=1))
    elif chosen.markdown:
        print(markdown(reports), end="")
    else:
        print(_text(reports))
    _conclude(reports, chosen, expected, chosen.gpu_memory)


def _simulated(
    chosen: argparse.Namespace, stage: int, master: Any, moments: Any, checkpointing: str
) -> Report:
    if chosen.seq is not None:
        Batch(seq=chosen.seq, micro_batch=chosen.micro_batch)  # raises where it is impossible
    workload = workload_of(
        chosen.model,
        seq=chosen.seq,
        micro_batch=chosen.micro_batch,
        dtype=chosen.dtype,
        checkpointing=checkpointing,
    )
    batch = {} if chosen.seq is None else {"seq": chosen.seq, "micro_batch": chosen.micro_batch}
    precision = Precision(master=master, moments=moments, reduce=chosen.reduce)
    try:
        return simulate(
            workload.model,
            workload.batch,
            world_size=chosen.gpus,
            stage=stage,
            device=chosen.device,
            micro_batches=chosen.micro_batches,
            bucket_mb=chosen.bucket_mb,
            precision=precision,
            configuration={
                "model": workload.name,
                "master": master,
                "moments": moments,
                **batch,
                "checkpointing": checkpointing,
            },
        )
    except NotSimulatedError as error:
        planned = plan(
            chosen.model,
            world_size=chosen.gpus,
            stage=stage,
            precision=precision,
            checkpointing=checkpointing,
            dtype=chosen.dtype,
            bucket_mb=chosen.bucket_mb,
            transport="nccl" if chosen.device == "cuda" else "gloo",
            **batch,
        )
        print(f"zeroshard simulate: {error}. This is the plan.", file=sys.stderr)
        return replace(planned, notes=(*planned.notes, f"Planned, not simulated: {error}"))


def add_profile(commands: Any) -> None:
    """`zeroshard profile`."""
    command = commands.add_parser(
        "profile",
        help="measure the memory of a training script",
        description="Runs a training script, unchanged, and measures what it holds in its first "
        "steps. Under torchrun (-m zeroshard profile SCRIPT) every rank is measured and the first "
        "one writes. The report goes to stderr, the exit status is the script's.",
        usage="zeroshard profile [OPTION ...] [-m] SCRIPT [ARGUMENT ...]",
        allow_abbrev=False,
    )
    command.add_argument(
        "--steps", type=int, default=4, metavar="N", help="to follow (default: %(default)s)"
    )
    command.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
    command.add_argument(
        "--gpu-memory", type=size, metavar="SIZE", help="80GiB say; exit 1 if the peak is above"
    )
    _add_checks(command)
    command.add_argument(
        "--snapshot", metavar="FILE", help="torch's own record of a GPU's allocator, of each rank"
    )
    command.add_argument(
        "--timeout",
        type=float,
        default=PATIENCE_S,
        metavar="SECONDS",
        help="for a rank that does not report at the end (default: %(default)g)",
    )
    command.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is a module")
    command.add_argument("script", metavar="SCRIPT", help="that makes a zeroshard.AdamW")
    command.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="of the script"
    )
    command.set_defaults(run=_profile)


def _profile(chosen: argparse.Namespace) -> None:
    if chosen.steps < 1:
        raise ConfigError(f"--steps must be at least 1, got {chosen.steps}")
    expected = [] if chosen.against is None else load_reports(chosen.against)
    if not chosen.is_module and not Path(chosen.script).exists():
        raise ConfigError(f"there is no script {chosen.script}; -m takes the name of a module")
    profiled = Profiled(chosen.steps, chosen.snapshot)
    with profiled.watching():
        code = run_script(chosen.script, chosen.arguments, is_module=chosen.is_module)
    reports: list[Report] | None = profiled.reports
    if is_launched():
        try:
            reports = of_all_launched(profiled.reports, chosen.timeout)
        except CommunicationError as error:
            print(f"zeroshard profile: only this rank is known: {error}", file=sys.stderr)
            if os.environ.get("RANK", "0") != "0":
                chosen.json = chosen.html = None  # every rank would write the same file
    try:
        if reports is not None:
            _write(reports, profiled, chosen, expected)
    except (ConfigError, OSError) as error:
        if code == 0:
            raise
        print(f"zeroshard profile: {error}", file=sys.stderr)
    if code != 0:
        sys.exit(code)


def _write(
    reports: list[Report], profiled: Profiled, chosen: argparse.Namespace, expected: list[Report]
) -> None:
    for remark in profiled.remarks:
        print(remark, file=sys.stderr)
    if not reports:
        raise ConfigError(
            f"{chosen.script} made no step with a zeroshard.AdamW that it built in this process: "
            "there is nothing to report"
        )
    print(_text(reports), file=sys.stderr)
    if chosen.json is not None:
        values = [report.to_json() for report in reports]
        text = json.dumps(values if len(values) > 1 else values[0], indent=1)
        chosen.json.write_text(text + "\n")
    _conclude(reports, chosen, expected, chosen.gpu_memory)


def _text(reports: list[Report]) -> str:
    return in_full(reports[0]) if len(reports) == 1 else table(reports)


def _conclude(
    reports: list[Report], chosen: argparse.Namespace, expected: list[Report], limit: int | None
) -> None:
    """Write the page, and raise if a report does not keep to what was asked for."""
    if chosen.html is not None:
        write_html(reports, chosen.html, limit_nbytes=limit)
    problems = []
    for report in reports:
        other = None
        if expected:
            other = matching(expected, report.configuration, str(chosen.against))
        problems += unmet(report, limit=limit, expected=other, tolerance=chosen.tolerance)
    if problems:
        raise ConfigError("; ".join(problems))
