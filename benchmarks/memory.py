"""Simulated against measured: the peak of a training step on a GPU, in every stage.

    python benchmarks/memory.py [--json FILE] [--layers 16 --width 2048] [--seq 2048]

A Llama of about 1B bf16 parameters takes three steps on this machine's first GPU: as the only rank
of an NCCL world, and as one rank of a fake world of 8, in which collectives return at once and
everything else is real. Measured is the peak of what torch's allocator was asked for
(`requested_bytes.all.peak`) in the steps after the first; simulated is what `zeroshard.simulate`
says without the GPU. Exits with 1 where they differ by more than 5 %. Every configuration runs in a
process of its own. Without a GPU only the simulation runs, and nothing is compared.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))

from llama import Llama, LlamaConfig

import zeroshard
from zeroshard.memory.simulate import simulate

WORLDS = (1, 8)
STAGES = (1, 2, 3)
TOLERANCE = 0.05
STEPS = 3


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--only", nargs=3, metavar=("measure|simulate", "STAGE", "WORLD"))
    return parser.parse_args()


def model_of(args: argparse.Namespace) -> Llama:
    config = LlamaConfig(vocab=args.vocab, width=args.width, layers=args.layers, head_width=128)
    return Llama(config).bfloat16()


def batch_of(args: argparse.Namespace, device: str = "cpu") -> torch.Tensor:
    return torch.randint(args.vocab, (args.micro_batch, args.seq), device=device)


def loss_of(model: Llama, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def simulated(args: argparse.Namespace, stage: int, world_size: int) -> dict[str, object]:
    """What a simulation says of the peak."""
    report = simulate(
        lambda: model_of(args),
        lambda: batch_of(args),
        loss_fn=loss_of,
        world_size=world_size,
        stage=stage,
        steps=STEPS,
    )
    return {"peak": report.peak.total, "in": report.peak.phase, **dict(report.peak.categories)}


def measured(args: argparse.Namespace, stage: int, world_size: int) -> dict[str, object]:
    """The allocator's figures of steps on the GPU."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.cuda.set_device(0)
    if world_size == 1:
        with tempfile.TemporaryDirectory() as folder:
            dist.init_process_group(
                "nccl", init_method=f"file://{folder}/store", rank=0, world_size=1
            )
    else:
        dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    model = model_of(args).cuda()
    optimizer = zeroshard.AdamW(model, stage=stage)
    for step in range(STEPS):
        if step == 1:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        loss_of(model, batch_of(args, "cuda")).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    free, total = torch.cuda.mem_get_info()
    reserved = stats["reserved_bytes.all.current"]
    dist.destroy_process_group()
    return {
        "peak": stats["requested_bytes.all.peak"],
        "allocated_peak": stats["allocated_bytes.all.peak"],
        "reserved_peak": stats["reserved_bytes.all.peak"],
        "outside_torch": total - free - reserved,
        "device": torch.cuda.get_device_name(),
    }


def in_own_process(kind: str, stage: int, world_size: int) -> dict[str, object]:
    """The result of one configuration, or why there is none."""
    command = [sys.executable, *sys.argv, "--only", kind, str(stage), str(world_size)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ, timeout=300, check=False
    )
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["no word"])[-1]}
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> int:
    args = parse()
    if args.only:
        kind, stage, world_size = args.only
        run = {"measure": measured, "simulate": simulated}[kind]
        print(json.dumps(run(args, int(stage), int(world_size))))
        return 0
    has_gpu = torch.cuda.is_available()
    rows, failed = [], False
    for world_size in WORLDS:
        for stage in STAGES:
            row = {"world_size": world_size, "stage": stage}
            row["simulated"] = said = in_own_process("simulate", stage, world_size)
            row["measured"] = real = (
                in_own_process("measure", stage, world_size) if has_gpu else None
            )
            line = f"W {world_size}, stage {stage}: simulated {said.get('peak', said)}"
            if real is None:
                line += ", not measured: no GPU"
            elif "peak" in real and "peak" in said:
                row["difference"] = said["peak"] / real["peak"] - 1
                failed |= abs(row["difference"]) > TOLERANCE
                line += f", measured {real['peak']}: {100 * row['difference']:+.2f} %"
            else:
                line += f", measured {real}"
            failed |= "error" in said or (real is not None and "error" in real)
            rows.append(row)
            print(line, flush=True)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
