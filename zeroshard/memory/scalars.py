"""A report as numbers that training dashboards plot: TensorBoard and Weights & Biases."""

import importlib
import os
from typing import Any

from ..errors import ConfigError
from .schema import CATEGORIES, Report

__all__ = ["log_wandb", "scalars", "write_tensorboard"]


def scalars(report: Report) -> dict[str, float]:
    """Numbers in GiB by name: the peak, what it is made of, the named points and the ranks.

    Categories that are empty count 0, so that a curve does not break off.
    """
    held = {**dict.fromkeys(CATEGORIES, 0), **report.peak.categories}
    named = {
        "peak": report.peak.total,
        **held,
        **{point: sum(categories.values()) for point, categories in report.points.items()},
    }
    if report.ranks:
        named["peak_of_largest_rank"] = max(report.ranks)
        named["peak_of_smallest_rank"] = min(report.ranks)
    return {f"memory/{name}_gib": nbytes / 2**30 for name, nbytes in named.items()}


def write_tensorboard(report: Report, to: Any, step: int | None = None) -> None:
    """Write `scalars` for TensorBoard.

    Args:
        report: any.
        to: a directory for its files, or a writer with `add_scalar`, which stays open.
        step: of the training; None: that of the peak, or 0.

    Raises:
        ConfigError: a directory is given and the package is missing.
    """
    at = (report.peak.step or 0) if step is None else step
    if hasattr(to, "add_scalar"):
        _add(report, to, at)
        return
    if not isinstance(to, str | os.PathLike):
        raise ConfigError(
            f"expected a directory or a writer that has add_scalar, got {type(to).__name__}: pass "
            "torch.utils.tensorboard.SummaryWriter(directory), or the directory"
        )
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError("writing for TensorBoard needs it: pip install tensorboard") from error
    writer: Any = SummaryWriter(os.fspath(to))
    try:
        _add(report, writer, at)
    finally:
        writer.close()


def _add(report: Report, writer: Any, step: int) -> None:
    for name, value in scalars(report).items():
        writer.add_scalar(name, value, step)


def log_wandb(report: Report, run: Any = None, step: int | None = None) -> None:
    """Log `scalars` to Weights & Biases.

    Args:
        report: any.
        run: what `wandb.init` gave, or anything with `log`; None: the run under way.
        step: of the training; None: the run's own count.

    Raises:
        ConfigError: there is no run, or the package is missing.
    """
    if run is None:
        try:
            wandb = importlib.import_module("wandb")
        except ImportError as error:
            raise ConfigError(
                "logging to Weights & Biases needs its package: pip install wandb"
            ) from error
        run = wandb.run
    if not hasattr(run, "log"):
        raise ConfigError(
            f"expected a run that has log, got {'none' if run is None else type(run).__name__}: "
            "call wandb.init() first, or pass what it returned"
        )
    run.log(scalars(report), step=step)
