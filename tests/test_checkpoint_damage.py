"""Checkpoints that are damaged, or of something else: named, passed over, and never half loaded."""

import pickle
import random
import re
import shutil

import pytest
import torch
import torch.distributed as dist
from models import LinearForm, coefficients
from ranks import run
from small_jobs import SHAPES, build, cut, entries, fingerprint, flip, logged, step

import zeroshard
from zeroshard.checkpoint.dcp_files import StoredChunks
from zeroshard.errors import CheckpointError, ConfigError

OLD, NEW = "step-000000000001", "step-000000000002"
FILES = [".metadata", "__0_0.distcp", "__1_0.distcp", "checkpoint.json", "checksums.json"]


class Counter:
    """What can be saved and loaded beside the optimizer; loading may fail."""

    def __init__(self):
        self.count, self.fails = 0, False

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        if self.fails:
            raise RuntimeError("the counter is broken")
        self.count = state["count"]


def save_twice(path, rank, world_size, *setting):
    """Two checkpoints in a folder, of training with a gradient that waits; their fingerprints."""
    model, optimizer = build(*setting)
    random.seed(rank)
    torch.manual_seed(rank)
    prints = []
    for draw in range(2):
        step(model, optimizer, rank, world_size, draw)
        model(coefficients(model, rank, world_size, 7)).backward()
        zeroshard.save_checkpoint(path, model, optimizer, counter=Counter(), note="x")
        prints.append(fingerprint(model, optimizer))
        optimizer.zero_grad()
    return prints


def another(rank, world_size, *setting):
    """A training that is somewhere else, with a gradient that waits."""
    model, optimizer = build(*setting, seed=9, lr=0.5)
    step(model, optimizer, rank, world_size, 5)
    model(coefficients(model, rank, world_size, 6)).backward()
    random.seed(99)
    torch.manual_seed(99)
    return model, optimizer


# --- damaged files


