"""What only owners can say: the memory that comes and goes between the points of a step."""

import pytest
import torch
from ranks import run
from torch import nn

import zeroshard
from zeroshard.memory.profile import MemoryProfiler

WIDTH = 64


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8))

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()


def most_held(rank, world_size, stage):
    """What a profiler says was held at most, and what the optimizer itself would say."""
    torch.manual_seed(0)
    model = Stack()
    optimizer = zeroshard.AdamW(model, stage=stage, bucket_mb=0.02)
    pool, most = optimizer.engine.pool, 0
    lend = pool.borrow

    def borrow(*args):
        nonlocal most
        buffer = lend(*args)
        most = max(most, pool.nbytes)
        return buffer

    pool.borrow = borrow
    with MemoryProfiler(model, optimizer) as profiler:
        for _ in range(3):
            model(torch.ones(4, WIDTH)).backward()
            optimizer.step()
            optimizer.zero_grad()
    report = profiler.report()
    units = [sum(a.nbytes for a, _ in unit.arenas) for unit in optimizer.engine.sharding.units]
    return dict(report.maxima), most, units, dict(report.points["after_backward"])


@pytest.fixture(scope="module")
def held():
    return {stage: run(lambda r, w, stage=stage: most_held(r, w, stage))[0] for stage in (1, 2, 3)}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_buffers_of_collectives_are_communication_while_they_are_lent(held, stage):
    maxima, most, _, _ = held[stage]
    assert most > 0
    # gloo's thread may hold a few flags a moment longer than the step does.
    assert most <= maxima["communication"] <= most + 64


def test_a_few_units_are_whole_at_a_time(held):
    maxima, _, units, at_rest = held[3]
    whole = max(units)
    assert sum(units) >= 8 * whole
    assert whole <= maxima["unsharded_parameters"] <= 3 * whole
    assert "unsharded_parameters" not in at_rest


@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_that_autograd_made_are_gradients_until_they_are_sent(held, stage):
    maxima, _, _, at_rest = held[stage]
    one = 4 * WIDTH * WIDTH
    assert maxima["gradients"] >= at_rest["gradients"] + one
