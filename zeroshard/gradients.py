"""Gradient -> bucket -> reduce-scatter -> shard: from autograd's hooks to `p.grad`.

Decides when a bucket is complete and what belongs into it; the schedule decides what follows.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .autograd_hooks import AutogradHooks
from .backward import Backward, unreached
from .errors import GradientError
from .gradient_shards import GradientShards
from .layout import Layout, plan_layout
from .ownership import tell
from .reduction import Reducer
from .shard_tensor import ShardTensor
from .storage import Arena, BufferPool, on_device
from .transport import Transport

__all__ = ["Gradients"]


class Gradients:
    """All gradients of one optimizer.

    Args:
        transport: the wire.
        pool: where buffers are borrowed from.
        scale: what sums over the ranks are multiplied by, 1 / ranks for a mean.
        on_begin: called at the first gradient of a backward; may raise.
        on_ready: called with a bucket that is complete and next in order.
        on_end: called when the outermost backward is over and everything was launched.
        launches_by_unit: buckets are launched by `launch`, not when they are complete.
        on_closed: called when every `p.grad` of a backward that synchronises is set.
    """

    def __init__(
        self,
        *,
        transport: Transport,
        pool: BufferPool,
        scale: float,
        on_ready: Callable[[int], None],
        on_end: Callable[[], None],
        on_begin: Callable[[], None],
        on_closed: Callable[[], None],
        launches_by_unit: bool = False,
    ) -> None:
        self.transport = transport
        self.on_begin, self.on_ready = on_begin, on_ready
        self.on_end, self.on_closed = on_end, on_closed
        self.launches_by_unit = launches_by_unit
        self.shards = GradientShards(transport)
        self.reducer = Reducer(transport, pool, self.shards, scale)
        self.hooks = AutogradHooks(self)
        self.parameters: list[nn.Parameter] = []
        self.aside: dict[int, ShardTensor] = {}  # taken out of p.grad while autograd accumulates
        self.taken_out: set[int] = set()  # by the backward under way
        self.unsynced: dict[int, int] = {}  # left local by no_sync() -> version of the gradient
        self.backward: Backward | None = None
        self.given: list[nn.Parameter] = []  # whose gradients the last step took from elsewhere
        self.rounds = 0  # synchronising backwards so far
        self.order: list[int] | None = None  # of launches, agreed after the first backward
        self.synchronise = True
        self.ddp_owns_gradients: Callable[[], bool] = lambda: False
        self._task: int | None = None
        self._flags_are_valid = True
        self._checked_versions: list[int] = []
        self._may_be_late = False
        self.attach(plan_layout((), world_size=transport.world_size), [], [], [])

    def attach(
        self,
        layout: Layout,
        arenas: Sequence[Arena],
        parameters: Sequence[nn.Parameter],
        wires: list[tuple[torch.dtype, torch.dtype]],
    ) -> None:
        """Take over `parameters`, those of slots that `layout` has in addition to the last one.

        Args:
            layout: the whole layout.
            arenas: all arenas.
            parameters: the user's parameters of the new slots, by slot index.
            wires: for each arena the dtype on the wire and that of the sum.
        """
        self.layout = layout
        self.device = arenas[0].device if arenas else torch.device("cpu")
        self.shards.attach(layout, arenas)
        self.reducer.attach(layout, wires)
        self.order = None
        first = len(self.parameters)
        self.parameters.extend(parameters)
        if self.transport.distributed:
            for slot, parameter in enumerate(parameters, start=first):
                self.hooks.attach(slot, parameter)
                if parameter.grad is not None:  # of a backward before we looked
                    self.unsynced[slot] = parameter.grad._version

    def detach(self) -> None:
        """Remove every hook and every slice from the parameters."""
        self.hooks.detach()
        self.aside.clear()
        for parameter in self.parameters:
            if isinstance(parameter.grad, ShardTensor):
                parameter.grad = None
            if parameter.grad is None and parameter.dtype != torch.float32:
                parameter.grad_dtype = parameter.dtype
        self.parameters.clear()
        self.shards.detach()

    # --- what autograd tells

    def before_accumulation(self, slot: int) -> None:
        """Make room in `p.grad` for this rank's own gradient."""
        if self.ddp_owns_gradients():
            return
        parameter = self.parameters[slot]
        grad = parameter.grad
        if grad is None and not self.aside and not self.unsynced:
            return  # as after every zero_grad()
        if self.aside or isinstance(grad, ShardTensor):
            self.hooks.call_at_end()
            grad = parameter.grad
        if isinstance(grad, ShardTensor):
            self.aside[slot] = grad
            self.taken_out.add(slot)
            parameter.grad = None
        elif not (self.backward and slot in self.backward.arrived):
            self._notice_zero_grad(slot, grad)

    def _notice_zero_grad(self, slot: int, grad: Tensor | None) -> None:
        """Forget what was set aside if somebody dropped or zeroed `p.grad` since."""
        if grad is None:
            self.unsynced.pop(slot, None)
            self.aside.pop(slot, None)
        elif slot in self.aside and grad._version != self.unsynced.get(slot) and not grad.any():
            self.aside.pop(slot)

    def accumulated(self, slot: int) -> None:
        """A gradient of this rank is in `p.grad`: take it, and launch what is complete."""
        if self.ddp_owns_gradients():
            return
        grad = self.parameters[slot].grad
        assert grad is not None
        if grad.layout != torch.strided:
            raise GradientError(
                "AdamW does not support sparse gradients: build the embedding with sparse=False"
            )
        if not self.synchronise:
            self.unsynced[slot] = grad._version
            return
        self.hooks.call_at_end()
        backward = self.backward or self.begin(self._task)
        arena = self.shards.arena_of(slot)
        if not (arena.is_whole or arena.is_reached):
            raise GradientError(unreached(self.layout.slots[slot].spec))
        self._take(slot, backward)
        if self.launches_by_unit:
            return
        while backward.waiting and backward.missing[backward.waiting[0]] == 0:
            self.on_ready(backward.waiting.popleft())

    def come_to_unit(self, *, again: bool) -> None:
        """Backward has come to a unit: if it will accumulate gradients, it has begun.

        Even where this rank has no gradient yet, others may launch a reduction before the next.

        Args:
            again: after its buckets were launched, so that gradients may come too late for these.
        """
        self.hooks.call_at_end()
        self._may_be_late |= again
        if self.synchronise and self.backward is None and self.hooks.will_accumulate():
            self.begin(self._task)

    def launch(self, buckets: Iterable[int]) -> None:
        """Launch those of the buckets that were not, with zeros for what has no gradient."""
        backward = self.backward
        for bucket in buckets:
            if backward is not None and bucket in backward.waiting:
                self._take_local(self.layout.slots_of_bucket[bucket], backward)
                backward.waiting.remove(bucket)
                self.on_ready(bucket)

    def backward_goes_on(self, task: int) -> None:
        """The outermost graph task is `task`: end what an exception cut short in another one."""
        if self.backward is not None and self.backward.task not in (None, task):
            self.abandon()
        if self.backward is not None:
            self.backward.task = task
        if task != self._task:
            self._put_back()
        self._task = task

    def backward_ended(self) -> None:
        """The outermost backward is over: set every `p.grad`."""
        self._task = None
        self._put_back()
        if not self.close():
            self.on_end()
        if self.synchronise:
            self.on_closed()

    def _put_back(self) -> None:
        """Give `p.grad` back where nothing was accumulated: by torch.autograd.grad, or an error."""
        arrived = self.backward.arrived if self.backward is not None else {}
        for slot in self.taken_out:
            if slot in self.aside and slot not in arrived and self.parameters[slot].grad is None:
                self.parameters[slot].grad = self.aside.pop(slot)
        self.taken_out.clear()

    # --- a backward, from its first gradient to its end

    def begin(self, task: int | None) -> Backward:
        """A backward that synchronises has begun, in graph task `task`."""
        self.on_begin()
        if self._checked_versions != self.shards.versions():
            self._flags_are_valid = False
        self.rounds += 1
        order = self.order or range(len(self.layout.buckets))
        self.backward = Backward(self.layout, order, task, self.rounds)
        return self.backward

    def _take(self, slot: int, backward: Backward) -> None:
        """Move a gradient from `p.grad` to the backward under way."""
        parameter = self.parameters[slot]
        grad = parameter.grad
        assert grad is not None
        parameter.grad = None
        self.unsynced.pop(slot, None)
        grad = tell(grad.detach() if grad.requires_grad else grad, "gradients")
        first = slot not in backward.arrived
        held = backward.late if slot in backward.launched else backward.arrived
        if slot in held:
            held[slot].add_(grad)
        else:
            held[slot] = grad
        if first:
            for bucket in self.layout.buckets_of_slot[slot]:
                backward.missing[bucket] -= 1
                if backward.missing[bucket] == 0:
                    backward.ready.append(bucket)

    def _take_local(self, slots: Iterable[int], backward: Backward) -> None:
        """Take what earlier backwards under no_sync() left, and this one added nothing to."""
        for slot in slots:
            if self.is_local(slot):
                self._take(slot, backward)

    def reduce(self, bucket: int) -> None:
        """Launch the reduce-scatter of a bucket with what has arrived of it."""
        backward = self.backward
        assert backward is not None
        slots = self.layout.slots_of_bucket[bucket]
        no_grad = not self.aside and all(self.parameters[slot].grad is None for slot in slots)
        if no_grad and self.shards.is_free(bucket):  # as after every zero_grad()
            self.shards.about_to_fill(slots)
            backward.carries.update(dict.fromkeys(slots, False))
        for slot in slots:
            if slot not in backward.carries:
                backward.carries[slot] = self._prepare(slot, backward)
        fresh = [slot for slot in slots if not backward.carries[slot]]
        add = len(fresh) < len(slots)
        if add:
            self.shards.clear_in_bucket(bucket, fresh)
        else:
            backward.renewed.add(bucket)
        self.reducer.launch(bucket, backward.arrived, add=add, round_number=backward.round)
        for slot in slots:
            backward.unlaunched[slot] -= 1
            backward.launched.add(slot)
            if slot in backward.arrived and backward.unlaunched[slot] == 0:
                backward.arrived[slot] = _SENT  # the reduction holds what it still needs

    def _prepare(self, slot: int, backward: Backward) -> bool:
        """Ready the slot's shard for a reduction; whether that adds to an earlier gradient."""
        earlier = self.aside.get(slot) if slot in backward.arrived else self.parameters[slot].grad
        if not isinstance(earlier, ShardTensor):
            self.shards.about_to_change(slot)
            return False
        if not self.shards.shows(slot, earlier):  # the user's own, as after p.grad = p.grad * 0.5
            self.shards.write(slot, earlier._local_tensor)
        return True

    def close(self) -> bool:
        """Launch what is left of the backward under way, wait, and set every `p.grad`.

        Returns:
            Whether there was one that synchronises.
        """
        self._put_back()
        backward = self.backward
        if backward is None:
            return False
        if backward.is_whole:
            self._take_local(list(self.unsynced), backward)
        try:
            # Every bucket goes on the wire, also one without a gradient here: another rank may have
            # launched it, and wait for it before it says anything else.
            for bucket in backward.waiting:
                self.on_ready(bucket)
            may_be_late = self.hooks.saw_nested or self._may_be_late
            used, late = backward.agree_on_use(self.transport, self.device, may_be_late)
            if any(late):
                self._second_round(backward, late)
            self.on_end()
            if self.order is None and backward.is_whole:
                self.order = backward.agree_on_order(self.transport, self.device)
        finally:
            self.backward = None
            self._may_be_late = False
        for slot, is_used in enumerate(used):
            if is_used:
                self.parameters[slot].grad = self.shards.handle(slot)
                self.aside.pop(slot, None)
            elif backward.carries.get(slot) is False:
                self.shards.is_zero(slot)  # the sum of no gradient
        self._renew_flags(backward)
        return True

    def abandon(self) -> None:
        """Finish a backward that an exception cut short, so that no rank waits for this one."""
        self.close()

    def drop_set_aside(self) -> None:
        """What zero_grad() means for gradients that are not in `p.grad` alone."""
        self.aside.clear()
        self.unsynced.clear()

    def reduce_local(self, slots: Sequence[int]) -> None:
        """Reduce gradients that this rank made before their parameters were ours."""
        backward = self.begin(None)
        buckets = {bucket for slot in slots for bucket in self.layout.buckets_of_slot[slot]}
        backward.waiting = deque(bucket for bucket in backward.waiting if bucket in buckets)
        backward.is_whole = False
        for slot in slots:
            if self.parameters[slot].grad is not None:
                self._take(slot, backward)
        self.close()

    def _second_round(self, backward: Backward, late: Sequence[bool]) -> None:
        """Reduce what arrived after its bucket was launched, on top of the first round."""
        backward.arrived = backward.late
        backward.unlaunched = [len(buckets) for buckets in self.layout.buckets_of_slot]
        for bucket, slots in enumerate(self.layout.slots_of_bucket):
            if any(late[slot] for slot in slots):
                backward.carries.update(dict.fromkeys(slots, True))
                self.on_ready(bucket)

    def _renew_flags(self, backward: Backward) -> None:
        """The flags speak for every gradient once each bucket was reduced anew, or is zero."""
        zero = self.shards.zero_buckets()
        if zero:
            self.reducer.flags[on_device(zero, torch.int64, self.device)] = 0
        if len(backward.renewed.union(zero)) == len(self.layout.buckets):
            self._flags_are_valid = True
        self._checked_versions = self.shards.versions()

    # --- the step's side

    def scale(self, coefficient: Tensor) -> None:
        """Multiply all gradients in place by a coefficient of at most 1, finite if they are."""
        unchanged = self._checked_versions == self.shards.versions()
        ranges = []  # and not what lies between them: padding times NaN would be NaN for ever
        for slot, parameter in enumerate(self.parameters):
            grad = parameter.grad
            if isinstance(grad, ShardTensor) and self.shards.shows(slot, grad):
                ranges.append(grad._local_tensor)
            elif grad is not None:
                grad.mul_(coefficient)
                ranges.append(self.shards.local(slot))
        if ranges:
            torch._foreach_mul_(ranges, coefficient)
        if unchanged:  # by anybody else, so the flags are as good as before
            self._checked_versions = self.shards.versions()

    def is_local(self, slot: int) -> bool:
        """Whether `p.grad` is this rank's own, or was made of it: nothing says otherwise."""
        grad = self.parameters[slot].grad
        is_plain = grad is not None and not isinstance(grad, ShardTensor)
        return slot in self.unsynced and is_plain

    def collect(self) -> tuple[list[int], bool]:
        """Bring every `p.grad` into the gradient shards.

        Returns:
            The slots that have a gradient, and whether the reductions' flags still tell if any is
            not finite.

        Raises:
            GradientError: a gradient left local by no_sync(), or of another shape.
        """
        given = {}
        for slot, parameter in enumerate(self.parameters):
            if parameter.grad is not None and not self.shards.shows(slot, parameter.grad):
                given[slot] = self.checked(slot, parameter.grad)
        used = [slot for slot, p in enumerate(self.parameters) if p.grad is not None]
        self.unsynced.clear()
        self.given = [self.parameters[slot] for slot in given]
        changed = bool(given) or self._checked_versions != self.shards.versions()
        for slot, local in given.items():
            self.shards.write(slot, local)
        for slot in set(range(len(self.parameters))).difference(used):
            changed |= self.shards.clear(slot)
        if changed:
            self._flags_are_valid = False
        return used, self._flags_are_valid

    def checked(self, slot: int, grad: Tensor) -> Tensor:
        """This rank's slice of a gradient that the user, DDP or a single process put there."""
        name = self.layout.slots[slot].spec.name
        slices = self.shards.slices[slot]
        if self.is_local(slot) and not self.ddp_owns_gradients():
            raise GradientError(
                f"parameter {name!r} holds a gradient of this rank alone, from a backward under "
                "no_sync(): run the last backward before step() outside of no_sync(), or call "
                "zero_grad() before setting a gradient of your own"
            )
        if grad.layout != torch.strided:
            raise GradientError(f"AdamW does not support sparse gradients, {name!r} has one")
        if isinstance(grad, ShardTensor) and grad.slices.same_as(slices):
            return grad._local_tensor
        if isinstance(grad, ShardTensor) or tuple(grad.shape) != slices.shape:
            raise GradientError(
                f"the gradient of {name!r} must be a whole tensor of shape {slices.shape} or this "
                f"rank's slice of it, got {grad!r:.80}"
            )
        return slices.cut(slices.flatten(grad.detach()), self.transport.rank)

    def free_copies(self) -> None:
        """Free the shards where every `p.grad` is a whole tensor of which they are a copy."""
        if not any(isinstance(parameter.grad, ShardTensor) for parameter in self.parameters):
            self.shards.free()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside leave their gradients on their rank."""
        before, self.synchronise = self.synchronise, False
        try:
            yield
        finally:
            self.synchronise = before


_SENT = torch.empty(0)
