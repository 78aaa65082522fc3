"""What a step updates: slots, and pieces of buckets in one go. Updates nothing."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from .kernel_update import SlotScalars
from .layout import Layout
from .param_groups import Membership
from .storage import Arena
from .update import Updater

__all__ = ["StepPlan"]


class StepPlan:
    """Mostly the same in every step, and made anew where it is not.

    Attributes:
        work: (number of an arena, buckets to update in one go).
    """

    def __init__(self) -> None:
        self.work: list[tuple[int, list[int]]] = []
        self._membership = Membership()
        self._left: set[int] = set()  # slots whose parameters are in no group any more
        self._planned_for: list[int] | None = None
        self.slot_of: Mapping[nn.Parameter, int] = {}

    def attach(
        self,
        layout: Layout,
        arenas: Sequence[Arena],
        updaters: Sequence[Updater],
        slot_of: Mapping[nn.Parameter, int],
        scalars: SlotScalars,
    ) -> None:
        """Serve the slots of a layout."""
        self.layout, self.arenas, self.updaters = layout, arenas, updaters
        self.slot_of, self.scalars = slot_of, scalars
        self._planned_for = None

    def in_groups(self, used: list[int], groups: Sequence[dict[str, Any]]) -> list[int]:
        """Those of `used` whose parameters are in a param group; the others are left alone."""
        if self._membership.has_changed(groups):
            members = set(self._membership.members)
            self._left = {slot for p, slot in self.slot_of.items() if p not in members}
            self._planned_for = None
        return [slot for slot in used if slot not in self._left] if self._left else used

    def renew(self, used: list[int], groups: Sequence[dict[str, Any]], *, scalars: bool) -> None:
        """Plan for a step that updates the slots `used`.

        Args:
            used: what `in_groups` returned.
            groups: torch's param groups.
            scalars: whether anybody reads the table of scalars.
        """
        if used == self._planned_for:
            return
        with_gradient = set(used)
        group_of = {
            self.slot_of[parameter]: number
            for number, group in enumerate(groups)
            for parameter in group["params"]
            if self.slot_of.get(parameter) in with_gradient
        }
        self.work = []
        for number, (arena, updater) in enumerate(zip(self.arenas, self.updaters, strict=True)):
            buckets = [
                bucket.index
                for bucket in arena.plan.buckets
                if not with_gradient.isdisjoint(self.layout.slots_of_bucket[bucket.index])
            ]
            self.work += [(number, together) for together in updater.plan(group_of, buckets)]
        if scalars:
            self.scalars.plan(group_of)
        self._planned_for = used
