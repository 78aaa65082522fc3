"""Measures what a user's own training loop holds, on real tensors."""

import uuid
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ..agreement import in_agreement
from ..engine import engines_of
from ..errors import ConfigError
from ..transport import Op, Transport, connect
from .allocator import AllocatorPeak, DeviceMemory, Snapshot
from .classify import StepSummary, summarise, timeline_of
from .ranks import of_all_ranks
from .schema import Report, gib
from .stored import Step
from .timing import Timing
from .tracker import Tracker
from .watching import watching_modules, watching_steps
from .words import in_full

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

        with zeroshard.MemoryProfiler(model, optimizer, steps=3) as profiler:
            for batch in batches:
                model(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        print(profiler)

    A step goes from the end of one `optimizer.step()` to the end of the next. Bytes are those of
    tensors, which is what an allocator is asked for; exact for all that PyTorch returns from its
    operations, without what these use inside of themselves. On a GPU, whose tensors alone count
    there, torch's allocator is asked as well, and its peak statistics begin anew at every step.

    Following takes time, which is reported. Outside of the context nothing is left behind, and no
    reference to the model or the optimizer. Entered again, it starts from the beginning.

    Args:
        model: what is trained; a wrapper such as DistributedDataParallel where one is called.
        optimizer: zeroshard's, or any other of torch's. One that is made anew for the same
            parameters, inside of the context, takes its place.
        steps: how many are followed; those after them run free in the context, and show what
            following costs. None: all.
        snapshot: a file for torch's own record of the allocator of a GPU.
        configuration: what the report says was measured, beside what is known of the optimizer.

    Raises:
        ConfigError: the optimizer trains nothing of the model, or a snapshot is asked for without
            a GPU.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        steps: int | None = None,
        snapshot: str | Path | None = None,
        configuration: Mapping[str, Any] | None = None,
    ) -> None:
        optimizer = _unwrapped(optimizer)
        _check(model, optimizer, steps)
        self._model, self._optimizer = weakref.ref(model), weakref.ref(optimizer)
        self._most_steps = steps
        self._device = _device_of(optimizer)
        if snapshot is not None and self._device.type != "cuda":
            raise ConfigError(
                "a snapshot records the allocator of a GPU, but the parameters are on "
                f"{self._device}: leave snapshot= out, report() has the same for tensors"
            )
        self._snapshot = None if snapshot is None else Snapshot(snapshot)
        self.configuration = {**_described(model, optimizer), **(configuration or {})}
        self._recorder, self._timing = Recorder(), Timing()
        self._tracker = Tracker(self._take, self._device.type)
        self._allocator: DeviceMemory | None = None
        self._allocator_peaks: list[AllocatorPeak] = []
        self._hooks, self._following = ExitStack(), ExitStack()
        self._is_compiled = any(map(_is_compiled, model.modules()))

    def __enter__(self) -> "MemoryProfiler":
        model, optimizer = self._model(), self._optimizer()
        if model is None or optimizer is None:
            raise ConfigError(
                "the model or the optimizer of this profiler is gone: make a new "
                "MemoryProfiler(model, optimizer)"
            )
        with ExitStack() as following, ExitStack() as hooks:
            tracker = Tracker(self._take, self._device.type)
            following.enter_context(tracker.running())
            self._tracker = tracker  # not before: the one that is running may be our own
            self._recorder, self._timing = Recorder(), Timing()
            self._allocator_peaks = []
            hooks.enter_context(watching_steps(tracker, model, optimizer, self._step_is_over))
            following.enter_context(watching_modules(tracker, model))
            if self._device.type == "cuda":
                self._allocator = DeviceMemory(self._device)
            if self._snapshot is not None:
                self._snapshot.begin()
                following.callback(self._snapshot.end)
            tracker.mark("constructed")
            self._following, self._hooks = following.pop_all(), hooks.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        with self._hooks, self._following:
            self._timing.end()

    def _take(self, step: Step) -> None:
        if self._allocator is not None:
            self._allocator_peaks.append(self._allocator.take())
        self._recorder.take(step)

    def _step_is_over(self) -> None:
        self._timing.step_is_over(was_followed=self._tracker.is_running)
        enough = self._most_steps is not None and len(self.summaries) >= self._most_steps
        # A mode that somebody put on top of ours is theirs to take off first.
        if enough and self._tracker.is_running and _get_current_dispatch_mode() is self._tracker:
            self._following.close()

    @property
    def is_following(self) -> bool:
        """Whether steps are being followed: in the context, until there were enough."""
        return self._tracker.is_running

    @property
    def summaries(self) -> Sequence[StepSummary]:
        """Of every step so far."""
        return self._recorder.summaries

    def report(self) -> Report:
        """What this rank held; communicates nothing.

        Raises:
            ConfigError: no optimizer step was made in the context.
        """
        found = self._recorder.report("profile", self.configuration, seconds=self._timing.total)
        notes = [*found.notes, *self._timing.in_words()]
        notes += [f"Grows from step to step: {growth}." for growth in self.growing()]
        if self._is_compiled:
            notes.append(
                "A compiled module was followed as it runs without being compiled; torch goes on "
                "to run it so until torch.compiler.reset()."
            )
        maxima = dict(found.maxima)
        highest = self._recorder.highest
        if self._allocator_peaks and highest is not None:
            allocator = self._allocator_peaks[highest.number - 1]
            maxima.update(allocator.categories())
            notes.insert(0, allocator.in_words(found.peak.total))
        return replace(found, notes=notes, maxima=maxima)

    def gather_report(self) -> Report:
        """The report of the rank with the highest peak, with maxima and imbalance over all ranks.

        Every rank must call it, after the steps; each gets the same.

        Raises:
            ConfigError: a rank made no step; on all ranks.
        """
        transport = self._transport()
        op = Op("memory report")
        with in_agreement(transport, op.phase):
            own = self.report()
        name = uuid.uuid4().hex
        peaks = transport.all_gather_object((own.peak.total, name), op=op)
        _, highest = max(peaks, key=lambda peak: peak[0])
        shown = own if name == highest else replace(own, timeline=())  # which is long
        return of_all_ranks(transport.all_gather_object(shown, op=op))

    def _transport(self) -> Transport:
        model = self._model()
        engines = [] if model is None else engines_of(model.parameters())
        return engines[0].transport if engines else connect(None, self._device)

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

    def __str__(self) -> str:
        if not self.summaries:
            return "MemoryProfiler: no step was seen yet"
        return in_full(self.report())


