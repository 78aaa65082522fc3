"""From a checkpoint, whoever wrote it, to another format: without a model, ranks or a GPU.

Everything goes by pieces, so that memory does not grow with the largest tensor.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from ..errors import CheckpointError, ConfigError
from ..outputs import check_output, remove, removed_on_error, replace, unfinished
from ..weight_files import WEIGHTS_NAME, Entry, WeightFolder
from .decoded import weights_of
from .opening import open_source
from .pieces import Pieces
from .source import Source, Stored
from .to_dcp import write_dcp
from .to_torch import write_torch
from .versions import MANIFEST, read_manifest

__all__ = ["FORMATS", "convert"]

WRITERS = {"torch": write_torch, "dcp": write_dcp}
FORMATS = ("safetensors", *WRITERS)
ADAPTER_CONFIG = "adapter_config.json"
# Names of what an adapter has: before and after the adapter's own name, which PEFT leaves out.
_OF_ADAPTER = (
    re.compile(r"(.+\.(?:lora_A|lora_B|lora_embedding_A|lora_embedding_B))\.([^.]+)(\.weight|)"),
    re.compile(r"(.+\.lora_magnitude_vector)\.([^.]+)(?:\.weight)?()"),
    re.compile(r"(.+)\.modules_to_save\.([^.]+)(\..+)"),
)


def convert(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    to: Literal["safetensors", "torch", "dcp"],
    *,
    dtype: torch.dtype | None = None,
    max_file_nbytes: int = 5 * 10**9,
    overwrite: bool = False,
    on_progress: Callable[[int, int], object] | None = None,
) -> None:
    """Write what a checkpoint holds in another format, in bounded memory.

    What stands behind `out` is complete or not there: it gets its name at the end.

    Args:
        path: of a checkpoint that `load_checkpoint` reads.
        out: a folder; for "torch" a file.
        to: "safetensors" for the weights as `from_pretrained` reads them; "torch" for one file of
            model and optimizer, as `torch.save` writes it; "dcp" for a folder of
            torch.distributed.checkpoint, as FSDP2 and DDP save it.
        dtype: of the floating-point weights; None: as they are. float32 gives the exact masters
            where the checkpoint has them. Moments and masters are fp32 in any case.
        max_file_nbytes: the largest safetensors file, if no tensor is larger.
        overwrite: replace what is at `out`.
        on_progress: called with the bytes that are written and those that will be.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, or has no optimizer state that the
            format needs.
        ConfigError: wrong arguments, or `out` is there, or cannot be written.
    """
    if to not in FORMATS:
        raise ConfigError(f"to must be one of {', '.join(FORMATS)}, got {to!r}")
    path, out = Path(path), Path(os.path.realpath(out))
    check_output(out, dtype, max_file_nbytes, overwrite)
    if path.exists() and Path(os.path.realpath(path)).is_relative_to(out):
        raise ConfigError(f"{out} holds the checkpoint itself: pass another path")
    fresh = unfinished(out)
    with open_source(path) as source, removed_on_error(fresh):
        weights = weights_of(source, dtype)
        reading = Pieces(on_progress)
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            remove(fresh)
            if to == "safetensors":
                _write_safetensors(fresh, source, weights, dtype, max_file_nbytes, reading)
            else:
                WRITERS[to](fresh, source, weights, reading)
            replace(out, fresh)
        except OSError as error:
            raise ConfigError(f"{out} cannot be written: {error}") from error


class _Folder(NamedTuple):
    """Weights that go to one folder.

    Attributes:
        name: relative to the whole.
        file_name: of the file, where one is enough.
        weights: by their names in it.
        configs: files that are copied beside them.
    """

    name: str
    file_name: str
    weights: dict[str, Stored]
    configs: list[Path]


def _write_safetensors(
    path: Path,
    source: Source,
    weights: Mapping[str, Stored],
    dtype: torch.dtype | None,
    max_file_nbytes: int,
    reading: Pieces,
) -> None:
    named = _without_aliases(source, weights)
    if not named:
        raise CheckpointError(f"{source.path}: expected weights, and it has none")
    hub = source.path / "hf"
    is_adapted = (hub / ADAPTER_CONFIG).is_file()
    whole = _Folder("", WEIGHTS_NAME, named, _files_in(hub))
    folders = _adapter_folders(source, named, hub) if is_adapted else [whole]
    for folder in folders:
        reading.expect(folder.weights.values())
    for folder in folders:
        entries = [Entry(name, s.shape, s.dtype) for name, s in folder.weights.items()]
        place = path / folder.name
        place.mkdir(parents=True, exist_ok=True)
        writer = WeightFolder(place, folder.file_name, entries, max_file_nbytes)
        try:
            for stored in folder.weights.values():
                for piece in reading.of(stored):
                    writer.write(piece)
        finally:
            writer.close()
        writer.finish()
        for config in folder.configs:
            _copy_config(config, place / config.name, dtype)


def _without_aliases(source: Source, weights: Mapping[str, Stored]) -> dict[str, Stored]:
    """Every tensor once, under the first of its names, as `save_pretrained` writes it."""
    is_ours = (source.path / MANIFEST).is_file()
    aliases = read_manifest(source.path).get("tied", {}) if is_ours else {}
    first: dict[int, str] = {}
    for name, stored in weights.items():
        if name not in aliases:
            first.setdefault(id(stored), name)
    return {name: weights[name] for name in first.values()}


def _adapter_folders(source: Source, weights: Mapping[str, Stored], hub: Path) -> list[_Folder]:
    """What PEFT saves of a model with LoRA, each adapter for itself."""
    found: dict[str, dict[str, Stored]] = {}
    for name, stored in weights.items():
        for pattern in _OF_ADAPTER:
            if match := pattern.fullmatch(name):
                found.setdefault(match[2], {})[match[1] + match[3]] = stored
    folders = []
    for adapter, named in found.items():
        name = "" if adapter == "default" or len(found) == 1 else adapter
        config = hub / name / ADAPTER_CONFIG
        kind = json.loads(config.read_text())["peft_type"] if config.is_file() else "of no config"
        if kind != "LORA":
            raise CheckpointError(
                f"{config}: expected an adapter of LoRA, and {adapter!r} is {kind}: load the "
                "checkpoint and use zeroshard.export_weights"
            )
        folders.append(_Folder(name, "adapter_model.safetensors", named, _files_in(hub / name)))
    if not folders:
        raise CheckpointError(
            f"{source.path}: expected adapters of LoRA, as {hub / ADAPTER_CONFIG} says, and there "
            "are none: load the checkpoint and use zeroshard.export_weights"
        )
    return folders


def _files_in(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("*") if file.is_file())


def _copy_config(config: Path, target: Path, dtype: torch.dtype | None) -> None:
    """Copy a file; what a model's config says of the weights' dtype becomes true."""
    shutil.copyfile(config, target)
    if config.name == "config.json" and dtype is not None:
        said = json.loads(config.read_text())
        said.pop("torch_dtype", None)  # of earlier versions
        said["dtype"] = str(dtype).removeprefix("torch.")
        target.write_text(json.dumps(said, indent=2, sort_keys=True) + "\n")
