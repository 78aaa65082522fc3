"""State goes to torch and back, and nothing that reads it communicates."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from models import (
    SHAPES,
    LinearForm,
    Twin,
    assert_ranks_agree,
    assert_same,
    averaged,
    coefficients,
    decay_groups,
    gathered,
    letter_batches,
    letters,
    plain_step,
    train,
    weights,
)
from ranks import run
from torch.nn.parallel import DistributedDataParallel

import zeroshard

stages = pytest.mark.parametrize("stage", [1, 2, 3])


def through_file(state, *, weights_only):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=weights_only)


def consolidated(rank, optimizer, to=0):
    """The full state as it reaches a file, on every rank."""
    optimizer.consolidate_state_dict(to=to)
    payload = [None]
    if rank == to:
        # As the Trainer of transformers loads it: nothing but tensors and plain values.
        payload = [through_file(optimizer.state_dict(), weights_only=True)]
    dist.broadcast_object_list(payload, to)
    return payload[0]


def assert_states_equal(got, expected):
    assert got["param_groups"] == expected["param_groups"]
    assert got["state"].keys() == expected["state"].keys()
    for index, wanted in expected["state"].items():
        entry = got["state"][index]
        assert entry.keys() == wanted.keys()
        assert_same(dict(entry), dict(wanted), f"state of parameter {index}")


# Megatron-LM#5898: padding written into checkpoints.
@pytest.mark.parametrize("world_size", [1, 2, 3])
@stages
def test_the_consolidated_state_is_bitwise_torchs(stage, world_size):
    def body(rank, world_size):
        for bucket_mb in (25, 1e-3):
            twin = Twin(rank, world_size, stage=stage, bucket_mb=bucket_mb)
            for step in range(3):
                twin.backward(step)
                twin.step()
            state = consolidated(rank, twin.optimizer)
            expected = twin.plain.state_dict()
            assert state["param_groups"][0]["fused"] is True
            assert_states_equal(state, expected)
            for index, p in enumerate(twin.plain_model.parameters()):
                assert state["state"][index]["exp_avg"].stride() == p.stride()

    run(body, world_size)


@stages
def test_torch_continues_bitwise_from_our_state_and_we_from_torchs(stage):
    def body(rank, world_size):
        batches = letter_batches(rank)
        model = letters()
        optimizer = zeroshard.AdamW(decay_groups(model), lr=1e-2, model=model, stage=stage)
        start = train(model, optimizer, batches[:3])
        state = consolidated(rank, optimizer)
        expected = train(model, optimizer, batches[3:])
        final = consolidated(rank, optimizer)

        replica = letters()
        replica.load_state_dict(start | {"head.weight": start["embed.weight"]})
        plain = torch.optim.AdamW(decay_groups(replica), lr=0.5, fused=True)
        plain.load_state_dict(copy.deepcopy(state))
        got = train(replica, plain, batches[3:], forward=DistributedDataParallel(replica))
        assert_same(got, expected, "torch from our state")
        assert_states_equal(final, plain.state_dict())

        for other_stage in (1, 2, 3):
            fresh = letters(seed=9)
            options = {"lr": 0.5, "model": fresh, "stage": other_stage}
            again = zeroshard.AdamW(decay_groups(fresh), **options)
            fresh.load_state_dict(start | {"head.weight": start["embed.weight"]})
            again.load_state_dict(copy.deepcopy(state))
            assert again.param_groups[0]["lr"] == 1e-2
            got = train(fresh, again, batches[3:])
            assert_same(got, expected, f"stage {other_stage} from that state")
            assert_states_equal(consolidated(rank, again), final)

    run(body)


@stages
def test_a_state_saved_at_three_ranks_continues_at_two(stage):
    def saved(rank, world_size):
        twin = Twin(rank, world_size, stage=stage)
        for step in range(2):
            twin.backward(step)
            twin.step()
        return weights(twin.model), consolidated(rank, twin.optimizer)

    values, state = run(saved, 3)[0]

    def continued(rank, world_size):
        twin = Twin(rank, world_size, stage=stage)
        twin.model.load_state_dict(values)
        twin.plain_model.load_state_dict(values)
        twin.optimizer.load_state_dict(copy.deepcopy(state))
        twin.plain.load_state_dict(copy.deepcopy(state))
        for step in range(2, 4):
            twin.backward(step)
            twin.step()
        twin.check("other world size")

    run(continued, 2)


# transformers' Trainer, Lightning#5646, accelerate#2375, DeepSpeed#797: calls on the first rank.
@stages
def test_reading_and_loading_on_one_rank_does_not_communicate(stage):
    def body(rank, world_size):
        twin = Twin(rank, world_size, stage=stage)
        for step in range(4):
            twin.backward(step)
            if rank == step % world_size:
                optimizer = twin.optimizer
                state = optimizer.state_dict()
                assert repr(optimizer)
                assert str(optimizer)
                assert optimizer.memory()
                assert stage == 3 or copy.deepcopy(optimizer.param_groups)
                assert dict(optimizer.state)
                assert int(optimizer.skipped_steps) == 0
                assert twin.model.state_dict()
                torch.save(state, io.BytesIO())
                optimizer.load_state_dict(through_file(state, weights_only=False))
            twin.step()
            twin.check(f"step {step}")

    run(body, timeout_s=20)


@stages
def test_a_local_state_continues_bitwise_after_a_file(stage):
    def body(rank, world_size):
        for groups in (None, decay_groups):
            twin = Twin(rank, world_size, stage=stage, groups=groups)
            for step in range(2):
                twin.backward(step)
                twin.step()
            saved = through_file(twin.optimizer.state_dict(), weights_only=False)
            model = type(twin.model)(SHAPES, seed=5)
            select = groups or (lambda model: model.parameters())
            given = {"model": model} if stage == 3 else {}  # as the twin's
            optimizer = zeroshard.AdamW(select(model), lr=0.7, stage=stage, **given)
            model.load_state_dict(twin.model.state_dict())
            optimizer.load_state_dict(saved)
            for step in range(2, 4):
                twin.backward(step)
                twin.step()
                model(coefficients(model, rank, world_size, step)).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert_same(weights(model), weights(twin.plain_model), "from the local state")
            assert_states_equal(consolidated(rank, optimizer), consolidated(rank, twin.optimizer))

    run(body, 3)


@stages
def test_a_state_dict_is_a_snapshot_once_copied(stage):
    """As torch's, it may alias the live state; a deep copy must not."""

    def body(rank, world_size):
        twin = Twin(rank, world_size, stage=stage)
        twin.backward(0)
        twin.step()
        start = weights(twin.model)
        state = copy.deepcopy(twin.optimizer.state_dict())
        plain_state = copy.deepcopy(twin.plain.state_dict())
        for step in range(1, 3):
            twin.backward(step)
            twin.step()
        twin.model.load_state_dict(start)
        twin.plain_model.load_state_dict(start)
        twin.optimizer.load_state_dict(state)
        twin.plain.load_state_dict(plain_state)
        for step in range(3, 5):
            twin.backward(step)
            twin.step()
        twin.check("back to the snapshot")

    run(body)


