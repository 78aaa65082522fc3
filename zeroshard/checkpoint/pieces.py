"""Tensors of a checkpoint by pieces, with an account of how far it is."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..boxes import row_major
from ..weights import PIECE
from .source import Stored
from .trimming import Trimmer

__all__ = ["Ordered", "Pieces"]


@dataclass(frozen=True, eq=False)
class Ordered:
    """A tensor and the strides that it is written with.

    Those of its parameter, where state is to have the same as in training.
    """

    stored: Stored
    stride: tuple[int, ...]


class Pieces:
    """Reads tensors and counts their bytes.

    Args:
        on_progress: called with the bytes that were read and those that will be; or None.
    """

    def __init__(self, on_progress: Callable[[int, int], object] | None = None) -> None:
        self.on_progress = on_progress
        self.done = self.total = 0
        self._trimmer = Trimmer()

    def expect(self, stored: Iterable[Stored]) -> None:
        """Say what will be read."""
        self.total += sum(tensor.numel * tensor.dtype.itemsize for tensor in stored)

    def of(self, stored: Stored, stride: tuple[int, ...] | None = None) -> Iterator[Tensor]:
        """All elements in storage order, flat; a tensor without any is one piece.

        Args:
            stored: the tensor.
            stride: whose storage order; None: row-major.
        """
        stride = row_major(stored.shape) if stride is None else stride
        for start in range(0, max(1, stored.numel), PIECE):
            yield self._read(stored, stride, start, min(PIECE, stored.numel - start))

    def range_of(self, ordered: Ordered, start: int, numel: int) -> Tensor:
        """Elements [start, start + numel) in storage order, put together from pieces."""
        flat = torch.empty(numel, dtype=ordered.stored.dtype)
        for first in range(0, numel, PIECE):
            part = flat[first : first + PIECE]
            part.copy_(self._read(ordered.stored, ordered.stride, start + first, part.numel()))
        return flat

    def _read(self, stored: Stored, stride: tuple[int, ...], start: int, numel: int) -> Tensor:
        piece = stored.read_range(stride, start, numel)
        if start + numel == stored.numel:
            stored.forget()
        self.done += piece.nbytes
        self._trimmer.count(piece.nbytes)
        if self.on_progress is not None:
            self.on_progress(self.done, self.total)
        return piece
