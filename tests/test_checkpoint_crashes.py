"""Checkpoints of processes that are killed while they write, on disks that are full or read-only.

Whatever happens, a folder of checkpoints can be loaded: what was saved before, or what was being
saved, bit for bit, and the next save leaves nothing of the failed one.
"""

import hashlib
import os
import random
import signal
import sys
import threading
import time

import pytest
import torch
from models import LinearForm, SplitForm, averaged, coefficients
from ranks import run, run_until_killed

import zeroshard

SHAPES = {"matrix": (37, 29), "bias": (23,), "block": (16, 16), "scalar": ()}
FORMATS = {
    "fp32": (torch.float32, {}),
    "split": (torch.bfloat16, {"master": "split"}),
    "int8": (torch.bfloat16, {"master": "split", "moments": "int8"}),
}


def build(stage, fmt, seed=0):
    dtype, precision = FORMATS[fmt]
    form = SplitForm if stage == 3 else LinearForm
    model = form(SHAPES, dtype, seed)
    optimizer = zeroshard.AdamW(
        model, lr=1e-2, stage=stage, precision=zeroshard.Precision(**precision)
    )
    return model, optimizer


def step(model, optimizer, rank, world_size, draw):
    model(coefficients(model, rank, world_size, draw)).backward()
    optimizer.step()
    optimizer.zero_grad()


def fingerprint(model, optimizer):
    """Of all bits of weights, state, options and random state that this rank holds."""
    digest = hashlib.sha256()
    held = {name: value for name, value in model.state_dict().items()}
    for number, state in enumerate(optimizer.state.values()):
        held.update({f"{number}.{key}": value for key, value in state.items()})
    for name, value in sorted(held.items()):
        local = value.to_local() if hasattr(value, "to_local") else value
        bits = local.detach().contiguous().flatten().view(torch.uint8)
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(bytes(bits.tolist()))
    groups = [dict(group, params=None) for group in optimizer.param_groups]
    digest.update(repr((groups, torch.get_rng_state().tolist(), random.getstate())).encode())
    return digest.hexdigest()


# --- killed


# Between any two of these something else is on the disk, or is known to be.
MOMENTS = {"fsync", "rename", "replace", "open", "mkdir", "rmdir", "unlink", "close", "scandir"}


class Moments:
    """Counts the calls that change a folder, on all threads, and dies at one of them.

    Args:
        fatal: its number; even ones are met before the call, odd ones after it.
    """

    def __init__(self, fatal):
        self.fatal, self.count = fatal, 0

    def __enter__(self):
        threading.setprofile(self._look)
        sys.setprofile(self._look)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)
        threading.setprofile(None)

    def _look(self, frame, event, called):
        if event in ("c_call", "c_return") and called.__name__ in MOMENTS:
            if self.count == self.fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            self.count += 1


class Job:
    """One start of a job on two ranks, which goes on from what the one before has left.

    Args:
        path: the folder of checkpoints.
        stage: of the optimizer.
        fmt: of weights and state.
        number: which start it is; names what it saves.
        blocking: whether its last save is.
        fatal: by rank, the number of the moment at which it dies; None: later.
    """

    def __init__(self, path, stage, fmt, number, *, blocking, keep, same_step, fatal):
        self.path, self.stage, self.fmt, self.number = path, stage, fmt, number
        self.blocking, self.keep, self.same_step, self.fatal = blocking, keep, same_step, fatal

    def __call__(self, rank, world_size, tell):
        model, optimizer = build(self.stage, self.fmt, seed=self.number)
        loaded = zeroshard.load_checkpoint(self.path, model, optimizer, missing_ok=True)
        found = loaded.get("tag"), fingerprint(model, optimizer)
        random.seed(self.number)
        torch.manual_seed(self.number)
        step(model, optimizer, rank, world_size, 2 * self.number)
        first = f"first of {self.number}", fingerprint(model, optimizer)
        zeroshard.save_checkpoint(self.path, model, optimizer, keep=2, tag=first[0])
        left = sorted(entry.name for entry in self.path.iterdir())
        step(model, optimizer, rank, world_size, 2 * self.number + 1)
        second = f"second of {self.number}", fingerprint(model, optimizer)
        tell({"found": found, "first": first, "second": second, "left": left})
        at = {"step": optimizer.engine.counters.counts.max().item() - 1} if self.same_step else {}
        with Moments(self.fatal.get(rank, -1)) as moments:
            saving = zeroshard.save_checkpoint(
                self.path,
                model,
                optimizer,
                keep=self.keep,
                blocking=self.blocking,
                tag=second[0],
                **at,
            )
            while not saving.is_done:
                step(model, optimizer, rank, world_size, 0)
            saving.wait()
        tell({"moments": moments.count})
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("stage", "fmt"), [(1, "fp32"), (2, "split"), (2, "int8"), (3, "fp32")]
)
def test_whenever_a_job_is_killed_it_goes_on_from_a_whole_checkpoint(stage, fmt, tmp_path):
    chance = random.Random(f"{stage} {fmt}")
    path = tmp_path / "checkpoints"
    ...
