"""`save_checkpoint`: all that training needs to go on, in a folder that is whole or not there.

Each rank writes its own part, once. Knows what is done in which order and on which rank; what a
checkpoint holds is `content`, what its files are `dcp_writing`, when it counts `versions`.
"""

import logging
import os
import shutil
import threading
import traceback
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..agreement import in_agreement
from ..engine import Engine, engines_of
from ..errors import CheckpointError, ConfigError
from ..export import write_configs
from ..optimizer import AdamW
from ..transport import HostRanks, Op, host_ranks
from ..wrappers import unwrap
from .content import Content, content_of, names_in
from .dcp_writing import write_files
from .names import names_of, unwrapped
from .trimming import trim
from .versions import final_path, keep_newest, prepare, publish

__all__ = ["Saving", "save_checkpoint", "wait_for_save"]

logger = logging.getLogger(__name__)


class Saving:
    """A checkpoint that has been written, or is being written in the background.

    Attributes:
        path: where it is, or will be if nothing else has that name by then.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def wait(self) -> Path:
        """Wait until it is whole.

        Raises:
            CheckpointError: it could not be written; on every rank.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            trim()  # of the copy
        if self._error is not None:
            error, self._error = self._error, None  # told once
            raise error
        return self.path

    @property
    def is_done(self) -> bool:
        """Whether nothing is being written any more. Does not wait."""
        return self._thread is None or not self._thread.is_alive()


_under_way: "weakref.WeakKeyDictionary[HostRanks, Saving]" = weakref.WeakKeyDictionary()


@torch.no_grad()
def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Any,
    scheduler: Any = None,
    *,
    step: int | None = None,
    keep: int | None = None,
    blocking: bool = True,
    **extra: Any,
) -> Saving:
    """Write a checkpoint of training to a folder of checkpoints; every rank has to call it.

    Weights and persistent buffers, masters, moments, step counters, options of the param groups,
    gradients that wait for a step, random states, the scheduler and `extra`. Each rank writes its
    own slices, under the parameters' names, so that any number of ranks and any stage can go on
    from it. It is there when it is whole: `path/step-000000000300/`, and the name of the newest in
    `path/latest`. What was there before stays until then.

    Args:
        path: the folder, which every rank sees.
        model: the one that the optimizer trains.
        optimizer: a `zeroshard.AdamW`, or what wraps it.
        scheduler: what has a `state_dict()`.
        step: names the checkpoint; None: the steps that the optimizer has made.
        keep: how many checkpoints stay in the folder, this one included; None: all.
        blocking: False returns once this rank's part was copied to host memory, and writes it from
            there while training goes on. The copy takes as many bytes as the part. The next call
            waits for this one.
        extra: what else to keep: numbers, strings, tensors, lists and dictionaries of these, or
            what has a `state_dict()` of such. What is not the same on all ranks is kept for each.

    Returns:
        The checkpoint; call its `wait()` after the last one that does not block.

    Raises:
        CheckpointError: it cannot be written, or the one before could not; on every rank.
        ConfigError: something in it could not be read again.
    """
    model, optimizer = unwrap(model), unwrapped(optimizer)
    engine = optimizer.engine
    ranks = host_ranks(engine.transport)
    what = f"save_checkpoint to {path}"
    if scheduler is not None:
        extra = {**extra, "scheduler": scheduler}
    with in_agreement(ranks, what, CheckpointError):
        wait_for_save(ranks)
        _check(model, optimizer, step, keep)
        engine.masters.look_at_writes()
        optimizer.shown_state.take_over(optimizer.state)
        step = _steps_of(engine) if step is None else step
        content = content_of(model, optimizer, extra, ranks)
    content.share_out(ranks)
    with in_agreement(ranks, what, CheckpointError):
        chosen = prepare(Path(os.path.realpath(path)), step) if ranks.is_first else None
    unfinished: Path = ranks.from_first(chosen, op=Op(what))
    saving = Saving(final_path(unfinished))
    with _removed_on_error(unfinished, ranks):
        with in_agreement(ranks, what, CheckpointError):
            if not unfinished.is_dir():
                raise CheckpointError(f"{unfinished.parent} is not the same folder on all ranks")
            content = content if blocking else content.on_host()
            about = _about(model, content, unfinished, ranks)
        job = _Job(
            content=content,
            about={**about, "step": step},
            folder=unfinished,
            ranks=ranks,
            keep=keep,
            what=what,
        )
        if blocking:
            saving.path = job.run()
    if not blocking:
        _in_background(job, saving)
        _under_way[ranks] = saving
    return saving


