"""What trainers and other libraries do to an optimizer and its model, beside stepping it."""

import copy
import io
import logging

import pytest
import torch
from models import assert_same, decay_groups, gathered, letter_batches, letters, train, weights
from ranks import run
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zeroshard
from zeroshard.errors import ConfigError, ShardTensorError

stages = pytest.mark.parametrize("stage", [1, 2, 3])


def build(stage, seed=0, dtype=torch.float32, **options):
    model = letters(seed, dtype)
    optimizer = zeroshard.AdamW(decay_groups(model), lr=1e-2, model=model, stage=stage, **options)
    return model, optimizer


# --- what saves by storage


# DS#3303: views saved with their whole storage. Accelerate takes tensors that share a storage for
# tied ones and writes one of them.
@stages
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_parameter_has_a_storage_of_its_own_and_of_its_size(stage, dtype):
    def body(rank, world_size):
        model, optimizer = build(stage, dtype=dtype)
        train(model, optimizer, letter_batches(rank)[:2])
        with gathered(model):
            state = model.state_dict()
            assert state["embed.weight"].untyped_storage().data_ptr() == (
                state["head.weight"].untyped_storage().data_ptr()
            )
            del state["head.weight"]  # tied
            storages = [value.untyped_storage() for value in state.values()]
            assert len({storage.data_ptr() for storage in storages}) == len(state)
            for value, storage in zip(state.values(), storages, strict=True):
                assert storage.nbytes() == value.numel() * value.element_size()
        expected = weights(model)
        if stage < 3:  # they are the memory that is trained
            with torch.no_grad():
                model.gain.fill_(3.0)
            assert state["gain"] == 3.0
            expected["gain"] = torch.tensor(3.0, dtype=dtype)
        assert_same(weights(model), expected, "weights")

    run(body)


def test_what_was_kept_of_a_gathered_model_outlives_the_gathering():
    def body(rank, world_size):
        model, optimizer = build(3)
        with zeroshard.gather(model):
            kept = model.state_dict()
            expected = {name: value.clone() for name, value in kept.items()}
        train(model, optimizer, letter_batches(rank)[:2])
        del expected["gain"]  # of one element, which is never freed
        assert_same({name: kept[name] for name in expected}, expected, "kept")

    run(body)


def test_a_slice_of_a_parameter_is_refused_to_whoever_asks_for_its_storage():
    # peft#453: safetensors wrote 40-byte adapters.
    def body(rank, world_size):
        model, _ = build(3)
        shard = model.state_dict()["embed.weight"]
        for ask in (shard.untyped_storage, shard.storage):
            with pytest.raises(ShardTensorError, match=r"zeroshard\.gather"):
                ask()

    run(body)


# --- optimizer.state


@stages
def test_what_is_put_into_optimizer_state_takes_effect(stage):
    def filled(model, optimizer, value):
        for p in model.parameters():
            optimizer.state[p] = {
                "step": torch.tensor(2.0),
                "exp_avg": torch.full(p.shape, value),
                "exp_avg_sq": torch.full(p.shape, value * value),
                "of the user": "kept",
            }

    def body(rank, world_size):
        batches = letter_batches(rank)
        plain = letters()
        replica = DistributedDataParallel(plain)
        reference = torch.optim.AdamW(decay_groups(plain), lr=1e-2, fused=True)
        model, optimizer = build(stage)
        for value in (0.25, 0.5):  # before the first step, and later
            filled(plain, reference, value)
            filled(model, optimizer, value)
            expected = train(plain, reference, batches[:2], forward=replica)
            assert_same(train(model, optimizer, batches[:2]), expected, f"filled with {value}")
            assert all(state["of the user"] == "kept" for state in optimizer.state.values())
            assert all(state["step"] == 4 for state in optimizer.state.values())

        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            optimizer.state[p]["exp_avg"] = torch.zeros_like(q)  # one tensor alone
            reference.state[q]["exp_avg"] = torch.zeros_like(q)
        expected = train(plain, reference, batches[2:3], forward=replica)
        assert_same(train(model, optimizer, batches[2:3]), expected, "one tensor")

        optimizer.state.clear()  # to start anew
        reference.state.clear()
        expected = train(plain, reference, batches[3:5], forward=replica)
        assert_same(train(model, optimizer, batches[3:5]), expected, "cleared")

    run(body)


def test_what_does_not_fit_into_optimizer_state_is_refused_before_anything_changes():
    def body(rank, world_size):
        model, optimizer = build(2)
        before = weights(model)
        optimizer.state[model.embed.weight]["exp_avg"] = torch.zeros(3)
        with pytest.raises(ConfigError, match=r"exp_avg of .*embed.*must have shape"):
            train(model, optimizer, letter_batches(rank)[:1])
        assert_same(weights(model), before, "weights")

    run(body)


