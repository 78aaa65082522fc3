"""Swapping zeroshard.AdamW in changes nothing but memory and speed."""

import copy
import inspect

import pytest
import torch
from models import (
    SHAPES,
    LinearForm,
    Twin,
    assert_close,
    assert_ranks_agree,
    assert_same,
    averaged,
    coefficients,
    decay_groups,
    full_gradients,
    letter_batches,
    letters,
    loss_of,
    plain_step,
    train,
    train_with_ddp,
    weights,
)
from ranks import run
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

import zeroshard
from zeroshard.errors import ConfigError

stages = pytest.mark.parametrize("stage", [1, 2, 3])
# What only the update knows of, or the param groups: the same code whatever is sharded.
replicated_stages = pytest.mark.parametrize("stage", [1, 2])


def train_with_zeroshard(rank, stage, *, steps=5, groups=decay_groups, **options):
    model = letters()
    options = {"lr": 1e-2, "model": model, "stage": stage, **options}
    optimizer = zeroshard.AdamW(groups(model), **options)
    return train(model, optimizer, letter_batches(rank)[:steps])


@stages
def test_two_ranks_end_bitwise_as_ddp_with_fused_adamw(stage):
    def body(rank, world_size):
        got = train_with_zeroshard(rank, stage)
        assert_same(got, train_with_ddp(rank), f"stage {stage}")
        assert_ranks_agree(got, f"stage {stage}")

    run(body)


@stages
def test_default_arguments_train_as_torchs_defaults(stage):
    def body(rank, world_size):
        model = letters()
        optimizer = zeroshard.AdamW(model.parameters(), stage=stage, model=model)
        got = train(model, optimizer, letter_batches(rank))
        replica = letters()
        plain = torch.optim.AdamW(replica.parameters(), fused=True)
        forward = DistributedDataParallel(replica)
        expected = train(replica, plain, letter_batches(rank), forward=forward)
        assert_same(got, expected, "defaults")

    run(body)


def test_stage_two_is_the_default():
    def body(rank, world_size):
        assert inspect.signature(zeroshard.AdamW).parameters["stage"].default == 2
        model, other = letters(), letters()
        got = train(model, zeroshard.AdamW(model, lr=1e-2), letter_batches(rank))
        expected = train(other, zeroshard.AdamW(other, lr=1e-2, stage=2), letter_batches(rank))
        assert_same(got, expected, "no stage given")

    run(body)


@stages
def test_bucket_size_changes_nothing(stage):
    def body(rank, world_size):
        expected = train_with_ddp(rank, steps=3)
        for bucket_mb in (1e-4, 1e-3, 4e-3, 1, 1000):
            got = train_with_zeroshard(rank, stage, steps=3, bucket_mb=bucket_mb)
            assert_same(got, expected, f"bucket_mb={bucket_mb}")

    run(body)


@pytest.mark.parametrize("world_size", [1, 3, 4])
@stages
def test_any_number_of_ranks_is_bitwise_adamw_on_the_average(stage, world_size):
    def body(rank, world_size):
        for bucket_mb in (25, 1e-3):
            twin = Twin(rank, world_size, stage=stage, bucket_mb=bucket_mb)
            for step in range(4):
                twin.backward(step)
                twin.check_gradients(f"step {step}, bucket_mb={bucket_mb}")
                twin.step()
                twin.check(f"step {step}, bucket_mb={bucket_mb}")

    run(body, world_size)


def test_three_ranks_end_bitwise_equal_in_all_stages_and_close_to_ddp():
    def body(rank, world_size):
        first = train_with_zeroshard(rank, 1, eps=1e-2)
        for stage, bucket_mb in ((2, 25), (2, 2e-3), (3, 25), (3, 2e-3)):
            got = train_with_zeroshard(rank, stage, eps=1e-2, bucket_mb=bucket_mb)
            assert_same(got, first, f"stage {stage}, bucket_mb={bucket_mb}")
        # DDP divides before it adds. For gradients below 1 the average moves by 3 roundings,
        # 3 * 2**-24; u = m / (sqrt(v) + eps) by at most 2 / eps times that, 3.6e-5; a weight by lr
        # times that and its own rounding, 6e-7 a step. Five steps, and 3 for the feedback through
        # the model. (The weights themselves move by 1e-2.)
        assert_close(first, train_with_ddp(rank, eps=1e-2), "stage 1", atol=1e-5)

    run(body, 3)


