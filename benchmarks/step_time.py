"""Step time, CPU time and bytes of data-parallel systems side by side, on gloo or NCCL.

    python benchmarks/step_time.py --systems ddp,zero1,stage1,stage2 --rounds 5

Every round starts each system once, in turn, so that a slow minute of the machine hits all of them.
On a shared machine the smallest step and the CPU time decide; medians say how noisy it was.
Losses are printed because a fast step that computes something else is worth nothing.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ADAMW = {"lr": 3e-4, "weight_decay": 0.1}
VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH, BATCH = 8192, 512, 8, 8, 32, 4


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.feed_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, mask):
        y = self.attention_norm(x)
        x = x + self.attention(y, y, y, attn_mask=mask, is_causal=True, need_weights=False)[0]
        return x + self.narrow(F.gelu(self.widen(self.feed_norm(x))))


class Decoder(nn.Module):
    """33.6 million parameters, most of them in matrices, a third in embedding and head."""

    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens, targets):
        x = self.embed(tokens) + self.place.weight
        for layer in self.layers:
            x = layer(x, self.mask)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def build(system, model):
    """(model to call, optimizer) of one system."""
    if system.startswith("stage"):
        import zeroshard

        return model, zeroshard.AdamW(model, stage=int(system[-1]), **ADAMW)
    if system == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        return model, torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    replica = DistributedDataParallel(model, gradient_as_bucket_view=system != "ddp_copy")
    if system == "zero1":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        kind = {"optimizer_class": torch.optim.AdamW, "fused": True}
        return replica, ZeroRedundancyOptimizer(model.parameters(), **kind, **ADAMW)
    return replica, torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)


def batches(steps, rank, world_size):
    """The same global batches whatever the number of ranks; every other token repeats the last."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
        tokens[:, 1::2] = tokens[:, :-1:2]
        yield tokens.chunk(world_size)[rank]


def rank_main(system, steps):
    """Train on this rank; the first one prints a line of JSON."""
    torch.set_num_threads(1)
    use_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else None
    if use_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if use_cuda else "gloo", device_id=device)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Decoder().to(device or "cpu")
    replica, optimizer = build(system, model)
    wall, cpu, losses = [], [], []
    for tokens in batches(steps, rank, world_size):
        tokens = tokens.to(device or "cpu")
        dist.barrier()
        began, cpu_began = time.perf_counter(), time.process_time()
        loss = replica(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if use_cuda:
            torch.cuda.synchronize()
        wall.append(1e3 * (time.perf_counter() - began))
        cpu.append(1e3 * (time.process_time() - cpu_began))
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / world_size)
    if rank == 0:
        warm = slice(3, None)
        report = {
            "step_ms": statistics.median(wall[warm]),
            "smallest_step_ms": min(wall[warm]),
            "cpu_ms": statistics.median(cpu[warm]),
            "last_loss": losses[-1],
        }
        if system.startswith("stage"):
            report["bytes"] = optimizer.memory()
        print("RESULT " + json.dumps(report), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def start(system, ranks, steps):
    """One run of one system in fresh processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", __file__, "--rank-of", system, "--steps", str(steps)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    raise SystemExit(f"{system} failed:\n{done.stderr[-2000:]}")


def summarise(runs, base):
    """Rows of the table: medians, the smallest step over all rounds, ratios to `base`."""
    rows = {}
    smallest = {name: min(r["smallest_step_ms"] for r in results) for name, results in runs.items()}
    for name, results in runs.items():
        cpu = [a["cpu_ms"] / b["cpu_ms"] for a, b in zip(results, runs[base], strict=True)]
        rows[name] = {
            "step_ms": statistics.median(r["step_ms"] for r in results),
            "smallest_step_ms": smallest[name],
            "smallest_ratio": smallest[name] / smallest[base],
            "cpu_ms": statistics.median(r["cpu_ms"] for r in results),
            "cpu_ratio": statistics.median(cpu),
            "last_loss": results[-1]["last_loss"],
            "bytes": results[-1].get("bytes"),
        }
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--systems", default="ddp,zero1,fsdp2,stage1,stage2,stage3")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        rank_main(options.rank_of, options.steps)
        return
    systems = options.systems.split(",")
    runs = {system: [] for system in systems}
    for _ in range(options.rounds):
        for system in systems:
            runs[system].append(start(system, options.ranks, options.steps))
    rows = summarise(runs, systems[0])
    print(f"| system | step ms | smallest | ratio to {systems[0]} | CPU ms | ratio | last loss |")
    print("|---|---|---|---|---|---|---|")
    for name, row in rows.items():
        print(
            f"| {name} | {row['step_ms']:.0f} | {row['smallest_step_ms']:.0f} | "
            f"{row['smallest_ratio']:.2f} | {row['cpu_ms']:.0f} | {row['cpu_ratio']:.2f} | "
            f"{row['last_loss']:.5f} |"
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