def _unwrapped(optimizer: Any) -> Any:
    """What is inside of a wrapper, such as Accelerate's."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _trained_by(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))


def _check(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int | None) -> None:
    if not isinstance(model, nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            "MemoryProfiler takes a torch.nn.Module and a torch.optim.Optimizer, got "
            f"{type(model).__name__} and {type(optimizer).__name__}"
        )
    if steps is not None and (not isinstance(steps, int) or steps < 1):
        raise ConfigError(f"steps must be a whole number of at least 1 or None, got {steps!r}")
    if not set(map(id, model.parameters())) & set(map(id, _trained_by(optimizer))):
        raise ConfigError(
            "the optimizer trains no parameter of the model: pass the model that it was built for"
        )


def _is_compiled(module: nn.Module) -> bool:
    has_compiled_call = getattr(module, "_compiled_call_impl", None) is not None
    return has_compiled_call or type(module).__name__ == "OptimizedModule"


def _device_of(optimizer: torch.optim.Optimizer) -> torch.device:
    devices = (parameter.device for parameter in _trained_by(optimizer))
    return next((device for device in devices if device.type != "meta"), torch.device("cpu"))


def _described(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a report says was measured."""
    kind = type(optimizer)
    described: dict[str, Any] = {
        "model": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "optimizer": f"{kind.__module__.partition('.')[0]}.{kind.__name__}",
    }
    for engine in engines_of(_trained_by(optimizer))[:1]:
        described["world_size"] = engine.transport.num_ranks
        chosen = asdict(engine.options)
        described.update({name: chosen[name] for name in ("stage", "bucket_mb")})
        described.update({name: chosen["precision"][name] for name in ("master", "moments")})
    return described