HYPERPARAMETERS = {
    "maximize": {"maximize": True},
    "no decay": {"weight_decay": 0.0},
    "no averages": {"betas": (0.0, 0.0)},
    "no first average": {"betas": (0.0, 0.999)},
    "slow averages": {"betas": (0.99, 0.9999)},
    "eps of zero": {"eps": 0.0},
    "large eps": {"eps": 1.0},
    "lr of zero": {"lr": 0.0},
    "large lr": {"lr": 2.0, "weight_decay": 0.6},
    "tensor lr": {"lr": torch.tensor(3e-3)},
    "integers": {"lr": 1, "weight_decay": 0},
}


@replicated_stages
def test_every_hyperparameter_means_what_it_means_in_torch(stage):
    def body(rank, world_size):
        for name, settings in HYPERPARAMETERS.items():
            twin = Twin(rank, world_size, stage=stage, settings=settings)
            for step in range(3):
                twin.backward(step)
                twin.step()
            twin.check(name)

    run(body)


def two_groups(model):
    parameters = list(model.parameters())
    return [
        {"params": parameters[::2], "lr": 3e-3, "betas": (0.8, 0.95)},
        {"params": []},
        {"params": parameters[1::2], "weight_decay": 0.3, "eps": 1e-4},
    ]


# DeepSpeed#6873: lr lost per group. transformers#43692: empty groups removed.
@stages
def test_every_group_keeps_its_own_hyperparameters_and_its_place(stage):
    def body(rank, world_size):
        twin = Twin(rank, world_size, stage=stage, groups=two_groups)
        scheduler = lr_scheduler.LambdaLR(twin.optimizer, [lambda step: 1.0] * 3)
        for step in range(3):
            twin.backward(step)
            twin.step()
            scheduler.step()
        twin.check("groups")
        assert len(twin.optimizer.param_groups) == 3
        assert twin.optimizer.param_groups[1]["params"] == []

    run(body)


@stages
def test_hyperparameters_changed_between_steps_act_at_the_next(stage):
    def body(rank, world_size):
        twin = Twin(rank, world_size, stage=stage, groups=two_groups)
        for step in range(4):
            for optimizer in (twin.optimizer, twin.plain):
                group = optimizer.param_groups[step % 3]
                group["lr"] = 0.02 * (step + 1)
                group["weight_decay"] = 0.1 * step
                group["betas"] = (0.7, 0.9 + 0.01 * step)
                group["eps"] = 10.0 ** -(step + 2)
                group["maximize"] = step % 2 == 1
            twin.backward(step)
            twin.step()
            twin.check(f"step {step}")

    run(body)


SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.8**step),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=3e-2, total_steps=9),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o,
        [
            lr_scheduler.LinearLR(o, 0.1, total_iters=2),
            lr_scheduler.CosineAnnealingLR(o, T_max=5),
        ],
        milestones=[2],
    ),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-2, step_size_up=2),
}


@pytest.mark.parametrize("tensor_lr", [False, True])
@replicated_stages
def test_schedulers_act_as_on_torchs_adamw(stage, tensor_lr):
    def rates(model):
        rate = torch.tensor(1e-2) if tensor_lr else 1e-2
        parameters = list(model.parameters())
        return [
            {"params": parameters[:3], "lr": rate},
            {"params": parameters[3:], "lr": rate * 0.5},
        ]

    def body(rank, world_size):
        for name, schedule in SCHEDULERS.items():
            twin = Twin(rank, world_size, stage=stage, groups=rates)
            ours, plain = schedule(twin.optimizer), schedule(twin.plain)
            for step in range(5):
                twin.backward(step)
                twin.step()
                ours.step()
                plain.step()
                twin.check(f"{name}, step {step}")
            assert [float(r) for r in ours.get_last_lr()] == [float(r) for r in plain.get_last_lr()]

    run(body)


