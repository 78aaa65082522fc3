"""Accelerate: an `Accelerator` that leaves gradients and checkpoints to zeroshard's optimizers.

Changes nothing for a model that none of them trains.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.utils import extract_model_from_parallel
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..agreement import in_agreement
from ..checkpoint import load_optimizer, save_optimizer
from ..ema import EMA
from ..engine import Engine, engines_of
from ..errors import ConfigError
from ..folders import METADATA, load_folder, new_folder, save_folder
from ..gather import is_sharded, no_sync, whole_state_dict
from ..optimizer import AdamW
from ..weights import load_weights

__all__ = ["Accelerator"]

KEY = "zeroshard"
SAME = "Prepare the models and optimizers that were saved, in the same order"


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
        in_ddp = isinstance(model, DistributedDataParallel)
        with nullcontext() if in_ddp else no_sync(model), super().no_sync(model):
            yield

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The complete state dict; under stage 3 on the main process, and {} on the others.

        Args:
            model: any.
            unwrap: False returns what the model's own `state_dict()` does: under stage 3, slices.
        """
        if not unwrap or not is_sharded(model):
            state: dict[str, Any] = super().get_state_dict(model, unwrap)
            return state
        whole = whole_state_dict(self.unwrap_model(model), keep=self.is_main_process)
        if not self.is_main_process:
            return {}
        return {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in whole.items()}

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any
    ) -> Any:
        """As Accelerate's; what is ours are folders inside, to which every rank writes its part.

        Every process must call it, with a folder that all of them see. All is written beside, and
        moved to `output_dir` once it is complete; an earlier checkpoint there stays until then.

        Raises:
            ConfigError: any process failed; on every process.
        """
        engine = self._engine()
        if engine is None:
            return super().save_state(output_dir, safe_serialization, **kwargs)
        if self.project_configuration.save_on_each_node:
            raise ConfigError(
                "save_on_each_node=True saves to a folder on each node, and every process adds its "
                "slices to one folder: leave it out, and save to where all processes see it"
            )
        hook = self.register_save_state_pre_hook(self._save_ours)  # behind those of the user
        try:
            with self._stand_ins():
                if output_dir is None or self.project_configuration.automatic_checkpoint_naming:
                    return super().save_state(output_dir, safe_serialization, **kwargs)  # is new
                ours = (f"{KEY}_*",)
                with new_folder(output_dir, engine.transport, "save_state", parts=ours) as fresh:
                    super().save_state(str(fresh), safe_serialization, **kwargs)
                return Path(output_dir)
        finally:
            hook.remove()

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """As Accelerate's; every process must call it.

        Loads as well what Accelerate's own class saved of a model in DDP with torch's AdamW.

        Raises:
            ConfigError: a checkpoint that was not saved to the end, or of something else; on every
                process.
        """
        hook = self.register_load_state_pre_hook(self._load_ours)  # behind those of the user
        try:
            with self._stand_ins():
                super().load_state(input_dir, *args, **kwargs)
        finally:
            hook.remove()

    def _engine(self) -> Engine | None:
        """That of the first optimizer of ours."""
        engines = [engine for model in self._models for engine in engines_of(model.parameters())]
        inner = [getattr(entry, "optimizer", None) for entry in self._optimizers]
        engines += [optimizer.engine for optimizer in inner if isinstance(optimizer, AdamW)]
        return engines[0] if engines else None

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
            return _apart(f"{KEY}_average_{number}", entry, entry.engine)
        optimizer = getattr(entry, "optimizer", None)
        if not isinstance(optimizer, AdamW):
            return entry
        return _Apart(
            f"{KEY}_optimizer_{number}",
            lambda path: save_optimizer(path, self._model_of(optimizer), optimizer),
            lambda path: load_optimizer(path, self._model_of(optimizer), optimizer),
            optimizer.load_state_dict,
        )

    def _model_of(self, optimizer: AdamW) -> nn.Module:
        """The model that holds the optimizer's parameters, or all of ours together."""
        wanted = {p for group in optimizer.param_groups for p in group["params"]}
        for model in self._models:
            if wanted.issubset(model.parameters()):
                return _inner(model)
        together = nn.ModuleList(_inner(model) for model in self._models if _is_ours(model))
        if not wanted.issubset(together.parameters()):
            raise ConfigError(
                "the optimizer trains parameters of a model that was not prepared, so they have no "
                "place in a checkpoint: give the model to accelerator.prepare too"
            )
        return together

    def _save_ours(self, models: list[nn.Module], weights: list[Any], folder: str) -> None:
        """Just before Accelerate saves: write what is ours, and leave it the rest."""
        parts = self._parts_apart()
        # A hook of the user's that takes weights away saves the models in its own way.
        for number in reversed(range(len(models))) if len(weights) == len(models) else ():
            if _is_ours(models[number]):
                parts.append(_model(models[number], number))
                del weights[number]
        for part in parts:
            part.save(Path(folder, part.name))

    def _load_ours(self, models: list[nn.Module], folder: str) -> None:
        """Just before Accelerate loads: read what is ours, and leave it the rest."""
        engine = self._engine()
        if engine is None:
            return
        # A hook of the user's takes away the models that it loads, or leaves files to Accelerate.
        left = {n: m for n, m in enumerate(self._models) if any(m is model for model in models)}
        ours = {n: _model(model, n) for n, model in left.items() if _is_ours(model)}
        files = {
            n: Path(folder, f"model_{n}.safetensors" if n else "model.safetensors") for n in ours
        }
        with in_agreement(engine.transport, f"load_state from {folder}"):
            is_whole = all(file.is_file() for file in files.values())
            is_ours = any(Path(folder).glob(f"{KEY}_*"))
            if is_ours:
                ours = {n: p for n, p in ours.items() if p.is_in(folder) or not files[n].is_file()}
            parts = [*ours.values(), *self._parts_apart()]
            missing = [part.name for part in parts if not part.is_in(folder)]
            if is_ours and missing:
                raise ConfigError(f"{folder} holds no {missing[0]} that is complete. {SAME}")
        if is_ours:
            for part in parts:  # models first: their optimizers' masters go with them
                part.read(folder)
            models[:] = [model for n, model in left.items() if n not in ours]
        elif is_whole and len(ours) == len(models):
            for number, file in files.items():  # as Accelerate's own class saves
                load_weights(_inner(self._models[number]), file)
            models.clear()

    def _parts_apart(self) -> "list[_Apart]":
        every = (*self._optimizers, *self._custom_objects)
        return [entry for entry in every if isinstance(entry, _Apart)]


