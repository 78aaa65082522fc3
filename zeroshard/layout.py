"""Who owns which element: parameter -> slot -> bucket -> shard. No tensors, no communication.

Slots lie back to back in an arena, each at a multiple of BLOCK elements, in the order in which
backward makes their gradients. An arena is cut into buckets, a bucket into one shard per rank;
neither cut looks at slots. A run is the part of a rank's shard that belongs to one slot.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod

from .errors import ConfigError

__all__ = [
    "BLOCK",
    "KEPT_WHOLE",
    "ArenaPlan",
    "Bucket",
    "Layout",
    "ParamSpec",
    "Run",
    "Segment",
    "Slot",
    "plan_layout",
]

BLOCK = 256
"""Elements. No slot, bucket or shard boundary ever cuts through a block, so a block means the
same elements at every world size."""

KEPT_WHOLE = "(kept whole)"
"""The unit of parameters that are never freed where others are: those of one element."""

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """A parameter as the layout sees it."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # dense: a permutation of the contiguous strides
    dtype: str
    device: str
    unit: str = ""  # what is gathered and freed together; "" is the root unit

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A parameter's place: `numel` elements from `offset` of its arena, in storage order."""

    index: int
    spec: ParamSpec
    arena: int
    offset: int

    @property
    def numel(self) -> int:
        """Elements of the parameter, without padding."""
        return self.spec.numel


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A contiguous range of an arena that one reduce-scatter and one all-gather handle."""

    index: int
    arena: int
    offset: int  # in the arena
    numel: int  # a multiple of BLOCK * world_size
    shard_numel: int
    shard_offset: int  # of this bucket's shard in a rank's flat shard of the arena


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The part of one rank's shard of one bucket that belongs to one slot."""

    slot: int
    bucket: int
    rank: int
    arena_offset: int
    slot_offset: int
    shard_offset: int  # in the rank's flat shard of the arena
    numel: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A range [start, stop) of a bucket that is sent as one piece: one large slot, or several."""

    start: int
    stop: int
    slots: tuple[int, ...]
    direct: bool  # one slot's gradient, which can be sent from where it lies

    @property
    def numel(self) -> int:
        """Elements in the segment, padding between its slots included."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaPlan:
    """The slots of one unit, dtype and device, and the buckets they are cut into."""

    index: int
    unit: str
    dtype: str
    device: str
    numel: int  # a multiple of BLOCK * world_size
    slots: tuple[Slot, ...]
    buckets: tuple[Bucket, ...]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The plan of all arenas; grows by whole arenas when parameters are added later."""

    world_size: int
    bucket_nbytes: int
    arenas: tuple[ArenaPlan, ...]

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        """All slots by index."""
        slots = [slot for arena in self.arenas for slot in arena.slots]
        return tuple(sorted(slots, key=lambda slot: slot.index))

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """All buckets by index."""
        return tuple(bucket for arena in self.arenas for bucket in arena.buckets)

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """All runs of all ranks, by slot and then by offset in the slot."""
        return tuple(run for runs in self.runs_of_slot for run in runs)

    @cached_property
    def runs_of_slot(self) -> tuple[tuple[Run, ...], ...]:
        """The runs of each slot over all ranks."""
        return tuple(tuple(self._runs_of(slot)) for slot in self.slots)

    @cached_property
    def _runs_of_rank(self) -> dict[int, tuple[tuple[Run, ...], ...]]:
        return {}

    def runs_of_rank(self, rank: int) -> tuple[tuple[Run, ...], ...]:
        """The runs of each slot on one rank, however many ranks there are."""
        known = self._runs_of_rank
        if rank not in known:
            known[rank] = tuple(tuple(self._runs_of(slot, rank)) for slot in self.slots)
        return known[rank]

    def ranges_by_rank(self, slot: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each rank, (start, elements) of its runs of a slot, in the slot."""
        by_rank: list[list[tuple[int, int]]] = [[] for _ in range(self.world_size)]
        for bucket, begin, end in self._parts(self.slots[slot]):
            from_slot = bucket.offset - self.slots[slot].offset
            size = bucket.shard_numel
            first = begin // size
            starts = [begin, *range((first + 1) * size, end, size)]
            stops = [*starts[1:], end]
            for rank, (start, stop) in enumerate(zip(starts, stops, strict=True), first):
                by_rank[rank].append((from_slot + start, stop - start))
        return tuple(tuple(ranges) for ranges in by_rank)

    @cached_property
    def buckets_of_slot(self) -> tuple[tuple[int, ...], ...]:
        """The buckets that hold a part of each slot; none for a zero-size slot."""
        return tuple(
            tuple(bucket.index for bucket, _, _ in self._parts(slot)) for slot in self.slots
        )

    def _parts(self, slot: Slot) -> Iterator[tuple[Bucket, int, int]]:
        """Each bucket that the slot lies in, with [begin, end) of its part there."""
        if slot.numel == 0:
            return
        buckets = self.arenas[slot.arena].buckets
        bucket_numel = buckets[0].numel
        first = slot.offset // bucket_numel
        last = (slot.offset + slot.numel - 1) // bucket_numel
        for bucket in buckets[first : last + 1]:
            begin = max(slot.offset - bucket.offset, 0)
            yield bucket, begin, min(slot.offset + slot.numel - bucket.offset, bucket.numel)

    def _runs_of(self, slot: Slot, rank: int | None = None) -> Iterator[Run]:
        """The slot's runs over all ranks, or on one, in the order of their elements."""
        for bucket, begin, end in self._parts(slot):
            ranks = range(begin // bucket.shard_numel, (end - 1) // bucket.shard_numel + 1)
            if rank is not None:
                ranks = range(rank, rank + 1) if rank in ranks else range(0)
            for owner in ranks:
                shard = owner * bucket.shard_numel
                start, stop = max(begin, shard), min(end, shard + bucket.shard_numel)
                yield Run(
                    slot=slot.index,
                    bucket=bucket.index,
                    rank=owner,
                    arena_offset=bucket.offset + start,
                    slot_offset=bucket.offset + start - slot.offset,
                    shard_offset=bucket.shard_offset + start - shard,
                    numel=stop - start,
                )

    @cached_property
    def slots_of_bucket(self) -> tuple[tuple[int, ...], ...]:
        """The slots that lie in each bucket, at least with a part, by offset."""
        found: list[list[int]] = [[] for _ in self.buckets]
        for arena in self.arenas:
            for slot in arena.slots:
                for bucket in self.buckets_of_slot[slot.index]:
                    found[bucket].append(slot.index)
        return tuple(tuple(slots) for slots in found)

    def local_range(self, slot: int, rank: int) -> tuple[int, int]:
        """[start, stop) of the slot in a rank's flat shard of the arena.

        A slot that goes through several buckets is still one range: it ends its share of a bucket
        where the shard ends and continues where the next bucket's shard begins.
        """
        runs = self.runs_of_rank(rank)[slot]
        if not runs:
            return (0, 0)
        return (runs[0].shard_offset, runs[-1].shard_offset + runs[-1].numel)

    def segments(self, bucket: int, direct_numel: int | None) -> tuple[Segment, ...]:
        """How a bucket is cut into pieces to send.

        Args:
            bucket: index of the bucket.
            direct_numel: from how many elements a slot's part is a segment of its own; the small
                ones between are packed together. None: the whole bucket is one packed segment.
        """
        plan = self.buckets[bucket]
        slots = self.slots_of_bucket[bucket]
        if direct_numel is None:
            return (Segment(start=0, stop=plan.numel, slots=slots, direct=False),)
        segments: list[Segment] = []
        for index in slots:
            start, stop = self.part(bucket, index)
            direct = stop - start >= direct_numel
            if segments and not direct and not segments[-1].direct:
                last = segments.pop()
                start, index_slots = last.start, (*last.slots, index)
            else:
                index_slots = (index,)
            segments.append(Segment(start=start, stop=stop, slots=index_slots, direct=direct))
        return tuple(segments)

    def part(self, bucket: int, slot: int) -> tuple[int, int]:
        """[start, stop) in the bucket of the slot's part that lies in it, without padding."""
        plan, place = self.buckets[bucket], self.slots[slot]
        start = max(place.offset - plan.offset, 0)
        return (start, min(place.offset + place.numel - plan.offset, plan.numel))

    def extend(self, specs: Sequence[ParamSpec]) -> "Layout":
        """The same layout with new arenas for `specs` behind the present ones."""
        added = _plan_arenas(
            specs,
            world_size=self.world_size,
            bucket_nbytes=self.bucket_nbytes,
            first_slot=len(self.slots),
            first_arena=len(self.arenas),
            first_bucket=len(self.buckets),
        )
        return Layout(
            world_size=self.world_size,
            bucket_nbytes=self.bucket_nbytes,
            arenas=(*self.arenas, *added),
        )

    def describe(self) -> dict[str, str]:
        """Every slot in words, for the comparison of ranks at construction."""
        return {
            f"parameter {slot.index} ({slot.spec.name})": (
                f"shape {slot.spec.shape}, {slot.spec.dtype}, stride {slot.spec.stride}, "
                f"offset {slot.offset} of arena {slot.arena}"
            )
            for slot in self.slots
        }


def fingerprint(description: dict[str, str]) -> str:
    """A short digest of a description; equal digests mean equal descriptions."""
    text = "\n".join(f"{key}={value}" for key, value in description.items())
    return hashlib.sha256(text.encode()).hexdigest()


def first_difference(descriptions: Sequence[dict[str, str]]) -> tuple[str, list[str]]:
    """The first entry in which descriptions differ, and its value in each of them."""
    for key in dict.fromkeys(key for description in descriptions for key in description):
        values = [description.get(key, "missing") for description in descriptions]
        if len(set(values)) > 1:
            return key, values
    return "the order of parameters", ["differs"] * len(descriptions)


def plan_layout(
    specs: Sequence[ParamSpec], *, world_size: int, bucket_nbytes: int = 25 * 2**20
) -> Layout:
    """Plan arenas, buckets and shards for `specs`, given in forward order.

    Args:
        specs: the trainable parameters, each once; slot indices follow this order, offsets the
            reverse (backward) one.
        world_size: ranks that share each bucket.
        bucket_nbytes: target size of a bucket in bytes of the arena's dtype.
    """
    empty = Layout(world_size=world_size, bucket_nbytes=bucket_nbytes, arenas=())
    return empty.extend(specs)


def _round_up(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple


def _plan_arenas(
    specs: Sequence[ParamSpec],
    *,
    world_size: int,
    bucket_nbytes: int,
    first_slot: int,
    first_arena: int,
    first_bucket: int,
) -> list[ArenaPlan]:
    if world_size < 1:
        raise ConfigError(f"world_size must be at least 1, got {world_size}")
    members: dict[tuple[str, str, str], list[int]] = {}
    for index in reversed(range(len(specs))):
        spec = specs[index]
        members.setdefault((spec.unit, spec.dtype, spec.device), []).append(index)
    arenas: list[ArenaPlan] = []
    for (unit, dtype, device), indices in members.items():
        ends = list(accumulate(_round_up(specs[index].numel, BLOCK) for index in indices))
        numel = _round_up(ends[-1], BLOCK * world_size)
        bucket_numel = max(bucket_nbytes // ITEMSIZE[dtype] // (BLOCK * world_size), 1)
        bucket_numel *= BLOCK * world_size
        arena = first_arena + len(arenas)
        buckets = tuple(
            Bucket(
                index=first_bucket + number,
                arena=arena,
                offset=offset,
                numel=min(bucket_numel, numel - offset),
                shard_numel=min(bucket_numel, numel - offset) // world_size,
                shard_offset=offset // world_size,
            )
            for number, offset in enumerate(range(0, numel, bucket_numel))
        )
        first_bucket += len(buckets)
        slots = tuple(
            Slot(index=first_slot + index, spec=specs[index], arena=arena, offset=offset)
            for index, offset in zip(indices, [0, *ends], strict=False)
        )
        arenas.append(
            ArenaPlan(
                index=arena,
                unit=unit,
                dtype=dtype,
                device=device,
                numel=numel,
                slots=slots,
                buckets=buckets,
            )
        )
    return arenas
