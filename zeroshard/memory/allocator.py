"""What torch's allocator for a GPU says of a step, and what of the device torch has not got."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError
from .schema import gib

__all__ = ["AllocatorPeak", "DeviceMemory", "Snapshot"]

MAX_EVENTS = 200_000  # of a snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorPeak:
    """The highest of each in a step, not all at the same moment.

    Attributes:
        requested: bytes that tensors and libraries asked for.
        allocated: bytes of the blocks that they were given.
        reserved: bytes of the segments that these blocks are in.
        outside: bytes of the device that are used at the end of the step and not reserved: the
            driver, libraries, other processes.
    """

    requested: int
    allocated: int
    reserved: int
    outside: int

    @property
    def overhead(self) -> int:
        """Bytes that are reserved and nobody asked for."""
        return self.reserved - self.requested

    def categories(self) -> dict[str, int]:
        """By the names of DEVICE_CATEGORIES."""
        return {"allocator_overhead": self.overhead, "outside_torch": self.outside}

    def in_words(self, tracked: int) -> str:
        """One sentence, with the part that is in tensors, `tracked` bytes of them."""
        share = 100 * (self.requested - tracked) / max(self.requested, 1)
        return (
            f"torch's allocator in that step: {gib(self.requested)} requested ({share:.1f} % of it "
            f"in no tensor that was followed), {gib(self.allocated)} allocated, "
            f"{gib(self.reserved)} reserved; {gib(self.outside)} of the device are used outside of "
            "torch."
        )


class DeviceMemory:
    """Reads the allocator's peaks step by step, and starts them anew after each.

    Args:
        device: a CUDA device.
        cuda: the module to ask.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self.device, self.cuda = device, cuda
        cuda.reset_peak_memory_stats(device)

    def take(self) -> AllocatorPeak:
        """The peaks since the last call, or since construction."""
        stats = self.cuda.memory_stats(self.device)
        free, total = self.cuda.mem_get_info(self.device)
        self.cuda.reset_peak_memory_stats(self.device)
        return AllocatorPeak(
            requested=stats["requested_bytes.all.peak"],
            allocated=stats["allocated_bytes.all.peak"],
            reserved=stats["reserved_bytes.all.peak"],
            outside=max(total - free - stats["reserved_bytes.all.current"], 0),
        )


class Snapshot:
    """Lets torch record every block of its allocator, for https://pytorch.org/memory_viz.

    Args:
        path: of the file; with more than one rank, the rank goes before its suffix.
        memory: the module that records.
    """

    def __init__(self, path: str | Path, memory: Any = None) -> None:
        self.path = with_rank(Path(path))
        self.memory = memory if memory is not None else torch.cuda.memory
        if not self.path.parent.is_dir():
            raise ConfigError(
                f"the snapshot cannot be written to {self.path}: there is no folder "
                f"{self.path.parent}; make it first"
            )

    def begin(self) -> None:
        """Record from now on."""
        self.memory._record_memory_history(max_entries=MAX_EVENTS)

    def end(self) -> None:
        """Write the file, and record no longer."""
        try:
            self.memory._dump_snapshot(str(self.path))
        finally:
            self.memory._record_memory_history(enabled=None)


def with_rank(path: Path) -> Path:
    """A path of this rank's own, where a launcher started several."""
    world_size, rank = os.environ.get("WORLD_SIZE", "1"), os.environ.get("RANK")
    if rank is None or world_size == "1":
        return path
    return path.with_name(f"{path.stem}-rank{rank}{path.suffix}")