@pytest.mark.parametrize("master", ["split", "fp32"])
def test_8_bit_moments_take_over_whole_fp32_tensors(master):
    def body(rank, world_size):
        precision = zeroshard.Precision(moments="int8", master=master)
        model, optimizer = build(2, dtype=torch.bfloat16, precision=precision)
        train(model, optimizer, letter_batches(rank)[:1])
        weight = model.embed.weight
        kept = optimizer.state[weight][{"split": "remainder", "fp32": "master"}[master]]
        kept = kept._local_tensor.clone()
        optimizer.state[weight]["exp_avg"] = torch.full(weight.shape, 0.5)
        optimizer._shown.take_over(optimizer.state)
        entry = optimizer.state[weight]
        assert entry["exp_avg"].dtype == torch.int8
        optimizer.consolidate_state_dict()
        if rank == 0:
            position = next(
                i for i, p in enumerate(optimizer.param_groups[0]["params"]) if p is weight
            )
            whole = optimizer.state_dict()["state"][position]["exp_avg"]
            # Scales have 16 significant bits.
            assert torch.allclose(whole, torch.full(weight.shape, 0.5), rtol=2**-15, atol=0)
        now = optimizer.state[weight][{"split": "remainder", "fp32": "master"}[master]]
        assert torch.equal(now._local_tensor, kept), "the master was not touched"

    run(body)


class Wrapper:
    """Copies the attributes of what it wraps, as Lightning's and Fabric's do."""

    def __new__(cls, optimizer):
        kind = type("Wrapped", (cls, type(optimizer)), {})
        wrapper = object.__new__(kind)
        wrapper.__dict__ = dict(optimizer.__dict__)
        return wrapper

    def __init__(self, optimizer):
        pass


def test_a_state_that_was_consolidated_through_a_wrapper_ends_with_the_next_step():
    def body(rank, world_size):
        model, optimizer = build(2)
        wrapper = Wrapper(optimizer)
        for steps in (1, 2):
            train(model, optimizer, letter_batches(rank)[:1])
            wrapper.consolidate_state_dict()
            for each in (wrapper, optimizer):
                state = each.state_dict()["state"]
                assert all(entry["step"] == steps for entry in state.values())
        train(model, wrapper, letter_batches(rank)[:1])
        assert all(s["step"] == 3 for s in optimizer.state_dict()["state"].values())

    run(body)


def test_a_local_state_loads_with_weights_only_and_its_pickling_is_logged_once(caplog):
    def body(rank, world_size):
        model, optimizer = build(2)
        train(model, optimizer, letter_batches(rank)[:2])
        buffer = io.BytesIO()
        with caplog.at_level(logging.WARNING, logger="zeroshard"):
            for _ in range(2):
                buffer.seek(0)
                torch.save(optimizer.state_dict(), buffer)
        logged = [record.message for record in caplog.records]
        assert len(logged) == (1 if rank == 0 else 0)
        assert all("consolidate_state_dict" in message for message in logged)
        expected = train(model, optimizer, letter_batches(rank)[2:])

        model, optimizer = build(2)
        train(model, optimizer, letter_batches(rank)[:2])
        buffer.seek(0)
        optimizer.load_state_dict(torch.load(buffer, weights_only=True))
        assert_same(train(model, optimizer, letter_batches(rank)[2:]), expected, "weights")

    run(body)


# --- the order in which things are loaded


# torch's set_state_dict loads the optimizer and then the model.
@stages
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("master", ["split", "fp32"])
def test_masters_are_kept_whichever_of_model_and_optimizer_is_loaded_first(stage, whole, master):
    def body(rank, world_size):
        batches = letter_batches(rank)
        precision = zeroshard.Precision(master=master)
        options = {"dtype": torch.bfloat16, "precision": precision}
        model, optimizer = build(stage, **options)
        train(model, optimizer, batches[:2])
        start = weights(model)
        start["head.weight"] = start["embed.weight"]
        if whole:
            optimizer.consolidate_state_dict()
            state = [optimizer.state_dict()]
            torch.distributed.broadcast_object_list(state, 0)
            (state,) = state
        else:
            state = copy.deepcopy(optimizer.state_dict())
        expected = train(model, optimizer, batches[2:])
        for optimizer_first in (False, True):
            model, optimizer = build(stage, seed=9, **options)
            if optimizer_first:
                optimizer.load_state_dict(copy.deepcopy(state))
            model.load_state_dict(start)
            if not optimizer_first:
                optimizer.load_state_dict(copy.deepcopy(state))
            got = train(model, optimizer, batches[2:])
            assert_same(got, expected, f"{optimizer_first=}")

    run(body)


