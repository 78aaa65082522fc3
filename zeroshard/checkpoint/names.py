"""What a checkpoint calls things, and what may be in it. Reads and writes nothing."""

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError
from ..optimizer import AdamW
from ..shard_tensor import ShardTensor
from ..wrappers import strip_wrappers, unwrap

__all__ = ["CODES", "named_groups", "names_of", "plain", "saved_name", "unwrapped"]

READABLE = (bool, int, float, complex, str, bytes, type(None), torch.dtype)
MAPPINGS = (dict, OrderedDict, Counter)

# 8-bit codes have a name of their own, so that nobody takes them for values.
CODES = {"exp_avg": "exp_avg_codes", "exp_avg_sq": "exp_avg_sq_codes"}


def saved_name(field: str, dtype: torch.dtype) -> str:
    """What a field of optimizer state is called in a file."""
    return CODES.get(field, field) if dtype in (torch.int8, torch.uint8) else field


def unwrapped(optimizer: Any) -> AdamW:
    """Our optimizer, from inside of whatever holds it as `.optimizer`.

    Raises:
        ConfigError: there is none.
    """
    inner = optimizer
    while not isinstance(inner, AdamW):
        inner = getattr(inner, "optimizer", None)
        if inner is None:
            raise ConfigError(f"expected a zeroshard.AdamW, got {type(optimizer).__name__}")
    return inner


def names_of(model: nn.Module, optimizer: AdamW) -> dict[nn.Parameter, str]:
    """Name of every parameter of the optimizer, without what wrappers add.

    Raises:
        ConfigError: the model does not have one of them.
    """
    names = {p: strip_wrappers(name) for name, p in unwrap(model).named_parameters()}
    ours = [p for group in optimizer.param_groups for p in group["params"]]
    strange = [tuple(p.shape) for p in ours if p not in names]
    if strange:
        raise ConfigError(
            f"{len(strange)} parameters of the optimizer, the first of shape {strange[0]}, are "
            f"not in this {type(model).__name__}: pass the model that it trains"
        )
    return {p: names[p] for p in ours}


def named_groups(names: Mapping[nn.Parameter, str], optimizer: AdamW) -> list[dict[str, Any]]:
    """The param groups with names instead of parameters."""
    return [
        {**group, "params": [names[p] for p in group["params"]]} for group in optimizer.param_groups
    ]


def plain(value: Any, what: str) -> Any:
    """A value as it can be read again without running code, numbers of numpy as Python's.

    Raises:
        ConfigError: it cannot; `what` names it.
    """
    if type(value).__module__ == "numpy" and value.shape == ():
        value = value.item()
    if type(value) in MAPPINGS:
        return type(value)({plain(k, what): plain(v, f"{k!r} of {what}") for k, v in value.items()})
    if type(value) in (list, tuple):
        return type(value)(plain(entry, what) for entry in value)
    if type(value) in (torch.Tensor, nn.Parameter):
        return _plain_tensor(value.detach(), what)
    if isinstance(value, ShardTensor) or type(value) in READABLE:
        return value
    raise ConfigError(
        f"{what} is a {type(value).__name__}, which would have to be read as code: save numbers, "
        "strings, tensors, and lists and dictionaries of these"
    )


def _plain_tensor(tensor: torch.Tensor, what: str) -> torch.Tensor:
    if tensor.layout != torch.strided or tensor.is_meta:
        kind = "has no values" if tensor.is_meta else f"is {tensor.layout}"
        raise ConfigError(f"{what} is a tensor that {kind}: save a dense one with values")
    if tensor.untyped_storage().nbytes() > tensor.nbytes:  # a view, which is saved with all of that
        return tensor.clone()
    return tensor
