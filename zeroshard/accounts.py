"""What an engine holds, in bytes and in words. Changes nothing, communicates nothing."""

from collections.abc import Iterator

import torch
from torch import Tensor

from .engine import Engine
from .shard_tensor import ShardTensor
from .storage import storage_nbytes
from .update import implementation_of

__all__ = ["is_updated_by_torch", "memory_of", "summary_of", "tensors_of"]


def memory_of(engine: Engine) -> dict[str, int]:
    """Bytes held on this rank, by category; each storage once."""
    by_category: dict[str, list[Tensor]] = {"master": [], "moments": []}
    for arena, fmt in zip(engine.arenas, engine.formats, strict=True):
        for field in fmt.fields:
            by_category[field.category].append(arena.state[field.name])
    arenas = dict.fromkeys(place.arena for place in engine.parameters.places.values())
    grads = [parameter.grad for parameter in engine.slot_of]
    whole = [g for g in grads if g is not None and not isinstance(g, ShardTensor)]
    held = {
        "parameters": storage_nbytes(
            arena.parameters if arena.shard is None else arena.shard for arena in arenas
        ),
        "unsharded_parameters": storage_nbytes(
            arena.parameters for arena in arenas if arena.shard is not None
        ),
        "gradients": storage_nbytes([*(arena.gradients for arena in engine.arenas), *whole]),
        **{category: storage_nbytes(tensors) for category, tensors in by_category.items()},
        "communication": engine.pool.nbytes,
    }
    held["optimizer_state"] = held["master"] + held["moments"]
    return held


def tensors_of(engine: Engine) -> Iterator[tuple[Tensor, str]]:
    """All tensors that an engine holds now, with their categories."""
    for arena in dict.fromkeys(place.arena for place in engine.parameters.places.values()):
        if arena.shard is None:
            yield arena.parameters, "parameters"
        else:
            yield arena.shard, "parameters"
            yield arena.parameters, "unsharded_parameters"
        yield arena.placeholders, "bookkeeping"
        if arena.gradients is not None:
            yield arena.gradients, "gradients"
        for field in arena.fields:
            yield arena.state[field.name], field.category
    for buffer in engine.pool.buffers():
        yield buffer, "communication"


def is_updated_by_torch(engine: Engine) -> bool:
    """Whether torch's fused kernel makes every update."""
    made_by = {
        implementation_of(fmt, arena.device)
        for arena, fmt in zip(engine.arenas, engine.formats, strict=True)
    }
    return made_by <= {"torch fused"}


def summary_of(engine: Engine) -> str:
    """A few lines on what is sharded how."""
    lines = [
        f"zeroshard stage {engine.options.stage}, {engine.transport.num_ranks} ranks, "
        f"{len(engine.layout.buckets)} buckets"
    ]
    for dtype, master, moments, update in dict.fromkeys(
        (plan.dtype, fmt.master, fmt.moments, implementation_of(fmt, torch.device(plan.device)))
        for plan, fmt in zip(engine.layout.arenas, engine.formats, strict=True)
    ):
        slots = [s for plan in engine.layout.arenas if plan.dtype == dtype for s in plan.slots]
        numel = sum(slot.numel for slot in slots)
        lines.append(
            f"  {dtype}: {len(slots)} parameters, {numel} elements, master {master}, moments "
            f"{moments}, update by {update}"
        )
    for unit in engine.sharding.units:
        numel = sum(place.slot.numel for place in unit.places)
        name = unit.name or "(root)"
        lines.append(f"  unit {name}: {len(unit.places)} parameters, {numel} elements")
    return "\n".join(lines)
