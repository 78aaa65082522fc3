"""Masters follow what somebody else writes to parameters. Decides nothing about when."""

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from .conversions import reread_master, restore_master
from .layout import Layout
from .parameters import Parameters
from .storage import Arena
from .transport import Op, Transport

__all__ = ["Masters"]


class Masters:
    """The parameters of one optimizer with the state that must fit them.

    Args:
        parameters: where they live and who wrote to them.
        transport: the wire.
    """

    def __init__(self, parameters: Parameters, transport: Transport) -> None:
        self.parameters, self.transport = parameters, transport
        self._loaded: dict[int, Tensor | None] = {}  # by slot: masters, None for lower halves

    def attach(
        self, layout: Layout, arenas: Sequence[Arena], slot_of: Mapping[nn.Parameter, int]
    ) -> None:
        """Serve the slots of a layout."""
        self.layout, self.arenas, self.slot_of = layout, arenas, slot_of

    def local_parts(self, slot: int) -> list[tuple[Tensor, dict[str, Tensor]]]:
        """(parameter, state) of each of this rank's runs of a slot."""
        arena = self.arenas[self.layout.slots[slot].arena]
        parts = []
        for run in self.layout.runs_of_slot[slot]:
            if run.rank == self.transport.rank:
                stop = run.shard_offset + run.numel
                parts.append((arena.parameter_run(run), arena.state_of(run.shard_offset, stop)))
        return parts

    def look_at_writes(self, given: Collection[int] = ()) -> None:
        """Take over what was written to parameters up to now.

        Args:
            given: slots whose masters are about to be loaded. They may be in place already: a
                local state dict shares their memory, and torch's `dcp.load` fills it.
        """
        written = {self.slot_of[p] for p in self.parameters.check() if p in self.slot_of}
        self._reread(sorted(written.difference(given)))

    # torch's `set_state_dict` loads the optimizer first and then the model. So the first write to a
    # parameter between the loading of its state and the next step is taken for the weights that the
    # state belongs to, and its masters stay as they were loaded.

    def load(self, slot: int, values: Tensor) -> None:
        """Set the masters of a slot, this rank's [n] fp32; see `restore_master`."""
        values = values.clone()  # they may be the masters themselves, filled by `dcp.load`
        if not self._set(slot, values):
            self._loaded[slot] = values

    def loaded_remainder(self, slot: int) -> None:
        """The lower halves of a slot's masters were loaded."""
        self._loaded[slot] = None

    def forget_loaded(self) -> None:
        """A step begins: later writes are new weights."""
        self._loaded.clear()

    def _set(self, slot: int, values: Tensor) -> bool:
        """Whether the parameter is their rounding; where it is not, it stands."""
        taken, fits = 0, True
        for parameter, state in self.local_parts(slot):
            part = values[taken : taken + parameter.numel()].to(parameter.device, torch.float32)
            restore_master(part, parameter, state)
            fits &= torch.equal(part.to(parameter.dtype), parameter)
            taken += parameter.numel()
        return fits

    def refresh(self) -> None:
        """Re-read every master from its parameter."""
        self.forget_loaded()
        self._reread(range(len(self.layout.slots)))

    def _reread(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if slot in self._loaded:
                values = self._loaded.pop(slot)
                if values is not None:
                    self._set(slot, values)
                continue
            for parameter, state in self.local_parts(slot):
                reread_master(parameter, state, torch.ones_like(parameter, dtype=torch.bool))

    def write_back(self, parameters: Iterable[nn.Parameter]) -> None:
        """The first rank's values of whole `parameters` win; masters follow where these are new."""
        wanted = set(parameters)
        places = [place for p, place in self.parameters.places.items() if p in wanted]
        self.look_at_writes()
        for number, place in enumerate(places):
            slot = self.slot_of.get(place.parameter)
            parts = [] if slot is None else self.local_parts(slot)
            before = [parameter.clone() for parameter, _ in parts]
            self.transport.broadcast(place.flat, op=Op("writeback", bucket=number)).wait()
            self.parameters.keep(place)
            for old, (parameter, state) in zip(before, parts, strict=True):
                reread_master(parameter, state, parameter != old)
        self.parameters.mark_written_by_us([place.parameter for place in places])
