"""Lightning: the Trainer and Fabric, under their own DDP and with `strategy="zeroshard"`."""

import logging
import pathlib
import pydoc_data.topics
import runpy
import sys

import lightning
import pytest
import torch
from consumers import Consumer, tried
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import grad_norm
from models import assert_close, assert_same, weights
from ranks import run
from torch import nn
from torch.nn.functional import cross_entropy, silu
from torch.utils.data import DataLoader

import zeroshard
from zeroshard.errors import ConfigError
from zeroshard.integrations.lightning import FabricZeroShardStrategy, ZeroShardStrategy

CONSUMER = Consumer(
    "Lightning and Fabric",
    "lightning",
    use='`import zeroshard.integrations.lightning`, then `strategy="zeroshard"`; stages 1 and 2 '
    'work under `strategy="ddp"` too.',
)
TEXT = torch.tensor(list("\n".join(pydoc_data.topics.topics.values()).encode()))
OURS = [(1, "zeroshard"), (2, "zeroshard"), (3, "zeroshard")]
UNDER_DDP = [(1, "ddp"), (2, "ddp")]

# What it says of DDP is true and the point of half of these tests.
pytestmark = pytest.mark.filterwarnings("ignore:the model is wrapped in Distributed")
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 2 * width + 1)
        self.narrow = nn.Linear(2 * width + 1, width)

    def forward(self, x):
        return x + self.narrow(silu(self.widen(self.norm(x))))


class Net(nn.Module):
    """Says which byte comes next; input and output weights are tied."""

    def __init__(self, width=20):
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, letters):
        x = self.embed(letters)
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * self.scale


def loss_of(logits, batch):
    return cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def optimizer_for(model, stage, **settings):
    """Stage 0 is torch's."""
    settings = {"lr": 1e-2, "weight_decay": 0.1, **settings}
    if stage == 0:
        return torch.optim.AdamW(model.parameters(), fused=True, **settings)
    return zeroshard.AdamW(model, stage=stage, **settings)


class Lit(lightning.LightningModule):
    def __init__(self, stage=0, **settings):
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.net = Net()
        self.losses, self.validated = [], []

    def forward(self, letters):
        return self.net(letters)

    def loss(self, batch):
        return loss_of(self(batch[:, :-1]), batch)

    def training_step(self, batch, index):
        loss = self.loss(batch)
        self.log("loss", loss)
        self.losses.append(loss.detach().clone())
        return loss

    def validation_step(self, batch, index):
        loss = self.loss(batch)
        self.log("val_loss", loss, sync_dist=True)
        self.validated.append(loss.clone())

    test_step = validation_step

    def predict_step(self, batch, index):
        return self(batch[:, :-1]).clone()

    def configure_optimizers(self):
        settings = {key: value for key, value in self.hparams.items() if key != "stage"}
        optimizer = optimizer_for(self, self.hparams.stage, **settings)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def loader(first, lines, *, shuffle=False):
    rows = TEXT[first : first + lines * 25].view(lines, 25)
    return DataLoader(rows, batch_size=2, shuffle=shuffle)


def trainer_of(strategy, *, epochs=2, **options):
    callbacks = options.get("callbacks", ())
    options = {
        "enable_checkpointing": any(isinstance(each, ModelCheckpoint) for each in callbacks),
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        **options,
    }
    return lightning.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=epochs, **options
    )


def fit(module, strategy, *, resume=None, **options):
    trainer = trainer_of(strategy, **options)
    trainer.fit(module, loader(0, 16, shuffle=True), loader(5000, 8), ckpt_path=resume)
    assert resume is None or len(module.losses) == 4, "one epoch was left"
    return trainer


def found(module, *, epochs=None):
    """What a fit left: the losses of all epochs, or of the last one, and the weights, whole."""
    losses, validated = module.losses, module.validated
    if epochs == 1:
        losses, validated = losses[-4:], validated[-2:]
    return {
        "losses": torch.stack(losses),
        "validated": torch.stack(validated),
        **weights(module),
    }


def ranks_of(function, **options):
    """Run on two ranks that Lightning takes for torchrun's, so that it starts none itself."""
    return run(function, 2, timeout_s=120, TORCHELASTIC_RUN_ID="tests", **options)


