"""Saving and loading a checkpoint: seconds, bytes and host memory, beside FSDP2 and torch.save.

    python benchmarks/checkpoint.py --ranks 2 --repeats 3 --json checkpoint.json

Every system keeps the same Llama-like model (examples/llama.py) and AdamW's fp32 moments in fresh
processes, writes to the same disk and waits until the files are on it. Loading reads what is in the
page cache. A time is the slowest rank's; the table has medians over the repeats. `async stall` is
how long training waits for a save in the background, `async total` until that is whole. Memory is
the most that a process held above what it held before, the largest over ranks and repeats; it
includes the copy that a save in the background writes from.
"""

import argparse
import ctypes
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import zeroshard

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))
from llama import Llama, LlamaConfig

SYSTEMS = ("stage2", "stage3", "fsdp2", "full")
NAMES = {
    "stage2": "zeroshard, stage 2",
    "stage3": "zeroshard, stage 3",
    "fsdp2": "FSDP2, dcp.save",
    "full": "DDP's state, torch.save",
}
MIB = 2**20


class Ours:
    """`save_checkpoint` and `load_checkpoint`."""

    def __init__(self, model, stage):
        self.model = model
        self.optimizer = zeroshard.AdamW(model, lr=1e-4, stage=stage)

    def save(self, path):
        zeroshard.save_checkpoint(path, self.model, self.optimizer)

    def save_in_background(self, path):
        return zeroshard.save_checkpoint(path, self.model, self.optimizer, blocking=False).wait

    def load(self, path):
        zeroshard.load_checkpoint(path, self.model, self.optimizer)


class Fsdp2:
    """torch's own sharding and its checkpoints."""

    def __init__(self, model):
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def states(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, path):
        dcp.save(self.states(), checkpoint_id=path)

    def save_in_background(self, path):
        return dcp.async_save(self.states(), checkpoint_id=path).result

    def load(self, path):
        states = self.states()
        dcp.load(states, checkpoint_id=path)
        parts = {"model_state_dict": states["model"], "optim_state_dict": states["optimizer"]}
        set_state_dict(self.model, self.optimizer, **parts)


class Full:
    """Everything on every rank, as under DDP; the first one writes it, all of them read it."""

    save_in_background = None

    def __init__(self, model):
        self.model = torch.nn.parallel.DistributedDataParallel(model)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def save(self, path):
        if dist.get_rank() == 0:
            path.mkdir()
            states = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            with open(path / "checkpoint.pt", "wb") as file:
                torch.save(states, file)
                file.flush()
                os.fsync(file.fileno())
        dist.barrier()

    def load(self, path):
        states = torch.load(path / "checkpoint.pt", weights_only=True)
        self.model.load_state_dict(states["model"])
        self.optimizer.load_state_dict(states["optimizer"])


def build(system, config):
    torch.manual_seed(0)
    model = Llama(config)
    numel = sum(p.numel() for p in model.parameters())
    if system == "full":
        return numel, Full(model)
    return numel, Fsdp2(model) if system == "fsdp2" else Ours(model, int(system[-1]))


def step(training):
    """One step on a few tokens, so that there are moments."""
    training.model(torch.arange(32).view(1, 32)).float().square().mean().backward()
    training.optimizer.step()
    training.optimizer.zero_grad()


def status(key):
    text = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{key}:\s+(\d+)", text)[1])


def measured(work, until=None):
    """What a rank's work takes; of every figure the largest over ranks.

    Args:
        work: it.
        until: called with the result of the work, for what goes on in the background.

    Returns:
        Seconds of the work, seconds until everything was done, and the most bytes that were held
        meanwhile beyond those before.
    """
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before must not hide what is taken
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak is what it is now
    before = status("VmRSS")
    dist.barrier()
    began = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - began
    if until is not None:
        until(result)
    total = time.perf_counter() - began
    figures = torch.tensor([seconds, total, status("VmHWM") - before], dtype=torch.float64)
    dist.all_reduce(figures, op=dist.ReduceOp.MAX)
    return figures.tolist()


def rank_main(system, config, repeats, folder):
    """Measure on this rank; the first one prints a line of JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    numel, training = build(system, config)
    step(training)
    figures = {}

    def note(names, values):
        for name, value in zip(names, values, strict=True):
            figures.setdefault(name, []).append(value)

    def remove(path):
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(path)

    for number in range(repeats):
        path = folder / f"{system}-{number}"
        note(("save_s", "save_total_s", "save_peak"), measured(partial(training.save, path)))
        files = [file for file in path.rglob("*") if file.is_file()]
        note(["bytes"], [sum(file.stat().st_size for file in files)])
        note(("load_s", "load_total_s", "load_peak"), measured(partial(training.load, path)))
        remove(path)
        if training.save_in_background is not None:
            names = ("async_stall_s", "async_total_s", "async_peak")
            work = partial(training.save_in_background, path)
            note(names, measured(work, until=lambda wait: wait()))
            remove(path)
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps({"numel": numel, **figures}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def start(system, options, folder):
    """One system in fresh processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={options.ranks}", __file__, "--rank-of", system]
    for name in ("repeats", "width", "layers", "vocab"):
        command += [f"--{name}", str(getattr(options, name))]
    done = subprocess.run(
        [*command, "--folder", str(folder)],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    raise SystemExit(f"{system} failed:\n{done.stderr[-2000:]}")


def summarise(figures):
    """Medians of times, the most of memory."""
    row = {name: values for name, values in figures.items() if name == "numel"}
    for name, values in figures.items():
        if name.endswith("_s"):
            row[name] = statistics.median(values)
        elif name != "numel":
            row[name] = max(values)
    return row


def print_table(rows):
    def seconds(row, name):
        return f"{row[name]:.2f}" if name in row else "-"

    def mib(row, name):
        return f"{row[name] / MIB:.0f}" if name in row else "-"

    print(
        "| system | bytes a parameter | save s | async stall s | async total s | load s | "
        "save MiB | async MiB | load MiB |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for system, row in rows.items():
        cells = [NAMES[system], f"{row['bytes'] / row['numel']:.3f}"]
        cells += [seconds(row, n) for n in ("save_s", "async_stall_s", "async_total_s", "load_s")]
        cells += [mib(row, n) for n in ("save_peak", "async_peak", "load_peak")]
        print(f"| {' | '.join(cells)} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--width", type=int, default=640)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=16384)
    parser.add_argument("--folder", type=pathlib.Path, help="on the disk that is measured")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    config = LlamaConfig(vocab=options.vocab, width=options.width, layers=options.layers)
    if options.rank_of:
        rank_main(options.rank_of, config, options.repeats, options.folder)
        return
    rows = {}
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=options.folder) as folder:
        for system in options.systems.split(","):
            rows[system] = summarise(start(system, options, folder))
    numel = next(iter(rows.values()))["numel"]
    print(f"{numel / 1e6:.1f} million fp32 parameters, {options.ranks} ranks")
    print_table(rows)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
