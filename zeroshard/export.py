"""From a sharded model to files that Hugging Face reads: `export_weights`.

Streams one unit at a time; the first rank writes.
"""

import copy
import os
import re
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
from .gather import by_unit, check_values, engines_for, stream
from .initialise import persistent_buffers
from .outputs import check_output, remove, removed_on_error, replace, unfinished
from .weight_files import WEIGHTS_NAME, Entry, WeightFolder
from .wrappers import strip_wrappers, unwrap

__all__ = ["export_weights", "move_export", "write_configs"]

# Groups: kind, number of a part, format, index. Alone or as an index it makes weights readable.
_WEIGHTS = re.compile(
    r"(model|pytorch_model|adapter_model)(-\d{5}-of-\d{5})?\.(bin|safetensors)(\.index\.json)?"
)


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
    and one unit. What stands behind `path` is complete or not there: it gets its name at the end.

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
    path = Path(os.path.realpath(path))
    fresh = unfinished(path)
    with in_agreement(transport, "export_weights"):
        check_values(model)
        check_output(path, dtype, max_file_nbytes, overwrite)
        folders = _adapter_folders(model) if is_adapted(model) else [_model_folder(model, dtype)]
        writers = [
            WeightFolder(fresh / f.name, f.file_name, f.entries(model), max_file_nbytes)
            for f in folders
        ]
        if transport.is_first:
            remove(fresh)
            for folder in folders:
                (fresh / folder.name).mkdir(parents=True, exist_ok=True)
    failure: Exception | None = None
    for folder, writer in zip(folders, writers, strict=True):
        for tensor in folder.stream(model):
            if transport.is_first and failure is None:
                try:
                    writer.write(tensor)
                except Exception as error:  # the other ranks go on, and hear of it at the end
                    writer.close()
                    failure = error
    with in_agreement(transport, "export_weights"), removed_on_error(fresh):
        if failure is not None:
            raise failure
        if transport.is_first:
            for folder, writer in zip(folders, writers, strict=True):
                writer.finish()
                folder.write_config(writer.path)
            replace(path, fresh)


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

    def entries(self, model: nn.Module) -> Iterator[Entry]:
        """What `stream` will hand out."""
        for named in by_unit(model, set(self.names)):
            for _, parameter in named:
                yield self._entry(self.names[parameter], parameter)
        for name, tensor in self.buffers:
            yield self._entry(name, tensor)

    def _entry(self, name: str, tensor: Tensor) -> Entry:
        dtype = (self.dtype if tensor.is_floating_point() else None) or tensor.dtype
        return Entry(name, tuple(tensor.shape), dtype)

    def stream(self, model: nn.Module) -> Iterator[Tensor]:
        """Each tensor, whole."""
        for _, tensor in stream(model, set(self.names)):
            yield tensor
        for _, tensor in self.buffers:
            yield tensor


def move_export(source: Path, target: Path) -> None:
    """Move what `export_weights` wrote into a folder where other files stay.

    Older weights of the same kind are removed, whatever their format and number of files. What
    makes them readable goes first and what makes the new ones so comes last: when this is
    interrupted there are older weights, or new ones, or none, and never some of each.

    Args:
        source: the export, which is gone afterwards; on the same file system.
        target: the folder.
    """
    files = sorted(file for file in source.rglob("*") if file.is_file())
    files.sort(key=lambda file: bool(_WEIGHTS.fullmatch(file.name)) and not _is_part(file))
    moves = [(file, target / file.relative_to(source)) for file in files]
    older = [
        file
        for folder in {new.parent for _, new in moves}
        for file in folder.glob("*")
        if _WEIGHTS.fullmatch(file.name) and file.is_file()
    ]
    of_adapters = any(file.name.startswith("adapter_model") for file in files)
    for file in sorted(older, key=_preference):
        if file.name.startswith("adapter_model") == of_adapters:
            file.unlink()
    for file, new in moves:
        new.parent.mkdir(parents=True, exist_ok=True)
        file.replace(new)
    shutil.rmtree(source)


def _is_part(file: Path) -> bool:
    return "-of-" in file.name


def _preference(file: Path) -> tuple[bool, bool, bool]:
    """What `from_pretrained` reads rather than another file comes after it, and parts last."""
    is_index = file.name.endswith(".json")
    return _is_part(file), ".safetensors" in file.name, not is_index


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
        if not all(name_of.get(id(tensor)) in parameters for tensor in saved.values()):
            raise ConfigError(
                f"adapter {adapter!r} is of a kind ({config.peft_type}) whose file is not made of "
                "parameters alone: save it inside of zeroshard.gather(model), on one rank, with "
                "model.save_pretrained(path)"
            )
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


def write_configs(model: nn.Module, path: Path) -> dict[str, dict[str, str]]:
    """Write what belongs beside a model's weights in an export, and no weights.

    Args:
        model: any; what has no config leaves nothing.
        path: a folder, which is made.

    Returns:
        Of a PEFT model, for each folder of the export ("" is `path` itself) the parameters that
        belong into it: name in its file -> name in the model. Of others nothing.
    """
    if not is_adapted(model):
        path.mkdir(exist_ok=True)
        _model_folder(model, None).write_config(path)
        if not any(path.iterdir()):
            path.rmdir()
        return {}
    known = {p: strip_wrappers(name) for name, p in model.named_parameters()}
    adapters = {}
    for folder in _adapter_folders(model):
        (path / folder.name).mkdir(parents=True, exist_ok=True)
        folder.write_config(path / folder.name)
        adapters[folder.name] = {name: known[p] for p, name in folder.names.items()}
    return adapters
