"""A contiguous range of a tensor's storage order as boxes, which checkpoints can name.

Pure arithmetic: a ragged slice of a matrix is at most a partial first row, whole rows and a partial
last row; of an n-d tensor the same by recursion.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

__all__ = ["Box", "block", "boxes_of", "row_major", "split"]


@dataclass(frozen=True, slots=True)
class Box:
    """A block of a tensor: `sizes` from `offsets`, and where it begins in the range."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int


def boxes_of(
    shape: tuple[int, ...], stride: tuple[int, ...], start: int, numel: int, at: int = 0
) -> list[Box]:
    """The boxes of elements [start, start + numel) in storage order, in that order.

    Args:
        shape: of the tensor.
        stride: of the tensor, dense.
        start: first element, in storage order.
        numel: how many.
        at: where the range begins in the local tensor; boxes count from there.
    """
    order = sorted(range(len(shape)), key=lambda dim: (-stride[dim], dim))
    found: list[Box] = []
    for offsets, sizes in _boxes(tuple(shape[dim] for dim in order), start, numel):
        back = [order.index(dim) for dim in range(len(shape))]
        place = tuple(offsets[dim] for dim in back)
        found.append(Box(place, tuple(sizes[dim] for dim in back), at))
        at += prod(sizes)
    return found


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def split(box: Box, stride: tuple[int, ...], most: int) -> list[Box]:
    """Cut a box into boxes of at most `most` elements, in storage order."""
    if prod(box.sizes) <= most:
        return [box]
    order = sorted(range(len(box.sizes)), key=lambda dim: (-stride[dim], dim))
    outer = next(dim for dim in order if box.sizes[dim] > 1)
    inner = prod(box.sizes) // box.sizes[outer]  # elements for each of its indices
    step = max(1, most // inner)
    found = []
    for first in range(0, box.sizes[outer], step):
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[outer] += first
        sizes[outer] = min(step, sizes[outer] - first)
        found += split(Box(tuple(offsets), tuple(sizes), box.start + first * inner), stride, most)
    return found


def block(flat: Any, box: Box, stride: tuple[int, ...]) -> Any:
    """A box's elements as a view of the flat tensor that `box.start` counts in.

    Dense in the order of the whole tensor's strides, as its elements lie in storage order.
    """
    order = sorted(range(len(box.sizes)), key=lambda dim: (-stride[dim], dim))
    ordered = flat[box.start : box.start + prod(box.sizes)].view([box.sizes[d] for d in order])
    return ordered.permute([order.index(dim) for dim in range(len(box.sizes))])


def _boxes(
    shape: tuple[int, ...], start: int, numel: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offsets, sizes) of a range of a contiguous tensor."""
    if numel == 0:
        return []
    if not shape:
        return [((), ())]
    row = prod(shape[1:])
    first, last = start // row, (start + numel - 1) // row
    if first == last and numel < row:  # within one row
        return [
            ((first, *offsets), (1, *sizes))
            for offsets, sizes in _boxes(shape[1:], start - first * row, numel)
        ]
    found = []
    if start % row:  # the rest of the first row
        found += _boxes(shape, start, row - start % row)
        first += 1
    whole = (start + numel) // row - first
    if whole:
        zeros = (0,) * (len(shape) - 1)
        found.append(((first, *zeros), (whole, *shape[1:])))
    rest = start + numel - (first + whole) * row
    if rest:
        found += _boxes(shape, (first + whole) * row, rest)
    return found
