"""Optimizer state in torch's own AdamW format, and from it. Rounds moments to our format only.

A state dict is local unless `consolidate` made it whole; loading never communicates.
"""

import operator
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from .conversions import exact_master, read_moment, write_moment
from .engine import Engine
from .errors import ConfigError
from .formats import MOMENT_NAMES
from .layout import BLOCK
from .shard_tensor import RaggedShard, ShardTensor, Slices
from .state_shard import StateShard
from .storage import slot_view

__all__ = [
    "SAVED_KEYS",
    "ShownState",
    "check_groups",
    "consolidate",
    "has_master",
    "load_slot",
    "local_slice",
    "shown",
    "slices_of",
    "state_of",
]

# What a saved state may hold of a parameter: "master" is its fp32 values, "remainder" their lower
# halves, and scales are those of 8-bit moments.
SAVED_KEYS = (
    "step",
    "exp_avg",
    "exp_avg_sq",
    "exp_avg_scale",
    "exp_avg_sq_scale",
    "master",
    "remainder",
)


def state_of(engine: Engine, slot: int) -> dict[str, Any]:
    """What optimizer.state holds for a parameter: step, moments, and what the format adds."""
    arena = engine.arenas[engine.layout.slots[slot].arena]
    start, stop = engine.layout.local_range(slot, engine.transport.rank)
    state: dict[str, Any] = {"step": engine.counters.views[slot]}
    slices = engine.gradients.shards.slices[slot]
    local = arena.state_of(start, stop)
    for field in arena.fields:
        here = slices if field.per == 1 else slices.per_block(field.per)
        state[field.name] = shown(engine, here, local[field.name])
    return state


def shown(engine: Engine, slices: Slices, local: Tensor) -> Tensor:
    """This rank's slice of a tensor as users see it: without other ranks it is the whole tensor."""
    if engine.transport.distributed:
        return ShardTensor(local, slices, engine.transport)
    return slot_view(local, slices.shape, slices.stride)


class ShownState:
    """What `optimizer.state` shows, and what somebody put there instead.

    Args:
        engine: whose state it is.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._shown: dict[nn.Parameter, dict[str, Any]] = {}
        self._values: list[Any] = []  # of all entries, in order, when they were looked at last

    def show(self, parameters: Iterable[nn.Parameter], state: dict[Any, Any]) -> None:
        """Put the entries of parameters into `optimizer.state`; what is there already is kept.

        Raises:
            ConfigError: state that somebody put there before, and that does not fit.
        """
        for parameter in parameters:
            if parameter not in self._shown:
                self._shown[parameter] = {}
                if any(key in SAVED_KEYS for key in state.get(parameter, {})):
                    local = self._given(parameter, state[parameter])
                    load_slot(self.engine, self.engine.slot_of[parameter], local)
            self._show(parameter, state)

    def show_all(self, state: dict[Any, Any]) -> None:
        """Show the engine's state in the place of whatever is there, as after a load."""
        for parameter in self._shown:
            self._show(parameter, state)

    def take_over(self, state: dict[Any, Any]) -> None:
        """Load what is in `optimizer.state` and is not ours: other tensors, or none.

        An entry that lacks moments gets zeros, as in an optimizer that has not stepped.

        Raises:
            ConfigError: tensors that do not fit.
        """
        now = _values_of(state)
        if len(now) == len(self._values) and all(map(operator.is_, now, self._values)):
            return
        changed = {
            parameter: self._given(parameter, state.get(parameter, {}))
            for parameter, shown in self._shown.items()
            if not _holds(state.get(parameter, {}), shown)
        }
        for parameter, local in changed.items():
            load_slot(self.engine, self.engine.slot_of[parameter], local)
            self._show(parameter, state)
        self._values = _values_of(state)

    def forget(self) -> None:
        """Let go of everything."""
        self._shown.clear()
        self._values.clear()

    def _show(self, parameter: nn.Parameter, state: dict[Any, Any]) -> None:
        theirs = {k: v for k, v in state.get(parameter, {}).items() if k not in SAVED_KEYS}
        self._shown[parameter] = state_of(self.engine, self.engine.slot_of[parameter])
        state[parameter] = {**theirs, **self._shown[parameter]}
        self._values = []

    def _given(self, parameter: nn.Parameter, entry: Mapping[str, Any]) -> dict[str, Tensor]:
        """Copies of what is to be loaded of an entry: of our own, step and moments only."""
        shown = self._shown[parameter]
        ours = {key for key, value in entry.items() if key in shown and value is shown[key]}
        for name in ("step", *(name for name in MOMENT_NAMES if name in ours)):
            ours -= {name, f"{name}_scale"}
        given = {key: value for key, value in entry.items() if key not in ours}
        local = slices_of(self.engine, self.engine.slot_of[parameter], given)
        return {key: value.clone() for key, value in local.items()}


