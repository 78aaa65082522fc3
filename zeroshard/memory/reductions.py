"""The gradients of a backward on their way into shards: what is held at which time. No values.

Runs the schedule's own actions over the layout's buckets. In which order gradients come is a guess:
the reverse of the module's order, unit by unit.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from ..config import Options
from ..construction import wires_of
from ..layout import ITEMSIZE, KEPT_WHOLE, ArenaPlan, Bucket, Layout, Slot
from ..schedule import Action, Event, Schedule, compile_schedule
from ..storage import size_class
from ..transport.gloo import Gloo
from ..units import ROOT

__all__ = ["TRANSPORTS", "Group", "Held", "Wire", "walk", "walk_alone"]

TRANSPORTS = ("nccl", "gloo")
LAST = (ROOT, KEPT_WHOLE)
"""Units that backward leaves at its end only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """How gradients travel.

    Attributes:
        transport: one of TRANSPORTS; a group of one rank uses neither.
        world_size: ranks that share a bucket.
        rank: whose memory is planned; with gloo the ranks differ by some buffers.
    """

    transport: str
    world_size: int
    rank: int

    @property
    def direct_numel(self) -> int | None:
        """From how many elements a gradient is sent from where it lies; None: never."""
        if self.world_size == 1:
            return 1
        return Gloo.direct_numel if self.transport == "gloo" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Bytes of gradients at a moment of a backward.

    Attributes:
        full: gradients as autograd made them.
        shards: this rank's slices, those that are there now.
        communication: buffers, those that are kept for reuse included.
    """

    full: int
    shards: int
    communication: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.full + self.shards + self.communication


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A unit's turn in backward.

    Attributes:
        unit: its name.
        entered: the most while backward comes to it, which is when the unit before is launched.
        settled: when that is launched.
        first: when its first matrix has its gradient.
        most: the most from then on until backward leaves it.
    """

    unit: str
    entered: Held
    settled: Held
    first: Held
    most: Held


