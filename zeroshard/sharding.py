"""Which units are whole: gather them before they are needed, free them after. Decides no order.

The schedule says at which event what happens; this module keeps count of what is whole, under way,
idle, or pinned by `zeroshard.gather`.
"""

from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn

from .errors import ConfigError
from .layout import Bucket
from .parameters import Parameters
from .place import Place
from .storage import Arena
from .tracing import traced
from .transport import Op, Pending, Transport
from .units import ROOT

__all__ = ["Sharding", "Unit"]

TRAINED, FROZEN = 1, 2
"""The channels of gathers: trained and frozen arenas are of two layouts, each counting from 0."""


class Unit:
    """What is gathered and freed together.

    Attributes:
        is_allocated: whether there is memory for its whole parameters.
        is_whole: whether all of them are there.
        is_shown: whether the parameters are views of them.
        is_lookup: whether its backward reads no parameter.
        pending: gathers under way.
        pins: how many `zeroshard.gather` contexts hold it.
        gathers: how often it was gathered.
    """

    def __init__(self, index: int, name: str, *, is_lookup: bool) -> None:
        self.index, self.name = index, name
        self.arenas: list[tuple[Arena, int]] = []  # with its channel
        self.places: list[Place] = []
        self.pending: list[Pending] = []
        self.is_whole = self.is_allocated = self.is_shown = True
        self.is_lookup = is_lookup
        self.pins = 0
        self.gathers = 0

    def drop(self, places: Iterable[Place]) -> None:
        """Forget `places`, and arenas in which nothing is left."""
        gone = set(places)
        self.places = [place for place in self.places if place not in gone]
        left = {place.arena for place in self.places}
        self.arenas = [entry for entry in self.arenas if entry[0] in left]


class Order:
    """Foretells which unit comes next: the one that did so after the same two before.

    Another order than the last time is a miss, which costs a gather, and never an error.
    """

    def __init__(self) -> None:
        self._next: dict[tuple[object, object], tuple[int, bool]] = {}
        self.restart()

    def restart(self) -> None:
        """Nothing leads from what came before to what comes now."""
        self._recent: tuple[object, object] = (None, None)

    def enter(self, unit: int, in_backward: bool) -> None:
        """A unit is needed now."""
        now = (unit, in_backward)
        if self._recent[1] != now:
            self._next[self._recent] = now
            self._recent = (self._recent[1], now)

    def foretell(self) -> int | None:
        """The unit that comes next, if that is known."""
        following = self._next.get(self._recent)
        return None if following is None else following[0]


