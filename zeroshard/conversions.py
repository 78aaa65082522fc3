"""How state in a format is read as fp32 values and written back. Decides nothing about when."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .layout import BLOCK
from .triton_kernels.adamw import LARGEST_V
from .triton_kernels.cast import join_master, split_master
from .triton_kernels.quantize import (
    decode_first_twin,
    decode_second_twin,
    encode_first_twin,
    encode_second_twin,
    exact_sqrt,
)

__all__ = [
    "MASTERS",
    "exact_master",
    "read_moment",
    "reread_master",
    "restore_master",
    "seed_master",
    "write_moment",
]


@dataclass(frozen=True, slots=True)
class Master:
    """How an fp32 master is read from its format, and written back with the parameter."""

    load: Callable[[Tensor, dict[str, Tensor]], Tensor]  # (parameter, state) -> [n] fp32
    store: Callable[[Tensor, Tensor, dict[str, Tensor]], None]  # (master, parameter, state)


def _load_split(high: Tensor, state: dict[str, Tensor]) -> Tensor:
    master = torch.empty(high.numel(), dtype=torch.float32, device=high.device)
    join_master(high, state["remainder"], master)
    return master


def _store_split(master: Tensor, high: Tensor, state: dict[str, Tensor]) -> None:
    split_master(master, high, state["remainder"])


def _store_cast(master: Tensor, parameter: Tensor, state: dict[str, Tensor]) -> None:
    parameter.copy_(master)


MASTERS = {
    "param": Master(lambda parameter, state: parameter, lambda master, parameter, state: None),
    "split": Master(_load_split, _store_split),
    "fp32": Master(lambda parameter, state: state["master"], _store_cast),
    "none": Master(lambda parameter, state: parameter.float(), _store_cast),
}


def seed_master(values: Tensor, parameter: Tensor, state: dict[str, Tensor], master: str) -> None:
    """Start the masters from `values` [n] fp32 and give `parameter` [n] their rounding."""
    if "master" in state:
        state["master"].copy_(values)
    MASTERS[master].store(values, parameter, state)


def reread_master(parameter: Tensor, state: dict[str, Tensor], written: Tensor) -> None:
    """Take over what was written to a parameter.

    Args:
        parameter: [n], this rank's elements.
        state: their state.
        written: [n] bool, elements that may have been written to: a split master loses its lower
            half there. An fp32 master tells by itself: it changes where the parameter is not its
            rounding any more.
    """
    if "remainder" in state:
        state["remainder"].masked_fill_(written, 0)
    if "master" in state:
        master = state["master"]
        changed = master.to(parameter.dtype) != parameter
        master.copy_(torch.where(changed, parameter.float(), master))


def exact_master(parameter: Tensor, state: dict[str, Tensor]) -> Tensor | None:
    """[n] fp32 copy of the master where it says more than the parameter, else None."""
    if "remainder" in state:
        return _load_split(parameter, state)
    return state["master"].clone() if "master" in state else None


def restore_master(values: Tensor, parameter: Tensor, state: dict[str, Tensor]) -> None:
    """Set masters to `values` [n] fp32, for a parameter that holds their rounding already.

    Where it does not, the parameter was changed since and stands. A split master rounds ties away
    from zero: of a parameter that was rounded to even from a tie it keeps the nearest value that
    it can, one fp32 step beside.
    """
    if "master" in state:
        rounded = values.to(parameter.dtype) == parameter
        state["master"].copy_(torch.where(rounded, values, parameter.float()))
    if "remainder" in state:
        distance = values.view(torch.int32).long() - (parameter.float().view(torch.int32).long())
        near = distance.abs() <= 32768
        state["remainder"].copy_(torch.where(near, distance.clamp(-32768, 32767), 0))


def read_moment(name: str, state: Mapping[str, Tensor]) -> Tensor:
    """[n] fp32: the values of `exp_avg` or `exp_avg_sq`.

    Args:
        name: which.
        state: [n] stored values, and for 8-bit moments the [ceil(n / 256)] scales of their blocks.
    """
    stored = state[name]
    if f"{name}_scale" not in state:
        return stored.float()
    decode = decode_first_twin if name == "exp_avg" else decode_second_twin
    codes = _whole_blocks(stored)
    return decode(codes, state[f"{name}_scale"])[: stored.numel()]


def write_moment(name: str, values: Tensor, state: Mapping[str, Tensor]) -> None:
    """Store [n] fp32 values, rounded to the nearest that the format has; see `read_moment`.

    What was read from 8-bit or bf16 moments is written as the same bits, but for second moments
    of 8 bits below 1e-36, whose squares lose bits.
    """
    stored = state[name]
    if f"{name}_scale" not in state:
        stored.copy_(values)
        return
    values = _whole_blocks(values)
    codes = torch.empty_like(values, dtype=stored.dtype)
    scales = state[f"{name}_scale"]
    if name == "exp_avg":
        encode_first_twin(values, codes, scales)
    else:
        encode_second_twin(exact_sqrt(values.clamp(max=LARGEST_V)), codes, scales)
    stored.copy_(codes[: stored.numel()])


def _whole_blocks(flat: Tensor) -> Tensor:
    """`flat`, padded with zeros to a multiple of 256 elements."""
    missing = -flat.numel() % BLOCK
    return torch.cat((flat, flat.new_zeros(missing))) if missing else flat