@stages
def test_a_consolidated_state_does_not_outlive_the_next_step(stage):
    def body(rank, world_size):
        twin = Twin(rank, world_size, stage=stage)
        twin.backward(0)
        twin.step()
        twin.optimizer.consolidate_state_dict(to=0)
        assert twin.optimizer.state_dict()
        twin.backward(1)
        twin.step()
        saved = copy.deepcopy(twin.optimizer.state_dict())
        model = type(twin.model)(SHAPES)
        optimizer = zeroshard.AdamW(model, stage=stage)
        model.load_state_dict(twin.model.state_dict())
        optimizer.load_state_dict(saved)
        assert_states_equal(consolidated(rank, optimizer), consolidated(rank, twin.optimizer))

    run(body)


@stages
def test_any_rank_may_take_the_consolidated_state(stage):
    def body(rank, world_size):
        twin = Twin(rank, world_size, stage=stage)
        twin.backward(0)
        twin.step()
        state = consolidated(rank, twin.optimizer, to=2)
        assert_states_equal(state, twin.plain.state_dict())

    run(body, 3)


@stages
def test_a_state_of_parameters_never_used_continues_as_in_torch(stage):
    def body(rank, world_size):
        twin = Twin(rank, world_size, stage=stage)
        for step in range(2):
            twin.backward(step, lambda rank: {"matrix", "empty", "pair"})
            twin.step()
        ours = consolidated(rank, twin.optimizer)
        torchs = through_file(twin.plain.state_dict(), weights_only=True)
        assert torchs["state"].keys() < set(range(len(SHAPES)))
        start = weights(twin.model)
        for which, state in (("ours", ours), ("torch's", torchs)):
            again = Twin(rank, world_size, stage=stage)
            again.model.load_state_dict(start)
            again.plain_model.load_state_dict(start)
            again.optimizer.load_state_dict(copy.deepcopy(state))
            again.plain.load_state_dict(copy.deepcopy(state))
            for step in range(2, 4):
                again.backward(step)
                again.step()
            again.check(which)

    run(body)


