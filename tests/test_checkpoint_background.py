"""Checkpoints that are written while training goes on: what is in them, who waits, who is told."""

import os
import pathlib
import random
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from models import coefficients
from ranks import run
from small_jobs import build, entries, fingerprint, step

import zeroshard
from zeroshard.checkpoint import dcp_writing
from zeroshard.errors import CheckpointError

ALONE = {"process_group": False, "RANK": None, "WORLD_SIZE": None}


class Gate:
    """Holds the writing of files until it is opened; then it may fail.

    Args:
        error: what it fails with; None: it does not.
    """

    def __init__(self, error=None):
        self.error, self.opened = error, threading.Event()

    def __enter__(self):
        self.write = dcp_writing._write
        dcp_writing._write = self
        return self

    def __exit__(self, *_):
        self.opened.set()
        dcp_writing._write = self.write

    def __call__(self, *arguments):
        assert self.opened.wait(20.0)
        if self.error is not None:
            raise self.error
        self.write(*arguments)

    def open_later(self):
        """Opens it while the main thread waits for what it holds."""
        threading.Timer(0.3, self.opened.set).start()


def bits(path):
    """The bytes of tensors and values in a checkpoint."""
    return {file.name: file.read_bytes() for file in path.glob("*.distcp")}


@pytest.mark.parametrize("setting", [(1, "fp32"), (2, "split"), (2, "int8"), (3, "fp32")])
def test_training_that_goes_on_does_not_change_what_is_written(setting, tmp_path):
    """Byte for byte what a save that blocks had written at that moment."""

    def body(rank, world_size):
        model, optimizer = build(*setting)
        model.register_buffer("seen", torch.zeros(3))
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
        values = {"table": torch.arange(5.0), "log": [1, {"a": torch.zeros(2)}], "rank": [rank]}
        step(model, optimizer, rank, world_size)
        model(coefficients(model, rank, world_size, 3)).backward()  # waits for the next step
        before = fingerprint(model, optimizer)
        zeroshard.save_checkpoint(tmp_path / "one", model, optimizer, scheduler, **values)
        with Gate() as gate:
            saved = zeroshard.save_checkpoint(
                tmp_path / "other", model, optimizer, scheduler, blocking=False, **values
            )
            optimizer.step()
            optimizer.zero_grad()
            for draw in range(4):
                step(model, optimizer, rank, world_size, draw)
                scheduler.step()
            optimizer.param_groups[0]["lr"] = 7.0
            values["table"].fill_(7.0)
            values["log"][1]["a"].fill_(7.0)
            values["log"].append(7)
            values["rank"][0] = 7
            model.seen.fill_(7.0)
            torch.rand(3)
            random.random()
            assert not saved.is_done
            assert entries(tmp_path / "other") == [".step-000000000001.unfinished"]
            gate.opened.set()
            saved.wait()
        dist.barrier()
        assert bits(saved.path) == bits(tmp_path / "one" / saved.path.name)
        loaded = zeroshard.load_checkpoint(tmp_path / "other", model, optimizer, scheduler)
        assert fingerprint(model, optimizer) == before
        assert loaded["rank"] == [rank]
        assert torch.equal(loaded["table"], torch.arange(5.0))
        assert type(scheduler.milestones).__name__ == "Counter"

    run(body)


