"""Which 8 bits for the moments: update errors of code books on gradients of examples/finetune.py.

    python benchmarks/code_books.py [--steps 300]

Trains the example on one rank with torch's AdamW and records the clipped gradients of every
sixteenth block of 256 elements. Then AdamW runs over them with moments that go through a book after
every step, and its updates u = m / (sqrt(v) + eps), bias corrections included, are compared with
those of fp32 moments. An update is in units of the learning rate: exact AdamW cannot make one above
7.3 at beta2 = 0.999, so a large one is a weight thrown away, which a validation loss hides.
"""

import argparse
import math
import pathlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from zeroshard.triton_kernels.quantize import (
    decode_first_twin,
    decode_second_twin,
    encode_first_twin,
    encode_second_twin,
    exact_sqrt,
)

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))
BLOCK, KEEP_ONE_IN = 256, 16
EPS = 1e-8

Book = Callable[[Tensor], Tensor]
"""[blocks, 256] values divided by the largest magnitude of their block -> those of the codes."""


def record(steps: int) -> Tensor:
    """[steps, blocks, 256] fp32: gradients of the example, the same blocks at every step."""
    import finetune
    from options import parse_options
    from world import World

    options = parse_options(["--stage", "0", "--steps", str(steps), "--sample", "0"])
    world = World(rank=0, size=1, device=torch.device("cpu"))
    corpus = finetune.Corpus.split(
        finetune.new_tokenizer(options).encode(finetune.read_text(())), seq=options.seq
    )
    trainee = finetune.assemble(finetune.new_model(options), 0, options, world)
    factor = finetune.warmup_and_cosine(steps)
    scheduler = torch.optim.lr_scheduler.LambdaLR(trainee.optimizer, factor)
    batches = corpus.batches(
        batch=options.batch, seq=options.seq, seed=options.seed, rank=0, world_size=1
    )
    recorded = []
    for _ in range(steps):
        finetune.take_step(trainee, [next(batches)])
        scheduler.step()
        flat = torch.cat([p.grad.flatten() for p in trainee.model.parameters()])
        whole = flat[: flat.numel() // BLOCK * BLOCK].view(-1, BLOCK)
        recorded.append(whole[::KEEP_ONE_IN].clone())
    return torch.stack(recorded)


def nearest(levels: Tensor) -> Book:
    """The nearest of sorted levels."""
    middles = (levels[1:] + levels[:-1]) / 2
    return lambda values: levels[torch.bucketize(values, middles)]


def linear(levels: int) -> Book:
    return lambda values: (values * levels).round() / levels


def square(levels: int) -> Book:
    """y |y| with y evenly spaced."""

    def book(values: Tensor) -> Tensor:
        y = (values.abs().sqrt() * levels).round() / levels
        return y * y * values.sign()

    return book


def companded(levels: int) -> Book:
    """2 n / (1 + |n|) evenly spaced."""

    def book(values: Tensor) -> Tensor:
        y = (2 * values / (1 + values.abs()) * levels).round() / levels
        return y / (2 - y.abs())

    return book


def dynamic_levels(*, signed: bool) -> Tensor:
    """Decades, the larger ones with more evenly spaced steps: 7 decades share 7 or 8 bits.

    Source: Dettmers et al. 2022, arXiv:2110.02861, section 2.1 (dynamic tree quantization).
    """
    levels = [0.0, 1.0]
    decades = 7
    for decade in range(decades):
        steps = 2 ** (decade + (0 if signed else 1))
        edges = torch.linspace(0.1, 1, steps + 1)
        middles = (edges[1:] + edges[:-1]) / 2 * 10.0 ** (decade - decades + 1)
        levels += middles.tolist()
    positive = sorted(levels)
    if signed:
        positive = [-level for level in positive[:0:-1]] + positive
    return torch.tensor(positive)


def minifloat_levels(exponent_bits: int, mantissa_bits: int, *, signed: bool) -> Tensor:
    """A small floating-point format with subnormals, its largest value scaled to 1."""
    levels = []
    for exponent in range(2**exponent_bits):
        for mantissa in range(2**mantissa_bits):
            fraction = mantissa / 2**mantissa_bits
            whole = 2.0**exponent * (1 + fraction) if exponent else 2.0 * fraction
            levels.append(whole)
    levels = [level / max(levels) for level in levels]
    if signed:
        levels = sorted({-level for level in levels} | set(levels))
    return torch.tensor(levels)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    name: str
    first: Book  # of m
    second: Book  # of sqrt(v), or of v
    of_root: bool = True
    least: float = 0.0  # the smallest level above 0 of `second`, for the floor


def candidates() -> list[Candidate]:
    unsigned = dynamic_levels(signed=False)
    small = minifloat_levels(4, 4, signed=False)
    return [
        Candidate(
            name="linear m, linear sqrt(v)", first=linear(127), second=linear(255), least=1 / 255
        ),
        Candidate(
            name="companded m, linear sqrt(v)",
            first=companded(127),
            second=linear(255),
            least=1 / 255,
        ),
        Candidate(
            name="dynamic m, dynamic v",
            first=nearest(dynamic_levels(signed=True)),
            second=nearest(unsigned),
            of_root=False,
            least=float(unsigned[unsigned > 0].min()),
        ),
        Candidate(
            name="E4M3 m, E4M4 sqrt(v)",
            first=nearest(minifloat_levels(4, 3, signed=True)),
            second=nearest(small),
            least=float(small[small > 0].min()),
        ),
        Candidate(
            name="square m, square sqrt(v)", first=square(127), second=square(255), least=1 / 255**2
        ),
    ]


def through(book: Book, values: Tensor, least: float) -> Tensor:
    """Values after one encoding; `least` is the smallest result for what was not zero."""
    top = values.abs().amax(1, keepdim=True)
    scale = torch.where(top > 0, top, 1.0)
    coded = book(values / scale)
    if least:
        coded = torch.where((values > 0) & (coded < least), least, coded)
    return coded * scale


def kernel_books(m: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Moments after one encoding by what the package uses."""
    results = []
    for encode, decode, values, dtype in (
        (encode_first_twin, decode_first_twin, m, torch.int8),
        (encode_second_twin, decode_second_twin, exact_sqrt(v), torch.uint8),
    ):
        codes = torch.empty(values.numel(), dtype=dtype)
        scales = torch.empty(values.numel() // BLOCK)
        encode(values.flatten(), codes, scales)
        results.append(decode(codes, scales).view_as(values))
    return results[0], results[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    relative: float  # |u - u32| / |u32| over all steps
    largest: float  # |u|


def bound_of(step: int, beta1: float, beta2: float) -> float:
    """What |u| of exact AdamW cannot exceed."""
    ratio = beta1**2 / beta2
    total = sum(ratio**i for i in range(step))
    unbiased = math.sqrt(1 - beta2**step) / (1 - beta1**step)
    return (1 - beta1) / math.sqrt(1 - beta2) * math.sqrt(total) * unbiased


def simulate(
    gradients: Tensor,
    betas: tuple[float, float],
    store: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    *,
    bounded: bool = False,
) -> Errors:
    """AdamW's updates with stored moments against those with fp32 moments."""
    beta1, beta2 = betas
    exact_m = exact_v = m = v = torch.zeros_like(gradients[0])
    error = norm = largest = 0.0
    for step, gradient in enumerate(gradients, start=1):
        exact_m = beta1 * exact_m + (1 - beta1) * gradient
        exact_v = beta2 * exact_v + (1 - beta2) * gradient.square()
        m = beta1 * m + (1 - beta1) * gradient
        v = beta2 * v + (1 - beta2) * gradient.square()
        unbiased = [1 - beta1**step, math.sqrt(1 - beta2**step)]
        exact = exact_m / unbiased[0] / (exact_v.sqrt() / unbiased[1] + EPS)
        update = m / unbiased[0] / (v.sqrt() / unbiased[1] + EPS)
        if bounded:
            bound = bound_of(step, beta1, beta2)
            update = update.clamp(-bound, bound)
        error += float((update - exact).square().sum())
        norm += float(exact.square().sum())
        largest = max(largest, float(update.abs().max()))
        m, v = store(m, v)
    return Errors(relative=math.sqrt(error / norm), largest=largest)


def storing(candidate: Candidate, *, floor: bool) -> Callable:
    least = candidate.least if floor else 0.0

    def store(m: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        m = through(candidate.first, m, 0.0)
        if candidate.of_root:
            return m, through(candidate.second, v.sqrt(), least).square()
        return m, through(candidate.second, v, least)

    return store


def with_outliers(gradients: Tensor) -> Tensor:
    """One element in 4096 of every step multiplied by 1000."""
    generator = torch.Generator().manual_seed(0)
    hit = torch.rand(gradients.shape, generator=generator) < 1 / 4096
    return torch.where(hit, 1000 * gradients, gradients)


def rows_of(
    gradients: Tensor, betas: tuple[float, float]
) -> Iterator[tuple[str, list[Errors | None]]]:
    """What is in a row of the table: without guards, with the floor, with floor and bound."""
    yield "fp32", [simulate(gradients, betas, lambda m, v: (m, v))]
    yield (
        "bf16 to nearest",
        [simulate(gradients, betas, lambda m, v: (m.bfloat16().float(), v.bfloat16().float()))],
    )
    for candidate in candidates():
        guards = ((False, False), (True, False), (True, True))
        yield (
            candidate.name,
            [
                simulate(gradients, betas, storing(candidate, floor=floor), bounded=bounded)
                for floor, bounded in guards
            ],
        )
    used = simulate(gradients, betas, kernel_books, bounded=True)
    yield "as the package stores it", [None, None, used]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    gradients = record(parser.parse_args().steps)
    print(f"{len(gradients)} steps, {gradients[0].numel()} elements\n")
    print("| moments | no guard | floor | floor and bound |\n|---|---|---|---|")
    for title, values, betas in (
        ("betas (0.9, 0.95)", gradients, (0.9, 0.95)),
        ("betas (0.9, 0.999)", gradients, (0.9, 0.999)),
        ("the same with outliers", with_outliers(gradients), (0.9, 0.999)),
    ):
        print(f"| **{title}** | | | |")
        for name, found in rows_of(values, betas):
            cells = ["" if e is None else f"{e.relative:.3f} / {e.largest:.3g}" for e in found]
            print(f"| {name} | {' | '.join(cells + [''] * (3 - len(cells)))} |", flush=True)


if __name__ == "__main__":
    main()
