"""Which configurations fit, best first: plans over stages, precisions and checkpointing.

Best is, in this order: what fits; what changes the result of training least (a master that is
exact, then moments of more bits); what costs least time (no recomputation, then fewer bytes on the
wire); what leaves more room. Of what does not fit, that which is short by least comes first.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from ..config import STAGES, Options, Precision
from ..errors import ConfigError
from .models import ModelShape
from .moments import CHECKPOINTING
from .plan import Batch, report_of
from .schema import CATEGORIES, Report, gib
from .states import Planned, States

__all__ = ["Choices", "Row", "markdown", "planning_table", "shortage", "table", "to_json"]

MASTERS: Mapping[str, tuple[str, ...]] = {
    "bfloat16": ("split", "fp32", "none"),
    "float16": ("fp32", "none"),
    "float32": ("auto",),
}
MOMENTS = ("fp32", "bf16", "int8")
SOLVED = ("seq", "micro-batch")
LITTLE = 0.002  # of the largest category: not worth a column
MOST = 2**31  # tokens of a sequence, or sequences, up to which a solution is looked for


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What the table is over, and where the model is to run.

    Attributes:
        world_size: ranks that share the states.
        gpu_memory: bytes of one device; None: nothing is said about what fits.
        batch: of one backward.
        stages, masters, moments, checkpointing: what to try; None: everything that is possible.
        reduce: as in `Precision`.
        bucket_mb: as in `zeroshard.AdamW`.
        bandwidth: bytes that a rank sends in a second; None: no times.
        solve: "seq" or "micro-batch": the largest that fits, instead of the batch's.
    """

    world_size: int
    gpu_memory: int | None
    batch: Batch | None
    stages: Sequence[int] | None = None
    masters: Sequence[str] | None = None
    moments: Sequence[str] | None = None
    checkpointing: Sequence[str] | None = None
    reduce: Any = "auto"
    bucket_mb: float = 25
    bandwidth: float | None = None
    solve: str | None = None

    def __post_init__(self) -> None:
        for name in ("gpu_memory", "bandwidth"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name} must be above 0, got {value!r}")
        if self.solve is None:
            return
        if self.solve not in SOLVED:
            raise ConfigError(f"solve must be one of {', '.join(SOLVED)}; got {self.solve!r}")
        if self.gpu_memory is None or self.batch is None:
            raise ConfigError(
                f"to solve for the largest {self.solve}, the memory of a GPU and a sequence length "
                "are needed: --gpu-memory 80GiB --seq 1"
            )


@dataclass(frozen=True, kw_only=True)
class Row:
    """One configuration.

    Attributes:
        report: what it holds.
        limit: bytes of one device, or None.
        wire_nbytes: what a rank sends in a step.
        seconds: how long that takes alone, where the bandwidth is known.
        solved: the largest sequence or micro-batch that fits; 0 if none does; None: not asked.
    """

    report: Report
    limit: int | None
    wire_nbytes: int
    seconds: float | None
    solved: int | None = None

    @property
    def headroom(self) -> int:
        """Bytes that are left; negative: short."""
        return (self.limit or 0) - self.report.peak.total

    @property
    def fits(self) -> bool:
        """Whether the peak is at most the device's memory."""
        return self.limit is None or (self.headroom >= 0 and self.solved != 0)

    @property
    def order(self) -> tuple[Any, ...]:
        """What rows are sorted by."""
        chosen = self.report.configuration
        losses = (chosen["master"] == "none", MOMENTS.index(chosen["moments"]))
        recomputes = chosen.get("checkpointing", "none") != "none"
        if not self.fits:
            return (True, -self.headroom)
        return (False, -(self.solved or 0), *losses, recomputes, self.wire_nbytes, -self.headroom)


def planning_table(shape: ModelShape, choices: Choices) -> list[Row]:
    """Every configuration, best first.

    Raises:
        ConfigError: impossible numbers.
    """
    rows = []
    for stage, master, moments in _precisions(shape, choices):
        options = Options(
            stage=stage,
            bucket_mb=choices.bucket_mb,
            precision=Precision(master=master, moments=moments, reduce=choices.reduce),
        )
        planned = Planned(
            shape=shape,
            options=options,
            world_size=choices.world_size,
            process_group=choices.world_size > 1,
        )
        states = States(planned)
        for checkpointing in choices.checkpointing or CHECKPOINTING:
            if choices.batch is None and checkpointing != "none":
                continue
            batch = choices.batch
            if batch is not None:
                batch = replace(batch, checkpointing=checkpointing)
            rows.append(_row(states, batch, choices))
    return sorted(rows, key=lambda row: row.order)


def _precisions(shape: ModelShape, choices: Choices) -> Iterable[tuple[int, Any, Any]]:
    dtypes = {spec.dtype for spec in shape.trained}
    common = [set(MASTERS[dtype]) for dtype in dtypes if dtype != "float32"]
    known = [m for m in MASTERS["bfloat16"] if all(m in masters for masters in common)]
    possible = known if common else ["auto"]
    masters = possible if choices.masters is None else list(choices.masters)
    # One rank without a process group shards nothing, so that all stages are the same.
    stages = choices.stages or (STAGES if choices.world_size > 1 else (STAGES[1],))
    return product(stages, masters, choices.moments or MOMENTS)


