"""Hooks at the boundaries of units' modules. They raise events, nothing else.

A unit begins at its module's forward, or at the forward of any module inside that holds one of its
parameters, where that is called by itself (`model.encoder(x)`, `model.embed_tokens(ids)`).
"""

import dataclasses
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from .errors import ConfigError
from .schedule import Event

__all__ = ["ModuleHooks", "OwnHook", "refuse_copies"]


NO_BACKWARD = -1  # torch's id of no graph task


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

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.hooks.before(self.unit, module, args, kwargs)


class _After(OwnHook):
    def __init__(self, hooks: "ModuleHooks", unit: int) -> None:
        super().__init__(hooks.may_copy, unit)
        self.hooks = hooks

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.hooks.after(self.unit, module, output)


class _Use:
    """One forward of a unit, and the backward through it."""

    def __init__(self, module: nn.Module, began: int) -> None:
        self.module = module
        self.error = sys.exc_info()[1]  # of the caller, who may be handling one
        self.inputs: list[tuple[Tensor, int]] = []  # with their versions
        self.began, self.ended = began, began
        self.depth = 0  # of calls by itself
        self.epoch = -1  # in which it was counted
        self.task = -1  # the graph task of the backward that is inside of it

    def take_changed_inputs(self) -> list[Tensor]:
        """Inputs that were written to in place, which makes them outputs."""
        changed = [tensor for tensor, version in self.inputs if tensor._version != version]
        self.inputs.clear()
        return changed


