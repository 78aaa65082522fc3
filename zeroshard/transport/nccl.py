"""CUDA ranks: native collectives on streams of their own."""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .base import Collective, Finish, Op, Part, Pending, Then, Works, sum_into, timeout_of
from .breadcrumbs import Breadcrumbs
from .streams import Event, Stream, new_stream

# torch 2.13 renamed both collectives and warns about the old names; 2.11 has only those.
_reduce_scatter_tensor = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _reduce_scatter(out: Tensor, bucket: Tensor, group: dist.ProcessGroup) -> None:
    _reduce_scatter_tensor(out, bucket, op=dist.ReduceOp.SUM, group=group)


def _all_gather(bucket: Tensor, shard: Tensor, group: dist.ProcessGroup) -> None:
    _all_gather_tensor(bucket, shard, group=group)


class Nccl(Collective):
    """CUDA ranks: native collectives, one communicator and one stream each for the two directions.

    Also serves any other backend that has ``reduce_scatter`` and ``all_gather`` on flat tensors.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        gather_group: dist.ProcessGroup,
        mesh: DeviceMesh,
        device: torch.device,
    ) -> None:
        super().__init__(group, mesh)
        self.device = device
        self.gather_group = gather_group
        self.breadcrumbs = Breadcrumbs(timeout_of(group, device).total_seconds())
        self.reduce_stream, self.gather_stream = new_stream(device), new_stream(device)

    def reduce(
        self, parts: Sequence[Part], out: Tensor, *, op: Op, sum_dtype: torch.dtype, finish: Finish
    ) -> Pending:
        (part,) = parts  # direct_numel is None: the bucket is packed, padding included
        bucket = part.tensor
        borrowed: list[Tensor] = []

        def launch() -> list[Tensor]:
            if bucket.dtype == sum_dtype:
                summed = (
                    out if bucket.dtype == out.dtype else torch.empty_like(out, dtype=sum_dtype)
                )
                _reduce_scatter(summed, bucket, self.group)
                if summed is not out:
                    out.copy_(summed)
                finish(out)
                return [summed]
            arrived = self.buffers.borrow(bucket.numel(), bucket.dtype, bucket.device)
            borrowed.append(arrived)
            dist.all_to_all_single(arrived, bucket, group=self.group)
            sum_into(list(arrived.chunk(self.world_size)), out, sum_dtype)
            finish(out)
            return [arrived]

        pending = self._on(self.reduce_stream, launch, op=op, keep=bucket)

        def give_back() -> None:
            for tensor in borrowed:
                self.buffers.give_back(tensor)

        return Then(pending, give_back)

    def gather(self, bucket: Tensor, shard: Tensor, *, op: Op) -> Pending:
        def launch() -> list[Tensor]:
            _all_gather(bucket, shard, self.gather_group)
            return [bucket, shard]

        return self._on(self.gather_stream, launch, op=op, keep=bucket)

    def all_reduce(self, tensor: Tensor, kind: Literal["sum", "max"], *, op: Op) -> Pending:
        # On the gather communicator: it is idle in backward, whereas launches on the other one
        # may come before or after this one, depending on which gradients a rank has.
        reduce_op = dist.ReduceOp.SUM if kind == "sum" else dist.ReduceOp.MAX
        work = dist.all_reduce(tensor, reduce_op, self.gather_group, async_op=True)
        self.breadcrumbs.watch(op, work.is_completed)
        return Works([work], op)

    def _on(
        self, stream: Stream, launch: Callable[[], list[Tensor]], *, op: Op, keep: Tensor
    ) -> Pending:
        """Run `launch` on `stream`, after what the current stream has done so far."""
        kept, event = stream.run(launch)
        self.breadcrumbs.watch(op, event.is_done)
        return _OnStream(event, [keep, *kept])


class _OnStream(Pending):
    """Work on a side stream: waiting orders the current stream behind it, the host goes on."""

    def __init__(self, event: Event, keep: list[Tensor]) -> None:
        self.event = event
        self.keep = keep  # the side stream still uses these until the current one waits for it

    def wait(self) -> None:
        """Let the current stream wait for the event."""
        self.event.wait()
        self.keep = []
