"""What one rank holds over stages, precisions, checkpointing and sequence lengths, in one table.

    python examples/memory_experiment.py --model llama-3-8b --gpus 8 --seq 2048 --seq 4096

Every configuration runs in a process of its own and leaves a file, so that one that fails is
recorded and ends nothing, and the same command goes on where it was stopped. Where this machine has
as many GPUs as are asked for, the steps are measured on them, else simulated without any.
"""

import argparse
import json
import multiprocessing
import multiprocessing.connection
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist

import zeroshard
from zeroshard.memory.building import Workload, workload_of
from zeroshard.memory.comparison import cell, labels, unit_of
from zeroshard.memory.profile import MemoryProfiler
from zeroshard.memory.report import write_html
from zeroshard.memory.schema import Report
from zeroshard.memory.simulate import loss_of, simulate

# A server that has imported what takes long, and forks: a start then takes no time, and there is
# neither a thread nor a GPU in it that a fork could break.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["transformers", "zeroshard.memory.simulate"])

# What is shown of the categories, so that a row fits on a line: the page has all of them.
COLUMNS = {
    "parameters": ("parameters", "unsharded_parameters"),
    "gradients": ("gradients",),
    "optimizer": ("master", "moments"),
    "communication": ("communication",),
    "activations": ("activations",),
    "logits": ("logits_and_loss",),
}