def _values_of(state: Mapping[Any, Any]) -> list[Any]:
    """Of all entries, in order; at every step, so in one pass."""
    try:
        return [*chain.from_iterable(map(dict.values, state.values()))]
    except TypeError:  # the user's own, beside the entries
        entries = [entry for entry in state.values() if isinstance(entry, dict)]
        return [*chain.from_iterable(map(dict.values, entries))]


def _holds(entry: Mapping[str, Any], shown: Mapping[str, Any]) -> bool:
    return all(key in entry and entry[key] is value for key, value in shown.items())


def master_of(engine: Engine, slot: int) -> ShardTensor | None:
    """The slot's fp32 master where it says more than the parameter."""
    masters = [
        exact_master(parameter, state) for parameter, state in engine.masters.local_parts(slot)
    ]
    if engine.formats[engine.layout.slots[slot].arena].master not in ("split", "fp32"):
        return None
    nothing = torch.empty(0, dtype=torch.float32, device=engine.counters.counts.device)
    local = torch.cat([nothing, *(master for master in masters if master is not None)])
    return ShardTensor(local, engine.gradients.shards.slices[slot], engine.transport)


def _moment_of(engine: Engine, slot: int, name: str) -> ShardTensor:
    """The fp32 values of one of the slot's moments."""
    arena = engine.arenas[engine.layout.slots[slot].arena]
    start, stop = engine.layout.local_range(slot, engine.transport.rank)
    values = read_moment(name, arena.state_of(start, stop))
    return ShardTensor(values, engine.gradients.shards.slices[slot], engine.transport)


def consolidate(engine: Engine, parameters: Sequence[Any], to: int) -> dict[int, dict[str, Any]]:
    """Gather every parameter's state onto one rank's CPU; all ranks must call it.

    Args:
        engine: the engine.
        parameters: the parameters of all groups, in order; their positions are the keys.
        to: rank (within the shard group) that keeps the result; the others return {}.

    Returns:
        {position: {"step", "exp_avg", "exp_avg_sq"}} with tensors of the parameter's shape, and
        "master" (fp32) where the master says more than the parameter.
    """
    whole: dict[int, dict[str, Any]] = {}
    for position, parameter in enumerate(parameters):
        slot = engine.slot_of.get(parameter)
        if slot is None:
            continue
        state = state_of(engine, slot)
        entry = {"step": state["step"].detach().cpu().clone()}
        for name in MOMENT_NAMES:
            entry[name] = _whole(_moment_of(engine, slot, name))
        master = master_of(engine, slot)
        if master is not None:
            entry["master"] = _whole(master)
        if engine.transport.rank == to:
            whole[position] = entry
    return whole


def _whole(tensor: Tensor) -> Tensor:
    full = tensor.full_tensor() if isinstance(tensor, ShardTensor) else tensor.clone()
    return full.detach().cpu()


def check_groups(ours: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]) -> None:
    """Raise if saved param groups do not fit ours, as torch does."""
    if len(ours) != len(saved):
        raise ConfigError(
            f"the loaded state dict has {len(saved)} parameter groups, the optimizer {len(ours)}"
        )
    for number, (mine, other) in enumerate(zip(ours, saved, strict=True)):
        if len(mine["params"]) != len(other["params"]):
            raise ConfigError(
                f"parameter group {number} has {len(other['params'])} parameters in the loaded "
                f"state dict and {len(mine['params'])} in the optimizer"
            )


