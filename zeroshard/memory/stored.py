"""What is known of a storage, and of a step: what a tracker notes. Follows nothing itself."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

__all__ = ["PLAIN", "Moment", "Step", "Stored", "parts_of"]

PLAIN = {Tensor, nn.Parameter, nn.Buffer}
"""Types of tensors that are no subclass which takes itself apart first."""


@dataclass(slots=True, eq=False)
class Stored:
    """A storage, as long as it lived.

    Attributes:
        nbytes: at present.
        owner: category that its owner gave it, "" for none.
        identity: category of what it was found to be (a parameter, a buffer ...), "" for none.
        is_behind_blocks: made between the end of the last block and backward's return to it.
        outlived_forward: whether it was there when the forward that made it ended.
        outlived_step: whether it was there when the step that made it was over.
        was_sent: whether a collective was given it.
        operation: what made it.
    """

    nbytes: int = 0
    owner: str = ""
    identity: str = ""
    is_behind_blocks: bool = False
    outlived_forward: bool = False
    outlived_step: bool = False
    was_sent: bool = False
    operation: str = ""


@dataclass(frozen=True, slots=True)
class Moment:
    """From the change with this number on, a phase and a module."""

    at: int
    phase: str
    where: str


@dataclass
class Step:
    """What happened from the end of one optimizer step to the end of the next.

    Attributes:
        before: storages and their bytes when it began.
        changes: (storage, bytes from then on), in order.
        moments: phases and modules, in order.
        points: name of a point -> how many changes came before it.
    """

    number: int
    before: list[tuple[Stored, int]] = field(default_factory=list)
    changes: list[tuple[Stored, int]] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    points: dict[str, int] = field(default_factory=dict)


def parts_of(tensor: Tensor) -> Sequence[Tensor]:
    """The plain and dense tensors that a subclass, or a sparse tensor, is made of."""
    if type(tensor) in PLAIN:
        return [tensor] if tensor.layout is torch.strided else _parts_of_sparse(tensor.detach())
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        inner = [getattr(tensor, name) for name in names]  # a DTensor names its mesh, too
        return [part for value in inner if isinstance(value, Tensor) for part in parts_of(value)]
    return []


def _parts_of_sparse(tensor: Tensor) -> Sequence[Tensor]:
    """Indices and values; nothing of a layout that shows none."""
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []
