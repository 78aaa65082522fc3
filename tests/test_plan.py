"""The plan against what optimizers and models really hold, and against what was published."""

import dataclasses
import functools
import itertools
import json

import pytest
import torch
import torch.nn.functional as F
from ranks import run
from torch import nn

import zeroshard
from zeroshard import Precision
from zeroshard.errors import ConfigError
from zeroshard.memory.models import shape_of
from zeroshard.memory.plan import plan
from zeroshard.memory.presets import PRESETS
from zeroshard.memory.states import held_by

WIDTH = 24
BUCKET_MB = 0.06
POINTS = ("constructed", "after_backward", "after_step", "after_zero_grad")
MASTERS, MOMENTS = ("split", "fp32", "none"), ("fp32", "bf16", "int8")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.widen = nn.Linear(WIDTH, 200)
        self.mix = nn.Linear(200, 180)  # large enough to be sent from where it lies
        self.narrow = nn.Linear(180, WIDTH, bias=False)

    def forward(self, x):
        return x + self.narrow(self.mix(self.widen(self.norm(x))))


class Small(nn.Module):
    """Blocks, a table, a head of its own, a scalar, and a parameter without elements."""

    def __init__(self, *, freezes=False):
        super().__init__()
        self.table = nn.Embedding(301, WIDTH)
        self.layers = nn.ModuleList([Block(), Block()])
        self.gain = nn.Parameter(torch.ones(()))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.head = nn.Linear(WIDTH, 301, bias=False)
        if freezes:
            self.layers[0].mix.requires_grad_(False)

    def forward(self, ids):
        x = self.table(ids) * self.gain + self.nothing.sum()
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def choices(dtype):
    """Precisions that parameters of a dtype can have."""
    masters = {"bf16": MASTERS, "fp16": ("fp32",), "fp32": ("auto",)}[dtype]
    for master, moments in itertools.product(masters, MOMENTS):
        yield Precision(master=master, moments=moments)
    yield Precision(reduce="fp32")
    yield Precision(reduce="wire16")
    yield Precision(reduce="param")
    if dtype == "fp32":
        yield Precision(param_dtype=torch.bfloat16)


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def measured(dtype, stage, precision, *, freezes=False, bucket_mb=BUCKET_MB, steps=2):
    """What an optimizer says that it holds, at each point of the last step."""
    torch.manual_seed(0)
    model = Small(freezes=freezes).to(DTYPES[dtype])
    options = {"stage": stage, "precision": precision, "bucket_mb": bucket_mb}
    optimizer = zeroshard.AdamW(model, lr=1e-3, **options)
    held = {"constructed": optimizer.memory()}
    ids = torch.arange(301)
    for _ in range(steps):
        model(ids).float().square().mean().backward()
        held["after_backward"] = optimizer.memory()
        optimizer.step()
        held["after_step"] = optimizer.memory()
        optimizer.zero_grad()
        held["after_zero_grad"] = optimizer.memory()
    optimizer.close()
    return held


@functools.cache
def shape(dtype, freezes):
    with torch.device("meta"):
        return shape_of(Small(freezes=freezes).to(DTYPES[dtype]))


def planned(dtype, stage, precision, *, freezes=False, bucket_mb=BUCKET_MB, **where):
    """The same by arithmetic."""
    options = {"stage": stage, "precision": precision, "bucket_mb": bucket_mb}
    report = plan(shape(dtype, freezes), transport="gloo", **options, **where)
    return {point: held_by(report.points, point) for point in POINTS}


def cases(world_size):
    """Every precision in every stage; of more than two ranks, in one of the stages."""
    every = [(dtype, precision) for dtype in DTYPES for precision in choices(dtype)]
    for number, (dtype, precision) in enumerate(every):
        for stage in (1, 2, 3):
            if world_size < 3 or number % 3 == stage % 3 or (dtype, number) == ("bf16", 0):
                yield dtype, stage, precision


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_states_are_those_of_a_running_optimizer_to_the_byte(world_size):
    every = list(cases(world_size))
    steps = 2 if world_size < 3 else 1
    found = run(lambda *_: [measured(*c, steps=steps) for c in every], world_size, timeout_s=120)
    for rank, by_case in enumerate(found):
        for case, held in zip(every, by_case, strict=True):
            expected = planned(*case, world_size=world_size, rank=rank, process_group=True)
            assert held == expected, (rank, case)
