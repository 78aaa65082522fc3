"""Checkpoints of jobs that are killed while they write, and of disks that are full or read-only.

Whatever happens, the folder can be loaded: what was saved before, or what was being saved, bit for
bit. The next save leaves nothing of the failed one.
"""

import contextlib
import os
import random
import resource
import shutil
import signal
import time
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from ranks import run, run_until_killed
from small_jobs import Moments, build, entries, fingerprint, small_disk, step

import zeroshard
from zeroshard.errors import CheckpointError, CommunicationError


class Job:
    """One start of a job on two ranks, which goes on from what the one before has left.

    Args:
        path: the folder of checkpoints.
        setting: stage and format.
        number: which start it is; names what it saves.
        fatal: by rank, the number of the moment at which it dies; none: later.
        saves_before: whether it saves once before the save in which it may be killed.
        same_step: whether that save is of a step that is there already.
        options: of that save.
    """

    def __init__(self, path, setting, number, *, fatal, saves_before, same_step, **options):
        self.path, self.setting, self.number = path, setting, number
        self.fatal, self.saves_before, self.same_step = fatal, saves_before, same_step
        self.options = options

    def __call__(self, rank, world_size, tell):
        model, optimizer = build(*self.setting, seed=self.number)
        loaded = zeroshard.load_checkpoint(self.path, model, optimizer, missing_ok=True)
        saved = {loaded.get("tag"): fingerprint(model, optimizer)}
        told = {"tag": loaded.get("tag"), "saved": saved}
        random.seed(self.number)
        torch.manual_seed(self.number)
        step(model, optimizer, rank, world_size, 2 * self.number)
        if self.saves_before:
            tag = self.number - 0.5
            saved[tag] = fingerprint(model, optimizer)
            zeroshard.save_checkpoint(self.path, model, optimizer, keep=2, tag=tag)
            told["left"] = entries(self.path)
            step(model, optimizer, rank, world_size, 2 * self.number + 1)
        saved[self.number] = fingerprint(model, optimizer)
        at = int(optimizer.engine.counters.counts.max()) - self.same_step
        tell(told)
        began = time.perf_counter()
        with Moments(self.fatal.get(rank, -1)) as moments:
            saving = zeroshard.save_checkpoint(
                self.path, model, optimizer, step=at, tag=self.number, **self.options
            )
            for draw in () if self.options["blocking"] else range(2):
                step(model, optimizer, rank, world_size, draw)
            saving.wait()
        tell({"moments": moments.names, "elapsed_s": time.perf_counter() - began})


@pytest.mark.parametrize("setting", [(1, "fp32"), (2, "split"), (2, "int8"), (3, "fp32")])
def test_whenever_a_job_is_killed_it_goes_on_from_a_whole_checkpoint(setting, tmp_path):
    """Fifty kills each. Half of them hit a save in the background, half a moment by the clock."""
    path, chance = tmp_path / "checkpoints", random.Random(repr(setting))
    common = {"saves_before": True, "same_step": False, "keep": 2}
    whole = {}  # by whether the save was blocking: what each rank told of one that nobody killed
    for number, blocking in enumerate((True, False)):
        job = Job(path, setting, number, blocking=blocking, fatal={}, **common)
        told = run_until_killed(job, [0])
        whole[blocking] = [of_rank[1] for of_rank in told]
    found = Counter()
    for number in range(2, 53):
        blocking, is_timed = number % 2 == 0, number % 4 < 2
        options = {
            "saves_before": number % 3 == 0,
            "same_step": chance.random() < 0.25,
            "keep": chance.choice([None, 1, 2]),
        }
        if number == 52:  # nobody is killed at last
            is_timed, options, fatal, victims = False, common, {}, [0]
        elif is_timed:
            fatal, victims = {}, chance.choice([[0], [1], [0, 1]])
        else:
            victims = [int(chance.random() < 0.25)]
            fatal = {victims[0]: chance.randrange(len(whole[blocking][victims[0]]["moments"]))}
        job = Job(path, setting, number, blocking=blocking, fatal=fatal, **options)
        delay_s = chance.uniform(0, whole[blocking][0]["elapsed_s"]) if is_timed else None
        before = told
        told = run_until_killed(job, victims, delay_s=delay_s, grace_s=chance.uniform(0, 0.01))
        what = f"{setting}, start {number}, after a save with {job.__dict__}"
        found[check_what_was_found(before, told, what)] += 1
    assert found["the one before"] > 10, found
    assert found["the new one"] > 0, found


