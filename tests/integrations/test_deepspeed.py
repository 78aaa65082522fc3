"""Checkpoints that DeepSpeed itself writes here, on CPUs, and training that goes on from them."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import atexit
import functools
import pathlib
import shutil
import tempfile

import deepspeed
import deepspeed.ops
import deepspeed.runtime.zero.muon.muon_optimizer  # takes a second: here, not in every rank
import pytest
import torch
import torch.distributed as dist
from consumers import Consumer, tried
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger, safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from models import assert_same, letter_batches, letters, loss_of, weights
from ranks import run
from torch import nn

import zeroshard
from zeroshard.checkpoint.deepspeed import is_deepspeed, open_deepspeed
from zeroshard.checkpoint.deepspeed_files import StandIn, load_file
from zeroshard.errors import CheckpointError

CONSUMER = Consumer(
    "DeepSpeed",
    "deepspeed",
    use="`zeroshard.load_checkpoint(path, model, optimizer)`, with the folder that "
    "`engine.save_checkpoint(path)` wrote. DeepSpeed need not be installed.",
)
# With it, collectives on a CPU would be compiled for minutes first.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
# It takes 16-bit floats for something that a CPU does not have.
get_accelerator().is_fp16_supported = lambda: True
logger.setLevel("ERROR")
FROZEN = ("layers.0.widen.weight", "layers.0.norm.bias")
STEPS = 3

ZERO = "zero_optimization"
CASES = {  # name: (ranks, config)
    "1 fp32": (2, {ZERO: {"stage": 1}}),
    "2 fp32": (3, {ZERO: {"stage": 2}}),
    "3 fp32": (3, {ZERO: {"stage": 3, "sub_group_size": 300}}),
    "1 bf16": (3, {ZERO: {"stage": 1}, "bf16": {"enabled": True}}),
    "2 bf16": (2, {ZERO: {"stage": 2}, "bf16": {"enabled": True}}),
    "3 bf16": (2, {ZERO: {"stage": 3, "sub_group_size": 300}, "bf16": {"enabled": True}}),
    "2 fp16": (2, {ZERO: {"stage": 2}, "fp16": {"enabled": True, "loss_scale": 8}}),
    "3 fp16": (2, {ZERO: {"stage": 3}, "fp16": {"enabled": True, "loss_scale": 8}}),
    "2 alone": (1, {ZERO: {"stage": 2}, "bf16": {"enabled": True}}),
    "3 alone": (1, {ZERO: {"stage": 3}, "bf16": {"enabled": True}}),
    "2 aligned": (
        2,
        {ZERO: {"stage": 2, "parameter_alignment": True}, "bf16": {"enabled": True}},
    ),
    "2 elastic": (2, {ZERO: {"stage": 2, "elastic_checkpoint": True}, "bf16": {"enabled": True}}),
    "1 with fp32 gradients": (
        3,
        {
            ZERO: {"stage": 1},
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": "fp32"},
        },
    ),
}


def model_of(seed=0):
    """Tied, frozen, buffers; DeepSpeed cannot train tensors without dimensions."""
    model = letters(seed)
    model.gain = nn.Parameter(torch.tensor([0.5]))
    model.register_buffer("places", torch.arange(5))
    model.layers[0].register_buffer("passing", torch.ones(2), persistent=False)
    for name in FROZEN:
        model.get_parameter(name).requires_grad_(False)
    return model


def groups_of(model):
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": 0.1, "lr": 8e-3},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0, "betas": (0.8, 0.99)},
    ]


def engine_of(model, config, **options):
    options = {"lr": 1e-2, "fused": True, **options}
    optimizer = torch.optim.AdamW(groups_of(model), **options)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,
            **config,
        },
    )
    return engine


def steps_of(engine, batches):
    losses = []
    for batch in batches:
        loss = loss_of(engine, batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def held_by(engine):
    """Masters and moments of every trained parameter, gathered by DeepSpeed's own functions."""
    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
        # It links the states of all groups when the first one's are made, before the others' are.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    held = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            held[f"{name}.master"] = safe_get_full_fp32_param(parameter).clone()
            for key in ("exp_avg", "exp_avg_sq"):
                held[f"{name}.{key}"] = safe_get_full_optimizer_state(parameter, key).clone()
    return held


