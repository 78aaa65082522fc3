"""The user's choices, frozen and validated. Decides nothing about a model."""

import os
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from .errors import ConfigError

__all__ = ["Options", "Precision", "is_debugging"]

Master = Literal["auto", "split", "fp32", "none"]
Moments = Literal["fp32", "bf16", "int8"]
Reduce = Literal["auto", "fp32", "wire16", "param"]

STAGES = (1, 2, 3)


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        listed = ", ".join(repr(choice) for choice in allowed)
        raise ConfigError(f"{name} must be one of {listed}; got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """In which precision masters, moments and gradients on the wire are kept.

    Args:
        master: where the fp32 master weights live. ``"split"``: the bf16 parameter is the upper
            half and an int16 remainder the lower one, 2 bytes instead of 4. ``"fp32"``: a copy of
            its own. ``"none"``: no master, the parameter is updated and rounded. ``"auto"``: none
            for fp32 parameters, split for bf16, fp32 for fp16. fp32 parameters never need one.
        moments: the format of both moments. ``"fp32"``: 8 bytes a parameter. ``"bf16"``: 4 bytes,
            with stochastic rounding. ``"int8"``: 2 bytes and a scale for each 256 elements.
        reduce: the wire and the sum of a reduction. ``"fp32"``: both in fp32. ``"wire16"``: the
            parameter's 16-bit dtype (bf16 for fp32 parameters) on the wire, summed in fp32.
            ``"param"``: both in the
            parameter's dtype. ``"auto"``: fp32 for fp32 parameters, wire16 for 16-bit ones.
        param_dtype: cast fp32 parameters to this dtype at construction and seed the masters from
            their fp32 values. None leaves them; ``torch.bfloat16`` is the one other choice.

    Raises:
        ConfigError: for any other value.
    """

    master: Master = "auto"
    moments: Moments = "fp32"
    reduce: Reduce = "auto"
    param_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        _one_of("Precision.master", self.master, ("auto", "split", "fp32", "none"))
        _one_of("Precision.moments", self.moments, ("fp32", "bf16", "int8"))
        _one_of("Precision.reduce", self.reduce, ("auto", "fp32", "wire16", "param"))
        _one_of("Precision.param_dtype", self.param_dtype, (None, torch.bfloat16))


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments of ``zeroshard.AdamW`` that torch's AdamW does not have."""

    stage: int = 2
    bucket_mb: float = 25.0
    max_grad_norm: float | None = None
    reduction: Literal["mean", "sum"] = "mean"
    sync_init: bool = True
    skip_nonfinite: bool = True
    precision: Precision = field(default_factory=Precision)
    reshard_after_forward: bool = True
    units: tuple[type[nn.Module] | str, ...] | None = None

    def __post_init__(self) -> None:
        _one_of("stage", self.stage, STAGES)
        _one_of("reduction", self.reduction, ("mean", "sum"))
        for unit in self.units or ():
            if not isinstance(unit, str) and not (
                isinstance(unit, type) and issubclass(unit, nn.Module)
            ):
                raise ConfigError(
                    "units must be module classes, class names or names of modules, as in "
                    f"units=['layers.0', Block]; got {unit!r}"
                )
        if not isinstance(self.precision, Precision):
            raise ConfigError(
                f"precision must be a zeroshard.Precision, got {type(self.precision).__name__}: "
                "write precision=zeroshard.Precision(master='split')"
            )
        if not self.bucket_mb > 0:
            raise ConfigError(f"bucket_mb must be a size above 0 in MiB, got {self.bucket_mb!r}")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ConfigError(
                f"max_grad_norm must be above 0, or None for no clipping; got "
                f"{self.max_grad_norm!r}"
            )

    @property
    def needs_model(self) -> bool:
        """Whether the module must be known, for its boundaries."""
        return self.stage == 3

    @property
    def bucket_nbytes(self) -> int:
        """The target size of a bucket in bytes."""
        return int(self.bucket_mb * 2**20)

    def describe(self) -> dict[str, str]:
        """What all ranks must have in common, for the comparison at construction."""
        return {name: repr(getattr(self, name)) for name in self.__dataclass_fields__}


def is_debugging() -> bool:
    """Whether ZEROSHARD_DEBUG asks for checks that take time."""
    return os.environ.get("ZEROSHARD_DEBUG", "0") != "0"