def _row(states: States, batch: Batch | None, choices: Choices) -> Row:
    began = time.monotonic()
    solved = None
    if choices.solve is not None and batch is not None and choices.gpu_memory is not None:
        solved, batch = _largest(states, batch, choices.solve, choices.gpu_memory)
    sent = states.wire_nbytes
    return Row(
        report=report_of(states, batch, began=began),
        limit=choices.gpu_memory,
        wire_nbytes=sent,
        seconds=None if choices.bandwidth is None else sent / choices.bandwidth,
        solved=solved,
    )


def _largest(states: States, batch: Batch, what: str, limit: int) -> tuple[int, Batch]:
    """The largest sequence or micro-batch that fits, 0 if none does, and the batch it makes."""
    sizes_seq = what == "seq"
    architecture = states.planned.shape.architecture
    most = MOST
    if sizes_seq and architecture is not None and architecture.positions:
        most = architecture.positions

    def sized(value: int) -> Batch:
        return replace(batch, seq=value) if sizes_seq else replace(batch, micro_batch=value)

    def fits(value: int) -> bool:
        return report_of(states, sized(value)).peak.total <= limit

    if architecture is None:
        raise ConfigError(
            f"without known activations there is no largest {what}: simulate the model"
        )
    if not fits(1):
        return 0, sized(1)
    low, high = 1, 2  # fits; may not
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low, sized(low)


# --- for people and for programs


def shortage(rows: Sequence[Row]) -> str | None:
    """What is short by how much, if nothing fits."""
    if not rows or any(row.fits for row in rows):
        return None
    best = rows[0]
    chosen = best.report.configuration
    largest = sorted(best.report.peak.categories.items(), key=lambda item: -item[1])[:3]
    parts = ", ".join(f"{name.replace('_', ' ')} {gib(nbytes)}" for name, nbytes in largest)
    assert best.limit is not None
    return (
        f"nothing fits in {gib(best.limit)}: the closest (stage {chosen['stage']}, master "
        f"{chosen['master']}, moments {chosen['moments']}, checkpointing "
        f"{chosen.get('checkpointing', 'none')}) is short by {gib(-best.headroom)}; its peak of "
        f"{gib(best.report.peak.total)} is {parts}. More GPUs, a shorter sequence or a smaller "
        "micro-batch need less"
    )


def _cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """The header, and a line of text for each row; sizes in GiB."""
    # What is little in every row is one column.
    most = {
        n: max((r.report.peak.categories.get(n, 0) for r in rows), default=0) for n in CATEGORIES
    }
    shown = [name for name, nbytes in most.items() if nbytes >= LITTLE * max(most.values())]
    header = ["stage", "master", "moments", "checkpointing"]
    solve = next((r.solved for r in rows if r.solved is not None), None)
    header += ["largest"] if solve is not None else []
    header += ["peak"]
    header += ["headroom"] if rows and rows[0].limit is not None else []
    header += [name.replace("_", " ") for name in shown] + ["other", "wire"]
    header += ["seconds"] if rows and rows[0].seconds is not None else []
    lines = []
    for row in rows:
        chosen, held = row.report.configuration, row.report.peak.categories
        line = [str(chosen["stage"]), chosen["master"], chosen["moments"]]
        line += [chosen.get("checkpointing", "none")]
        line += [str(row.solved)] if solve is not None else []
        line += [_size(row.report.peak.total)]
        line += [_size(row.headroom)] if row.limit is not None else []
        line += [_size(held.get(name, 0)) for name in shown]
        line += [_size(sum(n for name, n in held.items() if name not in shown))]
        line += [_size(row.wire_nbytes)]
        line += [f"{row.seconds:.3g}"] if row.seconds is not None else []
        lines.append(line)
    return header, lines


def _size(nbytes: int) -> str:
    value = nbytes / 2**30
    return "-" if not nbytes else f"{value:.1f}" if abs(value) >= 0.05 else f"{value:.3f}"


def table(rows: Sequence[Row]) -> str:
    """Plain text; sizes in GiB."""
    header, lines = _cells(rows)
    words = [name.split() for name in header]
    height = max(len(parts) for parts in words)
    heads = [[*[""] * (height - len(parts)), *parts] for parts in words]
    above = [[parts[number] for parts in heads] for number in range(height)]
    every = [*above, *lines]
    widths = [max(len(line[column]) for line in every) for column in range(len(header))]
    texts = [
        "  ".join(
            cell.ljust(width) if column < 4 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in every
    ]
    return "\n".join(texts) + "\n"


def markdown(rows: Sequence[Row]) -> str:
    """A table in Markdown; sizes in GiB."""
    header, lines = _cells(rows)
    marks = ["---"] * 4 + ["---:"] * (len(header) - 4)
    return "".join(f"| {' | '.join(line)} |\n" for line in (header, marks, *lines))


def to_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Plain values, bytes everywhere, in the order of the table."""
    return [
        {
            **row.report.to_json(),
            "limit_nbytes": row.limit,
            "fits": row.fits,
            "headroom_nbytes": row.headroom if row.limit is not None else None,
            "wire_nbytes": row.wire_nbytes,
            "wire_seconds": row.seconds,
            "solved": row.solved,
        }
        for row in rows
    ]
