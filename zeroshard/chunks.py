"""A part of a tensor as torch.distributed.checkpoint asks for it: chunks that are boxes.

Knows no ranks and no layout.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from .boxes import Box, block, boxes_of, split

__all__ = ["CHUNK_NBYTES", "Chunks"]

CHUNK_NBYTES = 4 * 2**20
"""The largest chunk. Who reads a part of it reads it whole, so it bounds the memory of reading."""


class Chunks:
    """Ranges of a tensor's storage order, and where they lie.

    Args:
        flat: [n] that holds the elements.
        shape: of the whole tensor.
        stride: of the whole tensor, dense.
        ranges: (first element in storage order, elements, where in `flat` they begin).
    """

    def __init__(
        self,
        flat: Tensor,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        ranges: Sequence[tuple[int, int, int]],
    ) -> None:
        self.flat, self.shape, self.stride, self.ranges = flat, shape, stride, ranges

    @cached_property
    def boxes(self) -> list[Box]:
        """The chunks. `Box.start` counts in `flat`."""
        if 0 in self.shape:  # no elements, which somebody has to say
            return [Box((0,) * len(self.shape), self.shape, 0)] if self.ranges else []
        most = CHUNK_NBYTES // self.flat.element_size()
        found: list[Box] = []
        for start, numel, at in self.ranges:
            for box in boxes_of(self.shape, self.stride, start, numel, at):
                found += split(box, self.stride, most)
        return found

    def on_host(self) -> "Chunks":
        """A copy of the elements, and no others, in host memory."""
        total = sum(numel for _, numel, _ in self.ranges)
        copy = torch.empty(total, dtype=self.flat.dtype)
        ranges, taken = [], 0
        for start, numel, at in self.ranges:
            copy[taken : taken + numel].copy_(self.flat[at : at + numel])
            ranges.append((start, numel, taken))
            taken += numel
        return Chunks(copy, self.shape, self.stride, ranges)

    # The protocol by which torch.distributed.checkpoint asks a value for its chunks.

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.flat)
        size = torch.Size(self.shape)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=size),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            for box in self.boxes
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        view: Tensor = block(self.flat, self._by_offsets[tuple(index.offset or ())], self.stride)
        return view

    @cached_property
    def _by_offsets(self) -> dict[tuple[int, ...], Box]:
        return {box.offsets: box for box in self.boxes}
