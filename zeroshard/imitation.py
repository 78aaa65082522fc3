"""Whose choices are made: those of the device that tensors are on, or of a GPU that is imitated.

A simulation without a GPU has tensors on the CPU and wants to know what a GPU would hold. Every
choice between the two (transport, update, what the host may look at) asks here.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["acts_as_gpu", "imitated_gpu", "is_imitated"]

_imitated = False


def is_imitated() -> bool:
    """Whether a GPU is imitated; nothing is computed then."""
    return _imitated


def acts_as_gpu(device: torch.device) -> bool:
    """Whether tensors on `device` are treated as those on a GPU."""
    return device.type == "cuda" or _imitated


@contextmanager
def imitated_gpu() -> Iterator[None]:
    """Treat tensors on the CPU as if they were on a GPU."""
    global _imitated
    before, _imitated = _imitated, True
    try:
        yield
    finally:
        _imitated = before