def check_against_ddp(pairs, build, *, options=None, fitted=fit):
    """Train with torch's AdamW under DDP and with each (stage, strategy): the same bits."""
    options = options or {}

    def body(rank, world_size):
        reference = build(0)
        fitted(reference, "ddp", **options)
        expected = found(reference)
        assert expected["losses"].isfinite().all()
        for stage, strategy in pairs:
            module = build(stage)
            fitted(module, strategy, **options)
            assert_same(found(module), expected, f"stage {stage} under {strategy}")

    ranks_of(body)


@tried('`strategy="ddp"`, only the optimizer swapped: losses, weights as with torch', stages="1, 2")
def test_under_lightnings_ddp_every_loss_and_weight_is_the_same():
    check_against_ddp(UNDER_DDP, Lit)


@tried('`strategy="zeroshard"`: losses, validation, weights as with DDP', stages="1, 2, 3")
def test_the_strategy_gives_every_loss_and_weight_of_ddp():
    check_against_ddp(OURS, Lit)


class OwnParameter(Lit):
    """The step reads a parameter that is the LightningModule's own, after it has called itself."""

    def __init__(self, stage=0, **settings):
        super().__init__(stage, **settings)
        self.weight = nn.Parameter(torch.ones(256))

    def loss(self, batch):
        return loss_of(self(batch[:, :-1]) * self.weight, batch)


@tried("Parameters of the LightningModule itself, read in its steps", stages="1, 2, 3")
def test_a_parameter_of_the_module_itself_is_whole_in_its_steps():
    check_against_ddp(OURS, OwnParameter)


@tried("`accumulate_grad_batches`: as with DDP, and nothing is sent between", stages="1, 2, 3")
def test_accumulated_batches_are_those_of_ddp(tmp_path):
    class Saving(Callback):  # while gradients wait for their step
        def on_train_batch_end(self, trainer, *_):
            trainer.save_checkpoint(tmp_path / "now.ckpt")

    options = {"accumulate_grad_batches": 3, "callbacks": [Saving()]}
    check_against_ddp(OURS + UNDER_DDP, Lit, options=options)


class Gradients(Callback):
    """Whether gradients are sharded, that is reduced, at the end of each batch."""

    def __init__(self):
        self.are_sharded = []

    def on_train_batch_end(self, trainer, module, *_):
        self.are_sharded.append(is_reduced(module))


def is_reduced(module):
    kinds = {isinstance(p.grad, zeroshard.ShardTensor) for p in module.parameters()}
    assert len(kinds) == 1
    return kinds == {True}


@tried("`sync_every_backward=True` keeps gradients sharded while they add up", stages="1, 2, 3")
def test_accumulated_gradients_are_reduced_at_the_step_or_at_every_batch_if_asked():
    def body(rank, world_size):
        for stage in (1, 2, 3):
            for often in (False, True):
                watch = Gradients()
                strategy = ZeroShardStrategy(sync_every_backward=often)
                fit(Lit(stage), strategy, accumulate_grad_batches=2, epochs=1, callbacks=[watch])
                assert watch.are_sharded == [often, True, often, True], f"stage {stage}, {often}"

    ranks_of(body)


class NormLogger(Callback):
    def __init__(self):
        self.norms = []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        norms = grad_norm(module.net, 2)
        module.log("grad_norm", norms["grad_2.0_norm_total"])
        self.norms.append(norms)


# A clipped gradient moves by 2**-20 of itself, as norms are summed in another order, and an update
# by lr times 2 / eps times that: 5e-7 a step for gradients below 0.25, and a weight's own rounding.
CLIPPED = {"eps": 1e-2}
ATOL = 5e-6


