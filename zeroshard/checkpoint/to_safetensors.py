"""The weights of a checkpoint as `from_pretrained` reads them, in bounded memory."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import CheckpointError
from ..weight_files import WEIGHTS_NAME, Entry, WeightFolder
from .pieces import Pieces
from .source import Source, Stored
from .versions import MANIFEST, check_item, read_checksums, read_manifest

__all__ = ["write_safetensors"]

HUB = "hf"  # the folder in a checkpoint of ours with what belongs beside the weights


def write_safetensors(
    path: Path,
    source: Source,
    weights: Mapping[str, Stored],
    reading: Pieces,
    *,
    dtype: torch.dtype | None,
    max_file_nbytes: int,
) -> None:
    """Write `model.safetensors`, or parts and their index, and the configs that are there.

    Of a PEFT model the adapters, as PEFT saves them.

    Args:
        path: of the folder.
        source: the checkpoint.
        weights: of it, as they are to be written.
        reading: reads them.
        dtype: what the config says that they are in; None: what it says already.
        max_file_nbytes: the largest file, if no tensor is larger.
    """
    folders = _folders(source, weights)
    for folder in folders:
        reading.expect(folder.weights.values())
    for folder in folders:
        place = path / folder.name
        place.mkdir(parents=True, exist_ok=True)
        entries = [Entry(name, s.shape, s.dtype) for name, s in folder.weights.items()]
        writer = WeightFolder(place, folder.file_name, entries, max_file_nbytes)
        try:
            for stored in folder.weights.values():
                for piece in reading.of(stored):
                    writer.write(piece)
        finally:
            writer.close()
        writer.finish()
        sums = read_checksums(source.path) if (source.path / MANIFEST).is_file() else {}
        for config in sorted((source.path / HUB / folder.name).glob("*")):
            if config.is_file():
                name = config.relative_to(source.path).as_posix()
                if (name, 0) in sums:
                    check_item(source.path, sums[name, 0])
                _copy_config(config, place / config.name, dtype)


class _Folder(NamedTuple):
    """Weights that go to one folder.

    Attributes:
        name: relative to the whole.
        file_name: of the file, where one is enough.
        weights: by their names in it.
    """

    name: str
    file_name: str
    weights: dict[str, Stored]


def _folders(source: Source, weights: Mapping[str, Stored]) -> list[_Folder]:
    is_ours = (source.path / MANIFEST).is_file()
    said: dict[str, Any] = read_manifest(source.path) if is_ours else {}
    if said.get("adapters"):
        return [
            _Folder(
                folder,
                "adapter_model.safetensors",
                {name: weights[in_model] for name, in_model in names.items()},
            )
            for folder, names in said["adapters"].items()
        ]
    # Each tensor once, under the first of its names, as `save_pretrained` writes tied ones.
    first: dict[int, str] = {}
    for name, stored in weights.items():
        if name not in said.get("tied", {}):
            first.setdefault(id(stored), name)
    if not first:
        raise CheckpointError(f"{source.path}: expected weights, and it has none")
    return [_Folder("", WEIGHTS_NAME, {name: weights[name] for name in first.values()})]


def _copy_config(config: Path, target: Path, dtype: torch.dtype | None) -> None:
    """Copy a file; what a model's config says of the weights' dtype becomes true."""
    shutil.copyfile(config, target)
    if config.name == "config.json" and dtype is not None:
        said = json.loads(config.read_text())
        said.pop("torch_dtype", None)  # what earlier versions of transformers called it
        said["dtype"] = str(dtype).removeprefix("torch.")
        target.write_text(json.dumps(said, indent=2, sort_keys=True) + "\n")
