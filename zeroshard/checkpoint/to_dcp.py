"""A folder as torch.distributed.checkpoint writes it, in bounded memory."""

from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from ..boxes import Box, block, row_major, split
from ..chunks import CHUNK_NBYTES, Chunks
from ..transport import HostRanks
from .dcp_writing import write_files
from .decoded import groups_of, ordered_of, others_of, state_of
from .extra import mapped
from .pieces import Ordered, Pieces
from .source import Source, Stored

__all__ = ["write_dcp"]


def write_dcp(path: Path, source: Source, weights: dict[str, Stored], reading: Pieces) -> None:
    """Write what `dcp.save({"model": ..., "optimizer": ...})` does, and what else there is.

    The names are those of torch's `get_state_dict`: `model.<name>`,
    `optimizer.state.<name>.<field>` and `optimizer.param_groups.<number>.<option>`.

    Args:
        path: of the folder.
        source: the checkpoint.
        weights: of it, as they are to be written.
        reading: reads them.
    """
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, stored in weights.items():
        if first.setdefault(id(stored), name) != name:
            aliases[f"model.{name}"] = f"model.{first[id(stored)]}"
    ordered = ordered_of(source, weights)
    model = {name: ordered[name] for name in first.values()}
    optimizer = {"state": state_of(source, weights), "param_groups": groups_of(source)}
    content: dict[str, Any] = {"model": model, "optimizer": optimizer}
    content.update(others_of(source))
    path.mkdir()
    write_files(path, mapped(content, lambda v: _lazily(v, reading)), aliases, HostRanks(None))


def _lazily(value: Any, reading: Pieces) -> Any:
    """A tensor that is read when it is written; anything else as it is."""
    if isinstance(value, Stored):
        value = Ordered(value, row_major(value.shape))
    if not isinstance(value, Ordered):
        return value
    reading.expect([value.stored])
    return _Lazy(value, reading)


class _Lazy(Chunks):
    """All of a tensor, of which a chunk is read when it is asked for."""

    def __init__(self, ordered: Ordered, reading: Pieces) -> None:
        stored = ordered.stored
        nothing = torch.empty(0, dtype=stored.dtype)  # has the dtype
        super().__init__(nothing, stored.shape, ordered.stride, [(0, stored.numel, 0)])
        self.ordered, self.reading = ordered, reading

    @cached_property
    def boxes(self) -> list[Box]:
        whole = Box((0,) * len(self.shape), self.shape, 0)
        return split(whole, self.stride, CHUNK_NBYTES // self.flat.dtype.itemsize)

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        box = self._by_offsets[tuple(index.offset or ())]
        flat = self.reading.range_of(self.ordered, box.start, prod(box.sizes))
        part: Tensor = block(flat, Box(box.offsets, box.sizes, 0), self.stride)
        return part
