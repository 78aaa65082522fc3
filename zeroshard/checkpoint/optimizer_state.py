"""Optimizer state in a folder, by parameter name, without weights: for trainers that save those.

Nothing in such a folder knows the number of ranks, the bucket size or the stage that wrote it.
"""

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..agreement import in_agreement
from ..errors import CheckpointError
from ..folders import METADATA, save_folder
from ..state import state_of
from .dcp_source import open_dcp
from .names import named_groups, names_of, plain, saved_name, unwrapped
from .state_plan import StatePlan

__all__ = ["load_optimizer", "save_optimizer"]

PREFIX = "optimizer"


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
        names = names_of(model, optimizer)
        engine.masters.look_at_writes()
        optimizer.shown_state.take_over(optimizer.state)
        state = {
            names[p]: {
                saved_name(key, value.dtype): value for key, value in state_of(engine, slot).items()
            }
            for p, slot in engine.slot_of.items()
        }
        groups = [
            {key: plain(value, f"{key!r} of a param group") for key, value in group.items()}
            for group in named_groups(names, optimizer)
        ]
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
        if not Path(path, METADATA).is_file():
            raise CheckpointError(f"{path} holds no optimizer that save_optimizer() wrote")
        engine.masters.look_at_writes()
        plan = StatePlan(model, optimizer, open_dcp(Path(path)))
        for request in plan.requests():
            request.check()
    with in_agreement(engine.transport, "load_optimizer"):
        plan.load()
