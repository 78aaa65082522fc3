"""What a plan knows of a model: its parameters by name, and its numbers where they are known.

From a preset's name, an HF `config.json`, `package.module:function` or a module, which may be on
the meta device. Reads no weights, asks no hub.
"""

import importlib
import json
import math
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError
from ..layout import KEPT_WHOLE, ParamSpec
from ..parameters import describe_parameter
from ..units import plan_units
from . import architectures
from .architectures import FAMILIES, Architecture
from .presets import preset

__all__ = ["DTYPES", "ModelShape", "build_on_meta", "function_of", "shape_of"]

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
SHARDED = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A model without its values.

    Attributes:
        name: for people.
        trained: the parameters that are trained, each once, in the module's order; `unit` is that
            of stage 3.
        frozen: those that are not, and can be sharded.
        others_nbytes: bytes of parameters that can be neither (quantised ones, say).
        buffers_nbytes: bytes of the module's buffers.
        lookups: units whose backward reads no parameter.
        architecture: its numbers, where activations are known.
        notes: what a reader must know of it.
    """

    name: str
    trained: tuple[ParamSpec, ...]
    frozen: tuple[ParamSpec, ...] = ()
    others_nbytes: int = 0
    buffers_nbytes: int = 0
    lookups: frozenset[str] = frozenset()
    architecture: Architecture | None = None
    notes: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        """Parameters, those that are frozen included."""
        return sum(spec.numel for spec in (*self.trained, *self.frozen))


def shape_of(
    model: "str | Path | nn.Module | Architecture | ModelShape",
    *,
    dtype: str | None = None,
    units: Iterable[type[nn.Module] | str] | None = None,
) -> ModelShape:
    """The shape of a model.

    Args:
        model: a preset's name, a path to a `config.json` or to a folder with one,
            "package.module:function" (without arguments, built on the meta device), or a module.
        dtype: "bf16", "fp16" or "fp32". None: bf16, and for a module its own.
        units: as `zeroshard.AdamW(units=...)`, for modules.

    Raises:
        ConfigError: there is no such model, or its numbers are impossible.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
    if isinstance(model, ModelShape):
        return model
    if isinstance(model, nn.Module):
        return _of_module(model, type(model).__name__, dtype, units)
    if isinstance(model, Architecture):
        return _of_architecture(model, model.family, DTYPES[dtype or "bf16"])
    text = str(model)
    if ":" in text and not Path(text).exists():
        built = build_on_meta(text)
        return _of_module(built, text, dtype, units)
    path = Path(text)
    if path.is_dir() and (path / "config.json").exists():
        path = path / "config.json"
    if path.suffix == ".json" or path.is_file():
        return _of_config(path, dtype, units)
    return _of_architecture(preset(text).architecture, text, DTYPES[dtype or "bf16"])


def _of_architecture(architecture: Architecture, name: str, dtype: str) -> ModelShape:
    unit_of, lookups = architectures.units(architecture)
    specs = tuple(
        ParamSpec(
            name=parameter,
            shape=shape,
            stride=_contiguous(shape),
            dtype=dtype,
            device="cpu",
            unit=KEPT_WHOLE if math.prod(shape) == 1 else unit_of[parameter],
        )
        for parameter, shape in architectures.parameters(architecture)
    )
    return ModelShape(
        name=name,
        trained=specs,
        buffers_nbytes=architectures.buffers_nbytes(architecture),
        lookups=lookups,
        architecture=architecture,
    )


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _of_config(
    path: Path, dtype: str | None, units: Iterable[type[nn.Module] | str] | None
) -> ModelShape:
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a readable config.json: {error}") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise ConfigError(f"{path} is not a model's config.json: it names no model_type")
    if config["model_type"] in FAMILIES:
        try:
            return _of_architecture(
                architectures.from_config(config), str(path), DTYPES[dtype or "bf16"]
            )
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
    try:
        import transformers
    except ImportError:
        raise ConfigError(
            f"{path} is of a {config['model_type']} model; without transformers, only "
            f"{', '.join(FAMILIES)} are known: pip install transformers"
        ) from None
    values = {key: value for key, value in config.items() if key != "model_type"}
    try:
        settings = transformers.AutoConfig.for_model(config["model_type"], **values)
        with torch.device("meta"):
            module = transformers.AutoModelForCausalLM.from_config(settings)
    except Exception as error:
        raise ConfigError(f"transformers cannot build the model of {path}: {error}") from error
    return _of_module(module, str(path), dtype or "bf16", units)


