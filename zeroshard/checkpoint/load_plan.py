"""What is loaded from a `Source`, and into what: checked first, and read when it is asked for."""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from ..errors import CheckpointError
from ..initialise import Buffer
from ..optimizer import AdamW
from ..shard_tensor import ShardTensor
from ..transport import HostRanks
from ..weights import Target, read_into, shape_of
from .content import names_in
from .extra import fill, of_rank, read_own, slices_in
from .source import PerRank, Source, Stored
from .state_plan import Request, StatePlan

__all__ = ["LoadPlan"]

logger = logging.getLogger(__name__)


class LoadPlan:
    """What is loaded from a checkpoint, and into what.

    Args:
        source: the checkpoint.
        model: whose parameters and buffers.
        optimizer: that trains it.
        objects: by name, what has a `load_state_dict()`.
        ranks: all that load.

    Attributes:
        targets: every parameter and persistent buffer, with what it is read from.
        trained: what trained parameters are read from, by slot.
        state: what the optimizer's state is read from.

    Raises:
        CheckpointError: it does not fit; everything that does not is listed.
    """

    def __init__(
        self,
        source: Source,
        model: nn.Module,
        optimizer: AdamW,
        objects: Mapping[str, Any],
        ranks: HostRanks,
    ) -> None:
        self.source, self.optimizer, self.objects = source, optimizer, objects
        self.ranks = ranks
        self.engine = optimizer.engine
        self.targets = _fitting_weights(source, model)
        self.state = StatePlan(model, optimizer, source)
        slot_of = self.engine.slot_of
        self.trained = {
            slot_of[target]: stored
            for target, stored in self.targets.items()
            if isinstance(target, nn.Parameter) and target in slot_of
        }
        missing = sorted(set(objects) - set(source.extra) - {"scheduler"})
        if "scheduler" in objects and source.scheduler is None:
            missing.append("scheduler")
        if missing:
            raise CheckpointError(
                f"{source.what}, {source.path}, holds nothing to load {', '.join(missing)} from: "
                "leave it out, and it stays as it is"
            )
        for name in objects:
            self._check_is_of_this_rank(name)
        for stored, like in self._slices_of_objects():
            if isinstance(like, Tensor) and tuple(like.shape) != stored.shape:
                raise CheckpointError(
                    f"{source.path} has a tensor of an object in shape {stored.shape}, it must be "
                    f"{tuple(like.shape)}"
                )
        misshapen = [
            name
            for name, stored in source.gradients.items()
            if name not in self.state.slot_of or stored.shape != self._shape(name)
        ]
        if misshapen:
            raise CheckpointError(f"{source.path} has a gradient that does not fit: {misshapen[0]}")

    def _saved(self, name: str) -> Any:
        """What is loaded into an object."""
        return self.source.scheduler if name == "scheduler" else self.source.extra[name]

    def _check_is_of_this_rank(self, name: str) -> None:
        saved, ranks = self._saved(name), self.ranks
        if isinstance(saved, PerRank) and (len(saved) != ranks.size or saved[ranks.rank] is None):
            raise CheckpointError(
                f"{self.source.path} has {name!r} of each of {len(saved)} ranks apart, and none of "
                f"rank {ranks.rank} of {ranks.size}: leave it out, and make what it must be here "
                "of what load_checkpoint returns of it, a list"
            )

    def _shape(self, name: str) -> tuple[int, ...]:
        return self.engine.gradients.shards.slices[self.state.slot_of[name]].shape

    def check_sums(self) -> None:
        """Compare everything that this rank will read with its checksums."""
        for request in self._requests():
            request.check()

    def _requests(self) -> Iterator[Request]:
        yield from self.state.requests()
        rank, places = self.engine.transport.rank, self.engine.parameters.places
        for target, stored in self.targets.items():
            place = places.get(target) if isinstance(target, nn.Parameter) else None
            if place is None:
                yield Request.of_all(stored)
                continue
            for start, numel in place.slices.by_rank[rank]:
                yield Request(stored, place.slices.stride, start, numel)
        for name, stored in self.source.gradients.items():
            slices = self.engine.gradients.shards.slices[self.state.slot_of[name]]
            for start, numel in slices.by_rank[rank]:
                yield Request(stored, slices.stride, start, numel)
        for stored, like in self._slices_of_objects():
            if not isinstance(like, ShardTensor):
                yield Request.of_all(stored)
                continue
            for start, numel in like.slices.by_rank[rank]:
                yield Request(stored, like.slices.stride, start, numel)

    def _slices_of_objects(self) -> Iterator[tuple[Stored, Any]]:
        """Slices that are loaded into objects, with what these have now."""
        for name, thing in self.objects.items():
            saved = of_rank(self._saved(name), self.ranks)
            if any(slices_in(saved)):
                yield from slices_in(saved, thing.state_dict())

    def load_weights(self) -> None:
        """Read what is not trained; the rest comes with its masters."""
        self.engine.sharding.reshard_all()
        for target, stored in self.targets.items():
            if target not in self.engine.slot_of:
                read_into(target, stored, [self.engine])
                stored.forget()

    def read_gradients(self) -> dict[int, Tensor]:
        """This rank's slices of gradients that wait for a step, by slot."""
        rank, device = self.engine.transport.rank, self.engine.device
        slices = self.engine.gradients.shards.slices
        slots = {self.state.slot_of[name]: s for name, s in self.source.gradients.items()}
        return {slot: read_own(s, slices[slot], rank, device) for slot, s in slots.items()}

    def load_objects(self) -> dict[str, Any]:
        """Give the objects what was saved of them; return the rest."""
        values = {
            name: of_rank(value, self.ranks)
            for name, value in self.source.extra.items()
            if name not in self.objects
        }
        sliced = [name for name, value in values.items() if any(slices_in(value))]
        for name in sliced:
            del values[name]
            logger.warning(
                "%s holds slices of %r, which are loaded into an object only: pass it as %s=",
                self.source.path,
                name,
                name,
            )
        for name, thing in self.objects.items():
            saved = of_rank(self._saved(name), self.ranks)
            has_slices = any(slices_in(saved))
            thing.load_state_dict(fill(saved, thing.state_dict()) if has_slices else saved)
        if self.source.step is not None:
            values["step"] = self.source.step
        return values


