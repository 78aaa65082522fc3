"""transformers' Trainer: an optimizer for it, checkpoints that every rank has its part in, stage 3.

Changes no loop: batches, losses, clipping, logs and evaluation are Trainer's own.
"""

import gc
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer
from transformers.trainer import (
    OPTIMIZER_NAME,
    PREFIX_CHECKPOINT_DIR,
    SCHEDULER_NAME,
    TRAINER_STATE_NAME,
    TRAINING_ARGS_NAME,
)

from ..agreement import in_agreement
from ..checkpoint import load_optimizer, save_optimizer, unwrapped
from ..engine import engines_of
from ..errors import ConfigError, GradientError
from ..export import export_weights, move_export
from ..gather import gather, is_sharded
from ..optimizer import AdamW
from ..units import ROOT, plan_units

__all__ = ["ZeroShardFactory", "ZeroShardTrainer"]

# With "optimizer" in its name a plain Trainer that finds it stops, and does not start moments anew.
FOLDER = "zeroshard_optimizer"
PLAIN_ADAMW = ("adamw_torch", "adamw_torch_fused")
# After so many steps in vain a run ends. A GradScaler finds its scale in fewer.
STEPS_IN_VAIN = 50


class ZeroShardFactory:
    """For Trainer's ``optimizer_cls_and_kwargs=(ZeroShardFactory, {"stage": 2})``.

    The options are those of `zeroshard.AdamW`. Learning rate, betas, eps and weight decay are those
    of the TrainingArguments where the options do not say otherwise, and parameters are decayed as
    Trainer decides.

    Nothing but the optimizer is asked of it, and that is not enough: the model must stay as it is,
    and checkpoints need every rank. So it makes the Trainer that calls it a `ZeroShardTrainer`, by
    a class of the same name, as `torch.distributed.fsdp.fully_shard` does with a module.
    """

    def __call__(self, model: nn.Module, **options: Any) -> AdamW:
        """Build the optimizer; called by Trainer.

        Raises:
            ConfigError: there is not exactly one Trainer that waits for it, or its arguments ask
                for another sharder.
        """
        trainer = _trainer_of(model)
        optimizer = _optimizer_for(trainer, model, options)
        kind = type(trainer)
        trainer.__class__ = type(kind.__name__, (ZeroShardTrainer, kind), {})
        return optimizer


