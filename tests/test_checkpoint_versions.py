"""Which checkpoints of a folder stay, and which is the newest."""

import shutil

import pytest
import torch.distributed as dist
from ranks import run
from small_jobs import build, cut, entries, logged

import zeroshard


def test_the_newest_are_those_that_were_saved_last_whatever_their_step(tmp_path):
    def body(rank, world_size):
        model, optimizer = build()
        for number in (300, 400, 500):
            zeroshard.save_checkpoint(tmp_path, model, optimizer, step=number, keep=3)
        for number, left in [
            (350, [350, 400, 500]),  # gone back to 300, which was the oldest
            (360, [350, 360, 500]),
            (350, [350, 360, 500]),  # saved again: of each step there is one
            (370, [350, 360, 370]),
        ]:
            zeroshard.save_checkpoint(tmp_path, model, optimizer, step=number, keep=3, tag=number)
            dist.barrier()
            found = [int(name.split("-")[1]) for name in entries(tmp_path)[1:]]
            assert found == left, number
            assert zeroshard.load_checkpoint(tmp_path, model, optimizer)["tag"] == number
            newest = (tmp_path / "latest").read_text().strip()
            assert newest.startswith(f"step-{number:012d}")
            assert newest in entries(tmp_path)
            dist.barrier()

    run(body)


@pytest.mark.parametrize("name", ["__0_0.distcp", "checkpoint.json"])
def test_damaged_checkpoints_stay_and_are_not_counted(name, tmp_path):
    def body(rank, world_size):
        model, optimizer = build()
        for number in range(1, 4):
            zeroshard.save_checkpoint(tmp_path, model, optimizer, step=number)
            dist.barrier()
            if rank == 0 and number != 1:
                cut(tmp_path / f"step-{number:012d}" / name)
            dist.barrier()
        zeroshard.save_checkpoint(tmp_path, model, optimizer, step=4, keep=2)
        assert [int(name[-1]) for name in entries(tmp_path)[1:]] == [1, 2, 3, 4]
        dist.barrier()
        zeroshard.save_checkpoint(tmp_path, model, optimizer, step=5, keep=1)
        assert [int(name[-1]) for name in entries(tmp_path)[1:]] == [2, 3, 5]

    run(body)


def test_what_cannot_be_removed_does_not_stop_a_save(tmp_path):
    """As a checkpoint that somebody has locked, or that another program holds open."""

    def body(rank, world_size):
        model, optimizer = build()
        for number in range(2):
            zeroshard.save_checkpoint(tmp_path, model, optimizer, step=number)
        rmtree = shutil.rmtree

        def refuses(path, *arguments, **options):
            raise PermissionError(1, "Operation not permitted", str(path))

        shutil.rmtree = refuses
        with logged() as messages:
            zeroshard.save_checkpoint(tmp_path, model, optimizer, step=2, keep=1)
        shutil.rmtree = rmtree
        dist.barrier()
        if rank == 0:
            assert len(messages) == 2
            assert all("stays, since it cannot be removed" in message for message in messages)
        assert zeroshard.load_checkpoint(tmp_path, model, optimizer)["step"] == 2
        dist.barrier()
        zeroshard.save_checkpoint(tmp_path, model, optimizer, step=3, keep=1)
        assert entries(tmp_path) == ["latest", "step-000000000003"]

    run(body)
