"""transformers' Trainer: beside itself under DDP, interrupted and resumed, and what it writes."""

import contextlib
import pathlib
import pydoc_data.topics
import shutil
import tempfile
import warnings

import pytest
import torch
import torch.distributed as dist
from consumers import Consumer, tried
from models import assert_close, assert_same, weights
from ranks import run
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import zeroshard
from zeroshard.errors import ConfigError
from zeroshard.integrations.transformers import ZeroShardFactory, ZeroShardTrainer

CONSUMER = Consumer(
    "Trainer",
    "transformers",
    use="`Trainer(..., optimizer_cls_and_kwargs=(ZeroShardFactory, {'stage': 2}))`, or "
    "`ZeroShardTrainer` in its place, of `zeroshard.integrations.transformers`.",
)
TEXT = "\n".join(pydoc_data.topics.topics.values()).encode()
TOKENS = 20
# Both ways in, of which the factory makes the one the other, as (kind of Trainer, stage).
WAYS = [(kind, stage) for kind in (Trainer, ZeroShardTrainer) for stage in (1, 2, 3)]
SOME_WAYS = [(Trainer, 2), (ZeroShardTrainer, 1), (ZeroShardTrainer, 3)]
PLAIN = (Trainer, None)


class Text(torch.utils.data.Dataset):
    """Pieces of real text as bytes; different numbers of them count in the loss."""

    def __init__(self, count, first=0):
        self.count, self.first = count, first

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        start = TOKENS * (self.first + index)
        ids = torch.tensor(list(TEXT[start : start + TOKENS]))
        labels = ids.clone()
        labels[: start % 7] = -100
        return {"input_ids": ids, "labels": labels}


