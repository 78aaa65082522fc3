"""A training script in plain PyTorch, as it is under DDP and with the one line swapped.

The scenario is written once and played twice: `same_as_ddp` compares every number bit for bit.
"""

from dataclasses import dataclass
from pydoc_data import topics

import torch
import torch.nn.functional as F
from models import Feed, assert_same, weights
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zeroshard

__all__ = [
    "STAGES",
    "Reader",
    "Script",
    "Small",
    "batch_of",
    "loss_of",
    "same_as_ddp",
    "start",
]

STAGES = (1, 2, 3)
TEXT = torch.tensor(list("".join(topics.topics.values()).encode()))


class Reader(nn.Module):
    """Predicts the next byte; embedding and head are tied, and no size divides another."""

    def __init__(self, width=14, depth=2):
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Feed(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Small(nn.Module):
    """The same task with as few parameters as have units under stage 3, for many short runs."""

    def __init__(self, width=6):
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def batch_of(rank, step, world_size=2, *, rows=2, length=13):
    """[rows, length] bytes of the documentation of Python, others for every rank and step."""
    numel = rows * length
    at = (step * world_size + rank) * numel
    return TEXT[at : at + numel].view(rows, length)


def loss_of(forward, batch):
    return F.cross_entropy(forward(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


@dataclass
class Script:
    """What a script has at hand. Stage 0 is DDP with torch's AdamW."""

    stage: int
    model: nn.Module
    forward: nn.Module
    optimizer: torch.optim.Optimizer

    def rewrap(self):
        """DDP looks once at what requires a gradient; ours follows by itself."""
        if self.stage == 0:
            self.forward = DistributedDataParallel(self.model)

    def backward(self, rank, step):
        loss = loss_of(self.forward, batch_of(rank, step))
        loss.backward()
        return loss.detach()

    def train(self, rank, steps):
        for step in steps:
            self.backward(rank, step)
            self.optimizer.step()
            self.optimizer.zero_grad()


def start(stage, *, make=Reader, groups=None, **settings):
    """The top of the script: model and optimizer, and DDP in stage 0.

    Args:
        stage: 0 for DDP with torch's AdamW.
        make: builds the model.
        groups: what of the model is given to the optimizer; None: all parameters.
        settings: of the optimizer.
    """
    torch.manual_seed(0)
    model = make()
    settings = {"lr": 1e-2, "weight_decay": 0.1, **settings}
    params = model.parameters() if groups is None else groups(model)
    if stage == 0:
        optimizer = torch.optim.AdamW(params, fused=True, **settings)
        return Script(stage, model, DistributedDataParallel(model), optimizer)
    optimizer = zeroshard.AdamW(params, model=model, stage=stage, **settings)
    return Script(stage, model, model, optimizer)


def same_as_ddp(play, *, stages=STAGES, what="", **options):
    """Play `play(script)` under DDP and in every stage: what it notes and all weights are equal.

    `play` returns a dict of tensors, or None; the final weights are compared anyway.
    """
    expected = played(play, 0, options)
    for stage in stages:
        assert_same(played(play, stage, options), expected, f"{what} stage {stage}")


def played(play, stage, options):
    script = start(stage, **options)
    noted = play(script) or {}
    return {**noted, **{f"weights of {n}": value for n, value in weights(script.model).items()}}
