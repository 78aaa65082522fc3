"""All ranks that hold a model, over a communicator of their own on the host: for files.

It may be used from another thread than the training's, since nothing else goes over it.
"""

import atexit
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .base import Op, Transport, named
from .ending import rest_at_exit

__all__ = ["HostRanks", "host_ranks"]


class HostRanks:
    """The data-parallel ranks, replicas included, in the order of the mesh.

    Attributes:
        rank: of this process among them.
        size: how many.
        group: their communicator; None where there is nobody else.
    """

    def __init__(self, mesh: DeviceMesh | None) -> None:
        members = [0] if mesh is None else mesh.mesh.flatten().tolist()
        self.size = len(members)
        self.rank = members.index(dist.get_rank()) if mesh is not None else 0
        self.group: dist.ProcessGroup | None = None
        if mesh is not None and self.size > 1:
            rest_at_exit()
            backend = mesh.get_group(0)._get_backend(torch.device(mesh.device_type))
            self.group = dist.new_group(
                members,
                backend="gloo",
                timeout=backend.options._timeout,
                # Else it would need every process of the job.
                use_local_synchronization=self.size < dist.get_world_size(),
            )
            in_group = dist.get_process_group_ranks(self.group)
            self._first = members[0]
            self._order = [in_group.index(member) for member in members]

    @property
    def is_first(self) -> bool:
        """Whether this is the first of them."""
        return self.rank == 0

    def all_gather_object(self, item: object, *, op: Op) -> list[Any]:
        """Every rank's `item` (picklable), by rank."""
        if self.group is None:
            return [item]
        items: list[Any] = [None] * self.size
        with named(op):
            dist.all_gather_object(items, item, self.group)
        return [items[place] for place in self._order]

    def to_first(self, item: object, *, op: Op) -> list[Any]:
        """Every rank's `item` (picklable), by rank, on the first rank; on the others nothing."""
        if self.group is None:
            return [item]
        items: list[Any] | None = [None] * self.size if self.is_first else None
        with named(op):
            dist.gather_object(item, items, self._first, self.group)
        return [] if items is None else [items[place] for place in self._order]

    def from_first(self, item: Any, *, op: Op) -> Any:
        """The first rank's `item`, on every rank."""
        return self.all_gather_object(item if self.is_first else None, op=op)[0]


_known: dict[tuple[int, ...], tuple[Any, HostRanks]] = {}


@atexit.register
def _end() -> None:
    """Join the threads of our communicators while there is an interpreter that they may ask for.

    Else a process that ends just after the last operation is sometimes aborted.
    """
    for _, ranks in _known.values():
        group, ranks.group = ranks.group, None
        if group is not None:
            with suppress(Exception):  # it was destroyed already
                dist.destroy_process_group(group)
    _known.clear()


def host_ranks(transport: Transport) -> HostRanks:
    """Those of a transport; every rank has to call this where it is the first time."""
    mesh = transport.mesh
    if mesh is None:
        return _known.setdefault((), (None, HostRanks(None)))[1]
    members = (mesh.ndim, *mesh.mesh.flatten().tolist())
    group = mesh.get_group(0)
    if members not in _known or _known[members][0] is not group:
        _known[members] = (group, HostRanks(mesh))
    return _known[members][1]