def check_what_was_found(before, told, what):
    """A job found what the one before had saved last, or had been saving when it was killed."""
    tags = {of_rank[0]["tag"] for of_rank in told}
    assert len(tags) == 1, f"{what}: ranks loaded different checkpoints"
    (tag,) = tags
    is_done = any(len(of_rank) > 1 for of_rank in before)
    attempts = list(before[0][0]["saved"])
    allowed = attempts[-1:] if is_done else attempts[-2:]
    assert tag in allowed, f"{what}: {tag} was loaded, and {attempts} saved"
    for then, now in zip(before, told, strict=True):
        assert now[0]["saved"][tag] == then[0]["saved"][tag], f"{what}: {tag} has changed"
    names = told[0][0].get("left", [])
    assert not [name for name in names if name.startswith(".")], f"{what}: {names}"
    assert len([name for name in names if name.startswith("step-")]) <= 2, f"{what}: {names}"
    return "it was done" if is_done else "the new one" if tag == attempts[-1] else "the one before"


def test_there_is_a_whole_checkpoint_at_every_moment_of_a_change_of_places(tmp_path):
    """One rank, and every moment from the first rename to the last removal, one after the other.

    There are three checkpoints, one of them of the step that is saved; all but the new one go.
    """

    def body(rank, world_size):
        model, optimizer = build()
        saved = {}
        for tag in range(4):
            saved[tag] = fingerprint(model, optimizer)
            if tag < 3:
                zeroshard.save_checkpoint(tmp_path / "start", model, optimizer, step=tag, tag=tag)
            step(model, optimizer, rank, world_size, tag)
        zeroshard.load_checkpoint(tmp_path / "start", model, optimizer)
        step(model, optimizer, rank, world_size, 2)

        def save(path, fatal=-1):
            shutil.copytree(tmp_path / "start", path)
            with Moments(fatal) as moments:
                zeroshard.save_checkpoint(path, model, optimizer, step=2, keep=1, tag=3)
            return moments.names

        names = save(tmp_path / "whole")
        assert entries(tmp_path / "whole") == ["latest", "step-000000000002"]
        first = names.index("replace") - 7
        assert "rename" in names[first : first + 8]
        found = []
        changes = ("fsync", "rename", "replace", "unlink", "rmdir")
        for fatal in (at + 1 for at in range(first, len(names) - 1) if names[at] in changes):
            path = tmp_path / str(fatal)
            state, child = random.getstate(), os.fork()
            if child == 0:
                random.setstate(state)  # which a fork changes
                save(path, fatal)
                os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
            loaded_model, loaded = build(seed=9)
            tag = zeroshard.load_checkpoint(path, loaded_model, loaded)["tag"]
            assert fingerprint(loaded_model, loaded) == saved[tag], f"{fatal} of {names}"
            found.append(tag)
            zeroshard.save_checkpoint(path, loaded_model, loaded, step=5, keep=1)
            assert entries(path) == ["latest", "step-000000000005"]
        assert found == sorted(found)
        assert set(found) == {2, 3}

    run(body, 1, process_group=False, RANK=None, WORLD_SIZE=None)


@pytest.mark.parametrize("blocking", [True, False])
def test_a_rank_whose_neighbour_died_gets_an_error_and_leaves_nothing(blocking, tmp_path):
    def body(rank, world_size, tell):
        model, optimizer = build()
        zeroshard.save_checkpoint(tmp_path, model, optimizer, step=1)
        tell(entries(tmp_path))
        try:
            with Moments(fatal=4 if rank == 1 else -1):
                zeroshard.save_checkpoint(tmp_path, model, optimizer, blocking=blocking).wait()
        except CommunicationError as error:
            tell(str(error))

    told = run_until_killed(body, [1], grace_s=2.0)
    assert len(told[1]) == 1
    (before, message) = told[0]
    assert "save_checkpoint" in message
    assert entries(tmp_path) == before == ["latest", "step-000000000001"]


# --- disks that do not take it


