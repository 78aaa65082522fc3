"""What stage 3 makes of a module: units, arenas that can be freed, frozen parameters, hooks.

Below stage 3 there are no units, and every arena stays whole.
"""

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import nn

from .config import Options
from .construction import fill_arena, start_without_values
from .errors import ConfigError
from .formats import FROZEN, Format
from .layout import KEPT_WHOLE, ArenaPlan, Layout, plan_layout
from .liveness import checked
from .module_state import ModuleState
from .modules import ModuleHooks
from .parameters import Parameters, describe_parameter
from .schedule import Event
from .sharding import Sharding
from .storage import Arena
from .transport import Transport
from .units import ROOT, UnitPlan, plan_units

__all__ = ["ShardedModel"]


class ShardedModel:
    """The module of one optimizer, as far as its parameters are sharded.

    Args:
        options: the user's choices.
        transport: the wire.
        parameters: all that live in arenas.
        shards: whether arenas are freed at all.
        raise_event: called at the boundaries of units.
    """

    def __init__(
        self,
        options: Options,
        transport: Transport,
        parameters: Parameters,
        shards: bool,
        raise_event: Callable[[Event, int], None],
    ) -> None:
        self.options, self.transport, self.parameters = options, transport, parameters
        self.shards = shards
        self.plan: UnitPlan | None = None
        self.is_complete = False
        self._kinds_of_fp32: set[str] = set()  # of devices; until it was said what autocast does
        self.sharding = Sharding(parameters, transport)
        if shards:
            raise_event = checked(self.sharding, raise_event)
        self.hooks = ModuleHooks(raise_event, self.sharding.is_pinned, self.sharding.is_part)
        self.state = ModuleState(
            parameters,
            transport,
            self.sharding.holds,
            self.sharding.free,
            self.sharding.is_pinned,
        )
        self.frozen_layout = plan_layout(
            (), world_size=transport.world_size, bucket_nbytes=options.bucket_nbytes
        )

    def use_units(self, model: nn.Module) -> None:
        """Find the units, before any parameter is attached."""
        self.plan = plan_units(model, self.options.units)
        self.sharding.add_units(self.plan.modules, self.plan.lookups)

    def look_at_autocast(self) -> None:
        """Warn, once, where autocast undoes what freeing the parameters saves."""
        kinds = self._kinds_of_fp32
        if kinds and torch.is_grad_enabled() and any(map(torch.is_autocast_enabled, kinds)):
            self._kinds_of_fp32 = set()
            warnings.warn(
                "autocast saves a whole 16-bit copy of every fp32 weight for backward, so the "
                "parameters of all units are held at once, though stage 3 frees them: train 16-bit "
                "parameters instead, precision=zeroshard.Precision(param_dtype=torch.bfloat16)",
                stacklevel=2,
            )

    @property
    def unit_modules(self) -> Collection[nn.Module]:
        """The modules whose boundaries are those of units."""
        return () if self.plan is None else self.plan.modules.values()

    def unit_of(self, name: str, parameter: nn.Parameter) -> str:
        """The unit that a parameter belongs to.

        Raises:
            ConfigError: it is in no module.
        """
        if self.plan is None:
            return ""
        if parameter not in self.plan.unit_of:
            raise ConfigError(
                f"stage 3 gathers parameters at the boundaries of modules, and {name!r} is in none "
                "of the model's: pass the module that holds every parameter, complete, as model="
            )
        if parameter.numel() == 1 or parameter in self.plan.read_outside:
            return KEPT_WHOLE
        return self.plan.unit_of[parameter]

    def build_arena(
        self,
        plan: ArenaPlan,
        fmt: Format,
        layout: Layout,
        by_slot: Mapping[int, nn.Parameter],
    ) -> Arena:
        """Memory for an arena with the values of its parameters, which are its views from now on.

        Where parameters are sharded, only one unit is whole at a time.
        """
        sharded = self.shards and plan.unit != KEPT_WHOLE
        arena = Arena(plan, self.transport.world_size, self.transport.rank, sharded=sharded)
        self.parameters.inherit(by_slot[slot.index] for slot in plan.slots)
        without_values = self.parameters.without_values
        if sharded and all(by_slot[slot.index] in without_values for slot in plan.slots):
            start_without_values(arena, fmt, layout)
        else:
            fill_arena(arena, fmt, by_slot, self.transport, self.options, without_values)
        places = self.parameters.attach(arena, layout, by_slot)
        if sharded:
            self.sharding.adopt(arena, places, is_frozen=fmt is FROZEN)
        return arena

    def shard_frozen(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Shard parameters that are not trained: they have neither gradients nor state."""
        specs = [
            describe_parameter(name, parameter, parameter.dtype, self.unit_of(name, parameter))
            for name, parameter in named
        ]
        self.frozen_layout = self.frozen_layout.extend(specs)
        by_slot = {index: parameter for index, (_, parameter) in enumerate(named)}
        for plan in self.frozen_layout.arenas:
            self.build_arena(plan, FROZEN, self.frozen_layout, by_slot)
        self.parameters.find_owners()

    def complete(self) -> None:
        """Hook the modules and free every unit: the end of construction."""
        if self.plan is None:
            return
        index = {name: number for number, name in enumerate(self.plan.modules)}
        self.state.attach_root(self.plan.modules[ROOT])
        self.hooks.lookups = {index[name] for name in self.plan.lookups}
        for name, module in self.plan.modules.items():
            self.hooks.attach(module, index[name], is_boundary=True)
        for module, name in self.plan.owners:
            if any(self._is_sharded(parameter) for parameter in module._parameters.values()):
                self.state.attach(module, index[name])
                if module is not self.plan.modules[name]:
                    self.hooks.attach(module, index[name], is_boundary=False)
        self.is_complete = True
        arenas = [arena for unit in self.sharding.units for arena, _ in unit.arenas]
        self._kinds_of_fp32 = {a.device.type for a in arenas if a.plan.dtype == "float32"}
        self.sharding.reshard_all()

    def detach(self) -> None:
        """Remove every hook and make every parameter whole for good; all ranks have to call it."""
        self.hooks.detach()
        self.state.detach()
        self.sharding.unshard_all()

    def _is_sharded(self, parameter: nn.Parameter | None) -> bool:
        place = None if parameter is None else self.parameters.places.get(parameter)
        return place is not None and place.arena.shard is not None