@tried("`gradient_clip_val`, by norm and by value; `grad_norm` logged", stages="1, 2, 3")
def test_clipping_by_norm_and_value_and_logged_norms():
    def body(rank, world_size):
        def clipped(stage, strategy, **options):
            module, logger = Lit(stage, **CLIPPED), NormLogger()
            fit(module, strategy, callbacks=[logger], epochs=1, **options)
            return logger.norms, weights(module)

        _, free = clipped(0, "ddp")
        for options in (
            {"gradient_clip_val": 0.25},
            {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        ):
            norms, expected = clipped(0, "ddp", **options)
            far = max(float((free[name] - expected[name]).abs().max()) for name in expected)
            assert far > 1e-3, "the reference must show that clipping acts"
            for stage, strategy in OURS + UNDER_DDP:
                what = f"{options}, stage {stage} under {strategy}"
                got_norms, got = clipped(stage, strategy, **options)
                assert len(got_norms) == len(norms) == 4
                for mine, theirs in zip(got_norms, norms, strict=True):
                    mine = {name: float(norm) for name, norm in mine.items()}
                    theirs = {name: float(norm) for name, norm in theirs.items()}
                    assert mine == pytest.approx(theirs, rel=2**-16), what
                if "gradient_clip_algorithm" in options:
                    assert_same(got, expected, what)
                else:
                    assert_close(got, expected, what, atol=ATOL)

    ranks_of(body)


@tried("Loggers, `LearningRateMonitor`, schedulers, the model summary", stages="1, 2, 3")
def test_a_logger_writes_what_it_writes_under_ddp(tmp_path):
    def body(rank, world_size):
        def logged(stage, strategy):
            logger = CSVLogger(tmp_path / f"{stage}-{strategy}")
            fit(
                Lit(stage),
                strategy,
                logger=logger,
                callbacks=[LearningRateMonitor("step")],
                log_every_n_steps=1,
                enable_model_summary=True,
            )
            return (pathlib.Path(logger.log_dir) / "metrics.csv").read_text() if rank == 0 else ""

        expected = logged(0, "ddp")
        assert rank > 0 or {"lr-AdamW", "loss", "val_loss"} <= set(
            expected.splitlines()[0].split(",")
        )
        for stage, strategy in OURS + UNDER_DDP:
            assert logged(stage, strategy) == expected, f"stage {stage} under {strategy}"

    ranks_of(body)


def keep_all(folder):
    return ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, every_n_epochs=1)


def check_resume(folder, cases, **options):
    """A run interrupted after its first epoch ends in the bits of one that was not."""

    def body(rank, world_size):
        for number, (stage, strategy) in enumerate(cases):
            name, path = f"stage {stage} under {strategy}", folder / f"{number}"
            whole = Lit(stage)
            fit(whole, strategy, callbacks=[keep_all(path)], **options)
            again = Lit(stage)
            trainer = fit(again, strategy, resume=path / "epoch=0.ckpt", **options)
            assert trainer.global_step == 8, name
            assert_same(found(again, epochs=1), found(whole, epochs=1), name)
            optimizer = trainer.optimizers[0]
            optimizer.consolidate_state_dict()
            if rank == 0:
                last = torch.load(path / "epoch=1.ckpt", weights_only=True)
                saved, here = last["optimizer_states"][0], optimizer.state_dict()
                for key, state in saved["state"].items():
                    assert_same(here["state"][key], state, f"{name}, state of {key}")

    ranks_of(body)


@tried("`ModelCheckpoint` and `fit(ckpt_path=...)` continue bit for bit", stages="1, 2, 3")
def test_a_resumed_run_ends_in_the_bits_of_an_uninterrupted_one(tmp_path):
    check_resume(tmp_path, OURS + UNDER_DDP)


class Freezing(BaseFinetuning):
    """Assigns `optimizer.param_groups` at every resume."""

    def freeze_before_training(self, module):
        self.freeze(module.net.layers[0])

    def finetune_function(self, module, epoch, optimizer):
        pass


@tried("`BaseFinetuning`, resumed: steps take the learning rate that it restores", stages="1, 2, 3")
def test_a_finetuning_callback_that_resumes_keeps_the_learning_rate(tmp_path):
    def body(rank, world_size):
        for number, (stage, strategy) in enumerate(OURS + UNDER_DDP):
            path = tmp_path / f"{number}"
            whole = Lit(stage)
            fit(whole, strategy, callbacks=[Freezing(), keep_all(path)])
            again = Lit(stage)
            fit(again, strategy, resume=path / "epoch=0.ckpt", callbacks=[Freezing()])
            name = f"stage {stage} under {strategy}"
            assert_same(found(again, epochs=1), found(whole, epochs=1), name)

    ranks_of(body)


