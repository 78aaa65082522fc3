"""`strategy="zeroshard"` for Lightning's Trainer and for Fabric; importing this registers it.

Reduces, shards and gathers nothing: the `zeroshard.AdamW` that a model is trained with does, in the
stage that it was given. What is here leaves the model unwrapped and starts the ranks as Lightning's
DDP does, accumulates without communication, and saves whole weights.
"""

import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.strategies import DDPStrategy, Strategy, StrategyRegistry
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.optim import Optimizer

from ..checkpoint import load_optimizer, save_optimizer
from ..engine import engines_of
from ..errors import ConfigError
from ..folders import load_folder, new_folder, save_folder
from ..gather import gather, is_sharded, no_sync, whole_state_dict
from ..optimizer import AdamW
from ..transport import Transport, connect

__all__ = ["FabricZeroShardStrategy", "ZeroShardStrategy"]

# As in Lightning's own checkpoints that are folders, so that its tools read ours.
META, WEIGHTS = "meta.pt", "model"
PARTS = (META, ".metadata", "*.distcp", "optimizer-*")
FOLDER = "zeroshard_folder"


class ZeroShardStrategy(DDPStrategy):
    """The Trainer's strategy for models whose `configure_optimizers` returns `zeroshard.AdamW`.

    Args:
        save_distributed_checkpoint: write a folder to which every rank adds its slices, instead of
            a file, for which the first rank gathers weights and optimizer state in its memory.
        sync_every_backward: with `accumulate_grad_batches`, reduce each batch's gradients, which
            keeps them sharded, instead of a full gradient per rank that is reduced once.
        options: those of Lightning's DDPStrategy, without the ones for DistributedDataParallel.

    Raises:
        ConfigError: an option that only DistributedDataParallel could heed.
    """

    def __init__(
        self,
        *,
        save_distributed_checkpoint: bool = False,
        sync_every_backward: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        of_ddp = [key for key in options if key.startswith(("ddp_", "model_averaging_"))]
        _refuse_ddp_options([*of_ddp, *self._ddp_kwargs])
        self.save_distributed_checkpoint = save_distributed_checkpoint
        self.sync_every_backward = sync_every_backward
        self._has_meta: bool | None = None  # until setup: of the model as it came

    def connect(self, model: Any) -> None:
        self._has_meta = None
        super().connect(model)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True for a model on the meta device: there is nothing to restore to before."""
        if self._has_meta is None:
            return _has_meta(self.lightning_module)
        return self._has_meta

    def setup(self, trainer: Any) -> None:
        self._has_meta = _has_meta(self.lightning_module)
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if is_fitting and self._layer_sync:
            self.model = self._layer_sync.apply(self.lightning_module)
        elif not is_fitting and not engines_of(self.lightning_module.parameters()):
            _sync_module_states(self.lightning_module)
        Strategy.setup(self, trainer)  # DDPStrategy's would wrap the model

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if isinstance(self.launcher, _MultiProcessingLauncher):
            self._launcher = _Launcher(self, start_method=self._start_method)

    def _setup_model(self, model: nn.Module) -> nn.Module:
        return model

    def model_to_device(self) -> None:
        _to_device(self.model, self.root_device)

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            _checked(optimizer, "configure_optimizers() returned")
        for callback in trainer.callbacks if is_sharded(self.lightning_module) else ():
            if isinstance(callback, (WeightAveraging, StochasticWeightAveraging)):
                raise ConfigError(
                    f"{type(callback).__name__} averages whole parameters, and stage 3 has none "
                    "outside of the units in use: average their shards with zeroshard.EMA, or use "
                    "stage 2"
                )

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.train_step_context():
            return self._call("training_step", *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._call("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._call("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._call("predict_step", *args, **kwargs)

    def _call(self, step: str, *args: Any, **kwargs: Any) -> Any:
        """Run a step as the module's forward, so that parameters of the module itself are whole.

        Not in manual optimization, where the step contains backwards.
        """
        module = self.lightning_module
        if not module.automatic_optimization:
            return getattr(module, step)(*args, **kwargs)
        return self._forward_redirection(module, module, step, *args, **kwargs)

    def on_validation_start(self) -> None:
        """Take the first rank's buffers (running statistics), as DistributedDataParallel does."""
        mine = dict(self.lightning_module.named_buffers())
        sent = {name: buffer.cpu() for name, buffer in mine.items()}  # not to the first GPU
        for name, value in self.broadcast(sent).items() if mine else ():
            mine[name].copy_(value)

    on_test_start = on_predict_start = on_validation_start

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with nullcontext() if self.sync_every_backward else no_sync(self.lightning_module):
            yield

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self.save_distributed_checkpoint:
            return self.lightning_module.state_dict()  # type: ignore[no-any-return]
        return whole_state_dict(self.lightning_module, self.is_global_zero)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self.save_distributed_checkpoint:
            return {}
        return super().optimizer_state(optimizer)  # type: ignore[no-any-return]

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        if not self.save_distributed_checkpoint:
            is_in_the_way = self.is_global_zero and _is_folder(filepath)
            fresh, earlier = _hidden(filepath, "incomplete"), _hidden(filepath, "earlier")
            target = fresh if is_in_the_way else filepath
            super().save_checkpoint(checkpoint, target, storage_options)
            if is_in_the_way:
                Path(filepath).rename(earlier)
                fresh.rename(filepath)
                shutil.rmtree(earlier)
            return
        path, transport, what = self.broadcast(filepath), self._transport(), "save_checkpoint"
        with new_folder(path, transport, what, parts=PARTS) as fresh:
            save_folder(fresh, {WEIGHTS: checkpoint.pop("state_dict")}, transport, what)
            for number, optimizer in self._saved_optimizers(checkpoint):
                save_optimizer(fresh / f"optimizer-{number}", self.lightning_module, optimizer)
            if self.is_global_zero:
                torch.save(checkpoint, fresh / META)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        if not _is_folder(checkpoint_path):
            return super().load_checkpoint(checkpoint_path, weights_only)
        checkpoint = super().load_checkpoint(Path(checkpoint_path) / META, weights_only)
        checkpoint[FOLDER] = str(checkpoint_path)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if FOLDER not in checkpoint:
            super().load_model_state_dict(checkpoint, strict)
            return
        state = self.lightning_module.state_dict()
        what = "model that save_checkpoint() wrote"
        load_folder(checkpoint[FOLDER], {WEIGHTS: state}, self._transport(), what, strict=strict)
        self.lightning_module.load_state_dict(state, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if FOLDER not in checkpoint:
            super().load_optimizer_state_dict(checkpoint)
            return
        for number, optimizer in self._saved_optimizers(checkpoint):
            path = Path(checkpoint[FOLDER]) / f"optimizer-{number}"
            load_optimizer(path, self.lightning_module, optimizer)

    def _transport(self) -> Transport:
        engines = engines_of(self.lightning_module.parameters())
        return engines[0].transport if engines else connect(None, self.root_device)

    def _saved_optimizers(self, checkpoint: Mapping[str, Any]) -> Iterable[tuple[int, AdamW]]:
        """None for a checkpoint of weights only."""
        return enumerate(self.optimizers if "optimizer_states" in checkpoint else ())

    def teardown(self) -> None:
        # Lightning's would move the model to the CPU, away from its shards.
        for part in (
            self.cluster_environment,
            self.precision_plugin,
            self.accelerator,
            self.checkpoint_io,
        ):
            part.teardown()


class FabricZeroShardStrategy(FabricDDPStrategy):
    """Fabric's strategy for models that are trained with `zeroshard.AdamW`.

    Args:
        options: those of Fabric's DDPStrategy, without the ones for DistributedDataParallel.

    Raises:
        ConfigError: an option that only DistributedDataParallel could heed.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        _refuse_ddp_options(self._ddp_kwargs)
        self._backward_sync_control = _NoSync()

    def setup_module(self, module: nn.Module) -> nn.Module:
        return module

    def module_to_device(self, module: nn.Module) -> None:
        _to_device(module, self.root_device)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        return _checked(optimizer, "fabric.setup() was given")

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        return whole_state_dict(module, self.is_global_zero)


class _Launcher(_MultiProcessingLauncher):
    """Sends whole weights back to the process that forked the ranks."""

    def _collect_rank_zero_results(self, trainer: Any, results: Any) -> Any:
        module = trainer.lightning_module
        with gather(module) if engines_of(module.parameters()) else nullcontext():
            return super()._collect_rank_zero_results(trainer, results)


class _NoSync(_BackwardSyncControl):
    """`fabric.no_backward_sync`: the gradients of a module add up locally."""

    @contextmanager
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> Iterator[None]:
        with no_sync(module) if enabled else nullcontext():
            yield


def _refuse_ddp_options(options: Collection[str]) -> None:
    if options:
        raise ConfigError(
            f"{', '.join(options)}: options of DistributedDataParallel, which the zeroshard "
            "strategy does without; nothing has to be said in their place"
        )


def _checked(optimizer: Any, what: str) -> AdamW:
    if not isinstance(optimizer, AdamW):
        raise ConfigError(
            f"{what} {type(optimizer).__name__}, whose gradients the zeroshard strategy does not "
            'reduce: use zeroshard.AdamW, or strategy="ddp"'
        )
    return optimizer


def _has_meta(module: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in module.parameters())


def _to_device(module: nn.Module, device: torch.device) -> None:
    """Move what is real; the optimizer gives memory to what is on the meta device."""
    module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))


def _hidden(path: Any, kind: str) -> Path:
    return Path(path).with_name(f".{Path(path).name}.{kind}")


def _is_folder(path: Any) -> bool:
    return (Path(path) / META).is_file()


StrategyRegistry.register("zeroshard", ZeroShardStrategy, "No wrapper", override=True)
STRATEGY_REGISTRY.register("zeroshard", FabricZeroShardStrategy, "No wrapper", override=True)
