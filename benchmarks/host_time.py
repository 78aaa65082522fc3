"""Host time of stage 3 beside FSDP2's, with nothing on the wire.

    python benchmarks/host_time.py [--units 33] [--parameters 12] [--world-size 8] [--rounds 30]

A fake process group takes every message and sends none, so what is left is Python, dispatch, and
the copies that each makes. Two things are timed: unshard and reshard of one unit, and forward and
backward of a model of many, beyond the time of the plain model. All alternate in one process; the
smallest round of each counts.
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


class Block(nn.Module):
    """A unit of square matrices, each in a module of its own."""

    def __init__(self, parameters: int, width: int) -> None:
        super().__init__()
        self.matrices = nn.ModuleList(
            nn.Linear(width, width, bias=False) for _ in range(parameters)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for matrix in self.matrices:
            x = matrix(x)
        return x


class Model(nn.Module):
    """`units` blocks, one after the other."""

    def __init__(self, units: int, parameters: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(parameters, width) for _ in range(units))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def our_cycle(options: argparse.Namespace):
    model = Model(1, options.parameters, options.width)
    sharding = zeroshard.AdamW(model, stage=3, units=["blocks.0"]).engine.sharding
    (unit,) = (unit for unit in sharding.units if unit.name == "blocks.0")

    @torch.no_grad()
    def cycle() -> None:
        sharding.unshard(unit)
        sharding.reshard(unit)

    return cycle


def fsdp2_cycle(options: argparse.Namespace):
    block = Block(options.parameters, options.width)
    fully_shard(block, mesh=init_device_mesh("cpu", (options.world_size,)))

    def cycle() -> None:
        block.unshard()
        block.reshard()

    return cycle


def microseconds(cycle, repeats: int) -> float:
    started = time.perf_counter()
    for _ in range(repeats):
        cycle()
    return 1e6 * (time.perf_counter() - started) / repeats


def time_cycles(options: argparse.Namespace) -> dict[str, float]:
    cycles = {"zeroshard": our_cycle(options), "fsdp2": fsdp2_cycle(options)}
    best = dict.fromkeys(cycles, float("inf"))
    for _ in range(options.rounds):
        for name, cycle in cycles.items():
            best[name] = min(best[name], microseconds(cycle, options.repeats))
    return best


def time_passes(units: int, parameters: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """System -> microseconds of forward and of backward."""
    models = {name: Model(units, parameters, options.width) for name in ("plain", "ours", "fsdp2")}
    optimizer = zeroshard.AdamW(models["ours"], stage=3)
    mesh = init_device_mesh("cpu", (options.world_size,))
    for module in (*models["fsdp2"].blocks, models["fsdp2"]):
        fully_shard(module, mesh=mesh)
    x = torch.randn(2, options.width)
    best = {name: [float("inf")] * 2 for name in models}
    for _ in range(options.rounds):
        for name, model in models.items():
            started = time.perf_counter()
            loss = model(x).sum()
            between = time.perf_counter()
            loss.backward()
            ended = time.perf_counter()
            times = 1e6 * (between - started), 1e6 * (ended - between)
            best[name] = [min(a, b) for a, b in zip(best[name], times, strict=True)]
            if name == "ours":
                optimizer.zero_grad()
            else:
                model.zero_grad()
    optimizer.close()
    return best


def beyond_plain(best: dict[str, list[float]]) -> dict[str, list[float]]:
    return {
        name: [mine - plain for mine, plain in zip(best[name], best["plain"], strict=True)]
        for name in ("ours", "fsdp2")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--units", type=int, default=33)
    parser.add_argument("--parameters", type=int, default=12, help="of a unit")
    parser.add_argument("--width", type=int, default=16, help="of the square matrices")
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=50, help="cycles in a round")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=options.world_size, store=FakeStore())
    cycles = time_cycles(options)
    many = beyond_plain(time_passes(options.units, options.parameters, options))
    # The same number of parameters in a quarter of the units: what is left is the units' own.
    few_units = max(options.units // 4, 1)
    few = beyond_plain(
        time_passes(few_units, options.units * options.parameters // few_units, options)
    )
    result = {"options": vars(options), "unshard_reshard_us": cycles}
    for number, what in enumerate(("forward", "backward")):
        per_unit = {
            name: (many[name][number] - few[name][number]) / (options.units - few_units)
            for name in many
        }
        per_parameter = {
            name: (many[name][number] - options.units * per_unit[name])
            / (options.units * options.parameters)
            for name in many
        }
        totals = {name: many[name][number] for name in many}
        for label, values in (
            ("us", totals),
            ("us_per_unit", per_unit),
            ("us_per_parameter", per_parameter),
        ):
            ratio = values["ours"] / values["fsdp2"]
            result[f"{what}_{label}"] = {**values, "ratio": ratio}
    print(json.dumps(result, indent=2))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