def function_of(text: str) -> Callable[[], Any]:
    """The function that "package.module:function" names.

    Raises:
        ConfigError: there is none.
    """
    module_name, _, function_name = text.partition(":")
    sys.path.insert(0, "")  # as for python -m: what lies in the current directory
    try:
        function: Callable[[], Any] = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{text!r} names no function that can be imported ({error}): pass package.module:"
            "function, a function without arguments that returns a module"
        ) from error
    finally:
        with suppress(ValueError):
            sys.path.remove("")
    return function


def build_on_meta(text: str) -> nn.Module:
    """The module that "package.module:function" returns, built without memory.

    It may return a pair, of the module and what gives its batches.

    Raises:
        ConfigError: there is no such function, it fails, or it returns something else.
    """
    function = function_of(text)
    try:
        with torch.device("meta"):
            built = function()
    except Exception as error:
        raise ConfigError(
            f"{text} failed on the meta device: {type(error).__name__}: {error}"
        ) from error
    if isinstance(built, tuple) and len(built) == 2:
        built = built[0]
    if not isinstance(built, nn.Module):
        raise ConfigError(f"{text} must return a torch.nn.Module, got {type(built).__name__}")
    return built


def _of_module(
    module: nn.Module,
    name: str,
    dtype: str | None,
    units: Iterable[type[nn.Module] | str] | None,
) -> ModelShape:
    plan = plan_units(module, None if units is None else tuple(units))
    trained, frozen, others_nbytes = [], [], 0
    for path, parameter in module.named_parameters():
        stored = parameter.dtype
        if dtype is not None and stored.is_floating_point:
            stored = getattr(torch, DTYPES[dtype])
        is_kept = parameter.numel() == 1 or parameter in plan.read_outside
        unit = KEPT_WHOLE if is_kept else plan.unit_of[parameter]
        spec = describe_parameter(path, parameter, stored, unit)
        if parameter.requires_grad:
            trained.append(spec)
        elif type(parameter) is nn.Parameter and spec.dtype in SHARDED:
            frozen.append(spec)
        else:
            others_nbytes += parameter.numel() * stored.itemsize
    architecture, notes = _known(module, [*trained], is_whole=not frozen and not others_nbytes)
    return ModelShape(
        name=name,
        trained=tuple(trained),
        frozen=tuple(frozen),
        others_nbytes=others_nbytes,
        buffers_nbytes=sum(buffer.numel() * buffer.itemsize for buffer in module.buffers()),
        lookups=plan.lookups,
        architecture=architecture,
        notes=notes,
    )


def _known(
    module: nn.Module, specs: list[ParamSpec], *, is_whole: bool
) -> tuple[Architecture | None, tuple[str, ...]]:
    """The numbers of a module of transformers, where it is what its config says and nothing else.

    A model with adapters, or with frozen layers, saves other things for backward.
    """
    unknown = (
        "activations are not known for this module, so the peak holds states and gradients only: "
        "simulate it",
    )
    config = getattr(module, "config", None)
    if config is None or not hasattr(config, "to_dict") or not is_whole:
        return None, unknown
    if getattr(config, "_attn_implementation", None) == "eager":
        return None, unknown  # keeps all scores
    try:
        architecture = architectures.from_config(config.to_dict())
    except ConfigError:
        return None, unknown
    if [(s.name, s.shape) for s in specs] != list(architectures.parameters(architecture)):
        return None, unknown
    return architecture, ()