@stages
def test_a_tensor_lr_stays_the_users_own_tensor(stage):
    def body(rank, world_size):
        rate = torch.tensor(1e-2)
        twin = Twin(rank, world_size, stage=stage, settings={"lr": rate})
        assert twin.optimizer.param_groups[0]["lr"] is rate
        for step, value in enumerate((1e-2, 3e-2, 0.0)):
            rate.fill_(value)
            twin.backward(step)
            twin.step()
            twin.check(f"lr {value}")

    run(body)


INPUTS = {
    "a module": lambda model: model,
    "a list": lambda model: list(model.parameters()),
    "a generator": lambda model: (p for p in model.parameters()),
    "named pairs": lambda model: model.named_parameters(),
    "groups": lambda model: [{"params": list(model.parameters())}],
    "a group of a generator": lambda model: [{"params": model.parameters()}],
    "a group of pairs": lambda model: [{"params": list(model.named_parameters())}],
    "one tensor to a group": lambda model: [{"params": p} for p in model.parameters()],
    "a tuple": lambda model: tuple(model.parameters()),
}


@stages
def test_all_that_torchs_adamw_takes_is_taken(stage):
    def body(rank, world_size):
        expected = None
        for name, select in INPUTS.items():
            twin_model = LinearForm(SHAPES)
            optimizer = zeroshard.AdamW(select(twin_model), lr=1e-2, model=twin_model, stage=stage)
            for step in range(2):
                twin_model(coefficients(twin_model, rank, world_size, step)).backward()
                optimizer.step()
                optimizer.zero_grad()
            got = weights(twin_model)
            expected = expected or got
            assert_same(got, expected, name)
            held = [id(p) for group in optimizer.param_groups for p in group["params"]]
            assert held == [id(p) for p in twin_model.parameters()], name

    run(body)


@stages
def test_groups_and_defaults_are_torchs(stage):
    def body(rank, world_size):
        for select in (lambda m: m.named_parameters(), lambda m: m.parameters(), two_groups):
            model = LinearForm(SHAPES)
            plain = torch.optim.AdamW(select(LinearForm(SHAPES)))
            ours = zeroshard.AdamW(select(model), model=model, stage=stage)
            assert ours.defaults.keys() == plain.defaults.keys()
            assert len(ours.param_groups) == len(plain.param_groups)
            for group, wanted in zip(ours.param_groups, plain.param_groups, strict=True):
                assert group.keys() == wanted.keys()
                for key in wanted.keys() - {"params", "fused", "foreach"}:
                    assert group[key] == wanted[key], key

    run(body)


