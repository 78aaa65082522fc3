"""What a checkpoint holds of a model and its optimizer, by name. Writes nothing.

Each rank has its own part: of everything trained or sharded its slices, of what is whole on every
rank an even share, and the first rank alone has what is the same everywhere.
"""

import random
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..accounts import is_updated_by_torch
from ..boxes import row_major
from ..chunks import Chunks
from ..engine import Engine
from ..errors import ConfigError
from ..initialise import persistent_buffers
from ..layout import BLOCK
from ..optimizer import AdamW
from ..parameters import dense_stride
from ..place import Place
from ..shard_tensor import ShardTensor
from ..state import state_of
from ..transport import HostRanks, Op
from ..wrappers import ddp_is_local, strip_wrappers
from .extra import bytes_of, digest_of, mapped, take_apart
from .names import named_groups, names_of, plain, saved_name

__all__ = ["Content", "content_of", "names_in", "random_states", "set_random_state"]


@dataclass(kw_only=True)
class Content:
    """What one rank writes.

    Attributes:
        values: names, nested, and what this rank has of them.
        extra: the user's values without slices, by name; these are in `values`.
        digests: of them.
        random_states: this rank's.
        tied: more names of tied parameters -> the one that they are written under.
        strides: of parameters that are not row-major, by name.
    """

    values: dict[str, Any]
    extra: dict[str, Any]
    digests: dict[str, str]
    random_states: dict[str, Any]
    tied: dict[str, str]
    strides: dict[str, tuple[int, ...]]

    @property
    def aliases(self) -> dict[str, str]:
        """`tied` as names in the checkpoint."""
        return {f"model.{alias}": f"model.{name}" for alias, name in self.tied.items()}

    def on_host(self) -> "Content":
        """A copy in host memory, of this rank's part and nothing else."""
        # `values` hold what is in `extra` by now.
        return replace(self, values=mapped(self.values, _on_host), extra={})

    def share_out(self, ranks: HostRanks) -> None:
        """Decide which rank writes what of the rest; all have to call this.

        Values that are the same on all ranks are written once, others by each; slices by all.
        torch.distributed.checkpoint takes dictionaries apart, and tuples as they are.
        """
        op = Op("save_checkpoint")
        answers = ranks.all_gather_object(self.digests, op=op)
        states = ranks.to_first(self.random_states, op=op)
        if ranks.is_first:
            self.values["rng"] = (states,)
        for name, value in self.extra.items():
            if len({theirs.get(name) for theirs in answers}) > 1:
                by_rank = self.values.setdefault("extra_by_rank", {}).setdefault(name, {})
                by_rank[str(ranks.rank)] = (value,)
            elif ranks.is_first and name == "scheduler":
                self.values[name] = (value,)
            elif ranks.is_first:
                self.values.setdefault("extra", {})[name] = (value,)


def content_of(
    model: nn.Module, optimizer: AdamW, extra: Mapping[str, Any], ranks: HostRanks
) -> Content:
    """Everything that training needs to go on, of this rank. Does not communicate.

    Args:
        model: whose weights and buffers.
        optimizer: whose state.
        extra: what else, by name: values, or what has a `state_dict()`.
        ranks: all that write.

    Raises:
        ConfigError: a value that could not be read back without running code, or a gradient that
            backward left on its rank.
    """
    engine = optimizer.engine
    names = names_of(model, optimizer)
    weights, tied = _weights(model, engine, ranks)
    state = {names[p]: _state(engine, slot, ranks) for p, slot in engine.slot_of.items()}
    values: dict[str, Any] = {"model": weights, "optimizer": {"state": state}}
    gradients = _waiting_gradients(engine, names)
    if gradients:
        values["gradients"] = gradients
    if ranks.is_first:
        # As in state_dict(): torch's AdamW takes the implementation from the file.
        fused = {"fused": True} if is_updated_by_torch(engine) else {}
        values["optimizer"]["param_groups"] = [
            {key: plain(value, f"{key!r} of a param group") for key, value in group.items()} | fused
            for group in named_groups(names, optimizer)
        ]
    kept = {name: take_apart(name, value) for name, value in extra.items()}
    slices = {
        name: {str(number): chunks for number, chunks in enumerate(found)}
        for name, (_, found) in kept.items()
    }
    values["extra_slices"] = {name: found for name, found in slices.items() if found}
    return Content(
        values=values,
        extra={name: value for name, (value, _) in kept.items()},
        digests={name: digest_of(value) for name, (value, _) in kept.items()},
        random_states=random_states(engine.device),
        tied=tied,
        strides=_strides(model, engine),
    )


# --- weights


def names_in(model: nn.Module) -> dict[str, Any]:
    """Every parameter and persistent buffer (`Buffer`) of a model by each of its names."""
    named = [*model.named_parameters(remove_duplicate=False), *persistent_buffers(model)]
    return {strip_wrappers(name): target for name, target in named}


def _weights(
    model: nn.Module, engine: Engine, ranks: HostRanks
) -> tuple[dict[str, Chunks], dict[str, str]]:
    weights: dict[str, Chunks] = {}
    first_names: dict[Any, str] = {}
    tied: dict[str, str] = {}
    places = engine.parameters.places
    for number, (name, target) in enumerate(names_in(model).items()):
        first = first_names.setdefault(target, name)
        if first != name:
            tied[name] = first
            continue
        chunks: Chunks | None
        place = places.get(target) if isinstance(target, nn.Parameter) else None
        if place is not None:
            chunks = _of_place(engine, place)
        elif isinstance(target, nn.Parameter):
            chunks = _share(target, number, ranks)
        else:
            chunks = _all_of(target.tensor) if ranks.is_first else None
        if chunks is not None:
            weights[name] = chunks
    return weights, tied


