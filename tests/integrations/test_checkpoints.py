"""Checkpoints from FSDP2, DDP and plain training, and to them."""

import copy

import peft
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from consumers import Consumer, tried
from models import Letters, assert_close, assert_same, decay_groups, loss_of, weights
from ranks import run
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR

import zeroshard
from zeroshard.checkpoint.convert import convert

CONSUMER = Consumer(
    "Checkpoints of FSDP2, DDP and torch.save",
    "torch",
    use="`zeroshard.load_checkpoint(path, model, optimizer, scheduler)`; "
    "`zeroshard convert CHECKPOINT OUT --to dcp | torch` for the way back.",
)
ALL = "1, 2, 3"
STAGES = (1, 2, 3)
FLAT, WHOLE = {"flatten_optimizer_state_dict": True}, {"full_state_dict": True}
SYSTEMS = ("fsdp2", "ddp")
BEFORE, AFTER = range(3), range(3, 6)
# Where ranks add other parts of a batch, a mean of up to six terms is added in another order: at
# most 5 roundings of a gradient below 1, 3e-7. An update moves by lr * 2 / eps times those, 6e-7
# with lr and eps alike, and by its own rounding; three steps, and 3 for the feedback.
ADAMW = {"lr": 1e-2, "eps": 1e-2}
OTHER_ORDER = 1e-5
# By that much all weights move a loss at most 30 times as far, the 1-norm of its gradient.
LOSS_IN_OTHER_ORDER = 30 * OTHER_ORDER


class Scaled(Letters):
    """A next-letter model with tied weights, a buffer, and no 0-dim parameter: FSDP2 has none."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor([0.5]))
        self.register_buffer("prior", torch.linspace(-1, 1, self.head.out_features))

    def forward(self, letters):
        return super().forward(letters) + self.prior


def build_model(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    model = Scaled().to(dtype)
    model.prior.mul_(1 + seed)
    return model


def with_adapters(seed=0):
    """What was there is frozen."""
    model = build_model(seed)
    config = peft.LoraConfig(r=3, target_modules=["widen", "narrow"], init_lora_weights=False)
    return peft.get_peft_model(model, config)


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def batch_of(number, rank, world_size):
    """This rank's part of a global batch, whatever the number of ranks."""
    generator = torch.Generator().manual_seed(1000 + number)
    return torch.randint(31, (6, 8), generator=generator).chunk(world_size)[rank]


def go(forward, optimizer, scheduler, rank, world_size, numbers):
    """Some steps, and the global loss of each."""
    losses = {}
    for number in numbers:
        loss = loss_of(forward, batch_of(number, rank, world_size))
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(mean)
        losses[f"loss {number}"] = mean / world_size
    return losses