@tried(
    '`precision="bf16-true"`: masters are in the checkpoint, resumed bit for bit', stages="1, 2, 3"
)
def test_sixteen_bit_parameters_resume_with_their_masters(tmp_path):
    cases = [(1, "ddp"), (2, "zeroshard"), (3, "zeroshard")]
    check_resume(tmp_path, cases, precision="bf16-true")


@tried('`precision="bf16-mixed"`: losses and weights as with DDP', stages="1, 2, 3")
@pytest.mark.filterwarnings("ignore:autocast saves a whole 16-bit copy")  # true, in stage 3
def test_autocast_gives_the_bits_of_ddp():
    check_against_ddp(OURS + UNDER_DDP, Lit, options={"precision": "bf16-mixed"})


@tried(
    "The file of `save_checkpoint` is whole: plain Lightning loads it, and resumes",
    stages="1, 2, 3",
)
def test_checkpoints_are_exchanged_with_plain_lightning(tmp_path):
    def body(rank, world_size):
        plain = Lit(0)
        fit(plain, "ddp", callbacks=[keep_all(tmp_path / "plain")])
        expected = found(plain, epochs=1)
        for stage, strategy in [*OURS, (2, "ddp")]:
            what = f"stage {stage} under {strategy}"
            folder = tmp_path / f"{strategy}-{stage}"
            ours = Lit(stage)
            trainer = fit(ours, strategy, callbacks=[keep_all(folder)])
            trainer.save_checkpoint(folder / "last.ckpt")
            loaded = Lit.load_from_checkpoint(folder / "last.ckpt", stage=0)
            assert_same(dict(loaded.named_parameters()), weights(ours), f"{what}, loaded")
            file = torch.load(folder / "last.ckpt", weights_only=True, mmap=True)
            assert file["state_dict"].keys() == plain.state_dict().keys()
            tied = file["state_dict"]["net.embed.weight"], file["state_dict"]["net.head.weight"]
            assert tied[0].data_ptr() == tied[1].data_ptr(), f"{what}: tied weights, once"
            for first, second in [((0, "ddp"), (stage, strategy)), ((stage, strategy), (0, "ddp"))]:
                source = tmp_path / "plain" if first[0] == 0 else folder
                then = Lit(second[0])
                fit(then, second[1], resume=source / "epoch=0.ckpt")
                assert_same(found(then, epochs=1), expected, f"{first}, then {second}")

    ranks_of(body)


def sharded():
    return ZeroShardStrategy(save_distributed_checkpoint=True)


@tried(
    "`save_distributed_checkpoint=True`: a folder to which every rank adds its slices; any stage "
    "resumes from it",
    stages="1, 2, 3",
)
def test_a_folder_holds_every_ranks_slices_and_resumes_in_any_stage(tmp_path):
    def body(rank, world_size):
        results = {}
        for stage in (1, 2, 3):
            module = Lit(stage)
            trainer = fit(module, sharded(), callbacks=[keep_all(tmp_path / f"{stage}")])
            trainer.save_checkpoint(tmp_path / f"{stage}" / "epoch=1.ckpt")  # written over
            results[stage] = found(module, epochs=1)
        assert_same(results[2], results[1], "stages")
        assert_same(results[3], results[1], "stages")
        expected = results[1]
        for before, after in [(1, 3), (2, 2), (3, 3), (3, 1)]:
            what = f"saved in stage {before}, resumed in stage {after}"
            module = Lit(after)
            strategy = "zeroshard" if before == 2 else sharded()  # which only says how to write
            fit(module, strategy, resume=tmp_path / f"{before}" / "epoch=0.ckpt")
            assert_same(found(module, epochs=1), expected, what)
        return {name: value for name, value in expected.items() if "." in name}

    expected = ranks_of(body)[0]
    files = {path.name for path in (tmp_path / "3" / "epoch=1.ckpt").rglob("*.distcp")}
    assert files == {"__0_0.distcp", "__1_0.distcp"}, "every rank writes"
    assert not list(tmp_path.rglob("*.incomplete"))
    tool = "lightning.pytorch.utilities.consolidate_checkpoint"
    output = ["--output_file", str(tmp_path / "whole.ckpt")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [tool, str(tmp_path / "3" / "epoch=1.ckpt"), *output])
        runpy.run_module(tool, run_name="__main__")
    loaded = Lit.load_from_checkpoint(tmp_path / "whole.ckpt", stage=0)
    assert_same(dict(loaded.named_parameters()), expected, "consolidated by Lightning's tool")


