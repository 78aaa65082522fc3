"""When autograd has accumulated a gradient, and when the outermost backward is over."""

import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from .tracing import untraced

__all__ = ["AutogradHooks"]

autograd_engine = torch.autograd.Variable._execution_engine


class Listener(Protocol):
    """Who is told."""

    def before_accumulation(self, slot: int) -> None:
        """A gradient is about to be accumulated, or was asked for by torch.autograd.grad."""

    def accumulated(self, slot: int) -> None:
        """`p.grad` holds this rank's gradient."""

    def backward_goes_on(self, task: int) -> None:
        """Something runs in the outermost graph task `task`."""

    def backward_ended(self) -> None:
        """The outermost backward is over; may be said more than once."""


class AutogradHooks:
    """The hooks on all parameters of one optimizer."""

    def __init__(self, listener: Listener) -> None:
        # The first hook below keeps the listener alive as long as the parameter lives. The second
        # must not: the garbage collector sees through a tensor's ordinary hooks, but not through
        # those that run after accumulation.
        self.listener = weakref.ref(listener)
        self.handles: list[Any] = []
        self.parameters: list[weakref.ref[nn.Parameter]] = []
        self.task = -1  # the graph task that was looked at last
        self.saw_nested = False  # a backward inside of the one under way

    def attach(self, slot: int, parameter: nn.Parameter) -> None:
        """Hook one parameter."""
        listener = self.listener()
        assert listener is not None
        if parameter.dtype != torch.float32:
            parameter.grad_dtype = None  # a 16-bit parameter may have an fp32 gradient
        self.parameters.append(weakref.ref(parameter))
        after = partial(_after, self.listener, slot)
        last = parameter.register_post_accumulate_grad_hook(after)
        self.handles += [parameter.register_hook(partial(_before, listener, slot, last)), last]

    def detach(self) -> None:
        """Remove every hook."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.parameters.clear()

    def will_accumulate(self) -> bool:
        """Whether the graph task under way leads to any `p.grad`; not so torch.autograd.grad."""
        known = (reference() for reference in self.parameters)
        try:
            return any(
                torch._C._will_engine_execute_node(get_gradient_edge(parameter).node)
                for parameter in known
                if parameter is not None and parameter.requires_grad
            )
        except RuntimeError:  # it is asked for the gradient of a parameter
            return False

    def call_at_end(self) -> None:
        """See to it that the listener hears of the end of the outermost backward under way.

        Re-entrant activation checkpointing runs a backward inside the backward of a function, and
        a callback queued there fires when the inner one ends. A hook on the node of the outer
        function runs in the outer backward and queues it there.
        """
        task = torch._C._current_graph_task_id()
        if task == self.task:
            return
        self.task = task
        node = _outermost_function()
        if node is None:
            self._in_outermost()
        else:
            self.saw_nested = True
            node.register_hook(lambda *_: self._in_outermost())

    @untraced
    def _in_outermost(self) -> None:
        self.task = torch._C._current_graph_task_id()
        self._tell(lambda listener: listener.backward_goes_on(self.task))
        autograd_engine.queue_callback(self._ended)

    @untraced
    def _ended(self) -> None:
        self.task = -1
        self._tell(lambda listener: listener.backward_ended())
        self.saw_nested = False

    def _tell(self, say: Callable[[Listener], None]) -> None:
        listener = self.listener()
        if listener is not None:
            say(listener)


@untraced
def _before(listener: Listener, slot: int, last: RemovableHandle, _: Tensor) -> None:
    hooks = last.hooks_dict_ref()
    if hooks is not None and last.id in hooks and next(reversed(hooks)) != last.id:
        hooks[last.id] = hooks.pop(last.id)  # behind the user's, who want to see `p.grad`
    listener.before_accumulation(slot)


@untraced
def _after(reference: "weakref.ref[Listener]", slot: int, _: Tensor) -> None:
    listener = reference()
    if listener is not None:
        listener.accumulated(slot)


def _outermost_function() -> Any:
    """The outermost Python autograd function whose backward is running in this thread."""
    found = None
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is BackwardCFunction.apply.__code__:
            found = frame.f_locals["self"]
        frame = frame.f_back  # type: ignore[assignment]
    return found
