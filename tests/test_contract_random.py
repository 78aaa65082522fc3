"""Random training scripts end bitwise as torch's: what no list of cases thinks of."""

import copy
import random
from dataclasses import dataclass

import pytest
import torch
from models import SHAPES, Twin, attribute, averaged, coefficients, writing
from ranks import run

NAMES = list(SHAPES)


@dataclass(frozen=True)
class Action:
    kind: str
    draw: int
    name: str  # the parameter it is about
    used: list[set[str]]  # by rank: what a backward uses


def write_script(rng, world_size, num_actions=14):
    script = []
    for draw in range(num_actions):
        used = []
        for _ in range(world_size):
            share = rng.choice([0.3, 0.8, 1.0])
            used.append({n for n in NAMES if rng.random() < share} or {rng.choice(NAMES)})
        kind = rng.choice(["backward", "backward", "defer", *ACTIONS])
        script.append(Action(kind, draw, rng.choice(NAMES), used))
    return script


def both(twin):
    return twin.model, twin.plain_model


def backward_twice(twin, action):
    def twice(loss):
        loss.backward(retain_graph=True)
        loss.backward()

    names = names_of(twin, action)
    twin.backward(action.draw, names, backward=twice)
    ranks = range(twin.world_size)
    twin.expect(
        averaged(
            [coefficients(twin.model, r, twin.world_size, action.draw, names(r)) for r in ranks],
            twin.world_size,
        )
    )


def step(twin, action):
    twin.step()


def step_and_keep(twin, action):
    twin.optimizer.step()
    twin.plain.step()


def drop_by_optimizer(twin, action):
    twin.zero_grad()


def drop_by_model(twin, action):
    for model in both(twin):
        model.zero_grad()


def drop_one(twin, action):
    for model in both(twin):
        getattr(model, action.name).grad = None


def zero_in_place(twin, action):
    twin.zero_grad(set_to_none=False)


def halve(twin, action):
    for model in both(twin):
        for p in model.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)


def ask_autograd(twin, action):
    trainable = [p for p in twin.model.parameters() if p.requires_grad]
    mine = coefficients(twin.model, twin.rank, twin.world_size, 99)
    torch.autograd.grad(twin.model(mine), trainable)


def write(twin, action):
    for model in both(twin):
        with writing(model), torch.no_grad():
            getattr(model, action.name).mul_(0.5).add_(0.25)


def freeze_or_unfreeze(twin, action):
    frozen = not getattr(twin.model, action.name).requires_grad
    if frozen or len(trainable_names(twin)) > 3:
        for model in both(twin):
            getattr(model, action.name).requires_grad_(frozen)


def reload(twin, action):
    twin.optimizer.load_state_dict(copy.deepcopy(twin.optimizer.state_dict()))


def step_on_a_plain_gradient(twin, action):
    for model in both(twin):
        p = getattr(model, action.name)
        p.grad = torch.full_like(p, float(action.draw + 1))
    twin.step()


ACTIONS = {
    function.__name__: function
    for function in (
        backward_twice,
        step,
        step_and_keep,
        drop_by_optimizer,
        drop_by_model,
        drop_one,
        zero_in_place,
        halve,
        ask_autograd,
        write,
        freeze_or_unfreeze,
        reload,
        step_on_a_plain_gradient,
    )
}
# What needs no synced gradients; before anything else a deferred backward must be synced.
FREE = {"drop_by_optimizer", "drop_by_model", "drop_one", "ask_autograd", "write"}
FREE |= {"freeze_or_unfreeze", "backward_twice"}


def trainable_names(twin):
    return {attribute(name) for name, p in twin.model.named_parameters() if p.requires_grad}


def names_of(twin, action):
    """Every rank's backward must reach something trainable."""
    trainable = trainable_names(twin)
    used = [names if names & trainable else names | trainable for names in action.used]
    return lambda rank: used[rank]


def play(rank, world_size, stage, seed):
    rng = random.Random(seed)
    settings = {"weight_decay": rng.choice([0.0, 0.3])}
    bucket_mb = rng.choice([25, 1e-3, 2e-3, 4e-3])
    twin = Twin(rank, world_size, settings=settings, stage=stage, bucket_mb=bucket_mb)
    played, is_local = [], False
    for action in write_script(rng, world_size):
        kind = action.kind
        if is_local and kind in ACTIONS.keys() - FREE:
            kind = "backward"
        played.append(kind)
        if kind == "defer":
            with twin.optimizer.no_sync():
                twin.backward(action.draw, names_of(twin, action))
        elif kind == "backward":
            twin.backward(action.draw, names_of(twin, action))
        else:
            ACTIONS[kind](twin, action)
        if kind in ("backward", "backward_twice", "drop_by_optimizer", "drop_by_model"):
            is_local = False
        is_local |= kind == "defer"
        what = f"seed {seed}, bucket_mb={bucket_mb}: {' '.join(played)}"
        if not is_local:
            twin.check_gradients(what)
        twin.check(what)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_random_training_script_is_bitwise_torchs(stage, seed):
    run(lambda rank, world_size: play(rank, world_size, stage, seed), 2 + seed % 2, timeout_s=20)