PRECISIONS = ("fp32", "bf16", "int8")  # of the moments; masters are split


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    model: str
    gpus: int
    stage: int
    moments: str
    checkpointing: str  # "none" or "block"
    seq: int  # tokens of a sequence
    micro_batch: int  # sequences of a backward
    device: str  # "cuda", or "cpu" for what a CPU would hold
    source: str  # "simulate" or "measure"

    @property
    def name(self) -> str:
        """What tells it from the others, as a file's name."""
        model = "".join(c if c.isalnum() or c in ".-" else "_" for c in self.model)
        return (
            f"{model}-w{self.gpus}-stage{self.stage}-{self.moments}-{self.checkpointing}"
            f"-{self.micro_batch}x{self.seq}-{self.device}-{self.source}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Of a configuration: a report, or why there is none."""

    configuration: Configuration
    report: dict | None
    error: str | None


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Sweep over what decides about memory.")
    add = parser.add_argument
    add("--model", default="gpt2", help="as for zeroshard simulate (default gpt2)")
    add("--gpus", type=int, default=8, help="ranks that share the states (default 8)")
    add("--stage", type=int, choices=(1, 2, 3), action="append", help="default: 2 and 3")
    add("--moments", choices=PRECISIONS, action="append", help="default: fp32 and int8")
    add("--checkpointing", choices=("none", "block"), action="append", help="default: both")
    add("--seq", type=int, action="append", metavar="TOKENS", help="default: 512")
    add("--micro-batch", type=int, default=1, help="sequences of a backward")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="whose memory (default cuda)")
    add("--source", choices=("simulate", "measure"), help="default: measure if there are the GPUs")
    add("--out", type=Path, default=Path("runs/memory"), metavar="DIR")
    add("--timeout", type=float, default=900.0, metavar="SECONDS", help="of one configuration")
    add("--again", action="store_true", help="also what failed before")
    options = parser.parse_args(arguments)
    for name in ("gpus", "micro_batch", "timeout"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0")
    if min(options.seq or [1]) < 1:
        parser.error("--seq must be at least 1")
    if options.source is None:  # asks the driver, and starts nothing on a GPU
        has_gpus = options.device == "cuda" and torch.cuda.device_count() >= options.gpus
        options.source = "measure" if has_gpus else "simulate"
    return options


def configurations(options: argparse.Namespace) -> list[Configuration]:
    """The sweep, what costs most time last."""
    found = [
        Configuration(
            model=options.model,
            gpus=options.gpus,
            stage=stage,
            moments=moments,
            checkpointing=checkpointing,
            seq=seq,
            micro_batch=options.micro_batch,
            device=options.device,
            source=options.source,
        )
        for seq, checkpointing, moments, stage in product(
            sorted(set(options.seq or [512])),
            options.checkpointing or ["none", "block"],
            options.moments or ["fp32", "int8"],
            options.stage or [2, 3],
        )
    ]
    return list(dict.fromkeys(found))


def read(path: Path) -> dict | None:
    """What a configuration left; None if that is missing or torn."""
    try:
        values = json.loads(path.read_text())
        return values if {"report", "error"} <= values.keys() else None
    except (OSError, ValueError, AttributeError):
        return None


def write(path: Path, values: dict) -> None:
    """Whole or not at all."""
    beside = path.with_suffix(f".{os.getpid()}.tmp")
    beside.write_text(json.dumps(values) + "\n")
    beside.replace(path)


def outcome_of(
    configuration: Configuration, folder: Path, timeout: float, *, again: bool
) -> Outcome:
    """Run a configuration in a process of its own, unless its file says that it is done."""
    path = folder / f"{configuration.name}.json"
    values = read(path)
    if values is None or (again and values["error"]):
        values = run_apart(configuration, path, timeout)
        write(path, values)
    return Outcome(configuration=configuration, report=values["report"], error=values["error"])


def run_apart(configuration: Configuration, path: Path, timeout: float) -> dict:
    """Its result, from as many processes as it needs; at the first that fails all are ended."""
    result = path.with_suffix(".part")
    result.unlink(missing_ok=True)
    ranks = configuration.gpus if configuration.source == "measure" else 1
    port = free_port()
    processes = [
        PROCESSES.Process(target=run_here, args=(configuration, result, rank, port))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + timeout
    try:
        while any(process.is_alive() for process in processes):
            left = deadline - time.monotonic()
            if left <= 0:
                return failed(f"took longer than {timeout:g} s")
            alive = [process.sentinel for process in processes if process.is_alive()]
            multiprocessing.connection.wait(alive, min(left, 1.0))
            if any(process.exitcode for process in processes):
                break
        values = read(result)
        codes = [process.exitcode for process in processes if process.exitcode]
        return values or failed(f"a process ended with status {codes[0] if codes else 0}")
    finally:
        for process in processes:
            process.kill()
            process.join()
        result.unlink(missing_ok=True)


def failed(why: str) -> dict:
    return {"report": None, "error": why}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_here(configuration: Configuration, result: Path, rank: int, port: int) -> None:
    """In a process of a configuration."""
    try:
        if configuration.source == "measure":
            report = measured(configuration, rank, port)
        else:
            report = simulated(configuration)
    except Exception as error:
        write(result, failed(f"{type(error).__name__}: {' '.join(str(error).split())}"))
        sys.exit(1)
    if rank == 0:
        write(result, {"report": report.to_json(), "error": None})


def workload(configuration: Configuration) -> Workload:
    return workload_of(
        configuration.model,
        seq=configuration.seq,
        micro_batch=configuration.micro_batch,
        checkpointing=configuration.checkpointing,
    )


def described(configuration: Configuration) -> dict:
    values = asdict(configuration)
    del values["source"]  # which a report says itself
    return {"world_size": values.pop("gpus"), **values}


def simulated(configuration: Configuration) -> Report:
    work = workload(configuration)
    return simulate(
        work.model,
        work.batch,
        world_size=configuration.gpus,
        stage=configuration.stage,
        device=configuration.device,
        precision=zeroshard.Precision(moments=configuration.moments),
        configuration=described(configuration),
    )


def measured(configuration: Configuration, rank: int, port: int, steps: int = 3) -> Report:
    """As one of the ranks of a world of real ones; the report is that of all."""
    on_gpu = configuration.device == "cuda"
    if on_gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=configuration.gpus,
    )
    work = workload(configuration)
    with torch.device("meta"):  # no rank ever holds the whole model
        model = work.model()
    optimizer = zeroshard.AdamW(
        model,
        stage=configuration.stage,
        precision=zeroshard.Precision(moments=configuration.moments),
    )
    zeroshard.init_weights(model)
    about = described(configuration)
    with MemoryProfiler(model, optimizer, configuration=about) as profiler:
        for _ in range(steps):
            with torch.device(configuration.device):
                batch = work.batch()
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    report = profiler.gather_report()
    dist.destroy_process_group()
    return report


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A function to call with what is done: a bar in a terminal with rich, else lines."""
    try:
        from rich.progress import Progress
    except ImportError:
        Progress = None
    if Progress is None or not sys.stderr.isatty():
        began, done = time.monotonic(), iter(range(1, total + 1))

        def line(said: str) -> None:
            seconds = time.monotonic() - began
            print(f"[{next(done)}/{total}, {seconds:.0f} s] {said}", file=sys.stderr, flush=True)

        yield line
        return
    from rich.console import Console

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("configurations", total=total)

        def advance(said: str) -> None:
            bar.console.print(said, markup=False, highlight=False)
            bar.advance(task)

        yield advance


def table_rows(reports: Sequence[Report]) -> list[list[str]]:
    """A row for each, the header first."""
    unit, size = unit_of(max(report.peak.total for report in reports))
    rows = [[f"at the peak, {unit}", "peak", *COLUMNS, "other"]]
    for label, report in zip(labels(reports), reports, strict=True):
        held = report.peak.categories
        shown = [sum(held.get(name, 0) for name in names) for names in COLUMNS.values()]
        values = [report.peak.total, *shown, report.peak.total - sum(shown)]
        rows.append([label, *(cell(nbytes, size) for nbytes in values)])
    return rows


def print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for label, *values in rows:
        cells = (value.rjust(width) for value, width in zip(values, widths[1:], strict=True))
        print("  ".join([label.ljust(widths[0]), *cells]))


def conclude(outcomes: Sequence[Outcome], folder: Path) -> None:
    """The table, the page, and what failed."""
    reports = [Report.from_json(o.report) for o in outcomes if o.report is not None]
    if reports:
        reports.sort(key=lambda report: report.peak.total)
        print_table(table_rows(reports))
        write_html(reports, folder / "report.html", title="A sweep over what decides about memory")
        print(f"wrote {folder / 'report.html'}")
    for outcome in outcomes:
        if outcome.error is not None:
            print(f"failed: {outcome.configuration.name}: {outcome.error}")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    todo = configurations(options)
    outcomes = []
    try:
        with progress(len(todo)) as told:
            for configuration in todo:
                outcome = outcome_of(
                    configuration, options.out, options.timeout, again=options.again
                )
                outcomes.append(outcome)
                told(f"{configuration.name}: {outcome.error or 'done'}")
    except KeyboardInterrupt:
        print(f"stopped: the same command goes on after {len(outcomes)} of {len(todo)}")
    conclude(outcomes, options.out)
    return 0 if len(outcomes) == len(todo) and all(o.report for o in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
