"""transformers' Trainer: beside itself under DDP, interrupted and resumed, and what it writes."""

import contextlib
import functools
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
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import zeroshard
from zeroshard.errors import ConfigError, GradientError
from zeroshard.integrations import transformers as integration
from zeroshard.integrations.transformers import ZeroShardFactory, ZeroShardTrainer

CONSUMER = Consumer(
    "Trainer",
    "transformers",
    use="`class MyTrainer(ZeroShardTrainer, Trainer): zeroshard_options = {'stage': 3}`, or "
    "`Trainer(..., optimizer_cls_and_kwargs=(ZeroShardFactory, {'stage': 3}))`, of "
    "`zeroshard.integrations.transformers`.",
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


# --- Trainers of other kinds, and several of them


class Pieces(torch.utils.data.Dataset):
    """Real text to translate into the text that follows it, as bytes."""

    def __len__(self):
        return 9

    def __getitem__(self, index):
        text = torch.tensor(list(TEXT[11 * index : 11 * index + 11]))
        return {"input_ids": text[:6], "labels": text[6:]}


class T5OfUnevenTexts(T5ForConditionalGeneration):
    """Each rank's texts end after another number of tokens."""

    def generate(self, *args, **kwargs):
        self.was_whole = not self.encoder.block[0].layer[1].DenseReluDense.wi.weight.isnan().any()
        numel = 8 + 4 * dist.get_rank()
        return super().generate(*args, **{**kwargs, "max_length": numel, "min_length": numel})


class ShardedSeq2SeqTrainer(ZeroShardTrainer, Seq2SeqTrainer):
    zeroshard_options = {"stage": 3, "betas": (0.8, 0.95)}


class ReplicatedSeq2SeqTrainer(ZeroShardTrainer, Seq2SeqTrainer):
    zeroshard_options = {"stage": 2, "betas": (0.8, 0.95)}


@tried(
    "`Seq2SeqTrainer`, which takes no `optimizer_cls_and_kwargs`: options by `zeroshard_options`; "
    "`predict_with_generate` with texts of different lengths on each rank",
    stages="2, 3",
)
def test_generated_evaluations_are_those_of_ddp():
    def made(kind, folder):
        torch.manual_seed(0)
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4}
        special = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
        arguments = Seq2SeqTrainingArguments(
            str(folder),
            use_cpu=True,
            per_device_train_batch_size=2,
            per_device_eval_batch_size=2,
            max_steps=4,
            learning_rate=1e-2,
            max_grad_norm=0.0,
            adam_beta1=0.8,
            adam_beta2=0.95,
            eval_strategy="steps",
            eval_steps=2,
            logging_steps=1,
            predict_with_generate=True,
            generation_max_length=14,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            log_level="error",
        )
        if kind is not Seq2SeqTrainer:
            arguments.adam_beta1 = 0.7  # the class says otherwise
        made = kind(
            T5OfUnevenTexts(T5Config(vocab_size=256, **sizes, **special)),
            arguments,
            train_dataset=Pieces(),
            eval_dataset=Pieces(),
            compute_metrics=lambda found: {"texts": found.predictions.tolist()},
        )
        made.pop_callback("PrinterCallback")
        made.train()
        return made

    def body(folder):
        reference = made(Seq2SeqTrainer, folder)
        expected, _ = logs_of(reference)
        (texts, *_) = [entry["eval_texts"] for entry in expected if "eval_texts" in entry]
        assert {len(bytes(text).rstrip(b"\0")) for text in texts} == {8, 12}
        for kind in (ReplicatedSeq2SeqTrainer, ShardedSeq2SeqTrainer):
            trained = made(kind, folder)
            is_sharded = trained.optimizer.optimizer.engine.shards_parameters
            assert is_sharded == (kind.zeroshard_options["stage"] == 3)
            assert logs_of(trained)[0] == expected, kind.__name__
            for synced in (False, True):  # synced: by as many forwards, without whole weights
                got = trained.predict(Pieces(), synced_gpus=synced).predictions
                assert (got == reference.predict(Pieces()).predictions).all()
                assert trained.model.was_whole == (not (is_sharded and synced))
            with pytest.raises(ConfigError, match="zeroshard_options have no effect"):
                kind(
                    trained.model,
                    trained.args,
                    eval_dataset=Pieces(),
                    optimizers=(trained.optimizer, None),
                )

    on_two_ranks(body)