class Fails:
    """What cannot be written."""

    def __reduce__(self):
        raise OSError("the disk is full")


@tried(
    "A save that fails half way, as a folder: the checkpoint that was there stays, whole",
    stages="1, 2, 3",
)
def test_a_save_that_fails_leaves_the_earlier_checkpoint(tmp_path):
    def body(rank, world_size):
        for stage in (1, 2, 3):
            module, path = Lit(stage), tmp_path / f"{stage}.ckpt"
            if rank == 0:
                path.write_text("a file, where a folder will be")
            trainer = fit(module, sharded(), epochs=1)
            trainer.save_checkpoint(path)
            expected = weights(module)
            with torch.no_grad(), zeroshard.gather(module, writeback=True):
                module.net.layers[0].norm.weight.zero_()
            trainer.strategy.barrier()
            (tmp_path / f"{stage}.ckpt" / "notes.txt").write_text("of the user's")
            module.on_save_checkpoint = lambda checkpoint: checkpoint.update(bad=Fails())
            with pytest.raises(ConfigError, match="rank 0: the disk is full"):
                trainer.save_checkpoint(path)
            again = Lit(stage)
            trainer = trainer_of(sharded(), epochs=1)
            trainer.fit(again, loader(0, 16), ckpt_path=path)
            assert_same(weights(again), expected, f"stage {stage}")
            kept = {".metadata", "__0_0.distcp", "__1_0.distcp", "optimizer-0", "notes.txt"}
            assert {file.name for file in path.iterdir()} - {".incomplete"} == {"meta.pt", *kept}
            trainer.strategy.barrier()
            trainer.strategy.save_distributed_checkpoint = False  # a file, where a folder is
            trainer.save_checkpoint(path)
            trainer.strategy.barrier()
            assert_same(dict(Lit.load_from_checkpoint(path).named_parameters()), expected, "file")
            trainer.strategy.barrier()

    ranks_of(body)
    assert not list(tmp_path.rglob("*.incomplete"))


@tried(
    "`validate`, `test`, `predict`, `save_checkpoint` and a second `fit` afterwards",
    stages="1, 2, 3",
)
def test_what_follows_a_fit_works_on_its_model(tmp_path):
    def body(rank, world_size):
        results = {}
        for stage, strategy in [(0, "ddp"), *OURS]:
            module = Lit(stage)
            kept = ModelCheckpoint(tmp_path / f"{stage}", monitor="val_loss")
            trainer = fit(module, strategy, callbacks=[kept])
            tested = trainer.test(module, loader(7000, 8), verbose=False)
            best = trainer.validate(module, loader(7000, 8), ckpt_path="best", verbose=False)
            logits = trainer.predict(module, loader(8000, 8), ckpt_path=None)
            other = trainer_of(strategy).test(module, loader(7000, 8), verbose=False)
            fit(module, strategy, epochs=1)
            trainer.fit_loop.max_epochs = 3
            trainer.fit(module, loader(0, 16), loader(5000, 8))
            results[stage, strategy] = {
                "tested": torch.tensor(list(tested[0].values())),
                "best": torch.tensor(list(best[0].values())),
                "other": torch.tensor(list(other[0].values())),
                "logits": torch.stack(logits),
                **found(module),
            }
            assert_same(results[stage, strategy], results[0, "ddp"], f"stage {stage}, {strategy}")

    ranks_of(body)


class Manual(Lit):
    """Two backwards a step, of which only the second one need be reduced."""

    def __init__(self, stage=0, **settings):
        super().__init__(stage, **settings)
        self.automatic_optimization = False

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for part, sync_grad in ((batch[:1], False), (batch[1:], True)):
            with optimizer.toggle_model(sync_grad=sync_grad):
                loss = self.loss(part) / 2
                self.manual_backward(loss)
            self.losses.append(loss.detach().clone())
        self.clip_gradients(optimizer, 0.05, "value")
        optimizer.step()
        self.lr_schedulers().step()


