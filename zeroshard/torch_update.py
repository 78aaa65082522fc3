"""AdamW by torch's fused kernel on pieces of this rank's shards. No communication.

The arithmetic is torch's fused AdamW on fp32 values. A range handed to it ends where its slot ends
and starts at a multiple of 256 elements, which makes the result bitwise that of the whole tensor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .conversions import MASTERS
from .formats import Format
from .layout import Layout
from .storage import Arena

__all__ = ["TorchUpdater"]

CHUNK = {"cpu": 32768}  # elements of fp32 master made at a time, so that it stays in the cache


@dataclass(frozen=True, slots=True)
class Piece:
    """A slot's elements [start, stop) of this rank's flat shard, and where they are in a chunk."""

    slot: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A range of a bucket's shard that is updated together."""

    start: int  # in the bucket's shard
    stop: int
    pieces: tuple[Piece, ...]


def plan_chunks(layout: Layout, bucket: int, rank: int, chunk_numel: int) -> tuple[Chunk, ...]:
    """Cut a bucket's shard into ranges of at most `chunk_numel` elements; padding is left out."""
    plan = layout.buckets[bucket]
    runs = [
        run
        for slot in layout.slots_of_bucket[bucket]
        for run in layout.runs_of_rank(rank)[slot]
        if run.bucket == bucket
    ]
    chunks = []
    for start in range(0, plan.shard_numel, chunk_numel):
        stop = min(start + chunk_numel, plan.shard_numel)
        first, last = plan.shard_offset + start, plan.shard_offset + stop
        pieces = tuple(
            Piece(run.slot, max(run.shard_offset, first), min(run.shard_offset + run.numel, last))
            for run in runs
            if run.shard_offset < last and run.shard_offset + run.numel > first
        )
        if pieces:
            chunks.append(Chunk(start, stop, pieces))
    return tuple(chunks)


Work = list[tuple[Chunk, dict[int, list[Piece]]]]
"""Chunks to update, each with its pieces by the number of their param group."""


class TorchUpdater:
    """The update of one arena's shards on this rank.

    Args:
        arena: the memory.
        layout: who owns what.
        fmt: how the state is stored, with fp32 moments.
        steps: [slots] fp32, how many updates each slot has had; advanced by the caller.
    """

    takes_coefficient = False

    def __init__(self, arena: Arena, layout: Layout, fmt: Format, steps: Sequence[Tensor]) -> None:
        self.arena, self.layout, self.format, self.steps = arena, layout, fmt, steps
        whole = max((bucket.shard_numel for bucket in arena.plan.buckets), default=1)
        chunk_numel = whole if fmt.master == "param" else CHUNK.get(arena.device.type, whole)
        self.chunks = {
            bucket.index: plan_chunks(layout, bucket.index, arena.rank, chunk_numel)
            for bucket in arena.plan.buckets
        }
        self._views: dict[int, tuple[Tensor, ...]] = {}
        self._work: dict[int, Work] = {}  # by bucket

    def plan(self, group_of: Mapping[int, int], buckets: Sequence[int]) -> list[list[int]]:
        """What to update in one go each.

        Args:
            group_of: slot -> number of its param group, for slots that have a gradient.
            buckets: those of the arena in which a slot has a gradient, in order.

        Returns:
            Each bucket on its own: its gather goes on while the next one is updated.
        """
        self._work = {bucket: self._plan(bucket, group_of) for bucket in buckets}
        return [[bucket] for bucket in buckets]

    def _plan(self, bucket: int, group_of: Mapping[int, int]) -> Work:
        work: Work = []
        for chunk in self.chunks[bucket]:
            by_group: dict[int, list[Piece]] = {}
            for piece in chunk.pieces:
                if piece.slot in group_of:
                    by_group.setdefault(group_of[piece.slot], []).append(piece)
            if by_group:
                work.append((chunk, by_group))
        return work

    def update(
        self,
        buckets: Sequence[int],
        param_groups: Sequence[dict[str, Any]],
        found_inf: Tensor | None,
        coefficient: Tensor | None = None,
    ) -> None:
        """Update this rank's shards of some of the buckets, in place.

        Args:
            buckets: a list that `plan` made.
            param_groups: torch's param groups.
            found_inf: [1] fp32; where it is 1 nothing changes. None: always update.
            coefficient: None; the gradients have been multiplied by it.
        """
        for bucket in buckets:
            self._update(bucket, param_groups, found_inf)

    def _update(
        self, bucket: int, param_groups: Sequence[dict[str, Any]], found_inf: Tensor | None
    ) -> None:
        shard = self.arena.parameter_shard(bucket)
        masters = MASTERS[self.format.master]
        offset = self.layout.buckets[bucket].shard_offset
        for chunk, by_group in self._work[bucket]:
            high = shard[chunk.start : chunk.stop]
            state = self.arena.state_of(offset + chunk.start, offset + chunk.stop)
            master = masters.load(high, state)
            for number, pieces in by_group.items():
                self._adamw(param_groups[number], pieces, master, offset + chunk.start, found_inf)
            masters.store(master, high, state)

    def forget_gradients(self) -> None:
        """Let go of views of a gradient shard that was freed."""
        if self.arena.gradients is None:
            self._views.clear()

    def _adamw(
        self,
        group: dict[str, Any],
        pieces: Sequence[Piece],
        master: Tensor,
        offset: int,
        found_inf: Tensor | None,
    ) -> None:
        views = [self._state_of(piece) for piece in pieces]
        beta1, beta2 = group["betas"]
        torch._fused_adamw_(
            [master[piece.start - offset : piece.stop - offset] for piece in pieces],
            [view[0] for view in views],
            [view[1] for view in views],
            [view[2] for view in views],
            [],
            [self.steps[piece.slot] for piece in pieces],
            amsgrad=False,
            lr=group["lr"],
            beta1=float(beta1),
            beta2=float(beta2),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
            grad_scale=None,
            found_inf=found_inf,
        )

    def _state_of(self, piece: Piece) -> tuple[Tensor, ...]:
        """Gradient and moments of a piece; views are made once for each gradient shard."""
        views = self._views.get(piece.start)
        if views is None:
            flats = (
                self.arena.allocate_gradients(),
                self.arena.state["exp_avg"],
                self.arena.state["exp_avg_sq"],
            )
            views = tuple(flat[piece.start : piece.stop] for flat in flats)
            self._views[piece.start] = views
        return views