class Sharding:
    """The units of one optimizer.

    Args:
        parameters: whose data is shown and hidden.
        transport: the wire.
    """

    def __init__(self, parameters: Parameters, transport: Transport) -> None:
        self.parameters, self.transport = parameters, transport
        self.units: list[Unit] = []
        self._unit_of: dict[Place, Unit] = {}
        self._holders: dict[Arena, int] = {}  # of the memory of an arena that only we use
        self.order = Order()
        self._idle: Unit | None = None  # not needed any more, whole until another one is
        self._ahead: Unit | None = None  # gathered before it was needed

    def add_units(self, names: Iterable[str], lookups: Collection[str]) -> None:
        """Units, the root first, without arenas yet; backward reads nothing of `lookups`."""
        self.units += [
            Unit(index, name, is_lookup=name in lookups) for index, name in enumerate(names)
        ]

    def adopt(self, arena: Arena, places: Iterable[Place], *, is_frozen: bool) -> None:
        """Take over an arena, which is whole, and what lives in it."""
        (unit,) = (unit for unit in self.units if unit.name == arena.plan.unit)
        self.unshard(unit)
        self._show(unit)
        self._holders[arena] = arena.num_holders
        unit.arenas.append((arena, FROZEN if is_frozen else TRAINED))
        for place in places:
            unit.places.append(place)
            self._unit_of[place] = unit
        self.reshard(unit)

    def thaw(self, parameters: Collection[nn.Parameter]) -> None:
        """Give frozen parameters plain memory of their own, as before they were sharded."""
        wanted = set(parameters)
        for unit in self.units_of(wanted):
            self.unshard(unit)
            self._show(unit)
            gone = [place for place in unit.places if place.parameter in wanted]
            self.parameters.release(place.parameter for place in gone)
            unit.drop(gone)
            for place in gone:
                del self._unit_of[place]
        self.parameters.release(wanted.intersection(self.parameters.places))

    # --- at the boundaries of modules

    def enter(self, index: int) -> None:
        """A unit is needed: make it whole, and free what another one left."""
        unit = self.units[index]
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward or unit.is_lookup:
            for arena, _ in unit.arenas:
                arena.is_reached = True
        self.order.enter(index, in_backward)
        if not unit.is_whole:
            self._make_room(unit)
        else:
            self._idle = None if self._idle is unit else self._idle
            self._ahead = None if self._ahead is unit else self._ahead
            if not unit.is_shown:
                self.parameters.settle(unit.places)
        self.unshard(unit)
        self._show(unit)
        self.parameters.check_values(place.parameter for place in unit.places)

    def _make_room(self, unit: Unit) -> None:
        for other in (self._idle, self._ahead):
            if other is not None and other is not unit:
                self.reshard(other)
        self._idle = self._ahead = None

    def prefetch(self) -> None:
        """Start to gather the unit that is likely to be needed next."""
        index = self.order.foretell()
        if index is None or self.units[index].is_whole or self._ahead is not None:
            return
        self._ahead = self.units[index]
        self._launch(self._ahead)

    def leave(self, index: int) -> None:
        """A unit is not needed for now: it is freed once another one is needed.

        The root unit stays: its parameters are used before, between and after all others.
        """
        unit = self.units[index]
        if unit.name == ROOT:
            return
        if self._idle is not None and self._idle is not unit:
            self.reshard(self._idle)
        self._idle = unit
        if not unit.pins:  # what is read from now on may be freed before it is used
            self.parameters.settle(unit.places)
            self._hide(unit)

    # --- whole or not

    def _launch(self, unit: Unit) -> None:
        """Start to gather a unit straight into the storage of its parameters."""
        if unit.is_whole or unit.pending:
            return
        self.parameters.settle(unit.places)
        for arena, _ in unit.arenas:
            self.parameters.check_placeholders(arena, unit.places)
        unit.is_allocated = True
        try:
            for arena, _ in unit.arenas:
                arena.allocate_whole()
        except BaseException:
            self._free(unit)
            raise
        unit.gathers += 1
        for arena, channel in unit.arenas:
            for bucket in arena.plan.buckets:
                unit.pending.append(self._gather(unit, arena, bucket, channel))

    def _gather(self, unit: Unit, arena: Arena, bucket: Bucket, channel: int) -> Pending:
        op = Op(
            "gather",
            bucket=bucket.index,
            round=unit.gathers,
            unit=unit.name or "(root)",
            channel=channel,
        )
        shard = arena.parameter_shard(bucket.index)
        return self.transport.gather(arena.bucket(bucket.index), shard, op=op)

    def unshard(self, unit: Unit) -> None:
        """Make a unit whole, and wait until it is."""
        if unit.is_whole:
            return
        with traced("zeroshard::unshard"):
            self._launch(unit)
            self._drain(unit)
            for arena, _ in unit.arenas:
                arena.is_whole = True
            unit.is_whole = True
            self._show(unit)

    def _show(self, unit: Unit) -> None:
        if not unit.is_shown:
            unit.is_shown = True
            for place in unit.places:
                place.show()

    def _hide(self, unit: Unit) -> None:
        if unit.is_shown:
            unit.is_shown = False
            for place in unit.places:
                place.hide()

    def _drain(self, unit: Unit) -> None:
        while unit.pending:
            unit.pending[0].wait()
            unit.pending.pop(0)

    def reshard(self, unit: Unit) -> None:
        """Free a unit that nobody pinned, after taking over what was written to it."""
        if unit.pins or not unit.places:
            return
        self._drain(unit)
        if unit.is_whole and unit.is_shown:
            self.parameters.settle(unit.places)
        if unit.is_allocated:
            self._free(unit)

    def _free(self, unit: Unit) -> None:
        """Free a unit's memory, which nobody reads but autograd, after it is back."""
        unit.is_whole = unit.is_allocated = False
        self._hide(unit)
        for arena, _ in unit.arenas:
            if arena.is_borrowed:
                self._leave(unit, arena)
            arena.free_whole()

    def _leave(self, unit: Unit, arena: Arena) -> None:
        """Leave an arena's memory to others, who share it, and use another one from now on."""
        arena.leave_whole()
        with torch.inference_mode(False):
            for place in unit.places:
                if place.arena is arena:
                    place.renew_view()

    def reshard_all(self, needed: Collection[int] = ()) -> None:
        """Free every unit that is neither pinned nor in `needed` (indices).

        What comes next does not follow from what came before.
        """
        self._idle = self._ahead = None
        self.order.restart()
        for unit in self.units:
            if unit.index not in needed:
                self.reshard(unit)
            for arena, _ in unit.arenas:
                arena.is_reached = arena.is_reached and unit.is_lookup

    def unshard_all(self) -> None:
        """Make every unit whole, for good: they are forgotten."""
        for unit in self.units:
            self.unshard(unit)
            self._show(unit)
            unit.drop(unit.places)
        self.units.clear()
        self._unit_of.clear()
        self._holders.clear()

    # --- zeroshard.gather

    def units_of(self, parameters: Collection[nn.Parameter]) -> list[Unit]:
        """The units that any of `parameters` lives in."""
        known = self.parameters.places
        places = (known[parameter] for parameter in set(parameters) if parameter in known)
        found = {self._unit_of[place] for place in places if place in self._unit_of}
        return sorted(found, key=lambda unit: unit.index)

    def is_pinned(self, index: int) -> bool:
        """Whether a unit is kept whole, or has nothing that could be freed."""
        unit = self.units[index]
        return unit.pins > 0 or not unit.places

    def is_part(self, index: int, tensor: Tensor) -> bool:
        """Whether a tensor lies in the whole parameters of a unit that is not pinned."""
        unit = self.units[index]
        return unit.pins == 0 and any(arena.contains(tensor) for arena, _ in unit.arenas)

    def free(self, place: Place) -> None:
        """Free the unit of a place, unless it is pinned."""
        self.reshard(self._unit_of[place])

    def holds(self, place: Place) -> bool:
        """Whether `zeroshard.gather` keeps a place's unit whole."""
        return self._unit_of[place].pins > 0

    def check_unpinned(self, what: str) -> None:
        """Raise if `zeroshard.gather` keeps any unit whole."""
        if any(unit.pins for unit in self.units):
            raise ConfigError(
                f"{what} inside of zeroshard.gather(), which keeps modules whole: call it outside "
                "of the context"
            )

    def pin(self, unit: Unit) -> None:
        """Make a unit whole and keep it so until it is unpinned as often."""
        self.unshard(unit)
        self._show(unit)
        unit.pins += 1

    def unpin(self, unit: Unit, *, is_needed: bool) -> None:
        """Undo a `pin`; free the unit if nobody else pinned it and nothing goes on inside of it.

        What the user kept of it (a state dict, a detached weight) stays as it is now.
        """
        unit.pins -= 1
        if unit.pins or not unit.places:
            return
        self.parameters.keep_changes(unit.places)
        if is_needed:
            return
        self.parameters.settle(unit.places)
        for arena, _ in unit.arenas:
            if arena.num_holders > self._holders[arena]:
                self._leave(unit, arena)
        self._free(unit)
