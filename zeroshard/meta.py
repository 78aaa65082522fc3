"""Parameters that leave the meta device as the same objects. Knows no arena."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from .errors import ConfigError
from .ownership import resize

__all__ = ["give_elements", "is_untouched", "leave_meta", "return_to_meta", "untouched_value"]


def leave_meta(parameters: Iterable[Tensor], device: torch.device) -> list[nn.Parameter]:
    """Move the meta parameters among `parameters` to `device`, as the same objects.

    They keep shape and strides, but have no elements to read until an arena holds them, or
    `give_elements` gives them some.

    Returns:
        Those that were on the meta device and have elements.

    Raises:
        ConfigError: something holds one in a way that forbids that.
    """
    moved: list[nn.Parameter] = []
    for parameter in dict.fromkeys(parameters):
        if isinstance(parameter, nn.Parameter) and parameter.is_meta:
            values = torch.empty_strided(
                parameter.shape, parameter.stride(), dtype=parameter.dtype, device=device
            )
            resize(values.untyped_storage(), 0)
            try:
                _exchange(parameter, values)
            except BaseException:
                return_to_meta(moved)
                raise
            moved.append(parameter)
    return [parameter for parameter in moved if parameter.numel()]


def return_to_meta(parameters: Iterable[nn.Parameter]) -> None:
    """Undo `leave_meta` for those that have no elements yet."""
    for parameter in parameters:
        if parameter.untyped_storage().nbytes() == 0:
            _exchange(parameter, torch.empty_like(parameter.data, device="meta"))


def give_elements(parameter: nn.Parameter) -> None:
    """Memory of its own, full of NaN (the least number, where the dtype has none)."""
    values = torch.empty_strided(
        parameter.shape, parameter.stride(), dtype=parameter.dtype, device=parameter.device
    )
    parameter.data = values.fill_(untouched_value(values.dtype))


def _exchange(parameter: nn.Parameter, values: Tensor) -> None:
    """Put `values` on another device into a parameter; `.data =` refuses the meta device."""
    other = nn.Parameter(values, requires_grad=parameter.requires_grad)
    other.__class__, other.__dict__ = parameter.__class__, dict(parameter.__dict__)
    try:
        torch.utils.swap_tensors(parameter, other)
    except RuntimeError as error:
        raise ConfigError(
            "a parameter on the meta device cannot be given memory, since something refers to it "
            f"({error}): build the optimizer right after the model"
        ) from error


def untouched_value(dtype: torch.dtype) -> float:
    """What fresh memory is filled with, to see whether anybody wrote to it."""
    if dtype.is_floating_point or dtype.is_complex:
        return math.nan
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min


def is_untouched(tensor: Tensor) -> bool:
    """Whether a tensor is still what fresh memory was filled with."""
    value = untouched_value(tensor.dtype)
    return (
        bool((tensor.isnan() if value != value else tensor == value).all()) and tensor.numel() > 0
    )
