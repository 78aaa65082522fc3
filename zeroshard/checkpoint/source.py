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

__all__ = ["FIELDS", "Source", "Stored"]

# What a source may hold of a trained parameter beside its weight. "master" is its fp32 values;
# "remainder" (int16) their lower halves, of which the bfloat16 weight is the upper; scales, [ceil(n
# / 256)] fp32, are those of 8-bit moments in storage order; "step" is [] fp32.
FIELDS = (
    "step",
    "exp_avg",
    "exp_avg_sq",
    "exp_avg_scale",
    "exp_avg_sq_scale",
    "master",
    "remainder",
)


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
            ConfigError: the file is damaged; it names the file.
        """

    def read(self) -> Tensor:
        """The whole tensor, row-major."""
        stride = tuple(prod(self.shape[dim + 1 :]) for dim in range(len(self.shape)))
        return self.read_range(stride, 0, self.numel).reshape(self.shape)


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
        step: how many steps were made, if it says so.
        scheduler: the scheduler's state dict, or None.
        rng: random states, one entry for each rank.
        extra: what else was saved with it, by name.
        close: lets go of its files.
    """

    what: str
    path: Path
    weights: dict[str, Stored] = field(default_factory=dict)
    state: dict[str, dict[str, Stored]] = field(default_factory=dict)
    groups: list[dict[str, Any]] | None = None
    step: int | None = None
    scheduler: Any = None
    rng: list[dict[str, Any]] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    close: Callable[[], None] = _nothing

    def __enter__(self) -> "Source":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
