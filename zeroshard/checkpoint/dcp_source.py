"""What the names in a folder of torch.distributed.checkpoint mean: a `Source`.

Ours, and those that `get_state_dict` makes of any model and optimizer, whatever they were saved
under.
"""

import logging
import re
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ..errors import CheckpointError
from ..folders import METADATA
from ..wrappers import strip_wrappers
from .dcp_files import DcpFolder, StoredChunks
from .extra import put_together
from .names import CODES
from .source import FIELDS, PerRank, Source

__all__ = ["is_dcp", "open_dcp"]

logger = logging.getLogger(__name__)

FIELD_OF = {saved: field for field, saved in CODES.items()}
STATE = re.compile(rf"(?:(.*?)\.)??state\.(.+)\.({'|'.join((*FIELDS, *FIELD_OF))})")
SMALL_NBYTES = 16 * 2**20  # of values that others saved beside model and optimizer
USUAL = ("model.", "", "state_dict.", "module.", "app.model.")
SCHEDULERS = ("scheduler", "lr_scheduler")
TRAIN_STATE = "train_state"  # torchtitan's counters, which are tensors beside the weights
STEPS = ("step", "global_step", "iteration", f"{TRAIN_STATE}.step")


def is_dcp(path: Path) -> bool:
    """Whether a folder is one of torch.distributed.checkpoint."""
    return (path / METADATA).is_file()


def open_dcp(path: Path) -> Source:
    """A folder of torch.distributed.checkpoint.

    Raises:
        CheckpointError: it cannot be read, or is damaged.
    """
    folder = DcpFolder(path)
    keys = _Keys(folder)
    is_ours = folder.manifest is not None
    prefix, state = ("optimizer", keys.state()["optimizer"]) if is_ours else keys.main_state()
    source = Source(
        what="a zeroshard checkpoint" if is_ours else "a torch.distributed checkpoint", path=path
    )
    for name, fields in state.items():
        source.state[strip_wrappers(name)] = {
            FIELD_OF.get(field, field): keys.take(key) for field, key in fields.items()
        }
    _take_groups(keys, prefix, source)
    begin = "model." if is_ours else keys.prefix_of_weights(state)
    if not is_ours:
        _check_is_adamw(keys, prefix)
        _take_train_state(keys, source, begin)
    for key in keys.tensors_under(begin):
        source.weights[strip_wrappers(key.removeprefix(begin))] = keys.take(key)
    if is_ours:
        _take_ours(keys, source)
    else:
        _take_others(keys, source)
    return source


class _Keys:
    """The keys of a folder, each of which is taken once.

    Args:
        folder: of torch.distributed.checkpoint.
    """

    def __init__(self, folder: DcpFolder) -> None:
        self.folder = folder
        entries = folder.metadata.state_dict_metadata
        self.tensors = {k for k, e in entries.items() if isinstance(e, TensorStorageMetadata)}
        self.left = set(entries)
        self._stored: dict[int, StoredChunks] = {}  # by entry: tied ones have one

    def take(self, key: str) -> StoredChunks:
        """A tensor."""
        self.left.discard(key)
        entry = self.folder.metadata.state_dict_metadata[key]
        return self._stored.setdefault(id(entry), StoredChunks(self.folder, key))

    def value(self, key: str) -> Any:
        """A value, or a whole tensor."""
        if key in self.tensors:
            return self.take(key).read()
        self.left.discard(key)
        return self.folder.value(key)

    def nbytes(self, key: str) -> int:
        """Bytes of a whole tensor."""
        entry = self.folder.entry(key)
        return entry.size.numel() * entry.properties.dtype.itemsize

    def under(self, prefix: str) -> list[str]:
        """All keys that are left and begin with `prefix`."""
        return sorted(key for key in self.left if key.startswith(prefix))

    def tensors_under(self, prefix: str) -> list[str]:
        """The tensors among them."""
        return [key for key in self.under(prefix) if key in self.tensors]

    def nested(self, keys: Iterable[str]) -> dict[str, Any]:
        """What is under `keys`, nested as it was saved."""
        paths = self.folder.metadata.planner_data or {}
        flat = {key: self.value(key) for key in keys}
        nested: dict[str, Any] = unflatten_state_dict(
            flat, {key: paths.get(key, tuple(key.split("."))) for key in flat}
        )
        return nested

    def state(self) -> dict[str, dict[str, dict[str, str]]]:
        """{prefix: {name: {field: key}}} of what looks like the state of parameters."""
        found: dict[str, dict[str, dict[str, str]]] = {"optimizer": {}}
        for key in sorted(self.tensors):
            match = STATE.fullmatch(key)
            if match:
                of_prefix = found.setdefault(match[1] or "", {})
                of_prefix.setdefault(match[2], {})[match[3]] = key
        return found

    def main_state(self) -> tuple[str, dict[str, dict[str, str]]]:
        """That of the prefix with most parameters that have a first moment."""
        found = self.state()
        with_moments = {
            prefix: {
                name: fields
                for name, fields in names.items()
                if not {"exp_avg", "exp_avg_codes"}.isdisjoint(fields)
            }
            for prefix, names in found.items()
        }
        prefix = max(with_moments, key=lambda prefix: len(with_moments[prefix]))
        return prefix, with_moments[prefix]

    def prefix_of_weights(self, names: Collection[str]) -> str:
        """Under which the weights are."""
        tensors = self.tensors & self.left
        found = Counter(
            key.removesuffix(name)
            for name in names
            for key in tensors
            if key == name or key.endswith(f".{name}")
        )
        if not found:
            return next((p for p in USUAL if any(key.startswith(p) for key in tensors)), "")
        best = [prefix for prefix in sorted(found) if found[prefix] == max(found.values())]
        usual = [prefix for prefix in USUAL if prefix in best]
        if len(best) > 1 and not usual:
            raise CheckpointError(
                f"{self.folder.path} has weights under each of {', '.join(map(repr, best))}: save "
                "the model's under 'model'"
            )
        return (usual or best)[0]


