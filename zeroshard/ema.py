"""`zeroshard.EMA`: an exponential moving average of the fp32 weights, sharded as they are."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .conversions import MASTERS
from .engine import Engine
from .errors import ConfigError
from .gather import gather_whole_arenas
from .layout import Bucket
from .optimizer import AdamW
from .shard_tensor import ShardTensor
from .state import local_slice
from .storage import Arena, slot_view

__all__ = ["EMA"]


class EMA:
    """Keeps ``average = lerp(average, weight, 1 - decay)`` of every trained parameter.

    Each rank averages its shards of the fp32 masters: 4 bytes a parameter, divided by the number of
    ranks. Updates itself after every `optimizer.step()`. Polyak & Juditsky 1992.

    Args:
        optimizer: a `zeroshard.AdamW`; the averages start as its weights are now.
        decay: in [0, 1); how much of the average stays in each step.

    Attributes:
        num_updates: steps that were averaged.

    Raises:
        ConfigError: another optimizer, or another decay.
    """

    def __init__(self, optimizer: AdamW, decay: float = 0.999) -> None:
        if not isinstance(optimizer, AdamW):
            raise ConfigError(
                f"EMA averages the shards of a zeroshard.AdamW, got {type(optimizer).__name__}"
            )
        if not isinstance(decay, (int, float)) or not 0 <= decay < 1:
            raise ConfigError(f"decay must be in [0, 1), got {decay!r}")
        self.optimizer, self.decay = optimizer, decay
        self.num_updates = 0
        self._averages: list[Tensor] = []  # by arena, [shard_numel] fp32
        self.engine.parameters.check_values(self.engine.slot_of)
        self._follow()
        self._hook = optimizer.register_step_post_hook(lambda *_: self.update())

    @property
    def engine(self) -> Engine:
        """The optimizer's engine."""
        return self.optimizer.engine

    @torch.no_grad()
    def update(self) -> None:
        """Move the averages towards the weights; the optimizer's `step` calls this."""
        self.engine.check_can_step("EMA.update")
        self._follow()
        for average, weight in self._pairs():
            average.lerp_(weight, 1 - self.decay)
        self.num_updates += 1

    def close(self) -> None:
        """Do not follow the optimizer any more; the averages stay."""
        self._hook.remove()

    @torch.no_grad()
    def _follow(self) -> None:
        """Start averages for arenas that are new: all of them, or those of unfrozen parameters."""
        engine = self.engine
        if not engine.cannot_step:  # as when the parameters are the averages
            engine.masters.look_at_writes()
        known = len(self._averages)
        for arena in engine.arenas[known:]:
            self._averages.append(arena.allocate(arena.shard_numel, "float32", "moments"))
        for average, weight in self._pairs(known):
            average.copy_(weight)

    def _pairs(self, first_arena: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """(average, fp32 weight) of each bucket's shard."""
        engine = self.engine
        for arena, fmt in list(zip(engine.arenas, engine.formats, strict=True))[first_arena:]:
            for bucket in arena.plan.buckets:
                start = bucket.shard_offset
                state = arena.state_of(start, start + bucket.shard_numel)
                weight = MASTERS[fmt.master].load(arena.parameter_shard(bucket.index), state)
                yield self._average_of(arena, bucket), weight

    def _average_of(self, arena: Arena, bucket: Bucket) -> Tensor:
        start = bucket.shard_offset
        return self._averages[arena.plan.index][start : start + bucket.shard_numel]

    # --- the averages as the model's weights

    @contextmanager
    def swap(self) -> Iterator[None]:
        """The parameters are the averages, rounded to their dtype, on every rank; then as before.

        Every rank has to enter and leave. Masters and moments stay what they are.

        Raises:
            ConfigError: inside of another `swap` or of `zeroshard.gather`; also `step()` inside,
                and at the end, if somebody wrote to a parameter.
        """
        engine = self.engine
        engine.sharding.check_unpinned("EMA.swap")
        engine.check_can_step("EMA.swap")
        self._follow()
        with torch.no_grad():
            kept = self._exchange(None)
        engine.cannot_step = "the parameters are averages, inside of EMA.swap()"
        try:
            yield
        finally:
            engine.cannot_step = ""
            try:
                written = engine.parameters.check()
            finally:
                with torch.no_grad():
                    self._exchange(kept)
        if written:
            names = ", ".join(engine.parameters.places[p].name for p in written[:3])
            raise ConfigError(
                f"{names} was written to inside of EMA.swap(), and is what it was before: write "
                "outside of it"
            )

    def _exchange(self, values: list[Tensor] | None) -> list[Tensor]:
        """Put `values` (None: the averages) into the parameters, and return what was there."""
        engine = self.engine
        before: list[Tensor] = []
        engine.sharding.reshard_all()
        for arena in engine.arenas:
            for bucket in arena.plan.buckets:
                shard = arena.parameter_shard(bucket.index)
                number = len(before)
                before.append(shard.clone())
                shard.copy_(self._average_of(arena, bucket) if values is None else values[number])
        gather_whole_arenas(engine, "averages")
        engine.parameters.mark_written_by_us(list(engine.slot_of))
        return before

    # --- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The averages by parameter name, as slices; never communicates."""
        self._follow()
        engine = self.engine
        average: dict[str, Tensor] = {}
        for slot in engine.layout.slots:
            local, slices = self._local(slot.index), engine.gradients.shards.slices[slot.index]
            if engine.transport.distributed:
                average[slot.spec.name] = ShardTensor(local, slices, engine.transport)
            else:
                average[slot.spec.name] = slot_view(local, slices.shape, slices.stride)
        return {"decay": self.decay, "num_updates": self.num_updates, "average": average}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, or whole tensors; never communicates.

        Raises:
            ConfigError: names, shapes or slices that do not fit; nothing has changed then.
        """
        self._follow()
        engine, saved = self.engine, state_dict["average"]
        slots = {slot.spec.name: slot.index for slot in engine.layout.slots}
        if slots.keys() != saved.keys():
            raise ConfigError(
                f"the averages do not fit: missing {sorted(slots.keys() - saved.keys())}, "
                f"unexpected {sorted(saved.keys() - slots.keys())}"
            )
        slices = engine.gradients.shards.slices
        local = [
            (slot, local_slice(engine, slices[slot], saved[name], f"the average of {name!r}"))
            for name, slot in slots.items()
        ]
        for slot, values in local:
            self._local(slot).copy_(values)
        self.decay, self.num_updates = state_dict["decay"], state_dict["num_updates"]

    def _local(self, slot: int) -> Tensor:
        """[slice's numel] this rank's average of one parameter."""
        start, stop = self.engine.layout.local_range(slot, self.engine.transport.rank)
        return self._averages[self.engine.layout.slots[slot].arena][start:stop]
