"""Tensors and values in a folder of torch.distributed.checkpoint, whoever wrote it.

A range is read chunk by chunk; a chunk is compared with its checksum, where there is one, before
anything of it is used.
"""

import bisect
import io
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from ..boxes import Box, block, boxes_of
from ..errors import CheckpointError
from ..folders import METADATA, as_asked, opened
from .source import Stored
from .trimming import Trimmer
from .versions import MANIFEST, Item, check_item, read_checksums, read_manifest

__all__ = ["DcpFolder", "StoredChunks"]


class DcpFolder:
    """One folder, whose tensors are read chunk by chunk.

    Args:
        path: of it.

    Attributes:
        metadata: what it says it holds.
        manifest: what `save_checkpoint` said about it; None where something else wrote it.

    Raises:
        CheckpointError: it cannot be read, or files of it are missing or cut off.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest: dict[str, Any] | None = None
        self._sums: dict[tuple[str, int], Item] = {}
        if (path / MANIFEST).exists():
            self.manifest, self._sums = read_manifest(path), read_checksums(path)
            check_item(path, self._sums[METADATA, 0])
        self.reader, self.metadata = opened(path, "torch.distributed.checkpoint")
        self.reader.set_up_storage_reader(self.metadata, is_coordinator=True)
        self._sound: set[tuple[str, int]] = set()
        self._last: dict[str, tuple[int, Tensor]] = {}  # by key: the chunk that was read last
        self._trimmer = Trimmer()

    def check(self, index: MetadataIndex) -> None:
        """Compare what is stored under an index with its checksum, once.

        Raises:
            CheckpointError: they differ.
        """
        info = self.metadata.storage_data[index]
        place = (info.relative_path, info.offset)
        if place in self._sums and place not in self._sound:
            check_item(self.path, self._sums[place])
            self._sound.add(place)

    def value(self, key: str) -> Any:
        """What is stored under a key that is no tensor."""
        return self._read(key, MetadataIndex(key), None)

    def chunk(self, key: str, number: int) -> Tensor:
        """A whole chunk of a tensor; the last one of each key is kept."""
        if self._last.get(key, (-1,))[0] != number:
            chunk = self.entry(key).chunks[number]
            self._last.pop(key, None)
            value = self._read(key, MetadataIndex(key, chunk.offsets, number), chunk)
            self._trimmer.count(value.nbytes)
            self._last[key] = (number, value)
        return self._last[key][1]

    def forget(self, key: str) -> None:
        """Let go of what is kept of a key."""
        self._last.pop(key, None)

    def index_of(self, key: str, number: int) -> MetadataIndex:
        """Under which a chunk is stored."""
        return MetadataIndex(key, self.entry(key).chunks[number].offsets)

    def entry(self, key: str) -> TensorStorageMetadata:
        """What is said about a tensor."""
        entry = self.metadata.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        return entry

    def _read(self, key: str, index: MetadataIndex, chunk: ChunkStorageMetadata | None) -> Any:
        self.check(index)
        item = ReadItem(
            type=LoadItemType.BYTE_IO if chunk is None else LoadItemType.TENSOR,
            dest_index=index,
            dest_offsets=torch.Size(()) if chunk is None else torch.Size([0] * len(chunk.sizes)),
            storage_index=index,
            storage_offsets=torch.Size(()) if chunk is None else torch.Size([0] * len(chunk.sizes)),
            lengths=torch.Size(()) if chunk is None else chunk.sizes,
        )
        entry = self.metadata.state_dict_metadata[key]
        dtype = entry.properties.dtype if isinstance(entry, TensorStorageMetadata) else None
        receiver = _Receiver(dtype)
        info = self.metadata.storage_data[index]
        try:
            with as_asked(self.path, alone=False):
                self.reader.read_data(LoadPlan([item]), receiver).wait()
        except Exception as error:
            file = self.path / info.relative_path
            if "weights_only" in str(error):
                raise CheckpointError(
                    f"{file}: {key} is something that would have to be read as code (Weights only)"
                ) from error
            raise CheckpointError(f"{file} is damaged: {key} cannot be read: {error}") from error
        return receiver.value


class _Receiver(DefaultLoadPlanner):
    """Takes one item as it comes, and no code out of a file."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.dtype = dtype
        self.value: Any = None

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.value = torch.load(value, map_location="cpu", weights_only=True)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        self.value = tensor = torch.empty(read_item.lengths, dtype=self.dtype)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass


class StoredChunks(Stored):
    """A tensor in a folder of torch.distributed.checkpoint."""

    def __init__(self, folder: DcpFolder, key: str) -> None:
        self.folder, self.key = folder, key
        entry = folder.entry(key)
        first = folder.metadata.storage_data[folder.index_of(key, 0)] if entry.chunks else None
        file = folder.path / (METADATA if first is None else first.relative_path)
        super().__init__(tuple(entry.size), entry.properties.dtype, file)
        self.chunks = entry.chunks
        # By where they begin along the first dimension, to find those of a box without a look at
        # all of them.
        self._order = sorted(range(len(self.chunks)), key=lambda n: self.chunks[n].offsets[:1])
        self._firsts = [tuple(self.chunks[n].offsets[:1]) for n in self._order]
        self._tallest = max((tuple(c.sizes[:1]) for c in self.chunks), default=())

    def read_range(self, stride: tuple[int, ...], start: int, numel: int) -> Tensor:
        flat = torch.empty(numel, dtype=self.dtype)
        for box in boxes_of(self.shape, stride, start, numel):
            target = block(flat, box, stride)
            for number, inside in self._overlapping(box):
                chunk = self.folder.chunk(self.key, number)
                there = tuple(
                    slice(i - o, i - o + n)
                    for i, o, n in zip(
                        inside.offsets, self.chunks[number].offsets, inside.sizes, strict=True
                    )
                )
                here = tuple(
                    slice(i - o, i - o + n)
                    for i, o, n in zip(inside.offsets, box.offsets, inside.sizes, strict=True)
                )
                target[here] = chunk[there]
        return flat

    def check_range(self, stride: tuple[int, ...], start: int, numel: int) -> None:
        for box in boxes_of(self.shape, stride, start, numel):
            for number, _ in self._overlapping(box):
                self.folder.check(self.folder.index_of(self.key, number))

    def forget(self) -> None:
        self.folder.forget(self.key)

    def _overlapping(self, box: Box) -> Iterator[tuple[int, Box]]:
        """(chunk's number, what of it is in the box), checking that they make up the box."""
        found = 0
        first, last = 0, len(self._order)
        if box.offsets:
            lowest = box.offsets[0] - self._tallest[0] + 1
            first = bisect.bisect_left(self._firsts, (lowest,))
            last = bisect.bisect_left(self._firsts, (box.offsets[0] + box.sizes[0],))
        for place in range(first, last):
            number = self._order[place]
            chunk = self.chunks[number]
            offsets = tuple(map(max, zip(box.offsets, chunk.offsets, strict=True)))
            ends = (
                min(a + m, b + n)
                for a, m, b, n in zip(
                    box.offsets, box.sizes, chunk.offsets, chunk.sizes, strict=True
                )
            )
            sizes = tuple(end - offset for end, offset in zip(ends, offsets, strict=True))
            if all(size > 0 for size in sizes):
                found += prod(sizes)
                yield number, Box(offsets, sizes, 0)
        if found != prod(box.sizes):
            raise CheckpointError(
                f"{self.folder.path}: of {self.key} there are {found} elements of the "
                f"{prod(box.sizes)} from {box.offsets}; the checkpoint is not complete"
            )