@dataclass
class _Apart:
    """Something of ours in a folder of its own; stands in its place while Accelerate works.

    Accelerate asks for a state on every rank and writes that of the main one, which would lose
    slices. What it gets and writes is the folder's name.

    Attributes:
        name: of the folder.
        save: writes the folder, given its path.
        load: reads it.
        take: loads a state that came in Accelerate's own way.
        was_read: whether the folder was.
    """

    name: str
    save: Callable[[Path], None]
    load: Callable[[Path], None]
    take: Callable[[dict[str, Any]], object]
    was_read: bool = False

    def is_in(self, folder: str) -> bool:
        return Path(folder, self.name, METADATA).is_file()

    def read(self, folder: str) -> None:
        try:
            self.load(Path(folder, self.name))
        except ConfigError as error:
            raise ConfigError(f"{error}. {SAME}") from error
        self.was_read = True

    def state_dict(self) -> dict[str, Any]:
        return {KEY: self.name}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if KEY not in state_dict:
            self.take(state_dict)
        elif not self.was_read:
            raise ConfigError(f"the checkpoint holds no {state_dict[KEY]}. {SAME}")


def _apart(name: str, entry: nn.Module | EMA, engine: Engine) -> _Apart:
    """Something that is saved by its state dict."""

    def save(path: Path) -> None:
        save_folder(path, {KEY: entry.state_dict()}, engine.transport, "save_state")

    def load(path: Path) -> None:
        content = {KEY: entry.state_dict()}
        load_folder(path, content, engine.transport, "state that save_state() wrote")
        entry.load_state_dict(content[KEY])

    return _Apart(name, save, load, entry.load_state_dict)


def _model(model: nn.Module, number: int) -> _Apart:
    return _apart(f"{KEY}_model_{number}", _inner(model), engines_of(model.parameters())[0])


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


def _inner(model: nn.Module) -> nn.Module:
    inner: nn.Module = extract_model_from_parallel(model, keep_torch_compile=False)
    return inner
