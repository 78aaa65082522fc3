"""From a checkpoint, whoever wrote it, to another format: without a model, ranks or a GPU.

Everything goes by pieces, so that memory does not grow with the largest tensor.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

from ..errors import ConfigError
from ..outputs import check_output, remove, removed_on_error, replace, unfinished
from .decoded import weights_of
from .opening import open_source
from .pieces import Pieces
from .to_dcp import write_dcp
from .to_safetensors import write_safetensors
from .to_torch import write_torch

__all__ = ["FORMATS", "convert"]

WRITERS = {"torch": write_torch, "dcp": write_dcp}
FORMATS = ("safetensors", *WRITERS)


def convert(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    to: Literal["safetensors", "torch", "dcp"],
    *,
    dtype: torch.dtype | None = None,
    max_file_nbytes: int = 5 * 10**9,
    overwrite: bool = False,
    on_progress: Callable[[int, int], object] | None = None,
) -> None:
    """Write what a checkpoint holds in another format, in bounded memory.

    What stands behind `out` is complete or not there: it gets its name at the end.

    Args:
        path: of a checkpoint that `load_checkpoint` reads.
        out: a folder; for "torch" a file.
        to: "safetensors" for the weights as `from_pretrained` reads them; "torch" for one file of
            model and optimizer, as `torch.save` writes it; "dcp" for a folder of
            torch.distributed.checkpoint, as FSDP2 and DDP save it.
        dtype: of the floating-point weights; None: as they are. float32 gives the exact masters
            where the checkpoint has them. Moments and masters are fp32 in any case.
        max_file_nbytes: the largest safetensors file, if no tensor is larger.
        overwrite: replace what is at `out`.
        on_progress: called with the bytes that are written and those that will be.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, or has no optimizer state that the
            format needs.
        ConfigError: wrong arguments, or `out` is there, or cannot be written.
    """
    if to not in FORMATS:
        raise ConfigError(f"to must be one of {', '.join(FORMATS)}, got {to!r}")
    path, out = Path(path), Path(os.path.realpath(out))
    check_output(out, dtype, max_file_nbytes, overwrite)
    if path.exists() and Path(os.path.realpath(path)).is_relative_to(out):
        raise ConfigError(f"{out} holds the checkpoint itself: pass another path")
    fresh = unfinished(out)
    with open_source(path) as source, removed_on_error(fresh):
        weights = weights_of(source, dtype)
        reading = Pieces(on_progress)
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            remove(fresh)
            if to == "safetensors":
                write_safetensors(
                    fresh, source, weights, reading, dtype=dtype, max_file_nbytes=max_file_nbytes
                )
            else:
                WRITERS[to](fresh, source, weights, reading)
            replace(out, fresh)
        except OSError as error:
            raise ConfigError(f"{out} cannot be written: {error}") from error
