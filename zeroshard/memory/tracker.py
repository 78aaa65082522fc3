"""Follows every storage from its birth to its death, while a program trains. Decides no category.

Storages are seen where operations return them, and their end by weak references; what changes size
or has an owner is told by `ownership`. On tensors with values and on ghosts alike.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import ConfigError
from ..modules import OwnHook, tensors_in
from ..ownership import observed_by
from ..tracing import followed_by
from .stored import PLAIN, Moment, Step, Stored, parts_of

__all__ = ["Tracker"]

RANGES = {
    "zeroshard::reduce": "reduce",
    "zeroshard::gather": "gather",
    "zeroshard::unshard": "gather",
}


class _Forward:
    """A forward, or a recomputation of a part of one in backward."""

    def __init__(self) -> None:
        self.made: list[Stored] = []
        self.last_block = 0  # how many of `made` there were when the last block ended
        self.is_aside = False  # while an evaluation runs before its backward


class _Hook(OwnHook):
    """A hook on a module, whatever the present state of its parameters."""

    def __init__(self, call: Callable[..., None]) -> None:
        super().__init__(lambda _: True, 0)
        self.call = call

    def __call__(self, *args: Any) -> None:
        self.call(*args)


class Tracker(TorchDispatchMode):
    """Follows storages, and in which phase and module a program is.

    Args:
        on_step: called with every step that is over, whose storages are all known by then.
        device_type: whose bytes count, "cpu" or "cuda".
    """

    def __init__(self, on_step: Callable[[Step], None], device_type: str = "cpu") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.on_step = on_step
        self.device_type = device_type
        self.step = Step(number=1)
        self._stored: dict[int, tuple[Stored, Any]] = {}  # by address of the storage's object
        self._made_as_data: list[Stored] = []
        self._forward: _Forward | None = None
        self._is_recomputing = False
        self._is_between = False  # a backward and the step, or the next forward
        self._behind_blocks = False  # in backward
        self._phase = "construction"
        self._ranges: list[str] = []
        self._modules: list[str] = []
        self._in_backward_of = ""
        self._depth = 0  # of the watched modules that are running
        self._last_moment: tuple[str, str] = ("", "")
        self._scans: list[Callable[[], Iterable[tuple[Tensor, str]]]] = []
        self.has_blocks = False
        self.is_running = False

    # --- storages

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for kind in types:
            if kind not in PLAIN:
                return NotImplemented  # a subclass, which takes itself apart first
        if torch._C._current_graph_task_id() != -1:
            if self._phase in ("forward", "data"):
                self._begin_backward()
        elif self._phase == "backward" and not self._is_recomputing and not self._ranges:
            self._set_phase("data" if self._forward is None else "forward")
        self._see_given(args)
        if kwargs:
            self._see_given(kwargs.values())
        if func.namespace == "c10d":
            for tensor in tensors_in(args):
                for part in parts_of(tensor):
                    self._look_at(part, "").was_sent = True
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self._see(out, func)
        return out

    def _see_given(self, given: Any) -> None:
        """Notice what came from where nobody looked, such as a batch of another thread."""
        for value in given:
            if isinstance(value, Tensor):
                if value.layout is not torch.strided:
                    self._see_given(parts_of(value))
                    continue
                storage = value.untyped_storage()
                known = self._stored.get(storage._cdata)
                if known is not None:
                    self._measure(known[0], storage)
                elif storage.nbytes():
                    self._adopt(value, storage)
            elif isinstance(value, (tuple, list)):
                self._see_given(value)

    def _adopt(self, tensor: Tensor, storage: torch.UntypedStorage) -> None:
        address = storage.data_ptr()
        for known, reference in list(self._stored.values()):
            other = reference()
            if other is not None and 0 <= address - other.data_ptr() < max(known.nbytes, 1):
                return  # the same memory behind a second storage
        stored = self._look_at(tensor, "")
        if self._phase in ("data", "forward"):
            stored.identity = "inputs"

    def _see(self, out: Any, func: Any) -> None:
        if isinstance(out, Tensor):
            if out.layout is torch.strided:
                self._look_at(out, str(func))
            else:
                self._see(parts_of(out), func)
        elif isinstance(out, (tuple, list)):
            for value in out:
                self._see(value, func)

    def _look_at(self, tensor: Tensor, operation: str) -> Stored:
        storage = tensor.untyped_storage()
        known = self._stored.get(storage._cdata)
        if known is not None:
            self._measure(known[0], storage)
            return known[0]
        stored = Stored(operation=operation)
        key = storage._cdata
        self._stored[key] = (stored, weakref.ref(storage, lambda _: self._died(key)))
        self._measure(stored, storage)
        if self._forward is not None:
            self._forward.made.append(stored)
        elif self._phase == "data" and operation and not self._is_between:
            self._made_as_data.append(stored)
        stored.is_behind_blocks = self._behind_blocks
        return stored

    def _died(self, key: int) -> None:
        stored, _ = self._stored.pop(key)
        self._resize(stored, 0)

    def _measure(self, stored: Stored, storage: torch.UntypedStorage) -> None:
        """An operation, or whoever owns it, may have given it another size."""
        if storage.nbytes() != stored.nbytes and storage.device.type == self.device_type:
            self._resize(stored, storage.nbytes())

    def _resize(self, stored: Stored, nbytes: int) -> None:
        if nbytes != stored.nbytes:
            self._note_moment()
            stored.nbytes = nbytes
            self.step.changes.append((stored, nbytes))

    def owned(self, tensor: Tensor, category: str) -> None:
        """The storage of `tensor` has an owner."""
        if type(tensor) in PLAIN:
            self._look_at(tensor, "").owner = category

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage has another size."""
        known = self._stored.get(storage._cdata)
        if known is not None:
            self._measure(known[0], storage)

    def live(self) -> list[tuple[Stored, int]]:
        """All storages that have bytes, with these."""
        # Of a copy: a collection of garbage in between lets some of them die.
        known = list(self._stored.values())
        return [(stored, stored.nbytes) for stored, _ in known if stored.nbytes]

    # --- phases

    @property
    def phase(self) -> str:
        """What the program is at."""
        return self._ranges[-1] if self._ranges else self._phase

    @property
    def where(self) -> str:
        """The innermost watched module that it is in."""
        if self._modules:
            return self._modules[-1]
        return self._in_backward_of if self._phase == "backward" else ""

    @property
    def is_in_model(self) -> bool:
        """Whether a watched module is running."""
        return self._depth > 0

    def _set_phase(self, phase: str) -> None:
        self._phase = phase

    def _note_moment(self) -> None:
        now = (self.phase, self.where)
        if now != self._last_moment:
            self._last_moment = now
            self.step.moments.append(Moment(len(self.step.changes), *now))

    def mark(self, point: str) -> None:
        """Nothing is under way: a point of the step."""
        self.identify()
        self._note_point(point)

    def _note_point(self, point: str) -> None:
        self.step.points[point] = len(self.step.changes)

    def identify(self) -> None:
        """Look up what is a parameter, a buffer, a gradient, or state of an optimizer."""
        for scan in self._scans:
            for tensor, category in scan():
                for part in parts_of(tensor):
                    stored = self._look_at(part, "")
                    stored.identity = stored.identity or category

    def also_scan(self, scan: Callable[[], Iterable[tuple[Tensor, str]]]) -> None:
        """Ask `scan` at every point for tensors and what they are."""
        self._scans.append(scan)

    def _begin_forward(self) -> None:
        self.identify()  # what nobody knows then, and was made just before, is the batch
        for stored in self._made_as_data:
            if stored.nbytes:
                stored.identity = stored.identity or "inputs"
        self._made_as_data.clear()
        if "after_zero_grad" not in self.step.points:  # not before a further micro-batch
            self._note_point("after_zero_grad")
        self._forward = _Forward()
        self._set_phase("forward")

    def _begin_backward(self) -> None:
        self.mark("after_forward")
        self._end_forward()
        self._set_phase("backward")
        self._is_between = True
        self._behind_blocks = self.has_blocks and self._depth == 0
        self._in_backward_of = ""

    def _end_forward(self) -> None:
        forward, goes_on = self._forward, self._depth > 0  # the model takes gradients itself
        if forward is None:
            return
        for stored in forward.made:
            stored.outlived_forward |= stored.nbytes > 0
        if goes_on:
            return
        self._forward = None
        if self.has_blocks and not self._is_recomputing:
            for stored in forward.made[forward.last_block :]:
                stored.is_behind_blocks = True

    def begin_step(self) -> None:
        """The optimizer's step begins."""
        self._depth = 0  # also where a forward was broken off
        self._end_forward()
        self._behind_blocks = False
        self.mark("after_backward")
        self._set_phase("step")

    def end_step(self) -> None:
        """The optimizer's step is over."""
        self.mark("after_step")
        for stored, _ in list(self._stored.values()):
            stored.outlived_step = True
        self._set_phase("data")
        self._is_between = False
        self._finish_step()

    def _finish_step(self) -> None:
        over, self.step = self.step, Step(number=self.step.number + 1)
        self._last_moment = ("", "")
        self.step.before = self.live()
        self.on_step(over)

    # --- modules

    @contextmanager
    def following(
        self, model: nn.Module, names: Mapping[nn.Module, str], blocks: set[nn.Module]
    ) -> Iterator[None]:
        """Watch modules for as long as the context lasts.

        Args:
            model: the whole.
            names: the modules to watch (the model need not be one of them) and what to call them.
            blocks: those of them that repeat.
        """
        self.has_blocks = bool(blocks)
        with ExitStack() as stack:
            for module in dict.fromkeys([model, *names]):
                name = names.get(module, "")
                for hook in (
                    # Before those that gather what it needs: these gathers are in it.
                    module.register_forward_pre_hook(
                        _Hook(self._entered(name, module in blocks)),
                        with_kwargs=True,
                        prepend=True,
                    ),
                    module.register_forward_hook(
                        _Hook(self._left(name, module in blocks)), always_call=True
                    ),
                ):
                    stack.callback(hook.remove)
            yield

    def _entered(self, name: str, is_block: bool) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if torch._C._current_graph_task_id() != -1:
                if self._phase == "forward":
                    self._begin_backward()
                if is_block:
                    self._behind_blocks = False
                if self._depth == 0:
                    self._is_recomputing = True
                    self._forward = _Forward()
            elif self._depth == 0 and self._phase != "forward":
                for tensor in tensors_in((args, kwargs)):
                    for part in parts_of(tensor):
                        stored = self._look_at(part, "")
                        stored.identity = stored.identity or "inputs"
                self._begin_forward()
            elif self._depth == 0:  # once more before a backward
                if self._forward is not None:
                    self._forward.is_aside = not torch.is_grad_enabled()
                for tensor in tensors_in((args, kwargs)):
                    for part in () if tensor.requires_grad else parts_of(tensor):
                        stored = self._look_at(part, "")
                        stored.identity = stored.identity or "inputs"
            self._depth += 1
            if name:
                self._modules.append(name)

        return hook

    def _left(self, name: str, is_block: bool) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._depth -= 1
            if name and self._modules:
                self._modules.pop()
            if self._depth == 0 and not self._is_recomputing and not torch.is_grad_enabled():
                if self._forward is not None and self._forward.is_aside:
                    self._forward.is_aside = False  # the one before it has its backward to come
                    return
                self._forward = None  # an evaluation: nothing is left for a backward
                self._set_phase("data")
                return
            if self._is_recomputing:
                if self._depth == 0:
                    self._end_forward()
                    self._is_recomputing = False
                return
            if is_block and self._forward is not None and not self._forward.is_aside:
                self._forward.last_block = len(self._forward.made)
            if name:
                for tensor in tensors_in(output):
                    if tensor.grad_fn is not None:
                        tensor.grad_fn.register_prehook(self._came_back(name, is_block))

        return hook

    def _came_back(self, name: str, is_block: bool) -> Callable[..., None]:
        def hook(_: Any) -> None:
            if self._phase == "forward":
                self._begin_backward()
            self._in_backward_of = name
            if is_block:
                self._behind_blocks = False

        return hook

    # --- the whole

    @contextmanager
    def _in_range(self, name: str) -> Iterator[None]:
        phase = RANGES.get(name)
        if phase is None:
            yield
            return
        self._ranges.append(phase)
        try:
            yield
        finally:
            self._ranges.pop()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Follow everything that this thread and its backwards do.

        Raises:
            ConfigError: another tracker is running.
        """
        global _running
        if _running:
            raise ConfigError(
                "memory is being followed already, by a MemoryProfiler or a simulation: end that "
                "one first, they would count each other's tensors"
            )
        _running = self.is_running = True
        try:
            with observed_by(self), followed_by(self._in_range), self:
                yield
        finally:
            _running = self.is_running = False
            self._stored.clear()  # with them their weak references, and what these cost
            self._scans.clear()


_running = False