def train_and_save(folder, config, client_state=None, **options):
    """On one rank, train with DeepSpeed and save; the engine, and the batches that are left."""
    engine = engine_of(model_of(), config, **options)
    batches = letter_batches(dist.get_rank())
    steps_of(engine, batches[:STEPS])
    engine.save_checkpoint(str(folder), client_state=client_state or {})
    return engine, batches[STEPS:]


@functools.cache
def written(case):
    """A folder that DeepSpeed saved, with masters and moments, and weights if they are whole."""
    world_size, config = CASES[case]
    folder = pathlib.Path(tempfile.mkdtemp(prefix="deepspeed-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)

    def body(rank, world_size):
        values = {"epoch": 3, "seen": torch.ones(2)}
        engine, _ = train_and_save(folder, config, client_state=values)
        whole = {} if config[ZERO]["stage"] == 3 else engine.module.state_dict()
        return held_by(engine), {name: tensor.clone() for name, tensor in whole.items()}

    return folder, *run(body, world_size)[0]


def read(source):
    """All state of a source as tensors."""
    return {
        f"{name}.{field}": stored.read()
        for name, fields in source.state.items()
        for field, stored in fields.items()
    }


def without_steps(state):
    return {name: value for name, value in state.items() if not name.endswith(".step")}


@tried(
    "masters, moments, step and options in checkpoints of ZeRO stages 1 to 3 in fp32, bf16 and "
    "fp16, written by 1, 2 and 3 ranks, are those that its engine held, bit for bit",
    stages="1, 2, 3",
)
@pytest.mark.parametrize("case", CASES)
def test_what_the_engine_held_is_read_from_its_files(case):
    folder, held, whole = written(case)
    assert is_deepspeed(folder)
    with open_deepspeed(folder) as source:
        state = read(source)
        assert_same(without_steps(state), held, case)
        assert {v.item() for name, v in state.items() if name.endswith(".step")} == {STEPS}
        assert source.step == STEPS
        assert source.extra["epoch"] == 3
        assert torch.equal(source.extra["seen"], torch.ones(2))
        found = {name: stored.read() for name, stored in source.weights.items()}
        if whole:
            assert_same(found, whole, f"{case}: weights")
        else:
            expected = {n.removesuffix(".master"): v for n, v in held.items() if "master" in n}
            trained = {name: value for name, value in found.items() if name in expected}
            assert_same(trained, expected, f"{case}: weights")
        assert source.weights["head.weight"] is source.weights["embed.weight"]
        assert torch.equal(found["places"], torch.arange(5))
        model = model_of()
        names = {p: name for name, p in model.named_parameters()}
        for group, ours in zip(source.groups, groups_of(model), strict=True):
            assert group["params"] == [names[p] for p in ours["params"]]
            if case == "2 elastic":
                assert group.keys() == {"params"}
                continue
            assert group["lr"] == ours.get("lr", 1e-2)
            assert tuple(group["betas"]) == ours.get("betas", (0.9, 0.999))
            assert (group["eps"], group["weight_decay"]) == (1e-8, ours["weight_decay"])


@tried(
    "the fp32 weights are those of its own `zero_to_fp32`, bit for bit, frozen, tied and buffers "
    "too",
    stages="1, 2, 3",
)
@pytest.mark.parametrize("case", [case for case in CASES if case != "1 with fp32 gradients"])
def test_weights_are_those_of_its_own_converter(case):
    folder, *_ = written(case)
    expected = get_fp32_state_dict_from_zero_checkpoint(str(folder))
    with open_deepspeed(folder) as source:
        found = {}
        for name, stored in source.weights.items():
            tied = [n for n in source.state if source.weights[n] is stored]
            tensor = (source.state[tied[0]]["master"] if tied else stored).read()
            found[name] = tensor.float() if tensor.is_floating_point() else tensor
    if case.startswith("1"):  # without frozen ones: they are in no file that it looks at
        found = {name: value for name, value in found.items() if name not in FROZEN}
    assert len(expected) == (16 if case.startswith("1") else 18)
    expected = {n: v.float() if v.is_floating_point() else v for n, v in expected.items()}
    assert_same(found, expected, case)


@tried("checkpoints saved with `round_robin_gradients` hold the same", stages="1, 2")
@pytest.mark.parametrize("stage", [1, 2])
def test_parameters_in_another_order_are_found(stage, tmp_path):
    def body(rank, world_size):
        for name, is_dealt in (("plain", False), ("dealt", True)):
            zero = {"stage": stage, "round_robin_gradients": is_dealt}
            # The fused update's last bits depend on where in a tensor an element is.
            config = {ZERO: zero, "bf16": {"enabled": True}}
            engine, _ = train_and_save(tmp_path / name, config, fused=False)
            if name == "plain":  # its own gathering functions do not know the other order
                held = held_by(engine)
        return held

    held = run(body)[0]
    with open_deepspeed(tmp_path / "plain") as plain, open_deepspeed(tmp_path / "dealt") as dealt:
        assert [g["params"] for g in plain.groups] != [g["params"] for g in dealt.groups]
        assert_same(without_steps(read(dealt)), held, "round robin")


@tried("the state of its learning-rate schedule is given back", stages="2, 3")
@pytest.mark.parametrize("case", ["2 bf16", "3 bf16"])
def test_the_schedule_is_read(case, tmp_path):
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 10}}
    config = {**CASES[case][1], "scheduler": schedule}

    def body(rank, world_size):
        train_and_save(tmp_path, config)

    run(body)
    with open_deepspeed(tmp_path) as source:
        assert source.scheduler == {"last_batch_iteration": STEPS - 1}
        assert 0 < source.groups[0]["lr"] < 1e-2


