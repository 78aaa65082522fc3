"""Shard -> gather -> parameter: the user's parameters as views of arenas, and who wrote to them.

Owns the re-pointing of `.data`; knows no gradients, no optimizer state, and not when.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from .errors import ConfigError
from .imitation import acts_as_gpu
from .layout import Layout, ParamSpec
from .meta import give_elements, is_untouched, leave_meta, return_to_meta
from .place import Place
from .storage import Arena
from .wrappers import Owners, owners_of

__all__ = ["Parameters", "check_trainable", "dense_stride", "describe_parameter"]


def dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's strides if its elements fill memory without gaps, else contiguous ones."""
    numel = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != numel:
            return torch.empty(tensor.shape, device="meta").stride()
        numel *= size
    return tuple(tensor.stride())


def describe_parameter(name: str, parameter: Tensor, dtype: torch.dtype, unit: str) -> ParamSpec:
    """What the layout needs to know of a parameter that is stored as `dtype`."""
    return ParamSpec(
        name=name,
        shape=tuple(parameter.shape),
        stride=dense_stride(parameter),
        dtype=str(dtype).removeprefix("torch."),
        device=str(parameter.device),
        unit=unit,
    )


def check_trainable(named: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Raise if parameters are tensor-parallel, on several devices, or share memory."""
    devices = sorted({str(parameter.device) for _, parameter in named})
    if len(devices) > 1 or any(device.startswith("meta") for device in devices):
        raise ConfigError(
            f"all trainable parameters must be on one real device, got {', '.join(devices)}: "
            "move the model before building the optimizer"
        )
    ranges = []
    for name, parameter in named:
        if isinstance(parameter, DTensor):
            raise ConfigError(
                f"parameter {name!r} is a DTensor: tensor-parallel (or already sharded) parameters "
                "are not supported"
            )
        if parameter.untyped_storage().nbytes():
            extent = sum(
                (n - 1) * s for n, s in zip(parameter.shape, parameter.stride(), strict=True)
            )
            start = parameter.data_ptr()
            ranges.append((start, start + (extent + 1) * parameter.element_size(), name))
    ranges.sort()
    for (_, stop, before), (start, _, name) in pairwise(ranges):
        if start < stop:
            raise ConfigError(
                f"parameters {before!r} and {name!r} share memory without being one Parameter, and "
                "would come apart: tie them by assigning the same Parameter object"
            )


_abandoned: Any = WeakIdKeyDictionary()  # without values, of optimizers that were closed


class Parameters:
    """All parameters of one optimizer that live in arenas, and what was written to them.

    Args:
        rank: this rank on the shard axis.

    Attributes:
        without_values: parameters that came from the meta device and were not written to since.
        checks_values: whether to use one of those is an error; not so while they get their values.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.without_values: set[nn.Parameter] = set()
        self.checks_values = True
        self._names: Mapping[nn.Parameter, str] = {}  # of those that may have none
        self.owners: Owners = {}
        self.places: dict[nn.Parameter, Place] = {}
        self._written: dict[nn.Parameter, None] = {}

    def attach(
        self, arena: Arena, layout: Layout, parameters: Mapping[int, nn.Parameter]
    ) -> list[Place]:
        """Point parameters at their slots of an arena, whose values are theirs already.

        Args:
            arena: a new arena.
            layout: the layout that its slots are of.
            parameters: the user's parameters by slot index.
        """
        places = [Place(parameters[slot.index], slot, arena, layout) for slot in arena.plan.slots]
        self.places.update((place.parameter, place) for place in places)
        return places

    def leave_meta(self, named: Mapping[nn.Parameter, str], device: torch.device) -> None:
        """Move meta parameters to a device; they have no values yet."""
        self.without_values.update(leave_meta(named, device))
        self._names = named

    def inherit(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take over, from optimizers that were closed, which parameters have no values yet."""
        for parameter in parameters:
            if _abandoned.pop(parameter, False) and is_untouched(parameter.data):
                self.without_values.add(parameter)

    def complete(self) -> None:
        """Give memory to those that came from the meta device and are in no arena."""
        self.inherit(self._names)
        self._names = {parameter: self._names[parameter] for parameter in self.without_values}
        for parameter in self.without_values.difference(self.places):
            if parameter.untyped_storage().nbytes() == 0:
                give_elements(parameter)

    def find_owners(self) -> None:
        """Look up which modules hold the parameters, to notice when one is replaced."""
        self.owners = owners_of(self.places)

    def owning_modules(self) -> list[nn.Module]:
        """Each once."""
        found = [reference() for owners in self.owners.values() for reference, _ in owners]
        return list(dict.fromkeys(module for module in found if module is not None))

    # --- what was written from outside

    def check(self) -> list[nn.Parameter]:
        """Parameters written from outside since the last time; views that were moved are put back.

        Raises:
            ConfigError: a parameter was replaced, has another shape, dtype or device now, or was
                written to while it was sharded.
        """
        for parameter, place in self.places.items():
            for reference, name in self.owners.get(parameter, ()):
                module = reference()
                if module is not None and module._parameters.get(name) is not parameter:
                    raise ConfigError(_replaced(place.name, module))
        self.settle(self.places.values())
        self._notice_values()
        written, self._written = self._written, {}
        return list(written)

    def take_written(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """As `check`, of some of them and nothing else."""
        ours = [parameter for parameter in parameters if parameter in self.places]
        self.settle(self.places[parameter] for parameter in ours)
        return [p for p in ours if self._written.pop(p, False) is None]

    def settle(self, places: Iterable[Place]) -> None:
        """Bring what was written to `places` into their arenas, and note it.

        Raises:
            ConfigError: see `check`.
        """
        touched = []
        for place in places:  # at every use of a unit, so in one pass
            parameter = place.parameter
            if parameter.data_ptr() != place.data_ptr or parameter._version != place.version:
                touched.append(place)
        if touched:
            self._take_over(touched)

    def _take_over(self, places: Iterable[Place]) -> None:
        moved = [place for place in places if place.parameter.data_ptr() != place.data_ptr]
        for place in moved:
            _check_kind(place)
        for place in moved:
            self._take_data(place)
        lost = []
        for place in places:
            version = place.parameter._version
            if version != place.version:
                place.version = version
                if not place.is_hidden:
                    self.keep(place)
                    self._note(place.parameter)
                else:
                    lost.append(place)
        if lost:
            for place in lost:
                place.arena.renew_placeholders()
            raise ConfigError(_written_while_sharded([place.name for place in lost]))

    def check_placeholders(self, arena: Arena, places: Iterable[Place]) -> None:
        """Raise if a placeholder was written to, past every version counter; on a CPU.

        Elsewhere the host would have to wait; there such a write is gone from here on.
        """
        if acts_as_gpu(arena.device):
            arena.renew_placeholders()
            return
        if arena.shows_placeholders():
            return
        written = arena.written_placeholders()
        arena.renew_placeholders()
        names = [p.name for p in places if p.arena is arena and written[p.number]]
        raise ConfigError(_written_while_sharded(names))

    def _take_data(self, place: Place) -> None:
        """Take over what the user pointed a parameter's `.data` at."""
        data = place.parameter.data
        if not place.is_hidden:
            place.view.copy_(data)
            place.show()
            self.keep(place)
        else:
            if data.numel() and bool(data.isnan().all()):
                place.hide()
                if place.arena.is_copy_of_placeholder(data):  # as by model.to("cpu:0")
                    return
                raise ConfigError(_written_while_sharded([place.name]))
            local = place.slices.cut(place.slices.flatten(data), self.rank)
            self.shard_of(place).copy_(local)
            if place.arena.is_whole:
                place.view.copy_(data)
            self._renew_placeholders(place.arena)
            place.hide()
        self._note(place.parameter)

    def _note(self, parameter: nn.Parameter) -> None:
        """Somebody else wrote to a parameter."""
        self.without_values.discard(parameter)
        if parameter in self.places:
            self._written[parameter] = None

    def check_values(self, parameters: Iterable[nn.Parameter]) -> None:
        """Raise if one of `parameters`, which are about to be used, has no values yet."""
        if not self.without_values or not self.checks_values:
            return
        wanted = list(parameters)
        self.settle(self.places[p] for p in wanted if p in self.places)
        self._notice_values()
        # What is in no arena may be read anywhere.
        missing = [
            *self.without_values.intersection(wanted),
            *self.without_values - set(self.places),
        ]
        if missing:
            names = sorted({self._names.get(p) or self.places[p].name for p in missing})
            raise ConfigError(
                f"{_listed(names)} came from the meta device and has no values yet: call "
                "zeroshard.load_weights(model, path) or zeroshard.init_weights(model) first"
            )

    def _notice_values(self) -> None:
        """Find values that came by ways which move no version, such as `p.data.copy_(x)`."""
        for parameter in list(self.without_values):
            place = self.places.get(parameter)
            if place is not None and not place.arena.is_whole:
                continue
            values = parameter.data if place is None else place.view
            if not is_untouched(values):
                self._note(parameter)

    def _renew_placeholders(self, arena: Arena) -> None:
        """Make new ones: who swapped `.data` holds an old one, and must not swap it back."""
        with torch.inference_mode(False):
            arena.replace_placeholders()
        for place in self.places.values():
            if place.arena is arena:
                shows_it = place.parameter.data_ptr() == place.placeholder_ptr
                place.renew_placeholder(arena.placeholders)
                if place.is_hidden and shows_it:
                    place.hide()

    def check_kinds(self) -> None:
        """Raise if a parameter has another shape, dtype or device than when it was attached."""
        for place in self.places.values():
            if place.parameter.data_ptr() != place.data_ptr:
                _check_kind(place)

    def note_written(self, place: Place) -> None:
        """The shard of `place` was written to; so were the values that a parameter shows."""
        place.version = place.parameter._version
        self._note(place.parameter)

    def mark_unchanged(self, parameters: Iterable[nn.Parameter]) -> None:
        """What moved the versions of whole parameters has put their values back."""
        for parameter in parameters:
            if parameter in self.places:
                self.places[parameter].version = parameter._version

    def mark_loaded(self, parameters: Iterable[object]) -> None:
        """Values of those of `parameters` that live here came from a file, with their masters."""
        loaded = [p for p in parameters if isinstance(p, nn.Parameter)]
        self.without_values.difference_update(loaded)
        self.mark_written_by_us([p for p in loaded if p in self.places])

    def mark_written_by_us(self, parameters: Sequence[nn.Parameter]) -> None:
        """Bump the versions of parameters that a step changed, as torch's optimizers do.

        A backward through a graph from before the step then raises.
        """
        torch.autograd.graph.increment_version(parameters)
        for parameter in parameters:
            self.places[parameter].version = parameter._version

    # --- between a whole parameter and this rank's shard of it

    def shard_of(self, place: Place) -> Tensor:
        """[slice's numel] this rank's elements in storage order; the arena must keep a shard."""
        assert place.arena.shard is not None
        start, stop = place.local_range
        return place.arena.shard[start:stop]

    def keep(self, place: Place) -> None:
        """Copy this rank's elements of a whole parameter to the shard, where there is one."""
        if place.arena.shard is not None:
            self.shard_of(place).copy_(place.slices.cut(place.flat, self.rank))

    def keep_changes(self, places: Iterable[Place]) -> None:
        """As `keep`, for what was written in ways that move no version."""
        for place in places:
            if place.arena.shard is not None:
                local = place.slices.cut(place.flat, self.rank)
                bits = torch.int32 if local.dtype == torch.float32 else torch.int16
                if not torch.equal(local.view(bits), self.shard_of(place).view(bits)):
                    self.shard_of(place).copy_(local)
                    self._note(place.parameter)

    def release(self, parameters: Iterable[nn.Parameter]) -> None:
        """Give whole parameters plain memory of their own again."""
        others = self.without_values.difference(self.places)
        return_to_meta(others)
        _abandoned.update(dict.fromkeys(others, True))
        for parameter in list(parameters):
            if parameter in self.without_values:
                _abandoned[parameter] = True
            place = self.places.pop(parameter)
            self._written.pop(parameter, None)
            if parameter.data_ptr() == place.data_ptr:
                parameter.data = place.view.clone()


def _check_kind(place: Place) -> None:
    parameter, view = place.parameter, place.view
    now = (tuple(parameter.shape), parameter.dtype, parameter.device)
    then = (tuple(view.shape), view.dtype, view.device)
    if now != then:
        raise ConfigError(
            f"parameter {place.name!r} had shape {then[0]}, {then[1]} on {then[2]} when "
            f"the optimizer was built, and has shape {now[0]}, {now[1]} on {now[2]} now: move "
            "or cast the model before building the optimizer"
        )


def _replaced(name: str, module: nn.Module) -> str:
    return (
        f"parameter {name!r} of {type(module).__name__} was replaced by another Parameter object "
        "after the optimizer was built, so training would change one that the model no longer "
        "uses. Assign to parameter.data, load with assign=False, or build the optimizer last"
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names[:3]) + (" ..." if len(names) > 3 else "")


def _written_while_sharded(names: Sequence[str]) -> str:
    return (
        f"{_listed(names)} was written to while it was sharded, when a parameter is only a "
        "placeholder: the write is lost, the weights are what they were. Write inside of "
        "`with zeroshard.gather(model, writeback=True):`"
    )
