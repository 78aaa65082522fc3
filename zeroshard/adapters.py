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
    "tuned_weight",
]

_COPIES = re.compile(r"\.((base_layer|original_module|modules_to_save\.[^.]+)\.)+")


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
    return _COPIES.sub(".", name)


def tuned_weight(layer: Any) -> nn.Parameter:
    """The plain model's weight that a tuned layer adds to.

    Raises:
        ConfigError: an active adapter of a kind whose part is not simply added to one weight.
    """
    inner = layer.base_layer
    while hasattr(inner, "base_layer"):  # several parameters of one module, as of experts
        inner = inner.base_layer
    weight = getattr(inner, getattr(layer, "parameter_name", "weight"), None)
    for name in _active(layer):
        is_plain = (
            name in _adapter_names(layer)
            and hasattr(layer, "get_delta_weight")
            and name not in getattr(layer, "lora_variant", ())
            and not getattr(layer, "lora_bias", {}).get(name)
        )
        if not is_plain or not isinstance(weight, nn.Parameter):
            raise ConfigError(
                f"adapter {name!r} of {type(layer).__module__}.{type(layer).__name__} cannot be "
                "merged on the fly (plain LoRA can): merge it with PEFT inside of "
                "zeroshard.gather(model, writeback=True)"
            )
    return weight if isinstance(weight, nn.Parameter) else next(inner.parameters())


def _active(layer: Any) -> list[str]:
    """The adapters of a layer that have a part in what it computes, beside its weight."""
    if getattr(layer, "disable_adapters", False):
        return []
    has = {name for part in layer.adapter_layer_names for name in getattr(layer, part, ())}
    return [name for name in layer.active_adapters if name in has - set(layer.merged_adapters)]


def merged_weight(layer: Any, weight: Tensor) -> Tensor:
    """A tuned layer's whole weight with the active adapters' part added, as PEFT's `merge` does."""
    with torch.no_grad():
        for name in _active(layer):
            weight = (weight + layer.get_delta_weight(name)).to(weight.dtype)
    return weight
