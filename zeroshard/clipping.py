"""Norms, the non-finite flag and the one small all-reduce of a step. Changes no parameter."""

import logging
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .layout import BLOCK, Layout
from .shard_reductions import combine_powers, finish_norms
from .shard_tensor import ShardTensor
from .storage import Arena, on_device
from .transport import Op, Transport
from .triton_kernels.launch import is_available
from .triton_kernels.norm import block_powers

__all__ = [
    "GradientNorms",
    "SkipCounter",
    "agree_on_flag",
    "check_finite",
    "clip_coefficient",
]

logger = logging.getLogger(__name__)


class GradientNorms:
    """The norms of all gradients of one optimizer, computed together and kept until one changes.

    torch's clipping asks for one norm after the other when gradients are a tensor subclass; one
    pass over the flat shards and one all-reduce answer all of them.
    """

    def __init__(self, layout: Layout, arenas: Sequence[Arena], transport: Transport) -> None:
        self.layout, self.arenas, self.transport = layout, list(arenas), transport
        self._key: tuple[object, ...] | None = None
        self._found: Tensor | None = None
        self._norms = torch.empty(0, dtype=torch.float32)
        self._order: tuple[list[int], Tensor] = ([], torch.empty(0, dtype=torch.int64))
        self._lengths: list[Tensor] = []  # for each arena: blocks of each slot

    def _make_tables(self) -> None:
        order = [slot.index for arena in self.arenas for slot in arena.plan.slots]
        self._slot_order = on_device(order, torch.int64, self.arenas[0].device)
        lengths = [self._blocks_per_slot(arena) for arena in self.arenas]
        self._num_blocks = [int(blocks.sum()) for blocks in lengths]
        self._lengths = [
            blocks.to(arena.device) for blocks, arena in zip(lengths, self.arenas, strict=True)
        ]

    def _blocks_per_slot(self, arena: Arena) -> Tensor:
        ranges = [self.layout.local_range(slot.index, arena.rank) for slot in arena.plan.slots]
        return torch.tensor([-(-(stop - start) // BLOCK) for start, stop in ranges])

    def norms(self, p: float) -> Tensor:
        """[slots] fp32 p-norms, the same on every rank; one all-reduce when they are not known."""
        key = (p, *self._versions())
        if key != self._key:
            if not self._lengths:
                self._make_tables()
            self._found = None
            if all(is_available(arena.device) for arena in self.arenas):
                self._found = torch.zeros(1, device=self.arenas[0].device)
            parts = [self._parts(number, p) for number in range(len(self.arenas))]
            by_arena = finish_norms(torch.cat(parts), p, self.transport)
            self._norms = torch.empty_like(by_arena)
            self._norms[self._slot_order] = by_arena
            self._key = key
        return self._norms

    def flag(self) -> Tensor | None:
        """[1] fp32: 1 if a gradient here is Inf or NaN, where the norms were computed from the
        gradients as they are now by a kernel that notices it in the same read; else None.
        """
        if self._found is None or self._key is None or self._key[1:] != self._versions():
            return None
        return self._found.clone()

    def _versions(self) -> tuple[object, ...]:
        return tuple((arena.generation, _version(arena.gradients)) for arena in self.arenas)

    def total(self, slots: Sequence[int], p: float) -> Tensor:
        """[] fp32: the p-norm of the gradients of `slots`, added up in the order given."""
        norms = self.norms(p)
        if slots != list(range(len(norms))):
            if slots != self._order[0]:
                self._order = (list(slots), on_device(slots, torch.int64, norms.device))
            norms = norms[self._order[1]]
        norm: Tensor = torch.linalg.vector_norm(norms, p)  # as torch.nn.utils.get_total_norm
        return norm

    def _parts(self, number: int, p: float) -> Tensor:
        """[slots of the arena] fp64: this rank's part of each slot's sum of powers."""
        arena, lengths = self.arenas[number], self._lengths[number]
        if arena.gradients is None:
            empty = torch.empty(0, dtype=torch.float64, device=arena.device)
            return combine_powers(empty, p).expand(len(lengths)).clone()
        powers = block_powers(arena.gradients, p, self._found)[: self._num_blocks[number]]
        kind = {math.inf: "max", -math.inf: "min"}.get(p, "sum")
        parts = torch.segment_reduce(powers, kind, lengths=lengths, unsafe=True)
        return parts.clamp(min=0) if kind == "max" else parts  # no block at all: -inf

    def of_slot(self, slot: int) -> "SlotNorm":
        """What a gradient's ShardTensor asks for its norm."""
        return SlotNorm(self, slot)


class SlotNorm:
    """One slot's window on `GradientNorms`."""

    def __init__(self, norms: GradientNorms, slot: int) -> None:
        self.all, self.slot = norms, slot

    def norm(self, tensor: ShardTensor, p: float) -> Tensor:
        """[] fp32."""
        return self.all.norms(p)[self.slot].clone()


def _version(tensor: Tensor | None) -> int:
    return -1 if tensor is None else tensor._version


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """[] what to multiply gradients by: max_norm / (norm + 1e-6), at most 1 (as torch)."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def check_finite(arenas: Sequence[Arena]) -> Tensor:
    """[1] fp32: 1 if any gradient shard on this rank holds an Inf or a NaN. One pass over them."""
    shards = [arena.gradients for arena in arenas if arena.gradients is not None]
    found = torch.zeros(1, dtype=torch.float32, device=shards[0].device)
    torch._amp_foreach_non_finite_check_and_unscale_(shards, found, torch.ones_like(found))
    return found


def agree_on_flag(found: Tensor, transport: Transport, step: int) -> Tensor:
    """[1] fp32: the flag of any rank."""
    transport.all_reduce(found, "max", op=Op("flags", round=step)).wait()
    return found


class SkipCounter:
    """Counts skipped steps on the device; says so one step later, without waiting for it."""

    def __init__(self) -> None:
        self.total = torch.zeros((), dtype=torch.int64)
        self._host = torch.zeros((), dtype=torch.int64)
        self._logged = 0

    def add(self, found: Tensor) -> None:
        """Count one step, skipped if `found` [1] is 1."""
        self._log()
        if self.total.device != found.device:
            self.total = self.total.to(found.device)
            self._host = self._host.pin_memory()
        self.total += found[0].long()
        self._host.copy_(self.total, non_blocking=True)

    def _log(self) -> None:
        skipped = int(self._host)
        if skipped > self._logged:
            self._logged = skipped
            logger.warning(
                "a step was skipped because a gradient was Inf or NaN (%d so far)", skipped
            )
