"""`load_checkpoint`: from whatever wrote it to a model and an optimizer, of any number of ranks.

All ranks choose one checkpoint, each checks all that it will read of it, and nothing changes before
all have agreed that it fits and is whole.
"""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..agreement import in_agreement
from ..engine import Engine
from ..errors import CheckpointError, ConfigError
from ..gather import gather_whole_arenas
from ..initialise import Buffer, fill_buffers
from ..optimizer import AdamW
from ..shard_tensor import ShardTensor
from ..state import shown
from ..transport import HostRanks, Op, host_ranks
from ..weights import Target, pieces, read_into, shape_of
from ..wrappers import unwrap
from .content import names_in, set_random_state
from .names import names_of, unwrapped
from .opening import is_checkpoint, open_source
from .saving import wait_for_save
from .source import PerRank, Source, Stored
from .state_plan import Request, StatePlan
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
            values = plan.load_objects(ranks)
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
            found, damages = find(path)
            for damage in damages:
                logger.warning("passed over %s", damage)
            if not found and any(damage.was_whole for damage in damages):
                raise CheckpointError(
                    f"{path} has no whole checkpoint: " + "; ".join(map(str, damages))
                )
            if not found and (is_checkpoint(path) or not missing_ok):
                found = [path]  # of another system; or opening it says what is there instead
    chosen: list[Path] = ranks.from_first(found, op=Op(what))
    return chosen


def _first_that_is_whole(
    candidates: Sequence[Path],
    model: nn.Module,
    optimizer: AdamW,
    objects: Mapping[str, Any],
    ranks: HostRanks,
) -> "_Plan":
    """Open the first checkpoint that every rank finds whole."""
    names = list(names_of(model, optimizer).values())
    counts = [len(group["params"]) for group in optimizer.param_groups]
    by_group = [[names.pop(0) for _ in range(count)] for count in counts]
    reasons = []
    for candidate in candidates:
        plan: _Plan | None = None
        damage = misfit = None
        try:
            source = open_source(candidate, by_group)
        except (CheckpointError, OSError) as error:
            damage = str(error)
        else:
            try:
                plan = _Plan(source, model, optimizer, objects, ranks)
            except ConfigError as error:
                misfit = str(error)
            else:
                try:
                    plan.check_sums()
                except (CheckpointError, OSError) as error:
                    damage = str(error)
        answers = ranks.all_gather_object((damage, misfit), op=Op("choice of a checkpoint"))
        damages = [damage for damage, _ in answers if damage is not None]
        misfits = [misfit for _, misfit in answers if misfit is not None]
        if misfits and not damages:
            raise CheckpointError(misfits[0])
        if not damages:
            assert plan is not None
            return plan
        if plan is not None:
            plan.source.close()
        reasons.append(damages[0])
        if ranks.is_first:
            logger.warning("passed over %s: %s", candidate, damages[0])
    raise CheckpointError("; ".join(reasons))


class _Plan:
    """What is loaded from a checkpoint, and into what.

    Args:
        source: the checkpoint.
        model: whose parameters and buffers.
        optimizer: that trains it.
        objects: by name, what has a `load_state_dict()`.
        ranks: all that load.

    Attributes:
        targets: every parameter and persistent buffer, with what it is read from.
        trained: what trained parameters are read from, by slot.
        state: what the optimizer's state is read from.

    Raises:
        CheckpointError: it does not fit; everything that does not is listed.
    """

    def __init__(
        self,
        source: Source,
        model: nn.Module,
        optimizer: AdamW,
        objects: Mapping[str, Any],
        ranks: HostRanks,
    ) -> None:
        self.source, self.optimizer, self.objects = source, optimizer, objects
        self.engine = optimizer.engine
        self.targets = _fitting_weights(source, model)
        self.state = StatePlan(model, optimizer, source)
        slot_of = self.engine.slot_of
        self.trained = {
            slot_of[target]: stored
            for target, stored in self.targets.items()
            if isinstance(target, nn.Parameter) and target in slot_of
        }
        missing = sorted(set(objects) - set(source.extra) - {"scheduler"})
        if "scheduler" in objects and source.scheduler is None:
            missing.append("scheduler")
        if missing:
            raise CheckpointError(
                f"{source.what}, {source.path}, holds nothing to load {', '.join(missing)} from: "
                "leave it out, and it stays as it is"
            )
        for name in objects:
            self._check_is_of_this_rank(name, ranks)
        misshapen = [
            name
            for name, stored in source.gradients.items()
            if name not in self.state.slot_of or stored.shape != self._shape(name)
        ]
        if misshapen:
            raise CheckpointError(f"{source.path} has a gradient that does not fit: {misshapen[0]}")

    def _saved(self, name: str) -> Any:
        """What is loaded into an object."""
        return self.source.scheduler if name == "scheduler" else self.source.extra[name]

    def _check_is_of_this_rank(self, name: str, ranks: HostRanks) -> None:
        saved = self._saved(name)
        if isinstance(saved, PerRank) and (len(saved) != ranks.size or saved[ranks.rank] is None):
            raise CheckpointError(
                f"{self.source.path} has {name!r} of each of {len(saved)} ranks apart, and none of "
                f"rank {ranks.rank} of {ranks.size}: leave it out, and make what it must be here "
                "of what load_checkpoint returns of it, a list"
            )

    def _shape(self, name: str) -> tuple[int, ...]:
        return self.engine.gradients.shards.slices[self.state.slot_of[name]].shape

    def check_sums(self) -> None:
        """Compare everything that this rank will read with its checksums."""
        for request in self._requests():
            request.check()

    def _requests(self) -> Iterator[Request]:
        yield from self.state.requests()
        rank, places = self.engine.transport.rank, self.engine.parameters.places
        for target, stored in self.targets.items():
            place = places.get(target) if isinstance(target, nn.Parameter) else None
            if place is None:
                yield Request.of_all(stored)
                continue
            for start, numel in place.slices.by_rank[rank]:
                yield Request(stored, place.slices.stride, start, numel)
        for name, stored in self.source.gradients.items():
            slices = self.engine.gradients.shards.slices[self.state.slot_of[name]]
            for start, numel in slices.by_rank[rank]:
                yield Request(stored, slices.stride, start, numel)

    def load_weights(self) -> None:
        """Read what is not trained; the rest comes with its masters."""
        self.engine.sharding.reshard_all()
        for target, stored in self.targets.items():
            if target not in self.engine.slot_of:
                read_into(target, stored, [self.engine])
                stored.forget()

    def read_gradients(self) -> dict[int, Tensor]:
        """This rank's slices of gradients that wait for a step, by slot."""
        return {
            self.state.slot_of[name]: self._slice(stored, self.state.slot_of[name])
            for name, stored in self.source.gradients.items()
        }

    def _slice(self, stored: Stored, slot: int) -> Tensor:
        slices = self.engine.gradients.shards.slices[slot]
        local = torch.empty(slices.numels[self.engine.transport.rank], dtype=stored.dtype)
        _read_flat(stored, slices.stride, slices.by_rank[self.engine.transport.rank], local)
        return local.to(self.engine.device)

    def load_objects(self, ranks: HostRanks) -> dict[str, Any]:
        """Give the objects what was saved of them; return the rest."""
        values = {
            name: _of_rank(value, ranks)
            for name, value in self.source.extra.items()
            if name not in self.objects
        }
        sliced = [name for name, value in values.items() if _has_slices(value)]
        for name in sliced:
            del values[name]
            logger.warning(
                "%s holds slices of %r, which are loaded into an object only: pass it as %s=",
                self.source.path,
                name,
                name,
            )
        for name, thing in self.objects.items():
            saved = _of_rank(self._saved(name), ranks)
            thing.load_state_dict(
                _filled(saved, thing.state_dict()) if _has_slices(saved) else saved
            )
        if self.source.step is not None:
            values["step"] = self.source.step
        return values


