"""Which of zeroshard's own backends training would use here."""

import os

import torch

from ..config import Precision
from ..errors import ConfigError
from ..formats import state_format
from ..transport.installed import compiled_backends
from ..update import implementation_of
from .facts import Facts, collect

__all__ = ["backends", "device_of_rank"]

DTYPES = ("float32", "bfloat16", "float16")
MOMENTS = ("fp32", "bf16", "int8")


def device_of_rank() -> torch.device:
    """The device that this process would train on."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    local = os.environ.get("LOCAL_RANK", "0")
    if not count:
        return torch.device("cpu")
    # With one GPU visible to each process, as some launchers have it, that one.
    return torch.device("cuda", min(int(local), count - 1) if local.isdigit() else 0)


def backends() -> Facts:
    """The transport, and who makes the update of parameters of each dtype."""
    device = device_of_rank()
    return collect(
        {
            "device": lambda: str(device),
            "transport": lambda: _transport(device),
            **{
                f"update_of_{dtype}": lambda dtype=dtype: _updates(dtype, device)  # type: ignore[misc]
                for dtype in DTYPES
            },
        }
    )


def _transport(device: torch.device) -> str:
    world_size = os.environ.get("WORLD_SIZE", "1")
    wanted = "nccl" if device.type == "cuda" else "gloo"
    there = compiled_backends().get(wanted)
    name = wanted if there else f"{wanted}, which this torch was built without"
    alone = not world_size.isdigit() or int(world_size) < 2
    return f"none in a single process; {name} with several" if alone else name


def _updates(dtype: str, device: torch.device) -> dict[str, str]:
    """By format of the moments."""
    made = {}
    for moments in MOMENTS:
        try:
            fmt = state_format(dtype, Precision(moments=moments))  # type: ignore[arg-type]
        except ConfigError as error:
            made[moments] = str(error)
        else:
            made[moments] = implementation_of(fmt, device)
    return made