class Theirs:
    """A model under FSDP2, DDP or nothing, with torch's AdamW."""

    def __init__(self, system, model=None, groups=decay_groups, policy=None, lr=1e-2):
        self.model = self.forward = build_model(seed=9) if model is None else model
        if system == "fsdp2":
            options = {} if policy is None else {"mp_policy": policy}
            inner = next(m for m in self.model.modules() if isinstance(m, Letters))
            for layer in inner.layers:
                fully_shard(layer, **options)
            fully_shard(self.model, **options)
        elif system == "ddp":
            self.forward = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(groups(self.model), fused=True, **{**ADAMW, "lr": lr})
        self.scheduler = CosineAnnealingLR(self.optimizer, T_max=9)

    def go(self, rank, world_size, numbers):
        return go(self.forward, self.optimizer, self.scheduler, rank, world_size, numbers)

    def weights(self):
        options = StateDictOptions(full_state_dict=True)
        return {k: v.clone() for k, v in get_model_state_dict(self.model, options=options).items()}

    def load_dcp(self, path, scheduler=None):
        """As their own checkpoints are loaded; `scheduler` is like what is in it."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        states = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        dcp.load(states, checkpoint_id=path)
        parts = {"model_state_dict": states["model"], "optim_state_dict": states["optimizer"]}
        set_state_dict(self.model, self.optimizer, **parts)
        scheduler = states["scheduler"]
        self.scheduler.load_state_dict(scheduler[0] if type(scheduler) is tuple else scheduler)


class Ours:
    """A model under zeroshard, which has trained something that is to be forgotten."""

    def __init__(self, stage, model=None, groups=decay_groups, **options):
        self.model = build_model(seed=9) if model is None else model
        self.optimizer = zeroshard.AdamW(
            groups(self.model), model=self.model, stage=stage, **ADAMW, **options
        )
        self.scheduler = CosineAnnealingLR(self.optimizer, T_max=9)

    def go(self, rank, world_size, numbers):
        return go(self.model, self.optimizer, self.scheduler, rank, world_size, numbers)

    def load(self, path, **more):
        return zeroshard.load_checkpoint(path, self.model, self.optimizer, self.scheduler, **more)


def check(got, expected, what, *, same):
    """The same bits, or what another order of the same terms may give."""
    if same:
        assert_same(got, expected, what)
        return
    is_loss = any(name.startswith("loss") for name in got)
    assert_close(got, expected, what, atol=LOSS_IN_OTHER_ORDER if is_loss else OTHER_ORDER)


def compare(rank, world_size, system, training, ends, what):
    """Three steps of ours are those that they made."""
    losses, theirs = ends
    got = training.go(rank, world_size, AFTER)
    whole = weights(training.model)
    theirs = {name: theirs[name] for name in whole}
    check(got, losses, f"{system}, {what}", same=system == "ddp" and world_size == 2)
    check(whole, theirs, f"{system}, {what}", same=system == "ddp" and world_size == 2)


# --- from them, by torch.distributed.checkpoint


def usual(model, optimizer, scheduler):
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 3}


def as_app(model, optimizer, scheduler):
    return {"app": {"model": model, "optim": optimizer}, "lr_scheduler": scheduler, "step": 3}


def titan(model, optimizer, scheduler):
    train_state = {"step": torch.tensor(3, dtype=torch.int32)}
    rest = {"lr_scheduler": scheduler, "train_state": train_state}
    return {**model, "optimizer": optimizer, **rest}


WAYS = {
    "as get_state_dict has it": ({}, usual),
    "with a flat optimizer": (FLAT, usual),
    "whole": (WHOLE, usual),
    "under other names": ({}, as_app),
    "as torchtitan has it": (FLAT, titan),
}


@pytest.fixture(scope="module", params=SYSTEMS)
def theirs(request, tmp_path_factory):
    """Their checkpoints, made in every way, and how they went on."""
    folder = tmp_path_factory.mktemp(request.param)

    def body(rank, world_size):
        training = Theirs(request.param, build_model())
        training.go(rank, world_size, BEFORE)
        for name, (options, nest) in WAYS.items():
            options = StateDictOptions(**options)
            states = get_state_dict(training.model, training.optimizer, options=options)
            scheduler = training.scheduler.state_dict()
            dcp.save(nest(*states, scheduler), checkpoint_id=folder / name)
        return training.go(rank, world_size, AFTER), training.weights()

    return request.param, folder, run(body)[0]


@tried(
    "`dcp.save` by FSDP2 or DDP at two ranks, with `get_state_dict` (plain, flattened, "
    "`full_state_dict`, under other names, as torchtitan): the next three losses and weights are "
    "theirs, bit for bit at two ranks and to rounding at one and three",
    stages=ALL,
)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_they_saved_with_dcp_continues(theirs, world_size):
    system, folder, ends = theirs

    def body(rank, world_size):
        for name in WAYS:
            for stage in STAGES:
                training = Ours(stage)
                training.go(rank, world_size, [8])
                found = training.load(folder / name)
                assert found["step"] == 3, name
                compare(rank, world_size, system, training, ends, f"{name}, {stage=}")

    run(body, world_size)


@tried(
    "an fp32 checkpoint of FSDP2 into a bf16 model with fp32 or split masters: the masters are its "
    "weights, and three steps are those of FSDP2 with `MixedPrecisionPolicy(param_dtype=bfloat16)`",
    stages=ALL,
)
def test_masters_are_the_weights_of_an_fp32_checkpoint(tmp_path):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def saved(rank, world_size):
        training = Theirs("fsdp2", build_model(), policy=policy)
        training.go(rank, world_size, BEFORE)
        states = get_state_dict(training.model, training.optimizer)
        dcp.save(usual(*states, training.scheduler.state_dict()), checkpoint_id=tmp_path)
        before = training.weights()
        return before, training.go(rank, world_size, AFTER), training.weights()

    before, losses, after = run(saved)[0]

    def masters(training, like):
        training.optimizer.consolidate_state_dict()
        if dist.get_rank():
            return {}
        state = training.optimizer.state_dict()["state"]
        names = {p: name for name, p in training.model.named_parameters()}
        places = [p for group in training.optimizer.param_groups for p in group["params"]]
        return {names[p]: state[position]["master"] for position, p in enumerate(places)}

    def loaded(rank, world_size):
        for stage in STAGES:
            for master in ("fp32", "split"):
                what = f"{stage=}, {master}"
                model = build_model(seed=9, dtype=torch.bfloat16)
                model.prior = model.prior.float()
                precision = zeroshard.Precision(master=master)
                training = Ours(stage, model, precision=precision)
                training.load(tmp_path)
                found = masters(training, before)
                expected = {name: before[name] for name in found}
                assert_same(found, expected, what)
                got = training.go(rank, world_size, AFTER)
                found = masters(training, after)
                expected = {name: after[name] for name in found}
                assert_same(got, losses, what)
                assert_same(found, expected, what)

    run(loaded)


@tried(
    "LoRA by PEFT under FSDP2 and DDP, the base frozen: base and adapters are loaded, adapters "
    "continue",
    stages=ALL,
)
@pytest.mark.parametrize("system", SYSTEMS)
def test_adapters_continue(system, tmp_path):
    def saved(rank, world_size):
        training = Theirs(system, with_adapters(), trained)
        training.go(rank, world_size, BEFORE)
        states = get_state_dict(training.model, training.optimizer)
        dcp.save(usual(*states, training.scheduler.state_dict()), checkpoint_id=tmp_path)
        return training.go(rank, world_size, AFTER), training.weights()

    ends = run(saved)[0]

    def loaded(rank, world_size):
        for stage in STAGES:
            training = Ours(stage, with_adapters(seed=9), trained)
            training.go(rank, world_size, [8])
            training.load(tmp_path)
            compare(rank, world_size, system, training, ends, f"{stage=}")

    for world_size in (2, 3):
        run(loaded, world_size)


# --- from them, by torch.save


@tried(
    "`torch.save` of a model, an optimizer, a scheduler and a step by DDP (names with and without "
    "`module.`) and by a single process",
    stages=ALL,
)
@pytest.mark.parametrize("system", ["ddp", "alone"])
def test_what_they_saved_with_torch_save_continues(system, tmp_path):
    def saved(rank, world_size):
        training = Theirs(system, build_model())
        training.go(rank, world_size, BEFORE)
        for name, model in (("wrapped", training.forward), ("bare", training.model)):
            content = {
                "model": model.state_dict(),
                "optimizer": training.optimizer.state_dict(),
                "scheduler": training.scheduler.state_dict(),
                "step": 3,
            }
            if rank == 0:
                torch.save(content, tmp_path / name)
        return training.go(rank, world_size, AFTER), training.weights()

    at = {"ddp": 2, "alone": 1}[system]
    ends = run(saved, at)[0]

    def loaded(rank, world_size):
        for name in ("wrapped", "bare"):
            for stage in STAGES:
                training = Ours(stage)
                training.go(rank, world_size, [8])
                assert training.load(tmp_path / name)["step"] == 3
                losses, whole = training.go(rank, world_size, AFTER), weights(training.model)
                theirs = {key: ends[1][key] for key in whole}
                check(losses, ends[0], name, same=world_size == at)
                check(whole, theirs, name, same=world_size == at)

    for world_size in (1, 2, 3):
        run(loaded, world_size)


# --- to them


def our_checkpoints(folder, **options):
    """Ours of every stage at two ranks, and how they went on."""

    def body(rank, world_size):
        ends = {}
        for stage in STAGES:
            training = Ours(stage, build_model(), **options)
            training.go(rank, world_size, BEFORE)
            parts = (training.model, training.optimizer, training.scheduler)
            saving = zeroshard.save_checkpoint(folder / str(stage), *parts)
            losses = training.go(rank, world_size, AFTER)
            ends[stage] = (saving.path, losses, weights(training.model))
        return ends

    return run(body)[0]


@tried(
    "ours in FSDP2 and DDP by `dcp.load` and `set_state_dict`: the next three losses and weights "
    "are ours, bit for bit",
    stages=ALL,
)
@pytest.mark.parametrize("system", SYSTEMS)
def test_ours_continues_under_them(system, tmp_path):
    ends = our_checkpoints(tmp_path)

    def body(rank, world_size):
        for stage, (path, losses, after) in ends.items():
            training = Theirs(system, lr=0.3)
            training.load_dcp(path)
            assert [g["weight_decay"] for g in training.optimizer.param_groups] == [0.1, 0.0]
            got = training.go(rank, world_size, AFTER)
            check(got, losses, f"{stage=}", same=system == "ddp")
            whole = training.weights()
            whole = {name: whole[name] for name in after}
            check(whole, after, f"{stage=}", same=system == "ddp")

    run(body)


@tried(
    "ours by `zeroshard convert --to torch` in plain torch and DDP, and by `--to dcp` in FSDP2: "
    "bit for bit at two ranks",
    stages=ALL,
)
def test_ours_converted_continues_under_them(tmp_path):
    ends = our_checkpoints(tmp_path)
    for stage, (path, _, _) in ends.items():
        for to in ("torch", "dcp"):
            convert(path, tmp_path / f"{stage}.{to}", to=to)

    def load_file(training, path):
        content = torch.load(path, weights_only=True)
        training.model.load_state_dict(content["model"])
        training.optimizer.load_state_dict(content["optimizer"])
        training.scheduler.load_state_dict(content["scheduler"])

    def body(rank, world_size, system):
        for stage, (_, losses, after) in ends.items():
            training = Theirs(system, lr=0.3)
            if system == "fsdp2":
                like = training.scheduler.state_dict()
                training.load_dcp(tmp_path / f"{stage}.dcp", like)
            else:
                load_file(training, tmp_path / f"{stage}.torch")
            got = training.go(rank, world_size, AFTER)
            whole = training.weights()
            whole = {name: whole[name] for name in after}
            check(got, losses, f"{system}, {stage=}", same=system == "ddp")
            check(whole, after, f"{system}, {stage=}", same=system == "ddp")

    for system, world_size in (("fsdp2", 2), ("ddp", 2), ("alone", 1)):
        run(lambda *where, s=system: body(*where, s), world_size)


@tried(
    "8-bit moments in FSDP2 and DDP",
    stages=ALL,
    result="refused: `dcp.load` misses `exp_avg`, since codes have another name; "
    "`zeroshard convert --to dcp` writes fp32 moments",
)
@pytest.mark.parametrize("system", SYSTEMS)
def test_codes_are_not_taken_for_moments(system, tmp_path):
    precision = zeroshard.Precision(moments="int8")
    ends = our_checkpoints(tmp_path, precision=precision)
    for stage, (path, _, _) in ends.items():
        convert(path, tmp_path / f"{stage}.dcp", to="dcp")

    def moments(rank, world_size):
        """What the codes mean."""
        found = {}
        for stage, (path, _, _) in ends.items():
            training = Ours(stage, precision=precision)
            training.load(path)
            training.optimizer.consolidate_state_dict()
            state = training.optimizer.state_dict()["state"] if rank == 0 else {}
            found[stage] = copy.deepcopy(state)
        return found

    wanted = run(moments)[0]

    def body(rank, world_size):
        for stage, (path, losses, _) in ends.items():
            training = Theirs(system)
            with pytest.raises(dcp.api.CheckpointException, match=r"Missing key.*exp_avg"):
                training.load_dcp(path)
            training = Theirs(system, lr=0.3)
            training.load_dcp(tmp_path / f"{stage}.dcp", training.scheduler.state_dict())
            for position, entry in training.optimizer.state_dict()["state"].items():
                for moment in ("exp_avg", "exp_avg_sq"):
                    got = entry[moment]
                    got = got.full_tensor() if hasattr(got, "full_tensor") else got
                    assert_same({moment: got}, {moment: wanted[stage][position][moment]}, system)
            got = training.go(rank, world_size, AFTER)
            first = f"loss {AFTER[0]}"
            check({first: got[first]}, {first: losses[first]}, system, same=system == "ddp")

    run(body)
