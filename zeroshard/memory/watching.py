"""What a tracker is told of a model and its optimizer: which modules to watch, what is what."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .. import accounts
from ..engine import engines_of
from ..units import ROOT, plan_units
from .tracker import Tracker

__all__ = ["blocks_of", "watching"]

Scan = Callable[[], Iterable[tuple[Tensor, str]]]


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that repeat, by name: units that are neither an embedding nor a head."""
    units = plan_units(model, None).modules
    return {
        name: module
        for name, module in units.items()
        if name != ROOT and not isinstance(module, (nn.Embedding, nn.Linear))
    }


@contextmanager
def watching(
    tracker: Tracker, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[None]:
    """Let a tracker know a model and its optimizer for as long as the context lasts."""
    blocks = blocks_of(model)
    names: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        inside = [block for block in blocks if name.startswith(f"{block}.")]
        if name and not any("." in name[len(block) + 1 :] for block in inside):
            names[module] = name
    tracker.also_scan(_of_optimizer(optimizer))
    tracker.also_scan(_of_model(model))  # where a parameter is a placeholder, the engine said so
    tracker.identify()
    before = optimizer.register_step_pre_hook(lambda *_: tracker.begin_step())
    after = optimizer.register_step_post_hook(lambda *_: tracker.end_step())
    try:
        with tracker.following(model, names, set(blocks.values())):
            yield
    finally:
        before.remove()
        after.remove()


def _held_by(thing: object, seen: set[int]) -> Iterator[Tensor]:
    """The tensors that an object of ours holds, in whatever it is made of."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        if type(thing) is Tensor:
            yield thing
        return
    if isinstance(thing, Mapping):
        parts = list(thing.values())
    elif isinstance(thing, (list, tuple, set)):
        parts = list(thing)
    elif type(thing).__module__.startswith(("zeroshard.", "torch.distributed.device_mesh")):
        names = [name for kind in type(thing).__mro__ for name in vars(kind).get("__slots__", ())]
        parts = [*vars(thing).values()] if hasattr(thing, "__dict__") else []
        parts += [getattr(thing, name, None) for name in names]
    else:
        return
    for part in parts:
        yield from _held_by(part, seen)


def _of_model(model: nn.Module) -> Scan:
    def scan() -> Iterator[tuple[Tensor, str]]:
        for parameter in model.parameters():
            if parameter.grad is not None:
                yield parameter.grad, "gradients"
            yield parameter.data, "parameters"
        for buffer in model.buffers():
            yield buffer, "buffers"

    return scan


def _of_optimizer(optimizer: torch.optim.Optimizer) -> Scan:
    def scan() -> Iterator[tuple[Tensor, str]]:
        engines = engines_of(p for group in optimizer.param_groups for p in group["params"])
        for engine in engines:
            yield from accounts.tensors_of(engine)
            for tensor in _held_by(engine, set()):
                yield tensor, "bookkeeping"
        if not engines:  # any other optimizer
            for state in optimizer.state.values():
                for name, value in state.items():
                    if isinstance(value, Tensor):
                        yield value, "bookkeeping" if name == "step" else "moments"

    return scan
