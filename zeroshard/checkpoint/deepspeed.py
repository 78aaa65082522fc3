"""DeepSpeed's ZeRO checkpoints as a source: weights, masters, moments and options by name.

DeepSpeed need not be installed. How parameters lie in its files is in `deepspeed_layout.py`.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..wrappers import strip_wrappers
from .deepspeed_files import Files, checkpoint_folder, is_plain, load_file
from .deepspeed_layout import Dealt, Line, OnLine, Shapes, line_offsets, share_of, share_offsets
from .source import Source, Stored
from .torch_files import TensorInMemory

__all__ = ["is_deepspeed", "open_deepspeed"]

T = TypeVar("T")
logger = logging.getLogger(__name__)

MOMENTS = ("exp_avg", "exp_avg_sq")
# What is saved beside the user's `client_state`, in any version of DeepSpeed.
OWN_KEYS = (
    *("module", "buffer_names", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
    *("shared_params", "optimizer", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps"),
    *("global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config"),
    *("ds_version", "checkpoint_parallel_dimensions", "universal_checkpoint_info"),
    *("sparse_tensor_module_names", "csr_tensor_module_names"),
)
# Of a param group: what is told in another way, or only chooses an implementation.
LEFT_OUT = (
    *("params", "step", "bias_correction"),
    *("foreach", "fused", "capturable", "differentiable"),
)


def is_deepspeed(path: Path) -> bool:
    """Whether there is a DeepSpeed checkpoint, or a folder of them, at `path`."""
    return checkpoint_folder(path) is not None


def open_deepspeed(path: Path) -> Source:
    """What a ZeRO checkpoint holds, of any number of ranks.

    In stage 3 the weights are the fp32 ones that the optimizer holds, of a 16-bit model too. Param
    groups name trained parameters with elements only: of others DeepSpeed keeps no group.

    Args:
        path: the folder of the checkpoint, or the one with a file `latest` that names it.

    Raises:
        CheckpointError: there is none, or it is of another kind or damaged; names the file.
    """
    folder = checkpoint_folder(path)
    if folder is None:
        raise CheckpointError(
            f"{path} holds no DeepSpeed checkpoint: pass the folder that engine.save_checkpoint() "
            "was given, or one of those in it"
        )
    files = Files(folder)
    try:
        return _source(files)
    except CheckpointError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"{folder}: expected the files of a ZeRO checkpoint as DeepSpeed 0.19 writes them, and "
            f"they are made in another way: {error!r}"
        ) from error


def _source(files: Files) -> Source:
    file = files.first_model
    model = load_file(file)
    if not files.optimizer and not model["param_shapes"]:
        raise CheckpointError(
            f"{files.folder} was written without ZeRO, where the optimizer's state has positions "
            f"and no names: expected ZeRO stage 1, 2 or 3. Its {file.name} is a file of "
            "torch.save: save its 'module' and 'optimizer' as 'model' and 'optimizer' of another "
            "one, and load that"
        )
    if model.get("mp_world_size", 1) != 1 or "ds_autoep_layers" in model:
        raise CheckpointError(
            f"{file} is of a model that was itself split over ranks, by tensor or expert "
            "parallelism: expected data parallel training with ZeRO stage 1, 2 or 3"
        )
    optimizer = _Optimizer(files, list(model["param_shapes"]))
    state = optimizer.state()
    weights = _bare(_weights(files, model, state, dealt=optimizer.is_dealt))
    state = _bare(state)

    def close() -> None:  # with the last tensor goes the mapping of its file
        weights.clear()
        state.clear()

    return Source(
        what="a DeepSpeed checkpoint",
        path=files.folder,
        weights=weights,
        state=state,
        groups=optimizer.groups(),
        step=int(model["global_steps"]),
        scheduler=_copied(model.get("lr_scheduler")),
        extra={
            key: _copied(value)
            for key, value in model.items()
            if key not in OWN_KEYS and is_plain(value)
        },
        close=close,
    )


class _Optimizer:
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
        between = self.ranks[0].get("param_alignment_paddings") or [
            [0] * len(s) for s in self.shapes
        ]
        offsets, end = line_offsets(shapes, between[flat])
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
            tensors.append(tensor.detach()[:numel])  # the rest is padding
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
            return [{"params": list(_bare(shapes))} for shapes in self.shapes]
        groups = []
        for group in base["param_groups"]:
            if not group.get("bias_correction", True):
                raise CheckpointError(
                    f"{self.files[0]} is of an Adam without bias correction, whose updates AdamW "
                    "cannot continue: expected bias_correction=True"
                )
            options = {key: _copied(value) for key, value in group.items() if key not in LEFT_OUT}
            shapes = [self.shapes[flat] for flat in group["params"]]
            groups.append({**options, "params": [name for of in shapes for name in _bare(of)]})
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


def _weights(
    files: Files,
    model: Mapping[str, Any],
    state: Mapping[str, Mapping[str, Stored]],
    *,
    dealt: bool,
) -> dict[str, Stored]:
    """Parameters and buffers, tied ones as one under each name."""
    file = files.first_model
    weights: dict[str, Stored] = {
        name: TensorInMemory(tensor, file)
        for name, tensor in model["module"].items()
        if isinstance(tensor, Tensor) and (name in model["buffer_names"] or not dealt)
    }
    if dealt:  # in the place of parameters, "module" has empty tensors
        weights |= {name: fields["master"] for name, fields in state.items()}
        weights |= _frozen(files, model.get("frozen_param_shapes") or {})
    for name, other in model["shared_params"].items():
        # Of tensors without elements DeepSpeed takes any two for one.
        first, second = weights.get(other), weights.get(name)
        if first and (dealt or (second and first.shape == second.shape)):
            weights[name] = first
    return weights


def _frozen(files: Files, shapes: Shapes) -> dict[str, Stored]:
    """Parameters that are dealt out and have no state."""
    by_rank: list[Mapping[str, Tensor]] = [
        load_file(file)["frozen_param_fragments"] for file in files.model.values() if shapes
    ]
    frozen: dict[str, Stored] = {}
    for name, shape in shapes.items():
        tensors = [fragments[name].detach().reshape(-1) for fragments in by_rank]
        for file, tensor in zip(files.model.values(), tensors, strict=True):
            share = share_of(tuple(shape), len(tensors))
            if tensor.numel() != share:
                raise CheckpointError(
                    f"{file} does not fit to {files.first_model.name}: expected {share} elements "
                    f"of {name!r}, and there are {tensor.numel()}"
                )
        frozen[name] = Dealt(tuple(shape), tensors, 0, files.first_model)
    return frozen


def _bare(by_name: Mapping[str, T]) -> dict[str, T]:
    """Under names without what torch.compile adds."""
    return {strip_wrappers(name): value for name, value in by_name.items()}


def _copied(value: Any) -> Any:
    """A value whose tensors are not a file's memory."""
    if isinstance(value, dict):
        return {key: _copied(entry) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    return value.detach().clone() if isinstance(value, Tensor) else value