def _take_groups(keys: _Keys, prefix: str, source: Source) -> None:
    """The param groups; one for each parameter where they were saved flat."""
    begin = f"{prefix}.param_groups." if prefix else "param_groups."
    found = keys.under(begin)
    if not found:
        return
    if any(key.endswith(".params") for key in found):
        nested: Any = keys.nested(found)
        for part in begin.rstrip(".").split("."):
            nested = nested[part]
        source.groups = list(nested.values()) if isinstance(nested, dict) else nested
        return
    by_name: dict[str, dict[str, Any]] = {}
    for key in found:
        name, _, option = key.removeprefix(begin).rpartition(".")
        by_name.setdefault(name, {"params": [strip_wrappers(name)]})[option] = keys.value(key)
    source.groups, source.groups_are_by_name = list(by_name.values()), True


def _take_ours(keys: _Keys, source: Source) -> None:
    assert keys.folder.manifest is not None
    source.step = keys.folder.manifest["step"]
    strides = keys.folder.manifest["strides"]
    source.strides = {name: tuple(stride) for name, stride in strides.items()}
    (source.rng,) = keys.value("rng")
    for key in keys.tensors_under("gradients."):
        source.gradients[key.removeprefix("gradients.")] = keys.take(key)
    if keys.under("scheduler"):
        (source.scheduler,) = keys.value("scheduler")
    by_rank: dict[str, dict[int, Any]] = {}
    for key in keys.under("extra_by_rank."):
        name, _, rank = key.removeprefix("extra_by_rank.").rpartition(".")
        (by_rank.setdefault(name, {})[int(rank)],) = keys.value(key)
    for name, values in by_rank.items():
        num_ranks = keys.folder.manifest["num_ranks"]
        source.extra[name] = PerRank(values.get(rank) for rank in range(num_ranks))
    if "scheduler" in source.extra:
        source.scheduler = source.extra["scheduler"]
    for key in keys.under("extra."):
        (source.extra[key.removeprefix("extra.")],) = keys.value(key)
    slices: dict[str, dict[int, StoredChunks]] = {}
    for key in keys.tensors_under("extra_slices."):
        name, _, number = key.removeprefix("extra_slices.").rpartition(".")
        slices.setdefault(name, {})[int(number)] = keys.take(key)
    for name, found in slices.items():
        stored = [found[number] for number in sorted(found)]
        if name == "scheduler":
            source.scheduler = put_together(source.scheduler, stored)
        else:
            source.extra[name] = put_together(source.extra[name], stored)


def _check_is_adamw(keys: _Keys, prefix: str) -> None:
    """Raise where there is state of an optimizer that was not understood."""
    left = keys.under(f"{prefix}.state." if prefix else "state.")
    if left:
        raise CheckpointError(
            f"{keys.folder.path} has optimizer state that is not AdamW's, like {left[0]!r}: load "
            "the weights alone"
        )


def _take_train_state(keys: _Keys, source: Source, begin: str) -> None:
    """Counters that were saved beside the model, as tensors or as values."""
    for name in STEPS:
        is_scalar = name not in keys.tensors or keys.folder.entry(name).size.numel() == 1
        is_weight = begin == "" and name in keys.tensors and name != f"{TRAIN_STATE}.step"
        if name in keys.left and is_scalar and not is_weight and source.step is None:
            source.step = int(keys.value(name))
    source.extra.update(keys.nested(keys.under(f"{TRAIN_STATE}.")))


def _take_others(keys: _Keys, source: Source) -> None:
    for name in SCHEDULERS:
        found = keys.under(f"{name}.")
        if found and source.scheduler is None:
            source.scheduler = keys.nested(found)[name]
    paths = keys.folder.metadata.planner_data or {}
    by_name: dict[str, list[str]] = {}
    for key in sorted(keys.left):
        by_name.setdefault(str(paths.get(key, (key,))[0]), []).append(key)
    for found in by_name.values():
        nbytes = sum(keys.nbytes(key) for key in found if key in keys.tensors)
        if nbytes <= SMALL_NBYTES:  # all of it or nothing
            try:
                source.extra.update(keys.nested(found))
            except CheckpointError as error:  # nothing of ours needs it
                logger.warning("%s is left out: %s", found[0], error)
    if keys.left:
        logger.warning(
            "%s also holds %s, which nothing here is loaded from",
            source.path,
            ", ".join(sorted(keys.left)[:5]) + (" ..." if len(keys.left) > 5 else ""),
        )
