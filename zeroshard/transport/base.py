"""What a transport is, and how its failures are named. No backend."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..errors import CommunicationError
from ..imitation import is_imitated

__all__ = [
    "Buffers",
    "Collective",
    "Done",
    "Finish",
    "Op",
    "Part",
    "Pending",
    "Then",
    "Transport",
    "Works",
    "copy_own",
    "named",
    "sum_into",
    "timeout_of",
]

Finish = Callable[[Tensor], None]


@dataclass(frozen=True, slots=True)
class Op:
    """What an operation is, for tags and for messages."""

    phase: str  # "reduce", "gather", "flags" ...
    bucket: int = 0
    round: int = 0  # which backward, step or gather
    unit: str = ""
    channel: int = 0  # 0 to 2: which gathers number their buckets and rounds together
    note: str = ""

    def __str__(self) -> str:
        counted = {"reduce": "backward", "gather": "gather" if self.channel else "step"}
        where = f" of bucket {self.bucket}" if self.phase in counted else ""
        unit = f" of unit {self.unit!r}" if self.unit else ""
        note = f" {self.note}" if self.note else ""
        return f"{self.phase}{where}{unit}{note} ({counted.get(self.phase, 'round')} {self.round})"


@dataclass(frozen=True, slots=True)
class Part:
    """A contiguous piece of this rank's gradients: `tensor` from element `offset` of the bucket."""

    offset: int
    tensor: Tensor  # [n] in the wire's dtype


class Buffers:
    """Where a transport takes staging memory from; the engine puts its counted pool here.

    Attributes:
        spare: whether to do without staging where data can arrive in its destination.
    """

    spare = False

    def borrow(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat buffer with undefined content."""
        return torch.empty(numel, dtype=dtype, device=device)

    def give_back(self, buffer: Tensor) -> None:
        """Return a buffer."""


class Pending(ABC):
    """An operation under way. Its tensors belong to it until `wait` returns."""

    @abstractmethod
    def wait(self) -> None:
        """Make the result visible to what this thread (or the current stream) does next."""


class Done(Pending):
    """An operation that had nothing to wait for."""

    def wait(self) -> None:
        """Return at once."""


class Then(Pending):
    """An operation followed by a function, run once, in the first `wait`."""

    def __init__(self, inner: Pending, function: Callable[[], None]) -> None:
        self.inner = inner
        self.function: Callable[[], None] | None = function

    def wait(self) -> None:
        """Wait for the inner operation and run the function."""
        self.inner.wait()
        if self.function is not None:
            self.function()
            self.function = None


class Transport(ABC):
    """Collectives over the ranks that share each bucket."""

    rank: int = 0
    world_size: int = 1
    num_replicas: int = 1  # ranks that hold the same shard (the other axis of a 2-D mesh)
    distributed: bool = True  # False: no process group, gradients stay plain tensors
    direct_numel: int | None = None  # from how many elements a gradient is sent from where it lies
    mesh: DeviceMesh | None = None
    buffers: Any = Buffers()

    @property
    def is_first(self) -> bool:
        """Whether this is the first of all ranks that hold the model, replicas included."""
        return self.mesh is None or not any(self.mesh.get_coordinate() or ())

    @property
    def num_ranks(self) -> int:
        """Data-parallel ranks: those a gradient is averaged over."""
        return self.world_size * self.num_replicas

    @abstractmethod
    def reduce(
        self, parts: Sequence[Part], out: Tensor, *, op: Op, sum_dtype: torch.dtype, finish: Finish
    ) -> Pending:
        """Reduce-scatter: sum the ranks' parts in rank order, this rank's shard into `out`.

        Args:
            parts: this rank's gradients, the same ranges on every rank; elements of the bucket
                outside of all parts are padding and are left alone in `out`.
            out: [bucket_numel / world_size] fp32.
            op: names the operation.
            sum_dtype: dtype of the sum.
            finish: called on each piece of `out` once it holds its sum.
        """

    @abstractmethod
    def gather(self, bucket: Tensor, shard: Tensor, *, op: Op) -> Pending:
        """All-gather every rank's `shard` into `bucket`.

        Args:
            bucket: [world_size * n].
            shard: [n] this rank's elements; may be their place in `bucket` itself.
            op: names the operation.
        """

    @abstractmethod
    def all_reduce(self, tensor: Tensor, kind: Literal["sum", "max"], *, op: Op) -> Pending:
        """All-reduce in place: a sum over the shard axis, a maximum over all ranks."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, *, op: Op) -> Pending:
        """Give every rank the first rank's `tensor` (contiguous)."""

    @abstractmethod
    def all_gather_object(self, item: object, *, op: Op) -> list[Any]:
        """Every rank's `item` (picklable), in rank order, all replicas included."""


class Works(Pending):
    """c10d handles, waited for in order; a failure or timeout becomes a named error."""

    def __init__(self, works: Iterable[Any], op: Op) -> None:
        self.works = list(works)
        self.op = op

    def wait(self) -> None:
        """Block until all handles are done."""
        works, self.works = self.works, []
        with named(self.op):
            for work in works:
                work.wait()


class named:
    """Turn c10d's RuntimeError into one that says which operation was waiting."""

    def __init__(self, op: Op) -> None:
        self.op = op

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, CommunicationError):
            first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise CommunicationError(
                f"{self.op}: waited for the other ranks without success ({first_line}). Every "
                "rank must run the same backwards and steps (under stage 3 also the same "
                "forwards, in evaluation too, with as many batches); set ZEROSHARD_DEBUG=1 to see "
                "which rank does something else"
            ) from error


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """How long the ranks of a group wait for each other."""
    options = group._get_backend(device).options
    found: timedelta = dist.default_pg_timeout if options is None else options._timeout
    return found


