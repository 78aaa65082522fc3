"""What a tracker is told of a model and its optimizer: which modules to watch, what is what."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .. import accounts
from ..engine import engines_of
from ..shard_tensor import Slices
from ..units import ROOT, plan_units
from .tracker import Tracker

__all__ = ["blocks_of", "watching", "watching_modules", "watching_steps"]

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
    with watching_steps(tracker, model, optimizer), watching_modules(tracker, model):
        yield


@contextmanager
def watching_modules(tracker: Tracker, model: nn.Module) -> Iterator[None]:
    """Let a tracker know which modules of a model are running."""
    blocks = blocks_of(model)
    names: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        inside = [block for block in blocks if name.startswith(f"{block}.")]
        if name and not any("." in name[len(block) + 1 :] for block in inside):
            names[module] = name
    with tracker.following(model, names, set(blocks.values())):
        yield


@contextmanager
def watching_steps(
    tracker: Tracker,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    then: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Let a tracker know what an optimizer and its model hold, and when it steps.

    Args:
        tracker: that is running; when it does not any more, it is told nothing.
        model: what is trained.
        optimizer: by what.
        then: called at the end of every step.
    """
    steps = _Steps(tracker, model, optimizer, then)
    del optimizer  # one that is made anew may replace it
    tracker.also_scan(steps.scan)
    tracker.also_scan(_of_model(model))  # where a parameter is a placeholder, the engine said so
    tracker.identify()
    before = register_optimizer_step_pre_hook(steps.before)
    after = register_optimizer_step_post_hook(steps.after)
    try:
        yield
    finally:
        before.remove()
        after.remove()


_WITHOUT_TENSORS = {f"zeroshard.{name}" for name in ("config", "formats", "layout", "schedule")}


def _held_by(thing: object) -> Iterator[Tensor]:
    """The tensors that an object of ours holds, in whatever it is made of."""
    parts_by: dict[type, _Parts | None] = {}
    seen: set[int] = set()
    waiting = [thing]
    while waiting:
        one = waiting.pop()
        kind = type(one)
        if kind not in parts_by:
            parts_by[kind] = _parts_by(kind)
        parts = parts_by[kind]
        if parts is None or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            yield one
        else:
            waiting += parts(one)


_Parts = Callable[[Any], Iterable[object]]


def _parts_by(kind: type) -> _Parts | None:
    """What gives the parts of objects of a type; None where these are nothing to us."""
    if kind is Tensor:
        return lambda _: ()
    if issubclass(kind, Tensor):
        return None
    if issubclass(kind, Mapping):
        return lambda thing: thing.values()
    if issubclass(kind, (list, tuple, set)):
        return iter
    if kind is Slices or kind.__module__ in _WITHOUT_TENSORS:
        return None  # they grow with the number of ranks
    if not kind.__module__.startswith(("zeroshard.", "torch.distributed.device_mesh")):
        return None
    names = [name for base in kind.__mro__ for name in vars(base).get("__slots__", ())]

    def attributes(thing: object) -> list[object]:
        found = [*vars(thing).values()] if hasattr(thing, "__dict__") else []
        return found + [getattr(thing, name, None) for name in names]

    return attributes


class _Steps:
    """When the optimizer steps, or one that was made in its place; what all of the model's hold.

    Keeps no optimizer alive.
    """

    def __init__(
        self,
        tracker: Tracker,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        then: Callable[[], None],
    ) -> None:
        self.tracker, self.then = tracker, then
        self.model = weakref.ref(model)
        self.trained = _parameters_of(optimizer)
        self.known = [weakref.ref(optimizer)]
        self.stepping: weakref.ref[torch.optim.Optimizer] | None = None

    def _is_followed(self, optimizer: torch.optim.Optimizer) -> bool:
        if self.known[0]() is optimizer:
            return True
        held = _parameters_of(optimizer)
        if held & self.trained:  # made anew, for the same parameters
            self.known[0] = weakref.ref(optimizer)
            self.trained = held
            return True
        self._note(optimizer)
        return False

    def _note(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at what it holds, too, if it trains a part of the model."""
        model = self.model()
        if model is None or any(other() is optimizer for other in self.known):
            return
        if _parameters_of(optimizer) & set(map(id, model.parameters())):
            self.known.append(weakref.ref(optimizer))

    def before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """A step begins; with a closure, only when that has returned."""
        outer = None if self.stepping is None else self.stepping()
        if outer not in (None, optimizer) and self.tracker.phase == "step":
            self._note(optimizer)  # of which another one is made
            return None
        if not self._is_followed(optimizer) or not self.tracker.is_running:
            return None
        self.stepping = weakref.ref(optimizer)
        kwargs = dict(kwargs)
        closure = kwargs.pop("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self.tracker.begin_step()
            return None

        @wraps(closure)
        def followed() -> Any:
            loss = closure()
            if self.tracker.is_running:
                self.tracker.begin_step()
            return loss

        return (args[0], followed, *args[2:]), kwargs

    def after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """It is over."""
        outer, self.stepping = self.stepping, None
        if outer is not None and outer() not in (None, optimizer):
            self.stepping = outer
        elif self._is_followed(optimizer):
            if self.tracker.is_running:
                self.tracker.end_step()
            self.then()

    def scan(self) -> Iterator[tuple[Tensor, str]]:
        """What the optimizers hold, and what it is."""
        optimizers = [optimizer for reference in self.known if (optimizer := reference())]
        model = self.model()
        parameters = list(() if model is None else model.parameters())
        for optimizer in optimizers:
            parameters += [p for group in optimizer.param_groups for p in group["params"]]
        for engine in engines_of(parameters):
            yield from accounts.tensors_of(engine)
            for tensor in _held_by(engine):
                yield tensor, "bookkeeping"
        for optimizer in optimizers:
            yield from _of_state(optimizer)


def _parameters_of(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _of_model(model: nn.Module) -> Scan:
    def scan() -> Iterator[tuple[Tensor, str]]:
        for parameter in model.parameters():
            if parameter.grad is not None:
                yield parameter.grad, "gradients"
            yield parameter.data, "parameters"
        for buffer in model.buffers():
            yield buffer, "buffers"

    return scan


def _of_state(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, str]]:
    """State in torch's form; what is ours is known to its engine already."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor):
                yield value, "bookkeeping" if name == "step" else "moments"
