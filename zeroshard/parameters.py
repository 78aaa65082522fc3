"""Shard -> gather -> parameter: the user's parameters as views of arenas, and who wrote to them.

Owns the re-pointing of `.data`; knows no gradients and no optimizer state.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .errors import ConfigError
from .layout import ParamSpec
from .storage import Arena, slot_view
from .transport import Op, Pending, Transport
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


def describe_parameter(name: str, parameter: Tensor, dtype: torch.dtype) -> ParamSpec:
    """What the layout needs to know of a parameter that is stored as `dtype`."""
    return ParamSpec(
        name=name,
        shape=tuple(parameter.shape),
        stride=dense_stride(parameter),
        dtype=str(dtype).removeprefix("torch."),
        device=str(parameter.device),
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
        if parameter.numel():
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


class Parameters:
    """Slot by slot: the user's parameter, its view of the arena, and the version last seen."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.owners: Owners = {}
        self.tensors: list[nn.Parameter] = []
        self.views: list[Tensor] = []
        self.names: list[str] = []
        self.versions: list[int] = []

    def attach(self, arenas: Sequence[Arena], parameters: Sequence[nn.Parameter]) -> None:
        """Point parameters at their slots, whose values are theirs already.

        Args:
            arenas: new arenas.
            parameters: the user's parameters of all slots of these arenas, by slot index.
        """
        slots = sorted((s for a in arenas for s in a.plan.slots), key=lambda slot: slot.index)
        self.owners.update(owners_of(set(parameters)))
        by_index = {arena.plan.index: arena for arena in arenas}
        for slot, parameter in zip(slots, parameters, strict=True):
            arena = by_index[slot.arena]
            flat = arena.parameters[slot.offset : slot.offset + slot.numel]
            view = slot_view(flat, slot.spec.shape, slot.spec.stride)
            self.tensors.append(parameter)
            self.views.append(view)
            self.names.append(slot.spec.name)
            parameter.data = view
            self.versions.append(parameter._version)

    def check(self) -> list[int]:
        """Slots written from outside since the last look; views that were moved are put back.

        Raises:
            ConfigError: a parameter was replaced, or has another shape, dtype or device now.
        """
        moved = self._moved()
        for slot, parameter in enumerate(self.tensors):
            for reference, name in self.owners.get(parameter, ()):
                module = reference()
                if module is not None and module._parameters.get(name) is not parameter:
                    raise ConfigError(_replaced(self.names[slot], module))
        for slot in moved:
            self._check_kind(slot)
        for slot in moved:
            self.views[slot].copy_(self.tensors[slot].data)
            self.tensors[slot].data = self.views[slot]
        written = set(moved)
        for slot, parameter in enumerate(self.tensors):
            if parameter._version != self.versions[slot]:
                self.versions[slot] = parameter._version
                written.add(slot)
        return sorted(written)

    def check_kinds(self) -> None:
        """Raise if a parameter has another shape, dtype or device than when it was attached."""
        for slot in self._moved():
            self._check_kind(slot)

    def _moved(self) -> list[int]:
        """Slots whose parameter no longer is the view of its slot."""
        return [
            slot
            for slot, (parameter, view) in enumerate(zip(self.tensors, self.views, strict=True))
            if parameter.data_ptr() != view.data_ptr() and view.numel()
        ]

    def _check_kind(self, slot: int) -> None:
        parameter, view = self.tensors[slot], self.views[slot]
        now = (tuple(parameter.shape), parameter.dtype, parameter.device)
        then = (tuple(view.shape), view.dtype, view.device)
        if now != then:
            raise ConfigError(
                f"parameter {self.names[slot]!r} had shape {then[0]}, {then[1]} on {then[2]} when "
                f"the optimizer was built, and has shape {now[0]}, {now[1]} on {now[2]} now: move "
                "or cast the model before building the optimizer"
            )

    def mark_written_by_us(self, slots: Sequence[int]) -> None:
        """Bump the versions of parameters that a step changed, as torch's optimizers do.

        A backward through a graph from before the step then raises.
        """
        torch.autograd.graph.increment_version([self.tensors[slot] for slot in slots])
        for slot in slots:
            self.versions[slot] = self.tensors[slot]._version

    def gather(self, bucket: int, arena: Arena, step: int) -> Pending:
        """Launch the all-gather of a bucket, straight into the storage of the parameters."""
        op = Op("gather", bucket=bucket, round=step, unit=arena.plan.unit)
        return self.transport.gather(arena.bucket(bucket), op=op)

    def detach(self) -> None:
        """Give every parameter plain memory of its own again."""
        for parameter, view in zip(self.tensors, self.views, strict=True):
            if parameter.data_ptr() == view.data_ptr():
                parameter.data = view.clone()
        self.views.clear()
        self.tensors.clear()


def _replaced(name: str, module: nn.Module) -> str:
    return (
        f"parameter {name!r} of {type(module).__name__} was replaced by another Parameter object "
        "after the optimizer was built, so training would change one that the model no longer "
        "uses. Assign to parameter.data, load with assign=False, or build the optimizer last"
    )
