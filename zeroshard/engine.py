"""Executes the schedule's table over gradients, updates and parameters. Reads no stage.

One engine serves one optimizer; autograd's hooks keep it alive as long as the parameters live.
"""

import itertools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .clipping import SkipCounter, agree_on_flag, check_finite, clip_coefficient
from .config import Options
from .construction import compare_ranks, plan_parameters, wires_of
from .errors import ConfigError
from .formats import Format
from .gradients import Gradients
from .kernel_update import SlotScalars, first_blocks
from .layout import Layout, plan_layout
from .masters import Masters
from .param_groups import not_trained_yet
from .parameters import Parameters
from .schedule import Action, Event, compile_schedule
from .sharded_model import ShardedModel
from .step_plan import StepPlan
from .storage import Arena, BufferPool
from .tracing import traced
from .transport import Op, Pending, Transport
from .update import StepCounters, Updater, new_updaters
from .waiting import Waiting
from .wrappers import check_nothing_is_lost

__all__ = ["Engine", "engines_of"]

CAN_TRAIN = "which parameters they can train"
_engines: "weakref.WeakSet[Engine]" = weakref.WeakSet()
_numbers = itertools.count()


def engines_of(parameters: Iterable[nn.Parameter]) -> "list[Engine]":
    """The live engines that own any of `parameters`, in the order in which they were made."""
    wanted = set(parameters)
    found = [engine for engine in _engines if not wanted.isdisjoint(engine.parameters.places)]
    return sorted(found, key=lambda engine: engine.number)


def newest_engine() -> "Engine | None":
    """The live engine that was made last."""
    return max(_engines, key=lambda engine: engine.number, default=None)