# DeepSpeed#3090: frozen weights lost on resume.
@stages
def test_frozen_parameters_keep_their_places_in_the_state(stage):
    def frozen(model):
        for name in ("matrix", "single", "bias"):
            getattr(model, name).requires_grad_(False)
        return list(model.parameters())

    def body(rank, world_size):
        twin = Twin(rank, world_size, stage=stage, groups=frozen)
        for step in range(2):
            twin.backward(step)
            twin.step()
        state = consolidated(rank, twin.optimizer)
        assert_states_equal(state, twin.plain.state_dict())
        again = Twin(rank, world_size, stage=stage, groups=frozen)
        again.model.load_state_dict(twin.model.state_dict())
        again.optimizer.load_state_dict(state)
        for step in range(2, 4):
            for one in (twin, again):
                one.backward(step)
                one.step()
        assert_same(weights(again.model), weights(twin.plain_model), "resumed")

    run(body)


@stages
def test_an_empty_torch_state_resets_to_the_beginning(stage):
    def body(rank, world_size):
        empty = torch.optim.AdamW(LinearForm(SHAPES).parameters(), lr=1e-2).state_dict()
        twin = Twin(rank, world_size, stage=stage, settings={"weight_decay": 1e-2})
        twin.backward(0)
        twin.step()
        twin.optimizer.load_state_dict(copy.deepcopy(empty))
        twin.plain.load_state_dict(copy.deepcopy(empty))
        twin.plain.param_groups[0]["fused"] = True  # torch takes this from the file too
        twin.backward(1)
        twin.step()
        twin.check("a fresh state")

    run(body)


# Torch's load_state_dict casts states to the parameter's dtype: accelerate#3979,
# TransformerEngine#2424.
@pytest.mark.parametrize("master", ["split", "fp32", "none"])
@stages
def test_states_of_16_bit_parameters_survive_both_ways_through_a_file(stage, master):
    def body(rank, world_size):
        def build():
            model = LinearForm(SHAPES, torch.bfloat16)
            precision = zeroshard.Precision(master=master)
            return model, zeroshard.AdamW(model, lr=1e-3, stage=stage, precision=precision)

        def train_on(model, optimizer, draws):
            for draw in draws:
                model(coefficients(model, rank, world_size, draw)).backward()
                optimizer.step()
                optimizer.zero_grad()
            return weights(model)

        model, optimizer = build()
        start = train_on(model, optimizer, range(5))
        local = through_file(optimizer.state_dict(), weights_only=False)
        full = consolidated(rank, optimizer)
        for entry in full["state"].values():
            assert entry["exp_avg"].dtype == torch.float32
            assert entry["exp_avg_sq"].dtype == torch.float32
        expected = train_on(model, optimizer, range(5, 13))
        expected_state = consolidated(rank, optimizer)
        for which, state in (("local", local), ("full", full)):
            fresh, again = build()
            fresh.load_state_dict(start)
            again.load_state_dict(state)
            assert_same(train_on(fresh, again, range(5, 13)), expected, which)
            # The masters too, to the last bit: they ride along.
            assert_states_equal(consolidated(rank, again), expected_state)

    run(body)


# accelerate: `prepare` takes the state out and puts it back in.
@stages
def test_loading_its_own_state_changes_nothing(stage):
    def body(rank, world_size):
        for dtype in (torch.float32, torch.bfloat16):
            model, other = LinearForm(SHAPES, dtype), LinearForm(SHAPES, dtype)
            optimizer = zeroshard.AdamW(model, lr=1e-3, stage=stage)
            plain = zeroshard.AdamW(other, lr=1e-3, stage=stage)
            for step in range(6):
                optimizer.load_state_dict(optimizer.state_dict())
                for one, its in ((model, optimizer), (other, plain)):
                    one(coefficients(one, rank, world_size, step)).backward()
                    its.step()
                    its.zero_grad()
            assert_same(weights(model), weights(other), str(dtype))

    run(body)


