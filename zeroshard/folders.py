"""Folders that every rank writes its part to, through torch.distributed.checkpoint.

Knows files and state dicts, and no optimizer. A folder is written under a name that nobody takes
for a checkpoint, and gets its own when every rank is done.
"""

import io
import os
import pathlib
import pickle
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as described
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.serialization import _get_layout

from .agreement import in_agreement
from .errors import CheckpointError
from .transport import Op, Transport

__all__ = ["METADATA", "load_folder", "new_folder", "opened", "read", "save_folder"]

METADATA = ".metadata"  # of torch.distributed.checkpoint; a folder without it is no checkpoint


def save_folder(
    path: str | os.PathLike[str], content: dict[str, Any], transport: Transport, what: str
) -> None:
    """Write a state dict to a folder, each rank its own slices; all must call it.

    An earlier checkpoint in the folder stays until this one is complete. Other files in it stay.

    Args:
        path: the folder, which every rank sees.
        content: names, which may be nested, and what every rank has of them.
        transport: the ranks.
        what: names the work, for messages.

    Raises:
        ConfigError: it could not be written; on every rank.
    """
    mesh = transport.mesh
    group = None if mesh is None else mesh.get_group(mesh.ndim - 1)
    # Of ranks that hold the same shard, those that come first along the axis of replicas write.
    writes = mesh is None or not any((mesh.get_coordinate() or ())[:-1])
    parts = (METADATA, "*.distcp")
    with (
        new_folder(path, transport, what, parts=parts) as fresh,
        as_asked(path, alone=mesh is None),
    ):
        if writes:
            save(content, checkpoint_id=fresh, process_group=group, no_dist=mesh is None)


@contextmanager
def new_folder(
    path: str | os.PathLike[str], transport: Transport, what: str, *, parts: Sequence[str]
) -> Iterator[Path]:
    """A folder to write to, whose content is at `path` once every rank has left without an error.

    Until then it has a name that nobody takes for a checkpoint, and what was at `path` stays. If
    that was a folder, its other files stay for good.

    Args:
        path: a folder, or where one will be.
        transport: the ranks, which all have to enter and leave.
        what: names the work, for messages.
        parts: patterns of the names that a checkpoint consists of: the earlier ones go. Without
            those of the first pattern it is none; they go first and come last, so that there never
            seems to be one that is half of each.

    Raises:
        ConfigError: any rank failed; on every rank.
    """
    path, what = Path(os.path.realpath(path)), f"{what} to {path}"
    with in_agreement(transport, what):
        chosen = _make_fresh(path) if transport.is_first else None
    answers = transport.all_gather_object(chosen, op=Op(what))
    fresh: Path = next(answer for answer in answers if answer is not None)
    try:
        with in_agreement(transport, what):
            yield fresh
    except BaseException:
        if transport.is_first:
            shutil.rmtree(fresh, ignore_errors=True)
        raise
    with in_agreement(transport, what):
        if transport.is_first:
            _take_place(fresh, path, parts)


def _make_fresh(path: Path) -> Path:
    """An empty folder on the file system of `path`."""
    beside, inside = path.with_name(f".{path.name}.incomplete"), path / ".incomplete"
    for left_by_a_kill in (beside, inside):
        shutil.rmtree(left_by_a_kill, ignore_errors=True)
    (fresh := inside if path.is_dir() else beside).mkdir(parents=True)
    return fresh