class Collective(Transport):
    """What every backend with a process group does in the same way."""

    def __init__(self, group: dist.ProcessGroup, mesh: DeviceMesh) -> None:
        self.group = group
        self.mesh = mesh
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.first_rank = dist.get_global_rank(group, 0)

    def all_reduce(self, tensor: Tensor, kind: Literal["sum", "max"], *, op: Op) -> Pending:
        reduce_op = dist.ReduceOp.SUM if kind == "sum" else dist.ReduceOp.MAX
        with named(op):
            return Works([dist.all_reduce(tensor, reduce_op, self.group, async_op=True)], op)

    def broadcast(self, tensor: Tensor, *, op: Op) -> Pending:
        with named(op):
            return Works([dist.broadcast(tensor, self.first_rank, self.group, async_op=True)], op)

    def all_gather_object(self, item: object, *, op: Op) -> list[Any]:
        items: list[Any] = [None] * self.world_size
        with named(op):
            dist.all_gather_object(items, item, self.group)
        return items


def copy_own(bucket: Tensor, shard: Tensor, rank: int) -> None:
    """Copy this rank's `shard` to its place in `bucket`, unless it lies there."""
    place = bucket[rank * shard.numel() : (rank + 1) * shard.numel()]
    if place.data_ptr() != shard.data_ptr():
        place.copy_(shard)


def sum_into(addends: Sequence[Tensor], out: Tensor, sum_dtype: torch.dtype) -> None:
    """Add up in order: in fp32 straight into `out`, in another dtype beside it."""
    if is_imitated():
        addends = addends[:4]  # nothing is computed, and further ones need no further memory
    if sum_dtype != out.dtype:
        total = addends[0] + addends[1] if len(addends) > 1 else addends[0]
        for addend in addends[2:]:
            total = total + addend
        out.copy_(total)
    elif len(addends) > 1 and addends[0].dtype == out.dtype:
        torch.add(addends[0], addends[1], out=out)
        for addend in addends[2:]:
            out.add_(addend)
    else:
        out.copy_(addends[0])
        for addend in addends[1:]:
            out.add_(addend)
