"""Weights from a file into a model that is sharded, or on the meta device: `load_weights`.

Every rank reads its own slices and no others.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from .adapters import adapter_parameters, is_adapted, plain_name, tuned_layers
from .agreement import in_agreement
from .construction import compare_ranks
from .conversions import seed_master
from .engine import Engine
from .errors import ConfigError
from .gather import engines_for, gather_whole_arenas
from .hub_names import Source, forget_conversions, sources_of
from .initialise import Buffer, fill_buffers, persistent_buffers
from .meta import give_elements, leave_meta
from .parameters import dense_stride
from .place import Place
from .weight_files import WeightFiles
from .wrappers import strip_wrappers, unwrap

__all__ = ["IncompatibleKeys", "Target", "load_weights", "parts_of", "pieces", "read_into"]


class IncompatibleKeys(NamedTuple):
    """What `load_weights(strict=False)` left out, as torch's `load_state_dict` says it."""

    missing_keys: list[str]
    unexpected_keys: list[str]


@torch.no_grad()
def load_weights(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    names: Callable[[str], str | None] | None = None,
) -> IncompatibleKeys:
    """Read a safetensors checkpoint into a model that has a zeroshard optimizer, in any stage.

    The model may be sharded, and may have come from the meta device. Every rank has to call this;
    each reads only its slices, and below stage 3 gathers the others'. Values are cast to the
    parameters' dtypes, and masters take them as they are in the file. Buffers that are not in the
    file and still on the meta device are computed as by `init_weights`. Moments stay.

    Args:
        model: the one that the optimizer was built with. PEFT's adapters may be in it: they are
            read if the file has them, and keep their values if not.
        path: a directory with `model.safetensors` or `model.safetensors.index.json`, or one file.
        strict: whether keys that are missing or unexpected are an error.
        names: from a name in the file to the one in the model, or to None: leave it out.

    Returns:
        The missing and the unexpected keys.

    Raises:
        ConfigError: keys that are missing, unexpected (`strict`) or misshapen, all of them listed;
            no such file; on every rank, before any parameter has changed.
    """
    model = unwrap(model)
    engines = engines_for(model)
    transport = engines[0].transport
    with ExitStack() as stack:
        with in_agreement(transport, "load_weights"):
            files = stack.enter_context(WeightFiles(Path(path)))
            plan = _Plan(model, files, names)
            plan.check(strict)
            plan.check_tied(engines)
            for engine in engines:
                engine.check_can_step("load_weights")
                engine.sharding.check_unpinned("load_weights")
                engine.masters.look_at_writes()
        compare_ranks(plan.describe(), transport)
        for engine in engines:
            engine.sharding.reshard_all()
        stack.callback(forget_conversions)
        with in_agreement(transport, "load_weights, which leaves the model half loaded,"):
            for target, source in plan.sources.items():
                read_into(target, source, engines)
    for engine in engines:
        gather_whole_arenas(engine, "loaded weights")
        engine.parameters.mark_loaded(plan.sources)
    fill_buffers(model)
    return IncompatibleKeys(plan.missing, plan.unexpected)


Target = nn.Parameter | Buffer

PIECE = 2**19  # elements that are read at once; a multiple of BLOCK


class Readable(Protocol):
    """A tensor in a file."""

    shape: Any  # None where only reading it tells

    @property
    def name(self) -> str:
        """What the file calls it."""

    def read(self) -> Tensor:
        """All of it."""

    def read_range(self, stride: tuple[int, ...], start: int, numel: int) -> Tensor:
        """[numel] elements in the storage order of `stride`."""


class _Plan:
    """Which tensor of the file goes where.

    Attributes:
        names: of the model's parameters and buffers.
        sources: the model's parameters and buffers -> what they are read from.
        missing: names in the model of which the file has none.
        unexpected: names in the file that the model does not have.
        misshapen: shapes that differ, and integers (as of quantised weights) for floats, in words.
        doubled: names for which the file has two tensors.
        again: what the file has for tied parameters under their other names.
    """

    def __init__(
        self, model: nn.Module, files: WeightFiles, names: Callable[[str], str | None] | None
    ) -> None:
        by_name, first_names = _targets(model)
        ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        self.names = first_names
        self.sources: dict[Target, Source] = {}
        self.doubled: list[str] = []
        self.again: list[tuple[Target, Source]] = []
        came: dict[str, Source] = {}
        self.unexpected: list[str] = []
        self.misshapen: list[str] = []
        inner = model.get_base_model() if is_adapted(model) else model  # type: ignore[operator]
        for name, source in sources_of(files, inner, by_name.keys(), names):
            if came.setdefault(name, source) is not source:
                self.doubled.append(f"{name}, from {came[name].name} and from {source.name}")
            if name not in by_name and not any(re.search(p, name) for p in ignored):
                self.unexpected.append(name)
            for target in by_name.get(name, ()):
                if self.sources.setdefault(target, source) is not source:
                    self.again.append((target, source))  # tied, and in the file under two names
                if not source.is_float and _wants_floats(target):
                    self.misshapen.append(f"{name} is not of floating-point numbers")
                if source.shape not in (None, shape_of(target)):
                    self.misshapen.append(f"{name} {source.shape}, in the model {shape_of(target)}")
        optional = adapter_parameters(model)
        self.missing = [
            name
            for target, name in first_names.items()
            if target not in self.sources and target not in optional
        ]

    def describe(self) -> dict[str, str]:
        """What is loaded from what, for the comparison of ranks."""
        return {f"the source of {self.names[t]}": s.name for t, s in self.sources.items()}

    def check(self, strict: bool) -> None:
        """Raise if it does not fit."""
        said = []
        if self.missing and strict:
            said.append(f"missing: {', '.join(self.missing)}")
        if self.unexpected and strict:
            said.append(f"unexpected: {', '.join(self.unexpected)}")
        if self.doubled:
            said.append(f"two tensors for one: {'; '.join(self.doubled)}")
        if self.misshapen:
            said.append(f"shapes or kinds that differ: {'; '.join(self.misshapen)}")
        if said:
            raise ConfigError(
                f"the file does not fit the model, and nothing was loaded. {'. '.join(said)}. Pass "
                "names= to translate names, or strict=False to load what is there"
            )

    def check_tied(self, engines: Sequence[Engine]) -> None:
        """Raise if the file has different values for one tied parameter; looks at own slices."""
        for target, source in self.again:
            first = self.sources[target]
            place = _place_of(target, engines)
            if place is None:
                same = torch.equal(first.read(), source.read())
            else:
                same = all(
                    torch.equal(first.read_range(*wanted), source.read_range(*wanted))
                    for start, numel in place.slices.by_rank[place.arena.rank]
                    for wanted in [(place.slices.stride, start, numel)]
                )
            if not same:
                raise ConfigError(
                    f"{first.name} and {source.name} are one parameter in the model, and differ in "
                    "the file: build the model untied, or leave one out with names="
                )