class ZeroShardTrainer(Trainer):
    """Trainer without DistributedDataParallel, for every stage; alone or before another Trainer.

    ``class MyTrainer(ZeroShardTrainer, Seq2SeqTrainer): zeroshard_options = {"stage": 3}``. What is
    given as ``optimizer_cls_and_kwargs=(ZeroShardFactory, {...})`` comes before the attribute. Or
    the optimizer itself is given, as ``optimizers=(zeroshard.AdamW(...), None)``.

    - Of the micro-batches that gradients are accumulated over only the last one is reduced, as
      under DistributedDataParallel, at the cost of a full gradient on every rank; all of them are
      with ``accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": True}}``.
    - Checkpoints hold every rank's slices of the optimizer state by name. Training continues from
      them bit for bit, and also on another number of ranks or in another stage; it continues from
      what a plain Trainer saved too.
    - `save_model` writes complete weights. Under stage 3 every rank must call it.

    Attributes:
        zeroshard_options: those of `zeroshard.AdamW`.
    """

    zeroshard_options: Mapping[str, Any] = {}

    # Trainer says that these may be missing, and sets them before they are used.
    model: Any
    optimizer: Any
    lr_scheduler: Any

    def _validate_args(self) -> None:
        super()._validate_args()
        if self.zeroshard_options and self.optimizer is not None:
            raise ConfigError(
                "zeroshard_options have no effect on an optimizer that is given as optimizers=: "
                "leave one of them out"
            )

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """As Trainer's.

        Raises:
            ConfigError: arguments that ask for another optimizer or another sharder.
        """
        if self.optimizer is None:
            kind, options = self.optimizer_cls_and_kwargs or (ZeroShardFactory, {})
            if kind is not ZeroShardFactory:
                raise ConfigError(
                    "optimizer_cls_and_kwargs of a ZeroShardTrainer must be (ZeroShardFactory, "
                    f"{{...}}), got {getattr(kind, '__name__', kind)}: use Trainer for that"
                )
            if self.optimizer_cls_and_kwargs is None and self.args.optim not in PLAIN_ADAMW:
                raise ConfigError(
                    f"optim={self.args.optim} asks for another optimizer than zeroshard.AdamW, "
                    "which a ZeroShardTrainer trains with: leave it out, or use Trainer"
                )
            self.optimizer = _optimizer_for(self, self.model if model is None else model, options)
        optimizer: torch.optim.Optimizer = self.optimizer
        return optimizer

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if not engines_of(model.parameters()):  # else their memory is the optimizer's
            super()._move_model_to_device(model, device)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> Any:
        if training:
            _check_arguments(self.args)
            # Any other would leave gradients as each rank has them.
            self._steps_before = _steps_taken(unwrapped(self.optimizer))
            # What Trainer has for models that shard themselves: it leaves them as they are.
            self.is_distributed_loading_by_transformers = True
        return super()._wrap_model(model, training, dataloader)

    def _sync_replicated_trainable_parameters(self, model: nn.Module) -> None:
        """Nothing: the optimizer did, and averages every gradient."""

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """As Trainer's."""
        state = self.accelerator.gradient_state
        reduces = state.sync_gradients or state.plugin_kwargs.get("sync_each_batch", False)
        with nullcontext() if reduces else unwrapped(self.optimizer).no_sync():
            loss: Tensor = super().training_step(*args, **kwargs)
        return loss

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, *args: Any, **kwargs: Any
    ) -> Any:
        """As Trainer's; inside of `zeroshard.gather` where it generates.

        Ranks generate texts of different lengths, by as many forwards.
        """
        generates = getattr(self.args, "predict_with_generate", False) and not prediction_loss_only
        is_synced = getattr(self, "_gen_kwargs", {}).get("synced_gpus", False)
        whole = generates and not is_synced and is_sharded(self.model)
        with gather(self.model) if whole else nullcontext():
            return super().prediction_step(model, inputs, prediction_loss_only, *args, **kwargs)

    # --- a training that trains nothing

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self.control.should_log:  # which waits for the device anyway
            self._check_that_it_trains(STEPS_IN_VAIN)
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._check_that_it_trains(1 if self.accelerator.scaler is None else STEPS_IN_VAIN)
        return super()._finalize_training(*args, **kwargs)

    def _check_that_it_trains(self, at_least: int) -> None:
        """Raise if there were `at_least` steps, and no weight has changed in any of them."""
        steps = self.state.global_step - self._initial_global_step
        if steps >= at_least and _steps_taken(unwrapped(self.optimizer)) == self._steps_before:
            raise GradientError(
                f"nothing was trained: all {steps} steps were skipped, since gradients were Inf or "
                "NaN. A loss that reads weights outside of their module reads NaN under stage 3: "
                "run training_step inside of `with zeroshard.gather(model):`, or use stage 2. Else "
                "look into the loss, which Trainer logs as 0.0"
            )

    # --- checkpoints

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if self.args.should_save:
            # It is written last, and says that a checkpoint is whole: an older one is no more.
            name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            state = Path(self._get_output_dir(trial=trial), name, TRAINER_STATE_NAME)
            state.unlink(missing_ok=True)
        super()._save_checkpoint(model, trial)

    def _save_rng_state(self, output_dir: str) -> None:
        """Wait for each process's: what says that the checkpoint is whole is written after it."""
        transport = engines_of(self.model.parameters())[0].transport
        with in_agreement(transport, "saving random states"):
            super()._save_rng_state(output_dir)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        if not Path(resume_from_checkpoint, TRAINER_STATE_NAME).is_file():
            raise _unfinished(resume_from_checkpoint, TRAINER_STATE_NAME)
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save_optimizer(Path(output_dir, FOLDER), self.model, self.optimizer)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        is_ours = Path(checkpoint, FOLDER).exists()
        if not is_ours and not Path(checkpoint, OPTIMIZER_NAME).is_file():
            raise _unfinished(checkpoint, f"{FOLDER} or {OPTIMIZER_NAME}")
        if not Path(checkpoint, SCHEDULER_NAME).is_file():
            raise _unfinished(checkpoint, SCHEDULER_NAME)
        if not is_ours:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        load_optimizer(Path(checkpoint, FOLDER), self.model, self.optimizer)
        state = torch.load(Path(checkpoint, SCHEDULER_NAME), weights_only=True)
        self.lr_scheduler.load_state_dict(state)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if state_dict is not None or not is_sharded(self.model):
            if self.args.should_save:
                super()._save(output_dir, state_dict)
            return
        target = Path(output_dir or str(self.args.output_dir))
        exported = target / ".weights"  # beside what may be there: older checkpoints, say
        export_weights(self.model, exported, overwrite=True)
        transport = engines_of(self.model.parameters())[0].transport
        with in_agreement(transport, "save_model"):
            if transport.is_first:  # the only rank that surely sees what was exported
                move_export(exported, target)
                tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
                if tokenizer is not None:
                    tokenizer.save_pretrained(target)
                torch.save(self.args, target / TRAINING_ARGS_NAME)


