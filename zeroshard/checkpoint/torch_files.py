"""Checkpoints that `torch.save` wrote to one file: `{"model": ..., "optimizer": ...}`.

The file is mapped, so that a range of a tensor reads only its own bytes, and no code is taken out
of it.
"""

import logging
import pickle
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..boxes import block, boxes_of
from ..errors import CheckpointError
from ..wrappers import strip_wrappers
from .source import FIELDS, Source, Stored

__all__ = ["TensorInMemory", "is_torch_file", "open_torch_file"]

logger = logging.getLogger(__name__)

WHAT = "a torch.save file"
MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module")
OPTIMIZER_KEYS = ("optimizer", "optim", "optimizer_state_dict")
STEP_KEYS = ("step", "global_step", "iteration")
ZIP = b"PK\x03\x04"
LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # a pickled number, of torch before 1.6
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.Size)
DDP = "module."


def is_torch_file(path: Path) -> bool:
    """Whether a path is a file that `torch.save` wrote, as its first bytes say."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        start = file.read(len(LEGACY))
    return start.startswith(ZIP) or start == LEGACY


def open_torch_file(path: Path, names: Sequence[Sequence[str]] | None = None) -> Source:
    """What a file holds.

    The model is under one of `MODEL_KEYS`, the optimizer under one of `OPTIMIZER_KEYS`; a file may
    also be the bare state dict of either. What DDP and torch.compile put before names is taken off.

    Args:
        path: of the file.
        names: of the optimizer's parameters by param group, which such files tell by position
            unless the optimizer was given names itself. None: not known.

    Raises:
        CheckpointError: it cannot be read without running code, or holds something else.
    """
    content = _content(path)
    try:
        return _source(path, content, names)
    except CheckpointError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: expected state dicts of a model and an optimizer, and they are made in "
            f"another way: {error!r}"
        ) from error


def _content(path: Path) -> dict[str, Any]:
    """The file's value, with tensors that are read when they are used."""
    with path.open("rb") as file:
        is_legacy = file.read(1) != ZIP[:1]
    if is_legacy:
        raise CheckpointError(
            f"{path} is in torch's format of before version 1.6, of which no part can be read "
            "alone: save it anew with torch.save(torch.load(path, weights_only=True), new_path)"
        )
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+) (?:was not|whose module)", str(error))
        if named is None:
            raise CheckpointError(f"{path} is damaged: it cannot be unpickled") from error
        raise CheckpointError(
            f"{path} names {named[1]}, which would have to be run: save tensors, numbers, strings, "
            "and lists and dictionaries of these"
        ) from error
    except Exception as error:
        first_line = (str(error) or repr(error)).splitlines()[0]
        raise CheckpointError(f"{path} is damaged, or no {WHAT[2:]}: {first_line}") from error
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise CheckpointError(
            f"{path}: expected a dictionary with {MODEL_KEYS[0]!r} and {OPTIMIZER_KEYS[0]!r}, got "
            f"a {type(content).__name__}"
        )
    return content


class TensorInMemory(Stored):
    """A tensor of this process, whose memory may be a file's."""

    def __init__(self, tensor: Tensor, file: Path) -> None:
        super().__init__(tuple(tensor.shape), tensor.dtype, file)
        self.tensor = tensor.detach()

    def read_range(self, stride: tuple[int, ...], start: int, numel: int) -> Tensor:
        flat = torch.empty(numel, dtype=self.dtype)
        for box in boxes_of(self.shape, stride, start, numel):
            ranges = zip(box.offsets, box.sizes, strict=True)
            part = self.tensor[tuple(slice(offset, offset + size) for offset, size in ranges)]
            block(flat, box, stride).copy_(part)
        return flat


class _Nameless(Source):
    """A source whose state is there, under positions that nobody can name: asking for it raises."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("state", "groups"):
            raise CheckpointError(
                f"{self.path} tells the optimizer's parameters by position, and expected are their "
                "names: load it with zeroshard.load_checkpoint, where the model and the optimizer "
                "are, and save it anew"
            )
        return super().__getattribute__(name)


def _source(path: Path, content: dict[str, Any], names: Sequence[Sequence[str]] | None) -> Source:
    model_key, optimizer_key = _keys(path, content)
    model = content if model_key == "" else content.get(model_key or "", {})
    optimizer = content if optimizer_key == "" else content.get(optimizer_key or "")
    known = {name for group in names or () for name in group}
    weights = _weights(path, model, _bare_names(model, known))
    state: dict[str, dict[str, Stored]] = {}
    if optimizer is None:
        source = Source(what=WHAT, path=path, weights=weights)
    else:
        saved = optimizer["param_groups"]
        by_group = _names_by_group(path, saved, names)
        if by_group is None:
            source = _Nameless(what=WHAT, path=path, weights=weights)
        else:
            groups = [
                {
                    **{key: value for key, value in group.items() if key != "param_names"},
                    "params": of,
                }
                for group, of in zip(saved, by_group, strict=True)
            ]
            state = _state(path, optimizer, by_group, weights)
            source = Source(what=WHAT, path=path, weights=weights, state=state, groups=groups)
    if "" not in (model_key, optimizer_key):
        _add_rest(source, {k: content[k] for k in content if k not in (model_key, optimizer_key)})

    def close() -> None:  # with the last tensor goes the mapping
        weights.clear()
        state.clear()

    source.close = close
    return source


def _add_rest(source: Source, rest: Mapping[str, Any]) -> None:
    """What is neither model nor optimizer."""
    for key, value in rest.items():
        number = _whole_number(value) if key in STEP_KEYS else None
        if number is not None and source.step is None:
            source.step = number
        elif (key == "scheduler" or key.startswith("lr_scheduler")) and source.scheduler is None:
            source.scheduler = value
        elif _is_plain(value):
            source.extra[key] = value
        else:
            logger.warning("%s: %r is not plain values, and is left out", source.path, key)


def _keys(path: Path, content: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Where model and optimizer are; "" is the whole file, None nowhere."""
    if {"state", "param_groups"} <= content.keys():
        return None, ""
    if content and all(isinstance(value, Tensor) for value in content.values()):
        return "", None
    model = [key for key in MODEL_KEYS if isinstance(content.get(key), dict)]
    optimizer = [
        key
        for key in OPTIMIZER_KEYS
        if isinstance(content.get(key), dict) and "param_groups" in content[key]
    ]
    if not model and not optimizer:
        raise CheckpointError(
            f"{path}: expected a state dict under one of {', '.join(MODEL_KEYS)}, or a bare one; "
            f"the file has {', '.join(map(repr, content)) or 'nothing'}"
        )
    return next(iter(model), None), next(iter(optimizer), None)


