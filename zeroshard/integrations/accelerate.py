"""Accelerate: an `Accelerator` that leaves gradients and checkpoints to zeroshard's optimizers.

Changes nothing for a model that none of them trains.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.utils import extract_model_from_parallel
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn.parallel import DistributedDataParallel

from ..checkpoint import load_optimizer, save_optimizer
from ..ema import EMA
from ..engine import engines_of
from ..errors import ConfigError
from ..optimizer import AdamW
from ..shard_tensor import ShardTensor
from ..weights import load_weights

__all__ = ["Accelerator"]

KEY = "zeroshard"


class Accelerator(accelerate.Accelerator):
    """`accelerate.Accelerator`, for models that a `zeroshard.AdamW` trains.

    Build the optimizer before `prepare`, from a model that is on `accelerator.device`.

    - `prepare` does not wrap such a model in DistributedDataParallel: gradients are reduced and
      sharded by the optimizer, and so are the parameters under stage 3.
    - `accumulate` and `no_sync` keep backwards local until the last one.
    - `save_state` writes every rank's slices, by name; `load_state` continues bit for bit, and also
      at another number of ranks or in another stage.
    - `get_state_dict` and `save_model` give complete weights in every stage. Under stage 3 every
      process must call them, and the main process alone gets the result.

    Everything else is Accelerate's own. Takes the same arguments.
    """

    _optimizers: list[Any]
    _custom_objects: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_load_state_pre_hook(self._load_models)

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """As Accelerate's, without the wrapper where a zeroshard optimizer trains the model.

        Raises:
            ConfigError: such a model is on another device: moving it now would tear the parameters
                from the optimizer.
        """
        if _is_ours(model):
            _check_device(model, self.device)
            device_placement, evaluation_mode = False, True
        prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode)
        return prepared

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """As Accelerate's; `accumulate` uses it."""
        with ExitStack() as stack:
            if not isinstance(model, DistributedDataParallel):
                for engine in engines_of(model.parameters()):
                    stack.enter_context(engine.gradients.no_sync())
            stack.enter_context(super().no_sync(model))
            yield

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The complete state dict; under stage 3 on the main process, and {} on the others.

        Args:
            model: any.
            unwrap: False returns what the model's own `state_dict()` does: under stage 3, slices.
        """
        state: dict[str, Any] = super().get_state_dict(model, unwrap)
        if not unwrap or not any(isinstance(value, ShardTensor) for value in state.values()):
            return state
        whole = {}
        for name, value in state.items():  # one tensor at a time, and the others let go of theirs
            full = value.full_tensor() if isinstance(value, ShardTensor) else value
            if self.is_main_process:
                whole[name] = full.cpu() if isinstance(full, torch.Tensor) else full
        return whole

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any
    ) -> Any:
        """As Accelerate's; what is ours are folders inside, to which every rank writes its part.

        Every process must call it, with a folder that all of them see.
        """
        hook = self.register_save_state_pre_hook(self._save_models)  # behind those of the user
        try:
            with self._stand_ins():
                return super().save_state(output_dir, safe_serialization, **kwargs)
        finally:
            hook.remove()

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """As Accelerate's; every process must call it.

        Loads as well what Accelerate's own class saved of a model in DDP with torch's AdamW.
        """
        with self._stand_ins():
            super().load_state(input_dir, *args, **kwargs)

    @contextmanager
    def _stand_ins(self) -> Iterator[None]:
        """While Accelerate saves or loads, stand-ins are in the places of what is ours."""
        optimizers, objects = self._optimizers, self._custom_objects
        self._optimizers = [self._stand_in(entry, n) for n, entry in enumerate(optimizers)]
        self._custom_objects = [self._stand_in(entry, n) for n, entry in enumerate(objects)]
        try:
            yield
        finally:
            self._optimizers, self._custom_objects = optimizers, objects

    def _stand_in(self, entry: Any, number: int) -> Any:
        if isinstance(entry, EMA):
            return _Apart(
                f"{KEY}_average_{number}",
                lambda path: self._write(path, entry),
                lambda path: self._read(path, entry),
                entry.load_state_dict,
            )
        optimizer = getattr(entry, "optimizer", None)
        if not isinstance(optimizer, AdamW):
            return entry
        model = self._model_of(optimizer)
        return _Apart(
            f"{KEY}_optimizer_{number}",
            lambda path: save_optimizer(path, model, optimizer),
            lambda path: load_optimizer(path, model, optimizer),
            optimizer.load_state_dict,
        )

    def _model_of(self, optimizer: AdamW) -> nn.Module:
        """The model that holds the optimizer's parameters, or all of ours together."""
        wanted = {p for group in optimizer.param_groups for p in group["params"]}
        for model in self._models:
            if wanted.issubset(model.parameters()):
                return _inner(model)
        return nn.ModuleList(_inner(model) for model in self._models if _is_ours(model))

    def _save_models(self, models: list[nn.Module], weights: list[Any], folder: str) -> None:
        """Just before Accelerate saves: the models that are ours, and where the rest goes."""
        self._tell(folder)
        if len(weights) != len(models):
            return  # a hook of the user's saves in its own way
        for number in reversed(range(len(models))):
            if _is_ours(models[number]):
                self._write(_path(folder, number), _inner(models[number]))
                del weights[number]

    def _load_models(self, models: list[nn.Module], folder: str) -> None:
        """Just before Accelerate loads: the models that are ours, and where the rest is."""
        self._tell(folder)
        ours = [number for number, model in enumerate(models) if _is_ours(model)]
        folders = [number for number in ours if _path(folder, number).is_dir()]
        for number in reversed(folders):
            self._read(_path(folder, number), _inner(models[number]))
            del models[number]
        files = [Path(folder, f"model_{n}.safetensors" if n else "model.safetensors") for n in ours]
        if not folders and len(ours) == len(models) and all(file.is_file() for file in files):
            for model, file in zip(models, files, strict=True):  # as Accelerate's own class saves
                load_weights(_inner(model), file)
            models.clear()

    def _tell(self, folder: str) -> None:
        for entry in (*self._optimizers, *self._custom_objects):
            if isinstance(entry, _Apart):
                entry.folder = folder

    def _write(self, path: Path, entry: nn.Module | EMA) -> None:
        save({KEY: entry.state_dict()}, checkpoint_id=path, no_dist=not self.use_distributed)

    def _read(self, path: Path, entry: nn.Module | EMA) -> None:
        content = {KEY: entry.state_dict()}
        load(content, checkpoint_id=path, no_dist=not self.use_distributed)
        entry.load_state_dict(content[KEY])