def slices_of(engine: Engine, slot: int, saved: Mapping[str, Any]) -> dict[str, Tensor]:
    """This rank's slices of one parameter's saved state, flat. Changes nothing.

    Raises:
        ConfigError: a tensor that does not fit.
    """
    name = engine.layout.slots[slot].spec.name
    slices = engine.gradients.shards.slices[slot]
    local = {}
    for key in ("exp_avg", "exp_avg_sq", "master", "remainder"):
        if key in saved:
            local[key] = local_slice(engine, slices, saved[key], f"{key} of {name!r}")
    if "remainder" in local:  # bits: see ShardTensor.redistribute
        local["remainder"] = local["remainder"].view(torch.int16)
    for key in MOMENT_NAMES:
        has_codes = key in local and local[key].dtype in (torch.int8, torch.uint8)
        scale = saved.get(f"{key}_scale")
        if not has_codes and isinstance(scale, StateShard) and scale.given is None:
            scale = None  # our own: whoever filled a local state dict had none to give
        if has_codes != (scale is not None):
            raise ConfigError(
                f"the saved state of {name!r} must have {key} in 8-bit codes and {key}_scale, or "
                f"neither; it has {', '.join(saved)}: load it as it was saved"
            )
        if has_codes:
            of_blocks, what = slices.per_block(BLOCK), f"{key}_scale of {name!r}"
            scale = local_slice(engine, of_blocks, scale, what)
            local[key] = read_moment(key, {key: local[key], f"{key}_scale": scale})
    local["step"] = torch.as_tensor(saved.get("step", 0), dtype=torch.float32).reshape(())
    return local


def has_master(local: Mapping[str, Tensor]) -> bool:
    """Whether what `slices_of` made of a saved state tells the masters."""
    return "remainder" in local or "master" in local


def load_slot(engine: Engine, slot: int, local: Mapping[str, Tensor]) -> None:
    """Copy what `slices_of` made of a saved state into the shards; moments it lacks become zero."""
    engine.masters.forget_loaded(slot)
    engine.counters.views[slot].copy_(local["step"])
    arena = engine.arenas[engine.layout.slots[slot].arena]
    start, stop = engine.layout.local_range(slot, engine.transport.rank)
    state = arena.state_of(start, stop)
    for name in MOMENT_NAMES:
        values = local.get(name, torch.zeros(stop - start))
        write_moment(name, values.to(arena.device, torch.float32), state)
    if "remainder" in local:
        engine.masters.load_remainder(slot, local["remainder"])
    elif "master" in local:
        engine.masters.load(slot, local["master"])


def local_slice(engine: Engine, slices: Slices, value: Any, what: str) -> Tensor:
    """This rank's slice of a saved value, [slice's numel] in storage order."""
    if isinstance(value, ShardTensor):
        if not value.slices.same_as(slices):
            raise ConfigError(
                f"{what} was saved as slices for {len(value.slices.by_rank)} ranks or another "
                "bucket size, which do not fit this optimizer: save it with "
                "consolidate_state_dict() instead"
            )
        if value.saved_by not in (None, engine.transport.rank):
            raise ConfigError(
                f"{what} was saved by rank {value.saved_by} and is loaded by rank "
                f"{engine.transport.rank}: every rank must load the file that it saved itself. If "
                "one rank alone saved, call consolidate_state_dict() on every rank before it does"
            )
        given = value.given if isinstance(value, StateShard) else None
        return value._local_tensor if given is None else given
    if isinstance(value, DTensor):
        if not all(isinstance(place, (Replicate, RaggedShard)) for place in value.placements):
            raise ConfigError(
                f"{what} is a DTensor with placements {value.placements}; loading never "
                "communicates: pass its full_tensor()"
            )
        value = value.to_local()
    if not isinstance(value, Tensor) or tuple(value.shape) != slices.shape:
        came = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ConfigError(f"{what} must have shape {slices.shape}, got {came}")
    return slices.cut(slices.flatten(value), engine.transport.rank)
