"""torch itself: schedulers, hooks of the optimizer, scaling, clipping, groups, state."""

import copy
import io
import math
import pickle

import pytest
import torch
import torch.distributed as dist
from consumers import Consumer, tried
from models import assert_ranks_agree, weights
from ranks import run
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch_script import STAGES, Reader, Small, batch_of, loss_of, same_as_ddp, start

import zeroshard
from zeroshard.errors import ConfigError

CONSUMER = Consumer("PyTorch", "torch", use="`zeroshard.AdamW(model, lr=...)`, without DDP")

ALL = "1, 2, 3"
inf = math.inf


# --- schedulers

# Short cycles, so that a few steps go through all phases of each.
SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [lambda n: 0.8**n, lambda n: 1 / (n + 1)]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda n: 0.7),
    "StepLR": lambda o: lr_scheduler.StepLR(o, step_size=2, gamma=0.3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3], gamma=0.3),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.3, total_iters=2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.7),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=3, power=2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=3),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=2),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(o, 3)],
        milestones=[2],
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.7)]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, "max", patience=1, factor=0.3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-2, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, [1e-2, 3e-2], total_steps=6),
}


@tried("Every class of `torch.optim.lr_scheduler`: lr, betas and weights of every step", stages=ALL)
def test_every_scheduler_steps_float_and_tensor_rates_as_with_torchs_adamw():
    schedulers = {
        name
        for name, thing in vars(lr_scheduler).items()
        if isinstance(thing, type) and issubclass(thing, lr_scheduler.LRScheduler)
    }
    assert schedulers == {*SCHEDULERS, "LRScheduler", "_LRScheduler"}, "one has no recipe here"

    def groups(model):
        return [
            {"params": [p for p in model.parameters() if p.ndim > 1], "lr": 1e-2},
            {"params": [p for p in model.parameters() if p.ndim < 2], "lr": torch.tensor(2e-2)},
        ]

    def body(rank, world_size):
        def play(script, make):
            noted = {}
            optimizer = script.optimizer
            scheduler = make(optimizer)
            for step in range(5):
                loss = script.backward(rank, step)
                optimizer.step()
                optimizer.zero_grad()
                if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
                    dist.all_reduce(loss)
                    scheduler.step(loss)
                else:
                    scheduler.step()
                for number, group in enumerate(optimizer.param_groups):
                    assert isinstance(group["lr"], torch.Tensor) == (number == 1)
                    said = [group["lr"], *group["betas"], scheduler.get_last_lr()[number]]
                    noted[f"step {step}, group {number}"] = torch.tensor(
                        [float(value) for value in said], dtype=torch.float64
                    )
                for name, value in weights(script.model).items():
                    noted[f"step {step}: {name}"] = value
            assert len({tuple(v.tolist()) for key, v in noted.items() if "group 0" in key}) > 1
            return noted

        for name, make in SCHEDULERS.items():
            same_as_ddp(
                lambda script, make=make: play(script, make), groups=groups, make=Small, what=name
            )

    run(body, timeout_s=180)


# --- hooks