def _strides(model: nn.Module, engine: Engine) -> dict[str, tuple[int, ...]]:
    """Of the parameters that are not row-major."""
    places, found = engine.parameters.places, {}
    for name, parameter in model.named_parameters():
        place = places.get(parameter)
        stride = dense_stride(parameter) if place is None else place.slot.spec.stride
        if stride != row_major(parameter.shape):
            found[strip_wrappers(name)] = stride
    return found


def _of_place(engine: Engine, place: Place) -> Chunks:
    """This rank's slice of a parameter that lives in an arena."""
    spec, rank = place.slot.spec, engine.transport.rank
    ranges, taken = [], 0
    is_sharded = place.arena.shard is not None
    for start, numel in place.slices.by_rank[rank]:
        ranges.append((start, numel, taken if is_sharded else start))
        taken += numel
    if spec.numel == 0 and rank == 0:
        ranges = [(0, 0, 0)]
    flat = engine.parameters.shard_of(place) if is_sharded else place.flat
    return Chunks(flat, spec.shape, spec.stride, ranges)


def _share(tensor: Tensor, number: int, ranks: HostRanks) -> Chunks | None:
    """This rank's share of a tensor that is the same on all."""
    numel = tensor.numel()
    blocks = -(-numel // BLOCK)
    if blocks < ranks.size:  # a small one is one rank's
        return _all_of(tensor) if number % ranks.size == ranks.rank else None
    start, stop = (
        min(blocks * rank // ranks.size * BLOCK, numel) for rank in (ranks.rank, ranks.rank + 1)
    )
    return _all_of(tensor, start, stop)


def _all_of(tensor: Tensor, start: int = 0, stop: int | None = None) -> Chunks:
    """Elements [start, stop) of a plain tensor in storage order."""
    tensor = tensor.detach()
    stride = dense_stride(tensor)
    if tensor.stride() != stride and tensor.numel() > 1:
        tensor = torch.empty_strided(
            tensor.shape, stride, dtype=tensor.dtype, device=tensor.device
        ).copy_(tensor)
    flat = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    stop = tensor.numel() if stop is None else stop
    return Chunks(flat, tuple(tensor.shape), stride, [(start, stop - start, start)])


# --- the optimizer's state


def _state(engine: Engine, slot: int, ranks: HostRanks) -> dict[str, Any]:
    """A parameter's state, under names that say in which format it is."""
    state: dict[str, Any] = {}
    for key, value in state_of(engine, slot).items():
        if isinstance(value, ShardTensor):
            state[saved_name(key, value.dtype)] = value.chunks()
        elif key != "step":
            state[saved_name(key, value.dtype)] = _all_of(value)
        elif ranks.is_first:
            state[key] = value.detach().clone()
    return state


def _waiting_gradients(engine: Engine, names: Mapping[nn.Parameter, str]) -> dict[str, Any]:
    """The slices of gradients that no step has used yet.

    Raises:
        ConfigError: a backward under no_sync() left one on its rank.
    """
    gradients = engine.gradients
    ddp_holds_back = gradients.ddp_owns_gradients() and ddp_is_local(engine.slot_of)
    found: dict[str, Any] = {}
    for parameter, slot in engine.slot_of.items():
        grad = parameter.grad
        if grad is None:
            continue
        waits = engine.waiting.holds(parameter, is_ours=gradients.shards.shows(slot, grad))
        if gradients.is_local(slot) or (waits and ddp_holds_back):
            raise ConfigError(
                f"{names[parameter]!r} has a gradient of this rank alone, from a backward under "
                "no_sync(), which a checkpoint cannot keep: save after a backward outside of it, "
                "or after step(), or drop the gradients with zero_grad()"
            )
        if waits:
            local = gradients.checked(slot, grad)
            slices = gradients.shards.slices[slot]
            found[names[parameter]] = ShardTensor(local, slices, engine.transport).chunks()
    return found


# --- random states


def random_states(device: torch.device) -> dict[str, Any]:
    """Of torch on the host and on `device`, of Python, and of numpy where it is in use."""
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {
        "torch": bytes_of(torch.get_rng_state()),
        "python": (version, struct.pack(f"<{len(words)}I", *words), gauss),
    }
    if device.type != "cpu":
        states[device.type] = bytes_of(torch.get_device_module(device).get_rng_state(device))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, words, *rest = numpy.random.get_state()
        states["numpy"] = (kind, words.astype("<u4").tobytes(), *rest)
    return states


def set_random_state(states: Mapping[str, Any], device: torch.device) -> None:
    """Go on where `random_states` was called."""
    torch.set_rng_state(_tensor_of(states["torch"]))
    version, words, gauss = states["python"]
    random.setstate((version, struct.unpack(f"<{len(words) // 4}I", words), gauss))
    if device.type in states:
        torch.get_device_module(device).set_rng_state(_tensor_of(states[device.type]), device)
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in states:
        kind, words, *rest = states["numpy"]
        numpy.random.set_state((kind, numpy.frombuffer(words, "<u4"), *rest))


def _tensor_of(state: bytes) -> Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


# --- in the background


def _on_host(value: Any) -> Any:
    if isinstance(value, Chunks):
        return value.on_host()
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
