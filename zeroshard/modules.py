"""Hooks at the boundaries of units' modules. They raise events, nothing else.

A unit begins at its module's forward, or at the forward of any module inside that holds one of its
parameters, where that is called by itself (`model.encoder(x)`, `model.embed_tokens(ids)`).
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from .errors import ConfigError
from .schedule import Event
from .tracing import untraced
from .walk import NO_BACKWARD, BackwardWalk, Use

__all__ = ["ModuleHooks", "OwnHook", "tensors_in"]


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
            raise _refuse_copies("copy.deepcopy")
        return ignore

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not self.may_copy(self.unit):
            raise _refuse_copies("pickling")
        return (_get_ignore, ())


def ignore(*_: Any, **__: Any) -> None:
    """The hook that a copy has in the place of ours."""


def _get_ignore() -> Callable[..., None]:
    return ignore


def _refuse_copies(what: str) -> ConfigError:
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
        self.ends: dict[nn.Module, Any] = {}  # our hooks after forward
        self.lookups: set[int] = set()  # units whose backward needs none of their parameters
        self.walk = BackwardWalk(raise_event)
        self._inside: dict[int, Use] = {}  # by unit: forwards that have begun and not ended
        # Who gave out a tensor, in which version: the last one comes first in backward.
        self._givers = WeakTensorKeyDictionary()
        self._outermost: nn.Module | None = None
        self._clock = 0

    def attach(self, module: nn.Module, unit: int, *, is_boundary: bool) -> None:
        """Watch one module of a unit.

        Args:
            module: the unit's module, or one inside that holds parameters.
            unit: its index.
            is_boundary: whether it is the unit's module. The others are mostly called inside of it,
                where there is nothing to do at their end: they get that hook when they need it.
        """
        before = _Before(self, unit)
        handle = module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        self.handles.append(handle)
        if is_boundary:
            self._watch_end(module, unit)

    def _watch_end(self, module: nn.Module, unit: int) -> None:
        after = _After(self, unit)
        self.ends[module] = module.register_forward_hook(after, always_call=True)

    def detach(self) -> None:
        """Remove every hook."""
        for handle in (*self.handles, *self.ends.values()):
            handle.remove()
        self.handles.clear()
        self.ends.clear()
        self.forget()

    def forget(self) -> None:
        """Nobody is inside of anything: an error ended what was under way."""
        self._inside.clear()
        self._outermost = None
        self.walk.forget()

    def backward_ended(self) -> set[int]:
        """The outermost backward is over; the units that are needed all the same."""
        return {*self._inside, *self.walk.end()}

    def needed(self) -> set[int]:
        """Units that a forward or a backward is inside of, or was when an error ended it."""
        return {*self._inside, *self.walk.inside}

    # --- forward

    @untraced
    def before(self, unit: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A module is about to run."""
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise ConfigError(_refuse_transforms(module))
        if unit in self._inside and self._inside[unit].module is not module:
            return
        if module not in self.ends:
            self._watch_end(module, unit)
        _run_last(module, self.ends[module].id)
        task = torch._C._current_graph_task_id()
        if task != NO_BACKWARD and unit in self.walk.inside:
            return  # a recomputation of what backward is inside of
        calls_itself = unit in self._inside and _is_running(module)
        if task == NO_BACKWARD and self._outermost in (None, module) and not calls_itself:
            self._outermost = module
            self._inside.clear()  # what an error left
            self.walk.inside.clear()
        if unit in self._inside:
            self._inside[unit].depth += 1
            return
        if task != NO_BACKWARD:
            self.walk.come_to(task)
        self._clock += 1
        use = self._inside[unit] = Use(module, self._clock)
        self.raise_event(Event.PRE_FORWARD, unit)
        if torch.is_grad_enabled():
            self._watch_inputs(unit, use, (args, kwargs))

    @untraced
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
        found = [*tensors_in(output), *use.take_changed_inputs()]
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

    def _watch_outputs(self, unit: int, use: Use, tensors: list[Tensor]) -> bool:
        """Notice when backward reaches one of `tensors`; whether it can."""
        watched = [t for t in tensors if t.requires_grad]
        if watched and unit not in self.lookups:
            self.walk.expect(unit, use)
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

    @untraced
    def _reach(self, givers: list[tuple[int, Use]], _: Tensor) -> None:
        """Backward has come to a tensor that these uses of units gave out."""
        for unit, use in reversed(givers):
            self.walk.enter(unit, use)

    def _watch_inputs(self, unit: int, use: Use, inputs: Any) -> None:
        """Notice when the gradient of an input is done, and which inputs are written to.

        Autograd runs the nodes that are ready from the last made to the first. So when the node
        that made an input runs, every node that the unit made since has run.
        """
        for tensor in tensors_in(inputs):
            if not tensor.is_inference():
                use.inputs.append((tensor, tensor._version))
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(partial(self.walk.leave, unit, use))


def _is_running(module: nn.Module) -> bool:
    """Whether a call of the module is on the stack beside the one that begins.

    Ctrl-C ends a forward without its hooks, so that we were inside does not say that we are.
    """
    calls, frame = 0, sys._getframe()
    while frame is not None:
        calls += frame.f_code is _CALL and frame.f_locals.get("self") is module
        frame = frame.f_back  # type: ignore[assignment]
    return calls > 1


_CALL = nn.Module._call_impl.__code__


def _run_last(module: nn.Module, hook: int) -> None:
    """See to it that our hook runs behind the user's, for whom the parameters are still whole."""
    hooks = module._forward_hooks
    if hook in hooks and next(reversed(hooks)) != hook:
        hooks[hook] = hooks.pop(hook)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in what a function takes or gives: in tuples, lists, mappings and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for entry in value:
            yield from tensors_in(entry)
    elif isinstance(value, (dict, Mapping)):  # the first is quick to tell
        for entry in value.values():
            yield from tensors_in(entry)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for entry in dataclasses.fields(value):
            yield from tensors_in(getattr(value, entry.name, None))


def _refuse_transforms(module: nn.Module) -> str:
    return (
        f"{type(module).__name__} was called inside of torch.func.grad, vmap or another transform, "
        "whose parameters stage 3 cannot gather there: transform a copy that was made inside of "
        "`with zeroshard.gather(model):`, or use stage=2"
    )


def _gives_parameters(module: nn.Module) -> str:
    return (
        f"{type(module).__name__} returned a parameter, or a part of one, that is freed now: "
        "return a copy (.clone()), or call it inside of `with zeroshard.gather(...):`"
    )
