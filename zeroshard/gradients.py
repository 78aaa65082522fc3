"""Gradient -> bucket -> reduce-scatter -> shard: from autograd's hooks to `p.grad`.

Decides when a bucket is complete and what belongs into it; the schedule decides what follows.
"""

import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from .clipping import GradientNorms
from .errors import GradientError
from .layout import Layout, Segment
from .shard_tensor import ShardTensor, Slices
from .storage import Arena, BufferPool
from .transport import Op, Part, Pending, Transport

__all__ = ["Backward", "Gradients"]

autograd_engine = torch.autograd.Variable._execution_engine


class Backward:
    """One outermost backward that synchronises, from its first gradient to its end."""

    def __init__(self, layout: Layout, order: Sequence[int]) -> None:
        self.arrived: dict[int, Tensor] = {}  # slot -> this rank's full gradient, until launched
        self.late: dict[int, Tensor] = {}  # the same, when its bucket had been launched already
        self.missing = [len(slots) for slots in layout.slots_of_bucket]
        self.waiting = deque(order)  # buckets to launch, in the order that all ranks keep
        self.ready: list[int] = []  # buckets in the order in which they became complete here
        self.unlaunched = [len(buckets) for buckets in layout.buckets_of_slot]
        self.launched: set[int] = set()  # slots of which a part was launched
        self.carries: dict[int, bool] = {}  # slot -> adds to an earlier gradient
        self.renewed: set[int] = set()  # buckets whose shard was overwritten, not added to
        self.task: int | None = None  # the outermost graph task, once it is known


class Reduction:
    """A bucket's reduce-scatter under way and what has to live until it is over."""

    def __init__(self, bucket: int, pending: Pending, borrowed: list[Tensor]) -> None:
        self.bucket, self.pending, self.borrowed = bucket, pending, borrowed
        self.scratch: Tensor | None = None  # the sum, where it is added to an earlier gradient
        self.out: Tensor | None = None