@tried("a checkpoint before the first step has masters and no moments", stages="2, 3")
@pytest.mark.parametrize("case", ["2 bf16", "3 bf16"])
def test_a_checkpoint_before_the_first_step(case, tmp_path):
    def body(rank, world_size):
        engine_of(model_of(), CASES[case][1]).save_checkpoint(str(tmp_path))

    run(body)
    with open_deepspeed(tmp_path) as source:
        assert source.step == 0
        assert {tuple(fields) for fields in source.state.values()} == {("master",)}
        start = dict(model_of().named_parameters())
        for name, fields in source.state.items():
            assert torch.equal(fields["master"].read(), start[name].detach().bfloat16().float())


@tried("parameters without elements, and models saved without frozen ones", stages="2, 3")
@pytest.mark.parametrize("stage", [2, 3])
def test_empty_parameters_and_frozen_ones_that_were_left_out(stage, tmp_path):
    def body(rank, world_size):
        model = model_of()
        model.empty = nn.Parameter(torch.zeros(0, 3))
        engine = engine_of(model, {ZERO: {"stage": stage}})
        if stage == 2:  # with one, its forward in stage 3 fails
            steps_of(engine, letter_batches(rank)[:1])
        engine.save_checkpoint(str(tmp_path / "all"))
        engine.save_checkpoint(str(tmp_path / "trained"), exclude_frozen_parameters=True)

    run(body)
    with open_deepspeed(tmp_path / "all") as source:
        assert source.weights["empty"].read().shape == (0, 3)
        assert "empty" not in source.state
        for name in FROZEN:
            assert torch.equal(source.weights[name].read(), model_of().get_parameter(name))
    with open_deepspeed(tmp_path / "trained") as source:
        assert not source.weights.keys() & set(FROZEN)
        assert "layers.2.norm.bias" in source.state