@pytest.mark.parametrize("master", ["split", "fp32"])
def test_a_write_after_the_first_step_since_a_load_starts_new_masters(master):
    def body(rank, world_size):
        precision = zeroshard.Precision(master=master)
        model, optimizer = build(2, dtype=torch.bfloat16, precision=precision)
        train(model, optimizer, letter_batches(rank)[:2])
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(model, optimizer, letter_batches(rank)[2:3])
        with torch.no_grad():
            model.embed.weight.mul_(0.5)
        optimizer.engine.masters.look_at_writes()
        slot = optimizer.engine.slot_of[model.embed.weight]
        for parameter, state in optimizer.engine.masters.local_parts(slot):
            if master == "split":
                assert not state["remainder"].any()
            else:
                assert torch.equal(state["master"], parameter.float())

    run(body)


# --- what is trained, and by whom


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(4, 4)
        self.adapter = None

    def forward(self, x):
        return self.base(x) if self.adapter is None else self.base(x) + self.adapter(x)


def loss_of_ones(model):
    return model(torch.ones(2, 4)).square().sum()


# pt#149205: an optimizer built before the model was changed trains nothing, without an error.
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("knows_model", [False, True])
def test_a_step_that_trains_nothing_while_the_model_trains_others_raises(stage, knows_model):
    def body(rank, world_size):
        model = Adapted()
        given = {"model": model} if knows_model else {}
        optimizer = zeroshard.AdamW(model.parameters(), stage=stage, **given)
        model.requires_grad_(False)
        optimizer.step()  # there is nothing to train, and nothing else is
        model.adapter = nn.Linear(4, 4)
        loss_of_ones(model).backward()
        with pytest.raises(ConfigError, match=r"nothing was trained.*2 that.*adapter\.weight"):
            optimizer.step()
        optimizer.add_param_group({"params": model.adapter.parameters()})
        before = weights(model)
        loss_of_ones(model).backward()
        optimizer.step()
        assert not torch.equal(model.adapter.weight, before["adapter.weight"])
        assert torch.equal(model.base.weight, before["base.weight"])

    run(body)


@stages
def test_an_optimizer_leaves_alone_what_a_newer_one_trains(stage):
    def body(rank, world_size):
        torch.manual_seed(0)
        model = Adapted()
        model.adapter = nn.Linear(4, 4)
        model.base.requires_grad_(False)
        older = zeroshard.AdamW(model.parameters(), model=model, stage=stage)
        loss_of_ones(model).backward()
        older.step()
        older.zero_grad()
        model.adapter = None
        model.requires_grad_(True)
        newer = zeroshard.AdamW(model.parameters(), model=model, stage=stage)
        for _ in range(2):
            before = weights(model)
            loss_of_ones(model).backward()
            newer.step()
            newer.zero_grad()
            assert not torch.equal(weights(model)["base.weight"], before["base.weight"])

    run(body)


def test_stage_3_refuses_ddp_when_it_is_built():
    def body(rank, world_size):
        model, optimizer = build(3)
        before = weights(model)
        with pytest.raises(ConfigError, match="DistributedDataParallel"):
            DistributedDataParallel(model)
        assert_same(weights(model), before, "weights")
        train(model, optimizer, letter_batches(rank)[:1])

    run(body)


# --- modules that run themselves


class CallsItself(nn.Module):
    """As Lightning and DDP run a step: as the module's forward, which calls the module."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.scale = nn.Parameter(torch.full((4,), 2.0))
        self.interrupts = False

    def forward(self, x, step=True):
        if step:
            return self(x, step=False) * self.scale
        for block in self.blocks:
            x = block(x)
            if self.interrupts:
                raise KeyboardInterrupt
        return x


def test_a_module_that_calls_itself_is_whole_to_its_end_with_and_without_gradients():
    def body(rank, world_size):
        torch.manual_seed(0)
        model, x = CallsItself(), torch.ones(2, 4)
        expected = model(x).detach()
        zeroshard.AdamW(model, stage=3)
        for _ in range(2):
            assert torch.equal(model(x).detach(), expected), "with gradients"
            with torch.no_grad():
                assert torch.equal(model(x), expected), "without"
            assert model.scale.isnan().all(), "and free afterwards"
            model.interrupts = True
            with pytest.raises(KeyboardInterrupt), torch.no_grad():
                model(x)
            model.interrupts = False

    run(body)
