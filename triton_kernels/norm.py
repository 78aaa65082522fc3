"""Norms by blocks of 256 elements: fp32 in a fixed order within a block, fp64 across blocks.

A block means the same elements at every world size, so a norm does not depend on how the elements
are spread over ranks (up to fp64 rounding). The order is that of halving: element i is added to
element i + 128, those sums to the ones 64 further, and so on, which a GPU and torch do alike.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations  # `tl` is not imported

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .launch import is_available, kernel, launch
from .quantize import BLOCK

if TYPE_CHECKING:
    import triton.language as tl

__all__ = ["block_powers", "block_powers_twin", "launch_norm", "norm_kernel"]

CHUNK = 512 * BLOCK  # elements; a chunk and its square stay in the second-level cache
PROGRAM_BLOCKS = 8
KINDS = {1.0: "1", 2.0: "2", math.inf: "inf"}  # the orders that the kernel knows


@kernel
def add_halves(values, BLOCKS: tl.constexpr, HALF: tl.constexpr):
    """[BLOCKS, HALF]: the first half of each row of [BLOCKS, 2 * HALF] plus the second."""
    return tl.sum(tl.reshape(values, (BLOCKS, 2, HALF)), axis=1)


@kernel
def norm_kernel(
    flat,  # [n] fp32
    powers,  # [n / 256] fp32, written
    found,  # [1] fp32, set to 1 if anything is Inf or NaN
    num_blocks,
    KIND: tl.constexpr,  # "1", "2", "inf"
    BLOCKS: tl.constexpr,  # blocks of one program
):
    """One program reads BLOCKS blocks once, for their powers and for the flag."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    here = block < num_blocks
    index = block[:, None] * 256 + tl.arange(0, 256)[None, :]
    value = tl.load(flat + index, mask=here[:, None], other=0.0)
    # Bits compare like magnitudes, and unlike tl.max of values they keep a NaN.
    top = tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    tl.store(found + tl.zeros_like(block), 1.0, mask=top >= 0x7F800000)
    if KIND == "inf":
        total = top.to(tl.float32, bitcast=True)
    else:
        terms = value * value if KIND == "2" else tl.abs(value)
        terms = add_halves(terms, BLOCKS, 128)
        terms = add_halves(terms, BLOCKS, 64)
        terms = add_halves(terms, BLOCKS, 32)
        terms = add_halves(terms, BLOCKS, 16)
        terms = add_halves(terms, BLOCKS, 8)
        terms = add_halves(terms, BLOCKS, 4)
        terms = add_halves(terms, BLOCKS, 2)
        total = tl.reshape(add_halves(terms, BLOCKS, 1), (BLOCKS,))
    tl.store(powers + block, total, mask=here)


def block_powers(flat: Tensor, p: float, found: Tensor | None = None) -> Tensor:
    """Sum of |x|^p in each block, or the block's largest |x| for p = inf (least for -inf).

    Args:
        flat: [n] fp32, contiguous.
        p: the order of the norm.
        found: [1] fp32, set to 1 if anything in `flat` is Inf or NaN, and left alone if nothing is.

    Returns:
        [ceil(n / 256)] fp64; NaN where the block holds one.
    """
    if is_available(flat.device) and p in KINDS and flat.numel() % BLOCK == 0:
        return launch_norm(flat, p, found)
    return block_powers_twin(flat, p, found)


def launch_norm(flat: Tensor, p: float, found: Tensor | None = None) -> Tensor:
    """`block_powers` by Triton, or by its interpreter, for p = 1, 2, inf and whole blocks."""
    num_blocks = flat.numel() // BLOCK
    powers = flat.new_empty(num_blocks)
    flag = flat.new_zeros(1) if found is None else found
    programs = -(-num_blocks // PROGRAM_BLOCKS)
    constants = (KINDS[p], PROGRAM_BLOCKS)
    launch("norm_kernel", programs, (flat, powers, flag), (num_blocks,), constants, num_warps=4)
    return powers.double()


def block_powers_twin(flat: Tensor, p: float, found: Tensor | None = None) -> Tensor:
    """`block_powers` in torch, for every p."""
    whole = flat.numel() // BLOCK * BLOCK
    chunk_numel = CHUNK if flat.device.type == "cpu" else max(whole, 1)
    parts = [_powers(chunk.view(-1, BLOCK), p) for chunk in flat[:whole].split(chunk_numel)]
    if whole < flat.numel():
        rest = flat.new_zeros(1, BLOCK) if p != -math.inf else flat[whole:].view(1, -1)
        rest[0, : flat.numel() - whole] = flat[whole:]
        parts.append(_powers(rest, p))
    if found is not None:
        found.masked_fill_(~flat.isfinite().all(), 1)
    return torch.cat(parts) if parts else flat.new_empty(0, dtype=torch.float64)


def _powers(blocks: Tensor, p: float) -> Tensor:
    if blocks.numel() == 0:
        return blocks.new_empty(0, dtype=torch.float64)
    if p == math.inf:
        return blocks.abs().amax(1).double()
    if p == -math.inf:
        return blocks.abs().amin(1).double()
    if p == 0:
        return (blocks != 0).sum(1).double()
    if p not in KINDS:
        return blocks.abs().double().pow(p).sum(1)
    terms = blocks.square() if p == 2 else blocks.abs()
    while terms.shape[1] > 16:
        half = terms.shape[1] // 2
        terms = terms[:, :half].add_(terms[:, half:])
    terms = terms.t().contiguous()  # short rows are slow to add
    while terms.shape[0] > 1:
        half = terms.shape[0] // 2
        terms = terms[:half].add_(terms[half:])
    return terms[0].double()