def _fitting_weights(source: Source, model: nn.Module) -> dict[Target, Stored]:
    """What each parameter and buffer is read from.

    Raises:
        CheckpointError: names or shapes that do not fit, listed.
    """
    said: dict[str, list[str]] = {"missing": [], "unexpected": [], "of another shape or kind": []}
    found: dict[Target, Stored] = {}
    names = names_in(model)
    by_target: dict[Target, list[str]] = {}
    for name, target in names.items():
        by_target.setdefault(target, []).append(name)
    for target, aliases in by_target.items():
        stored = next((source.weights[name] for name in aliases if name in source.weights), None)
        if stored is None:
            said["missing"].append(aliases[0])
            continue
        found[target] = stored
        tensor = target.tensor if isinstance(target, Buffer) else target
        if stored.shape != shape_of(target) or (
            tensor.is_floating_point() != stored.dtype.is_floating_point
        ):
            said["of another shape or kind"].append(
                f"{aliases[0]} {stored.shape} {stored.dtype}, in the model {shape_of(target)} "
                f"{tensor.dtype}"
            )
    said["unexpected"] = sorted(source.weights.keys() - names.keys())
    texts = [
        f"{kind}: {', '.join(entries[:20])}"
        + (f" and {len(entries) - 20} more" if len(entries) > 20 else "")
        for kind, entries in said.items()
        if entries
    ]
    if texts:
        raise CheckpointError(
            f"{source.what}, {source.path}, is of another model, and nothing was loaded. "
            + ". ".join(texts)
        )
    return found


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


def _of_rank(value: Any, ranks: HostRanks) -> Any:
    if isinstance(value, PerRank) and len(value) == ranks.size:
        return value[ranks.rank]
    return value


def _has_slices(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_has_slices(entry) for entry in value.values())
    return isinstance(value, Stored)


def _filled(saved: Any, like: Any) -> Any:
    """What was saved, with this rank's slices where `like` has slices."""
    if isinstance(saved, Mapping):
        inner = like if isinstance(like, Mapping) else {}
        return {key: _filled(entry, inner.get(key)) for key, entry in saved.items()}
    if not isinstance(saved, Stored):
        return saved
    if not isinstance(like, ShardTensor):
        return saved.read()
    if saved.shape != like.slices.shape:
        raise CheckpointError(
            f"{saved.file} has a tensor of shape {saved.shape}, it must be {like.slices.shape}"
        )
    local = torch.empty_like(like._local_tensor, dtype=saved.dtype)
    assert like.transport is not None
    _read_flat(saved, like.slices.stride, like.slices.by_rank[like.transport.rank], local)
    return ShardTensor(local, like.slices, like.transport)


def _read_flat(
    stored: Stored,
    stride: tuple[int, ...],
    ranges: Sequence[tuple[int, int]],
    local: Tensor,  # [the ranges' elements]
) -> None:
    taken = 0
    for start, numel in (piece for whole in ranges for piece in pieces(*whole)):
        local[taken : taken + numel].copy_(stored.read_range(stride, start, numel))
        taken += numel
    stored.forget()
