"""Accelerate: the same script with its own `Accelerator`, in DDP, and with ours, without DDP."""

import gc
import itertools
import os
import pydoc_data.topics
import shutil
import warnings
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration
from consumers import Consumer, tried
from models import assert_same, full_gradients, weights
from ranks import run
from safetensors.torch import load_file
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import zeroshard
import zeroshard.optimizer as facade
from zeroshard.integrations.accelerate import Accelerator
from zeroshard.transport import Counting, connect

CONSUMER = Consumer(
    "Accelerate",
    "accelerate",
    use="`from zeroshard.integrations.accelerate import Accelerator` in the place of Accelerate's; "
    "the rest of the script stays.",
)
STAGES = (1, 2, 3)
TEXT = torch.tensor(list("\n".join(pydoc_data.topics.topics.values()).encode()))
STEPS = 5
EPS = 1e-3
# torch adds up the squares of at most 2**13 elements in fp32, in 32 accumulators or more: 2**8
# roundings of 2**-24 each, which the root halves. Ours is rounded once.
NORM = 2**-17
wrapped = pytest.mark.filterwarnings("ignore:the model is wrapped in DistributedDataParallel")


def llama(**settings):
    """The same small model each time; its dropout makes random states matter."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=44,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        attention_dropout=0.1,
        **settings,
    )
    return LlamaForCausalLM(config)


def windows(count, length=16):
    """Pieces of English text as bytes."""
    return list(TEXT[: count * length].view(count, length))


def groups_of(model):
    """Decay for matrices only."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]


@dataclass
class Script:
    """What a training script has at hand."""

    accelerator: Any
    model: Any
    optimizer: Any
    loader: Any
    scheduler: Any

    def __iter__(self):
        return iter((self.accelerator, self.model, self.optimizer, self.loader, self.scheduler))

    @property
    def inner(self):
        return self.accelerator.unwrap_model(self.model)


def start(stage, kind, *, model=None, count=4 * STEPS, before=None, settings=None, **options):
    """A script up to its loop: stage 0 is torch's AdamW.

    Args:
        kind: the class of the accelerator.
        count: pieces of text.
        before: called with the accelerator before anything is prepared.
        settings: of the optimizer.
        options: of the accelerator.
    """
    # Accelerate keeps its state by process: a new script in the same one has to begin without.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    sampler = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = kind(cpu=True, dataloader_config=sampler, **options)
    if before is not None:
        before(accelerator)
    accelerate.utils.set_seed(17, device_specific=True)
    model = llama() if model is None else model
    settings = {"lr": 1e-2, "eps": EPS, **(settings or {})}
    if stage == 0:
        optimizer = torch.optim.AdamW(groups_of(model), fused=True, **settings)
    else:
        optimizer = zeroshard.AdamW(groups_of(model), model=model, stage=stage, **settings)
    # Accelerate's scheduler takes as many steps as there are processes.
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-2, total_steps=8 * STEPS)
    loader = DataLoader(windows(count), batch_size=2, shuffle=True)
    prepared = accelerator.prepare(model, optimizer, loader, scheduler)
    return Script(accelerator, *prepared)


def train(script, *, epoch=0, clip=None, norms=None, value=None, scale=None):
    """One epoch, in the words of any script; everything that it could log.

    Args:
        epoch: its number.
        clip: the largest norm.
        norms: what an earlier call logged: clip with those norms.
        value: the largest value of a gradient.
        scale: step -> factor of the loss.
    """
    accelerator, model, optimizer, loader, scheduler = script
    logged = {}
    loader.set_epoch(epoch)
    for step, batch in enumerate(loader):
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss if scale is None else loss * scale(step))
            if accelerator.sync_gradients:
                if clip is not None and norms is None:
                    norm = accelerator.clip_grad_norm_(model.parameters(), clip)
                    logged[f"norm {step}"] = norm.detach().clone()
                elif clip is not None:
                    norm = norms[f"norm {step}"]
                    own = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
                    assert norm.item() == pytest.approx(own.item(), rel=NORM)
                    torch.nn.utils.clip_grads_with_norm_(model.parameters(), clip, norm)
                    logged[f"norm {step}"] = norm
                if value is not None:
                    accelerator.clip_grad_value_(model.parameters(), value)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        logged[f"loss {step}"] = loss.detach()
        logged[f"lr {step}"] = torch.tensor(scheduler.get_last_lr())
    return logged


