"""One rank's training steps without a GPU, without the other ranks and without values."""

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

from torch import Tensor, nn

from ..errors import ConfigError
from ..imitation import imitated_gpu
from ..optimizer import AdamW
from ..transport.pretended import pretended_world
from ..triton_kernels.launch import dry_launches
from .cuda_choices import cuda_choices
from .ghosts import GhostError, Ghosts
from .profile import Recorder
from .schema import Report
from .tracker import Tracker
from .watching import watching

__all__ = ["NotSimulatedError", "loss_of", "simulate"]


class NotSimulatedError(ConfigError):
    """A model that cannot run without values."""


def simulate(
    model_fn: Callable[[], nn.Module],
    batch_fn: Callable[[], Any],
    *,
    world_size: int,
    stage: int = 2,
    rank: int = 0,
    device: str = "cuda",
    loss_fn: Callable[[nn.Module, Any], Tensor] | None = None,
    micro_batches: int = 1,
    steps: int = 2,
    configuration: Mapping[str, Any] | None = None,
    **options: Any,
) -> Report:
    """What one rank holds in the course of training steps, found by running them without values.

    The optimizer, its hooks and the model run as they do in training, in this process, which needs
    neither a GPU nor the memory: large tensors are never touched.

    Args:
        model_fn: builds the model, in its dtype, with activation checkpointing where it is wanted.
        batch_fn: gives a batch: a mapping or a tuple of arguments of the model, or one argument.
        world_size: data-parallel ranks.
        stage: 1, 2 or 3.
        rank: which one is looked at; they differ by padding at most.
        device: "cuda" for what would be held on a GPU (its attention, its kernels, NCCL's way of
            communicating), "cpu" for what `MemoryProfiler` would measure on this machine.
        loss_fn: gives the loss of the model for a batch; None: the model returns it, alone, first
            in a tuple, or as `loss`.
        micro_batches: forwards and backwards before a step; all but the last without
            synchronisation are the caller's wish no_sync() has no part in this.
        steps: how many; the first differs from those that follow, so at least 2.
        configuration: what the report says was asked for, beside the arguments given here.
        options: further arguments of `zeroshard.AdamW`.

    Raises:
        NotSimulatedError: the model decides by values, which are not there; it names the
            operation and the module.
        ConfigError: this process has a process group, or runs a simulation already, or the loss
            was not found.
    """
    if device not in ("cuda", "cpu"):
        raise ConfigError(f"device must be 'cuda' or 'cpu', got {device!r}")
    for name, value, least in (("steps", steps, 2), ("micro_batches", micro_batches, 1)):
        if not isinstance(value, int) or value < least:
            raise ConfigError(f"{name} must be at least {least}, got {value!r}")
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank must be in 0 .. {world_size - 1}, got {rank}")
    started = time.perf_counter()
    recorder = Recorder()
    tracker = Tracker(recorder.take)
    ghosts = Ghosts(lambda: not tracker.is_in_model, where=lambda: tracker.where, kernels_of=device)
    find_loss = loss_fn or loss_of
    with ExitStack() as stack:
        stack.enter_context(_alone())
        stack.enter_context(_without_collection())
        if device == "cuda":
            stack.enter_context(imitated_gpu())
            stack.enter_context(dry_launches())
            stack.enter_context(cuda_choices())
        stack.enter_context(pretended_world(rank, world_size))
        stack.enter_context(ghosts)
        stack.enter_context(tracker.running())
        try:
            model = model_fn()
            optimizer = AdamW(model, stage=stage, **options)
            stack.enter_context(watching(tracker, model, optimizer))
            tracker.mark("constructed")
            for _ in range(steps):
                for _ in range(micro_batches):
                    find_loss(model, batch_fn()).backward()
                optimizer.step()
                optimizer.zero_grad()
        except GhostError as error:
            raise NotSimulatedError(
                f"this model cannot be simulated: {error}. Compute what the model decides by "
                "outside of it, give such tensors in the batch (small ones have values), or use "
                "zeroshard.plan, which needs the model's shape only"
            ) from error
        optimizer.close()
    asked = {
        "world_size": world_size,
        "stage": stage,
        "device": device,
        "micro_batches": micro_batches,
        **_as_plain_values(options),
        **(configuration or {}),
    }
    return recorder.report("simulate", asked, seconds=time.perf_counter() - started)


def _as_plain_values(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of an optimizer for a report; those of a precision by themselves."""
    options = dict(options)
    precision = options.pop("precision", None)
    if precision is not None:
        options.update(asdict(precision))
    plain = (str, int, float, type(None))
    return {name: v if isinstance(v, plain) else str(v) for name, v in options.items()}


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    """Call a model with a batch and find the loss in what it returns.

    Raises:
        ConfigError: there is none.
    """
    if isinstance(batch, Mapping):
        output = model(**batch)
    elif isinstance(batch, (tuple, list)):
        output = model(*batch)
    else:
        output = model(batch)
    found = output
    if isinstance(output, Mapping):
        found = output.get("loss")
    elif hasattr(output, "loss"):
        found = output.loss
    elif isinstance(output, (tuple, list)) and output:
        found = output[0]
    if not isinstance(found, Tensor) or found.numel() != 1:
        raise ConfigError(
            f"the model returned no loss, but {type(output).__name__}: give loss_fn=lambda model, "
            "batch: ..., or labels in the batch of a model that computes its loss from them"
        )
    return found


_is_running = False


@contextmanager
def _alone() -> Iterator[None]:
    """One simulation at a time: what is replaced in torch holds for all threads."""
    global _is_running
    if _is_running:
        raise ConfigError(
            "a simulation is running in this process already, and there can be one at a time: run "
            "them one after the other, or each in a process of its own"
        )
    _is_running = True
    try:
        yield
    finally:
        _is_running = False


@contextmanager
def _without_collection() -> Iterator[None]:
    """Let cycles live on, so that every run sees the same."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
