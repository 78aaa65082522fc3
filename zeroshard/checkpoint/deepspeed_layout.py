"""Which element of which parameter lies where in the flat tensors of DeepSpeed's ranks.

Knows no files. See [Note: how parameters lie in the files].

[Note: how parameters lie in the files]
Each rank's file holds flat tensors of fp32 weights and, of the same lengths or padded, of moments.

Stages 1 and 2: one for each param group. The ranks' tensors one after the other are the group's
parameters one after the other, in the order of `param_shapes`, with `param_alignment_paddings` in
between where the file has them. (`param_slice_mappings` is made for the order of before
`round_robin_gradients`, and says something else with that option.) Padding at the end, of
`group_paddings` elements, is cut off from the weights and not from the moments; with
`elastic_checkpoint` from both, by the optimizer of bfloat16 with fp32 gradients from neither.

Stage 3: one for each sub-group of a param group. Every parameter is dealt out evenly: of n elements
each of W ranks has the next ceil(n / W), the last ones padded. So in every rank's flat tensor the
parameters of the sub-group lie one after the other with that many elements each. Frozen ones are
dealt out alike, each a tensor of its own in the files of the weights.

Parameters without elements are among the frozen ones, and in no flat tensor.
"""

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from ..boxes import block, boxes_of
from .source import Stored

__all__ = ["Dealt", "Line", "OnLine", "Shapes", "line_offsets", "share_of", "share_offsets"]

BUFFER_NUMEL = 2**18  # read at a time, where elements are wanted in another order

Shapes = Mapping[str, tuple[int, ...]]


def line_offsets(shapes: Shapes, paddings: Sequence[int]) -> tuple[dict[str, int], int]:
    """Where each parameter begins among all ranks' elements of its group, and where the last ends.

    Args:
        shapes: of the group's parameters, in their order.
        paddings: elements after each of them.
    """
    offsets, end, padding = {}, 0, 0
    for (name, shape), after in zip(shapes.items(), paddings, strict=True):
        offsets[name] = end + padding
        end, padding = offsets[name] + prod(shape), after
    return offsets, end


def share_of(shape: tuple[int, ...], count: int) -> int:
    """Elements of a parameter that each of `count` ranks has in stage 3, padding included."""
    return -(-prod(shape) // count)


def share_offsets(shapes: Shapes, count: int) -> tuple[dict[str, int], int]:
    """Where each parameter begins in every rank's flat tensor of its sub-group, and the end."""
    offsets, end = {}, 0
    for name, shape in shapes.items():
        offsets[name] = end
        end += share_of(shape, count)
    return offsets, end


class _Flat(Stored):
    """A tensor whose elements, row-major, are ranges of flat tensors."""

    @abstractmethod
    def pieces(self, start: int, numel: int) -> Iterable[Tensor]:
        """Elements [start, start + numel) in row-major order, as views; numel is not 0."""

    def read_range(self, stride: tuple[int, ...], start: int, numel: int) -> Tensor:
        flat = torch.empty(numel, dtype=self.dtype)
        order = sorted(range(len(self.shape)), key=lambda dim: (-stride[dim], dim))
        if numel and order == list(range(len(order))):
            torch.cat(tuple(self.pieces(start, numel)), out=flat)
            return flat
        for box in boxes_of(self.shape, stride, start, numel):
            self._fill(block(flat, box, stride), 0, self.shape, box.offsets)
        return flat

    def _fill(
        self, into: Tensor, start: int, shape: tuple[int, ...], offsets: tuple[int, ...]
    ) -> None:
        """Copy the block at `offsets` of the part with that shape that begins at `start`."""
        row = prod(shape[1:])
        start += offsets[0] * row
        if row > BUFFER_NUMEL and len(shape) > 1:
            for index, part in enumerate(into):
                self._fill(part, start + index * row, shape[1:], offsets[1:])
            return
        sizes = zip(offsets[1:], into.shape[1:], strict=True)
        inside = (slice(None), *(slice(offset, offset + size) for offset, size in sizes))
        rows = max(1, BUFFER_NUMEL // row)
        for part in into.split(rows):
            values = torch.cat(tuple(self.pieces(start, len(part) * row)))
            part.copy_(values.view((len(part), *shape[1:]))[inside])
            start += len(part) * row


class Line:
    """The flat tensors of all ranks, one after the other."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.ends = list(accumulate(tensor.numel() for tensor in tensors))

    def pieces(self, start: int, numel: int) -> Iterable[Tensor]:
        """Elements [start, start + numel) as views."""
        index, stop = bisect_right(self.ends, start), start + numel
        while start < stop:
            tensor, end = self.tensors[index], min(self.ends[index], stop)
            yield tensor.narrow(0, start - self.ends[index] + tensor.numel(), end - start)
            start, index = end, index + 1


class OnLine(_Flat):
    """A parameter of stages 1 and 2, which begins at `offset` of a line."""

    def __init__(self, shape: tuple[int, ...], line: Line, offset: int, file: Path) -> None:
        super().__init__(shape, line.tensors[0].dtype, file)
        self.line, self.offset = line, offset

    def pieces(self, start: int, numel: int) -> Iterable[Tensor]:
        return self.line.pieces(self.offset + start, numel)


class Dealt(_Flat):
    """A parameter of stage 3, of which every rank has a part from `offset` of its flat tensor."""

    def __init__(
        self, shape: tuple[int, ...], tensors: Sequence[Tensor], offset: int, file: Path
    ) -> None:
        super().__init__(shape, tensors[0].dtype, file)
        self.tensors, self.offset = tensors, offset
        self.share = share_of(self.shape, len(tensors))

    def pieces(self, start: int, numel: int) -> Iterable[Tensor]:
        stop = start + numel
        while start < stop:
            rank, at = divmod(start, self.share)
            here = min(self.share - at, stop - start)
            yield self.tensors[rank].narrow(0, self.offset + at, here)
            start += here
