"""What a checkpoint holds, as other values: fp32 moments, whole masters, weights in another dtype.

Each is a `Stored` too, which reads what it is made of when it is read itself.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..boxes import row_major
from ..conversions import exact_master, read_moment
from ..errors import CheckpointError
from ..formats import MOMENT_NAMES
from ..layout import BLOCK
from .pieces import Ordered
from .source import PerRank, Source, Stored

__all__ = [
    "cast",
    "groups_of",
    "master_of",
    "moment_of",
    "ordered_of",
    "others_of",
    "state_of",
    "weights_of",
]


def cast(stored: Stored, dtype: torch.dtype | None) -> Stored:
    """A tensor's values in another dtype; None: in its own."""
    return stored if dtype in (None, stored.dtype) else _Cast(stored, dtype)


def moment_of(entry: Mapping[str, Stored], name: str) -> Stored:
    """The fp32 values of `exp_avg` or `exp_avg_sq`, in whatever format it is."""
    scale = entry.get(f"{name}_scale")
    return cast(entry[name], torch.float32) if scale is None else _Moment(entry[name], scale, name)


def master_of(weight: Stored | None, entry: Mapping[str, Stored]) -> Stored | None:
    """The exact fp32 values of a parameter, where they are known apart from its weight."""
    if "master" in entry:
        return cast(entry["master"], torch.float32)
    if "remainder" in entry and weight is not None:
        return _Joined(weight, entry["remainder"])
    return None


def ordered_of(source: Source, weights: Mapping[str, Stored]) -> dict[str, Ordered]:
    """Weights with the strides that they were saved with; tied ones stay one object."""
    made: dict[int, Ordered] = {}
    for name, stored in weights.items():
        stride = source.strides.get(name, row_major(stored.shape))
        made.setdefault(id(stored), Ordered(stored, stride))
    return {name: made[id(stored)] for name, stored in weights.items()}


def weights_of(source: Source, dtype: torch.dtype | None) -> dict[str, Stored]:
    """The weights by name, floats in `dtype`; where that is fp32 the masters, if there are any.

    Tied ones stay one `Stored`. What has a master and no weight has it as its weight.
    """
    state = source.state if dtype == torch.float32 and has_state(source) else {}
    entry_of = {id(source.weights[name]): state[name] for name in source.weights if name in state}
    made: dict[int, Stored] = {}
    weights: dict[str, Stored] = {}
    for name, stored in source.weights.items():
        if id(stored) not in made:
            exact = master_of(stored, entry_of.get(id(stored), {}))
            wanted = dtype if stored.dtype.is_floating_point else None
            made[id(stored)] = exact if exact is not None else cast(stored, wanted)
        weights[name] = made[id(stored)]
    for name, entry in source.state.items() if has_state(source) else ():
        master = master_of(None, entry)
        if name not in weights and master is not None:
            weights[name] = cast(master, dtype)
    return weights


def has_state(source: Source) -> bool:
    """Whether it has state under names."""
    try:
        return bool(source.state)
    except CheckpointError:
        return False


def state_of(source: Source, weights: Mapping[str, Stored]) -> dict[str, dict[str, Ordered]]:
    """The optimizer's state by name: fp32 moments, and masters where the weights are less exact.

    All with the strides of their parameter, as torch's optimizers make them.

    Args:
        source: the checkpoint.
        weights: as they will be written.
    """
    state: dict[str, dict[str, Ordered]] = {}
    for name, entry in source.state.items():
        values = {"step": entry["step"]} if "step" in entry else {}
        for moment in MOMENT_NAMES:
            if moment in entry:
                values[moment] = moment_of(entry, moment)
        master = master_of(source.weights.get(name), entry)
        if master is not None and weights[name].dtype != torch.float32:
            values["master"] = master
        state[name] = {
            field: Ordered(value, source.strides.get(name, row_major(value.shape)))
            for field, value in values.items()
        }
        if "step" in values:
            state[name]["step"] = Ordered(values["step"], ())
    return state


def groups_of(source: Source) -> list[dict[str, Any]]:
    """The param groups with all options that torch's AdamW has.

    Raises:
        CheckpointError: the checkpoint has none.
    """
    if source.groups is None:
        raise CheckpointError(
            f"{source.path}: expected the state of an optimizer, and it has weights only: convert "
            "it to safetensors"
        )
    if source.groups_are_by_name:
        raise CheckpointError(
            f"{source.path}: expected param groups, and it has options for each parameter, which "
            "do not tell groups nor order: load it with zeroshard.load_checkpoint and save it anew"
        )
    defaults = torch.optim.AdamW([torch.nn.Parameter(torch.empty(0))]).defaults
    return [{**defaults, **group} for group in source.groups]


def others_of(source: Source) -> dict[str, Any]:
    """What else goes on with the training, by the name that it has in the file.

    Raises:
        CheckpointError: two things of one name, or gradients, which only our own format keeps.
    """
    if source.gradients:
        raise CheckpointError(
            f"{source.path}: expected a checkpoint from between two steps, and it holds gradients "
            "that wait for one, which other formats have no place for: load it, make the step, and "
            "save it anew"
        )
    others = {"step": source.step, "scheduler": source.scheduler}
    taken = sorted(source.extra.keys() & {"model", "optimizer", *others})
    if taken:
        raise CheckpointError(
            f"{source.path}: {taken[0]!r} is the name of an extra value, and must be that of "
            "something else in the format: save it under another one"
        )
    others.update({key: _plain(value) for key, value in source.extra.items()})
    return {key: value for key, value in others.items() if value is not None}


def _plain(value: Any) -> Any:
    """A value without classes of ours."""
    if isinstance(value, PerRank):
        return [_plain(entry) for entry in value]
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return value


class _Cast(Stored):
    """Values, rounded to another dtype."""

    def __init__(self, stored: Stored, dtype: torch.dtype) -> None:
        super().__init__(stored.shape, dtype, stored.file)
        self.stored = stored

    def read_range(self, stride: tuple[int, ...], start: int, numel: int) -> Tensor:
        return self.stored.read_range(stride, start, numel).to(self.dtype)

    def forget(self) -> None:
        self.stored.forget()


class _Moment(Stored):
    """The values of 8-bit codes and the scales of their blocks."""

    def __init__(self, codes: Stored, scale: Stored, name: str) -> None:
        super().__init__(codes.shape, torch.float32, codes.file)
        self.codes, self.scale, self.moment = codes, scale, name

    def read_range(self, stride: tuple[int, ...], start: int, numel: int) -> Tensor:
        first, last = start // BLOCK, -(-(start + numel) // BLOCK)
        stop = min(last * BLOCK, self.numel)
        codes = self.codes.read_range(stride, first * BLOCK, stop - first * BLOCK)
        scale = self.scale.read_range((1,), first, last - first)
        values = read_moment(self.moment, {self.moment: codes, f"{self.moment}_scale": scale})
        return values[start - first * BLOCK :][:numel]

    def forget(self) -> None:
        self.codes.forget()
        self.scale.forget()


class _Joined(Stored):
    """Masters of which the weights are the upper halves."""

    def __init__(self, weight: Stored, remainder: Stored) -> None:
        super().__init__(weight.shape, torch.float32, weight.file)
        self.weight, self.remainder = weight, remainder

    def read_range(self, stride: tuple[int, ...], start: int, numel: int) -> Tensor:
        high = self.weight.read_range(stride, start, numel)
        low = self.remainder.read_range(stride, start, numel)
        master = exact_master(high, {"remainder": low})
        assert master is not None
        return master

    def forget(self) -> None:
        self.weight.forget()
        self.remainder.forget()
