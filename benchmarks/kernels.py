"""Bytes per second of the fused update, beside a device copy and other AdamW implementations.

    python benchmarks/kernels.py [--sizes 20 24 28] [--json FILE] [--device cuda]

Every figure is a median over repetitions with its quartiles, timed by device events. `copy` is what
the device reaches on plain copies of the same number of bytes, so a share of it is how close the
update is to being limited by memory alone; at 2^20 elements both may stay in a cache. Ours is the
table of scalars and the launch, torch's a whole `optimizer.step()`. `--device cpu` tries the
program itself on tiny sizes; its figures say nothing.
"""

import argparse
import json
import pathlib
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version

import torch
from torch import nn

from zeroshard.config import Precision
from zeroshard.formats import state_format
from zeroshard.kernel_update import KernelUpdater, SlotScalars
from zeroshard.layout import ParamSpec, plan_layout
from zeroshard.storage import Arena
from zeroshard.triton_kernels.launch import is_available

GROUP = {
    "lr": 1e-4,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.1,
    "maximize": False,
}
MODES = [
    ("float32", "auto", "fp32"),
    ("float32", "auto", "bf16"),
    ("float32", "auto", "int8"),
    ("bfloat16", "split", "fp32"),
    ("bfloat16", "split", "bf16"),
    ("bfloat16", "split", "int8"),
    ("bfloat16", "fp32", "fp32"),
    ("bfloat16", "none", "fp32"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    what: str
    numel: int
    tensors: int
    nbytes: int  # read and written in one step
    ms: float  # median
    quartiles_ms: tuple[float, float]

    @property
    def gbytes_per_s(self) -> float:
        return self.nbytes / self.ms / 1e6


def timed(function: Callable[[], object], device: torch.device, rounds: int) -> list[float]:
    """Milliseconds of each call, after a few that warm up."""
    for _ in range(3):
        function()
    if device.type == "cpu":
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            function()
            times.append((time.perf_counter() - start) * 1e3)
        return times
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
    for before, after in events:
        before.record()
        function()
        after.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in events]


def measure(
    what: str, function: Callable[[], object], nbytes: int, numel: int, tensors: int, options
) -> Result:
    times = timed(function, options.torch_device, options.rounds)
    low, middle, high = statistics.quantiles(times, n=4)
    return Result(
        what=what, numel=numel, tensors=tensors, nbytes=nbytes, ms=middle, quartiles_ms=(low, high)
    )


def shapes_of(numel: int, tensors: int) -> list[int]:
    """Sizes of `tensors` parameters with `numel` elements in all."""
    return [numel // tensors] * (tensors - 1) + [numel - numel // tensors * (tensors - 1)]


class Step:
    """The update of one rank without others, as the optimizer makes it."""

    def __init__(self, mode: tuple[str, str, str], sizes: list[int], groups: int, device) -> None:
        dtype, master, moments = mode
        self.numel = sum(sizes)
        specs = [
            ParamSpec(name=str(i), shape=(n,), stride=(1,), dtype=dtype, device=str(device))
            for i, n in enumerate(sizes)
        ]
        layout = plan_layout(specs, world_size=1, bucket_nbytes=2**40)
        self.format = state_format(dtype, Precision(master=master, moments=moments))
        (plan,) = layout.arenas
        self.arena = Arena(plan, 1, 0)
        self.arena.allocate_state(self.format.fields)
        self.arena.allocate_gradients().normal_(std=1e-3)
        self.arena.parameters.normal_(std=0.02)
        self.scalars = SlotScalars(len(sizes), self.arena.device)
        starts = [slot.offset // 256 for slot in layout.slots]
        self.updater = KernelUpdater(
            self.arena, layout, self.format, self.scalars, starts, gathers=False
        )
        self.groups = [dict(GROUP, lr=GROUP["lr"] * (i + 1)) for i in range(groups)]
        group_of = {slot: slot % groups for slot in range(len(sizes))}
        ((self.buckets),) = self.updater.plan(group_of, [0])
        self.scalars.plan(group_of)
        self.counts = torch.ones(len(sizes), device=self.arena.device)
        self.refresh()

    def refresh(self) -> None:
        self.scalars.refresh(self.groups, self.counts, None)

    def whole(self) -> None:
        """What is between two steps' gradients and weights: the table and the launch."""
        self.counts += 1
        self.refresh()
        self.update()

    def update(self) -> None:
        self.updater.update(self.buckets, self.groups, None, None)

    @property
    def nbytes(self) -> int:
        """Bytes read and written, padding apart: the gradient once, everything else twice."""
        state = sum(tensor.nbytes for tensor in self.arena.state.values())
        parameters = self.arena.parameters.nbytes
        reads_parameters = self.format.master != "fp32"
        held = self.arena.gradients.nbytes + 2 * state + parameters * (1 + reads_parameters)
        return held * self.numel // self.arena.plan.numel


def ours(options, numel: int, tensors: int, groups: int) -> Iterator[Result]:
    for mode in MODES:
        step = Step(mode, shapes_of(numel, tensors), groups, options.torch_device)
        what = f"ours: {mode[0]}, master {step.format.master}, moments {mode[2]}"
        yield measure(what, step.whole, step.nbytes, numel, tensors, options)


def copy(options, numel: int) -> Result:
    """A plain copy that moves 28 bytes for each element."""
    source = torch.zeros(14 * numel, dtype=torch.uint8, device=options.torch_device)
    target = torch.empty_like(source)
    return measure("copy", lambda: target.copy_(source), 28 * numel, numel, 1, options)


def of_torch(options, numel: int, tensors: int, groups: int) -> Iterator[Result]:
    """torch's AdamW on fp32 masters with the casts that bf16 training needs."""
    device = options.torch_device
    sizes = shapes_of(numel, tensors)
    masters = [nn.Parameter(torch.zeros(n, device=device)) for n in sizes]
    for master in masters:
        master.grad = torch.full_like(master, 1e-3)
    weights = [torch.zeros(n, dtype=torch.bfloat16, device=device) for n in sizes]
    grads = [torch.full((n,), 1e-3, dtype=torch.bfloat16, device=device) for n in sizes]
    for kind in ("fused", "foreach"):
        optimizer = torch.optim.AdamW(
            [{"params": masters[i::groups], "lr": 1e-4 * (i + 1)} for i in range(groups)],
            weight_decay=0.1,
            **{kind: True},
        )

        def with_casts(optimizer: torch.optim.Optimizer = optimizer) -> None:
            torch._foreach_copy_([master.grad for master in masters], grads)
            optimizer.step()
            torch._foreach_copy_(weights, [master.detach() for master in masters])

        yield measure(f"torch {kind}", optimizer.step, 28 * numel, numel, tensors, options)
        yield measure(f"torch {kind} + casts", with_casts, 40 * numel, numel, tensors, options)


def of_others(options, numel: int, tensors: int) -> Iterator[Result]:
    """8-bit AdamW of libraries, where they are installed."""
    device = options.torch_device
    for name, load in (("bitsandbytes", _bitsandbytes), ("torchao", _torchao)):
        parameters = [
            nn.Parameter(torch.zeros(n, dtype=torch.bfloat16, device=device))
            for n in shapes_of(numel, tensors)
        ]
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 1e-3)
        try:
            optimizer = load()(parameters, lr=1e-4)
        except ImportError:
            continue
        yield measure(f"{name} 8-bit", optimizer.step, 10 * numel, numel, tensors, options)


def _bitsandbytes() -> type:
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit


def _torchao() -> type:
    from torchao.optim import AdamW8bit

    return AdamW8bit


def host_times(options) -> dict[str, float]:
    """Median microseconds of the host for 400 tensors in 4 groups; nothing waits for the device."""
    step = Step(MODES[3], shapes_of(400 * 256, 400), 4, options.torch_device)
    found = {}
    for name, call in (("launch", step.update), ("table of scalars", step.refresh)):
        times = []
        for _ in range(200):
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e6)
            if options.torch_device.type == "cuda":
                torch.cuda.synchronize()  # else a full queue would make the host wait
        found[name] = statistics.median(times[20:])
    return found


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--sizes", type=int, nargs="+", default=[20, 24, 28], help="powers of two: elements")
    add("--rounds", type=int, default=30)
    add("--device", default="cuda")
    add("--json", type=pathlib.Path, help="write the results there")
    options = parser.parse_args()
    options.torch_device = torch.device(options.device)
    if options.torch_device.type == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU; --device cpu tries the program itself")
    return options


def main() -> None:
    options = parse_options()
    on_gpu = options.torch_device.type == "cuda"
    device = torch.cuda.get_device_name() if on_gpu else f"CPU {platform.machine()}"
    if on_gpu and not is_available(options.torch_device):
        raise SystemExit("kernels.py: Triton does not run here, so there is nothing to measure")
    results: list[Result] = []
    for power in options.sizes:
        numel = 2**power
        results.append(copy(options, numel))
        for tensors, groups in ((1, 1), (400, 4)):
            results += ours(options, numel, tensors, groups)
            results += of_torch(options, numel, tensors, groups)
            results += of_others(options, numel, tensors)
    copies = {r.numel: r.gbytes_per_s for r in results if r.what == "copy"}
    hosts = host_times(options)
    print(f"{device}, torch {torch.__version__}\n")
    print("| | elements | tensors | ms (quartiles) | GB/s | of copy |\n|---|---|---|---|---|---|")
    for r in results:
        low, high = r.quartiles_ms
        share = r.gbytes_per_s / copies[r.numel]
        print(
            f"| {r.what} | 2^{r.numel.bit_length() - 1} | {r.tensors} | {r.ms:.3f} ({low:.3f} to "
            f"{high:.3f}) | {r.gbytes_per_s:.0f} | {share:.2f} |"
        )
    for name, micros in hosts.items():
        print(f"\nhost time, 400 tensors in 4 groups, {name}: {micros:.0f} us")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        rows = [{**asdict(r), "gbytes_per_s": r.gbytes_per_s} for r in results]
        versions = {"torch": torch.__version__, "triton": version("triton") if on_gpu else None}
        text = {"device": device, **versions, "host_us": hosts, "results": rows}
        options.json.write_text(json.dumps(text, indent=1))


if __name__ == "__main__":
    main()