@dataclass
class _Apart:
    """What Accelerate sees, while it saves or loads, in the place of something that is ours.

    It asks for the state on every rank and writes it on the main one, which would lose slices: so
    the state goes to a folder, and Accelerate writes the folder's name.

    Attributes:
        name: of the folder.
        write: writes the folder, given its path.
        read: reads it.
        take: loads a state that came in Accelerate's own way.
        folder: of the whole checkpoint.
    """

    name: str
    write: Callable[[Path], None]
    read: Callable[[Path], None]
    take: Callable[[dict[str, Any]], None]
    folder: str = ""

    def state_dict(self) -> dict[str, Any]:
        self.write(Path(self.folder, self.name))
        return {KEY: self.name}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if KEY in state_dict:
            self.read(Path(self.folder, state_dict[KEY]))
        else:
            self.take(state_dict)


def _is_ours(model: nn.Module) -> bool:
    return bool(engines_of(model.parameters()))


def _check_device(model: nn.Module, device: torch.device) -> None:
    for name, parameter in model.named_parameters():
        if parameter.device.type != device.type:
            raise ConfigError(
                f"{name!r} is on {parameter.device} and the accelerator on {device}: move the "
                "model before the optimizer is built (model.to(accelerator.device)), since the "
                "optimizer holds the parameters' memory"
            )


def _path(folder: str, number: int) -> Path:
    return Path(folder, f"{KEY}_model_{number}")


def _inner(model: nn.Module) -> nn.Module:
    inner: nn.Module = extract_model_from_parallel(model, keep_torch_compile=False)
    return inner