class Gradients:
    """All gradients of one optimizer.

    Args:
        transport: the wire.
        pool: where buffers are borrowed from.
        scale: what sums over the ranks are multiplied by, 1 / ranks for a mean.
        on_ready: called with a bucket that is complete and next in order.
        on_end: called when a backward is over and everything was launched.
        on_closed: called when every `p.grad` of a backward is set.
    """

    def __init__(
        self,
        *,
        transport: Transport,
        pool: BufferPool,
        scale: float,
        on_ready: Callable[[int], None],
        on_end: Callable[[], None],
        on_closed: Callable[[], None],
    ) -> None:
        self.transport, self.pool, self.scale = transport, pool, scale
        self.on_ready, self.on_end, self.on_closed = on_ready, on_end, on_closed
        self.parameters: list[nn.Parameter] = []
        self.handles: list[
            ShardTensor | None
        ] = []  # what p.grad is set to, reused if nobody has it
        self.slices: list[Slices] = []
        self.aside: dict[int, ShardTensor] = {}  # taken out of p.grad while autograd accumulates
        self.unsynced: dict[int, weakref.ref[Tensor]] = {}  # left local by no_sync()
        self.pending: deque[Reduction] = deque()
        self.backward: Backward | None = None
        self.rounds = 0
        self.order_agreed = False
        self.synchronise = True
        self.ddp_owns_gradients: Callable[[], bool] = lambda: False
        self._hooks: list[Any] = []
        self._task = -1  # the graph task that was looked at last
        self._outer_task: int | None = None
        self._clean: set[int] = set()  # slots whose range of the gradient shard is zero
        self._flags_are_valid = True
        self._versions: list[int] = []  # of the gradient shards when last checked

    # --- set-up

    def attach(
        self,
        layout: Layout,
        arenas: Sequence[Arena],
        parameters: Sequence[nn.Parameter],
        wires: Sequence[tuple[torch.dtype, torch.dtype]],
    ) -> None:
        """Take over `parameters`, those of slots that `layout` has in addition to the last one.

        Args:
            layout: the whole layout.
            arenas: all arenas.
            parameters: the user's parameters of the new slots, by slot index.
            wires: for each arena the dtype on the wire and that of the sum.
        """
        self.layout, self.arenas, self.wires = layout, list(arenas), list(wires)
        self.norms = GradientNorms(layout, arenas, self.transport)
        device = arenas[0].device
        self.flags = torch.zeros(len(layout.buckets), device=device)  # 1: not finite
        self.inv_scale = torch.full((1,), self.scale, device=device)
        self.order = list(range(len(layout.buckets)))
        self.order_agreed = False
        self.handles = [None] * len(layout.slots)  # the present ones know the previous norms
        self._clean.update(range(len(self.parameters), len(layout.slots)))
        self.segments = [
            layout.segments(bucket.index, self.transport.direct_numel) for bucket in layout.buckets
        ]
        for slot in range(len(self.parameters), len(layout.slots)):
            self.slices.append(Slices.of_slot(layout, slot))
        first = len(self.parameters)
        self.parameters.extend(parameters)
        if self.transport.distributed:
            for slot, parameter in enumerate(parameters, start=first):
                self._hook(slot, parameter)
                if parameter.grad is not None:  # of a backward before we looked
                    self.unsynced[slot] = weakref.ref(parameter.grad)

    def reduce_local(self, slots: Sequence[int]) -> None:
        """Reduce gradients that this rank made before its parameters were ours."""
        self.rounds += 1
        self.backward = Backward(self.layout, self.order)
        for slot in slots:
            if self.parameters[slot].grad is not None:
                self._take(slot, self.backward)
        self.close()

    def _hook(self, slot: int, parameter: nn.Parameter) -> None:
        if parameter.dtype != torch.float32:
            parameter.grad_dtype = None  # a 16-bit parameter may have an fp32 gradient
        # The first hook keeps this object alive, the second must not: the garbage collector sees
        # through a tensor's ordinary hooks, but not through those that run after accumulation.
        this = weakref.ref(self)

        def accumulated(_: Tensor) -> None:
            gradients = this()
            if gradients is not None:
                gradients._accumulated(slot)

        self._hooks += [
            parameter.register_hook(partial(self._before_accumulation, slot)),
            parameter.register_post_accumulate_grad_hook(accumulated),
        ]

    def detach(self) -> None:
        """Remove every hook and every slice from the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for parameter in self.parameters:
            if isinstance(parameter.grad, ShardTensor):
                parameter.grad = None
            if self.transport.distributed and parameter.dtype != torch.float32:
                parameter.grad_dtype = parameter.dtype

    # --- autograd's side

    def _before_accumulation(self, slot: int, _: Tensor) -> None:
        """Make room in `p.grad` for this rank's own gradient; also called by autograd.grad."""
        if self.ddp_owns_gradients():
            return
        parameter = self.parameters[slot]
        grad = parameter.grad
        if isinstance(grad, ShardTensor):
            self._call_at_end()
            self.aside[slot] = grad
            parameter.grad = None
        elif grad is None and not (self.backward and slot in self.backward.arrived):
            self.aside.pop(slot, None)  # somebody set p.grad to None since

    def _accumulated(self, slot: int) -> None:
        """A gradient of this rank is in `p.grad`."""
        if self.ddp_owns_gradients():
            return
        parameter = self.parameters[slot]
        grad = parameter.grad
        assert grad is not None
        if grad.layout != torch.strided:
            raise GradientError(
                "AdamW does not support sparse gradients: build the embedding with sparse=False"
            )
        if not self.synchronise:
            self.unsynced[slot] = weakref.ref(grad)
            return
        self._call_at_end()
        if self.backward is None:
            self.rounds += 1
            self.backward = Backward(self.layout, self.order)
            self.backward.task = self._outer_task
        self._take(slot, self.backward)
        self._launch_ready(self.backward)

    def _take(self, slot: int, backward: Backward) -> None:
        """Move a gradient from `p.grad` to the backward under way."""
        parameter = self.parameters[slot]
        grad = parameter.grad
        assert grad is not None
        parameter.grad = None
        self.unsynced.pop(slot, None)
        grad = grad.detach()
        first = slot not in backward.arrived
        if slot in backward.launched:
            held = backward.late.setdefault(slot, grad)
        else:
            held = backward.arrived.setdefault(slot, grad)
        if held is not grad:
            held.add_(grad)
        if first:
            for bucket in self.layout.buckets_of_slot[slot]:
                backward.missing[bucket] -= 1
                if backward.missing[bucket] == 0:
                    backward.ready.append(bucket)

    def _launch_ready(self, backward: Backward) -> None:
        while backward.waiting and backward.missing[backward.waiting[0]] == 0:
            self.on_ready(backward.waiting.popleft())

    def _call_at_end(self) -> None:
        """See to it that `_ended` runs when the outermost backward under way is over.

        Re-entrant activation checkpointing runs a backward inside the backward of a function;
        callbacks queued there fire when the inner one ends. A hook on the outer function's node
        runs in the outer backward and queues it there.
        """
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return
        self._task = task
        node = _outermost_function()
        if node is None:
            self._in_outermost()
        else:
            self._outer_task = None
            node.register_hook(lambda *_: self._in_outermost())

    def _in_outermost(self) -> None:
        task = torch._C._current_graph_task_id()
        if self.backward is not None and self.backward.task not in (None, task):
            self.abandon()  # an exception ended the backward before this one
        if self.backward is not None:
            self.backward.task = task
        self._task = self._outer_task = task
        autograd_engine.queue_callback(self._ended)

    def _ended(self) -> None:
        """The outermost backward is over; may be called more often than once."""
        self._task = -1
        arrived = self.backward.arrived if self.backward is not None else {}
        for slot in [slot for slot in self.aside if slot not in arrived]:
            if self.parameters[slot].grad is None:  # torch.autograd.grad: nothing was accumulated
                self.parameters[slot].grad = self.aside.pop(slot)
        self.close()
        self.on_closed()

    # --- the end of a backward

    def close(self) -> None:
        """Launch what is left of the backward under way, wait, and set every `p.grad`."""
        backward = self.backward
        if backward is None:
            return
        for slot in list(self.unsynced):
            if self._left_local(slot) and slot not in backward.arrived:
                self._take(slot, backward)
        try:
            used, late = self._agree_on_use(backward)
            for bucket in backward.waiting:
                if any(used[slot] for slot in self.layout.slots_of_bucket[bucket]):
                    self.on_ready(bucket)
            if any(late):
                self._second_round(backward, late)
            self.on_end()
            self._agree_on_order(backward)
        finally:
            self.backward = None
        for slot, is_used in enumerate(used):
            if is_used:
                self.aside.pop(slot, None)
                self.parameters[slot].grad = self._handle(slot)
        self._versions = self._current_versions()
        self._renew_flags(backward)

    def _renew_flags(self, backward: Backward) -> None:
        """The flags speak for all gradients again once every bucket was reduced anew, or is zero."""
        clean = [
            bucket
            for bucket, slots in enumerate(self.layout.slots_of_bucket)
            if all(slot in self._clean for slot in slots)
        ]
        self.flags[clean] = 0
        if len(backward.renewed.union(clean)) == len(self.layout.buckets):
            self._flags_are_valid = True

    def _current_versions(self) -> list[int]:
        return [-1 if a.gradients is None else a.gradients._version for a in self.arenas]

    def abandon(self) -> None:
        """Finish a backward that an exception cut short, so that no rank waits, and drop it."""
        if self.backward is not None:
            self.close()
        self._task = -1
        self.aside.clear()

    def _agree_on_use(self, backward: Backward) -> tuple[list[bool], list[bool]]:
        """Which slots any rank has a gradient of, and which any rank has a late one of.

        The host reads the answer only where it must: a rank with all gradients and none late
        knows it.
        """
        slots = range(len(self.parameters))
        mine = [slot in backward.arrived for slot in slots]
        late = [slot in backward.late for slot in slots]
        device = self.arenas[0].device
        bits = torch.tensor([*mine, *late], dtype=torch.uint8, device=device)
        op = Op("use of parameters", round=self.rounds)
        self.transport.all_reduce(bits, "max", op=op).wait()
        if device.type != "cpu" and all(mine) and not any(late):
            return mine, late
        said = [bool(bit) for bit in bits.tolist()]
        return said[: len(slots)], said[len(slots) :]

    def _second_round(self, backward: Backward, late: Sequence[bool]) -> None:
        """Reduce what arrived after its bucket was launched, on top of the first round."""
        backward.arrived = backward.late
        backward.unlaunched = [len(buckets) for buckets in self.layout.buckets_of_slot]
        for bucket, slots in enumerate(self.layout.slots_of_bucket):
            if any(late[slot] for slot in slots):
                backward.carries.update(dict.fromkeys(slots, True))
                self.on_ready(bucket)

    def _agree_on_order(self, backward: Backward) -> None:
        """After the first backward: launch in the order in which the first rank was ready."""
        if self.order_agreed:
            return
        self.order_agreed = True
        ready = dict.fromkeys([*backward.ready, *self.order])
        order = torch.tensor(list(ready), device=self.arenas[0].device)
        self.transport.broadcast(order, op=Op("launch order", round=self.rounds)).wait()
        self.order = order.tolist()

    def _handle(self, slot: int) -> ShardTensor:
        handle = self.handles[slot]
        if handle is None:
            transport = self.transport
            flat = self.local_gradient(slot)
            handle = ShardTensor(flat, self.slices[slot], transport, self.norms.of_slot(slot))
            self.handles[slot] = handle
        return handle

    def local_gradient(self, slot: int) -> Tensor:
        """[slice's numel] fp32: the slot's range of the gradient shard."""
        arena = self.arenas[self.layout.slots[slot].arena]
        start, stop = self.layout.local_range(slot, self.transport.rank)
        return arena.allocate_gradients()[start:stop]

    def let_go(self, slot: int) -> None:
        """Before the slot's memory changes: whoever kept its gradient keeps the values."""
        handle = self.handles[slot]
        if handle is not None and _is_held(self.handles, slot):
            handle._local_tensor = handle._local_tensor.clone()
            handle.siblings = None
            self.handles[slot] = None

    # --- a bucket's reduction

    def reduce(self, bucket: int) -> None:
        """Launch the reduce-scatter of a bucket."""
        backward = self.backward
        assert backward is not None
        plan = self.layout.buckets[bucket]
        arena = self.arenas[plan.arena]
        slots = self.layout.slots_of_bucket[bucket]
        wire, sum_dtype = self.wires[plan.arena]
        for slot in slots:
            self._settle(slot, backward)
        borrowed: list[Tensor] = []
        parts = [
            Part(segment.start, self._pack(segment, bucket, wire, backward, borrowed))
            for segment in self.segments[bucket]
        ]
        for slot in slots:
            backward.unlaunched[slot] -= 1
            if slot in backward.arrived:
                backward.launched.add(slot)
                if backward.unlaunched[slot] == 0:
                    backward.arrived[slot] = _SENT  # the reduction holds what it still needs
        out = arena.allocate_gradients()[plan.shard_offset : plan.shard_offset + plan.shard_numel]
        flag = self.flags[bucket : bucket + 1]
        scratch = None
        if any(backward.carries[slot] for slot in slots):
            self._clear(bucket, [slot for slot in slots if not backward.carries[slot]])
            scratch = self.pool.borrow(out.numel(), out.dtype, out.device)
            scratch.zero_()
        else:
            flag.zero_()
            backward.renewed.add(bucket)
        pending = self.transport.reduce(
            parts,
            out if scratch is None else scratch,
            op=Op("reduce", bucket=bucket, round=self.rounds, unit=arena.plan.unit),
            sum_dtype=sum_dtype,
            finish=partial(_scale_and_check, flag, self.inv_scale),
        )
        reduction = Reduction(bucket, pending, borrowed)
        reduction.scratch, reduction.out = scratch, out
        self.pending.append(reduction)

    def drain(self, at_most: int) -> list[int]:
        """Wait for the oldest reductions until `at_most` are in flight; the buckets that ended."""
        ended = []
        while len(self.pending) > at_most:
            reduction = self.pending.popleft()
            reduction.pending.wait()
            if reduction.scratch is not None and reduction.out is not None:
                reduction.out.add_(reduction.scratch)
                self.pool.give_back(reduction.scratch)
            for buffer in reduction.borrowed:
                self.pool.give_back(buffer)
            ended.append(reduction.bucket)
        return ended

    def _settle(self, slot: int, backward: Backward) -> None:
        """Decide once per backward whether the slot adds to an earlier gradient."""
        if slot in backward.carries:
            return
        earlier = self.aside.get(slot) if slot in backward.arrived else self.parameters[slot].grad
        if not isinstance(earlier, ShardTensor):
            earlier = None
        self._clean.discard(slot)
        backward.carries[slot] = earlier is not None
        if earlier is None:
            self.let_go(slot)
        elif earlier is not self.handles[slot]:  # the user's own, as after p.grad = p.grad * 0.5
            self.let_go(slot)
            self.local_gradient(slot).copy_(earlier._local_tensor)

    def _clear(self, bucket: int, slots: Sequence[int]) -> None:
        """Zero this rank's runs of `slots` in a bucket."""
        for slot in slots:
            for run in self.layout.runs_of_slot[slot]:
                if run.bucket == bucket and run.rank == self.transport.rank:
                    arena = self.arenas[self.layout.slots[slot].arena]
                    gradients = arena.allocate_gradients()
                    gradients[run.shard_offset : run.shard_offset + run.numel].zero_()

    def _pack(
        self,
        segment: Segment,
        bucket: int,
        wire: torch.dtype,
        backward: Backward,
        borrowed: list[Tensor],
    ) -> Tensor:
        """The segment's gradients as one flat tensor: the gradient itself, or a packed copy."""
        if segment.direct:
            piece = self._piece(segment.slots[0], bucket, backward)
            if piece is not None and piece.dtype == wire:
                return piece
        device = self.arenas[self.layout.buckets[bucket].arena].device
        packed = self.pool.borrow(segment.numel, wire, device)
        borrowed.append(packed)
        filled = 0
        for slot in segment.slots:
            start, stop = (edge - segment.start for edge in self.layout.part(bucket, slot))
            piece = self._piece(slot, bucket, backward)
            packed[filled:start].zero_()  # padding
            if piece is None:
                packed[start:stop].zero_()
            else:
                packed[start:stop].copy_(piece)
            filled = stop
        packed[filled:].zero_()
        return packed

    def _piece(self, slot: int, bucket: int, backward: Backward) -> Tensor | None:
        """The slot's gradient in storage order, as far as it lies in the bucket."""
        grad = backward.arrived.get(slot)
        if grad is None:
            return None
        start, stop = self.layout.part(bucket, slot)
        first = self.layout.buckets[bucket].offset + start - self.layout.slots[slot].offset
        return self.slices[slot].flatten(grad)[first : first + stop - start]

    # --- the step's side

    def _left_local(self, slot: int) -> bool:
        grad = self.parameters[slot].grad
        return grad is not None and self.unsynced[slot]() is grad

    def collect(self) -> tuple[list[int], bool]:
        """Bring every `p.grad` into the gradient shards.

        Returns:
            The slots that have a gradient, and whether any shard may have changed since it was
            last checked for Inf and NaN.

        Raises:
            GradientError: a gradient left local by no_sync(), or of another shape.
        """
        for slot in self.unsynced:
            if self._left_local(slot) and not self.ddp_owns_gradients():
                raise GradientError(
                    f"parameter {self.layout.slots[slot].spec.name!r} holds a gradient of this "
                    "rank alone, from a backward under no_sync(): run the last backward before "
                    "step() outside of no_sync()"
                )
        self.unsynced.clear()
        used: list[int] = []
        changed = self._versions != self._current_versions()
        for slot, parameter in enumerate(self.parameters):
            grad = parameter.grad
            if grad is None:
                changed |= self._forget(slot)
                continue
            used.append(slot)
            if grad is not self.handles[slot]:
                self._bring(slot, grad)
                changed = True
        if changed:
            self._flags_are_valid = False
        return used, not self._flags_are_valid

    def _forget(self, slot: int) -> bool:
        """Zero the range of a slot without a gradient; whether there was anything."""
        if slot in self._clean:
            return False
        self.let_go(slot)
        self.local_gradient(slot).zero_()
        self._clean.add(slot)
        return True

    def _bring(self, slot: int, grad: Tensor) -> None:
        """Copy a gradient that the user, DDP or a single process put into `p.grad`."""
        slices = self.slices[slot]
        if isinstance(grad, ShardTensor):
            local = grad._local_tensor
            fits = local.shape == self.local_gradient(slot).shape
        else:
            local = grad
            fits = tuple(grad.shape) == slices.shape
        if not fits:
            name = self.layout.slots[slot].spec.name
            raise GradientError(
                f"the gradient of {name!r} has shape {tuple(grad.shape)}, expected {slices.shape}"
            )
        if not isinstance(grad, ShardTensor):
            local = slices.cut(slices.flatten(grad.detach()), self.transport.rank)
        self.let_go(slot)
        self._clean.discard(slot)
        self.local_gradient(slot).copy_(local)

    def forget_shards(self) -> None:
        """Free the gradient shards where `p.grad` is a whole tensor and they were only a copy."""
        if any(isinstance(parameter.grad, ShardTensor) for parameter in self.parameters):
            return
        for slot in range(len(self.handles)):
            if self.handles[slot] is not None:
                self.let_go(slot)
                self.handles[slot] = None
        for arena in self.arenas:
            arena.gradients = None
        self._clean = set(range(len(self.parameters)))

    @contextmanager
    def no_sync(self) -> Any:
        """Backwards inside leave their gradients on their rank."""
        before, self.synchronise = self.synchronise, False
        try:
            yield
        finally:
            self.synchronise = before


def _scale_and_check(flag: Tensor, scale: Tensor, piece: Tensor) -> None:
    """Multiply by the scale and raise the flag at an Inf or NaN, in one pass."""
    torch._amp_foreach_non_finite_check_and_unscale_([piece], flag, scale)


def _outermost_function() -> Any:
    """The outermost Python autograd function whose backward is running in this thread."""
    found = None
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is BackwardCFunction.apply.__code__:
            found = frame.f_locals["self"]
        frame = frame.f_back  # type: ignore[assignment]
    return found


def _references(handles: list[Any], index: int) -> int:
    return sys.getrefcount(handles[index]) + sys.getrefcount(handles[index]._local_tensor)


class _Probe:
    def __init__(self) -> None:
        self._local_tensor = object()


_SENT = torch.empty(0)
_UNHELD = _references([_Probe()], 0)


def _is_held(handles: list[Any], index: int) -> bool:
    """Whether anything but the list has the ShardTensor or its local tensor."""
    return _references(handles, index) > _UNHELD
