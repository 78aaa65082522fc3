"""Transports made of other transports, and the one that has nobody to talk to."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .base import Done, Finish, Op, Part, Pending, Then, Transport, copy_own


class WorldOfOne(Transport):
    """One rank: with a process group (gradients become slices all the same) or without one."""

    def __init__(self, *, distributed: bool, mesh: DeviceMesh | None = None) -> None:
        self.distributed = distributed
        self.mesh = mesh
        self.direct_numel = 1

    def reduce(
        self, parts: Sequence[Part], out: Tensor, *, op: Op, sum_dtype: torch.dtype, finish: Finish
    ) -> Pending:
        """Copy the parts into `out`."""
        for part in parts:
            piece = out[part.offset : part.offset + part.tensor.numel()]
            piece.copy_(part.tensor)
            finish(piece)
        return Done()

    def gather(self, bucket: Tensor, shard: Tensor, *, op: Op) -> Pending:
        """The one shard."""
        copy_own(bucket, shard, 0)
        return Done()

    def all_reduce(self, tensor: Tensor, kind: Literal["sum", "max"], *, op: Op) -> Pending:
        """Nothing to reduce."""
        return Done()

    def broadcast(self, tensor: Tensor, *, op: Op) -> Pending:
        """Nothing to broadcast."""
        return Done()

    def all_gather_object(self, item: object, *, op: Op) -> list[Any]:
        """The one item."""
        return [item]


class Replicated(Transport):
    """A second axis: shards are summed over `inner`, then over the ranks that hold the same one."""

    def __init__(self, inner: Transport, replicas: Transport, mesh: DeviceMesh) -> None:
        self.inner, self.replicas, self.mesh = inner, replicas, mesh
        self.rank, self.world_size = inner.rank, inner.world_size
        self.num_replicas = replicas.world_size
        self.direct_numel = inner.direct_numel

    @property
    def buffers(self) -> Any:
        """The inner transport's buffers."""
        return self.inner.buffers

    @buffers.setter
    def buffers(self, buffers: Any) -> None:
        self.inner.buffers = buffers

    def reduce(
        self, parts: Sequence[Part], out: Tensor, *, op: Op, sum_dtype: torch.dtype, finish: Finish
    ) -> Pending:
        pending = self.inner.reduce(parts, out, op=op, sum_dtype=sum_dtype, finish=_nothing)

        def over_replicas() -> None:
            self.replicas.all_reduce(out, "sum", op=op).wait()
            finish(out)

        return Then(pending, over_replicas)

    def gather(self, bucket: Tensor, shard: Tensor, *, op: Op) -> Pending:
        return self.inner.gather(bucket, shard, op=op)

    def all_reduce(self, tensor: Tensor, kind: Literal["sum", "max"], *, op: Op) -> Pending:
        pending = self.inner.all_reduce(tensor, kind, op=op)
        if kind == "sum":
            return pending
        return Then(pending, lambda: self.replicas.all_reduce(tensor, kind, op=op).wait())

    def broadcast(self, tensor: Tensor, *, op: Op) -> Pending:
        pending = self.inner.broadcast(tensor, op=op)
        return Then(pending, lambda: self.replicas.broadcast(tensor, op=op).wait())

    def all_gather_object(self, item: object, *, op: Op) -> list[Any]:
        rows = self.replicas.all_gather_object(self.inner.all_gather_object(item, op=op), op=op)
        return [entry for row in rows for entry in row]


def _nothing(_: Tensor) -> None:
    pass