@tried("a second Trainer that trains the same model on; a plain one that evaluates it", stages="3")
def test_another_trainer_goes_on_with_the_same_model():
    def body(folder):
        def in_two_phases(way, other):
            first = trained_as(way, folder)
            evaluates = Trainer(first.model, first.args, eval_dataset=Text(4))
            evaluates.pop_callback("PrinterCallback")
            found = [evaluates.evaluate()["eval_loss"]]
            del evaluates
            first.train()  # the evaluation has not disturbed it
            found.append(logs_of(first)[0])
            model = first.model
            if way is PLAIN:
                # Accelerate marked the one that was evaluated, and would not wrap it in DDP again.
                model = llama()
                model.load_state_dict(first.model.state_dict())
            second = trained_as(other, folder, model=model, learning_rate=1e-3)
            return [*found, logs_of(second)[0]], weights(second.model)

        expected, trained = in_two_phases(PLAIN, PLAIN)
        for way, other in [
            ((Trainer, 3), (Trainer, 3)),
            ((ZeroShardTrainer, 3), (ZeroShardTrainer, 2)),
            ((Trainer, 2), (ZeroShardTrainer, 3)),
        ]:
            found, got = in_two_phases(way, other)
            what = f"{label(way)}, then {label(other)}"
            assert found == expected, what
            assert_same(got, trained, what)

    on_two_ranks(body)


class HalvesRates(TrainerCallback):
    """Gives the optimizer new groups, as callbacks that schedule single layers do."""

    def on_step_begin(self, arguments, state, control, optimizer=None, **more):
        groups = optimizer.param_groups
        optimizer.param_groups = [{**group, "lr": group["lr"] / 2} for group in groups]


@tried("a callback that assigns `optimizer.param_groups`", stages="1, 2, 3")
def test_a_callback_assigns_param_groups():
    def body(folder):
        plain = trained_as(PLAIN, folder, callbacks=[HalvesRates()])
        other = trained_as(PLAIN, folder)
        assert weights(plain.model)["lm_head.weight"].ne(other.model.lm_head.weight).any()
        for way in WAYS:
            made = trained_as(way, folder, callbacks=[HalvesRates()])
            assert logs_of(made)[0] == logs_of(plain)[0], label(way)
            assert_same(weights(made.model), weights(plain.model), label(way))

    on_two_ranks(body)


# --- losses that read weights


