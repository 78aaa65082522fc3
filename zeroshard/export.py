"""From a sharded model to files that Hugging Face reads: `export_weights`.

Streams one unit at a time; the first rank writes.
"""

import copy
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .adapters import is_adapted
from .agreement import in_agreement
from .errors import ConfigError
from .gather import engines_for, stream
from .initialise import persistent_buffers
from .weight_files import WEIGHTS_NAME
from .wrappers import strip_wrappers, unwrap

__all__ = ["export_weights"]


def export_weights(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_file_nbytes: int = 5 * 10**9,
    overwrite: bool = False,
) -> None:
    """Write a model's weights as Hugging Face's `save_pretrained` does; every rank has to call it.

    The first rank writes `model.safetensors`, or several files and their index, and the model's
    config where it has one; of a PEFT model the adapters alone. No rank holds more than its shards
    and one unit; the first one holds the file that it is filling, too. What stands behind `path` is
    complete or not there: it gets its name at the end.

    Args:
        model: one that has a zeroshard optimizer, in any stage.
        path: of the directory.
        dtype: cast floating-point tensors to this; None: as they are.
        max_file_nbytes: the largest file, if no tensor is larger.
        overwrite: replace a directory that is not empty.

    Raises:
        ConfigError: the directory is not empty, or cannot be written; on every rank.
    """
    model = unwrap(model)
    transport = engines_for(model)[0].transport
    path = Path(path)
    unfinished = path.with_name(f".{path.name}.partial")
    with in_agreement(transport, "export_weights"):
        _check_free(path, overwrite)
        folders = _adapter_folders(model) if is_adapted(model) else [_model_folder(model, dtype)]
        if transport.is_first:
            shutil.rmtree(unfinished, ignore_errors=True)
            for folder in folders:
                (unfinished / folder.name).mkdir(parents=True, exist_ok=True)
    failure: Exception | None = None
    writers = [_Writer(unfinished / folder.name, folder, max_file_nbytes) for folder in folders]
    for writer in writers:
        for name, tensor in writer.folder.stream(model):
            if transport.is_first and failure is None:
                try:
                    writer.add(name, tensor)
                except Exception as error:  # the other ranks go on, and hear of it at the end
                    failure = error
    with in_agreement(transport, "export_weights"):
        if failure is not None:
            raise failure
        if transport.is_first:
            for writer in writers:
                writer.finish()
            _replace(path, unfinished)


