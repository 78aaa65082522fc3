"""TRL's SFTTrainer: beside itself under DDP, on text and a tokenizer that are made here."""

import pathlib
import pydoc_data.topics
import shutil
import tempfile

import datasets
import peft
import pytest
import tokenizers
import torch
import torch.distributed as dist
import transformers
import trl
from consumers import Consumer, tried
from models import assert_same, weights
from ranks import run

from zeroshard.integrations.transformers import ZeroShardFactory, ZeroShardTrainer

CONSUMER = Consumer(
    "TRL",
    "trl",
    use="`class MyTrainer(ZeroShardTrainer, SFTTrainer): zeroshard_options = {'stage': 3}`, or "
    "`SFTTrainer(..., optimizer_cls_and_kwargs=(ZeroShardFactory, {'stage': 3}))`.",
)
LINES = [line for topic in pydoc_data.topics.topics.values() for line in topic.split("\n\n")][:80]
PLAIN = (trl.SFTTrainer, None)


class ShardedSFTTrainer(ZeroShardTrainer, trl.SFTTrainer):
    pass


class ReplicatedDPOTrainer(ZeroShardTrainer, trl.DPOTrainer):
    zeroshard_options = {"stage": 2}


class ShardedDPOTrainer(ZeroShardTrainer, trl.DPOTrainer):
    zeroshard_options = {"stage": 3}


WAYS = [(trl.SFTTrainer, 2), (trl.SFTTrainer, 3), (ShardedSFTTrainer, 1)]


def tokenizer():
    """A small tokenizer, trained on the text."""
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    bpe.decoder = tokenizers.decoders.ByteLevel()
    recipe = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=special)
    bpe.train_from_iterator(LINES, recipe)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )


def llama(vocabulary):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=44,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.LlamaForCausalLM(config)


def sft(way, folder, *, lora=False, **settings):
    kind, stage = way
    words = tokenizer()
    arguments = {
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 5,
        "max_length": 48,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.0,
        "save_strategy": "steps",
        "save_steps": 3,
        "report_to": "none",
        "disable_tqdm": True,
        "log_level": "error",
    }
    extra = {}
    if stage is not None:
        extra["optimizer_cls_and_kwargs"] = (ZeroShardFactory, {"stage": stage})
    if lora:
        extra["peft_config"] = peft.LoraConfig(
            r=3,
            target_modules=["q_proj", "down_proj"],
            modules_to_save=["lm_head"],  # whose weight TRL's loss reads by itself
            task_type="CAUSAL_LM",
        )
    torch.manual_seed(1)
    made = kind(
        llama(len(words)),
        args=trl.SFTConfig(str(folder), **{**arguments, **settings}),
        train_dataset=datasets.Dataset.from_dict({"text": LINES}),
        processing_class=words,
        **extra,
    )
    made.pop_callback(transformers.PrinterCallback)
    return made


def logs_of(trained):
    """What was logged, but for times; and the gradient norms apart."""
    history = [
        {key: value for key, value in entry.items() if "runtime" not in key and "per_s" not in key}
        for entry in trained.state.log_history
    ]
    return history, [entry.pop("grad_norm") for entry in history if "grad_norm" in entry]


def on_two_ranks(body):
    """Run `body(folder)` on two ranks, in a folder that both see."""

    def ready(rank, world_size):
        names = [tempfile.mkdtemp(prefix="trl-") if rank == 0 else None]
        dist.broadcast_object_list(names)
        try:
            body(pathlib.Path(names[0]))
            dist.barrier()
        finally:
            if rank == 0:
                shutil.rmtree(names[0], ignore_errors=True)

    # Accelerate starts no CPU ranks unless it is told that they are all on one machine.
    run(ready, 2, timeout_s=150, LOCAL_WORLD_SIZE=2)


