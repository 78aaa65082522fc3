"""Checkpoints by name: of any number of ranks, any stage, and other systems."""

from .optimizer_state import load_optimizer, save_optimizer, unwrapped

__all__ = ["load_optimizer", "save_optimizer", "unwrapped"]
