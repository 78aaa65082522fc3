"""The ranks of a run: joining them, averaging over them, leaving them together. No training."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    rank: int
    size: int
    device: torch.device

    def mesh(self, shape: tuple[int, int] | None) -> DeviceMesh | None:
        """Replicas x shards; None shards over all ranks."""
        if shape is None or self.size == 1:
            return None
        return init_device_mesh(self.device.type, shape, mesh_dim_names=("replicate", "shard"))

    def mean(self, *values: Tensor | float) -> list[float]:
        """The values averaged over the ranks, on every rank."""
        values = torch.tensor([float(v) for v in values], device=self.device, dtype=torch.float64)
        if self.size > 1:
            dist.all_reduce(values)
        return (values / self.size).tolist()


def own_device() -> torch.device:
    """A GPU of this rank's own, or the CPU where there are fewer GPUs than ranks."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        return torch.device("cpu")
    return torch.device("cuda", local_rank)


@contextmanager
def joined_world() -> Iterator[World]:
    """The ranks that torchrun started, or a world of one without a process group."""
    device = own_device()
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # else every rank starts a thread for every core
    if "WORLD_SIZE" not in os.environ:
        yield World(rank=0, size=1, device=device)
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    try:
        yield World(rank=dist.get_rank(), size=dist.get_world_size(), device=device)
    finally:
        dist.destroy_process_group()


class Interrupt:
    """Notes Ctrl-C, for the ranks to stop together after the step they are in.

    It stays installed until the process ends: a terminal and torchrun both send the signal, so a
    second one may come when this rank is leaving already.
    """

    def __init__(self) -> None:
        self.pressed = False
        signal.signal(signal.SIGINT, self._note)

    def release(self) -> None:
        """From here on nothing needs an orderly end: Ctrl-C ends this process at once."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def _note(self, signum: int, frame: object) -> None:
        self.pressed = True
