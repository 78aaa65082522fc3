"""`load_checkpoint`: from whatever wrote it to a model and an optimizer, of any number of ranks.

All ranks choose one checkpoint, each checks all that it will read of it, and nothing changes before
all have agreed that it fits and is whole.
"""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..agreement import in_agreement
from ..engine import Engine
from ..errors import CheckpointError, ConfigError
from ..gather import gather_whole_arenas
from ..initialise import fill_buffers
from ..optimizer import AdamW
from ..shard_tensor import ShardTensor
from ..state import shown
from ..transport import HostRanks, Op, host_ranks
from ..wrappers import unwrap
from .content import set_random_state
from .load_plan import LoadPlan
from .names import named_groups, names_of, unwrapped
from .opening import is_checkpoint, open_source
from .saving import check_is_only_one, wait_for_save
from .source import Source
from .versions import find

__all__ = ["load_checkpoint"]

logger = logging.getLogger(__name__)

HALF_LOADED = (
    "an error ended load_checkpoint half-way, so weights and state may be of different "
    "checkpoints: load one again"
)


@torch.no_grad()
def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Any,
    scheduler: Any = None,
    *,
    missing_ok: bool = False,
    **extra: Any,
) -> dict[str, Any]:
    """Go on from a checkpoint, whoever wrote it; every rank has to call it.

    Of a folder of checkpoints the newest that is whole is taken, and what is passed over is logged.
    A checkpoint of any number of ranks, any stage and any `Precision` fits; so does a folder of
    torch.distributed.checkpoint with a model and an optimizer (as of FSDP2 or DDP), a file of
    `torch.save({"model": ..., "optimizer": ...})`, and a DeepSpeed ZeRO directory. Each rank reads
    its own slices. Nothing changes before everything is known to fit and, where there are
    checksums, to be what was written.

    Args:
        path: a folder of checkpoints, one of them, or what another system wrote.
        model: the one that the optimizer trains; it may be on the meta device.
        optimizer: a `zeroshard.AdamW`, or what wraps it.
        scheduler: its `load_state_dict()` is called with what was saved.
        missing_ok: whether to return {} where there is no checkpoint, not even a damaged one.
        extra: what has a `load_state_dict()`, by the name that it was saved under.

    Returns:
        The other values that were saved, by name, and "step". Of one that was not the same on all
        ranks each gets its own, or None; where there are more or fewer ranks now, a `PerRank`: all
        of them.

    Raises:
        CheckpointError: there is none, none is whole, or it does not fit, with what does not; on
            every rank.
    """
    model, optimizer = unwrap(model), unwrapped(optimizer)
    engine = optimizer.engine
    ranks = host_ranks(engine.transport)
    objects = extra if scheduler is None else {**extra, "scheduler": scheduler}
    with in_agreement(ranks, f"load_checkpoint from {path}", CheckpointError):
        wait_for_save(ranks)
        if engine.cannot_step != HALF_LOADED:
            engine.check_can_step("load_checkpoint")
        engine.sharding.check_unpinned("load_checkpoint")
        check_is_only_one(model, engine)
        for name, thing in objects.items():
            if not hasattr(thing, "load_state_dict"):
                raise ConfigError(
                    f"{name!r} must have a load_state_dict(), got a {type(thing).__name__}: values "
                    "are returned"
                )
        engine.masters.look_at_writes()
    chosen = _choose(Path(path), ranks, missing_ok)
    if not chosen:
        return {}
    plan = _first_that_is_whole(chosen, model, optimizer, objects, ranks)
    with plan.source, _not_half(engine):
        with in_agreement(ranks, f"load_checkpoint from {plan.source.path}", CheckpointError):
            plan.load_weights()
            plan.state.load(plan.trained)
        gather_whole_arenas(engine, "loaded weights")
        engine.parameters.mark_loaded(plan.targets)
        fill_buffers(model)
        with in_agreement(ranks, f"load_checkpoint from {plan.source.path}", CheckpointError):
            local = plan.read_gradients()
            values = plan.load_objects()
        _set_gradients(optimizer, local)
        _set_random_states(plan.source, engine, ranks)
    return values