def refused(
    path, message, *, blocking, during=contextlib.nullcontext, after=contextlib.nullcontext
):
    """Two ranks save once, and again inside of `during(rank)`, and once more inside of `after`."""

    def body(rank, world_size):
        model, optimizer = build(shapes=LARGE)
        step(model, optimizer, rank, world_size)
        zeroshard.save_checkpoint(path, model, optimizer, tag="first")
        first, before = fingerprint(model, optimizer), entries(path)
        step(model, optimizer, rank, world_size, 1)
        second = fingerprint(model, optimizer)
        with during(rank):
            with pytest.raises(CheckpointError, match=message):
                zeroshard.save_checkpoint(path, model, optimizer, blocking=blocking).wait()
            dist.barrier()  # the first rank has removed what there was of it
            assert entries(path) == before
            assert zeroshard.load_checkpoint(path, model, optimizer)["tag"] == "first"
        assert fingerprint(model, optimizer) == first
        dist.barrier()
        with after(rank):
            dist.barrier()
            step(model, optimizer, rank, world_size, 1)
            assert fingerprint(model, optimizer) == second
            zeroshard.save_checkpoint(path, model, optimizer, keep=1, tag="second")
            model, optimizer = build(shapes=LARGE, seed=9)
            assert zeroshard.load_checkpoint(path, model, optimizer)["tag"] == "second"
        assert fingerprint(model, optimizer) == second
        assert entries(path) == ["latest", "step-000000000002"]

    run(body)


# Rank 0 and 1 write about 220 KB each of a checkpoint.
LARGE = {"matrix": (173, 211), "bias": (23,), "block": (16, 16)}


@contextlib.contextmanager
def no_large_files(rank):
    """A limit that meets the second rank when it has written half of its part."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, most))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


@pytest.mark.parametrize("blocking", [True, False])
def test_what_one_rank_cannot_write_is_an_error_on_all_of_them(blocking, tmp_path):
    message = r"File too large: '.*/\.step-000000000002\.unfinished/__1_0\.distcp'"
    refused(tmp_path, message, blocking=blocking, during=no_large_files)


@pytest.fixture
def disk(tmp_path):
    with contextlib.ExitStack() as stack:
        try:
            remount = stack.enter_context(small_disk(tmp_path / "disk", "1M"))
        except PermissionError as error:
            pytest.skip(f"no disk of its own for this test, only limits of single files: {error}")
        yield tmp_path / "disk", remount


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("free", [0, 40, 200, 440])
def test_a_full_disk_is_an_error_on_every_rank(free, blocking, disk):
    """`free`: how many KB of the second checkpoint fit."""
    path, remount = disk

    @contextlib.contextmanager
    def full(rank):
        if rank == 0:
            room = os.statvfs(path)
            filling = room.f_bavail * room.f_bsize - free * 1024
            (path / "of somebody else").write_bytes(bytes(filling))
        dist.barrier()
        yield
        dist.barrier()

    @contextlib.contextmanager
    def with_more_room(rank):
        if rank == 0:
            (path / "of somebody else").unlink()
            remount("size=2M")
        yield

    message = r"/job.*: .*No space left on device"
    refused(path / "job", message, blocking=blocking, during=full, after=with_more_room)


@pytest.mark.parametrize("blocking", [True, False])
def test_a_disk_that_became_read_only_is_an_error_on_every_rank(blocking, disk):
    path, remount = disk

    def mounted(option):
        @contextlib.contextmanager
        def inside(rank):
            dist.barrier()
            if rank == 0:
                remount(option, "size=2M")
            dist.barrier()
            yield
            dist.barrier()

        return inside

    message = "failed on rank 0: .*Read-only file system: .*step-000000000002.unfinished"
    refused(path / "job", message, blocking=blocking, during=mounted("ro"), after=mounted("rw"))


def test_a_folder_that_cannot_be_made_is_named_on_every_rank(tmp_path):
    def body(rank, world_size):
        model, optimizer = build()
        (tmp_path / "file").write_text("of somebody else")
        before = fingerprint(model, optimizer)
        for path in (tmp_path / "file", tmp_path / "file" / "job"):
            for blocking in (True, False):
                with pytest.raises(CheckpointError, match=f"failed on rank 0: .*{path}"):
                    zeroshard.save_checkpoint(path, model, optimizer, blocking=blocking)
        assert fingerprint(model, optimizer) == before
        zeroshard.save_checkpoint(tmp_path / "job", model, optimizer)
        assert entries(tmp_path / "job") == ["latest", "step-000000000000"]

    run(body)
