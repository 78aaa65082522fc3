"""Saved there and loaded here: every pair of what may be different between the two.

Gradients are integers whose averages do not depend on the number of ranks, so training goes on bit
for bit at any number of them.
"""

import itertools
import random
from typing import NamedTuple

import pytest
import torch
from models import SHAPES, SplitForm, assert_same, averaged, plain_step
from ranks import run
from training_forms import BF16, Training, share, two_groups

WORLD_SIZES = (1, 2, 3, 4)


class Pair(NamedTuple):
    saved_at: int  # ranks
    loaded_at: int
    saved_stage: int
    loaded_stage: int
    master: str  # "param": the parameters are fp32; else they are bf16
    moments: str

    @property
    def settings(self):
        dtype = torch.float32 if self.master == "param" else BF16
        master = "none" if self.master == "param" else self.master
        return {
            "form": lambda seed: SplitForm(SHAPES, dtype, seed),
            "precision": {"master": master, "moments": self.moments},
        }

    @property
    def name(self):
        return "-".join(map(str, self))


COLUMNS = Pair(
    saved_at=WORLD_SIZES,
    loaded_at=WORLD_SIZES,
    saved_stage=(1, 2, 3),
    loaded_stage=(1, 2, 3),
    master=("param", "split", "fp32", "none"),
    moments=("fp32", "bf16", "int8"),
)


def meetings(row):
    """Which values of two columns a row brings together."""
    return {(a, row[a], b, row[b]) for a, b in itertools.combinations(range(len(row)), 2)}


ALL_MEETINGS = set().union(*map(meetings, itertools.product(*COLUMNS)))


def covering(seed=0, draws=60):
    """Few rows in which every value of a column meets every value of every other column.

    Greedy: of some random rows that bring together a pair which is missing yet, the one that brings
    together most.
    """
    draw, left, rows = random.Random(seed), sorted(ALL_MEETINGS), []
    while left:
        a, value_a, b, value_b = draw.choice(left)
        candidates = []
        for _ in range(draws):
            row = [draw.choice(column) for column in COLUMNS]
            row[a], row[b] = value_a, value_b
            candidates.append(Pair(*row))
        rows.append(max(candidates, key=lambda row: len(meetings(row) & set(left))))
        left = sorted(set(left) - meetings(rows[-1]))
    return rows


PAIRS = covering()


def test_every_value_of_a_column_meets_every_value_of_every_other():
    met = set().union(*map(meetings, PAIRS))
    assert met == ALL_MEETINGS
    assert len(PAIRS) < 30


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of checkpoints, and what came of every training by its fifth step."""
    folder = tmp_path_factory.mktemp("pairs")

    def body(rank, world_size):
        ends = {}
        for pair in PAIRS:
            if pair.saved_at == world_size:
                training = Training(rank, world_size, pair.saved_stage, **pair.settings)
                training.steps(0, 1)
                training.save(folder / pair.name)
                training.steps(2, 3, 4)
                ends[pair.name] = training.bits()
        return ends

    ends = {}
    for world_size in WORLD_SIZES:
        ends.update(run(body, world_size)[0])
    return folder, ends


@pytest.mark.parametrize("loaded_at", WORLD_SIZES)
def test_training_continues_bit_for_bit(saved, loaded_at):
    folder, ends = saved

    def body(rank, world_size):
        for pair in PAIRS:
            if pair.loaded_at != world_size:
                continue
            training = Training(
                rank, world_size, pair.loaded_stage, seed=9, bucket_mb=4e-3, **pair.settings
            )
            training.steps(7)  # something that has to be forgotten
            assert training.load(folder / pair.name) == {"step": 2}
            training.steps(2, 3, 4)
            found = training.bits()
            if rank == 0:
                assert_same(found, ends[pair.name], str(pair))

    run(body, loaded_at)


def test_what_continues_is_torchs_adamw(saved):
    _, ends = saved
    model = SplitForm(SHAPES)
    plain = torch.optim.AdamW(two_groups(model), lr=1e-2, fused=True)
    for draw in range(5):
        plain_step(model, plain, averaged([share(model, 0, 1, draw)], 1))
    expected = dict(model.named_parameters())
    exact = [pair for pair in PAIRS if (pair.master, pair.moments) == ("param", "fp32")]
    assert exact
    for pair in exact:
        got = {name: ends[pair.name][name] for name in expected}
        assert_same(got, expected, str(pair))
