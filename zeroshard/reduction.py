"""A bucket's reduce-scatter: pack the gradients, launch, wait, give the memory back."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

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
        self.segments = [
            layout.segments(bucket.index, self.transport.direct_numel) for bucket in layout.buckets
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
            Part(segment.start, self._pack(segment, bucket, wire, gradients, borrowed))
            for segment in self.segments[bucket]
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
        segment: Segment,
        bucket: int,
        wire: torch.dtype,
        gradients: Mapping[int, Tensor],
        borrowed: list[Tensor],
    ) -> Tensor:
        """The segment's gradients as one flat tensor: the gradient itself, or a packed copy."""
        if segment.direct:
            piece = self._piece(segment.slots[0], bucket, gradients)
            if piece is not None and piece.dtype == wire:
                return piece
        packed = self.pool.borrow(segment.numel, wire, self.flags.device)
        borrowed.append(packed)
        filled = 0
        for slot in segment.slots:
            start, stop = (edge - segment.start for edge in self.layout.part(bucket, slot))
            piece = self._piece(slot, bucket, gradients)
            packed[filled:start].zero_()  # padding
            if piece is None:
                packed[start:stop].zero_()
            else:
                packed[start:stop].copy_(piece)
            filled = stop
        packed[filled:].zero_()
        return packed

    def _piece(self, slot: int, bucket: int, gradients: Mapping[int, Tensor]) -> Tensor | None:
        """The slot's gradient in storage order, as far as it lies in the bucket."""
        grad = gradients.get(slot)
        if grad is None:
            return None
        start, stop = self.layout.part(bucket, slot)
        first = self.layout.buckets[bucket].offset + start - self.layout.slots[slot].offset
        return self.shards.slices[slot].flatten(grad)[first : first + stop - start]


def _scale_and_check(flag: Tensor, scale: Tensor, piece: Tensor) -> None:
    """Multiply by the scale and raise the flag at an Inf or NaN, in one pass."""
    torch._amp_foreach_non_finite_check_and_unscale_([piece], flag, scale)