def test_the_signature_begins_as_torchs():
    ours = inspect.signature(zeroshard.AdamW).parameters
    plain = inspect.signature(torch.optim.AdamW).parameters
    for name, parameter in plain.items():
        assert ours[name].default == parameter.default, name
        assert ours[name].kind == parameter.kind, name
    positional = [n for n, p in plain.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert list(ours)[: len(positional)] == positional


@stages
def test_arguments_that_only_choose_an_implementation_are_accepted(stage):
    def body(rank, world_size):
        expected = train_with_zeroshard(rank, stage, steps=2)
        for options in (
            {"fused": True},
            {"fused": False},
            {"foreach": True},
            {"foreach": False},
            {"capturable": False},
            {"capturable": True},
        ):
            got = train_with_zeroshard(rank, stage, steps=2, **options)
            assert_same(got, expected, str(options))

    run(body)


@stages
def test_it_is_an_optimizer_whose_state_is_keyed_by_the_users_parameters(stage):
    def body(rank, world_size):
        model = letters()
        parameters = list(model.parameters())
        optimizer = zeroshard.AdamW(decay_groups(model), model=model, stage=stage)
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert {id(p) for p in optimizer.state} == {id(p) for p in parameters}
        assert all(optimizer.state[p] for p in parameters)
        train(model, optimizer, letter_batches(rank)[:2])
        assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
        assert {id(p) for p in optimizer.state} == {id(p) for p in parameters}

    run(body)


@stages
def test_hooks_of_a_step_fire_once_and_in_order(stage):
    def body(rank, world_size):
        model, calls = letters(), []
        optimizer = zeroshard.AdamW(model, stage=stage)
        optimizer.register_step_pre_hook(lambda opt, *_: calls.append(("before", opt)))
        optimizer.register_step_post_hook(lambda opt, *_: calls.append(("after", opt)))
        everywhere = register_optimizer_step_post_hook(
            lambda opt, *_: calls.append(("anywhere", opt))
        )
        try:
            train(model, optimizer, letter_batches(rank)[:2])
        finally:
            everywhere.remove()
        # The order of torch: its own hooks of every optimizer come after those of this one.
        assert [word for word, _ in calls] == ["before", "after", "anywhere"] * 2
        assert all(opt is optimizer for _, opt in calls)

    run(body)


@stages
def test_a_hook_before_the_step_may_change_gradients(stage):
    def body(rank, world_size):
        twin = Twin(rank, world_size, stage=stage)

        def halve(optimizer, *_):
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad.mul_(0.5)

        twin.optimizer.register_step_pre_hook(halve)
        twin.plain.register_step_pre_hook(halve)
        twin.backward(0)
        twin.step()
        twin.check("halved")

    run(body)


@stages
def test_a_closure_is_called_once_with_gradients_enabled(stage):
    def body(rank, world_size):
        def close_over(model, forward, optimizer):
            for batch in letter_batches(rank)[:3]:
                calls = []

                def closure(batch=batch, calls=calls):
                    calls.append(torch.is_grad_enabled())
                    optimizer.zero_grad()
                    loss = loss_of(forward, batch)
                    loss.backward()
                    return loss

                with torch.no_grad():
                    loss = optimizer.step(closure)
                assert calls == [True]
                assert torch.is_tensor(loss)
            return weights(model)

        model, replica = letters(), letters()
        got = close_over(model, model, zeroshard.AdamW(model, lr=1e-2, stage=stage))
        plain = torch.optim.AdamW(replica.parameters(), lr=1e-2, fused=True)
        expected = close_over(replica, DistributedDataParallel(replica), plain)
        assert_same(got, expected, "closure")
        assert zeroshard.AdamW(letters(), stage=stage).step() is None

    run(body)


@stages
def test_gradients_zeroed_in_place_still_move_averages_and_decay(stage):
    def body(rank, world_size):
        twin = Twin(rank, world_size, stage=stage, settings={"weight_decay": 0.5})
        twin.backward(0)
        twin.step(set_to_none=False)
        assert all(p.grad is not None for p in twin.model.parameters())
        assert not any(g.any() for g in full_gradients(twin.model).values())
        twin.step(set_to_none=False)
        twin.check("a step on zeros")
        twin.backward(1, lambda rank: {"matrix", "bias"})
        twin.step(set_to_none=False)
        twin.check("some zeros, some not")
        twin.backward(2)
        twin.step()
        twin.check("all")

    run(body)


@stages
def test_the_models_zero_grad_drops_gradients(stage):
    def body(rank, world_size):
        twin = Twin(rank, world_size, stage=stage)
        for step in range(3):
            twin.backward(2 * step)
            twin.model.zero_grad()
            twin.plain.zero_grad()
            twin.backward(2 * step + 1)
            twin.optimizer.step()
            twin.plain.step()
            twin.model.zero_grad()
            twin.plain.zero_grad()
            twin.check(f"step {step}")

    run(body)


@stages
def test_gradients_set_to_none_by_hand_are_dropped(stage):
    def body(rank, world_size):
        twin = Twin(rank, world_size, stage=stage)
        twin.backward(0)
        twin.step()
        twin.backward(1)
        for model in (twin.model, twin.plain_model):
            model.matrix.grad = None
            model.scalar.grad = None
        twin.step()
        twin.check("two dropped")
        twin.backward(2)
        twin.step()
        twin.check("and back")

    run(body)


@stages
def test_two_steps_on_one_gradient_apply_it_twice(stage):
    def body(rank, world_size):
        twin = Twin(rank, world_size, stage=stage)
        for step in range(2):
            twin.backward(step)
            twin.optimizer.step()
            twin.plain.step()
            twin.step()
            twin.check(f"step {step}")

    run(body)


@stages
def test_a_step_without_a_gradient_does_nothing(stage):
    def body(rank, world_size):
        twin = Twin(rank, world_size, stage=stage)
        twin.step()
        twin.check("before any backward")
        twin.backward(0)
        twin.step()
        twin.step()
        twin.check("between backwards")
        twin.backward(1)
        twin.step()
        twin.check("averages and counters have not moved meanwhile")

    run(body)


# Megatron-LM#5974, DeepSpeed#5104: a dummy step that created the state made updates 1.3x too small.
@stages
def test_the_first_update_is_the_learning_rate_and_steps_are_counted_exactly(stage):
    def body(rank, world_size):
        model = LinearForm({"weight": (300,)})
        before = weights(model)["weight"]
        optimizer = zeroshard.AdamW(model, lr=0.125, weight_decay=0.0, eps=1e-12, stage=stage)
        gradients = coefficients(model, rank, world_size)
        model(gradients).backward()
        optimizer.step()
        mean = averaged(
            [coefficients(model, r, world_size) for r in range(world_size)], world_size
        )["weight"]
        # m / sqrt(v) is the gradient's sign at the first step, up to a few roundings.
        moved = weights(model)["weight"] - before
        torch.testing.assert_close(moved, -0.125 * mean.sign(), rtol=0, atol=4e-6)
        optimizer.step()
        optimizer.consolidate_state_dict(to=0)
        if rank == 0:
            assert float(optimizer.state_dict()["state"][0]["step"]) == 2.0

    run(body)


@stages
def test_without_a_process_group_it_is_plain_adamw_with_plain_gradients(stage):
    def body(rank, world_size):
        model, replica = letters(), letters()
        optimizer = zeroshard.AdamW(decay_groups(model), lr=1e-2, model=model, stage=stage)
        plain = torch.optim.AdamW(decay_groups(replica), lr=1e-2, fused=True)
        for batch in letter_batches(0)[:3]:
            for _ in range(2):
                loss_of(model, batch).backward()
                loss_of(replica, batch).backward()
            assert all(type(p.grad) is torch.Tensor for p in model.parameters())
            norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.3) for m in (model, replica)]
            assert torch.equal(*norms)
            optimizer.step()
            plain.step()
            optimizer.zero_grad()
            plain.zero_grad()
        assert_same(weights(model), weights(replica), "no process group")
        with optimizer.no_sync():
            loss_of(model, batch).backward()
        loss_of(replica, batch).backward()
        optimizer.step()
        plain.step()
        assert_same(weights(model), weights(replica), "no_sync changes nothing")

    run(body, 1, process_group=False)


