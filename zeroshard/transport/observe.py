"""Transports around a transport: count what it does, disturb its timing, check that ranks agree.

`Counting` and `Delayed` serve tests and benchmarks; ZEROSHARD_DEBUG=1 switches `Checked` on.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import CommunicationError
from .base import Finish, Op, Part, Pending, Transport


class Around(Transport):
    """Delegates everything; subclasses override `_run` to see each operation go by."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.rank, self.world_size = inner.rank, inner.world_size
        self.num_replicas, self.distributed = inner.num_replicas, inner.distributed
        self.direct_numel, self.mesh = inner.direct_numel, inner.mesh

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
        """See `Transport.reduce`."""

        def call() -> Pending:
            return self.inner.reduce(parts, out, op=op, sum_dtype=sum_dtype, finish=finish)

        return self._run(op, call, sum(part.tensor.nbytes for part in parts))

    def gather(self, bucket: Tensor, shard: Tensor, *, op: Op) -> Pending:
        """See `Transport.gather`."""
        return self._run(op, lambda: self.inner.gather(bucket, shard, op=op), bucket.nbytes)

    def all_reduce(self, tensor: Tensor, kind: Literal["sum", "max"], *, op: Op) -> Pending:
        """See `Transport.all_reduce`."""
        return self._run(op, lambda: self.inner.all_reduce(tensor, kind, op=op), tensor.nbytes)

    def broadcast(self, tensor: Tensor, *, op: Op) -> Pending:
        """See `Transport.broadcast`."""
        return self._run(op, lambda: self.inner.broadcast(tensor, op=op), tensor.nbytes)

    def all_gather_object(self, item: object, *, op: Op) -> list[Any]:
        """See `Transport.all_gather_object`."""
        return self.inner.all_gather_object(item, op=op)

    def _run(self, op: Op, call: Callable[[], Pending], nbytes: int) -> Pending:
        return call()


class Counting(Around):
    """Counts operations by phase, and the bytes this rank sends for them.

    Attributes:
        calls: operations by phase.
        nbytes: bytes sent by this rank by phase, (W - 1) / W of the bucket for reduce and gather.
    """

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.calls: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()

    def _run(self, op: Op, call: Callable[[], Pending], nbytes: int) -> Pending:
        self.calls[op.phase] += 1
        self.nbytes[op.phase] += nbytes * (self.world_size - 1) // self.world_size
        return call()


class Delayed(Around):
    """Every operation happens late: after a random pause, on another thread.

    What reads a result without waiting for it therefore reads the old one, and what changes an
    input before the operation is over sends the changed one. Reductions, gathers and the small
    operations each have a thread, so that waiting for one kind does not wait for another; within a
    kind the order is kept, as collectives need. Wrap one axis, not a `Replicated`.
    """

    def __init__(self, inner: Transport, seed: int, longest_s: float = 0.004) -> None:
        super().__init__(inner)
        self.random = random.Random(seed)
        self.longest_s = longest_s
        self.threads = {
            kind: ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"zeroshard-delayed-{kind}")
            for kind in ("reduce", "gather", "small")
        }

    def _run(self, op: Op, call: Callable[[], Pending], nbytes: int) -> Pending:
        before, inside, after = (self.random.uniform(0, self.longest_s) for _ in range(3))

        def late() -> None:
            time.sleep(before)
            pending = call()
            time.sleep(inside)
            pending.wait()
            time.sleep(after)

        kind = op.phase if op.phase in self.threads else "small"
        return _Late(self.threads[kind].submit(late))


class _Late(Pending):
    def __init__(self, future: "Future[None]") -> None:
        self.future = future

    def wait(self) -> None:
        """Wait for the other thread."""
        self.future.result()


class Checked(Around):
    """Before each operation the ranks tell each other what they are about to do.

    A rank that is about to do something else, or that does not come at all, is named by every
    other one, before any data moves. Slow: a round trip through the store for every operation.
    """

    def __init__(self, inner: Transport, ranks: Sequence[int], timeout: timedelta) -> None:
        super().__init__(inner)
        self.ranks = list(ranks)
        self.timeout = timeout
        self.sequence = 0
        store = dist.distributed_c10d._get_default_store()
        name = "zeroshard-check-" + "-".join(map(str, self.ranks))
        self.store = torch._C._distributed_c10d.PrefixStore(f"{name}-{_instance(name)}", store)

    def _run(self, op: Op, call: Callable[[], Pending], nbytes: int) -> Pending:
        self._agree(f"{op}, {nbytes} bytes")
        return call()

    def all_gather_object(self, item: object, *, op: Op) -> list[Any]:
        """See `Transport.all_gather_object`."""
        self._agree(str(op))
        return self.inner.all_gather_object(item, op=op)

    def _agree(self, label: str) -> None:
        mine = self.ranks[self.rank]
        self.sequence += 1
        self.store.set(f"{self.sequence}/{mine}", label)
        self.store.set(f"last/{mine}", f"operation {self.sequence}: {label}")
        labels = {}
        deadline = time.monotonic() + self.timeout.total_seconds()
        for rank in self.ranks:
            left = max(deadline - time.monotonic(), 0.01)
            try:
                self.store.wait([f"{self.sequence}/{rank}"], timedelta(seconds=left))
            except RuntimeError as error:
                last = "nothing yet"
                if self.store.check([f"last/{rank}"]):
                    last = self.store.get(f"last/{rank}").decode()
                raise CommunicationError(
                    f"rank {mine} is at operation {self.sequence}: {label}; rank {rank} did not "
                    f"come within {self.timeout.total_seconds():.0f} s, its last was {last}. Every "
                    "rank must run the same number of backwards and steps"
                ) from error
            labels[rank] = self.store.get(f"{self.sequence}/{rank}").decode()
        if self.sequence > 1:  # all ranks are here, so nobody reads the last label any more
            self.store.delete_key(f"{self.sequence - 1}/{mine}")
        if len(set(labels.values())) > 1:
            said = "; ".join(f"rank {rank}: {text}" for rank, text in labels.items())
            raise CommunicationError(
                f"the ranks are about to do different things at operation {self.sequence}: {said}. "
                "Every rank must run the same number of backwards and steps, over the same "
                "parameters"
            )


_instances: Counter[str] = Counter()


def _instance(name: str) -> int:
    """Counts the checks over the same ranks, so that two optimizers use different keys."""
    _instances[name] += 1
    return _instances[name]
