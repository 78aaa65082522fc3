"""The moments of a step that can be its peak, and what a rank holds at each. No tensors.

Forward only adds, so its end counts; backward is looked at where it enters a unit, within it, and
where it leaves it, since activations go while gradients come.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..layout import ITEMSIZE
from ..schedule import Action, Event
from ..units import ROOT
from .activations import Activations
from .reductions import Group, Held
from .schema import Peak
from .states import States

__all__ = ["CHECKPOINTING", "after_forward", "moments_of"]

CHECKPOINTING = ("none", "block")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of a planned model.

    Attributes:
        states: what it holds of parameters, gradients and state.
        activations: of its batch; None where they are not known.
        checkpoints: whether blocks are recomputed in backward.
    """

    states: States
    activations: Activations | None
    checkpoints: bool

    # --- activations

    @property
    def blocks(self) -> int:
        """How many blocks the model has."""
        architecture = self.states.planned.shape.architecture
        return architecture.layers if architecture is not None else 0

    def kept(self, blocks: int) -> int:
        """Bytes that forward left and backward has not come to, with so many blocks to go."""
        a = self.activations
        if a is None:
            return 0
        around = a.around - a.head_input
        if self.checkpoints:
            return around + a.around_checkpointed + blocks * a.block_input
        return around + blocks * a.block

    # --- units of stage 3

    def whole(self, *units: str) -> int:
        """Bytes of units that are whole: the root one, and these."""
        nbytes = self.states.unit_nbytes
        return sum(nbytes.get(unit, 0) for unit in {ROOT, *units})

    @property
    def frees_units(self) -> bool:
        """Whether a unit is freed between its forward and its backward."""
        return Action.IDLE in self.states.schedule.actions(Event.POST_FORWARD)

    def whole_after_forward(self) -> int:
        """Bytes of units when forward has returned."""
        if self.frees_units:
            return self.whole(self.states.last_unit)
        return self.whole(*self.states.unit_nbytes)

    def whole_in(self, unit: str, to_come: list[str]) -> int:
        """Bytes of units in the backward of one: itself, and the one that is gathered ahead."""
        lookups = self.states.planned.shape.lookups
        used = [] if unit in lookups else [unit]
        if not self.frees_units:
            return self.whole(*used, *to_come)
        ahead = [other for other in to_come if other != ROOT and other not in lookups]
        return self.whole(*used, *ahead[:1])


def after_forward(step: Step) -> dict[str, int]:
    """What is held when forward has returned, from the second step on."""
    a, held = step.activations, _before(step)
    held["unsharded_parameters"] = step.whole_after_forward()
    if a is not None:
        held |= {
            "inputs": a.inputs,
            "activations": step.kept(step.blocks) + a.last_output,
            "logits_and_loss": a.head_input - a.last_output + a.loss_kept,
        }
    return {name: nbytes for name, nbytes in held.items() if nbytes}


def moments_of(step: Step) -> Iterator[Peak]:
    """What is held at each moment that can be the peak, from the second step on."""
    a = step.activations
    before, whole = _before(step), step.whole_after_forward()
    if a is not None:
        everything = {"activations": step.kept(step.blocks) + a.last_output}
        for phase, loss in (("forward", a.loss_forward), ("backward", a.loss_backward)):
            yield _moment(
                phase,
                "the loss",
                before,
                {**everything, "logits_and_loss": a.head_input - a.last_output + loss},
                whole,
                a.inputs,
            )
    yield from _backward(step)
    yield _step(step)


def _before(step: Step) -> dict[str, int]:
    """What a forward finds: states, and what the step before left."""
    points = step.states.points
    return dict(points["after_zero_grad"])


def _moment(
    phase: str,
    where: str,
    base: dict[str, int],
    added: dict[str, int],
    whole: int,
    inputs: int,
) -> Peak:
    held = {**base, **added, "unsharded_parameters": whole, "inputs": inputs}
    categories = {name: nbytes for name, nbytes in held.items() if nbytes}
    return Peak(of="requested", step=None, phase=phase, where=where, categories=categories)


def _gradients(held: Held) -> dict[str, int]:
    return {"gradients": held.full + held.shards, "communication": held.communication}


