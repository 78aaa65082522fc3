"""Measures what a user's own training loop holds, on real tensors."""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError
from .classify import StepSummary, summarise, timeline_of
from .schema import Report, gib
from .tracker import Step, Tracker
from .watching import watching

__all__ = ["MemoryProfiler", "Recorder"]


class Recorder:
    """Takes the steps that a tracker saw and keeps what a report needs.

    Attributes:
        summaries: of every step.
    """

    def __init__(self) -> None:
        self.summaries: list[StepSummary] = []
        self._highest: Step | None = None
        self._constructed: Mapping[str, int] = {}

    def take(self, step: Step) -> None:
        """A step is over."""
        summary = summarise(step)
        if step.number == 1:
            self._constructed = summary.points.get("constructed", {})
        self.summaries.append(summary)
        present = self.highest
        if present is summary:
            self._highest = step

    @property
    def highest(self) -> StepSummary | None:
        """The step with the highest peak, the first one only where there is no other."""
        later = self.summaries[1:] or self.summaries
        return max(later, key=lambda summary: summary.peak.total, default=None)

    def report(
        self, source: str, configuration: Mapping[str, Any], *, seconds: float | None = None
    ) -> Report:
        """What was seen.

        Raises:
            ConfigError: no step was seen.
        """
        highest = self.highest
        if highest is None or self._highest is None:
            raise ConfigError(
                "no optimizer step was seen: run at least two, the first of which allocates more "
                "than those that follow"
            )
        return Report(
            source=source,
            configuration=configuration,
            peak=highest.peak,
            points={
                **({"constructed": self._constructed} if self._constructed else {}),
                **highest.points,
            },
            maxima=highest.maxima,
            timeline=timeline_of(self._highest),
            notes=() if len(self.summaries) > 1 else ("Only one step was seen: it is the first.",),
            seconds=seconds,
        )


class MemoryProfiler:
    """Follows what the training in its context holds, by category and over time.

        with zeroshard.MemoryProfiler(model, optimizer) as profiler:
            for batch in batches:  # three or four are enough
                model(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        print(profiler.report().peak.in_words())

    A step goes from the end of one `optimizer.step()` to the end of the next. Bytes are those of
    tensors, which is what an allocator is asked for; exact for all that PyTorch returns from its
    operations, without what these use inside of themselves.

    Args:
        model: what is trained.
        optimizer: zeroshard's, or any other of torch's.
        configuration: what the report says was measured, as plain values.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        configuration: Mapping[str, Any] | None = None,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.configuration = dict(configuration or {})
        self._recorder = Recorder()
        self._tracker = Tracker(self._recorder.take)
        self._context = ExitStack()
        self._seconds = 0.0

    def __enter__(self) -> "MemoryProfiler":
        self._seconds = -time.perf_counter()
        with ExitStack() as stack:
            stack.enter_context(self._tracker.running())
            stack.enter_context(watching(self._tracker, self.model, self.optimizer))
            self._tracker.mark("constructed")
            self._context = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._context.close()
        self._seconds += time.perf_counter()

    @property
    def summaries(self) -> Sequence[StepSummary]:
        """Of every step so far."""
        return self._recorder.summaries

    def report(self) -> Report:
        """What this rank held; communicates nothing.

        Raises:
            ConfigError: no optimizer step was made in the context.
        """
        return self._recorder.report("profile", self.configuration, seconds=self._seconds)

    def growing(self) -> list[str]:
        """Categories that hold more before every forward than before the one before, in words.

        The first step is left out; three further ones are needed.
        """
        rests = [summary.points.get("after_zero_grad", {}) for summary in self.summaries[1:]]
        if len(rests) < 3:
            return []
        found = []
        for name in dict.fromkeys(name for rest in rests for name in rest):
            held = [rest.get(name, 0) for rest in rests]
            if all(before < after for before, after in pairwise(held)):
                found.append(f"{name}: {gib(held[0])} to {gib(held[-1])} in {len(held)} steps")
        return found
