"""Host time of unshard + reshard of one unit, stage 3 beside FSDP2, with nothing on the wire.

    python benchmarks/host_time.py [--parameters 12] [--world-size 8] [--rounds 30]

A fake process group takes every message and sends none, so what is left is Python, dispatch, and
the copies that each makes. Both alternate in one process; the smallest round of each counts.
"""

import argparse
import json
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import zeroshard


def block(parameters: int, width: int) -> nn.Module:
    """A model that is one unit of `parameters` square matrices."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(parameters)))


def ours(model: nn.Module):
    wrapper = nn.ModuleDict({"block": model})
    optimizer = zeroshard.AdamW(wrapper, stage=3, units=["block"])
    sharding = optimizer.engine.sharding
    (unit,) = (unit for unit in sharding.units if unit.name == "block")

    @torch.no_grad()
    def cycle() -> None:
        sharding.unshard(unit)
        sharding.reshard(unit)

    return cycle


def fsdp2(model: nn.Module, world_size: int):
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))

    def cycle() -> None:
        model.unshard()
        model.reshard()

    return cycle


def microseconds(cycle, repeats: int) -> float:
    started = time.perf_counter()
    for _ in range(repeats):
        cycle()
    return 1e6 * (time.perf_counter() - started) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=12)
    parser.add_argument("--width", type=int, default=64, help="of the square matrices")
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=50, help="cycles in a round")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=options.world_size, store=FakeStore())
    cycles = {
        "zeroshard": ours(block(options.parameters, options.width)),
        "fsdp2": fsdp2(block(options.parameters, options.width), options.world_size),
    }
    best = dict.fromkeys(cycles, float("inf"))
    for _ in range(options.rounds):
        for name, cycle in cycles.items():
            best[name] = min(best[name], microseconds(cycle, options.repeats))
    result = {f"{name}_us": round(value, 1) for name, value in best.items()}
    result["ratio"] = round(best["zeroshard"] / best["fsdp2"], 3)
    print(json.dumps({**vars(options), **result}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
