"""What happens when: the stages as a table from event to actions. Pure data, no tensors.

The engine executes this table and nothing else reads the stage. ``python -m zeroshard.schedule``
prints it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from .config import STAGES, Options

__all__ = ["Action", "Event", "Schedule", "compile_schedule"]


class Event(str, Enum):
    """Something that happened, to a bucket, to a unit, or to the whole backward or step."""

    GRAD_READY = "GRAD_READY(bucket)"
    REDUCED = "REDUCED(bucket)"
    BACKWARD_END = "BACKWARD_END"
    STEP = "STEP"
    UPDATED = "UPDATED(bucket)"
    ZERO_GRAD = "ZERO_GRAD"
    PRE_FORWARD = "PRE_FORWARD(unit)"
    POST_FORWARD = "POST_FORWARD(unit)"
    EVALUATED = "EVALUATED"  # the outermost forward is over, and no backward can follow
    PRE_BACKWARD = "PRE_BACKWARD(unit)"
    POST_BACKWARD = "POST_BACKWARD(unit)"
    UNIT_DONE = "UNIT_DONE(unit)"  # backward has come to the next unit: no gradient will follow


class Action(str, Enum):
    """Something the engine does in answer to an event."""

    REDUCE = "reduce"  # launch the bucket's reduce-scatter
    LAUNCH = "launch"  # raise GRAD_READY for the unit's buckets
    DRAIN = "drain"  # wait for reductions until few are in flight
    DRAIN_OTHERS = "drain others"  # wait for reductions of other units than the bucket's
    WAIT = "wait"  # wait for everything in flight
    RELEASE = "release"  # give the communication buffers back to the allocator
    UPDATE = "update"  # AdamW on this rank's shard of the bucket
    GATHER = "gather"  # launch the bucket's all-gather, where its parameters are whole
    UNSHARD = "unshard"  # make the unit's parameters whole
    PREFETCH = "prefetch"  # launch the all-gather of the unit that probably comes next
    FREE_GRADIENTS = "free gradients"  # free the gradient shards that no `p.grad` shows
    IDLE = "idle"  # free the unit (the root excepted) as soon as another one is needed
    RESHARD = "reshard"  # free the unit
    RESHARD_ALL = "reshard all"  # free every unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The compiled table."""

    table: Mapping[Event, tuple[Action, ...]]
    in_flight: int  # reductions that DRAIN leaves under way
    spares_buffers: bool  # gradients arrive in their shard where the transport can do that
    shards_parameters: bool  # parameters are whole only while their unit is used
    launches_by_unit: bool  # GRAD_READY comes with the end of a unit, not with the last gradient

    def actions(self, event: Event) -> tuple[Action, ...]:
        """What to do at `event`, in order."""
        return self.table[event]


def compile_schedule(options: Options) -> Schedule:
    """The table of a stage.

    Stage 1 holds the full gradients and one set of buffers for every bucket until backward ends,
    and keeps the buffers for the next one. Stage 2 lets go of a gradient as soon as its bucket is
    reduced, so that few buckets' worth of full gradients exist at a time. In stage 3 these are the
    buckets of one unit, parameters are whole only around the forward and the backward of their
    unit, and gradient shards exist from backward to zero_grad(). A rank that waits for a reduction
    must know that no other one waits for its next all-gather before it launches that reduction, so
    all ranks launch a unit's buckets where they leave it, with zeros for what has no gradient.
    """
    keeps_buffers = options.stage == 1
    shards_parameters = options.stage == 3
    table: dict[Event, tuple[Action, ...]] = dict.fromkeys(Event, ()) | {
        Event.GRAD_READY: (Action.REDUCE,) if keeps_buffers else (Action.REDUCE, Action.DRAIN),
        Event.BACKWARD_END: (Action.WAIT,) if keeps_buffers else (Action.WAIT, Action.RELEASE),
        Event.STEP: (Action.UPDATE, Action.WAIT),
        Event.UPDATED: (Action.GATHER,),
    }
    if shards_parameters:
        table |= {
            Event.GRAD_READY: (Action.DRAIN_OTHERS, Action.RELEASE, Action.REDUCE),
            Event.ZERO_GRAD: (Action.FREE_GRADIENTS,),
            Event.PRE_FORWARD: (Action.UNSHARD, Action.PREFETCH),
            Event.POST_FORWARD: (Action.IDLE,) if options.reshard_after_forward else (),
            Event.EVALUATED: (Action.RESHARD_ALL,),
            Event.PRE_BACKWARD: (Action.UNSHARD, Action.PREFETCH),
            Event.POST_BACKWARD: (Action.RESHARD,),
            Event.UNIT_DONE: (Action.LAUNCH,),
            Event.BACKWARD_END: (Action.RESHARD_ALL, *table[Event.BACKWARD_END]),
            Event.STEP: (Action.RESHARD_ALL, *table[Event.STEP]),
        }
    return Schedule(
        table=table,
        in_flight=2,
        spares_buffers=not keeps_buffers,
        shards_parameters=shards_parameters,
        launches_by_unit=shards_parameters,
    )


def describe(options: Options) -> str:
    """The table as text, one line an event."""
    schedule = compile_schedule(options)
    rows = [f"stage {options.stage}"]
    for event, actions in schedule.table.items():
        if actions:
            rows.append(f"  {event.value:22} {', '.join(action.value for action in actions)}")
    return "\n".join(rows)


if __name__ == "__main__":
    print("\n".join(describe(Options(stage=stage)) for stage in STAGES))
