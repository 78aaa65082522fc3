"""The optimizer's state in the files of all of DeepSpeed's ranks, by parameter.

Where parameters lie in them is in `deepspeed_layout.py`.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from .deepspeed_files import Files, load_file
from .deepspeed_layout import Dealt, Line, OnLine, Shapes, line_offsets, share_offsets
from .source import Stored
from .torch_files import TensorInMemory

__all__ = ["OptimizerState"]

logger = logging.getLogger(__name__)

MOMENTS = ("exp_avg", "exp_avg_sq")
# Of a param group: what is told in another way, or only chooses an implementation.
LEFT_OUT = (
    *("params", "step", "bias_correction"),
    *("foreach", "fused", "capturable", "differentiable"),
)


class OptimizerState:
    """The optimizer's state in the files of all ranks.

    Args:
        files: of the checkpoint.
        shapes: of the trained parameters, by flat tensor.

    Attributes:
        is_dealt: whether every parameter is dealt out to all ranks, as in stage 3.
    """

    def __init__(self, files: Files, shapes: list[Shapes]) -> None:
        first = _optimizer_in(files.first_optimizer)
        self.is_dealt = "fp32_flat_groups" in first
        counts = first["partition_count"]
        distinct = set(counts) if isinstance(counts, list) else {counts}
        if len(distinct) != 1:
            raise CheckpointError(
                f"{files.optimizer[0]} has param groups on different numbers of ranks, "
                f"{sorted(distinct)}: expected all on the same"
            )
        self.count: int = distinct.pop()
        files.check(self.count, weights_are_dealt=self.is_dealt)
        self.files = [files.optimizer[rank] for rank in range(self.count)]
        self.ranks = [first, *map(_optimizer_in, self.files[1:])]
        self.shapes = [{name: tuple(shape) for name, shape in group.items()} for group in shapes]
        weights = "fp32_flat_groups" if self.is_dealt else "single_partition_of_fp32_groups"
        base = "optimizer_state_dict" if self.is_dealt else "base_optimizer_state"
        self.masters = [content[weights] for content in self.ranks]  # by rank and flat tensor
        self.base = [content[base] for content in self.ranks]
        for file, content, masters in zip(self.files, self.ranks, self.masters, strict=True):
            if content["partition_count"] != counts or len(masters) != len(self.shapes):
                raise CheckpointError(
                    f"{file} was not saved together with {self.files[0].name}: expected "
                    f"{len(self.shapes)} flat tensors of {counts} ranks, and it has {len(masters)} "
                    f"of {content['partition_count']}"
                )
        self._check_entries()

    def _entry(self, rank: int, flat: int) -> Mapping[str, Any]:
        """What a rank holds of one flat tensor beside weights; nothing before the first step."""
        base = self.base[rank]
        if isinstance(base, list):  # elastic_checkpoint
            entry: Mapping[str, Any] = base[flat]
        else:
            entry = base["state"].get(flat, {})
        return entry

    def _step(self, rank: int, flat: int) -> float | None:
        """How many steps a rank counted, wherever that optimizer keeps it."""
        entry = self._entry(rank, flat)
        if not entry:
            return None
        step = entry.get("step", self.ranks[rank].get("base_optimizer_state_step"))
        if step is None:
            step = next(g for g in self.base[rank]["param_groups"] if flat in g["params"])["step"]
        return float(step)

    def _check_entries(self) -> None:
        """Raise unless it is the state of AdamW, of the same step on all ranks."""
        for flat in range(len(self.shapes)):
            for rank, file in enumerate(self.files):
                entry = self._entry(rank, flat)
                odd = {"step", *MOMENTS} ^ {"step", *entry} if entry else set()
                if odd:
                    raise CheckpointError(
                        f"{file} is of another optimizer than AdamW: expected exp_avg and "
                        f"exp_avg_sq of every parameter, and it has {', '.join(map(str, entry))}"
                    )
                if self._step(rank, flat) != self._step(0, flat):
                    raise CheckpointError(
                        f"{file} was not saved together with {self.files[0].name}: it is of step "
                        f"{self._step(rank, flat)}, the other one of step {self._step(0, flat)}"
                    )

    def _offsets_in(self, flat: int) -> dict[str, int]:
        """Where the parameters in one flat tensor begin."""
        shapes, numels = self.shapes[flat], [masters[flat].numel() for masters in self.masters]
        if self.is_dealt:
            offsets, end = share_offsets(shapes, self.count)
            for file, numel in zip(self.files, numels, strict=True):
                _check_numel(file, flat, numel, end, padding=0)
            return offsets
        between = self.ranks[0].get("param_alignment_paddings")  # not in every version
        offsets, end = line_offsets(shapes, between[flat] if between else [0] * len(shapes))
        padding = sum(paddings[flat] for c in self.ranks if (paddings := c.get("group_paddings")))
        _check_numel(self.files[0], flat, sum(numels), end, padding=padding)
        return offsets

    def _stored(self, flat: int, field: str) -> dict[str, Stored]:
        """One field of the parameters in one flat tensor."""
        tensors = []
        for rank, masters in enumerate(self.masters):
            numel = masters[flat].numel()
            tensor = masters[flat] if field == "master" else self._entry(rank, flat)[field]
            if tensor.numel() < numel:
                raise CheckpointError(
                    f"{self.files[rank]} is damaged: expected {numel} elements of {field} in flat "
                    f"tensor {flat}, and there are {tensor.numel()}"
                )
            tensors.append(tensor.detach())  # more than that is padding, after the last parameter
        shapes, offsets, file = self.shapes[flat], self._offsets_in(flat), self.files[0]
        if self.is_dealt:
            return {n: Dealt(shape, tensors, offsets[n], file) for n, shape in shapes.items()}
        line = Line(tensors)
        return {n: OnLine(shape, line, offsets[n], file) for n, shape in shapes.items()}

    def state(self) -> dict[str, dict[str, Stored]]:
        """Of each trained parameter, as a source has it."""
        state: dict[str, dict[str, Stored]] = {}
        for flat, shapes in enumerate(self.shapes):
            step = self._step(0, flat)
            fields = ("master", *(MOMENTS if self._entry(0, flat) else ()))
            by_field = {field: self._stored(flat, field) for field in fields}
            for name in shapes:
                state[name] = {field: stored[name] for field, stored in by_field.items()}
                if step is not None:
                    value = torch.tensor(step, dtype=torch.float32)
                    state[name]["step"] = TensorInMemory(value, self.files[0])
        return state

    def groups(self) -> list[dict[str, Any]]:
        """The param groups with names."""
        base = self.base[0]
        if isinstance(base, list):
            logger.warning(
                "%s has no options of its param groups, as saved with elastic_checkpoint",
                self.files[0],
            )
            return [{"params": list(shapes)} for shapes in self.shapes]
        groups = []
        for group in base["param_groups"]:
            if not group.get("bias_correction", True):
                raise CheckpointError(
                    f"{self.files[0]} is of an Adam without bias correction, whose updates AdamW "
                    "cannot continue: expected bias_correction=True"
                )
            options = {key: value for key, value in group.items() if key not in LEFT_OUT}
            names = [name for flat in group["params"] for name in self.shapes[flat]]
            groups.append({**options, "params": names})
        return groups


def _optimizer_in(file: Path) -> dict[str, Any]:
    """What a rank's file holds of the optimizer."""
    content: dict[str, Any] = load_file(file).get("optimizer_state_dict", {})
    if not {"fp32_flat_groups", "single_partition_of_fp32_groups"} & content.keys():
        raise CheckpointError(
            f"{file} holds no fp32 weights of ZeRO stage 1, 2 or 3: expected fp32_flat_groups or "
            f"single_partition_of_fp32_groups, got {', '.join(map(str, content)) or 'nothing'}"
        )
    return content


def _check_numel(file: Path, flat: int, numel: int, expected: int, *, padding: int) -> None:
    """Raise unless a flat tensor has as many elements as its parameters, or these and padding."""
    if numel not in (expected, expected + padding):
        raise CheckpointError(
            f"{file} does not fit to the weights' file: expected {expected} elements in flat "
            f"tensor {flat}, and there are {numel}"
        )