class Engine:
    """One optimizer's part of all stages on one rank.

    Args:
        options: the user's choices.
        transport: the wire.
    """

    def __init__(self, options: Options, transport: Transport) -> None:
        self.number = next(_numbers)
        self.options, self.transport = options, transport
        self.schedule = compile_schedule(options)
        self.pool = BufferPool(spare=self.schedule.spares_buffers)
        transport.buffers = self.pool
        self.layout = plan_layout(
            (), world_size=transport.world_size, bucket_nbytes=options.bucket_nbytes
        )
        self.arenas: list[Arena] = []
        self.formats: list[Format] = []
        self.updaters: list[Updater] = []
        self.slot_of: dict[nn.Parameter, int] = {}
        self.counters = StepCounters()
        self.scalars = SlotScalars(0, torch.device("cpu"))
        self.plan = StepPlan()
        self._coefficient: Tensor | None = None
        self.parameters = Parameters(transport.rank)
        self.masters = Masters(self.parameters, transport)
        # Without a process group there is nobody to share parameters with.
        self.shards_parameters = self.schedule.shards_parameters and transport.distributed
        self.sharded = ShardedModel(
            options, transport, self.parameters, self.shards_parameters, self._at_module
        )
        self.sharding, self.modules = self.sharded.sharding, self.sharded.hooks
        self.sharded.state.on_loaded = self.masters.weights_loaded
        mean = options.reduction == "mean"
        self.gradients = Gradients(
            transport=transport,
            pool=self.pool,
            scale=1 / transport.num_ranks if mean else 1.0,
            on_ready=lambda bucket: self._execute(Event.GRAD_READY, bucket),
            on_end=lambda: self._execute(Event.BACKWARD_END),
            on_begin=self._backward_begins,
            on_closed=self.adopt_unfrozen,
            launches_by_unit=self.schedule.launches_by_unit,
        )
        self.groups: Callable[[], Sequence[dict[str, Any]]] = tuple  # the optimizer's, as of now
        self._idle_steps = 0  # since anything was trained
        self.model: Callable[[], nn.Module | None] = lambda: None  # where it is known, for names
        self.on_backward: Callable[[], object] = _nothing  # one that synchronises begins
        self.on_added: Callable[[Sequence[nn.Parameter]], None] = _nothing
        self.on_close: Callable[[Engine], None] = _nothing
        self.step_count = 0
        self.waiting = Waiting()
        self.is_closed = False
        self.cannot_step = ""  # why, while that is so
        self.gathers: list[Pending] = []
        self.skips = SkipCounter()

    # --- construction

    def add(self, named: Sequence[tuple[str, nn.Parameter]], description: dict[str, str]) -> None:
        """Take over parameters: at construction, or later those of a new param group.

        Args:
            named: trainable parameters in forward order.
            description: what else must be the same on every rank.

        Raises:
            ConfigError: the ranks differ, or a parameter cannot be trained.
        """
        for other in engines_of(parameter for _, parameter in named):
            if other.shards_parameters:  # before anything looks at placeholders
                other.give_up([parameter for _, parameter in named])
        try:
            layout, formats = plan_parameters(
                named, self.layout, self.options.precision, self.sharded.unit_of
            )
        except ConfigError as error:  # the other ranks must hear of it too
            compare_ranks({CAN_TRAIN: str(error)}, self.transport)
            raise
        compare_ranks({CAN_TRAIN: "all", **description, **layout.describe()}, self.transport)
        if not named:
            return
        parameters = [parameter for _, parameter in named]
        for other in engines_of(parameters):
            other.give_up(parameters)
        self._attach(layout, formats, parameters)
        _engines.add(self)
        if self.sharded.is_complete:  # they were added later
            self.sharding.reshard_all()

    def give_up(self, parameters: Collection[nn.Parameter]) -> None:
        """Somebody else will train `parameters`: let go of those that are frozen here, or close.

        The newer optimizer takes over, as when a notebook's cell is run again.
        """
        if self.slot_of.keys().isdisjoint(parameters):
            self.sharding.thaw(parameters)
        else:
            self.close()

    def _attach(
        self, layout: Layout, formats: Sequence[Format], parameters: Sequence[nn.Parameter]
    ) -> None:
        by_slot = dict(enumerate(parameters, start=len(self.layout.slots)))
        for plan in layout.arenas[len(self.arenas) :]:
            arena = self.sharded.build_arena(plan, formats[plan.index], layout, by_slot)
            self.arenas.append(arena)
        self.parameters.find_owners()
        self.sharded.state.watch(self.parameters.owning_modules())
        self.layout, self.formats = layout, list(formats)
        self.slot_of.update((parameter, slot) for slot, parameter in by_slot.items())
        self.masters.attach(layout, self.arenas, self.slot_of)
        self.counters.extend(len(layout.slots), self.arenas[0].device)
        self.scalars = SlotScalars(len(layout.slots), self.arenas[0].device)
        first_block = first_blocks(self.param_groups)
        self.updaters = new_updaters(
            self.arenas,
            self.formats,
            layout,
            self.counters,
            self.scalars,
            [first_block.get(parameter, 0) for parameter in self.slot_of],
            gathers=self.transport.distributed,
        )
        self.plan.attach(layout, self.arenas, self.updaters, self.slot_of, self.scalars)
        wires = [wires_of(arena.plan.dtype, self.options.precision) for arena in self.arenas]
        self.gradients.attach(layout, self.arenas, parameters, wires)

    def _backward_begins(self) -> None:
        self.waiting.reduced()
        self.on_backward()
        self.parameters.check_kinds()

    def backward_without_gradients(self) -> None:
        """Take part in a backward of the other ranks that reduces."""
        self.gradients.begin(None)
        self.gradients.close()
        self.adopt_unfrozen()

    def adopt_unfrozen(self) -> None:
        """Take over parameters of our groups that were frozen until now."""
        unfrozen = not_trained_yet(self.param_groups, self.slot_of, self.model())
        if not unfrozen:
            return
        newer = [other for other in _engines if other.number > self.number]  # who took them over
        unfrozen = [u for u in unfrozen if all(u[1] not in other.slot_of for other in newer)]
        if not unfrozen:
            return
        first = len(self.slot_of)
        self.add(unfrozen, {"parameters unfrozen since": str(len(unfrozen))})
        self.on_added([parameter for _, parameter in unfrozen])
        if self.transport.distributed and not self.gradients.ddp_owns_gradients():
            self.gradients.reduce_local(range(first, len(self.slot_of)))

    @property
    def param_groups(self) -> Sequence[dict[str, Any]]:
        """torch's param groups, which anybody may replace."""
        return self.groups()

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.counters.counts.device

    # --- the schedule

    def _execute(self, event: Event, index: int = -1) -> None:
        """Do what the table says; `index` is of the bucket or the unit."""
        for action in self.schedule.actions(event):
            ACTIONS[action](self, index)

    def _at_module(self, event: Event, unit: int) -> None:
        self.sharded.look_at_autocast()
        if event is Event.PRE_BACKWARD:
            self.gradients.come_to_unit(again=self.modules.walk.was_done(unit))
        with torch.no_grad() if torch.is_grad_enabled() else nullcontext():  # the dearer one
            self._execute(event, unit)

    def _reshard_all(self, _: int) -> None:
        self.sharding.reshard_all(self.modules.backward_ended())

    def _reduce(self, bucket: int) -> None:
        with traced("zeroshard::reduce"):
            self.gradients.reduce(bucket)

    def _drain(self, bucket: int) -> None:
        self._reduced(self.gradients.reducer.drain(self.schedule.in_flight))

    def _launch(self, unit: int) -> None:
        self.gradients.launch(
            bucket.index
            for arena, _ in self.sharding.units[unit].arenas
            for bucket in arena.plan.buckets
            if arena in self.arenas
        )

    def _free_gradients(self, _: int) -> None:
        self.gradients.shards.free_unused(self.gradients.parameters)
        self._forget_gradients()

    def _forget_gradients(self) -> None:
        for updater in self.updaters:
            updater.forget_gradients()

    def _wait(self, bucket: int) -> None:
        self._reduced(self.gradients.reducer.drain(0))
        gathers, self.gathers = self.gathers, []
        for pending in gathers:
            pending.wait()

    def _reduced(self, buckets: Iterable[int]) -> None:
        for bucket in buckets:
            self._execute(Event.REDUCED, bucket)

    def _release(self, bucket: int) -> None:
        self.pool.release()

    def _gather(self, bucket: int) -> None:
        with traced("zeroshard::gather"):
            arena = self.arenas[self.layout.buckets[bucket].arena]
            if arena.is_whole:
                op = Op("gather", bucket=bucket, round=self.step_count, unit=arena.plan.unit)
                shard = arena.parameter_shard(bucket)
                self.gathers.append(self.transport.gather(arena.bucket(bucket), shard, op=op))

    def _update(self, _: int) -> None:
        """Update every bucket that has a gradient; gathers start while the next ones update."""
        for arena, buckets in self.plan.work:
            with traced("zeroshard::update"):
                self.updaters[arena].update(
                    buckets, self.param_groups, self._found_inf, self._coefficient
                )
            for bucket in buckets:
                self._execute(Event.UPDATED, bucket)

    # --- a step

    @torch.no_grad()
    def step(self) -> None:
        """One AdamW update of everything that has a gradient."""
        self.check_can_step("step")
        self.gradients.close()
        self.adopt_unfrozen()
        self.masters.look_at_writes()
        self.masters.forget_loaded()
        used, flags_are_valid = self.gradients.collect()
        used = self.plan.in_groups(used, self.param_groups)
        if not used:
            self._idle_steps += 1
            if self._idle_steps & (self._idle_steps - 1) == 0:  # rarely: it looks at all that lives
                trained = {p for engine in _engines for p in engine.parameters.places}
                check_nothing_is_lost(self.slot_of, trained, self.model())
            return
        self._idle_steps = 0
        self.parameters.check_values(self.gradients.parameters[slot] for slot in used)
        self.step_count += 1
        self._clip(used)
        self._found_inf = self._agree_to_skip(flags_are_valid)
        self.counters.advance(used, self._found_inf)
        self.plan.renew(used, self.param_groups, scalars=self._reads_scalars)
        if self._reads_scalars:
            self.scalars.refresh(self.param_groups, self.counters.counts, self._found_inf)
        self._execute(Event.STEP)
        self.parameters.mark_written_by_us([self.gradients.parameters[slot] for slot in used])
        self.waiting.used(self.gradients.given)
        if not self.transport.distributed or self.gradients.ddp_owns_gradients():
            self.gradients.free_copies()
            self._forget_gradients()

    def check_can_step(self, what: str) -> None:
        """Raise if the parameters are not the weights that are trained."""
        if self.cannot_step:
            raise ConfigError(f"{what} is not possible now: {self.cannot_step}")

    @property
    def _reads_scalars(self) -> bool:
        return any(updater.takes_coefficient for updater in self.updaters)

    def _clip(self, used: Sequence[int]) -> None:
        self._coefficient = None
        if self.options.max_grad_norm is None:
            return
        norm = self.grad_norm(used, 2.0)
        if all(updater.takes_coefficient for updater in self.updaters):
            self._coefficient = clip_coefficient(norm, self.options.max_grad_norm).reshape(1)
        else:
            self.scale_gradients(norm, self.options.max_grad_norm)

    def grad_norm(self, used: Sequence[int], p: float) -> Tensor:
        """[] fp32: the global p-norm of the gradients of `used`."""
        with_gradient = set(used)
        parameters = itertools.chain.from_iterable(group["params"] for group in self.param_groups)
        # The order of the param groups, unlike that of slots, is the same in every stage.
        slots = [self.slot_of[parameter] for parameter in parameters if parameter in self.slot_of]
        ordered = [slot for slot in slots if slot in with_gradient]
        return self.gradients.shards.norms.total(ordered, p)

    def scale_gradients(self, norm: Tensor, max_norm: float) -> None:
        """Clip: scale the gradient shards, whose global norm is `norm`, to at most `max_norm`."""
        self.gradients.scale(clip_coefficient(norm, max_norm))

    def _agree_to_skip(self, flags_are_valid: bool) -> Tensor | None:
        """[1] fp32, 1 where any rank found an Inf or a NaN; None if such steps are not skipped."""
        if not self.options.skip_nonfinite:
            return None
        if flags_are_valid:
            found = self.gradients.reducer.flags.sum().clamp(max=1).reshape(1)
        else:
            known = self.gradients.shards.norms.flag()
            found = check_finite(self.arenas) if known is None else known
        agree_on_flag(found, self.transport, self.step_count)
        self.skips.add(found)
        return found

    # --- what else the optimizer offers

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Give every rank the first rank's values of tensors that are not ours."""
        for tensor in tensors:
            if tensor.untyped_storage().nbytes() and tensor not in self.parameters.places:
                whole = tensor.data.contiguous()
                self.transport.broadcast(whole, op=Op("initial buffers")).wait()
                tensor.data.copy_(whole)

    @contextmanager
    def gathered(self, parameters: Collection[nn.Parameter]) -> Iterator[None]:
        """Keep the units of `parameters` whole for as long as the context lasts."""
        pinned = []
        try:
            with torch.no_grad():
                for unit in self.sharding.units_of(parameters):
                    self.sharding.pin(unit)
                    pinned.append(unit)
            yield
        finally:
            with torch.no_grad():
                for unit in pinned:
                    self.sharding.unpin(unit, is_needed=unit.index in self.modules.needed())

    def zero_grad(self) -> None:
        """Every `p.grad` was dropped, or zeroed."""
        self._execute(Event.ZERO_GRAD)

    def abandon(self) -> None:
        """End what an error left under way: reductions, gathers, units that are whole."""
        self.gradients.abandon()
        self.gradients.drop_set_aside()
        if self.modules.needed() and torch._C._current_graph_task_id() == -1:
            self.modules.forget()
            self.sharding.reshard_all()

    def close(self) -> None:
        """Remove every hook and give back plain, whole parameters; every rank has to call it."""
        self.is_closed = True
        _engines.discard(self)
        self.gradients.abandon()
        self.gradients.detach()
        self.sharded.detach()
        self.parameters.release(self.parameters.places)
        self.slot_of.clear()
        self.arenas.clear()
        self.updaters.clear()
        self.pool.release()
        self.on_close(self)
        self.on_added = self.on_close = _nothing


ACTIONS: dict[Action, Callable[[Engine, int], None]] = {
    Action.REDUCE: Engine._reduce,
    Action.DRAIN: Engine._drain,
    Action.LAUNCH: Engine._launch,
    Action.DRAIN_OTHERS: lambda e, bucket: e._reduced(e.gradients.reducer.drain_others(bucket)),
    Action.FREE_GRADIENTS: Engine._free_gradients,
    Action.WAIT: Engine._wait,
    Action.RELEASE: Engine._release,
    Action.UPDATE: Engine._update,
    Action.GATHER: Engine._gather,
    Action.UNSHARD: lambda engine, unit: engine.sharding.enter(unit),
    Action.PREFETCH: lambda engine, _: engine.sharding.prefetch(),
    Action.IDLE: lambda engine, unit: engine.sharding.leave(unit),
    Action.RESHARD: lambda engine, unit: engine.sharding.reshard(engine.sharding.units[unit]),
    Action.RESHARD_ALL: Engine._reshard_all,
}


def _nothing(*_: Any) -> None:
    pass