def _bare_names(wrapped: Iterable[str], known: Collection[str]) -> dict[str, str]:
    """Names -> without what wrappers add, unless the model at hand has names that begin so."""
    bare = {name: strip_wrappers(name) for name in wrapped}
    while bare and all(name.startswith(DDP) for name in bare.values()):
        if any(name in known for name in bare.values()):
            break
        bare = {name: strip_wrappers(short[len(DDP) :]) for name, short in bare.items()}
    return bare


def _weights(path: Path, model: Mapping[str, Any], bare: Mapping[str, str]) -> dict[str, Stored]:
    """The model's tensors; what was one tensor under two names is one still."""
    weights: dict[str, Stored] = {}
    known: dict[Any, Stored] = {}
    for name, value in model.items():
        tensor = _checked(path, repr(bare[name]), value)
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        stored = known.get(place) if tensor.numel() else None
        if stored is None:
            stored = known[place] = TensorInMemory(tensor, path)
        weights[bare[name]] = stored
    return weights


def _checked(path: Path, what: str, value: Any) -> Tensor:
    """A tensor that is whole and dense."""
    if type(value) not in (Tensor, torch.nn.Parameter):
        is_part = isinstance(value, DTensor)
        remedy = (
            "which is one rank's part: save with zeroshard.save_checkpoint, or gather it first"
            if is_part
            else "which is no tensor: save it beside the state dict"
        )
        raise CheckpointError(f"{path}: {what} is a {type(value).__name__}, {remedy}")
    if value.layout != torch.strided or value.is_quantized:
        raise CheckpointError(
            f"{path}: {what} must be a dense tensor, and is quantized or {value.layout}"
        )
    tensor: Tensor = value
    return tensor


def _names_by_group(
    path: Path, saved: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]] | None
) -> list[list[str]] | None:
    """Names of the parameters of every group; None: nobody knows them."""
    known = {name for group in names or () for name in group}
    wrapped = [name for group in saved for name in group.get("param_names", ())]
    bare = _bare_names(wrapped, known)
    if all("param_names" in group for group in saved):
        by_group = [[bare[name] for name in group["param_names"]] for group in saved]
    elif names is None:
        return None
    else:
        by_group = [list(group) for group in names]
    numels, given = [[len(group) for group in of] for of in (by_group, _positions(saved))]
    if numels != given:
        raise CheckpointError(
            f"{path}: expected an optimizer with {len(numels)} param groups of {numels} "
            f"parameters, and its groups have {given}: build the groups as they were when it was "
            "saved"
        )
    return by_group


def _positions(saved: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    return [list(group["params"]) for group in saved]


def _state(
    path: Path,
    optimizer: Mapping[str, Any],
    by_group: Sequence[Sequence[str]],
    weights: Mapping[str, Stored],
) -> dict[str, dict[str, Stored]]:
    """The optimizer's state by name."""
    positions = chain.from_iterable(_positions(optimizer["param_groups"]))
    name_of = dict(zip(positions, chain.from_iterable(by_group), strict=True))
    state: dict[str, dict[str, Stored]] = {}
    for position, entry in optimizer["state"].items():
        name = name_of[position]
        strange = sorted(entry.keys() - set(FIELDS))
        if strange:
            raise CheckpointError(
                f"{path}: the state of {name!r} must be AdamW's ({', '.join(FIELDS[:3])}), and has "
                f"{', '.join(strange)}"
            )
        state[name] = {}
        for field, value in entry.items():
            what = f"{field} of {name!r}"
            if field == "step":
                value = torch.as_tensor(value, dtype=torch.float32).reshape(())
            stored = TensorInMemory(_checked(path, what, value), path)
            expected = weights[name].shape if name in weights else stored.shape
            if (
                field not in ("step", "exp_avg_scale", "exp_avg_sq_scale")
                and stored.shape != expected
            ):
                raise CheckpointError(
                    f"{path}: {what} must have shape {expected}, as its weight has, and has "
                    f"{stored.shape}: the optimizer that was saved had its parameters in another "
                    "order"
                )
            state[name][field] = stored
    return state


def _whole_number(value: Any) -> int | None:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return int(value) if is_whole and not isinstance(value, bool) else None


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_plain(part) for pair in value.items() for part in pair)
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_plain, value))
    return isinstance(value, (Tensor, *PLAIN))
