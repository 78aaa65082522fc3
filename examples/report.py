"""What a run shows: progress, the table of stages, JSON and a chart. Nothing here trains."""

import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from options import Options

# Those of optimizer.memory() that add up to what a rank holds: its optimizer_state is a sum of two.
CATEGORIES = ("parameters", "gradients", "master", "moments", "communication")
MIB = 2**20


@dataclass(slots=True, kw_only=True)
class Run:
    """What one stage did, on the first rank."""

    stage: int
    world_size: int
    device: str
    steps: int  # planned
    numel: int  # parameters of the model
    validation_before: float  # nats per token, mean over ranks
    nbytes: dict[str, int]  # per rank, after a step, by CATEGORIES
    validation_after: float | None = None  # None: interrupted
    losses: list[float] = field(default_factory=list)  # of each step, mean over ranks
    step_ms: list[float] = field(default_factory=list)

    @property
    def label(self) -> str:
        if self.stage > 0:
            return f"stage {self.stage}"
        return "stage 0, DDP" if self.world_size > 1 else "stage 0, AdamW"

    @property
    def is_finished(self) -> bool:
        return self.validation_after is not None

    @property
    def median_step_ms(self) -> float:
        if not self.step_ms:  # there was nothing left to do
            return float("nan")
        # The first steps build DDP's buckets, the moments and the allocator's pools.
        return statistics.median(self.step_ms[min(3, len(self.step_ms) // 2) :])

    @property
    def total_nbytes(self) -> int:
        return sum(self.nbytes.values())

    def record(self, loss: float, elapsed: float, memory: dict[str, int]) -> None:
        self.losses.append(loss)
        self.step_ms.append(1000 * elapsed)
        self.nbytes = by_category(memory)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: the same on all ranks, and of use to any number of them."""
        return {"losses": self.losses, "validation_before": self.validation_before}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = list(state["losses"])
        self.validation_before = state["validation_before"]

    def status(self, tokens: int) -> str:
        """The last step in a line; `tokens` is what it trained on, over all ranks."""
        tokens_per_s = 1000 * tokens / self.step_ms[-1]
        held = self.total_nbytes / MIB
        return f"loss {self.losses[-1]:.4f}  {tokens_per_s:>6,.0f} tokens/s  {held:.1f} MiB"

    def difference_from(self, other: "Run") -> float:
        """The largest one of any loss, validation included."""
        ours, others = (
            [*self.losses, self.validation_after],
            [*other.losses, other.validation_after],
        )
        return max(abs(a - b) for a, b in zip(ours, others, strict=True))


def by_category(memory: dict[str, int]) -> dict[str, int]:
    return {name: memory[name] for name in CATEGORIES}


@contextmanager
def progress(run: Run, tokens: int, *, shown: bool) -> Iterator[Callable[[], None]]:
    """A function to call after each step: a bar in a terminal with rich, else a line at times."""
    if not shown:
        yield lambda: None
        return
    print(
        f"{run.label}: {run.numel / 1e6:.2f} M parameters, {tokens} tokens a step, "
        f"validation loss {run.validation_before:.3f}"
        + (f", goes on after step {len(run.losses)}" if run.losses else ""),
        flush=True,
    )
    bar = rich_bar() if sys.stdout.isatty() else None
    if bar is None:
        yield lambda: print_at_times(run, tokens)
        return
    with bar:
        task = bar.add_task(run.label, total=run.steps, status="")
        yield lambda: bar.update(task, completed=len(run.losses), status=run.status(tokens))


def print_at_times(run: Run, tokens: int, *, lines: int = 10) -> None:
    step = len(run.losses)
    if step in (1, run.steps) or step % max(1, run.steps // lines) == 0:
        print(f"  step {step:>{len(str(run.steps))}}/{run.steps}  {run.status(tokens)}", flush=True)


def rich_bar():
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    except ImportError:
        return None
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=12),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
    )


def conclude(runs: list[Run], options: Options) -> None:
    """Print what was reached; write it where --out says."""
    last = runs[-1]
    if not last.is_finished:
        print(
            f"stopped by Ctrl-C in {last.label}, after step {len(last.losses)} of {last.steps}: "
            f"loss {last.losses[-1]:.4f}"
        )
    finished = [run for run in runs if run.is_finished]
    if finished:
        print_table(table_rows(finished))
        if options.out is not None:
            write(options.out, finished, options)


def table_rows(runs: list[Run]) -> list[list[str]]:
    """A row per quantity and a column per stage, the header first."""
    first, others = runs[0], runs[1:]
    rows = [
        [
            f"{first.world_size} rank{'s' * (first.world_size > 1)} on {first.device}",
            *(r.label for r in runs),
        ],
        ["validation loss before", *(f"{r.validation_before:.7f}" for r in runs)],
        ["validation loss after", *(f"{r.validation_after:.7f}" for r in runs)],
    ]
    if others:
        equal = ("yes" if r.losses == first.losses else "no" for r in others)
        rows.append([f"every step's loss equals stage {first.stage}'s", "", *equal])
        rows.append(
            ["largest difference", "", *(f"{r.difference_from(first):.1e}" for r in others)]
        )
    rows.append(["median step, ms", *(f"{r.median_step_ms:.1f}" for r in runs)])
    for name in CATEGORIES:
        rows.append([f"{name}, MiB a rank", *(f"{r.nbytes[name] / MIB:.2f}" for r in runs)])
    rows.append(["total, MiB a rank", *(f"{r.total_nbytes / MIB:.2f}" for r in runs)])
    return rows


def print_table(rows: list[list[str]]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for label, *values in rows:
            cells = (f"{value:>{width}}" for value, width in zip(values, widths[1:], strict=True))
            print(f"{label:<{widths[0]}}", *cells, sep="  ")
        return
    header, *body = rows
    table = Table(*header)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in body:
        table.add_row(*row)
    Console().print(table)


def write(out: Path, runs: list[Run], options: Options) -> None:
    """results.json and, with matplotlib, results.png."""
    out.mkdir(parents=True, exist_ok=True)
    stages = [
        {
            **asdict(run),
            "median_step_ms": run.median_step_ms if run.step_ms else None,
            "losses_equal_first": run.losses == runs[0].losses,
            "largest_difference_from_first": run.difference_from(runs[0]),
        }
        for run in runs
    ]
    content = {"options": asdict(options), "stages": stages}
    (out / "results.json").write_text(json.dumps(content, indent=1, default=str) + "\n")
    print(f"wrote {out / 'results.json'}")
    if draw(out / "results.png", runs):
        print(f"wrote {out / 'results.png'}")
    else:
        print("no chart: it needs matplotlib (pip install matplotlib)")


def draw(path: Path, runs: list[Run]) -> bool:
    """Bytes by category for each stage, beside the losses. False: there is no matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    memory, losses = figure.subplots(1, 2)
    labels = [f"{run.label}\n{run.median_step_ms:.0f} ms a step" for run in runs]
    top = [0.0] * len(runs)
    for name in CATEGORIES:
        mib = [run.nbytes[name] / MIB for run in runs]
        if any(mib):
            memory.bar(labels, mib, 0.6, bottom=top, label=name)
        top = [a + b for a, b in zip(top, mib, strict=True)]
    for x, (run, height) in enumerate(zip(runs, top, strict=True)):
        memory.annotate(f"{height:.1f}", (x, height), ha="center", va="bottom")
        # The curves coincide: thinner and thinner, or the last one would hide the others.
        losses.plot(run.losses, label=run.label, linewidth=5 / (1 + 2 * x))
    memory.set(ylabel="MiB a rank", ylim=(0, 1.3 * max(top)))
    memory.legend(ncols=2)
    losses.set(xlabel="step", ylabel="training loss, nats per token")
    losses.legend()
    figure.savefig(path, dpi=120)
    return True
