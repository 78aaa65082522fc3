"""DeepSpeed's ZeRO checkpoints as a source: weights, masters, moments and options by name.

DeepSpeed need not be installed. How parameters lie in its files is in `deepspeed_layout.py`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from ..errors import CheckpointError
from ..wrappers import strip_wrappers
from .deepspeed_files import Files, checkpoint_folder, is_plain, load_file
from .deepspeed_layout import Dealt, Shapes, share_of
from .deepspeed_state import OptimizerState
from .source import Source, Stored
from .torch_files import TensorInMemory

__all__ = ["is_deepspeed", "open_deepspeed"]

T = TypeVar("T")
# What is saved beside the user's `client_state`, in any version of DeepSpeed.
OWN_KEYS = (
    *("module", "buffer_names", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
    *("shared_params", "optimizer", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps"),
    *("global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config"),
    *("ds_version", "checkpoint_parallel_dimensions", "universal_checkpoint_info"),
    *("sparse_tensor_module_names", "csr_tensor_module_names"),
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
    optimizer = OptimizerState(files, list(model["param_shapes"]))
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
        groups=[
            {**_copied(group), "params": list(map(strip_wrappers, group["params"]))}
            for group in optimizer.groups()
        ],
        step=int(model["global_steps"]),
        scheduler=_copied(model.get("lr_scheduler")),
        extra={
            key: _copied(value)
            for key, value in model.items()
            if key not in OWN_KEYS and is_plain(value)
        },
        close=close,
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
