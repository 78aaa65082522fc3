"""Which implementation of AdamW updates an arena, and the counters that all of them share.

Triton on a GPU; torch's fused kernel on a CPU, and on a GPU without Triton, for fp32 moments; the
torch twin of the Triton kernel for the others. No communication.

Source: Loshchilov & Hutter 2019, arXiv:1711.05101, algorithm 2.
"""

import warnings
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from .formats import Format
from .kernel_update import KernelUpdater, SlotScalars
from .layout import Layout
from .storage import Arena, on_device
from .torch_update import TorchUpdater
from .triton_kernels.launch import is_available

__all__ = ["StepCounters", "Updater", "implementation_of", "new_updaters"]


class Updater(Protocol):
    """AdamW on the shards of one arena."""

    takes_coefficient: bool  # or gradients are scaled before

    def plan(self, group_of: Mapping[int, int], buckets: Sequence[int]) -> list[list[int]]: ...

    def update(
        self,
        buckets: Sequence[int],
        param_groups: Sequence[dict[str, Any]],
        found_inf: Tensor | None,
        coefficient: Tensor | None,
    ) -> None: ...

    def forget_gradients(self) -> None: ...


def implementation_of(fmt: Format, device: torch.device) -> str:
    """What makes the update, in words."""
    if is_available(device):
        return "Triton"
    return "torch fused" if fmt.moments == "fp32" else "torch twin"


def new_updaters(
    arenas: Sequence[Arena],
    formats: Sequence[Format],
    layout: Layout,
    counters: "StepCounters",
    scalars: SlotScalars,
    first_block: Sequence[int],
    *,
    gathers: bool,
) -> list[Updater]:
    """The updater of each arena.

    Args:
        arenas: all of this rank's.
        formats: of each.
        layout: who owns what.
        counters: how many updates each slot has had.
        scalars: what to do to each slot, for those that read a table.
        first_block: [slots] the first block of each slot in model space.
        gathers: whether parameters are gathered after the update.
    """
    updaters: list[Updater] = []
    for arena, fmt in zip(arenas, formats, strict=True):
        if arena.device.type == "cuda" and not is_available(arena.device):
            _warn_once()
        if implementation_of(fmt, arena.device) == "torch fused":
            updaters.append(TorchUpdater(arena, layout, fmt, counters.views))
        else:
            updaters.append(
                KernelUpdater(arena, layout, fmt, scalars, first_block, gathers=gathers)
            )
    return updaters


@lru_cache(maxsize=1)
def _warn_once() -> None:
    warnings.warn(
        "Triton is not installed or does not run here, so the update runs in torch operations, "
        "which read and write the state several times, and for 16- and 8-bit moments wait for the "
        "device: pip install triton",
        stacklevel=2,
    )


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
