"""What trainers and other libraries do to an optimizer and its model, beside stepping it."""

import copy
import gc
import io
import logging
import multiprocessing.reduction
import weakref

import pytest
import torch
from models import (
    assert_ranks_agree,
    assert_same,
    decay_groups,
    gathered,
    letter_batches,
    letters,
    train,
    weights,
)
from ranks import run
from torch import nn
from torch.distributed.algorithms.join import Join
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
            tied = [state[name].untyped_storage() for name in ("embed.weight", "head.weight")]
            assert tied[0]._cdata == tied[1]._cdata, "a file has them once"
            del tied
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
        optimizer.shown_state.take_over(optimizer.state)
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
        other = torch.optim.SGD(model.adapter.parameters(), lr=0.1)
        for _ in range(4):
            optimizer.step()  # what another optimizer trains is not lost
        del other
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


# --- param_groups


# Lightning's BaseFinetuning assigns param_groups at every resume, and Accelerate passes it on.
@stages
def test_assigned_param_groups_are_those_that_steps_read(stage):
    def change(model, optimizer):
        one, two = optimizer.param_groups
        moved = two["params"][0]
        optimizer.param_groups = [
            {**one, "params": [*one["params"][1:], moved], "lr": 3e-3},
            {**two, "params": [*two["params"][1:]]},
        ]  # one parameter is in another group, and one in none

    def body(rank, world_size):
        batches = letter_batches(rank)
        plain = letters()
        replica = DistributedDataParallel(plain)
        reference = torch.optim.AdamW(decay_groups(plain), lr=1e-2, fused=True)
        model, optimizer = build(stage)
        for what in (None, change):
            for each, its_model in ((reference, plain), (optimizer, model)):
                if what is not None:
                    what(its_model, each)
            expected = train(plain, reference, batches[:2], forward=replica)
            assert_same(train(model, optimizer, batches[:2]), expected, f"after {what}")
            for each in (reference, optimizer):  # two change places, in lists as long as before
                one, two = (group["params"] for group in each.param_groups)
                one[0], two[0] = two[0], one[0]
        for each in (reference, optimizer):
            each.param_groups[0]["lr"] = 0.0
            each.param_groups[0]["weight_decay"] = 0.0
        expected = train(plain, reference, batches[2:4], forward=replica)
        assert_same(train(model, optimizer, batches[2:4]), expected, "lr of the new group")

    run(body)


@pytest.mark.parametrize("stage", [1, 2])
def test_groups_can_be_added_to_assigned_ones(stage):
    def body(rank, world_size):
        model = Adapted()
        model.adapter = nn.Linear(4, 4)
        optimizer = zeroshard.AdamW(model.base.parameters(), model=model, stage=stage)
        optimizer.param_groups = [{**group} for group in optimizer.param_groups]
        optimizer.add_param_group({"params": model.adapter.parameters()})
        before = weights(model)
        loss_of_ones(model).backward()
        optimizer.step()
        after = weights(model)
        assert not any(torch.equal(after[name], before[name]) for name in before)

    run(body)


# --- copies of slices


def test_copies_of_slices_know_what_they_are():
    def body(rank, world_size):
        model, optimizer = build(3)
        for copied in (
            model.state_dict()["embed.weight"].clone(),
            copy.deepcopy(model.state_dict())["embed.weight"],
        ):
            with pytest.raises(ShardTensorError, match=r"zeroshard\.gather"):
                torch.save(copied, io.BytesIO())
        train(model, optimizer, letter_batches(rank)[:1])
        entry = optimizer.state_dict()["state"][0]["exp_avg"]
        entry.to_local().copy_(torch.full(entry.shape, 2.0))
        assert copy.deepcopy(entry).given.eq(2).all()
        gradients = zeroshard.ShardTensor
        loss = model(letter_batches(rank)[0]).sum()
        loss.backward()
        copied = copy.copy(model.embed.weight.grad)
        assert isinstance(copied, gradients)
        assert copied.norm() == model.embed.weight.grad.norm()

    run(body)


# --- memory


@stages
def test_a_closed_optimizer_holds_no_state(stage):
    def body(rank, world_size):
        model, optimizer = build(stage)
        train(model, optimizer, letter_batches(rank)[:1])
        state = next(iter(optimizer.state.values()))["exp_avg"]
        reference = weakref.ref(getattr(state, "_local_tensor", state))
        del state
        optimizer.close()
        gc.collect()
        assert reference() is None

    run(body)


def test_shared_memory_does_not_come_between_a_parameter_and_its_optimizer():
    def body(rank, world_size):
        expected = None
        for share in (lambda model: None, lambda model: model.share_memory()):
            model, optimizer = build(2)
            train(model, optimizer, letter_batches(rank)[:1])
            share(model)
            multiprocessing.reduction.ForkingPickler.dumps(model.state_dict())
            got = train(model, optimizer, letter_batches(rank)[1:3])
            if expected is not None:
                assert_same(got, expected, "shared")
            expected = got

    run(body)


def test_a_sharded_model_may_be_moved_to_where_it_is():
    def body(rank, world_size):
        model, optimizer = build(3)
        train(model, optimizer, letter_batches(rank)[:1])
        before = weights(model)
        model.to("cpu:0")
        with zeroshard.gather(model):
            assert_same({n: p.detach() for n, p in model.named_parameters()}, before, "weights")
        model.embed.weight.data = model.embed.weight.data * 0.5  # of a placeholder
        with pytest.raises(ConfigError, match="the write is lost"):
            train(model, optimizer, letter_batches(rank)[:1])

    run(body)


