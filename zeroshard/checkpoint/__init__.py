"""Checkpoints by name: of any number of ranks, any stage, and other systems."""

from .loading import load_checkpoint
from .names import unwrapped
from .optimizer_state import load_optimizer, save_optimizer
from .saving import Saving, save_checkpoint
from .source import PerRank

__all__ = [
    "PerRank",
    "Saving",
    "load_checkpoint",
    "load_optimizer",
    "save_checkpoint",
    "save_optimizer",
    "unwrapped",
]