def places(checkpoint):
    """(file, byte) of one of each kind of thing in it, and many at random."""
    with open(checkpoint / ".metadata", "rb") as file:
        stored = pickle.load(file).storage_data
    found = []
    for index, info in stored.items():
        if index.fqn in KINDS:  # in the header of its archive, the data, and at the end
            for at in (0, 30, info.length // 2, info.length - 1):
                found.append((info.relative_path, info.offset + at))
    chance = random.Random(0)
    for name in FILES:
        size = (checkpoint / name).stat().st_size
        found += [(name, chance.randrange(size)) for _ in range(3)]
        found += [(name, 0), (name, size - 1)]
    return found


KINDS = (
    "model.matrix",
    "optimizer.state.matrix.exp_avg",
    "optimizer.state.matrix.exp_avg_codes",
    "optimizer.param_groups.0.lr",
    "gradients.matrix",
    "rng",
    "extra.note",
)


def spoilings(checkpoint):
    """(what it is, file, function of the file)."""
    for name in FILES:
        yield f"{name} is missing", name, lambda file: file.unlink()
        yield f"{name} is empty", name, lambda file: file.write_bytes(b"")
        yield f"{name} is cut off", name, cut
        yield f"{name} is too long", name, lambda file: file.write_bytes(file.read_bytes() + b"\0")
    for name, at in places(checkpoint):
        yield f"byte {at} of {name}", name, lambda file, at=at: flip(file, at)


@pytest.mark.parametrize("setting", [(2, "fp32"), (3, "int8")])
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_taken(setting, tmp_path):
    def body(rank, world_size):
        path = tmp_path / "job"
        old, _ = save_twice(path, rank, world_size, *setting)
        model, optimizer = another(rank, world_size, *setting)
        other = fingerprint(model, optimizer)
        alone = tmp_path / "alone" / NEW
        cases = list(spoilings(path / NEW))
        for number, (what, name, spoil) in enumerate(cases):
            has_another = number % 2 == 0
            dist.barrier()
            if rank == 0:
                shutil.rmtree(alone.parent, ignore_errors=True)
                if has_another:
                    shutil.copytree(path / OLD, alone.parent / OLD)
                shutil.copytree(path / NEW, alone)
                spoil(alone / name)
            dist.barrier()
            if has_another:
                with logged() as messages:
                    assert zeroshard.load_checkpoint(alone.parent, model, optimizer)["step"] == 1
                assert fingerprint(model, optimizer) == old, what
                if rank == 0:
                    said = [message for message in messages if str(alone / name) in message]
                    assert any("passed over" in message for message in said), what
                model, optimizer = another(rank, world_size, *setting)
                continue
            with pytest.raises(CheckpointError) as caught:
                zeroshard.load_checkpoint(alone.parent, model, optimizer)
            assert str(alone / name) in str(caught.value), f"{what}: {caught.value}"
            assert fingerprint(model, optimizer) == other, what
        return len(cases)

    counts = run(body, timeout_s=120)
    assert counts[0] == counts[1] >= 50


def test_one_that_is_chosen_by_its_own_path_is_not_replaced_by_another(tmp_path):
    def body(rank, world_size):
        save_twice(tmp_path, rank, world_size)
        dist.barrier()
        if rank == 0:
            flip(tmp_path / NEW / "__1_0.distcp", 1000)
        dist.barrier()
        model, optimizer = another(rank, world_size)
        other = fingerprint(model, optimizer)
        for _ in range(2):
            with pytest.raises(CheckpointError, match=f"{NEW}/__1_0.distcp is damaged: bytes 0 to"):
                zeroshard.load_checkpoint(tmp_path / NEW, model, optimizer)
        assert fingerprint(model, optimizer) == other
        step(model, optimizer, rank, world_size)

    run(body)


def test_everything_that_is_wrong_with_several_is_said(tmp_path):
    def body(rank, world_size):
        save_twice(tmp_path, rank, world_size)
        dist.barrier()
        if rank == 0:
            (tmp_path / NEW / ".metadata").unlink()
            cut(tmp_path / OLD / "__0_0.distcp")
        dist.barrier()
        model, optimizer = another(rank, world_size)
        message = f"{OLD}/__0_0.distcp has [0-9]+ bytes, .*; .*{NEW}/.metadata is missing"
        for missing_ok in (False, True):
            with pytest.raises(CheckpointError, match=message):
                zeroshard.load_checkpoint(tmp_path, model, optimizer, missing_ok=missing_ok)

    run(body)


def test_strays_in_a_folder_are_left_alone(tmp_path):
    def body(rank, world_size):
        _, new = save_twice(tmp_path, rank, world_size)
        dist.barrier()
        if rank == 0:
            (tmp_path / "latest").write_text("")
            (tmp_path / "notes.txt").write_text("of somebody else")
            (tmp_path / "step-000000000009").write_text("of somebody else")
            (tmp_path / "step-000000000008").mkdir()
            (tmp_path / "step-000000000008" / "notes.txt").write_text("of somebody else")
            (tmp_path / "step-1").mkdir()
            (tmp_path / ".step-000000000007.unfinished").mkdir()
            (tmp_path / NEW / "notes.txt").write_text("of somebody else")
            (tmp_path / NEW / "sub").mkdir()
        dist.barrier()
        model, optimizer = another(rank, world_size)
        with logged() as messages:
            zeroshard.load_checkpoint(tmp_path, model, optimizer)
        assert fingerprint(model, optimizer) == new
        if rank == 0:
            said = "\n".join(messages)
            assert re.search(r"passed over .*step-000000000008 .*checkpoint\.json", said)
            assert "step-000000000007.unfinished was not written to the end" in said
        dist.barrier()
        zeroshard.save_checkpoint(tmp_path, model, optimizer, step=8, keep=1)
        assert entries(tmp_path) == [
            "latest",
            "notes.txt",
            "step-000000000008",
            "step-000000000008-2",
            "step-000000000009",
            "step-1",
        ]
        assert (tmp_path / "latest").read_text() == "step-000000000008-2\n"
        assert zeroshard.load_checkpoint(tmp_path, model, optimizer)["step"] == 8

    run(body)


# --- of something else


def refused(path, model, optimizer, message, **objects):
    """Nothing changes, and the checkpoint before, which is no better, is not tried."""
    before = fingerprint(model, optimizer)
    with logged() as messages, pytest.raises(CheckpointError, match=message):
        zeroshard.load_checkpoint(path, model, optimizer, **objects)
    assert fingerprint(model, optimizer) == before
    assert not messages


@pytest.mark.parametrize("stage", [2, 3])
def test_what_does_not_fit_another_model_is_listed(stage, tmp_path):
    def body(rank, world_size):
        save_twice(tmp_path, rank, world_size)
        shapes = {"matrix": (37, 30), "bias": SHAPES["bias"], "other": (3,), "scalar": ()}
        message = (
            f"{NEW}, is of another model, and nothing was loaded. missing: .*other. "
            r"unexpected: block. of another shape or kind: .*matrix \(37, 29\) torch.float32, in "
            r"the model \(37, 30\) torch.float32"
        )
        model, optimizer = build(2, shapes=shapes)
        step(model, optimizer, rank, world_size)
        refused(tmp_path, model, optimizer, message)
        step(model, optimizer, rank, world_size)

    run(body)


def test_other_param_groups_are_refused_with_the_first_that_differs(tmp_path):
    def body(rank, world_size):
        save_twice(tmp_path, rank, world_size)
        model, _ = build()
        groups = [{"params": [model.matrix, model.block]}, {"params": [model.bias, model.scalar]}]
        optimizer = zeroshard.AdamW(groups, model=model)
        message = (
            f"param group 0 of .*{NEW}, does not fit: 2 parameters are in one of them, 'bias' in "
            "the saved state only"
        )
        refused(tmp_path, model, optimizer, message)

    run(body)


def test_what_was_not_saved_cannot_be_loaded(tmp_path):
    def body(rank, world_size):
        save_twice(tmp_path, rank, world_size)
        model, optimizer = build()
        message = f"{NEW}, holds nothing to load ema, scheduler from: leave it out"
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
        refused(tmp_path, model, optimizer, message, ema=Counter(), scheduler=scheduler)

    run(body)


def test_another_optimizers_state_is_refused(tmp_path):
    def body(rank, world_size):
        model = LinearForm(SHAPES)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(coefficients(model, rank, world_size)).backward()
        sgd.step()
        if rank == 0:
            content = {"model": model.state_dict(), "optimizer": sgd.state_dict()}
            torch.save(content, tmp_path / "sgd.pt")
        dist.barrier()
        model, optimizer = build(seed=9)
        before = fingerprint(model, optimizer)
        message = "sgd.pt: the state of 'matrix' must be AdamW's .*, and has momentum_buffer"
        with pytest.raises(CheckpointError, match=message):
            zeroshard.load_checkpoint(tmp_path / "sgd.pt", model, optimizer)
        assert fingerprint(model, optimizer) == before

    run(body)


# --- an error half-way


def test_after_an_error_half_way_nothing_is_trained_before_another_load(tmp_path):
    """Verified, agreed upon, and then a disk fails: on one rank, at any of its reads."""

    def body(rank, world_size):
        old, new = save_twice(tmp_path, rank, world_size)
        read_range = StoredChunks.read_range
        reads, fatal = [], None

        def count(self, *range_):
            if rank == 1 and len(reads) == fatal:
                raise OSError(5, "Input/output error", str(self.file))
            reads.append(range_)
            return read_range(self, *range_)

        StoredChunks.read_range = count
        zeroshard.load_checkpoint(tmp_path, *another(rank, world_size))
        total = gathered(len(reads))[1]
        for number in (0, 1, total // 2, total - 1):
            model, optimizer = another(rank, world_size)
            reads.clear()
            fatal = number
            with pytest.raises(CheckpointError, match=rf"rank 1: .*Input/output.*{NEW}/__._0"):
                zeroshard.load_checkpoint(tmp_path, model, optimizer)
            fatal = None
            refuses_to_go_on(tmp_path, model, optimizer)
            assert zeroshard.load_checkpoint(tmp_path / OLD, model, optimizer)["step"] == 1
            assert fingerprint(model, optimizer) == old
            optimizer.step()
            assert zeroshard.load_checkpoint(tmp_path, model, optimizer)["step"] == 2
            assert fingerprint(model, optimizer) == new

    run(body)


def gathered(item):
    items = [None] * dist.get_world_size()
    dist.all_gather_object(items, item)
    return items


def refuses_to_go_on(path, model, optimizer):
    half = "not possible now: an error ended load_checkpoint half-way.*load one again"
    with pytest.raises(ConfigError, match=f"step is {half}"):
        optimizer.step()
    with pytest.raises(ConfigError, match=f"save_checkpoint is {half}"):
        zeroshard.save_checkpoint(path, model, optimizer)
    assert entries(path) == ["latest", OLD, NEW]


def test_an_object_that_cannot_be_loaded_leaves_nothing_that_trains(tmp_path):
    def body(rank, world_size):
        _, new = save_twice(tmp_path, rank, world_size)
        model, optimizer = another(rank, world_size)
        counter = Counter()
        counter.fails = rank == 1
        with pytest.raises(CheckpointError, match="failed on rank 1: the counter is broken"):
            zeroshard.load_checkpoint(tmp_path, model, optimizer, counter=counter)
        refuses_to_go_on(tmp_path, model, optimizer)
        counter.fails = False
        assert zeroshard.load_checkpoint(tmp_path, model, optimizer, counter=counter)["step"] == 2
        assert fingerprint(model, optimizer) == new
        optimizer.step()

    run(body)
