"""One file as `torch.save` writes it, in bounded memory.

`torch.save` takes tensors from memory. What it writes is a zip file without compression: the value,
pickled, in which every tensor names the record that its bytes are in, and these records.
"""

import ctypes
import io
import pickle
import struct
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..boxes import row_major
from ..errors import CheckpointError
from .decoded import groups_of, ordered_of, others_of, state_of
from .pieces import Ordered, Pieces
from .source import Source, Stored
from .torch_files import TensorInMemory

__all__ = ["write_torch"]

ALIGNMENT = 64  # of records, as torch has it, so that a mapped file's tensors are aligned
ROOT = "archive"  # torch takes any name


def write_torch(path: Path, source: Source, weights: dict[str, Stored], reading: Pieces) -> None:
    """Write `{"model": ..., "optimizer": ...}` and what else a checkpoint holds.

    Args:
        path: of the file.
        source: the checkpoint.
        weights: of it, as they are to be written.
        reading: reads them.
    """
    positions: dict[str, int] = {}
    groups = []
    for group in groups_of(source):
        names = group["params"]
        for name in names:
            positions[name] = len(positions)
        places = [positions[name] for name in names]
        groups.append({**group, "params": places, "param_names": list(names)})
    state = state_of(source, weights)
    unplaced = sorted(state.keys() - positions.keys())
    if unplaced:
        raise CheckpointError(
            f"{source.path}: expected every parameter with state in a param group, and "
            f"{unplaced[0]!r} is in none"
        )
    ordered = {positions[name]: state[name] for name in positions if name in state}
    model = ordered_of(source, weights)
    content = {"model": model, "optimizer": {"state": ordered, "param_groups": groups}}
    content.update(others_of(source))
    text = io.BytesIO()
    pickler = _Pickler(text, source.path)
    pickler.dump(content)
    reading.expect(record.stored for record in pickler.records)
    with path.open("wb") as file, zipfile.ZipFile(file, "w") as archive:
        _add(archive, file.tell(), "data.pkl", [text.getbuffer()])
        _add(archive, file.tell(), "byteorder", [sys.byteorder.encode()])
        for number, record in enumerate(pickler.records):
            pieces = reading.of(record.stored, record.stride)
            _add(archive, file.tell(), f"data/{number}", map(_bytes_of, pieces))
        _add(archive, file.tell(), "version", [b"3\n"])


class _Storage(NamedTuple):
    """What a pickled tensor says about the record with its bytes."""

    kind: type
    number: int
    numel: int


class _Pickler(pickle.Pickler):
    """Pickles tensors of a checkpoint as torch pickles tensors, and notes them as records."""

    def __init__(self, file: io.BytesIO, path: Path) -> None:
        super().__init__(file, protocol=2)
        self.path = path
        self.records: list[Ordered] = []

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _Storage):
            return None
        return "storage", value.kind, str(value.number), "cpu", value.numel

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            value = TensorInMemory(value, self.path)
        if isinstance(value, Stored):
            value = Ordered(value, row_major(value.shape))
        if not isinstance(value, Ordered):
            return NotImplemented
        stored = value.stored
        # How torch pickles depends on the dtype: one element tells.
        rebuild, (like, _, _, _, *more) = torch.empty(1, dtype=stored.dtype).__reduce_ex__(2)
        if isinstance(like, torch.storage.TypedStorage):
            kind, numel = getattr(torch, like._pickle_storage_type()), stored.numel
        else:
            kind, numel = type(like), stored.numel * stored.dtype.itemsize
        storage = _Storage(kind, len(self.records), numel)
        self.records.append(value)
        return rebuild, (storage, 0, stored.shape, value.stride, *more)


def _bytes_of(tensor: Tensor) -> Any:
    """The memory of a contiguous tensor."""
    tensor = tensor.contiguous()
    if not tensor.nbytes:
        return b""
    view = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    view.tensor = tensor  # type: ignore[attr-defined] # whose memory it is
    return view


def _add(archive: zipfile.ZipFile, place: int, name: str, parts: Iterable[Any]) -> None:
    """Add a record whose bytes begin at a multiple of `ALIGNMENT`.

    Args:
        archive: the file.
        place: where it ends as yet.
        name: of the record.
        parts: its bytes.
    """
    info = zipfile.ZipInfo(f"{ROOT}/{name}")
    header = 30 + len(info.filename) + 20 + 4  # with an entry for sizes of 64 bits, and ours
    missing = -(place + header) % ALIGNMENT
    info.extra = struct.pack("<2sH", b"FB", missing) + b"Z" * missing
    with archive.open(info, "w", force_zip64=True) as record:
        for part in parts:
            record.write(part)
