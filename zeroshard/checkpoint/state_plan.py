"""From a `Source` to an optimizer: state, masters and options, this rank's slices piece by piece.

Checks everything first, and changes nothing until `load`.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..boxes import row_major
from ..conversions import MASTERS, read_moment, restore_master, seed_master, write_moment
from ..errors import CheckpointError
from ..formats import MOMENT_NAMES
from ..layout import BLOCK
from ..optimizer import AdamW
from ..param_groups import check_group
from ..weights import parts_of
from .content import names_in
from .names import named_groups, names_of
from .source import Source, Stored

__all__ = ["Request", "StatePlan"]

logger = logging.getLogger(__name__)


class Request(NamedTuple):
    """A range that will be read."""

    stored: Stored
    stride: tuple[int, ...]
    start: int
    numel: int

    @staticmethod
    def of_all(stored: Stored) -> "Request":
        """The whole of a tensor."""
        return Request(stored, row_major(stored.shape), 0, stored.numel)

    def check(self) -> None:
        """Compare it with its checksums."""
        self.stored.check_range(self.stride, self.start, self.numel)


class StatePlan:
    """What is loaded into an optimizer, and from where.

    Args:
        model: whose names.
        optimizer: that is loaded into.
        source: the checkpoint.

    Raises:
        CheckpointError: it is of other parameters, shapes or groups.
    """

    def __init__(self, model: nn.Module, optimizer: AdamW, source: Source) -> None:
        self.optimizer, self.engine, self.source = optimizer, optimizer.engine, source
        names = names_of(model, optimizer)
        self.names = {slot: names[p] for p, slot in self.engine.slot_of.items()}
        self.slot_of = {name: slot for slot, name in self.names.items()}
        # Others may leave out what cannot change, and know a tied parameter by another name.
        optional = {
            name for p, name in names.items() if p not in self.engine.slot_of or p.numel() == 0
        }
        first_name = {alias: names[p] for alias, p in names_in(model).items() if p in names}
        self.groups = _fitting_groups(
            named_groups(names, optimizer), _renamed(source, first_name), optional
        )
        saved = {first_name.get(name, name): fields for name, fields in source.state.items()}
        self.fields: dict[int, dict[str, Stored]] = {
            slot: saved.get(name, {}) for slot, name in self.names.items()
        }
        misfits = [text for slot in self.fields for text in self._misfits(slot)]
        if misfits:
            raise CheckpointError(
                f"{source.what}, {source.path}, has optimizer state of another model: "
                + "; ".join(misfits[:20])
                + (f"; and {len(misfits) - 20} more" if len(misfits) > 20 else "")
            )

    def _misfits(self, slot: int) -> Iterator[str]:
        name, fields = self.names[slot], self.fields[slot]
        slices = self.engine.gradients.shards.slices[slot]
        for field, stored in fields.items():
            if field == "step":
                continue
            wanted = slices.per_block(BLOCK).shape if field.endswith("_scale") else slices.shape
            if stored.shape != wanted:
                yield f"{field} of {name!r} has shape {stored.shape}, it must be {wanted}"
        needed = {"step", *MOMENT_NAMES}
        has_moments = not fields.keys().isdisjoint(MOMENT_NAMES)
        if has_moments and not needed <= {*fields, *self._options_of(slot)}:
            lacking = ", ".join(sorted(needed - fields.keys()))
            yield f"the state of {name!r} has no {lacking}, which AdamW's has"
        for moment in MOMENT_NAMES:
            if moment in fields and _is_codes(fields[moment]):
                if f"{moment}_scale" not in fields:
                    yield f"{moment} of {name!r} is in 8-bit codes without their scales"
                saved = self.source.strides.get(name, row_major(slices.shape))
                if saved != slices.stride:
                    yield (
                        f"{moment} of {name!r} is in 8-bit codes of a parameter with strides "
                        f"{saved}, which are {slices.stride} in the model: use the memory format "
                        "that it was saved with"
                    )

    def _options_of(self, slot: int) -> dict[str, Any]:
        """The saved options of a parameter's group; some optimizers count steps there."""
        return next((group for group in self.groups if self.names[slot] in group["params"]), {})

    def _step_of(self, slot: int, fields: Mapping[str, Stored]) -> Tensor:
        """[] fp32."""
        if "step" in fields:
            return fields["step"].read().reshape(()).float()
        counted = self._options_of(slot).get("step", 0) if fields else 0
        return torch.tensor(float(counted))

    def requests(self) -> Iterator[Request]:
        """What this rank will read."""
        rank = self.engine.transport.rank
        for slot, fields in self.fields.items():
            slices = self.engine.gradients.shards.slices[slot]
            for field, stored in fields.items():
                if field == "step":
                    yield Request.of_all(stored)
                    continue
                of_field = slices.per_block(BLOCK) if field.endswith("_scale") else slices
                for start, numel in of_field.by_rank[rank]:
                    yield Request(stored, of_field.stride, start, numel)

    def load(self, weights: Mapping[int, Stored] | None = None) -> None:
        """Read this rank's slices of the state.

        Args:
            weights: by slot, what the parameters themselves are read from, with their masters. None
                leaves the parameters, which have their values already.
        """
        new = [self.names[slot] for slot, fields in self.fields.items() if not fields]
        if new and self.engine.transport.is_first:
            logger.info(
                "%s has no state of %d parameters, like %r, which start with none",
                self.source.path,
                len(new),
                new[0],
            )
        for slot, fields in self.fields.items():
            self.engine.masters.forget_loaded(slot)
            self.engine.counters.views[slot].copy_(self._step_of(slot, fields))
            weight = None if weights is None else weights[slot]
            self._load_values(slot, fields, weight)
            for name in MOMENT_NAMES:  # one after the other: what is read is kept until forget()
                for piece, _, state in self._pieces(slot):
                    piece.set_moment(name, fields, state)
                for stored in fields.values():
                    stored.forget()
        self.optimizer.shown_state.show_all(self.optimizer.state)
        for group, saved in zip(self.optimizer.param_groups, self.groups, strict=True):
            group.update(
                {key: value for key, value in saved.items() if key not in ("params", "step")}
            )
        self.optimizer._consolidated.clear()

    def _pieces(self, slot: int) -> Iterator[tuple["_Piece", Tensor, dict[str, Tensor]]]:
        """Each range of this rank's slice, with its parameter and state."""
        stride = self.engine.gradients.shards.slices[slot].stride
        for start, numel, parameter, state in parts_of(self.engine, slot):
            yield _Piece(stride, start, numel, parameter.device), parameter, state

    def _load_values(self, slot: int, fields: Mapping[str, Stored], weight: Stored | None) -> None:
        fmt = self.engine.formats[self.engine.layout.slots[slot].arena]
        for piece, parameter, state in self._pieces(slot):
            if weight is not None:
                values = piece.exact(weight, fields)
                parameter.copy_(values)
                seed_master(values, parameter, state, fmt.master)
            elif "remainder" in fields:
                _set_remainder(piece.read(fields["remainder"]), parameter, state)
            elif "master" in fields:
                restore_master(piece.read(fields["master"]), parameter, state)
        for stored in (*fields.values(), *(() if weight is None else (weight,))):
            stored.forget()