@tried(
    "Manual optimization: `self.optimizers()`, `toggle_model`, `clip_gradients`", stages="1, 2, 3"
)
def test_manual_optimization_gives_the_bits_of_ddp():
    check_against_ddp(OURS + UNDER_DDP, Manual)


class TwoOptimizers(Lit):
    """Each trains a part of the module, the second one behind the first one's."""

    def __init__(self, stage=0, **settings):
        super().__init__(stage, **settings)
        self.automatic_optimization = False
        self.judge = nn.Linear(256, 3)

    def training_step(self, batch, index):
        first, second = self.optimizers()
        for optimizer in (first, second):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            if optimizer is first:
                loss = self.loss(batch)
            else:
                loss = self.judge(self(batch[:, :-1])).square().mean()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.losses.append(loss.detach().clone())

    def configure_optimizers(self):
        return [optimizer_for(part, self.hparams.stage) for part in (self.net, self.judge)]


@tried("Several optimizers, `toggle_optimizer`", stages="1, 2, 3")
def test_two_optimizers_for_parts_of_a_module_give_the_bits_of_ddp():
    def fitted(module, strategy):
        fit(module, "ddp_find_unused_parameters_true" if strategy == "ddp" else strategy)

    check_against_ddp(OURS, TwoOptimizers, fitted=fitted)


@tried("`Tuner.lr_find`", stages="1, 2, 3")
def test_the_learning_rate_finder_finds_the_same_losses(tmp_path):
    def body(rank, world_size):
        def losses(stage, strategy):
            module = Lit(stage)
            module.lr = 1e-3
            trainer = trainer_of(strategy, default_root_dir=tmp_path, enable_checkpointing=True)
            finder = Tuner(trainer).lr_find(
                module, loader(0, 64), num_training=8, update_attr=False
            )
            return finder.results["loss"], weights(module)

        expected, left = losses(0, "ddp")
        for stage, strategy in OURS:
            got, restored = losses(stage, strategy)
            assert got == expected, f"stage {stage}"
            assert_same(restored, left, f"stage {stage}, restored")

    ranks_of(body)


AVERAGES = (WeightAveraging, lambda: StochasticWeightAveraging(1e-3))


@tried("`WeightAveraging`, `StochasticWeightAveraging`", stages="1, 2")
def test_weight_averages_are_those_of_ddp():
    for average in AVERAGES:

        def fitted(module, strategy, average=average):
            fit(module, strategy, epochs=3, callbacks=[average()])

        check_against_ddp(OURS[:2], Lit, fitted=fitted)


@tried(
    "`WeightAveraging`, `StochasticWeightAveraging`",
    stages="3",
    result="refused: they copy whole parameters; the error names `zeroshard.EMA`",
)
def test_weight_averages_of_sharded_parameters_are_refused():
    def body(rank, world_size):
        for average in AVERAGES:
            with pytest.raises(ConfigError, match=r"WeightAveraging averages .* zeroshard.EMA"):
                fit(Lit(3), "zeroshard", callbacks=[average()])

    ranks_of(body)


class Normalised(Lit):
    """Running statistics, which validation reads: DDP takes the first rank's."""

    def __init__(self, stage=0, **settings):
        super().__init__(stage, **settings)
        self.normalise = nn.BatchNorm1d(256)

    def forward(self, letters):
        return self.normalise(self.net(letters).transpose(1, 2)).transpose(1, 2)


@tried(
    "Buffers that differ between ranks: evaluation uses the first rank's, as with DDP",
    stages="1, 2, 3",
)
def test_validation_uses_the_first_ranks_running_statistics():
    check_against_ddp(OURS, Normalised)


class Streamed(Lit):
    """Built on the meta device; its weights come from a file once the optimizer has the model."""

    def configure_optimizers(self):
        configured = super().configure_optimizers()
        zeroshard.load_weights(self.net, self.pretrained)
        return configured


def streamed(stage, path):
    with torch.device("meta"):
        module = Streamed(stage)
    module.pretrained = path
    return module