class PenalisesNorms(Trainer):
    """A loss that reads weights outside of their modules."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        norms = [weight for name, weight in model.named_parameters() if "norm" in name]
        loss = outputs.loss + 1e-3 * sum(weight.pow(2).sum() for weight in norms)
        return (loss, outputs) if return_outputs else loss


class ShardedPenalisesNorms(ZeroShardTrainer, PenalisesNorms):
    pass


class GathersNorms(ZeroShardTrainer, PenalisesNorms):
    def training_step(self, model, *args, **kwargs):
        with zeroshard.gather(model):
            return super().training_step(model, *args, **kwargs)


@tried(
    "a loss that reads weights outside of their modules, with `zeroshard.gather` around "
    "`training_step`",
    stages="1, 2, 3",
)
def test_a_loss_reads_weights_that_are_gathered():
    def body(folder):
        plain = trained_as((PenalisesNorms, None), folder)
        for way in [(PenalisesNorms, 1), (PenalisesNorms, 2), (GathersNorms, 3)]:
            made = trained_as(way, folder)
            assert logs_of(made)[0] == logs_of(plain)[0], label(way)
            assert_same(weights(made.model), weights(plain.model), label(way))

    on_two_ranks(body)


@tried(
    "the same loss without it: every step is skipped, since placeholders read as NaN",
    stages="3",
    result="refused: `GradientError` says what to do, at the end or after 50 steps",
)
def test_a_training_that_trains_nothing_does_not_end_as_if_it_had():
    def body(folder):
        for kind in (PenalisesNorms, ShardedPenalisesNorms):
            made = trainer(kind, 3, folder)
            before = weights(made.model)
            with pytest.raises(GradientError, match=r"all 4 steps were skipped.*zeroshard\.gather"):
                made.train()
            assert_same(weights(made.model), before, "the weights")
        integration.STEPS_IN_VAIN = 2
        made = trainer(PenalisesNorms, 3, folder, max_steps=100)
        with pytest.raises(GradientError, match="all 2 steps were skipped"):
            made.train()

    on_two_ranks(body)


# --- files that are left over, or missing


@tried("`save_model` over older weights in another number of files", stages="3")
def test_older_weights_are_replaced_whole():
    def body(folder):
        small = functools.partial(integration.export_weights, max_file_nbytes=40_000)
        older = trained_as((ZeroShardTrainer, 2), folder)
        older.save_model()
        for first, second in [(small, small.func), (small.func, small)]:
            for number, export in enumerate((first, second)):
                integration.export_weights = export
                newer = trained_as((ZeroShardTrainer, 3), folder, max_steps=6 + number)
                newer.save_model()  # after which every rank may read
                read = LlamaForCausalLM.from_pretrained(folder)
                assert_same(weights(read), weights(newer.model), f"{first}, {number}")
                dist.barrier()
        # Where a file cannot be put in place, neither the old nor the new weights are read.
        newer = trained_as((ZeroShardTrainer, 3), folder)
        if dist.get_rank() == 0:
            in_the_way = folder / "model-00002-of-00004.safetensors"
            in_the_way.unlink()
            (in_the_way / "something").mkdir(parents=True)
        dist.barrier()
        with pytest.raises(ConfigError, match=r"save_model.*model-00002-of-00004"):
            newer.save_model()
        assert {file.name for file in folder.glob("model*") if file.is_file()} == {
            "model-00001-of-00004.safetensors"
        }
        with pytest.raises(OSError, match="no file named"):
            LlamaForCausalLM.from_pretrained(folder)

    on_two_ranks(body)


class DiesWhileItSaves(ZeroShardTrainer):
    def _save_optimizer_and_scheduler(self, output_dir):
        if self.state.global_step == 5:
            raise KeyboardInterrupt
        super()._save_optimizer_and_scheduler(output_dir)


@tried(
    "a checkpoint that was not written to its end, also over an older one, or that misses files",
    stages="1, 2, 3",
    result="refused: `ConfigError` names what is missing",
)
def test_a_checkpoint_that_is_not_whole_is_refused():
    def body(folder):
        for stage in (2, 3):
            way = (ZeroShardTrainer, stage)
            whole = folder / f"{stage}"
            trained_as(way, whole, **SAVING)

            def without(path, error, way=way, whole=whole):
                target = folder / f"{label(way)} without {path.replace('/', ' ')}"
                if dist.get_rank() == 0:
                    shutil.copytree(whole / "checkpoint-4", target / "checkpoint-4")
                    (gone,) = sorted((target / "checkpoint-4").glob(path))[:1]
                    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
                dist.barrier()
                made = trainer(*way, target, **SAVING)
                with pytest.raises(error[0], match=error[1]):
                    made.train(resume_from_checkpoint=True)

            for name in ("trainer_state.json", "scheduler.pt", "zeroshard_optimizer"):
                without(name, (ConfigError, f"checkpoint-4 has no {name}"))
            for name in (".metadata", "*.distcp"):
                without(f"zeroshard_optimizer/{name}", (ConfigError, "zeroshard_optimizer"))
            state = (FileNotFoundError, "checkpoint-4/trainer_state.json")
            without("trainer_state.json", state, way=(Trainer, stage))

            again = trainer(DiesWhileItSaves, stage, whole, **SAVING)
            with pytest.raises(KeyboardInterrupt):
                again.train(resume_from_checkpoint=str(whole / "checkpoint-2"))
            dist.barrier()
            last = trainer(*way, whole, **SAVING)
            with pytest.raises(ConfigError, match=r"checkpoint-5 has no trainer_state\.json"):
                last.train(resume_from_checkpoint=True)

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
