"""CPU ranks: slices travel point to point, summed here in rank order."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .base import Collective, Finish, Op, Part, Pending, Works, copy_own, named, sum_into
from .ending import rest_at_exit

SUM_CHUNK = 32768  # elements summed and finished at a time, so that they stay in the cache


class Gloo(Collective):
    """CPU ranks. Slices travel point to point, straight out of gradients and into parameters.

    gloo's own reduce-scatter is an all-reduce (twice the bytes), and its all-gather stages; a
    local sum in rank order is deterministic and can take 16 bits from the wire into fp32.
    """

    direct_numel = 32768

    def __init__(self, group: dist.ProcessGroup, mesh: DeviceMesh) -> None:
        super().__init__(group, mesh)
        rest_at_exit()
        _instances[group.group_name] += 1
        self.instance = _instances[group.group_name]

    def reduce(
        self, parts: Sequence[Part], out: Tensor, *, op: Op, sum_dtype: torch.dtype, finish: Finish
    ) -> Pending:
        shard_numel = out.numel()
        mine: list[Part] = []
        works: list[Any] = []
        with named(op):
            for rank in range(self.world_size):
                pieces = list(_clip(parts, rank * shard_numel, (rank + 1) * shard_numel))
                if rank == self.rank:
                    mine = pieces
                    continue
                for number, piece in enumerate(pieces):
                    works.append(
                        self.group.send([piece.tensor], rank, _tag(self.instance, op, number))
                    )
            # The first other rank's slice may arrive where the sum will be: it is one of the first
            # two addends, and a sum of two does not depend on their order.
            in_place = self.buffers.spare and _all_dtypes(mine, out.dtype, sum_dtype)
            arrivals = self._receive(mine, op, out if in_place else None)
        return _ExchangedSum(self, works, mine, arrivals, out, op, sum_dtype, finish)

    def _receive(self, mine: Sequence[Part], op: Op, out: Tensor | None) -> list["_Arrival"]:
        """Post a receive from every other rank for each of my pieces; from the first into `out`."""
        arrivals: list[_Arrival] = []
        numel = sum(part.tensor.numel() for part in mine)
        for rank in range(self.world_size):
            if rank == self.rank or not mine:
                arrivals.append(_Arrival(None, [], []))
                continue
            staging = None
            if out is not None:
                pieces = [out[part.offset : part.offset + part.tensor.numel()] for part in mine]
                out = None
            else:
                first = mine[0].tensor
                staging = self.buffers.borrow(numel, first.dtype, first.device)
                pieces = list(staging.split([part.tensor.numel() for part in mine]))
            works = [
                self.group.recv([piece], rank, _tag(self.instance, op, number))
                for number, piece in enumerate(pieces)
            ]
            arrivals.append(_Arrival(staging, pieces, works))
        return arrivals

    def gather(self, bucket: Tensor, shard: Tensor, *, op: Op) -> Pending:
        shards = bucket.chunk(self.world_size)
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        tag = _tag(self.instance, op, 0)
        with named(op):
            works = [self.group.recv([shards[rank]], rank, tag) for rank in others]
            works += [self.group.send([shard], rank, tag) for rank in others]
        copy_own(bucket, shard, self.rank)
        return Works(works, op)


@dataclass(frozen=True, slots=True)
class _Arrival:
    """What comes from one rank: its staging buffer, cut into pieces, one handle a piece."""

    staging: Tensor | None
    pieces: list[Tensor]
    works: list[Any]


class _ExchangedSum(Pending):
    """The second half of `Gloo.reduce`: add what arrived, in rank order, while in the cache."""

    def __init__(
        self,
        transport: Gloo,
        sends: list[Any],
        mine: list[Part],
        arrivals: list[_Arrival],
        out: Tensor,
        op: Op,
        sum_dtype: torch.dtype,
        finish: Finish,
    ) -> None:
        self.transport, self.op, self.out = transport, op, out
        self.sends, self.mine, self.arrivals = sends, mine, arrivals
        self.sum_dtype, self.finish = sum_dtype, finish
        self.waited = False

    def wait(self) -> None:
        """Wait for each piece, sum it, then wait until ours have left."""
        if self.waited:
            return
        self.waited = True
        for number, own in enumerate(self.mine):
            addends = []
            for rank, arrival in enumerate(self.arrivals):
                if rank == self.transport.rank:
                    addends.append(own.tensor)
                    continue
                with named(self.op):
                    arrival.works[number].wait()
                addends.append(arrival.pieces[number])
            piece = self.out[own.offset : own.offset + own.tensor.numel()]
            for start in range(0, piece.numel(), SUM_CHUNK):
                stop = start + SUM_CHUNK
                chunk = piece[start:stop]
                sum_into([addend[start:stop] for addend in addends], chunk, self.sum_dtype)
                self.finish(chunk)
        with named(self.op):
            for work in self.sends:
                work.wait()
        for arrival in self.arrivals:
            if arrival.staging is not None:
                self.transport.buffers.give_back(arrival.staging)
        self.sends, self.mine, self.arrivals = [], [], []


def _all_dtypes(parts: Iterable[Part], *dtypes: torch.dtype) -> bool:
    """Whether gradients, shard and sum are all of one dtype."""
    return len({*dtypes, *(part.tensor.dtype for part in parts)}) == 1


def _clip(parts: Iterable[Part], start: int, stop: int) -> Iterable[Part]:
    """The pieces of `parts` within [start, stop), with offsets from `start`."""
    for part in parts:
        first = max(part.offset, start)
        last = min(part.offset + part.tensor.numel(), stop)
        if first < last:
            piece = part.tensor[first - part.offset : last - part.offset]
            yield Part(first - start, piece)


_instances: Counter[str] = Counter()  # transports made over each process group


def _tag(instance: int, op: Op, message: int) -> int:
    """A tag that only the same message of the same operation has.

    gloo ends the process when a message of another size arrives under a tag that is waited for, so
    ranks that have come apart, or two optimizers in one backward, must never use the same. Bits:
    2 phase and channel, 4 instance, 5 round, 12 bucket, 8 message.
    """
    phase = 1 + op.channel if op.phase == "gather" else 0
    parts = ((phase, 2), (instance, 4), (op.round, 5), (op.bucket, 12), (message, 8))
    tag = 0
    for value, bits in parts:
        tag = tag << bits | value % (1 << bits)
    return tag
