"""Rounding fp32 to bf16 by integers: nearest, stochastic, and split into two exact halves.

Only integer operations, so that Triton on a GPU, its interpreter and torch agree bit for bit. Each
kernel has a torch twin. Kernels see bf16 as int16 bits.

The split: a bf16 value is its fp32 master rounded to the nearest, and the remainder the signed
distance to it in units of the last fp32 place, which always fits 16 bits.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations  # `tl` is not imported

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .launch import kernel

if TYPE_CHECKING:
    import triton.language as tl

__all__ = [
    "join",
    "join_master",
    "random_words",
    "random_words_twin",
    "round_nearest",
    "round_nearest_twin",
    "round_stochastic",
    "round_stochastic_twin",
    "split",
    "split_master",
    "upcast",
]

QUIET_NAN = 0x7FC00000
PHILOX_ROUNDS = 7  # the fewest that pass BigCrush; Salmon et al. 2011, table 2


# --- in kernels


@kernel
def upcast(half):
    """The fp32 value of bf16 bits."""
    return (half.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@kernel
def round_nearest(value):
    """The bits of fp32 values rounded to the nearest bf16, ties to even; a NaN is canonical."""
    bits = value.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(value != value, 0x7FC0, rounded).to(tl.int16)


@kernel
def round_stochastic(value, random):
    """The bits of fp32 values rounded to one of the two nearest bf16; see the twin."""
    bits = value.to(tl.int32, bitcast=True)
    rounded = (bits + tl.where(tl.abs(value) < float("inf"), random, 0)) >> 16
    return tl.where(value != value, 0x7FC0, rounded).to(tl.int16)


@kernel
def split(master):
    """The bits of the upper half, and the remainder, of fp32 values."""
    bits = master.to(tl.int32, bitcast=True)
    bits = tl.where(master != master, 0x7FC00000, bits)
    low = bits.to(tl.int16)
    high = (bits >> 16) + (low < 0).to(tl.int32)
    return high.to(tl.int16), low


@kernel
def join(high, remainder):
    """The fp32 values of two halves; total, as the twin."""
    upper = high.to(tl.int32) << 16
    master = (upper + remainder.to(tl.int32)).to(tl.float32, bitcast=True)
    return tl.where(master != master, upper.to(tl.float32, bitcast=True), master)


@kernel
def random_words(seed, step, first, BLOCK: tl.constexpr):
    """[BLOCK] 32 random bits for each element from `first` on; see the twin."""
    four = first // 4 + tl.arange(0, BLOCK // 4).to(tl.int64)
    low = four.to(tl.uint32)
    high = (four >> 32).to(tl.uint32)
    zero = low * 0
    w0, w1, w2, w3 = tl.philox(seed, low, high, zero + step.to(tl.uint32), zero, 7)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return tl.reshape(words, (BLOCK,)).to(tl.int32, bitcast=True)


# --- the twins


def round_nearest_twin(value: Tensor) -> Tensor:
    """[n] bf16: fp32 values rounded to the nearest, ties to even; a NaN is canonical."""
    bits = value.view(torch.int32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = torch.where(value.isnan(), QUIET_NAN >> 16, rounded)
    return rounded.to(torch.int16).view(torch.bfloat16)


def round_stochastic_twin(value: Tensor, random: Tensor) -> Tensor:
    """[n] bf16: fp32 values rounded up or down so that the mean is right.

    Args:
        value: [n] fp32. Infinity stays; a NaN is canonical. A value above the largest bf16 may
            become infinite.
        random: [n] int32 below 2^16, uniform.
    """
    bits = value.view(torch.int32)
    rounded = (bits + torch.where(value.isfinite(), random, 0)) >> 16
    rounded = torch.where(value.isnan(), QUIET_NAN >> 16, rounded)
    return rounded.to(torch.int16).view(torch.bfloat16)


def random_words_twin(seed: int, step: int, first: int, numel: int, device: torch.device) -> Tensor:
    """[numel] int32: 32 random bits for each element from `first` on, the same wherever they are.

    One Philox call serves four elements. Source: Salmon, Moraes, Dror, Shaw, "Parallel random
    numbers: as easy as 1, 2, 3", SC 2011, section 3 (Philox4x32, 7 rounds).

    Args:
        seed: of the whole run.
        step: of the element's parameter.
        first: a multiple of 4; the index in model space of the first element.
        numel: a multiple of 4.
        device: of the result.
    """
    four = torch.arange(first // 4, (first + numel) // 4, dtype=torch.int64, device=device)
    mask = 0xFFFFFFFF
    c0, c1 = four & mask, four >> 32
    c2, c3 = torch.full_like(four, step & mask), torch.zeros_like(four)
    k0, k1 = seed & mask, (seed >> 32) & mask
    for _ in range(PHILOX_ROUNDS):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # wraps; the bits are those of the product
        c0, c1, c2, c3 = (
            ((b >> 32) & mask) ^ c1 ^ k0,
            b & mask,
            ((a >> 32) & mask) ^ c3 ^ k1,
            a & mask,
        )
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return torch.stack((c0, c1, c2, c3), dim=1).flatten().to(torch.int32)


def split_master(master: Tensor, high: Tensor, remainder: Tensor) -> None:
    """Write fp32 `master` into its two halves, exactly.

    The bf16 half is the nearest one, ties away from zero (torch's cast rounds ties to even: the
    two differ by one bf16 step in about 8 of a million values). A NaN is made canonical first,
    since a NaN with its payload in the low bits would round to -0.0.

    Args:
        master: [n] fp32.
        high: [n] bf16, written.
        remainder: [n] int16, written.
    """
    bits = master.view(torch.int32)
    bits = torch.where(torch.isnan(master), QUIET_NAN, bits)
    low = bits.to(torch.int16)  # keeps the low 16 bits
    upper = (bits >> 16) + (low < 0)
    remainder.copy_(low)
    high.view(torch.int16).copy_(upper)


def join_master(high: Tensor, remainder: Tensor, master: Tensor) -> None:
    """Write the fp32 value of two halves to `master`; the exact inverse of `split_master`.

    Total: also right for a `high` that somebody wrote over a stale remainder. Zero with a negative
    remainder and infinity with a positive one are no image of `split_master`, and their sum would
    be a NaN; the remainder then counts as 0, so that a written 0 or infinity stays what it is.

    Args:
        high: [n] bf16.
        remainder: [n] int16.
        master: [n] fp32, written.
    """
    upper = high.view(torch.int16).to(torch.int32) << 16
    # A negative remainder borrows one from the upper half.
    torch.add(upper, remainder.to(torch.int32), out=master.view(torch.int32))
    torch.where(master.isnan(), upper.view(torch.float32), master, out=master)
