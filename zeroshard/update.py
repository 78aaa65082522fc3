"""AdamW on this rank's shards, in whatever format the state is kept. No communication.

The arithmetic is torch's fused AdamW on fp32 values. A range handed to it ends where its slot ends
and starts at a multiple of 256 elements, which makes the result bitwise that of the whole tensor.

Source: Loshchilov & Hutter 2019, arXiv:1711.05101, algorithm 2.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .formats import Format
from .layout import Layout
from .storage import Arena, on_device
from .triton_kernels.cast import join_master, split_master

__all__ = [
    "StepCounters",
    "Updater",
    "Work",
    "exact_master",
    "reread_master",
    "restore_master",
    "seed_master",
]

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
        for run in layout.runs_of_slot[slot]
        if run.bucket == bucket and run.rank == rank
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


class StepCounters:
    """How many updates each slot has had, on the device.

    Attributes:
        counts: [slots] fp32.
        views: for each slot the [] fp32 tensor that optimizer.state shows as `step`.
    """

    def __init__(self) -> None:
        self.counts = torch.empty(0, dtype=torch.float32)
        self.views: list[Tensor] = []

    def extend(self, num_slots: int, device: torch.device) -> None:
        """Make room for `num_slots` in all; the views that were handed out stay valid."""
        known = len(self.views)
        counts = torch.zeros(num_slots, dtype=torch.float32, device=device)
        counts[:known].copy_(self.counts)
        self.counts = counts
        for slot, view in enumerate(self.views):
            view.data = counts[slot]
        self.views += [counts[slot] for slot in range(known, num_slots)]

    def advance(self, used: Sequence[int], found_inf: Tensor | None) -> None:
        """Count an update of the slots `used`, unless `found_inf` [1] says that it is skipped."""
        advance = torch.ones_like(self.counts[:1]) if found_inf is None else 1 - found_inf
        if len(used) == len(self.views):
            self.counts.add_(advance)
        else:
            self.counts[on_device(used, torch.int64, self.counts.device)] += advance


class Updater:
    """The update of one arena's shards on this rank.

    Attributes:
        steps: [slots] fp32, how many updates each slot has had; advanced by the caller.
    """

    def __init__(self, arena: Arena, layout: Layout, fmt: Format, steps: Sequence[Tensor]) -> None:
        self.arena, self.layout, self.format, self.steps = arena, layout, fmt, steps
        whole = max((bucket.shard_numel for bucket in arena.plan.buckets), default=1)
        chunk_numel = whole if fmt.master == "param" else CHUNK.get(arena.device.type, whole)
        self.chunks = {
            bucket.index: plan_chunks(layout, bucket.index, arena.rank, chunk_numel)
            for bucket in arena.plan.buckets
        }
        self._views: dict[int, tuple[Tensor, ...]] = {}

    def plan(self, bucket: int, group_of: Mapping[int, int]) -> Work:
        """What to update of a bucket.

        Args:
            bucket: index of the bucket.
            group_of: slot -> number of its param group, for slots that have a gradient.
        """
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
        bucket: int,
        work: Work,
        param_groups: Sequence[dict[str, Any]],
        found_inf: Tensor | None,
    ) -> None:
        """Update this rank's shard of a bucket, in place.

        Args:
            bucket: index of the bucket.
            work: what `plan` made for it.
            param_groups: torch's param groups.
            found_inf: [1] fp32; where it is 1 nothing changes. None: always update.
        """
        shard = self.arena.parameter_shard(bucket)
        masters = MASTERS[self.format.master]
        offset = self.layout.buckets[bucket].shard_offset
        for chunk, by_group in work:
            high = shard[chunk.start : chunk.stop]
            state = {
                name: flat[offset + chunk.start : offset + chunk.stop]
                for name, flat in self.arena.state.items()
            }
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


@dataclass(frozen=True, slots=True)
class Master:
    """How an fp32 master is read from its format, and written back with the parameter."""

    load: Callable[[Tensor, dict[str, Tensor]], Tensor]  # (parameter, state) -> [n] fp32
    store: Callable[[Tensor, Tensor, dict[str, Tensor]], None]  # (master, parameter, state)


def _load_split(high: Tensor, state: dict[str, Tensor]) -> Tensor:
    master = torch.empty(high.numel(), dtype=torch.float32, device=high.device)
    join_master(high, state["remainder"], master)
    return master


def _store_split(master: Tensor, high: Tensor, state: dict[str, Tensor]) -> None:
    split_master(master, high, state["remainder"])


def _store_cast(master: Tensor, parameter: Tensor, state: dict[str, Tensor]) -> None:
    parameter.copy_(master)


MASTERS = {
    "param": Master(lambda parameter, state: parameter, lambda master, parameter, state: None),
    "split": Master(_load_split, _store_split),
    "fp32": Master(lambda parameter, state: state["master"], _store_cast),
    "none": Master(lambda parameter, state: parameter.float(), _store_cast),
}


def seed_master(values: Tensor, parameter: Tensor, state: dict[str, Tensor], master: str) -> None:
    """Start the masters from `values` [n] fp32 and give `parameter` [n] their rounding."""
    if "master" in state:
        state["master"].copy_(values)
    MASTERS[master].store(values, parameter, state)


def reread_master(parameter: Tensor, state: dict[str, Tensor], written: Tensor) -> None:
    """Take over what was written to a parameter.

    Args:
        parameter: [n], this rank's elements.
        state: their state.
        written: [n] bool, elements that may have been written to: a split master loses its lower
            half there. An fp32 master tells by itself: it changes where the parameter is not its
            rounding any more.
    """
    if "remainder" in state:
        state["remainder"].masked_fill_(written, 0)
    if "master" in state:
        master = state["master"]
        changed = master.to(parameter.dtype) != parameter
        master.copy_(torch.where(changed, parameter.float(), master))


def exact_master(parameter: Tensor, state: dict[str, Tensor]) -> Tensor | None:
    """[n] fp32 copy of the master where it says more than the parameter, else None."""
    if "remainder" in state:
        return _load_split(parameter, state)
    return state["master"].clone() if "master" in state else None


def restore_master(values: Tensor, parameter: Tensor, state: dict[str, Tensor]) -> None:
    """Set masters to `values` [n] fp32, for a parameter that holds their rounding already.

    Where it does not, the parameter was changed since and stands. A split master rounds ties away
    from zero: of a parameter that was rounded to even from a tie it keeps the nearest value that
    it can, one fp32 step beside.
    """
    if "master" in state:
        rounded = values.to(parameter.dtype) == parameter
        state["master"].copy_(torch.where(rounded, values, parameter.float()))
    if "remainder" in state:
        distance = values.view(torch.int32).long() - (parameter.float().view(torch.int32).long())
        near = distance.abs() <= 32768
        state["remainder"].copy_(torch.where(near, distance.clamp(-32768, 32767), 0))
