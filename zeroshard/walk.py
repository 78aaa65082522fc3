"""Where backward is among the uses of units: inside of which, and which it has left for good.

Knows no module and no hook. Autograd runs the nodes that are ready from the last made to the first,
so backward leaves a unit before it comes to one that ran earlier.
"""

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .schedule import Event
from .tracing import untraced

__all__ = ["NO_BACKWARD", "BackwardWalk", "Use"]

NO_BACKWARD = -1  # torch's id of no graph task


class Use:
    """One forward of a unit, and the backward through it."""

    def __init__(self, module: nn.Module, began: int) -> None:
        self.module = module
        self.error = sys.exc_info()[1]  # of the caller, who may be handling one
        self.inputs: list[tuple[Tensor, int]] = []  # with their versions
        self.began, self.ended = began, began
        self.depth = 0  # of calls by itself
        self.epoch = -1  # in which it was counted
        self.task = NO_BACKWARD  # the graph task of the backward that is inside of it

    def take_changed_inputs(self) -> list[Tensor]:
        """Inputs that were written to in place, which makes them outputs."""
        changed = [tensor for tensor, version in self.inputs if tensor._version != version]
        self.inputs.clear()
        return changed


class BackwardWalk:
    """One optimizer's backwards through its units.

    Args:
        raise_event: called with an event and the index of a unit.

    Attributes:
        inside: by unit, its uses that backward is inside of.
        graph_is_kept: whether the backward under way makes a graph (create_graph=True), which
            reads the parameters of everything that it went through.
    """

    def __init__(self, raise_event: Callable[[Event, int], None]) -> None:
        self.raise_event = raise_event
        self.inside: dict[int, list[Use]] = {}
        self.graph_is_kept = False
        # By unit: how often backward may still come to it. No more than a number, for all ranks
        # must count alike, whatever graphs each of them keeps alive.
        self._expected: Counter[int] = Counter()
        self._done: set[int] = set()  # units that backward has left, as it seems for good
        self._told: set[int] = set()  # those of which that was said
        self._epoch = 0  # backwards so far

    def forget(self) -> None:
        """An error ended the backward under way."""
        self._clear()
        self.graph_is_kept = False

    def end(self) -> set[int]:
        """The outermost backward is over; the units that the graph which it made still needs."""
        kept = set(self.inside) if self.graph_is_kept else set()
        self._clear()
        self._epoch += 1
        return kept

    def _clear(self) -> None:
        self.inside.clear()
        self._expected.clear()
        self._done.clear()
        self._told.clear()

    def was_done(self, unit: int) -> bool:
        """Whether the backward under way seemed to have left a unit for good before."""
        return unit in self._told

    def expect(self, unit: int, use: Use) -> None:
        """A forward of a unit is over, of which a backward may follow."""
        self._expected[unit] += 1
        use.epoch = self._epoch

    def enter(self, unit: int, use: Use) -> None:
        """Backward has come to an output of a use."""
        self.graph_is_kept = torch.is_grad_enabled()
        uses = self.inside.setdefault(unit, [])
        if use not in uses:
            use.task = torch._C._current_graph_task_id()
            uses.append(use)
            self.come_to(use.task, use.ended)
            self.raise_event(Event.PRE_BACKWARD, unit)

    def come_to(self, task: int, ended: int | None = None) -> None:
        """Leave what backward is done with when it comes to graph task `task`.

        That is what it went through in tasks inside of this one, which are over; and, where it has
        come to a forward that ended at `ended`, every forward that began after that.
        """
        for unit, uses in list(self.inside.items()):
            for use in list(uses):
                began_after = ended is not None and use.task == task and use.began > ended
                if use.task > task or began_after:
                    self.leave(unit, use)
        # Only here, and in a fixed order: then all ranks say the same at the same point, whatever
        # each of them did inside of the units.
        done, self._done = self._done, set()
        for unit in sorted(done, reverse=True):
            self._told.add(unit)
            self.raise_event(Event.UNIT_DONE, unit)

    @untraced
    def leave(self, unit: int, use: Use, *_: Any) -> None:
        """Backward is done with a use, if it was inside of it."""
        uses = self.inside.get(unit, [])
        if use not in uses or self.graph_is_kept:
            return
        uses.remove(use)
        if use.epoch == self._epoch:
            self._expected[unit] -= 1
            use.epoch = -1
        if not uses:
            del self.inside[unit]
            if self._expected[unit] <= 0:
                self._done.add(unit)
            self.raise_event(Event.POST_BACKWARD, unit)