@pytest.mark.parametrize("following", ["save", "load", "wait", "another optimizer's save"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_what_comes_next_waits_for_a_save_under_way(following, world_size, tmp_path):
    def body(rank, world_size):
        model, optimizer = build()
        other = build(seed=1)
        with Gate() as gate:
            first = zeroshard.save_checkpoint(
                tmp_path / "one", model, optimizer, step=1, blocking=False
            )
            assert not first.is_done
            gate.open_later()
            if following == "save":
                zeroshard.save_checkpoint(tmp_path / "one", model, optimizer, step=2)
            elif following == "load":
                assert zeroshard.load_checkpoint(tmp_path / "one", model, optimizer)["step"] == 1
            elif following == "wait":
                assert first.wait() == tmp_path / "one" / "step-000000000001"
            else:
                second = zeroshard.save_checkpoint(tmp_path / "other", *other, blocking=False)
                assert first.is_done
                second.wait()
                assert zeroshard.load_checkpoint(tmp_path / "other", *other)["step"] == 0
            assert first.is_done
        assert entries(tmp_path / "one")[:2] == ["latest", "step-000000000001"]

    run(body, world_size, **(ALONE if world_size == 1 else {}))


def test_groups_of_ranks_save_at_the_same_time(tmp_path):
    def body(rank, world_size):
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        path = tmp_path / str(rank // 2)
        model, optimizer = build(seed=rank // 2, mesh=groups[rank // 2])
        step(model, optimizer, rank % 2, 2)
        before = fingerprint(model, optimizer)
        first = zeroshard.save_checkpoint(path, model, optimizer, blocking=False)
        step(model, optimizer, rank % 2, 2)
        zeroshard.save_checkpoint(path, model, optimizer, blocking=False).wait()
        assert zeroshard.load_checkpoint(first.path, model, optimizer)["step"] == 1
        assert fingerprint(model, optimizer) == before

    run(body, 4)


# --- errors


@pytest.mark.parametrize("following", ["save", "load", "wait", "another optimizer's save"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_error_of_one_rank_is_told_to_all_of_them_at_the_next_call_and_once(
    following, world_size, tmp_path
):
    def body(rank, world_size):
        model, optimizer = build()
        other = build(seed=1)
        zeroshard.save_checkpoint(tmp_path / "one", model, optimizer, step=1)
        before = fingerprint(model, optimizer)
        with Gate(OSError(28, "the disk is full") if rank == world_size - 1 else None) as gate:
            saved = zeroshard.save_checkpoint(
                tmp_path / "one", model, optimizer, step=2, blocking=False
            )
            gate.open_later()
            call, *arguments = {
                "save": (zeroshard.save_checkpoint, tmp_path / "one", model, optimizer),
                "load": (zeroshard.load_checkpoint, tmp_path / "one", model, optimizer),
                "wait": (saved.wait,),
                "another optimizer's save": (zeroshard.save_checkpoint, tmp_path / "two", *other),
            }[following]
            with pytest.raises(
                CheckpointError, match=f"the disk is full: .*/__{world_size - 1}_0.distcp"
            ):
                call(*arguments)
        assert fingerprint(model, optimizer) == before
        if world_size > 1:
            dist.barrier()  # the first rank has removed what there was of it
        assert entries(tmp_path / "one") == ["latest", "step-000000000001"]
        saved.wait()
        assert zeroshard.load_checkpoint(tmp_path / "one", model, optimizer)["step"] == 1
        zeroshard.save_checkpoint(tmp_path / "one", model, optimizer, step=4)
        assert zeroshard.load_checkpoint(tmp_path / "one", model, optimizer)["step"] == 4

    run(body, world_size, **(ALONE if world_size == 1 else {}))


def test_a_rank_that_was_told_already_does_not_go_on_without_the_others(tmp_path):
    def body(rank, world_size):
        model, optimizer = build()
        with Gate(OSError(28, "the disk is full")) as gate:
            gate.opened.set()
            saved = zeroshard.save_checkpoint(tmp_path, model, optimizer, blocking=False)
            if rank == 0:
                with pytest.raises(CheckpointError, match="the disk is full"):
                    saved.wait()
            with pytest.raises(CheckpointError, match="the disk is full"):
                zeroshard.save_checkpoint(tmp_path, model, optimizer)
        zeroshard.save_checkpoint(tmp_path, model, optimizer)
        assert entries(tmp_path) == ["latest", "step-000000000000"]

    run(body)


# --- processes of their own: what they take, and how they end

JOB = """
import ctypes, datetime, gc, os, sys
import torch
import torch.distributed as dist
import zeroshard

rank, folder, ending = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group(
    "gloo",
    init_method=f"file://{folder}/store",
    rank=rank,
    world_size=2,
    timeout=datetime.timedelta(seconds=10),
)

def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))

def settle():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak counts from here
    return status("VmRSS")

def measured(name, blocking):
    before = settle()
    saved = zeroshard.save_checkpoint(f"{folder}/{name}", model, optimizer, blocking=blocking)
    saved.wait()
    part = os.path.getsize(saved.path / f"__{rank}_0.distcp")
    print(name, part, status("VmHWM") - before, settle() - before, flush=True)
    return saved

small = torch.nn.Linear(8, 8)
zeroshard.save_checkpoint(f"{folder}/first", small, zeroshard.AdamW(small))
layers = [torch.nn.Linear(2048, 2048, bias=False) for _ in range(2)]
layers += [torch.nn.Linear(512, 512) for _ in range(32)]
model = torch.nn.Sequential(*layers)
optimizer = zeroshard.AdamW(model.parameters(), bucket_mb=256)
torch.stack([(p * p).sum() for p in model.parameters()]).sum().backward()
optimizer.step()
optimizer.zero_grad()
measured("blocking", True)
measured("background", False)
saved = zeroshard.save_checkpoint(f"{folder}/last", model, optimizer, step=5, blocking=False)
assert not saved.is_done
if ending == "group":
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("ending", ["nothing", "group"])
def test_memory_and_the_end_of_a_process_that_is_saving(ending, tmp_path):
    """A save that blocks takes 64 MiB at most, one in the background as much beside its part.

    A process that ends meanwhile completes it. If it destroys the process group first, a whole one
    or none is there when the ranks have waited for each other as long as they may.
    """
    root = pathlib.Path(zeroshard.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", JOB, str(rank), str(tmp_path), ending],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        answers = [process.communicate(timeout=100) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (output, errors) in zip(processes, answers, strict=True):
        assert process.returncode == 0, errors
        lines = [line.split() for line in output.splitlines()]
        assert [name for name, *_ in lines] == ["blocking", "background"], errors
        for name, *numbers in lines:
            part, peak, after = (int(number) / 2**20 for number in numbers)
            copied = part if name == "background" else 0
            assert part > 90
            assert copied - 16 < peak < copied + 64, f"{name}: {peak} MiB for {part}"
            # Once, and not again at the next save, the C library keeps some of what a thread used.
            assert after < 32, f"{name}: {after} MiB stay"
    found = entries(tmp_path / "last")
    if ending == "nothing":
        assert found == ["latest", "step-000000000005"]
    else:
        assert found in (["latest", "step-000000000005"], [], [".step-000000000005.unfinished"])