@tried(
    "`SFTTrainer`: five steps as under DDP, bit for bit; resumed after the third; `save_model`",
    stages="1, 2, 3",
)
def test_supervised_fine_tuning_is_that_of_ddp():
    def body(folder):
        reference = sft(PLAIN, folder / "plain")
        reference.train()
        expected, norms = logs_of(reference)
        assert len(norms) == 5
        assert "mean_token_accuracy" in expected[0]
        for number, way in enumerate(WAYS):
            what = f"{way[0].__name__}, stage {way[1]}"
            made = sft(way, folder / f"{number}")
            made.train()
            got, got_norms = logs_of(made)
            assert got == expected, what
            # Norms are rounded a few times in either system, however they are summed.
            assert got_norms == pytest.approx(norms, rel=2**-20), what
            assert_same(weights(made.model), weights(reference.model), what)
            made.save_model(folder / f"saved {number}")
            again = sft(way, folder / f"again {number}")
            again.train(resume_from_checkpoint=str(folder / f"{number}" / "checkpoint-3"))
            assert_same(weights(again.model), weights(reference.model), f"{what}, resumed")
            dist.barrier()
            read = transformers.AutoModelForCausalLM.from_pretrained(folder / f"saved {number}")
            assert_same(weights(read), weights(reference.model), f"{what}, read")

    on_two_ranks(body)


@tried(
    "`SFTTrainer` with `peft_config`: LoRA and `modules_to_save` are trained and written whole",
    stages="2, 3",
)
def test_adapters_are_trained_and_written_whole():
    def body(folder):
        reference = sft(PLAIN, folder / "plain", lora=True)
        reference.train()
        expected, _ = logs_of(reference)
        for number, way in enumerate([(trl.SFTTrainer, 2), (ShardedSFTTrainer, 3)]):
            what = f"{way[0].__name__}, stage {way[1]}"
            made = sft(way, folder / f"{number}", lora=True)
            made.train()
            assert logs_of(made)[0] == expected, what
            assert_same(weights(made.model), weights(reference.model), what)
            made.save_model(folder / f"saved {number}")
            again = sft(way, folder / f"again {number}", lora=True)
            again.train(resume_from_checkpoint=str(folder / f"{number}" / "checkpoint-3"))
            assert_same(weights(again.model), weights(reference.model), f"{what}, resumed")
            dist.barrier()
            words = tokenizer()
            read = peft.PeftModel.from_pretrained(llama(len(words)), folder / f"saved {number}")
            assert_same(weights(read), weights(reference.model), f"{what}, read")

    on_two_ranks(body)


def dpo(kind, folder):
    words = tokenizer()
    rows = [
        {"prompt": first, "chosen": second, "rejected": second[::-1]}
        for first, second in zip(LINES[:16], LINES[16:32], strict=True)
    ]
    torch.manual_seed(1)
    made = kind(
        llama(len(words)),
        ref_model=llama(len(words)),
        args=trl.DPOConfig(
            str(folder),
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=2,
            max_steps=4,
            max_length=48,
            logging_steps=1,
            learning_rate=1e-2,
            max_grad_norm=0.0,
            save_strategy="steps",
            save_steps=2,
            report_to="none",
            disable_tqdm=True,
            log_level="error",
        ),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=words,
    )
    made.pop_callback(transformers.PrinterCallback)
    return made


@tried(
    "`DPOTrainer`, which takes no `optimizer_cls_and_kwargs`, with options by `zeroshard_options`: "
    "as under DDP, bit for bit; resumed in the middle",
    stages="2, 3",
)
def test_preferences_are_trained_as_under_ddp():
    def body(folder):
        reference = dpo(trl.DPOTrainer, folder / "plain")
        reference.train()
        expected, _ = logs_of(reference)
        assert "rewards/margins" in expected[0]
        for kind in (ReplicatedDPOTrainer, ShardedDPOTrainer):
            made = dpo(kind, folder / kind.__name__)
            made.train()
            assert logs_of(made)[0] == expected, kind.__name__
            assert_same(weights(made.model), weights(reference.model), kind.__name__)
            again = dpo(kind, folder / "again")
            again.train(resume_from_checkpoint=str(folder / kind.__name__ / "checkpoint-2"))
            assert_same(weights(again.model), weights(reference.model), "resumed")

    on_two_ranks(body)
