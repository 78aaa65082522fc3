"""The user's own values in a checkpoint: what may be kept, and how slices are kept apart from it.

Reads and writes no files.
"""

import ctypes
import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..chunks import Chunks
from ..errors import CheckpointError, ConfigError
from ..shard_tensor import ShardTensor, Slices
from ..transport import HostRanks
from ..weights import pieces
from .names import plain
from .source import PerRank, Stored

__all__ = [
    "bytes_of",
    "digest_of",
    "fill",
    "mapped",
    "of_rank",
    "put_together",
    "read_own",
    "slices_in",
    "take_apart",
]

SLICE = "slice of a tensor in this checkpoint"


def take_apart(name: str, value: Any) -> tuple[Any, list[Chunks]]:
    """A value, or the `state_dict()` of an object, without its slices, and these.

    In the place of a slice is (SLICE, its number).

    Raises:
        ConfigError: it could not be read back without running code.
    """
    has_state = hasattr(value, "state_dict") and not isinstance(value, Mapping)
    value = plain(value.state_dict() if has_state else value, repr(name))
    slices: list[Chunks] = []

    def without(part: Any) -> Any:
        if isinstance(part, ShardTensor):
            slices.append(part.chunks())
            return (SLICE, len(slices) - 1)
        return part

    skeleton = mapped(value, without)
    _check_is_readable(name, skeleton)
    return skeleton, slices


def put_together(skeleton: Any, slices: Sequence[Stored]) -> Any:
    """What `take_apart` took apart, with where slices are stored in their places."""

    def back(part: Any) -> Any:
        return slices[part[1]] if _is_place(part) else part

    return mapped(skeleton, back) if slices else skeleton


def mapped(value: Any, function: Any) -> Any:
    """A nested value with `function` of each leaf."""
    if isinstance(value, dict):
        return type(value)({key: mapped(entry, function) for key, entry in value.items()})
    if isinstance(value, (list, tuple)) and not _is_place(value):
        return type(value)(mapped(entry, function) for entry in value)
    return function(value)


def _is_place(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and value[0] == SLICE


def _check_is_readable(name: str, skeleton: Any) -> None:
    """Raise if torch would need to run code to read a value; tensors it reads."""
    buffer = io.BytesIO()
    try:
        torch.save(mapped(skeleton, lambda v: None if isinstance(v, Tensor) else v), buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:
        raise ConfigError(
            f"{name!r} could not be read again without running code: save numbers, strings, "
            f"tensors, and lists and dictionaries of these ({str(error).splitlines()[0]})"
        ) from error


# --- of each rank


def of_rank(value: Any, ranks: HostRanks) -> Any:
    """A rank's own of what differs between the ranks that saved it, if these are as many."""
    if isinstance(value, PerRank) and len(value) == ranks.size:
        return value[ranks.rank]
    return value


def digest_of(value: Any) -> str:
    """Equal for values that are equal in kind and content."""
    digest = hashlib.sha256()

    def feed(value: Any) -> None:
        digest.update(f"{type(value).__name__}:".encode())
        if isinstance(value, dict):
            digest.update(f"{len(value)}:".encode())
            for key, entry in value.items():
                feed(key)
                feed(entry)
        elif isinstance(value, (list, tuple)):
            digest.update(f"{len(value)}:".encode())
            for entry in value:
                feed(entry)
        elif isinstance(value, Tensor):
            digest.update(f"{value.dtype} {tuple(value.shape)}:".encode())
            host = value.detach().cpu().contiguous()
            nbytes = host.numel() * host.element_size()
            if nbytes:  # without a copy
                digest.update((ctypes.c_char * nbytes).from_address(host.data_ptr()))
        else:
            text = repr(value).encode()
            digest.update(f"{len(text)}:".encode())
            digest.update(text)

    feed(value)
    return digest.hexdigest()


def bytes_of(tensor: Tensor) -> bytes:
    """The bytes of a tensor's elements, row-major."""
    host = tensor.detach().cpu().contiguous()
    return ctypes.string_at(host.data_ptr(), host.numel() * host.element_size())


# --- slices


def slices_in(saved: Any, like: Any = None) -> Iterator[tuple[Stored, Any]]:
    """What is stored as slices in a value, with what `like` has in the same place."""
    if isinstance(saved, Stored):
        yield saved, like
    elif isinstance(saved, Mapping):
        for key, entry in saved.items():
            yield from slices_in(entry, like.get(key) if isinstance(like, Mapping) else None)
    elif isinstance(saved, (list, tuple)):
        for number, entry in enumerate(saved):
            has_entry = isinstance(like, (list, tuple)) and number < len(like)
            yield from slices_in(entry, like[number] if has_entry else None)


def fill(saved: Any, like: Any) -> Any:
    """What was saved, with this rank's slices where `like` has slices, else with whole tensors.

    Raises:
        CheckpointError: a slice of another shape.
    """
    found = iter([_read(stored, template) for stored, template in slices_in(saved, like)])
    return mapped(saved, lambda part: next(found) if isinstance(part, Stored) else part)


def _read(stored: Stored, like: Any) -> Tensor:
    if not isinstance(like, ShardTensor):
        return stored.read()
    if stored.shape != like.slices.shape:
        raise CheckpointError(
            f"{stored.file} has a tensor of shape {stored.shape}, it must be {like.slices.shape}"
        )
    assert like.transport is not None
    local = read_own(stored, like.slices, like.transport.rank, like.device)
    return ShardTensor(local, like.slices, like.transport)


def read_own(stored: Stored, slices: Slices, rank: int, device: torch.device) -> Tensor:
    """[slice's numel] one rank's elements of a tensor, in storage order."""
    local = torch.empty(slices.numels[rank], dtype=stored.dtype, device=device)
    taken = 0
    for start, numel in (piece for whole in slices.by_rank[rank] for piece in pieces(*whole)):
        local[taken : taken + numel].copy_(stored.read_range(slices.stride, start, numel))
        taken += numel
    stored.forget()
    return local