@stages
def test_without_a_process_group_all_else_works_too(stage):
    def body(rank, world_size):
        twin = Twin(rank, world_size, stage=stage, max_grad_norm=1e6)
        twin.backward(0)
        twin.step()
        before = weights(twin.model)
        twin.model({"bias": torch.full((23,), float("nan"))}).backward()
        twin.optimizer.step()
        twin.optimizer.zero_grad()
        assert_same(weights(twin.model), before, "skipped")
        assert int(twin.optimizer.skipped_steps) == 1
        twin.backward(1, lambda rank: {"matrix", "empty", "pair"})
        assert twin.model.bias.grad is None
        assert twin.optimizer.clip_grad_norm_(1e6).item() > 0
        twin.step()
        twin.check("after a skip")
        with zeroshard.gather(twin.model, writeback=True), torch.no_grad():
            twin.model.matrix.fill_(2.0)
            twin.plain_model.matrix.fill_(2.0)
        twin.backward(2)
        twin.step()
        twin.check("after a write")
        twin.optimizer.consolidate_state_dict(to=0)
        state = copy.deepcopy(twin.optimizer.state_dict())
        for index, wanted in twin.plain.state_dict()["state"].items():
            assert_same(dict(state["state"][index]), dict(wanted), f"state {index}")
        twin.optimizer.load_state_dict(state)
        twin.backward(3)
        twin.step()
        twin.check("after a load")
        assert twin.optimizer.memory()["moments"] >= 8 * 1000
        twin.optimizer.close()

    run(body, 1, process_group=False)