def wait_for_save(ranks: HostRanks) -> None:
    """Wait for a checkpoint that these ranks are writing.

    Raises:
        CheckpointError: it could not be written.
    """
    saving = _under_way.pop(ranks, None)
    if saving is not None:
        saving.wait()


@dataclass(kw_only=True)
class _Job:
    """Everything that is left to do once the content is known.

    Attributes:
        content: this rank's part.
        about: what is said about the checkpoint.
        folder: where it is written.
        ranks: all that write.
        keep: see `save_checkpoint`.
        what: names the work.
    """

    content: Content
    about: dict[str, Any]
    folder: Path
    ranks: HostRanks
    keep: int | None
    what: str

    def run(self) -> Path:
        """Write the files, and let the checkpoint appear; where it is."""
        ranks, final = self.ranks, None
        with in_agreement(ranks, self.what, CheckpointError):
            items = write_files(self.folder, self.content.values, self.content.aliases, ranks)
        every = ranks.to_first(items, op=Op(self.what))
        with in_agreement(ranks, self.what, CheckpointError):
            if ranks.is_first:
                found = [item for items in every for item in items]
                final = publish(self.folder, self.about, found)
                if self.keep is not None:
                    keep_newest(self.folder.parent, self.keep)
        path: Path = ranks.from_first(final, op=Op(self.what))
        return path


def _in_background(job: _Job, saving: Saving) -> None:
    def work() -> None:
        try:
            with _removed_on_error(job.folder, job.ranks):
                saving.path = job.run()
        except BaseException as error:
            # The frames hold the communicator, whose threads are to be joined when a process ends.
            traceback.clear_frames(error.__traceback__)
            saving._error = error
            logger.error("%s failed: %s", job.what, error)

    # Not a daemon: a process that ends waits for its last checkpoint.
    saving._thread = threading.Thread(target=work, name="zeroshard checkpoint")
    saving._thread.start()


@contextmanager
def _removed_on_error(folder: Path, ranks: HostRanks) -> Iterator[None]:
    """Leave nothing behind of a checkpoint that was not completed."""
    try:
        yield
    except BaseException:
        if ranks.is_first:
            with suppress(OSError):
                shutil.rmtree(folder)
        raise


def _check(model: nn.Module, optimizer: AdamW, step: int | None, keep: int | None) -> None:
    """Raise where there is something that cannot be saved."""
    engine = optimizer.engine
    engine.check_can_step("save_checkpoint")
    engine.sharding.check_unpinned("save_checkpoint")
    names_of(model, optimizer)
    check_is_only_one(model, engine)
    engine.parameters.check_values(engine.parameters.places)
    on_meta = [
        name
        for name, target in names_in(model).items()
        if getattr(target, "tensor", target).is_meta
    ]
    if on_meta:
        raise ConfigError(f"{on_meta[0]!r} has no values: call init_weights or load_weights first")
    if step is not None and (not isinstance(step, int) or step < 0):
        raise ConfigError(f"step must be a number of steps, at least 0, or None, got {step!r}")
    if keep is not None and (not isinstance(keep, int) or keep < 1):
        raise ConfigError(
            f"keep must be a number of checkpoints, at least 1, or None, got {keep!r}"
        )


def check_is_only_one(model: nn.Module, engine: Engine) -> None:
    """Raise if another zeroshard optimizer has parameters of the model."""
    others = [other for other in engines_of(model.parameters()) if other is not engine]
    if others:
        (name, _), *_ = (
            (name, p) for name, p in model.named_parameters() if p in others[0].parameters.places
        )
        raise ConfigError(
            f"{name!r} is in another zeroshard optimizer: save each optimizer in a folder of its "
            "own, with the module that it trains"
        )


def _steps_of(engine: Engine) -> int:
    """How many steps the optimizer has made: as many as its oldest parameter."""
    counts = engine.counters.counts
    return int(counts.max()) if counts.numel() else 0


def _about(model: nn.Module, content: Content, folder: Path, ranks: HostRanks) -> dict[str, Any]:
    """What is said about a checkpoint beside its tensors."""
    adapters: dict[str, dict[str, str]] = {}
    try:
        if ranks.is_first:
            adapters = write_configs(model, folder / "hf")
    except Exception as error:  # training goes on without it
        shutil.rmtree(folder / "hf", ignore_errors=True)
        logger.warning("the checkpoint has no config of the model in it: %s", error)
    return {
        "num_ranks": ranks.size,
        "torch": torch.__version__,
        "tied": content.tied,
        "strides": content.strides,
        "adapters": adapters,
    }
