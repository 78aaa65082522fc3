"""What PEFT's adapters make of a model: whose parameters are whose, and under which names.

By what PEFT's modules have, so that PEFT need not be installed. Changes nothing.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .errors import ConfigError

__all__ = [
    "adapter_parameters",
    "idle_copies",
    "is_adapted",
    "is_tuned",
    "merged_weight",
    "plain_name",
    "reset_adapters",
    "tuned_layers",
]

_COPIES = re.compile(r"\.modules_to_save\.[^.]+\.")


def is_adapted(model: nn.Module) -> bool:
    """Whether a model is one that PEFT wraps."""
    return hasattr(model, "peft_config") and hasattr(model, "base_model")


def is_tuned(layer: Any) -> bool:
    """Whether a layer has adapters."""
    return hasattr(layer, "adapter_layer_names") and hasattr(layer, "base_layer")


def tuned_layers(model: nn.Module) -> Iterator[Any]:
    """The layers that have adapters."""
    return filter(is_tuned, model.modules())


def reset_adapters(layer: Any, configs: Mapping[str, Any]) -> None:
    """Initialise a layer's adapters, as their configurations say."""
    for name in _adapter_names(layer):
        how = getattr(configs.get(name), "init_lora_weights", True)
        layer.reset_lora_parameters(name, how)


def _adapter_names(layer: Any) -> set[str]:
    return {name for part in ("lora_A", "lora_embedding_A") for name in getattr(layer, part, ())}


def adapter_parameters(model: nn.Module) -> set[nn.Parameter]:
    """The parameters that adapters add, which the plain model does not have."""
    found: set[nn.Parameter] = set()
    for layer in tuned_layers(model):
        for name in layer.adapter_layer_names:
            part = getattr(layer, name, None)
            if isinstance(part, nn.Module):
                found.update(part.parameters())
    return found


def idle_copies(model: nn.Module) -> set[nn.Parameter]:
    """Originals that PEFT trains a copy of (`modules_to_save`), and copies that are not active."""
    found: set[nn.Parameter] = set()
    for wrapper in model.modules():
        copies: Any = getattr(wrapper, "modules_to_save", None)
        original: Any = getattr(wrapper, "original_module", None)
        if isinstance(copies, nn.ModuleDict) and isinstance(original, nn.Module):
            every = dict(copies)
            active: Any = getattr(wrapper, "active_adapters", ())
            used = next((every[name] for name in active if name in every), original)
            for module in (original, *every.values()):
                if module is not used:
                    found.update(module.parameters())
    return found


def plain_name(name: str) -> str:
    """What a tensor of an adapted model is called in the plain one.

    A copy that PEFT trains instead of the original (`modules_to_save`) has the original's name.
    """
    name = name.removeprefix("base_model.model.")
    name = name.replace(".base_layer.", ".").replace(".original_module.", ".")
    return _COPIES.sub(".", name)


def merged_weight(layer: Any) -> Tensor:
    """A tuned layer's weight with the active adapters' part added; all of them must be whole.

    Raises:
        ConfigError: adapters of a kind whose part is not simply added.
    """
    weight: Tensor = layer.base_layer.weight
    active = [name for name in layer.active_adapters if name not in layer.merged_adapters]
    special = [
        name
        for name in active
        if name in getattr(layer, "lora_variant", ()) or getattr(layer, "lora_bias", {}).get(name)
    ]
    if special or not hasattr(layer, "get_delta_weight"):
        raise ConfigError(
            f"{type(layer).__name__} has adapters that cannot be merged on the fly (plain LoRA "
            "can): merge them with PEFT inside of zeroshard.gather(model, writeback=True)"
        )
    with torch.no_grad():
        for name in active:
            if name in _adapter_names(layer):
                weight = (weight + layer.get_delta_weight(name)).to(weight.dtype)
    return weight