class Pool:
    """The numbers of a `zeroshard.storage.BufferPool`: how many bytes it holds.

    Attributes:
        nbytes: lent out or kept for reuse.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._free: Counter[Size] = Counter()

    def borrow(self, numel: int, dtype: torch.dtype) -> "Size":
        """What is lent, to be given back."""
        size = (size_class(numel), dtype)
        if self._free[size]:
            self._free[size] -= 1
        else:
            self.nbytes += size[0] * dtype.itemsize
        return size

    def give_back(self, size: "Size") -> None:
        """Keep it for reuse."""
        self._free[size] += 1

    def release(self) -> None:
        """Let go of what is kept for reuse."""
        for (numel, dtype), count in self._free.items():
            self.nbytes -= count * numel * dtype.itemsize
        self._free.clear()


Size = tuple[int, torch.dtype]


class Reductions:
    """All buckets of one backward.

    Args:
        layout: who owns what.
        options: the user's choices.
        wire: how gradients travel.
    """

    def __init__(self, layout: Layout, options: Options, wire: Wire) -> None:
        self.layout, self.wire = layout, wire
        self.schedule: Schedule = compile_schedule(options)
        self.wires = [wires_of(arena.dtype, options.precision) for arena in layout.arenas]
        self.pool = Pool()
        self.under_way: deque[tuple[Bucket, list[Size], list[int]]] = deque()
        self.full = 0
        keeps_shards = Action.FREE_GRADIENTS not in self.schedule.actions(Event.ZERO_GRAD)
        self.with_shard = set(range(len(layout.arenas))) if keeps_shards else set()
        self.shards = sum(_shard_nbytes(layout, index) for index in self.with_shard)
        self.slots_of: list[list[int]] = [[] for _ in layout.buckets]
        self.missing = [0] * len(layout.buckets)
        self.unlaunched = [0] * len(layout.slots)
        self.sent_directly = [0] * len(layout.slots)
        for slot in layout.slots:
            for bucket in buckets_of(slot, layout.arenas[slot.arena]):
                self.slots_of[bucket.index].append(slot.index)
                self.missing[bucket.index] += 1
                self.unlaunched[slot.index] += 1
        self.waiting = deque(range(len(layout.buckets)))
        self.most = self.now()

    def now(self) -> Held:
        """What is held."""
        return Held(full=self.full, shards=self.shards, communication=self.pool.nbytes)

    def note(self) -> None:
        """Remember what is held, if that is the most since `most` was set."""
        now = self.now()
        if now.total > self.most.total:
            self.most = now

    def take_most(self) -> Held:
        """The most since the last time."""
        self.note()
        most, self.most = self.most, self.now()
        return most

    def arrive(self, slot: int) -> None:
        """Autograd made a gradient."""
        self.full += _grad_nbytes(self.layout.slots[slot])
        self.note()
        for bucket in buckets_of(self.layout.slots[slot], self._arena(slot)):
            self.missing[bucket.index] -= 1
        if not self.schedule.launches_by_unit:
            while self.waiting and self.missing[self.waiting[0]] == 0:
                self.execute(Event.GRAD_READY, self.waiting.popleft())

    def leave(self, units: set[str]) -> None:
        """Backward has come to another unit than these: launch them."""
        if self.schedule.launches_by_unit:
            for bucket in list(self.waiting):
                if self.layout.arenas[self.layout.buckets[bucket].arena].unit in units:
                    self.waiting.remove(bucket)
                    self.execute(Event.GRAD_READY, bucket)

    def end(self) -> None:
        """Backward is over."""
        while self.waiting:
            self.execute(Event.GRAD_READY, self.waiting.popleft())
        self.note()
        self.execute(Event.BACKWARD_END, -1)

    def execute(self, event: Event, bucket: int) -> None:
        """Do what the schedule says, as far as it concerns gradients."""
        for action in self.schedule.actions(event):
            if action in ACTIONS:
                ACTIONS[action](self, bucket)
                self.note()

    def launch(self, bucket: int) -> None:
        """Borrow what the reduction of a bucket needs."""
        plan = self.layout.buckets[bucket]
        if plan.arena not in self.with_shard:
            self.with_shard.add(plan.arena)
            self.shards += _shard_nbytes(self.layout, plan.arena)
        packed, direct = self._packed(plan)
        borrowed = [self.pool.borrow(*size) for size in (*packed, *self._arriving(plan))]
        self.note()
        self.under_way.append((plan, borrowed, direct))
        for slot in direct:
            self.sent_directly[slot] += 1
        for slot in self.slots_of[bucket]:
            self.unlaunched[slot] -= 1
            self._free(slot)

    def drain(self, at_most: int) -> None:
        """Wait for the oldest reductions."""
        while len(self.under_way) > at_most:
            _, borrowed, direct = self.under_way.popleft()
            for buffer in borrowed:
                self.pool.give_back(buffer)
            for slot in direct:
                self.sent_directly[slot] -= 1
                self._free(slot)

    def drain_others(self, bucket: int) -> None:
        """Wait for the oldest reductions until one of this bucket's unit comes."""
        unit = self._unit(self.layout.buckets[bucket])
        others = 0
        for plan, _, _ in self.under_way:
            if self._unit(plan) == unit:
                break
            others += 1
        self.drain(len(self.under_way) - others)

    def _unit(self, bucket: Bucket) -> str:
        return self.layout.arenas[bucket.arena].unit

    def _arena(self, slot: int) -> ArenaPlan:
        return self.layout.arenas[self.layout.slots[slot].arena]

    def _free(self, slot: int) -> None:
        if self.unlaunched[slot] == 0 and self.sent_directly[slot] == 0:
            self.full -= _grad_nbytes(self.layout.slots[slot])

    def _packed(self, bucket: Bucket) -> tuple[list[Size], list[int]]:
        """What is packed, and the slots whose gradients are sent from where they lie."""
        arena = self.layout.arenas[bucket.arena]
        dtype, _ = self.wires[bucket.arena]
        if self.wire.direct_numel is None:
            return [(bucket.numel, dtype)], []
        packed, direct = [], []
        for segment in self.layout.segments(bucket.index, self.wire.direct_numel):
            if segment.direct and str(dtype) == f"torch.{arena.dtype}":
                direct.append(segment.slots[0])
            else:
                packed.append((segment.numel, dtype))
        return packed, direct if self.wire.world_size > 1 else []

    def _arriving(self, bucket: Bucket) -> list[Size]:
        """Where other ranks' gradients arrive."""
        dtype, sum_dtype = self.wires[bucket.arena]
        others = self.wire.world_size - 1
        if not others:
            return []
        if self.wire.transport != "gloo":
            return [] if dtype == sum_dtype else [(bucket.numel, dtype)]
        start = self.wire.rank * bucket.shard_numel
        stop = start + bucket.shard_numel
        segments = self.layout.segments(bucket.index, self.wire.direct_numel)
        mine = sum(max(min(s.stop, stop) - max(s.start, start), 0) for s in segments)
        in_place = self.schedule.spares_buffers and {dtype, sum_dtype} == {torch.float32}
        return [(mine, dtype)] * (others - in_place) if mine else []


