"""How a parameter's state is stored, as data. No tensors, no arithmetic.

A new precision is a row here; the update, `memory()` and checkpoints read the same rows.
"""

from dataclasses import dataclass

from .config import Precision
from .errors import ConfigError

__all__ = ["FROZEN", "MOMENT_NAMES", "Field", "Format", "state_format", "sum_dtype", "wire_dtype"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One flat tensor of state of a shard."""

    name: str
    dtype: str
    category: str  # the key of memory() that counts it
    per: int = 1  # elements of the shard that share one of the field


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How the state of one arena is stored."""

    master: str  # "param": the fp32 parameter itself is updated; "split", "fp32", "none"
    moments: str  # "fp32"; "bf16", rounded stochastically; "int8", codes and a scale for each block
    fields: tuple[Field, ...]


BLOCK = 256  # elements that share a scale, as in the layout

MASTERS = {
    "param": (),
    "none": (),
    "split": (Field(name="remainder", dtype="int16", category="master"),),
    "fp32": (Field(name="master", dtype="float32", category="master"),),
}
MOMENTS = {
    "fp32": (
        Field(name="exp_avg", dtype="float32", category="moments"),
        Field(name="exp_avg_sq", dtype="float32", category="moments"),
    ),
    "bf16": (
        Field(name="exp_avg", dtype="bfloat16", category="moments"),
        Field(name="exp_avg_sq", dtype="bfloat16", category="moments"),
    ),
    "int8": (
        Field(name="exp_avg", dtype="int8", category="moments"),
        Field(name="exp_avg_sq", dtype="uint8", category="moments"),
        Field(name="exp_avg_scale", dtype="float32", category="moments", per=BLOCK),
        Field(name="exp_avg_sq_scale", dtype="float32", category="moments", per=BLOCK),
    ),
}
MOMENT_NAMES = ("exp_avg", "exp_avg_sq")
AUTO_MASTER = {"float32": "param", "bfloat16": "split", "float16": "fp32"}


FROZEN = Format(master="param", moments="none", fields=())
"""Parameters that are sharded and not trained."""


def state_format(dtype: str, precision: Precision) -> Format:
    """The format for parameters of `dtype` ("float32", "bfloat16", ...).

    Raises:
        ConfigError: a dtype that cannot be trained, or a split master for fp16.
    """
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ConfigError(
            f"trainable parameters must be float32, bfloat16 or float16, got {dtype}: "
            "cast the model, or freeze the parameter with requires_grad_(False)"
        )
    master: str = precision.master
    if master == "auto" or dtype == "float32":
        master = AUTO_MASTER[dtype]
    if master == "split" and dtype == "float16":
        raise ConfigError(
            "Precision(master='split') needs bfloat16 parameters, whose bits are the upper half "
            "of fp32; got float16: use master='fp32'"
        )
    fields = (*MASTERS[master], *MOMENTS[precision.moments])
    return Format(master=master, moments=precision.moments, fields=fields)


def wire_dtype(dtype: str, precision: Precision) -> str:
    """The dtype in which gradients of parameters of `dtype` travel."""
    if precision.reduce == "wire16":
        return dtype if dtype in ("bfloat16", "float16") else "bfloat16"
    return "float32" if precision.reduce == "fp32" else dtype


def sum_dtype(dtype: str, precision: Precision) -> str:
    """The dtype in which the ranks' gradients are summed."""
    return dtype if precision.reduce == "param" else "float32"
