"""From what the user gave as a mesh to a transport."""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..config import is_debugging
from ..errors import ConfigError
from ..imitation import acts_as_gpu
from .base import Transport, timeout_of
from .compose import Replicated, WorldOfOne
from .gloo import Gloo
from .nccl import Nccl
from .observe import Checked

__all__ = ["connect", "device_of"]


def connect(mesh: DeviceMesh | dist.ProcessGroup | None, device: torch.device) -> Transport:
    """The transport for parameters on `device`.

    Args:
        mesh: a DeviceMesh (1-D: shard; 2-D: replicate x shard), a process group, or None for the
            default group. Without an initialised group, plain single-process training.
        device: where the parameters are.

    Raises:
        ConfigError: WORLD_SIZE > 1 without a process group, or a mesh of more than two axes.
    """
    if not (dist.is_available() and dist.is_initialized()):
        world_size = os.environ.get("WORLD_SIZE", "1")
        if mesh is not None:
            raise ConfigError(
                "mesh= needs an initialised process group: call "
                "torch.distributed.init_process_group() first"
            )
        if world_size.isdigit() and int(world_size) > 1:
            raise ConfigError(
                f"WORLD_SIZE is {world_size} but torch.distributed is not initialised, so every "
                "rank would train a model of its own: call "
                "torch.distributed.init_process_group() before building the optimizer"
            )
        return WorldOfOne(distributed=False)
    if mesh is None:
        mesh = dist.group.WORLD
    if isinstance(mesh, dist.ProcessGroup):
        mesh = DeviceMesh.from_group(mesh, device.type)
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(
            f"mesh must be a DeviceMesh, a ProcessGroup or None, got {type(mesh).__name__}"
        )
    if mesh.ndim == 1:
        return _axis(mesh, device)
    if mesh.ndim == 2:
        shard, replicate = _axis(_sub(mesh, 1), device), _axis(_sub(mesh, 0), device)
        return Replicated(shard, replicate, mesh)
    raise ConfigError(
        f"mesh must have one axis (shard) or two (replicate x shard), got {mesh.ndim}: "
        "pass mesh['dp_replicate', 'dp_shard']"
    )


def device_of(mesh: DeviceMesh | dist.ProcessGroup | None) -> torch.device:
    """Where parameters that are on no real device yet go: the device that `mesh` communicates on.

    Without a process group, torch's default device.
    """
    if isinstance(mesh, DeviceMesh):
        kind = mesh.device_type
    elif dist.is_available() and dist.is_initialized():
        kind = "cuda" if "nccl" in dist.get_backend(mesh) else "cpu"
    else:
        return torch.get_default_device()
    return (
        torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    )


def _sub(mesh: DeviceMesh, axis: int) -> DeviceMesh:
    if mesh.mesh_dim_names is not None:
        return mesh[mesh.mesh_dim_names[axis]]
    return DeviceMesh.from_group(mesh.get_group(axis), mesh.device_type)


# By the name of the user's group, which another one may have after that was destroyed.
_known: dict[str, tuple[dist.ProcessGroup, tuple[dist.ProcessGroup, dist.ProcessGroup]]] = {}


def _communicators(
    group: dist.ProcessGroup, ranks: list[int], device: torch.device
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Communicators of our own for reductions and gathers, over the ranks of `group`.

    The user's own collectives, and ours of the other direction, then cannot come in between in
    another order on another rank. All optimizers over one group share them.
    """
    known = _known.get(group.group_name)
    if known is None or known[0] is not group:
        kind: dict[str, Any] = {
            "backend": "fake" if dist.get_backend(group) == "fake" else "nccl",
            "timeout": timeout_of(group, device),
            "use_local_synchronization": True,
        }
        known = (group, (dist.new_group(ranks, **kind), dist.new_group(ranks, **kind)))
        _known[group.group_name] = known
    return known[1]


def _axis(mesh: DeviceMesh, device: torch.device) -> Transport:
    group = mesh.get_group()
    ranks = dist.get_process_group_ranks(group)
    transport: Transport
    if len(ranks) == 1:
        return WorldOfOne(distributed=True, mesh=mesh)
    if acts_as_gpu(device):
        transport = Nccl(*_communicators(group, ranks, device), mesh, device)
    else:
        transport = Gloo(group, mesh)
    if is_debugging():
        transport = Checked(transport, ranks, timeout_of(group, device))
    return transport
