"""Optimizer state in a folder, by parameter name, through torch.distributed.checkpoint.

Nothing in such a folder knows the number of ranks, the bucket size or the stage that wrote it.
"""

import io
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from .agreement import in_agreement
from .engine import Engine
from .errors import ConfigError
from .layout import BLOCK
from .optimizer import AdamW
from .param_groups import check_group
from .state import SAVED_KEYS, load_slot, shown, slices_of, state_of
from .wrappers import strip_wrappers, unwrap

__all__ = ["load_optimizer", "save_optimizer", "unwrapped"]

PREFIX = "optimizer"


def unwrapped(optimizer: Any) -> AdamW:
    """Our optimizer, from inside of whatever holds it as `.optimizer`.

    Raises:
        ConfigError: there is none.
    """
    inner = optimizer
    while not isinstance(inner, AdamW):
        inner = getattr(inner, "optimizer", None)
        if inner is None:
            raise ConfigError(f"expected a zeroshard.AdamW, got {type(optimizer).__name__}")
    return inner


def save_optimizer(path: str | os.PathLike[str], model: nn.Module, optimizer: Any) -> None:
    """Write the state of an optimizer to a folder, each rank its own slices; all must call it.

    Moments, masters and step counters are written as they are, with the options of the param
    groups. Weights are not: save them beside, and load them before. Nor are gradients that wait for
    a step. What an earlier call wrote to the folder is removed first.

    Args:
        path: the folder, which every rank sees.
        model: the module that the parameters' names are taken from.
        optimizer: a `zeroshard.AdamW`, or what wraps it.

    Raises:
        ConfigError: the model does not hold every parameter that is trained.
    """
    optimizer = unwrapped(optimizer)
    engine = optimizer.engine
    with in_agreement(engine.transport, "save_optimizer"):
        engine.check_can_step("save_optimizer")
        if engine.transport.is_first:
            _clear(Path(path))
        names = _names_of(model, optimizer)
        engine.masters.look_at_writes()
        state = {names[p]: state_of(engine, slot) for p, slot in engine.slot_of.items()}
        content = {PREFIX: {"state": state, "param_groups": _named_groups(names, optimizer)}}
    with _as_asked(path):
        save(content, checkpoint_id=path, no_dist=not engine.transport.distributed)


@torch.no_grad()
def load_optimizer(path: str | os.PathLike[str], model: nn.Module, optimizer: Any) -> None:
    """Continue from what `save_optimizer` wrote, at any number of ranks and in any stage.

    Each rank reads its own slices. A state in another format (`Precision`) is read as fp32 values
    and rounded once. All ranks must call it, after the model's weights were loaded.

    Args:
        path: the folder.
        model: the module that the parameters' names are taken from.
        optimizer: a `zeroshard.AdamW`, or what wraps it.

    Raises:
        ConfigError: parameters or groups that do not fit, or a file that cannot be read; on every
            rank, before anything has changed.
    """
    optimizer = unwrapped(optimizer)
    engine = optimizer.engine
    with in_agreement(engine.transport, "load_optimizer"):
        engine.check_can_step("load_optimizer")
        engine.masters.look_at_writes()
        names = _names_of(model, optimizer)
        reader = FileSystemReader(path)
        metadata = reader.read_metadata()
        saved = metadata.state_dict_metadata
        groups = _saved_groups(reader, metadata)
        _check_names(names, _named_groups(names, optimizer), groups, saved)
        wanted = dict(_wanted(engine, names, saved))
        values = _read(reader, wanted)
        slices = {}
        for parameter, slot in engine.slot_of.items():
            prefix = f"{PREFIX}.state.{names[parameter]}."
            fields = {key: values[prefix + key] for key in SAVED_KEYS if prefix + key in values}
            slices[slot] = slices_of(engine, slot, fields)
    for slot, local in slices.items():
        load_slot(engine, slot, local)
    for group, other in zip(optimizer.param_groups, groups, strict=True):
        group.update({key: value for key, value in other.items() if key != "params"})


def _clear(folder: Path) -> None:
    """Remove an earlier checkpoint; what makes it one comes first, lest it be read half gone."""
    (folder / ".metadata").unlink(missing_ok=True)
    for file in folder.glob("*.distcp"):
        file.unlink()