@dataclass(kw_only=True)
class _Folder:
    """What is written to one folder.

    Attributes:
        name: relative to the whole export.
        file_name: of the file, where one is enough.
        names: parameter -> its name in the file.
        buffers: with their names.
        dtype: see `export_weights`.
        write_config: writes what belongs beside the weights.
    """

    name: str = ""
    file_name: str = WEIGHTS_NAME
    names: dict[nn.Parameter, str]
    buffers: list[tuple[str, Tensor]] = field(default_factory=list)
    dtype: torch.dtype | None = None
    write_config: Callable[[Path], object]

    def stream(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Each tensor, whole, with its name in the file."""
        ours = dict(model.named_parameters())
        for name, tensor in stream(model, set(self.names)):
            yield self.names[ours[name]], tensor
        yield from self.buffers


class _Writer:
    """Fills the files of one folder with tensors as they come.

    Args:
        path: of the folder.
        folder: what it is.
        max_file_nbytes: see `export_weights`.
    """

    def __init__(self, path: Path, folder: _Folder, max_file_nbytes: int) -> None:
        self.path, self.folder, self.max_file_nbytes = path, folder, max_file_nbytes
        self.pending: dict[str, Tensor] = {}
        self.files: list[tuple[Path, list[str]]] = []  # with the names of their tensors
        self.pending_nbytes = self.total_nbytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a copy of a tensor; write a file if it is full."""
        dtype = self.folder.dtype if tensor.is_floating_point() else None
        nbytes = tensor.numel() * (dtype or tensor.dtype).itemsize
        if self.pending and self.pending_nbytes + nbytes > self.max_file_nbytes:
            self._write()
        copied = torch.empty(tensor.shape, dtype=dtype or tensor.dtype)
        self.pending[name] = copied.copy_(tensor.detach())
        self.pending_nbytes += nbytes
        self.total_nbytes += nbytes

    def _write(self) -> None:
        from safetensors.torch import save_file

        file = self.path / f"{len(self.files)}.part"
        save_file(self.pending, file, metadata={"format": "pt"})
        self.files.append((file, list(self.pending)))
        self.pending, self.pending_nbytes = {}, 0

    def finish(self) -> None:
        """Write what is left, name the files, and write their index and the config."""
        self._write()
        stem, total = self.folder.file_name.removesuffix(".safetensors"), len(self.files)
        weight_map = {}
        for number, (file, names) in enumerate(self.files, start=1):
            final = f"{stem}-{number:05d}-of-{total:05d}.safetensors"
            file.rename(self.path / (final if total > 1 else self.folder.file_name))
            weight_map.update(dict.fromkeys(names, final))
        if total > 1:
            index = {"metadata": {"total_size": self.total_nbytes}, "weight_map": weight_map}
            text = json.dumps(index, indent=2, sort_keys=True)
            (self.path / f"{stem}.safetensors.index.json").write_text(text + "\n")
        self.folder.write_config(self.path)


def _check_free(path: Path, overwrite: bool) -> None:
    if path.exists() and not overwrite and not (path.is_dir() and not any(path.iterdir())):
        raise ConfigError(f"{path} exists and is not empty: pass overwrite=True, or another path")


def _replace(path: Path, complete: Path) -> None:
    """Give a complete folder its final name; what has that name now goes last."""
    if not path.exists():
        complete.rename(path)
        return
    replaced = path.with_name(f".{path.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    path.rename(replaced)
    complete.rename(path)
    shutil.rmtree(replaced)


def _model_folder(model: nn.Module, dtype: torch.dtype | None) -> _Folder:
    def write_config(path: Path) -> None:
        config: Any = getattr(model, "config", None)
        if hasattr(config, "save_pretrained"):
            config = copy.deepcopy(config)
            config.architectures = [type(model).__name__]
            stored = {p.dtype for p in model.parameters() if p.is_floating_point()}
            config.dtype = dtype or (stored.pop() if len(stored) == 1 else None)
            config.save_pretrained(path)
        generation: Any = getattr(model, "generation_config", None)
        if hasattr(generation, "save_pretrained"):
            generation.save_pretrained(path)

    return _Folder(
        names={p: strip_wrappers(name) for name, p in model.named_parameters()},
        buffers=[(strip_wrappers(name), b.tensor) for name, b in persistent_buffers(model)],
        dtype=dtype,
        write_config=write_config,
    )


def _adapter_folders(model: Any) -> list[_Folder]:
    """What PEFT saves: the adapters and the copies that it trains, each adapter for itself."""
    from peft import get_peft_model_state_dict

    stand_ins = {
        name: torch.empty_like(tensor, device="meta")
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    name_of = {id(tensor): name for name, tensor in stand_ins.items()}
    parameters = dict(model.named_parameters())
    folders = []
    for adapter, config in model.peft_config.items():
        saved = get_peft_model_state_dict(model, state_dict=stand_ins, adapter_name=adapter)
        folders.append(
            _Folder(
                name="" if adapter == "default" else adapter,
                file_name="adapter_model.safetensors",
                names={parameters[name_of[id(t)]]: name for name, t in saved.items()},
                write_config=partial(_write_adapter_config, config),
            )
        )
    return folders


def _write_adapter_config(config: Any, path: Path) -> None:
    config = copy.deepcopy(config)
    config.inference_mode = True
    config.save_pretrained(path)