@tried(
    "its classes become objects that can do nothing; other optimizers, files of ranks that are "
    "missing or cut off, and old files beside new ones are refused by name",
    stages="1, 2, 3",
    result="refused: names the file",
)
@pytest.mark.parametrize("case", ["1 bf16", "3 bf16"])
def test_a_damaged_directory_names_the_file(case, tmp_path):
    shutil.copytree(written(case)[0], tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "global_step3"
    files = sorted(folder.iterdir())
    optimizer = next(file for file in files if file.name.endswith("optim_states.pt"))
    content = load_file(optimizer)["optimizer_state_dict"]
    assert type(content["zero_stage"]) is StandIn
    for file in files:
        kept = file.read_bytes()
        file.write_bytes(kept[: len(kept) // 2])
        with pytest.raises(CheckpointError, match=file.name):
            open_deepspeed(tmp_path)
        file.unlink()
        with pytest.raises(CheckpointError, match=f"expected {file.name}, which is missing"):
            open_deepspeed(tmp_path)
        file.write_bytes(kept)
    older = optimizer.name.replace("rank_0", "rank_7", 1)
    shutil.copy(optimizer, folder / older)
    with pytest.raises(CheckpointError, match=f"{older} is there: remove"):
        open_deepspeed(tmp_path)


@tried(
    "without ZeRO, and with AdamW's `amsgrad`",
    stages="1, 2, 3",
    result="refused: says what is read",
)
def test_what_is_not_read_is_refused(tmp_path):
    def body(rank, world_size):
        train_and_save(tmp_path / "0", {})
        train_and_save(tmp_path / "2", {ZERO: {"stage": 2}}, amsgrad=True)

    run(body)
    with pytest.raises(CheckpointError, match="was written without ZeRO"):
        open_deepspeed(tmp_path / "0")
    with pytest.raises(CheckpointError, match=r"another optimizer than AdamW.*max_exp_avg_sq"):
        open_deepspeed(tmp_path / "2")


def go_on(folder, rank, stage, precision):
    """Losses of our training from DeepSpeed's checkpoint on, on one rank."""
    model = model_of(seed=9).to(torch.bfloat16 if precision else torch.float32)
    optimizer = zeroshard.AdamW(
        groups_of(model),
        lr=0.5,
        model=model,
        stage=stage,
        precision=zeroshard.Precision(**precision),
    )
    assert zeroshard.load_checkpoint(folder, model, optimizer)["step"] == STEPS
    losses = []
    for batch in letter_batches(rank)[STEPS:]:
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# In bfloat16 on one rank only: DeepSpeed adds up gradients of several in bfloat16.
@tried(
    "training goes on: the next three losses are DeepSpeed's, bit for bit, in fp32 on two ranks "
    "and in bf16 on one, with fp32 and with split masters",
    stages="1, 2, 3",
)
@pytest.mark.parametrize(
    ("case", "world_size", "stage", "precision"),
    [
        ("1 fp32", 2, 2, {}),
        ("2 fp32", 2, 3, {}),
        ("3 fp32", 2, 1, {}),
        ("2 alone", 1, 1, {"master": "fp32"}),
        ("3 alone", 1, 2, {"master": "split"}),
    ],
)
def test_training_goes_on(case, world_size, stage, precision, tmp_path):
    config = CASES[case][1]
    if config[ZERO]["stage"] == 3:  # else it rounds a linear layer's product before it adds a bias
        config = {**config, ZERO: {**config[ZERO], "memory_efficient_linear": False}}

    def reference(rank, world_size):
        return steps_of(*train_and_save(tmp_path, config))

    expected = run(reference, world_size)
    assert run(lambda rank, _: go_on(tmp_path, rank, stage, precision), world_size) == expected


@tried("what three ranks saved is loaded on two, bit for bit", stages="1, 3")
@pytest.mark.parametrize(("case", "stage"), [("2 fp32", 3), ("3 fp32", 1)])
def test_any_number_of_ranks_loads(case, stage):
    folder, held, _ = written(case)

    def body(rank, world_size):
        model = model_of(seed=9)
        optimizer = zeroshard.AdamW(groups_of(model), model=model, stage=stage)
        zeroshard.load_checkpoint(folder, model, optimizer)
        names = {p: name for name, p in model.named_parameters()}
        optimizer.consolidate_state_dict()
        trained = [names[p] for g in optimizer.param_groups for p in g["params"]]
        loaded = {f"{name}.master": value for name, value in weights(model).items()}
        state = optimizer.state_dict()["state"] if rank == 0 else {}
        for name, entry in zip(trained, state.values(), strict=False):
            assert entry["step"] == STEPS
            loaded |= {f"{name}.{key}": entry[key] for key in ("exp_avg", "exp_avg_sq")}
        return {key: value for key, value in loaded.items() if key in held}

    assert_same(run(body)[0], held, case)
