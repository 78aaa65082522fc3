"""What is saved beside weights and state: schedulers, averages, random states, values of ranks."""

import math
import random

import numpy
import pytest
import torch
from models import assert_same
from ranks import run
from torch.optim import lr_scheduler
from training_forms import Training

import zeroshard
from zeroshard.checkpoint import PerRank
from zeroshard.errors import CheckpointError, ConfigError


def warmed_up(optimizer):
    parts = [
        lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
        lr_scheduler.CosineAnnealingLR(optimizer, T_max=9),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[4])


SCHEDULERS = {
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 5, 6], gamma=0.5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=[0.1, 0.2], total_steps=12),
    "SequentialLR": warmed_up,
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 5), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [lambda n: 1 / (1 + n), lambda n: 0.5**n]),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
}


def test_schedulers_continue(tmp_path):
    def go(training, scheduler, draws):
        for draw in draws:
            training.steps(draw)
            is_fed = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
            scheduler.step(*([torch.tensor(3.0)] if is_fed else []))
        return [(g["lr"], g["betas"]) for g in training.optimizer.param_groups]

    def saved(rank, world_size):
        ends = {}
        for name, make in SCHEDULERS.items():
            training = Training(rank, world_size, 2)
            scheduler = make(training.optimizer)
            go(training, scheduler, range(3))
            training.save(tmp_path / name, scheduler)
            options = go(training, scheduler, range(3, 7))
            ends[name] = (training.bits(), options, scheduler.state_dict())
        return ends

    def loaded(rank, world_size):
        for name, make in SCHEDULERS.items():
            training = Training(rank, world_size, 3, seed=9)
            scheduler = make(training.optimizer)
            go(training, scheduler, range(20, 21))
            assert training.load(tmp_path / name, scheduler) == {"step": 3}
            options = go(training, scheduler, range(3, 7))
            bits, wanted, state = ends[name]
            assert options == wanted, name
            found = training.bits()
            assert_same(found, {key: bits[key] for key in found}, name)
            assert type(scheduler.state_dict()) is dict
            assert scheduler.state_dict() == state, name

    ends = run(saved, 2)[0]
    for world_size in (2, 3):
        run(loaded, world_size)


def draws():
    """One number of every generator that training may draw from."""
    return (torch.rand(()).item(), random.gauss(0, 1), numpy.random.standard_normal())


def test_random_numbers_of_every_rank_continue(tmp_path):
    def saved(rank, world_size):
        torch.manual_seed(10 + rank)
        random.seed(20 + rank)
        numpy.random.seed(30 + rank)
        draws()  # of two Gaussians that are drawn at once the second waits
        training = Training(rank, world_size, 1)
        training.save(tmp_path)
        return [draws() for _ in range(3)]

    def loaded(rank, world_size):
        training = Training(rank, world_size, 3)
        torch.manual_seed(5)
        random.seed(5)
        numpy.random.seed(5)
        training.load(tmp_path)
        return [draws() for _ in range(3)]

    numbers = run(saved, 2)
    assert numbers[0] != numbers[1]
    assert run(loaded, 2) == numbers
    # States of two ranks do not say what three should draw: theirs stay as they are.
    assert len(set(map(str, run(loaded, 3)))) == 1


class Position:
    """As a stateful data loader has it: another state on every rank."""

    def __init__(self, at):
        self.at = at

    def state_dict(self):
        return {"at": self.at, "seen": torch.arange(self.at)}

    def load_state_dict(self, state):
        self.at = state["at"]
        assert state["seen"].tolist() == list(range(self.at))


def test_values_of_ranks_are_kept_for_each_and_others_once(tmp_path):
    same = {
        "epoch": 3,
        "best": math.inf,
        "name": "a run",
        "nothing": None,
        "table": {"a.b": [1, (2.5, True)], 7: b"bytes", "of": {"dtype": torch.bfloat16}},
        "tensor": torch.arange(6).view(2, 3),
        "nan": float("nan"),
        "none of it": {},
    }

    def saved(rank, world_size):
        training = Training(rank, world_size, 2)
        mine = {"order": [rank, rank + 10], "loss": torch.tensor(0.5 * rank)}
        training.save(tmp_path, data=Position(4 + rank), **mine, **same)

    def check_same(values):
        for name, wanted in same.items():
            got = values.pop(name)
            if name == "tensor":
                assert torch.equal(got, wanted)
            elif name == "nan":
                assert math.isnan(got)
            else:
                assert type(got) is type(wanted), name
                assert got == wanted, name

    def loaded(rank, world_size):
        training, data = Training(rank, world_size, 2), Position(0)
        values = training.load(tmp_path, data=data)
        assert data.at == 4 + rank
        check_same(values)
        assert values == {"order": [rank, rank + 10], "loss": 0.5 * rank, "step": 0}

    def elsewhere(rank, world_size):
        training = Training(rank, world_size, 2)
        values = training.load(tmp_path)
        check_same(values)
        assert all(type(values[n]) is PerRank for n in ("order", "loss", "data"))
        assert values["order"] == [[0, 10], [1, 11]]
        assert values["loss"] == [0.0, 0.5]
        assert [state["at"] for state in values["data"]] == [4, 5]

    run(saved, 2)
    run(loaded, 2)
    for world_size in (1, 3):
        run(elsewhere, world_size)