@contextmanager
def _not_half(engine: Engine) -> Iterator[None]:
    """Until the body has come to its end, nothing can be trained."""
    engine.cannot_step = HALF_LOADED
    yield
    engine.cannot_step = ""


# --- which checkpoint


def _choose(path: Path, ranks: HostRanks, missing_ok: bool) -> list[Path]:
    """What may be read, the best first; the same on every rank."""
    what = f"load_checkpoint from {path}"
    found: list[Path] = []
    with in_agreement(ranks, what, CheckpointError):
        if ranks.is_first:
            found, damages = find(path) if path.exists() else ([], [])
            for damage in damages:
                logger.warning("passed over %s", damage)
            if not found and any(damage.was_whole for damage in damages):
                raise CheckpointError(
                    f"{path} has no whole checkpoint: " + "; ".join(map(str, damages))
                )
            is_other = path.exists() and not path.is_dir()  # which nothing can be saved to
            if not found and (is_checkpoint(path) or is_other or not missing_ok):
                found = [path]  # of another system; or opening it says what is there instead
    chosen: list[Path] = ranks.from_first(found, op=Op(what))
    return chosen


def _first_that_is_whole(
    candidates: Sequence[Path],
    model: nn.Module,
    optimizer: AdamW,
    objects: Mapping[str, Any],
    ranks: HostRanks,
) -> LoadPlan:
    """Open the first checkpoint that every rank finds whole."""
    groups = named_groups(names_of(model, optimizer), optimizer)
    names = [group["params"] for group in groups]
    reasons = []
    for candidate in candidates:
        with ExitStack() as stack:
            damage = misfit = None
            try:
                source = stack.enter_context(open_source(candidate, names))
                plan = _fitting_plan(source, model, optimizer, objects, ranks)
                if isinstance(plan, str):
                    misfit = plan
                else:
                    plan.check_sums()
            except Exception as error:  # whatever it is, the other ranks must hear of it
                damage = str(error) or repr(error)
            answers = ranks.all_gather_object((damage, misfit), op=Op("choice of a checkpoint"))
            damages = [damage for damage, _ in answers if damage is not None]
            misfits = [misfit for _, misfit in answers if misfit is not None]
            if misfits and not damages:
                raise CheckpointError(misfits[0])
            if not damages:
                assert not isinstance(plan, str)
                stack.pop_all()
                return plan
        reasons.append(damages[0])
        if ranks.is_first and len(candidates) > len(reasons):
            logger.warning("passed over %s: %s", candidate, damages[0])
    raise CheckpointError("; ".join(reasons))


def _fitting_plan(
    source: Source,
    model: nn.Module,
    optimizer: AdamW,
    objects: Mapping[str, Any],
    ranks: HostRanks,
) -> LoadPlan | str:
    """How a checkpoint is loaded, or why it does not fit."""
    try:
        return LoadPlan(source, model, optimizer, objects, ranks)
    except ConfigError as error:
        return str(error)


# --- what is in a checkpoint beside weights and state


def _set_gradients(optimizer: AdamW, local: Mapping[int, Tensor]) -> None:
    """Let the gradients that wait for a step be those of the checkpoint, or none."""
    engine = optimizer.engine
    optimizer.zero_grad(set_to_none=True)
    for slot, values in local.items():
        slices = engine.gradients.shards.slices[slot]
        grad = shown(engine, slices, values)
        if engine.gradients.ddp_owns_gradients() and isinstance(grad, ShardTensor):
            grad = grad.full_tensor()
        parameter = engine.gradients.parameters[slot]
        if not isinstance(grad, ShardTensor):  # autograd's own, which has the parameter's dtype
            grad = grad.to(parameter.grad_dtype or grad.dtype)
        parameter.grad = grad
    if local:
        engine.waiting.reduced()


def _set_random_states(source: Source, engine: Engine, ranks: HostRanks) -> None:
    if len(source.rng) == ranks.size:
        set_random_state(source.rng[ranks.rank], engine.device)
    elif ranks.is_first:
        logger.info(
            "%s has random states of %d ranks: those of these %d stay as they are",
            source.path,
            len(source.rng),
            ranks.size,
        )
