"""What checkpoints cost: memory while loading, bytes on disk and read, and what goes over the wire.

Ranks are forks of a fresh process, which holds no memory that an earlier test has freed.
"""

import contextlib
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
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak is what it is now
        before, already = status("VmRSS"), nbytes_read()
        with objects_on_the_wire() as sent:
            zeroshard.load_checkpoint(f"{folder}/{saved}", model, optimizer)
        return {"peak": status("VmHWM") - before, "read": nbytes_read() - already, "sent": sent}

    return run(body, world_size)


def in_a_fresh_process(call):
    code = f"import json, test_checkpoint_memory as here; print(json.dumps(here.{call}))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=pathlib.Path(__file__).parent,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("memory")


@pytest.fixture(scope="module", params=["fp32", "split", "int8"])
def saved(request, folder):
    stage = {"fp32": 2, "split": 3, "int8": 1}[request.param]
    return request.param, in_a_fresh_process(f"save({str(folder)!r}, {request.param!r}, {stage})")


def check_sent(sent):
    assert sent
    assert max(nbytes for nbytes, _ in sent) < MIB
    assert not any(has_tensor for _, has_tensor in sent)


def test_files_have_the_bytes_of_the_state_and_each_rank_wrote_its_share(saved):
    precision, found = saved
    *_, per_parameter = PRECISIONS[precision]
    numel = sum(p.numel() for p in Wide(BF16).parameters())
    assert numel * per_parameter <= found["total"] < 1.01 * numel * per_parameter
    assert len(found["sizes"]) == SAVED_AT
    for size in found["sizes"]:
        assert size == pytest.approx(numel * per_parameter / SAVED_AT, rel=0.01)
    for sent in found["sent"]:
        check_sent(sent)


LOADS = [("same", 1, 2), ("same", 2, 2), ("same", 3, 2), ("same", 3, 3), ("same", 2, 1)]


@pytest.mark.parametrize(("precision", "stage", "world_size"), [*LOADS, ("master", 2, 3)])
def test_loading_takes_the_shards_and_at_most_64_mib(saved, folder, precision, stage, world_size):
    written, found = saved
    precision = written if precision == "same" else precision
    call = f"load({str(folder)!r}, {written!r}, {precision!r}, {stage}, {world_size})"
    for rank, answer in enumerate(in_a_fresh_process(call)):
        assert answer["peak"] < 64 * MIB, f"rank {rank} took {answer['peak'] / MIB:.0f} MiB"
        # Everything is read twice, first for its checksum. Of two chunks each tensor's slice may
        # need a part only.
        slack = 18 * 3 * 2 * 8 * MIB if world_size != SAVED_AT else 2 * MIB
        share = found["total"] / world_size
        assert answer["read"] < 2.02 * share + slack
        check_sent(answer["sent"])
