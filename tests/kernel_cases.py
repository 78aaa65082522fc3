"""Kernels beside their torch twins, by Triton's interpreter or on a GPU.

    TRITON_INTERPRET=1 python tests/kernel_cases.py OUT.json

Writes for each case the names of what differed. A process of its own, since the interpreter has to
be chosen before Triton is imported.
"""

import itertools
import json
import math
import pathlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from zeroshard.triton_kernels import adamw, launch
from zeroshard.triton_kernels.adamw import ROW_BLOCKS, State, adamw_twin, launch_adamw
from zeroshard.triton_kernels.norm import block_powers_twin, launch_norm

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WEIGHTS = [  # dtype of the parameter, master
    ("fp32", "none"),
    ("bf16", "none"),
    ("bf16", "split"),
    ("bf16", "fp32"),
    ("fp16", "none"),
    ("fp16", "fp32"),
]
SWITCHES = list(itertools.product(DTYPES, WEIGHTS, ("fp32", "bf16", "int8")))
SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-40, 3.4e38, 1e20, 1e-20]
BLOCKS = 72  # of the state; parameters have two more before and one behind

# state block, parameter block, length, slot, block in model space; between and behind them nothing
# may move. The third slot maximizes, the fourth is not live.
ROWS = [
    [0, 2, ROW_BLOCKS, 0, 0],
    [ROW_BLOCKS, ROW_BLOCKS + 2, 1, 0, ROW_BLOCKS],
    [66, 68, 2, 1, 2**30],
    [69, 71, 1, 2, 77],
    [70, 72, 1, 3, 78],
]
SCALARS = [  # see Scalars
    [1, 1e-4, 0.9, 0.1, 0.999, 0.001, 1e-2, 31.6, 1e-8, 7.27, 5, 1],
    [1, 0, 0.5, 0.5, 0.9, 0.1, 2e-2, 1.5, 2.0**-75, 1.5, 1, 1],
    [-1, 1e-3, 0, 1, 0.95, 0.05, 1e-3, 4.5, 1e-3, math.inf, 2**24 - 1, 1],
    [1, 1e-4, 0.9, 0.1, 0.999, 0.001, 1e-2, 31.6, 1e-8, 7.27, 5, 0],
]