def _backward(step: Step) -> Iterator[Peak]:
    """Backward, unit by unit."""
    groups, last, _ = step.states.backward
    base = step.states.resident
    a = step.activations
    inputs = a.inputs if a is not None else 0
    blocks = step.blocks
    shared = _shared_gradient(step)
    for number, group in enumerate(groups):
        to_come = [other.unit for other in groups[number + 1 :]]
        whole = step.whole_in(group.unit, to_come)
        ends = group is groups[-1]
        for name, held, temporary, left in _within(step, group, blocks, shared, ends=ends):
            made = {"temporary": temporary, **left}
            yield _moment("backward", name, base, {**made, **_gradients(held)}, whole, inputs)
        blocks -= _is_block(step, group.unit)
    whole = step.whole_in(groups[-1].unit, []) if groups else step.whole()
    yield _moment("backward", "the end", base, _gradients(last), whole, inputs)


def _within(
    step: Step, group: Group, blocks: int, shared: int, *, ends: bool
) -> Iterator[tuple[str, Held, int, dict[str, int]]]:
    """(where, gradients, temporary, activations) in the backward of one unit.

    Args:
        step: what is planned.
        group: the unit's turn.
        blocks: how many blocks backward has not left.
        shared: bytes of the head's gradient, if it waits for that of the embedding.
        ends: whether this is the last turn, in which the embedding gets its gradient.
    """
    a = step.activations
    name = group.unit or "the root unit"
    entered, settled, most = (
        replace(held, full=held.full + shared)
        for held in (group.entered, group.settled, group.most)
    )
    if _is_block(step, group.unit) and a is not None:
        kept = step.kept(blocks)
        recomputed = a.recomputed if step.checkpoints else 0
        first = replace(group.first, full=group.first.full + shared)
        # The whole block is there where its backward begins, and its input's gradient at its end.
        yield name, entered, a.gradient, {"activations": kept}
        yield name, settled, a.behind, {"activations": kept + recomputed}
        yield name, first, a.working, {"activations": kept + recomputed}
        yield name, first, a.norm_working, {"activations": kept + recomputed - a.norm_gone}
        for gone, working in (
            (a.experts_gone, a.experts_working),
            (a.scores_gone, a.scores_working),
        ):
            if gone:
                yield name, most, working, {"activations": kept + recomputed - gone}
        yield name, most, 2 * a.gradient, {"activations": step.kept(blocks - 1)}
        return
    if blocks and a is not None:
        left = {
            "activations": step.kept(blocks) + a.last_output,
            "logits_and_loss": a.head_input - a.last_output,
        }
        # In the last norm, no gradient waits beside, and its two results are freed.
        last_norm = max(a.norm_working - 3 * a.gradient, a.gradient)
        yield name, entered, a.gradient, left
        yield name, settled, last_norm, left
        yield name, most, a.logits_gradient + a.gradient, left
        return
    gradient = a.gradient if a is not None else 0
    rest = {"activations": step.kept(0)}
    yield name, entered, gradient, rest
    if ends and shared:
        # Autograd adds the embedding's gradient to the waiting one, out of place.
        both = replace(settled, full=settled.full + 2 * shared)
        yield "the sum of a shared weight's gradients", both, gradient, rest
    yield name, group.most if ends else most, gradient, rest


def _is_block(step: Step, unit: str) -> bool:
    architecture = step.states.planned.shape.architecture
    return architecture is not None and unit.startswith(f"{architecture.block_prefix}.")


def _shared_gradient(step: Step) -> int:
    """Bytes of the gradient of a head that is the embedding, which waits for the embedding's."""
    architecture = step.states.planned.shape.architecture
    if architecture is None or not architecture.tied:
        return 0
    slot = step.states.layout.slots[0]
    return slot.numel * ITEMSIZE[slot.spec.dtype]


def _step(step: Step) -> Peak:
    """The update: states and gradients, and without a process group fp32 copies of these."""
    states = step.states
    held = dict(states.points["after_backward"])
    if not states.planned.process_group:
        held["gradients"] += states.gradient_shards
    inputs = step.activations.inputs if step.activations is not None else 0
    return _moment("step", "", held, {}, 0, inputs)
