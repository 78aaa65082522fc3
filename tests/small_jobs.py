"""A model so small that a checkpoint takes milliseconds, and what tells two states of it apart."""

import contextlib
import hashlib
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import threading

import torch
from models import LinearForm, SplitForm, coefficients

import zeroshard

SHAPES = {"matrix": (37, 29), "bias": (23,), "block": (16, 16), "scalar": ()}
FORMATS = {
    "fp32": (torch.float32, {}),
    "split": (torch.bfloat16, {"master": "split"}),
    "int8": (torch.bfloat16, {"master": "split", "moments": "int8"}),
}


def build(stage=2, fmt="fp32", seed=0, shapes=SHAPES, **options):
    dtype, precision = FORMATS[fmt]
    form = SplitForm if stage == 3 else LinearForm
    model = form(shapes, dtype, seed)
    precision = zeroshard.Precision(**precision)
    options = {"lr": 1e-2, "stage": stage, "precision": precision, **options}
    return model, zeroshard.AdamW(model, **options)


def step(model, optimizer, rank, world_size, draw=0):
    model(coefficients(model, rank, world_size, draw)).backward()
    optimizer.step()
    optimizer.zero_grad()


def fingerprint(model, optimizer):
    """Of all bits of weights, gradients, state, options and random states that this rank holds."""
    held = dict(model.state_dict())
    for number, (p, state) in enumerate(optimizer.state.items()):
        held.update({f"{number}.{key}": value for key, value in state.items()})
        held.update({} if p.grad is None else {f"{number}.grad": p.grad})
    digest = hashlib.sha256()
    for name, value in sorted(held.items()):
        local = value.to_local() if hasattr(value, "to_local") else value
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(local.detach().contiguous().flatten().view(torch.uint8).numpy())
    # Which of torch's implementations is used is noted for who loads it, and no setting here.
    groups = [dict(group, params=None, fused=None) for group in optimizer.param_groups]
    digest.update(repr((groups, torch.get_rng_state().tolist(), random.getstate())).encode())
    return digest.hexdigest()


def entries(path):
    """The names in a folder."""
    return sorted(entry.name for entry in path.iterdir())


@contextlib.contextmanager
def logged():
    """What is logged meanwhile."""
    messages, handler = [], logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("zeroshard").addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger("zeroshard").removeHandler(handler)


def flip(file, at, bit=4):
    content = bytearray(file.read_bytes())
    content[at] ^= 1 << bit
    file.write_bytes(content)


def cut(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


# Between two calls of these something else is on the disk, or is known to be.
MOMENTS = {"fsync", "rename", "replace", "open", "mkdir", "rmdir", "unlink", "close"}


class Moments:
    """Counts, on all threads, the calls that may change a folder; dies where one begins.

    Args:
        fatal: its number; negative: none.

    Attributes:
        names: of the calls, in order.
    """

    def __init__(self, fatal=-1):
        self.fatal, self.names = fatal, []

    def __enter__(self):
        threading.setprofile(self._look)
        sys.setprofile(self._look)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)
        threading.setprofile(None)

    def _look(self, frame, event, called):
        if event != "c_call" or called.__name__ not in MOMENTS:
            return
        if called.__module__ in ("posix", "io", "_io"):
            if len(self.names) == self.fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            self.names.append(called.__name__)


@contextlib.contextmanager
def small_disk(path, size):
    """A file system of its own at `path`; gives a function that mounts it anew with other options.

    Raises:
        PermissionError: this process may not mount.
    """

    def mount(*options):
        command = ["mount", "-t", "tmpfs", "-o", ",".join(options), "none", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise PermissionError(done.stderr)

    path.mkdir()
    if shutil.which("mount") is None:
        raise PermissionError("there is no mount")
    mount(f"size={size}")
    try:
        yield lambda *options: mount("remount", *options)
    finally:
        subprocess.run(["umount", str(path)], check=True)