def state_of(grad: str, param: str, master: str, moments: str, seed: int) -> State:
    """Random state with special values in all of it."""
    random = torch.Generator().manual_seed(seed)
    numel = BLOCKS * 256

    def normal(n: int, size: float) -> torch.Tensor:
        values = torch.randn(n, generator=random) * size
        values[::1009] = torch.tensor(SPECIAL).repeat(n // 1009 // len(SPECIAL) + 1)[
            : len(values[::1009])
        ]
        values[n // 2 : n // 2 + 300] = 0
        return values

    weights = normal(numel + 3 * 256, 1.0)
    if moments == "int8":
        m = torch.randint(-127, 128, (numel,), generator=random, dtype=torch.int8)
        v = torch.randint(0, 256, (numel,), generator=random, dtype=torch.uint8)
    else:
        m = normal(numel, 0.1).to(DTYPES[moments])
        v = normal(numel, 0.1).square().to(DTYPES[moments])
    scales = torch.rand(2, BLOCKS, generator=random).bfloat16().float() * 1e-5
    scales[0, 3], scales[1, 5], scales[:, 7] = math.nan, 0, 1e-38
    kept = torch.randint(-(2**15), 2**15, (numel,), generator=random, dtype=torch.int16)
    return State(
        grad=normal(numel, 0.1).to(DTYPES[grad]),
        param=weights.to(DTYPES[param]),
        master=kept if master == "split" else weights[512 : 512 + numel].clone(),
        exp_avg=m,
        exp_avg_sq=v,
        exp_avg_scale=scales[0],
        exp_avg_sq_scale=scales[1],
    )


def differences(ours: State, twin: State) -> list[str]:
    """The fields that are not equal bit for bit, a NaN being equal to a NaN."""
    return [
        name
        for name, a, b in zip(State._fields, ours, twin, strict=True)
        if not same_bits(a.cpu(), b.cpu())
    ]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.is_floating_point():
        if not torch.equal(a.isnan(), b.isnan()):
            return False
        a, b = (torch.where(x.isnan(), 0, x) for x in (a, b))
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def padded(rows: list[list[int]]) -> torch.Tensor:
    return torch.tensor([[*row, 0, 0, 0] for row in rows], dtype=torch.int32)


@contextmanager
def larger_programs() -> Iterator[None]:
    """One program for a row: the interpreter pays for programs more than for elements."""
    sizes = adamw.sizes_for
    adamw.sizes_for = lambda moments, target: launch.Sizes(block=8192, vectors=2, num_warps=4)
    try:
        yield
    finally:
        adamw.sizes_for = sizes


def adamw_case(
    switches: tuple[str, tuple[str, str], str],
    device: str,
    *,
    first_row: int = 0,
    num_rows: int = len(ROWS),
    coefficient: float = 0.5,
    as_launched: bool = False,
) -> list[str]:
    grad, (param, master), moments = switches
    state = state_of(grad, param, master, moments, seed=len(str(switches)))
    ours = State(*(tensor.clone().to(device) for tensor in state))
    rest = padded(ROWS), torch.tensor(SCALARS, dtype=torch.float32), torch.tensor([coefficient])
    numbers = first_row, num_rows, 0x5EED
    is_slow = device == "cpu" and first_row == 0 and not as_launched
    with larger_programs() if is_slow else nullcontext():
        launch_adamw(ours, *(tensor.to(device) for tensor in rest), *numbers, master, moments)
    twin = State(*(tensor.clone() for tensor in state))
    adamw_twin(twin, *rest, *numbers, master, moments)
    moved = [n for n, a, b in zip(State._fields, twin, state, strict=True) if not same_bits(a, b)]
    expected = {"param", "exp_avg", "exp_avg_sq"}
    missing = expected - set(moved) if num_rows else set()
    return [*differences(ours, twin), *(f"{name} did not move" for name in sorted(missing))]


def norm_case(p: float, num_blocks: int, special: str, device: str) -> list[str]:
    values = torch.randn(num_blocks * 256, generator=torch.Generator().manual_seed(num_blocks))
    if special != "finite":
        # The square of a finite value may be infinite without the value being so.
        values[num_blocks * 128] = {"nan": math.nan, "-inf": -math.inf, "large": 1e30}[special]
    flags = [torch.zeros(1, device=device), torch.zeros(1)]
    ours = launch_norm(values.to(device), p, flags[0]).cpu()
    twin = block_powers_twin(values, p, flags[1])
    wrong = [] if same_bits(ours, twin) else ["powers"]
    expected = float(special in ("nan", "-inf"))
    return wrong + [f"flag {i}" for i, flag in enumerate(flags) if float(flag) != expected]


def cases(device: str) -> dict:
    """Case name -> a function that returns what differed."""
    found = {}
    for switches in SWITCHES:
        grad, (param, master), moments = switches
        name = f"adamw {grad} {param} {master} {moments}"
        found[name] = lambda switches=switches: adamw_case(switches, device)
    for moments in ("fp32", "bf16", "int8"):
        switches = ("bf16", ("bf16", "split"), moments)
        found[f"adamw from the second row {moments}"] = lambda switches=switches: adamw_case(
            switches, device, first_row=1, num_rows=2
        )
        found[f"adamw a whole row in many programs {moments}"] = lambda switches=switches: (
            adamw_case(switches, device, num_rows=1, as_launched=True)
        )
        found[f"adamw no row {moments}"] = lambda switches=switches: adamw_case(
            switches, device, num_rows=0
        )
        for coefficient in (1.0, math.nan, math.inf):
            found[f"adamw coefficient {coefficient} {moments}"] = (
                lambda switches=switches, coefficient=coefficient: adamw_case(
                    switches, device, first_row=2, num_rows=3, coefficient=coefficient
                )
            )
    for p, num_blocks in itertools.product((1.0, 2.0, math.inf), (0, 1, 7, 8, 9, 33)):
        for special in ("finite", "nan", "-inf", "large") if num_blocks else ("finite",):
            found[f"norm {p} {num_blocks} blocks {special}"] = (
                lambda p=p, n=num_blocks, special=special: norm_case(p, n, special, device)
            )
    return found


def main() -> None:
    launch.load()
    results = {name: case() for name, case in cases("cpu").items()}
    pathlib.Path(sys.argv[1]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
