"""A bucket's reduce-scatter: pack the gradients, launch, wait, give the memory back."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from .gradient_shards import GradientShards
from .layout import Layout, Segment
from .storage import BufferPool
from .transport import Op, Part, Pending, Transport

__all__ = ["Reducer"]


@dataclass(slots=True, kw_only=True)
class Reduction:
    """A reduce-scatter under way and what has to live until it is over."""

    bucket: int
    pending: Pending
    borrowed: list[Tensor]
    out: Tensor
    scratch: Tensor | None  # the sum, where it is added to an earlier gradient


class Piece(NamedTuple):
    """A slot's part of a segment: elements [start, start + numel) of the slot."""

    view: int  # which one of the segment's `sizes`
    slot: int
    start: int
    numel: int


class Packing(NamedTuple):
    """How a segment is put together from gradients and padding."""

    segment: Segment
    sizes: list[int]
    pieces: list[Piece]
    padding: list[int]  # which of `sizes`


def _plan_packing(layout: Layout, bucket: int, segment: Segment) -> Packing:
    packing = Packing(segment, [], [], [])

    def pad(numel: int) -> None:
        if numel:
            packing.padding.append(len(packing.sizes))
            packing.sizes.append(numel)

    filled = segment.start
    for slot in segment.slots:
        start, stop = layout.part(bucket, slot)
        pad(start - filled)
        first = layout.buckets[bucket].offset + start - layout.slots[slot].offset
        packing.pieces.append(Piece(len(packing.sizes), slot, first, stop - start))
        packing.sizes.append(stop - start)
        filled = stop
    pad(segment.stop - filled)
    return packing


class Reducer:
    """Turns the full gradients of one rank into gradient shards, bucket by bucket.

    Attributes:
        flags: [buckets] fp32, 1 where a reduction of the bucket found an Inf or a NaN.
    """

    def __init__(
        self, transport: Transport, pool: BufferPool, shards: GradientShards, scale: float
    ) -> None:
        self.transport, self.pool, self.shards, self.scale = transport, pool, shards, scale
        self.under_way: deque[Reduction] = deque()

    def attach(self, layout: Layout, wires: list[tuple[torch.dtype, torch.dtype]]) -> None:
        """Serve the buckets of `layout`.

        Args:
            layout: the whole layout.
            wires: for each arena the dtype on the wire and that of the sum.
        """
        self.layout, self.wires = layout, wires
        arenas = self.shards.arenas
        device = arenas[0].device if arenas else torch.device("cpu")
        self.flags = torch.zeros(len(layout.buckets), dtype=torch.float32, device=device)
        self.inv_scale = torch.full((1,), self.scale, dtype=torch.float32, device=device)
        direct_numel = self.transport.direct_numel
        self.packings = [
            [
                _plan_packing(layout, bucket.index, segment)
                for segment in layout.segments(bucket.index, direct_numel)
            ]
            for bucket in layout.buckets
        ]

    def launch(
        self, bucket: int, gradients: Mapping[int, Tensor], *, add: bool, round_number: int
    ) -> None:
        """Start the reduce-scatter of a bucket.

        Args:
            bucket: index of the bucket.
            gradients: slot -> full gradient; a slot of the bucket that is missing counts as zero.
            add: to the shard as it is, instead of overwriting it.
            round_number: which backward this is.
        """
        plan = self.layout.buckets[bucket]
        unit = self.layout.arenas[plan.arena].unit
        wire, sum_dtype = self.wires[plan.arena]
        borrowed: list[Tensor] = []
        parts = [
            Part(packing.segment.start, self._pack(packing, wire, gradients, borrowed))
            for packing in self.packings[bucket]
        ]
        out = self.shards.of_bucket(bucket)
        flag = self.flags[bucket : bucket + 1]
        scratch = None
        if add:
            scratch = self.pool.borrow(out.numel(), out.dtype, out.device).zero_()
        else:
            flag.zero_()
        pending = self.transport.reduce(
            parts,
            out if scratch is None else scratch,
            op=Op("reduce", bucket=bucket, round=round_number, unit=unit),
            sum_dtype=sum_dtype,
            finish=partial(_scale_and_check, flag, self.inv_scale),
        )
        self.under_way.append(
            Reduction(bucket=bucket, pending=pending, borrowed=borrowed, out=out, scratch=scratch)
        )

    def drain(self, at_most: int) -> list[int]:
        """Wait for the oldest reductions until `at_most` are under way; the buckets that ended."""
        return [self._end_oldest() for _ in range(len(self.under_way) - at_most)]

    def drain_others(self, bucket: int) -> list[int]:
        """Wait for the oldest reductions until one of this bucket's unit comes; which ended."""
        ended = []
        while self.under_way and self._unit(self.under_way[0].bucket) != self._unit(bucket):
            ended.append(self._end_oldest())
        return ended

    def _unit(self, bucket: int) -> str:
        return self.layout.arenas[self.layout.buckets[bucket].arena].unit

    def _end_oldest(self) -> int:
        reduction = self.under_way.popleft()
        reduction.pending.wait()
        if reduction.scratch is not None:
            reduction.out.add_(reduction.scratch)
            self.pool.give_back(reduction.scratch)
        for buffer in reduction.borrowed:
            self.pool.give_back(buffer)
        return reduction.bucket

    def _pack(
        self,
        packing: Packing,
        wire: torch.dtype,
        gradients: Mapping[int, Tensor],
        borrowed: list[Tensor],
    ) -> Tensor:
        """A segment's gradients as one flat tensor: the gradient itself, or a packed copy."""
        segment = packing.segment
        if segment.direct:
            piece = self._piece(packing.pieces[0], gradients)
            if piece is not None and piece.dtype == wire:
                return piece
        packed = self.pool.borrow(segment.numel, wire, self.flags.device)
        borrowed.append(packed)
        views = packed.split_with_sizes(packing.sizes)
        filled: list[Tensor] = []
        pieces: list[Tensor] = []
        for place in packing.pieces:
            piece = self._piece(place, gradients)
            if piece is None:
                views[place.view].zero_()
            else:
                filled.append(views[place.view])
                pieces.append(piece)
        if filled:
            torch._foreach_copy_(filled, pieces)
        for padding in packing.padding:
            views[padding].zero_()
        return packed

    def _piece(self, place: Piece, gradients: Mapping[int, Tensor]) -> Tensor | None:
        """A slot's gradient in storage order, as far as it lies in the bucket."""
        grad = gradients.get(place.slot)
        if grad is None:
            return None
        flat = self.shards.slices[place.slot].flatten(grad)
        return (
            flat if flat.numel() == place.numel else flat[place.start : place.start + place.numel]
        )


def _scale_and_check(flag: Tensor, scale: Tensor, piece: Tensor) -> None:
    """Multiply by the scale and raise the flag at an Inf or NaN, in one pass."""
    torch._amp_foreach_non_finite_check_and_unscale_([piece], flag, scale)