def config(**settings):
    sizes = {
        "vocab_size": 256,
        "hidden_size": 32,
        "intermediate_size": 44,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    special = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
    return LlamaConfig(attention_dropout=0.1, **sizes, **special, **settings)


def llama(**settings):
    torch.manual_seed(0)
    return LlamaForCausalLM(config(**settings))


def trainer(kind, stage, folder, *, model=None, callbacks=None, options=None, **settings):
    """A Trainer of a small model; stage None: torch's optimizer."""
    arguments = {
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "max_steps": 4,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        "warmup_steps": 1,
        "max_grad_norm": 0.0,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "log_level": "error",
    }
    extra = {}
    if stage is not None:
        extra["optimizer_cls_and_kwargs"] = (ZeroShardFactory, {"stage": stage, **(options or {})})
    made = kind(
        llama() if model is None else model,
        TrainingArguments(str(folder), **{**arguments, **settings}),
        train_dataset=Text(30),
        eval_dataset=Text(7, first=100),
        callbacks=callbacks,
        **extra,
    )
    made.pop_callback("PrinterCallback")
    return made


def logs_of(trained):
    """What was logged, but for times; and the gradient norms apart."""
    history = [
        {key: value for key, value in entry.items() if "runtime" not in key and "per_s" not in key}
        for entry in trained.state.log_history
    ]
    norms = [entry.pop("grad_norm") for entry in history if "grad_norm" in entry]
    return history, norms


@contextlib.contextmanager
def shared_folder():
    """A folder that every rank sees."""
    names = [None]
    if dist.get_rank() == 0:
        names = [tempfile.mkdtemp(prefix="trainer-")]
    dist.broadcast_object_list(names)
    try:
        yield pathlib.Path(names[0])
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(names[0], ignore_errors=True)


def on_two_ranks(body):
    """Run `body(folder)` on two ranks, in a folder that both see."""

    def ready(rank, world_size):
        with shared_folder() as folder:
            body(folder)

    # Accelerate starts no CPU ranks unless it is told that they are all on one machine.
    run(ready, 2, timeout_s=150, LOCAL_WORLD_SIZE=2)


def label(way):
    return f"{way[0].__name__}, stage {way[1]}"


def trained_as(way, folder, **settings):
    made = trainer(*way, folder, **settings)
    made.train()
    return made


# --- beside DistributedDataParallel and torch's fused AdamW


@tried(
    "losses, learning rates, evaluations and weights are bit for bit those of Trainer under DDP, "
    "with accumulation, decay groups, dropout and `bf16=True`; gradient norms to the last digits",
    stages="1, 2, 3",
)
def test_training_is_that_of_trainer_under_ddp():
    settings = [
        {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2},
        {"gradient_accumulation_steps": 2, "average_tokens_across_devices": False},
        {"num_train_epochs": 1, "max_steps": -1, "gradient_accumulation_steps": 3},
        {"bf16": True, "adam_epsilon": 1e-6, "adam_beta1": 0.8, "weight_decay": 0.0},
    ]

    def body(folder):
        for chosen in settings:
            reference = trained_as(PLAIN, folder, **chosen)
            assert isinstance(reference.model_wrapped, DistributedDataParallel)
            expected, norms = logs_of(reference)
            assert len(norms) == reference.state.global_step > 1
            for way in WAYS:
                with warnings.catch_warnings():
                    # Stage 3 says once that autocast keeps copies of all parameters.
                    warnings.filterwarnings("ignore", message="autocast saves")
                    made = trained_as(way, folder, **chosen)
                assert made.model_wrapped is made.model, "nothing wraps it"
                what = f"{label(way)}, {chosen}"
                got, got_norms = logs_of(made)
                assert got == expected, what
                # Norms are rounded a few times in either system, however they are summed.
                assert got_norms == pytest.approx(norms, rel=2**-20), what
                assert_same(weights(made.model), weights(reference.model), what)

    on_two_ranks(body)


@tried("`max_grad_norm` clips as under DDP", stages="1, 2, 3")
def test_max_grad_norm_clips_as_under_ddp():
    def body(folder):
        # The norm is far above; adam_epsilon keeps the first updates from being signs alone.
        chosen = {"max_grad_norm": 0.05, "adam_epsilon": 1e-2}
        reference = trained_as(PLAIN, folder, **chosen)
        expected, norms = logs_of(reference)
        assert min(norms) > 1.0
        unclipped = trained_as(PLAIN, folder, **{**chosen, "max_grad_norm": 0.0})
        far = max(
            float((value - weights(unclipped.model)[name]).abs().max())
            for name, value in weights(reference.model).items()
        )
        assert far > 1e-3, "the reference must show that clipping acts"
        for way in WAYS:
            made = trained_as(way, folder, **chosen)
            got, got_norms = logs_of(made)
            assert got_norms == pytest.approx(norms, rel=2**-20), label(way)
            # A clipped gradient is below 0.05 and off by 2**-20 of itself, an update by lr times
            # 2 / eps times that: 1e-7 in each of four steps, and as much for a weight's rounding.
            assert_close(weights(made.model), weights(reference.model), label(way), atol=1e-6)
            for mine, other in zip(got, expected, strict=True):
                assert mine == pytest.approx(other, rel=1e-5)

    on_two_ranks(body)


# --- checkpoints


SAVING = {
    "max_steps": 5,
    "save_strategy": "steps",
    "save_steps": 2,
    "gradient_accumulation_steps": 2,
}


@tried(
    "`resume_from_checkpoint` continues bit for bit, also in another stage or from the checkpoint "
    "of a plain Trainer",
    stages="1, 2, 3",
)
def test_a_resumed_run_is_the_uninterrupted_one():
    def body(folder):
        plain = trained_as(PLAIN, folder / "plain", **SAVING)
        expected, _ = logs_of(plain)

        def resumed(way, checkpoint, what):
            made = trainer(*way, folder / what, **SAVING)
            made.train(resume_from_checkpoint=str(checkpoint))
            got, _ = logs_of(made)
            # The average over the run counts only the steps after it was resumed.
            assert got[:-1] == expected[:-1], what
            assert_same(weights(made.model), weights(plain.model), what)

        for way in WAYS:
            mine = folder / label(way)
            whole = trained_as(way, mine, **SAVING)
            assert_same(weights(whole.model), weights(plain.model), label(way))
            checkpoint = mine / "checkpoint-2"
            assert not (checkpoint / "optimizer.pt").exists(), "it would hold one rank's slices"
            resumed(way, checkpoint, f"{label(way)} from step 2")
            resumed(way, mine / "checkpoint-4", f"{label(way)} from step 4")
        for stage in (1, 2, 3):
            way = (ZeroShardTrainer, stage)
            other = folder / label((ZeroShardTrainer, 1 if stage == 3 else 3))
            resumed(way, other / "checkpoint-2", f"{label(way)} from another stage")
            resumed(way, folder / "plain" / "checkpoint-2", f"{label(way)} from DDP")

    on_two_ranks(body)


@tried(
    "a plain Trainer refuses the checkpoint",
    stages="1, 2, 3",
    result="refused by Trainer: it looks for `optimizer.pt`",
)
def test_a_plain_trainer_does_not_start_moments_anew_in_silence():
    def body(folder):
        trained_as((ZeroShardTrainer, 2), folder, **SAVING)
        made = trainer(*PLAIN, folder, **SAVING)
        with pytest.raises(FileNotFoundError, match="optimizer"):
            made.train(resume_from_checkpoint=True)

    on_two_ranks(body)


@tried(
    "`load_best_model_at_end`, `save_total_limit`; `save_model` writes complete weights that "
    "`from_pretrained` reads",
    stages="1, 2, 3",
)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_best_weights_come_back_and_complete_ones_are_written(tied):
    chosen = {
        **SAVING,
        "max_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_steps": 1,
        "save_total_limit": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,  # so that an early step is called the best one
    }

    def made(way, folder):
        return trainer(*way, folder, model=llama(tie_word_embeddings=tied), **chosen)

    def body(folder):
        plain = made(PLAIN, folder / "plain")
        plain.train()
        plain.save_model()
        best = plain.state.best_model_checkpoint
        assert best is not None
        assert not best.endswith("-3"), "the best weights must not be the last ones"
        for way in SOME_WAYS:
            mine = folder / label(way)
            ours = made(way, mine)
            ours.train()
            assert ours.state.best_metric == plain.state.best_metric
            assert_same(weights(ours.model), weights(plain.model), label(way))
            ours.save_model()
            ours.save_model()  # over the one before
            dist.barrier()
            for path in (".", "checkpoint-3"):
                read, expected = [
                    weights(LlamaForCausalLM.from_pretrained(folder / name / path))
                    for name in (label(way), "plain")
                ]
                assert_same(read, expected, f"{label(way)}, {path}")
                files = {
                    name: {file.name for file in (folder / name / path).iterdir()}
                    for name in (label(way), "plain")
                }
                different = files[label(way)] ^ files["plain"]
                state = {"optimizer.pt", "zeroshard_optimizer"} if path != "." else set()
                assert different == state, f"{label(way)}, {path}"
            again = made(way, mine)
            again.train(resume_from_checkpoint=str(mine / pathlib.Path(best).name))
            assert_same(weights(again.model), weights(plain.model), f"{label(way)}, resumed")

    on_two_ranks(body)


@tried(
    "activation checkpointing, `generate()` inside of `zeroshard.gather(model)`, training on after "
    "it, and a second `train()`",
    stages="1, 2, 3",
)
def test_a_sharded_model_is_checkpointed_generates_and_trains_on():
    chosen = {"gradient_checkpointing": True, "max_steps": 2}

    def generated(model, *, inside=contextlib.nullcontext):
        prompt = torch.tensor([list(b"The with statement")])
        with inside():
            text = model.eval().generate(prompt, do_sample=False, max_new_tokens=5)
        return text.tolist()

    def body(folder):
        reference = trained_as(PLAIN, folder, **chosen)
        before = generated(reference.model)
        reference.train()
        expected, _ = logs_of(reference)
        for way in SOME_WAYS:
            made = trained_as(way, folder, **chosen)
            inside = zeroshard.gather(made.model)
            assert generated(made.model, inside=lambda inside=inside: inside) == before
            made.train()
            assert logs_of(made)[0] == expected, label(way)
            assert_same(weights(made.model), weights(reference.model), label(way))
            assert made.evaluate()["eval_loss"] == reference.evaluate()["eval_loss"]

    on_two_ranks(body)


@tried("an optimizer given as `optimizers=`, of a model from the meta device", stages="3")
def test_a_model_from_the_meta_device_is_trained_and_resumed():
    def built(folder, source):
        torch.manual_seed(0)
        with torch.device("meta"):
            model = LlamaForCausalLM(config())
        optimizer = zeroshard.AdamW(model, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0, stage=3)
        zeroshard.load_weights(model, source)
        arguments = trainer(*PLAIN, folder, **{**SAVING, "weight_decay": 0.0}).args
        made = ZeroShardTrainer(
            model, arguments, train_dataset=Text(30), optimizers=(optimizer, None)
        )
        made.pop_callback("PrinterCallback")
        return made

    def body(folder):
        reference = trainer(*PLAIN, folder / "plain", **{**SAVING, "weight_decay": 0.0})
        reference.save_model(folder / "start")
        dist.barrier()
        reference.train()
        made = built(folder / "meta", folder / "start")
        made.train()
        assert logs_of(made)[0] == logs_of(reference)[0]
        assert_same(weights(made.model), weights(reference.model), "from the meta device")
        again = built(folder / "again", folder / "start")
        again.train(resume_from_checkpoint=str(folder / "meta" / "checkpoint-2"))
        assert_same(weights(again.model), weights(reference.model), "resumed")

    on_two_ranks(body)


@tried("`sync_each_batch` reduces every micro-batch, so that gradients stay sharded", stages="2, 3")
def test_sync_each_batch_keeps_gradients_sharded():
    class Gradients(TrainerCallback):
        def __init__(self):
            self.kinds = set()

        def on_substep_end(self, args, state, control, model, **kwargs):
            self.kinds |= {type(p.grad) for p in model.parameters() if p.grad is not None}

    def body(folder):
        chosen = {"gradient_accumulation_steps": 3, "adam_epsilon": 1e-2}
        found = {}
        for stage in (2, 3):
            for each in (False, True):
                seen = Gradients()
                settings = {"gradient_accumulation_kwargs": {"sync_each_batch": each}}
                made = trainer(
                    ZeroShardTrainer,
                    stage,
                    folder,
                    callbacks=[seen],
                    accelerator_config=settings,
                    **chosen,
                )
                made.train()
                assert seen.kinds == {zeroshard.ShardTensor if each else torch.Tensor}
                found[stage, each] = weights(made.model)
            # Three gradients of two ranks each are added up in another order: a sum below 2 is off
            # by five roundings, 2**-22, an update by lr * 2 / eps times that: 5e-7 in each of four
            # steps.
            what = f"stage {stage}"
            assert_close(found[stage, True], found[stage, False], what, atol=2e-6)
        assert_same(found[3, True], found[2, True], "stages")

    on_two_ranks(body)


# --- what is refused


@tried(
    "another optimizer or sharder beside it, folders that ranks do not share, a factory outside of "
    "Trainer",
    stages="1, 2, 3",
    result="refused: `ConfigError` says what to do",
)
def test_what_cannot_work_is_refused_before_training():
    def body(folder):
        def refused(match, kind=ZeroShardTrainer, stage=2, **settings):
            made = trainer(kind, stage, folder, **settings)
            before = weights(made.model)
            with pytest.raises(ConfigError, match=match):
                made.train()
            assert_same(weights(made.model), before, match)

        refused("optim=.*ADAFACTOR asks for another optimizer", stage=None, optim="adafactor")
        for kind in (Trainer, ZeroShardTrainer):
            refused("shared output_dir", kind, save_on_each_node=True, save_strategy="steps")
            refused("stage must be one of 1, 2, 3", kind, stage=4)
        made = trainer(*PLAIN, folder)
        made.optimizer_cls_and_kwargs = (torch.optim.SGD, {})
        made.__class__ = ZeroShardTrainer
        with pytest.raises(ConfigError, match=r"must be .ZeroShardFactory.*got SGD"):
            made.train()
        made = trainer(*PLAIN, folder)
        made.optimizer = torch.optim.SGD(made.model.parameters())
        made.__class__ = ZeroShardTrainer
        with pytest.raises(ConfigError, match=r"expected a zeroshard\.AdamW"):
            made.train()
        made = trainer(ZeroShardTrainer, 2, folder)
        made.args.fsdp = "full_shard"
        with pytest.raises(ConfigError, match="leave out fsdp"):
            made.train()
        with pytest.raises(ConfigError, match=r"outside of Trainer call zeroshard\.AdamW"):
            ZeroShardFactory()(llama())

    on_two_ranks(body)


@tried("a run that is resumed from an older checkpoint writes over later ones", stages="1, 2, 3")
def test_a_later_checkpoint_is_written_over():
    def body(folder):
        for way in SOME_WAYS:
            mine = folder / label(way)
            whole = trained_as(way, mine, **SAVING)
            again = trainer(*way, mine, **SAVING)
            again.train(resume_from_checkpoint=str(mine / "checkpoint-2"))
            last = trainer(*way, mine, **SAVING)
            last.train(resume_from_checkpoint=str(mine / "checkpoint-4"))
            assert_same(weights(last.model), weights(whole.model), label(way))

    on_two_ranks(body)