class ModuleHooks:
    """All boundaries of one optimizer's units.

    Args:
        raise_event: called with an event and the index of a unit.
        may_copy: whether the modules of a unit may be copied now.
        is_parameter: whether a tensor is one of a unit's parameters, or a part of one.
    """

    def __init__(
        self,
        raise_event: Callable[[Event, int], None],
        may_copy: Callable[[int], bool],
        is_parameter: Callable[[int, Tensor], bool],
    ) -> None:
        self.raise_event, self.may_copy = raise_event, may_copy
        self.is_parameter = is_parameter
        self.handles: list[Any] = []
        self.after_ids: dict[nn.Module, int] = {}  # of our hooks after forward
        self.lookups: set[int] = set()  # units whose backward needs none of their parameters
        self._inside: dict[int, _Use] = {}  # by unit
        # By unit: how often backward may still come to it. No more than a number, for all ranks
        # must count alike, whatever graphs each of them keeps alive.
        self._open: Counter[int] = Counter()
        self._in_backward: dict[int, list[_Use]] = {}  # by unit
        self._done: set[int] = set()  # units that backward has left, as it seems for good
        self._told: set[int] = set()  # those of which that was said
        # Who gave out a tensor, in which version: the last one comes first in backward.
        self._givers = WeakTensorKeyDictionary()
        self._outermost: nn.Module | None = None
        self._clock = 0
        self._epoch = 0  # backwards so far
        self.graph_is_kept = False  # by the backward under way

    def attach(self, module: nn.Module, unit: int) -> None:
        """Watch one module of a unit."""
        before, after = _Before(self, unit), _After(self, unit)
        last = module.register_forward_hook(after, always_call=True)
        self.after_ids[module] = last.id
        first = module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        self.handles += [first, last]

    def detach(self) -> None:
        """Remove every hook."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.after_ids.clear()
        self.forget()

    def forget(self) -> None:
        """Nobody is inside of anything: an error ended what was under way."""
        self._inside.clear()
        self._open.clear()
        self._in_backward.clear()
        self._done.clear()
        self._told.clear()
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
        self._open.clear()
        self._in_backward.clear()
        self._done.clear()
        self._told.clear()
        self._epoch += 1
        return kept

    def was_done(self, unit: int) -> bool:
        """Whether the backward under way seemed to have left a unit for good before."""
        return unit in self._told

    @property
    def is_inside(self) -> bool:
        """Whether a forward or a backward has begun and not ended, or ended by an error."""
        return bool(self._inside or self._in_backward)

    def needed(self) -> set[int]:
        """Units that a forward or backward is inside of."""
        return {*self._inside, *self._in_backward}

    # --- forward

    def before(self, unit: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A module is about to run."""
        if unit in self._inside and self._inside[unit].module is not module:
            return
        _run_last(module, self.after_ids.get(module))
        task = torch._C._current_graph_task_id()
        if task != NO_BACKWARD and unit in self._in_backward:
            return  # a recomputation of what backward is inside of
        if task == NO_BACKWARD and self._outermost in (None, module):
            self._outermost = module
            self._inside.clear()  # what an error left
            self._in_backward.clear()
        if unit in self._inside:
            self._inside[unit].depth += 1  # the module calls itself
            return
        if task != NO_BACKWARD:
            self._leave_ended(task)
            self._tell_done()
        self._clock += 1
        use = self._inside[unit] = _Use(module, self._clock)
        self.raise_event(Event.PRE_FORWARD, unit)
        if torch.is_grad_enabled():
            self._watch_inputs(unit, use, (args, kwargs))

    def after(self, unit: int, module: nn.Module, output: Any) -> None:
        """A module has run, or raised."""
        if unit not in self._inside or self._inside[unit].module is not module:
            return
        if self._inside[unit].depth > 0:
            self._inside[unit].depth -= 1
            return
        use = self._inside.pop(unit)
        self._clock += 1
        use.ended = self._clock
        failed = sys.exc_info()[1] is not use.error
        found = [*_tensors(output), *use.take_changed_inputs()]
        differentiable = torch.is_grad_enabled() and not failed
        # Without any tensor in sight the output may hold some where nobody looks.
        is_done = bool(found) or not differentiable
        if differentiable and found:
            differentiable = self._watch_outputs(unit, use, found)
        gives_parameters = any(self.is_parameter(unit, tensor) for tensor in found)
        if is_done and not gives_parameters:
            self.raise_event(Event.POST_FORWARD, unit)
        if self._outermost is module and torch._C._current_graph_task_id() == NO_BACKWARD:
            self._outermost = None
            if not differentiable:
                self.raise_event(Event.EVALUATED, unit)
                if gives_parameters:
                    raise ConfigError(_gives_parameters(module))

    # --- backward

    def _watch_outputs(self, unit: int, use: _Use, tensors: list[Tensor]) -> bool:
        """Notice when backward reaches one of `tensors`; whether it can."""
        watched = [t for t in tensors if t.requires_grad]
        if watched and unit not in self.lookups:
            self._open[unit] += 1
            use.epoch = self._epoch
        for tensor in watched if unit not in self.lookups else ():
            if tensor.grad_fn is None:
                continue
            version, givers = self._givers.get(tensor, (-1, []))
            if version != tensor._version:
                givers = []
                self._givers[tensor] = (tensor._version, givers)
                tensor.register_hook(partial(self._reach, givers))
            givers.append((unit, use))
        return bool(watched)

    def _reach(self, givers: list[tuple[int, _Use]], _: Tensor) -> None:
        """Backward has come to a tensor that these uses of units gave out."""
        for unit, use in reversed(givers):
            self._enter_backward(unit, use)

    def _watch_inputs(self, unit: int, use: _Use, inputs: Any) -> None:
        """Notice when the gradient of an input is done, and which inputs are written to.

        Autograd runs the nodes that are ready from the last made to the first. So when the node
        that made an input runs, every node that the unit made since has run.
        """
        for tensor in _tensors(inputs):
            if not tensor.is_inference():
                use.inputs.append((tensor, tensor._version))
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(partial(self._leave_backward, unit, use))

    def _enter_backward(self, unit: int, use: _Use) -> None:
        self.graph_is_kept = torch.is_grad_enabled()
        uses = self._in_backward.setdefault(unit, [])
        if use not in uses:
            use.task = torch._C._current_graph_task_id()
            uses.append(use)
            self._leave_ended(use.task, use.ended)
            self._tell_done()
            self.raise_event(Event.PRE_BACKWARD, unit)

    def _leave_ended(self, task: int, ended: int | None = None) -> None:
        """Leave what backward is done with when it comes to graph task `task`.

        That is what it went through in tasks inside of this one, which are over; and, where it has
        come to a forward that ended at `ended`, every forward that began after that.
        """
        for unit, uses in list(self._in_backward.items()):
            for use in list(uses):
                began_after = ended is not None and use.task == task and use.began > ended
                if use.task > task or began_after:
                    self._leave_backward(unit, use)

    def _leave_backward(self, unit: int, use: _Use, *_: Any) -> None:
        uses = self._in_backward.get(unit, [])
        if use not in uses or self.graph_is_kept:
            return
        uses.remove(use)
        if use.epoch == self._epoch:
            self._open[unit] -= 1
            use.epoch = -1
        if not uses:
            del self._in_backward[unit]
            if self._open[unit] <= 0:
                self._done.add(unit)
            self.raise_event(Event.POST_BACKWARD, unit)

    def _tell_done(self) -> None:
        """Say what backward has left for good.

        Only when it comes to the next unit, and in a fixed order: then all ranks say the same at
        the same point, whatever each of them did inside of the units.
        """
        done, self._done = self._done, set()
        for unit in sorted(done, reverse=True):
            self._told.add(unit)
            self.raise_event(Event.UNIT_DONE, unit)


def _run_last(module: nn.Module, hook: int | None) -> None:
    """See to it that our hook runs behind the user's, for whom the parameters are still whole."""
    hooks = module._forward_hooks
    if hook is not None and hook in hooks and next(reversed(hooks)) != hook:
        hooks[hook] = hooks.pop(hook)


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a module's inputs or output: in tuples, lists, dicts and dataclasses."""
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


def _gives_parameters(module: nn.Module) -> str:
    return (
        f"{type(module).__name__} returned a parameter, or a part of one, that is freed now: "
        "return a copy (.clone()), or call it inside of `with zeroshard.gather(...):`"
    )