ACTIONS: Mapping[Action, Callable[[Reductions, int], None]] = {
    Action.REDUCE: Reductions.launch,
    Action.DRAIN: lambda reductions, _: reductions.drain(reductions.schedule.in_flight),
    Action.DRAIN_OTHERS: Reductions.drain_others,
    Action.WAIT: lambda reductions, _: reductions.drain(0),
    Action.RELEASE: lambda reductions, _: reductions.pool.release(),
}


def buckets_of(slot: Slot, arena: ArenaPlan) -> Sequence[Bucket]:
    """The buckets that hold a part of a slot; none for a zero-size slot."""
    if slot.numel == 0:
        return ()
    numel = arena.buckets[0].numel
    return arena.buckets[slot.offset // numel : (slot.offset + slot.numel - 1) // numel + 1]


def _grad_nbytes(slot: Slot) -> int:
    return slot.numel * ITEMSIZE[slot.spec.dtype]


def _shard_nbytes(layout: Layout, arena: int) -> int:
    return 4 * (layout.arenas[arena].numel // layout.world_size)


def walk(
    layout: Layout,
    options: Options,
    wire: Wire,
    units: Sequence[str],
    lookups: Collection[str] = (),
) -> tuple[list[Group], Held, Held]:
    """A backward of the second step or a later one, unit by unit.

    Args:
        layout: who owns what.
        options: the user's choices.
        wire: how gradients travel.
        units: [slots] the unit in whose backward a slot's gradient is made.
        lookups: units that backward comes to unnoticed, since nothing is gathered for them.

    Returns:
        The groups, the most at the end of backward, and what is left behind it.
    """
    reductions = Reductions(layout, options, wire)
    if Action.RELEASE not in reductions.schedule.actions(Event.BACKWARD_END):
        # The buffers of the backward before are still there.
        again = Reductions(layout, options, wire)
        for slot in reversed(range(len(units))):
            again.arrive(slot)
        again.end()
        reductions.pool = again.pool
        reductions.take_most()
    groups = []
    order = [(slot, units[slot]) for slot in reversed(range(len(units)))]
    remaining = [unit for unit, _ in groupby(order, key=lambda entry: entry[1])]
    before: set[str] = set()
    for unit, members in groupby(order, key=lambda entry: entry[1]):
        remaining.pop(0)
        if unit not in lookups and not (unit == ROOT and ROOT in before):
            reductions.leave(before.difference(remaining, {unit}, LAST))
        before.add(unit)
        entered, settled = reductions.take_most(), reductions.now()
        first = None
        # Experts, stacked, before the router that weighs them; vectors last: norms come behind the
        # matrices that they feed.
        shapes = {slot: layout.slots[slot].spec.shape for slot, _ in members}
        for slot in sorted(shapes, key=lambda slot: -max(len(shapes[slot]), 1)):
            reductions.arrive(slot)
            if first is None and len(layout.slots[slot].spec.shape) > 1:
                first = reductions.now()
        most = reductions.take_most()
        groups.append(
            Group(unit=unit, entered=entered, settled=settled, first=first or most, most=most)
        )
    reductions.leave(before.difference(LAST))
    reductions.end()
    most = reductions.take_most()
    return groups, most, reductions.now()


def walk_alone(layout: Layout, units: Sequence[str]) -> tuple[list[Group], Held, Held]:
    """As `walk`, without a process group: gradients stay where autograd makes them."""
    full, groups = 0, []
    order = [(slot, units[slot]) for slot in reversed(range(len(units)))]
    for unit, members in groupby(order, key=lambda entry: entry[1]):
        entered, first = _plain(full), None
        for slot, _ in members:
            full += _grad_nbytes(layout.slots[slot])
            if first is None and len(layout.slots[slot].spec.shape) > 1:
                first = _plain(full)
        most = _plain(full)
        groups.append(
            Group(unit=unit, entered=entered, settled=entered, first=first or most, most=most)
        )
    return groups, _plain(full), _plain(full)


def _plain(full: int) -> Held:
    return Held(full=full, shards=0, communication=0)