def _names_of(model: nn.Module, optimizer: AdamW) -> dict[nn.Parameter, str]:
    """Name of every parameter of the optimizer, without what wrappers add."""
    names = {p: strip_wrappers(name) for name, p in unwrap(model).named_parameters()}
    ours = [p for group in optimizer.param_groups for p in group["params"]]
    strange = [tuple(p.shape) for p in ours if p not in names]
    if strange:
        raise ConfigError(
            f"{len(strange)} parameters of the optimizer, the first of shape {strange[0]}, are "
            f"not in this {type(model).__name__}: pass the model that it trains"
        )
    return {p: names[p] for p in ours}


def _named_groups(names: Mapping[nn.Parameter, str], optimizer: AdamW) -> list[dict[str, Any]]:
    """The param groups with names instead of parameters."""
    return [
        {**group, "params": [names[p] for p in group["params"]]} for group in optimizer.param_groups
    ]


def _saved_groups(reader: FileSystemReader, metadata: Metadata) -> list[dict[str, Any]]:
    """The param groups of a saved optimizer, with names instead of parameters."""
    flat = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        if isinstance(entry, TensorStorageMetadata)
        else None
        for key, entry in metadata.state_dict_metadata.items()
        if key.startswith(f"{PREFIX}.param_groups.")
    }
    if not flat:
        raise ConfigError(f"{reader.path} holds no optimizer that save_optimizer() wrote")
    paths = {key: metadata.planner_data[key] for key in flat}
    groups: list[dict[str, Any]] = unflatten_state_dict(_read(reader, flat), paths)[PREFIX][
        "param_groups"
    ]
    return groups


def _check_names(
    names: Mapping[nn.Parameter, str],
    ours: list[dict[str, Any]],
    saved: list[dict[str, Any]],
    entries: Mapping[str, Any],
) -> None:
    """Raise where a saved optimizer has other parameters than ours, or them in other groups."""
    for number in range(max(len(ours), len(saved))):
        mine = set(ours[number]["params"]) if number < len(ours) else set()
        other = set(saved[number]["params"]) if number < len(saved) else set()
        differing = sorted(mine ^ other)
        if differing:
            where = "the optimizer only" if differing[0] in mine else "the saved state only"
            raise ConfigError(
                f"param group {number} of the saved state does not fit: {len(differing)} "
                f"parameters are in one of them, {differing[0]!r} in {where}"
            )
    if len(ours) != len(saved):
        raise ConfigError(f"the saved state has {len(saved)} param groups, not {len(ours)}")
    for group, options in zip(ours, saved, strict=True):
        check_group({**group, **options})


def _wanted(
    engine: Engine, names: Mapping[nn.Parameter, str], saved: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """(key, empty tensor for this rank's slice) of everything saved of our parameters."""
    for parameter, slot in engine.slot_of.items():
        of_parameter = engine.gradients.shards.slices[slot]
        for field in SAVED_KEYS:
            key = f"{PREFIX}.state.{names[parameter]}.{field}"
            entry = saved.get(key)
            if not isinstance(entry, TensorStorageMetadata):
                continue
            dtype = entry.properties.dtype
            if field == "step":
                yield key, torch.empty((), dtype=dtype)
                continue
            slices = of_parameter.per_block(BLOCK) if field.endswith("_scale") else of_parameter
            if tuple(entry.size) != slices.shape:
                raise ConfigError(
                    f"{field} of {names[parameter]!r} must have shape {slices.shape}, the saved "
                    f"one has {tuple(entry.size)}"
                )
            local = torch.empty(slices.numels[engine.transport.rank], dtype=dtype)
            yield key, shown(engine, slices, local)


@contextmanager
def _as_asked(path: object) -> Iterator[None]:
    """Without torch's guess why a rank works alone, and with errors that are Exceptions."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            _, (cause, _) = next(iter(error.failures.items()))
            raise ConfigError(f"checkpoint {path}: {str(cause) or repr(cause)}") from cause


class _Planner(DefaultLoadPlanner):
    """Takes keys as they are, and no code out of a file."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def _read(reader: FileSystemReader, wanted: dict[str, Any]) -> dict[str, Any]:
    """Fill the tensors of a flat state dict; alone, since each rank knows what it needs."""
    with _as_asked(reader.path):
        load(wanted, storage_reader=reader, planner=_Planner(), no_dist=True)
    return wanted
