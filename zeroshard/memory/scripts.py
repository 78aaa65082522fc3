"""Runs somebody's training script, unchanged, and profiles the optimizers that it makes."""

import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn

from ..engine import engines_of
from ..errors import ConfigError
from ..optimizer import AdamW
from ..wrappers import live_modules
from .profile import MemoryProfiler
from .schema import Report

__all__ = ["Profiled", "model_of", "run_script"]


class Profiled:
    """The optimizers of a script, one after the other: a run of several trainings has several.

    Args:
        steps: how many are followed of each.
        snapshot: as for `MemoryProfiler`; of the first.

    Attributes:
        reports: of those that made a step, in the order in which they were made.
        remarks: on those that were not followed, and why.
    """

    def __init__(self, steps: int, snapshot: str | None = None) -> None:
        self.reports: list[Report] = []
        self.remarks: list[str] = []
        self._steps, self._snapshot = steps, snapshot
        self._current: MemoryProfiler | None = None

    def constructed(self, optimizer: AdamW) -> None:
        """The script made an optimizer: follow it, unless it shares the training of another."""
        current = self._current
        if current is not None and not current.summaries:
            self.remarks.append(
                "One more optimizer was made before the one that is followed had made a step; it "
                "was not followed."
            )
            return
        self.finish()
        try:
            profiler = MemoryProfiler(
                model_of(optimizer),
                optimizer,
                steps=self._steps,
                snapshot=None if self.reports else self._snapshot,
            )
        except ConfigError as error:  # the script would not meet it without us
            self.remarks.append(f"An optimizer was not followed: {error}.")
            return
        self._current = profiler.__enter__()

    def finish(self) -> None:
        """Nothing more is to come from the one that is followed."""
        current, self._current = self._current, None
        if current is None:
            return
        current.__exit__()
        if current.summaries:
            self.reports.append(current.report())

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow what is made in the context."""
        with _constructions(self.constructed):
            try:
                yield
            finally:
                self.finish()


@contextmanager
def _constructions(tell: Callable[[AdamW], None]) -> Iterator[None]:
    """Call `tell` with every optimizer of ours that is made."""
    original = AdamW.__init__

    @wraps(original)
    def construct(self: AdamW, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        tell(self)

    AdamW.__init__ = construct  # type: ignore[method-assign]
    try:
        yield
    finally:
        AdamW.__init__ = original  # type: ignore[method-assign]


def model_of(optimizer: AdamW) -> nn.Module:
    """The module that an optimizer trains: the one it was given, else found among all that live.

    Raises:
        ConfigError: no module holds all of its parameters.
    """
    parameters = {p for group in optimizer.param_groups for p in group["params"]}
    for engine in engines_of(parameters):
        model = engine.model()
        if model is not None:
            return model
    fitting = [
        module
        for module in live_modules()
        if not isinstance(module, torch.jit.ScriptModule) and parameters <= set(_held_by(module))
    ]
    if not fitting:
        raise ConfigError(
            "no module holds all of the parameters of this optimizer, so that it is not known what "
            "to profile: pass model= to zeroshard.AdamW"
        )
    # One that holds others beside it, such as two networks, is not what is trained. Of those that
    # hold the same, the outermost is called.
    numbers = {module: len(set(_held_by(module))) for module in fitting}
    fewest = min(numbers.values())
    return max(
        (module for module in fitting if numbers[module] == fewest),
        key=lambda module: sum(1 for _ in module.modules()),
    )


def _held_by(module: nn.Module) -> Iterator[nn.Parameter]:
    try:
        yield from module.parameters()
    except Exception:
        return  # under construction, or not what it says it is


def run_script(name: str, arguments: Sequence[str], *, is_module: bool) -> int:
    """Run a script as `python name arguments` or `python -m name arguments` would, in this process.

    Returns:
        What it exits with.
    """
    before = sys.argv[:], sys.path[:]
    sys.argv = [name, *arguments]
    try:
        if is_module:
            sys.path[0] = os.getcwd()
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(name))
            runpy.run_path(name, run_name="__main__")
    except SystemExit as end:
        return _code_of(end)
    except BaseException as error:
        _print(error)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    finally:
        sys.argv, sys.path[:] = before
    return 0


def _print(error: BaseException) -> None:
    """As Python does at the end of a script: from the script's own line on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals["__name__"] in (__name__, "runpy"):
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)


def _code_of(end: SystemExit) -> int:
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code
    print(end.code, file=sys.stderr)
    return 1