@tried("A model from the meta device, whose weights come from a file; resumed too", stages="2, 3")
def test_a_meta_model_starts_from_a_file_and_resumes_from_a_checkpoint(tmp_path):
    def body(rank, world_size):
        start, path = Lit(2), tmp_path / "weights"
        zeroshard.AdamW(start.net)
        zeroshard.export_weights(start.net, path)
        expected = Lit(2)
        fit(expected, "zeroshard")
        for stage in (2, 3):
            module, kept = streamed(stage, path), keep_all(tmp_path / f"{stage}")
            fit(module, "zeroshard", callbacks=[kept])
            assert_same(found(module), found(expected), f"stage {stage}")
            again = streamed(stage, path)
            fit(again, "zeroshard", resume=tmp_path / f"{stage}" / "epoch=0.ckpt")
            got, wanted = found(again, epochs=1), found(expected, epochs=1)
            assert_same(got, wanted, f"stage {stage}, resumed")

    ranks_of(body)


@tried("Lightning starts the ranks; afterwards the first process has the weights", stages="3")
def test_lightning_can_start_the_ranks_itself():
    def body(rank, world_size):
        module = Lit(0)
        fit(module, "ddp")
        return weights(module)

    module = Lit(3)
    fit(module, ZeroShardStrategy(start_method="fork"))
    assert_same(weights(module), ranks_of(body)[0], "weights that came back")


@tried(
    'Stage 3 under `strategy="ddp"`',
    stages="3",
    result="refused: DDP needs whole parameters; the error says to leave it out",
)
def test_stage_3_under_lightnings_ddp_is_refused():
    def body(rank, world_size):
        with pytest.raises(ConfigError, match="remove the wrapper, stage 3 shards"):
            fit(Lit(3), "ddp")

    ranks_of(body)


@tried(
    'Another optimizer, or options of DDP, with `strategy="zeroshard"`',
    stages="-",
    result="refused: nothing would average its gradients; the error names `zeroshard.AdamW`",
)
def test_what_the_strategy_would_not_heed_is_refused():
    def body(rank, world_size):
        with pytest.raises(ConfigError, match=r"returned AdamW, .* use zeroshard.AdamW, or strat"):
            fit(Lit(0), "zeroshard")
        fabric = fabric_of("zeroshard")
        model = Net()
        with pytest.raises(ConfigError, match=r"given AdamW, .* use zeroshard.AdamW, or strategy="):
            fabric.setup(model, optimizer_for(model, 0))
        for strategy in (ZeroShardStrategy, FabricZeroShardStrategy):
            with pytest.raises(ConfigError, match="find_unused_parameters: options of Distributed"):
                strategy(find_unused_parameters=True)
        with pytest.raises(ConfigError, match="ddp_comm_hook: options of Distributed"):
            ZeroShardStrategy(ddp_comm_hook=print)

    ranks_of(body)


def fabric_of(strategy, **options):
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, **options)
    fabric.launch()
    return fabric


class Run:
    """What a script with Fabric holds."""

    def __init__(self, stage, strategy, *, precision="32-true", **settings):
        self.fabric = fabric_of(strategy, precision=precision)
        with self.fabric.init_module():
            torch.manual_seed(0)
            model = Net()
        optimizer = optimizer_for(model, stage, **settings)
        self.model, self.optimizer = self.fabric.setup(model, optimizer)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.batches = self.fabric.setup_dataloaders(loader(0, 64))
        self.losses, self.norms = [], []

    def train(self, *, first=0, steps=4, accumulate=2, **clip):
        """Each step takes `accumulate` batches."""
        for index, batch in enumerate(self.batches):
            if not first * accumulate <= index < (first + steps) * accumulate:
                continue
            is_last = (index + 1) % accumulate == 0
            with self.fabric.no_backward_sync(self.model, enabled=not is_last):
                loss = loss_of(self.model(batch[:, :-1]), batch) / accumulate
                self.fabric.backward(loss)
            self.losses.append(self.fabric.all_reduce(loss.detach().clone()))
            if is_last:
                if clip:
                    norm = self.fabric.clip_gradients(self.model, self.optimizer, **clip)
                    self.norms.append(norm if norm is None else float(norm))
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.scheduler.step()
        return self

    def found(self, last=None):
        return {"losses": torch.stack(self.losses[-4:]), **weights(self.model.module)}

    def state(self, **others):
        return {
            "optimizer": self.optimizer,
            "model": self.model,
            "scheduler": self.scheduler,
            **others,
        }


