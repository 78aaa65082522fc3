"""Optimizer state in a folder, by parameter name.

Nothing in such a folder knows the number of ranks, the bucket size or the stage that wrote it.
"""

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ..agreement import in_agreement
from ..engine import Engine
from ..errors import ConfigError
from ..folders import opened, read, save_folder
from ..layout import BLOCK
from ..optimizer import AdamW
from ..param_groups import check_group
from ..state import SAVED_KEYS, load_slot, shown, slices_of, state_of
from ..wrappers import strip_wrappers, unwrap

__all__ = ["load_optimizer", "save_optimizer", "unwrapped"]

PREFIX = "optimizer"
READABLE = (bool, int, float, complex, str, bytes, type(None))  # without code out of a file


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
    a step. What an earlier call wrote to the folder stays until all is written.

    Args:
        path: the folder, which every rank sees.
        model: the module that the parameters' names are taken from.
        optimizer: a `zeroshard.AdamW`, or what wraps it.

    Raises:
        ConfigError: the model does not hold every parameter that is trained; a group has an option
            that could not be read back; the folder cannot be written. On every rank.
    """
    optimizer = unwrapped(optimizer)
    engine = optimizer.engine
    with in_agreement(engine.transport, "save_optimizer"):
        engine.check_can_step("save_optimizer")
        names = _names_of(model, optimizer)
        engine.masters.look_at_writes()
        optimizer.shown_state.take_over(optimizer.state)
        state = {names[p]: state_of(engine, slot) for p, slot in engine.slot_of.items()}
        groups = [_plain(group) for group in _named_groups(names, optimizer)]
    content = {PREFIX: {"state": state, "param_groups": groups}}
    save_folder(path, content, engine.transport, "save_optimizer")


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
        reader, metadata = opened(path, "optimizer that save_optimizer() wrote")
        saved = metadata.state_dict_metadata
        groups = _saved_groups(reader, metadata)
        _check_groups(_named_groups(names, optimizer), groups)
        wanted = dict(_wanted(engine, names, saved))
        values = read(reader, wanted)
        slices = {}
        for parameter, slot in engine.slot_of.items():
            prefix = f"{PREFIX}.state.{names[parameter]}."
            fields = {key: values[prefix + key] for key in SAVED_KEYS if prefix + key in values}
            slices[slot] = slices_of(engine, slot, fields)
    for slot, local in slices.items():
        load_slot(engine, slot, local)
    optimizer.shown_state.show_all(optimizer.state)
    for group, other in zip(optimizer.param_groups, groups, strict=True):
        group.update({key: value for key, value in other.items() if key != "params"})


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


def _plain(value: Any, key: object = "an option") -> Any:
    """Options of a group, numbers of numpy as Python's; raise where a file could not give it."""
    if type(value).__module__ == "numpy" and value.shape == ():
        value = value.item()
    if isinstance(value, dict):
        return {key: _plain(entry, key) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(entry, key) for entry in value)
    if not isinstance(value, (torch.Tensor, torch.dtype)) and type(value) not in READABLE:
        raise ConfigError(
            f"{key!r} of a param group is a {type(value).__name__}, which would have to be read as "
            "code: save numbers, strings, tensors, and lists and dictionaries of these"
        )
    return value


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
    groups: list[dict[str, Any]] = unflatten_state_dict(read(reader, flat), paths)[PREFIX][
        "param_groups"
    ]
    return groups


def _check_groups(ours: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
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
