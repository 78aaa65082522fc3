"""Safetensors checkpoints as Hugging Face writes them: any slice of any tensor, by name.

Knows no model and no ranks.
"""

import json
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from .boxes import boxes_of
from .errors import ConfigError

__all__ = ["INDEX_NAME", "WEIGHTS_NAME", "WeightFiles"]

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"


class WeightFiles:
    """The tensors of one checkpoint; a context, in which its files are mapped.

    Args:
        path: a directory with `model.safetensors` or an index, an index, or one `.safetensors`
            file.

    Attributes:
        shapes: name -> shape of every tensor.

    Raises:
        ConfigError: the path holds no such checkpoint, or files of it are missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Any] = {}
        self._stack = ExitStack()
        try:
            for file in _files_of(path):
                self._open(file)
        except BaseException:
            self._stack.close()
            raise

    def _open(self, file: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            opened = self._stack.enter_context(safe_open(str(file), framework="pt"))
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                self._files[name] = opened
                self.shapes[name] = tuple(opened.get_slice(name).get_shape())
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


def _files_of(path: Path) -> list[Path]:
    if path.is_dir():
        found = [path / name for name in (INDEX_NAME, WEIGHTS_NAME) if (path / name).is_file()]
        if not found:
            raise ConfigError(
                f"{path} holds neither {WEIGHTS_NAME} nor {INDEX_NAME}: pass the directory that "
                "save_pretrained or export_weights wrote, or one .safetensors file"
            )
        path = found[0]
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: pass a directory with {WEIGHTS_NAME}, or a file")
    if path.suffix != ".json":
        return [path]
    try:
        names = json.loads(path.read_text())["weight_map"].values()
    except (ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path} is no index of safetensors files: {error!r}") from error
    return [path.parent / name for name in sorted(set(names))]