def _fitting_weights(source: Source, model: nn.Module) -> dict[Target, Stored]:
    """What each parameter and buffer is read from.

    Raises:
        CheckpointError: names or shapes that do not fit, listed.
    """
    said: dict[str, list[str]] = {"missing": [], "unexpected": [], "of another shape or kind": []}
    found: dict[Target, Stored] = {}
    names = names_in(model)
    by_target: dict[Target, list[str]] = {}
    for name, target in names.items():
        by_target.setdefault(target, []).append(name)
    for target, aliases in by_target.items():
        stored = next((source.weights[name] for name in aliases if name in source.weights), None)
        if stored is None:
            said["missing"].append(aliases[0])
            continue
        found[target] = stored
        tensor = target.tensor if isinstance(target, Buffer) else target
        if stored.shape != shape_of(target) or (
            tensor.is_floating_point() != stored.dtype.is_floating_point
        ):
            said["of another shape or kind"].append(
                f"{aliases[0]} {stored.shape} {stored.dtype}, in the model {shape_of(target)} "
                f"{tensor.dtype}"
            )
    said["unexpected"] = sorted(source.weights.keys() - names.keys())
    texts = [
        f"{kind}: {', '.join(entries[:20])}"
        + (f" and {len(entries) - 20} more" if len(entries) > 20 else "")
        for kind, entries in said.items()
        if entries
    ]
    if texts:
        raise CheckpointError(
            f"{source.what}, {source.path}, is of another model, and nothing was loaded. "
            + ". ".join(texts)
        )
    return found
