"""A short test of the wire: each operation once, its result checked, and how fast a gather is."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from ..errors import ZeroShardError
from .base import Op, Part, Transport
from .connect import connect
from .meeting import Meeting

__all__ = ["Trial", "leave", "try_wire"]

NUMEL = 4096  # of a shard
BUCKET_NBYTES = 24 * 2**20  # about a default bucket
SPEED_S = 0.4  # spent on the speed of each backend
NEVER = timedelta(minutes=30)
"""The process group's timeout: whoever starts the test has less patience, and says more than NCCL's
watchdog, which would end the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One operation on one backend.

    Attributes:
        error: what went wrong; "" where nothing did.
        gib_per_s: what this rank received in a second; 0 where that was not measured.
    """

    backend: str
    operation: str
    error: str = ""
    gib_per_s: float = 0.0


def try_wire(
    devices: list[torch.device], patience_s: float, stand: Callable[[str], None]
) -> list[Trial]:
    """Try all operations of the transports for each device, on all ranks of the launcher.

    Args:
        devices: of this rank; the kinds are the same on every rank.
        patience_s: how long to try to reach the launcher's store.
        stand: told, before each operation, which one it is.

    Returns:
        What happened, up to the first operation that raised: behind it the ranks are not together
        any more.
    """
    stand("the making of a process group")
    meeting = Meeting(patience_s)
    kinds = {"cpu": "gloo", "cuda": "nccl"}
    backend = ",".join(f"{device.type}:{kinds[device.type]}" for device in devices)
    if len(devices) == 1:
        backend = kinds[devices[0].type]
    trials: list[Trial] = []
    try:
        dist.init_process_group(
            backend,
            store=PrefixStore("group", meeting.store),
            rank=meeting.rank,
            world_size=meeting.world_size,
            timeout=NEVER,
        )
    except (RuntimeError, ValueError) as error:
        return [Trial(backend=backend, operation="process group", error=_said(error))]
    for device in devices:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        name = kinds[device.type]
        transport = connect(None, device)
        for operation, test in _operations(transport, device):
            stand(f"{operation} ({name})")
            try:
                speed = test()
                trials.append(Trial(backend=name, operation=operation, gib_per_s=speed or 0.0))
            except WrongResult as error:  # the ranks are still together
                trials.append(Trial(backend=name, operation=operation, error=str(error)))
            except (RuntimeError, ValueError, ZeroShardError) as error:
                trials.append(Trial(backend=name, operation=operation, error=_said(error)))
                return trials
    return trials


def leave() -> None:
    """Give the process group back; every rank has to be done with it."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _said(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


class WrongResult(ZeroShardError):
    """A result that is not what was sent."""


def _expect(found: Tensor, expected: Tensor) -> None:
    found = found.cpu()
    if not torch.equal(found, expected):
        index = int((found != expected).flatten().nonzero()[0])
        raise WrongResult(
            f"element {index} should be {expected.flatten()[index].item()} and is "
            f"{found.flatten()[index].item()}"
        )


def _values(rank: int, numel: int) -> Tensor:
    """Small whole numbers, whose sums are exact in every dtype."""
    return torch.arange(numel, dtype=torch.float32) % 7 + rank % 3


def _operations(
    transport: Transport, device: torch.device
) -> Iterator[tuple[str, Callable[[], float | None]]]:
    rank, size = transport.rank, transport.world_size
    everybody = [_values(other, size * NUMEL) for other in range(size)]
    own = slice(rank * NUMEL, (rank + 1) * NUMEL)

    def all_reduce() -> None:
        total, largest = (everybody[rank].to(device, copy=True) for _ in range(2))
        transport.all_reduce(total, "sum", op=Op("test of sums")).wait()
        transport.all_reduce(largest, "max", op=Op("test of maxima")).wait()
        _expect(total, torch.stack(everybody).sum(0))
        _expect(largest, torch.stack(everybody).amax(0))

    def broadcast() -> None:
        tensor = everybody[rank].to(device, copy=True)
        transport.broadcast(tensor, op=Op("test of broadcasts")).wait()
        _expect(tensor, everybody[0])

    def reduce(dtype: torch.dtype, number: int) -> None:
        bucket = everybody[rank].to(device, dtype)
        out = torch.zeros(NUMEL, device=device)
        pending = transport.reduce(
            [Part(0, bucket)],
            out,
            op=Op("reduce", round=number),
            sum_dtype=torch.float32,
            finish=lambda piece: None,
        )
        pending.wait()
        _expect(out, torch.stack(everybody).sum(0)[own])

    def gather() -> None:
        bucket = torch.zeros(size * NUMEL, device=device)
        shard = everybody[rank][own].to(device)
        transport.gather(bucket, shard, op=Op("gather", round=1)).wait()
        _expect(bucket, torch.cat([v.chunk(size)[i] for i, v in enumerate(everybody)]))

    def send_and_receive() -> None:
        group = dist.group.WORLD
        sent, received = everybody[rank].to(device), torch.zeros(size * NUMEL, device=device)
        after, before = (rank + 1) % size, (rank - 1) % size
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, after, group),
                dist.P2POp(dist.irecv, received, before, group),
            ]
        )
        for work in works:
            work.wait()
        _expect(received, everybody[before])

    def objects() -> None:
        items = transport.all_gather_object({"rank": rank}, op=Op("test of objects"))
        if items != [{"rank": other} for other in range(size)]:
            raise WrongResult(f"the ranks' objects are {items}")

    yield "all-reduce", all_reduce
    yield "broadcast", broadcast
    yield "reduce-scatter", lambda: reduce(torch.float32, 1)
    yield "reduce-scatter in bf16", lambda: reduce(torch.bfloat16, 2)
    yield "all-gather", gather
    if size > 1:
        yield "send and receive", send_and_receive
    yield "objects", objects
    if size > 1:
        yield "speed of an all-gather", lambda: _speed(transport, device)


def _speed(transport: Transport, device: torch.device) -> float:
    """GiB that this rank receives in a second, while all ranks gather buckets of the usual size."""
    shard = torch.zeros(BUCKET_NBYTES // 4 // transport.world_size, device=device)
    bucket = torch.zeros(shard.numel() * transport.world_size, device=device)

    def gather(number: int) -> float:
        begun = time.monotonic()
        transport.gather(bucket, shard, op=Op("gather", round=number)).wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.monotonic() - begun

    gather(2)  # connects
    slowest = torch.tensor([gather(3)], device=device)
    transport.all_reduce(slowest, "max", op=Op("test of speed")).wait()
    repeats = max(1, min(20, int(SPEED_S / max(float(slowest), 1e-4))))
    took = sum(gather(4 + number) for number in range(repeats)) / repeats
    return (bucket.nbytes - shard.nbytes) / 2**30 / took