@tried(
    "Hooks of `step`, `state_dict` and `load_state_dict`, an optimizer's and global ones",
    stages=ALL,
)
def test_every_hook_of_an_optimizer_fires_once_and_in_order():
    def body(rank, world_size):
        def calls(script):
            heard = []
            optimizer = script.optimizer

            def hear(word, answer=None):
                def hook(this, *args):
                    assert this is optimizer, word
                    heard.append(word)
                    return answer(*args) if answer else None

                return hook

            def renamed(state):
                return {**state, "by": "hook"}

            def named_back(state):
                assert state["by"] == "hook"
                return {key: value for key, value in state.items() if key != "by"}

            everywhere = [
                register_optimizer_step_pre_hook(hear("before every step")),
                register_optimizer_step_post_hook(hear("after every step")),
            ]
            optimizer.register_step_pre_hook(hear("before step"))
            optimizer.register_step_pre_hook(hear("closure", lambda a, k: ((*a, lambda: 7.0), k)))
            optimizer.register_step_post_hook(hear("after step"))
            optimizer.register_state_dict_pre_hook(hear("before state_dict"))
            optimizer.register_state_dict_post_hook(hear("after state_dict", renamed))
            optimizer.register_state_dict_pre_hook(hear("first of all"), prepend=True)
            optimizer.register_load_state_dict_pre_hook(hear("before load", named_back))
            optimizer.register_load_state_dict_post_hook(hear("after load"))
            try:
                for step in range(2):
                    script.backward(rank, step)
                    assert optimizer.step() == 7.0
                    optimizer.zero_grad()
                state = optimizer.state_dict()
                assert state["by"] == "hook"
                optimizer.load_state_dict(state)
                script.train(rank, [2])
            finally:
                for handle in everywhere:
                    handle.remove()
            optimizer.zero_grad()
            return heard

        expected = calls(start(0))
        assert expected.count("after step") == 3
        assert len(expected) == 5 * 3 + 3 + 2
        for stage in STAGES:
            assert calls(start(stage)) == expected, f"stage {stage}"

    run(body)


@tried("A `state_dict` post hook that replaces the state, local and consolidated", stages=ALL)
def test_hooks_of_state_dict_see_and_decide_what_it_returns():
    def body(rank, world_size):
        for stage in (0, *STAGES):
            script = start(stage)
            script.train(rank, [0])
            number, seen = len(list(script.model.parameters())), []

            def only_groups(optimizer, state, seen=seen):
                seen.append(len(state["state"]))
                return {"param_groups": state["param_groups"], "saved by": "a hook"}

            script.optimizer.register_state_dict_post_hook(only_groups)
            for consolidated in (False, True):
                if stage and consolidated:
                    script.optimizer.consolidate_state_dict(to=0)
                state = script.optimizer.state_dict()
                assert set(state) == {"param_groups", "saved by"}, f"stage {stage}"
            assert seen == [number] * 2, f"stage {stage}"

    run(body)


# --- scaling and clipping


OVERFLOWS = {1: "embed.weight", 4: "norm.bias"}


def with_inf(gradient):
    gradient = gradient.clone()
    gradient.view(-1)[0] = inf
    return gradient


@tried("`torch.amp.GradScaler` with an inf on one rank: all skip, scales stay equal", stages=ALL)
@pytest.mark.parametrize("unscaled", [False, True], ids=["scaled", "unscaled and clipped"])
def test_grad_scaler_skips_everywhere_when_one_rank_overflows(unscaled):
    def body(rank, world_size):
        def play(script):
            noted, poisoned = {}, set()
            # One element, which one rank computes and one rank, perhaps another, holds afterwards.
            for name in ("embed.weight", "norm.bias"):
                script.model.get_parameter(name).register_hook(
                    lambda grad, name=name: with_inf(grad) if name in poisoned else grad
                )
            # Powers of two, so that scaling rounds nothing.
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
            for step in range(6):
                before = weights(script.model)
                loss = loss_of(script.forward, batch_of(rank, step))
                overflows = step in OVERFLOWS
                poisoned.clear()
                if overflows and rank == step % world_size:
                    poisoned.add(OVERFLOWS[step])
                scaler.scale(loss).backward()
                if unscaled:
                    scaler.unscale_(script.optimizer)
                    nn.utils.clip_grad_norm_(script.model.parameters(), 0.05, inf)
                scaler.step(script.optimizer)
                scaler.update()
                script.optimizer.zero_grad()
                scale = torch.tensor(scaler.get_scale())
                assert_ranks_agree({"scale": scale}, f"step {step}")
                noted[f"scale after step {step}"] = scale
                after = weights(script.model)
                stood = all(torch.equal(after[name], before[name]) for name in after)
                assert stood == overflows, f"stage {script.stage}, step {step}"
                noted.update({f"step {step}: {name}": value for name, value in after.items()})
            return noted

        same_as_ddp(play)

    run(body)


