"""Masters follow what somebody else writes to parameters. Decides nothing about when."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from .conversions import MASTERS, reread_master, restore_master
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
        self._loaded: dict[int, Tensor] = {}  # by slot: masters fp32, or their lower halves int16

    def attach(
        self, layout: Layout, arenas: Sequence[Arena], slot_of: Mapping[nn.Parameter, int]
    ) -> None:
        """Serve the slots of a layout."""
        self.layout, self.arenas, self.slot_of = layout, arenas, slot_of

    def local_parts(self, slot: int) -> list[tuple[Tensor, dict[str, Tensor]]]:
        """(parameter, state) of each of this rank's runs of a slot."""
        arena = self.arenas[self.layout.slots[slot].arena]
        parts = []
        for run in self.layout.runs_of_rank(self.transport.rank)[slot]:
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

    # torch's `set_state_dict` loads the optimizer first and then the model. So what a module's
    # `load_state_dict` writes between the loading of a parameter's state and the next step are the
    # weights that the state belongs to, and its masters become what was loaded. Any other write
    # starts new masters.

    def load(self, slot: int, values: Tensor) -> None:
        """Set the masters of a slot, this rank's [n] fp32; see `restore_master`."""
        # A copy: they may be the masters themselves, filled by `dcp.load`.
        values = values.to(torch.float32, copy=True)
        if not self._set(slot, values):
            self._loaded[slot] = values

    def load_remainder(self, slot: int, low: Tensor) -> None:
        """Set the masters of a slot by their lower halves, this rank's [n] int16."""
        self._loaded[slot] = low.clone()
        self._set_remainder(slot, low)

    def forget_loaded(self, slot: int | None = None) -> None:
        """Later writes are new weights, of one slot or, where a step begins, of all."""
        if slot is None:
            self._loaded.clear()
        else:
            self._loaded.pop(slot, None)

    def weights_loaded(self, parameters: Collection[nn.Parameter]) -> None:
        """A module's `load_state_dict` has just written to parameters."""
        for parameter in self.parameters.take_written(parameters):
            slot = self.slot_of.get(parameter)
            if slot is None:  # it is frozen
                continue
            values = self._loaded.get(slot)
            if values is None:
                self._reread([slot])
            elif values.dtype == torch.int16:
                self._set_remainder(slot, values)
            else:
                self._set(slot, values)

    def _set(self, slot: int, values: Tensor) -> bool:
        """Whether the parameter is their rounding; where it is not, it stands."""
        fits = True
        for part, parameter, state in self._parts(slot, values):
            restore_master(part, parameter, state)
            fits &= torch.equal(part.to(parameter.dtype), parameter)
        return fits

    def _set_remainder(self, slot: int, low: Tensor) -> None:
        for part, parameter, state in self._parts(slot, low):
            if "remainder" in state:
                state["remainder"].copy_(part)
            elif "master" in state and parameter.dtype == torch.bfloat16:
                state["master"].copy_(MASTERS["split"].load(parameter, {"remainder": part}))

    def _parts(
        self, slot: int, values: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, dict[str, Tensor]]]:
        """(values, parameter, state) of each of this rank's runs of a slot."""
        taken = 0
        for parameter, state in self.local_parts(slot):
            part = values[taken : taken + parameter.numel()].to(parameter.device)
            yield part, parameter, state
            taken += parameter.numel()

    def refresh(self) -> None:
        """Re-read every master from its parameter."""
        self.forget_loaded()
        self._reread(range(len(self.layout.slots)))

    def _reread(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._loaded.pop(slot, None)
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
