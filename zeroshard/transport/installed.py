"""Which backends torch was built with. Starts none."""

import torch
import torch.distributed as dist

__all__ = ["compiled_backends", "nccl_version"]


def compiled_backends() -> dict[str, bool]:
    """By name, whether torch was built with it."""
    if not dist.is_available():
        return {}
    names = ("gloo", "nccl", "mpi", "ucc", "xccl")
    asked = {name: getattr(dist, f"is_{name}_available", None) for name in names}
    return {name: bool(ask()) for name, ask in asked.items() if ask is not None}


def nccl_version() -> str | None:
    """The version of NCCL that torch brings; None without one."""
    if not compiled_backends().get("nccl"):
        return None
    found = torch.cuda.nccl.version()
    return ".".join(map(str, found)) if isinstance(found, tuple) else str(found)