class _Piece(NamedTuple):
    """A range of a parameter that is loaded at once, from a block on."""

    stride: tuple[int, ...]
    start: int
    numel: int
    device: torch.device

    def read(self, stored: Stored) -> Tensor:
        """[numel] in the file's dtype."""
        return stored.read_range(self.stride, self.start, self.numel).to(self.device)

    def exact(self, weight: Stored, fields: Mapping[str, Stored]) -> Tensor:
        """[numel] fp32: the weights with all bits that were saved of them."""
        if "master" in fields:
            return self.read(fields["master"]).float()
        values = self.read(weight)
        if "remainder" in fields and values.dtype == torch.bfloat16:
            return MASTERS["split"].load(values, {"remainder": self.read(fields["remainder"])})
        return values.float()

    def set_moment(self, name: str, fields: Mapping[str, Stored], state: dict[str, Tensor]) -> None:
        """Set one of the moments, bit for bit where it was saved in the same format."""
        if name not in fields:  # of a parameter that has had no gradient
            write_moment(name, torch.zeros(self.numel, device=self.device), state)
            return
        values = self.read(fields[name])
        if not _is_codes(fields[name]):
            write_moment(name, values.float(), state)
            return
        blocks = _Piece((1,), self.start // BLOCK, -(-self.numel // BLOCK), self.device)
        scales = blocks.read(fields[f"{name}_scale"])
        if state[name].dtype == values.dtype:
            state[name].copy_(values)
            state[f"{name}_scale"].copy_(scales)
        else:
            write_moment(name, read_moment(name, {name: values, f"{name}_scale": scales}), state)


def _set_remainder(low: Tensor, parameter: Tensor, state: dict[str, Tensor]) -> None:
    """Give a bfloat16 parameter, which is right, the lower halves of its masters."""
    if "remainder" in state:
        state["remainder"].copy_(low)
    elif "master" in state and parameter.dtype == torch.bfloat16:
        state["master"].copy_(MASTERS["split"].load(parameter, {"remainder": low}))


def _is_codes(stored: Stored) -> bool:
    return stored.dtype in (torch.int8, torch.uint8)


def _renamed(source: Source, first_name: Mapping[str, str]) -> Source:
    """The same with the names in its groups that we know parameters by."""
    groups = source.groups and [
        {**group, "params": [first_name.get(name, name) for name in group["params"]]}
        for group in source.groups
    ]
    return replace(source, groups=groups)


def _fitting_groups(
    ours: list[dict[str, Any]], source: Source, optional: set[str]
) -> list[dict[str, Any]]:
    """The saved options of each of our groups.

    Args:
        ours: our groups, with names.
        source: the checkpoint.
        optional: names in our groups that a checkpoint may leave out.

    Raises:
        CheckpointError: it has other parameters, or has them in other groups.
    """
    saved = source.groups
    if saved is None:
        raise CheckpointError(
            f"{source.what}, {source.path}, holds no optimizer state: load the weights with "
            "load_weights, or with the model's own load_state_dict"
        )
    if source.groups_are_by_name:
        saved = [_options_by_name(group, saved, source) for group in ours]
    for number in range(max(len(ours), len(saved))):
        mine = set(ours[number]["params"]) if number < len(ours) else set()
        other = set(saved[number]["params"]) if number < len(saved) else set()
        differing = sorted((mine - optional) ^ (other - optional))
        if differing:
            where = "the optimizer only" if differing[0] in mine else "the saved state only"
            raise CheckpointError(
                f"param group {number} of {source.what}, {source.path}, does not fit: "
                f"{len(differing)} parameters are in one of them, {differing[0]!r} in {where}"
            )
    if len(ours) != len(saved):
        raise CheckpointError(
            f"{source.what}, {source.path}, has {len(saved)} param groups, not {len(ours)}"
        )
    for group, options in zip(ours, saved, strict=True):
        check_group({**group, **options})
        _check_is_adamw(options, source)
        if "decoupled_weight_decay" in options:
            options["decoupled_weight_decay"] = True  # as it is from now on
    return saved


def _check_is_adamw(options: Mapping[str, Any], source: Source) -> None:
    """Raise where a group's options tell of another optimizer with the same state."""
    said = f"{source.what}, {source.path}, is of"
    if options.get("decoupled_weight_decay", True) is not True and options["weight_decay"]:
        raise CheckpointError(f"{said} Adam, which adds weight decay to gradients; AdamW does not")
    is_of_torch = "decoupled_weight_decay" in options
    if options and ("eps" not in options or (is_of_torch and "amsgrad" not in options)):
        raise CheckpointError(
            f"{said} an optimizer with the options {', '.join(sorted(options))}, which are not "
            "AdamW's: load the weights alone"
        )


def _options_by_name(
    group: dict[str, Any], saved: list[dict[str, Any]], source: Source
) -> dict[str, Any]:
    """Options that were saved for each parameter, which must be the same for all of a group."""
    by_name = {name: options for options in saved for name in options["params"]}
    found = [by_name[name] for name in group["params"] if name in by_name]
    options = [{k: v for k, v in options.items() if k != "params"} for options in found]
    if any(other != options[0] for other in options):
        raise CheckpointError(
            f"{source.what}, {source.path}, has different options for parameters of one param "
            f"group, like {group['params'][0]!r}: group them as they were saved"
        )
    names = [name for name in group["params"] if name in by_name]
    return {**(options[0] if options else {}), "params": names}