# --- what is loaded is what counts


@stages
def test_a_load_replaces_what_was_put_into_optimizer_state(stage):
    def body(rank, world_size):
        batches = letter_batches(rank)
        model, optimizer = build(stage)
        start = train(model, optimizer, batches[:2])
        saved = copy.deepcopy(optimizer.state_dict())
        expected = train(model, optimizer, batches[2:])
        for spoil in (
            lambda model, state: state.clear(),
            lambda model, state: state[model.gain].update(exp_avg=torch.ones(())),
        ):
            model, optimizer = build(stage, seed=9)
            model.load_state_dict({**start, "head.weight": start["embed.weight"]})
            spoil(model, optimizer.state)
            optimizer.load_state_dict(copy.deepcopy(saved))
            assert all(state["step"] == 2 for state in optimizer.state.values())
            assert_same(train(model, optimizer, batches[2:]), expected, "weights")

    run(body)


def test_what_was_put_into_optimizer_state_is_saved_and_survives_new_groups():
    def body(rank, world_size):
        model = Adapted()
        model.adapter = nn.Linear(4, 4)
        optimizer = zeroshard.AdamW(model.base.parameters(), model=model)
        weight = model.base.weight
        optimizer.state[weight]["step"] = torch.tensor(5.0)
        optimizer.consolidate_state_dict()
        if rank == 0:
            assert optimizer.state_dict()["state"][0]["step"] == 5
        optimizer.state[weight]["step"] = torch.tensor(6.0)
        optimizer.add_param_group({"params": model.adapter.parameters()})
        loss_of_ones(model).backward()
        optimizer.step()
        assert optimizer.state[weight]["step"] == 7

        a, b = model.base.weight, model.adapter.weight  # of one shape
        optimizer.state[a]["exp_avg"] = torch.full((4, 4), 1.0)
        optimizer.state[b]["exp_avg"] = torch.full((4, 4), 2.0)
        optimizer.shown_state.take_over(optimizer.state)
        optimizer.state[a], optimizer.state[b] = optimizer.state[b], optimizer.state[a]
        optimizer.shown_state.take_over(optimizer.state)
        assert optimizer.state[a]["exp_avg"].full_tensor().eq(2).all()
        assert optimizer.state[b]["exp_avg"].full_tensor().eq(1).all()

    run(body)


def test_state_of_a_frozen_parameter_is_taken_over_when_it_is_trained():
    def body(rank, world_size):
        model = Adapted()
        model.base.bias.requires_grad_(False)
        optimizer = zeroshard.AdamW(model, stage=2)
        optimizer.state[model.base.bias]["step"] = torch.tensor(7.0)
        model.base.bias.requires_grad_(True)
        loss_of_ones(model).backward()
        optimizer.step()
        assert optimizer.state[model.base.bias]["step"] == 8
        assert optimizer.state[model.base.weight]["step"] == 1

    run(body)


@pytest.mark.parametrize("master", ["split", "fp32"])
def test_a_split_state_becomes_any_master_whichever_is_loaded_first(master):
    def body(rank, world_size):
        model, optimizer = build(2, dtype=torch.bfloat16)
        train(model, optimizer, letter_batches(rank)[:3])
        start = weights(model)
        start["head.weight"] = start["embed.weight"]
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer.consolidate_state_dict()
        expected = optimizer.state_dict()["state"] if rank == 0 else {}
        for optimizer_first in (False, True):
            precision = zeroshard.Precision(master=master)
            model, optimizer = build(2, seed=9, dtype=torch.bfloat16, precision=precision)
            if optimizer_first:
                optimizer.load_state_dict(saved)
            model.load_state_dict(start)
            if not optimizer_first:
                optimizer.load_state_dict(saved)
            optimizer.consolidate_state_dict()
            got = optimizer.state_dict()["state"] if rank == 0 else {}
            for position, entry in expected.items():
                assert torch.equal(got[position]["master"], entry["master"]), optimizer_first

    run(body)


def test_a_write_that_is_no_load_starts_new_masters_also_before_the_first_step():
    def body(rank, world_size):
        model, optimizer = build(2, dtype=torch.bfloat16)
        train(model, optimizer, letter_batches(rank)[:2])
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        with torch.no_grad():
            model.embed.weight.fill_(1.0)
        optimizer.engine.masters.look_at_writes()
        slot = optimizer.engine.slot_of[model.embed.weight]
        for _, state in optimizer.engine.masters.local_parts(slot):
            assert not state["remainder"].any()

    run(body)


# --- Join


def with_steps(model, optimizer, batches, scheduler=None):
    for batch in batches:
        model(batch[:, :-1]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()


def test_ranks_that_ran_out_of_inputs_take_the_options_of_the_others():
    def body(rank, world_size):
        batches = letter_batches(rank)
        model, optimizer = build(2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        with Join([optimizer]):
            with_steps(model, optimizer, batches[: 1 + 2 * rank], scheduler)
        assert optimizer.param_groups[0]["lr"] == 1e-2 / 8
        assert_ranks_agree(weights(model), "weights")
        # The first rank's scheduler goes on from where it was: that is noticed on every rank.
        scheduler.step()
        with pytest.raises(ConfigError, match="different options"), Join([optimizer]):
            with_steps(model, optimizer, batches[:2], scheduler)

    run(body)


def test_joining_over_two_optimizers_is_refused():
    def body(rank, world_size):
        one, two = build(2), build(2)
        with pytest.raises(ConfigError, match="several joinables"), Join([one[1], two[1]]):
            with_steps(*two, letter_batches(rank)[:1])

    run(body)
