"""Before and at construction: plan, compare the ranks, fill the arenas. Hooks nothing."""

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import nn

from .config import Options, Precision
from .conversions import seed_master
from .errors import ConfigError
from .formats import Format, state_format, sum_dtype, wire_dtype
from .layout import Layout, fingerprint, first_difference
from .parameters import check_trainable, describe_parameter
from .storage import Arena, slot_view
from .transport import Op, Transport

__all__ = ["compare_ranks", "fill_arena", "plan_parameters", "start_without_values", "wires_of"]


def plan_parameters(
    named: Sequence[tuple[str, nn.Parameter]],
    layout: Layout,
    precision: Precision,
    unit_of: Callable[[str, nn.Parameter], str],
) -> tuple[Layout, list[Format]]:
    """The layout with `named` in it, and the format of each of its arenas.

    Args:
        named: trainable parameters in forward order.
        layout: what they are added to.
        precision: the user's choice.
        unit_of: the unit of a parameter, given by name and itself.

    Raises:
        ConfigError: a parameter that cannot be trained.
    """
    check_trainable(named)
    specs = []
    for name, parameter in named:
        stored = _stored_dtype(parameter, precision)
        specs.append(describe_parameter(name, parameter, stored, unit_of(name, parameter)))
        state_format(specs[-1].dtype, precision)
    layout = layout.extend(specs)
    return layout, [state_format(plan.dtype, precision) for plan in layout.arenas]


def compare_ranks(description: dict[str, str], transport: Transport) -> None:
    """Raise on every rank if descriptions differ."""
    op = Op("comparison of ranks")
    digests = transport.all_gather_object(fingerprint(description), op=op)
    if len(set(digests)) == 1:
        return
    descriptions = transport.all_gather_object(description, op=op)
    what, values = first_difference(descriptions)
    by_value: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        by_value.setdefault(value, []).append(rank)
    said = "; ".join(f"rank {ranks}: {value}" for value, ranks in by_value.items())
    raise ConfigError(
        f"all ranks must build the same model and optimizer, but they differ in {what}: {said}"
    )


def fill_arena(
    arena: Arena,
    fmt: Format,
    parameters: Mapping[int, nn.Parameter],
    transport: Transport,
    options: Options,
    without_values: Collection[nn.Parameter],
) -> None:
    """Copy parameters into their slots, take the first rank's, and start the state.

    Those in `without_values` become NaN.
    """
    flat = arena.parameters.zero_()
    sources = {parameters[slot.index].dtype for slot in arena.plan.slots}
    if sources != {flat.dtype}:  # Precision.param_dtype: masters start from the fp32 values
        flat = arena.allocate(arena.plan.numel, "float32", "temporary")
    for slot in arena.plan.slots:
        values = flat[slot.offset : slot.offset + slot.numel]
        if parameters[slot.index] in without_values:
            values.fill_(torch.nan)
        else:
            view = slot_view(values, slot.spec.shape, slot.spec.stride)
            view.copy_(parameters[slot.index].data)
    has_values = any(parameters[slot.index] not in without_values for slot in arena.plan.slots)
    if options.sync_init and has_values:
        transport.broadcast(flat, op=Op("initial parameters")).wait()
    arena.allocate_state(fmt.fields)
    if flat is not arena.parameters:
        rounded = {"remainder": torch.empty_like(flat, dtype=torch.int16)}
        seed_master(flat, arena.parameters, rounded, fmt.master)
    arena.keep_own()
    if fmt.master in ("split", "fp32"):
        for bucket in arena.plan.buckets:
            start = bucket.offset + transport.rank * bucket.shard_numel
            values = flat[start : start + bucket.shard_numel].float()
            parameter = arena.parameter_shard(bucket.index)
            stop = bucket.shard_offset + bucket.shard_numel
            state = arena.state_of(bucket.shard_offset, stop)
            seed_master(values, parameter, state, fmt.master)


def start_without_values(arena: Arena, fmt: Format, layout: Layout) -> None:
    """Start a sharded arena of which no parameter has values: NaN in the shard.

    The whole parameters, which are freed next, are not touched, and so take no memory on a CPU.
    """
    assert arena.shard is not None
    arena.allocate_state(fmt.fields)
    for slot in arena.plan.slots:
        start, stop = layout.local_range(slot.index, arena.rank)
        arena.shard[start:stop].fill_(torch.nan)
    if "master" in arena.state:
        arena.state["master"].copy_(arena.shard)


def _stored_dtype(parameter: nn.Parameter, precision: Precision) -> torch.dtype:
    cast = precision.param_dtype
    return cast if cast is not None and parameter.dtype == torch.float32 else parameter.dtype


def wires_of(dtype: str, precision: Precision) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes of gradients on the wire and of their sum."""
    return _dtype(wire_dtype(dtype, precision)), _dtype(sum_dtype(dtype, precision))


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found