def _take_place(fresh: Path, path: Path, parts: Sequence[str]) -> None:
    """Move what is in `fresh` to `path`."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        fresh.rename(path)
        return
    new = sorted(fresh.iterdir(), key=lambda entry: entry.match(parts[0]))
    old = [entry for part in parts for entry in path.glob(part)]
    (gone := fresh / ".earlier").mkdir()
    for entry in dict.fromkeys([*old, *(path / entry.name for entry in new)]):
        if entry.exists():
            entry.rename(gone / entry.name)
    for entry in new:
        entry.rename(path / entry.name)
    shutil.rmtree(fresh)


def load_folder(
    path: str | os.PathLike[str],
    wanted: dict[str, Any],
    transport: Transport,
    what: str,
    *,
    strict: bool = True,
) -> None:
    """Read what `save_folder` wrote into a state dict; all ranks must call it.

    Each rank reads the slices that it has. Tensors are filled where they are.

    Args:
        path: the folder.
        wanted: the names, as `save_folder` was given them, and tensors of the same shapes.
        transport: the ranks.
        what: what the folder should hold and who wrote it, for messages.
        strict: whether both must have the same names; else what both have is read.

    Raises:
        ConfigError: what is in the folder does not fit, or cannot be read; on every rank, and
            before anything has changed unless a file's content is damaged.
    """
    with in_agreement(transport, f"load from {path}"):
        reader, metadata = opened(path, what)
        saved = metadata.state_dict_metadata
        flat, paths = flatten_state_dict(wanted)
        theirs = {key for key in saved if key.split(".")[0] in wanted}
        for key in sorted(theirs ^ flat.keys()) if strict else ():
            where, name = "not in it" if key in flat else "in it only", key.partition(".")[2]
            raise CheckpointError(f"{path} holds another {what}: {name!r} is {where}")
        flat = {key: value for key, value in flat.items() if key in saved}
        for key, value in flat.items():
            here, there = getattr(value, "shape", None), getattr(saved[key], "size", None)
            if here != there:
                raise CheckpointError(
                    f"{path} holds another {what}: {key.partition('.')[2]!r} must have shape "
                    f"{here and (*here,)}, and has {there and (*there,)} in it"
                )
        for key, value in read(reader, flat).items():
            set_element(wanted, paths[key], value)


@contextmanager
def as_asked(path: object, *, alone: bool) -> Iterator[None]:
    """Without torch's guess why a rank works alone, and with errors that are Exceptions."""
    with warnings.catch_warnings() if alone else nullcontext():
        if alone:
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            _, (cause, _) = next(iter(error.failures.items()))
            if not isinstance(cause, Exception):  # Ctrl-C is no fault of the checkpoint
                raise cause from error
            raise CheckpointError(f"checkpoint {path}: {str(cause) or repr(cause)}") from cause


def opened(path: str | os.PathLike[str], what: str) -> tuple["_Reader", Metadata]:
    """The reader of a folder and what the folder says it holds, all of which is there."""
    reader = _Reader(path)
    if not Path(path, METADATA).is_file():
        raise CheckpointError(f"{path} holds no {what}")
    try:
        metadata = reader.read_metadata()
        ends = {(s.relative_path, s.offset + s.length) for s in metadata.storage_data.values()}
    except Exception as error:
        raise CheckpointError(f"checkpoint {path}: {METADATA} cannot be read: {error}") from error
    for name, end in sorted(dict(sorted(ends)).items()):  # the last byte of each file
        file = Path(path, name)
        if not file.is_file() or file.stat().st_size < end:
            raise CheckpointError(f"checkpoint {path} is damaged: {name} is missing or cut off")
    return reader, metadata


MADE_OF = (
    *(getattr(described, name) for name in described.__all__),
    described._MEM_FORMAT_ENCODING,
    filesystem._StorageInfo,
    torch.Size,
    _get_layout,
    pathlib.PosixPath,
    pathlib.WindowsPath,
)
ADMITTED = {(kind.__module__, kind.__qualname__): kind for kind in MADE_OF}


class _Unpickler(pickle.Unpickler):
    """Makes what `.metadata` is made of, and nothing else that a file names."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("pathlib", "pathlib._local"):  # which of them depends on Python
            module = pathlib.PosixPath.__module__
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in ADMITTED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint does")
        return getattr(torch, name) if is_dtype else ADMITTED[module, name]


class _Reader(FileSystemReader):
    """Reads `.metadata` without running what it says."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"it is a {type(metadata).__name__}")
        metadata.storage_meta = described.StorageMeta(load_id=self.load_id)
        return metadata


class _Planner(DefaultLoadPlanner):
    """Takes keys as they are, and no code out of a file."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def read(reader: FileSystemReader, wanted: dict[str, Any]) -> dict[str, Any]:
    """Fill the tensors of a flat state dict; alone, since each rank knows what it needs."""
    with as_asked(reader.path, alone=True):
        load(wanted, storage_reader=reader, planner=_Planner(), no_dist=True)
    return wanted
