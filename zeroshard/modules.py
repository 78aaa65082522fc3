"""Hooks at the boundaries of units' modules. They raise events, nothing else.

A unit begins at its module's forward, or at the forward of any module inside that holds one of its
parameters, where that is called by itself (`model.encoder(x)`, `model.embed_tokens(ids)`).
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .errors import ConfigError
from .schedule import Event

__all__ = ["ModuleHooks", "OwnHook", "refuse_copies"]


class OwnHook:
    """A hook on a module, which no copy or pickle of the module takes along.

    Args:
        may_copy: whether the parameters of a unit are whole, so that modules may be copied.
        unit: whose module this is.
    """

    def __init__(self, may_copy: Callable[[int], bool], unit: int) -> None:
        self.may_copy, self.unit = may_copy, unit

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if not self.may_copy(self.unit):
            raise refuse_copies("copy.deepcopy")
        return ignore

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not self.may_copy(self.unit):
            raise refuse_copies("pickling")
        return (_get_ignore, ())


def ignore(*_: Any, **__: Any) -> None:
    """The hook that a copy has in the place of ours."""


def _get_ignore() -> Callable[..., None]:
    return ignore


def refuse_copies(what: str) -> ConfigError:
    """What to do instead of copying or pickling a model whose parameters are sharded."""
    return ConfigError(
        f"{what} of a module whose parameters are sharded would copy placeholders: do it inside of "
        "`with zeroshard.gather(module):`, where every parameter is whole"
    )


class _Before(OwnHook):
    def __init__(self, hooks: "ModuleHooks", unit: int) -> None:
        super().__init__(hooks.may_copy, unit)
        self.hooks = hooks

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return self.hooks.before(self.unit, module, args, kwargs)


class _After(OwnHook):
    def __init__(self, hooks: "ModuleHooks", unit: int) -> None:
        super().__init__(hooks.may_copy, unit)
        self.hooks = hooks

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.hooks.after(self.unit, module, output)


class ModuleHooks:
    """All boundaries of one optimizer's units.

    Args:
        raise_event: called with an event and the index of a unit.
        may_copy: whether the modules of a unit may be copied now.
    """

    def __init__(
        self, raise_event: Callable[[Event, int], None], may_copy: Callable[[int], bool]
    ) -> None:
        self.raise_event, self.may_copy = raise_event, may_copy
        self.handles: list[Any] = []
        self.lookups: set[int] = set()  # units whose backward needs none of their parameters
        self._inside: dict[int, tuple[nn.Module, Any]] = {}  # unit -> who began it, error then
        self._in_backward: dict[int, set[int]] = {}  # unit -> its uses that backward is inside of
        self._outermost: nn.Module | None = None
        self._uses = 0
        self.graph_is_kept = False  # by the backward under way

    def attach(self, module: nn.Module, unit: int) -> None:
        """Watch one module of a unit."""
        before, after = _Before(self, unit), _After(self, unit)
        self.handles += [
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
            module.register_forward_hook(after, always_call=True),
        ]

    def detach(self) -> None:
        """Remove every hook."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.forget()

    def forget(self) -> None:
        """Nobody is inside of anything: an error ended what was under way."""
        self._inside.clear()
        self._in_backward.clear()
        self._outermost = None
        self.graph_is_kept = False

    def backward_ended(self) -> set[int]:
        """The outermost backward is over; the units that are needed all the same.

        These are units that a forward is inside of, and all that a backward with
        create_graph=True went through: the graph that it made reads their parameters.
        """
        kept = set(self._inside)
        if self.graph_is_kept:
            kept.update(self._in_backward)
        self._in_backward.clear()
        return kept

    @property
    def is_inside(self) -> bool:
        """Whether a forward or a backward has begun and not ended, or ended by an error."""
        return bool(self._inside or self._in_backward)

    def needed(self) -> set[int]:
        """Units that a forward or backward is inside of."""
        return {*self._inside, *self._in_backward}

    # --- forward

    def before(self, unit: int, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A module is about to run; returns its inputs where they have to be watched."""
        if unit in self._inside and self._inside[unit][0] is not module:
            return None
        in_backward = _in_backward()
        if in_backward and unit in self._in_backward:
            return None  # a recomputation of what backward is inside of
        if not in_backward and self._outermost in (None, module):
            self.forget()  # what an error left
            self._outermost = module
        self._inside[unit] = (module, sys.exc_info()[1])
        self.raise_event(Event.PRE_FORWARD, unit)
        if not torch.is_grad_enabled():
            return None
        self._uses += 1
        return self._watch_inputs(unit, self._uses, args, kwargs)

    def after(self, unit: int, module: nn.Module, output: Any) -> None:
        """A module has run, or raised."""
        if unit not in self._inside or self._inside[unit][0] is not module:
            return
        failed = sys.exc_info()[1] is not self._inside.pop(unit)[1]
        found = list(_tensors(output))
        differentiable = torch.is_grad_enabled() and not failed
        if differentiable and found:
            # Without any tensor in sight the output may hold some where nobody looks.
            differentiable = self._watch_outputs(unit, found)
        if found or not differentiable:
            self.raise_event(Event.POST_FORWARD, unit)
        if self._outermost is module and not _in_backward():
            self._outermost = None
            if not differentiable:
                self.raise_event(Event.EVALUATED, unit)

    # --- backward

    def _watch_outputs(self, unit: int, tensors: list[Tensor]) -> bool:
        """Notice when backward reaches one of `tensors`; whether it can."""
        use = self._uses
        watched = [t for t in tensors if t.requires_grad]
        for tensor in watched if unit not in self.lookups else ():
            if tensor.grad_fn is not None:
                tensor.register_hook(partial(self._enter_backward, unit, use))
        return bool(watched)

    def _enter_backward(self, unit: int, use: int, grad: Tensor) -> None:
        self.graph_is_kept = torch.is_grad_enabled()
        uses = self._in_backward.setdefault(unit, set())
        if use not in uses:
            uses.add(use)
            self.raise_event(Event.PRE_BACKWARD, unit)

    def _watch_inputs(self, unit: int, use: int, args: Any, kwargs: Any) -> Any:
        """Notice when the gradients of all inputs are done.

        Each input is replaced by a view of itself: the view's node belongs to this use of the unit
        alone, and unlike a custom function's output a view may be changed in place.
        """
        nodes: list[Any] = []

        def view(tensor: Tensor) -> Tensor:
            watched = tensor.view_as(tensor)
            nodes.append(watched.grad_fn)
            return watched

        args, kwargs = _map_inputs(args, view), _map_inputs(kwargs, view)
        if not nodes:
            return None
        done = _AllDone(nodes, partial(self._leave_backward, unit, use))
        for node in nodes:
            node.register_hook(done)
        return args, kwargs

    def _leave_backward(self, unit: int, use: int) -> None:
        uses = self._in_backward.get(unit)
        if uses is None or self.graph_is_kept:
            return
        uses.discard(use)
        if not uses:
            del self._in_backward[unit]
            self.raise_event(Event.POST_BACKWARD, unit)


class _AllDone:
    """Calls a function once all those nodes have run that the graph task at hand will run."""

    def __init__(self, nodes: list[Any], function: Callable[[], None]) -> None:
        self.nodes = nodes if len(nodes) > 1 else None
        self.function = function
        self.task, self.left = -1, 1

    def __call__(self, *_: Any) -> None:
        task = torch._C._current_graph_task_id()
        if self.nodes is not None and task != self.task:
            self.left = sum(map(torch._C._will_engine_execute_node, self.nodes))
            self.task = task
        self.left -= self.nodes is not None
        if self.nodes is None or self.left == 0:
            self.function()


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _map_inputs(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """`value` with `function` applied to its differentiable tensors, in containers too."""
    if isinstance(value, Tensor):
        watch = value.requires_grad and value.layout == torch.strided
        return function(value) if watch else value
    if type(value) in (tuple, list):
        return type(value)(_map_inputs(entry, function) for entry in value)
    if type(value) is dict:
        return {key: _map_inputs(entry, function) for key, entry in value.items()}
    return value


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a module's output: in tuples, lists, dicts and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for entry in value:
            yield from _tensors(entry)
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _tensors(entry)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for entry in dataclasses.fields(value):
            yield from _tensors(getattr(value, entry.name, None))
