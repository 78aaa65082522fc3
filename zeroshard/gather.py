"""Full parameters everywhere: for as long as a context lasts, or one unit after the other."""

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .adapters import (
    adapter_parameters,
    idle_copies,
    merged_weight,
    plain_name,
    tuned_layers,
    tuned_weight,
)
from .agreement import in_agreement
from .engine import Engine, engines_of, newest_engine
from .errors import ConfigError
from .shard_tensor import ShardTensor
from .transport import Op
from .wrappers import unwrap

__all__ = [
    "by_unit",
    "check_values",
    "engines_for",
    "full_parameters",
    "gather",
    "gather_whole_arenas",
    "gathered",
    "is_sharded",
    "no_sync",
    "stream",
    "whole_state_dict",
]


def engines_for(model: nn.Module) -> list[Engine]:
    """The engines of the optimizers that a model's parameters are in.

    Raises:
        ConfigError: there is none.
    """
    engines = engines_of(model.parameters())
    if not engines:
        raise ConfigError(
            f"no zeroshard optimizer has parameters of this {type(model).__name__}: build "
            "zeroshard.AdamW first"
        )
    return engines


@contextmanager
def gathered(parameters: Collection[nn.Parameter]) -> Iterator[None]:
    """Keep the units of `parameters` whole, of whichever optimizer."""
    with ExitStack() as stack:
        for engine in engines_of(parameters):
            stack.enter_context(engine.gathered(set(parameters)))
        yield


@contextmanager
def gather(
    target: nn.Module | torch.optim.Optimizer | nn.Parameter, writeback: bool = False
) -> Iterator[None]:
    """Full parameters inside the context; below stage 3 they are full anyway.

    Contexts nest, and forward, backward and `step()` may run inside. What is written to a parameter
    inside takes effect; without `writeback` every rank must write the same.

    Args:
        target: a module, the optimizer, or one parameter.
        writeback: at the end the first rank's values win on every rank, and masters follow them.
            Every rank must enter and leave; after an exception nothing is written.

    Raises:
        ConfigError: there is no zeroshard optimizer.
    """
    if isinstance(target, nn.Module):
        parameters = list(target.parameters())
    elif isinstance(target, torch.optim.Optimizer):
        parameters = [p for group in target.param_groups for p in group["params"]]
    else:
        parameters = [target]
    engines = engines_of(parameters)
    newest = newest_engine()
    if newest is None:
        raise ConfigError(
            f"there is no zeroshard optimizer that could gather {type(target).__name__}: build "
            "zeroshard.AdamW first"
        )
    for engine in engines if writeback else ():
        engine.check_can_step("gather(writeback=True)")
    with gathered(parameters):
        yield
        if writeback:
            with torch.no_grad():
                for engine in engines:
                    engine.masters.write_back(parameters)
                owned = {p for engine in engines for p in engine.parameters.places}
                newest.broadcast(dict.fromkeys(p for p in parameters if p not in owned))


def is_sharded(module: nn.Module) -> bool:
    """Whether parameters of a module are whole in their units only."""
    return any(engine.shards_parameters for engine in engines_of(module.parameters()))


@contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Backwards inside keep gradients of a module local, in whichever optimizers they are."""
    with ExitStack() as stack:
        for engine in engines_of(module.parameters()):
            stack.enter_context(engine.gradients.no_sync())
        yield


def whole_state_dict(module: nn.Module, keep: bool) -> dict[str, Any]:
    """A module's state dict with whole tensors, one gathered after the other; all ranks must call.

    Args:
        module: any.
        keep: whether this rank gets them, on the CPU. Else what had to be gathered is on the meta
            device.
    """
    state: dict[str, Any] = module.state_dict()
    parameters = dict(module.named_parameters(remove_duplicate=False))
    known: dict[Any, Tensor] = {}  # tied parameters are gathered once, and stay tied
    for key, value in state.items() if is_sharded(module) else ():
        if isinstance(value, ShardTensor):
            owner = parameters.get(key, key)
            if owner not in known:
                known[owner] = value.full_tensor().to("cpu" if keep else "meta")
            state[key] = known[owner]
    return state


def full_parameters(
    model: nn.Module, *, merge_adapters: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Every parameter, whole, with its name: on every rank, one unit at a time.

    For pushing weights to an inference engine. Every rank has to iterate, to the same point. The
    tensors are copies, the caller's to keep.

    Args:
        model: one that has a zeroshard optimizer.
        merge_adapters: add PEFT's active LoRA adapters to the weights under them, and give names
            and parameters of the plain model only. The model itself does not change.

    Returns:
        An iterator of (name as in `named_parameters()`, tensor of the parameter's dtype).

    Raises:
        ConfigError: no optimizer; adapters that are not simply added.
    """
    model = unwrap(model)
    layers: dict[nn.Parameter, list[Any]] = {}
    with in_agreement(engines_for(model)[0].transport, "full_parameters"):
        check_values(model)
        for layer in tuned_layers(model) if merge_adapters else ():
            layers.setdefault(tuned_weight(layer), []).append(layer)
    if merge_adapters:
        return _merged(model, layers)
    return ((name, p.clone()) for name, p in stream(model, set(model.parameters())))


def check_values(model: nn.Module) -> None:
    """Raise if a model has no optimizer, or parameters that came from meta without values."""
    for engine in engines_for(model):
        if not engine.cannot_step:
            engine.masters.look_at_writes()
        engine.parameters.check_values(model.parameters())


def stream(model: nn.Module, wanted: Collection[nn.Parameter]) -> Iterator[tuple[str, Tensor]]:
    """The parameters in `wanted`, with their names, whole while they are handed out."""
    for named in by_unit(model, wanted):
        with gathered([parameter for _, parameter in named]):
            for name, parameter in named:
                yield name, parameter.detach()


def by_unit(
    model: nn.Module, wanted: Collection[nn.Parameter]
) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """The parameters in `wanted` by unit; first those that are in none."""
    named = [
        (name, parameter) for name, parameter in model.named_parameters() if parameter in wanted
    ]
    rest = dict.fromkeys(parameter for _, parameter in named)
    groups = []
    for engine in engines_of(rest):
        for unit in engine.sharding.units:
            inside = {place.parameter for place in unit.places}
            groups.append([(name, parameter) for name, parameter in named if parameter in inside])
            rest = {parameter: None for parameter in rest if parameter not in inside}
    groups.insert(0, [(name, parameter) for name, parameter in named if parameter in rest])
    return (group for group in groups if group)


def _merged(
    model: nn.Module, layers: dict[nn.Parameter, list[Any]]
) -> Iterator[tuple[str, Tensor]]:
    others = adapter_parameters(model) | idle_copies(model)
    for named in by_unit(model, set(model.parameters()) - others):
        parameters = [parameter for _, parameter in named]
        tuned = [layer for p in parameters for layer in layers.get(p, ())]
        parts = {part for layer in tuned for part in layer.parameters()}
        with gathered([*parameters, *parts]):
            for name, parameter in named:
                whole = parameter.detach().clone()
                for layer in layers.get(parameter, ()):
                    whole = merged_weight(layer, whole)
                yield plain_name(name), whole


def gather_whole_arenas(engine: Engine, what: str) -> None:
    """Give every rank the others' parts of the parameters that are never freed."""
    for arena in engine.arenas:
        for bucket in arena.plan.buckets if arena.is_whole else ():
            op = Op(what, bucket=bucket.index)
            shard = arena.parameter_shard(bucket.index)
            engine.transport.gather(arena.bucket(bucket.index), shard, op=op).wait()