def test_a_gradient_scaler_continues(tmp_path):
    def go(training, scaler, draws):
        for draw in draws:
            training.backward(draw)
            for parameter in training.model.parameters():
                local = parameter.grad.to_local()
                local.mul_(scaler.get_scale())  # as of a loss that was scaled
                if draw == 4 and local.numel():
                    local.view(-1)[0] = math.inf
            scaler.scale(torch.ones(()))  # which makes what it counts in
            scaler.step(training.optimizer)
            scaler.update()
            training.optimizer.zero_grad()

    def make(enabled=True):
        return torch.amp.GradScaler("cpu", init_scale=2.0**7, growth_interval=3, enabled=enabled)

    def saved(rank, world_size):
        training, scaler = Training(rank, world_size, 2), make()
        go(training, scaler, range(4))
        training.save(tmp_path, scaler=scaler, off=make(enabled=False))
        state = scaler.state_dict()
        go(training, scaler, range(4, 7))
        return training.bits(), state, scaler.state_dict()

    bits, before, after = run(saved, 2)[0]
    assert (before["scale"], after["scale"]) == (2.0**8, 2.0**7)

    def loaded(rank, world_size):
        training, scaler = Training(rank, world_size, 3, seed=9), make()
        training.load(tmp_path, scaler=scaler, off=make(enabled=False))
        scaler.scale(torch.ones(()))
        assert scaler.state_dict() == before
        go(training, scaler, range(4, 7))
        assert scaler.state_dict() == after
        found = training.bits()
        assert_same(found, {key: bits[key] for key in found}, "scaled")

    run(loaded, 3)


def test_what_could_not_be_read_or_loaded_is_refused_by_name(tmp_path):
    def body(rank, world_size):
        training = Training(rank, world_size, 2)
        for value in ({1, 2}, object(), {"deep": [range(3)]}):
            with pytest.raises(ConfigError, match=r"'thing'.* as code"):
                training.save(tmp_path, thing=value)
        only_here = {"thing": {1, 2}} if rank == 1 else {"thing": [1, 2]}
        with pytest.raises(ConfigError, match="'thing' is a set"):
            training.save(tmp_path, **only_here)
        assert not any(tmp_path.glob("step-*"))
        training.save(tmp_path, thing=1)
        with pytest.raises(ConfigError, match="'thing' must have a load_state_dict"):
            training.load(tmp_path, thing=3)
        with pytest.raises(ConfigError, match="nothing to load other, scheduler from"):
            training.load(tmp_path, lr_scheduler.ConstantLR(training.optimizer), other=Position(1))

    run(body)


def test_values_that_some_ranks_have_are_kept_for_these(tmp_path):
    def saved(rank, world_size):
        extra = {"note": f"of rank {rank}"} if rank else {}
        Training(rank, world_size, 2).save(tmp_path, **extra)

    def loaded(rank, world_size):
        return Training(rank, world_size, 2).load(tmp_path)["note"]

    run(saved, 3)
    notes = [None, "of rank 1", "of rank 2"]
    assert run(loaded, 3) == notes
    assert run(loaded, 2) == [notes] * 2


def test_objects_that_differ_between_ranks_load_at_as_many_and_are_refused_at_others(tmp_path):
    def build(rank, world_size, at):
        training = Training(rank, world_size, 2)
        plateau = lr_scheduler.ReduceLROnPlateau(training.optimizer)
        plateau.step(torch.tensor(float(at)))  # a loss of this rank's own
        return training, plateau, Position(at)

    def saved(rank, world_size):
        training, plateau, data = build(rank, world_size, rank + 1)
        training.save(tmp_path, plateau, data=data)

    def loaded(rank, world_size):
        training, plateau, data = build(rank, world_size, 9)
        training.load(tmp_path, plateau, data=data)
        assert (plateau.best, data.at) == (rank + 1, rank + 1)

    def elsewhere(rank, world_size):
        training, plateau, data = build(rank, world_size, 9)
        for objects in ({"scheduler": plateau}, {"data": data}):
            (name,) = objects
            with pytest.raises(CheckpointError, match=f"has '{name}' of each of 2 ranks apart"):
                training.load(tmp_path, **objects)
        training.steps(0)  # nothing was half-loaded
        values = training.load(tmp_path)
        assert [state["best"] for state in values["scheduler"]] == [1, 2]
        assert [state["at"] for state in values["data"]] == [1, 2]

    run(saved, 2)
    run(loaded, 2)
    for world_size in (1, 3):
        run(elsewhere, world_size)


def test_averages_of_the_weights_continue(tmp_path):
    def bits_of(training, average):
        state = average.state_dict()
        assert state["decay"] == 0.9
        whole = {f"average of {name}": v.full_tensor() for name, v in state["average"].items()}
        return {**training.bits(), **whole}

    def saved(rank, world_size):
        ends = {}
        for stage in (1, 2, 3):
            training = Training(rank, world_size, stage)
            average = zeroshard.EMA(training.optimizer, decay=0.9)
            training.steps(0, 1)
            training.save(tmp_path / str(stage), ema=average)
            training.steps(2, 3, 4)
            ends[stage] = bits_of(training, average)
        return ends

    def loaded(rank, world_size):
        for stage in (1, 2, 3):
            training = Training(rank, world_size, 1 + stage % 3, seed=9)
            average = zeroshard.EMA(training.optimizer, decay=0.5)
            training.steps(7)
            training.load(tmp_path / str(stage), ema=average)
            assert average.num_updates == 2
            training.steps(2, 3, 4)
            found = bits_of(training, average)
            assert_same(found, {name: ends[stage][name] for name in found}, f"{stage=}")

    ends = run(saved, 2)[0]
    for world_size in (2, 3):
        run(loaded, world_size)