@stages
def test_unknown_keys_of_groups_and_schedulers_survive(stage):
    def body(rank, world_size):
        twin = Twin(rank, world_size, stage=stage)
        twin.optimizer.param_groups[0]["name"] = "all"
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(twin.optimizer, T_max=6)
        twin.backward(0)
        twin.step()
        scheduler.step()
        state = consolidated(rank, twin.optimizer)
        again = Twin(rank, world_size, stage=stage)
        again.optimizer.load_state_dict(state)
        group = again.optimizer.param_groups[0]
        assert group["name"] == "all"
        assert group["initial_lr"] == 1e-2
        assert group["lr"] == twin.optimizer.param_groups[0]["lr"]
        torch.optim.lr_scheduler.CosineAnnealingLR(again.optimizer, T_max=6, last_epoch=1)

    run(body)


@stages
def test_a_state_of_another_shape_is_refused_and_nothing_changes(stage):
    def body(rank, world_size):
        twin = Twin(rank, world_size, stage=stage)
        twin.backward(0)
        twin.step()
        good = copy.deepcopy(twin.plain.state_dict())
        fewer = copy.deepcopy(good)
        fewer["param_groups"][0]["params"].pop()
        more_groups = copy.deepcopy(good)
        more_groups["param_groups"].append(copy.deepcopy(good["param_groups"][0]))
        misshapen = copy.deepcopy(good)
        misshapen["state"][0]["exp_avg"] = torch.zeros(3, 3)
        for wrong in (fewer, more_groups, misshapen):
            with pytest.raises(ValueError):
                twin.optimizer.load_state_dict(wrong)
            twin.backward(1)
            twin.step()
            twin.check("nothing has changed")

    run(body)


@stages
def test_hooks_of_state_dict_and_load_fire(stage):
    def body(rank, world_size):
        twin, calls = Twin(rank, world_size, stage=stage), []
        optimizer = twin.optimizer
        optimizer.register_state_dict_pre_hook(lambda *_: calls.append("before saving"))
        optimizer.register_state_dict_post_hook(lambda *_: calls.append("after saving"))
        optimizer.register_load_state_dict_pre_hook(lambda *_: calls.append("before loading"))
        optimizer.register_load_state_dict_post_hook(lambda *_: calls.append("after loading"))
        optimizer.load_state_dict(optimizer.state_dict())
        assert calls == ["before saving", "after saving", "before loading", "after loading"]

    run(body)


@stages
def test_a_scheduler_resumed_with_the_state_trains_on_bitwise(stage):
    def body(rank, world_size):
        def build():
            model = letters()
            optimizer = zeroshard.AdamW(decay_groups(model), lr=1e-2, model=model, stage=stage)
            return (
                model,
                optimizer,
                torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-2, total_steps=9),
            )

        def train_on(model, optimizer, scheduler, batches):
            for batch in batches:
                train(model, optimizer, [batch])
                scheduler.step()
            return weights(model)

        batches = letter_batches(rank)
        model, optimizer, scheduler = build()
        train_on(model, optimizer, scheduler, batches[:3])
        files = [optimizer.state_dict(), scheduler.state_dict()]
        with gathered(model):
            files = [through_file(f, weights_only=False) for f in (model.state_dict(), *files)]
        expected = train_on(model, optimizer, scheduler, batches[3:])
        again = build()
        for one, file in zip(again, files, strict=True):
            one.load_state_dict(file)
        assert_same(train_on(*again, batches[3:]), expected, "resumed")

    run(body)


@stages
def test_a_plain_checkpoint_of_foreach_adamw_is_taken(stage):
    """A run begun with torch's default AdamW goes on under zeroshard."""

    def body(rank, world_size):
        plain_model = LinearForm(SHAPES)
        plain = torch.optim.AdamW(plain_model.parameters(), lr=1e-2)
        for step in range(2):
            parts = [coefficients(plain_model, r, world_size, step) for r in range(world_size)]
            plain_step(plain_model, plain, averaged(parts, world_size))
        model = LinearForm(SHAPES, seed=3)
        optimizer = zeroshard.AdamW(model, lr=1e-2, stage=stage)
        model.load_state_dict(plain_model.state_dict())
        optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
        fused = torch.optim.AdamW(plain_model.parameters(), lr=1e-2, fused=True)
        state = copy.deepcopy(plain.state_dict())
        state["param_groups"][0]["fused"] = True
        fused.load_state_dict(state)
        for step in range(2, 4):
            parts = [coefficients(model, r, world_size, step) for r in range(world_size)]
            plain_step(plain_model, fused, averaged(parts, world_size))
            model(parts[rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same(weights(model), weights(plain_model), "foreach checkpoint")
        assert_ranks_agree(weights(model), "foreach checkpoint")

    run(body)
