"""torch's param groups: what may stand in them, names for their parameters, a description.

Reads them only.
"""

import operator
from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from .errors import ConfigError

__all__ = [
    "Membership",
    "check_group",
    "describe_groups",
    "describe_others",
    "frozen_parameters",
    "in_forward_order",
    "other_tensors",
]


class Membership:
    """Which parameters are in which group, and whether that has changed.

    Lists may be replaced, and parameters moved, at any time, as by trainers that resume.
    """

    def __init__(self) -> None:
        self.members: list[nn.Parameter] = []
        self._lengths: list[int] = []

    def has_changed(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Whether it has since the last question."""
        lengths = [len(group["params"]) for group in groups]
        members = [*chain.from_iterable(group["params"] for group in groups)]
        same = lengths == self._lengths and all(map(operator.is_, members, self.members))
        self.members, self._lengths = members, lengths
        return not same


def check_group(group: dict[str, Any]) -> None:
    """What torch's constructor checks, for every group, and what only torch's AdamW can do."""
    beta1, beta2 = group["betas"]
    for name, value, expected, valid in (
        ("lr", group["lr"], "at least 0", float(group["lr"]) >= 0),
        ("eps", group["eps"], "at least 0", group["eps"] >= 0),
        ("betas[0]", beta1, "from 0 to below 1", 0 <= beta1 < 1),
        ("betas[1]", beta2, "from 0 to below 1", 0 <= beta2 < 1),
        ("weight_decay", group["weight_decay"], "at least 0", group["weight_decay"] >= 0),
    ):
        if not valid:
            raise ConfigError(f"Invalid {name}: expected a number {expected}, got {value}")
    if group["amsgrad"]:
        raise ConfigError(
            "amsgrad=True is not supported, its third moment is not sharded: use amsgrad=False, "
            "or torch.optim.AdamW"
        )
    if group["differentiable"]:
        raise ConfigError(
            "differentiable=True is not supported, the update runs outside of autograd: use "
            "differentiable=False, or torch.optim.AdamW"
        )


def in_forward_order(
    groups: Sequence[dict[str, Any]], model: nn.Module | None
) -> list[tuple[str, nn.Parameter]]:
    """Trainable parameters of all groups with names; in the module's order where it is known."""
    named = {
        parameter: group["param_names"][index]
        if "param_names" in group
        else f"param_groups[{number}].params[{index}]"
        for number, group in enumerate(groups)
        for index, parameter in enumerate(group["params"])
    }
    ordered = {}
    if model is not None:
        ordered = {p: name for name, p in model.named_parameters() if p in named}
    return [(name, p) for p, name in {**ordered, **named, **ordered}.items() if p.requires_grad]


def not_trained_yet(
    groups: Sequence[dict[str, Any]],
    known: Collection[nn.Parameter],
    model: nn.Module | None,
) -> list[tuple[str, nn.Parameter]]:
    """Trainable parameters of groups that are not in `known`, with names; in the groups' order."""
    found = {
        parameter: f"param_groups[{number}].params[{index}]"
        for number, group in enumerate(groups)
        for index, parameter in enumerate(group["params"])
        if parameter.requires_grad and parameter not in known
    }
    if found and model is not None:
        found.update({p: name for name, p in model.named_parameters() if p in found})
    return [(name, parameter) for parameter, name in found.items()]


def other_tensors(parameters: Sequence[nn.Parameter], model: nn.Module | None) -> list[Tensor]:
    """What the optimizer does not train: frozen parameters, and the rest of the module."""
    others: list[Tensor] = [p for p in parameters if not p.requires_grad]
    if model is not None:
        trained = {p for p in parameters if p.requires_grad}
        others += [*(p for p in model.parameters() if p not in trained), *model.buffers()]
    return list(dict.fromkeys(others))


def frozen_parameters(
    model: nn.Module, trainable: Collection[nn.Parameter]
) -> list[tuple[str, nn.Parameter]]:
    """The parameters of a module, with names, that can be sharded though they are not trained.

    Others (quantised ones, of dtypes or classes of their own) stay as they are.
    """
    return [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter not in trainable
        and type(parameter) is nn.Parameter
        and parameter.dtype in (torch.float32, torch.bfloat16, torch.float16)
    ]


def describe_groups(groups: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Every group in words, for the comparison of ranks."""
    options = ("lr", "betas", "eps", "weight_decay", "maximize")
    return {
        f"param group {number}": ", ".join(
            [f"{len(group['params'])} parameters", *(f"{k}={_plain(group[k])}" for k in options)]
        )
        for number, group in enumerate(groups)
    }


def describe_others(tensors: Iterable[Tensor]) -> dict[str, str]:
    """Tensors that are only taken from the first rank, in words."""
    return {
        f"frozen parameter or buffer {number}": f"shape {tuple(tensor.shape)}, {tensor.dtype}"
        for number, tensor in enumerate(tensors)
    }


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, Tensor) else value