def _place_of(target: Target, engines: Sequence[Engine]) -> Place | None:
    for engine in engines:
        if isinstance(target, nn.Parameter) and target in engine.parameters.places:
            return engine.parameters.places[target]
    return None


def _targets(model: nn.Module) -> tuple[dict[str, list[Target]], dict[Target, str]]:
    """What each name means, and the first name of each parameter and persistent buffer."""
    adapted = any(True for _ in tuned_layers(model))
    named: list[tuple[str, Target]] = [
        *model.named_parameters(remove_duplicate=False),
        *persistent_buffers(model),
    ]
    by_name: dict[str, list[Target]] = {}
    first_names: dict[Target, str] = {}
    for name, target in named:
        name = strip_wrappers(name)
        name = plain_name(name) if adapted else name
        by_name.setdefault(name, []).append(target)
        first_names.setdefault(target, name)
    return by_name, first_names


def _wants_floats(target: Target) -> bool:
    return isinstance(target, nn.Parameter) and target.is_floating_point()


def shape_of(target: Target) -> tuple[int, ...]:
    """The shape of a parameter, or of what a buffer is now."""
    return tuple(target.tensor.shape if isinstance(target, Buffer) else target.shape)


def read_into(target: Target, source: Readable, engines: Sequence[Engine]) -> None:
    """Read what this rank keeps of one tensor."""
    if source.shape is None and tuple(source.read().shape) != shape_of(target):
        raise ConfigError(
            f"{source.name} {tuple(source.read().shape)}, put together from the file's tensors, is "
            f"{shape_of(target)} in the model"
        )
    if isinstance(target, Buffer):
        target.set(source.read(), engines[0].device)
        return
    for engine in engines:
        place = engine.parameters.places.get(target)
        if place is not None:
            _read_slices(engine, place, source)
            return
    leave_meta([target], engines[0].device)
    if target.untyped_storage().nbytes() == 0:
        give_elements(target)
    _read_whole(target, source)


def _read_whole(target: nn.Parameter, source: Readable) -> None:
    stride = dense_stride(target)
    if target.stride() != stride and target.numel() > 1:
        target.copy_(source.read())
        return
    flat = target.as_strided((target.numel(),), (1,), target.storage_offset())
    for start, numel in pieces(0, target.numel()):
        flat[start : start + numel].copy_(source.read_range(stride, start, numel))


def _read_slices(engine: Engine, place: Place, source: Readable) -> None:
    arena, slices = place.arena, place.slices
    slot = engine.slot_of.get(place.parameter)
    if slot is None and arena.shard is None:  # frozen, and of one element
        place.view.copy_(source.read())
        return
    ranges = slices.by_rank[engine.transport.rank]
    if slot is None:
        shard, taken = engine.parameters.shard_of(place), 0
        for start, numel in (piece for whole in ranges for piece in pieces(*whole)):
            values = source.read_range(slices.stride, start, numel)
            shard[taken : taken + numel].copy_(values)
            taken += numel
        return
    master = engine.formats[engine.layout.slots[slot].arena].master
    for start, numel, parameter, state in parts_of(engine, slot):
        values = source.read_range(slices.stride, start, numel).to(parameter.device)
        parameter.copy_(values)
        seed_master(values.float(), parameter, state, master)


def parts_of(engine: Engine, slot: int) -> Iterator[tuple[int, int, Tensor, dict[str, Tensor]]]:
    """(first element of the slot, elements, parameter, state) of each piece that this rank has.

    Pieces begin at blocks and are small, so that what is read for one of them takes little memory.
    """
    arena = engine.arenas[engine.layout.slots[slot].arena]
    for run in engine.layout.runs_of_rank(engine.transport.rank)[slot]:
        parameter = arena.parameter_run(run)
        for at, numel in pieces(0, run.numel):
            start = run.shard_offset + at
            state = arena.state_of(start, start + numel)
            yield run.slot_offset + at, numel, parameter[at : at + numel], state


def pieces(start: int, numel: int) -> Iterator[tuple[int, int]]:
    """(start, numel) of the pieces that a range is read in."""
    for at in range(start, start + numel, PIECE):
        yield at, min(PIECE, start + numel - at)