def results(script, logged):
    """What was logged, and the weights."""
    return {**logged, **weights(script.inner)}


def in_two_ranks(body, *arguments, timeout_s=120, **environment):
    run(lambda *_: body(*arguments), timeout_s=timeout_s, LOCAL_WORLD_SIZE=2, **environment)


def counted():
    """The transports of the optimizers built from here on in this rank, with what passed them."""
    made = []

    def counting(*args):
        made.append(Counting(connect(*args)))
        return made[-1]

    facade.connect = counting
    return made


# --- Accelerate's own Accelerator


@tried(
    "the script unchanged: `prepare(model, optimizer, loader, scheduler)` wraps the model in DDP; "
    "losses, learning rates, norms, clipping and weights are those of torch's AdamW, bit for bit; "
    "gradients are not sent a second time, and zeroshard warns once that they are not sharded",
    stages="1, 2",
)
@pytest.mark.parametrize("steps", [1, 2])
def test_a_script_runs_unchanged_in_ddp(steps):
    def body():
        options = {"kind": accelerate.Accelerator, "gradient_accumulation_steps": steps}
        script = start(0, **options)
        expected = results(script, train(script, clip=0.5, value=0.01))
        assert isinstance(script.model, DistributedDataParallel)
        transports = counted()
        for stage in (1, 2):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                script = start(stage, **options)
                calls = transports[-1].calls
                calls.clear()
                logged = train(script, clip=0.5, value=0.01)
            assert isinstance(script.model, DistributedDataParallel)
            assert calls["reduce"] == 0
            assert calls["gather"] == -(-STEPS // steps), calls
            told = [w for w in caught if "DistributedDataParallel" in str(w.message)]
            assert len(told) == 1, [str(w.message) for w in caught]
            assert_same(results(script, logged), expected, f"stage {stage}")

    in_two_ranks(body)


@wrapped
@tried(
    "`prepare` passes the optimizer's state dict to and fro: nothing is cast, copied elsewhere or "
    "changed, of a bf16 model with fp32 moments and masters",
    stages="1, 2, 3",
)
def test_prepare_changes_no_bit_of_the_state():
    def state_of(optimizer):
        found = {}
        for number, entry in enumerate(optimizer.state.values()):
            for name, value in entry.items():
                local = value.to_local() if isinstance(value, zeroshard.ShardTensor) else value
                found[f"{number} {name}"] = local
        return found

    def body():
        for master in ("split", "fp32"):
            for stage in STAGES:
                AcceleratorState._reset_state(reset_partial_state=True)
                accelerator = Accelerator(cpu=True)
                model = llama().bfloat16()
                precision = zeroshard.Precision(master=master)
                optimizer = zeroshard.AdamW(model, lr=1e-2, stage=stage, precision=precision)
                for batch in torch.stack(windows(6)).view(3, 2, 16):
                    model(input_ids=batch, labels=batch).loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                held = state_of(optimizer)
                assert {t.dtype for n, t in held.items() if "exp_avg" in n} == {torch.float32}
                assert any("remainder" in n or "master" in n for n in held)
                before = {name: value.clone() for name, value in held.items()}
                places = {name: value.data_ptr() for name, value in held.items()}
                model_before = weights(model)
                prepared = accelerator.prepare(optimizer)
                after = state_of(prepared)
                assert_same(after, before, f"stage {stage}, {master}")
                assert {name: value.data_ptr() for name, value in after.items()} == places
                assert_same(weights(model), model_before, "weights")

    in_two_ranks(body)


# --- ours


@tried(
    "no DDP around the model; losses, learning rates and weights are those of DDP with torch's "
    "AdamW, bit for bit; every gradient is sent once a step, and none inside of `accumulate`",
    stages="1, 2, 3",
)
@pytest.mark.parametrize("steps", [1, 2])
def test_without_ddp_training_is_bitwise_the_same(steps):
    def body():
        options = {"gradient_accumulation_steps": steps}
        script = start(0, accelerate.Accelerator, **options)
        expected = results(script, train(script, value=0.01))
        transports = counted()
        for stage in STAGES:
            script = start(stage, Accelerator, **options)
            calls = transports[-1].calls
            calls.clear()
            logged = train(script, value=0.01)
            assert script.model is script.inner
            arenas = len(script.optimizer.optimizer.engine.arenas)
            assert calls["reduce"] == arenas * -(-STEPS // steps), calls
            assert_same(results(script, logged), expected, f"stage {stage}")

    in_two_ranks(body)


@tried(
    "`clip_grad_norm_` returns and clips by the norm of the whole gradient, the same in every "
    "stage, and DDP's norm up to the rounding of its fp32 sum",
    stages="1, 2, 3",
)
def test_clipping_without_ddp_is_by_the_global_norm():
    def body():
        logs = []
        for stage in STAGES:
            script = start(stage, Accelerator)
            logs.append(results(script, train(script, clip=0.5)))
            assert_same(logs[-1], logs[0], f"stage {stage}")
        assert all(logs[0][f"norm {step}"] > 0.5 for step in range(STEPS))
        # Clipped by our norms, DDP comes to the same bits.
        script = start(0, accelerate.Accelerator)
        expected = results(script, train(script, clip=0.5, norms=logs[0]))
        assert_same(logs[0], expected, "DDP, clipped by the same norms")

    in_two_ranks(body)


@tried(
    "`accelerator.no_sync(model)`: backwards inside send nothing, and the next one outside "
    "averages the sum",
    stages="1, 2, 3",
)
def test_no_sync_keeps_backwards_local():
    def body():
        transports = counted()

        def gradients(stage, kind):
            script = start(stage, kind)
            accelerator, model, *_ = script
            batches = list(script.loader)
            calls = transports[-1].calls if stage else None
            with accelerator.no_sync(model):
                accelerator.backward(model(input_ids=batches[0], labels=batches[0]).loss)
            if stage:
                assert calls["reduce"] == 0
            accelerator.backward(model(input_ids=batches[1], labels=batches[1]).loss)
            if stage:
                assert calls["reduce"] > 0
            return full_gradients(script.inner)

        expected = gradients(0, accelerate.Accelerator)
        for stage in STAGES:
            assert_same(gradients(stage, Accelerator), expected, f"stage {stage}")

    in_two_ranks(body)


@tried(
    '`mixed_precision="bf16"`: losses and weights are those of DDP with AdamW, bit for bit',
    stages="1, 2, 3",
)
@pytest.mark.filterwarnings("ignore:.*autocast")
def test_bf16_autocast_is_bitwise_ddps():
    def body():
        options = {"mixed_precision": "bf16"}
        script = start(0, accelerate.Accelerator, **options)
        expected = results(script, train(script))
        plain = start(0, accelerate.Accelerator)
        assert not torch.equal(train(plain)["loss 0"], expected["loss 0"])
        for stage in STAGES:
            script = start(stage, Accelerator, **options)
            assert_same(results(script, train(script)), expected, f"stage {stage}")

    in_two_ranks(body)


@tried(
    '`mixed_precision="fp16"` with its GradScaler: an Inf in one element on one rank skips the '
    "step and the scheduler on every rank; losses, scales and weights are DDP's, bit for bit",
    stages="1, 2, 3",
)
@pytest.mark.filterwarnings("ignore:.*autocast")
def test_a_grad_scaler_skips_on_every_rank():
    def use_scaler(accelerator):
        # On a CPU Accelerate makes none; these two lines are what it does on a GPU.
        accelerator.native_amp = True
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)

    def body():
        rank = torch.distributed.get_rank()

        def log(stage, kind):
            model = llama()
            # The first element of the parameter belongs to one rank's slice only.
            poison = torch.zeros(model.lm_head.weight.shape)
            steps = iter(range(STEPS))

            def spoil(grad):
                poison[0, 0] = float("inf") if rank == 1 and next(steps) == 2 else 0
                return grad + poison

            model.lm_head.weight.register_hook(spoil)
            script = start(stage, kind, model=model, mixed_precision="fp16", before=use_scaler)
            # torch's fused step skips inside of its kernel, which Accelerate does not see, and goes
            # on with the schedule. Ours is skipped as torch's other implementations are.
            if stage == 0:
                script.optimizer.optimizer._step_supports_amp_scaling = False
            skipped = []
            inner_step = script.scheduler.step

            def step():
                skipped.append(script.accelerator.optimizer_step_was_skipped)
                inner_step()

            script.scheduler.step = step
            logged = train(script, clip=1e6)
            assert skipped == [False, False, True, False, False]
            assert torch.equal(logged["lr 1"], logged["lr 2"])
            norms = [logged.pop(f"norm {step}") for step in range(STEPS)]
            assert [bool(norm.isfinite()) for norm in norms] == [not s for s in skipped]
            logged["scale"] = torch.tensor(script.accelerator.scaler.get_scale())
            return results(script, logged)

        expected = log(0, accelerate.Accelerator)
        for stage in STAGES:
            assert_same(log(stage, Accelerator), expected, f"stage {stage}")

    in_two_ranks(body)


# --- saving


@tried(
    "`save_state` and `load_state`: training continues bit for bit, also in another stage; a bf16 "
    "model keeps its masters",
    stages="1, 2, 3",
)
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    def body():
        for written, read, dtype in (
            (1, 2, torch.bfloat16),
            (2, 3, torch.float32),
            (3, 1, torch.bfloat16),
            (3, 3, torch.bfloat16),
        ):
            what = f"stage {written}, then {read}, {dtype}"
            folder = tmp_path / what
            script = start(written, Accelerator, model=llama().to(dtype))
            train(script)
            script.accelerator.save_state(folder)
            expected = results(script, train(script, epoch=1))
            script = start(read, Accelerator, model=llama().to(dtype))
            train(script, epoch=2)  # what load_state must undo
            script.accelerator.load_state(folder)
            assert_same(results(script, train(script, epoch=1)), expected, what)

    in_two_ranks(body)


@tried("a checkpoint of two processes is loaded by one", stages="2, 3")
def test_a_checkpoint_loads_at_another_number_of_processes(tmp_path):
    def write():
        found = {}
        for stage in (2, 3):
            script = start(stage, Accelerator)
            train(script)
            script.accelerator.save_state(tmp_path / str(stage))
            script.optimizer.optimizer.consolidate_state_dict()
            found[stage] = weights(script.inner), script.optimizer.state_dict()
        return found

    def read(rank, world_size):
        for stage, (model, optimizer) in written.items():
            script = start(stage, Accelerator)
            script.accelerator.load_state(tmp_path / str(stage))
            assert_same(weights(script.inner), model, f"stage {stage}")
            script.optimizer.optimizer.consolidate_state_dict()
            state = script.optimizer.state_dict()
            for key, entry in optimizer["state"].items():
                assert_same(state["state"][key], entry, f"stage {stage}, parameter {key}")
            lrs = [group["lr"] for group in state["param_groups"]]
            assert lrs == [group["lr"] for group in optimizer["param_groups"]]

    written = run(lambda *_: write(), timeout_s=120, LOCAL_WORLD_SIZE=2)[0]
    run(read, 1, timeout_s=120, LOCAL_WORLD_SIZE=1)


@tried(
    "hooks of `register_save_state_pre_hook` that save a model themselves still do",
    stages="2, 3",
)
def test_hooks_of_the_user_are_respected(tmp_path):
    seen = []

    def save(models, states, folder):
        seen.append((len(models), len(states), str(folder)))
        states.clear()

    def body():
        for stage in (2, 3):
            folder = tmp_path / str(stage)
            script = start(stage, Accelerator)
            script.accelerator.register_save_state_pre_hook(save)
            train(script)
            script.accelerator.save_state(folder)
            models, states, written_to = seen.pop()
            assert (models, states) == (1, 1)
            assert Path(written_to).parent == folder.parent, "it moves when it is complete"
            files = {path.name for path in folder.iterdir()}
            assert "zeroshard_optimizer_0" in files, files
            assert not [name for name in files if "model" in name], files

    in_two_ranks(body)


@wrapped
@tried(
    "`save_model`, `get_state_dict` and `unwrap_model` give the complete weights; under stage 3 "
    "every process calls them",
    stages="1, 2, 3",
)
def test_saved_models_are_complete(tmp_path):
    def body():
        transports = counted()
        for stage, tied in itertools.product(STAGES, (False, True)):
            folder = tmp_path / f"{stage}, {tied}"
            script = start(stage, Accelerator, model=llama(tie_word_embeddings=tied))
            accelerator = script.accelerator
            train(script)
            expected = weights(script.inner)
            transports[-1].calls.clear()
            state = accelerator.get_state_dict(script.model)
            each_once = len(list(script.inner.parameters())) if stage == 3 else 0
            assert transports[-1].calls["full_tensor"] == each_once
            if state and tied:
                assert state["lm_head.weight"].data_ptr() == (
                    state["model.embed_tokens.weight"].data_ptr()
                )
            accelerator.save_model(script.model, folder)
            accelerator.wait_for_everyone()
            if tied:
                expected["lm_head.weight"] = expected["model.embed_tokens.weight"]
            if accelerator.is_main_process or stage < 3:
                assert_same(state, expected, f"stage {stage}, get_state_dict")
            else:
                assert state == {}
            fresh = LlamaForCausalLM(script.inner.config)
            accelerate.load_checkpoint_in_model(fresh, folder)
            fresh.tie_weights()
            assert_same(weights(fresh), weights(script.inner), f"stage {stage}, save_model")
            assert "model.embed_tokens.weight" in load_file(folder / "model.safetensors")

    in_two_ranks(body)


@tried(
    "`load_state` continues a run of torch's AdamW in DDP, bit for bit",
    stages="1, 2, 3",
)
def test_a_run_of_torch_is_continued(tmp_path):
    def body():
        script = start(0, accelerate.Accelerator)
        train(script)
        script.accelerator.save_state(tmp_path)
        expected = results(script, train(script, epoch=1))
        for stage in STAGES:
            script = start(stage, Accelerator)
            script.accelerator.load_state(tmp_path)
            assert_same(results(script, train(script, epoch=1)), expected, f"stage {stage}")

    in_two_ranks(body)


@wrapped
@tried(
    "Accelerate's own `Accelerator`, in DDP: `save_state` and `load_state` continue bit for bit, "
    "after `optimizer.optimizer.consolidate_state_dict()` on every process; other than with ours, "
    "the main process holds the whole state",
    stages="1, 2",
)
def test_a_consolidated_state_survives_accelerates_own_checkpoint(tmp_path):
    def body():
        for stage in (1, 2):
            folder = tmp_path / str(stage)
            script = start(stage, accelerate.Accelerator)
            train(script)
            script.optimizer.optimizer.consolidate_state_dict()
            script.accelerator.save_state(folder)
            expected = results(script, train(script, epoch=1))
            for kind in (accelerate.Accelerator, Accelerator):
                script = start(stage, kind)
                train(script, epoch=2)
                script.accelerator.load_state(folder)
                assert_same(results(script, train(script, epoch=1)), expected, f"stage {stage}")

    in_two_ranks(body)


@wrapped
@tried(
    "Accelerate's own `save_state` without `consolidate_state_dict()`: holds the main process's "
    "slices only",
    stages="1, 2",
    result="refused: by `load_state`, on every process but the main one, whose slices they are",
)
def test_a_checkpoint_that_misses_slices_is_refused(tmp_path):
    def body():
        script = start(2, accelerate.Accelerator)
        train(script)
        script.accelerator.save_state(tmp_path)
        script.accelerator.wait_for_everyone()
        before = weights(script.inner)
        if script.accelerator.is_main_process:
            script.accelerator.load_state(tmp_path)
        else:
            with pytest.raises(zeroshard.errors.ConfigError, match="consolidate_state_dict"):
                script.accelerator.load_state(tmp_path)
        assert_same(weights(script.inner), before, "weights")

    in_two_ranks(body)


@tried("`register_for_checkpointing(zeroshard.EMA(...))`: averages are resumed", stages="2, 3")
def test_averages_are_resumed(tmp_path):
    def body():
        for stage in (2, 3):
            script = start(stage, Accelerator)
            ema = zeroshard.EMA(script.optimizer.optimizer, decay=0.8)
            script.accelerator.register_for_checkpointing(ema)
            train(script)
            script.accelerator.save_state(tmp_path / str(stage))
            with ema.swap():
                expected = weights(script.inner)
            train(script)
            script.accelerator.load_state(tmp_path / str(stage))
            with ema.swap():
                assert_same(weights(script.inner), expected, f"stage {stage}")

    in_two_ranks(body)


@tried(
    "two models under one optimizer, beside a model in DDP under torch's AdamW: saved and resumed",
    stages="1, 2, 3",
)
def test_several_models_are_saved_together(tmp_path):
    def resume(stage):
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(cpu=True)
        x = torch.linspace(-1, 1, 24).view(4, 6) * (1 + accelerator.process_index)
        torch.manual_seed(0)
        first, other, last = (torch.nn.Linear(6, 6) for _ in range(3))
        plain = torch.optim.AdamW(other.parameters(), lr=1e-2)
        optimizer = zeroshard.AdamW(torch.nn.ModuleList([first, last]), lr=1e-2, stage=stage)
        prepared = accelerator.prepare(first, other, last, plain, optimizer)
        first, other, last, *optimizers = prepared
        assert isinstance(other, DistributedDataParallel)

        def step():
            accelerator.backward(last(other(first(x))).square().mean())
            for each in optimizers:
                each.step()
                each.zero_grad()
            return weights(torch.nn.ModuleList([first, other.module, last]))

        step()
        accelerator.save_state(tmp_path / str(stage))
        expected = step()
        step()
        accelerator.load_state(tmp_path / str(stage))
        assert_same(step(), expected, f"stage {stage}")

    in_two_ranks(lambda: [resume(stage) for stage in STAGES])


class Breaks:
    """An object of the user's that is saved after models and optimizers; breaks when told."""

    def __init__(self):
        self.how = lambda: None

    def state_dict(self):
        self.how()
        return {}

    def load_state_dict(self, state):
        pass


@tried(
    "`save_state` over an earlier checkpoint, and the main process fails or is killed half way: "
    "the earlier one stays, and loads",
    stages="2, 3",
)
def test_a_save_that_breaks_off_leaves_the_earlier_checkpoint(tmp_path):
    def fail():
        raise OSError("the disk is full")

    def script_of(stage):
        breaks = Breaks()
        script = start(stage, Accelerator)
        script.accelerator.register_for_checkpointing(breaks)
        return script, breaks

    def save(stage, how):
        folder = tmp_path / str(stage)
        script, breaks = script_of(stage)
        train(script)
        script.accelerator.save_state(folder)
        (folder / "notes.txt").write_text("of the user's")
        expected = results(script, train(script, epoch=1))
        script.accelerator.wait_for_everyone()
        if script.accelerator.is_main_process:
            breaks.how = how
        if how is fail:
            with pytest.raises(zeroshard.errors.ConfigError, match="rank 0: the disk is full"):
                script.accelerator.save_state(folder)
            load(stage, expected)
            script.accelerator.wait_for_everyone()
            script, _ = script_of(stage)
            expected = results(script, train(script))
            script.accelerator.save_state(folder)
            script.accelerator.wait_for_everyone()
            assert (folder / "notes.txt").exists()
            assert {path.name for path in tmp_path.iterdir()} <= {"2", "3"}
            script, _ = script_of(stage)
            script.accelerator.load_state(folder)
            assert_same(weights(script.inner), {k: expected[k] for k in weights(script.inner)}, "")
        else:
            torch.save(expected, tmp_path / f"expected-{torch.distributed.get_rank()}")
            script.accelerator.wait_for_everyone()
            script.accelerator.save_state(folder)

    def load(stage, expected=None):
        if expected is None:
            expected = torch.load(tmp_path / f"expected-{torch.distributed.get_rank()}")
        script, _ = script_of(stage)
        script.accelerator.load_state(tmp_path / str(stage))
        assert_same(results(script, train(script, epoch=1)), expected, f"stage {stage}")

    in_two_ranks(lambda: [save(stage, fail) for stage in (2, 3)])
    for stage in (2, 3):
        with pytest.raises(AssertionError, match="rank 0 died with exit code 3"):
            in_two_ranks(save, stage, lambda: os._exit(3))
        in_two_ranks(load, stage)


@tried(
    "`load_state` of another architecture, of a checkpoint that misses a folder, or of models in "
    "another order; `save_state` of an optimizer whose model was not prepared; `save_on_each_node`",
    stages="2, 3",
    result="refused, on every process: the error says what does not fit; nothing has changed",
)
def test_what_does_not_fit_is_refused_before_anything_changes(tmp_path):
    def refused(script, folder, message):
        before = weights(script.inner)
        with pytest.raises(zeroshard.errors.ConfigError, match=message):
            script.accelerator.load_state(folder)
        assert_same(weights(script.inner), before, message)
        script.accelerator.wait_for_everyone()

    def two_models(stage, prepared):
        AcceleratorState._reset_state(reset_partial_state=True)
        models = torch.nn.Linear(6, 6), torch.nn.Sequential(torch.nn.Linear(6, 6))
        optimizer = zeroshard.AdamW(torch.nn.ModuleList(models), stage=stage)
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(*[models[number] for number in prepared], optimizer)
        return Script(accelerator, torch.nn.ModuleList(models), optimizer, None, None)

    def body():
        for stage in (2, 3):
            folder = tmp_path / str(stage)
            script = start(stage, Accelerator)
            script.accelerator.save_state(folder)
            other = start(stage, Accelerator, model=llama(head_dim=8))
            refused(other, folder, r"q_proj.weight' must have shape \(16, 32\), and has \(32, 32\)")
            for gone in ("zeroshard_optimizer_0", "zeroshard_model_0"):
                script = start(stage, Accelerator)
                script.accelerator.save_state(folder)
                if script.accelerator.is_main_process:
                    shutil.rmtree(folder / gone)
                script.accelerator.wait_for_everyone()
                refused(script, folder, f"{folder} holds no {gone} that is complete")

            folder = tmp_path / f"two, {stage}"
            two_models(stage, (0, 1)).accelerator.save_state(folder)
            refused(two_models(stage, (1, 0)), folder, "'0.bias' is not in it.*in the same order")
            lacks = two_models(stage, (0,)).accelerator
            with pytest.raises(zeroshard.errors.ConfigError, match=r"to accelerator\.prepare too"):
                lacks.save_state(tmp_path / "lacks")
            each_node = ProjectConfiguration(save_on_each_node=True)
            script = start(stage, Accelerator, project_config=each_node)
            with pytest.raises(zeroshard.errors.ConfigError, match="save_on_each_node"):
                script.accelerator.save_state(tmp_path / "each")

    in_two_ranks(body)


# --- the rest of a script


@tried(
    "evaluation with `gather_for_metrics`, of a number of samples that does not divide",
    stages="1, 2, 3",
)
def test_evaluation_gathers_every_sample_once():
    def body():
        def predictions(stage, kind):
            script = start(stage, kind)
            train(script)
            loader = script.accelerator.prepare(DataLoader(windows(7), batch_size=2))
            script.model.eval()
            found = []
            with torch.no_grad():
                for batch in loader:
                    logits = script.model(input_ids=batch).logits
                    found.append(script.accelerator.gather_for_metrics(logits))
            return {"logits": torch.cat(found)}

        expected = predictions(0, accelerate.Accelerator)
        assert len(expected["logits"]) == 7
        for stage in STAGES:
            assert_same(predictions(stage, Accelerator), expected, f"stage {stage}")

    in_two_ranks(body)


@tried(
    "`free_memory` lets go of model and optimizer; another training may follow", stages="1, 2, 3"
)
def test_free_memory_lets_go_of_everything():
    def body():
        for stage in STAGES:
            script = start(stage, Accelerator)
            accelerator = script.accelerator
            logged = train(script)
            engine = weakref.ref(script.optimizer.optimizer.engine)
            parameter = weakref.ref(next(script.inner.parameters()))
            parts = script.model, script.optimizer, script.loader, script.scheduler
            script = None
            parts = accelerator.free_memory(*parts)
            assert parts == [None] * 4
            gc.collect()  # its own comes while the caller still holds them
            assert engine() is None
            assert parameter() is None
            again = start(stage, Accelerator)
            assert_same(train(again), logged, f"stage {stage}")

    in_two_ranks(body)


@tried(
    "Accelerate's own `Accelerator`, which puts the model in DDP",
    stages="3",
    result="refused: by `prepare`",
)
def test_ddp_is_refused_in_stage_3():
    def body():
        with pytest.raises(zeroshard.errors.ConfigError, match="DistributedDataParallel"):
            start(3, accelerate.Accelerator)

    in_two_ranks(body)


@tried(
    "a model that is not on `accelerator.device` when the optimizer is built",
    stages="1, 2, 3",
    result="refused: by `prepare`",
)
def test_a_model_on_another_device_is_refused():
    def body():
        for stage in STAGES:
            with pytest.raises(zeroshard.errors.ConfigError, match="before the optimizer is built"):
                start(stage, Accelerator)

    # The one way to tell Accelerate of another device than the one there is.
    in_two_ranks(body, ACCELERATE_TORCH_DEVICE="meta")
