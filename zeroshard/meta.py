"""Parameters that leave the meta device as the same objects. Knows no arena."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from .errors import ConfigError

__all__ = ["give_elements", "leave_meta", "return_to_meta"]


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
            values.untyped_storage().resize_(0)
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
    """Memory of its own, full of NaN (zeros, where the dtype has none)."""
    values = torch.empty_strided(
        parameter.shape, parameter.stride(), dtype=parameter.dtype, device=parameter.device
    )
    parameter.data = values.fill_(torch.nan if values.is_floating_point() else 0)


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
