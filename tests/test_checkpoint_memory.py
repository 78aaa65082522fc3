"""What checkpoints cost: memory while loading, bytes on disk and read, and what goes over the wire.

Ranks are forks of a fresh process, which holds no memory that an earlier test has freed.
"""

import contextlib
import ctypes
import io
import json
import os
import pathlib
import pickle
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from ranks import run
from torch import nn

import zeroshard

MIB = 2**20
BF16 = torch.bfloat16
PRECISIONS = {
    "fp32": (torch.float32, {}, 4 + 8),
    "split": (BF16, {"master": "split"}, 2 + 2 + 8),
    "master": (BF16, {"master": "fp32", "moments": "bf16"}, 2 + 4 + 4),
    "int8": (BF16, {"master": "split", "moments": "int8"}, 2 + 2 + 2 + 8 / 256),
}  # dtype, precision, bytes a parameter
SAVED_AT = 2


class Wide(nn.Module):
    """16.8 million parameters, half of them in one tensor, so 200 MB with fp32 moments."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(8192, 1024, dtype=dtype)
        self.layers = nn.ModuleList(nn.Linear(1024, 1024, dtype=dtype) for _ in range(8))


def build(precision, stage):
    """A model and an optimizer, all of whose memory is in use."""
    dtype, settings, _ = PRECISIONS[precision]
    model = Wide(dtype)
    settings = zeroshard.Precision(**settings)
    optimizer = zeroshard.AdamW(model, stage=stage, precision=settings)
    for state in optimizer.state.values():
        for name, value in state.items():
            if name != "step":
                getattr(value, "_local_tensor", value).fill_(1)
    return model, optimizer


def status(key):
    text = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{key}:\s+(\d+)", text)[1])


def nbytes_read():
    return int(re.search(r"rchar: (\d+)", pathlib.Path("/proc/self/io").read_text())[1])


def holds_tensor(item):
    found = []

    class Looks(pickle.Pickler):
        def reducer_override(self, value):
            found.extend([value] if isinstance(value, torch.Tensor) else [])
            return NotImplemented

    Looks(io.BytesIO()).dump(item)
    return bool(found)


@contextlib.contextmanager
def objects_on_the_wire():
    """What all collectives of objects send from here: (bytes, whether a tensor is in it)."""
    c10d, sent = dist.distributed_c10d, []
    pickled = c10d._object_to_tensor

    def spy(item, *args, **kwargs):
        sent.append((len(pickle.dumps(item)), holds_tensor(item)))
        return pickled(item, *args, **kwargs)

    c10d._object_to_tensor = spy
    try:
        yield sent
    finally:
        c10d._object_to_tensor = pickled


def save(folder, precision, stage):
    """What the first rank sent, and the size of every rank's file."""

    def body(rank, world_size):
        model, optimizer = build(precision, stage)
        with objects_on_the_wire() as sent:
            path = zeroshard.save_checkpoint(f"{folder}/{precision}", model, optimizer).path
        return sent, path

    answers = run(body, SAVED_AT)
    path = answers[0][1]
    sizes = [file.stat().st_size for file in sorted(path.glob("*.distcp"))]
    total = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return {"sent": [sent for sent, _ in answers], "sizes": sizes, "total": total}


def load(folder, saved, precision, stage, world_size):
    """By rank: the peak above what was in use before, bytes read, and what was sent."""

    def body(rank, world_size):
        model, optimizer = build(precision, stage)
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before must not hide what is taken
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak is what it is now
        before, already = status("VmRSS"), nbytes_read()
        with objects_on_the_wire() as sent:
            zeroshard.load_checkpoint(f"{folder}/{saved}", model, optimizer)
        return {"peak": status("VmHWM") - before, "read": nbytes_read() - already, "sent": sent}

    return run(body, world_size)


# precision ("same": as it was saved), stage, number of ranks
LOADS = [("same", 1, 2), ("same", 3, 2), ("same", 2, 1), ("master", 2, 3)]
SAVED_IN_STAGE = {"fp32": 2, "split": 3, "int8": 1}


def measure(folder, saved):
    loads = []
    found = save(folder, saved, SAVED_IN_STAGE[saved])
    for precision, stage, world_size in LOADS:
        precision = saved if precision == "same" else precision
        loads.append(load(folder, saved, precision, stage, world_size))
    return {**found, "loads": loads}


@pytest.fixture(scope="module", params=SAVED_IN_STAGE)
def measured(request, tmp_path_factory):
    folder, saved = tmp_path_factory.mktemp("memory"), request.param
    what = f"here.measure({str(folder)!r}, {saved!r})"
    call = f"import json, {__name__} as here; print(json.dumps({what}))"
    done = subprocess.run(
        [sys.executable, "-c", call],
        cwd=pathlib.Path(__file__).parent,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    return saved, json.loads(done.stdout)


def test_files_have_the_bytes_of_the_state_and_each_rank_wrote_its_share(measured):
    saved, found = measured
    *_, per_parameter = PRECISIONS[saved]
    nbytes = per_parameter * sum(p.numel() for p in Wide(BF16).parameters())
    assert nbytes <= found["total"] < 1.01 * nbytes
    assert len(found["sizes"]) == SAVED_AT
    for size in found["sizes"]:
        assert size == pytest.approx(nbytes / SAVED_AT, rel=0.01)


def test_loading_takes_the_shards_and_at_most_64_mib(measured):
    _, found = measured
    for (precision, stage, world_size), answers in zip(LOADS, found["loads"], strict=True):
        assert len(answers) == world_size
        for rank, answer in enumerate(answers):
            what = f"{precision}, {stage=}, rank {rank} of {world_size}"
            assert answer["peak"] < 64 * MIB, f"{what} took {answer['peak'] / MIB:.0f} MiB"


def test_a_rank_reads_its_own_slices_where_they_are_those_that_were_written(measured):
    """Twice: before anything changes their checksums are compared."""
    saved, found = measured
    is_sharded = SAVED_IN_STAGE[saved] == 3
    same = [load == ("same", 3 if is_sharded else 1, SAVED_AT) for load in LOADS]
    for answer in found["loads"][same.index(True)]:
        assert answer["read"] < 2.02 * found["total"] / SAVED_AT + 4 * MIB  # what describes them


def test_no_tensor_and_nothing_large_goes_through_a_collective_of_objects(measured):
    _, found = measured
    together = [answers for answers in found["loads"] if len(answers) > 1]
    sent = [*found["sent"], *(answer["sent"] for answers in together for answer in answers)]
    for items in sent:
        assert items
        assert max(nbytes for nbytes, _ in items) < MIB
        assert not any(has_tensor for _, has_tensor in items)