@tried(
    "Fabric: `setup`, `backward`, `no_backward_sync`, `clip_gradients`: as with DDP",
    stages="1, 2, 3",
)
def test_fabric_gives_the_bits_of_ddp():
    def body(rank, world_size):
        for clip in ({}, {"clip_val": 0.01}, {"max_norm": 0.25}):
            settings = CLIPPED if "max_norm" in clip else {}
            reference = Run(0, "ddp", **settings).train(**clip)
            assert reference.found()["losses"].isfinite().all()
            for stage, strategy in OURS + UNDER_DDP:
                what = f"Fabric, {clip}, stage {stage} under {strategy}"
                run_ = Run(stage, strategy, **settings).train(**clip)
                if "max_norm" in clip:
                    assert run_.norms == pytest.approx(reference.norms, rel=2**-20), what
                    assert_close(run_.found(), reference.found(), what, atol=ATOL)
                else:
                    assert_same(run_.found(), reference.found(), what)

    ranks_of(body)


@tried("Fabric: no communication inside of `no_backward_sync`", stages="1, 2, 3")
def test_gradients_inside_of_fabrics_no_backward_sync_are_not_reduced():
    def body(rank, world_size):
        for stage in (1, 2, 3):
            run_ = Run(stage, "zeroshard")
            for enabled in (True, False):
                with run_.fabric.no_backward_sync(run_.model, enabled=enabled):
                    batch = next(iter(run_.batches))
                    run_.fabric.backward(loss_of(run_.model(batch[:, :-1]), batch))
                assert is_reduced(run_.model) is not enabled, f"stage {stage}"

    ranks_of(body)


@tried("Fabric: `save` and `load` continue bit for bit; the file is whole", stages="1, 2, 3")
def test_fabric_saves_and_loads_bit_for_bit(tmp_path):
    def body(rank, world_size):
        for stage, strategy in OURS + UNDER_DDP:
            for precision in ("32-true", "bf16-true"):
                check(strategy, stage, precision)

    def check(strategy, stage, precision):
        what, path = f"{strategy}, stage {stage}, {precision}", tmp_path / f"{stage}-{precision}"
        first = Run(stage, strategy, precision=precision).train(steps=2)
        first.fabric.save(path, first.state(steps=2, note={"seed": 0}))
        saved = weights(first.model.module)
        first.train(first=2, steps=2)
        again = Run(stage, strategy, precision=precision)
        state = again.state(steps=0)
        assert again.fabric.load(path, state) == {"note": {"seed": 0}}, what
        assert (state["steps"], state["model"]) == (2, again.model), what
        assert again.scheduler.last_epoch == 2
        again.train(first=2, steps=2)
        assert_same(again.found(), first.found(), what)
        plain = Net().to(saved["embed.weight"].dtype)
        plain.load_state_dict(torch.load(path, weights_only=True)["model"])
        assert_same(dict(plain.named_parameters()), saved, f"{what}, in plain torch")

    ranks_of(body)


@tried(
    "Fabric: `setup` casts a model whose optimizer was built before",
    stages="1, 2, 3",
    result="refused: the error says to cast first, as `fabric.init_module()` does",
)
def test_a_model_that_fabric_casts_after_the_optimizer_was_built_is_refused():
    def body(rank, world_size):
        for stage in (1, 2, 3):
            fabric = fabric_of("zeroshard", precision="bf16-true")
            model = Net()
            model, _ = fabric.setup(model, optimizer_for(model, stage))
            with pytest.raises(ConfigError, match="move or cast the model before building the opt"):
                fabric.backward(loss_of(model(TEXT[:24].view(2, 12)), TEXT[:26].view(2, 13)))
            model = fabric.setup_module(Net())
            optimizer = fabric.setup_optimizers(optimizer_for(model.module, stage))
            before = weights(model.module)
            fabric.backward(loss_of(model(TEXT[:24].view(2, 12)), TEXT[:26].view(2, 13)))
            optimizer.step()
            assert not torch.equal(weights(model.module)["embed.weight"], before["embed.weight"])

    ranks_of(body)