def test_many_processes_without_a_process_group_are_refused():
    def body(rank, world_size):
        with pytest.raises(ConfigError, match="WORLD_SIZE"):
            zeroshard.AdamW(letters())

    run(body, 2, process_group=False)


# pytorch#149205, accelerate#3394: an optimizer that holds dead tensors trains nothing.
@stages
def test_the_optimizer_may_be_built_before_or_after_the_first_forward(stage):
    def body(rank, world_size):
        expected = train_with_ddp(rank, steps=2)
        model = letters()
        batches = letter_batches(rank)
        loss_of(model, batches[3]).backward()
        model.zero_grad()
        optimizer = zeroshard.AdamW(decay_groups(model), lr=1e-2, model=model, stage=stage)
        got = train(model, optimizer, batches[:2])
        assert_same(got, expected, "after a backward")

    run(body)


@stages
def test_the_rest_of_training_is_left_alone(stage):
    """Evaluation, no_grad forwards and gradients of inputs between the steps change nothing."""

    def body(rank, world_size):
        expected = train_with_ddp(rank, steps=3)
        model = letters()
        optimizer = zeroshard.AdamW(decay_groups(model), lr=1e-2, model=model, stage=stage)
        for batch in letter_batches(rank)[:3]:
            with torch.no_grad():
                model.eval()
                loss_of(model, batch)
                model.train()
            loss_of(model, batch)  # a forward that no backward follows
            if rank == 0 and stage < 3:  # an evaluation on one rank only; stage 3's communicate
                with torch.no_grad():
                    loss_of(model, letter_batches(7)[0])
            loss_of(model, batch).backward()
            with torch.inference_mode():
                loss_of(model, batch)
            optimizer.step()
            optimizer.zero_grad()
        assert_same(weights(model), expected, "evaluation between")

    run(body)


@pytest.mark.filterwarnings("ignore:autocast saves:UserWarning")
@stages
def test_autocast_trains_bitwise_as_ddp(stage):
    def body(rank, world_size):
        def trained(model, forward, optimizer):
            for batch in letter_batches(rank)[:3]:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = loss_of(forward, batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            return weights(model)

        model, replica = letters(), letters()
        plain = torch.optim.AdamW(replica.parameters(), lr=1e-2, fused=True)
        expected = trained(replica, DistributedDataParallel(replica), plain)
        got = trained(model, model, zeroshard.AdamW(model, lr=1e-2, stage=stage))
        assert_same(got, expected, "autocast")

    run(body)


@replicated_stages
def test_two_optimizers_share_one_model(stage):
    """Disjoint parameters under two optimizers, as GAN and actor-critic trainers do."""

    def body(rank, world_size):
        model, plain_model = LinearForm(SHAPES), LinearForm(SHAPES)
        halves = [["matrix", "empty", "scalar", "single"], ["pair", "block", "experts", "bias"]]

        def build(kind, model, **options):
            return [
                kind([getattr(model, name) for name in half], lr=lr, **options)
                for half, lr in zip(halves, (1e-2, 3e-2), strict=True)
            ]

        ours = build(zeroshard.AdamW, model, stage=stage)
        plain = build(torch.optim.AdamW, plain_model, fused=True)
        for step in range(3):
            parts = [coefficients(model, r, world_size, step) for r in range(world_size)]
            model(parts[rank]).backward()
            for one, other in zip(ours, plain, strict=True):
                one.step()
                mean = averaged(parts, world_size)
                plain_step(plain_model, other, mean)
            for one in ours:
                one.zero_grad()
        assert_same(weights(model), weights(plain_model), "two optimizers")

    run(body)
