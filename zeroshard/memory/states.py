"""What a rank holds of parameters, gradients and state, to the byte. No tensors, no communication.

The layout, the formats and the schedule are those of the runtime, so that padding is included and
`memory()` of a running optimizer says the same.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch

from ..config import Options, Precision
from ..errors import ConfigError
from ..formats import state_format, wire_dtype
from ..layout import KEPT_WHOLE, Layout, ParamSpec, plan_layout
from ..schedule import Action, Event, Schedule, compile_schedule
from ..units import ROOT
from .models import ModelShape
from .reductions import TRANSPORTS, Group, Held, Wire, walk, walk_alone

__all__ = ["Planned", "States"]


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What is planned: a model, the user's choices, and where it runs.

    Attributes:
        shape: the model.
        options: the arguments of `zeroshard.AdamW`.
        world_size: ranks that share the states.
        process_group: whether there is one; without, gradients are plain tensors, and nothing is
            sharded.
        transport: "nccl", or "gloo" for ranks on CPUs.
        rank: whose memory it is.
    """

    shape: ModelShape
    options: Options
    world_size: int
    process_group: bool
    transport: str = "nccl"
    rank: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.world_size, int) or self.world_size < 1:
            raise ConfigError(
                f"the number of ranks must be a whole number of at least 1, got {self.world_size!r}"
            )
        if self.world_size > 1 and not self.process_group:
            raise ConfigError(f"{self.world_size} ranks need a process group")
        if self.transport not in TRANSPORTS:
            raise ConfigError(
                f"transport must be one of {', '.join(TRANSPORTS)}; got {self.transport!r}"
            )
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"there is no rank {self.rank} of {self.world_size}")
        if not self.shape.trained:
            raise ConfigError(f"{self.shape.name} has no parameter that is trained")


