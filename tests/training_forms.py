"""Trainings whose every step has the same bits at any number of ranks, to be cut in two."""

from functools import cache

import torch
from models import SHAPES, SplitForm, coefficients, weights

import zeroshard

BF16 = torch.bfloat16
PARTS = 12  # of a global batch; 1, 2, 3 and 4 ranks take as many each


@cache
def _parts(names_and_shapes, draw):
    """The gradient of every part of a global batch, by attribute."""
    model = SplitForm(dict(names_and_shapes))
    found = []
    for part in range(PARTS):
        gradients = coefficients(model, part, 1, draw)
        found.append({name.rpartition(".")[2]: value for name, value in gradients.items()})
    return found


def share(model, rank, world_size, draw, names=None):
    """What one rank's backward gives: the average over ranks does not depend on how many there are.

    Integers of magnitude 4 * PARTS at most, whose sum over ranks is below 256: exact in every
    order, in 16 bits too.
    """
    shapes = {name.rpartition(".")[2]: tuple(p.shape) for name, p in model.named_parameters()}
    count = PARTS // world_size
    mine = _parts(tuple(shapes.items()), draw)[rank * count : (rank + 1) * count]
    result = {}
    for name, _ in model.named_parameters():
        attribute = name.rpartition(".")[2]
        if names is None or attribute in names:
            result[name] = world_size * sum(part[attribute] for part in mine)
    return result


def two_groups(model):
    """One with options of its own."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": rest, "weight_decay": 0.0, "lr": 3e-2, "tag": "rest"},
    ]


class Training:
    """A `SplitForm` and its optimizer on one rank.

    Args:
        rank: of this process among those that train.
        world_size: how many these are.
        stage: of the optimizer.
        form: makes the model from a seed.
        groups: makes its param groups.
        precision: arguments of `Precision`.
        options: of the optimizer.
    """

    def __init__(
        self,
        rank,
        world_size,
        stage,
        *,
        seed=0,
        form=lambda seed: SplitForm(SHAPES, seed=seed),
        groups=two_groups,
        precision=None,
        **options,
    ):
        self.rank, self.world_size = rank, world_size
        self.model = form(seed)
        self.optimizer = zeroshard.AdamW(
            groups(self.model),
            lr=1e-2,
            model=self.model,
            stage=stage,
            precision=zeroshard.Precision(**(precision or {})),
            **options,
        )

    def backward(self, draw, names=None):
        self.model(share(self.model, self.rank, self.world_size, draw, names)).backward()

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, *draws, names=None):
        for draw in draws:
            self.backward(draw, names)
            self.step()

    def save(self, path, *args, **extra):
        return zeroshard.save_checkpoint(path, self.model, self.optimizer, *args, **extra)

    def load(self, path, *args, **extra):
        return zeroshard.load_checkpoint(path, self.model, self.optimizer, *args, **extra)

    def bits(self):
        """Weights, buffers and the whole state on the first rank, by name and by position."""
        found = {**weights(self.model), **dict(self.model.named_buffers())}
        self.optimizer.consolidate_state_dict()
        state = self.optimizer.state_dict()["state"] if self.rank == 0 else {}
        for position, entry in state.items():
            found.update({f"{position}.{key}": value.clone() for key, value in entry.items()})
        return found
