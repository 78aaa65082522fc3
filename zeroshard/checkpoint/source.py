"""What a checkpoint holds, whoever wrote it: tensors by name, and any range of any of them.

Knows no file format, no model and no ranks.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..boxes import row_major
from ..state import SAVED_KEYS

__all__ = ["FIELDS", "PerRank", "Source", "Stored"]

# What a source may hold of a trained parameter beside its weight. "master" is its fp32 values;
# "remainder" (int16) their lower halves, of which the bfloat16 weight is the upper; scales, [ceil(n
# / 256)] fp32, are those of 8-bit moments in storage order; "step" is [] fp32.
FIELDS = SAVED_KEYS


class PerRank(list[Any]):
    """A value that was not the same on all ranks: each rank's, in order."""


class Stored(ABC):
    """A tensor in a checkpoint.

    Args:
        shape: of the whole tensor.
        dtype: of it in the file.
        file: that it is in, or the first of several, for messages.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, file: Path) -> None:
        self.shape, self.dtype, self.file = tuple(shape), dtype, file

    @property
    def name(self) -> str:
        """Where it is, for messages."""
        return str(self.file)

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return prod(self.shape)

    @abstractmethod
    def read_range(self, stride: tuple[int, ...], start: int, numel: int) -> Tensor:
        """Elements [start, start + numel) in storage order, on the CPU, in the file's dtype.

        Memory beyond the result is bounded, whatever the size of the whole tensor, where the format
        allows it.

        Args:
            stride: dense; whose storage order the range is of.
            start: the first element.
            numel: how many.

        Raises:
            CheckpointError: the file is damaged; it names the file.
        """

    def check_range(  # noqa: B027 - most formats have no checksums
        self, stride: tuple[int, ...], start: int, numel: int
    ) -> None:
        """Compare with checksums, where there are any, what `read_range` would read.

        Raises:
            CheckpointError: a file is damaged; it names the file.
        """

    def forget(self) -> None:  # noqa: B027 - most keep nothing
        """Let go of what is kept in memory for the next `read_range`."""

    def read(self) -> Tensor:
        """The whole tensor, row-major."""
        return self.read_range(row_major(self.shape), 0, self.numel).reshape(self.shape)


def _nothing() -> None:
    pass


@dataclass(kw_only=True)
class Source:
    """A checkpoint that is open for reading; a context that closes it.

    Attributes:
        what: names its kind for messages: "a DeepSpeed checkpoint".
        path: of it.
        weights: parameters and buffers by name, as the model's `state_dict()` names them, tied ones
            under each of their names. May lack those that it has masters of.
        state: {name: {field: tensor}} of trained parameters; see FIELDS.
        groups: the param groups with names under "params"; None where it holds none.
        groups_are_by_name: whether options were saved for each parameter, so that `groups` has one
            for each.
        strides: of parameters that are not row-major, by name.
        step: how many steps were made, if it says so.
        scheduler: the scheduler's state dict, or None.
        rng: random states, one entry for each rank.
        extra: what else was saved with it, by name. What is sharded in it is a `Stored`.
        gradients: by name, those that wait for a step.
        close: lets go of its files.
    """

    what: str
    path: Path
    weights: dict[str, Stored] = field(default_factory=dict)
    state: dict[str, dict[str, Stored]] = field(default_factory=dict)
    groups: list[dict[str, Any]] | None = None
    groups_are_by_name: bool = False
    strides: dict[str, tuple[int, ...]] = field(default_factory=dict)
    step: int | None = None
    scheduler: Any = None
    rng: list[dict[str, Any]] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    gradients: dict[str, Stored] = field(default_factory=dict)
    close: Callable[[], None] = _nothing

    def __enter__(self) -> "Source":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
