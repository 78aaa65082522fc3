"""One checkpoint's files, through torch.distributed.checkpoint, and their checksums.

Knows what is to be written only as names and values.
"""

import dataclasses
import io
import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    DEFAULT_SUFFIX,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ..chunks import Chunks
from ..folders import as_asked
from ..transport import HostRanks
from .versions import Item, checksum

__all__ = ["write_files"]


def write_files(
    folder: Path, content: dict[str, Any], aliases: Mapping[str, str], ranks: HostRanks
) -> list[Item]:
    """Write this rank's part of a checkpoint to a folder, and wait until it is on the disk.

    All ranks must call it. Whatever is given by several is written once.

    Args:
        folder: which every rank sees; empty.
        content: names, which may be nested, and what this rank has of them.
        aliases: more names, dotted, of tensors that are written under another one.
        ranks: all that write.

    Returns:
        What this rank wrote, with its checksums, as read again.
    """
    writer = _Writer(folder, aliases)
    with as_asked(folder, alone=False):
        # Not save(), whose warning that it works alone a thread cannot switch off for itself.
        _save_state_dict(
            content,
            storage_writer=writer,
            planner=_Planner(),
            process_group=ranks.group,
            no_dist=ranks.group is None,
        )
    return [
        Item(file, offset, length, checksum(folder / file, offset, length))
        for file, offset, length in writer.written
    ]


class _Planner(DefaultSavePlanner):
    """Finds what `Chunks` hold."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict.get(index.fqn)
        if isinstance(value, Chunks):
            return value.__get_tensor_shard__(index)
        return super().lookup_object(index)


class _Writer(FileSystemWriter):
    """Notes where it wrote what, and gives tensors more names.

    Attributes:
        written: (file, offset, length) of every item of this rank.
    """

    def __init__(self, folder: Path, aliases: Mapping[str, str]) -> None:
        super().__init__(folder, sync_files=True)
        self.aliases = aliases
        self.written: list[tuple[str, int, int]] = []

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file item by item.

        torch's own loop keeps the copies that it made of all of them until the file is whole.
        """
        name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        results = []
        try:
            with Path(self.path, name).open("wb") as stream:
                for item in sorted(plan.items, key=lambda item: item.type != WriteItemType.BYTE_IO):
                    offset = stream.tell()
                    _write(planner.resolve_data(item), stream)
                    length = stream.tell() - offset
                    self.written.append((name, offset, length))
                    info = _StorageInfo(name, offset, length)
                    results.append(WriteResult(item.index, length, info))
                stream.flush()
                os.fsync(stream.fileno())
        except Exception as error:
            raise _reason(error, Path(self.path, name)) from error
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        by_name: dict[str, list[WriteResult]] = {}
        for result in itertools.chain.from_iterable(results):
            by_name.setdefault(result.index.fqn, []).append(result)
        more = []
        for alias, name in self.aliases.items():
            top, _, rest = alias.partition(".")
            metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[name]
            metadata.planner_data[alias] = (top, rest)
            for result in by_name[name]:
                index = dataclasses.replace(result.index, fqn=alias)
                more.append(dataclasses.replace(result, index=index))
        super().finish(metadata, [*results, more])


def _write(value: Tensor | io.BytesIO, stream: BinaryIO) -> None:
    if isinstance(value, io.BytesIO):
        stream.write(value.getbuffer())
        return
    tensor = value.detach().cpu()
    if tensor.untyped_storage().nbytes() != tensor.nbytes:  # torch.save would write all of that
        tensor = tensor.clone()
    torch.save(tensor, stream)


def _reason(error: BaseException, file: Path) -> BaseException:
    """Why a file could not be written.

    torch.save ends its archive even if the disk has refused a part of it, and fails again, with an
    error of its own that says nothing of the disk.
    """
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, OSError):
            return OSError(inner.errno, inner.strerror, str(file))
        inner = inner.__context__
    return error