def _trainer_of(model: nn.Module) -> Any:
    """The Trainer that asks for an optimizer: it gives the model, and not itself."""
    gc.collect()  # what nobody holds any more is not meant
    found = [
        thing
        for thing in gc.get_objects()
        if Trainer in type(thing).__mro__
        and getattr(thing, "model", None) is model
        and getattr(thing, "optimizer", None) is None
    ]
    if len(found) != 1:
        raise ConfigError(
            "ZeroShardFactory is called by the Trainer that it builds an optimizer for; of this "
            f"{type(model).__name__} there are {len(found)} without one: delete a Trainer that is "
            "not used any more, and outside of Trainer call zeroshard.AdamW"
        )
    return found[0]


def _optimizer_for(trainer: Any, model: nn.Module, options: dict[str, Any]) -> AdamW:
    """An optimizer with the groups that Trainer makes, and its hyperparameters."""
    args = trainer.args
    _check_arguments(args)
    defaults = {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
        "weight_decay": args.weight_decay,
    }
    options = {**defaults, **getattr(trainer, "zeroshard_options", {}), **options}
    if options.get("stage") == 3 and "units" not in options and _reads_head_directly(trainer):
        options["units"] = _units_without_head(model)
    decayed = set(trainer.get_decay_parameter_names(model))
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for name, p in trained if name in decayed]},
        {"params": [p for name, p in trained if name not in decayed], "weight_decay": 0.0},
    ]
    return AdamW(groups, model=model, **options)


def _check_arguments(args: Any) -> None:
    for name in ("fsdp", "deepspeed"):
        if getattr(args, name):
            raise ConfigError(f"zeroshard shards by itself: leave out {name}={getattr(args, name)}")
    if args.save_on_each_node and not args.save_only_model and args.save_strategy != "no":
        raise ConfigError(
            "save_on_each_node=True writes to folders that not every rank sees, and a checkpoint "
            "has parts of all of them: use a shared output_dir, or save_only_model=True"
        )


def _reads_head_directly(trainer: Any) -> bool:
    """Whether a loss multiplies by the output head's weight without calling it."""
    of_trl = any(kind.__module__.startswith("trl.") for kind in type(trainer).__mro__)
    return of_trl or bool(trainer.args.use_liger_kernel)


def _units_without_head(model: Any) -> list[str]:
    """The default units, but for the output head, which the root then keeps whole."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    of_head = set() if head is None else set(head.modules())
    units = plan_units(model, None).modules
    return [name for name, module in units.items() if name != ROOT and module not in of_head]


def _steps_taken(optimizer: AdamW) -> int:
    """Steps of this optimizer that changed weights."""
    return optimizer.engine.step_count - int(optimizer.skipped_steps)


def _unfinished(checkpoint: str, missing: str) -> ConfigError:
    return ConfigError(
        f"{checkpoint} has no {missing}: it was saved with save_only_model=True, or not to its "
        "end. Resume from another checkpoint, by its path, or start anew from these weights, if "
        "they are complete, with from_pretrained()"
    )
