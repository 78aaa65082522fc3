"""From a path to a `Source`, whatever wrote what is there."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from ..errors import CheckpointError
from .dcp_source import is_dcp, open_dcp
from .deepspeed import is_deepspeed, open_deepspeed
from .source import Source
from .torch_files import is_torch_file, open_torch_file
from .versions import find

__all__ = ["is_checkpoint", "open_source"]

logger = logging.getLogger(__name__)


def is_checkpoint(path: Path) -> bool:
    """Whether there is something at a path that `open_source` reads, whole or not."""
    if not path.is_dir():
        return is_torch_file(path)
    whole, damages = find(path)
    is_ours = bool(whole) or any(damage.was_whole for damage in damages)
    return is_ours or is_dcp(path) or is_deepspeed(path)


def open_source(
    path: str | os.PathLike[str], names: Sequence[Sequence[str]] | None = None
) -> Source:
    """Open a checkpoint for reading; the result is a context that closes it.

    Args:
        path: of a file or a folder.
        names: of the optimizer's parameters by param group, for formats that know positions only;
            None where no optimizer is at hand.

    Raises:
        CheckpointError: nothing is there, it is none that can be read, or it is damaged.
    """
    path = Path(path)
    if is_torch_file(path):
        return open_torch_file(path, names)
    if path.is_dir():
        whole, damages = find(path)
        for damage in damages:
            logger.warning("passed over %s", damage)
        if whole:
            return open_dcp(whole[0])
        if any(damage.was_whole for damage in damages):
            raise CheckpointError(f"{path} holds no whole checkpoint: {damages[0]}")
        if is_dcp(path):
            return open_dcp(path)
        if is_deepspeed(path):
            return open_deepspeed(path)
    raise CheckpointError(
        f"{path}: expected a checkpoint of zeroshard, torch.distributed.checkpoint or DeepSpeed "
        f"(folders), or a file that torch.save wrote; there is {_kind(path)}. Weights alone, in "
        "safetensors, are read by load_weights"
    )


def _kind(path: Path) -> str:
    if path.is_dir():
        inside = sorted(entry.name for entry in path.iterdir())
        return f"a folder with {', '.join(inside[:3])}" if inside else "an empty folder"
    return "a file of another kind" if path.exists() else "nothing"
