"""Safetensors checkpoints as Hugging Face writes them: any slice of any tensor, by name.

Knows no model and no ranks.
"""

import ctypes
import json
import struct
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .boxes import boxes_of
from .errors import ConfigError

__all__ = ["INDEX_NAME", "WEIGHTS_NAME", "Entry", "WeightFile", "WeightFiles", "WeightFolder"]

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class WeightFiles:
    """The tensors of one checkpoint; a context, in which its files are mapped.

    Args:
        path: a directory with `model.safetensors` or an index, an index, or one `.safetensors`
            file.

    Attributes:
        shapes: name -> shape of every tensor.
        floats: the names of those of floating-point numbers.

    Raises:
        ConfigError: the path holds no such checkpoint, or files of it are missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.floats: set[str] = set()
        self._files: dict[str, Any] = {}
        self._stack = ExitStack()
        try:
            for file, names in _files_of(path).items():
                self._open(file, names)
        except BaseException:
            self._stack.close()
            raise

    def _open(self, file: Path, names: Collection[str]) -> None:
        """Map a file; of its tensors those in `names` count, or all if that is empty."""
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError as error:
            raise ConfigError(
                "reading weights needs safetensors: pip install safetensors"
            ) from error
        try:
            opened = self._stack.enter_context(safe_open(str(file), framework="pt"))
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                if not names or name in names:
                    self._files[name] = opened
                    stored = opened.get_slice(name)
                    self.shapes[name] = tuple(stored.get_shape())
                    if "F" in stored.get_dtype():  # F32, BF16, F8_E4M3 ...
                        self.floats.add(name)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{file} cannot be read as safetensors: {error}") from error

    def __enter__(self) -> "WeightFiles":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files.clear()
        self._stack.close()

    def read(self, name: str) -> Tensor:
        """A whole tensor, in the file's dtype."""
        tensor = self._files[name].get_tensor(name)
        assert isinstance(tensor, Tensor)
        return tensor

    def read_range(self, name: str, stride: tuple[int, ...], start: int, numel: int) -> Tensor:
        """Elements [start, start + numel) of a tensor, and no others, in the file's dtype.

        Args:
            name: of the tensor.
            stride: dense; whose storage order the range is of.
            start: the first element.
            numel: how many.
        """
        shape = self.shapes[name]
        if not shape or numel == 0:
            return self.read(name).reshape(-1)[:numel]
        order = sorted(range(len(shape)), key=lambda dim: (-stride[dim], dim))
        stored = self._files[name].get_slice(name)
        pieces = []
        for box in boxes_of(shape, stride, start, numel):
            ranges = zip(box.offsets, box.sizes, strict=True)
            block = stored[tuple(slice(offset, offset + size) for offset, size in ranges)]
            pieces.append(block.permute(order).reshape(-1))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _files_of(path: Path) -> dict[Path, set[str]]:
    """The files of a checkpoint, with the tensors that the index says they hold."""
    if path.is_dir():
        found = [path / name for name in (WEIGHTS_NAME, INDEX_NAME) if (path / name).is_file()]
        if not found:
            raise ConfigError(
                f"{path} holds neither {WEIGHTS_NAME} nor {INDEX_NAME}: pass the directory that "
                "save_pretrained or export_weights wrote, or one .safetensors file"
            )
        path = found[0]
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: pass a directory with {WEIGHTS_NAME}, or a file")
    if path.suffix != ".json":
        return {path: set()}
    try:
        weight_map = dict(json.loads(path.read_text())["weight_map"].items())
    except (ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path} is no index of safetensors files: {error!r}") from error
    files: dict[Path, set[str]] = {}
    for name, file in sorted(weight_map.items()):
        files.setdefault(path.parent / file, set()).add(name)
    return files


class Entry(NamedTuple):
    """A tensor that a file will hold."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def check(self) -> None:
        """Raise if such files cannot hold it."""
        if self.dtype not in DTYPES:
            raise ConfigError(f"{self.name} is {self.dtype}, which safetensors does not have")

    @property
    def numel(self) -> int:
        """Its elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Its size in the file."""
        return self.numel * self.dtype.itemsize


class WeightFile:
    """A safetensors file that is written piece by piece, in the order of `entries`.

    The library's own function needs all tensors of a file at once. Source: the description of the
    format in github.com/huggingface/safetensors.

    Raises:
        ConfigError: a dtype that such files do not have.
    """

    def __init__(self, path: Path, entries: Sequence[Entry]) -> None:
        self.path, self.entries = path, entries
        self.written = 0
        self._numel = 0  # of the next entry, that are written
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        start = 0
        for entry in entries:
            entry.check()
            header[entry.name] = {
                "dtype": DTYPES[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": [start, start + entry.nbytes],
            }
            start += entry.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._file = path.open("wb")
        self._file.write(struct.pack("<Q", len(text)) + text)

    def write(self, tensor: Tensor) -> None:
        """Write the next tensor, or the next of its elements in row-major order.

        The file is closed after the last one.
        """
        entry = self.entries[self.written]
        tensor = tensor.detach().to("cpu", entry.dtype).contiguous()
        assert tensor.numel() == entry.numel or tensor.ndim == 1
        self._numel += tensor.numel()
        assert self._numel <= entry.numel
        if tensor.nbytes:
            self._file.write((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
        if self._numel == entry.numel:
            self.written, self._numel = self.written + 1, 0
        if self.is_complete:
            self.close()

    def close(self) -> None:
        """Close the file, complete or not."""
        self._file.close()

    @property
    def is_complete(self) -> bool:
        """Whether everything is written."""
        return self.written == len(self.entries)


class WeightFolder:
    """The files of one folder and their index, written in the order of `entries`.

    Args:
        path: of the folder.
        file_name: of the file, where one is enough.
        entries: what comes.
        max_file_nbytes: the largest file, if no tensor is larger.

    Raises:
        ConfigError: a dtype that such files do not have.
    """

    def __init__(
        self, path: Path, file_name: str, entries: Iterable[Entry], max_file_nbytes: int
    ) -> None:
        self.path = path
        files: list[list[Entry]] = [[]]
        for entry in entries:
            entry.check()
            if files[-1] and sum(e.nbytes for e in files[-1]) + entry.nbytes > max_file_nbytes:
                files.append([])
            files[-1].append(entry)
        self.files = files
        stem, total = file_name.removesuffix(".safetensors"), len(files)
        self.index_name = f"{stem}.safetensors.index.json"
        self.names = (
            [file_name]
            if total == 1
            else [
                f"{stem}-{number:05d}-of-{total:05d}.safetensors" for number in range(1, total + 1)
            ]
        )
        self._open: WeightFile | None = None
        self._next = 0

    def write(self, tensor: Tensor) -> None:
        """See `WeightFile.write`."""
        if self._open is None:
            self._open = WeightFile(self.path / self.names[self._next], self.files[self._next])
            self._next += 1
        self._open.write(tensor)
        if self._open.is_complete:
            self._open = None

    def close(self) -> None:
        """Close what an error left open."""
        if self._open is not None:
            self._open.close()

    def finish(self) -> None:
        """Write the index, where there are several files."""
        if len(self.files) == 1:
            return
        entries = [entry for file in self.files for entry in file]
        weight_map = {
            entry.name: name
            for name, file in zip(self.names, self.files, strict=True)
            for entry in file
        }
        index = {
            "metadata": {"total_size": sum(entry.nbytes for entry in entries)},
            "weight_map": weight_map,
        }
        text = json.dumps(index, indent=2, sort_keys=True)
        (self.path / self.index_name).write_text(text + "\n")