# An infinity norm and a clamp round nothing, so these clip bitwise as under DDP. Every norm of the
# small vectors is one of a slice that is empty on one of the ranks.
CLIPPINGS = {
    "clip_grad_norm_ with inf": lambda ps: nn.utils.clip_grad_norm_(ps, 0.02, inf),
    "of a generator": lambda ps: nn.utils.clip_grad_norm_((p for p in ps), 0.02, inf),
    "with foreach": lambda ps: nn.utils.clip_grad_norm_(ps, 0.02, inf, foreach=True),
    "without foreach": lambda ps: nn.utils.clip_grad_norm_(ps, 0.02, inf, foreach=False),
    "each by itself": lambda ps: [nn.utils.clip_grad_norm_(p, 0.02, inf) for p in ps],
    "with error_if_nonfinite": lambda ps: nn.utils.clip_grad_norm_(
        ps, 0.02, inf, error_if_nonfinite=True
    ),
    "in two calls": lambda ps: nn.utils.clip_grads_with_norm_(
        ps, 0.02, nn.utils.get_total_norm([p.grad for p in ps], inf)
    ),
    "by value": lambda ps: nn.utils.clip_grad_value_(ps, 0.01),
    "by value with foreach": lambda ps: nn.utils.clip_grad_value_(ps, 0.01, foreach=True),
    "by value without foreach": lambda ps: nn.utils.clip_grad_value_(ps, 0.01, foreach=False),
}


@tried(
    "`clip_grad_norm_`, `clip_grad_value_`, `get_total_norm`, `clip_grads_with_norm_`", stages=ALL
)
def test_everything_that_clips_in_torch_clips_as_under_ddp():
    def body(rank, world_size):
        unclipped = {}

        def play(script, clip):
            noted = {}
            parameters = list(script.model.parameters())
            for step in range(2):
                script.backward(rank, step)
                norm = clip(parameters)
                if norm is not None:
                    norms = [float(n) for n in (norm if isinstance(norm, list) else [norm])]
                    noted[f"norm of step {step}"] = torch.tensor(norms)
                script.optimizer.step()
                script.optimizer.zero_grad()
            if clip is not nothing:
                changed = any(
                    not torch.equal(value, unclipped[name])
                    for name, value in weights(script.model).items()
                )
                assert changed, "the maximum has no effect"
            return noted

        def nothing(parameters):
            return None

        script = start(0)
        play(script, nothing)
        unclipped.update(weights(script.model))
        for name, clip in CLIPPINGS.items():
            same_as_ddp(lambda script, clip=clip: play(script, clip), what=name)

    run(body)


# --- groups, closures, zero_grad


@tried("Unfreezing layers mid-training by `add_param_group`", stages=ALL)
def test_layers_unfrozen_and_added_as_a_group_train_as_under_ddp():
    def body(rank, world_size):
        def partly_frozen():
            model = Reader(depth=3)
            model.blocks[:2].requires_grad_(False)
            return model

        def trainable(model):
            return [p for p in model.parameters() if p.requires_grad]

        def play(script):
            script.train(rank, range(2))
            for step, block in ((2, script.model.blocks[1]), (4, script.model.blocks[0])):
                block.requires_grad_(True)
                script.optimizer.add_param_group({"params": block.parameters(), "lr": 3e-3})
                script.rewrap()
                script.train(rank, [step, step + 1])
            assert len(script.optimizer.param_groups) == 3

        same_as_ddp(play, make=partly_frozen, groups=trainable)

    run(body)


@tried("`requires_grad` turned off and on again between steps", stages=ALL)
def test_parameters_may_be_frozen_and_thawed_between_steps():
    def body(rank, world_size):
        def play(script):
            for step in range(6):
                for number, block in enumerate(script.model.blocks):
                    block.requires_grad_(step % 3 != number)
                script.rewrap()
                script.train(rank, [step])

        same_as_ddp(play)

    run(body)