class States:
    """The memory of states, by category.

    Args:
        planned: what is planned.

    Attributes:
        shards_parameters: whether parameters are whole only around the use of their unit.
    """

    def __init__(self, planned: Planned) -> None:
        self.planned = planned
        self.schedule: Schedule = compile_schedule(planned.options)
        self.shards_parameters = self.schedule.shards_parameters and planned.process_group
        precision = planned.options.precision
        units = planned.shape.trained
        self.layout = _layout(
            _stored(units, precision, sharded=self.shards_parameters),
            planned.world_size,
            planned.options.bucket_nbytes,
        )
        self.frozen_layout: Layout | None = None
        if self.shards_parameters and planned.shape.frozen:
            self.frozen_layout = _layout(
                planned.shape.frozen, planned.world_size, planned.options.bucket_nbytes
            )
        self.formats = [state_format(arena.dtype, precision) for arena in self.layout.arenas]

    # --- what stays

    @cached_property
    def resident(self) -> dict[str, int]:
        """Bytes of parameters, buffers, masters and moments, at any time."""
        shape, ranks = self.planned.shape, self.planned.world_size
        held = {"parameters": shape.others_nbytes, "buffers": shape.buffers_nbytes}
        for layout in self._layouts():
            for arena in layout.arenas:
                is_sharded = self.shards_parameters and arena.unit != KEPT_WHOLE
                numel = arena.numel // ranks if is_sharded else arena.numel
                held["parameters"] += numel * _itemsize(arena.dtype)
        if self.frozen_layout is None:
            held["parameters"] += sum(s.numel * _itemsize(s.dtype) for s in shape.frozen)
        held |= {"master": 0, "moments": 0}
        for arena, fmt in zip(self.layout.arenas, self.formats, strict=True):
            for field in fmt.fields:
                numel = arena.numel // ranks // field.per
                held[field.category] += numel * _itemsize(field.dtype)
        return held

    @property
    def gradient_shards(self) -> int:
        """Bytes of this rank's slices of all gradients, which are fp32."""
        return sum(4 * (a.numel // self.planned.world_size) for a in self.layout.arenas)

    @property
    def whole_gradients(self) -> int:
        """Bytes of all gradients as autograd makes them."""
        return sum(slot.numel * _itemsize(slot.spec.dtype) for slot in self.layout.slots)

    @cached_property
    def unit_nbytes(self) -> dict[str, int]:
        """Bytes of each unit, whole, where parameters are sharded."""
        found: dict[str, int] = {}
        if self.shards_parameters:
            for layout in self._layouts():
                for arena in layout.arenas:
                    nbytes = arena.numel * _itemsize(arena.dtype)
                    found[arena.unit] = found.get(arena.unit, 0) + nbytes
            found.pop(KEPT_WHOLE, None)
        return found

    def _layouts(self) -> Iterable[Layout]:
        return (self.layout,) if self.frozen_layout is None else (self.layout, self.frozen_layout)

    # --- points at which nothing is under way

    @cached_property
    def points(self) -> dict[str, dict[str, int]]:
        """Bytes by category, empty ones left out, at the points of the first step and later ones.

        `constructed` is before the first step.
        """
        constructed = dict(self.resident)
        if not self.planned.process_group:
            after_backward = constructed | {"gradients": self.whole_gradients}
            after_zero_grad = constructed
        else:
            left = self.backward[2]
            after_backward = constructed | {
                "gradients": self.gradient_shards,
                "communication": left.communication,
            }
            frees = Action.FREE_GRADIENTS in self.schedule.actions(Event.ZERO_GRAD)
            after_zero_grad = after_backward | {"gradients": 0} if frees else after_backward
        points = {
            "constructed": constructed,
            "after_backward": after_backward,
            "after_step": after_backward,
            "after_zero_grad": after_zero_grad,
        }
        return {
            name: {key: nbytes for key, nbytes in held.items() if nbytes}
            for name, held in points.items()
        }

    # --- a backward

    @property
    def structure(self) -> tuple[str, ...]:
        """[slots] the unit of each parameter, whether units are gathered or not."""
        return tuple(spec.unit for spec in self.planned.shape.trained)

    @cached_property
    def backward(self) -> tuple[list[Group], Held, Held]:
        """See `walk`."""
        planned = self.planned
        if not planned.process_group:
            return walk_alone(self.layout, self.structure)
        wire = Wire(transport=planned.transport, world_size=planned.world_size, rank=planned.rank)
        # Of the precision, only what travels matters.
        plain = replace(
            planned.options, precision=Precision(reduce=planned.options.precision.reduce)
        )
        return _walk(self.layout, plain, wire, self.structure, planned.shape.lookups)

    # --- the wire

    @cached_property
    def wire_nbytes(self) -> int:
        """Bytes that a rank sends in a step of one backward."""
        if not self.planned.process_group:
            return 0
        precision = self.planned.options.precision
        sent = 0
        for layout in self._layouts():
            for arena in layout.arenas:
                if layout is self.layout:
                    sent += arena.numel * _itemsize(wire_dtype(arena.dtype, precision))
                gathers = self._gathers(arena.unit) if self.shards_parameters else 1
                sent += gathers * arena.numel * _itemsize(arena.dtype)
        return sent * (self.planned.world_size - 1) // self.planned.world_size

    def _gathers(self, unit: str) -> int:
        """How often a unit is gathered in a step."""
        frees = Action.IDLE in self.schedule.actions(Event.POST_FORWARD)
        kept = {ROOT, KEPT_WHOLE, self.last_unit, *self.planned.shape.lookups}
        return 2 if frees and unit not in kept else 1

    @property
    def last_unit(self) -> str:
        """The unit in whose forward the model's ends, which is whole when backward begins."""
        named = [s.unit for s in self.planned.shape.trained if s.unit not in (ROOT, KEPT_WHOLE)]
        return named[-1] if named else ROOT


def _stored(
    specs: tuple[ParamSpec, ...], precision: Precision, *, sharded: bool
) -> tuple[ParamSpec, ...]:
    """The specs as the runtime's layout has them: of the dtype that is stored, by unit."""
    cast = "float32" if precision.param_dtype is None else "bfloat16"
    return tuple(
        replace(
            spec,
            dtype=cast if spec.dtype == "float32" else spec.dtype,
            unit=spec.unit if sharded else "",
        )
        for spec in specs
    )


@lru_cache(maxsize=8)
def _layout(specs: tuple[ParamSpec, ...], world_size: int, bucket_nbytes: int) -> Layout:
    return plan_layout(specs, world_size=world_size, bucket_nbytes=bucket_nbytes)


_walks: dict[
    tuple[int, Options, Wire, tuple[str, ...], frozenset[str]],
    tuple[Layout, tuple[list[Group], Held, Held]],
]
_walks = {}


def _walk(
    layout: Layout,
    options: Options,
    wire: Wire,
    units: tuple[str, ...],
    lookups: frozenset[str],
) -> tuple[list[Group], Held, Held]:
    """`walk`, kept: a table asks the same for many precisions."""
    key = (id(layout), options, wire, units, lookups)
    if key not in _walks:
        if len(_walks) > 16:
            _walks.clear()
        _walks[key] = (layout, walk(layout, options, wire, units, lookups))  # keeps the id taken
    return _walks[key][1]


def _itemsize(dtype: str) -> int:
    found = getattr(torch, dtype)
    assert isinstance(found, torch.dtype)
    return found.itemsize


def held_by(points: Mapping[str, Mapping[str, int]], point: str) -> dict[str, int]:
    """What `memory()` of an optimizer would say at a point: its own keys, zeros included."""
    held = points[point]
    keys = ("parameters", "unsharded_parameters", "gradients", "master", "moments", "communication")
    found = {key: held.get(key, 0) for key in keys}
    found["optimizer_state"] = found["master"] + found["moments"]
    return found
