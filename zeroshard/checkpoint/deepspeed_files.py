"""The files of a DeepSpeed checkpoint: which they are, and what they hold, without running it.

Knows nothing of how parameters lie in them.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from ..errors import CheckpointError

__all__ = ["Files", "StandIn", "checkpoint_folder", "is_plain", "load_file"]

LATEST = "latest"
MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
OPTIMIZER_FILE = re.compile(r"((?:bf16_|fp16_)?)zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
OTHERS = (  # checkpoints that are read by DeepSpeed only, by a pattern of what is in their folder
    ("zero", "a universal one (pass the one that it was made from)"),
    ("offloaded_tensors", "of optimizer state on NVMe, which is not among its files"),
    ("*exp*_mp_rank_*.pt", "of a mixture of experts"),
    ("layer_*", "pipeline parallel"),
)
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.Tensor)


def checkpoint_folder(path: Path) -> Path | None:
    """The folder with the files of the checkpoint at `path`, None where there is no such thing.

    It is `path` itself, or the one that the file `latest` in it names. Where that leads nowhere,
    but other checkpoints lie in `path`, it is `path`.
    """
    if _has_files(path):
        return path
    try:
        latest = path / (path / LATEST).read_text().strip()
        if _has_files(latest):
            return latest
    except (OSError, ValueError):  # no such file, or not of text
        pass
    return path if path.is_dir() and any(map(_has_files, path.glob("global_step*"))) else None


def _has_files(folder: Path) -> bool:
    """Whether a folder holds files with such names."""
    return folder.is_dir() and any(
        MODEL_FILE.fullmatch(entry.name) or OPTIMIZER_FILE.fullmatch(entry.name)
        for entry in folder.iterdir()
    )


class Files:
    """The files of one checkpoint.

    Args:
        folder: which they are in.

    Attributes:
        model: by rank, those of the weights; rank 0's only in stages 1 and 2.
        optimizer: by rank, those of the optimizer's state.

    Raises:
        CheckpointError: there are none, or they are of a kind that is not read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model: dict[int, Path] = {}
        self.optimizer: dict[int, Path] = {}
        for pattern, what in OTHERS:
            if next(folder.glob(pattern), None) is not None:
                raise _unread(folder, what)
        for entry in sorted(folder.iterdir()):
            model, optimizer = (p.fullmatch(entry.name) for p in (MODEL_FILE, OPTIMIZER_FILE))
            if model:
                rank, model_rank, into = int(model[1] or 0), model[2], self.model
            elif optimizer:
                rank, model_rank, into = int(optimizer[2]), optimizer[3], self.optimizer
            else:
                continue
            if int(model_rank):
                raise _unread(folder, f"tensor or pipeline parallel, it has {entry.name}")
            if rank in into:
                raise CheckpointError(
                    f"{folder} holds two checkpoints, {into[rank].name} and {entry.name}: remove "
                    "the files of the older one"
                )
            into[rank] = entry
        if not self.model and not self.optimizer:
            raise CheckpointError(
                f"{folder} has no file {LATEST!r} that names a checkpoint in it: pass one of them, "
                f"such as {min(folder.glob('global_step*'))}"
            )
        self.model = dict(sorted(self.model.items()))

    @property
    def first_model(self) -> Path:
        """The first rank's file of the weights."""
        if 0 not in self.model:
            name = "mp_rank_00_model_states.pt"
            raise self._missing(f"{'zero_pp_rank_0_' if self.model else ''}{name}")
        return self.model[0]

    @property
    def first_optimizer(self) -> Path:
        """The first rank's file of the optimizer's state."""
        if 0 not in self.optimizer:
            raise self._missing(self._optimizer_name(0))
        return self.optimizer[0]

    def check(self, count: int, *, weights_are_dealt: bool) -> None:
        """Raise unless there are the files of `count` ranks and no others."""
        optimizer = {rank: self._optimizer_name(rank) for rank in range(count)}
        model = {0: "mp_rank_00_model_states.pt"}
        if weights_are_dealt:
            model = {r: f"zero_pp_rank_{r}_mp_rank_00_model_states.pt" for r in range(count)}
        for found, wanted in ((self.optimizer, optimizer), (self.model, model)):
            for rank, name in wanted.items():
                if rank not in found or found[rank].name != name:
                    raise self._missing(name)
            if len(found) > len(wanted):
                raise CheckpointError(
                    f"{self.folder} holds files of two checkpoints: {count} ranks wrote it, but "
                    f"{found[max(found)].name} is there: remove the files of the older one"
                )

    def _optimizer_name(self, rank: int) -> str:
        """The name of a rank's file, where at least another rank's is there."""
        known = [OPTIMIZER_FILE.fullmatch(file.name) for file in self.optimizer.values()]
        prefix = next((match[1] for match in known if match), "")
        return f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"

    def _missing(self, name: str) -> CheckpointError:
        return CheckpointError(
            f"{self.folder} is damaged: expected {name}, which is missing: copy the files of all "
            "ranks to one folder, or pass another checkpoint"
        )


def _unread(folder: Path, what: str) -> CheckpointError:
    """The error for a checkpoint of another kind."""
    return CheckpointError(
        f"{folder} is a DeepSpeed checkpoint that cannot be read here, {what}: expected data "
        "parallel training with ZeRO stage 1, 2 or 3, one file of each rank"
    )


class StandIn:
    """What is known of an object of one of DeepSpeed's classes, which can do nothing."""

    args: tuple[Any, ...]

    def __new__(cls, *args: Any) -> "StandIn":
        made = super().__new__(cls)
        made.args = args
        return made

    def __init__(self, *args: Any) -> None:
        pass


def load_file(path: Path) -> dict[str, Any]:
    """What a file holds; tensors are mapped from it and read when they are looked at.

    Objects of DeepSpeed's classes are `StandIn`s. A file that names anything else which torch does
    not take for harmless is refused.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        names = get_unsafe_globals_in_checkpoint(path)
        strange = sorted(name for name in names if not name.startswith("deepspeed."))
        if strange:
            raise CheckpointError(
                f"{path} names {strange[0]}, which could run code, and is not read: expected "
                "tensors, plain values and DeepSpeed's classes. If you trust that class and its "
                "writer, pass it to torch.serialization.add_safe_globals() before"
            )
        with safe_globals([(StandIn, name) for name in names]):
            content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        if not isinstance(content, dict):
            raise CheckpointError(f"{path} holds a {type(content).__name__}, expected a dictionary")
    except CheckpointError:
        raise
    except Exception as error:
        why = str(error).partition("\n")[0] or repr(error)
        raise CheckpointError(
            f"{path} cannot be read, it is damaged or no file that DeepSpeed wrote with "
            f"checkpoint_serialization: {why}"
        ) from error
    return content


def is_plain(value: Any) -> bool:
    """Whether a value is made of tensors, numbers, strings, and containers of these."""
    if isinstance(value, Mapping):
        return all(is_plain(part) for pair in value.items() for part in pair)
    if isinstance(value, (list, tuple, set)):
        return all(map(is_plain, value))
    return isinstance(value, PLAIN)