@tried("Closures: `optimizer.step(closure)`", stages=ALL)
def test_a_closure_computes_the_loss_inside_of_step():
    def body(rank, world_size):
        def play(script):
            noted = {}
            optimizer = script.optimizer

            for step in range(3):

                def closure(step=step):
                    optimizer.zero_grad()
                    loss = loss_of(script.forward, batch_of(rank, step))
                    loss.backward()
                    nn.utils.clip_grad_value_(script.model.parameters(), 0.05)
                    return loss

                with torch.no_grad():
                    loss = optimizer.step(closure=closure) if step else optimizer.step(closure)
                noted[f"loss {step}"] = loss.detach()
            assert optimizer.step(None) is None  # on the gradients that the closure left
            return noted

        same_as_ddp(play)

    run(body)


@tried("`zero_grad(set_to_none=False)`, of the optimizer and of the model", stages=ALL)
def test_gradients_zeroed_in_place_train_on_as_under_ddp():
    def body(rank, world_size):
        def play(script, whose):
            for step in range(4):
                if step != 2:  # in one step nothing arrives: averages move and weights decay
                    script.backward(rank, step)
                script.optimizer.step()
                getattr(script, whose).zero_grad(set_to_none=False)
                for p in script.model.parameters():
                    assert p.grad is not None
                    assert not p.grad.any()

        for whose in ("optimizer", "model"):
            same_as_ddp(lambda script, whose=whose: play(script, whose), what=whose)

    run(body)


# --- copies and files


@tried("`copy.deepcopy` and `pickle` of its groups", stages=ALL)
def test_groups_can_be_copied_and_pickled():
    def body(rank, world_size):
        for stage in STAGES:
            script = start(stage)
            script.train(rank, range(2))
            groups = script.optimizer.param_groups
            options = [{k: v for k, v in group.items() if k != "params"} for group in groups]
            for copied in (copy.deepcopy(groups), pickle.loads(pickle.dumps(groups))):
                assert [
                    {k: v for k, v in group.items() if k != "params"} for group in copied
                ] == options
                for p, q in zip(groups[0]["params"], copied[0]["params"], strict=True):
                    assert p is not q
                    assert p.shape == q.shape
                    # Under stage 3 both read as NaN.
                    assert torch.equal(p, q) or (stage == 3 and q.isnan().all())
            script.train(rank, [2])

    run(body)


@tried(
    "`copy.deepcopy` and `pickle` of the optimizer itself",
    stages=ALL,
    result="a copy holds groups and this rank's state; to step it is refused: build a new one",
)
def test_a_copy_of_the_optimizer_has_its_state_and_refuses_to_step():
    def body(rank, world_size):
        for stage in STAGES:
            script = start(stage)
            script.train(rank, range(2))
            optimizer = script.optimizer
            for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
                assert type(copied) is zeroshard.AdamW
                assert copied.defaults == optimizer.defaults
                for p, q in zip(
                    optimizer.param_groups[0]["params"],
                    copied.param_groups[0]["params"],
                    strict=True,
                ):
                    ours, its = optimizer.state[p], copied.state[q]
                    assert torch.equal(its["step"], ours["step"])
                    assert torch.equal(its["exp_avg"].to_local(), ours["exp_avg"].to_local())
                with pytest.raises(ConfigError, match="copy"):
                    copied.step()
            script.train(rank, [2])  # the original goes on

    run(body)


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@tried("`torch.load(weights_only=True)` of its state, local and consolidated", stages=ALL)
@pytest.mark.parametrize("consolidated", [False, True], ids=["local", "consolidated"])
def test_its_state_comes_back_through_a_weights_only_file(consolidated):
    def body(rank, world_size):
        def play(script):
            script.train(rank, range(2))
            if script.stage and consolidated:
                saved = [None]
                script.optimizer.consolidate_state_dict(to=0)
                if rank == 0:
                    saved = [through_a_file(script.optimizer.state_dict())]
                dist.broadcast_object_list(saved)
                state = saved[0]
            else:
                state = through_a_file(script.optimizer.state_dict())
            kept = weights(script.model)
            script.train(rank, [2])
            if script.stage == 3:
                with zeroshard.gather(script.model, writeback=True):
                    restore(script.model, kept)
            else:
                restore(script.model, kept)
            script.optimizer.load_state_dict(state)
            script.train(rank, [3, 4])

        same_as_ddp(play)

    def restore(model, values):
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(values[name])

    run(body)
