"""The gradient shards and the ShardTensors that show them as `p.grad`. No communication."""

import sys
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .clipping import GradientNorms
from .layout import Layout
from .shard_tensor import ShardTensor, Slices
from .storage import Arena
from .transport import Transport

__all__ = ["GradientShards"]


class GradientShards:
    """One flat fp32 shard an arena, and for each slot the ShardTensor around its range.

    ShardTensors are made once and handed out again, unless somebody kept the last one: that one
    then takes its values along, as a gradient kept across steps does in torch.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.slices: list[Slices] = []
        self._handles: list[ShardTensor | None] = []
        self._zero: set[int] = set()  # slots whose range is zero

    def attach(self, layout: Layout, arenas: Sequence[Arena]) -> None:
        """Serve the slots of `layout`, which extends the one before."""
        self.layout, self.arenas = layout, list(arenas)
        self.norms = GradientNorms(layout, arenas, self.transport)
        known = len(self.slices)
        self.slices += [Slices.of_slot(layout, slot.index) for slot in layout.slots[known:]]
        for slot, handle in enumerate(self._handles):
            if handle is not None:
                handle.siblings = self.norms.of_slot(slot)
        self._handles += [None] * (len(layout.slots) - known)
        rank = self.transport.rank
        self._ranges = [layout.local_range(slot.index, rank) for slot in layout.slots]
        self._zero.update(range(known, len(layout.slots)))

    def detach(self) -> None:
        """Let go of all arenas; ShardTensors that somebody kept keep their values."""
        self._handles.clear()
        self.arenas.clear()
        self.norms = GradientNorms(self.layout, [], self.transport)

    def arena_of(self, slot: int) -> Arena:
        """The arena that a slot lies in."""
        return self.arenas[self.layout.slots[slot].arena]

    def local(self, slot: int) -> Tensor:
        """[slice's numel] fp32: the slot's range of this rank's shard."""
        start, stop = self._ranges[slot]
        return self._of_arena(self.arena_of(slot))[start:stop]

    def _of_arena(self, arena: Arena) -> Tensor:
        """[shard_numel] fp32: the arena's gradient shard, which is shown by the ShardTensors."""
        if arena.gradients is not None:
            return arena.gradients
        gradients = arena.allocate_gradients()
        for slot in arena.plan.slots:
            self._zero.add(slot.index)
            handle = self._handles[slot.index]
            if handle is not None:
                start, stop = self._ranges[slot.index]
                handle._local_tensor = gradients[start:stop]
        return gradients

    def of_bucket(self, bucket: int) -> Tensor:
        """[bucket.shard_numel] fp32."""
        plan = self.layout.buckets[bucket]
        gradients = self._of_arena(self.arenas[plan.arena])
        return gradients[plan.shard_offset : plan.shard_offset + plan.shard_numel]

    def handle(self, slot: int) -> ShardTensor:
        """What to set the parameter's `grad` to."""
        handle = self._handles[slot]
        if handle is None:
            norm = self.norms.of_slot(slot)
            handle = ShardTensor(self.local(slot), self.slices[slot], self.transport, norm)
            self._handles[slot] = handle
        return handle

    def shows(self, slot: int, grad: Tensor) -> bool:
        """Whether `grad` is the slot's range itself."""
        return grad is self._handles[slot]

    def about_to_change(self, slot: int) -> None:
        """Before other values come into the slot's range."""
        arena = self.arena_of(slot)
        was_free = arena.gradients is None
        self._of_arena(arena)
        self._zero.discard(slot)
        if was_free:
            return
        # No local variable may name the handle before the question: it would count as a holder.
        if self._handles[slot] is None or not _is_held(self._handles, slot):
            return
        handle, self._handles[slot] = self._handles[slot], None
        assert handle is not None
        handle._local_tensor.data = handle._local_tensor.clone()  # also for what shares it
        handle.siblings = None

    def is_free(self, bucket: int) -> bool:
        """Whether a bucket's shard has no memory, so that no parameter shows a gradient there."""
        return self.arenas[self.layout.buckets[bucket].arena].gradients is None

    def about_to_fill(self, slots: Collection[int]) -> None:
        """`about_to_change` for slots whose shard has no memory yet."""
        for slot in slots:
            self._of_arena(self.arena_of(slot))
            break
        self._zero.difference_update(slots)

    def write(self, slot: int, local: Tensor) -> None:
        """Copy this rank's slice of a gradient into its range."""
        self.about_to_change(slot)
        self.local(slot).copy_(local)

    def is_zero(self, slot: int) -> None:
        """The slot's range was overwritten with zeros."""
        self._zero.add(slot)

    def clear(self, slot: int) -> bool:
        """Zero the range of a slot without a gradient; whether it was not zero before."""
        if slot in self._zero or self.arena_of(slot).gradients is None:
            return False
        self.about_to_change(slot)
        self.local(slot).zero_()
        self._zero.add(slot)
        return True

    def clear_in_bucket(self, bucket: int, slots: Iterable[int]) -> None:
        """Zero the parts of `slots` that lie in one bucket's shard."""
        for slot in slots:
            for run in self.layout.runs_of_rank(self.transport.rank)[slot]:
                if run.bucket == bucket:
                    gradients = self._of_arena(self.arena_of(slot))
                    gradients[run.shard_offset : run.shard_offset + run.numel].zero_()

    def zero_buckets(self) -> list[int]:
        """Buckets of which every slot's range is zero."""
        slots_of = self.layout.slots_of_bucket
        return [b for b, slots in enumerate(slots_of) if self._zero.issuperset(slots)]

    def versions(self) -> list[int]:
        """Changes whenever a shard is written to, by whomever."""
        return [-1 if a.gradients is None else a.gradients._version for a in self.arenas]

    def free_unused(self, parameters: Sequence[nn.Parameter]) -> None:
        """Let go of the shards of arenas of which no parameter shows a gradient.

        A ShardTensor that somebody kept keeps the old memory alive, and a new one is made.
        """
        for arena in self.arenas:
            slots = [slot.index for slot in arena.plan.slots]
            if arena.gradients is None or any(parameters[s].grad is not None for s in slots):
                continue
            for slot in slots:
                # As above, no local variable may name the handle before the question.
                is_kept = self._handles[slot] is not None and _is_held(self._handles, slot)
                handle = self._handles[slot]
                if handle is not None and is_kept:
                    handle.siblings = None
                    self._handles[slot] = None
                elif handle is not None:
                    handle._local_tensor = _NOTHING
                del handle
            arena.gradients = None

    def free(self) -> None:
        """Let go of the memory; ShardTensors that somebody kept take their values along."""
        for slot in range(len(self._handles)):
            self.about_to_change(slot)
            self._handles[slot] = None
        for arena in self.arenas:
            arena.gradients = None
        self._zero = set(range(len(self._handles)))


def _references(handles: list[Any], index: int) -> int:
    return sys.getrefcount(handles[index]) + sys.getrefcount(handles[index]._local_tensor)


class _Probe:
    def __init__(self) -> None:
        self._local_tensor = object()


_NOTHING = torch.empty(0)
_UNHELD = _references([_Probe()], 0)


def _is_held(handles: list[Any], index: int) -> bool:
    """Whether anything but the list has the ShardTensor or its local tensor."""
    return _references(handles, index) > _UNHELD
